"""
What a step leaves on record: its figures (`metrics.jsonl`) and its completions (`rollouts.jsonl`).

Pure: a step goes in, dictionaries come out. A figure that nobody measured is None. The keys are explained in
`docs/reference.md`. What is left out: writing and printing.
"""

import base64
import math
from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

import cpu_blas  # noqa: F401  (before mlx)
import numpy as np

import sampler
import update
from config import Config
from groups import Draw, advantages_of, has_signal


class Step(NamedTuple):
    """All that is known of a step when it is over."""

    number: int  # from 1
    seconds: dict[str, float]  # by phase
    draws: list[Draw]
    rollout: sampler.Rollout  # of the groups that were trained
    chosen: list[int]  # these groups, numbered through all draws
    advantages: np.ndarray  # (B, G)
    result: update.UpdateResult
    recent: Collection[float]  # seconds of the last steps, this one included
    num_forwards: int  # rows that went through a model in the update
    num_skipped: int  # optimizer steps of the run that changed nothing
    loss_scale: float
    peak_bytes: int


def mean(values: np.ndarray) -> float | None:
    """The mean of what could be scored; None when nothing could."""
    readable = values[~np.isnan(values)]
    return float(readable.mean()) if readable.size else None


def step_metrics(config: Config, step: Step) -> dict[str, Any]:
    """The object of `metrics.jsonl`."""
    seconds, draws, advantages, result = step.seconds, step.draws, step.advantages, step.result
    stats = [draw.rollout.stats for draw in draws]
    num_tokens, num_rows = sum(one.num_tokens for one in stats), len(draws) * advantages.size
    num_trained = round(float(step.rollout.mask.sum()))
    train_s = sum(seconds.get(phase, 0.0) for phase in ("reward", "judge", "ref", "update"))
    rewards, filled = ([getattr(draw.rewards, name) for draw in draws] for name in ("total", "filled"))
    judged = [draw.rewards.judgement for draw in draws if draw.rewards.judgement is not None]
    judge_s = sum(one.stats.seconds for one in judged)
    num_judged = sum(one.stats.num_evaluations for one in judged)
    num_scores = sum(one.scores.size for one in judged)
    num_groups = len(draws) * config.batch
    num_signal = int(has_signal(advantages_of(config, draws, list(range(num_groups)))).sum())
    any_readable = np.isfinite(np.concatenate(rewards)).any()
    metrics: dict[str, Any] = {
        "step": step.number,
        "loss": result.loss,
        "reward/mean": mean(np.concatenate(rewards)),
        "reward/std": float(np.concatenate(filled).std(axis=1, ddof=1).mean()) if any_readable else None,
        "reward/zero_std_frac": 1 - num_signal / num_groups,
        **{
            f"reward/{name}": mean(np.concatenate([draw.rewards.components[name] for draw in draws]))
            for name in draws[0].rewards.components
        },
        "sampling/draws": len(draws),
        "sampling/signal_groups": num_signal,
        "sampling/unused_frac": 1 - advantages.size / num_rows,
        "rollout/s": seconds["rollout"],
        "rollout/tok_s": num_tokens / seconds["rollout"],
        "prefill/s": sum(one.prefill_s for one in stats),
        "decode/s": sum(one.decode_s for one in stats),
        "reward/s": seconds["reward"],
        "judge/s": seconds.get("judge", 0.0),
        "judge/crit_eval_s": num_judged / judge_s if num_judged else None,
        "judge/unparsed": sum(one.unparsed for one in judged) if judged else None,
        "judge/unparsed_frac": sum(one.unparsed for one in judged) / num_scores if judged else None,
        "judge/mass": mean(np.array([one.stats.mass for one in judged])),
        "judge/cached": sum(one.stats.num_cached for one in judged) if judged else None,
        "ref/s": seconds.get("ref", 0.0),
        "update/s": seconds["update"],
        "update/tok_s": num_trained / seconds["update"] if num_trained else None,
        "train/s": train_s,
        "train/tok_s": num_trained / train_s,
        "other/s": seconds["other"],
        "step/s": seconds["step"],
        "step_avg_last10/s": sum(step.recent) / len(step.recent),
        "kl": result.means["kl"],
        "entropy": result.means["entropy"],
        "clip_frac": result.means["clip_frac"],
        "grad_norm": result.grad_norm,
        "loss_scale": step.loss_scale,
        "lr": result.lr,
        "update/kl": result.moved,
        "update/rate": result.rate,
        "update/repeats": result.repeats,
        "skipped": result.skipped,
        "skipped_total": step.num_skipped,
        "completion/mean_tokens": num_tokens / num_rows,
        "completion/truncated_frac": sum(d.rollout.finish_reasons.count("length") for d in draws) / num_rows,
        "mismatch/logprob_abs_mean": result.means["gap"],
        "mismatch/logprob_abs_max": result.means["gap_max"],
        "mismatch/ratio_mean": result.means["trust"],
        "mismatch/ratio_max": result.means["trust_max"],
        "mismatch/over_cap_frac": result.means["over_cap"],
        "pad_frac": result.pad_frac,
        "forwards_per_completion": step.num_forwards / advantages.size,
        "mem/peak_gb": step.peak_bytes / 1e9,
        "mem/cache_gb": max(one.cache_bytes for one in stats) / 1e9,
    }
    return {name: value if value is None or math.isfinite(value) else None for name, value in metrics.items()}


def completion_records(config: Config, step: Step) -> Iterator[dict[str, Any]]:
    """A record of each completion that was drawn, groups numbered through all draws."""
    trained = dict(zip(step.chosen, step.advantages.tolist(), strict=True))
    for number, draw in enumerate(step.draws):
        for row, record in enumerate(records_of_draw(config, draw, number * config.batch)):
            advantages = trained.get(record["group"])
            advantage = None if advantages is None else advantages[row % config.groups]
            yield {"step": step.number} | record | {"advantage": advantage}


def records_of_draw(config: Config, draw: Draw, first_group: int) -> Iterator[dict[str, Any]]:
    """What is recorded of each completion, of groups numbered from `first_group`, but its advantage."""
    rollout, rewards, judged = draw.rollout, draw.rewards, draw.rewards.judgement
    ids, lengths = np.array(rollout.completion_ids).tolist(), np.array(rollout.mask).sum(-1).astype(int)
    logprobs = np.array(rollout.logprobs).astype("<f2")  # within 0.05% or 3e-8
    total = rewards.total.reshape(-1)
    for row, completion in enumerate(rewards.completions):
        group = row // config.groups
        example = draw.examples[group]
        scores = None
        if judged is not None:
            scores = [None if np.isnan(s) else round(float(s), 4) for s in judged.scores[row]]
        yield {
            "group": first_group + group,
            "prompt": example["prompt"],
            "answer": None if example.get("answer") is None else str(example["answer"]),  # a user's may be anything
            "category": example.get("category"),
            "completion": completion,
            "ids": ids[row][: lengths[row]],
            "logprobs": base64.b64encode(logprobs[row, : lengths[row]].tobytes()).decode(),
            "reward": None if np.isnan(total[row]) else float(total[row]),
            "rewards": {n: None if np.isnan(v[row]) else float(v[row]) for n, v in rewards.components.items()},
            "judge_scores": scores,
            "finish_reason": rollout.finish_reasons[row],
        }
