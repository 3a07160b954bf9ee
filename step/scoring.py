"""
Scoring calls every reward function and the judge once per step; a sample's reward is the weighted
sum of their values.

This file does not cover how a reward function is called (rewards/rewards.py), how a judge reads an
answer (judge.py), or how rewards are compared (step/advantages.py).

Axes: N samples, J criteria in the rubric.
"""

from typing import Any

import numpy as np

from judging.rubrics import Grader, Judgement
from prompts.examples import prompt_text
from rewards.rewards import Logged, Reward, call_rewards
from rewards.statements import strip_thoughts
from step.sample import Sample

Weights = dict[str, float]  # the rewards' weights, by name
MOST_REWARD = 1e15  # `rewards.call_reward` applies the same limit before weighting


def compute_rewards(
    rewards: dict[str, Reward], samples: list[Sample], weights: Weights | None = None
) -> tuple[dict[str, np.ndarray], Logged]:
    """Each reward's or verifier's values for all samples, (N,), and the values that they logged."""
    examples = [sample.example for sample in samples]
    texts = [sample.text for sample in samples]
    completion_ids = [sample.completion_ids for sample in samples]
    columns: dict[str, list[Any]] = {
        "completion_ids": completion_ids,
        "num_tokens": [len(ids) for ids in completion_ids],
    }
    for name in samples[0].columns:
        columns[name] = [sample.columns[name] for sample in samples]
    values, logged = call_rewards(rewards, examples, texts, columns, weights)
    return {name: np.array(column) for name, column in values.items()}, logged


def judge_samples(grader: Grader, samples: list[Sample]) -> Judgement:
    """
    The judge's scores for the samples.

    The judge reads only the text after a thought; a thought that never ends leaves no answer.
    """
    prompts = [prompt_text(sample.example["prompt"]) for sample in samples]
    answers = [strip_thoughts(sample.text) for sample in samples]
    return grader.score(prompts, answers)


def assign_rewards(
    samples: list[Sample],
    components: dict[str, np.ndarray],
    weights: Weights,
    scores: np.ndarray | None = None,
    extra_columns: dict[str, list[Any]] | None = None,
    compares_whole_step: bool = False,
) -> list[Sample]:
    """
    The samples, with rewards computed from their components.

    components: an array (N,) for each name. A component with weight 0 is a metric, which is only
    recorded. scores (N, J): the judge's scores. extra_columns: for each name, the N values that
    rewards logged. compares_whole_step: whether each sample is compared with the whole step instead
    of its group.

    An unreadable score is replaced by the mean that it would be compared with. So the judge neither
    rewards nor punishes that completion, and the completion's verifiers count in full. If a reward
    function gave None for a completion, it is left out of that completion's sum.

    Raises ValueError if a weighted component passes MOST_REWARD.
    """
    counted = {name: values for name, values in components.items() if weights[name]}
    for name, values in counted.items():
        if (np.abs(weights[name] * values) >= MOST_REWARD).any():
            raise ValueError(
                f"reward {name} times its weight {weights[name]:g} passes 1e15; start again with "
                "lower --reward-weights"
            )
    imputed = {name: np.nan_to_num(values) for name, values in counted.items()}
    if "rubric" in imputed:
        groups = [0 if compares_whole_step else sample.group for sample in samples]
        imputed["rubric"] = with_unreadable_imputed(counted["rubric"], np.array(groups))

    # BLAS is avoided: its rounding may depend on the position, but equal rewards must stay equal
    totals = np.zeros(len(samples))
    for name, values in imputed.items():
        totals = totals + weights[name] * values

    rewarded = []
    for row, sample in enumerate(samples):
        rewarded.append(
            sample._replace(
                reward_components=_row_of(components, row),
                imputed_components=_row_of(imputed, row),
                reward=float(totals[row]),
                scores=None if scores is None else scores[row].tolist(),
                extra_columns={name: values[row] for name, values in (extra_columns or {}).items()},
            )
        )
    return rewarded


def _row_of(columns: dict[str, np.ndarray], row: int) -> dict[str, float]:
    return {name: float(values[row]) for name, values in columns.items()}


def with_unreadable_imputed(values: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """
    Values (N,) with each nan replaced by the mean of the readable values of its group.

    groups (N,): the group of each value. The mean of a group without readable values is 0.
    """
    filled = np.nan_to_num(values)
    for group in set(groups[np.isnan(values)].tolist()):
        in_group = groups == group
        num_readable = (~np.isnan(values[in_group])).sum()
        filled[in_group & np.isnan(values)] = filled[in_group].sum() / max(num_readable, 1)
    return filled
