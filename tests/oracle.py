"""
The objectives a second time: float64, one token after the other, written from the papers and not from `grpo.py`.

A step is whole here: there are no micro-batches. What the papers hold constant while they differentiate (the weight of
CISPO, the weights of a mismatch) is taken from `at`, so that finite differences in `new` give the gradient.
"""

import math
from typing import NamedTuple

import numpy as np


class Case(NamedTuple):
    """One step: (N, T) but for the advantages (N,)."""

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
    """Of each turn of each row of a group, from the rewards of its turns, in the words of docs/tools.md."""
    returns = [[sum(row[k:]) for k in range(len(row))] for row in group]
    means = [
        sum(row[k] for row in returns if k < len(row)) / sum(k < len(row) for row in returns)
        for k in range(max(map(len, group)))
    ]
    apart = [[value - means[k] for k, value in enumerate(row)] for row in returns]
    free = sum(map(len, group)) - len(means)
    deviation = math.sqrt(sum(value**2 for row in apart for value in row) / max(free, 1))
    return [
        [value / (deviation + 1e-4) if scale == "group" else value for value in row]
        for row in apart
    ]


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
    """The loss of a step at the log-probabilities `new`; what is held constant is taken at `case.new`."""
    epsilon_high = epsilon if epsilon_high is None else epsilon_high
    new, at = case.new if new is None else new, case.new
    rows = [
        [t for t in range(case.mask.shape[1]) if case.mask[i, t]] for i in range(len(case.mask))
    ]

    row_losses = []
    for i, row in enumerate(rows):
        advantage, losses = case.advantages[i], []
        for t in row:
            ratio = importance(new, case.old, i, row, t, importance_sampling_level)
            if loss_type == "cispo":
                weight = min(
                    importance(at, case.old, i, row, t, importance_sampling_level), epsilon_high
                )
                term = -weight * advantage * new[i, t]
            elif loss_type == "sapo":
                tau = 1.0 if advantage > 0 else 1.05
                term = -advantage * (4 / tau) / (1 + math.exp(-tau * (ratio - 1)))
            else:
                first = ratio * advantage
                second = min(max(ratio, 1 - epsilon), 1 + epsilon_high) * advantage
                term = -min(first, second)
            if beta:
                term += beta * divergence(new[i, t], case.ref[i, t], at[i, t])
            losses.append(term)
        row_losses.append(losses)

    num_tokens = sum(map(len, rows))
    if loss_type in ("grpo", "sapo"):  # 1 / N sum_i 1 / |o_i| sum_t
        return sum(sum(losses) / len(losses) for losses in row_losses) / len(rows)
    if loss_type == "dr_grpo":  # a constant
        return sum(map(sum, row_losses)) / (len(rows) * case.max_tokens)
    return sum(map(sum, row_losses)) / num_tokens  # 1 / sum_i |o_i| sum_i sum_t


def importance(new, old, i, row, t, level):
    """pi / pi_old of the token, or the geometric mean over its row."""
    if level == "token":
        return math.exp(new[i, t] - old[i, t])
    return math.prod(math.exp(new[i, s] - old[i, s]) for s in row) ** (1 / len(row))


def divergence(new, ref, at):
    """Schulman's third, with r = pi_ref / pi; where r at the point is over e^9, the line that has its slope at e^9."""
    if ref - at > 9:
        return (math.exp(9) - 1 - 9) + (math.exp(9) - 1) * (at - new)
    r = math.exp(ref - new)
    return (r - 1) - math.log(r)


def gradient(case, step=1e-6, **settings):
    """d loss / d new by central differences, (N, T)."""
    out = np.zeros_like(case.new)
    for i, t in np.argwhere(case.mask):
        ends = []
        for sign in (1, -1):
            moved = case.new.copy()
            moved[i, t] += sign * step
            ends.append(loss(case, new=moved, **settings))
        out[i, t] = (ends[0] - ends[1]) / (2 * step)
    return out


def advantages(groups, scale="group", baseline="group"):
    """Of each group, of any size, completion by completion."""
    everything, out = [float(r) for rewards in groups for r in rewards], []
    for group in ([float(r) for r in rewards] for rewards in groups):
        size, its = len(group), []
        for i in range(size):
            if baseline == "group":
                reference = sum(group) / size
            elif baseline == "rloo":
                reference = sum(group[j] for j in range(size) if j != i) / (size - 1)
            elif baseline == "reinforce":
                reference = sum(everything) / len(everything)
            else:
                raise KeyError(f"write down the baseline {baseline} here, from its paper")
            one = group[i] - reference
            if scale == "mean":
                one /= max(sum(group) / size, (max(group) - min(group)) / size)
            elif scale != "none":
                one /= deviation(group if scale == "group" else everything) + 1e-4
            its.append(one)
        out.append(its)
    return out


def decoupled(rewards, weights):
    """(K, B, G) -> (B, G): normalized within groups, weighted, summed, normalized over the batch."""
    total = sum(
        weight * np.array(advantages(one)) for one, weight in zip(rewards, weights, strict=True)
    )
    flat = [float(a) for a in total.ravel()]
    return (total - sum(flat) / len(flat)) / (deviation(flat) + 1e-4)


def deviation(values):
    mean = sum(values) / len(values)
    return math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1))
