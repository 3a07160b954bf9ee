"""
The cache of a tree of token runs, whose rows share the keys and values of their ancestors.

Axes: N rows of the newest level, R rows of a level, K kv heads, S positions of a level, L new
positions, W columns of a row with all its ancestors, D head dim.
"""

from collections.abc import Sequence

import mlx.core as mx

from kv_cache import Cache, Group, KVCache, LayerCache, Layout, Parts, make_group, make_layers


class TreeLayer:
    """One layer of a `TreeCache`: keys and values of each level, root first, (R, K, S, D)."""

    def __init__(self, parts: Parts):
        self.parts = parts

    def update(self, keys: mx.array, values: mx.array) -> Parts:
        """Adds the newest level, (N, K, L, D) each. Returns all levels visible to its queries."""
        self.parts.append((keys, values))
        return self.parts

    def arrays(self) -> list[mx.array]:
        return [array for part in self.parts for array in part]

    def flatten(self, target: LayerCache, index: mx.array) -> None:
        """
        Writes columns into the `target` of N rows.

        index (N, W): the numbers of these columns, counted through all levels.
        """
        level_keys = [keys for keys, _ in self.parts]
        level_values = [values for _, values in self.parts]
        keys = concatenate_columns(level_keys)
        values = concatenate_columns(level_values)
        target.update(keys[index].swapaxes(1, 2), values[index].swapaxes(1, 2))

    def extend(self, rows_of: Sequence[slice | mx.array], parents: Sequence[int]) -> "TreeLayer":
        """The rows of each level that a next level sees."""
        parts = [
            (keys[rows], values[rows])
            for (keys, values), rows in zip(self.parts, rows_of, strict=True)
        ]
        return TreeLayer(parts)


def concatenate_columns(levels: list[mx.array]) -> mx.array:
    """All columns of all levels, from (R, K, S, D) each -> (sum of R * S, K, D)."""
    columns = []
    for level in levels:
        _, num_heads, _, size = level.shape
        columns.append(level.swapaxes(1, 2).reshape(-1, num_heads, size))
    return mx.concatenate(columns)


class TreeCache(Cache):
    """
    The cache of a tree of token runs: each row continues a row of the level above.

    A row sees all its ancestors, whose keys and values are stored once for all descendants. For a
    gated delta net, the state at the end of each row of the newest level is stored. One forward
    pass computes a level's rows, padded on the right. Nothing is written in place, so gradients
    work, and a row may get children several times:

        preamble = TreeCache(config.layer_kinds).extend([len(ids)])
        model.hidden(preamble_tokens, preamble)
        questions = preamble.extend(lengths, parents=[0, 0, 0])
        model.hidden(question_tokens, questions)
    """

    def __init__(self, kinds: Sequence[str]):
        self.kinds = kinds
        self.layers = make_layers(kinds, lambda: TreeLayer([]))
        self.widths: list[int] = []  # of each computed level, padding included
        self.lengths: list[list[int]] = []  # of each level's rows, root first
        # for each level, the newest included: the row of that level that each newest row continues
        self.rows: list[list[int]] = []

    def extend(self, lengths: list[int], parents: list[int] | None = None) -> "TreeCache":
        """
        A cache with one more level, whose rows have these lengths.

        parents: the row of the newest level that each new row continues; None for the root.
        """
        assert not self.rows or len(parents or []) == len(lengths), "each row needs a parent"
        extended = TreeCache(self.kinds)
        extended.widths = list(self.widths)
        rows_of: list[slice | mx.array] = []
        for level_lengths, row_of in zip(self.lengths, self.rows, strict=True):
            assert parents, "each row needs a parent"
            is_known = min(parents) >= 0 and max(parents) < len(row_of)
            assert is_known, f"{parents} of {len(row_of)} rows"
            rows = [row_of[parent] for parent in parents]
            used = sorted(set(rows))
            is_consecutive = used == list(range(used[0], used[-1] + 1))
            # indexing by a slice makes no copy
            rows_of.append(slice(used[0], used[-1] + 1) if is_consecutive else mx.array(used))
            extended.lengths.append([level_lengths[row] for row in used])
            extended.rows.append([used.index(row) for row in rows])
        extended.lengths.append(lengths)
        extended.rows.append(list(range(len(lengths))))
        extended.layers = [layer.extend(rows_of, parents or []) for layer in self.layers]
        return extended

    def advance(self, num_new: int) -> None:
        self.widths.append(num_new)

    def offsets(self, num_rows: int) -> mx.array:
        assert num_rows == len(self.rows[-1]), f"{num_rows} rows for {len(self.rows[-1])}"
        offsets = [0] * num_rows
        for lengths, rows in zip(self.lengths[:-1], self.rows[:-1], strict=True):
            offsets = [offset + lengths[row] for offset, row in zip(offsets, rows, strict=True)]
        return mx.array(offsets, mx.int32)

    def layout(self, num_new: int) -> Layout:
        """Which rows read which part of each level; the newest level is causal."""
        newest_lengths = self.lengths[-1]
        longest = max(newest_lengths)
        assert num_new >= longest, f"{num_new} columns for {longest} tokens"
        groups = []
        masks = []
        levels = zip(self.lengths[:-1], self.rows[:-1], self.widths, strict=True)
        for lengths, rows, width in levels:
            is_token = (mx.arange(width) < mx.array(lengths)[:, None])[:, None, None]
            has_padding = min(lengths) < width
            groups.append(make_group(rows, len(lengths), is_token if has_padding else None))
            masks.append(is_token[mx.array(rows)])

        whole = None
        if any(group.mask is not None for group in groups):
            masks.append(mx.tri(num_new, dtype=mx.bool_))
            shape = len(newest_lengths), 1, num_new
            whole = mx.concatenate(
                [mx.broadcast_to(mask, (*shape, mask.shape[-1])) for mask in masks], axis=-1
            )
        spans = None
        if min(newest_lengths) < num_new:
            begins = mx.zeros((len(newest_lengths),), mx.int32)
            spans = begins, mx.array(newest_lengths, dtype=mx.int32)
        return Layout([*groups, Group(mask="causal")], whole, spans)

    def to_flat_cache(self) -> KVCache:
        """
        A `KVCache` of the newest level's rows, to continue token by token.

        Each row follows a copy of its ancestors.
        """
        # the columns of each row, in the concatenated levels
        columns: list[list[int]] = [[] for _ in self.lengths[-1]]
        level_begin = 0
        for lengths, rows, width in zip(self.lengths, self.rows, self.widths, strict=True):
            for row, row_columns in zip(rows, columns, strict=True):
                begin = level_begin + row * width
                row_columns += range(begin, begin + lengths[row])
            level_begin += len(lengths) * width

        length = max(map(len, columns))
        padding = [length - len(row_columns) for row_columns in columns]
        index = mx.array(
            [[0] * pad + row_columns for pad, row_columns in zip(padding, columns, strict=True)]
        )
        cache = KVCache(self.kinds, length, mx.array(padding) if any(padding) else None)
        cache.advance(length)
        for layer, target in zip(self.layers, cache.layers, strict=True):
            layer.flatten(target, index)
        return cache
