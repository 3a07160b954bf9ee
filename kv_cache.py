"""
Caches of past tokens, for a batch of rows and for the slots of a decode batch.

An attention layer caches keys and values, and a gated delta net caches a state of fixed size. The
cache for rows that begin with the same tokens is in layers/tree_cache.py.

In a `KVCache`, rows are right-aligned. A shorter row starts with padding columns that no query
sees. The position of a token is its column minus the row's padding. Buffers grow by 128 columns at
a time, so that most decode steps can write in place.
In a `SlotCache`, a slot either reads the cached columns of its prompt in place or has a copy of
them. The tokens after the prompt are counted separately for each slot, so that a waiting row can
take the slot of a complete row.

Axes: N rows or slots, M slots that get tokens, K key/value heads, S capacity in columns, P prompt
columns, W columns of a slot's own tokens, L new positions, D dimensions per head, R rows in a
shared part, G query rows that read each of these R rows.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import cpu_blas  # noqa: F401  (before mlx)
import mlx.core as mx
import numpy as np

REFILL = 1 / 16  # once this fraction of the slots is idle, waiting rows take the idle slots
SHRINK = 1 / 4  # once this fraction of the slots is idle and no row waits, idle slots are dropped

# Buffers grow by this number of columns. A smaller number would cause more copies, and a larger
# number would waste memory on short rows.
CHUNK = 128


def round_up_to_chunk(length: int) -> int:
    """`length` rounded up to a multiple of CHUNK."""
    return -(-length // CHUNK) * CHUNK


Mask = mx.array | str | None


class QueryRowsReadingCachePart(NamedTuple):
    """
    Says which row of a cache part each query row reads, for N query rows and R rows in the part.
    """

    # (R, G) the query rows that read each cache row, padded with 0. If None, the query rows
    # r * G to r * G + G - 1 read cache row r.
    members: mx.array | None = None
    # (N,) the index of each query row in the flattened `members`
    places: mx.array | None = None
    # None or a boolean array (R, 1, 1, S); if G is 1, a boolean array (N, 1, L, S) or "causal" is
    # allowed too
    mask: Mask = None


class AttentionMasks(NamedTuple):
    """The columns of each cache part that each new token may read."""

    part_readers: list[QueryRowsReadingCachePart]  # one entry per part, in the order of `Parts`

    # A boolean mask (N, 1, L, S) over the columns of all parts, which MLX computes only if the mask
    # is used. If None, only the newest part needs a mask.
    whole: mx.array | None = None
    # The columns at which each row's new tokens begin and end, (N,) each. All other new columns are
    # padding. If None, there is no padding.
    spans: tuple[mx.array, mx.array] | None = None


CAUSAL = AttentionMasks(
    [QueryRowsReadingCachePart(mask="causal")]
)  # a single part, the new tokens themselves
KeysAndValues = tuple[mx.array, mx.array]
# The keys and values (R, K, S, D) of each part of a cache. A query attends to all parts. Usually
# there is a single part with N rows. If rows share columns, there are several parts.
Parts = list[KeysAndValues]
InputsAndMemory = tuple[mx.array, mx.array]


class Cache(Protocol):
    """
    The cached state of each layer, and the positions and attention masks of the next tokens.

    Once per forward pass, a layer of the model computes arrays for the new tokens and passes them
    to the `update` method of its cached state. Keys and values are (N, heads, L, size), in the
    order of rows and positions. In an attention layer, `update` returns all keys and values that
    the new tokens may read, including the new ones. The arrays that `update` returns never change
    afterwards. `attention_masks` says which columns each new token may read.
    """

    layers: list[Any]

    def arrays(self) -> list[mx.array]:
        """All arrays of all layers, for example to evaluate them or to count their bytes."""
        return [array for layer in self.layers for array in layer.arrays()]

    def next_positions(self, num_rows: int) -> mx.array:
        """The position of each row's first new token, (N,) int32."""

    def attention_masks(self, num_new: int) -> AttentionMasks:
        """Which columns the next `num_new` tokens of each row may read."""

    def advance(self, num_new: int) -> None:
        """Records that a forward pass, which is now complete, has added `num_new` columns."""


# ---- the state of one layer


def append_zero_columns(keys: mx.array, values: mx.array, num_added: int) -> KeysAndValues:
    """Copies of both buffers with `num_added` columns of zeros at the end."""
    padding = [(0, 0), (0, 0), (0, num_added), (0, 0)]
    return mx.pad(keys, padding), mx.pad(values, padding)


class LayerCache:
    """
    The keys and values of one layer, (N, K, S, D) each, whose first `length` columns are written.

    `length` never exceeds S. No view of a buffer may outlive the step that created the view,
    because MLX writes a slice in place only if nothing else references the buffer. For a buffer of
    128 MiB, a write in place takes 0.02 ms, and a write with a copy takes 160 ms.
    """

    def __init__(self, capacity: int = 0):
        self.capacity = round_up_to_chunk(capacity)
        self.length = 0
        self.keys: mx.array | None = None
        self.values: mx.array | None = None

    def update(self, keys: mx.array, values: mx.array) -> Parts:
        """
        Appends keys and values, (N, K, L, D) each.

        Returns all keys and values written so far, (N, K, length, D) each, as one part.
        """
        assert keys.shape == values.shape, f"keys {keys.shape}, values {values.shape}"
        if self.keys is None or self.values is None:
            self.keys = keys[:, :, :0]
            self.values = values[:, :, :0]
        # slice assignment would silently broadcast a single row to all rows, or convert the dtype
        stored = (*self.keys.shape[:2], self.keys.shape[3], self.keys.dtype)
        new = (*keys.shape[:2], keys.shape[3], keys.dtype)
        assert stored == new, f"the buffers are {stored}, but the new arrays are {new}"

        begin = self.length
        end = begin + keys.shape[2]
        if end > self.keys.shape[2]:
            self.capacity = max(self.capacity, round_up_to_chunk(end))
            num_added = self.capacity - self.keys.shape[2]
            self.keys, self.values = append_zero_columns(self.keys, self.values, num_added)
        self.keys[:, :, begin:end] = keys
        self.values[:, :, begin:end] = values
        self.length = end
        return [self.select_rows(slice(None))]

    def select_rows(self, rows: slice | mx.array) -> KeysAndValues:
        """The written keys and values of the given rows, (R, K, length, D) each."""
        assert self.keys is not None and self.values is not None, "the cache is empty"
        return self.keys[rows, :, : self.length], self.values[rows, :, : self.length]

    def arrays(self) -> list[mx.array]:
        return [buffer for buffer in (self.keys, self.values) if buffer is not None]


class WritePlan(NamedTuple):
    """The columns of a `SlotCache` to which the next tokens are written."""

    # (M, 1) the slots that get tokens. If None, each slot gets one token, all in the same column.
    slots: mx.array | None
    # (M, L) buffer columns; if `slots` is None, the index of the single column
    columns: Any
    end: int  # the number of buffer columns in use after the write

    # (M,) the prompts that `update` joins with the slots' own columns. If None, `update` returns
    # prompts and own columns as separate parts.
    prompts: mx.array | None = None


class SlotLayer:
    """
    One layer of a `SlotCache`, with one buffer of columns per slot.

    The last W columns of a buffer are the slot's own columns. Own column i contains the keys and
    values of the slot's token i after the prompt. If prompts are shared, a buffer has only own
    columns, and `update` also returns a view of the prompts in use. Otherwise, each slot's buffer
    has P + W columns and starts with a copy of the slot's prompt.
    """

    write_plan: WritePlan

    def __init__(self, prompts: LayerCache, num_slots: int, width: int, share: bool):
        self.prompts = prompts
        self.first_own = 0 if share else prompts.length
        self.in_use = slice(0, 0)  # the range of the prompts that slots continue
        prompt_keys, prompt_values = prompts.select_rows(slice(None))
        num_columns = self.first_own + width
        self.keys = make_zero_slot_buffer(prompt_keys, num_slots, num_columns)
        self.values = make_zero_slot_buffer(prompt_values, num_slots, num_columns)

    def assign_prompts(
        self, prompt_of_slot: list[int], new_slots: list[int], slots_with_new_prompt: list[int]
    ) -> None:
        """
        Records which prompts are in use.

        If prompts are not shared, this method also copies prompts into the slots' buffers.

        slots_with_new_prompt: the slots that had a different prompt before. Prompts are copied only
            for these slots.
        """
        self.in_use = slice(min(prompt_of_slot), max(prompt_of_slot) + 1)
        if self.first_own and slots_with_new_prompt:
            rows = mx.array([prompt_of_slot[slot] for slot in slots_with_new_prompt])
            for buffer, array in zip(self.arrays(), self.prompts.select_rows(rows), strict=True):
                buffer[mx.array(slots_with_new_prompt), :, : self.first_own] = array

    def add_columns(self, num_added: int) -> None:
        """Makes room for `num_added` more columns."""
        self.keys, self.values = append_zero_columns(self.keys, self.values, num_added)

    def keep_only_slots(self, slots: mx.array) -> None:
        self.keys = self.keys[slots]
        self.values = self.values[slots]

    def arrays(self) -> list[mx.array]:
        """The buffers of the slots, without those of the shared prompts."""
        return [self.keys, self.values]

    def update(self, keys: mx.array, values: mx.array) -> Parts:
        """
        Writes keys and values, (M, K, L, D) each, to the planned columns.

        Returns the keys and values that these slots may read.
        """
        slots, columns, end, prompts = self.write_plan
        num_slots, length = (len(self.keys), 1) if slots is None else columns.shape
        # assignment would silently broadcast a single row to all rows
        shape = num_slots, self.keys.shape[1], length, self.keys.shape[3]
        assert keys.shape == shape, f"the keys are {keys.shape} instead of {shape}"
        assert values.shape == shape, f"the values are {values.shape} instead of {shape}"
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


def make_zero_slot_buffer(prompt_array: mx.array, num_slots: int, num_columns: int) -> mx.array:
    """
    A buffer of zeros for the slots, (num_slots, K, num_columns, D).

    The buffer has the heads, the head size and the dtype of `prompt_array`.
    """
    _, num_heads, _, size = prompt_array.shape
    return mx.zeros((num_slots, num_heads, num_columns, size), prompt_array.dtype)


class GatedDeltaState:
    """
    The state of a gated delta net, for a batch of rows or for the rows of a tree's newest level.

    `parts` is empty before the first tokens. Afterwards, its only entry contains the last inputs of
    the convolution, (N, window - 1, channels), and the memory, (N, value heads, value dimensions,
    key dimensions) float32. Arrays are replaced and never written in place, so gradients can be
    computed through the state.
    """

    def __init__(self, parts: Parts | None = None):
        self.parts = parts or []

    @property
    def state_before_next_tokens(self) -> InputsAndMemory | None:
        """The state from which the next tokens start, or None before the first tokens."""
        return self.parts[0] if self.parts else None

    def update(self, inputs: mx.array, memory: mx.array) -> None:
        self.parts = [(inputs, memory)]

    def arrays(self) -> list[mx.array]:
        return [array for part in self.parts for array in part]

    def select_rows(self, rows: Sequence[int]) -> "GatedDeltaState":
        """The state of the given rows."""
        index = mx.array(list(rows))
        return GatedDeltaState([(inputs[index], memory[index]) for inputs, memory in self.parts])

    def copy_with_only_ancestor_rows(
        self, _: Sequence[slice | mx.array], parents: Sequence[int]
    ) -> "GatedDeltaState":
        """The states of the parent rows, from which the rows of a tree's next level start."""
        return self.select_rows(parents)

    def copy_to_flat_layer(self, target: "GatedDeltaState", _: mx.array) -> None:
        """Sets the state of `target` to that of a tree's newest level, with one state per row."""
        target.parts = self.parts


class GatedDeltaSlots(GatedDeltaState):
    """
    The states of a gated delta net, one per slot, which start as copies of the prompts' states.

    Unlike columns, a state cannot be reset to an earlier token. In a conversation with several
    turns, a slot samples one more token before the sampler notices that the turn has ended. So the
    state before the newest token is stored too, and a row that continues with another turn is reset
    to its state at the end of the previous turn.
    """

    # the slots that get the next tokens; if None, each slot gets one token
    write_plan: mx.array | None = None
    keeps_before = False
    before: Parts

    def __init__(self, prompts: GatedDeltaState, num_slots: int):
        self.prompts = prompts
        super().__init__(prompts.select_rows([0] * num_slots).parts)

    @property
    def state_before_next_tokens(self) -> InputsAndMemory | None:
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

    def assign_prompts(self, prompt_of_slot: list[int], new_slots: list[int], _: list[int]) -> None:
        """
        Sets the state of each new slot to the state of its prompt.

        The state of a new slot is set even if the slot had the same prompt before.
        """
        if new_slots:
            states = self.prompts.select_rows([prompt_of_slot[slot] for slot in new_slots])
            self.set_state(mx.array(new_slots), states.parts[0])

    def set_state(self, slots: mx.array, state: InputsAndMemory) -> None:
        """Replaces the state of the given slots."""
        for buffer, array in zip(self.arrays(), state, strict=True):
            buffer[slots] = array

    def get_state(self, slot: int, num_dropped_tokens: int) -> InputsAndMemory:
        """
        The state of a slot before its newest `num_dropped_tokens` tokens.

        `num_dropped_tokens` must be 0 or 1.
        """
        ((inputs, memory),) = self.before if num_dropped_tokens else self.parts
        return inputs[slot : slot + 1], memory[slot : slot + 1]

    def keep_only_slots(self, slots: mx.array) -> None:
        self.parts = [(inputs[slots], memory[slots]) for inputs, memory in self.parts]


def make_empty_layers(
    layer_kinds: Sequence[str], make_attention_layer: Callable[[], Any]
) -> list[Any]:
    """An empty state for each layer, chosen by the layer's kind (`ModelConfig.layer_kinds`)."""
    layers: list[Any] = []
    for kind in layer_kinds:
        is_linear = kind == "linear_attention"
        layers.append(GatedDeltaState() if is_linear else make_attention_layer())
    return layers


# ---- the states of all layers


class KVCache(Cache):
    """
    The caches of all layers for a batch, and the alignment of the rows of the batch.

    pad: the number of invisible columns before each row's first token, (N,) int32. If None, all
        rows have the same length, and decoding needs no mask.
    """

    def __init__(self, layer_kinds: Sequence[str], capacity: int = 0, pad: mx.array | None = None):
        self.layers = make_empty_layers(layer_kinds, lambda: LayerCache(capacity))
        self.pad = pad
        self.length = 0  # the number of columns written so far, including padding

    def advance(self, num_new: int) -> None:
        self.length += num_new

    def unpadded_mask(self, rows: slice | mx.array) -> mx.array | None:
        """
        A mask (R, 1, 1, length) that is true where a written column is not padding.

        Returns None if there is no padding.
        """
        if self.pad is None:
            return None
        return (mx.arange(self.length) >= self.pad[rows][:, None])[:, None, None]

    def next_positions(self, num_rows: int) -> mx.array:
        # The offsets are an array even if they are equal. Before MLX 0.32, `mx.fast.rope` with a
        # scalar offset gave wrong results on Metal for batches of one-token rows.
        next_column = mx.full((num_rows,), self.length, dtype=mx.int32)
        if self.pad is None:
            return next_column
        assert self.pad.shape == (num_rows,), f"{num_rows} rows, but pad is {self.pad.shape}"
        return next_column - self.pad

    def attention_masks(self, num_new: int) -> AttentionMasks:
        """The mask of a single part, which hides padding from the next `num_new` tokens."""
        if self.pad is None:
            return CAUSAL if num_new > 1 else AttentionMasks([QueryRowsReadingCachePart()])
        query = mx.arange(self.length, self.length + num_new)[:, None]
        column = mx.arange(self.length + num_new)[None]
        # A query in the padding sees its own column. Otherwise, its mask row would be false
        # everywhere, which gives NaN on some backends, and 0 * NaN in the values would make real
        # tokens NaN.
        visible = (column >= self.pad[:, None, None]) | (column == query)
        mask = ((column <= query) & visible)[:, None]  # (N, 1, L, length + L)
        begin = mx.clip(self.pad - self.length, 0, num_new)
        end = mx.full(begin.shape, num_new, mx.int32)
        return AttentionMasks([QueryRowsReadingCachePart(mask=mask)], spans=(begin, end))


def make_part_readers(
    part_row_of_query_row: list[int], num_part_rows: int, mask: Mask
) -> QueryRowsReadingCachePart:
    """The readers of a part: query row n reads the part's row `part_row_of_query_row[n]`."""
    members: list[list[int]] = [[] for _ in range(num_part_rows)]
    for query_row, row in enumerate(part_row_of_query_row):
        members[row].append(query_row)
    most_readers = max(map(len, members))
    padded = np.array([readers + [0] * (most_readers - len(readers)) for readers in members])
    if np.array_equal(padded.ravel(), np.arange(len(part_row_of_query_row))):
        return QueryRowsReadingCachePart(mask=mask)
    places = [
        row * most_readers + members[row].index(query_row)
        for query_row, row in enumerate(part_row_of_query_row)
    ]
    return QueryRowsReadingCachePart(mx.array(padded), mx.array(places), mask)


class SlotCache(Cache):
    """
    The cache of a decode batch in which waiting rows take the slots of complete rows.

    share: whether a prompt's columns are stored once for all slots that continue the prompt. If
        False, each slot has a copy of its prompt.
    width: the initial number of columns for a slot's own tokens. `plan_writes` adds more columns
        if they are needed.

    `lengths` contains the number of own columns of each slot. If a caller reduces this number,
    later writes overwrite the columns that are no longer counted. Call `plan_writes` before each
    forward pass. The pass then writes one token for every slot, or several tokens, padded on the
    right, for some of the slots.
    """

    def __init__(self, prompts: KVCache, num_slots: int, width: int = 0, share: bool = True):
        self.prompts = prompts
        self.num_slots = num_slots
        self.share = share
        self.width = round_up_to_chunk(width)
        # the index of the first own column in each buffer
        self.first_own = 0 if share else prompts.length
        self.nets: list[GatedDeltaSlots] = []
        self.attentions: list[SlotLayer] = []
        self.layers = []
        for layer in prompts.layers:
            if isinstance(layer, GatedDeltaState):
                net = GatedDeltaSlots(layer, num_slots)
                self.nets.append(net)
                self.layers.append(net)
            else:
                attention = SlotLayer(layer, num_slots, self.width, share)
                self.attentions.append(attention)
                self.layers.append(attention)
        self.prompt_of: list[int] = []  # the index of each slot's prompt
        self.lengths = np.zeros(num_slots, int)  # the number of own columns of each slot
        self.most_bytes = 0
        self._update_most_bytes()

    def _update_most_bytes(self) -> None:
        num_bytes = sum(array.nbytes for array in self.prompts.arrays() + self.arrays())
        self.most_bytes = max(self.most_bytes, num_bytes)

    def assign_prompts(self, prompt_of_slot: list[int], new_slots: list[int] | None = None) -> None:
        """
        Sets the prompt of each slot.

        new_slots: the slots in which a new row begins, or None for all slots. All other slots keep
            their own columns.
        """
        if new_slots is None:
            new_slots = list(range(len(prompt_of_slot)))
        slots_with_new_prompt = [
            slot for slot in new_slots if self.prompt_of[slot : slot + 1] != [prompt_of_slot[slot]]
        ]
        for layer in self.layers:
            layer.assign_prompts(prompt_of_slot, new_slots, slots_with_new_prompt)
        self.prompt_of = prompt_of_slot
        self.lengths[new_slots] = 0
        self.first_position = np.full(len(prompt_of_slot), self.prompts.length)
        if self.prompts.pad is not None:
            self.first_position -= np.array(self.prompts.pad)[prompt_of_slot]

        if not self.share:
            self.prompt_mask = self.prompts.unpadded_mask(mx.array(prompt_of_slot))
            return
        first = min(prompt_of_slot)
        end = max(prompt_of_slot) + 1
        self.prompt_mask = self.prompts.unpadded_mask(slice(first, end))
        rows = [prompt - first for prompt in prompt_of_slot]
        self.readers = make_part_readers(rows, end - first, self.prompt_mask)

    def plan_writes(self, num_new_of_slot: dict[int, int] | None = None) -> None:
        """
        Plans where the next forward pass writes its tokens, and makes room for them.

        num_new_of_slot: the number of new tokens by slot. If None, each slot gets one token.
        """
        if num_new_of_slot is None:
            self.planned_slots = np.arange(self.num_slots)
            self.num_new = np.array(1)
        else:
            self.planned_slots = np.array(list(num_new_of_slot))
            self.num_new = np.array(list(num_new_of_slot.values()))
        begins = self.lengths[self.planned_slots]
        most_new = int(self.num_new.max())
        used = int(begins.max()) + most_new

        num_missing = round_up_to_chunk(used) - self.width
        if num_missing > 0:
            for layer in self.attentions:
                layer.add_columns(num_missing)
            self.width += num_missing
            self._update_most_bytes()

        if num_new_of_slot is None and begins.min() == used - 1:
            column = self.first_own + used - 1
            self.write_plan = WritePlan(None, column, self.first_own + used)
        else:
            prompts = None
            if num_new_of_slot is not None:
                prompts = mx.array([self.prompt_of[slot] for slot in num_new_of_slot])
            columns = mx.array(self.first_own + begins[:, None] + np.arange(most_new))
            slots = mx.array(self.planned_slots[:, None])
            self.write_plan = WritePlan(slots, columns, self.first_own + used, prompts)
        for layer in self.attentions:
            layer.write_plan = self.write_plan
        for net in self.nets:
            net.write_plan = None if num_new_of_slot is None else mx.array(self.planned_slots)

    def advance(self, num_new: int) -> None:
        self.lengths[self.planned_slots] += self.num_new

    def next_positions(self, num_rows: int) -> mx.array:
        """The position of the first new token of each slot that gets tokens, (M,) int32."""
        num_planned = len(self.planned_slots)
        assert num_rows == num_planned, f"{num_rows} rows, but {num_planned} planned slots"
        positions = (self.first_position + self.lengths)[self.planned_slots]
        return mx.array(positions.astype(np.int32))

    def attention_masks(self, num_new: int) -> AttentionMasks:
        """
        The masks of one or two parts.

        There are two parts, prompts and own columns, if prompts are shared and each slot gets one
        token. Otherwise there is one part, with a mask (M, 1, L, P + W) or without a mask.
        """
        slots, _, end, prompts = self.write_plan
        num_own = end - self.first_own
        own_mask = None
        if slots is not None:
            lengths = self.lengths[self.planned_slots][:, None, None, None]
            last = mx.array(lengths + np.arange(num_new)[:, None])
            own_mask = mx.arange(num_own) <= last  # (M, 1, L, W)
        if self.share and prompts is None:
            return AttentionMasks([self.readers, QueryRowsReadingCachePart(mask=own_mask)])

        spans = None
        prompt_mask = self.prompt_mask
        if prompts is not None:
            begin = mx.zeros(len(self.planned_slots), mx.int32)
            spans = begin, mx.array(self.num_new.astype(np.int32))
            prompt_mask = self.prompts.unpadded_mask(prompts)
        if prompt_mask is None and own_mask is None:
            return AttentionMasks([QueryRowsReadingCachePart()])
        shape = len(self.planned_slots), 1, num_new
        masks = [
            broadcast_mask(prompt_mask, (*shape, self.prompts.length)),
            broadcast_mask(own_mask, (*shape, num_own)),
        ]
        return AttentionMasks(
            [QueryRowsReadingCachePart(mask=mx.concatenate(masks, axis=-1))], spans=spans
        )

    def keep_only_slots(self, slots: list[int]) -> None:
        """Drops all slots except the given slots, and arranges these in the given order."""
        for layer in self.layers:
            layer.keep_only_slots(mx.array(slots))
        self.num_slots = len(slots)
        self.lengths = self.lengths[slots]
        self.assign_prompts([self.prompt_of[slot] for slot in slots], [])


def broadcast_mask(mask: mx.array | None, shape: tuple[int, ...]) -> mx.array:
    """The mask, broadcast to the given shape; a mask of None becomes all true."""
    if mask is None:
        return mx.ones(shape, mx.bool_)
    return mx.broadcast_to(mask, shape)
