"""
Computes prompts that share their beginnings, as a tree of token runs. Each run is computed once.

This file knows neither the content of prompts (judging/rubrics.py) nor what is read at their ends
(judge.py). The cache of keys and values is in layers/tree_cache.py.

Axes: N prompts, M rows of a batch, L positions of a level, C hidden.
"""

import functools
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeVar

import mlx.core as mx
from tqdm.auto import tqdm

import gwen
from layers.tree_cache import TreeCache
from machine import memory

MAX_PADDING = 0.1  # fraction of a batch; a row that would add more waits for a later batch

T = TypeVar("T")
Prompt = tuple[tuple[int, ...], ...]  # runs of ids
# takes the hidden states at the ends of M prompts, (M, C), and the cache; returns M values
Read = Callable[[mx.array, TreeCache], Sequence[T]]


class Node(NamedTuple):
    """A run of tokens in the tree."""

    row: int  # the row of the cache that the run continues
    ids: tuple[int, ...]
    # by the place of each prompt with this run: the prompt's runs after it
    rests: dict[int, Prompt]


def make_nodes(row: int, prompts: dict[int, Prompt]) -> list[Node]:
    """
    The nodes that continue a row of the cache.

    prompts: by place.

    Prompts with an equal first run share a node, unless the run ends a prompt.
    """
    nodes: dict[object, Node] = {}
    for place, (ids, *rest) in prompts.items():
        key = ids if rest else place
        node = nodes.setdefault(key, Node(row, ids, {}))
        node.rests[place] = tuple(rest)
    return list(nodes.values())


class PromptTree:
    """
    Prompts that all begin with `head`. The head is computed once, so the model's weights must not
    change.

    chunk_size: the most prompts whose ends are computed together.
    name: the prefix of messages about memory.
    """

    def __init__(self, model: gwen.Model, head: Sequence[int], chunk_size: int, name: str):
        self.model = model
        self.head = tuple(head)
        self.name = name
        self.chunk = memory.BatchSize(chunk_size)
        self.in_flight = chunk_size  # prompts of the batch that is being computed
        self.num_tokens = 0  # positions processed by the model, with padding

    @functools.cached_property
    def root(self) -> tuple[TreeCache, mx.array]:
        """
        The head's cache and the hidden state at its end, (C,).

        Raises ValueError if memory is too small.
        """
        results = memory.try_within_memory(self._compute_root)
        if not results:
            raise self._memory_error()
        return results[0]

    def _compute_root(self) -> tuple[TreeCache, mx.array]:
        cache = TreeCache(self.model.config.layer_kinds).extend([len(self.head)])
        end = self.forward(cache, [self.head])[0, -1]
        mx.eval(end, cache.arrays())
        return cache, end

    def walk(self, prompts: dict[int, Prompt], read: Read[T]) -> Iterator[tuple[int, T]]:
        """
        Yields each prompt's place and the value that `read` returns for it, chunk by chunk.

        prompts: by place, without the head; all have the same number of runs. If memory runs out,
        the remaining prompts are computed in smaller chunks.

        Raises ValueError if memory is too small for one prompt.
        """
        remaining = dict(prompts)
        while remaining:
            prompts_per_row = Counter(prompt[:-1] for prompt in remaining.values())
            max_ends = max(prompts_per_row.values())
            nodes = make_nodes(0, remaining)
            chunks = self._compute_level(self.root[0], nodes, max_ends, read)
            while results := memory.try_within_memory(next, chunks, ()):
                chunk = results[0]
                assert chunk, f"{len(remaining)} prompts were not read"
                for place, value in chunk:
                    del remaining[place]
                    yield place, value
                if not remaining:
                    return
            if self.chunk.rows == 1:
                raise self._memory_error()
            self.chunk.halve(self.in_flight)
            tqdm.write(
                f"{self.name}: out of memory, going on with chunks of {self.chunk.rows}",
                file=sys.stderr,
            )

    def _memory_error(self) -> ValueError:
        return ValueError(
            f"{self.name}: memory does not suffice for one prompt; "
            "free some, or take a smaller model"
        )

    def _compute_level(
        self, cache: TreeCache, nodes: list[Node], max_ends: int, read: Read[T]
    ) -> Iterator[list[tuple[int, T]]]:
        """
        Computes nodes that continue `cache`, and all levels below. Yields the values of `read`.

        The rows of a batch have similar lengths, and the prompts below them have at most one chunk
        of ends. max_ends: the most prompts that end below one row.
        """
        waiting = sorted(nodes, key=lambda node: len(node.ids))
        is_last = not any(waiting[0].rests.values())
        ends_per_row = 1 if is_last else max_ends
        while waiting:
            max_rows = max(1, self.chunk.rows // ends_per_row)
            size = choose_batch_size([len(node.ids) for node in waiting], max_rows)
            batch = waiting[:size]
            waiting = waiting[size:]
            self.in_flight = size * ends_per_row

            lengths = [len(node.ids) for node in batch]
            child = cache.extend(lengths, [node.row for node in batch])
            hidden = self.forward(child, [node.ids for node in batch])
            if is_last:
                values = read(select_ends(hidden, lengths), child)
                self.chunk.note_success()
                yield [
                    (place, value)
                    for node, value in zip(batch, values, strict=True)
                    for place in node.rests
                ]
            else:
                # `hidden` is never evaluated, so the last layer computes only keys and values
                mx.eval(child.arrays())
                children: list[Node] = []
                for row, node in enumerate(batch):
                    children += make_nodes(row, node.rests)
                yield from self._compute_level(child, children, max_ends, read)

    def forward(self, cache: TreeCache, rows: Sequence[Sequence[int]]) -> mx.array:
        """Hidden states of a level's rows, padded on the right, (M, L, C)."""
        length = max(1, *map(len, rows))
        self.num_tokens += len(rows) * length
        padded_rows = []
        for row in rows:
            padding = [0] * (length - len(row))
            padded_rows.append([*row, *padding])
        return self.model.hidden(mx.array(padded_rows), cache)


def select_ends(hidden: mx.array, lengths: list[int]) -> mx.array:
    """The hidden state at each row's last token, (M, L, C) -> (M, C)."""
    last_positions = mx.array(lengths)[:, None, None] - 1
    return mx.take_along_axis(hidden, last_positions, 1)[:, 0]


def choose_batch_size(lengths: list[int], max_rows: int) -> int:
    """How many of the shortest rows fit into one batch with little padding. `lengths` ascend."""
    num_tokens = 0
    for size, length in enumerate(lengths[:max_rows], 1):
        num_tokens += length
        if size * length > num_tokens * (1 + MAX_PADDING) and size > 1:
            return size - 1
    return min(max_rows, len(lengths))
