"""
Rollouts whose rows take turns with a world: who sits in which slot, and what rows are told before they draw again.

Left out: rows that are told nothing (sampler.py), what a slot holds (turns/cache.py), who answers (turns/episodes.py).

Axes: N rows, L new positions, V vocabulary.
"""

from collections.abc import Callable
from typing import Any, Protocol

import mlx.core as mx
import numpy as np

from kv_cache import REFILL, SHRINK
from machine import gpu
from turns.cache import Columns, State, TurnCache


class Talk(Protocol):
    """What rows are told between their turns."""

    wait_s: float  # seconds waited for answers

    def begin(self, rows: list[int]) -> None:
        """These rows are drawn from their prompts on, some of them again."""

    def hear(self, row: int, ids: list[int]) -> None:
        """A turn of the row has ended with an end token, the last of its ids."""

    def replies(self, wait: bool) -> dict[int, list[int] | str]:
        """
        New answers to rows: the ids up to where the next turn begins, or why there is none ("stop", "turns").

        wait: for at least one; rows that were heard have one answer each, sooner or later.
        """


class Turns:
    """
    What the record of rows in turns has besides. A row that has ended draws nothing, for now; one with a reason never
    will again.

    record: the rollout's, a `sampler.Record`. context: positions that a row may have, with its prompt.
    """

    def __init__(self, record: Any, talk: Talk, context: int):
        self.record, self.talk, self.context = record, talk, context
        self.most, num_rows = record.limits.copy(), len(record.limits)
        self.prompt_lengths = np.zeros(num_rows, int)
        self.sequences: list[list[int]] = [[] for _ in range(num_rows)]
        self.places: list[list[int]] = [[] for _ in range(num_rows)]
        self.reasons = [""] * num_rows  # "length": --max-tokens; "context"; or what the talk says

    def is_over(self, row: int) -> bool:
        return bool(self.reasons[row])

    @property
    def num_over(self) -> int:
        return sum(map(bool, self.reasons))

    def begin(self, lengths: dict[int, int]) -> None:
        """Rows, with the lengths of their prompts, begin; those of an attempt that ran out of memory again."""
        for row, length in lengths.items():
            self.prompt_lengths[row], self.record.lengths[row] = length, 0
            self.sequences[row], self.places[row] = [], []
            self._allow(row)
        self.talk.begin(list(lengths))

    def _room(self, row: int) -> int:
        return int(self.context - self.prompt_lengths[row] - len(self.sequences[row]))

    def _allow(self, row: int) -> None:
        self.record.limits[row] = min(self.most[row], self.record.lengths[row] + self._room(row))
        self.record.ended[row] = False

    def hear(self, row: int) -> None:
        """Takes down a turn that has ended."""
        turn = self.record.ids[row, len(self.places[row]) : self.record.lengths[row]].tolist()
        self.places[row] += range(len(self.sequences[row]), len(self.sequences[row]) + len(turn))
        self.sequences[row] += turn
        if self.record.at_end(np.array([row]))[0]:
            self.talk.hear(row, turn)
        else:
            self.reasons[row] = self._limit(row)

    def _limit(self, row: int) -> str:
        return "length" if self.record.lengths[row] == self.most[row] else "context"

    def answered(self, wait: bool) -> dict[int, list[int]]:
        """What rows are told that go on; those that do not get their reasons."""
        found = {}
        for row, answer in self.talk.replies(wait).items():
            if isinstance(answer, str):
                self.reasons[row] = answer
            elif self.record.lengths[row] == self.most[row] or len(answer) >= self._room(row):
                self.reasons[row] = self._limit(row)
            else:
                found[row] = answer
        return found

    def go_on(self, row: int, told: list[int]) -> None:
        """The next turn begins after these ids."""
        self.sequences[row] += told
        self._allow(row)

    @gpu.without_gradients()
    def play(
        self,
        model: Any,
        forward: Callable[..., mx.array],
        cache: TurnCache,
        logits: mx.array,
        prompt_of: dict[int, int],
        table: np.ndarray,
    ) -> None:
        """
        `sampler.decode` for rows in turns; every step reads all draws but the newest.

        model: a `gwen.Model`, and its `decode_step`. logits (prompts, V): after each prompt. prompt_of: rows in the
        order in which they begin, each with the index of its prompt. table (rows, tokens, 4): their random numbers.
        """
        seats = Seats(self, model, forward, cache, prompt_of, logits, table)
        while not all(map(self.is_over, prompt_of)):
            if seats.is_drawing:
                seats.draw()
            seats.read(num_left=1 if seats.is_drawing else 0)
            seats.listen()
            seats.hand_on()
            seats.go_on()
            self.record.show()
        mx.synchronize()  # wait: a queued step holds the cache


class Seats:
    """
    The rows of a batch in turns: each in a slot of the cache, parked with its columns, or yet to begin.

    A row's columns are computed once. While it waits for an answer its slot may serve another row.
    """

    def __init__(
        self,
        turns: Turns,
        model: Any,
        forward: Callable[..., mx.array],
        cache: TurnCache,
        prompt_of: dict[int, int],
        logits: mx.array,
        table: np.ndarray,
    ):
        self.turns, self.record, self.model, self.forward, self.cache = turns, turns.record, model, forward, cache
        self.prompt_of, self.most, self.table = prompt_of, cache.num_slots, table
        self.place = {row: number for number, row in enumerate(prompt_of)}
        self.drawn = np.zeros(len(prompt_of), int)  # tokens of each row, also those after an end that was not read yet
        rows = list(prompt_of)
        self.slots, self.fresh = list[int](), rows[self.most :]  # the row of each slot; those that have not begun
        self.parked = dict[int, Columns]()
        self.states = dict[int, State]()  # of rows that wait for an answer
        self.told = dict[int, list[int]]()  # what rows are told next, those that wait for it without a slot included
        self.queued: list[tuple[np.ndarray, tuple[mx.array, ...]]] = []  # rows and draws of steps that were not read
        self.prompt_logits = logits
        self.logits = mx.zeros((self.most, logits.shape[1]), logits.dtype)
        self._seat(dict(enumerate(rows[: self.most])))

    @property
    def is_drawing(self) -> bool:
        return not self.record.ended[self.slots].all()

    def draw(self) -> None:
        """A token for each slot, used or not."""
        rows, most = np.array([self.place[row] for row in self.slots]), self.table.shape[1]
        uniform = mx.array(self.table[rows, np.minimum(self.drawn[rows], most - 1)])
        drawn = self.record.draw(self.logits, uniform)
        self.queued.append((np.array(self.slots), drawn))
        self.drawn[rows] += 1
        self.cache.aim(None)
        self.logits = self.forward(drawn[0][:, None], self.cache)[:, -1] @ self.model.head_weight.T
        self.cache.lengths += 1
        mx.async_eval(drawn, self.logits)

    def read(self, num_left: int) -> None:
        """Writes down the draws of all steps but the newest `num_left`."""
        while len(self.queued) > num_left:
            self.record.write(*self.queued.pop(0))  # wait

    def listen(self) -> None:
        """Hears turns that have ended, and what rows are told; waits for that if there is nothing else to do."""
        record, turns = self.record, self.turns
        for slot, row in enumerate(self.slots):
            if record.ended[row]:
                if len(turns.places[row]) < record.lengths[row]:
                    turns.hear(row)
                    num_extra = self.drawn[self.place[row]] - record.lengths[row]
                    self.states[row] = self.cache.take_state(slot, int(num_extra))
                self.cache.lengths[slot] = len(turns.sequences[row])  # what was drawn after the end is overwritten
        self.states = {row: state for row, state in self.states.items() if not turns.is_over(row)}
        idle = not (self.is_drawing or self.told or self.fresh or all(map(turns.is_over, self.prompt_of)))
        self.told |= turns.answered(wait=idle)

    def hand_on(self) -> None:
        """Gives free slots, and new ones up to the most that there were, to rows that can go on or begin."""
        record, num_slots = self.record, len(self.slots)
        free = [slot for slot, row in enumerate(self.slots) if record.ended[row] and row not in self.told]
        free.sort(key=lambda slot: not self.turns.is_over(self.slots[slot]))  # first those that nobody waits in
        ready = [row for row in self.told if row in self.parked] + self.fresh
        room, is_busy = len(free) + self.most - num_slots, len(free) < num_slots
        if ready and (room >= REFILL * num_slots or not is_busy):
            self.read(0)
            ready = ready[:room]
            self.fresh = [row for row in self.fresh if row not in ready]
            if (more := len(ready) - len(free)) > 0:
                self.cache.add(more)
                self.logits = mx.pad(self.logits, [(0, more), (0, 0)])
                free += range(num_slots, num_slots + more)
            self._seat(dict(zip(free, ready, strict=False)))
        elif not ready and is_busy and len(free) >= SHRINK * num_slots:
            self.read(0)
            kept = [slot for slot in range(num_slots) if slot not in free]
            self._park(free)
            self.cache.keep(kept)
            self.slots, self.logits = [self.slots[slot] for slot in kept], self.logits[mx.array(kept)]

    def _park(self, slots: list[int]) -> None:
        """Takes the columns of rows that wait out of their slots."""
        for slot in slots:
            if slot < len(self.slots) and not self.turns.is_over(row := self.slots[slot]):
                self.parked[row] = self.cache.take(slot)

    def _seat(self, row_of: dict[int, int]) -> None:
        """Gives slots to rows, which have nothing else in them."""
        self._park(list(row_of))
        held = dict(enumerate(self.slots)) | row_of
        self.slots = [held[slot] for slot in range(len(held))]
        self.cache.seat([self.prompt_of[row] for row in self.slots])
        for slot, row in row_of.items():
            if row in self.parked:
                self.cache.put(slot, self.parked.pop(row))
            else:
                self.cache.begin(slot)
                self.logits[slot] = self.prompt_logits[self.prompt_of[row]]

    def go_on(self) -> None:
        """Prefills what the rows in slots are told; their next turns begin."""
        slots = [slot for slot, row in enumerate(self.slots) if row in self.told]
        if not slots:
            return
        self.read(0)
        told = [self.told.pop(self.slots[slot]) for slot in slots]
        for slot, ids in zip(slots, told, strict=True):
            self.turns.go_on(row := self.slots[slot], ids)
            self.cache.put_state(slot, self.states.pop(row))
            self.drawn[self.place[row]] = self.record.lengths[row]
        num_columns = max(gpu.prefill_tokens() // len(slots), 1)
        for begin in range(0, max(map(len, told)), num_columns):
            parts = {slot: ids[begin : begin + num_columns] for slot, ids in zip(slots, told, strict=True)}
            parts = {slot: ids for slot, ids in parts.items() if ids}
            width = max(map(len, parts.values()))
            self.cache.aim({slot: len(ids) for slot, ids in parts.items()})
            tokens = mx.array([ids + [0] * (width - len(ids)) for ids in parts.values()])
            hidden = self.model.hidden(tokens, self.cache)
            last = hidden[mx.arange(len(parts)), mx.array([len(ids) - 1 for ids in parts.values()])]
            self.logits[mx.array(list(parts))] = last @ self.model.head_weight.T  # the last part's stay
            self.cache.lengths[list(parts)] += [len(ids) for ids in parts.values()]
            mx.eval(self.logits, self.cache.arrays())  # wait: the next columns may use the memory of these
