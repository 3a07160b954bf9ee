"""
An independent implementation of the objectives: float64, token by token, from the papers.

There are no micro-batches. The papers hold some terms constant while they differentiate, such as
the weight of CISPO. These terms are computed from `constant`, the log-probabilities before the
update, so that finite differences in `new` give the gradient.
"""

import math
from typing import NamedTuple

import numpy as np


class Case(NamedTuple):
    """The arrays of one step: advantages (N,), all others (N, T)."""

    new: np.ndarray
    old: np.ndarray
    ref: np.ndarray
    advantages: np.ndarray
    mask: np.ndarray
    max_tokens: int


def make_case(lengths, num_columns, seed=0, spread=0.3):
    rng = np.random.default_rng(seed)
    shape = len(lengths), num_columns
    old = rng.normal(-1.5, 0.5, shape)
    return Case(
        new=old + rng.normal(0, spread, shape),
        old=old,
        ref=old + rng.normal(0, spread, shape),
        advantages=rng.normal(0, 1, len(lengths)),
        mask=(np.arange(num_columns) < np.array(lengths)[:, None]).astype(float),
        max_tokens=num_columns + 2,
    )


def turn_advantages(group, scale):
    """The advantages of all turns of a group's rows, from the turns' rewards; see docs/tools.md."""
    returns = []
    for rewards in group:
        returns.append([sum(rewards[turn:]) for turn in range(len(rewards))])

    mean_returns = []
    for turn in range(max(map(len, group))):
        turn_returns = [row[turn] for row in returns if turn < len(row)]
        mean_returns.append(sum(turn_returns) / len(turn_returns))

    differences = []
    for row in returns:
        differences.append([row[turn] - mean_returns[turn] for turn in range(len(row))])
    if scale != "group":
        return differences

    degrees_of_freedom = sum(map(len, group)) - len(mean_returns)
    sum_of_squares = sum(value**2 for row in differences for value in row)
    deviation = math.sqrt(sum_of_squares / max(degrees_of_freedom, 1))
    scaled_rows = []
    for row in differences:
        scaled_rows.append([value / (deviation + 1e-4) for value in row])
    return scaled_rows


def loss(
    case,
    *,
    new=None,
    loss_type="dapo",
    importance_sampling_level="token",
    epsilon=0.2,
    epsilon_high=None,
    beta=0.0,
):
    """The loss of a step at the log-probabilities `new`; `case.new` gives the constant terms."""
    constant = case.new
    if new is None:
        new = case.new
    if epsilon_high is None:
        epsilon_high = epsilon

    row_losses = []
    for i, mask in enumerate(case.mask):
        advantage = case.advantages[i]
        positions = np.flatnonzero(mask)
        losses = []
        for t in positions:
            ratio = importance_ratio(new, case.old, i, t, positions, importance_sampling_level)
            if loss_type == "cispo":
                constant_ratio = importance_ratio(
                    constant, case.old, i, t, positions, importance_sampling_level
                )
                term = -min(constant_ratio, epsilon_high) * advantage * new[i, t]
            elif loss_type == "sapo":
                tau = 1.0 if advantage > 0 else 1.05
                term = -advantage * (4 / tau) / (1 + math.exp(-tau * (ratio - 1)))
            else:
                clipped_ratio = min(max(ratio, 1 - epsilon), 1 + epsilon_high)
                term = -min(ratio * advantage, clipped_ratio * advantage)
            if beta:
                term += beta * kl_estimate(new[i, t], case.ref[i, t], constant[i, t])
            losses.append(term)
        row_losses.append(losses)

    num_rows = len(row_losses)
    if loss_type in ("grpo", "sapo"):  # 1 / N sum_i 1 / |o_i| sum_t
        return sum(sum(losses) / len(losses) for losses in row_losses) / num_rows
    total = sum(map(sum, row_losses))
    if loss_type == "dr_grpo":  # a constant
        return total / (num_rows * case.max_tokens)
    num_tokens = sum(map(len, row_losses))
    return total / num_tokens  # 1 / sum_i |o_i| sum_i sum_t


def importance_ratio(new, old, i, t, positions, level):
    """pi / pi_old of token t of row i, or the geometric mean over the positions of the row."""
    if level == "token":
        return math.exp(new[i, t] - old[i, t])
    product = math.prod(math.exp(new[i, s] - old[i, s]) for s in positions)
    return product ** (1 / len(positions))


def kl_estimate(new, ref, constant):
    """
    Schulman's third estimator of the KL of one token, with r = pi_ref / pi.

    If r at `constant` is over e^9, it is linear in `new`, with the slope at r = e^9.
    """
    if ref - constant > 9:
        return (math.exp(9) - 1 - 9) + (math.exp(9) - 1) * (constant - new)
    r = math.exp(ref - new)
    return (r - 1) - math.log(r)


def gradient(case, step=1e-6, **settings):
    """d loss / d new by central differences, (N, T)."""
    slopes = np.zeros_like(case.new)
    for i, t in np.argwhere(case.mask):
        above = case.new.copy()
        above[i, t] += step
        below = case.new.copy()
        below[i, t] -= step
        difference = loss(case, new=above, **settings) - loss(case, new=below, **settings)
        slopes[i, t] = difference / (2 * step)
    return slopes


def advantages(groups, scale="group", baseline="group"):
    """The advantages of groups of any size, from the rewards of their completions."""
    groups = [list(map(float, group)) for group in groups]
    all_rewards = [reward for group in groups for reward in group]
    return [group_advantages(group, all_rewards, scale, baseline) for group in groups]


def group_advantages(group, all_rewards, scale, baseline):
    """The advantages of one group, completion by completion."""
    size = len(group)
    values = []
    for i in range(size):
        if baseline == "group":
            baseline_reward = sum(group) / size
        elif baseline == "rloo":
            baseline_reward = sum(group[j] for j in range(size) if j != i) / (size - 1)
        elif baseline == "reinforce":
            baseline_reward = sum(all_rewards) / len(all_rewards)
        else:
            raise KeyError(f"write the baseline {baseline} here, from its paper")

        advantage = group[i] - baseline_reward
        if scale == "mean":
            advantage /= max(sum(group) / size, (max(group) - min(group)) / size)
        elif scale == "group":
            advantage /= standard_deviation(group) + 1e-4
        elif scale != "none":
            advantage /= standard_deviation(all_rewards) + 1e-4
        values.append(advantage)
    return values


def decoupled_advantages(rewards, weights):
    """
    The advantages of weighted reward components, (K, B, G) -> (B, G).

    Each component is normalized within groups. Their weighted sum is normalized over the batch.
    """
    total = sum(
        weight * np.array(advantages(component))
        for component, weight in zip(rewards, weights, strict=True)
    )
    values = [float(value) for value in total.ravel()]
    return (total - sum(values) / len(values)) / (standard_deviation(values) + 1e-4)


def standard_deviation(values):
    mean = sum(values) / len(values)
    return math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1))
