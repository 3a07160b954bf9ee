"""
Gives the samples of a step their advantages, and selects the samples to train on.

The arithmetic of advantages is in grpo.py. step/batch.py turns samples into input for the model.

Axes: B groups in a step, G samples in a group, N samples, T tokens that the policy wrote in a
sample, K turns.
"""

import math
from collections.abc import Callable

import numpy as np

import grpo
from config import Config
from step.sample import Sample, group_samples, pad_rows
from step.scoring import RewardWeights

# one in this many samples without a gradient is computed anyway, for statistics
MEASURED_OF = 8
# A function from rewards (B, G) float64 to advantages (B, G). If a group has fewer than G samples,
# the missing rewards are nan. An advantage of nan leaves the sample out of the update; a user's own
# function returns a bool array for this purpose (see `step.objectives.compute_custom_advantages`).
AdvantageFunction = Callable[[np.ndarray], np.ndarray]


def assign_advantages(
    config: Config,
    samples: list[Sample],
    weights: RewardWeights,
    custom_function: AdvantageFunction | None = None,
) -> list[Sample]:
    """
    Copies of the samples with `advantage`, `has_signal` and `rewards_differ` set.

    custom_function: a user's function that computes the advantages in place of Gwen's own.
    """
    groups = [mark_chosen_completions(config, group) for group in group_samples(samples)]
    chosen_groups = []
    for group in groups:
        chosen_groups.append([sample for sample in group if sample.is_chosen])
    group_advantages = compute_advantages(config, chosen_groups, weights, custom_function)
    differences = group_advantages
    if custom_function is not None or grpo.compares_whole_step(config.objective.advantage):
        # these advantages may differ from 0 although all rewards of a group are equal
        differences = grpo.group_advantages(
            padded_reward_table(chosen_groups), "none", signal_floor=grpo.SIGNAL_FLOOR
        )

    samples = []
    for group, advantages, group_differences in zip(
        groups, group_advantages, differences, strict=True
    ):
        group = _copies_with_advantages(group, advantages)
        has_signal = any(
            has_nonzero_advantage(sample) and counts_in_loss(config, sample) for sample in group
        )
        rewards_differ = bool((group_differences != 0).any())
        for sample in group:
            samples.append(sample._replace(has_signal=has_signal, rewards_differ=rewards_differ))
    return samples


def _copies_with_advantages(group: list[Sample], advantages: np.ndarray) -> list[Sample]:
    """
    The samples of a group with their advantages; a sample that was not chosen gets 0.

    advantages: (G,) or (G, K), one row for each chosen sample in order, followed by padding.
    A sample whose advantage is nan is marked as not chosen, so that the averages in the loss leave
    the sample out. A sample whose advantage is 0 still counts in these averages.
    """
    chosen_rows = [row for row, sample in enumerate(group) if sample.is_chosen]
    advantage_of_row = dict(zip(chosen_rows, advantages, strict=False))
    completed = []
    for row, sample in enumerate(group):
        advantage: float | np.ndarray = 0.0
        if row in advantage_of_row and np.isnan(advantage_of_row[row]).any():
            sample = sample._replace(is_chosen=False)
        elif row in advantage_of_row:
            advantage = repeat_turn_advantages_per_token(sample, advantage_of_row[row])
        completed.append(sample._replace(advantage=advantage))
    return completed


def mark_chosen_completions(config: Config, group: list[Sample]) -> list[Sample]:
    """
    Copies of the samples of a group, in which `is_chosen` says whether a sample is chosen.

    The update trains only on chosen samples.

    --train-completions M chooses, from each group, the M samples that together have the largest
    variance of rewards. It never chooses a sample that --truncated mask excludes from the loss.
    """
    num_chosen = config.objective.train_completions
    if num_chosen is None:
        return group
    candidates = [row for row, sample in enumerate(group) if counts_in_loss(config, sample)]
    rewards = np.array([group[row].reward for row in candidates])
    chosen = {
        candidates[place] for place in grpo.choose_rewards_of_largest_variance(rewards, num_chosen)
    }
    return [sample._replace(is_chosen=row in chosen) for row, sample in enumerate(group)]


def compute_advantages(
    config: Config,
    groups: list[list[Sample]],
    weights: RewardWeights,
    custom_function: AdvantageFunction | None = None,
) -> np.ndarray:
    """The advantages of all samples, (B, G) float32; (B, G, K) if environments reward turns."""
    settings = config.objective
    if max(map(len, groups)) <= 1:  # groups of one sample occur only with --teacher
        return np.zeros((len(groups), 1), np.float32)

    first = next(sample for group in groups for sample in group)
    if settings.combine_rewards == "normalize":
        names = list(first.imputed_components)
        tables = [_padded_component_table(groups, name) for name in names]
        name_weights = [weights[name] for name in names]
        return grpo.gdpo_decoupled_advantages(np.array(tables), name_weights, grpo.SIGNAL_FLOOR)
    if first.turn_rewards is not None:
        turn_rewards = []
        for group in groups:
            turn_rewards.append(list(map(turn_rewards_with_remainder_in_last_turn, group)))
        return grpo.turn_advantages(turn_rewards, settings.scale_rewards, grpo.SIGNAL_FLOOR)

    rewards = padded_reward_table(groups)
    if custom_function is not None:
        return custom_function(rewards)
    return grpo.group_advantages(
        rewards, settings.scale_rewards, settings.advantage, grpo.SIGNAL_FLOOR
    )


def padded_reward_table(groups: list[list[Sample]]) -> np.ndarray:
    """
    The rewards of all samples, (B, G) float64.

    Groups with fewer than G samples are padded with nan.
    """
    return pad_rows([[sample.reward for sample in group] for group in groups], np.nan)


def _padded_component_table(groups: list[list[Sample]], reward_name: str) -> np.ndarray:
    """
    One reward component of all samples, (B, G) float64.

    Groups with fewer than G samples are padded with nan.
    """
    rows = [[sample.imputed_components[reward_name] for sample in group] for group in groups]
    return pad_rows(rows, np.nan)


def turn_rewards_with_remainder_in_last_turn(sample: Sample) -> list[float]:
    """
    The reward of each turn of the sample.

    A turn without a reward of its own gets 0. The rest of the sample's reward, which belongs to no
    single turn, is added to the last turn.
    """
    turn_rewards = sample.turn_rewards or []
    rewards = turn_rewards + [0.0] * (len(sample.turn_begins_and_ends) - len(turn_rewards))
    rewards[-1] += sample.reward - sum(turn_rewards)
    return rewards


def repeat_turn_advantages_per_token(sample: Sample, advantages: np.ndarray) -> float | np.ndarray:
    """
    The advantage of each token, (T,), from the advantages of the turns, (K,).

    If the sample has a single advantage, of shape (), it is returned as a float.
    """
    if advantages.ndim == 0:
        return float(advantages)
    lengths = [end - begin for begin, end in sample.turn_begins_and_ends]
    return np.repeat(advantages[: len(lengths)], lengths)


def counts_in_loss(config: Config, sample: Sample) -> bool:
    """Whether a sample is part of the loss. --truncated mask excludes samples that were cut off."""
    return config.objective.truncated != "mask" or sample.finish_reason != "length"


def has_nonzero_advantage(sample: Sample) -> bool:
    """Whether the sample, or any of its tokens, has an advantage other than 0."""
    return bool(np.any(sample.advantage != 0))


# ---- selecting the samples that pass through the model


def mark_for_update(
    config: Config, samples: list[Sample], step: int, all_have_gradient: bool = False
) -> list[Sample]:
    """
    Copies of all samples with `has_gradient` and `weight` set.

    A sample with weight 0 does not pass through the model.

    A sample has no gradient if its advantage is 0, unless `all_have_gradient` is true. A sample
    that was not chosen never has a gradient. A sample that --truncated mask excludes adds no token
    to any average. If it is chosen, it still counts as a row in the averages over rows.

    Of the samples without a gradient, only one in `MEASURED_OF` passes through the model, and each
    step selects different ones. The selected samples are weighted so that they represent the tokens
    of all samples without a gradient. This keeps averaged statistics unbiased.

    all_have_gradient: whether the loss has a gradient even where the advantage is 0, as determined
    by `StepLoss`.
    """
    selected = []
    for sample in samples:
        if not counts_in_loss(config, sample):
            sample = sample._replace(loss_positions=(), weight=0.0)
        may_have_gradient = sample.weight > 0 and sample.is_chosen
        has_gradient = may_have_gradient and (all_have_gradient or has_nonzero_advantage(sample))
        selected.append(sample._replace(has_gradient=has_gradient))

    idle_rows = [
        row for row, sample in enumerate(selected) if sample.weight and not sample.has_gradient
    ]
    if not idle_rows:
        return selected
    num_measured = math.ceil(len(idle_rows) / MEASURED_OF)
    # neighboring rows are chosen, because most share a prompt, which is then computed only once
    places = range(step * num_measured, (step + 1) * num_measured)
    measured_rows = [idle_rows[place % len(idle_rows)] for place in places]
    num_idle_tokens = sum(len(selected[row].loss_positions) for row in idle_rows)
    num_measured_tokens = sum(len(selected[row].loss_positions) for row in measured_rows)
    for row in idle_rows:
        weight = num_idle_tokens / num_measured_tokens if row in measured_rows else 0.0
        selected[row] = selected[row]._replace(weight=weight)
    return selected
