"""
What a model keeps of past tokens: of a batch of rows, and of the slots of a decode batch.

A layer with attention keeps keys and values, a gated delta net a state of fixed size. Rows that share the token runs of
their ancestors have `layers/tree_cache.py`.

`KVCache`: rows are right-aligned; a shorter one starts with `pad` columns that no query sees, and a row's position is
the column minus its padding. Buffers grow by 128 columns, so that a decode step writes in place.
`SlotCache`: a slot reads its prompt's cache in place or holds a copy, and counts the columns of its own tokens, so a
waiting row can take the slot of an ended one.

Axes: N rows or slots, M slots that get tokens, K kv heads, S capacity, P prompt columns, W own columns of a slot, L new
positions, D head dim; R rows of a part that G query rows each share.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import mlx.core as mx
import numpy as np

REFILL, SHRINK = 1 / 16, 1 / 4  # share of idle slots at which waiting rows take them, or they are dropped
CHUNK = 128  # columns; smaller chunks copy more often, larger ones waste memory on short completions


def round_up(length: int) -> int:
    """`length` rounded up to a multiple of CHUNK."""
    return -(-length // CHUNK) * CHUNK


Mask = mx.array | str | None


class Group(NamedTuple):
    """Which of N query rows read which of the R rows of one part of a cache."""

    members: mx.array | None = None  # (R, G) the query rows of each row, padded with 0; None: row r * G + g, no padding
    places: mx.array | None = None  # (N,) each query row's index in the flattened (R, G)
    mask: Mask = None  # (R, 1, 1, S) or with G = 1 (N, 1, L, S) boolean, "causal" with G = 1, or None


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


# ---- what a layer keeps


def widened(keys: mx.array, values: mx.array, num_columns: int) -> tuple[mx.array, mx.array]:
    """Both buffers with room for so many columns more."""
    more = [(0, 0), (0, 0), (0, num_columns), (0, 0)]
    return mx.pad(keys, more), mx.pad(values, more)


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
        if self.keys is None or self.values is None:
            self.keys, self.values = keys[:, :, :0], values[:, :, :0]
        # slice assignment would silently broadcast one row to all, or cast
        kept, new = ((*array.shape[:2], array.shape[3], array.dtype) for array in (self.keys, keys))
        assert kept == new, f"{kept} != {new}"
        begin, end = self.length, self.length + keys.shape[2]
        if end > self.keys.shape[2]:
            self.capacity = max(self.capacity, round_up(end))
            self.keys, self.values = widened(self.keys, self.values, self.capacity - self.keys.shape[2])
        self.keys[:, :, begin:end] = keys
        self.values[:, :, begin:end] = values
        self.length = end
        return [self.written(slice(None))]

    def written(self, rows: slice | mx.array) -> tuple[mx.array, mx.array]:
        """The written columns of these rows, (R, K, length, D) each."""
        assert self.keys is not None and self.values is not None, "nothing was written"
        return self.keys[rows, :, : self.length], self.values[rows, :, : self.length]

    def arrays(self) -> list[mx.array]:
        return [buffer for buffer in (self.keys, self.values) if buffer is not None]


class Aim(NamedTuple):
    """Which columns of a `SlotCache` the next tokens are written to."""

    slots: mx.array | None  # (M, 1) those that get tokens; None: all, one each, in one column
    columns: Any  # (M, L) of the buffers; the number of that column
    end: int  # columns of the buffers in use afterwards
    prompts: mx.array | None = None  # (M,) those to join in front of own columns; None: what is read are parts


class SlotLayer:
    """
    One layer of a `SlotCache`: for each slot a buffer that ends with W columns of its own, of which i has its token i.

    If prompts are shared, there are no others, and `update` returns a view of the prompts in use and the own columns.
    Otherwise the buffer (N, K, P + W, D) starts with a copy of the slot's prompt.
    """

    aim: Aim

    def __init__(self, prompts: LayerCache, num_slots: int, width: int, share: bool):
        self.prompts, self.first = prompts, 0 if share else prompts.length  # own column
        self.in_use = slice(0, 0)  # of the prompts
        self.keys, self.values = (
            mx.zeros((num_slots, array.shape[1], self.first + width, array.shape[3]), array.dtype)
            for array in prompts.written(slice(None))
        )

    def assign(self, prompt_of: list[int], begun: list[int], moved: list[int]) -> None:
        """Takes a view of the prompts in use, or copies its own to each slot in `moved`, which had another."""
        self.in_use = slice(min(prompt_of), max(prompt_of) + 1)
        if self.first and moved:
            written = self.prompts.written(mx.array([prompt_of[slot] for slot in moved]))
            for buffer, array in zip(self.arrays(), written, strict=True):
                buffer[mx.array(moved), :, : self.first] = array

    def widen(self, num_columns: int) -> None:
        """Makes room for so many columns more."""
        self.keys, self.values = widened(self.keys, self.values, num_columns)

    def keep(self, slots: mx.array) -> None:
        self.keys, self.values = self.keys[slots], self.values[slots]

    def arrays(self) -> list[mx.array]:
        """The slots' buffers, without the prompts'."""
        return [self.keys, self.values]

    def update(self, keys: mx.array, values: mx.array) -> Parts:
        """Writes (M, K, L, D) each where `aim` says, and returns what the slots that get tokens may read."""
        slots, columns, end, prompts = self.aim
        num, length = (len(self.keys), 1) if slots is None else columns.shape
        # assignment would silently broadcast one row to all
        shape = num, self.keys.shape[1], length, self.keys.shape[3]
        assert keys.shape == values.shape == shape, f"{keys.shape}, {values.shape}, not {shape}"
        for buffer, new in ((self.keys, keys), (self.values, values)):
            if slots is None:
                buffer[:, :, columns : columns + 1] = new
            else:
                buffer[slots, :, columns] = new.swapaxes(1, 2)
        own = self.keys[:, :, :end], self.values[:, :, :end]
        if prompts is None:
            return [own] if self.first else [self.prompts.written(self.in_use), own]
        assert slots is not None
        own = own[0][slots[:, 0]], own[1][slots[:, 0]]
        if self.first:
            return [own]
        before = self.prompts.written(prompts)
        return [(mx.concatenate([before[0], own[0]], axis=2), mx.concatenate([before[1], own[1]], axis=2))]


class DeltaState:
    """
    What a gated delta net keeps: of a batch of rows, or of the rows of a tree's newest level.

    parts: none before the first tokens, then one: the last inputs of its convolution, (N, window - 1, channels), and
    its memory, (N, value heads, value dim, key dim) float32. Arrays are replaced, never written, so gradients go
    through them.
    """

    def __init__(self, parts: Parts | None = None):
        self.parts = parts or []

    @property
    def newest(self) -> tuple[mx.array, mx.array] | None:
        """What the next tokens begin with."""
        return self.parts[0] if self.parts else None

    def update(self, inputs: mx.array, memory: mx.array) -> None:
        self.parts = [(inputs, memory)]

    def arrays(self) -> list[mx.array]:
        return [array for part in self.parts for array in part]

    def taken(self, rows: Sequence[int]) -> "DeltaState":
        """The state of each of these rows."""
        index = mx.array(list(rows))
        return DeltaState([(inputs[index], memory[index]) for inputs, memory in self.parts])

    def child(self, rows_of: Sequence[slice | mx.array], parents: Sequence[int]) -> "DeltaState":
        """What the rows of a tree's next level begin with: the states of their parents."""
        return self.taken(parents)

    def flatten(self, target: "DeltaState", index: mx.array) -> None:
        """The state of a tree's newest level is that of its rows."""
        target.parts = self.parts


class DeltaSlots(DeltaState):
    """
    A gated delta net's state of each slot, which begins with a copy of its prompt's.

    It cannot be set back, as columns can. Where rows take turns, a slot draws one token more before the end of its turn
    is read: so the state before the newest token is kept too, and who goes on puts that of the end back.
    """

    aimed: mx.array | None = None  # the slots that the next tokens are of; None: all, one each
    keeps_before = False
    before: Parts

    def __init__(self, prompts: DeltaState, num_slots: int):
        self.prompts = prompts
        super().__init__(prompts.taken([0] * num_slots).parts)

    @property
    def newest(self) -> tuple[mx.array, mx.array] | None:
        ((inputs, memory),) = self.parts
        return (inputs, memory) if self.aimed is None else (inputs[self.aimed], memory[self.aimed])

    def update(self, inputs: mx.array, memory: mx.array) -> None:
        if self.aimed is not None:
            return self.put(self.aimed, (inputs, memory))
        if self.keeps_before:
            self.before = self.parts
        self.parts = [(inputs, memory)]

    def assign(self, prompt_of: list[int], begun: list[int], moved: list[int]) -> None:
        """Gives the slots in `begun` their prompt's state, also where the prompt was the slot's before."""
        if begun:
            self.put(mx.array(begun), self.prompts.taken([prompt_of[slot] for slot in begun]).parts[0])

    def put(self, slots: mx.array, state: tuple[mx.array, mx.array]) -> None:
        """Makes this the state of some slots."""
        for buffer, array in zip(self.arrays(), state, strict=True):
            buffer[slots] = array

    def take(self, slot: int, num_extra: int) -> tuple[mx.array, mx.array]:
        """The state of a slot without its newest `num_extra` tokens, 0 or 1."""
        ((inputs, memory),) = self.before if num_extra else self.parts
        return inputs[slot : slot + 1], memory[slot : slot + 1]

    def keep(self, slots: mx.array) -> None:
        self.parts = [(inputs[slots], memory[slots]) for inputs, memory in self.parts]


def make_layers(kinds: Sequence[str], attention: Callable[[], Any]) -> list[Any]:
    """An empty state for each layer, whose kinds are those of `ModelConfig.layer_kinds`."""
    return [DeltaState() if kind == "linear_attention" else attention() for kind in kinds]


# ---- what a model keeps


class KVCache(Cache):
    """
    The caches of all layers of a batch, and the alignment of its rows.

    pad: invisible columns before each row's first token, (N,) int32. None: all rows have the same length, and decoding
    needs no mask.
    """

    def __init__(self, kinds: Sequence[str], capacity: int = 0, pad: mx.array | None = None):
        self.layers, self.pad = make_layers(kinds, lambda: LayerCache(capacity)), pad
        self.length = 0  # columns written so far, padding included

    def advance(self, num_new: int) -> None:
        self.length += num_new

    def unpadded(self, rows: slice | mx.array) -> mx.array | None:
        """Which written columns of these rows are no padding, (R, 1, 1, length) boolean; None without padding."""
        return None if self.pad is None else (mx.arange(self.length) >= self.pad[rows][:, None])[:, None, None]

    def offsets(self, num_rows: int) -> mx.array:
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


def make_group(rows: list[int], num_blocks: int, mask: Mask) -> Group:
    """The group in which query row n reads row `rows[n]` of a part with `num_blocks` rows."""
    members = [[n for n, row in enumerate(rows) if row == block] for block in range(num_blocks)]
    most = max(map(len, members))
    padded = np.array([group + [0] * (most - len(group)) for group in members])
    if np.array_equal(padded.ravel(), np.arange(len(rows))):
        return Group(mask=mask)
    return Group(mx.array(padded), mx.array([row * most + members[row].index(n) for n, row in enumerate(rows)]), mask)


class SlotCache(Cache):
    """
    The cache of a decode batch in which waiting rows take the slots of ended ones.

    share: hold a prompt's columns once for all slots that continue it; otherwise each slot has a copy. width: room for
    own tokens, which `aim` widens. Each slot counts its own columns, in `lengths`; who sets them back has what is newer
    overwritten. `aim` comes before each forward pass: a token for every slot, or several, padded right, for some.
    """

    def __init__(self, prompts: KVCache, num_slots: int, width: int = 0, share: bool = True):
        self.prompts, self.num_slots, self.share = prompts, num_slots, share
        self.width, self.first = round_up(width), 0 if share else prompts.length  # the own columns of each buffer
        self.layers = [
            DeltaSlots(layer, num_slots)
            if isinstance(layer, DeltaState)
            else SlotLayer(layer, num_slots, self.width, share)
            for layer in prompts.layers
        ]
        self.nets = [layer for layer in self.layers if isinstance(layer, DeltaSlots)]
        self.attentions = [layer for layer in self.layers if isinstance(layer, SlotLayer)]
        self.prompt_of: list[int] = []  # each slot's prompt
        self.lengths = np.zeros(num_slots, int)  # own columns of each slot
        self.most_bytes = 0
        self._count()

    def _count(self) -> None:
        self.most_bytes = max(self.most_bytes, sum(one.nbytes for one in self.prompts.arrays() + self.arrays()))

    def assign(self, prompt_of: list[int], begun: list[int] | None = None) -> None:
        """Sets each slot's prompt. begun: the slots whose rows begin; None: all. The others keep their columns."""
        begun = list(range(len(prompt_of))) if begun is None else begun
        moved = [s for s in begun if self.prompt_of[s : s + 1] != [prompt_of[s]]]
        for layer in self.layers:
            layer.assign(prompt_of, begun, moved)
        self.prompt_of, self.lengths[begun] = prompt_of, 0
        self.first_position = np.full(len(prompt_of), self.prompts.length)
        if self.prompts.pad is not None:
            self.first_position -= np.array(self.prompts.pad)[prompt_of]
        if not self.share:
            self.prompt_mask = self.prompts.unpadded(mx.array(prompt_of))
            return
        first, last = min(prompt_of), max(prompt_of) + 1
        self.prompt_mask = self.prompts.unpadded(slice(first, last))
        self.readers = make_group([prompt - first for prompt in prompt_of], last - first, self.prompt_mask)

    def aim(self, num_new: dict[int, int] | None = None) -> None:
        """How many of the next tokens each slot gets; None: all one each."""
        self.aimed = np.arange(self.num_slots) if num_new is None else np.array(list(num_new))
        self.num_new = np.array(list(num_new.values()) if num_new else 1)
        begins, most = self.lengths[self.aimed], int(self.num_new.max())
        used = int(begins.max()) + most
        if (more := round_up(used) - self.width) > 0:
            for layer in self.attentions:
                layer.widen(more)
            self.width += more
            self._count()
        if num_new is None and begins.min() == used - 1:
            self.target = Aim(None, self.first + used - 1, self.first + used)
        else:
            prompts = mx.array([self.prompt_of[slot] for slot in num_new]) if num_new else None
            columns = mx.array(self.first + begins[:, None] + np.arange(most))
            self.target = Aim(mx.array(self.aimed[:, None]), columns, self.first + used, prompts)
        for layer in self.attentions:
            layer.aim = self.target
        for net in self.nets:
            net.aimed = mx.array(self.aimed) if num_new else None

    def advance(self, num_new: int) -> None:
        self.lengths[self.aimed] += self.num_new

    def offsets(self, num_rows: int) -> mx.array:
        """The position of the next token of each slot that gets some, (M,) int32."""
        assert num_rows == len(self.aimed), f"{num_rows} rows for {len(self.aimed)} slots"
        return mx.array((self.first_position + self.lengths)[self.aimed].astype(np.int32))

    def layout(self, num_new: int) -> Layout:
        """Prompts and own columns if all slots share prompts, else one part with the mask (M, 1, L, P + W) or None."""
        slots, _, end, prompts = self.target
        own, used, spans = None, end - self.first, None
        if slots is not None:
            last = mx.array(self.lengths[self.aimed][:, None, None, None] + np.arange(num_new)[:, None])
            own = mx.arange(used) <= last  # (M, 1, L, W)
        if self.share and prompts is None:
            return Layout([self.readers, Group(mask=own)])
        if prompts is not None:
            spans = mx.zeros(len(self.aimed), mx.int32), mx.array(self.num_new.astype(np.int32))
        before = self.prompt_mask if prompts is None else self.prompts.unpadded(prompts)
        if before is None and own is None:
            return Layout([Group()])
        shape = len(self.aimed), 1, num_new
        masks = [
            mx.ones((*shape, length), mx.bool_) if mask is None else mx.broadcast_to(mask, (*shape, length))
            for mask, length in ((before, self.prompts.length), (own, used))
        ]
        return Layout([Group(mask=mx.concatenate(masks, axis=-1))], spans=spans)

    def keep(self, slots: list[int]) -> None:
        """Drops all slots but these, in this order."""
        for layer in self.layers:
            layer.keep(mx.array(slots))
        self.num_slots, self.lengths = len(slots), self.lengths[slots]
        self.assign([self.prompt_of[slot] for slot in slots], [])
