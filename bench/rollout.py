"""
Rollouts of ours against another engine's on the same work: what `bench_rollout.py` and `bench_rollout_vllm_mlx.py`
share.

All engines get the same token ids, temperature, completion lengths and, at their best, number of rows at once. Before
anything is timed, greedy completions must show that they compute the same. Where end tokens end rows, as they do in a
trained model, every engine draws its own completions and lengths; with `--ignore-eos` or a random model the work is
the same to the token, and every length is asserted.

`prefill_ms` is the time to process prompts, as each engine reports it; mlx_lm's `stats()` bill a prompt's last token to
decoding. `decode_ms` is the rest of the run. Left out: text, prompts of unequal length, judging (`bench/judging.py`).

Axes: B prompts, G completions of each, N = B * G rows, prompt-major, P prompt positions.
"""

import argparse
import functools
import itertools
import json
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

import gwen
import preflight
import sampler
from bench import harness
from bench.harness import Sample
from config import Config, Sizes
from disk import hub
from flags import Parser, report_mistakes
from machine import chips, gpu
from machine.output import guard_output
from settings.sources import read_environment
from step.rows import USUAL_ROWS

AGREEING_TOKENS = (
    16  # of greedy completions; engines that compute the same have parted long before by a mistake
)


class Work(NamedTuple):
    prompts: list[
        tuple[list[int], ...]
    ]  # (B,) each in runs of ids, with which others may begin too
    group_size: int
    limits: list[int]  # (N,) most tokens of each row
    eos_ids: tuple[int, ...]  # none: every row has exactly as many tokens as its limit
    temperature: float
    batch_size: int  # most rows that are decoded at once
    seed: int
    with_logprobs: bool = True  # whether those of the drawn tokens are read

    @property
    def runs(self) -> list[tuple[list[int], ...]]:
        """The prompt of each row."""
        return [prompt for prompt in self.prompts for _ in range(self.group_size)]

    @property
    def rows(self) -> list[list[int]]:
        return list(map(join_runs, self.runs))


def join_runs(runs: Iterable[list[int]]) -> list[int]:
    return list(itertools.chain(*runs))


class Timing(NamedTuple):
    """What an engine made of the work, and how long it took."""

    completions: list[list[int]]  # ids of each row, the end token included
    logprobs: list[
        list[float]
    ]  # of the same tokens; no rows from an engine that does not give them
    prefill_s: float
    decode_s: float

    @property
    def seconds(self) -> float:
        return self.prefill_s + self.decode_s


Engine = Callable[[Work], Timing]


class Rival(NamedTuple):
    """Another engine, run in every way that it can be."""

    name: str  # of its module
    result: str  # the line of the result, with {} for the verdict
    engines: dict[str, Engine]


def run_ours(work: Work, *, model: gwen.Model) -> Timing:
    params = sampler.SamplingParams(work.limits, work.temperature, eos_ids=work.eos_ids)
    how: Any = {"group_size": work.group_size, "key": work.seed, "batch_size": work.batch_size}
    begin = time.perf_counter()
    result = sampler.rollout(model, list(map(join_runs, work.prompts)), params, **how)
    seconds, prefill_s = time.perf_counter() - begin, result.stats.prefill_s
    logprobs = [
        row[:length]
        for row, length in zip(np.array(result.logprobs).tolist(), result.lengths, strict=True)
    ]
    return Timing(result.ids, logprobs, prefill_s, seconds - prefill_s)


# ---- agreement and measurement


def check_agreement(model: gwen.Model, engines: dict[str, Engine], work: Work) -> None:
    """ValueError unless each engine's greedy tokens, of four rows, are our model's likeliest, within its rounding."""
    prompts, group_size = work.prompts[:2], min(work.group_size, 2)
    limits = [AGREEING_TOKENS] * (len(prompts) * group_size)
    probe = work._replace(prompts=prompts, group_size=group_size, limits=limits, temperature=0.0)
    for name, engine in engines.items():
        for prompt, ids in zip(probe.rows, engine(probe).completions, strict=True):
            logits = model(mx.array([prompt + ids]))[0, len(prompt) - 1 : -1]  # (T, V)
            chosen = mx.take_along_axis(logits, mx.array(ids)[:, None], axis=-1)[:, 0]
            rounding = 8 * mx.finfo(logits.dtype).eps * mx.abs(logits).max(-1)
            length = next(
                (place for place, one in enumerate(ids, 1) if one in work.eos_ids), AGREEING_TOKENS
            )
            agrees = [*np.array(logits.max(-1) - chosen <= rounding).tolist(), len(ids) == length]
            if not all(agrees):
                where = f"token {agrees.index(False)} of a greedy completion"
                raise ValueError(
                    f"{name} and our model part at {where}; they do not compute the same"
                )


def measure(
    engines: dict[str, Engine], work: Work, warmup: int, runs: int
) -> dict[str, list[Sample]]:
    """Timed rollouts of each engine; where end tokens end no row, all have the lengths asked for."""
    samples = harness.run_in_turn(
        {name: functools.partial(run, work) for name, run in engines.items()}, warmup, runs
    )
    for name, its in samples.items() if not work.eos_ids else []:
        lengths = [[len(completion) for completion in sample.run.completions] for sample in its]
        assert lengths == [work.limits] * runs, f"{name} made {lengths} tokens, not {work.limits}"
    return samples


def summarize(samples: list[Sample], model: gwen.Model) -> dict[str, float]:
    tokens = sum(len(completion) for sample in samples for completion in sample.run.completions)
    return {"tokens": tokens} | harness.summarize(
        samples,
        model,
        prefill_ms=1e3 * np.mean([sample.run.prefill_s for sample in samples]),
        decode_ms=1e3 * np.mean([sample.run.decode_s for sample in samples]),
        tok_s=tokens / sum(sample.run.seconds for sample in samples),
    )


def roofline(args: argparse.Namespace, model: gwen.Model, entry: dict[str, float]) -> float:
    """Says, and returns, what the bytes that decoding reads take at least, as a share of the time of ours."""
    length = round(entry["tokens"] / (args.runs * args.batch * args.groups))
    config = Config.from_flags(batch=args.batch, groups=args.groups, max_tokens=length)
    demand = preflight.RunDemand(
        model.config, model.head_weight.dtype, config, [args.prompt_tokens] * args.batch
    )
    num_bytes = preflight.phase_costs(demand, Sizes(args.rollout_batch_size, preflight.BUDGET, 0))[
        "decode"
    ].bytes
    source = mx.zeros(
        (2**26,), mx.float32
    )  # 268 MB, far more than any cache holds, read and written
    bandwidth = 2 * source.nbytes / chips.least_seconds(lambda: source + 1)
    share = 1e3 * num_bytes / bandwidth / entry["decode_ms"]
    print(
        f"Roofline: {num_bytes / 1e9:.3f} GB that decoding reads, at {bandwidth / 1e9:.1f} GB/s, take {share:.3f} of "
        f"the {entry['decode_ms']:.1f} ms of ours"
    )
    return round(share, 4)


# ---- settings and the report


NUMBERS: harness.Numbers = {
    "batch": (2, 1, "B, prompts"),
    "groups": (2, 1, "G, completions of each"),
    "max_tokens": (64, 1, "most tokens of a completion"),
    "prompt_tokens": (64, 1, "P, tokens of a prompt, drawn at random"),
    "warmup": (1, 0, "rounds that are not timed"),
    "runs": (2, 1, "timed rounds"),
    "seed": (0, 0, "of prompts, lengths and sampling"),
    "judge_runs": (1, 1, "timed rounds of judging"),
}


def parse(argv: list[str] | None, program: str, description: str) -> argparse.Namespace:
    """The settings of a command line, checked and filled up. ValueError names the flag that is wrong."""
    parser = Parser(program, description)
    parser.add_argument("--temp", type=float, default=0.8, help="sampling temperature")
    parser.add_argument(
        "--model", help="as train.py's (default: train.py's on a GPU, else random:30m)"
    )
    parser.add_argument(
        "--rollout-batch-size", type=int, help="rows decoded at once (default: all, at most 64)"
    )
    parser.add_argument(
        "--ignore-eos", action="store_true", help="every completion has --max-tokens tokens"
    )
    parser.add_argument(
        "--benchmark-judge", action="store_true", help="time judging too, B x G answers"
    )
    chunk = read_environment().get("judge_chunk_size", 24)
    numbers = NUMBERS | {"judge_chunk_size": (chunk, 1, "evaluations that ours makes at once")}
    args = harness.parse_settings(parser, argv, numbers, rollout_batch_size=1, temp=0)
    args.rollout_batch_size = args.rollout_batch_size or min(args.batch * args.groups, USUAL_ROWS)
    args.model = args.model or (gwen.choose_model(None)[0] if gpu.on_gpu() else "random:30m")
    return args


def make_work(args: argparse.Namespace, config: hub.ModelConfig) -> Work:
    limits = [args.max_tokens] * (args.batch * args.groups)
    ordinary = np.setdiff1d(np.arange(min(config.vocab_size, 8192)), config.end_ids)
    drawn = (
        np.random.default_rng(args.seed).choice(ordinary, (args.batch, args.prompt_tokens)).tolist()
    )
    prompts: list[tuple[list[int], ...]] = [(ids[:-1], ids[-1:]) for ids in drawn]
    eos_ids = () if args.ignore_eos else config.end_ids
    return Work(
        prompts, args.groups, limits, eos_ids, args.temp, args.rollout_batch_size, args.seed
    )


def compare_engines(
    args: argparse.Namespace, directory: Path, make_rival: Callable[[Any, Path], Rival]
) -> None:
    """
    Checks, measures and reports ours and a rival, given mlx_lm's model of the directory, on the model of a directory.

    The result is against the fastest way to run the rival that gives what a rollout needs, log-probabilities, or the
    fastest of all where none does.
    """
    model = gwen.load_model(directory)
    rival = make_rival(harness.load_peer(directory, model.head_weight.dtype), directory)
    work = make_work(args, model.config)
    engines: dict[str, Engine] = {"ours": functools.partial(run_ours, model=model), **rival.engines}
    check_agreement(model, engines, work)
    config = vars(args) | {"pairs": args.batch * args.groups}
    dtype = str(model.head_weight.dtype).removeprefix("mlx.core.")
    print(
        "Config: B={batch} G={groups} pairs={pairs} max_tokens={max_tokens} temp={temp:g} warmup={warmup} "
        "runs={runs}".format(**config)
    )
    print(
        f"Model: {args.model} in {dtype}, {args.prompt_tokens} prompt tokens, {args.rollout_batch_size} rows at once"
    )
    samples = measure(engines, work, args.warmup, args.runs)
    entries = {name: summarize(samples[name], model) for name in engines}
    for name, entry in entries.items():  # in the form and width that other people's scripts know
        print(
            f"{name:<{len(rival.name) + 2}} | mean {entry['mean_ms']:.1f} ms | std {entry['std_ms']:.1f} ms | "
            f"total_out_toks {entry['tokens']} | throughput {entry['tok_s']:.1f} tok/s"
        )
    if len({entry["tokens"] for entry in entries.values()}) > 1:
        print(
            "Note: rows ended at different tokens, so times are not of equal work; --ignore-eos makes them so"
        )
    useful = [name for name in rival.engines if samples[name][0].run.logprobs] or rival.engines
    best = min(useful, key=lambda name: entries[name]["mean_ms"])
    print(f"Rounds: than ours {best} took {harness.round_ratios(samples['ours'], samples[best])}")
    share = roofline(args, model, entries["ours"])
    ratio = entries[best]["mean_ms"] / entries["ours"]["mean_ms"]
    print(rival.result.format(harness.describe_ratio(ratio)))
    record = {
        "config": config,
        "engines": entries,
        "ratio": round(ratio, 4),
        "best": best,
        "roofline_frac": share,
    }
    if args.benchmark_judge:
        from bench import judging

        record["judge"] = judging.benchmark(args, model, hub.load_tokenizer(directory), rival)
    print(json.dumps(record | harness.describe_environment(rival.name.replace("_", "-"))))


@guard_output()
def main(
    argv: list[str] | None, program: str, description: str, make_rival: Callable[[Any, Path], Rival]
) -> None:
    """A command that compares rollouts of ours and a rival."""
    with report_mistakes():
        args = parse(argv, program, description)
        with harness.model_directory(args.model) as directory:
            compare_engines(args, directory, make_rival)
