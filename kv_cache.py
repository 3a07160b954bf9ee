"""
What a model keeps of past tokens: of a batch of rows, and of the slots of a decode batch.

A layer with attention keeps keys and values; what another kind keeps is beside it, as `layers/delta_state.py`. Rows
that share the token runs of their ancestors have `layers/tree_cache.py`.

`KVCache`: rows are right-aligned; a shorter one starts with `pad` columns that no query sees, and a row's position is
the column minus its padding. Buffers grow by 128 columns, so that a decode step writes in place.
`SlotCache`: a slot reads its prompt's cache in place or holds a copy, and keeps its own tokens in a ring, so a waiting
row can take the slot of an ended one.

Axes: N rows or slots, K kv heads, S capacity, P prompt columns, W columns of a ring, L new positions, D head dim;
R rows of a part that G query rows each share.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import mlx.core as mx

REFILL, SHRINK = 1 / 16, 1 / 4  # share of idle slots at which waiting rows take them, or they are dropped
CHUNK = 128  # columns; smaller chunks copy more often, larger ones waste memory on short completions


def round_up(length: int) -> int:
    """`length` rounded up to a multiple of CHUNK."""
    return -(-length // CHUNK) * CHUNK


class Group(NamedTuple):
    """Which of N query rows read which of the R rows of one part of a cache."""

    members: mx.array | None = None  # (R, G) the query rows of each row, padded with 0; None: row r * G + g, no padding
    places: mx.array | None = None  # (N,) each query row's index in the flattened (R, G)
    mask: mx.array | str | None = None  # (R, 1, 1, S) or with G = 1 (N, 1, L, S) boolean, "causal" with G = 1, or None


class Layout(NamedTuple):
    """Which tokens read which columns of a cache in parts."""

    groups: list[Group]  # one per part, in the order of `Parts`
    # (N, 1, L, S) boolean, of all parts joined into one; None if only the newest part needs a mask. Lazy
    whole: mx.array | None = None
    # (N,) each: the column where a row's new tokens begin, and where they end; the others are padding. None: no padding
    spans: tuple[mx.array, mx.array] | None = None


CAUSAL = Layout([Group(mask="causal")])  # one part, of the new tokens themselves
# Keys and values (R, K, S, D) of each part of a cache; a query attends to all parts. One part, of N rows, is the rule;
# there are more where rows share some.
Parts = list[tuple[mx.array, mx.array]]


class Cache(Protocol):
    """
    What a model needs from the past tokens: a state for each layer, positions and masks.

    A layer's state takes by `update` what the layer makes of the new tokens, once per forward pass. For keys and
    values, (N, heads, L, size) in the order of rows and positions, it returns everything that these tokens may read,
    themselves included; the `Layout` says which token reads which column. What it returned never changes afterwards.
    """

    layers: list[Any]

    def arrays(self) -> list[mx.array]:
        """Everything that the layers hold: to free the graph behind it by `mx.eval`, and to count its bytes."""
        return [array for layer in self.layers for array in layer.arrays()]

    def offsets(self, num_rows: int) -> mx.array:
        """The position of the first new token of each row, (N,) int32."""

    def layout(self, num_new: int) -> Layout:
        """What the next `num_new` tokens of each row read."""

    def advance(self, num_new: int) -> None:
        """Counts the columns of a forward pass, after it."""


Kinds = int | Sequence[str]  # of a model's layers, as `ModelConfig.layer_kinds`; a number: so many with attention
ATTENTION = ("full_attention", "unrotated_attention")
STATES: dict[str, Callable[[], Any]] = {}  # the empty state of layers of other kinds; each is beside its layer


class LayerCache:
    """
    Keys and values of one layer, each (N, K, S, D), with the first `length` columns written.

    Invariant: `length <= S`. No view of the buffers may outlive the step that made it: MLX writes a slice in place only
    if nothing else references the buffer (0.02 ms on 128 MiB; 160 ms when it must copy).
    """

    def __init__(self, capacity: int = 0):
        self.capacity = round_up(capacity)
        self.length = 0
        self.keys: mx.array | None = None
        self.values: mx.array | None = None

    def update(self, keys: mx.array, values: mx.array) -> Parts:
        """Appends (N, K, L, D) to both and returns all written columns, (N, K, length, D) each, as one part."""
        assert keys.shape == values.shape, f"keys {keys.shape}, values {values.shape}"
        if self.keys is not None:  # slice assignment would silently broadcast one row to all, or cast
            held, new = ((*array.shape[:2], array.shape[3], array.dtype) for array in (self.keys, keys))
            assert held == new, f"{held} != {new}"
        begin, end = self.length, self.length + keys.shape[2]
        if self.keys is None or end > self.keys.shape[2]:
            self.capacity = max(self.capacity, round_up(end))
            self.keys, self.values = self._grown(self.keys, keys), self._grown(self.values, values)
        assert self.values is not None and end <= self.capacity, f"{end} > {self.capacity}"
        self.keys[:, :, begin:end] = keys
        self.values[:, :, begin:end] = values
        self.length = end
        return [self.written(slice(None))]

    def slots(self, num_slots: int, width: int, share: bool) -> "SlotLayer":
        return SlotLayer(self, num_slots, round_up(width), share)

    def written(self, rows: slice | mx.array) -> tuple[mx.array, mx.array]:
        """The written columns of these rows, (R, K, length, D) each."""
        assert self.keys is not None and self.values is not None, "nothing was written"
        return self.keys[rows, :, : self.length], self.values[rows, :, : self.length]

    def arrays(self) -> list[mx.array]:
        """Both buffers; none before the first update."""
        return [buffer for buffer in (self.keys, self.values) if buffer is not None]

    def _grown(self, old: mx.array | None, new: mx.array) -> mx.array:
        num_rows, num_heads, _, head_dim = new.shape
        buffer = mx.zeros((num_rows, num_heads, self.capacity, head_dim), new.dtype)
        if old is not None:
            buffer[:, :, : self.length] = old[:, :, : self.length]
        return buffer


def make_layers(kinds: Kinds, attention: Callable[[], Any]) -> list[Any]:
    """An empty state for each layer."""
    kinds = ATTENTION[:1] * kinds if isinstance(kinds, int) else kinds
    return [attention() if kind in ATTENTION else STATES[kind]() for kind in kinds]


class KVCache(Cache):
    """
    The caches of all layers of a batch, and the alignment of its rows.

    pad: invisible columns before each row's first token, (N,) int32. None: all rows have the same length, and decoding
    needs no mask.
    """

    def __init__(self, kinds: Kinds, capacity: int = 0, pad: mx.array | None = None):
        self.layers = make_layers(kinds, lambda: LayerCache(capacity))
        self.pad = pad
        self.length = 0  # columns written so far, padding included

    def advance(self, num_new: int) -> None:
        self.length += num_new

    def unpadded(self, rows: slice | mx.array) -> mx.array | None:
        """Which written columns of these rows are no padding, (R, 1, 1, length) boolean; None without padding."""
        return None if self.pad is None else (mx.arange(self.length) >= self.pad[rows][:, None])[:, None, None]

    def offsets(self, num_rows: int) -> mx.array:
        """The position of the next token of each row, (N,) int32."""
        # Always an array: before 0.32, MLX's one-token rope with a scalar offset was wrong for batches on Metal.
        assert self.pad is None or self.pad.shape == (num_rows,), f"{self.pad.shape} != {num_rows} rows"
        next_column = mx.full((num_rows,), self.length, dtype=mx.int32)
        return next_column if self.pad is None else next_column - self.pad

    def layout(self, num_new: int) -> Layout:
        """One part for the next `num_new` queries, with the mask None, "causal", or (N, 1, L, length + L) boolean."""
        if self.pad is None:
            return CAUSAL if num_new > 1 else Layout([Group()])
        query = mx.arange(self.length, self.length + num_new)[:, None]
        column = mx.arange(self.length + num_new)[None]
        # A query in the padding sees itself: an all-false mask row gives NaN on some backends, and 0 * NaN in the
        # values would reach the real tokens.
        visible = (column >= self.pad[:, None, None]) | (column == query)
        begin = mx.clip(self.pad - self.length, 0, num_new)
        spans = begin, mx.full(begin.shape, num_new, mx.int32)
        return Layout([Group(mask=((column <= query) & visible)[:, None])], spans=spans)


def make_group(rows: list[int], num_blocks: int, mask: mx.array | str | None) -> Group:
    """The group in which query row n reads row `rows[n]` of a part with `num_blocks` rows."""
    members: list[list[int]] = [[] for _ in range(num_blocks)]
    for query_row, row in enumerate(rows):
        members[row].append(query_row)
    most = max(map(len, members))
    padded = [group + [0] * (most - len(group)) for group in members]
    if [n for group in padded for n in group] == list(range(len(rows))):
        return Group(mask=mask)
    place = {n: row * most + g for row, group in enumerate(members) for g, n in enumerate(group)}
    return Group(mx.array(padded), mx.array([place[n] for n in range(len(rows))]), mask)


class SlotLayer:
    """
    One layer of a `SlotCache`: for each slot a buffer that ends with a ring of W columns.

    If prompts are shared, the buffer is the ring, and `update` returns a view of the prompts in use and the ring.
    Otherwise the buffer (N, K, P + W, D) starts with a copy of the slot's prompt, and `update` returns it whole.
    """

    def __init__(self, prompts: LayerCache, num_slots: int, width: int, share: bool):
        self.prompts, self.width, self.step = prompts, width, 0
        self.ring = 0 if share else prompts.length  # the column where the ring begins
        self.in_use = slice(0, 0)  # of the prompts
        self.keys, self.values = (
            mx.zeros((num_slots, held.shape[1], self.ring + width, held.shape[3]), held.dtype)
            for held in prompts.written(slice(None))
        )

    def assign(self, prompt_of: list[int], begun: list[int], moved: list[int]) -> None:
        """Takes a view of the prompts in use, or copies its own to each slot in `moved`, which had another."""
        self.in_use = slice(min(prompt_of), max(prompt_of) + 1)
        if self.ring and moved:
            written = self.prompts.written(mx.array([prompt_of[slot] for slot in moved]))
            for buffer, held in zip(self.arrays(), written, strict=True):
                buffer[mx.array(moved), :, : self.ring] = held

    def keep(self, slots: mx.array) -> None:
        self.keys, self.values = self.keys[slots], self.values[slots]

    def arrays(self) -> list[mx.array]:
        """The slots' buffers, without the prompts'."""
        return [self.keys, self.values]

    def update(self, keys: mx.array, values: mx.array) -> Parts:
        """Writes one token per slot, (N, K, 1, D), into the ring."""
        num_slots, num_heads, _, head_dim = self.keys.shape  # slice assignment would silently broadcast one row to all
        assert keys.shape == values.shape == (num_slots, num_heads, 1, head_dim), f"{keys.shape}, {values.shape}"
        column = self.ring + self.step % self.width
        self.keys[:, :, column : column + 1] = keys
        self.values[:, :, column : column + 1] = values
        self.step += 1
        end = self.ring + min(self.step, self.width)
        own = self.keys[:, :, :end], self.values[:, :, :end]
        return [own] if self.ring else [self.prompts.written(self.in_use), own]


class SlotCache(Cache):
    """
    The cache of a decode batch in which waiting rows take the slots of ended ones.

    share: hold a prompt's columns once for all slots that continue it; otherwise each slot has a copy. All slots write
    to the same column of a ring as wide as the longest completion, so a row's own columns are the newest ones. Keys are
    rotated before they are stored, so their order does not matter.
    """

    def __init__(self, prompts: KVCache, num_slots: int, width: int, share: bool = True):
        self.prompts, self.num_slots, self.share = prompts, num_slots, share
        self.layers = [layer.slots(num_slots, width, share) for layer in prompts.layers]
        self.width, self.step = round_up(width), 0  # of a ring; decode steps so far
        self.most_bytes = sum(array.nbytes for array in prompts.arrays() + self.arrays())  # until slots are dropped
        self.prompt_of: list[int] = []  # each slot's prompt
        self.starts: list[int] = []  # the step at which each slot's row started

    def advance(self, num_new: int) -> None:
        self.step += num_new

    def assign(self, prompt_of: list[int], starts: list[int], begun: list[int] | None = None) -> None:
        """
        Sets each slot's prompt and the step at which its row started.

        begun: the slots whose rows begin; None: all. The others keep their columns.
        """
        assert len(prompt_of) == len(starts) and all(start <= self.step for start in starts)
        begun = list(range(len(prompt_of))) if begun is None else begun
        moved = [s for s in begun if self.prompt_of[s : s + 1] != [prompt_of[s]]]
        for layer in self.layers:
            layer.assign(prompt_of, begun, moved)
        self.prompt_of, self.starts = prompt_of, starts
        padding = 0 if self.prompts.pad is None else self.prompts.pad[mx.array(prompt_of)]
        self.start = mx.array(starts)
        self.first_position = self.prompts.length - padding - self.start
        if not self.share:
            self.prompt_mask = self.prompts.unpadded(mx.array(prompt_of))
            return
        first, last = min(prompt_of), max(prompt_of) + 1
        self.prompt_mask = self.prompts.unpadded(slice(first, last))
        self.readers = make_group([prompt - first for prompt in prompt_of], last - first, self.prompt_mask)

    def offsets(self, num_rows: int) -> mx.array:
        """The position of the next token of each slot, (N,) int32."""
        assert num_rows == len(self.starts), f"{num_rows} rows for {len(self.starts)} slots"
        return self.first_position + self.step

    def layout(self, num_new: int) -> Layout:
        """Prompts and rings if prompts are shared, else one part with the mask (N, 1, 1, P + W) boolean or None."""
        assert num_new == 1, f"a slot takes one token a step, not {num_new}"
        width = self.width
        used, own_mask = min(self.step + 1, width), None
        if any(self.starts):
            written_at = self.step - (self.step % width - mx.arange(used)) % width  # the step that wrote each column
            own_mask = (written_at >= self.start[:, None])[:, None, None]
        if self.share:
            return Layout([self.readers, Group(mask=own_mask)])
        if self.prompt_mask is None and own_mask is None:
            return Layout([Group()])
        before, own = (
            mx.ones((len(self.starts), 1, 1, length), mx.bool_) if mask is None else mask
            for mask, length in ((self.prompt_mask, self.prompts.length), (own_mask, used))
        )
        return Layout([Group(mask=mx.concatenate([before, own], axis=-1))])

    def keep(self, slots: list[int]) -> None:
        """Drops all slots but these, in this order."""
        index = mx.array(slots)
        for layer in self.layers:
            layer.keep(index)
        self.num_slots = len(slots)
        self.prompt_of, self.starts = ([held[slot] for slot in slots] for held in (self.prompt_of, self.starts))
        self.assign(self.prompt_of, self.starts, [])
