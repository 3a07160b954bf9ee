"""
Held-out evaluation: `uv run evaluate.py --model M [--adapter DIR] --task T [--limit N] [--samples K]`.

Every held-out problem once: `samples` completions at temperature 1 from a fixed seed, and one greedy completion. Tasks
with a right answer report accuracy by their verifier, which training rewards cannot bend; the others report the score
of a frozen judge, or, where a user's rewards took its place, the weighted sum of those. What is left out: training
problems.
"""

import functools
import json
import math
import sys
import time
from pathlib import Path
from typing import Any

import cpu_blas  # noqa: F401  (before mlx)
import numpy as np

import config
import dispatch
import gpu
import gwen
import judge
import sampler
import tasks
import telemetry

KEY = 1 << 96  # of the evaluation's randomness; training keys are smaller


def pass_at_k(num_samples: int, num_right: int, k: int) -> float:
    """
    The chance that one of k completions drawn from `num_samples` is right, unbiased.

    Source: Chen et al., arXiv:2107.03374, eq. 1.
    """
    return 1 - math.comb(num_samples - num_right, k) / math.comb(num_samples, k)


def mean(values: np.ndarray) -> float | None:
    """The mean of what could be scored; None when nothing could."""
    readable = values[~np.isnan(values)]
    return float(readable.mean()) if readable.size else None


def half_width(by_problem: np.ndarray) -> float | None:
    """Half of the 95% confidence interval of a mean over problems, by the normal approximation; None below two."""
    readable = by_problem[~np.isnan(by_problem)]
    return float(1.96 * readable.std(ddof=1) / math.sqrt(readable.size)) if readable.size > 1 else None


def completions_of(
    model: gwen.Model, tokenizer: Any, prompts: list[list[int]], params: sampler.SamplingParams, **settings: Any
) -> tuple[list[str], list[int]]:
    """
    Text of the sampled completions, prompt-major, without end tokens, and how many tokens each has.

    settings: see `sampler.rollout`.
    """
    rollout = sampler.rollout(model, prompts, params, key=KEY, **settings)
    num_tokens = np.array(rollout.mask).sum(-1).astype(int).tolist()
    return sampler.texts(tokenizer, rollout, model.config.eos_ids), num_tokens


def evaluate(
    model: gwen.Model,
    tokenizer: Any,
    task: tasks.Task,
    *,
    max_tokens: int,
    rollout_batch_size: int | sampler.BatchSize | None,
    share_prefix: bool | None = None,
    grader: judge.Grader | None = None,
    samples: int = 1,
    limit: int | None = None,
    thinking: bool = False,
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """
    The record of `eval.jsonl` (without `step`) and one record for each held-out problem.

    rollout_batch_size: None measures it on a GPU, and is the usual one without. share_prefix: see `sampler.rollout`.
    grader: scores where the task has no verifier; where there is neither, the task's rewards do. Accuracy and score
    are those of the first completion of each problem; `eval/mean_at_k` is the mean over all samples, `eval/pass_at_1`
    is unbiased.

    Raises ValueError when there are no problems, a prompt is too long or a reward lacks a column, before any decoding.
    """
    begin = time.perf_counter()
    problems = tasks.spread(task.held_out, limit)
    if not problems:
        raise ValueError("no prompt is held out, so there is nothing to evaluate; give --data more prompts")
    prompts = tasks.render(
        tokenizer,
        problems,
        max_tokens=max_tokens,
        context=model.config.max_position_embeddings,
        thinking=thinking,
        kind="held-out prompt",
    )
    rewards, weights = task.rewards, task.reward_weights
    if task.verifier is not None:
        rewards, weights = {"correct": task.verifier}, {"correct": 1.0}
    judged_only = task.verifier is None and grader is not None
    if not judged_only:
        assert rewards, f"task {task.name} is scored by a judge"
        for name, reward in rewards.items():
            tasks.reward_columns(name, reward, tasks.reward_arguments(problems))
    if rollout_batch_size is None:
        rollout_batch_size = dispatch.USUAL_ROWS
        if gpu.on_gpu():
            lengths = [len(prompt) for prompt in prompts]
            num_rows = len(prompts) * samples
            chosen, why = dispatch.choose(model, lengths, max_tokens=max_tokens, group_size=samples, most_rows=num_rows)
            print(why, file=sys.stderr)
            rollout_batch_size, share_prefix = chosen.rows, chosen.share_prefix
    if isinstance(rollout_batch_size, int):
        rollout_batch_size = sampler.BatchSize(rollout_batch_size)  # one for both, so that they remember together
    settings: dict[str, Any] = {"batch_size": rollout_batch_size, "share_prefix": share_prefix}
    params = sampler.SamplingParams(max_tokens, eos_ids=model.config.eos_ids)
    sampled, sampled_lengths = completions_of(model, tokenizer, prompts, params, group_size=samples, **settings)
    params = params._replace(temperature=0.0)
    greedy, greedy_lengths = completions_of(model, tokenizer, prompts, params, group_size=1, **settings)

    def scored(texts: list[str], lengths: list[int], repeat: int) -> tuple[np.ndarray, np.ndarray | None]:
        """One number a completion (right or reward), and the judge's scores where it was the judge who gave it."""
        repeated = [problem for problem in problems for _ in range(repeat)]
        asked = [problem["prompt"] for problem in repeated]
        if judged_only and grader is not None:
            judged = grader.score([tasks.prompt_text(prompt) for prompt in asked], texts)
            return judged.rewards, judged.scores
        columns: dict[str, Any] = {
            key: [problem[key] for problem in repeated] for key in problems[0] if key != "prompt"
        }
        columns["num_tokens"] = lengths
        parts = [
            weights[name] * np.array(tasks.call_reward(name, reward, asked, texts, columns))
            for name, reward in rewards.items()
        ]
        return np.sum(parts, axis=0), None

    values, judged_scores = scored(sampled, sampled_lengths, samples)
    values = values.reshape(-1, samples)
    greedy_values, _ = scored(greedy, greedy_lengths, 1)
    record: dict[str, Any] = {f"eval/{task.metric}": mean(values[:, 0])}
    measures = {"mean_at_k": np.array([np.nan if (m := mean(row)) is None else m for row in values])}
    if task.metric == "accuracy":
        right = values.sum(-1).astype(int)
        for k in sorted({1, samples}):
            measures[f"pass_at_{k}"] = np.array([pass_at_k(samples, int(r), k) for r in right])
    for name, by_problem in measures.items():
        record[f"eval/{name}"] = mean(by_problem)
        record[f"eval/{name}_ci95"] = half_width(by_problem)
    record |= {"eval/num": len(problems), "eval/samples": samples, "eval/greedy": mean(greedy_values)}
    if judged_scores is not None and grader is not None:
        by_criterion = judged_scores.reshape(len(problems), samples, -1)
        categories = np.array([str(problem.get("category")) for problem in problems])
        for index, criterion in enumerate(grader.rubric.criteria):
            record[f"eval/score/{criterion.name}"] = mean(by_criterion[:, :, index])
            for category in sorted(set(categories)):
                part = by_criterion[categories == category, :, index]
                record[f"eval/score/{criterion.name}/{category}"] = mean(part)
    record["eval/s"] = time.perf_counter() - begin
    details = [
        {
            "prompt": problem["prompt"],
            "answer": problem.get("answer"),
            "completions": sampled[index * samples : (index + 1) * samples],
            "values": [None if math.isnan(value) else value for value in values[index].tolist()],
            "greedy": greedy[index],
            "greedy_value": None if math.isnan(greedy_values[index]) else float(greedy_values[index]),
        }
        for index, problem in enumerate(problems)
    ]
    return record, details


def remember(log: telemetry.JsonLines, grader: judge.Grader) -> None:
    """Writes the judge's new scores."""
    for record in grader.cache.take_fresh():
        log.write({"step": 0} | record)


def main(argv: list[str] | None = None) -> None:
    parser = telemetry.Parser("evaluate.py", "Evaluate a model on held-out problems.")
    parser.add_argument(
        "--model", help="demo, a Hugging Face directory or a hub id (default: the adapter's, else demo without a GPU)"
    )
    parser.add_argument("--adapter", metavar="DIR", help="a run, its checkpoint, or an adapter in mlx_lm's layout")
    parser.add_argument("--task", help="demo, values or gsm8k (default: demo with the demo model, else values)")
    parser.add_argument("--data", help="held-out problems from a file or hub dataset, instead of the task's")
    parser.add_argument("--columns", help="names of the data's columns, as prompt=question,answer=answer")
    parser.add_argument("--limit", type=int, help="only N of the problems, evenly spread")
    parser.add_argument("--samples", type=int, default=1, help="K completions a problem")
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument(
        "--rollout-batch-size",
        type=dispatch.parse_size,
        default="auto",
        help="rows decoded at once (default: auto, which is measured on a GPU and 64 without)",
    )
    config.add_flags(parser, config.JudgeSettings)  # for tasks that a judge scores
    parser.add_argument("--judge-cache", type=Path, metavar="FILE", help="scores to know and to add to, as a run's")
    parser.add_argument("--thinking", action="store_true")
    parser.add_argument("--out", type=Path, help="a JSON line for each problem goes to this file")
    args = parser.parse_args(argv)
    try:
        for flag in ("limit", "samples", "max_tokens", "rollout_batch_size"):
            if (value := getattr(args, flag)) not in (None, "auto") and value < 1:
                raise ValueError(f"--{flag.replace('_', '-')} is {value}; it must be at least 1")
        for flag, path in (("--out", args.out), ("--judge-cache", args.judge_cache)):
            if path and (path.is_dir() or not path.absolute().parent.is_dir()):
                raise ValueError(f"{flag} {path} is no file in an existing directory; make the directory first")
        judging = config.judge_of_flags(args)
        name, why = gwen.choose_model(args.model, args.adapter)
        task = tasks.load(
            args.task or ("demo" if name == "demo" else "values"), held_out=args.data, columns=args.columns
        )
        model, tokenizer = gwen.load(name, adapter=args.adapter)
        grader = None
        if task.rubric is not None and task.metric == "score":
            same = not args.adapter and judging.judge_model in ("", name)
            grader = judge.make(
                judging, task.rubric, lambda: (model, tokenizer) if same else gwen.load(judging.judge_model or name)
            )
            if args.judge_cache:
                grader.cache.load(args.judge_cache)
                grader.on_score = functools.partial(remember, telemetry.JsonLines(args.judge_cache), grader)
        print(f"model: {name}, {why}; task: {task.name}", file=sys.stderr)
        record, details = evaluate(
            model,
            tokenizer,
            task,
            max_tokens=args.max_tokens,
            rollout_batch_size=None if args.rollout_batch_size == "auto" else args.rollout_batch_size,
            grader=grader,
            samples=args.samples,
            limit=args.limit,
            thinking=args.thinking,
        )
        print(json.dumps(record))  # before the files, which may not fit on the disk
        if args.out:
            args.out.write_text("".join(json.dumps(detail, default=str) + "\n" for detail in details))
    except (ValueError, OSError) as error:
        telemetry.fail(error)


if __name__ == "__main__":
    main()
