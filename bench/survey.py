"""
What one machine does with one model: `uv run python -m bench.survey --model Qwen/Qwen3-0.6B`, or `--quick`.

Seconds to load; prefill, decoding at few and many rows, judging and an update; peak memory; the same with kernels off
where there is a GPU; how far sampler and trainer disagree on log-probabilities before the first update, in the model's
type and in those of 16 bits; how far the gradient is off, with Gwen's attention and with MLX's; and what the ledger and
the pre-flight predict. One JSON file holds all of it, and one row of a Markdown table the figures that a reader
compares. Left out: other engines.

Axes: B prompts, G completions of each, N = B * G rows, P prompt and T completion tokens.
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import cpu_blas  # noqa: F401  (before mlx)
import mlx.core as mx
from mlx.utils import tree_flatten

import gwen
import lora
import preflight
import update
from bench import harness, judging, ledger
from bench.harness import Learning
from config import Config
from flags import Parser, fail
from layers import attention, lm_head
from machine import gpu
from step import policy

QUICK = {"batch": 2, "groups": 4, "prompt_tokens": 64, "max_tokens": 32, "runs": 1}  # two minutes on a laptop
ROWS = (1, 4, 16, 64)  # at which decoding is timed
FEW = {"batch": 1, "groups": 2, "prompt_tokens": 16, "max_tokens": 16}  # a CPU's 16-bit matmuls are slow
PHASES = ("prefill_s", "decode_s", "judge_s", "update_s")


def seconds(function: Callable[[], Any], runs: int) -> float:
    """Median seconds of a call, after one that is not counted."""
    marks = []
    for _ in range(runs + 1):
        begin = time.perf_counter()
        function()
        marks.append(time.perf_counter() - begin)
    return statistics.median(marks[1:])


def rollouts(subject: Learning) -> dict[str, Any]:
    """Tokens a second of decoding at each number of rows, and of the prefill of a step."""
    args, rates, most = subject.args, {}, subject.args.batch * subject.args.groups
    for num_rows in sorted({*(rows for rows in ROWS if rows < most), most}):
        stats = [subject.rollout(num_rows).stats for _ in range(args.runs + 1)][1:]  # the first makes the kernels
        decode_s = statistics.median(one.decode_s for one in stats)
        rates[num_rows] = num_rows * (args.max_tokens - 1) / decode_s
    prefill_s = statistics.median(one.prefill_s for one in stats)
    prefill_tok_s = args.batch * args.prompt_tokens / prefill_s
    return {"decode_tok_s": rates, "decode_s": decode_s, "prefill_s": prefill_s, "prefill_tok_s": prefill_tok_s}


def judged(subject: Learning) -> dict[str, float]:
    """Evaluations a second of a judge that reads the probabilities of scores, its preamble included."""
    work = judging.make_work(subject.args, subject.tokenizer)
    how: dict[str, Any] = {"model": subject.model, "tokenizer": judging.Legible(subject.tokenizer)}
    with lora.disabled(subject.model):
        judge_s = seconds(lambda: judging.run_ours(work, **how, mode="logits", chunk_size=24), subject.args.runs)
    return {"judge_s": judge_s, "judge_eval_s": len(work.segments) / judge_s}


def updates(subject: Learning) -> dict[str, Any]:
    """Tokens a second of an update, and what its first one found of the policy that sampled against the trainer's."""
    args, found = subject.args, list[update.UpdateResult]()
    held, once = subject.rollout(args.batch * args.groups), subject.updates()
    update_s = seconds(lambda: found.append(once(held, harness.advantages(args), 1e-6)), args.runs)
    means = found[0].means
    agreement = {f"mismatch/{name}": means[name] for name in policy.MISMATCH} | {"kl": means["kl"]}
    return {"update_s": update_s, "update_tok_s": held.mask.size / update_s, "agreement": agreement}


def gradient_errors(subject: Learning) -> dict[str, float]:
    """
    How far the adapters' gradient on one prompt is off with Gwen's gradient of attention, and with MLX's own.

    Both as shares of the gradient with the plain expression, which has float32 scores.
    """
    model, tokens = subject.model, mx.array(subject.rows(1))

    def loss(parameters: dict[str, Any]) -> mx.array:
        model.update(parameters)
        hidden = model.hidden(tokens[:, :-1])
        return lm_head.token_logprobs(hidden, model.head_weight, tokens[:, 1:])[0].sum()

    def gradient(attend: Callable[..., mx.array]) -> mx.array:
        with mock.patch.object(attention, "attention", attend):
            found = tree_flatten(mx.grad(loss)(model.trainable_parameters()))
            return mx.concatenate([array.reshape(-1) for _, array in found])

    def of_mlx(queries: mx.array, keys: mx.array, values: mx.array, mask: str) -> mx.array:
        scale = queries.shape[-1] ** -0.5
        return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask=mask)

    exact, *found = map(gradient, (attention.attention_ref, attention.attention, of_mlx))
    errors: Any = [(mx.linalg.norm(one - exact) / mx.linalg.norm(exact)).item() for one in found]
    return dict(zip(("gwen", "mlx"), errors, strict=True))


def in_16_bits(subject: Learning) -> dict[str, dict[str, float]]:
    """What a first update of few tokens finds of the policy that sampled, by type of 16 bits other than the model's."""
    few = {name: min(most, getattr(subject.args, name)) for name, most in FEW.items()}
    args = argparse.Namespace(**vars(subject.args) | few | {"runs": 1})
    config = subject.config.but(**{name: few[name] for name in few if name != "prompt_tokens"})
    found = {}
    for name, dtype in gwen.DTYPES.items():
        if dtype not in (mx.float32, subject.model.head_weight.dtype):
            found[name] = updates(harness.learning(args, config, dtype))["agreement"]
    return found


def predictions(subject: Learning, peaks: dict[str, float]) -> dict[str, float]:
    """Seconds of each phase of a step by the ledger, and its peak memory by the pre-flight."""
    (_, config, model, _), prompt_tokens, dtype = subject, subject.args.prompt_tokens, subject.model.head_weight.dtype
    chip = str(mx.device_info().get("device_name", "")).removeprefix("Apple ")
    measured = ledger.Machine(peaks["bandwidth_gb_s"] * 1e9, {dtype: peaks["matmul_tflops"] * 1e12})
    work = ledger.StepWork(model.config, dtype, config, prompt_tokens, gpu.on_gpu())
    machine = ledger.MACHINES.get(chip, measured)
    held = {phase.name: phase.times * phase.seconds(machine, dtype) for phase in ledger.make(work)}
    return {
        **{f"{name}_s": held[name] for name in ("prefill", "decode", "judge")},
        "update_s": held["forward"] + held["backward"] + held["optimizer"],
        "peak_gb": preflight.estimate(subject.demand, preflight.settle(subject.demand)).total / 1e9,
    }


def measure(args: argparse.Namespace, config: Config) -> dict[str, Any]:
    """All figures of one model on this machine."""
    begin = time.perf_counter()
    subject = harness.learning(args, config)
    figures: dict[str, Any] = {"load_s": time.perf_counter() - begin}
    dtype = subject.model.head_weight.dtype
    bandwidth, rate = harness.memory_bandwidth(), harness.matmul_rate(dtype)
    figures["peaks"] = {"bandwidth_gb_s": bandwidth / 1e9, "matmul_tflops": rate / 1e12}
    mx.reset_peak_memory()
    figures |= rollouts(subject) | updates(subject)
    figures["gradient_error"] = gradient_errors(subject)
    figures["peak_gb"] = mx.get_peak_memory() / 1e9
    figures |= judged(subject)
    figures["step_s"] = sum(figures[name] for name in ("prefill_s", "decode_s", "update_s"))
    if gpu.on_gpu():
        with mock.patch.dict(os.environ, GWEN_KERNELS="off"):
            figures["kernels_off"] = rollouts(subject) | updates(subject) | judged(subject)
    figures["dtype"] = str(dtype).removeprefix("mlx.core.")
    figures["predicted"] = predictions(subject, figures["peaks"])
    figures["agreement_16_bits"] = in_16_bits(subject)
    return figures


def row(args: argparse.Namespace, figures: dict[str, Any], machine: str) -> dict[str, str]:
    """One row of the table in docs/benchmarks.md, by column."""
    off, gaps = figures.get("kernels_off"), {figures["dtype"]: figures["agreement"]} | figures["agreement_16_bits"]
    shares = [figures["predicted"][name] / figures[name] for name in (*PHASES, "peak_gb")]
    return {
        "machine": machine,
        "memory": f"{gpu.memory_size() / 1e9:.0f} GB",
        "model": args.model,
        "dtype": figures["dtype"],
        "B x G, P + T": f"{args.batch} x {args.groups}, {args.prompt_tokens} + {args.max_tokens}",
        "load s": f"{figures['load_s']:.1f}",
        "prefill tok/s": f"{figures['prefill_tok_s']:.0f}",
        "decode tok/s by rows": ", ".join(f"{rows}: {rate:.0f}" for rows, rate in figures["decode_tok_s"].items()),
        "judge eval/s": f"{figures['judge_eval_s']:.1f}",
        "update tok/s": f"{figures['update_tok_s']:.0f}",
        "step s": f"{figures['step_s']:.1f}",
        "peak GB": f"{figures['peak_gb']:.2f}",
        "kernels off: prefill, decode, judge, update": ", ".join(f"{figures[name] / off[name]:.2f}" for name in PHASES)
        if off
        else "no GPU",
        "log-probability gap, mean and largest": "; ".join(
            f"{dtype}: {gap['mismatch/logprob_abs_mean']:.2g}, {gap['mismatch/logprob_abs_max']:.2g}"
            for dtype, gap in gaps.items()
        ),
        "error of the gradient: Gwen's, MLX's": ", ".join(
            f"{figures['gradient_error'][name]:.1%}" for name in ("gwen", "mlx")
        ),
        "predicted / measured: prefill, decode, judge, update, peak": ", ".join(f"{share:.2f}" for share in shares),
    }


def write(args: argparse.Namespace) -> None:
    """Measures, prints the row, and writes the file. OSError when it cannot be written."""
    path, config = Path(args.out), harness.settings(args, args.model)
    with path.open("a", encoding="utf-8"):  # before minutes of measuring
        pass
    figures, held = measure(args, config), harness.environment()
    columns = row(args, figures, str(gpu.environment("")["machine"]))
    line = f"| {' | '.join(columns.values())} |"
    path.write_text(json.dumps({"config": vars(args), "row": line, **figures, **held}, indent=1) + "\n", "utf-8")
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}\n{line}")
    print(f"{path}: all figures. The row belongs into docs/benchmarks.md; a pull request with both is welcome.")


def main(argv: list[str] | None = None) -> None:
    parser = Parser("bench.survey", "Measure this machine: a JSON file and a row for the table in docs/benchmarks.md.")
    least = harness.add_step(parser) | harness.add_numbers(parser, {"runs": (2, 1, "timed runs of each phase")})
    parser.add_argument("--quick", action="store_true", help="in two minutes, with shapes of its own")
    parser.add_argument("--out", default="bench-report.json", metavar="FILE", help="(default: bench-report.json)")
    try:
        args = harness.parse(parser, argv, least)
        vars(args).update(QUICK if args.quick else {})
        write(args)
    except (ValueError, OSError) as error:
        fail(error)


if __name__ == "__main__":
    main()
