"""
GRPO: the arithmetic of the trainer. Every function takes arrays and returns arrays.

No function needs a model, tokenizer, clock or file, so every line can be checked by hand.
step/loss.py calls these functions with a model's log-probabilities.

`LOSSES` maps the name of each loss to a function of `Tokens` and `Objective`. The loss of a step is
the sum of the losses of its micro-batches. It does not matter how the step is divided into
micro-batches, because every average divides by a count over the whole step.

Axes: B prompts per step, G completions per prompt, N = B * G rows, M rows in a micro-batch,
T completion positions, K rewards or turns.
"""

from collections.abc import Callable
from typing import NamedTuple

import cpu_blas  # noqa: F401  (before mlx)
import mlx.core as mx
import numpy as np

# The steepness of SAPO's gate for positive advantages, and for all other advantages. Source:
# arXiv:2511.20347.
SAPO_TEMPERATURES = (1.0, 1.05)
# The rewards of a group count as noise if their range is at most this fraction of the standard
# deviation of the step's rewards.
SIGNAL_FLOOR = 0.01
# e^80 is finite in float32, but e^89 is inf, and its gradient through a clip is 0 * inf = nan
LARGEST_LOG_RATIO = 80.0
# If a token is e^9 times likelier under the reference than under the policy, its KL term is 8093
# and the slope of the term is 8102. For larger ratios, the term and its slope keep these values.
# Otherwise the exponentials of a few tokens would dominate the loss of the whole step, and would be
# infinite from a ratio of e^89 on.
LARGEST_KL_LOG_RATIO = 9.0
SMALLEST_DEVIATION = 1e-4  # added to every standard deviation that is used as a divisor


class Objective(NamedTuple):
    """
    The settings that determine the loss of each token, and the average over a step.

    The fields have the names that TRL uses.
    """

    loss_type: str = "dapo"  # a key of LOSSES
    importance_sampling_level: str = "token"  # see `importance_ratio`
    epsilon: float = 0.2  # the ratio is clipped below at 1 - epsilon

    # The ratio is clipped above at 1 + epsilon_high, or for cispo, at epsilon_high. None means the
    # value of epsilon.
    epsilon_high: float | None = None
    beta: float = 0.0  # weight of the KL term
    entropy_coef: float = 0.0  # weight of the entropy bonus
    max_tokens: int | None = None  # the number of tokens per row by which dr_grpo divides
    importance_sampling_correction: str = "off"  # see `sampler_weights`
    importance_sampling_cap: float = 3.0  # the largest weight of the correction

    @property
    def effective_epsilon_high(self) -> float:
        """`epsilon_high`, or `epsilon` if `epsilon_high` is None."""
        return self.epsilon if self.epsilon_high is None else self.epsilon_high


class Tokens(NamedTuple):
    """
    The tokens of a micro-batch, with all values that a loss function may use.

    Arrays are (M, T) float32 unless a comment says otherwise. Values at padding are arbitrary.
    """

    logprobs: mx.array  # log-probabilities under the policy, in nats, with a gradient
    # log-probabilities under the policy before the update, in nats; for a replayed sample, those
    # that the sampler recorded, unless `importance_sampling_correction` is set
    old_logprobs: mx.array
    advantages: mx.array  # (M,); or (M, T) if the tokens of a row have different advantages
    mask: mx.array  # 1 for a token that counts in the loss, 0 for padding

    # log-probabilities under the reference, in nats; None if there is no KL term
    ref_logprobs: mx.array | None = None
    # the number of counted tokens in the whole step; None if these rows are the whole step
    num_items: float | None = None
    # the number of rows in the whole step; None if these rows are the whole step
    num_rows: float | None = None
    # the divergence between teacher and policy at each token, with a gradient; None unless the
    # loss is "distill"
    divergences: mx.array | None = None
    # (M, 1): the number of tokens that each token represents in statistics; above 1 only if the
    # advantage is 0
    weights: mx.array | None = None

    # entropies of the policy, in nats, with a gradient; a loss that uses them only as weights of
    # tokens must call mx.stop_gradient on them
    entropies: mx.array | None = None

    # log-probabilities recorded by the sampler, in nats; None for given replies
    sampled_logprobs: mx.array | None = None


class Loss(NamedTuple):
    """The contribution of one micro-batch to the loss and the statistics of a step."""

    value: mx.array  # ()
    sums: dict[str, mx.array]  # statistics summed over the counted tokens, each a scalar ()


LossFunction = Callable[[Tokens, Objective], Loss]


# ---- advantages


def subtract_mean(offsets: np.ndarray, is_compared: np.ndarray) -> np.ndarray:
    """
    Each entry minus the mean of the entries in its row that are compared.

    `Baseline.subtract` describes the arguments.
    """
    num_compared = np.maximum(is_compared.sum(axis=1, keepdims=True), 1)
    return offsets - offsets.sum(axis=1, keepdims=True) / num_compared


def subtract_mean_of_others(offsets: np.ndarray, is_compared: np.ndarray) -> np.ndarray:
    """
    Each entry minus the mean of the other compared entries in its row.

    `Baseline.subtract` describes the arguments. Source: RLOO, arXiv:2402.14740, eq. 7.
    """
    num_compared = is_compared.sum(axis=1, keepdims=True)
    # reward - mean(others) = (reward - mean(all)) * G / (G - 1)
    factor = np.maximum(num_compared, 1) / np.maximum(num_compared - 1, 1)
    return subtract_mean(offsets, is_compared) * factor


class Baseline(NamedTuple):
    """A kind of baseline: which rewards it compares, and how it is subtracted from them."""

    compares_step: bool  # True: compares a reward with the whole step; False: with its group

    # Returns the rewards minus the baseline. Each row of the two arguments, which have the same
    # shape, contains the rewards that are compared with each other. The first argument is each
    # reward minus the first reward of its row, or 0 if the reward is missing. The second argument
    # is a boolean array that says which rewards are present.
    subtract: Callable[[np.ndarray, np.ndarray], np.ndarray]


# by the values of --advantage; tests/test_baselines.py tries each of them
BASELINES: dict[str, Baseline] = {
    "group": Baseline(False, subtract_mean),
    "rloo": Baseline(False, subtract_mean_of_others),
    "reinforce": Baseline(True, subtract_mean),
}


def compares_whole_step(advantage: str) -> bool:
    """Whether a value of --advantage compares each reward with the whole step."""
    return advantage in BASELINES and BASELINES[advantage].compares_step


def group_advantages(
    rewards: np.ndarray, scale: str = "group", baseline: str = "group", signal_floor: float = 0.0
) -> np.ndarray:
    """
    The advantage of each completion over a baseline, (B, G) float64 -> (B, G) float32.

    The reward of a missing completion is nan, and its advantage is 0.

    baseline: which completions' mean reward is the baseline. "group" means all completions in the
    same group, "rloo" means the other completions in the same group, and "reinforce" means all
    completions in the step.

    scale: what the differences from the baseline are divided by. "group" means the standard
    deviation of the group (GRPO), "batch" means the standard deviation of the step, "mean" means
    the mean reward of the group (MaxRL), and "none" means 1 (RLOO). With "mean", if every reward is
    0 or 1, the expected gradient is that of log p, expanded in powers of 1 - p up to the power
    G - 1, where p is the probability of a right answer. For other rewards, the divisor is at least
    the range of the group's rewards divided by G, so that no advantage exceeds G.

    signal_floor: the largest range of rewards that counts as noise, as a fraction of s, where s is
    the standard deviation of the step's rewards plus SMALLEST_DEVIATION. If the range of a group's
    rewards is not larger than this, all advantages of the group are exactly 0. For "reinforce",
    this applies to the whole step instead of a group. Equal rewards have the range 0, so they
    always give advantages of exactly 0.

    Before all else, the first of the compared rewards is subtracted from all of them. Otherwise
    rounding would erase the differences between rewards that share a large offset, such as the
    number of seconds since 1970.

    Sources: Dr. GRPO (scale "none"), arXiv:2503.20783; DeepSeekMath (scale "group"),
    arXiv:2402.03300, 4.1.2; scale "batch", arXiv:2508.08221; MaxRL (scale "mean"),
    arXiv:2602.02710; RLOO, arXiv:2402.14740, eq. 7; REINFORCE++ (baseline "reinforce"),
    arXiv:2501.03262.
    """
    assert scale in ("group", "batch", "mean", "none"), scale
    assert baseline in BASELINES, baseline
    assert rewards.ndim == 2, f"the shape of the rewards is {rewards.shape}, not (B, G)"
    assert rewards.shape[1] > 1, f"a group has {rewards.shape[1]} completions; it needs 2"
    compares_step = BASELINES[baseline].compares_step
    assert not (compares_step and scale in ("group", "mean")), f"scale {scale} needs groups"

    is_present = ~np.isnan(rewards)  # (B, G)
    group_sizes = np.maximum(is_present.sum(axis=1, keepdims=True), 1)  # (B, 1)
    present = rewards[is_present]
    step_deviation = (present - present[0]).std(ddof=1)

    # each row has the rewards that are compared with each other
    shape = (1, -1) if compares_step else rewards.shape
    compared = rewards.reshape(shape)
    is_compared = is_present.reshape(shape)

    first_index = is_compared.argmax(axis=1)[:, None]
    first_reward = np.take_along_axis(compared, first_index, axis=1)
    offsets = np.where(is_compared, compared - first_reward, 0.0)
    least_range = signal_floor * (step_deviation + SMALLEST_DEVIATION)
    is_noise = np.ptp(offsets, axis=1, keepdims=True) <= least_range
    is_zero = is_noise | ~is_compared
    differences = BASELINES[baseline].subtract(offsets, is_compared)
    advantages = np.where(is_zero, 0.0, differences).reshape(rewards.shape)

    if scale == "group":
        centered = np.where(is_zero, 0.0, subtract_mean(offsets, is_compared))
        squares = (centered**2).sum(axis=1, keepdims=True)
        deviation = np.sqrt(squares / np.maximum(group_sizes - 1, 1))
        advantages = advantages / (deviation + SMALLEST_DEVIATION)
    elif scale == "batch":
        advantages = advantages / (step_deviation + SMALLEST_DEVIATION)
    elif scale == "mean":
        filled = np.where(is_present, rewards, np.nan_to_num(first_reward))
        group_range = np.ptp(filled, axis=1, keepdims=True)
        total = np.where(is_present, rewards, 0.0).sum(axis=1, keepdims=True)
        # without the 1e-12, a group whose rewards are all 0 would compute 0 / 0
        least_divisor = group_range / group_sizes + 1e-12
        advantages = advantages / np.maximum(total / group_sizes, least_divisor)
    return advantages.astype(np.float32)


def turn_advantages(
    turn_rewards: list[list[list[float]]], scale: str = "group", signal_floor: float = 0.0
) -> np.ndarray:
    """
    The advantage of each turn, whose return is compared within the group, (B, G, K) float32.

    turn_rewards: the rewards, indexed by group, row and turn. The advantages are 0 beyond the last
    turn of a row and beyond the last row of a group.

    The return of turn k is the sum of the rewards from turn k to the last turn. The baseline of
    turn k is the mean return of all rows in the group that have a turn k. The baseline adds no
    bias, because whether a row has a turn k does not depend on what the turn contains.

    scale: "group" divides by the standard deviation of all differences in the group; one degree of
    freedom is subtracted for the mean of each turn. "none" does not divide.
    signal_floor: see `group_advantages`.

    The advantages equal those of `group_advantages` if every row has one turn, and also if all
    rows have equally many turns and only the last turn is rewarded.

    Source: GTPO, arXiv:2511.14846, compares the returns of turns within the group. The division by
    the standard deviation is our addition, so that the advantages agree with GRPO.
    """
    assert scale in ("group", "none"), scale
    most_rows = max(len(group) for group in turn_rewards)
    most_turns = max(len(turns) for group in turn_rewards for turns in group)
    rewards = np.zeros((len(turn_rewards), most_rows, most_turns))
    is_present = np.zeros(rewards.shape, bool)
    for group_index, group in enumerate(turn_rewards):
        for row, turns in enumerate(group):
            rewards[group_index, row, : len(turns)] = turns
            is_present[group_index, row, : len(turns)] = True

    returns = rewards[..., ::-1].cumsum(axis=-1)[..., ::-1]
    whole_returns = returns[..., 0][is_present[..., 0]]
    step_deviation = (whole_returns - returns[0, 0, 0]).std(ddof=1)

    # for each turn, subtract the return of the first row that has that turn
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


def gdpo_decoupled_advantages(
    rewards: np.ndarray, weights: list[float], signal_floor: float = 0.0
) -> np.ndarray:
    """
    Advantages from K separately normalized rewards, (K, B, G) float64 -> (B, G) float32.

    Each reward is normalized within its group. The weighted sum of the normalized rewards is then
    normalized over the step. Each reward has its own noise limit, a fraction of that reward's
    standard deviation. Missing completions have nan rewards, as in `group_advantages`. If no reward
    differs within a group, all advantages of the group are exactly 0.

    signal_floor: see `group_advantages`.

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


# ---- the choice of completions to train


def choose_rewards_of_largest_variance(rewards: np.ndarray, num_chosen: int) -> list[int]:
    """
    The ascending indices of the `num_chosen` rewards that together have the largest variance.

    rewards: (G,) float64. If G is at most `num_chosen`, all rewards are chosen.

    The subset with the largest variance consists of the k lowest and the `num_chosen` - k highest
    rewards for some k, so the function tries each k. Among equal rewards, it chooses the first
    ones. Among subsets whose variances differ by less than a relative 1e-9, it chooses the one in
    which the number of high rewards is largest.

    Source: PODS, arXiv:2504.13818, algorithm 2.
    """
    indices = list(range(len(rewards)))
    if len(rewards) <= num_chosen:
        return indices
    # One reward is subtracted from all rewards. Otherwise, if they share a large offset, rounding
    # errors would hide their differences.
    offsets = rewards - rewards[0]
    ascending = sorted(indices, key=lambda index: (offsets[index], index))
    descending = sorted(indices, key=lambda index: (-offsets[index], index))

    chosen: list[int] = []
    largest_variance = -1.0
    for num_low in range(num_chosen + 1):
        low = ascending[:num_low]
        high = [index for index in descending if index not in low][: num_chosen - num_low]
        variance = float(np.var(offsets[low + high]))
        if variance > largest_variance * (1 + 1e-9):
            largest_variance = variance
            chosen = sorted(low + high)
    return chosen


# ---- the terms of the loss of a token


def importance_ratio(
    logprobs: mx.array, old_logprobs: mx.array, mask: mx.array, level: str
) -> mx.array:
    """
    The probability of tokens under the policy, divided by their probability under the old policy.

    level: "token" gives the ratio of each token, (N, T). "sequence" gives the geometric mean of the
    token ratios in each row, (N, 1). Source of the sequence ratio: GSPO, arXiv:2507.18071, eq. 7.
    """
    assert level in ("token", "sequence"), level
    log_ratio = logprobs - old_logprobs
    if level == "sequence":
        num_tokens = mx.maximum(mask.sum(-1, keepdims=True), 1)
        log_ratio = (log_ratio * mask).sum(-1, keepdims=True) / num_tokens
    return mx.exp(mx.minimum(log_ratio, LARGEST_LOG_RATIO))


def sampler_weights(tokens: Tokens, objective: Objective) -> mx.array | None:
    """
    Importance weights that correct the policy terms if another policy sampled the tokens.

    The result is None if `importance_sampling_correction` is "off".

    The weight is pi_old / pi_sampler, at most `importance_sampling_cap`, without a gradient. pi_old
    is the policy before the update, and pi_sampler is the policy that sampled the tokens.
    `importance_sampling_correction` "token" gives the weight of each token, (M, T). "sequence"
    gives the product of the token ratios of each row, (M, 1).

    Values at padding have no influence, so a user's own loss can call this function too.

    Sources: truncated importance weights are from IMPALA, arXiv:1802.01561. TRL 1.16 calls them
    `vllm_importance_sampling_correction`, with the modes token_truncate and sequence_truncate.
    """
    level = objective.importance_sampling_correction
    assert level in ("off", "token", "sequence"), level
    if level == "off":
        return None
    assert tokens.sampled_logprobs is not None, "given replies have no sampler"
    log_ratio = mx.where(tokens.mask > 0, tokens.old_logprobs - tokens.sampled_logprobs, 0.0)
    if level == "sequence":
        log_ratio = log_ratio.sum(-1, keepdims=True)
    weights = mx.exp(mx.minimum(log_ratio, LARGEST_LOG_RATIO))
    return mx.stop_gradient(mx.minimum(weights, objective.importance_sampling_cap))


class TermAndIsClipped(NamedTuple):
    """The policy term of each token, and which tokens were clipped."""

    term: mx.array  # (M, T)

    # (M, T) whether clipping removed the token's gradient, or for cispo, whether the token's ratio
    # was capped; None if the term never clips
    is_clipped: mx.array | None


def ppo_clipped_term(ratio: mx.array, tokens: Tokens, objective: Objective) -> TermAndIsClipped:
    """
    The term -min(r A, clip(r, 1 - epsilon, 1 + epsilon_high) A), for the ratio r and advantage A.

    If the two products are equal, the gradient is that of r A. mx.minimum and mx.clip would have no
    gradient where r is exactly a limit of the range, for example r = 1 with epsilon 0.

    Sources: PPO, arXiv:1707.06347, eq. 7; separate limits: DAPO, arXiv:2503.14476, eq. 10.
    """
    clipped_ratio = mx.clip(ratio, 1 - objective.epsilon, 1 + objective.effective_epsilon_high)
    free = ratio * tokens.advantages
    bounded = clipped_ratio * tokens.advantages
    has_gradient = (free <= bounded) | (ratio == clipped_ratio)
    term = -mx.where(free <= bounded, free, bounded)
    return TermAndIsClipped(term, ~has_gradient & (tokens.advantages != 0))


def cispo_term(ratio: mx.array, tokens: Tokens, objective: Objective) -> TermAndIsClipped:
    """
    The term -sg(min(r, cap)) A log pi, for the ratio r and advantage A; sg stops the gradient.

    The cap limits only the weight of a token, so no token loses its gradient. Source: MiniMax-M1,
    arXiv:2506.13585.
    """
    cap = objective.effective_epsilon_high
    weight = mx.stop_gradient(mx.minimum(ratio, cap))
    return TermAndIsClipped(-weight * tokens.advantages * tokens.logprobs, ratio > cap)


def sapo_term(ratio: mx.array, tokens: Tokens, objective: Objective) -> TermAndIsClipped:
    """
    The term -A sigmoid(t (r - 1)) 4 / t, for the ratio r, advantage A and steepness t.

    This is a soft clip: the derivative of the term with respect to r is -A at r = 1, and approaches
    0 as r moves away from 1. If A is 0 or negative, t is larger, so the derivative approaches 0
    sooner.

    Source: SAPO, arXiv:2511.20347.
    """
    temperature = mx.where(tokens.advantages > 0, *SAPO_TEMPERATURES)
    gate = mx.sigmoid(temperature * (ratio - 1))
    return TermAndIsClipped(-tokens.advantages * gate * 4 / temperature, None)


def kl_term(logprobs: mx.array, ref_logprobs: mx.array) -> mx.array:
    """
    An estimate of KL(policy, reference) at each token: exp(d) - d - 1.

    Here d is the log-probability under the reference minus the one under the policy. The estimate
    is never negative. The estimate and its gradient are 0 where policy and reference agree. If d
    exceeds `LARGEST_KL_LOG_RATIO`, the estimate and its gradient keep their values at this limit.
    So both are finite, and the gradient still raises the token's log-probability.

    Sources: k3 of Schulman, http://joschu.net/blog/kl-approx.html; DeepSeekMath,
    arXiv:2402.03300, eq. 4.
    """
    log_ratio = ref_logprobs - logprobs
    bounded = mx.stop_gradient(mx.minimum(log_ratio, LARGEST_KL_LOG_RATIO))
    # this adds 0 to the value, but restores the gradient that stop_gradient removed
    bounded = bounded + (log_ratio - mx.stop_gradient(log_ratio))
    return mx.exp(bounded) - bounded - 1


# ---- averages over the tokens of a step


def mean_of_tokens(per_token: mx.array, tokens: Tokens, objective: Objective) -> mx.array:
    """
    The sum over the counted tokens, divided by the number of counted tokens in the whole step.

    All tokens have the same weight.

    Source: DAPO, arXiv:2503.14476.
    """
    return (per_token * tokens.mask).sum(-1).sum() / _num_step_tokens(tokens)


def mean_of_row_means(per_token: mx.array, tokens: Tokens, objective: Objective) -> mx.array:
    """
    The mean of each row, averaged over the rows of the step. All rows have the same weight.

    Source: DeepSeekMath, arXiv:2402.03300.
    """
    row_sums = (per_token * tokens.mask).sum(-1)
    row_counts = tokens.mask.sum(-1)
    return (row_sums / mx.maximum(row_counts, 1)).sum() / _num_step_rows(tokens)


def mean_over_max_tokens(per_token: mx.array, tokens: Tokens, objective: Objective) -> mx.array:
    """
    The sum over the counted tokens, divided by max_tokens and by the number of rows in the step.

    A token has the same weight in a long answer as in a short one.

    Source: Dr. GRPO, arXiv:2503.20783.
    """
    assert objective.max_tokens is not None, "dr_grpo needs max_tokens to divide by"
    total = (per_token * tokens.mask).sum(-1).sum()
    return total / (_num_step_rows(tokens) * objective.max_tokens)


def _num_step_tokens(tokens: Tokens) -> mx.array:
    """The number of counted tokens in the step, at least 1."""
    num_items = tokens.mask.sum() if tokens.num_items is None else mx.array(tokens.num_items)
    return mx.maximum(num_items, 1)


def _num_step_rows(tokens: Tokens) -> float:
    """The number of rows in the step."""
    return len(tokens.mask) if tokens.num_rows is None else tokens.num_rows


# ---- losses


def zero_padding_and_detach_non_policy(tokens: Tokens) -> Tokens:
    """
    The tokens with 0 at padding. Only `logprobs` and `entropies` keep their gradients.

    Values at padding are arbitrary. The exponential of such a value might be inf, and inf * 0 in a
    masked sum would be nan. The returned advantages are (M, T) or (M, 1).
    """

    def zero_padding_and_detach(column: mx.array) -> mx.array:
        """The array with 0 at padding, and without a gradient."""
        return mx.where(tokens.mask > 0, mx.stop_gradient(column), 0.0)

    def zero_padding_and_detach_optional(column: mx.array | None) -> mx.array | None:
        """The array with 0 at padding, and without a gradient; None if `column` is None."""
        return None if column is None else zero_padding_and_detach(column)

    advantages = tokens.advantages
    if advantages.ndim == 1:
        advantages = advantages[:, None]
    entropies = tokens.entropies
    if entropies is not None:
        entropies = mx.where(tokens.mask > 0, entropies, 0.0)
    return tokens._replace(
        logprobs=mx.where(tokens.mask > 0, tokens.logprobs, 0.0),
        old_logprobs=zero_padding_and_detach(tokens.old_logprobs),
        ref_logprobs=zero_padding_and_detach_optional(tokens.ref_logprobs),
        entropies=entropies,
        sampled_logprobs=zero_padding_and_detach_optional(tokens.sampled_logprobs),
        advantages=mx.stop_gradient(advantages),
    )


def make_loss_with_kl_and_entropy(
    term: Callable[[mx.array, Tokens, Objective], TermAndIsClipped],
    average: Callable[[mx.array, Tokens, Objective], mx.array],
) -> LossFunction:
    """
    Returns a loss function that averages a term, a KL penalty and an entropy bonus over the tokens.

    It averages weight * term + beta * KL - entropy_coef * entropy. The weight is 1 unless
    `importance_sampling_correction` is set (see `sampler_weights`). The statistics of the loss
    contain `clip_frac` if the term can clip, and `kl` if there is a reference.

    term: a function of the ratio, the tokens and the objective. The tokens that it gets have the
    value 0 at padding, and their advantages are (M, T) or (M, 1).
    """

    def policy_loss(tokens: Tokens, objective: Objective) -> Loss:
        """The average loss of the counted tokens, and the sums that the statistics need."""
        tokens = zero_padding_and_detach_non_policy(tokens)
        level = objective.importance_sampling_level
        ratio = importance_ratio(tokens.logprobs, tokens.old_logprobs, tokens.mask, level)
        per_token, is_clipped = term(ratio, tokens, objective)
        weights = sampler_weights(tokens, objective)
        if weights is not None:
            per_token = per_token * weights

        counts = tokens.mask if tokens.weights is None else tokens.mask * tokens.weights
        sums = {}
        if is_clipped is not None:
            sums["clip_frac"] = (is_clipped * counts).sum()
        if tokens.ref_logprobs is not None:
            kl = kl_term(tokens.logprobs, tokens.ref_logprobs)
            per_token = per_token + objective.beta * kl
            sums["kl"] = (kl * counts).sum()
        if objective.entropy_coef:
            assert tokens.entropies is not None, "the entropy bonus needs entropies"
            per_token = per_token - objective.entropy_coef * tokens.entropies
        return Loss(average(per_token, tokens, objective), sums)

    return policy_loss


def distillation_loss(tokens: Tokens, objective: Objective) -> Loss:
    """The mean divergence between the teacher and the policy. Source: GKD, arXiv:2306.13649."""
    assert tokens.divergences is not None
    total = (tokens.divergences * tokens.mask).sum()
    return Loss(total / _num_step_tokens(tokens), {"distill/kl": total})


def cross_entropy_loss(tokens: Tokens, objective: Objective) -> Loss:
    """The mean negative log-probability of the counted tokens."""
    total = -(tokens.logprobs * tokens.mask).sum()
    return Loss(total / _num_step_tokens(tokens), {})


LOSSES: dict[str, LossFunction] = {
    "grpo": make_loss_with_kl_and_entropy(ppo_clipped_term, mean_of_row_means),
    "dr_grpo": make_loss_with_kl_and_entropy(ppo_clipped_term, mean_over_max_tokens),
    "dapo": make_loss_with_kl_and_entropy(ppo_clipped_term, mean_of_tokens),
    "cispo": make_loss_with_kl_and_entropy(cispo_term, mean_of_tokens),
    "sapo": make_loss_with_kl_and_entropy(sapo_term, mean_of_row_means),
    "distill": distillation_loss,
    "sft": cross_entropy_loss,
}
