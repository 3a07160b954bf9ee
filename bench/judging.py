"""
Judging of ours against another engine's on the same work: N answers to B questions by J criteria, all of random words,
so that nothing is easier for anybody. Part of `bench_rollout.py --benchmark-judge`.

Beside what the chat template and the tags add, the preamble has 100 words, a question `--prompt-tokens`, an answer
`--max-tokens` and a criterion 16. A rival does a rollout: every prompt as token ids, in the runs that prompts share,
and greedy tokens, in which a digit is then looked for. Ours is timed from the text on, with no score cached; the
preamble counts. Whether a judge is right is measured by `judge.py`.

Axes: B questions, N answers, J criteria.
"""

import argparse
import copy
import functools
import time
from typing import Any, NamedTuple

import numpy as np

import gwen
import judge
from bench import harness
from bench.rollout import Engine, Rival, Work
from judging import rubrics

PREAMBLE_WORDS, CRITERION_WORDS, NUM_CRITERIA = 100, 16, 3


class Judged(NamedTuple):
    evaluations: list[rubrics.Evaluation]  # (N * J)
    seconds: float
    num_tokens: int = 0  # that ours put through its model, with padding


def make_work(
    args: argparse.Namespace, tokenizer: Any
) -> tuple[rubrics.Rubric, list[tuple[str, str]], Work]:
    """A rubric, N questions and answers, and the same as prompts of J replies each."""
    lengths = (
        [PREAMBLE_WORDS] + [CRITERION_WORDS] * NUM_CRITERIA + [args.prompt_tokens] * args.batch
    )
    preamble, *texts = harness.random_texts(
        tokenizer, lengths + [args.max_tokens] * (args.batch * args.groups), args.seed
    )
    criteria = [rubrics.Criterion(f"{j}", 1.0, text) for j, text in enumerate(texts[:NUM_CRITERIA])]
    questions, answers = np.split(texts[NUM_CRITERIA:], [args.batch])
    pairs = list(zip(questions.repeat(args.groups).tolist(), answers.tolist(), strict=True))
    rubric = rubrics.Rubric(preamble, criteria)
    builder = rubrics.PromptBuilder(tokenizer, rubric)
    prompts: list[tuple[list[int], ...]] = [
        (builder.head, builder.encode_question(prompt), builder.encode_answer(completion), own)
        for prompt, completion in pairs
        for own in builder.own
    ]
    return (
        rubric,
        pairs,
        Work(prompts, 1, [], (), 0.0, args.judge_chunk_size, 0, with_logprobs=False),
    )


def make_legible(tokenizer: Any) -> Any:
    """A tokenizer that shows every id: those of a random model that it has no text for would all look alike."""
    shown, decode = copy.copy(tokenizer), tokenizer.decode
    shown.decode = lambda ids: "".join(
        decode([i]) if i < len(tokenizer) else f"<{i}>" for i in map(int, ids)
    )
    return shown


def benchmark(
    args: argparse.Namespace, model: gwen.Model, tokenizer: Any, rival: Rival
) -> dict[str, Any]:
    """
    Measures and reports judging; returns what belongs into the last line.

    Ours by logits is compared with the fastest way of the rival, ours by replies with the fastest that replies as it.
    """
    tokenizer, eos_ids = make_legible(tokenizer), model.config.end_ids
    rubric, pairs, work = make_work(args, tokenizer)

    def ours(mode: str) -> Judged:
        grader = judge.Judge(
            model, tokenizer, rubric, args.judge_chunk_size, mode
        )  # a fresh one, which knows no score
        begin = time.perf_counter()
        evaluations = dict(grader.evaluate(grader.questions(pairs)))
        seconds = time.perf_counter() - begin
        return Judged(
            [evaluations[place] for place in range(len(evaluations))],
            seconds,
            grader.tree.num_tokens,
        )

    def theirs(engine: Engine, limit: int) -> Judged:
        begin = time.perf_counter()
        replies = engine(
            work._replace(limits=[limit] * len(work.prompts), eos_ids=eos_ids)
        ).completions
        texts = [tokenizer.decode(ids[:-1] if ids[-1] in eos_ids else ids) for ids in replies]
        return Judged(list(map(rubrics.evaluation_from_reply, texts)), time.perf_counter() - begin)

    mine = {
        "ours": functools.partial(ours, "logits"),
        "ours_decode": functools.partial(ours, "decode"),
    }
    replying, brief = (
        {
            name + suffix: functools.partial(theirs, engine, limit)
            for name, engine in rival.engines.items()
        }
        for suffix, limit in (("", rubrics.REPLY_TOKENS), ("_one_token", 1))
    )
    samples = harness.run_in_turn(mine | replying | brief, args.warmup, args.judge_runs)
    entries, computed, num = {}, samples["ours"][0].run.num_tokens, len(pairs)
    print(
        f"Judge benchmark: pairs/run={num} criteria={NUM_CRITERIA} warmup={args.warmup} runs={args.judge_runs}"
    )
    print(
        f"Judge prompts: {sum(map(len, work.rows))} tokens, of which ours computes {computed}; "
        f"{rubrics.REPLY_TOKENS} tokens a reply; chunks of {args.judge_chunk_size}"
    )
    for name, its in samples.items():
        unread = np.isnan([one.score for one in its[0].run.evaluations]).mean()
        seconds = np.mean([sample.run.seconds for sample in its])
        rates = {"crit_eval_s": len(work.prompts) / seconds, "pairs_s": num / seconds}
        entry = entries[name] = harness.summarize(its, model, unread=unread, **rates)
        print(
            f"judge_{name.removesuffix('_mlx'):<11} | crit_eval/s {entry['crit_eval_s']:7.2f} | "
            f"pairs/s {entry['pairs_s']:6.2f} | peak {entry['peak_mb']:.0f} MB"
        )
    results: dict[str, Any] = {
        "engines": entries,
        "ratios": {},
        "agreement": {},
        "best": {},
        "computed": computed,
    }
    for name, ways in (("ours", replying | brief), ("ours_decode", replying)):
        best = min(ways, key=lambda way: entries[way]["mean_ms"])
        results["ratios"][name], results["best"][name] = (
            entries[best]["mean_ms"] / entries[name]["mean_ms"],
            best,
        )
        print(
            f"Judge result vs {rival.name}: {name} is {results['ratios'][name]:.2f}x as fast as {best} on this judging "
            f"workload ({harness.round_ratios(samples[name], samples[best])})."
        )
    for way in replying | brief:
        own = "ours" if way in brief else "ours_decode"
        share = score_agreement(samples[own][0].run.evaluations, samples[way][0].run.evaluations)
        results["agreement"][way] = share
        scores, replies = share["scores"], share["replies"]
        print(
            f"Agreement of {own} and {way}: {scores:.1%} of the scores, {replies:.1%} of the replies, to the letter"
        )
    return results


def score_agreement(
    ours: list[rubrics.Evaluation], theirs: list[rubrics.Evaluation]
) -> dict[str, float]:
    """Shares of the evaluations in which two engines gave the same score, or both none, and the same reply."""
    scores, _, replies = zip(*ours, strict=True)
    others, _, other_replies = zip(*theirs, strict=True)
    same = np.isclose(scores, others, rtol=0, atol=0, equal_nan=True)
    return {
        "scores": float(same.mean()),
        "replies": float(np.mean(np.equal(replies, other_replies))),
    }
