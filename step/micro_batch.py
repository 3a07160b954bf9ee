"""
Micro-batches: which rows of a step go through the model together, and in which form.

A row is its prompt and its completion; or, where that is cheaper, each prompt is computed once and the completions of
its group continue it (step/shared_prompts.py). A row in turns is its prompt and its sequence, of which only its own
tokens, at their places, are predicted.

Axes: N rows of the step, M rows of a micro-batch, B its prompts, P prompt positions, L positions of a row,
T completion positions.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from machine import world
from sampler import Rollout
from step import shared_prompts
from step.shared_prompts import Cut, padded

SHARING = ("auto", "on", "off")


class MicroBatch(NamedTuple):
    """Rows computed together, padded on the right; row i is row `rows[i]` of the step."""

    rows: mx.array  # (M,)
    prefix: shared_prompts.Prefix | None  # None: each row starts with its prompt
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


def pad_frac(batches: list[MicroBatch]) -> float:
    """Padding's share of the positions that the model computes."""
    return 1 - sum(batch.num_tokens for batch in batches) / sum(batch.num_positions for batch in batches)


def micro_batches(
    prompts: list[list[int]],
    rollout: Rollout,
    token_budget: int,
    sharing: str = "off",
    weights: np.ndarray | None = None,
) -> list[MicroBatch]:
    """
    The step's rows in micro-batches of at most `token_budget` positions, of one row or of one group.

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
    shared = shared_prompts.cut(rows, prompts, num_tokens, token_budget)
    saved = 1 - sum(size for _, size in shared) / sum(size for _, size in plain)
    return (True, shared) if sharing == "on" or saved >= shared_prompts.LEAST_SAVED else (False, plain)


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


def _make_plain(
    part: list[int], prompts: list[list[int]], completions: list[list[int]], rollout: Rollout
) -> MicroBatch:
    whole = [[*prompts[row], *completions[row][:-1]] for row in part]
    # token t of what follows the prompt stands at len(prompt) + t and is predicted one position earlier
    first = np.array([len(prompts[row]) - 1 for row in part])
    positions = np.minimum(first[:, None] + _places(part, completions, rollout), max(map(len, whole)) - 1)
    return _finish(part, None, whole, positions, rollout)


def _places(part: list[int], completions: list[list[int]], rollout: Rollout) -> np.ndarray:
    """The places of rows' tokens in what follows their prompts, (M, T); those of padding count on."""
    if rollout.places is None:
        return np.tile(np.arange(max(len(completions[row]) for row in part)), (len(part), 1))
    places = [rollout.places[row] for row in part]
    most = max(map(len, places))
    return np.array([[*held, *range(len(held), most)] for held in places])


def _make_shared(
    part: list[int], prompts: list[list[int]], completions: list[list[int]], rollout: Rollout
) -> MicroBatch:
    prefix = shared_prompts.Prefix.of([prompts[row] for row in part], rollout.places is not None)
    tokens = [completions[row][:-1] for row in part]
    positions = np.minimum(_places(part, completions, rollout), max(map(len, tokens)))
    return _finish(part, prefix, tokens, positions, rollout)


def _finish(
    part: list[int],
    prefix: shared_prompts.Prefix | None,
    tokens: list[list[int]],
    positions: np.ndarray,
    rollout: Rollout,
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
