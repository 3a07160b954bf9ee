"""
GRPO: the arithmetic of the trainer. Arrays in, arrays out, with no model, tokenizer, clock or file, so every line can
be checked by hand.

`LOSSES` names every loss: a function of `Tokens` and `Objective`. A step's loss is the sum over its micro-batches; how
they are cut does not matter, because the divisors count the whole step.

Axes: B prompts of a step, G completions of a prompt, N = B * G rows, M rows of a micro-batch, T completion positions,
K rewards or turns.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

SAPO_TEMPERATURES = (1.0, 1.05)  # for positive and for other advantages, arXiv:2511.20347
SIGNAL_FLOOR = (
    0.01  # a group whose rewards' range is below this share of the step's deviation is noise
)
LARGEST_LOG_RATIO = (
    80.0  # e^80 is finite in float32; e^89 is inf, and its gradient through a clip is 0 * inf = nan
)
# A token that the reference finds e^9 times likelier has a KL term of 8093 and a slope of 8102. Beyond, both stay:
# the exponential of a few tokens would else be the whole step's loss, and infinite from e^89 on.
LARGEST_KL_LOG_RATIO = 9.0


class Objective(NamedTuple):
    """How to compute a token's loss and aggregate a step's losses. Names follow TRL."""

    loss_type: str = "dapo"  # see LOSSES
    importance_sampling_level: str = "token"  # see `importance_ratio`
    epsilon: float = 0.2  # lower clip of the ratio: 1 - epsilon
    epsilon_high: float | None = (
        None  # upper clip: 1 + this; None: as epsilon. For cispo the cap on the ratio itself
    )
    beta: float = 0.0  # weight of the KL term
    max_tokens: int | None = None  # the constant that dr_grpo divides by

    @property
    def upper(self) -> float:
        """`epsilon_high` as a number."""
        return self.epsilon if self.epsilon_high is None else self.epsilon_high


class Tokens(NamedTuple):
    """What a loss sees of a micro-batch's tokens: (M, T) float32 each, with arbitrary values where the mask is 0."""

    logprobs: mx.array  # nats under the policy, with gradient
    old_logprobs: mx.array  # under the policy before the update
    advantages: mx.array  # (M,), or (M, T) where those of a row's tokens differ
    mask: mx.array  # 1 = counted, 0 = padding
    ref_logprobs: mx.array | None = None  # under the model before training; None without a KL term
    num_items: float | None = None  # counted tokens of the whole step; None: of these rows
    num_rows: float | None = None  # rows of the whole step; None: these
    divergences: mx.array | None = None  # between teacher and policy, with gradient; for "distill"
    weights: mx.array | None = (
        None  # (M, 1), tokens that each counts for in sums; above 1 only without advantage
    )
    entropies: mx.array | None = None  # nats, of the policy's distributions, without gradient
    sampled_logprobs: mx.array | None = None  # as the sampler recorded them; None for given replies


class Loss(NamedTuple):
    """A micro-batch's part of a step's loss, (), and sums over its counted tokens of what is measured, () each."""

    value: mx.array
    sums: dict[str, mx.array]


LossFunction = Callable[[Tokens, Objective], Loss]


# ---- advantages


def group_advantages(
    rewards: np.ndarray, scale: str = "group", baseline: str = "group", signal_floor: float = 0.0
) -> np.ndarray:
    """
    How much better each completion is than the baseline, (B, G) float64 -> (B, G) float32.

    A group of fewer than G completions ends in nan, where the advantage is 0.
    baseline: the mean reward of its "group", of the others in its group ("rloo") or of the whole step ("reinforce").
    scale: divide by the deviation within the "group" (GRPO) or over the "batch", by the group's "mean" (MaxRL: of right
    and wrong, 1 and 0, the gradient of log p to order G - 1; at least a G-th of the group's range, which bounds other
    rewards' advantages by G), or "none" (Dr. GRPO, RLOO).
    signal_floor: a group (with "reinforce" a step) is noise and gets exactly 0 if its rewards' range is at most this
    share of the step's deviation plus 1e-4, which every division adds. Equal rewards get exactly 0 at any floor.
    Rewards are measured from a first member, because a common offset may dwarf their differences, as in seconds since
    1970.
    Source: DeepSeekMath, arXiv:2402.03300, 4.1.2; Dr. GRPO, arXiv:2503.20783; batch: arXiv:2508.08221; RLOO:
    arXiv:2402.14740, eq. 7; the step's mean: REINFORCE++, arXiv:2501.03262; MaxRL: arXiv:2602.02710.
    """
    assert scale in ("group", "batch", "mean", "none"), scale
    assert baseline in ("group", "rloo", "reinforce"), baseline
    assert rewards.ndim == 2 and rewards.shape[1] > 1, (
        f"a group needs two completions, rewards are {rewards.shape}"
    )
    assert scale not in ("group", "mean") or baseline != "reinforce", (
        "the whole step is compared, not a group"
    )
    has, shape = (
        ~np.isnan(rewards),
        (1, -1) if baseline == "reinforce" else rewards.shape,
    )  # one row per comparison
    step_deviation, num = (rewards[has] - rewards[0, 0]).std(ddof=1), has.sum(axis=1, keepdims=True)
    compared, there = rewards.reshape(shape), has.reshape(shape)
    centered = np.where(there, compared - compared[:, :1], 0.0)
    noise = np.ptp(centered, axis=1, keepdims=True) <= signal_floor * (step_deviation + 1e-4)
    mean = centered.sum(axis=1, keepdims=True) / there.sum(axis=1, keepdims=True)
    centered = np.where(noise | ~there, 0.0, centered - mean).reshape(rewards.shape)
    if scale == "group":
        squares = (centered**2).sum(axis=1, keepdims=True)
        centered = centered / (np.sqrt(squares / np.maximum(num - 1, 1)) + 1e-4)
    elif scale == "batch":
        centered = centered / (step_deviation + 1e-4)
    elif scale == "mean":
        spread = np.ptp(np.where(has, rewards, rewards[:, :1]), axis=1, keepdims=True)
        mean = np.where(has, rewards, 0.0).sum(axis=1, keepdims=True) / num
        centered = centered / np.maximum(
            mean, spread / num + 1e-12
        )  # equal rewards are 0 / 0 otherwise
    # r - mean(others) = (r - mean(all)) * G / (G - 1)
    return (centered * (num / np.maximum(num - 1, 1)) if baseline == "rloo" else centered).astype(
        np.float32
    )


def turn_advantages(
    groups: list[list[list[float]]], scale: str = "group", signal_floor: float = 0.0
) -> np.ndarray:
    """
    How much better what a row earns from a turn on is than what the rows of its group earn from that turn on.

    groups: rewards of each turn of each row -> (B, G, K) float32, 0 beyond a row's last turn and a group's last row.
    The return of turn k, the sum of the rewards of turns >= k, minus its mean over the rows that have a turn k: whether
    a row has one is known before it writes it. "group" divides by the deviation of these differences in the group, with
    a degree of freedom less for each turn's mean, "none" by nothing. Rows of one turn, and rows with equally many turns
    that pay at the end only, get what `group_advantages` gives. signal_floor: see there.
    Source: returns of turns compared in the group, GTPO, arXiv:2511.14846; the deviation that keeps GRPO is ours.
    """
    assert scale in ("group", "none"), scale
    rows = [(place, row) for place, group in enumerate(groups) for row in enumerate(group)]
    shape = len(groups), max(map(len, groups)), max(len(turns) for _, (_, turns) in rows)
    rewards, has = np.zeros(shape), np.zeros(shape, bool)
    for place, (row, turns) in rows:
        rewards[place, row, : len(turns)], has[place, row, : len(turns)] = turns, True
    returns = rewards[..., ::-1].cumsum(axis=-1)[..., ::-1]
    step_deviation = (returns[..., 0][has[..., 0]] - returns[0, 0, 0]).std(ddof=1)
    first = np.take_along_axis(
        returns, has.argmax(axis=1)[:, None], axis=1
    )  # of a row that has the turn
    centered, num = np.where(has, returns - first, 0.0), has.sum(axis=1, keepdims=True)
    centered = np.where(
        has, centered - centered.sum(axis=1, keepdims=True) / np.maximum(num, 1), 0.0
    )
    noise = np.ptp(centered, axis=(1, 2), keepdims=True) <= signal_floor * (step_deviation + 1e-4)
    centered = np.where(noise, 0.0, centered)
    if scale == "group":
        free = np.maximum(num - 1, 0).sum(axis=(1, 2), keepdims=True)
        squares = (centered**2).sum(axis=(1, 2), keepdims=True)
        centered = centered / (np.sqrt(squares / np.maximum(free, 1)) + 1e-4)
    return centered.astype(np.float32)


def decoupled_advantages(
    rewards: np.ndarray, weights: list[float], signal_floor: float = 0.0
) -> np.ndarray:
    """
    Advantages of several rewards: normalizes each within its group, then their weighted sum over the batch.

    (K, B, G) float64, nan as in `group_advantages` -> (B, G) float32. Each reward has its own floor, from its own
    deviation, because each is scaled to full size. Each group, and so the sum, already has mean 0; a group with equal
    values of every reward stays at exactly 0.
    Source: GDPO, arXiv:2601.05242.
    """
    parts = [group_advantages(one, signal_floor=signal_floor) for one in rewards]
    total = np.sum(
        [weight * part.astype(np.float64) for weight, part in zip(weights, parts, strict=True)],
        axis=0,
    )
    num = (~np.isnan(rewards[0])).sum()
    return (total / (np.sqrt((total**2).sum() / (num - 1)) + 1e-4)).astype(np.float32)


# ---- terms of a token's loss


def importance_ratio(
    logprobs: mx.array, old_logprobs: mx.array, mask: mx.array, level: str
) -> mx.array:
    """policy / old policy by "token" (N, T), or "sequence" (N, 1), a geometric mean: GSPO, arXiv:2507.18071, eq. 7."""
    assert level in ("token", "sequence"), level
    log_ratio = logprobs - old_logprobs
    if level == "sequence":
        log_ratio = (log_ratio * mask).sum(-1, keepdims=True) / mx.maximum(
            mask.sum(-1, keepdims=True), 1
        )
    return mx.exp(mx.minimum(log_ratio, LARGEST_LOG_RATIO))


# a policy's term for each token, and whether a clip took its gradient (cispo: weight); None where nothing clips
Term = tuple[mx.array, mx.array | None]


def clipped_term(ratio: mx.array, tokens: Tokens, objective: Objective) -> Term:
    """
    -min(r A, clip(r, 1 - epsilon, 1 + epsilon_high) A).

    If the two products are equal, the gradient is that of the first: at an end of the range, such as r = 1 with epsilon
    0, mx.minimum and mx.clip would have none.
    Source: PPO, arXiv:1707.06347, eq. 7; two ranges: DAPO, arXiv:2503.14476, eq. 10.
    """
    clipped = mx.clip(ratio, 1 - objective.epsilon, 1 + objective.upper)
    free, bounded = ratio * tokens.advantages, clipped * tokens.advantages
    moves = (free <= bounded) | (ratio == clipped)
    return -mx.where(free <= bounded, free, bounded), ~moves & (tokens.advantages != 0)


def cispo_term(ratio: mx.array, tokens: Tokens, objective: Objective) -> Term:
    """-sg(min(r, cap)) A log pi: caps the weight, so no token loses its gradient. Source: arXiv:2506.13585."""
    cap = objective.upper
    return -mx.stop_gradient(
        mx.minimum(ratio, cap)
    ) * tokens.advantages * tokens.logprobs, ratio > cap


def sapo_term(ratio: mx.array, tokens: Tokens, objective: Objective) -> Term:
    """
    -A sigmoid(t (r - 1)) 4 / t: a soft gate with slope 1 at r = 1 that fades on both sides.

    A larger t for advantages that are not positive makes their gradient fade sooner. Source: arXiv:2511.20347.
    """
    temperature = mx.where(tokens.advantages > 0, *SAPO_TEMPERATURES)
    return -tokens.advantages * mx.sigmoid(temperature * (ratio - 1)) * 4 / temperature, None


def kl_term(logprobs: mx.array, ref_logprobs: mx.array) -> mx.array:
    """
    An estimate of KL(policy, reference) per token: exp(d) - d - 1, with d = log reference - log policy.

    Never negative; value and gradient are 0 where policy and reference agree. Beyond `LARGEST_KL_LOG_RATIO` value and
    gradient are those at that d: finite, and the gradient still raises the token's log-probability.
    Source: k3 of Schulman, http://joschu.net/blog/kl-approx.html; DeepSeekMath, arXiv:2402.03300, eq. 4.
    """
    log_ratio = ref_logprobs - logprobs
    bounded = mx.stop_gradient(mx.minimum(log_ratio, LARGEST_KL_LOG_RATIO))
    bounded = bounded + (
        log_ratio - mx.stop_gradient(log_ratio)
    )  # adds 0, and keeps the slope that a minimum drops
    return mx.exp(bounded) - bounded - 1


# ---- averages of a step's tokens


def mean_of_tokens(per_token: mx.array, tokens: Tokens, objective: Objective) -> mx.array:
    """The sum / the step's counted tokens, so all tokens weigh the same. Source: DAPO, arXiv:2503.14476."""
    return (per_token * tokens.mask).sum(-1).sum() / _num_items(tokens)


def mean_of_rows(per_token: mx.array, tokens: Tokens, objective: Objective) -> mx.array:
    """The mean over the step's rows of each row's mean. Source: DeepSeekMath, arXiv:2402.03300."""
    sums, counts = (per_token * tokens.mask).sum(-1), tokens.mask.sum(-1)
    return (sums / mx.maximum(counts, 1)).sum() / _num_rows(tokens)


def mean_of_positions(per_token: mx.array, tokens: Tokens, objective: Objective) -> mx.array:
    """The sum / (rows * max_tokens), so long answers weigh no less. Source: Dr. GRPO, arXiv:2503.20783."""
    assert objective.max_tokens is not None, "dr_grpo divides by max_tokens"
    return (per_token * tokens.mask).sum(-1).sum() / (_num_rows(tokens) * objective.max_tokens)


def _num_items(tokens: Tokens) -> mx.array:
    return mx.maximum(
        tokens.mask.sum() if tokens.num_items is None else mx.array(tokens.num_items), 1
    )


def _num_rows(tokens: Tokens) -> float:
    return len(tokens.mask) if tokens.num_rows is None else tokens.num_rows


# ---- losses


COLUMNS = (
    "old_logprobs",
    "ref_logprobs",
    "entropies",
    "sampled_logprobs",
)  # (M, T), without gradient


def policy_loss(
    term: Callable[..., Term], average: Callable[[mx.array, Tokens, Objective], mx.array]
) -> LossFunction:
    """
    The average of term + beta * KL over the counted tokens. Sums: `kl` with a reference; `clip_frac` with a clip.

    term: a function of the ratio, of the tokens, with 0 where the mask is 0 and advantages (M, T) or (M, 1), and of the
    objective.
    """

    def loss(tokens: Tokens, objective: Objective) -> Loss:
        mask = tokens.mask
        columns: Any = {"logprobs": tokens.logprobs}
        columns |= {
            name: mx.stop_gradient(one)
            for name in COLUMNS
            if (one := getattr(tokens, name)) is not None
        }
        # values outside the mask are arbitrary; their exp must not become inf * 0 = nan
        columns = {name: mx.where(mask > 0, one, 0.0) for name, one in columns.items()}
        advantages = mx.stop_gradient(
            tokens.advantages if tokens.advantages.ndim == 2 else tokens.advantages[:, None]
        )
        tokens = tokens._replace(advantages=advantages, **columns)
        ratio = importance_ratio(
            tokens.logprobs, tokens.old_logprobs, mask, objective.importance_sampling_level
        )
        per_token, removed = term(ratio, tokens, objective)
        counted = mask if tokens.weights is None else mask * tokens.weights
        sums = {} if removed is None else {"clip_frac": (removed * counted).sum()}
        if tokens.ref_logprobs is not None:
            kl = kl_term(tokens.logprobs, tokens.ref_logprobs)
            per_token, sums["kl"] = per_token + objective.beta * kl, (kl * counted).sum()
        return Loss(average(per_token, tokens, objective), sums)

    return loss


def distillation(tokens: Tokens, objective: Objective) -> Loss:
    """The mean divergence between teacher and policy. Source: GKD, arXiv:2306.13649."""
    assert tokens.divergences is not None
    total = (tokens.divergences * tokens.mask).sum()
    return Loss(total / _num_items(tokens), {"distill/kl": total})


def cross_entropy(tokens: Tokens, objective: Objective) -> Loss:
    """The mean negative log-probability of the counted tokens."""
    return Loss(-(tokens.logprobs * tokens.mask).sum() / _num_items(tokens), {})


LOSSES: dict[str, LossFunction] = {
    "grpo": policy_loss(clipped_term, mean_of_rows),
    "dr_grpo": policy_loss(clipped_term, mean_of_positions),
    "dapo": policy_loss(clipped_term, mean_of_tokens),
    "cispo": policy_loss(cispo_term, mean_of_tokens),
    "sapo": policy_loss(sapo_term, mean_of_rows),
    "distill": distillation,
    "sft": cross_entropy,
}
