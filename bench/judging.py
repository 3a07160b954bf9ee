"""
Judging of ours against another engine's on the same work: N answers to B questions by J criteria, all of random words,
so that nothing is easier for anybody. Part of `bench_rollout.py --benchmark-judge`.

Beside what the chat template and the tags add, the preamble has 100 words, a question `--prompt-tokens`, an answer
`--max-tokens` and a criterion 16. A rival gets every prompt as token ids, in the segments that prompts share, and
writes greedy tokens, in which a digit is then looked for. Ours is timed from the text on, with no score cached; the
preamble counts. Whether a judge is right is measured by `judge.py`.

Axes: B questions, N answers, J criteria.
"""

import argparse
import functools
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

import gwen
import judge
from bench import harness
from judging import rubrics

PREAMBLE_WORDS, CRITERION_WORDS, NUM_CRITERIA = 100, 16, 3
Segments = tuple[list[int], ...]  # of a prompt: preamble, question, answer, criterion


class Replies(NamedTuple):
    """A way to get replies from a rival: ids of each prompt's greedy reply of so many tokens at most."""

    generate: Callable[[list[Segments], int], list[list[int]]]
    num_tokens: int = rubrics.REPLY_TOKENS


class Work(NamedTuple):
    """What every engine judges."""

    rubric: rubrics.Rubric
    prompts: list[str]  # (N,)
    completions: list[str]
    segments: list[Segments]  # (N * J)

    @property
    def num_tokens(self) -> int:
        return sum(len(segment) for row in self.segments for segment in row)


class Timing(NamedTuple):
    """What an engine made of it."""

    scores: np.ndarray  # (N, J), nan where none was readable
    replies: np.ndarray  # (N, J) of str: the likeliest first token, or the reply
    seconds: float
    num_tokens: int = 0  # that ours put through its model, with padding


def make_work(args: argparse.Namespace, tokenizer: Any) -> Work:
    rng = np.random.default_rng(args.seed)
    vocabulary = "one two three four five six seven eight nine plus is the answer number right sum and".split()

    def text(num_words: int) -> str:
        return " ".join(rng.choice(vocabulary, num_words).tolist())

    criteria = [rubrics.Criterion(f"{j}", 1.0, text(CRITERION_WORDS)) for j in range(NUM_CRITERIA)]
    rubric = rubrics.Rubric(text(PREAMBLE_WORDS), criteria)
    builder = rubrics.PromptBuilder(tokenizer, rubric)
    questions = [text(args.prompt_tokens) for _ in range(args.batch)]
    prompts = [question for question in questions for _ in range(args.groups)]
    completions = [text(args.max_tokens) for _ in prompts]
    segments: list[Segments] = [
        (builder.head, builder.question(prompt), builder.answer(completion), tail[builder.num_common :])
        for prompt, completion in zip(prompts, completions, strict=True)
        for tail in builder.tails
    ]
    return Work(rubric, prompts, completions, segments)


class Legible:
    """A tokenizer that shows every id: those of a random model that it has no text for would all look alike."""

    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tokenizer, name)

    def decode(self, ids: Any) -> str:
        known = len(self.tokenizer)
        return "".join(self.tokenizer.decode([int(i)]) if i < known else f"<{i}>" for i in ids)


def run_ours(work: Work, *, model: gwen.Model, tokenizer: Any, mode: str, chunk_size: int) -> Timing:
    """A fresh judge, which knows no score yet."""
    grader = judge.Judge(model, tokenizer, work.rubric, chunk_size, mode)
    begin = time.perf_counter()
    evaluations = dict(grader.evaluations(grader.questions(zip(work.prompts, work.completions, strict=True))))
    seconds = time.perf_counter() - begin
    ordered = [evaluations[place] for place in range(len(evaluations))]
    scores, replies = np.array([one.score for one in ordered]), np.array([one.reply for one in ordered], object)
    return Timing(scores.reshape(-1, NUM_CRITERIA), replies.reshape(-1, NUM_CRITERIA), seconds, grader.num_tokens)


def run_rival(work: Work, *, way: Replies, tokenizer: Any) -> Timing:
    begin = time.perf_counter()
    replies = way.generate(work.segments, way.num_tokens)
    texts = np.array([tokenizer.decode(reply) for reply in replies], object).reshape(-1, NUM_CRITERIA)
    return Timing(np.vectorize(rubrics.read_score, otypes=[float])(texts), texts, time.perf_counter() - begin)


def agreement(one: Timing, other: Timing) -> dict[str, float]:
    """Shares of the evaluations in which two engines gave the same score, or both none, and the same reply."""
    same = (one.scores == other.scores) | (np.isnan(one.scores) & np.isnan(other.scores))
    return {"scores": float(same.mean()), "replies": float((one.replies == other.replies).mean())}


def benchmark(
    args: argparse.Namespace, model: gwen.Model, tokenizer: Any, rival: str, ways: dict[str, Replies]
) -> dict[str, Any]:
    """
    Measures and reports judging; returns what belongs into the last line.

    Ours by logits is compared with the fastest way of the rival, ours by replies with the fastest that replies as it.
    """
    work, tokenizer = make_work(args, tokenizer), Legible(tokenizer)
    mine = functools.partial(run_ours, model=model, tokenizer=tokenizer, chunk_size=args.judge_chunk_size)
    engines: dict[str, Callable[[Work], Timing]] = {
        "ours": functools.partial(mine, mode="logits"),
        "ours_decode": functools.partial(mine, mode="decode"),
        **{name: functools.partial(run_rival, way=way, tokenizer=tokenizer) for name, way in ways.items()},
    }
    samples = harness.in_turn(engines, work, args.warmup, args.judge_runs)
    entries = {}
    for name, its in samples.items():
        unread, seconds = np.isnan(its[0].run.scores).mean(), np.mean([sample.run.seconds for sample in its])
        rates = {"crit_eval_s": len(work.segments) / seconds, "pairs_s": len(work.prompts) / seconds}
        entries[name] = harness.summary(its, model, unread=unread, **rates)
    computed = samples["ours"][0].run.num_tokens
    print(
        f"Judge benchmark: pairs/run={len(work.prompts)} criteria={NUM_CRITERIA} "
        f"warmup={args.warmup} runs={args.judge_runs}"
    )
    print(
        f"Judge prompts: {work.num_tokens} tokens, of which ours computes {computed}; "
        f"{rubrics.REPLY_TOKENS} tokens a reply; chunks of {args.judge_chunk_size}"
    )
    for name, entry in entries.items():
        print(
            f"judge_{name.removesuffix('_mlx'):<11} | crit_eval/s {entry['crit_eval_s']:7.2f} | "
            f"pairs/s {entry['pairs_s']:6.2f} | peak {entry['peak_mb']:.0f} MB"
        )
    results: dict[str, Any] = {"engines": entries, "ratios": {}, "agreement": {}, "best": {}, "computed": computed}
    for name, least in (("ours", 1), ("ours_decode", rubrics.REPLY_TOKENS)):
        comparable = [way for way in ways if ways[way].num_tokens >= least]
        best = min(comparable, key=lambda way: entries[way]["mean_ms"])
        ratio = entries[best]["mean_ms"] / entries[name]["mean_ms"]
        print(
            f"Judge result vs {rival}: {name} is {ratio:.2f}x as fast as {best} on this judging workload "
            f"({harness.rounds(samples[name], samples[best])})."
        )
        results["ratios"][name], results["best"][name] = round(ratio, 3), best
    for way in ways:
        own = "ours_decode" if ways[way].num_tokens == rubrics.REPLY_TOKENS else "ours"
        share = results["agreement"][way] = agreement(samples[own][0].run, samples[way][0].run)
        scores, replies = share["scores"], share["replies"]
        print(f"Agreement of {own} and {way}: {scores:.1%} of the scores, {replies:.1%} of the replies, to the letter")
    return results
