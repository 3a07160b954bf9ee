"""
The cache of a tree of token runs: rows share the keys and values of their ancestors.

Axes: N rows of the newest level, R rows of a level, K kv heads, S positions of a level, L new positions, D head dim.
"""

from collections.abc import Sequence

import mlx.core as mx

from kv_cache import Cache, Group, KVCache, LayerCache, Layout, Parts, make_group, make_layers


class TreeLayer:
    """One layer of a `TreeCache`: keys and values of each level, root first, (R, K, S, D)."""

    def __init__(self, parts: Parts):
        self.parts = parts

    def update(self, keys: mx.array, values: mx.array) -> Parts:
        """Adds the newest level, (N, K, L, D) each, and returns all levels visible to its queries."""
        self.parts.append((keys, values))
        return self.parts

    def arrays(self) -> list[mx.array]:
        return [array for part in self.parts for array in part]

    def flatten(self, target: LayerCache, index: mx.array) -> None:
        """Writes into the `target` of N rows the columns that `index` (N, W) names, counted through all levels."""
        keys, values = (
            mx.concatenate([part.swapaxes(1, 2).reshape(-1, part.shape[1], part.shape[3]) for part in parts])
            for parts in zip(*self.parts, strict=True)
        )
        target.update(keys[index].swapaxes(1, 2), values[index].swapaxes(1, 2))

    def child(self, rows_of: Sequence[slice | mx.array], parents: Sequence[int]) -> "TreeLayer":
        """The rows of each level that a next level sees."""
        return TreeLayer([(k[rows], v[rows]) for (k, v), rows in zip(self.parts, rows_of, strict=True)])


class TreeCache(Cache):
    """
    The cache of a tree of token runs: each row is a child of a row in the level above and sees all its ancestors.

    It holds the keys and values of an ancestor once for all descendants, and a gated delta net's state at the end of
    each row of the newest level. One forward pass computes a level's rows, padded on the right. Nothing is written in
    place, so gradients work, and a row may get children several times:

        preamble = TreeCache(config.layer_kinds).child([len(ids)])
        model.hidden(preamble_tokens, preamble)
        questions = preamble.child(lengths, parents=[0, 0, 0])
        model.hidden(question_tokens, questions)
    """

    def __init__(self, kinds: Sequence[str]):
        self.kinds = kinds
        self.layers = make_layers(kinds, lambda: TreeLayer([]))
        self.widths: list[int] = []  # of each level that was computed, padding included
        self.lengths: list[list[int]] = []  # of each level's rows, root first
        self.rows: list[list[int]] = []  # of each level, the newest too: its row in which each newest row goes on

    def child(self, lengths: list[int], parents: list[int] | None = None) -> "TreeCache":
        """A cache with one more level: rows of these lengths that continue the rows `parents` of the newest level."""
        held, rows_of = TreeCache(self.kinds), list[slice | mx.array]()
        held.widths = list(self.widths)
        assert not self.rows or len(parents or []) == len(lengths), "each row needs a parent"
        for level_lengths, row_of in zip(self.lengths, self.rows, strict=True):
            assert parents and min(parents) >= 0 and max(parents) < len(row_of), f"{parents} of {len(row_of)} rows"
            rows = [row_of[parent] for parent in parents]
            used = sorted(set(rows))
            consecutive = used == list(range(used[0], used[-1] + 1))
            rows_of.append(slice(used[0], used[-1] + 1) if consecutive else mx.array(used))  # a slice takes a view
            held.lengths.append([level_lengths[row] for row in used])
            held.rows.append([used.index(row) for row in rows])
        held.lengths.append(lengths)
        held.rows.append(list(range(len(lengths))))
        held.layers = [layer.child(rows_of, parents or []) for layer in self.layers]
        return held

    def advance(self, num_new: int) -> None:
        self.widths.append(num_new)

    def offsets(self, num_rows: int) -> mx.array:
        assert num_rows == len(self.rows[-1]), f"{num_rows} rows for {len(self.rows[-1])}"
        above = list(zip(self.lengths[:-1], self.rows[:-1], strict=True))
        return mx.array([sum(lengths[rows[row]] for lengths, rows in above) for row in range(num_rows)], mx.int32)

    def layout(self, num_new: int) -> Layout:
        """Which rows read which part of each level; the newest level is causal."""
        assert num_new >= max(self.lengths[-1]), f"{num_new} columns for {max(self.lengths[-1])} tokens"
        groups, parts = [], []
        for lengths, rows, width in zip(self.lengths[:-1], self.rows[:-1], self.widths, strict=True):
            seen = (mx.arange(width) < mx.array(lengths)[:, None])[:, None, None]
            groups.append(make_group(rows, len(lengths), seen if min(lengths) < width else None))
            parts.append(seen[mx.array(rows)])
        whole = None
        if any(group.mask is not None for group in groups):
            parts.append(mx.tri(num_new, dtype=mx.bool_))
            shape = len(self.lengths[-1]), 1, num_new
            whole = mx.concatenate([mx.broadcast_to(part, (*shape, part.shape[-1])) for part in parts], axis=-1)
        spans = None
        if min(self.lengths[-1]) < num_new:
            spans = mx.zeros((len(self.lengths[-1]),), mx.int32), mx.array(self.lengths[-1], dtype=mx.int32)
        return Layout([*groups, Group(mask="causal")], whole, spans)

    def flat(self) -> KVCache:
        """A `KVCache` of the newest level's rows, each after a copy of its ancestors, to continue token by token."""
        columns: list[list[int]] = [[] for _ in self.lengths[-1]]  # of each row, in the concatenated levels
        begin = 0
        for lengths, rows, width in zip(self.lengths, self.rows, self.widths, strict=True):
            for row, held in zip(rows, columns, strict=True):
                held += range(begin + row * width, begin + row * width + lengths[row])
            begin += len(lengths) * width
        length = max(map(len, columns))
        padding = [length - len(held) for held in columns]
        index = mx.array([[0] * pad + held for pad, held in zip(padding, columns, strict=True)])
        cache = KVCache(self.kinds, length, mx.array(padding) if any(padding) else None)
        cache.advance(length)
        for layer, target in zip(self.layers, cache.layers, strict=True):
            layer.flatten(target, index)
        return cache
