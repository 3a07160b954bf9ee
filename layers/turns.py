"""
Decodes rows that take turns with tools or an environment.

A `TurnScheduler` decides when a row's turn ends, and prefills the reply that the row gets before
its next turn. The steps between two decisions are those of a decoder in sampler.py, where rows
without turns are decoded too. The slots' cache is in kv_cache.py, and the replies come from
tools/episodes.py.
"""

from typing import Protocol

import mlx.core as mx
import numpy as np

from kv_cache import SlotCache
from machine import gpu


class Conversation(Protocol):
    """Answers the turns of rows: a `tools.episodes.Episodes`."""

    context: int  # the most positions that a row may have, including its prompt

    def begin(self, rows: list[int]) -> None: ...

    def end_turn(self, row: int, ids: list[int]) -> None: ...

    def take_replies(self, wait: bool) -> dict[int, list[int] | str]: ...


class RowState(Protocol):
    """The rows of a rollout: a `sampler.DecodeState`, which explains the members."""

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

    def show_progress(self) -> None: ...


class Decoder(Protocol):
    """Samples tokens for rows in slots: a `sampler.SlotDecoder`, which explains the members."""

    cache: SlotCache
    rows: np.ndarray
    num_sampled: np.ndarray

    @property
    def state(self) -> RowState: ...

    def queue_step(self) -> None: ...

    def read_steps(self, num_left: int) -> None: ...

    def append_ids(self, ids_of: dict[int, list[int]]) -> None: ...

    def has_enough_idle(self, num_idle: int) -> bool: ...

    def reuse_slots(self, idle: list[int]) -> None: ...


class TurnScheduler:
    """
    Samples rows that take turns, in the slots of a decoder. A row keeps its slot while it waits.

    A row whose turn has ended gets no token until its reply comes. Meanwhile its slot still samples
    tokens, which are dropped, so that its columns stay in place. A row with a finish reason is
    complete.
    """

    def __init__(self, decoder: Decoder, prompt_lengths: dict[int, int]):
        """prompt_lengths: the number of prompt tokens of each row."""
        state = decoder.state
        assert state.conversation is not None, "rows without turns"
        self.decoder = decoder
        self.cache = decoder.cache
        self.state = state
        self.conversation = state.conversation
        for net in self.cache.nets:
            net.keeps_before = True

        # the most positions of each row after its prompt
        self.max_positions: dict[int, int] = {}
        for row, length in prompt_lengths.items():
            self.max_positions[row] = self.conversation.context - length
        # for rows that wait for a reply, the states of the gated delta nets at the end of the turn
        self.net_states: dict[int, list[tuple[mx.array, mx.array]]] = {}
        self.replies: dict[int, list[int]] = {}  # the ids that each row gets next

        rows = list(prompt_lengths)
        for row in rows:
            state.sequences[row] = []
            state.places[row] = []
            self._begin_turn(row)
        self.conversation.begin(rows)

    @gpu.without_gradients()
    def decode(self) -> None:
        """
        Samples all turns of all rows.

        After each step, it reads all sampled tokens except the newest. When no row is in a turn, it
        reads that token too.
        """
        while not all(map(self.state.is_over, self.max_positions)):
            if self.is_sampling:
                self.decoder.queue_step()
            self.decoder.read_steps(num_left=1 if self.is_sampling else 0)
            self._end_turns()
            self._collect_replies()
            self._reuse_slots()
            self._prefill_replies()
            self.state.show_progress()
        mx.synchronize()  # wait: a queued step holds the cache

    @property
    def rows(self) -> list[int]:
        """The row of each slot."""
        return self.decoder.rows.tolist()

    @property
    def is_sampling(self) -> bool:
        """Whether a slot's row is in the middle of a turn."""
        return not self.state.ended[self.decoder.rows].all()

    @property
    def complete_slots(self) -> list[int]:
        """The slots of rows that are complete."""
        return [slot for slot, row in enumerate(self.rows) if self.state.is_over(row)]

    # ---- turns

    def _end_turns(self) -> None:
        """Ends turns, and stores the states that the gated delta nets had at their ends."""
        state = self.state
        for slot, row in enumerate(self.rows):
            if not state.ended[row]:
                continue
            length = state.lengths[row]
            if len(state.places[row]) < length:
                self._end_turn(row)
                # tokens sampled after the end of the turn, 0 or 1
                num_extra = int(self.decoder.num_sampled[row] - length)
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
        is_idle = not (self.is_sampling or self.replies or self.complete_slots)
        replies = self.conversation.take_replies(wait=is_idle)
        for row, reply in replies.items():
            if isinstance(reply, str):
                state.reasons[row] = reply
                continue
            has_sampled_all = state.lengths[row] == state.max_tokens[row]
            if has_sampled_all or len(reply) >= self._positions_left(row):
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

    def _reuse_slots(self) -> None:
        """Gives the slots of complete rows to waiting rows, or drops them if no row waits."""
        complete = self.complete_slots
        if not complete:
            return
        if self.is_sampling and not self.decoder.has_enough_idle(len(complete)):
            return
        self.decoder.read_steps(num_left=0)
        self.decoder.reuse_slots(complete)

    # ---- replies

    def _prefill_replies(self) -> None:
        """Prefills the replies of the rows in slots, whose next turns then begin."""
        rows = self.rows
        replies: dict[int, list[int]] = {}  # by slot
        for slot, row in enumerate(rows):
            if row in self.replies:
                replies[slot] = self.replies.pop(row)
        if not replies:
            return

        self.decoder.read_steps(num_left=0)
        for slot, ids in replies.items():
            row = rows[slot]
            self.state.sequences[row] += ids
            self._begin_turn(row)
            net_states = self.net_states.pop(row)
            for net, net_state in zip(self.cache.nets, net_states, strict=True):
                net.set_state(mx.array([slot]), net_state)
            self.decoder.num_sampled[row] = self.state.lengths[row]

        num_columns = max(gpu.prefill_tokens_per_pass() // len(replies), 1)
        longest = max(map(len, replies.values()))
        for begin in range(0, longest, num_columns):
            parts: dict[int, list[int]] = {}
            for slot, ids in replies.items():
                part = ids[begin : begin + num_columns]
                if part:
                    parts[slot] = part
            self.decoder.append_ids(parts)
