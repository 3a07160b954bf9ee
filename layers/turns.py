"""
Rollouts whose rows take turns with a world: who sits in which slot, and what rows are told before they draw again.

Left out: rows that are told nothing (sampler.py), the slots' cache (kv_cache.py), who answers (problems/episodes.py).

Axes: V vocabulary.
"""

from typing import Any

import mlx.core as mx
import numpy as np

from kv_cache import REFILL, SHRINK, SlotCache
from machine import gpu


class TurnScheduler:
    """
    Rows that take turns, in the slots of a cache: each sits in one from its first token to its last.

    A row that has ended draws nothing, for now; one with a reason never will again. While it waits for an answer its
    slot draws what nobody reads, so its columns stay in place.
    """

    def __init__(
        self, record: Any, model: Any, forward: Any, cache: SlotCache, logits: mx.array, rows_of: dict[Any, list[int]]
    ):
        """
        record: a `sampler.DecodeState` whose `talk` is a `problems.episodes.Episodes`. model: a `gwen.Model`, and its
        `decode_step`. logits (prompts, V): what comes after each prompt. rows_of: each prompt's rows, in the order in
        which they begin; those of an attempt that ran out of memory begin again.
        """
        self.record, self.model, self.forward, self.prompt_logits = record, model, forward, logits
        self.cache, num_slots = cache, cache.num_slots
        for net in self.cache.nets:
            net.keeps_before = True
        self.logits = mx.zeros((num_slots, logits.shape[1]), logits.dtype)
        self.prompt_of = {row: place for place, rows in enumerate(rows_of.values()) for row in rows}
        self.room = {row: record.talk.context - len(prompt) for prompt, rows in rows_of.items() for row in rows}
        rows = list(self.prompt_of)
        self.table, self.place = record.uniforms(rows), {row: number for number, row in enumerate(rows)}
        self.num_drawn = np.zeros(len(record.limits), int)  # tokens, also those after an end that was not read yet
        self.slots, self.fresh = rows[:num_slots], rows[num_slots:]  # the row of each slot; those that have not begun
        self.states = dict[int, list[tuple[mx.array, mx.array]]]()  # of the nets, of rows that wait for an answer
        self.told = dict[int, list[int]]()  # what rows are told next
        self.queued: list[tuple[np.ndarray, tuple[mx.array, ...]]] = []  # rows and draws of steps that were not read
        record.lengths[rows] = 0
        for row in rows:
            record.sequences[row], record.places[row] = [], []
            self._set_limit(row)
        record.talk.begin(rows)
        self._seat_rows(dict(enumerate(self.slots)))

    @gpu.without_gradients()
    def play(self) -> None:
        """`sampler.decode` for rows in turns; every step reads all draws but the newest."""
        while not all(map(self.record.is_over, self.prompt_of)):
            if self.is_drawing:
                self._draw()
            self._read(num_left=1 if self.is_drawing else 0)
            self._collect_replies()
            self._reuse_slots()
            self._prefill_replies()
            self.record.show()
        mx.synchronize()  # wait: a queued step holds the cache

    @property
    def is_drawing(self) -> bool:
        return not self.record.ended[self.slots].all()

    @property
    def complete_slots(self) -> list[int]:
        """The slots of rows that are complete."""
        return [slot for slot, row in enumerate(self.slots) if self.record.is_over(row)]

    def _draw(self) -> None:
        """A token for each slot, used or not."""
        places, most = [self.place[row] for row in self.slots], self.table.shape[1]
        uniform = mx.array(self.table[places, np.minimum(self.num_drawn[self.slots], most - 1)])
        drawn = self.record.draw(self.logits, uniform)
        self.queued.append((np.array(self.slots), drawn))
        self.num_drawn[self.slots] += 1
        self.cache.plan_writes()
        self.logits = self.forward(drawn[0][:, None], self.cache)[:, -1] @ self.model.head_weight.T
        mx.async_eval(drawn, self.logits)

    def _read(self, num_left: int) -> None:
        """Writes down the draws of all steps but the newest `num_left`."""
        while len(self.queued) > num_left:
            self.record.write(*self.queued.pop(0))  # wait

    def _collect_replies(self) -> None:
        """Hears turns that have ended, and what rows are told; waits for that if there is nothing else to do."""
        record = self.record
        for slot, row in enumerate(self.slots):
            if record.ended[row]:
                if len(record.places[row]) < (length := record.lengths[row]):
                    self._finish_turn(row)
                    extra = int(self.num_drawn[row] - length)  # tokens drawn after the end of the turn, 0 or 1
                    self.states[row] = [net.get_state(slot, extra) for net in self.cache.nets]
                    mx.async_eval(self.states[row])
                self.cache.lengths[slot] = len(record.sequences[row])  # what was drawn after the end is overwritten
        idle = not (self.is_drawing or self.told or self.complete_slots)
        for row, answer in record.talk.take_replies(wait=idle).items():
            if isinstance(answer, str):
                record.reasons[row] = answer
            elif record.lengths[row] == record.most[row] or len(answer) >= self._positions_left(row):
                record.reasons[row] = self._limit(row)
            else:
                self.told[row] = answer
        self.states = {row: state for row, state in self.states.items() if not record.is_over(row)}

    def _finish_turn(self, row: int) -> None:
        """Takes down a turn that has ended."""
        record, places, whole = self.record, self.record.places[row], self.record.sequences[row]
        turn = record.ids[row, len(places) : record.lengths[row]].tolist()
        places += range(len(whole), len(whole) + len(turn))
        whole += turn
        if record.has_ended(np.array([row]))[0]:
            record.talk.end_turn(row, turn)
        else:
            record.reasons[row] = self._limit(row)

    def _positions_left(self, row: int) -> int:
        """Positions that a row may still have."""
        return self.room[row] - len(self.record.sequences[row])

    def _set_limit(self, row: int) -> None:
        """Lets a row draw up to its limits."""
        self.record.limits[row] = min(self.record.most[row], self.record.lengths[row] + self._positions_left(row))
        self.record.ended[row] = False

    def _limit(self, row: int) -> str:
        return "length" if self.record.lengths[row] == self.record.most[row] else "context"

    def _reuse_slots(self) -> None:
        """Gives slots of complete rows to rows that have not begun, or drops them once there are none."""
        over, num_slots = self.complete_slots, len(self.slots)
        if not over or (self.is_drawing and len(over) < (REFILL if self.fresh else SHRINK) * num_slots):
            return
        self._read(0)
        if self.fresh:
            begun, self.fresh = self.fresh[: len(over)], self.fresh[len(over) :]
            self._seat_rows(dict(zip(over, begun, strict=False)))
        elif kept := [slot for slot in range(num_slots) if slot not in over]:
            self.cache.select_slots(kept)
            self.slots, self.logits = [self.slots[slot] for slot in kept], self.logits[mx.array(kept)]

    def _seat_rows(self, row_of: dict[int, int]) -> None:
        """Rows begin in slots, each after its prompt."""
        self.slots = [row_of.get(slot, row) for slot, row in enumerate(self.slots)]
        prompts, begun = [self.prompt_of[row] for row in self.slots], list(row_of)
        self.cache.assign(prompts, begun)
        self.logits[mx.array(begun)] = self.prompt_logits[mx.array(prompts)[mx.array(begun)]]

    def _prefill_replies(self) -> None:
        """Prefills what the rows in slots are told; their next turns begin."""
        told = {slot: self.told.pop(row) for slot, row in enumerate(self.slots) if row in self.told}
        if not told:
            return
        self._read(0)
        for slot, ids in told.items():
            row = self.slots[slot]
            self.record.sequences[row] += ids
            self._set_limit(row)
            for net, state in zip(self.cache.nets, self.states.pop(row), strict=True):
                net.set_state(mx.array([slot]), state)
            self.num_drawn[row] = self.record.lengths[row]
        num_columns = max(gpu.prefill_tokens() // len(told), 1)
        for begin in range(0, max(map(len, told.values())), num_columns):
            parts = {slot: part for slot, ids in told.items() if (part := ids[begin : begin + num_columns])}
            slots, lengths = list(parts), list(map(len, parts.values()))
            self.cache.plan_writes(dict(zip(slots, lengths, strict=True)))
            tokens = mx.array([ids + [0] * (max(lengths) - len(ids)) for ids in parts.values()])
            last = self.model.hidden(tokens, self.cache)[mx.arange(len(parts)), mx.array(lengths) - 1]
            self.logits[mx.array(slots)] = last @ self.model.head_weight.T  # the last part's stay
            mx.eval(self.logits, self.cache.arrays())  # wait: the next columns may use the memory of these
