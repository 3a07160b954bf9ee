"""
What one machine does with one model, in one command: `uv run bench_step.py --model M --report`, or `--quick`.

Seconds to load; prefill, decoding at few and many rows, judging and an update; peak memory; the same with kernels off
where there is a GPU; how far sampler and trainer disagree on log-probabilities before the first update, in the model's
type and in those of 16 bits; how far the gradient is off, with Gwen's attention and with MLX's; and what the ledger and
the pre-flight predict of it. One JSON file holds all of it, and one row of a Markdown table the figures that a reader
compares. Other engines are in bench_step.py and bench_rollout.py.

Axes: B prompts, G completions of each, N = B * G rows, P prompt and T completion tokens.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

import gpu
import grpo
import gwen
import lora
import micro_batch
import preflight
import sampler
import update
from bench import harness, launches, ledger
from config import Config
from layers import attention, lm_head, ops
from losses import policy

QUICK = {"batch": 2, "groups": 4, "prompt_tokens": 64, "max_tokens": 32, "runs": 1}  # two minutes on a laptop
ROWS = (1, 4, 16, 64)  # at which decoding is timed
FEW_TOKENS, FEW_ROWS = 16, 2  # with which agreement in other types is measured: a CPU's 16-bit matmuls are slow
CPU_LAUNCH_S = 3e-6  # of MLX's CPU backend, beside the work: 3 us an operation on an Intel Xeon


class Subject(NamedTuple):
    """What is measured."""

    args: argparse.Namespace
    config: Config
    model: gwen.Model
    tokenizer: Any
    prompts: list[list[int]]  # (B, P)


def timed(function: Callable[[], Any], runs: int) -> tuple[float, Any]:
    """Median seconds of a call, after one that is not counted, and what the last one gave."""
    function()
    seconds, result = [], None
    for _ in range(runs):
        begin = time.perf_counter()
        result = function()
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds), result


def rollout(subject: Subject, num_rows: int) -> sampler.Rollout:
    """Completions of exactly T tokens, so many rows at once, in groups as large as a step's where they suffice."""
    size = min(num_rows, subject.args.groups)
    prompts = [subject.prompts[place % len(subject.prompts)] for place in range(num_rows // size)]
    distinct = [[*prompt[:-1], place + 1] for place, prompt in enumerate(prompts)]
    params = sampler.SamplingParams(subject.args.max_tokens)
    return sampler.rollout(subject.model, distinct, params, group_size=size, key=subject.args.seed, batch_size=num_rows)


def rollouts(subject: Subject) -> dict[str, Any]:
    """Tokens a second of decoding at each number of rows, and of the prefill of a step."""
    args, decoded, prefilled = subject.args, {}, 0.0
    most = args.batch * args.groups
    for num_rows in sorted({*(rows for rows in ROWS if rows < most), most}):
        rollout(subject, num_rows)  # not counted: it makes the kernels
        stats = [rollout(subject, num_rows).stats for _ in range(args.runs)]
        decoded[num_rows] = num_rows * (args.max_tokens - 1) / statistics.median(one.decode_s for one in stats)
        prefilled = statistics.median(one.prefill_s for one in stats)
    return {
        "decode_tok_s": decoded,
        "prefill_s": prefilled,
        "prefill_tok_s": args.batch * args.prompt_tokens / prefilled,
    }


def judging(subject: Subject) -> dict[str, float]:
    """Evaluations a second of a judge that reads the probabilities of scores, its preamble included."""
    work, tokenizer = harness.make_judge_work(subject.args, subject.tokenizer), harness.Legible(subject.tokenizer)

    def judge() -> Any:
        with lora.disabled(subject.model):
            return harness.judge_ours(work, model=subject.model, tokenizer=tokenizer, mode="logits", chunk_size=24)

    seconds, _ = timed(judge, subject.args.runs)
    return {"judge_s": seconds, "judge_eval_s": len(work.ids) / seconds}


def updates(subject: Subject) -> dict[str, Any]:
    """Tokens a second of an update, and what its first one found of the policy that sampled against the trainer's."""
    args, config = subject.args, subject.config
    learner, held = update.Learner(subject.model, config), rollout(subject, args.batch * args.groups)
    rewards = np.array([[place * 7 % 5 / 4 for place in range(args.groups)]] * args.batch)
    advantages = mx.array(grpo.group_advantages(rewards).reshape(-1))
    rows = [[*prompt[:-1], place + 1] for place, prompt in enumerate(subject.prompts) for _ in range(args.groups)]
    found: list[update.UpdateResult] = []

    def once() -> None:
        batches = micro_batch.micro_batches(rows, held, config.train_token_budget, config.train_share_prefix)
        found.append(update.update(learner, batches, held, advantages, None, 1e-6))

    seconds, _ = timed(once, args.runs)
    means = found[0].means
    agreement = {f"mismatch/{name}": means[name] for name in policy.MISMATCH} | {"kl": means["kl"]}
    return {"update_s": seconds, "update_tok_s": held.mask.size / seconds, "agreement": agreement}


def gradient_errors(subject: Subject) -> dict[str, float]:
    """
    How far the adapters' gradient on one prompt is off with Gwen's gradient of attention, and with MLX's own.

    Both as shares of the gradient with the plain expression, which has float32 scores.
    """
    model, tokens = subject.model, mx.array(subject.prompts[:1])

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


def in_16_bits(subject: Subject) -> dict[str, dict[str, float]]:
    """What a first update of few tokens finds of the policy that sampled, by type of 16 bits other than the model's."""
    args = {"batch": 1, "groups": FEW_ROWS, "max_tokens": min(FEW_TOKENS, subject.args.max_tokens), "runs": 1}
    prompts = [subject.prompts[0][:FEW_TOKENS]]
    config = dataclasses.replace(subject.config, **{name: args[name] for name in ("batch", "groups", "max_tokens")})
    found = {}
    for name, dtype in gwen.DTYPES.items():
        if dtype not in (mx.float32, subject.model.head_weight.dtype):
            model, _ = gwen.load(config.model, dtype)
            lora.apply(model, config.lora_rank, config.lora_scale, config.lora_targets)
            few = Subject(argparse.Namespace(**vars(subject.args) | args), config, model, subject.tokenizer, prompts)
            found[name] = updates(few)["agreement"]
    return found


@contextlib.contextmanager
def kernels(choice: str) -> Iterator[None]:
    """Inside, kernels are on or off."""
    before = os.environ.get("GWEN_KERNELS")
    os.environ["GWEN_KERNELS"] = choice
    try:
        yield
    finally:
        os.environ.pop("GWEN_KERNELS")
        if before is not None:
            os.environ["GWEN_KERNELS"] = before


def this_machine(subject: Subject) -> tuple[ledger.Machine, dict[str, float]]:
    """
    The machine at hand for the ledger, a chip of its table or by measured peaks; and these peaks.

    A CPU's are those that it reaches in the model's own work: bytes of swiglu, which is mostly an exponential, and
    bytes of a product with few rows, whose weights OpenBLAS packs before it multiplies.
    """
    model, args = subject.model, subject.args
    dtype, width = model.head_weight.dtype, model.config.intermediate_size
    bandwidth, rate = harness.memory_bandwidth(), harness.matmul_rate(dtype)
    peaks = {"bandwidth_gb_s": bandwidth / 1e9, "matmul_tflops": rate / 1e12}
    if gpu.on_gpu():
        chip = str(mx.device_info().get("device_name", "")).removeprefix("Apple ")
        return ledger.MACHINES.get(chip, ledger.Machine(bandwidth, {dtype: rate})), peaks
    gate_up, few = (
        mx.ones((256, 2 * width), dtype),
        mx.ones((args.batch * args.groups, model.config.hidden_size), dtype),
    )
    mx.eval(gate_up, few)

    def reached(function: Callable[..., mx.array], *arrays: mx.array) -> float:
        held = launches.trace(function, *arrays, on_gpu=False)
        return sum(one.read + one.written for one in held) / harness.best_seconds(lambda: function(*arrays))

    elementwise = reached(ops.swiglu, gate_up)
    products = reached(lambda x, weight: x @ weight.T, few, model.head_weight)
    peaks |= {"swiglu_gb_s": elementwise / 1e9, "few_rows_gb_s": products / 1e9}
    return ledger.Machine(elementwise, {dtype: rate}, launch_s=CPU_LAUNCH_S, matmul_bandwidth=products), peaks


def predictions(subject: Subject, machine: ledger.Machine) -> dict[str, float]:
    """Seconds of each phase of a step by the ledger, and its peak memory by the pre-flight."""
    work = ledger.StepWork(
        subject.model.config, subject.model.head_weight.dtype, subject.config, subject.args.prompt_tokens, gpu.on_gpu()
    )
    held = {phase.name: phase.times * phase.seconds(machine, work.dtype) for phase in ledger.make(work)}
    return {
        **{f"{name}_s": held[name] for name in ("prefill", "decode", "judge")},
        "update_s": held["forward"] + held["backward"] + held["optimizer"],
        "peak_gb": estimated_peak(subject) / 1e9,
    }


def estimated_peak(subject: Subject) -> int:
    """Bytes that the pre-flight says a step needs."""
    model, config = subject.model, subject.config
    lengths, layers = [subject.args.prompt_tokens] * config.batch, config.num_checkpointed(len(model.layers))
    return preflight.estimate(model.config, model.head_weight.dtype, config, lengths, layers).total


def measure(args: argparse.Namespace, config: Config) -> dict[str, Any]:
    """All figures of one model on this machine."""
    begin = time.perf_counter()
    model, tokenizer = gwen.load(config.model)
    figures: dict[str, Any] = {"load_s": time.perf_counter() - begin}
    lora.apply(model, config.lora_rank, config.lora_scale, config.lora_targets)
    ordinary = np.setdiff1d(np.arange(min(model.config.vocab_size, 8192)), model.config.eos_ids)
    prompts = np.random.default_rng(args.seed).choice(ordinary, (args.batch, args.prompt_tokens)).tolist()
    preflight.settle(model.config, model.head_weight.dtype, config, [args.prompt_tokens] * args.batch)
    subject = Subject(args, config, model, tokenizer, prompts)
    machine, figures["peaks"] = this_machine(subject)
    mx.reset_peak_memory()
    figures |= rollouts(subject) | updates(subject)
    figures["gradient_error"] = gradient_errors(subject)
    figures["peak_gb"] = mx.get_peak_memory() / 1e9
    figures |= judging(subject)
    most = max(figures["decode_tok_s"])
    figures["decode_s"] = most * (args.max_tokens - 1) / figures["decode_tok_s"][most]
    figures["step_s"] = sum(figures[f"{phase}_s"] for phase in ("prefill", "decode", "update"))
    if gpu.on_gpu():
        with kernels("off"):
            without = rollouts(subject) | updates(subject) | judging(subject)
        without["decode_s"] = most * (args.max_tokens - 1) / without["decode_tok_s"][most]
        figures["kernels_off"] = without
    figures["dtype"] = str(model.head_weight.dtype).removeprefix("mlx.core.")
    figures["predicted"] = predictions(subject, machine)
    figures["agreement_16_bits"] = in_16_bits(subject)
    return figures


COLUMNS = (
    "machine | memory | model | dtype | B x G, P + T | load s | prefill tok/s | decode tok/s by rows | judge eval/s | "
    "update tok/s | step s | peak GB | kernels off: prefill, decode, judge, update | "
    "log-probability gap, mean and largest | error of the gradient: Gwen's, MLX's | "
    "predicted / measured: prefill, decode, judge, update, peak"
)
PHASES = ("prefill_s", "decode_s", "judge_s", "update_s")


def row(args: argparse.Namespace, figures: dict[str, Any], machine: str) -> str:
    """One row of the table in docs/benchmarks.md."""
    off, gaps = figures.get("kernels_off"), {figures["dtype"]: figures["agreement"]} | figures["agreement_16_bits"]
    shares = [figures["predicted"][name] / figures[name] for name in (*PHASES, "peak_gb")]
    cells = [
        machine,
        f"{gpu.memory_size() / 1e9:.0f} GB",
        args.model,
        figures["dtype"],
        f"{args.batch} x {args.groups}, {args.prompt_tokens} + {args.max_tokens}",
        f"{figures['load_s']:.1f}",
        f"{figures['prefill_tok_s']:.0f}",
        ", ".join(f"{rows}: {rate:.0f}" for rows, rate in figures["decode_tok_s"].items()),
        f"{figures['judge_eval_s']:.1f}",
        f"{figures['update_tok_s']:.0f}",
        f"{figures['step_s']:.1f}",
        f"{figures['peak_gb']:.2f}",
        ", ".join(f"{figures[name] / off[name]:.2f}" for name in PHASES) if off else "no GPU",
        "; ".join(
            f"{dtype}: {gap['mismatch/logprob_abs_mean']:.2g}, {gap['mismatch/logprob_abs_max']:.2g}"
            for dtype, gap in gaps.items()
        ),
        ", ".join(f"{figures['gradient_error'][name]:.1%}" for name in ("gwen", "mlx")),
        ", ".join(f"{share:.2f}" for share in shares),
    ]
    return f"| {' | '.join(cells)} |"


def write(args: argparse.Namespace, config: Config) -> None:
    """Measures, prints the row, and writes the file. OSError when it cannot be written."""
    path = Path(args.out)
    with path.open("a", encoding="utf-8"):  # before minutes of measuring
        pass
    figures, held = measure(args, config), harness.environment()
    line = row(args, figures, str(gpu.environment("")["machine"]))
    path.write_text(json.dumps({"config": vars(args), "row": line, **figures, **held}, indent=1) + "\n", "utf-8")
    print(f"| {COLUMNS} |\n|{'---|' * (COLUMNS.count(' | ') + 1)}\n{line}")
    print(f"{path}: all figures. The row belongs into docs/benchmarks.md; a pull request with both is welcome.")
