"""
GRPO: the arithmetic of the trainer. Arrays in, arrays out, with no model, tokenizer, clock or file, so every line can
be checked by hand.

A step's loss is the sum of `aggregate` over its micro-batches. The split does not matter, because the divisor counts
the whole step; only bnpo divides by the tokens of its own micro-batch.

Axes: B prompts of a step, G completions of a prompt, N = B * G rows, T completion positions, K rewards.
"""

import math
from typing import NamedTuple

import mlx.core as mx
import numpy as np

CLIPPED = ("grpo", "bnpo", "dr_grpo", "dapo")  # losses that use `clipped_term`
LOSS_TYPES = (*CLIPPED, "cispo", "sapo")
LEVELS = ("token", "sequence")
SCALES = ("group", "batch", "none")
BASELINES = ("group", "rloo", "reinforce")
KL_ESTIMATORS = ("k2", "k3", "k3_corrected")
CORRECTIONS = ("off", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
SAPO_TEMPERATURES = (1.0, 1.05)  # for positive and for other advantages, arXiv:2511.20347
LARGEST_LOG_RATIO = 80.0  # e^80 is finite in float32; e^89 is inf, and its gradient through a clip is 0 * inf = nan


class Objective(NamedTuple):
    """How to compute a token's loss and aggregate a step's losses. Names follow TRL."""

    loss_type: str = "dapo"  # the term (`token_terms`) and the average (`aggregate`)
    importance_sampling_level: str = "token"  # see `importance_ratio`
    epsilon: float = 0.2  # lower clip of the ratio: 1 - epsilon
    epsilon_high: float | None = None  # upper clip: 1 + this; None: as epsilon. For cispo the cap on the ratio itself
    delta: float | None = None  # upper bound on the ratio for negative advantages
    beta: float = 0.0  # weight of the KL term
    kl_estimator: str = "k3"
    max_tokens: int | None = None  # the constant that dr_grpo divides by

    @property
    def upper(self) -> float:
        """`epsilon_high` as a number."""
        return self.epsilon if self.epsilon_high is None else self.epsilon_high


# ---- advantages


def group_advantages(
    rewards: np.ndarray, scale: str = "group", baseline: str = "group", signal_floor: float = 0.0
) -> np.ndarray:
    """
    How much better each completion is than the baseline, (B, G) float64 -> (B, G) float32.

    baseline: the mean reward of its "group", of the others in its group ("rloo") or of the whole step ("reinforce").
    scale: divide by the deviation within the "group" (GRPO) or over the "batch", or "none" (Dr. GRPO, RLOO).
    signal_floor: a group (with "reinforce" a step) is noise and gets exactly 0 if its rewards' range is at most this
    share of the step's deviation plus 1e-4, which every division adds. Equal rewards get exactly 0 at any floor.
    Rewards are measured from a first member, because a common offset may dwarf their differences, as in seconds since
    1970.
    Source: DeepSeekMath, arXiv:2402.03300, 4.1.2; Dr. GRPO, arXiv:2503.20783; batch: arXiv:2508.08221; RLOO:
    arXiv:2402.14740, eq. 7; the step's mean: REINFORCE++, arXiv:2501.03262.
    """
    assert scale in SCALES, scale
    assert baseline in BASELINES, baseline
    assert rewards.ndim == 2 and rewards.shape[1] > 1, f"a group needs two completions, rewards are {rewards.shape}"
    assert scale != "group" or baseline != "reinforce", "a group of equal rewards would be divided by a deviation of 0"
    size, step_deviation = rewards.shape[1], (rewards - rewards[0, 0]).std(ddof=1)
    compared = rewards.reshape(1, -1) if baseline == "reinforce" else rewards  # one row per comparison
    centered = compared - compared[:, :1]
    noise = np.ptp(centered, axis=1, keepdims=True) <= signal_floor * (step_deviation + 1e-4)
    centered = np.where(noise, 0.0, centered - centered.mean(axis=1, keepdims=True)).reshape(rewards.shape)
    if scale == "group":
        centered = centered / (np.sqrt((centered**2).sum(axis=1, keepdims=True) / (size - 1)) + 1e-4)
    elif scale == "batch":
        centered = centered / (step_deviation + 1e-4)
    # r - mean(others) = (r - mean(all)) * G / (G - 1)
    return (centered * (size / (size - 1)) if baseline == "rloo" else centered).astype(np.float32)


def decoupled_advantages(rewards: np.ndarray, weights: list[float], signal_floor: float = 0.0) -> np.ndarray:
    """
    Advantages of several rewards: normalizes each within its group, then their weighted sum over the batch.

    (K, B, G) float64 -> (B, G) float32. Each reward has its own floor, from its own deviation, because each is scaled
    to full size. Each group, and so the sum, already has mean 0; a group with equal values of every reward stays at
    exactly 0.
    Source: GDPO, arXiv:2601.05242.
    """
    parts = [group_advantages(one, signal_floor=signal_floor) for one in rewards]
    total = np.sum([weight * part.astype(np.float64) for weight, part in zip(weights, parts, strict=True)], axis=0)
    return (total / (np.sqrt((total**2).sum() / (total.size - 1)) + 1e-4)).astype(np.float32)


# ---- token weights


def importance_ratio(logprobs: mx.array, old_logprobs: mx.array, mask: mx.array, level: str) -> mx.array:
    """
    policy / old policy, per "token" (N, T), or per "sequence" (N, 1): the geometric mean of its tokens' ratios.

    Source: GSPO, arXiv:2507.18071, eq. 7.
    """
    assert level in LEVELS, level
    log_ratio = logprobs - old_logprobs
    if level == "sequence":
        log_ratio = (log_ratio * mask).sum(-1, keepdims=True) / mx.maximum(mask.sum(-1, keepdims=True), 1)
    return mx.exp(mx.minimum(log_ratio, LARGEST_LOG_RATIO))


def mismatch_weights(
    old_logprobs: mx.array, sampled_logprobs: mx.array, mask: mx.array, correction: str, cap: float = 3.0
) -> mx.array:
    """
    trainer's policy / sampler's policy, a weight of the policy term, (N, T) or (N, 1); without gradient.

    The two share parameters but differ in arithmetic. correction: the ratio of each "token" or its product over the
    "sequence"; above `cap` it becomes `cap` ("truncate") or 0 ("mask"). "off" gives 1.
    Source: truncated importance sampling, https://fengyao.notion.site/off-policy-rl; masked: IcePop, arXiv:2510.18855.
    """
    assert correction in CORRECTIONS, correction
    if correction == "off":
        return mx.ones_like(mask)
    level, _, action = correction.partition("_")
    log_ratio = mx.where(mask > 0, old_logprobs - sampled_logprobs, 0.0)
    if level == "sequence":
        log_ratio = log_ratio.sum(-1, keepdims=True)
    ratio = mx.stop_gradient(mx.exp(mx.minimum(log_ratio, LARGEST_LOG_RATIO)))
    return mx.minimum(ratio, cap) if action == "truncate" else mx.where(ratio > cap, 0.0, ratio)


def top_entropy_mask(entropy: mx.array, mask: mx.array, fraction: float) -> mx.array:
    """
    1 for the counted tokens with the highest `fraction` of entropies, (N, T), (N, T) -> (N, T).

    The threshold is the linearly interpolated quantile 1 - fraction, minus 1e-5 nats. The margin keeps equal
    completions together: padded differently, their entropies differ by rounding, and the choice would depend on the
    micro-batches.
    Source: arXiv:2506.01939, eq. 4.
    """
    assert 0 <= fraction <= 1, fraction
    num_tokens = round(float(mask.sum()))
    if not num_tokens:
        return mx.zeros_like(mask)
    ascending = mx.sort(mx.where(mask > 0, entropy, mx.inf).reshape(-1))
    place = (1 - fraction) * (num_tokens - 1)
    below = ascending[int(place)].item()
    above = ascending[min(int(place) + 1, num_tokens - 1)].item()
    threshold = below + (above - below) * (place - int(place))
    return ((entropy >= threshold - 1e-5) & (mask > 0)).astype(mask.dtype)


# ---- terms of a token's loss


def clipped_term(ratio: mx.array, advantages: mx.array, objective: Objective) -> tuple[mx.array, mx.array]:
    """
    -min(r A, clip(r, 1 - epsilon, 1 + epsilon_high) A), and whether it lost its gradient.

    `delta` bounds the first r (two-sided clipping). If the two products are equal, the gradient is that of the first:
    at an end of the range, such as r = 1 with epsilon 0, mx.minimum and mx.clip would have none.
    The kernel of `softmax.row_losses` follows the same rule, in the same words.
    Source: PPO, arXiv:1707.06347, eq. 7; two ranges: DAPO, arXiv:2503.14476, eq. 10; delta: INTELLECT-2,
    arXiv:2505.07291.
    """
    delta = math.inf if objective.delta is None else objective.delta
    bounded, clipped = mx.minimum(ratio, delta), mx.clip(ratio, 1 - objective.epsilon, 1 + objective.upper)
    free, held = bounded * advantages, clipped * advantages
    moves = mx.where(free <= held, ratio <= delta, ratio == clipped)
    return -mx.where(free <= held, free, held), ~moves & (advantages != 0)


class Surrogate(NamedTuple):
    """The clipped objective as a function of the tokens' log-probabilities only; arrays of one shape."""

    advantages: mx.array  # one per token
    old_logprobs: mx.array | None  # None on policy: every ratio is 1
    objective: Objective = Objective()

    def terms(self, logprobs: mx.array) -> mx.array:
        """The `clipped_term` of each token."""
        old_logprobs = mx.stop_gradient(logprobs) if self.old_logprobs is None else self.old_logprobs
        ratio = importance_ratio(logprobs, old_logprobs, mx.ones_like(logprobs), "token")
        return clipped_term(ratio, self.advantages, self.objective)[0]


def cispo_term(ratio: mx.array, logprobs: mx.array, advantages: mx.array, cap: float) -> mx.array:
    """-sg(min(r, cap)) A log pi: caps the weight, so no token loses its gradient. Source: arXiv:2506.13585."""
    return -mx.stop_gradient(mx.minimum(ratio, cap)) * advantages * logprobs


def sapo_term(ratio: mx.array, advantages: mx.array) -> mx.array:
    """
    -A sigmoid(t (r - 1)) 4 / t: a soft gate with slope 1 at r = 1 that fades on both sides.

    A larger t for advantages that are not positive makes their gradient fade sooner. Source: arXiv:2511.20347.
    """
    temperature = mx.where(advantages > 0, *SAPO_TEMPERATURES)
    return -advantages * mx.sigmoid(temperature * (ratio - 1)) * 4 / temperature


def kl_term(
    logprobs: mx.array, ref_logprobs: mx.array, estimator: str = "k3", ratio: mx.array | None = None
) -> mx.array:
    """
    An estimate of KL(policy, reference) per token, with d = log reference - log policy.

    k2: d^2 / 2; on policy, its gradient is the gradient of the KL. k3: exp(d) - d - 1, never negative. k3_corrected: k3
    times the importance `ratio`, including its gradient; gives the gradient of the KL for tokens of the old policy.
    All values and gradients are 0 where policy and reference agree. Schulman's k1 (-d) is left out: as a loss it has no
    effect, since its mean gradient is 0.
    Source: Schulman, http://joschu.net/blog/kl-approx.html; DeepSeekMath, arXiv:2402.03300, eq. 4; correction:
    DeepSeek-V3.2, arXiv:2512.02556; gradients: arXiv:2506.09477.
    """
    assert estimator in KL_ESTIMATORS, estimator
    log_ratio = ref_logprobs - logprobs
    if estimator == "k2":
        return log_ratio**2 / 2
    k3 = mx.exp(log_ratio) - log_ratio - 1
    if estimator == "k3":
        return k3
    assert ratio is not None, estimator
    return k3 * ratio


# ---- aggregation


def aggregate(
    per_token: mx.array,
    mask: mx.array,
    objective: Objective,
    *,
    num_rows: int | None = None,
    num_items: mx.array | int | None = None,
) -> mx.array:
    """
    A micro-batch's share of the step's loss, from its counted tokens, (M, T), (M, T) -> ().

    grpo, sapo: the mean over rows of each row's mean. dr_grpo: the sum / (rows * max_tokens), so long answers weigh no
    less. dapo, cispo: the sum / num_items, so all tokens weigh the same. bnpo: the sum / the micro-batch's tokens,
    weighted by its share of the rows.
    num_rows, num_items: rows and counted tokens of the whole step; default: those of this micro-batch.
    Source: arXiv:2402.03300; arXiv:2503.20783; arXiv:2503.14476; bnpo: TRL's `loss_type`.
    """
    loss_type = objective.loss_type
    assert loss_type in LOSS_TYPES, loss_type
    num_rows = mask.shape[0] if num_rows is None else num_rows
    sums, counts = (per_token * mask).sum(-1), mask.sum(-1)
    if loss_type in ("dapo", "cispo"):
        return sums.sum() / mx.maximum(counts.sum() if num_items is None else mx.array(num_items), 1)
    if loss_type == "dr_grpo":
        assert objective.max_tokens is not None, "dr_grpo divides by max_tokens"
        return sums.sum() / (num_rows * objective.max_tokens)
    if loss_type == "bnpo":
        return sums.sum() / mx.maximum(counts.sum(), 1) * (mask.shape[0] / num_rows)
    return (sums / mx.maximum(counts, 1)).sum() / num_rows


class Stats(NamedTuple):
    """Means over a batch's counted tokens, () float32 each, None if not measured; without gradient."""

    kl: mx.array | None  # the loss's estimate of KL(policy, reference); None without a reference
    clip_frac: mx.array | None  # share of tokens with gradient removed (for cispo: weight capped) by the clip


class Terms(NamedTuple):
    """The parts of a token's loss, (M, T), or (M, 1) with one ratio per sequence."""

    policy: mx.array
    kl: mx.array | None  # None without a reference
    removed: mx.array | None  # where the clip removed the gradient; None for sapo, which does not clip

    def losses(self, objective: Objective, weights: mx.array | None = None) -> mx.array:
        """
        weights * policy + beta * KL of each token, (M, T).

        weights: of the policy term, (M, T) or (M, 1) (`mismatch_weights`, `top_entropy_mask`).
        """
        policy = self.policy if weights is None else self.policy * mx.stop_gradient(weights)
        return policy if self.kl is None else policy + objective.beta * self.kl


def token_terms(
    logprobs: mx.array,
    old_logprobs: mx.array,
    advantages: mx.array,
    mask: mx.array,
    objective: Objective,
    *,
    ref_logprobs: mx.array | None = None,
    clipped: mx.array | None = None,
) -> Terms:
    """
    The terms of every token's loss; see `policy_loss` for the arrays.

    advantages: (M,), or (M, 1) or (M, T) where each token may have its own.
    clipped (M, T): the result of `clipped_term`, if a kernel has computed it from the logits.
    """
    level = objective.importance_sampling_level
    assert clipped is None or (objective.loss_type in CLIPPED and level == "token"), objective
    # values outside the mask are arbitrary; their exp must not become inf * 0 = nan
    logprobs, old_logprobs = mx.where(mask > 0, logprobs, 0.0), mx.where(mask > 0, mx.stop_gradient(old_logprobs), 0.0)
    advantages = mx.stop_gradient(advantages if advantages.ndim == 2 else advantages[:, None])
    ratio = importance_ratio(logprobs, old_logprobs, mask, level)
    removed: mx.array | None = None
    if objective.loss_type == "cispo":
        policy, removed = cispo_term(ratio, logprobs, advantages, objective.upper), ratio > objective.upper
    elif objective.loss_type == "sapo":
        policy = sapo_term(ratio, advantages)
    else:
        policy, removed = clipped_term(ratio, advantages, objective)
        if clipped is not None:
            policy = mx.where(mask > 0, clipped, 0.0)
    kl = None
    if ref_logprobs is not None:
        ref_logprobs = mx.where(mask > 0, mx.stop_gradient(ref_logprobs), 0.0)
        kl = kl_term(logprobs, ref_logprobs, objective.kl_estimator, ratio)
    return Terms(policy, kl, removed)


def policy_loss(
    logprobs: mx.array,
    old_logprobs: mx.array,
    advantages: mx.array,
    mask: mx.array,
    objective: Objective,
    *,
    ref_logprobs: mx.array | None = None,
    num_items: mx.array | int | None = None,
) -> tuple[mx.array, Stats]:
    """
    The definition of a whole step's loss; `losses/policy.py` applies the same parts to its micro-batches.

    logprobs (the only one with gradient), old_logprobs, ref_logprobs (M, T) float32 nats; advantages (M,);
    mask (M, T), 1 = counted, arbitrary values elsewhere -> (), Stats. num_items: see `aggregate`.
    """
    terms = token_terms(logprobs, old_logprobs, advantages, mask, objective, ref_logprobs=ref_logprobs)
    measured = (None if x is None else (x * mask).sum() / mx.maximum(mask.sum(), 1) for x in (terms.kl, terms.removed))
    stats = Stats(*(None if mean is None else mx.stop_gradient(mean) for mean in measured))
    return aggregate(terms.losses(objective), mask, objective, num_items=num_items), stats
