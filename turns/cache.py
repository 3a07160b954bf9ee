"""
What a model keeps of rows that are told something between their turns: a slot cache where each slot counts its columns.

Left out: prompts and rows that are told nothing (kv_cache.py), and who sits in which slot (turns/seats.py).

Axes: N slots, M of them aimed at, K kv heads, P prompt columns, S own columns, L new positions, D head dim.
"""

from typing import NamedTuple

import mlx.core as mx
import numpy as np

from kv_cache import Group, KVCache, Layout, Parts, SlotCache, SlotLayer, round_up
from layers.delta_state import DeltaState, DeltaTurns, Held


class Aim(NamedTuple):
    """Which columns of a `TurnCache` the next tokens of M slots are written to."""

    slots: mx.array  # (M, 1)
    columns: mx.array  # (M, L) of the buffers
    end: int  # columns in use afterwards
    prompts: mx.array | None  # (M,) those to join in front of the slots' own; None: the parts of all slots
    spans: tuple[mx.array, mx.array] | None  # see `kv_cache.Layout`


Columns = list[list[mx.array]]  # a slot's own keys and values (1, K, L, D) of each layer with attention
State = list[Held]  # of a row, of each gated delta net


class TurnLayer(SlotLayer):
    """One layer of a `TurnCache`: where a slot's own columns begin, token i of its row is in column i."""

    aim: Aim

    def update(self, keys: mx.array, values: mx.array) -> Parts:
        """Writes (M, K, L, D) each where `aim` says, and returns what the slots aimed at may read."""
        slots, columns, end, prompts, _ = self.aim
        shape = columns.shape[0], self.keys.shape[1], columns.shape[1], self.keys.shape[3]
        assert keys.shape == values.shape == shape, f"{keys.shape}, {values.shape}, not {shape}"
        for buffer, new in zip(self.arrays(), (keys, values), strict=True):
            buffer[slots, :, columns] = new.swapaxes(1, 2)
        if prompts is None:
            own = self.keys[:, :, :end], self.values[:, :, :end]
            return [own] if self.ring else [self.prompts.written(self.in_use), own]
        found = [buffer[:, :, :end][slots[:, 0]] for buffer in self.arrays()]
        if not self.ring:
            pairs = zip(self.prompts.written(prompts), found, strict=True)
            found = [mx.concatenate(list(pair), axis=2) for pair in pairs]
        return [(found[0], found[1])]

    def widen(self, num_columns: int) -> None:
        """Makes room for so many columns of each slot."""
        for name, buffer in (("keys", self.keys), ("values", self.values)):
            setattr(self, name, mx.pad(buffer, [(0, 0), (0, 0), (0, num_columns - self.width), (0, 0)]))
        self.width = num_columns


class TurnCache(SlotCache):
    """
    A cache of slots whose rows take turns with a world: each slot counts its own columns, in `lengths`.

    Who sets a slot's length back has what is newer overwritten: the draws after the end of a turn. `aim` comes before
    each forward pass: a token for every slot, or several, padded on the right, for some. A row's columns may be taken
    out of its slot and put into another. A gated delta net's state cannot be set back, so it is taken at the end of a
    turn and put back when the row goes on.
    """

    def __init__(self, prompts: KVCache, num_slots: int, share: bool = True):
        super().__init__(prompts, num_slots, 0, share)
        self.layers = [
            DeltaTurns(layer, num_slots) if isinstance(layer, DeltaState) else TurnLayer(layer, num_slots, 0, share)
            for layer in prompts.layers
        ]
        self.nets = [layer for layer in self.layers if isinstance(layer, DeltaTurns)]
        self.attentions = [layer for layer in self.layers if isinstance(layer, TurnLayer)]
        self.lengths = np.zeros(num_slots, int)  # own columns of each slot
        self.aimed = np.arange(num_slots)

    def advance(self, num_new: int) -> None:
        """Nothing: who writes several tokens with padding knows how many there were, and counts in `lengths`."""

    def seat(self, prompt_of: list[int]) -> None:
        """Sets each slot's prompt."""
        self.assign(prompt_of, [0] * len(prompt_of))

    def aim(self, num_new: dict[int, int] | None) -> None:
        """How many of the next tokens each slot gets; None: all one each."""
        self.aimed = np.arange(self.num_slots) if num_new is None else np.array(list(num_new))
        begins, most = self.lengths[self.aimed], max(num_new.values()) if num_new else 1
        used = int(begins.max()) + most
        if used > self.attentions[0].width:
            for layer in self.attentions:
                layer.widen(round_up(used))
            self._count()
        ring, prompts, spans = self.attentions[0].ring, None, None
        columns = mx.array(ring + begins[:, None] + np.arange(most))
        if num_new:
            prompts = mx.array([self.prompt_of[slot] for slot in num_new])
            spans = mx.zeros(len(num_new), mx.int32), mx.array(list(num_new.values()), mx.int32)
        for layer in self.attentions:
            layer.aim = Aim(mx.array(self.aimed[:, None]), columns, ring + used, prompts, spans)
        for net in self.nets:
            net.aimed = mx.array(self.aimed) if num_new else None

    def offsets(self, num_rows: int) -> mx.array:
        """The position of the next token of each slot aimed at, (M,) int32."""
        assert num_rows == len(self.aimed), f"{num_rows} rows for {len(self.aimed)} slots"
        return self.first_position[mx.array(self.aimed)] + mx.array(self.lengths[self.aimed])

    def layout(self, num_new: int) -> Layout:
        """Prompts and own columns if all slots share prompts, else one part with the mask (M, 1, L, P + S) boolean."""
        begins, aim = self.lengths[self.aimed], self.attentions[0].aim
        used = aim.end - self.attentions[0].ring
        last = mx.array(begins[:, None, None, None] + np.arange(num_new)[:, None])
        own = mx.arange(used) <= last  # (M, 1, L, S)
        if self.share and aim.prompts is None:
            return Layout([self.readers, Group(mask=own)])
        before = self.prompt_mask if aim.prompts is None else self.prompts.unpadded(aim.prompts)
        if before is None:
            before = mx.ones((1, 1, 1, self.prompts.length), mx.bool_)
        shape = (*own.shape[:3], self.prompts.length)
        return Layout([Group(mask=mx.concatenate([mx.broadcast_to(before, shape), own], axis=-1))], spans=aim.spans)

    def take(self, slot: int) -> Columns:
        """A copy of a slot's own columns."""
        index, ring = mx.array([slot]), self.attentions[0].ring
        part = slice(ring, ring + int(self.lengths[slot]))
        taken = [[buffer[:, :, part][index] for buffer in layer.arrays()] for layer in self.attentions]
        mx.eval(taken)  # wait: a view that is alive would have the whole buffer copied at the next write
        return taken

    def put(self, slot: int, columns: Columns) -> None:
        """Makes these a slot's own columns."""
        ring, length = self.attentions[0].ring, columns[0][0].shape[2]
        self.lengths[slot] = length
        for layer, held in zip(self.attentions, columns, strict=True):
            for buffer, part in zip(layer.arrays(), held, strict=True):
                buffer[slot : slot + 1, :, ring : ring + length] = part

    def begin(self, slot: int) -> None:
        """A row begins in a slot, after its prompt."""
        self.lengths[slot] = 0
        for net in self.nets:
            net.begin(slot, self.prompt_of[slot])

    def take_state(self, slot: int, num_extra: int) -> State:
        """The state at the end of a slot's turn, of which `num_extra` more tokens were drawn, 0 or 1."""
        state = [net.take(slot, num_extra) for net in self.nets]
        mx.async_eval(state)
        return state

    def put_state(self, slot: int, state: State) -> None:
        for net, held in zip(self.nets, state, strict=True):
            net.put(mx.array([slot]), held)

    def keep(self, slots: list[int]) -> None:
        """Drops all slots but these, in this order."""
        super().keep(slots)
        self.lengths = self.lengths[slots]

    def add(self, num_slots: int) -> None:
        """Adds empty slots, which are to be seated."""
        for layer in self.attentions:
            layer.keys, layer.values = (
                mx.pad(buffer, [(0, num_slots), (0, 0), (0, 0), (0, 0)]) for buffer in layer.arrays()
            )
        for net in self.nets:
            net.widen(num_slots)
        self.num_slots += num_slots
        self.lengths = np.append(self.lengths, np.zeros(num_slots, int))
        self._count()

    def _count(self) -> None:
        self.most_bytes = max(self.most_bytes, sum(one.nbytes for one in self.prompts.arrays() + self.arrays()))
