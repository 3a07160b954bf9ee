"""
GRPO: the part of the trainer that is only arithmetic. Arrays in, arrays out: no model, tokenizer, clock or file is
known here, so that every line can be checked by hand.

Axes: B prompts of a step, G completions of a prompt, N = B * G rows, T completion positions.
"""

from typing import NamedTuple

import mlx.core as mx

LOSSES = ("grpo", "dr_grpo", "dapo")
SCALES = ("group", "batch", "none")
LEVELS = ("token", "sequence")


class Stats(NamedTuple):
    """Means over the counted tokens of a batch, () float32 each; none of them carries a gradient."""

    kl: mx.array  # k3 estimate of KL(policy, reference); 0 without a reference
    clip_frac: mx.array  # share of tokens whose gradient the clip removed
    ratio: mx.array  # policy / old policy


def group_advantages(rewards: mx.array, scale: str = "group") -> mx.array:
    """
    How much better each completion is than its group's mean, (B, G) -> (B, G).

    scale: divide by the deviation within the "group" (GRPO) or over the "batch", or "none" (Dr. GRPO).
    A group of equal rewards gives exactly 0: rewards are measured from the group's first member, because in float32
    the mean of equal numbers is often one rounding off them, and rounding / (0 + 1e-4) is not small.
    Source: DeepSeekMath, arXiv:2402.03300, eq. in 4.1.2; Dr. GRPO, arXiv:2503.20783; batch: arXiv:2508.08221.
    """
    assert scale in SCALES, scale
    assert rewards.ndim == 2 and rewards.shape[1] > 1, f"a group needs two completions, rewards are {rewards.shape}"
    centered = rewards - rewards[:, :1]
    centered = centered - centered.mean(axis=1, keepdims=True)
    if scale == "group":
        return centered / (mx.sqrt((centered**2).sum(axis=1, keepdims=True) / (rewards.shape[1] - 1)) + 1e-4)
    if scale == "batch":
        spread = rewards - rewards[0, 0]
        return centered / (mx.sqrt(mx.var(spread, ddof=1)) + 1e-4)
    return centered


def importance_ratio(logprobs: mx.array, old_logprobs: mx.array, mask: mx.array, level: str) -> mx.array:
    """
    policy / old policy, per "token" (N, T), or per "sequence" (N, 1): the geometric mean of its tokens' ratios.

    Source: GSPO, arXiv:2507.18071, eq. 7.
    """
    assert level in LEVELS, level
    log_ratio = logprobs - old_logprobs
    if level == "sequence":
        log_ratio = (log_ratio * mask).sum(-1, keepdims=True) / mx.maximum(mask.sum(-1, keepdims=True), 1)
    return mx.exp(mx.minimum(log_ratio, 80.0))  # beyond 88 it is inf, whose gradient through the clip is 0 * inf = nan


def kl_k3(logprobs: mx.array, ref_logprobs: mx.array) -> mx.array:
    """
    The estimate exp(d) - d - 1, d = ref - policy, of KL(policy, ref) per token: never negative, 0 where they agree.

    Source: Schulman, http://joschu.net/blog/kl-approx.html; DeepSeekMath, arXiv:2402.03300, eq. 4.
    """
    log_ratio = ref_logprobs - logprobs
    return mx.exp(log_ratio) - log_ratio - 1


def aggregate(
    per_token: mx.array,
    mask: mx.array,
    loss: str,
    *,
    max_tokens: int | None = None,
    num_items: mx.array | int | None = None,
) -> mx.array:
    """
    One number from the losses of the counted tokens, (N, T), (N, T) -> ().

    grpo: the mean over rows of each row's mean. dr_grpo: the sum / (N * max_tokens), so that a long answer weighs no
    less. dapo: the sum / num_items, the completion tokens of the whole step, so that every token weighs the same.
    Source: arXiv:2402.03300; arXiv:2503.20783; arXiv:2503.14476.
    """
    assert loss in LOSSES, loss
    total = (per_token * mask).sum()
    if loss == "dapo":
        return total / (mx.maximum(mask.sum(), 1) if num_items is None else num_items)
    if loss == "dr_grpo":
        assert max_tokens is not None, "dr_grpo divides by max_tokens"
        return total / (mask.shape[0] * max_tokens)
    return ((per_token * mask).sum(-1) / mx.maximum(mask.sum(-1), 1)).mean()


def micro_batch_weight(loss: str, num_rows: int, num_rows_of_step: int) -> float:
    """What a micro-batch's loss is multiplied with so that the step's gradient is the same however it is cut."""
    return 1.0 if loss == "dapo" else num_rows / num_rows_of_step


def policy_loss(
    logprobs: mx.array,
    old_logprobs: mx.array,
    advantages: mx.array,
    mask: mx.array,
    *,
    ref_logprobs: mx.array | None = None,
    loss: str = "grpo",
    level: str = "token",
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    delta: float | None = None,
    kl_coef: float = 0.0,
    max_tokens: int | None = None,
    num_items: mx.array | int | None = None,
) -> tuple[mx.array, Stats]:
    """
    The clipped policy-gradient loss: -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) + kl_coef KL, aggregated.

    logprobs (the only one with gradient), old_logprobs, ref_logprobs (N, T) float32 nats; advantages (N,);
    mask (N, T), 1 = counted -> (), Stats. loss: see `aggregate`. level: see `importance_ratio`.
    delta: an upper bound on r in the unclipped term too, for negative advantages (two-sided clipping).
    num_items: completion tokens of the whole step, for dapo.
    Source: PPO, arXiv:1707.06347, eq. 7; delta: INTELLECT-2, arXiv:2505.07291.
    """
    advantages = mx.stop_gradient(advantages)[:, None]
    old_logprobs = mx.stop_gradient(old_logprobs)
    # what lies outside the mask may be anything; exp of it must not become inf * 0 = nan
    logprobs = mx.where(mask > 0, logprobs, old_logprobs)
    ratio = importance_ratio(logprobs, old_logprobs, mask, level)
    clipped = mx.clip(ratio, 1 - clip_low, 1 + clip_high)
    bounded = ratio if delta is None else mx.minimum(ratio, delta)
    per_token = -mx.minimum(bounded * advantages, clipped * advantages)
    per_token = mx.broadcast_to(per_token, logprobs.shape)
    kl = mx.zeros_like(logprobs)
    if ref_logprobs is not None:
        kl = kl_k3(logprobs, mx.where(mask > 0, mx.stop_gradient(ref_logprobs), logprobs))
        per_token = per_token + kl_coef * kl
    removed = ((ratio < 1 - clip_low) & (advantages < 0)) | ((ratio > 1 + clip_high) & (advantages > 0))
    num_tokens = mx.maximum(mask.sum(), 1)
    means = (mx.stop_gradient((x * mask).sum() / num_tokens) for x in (kl, removed.astype(mx.float32), ratio))
    return aggregate(per_token, mask, loss, max_tokens=max_tokens, num_items=num_items), Stats(*means)
