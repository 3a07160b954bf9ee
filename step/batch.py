"""
Pads samples into batches, which contain everything that the loss needs.

A row is a prompt and its response. If sharing saves enough work, rows share prompts: the model
computes each distinct prompt only once, and all responses to the prompt continue from the cached
result. The gradient also flows through this result. Sharing changes neither the position of a token
nor the tokens before it, so the gradient stays the same. In a response, the loss covers only the
tokens that the policy wrote.

Axes: N samples of the step, M rows and B prompts of a batch, P prompt positions, L positions of a
row, T tokens that the policy wrote, C hidden width, D hidden width of the teacher.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import cpu_blas  # noqa: F401  (before mlx)
import mlx.core as mx
import numpy as np

import gwen
from layers.divergence import TeacherStatesAndHead
from layers.tree_cache import TreeCache
from machine import world
from step.sample import EMPTY, Sample, pad_rows

# Prompts are shared if this saves at least this fraction of the positions. When sharing saved 10%,
# 18% and 29% of the positions, the computation on a CPU took 1.14, 0.97 and 0.88 times as long as
# without sharing. The estimated cost on a GPU was 0.85, 0.83 and 0.75 times the cost without
# sharing (`c148fd6:bench/ledger.py`).
LEAST_SAVED = 0.2
# A group that shares its prompt may have up to this many times the token budget before it is split.
ROOM = 9 / 8

# for each batch, the indices of its rows, and its number of positions including padding
BatchPlan = list[tuple[list[int], int]]


class SharedPrompts(NamedTuple):
    """The distinct prompts of a batch, padded on the right to the same length."""

    tokens: mx.array  # (B, P)
    lengths: list[int]  # B prompt lengths
    parents: list[int]  # M indices, one for the prompt of each row

    @classmethod
    def from_prompts(cls, prompts: list[list[int]]) -> "SharedPrompts":
        """Collects the distinct prompts. prompts: the prompt of each of M rows."""
        distinct = list(dict.fromkeys(map(tuple, prompts)))
        index_of = {prompt: index for index, prompt in enumerate(distinct)}
        tokens = pad_rows_to_mx_array(distinct)
        lengths = [len(prompt) for prompt in distinct]
        return cls(tokens, lengths, [index_of[tuple(prompt)] for prompt in prompts])

    def select_rows(self, rows: list[int]) -> "SharedPrompts":
        """The shared prompts of only the given rows."""
        row_parents = [self.parents[row] for row in rows]
        remaining = sorted(set(row_parents))
        lengths = [self.lengths[parent] for parent in remaining]
        parents = [remaining.index(parent) for parent in row_parents]
        return SharedPrompts(self.tokens[mx.array(remaining)], lengths, parents)


class Batch(NamedTuple):
    """
    Samples that pass through the model together, padded on the right.

    Values at padding are arbitrary.
    """

    rows: list[int]  # M indices of the samples in the step
    prefix: SharedPrompts | None  # None if `tokens` includes the prompt of each row
    tokens: mx.array  # (M, L) input tokens after the prefix, without the last token of each row
    lengths: list[int]  # M lengths of the rows in `tokens`, without padding

    # (M, T) the index of the hidden state that predicts each token; None if hidden state i predicts
    # token i in every row
    positions: mx.array | None
    completion_ids: mx.array  # (M, T) the tokens that the policy wrote
    mask: mx.array  # (M, T) 1 for a token that the policy wrote, 0 for padding

    # (M, 1) the number of tokens that each token represents in statistics; 1 for rows with a
    # gradient
    weights: mx.array
    advantages: mx.array  # (M, 1), or (M, T) if the tokens of a row have different advantages
    sampled_logprobs: mx.array | None  # (M, T) recorded by the sampler; None for given replies
    num_with_gradient: int  # number of rows with a gradient

    # ---- the mini-batch to which this batch belongs
    mini_batch: int  # the index of the mini-batch
    num_rows: float  # mean number of chosen samples, per mini-batch
    num_loss_tokens: float  # mean number of tokens in the loss, per mini-batch
    # mean number of tokens in statistics, per mini-batch, including the samples that
    # --train-completions leaves out
    num_counted_tokens: float
    is_trained: bool  # False: the batch is computed only for statistics and is not in the loss

    # (M, 1) bool, whether an earlier policy wrote the row; None if no row is replayed
    is_replayed: mx.array | None = None

    # ---- fields that are set later
    old_logprobs: mx.array | None = None  # (M, T) under the policy before the update

    # (M, T) other arrays that the loss needs, by their field names in grpo.Tokens
    columns: dict[str, mx.array] = EMPTY
    # the teacher's hidden states (M, T, D) and its output weights
    lesson: TeacherStatesAndHead | None = None
    is_local: bool = True  # whether this rank computes the batch

    @property
    def num_positions_with_padding(self) -> int:
        """The number of positions that the model computes, including padding."""
        return self.tokens.size + (self.prefix.tokens.size if self.prefix else 0)

    @property
    def num_positions_without_padding(self) -> int:
        """The number of positions that contain a token, not padding."""
        return sum(self.lengths) + (sum(self.prefix.lengths) if self.prefix else 0)

    def select_rows(self, row_indices: list[int]) -> "Batch":
        """A batch of only the rows with these indices, with the same padding as before."""
        index = mx.array(row_indices)
        arrays: dict[str, Any] = {
            name: value[index]
            for name, value in self._asdict().items()
            if isinstance(value, mx.array)
        }
        return self._replace(
            rows=[self.rows[row] for row in row_indices],
            prefix=self.prefix and self.prefix.select_rows(row_indices),
            lengths=[self.lengths[row] for row in row_indices],
            columns={name: column[index] for name, column in self.columns.items()},
            **arrays,
        )


def padding_fraction(batches: list[Batch]) -> float:
    """The fraction of all computed positions that are padding."""
    num_tokens = sum(batch.num_positions_without_padding for batch in batches)
    num_positions = sum(batch.num_positions_with_padding for batch in batches)
    return 1 - num_tokens / num_positions


# ---- turning samples into batches


def make_batches(
    samples: Sequence[Sample],
    token_budget: int,
    sharing: str = "auto",
    num_mini_batches: int = 1,
) -> list[Batch]:
    """
    Pads samples into batches that keep to a budget of `token_budget` positions.

    Only a batch that consists of a single row or a single group may exceed the budget. Samples with
    weight 0 are left out. The groups are divided evenly among the mini-batches, and each batch
    belongs to one mini-batch.

    sharing: see `plan_batches_and_sharing`.

    The loss of all samples is the mean of the losses of the mini-batches. The loss of a mini-batch
    is a sum divided by the mean number of tokens per mini-batch, and not by the number of tokens in
    that mini-batch. So a token has the same weight in every mini-batch. Source: TRL 1.16.

    The divisors of the loss do not count samples that --train-completions leaves out. If such
    samples pass through the model for statistics, they are in batches of their own, in which
    `is_trained` is False.
    """
    prompts = [sample.prompt for sample in samples]
    lengths = np.array([len(sample.response_ids) if sample.weight else 0 for sample in samples])
    groups = list(dict.fromkeys(sample.group for sample in samples))
    index_of_group = {group: index for index, group in enumerate(groups)}
    mini_batch_of = np.array(
        [index_of_group[sample.group] * num_mini_batches // len(groups) for sample in samples]
    )
    is_chosen = np.array([sample.is_chosen for sample in samples])
    num_tokens = np.array([len(sample.loss_positions) for sample in samples])

    batches: list[Batch] = []
    for mini_batch in range(num_mini_batches):
        is_in_mini_batch = mini_batch_of == mini_batch
        new_batches = []
        for is_trained in (True, False):
            is_planned = is_in_mini_batch & (is_chosen == is_trained)
            is_shared, plan = plan_batches_and_sharing(
                prompts, lengths * is_planned, token_budget, sharing
            )
            for rows, _ in plan:
                batch = _pad_samples_into_batch(rows, [samples[row] for row in rows], is_shared)
                new_batches.append(batch._replace(is_trained=is_trained))
        local = set(
            world.own_item_indices([batch.num_positions_with_padding for batch in new_batches])
        )
        for index, batch in enumerate(new_batches):
            batches.append(
                batch._replace(
                    is_local=index in local,
                    mini_batch=mini_batch,
                    num_rows=int(is_chosen.sum()) / num_mini_batches,
                    num_loss_tokens=int(num_tokens[is_chosen].sum()) / num_mini_batches,
                    num_counted_tokens=int(num_tokens.sum()) / num_mini_batches,
                )
            )
    return batches


def plan_batches_and_sharing(
    prompts: list[list[int]], response_lengths: np.ndarray, token_budget: int, sharing: str
) -> tuple[bool, BatchPlan]:
    """
    Returns whether the rows share prompts, and the rows of each batch.

    response_lengths: the number of response tokens of each of the N samples. A sample with length 0
    is left out.
    sharing: "on", "off", or "auto", which shares prompts if this saves at least the fraction
    LEAST_SAVED of the positions.
    """
    rows = np.flatnonzero(response_lengths).tolist()
    # the last token is not an input, because no further token is predicted from it
    response_width = {row: int(response_lengths[row]) - 1 for row in rows}
    row_width = {row: len(prompts[row]) + response_width[row] for row in rows}
    unshared = _pack_groups_into_batches([(0, [row]) for row in rows], row_width, token_budget)
    if sharing == "off" or not rows:
        return False, unshared

    groups: dict[tuple[int, ...], list[int]] = {}
    for row in sorted(rows, key=response_width.__getitem__):
        groups.setdefault(tuple(prompts[row]), []).append(row)
    prompt_groups = [(len(prompt), group) for prompt, group in groups.items()]
    shared = _pack_groups_into_batches(prompt_groups, response_width, token_budget)
    saved = 1 - sum(size for _, size in shared) / sum(size for _, size in unshared)
    if sharing == "on" or saved >= LEAST_SAVED:
        return True, shared
    return False, unshared


def _pack_groups_into_batches(
    groups: list[tuple[int, list[int]]], row_widths: dict[int, int], token_budget: int
) -> BatchPlan:
    """
    Packs whole groups into batches, in ascending order of each group's longest row.

    A group that exceeds ROOM times the budget is split evenly.

    groups: for each group, the length of its prompt, and its rows in ascending order of their
    widths.
    row_widths: the number of positions of each row after the prompt.
    """
    plan: BatchPlan = []
    num_prompts = 0  # in the last batch
    longest_prompt = 0  # in the last batch
    for prompt_length, group in sorted(groups, key=lambda group: row_widths[group[1][-1]]):
        if plan:
            last_rows, _ = plan[-1]
            longest = max(longest_prompt, prompt_length)
            # groups are sorted by width, so the widest row so far is in this group
            widest = row_widths[group[-1]]
            size = (num_prompts + 1) * longest + (len(last_rows) + len(group)) * widest
            if size <= token_budget:
                plan[-1] = (last_rows + group, size)
                num_prompts += 1
                longest_prompt = longest
                continue

        room = int(ROOM * token_budget) - prompt_length
        most_rows = max(room // max(row_widths[group[-1]], 1), 1)
        num_batches = math.ceil(len(group) / most_rows)
        rows_per_batch = math.ceil(len(group) / num_batches)
        for begin in range(0, len(group), rows_per_batch):
            rows = group[begin : begin + rows_per_batch]
            plan.append((rows, prompt_length + len(rows) * row_widths[rows[-1]]))
        num_prompts = 1
        longest_prompt = prompt_length
    return plan


def _pad_samples_into_batch(rows: list[int], samples: list[Sample], shares_prompts: bool) -> Batch:
    """
    One padded batch of the given samples.

    `make_batches` sets the fields that describe the batch's mini-batch.

    rows: the indices of these samples in the step.
    """
    most_tokens = max(len(sample.loss_positions) for sample in samples)
    # Each token of a response is predicted by the hidden state at the previous position. The first
    # token is predicted by the hidden state at the last token of the prompt.
    state_indices = np.array(
        [
            [*sample.loss_positions, *range(len(sample.loss_positions), most_tokens)]
            for sample in samples
        ]
    )
    if shares_prompts:
        tokens = [sample.response_ids[:-1] for sample in samples]
        # the first hidden state is the one at the last token of the prompt
        state_indices = np.minimum(state_indices, max(map(len, tokens)))
    else:
        tokens = [sample.prompt + sample.response_ids[:-1] for sample in samples]
        last_of_prompt = np.array([[len(sample.prompt) - 1] for sample in samples])
        state_indices = np.minimum(state_indices + last_of_prompt, max(map(len, tokens)) - 1)
    is_in_order = shares_prompts and all(
        len(sample.loss_positions) == len(sample.response_ids) for sample in samples
    )

    logprobs = [sample.logprobs for sample in samples if sample.logprobs is not None]
    is_replayed = None
    if any(sample.is_replayed for sample in samples):
        is_replayed = mx.array([[sample.is_replayed] for sample in samples])
    advantages = [np.array(sample.advantage) for sample in samples]
    if any(advantage.ndim for advantage in advantages):
        advantages = [
            np.broadcast_to(advantage, len(sample.loss_positions))
            for advantage, sample in zip(advantages, samples, strict=True)
        ]
    return Batch(
        rows,
        SharedPrompts.from_prompts([sample.prompt for sample in samples])
        if shares_prompts
        else None,
        pad_rows_to_mx_array(tokens),
        list(map(len, tokens)),
        None if is_in_order else mx.array(state_indices.astype(np.int32)),
        completion_ids=pad_rows_to_mx_array([sample.completion_ids for sample in samples]),
        mask=pad_rows_to_mx_array(
            [np.ones(len(sample.loss_positions)) for sample in samples], np.float32
        ),
        weights=pad_rows_to_mx_array([[sample.weight] for sample in samples], np.float32),
        advantages=pad_rows_to_mx_array(
            [advantage.reshape(-1) for advantage in advantages], np.float32
        ),
        sampled_logprobs=pad_rows_to_mx_array(logprobs, np.float32) if logprobs else None,
        num_with_gradient=sum(sample.has_gradient for sample in samples),
        mini_batch=0,
        num_rows=len(samples),
        num_loss_tokens=0.0,
        num_counted_tokens=0.0,
        is_trained=True,
        is_replayed=is_replayed,
    )


def pad_rows_to_mx_array(
    rows: Sequence[Sequence[float] | np.ndarray], dtype: type = np.int32
) -> mx.array:
    """The rows as one MLX array, padded on the right with 0 to the length of the longest row."""
    return mx.array(pad_rows(rows).astype(dtype))


# ---- passing batches through the model


def completion_hidden_states(
    model: gwen.Model, batch: Batch, checkpoint_layers: int = 0
) -> mx.array:
    """
    The hidden states from which the policy's tokens are predicted, (M, T, C).

    checkpoint_layers: see `gwen.Model.hidden`.
    """
    if batch.prefix is None:
        states = model.hidden(batch.tokens, checkpoint_layers=checkpoint_layers)
    else:
        tokens, lengths, parents = batch.prefix
        cache = TreeCache(model.config.layer_kinds).with_new_level(lengths)
        prompt_states = model.hidden(tokens, cache, checkpoint_layers)  # (B, P, C)
        last_states = prompt_states[mx.arange(len(lengths)), mx.array(lengths) - 1]  # (B, C)
        states = last_states[mx.array(parents)][:, None]  # (M, 1, C)
        if batch.tokens.shape[1]:  # 0 if every completion is a single token
            response_cache = cache.with_new_level(batch.lengths, parents)
            response_states = model.hidden(batch.tokens, response_cache, checkpoint_layers)
            states = mx.concatenate([states, response_states], axis=1)  # (M, 1 + L, C)
    if batch.positions is None:
        return states
    return mx.take_along_axis(states, batch.positions[:, :, None], axis=1)
