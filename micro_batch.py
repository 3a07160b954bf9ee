"""
Micro-batches: which rows of a step are computed together, and in which form.

Plain: a row is its prompt and its completion. Shared: a micro-batch's prompts are separate rows, each computed once,
with gradient, and continued by all completions of its group. Both give every token the same past and position, and so
the same gradient; which is cheaper depends only on the lengths. Left out: the loss.

Axes: N rows of the step, M rows of a micro-batch, B its prompts, P prompt positions, L positions of a row,
T completion positions.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import mlx.core as mx
import numpy as np

import gpu
import world

SHARING = ("auto", "on", "off")
# Sharing pays from this share of positions saved: time was 1.14x with 10% saved, 0.97x with 18%, 0.88x with 29%.
LEAST_SAVED = 0.2


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
    mask: mx.array  # (M, T)
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
    prompts: list[list[int]], rollout: Completions, token_budget: int, sharing: str = "off"
) -> list[MicroBatch]:
    """
    The step's rows in micro-batches of at most `token_budget` positions, or of one row.

    prompts: N, one per row. Rows without a counted token are left out. sharing: see `plan`.
    """
    completions = rollout.ids
    shared, cut = plan(prompts, np.array(list(map(len, completions))), token_budget, sharing)
    make = _make_shared if shared else _make_plain
    return [make(part, prompts, completions, rollout) for part, _ in cut]


Cut = list[tuple[list[int], int]]  # each micro-batch's rows, and its positions with padding


def plan(prompts: list[list[int]], num_tokens: np.ndarray, token_budget: int, sharing: str) -> tuple[bool, Cut]:
    """
    Whether to share prompts, and which rows to batch; depends only on prompts and completion lengths, N each.

    sharing: whether to compute a prompt once for its group. "auto" shares if that saves enough positions, but never on
    a GPU, whose attention kernel reads each row's keys from one buffer.
    """
    assert sharing in SHARING, sharing
    rows = np.flatnonzero(num_tokens).tolist()
    plain = _cut_plain(rows, [len(prompt) for prompt in prompts], num_tokens, token_budget)
    if sharing == "off" or not rows:
        return False, plain
    shared = _cut_shared(rows, prompts, num_tokens, token_budget)
    saved = 1 - sum(size for _, size in shared) / sum(size for _, size in plain)
    if sharing == "on" or (saved >= LEAST_SAVED and not gpu.on_gpu()):
        return True, shared
    return False, plain


def _cut_plain(rows: list[int], lengths: list[int], num_tokens: np.ndarray, token_budget: int) -> Cut:
    """Rows ordered by length."""
    total = {row: lengths[row] + int(num_tokens[row]) - 1 for row in rows}
    cut: Cut = []
    for row in sorted(rows, key=lambda row: total[row]):  # ascending: each row added is the longest
        size = (len(cut[-1][0]) + 1) * total[row] if cut else 0
        if cut and size <= token_budget:
            cut[-1] = ([*cut[-1][0], row], size)
        else:
            cut.append(([row], total[row]))
    return cut


def _cut_shared(rows: list[int], prompts: list[list[int]], num_tokens: np.ndarray, token_budget: int) -> Cut:
    """Whole groups, ordered by their longest completion; splits a group that exceeds the budget."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for row in sorted(rows, key=lambda row: int(num_tokens[row])):
        groups.setdefault(tuple(prompts[row]), []).append(row)

    def size(part: list[int]) -> int:
        distinct = {tuple(prompts[row]) for row in part}
        return len(distinct) * max(map(len, distinct)) + len(part) * (int(num_tokens[part].max()) - 1)

    cut: list[list[int]] = []
    for group in sorted(groups.values(), key=lambda group: int(num_tokens[group].max())):
        if cut and size(cut[-1] + group) <= token_budget:
            cut[-1] = cut[-1] + group
            continue
        cut.append(group[:1])
        for row in group[1:]:
            if size([*cut[-1], row]) <= token_budget:
                cut[-1].append(row)
            else:
                cut.append([row])
    return [(part, size(part)) for part in cut]


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
    most = max(len(completions[row]) for row in part)
    # completion token t stands at len(prompt) + t and is predicted one position earlier
    first = np.array([len(prompts[row]) - 1 for row in part])
    positions = np.minimum(first[:, None] + np.arange(most), max(map(len, whole)) - 1)
    return _finish(part, None, whole, positions, rollout)


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
    most = max(len(completions[row]) for row in part)
    positions = np.broadcast_to(np.arange(most), (len(part), most))
    return _finish(part, prefix, [completions[row][:-1] for row in part], positions, rollout)


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
    The arrays found for each micro-batch, (M, T, ...), in their rows of `empty`, (N, T, ...).

    found: of the micro-batches of `my_part`, computed one by one; those of the other machines are added.
    """
    for batch, parts in found:
        for out, part in zip(empty, parts, strict=True):
            out[batch.rows, : part.shape[1]] = part
        mx.eval(empty)  # wait: the next micro-batch may use this one's memory
    return [whole.astype(out.dtype) for whole, out in zip(world.all_sum(empty), empty, strict=True)]


def my_part(batches: list[MicroBatch]) -> list[MicroBatch]:
    """The micro-batches that this machine computes, of several; always the same ones of the same list."""
    return [batches[number] for number in world.part([batch.num_positions for batch in batches])]


def of_all(batches: list[MicroBatch], mine: list[Any]) -> list[Any]:
    """What every micro-batch gave, from what those of `my_part` gave on each machine; see `world.share`."""
    found = list[Any](batches)
    for numbers, values in world.share((world.part([batch.num_positions for batch in batches]), mine)):
        for number, value in zip(numbers, values, strict=True):
            found[number] = value
    return found
