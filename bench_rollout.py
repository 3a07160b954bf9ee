"""
Rollouts against mlx_lm on the same work: `uv run bench_rollout.py --batch 8 --groups 8 --prompt-tokens 128`.

All engines share one process, one BLAS, the weights of one directory in one dtype, token ids, temperature, completion
lengths and, at their best, the number of rows at once; each round runs them in turn, every other round in reverse.
mlx_lm records the log-probability of every drawn token, as ours does; its second line has its default batch sizes.
Before anything is timed, greedy completions must show that the engines compute the same.

`prefill_ms` is the time to process prompts: ours as the rollout reports it, mlx_lm's as its `stats()` do, which bill
a prompt's last token to decoding. `decode_ms` is the rest of the run. `peak_mb` is the most that MLX held during a run
beyond what it held before it, and the weights once: what the engine would need if it were alone. What is left out:
text, prompts of unequal length, and, but for `--benchmark-judge`, judging.

Where end tokens end rows, as they do in a trained model, every engine draws its own completions and lengths; with
`--ignore-eos`, `--lengths` or a random model the work is the same to the token, and every length is asserted.

Axes: B prompts, G completions of each, N = B * G rows, prompt-major, P prompt positions, V vocabulary.
"""

import argparse
import contextlib
import functools
import gc
import json
import math
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import cpu_blas
import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten
from tqdm import tqdm

import bench_judge
import dispatch
import gpu
import gwen
import hub
import sampler
import telemetry

AGREEING_TOKENS = 16  # of one greedy completion; engines that compute the same have parted long before by a mistake


class Work(NamedTuple):
    """What every engine is asked to do."""

    prompts: list[list[int]]  # (B, P)
    group_size: int
    limits: list[int]  # (N,) most tokens of each row
    eos_ids: tuple[int, ...]  # none: every row has exactly as many tokens as its limit
    temperature: float
    batch_size: int  # most rows that are decoded at once
    seed: int

    @property
    def rows(self) -> list[list[int]]:
        """The prompt of each row."""
        return [prompt for prompt in self.prompts for _ in range(self.group_size)]


class Run(NamedTuple):
    """What an engine made of the work, and how long it took."""

    completions: list[list[int]]  # ids of each row, the end token included
    logprobs: list[list[float]]  # of the same tokens; no rows from an engine that does not give them
    prefill_s: float
    decode_s: float
    cache_bytes: int | None = None  # the largest cache, from an engine that says


class Sample(NamedTuple):
    """One timed run."""

    run: Run
    peak_bytes: int  # beyond what was held before

    @property
    def seconds(self) -> float:
        return self.run.prefill_s + self.run.decode_s


Engine = Callable[[Work], Run]


class Disagreement(Exception):
    """Two engines do not compute the same, so their times must not be compared."""


# ---- engines


def run_ours(work: Work, *, model: gwen.Model, share_prefix: bool | None, refill: bool) -> Run:
    """The work done by `sampler.rollout`."""
    begin = time.perf_counter()
    result = sampler.rollout(
        model,
        work.prompts,
        group_size=work.group_size,
        max_tokens=work.limits,
        temperature=work.temperature,
        eos_ids=work.eos_ids,
        pad_id=0,
        rollout_batch_size=work.batch_size,
        key=work.seed,
        share_prefix=share_prefix,
        refill=refill,
    )
    seconds = time.perf_counter() - begin
    lengths = np.array(result.mask).sum(-1).astype(int)
    completions, logprobs = (
        [row[:length].tolist() for row, length in zip(np.array(column), lengths, strict=True)]
        for column in (result.completion_ids, result.logprobs)
    )
    stats = result.stats
    return Run(completions, logprobs, stats.prefill_s, seconds - stats.prefill_s, stats.cache_bytes)


def run_mlx_lm(work: Work, *, peer: Any, whole_batches: bool) -> Run:
    """
    The work done by mlx_lm's BatchGenerator, with as many rows at once as ours or with its default sizes.

    Its log-probabilities are those at temperature 1, whatever it samples at; they are read once a step for all rows,
    which costs less than one by one as its own `batch_generate` reads them.
    """
    from mlx_lm.generate import BatchGenerator
    from mlx_lm.sample_utils import make_sampler

    size = work.batch_size
    sizes: Any = {"completion_batch_size": size, "prefill_batch_size": size} if whole_batches else {}
    mx.random.seed(work.seed)
    begin = time.perf_counter()
    stop_tokens = [[eos_id] for eos_id in work.eos_ids]
    generator = BatchGenerator(peer, stop_tokens=stop_tokens, sampler=make_sampler(work.temperature), **sizes)
    row_of = {uid: row for row, uid in enumerate(generator.insert(work.rows, work.limits))}
    completions: list[list[int]] = [[] for _ in row_of]
    logprobs: list[list[float]] = [[] for _ in row_of]
    with generator.stats() as stats:
        while responses := generator.next_generated():
            chosen: Any = mx.stack([response.logprobs[response.token] for response in responses]).tolist()
            for response, logprob in zip(responses, chosen, strict=True):
                completions[row_of[response.uid]].append(response.token)
                logprobs[row_of[response.uid]].append(logprob)
    generator.close()
    seconds = time.perf_counter() - begin
    return Run(completions, logprobs, stats.prompt_time, seconds - stats.prompt_time)


def load_peer(directory: Path, dtype: mx.Dtype) -> Any:
    """mlx_lm's own model of a directory, in `dtype`."""
    from mlx_lm.utils import load_model

    peer, _ = load_model(directory)
    peer.set_dtype(dtype)
    mx.eval(peer.parameters())
    return peer


# ---- agreement and measurement


def check_agreement(model: gwen.Model, engines: dict[str, Engine], work: Work) -> None:
    """
    Raises Disagreement unless every engine's greedy completion of the first prompt is that of "ours".

    Where two tokens' logits are closer than the rounding of the model's dtype the comparison ends: either is right.
    """
    prompt = work.prompts[0]
    probe = work._replace(prompts=[prompt], group_size=1, limits=[AGREEING_TOKENS], temperature=0.0)
    greedy = {name: engine(probe).completions[0] for name, engine in engines.items()}
    ours = greedy.pop("ours")
    for name, theirs in greedy.items():
        pairs = enumerate(zip(ours, theirs, strict=False))
        place = next((i for i, (own, other) in pairs if own != other), min(len(ours), len(theirs)))
        if place == len(ours) == len(theirs):
            continue
        if place == min(len(ours), len(theirs)) or not is_tie(model, prompt + ours[:place], ours[place], theirs[place]):
            raise Disagreement(
                f"ours and {name} part at token {place} of the greedy completion of the first prompt; "
                "they do not compute the same, so there is nothing to compare"
            )


def is_tie(model: gwen.Model, tokens: list[int], first: int, second: int) -> bool:
    """Whether the logits of two ids after `tokens` differ by no more than rounding may make of equal ones."""
    logits = model(mx.array([tokens]))[0, -1]
    rounding = 8 * mx.finfo(logits.dtype).eps * mx.abs(logits).max()
    return bool((mx.abs(logits[first] - logits[second]) <= rounding).item())


def measure(engines: dict[str, Engine], work: Work, warmup: int, runs: int) -> dict[str, list[Sample]]:
    """`runs` timed runs of each engine after `warmup` untimed ones, in turn, every other round in reverse order."""
    samples: dict[str, list[Sample]] = {name: [] for name in engines}
    for turn in tqdm(range(warmup + runs), desc="rounds", leave=False, disable=None):
        for name in list(engines) if turn % 2 == 0 else list(engines)[::-1]:
            gc.collect()  # what the last engine left behind in cycles
            mx.clear_cache()
            mx.reset_peak_memory()
            held = mx.get_active_memory()
            run = engines[name](work)
            lengths = [len(completion) for completion in run.completions]
            assert work.eos_ids or lengths == work.limits, f"{name} made {lengths} tokens, not {work.limits}"
            if turn >= warmup:
                samples[name].append(Sample(run, mx.get_peak_memory() - held))
    return samples


def summary(samples: list[Sample], model: gwen.Model) -> dict[str, float]:
    """Milliseconds, tokens and megabytes of one engine over all its timed runs; all have the model's weights."""
    weight_bytes = sum(array.nbytes for _, array in tree_flatten(model.parameters()))
    cache_bytes = [sample.run.cache_bytes for sample in samples if sample.run.cache_bytes is not None]
    times = np.array([sample.seconds for sample in samples]) * 1e3
    tokens = sum(len(completion) for sample in samples for completion in sample.run.completions)
    numbers = {
        "mean_ms": times.mean(),
        "std_ms": times.std(ddof=1) if len(times) > 1 else 0.0,
        "median_ms": np.median(times),
        "min_ms": times.min(),
        "max_ms": times.max(),
        "prefill_ms": np.mean([sample.run.prefill_s for sample in samples]) * 1e3,
        "decode_ms": np.mean([sample.run.decode_s for sample in samples]) * 1e3,
        "tok_s": tokens / times.sum() * 1e3,
        "peak_mb": (weight_bytes + max(sample.peak_bytes for sample in samples)) / 1e6,
    }
    if cache_bytes:
        numbers["cache_mb"] = max(cache_bytes) / 1e6
    return {"tokens": tokens} | {name: round(float(number), 3) for name, number in numbers.items()}


# ---- the roofline


def best_seconds(compute: Callable[[], mx.array]) -> float:
    """The shortest of five runs."""
    seconds = []
    for _ in range(5):
        begin = time.perf_counter()
        mx.eval(compute())  # wait: this is what is timed
        seconds.append(time.perf_counter() - begin)
    return min(seconds)


def memory_bandwidth() -> float:
    """Bytes a second of a copy far larger than any cache, read and written."""
    source = mx.zeros((2**26,), mx.float32)  # 268 MB
    mx.eval(source)
    return 2 * source.nbytes / best_seconds(lambda: source + 1)


def matmul_rate(dtype: mx.Dtype) -> float:
    """Floating-point operations a second of a large square product."""
    size = 4096 if gpu.on_gpu() else 1024
    square = mx.ones((size, size), dtype)
    mx.eval(square)
    return 2 * size**3 / best_seconds(lambda: square @ square)


class Floor(NamedTuple):
    """The least that decoding must do, whoever does it."""

    steps: int
    num_bytes: float  # read, a step
    flops: float  # of the weights' matmuls, a step


def least_work(model: gwen.Model, work: Work, lengths: list[int], share_prefix: bool) -> Floor:
    """
    Steps, bytes and operations of decoding rows of these lengths (N,); a row's first token comes from the prefill.

    A step reads all weights once, the head among them, the prompts' cache (a group's once when it is shared, else once
    a row) and each row's own. Activations, logits and what is written count for nothing.
    """
    config = model.config
    parameters = dict(tree_flatten(model.parameters()))
    if not config.tie_word_embeddings:
        parameters.pop("embed_tokens.weight")  # only looked up in
    forwards = np.array(lengths) - 1  # of each row
    steps = max(int(forwards.max()), math.ceil(forwards.sum() / work.batch_size), 1)
    by_group = forwards.reshape(len(work.prompts), -1)
    prompt_reads = len(work.prompts[0]) * (by_group.max(-1) if share_prefix else by_group).sum()
    own_reads = (forwards * (forwards + 1) / 2).sum()
    numbers_per_token = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim  # keys and values
    token_bytes = numbers_per_token * model.head_weight.itemsize
    weight_bytes = sum(array.nbytes for array in parameters.values())
    num_weights = sum(array.size for array in parameters.values())
    return Floor(
        steps,
        weight_bytes + (prompt_reads + own_reads) * token_bytes / steps,
        2 * num_weights * forwards.sum() / steps,
    )


def print_roofline(model: gwen.Model, work: Work, samples: list[Sample], share_prefix: bool) -> float:
    """Says what bounds a decode step of ours from below, and returns the fraction that memory alone would need."""
    floor = least_work(model, work, [len(row) for row in samples[-1].run.completions], share_prefix)
    step_ms = float(np.mean([sample.run.decode_s for sample in samples])) * 1e3 / floor.steps
    bandwidth, rate = memory_bandwidth(), matmul_rate(model.head_weight.dtype)
    memory_ms, matmul_ms = floor.num_bytes / bandwidth * 1e3, floor.flops / rate * 1e3
    print(
        f"Roofline: {floor.num_bytes / 1e6:.1f} MB a decode step at {bandwidth / 1e9:.1f} GB/s take "
        f"{memory_ms:.2f} ms, {memory_ms / step_ms:.3f} of the {step_ms:.2f} ms of ours"
    )
    print(f"Matmuls: {floor.flops / 1e9:.2f} GFLOP a decode step at {rate / 1e9:.1f} GFLOP/s take {matmul_ms:.2f} ms")
    return memory_ms / step_ms


# ---- settings and the report


def parse(argv: list[str] | None, program: str, description: str) -> argparse.Namespace:
    """The settings of a command line, checked and filled up. ValueError names the flag that is wrong."""
    parser = telemetry.Parser(program, description)
    parser.add_argument("--batch", type=int, default=2, help="B, prompts")
    parser.add_argument("--groups", type=int, default=2, help="G, completions of each")
    parser.add_argument("--max-tokens", type=int, default=64, help="most tokens of a completion")
    parser.add_argument("--temp", type=float, default=0.8, help="sampling temperature")
    parser.add_argument("--warmup", type=int, default=1, help="rounds that are not timed")
    parser.add_argument("--runs", type=int, default=2, help="timed rounds")
    parser.add_argument("--model", help="as train.py's (default: train.py's on a GPU, else random:30m)")
    parser.add_argument("--prompt-tokens", type=int, default=64, help="P, tokens of a prompt, drawn at random")
    parser.add_argument(
        "--rollout-batch-size",
        type=dispatch.parse_size,
        help="rows decoded at once; auto: what is fastest for ours, by measurement (default: all, at most 64)",
    )
    parser.add_argument("--ignore-eos", action="store_true", help="every completion has --max-tokens tokens")
    parser.add_argument("--lengths", metavar="geometric:MEAN:CAP", help="draws each row's length; ignores end tokens")
    parser.add_argument("--no-refill", dest="refill", action="store_false", help="ours keeps the slots of ended rows")
    parser.add_argument(
        "--no-share",
        dest="share_prefix",
        action="store_const",
        const=False,
        help="ours copies prompts to their rows (default: as the sampler chooses, or the measurement of auto)",
    )
    parser.add_argument("--seed", type=int, default=0, help="of prompts, lengths and sampling")
    bench_judge.add_flags(parser)
    args = parser.parse_args(argv)
    lowest = {"batch": 1, "groups": 1, "max_tokens": 1, "warmup": 0, "runs": 1, "prompt_tokens": 1, "seed": 0}
    if args.rollout_batch_size is None:
        args.rollout_batch_size = min(args.batch * args.groups, dispatch.USUAL_ROWS)
    if args.rollout_batch_size != "auto":
        lowest["rollout_batch_size"] = 1
    lowest |= {"judge_runs": 1, "judge_chunk_size": 1}
    for name, low in lowest.items():
        if getattr(args, name) < low:
            raise ValueError(f"--{name.replace('_', '-')} is {getattr(args, name)}; it must be at least {low}")
    if args.seed >= 1 << 64:
        raise ValueError(f"--seed is {args.seed}; it must be below 2^64")
    if not (math.isfinite(args.temp) and args.temp >= 0):
        raise ValueError(f"--temp is {args.temp}; it must be a finite number of at least 0")
    if args.lengths:
        args.max_tokens = parse_lengths(args.lengths)[1]
    if not args.model:
        args.model = gwen.choose_model(None)[0] if gpu.on_gpu() else "random:30m"
    return args


def parse_lengths(text: str) -> tuple[float, int]:
    """Mean and cap of "geometric:64:256". ValueError for anything else."""
    kind, _, numbers = text.partition(":")
    with contextlib.suppress(ValueError):
        mean, cap = (float(number) for number in numbers.split(":"))
        if kind == "geometric" and cap.is_integer() and 1 <= mean <= cap < 2**31:
            return mean, int(cap)
    raise ValueError(f"--lengths {text}: it must be like geometric:64:256, with a mean from 1 to the cap")


def geometric_lengths(num_rows: int, mean: float, cap: int, seed: int) -> list[int]:
    """Completion lengths (num_rows,) of 1 to `cap`: geometric of this mean, and what is longer is cut to the cap."""
    return np.minimum(np.random.default_rng(seed).geometric(1 / mean, num_rows), cap).tolist()


def make_work(args: argparse.Namespace, config: hub.ModelConfig) -> Work:
    """The work that the settings describe, for a model of this configuration."""
    num_rows = args.batch * args.groups
    limits = [args.max_tokens] * num_rows
    if args.lengths:
        limits = geometric_lengths(num_rows, *parse_lengths(args.lengths), args.seed)
    ordinary = np.setdiff1d(np.arange(config.vocab_size), config.eos_ids)
    prompts = np.random.default_rng(args.seed).choice(ordinary, (args.batch, args.prompt_tokens)).tolist()
    eos_ids = () if args.ignore_eos or args.lengths else config.eos_ids
    return Work(prompts, args.groups, limits, eos_ids, args.temp, args.rollout_batch_size, args.seed)


@contextlib.contextmanager
def model_directory(name: str) -> Iterator[Path]:
    """The directory of a model; one of random weights is written for as long as it is needed."""
    if not name.startswith("random:"):
        yield hub.find(name)
        return
    with tempfile.TemporaryDirectory() as directory:
        gwen.save(gwen.random_model(name), directory, hub.load_tokenizer(hub.DEMO))
        yield Path(directory)


def settle_size(args: argparse.Namespace, model: gwen.Model) -> str:
    """Replaces `--rollout-batch-size auto` by what a measurement of ours finds, on a CPU too; says what and why."""
    if args.rollout_batch_size != "auto":
        return ""
    chosen, why = dispatch.choose(
        model,
        [args.prompt_tokens],
        max_tokens=args.max_tokens,
        group_size=args.groups,
        most_rows=args.batch * args.groups,
    )
    args.rollout_batch_size = chosen.rows
    if args.share_prefix is None:
        args.share_prefix = chosen.share_prefix
    return why


def our_engine(args: argparse.Namespace, model: gwen.Model) -> Engine:
    """Ours as the settings have it."""
    return functools.partial(run_ours, model=model, share_prefix=args.share_prefix, refill=args.refill)


def print_settings(args: argparse.Namespace, model: gwen.Model, why: str) -> None:
    """The configuration, in the line that other people's scripts read, and what it does not hold."""
    print(
        f"Config: B={args.batch} G={args.groups} pairs={args.batch * args.groups} max_tokens={args.max_tokens} "
        f"temp={args.temp:g} warmup={args.warmup} runs={args.runs}"
    )
    dtype = str(model.head_weight.dtype).removeprefix("mlx.core.")
    print(
        f"Model: {args.model} in {dtype}, {args.prompt_tokens} prompt tokens, {args.rollout_batch_size} rows at once, "
        f"lengths {args.lengths or 'all alike'}"
    )
    if why:
        print(why)


def print_engine(name: str, width: int, entry: dict[str, float]) -> None:
    """The line of one engine."""
    print(
        f"{name:<{width}} | mean {entry['mean_ms']:.1f} ms | std {entry['std_ms']:.1f} ms | "
        f"total_out_toks {entry['tokens']} | throughput {entry['tok_s']:.1f} tok/s"
    )


def print_phases(entries: dict[str, dict[str, Any]]) -> None:
    """Where each engine's time and memory went."""
    for name, entry in entries.items():
        cache = f", of it cache {entry['cache_mb']:.1f} MB" if "cache_mb" in entry else ""
        times = f"prefill {entry['prefill_ms']:.1f} ms, decode {entry['decode_ms']:.1f} ms"
        print(f"Phases: {name} {times}, peak {entry['peak_mb']:.1f} MB{cache}")


def print_rounds(name: str, ours: list[Sample], theirs: list[Sample]) -> None:
    """How far the ratio of times went apart between rounds."""
    ratios = [other.seconds / own.seconds for own, other in zip(ours, theirs, strict=True)]
    print(f"Rounds: {name} took {min(ratios):.2f} to {max(ratios):.2f} times as long as ours")


def print_unequal(entries: dict[str, dict[str, Any]]) -> None:
    """A warning where end tokens made the engines' work unequal."""
    if len({entry["tokens"] for entry in entries.values()}) > 1:
        print("Note: rows ended at different tokens, so times are not of equal work; --ignore-eos makes them so")


def verdict(ratio: float) -> str:
    """The ratio in words: "1.14x faster" or "0.90x slower"."""
    return f"{ratio:.2f}x {'faster' if round(ratio, 2) >= 1 else 'slower'}"


def print_json(
    args: argparse.Namespace, engines: dict[str, Any], ratio: float, roofline_frac: float, judging: Any, *packages: str
) -> None:
    """The last line: everything, for programs; with the versions of `packages` beside those that a run records."""
    environment = telemetry.environment(cpu_blas.description)
    record = {
        "config": vars(args) | {"pairs": args.batch * args.groups},
        "engines": engines,
        "ratio": round(ratio, 4),
        "roofline_frac": round(roofline_frac, 4),
        **({"judge": judging} if judging else {}),
        "device": f"{environment['device']}, {environment['machine']}, BLAS: {environment['blas']}",
        "versions": {"python": environment["python"]} | environment["versions"] | {p: version(p) for p in packages},
    }
    print(json.dumps(record))


def compare(args: argparse.Namespace, directory: Path) -> None:
    """Checks, measures and reports ours and mlx_lm on the model of a directory."""
    model = gwen.load_model(directory)
    why = settle_size(args, model)
    peer = load_peer(directory, model.head_weight.dtype)
    work = make_work(args, model.config)
    engines: dict[str, Engine] = {
        "ours": our_engine(args, model),
        "mlx_lm": functools.partial(run_mlx_lm, peer=peer, whole_batches=True),
        "mlx_lm_default": functools.partial(run_mlx_lm, peer=peer, whole_batches=False),
    }
    check_agreement(model, engines, work)
    print_settings(args, model, why)
    samples = measure(engines, work, args.warmup, args.runs)
    entries = {name: summary(samples[name], model) for name in engines}
    for name, entry in entries.items():
        print_engine(name, 8, entry)
    print_phases(entries)
    print_unequal(entries)
    print_rounds("mlx_lm", samples["ours"], samples["mlx_lm"])
    roofline_frac = print_roofline(model, work, samples["ours"], args.share_prefix is not False)
    ratio = entries["mlx_lm"]["mean_ms"] / entries["ours"]["mean_ms"]
    print(f"Result: ours is {verdict(ratio)} than mlx_lm on this rollout workload.")
    judging = None
    if args.benchmark_judge:
        rivals = bench_judge.mlx_lm_rivals(peer, model.config.eos_ids)
        judging = bench_judge.benchmark(args, model, hub.load_tokenizer(directory), "mlx_lm", rivals)
    print_json(args, entries, ratio, roofline_frac, judging)


def main(argv: list[str] | None = None) -> None:
    try:
        args = parse(argv, "bench_rollout.py", "Time rollouts against mlx_lm's.")
        with model_directory(args.model) as directory:
            compare(args, directory)
    except (ValueError, OSError) as error:
        telemetry.fail(error)
    except Disagreement as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
