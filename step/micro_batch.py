"""
Micro-batches: which rows of a step go through the model together, and in which form.

Plain: a row is its prompt and its completion. Shared: each prompt is computed once, with gradient, and all completions
of its group continue it. Both give every token the same past and position, hence the same gradient; the lengths decide
which is cheaper.

A row in turns is its prompt and its sequence, of which only its own tokens, at their places, are predicted.

Axes: N rows of the step, M rows of a micro-batch, B its prompts, P prompt positions, L positions of a row,
T completion positions.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import mlx.core as mx
import numpy as np

from machine import world

SHARING = ("auto", "on", "off")
# Sharing pays from this share of positions saved. On a CPU time was 1.14x with 10% saved, 0.97x with 18%, 0.88x with
# 29%; on a GPU the ledger has 0.85x, 0.83x and 0.75x (`python -m bench.ledger --share-prefix on`).
LEAST_SAVED = 0.2
ROOM = 9 / 8  # a group that shares its prompt may exceed the budget by this factor, so that it need not be split


class Completions(Protocol):
    """The part of a rollout that goes into micro-batches; (N, T) each."""

    @property
    def completion_ids(self) -> mx.array: ...
    @property
    def logprobs(self) -> mx.array: ...
    @property
    def mask(self) -> mx.array: ...
    @property
    def ids(self) -> list[list[int]]: ...  # N, without padding
    @property
    def sequences(self) -> list[list[int]] | None: ...  # N, of rows in turns: all ids after the prompt
    @property
    def places(self) -> list[list[int]] | None: ...  # N, where in them the tokens are


class Prefix(NamedTuple):
    """The prompts of a micro-batch, padded on the right."""

    tokens: mx.array  # (B, P)
    lengths: list[int]  # B
    parents: list[int]  # M, each row's prompt


class MicroBatch(NamedTuple):
    """Rows computed together, padded on the right; row i is row `rows[i]` of the step."""

    rows: mx.array  # (M,)
    prefix: Prefix | None  # None: each row starts with its prompt
    tokens: mx.array  # (M, L) after the prefix, without the last token, which predicts nothing
    lengths: list[int]  # M, of `tokens`
    positions: mx.array  # (M, T) index of each token's prediction: in L, or in the prompt's last position and L
    completion_ids: mx.array  # (M, T)
    mask: mx.array  # (M, T); above 1 in a row that is measured for others
    sampled_logprobs: mx.array  # (M, T) as the sampler recorded them
    old_logprobs: mx.array | None = None  # (M, T) of the policy before the update, where that is known

    @property
    def num_positions(self) -> int:
        """Positions that the model computes, with padding."""
        return self.tokens.size + (self.prefix.tokens.size if self.prefix else 0)

    @property
    def num_tokens(self) -> int:
        """Positions without padding."""
        return sum(self.lengths) + (sum(self.prefix.lengths) if self.prefix else 0)


def micro_batches(
    prompts: list[list[int]],
    rollout: Completions,
    token_budget: int,
    sharing: str = "off",
    weights: np.ndarray | None = None,
) -> list[MicroBatch]:
    """
    The step's rows in micro-batches of at most `token_budget` positions, of one row or of one group (see ROOM).

    prompts: N, one per row. Rows without a counted token are left out. sharing: see `plan`. weights: (N,), factors of
    the rows' masks; rows with 0 are left out too.
    """
    completions = rollout.ids
    if rollout.sequences is not None:
        completions = [whole if own else own for own, whole in zip(completions, rollout.sequences, strict=True)]
    weights = np.ones(len(completions)) if weights is None else weights
    shared, cut = plan(prompts, np.array(list(map(len, completions))) * (weights > 0), token_budget, sharing)
    make = _make_shared if shared else _make_plain
    made = [make(part, prompts, completions, rollout) for part, _ in cut]
    return [
        batch._replace(mask=batch.mask * mx.array(weights[part])[:, None])
        for batch, (part, _) in zip(made, cut, strict=True)
    ]


Cut = list[tuple[list[int], int]]  # each micro-batch's rows, and its positions with padding


def plan(prompts: list[list[int]], num_tokens: np.ndarray, token_budget: int, sharing: str) -> tuple[bool, Cut]:
    """
    Whether to share prompts, and the rows of each micro-batch, from prompts and completion lengths, N each.

    sharing: "on", "off", or "auto": share if that saves enough positions.
    """
    assert sharing in SHARING, sharing
    rows = np.flatnonzero(num_tokens).tolist()
    plain = _cut_plain(rows, [len(prompt) for prompt in prompts], num_tokens, token_budget)
    if sharing == "off" or not rows:
        return False, plain
    shared = _cut_shared(rows, prompts, num_tokens, token_budget)
    saved = 1 - sum(size for _, size in shared) / sum(size for _, size in plain)
    if sharing == "on" or saved >= LEAST_SAVED:
        return True, shared
    return False, plain


def _cut_plain(rows: list[int], lengths: list[int], num_tokens: np.ndarray, token_budget: int) -> Cut:
    """Rows ordered by length."""
    total = {row: lengths[row] + num - 1 for row, num in zip(rows, num_tokens[rows].tolist(), strict=True)}
    cut: Cut = []
    for row in sorted(rows, key=total.__getitem__):  # ascending: each row added is the longest
        part = cut[-1][0] if cut else []
        if part and (len(part) + 1) * total[row] <= token_budget:
            part.append(row)
            cut[-1] = (part, len(part) * total[row])
        else:
            cut.append(([row], total[row]))
    return cut


def _cut_shared(rows: list[int], prompts: list[list[int]], num_tokens: np.ndarray, token_budget: int) -> Cut:
    """Whole groups, ordered by their longest completion; one that exceeds ROOM times the budget is split evenly."""
    num = num_tokens.tolist()
    groups: dict[tuple[int, ...], list[int]] = {}
    known = {id(prompt): prompt for prompt in prompts}  # rows of a group mostly hold the same list
    keys = {place: tuple(prompt) for place, prompt in known.items()}
    for row in sorted(rows, key=num.__getitem__):
        groups.setdefault(keys[id(prompts[row])], []).append(row)
    ordered = sorted(groups.items(), key=lambda item: num[item[1][-1]])
    cut: Cut = []
    num_prompts = longest = 0  # of the last part
    for prompt, group in ordered:
        length, part = len(prompt), cut[-1][0] if cut else []
        size = (num_prompts + 1) * max(longest, length) + (len(part) + len(group)) * (num[group[-1]] - 1)
        if cut and size <= token_budget:
            cut[-1] = (part + group, size)  # ascending: this group has the longest completion
            num_prompts, longest = num_prompts + 1, max(longest, length)
            continue
        num_rows = max((int(ROOM * token_budget) - length) // max(num[group[-1]] - 1, 1), 1)  # at once, at most
        num_rows = math.ceil(len(group) / math.ceil(len(group) / num_rows))
        for part in (group[first : first + num_rows] for first in range(0, len(group), num_rows)):
            cut.append((part, length + len(part) * (num[part[-1]] - 1)))
        num_prompts, longest = 1, length
    return cut


def padded(rows: list[list[int]]) -> mx.array:
    """Token ids as one array, (len(rows), longest), padded with 0."""
    out = np.zeros((len(rows), max(map(len, rows))), np.int32)
    for place, row in enumerate(rows):
        out[place, : len(row)] = row
    return mx.array(out)


def _make_plain(
    part: list[int], prompts: list[list[int]], completions: list[list[int]], rollout: Completions
) -> MicroBatch:
    whole = [[*prompts[row], *completions[row][:-1]] for row in part]
    # token t of what follows the prompt stands at len(prompt) + t and is predicted one position earlier
    first = np.array([len(prompts[row]) - 1 for row in part])
    positions = np.minimum(first[:, None] + _places(part, completions, rollout), max(map(len, whole)) - 1)
    return _finish(part, None, whole, positions, rollout)


def _places(part: list[int], completions: list[list[int]], rollout: Completions) -> np.ndarray:
    """The places of rows' tokens in what follows their prompts, (M, T); those of padding count on."""
    if rollout.places is None:
        return np.tile(np.arange(max(len(completions[row]) for row in part)), (len(part), 1))
    places = [rollout.places[row] for row in part]
    most = max(map(len, places))
    return np.array([[*held, *range(len(held), most)] for held in places])


def _make_shared(
    part: list[int], prompts: list[list[int]], completions: list[list[int]], rollout: Completions
) -> MicroBatch:
    distinct = list(dict.fromkeys(tuple(prompts[row]) for row in part))
    place = {prompt: index for index, prompt in enumerate(distinct)}
    prefix = Prefix(
        padded([list(prompt) for prompt in distinct]),
        [len(prompt) for prompt in distinct],
        [place[tuple(prompts[row])] for row in part],
    )
    tokens = [completions[row][:-1] for row in part]
    positions = np.minimum(_places(part, completions, rollout), max(map(len, tokens)))
    return _finish(part, prefix, tokens, positions, rollout)


def _finish(
    part: list[int], prefix: Prefix | None, tokens: list[list[int]], positions: np.ndarray, rollout: Completions
) -> MicroBatch:
    index, most = mx.array(part), positions.shape[1]
    return MicroBatch(
        rows=index,
        prefix=prefix,
        tokens=padded(tokens),
        lengths=[len(row) for row in tokens],
        positions=mx.array(positions.astype(np.int32)),
        completion_ids=rollout.completion_ids[index, :most],
        mask=rollout.mask[index, :most],
        sampled_logprobs=rollout.logprobs[index, :most],
    )


def take_rows(batch: MicroBatch, places: list[int]) -> MicroBatch:
    """Some rows of a micro-batch with unchanged padding, and the prompts that they continue."""
    index, prefix = mx.array(places), batch.prefix
    if prefix is not None:
        parents = [prefix.parents[place] for place in places]
        kept = sorted(set(parents))
        prefix = Prefix(
            prefix.tokens[mx.array(kept)],
            [prefix.lengths[parent] for parent in kept],
            [kept.index(parent) for parent in parents],
        )
    arrays = {name: value[index] for name, value in batch._asdict().items() if isinstance(value, mx.array)}
    return batch._replace(prefix=prefix, lengths=[batch.lengths[place] for place in places], **arrays)


def in_rows(found: Iterable[tuple[MicroBatch, Sequence[mx.array]]], empty: list[mx.array]) -> list[mx.array]:
    """
    Arrays of all rows, (N, T, ...), from those of each micro-batch, (M, T, ...); written into `empty`.

    found: lazily, for the micro-batches of `my_part`; the other machines add theirs.
    """
    for batch, parts in found:
        for out, part in zip(empty, parts, strict=True):
            out[batch.rows, : part.shape[1]] = part
        mx.eval(empty)  # wait: the next micro-batch may use this one's memory
    return [whole.astype(out.dtype) for whole, out in zip(world.all_sum(empty), empty, strict=True)]


def my_part(batches: list[MicroBatch]) -> list[MicroBatch]:
    """The micro-batches that this machine computes; always the same ones of the same list."""
    return [batches[number] for number in world.part([batch.num_positions for batch in batches])]


def of_all(batches: list[MicroBatch], mine: list[Any]) -> list[Any]:
    """The values of all micro-batches in order; `mine` has those of `my_part`, the other machines send theirs."""
    found = list[Any](batches)
    for numbers, values in world.share((world.part([batch.num_positions for batch in batches]), mine)):
        for number, value in zip(numbers, values, strict=True):
            found[number] = value
    return found
