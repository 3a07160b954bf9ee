"""
The harness under the benchmarks: the work, rounds of engines in turn, what they took, and the report.

All engines share one process, one BLAS, the weights of one directory in one dtype, token ids, temperature, completion
lengths and, at their best, the number of rows at once; each round runs them in turn, every other round in reverse.
Before anything is timed, greedy completions must show that the engines compute the same.

`prefill_ms` is the time to process prompts, as each engine reports it; mlx_lm's `stats()` bill a prompt's last token to
decoding. `decode_ms` is the rest of the run. `peak_mb` is the most that MLX held during a run beyond what it held
before, and the weights once: what the engine would need if it were alone. What is left out: text, prompts of unequal
length, and the engines to compare with, which are in the commands.

Where end tokens end rows, as they do in a trained model, every engine draws its own completions and lengths; with
`--ignore-eos`, `--lengths` or a random model the work is the same to the token, and every length is asserted.

Axes: B prompts, G completions of each, N = B * G rows, prompt-major, P prompt positions, V vocabulary, J criteria.
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

import gwen
import hub
import judge
import sampler
from flags import Parser, check_least, fail, size
from judging import rubrics
from machine import gpu
from step import dispatch

AGREEING_TOKENS = 16  # of one greedy completion; engines that compute the same have parted long before by a mistake
PREAMBLE_TOKENS, CRITERION_TOKENS, NUM_CRITERIA = 120, 24, 3  # of the judge's prompts


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


class Timing(NamedTuple):
    """What an engine made of the work, and how long it took."""

    completions: list[list[int]]  # ids of each row, the end token included
    logprobs: list[list[float]]  # of the same tokens; no rows from an engine that does not give them
    prefill_s: float
    decode_s: float
    cache_bytes: int | None = None  # the largest cache, from an engine that says

    @property
    def seconds(self) -> float:
        return self.prefill_s + self.decode_s


class Sample(NamedTuple):
    """One timed run."""

    run: Any  # Timing or JudgeTiming
    peak_bytes: int  # beyond what was held before


Engine = Callable[[Work], Timing]
Generate = Callable[[list[list[int]], int], list[list[int]]]  # prompts and a limit -> greedy ids of each


class Rival(NamedTuple):
    """Another engine, in one or several ways; the fastest of them counts."""

    name: str
    result: str  # the line of the result, with {} for the verdict
    engines: dict[str, Engine]
    judges: dict[str, "Generate"]  # greedy replies, for --benchmark-judge
    packages: list[str]  # whose versions are recorded beside those of every run


class Disagreement(Exception):
    """Two engines do not compute the same, so their times must not be compared."""


# ---- engines


def run_ours(work: Work, *, model: gwen.Model, share_prefix: bool | None) -> Timing:
    """The work done by `sampler.rollout`."""
    begin = time.perf_counter()
    result = sampler.rollout(
        model,
        work.prompts,
        sampler.SamplingParams(work.limits, work.temperature, eos_ids=work.eos_ids),
        group_size=work.group_size,
        key=work.seed,
        batch_size=work.batch_size,
        share_prefix=share_prefix,
    )
    seconds = time.perf_counter() - begin
    logprobs = [row[:length] for row, length in zip(np.array(result.logprobs).tolist(), result.lengths, strict=True)]
    stats = result.stats
    return Timing(result.ids, logprobs, stats.prefill_s, seconds - stats.prefill_s, stats.cache_bytes)


def our_engine(args: argparse.Namespace, model: gwen.Model) -> Engine:
    """Ours as the settings have it."""
    return functools.partial(run_ours, model=model, share_prefix=args.share_prefix)


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


def in_turn(engines: dict[str, Callable[[Any], Any]], work: Any, warmup: int, runs: int) -> dict[str, list[Sample]]:
    """`runs` timed runs of each engine after `warmup` untimed ones, in turn, every other round in reverse order."""
    samples: dict[str, list[Sample]] = {name: [] for name in engines}
    for turn in tqdm(range(warmup + runs), desc="rounds", leave=False, disable=None):
        for name in list(engines) if turn % 2 == 0 else list(engines)[::-1]:
            gc.collect()  # what the last engine left behind in cycles
            mx.clear_cache()
            mx.reset_peak_memory()
            held = mx.get_active_memory()
            run = engines[name](work)
            if turn >= warmup:
                samples[name].append(Sample(run, mx.get_peak_memory() - held))
    return samples


def measure(engines: dict[str, Engine], work: Work, warmup: int, runs: int) -> dict[str, list[Sample]]:
    """Timed rollouts of each engine, see `in_turn`; where end tokens end no row, all have the lengths asked for."""
    samples = in_turn(engines, work, warmup, runs)
    for name in engines if not work.eos_ids else []:
        for sample in samples[name]:
            lengths = [len(completion) for completion in sample.run.completions]
            assert lengths == work.limits, f"{name} made {lengths} tokens, not {work.limits}"
    return samples


def peak_mb(samples: list[Sample], model: gwen.Model) -> float:
    """The largest peak of the runs and the weights, which every engine holds."""
    weights = sum(array.nbytes for _, array in tree_flatten(model.parameters()))
    return (weights + max(sample.peak_bytes for sample in samples)) / 1e6


def summary(samples: list[Sample], model: gwen.Model) -> dict[str, float]:
    """Milliseconds, tokens and megabytes of one engine over all its timed runs; all have the model's weights."""
    cache_bytes = [sample.run.cache_bytes for sample in samples if sample.run.cache_bytes is not None]
    times = np.array([sample.run.seconds for sample in samples]) * 1e3
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
        "peak_mb": peak_mb(samples, model),
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


# ---- judging: N answers to B questions by J criteria, all of random words, so that nothing is easier for anybody
#
# With what the chat template and the tags add, the preamble has 120 tokens, a question `--prompt-tokens`, an answer
# `--max-tokens` and a criterion 24, or the fewest that the template allows. A rival gets every prompt whole, as token
# ids, and writes up to 16 greedy tokens, in which a digit is then looked for. Ours is timed from the text on, with no
# score cached; the preamble counts. Whether a judge is right is measured by `judge.py`.


class JudgeWork(NamedTuple):
    """What every engine judges."""

    rubric: rubrics.Rubric
    prompts: list[str]  # (N,)
    completions: list[str]
    ids: list[list[int]]  # (N * J) every prompt whole
    num_distinct: int  # tokens of the prompts' tree


class JudgeTiming(NamedTuple):
    """What an engine made of it."""

    scores: np.ndarray  # (N, J), nan where none was readable
    said: np.ndarray  # (N, J) of str: the likeliest first token, or the reply
    seconds: float
    num_tokens: int  # positions that went through the model before the first answer token, padding left out for rivals


def words(num_words: int, rng: np.random.Generator) -> str:
    """Random words."""
    vocabulary = "one two three four five six seven eight nine plus is the answer number right sum and".split()
    return " ".join(rng.choice(vocabulary, num_words).tolist())


def make_judge_work(args: argparse.Namespace, tokenizer: Any) -> JudgeWork:
    """The work that the settings describe."""

    def text(measured: Callable[[str], int], wanted: int) -> str:
        """Random words that make a segment `wanted` tokens long, or one word where the template alone is longer."""
        for num_words in range(1, wanted + 2):
            made = words(num_words, np.random.default_rng(seeds.integers(2**32)))
            if measured(made) >= wanted:
                break
        return made

    def with_rubric(preamble: str, criterion: str) -> rubrics.PromptBuilder:
        # a second criterion that begins otherwise, since what all criteria begin with belongs to the answer
        criteria = [rubrics.Criterion("one", 1.0, criterion), rubrics.Criterion("two", 1.0, ": " + criterion)]
        return rubrics.PromptBuilder(tokenizer, rubrics.Rubric(preamble, criteria))

    seeds = np.random.default_rng(args.seed)
    preamble = text(lambda made: len(with_rubric(made, "a").head), PREAMBLE_TOKENS)

    def own_tokens(made: str) -> int:
        builder = with_rubric(preamble, made)
        return len(builder.tails[0]) - builder.num_common

    criteria = [rubrics.Criterion(f"{j}", 1.0, text(own_tokens, CRITERION_TOKENS)) for j in range(NUM_CRITERIA)]
    rubric = rubrics.Rubric(preamble, criteria)
    builder = rubrics.PromptBuilder(tokenizer, rubric)
    questions = [text(lambda made: len(builder.question(made)), args.prompt_tokens) for _ in range(args.batch)]
    prompts = [question for question in questions for _ in range(args.groups)]
    completions = [text(lambda made: len(builder.answer(made)), args.max_tokens) for _ in prompts]
    ids = [one for pair in zip(prompts, completions, strict=True) for one in builder(*pair)]
    return JudgeWork(rubric, prompts, completions, ids, num_distinct(builder, prompts, completions))


def num_distinct(builder: rubrics.PromptBuilder, prompts: list[str], completions: list[str]) -> int:
    """Tokens of the tree that the prompts of these pairs form, counted by their paths from the root."""
    paths = set()
    for pair in set(zip(prompts, completions, strict=True)):
        for ids in builder(*pair):
            path = b""
            for token in ids:  # the hash of a path stands for it
                path = hash((path, token)).to_bytes(9, "little", signed=True)
                paths.add(path)
    return len(paths)


class Legible:
    """A tokenizer that shows every id: those of a random model that it has no text for would all look alike."""

    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tokenizer, name)

    def decode(self, ids: Any) -> str:
        known = len(self.tokenizer)
        return "".join(self.tokenizer.decode([int(i)]) if i < known else f"<{i}>" for i in ids)


def judge_ours(work: JudgeWork, *, model: gwen.Model, tokenizer: Any, mode: str, chunk_size: int) -> JudgeTiming:
    """A fresh judge, which knows no score yet."""
    grader = judge.Judge(model, tokenizer, work.rubric, chunk_size, mode)
    found: dict[int, rubrics.Evaluation] = {}
    begin = time.perf_counter()
    grader.ask(grader.questions(zip(work.prompts, work.completions, strict=True)), found.__setitem__)
    seconds = time.perf_counter() - begin
    said = [found[place] for place in range(len(found))]
    values, texts = np.array([one.score for one in said]), np.array([one.said for one in said], object)
    shape = (-1, len(work.rubric.criteria))
    return JudgeTiming(values.reshape(shape), texts.reshape(shape), seconds, grader.num_tokens)


def judge_rival(work: JudgeWork, *, generate: Generate, tokenizer: Any) -> JudgeTiming:
    """An engine that generates a reply to every prompt."""
    begin = time.perf_counter()
    replies = generate(work.ids, rubrics.REPLY_TOKENS)
    said = np.array([tokenizer.decode(reply) for reply in replies], object).reshape(-1, len(work.rubric.criteria))
    values = np.vectorize(rubrics.read_score, otypes=[float])(said)
    return JudgeTiming(values, said, time.perf_counter() - begin, sum(map(len, work.ids)))


def judge_summary(samples: list[Sample], work: JudgeWork, model: gwen.Model) -> dict[str, Any]:
    """Rates, milliseconds and megabytes of one engine over all its timed runs."""
    seconds = np.array([sample.run.seconds for sample in samples])
    numbers = {
        "crit_eval_s": len(work.ids) / seconds.mean(),
        "pairs_s": len(work.prompts) / seconds.mean(),
        "mean_ms": seconds.mean() * 1e3,
        "min_ms": seconds.min() * 1e3,
        "max_ms": seconds.max() * 1e3,
        "peak_mb": peak_mb(samples, model),
        "unread": np.isnan(samples[0].run.scores).mean(),
    }
    return {"prefill_tokens": samples[0].run.num_tokens} | {n: round(float(x), 3) for n, x in numbers.items()}


def agreement(one: JudgeTiming, other: JudgeTiming) -> dict[str, float]:
    """Shares of the evaluations in which two engines gave the same score, or both none, and the same reply."""
    same = (one.scores == other.scores) | (np.isnan(one.scores) & np.isnan(other.scores))
    return {"scores": float(same.mean()), "replies": float((one.said == other.said).mean())}


def benchmark_judge(args: argparse.Namespace, model: gwen.Model, tokenizer: Any, other: Rival) -> dict[str, Any]:
    """Measures and reports judging; returns what belongs into the last line."""
    work, tokenizer = make_judge_work(args, tokenizer), Legible(tokenizer)
    ways, rival_name = other.judges, other.name
    mine = functools.partial(judge_ours, model=model, tokenizer=tokenizer, chunk_size=args.judge_chunk_size)
    engines: dict[str, Callable[[JudgeWork], JudgeTiming]] = {
        "ours": functools.partial(mine, mode="logits"),
        "ours_decode": functools.partial(mine, mode="decode"),
        **{name: functools.partial(judge_rival, generate=way, tokenizer=tokenizer) for name, way in ways.items()},
    }
    samples = in_turn(engines, work, args.warmup, args.judge_runs)
    entries = {name: judge_summary(samples[name], work, model) for name in engines}
    best = min(ways, key=lambda name: entries[name]["mean_ms"])
    samples[rival_name] = samples[best]
    num_whole, chunk = sum(map(len, work.ids)), args.judge_chunk_size
    print(
        f"Judge benchmark: pairs/run={len(work.prompts)} criteria={NUM_CRITERIA} "
        f"warmup={args.warmup} runs={args.judge_runs}"
    )
    print(
        f"Judge prompts: {num_whole} tokens, {work.num_distinct} in their tree; {rubrics.REPLY_TOKENS} tokens a reply; "
        f"chunks of {chunk}"
    )
    slower = {name: entries.pop(name) for name in ways}
    print(
        f"Best of {rival_name}: {best}; "
        + ", ".join(f"{n} {e['crit_eval_s']:.2f} crit_eval/s" for n, e in slower.items())
    )
    entries[rival_name] = slower[best] | {"settings": best}
    for name, entry in entries.items():
        print(
            f"judge_{name.removesuffix('_mlx'):<11} | crit_eval/s {entry['crit_eval_s']:7.2f} | "
            f"pairs/s {entry['pairs_s']:6.2f} | prefilled {entry['prefill_tokens']} | peak {entry['peak_mb']:.0f} MB"
        )
    share = agreement(samples["ours_decode"][0].run, samples[rival_name][0].run)
    print(
        f"Agreement of ours_decode and {rival_name}: {share['scores']:.1%} of the scores, "
        f"{share['replies']:.1%} of the replies, to the letter"
    )
    ratios = {}
    for name in ("ours", "ours_decode"):
        rounds = [b.run.seconds / a.run.seconds for a, b in zip(samples[name], samples[rival_name], strict=True)]
        ratios[name] = entries[rival_name]["mean_ms"] / entries[name]["mean_ms"]
        print(
            f"Judge result vs {rival_name}: {name} is {ratios[name]:.2f}x as fast on this judging workload "
            f"(rounds {min(rounds):.2f} to {max(rounds):.2f})."
        )
    return {
        "engines": entries,
        "ratios": {name: round(ratio, 3) for name, ratio in ratios.items()},
        "agreement": share,
        "distinct_tokens": work.num_distinct,
    }


# ---- settings and the report


def parse(argv: list[str] | None, program: str, description: str) -> argparse.Namespace:
    """The settings of a command line, checked and filled up. ValueError names the flag that is wrong."""
    parser = Parser(program, description)
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
        type=size,
        help="rows decoded at once; auto: what is fastest for ours, by measurement (default: all, at most 64)",
    )
    parser.add_argument("--ignore-eos", action="store_true", help="every completion has --max-tokens tokens")
    parser.add_argument("--lengths", metavar="geometric:MEAN:CAP", help="draws each row's length; ignores end tokens")
    parser.add_argument(
        "--no-share",
        dest="share_prefix",
        action="store_const",
        const=False,
        help="ours copies prompts to their rows (default: as the sampler chooses, or the measurement of auto)",
    )
    parser.add_argument("--seed", type=int, default=0, help="of prompts, lengths and sampling")
    parser.add_argument("--benchmark-judge", action="store_true", help="time judging too, B x G answers")
    parser.add_argument("--judge-runs", type=int, default=1, help="timed rounds of judging")
    parser.add_argument("--judge-chunk-size", type=int, default=24, help="evaluations that ours makes at once")
    args = parser.parse_args(argv)
    lowest = {"batch": 1, "groups": 1, "max_tokens": 1, "warmup": 0, "runs": 1, "prompt_tokens": 1, "seed": 0}
    if args.rollout_batch_size is None:
        args.rollout_batch_size = min(args.batch * args.groups, dispatch.USUAL_ROWS)
    lowest |= {"rollout_batch_size": 1, "judge_runs": 1, "judge_chunk_size": 1}
    check_least(args, **lowest, temp=0)
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
    ratios = [other.run.seconds / own.run.seconds for own, other in zip(ours, theirs, strict=True)]
    print(f"Rounds: {name} took {min(ratios):.2f} to {max(ratios):.2f} times as long as ours")


def print_unequal(entries: dict[str, dict[str, Any]]) -> None:
    """A warning where end tokens made the engines' work unequal."""
    if len({entry["tokens"] for entry in entries.values()}) > 1:
        print("Note: rows ended at different tokens, so times are not of equal work; --ignore-eos makes them so")


def verdict(ratio: float) -> str:
    """The ratio in words: "1.14x faster" or "0.90x slower"."""
    return f"{ratio:.2f}x {'faster' if round(ratio, 2) >= 1 else 'slower'}"


def environment(*packages: str) -> dict[str, Any]:
    """Device and versions, with those of `packages` beside those that a run records."""
    held = gpu.environment(cpu_blas.description)
    return {
        "device": f"{held['device']}, {held['machine']}, BLAS: {held['blas']}",
        "versions": {"python": held["python"]} | held["versions"] | {name: version(name) for name in packages},
    }


def compare(args: argparse.Namespace, directory: Path, make_rival: Callable[..., Rival]) -> None:
    """
    Checks, measures and reports ours and a rival on the model of a directory.

    make_rival: gives the rival for mlx_lm's model of the directory, and the directory.
    """
    model = gwen.load_model(directory)
    why = settle_size(args, model)
    other = make_rival(load_peer(directory, model.head_weight.dtype), directory)
    work = make_work(args, model.config)
    engines: dict[str, Engine] = {"ours": our_engine(args, model), **other.engines}
    check_agreement(model, engines, work)
    print_settings(args, model, why)
    samples = measure(engines, work, args.warmup, args.runs)
    entries = {name: summary(samples[name], model) for name in engines}
    for name, entry in entries.items():
        print_engine(name, len(other.name) + 2, entry)  # the width that other people's scripts know
    print_phases(entries)
    print_unequal(entries)
    best = min(other.engines, key=lambda name: entries[name]["mean_ms"])
    print_rounds(best, samples["ours"], samples[best])
    roofline_frac = print_roofline(model, work, samples["ours"], args.share_prefix is not False)
    ratio = entries[best]["mean_ms"] / entries["ours"]["mean_ms"]
    print(other.result.format(verdict(ratio)))
    record = {
        "config": vars(args) | {"pairs": args.batch * args.groups},
        "engines": entries,
        "ratio": round(ratio, 4),
        "roofline_frac": round(roofline_frac, 4),
    }
    if args.benchmark_judge:
        record["judge"] = benchmark_judge(args, model, hub.load_tokenizer(directory), other)
    print(json.dumps(record | environment(*other.packages)))


def main(argv: list[str] | None, program: str, description: str, make_rival: Callable[..., Rival]) -> None:
    """A command that compares rollouts of ours and a rival."""
    try:
        args = parse(argv, program, description)
        with model_directory(args.model) as directory:
            compare(args, directory, make_rival)
    except (ValueError, OSError) as error:
        fail(error)
    except Disagreement as error:
        sys.exit(f"error: {error}")
