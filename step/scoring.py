"""
Scores the samples of a step with every reward function and the judge.

The reward of a sample is the weighted sum of the values that the reward functions and the judge
give it. rewards/rewards.py calls the reward functions, judging/grader.py runs the judge, and
step/advantages.py compares the rewards within groups.

Axes: N samples, J criteria in the rubric.
"""

from typing import Any

import numpy as np

from judging.grader import Grader, Judgement
from prompts.examples import last_user_text
from rewards.rewards import LoggedValues, Reward, call_rewards
from rewards.statements import strip_thoughts
from step.sample import Sample

RewardWeights = dict[str, float]  # the weight of each reward, by the reward's name

# Every weighted reward must be smaller than this in absolute value. `call_reward_on_rank0` in
# rewards/rewards.py applies the same limit to rewards before they are weighted.
MOST_REWARD = 1e15


def compute_rewards(
    rewards: dict[str, Reward], samples: list[Sample], weights: RewardWeights | None = None
) -> tuple[dict[str, np.ndarray], LoggedValues]:
    """
    Calls each reward function with all samples.

    Returns the values of each reward for the samples, (N,), and the values that the functions
    logged.
    """
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
    Calls the judge with all samples, and returns the judge's rewards and scores.

    The judge reads only the text after a thought. If a thought never ends, the judge reads an
    empty answer.
    """
    prompts = [last_user_text(sample.example["prompt"]) for sample in samples]
    answers = [strip_thoughts(sample.text) for sample in samples]
    return grader.score(prompts, answers)


def assign_rewards(
    samples: list[Sample],
    components: dict[str, np.ndarray],
    weights: RewardWeights,
    scores: np.ndarray | None = None,
    extra_columns: dict[str, list[Any]] | None = None,
    compares_whole_step: bool = False,
) -> list[Sample]:
    """
    Copies of the samples with their rewards and reward components set.

    components: the N values of each reward component, by name. A component with weight 0 is only
    recorded as a metric. scores (N, J): the judge's scores. extra_columns: the N values that reward
    functions logged under each name. compares_whole_step: whether each sample is compared with the
    whole step instead of its group.

    If the judge's reward for a completion is unreadable, it is replaced by the mean of the judge's
    other rewards in the group or step. So an unreadable reward is neither good nor bad for the
    completion, and the other rewards of the completion count in full. If a reward function returned
    None for a completion, it adds nothing to the reward of that completion.

    Raises ValueError if a weighted component reaches MOST_REWARD.
    """
    counted = {name: values for name, values in components.items() if weights[name]}
    for name, values in counted.items():
        if (np.abs(weights[name] * values) >= MOST_REWARD).any():
            raise ValueError(
                f"the reward {name}, multiplied by its weight {weights[name]:g}, is 1e15 or more "
                "in magnitude; start again with lower --reward-weights"
            )
    imputed = {name: np.nan_to_num(values) for name, values in counted.items()}
    if "rubric" in imputed:
        groups = [0 if compares_whole_step else sample.group for sample in samples]
        imputed["rubric"] = with_nan_replaced_by_group_mean(counted["rubric"], np.array(groups))

    # BLAS is not used, because its rounding may depend on a value's position in the array, and
    # equal rewards must stay equal
    totals = np.zeros(len(samples))
    for name, values in imputed.items():
        totals = totals + weights[name] * values

    rewarded = []
    for row, sample in enumerate(samples):
        rewarded.append(
            sample._replace(
                reward_components=_values_of_row(components, row),
                imputed_components=_values_of_row(imputed, row),
                reward=float(totals[row]),
                scores=None if scores is None else scores[row].tolist(),
                extra_columns={name: values[row] for name, values in (extra_columns or {}).items()},
            )
        )
    return rewarded


def _values_of_row(columns: dict[str, np.ndarray], row: int) -> dict[str, float]:
    """One row's value in each column, by the column's name."""
    return {name: float(values[row]) for name, values in columns.items()}


def with_nan_replaced_by_group_mean(values: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """
    A copy of the values (N,) in which each nan is replaced by the mean of the group's other values.

    groups (N,): the group of each value. If all values in a group are nan, they are replaced by 0.
    """
    filled = np.nan_to_num(values)
    for group in set(groups[np.isnan(values)].tolist()):
        in_group = groups == group
        num_readable = (~np.isnan(values[in_group])).sum()
        filled[in_group & np.isnan(values)] = filled[in_group].sum() / max(num_readable, 1)
    return filled
