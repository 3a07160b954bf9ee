"""
Caches of past tokens, for a batch of rows and for the slots of a decode batch.

A layer with attention keeps keys and values; a gated delta net keeps a state of fixed size. Rows
that share token runs with other rows have another cache, which is in layers/tree_cache.py.

`KVCache`: rows are right-aligned. A shorter row starts with `pad` columns that no query sees, and a
row's position is the column minus its padding. Buffers grow by 128 columns, so that a decode step
writes in place.
`SlotCache`: a slot reads its prompt's cache in place or holds a copy, and counts the columns of its
own tokens, so that a waiting row can take the slot of a complete one.

Axes: N rows or slots, M slots that get tokens, K kv heads, S capacity, P prompt columns, W columns
of a slot's own tokens, L new positions, D head dim; R rows of a part that G query rows each share.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import mlx.core as mx
import numpy as np

REFILL = 1 / 16  # fraction of idle slots at which waiting rows take them
SHRINK = 1 / 4  # fraction of idle slots at which these are dropped, once no row waits
CHUNK = 128  # columns; smaller chunks copy more often, larger ones waste memory on short rows


def round_up(length: int) -> int:
    """`length` rounded up to a multiple of CHUNK."""
    return -(-length // CHUNK) * CHUNK


Mask = mx.array | str | None


class Group(NamedTuple):
    """Which cache row each query row reads: N query rows, R rows of one part of a cache."""

    # (R, G) the query rows that read each row, padded with 0. None: rows r * G + g, unpadded
    members: mx.array | None = None
    # (N,) each query row's index in the flattened (R, G)
    places: mx.array | None = None
    # (R, 1, 1, S) boolean, or None. With G = 1 it may also be (N, 1, L, S) boolean or "causal"
    mask: Mask = None


class Layout(NamedTuple):
    """Which columns of a cache each new token reads, part by part."""

    groups: list[Group]  # one per part, in the order of `Parts`
    # the mask of all parts joined into one, (N, 1, L, S) boolean, which MLX computes only if it is
    # used. None: only the newest part needs a mask.
    whole: mx.array | None = None
    # (N,) each: the column where a row's new tokens begin, and where they end. The other columns
    # are padding. None: no padding
    spans: tuple[mx.array, mx.array] | None = None


CAUSAL = Layout([Group(mask="causal")])  # one part: the new tokens themselves
# Keys and values (R, K, S, D) of each part of a cache; a query attends to all parts. Usually there
# is one part, of N rows. There are more parts where rows share columns.
Parts = list[tuple[mx.array, mx.array]]


class Cache(Protocol):
    """
    The past tokens as a model sees them: a state for each layer, positions and masks.

    Once per forward pass, a layer passes the arrays that it computed for the new tokens to its
    state's `update`. For keys and values, (N, heads, L, size) in the order of rows and positions,
    `update` returns all keys and values that these tokens may read, including their own. The
    `Layout` says which token reads which column. The returned arrays never change afterwards.
    """

    layers: list[Any]

    def arrays(self) -> list[mx.array]:
        """All arrays of the layers: `mx.eval` them to free the graph, or count their bytes."""
        return [array for layer in self.layers for array in layer.arrays()]

    def offsets(self, num_rows: int) -> mx.array:
        """The position of the first new token of each row, (N,) int32."""

    def layout(self, num_new: int) -> Layout:
        """Which columns the next `num_new` tokens of each row read."""

    def advance(self, num_new: int) -> None:
        """Counts the columns that a forward pass added. It is called after the pass."""


# ---- what a layer keeps


def widen_buffers(keys: mx.array, values: mx.array, num_added: int) -> tuple[mx.array, mx.array]:
    """Both buffers with room for `num_added` more columns."""
    padding = [(0, 0), (0, 0), (0, num_added), (0, 0)]
    return mx.pad(keys, padding), mx.pad(values, padding)


class LayerCache:
    """
    Keys and values of one layer, each (N, K, S, D), with the first `length` columns written.

    Invariant: `length <= S`. No view of the buffers may outlive the step that made it: MLX writes a
    slice in place only if nothing else references the buffer (which takes 0.02 ms on 128 MiB; a
    copy takes 160 ms).
    """

    def __init__(self, capacity: int = 0):
        self.capacity = round_up(capacity)
        self.length = 0
        self.keys: mx.array | None = None
        self.values: mx.array | None = None

    def update(self, keys: mx.array, values: mx.array) -> Parts:
        """Appends (N, K, L, D) each. Returns all columns, (N, K, length, D) each, as one part."""
        assert keys.shape == values.shape, f"keys {keys.shape}, values {values.shape}"
        if self.keys is None or self.values is None:
            self.keys = keys[:, :, :0]
            self.values = values[:, :, :0]
        # slice assignment would silently broadcast one row to all, or cast
        stored = (*self.keys.shape[:2], self.keys.shape[3], self.keys.dtype)
        new = (*keys.shape[:2], keys.shape[3], keys.dtype)
        assert stored == new, f"{stored} != {new}"

        begin = self.length
        end = begin + keys.shape[2]
        if end > self.keys.shape[2]:
            self.capacity = max(self.capacity, round_up(end))
            num_columns = self.capacity - self.keys.shape[2]
            self.keys, self.values = widen_buffers(self.keys, self.values, num_columns)
        self.keys[:, :, begin:end] = keys
        self.values[:, :, begin:end] = values
        self.length = end
        return [self.select_rows(slice(None))]

    def select_rows(self, rows: slice | mx.array) -> tuple[mx.array, mx.array]:
        """The written columns of some rows, (R, K, length, D) each."""
        assert self.keys is not None and self.values is not None, "nothing was written"
        return self.keys[rows, :, : self.length], self.values[rows, :, : self.length]

    def arrays(self) -> list[mx.array]:
        return [buffer for buffer in (self.keys, self.values) if buffer is not None]


class WritePlan(NamedTuple):
    """Which columns of a `SlotCache` the next tokens are written to."""

    # (M, 1) the slots that get tokens. None: each slot gets one, all in the same column
    slots: mx.array | None
    columns: Any  # (M, L) columns of the buffers; if `slots` is None, the number of that one column
    end: int  # the number of columns of the buffers in use afterwards
    # (M,) the prompts to put before the own columns. None: `update` returns the parts as they are
    prompts: mx.array | None = None


class SlotLayer:
    """
    One layer of a `SlotCache`: a buffer per slot, whose last W columns are the slot's own.

    Own column i holds the slot's token i. If prompts are shared, a buffer has no other columns, and
    `update` returns a view of the prompts in use beside the own columns. Otherwise the buffer
    (N, K, P + W, D) starts with a copy of the slot's prompt.
    """

    write_plan: WritePlan

    def __init__(self, prompts: LayerCache, num_slots: int, width: int, share: bool):
        self.prompts = prompts
        self.first_own = 0 if share else prompts.length
        self.in_use = slice(0, 0)  # which prompts have slots
        prompt_keys, prompt_values = prompts.select_rows(slice(None))
        num_columns = self.first_own + width
        self.keys = make_slot_buffer(prompt_keys, num_slots, num_columns)
        self.values = make_slot_buffer(prompt_values, num_slots, num_columns)

    def assign(self, prompt_of: list[int], new_slots: list[int], moved: list[int]) -> None:
        """
        Takes a view of the prompts in use, or copies each slot's prompt into its buffer.

        moved: the slots that had another prompt before; only these are copied.
        """
        self.in_use = slice(min(prompt_of), max(prompt_of) + 1)
        if self.first_own and moved:
            rows = mx.array([prompt_of[slot] for slot in moved])
            for buffer, array in zip(self.arrays(), self.prompts.select_rows(rows), strict=True):
                buffer[mx.array(moved), :, : self.first_own] = array

    def widen(self, num_columns: int) -> None:
        """Makes room for `num_columns` more columns."""
        self.keys, self.values = widen_buffers(self.keys, self.values, num_columns)

    def select_slots(self, slots: mx.array) -> None:
        self.keys = self.keys[slots]
        self.values = self.values[slots]

    def arrays(self) -> list[mx.array]:
        """The slots' buffers, without the prompts'."""
        return [self.keys, self.values]

    def update(self, keys: mx.array, values: mx.array) -> Parts:
        """Writes (M, K, L, D) each as planned, and returns what these slots may read."""
        slots, columns, end, prompts = self.write_plan
        num_slots, length = (len(self.keys), 1) if slots is None else columns.shape
        # assignment would silently broadcast one row to all
        shape = num_slots, self.keys.shape[1], length, self.keys.shape[3]
        assert keys.shape == values.shape == shape, f"{keys.shape}, {values.shape}, not {shape}"
        for buffer, new in ((self.keys, keys), (self.values, values)):
            if slots is None:
                buffer[:, :, columns : columns + 1] = new
            else:
                buffer[slots, :, columns] = new.swapaxes(1, 2)

        own_keys = self.keys[:, :, :end]
        own_values = self.values[:, :, :end]
        if prompts is None:
            if self.first_own:
                return [(own_keys, own_values)]
            return [self.prompts.select_rows(self.in_use), (own_keys, own_values)]

        assert slots is not None
        own_keys = own_keys[slots[:, 0]]
        own_values = own_values[slots[:, 0]]
        if self.first_own:
            return [(own_keys, own_values)]
        prompt_keys, prompt_values = self.prompts.select_rows(prompts)
        joined_keys = mx.concatenate([prompt_keys, own_keys], axis=2)
        joined_values = mx.concatenate([prompt_values, own_values], axis=2)
        return [(joined_keys, joined_values)]


def make_slot_buffer(prompt_array: mx.array, num_slots: int, num_columns: int) -> mx.array:
    """Zeros for the slots, (num_slots, K, num_columns, D), in the heads and type of the prompts."""
    _, num_heads, _, size = prompt_array.shape
    return mx.zeros((num_slots, num_heads, num_columns, size), prompt_array.dtype)


class DeltaState:
    """
    A gated delta net's state for a batch of rows, or for the rows of a tree's newest level.

    parts: empty before the first tokens. Then it has one entry: the last inputs of the convolution,
    (N, window - 1, channels), and the memory, (N, value heads, value dim, key dim) float32. Arrays
    are replaced and never written in place, so gradients go through them.
    """

    def __init__(self, parts: Parts | None = None):
        self.parts = parts or []

    @property
    def newest(self) -> tuple[mx.array, mx.array] | None:
        """The state that the next tokens begin with."""
        return self.parts[0] if self.parts else None

    def update(self, inputs: mx.array, memory: mx.array) -> None:
        self.parts = [(inputs, memory)]

    def arrays(self) -> list[mx.array]:
        return [array for part in self.parts for array in part]

    def select_rows(self, rows: Sequence[int]) -> "DeltaState":
        """The state of some rows."""
        index = mx.array(list(rows))
        return DeltaState([(inputs[index], memory[index]) for inputs, memory in self.parts])

    def extend(self, rows_of: Sequence[slice | mx.array], parents: Sequence[int]) -> "DeltaState":
        """The state of the parents, with which the rows of a tree's next level begin."""
        return self.select_rows(parents)

    def flatten(self, target: "DeltaState", index: mx.array) -> None:
        """Gives `target` the state of a tree's newest level, which has one state per row."""
        target.parts = self.parts


class DeltaSlots(DeltaState):
    """
    A gated delta net's state for each slot, which begins as a copy of the prompt's state.

    A state cannot be set back to an earlier token, as columns can. Where rows take turns, a slot
    draws one more token before the end of its turn is read. So the state before the newest token is
    stored too, and a row that continues gets back its state at the end of the turn.
    """

    # the slots that the next tokens belong to; None: all, one each
    write_plan: mx.array | None = None
    keeps_before = False
    before: Parts

    def __init__(self, prompts: DeltaState, num_slots: int):
        self.prompts = prompts
        super().__init__(prompts.select_rows([0] * num_slots).parts)

    @property
    def newest(self) -> tuple[mx.array, mx.array] | None:
        ((inputs, memory),) = self.parts
        if self.write_plan is None:
            return inputs, memory
        return inputs[self.write_plan], memory[self.write_plan]

    def update(self, inputs: mx.array, memory: mx.array) -> None:
        if self.write_plan is not None:
            self.set_state(self.write_plan, (inputs, memory))
            return
        if self.keeps_before:
            self.before = self.parts
        self.parts = [(inputs, memory)]

    def assign(self, prompt_of: list[int], new_slots: list[int], moved: list[int]) -> None:
        """Gives each new slot the state of its prompt, even if the slot had the same prompt."""
        if new_slots:
            states = self.prompts.select_rows([prompt_of[slot] for slot in new_slots])
            self.set_state(mx.array(new_slots), states.parts[0])

    def set_state(self, slots: mx.array, state: tuple[mx.array, mx.array]) -> None:
        """Replaces the state of some slots."""
        for buffer, array in zip(self.arrays(), state, strict=True):
            buffer[slots] = array

    def get_state(self, slot: int, num_extra: int) -> tuple[mx.array, mx.array]:
        """The state of a slot without its newest `num_extra` tokens, 0 or 1."""
        ((inputs, memory),) = self.before if num_extra else self.parts
        return inputs[slot : slot + 1], memory[slot : slot + 1]

    def select_slots(self, slots: mx.array) -> None:
        self.parts = [(inputs[slots], memory[slots]) for inputs, memory in self.parts]


def make_layers(kinds: Sequence[str], make_attention_layer: Callable[[], Any]) -> list[Any]:
    """An empty state for each layer, by its kind as in `ModelConfig.layer_kinds`."""
    layers: list[Any] = []
    for kind in kinds:
        is_linear = kind == "linear_attention"
        layers.append(DeltaState() if is_linear else make_attention_layer())
    return layers


# ---- what a model keeps


class KVCache(Cache):
    """
    The caches of all layers of a batch, and the alignment of its rows.

    pad: invisible columns before each row's first token, (N,) int32. None: all rows have the same
    length, and decoding needs no mask.
    """

    def __init__(self, kinds: Sequence[str], capacity: int = 0, pad: mx.array | None = None):
        self.layers = make_layers(kinds, lambda: LayerCache(capacity))
        self.pad = pad
        self.length = 0  # columns written so far, padding included

    def advance(self, num_new: int) -> None:
        self.length += num_new

    def unpadded_mask(self, rows: slice | mx.array) -> mx.array | None:
        """True where a written column is not padding, (R, 1, 1, length); None without padding."""
        if self.pad is None:
            return None
        return (mx.arange(self.length) >= self.pad[rows][:, None])[:, None, None]

    def offsets(self, num_rows: int) -> mx.array:
        # Always an array: before 0.32, MLX's one-token rope with a scalar offset was wrong for
        # batches on Metal.
        next_column = mx.full((num_rows,), self.length, dtype=mx.int32)
        if self.pad is None:
            return next_column
        assert self.pad.shape == (num_rows,), f"{self.pad.shape} != {num_rows} rows"
        return next_column - self.pad

    def layout(self, num_new: int) -> Layout:
        """One part for the next `num_new` queries, with padding masked out."""
        if self.pad is None:
            return CAUSAL if num_new > 1 else Layout([Group()])
        query = mx.arange(self.length, self.length + num_new)[:, None]
        column = mx.arange(self.length + num_new)[None]
        # A query in the padding sees itself: an all-false mask row gives NaN on some backends, and
        # 0 * NaN in the values would reach the real tokens.
        visible = (column >= self.pad[:, None, None]) | (column == query)
        mask = ((column <= query) & visible)[:, None]  # (N, 1, L, length + L)
        begin = mx.clip(self.pad - self.length, 0, num_new)
        end = mx.full(begin.shape, num_new, mx.int32)
        return Layout([Group(mask=mask)], spans=(begin, end))


def make_group(rows: list[int], num_blocks: int, mask: Mask) -> Group:
    """The group in which query row n reads row `rows[n]` of a part with `num_blocks` rows."""
    members: list[list[int]] = [[] for _ in range(num_blocks)]
    for query_row, row in enumerate(rows):
        members[row].append(query_row)
    most = max(map(len, members))
    padded = np.array([readers + [0] * (most - len(readers)) for readers in members])
    if np.array_equal(padded.ravel(), np.arange(len(rows))):
        return Group(mask=mask)
    places = [row * most + members[row].index(query_row) for query_row, row in enumerate(rows)]
    return Group(mx.array(padded), mx.array(places), mask)


class SlotCache(Cache):
    """
    The cache of a decode batch in which waiting rows take the slots of complete ones.

    share: store a prompt's columns once for all slots that continue it; otherwise each slot has a
    copy. width: room for own tokens, which `plan_writes` widens. Each slot counts its own columns
    in `lengths`; if a caller sets a length back, newer columns are overwritten. Call `plan_writes`
    before each forward pass: it writes one token for every slot, or several, padded on the right,
    for some slots.
    """

    def __init__(self, prompts: KVCache, num_slots: int, width: int = 0, share: bool = True):
        self.prompts = prompts
        self.num_slots = num_slots
        self.share = share
        self.width = round_up(width)
        self.first_own = 0 if share else prompts.length  # first own column of each buffer
        self.nets: list[DeltaSlots] = []
        self.attentions: list[SlotLayer] = []
        self.layers = []
        for layer in prompts.layers:
            if isinstance(layer, DeltaState):
                net = DeltaSlots(layer, num_slots)
                self.nets.append(net)
                self.layers.append(net)
            else:
                attention = SlotLayer(layer, num_slots, self.width, share)
                self.attentions.append(attention)
                self.layers.append(attention)
        self.prompt_of: list[int] = []  # each slot's prompt
        self.lengths = np.zeros(num_slots, int)  # own columns of each slot
        self.most_bytes = 0
        self._record_bytes()

    def _record_bytes(self) -> None:
        num_bytes = sum(array.nbytes for array in self.prompts.arrays() + self.arrays())
        self.most_bytes = max(self.most_bytes, num_bytes)

    def assign(self, prompt_of: list[int], new_slots: list[int] | None = None) -> None:
        """
        Sets each slot's prompt.

        new_slots: the slots whose rows begin; None: all. The others keep their columns.
        """
        if new_slots is None:
            new_slots = list(range(len(prompt_of)))
        moved = [slot for slot in new_slots if self.prompt_of[slot : slot + 1] != [prompt_of[slot]]]
        for layer in self.layers:
            layer.assign(prompt_of, new_slots, moved)
        self.prompt_of = prompt_of
        self.lengths[new_slots] = 0
        self.first_position = np.full(len(prompt_of), self.prompts.length)
        if self.prompts.pad is not None:
            self.first_position -= np.array(self.prompts.pad)[prompt_of]

        if not self.share:
            self.prompt_mask = self.prompts.unpadded_mask(mx.array(prompt_of))
            return
        first = min(prompt_of)
        end = max(prompt_of) + 1
        self.prompt_mask = self.prompts.unpadded_mask(slice(first, end))
        rows = [prompt - first for prompt in prompt_of]
        self.readers = make_group(rows, end - first, self.prompt_mask)

    def plan_writes(self, num_new: dict[int, int] | None = None) -> None:
        """Plans the next forward pass. num_new: the tokens that some slots get; None: 1 for all."""
        if num_new is None:
            self.planned_slots = np.arange(self.num_slots)
            self.num_new = np.array(1)
        else:
            self.planned_slots = np.array(list(num_new))
            self.num_new = np.array(list(num_new.values()))
        begins = self.lengths[self.planned_slots]
        most_new = int(self.num_new.max())
        used = int(begins.max()) + most_new

        num_missing = round_up(used) - self.width
        if num_missing > 0:
            for layer in self.attentions:
                layer.widen(num_missing)
            self.width += num_missing
            self._record_bytes()

        if num_new is None and begins.min() == used - 1:
            column = self.first_own + used - 1
            self.write_plan = WritePlan(None, column, self.first_own + used)
        else:
            prompts = None
            if num_new is not None:
                prompts = mx.array([self.prompt_of[slot] for slot in num_new])
            columns = mx.array(self.first_own + begins[:, None] + np.arange(most_new))
            slots = mx.array(self.planned_slots[:, None])
            self.write_plan = WritePlan(slots, columns, self.first_own + used, prompts)
        for layer in self.attentions:
            layer.write_plan = self.write_plan
        for net in self.nets:
            net.write_plan = None if num_new is None else mx.array(self.planned_slots)

    def advance(self, num_new: int) -> None:
        self.lengths[self.planned_slots] += self.num_new

    def offsets(self, num_rows: int) -> mx.array:
        """The position of the next token of each slot that gets some, (M,) int32."""
        num_planned = len(self.planned_slots)
        assert num_rows == num_planned, f"{num_rows} rows for {num_planned} slots"
        positions = (self.first_position + self.lengths)[self.planned_slots]
        return mx.array(positions.astype(np.int32))

    def layout(self, num_new: int) -> Layout:
        """
        Two parts, prompts and own columns, if prompts are shared and all slots get one token.

        Otherwise one part, with the mask (M, 1, L, P + W) or None.
        """
        slots, _, end, prompts = self.write_plan
        num_own = end - self.first_own
        own_mask = None
        if slots is not None:
            lengths = self.lengths[self.planned_slots][:, None, None, None]
            last = mx.array(lengths + np.arange(num_new)[:, None])
            own_mask = mx.arange(num_own) <= last  # (M, 1, L, W)
        if self.share and prompts is None:
            return Layout([self.readers, Group(mask=own_mask)])

        spans = None
        prompt_mask = self.prompt_mask
        if prompts is not None:
            begin = mx.zeros(len(self.planned_slots), mx.int32)
            spans = begin, mx.array(self.num_new.astype(np.int32))
            prompt_mask = self.prompts.unpadded_mask(prompts)
        if prompt_mask is None and own_mask is None:
            return Layout([Group()])
        shape = len(self.planned_slots), 1, num_new
        masks = [
            broadcast_mask(prompt_mask, (*shape, self.prompts.length)),
            broadcast_mask(own_mask, (*shape, num_own)),
        ]
        return Layout([Group(mask=mx.concatenate(masks, axis=-1))], spans=spans)

    def select_slots(self, slots: list[int]) -> None:
        """Drops all slots but these, in this order."""
        for layer in self.layers:
            layer.select_slots(mx.array(slots))
        self.num_slots = len(slots)
        self.lengths = self.lengths[slots]
        self.assign([self.prompt_of[slot] for slot in slots], [])


def broadcast_mask(mask: mx.array | None, shape: tuple[int, ...]) -> mx.array:
    """A mask in this shape; None is a mask that shows everything."""
    if mask is None:
        return mx.ones(shape, mx.bool_)
    return mx.broadcast_to(mask, shape)
