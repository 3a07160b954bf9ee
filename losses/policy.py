"""
The policy's log-probabilities of a step's tokens, and GRPO's loss on them.

Left out: the arithmetic of the loss (grpo.py), its gradient and the optimizer (update.py).

Axes: N rows of the step, M rows of a micro-batch, B its prompts, P prompt positions, T completion positions, C hidden.
"""

from collections.abc import Callable
from typing import NamedTuple

import mlx.core as mx

import grpo
import gwen
from config import Config
from kv_cache import TreeCache
from layers import lm_head, softmax
from micro_batch import MicroBatch

# the policy before the update against the sampler's
MISMATCH = ("logprob_abs_mean", "logprob_abs_max", "ratio_mean", "ratio_max", "over_cap_frac")
# measured at each step: means over the counted tokens; `_max` is the largest
MEASURED = ("kl", "clip_frac", "entropy", "distill", *MISMATCH)


def completion_hidden(model: gwen.Model, batch: MicroBatch, checkpoint_layers: int = 0) -> mx.array:
    """
    The hidden states that predict the completion tokens, (M, T, C).

    checkpoint_layers: how many layers, from the first, recompute their activations for the gradient.
    """
    if batch.prefix is None:
        hidden = model.hidden(batch.tokens, checkpoint_layers=checkpoint_layers)
        return mx.take_along_axis(hidden, batch.positions[:, :, None], axis=1)
    prefix = batch.prefix
    cache = TreeCache(len(model.layers)).child(prefix.lengths)
    hidden = model.hidden(prefix.tokens, cache, checkpoint_layers)  # (B, P, C)
    last = mx.array([length - 1 for length in prefix.lengths])
    first = hidden[mx.arange(len(prefix.lengths)), last][mx.array(prefix.parents)]  # (M, C)
    if not batch.tokens.shape[1]:  # every completion is one token, predicted by its prompt
        return first[:, None]
    children = cache.child(batch.lengths, prefix.parents)
    return mx.concatenate([first[:, None], model.hidden(batch.tokens, children, checkpoint_layers)], axis=1)


def completion_logprobs(
    model: gwen.Model, batch: MicroBatch, config: Config, gradient: str = "both"
) -> tuple[mx.array, mx.array]:
    """Log-probabilities of the completion tokens given all tokens before, and entropies, (M, T) each."""
    hidden = completion_hidden(model, batch, config.num_checkpointed(len(model.layers)))
    return lm_head.token_logprobs(
        hidden,
        model.head_weight,
        batch.completion_ids,
        temperature=config.temp,
        support=support_of(config),
        head="frozen" if config.lora_rank else "trained",
        gradient=gradient,
    )


def support_of(config: Config) -> softmax.Support | None:
    """The tokens that the sampler may draw; None: all."""
    return softmax.Support.of(config.top_p, config.top_k, config.min_p)


class Targets(NamedTuple):
    """The inputs of a step's loss besides the policy, and its divisors."""

    advantages: mx.array  # (N,), or (N, T) where those of a row's tokens differ
    ref_logprobs: mx.array | None  # (N, T)
    chosen: mx.array  # (N, T), 1 for the tokens whose policy term counts
    num_rows: int
    num_items: int  # counted tokens of all rows
    num_chosen: int


class Share(NamedTuple):
    """A micro-batch's part of a step's loss, as every loss on tokens gives it."""

    loss: mx.array  # the shares of all micro-batches sum to the step's loss
    logprobs: mx.array  # (M, T), of the completion tokens
    sums: dict[str, mx.array]  # measured over the counted tokens: sums, or the largest where the name ends in `_max`


TokenLoss = Callable[[gwen.Model, MicroBatch], Share]  # adding one is a function and a test; update.py does not change
MakeLoss = Callable[[Config, Targets], TokenLoss]  # of a step


def gaps(logprobs: mx.array, batch: MicroBatch, cap: float) -> dict[str, mx.array]:
    """How far log-probabilities (M, T) are from the sampler's: the sums called MISMATCH. cap: of a trusted ratio."""
    mask, sampled = batch.mask, batch.sampled_logprobs
    trust = grpo.importance_ratio(logprobs, sampled, mask, "token") * mask
    gap = mx.abs(logprobs - sampled) * mask
    sums = gap.sum(), gap.max(), trust.sum(), trust.max(), (trust > cap).sum()
    return dict(zip(MISMATCH, sums, strict=True))


class PolicyLoss:
    """GRPO's loss of a step, as the settings define it: a function of the model and a micro-batch."""

    def __init__(self, config: Config, targets: Targets):
        self.config, self.targets = config, targets
        named = {name: getattr(config, name) for name in grpo.Objective._fields}
        self.objective = grpo.Objective(**named | {"delta": config.delta or None})

    def __call__(self, model: gwen.Model, batch: MicroBatch) -> Share:
        config, targets, objective = self.config, self.targets, self.objective
        mask, rows, sampled = batch.mask, batch.rows, batch.sampled_logprobs
        clipped, logprobs, entropy = self.forward(model, batch)
        # None in the first iteration: the current policy is the old one
        old = mx.stop_gradient(logprobs) if batch.old_logprobs is None else batch.old_logprobs
        chosen = targets.chosen[rows, : mask.shape[1]]
        weights = chosen * grpo.mismatch_weights(old, sampled, mask, config.mismatch, config.mismatch_cap)
        ref = None if targets.ref_logprobs is None else targets.ref_logprobs[rows, : mask.shape[1]]
        advantages = self.advantages_of(batch)
        terms = grpo.token_terms(logprobs, old, advantages, mask, objective, ref_logprobs=ref, clipped=clipped)
        loss = grpo.aggregate(
            terms.losses(objective, weights), mask, objective, num_rows=targets.num_rows, num_items=targets.num_items
        )
        if config.entropy_coef:
            loss = loss - config.entropy_coef * (entropy * chosen).sum() / targets.num_chosen
        sums = {"loss": loss, "entropy": (entropy * mask).sum()} | gaps(logprobs, batch, config.mismatch_cap)
        found = {"kl": terms.kl, "clip_frac": terms.removed}
        sums |= {name: (values * mask).sum() for name, values in found.items() if values is not None}
        return Share(loss, logprobs, sums)

    def advantages_of(self, batch: MicroBatch) -> mx.array:
        """Those of a micro-batch, (M, 1), or (M, T) where each token has its own."""
        its_own = self.targets.advantages[batch.rows]
        return its_own[:, None] if its_own.ndim == 1 else its_own[:, : batch.mask.shape[1]]

    def forward(self, model: gwen.Model, batch: MicroBatch) -> tuple[mx.array | None, mx.array, mx.array]:
        """
        Terms of the clipped loss if a kernel computes them (else None), and the two results of `completion_logprobs`;
        (M, T) each.
        """
        config, objective = self.config, self.objective
        by_token = objective.loss_type in grpo.CLIPPED and objective.importance_sampling_level == "token"
        plain = config.lora_rank and not config.entropy_coef
        if not (by_token and plain and lm_head.has_token_losses(model.head_weight, support_of(config))):
            return None, *completion_logprobs(model, batch, config, "both" if config.entropy_coef else "logprobs")
        hidden = completion_hidden(model, batch, config.num_checkpointed(len(model.layers)))
        each = mx.broadcast_to(self.advantages_of(batch), batch.mask.shape)
        surrogate = grpo.Surrogate(each, batch.old_logprobs, objective)
        return lm_head.token_losses(hidden, model.head_weight, batch.completion_ids, surrogate, config.temp)
