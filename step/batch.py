"""
Batches: samples that go through the model together, padded, with everything that their loss needs.

A row is a prompt and its response. If it is cheaper, each prompt is computed only once, with
gradient, and the rows of its group continue from it. Every token has the same past and position in
both forms, hence the same gradient. In a response, only the tokens that the policy wrote are
predicted.

Axes: N samples of the step, M rows and B prompts of a batch, P prompt positions, L positions of a
row, T tokens that the policy wrote, C hidden width.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

import gwen
from layers.divergence import Lesson
from layers.tree_cache import TreeCache
from machine import world
from step.sample import EMPTY, Sample, pad_rows

# Sharing prompts pays if it saves at least this fraction of the positions. On a CPU, the time was
# 1.14x with 10% saved, 0.97x with 18%, and 0.88x with 29%. For a GPU, the counted cost was 0.85x,
# 0.83x and 0.75x (`c148fd6:bench/ledger.py`).
LEAST_SAVED = 0.2
# A group that shares its prompt may exceed the budget by this factor, to avoid splitting it.
ROOM = 9 / 8

# each batch's rows, and its number of positions including padding
BatchPlan = list[tuple[list[int], int]]


class Prefix(NamedTuple):
    """The prompts of a batch, padded on the right."""

    tokens: mx.array  # (B, P)
    lengths: list[int]  # B
    parents: list[int]  # M, the index of each row's prompt

    @classmethod
    def from_prompts(cls, prompts: list[list[int]]) -> "Prefix":
        """The distinct prompts among the prompts of M rows."""
        distinct = list(dict.fromkeys(map(tuple, prompts)))
        place_of = {prompt: place for place, prompt in enumerate(distinct)}
        tokens = pad_to_array(distinct)
        lengths = [len(prompt) for prompt in distinct]
        return cls(tokens, lengths, [place_of[tuple(prompt)] for prompt in prompts])

    def select_rows(self, rows: list[int]) -> "Prefix":
        """The prefix for a batch of only these rows."""
        row_parents = [self.parents[row] for row in rows]
        remaining = sorted(set(row_parents))
        lengths = [self.lengths[parent] for parent in remaining]
        parents = [remaining.index(parent) for parent in row_parents]
        return Prefix(self.tokens[mx.array(remaining)], lengths, parents)


class Batch(NamedTuple):
    """
    Samples that are computed together, padded on the right.

    Values where the mask is 0 are arbitrary.
    """

    rows: list[int]  # M, the samples' indices in the step
    prefix: Prefix | None  # None: each row starts with its prompt
    tokens: mx.array  # (M, L) after the prefix, without the last token, which predicts nothing
    lengths: list[int]  # M, the rows' lengths in `tokens`
    # (M, T) the index of the hidden state that predicts each token; None: states and tokens align
    positions: mx.array | None
    completion_ids: mx.array  # (M, T) the tokens that the policy wrote
    mask: mx.array  # (M, T) 1 = written by the policy, 0 = padding
    # (M, 1) how many tokens each token represents in statistics; 1 if it has a gradient
    weights: mx.array
    advantages: mx.array  # (M, 1), or (M, T) if a row's tokens have different advantages
    sampled_logprobs: mx.array | None  # (M, T) as the sampler recorded them; None for given replies
    num_with_gradient: int  # number of rows with a gradient
    # ---- the mini-batch that this batch is a part of
    mini_batch: int  # the index of the mini-batch
    num_rows: float  # the mean number of samples per mini-batch
    num_loss_tokens: float  # the mean number of tokens that the policy wrote per mini-batch
    # ---- fields that other passes set
    old_logprobs: mx.array | None = None  # (M, T) under the policy before the update
    columns: dict[str, mx.array] = (
        EMPTY  # (M, T), other values that the loss needs, named as in grpo.Tokens
    )
    lesson: Lesson | None = None  # a teacher's hidden states (M, T, D)
    is_local: bool = True  # whether this rank computes it

    @property
    def num_positions(self) -> int:
        """The number of positions that the model computes, including padding."""
        return self.tokens.size + (self.prefix.tokens.size if self.prefix else 0)

    @property
    def num_tokens(self) -> int:
        """The number of positions without padding."""
        return sum(self.lengths) + (sum(self.prefix.lengths) if self.prefix else 0)

    def select_rows(self, places: list[int]) -> "Batch":
        """A batch of only the rows at `places`, with unchanged padding, and of their prompts."""
        index = mx.array(places)
        arrays: dict[str, Any] = {
            name: value[index]
            for name, value in self._asdict().items()
            if isinstance(value, mx.array)
        }
        return self._replace(
            rows=[self.rows[place] for place in places],
            prefix=self.prefix and self.prefix.select_rows(places),
            lengths=[self.lengths[place] for place in places],
            columns={name: column[index] for name, column in self.columns.items()},
            **arrays,
        )


def padding_fraction(batches: list[Batch]) -> float:
    """The fraction of the computed positions that is padding."""
    num_tokens = sum(batch.num_tokens for batch in batches)
    num_positions = sum(batch.num_positions for batch in batches)
    return 1 - num_tokens / num_positions


# ---- samples into batches


def make_batches(
    samples: Sequence[Sample],
    token_budget: int,
    sharing: str = "auto",
    num_mini_batches: int = 1,
) -> list[Batch]:
    """
    Pads samples into batches of at most `token_budget` positions; one row or group may exceed it.

    The groups are divided evenly among the mini-batches, and each batch belongs to one mini-batch.
    Samples with weight 0 are left out. sharing: see `plan_batches`.

    The mean of the mini-batches' losses is the loss of all samples. A token weighs the same in each
    mini-batch, because each divides by the mean number of tokens per mini-batch instead of by its
    own number of tokens. Source: TRL 1.16.
    """
    prompts = [sample.prompt for sample in samples]
    lengths = np.array([len(sample.response_ids) if sample.weight else 0 for sample in samples])
    groups = list(dict.fromkeys(sample.group for sample in samples))
    place_of = {group: place for place, group in enumerate(groups)}
    mini_batch_of = np.array(
        [place_of[sample.group] * num_mini_batches // len(groups) for sample in samples]
    )
    num_loss_tokens = sum(len(sample.loss_positions) for sample in samples)

    batches: list[Batch] = []
    for mini_batch in range(num_mini_batches):
        lengths_here = lengths * (mini_batch_of == mini_batch)
        is_shared, plan = plan_batches(prompts, lengths_here, token_budget, sharing)
        new_batches = [
            _make_batch(rows, [samples[row] for row in rows], is_shared) for rows, _ in plan
        ]
        local = set(world.own_item_indices([batch.num_positions for batch in new_batches]))
        for place, batch in enumerate(new_batches):
            batches.append(
                batch._replace(
                    is_local=place in local,
                    mini_batch=mini_batch,
                    num_rows=len(samples) / num_mini_batches,
                    num_loss_tokens=num_loss_tokens / num_mini_batches,
                )
            )
    return batches


def plan_batches(
    prompts: list[list[int]], num_tokens: np.ndarray, token_budget: int, sharing: str
) -> tuple[bool, BatchPlan]:
    """
    Whether to share prompts, and the rows of each batch.

    prompts, num_tokens: the prompt and the response length of each of N samples; a sample with
    length 0 is left out. sharing: "on", "off", or "auto", which shares prompts if that saves enough
    positions.
    """
    rows = np.flatnonzero(num_tokens).tolist()
    # the last token predicts nothing
    response_width = {row: int(num_tokens[row]) - 1 for row in rows}
    row_width = {row: len(prompts[row]) + response_width[row] for row in rows}
    unshared = _pack_groups([(0, [row]) for row in rows], row_width, token_budget)
    if sharing == "off" or not rows:
        return False, unshared

    groups: dict[tuple[int, ...], list[int]] = {}
    for row in sorted(rows, key=response_width.__getitem__):
        groups.setdefault(tuple(prompts[row]), []).append(row)
    prompt_groups = [(len(prompt), group) for prompt, group in groups.items()]
    shared = _pack_groups(prompt_groups, response_width, token_budget)
    saved = 1 - sum(size for _, size in shared) / sum(size for _, size in unshared)
    if sharing == "on" or saved >= LEAST_SAVED:
        return True, shared
    return False, unshared


def _pack_groups(
    groups: list[tuple[int, list[int]]], width: dict[int, int], token_budget: int
) -> BatchPlan:
    """
    Packs whole groups into batches. The groups are ordered by their longest rows.

    A group that exceeds ROOM times the budget is split evenly. groups: for each group, the length
    of its prompt, and its rows in ascending order of `width`. width: each row's number of positions
    after that prompt.
    """
    plan: BatchPlan = []
    num_prompts = 0  # in the last batch
    longest_prompt = 0  # in the last batch
    for prompt_length, group in sorted(groups, key=lambda group: width[group[1][-1]]):
        if plan:
            last_rows, _ = plan[-1]
            longest = max(longest_prompt, prompt_length)
            # groups are in ascending order, so this group has the widest row
            widest = width[group[-1]]
            size = (num_prompts + 1) * longest + (len(last_rows) + len(group)) * widest
            if size <= token_budget:
                plan[-1] = (last_rows + group, size)
                num_prompts += 1
                longest_prompt = longest
                continue

        room = int(ROOM * token_budget) - prompt_length
        most_rows = max(room // max(width[group[-1]], 1), 1)
        num_batches = math.ceil(len(group) / most_rows)
        rows_per_batch = math.ceil(len(group) / num_batches)
        for begin in range(0, len(group), rows_per_batch):
            rows = group[begin : begin + rows_per_batch]
            plan.append((rows, prompt_length + len(rows) * width[rows[-1]]))
        num_prompts = 1
        longest_prompt = prompt_length
    return plan


def _make_batch(rows: list[int], samples: list[Sample], is_shared: bool) -> Batch:
    most_tokens = max(len(sample.loss_positions) for sample in samples)
    # Each token of a response is predicted one position earlier: the first one by the prompt's last
    # token.
    places = np.array(
        [
            [*sample.loss_positions, *range(len(sample.loss_positions), most_tokens)]
            for sample in samples
        ]
    )
    if is_shared:
        tokens = [sample.response_ids[:-1] for sample in samples]
        # the first hidden state is that of the prompt's last token
        places = np.minimum(places, max(map(len, tokens)))
    else:
        tokens = [sample.prompt + sample.response_ids[:-1] for sample in samples]
        last_of_prompt = np.array([[len(sample.prompt) - 1] for sample in samples])
        places = np.minimum(places + last_of_prompt, max(map(len, tokens)) - 1)
    is_in_order = is_shared and all(
        len(sample.loss_positions) == len(sample.response_ids) for sample in samples
    )

    logprobs = [sample.logprobs for sample in samples if sample.logprobs is not None]
    advantages = [np.array(sample.advantage) for sample in samples]
    if any(advantage.ndim for advantage in advantages):
        advantages = [
            np.broadcast_to(advantage, len(sample.loss_positions))
            for advantage, sample in zip(advantages, samples, strict=True)
        ]
    return Batch(
        rows,
        Prefix.from_prompts([sample.prompt for sample in samples]) if is_shared else None,
        pad_to_array(tokens),
        list(map(len, tokens)),
        None if is_in_order else mx.array(places.astype(np.int32)),
        completion_ids=pad_to_array([sample.completion_ids for sample in samples]),
        mask=pad_to_array([np.ones(len(sample.loss_positions)) for sample in samples], np.float32),
        weights=pad_to_array([[sample.weight] for sample in samples], np.float32),
        advantages=pad_to_array([advantage.reshape(-1) for advantage in advantages], np.float32),
        sampled_logprobs=pad_to_array(logprobs, np.float32) if logprobs else None,
        num_with_gradient=sum(sample.has_gradient for sample in samples),
        mini_batch=0,
        num_rows=len(samples),
        num_loss_tokens=0.0,
    )


def pad_to_array(rows: Sequence[Sequence[float] | np.ndarray], dtype: type = np.int32) -> mx.array:
    """The rows as one array, (len(rows), longest), padded with 0."""
    return mx.array(pad_rows(rows).astype(dtype))


# ---- batches through the model


def completion_hidden_states(
    model: gwen.Model, batch: Batch, checkpoint_layers: int = 0
) -> mx.array:
    """
    The hidden states that predict the policy's tokens, (M, T, C).

    checkpoint_layers: as in `gwen.Model.hidden`.
    """
    if batch.prefix is None:
        states = model.hidden(batch.tokens, checkpoint_layers=checkpoint_layers)
    else:
        tokens, lengths, parents = batch.prefix
        cache = TreeCache(model.config.layer_kinds).extend(lengths)
        prompt_states = model.hidden(tokens, cache, checkpoint_layers)  # (B, P, C)
        last_states = prompt_states[mx.arange(len(lengths)), mx.array(lengths) - 1]  # (B, C)
        states = last_states[mx.array(parents)][:, None]  # (M, 1, C)
        if batch.tokens.shape[
            1
        ]:  # otherwise every completion is one token, which the prompt predicts
            response_cache = cache.extend(batch.lengths, parents)
            response_states = model.hidden(batch.tokens, response_cache, checkpoint_layers)
            states = mx.concatenate([states, response_states], axis=1)  # (M, 1 + L, C)
    if batch.positions is None:
        return states
    return mx.take_along_axis(states, batch.positions[:, :, None], axis=1)
