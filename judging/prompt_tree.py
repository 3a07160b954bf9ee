"""
Computes the hidden states at the ends of prompts that share beginnings.

Each prompt is split into sequences of consecutive tokens, called token runs. The token runs of all
prompts form a tree, and each token run is computed only once. The caller splits the prompts
(judging/judge_prompts.py) and reads a value at the end of each prompt (judge.py). The cache of keys
and values is in layers/tree_cache.py.

Axes: N prompts, M rows of a batch, L positions of a level, C hidden.
"""

import functools
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeVar

import cpu_blas  # noqa: F401  (before mlx)
import mlx.core as mx
from tqdm.auto import tqdm

import gwen
from layers.tree_cache import TreeCache
from machine import memory

# the maximum padding in a batch, as a fraction of its tokens; longer rows go into a later batch
MAX_PADDING = 0.1

T = TypeVar("T")
Prompt = tuple[tuple[int, ...], ...]  # a prompt's token ids, split into runs

# a function that returns M values, given the cache and the hidden states (M, C) at the ends of M
# prompts
Read = Callable[[mx.array, TreeCache], Sequence[T]]


class TokenRunNode(NamedTuple):
    """One run of tokens in the tree, shared by one or more prompts."""

    row: int  # the row of the cache that the run continues
    ids: tuple[int, ...]
    # a prompt's index -> the runs that follow this run in the prompt
    rests: dict[int, Prompt]


def make_first_run_nodes(cache_row: int, prompts: dict[int, Prompt]) -> list[TokenRunNode]:
    """
    The nodes for the first runs of prompts that continue one row of the cache.

    Prompts with the same first run share a node. But a prompt that consists of a single run has a
    node of its own.

    prompts: the prompts by index.
    """
    nodes: dict[object, TokenRunNode] = {}
    for index, (ids, *rest) in prompts.items():
        key = ids if rest else index
        node = nodes.setdefault(key, TokenRunNode(cache_row, ids, {}))
        node.rests[index] = tuple(rest)
    return list(nodes.values())


class PromptTree:
    """
    Computes prompts that all begin with the same tokens, `head`.

    The head is computed only once, so the model's weights must not change.

    chunk_size: the maximum number of prompts whose ends are computed together.
    name: the word with which messages about memory begin, such as "judge".
    """

    def __init__(self, model: gwen.Model, head: Sequence[int], chunk_size: int, name: str):
        self.model = model
        self.head = tuple(head)
        self.name = name
        self.chunk = memory.BatchSize(chunk_size)
        self.in_flight = chunk_size  # the number of prompts in the current batch
        self.num_tokens = 0  # how many positions the model has processed, including padding

    @functools.cached_property
    def head_cache_and_last_hidden(self) -> tuple[TreeCache, mx.array]:
        """
        The head's cache and the hidden state at its end, (C,).

        Raises ValueError if there is not enough memory.
        """
        results = memory.try_within_memory(self._compute_head)
        if not results:
            raise self._make_memory_error()
        return results[0]

    def _compute_head(self) -> tuple[TreeCache, mx.array]:
        cache = TreeCache(self.model.config.layer_kinds).with_new_level([len(self.head)])
        end = self.compute_padded_hidden(cache, [self.head])[0, -1]
        mx.eval(end, cache.arrays())
        return cache, end

    def yield_values_at_ends(
        self, prompts: dict[int, Prompt], read_at_ends: Read[T]
    ) -> Iterator[tuple[int, T]]:
        """
        Yields each prompt's index and the value that `read_at_ends` returns for this prompt.

        If memory runs out, the remaining prompts are computed in smaller chunks.

        prompts: the prompts by index, without the head. All have the same number of runs.

        Raises ValueError if there is not enough memory for a single prompt.
        """
        remaining = dict(prompts)
        while remaining:
            prompts_per_row = Counter(prompt[:-1] for prompt in remaining.values())
            max_ends = max(prompts_per_row.values())
            nodes = make_first_run_nodes(0, remaining)
            chunks = self._yield_values_below(
                self.head_cache_and_last_hidden[0], nodes, max_ends, read_at_ends
            )
            while results := memory.try_within_memory(next, chunks, ()):
                chunk = results[0]
                assert chunk, f"{len(remaining)} prompts were not read"
                for index, value in chunk:
                    del remaining[index]
                    yield index, value
                if not remaining:
                    return
            if self.chunk.rows == 1:
                raise self._make_memory_error()
            self.chunk.halve(self.in_flight)
            tqdm.write(
                f"{self.name}: out of memory; continuing with {self.chunk.rows} prompts at a time",
                file=sys.stderr,
            )

    def _make_memory_error(self) -> ValueError:
        return ValueError(
            f"{self.name}: there is not enough memory for a single prompt; "
            "free some memory, or use a smaller model"
        )

    def _yield_values_below(
        self, cache: TreeCache, nodes: list[TokenRunNode], max_ends: int, read_at_ends: Read[T]
    ) -> Iterator[list[tuple[int, T]]]:
        """
        Computes nodes that continue `cache`, and all nodes below them.

        Yields, for each batch of prompts, a list of pairs: a prompt's index, and the value that
        `read_at_ends` returns for the prompt. The rows of a batch have similar lengths, and at most
        `self.chunk.rows` prompts end below them.

        max_ends: the maximum number of prompts that end below one row.
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
            child = cache.with_new_level(lengths, [node.row for node in batch])
            hidden = self.compute_padded_hidden(child, [node.ids for node in batch])
            if is_last:
                values = read_at_ends(select_last_hidden(hidden, lengths), child)
                self.chunk.record_success()
                yield [
                    (index, value)
                    for node, value in zip(batch, values, strict=True)
                    for index in node.rests
                ]
            else:
                # `hidden` is not used here, so the last layer computes only keys and values
                mx.eval(child.arrays())
                children: list[TokenRunNode] = []
                for row, node in enumerate(batch):
                    children += make_first_run_nodes(row, node.rests)
                yield from self._yield_values_below(child, children, max_ends, read_at_ends)

    def compute_padded_hidden(
        self, cache: TreeCache, token_rows: Sequence[Sequence[int]]
    ) -> mx.array:
        """
        The hidden states (M, L, C) of rows of token ids that continue the cache.

        Rows are padded on the right. The cache is extended.
        """
        length = max(1, *map(len, token_rows))
        self.num_tokens += len(token_rows) * length
        padded_rows = []
        for row in token_rows:
            padding = [0] * (length - len(row))
            padded_rows.append([*row, *padding])
        return self.model.hidden(mx.array(padded_rows), cache)


def select_last_hidden(hidden: mx.array, lengths: list[int]) -> mx.array:
    """Selects the hidden state at each row's last token, (M, L, C) -> (M, C)."""
    last_positions = mx.array(lengths)[:, None, None] - 1
    return mx.take_along_axis(hidden, last_positions, 1)[:, 0]


def choose_batch_size(ascending_lengths: list[int], max_rows: int) -> int:
    """
    How many of the shortest rows fit into one batch with little padding.

    ascending_lengths: the rows' lengths in ascending order.
    """
    num_tokens = 0
    for size, length in enumerate(ascending_lengths[:max_rows], 1):
        num_tokens += length
        if size * length > num_tokens * (1 + MAX_PADDING) and size > 1:
            return size - 1
    return min(max_rows, len(ascending_lengths))
