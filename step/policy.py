"""
From a micro-batch to the tokens of a loss: what the policy makes of them, and their share of the step's loss.

Left out: the arithmetic of the losses (grpo.py), the gradient and the optimizer (update.py).

Axes: N rows of the step, M rows of a micro-batch, B its prompts, P prompt positions, T completion positions, C hidden.
"""

import itertools
import math
from typing import NamedTuple

import mlx.core as mx
import numpy as np

import grpo
import gwen
from config import Config, Sizes
from layers import divergence, lm_head, softmax
from sampler import Rollout
from step import shared_prompts
from step.micro_batch import MicroBatch, micro_batches
from step.objectives import objective_of
from step.result import MEASURED, MISMATCH

MISMATCH_CAP = 3.0  # the largest ratio of trainer to sampler that is trusted
MEASURED_OF = 8  # one of so many rows without a gradient is measured


class Targets(NamedTuple):
    """The inputs of a step's loss besides the policy, and its divisors."""

    num_rows: int
    num_items: float  # counted tokens of all rows
    advantages: mx.array | None = None  # (N,), or (N, T) where those of a row's tokens differ
    ref_logprobs: mx.array | None = None  # (N, T)
    lesson: divergence.Lesson | None = None  # a teacher's hidden states of the tokens
    taught: np.ndarray | None = None  # (N,) bool, the rows with a gradient; None: all

    @property
    def num_taught(self) -> int:
        """Rows with a gradient."""
        return self.num_rows if self.taught is None else int(self.taught.sum())

    def part(self, num: int) -> "Targets":
        """
        Those of one of `num` mini-batches of equally many rows: the mean of their losses is the loss of all rows.

        A token weighs the same in each, so a mini-batch divides by the mean number of tokens and not by its own.
        Source: TRL 1.16.
        """
        return self._replace(num_rows=self.num_rows // num, num_items=self.num_items / num)


class Share(NamedTuple):
    """A micro-batch's part of a step's loss."""

    loss: mx.array  # the shares of all micro-batches sum to the step's loss
    logprobs: mx.array  # (M, T), of the completion tokens
    sums: dict[str, mx.array]  # measured over the counted tokens: sums, or the largest where the name ends in `_max`


class Reader:
    """Reads a policy's micro-batches under the settings of a run, and makes them the tokens of its loss."""

    def __init__(self, config: Config, sizes: Sizes, loss: grpo.LossFunction | None = None):
        """loss: in place of that of `--loss-type`."""
        self.config, self.sizes = config, sizes
        self.objective = objective_of(config)
        self.loss = loss or grpo.LOSSES[config.objective.loss_type]
        self.temperature, self.head = config.sampling.temp, "frozen" if config.model.lora_rank else "trained"
        sampling = config.sampling
        # the tokens that the sampler may draw; None: all
        self.support = softmax.Support.of(sampling.top_p, sampling.top_k, sampling.min_p)
        by_token = config.objective.loss_type in grpo.CLIPPED and self.objective.importance_sampling_level == "token"
        # whether a row may have a gradient though its advantage is 0
        self.all_teach = bool(self.objective.beta or config.objective.teacher or loss is not None)
        self.may_fuse = by_token and loss is None and self.head == "frozen"

    def cut(self, prompts: list[list[int]], rollout: Rollout, advantages: np.ndarray, step: int) -> list[MicroBatch]:
        """
        The micro-batches of a step, by mini-batch. A row whose advantage is 0 has no gradient and is left out, unless
        `all_teach`.

        One in MEASURED_OF of these rows, others every step, is measured for all of them, by their share of the tokens.
        prompts: N, one per row; advantages: (B, G), or (B, G, K) of turns.
        """
        lengths, weights = np.array(list(map(len, rollout.ids))), np.ones(len(prompts))
        has_none = (advantages.reshape(len(prompts), -1) == 0).all(axis=1)
        idle = np.flatnonzero(has_none & (lengths > 0) & (not self.all_teach))
        if len(idle):
            num = math.ceil(len(idle) / MEASURED_OF)  # neighbours, which mostly share a prompt
            measured = idle.take(range(step * num, (step + 1) * num), mode="wrap")
            weights[idle] = 0
            weights[measured] = lengths[idle].sum() / lengths[measured].sum()
        num, budget = self.config.optimizer.mini_batches, self.sizes.train_token_budget
        part_of = np.arange(len(weights)) * num // len(weights)
        parts = (micro_batches(prompts, rollout, budget, "auto", weights * (part_of == part)) for part in range(num))
        return list(itertools.chain.from_iterable(parts))

    def hidden(self, model: gwen.Model, batch: MicroBatch) -> mx.array:
        """The hidden states that predict the completion tokens, (M, T, C)."""
        return completion_hidden(model, batch, self.sizes.checkpoint_layers)

    def logprobs(self, model: gwen.Model, batch: MicroBatch, gradient: bool = False) -> tuple[mx.array, mx.array]:
        """
        Log-probabilities of the completion tokens given all tokens before, and entropies, (M, T) each.

        gradient: whether the log-probabilities have one.
        """
        return lm_head.token_logprobs(
            self.hidden(model, batch),
            model.head_weight,
            batch.completion_ids,
            temperature=self.temperature,
            support=self.support,
            head=self.head,
            gradient=gradient,
        )

    def share(self, model: gwen.Model, batch: MicroBatch, targets: Targets) -> Share:
        """A micro-batch's part of the step's loss."""
        settings, mask, rows = self.config.objective, batch.mask, batch.rows
        clipped = divergences = advantages = None
        if targets.advantages is not None:
            advantages = advantages_of(batch, targets.advantages)
        if targets.lesson is not None:
            found = divergence.token_divergences(
                self.hidden(model, batch),
                model.head_weight,
                batch.completion_ids,
                targets.lesson._replace(hidden=targets.lesson.hidden[rows, : mask.shape[1]]),
                beta=settings.distill_beta,
                temperature=self.temperature,
                head=self.head,
            )
            divergences, logprobs, entropy = found
        elif advantages is not None and self.may_fuse and lm_head.has_token_losses(model.head_weight, self.support):
            each = mx.broadcast_to(advantages, mask.shape)
            surrogate = softmax.Surrogate(each, batch.old_logprobs, self.objective)
            hidden, head_weight = self.hidden(model, batch), model.head_weight
            clipped, logprobs, entropy = lm_head.token_losses(
                hidden, head_weight, batch.completion_ids, surrogate, self.temperature
            )
        else:
            logprobs, entropy = self.logprobs(model, batch, gradient=True)
        # None where the current policy is the old one
        old = mx.stop_gradient(logprobs) if batch.old_logprobs is None else batch.old_logprobs
        tokens = grpo.Tokens(
            logprobs,
            old,
            mx.zeros(mask.shape) if advantages is None else advantages,
            mask,
            ref_logprobs=None if targets.ref_logprobs is None else targets.ref_logprobs[rows, : mask.shape[1]],
            num_items=targets.num_items,
            num_rows=targets.num_rows,
            clipped=clipped,
            divergences=divergences,
        )
        loss, sums = self.loss(tokens, self.objective)
        assert sums.keys() <= set(MEASURED), f"{sums.keys()}: step/result.py records {MEASURED}"
        measured = {"loss": loss, "entropy": (entropy * mask).sum()}
        if settings.loss_type != "sft":
            measured |= gaps(old, batch)
        return Share(loss, logprobs, measured | sums)


def advantages_of(batch: MicroBatch, advantages: mx.array) -> mx.array:
    """Those of a micro-batch, (M, 1), or (M, T) where each token has its own."""
    its_own = advantages[batch.rows]
    return its_own[:, None] if its_own.ndim == 1 else its_own[:, : batch.mask.shape[1]]


def completion_hidden(model: gwen.Model, batch: MicroBatch, checkpoint_layers: int = 0) -> mx.array:
    """
    The hidden states that predict the completion tokens, (M, T, C).

    checkpoint_layers: how many layers, from the first, recompute their activations for the gradient.
    """
    if batch.prefix is None:
        hidden = model.hidden(batch.tokens, checkpoint_layers=checkpoint_layers)
    else:
        hidden = shared_prompts.hidden(model, batch.prefix, batch.tokens, batch.lengths, checkpoint_layers)
        if not batch.prefix.in_turns:  # the states are those of the tokens
            return hidden
    return mx.take_along_axis(hidden, batch.positions[:, :, None], axis=1)


def gaps(logprobs: mx.array, batch: MicroBatch) -> dict[str, mx.array]:
    """How far log-probabilities (M, T) are from the sampler's: the sums called MISMATCH."""
    mask, sampled = batch.mask, batch.sampled_logprobs
    counted = mask > 0
    gap, trust = mx.abs(logprobs - sampled) * counted, grpo.importance_ratio(logprobs, sampled, mask, "token") * counted
    over = trust > MISMATCH_CAP
    sums = (gap * mask).sum(), gap.max(), (trust * mask).sum(), trust.max(), (over * mask).sum()
    return dict(zip(MISMATCH, sums, strict=True))
