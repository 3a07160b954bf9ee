"""
The loss over Qwen's vocabulary with its gradient: `uv run python -m bench.loss --impl ours` against `--impl reference`.

Hidden states and a head in, the clipped GRPO loss and its gradients out: by the hidden states, and with `--head
trained` by the head too. "ours" is `lm_head.token_logprobs`; "reference" is `lm_head.token_logprobs_ref`, the plain
expression, which both give log-probabilities and entropies. A process measures one of them, since their peaks must not
mix. `peak_bytes` is MLX's peak from the first call on, inputs included.

Axes: B rows, T positions, D hidden, V vocabulary.
"""

import argparse
import json
import time
from typing import Any

import cpu_blas
import mlx.core as mx

import grpo
import gwen
from bench import harness
from flags import Parser, fail
from layers import lm_head


def make_work(args: argparse.Namespace) -> tuple[mx.array, mx.array, mx.array, mx.array]:
    """Seeded hidden states (B, T, D), a head (V, D), ids (B, T) and advantages (B,)."""
    keys, dtype = mx.random.split(mx.random.key(0), 5), gwen.DTYPES[args.dtype]
    hidden = mx.random.normal((args.batch, args.time, args.hidden), key=keys[0]).astype(dtype)
    # logits of deviation 2: some tokens are likely, most are not
    head = (mx.random.normal((args.vocab, args.hidden), key=keys[1]) * 2 * args.hidden**-0.5).astype(dtype)
    ids = mx.random.randint(0, args.vocab, (args.batch, args.time), key=keys[2])
    work = hidden, head, ids, mx.random.normal((args.batch,), key=keys[3])
    mx.eval(work)
    return work


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """The record that is printed."""
    hidden, head, ids, advantages = make_work(args)

    def objective(hidden: mx.array, head: mx.array) -> tuple[mx.array, mx.array]:
        if args.impl == "reference":
            logprobs, entropy = lm_head.token_logprobs_ref(hidden, head, ids)
        else:
            logprobs, entropy = lm_head.token_logprobs(hidden, head, ids, head=args.head)
        tokens = grpo.Tokens(logprobs, mx.stop_gradient(logprobs), advantages, mx.ones(logprobs.shape))
        return grpo.LOSSES["dapo"](tokens, grpo.Objective()).value, mx.stop_gradient(entropy).mean()

    gradient = mx.value_and_grad(objective, argnums=(0, 1) if args.head == "trained" else (0,))
    mx.clear_cache()
    mx.reset_peak_memory()
    held, seconds = mx.get_active_memory(), []
    for _ in range(1 + args.warmup + args.iters):
        begin = time.perf_counter()
        (loss, entropy), gradients = gradient(hidden, head)
        mx.eval(loss, entropy, gradients)  # wait: this is what is timed
        seconds.append(time.perf_counter() - begin)
        del gradients
    timed = seconds[1 + args.warmup :]
    return {
        **{name: getattr(args, name) for name in ("impl", "dtype", "head")},
        "shape": {name: getattr(args, name) for name in ("batch", "time", "hidden", "vocab")},
        "device": str(mx.default_device()),
        "loss": loss.item(),
        "entropy": entropy.item(),
        "first_call_s": round(seconds[0], 4),
        "avg_step_ms": round(sum(timed) / len(timed) * 1e3, 2),
        "min_step_ms": round(min(timed) * 1e3, 2),
        "mem_after_alloc": held,
        "mem_after_run": mx.get_active_memory(),
        "peak_bytes": mx.get_peak_memory(),
        "blas": cpu_blas.description,
    }


NUMBERS: harness.Numbers = {
    "batch": (1, 1, "B, rows"),
    "time": (2048, 1, "T, positions of a row"),
    "hidden": (256, 1, "D, width of the hidden states"),
    "vocab": (151_936, 2, "V"),
    "iters": (3, 1, "timed calls"),
    "warmup": (1, 0, "calls that are not timed, after the first"),
}


def main(argv: list[str] | None = None) -> None:
    parser = Parser("bench.loss", "Time and memory of the loss over a large vocabulary.")
    least = harness.add_numbers(parser, NUMBERS)
    parser.add_argument("--impl", choices=("ours", "reference"), default="ours")
    parser.add_argument("--head", choices=lm_head.HEADS, default="frozen", help="whether the head has a gradient")
    parser.add_argument("--dtype", choices=tuple(gwen.DTYPES), default="float32", help="of hidden states and head")
    try:
        print(json.dumps(measure(harness.parse(parser, argv, least))))
    except ValueError as error:
        fail(error)


if __name__ == "__main__":
    main()
