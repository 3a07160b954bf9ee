"""
Judging against engines that generate text, on the same prompts: what `--benchmark-judge` of the rollout benchmarks does.

The work is N answers to B questions, judged by J criteria, all of random words, so that nothing in it is easier for
anybody. With what the chat template and the tags add, the preamble has 120 tokens, a question `--prompt-tokens`, an
answer `--max-tokens` and a criterion 24, or the fewest that the template allows. A rival gets every prompt whole, as
token ids, and writes up to 16 greedy tokens, in which a digit is then looked for. Ours are timed from the text on, with
no score cached; the preamble counts.

What is left out: whether a judge is right, which `judge.py` measures.

Axes: N answers, J criteria.
"""

import argparse
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
from tqdm import tqdm

import gwen
import judge
import rubrics

PREAMBLE_TOKENS, CRITERION_TOKENS, NUM_CRITERIA = 120, 24, 3

Generate = Callable[[list[list[int]], int], list[list[int]]]  # prompts and a limit -> greedy ids of each


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


def mlx_lm_generate(prompts: list[list[int]], limit: int, *, peer: Any, eos_ids: tuple[int, ...], size: int) -> Any:
    """Greedy replies of mlx_lm's batch generator with `size` rows at once; 0: its default sizes."""
    from mlx_lm.generate import BatchGenerator

    sizes: Any = {"completion_batch_size": size, "prefill_batch_size": size} if size else {}
    generator = BatchGenerator(peer, stop_tokens=[[i] for i in eos_ids], **sizes)
    row_of = {uid: row for row, uid in enumerate(generator.insert(prompts, [limit] * len(prompts)))}
    replies: list[list[int]] = [[] for _ in prompts]
    while responses := generator.next_generated():
        for response in responses:
            if response.finish_reason != "stop":
                replies[row_of[response.uid]].append(response.token)
    generator.close()
    return replies


def measure(engines: dict[str, Engine], work: Work, warmup: int, runs: int) -> dict[str, list[tuple[Run, int]]]:
    """`runs` timed runs of each engine and its peak bytes, after `warmup` untimed ones, in turn."""
    samples: dict[str, list[tuple[Run, int]]] = {name: [] for name in engines}
    for turn in tqdm(range(warmup + runs), desc="judging rounds", leave=False, disable=None):
        for name in list(engines) if turn % 2 == 0 else list(engines)[::-1]:
            mx.clear_cache()
            mx.reset_peak_memory()
            run = engines[name](work)
            if turn >= warmup:
                samples[name].append((run, mx.get_peak_memory()))
    return samples


def agreement(one: Run, other: Run) -> dict[str, float]:
    """Shares of the evaluations in which two engines gave the same score, or both none, and the same reply."""
    same = (one.scores == other.scores) | (np.isnan(one.scores) & np.isnan(other.scores))
    return {"scores": float(same.mean()), "replies": float((one.said == other.said).mean())}


def benchmark(
    args: argparse.Namespace, model: gwen.Model, tokenizer: Any, rivals: dict[str, Generate]
) -> dict[str, Any]:
    """Measures and reports; returns what belongs into the last line."""
    work = make_work(args, tokenizer)
    chunk = args.judge_chunk_size
    engines: dict[str, Engine] = {}
    for mode in judge.MODES:

        def engine(work: Work, mode: str = mode) -> Run:
            return ours(work, model=model, tokenizer=tokenizer, mode=mode, chunk_size=chunk)

        engines["ours" if mode == "logits" else "ours_decode"] = engine
    for name, generate in rivals.items():

        def other(work: Work, generate: Generate = generate) -> Run:
            return rival(work, generate=generate, tokenizer=tokenizer)

        engines[name] = other
    samples = measure(engines, work, args.warmup, args.judge_runs)
    num_pairs, num_evaluations = len(work.prompts), len(work.ids)
    print(f"Judge benchmark: pairs/run={num_pairs} criteria={NUM_CRITERIA} warmup={args.warmup} runs={args.judge_runs}")
    print(
        f"Judge prompts: {sum(map(len, work.ids))} tokens, {work.num_distinct} in their tree, chunks of {chunk}; "
        f"rivals write {judge.REPLY_TOKENS} tokens"
    )
    entries: dict[str, Any] = {}
    for name, runs in samples.items():
        seconds = np.array([run.seconds for run, _ in runs])
        entries[name] = {
            "crit_eval_s": round(num_evaluations / seconds.mean(), 3),
            "pairs_s": round(num_pairs / seconds.mean(), 3),
            "mean_ms": round(seconds.mean() * 1e3, 1),
            "min_ms": round(seconds.min() * 1e3, 1),
            "max_ms": round(seconds.max() * 1e3, 1),
            "prefill_tokens": runs[0][0].num_tokens,
            "peak_mb": round(max(peak for _, peak in runs) / 1e6, 1),
            "unread": round(float(np.isnan(runs[0][0].scores).mean()), 3),
        }
        print(
            f"judge_{name:<12} | crit_eval/s {entries[name]['crit_eval_s']:7.2f} | "
            f"pairs/s {entries[name]['pairs_s']:7.2f} | peak {entries[name]['peak_mb']:.0f} MB | "
            f"{entries[name]['prefill_tokens']} tokens"
        )
    agreements = {name: agreement(samples["ours_decode"][0][0], samples[name][0][0]) for name in rivals}
    for name, share in agreements.items():
        print(
            f"Agreement of ours_decode and {name}: {share['scores']:.1%} of the scores, "
            f"{share['replies']:.1%} of the replies, to the letter"
        )
    return {"engines": entries, "agreement": agreements, "distinct_tokens": work.num_distinct}
