"""
Many prompts through a model, and what they share only once.

Each prompt is a sequence of token runs: all begin with the same head, many go on alike, and each ends on its own. They
form a tree that is computed level by level, in batches of similar lengths. At the end of a prompt its hidden state is
read. What is left out: what prompts mean, and what is read.

Axes: N prompts, M rows of a batch, L positions of a level, C hidden, V vocabulary.
"""

import sys
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

import mlx.core as mx
from tqdm import tqdm

import gpu
import gwen
from kv_cache import TreeCache

GROW_AFTER = 32  # chunks that fit, before a chunk that was halved grows by a quarter
MOST_PADDING = 0.1  # of a level's batch; beyond that a row waits for a batch of its own length

Prompt = tuple[tuple[int, ...], ...]  # runs of ids
Read = Callable[
    [list[int], mx.array, TreeCache], None
]  # places of M prompts, hidden states (M, C) at their ends, cache


class Node(NamedTuple):
    """A run of tokens, and what follows it; the last run of a prompt has the prompt's place."""

    ids: tuple[int, ...]
    below: list["Node"]
    place: int = -1


def tree_of(prompts: dict[int, Prompt]) -> list[Node]:
    """The first runs of prompts by their places; runs that are followed by others stand there once."""
    shared: dict[tuple[int, ...], dict[int, Prompt]] = {}
    for place, runs in prompts.items():
        if len(runs) > 1:
            shared.setdefault(runs[0], {})[place] = runs[1:]
    last = [Node(runs[0], [], place) for place, runs in prompts.items() if len(runs) == 1]
    return last + [Node(ids, tree_of(rest)) for ids, rest in shared.items()]


class Chunk:
    """How many prompts end at once: halved when memory runs out, and slowly grown again to what was asked for."""

    def __init__(self, size: int):
        self.size = self.most = size
        self.num_good = 0  # chunks that fitted since the size last changed
        self.in_flight = size  # prompts of the batch that memory may run out with

    def fitted(self) -> None:
        self.num_good += 1
        if self.size < self.most and self.num_good >= GROW_AFTER:
            self.size, self.num_good = min(self.most, -(-self.size * 5 // 4)), 0

    def halve(self) -> None:
        self.size, self.num_good = max(1, min(self.size, self.in_flight) // 2), 0


class PromptTree:
    """
    Prompts that all begin with `head`, which goes through the model once: its weights must stay what they are.

    chunk_size: prompts that end at once. name: what messages about memory begin with.
    """

    def __init__(self, model: gwen.Model, head: Sequence[int], chunk_size: int, name: str):
        self.model, self.head, self.name = model, tuple(head), name
        self.chunk = Chunk(chunk_size)
        self.num_tokens = 0  # positions that have gone through the model, padding included
        self._root: tuple[TreeCache, mx.array] | None = None

    def root(self) -> tuple[TreeCache, mx.array]:
        """The head's cache, and the hidden state at its end, (C,). ValueError when memory does not suffice."""
        if self._root is None:
            cache = TreeCache(len(self.model.layers)).child([len(self.head)])
            try:
                end = self.forward(cache, [self.head])[0, -1]
                mx.eval(end, cache.arrays())
            except RuntimeError as error:
                if gpu.is_out_of_memory(error):
                    raise self._too_little() from error
                raise
            self._root = cache, end
        return self._root

    def walk(self, prompts: Sequence[Prompt], read: Read) -> None:
        """
        Takes N prompts of equally many runs, head left out, through the model; `read` gets each of them once.

        Where memory runs out, those that were not read yet are taken through in smaller chunks. ValueError when it does
        not suffice for one.
        """
        left = dict(enumerate(prompts))

        def finish(places: list[int], hidden: mx.array, cache: TreeCache) -> None:
            read(places, hidden, cache)
            for place in places:
                del left[place]

        while left:
            ends_of_a_row = max(Counter(prompt[:-1] for prompt in left.values()).values())
            try:
                self._level(self.root()[0], [(0, node) for node in tree_of(left)], ends_of_a_row, finish)
            except RuntimeError as error:
                if not gpu.is_out_of_memory(error):
                    raise
            else:
                break
            # here, where the exception no longer holds the arrays of the frames that it left
            if self.chunk.size == 1:
                raise self._too_little()
            self.chunk.halve()
            mx.clear_cache()
            tqdm.write(f"{self.name}: out of memory, going on with chunks of {self.chunk.size}", file=sys.stderr)

    def _too_little(self) -> ValueError:
        return ValueError(f"{self.name}: memory does not suffice for one prompt; free some, or take a smaller model")

    def _level(self, cache: TreeCache, nodes: list[tuple[int, Node]], ends_of_a_row: int, read: Read) -> None:
        """
        Takes nodes of one level, each with its parent's row in `cache`, and all that is below them through the model.

        As many rows at once as make no more than a chunk of ends, of similar lengths.
        """
        waiting = sorted(nodes, key=lambda item: len(item[1].ids))
        is_last = not waiting[0][1].below
        ends = 1 if is_last else ends_of_a_row
        while waiting:
            size = batch_size([len(node.ids) for _, node in waiting], max(1, self.chunk.size // ends))
            batch, waiting = waiting[:size], waiting[size:]
            self.chunk.in_flight = size * ends
            child = cache.child([len(node.ids) for _, node in batch], [parent for parent, _ in batch])
            hidden = self.forward(child, [node.ids for _, node in batch])
            if is_last:
                read([node.place for _, node in batch], at_ends(hidden, [len(node.ids) for _, node in batch]), child)
                self.chunk.fitted()
            else:
                # `hidden` is never evaluated, so in the last layer only keys and values are computed
                mx.eval(child.arrays())
                below = [(row, node) for row, (_, parent) in enumerate(batch) for node in parent.below]
                self._level(child, below, ends_of_a_row, read)

    def forward(self, cache: TreeCache, rows: Sequence[Sequence[int]]) -> mx.array:
        """Hidden states of a level's rows, padded on the right, (M, L, C)."""
        length = max(1, *map(len, rows))
        self.num_tokens += len(rows) * length
        return self.model.hidden(mx.array([[*row] + [0] * (length - len(row)) for row in rows]), cache)


def at_ends(hidden: mx.array, lengths: list[int]) -> mx.array:
    """What stands at the last token of each row, (M, L, C) -> (M, C)."""
    return mx.take_along_axis(hidden, mx.array(lengths)[:, None, None] - 1, 1)[:, 0]


def batch_size(lengths: list[int], most: int) -> int:
    """How many of the shortest rows go together, of ascending lengths: at most `most`, little of it padding."""
    total = 0
    for size, length in enumerate(lengths[:most], 1):
        total += length
        if size * length > total * (1 + MOST_PADDING) and size > 1:
            return size - 1
    return min(most, len(lengths))
