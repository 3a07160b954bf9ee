"""
Times rollouts by Gwen and by another engine on the same work.

`bench_rollout.py` and `bench_rollout_vllm_mlx.py` share this file. All engines get the same prompts
as token ids, the same temperature and the same limits on completion lengths. Each engine has at
least one configuration that decodes as many rows at once as Gwen does. Before anything is timed,
greedy completions must show that all engines compute the same results. With a trained model, each
row stops at an end token, so the engines sample completions of different lengths. With
`--ignore-eos` or a random model, all engines generate the same number of tokens, and every length
is checked.

`prefill_ms` is the time for processing prompts, as reported by each engine; mlx_lm's `stats()`
counts the last token of a prompt as decoding. `decode_ms` is the rest of a run's time. This file
does not cover text, prompts of unequal length, or judging (bench/judging.py).

Axes: B prompts, G completions per prompt, N = B * G rows in the order of their prompts, P prompt
positions, T completion positions, V tokens in the vocabulary.
"""

import argparse
import functools
import itertools
import json
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import cpu_blas  # noqa: F401  (before mlx)
import mlx.core as mx
import numpy as np

import gwen
import sampler
from bench import harness
from bench.harness import TimedRun
from config import Config, MemoryDependentSizes
from disk import hub, model_choice
from flags import Parser, exit_on_mistakes
from forecast import memory_estimate, time_estimate
from forecast.row_memory import USUAL_ROWS
from machine import chips, gpu
from machine.output import guard_output
from settings.sources import read_judge_chunk_size_from_environment

# the length of the greedy completions; engines that compute different results differ much earlier
AGREEING_TOKENS = 16


class RolloutWork(NamedTuple):
    """The prompts, limits and sampling parameters of the rollout that every engine does."""

    prompts: list[tuple[list[int], ...]]  # (B,) token ids, divided into parts that prompts share
    group_size: int
    limits: list[int]  # (N,) the maximum number of tokens in each row
    eos_ids: tuple[int, ...]  # if empty, each row has exactly as many tokens as its limit
    temperature: float
    batch_size: int  # the maximum number of rows decoded at once
    seed: int
    with_logprobs: bool = True  # whether to read the log-probabilities of sampled tokens

    @property
    def prompt_parts_by_row(self) -> list[tuple[list[int], ...]]:
        """The token ids of each row's prompt, divided into parts that prompts share."""
        return [prompt for prompt in self.prompts for _ in range(self.group_size)]

    @property
    def prompt_ids_by_row(self) -> list[list[int]]:
        """The token ids of each row's prompt."""
        return [concatenate_parts(parts) for parts in self.prompt_parts_by_row]


def concatenate_parts(id_parts: Iterable[list[int]]) -> list[int]:
    return list(itertools.chain(*id_parts))


class TimedRollout(NamedTuple):
    """The completions that an engine generated, and how long that took."""

    completions: list[list[int]]  # the token ids of each row, including the end token
    logprobs: list[list[float]]  # the tokens' log-probabilities; empty if the engine returns none
    prefill_s: float
    decode_s: float

    @property
    def seconds(self) -> float:
        return self.prefill_s + self.decode_s


Engine = Callable[[RolloutWork], TimedRollout]


class Rival(NamedTuple):
    """An engine that Gwen is compared with, in all its useful configurations."""

    name: str  # the name of the engine's Python module
    result: str  # the line that reports the result, with {} in place of the speed ratio
    engines: dict[str, Engine]  # the rival in each of its configurations, by name


def time_gwen_rollout(work: RolloutWork, *, model: gwen.Model) -> TimedRollout:
    params = sampler.SamplingParams(work.limits, work.temperature, eos_ids=work.eos_ids)
    begin = time.perf_counter()
    result = sampler.rollout(
        model,
        [concatenate_parts(parts) for parts in work.prompts],
        params,
        group_size=work.group_size,
        key=work.seed,
        batch_size=work.batch_size,
    )
    seconds = time.perf_counter() - begin
    prefill_s = result.stats.prefill_s
    padded_logprobs = np.array(result.logprobs).tolist()
    logprobs = [row[:length] for row, length in zip(padded_logprobs, result.lengths, strict=True)]
    return TimedRollout(result.ids, logprobs, prefill_s, seconds - prefill_s)


# ---- agreement and measurement


def refuse_engines_that_disagree(
    model: gwen.Model, engines: dict[str, Engine], work: RolloutWork
) -> None:
    """
    Raises ValueError if an engine's greedy completions disagree with Gwen's model.

    Up to four completions per engine are checked. Each token must be the likeliest token, up to
    rounding, and each completion must end at its first end token or at the length limit.
    """
    prompts = work.prompts[:2]
    group_size = min(work.group_size, 2)
    limits = [AGREEING_TOKENS] * (len(prompts) * group_size)
    probe = work._replace(prompts=prompts, group_size=group_size, limits=limits, temperature=0.0)
    for name, engine in engines.items():
        for prompt, ids in zip(probe.prompt_ids_by_row, engine(probe).completions, strict=True):
            all_logits = model(mx.array([prompt + ids]))  # (1, P + T, V)
            logits = all_logits[0, len(prompt) - 1 : -1]  # (T, V)
            columns = mx.array(ids)[:, None]
            chosen = mx.take_along_axis(logits, columns, axis=-1)[:, 0]
            epsilon = mx.finfo(logits.dtype).eps
            rounding = 8 * epsilon * mx.abs(logits).max(-1)
            is_likeliest = np.array(logits.max(-1) - chosen <= rounding).tolist()
            has_right_length = len(ids) == length_up_to_first_end(
                ids, work.eos_ids, AGREEING_TOKENS
            )
            agrees = [*is_likeliest, has_right_length]
            if not all(agrees):
                raise ValueError(
                    f"{name} and Gwen's model differ at token {agrees.index(False)} of a greedy "
                    "completion, so they do not compute the same results"
                )


def length_up_to_first_end(ids: list[int], eos_ids: tuple[int, ...], limit: int) -> int:
    """
    Returns the length of a completion up to and including its first end token.

    Returns `limit` if the completion has no end token.
    """
    for length, token_id in enumerate(ids, 1):
        if token_id in eos_ids:
            return length
    return limit


def measure_rollouts(
    engines: dict[str, Engine], work: RolloutWork, warmup: int, runs: int
) -> dict[str, list[TimedRun]]:
    """
    Returns timed rollouts of each engine.

    If the work has no end tokens, asserts that the length of each completion equals its limit.
    """
    bound_engines = {name: functools.partial(run, work) for name, run in engines.items()}
    samples_by_engine = harness.time_engines_in_turn(bound_engines, warmup, runs)
    if not work.eos_ids:
        for name, samples in samples_by_engine.items():
            for sample in samples:
                lengths = list(map(len, sample.run.completions))
                assert lengths == work.limits, f"{name} made {lengths} tokens, not {work.limits}"
    return samples_by_engine


def summarize_rollouts(samples: list[TimedRun], model: gwen.Model) -> dict[str, float]:
    """Returns an engine's times, peak memory, number of generated tokens, and tokens per second."""
    tokens = sum(len(completion) for sample in samples for completion in sample.run.completions)
    prefill_s = np.mean([sample.run.prefill_s for sample in samples])
    decode_s = np.mean([sample.run.decode_s for sample in samples])
    return {"tokens": tokens} | harness.summarize_times_and_peak(
        samples,
        model,
        prefill_ms=1e3 * prefill_s,
        decode_ms=1e3 * decode_s,
        tok_s=tokens / sum(sample.run.seconds for sample in samples),
    )


def measure_and_print_roofline_fraction(
    args: argparse.Namespace, model: gwen.Model, gwen_figures: dict[str, float]
) -> float:
    """
    Prints and returns the least possible decode time, as a fraction of Gwen's decode time.

    The least possible time is the time that the memory takes to deliver all the bytes that decoding
    must read.

    gwen_figures: the figures that `summarize_rollouts` returns for Gwen.
    """
    num_rows = args.batch * args.groups
    length = round(gwen_figures["tokens"] / (args.runs * num_rows))
    config = Config.from_flags(batch=args.batch, groups=args.groups, max_tokens=length)
    prompt_lengths = [args.prompt_tokens] * args.batch
    dtype = model.head_weight.dtype
    demand = memory_estimate.RunDemand(model.config, dtype, config, prompt_lengths)
    sizes = MemoryDependentSizes(args.rollout_batch_size, memory_estimate.BUDGET, 0)
    num_bytes = time_estimate.estimate_phase_costs(demand, sizes)["decode"].bytes

    # the bandwidth for reading and writing 268 MB, which is far larger than any cache
    source = mx.zeros((2**26,), mx.float32)
    bandwidth = 2 * source.nbytes / chips.measure_shortest_seconds(lambda: source + 1)
    fraction = 1e3 * num_bytes / bandwidth / gwen_figures["decode_ms"]
    print(
        f"Roofline: reading the {num_bytes / 1e9:.3f} GB that decoding needs, at "
        f"{bandwidth / 1e9:.1f} GB/s, would take {fraction:.3f} of Gwen's decode time of "
        f"{gwen_figures['decode_ms']:.1f} ms"
    )
    return round(fraction, 4)


# ---- settings and the report


NUMBERS: harness.Numbers = {
    "batch": (2, 1, "B, the number of prompts"),
    "groups": (2, 1, "G, the number of completions per prompt"),
    "max_tokens": (64, 1, "the maximum number of tokens in a completion"),
    "prompt_tokens": (64, 1, "P, the number of random tokens in a prompt"),
    "warmup": (1, 0, "the number of untimed rounds"),
    "runs": (2, 1, "the number of timed rounds"),
    "seed": (0, 0, "the seed of the prompts and of sampling"),
    "judge_runs": (1, 1, "the number of timed rounds of judging"),
}


def parse_flags(argv: list[str] | None, program: str, description: str) -> argparse.Namespace:
    """
    Returns the settings from a command line, after checking them and filling in defaults.

    Raises ValueError, which names the flag, if a setting is wrong.
    """
    parser = Parser(program, description)
    parser.add_argument(
        "--temp", type=float, default=0.8, help="the sampling temperature (default: 0.8)"
    )
    parser.add_argument(
        "--model",
        help="the model, as in train.py (default: on a GPU, the default of train.py; "
        "on a CPU, random:30m)",
    )
    parser.add_argument(
        "--rollout-batch-size",
        type=int,
        help="the number of completions decoded at once (default: all of them, but at most 64)",
    )
    parser.add_argument(
        "--ignore-eos",
        action="store_true",
        help="do not stop at end tokens, so that every completion has --max-tokens tokens",
    )
    parser.add_argument(
        "--benchmark-judge",
        action="store_true",
        help="also time the judging of --batch times --groups answers",
    )
    chunk_size = read_judge_chunk_size_from_environment().get("judge_chunk_size", 24)
    chunk_setting = (chunk_size, 1, "the number of evaluations in a batch of Gwen's judge")
    numbers = NUMBERS | {"judge_chunk_size": chunk_setting}
    args = harness.add_number_flags_and_parse(parser, argv, numbers, rollout_batch_size=1, temp=0)
    if not args.rollout_batch_size:
        args.rollout_batch_size = min(args.batch * args.groups, USUAL_ROWS)
    if not args.model:
        args.model = model_choice.choose_model_and_reason(None)[0] if gpu.on_gpu() else "random:30m"
    return args


def make_rollout_work(args: argparse.Namespace, config: hub.ModelConfig) -> RolloutWork:
    """
    Returns the workload for these settings, with random prompts that contain no end tokens.

    Each prompt is divided into two parts, of which the second is the last token alone.
    """
    ordinary_ids = np.setdiff1d(np.arange(min(config.vocab_size, 8192)), config.end_ids)
    rng = np.random.default_rng(args.seed)
    prompt_ids = rng.choice(ordinary_ids, (args.batch, args.prompt_tokens)).tolist()
    return RolloutWork(
        prompts=[(ids[:-1], ids[-1:]) for ids in prompt_ids],
        group_size=args.groups,
        limits=[args.max_tokens] * (args.batch * args.groups),
        eos_ids=() if args.ignore_eos else config.end_ids,
        temperature=args.temp,
        batch_size=args.rollout_batch_size,
        seed=args.seed,
    )


def compare_and_print_engines(
    args: argparse.Namespace,
    directory: Path,
    make_rival: Callable[[Any, Path], Rival],
    benchmark_and_print_judging: Callable[..., dict[str, Any]],
) -> None:
    """
    Compares Gwen with a rival on the model in a directory, and prints the results.

    The rival is represented by its fastest configuration that returns log-probabilities, because
    training needs them. If no configuration returns log-probabilities, the rival is represented by
    its fastest configuration of all.

    make_rival: a function that returns the rival, given mlx_lm's model and the directory.
    """
    model = gwen.load_model(directory)
    rival = make_rival(harness.load_mlx_lm_model(directory, model.head_weight.dtype), directory)
    work = make_rollout_work(args, model.config)
    engines: dict[str, Engine] = {"ours": functools.partial(time_gwen_rollout, model=model)}
    engines |= rival.engines
    refuse_engines_that_disagree(model, engines, work)

    config = vars(args) | {"pairs": args.batch * args.groups}
    print_benchmark_config(args, model)
    samples = measure_rollouts(engines, work, args.warmup, args.runs)
    entries = {name: summarize_rollouts(samples[name], model) for name in engines}
    print_rollout_entries(entries, len(rival.name) + 2)
    with_logprobs = [name for name in rival.engines if samples[name][0].run.logprobs]
    candidates = with_logprobs or list(rival.engines)
    best = min(candidates, key=lambda name: entries[name]["mean_ms"])
    rounds = harness.describe_rival_time_ratios(samples["ours"], samples[best])
    print(f"Compared with ours, {best} took {rounds}")
    fraction = measure_and_print_roofline_fraction(args, model, entries["ours"])
    ratio = entries[best]["mean_ms"] / entries["ours"]["mean_ms"]
    print(rival.result.format(harness.describe_speed_ratio(ratio)))

    record = {
        "config": config,
        "engines": entries,
        "ratio": round(ratio, 4),
        "best": best,
        "roofline_frac": fraction,
    }
    if args.benchmark_judge:
        record["judge"] = benchmark_and_print_judging(
            args, model, hub.load_tokenizer(directory), rival
        )
    record |= harness.collect_environment_facts(rival.name.replace("_", "-"))
    print(json.dumps(record))


def print_benchmark_config(args: argparse.Namespace, model: gwen.Model) -> None:
    dtype = str(model.head_weight.dtype).removeprefix("mlx.core.")
    print(
        f"Config: B={args.batch} G={args.groups} pairs={args.batch * args.groups} "
        f"max_tokens={args.max_tokens} temp={args.temp:g} warmup={args.warmup} runs={args.runs}"
    )
    print(
        f"Model: {args.model} in {dtype}, {args.prompt_tokens} prompt tokens, "
        f"{args.rollout_batch_size} rows at once"
    )


def print_rollout_entries(entries: dict[str, dict[str, float]], width: int) -> None:
    """Prints one line per engine; users' scripts parse these lines, so their format is fixed."""
    for name, entry in entries.items():
        print(
            f"{name:<{width}} | mean {entry['mean_ms']:.1f} ms | std {entry['std_ms']:.1f} ms | "
            f"total_out_toks {entry['tokens']} | throughput {entry['tok_s']:.1f} tok/s"
        )
    if len({entry["tokens"] for entry in entries.values()}) > 1:
        print(
            "Note: the engines generated different numbers of tokens, so they did not do equal "
            "work; set --ignore-eos for equal work"
        )


@guard_output()
def main(
    argv: list[str] | None,
    program: str,
    description: str,
    make_rival: Callable[[Any, Path], Rival],
    benchmark_and_print_judging: Callable[..., dict[str, Any]],
) -> None:
    """Runs the command that compares rollouts by Gwen with rollouts by a rival."""
    with exit_on_mistakes():
        args = parse_flags(argv, program, description)
        with harness.model_directory(args.model) as directory:
            compare_and_print_engines(args, directory, make_rival, benchmark_and_print_judging)
