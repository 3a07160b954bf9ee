"""
A cache for a tree of token sequences, in which rows share the keys and values of their ancestors.

Axes: N rows of the newest level, R rows of any level, K key/value heads, S positions of any level,
L new positions, W columns of a row and all its ancestors together, D dimensions per head.
"""

from collections.abc import Sequence

import cpu_blas  # noqa: F401  (before mlx)
import mlx.core as mx

from kv_cache import (
    AttentionMasks,
    Cache,
    KVCache,
    LayerCache,
    Parts,
    QueryRowsReadingCachePart,
    make_empty_layers,
    make_part_readers,
)


class TreeLayer:
    """
    The keys and values of one layer of a `TreeCache`.

    Each level of the tree has an array of keys and an array of values, (R, K, S, D) each.
    """

    def __init__(self, parts: Parts):
        self.parts = parts

    def update(self, keys: mx.array, values: mx.array) -> Parts:
        """
        Adds the keys and values of the newest level, (N, K, L, D) each.

        Returns the keys and values of all levels, which the newest level's queries may read.
        """
        self.parts.append((keys, values))
        return self.parts

    def arrays(self) -> list[mx.array]:
        return [array for part in self.parts for array in part]

    def copy_to_flat_layer(self, target: LayerCache, column_indices: mx.array) -> None:
        """
        Appends the columns of each row and its ancestors to the `target`, which has N rows.

        column_indices (N, W): the indices of these columns in the concatenation of all levels.
        """
        level_keys = [keys for keys, _ in self.parts]
        level_values = [values for _, values in self.parts]
        keys = flatten_and_join_levels(level_keys)
        values = flatten_and_join_levels(level_values)
        row_keys = keys[column_indices].swapaxes(1, 2)
        row_values = values[column_indices].swapaxes(1, 2)
        target.update(row_keys, row_values)

    def copy_with_only_ancestor_rows(
        self, ancestor_rows_of_level: Sequence[slice | mx.array], parents: Sequence[int]
    ) -> "TreeLayer":
        """A layer with only those rows of each level that the rows of a new level can read."""
        parts = [
            (keys[rows], values[rows])
            for (keys, values), rows in zip(self.parts, ancestor_rows_of_level, strict=True)
        ]
        return TreeLayer(parts)


def flatten_and_join_levels(level_arrays: list[mx.array]) -> mx.array:
    """
    Joins the columns of every row and level into one array.

    Shapes: (R, K, S, D) for each level -> (sum of R * S, K, D).
    """
    columns = []
    for level in level_arrays:
        _, num_heads, _, size = level.shape
        columns.append(level.swapaxes(1, 2).reshape(-1, num_heads, size))
    return mx.concatenate(columns)


class TreeCache(Cache):
    """
    A cache for a tree of token sequences, in which each row continues a row of the level above.

    A row sees all its ancestors, whose keys and values are stored only once for all descendants.
    A gated delta net stores only the state at the end of each row of the newest level. One forward
    pass computes all rows of a level, padded on the right. No array is written in place. Gradients
    can therefore be computed, and `with_new_level` can be called several times on the same cache.
    In this example, three questions continue the same preamble:

        preamble = TreeCache(config.layer_kinds).with_new_level([len(ids)])
        model.hidden(preamble_tokens, preamble)
        questions = preamble.with_new_level(lengths, parents=[0, 0, 0])
        model.hidden(question_tokens, questions)
    """

    def __init__(self, kinds: Sequence[str]):
        self.kinds = kinds
        self.layers = make_empty_layers(kinds, lambda: TreeLayer([]))
        self.widths: list[int] = []  # the width of each computed level, including padding
        self.lengths: list[list[int]] = []  # the lengths of the rows of each level, root first

        # for each level, including the newest, the row that each row of the newest level continues
        self.rows: list[list[int]] = []

    def with_new_level(
        self, row_lengths: list[int], parents: list[int] | None = None
    ) -> "TreeCache":
        """
        A new cache with one more level, whose rows have the given lengths.

        The new cache contains only those rows of this cache that are ancestors of the new rows.

        parents: for each new row, the index of the row that it continues. These indices refer to
        the newest level of this cache. If this cache has no level yet, `parents` is None.
        """
        assert not self.rows or len(parents or []) == len(row_lengths), (
            "each new row needs a parent row"
        )
        extended = TreeCache(self.kinds)
        extended.widths = list(self.widths)
        ancestor_rows_of_level: list[slice | mx.array] = []
        for level_lengths, row_of in zip(self.lengths, self.rows, strict=True):
            assert parents, "each new row needs a parent row"
            is_known = min(parents) >= 0 and max(parents) < len(row_of)
            assert is_known, f"the parents are {parents}, but the level has {len(row_of)} rows"
            rows = [row_of[parent] for parent in parents]
            used = sorted(set(rows))
            is_consecutive = used == list(range(used[0], used[-1] + 1))
            # indexing with a slice makes no copy
            index = slice(used[0], used[-1] + 1) if is_consecutive else mx.array(used)
            ancestor_rows_of_level.append(index)
            extended.lengths.append([level_lengths[row] for row in used])
            extended.rows.append([used.index(row) for row in rows])
        extended.lengths.append(row_lengths)
        extended.rows.append(list(range(len(row_lengths))))
        extended.layers = [
            layer.copy_with_only_ancestor_rows(ancestor_rows_of_level, parents or [])
            for layer in self.layers
        ]
        return extended

    def advance(self, num_new: int) -> None:
        self.widths.append(num_new)

    def next_positions(self, num_rows: int) -> mx.array:
        num_expected = len(self.rows[-1])
        assert num_rows == num_expected, f"{num_rows} rows, but the level has {num_expected}"
        offsets = [0] * num_rows
        for lengths, rows in zip(self.lengths[:-1], self.rows[:-1], strict=True):
            offsets = [offset + lengths[row] for offset, row in zip(offsets, rows, strict=True)]
        return mx.array(offsets, mx.int32)

    def attention_masks(self, num_new: int) -> AttentionMasks:
        """
        Masks that say what each row of the newest level may read in every level.

        In earlier levels, a row may read all tokens of its ancestors. In the newest level, a row
        may read its own tokens, with a causal mask.
        """
        newest_lengths = self.lengths[-1]
        longest = max(newest_lengths)
        assert num_new >= longest, f"{num_new} columns are too few for {longest} tokens"
        part_readers = []
        masks = []
        levels = zip(self.lengths[:-1], self.rows[:-1], self.widths, strict=True)
        for lengths, rows, width in levels:
            is_token = (mx.arange(width) < mx.array(lengths)[:, None])[:, None, None]
            has_padding = min(lengths) < width
            part_readers.append(
                make_part_readers(rows, len(lengths), is_token if has_padding else None)
            )
            masks.append(is_token[mx.array(rows)])

        whole = None
        if any(readers.mask is not None for readers in part_readers):
            masks.append(mx.tri(num_new, dtype=mx.bool_))
            shape = len(newest_lengths), 1, num_new
            whole = mx.concatenate(
                [mx.broadcast_to(mask, (*shape, mask.shape[-1])) for mask in masks], axis=-1
            )
        spans = None
        if min(newest_lengths) < num_new:
            begins = mx.zeros((len(newest_lengths),), mx.int32)
            spans = begins, mx.array(newest_lengths, dtype=mx.int32)
        return AttentionMasks(
            [*part_readers, QueryRowsReadingCachePart(mask="causal")], whole, spans
        )

    def to_flat_cache(self) -> KVCache:
        """
        A `KVCache` that can continue the newest level's rows token by token.

        Each row of the `KVCache` contains copies of the row's ancestors, and then the row itself.
        """
        # the indices of each row's columns in the concatenated levels
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
            layer.copy_to_flat_layer(target, index)
        return cache
