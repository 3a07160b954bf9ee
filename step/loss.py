"""
The loss of a step: a batch goes through the policy, which gives the batch's part of the loss.

This file does not cover the arithmetic of the losses (grpo.py) or the gradient and the optimizer
(update.py).

Axes: M rows of a batch, T tokens that the policy wrote.
"""

from typing import NamedTuple

import mlx.core as mx

import grpo
import gwen
from config import Config, Sizes
from layers import divergence, lm_head, softmax
from step.batch import Batch, completion_hidden_states

SUMS = ("kl", "clip_frac")  # sums that a loss returns over the counted tokens; recorded as means
# how the policy before the update differs from the sampler
GAPS = ("logprob_abs_mean", "logprob_abs_max", "ratio_mean", "ratio_max", "over_cap_frac")
MISMATCH = tuple(f"mismatch/{name}" for name in GAPS)
# Each step's statistics, as in `metrics.jsonl`: means over the counted tokens, or maxima if the
# name ends in `_max`.
MEASURED = ("kl", "distill/kl", "entropy", "clip_frac", *MISMATCH)
MISMATCH_CAP = 3.0  # the largest ratio of trainer to sampler that is trusted


class BatchLoss(NamedTuple):
    """A batch's part of a step's loss."""

    loss: mx.array  # (); the parts of all batches add up to the step's loss
    logprobs: mx.array  # (M, T), for the tokens that the policy wrote
    # statistics over the counted tokens: sums, or maxima if the name ends in `_max`
    sums: dict[str, mx.array]


class UpdateResult(NamedTuple):
    """
    The result of all optimizer steps on one rollout, as Python numbers.

    Unless a comment says otherwise, a figure is the mean over these steps. It is None if it was not
    measured.
    """

    lr: float  # as scheduled
    lr_scale: float  # the factor on `lr` in the last step
    num_skipped: int  # skipped steps since the run began
    loss_scale: float  # after the last step
    means: dict[str, float | None]  # the statistics that MEASURED names
    num_loss_tokens: int = 0  # counted tokens
    num_with_gradient: int = 0  # rows with a gradient
    loss: float | None = None
    grad_norm: float | None = None  # before clipping
    moved: float | None = None  # KL between the policies before the first and after the last step
    num_backtracks: int = 0  # how often a step went too far and was shortened
    num_skipped_now: int = 0  # steps skipped because their gradient was not finite
    num_forwards: int = 0  # rows computed, including the reference's
    pad_frac: float | None = None  # fraction of the computed positions that is padding


def make_objective(config: Config) -> grpo.Objective:
    names = set(grpo.Objective._fields) - {"max_tokens"}
    settings = {name: getattr(config.objective, name) for name in names}
    return grpo.Objective(**settings, max_tokens=config.sampling.max_tokens)


class StepLoss:
    """The loss that a run's settings define, used in every step."""

    def __init__(
        self, config: Config, sizes: Sizes, loss_function: grpo.LossFunction | None = None
    ):
        """loss_function: a user's own loss, in place of the one that `--loss-type` names."""
        self.config = config
        self.checkpoint_layers = sizes.checkpoint_layers
        self.objective = make_objective(config)
        self.loss_function = loss_function or grpo.LOSSES[config.objective.loss_type]
        self.temperature = config.sampling.temp
        self.head = "frozen" if config.model.lora_rank else "trained"
        sampling = config.sampling
        # the tokens that the sampler may draw; None: all
        self.support = softmax.Support.from_settings(sampling.top_p, sampling.top_k, sampling.min_p)
        # whether a sample may have a gradient although its advantage is 0
        self.all_have_gradient = bool(
            self.objective.beta or config.objective.teacher or loss_function is not None
        )

    def logprobs(
        self, model: gwen.Model, batch: Batch, gradient: bool = False
    ) -> tuple[mx.array, mx.array]:
        """
        The tokens' log-probabilities, each given all tokens before it, and entropies, (M, T) each.

        gradient: whether the log-probabilities need a gradient.
        """
        return lm_head.token_logprobs(
            completion_hidden_states(model, batch, self.checkpoint_layers),
            model.head_weight,
            batch.completion_ids,
            temperature=self.temperature,
            head=self.head,
            support=self.support,
            gradient=gradient,
        )

    def compute(self, model: gwen.Model, batch: Batch) -> BatchLoss:
        """A batch's part of the step's loss."""
        divergences = None
        if batch.lesson is None:
            logprobs, entropies = self.logprobs(model, batch, gradient=True)
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

        if batch.old_logprobs is None:  # the current policy is the old one
            old_logprobs = mx.stop_gradient(logprobs)
        else:
            old_logprobs = batch.old_logprobs
        tokens = grpo.Tokens(
            logprobs,
            old_logprobs,
            batch.advantages,
            batch.mask,
            num_items=batch.num_loss_tokens,
            num_rows=batch.num_rows,
            divergences=divergences,
            weights=batch.weights,
            entropies=mx.stop_gradient(entropies),
            sampled_logprobs=batch.sampled_logprobs,
            **batch.columns,
        )
        loss, sums = self.loss_function(tokens, self.objective)
        assert sums.keys() <= set(MEASURED), f"{sums.keys()}: these are recorded: {MEASURED}"

        counted = batch.mask * batch.weights
        stats = {"loss": loss, "entropy": (entropies * counted).sum()}
        if batch.sampled_logprobs is not None:
            stats |= measure_mismatch(old_logprobs, batch.sampled_logprobs, batch.mask, counted)
        return BatchLoss(loss, logprobs, stats | sums)


def measure_mismatch(
    logprobs: mx.array, sampled_logprobs: mx.array, mask: mx.array, counted: mx.array
) -> dict[str, mx.array]:
    """
    The distance of log-probabilities (M, T) from the sampler's: the statistics named in MISMATCH.

    counted (M, T): mask times weights.
    """
    gap = mx.abs(logprobs - sampled_logprobs) * mask
    ratio = grpo.importance_ratio(logprobs, sampled_logprobs, mask, "token") * mask
    is_over_cap = ratio > MISMATCH_CAP
    stats = (
        (gap * counted).sum(),
        gap.max(),
        (ratio * counted).sum(),
        ratio.max(),
        (is_over_cap * counted).sum(),
    )
    return dict(zip(MISMATCH, stats, strict=True))
