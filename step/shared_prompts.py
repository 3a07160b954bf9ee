"""
Micro-batches whose prompts are computed once, with gradient, for all completions of their group.

Every token has the same past and position as in a row of its own, hence the same gradient; the lengths decide which is
cheaper. Left out: rows that begin with their prompts, and the choice (step/micro_batch.py).

Axes: M rows of a micro-batch, B its prompts, P prompt positions, L positions of a row, C hidden.
"""

import math
from typing import NamedTuple

import mlx.core as mx
import numpy as np

import gwen
from layers.tree_cache import TreeCache

# Sharing pays from this share of positions saved. On a CPU time was 1.14x with 10% saved, 0.97x with 18%, 0.88x with
# 29%; on a GPU, counted, 0.85x, 0.83x and 0.75x (`c148fd6:bench/ledger.py`).
LEAST_SAVED = 0.2
ROOM = 9 / 8  # a group that shares its prompt may exceed the budget by this factor, so that it need not be split


Cut = list[tuple[list[int], int]]  # each micro-batch's rows, and its positions with padding


def padded(rows: list[list[int]]) -> mx.array:
    """Token ids as one array, (len(rows), longest), padded with 0."""
    out = np.zeros((len(rows), max(map(len, rows))), np.int32)
    for place, row in enumerate(rows):
        out[place, : len(row)] = row
    return mx.array(out)


class Prefix(NamedTuple):
    """The prompts of a micro-batch, padded on the right."""

    tokens: mx.array  # (B, P)
    lengths: list[int]  # B
    parents: list[int]  # M, each row's prompt
    in_turns: bool  # whether rows hold tokens that are not theirs, so that not each state predicts one of theirs

    @classmethod
    def of(cls, prompts: list[list[int]], in_turns: bool) -> "Prefix":
        """The distinct ones of M rows' prompts."""
        place = {prompt: index for index, prompt in enumerate(dict.fromkeys(map(tuple, prompts)))}
        distinct = [list(prompt) for prompt in place]
        parents = [place[tuple(prompt)] for prompt in prompts]
        return cls(padded(distinct), list(map(len, distinct)), parents, in_turns)

    def of_rows(self, places: list[int]) -> "Prefix":
        """The prompts that some of the rows continue."""
        parents = [self.parents[place] for place in places]
        kept = sorted(set(parents))
        lengths = [self.lengths[parent] for parent in kept]
        places = [kept.index(parent) for parent in parents]
        return Prefix(self.tokens[mx.array(kept)], lengths, places, self.in_turns)


def cut(rows: list[int], prompts: list[list[int]], num_tokens: np.ndarray, token_budget: int) -> Cut:
    """Whole groups, ordered by their longest completion; one that exceeds ROOM times the budget is split evenly."""
    num = num_tokens.tolist()
    groups: dict[tuple[int, ...], list[int]] = {}
    known = {id(prompt): prompt for prompt in prompts}  # rows of a group mostly hold the same list
    keys = {place: tuple(prompt) for place, prompt in known.items()}
    for row in sorted(rows, key=num.__getitem__):
        groups.setdefault(keys[id(prompts[row])], []).append(row)
    ordered = sorted(groups.items(), key=lambda item: num[item[1][-1]])
    found: Cut = []
    num_prompts = longest = 0  # of the last part
    for prompt, group in ordered:
        length, part = len(prompt), found[-1][0] if found else []
        size = (num_prompts + 1) * max(longest, length) + (len(part) + len(group)) * (num[group[-1]] - 1)
        if found and size <= token_budget:
            found[-1] = (part + group, size)  # ascending: this group has the longest completion
            num_prompts, longest = num_prompts + 1, max(longest, length)
            continue
        num_rows = max((int(ROOM * token_budget) - length) // max(num[group[-1]] - 1, 1), 1)  # at once, at most
        num_rows = math.ceil(len(group) / math.ceil(len(group) / num_rows))
        for part in (group[first : first + num_rows] for first in range(0, len(group), num_rows)):
            found.append((part, length + len(part) * (num[part[-1]] - 1)))
        num_prompts, longest = 1, length
    return found


def hidden(
    model: gwen.Model, prefix: Prefix, tokens: mx.array, lengths: list[int], checkpoint_layers: int = 0
) -> mx.array:
    """The hidden states at each prompt's last position and at the tokens (M, L) after it, (M, 1 + L, C)."""
    cache = TreeCache(model.config.layer_kinds).child(prefix.lengths)
    of_prompts = model.hidden(prefix.tokens, cache, checkpoint_layers)  # (B, P, C)
    last = mx.array([length - 1 for length in prefix.lengths])
    first = of_prompts[mx.arange(len(prefix.lengths)), last][mx.array(prefix.parents)]  # (M, C)
    if not tokens.shape[1]:  # every completion is one token, predicted by its prompt
        return first[:, None]
    children = cache.child(lengths, prefix.parents)
    return mx.concatenate([first[:, None], model.hidden(tokens, children, checkpoint_layers)], axis=1)
