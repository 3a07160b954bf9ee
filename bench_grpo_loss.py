"""
The loss over Qwen's vocabulary with its gradient: `uv run bench_grpo_loss.py --impl ours` against `--impl reference`.

Hidden states and a head in, the clipped GRPO loss and its gradients out: by the hidden states, and with `--head
trained` by the head too. "ours" is `lm_head.token_logprobs`; "reference" is `lm_head.token_logprobs_ref`, the plain
expression, which both give log-probabilities and entropies. A process measures one of them, since their peaks must not
mix. `--gradcheck` compares the two instead, on random or, with `--model`, on real weights.

On policy the old log-probabilities are the step's own; off policy they are those plus noise, and the clip is at work.
`peak_bytes` is MLX's peak from the first call on, inputs included.

Axes: B rows, T positions, D hidden, V vocabulary, M positions of a part of the check.
"""

import argparse
import json
import math
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import cpu_blas
import mlx.core as mx

import grpo
import gwen
from flags import Parser, check_least, fail
from layers import lm_head

TOLERANCES = {"loss": 1e-4, "logprob": 5e-3, "dlogits": 5e-2, "dhidden": 5e-2, "dhead": 5e-2}
CHECKED_AT_ONCE = 64  # positions whose (M, V) gradients are compared at once, 39 MB each with Qwen's vocabulary


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


def loss_of(args: argparse.Namespace, work: LossWork, logprobs: mx.array) -> mx.array:
    """The clipped loss, a mean over all tokens."""
    old_logprobs = mx.stop_gradient(logprobs) if work.old_logprobs is None else work.old_logprobs
    tokens = grpo.Tokens(logprobs, old_logprobs, work.advantages, mx.ones(logprobs.shape))
    return grpo.LOSSES["dapo"](tokens, grpo.Objective(epsilon=args.epsilon, epsilon_high=args.epsilon_high)).value


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
        noise = mx.random.normal(logprobs.shape, key=keys[4])
        work = work._replace(old_logprobs=logprobs + args.old_logp_noise_scale * noise)
    mx.eval(work)
    return work


# ---- the measurement


def make_step(args: argparse.Namespace, work: LossWork) -> Callable[[], Any]:
    """One call: loss, mean entropy and gradients, computed when it returns."""

    def objective(hidden: mx.array, head: mx.array) -> tuple[mx.array, mx.array]:
        logprobs, entropy = logprobs_of(args, args.impl, hidden, head, work.ids)
        return loss_of(args, work, logprobs), mx.stop_gradient(entropy).mean()

    gradient = mx.value_and_grad(objective, argnums=(0, 1) if args.head == "trained" else (0,))

    def step() -> float:
        (loss, entropy), gradients = gradient(work.hidden, work.head)
        mx.eval(loss, entropy, gradients)  # wait: this is what is timed
        return float(loss)

    return step


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """The record that is printed."""
    work = make_work(args)
    step = make_step(args, work)
    mx.clear_cache()
    mx.reset_peak_memory()
    mem_after_alloc = mx.get_active_memory()
    begin = time.perf_counter()
    loss = step()
    first_call_s = time.perf_counter() - begin
    for _ in range(args.warmup):
        step()
    seconds = []
    for _ in range(args.iters):
        begin = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - begin)
    return {
        "impl": args.impl,
        "mode": args.mode,
        "device": str(mx.default_device()),
        "shape": {"batch": args.batch, "time": args.time, "hidden": args.hidden, "vocab": args.vocab},
        "dtype": args.dtype,
        "head": args.head,
        "loss": loss,
        "first_call_s": round(first_call_s, 4),
        "avg_step_ms": round(sum(seconds) / len(seconds) * 1e3, 2),
        "min_step_ms": round(min(seconds) * 1e3, 2),
        "mem_after_alloc": mem_after_alloc,
        "mem_after_run": mx.get_active_memory(),
        "peak_bytes": mx.get_peak_memory(),
        "blas": cpu_blas.description,
    }


# ---- the check


class Error(NamedTuple):
    """The largest difference from the reference, absolute and in units of the reference's largest value."""

    absolute: float = 0.0
    largest: float = 0.0  # value of the reference

    @property
    def relative(self) -> float:
        return self.absolute / self.largest if self.largest else float("inf" if self.absolute else 0)

    def after(self, ours: mx.array, reference: mx.array) -> "Error":
        """The error of one more part. What is not a number is infinitely wrong."""
        ours, reference = ours.astype(mx.float32), reference.astype(mx.float32)
        difference = float(mx.abs(ours - reference).max())
        absolute = difference if math.isfinite(difference) else math.inf
        return Error(max(self.absolute, absolute), max(self.largest, float(mx.abs(reference).max())))


def check(args: argparse.Namespace) -> dict[str, Error]:
    """
    Errors of ours against the reference: loss, log-probabilities, and gradients by logits, hidden states and head.

    Ours has no logits. Their gradient is read off where it equals another one: with the identity as hidden states and
    the logits, transposed, as a trained head, the gradient of the head is that of the logits.
    """
    work = make_work(args)
    ids = work.ids.reshape(1, -1)
    hidden = work.hidden.reshape(1, ids.size, -1)
    parts = [slice(begin, begin + CHECKED_AT_ONCE) for begin in range(0, ids.size, CHECKED_AT_ONCE)]

    def logprobs_by(impl: str, hidden: mx.array, head: mx.array, part: slice, trained: bool = True) -> mx.array:
        settings = argparse.Namespace(**vars(args) | {"head": "trained" if trained else "frozen"})
        return logprobs_of(settings, impl, hidden, head, ids[:, part])[0]

    everything, trained = slice(0, ids.size), args.head == "trained"
    ours = logprobs_by("ours", hidden, work.head, everything, trained)
    reference = mx.concatenate([logprobs_by("reference", hidden[:, part], work.head, part) for part in parts], axis=1)
    loss, slopes = mx.value_and_grad(lambda logprobs: loss_of(args, work, logprobs.reshape(work.ids.shape)))(reference)
    errors = {
        "loss": Error().after(loss_of(args, work, ours.reshape(work.ids.shape)), loss),
        "logprob": Error().after(ours, reference),
        "dlogits": Error(),
        "dhidden": Error(),
    }

    def gradients(impl: str, hidden: mx.array, head: mx.array, part: slice, trained: bool = True) -> tuple[Any, Any]:
        """By `hidden` and by `head`, when `slopes` is what reaches each log-probability."""
        gradient = mx.grad(
            lambda h, w: (logprobs_by(impl, h, w, part, trained) * slopes[:, part]).sum(), argnums=(0, 1)
        )
        return gradient(hidden, head)

    d_hidden, d_head = gradients("ours", hidden, work.head, everything, trained)
    d_head_ref = mx.zeros(work.head.shape, mx.float32)
    for part in parts:
        d_hidden_ref, d_head_part = gradients("reference", hidden[:, part], work.head, part)
        errors["dhidden"] = errors["dhidden"].after(d_hidden[:, part], d_hidden_ref)
        d_head_ref = d_head_ref + d_head_part.astype(mx.float32)
        logits = hidden[0, part].astype(mx.float32) @ work.head.astype(mx.float32).T  # (M, V)
        pair = [gradients(impl, mx.eye(len(logits))[None], logits.T, part)[1] for impl in ("ours", "reference")]
        errors["dlogits"] = errors["dlogits"].after(*pair)
        mx.eval(d_head_ref)  # wait: the next part may use this one's memory
    if trained:
        errors["dhead"] = Error().after(d_head, d_head_ref)
    return errors


def report(args: argparse.Namespace, errors: dict[str, Error]) -> bool:
    """Prints the errors, last as JSON; whether all of them, absolute and relative, are within their tolerances."""
    fine = {}
    for name, error in errors.items():
        tolerance = TOLERANCES[name]
        fine[name] = max(error.absolute, error.relative) <= tolerance
        verdict = "ok" if fine[name] else "FAILED"
        print(
            f"{name:<8} | absolute {error.absolute:.2e} | relative {error.relative:.2e} | {tolerance:.0e} | {verdict}"
        )
    record = {name: {"abs": error.absolute, "rel": error.relative, "ok": fine[name]} for name, error in errors.items()}
    print(json.dumps({"gradcheck": record, "dtype": args.dtype, "mode": args.mode, "ok": all(fine.values())}))
    return all(fine.values())


# ---- the command


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The settings, checked. ValueError names the flag that is wrong."""
    parser = Parser("bench_grpo_loss.py", "Time and memory of the loss over a large vocabulary.")
    parser.add_argument("--impl", choices=("ours", "reference"), default="ours")
    parser.add_argument("--mode", choices=("on_policy", "off_policy"), default="on_policy")
    parser.add_argument("--batch", type=int, default=1, help="B, rows")
    parser.add_argument("--time", type=int, default=2048, help="T, positions of a row")
    parser.add_argument("--hidden", type=int, default=256, help="D, width of the hidden states")
    parser.add_argument("--head", choices=lm_head.HEADS, default="frozen", help="whether the head has a gradient")
    parser.add_argument("--vocab", type=int, default=151_936, help="V")
    parser.add_argument("--dtype", choices=tuple(gwen.DTYPES), default="float32", help="of hidden states and head")
    parser.add_argument("--iters", type=int, default=3, help="timed calls")
    parser.add_argument("--warmup", type=int, default=1, help="calls that are not timed, after the first")
    parser.add_argument("--old-logp-noise-scale", type=float, default=0.1, help="off policy: deviation of the noise")
    parser.add_argument("--epsilon", type=float, default=0.2)
    parser.add_argument("--epsilon-high", type=float, default=0.2)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument(
        "--gradcheck", action="store_true", help="compares ours with the reference; exit status 1 if off"
    )
    parser.add_argument("--model", help="hidden states and head of this model, instead of random ones")
    args = parser.parse_args(argv)
    lowest = {"batch": 1, "time": 1, "hidden": 1, "vocab": 2, "iters": 1, "warmup": 0}
    check_least(args, **lowest, old_logp_noise_scale=0, epsilon=0, epsilon_high=0)
    if not 0 < args.temperature < math.inf:
        raise ValueError(f"--temperature is {args.temperature}; it must be a finite number above 0")
    return args


def main(argv: list[str] | None = None) -> None:
    try:
        args = parse(argv)
        if not args.gradcheck:
            print(json.dumps(measure(args)))
        elif not report(args, check(args)):
            sys.exit(1)
    except (ValueError, OSError) as error:
        fail(error)


if __name__ == "__main__":
    main()
