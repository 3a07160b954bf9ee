"""
Rollouts whose rows take turns with a world: who sits in which slot, what rows are told before they draw again, and a
slot cache where each slot counts its columns.

Left out: rows that are told nothing (sampler.py, kv_cache.py), who answers (problems/episodes.py).

Axes: N slots, M of them aimed at, K kv heads, P prompt columns, S own columns, L new positions, D head dim,
V vocabulary.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from kv_cache import REFILL, SHRINK, Group, KVCache, Layout, Parts, SlotCache, SlotLayer, round_up
from layers.delta_state import DeltaState, DeltaTurns, Held
from machine import gpu

# ---- what a slot holds


class Aim(NamedTuple):
    """Which columns of a `TurnCache` the next tokens of M slots are written to."""

    slots: mx.array  # (M, 1)
    columns: mx.array  # (M, L) of the buffers
    end: int  # columns in use afterwards
    prompts: mx.array | None  # (M,) those to join in front of the slots' own; None: the parts of all slots
    spans: tuple[mx.array, mx.array] | None  # see `kv_cache.Layout`


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
    A cache of slots where each counts its own columns, in `lengths`.

    Who sets a slot's length back has what is newer overwritten: the draws after the end of a turn. `aim` comes before
    each forward pass: a token for every slot, or several, padded on the right, for some. A gated delta net's state
    cannot be set back, so it is taken at the end of a turn and put back when the row goes on.
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

    def assign(self, prompt_of: list[int], starts: list[int], begun: list[int] | None = None) -> None:
        super().assign(prompt_of, starts, begun)
        self.lengths[slice(None) if begun is None else begun] = 0

    def advance(self, num_new: int) -> None:
        """Nothing: who writes several tokens with padding knows how many there were, and counts in `lengths`."""

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

    def _count(self) -> None:
        self.most_bytes = max(self.most_bytes, sum(one.nbytes for one in self.prompts.arrays() + self.arrays()))


# ---- who sits where


class Turns:
    """
    Rows that take turns, in the slots of a cache: each sits in one from its first token to its last.

    A row that has ended draws nothing, for now; one with a reason never will again. While it waits for an answer its
    slot draws what nobody reads, so its columns stay in place.
    """

    def __init__(
        self,
        record: Any,
        model: Any,
        forward: Callable[..., mx.array],
        prompts: KVCache,
        logits: mx.array,
        rows_of: dict[tuple[int, ...], list[int]],
        num_slots: int,
        share: bool,
    ):
        """
        record: a `sampler.Record` whose `talk` is a `problems.episodes.Episodes`. model: a `gwen.Model`, and its
        `decode_step`. prompts, logits (prompts, V): the cache of the prompts, and what comes after each. rows_of: each
        prompt's rows, in the order in which they begin; those of an attempt that ran out of memory begin again.
        """
        self.record, self.model, self.forward, self.prompt_logits = record, model, forward, logits
        self.cache = TurnCache(prompts, num_slots, share)
        self.logits = mx.zeros((num_slots, logits.shape[1]), logits.dtype)
        self.prompt_of = {row: place for place, rows in enumerate(rows_of.values()) for row in rows}
        self.room = {row: record.context - len(prompt) for prompt, rows in rows_of.items() for row in rows}
        rows = list(self.prompt_of)
        self.table, self.place = record.uniforms(rows), {row: number for number, row in enumerate(rows)}
        self.num_drawn = np.zeros(len(record.limits), int)  # tokens, also those after an end that was not read yet
        self.slots, self.fresh = rows[:num_slots], rows[num_slots:]  # the row of each slot; those that have not begun
        self.states = dict[int, State]()  # of rows that wait for an answer
        self.told = dict[int, list[int]]()  # what rows are told next
        self.queued: list[tuple[np.ndarray, tuple[mx.array, ...]]] = []  # rows and draws of steps that were not read
        record.lengths[rows] = 0
        for row in rows:
            record.sequences[row], record.places[row] = [], []
            self._allow(row)
        record.talk.begin(rows)
        self._seat(dict(enumerate(self.slots)))

    @gpu.without_gradients()
    def play(self) -> None:
        """`sampler.decode` for rows in turns; every step reads all draws but the newest."""
        while not all(map(self.record.is_over, self.prompt_of)):
            if self.is_drawing:
                self._draw()
            self._read(num_left=1 if self.is_drawing else 0)
            self._listen()
            self._hand_on()
            self._go_on()
            self.record.show()
        mx.synchronize()  # wait: a queued step holds the cache

    @property
    def is_drawing(self) -> bool:
        return not self.record.ended[self.slots].all()

    @property
    def over(self) -> list[int]:
        """The slots of rows that are complete."""
        return [slot for slot, row in enumerate(self.slots) if self.record.is_over(row)]

    def _draw(self) -> None:
        """A token for each slot, used or not."""
        places, most = [self.place[row] for row in self.slots], self.table.shape[1]
        uniform = mx.array(self.table[places, np.minimum(self.num_drawn[self.slots], most - 1)])
        drawn = self.record.draw(self.logits, uniform)
        self.queued.append((np.array(self.slots), drawn))
        self.num_drawn[self.slots] += 1
        self.cache.aim(None)
        self.logits = self.forward(drawn[0][:, None], self.cache)[:, -1] @ self.model.head_weight.T
        self.cache.lengths += 1
        mx.async_eval(drawn, self.logits)

    def _read(self, num_left: int) -> None:
        """Writes down the draws of all steps but the newest `num_left`."""
        while len(self.queued) > num_left:
            self.record.write(*self.queued.pop(0))  # wait

    def _listen(self) -> None:
        """Hears turns that have ended, and what rows are told; waits for that if there is nothing else to do."""
        record = self.record
        for slot, row in enumerate(self.slots):
            if record.ended[row]:
                if len(record.places[row]) < (length := record.lengths[row]):
                    self._hear(row)
                    self.states[row] = self.cache.take_state(slot, int(self.num_drawn[row] - length))
                self.cache.lengths[slot] = len(record.sequences[row])  # what was drawn after the end is overwritten
        idle = not (self.is_drawing or self.told or self.over)
        for row, answer in record.talk.replies(wait=idle).items():
            if isinstance(answer, str):
                record.reasons[row] = answer
            elif record.lengths[row] == record.most[row] or len(answer) >= self._left(row):
                record.reasons[row] = self._limit(row)
            else:
                self.told[row] = answer
        self.states = {row: state for row, state in self.states.items() if not record.is_over(row)}

    def _hear(self, row: int) -> None:
        """Takes down a turn that has ended."""
        record, places, whole = self.record, self.record.places[row], self.record.sequences[row]
        turn = record.ids[row, len(places) : record.lengths[row]].tolist()
        places += range(len(whole), len(whole) + len(turn))
        whole += turn
        if record.at_end(np.array([row]))[0]:
            record.talk.hear(row, turn)
        else:
            record.reasons[row] = self._limit(row)

    def _left(self, row: int) -> int:
        """Positions that a row may still have."""
        return self.room[row] - len(self.record.sequences[row])

    def _allow(self, row: int) -> None:
        """Lets a row draw up to its limits."""
        self.record.limits[row] = min(self.record.most[row], self.record.lengths[row] + self._left(row))
        self.record.ended[row] = False

    def _limit(self, row: int) -> str:
        return "length" if self.record.lengths[row] == self.record.most[row] else "context"

    def _hand_on(self) -> None:
        """Gives slots of complete rows to rows that have not begun, or drops them once there are none."""
        over, num_slots = self.over, len(self.slots)
        if not over or (self.is_drawing and len(over) < (REFILL if self.fresh else SHRINK) * num_slots):
            return
        self._read(0)
        if self.fresh:
            begun, self.fresh = self.fresh[: len(over)], self.fresh[len(over) :]
            self._seat(dict(zip(over, begun, strict=False)))
        elif kept := [slot for slot in range(num_slots) if slot not in over]:
            self.cache.keep(kept)
            self.slots, self.logits = [self.slots[slot] for slot in kept], self.logits[mx.array(kept)]

    def _seat(self, row_of: dict[int, int]) -> None:
        """Rows begin in slots, each after its prompt."""
        self.slots = [row_of.get(slot, row) for slot, row in enumerate(self.slots)]
        prompts, begun = [self.prompt_of[row] for row in self.slots], list(row_of)
        self.cache.assign(prompts, [0] * len(prompts), begun)
        self.logits[mx.array(begun)] = self.prompt_logits[mx.array(prompts)[mx.array(begun)]]

    def _go_on(self) -> None:
        """Prefills what the rows in slots are told; their next turns begin."""
        told = {slot: self.told.pop(row) for slot, row in enumerate(self.slots) if row in self.told}
        if not told:
            return
        self._read(0)
        for slot, ids in told.items():
            row = self.slots[slot]
            self.record.sequences[row] += ids
            self._allow(row)
            self.cache.put_state(slot, self.states.pop(row))
            self.num_drawn[row] = self.record.lengths[row]
        num_columns = max(gpu.prefill_tokens() // len(told), 1)
        for begin in range(0, max(map(len, told.values())), num_columns):
            parts = {slot: part for slot, ids in told.items() if (part := ids[begin : begin + num_columns])}
            slots, lengths = list(parts), list(map(len, parts.values()))
            self.cache.aim(dict(zip(slots, lengths, strict=True)))
            tokens = mx.array([ids + [0] * (max(lengths) - len(ids)) for ids in parts.values()])
            hidden = self.model.hidden(tokens, self.cache)
            last = hidden[mx.arange(len(parts)), mx.array(lengths) - 1]
            self.logits[mx.array(slots)] = last @ self.model.head_weight.T  # the last part's stay
            self.cache.lengths[slots] += lengths
            mx.eval(self.logits, self.cache.arrays())  # wait: the next columns may use the memory of these
