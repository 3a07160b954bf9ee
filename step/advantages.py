"""
The advantages of a step's samples, and which of the samples are trained.

This file does not cover the arithmetic of advantages (grpo.py) or how samples go through the model
(step/batch.py).

Axes: B groups in a step, G samples in a group, N samples, T tokens that the policy wrote in a
sample, K turns.
"""

import math
from collections.abc import Callable

import numpy as np

import grpo
from config import Config
from step.sample import Sample, group_samples, pad_rows
from step.scoring import Weights

MEASURED_OF = 8  # one in this many samples without a gradient is computed for the statistics
# a function of rewards (B, G) float64, which are nan where a group has fewer samples
Advantage = Callable[[np.ndarray], np.ndarray]


def assign_advantages(
    config: Config, samples: list[Sample], weights: Weights, custom: Advantage | None = None
) -> list[Sample]:
    """
    The samples, with their advantages added and whether their groups have a signal.

    weights: the rewards' weights. custom: a user's function that replaces ours.
    """
    groups = group_samples(samples)
    group_advantages = compute_advantages(config, groups, weights, custom)
    differences = group_advantages
    if custom is not None or config.objective.advantage == "reinforce":
        # with these, even equal rewards may have advantages
        differences = grpo.group_advantages(
            reward_table(groups), "none", signal_floor=grpo.SIGNAL_FLOOR
        )

    samples = []
    for group, advantages, group_differences in zip(
        groups, group_advantages, differences, strict=True
    ):
        group = [
            sample._replace(advantage=spread_over_tokens(sample, advantage))
            for sample, advantage in zip(group, advantages, strict=False)
        ]
        has_signal = any(has_advantage(sample) and is_trained(config, sample) for sample in group)
        rewards_differ = bool((group_differences != 0).any())
        for sample in group:
            samples.append(sample._replace(has_signal=has_signal, rewards_differ=rewards_differ))
    return samples


def compute_advantages(
    config: Config,
    groups: list[list[Sample]],
    weights: Weights,
    custom: Advantage | None = None,
) -> np.ndarray:
    """The advantages, (B, G) float32; or (B, G, K) if environments reward turns."""
    settings = config.objective
    if max(map(len, groups)) == 1:  # only a teacher trains such groups
        return np.zeros((len(groups), 1), np.float32)

    first = groups[0][0]
    if settings.combine_rewards == "normalize":
        names = list(first.imputed_components)
        tables = [_component_table(groups, name) for name in names]
        name_weights = [weights[name] for name in names]
        return grpo.decoupled_advantages(np.array(tables), name_weights, grpo.SIGNAL_FLOOR)
    if first.turn_rewards is not None:
        turn_rewards = [[compute_turn_rewards(sample) for sample in group] for group in groups]
        return grpo.turn_advantages(turn_rewards, settings.scale_rewards, grpo.SIGNAL_FLOOR)

    rewards = reward_table(groups)
    if custom is not None:
        return custom(rewards)
    return grpo.group_advantages(
        rewards, settings.scale_rewards, settings.advantage, grpo.SIGNAL_FLOOR
    )


def reward_table(groups: list[list[Sample]]) -> np.ndarray:
    """All samples' rewards, (B, G) float64, nan where a group has fewer samples."""
    return pad_rows([[sample.reward for sample in group] for group in groups], np.nan)


def _component_table(groups: list[list[Sample]], name: str) -> np.ndarray:
    """All samples' values of one component, (B, G) float64, nan where a group has fewer samples."""
    rows = [[sample.imputed_components[name] for sample in group] for group in groups]
    return pad_rows(rows, np.nan)


def compute_turn_rewards(sample: Sample) -> list[float]:
    """
    The reward of each turn.

    A turn that was cut off gets 0. The last turn also gets that part of the sample's reward which
    belongs to no turn.
    """
    turn_rewards = sample.turn_rewards or []
    rewards = turn_rewards + [0.0] * (len(sample.spans) - len(turn_rewards))
    rewards[-1] += sample.reward - sum(turn_rewards)
    return rewards


def spread_over_tokens(sample: Sample, advantages: np.ndarray) -> float | np.ndarray:
    """A sample's advantage () as a float, or its turns' advantages (K,) repeated per token (T,)."""
    if advantages.ndim == 0:
        return float(advantages)
    lengths = [end - begin for begin, end in sample.spans]
    return np.repeat(advantages[: len(lengths)], lengths)


def is_trained(config: Config, sample: Sample) -> bool:
    """Whether a sample counts in the loss; --truncated mask leaves out those cut off for length."""
    return config.objective.truncated != "mask" or sample.finish_reason != "length"


def has_advantage(sample: Sample) -> bool:
    """Whether a sample has an advantage other than 0."""
    return bool(np.any(sample.advantage != 0))


# ---- which samples are computed


def mark_for_update(
    config: Config, samples: list[Sample], step: int, all_have_gradient: bool = False
) -> list[Sample]:
    """
    All samples, with `has_gradient` and `weight` (the weight in statistics) set.

    A sample that --truncated mask leaves out gets no tokens, so no mean counts it. A sample whose
    advantage is 0 has no gradient, unless `all_have_gradient` is set, and is not computed. One in
    MEASURED_OF of these samples is computed nevertheless, so that means stay unbiased; it
    represents all of them in proportion to their tokens. Each step chooses others.
    """
    selected = []
    for sample in samples:
        if not is_trained(config, sample):
            sample = sample._replace(loss_positions=(), weight=0.0)
        has_gradient = sample.weight > 0 and (all_have_gradient or has_advantage(sample))
        selected.append(sample._replace(has_gradient=has_gradient))

    idle_rows = [
        row for row, sample in enumerate(selected) if sample.weight and not sample.has_gradient
    ]
    if not idle_rows:
        return selected
    num_measured = math.ceil(len(idle_rows) / MEASURED_OF)
    # neighbors are chosen, because they mostly share a prompt
    places = range(step * num_measured, (step + 1) * num_measured)
    measured_rows = [idle_rows[place % len(idle_rows)] for place in places]
    num_idle_tokens = sum(len(selected[row].loss_positions) for row in idle_rows)
    num_measured_tokens = sum(len(selected[row].loss_positions) for row in measured_rows)
    for row in idle_rows:
        weight = num_idle_tokens / num_measured_tokens if row in measured_rows else 0.0
        selected[row] = selected[row]._replace(weight=weight)
    return selected
