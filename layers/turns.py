"""
Decodes rows that take turns with tools or an environment.

A `TurnScheduler` decides when a row's turn ends, and prefills the reply that the row gets before
its next turn. Within a turn, a decoder in sampler.py samples the tokens, as it does for rows
without turns. The slots' cache is in kv_cache.py, and the replies come from tools/episodes.py.
"""

from typing import Protocol

import cpu_blas  # noqa: F401  (before mlx)
import mlx.core as mx
import numpy as np

from kv_cache import SlotCache
from machine import gpu


class RowEpisodes(Protocol):
    """
    Supplies the reply to each turn of a row.

    `tools.episodes.Episodes` and `serving.episodes.ServedEpisodes` implement this interface.
    """

    context: int  # the maximum number of positions in a row, including its prompt
    wait_s: float  # how many seconds the sampler has waited for replies

    def begin_or_restart_decoding(self, rows: list[int]) -> None:
        """Prepares rows for decoding. A row that already had turns starts over from its prompt."""

    def max_tokens_of_next_turn(self, row: int) -> int | None:
        """
        The maximum number of tokens in the row's next turn.

        None means that the turn has no limit of its own, only the limits of the whole row.
        """

    def end_turn(self, row: int, ids: list[int], logprobs: np.ndarray) -> None:
        """Receives the ids of a turn that has ended. The row then waits for a reply."""

    def receive_unfinished_turn(
        self, row: int, ids: list[int], logprobs: np.ndarray, reason: str
    ) -> None:
        """
        Receives the unfinished turn of a row that has ended at a limit.

        ids: empty if the row has ended between two turns. reason: the row's finish reason.
        """

    def take_replies(self, wait: bool) -> dict[int, list[int] | str]:
        """
        Returns the replies that are ready, by row.

        A reply consists of the ids that the row gets before its next turn. If the row has ended,
        the reply is the row's finish reason instead. If a row has ended in the middle of a turn,
        the caller drops the tokens of that turn.
        wait: whether to wait until at least one reply is ready.
        """
        ...


class RowState(Protocol):
    """The interface of `sampler.DecodeState`, which describes the rows of a rollout."""

    max_tokens: np.ndarray
    limits: np.ndarray
    lengths: np.ndarray
    ended: np.ndarray
    ids: np.ndarray
    columns: list[np.ndarray]
    sequences: list[list[int]]
    places: list[list[int]]
    reasons: list[str]

    @property
    def episodes(self) -> RowEpisodes | None: ...

    def is_over(self, row: int) -> bool: ...

    def is_at_end_token_or_stop(self, rows: np.ndarray) -> np.ndarray: ...

    def show_progress(self) -> None: ...


class Decoder(Protocol):
    """The interface of `sampler.SlotDecoder`, which samples tokens for the rows in slots."""

    cache: SlotCache
    rows: np.ndarray
    num_sampled: np.ndarray

    @property
    def state(self) -> RowState: ...

    def queue_step(self) -> None: ...

    def read_all_but_newest(self, num_newest: int) -> None: ...

    def append_ids_and_update_logits(self, ids_by_slot: dict[int, list[int]]) -> None: ...

    def is_refill_or_drop_worthwhile(self, num_idle: int) -> bool: ...

    def refill_or_drop_slots(self, idle_slots: list[int]) -> None: ...


class TurnScheduler:
    """
    Samples rows that take turns, in the slots of a decoder. A row keeps its slot while it waits.

    A row whose turn has ended gets no token until its reply comes. Meanwhile, the tokens that are
    sampled in the row's slot are dropped, because a decode step always samples a token for every
    slot. A row with a finish reason is complete.
    """

    def __init__(self, decoder: Decoder, prompt_lengths: dict[int, int]):
        """prompt_lengths: the number of prompt tokens of each row."""
        state = decoder.state
        assert state.episodes is not None, "the decoder's rows take no turns"
        self.decoder = decoder
        self.cache = decoder.cache
        self.state = state
        self.episodes = state.episodes
        for net in self.cache.nets:
            net.keeps_before = True

        # the maximum number of positions of each row after its prompt
        self.max_positions: dict[int, int] = {}
        for row, length in prompt_lengths.items():
            self.max_positions[row] = self.episodes.context - length
        # for rows that wait for a reply, the states of the gated delta nets at the end of the turn
        self.delta_states: dict[int, list[tuple[mx.array, mx.array]]] = {}
        self.replies: dict[int, list[int]] = {}  # the ids that each row gets next

        rows = list(prompt_lengths)
        # before the turns begin, because this call may change their limits
        self.episodes.begin_or_restart_decoding(rows)
        for row in rows:
            state.sequences[row] = []
            state.places[row] = []
            self._begin_turn(row)

    @gpu.without_gradients()
    def decode(self) -> None:
        """
        Samples all turns of all rows.

        After each decode step, this function reads all sampled tokens except those of the newest
        step, which may still be under way. If no row is in a turn, it also reads these tokens.
        """
        while not all(map(self.state.is_over, self.max_positions)):
            if self.is_sampling:
                self.decoder.queue_step()
            self.decoder.read_all_but_newest(num_newest=1 if self.is_sampling else 0)
            self._end_turns_and_store_delta_states()
            self._collect_environment_replies()
            self._reuse_or_drop_slots_of_complete_rows()
            self._prefill_replies()
            self.state.show_progress()
        mx.synchronize()  # wait, because a queued step still uses the cache

    @property
    def row_of_slot(self) -> list[int]:
        """The row of each slot."""
        return self.decoder.rows.tolist()

    @property
    def is_sampling(self) -> bool:
        """Whether a slot's row is in the middle of a turn."""
        return not self.state.ended[self.decoder.rows].all()

    @property
    def slots_of_complete_rows(self) -> list[int]:
        """The slots of rows that are complete."""
        return [slot for slot, row in enumerate(self.row_of_slot) if self.state.is_over(row)]

    # ---- turns

    def _end_turns_and_store_delta_states(self) -> None:
        """Ends turns, and stores the states of the gated delta nets at the end of each turn."""
        state = self.state
        for slot, row in enumerate(self.row_of_slot):
            if not state.ended[row]:
                continue
            length = state.lengths[row]
            if len(state.places[row]) < length:
                self._store_turn_and_ask_for_reply(row)
                # tokens sampled after the end of the turn, 0 or 1
                num_extra = int(self.decoder.num_sampled[row] - length)
                self.delta_states[row] = [net.get_state(slot, num_extra) for net in self.cache.nets]
                mx.async_eval(self.delta_states[row])
            # later writes overwrite the columns of tokens that were sampled after the end
            self.cache.lengths[slot] = len(state.sequences[row])

    def _store_turn_and_ask_for_reply(self, row: int) -> None:
        """Adds the turn's tokens to the row's sequence, and asks for the reply to the turn."""
        state = self.state
        places = state.places[row]
        sequence = state.sequences[row]
        begin = len(places)
        end = int(state.lengths[row])
        turn = state.ids[row, begin:end].tolist()
        logprobs = state.columns[1][row, begin:end].copy()
        places.extend(range(len(sequence), len(sequence) + len(turn)))
        sequence.extend(turn)
        is_finished = bool(state.is_at_end_token_or_stop(np.array([row]))[0])
        if is_finished or not self._is_at_limit(row):
            self.episodes.end_turn(row, turn, logprobs)
        else:
            self._end_row_at_limit(row, turn, logprobs)

    def _is_at_limit(self, row: int) -> bool:
        """
        Whether a row has reached a limit of the whole row, rather than only the limit of its turn.
        """
        state = self.state
        return state.lengths[row] == state.max_tokens[row] or self._positions_left(row) <= 0

    def _end_row_at_limit(self, row: int, turn: list[int], logprobs: np.ndarray) -> None:
        """Ends a row that has reached a limit. turn: the ids of its unfinished turn, if any."""
        reason = self._finish_reason_at_limit(row)
        self.state.reasons[row] = reason
        self.episodes.receive_unfinished_turn(row, turn, logprobs, reason)

    def _drop_unfinished_turn(self, row: int) -> None:
        """If the row is in the middle of a turn, ends this turn and drops its tokens."""
        state = self.state
        if not state.ended[row]:
            state.ended[row] = True
            state.lengths[row] = len(state.places[row])

    def _collect_environment_replies(self) -> None:
        """
        Stores the replies that rows get next, or the reason why a row gets none.

        Waits for a reply if there is nothing else to do.
        """
        state = self.state
        is_idle = not (self.is_sampling or self.replies or self.slots_of_complete_rows)
        replies = self.episodes.take_replies(wait=is_idle)
        for row, reply in replies.items():
            if isinstance(reply, str):
                self._drop_unfinished_turn(row)
                state.reasons[row] = reply
                continue
            has_sampled_all = state.lengths[row] == state.max_tokens[row]
            if has_sampled_all or len(reply) >= self._positions_left(row):
                self._end_row_at_limit(row, [], np.zeros(0, np.float32))
            else:
                self.replies[row] = reply

        for row in list(self.delta_states):
            if state.is_over(row):
                del self.delta_states[row]

    def _positions_left(self, row: int) -> int:
        """How many positions a row may still use."""
        return self.max_positions[row] - len(self.state.sequences[row])

    def _begin_turn(self, row: int) -> None:
        """Begins a row's next turn, and sets the limit at which this turn must end."""
        state = self.state
        end_of_context = state.lengths[row] + self._positions_left(row)
        limit = min(state.max_tokens[row], end_of_context)
        max_tokens_of_next_turn = self.episodes.max_tokens_of_next_turn(row)
        if max_tokens_of_next_turn is not None:
            limit = min(limit, state.lengths[row] + max_tokens_of_next_turn)
        state.limits[row] = limit
        state.ended[row] = False

    def _finish_reason_at_limit(self, row: int) -> str:
        """The finish reason of a row that has reached a limit."""
        return "length" if self.state.lengths[row] == self.state.max_tokens[row] else "context"

    def _reuse_or_drop_slots_of_complete_rows(self) -> None:
        """
        Gives the slots of complete rows to rows that have no slot yet.

        If there are no such rows, drops the slots instead.
        """
        complete = self.slots_of_complete_rows
        if not complete:
            return
        if self.is_sampling and not self.decoder.is_refill_or_drop_worthwhile(len(complete)):
            return
        self.decoder.read_all_but_newest(num_newest=0)
        self.decoder.refill_or_drop_slots(complete)

    # ---- replies

    def _prefill_replies(self) -> None:
        """Prefills the replies to the rows in slots, and begins the next turns of these rows."""
        row_of_slot = self.row_of_slot
        replies: dict[int, list[int]] = {}  # by slot
        for slot, row in enumerate(row_of_slot):
            if row in self.replies:
                replies[slot] = self.replies.pop(row)
        if not replies:
            return

        self.decoder.read_all_but_newest(num_newest=0)
        for slot, ids in replies.items():
            row = row_of_slot[slot]
            self.state.sequences[row] += ids
            self._begin_turn(row)
            delta_states = self.delta_states.pop(row)
            for net, delta_state in zip(self.cache.nets, delta_states, strict=True):
                net.set_state(mx.array([slot]), delta_state)
            self.decoder.num_sampled[row] = self.state.lengths[row]

        num_columns = max(gpu.prefill_tokens_per_pass() // len(replies), 1)
        longest = max(map(len, replies.values()))
        for begin in range(0, longest, num_columns):
            parts: dict[int, list[int]] = {}
            for slot, ids in replies.items():
                part = ids[begin : begin + num_columns]
                if part:
                    parts[slot] = part
            self.decoder.append_ids_and_update_logits(parts)
