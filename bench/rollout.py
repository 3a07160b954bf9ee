"""
Times rollouts of Gwen and of another engine on the same work. `bench_rollout.py` and
`bench_rollout_vllm_mlx.py` share this file.

All engines get the same token ids, temperature and completion lengths. In their best configuration
they also decode the same number of rows at once. Before anything is timed, greedy completions must
show that all engines compute the same. If end tokens end rows, as with a trained model, every
engine samples completions and lengths of its own. With `--ignore-eos` or a random model, all
engines do the same work to the token, and every length is asserted.

`prefill_ms` is the time to process prompts, as each engine reports it; mlx_lm's `stats()` count a
prompt's last token as decoding. `decode_ms` is the rest of the run. This file does not cover text,
prompts of unequal length, or judging (bench/judging.py).

Axes: B prompts, G completions per prompt, N = B * G rows, prompt-major, P prompt positions, T
completion positions, V vocabulary.
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
import sampler
from bench import harness
from bench.harness import Sample
from config import Config, Sizes
from disk import hub, model_choice
from flags import Parser, report_mistakes
from forecast import memory_estimate, time_estimate
from machine import chips, gpu
from machine.output import guard_output
from settings.sources import read_environment
from step.rows import USUAL_ROWS

# length of the greedy completions; engines that do not compute the same differ much earlier
AGREEING_TOKENS = 16


class Work(NamedTuple):
    """The rollout that every engine does."""

    prompts: list[tuple[list[int], ...]]  # (B,) each divided into runs of ids, which prompts share
    group_size: int
    limits: list[int]  # (N,) most tokens of each row
    eos_ids: tuple[int, ...]  # if empty, every row has exactly as many tokens as its limit
    temperature: float
    batch_size: int  # most rows that are decoded at once
    seed: int
    with_logprobs: bool = True  # whether to read the log-probabilities of sampled tokens

    @property
    def runs(self) -> list[tuple[list[int], ...]]:
        """The prompt of each row, divided into runs of ids."""
        return [prompt for prompt in self.prompts for _ in range(self.group_size)]

    @property
    def rows(self) -> list[list[int]]:
        """The prompt of each row."""
        return [join_runs(runs) for runs in self.runs]


def join_runs(runs: Iterable[list[int]]) -> list[int]:
    return list(itertools.chain(*runs))


class Timing(NamedTuple):
    """An engine's completions, and the seconds that they took."""

    completions: list[list[int]]  # ids of each row, the end token included
    logprobs: list[list[float]]  # of the same tokens; empty if the engine returns none
    prefill_s: float
    decode_s: float

    @property
    def seconds(self) -> float:
        return self.prefill_s + self.decode_s


Engine = Callable[[Work], Timing]


class Rival(NamedTuple):
    """Another engine, in all its useful configurations."""

    name: str  # the name of its module
    result: str  # the line of the result, where {} stands for the verdict
    engines: dict[str, Engine]  # by configuration


def run_gwen(work: Work, *, model: gwen.Model) -> Timing:
    params = sampler.SamplingParams(work.limits, work.temperature, eos_ids=work.eos_ids)
    begin = time.perf_counter()
    result = sampler.rollout(
        model,
        [join_runs(runs) for runs in work.prompts],
        params,
        group_size=work.group_size,
        key=work.seed,
        batch_size=work.batch_size,
    )
    seconds = time.perf_counter() - begin
    prefill_s = result.stats.prefill_s
    padded_logprobs = np.array(result.logprobs).tolist()
    logprobs = [row[:length] for row, length in zip(padded_logprobs, result.lengths, strict=True)]
    return Timing(result.ids, logprobs, prefill_s, seconds - prefill_s)


# ---- agreement and measurement


def check_agreement(model: gwen.Model, engines: dict[str, Engine], work: Work) -> None:
    """
    Checks greedy completions of four rows: up to rounding, each token must be the likeliest.

    Raises ValueError if an engine chooses another token, or ends a completion early or late.
    """
    prompts = work.prompts[:2]
    group_size = min(work.group_size, 2)
    limits = [AGREEING_TOKENS] * (len(prompts) * group_size)
    probe = work._replace(prompts=prompts, group_size=group_size, limits=limits, temperature=0.0)
    for name, engine in engines.items():
        for prompt, ids in zip(probe.rows, engine(probe).completions, strict=True):
            all_logits = model(mx.array([prompt + ids]))  # (1, P + T, V)
            logits = all_logits[0, len(prompt) - 1 : -1]  # (T, V)
            columns = mx.array(ids)[:, None]
            chosen = mx.take_along_axis(logits, columns, axis=-1)[:, 0]
            epsilon = mx.finfo(logits.dtype).eps
            rounding = 8 * epsilon * mx.abs(logits).max(-1)
            is_likeliest = np.array(logits.max(-1) - chosen <= rounding).tolist()
            has_right_length = len(ids) == expected_length(ids, work.eos_ids)
            agrees = [*is_likeliest, has_right_length]
            if not all(agrees):
                raise ValueError(
                    f"{name} and our model part at token {agrees.index(False)} of a greedy "
                    "completion; they do not compute the same"
                )


def expected_length(ids: list[int], eos_ids: tuple[int, ...]) -> int:
    """The length of a greedy completion that ends at its first end token, or at the limit."""
    for length, token_id in enumerate(ids, 1):
        if token_id in eos_ids:
            return length
    return AGREEING_TOKENS


def measure(
    engines: dict[str, Engine], work: Work, warmup: int, runs: int
) -> dict[str, list[Sample]]:
    """Timed rollouts of each engine. Without end tokens all lengths must equal the limits."""
    bound_engines = {name: functools.partial(run, work) for name, run in engines.items()}
    samples_by_engine = harness.run_in_turn(bound_engines, warmup, runs)
    if not work.eos_ids:
        for name, samples in samples_by_engine.items():
            for sample in samples:
                lengths = list(map(len, sample.run.completions))
                assert lengths == work.limits, f"{name} made {lengths} tokens, not {work.limits}"
    return samples_by_engine


def summarize(samples: list[Sample], model: gwen.Model) -> dict[str, float]:
    """The figures of `harness.summarize`, and tokens, throughput, prefill and decode times."""
    tokens = sum(len(completion) for sample in samples for completion in sample.run.completions)
    prefill_s = np.mean([sample.run.prefill_s for sample in samples])
    decode_s = np.mean([sample.run.decode_s for sample in samples])
    return {"tokens": tokens} | harness.summarize(
        samples,
        model,
        prefill_ms=1e3 * prefill_s,
        decode_ms=1e3 * decode_s,
        tok_s=tokens / sum(sample.run.seconds for sample in samples),
    )


def measure_roofline(args: argparse.Namespace, model: gwen.Model, entry: dict[str, float]) -> float:
    """
    Prints and returns the least possible decode time, as a fraction of Gwen's decode time.

    The least time is the time to read the bytes that decoding needs. entry: Gwen's figures.
    """
    num_rows = args.batch * args.groups
    length = round(entry["tokens"] / (args.runs * num_rows))
    config = Config.from_flags(batch=args.batch, groups=args.groups, max_tokens=length)
    prompt_lengths = [args.prompt_tokens] * args.batch
    dtype = model.head_weight.dtype
    demand = memory_estimate.RunDemand(model.config, dtype, config, prompt_lengths)
    sizes = Sizes(args.rollout_batch_size, memory_estimate.BUDGET, 0)
    num_bytes = time_estimate.phase_costs(demand, sizes)["decode"].bytes

    # 268 MB, far more than any cache holds, read and written
    source = mx.zeros((2**26,), mx.float32)
    bandwidth = 2 * source.nbytes / chips.least_seconds(lambda: source + 1)
    fraction = 1e3 * num_bytes / bandwidth / entry["decode_ms"]
    print(
        f"Roofline: to read the {num_bytes / 1e9:.3f} GB of decoding at {bandwidth / 1e9:.1f} GB/s "
        f"takes {fraction:.3f} of the {entry['decode_ms']:.1f} ms of ours"
    )
    return round(fraction, 4)


# ---- settings and the report


NUMBERS: harness.Numbers = {
    "batch": (2, 1, "B, prompts"),
    "groups": (2, 1, "G, completions per prompt"),
    "max_tokens": (64, 1, "most tokens of a completion"),
    "prompt_tokens": (64, 1, "P, random tokens of a prompt"),
    "warmup": (1, 0, "untimed rounds"),
    "runs": (2, 1, "timed rounds"),
    "seed": (0, 0, "seed of prompts, lengths and sampling"),
    "judge_runs": (1, 1, "timed rounds of judging"),
}


def parse_flags(argv: list[str] | None, program: str, description: str) -> argparse.Namespace:
    """
    The settings from a command line, checked and completed.

    Raises ValueError, which names the flag, if a setting is wrong.
    """
    parser = Parser(program, description)
    parser.add_argument("--temp", type=float, default=0.8, help="sampling temperature")
    parser.add_argument(
        "--model",
        help="model, as in train.py (default with a GPU: as in train.py; without: random:30m)",
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
    chunk_size = read_environment().get("judge_chunk_size", 24)
    chunk_setting = (chunk_size, 1, "number of evaluations per batch of Gwen's judge")
    numbers = NUMBERS | {"judge_chunk_size": chunk_setting}
    args = harness.parse_settings(parser, argv, numbers, rollout_batch_size=1, temp=0)
    if not args.rollout_batch_size:
        args.rollout_batch_size = min(args.batch * args.groups, USUAL_ROWS)
    if not args.model:
        args.model = model_choice.choose_model(None)[0] if gpu.on_gpu() else "random:30m"
    return args


def make_work(args: argparse.Namespace, config: hub.ModelConfig) -> Work:
    """The rollout for these settings: random prompts without end tokens, each two runs of ids."""
    ordinary_ids = np.setdiff1d(np.arange(min(config.vocab_size, 8192)), config.end_ids)
    rng = np.random.default_rng(args.seed)
    prompt_ids = rng.choice(ordinary_ids, (args.batch, args.prompt_tokens)).tolist()
    return Work(
        prompts=[(ids[:-1], ids[-1:]) for ids in prompt_ids],
        group_size=args.groups,
        limits=[args.max_tokens] * (args.batch * args.groups),
        eos_ids=() if args.ignore_eos else config.end_ids,
        temperature=args.temp,
        batch_size=args.rollout_batch_size,
        seed=args.seed,
    )


def compare_engines(
    args: argparse.Namespace, directory: Path, make_rival: Callable[[Any, Path], Rival]
) -> None:
    """
    Checks, measures and reports Gwen and a rival on the model in a directory.

    make_rival: makes the rival from mlx_lm's model and the directory.

    The result compares Gwen with the rival's fastest configuration that returns log-probabilities,
    which training needs. If none returns them, it compares Gwen with the fastest of all.
    """
    model = gwen.load_model(directory)
    rival = make_rival(harness.load_peer(directory, model.head_weight.dtype), directory)
    work = make_work(args, model.config)
    engines: dict[str, Engine] = {"ours": functools.partial(run_gwen, model=model)}
    engines |= rival.engines
    check_agreement(model, engines, work)

    config = vars(args) | {"pairs": args.batch * args.groups}
    print_config(args, model)
    samples = measure(engines, work, args.warmup, args.runs)
    entries = {name: summarize(samples[name], model) for name in engines}
    print_entries(entries, len(rival.name) + 2)
    with_logprobs = [name for name in rival.engines if samples[name][0].run.logprobs]
    candidates = with_logprobs or list(rival.engines)
    best = min(candidates, key=lambda name: entries[name]["mean_ms"])
    rounds = harness.describe_rounds(samples["ours"], samples[best])
    print(f"Rounds, {best} against ours: {rounds}")
    fraction = measure_roofline(args, model, entries["ours"])
    ratio = entries[best]["mean_ms"] / entries["ours"]["mean_ms"]
    print(rival.result.format(harness.describe_ratio(ratio)))

    record = {
        "config": config,
        "engines": entries,
        "ratio": round(ratio, 4),
        "best": best,
        "roofline_frac": fraction,
    }
    if args.benchmark_judge:
        from bench import judging

        record["judge"] = judging.benchmark(args, model, hub.load_tokenizer(directory), rival)
    record |= harness.describe_environment(rival.name.replace("_", "-"))
    print(json.dumps(record))


def print_config(args: argparse.Namespace, model: gwen.Model) -> None:
    dtype = str(model.head_weight.dtype).removeprefix("mlx.core.")
    print(
        f"Config: B={args.batch} G={args.groups} pairs={args.batch * args.groups} "
        f"max_tokens={args.max_tokens} temp={args.temp:g} warmup={args.warmup} runs={args.runs}"
    )
    print(
        f"Model: {args.model} in {dtype}, {args.prompt_tokens} prompt tokens, "
        f"{args.rollout_batch_size} rows at once"
    )


def print_entries(entries: dict[str, dict[str, float]], width: int) -> None:
    """Prints a line for each engine, in the form that other people's scripts read."""
    for name, entry in entries.items():
        print(
            f"{name:<{width}} | mean {entry['mean_ms']:.1f} ms | std {entry['std_ms']:.1f} ms | "
            f"total_out_toks {entry['tokens']} | throughput {entry['tok_s']:.1f} tok/s"
        )
    if len({entry["tokens"] for entry in entries.values()}) > 1:
        print(
            "Note: rows ended at different tokens, so the engines did not do equal work; "
            "set --ignore-eos for equal work"
        )


@guard_output()
def main(
    argv: list[str] | None, program: str, description: str, make_rival: Callable[[Any, Path], Rival]
) -> None:
    """Runs the command that compares rollouts of Gwen and a rival."""
    with report_mistakes():
        args = parse_flags(argv, program, description)
        with harness.model_directory(args.model) as directory:
            compare_engines(args, directory, make_rival)
