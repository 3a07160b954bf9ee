"""
GRPO: the trainer's arithmetic. Every function takes arrays and returns arrays.

This file uses no model, tokenizer, clock or file, so every line can be checked by hand.
step/loss.py calls it with a model's log-probabilities.

`LOSSES` maps each loss's name to its function of `Tokens` and `Objective`. A step's loss is the sum
over its micro-batches. How the step is cut into micro-batches does not matter, because the divisors
count the whole step.

Axes: B prompts in a step, G completions of each prompt, N = B * G rows, M rows of a micro-batch,
T completion positions, K rewards or turns.
"""

from collections.abc import Callable
from typing import NamedTuple

import mlx.core as mx
import numpy as np

# slopes of SAPO's gate: for positive advantages, and for all others; arXiv:2511.20347
SAPO_TEMPERATURES = (1.0, 1.05)
# a group's rewards are noise if their range is below this fraction of the step's deviation
SIGNAL_FLOOR = 0.01
# e^80 is finite in float32; e^89 is inf, and its gradient through a clip is 0 * inf = nan
LARGEST_LOG_RATIO = 80.0
# A token that the reference finds e^9 times likelier has a KL term of 8093 and a slope of 8102.
# Beyond that, both stay at these values. Otherwise the exponentials of a few tokens would dominate
# the whole step's loss, and from e^89 on they would be infinite.
LARGEST_KL_LOG_RATIO = 9.0
SMALLEST_DEVIATION = 1e-4  # added to every deviation that is used as a divisor


class Objective(NamedTuple):
    """How to compute a token's loss and how to aggregate a step's losses. Names follow TRL."""

    loss_type: str = "dapo"  # see LOSSES
    importance_sampling_level: str = "token"  # see `importance_ratio`
    epsilon: float = 0.2  # lower clip of the ratio: 1 - epsilon
    # upper clip of the ratio: 1 + epsilon_high; None means epsilon. For cispo it caps the ratio.
    epsilon_high: float | None = None
    beta: float = 0.0  # weight of the KL term
    max_tokens: int | None = None  # the constant that dr_grpo divides by

    @property
    def upper(self) -> float:
        """`epsilon_high` as a number."""
        return self.epsilon if self.epsilon_high is None else self.epsilon_high


class Tokens(NamedTuple):
    """
    The tokens of a micro-batch, as a loss sees them.

    Arrays are (M, T) float32 unless a field says otherwise. Values are arbitrary where the mask is
    0.
    """

    logprobs: mx.array  # nats under the policy, with gradient
    old_logprobs: mx.array  # nats under the policy before the update
    advantages: mx.array  # (M,); or (M, T) if a row's tokens have different advantages
    mask: mx.array  # 1 = counted, 0 = padding
    ref_logprobs: mx.array | None = None  # nats under the reference; None without a KL term
    # number of counted tokens in the whole step; None: only these rows are counted
    num_items: float | None = None
    num_rows: float | None = None  # number of rows in the whole step; None: only these rows
    divergences: mx.array | None = None  # teacher from policy, with gradient; for "distill"
    # (M, 1), how many tokens each token represents in sums; above 1 only where the advantage is 0
    weights: mx.array | None = None
    entropies: mx.array | None = None  # of the policy's distributions, in nats, without gradient
    # nats, as the sampler recorded them; None for given replies
    sampled_logprobs: mx.array | None = None


class Loss(NamedTuple):
    """A micro-batch's part of a step's loss, and its statistics."""

    value: mx.array  # ()
    sums: dict[str, mx.array]  # sums over the counted tokens, each a scalar ()


LossFunction = Callable[[Tokens, Objective], Loss]


# ---- advantages


def group_advantages(
    rewards: np.ndarray, scale: str = "group", baseline: str = "group", signal_floor: float = 0.0
) -> np.ndarray:
    """
    How much better each completion is than the baseline, (B, G) float64 -> (B, G) float32.

    A group with fewer than G completions is filled up with nan rewards, whose advantages are 0.

    baseline: the set of completions whose mean reward is the baseline. "group": the completion's
    group. "rloo": the other completions in its group. "reinforce": the whole step.

    scale: the divisor. "group": the group's standard deviation (GRPO). "batch": the step's standard
    deviation. "mean": the group's mean (MaxRL); if rewards are 1 for right and 0 for wrong, the
    result is the gradient of log p to order G - 1. This divisor is at least a G-th of the group's
    range, so that for other rewards no advantage exceeds G. "none": 1 (Dr. GRPO, RLOO).

    signal_floor: a group (with "reinforce", a step) is noise and gets exactly 0 if the range of its
    rewards is at most this fraction of (the step's deviation + SMALLEST_DEVIATION). Equal rewards
    get exactly 0 whatever the floor.

    Each reward's offset from a first reward is used, because a large common offset, as in seconds
    since 1970, would otherwise drown the differences in rounding.

    Source: DeepSeekMath, arXiv:2402.03300, 4.1.2; Dr. GRPO, arXiv:2503.20783; batch:
    arXiv:2508.08221; RLOO: arXiv:2402.14740, eq. 7; the step's mean: REINFORCE++,
    arXiv:2501.03262; MaxRL: arXiv:2602.02710.
    """
    assert scale in ("group", "batch", "mean", "none"), scale
    assert baseline in ("group", "rloo", "reinforce"), baseline
    assert rewards.ndim == 2, f"rewards are {rewards.shape}"
    assert rewards.shape[1] > 1, f"a group needs two completions, rewards are {rewards.shape}"
    compares_step = baseline == "reinforce"
    assert not (compares_step and scale in ("group", "mean")), "the step is compared, not a group"

    is_present = ~np.isnan(rewards)  # (B, G)
    group_sizes = is_present.sum(axis=1, keepdims=True)  # (B, 1)
    step_deviation = (rewards[is_present] - rewards[0, 0]).std(ddof=1)

    # one row per comparison
    shape = (1, -1) if compares_step else rewards.shape
    compared = rewards.reshape(shape)
    is_compared = is_present.reshape(shape)

    offsets = np.where(is_compared, compared - compared[:, :1], 0.0)
    least_range = signal_floor * (step_deviation + SMALLEST_DEVIATION)
    is_noise = np.ptp(offsets, axis=1, keepdims=True) <= least_range
    mean = offsets.sum(axis=1, keepdims=True) / is_compared.sum(axis=1, keepdims=True)
    centered = np.where(is_noise | ~is_compared, 0.0, offsets - mean)
    advantages = centered.reshape(rewards.shape)

    if scale == "group":
        squares = (advantages**2).sum(axis=1, keepdims=True)
        deviation = np.sqrt(squares / np.maximum(group_sizes - 1, 1))
        advantages = advantages / (deviation + SMALLEST_DEVIATION)
    elif scale == "batch":
        advantages = advantages / (step_deviation + SMALLEST_DEVIATION)
    elif scale == "mean":
        filled = np.where(is_present, rewards, rewards[:, :1])
        group_range = np.ptp(filled, axis=1, keepdims=True)
        total = np.where(is_present, rewards, 0.0).sum(axis=1, keepdims=True)
        # equal rewards of 0 would be 0 / 0 without the 1e-12
        least_divisor = group_range / group_sizes + 1e-12
        advantages = advantages / np.maximum(total / group_sizes, least_divisor)

    if baseline == "rloo":
        # r - mean(others) = (r - mean(all)) * G / (G - 1)
        advantages = advantages * (group_sizes / np.maximum(group_sizes - 1, 1))
    return advantages.astype(np.float32)


def turn_advantages(
    groups: list[list[list[float]]], scale: str = "group", signal_floor: float = 0.0
) -> np.ndarray:
    """
    How much more each row earns from each turn on than its group's average row does.

    groups: the rewards, indexed by group, row and turn. Returns (B, G, K) float32, which is 0
    beyond a row's last turn and beyond a group's last row.

    The return of turn k is the sum of the rewards of turns >= k. Its baseline is the mean return
    over the rows that have a turn k; whether a row has that turn is known before it is written.

    scale: "group" divides by the standard deviation of these differences in the group, with one
    degree of freedom fewer for each turn's mean. "none" does not divide.
    signal_floor: see `group_advantages`.

    For rows of one turn the result equals that of `group_advantages`. The same holds for rows with
    equally many turns if only their last turn is rewarded.

    Source: comparing the turns' returns within the group comes from GTPO, arXiv:2511.14846.
    Choosing a deviation that agrees with GRPO is our own addition.
    """
    assert scale in ("group", "none"), scale
    most_rows = max(len(group) for group in groups)
    most_turns = max(len(turns) for group in groups for turns in group)
    rewards = np.zeros((len(groups), most_rows, most_turns))
    is_present = np.zeros(rewards.shape, bool)
    for group_index, group in enumerate(groups):
        for row, turns in enumerate(group):
            rewards[group_index, row, : len(turns)] = turns
            is_present[group_index, row, : len(turns)] = True

    returns = rewards[..., ::-1].cumsum(axis=-1)[..., ::-1]
    whole_returns = returns[..., 0][is_present[..., 0]]
    step_deviation = (whole_returns - returns[0, 0, 0]).std(ddof=1)

    # returns are measured from that of the first row that has the turn
    first_row = is_present.argmax(axis=1)[:, None]
    first_return = np.take_along_axis(returns, first_row, axis=1)
    offsets = np.where(is_present, returns - first_return, 0.0)
    num_rows = is_present.sum(axis=1, keepdims=True)
    mean = offsets.sum(axis=1, keepdims=True) / np.maximum(num_rows, 1)
    centered = np.where(is_present, offsets - mean, 0.0)

    least_range = signal_floor * (step_deviation + SMALLEST_DEVIATION)
    is_noise = np.ptp(centered, axis=(1, 2), keepdims=True) <= least_range
    advantages = np.where(is_noise, 0.0, centered)
    if scale == "group":
        degrees_of_freedom = np.maximum(num_rows - 1, 0).sum(axis=(1, 2), keepdims=True)
        squares = (advantages**2).sum(axis=(1, 2), keepdims=True)
        deviation = np.sqrt(squares / np.maximum(degrees_of_freedom, 1))
        advantages = advantages / (deviation + SMALLEST_DEVIATION)
    return advantages.astype(np.float32)


def decoupled_advantages(
    rewards: np.ndarray, weights: list[float], signal_floor: float = 0.0
) -> np.ndarray:
    """
    Advantages from K rewards, (K, B, G) float64 -> (B, G) float32; nan as in `group_advantages`.

    Normalizes each reward within its group, then normalizes the weighted sum over the batch. Each
    reward has its own noise floor, from its own deviation, because each is scaled to full size.
    Within a group each normalized reward has mean 0, and so has the weighted sum. If each reward is
    the same for all answers in a group, the group's advantages are exactly 0.

    Source: GDPO, arXiv:2601.05242.
    """
    terms = []
    for reward, weight in zip(rewards, weights, strict=True):
        advantages = group_advantages(reward, signal_floor=signal_floor)
        terms.append(weight * advantages.astype(np.float64))
    total = np.sum(terms, axis=0)

    num_completions = (~np.isnan(rewards[0])).sum()
    deviation = np.sqrt((total**2).sum() / (num_completions - 1))
    return (total / (deviation + SMALLEST_DEVIATION)).astype(np.float32)


# ---- terms of a token's loss


def importance_ratio(
    logprobs: mx.array, old_logprobs: mx.array, mask: mx.array, level: str
) -> mx.array:
    """
    The probability ratio policy / old policy.

    level: "token" gives each token's ratio, (N, T); "sequence" gives the geometric mean of a row's
    token ratios, (N, 1). Source of the sequence ratio: GSPO, arXiv:2507.18071, eq. 7.
    """
    assert level in ("token", "sequence"), level
    log_ratio = logprobs - old_logprobs
    if level == "sequence":
        num_tokens = mx.maximum(mask.sum(-1, keepdims=True), 1)
        log_ratio = (log_ratio * mask).sum(-1, keepdims=True) / num_tokens
    return mx.exp(mx.minimum(log_ratio, LARGEST_LOG_RATIO))


# Each token's policy term, and whether a clip removed the token's gradient (for cispo: whether the
# token's weight was capped). The latter is None for a term that clips nothing.
Term = tuple[mx.array, mx.array | None]


def clipped_term(ratio: mx.array, tokens: Tokens, objective: Objective) -> Term:
    """
    The term -min(r A, clip(r, 1 - epsilon, 1 + epsilon_high) A).

    If the two products are equal, the gradient is that of r A. mx.minimum and mx.clip would have no
    gradient at an end of the range, such as r = 1 with epsilon 0.

    Source: PPO, arXiv:1707.06347, eq. 7; two ranges: DAPO, arXiv:2503.14476, eq. 10.
    """
    clipped_ratio = mx.clip(ratio, 1 - objective.epsilon, 1 + objective.upper)
    free = ratio * tokens.advantages
    bounded = clipped_ratio * tokens.advantages
    has_gradient = (free <= bounded) | (ratio == clipped_ratio)
    term = -mx.where(free <= bounded, free, bounded)
    return term, ~has_gradient & (tokens.advantages != 0)


def cispo_term(ratio: mx.array, tokens: Tokens, objective: Objective) -> Term:
    """
    The term -sg(min(r, cap)) A log pi, where sg stops the gradient.

    It caps only the token's weight, so no token loses its gradient. Source: arXiv:2506.13585.
    """
    cap = objective.upper
    weight = mx.stop_gradient(mx.minimum(ratio, cap))
    return -weight * tokens.advantages * tokens.logprobs, ratio > cap


def sapo_term(ratio: mx.array, tokens: Tokens, objective: Objective) -> Term:
    """
    The term -A sigmoid(t (r - 1)) 4 / t: a soft gate whose slope is 1 at r = 1 and fades beyond.

    Advantages that are not positive have a larger t, which makes their gradient fade sooner.
    Source: arXiv:2511.20347.
    """
    temperature = mx.where(tokens.advantages > 0, *SAPO_TEMPERATURES)
    gate = mx.sigmoid(temperature * (ratio - 1))
    return -tokens.advantages * gate * 4 / temperature, None


def kl_term(logprobs: mx.array, ref_logprobs: mx.array) -> mx.array:
    """
    An estimate of KL(policy, reference) per token: exp(d) - d - 1, d = log reference - log policy.

    It is never negative. Value and gradient are 0 where policy and reference agree. If d exceeds
    `LARGEST_KL_LOG_RATIO`, value and gradient are the same as at that limit: they are finite, and
    the gradient still raises the token's log-probability.

    Source: k3 of Schulman, http://joschu.net/blog/kl-approx.html; DeepSeekMath,
    arXiv:2402.03300, eq. 4.
    """
    log_ratio = ref_logprobs - logprobs
    bounded = mx.stop_gradient(mx.minimum(log_ratio, LARGEST_KL_LOG_RATIO))
    # this adds 0, but restores the slope that the minimum removes
    bounded = bounded + (log_ratio - mx.stop_gradient(log_ratio))
    return mx.exp(bounded) - bounded - 1


# ---- averages of a step's tokens


def mean_of_tokens(per_token: mx.array, tokens: Tokens, objective: Objective) -> mx.array:
    """
    The sum over the tokens / the number of counted tokens in the step. All tokens weigh the same.

    Source: DAPO, arXiv:2503.14476.
    """
    return (per_token * tokens.mask).sum(-1).sum() / _num_items(tokens)


def mean_of_rows(per_token: mx.array, tokens: Tokens, objective: Objective) -> mx.array:
    """
    Each row's mean, averaged over the step's rows. All rows weigh the same.

    Source: DeepSeekMath, arXiv:2402.03300.
    """
    row_sums = (per_token * tokens.mask).sum(-1)
    row_counts = tokens.mask.sum(-1)
    return (row_sums / mx.maximum(row_counts, 1)).sum() / _num_rows(tokens)


def mean_of_positions(per_token: mx.array, tokens: Tokens, objective: Objective) -> mx.array:
    """
    The sum over the tokens / (rows * max_tokens). Tokens in long answers weigh no less than others.

    Source: Dr. GRPO, arXiv:2503.20783.
    """
    assert objective.max_tokens is not None, "dr_grpo divides by max_tokens"
    total = (per_token * tokens.mask).sum(-1).sum()
    return total / (_num_rows(tokens) * objective.max_tokens)


def _num_items(tokens: Tokens) -> mx.array:
    """The number of counted tokens in the step, at least 1."""
    num_items = tokens.mask.sum() if tokens.num_items is None else mx.array(tokens.num_items)
    return mx.maximum(num_items, 1)


def _num_rows(tokens: Tokens) -> float:
    """The number of rows in the step."""
    return len(tokens.mask) if tokens.num_rows is None else tokens.num_rows


# ---- losses


def with_zeros_outside_mask(tokens: Tokens) -> Tokens:
    """
    The tokens with values outside the mask set to 0. Only `logprobs` keeps its gradient.

    Values outside the mask are arbitrary. If their exponential were inf, inf * 0 would be nan.
    Advantages become (M, T) or (M, 1).
    """

    def clear(column: mx.array) -> mx.array:
        return mx.where(tokens.mask > 0, mx.stop_gradient(column), 0.0)

    def clear_optional(column: mx.array | None) -> mx.array | None:
        return None if column is None else clear(column)

    advantages = tokens.advantages
    if advantages.ndim == 1:
        advantages = advantages[:, None]
    return tokens._replace(
        logprobs=mx.where(tokens.mask > 0, tokens.logprobs, 0.0),
        old_logprobs=clear(tokens.old_logprobs),
        ref_logprobs=clear_optional(tokens.ref_logprobs),
        entropies=clear_optional(tokens.entropies),
        sampled_logprobs=clear_optional(tokens.sampled_logprobs),
        advantages=mx.stop_gradient(advantages),
    )


def policy_loss(
    term: Callable[..., Term], average: Callable[[mx.array, Tokens, Objective], mx.array]
) -> LossFunction:
    """
    The loss that averages term + beta * KL over the counted tokens.

    term: a function of the ratio, the tokens and the objective. The tokens that it gets are 0 where
    the mask is 0, and their advantages are (M, T) or (M, 1).

    The loss returns the sum `clip_frac` if the term clips, and `kl` if there is a reference.
    """

    def loss(tokens: Tokens, objective: Objective) -> Loss:
        tokens = with_zeros_outside_mask(tokens)
        level = objective.importance_sampling_level
        ratio = importance_ratio(tokens.logprobs, tokens.old_logprobs, tokens.mask, level)
        per_token, is_clipped = term(ratio, tokens, objective)

        counts = tokens.mask if tokens.weights is None else tokens.mask * tokens.weights
        sums = {}
        if is_clipped is not None:
            sums["clip_frac"] = (is_clipped * counts).sum()
        if tokens.ref_logprobs is not None:
            kl = kl_term(tokens.logprobs, tokens.ref_logprobs)
            per_token = per_token + objective.beta * kl
            sums["kl"] = (kl * counts).sum()
        return Loss(average(per_token, tokens, objective), sums)

    return loss


def distillation(tokens: Tokens, objective: Objective) -> Loss:
    """The mean divergence between teacher and policy. Source: GKD, arXiv:2306.13649."""
    assert tokens.divergences is not None
    total = (tokens.divergences * tokens.mask).sum()
    return Loss(total / _num_items(tokens), {"distill/kl": total})


def cross_entropy(tokens: Tokens, objective: Objective) -> Loss:
    """The mean negative log-probability of the counted tokens."""
    total = -(tokens.logprobs * tokens.mask).sum()
    return Loss(total / _num_items(tokens), {})


LOSSES: dict[str, LossFunction] = {
    "grpo": policy_loss(clipped_term, mean_of_rows),
    "dr_grpo": policy_loss(clipped_term, mean_of_positions),
    "dapo": policy_loss(clipped_term, mean_of_tokens),
    "cispo": policy_loss(cispo_term, mean_of_tokens),
    "sapo": policy_loss(sapo_term, mean_of_rows),
    "distill": distillation,
    "sft": cross_entropy,
}
