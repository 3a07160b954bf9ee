"""
Prompts that share their beginnings: a tree of token runs, of which a model computes each once.

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

MOST_PADDING = 0.1  # of a level's batch; a row that would add more waits for a later batch

T = TypeVar("T")
Prompt = tuple[tuple[int, ...], ...]  # runs of ids
# what stands at the ends of M prompts, from the hidden states there, (M, C), and the cache
Read = Callable[[mx.array, TreeCache], Sequence[T]]


class Node(NamedTuple):
    """A run of tokens, and the prompts that it is in by place: their runs after it."""

    row: int  # of the cache that it continues
    ids: tuple[int, ...]
    below: dict[int, Prompt]


def make_nodes(row: int, prompts: dict[int, Prompt]) -> list[Node]:
    """What continues a row, from prompts by place. Equal runs become one node, unless they end a prompt."""
    nodes: dict[object, Node] = {}
    for place, (ids, *rest) in prompts.items():
        nodes.setdefault(ids if rest else place, Node(row, ids, {})).below[place] = tuple(rest)
    return list(nodes.values())


class PromptTree:
    """
    Prompts that all begin with `head`, which is computed once, so the model's weights must not change.

    chunk_size: most prompts whose ends are computed together. name: prefix of messages about memory.
    """

    def __init__(self, model: gwen.Model, head: Sequence[int], chunk_size: int, name: str):
        self.model, self.head, self.name = model, tuple(head), name
        self.chunk = memory.BatchSize(chunk_size)
        self.in_flight = chunk_size  # prompts of the batch being computed
        self.num_tokens = 0  # positions processed by the model, with padding

    @functools.cached_property
    def root(self) -> tuple[TreeCache, mx.array]:
        """The head's cache and the hidden state at its end, (C,). Raises ValueError if memory is too small."""
        if not (made := memory.try_within_memory(self._compute_root)):
            raise self._memory_error()
        return made[0]

    def _compute_root(self) -> tuple[TreeCache, mx.array]:
        cache = TreeCache(self.model.config.layer_kinds).extend([len(self.head)])
        end = self.forward(cache, [self.head])[0, -1]
        mx.eval(end, cache.arrays())
        return cache, end

    def walk(self, prompts: dict[int, Prompt], read: Read[T]) -> Iterator[tuple[int, T]]:
        """
        The place of each of N prompts and what `read` gives for it, chunk by chunk.

        prompts: by place, without the head, all with the same number of runs. If memory runs out, the chunks of the
        remaining prompts are smaller. Raises ValueError if memory is too small for one prompt.
        """
        left = dict(prompts)
        while left:
            ends_of_a_row = max(Counter(prompt[:-1] for prompt in left.values()).values())
            chunks = self._compute_level(self.root[0], make_nodes(0, left), ends_of_a_row, read)
            while made := memory.try_within_memory(next, chunks, ()):
                assert made[0], f"{len(left)} prompts were not read"
                for place, value in made[0]:
                    del left[place]
                    yield place, value
                if not left:
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
            f"{self.name}: memory does not suffice for one prompt; free some, or take a smaller model"
        )

    def _compute_level(
        self, cache: TreeCache, nodes: list[Node], ends_of_a_row: int, read: Read[T]
    ) -> Iterator[list[tuple[int, T]]]:
        """Computes nodes, which continue `cache`, and all below, in batches of similar lengths with a chunk of ends."""
        waiting = sorted(nodes, key=lambda node: len(node.ids))
        is_last = not any(waiting[0].below.values())
        ends = 1 if is_last else ends_of_a_row
        while waiting:
            size = choose_batch_size(
                [len(node.ids) for node in waiting], max(1, self.chunk.rows // ends)
            )
            batch, waiting = waiting[:size], waiting[size:]
            self.in_flight = size * ends
            lengths = [len(node.ids) for node in batch]
            child = cache.extend(lengths, [node.row for node in batch])
            hidden = self.forward(child, [node.ids for node in batch])
            if is_last:
                values = read(select_ends(hidden, lengths), child)
                self.chunk.note_success()
                yield [
                    (place, value)
                    for node, value in zip(batch, values, strict=True)
                    for place in node.below
                ]
            else:
                # `hidden` is never evaluated, so the last layer computes only keys and values
                mx.eval(child.arrays())
                below = [
                    one for row, node in enumerate(batch) for one in make_nodes(row, node.below)
                ]
                yield from self._compute_level(child, below, ends_of_a_row, read)

    def forward(self, cache: TreeCache, rows: Sequence[Sequence[int]]) -> mx.array:
        """Hidden states of a level's rows, padded on the right, (M, L, C)."""
        length = max(1, *map(len, rows))
        self.num_tokens += len(rows) * length
        return self.model.hidden(
            mx.array([[*row] + [0] * (length - len(row)) for row in rows]), cache
        )


def select_ends(hidden: mx.array, lengths: list[int]) -> mx.array:
    """The value at each row's last token, (M, L, C) -> (M, C)."""
    return mx.take_along_axis(hidden, mx.array(lengths)[:, None, None] - 1, 1)[:, 0]


def choose_batch_size(lengths: list[int], most: int) -> int:
    """How many of the shortest rows to batch, at most `most`, with little padding; lengths ascend."""
    total = 0
    for size, length in enumerate(lengths[:most], 1):
        total += length
        if size * length > total * (1 + MOST_PADDING) and size > 1:
            return size - 1
    return min(most, len(lengths))
