"""
Decodes rows that take turns with tools or an environment.

A `TurnScheduler` decides which row sits in which slot, and prefills the reply that a row gets
before its next turn. Rows without turns are decoded in sampler.py. The slots' cache is in
kv_cache.py, and the replies come from tools/episodes.py.

Axes: V vocabulary.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import mlx.core as mx
import numpy as np

from kv_cache import REFILL, SHRINK, Cache, SlotCache
from machine import gpu


class Conversation(Protocol):
    """Answers the turns of rows: a `tools.episodes.Episodes`."""

    context: int  # the most positions that a row may have, including its prompt

    def begin(self, rows: list[int]) -> None: ...

    def end_turn(self, row: int, ids: list[int]) -> None: ...

    def take_replies(self, wait: bool) -> dict[int, list[int] | str]: ...


class RowState(Protocol):
    """The rows of a rollout: a `sampler.DecodeState`, which explains the fields."""

    max_tokens: np.ndarray
    limits: np.ndarray
    lengths: np.ndarray
    ended: np.ndarray
    ids: np.ndarray
    sequences: list[list[int]]
    places: list[list[int]]
    reasons: list[str]

    @property
    def conversation(self) -> Conversation | None: ...

    def is_over(self, row: int) -> bool: ...

    def has_ended(self, rows: np.ndarray) -> np.ndarray: ...

    def uniforms(self, rows: Sequence[int]) -> np.ndarray: ...

    def draw(self, logits: mx.array, uniforms: mx.array) -> tuple[mx.array, ...]: ...

    def write(self, rows: np.ndarray, drawn: Sequence[mx.array]) -> None: ...

    def show_progress(self) -> None: ...


class Model(Protocol):
    """A `gwen.Model`."""

    @property
    def head_weight(self) -> mx.array: ...

    def hidden(self, tokens: mx.array, cache: Cache | None = None) -> mx.array: ...


class TurnScheduler:
    """
    Rows that take turns, in the slots of a cache. A row keeps its slot until its last token.

    A row whose turn has ended gets no token until its reply comes. Meanwhile its slot still samples
    tokens, which nobody reads, so that its columns stay in place. A row with a finish reason is
    complete.
    """

    def __init__(
        self,
        state: RowState,
        model: Model,
        forward: Callable[[mx.array, SlotCache], mx.array],
        cache: SlotCache,
        prompt_logits: mx.array,
        rows_of: dict[tuple[int, ...], list[int]],
    ):
        """
        state: its `conversation` answers the turns. forward: `gwen.make_decode_step` of the model.
        prompt_logits (prompts, V): the logits after each prompt. rows_of: the rows of each prompt,
        in the order in which they begin. If an earlier attempt ran out of memory, its rows begin
        again.
        """
        assert state.conversation is not None, "rows without turns"
        self.state = state
        self.conversation = state.conversation
        self.model = model
        self.forward = forward
        self.cache = cache
        for net in cache.nets:
            net.keeps_before = True
        self.prompt_logits = prompt_logits
        num_slots = cache.num_slots
        self.logits = mx.zeros((num_slots, prompt_logits.shape[1]), prompt_logits.dtype)

        self.prompt_of: dict[int, int] = {}
        self.max_positions: dict[int, int] = {}  # the most positions of each row after its prompt
        for prompt_number, (prompt, prompt_rows) in enumerate(rows_of.items()):
            for row in prompt_rows:
                self.prompt_of[row] = prompt_number
                self.max_positions[row] = self.conversation.context - len(prompt)
        rows = list(self.prompt_of)
        self.uniforms = state.uniforms(rows)
        self.uniforms_index = {row: index for index, row in enumerate(rows)}
        # tokens sampled for each row, including those after an end that has not been read yet
        self.num_drawn = np.zeros(len(state.limits), int)

        self.slots = rows[:num_slots]  # the row of each slot
        self.waiting_rows = rows[num_slots:]  # rows that have not begun
        # for rows that wait for a reply, the states of the gated delta nets at the end of the turn
        self.net_states: dict[int, list[tuple[mx.array, mx.array]]] = {}
        self.replies: dict[int, list[int]] = {}  # the ids that each row gets next
        # rows and sampled tokens of steps that have not been read yet
        self.queued: list[tuple[np.ndarray, tuple[mx.array, ...]]] = []

        state.lengths[rows] = 0
        for row in rows:
            state.sequences[row] = []
            state.places[row] = []
            self._begin_turn(row)
        self.conversation.begin(rows)
        self._seat_rows(dict(enumerate(self.slots)))

    @gpu.without_gradients()
    def decode(self) -> None:
        """
        Samples all turns of all rows, as `sampler.decode` does for rows without turns.

        Each step reads all sampled tokens but the newest.
        """
        while not all(map(self.state.is_over, self.prompt_of)):
            if self.is_drawing:
                self._draw()
            self._read(num_left=1 if self.is_drawing else 0)
            self._end_turns()
            self._collect_replies()
            self._reuse_slots()
            self._prefill_replies()
            self.state.show_progress()
        mx.synchronize()  # wait: a queued step holds the cache

    @property
    def is_drawing(self) -> bool:
        """Whether a slot's row is in the middle of a turn."""
        return not self.state.ended[self.slots].all()

    @property
    def complete_slots(self) -> list[int]:
        """The slots of rows that are complete."""
        return [slot for slot, row in enumerate(self.slots) if self.state.is_over(row)]

    # ---- steps

    def _draw(self) -> None:
        """Queues a step: one token for each slot, whether its row reads it or not."""
        index = [self.uniforms_index[row] for row in self.slots]
        last_position = self.uniforms.shape[1] - 1
        positions = np.minimum(self.num_drawn[self.slots], last_position)
        drawn = self.state.draw(self.logits, mx.array(self.uniforms[index, positions]))
        self.queued.append((np.array(self.slots), drawn))
        self.num_drawn[self.slots] += 1

        self.cache.plan_writes()
        tokens = drawn[0]
        self.logits = self.forward(tokens[:, None], self.cache)[:, -1] @ self.model.head_weight.T
        mx.async_eval(drawn, self.logits)

    def _read(self, num_left: int) -> None:
        """Writes the tokens of all queued steps to the state, except for the newest `num_left`."""
        while len(self.queued) > num_left:
            rows, drawn = self.queued.pop(0)
            self.state.write(rows, drawn)  # wait

    # ---- turns

    def _end_turns(self) -> None:
        """Hands in ended turns, and stores the states of gated delta nets at the ends of these."""
        state = self.state
        for slot, row in enumerate(self.slots):
            if not state.ended[row]:
                continue
            length = state.lengths[row]
            if len(state.places[row]) < length:
                self._end_turn(row)
                # tokens sampled after the end of the turn, 0 or 1
                num_extra = int(self.num_drawn[row] - length)
                self.net_states[row] = [net.get_state(slot, num_extra) for net in self.cache.nets]
                mx.async_eval(self.net_states[row])
            # columns of tokens sampled after the end are overwritten
            self.cache.lengths[slot] = len(state.sequences[row])

    def _end_turn(self, row: int) -> None:
        """Adds the turn's tokens to the row's sequence, and asks for the reply to the turn."""
        state = self.state
        places = state.places[row]
        sequence = state.sequences[row]
        turn = state.ids[row, len(places) : state.lengths[row]].tolist()
        places.extend(range(len(sequence), len(sequence) + len(turn)))
        sequence.extend(turn)
        if state.has_ended(np.array([row]))[0]:
            self.conversation.end_turn(row, turn)
        else:
            state.reasons[row] = self._limit_reason(row)

    def _collect_replies(self) -> None:
        """
        Stores the replies that rows get next, or the reason why a row gets none.

        Waits for a reply if there is nothing else to do.
        """
        state = self.state
        is_idle = not (self.is_drawing or self.replies or self.complete_slots)
        replies = self.conversation.take_replies(wait=is_idle)
        for row, reply in replies.items():
            if isinstance(reply, str):
                state.reasons[row] = reply
                continue
            has_drawn_all = state.lengths[row] == state.max_tokens[row]
            if has_drawn_all or len(reply) >= self._positions_left(row):
                state.reasons[row] = self._limit_reason(row)
            else:
                self.replies[row] = reply

        for row in list(self.net_states):
            if state.is_over(row):
                del self.net_states[row]

    def _positions_left(self, row: int) -> int:
        """How many positions a row may still use."""
        return self.max_positions[row] - len(self.state.sequences[row])

    def _begin_turn(self, row: int) -> None:
        """Lets a row sample up to its limits."""
        state = self.state
        end_of_context = state.lengths[row] + self._positions_left(row)
        state.limits[row] = min(state.max_tokens[row], end_of_context)
        state.ended[row] = False

    def _limit_reason(self, row: int) -> str:
        """The finish reason of a row that has reached a limit."""
        return "length" if self.state.lengths[row] == self.state.max_tokens[row] else "context"

    # ---- slots

    def _reuse_slots(self) -> None:
        """Gives the slots of complete rows to waiting rows, or drops them if no row waits."""
        complete = self.complete_slots
        num_slots = len(self.slots)
        least = (REFILL if self.waiting_rows else SHRINK) * num_slots
        if not complete or (self.is_drawing and len(complete) < least):
            return

        self._read(num_left=0)
        if self.waiting_rows:
            new_rows = self.waiting_rows[: len(complete)]
            self.waiting_rows = self.waiting_rows[len(complete) :]
            self._seat_rows(dict(zip(complete, new_rows, strict=False)))
            return
        remaining = [slot for slot in range(num_slots) if slot not in complete]
        if remaining:
            self.cache.select_slots(remaining)
            self.slots = [self.slots[slot] for slot in remaining]
            self.logits = self.logits[mx.array(remaining)]

    def _seat_rows(self, row_of: dict[int, int]) -> None:
        """Starts rows in slots, each after its prompt. row_of: their new rows, by slot."""
        self.slots = [row_of.get(slot, row) for slot, row in enumerate(self.slots)]
        prompts = [self.prompt_of[row] for row in self.slots]
        new_slots = list(row_of)
        self.cache.assign(prompts, new_slots)
        new_prompts = mx.array(prompts)[mx.array(new_slots)]
        self.logits[mx.array(new_slots)] = self.prompt_logits[new_prompts]

    # ---- replies

    def _prefill_replies(self) -> None:
        """Prefills the replies of the rows in slots, whose next turns then begin."""
        replies: dict[int, list[int]] = {}  # by slot
        for slot, row in enumerate(self.slots):
            if row in self.replies:
                replies[slot] = self.replies.pop(row)
        if not replies:
            return

        self._read(num_left=0)
        for slot, ids in replies.items():
            row = self.slots[slot]
            self.state.sequences[row] += ids
            self._begin_turn(row)
            net_states = self.net_states.pop(row)
            for net, net_state in zip(self.cache.nets, net_states, strict=True):
                net.set_state(mx.array([slot]), net_state)
            self.num_drawn[row] = self.state.lengths[row]

        num_columns = max(gpu.prefill_tokens() // len(replies), 1)
        longest = max(map(len, replies.values()))
        for begin in range(0, longest, num_columns):
            parts: dict[int, list[int]] = {}
            for slot, ids in replies.items():
                part = ids[begin : begin + num_columns]
                if part:
                    parts[slot] = part
            self._prefill(parts)

    def _prefill(self, ids_of: dict[int, list[int]]) -> None:
        """Computes the next ids of some slots, and the logits after the last id of each slot."""
        slots = list(ids_of)
        lengths = [len(ids) for ids in ids_of.values()]
        width = max(lengths)
        self.cache.plan_writes(dict(zip(slots, lengths, strict=True)))
        tokens = mx.array([ids + [0] * (width - len(ids)) for ids in ids_of.values()])
        last_places = mx.arange(len(slots)), mx.array(lengths) - 1
        last_hidden = self.model.hidden(tokens, self.cache)[last_places]
        # a later part of a reply overwrites the logits
        self.logits[mx.array(slots)] = last_hidden @ self.model.head_weight.T
        mx.eval(self.logits, self.cache.arrays())  # wait: the next columns may use this memory
