"""
The loss of a step: batches through the policy, and each one's share of it.

Left out: the arithmetic of the losses (grpo.py), the gradient and the optimizer (update.py).

Axes: M rows of a batch, T own tokens.
"""

from typing import Any, NamedTuple

import mlx.core as mx

import grpo
import gwen
from config import Config, Sizes
from layers import divergence, lm_head, softmax
from step.batch import Batch, hidden

SUMS = ("kl", "clip_frac")  # of a loss, over the counted tokens; recorded as means
# the policy before the update against the sampler's
GAPS = ("logprob_abs_mean", "logprob_abs_max", "ratio_mean", "ratio_max", "over_cap_frac")
MISMATCH = tuple(f"mismatch/{name}" for name in GAPS)
# measured at each step, as in `metrics.jsonl`: means over the counted tokens; `_max` is the largest
MEASURED = ("kl", "distill/kl", "entropy", "clip_frac", *MISMATCH)
MISMATCH_CAP = 3.0  # the largest ratio of trainer to sampler that is trusted


class Share(NamedTuple):
    """A batch's part of a step's loss."""

    loss: mx.array  # the shares of all batches sum to the step's loss
    logprobs: mx.array  # (M, T), of the own tokens
    sums: dict[str, mx.array]  # measured over the counted tokens: sums, or the largest where the name ends in `_max`


class UpdateResult(NamedTuple):
    """Result of the optimizer steps on one rollout; Python numbers, means over these steps, None if not measured."""

    lr: float  # as scheduled
    rate: float  # factor of it in the last step
    num_skipped: int  # skipped steps since the run began
    loss_scale: float  # after the last step
    means: dict[str, float | None]  # of MEASURED
    num_items: int = 0  # counted tokens
    num_taught: int = 0  # rows with a gradient
    loss: float | None = None
    grad_norm: float | None = None  # before clipping
    moved: float | None = None  # KL between the policies before the first and after the last, see step/trust_region.py
    repeats: int = 0  # tries that went too far and were undone
    skipped: int = 0  # steps skipped because their gradient was not finite
    num_forwards: int = 0  # rows computed, including the reference's
    pad_frac: float | None = None  # padding's share of the computed positions


def objective_of(config: Config) -> grpo.Objective:
    named = {name: getattr(config.objective, name) for name in set(grpo.Objective._fields) - {"max_tokens"}}
    return grpo.Objective(**named, max_tokens=config.sampling.max_tokens)


class StepLoss:
    """The loss of the steps of a run, by its settings."""

    def __init__(self, config: Config, sizes: Sizes, own: grpo.LossFunction | None = None):
        """own: a user's, in place of that of `--loss-type`."""
        self.config, self.checkpoint_layers = config, sizes.checkpoint_layers
        self.objective = objective_of(config)
        self.of_tokens = own or grpo.LOSSES[config.objective.loss_type]
        self.how: Any = {"temperature": config.sampling.temp, "head": "frozen" if config.model.lora_rank else "trained"}
        sampling = config.sampling
        # the tokens that the sampler may draw; None: all
        self.support = softmax.Support.of(sampling.top_p, sampling.top_k, sampling.min_p)
        # whether a sample may have a gradient though its advantage is 0
        self.all_teach = bool(self.objective.beta or config.objective.teacher or own is not None)

    def logprobs(self, model: gwen.Model, batch: Batch, gradient: bool = False) -> tuple[mx.array, mx.array]:
        """Log-probabilities of own tokens given all before, with a gradient if asked, and entropies, (M, T) each."""
        states, how = hidden(model, batch, self.checkpoint_layers), self.how | {"support": self.support}
        return lm_head.token_logprobs(states, model.head_weight, batch.completion_ids, gradient=gradient, **how)

    def share(self, model: gwen.Model, batch: Batch) -> Share:
        """A batch's part of the step's loss."""
        settings, mask, counted = self.config.objective, batch.mask, batch.mask * batch.weights
        divergences = None
        if batch.lesson is not None:
            states, how = hidden(model, batch, self.checkpoint_layers), self.how | {"beta": settings.distill_beta}
            found = divergence.token_divergences(states, model.head_weight, batch.completion_ids, batch.lesson, **how)
            divergences, logprobs, entropy = found
        else:
            logprobs, entropy = self.logprobs(model, batch, gradient=True)
        # None where the current policy is the old one
        old = mx.stop_gradient(logprobs) if batch.old_logprobs is None else batch.old_logprobs
        tokens = grpo.Tokens(
            logprobs,
            old,
            batch.advantages,
            mask,
            num_items=batch.num_items,
            num_rows=batch.num_rows,
            divergences=divergences,
            weights=batch.weights,
            entropies=mx.stop_gradient(entropy),
            sampled_logprobs=batch.sampled_logprobs,
            **batch.columns,
        )
        loss, sums = self.of_tokens(tokens, self.objective)
        assert sums.keys() <= set(MEASURED), f"{sums.keys()}: these are recorded: {MEASURED}"
        measured = {"loss": loss, "entropy": (entropy * counted).sum()}
        if batch.sampled_logprobs is not None:
            measured |= gaps(old, batch.sampled_logprobs, mask, counted)
        return Share(loss, logprobs, measured | sums)


def gaps(logprobs: mx.array, sampled: mx.array, mask: mx.array, counted: mx.array) -> dict[str, mx.array]:
    """How far log-probabilities (M, T) are from the sampler's: the sums called MISMATCH. counted: mask * weights."""
    gap, trust = mx.abs(logprobs - sampled) * mask, grpo.importance_ratio(logprobs, sampled, mask, "token") * mask
    over = trust > MISMATCH_CAP
    sums = (gap * counted).sum(), gap.max(), (trust * counted).sum(), trust.max(), (over * counted).sum()
    return dict(zip(MISMATCH, sums, strict=True))
