"""
Computes the loss of a batch with the policy and a loss function.

The loss functions are in grpo.py. The gradient and the optimizer are in update.py.

Axes: M rows of a batch, T tokens that the policy wrote.
"""

from typing import Any, NamedTuple

import cpu_blas  # noqa: F401  (before mlx)
import mlx.core as mx

import grpo
import gwen
from config import Config, MemoryDependentSizes
from layers import divergence, lm_head, softmax
from layers.entropy import attach_entropy_gradient
from machine.output import restore_streams_after_call
from step.batch import Batch, completion_hidden_states
from step.loss_trial import has_gradient_at_zero_advantage

# A loss function returns sums by name. In `metrics.jsonl`, the names in SUMS stay the same, and all
# other names get LOSS_PREFIX.
SUMS = ("kl", "clip_frac", "distill/kl")
LOSS_PREFIX = "loss/"
# statistics of how much the policy before the update differs from the sampler
GAPS = ("logprob_abs_mean", "logprob_abs_max", "ratio_mean", "ratio_max", "over_cap_frac")
MISMATCH = tuple(f"mismatch/{name}" for name in GAPS)
# How far the policy has moved since earlier policies wrote the replayed samples. The metric exists
# only in a step with replayed samples.
REPLAY_GAP = "replay/logprob_abs_mean"
# The numbers of tokens in this step's own samples and in replayed samples. They are divisors and
# not metrics.
NUM_OWN_TOKENS = "num_own_tokens"
NUM_REPLAYED_TOKENS = "num_replayed_tokens"
# The statistics of each step, with their names in `metrics.jsonl`. They are means over the counted
# tokens, or maxima if the name ends in `_max`. A loss function may add statistics of its own.
MEASURED = ("kl", "distill/kl", "entropy", "clip_frac", *MISMATCH)
# `over_cap_frac` counts the ratios above this cap; a ratio is the trainer's probability divided by
# the sampler's probability
MISMATCH_CAP = 3.0


class BatchLoss(NamedTuple):
    """The contribution of one batch to the loss and the statistics of a step."""

    loss: mx.array  # a scalar; the loss of a step is the sum over all its batches
    logprobs: mx.array  # (M, T) of the tokens that the policy wrote

    # statistics over the counted tokens: sums, or maxima if the name ends in `_max`
    sums: dict[str, mx.array]


class UpdateResult(NamedTuple):
    """
    The result of all optimizer steps on one rollout, as Python numbers.

    Unless a comment says otherwise, a number is the mean over these optimizer steps. A number that
    was not measured is None.
    """

    lr: float  # the scheduled learning rate
    lr_scale: float  # the factor on `lr` in the last optimizer step
    num_skipped: int  # number of optimizer steps skipped since the run began
    loss_scale: float  # the loss scale after the last optimizer step
    # the statistics named in MEASURED, and the loss function's own statistics
    means: dict[str, float | None]
    num_counted_tokens: int = 0  # number of tokens that the statistics count
    num_with_gradient: int = 0  # number of rows with a gradient
    loss: float | None = None
    grad_norm: float | None = None  # the norm of the gradient before clipping

    # the KL between the policies before the first and after the last optimizer step
    moved: float | None = None
    num_backtracks: int = 0  # how often a step moved the policy too far and was shortened
    num_skipped_now: int = 0  # number of steps skipped because the gradient was not finite
    num_forwards: int = 0  # number of rows in forward passes of the policy or the reference model
    pad_frac: float | None = None  # fraction of the computed positions that are padding


def make_objective(config: Config) -> grpo.Objective:
    """The settings that a loss function in grpo.py needs, taken from the run's settings."""
    names = set(grpo.Objective._fields) - {"max_tokens"}
    settings = {name: getattr(config.objective, name) for name in names}
    return grpo.Objective(**settings, max_tokens=config.sampling.max_tokens)


class StepLoss:
    """Computes the loss that a run's settings define."""

    def __init__(
        self,
        config: Config,
        sizes: MemoryDependentSizes,
        loss_function: grpo.LossFunction | None = None,
    ):
        """loss_function: a user's own loss function; None for the one that --loss-type names."""
        self.config = config
        self.checkpoint_layers = sizes.checkpoint_layers
        self.objective = make_objective(config)
        self.loss_function = loss_function or grpo.LOSSES[config.objective.loss_type]
        self.temperature = config.sampling.temp
        self.head = "frozen" if config.model.lora_rank else "trained"
        sampling = config.sampling
        # which tokens the sampler may draw; None if it may draw all tokens
        self.support = softmax.TruncationSettings.from_settings(
            sampling.top_p, sampling.top_k, sampling.min_p
        )
        # Whether a sample may have a gradient although its advantage is 0. A trial with made-up
        # tokens does not show how a user's loss depends on the tokens of a sample, so a user's loss
        # gets every sample.
        is_custom = loss_function is not None
        self.all_have_gradient = is_custom or has_gradient_at_zero_advantage(
            self.loss_function, self.objective
        )

    def logprobs_and_entropies(
        self, model: gwen.Model, batch: Batch, gradient: bool = False
    ) -> tuple[mx.array, mx.array]:
        """
        The log-probability of each token, and the entropy of the distribution at that token.

        Both are (M, T). gradient: whether both need a gradient.
        """
        hidden = completion_hidden_states(model, batch, self.checkpoint_layers)
        ids = batch.completion_ids
        settings: dict[str, Any] = {
            "temperature": self.temperature,
            "head": self.head,
            "support": self.support,
        }
        logprobs, entropies = lm_head.token_logprobs(
            hidden, model.head_weight, ids, gradient=gradient, **settings
        )
        if gradient:
            entropies = attach_entropy_gradient(
                entropies, hidden, model.head_weight, ids, **settings
            )
        return logprobs, entropies

    def compute_batch_loss(self, model: gwen.Model, batch: Batch) -> BatchLoss:
        """Computes the contribution of the batch to the loss and the statistics of the step."""
        divergences = None
        if batch.lesson is None:
            logprobs, entropies = self.logprobs_and_entropies(model, batch, gradient=True)
        else:
            divergences, logprobs, entropies = divergence.token_divergences(
                completion_hidden_states(model, batch, self.checkpoint_layers),
                model.head_weight,
                batch.completion_ids,
                batch.lesson,
                beta=self.config.objective.distill_beta,
                temperature=self.temperature,
                head=self.head,
            )

        logprobs_before_update = batch.old_logprobs
        if logprobs_before_update is None:  # the policy has not changed since the update began
            logprobs_before_update = mx.stop_gradient(logprobs)
        tokens = grpo.Tokens(
            logprobs,
            self.old_logprobs_or_sampled_if_replayed(batch, logprobs_before_update),
            batch.advantages,
            batch.mask,
            num_items=batch.num_loss_tokens,
            num_rows=batch.num_rows,
            divergences=divergences,
            weights=batch.weights,
            entropies=entropies,
            sampled_logprobs=batch.sampled_logprobs,
            **batch.columns,
        )
        with restore_streams_after_call("the loss"):
            loss, sums = self.loss_function(tokens, self.objective)
        sums = {metric_name_of_sum(name): value for name, value in sums.items()}
        if not batch.is_trained:
            loss = mx.zeros(())

        counted = batch.mask * batch.weights
        stats = {"loss": loss, "entropy": (mx.stop_gradient(entropies) * counted).sum()}
        if batch.sampled_logprobs is not None:
            stats |= mismatch_sums_and_maxima(
                logprobs_before_update,
                batch.sampled_logprobs,
                batch.mask,
                counted,
                batch.is_replayed,
            )
        return BatchLoss(loss, logprobs, stats | sums)

    def old_logprobs_or_sampled_if_replayed(
        self, batch: Batch, logprobs_before_update: mx.array
    ) -> mx.array:
        """
        The log-probabilities (M, T) in the denominator of the importance ratio.

        logprobs_before_update (M, T): the log-probabilities under the policy before the update. For
        a replayed row, the sampler's log-probabilities are used instead. There is no such exception
        with --importance-sampling-correction, because this setting already multiplies the loss of
        each token by the token's probability before the update divided by the sampler's.
        """
        is_corrected = self.objective.importance_sampling_correction != "off"
        if batch.is_replayed is None or is_corrected:
            return logprobs_before_update
        assert batch.sampled_logprobs is not None, "a replayed row has no sampled log-probabilities"
        return mx.where(batch.is_replayed, batch.sampled_logprobs, logprobs_before_update)


def metric_name_of_sum(sum_name: str) -> str:
    """The name in `metrics.jsonl` of a sum that a loss function returns."""
    return sum_name if sum_name in SUMS else LOSS_PREFIX + sum_name


def mismatch_sums_and_maxima(
    logprobs: mx.array,
    sampled_logprobs: mx.array,
    mask: mx.array,
    token_weights: mx.array,
    is_replayed: mx.array | None = None,
) -> dict[str, mx.array]:
    """
    Compares log-probabilities (M, T) with the sampler's. Returns the statistics named in MISMATCH.

    Statistics whose names end in `_max` are maxima. All others are sums over the tokens.
    token_weights (M, T): the mask times the weights of the rows. is_replayed (M, 1) bool: the rows
    that an earlier policy wrote. In all other rows, the log-probabilities differ only because the
    sampler rounds differently. In these rows, they also differ because the policy has changed, so
    their difference goes into the separate statistic REPLAY_GAP.
    """
    replay_stats: dict[str, mx.array] = {}
    if is_replayed is not None:
        replayed_weights = mx.where(is_replayed, token_weights, 0)
        replay_gap = mx.abs(logprobs - sampled_logprobs) * mask * replayed_weights
        replay_stats = {REPLAY_GAP: replay_gap.sum(), NUM_REPLAYED_TOKENS: replayed_weights.sum()}
        mask = mx.where(is_replayed, 0, mask)
        token_weights = mx.where(is_replayed, 0, token_weights)

    gap = mx.abs(logprobs - sampled_logprobs) * mask
    ratio = grpo.importance_ratio(logprobs, sampled_logprobs, mask, "token") * mask
    is_over_cap = ratio > MISMATCH_CAP
    stats = (
        (gap * token_weights).sum(),
        gap.max(),
        (ratio * token_weights).sum(),
        ratio.max(),
        (is_over_cap * token_weights).sum(),
    )
    mismatch = dict(zip(MISMATCH, stats, strict=True))
    return mismatch | {NUM_OWN_TOKENS: token_weights.sum()} | replay_stats
