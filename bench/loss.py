"""
The loss over Qwen's vocabulary with its gradient: `uv run python -m bench.loss --impl ours` against `--impl reference`.

Hidden states and a head in, the clipped GRPO loss and its gradients out: by the hidden states, and with `--head
trained` by the head too. "ours" is `lm_head.token_logprobs`; "reference" is `lm_head.token_logprobs_ref`, the plain
expression, which both give log-probabilities and entropies. A process measures one of them, since their peaks must not
mix. Tests compare what they compute; `--model` takes real weights.

Off policy the old log-probabilities are the step's own plus noise, and the clip is at work. `peak_bytes` is MLX's peak
from the first call on, inputs included.

Axes: B rows, T positions, D hidden, V vocabulary.
"""

import argparse
import json
import math
import time
from typing import Any, NamedTuple

import cpu_blas
import mlx.core as mx

import grpo
import gwen
from bench import harness
from flags import Parser, fail
from layers import lm_head

NOISE = 0.1  # deviation of the old log-probabilities off policy


class LossWork(NamedTuple):
    """One batch of the benchmark."""

    hidden: mx.array  # (B, T, D)
    head: mx.array  # (V, D)
    ids: mx.array  # (B, T)
    advantages: mx.array  # (B,)
    old_logprobs: mx.array | None  # (B, T); None on policy


def logprobs_of(args: argparse.Namespace, impl: str, hidden: mx.array, head: mx.array, ids: mx.array) -> Any:
    """Log-probabilities and entropies (B, T) by one of the two implementations."""
    if impl == "reference":
        return lm_head.token_logprobs_ref(hidden, head, ids, temperature=args.temperature)
    return lm_head.token_logprobs(hidden, head, ids, temperature=args.temperature, head=args.head, gradient="logprobs")


def loss_of(work: LossWork, logprobs: mx.array) -> mx.array:
    """The clipped loss, a mean over all tokens."""
    old_logprobs = mx.stop_gradient(logprobs) if work.old_logprobs is None else work.old_logprobs
    tokens = grpo.Tokens(logprobs, old_logprobs, work.advantages, mx.ones(logprobs.shape))
    return grpo.LOSSES["dapo"](tokens, grpo.Objective()).value


def make_work(args: argparse.Namespace) -> LossWork:
    """Seeded random inputs, or with `--model` hidden states and head of real weights, which then set D, V and dtype."""
    keys = mx.random.split(mx.random.key(0), 5)
    if args.model:
        model, _ = gwen.load(args.model)
        tokens = mx.random.randint(0, model.config.vocab_size, (args.batch, args.time + 1), key=keys[0])
        hidden, head, ids = model.hidden(tokens[:, :-1]), model.head_weight, tokens[:, 1:]
        args.vocab, args.hidden = head.shape
        args.dtype = str(head.dtype).removeprefix("mlx.core.")
    else:
        dtype = gwen.DTYPES[args.dtype]
        hidden = mx.random.normal((args.batch, args.time, args.hidden), key=keys[0]).astype(dtype)
        # logits of deviation 2: some tokens are likely, most are not
        head = (mx.random.normal((args.vocab, args.hidden), key=keys[1]) * 2 * args.hidden**-0.5).astype(dtype)
        ids = mx.random.randint(0, args.vocab, (args.batch, args.time), key=keys[2])
    work = LossWork(hidden, head, ids, mx.random.normal((args.batch,), key=keys[3]), None)
    if args.mode == "off_policy":
        logprobs, _ = lm_head.token_logprobs(hidden, head, ids, temperature=args.temperature, gradient="none")
        work = work._replace(old_logprobs=logprobs + NOISE * mx.random.normal(logprobs.shape, key=keys[4]))
    mx.eval(work)
    return work


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """The record that is printed."""
    work = make_work(args)

    def objective(hidden: mx.array, head: mx.array) -> tuple[mx.array, mx.array]:
        logprobs, entropy = logprobs_of(args, args.impl, hidden, head, work.ids)
        return loss_of(work, logprobs), mx.stop_gradient(entropy).mean()

    gradient = mx.value_and_grad(objective, argnums=(0, 1) if args.head == "trained" else (0,))
    mx.clear_cache()
    mx.reset_peak_memory()
    held, seconds = mx.get_active_memory(), []
    for _ in range(1 + args.warmup + args.iters):
        begin = time.perf_counter()
        (loss, entropy), gradients = gradient(work.hidden, work.head)
        mx.eval(loss, entropy, gradients)  # wait: this is what is timed
        seconds.append(time.perf_counter() - begin)
        del gradients
    timed = seconds[1 + args.warmup :]
    return {
        **{name: getattr(args, name) for name in ("impl", "mode", "dtype", "head")},
        "shape": {name: getattr(args, name) for name in ("batch", "time", "hidden", "vocab")},
        "device": str(mx.default_device()),
        "loss": loss.item(),
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


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The settings, checked. ValueError names the flag that is wrong."""
    parser = Parser("bench.loss", "Time and memory of the loss over a large vocabulary.")
    least = harness.add_numbers(parser, NUMBERS)
    parser.add_argument("--impl", choices=("ours", "reference"), default="ours")
    parser.add_argument("--mode", choices=("on_policy", "off_policy"), default="on_policy")
    parser.add_argument("--head", choices=lm_head.HEADS, default="frozen", help="whether the head has a gradient")
    parser.add_argument("--dtype", choices=tuple(gwen.DTYPES), default="float32", help="of hidden states and head")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--model", help="hidden states and head of this model, instead of random ones")
    args = harness.parse(parser, argv, least)
    if not 0 < args.temperature < math.inf:
        raise ValueError(f"--temperature is {args.temperature}; it must be a finite number above 0")
    return args


def main(argv: list[str] | None = None) -> None:
    try:
        print(json.dumps(measure(parse(argv))))
    except (ValueError, OSError) as error:
        fail(error)


if __name__ == "__main__":
    main()
