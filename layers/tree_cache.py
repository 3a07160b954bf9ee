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
        """Keys and values of every level."""
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
        self.parents: list[list[int]] = []  # of each level's rows except the root's: rows of the level above

    def child(self, lengths: list[int], parents: list[int] | None = None) -> "TreeCache":
        """
        A cache with one more level: rows of these lengths that continue the rows `parents` of the newest level.

        Takes consecutive rows of the levels above as a view.
        """
        held = TreeCache(self.kinds)
        held.lengths, held.parents, held.widths = [lengths], [], list(self.widths)
        rows, rows_of = parents, list[slice | mx.array]()
        for level in reversed(range(len(self.lengths))):
            assert rows is not None and len(rows) == len(held.lengths[0]), "each row needs a parent"
            used = sorted(set(rows))
            assert used[0] >= 0 and used[-1] < len(self.lengths[level]), f"{used} of {len(self.lengths[level])} rows"
            consecutive = used == list(range(used[0], used[-1] + 1))
            rows_of.insert(0, slice(used[0], used[-1] + 1) if consecutive else mx.array(used))
            held.lengths.insert(0, [self.lengths[level][row] for row in used])
            held.parents.insert(0, [used.index(row) for row in rows])
            rows = [self.parents[level - 1][row] for row in used] if level else None
        held.layers = [layer.child(rows_of, parents or []) for layer in self.layers]
        return held

    def advance(self, num_new: int) -> None:
        self.widths.append(num_new)

    def _ancestors(self) -> list[list[int]]:
        """For each level above the newest: the ancestor of each of the newest level's rows."""
        rows = list(range(len(self.lengths[-1])))
        found: list[list[int]] = []
        for parents in reversed(self.parents):
            rows = [parents[row] for row in rows]
            found.insert(0, rows)
        return found

    def offsets(self, num_rows: int) -> mx.array:
        """The position of the first token of each row of the newest level, (N,) int32."""
        assert num_rows == len(self.lengths[-1]), f"{num_rows} rows for {len(self.lengths[-1])}"
        before = [0] * num_rows
        for lengths, rows in zip(self.lengths[:-1], self._ancestors(), strict=True):
            before = [start + lengths[row] for start, row in zip(before, rows, strict=True)]
        return mx.array(before, dtype=mx.int32)

    def layout(self, num_new: int) -> Layout:
        """Which rows read which part of each level; the newest level is causal."""
        assert num_new >= max(self.lengths[-1]), f"{num_new} columns for {max(self.lengths[-1])} tokens"
        groups, parts = [], []
        for level, (lengths, rows) in enumerate(zip(self.lengths[:-1], self._ancestors(), strict=True)):
            width = self.widths[level]
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
        for level, rows in enumerate([*self._ancestors(), range(len(columns))]):
            num_rows, width = len(self.lengths[level]), self.widths[level]
            for row, held in zip(rows, columns, strict=True):
                held += range(begin + row * width, begin + row * width + self.lengths[level][row])
            begin += num_rows * width
        length = max(map(len, columns))
        padding = [length - len(held) for held in columns]
        index = mx.array([[0] * pad + held for pad, held in zip(padding, columns, strict=True)])
        cache = KVCache(self.kinds, length, mx.array(padding) if any(padding) else None)
        cache.advance(length)

        for layer, target in zip(self.layers, cache.layers, strict=True):
            layer.flatten(target, index)
        return cache
