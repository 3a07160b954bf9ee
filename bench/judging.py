"""
Compares how fast Gwen and another engine judge the same answers.

`bench_rollout.py --benchmark-judge` runs this benchmark. Both engines judge N answers to B
questions by J criteria. All texts consist of random words. The preamble of the judge's prompt has
100 words, and each criterion has 16 words. `--prompt-tokens` sets the number of words in a
question, and `--max-tokens` sets the number of words in an answer. The chat template adds further
text, as do the tags around each question and answer.

The other engine, called the rival, judges by generating replies. The rival gets the token ids of
each prompt, divided into parts such as the preamble and the question, because several prompts begin
with the same parts. The score is the digit in the rival's greedy reply. Gwen's time includes
encoding all texts and processing the preamble, and no scores are cached. This file does not measure
how accurate a judge is (see judge.py).

Axes: B questions, N answers, J criteria.
"""

import argparse
import copy
import functools
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

import gwen
import judge
from bench import harness
from bench.harness import TimedRun
from bench.rollout import Engine, Rival, RolloutWork
from judging import judge_prompts, rubrics
from judging.evaluations import REPLY_TOKENS, CriterionEvaluation, evaluation_from_reply

PREAMBLE_WORDS = 100
CRITERION_WORDS = 16
NUM_CRITERIA = 3


class TimedJudging(NamedTuple):
    """The result of one timed run in which an engine judges all answers."""

    evaluations: list[CriterionEvaluation]  # (N * J)
    seconds: float
    num_tokens: int = 0  # the number of tokens that Gwen's model processed, including padding


def make_judging_work(
    args: argparse.Namespace, tokenizer: Any
) -> tuple[rubrics.Rubric, list[tuple[str, str]], RolloutWork]:
    """
    Returns a rubric, N pairs of a question and an answer, and the rollout that judges the pairs.

    The rollout has N * J prompts, one for each pair and each criterion.
    """
    lengths = [PREAMBLE_WORDS]
    lengths += [CRITERION_WORDS] * NUM_CRITERIA
    lengths += [args.prompt_tokens] * args.batch
    lengths += [args.max_tokens] * (args.batch * args.groups)
    preamble, *texts = harness.random_texts(tokenizer, lengths, args.seed)
    criteria = [
        rubrics.Criterion(f"{number}", 1.0, text)
        for number, text in enumerate(texts[:NUM_CRITERIA])
    ]
    questions, answers = np.split(texts[NUM_CRITERIA:], [args.batch])
    pairs = list(zip(questions.repeat(args.groups).tolist(), answers.tolist(), strict=True))
    rubric = rubrics.Rubric(preamble, criteria)

    builder = judge_prompts.JudgePromptEncoder(tokenizer, rubric)
    prompts: list[tuple[list[int], ...]] = []
    for question, answer in pairs:
        question_ids = builder.encode_question_segment(question)
        answer_ids = builder.encode_answer_segment(answer)
        for tail in builder.criterion_tails:
            prompts.append((builder.head, question_ids, answer_ids, tail))
    work = RolloutWork(
        prompts=prompts,
        group_size=1,
        limits=[],
        eos_ids=(),
        temperature=0.0,
        batch_size=args.judge_chunk_size,
        seed=0,
        with_logprobs=False,
    )
    return rubric, pairs, work


def copy_with_visible_decoding(tokenizer: Any) -> Any:
    """
    Returns a copy of a tokenizer that decodes every token id, known or not, to visible text.

    A random model generates ids that are not in the vocabulary, and the tokenizer would decode all
    of them to the same text.
    """
    legible = copy.copy(tokenizer)
    decode = tokenizer.decode

    def decode_to_visible_text(ids: Any) -> str:
        pieces = []
        for token_id in map(int, ids):
            if token_id < len(tokenizer):
                pieces.append(decode([token_id]))
            else:
                pieces.append(f"<{token_id}>")
        return "".join(pieces)

    legible.decode = decode_to_visible_text
    return legible


# ---- engines


def judge_with_gwen(
    args: argparse.Namespace,
    model: gwen.Model,
    tokenizer: Any,
    rubric: rubrics.Rubric,
    pairs: list[tuple[str, str]],
    mode: str,
) -> TimedJudging:
    # make a new judge, which has no cached scores
    grader = judge.Judge(model, tokenizer, rubric, args.judge_chunk_size, mode)
    begin = time.perf_counter()
    evaluations = dict(grader.score_questions(grader.make_questions(pairs)))
    seconds = time.perf_counter() - begin
    ordered = [evaluations[index] for index in range(len(evaluations))]
    return TimedJudging(ordered, seconds, grader.tree.num_tokens)


def judge_with_rival(engine: Engine, work: RolloutWork, limit: int, tokenizer: Any) -> TimedJudging:
    """Judges by letting a rival generate replies of at most `limit` tokens."""
    begin = time.perf_counter()
    replies = engine(work._replace(limits=[limit] * len(work.prompts))).completions
    evaluations = []
    for ids in replies:
        text_ids = ids[:-1] if ids[-1] in work.eos_ids else ids
        text = tokenizer.decode(text_ids)
        evaluations.append(evaluation_from_reply(text))
    return TimedJudging(evaluations, time.perf_counter() - begin)


# ---- the measurement


def benchmark_and_print_judging(
    args: argparse.Namespace, model: gwen.Model, tokenizer: Any, rival: Rival
) -> dict[str, Any]:
    """
    Times judging, prints the results, and returns the record for the benchmark's JSON line.

    Gwen's mode `logits`, which computes a score from the probabilities of a reply's first token, is
    compared with the rival's fastest way of judging. Gwen's mode `decode`, which generates full
    replies, is compared with the rival's fastest way of generating full replies.
    """
    tokenizer = copy_with_visible_decoding(tokenizer)
    rubric, pairs, work = make_judging_work(args, tokenizer)
    work = work._replace(eos_ids=model.config.end_ids)
    run_gwen = functools.partial(judge_with_gwen, args, model, tokenizer, rubric, pairs)
    gwen_engines = {
        "ours": functools.partial(run_gwen, "logits"),
        "ours_decode": functools.partial(run_gwen, "decode"),
    }
    reply_engines = {}
    one_token_engines = {}
    for name, engine in rival.engines.items():
        run_rival = functools.partial(judge_with_rival, engine, work, tokenizer=tokenizer)
        reply_engines[name] = functools.partial(run_rival, limit=REPLY_TOKENS)
        one_token_engines[f"{name}_one_token"] = functools.partial(run_rival, limit=1)
    rival_engines = reply_engines | one_token_engines
    samples = harness.time_engines_in_turn(
        gwen_engines | rival_engines, args.warmup, args.judge_runs
    )

    num_computed = samples["ours"][0].run.num_tokens
    num_prompt_tokens = sum(map(len, work.prompt_ids_by_row))
    print(
        f"Judge benchmark: pairs/run={len(pairs)} criteria={NUM_CRITERIA} "
        f"warmup={args.warmup} runs={args.judge_runs}"
    )
    print(
        f"Judge prompts: {num_prompt_tokens} tokens, of which Gwen computes {num_computed}, "
        "because it computes each shared beginning of prompts only once; "
        f"at most {REPLY_TOKENS} tokens per reply; chunk size {args.judge_chunk_size}"
    )
    entries = {}
    for name, engine_samples in samples.items():
        entries[name] = summarize_judging(engine_samples, model, len(work.prompts), len(pairs))
        print_judging_entry(name, entries[name])

    results: dict[str, Any] = {
        "engines": entries,
        "ratios": {},
        "agreement": {},
        "best": {},
        "computed": num_computed,
    }
    for name, ways in (("ours", rival_engines), ("ours_decode", reply_engines)):
        best = min(ways, key=lambda way: entries[way]["mean_ms"])
        ratio = entries[best]["mean_ms"] / entries[name]["mean_ms"]
        results["ratios"][name] = ratio
        results["best"][name] = best
        rounds = harness.describe_rival_time_ratios(samples[name], samples[best])
        print(
            f"Judge result vs {rival.name}: {name} is {ratio:.2f}x as fast as {best} on this "
            f"judging workload ({rounds})."
        )
    results["agreement"] = measure_and_print_agreement(samples, reply_engines, one_token_engines)
    return results


def summarize_judging(
    samples: list[TimedRun], model: gwen.Model, num_evaluations: int, num_pairs: int
) -> dict[str, float]:
    """
    Returns an engine's times, peak memory and judging speed, and its fraction of unreadable scores.

    Only the first run's scores are counted.
    """
    scores = [evaluation.score for evaluation in samples[0].run.evaluations]
    seconds = np.mean([sample.run.seconds for sample in samples])
    return harness.summarize_times_and_peak(
        samples,
        model,
        unread=np.isnan(scores).mean(),
        crit_eval_s=num_evaluations / seconds,
        pairs_s=num_pairs / seconds,
    )


def print_judging_entry(name: str, entry: dict[str, float]) -> None:
    print(
        f"judge_{name.removesuffix('_mlx'):<11} | crit_eval/s {entry['crit_eval_s']:7.2f} | "
        f"pairs/s {entry['pairs_s']:6.2f} | peak {entry['peak_mb']:.0f} MB"
    )


def measure_and_print_agreement(
    samples: Mapping[str, list[TimedRun]],
    reply_engines: Mapping[str, Any],
    one_token_engines: Mapping[str, Any],
) -> dict[str, dict[str, float]]:
    """
    Prints and returns how often Gwen agrees with each of the rival's ways of judging.

    Replies of full length are compared with Gwen's mode `decode`, and replies of one token with
    Gwen's mode `logits`.
    """
    partners = dict.fromkeys(reply_engines, "ours_decode")
    partners |= dict.fromkeys(one_token_engines, "ours")
    agreement = {}
    for way, name in partners.items():
        gwen_run = samples[name][0].run
        rival_run = samples[way][0].run
        agreement[way] = score_and_reply_agreement(gwen_run.evaluations, rival_run.evaluations)
        print(
            f"Agreement of {name} and {way}: {agreement[way]['scores']:.1%} of the scores are "
            f"equal, and {agreement[way]['replies']:.1%} of the replies are identical"
        )
    return agreement


def score_and_reply_agreement(
    gwen_evaluations: list[CriterionEvaluation], rival_evaluations: list[CriterionEvaluation]
) -> dict[str, float]:
    """
    Returns the fraction of judgements with equal scores, and the fraction with equal replies.

    Two unreadable scores count as equal.
    """
    gwen_scores = [evaluation.score for evaluation in gwen_evaluations]
    rival_scores = [evaluation.score for evaluation in rival_evaluations]
    same_score = np.isclose(gwen_scores, rival_scores, rtol=0, atol=0, equal_nan=True)
    gwen_replies = [evaluation.reply for evaluation in gwen_evaluations]
    rival_replies = [evaluation.reply for evaluation in rival_evaluations]
    same_reply = np.equal(gwen_replies, rival_replies)
    return {"scores": float(same_score.mean()), "replies": float(same_reply.mean())}
