"""
Batches: samples that go through the model together, padded, with everything that their loss needs.

A row is its prompt and what follows; or, where that is cheaper, each prompt is computed once, with gradient, and the
rows of its group continue it. Every token has the same past and position in both forms, hence the same gradient. Of
what follows a prompt only a row's own tokens, at their places, are predicted.

Axes: N samples of the step, M rows of a batch, B its prompts, P prompt positions, L positions of a row, T own tokens,
C hidden.
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
from step.sample import NOTHING, Sample, table

# Sharing prompts pays from this share of positions saved. On a CPU time was 1.14x with 10% saved, 0.97x with 18%, 0.88x
# with 29%; on a GPU, counted, 0.85x, 0.83x and 0.75x (`c148fd6:bench/ledger.py`).
LEAST_SAVED = 0.2
ROOM = 9 / 8  # a group that shares its prompt may exceed the budget by this factor, so that it need not be split

Cut = list[tuple[list[int], int]]  # each batch's rows, and its positions with padding


class Prefix(NamedTuple):
    """The prompts of a batch, padded on the right."""

    tokens: mx.array  # (B, P)
    lengths: list[int]  # B
    parents: list[int]  # M, each row's prompt

    @classmethod
    def of(cls, prompts: list[list[int]]) -> "Prefix":
        """The distinct ones of M rows' prompts."""
        place = {prompt: index for index, prompt in enumerate(dict.fromkeys(map(tuple, prompts)))}
        distinct = [list(prompt) for prompt in place]
        return cls(padded(distinct), list(map(len, distinct)), [place[tuple(prompt)] for prompt in prompts])

    def of_rows(self, places: list[int]) -> "Prefix":
        """The prompts that some of the rows continue."""
        parents = [self.parents[place] for place in places]
        kept = sorted(set(parents))
        lengths, places = [self.lengths[parent] for parent in kept], [kept.index(parent) for parent in parents]
        return Prefix(self.tokens[mx.array(kept)], lengths, places)


class Batch(NamedTuple):
    """Samples computed together, padded on the right; what stands where the mask is 0 is arbitrary."""

    rows: list[int]  # M, their numbers in the step
    prefix: Prefix | None  # None: each row starts with its prompt
    tokens: mx.array  # (M, L) after the prefix, without the last token, which predicts nothing
    lengths: list[int]  # M, of `tokens`
    positions: mx.array | None  # (M, T) index of each token's prediction in the hidden states; None: they are in order
    completion_ids: mx.array  # (M, T) own tokens
    mask: mx.array  # (M, T) 1 = own token, 0 = padding
    weights: mx.array  # (M, 1) tokens that each token counts for in what is measured; 1 where it has a gradient
    advantages: mx.array  # (M, 1), or (M, T) where those of a row's tokens differ
    sampled_logprobs: mx.array | None  # (M, T) as the sampler recorded them; None for given replies
    num_taught: int  # rows with a gradient
    # ---- of the mini-batch that it is a part of
    number: int  # which of them
    num_rows: float  # samples, the mean of all parts
    num_items: float  # own tokens, the same
    # ---- what other passes found
    old_logprobs: mx.array | None = None  # (M, T) of the policy before the update
    columns: dict[str, mx.array] = NOTHING  # (M, T), what else the loss needs, by its name in `grpo.Tokens`
    lesson: Lesson | None = None  # a teacher's hidden states (M, T, D)
    is_mine: bool = True  # whether this machine computes it

    @property
    def num_positions(self) -> int:
        """Positions that the model computes, with padding."""
        return self.tokens.size + (self.prefix.tokens.size if self.prefix else 0)

    @property
    def num_tokens(self) -> int:
        """Positions without padding."""
        return sum(self.lengths) + (sum(self.prefix.lengths) if self.prefix else 0)

    def take(self, places: list[int]) -> "Batch":
        """Some rows with unchanged padding, and the prompts that they continue."""
        index, prefix = mx.array(places), self.prefix and self.prefix.of_rows(places)
        arrays: Any = {name: value[index] for name, value in self._asdict().items() if isinstance(value, mx.array)}
        rows, lengths = ([held[place] for place in places] for held in (self.rows, self.lengths))
        columns = {name: column[index] for name, column in self.columns.items()}
        return self._replace(rows=rows, prefix=prefix, lengths=lengths, columns=columns, **arrays)


def pad_frac(batches: list[Batch]) -> float:
    """Padding's share of the positions that the model computes."""
    return 1 - sum(batch.num_tokens for batch in batches) / sum(batch.num_positions for batch in batches)


# ---- samples into batches


def cut(samples: Sequence[Sample], token_budget: int, sharing: str = "auto", num_parts: int = 1) -> list[Batch]:
    """
    Samples in batches of at most `token_budget` positions, of one row or of one group; each of one of `num_parts`
    mini-batches, of equally many groups. Samples of weight 0 are left out. sharing: see `plan`.

    The mean of the mini-batches' losses is the loss of all samples: a token weighs the same in each, so a mini-batch
    divides by the mean number of tokens and not by its own. Source: TRL 1.16.
    """
    prompts = [sample.prompt for sample in samples]
    lengths = np.array([len(sample.ids) if sample.weight else 0 for sample in samples])
    places = {group: place for place, group in enumerate(dict.fromkeys(one.group for one in samples))}
    part_of = np.array([places[one.group] * num_parts // len(places) for one in samples])
    num_items, found = sum(len(sample.own) for sample in samples), list[Batch]()
    for part in range(num_parts):
        shared, rows_of = plan(prompts, lengths * (part_of == part), token_budget, sharing)
        made = [_make(rows, [samples[row] for row in rows], shared) for rows, _ in rows_of]
        mine = set(world.part([batch.num_positions for batch in made]))
        whole: Any = {"number": part, "num_rows": len(samples) / num_parts, "num_items": num_items / num_parts}
        found += [batch._replace(is_mine=place in mine, **whole) for place, batch in enumerate(made)]
    return found


def plan(prompts: list[list[int]], num_tokens: np.ndarray, token_budget: int, sharing: str) -> tuple[bool, Cut]:
    """
    Whether to share prompts, and the rows of each batch, from prompts and the lengths of what follows, N each.

    sharing: "on", "off", or "auto": share if that saves enough positions.
    """
    rows = np.flatnonzero(num_tokens).tolist()
    after = {row: int(num_tokens[row]) - 1 for row in rows}  # the last token predicts nothing
    alone = [(0, [row]) for row in rows]
    plain = _cut(alone, {row: len(prompts[row]) + num for row, num in after.items()}, token_budget)
    if sharing == "off" or not rows:
        return False, plain
    groups: dict[tuple[int, ...], list[int]] = {}
    for row in sorted(rows, key=after.__getitem__):
        groups.setdefault(tuple(prompts[row]), []).append(row)
    shared = _cut([(len(prompt), group) for prompt, group in groups.items()], after, token_budget)
    saved = 1 - sum(size for _, size in shared) / sum(size for _, size in plain)
    return (True, shared) if sharing == "on" or saved >= LEAST_SAVED else (False, plain)


def _cut(groups: list[tuple[int, list[int]]], width: dict[int, int], token_budget: int) -> Cut:
    """
    Whole groups, ordered by their longest row; one that exceeds ROOM times the budget is split evenly.

    groups: each the length of a prompt, and rows by ascending `width`, the positions after it.
    """
    found: Cut = []
    num_prompts = longest = 0  # of the last part
    for length, group in sorted(groups, key=lambda group: width[group[1][-1]]):
        widest, part = width[group[-1]], found[-1][0] if found else []
        size = (num_prompts + 1) * max(longest, length) + (len(part) + len(group)) * widest
        if found and size <= token_budget:
            found[-1] = (part + group, size)  # ascending: this group has the widest row
            num_prompts, longest = num_prompts + 1, max(longest, length)
            continue
        num_rows = max((int(ROOM * token_budget) - length) // max(widest, 1), 1)  # at once, at most
        num_rows = math.ceil(len(group) / math.ceil(len(group) / num_rows))
        for part in (group[first : first + num_rows] for first in range(0, len(group), num_rows)):
            found.append((part, length + len(part) * width[part[-1]]))
        num_prompts, longest = 1, length
    return found


def _make(rows: list[int], samples: list[Sample], shared: bool) -> Batch:
    prompts, most = [sample.prompt for sample in samples], max(len(sample.own) for sample in samples)
    # token t after a prompt is predicted one position earlier, the first one by the prompt's last position
    places = np.array([[*sample.own, *range(len(sample.own), most)] for sample in samples])
    if shared:
        tokens = [sample.ids[:-1] for sample in samples]
        places = np.minimum(places, max(map(len, tokens)))
    else:
        tokens = [sample.prompt + sample.ids[:-1] for sample in samples]
        places = np.minimum(places + np.array([[len(prompt) - 1] for prompt in prompts]), max(map(len, tokens)) - 1)
    in_order = shared and all(len(sample.own) == len(sample.ids) for sample in samples)
    logprobs = [sample.logprobs for sample in samples if sample.logprobs is not None]
    advantages = [np.array(sample.advantage) for sample in samples]
    if any(one.ndim for one in advantages):
        advantages = [np.broadcast_to(one, len(row.own)) for one, row in zip(advantages, samples, strict=True)]
    return Batch(
        rows,
        Prefix.of(prompts) if shared else None,
        padded(tokens),
        list(map(len, tokens)),
        None if in_order else mx.array(places.astype(np.int32)),
        completion_ids=padded([sample.tokens for sample in samples]),
        mask=padded([np.ones(len(sample.own)) for sample in samples], np.float32),
        weights=padded([[sample.weight] for sample in samples], np.float32),
        advantages=padded([one.reshape(-1) for one in advantages], np.float32),
        sampled_logprobs=padded(logprobs, np.float32) if logprobs else None,
        num_taught=sum(sample.has_gradient for sample in samples),
        number=0,
        num_rows=len(samples),
        num_items=0.0,
    )


def padded(rows: Sequence[Sequence[float] | np.ndarray], dtype: type = np.int32) -> mx.array:
    """Rows as one array, (len(rows), longest), padded with 0."""
    return mx.array(table(rows).astype(dtype))


# ---- batches through the model


def hidden(model: gwen.Model, batch: Batch, checkpoint_layers: int = 0) -> mx.array:
    """The hidden states that predict the own tokens, (M, T, C). checkpoint_layers: as of `gwen.Model.hidden`."""
    if batch.prefix is None:
        states = model.hidden(batch.tokens, checkpoint_layers=checkpoint_layers)
    else:
        tokens, lengths, parents = batch.prefix
        cache = TreeCache(model.config.layer_kinds).child(lengths)
        of_prompts = model.hidden(tokens, cache, checkpoint_layers)  # (B, P, C)
        states = of_prompts[mx.arange(len(lengths)), mx.array(lengths) - 1][mx.array(parents)][:, None]  # (M, 1, C)
        if batch.tokens.shape[1]:  # else every completion is one token, predicted by its prompt
            after = model.hidden(batch.tokens, cache.child(batch.lengths, parents), checkpoint_layers)
            states = mx.concatenate([states, after], axis=1)  # (M, 1 + L, C)
    return states if batch.positions is None else mx.take_along_axis(states, batch.positions[:, :, None], axis=1)
