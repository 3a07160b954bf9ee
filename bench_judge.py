"""
Judging against engines that generate text, on the same prompts: `--benchmark-judge` of the rollout benchmarks.

The work is N answers to B questions, judged by J criteria, all of random words, so that nothing in it is easier for
anybody. With what the chat template and the tags add, the preamble has 120 tokens, a question `--prompt-tokens`, an
answer `--max-tokens` and a criterion 24, or the fewest that the template allows. A rival gets every prompt whole, as
token ids, and writes up to 16 greedy tokens, in which a digit is then looked for. Ours are timed from the text on, with
no score cached; the preamble counts.

What is left out: whether a judge is right, which `judge.py` measures.

Axes: N answers, J criteria.
"""

import argparse
import functools
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import cpu_blas  # noqa: F401  (before mlx)
import mlx.core as mx
import numpy as np
from tqdm import tqdm

import gwen
import judge
import rubrics
import telemetry

PREAMBLE_TOKENS, CRITERION_TOKENS, NUM_CRITERIA = 120, 24, 3

Generate = Callable[[list[list[int]], int], list[list[int]]]  # prompts and a limit -> greedy ids of each


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags that the rollout benchmarks share."""
    parser.add_argument("--benchmark-judge", action="store_true", help="time judging too, B x G answers")
    parser.add_argument("--judge-runs", type=int, default=1, help="timed rounds of judging")
    parser.add_argument("--judge-chunk-size", type=int, default=24, help="evaluations that ours makes at once")


class Work(NamedTuple):
    """What every engine judges."""

    rubric: rubrics.Rubric
    prompts: list[str]  # (N,)
    completions: list[str]
    ids: list[list[int]]  # (N * J) every prompt whole
    num_distinct: int  # tokens of the prompts' tree


class Run(NamedTuple):
    """What an engine made of it."""

    scores: np.ndarray  # (N, J), nan where none was readable
    said: np.ndarray  # (N, J) of str: the likeliest first token, or the reply
    seconds: float
    num_tokens: int  # positions that went through the model before the first answer token, padding left out for rivals


Engine = Callable[[Work], Run]


def words(num_words: int, rng: np.random.Generator) -> str:
    """Random words."""
    vocabulary = "one two three four five six seven eight nine plus is the answer number right sum and".split()
    return " ".join(rng.choice(vocabulary, num_words).tolist())


def make_work(args: argparse.Namespace, tokenizer: Any) -> Work:
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
    return Work(rubric, prompts, completions, ids, num_distinct(builder, prompts, completions))


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


def ours(work: Work, *, model: gwen.Model, tokenizer: Any, mode: str, chunk_size: int) -> Run:
    """A fresh judge, which knows no score yet."""
    grader = judge.Judge(model, tokenizer, work.rubric, chunk_size, mode)
    grader.identity()  # a checksum of the weights, once in a run
    begin = time.perf_counter()
    result = grader.evaluate(list(zip(work.prompts, work.completions, strict=True)))
    return Run(result.scores, result.said, time.perf_counter() - begin, result.num_tokens)


def rival(work: Work, *, generate: Generate, tokenizer: Any) -> Run:
    """An engine that generates a reply to every prompt."""
    begin = time.perf_counter()
    replies = generate(work.ids, judge.REPLY_TOKENS)
    said = np.array([tokenizer.decode(reply) for reply in replies], object).reshape(-1, len(work.rubric.criteria))
    scores = np.vectorize(rubrics.read_score, otypes=[float])(said)
    return Run(scores, said, time.perf_counter() - begin, sum(map(len, work.ids)))


def mlx_lm_rivals(peer: Any, eos_ids: tuple[int, ...]) -> dict[str, Generate]:
    """Greedy replies of mlx_lm's batch generator, with its default sizes and with 24 rows at once."""

    def generate(prompts: list[list[int]], limit: int, sizes: dict[str, int]) -> list[list[int]]:
        from mlx_lm.generate import BatchGenerator

        generator = BatchGenerator(peer, stop_tokens=[[i] for i in eos_ids], **sizes)  # type: ignore[arg-type]
        row_of = {uid: row for row, uid in enumerate(generator.insert(prompts, [limit] * len(prompts)))}
        replies: list[list[int]] = [[] for _ in prompts]
        while responses := generator.next_generated():
            for response in responses:
                if response.finish_reason != "stop":
                    replies[row_of[response.uid]].append(response.token)
        generator.close()
        return replies

    sizes = {"default": {}, "24 rows": {"completion_batch_size": 24, "prefill_batch_size": 24}}
    return {name: functools.partial(generate, sizes=chosen) for name, chosen in sizes.items()}


class Sample(NamedTuple):
    """One timed run."""

    run: Run
    peak_bytes: int


def measure(engines: dict[str, Engine], work: Work, warmup: int, runs: int) -> dict[str, list[Sample]]:
    """`runs` timed runs of each engine after `warmup` untimed ones, in turn, every other round in reverse order."""
    samples: dict[str, list[Sample]] = {name: [] for name in engines}
    for turn in tqdm(range(warmup + runs), desc="judging rounds", leave=False, disable=None):
        for name in list(engines) if turn % 2 == 0 else list(engines)[::-1]:
            mx.clear_cache()
            mx.reset_peak_memory()
            run = engines[name](work)
            if turn >= warmup:
                samples[name].append(Sample(run, mx.get_peak_memory()))
    return samples


def summary(samples: list[Sample], num_evaluations: int, num_pairs: int) -> dict[str, Any]:
    """Rates, milliseconds and megabytes of one engine over all its timed runs."""
    seconds = np.array([sample.run.seconds for sample in samples])
    numbers = {
        "crit_eval_s": num_evaluations / seconds.mean(),
        "pairs_s": num_pairs / seconds.mean(),
        "mean_ms": seconds.mean() * 1e3,
        "min_ms": seconds.min() * 1e3,
        "max_ms": seconds.max() * 1e3,
        "peak_mb": max(sample.peak_bytes for sample in samples) / 1e6,
        "unread": np.isnan(samples[0].run.scores).mean(),
    }
    return {"prefill_tokens": samples[0].run.num_tokens} | {n: round(float(x), 3) for n, x in numbers.items()}


def agreement(one: Run, other: Run) -> dict[str, float]:
    """Shares of the evaluations in which two engines gave the same score, or both none, and the same reply."""
    same = (one.scores == other.scores) | (np.isnan(one.scores) & np.isnan(other.scores))
    return {"scores": float(same.mean()), "replies": float((one.said == other.said).mean())}


def benchmark(
    args: argparse.Namespace, model: gwen.Model, tokenizer: Any, rival_name: str, ways: dict[str, Generate]
) -> dict[str, Any]:
    """Measures and reports; returns what belongs into the last line. Of the rival's `ways` the fastest counts."""
    work, tokenizer = make_work(args, tokenizer), Legible(tokenizer)
    mine = functools.partial(ours, model=model, tokenizer=tokenizer, chunk_size=args.judge_chunk_size)
    engines: dict[str, Engine] = {
        "ours": functools.partial(mine, mode="logits"),
        "ours_decode": functools.partial(mine, mode="decode"),
        **{name: functools.partial(rival, generate=way, tokenizer=tokenizer) for name, way in ways.items()},
    }
    samples = measure(engines, work, args.warmup, args.judge_runs)
    entries = {name: summary(samples[name], len(work.ids), len(work.prompts)) for name in engines}
    best = min(ways, key=lambda name: entries[name]["mean_ms"])
    samples[rival_name] = samples[best]
    num_whole, chunk = sum(map(len, work.ids)), args.judge_chunk_size
    print(
        f"Judge benchmark: pairs/run={len(work.prompts)} criteria={NUM_CRITERIA} "
        f"warmup={args.warmup} runs={args.judge_runs}"
    )
    print(
        f"Judge prompts: {num_whole} tokens, {work.num_distinct} in their tree; {judge.REPLY_TOKENS} tokens a reply; "
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


if __name__ == "__main__":
    telemetry.fail("bench_judge.py is no command; give --benchmark-judge to bench_rollout.py")
