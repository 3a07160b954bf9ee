"""
The episodes of one rollout, which an outside harness plays.

The harness asks the endpoint for each turn of the model. A request contains the whole conversation
so far: the ids of the previous request and of its reply, and then the ids that the environment has
added. `ServedEpisodes` passes ids between the sampler and the harness:

- When the sampler (layers/turns.py) ends a turn, the turn becomes the reply to the open request.
- When the harness sends the next request, the ids that the environment has added continue the row.

An episode ends when the harness reports its result. A failed episode has an `error`, and does not
affect the other episodes.

This file does not cover HTTP (serving/endpoint.py), the process of the harness (serving/harness.py)
or samples (step/player.py).

Axes: N episodes.
"""

import contextlib
import dataclasses
import json
import math
import time
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeGuard

import numpy as np

from rewards.rewards import LARGEST_REWARD
from sampler import SamplingParams
from serving.endpoint import RequestCancellation
from serving.harness import POLL_SECONDS, Harness
from serving.requests import FIXED_SETTINGS, OFF, GenerateRequest, PendingRequest, RefusedRequest

# The first requests of a wave are gathered until the harness has been quiet for GATHER_SECONDS. If
# fewer than half of the episodes have sent a request, the limit is FEW_GATHER_SECONDS, because
# programs that have just been started send their requests one after another.
GATHER_SECONDS = 0.5
FEW_GATHER_SECONDS = 5.0
CANNOT_REPEAT = "memory ran out, and a turn could not be repeated exactly"
# the largest difference between the log-probability that was sent and the one in the result
MOST_LOGPROB_DIFFERENCE = 1e-4


class Turn(NamedTuple):
    """A turn of the model, as the harness has received it."""

    ids: list[int]
    logprobs: np.ndarray
    limit: int | None  # the request's limit on the turn's tokens


class EpisodeOutcome(NamedTuple):
    """What the harness reports about an episode that finished without an error."""

    reward: float
    metrics: dict[str, float]
    messages: list[dict[str, Any]]  # the conversation after the prompt


@dataclasses.dataclass(eq=False)
class ServedEpisode:
    """One episode of the harness."""

    number: int  # names the episode in messages to and from the harness
    last_sign: float  # the time of the last sign of life, in seconds of `time.monotonic`
    session: str = ""  # the name in the episode's requests; "" until the harness announces it
    pending: PendingRequest | None = None  # the request that has no reply yet
    prompt: list[int] = dataclasses.field(default_factory=list)  # the ids of the first request
    turns: list[Turn] = dataclasses.field(default_factory=list)
    # the ids that the environment has added after each turn; those after the last turn are missing
    # until the next request arrives
    additions: list[list[int]] = dataclasses.field(default_factory=list)
    # less than the number of `turns` while the row samples its turns again after memory ran out
    num_sampled_turns: int = 0
    end_reason: str = ""  # the limit at which the row ended: "length" or "context"
    outcome: EpisodeOutcome | None = None
    error: str = ""  # why the episode cannot be used

    @property
    def is_over(self) -> bool:
        """Whether Gwen expects nothing more from the harness for this episode."""
        return self.outcome is not None or bool(self.error)

    @property
    def conversation_ids(self) -> list[int]:
        """All ids of the conversation so far, without a turn that is still being sampled."""
        ids = list(self.prompt)
        for place, turn in enumerate(self.turns):
            ids += turn.ids
            if place < len(self.additions):
                ids += self.additions[place]
        return ids

    @property
    def own_positions(self) -> list[int]:
        """The positions in `conversation_ids` of the tokens that the model wrote."""
        positions: list[int] = []
        begin = len(self.prompt)
        for place, turn in enumerate(self.turns):
            positions += range(begin, begin + len(turn.ids))
            begin += len(turn.ids)
            if place < len(self.additions):
                begin += len(self.additions[place])
        return positions


class ServedEpisodes:
    """
    The episodes of a rollout. Implements `layers.turns.RowEpisodes` for the rows of each wave.

    A wave consists of the episodes whose first requests arrived at about the same time. They are
    decoded together. Row r of a wave is the episode `wave[r]`.
    """

    def __init__(
        self,
        harness: Harness,
        num_episodes: int,
        params: SamplingParams,
        *,
        context: int,
        vocabulary_size: int,
        timeout: float,
    ):
        """
        params: the sampling settings of all turns; a request with different settings is refused.
        context: the maximum number of tokens in a conversation.
        timeout: an episode fails if the harness sends nothing about it for this many seconds,
        unless a request of the episode is waiting for its reply.
        """
        self.harness = harness
        self.params = params
        self.context = context
        self.vocabulary_size = vocabulary_size
        self.timeout = timeout
        self.wait_s = 0.0  # how many seconds the sampler has waited for the harness
        now = time.monotonic()
        self.last_event = now
        self.episodes = [
            ServedEpisode(harness.next_episode_number(), now) for _ in range(num_episodes)
        ]
        self._by_number = {episode.number: episode for episode in self.episodes}
        self._by_session: dict[str, ServedEpisode] = {}
        self._unannounced: dict[str, PendingRequest] = {}  # by session
        self.wave: list[ServedEpisode] = []
        self._has_begun = set[int]()  # the numbers of the episodes that are or were in a wave
        self._ready: dict[int, list[int] | str] = {}  # by row of the wave
        self._rows = set[int]()  # the rows that the sampler decodes at the moment
        harness.endpoint.most_open = 2 * num_episodes
        harness.endpoint.context = context

    # ---- waves

    def gather_wave(self) -> list[ServedEpisode]:
        """
        Waits for the first requests of episodes, and returns these episodes as the new wave.

        The wave is empty if all episodes have been in a wave or are over.
        """
        while True:
            has_event = self._handle_event(POLL_SECONDS)
            open_episodes = [
                episode
                for episode in self.episodes
                if not episode.is_over and episode.number not in self._has_begun
            ]
            arrived = [episode for episode in open_episodes if episode.pending]
            has_most = 2 * len(arrived) >= len(open_episodes)
            gather_seconds = GATHER_SECONDS if has_most else FEW_GATHER_SECONDS
            is_quiet = time.monotonic() - self.last_event > gather_seconds
            if len(arrived) == len(open_episodes) or (arrived and is_quiet):
                break
            if not has_event:
                self._fail_silent_episodes()
        self.wave = arrived
        self._has_begun.update(episode.number for episode in arrived)
        self._ready = {}
        self._rows = set()
        return arrived

    def wait_for_results(self) -> None:
        """Waits until each episode has an outcome or an error."""
        while not all(episode.is_over for episode in self.episodes):
            if not self._handle_event(POLL_SECONDS):
                self._fail_silent_episodes()

    def cancel_episodes_and_refuse_requests(self) -> None:
        """Cancels the episodes that are not over, and refuses all requests."""
        self.harness.endpoint.most_open = 0
        for episode in self.episodes:
            if not episode.is_over:
                self._fail_and_cancel_episode(episode, "the rollout was interrupted")
        for pending in self._unannounced.values():
            pending.refuse("the rollout has ended", status=409)

    # ---- methods that the sampler calls

    def begin_or_restart_decoding(self, rows: list[int]) -> None:
        """
        Begins these rows. No other rows are decoded until these rows are over.

        If a row begins again because memory ran out, the turns that the harness has already
        received are sampled again first.
        """
        self._rows = set(rows)
        self._ready = {}
        for row, episode in enumerate(self.wave):
            if row in self._rows:
                episode.num_sampled_turns = 0
            if episode.is_over:
                self._end_row_of(episode)

    def max_tokens_of_next_turn(self, row: int) -> int | None:
        """
        The maximum number of tokens in the row's next turn, according to the request for this turn.

        Returns None if the request sets no limit.
        """
        episode = self.wave[row]
        if episode.num_sampled_turns < len(episode.turns):
            return episode.turns[episode.num_sampled_turns].limit
        return episode.pending.request.max_tokens if episode.pending else None

    def end_turn(self, row: int, ids: list[int], logprobs: np.ndarray) -> None:
        """Sends a turn to the harness, unless the harness received it before memory ran out."""
        episode = self.wave[row]
        number = episode.num_sampled_turns
        episode.num_sampled_turns += 1
        if number < len(episode.turns):
            self._compare_resampled_turn(row, number, ids)
            return
        self._record_turn_and_answer_request(episode, ids, logprobs)

    def _compare_resampled_turn(self, row: int, number: int, ids: list[int]) -> None:
        """Compares a turn that was sampled again with the one that the harness has received."""
        episode = self.wave[row]
        if ids != episode.turns[number].ids:
            self._fail_and_cancel_episode(episode, CANNOT_REPEAT)
        elif number < len(episode.additions):
            self._ready[row] = episode.additions[number]
        elif episode.is_over:
            self._ready[row] = "stop"

    def receive_unfinished_turn(
        self, row: int, ids: list[int], logprobs: np.ndarray, reason: str
    ) -> None:
        """Sends the harness the unfinished turn of a row that has reached a limit."""
        episode = self.wave[row]
        episode.end_reason = reason
        if episode.num_sampled_turns < len(episode.turns):
            self._fail_and_cancel_episode(episode, CANNOT_REPEAT)
        elif ids:
            self._record_turn_and_answer_request(episode, ids, logprobs)
        elif episode.pending:
            episode.pending.refuse(self._explain_that_context_is_full(episode.pending.request))
            episode.pending = None
            episode.additions.pop()

    def take_replies(self, wait: bool) -> dict[int, list[int] | str]:
        """
        Removes and returns the replies that are ready, by row.

        A row gets the ids that the environment has added, or "stop" if its episode is over.

        wait: whether to wait until at least one reply is ready.
        """
        start = time.perf_counter()
        while True:
            has_event = self._handle_event(POLL_SECONDS if wait and not self._ready else 0.0)
            if has_event:
                continue
            self._fail_silent_episodes()
            if self._ready or not wait:
                break
        if wait:
            self.wait_s += time.perf_counter() - start
        replies = self._ready
        self._ready = {}
        return replies

    def _record_turn_and_answer_request(
        self, episode: ServedEpisode, ids: list[int], logprobs: np.ndarray
    ) -> None:
        """Records a turn of the episode, and sends the turn as the reply to the open request."""
        limit = None
        if episode.pending:
            limit = episode.pending.request.max_tokens
            is_finished = ids[-1] in self.params.eos_ids
            episode.pending.answer(ids, logprobs.tolist(), "stop" if is_finished else "length")
            episode.pending = None
        episode.turns.append(Turn(ids, logprobs, limit))
        episode.last_sign = time.monotonic()

    # ---- events of the harness

    def _handle_event(self, timeout: float) -> bool:
        """
        Handles the next event, if there is one. Returns whether there was one.

        Raises HarnessEnded if the harness has ended.
        """
        event = self.harness.take_event(timeout)
        if event is None:
            return False
        self.last_event = time.monotonic()
        if isinstance(event, PendingRequest):
            self._receive_request(event)
        elif isinstance(event, RequestCancellation):
            self._fail_episode_of_cancelled_request(event.pending)
        else:
            self._receive_message(event)
        return True

    def _receive_message(self, message: dict[str, Any]) -> None:
        kind = message["type"]
        number = message.get("episode")
        if kind not in ("session", "result"):
            self.harness.refuse_message(message, "its type is neither session nor result")
        if not self.harness.knows_episode_number(number):
            self.harness.refuse_message(message, "Gwen has not asked for this episode")
        self.harness.refuse_repeated_message(message)
        assert isinstance(number, int)
        episode = self._by_number.get(number)
        if episode is None:  # a cancelled episode of an earlier rollout
            return
        episode.last_sign = time.monotonic()
        if kind == "session":
            self._connect_session(episode, message.get("session"))
        else:
            self._receive_result(episode, message)

    def _connect_session(self, episode: ServedEpisode, session: Any) -> None:
        """Assigns all requests that have this session's name to the episode."""
        if episode.is_over and episode.session:
            return
        if not isinstance(session, str) or not session:
            self._fail_and_cancel_episode(
                episode, f"its session is {session!r:.40}, which is not a name"
            )
            return
        if episode.session:
            self._fail_and_cancel_episode(
                episode,
                "it has two sessions; only episodes with one agent and without retries are "
                "supported",
            )
            return
        other = self._by_session.get(session)
        if other is not None:
            self._fail_and_cancel_episode(
                episode, f"episode {other.number} has the same session {session!r:.40}"
            )
            return
        episode.session = session
        self._by_session[session] = episode
        pending = self._unannounced.pop(session, None)
        if pending is not None:
            self._accept_request(episode, pending)

    def _receive_request(self, pending: PendingRequest) -> None:
        session = pending.request.session
        episode = self._by_session.get(session)
        if episode is not None:
            self._accept_request(episode, pending)
        elif session in self._unannounced:
            pending.refuse(f"the session {session!r:.80} has an open request already", status=409)
        elif len(self._unannounced) >= len(self.episodes):
            pending.refuse(
                f"no episode has announced the session {session!r:.80}; try again later",
                status=503,
            )
        else:
            self._unannounced[session] = pending

    def _fail_episode_of_cancelled_request(self, pending: PendingRequest) -> None:
        """Fails an episode whose request the harness gave up, so that its slot becomes free."""
        session = pending.request.session
        if self._unannounced.get(session) is pending:
            del self._unannounced[session]
        episode = self._by_session.get(session)
        if episode is not None and episode.pending is pending:
            self._fail_and_cancel_episode(episode, "the harness closed the connection of a request")

    def _receive_result(self, episode: ServedEpisode, message: dict[str, Any]) -> None:
        """Stores the outcome of an episode, or the reason why it cannot be used."""
        if episode.is_over:
            return
        try:
            outcome = read_outcome(message)
            refuse_other_conversation(episode, message)
        except ValueError as error:
            self._fail_and_cancel_episode(episode, str(error), is_playing=False)
            return
        episode.outcome = outcome
        self._drop_request(episode, "the episode has ended")
        self._end_row_of(episode)

    def _fail_and_cancel_episode(
        self, episode: ServedEpisode, error: str, is_playing: bool = True
    ) -> None:
        """
        Ends an episode that cannot be used.

        is_playing: whether the harness still plays the episode, so that it must be told to cancel.
        """
        episode.error = error
        self._drop_request(episode, error)
        self._end_row_of(episode)
        if is_playing and not self.harness.has_ended:
            self.harness.send({"type": "cancel", "episode": episode.number})

    def _drop_request(self, episode: ServedEpisode, reason: str) -> None:
        if episode.pending:
            episode.pending.refuse(reason, status=409)
            episode.pending = None

    def _end_row_of(self, episode: ServedEpisode) -> None:
        """
        Ends the episode's row in the wave, unless the row has ended at a limit.

        A row whose turns are sampled again after memory ran out ends only after the last of these
        turns, or at once if the episode has failed.
        """
        if episode not in self.wave or episode.end_reason:
            return
        row = self.wave.index(episode)
        is_repeating = row in self._rows and episode.num_sampled_turns < len(episode.turns)
        if episode.error or not is_repeating:
            self._ready[row] = "stop"

    def _fail_silent_episodes(self) -> None:
        """Ends episodes about which the harness has sent nothing for longer than the timeout."""
        now = time.monotonic()
        for episode in self.episodes:
            if episode.is_over or episode.pending:
                continue
            # an episode that has not begun may be waiting for other episodes
            last_sign = episode.last_sign if episode.session else self.last_event
            if now - last_sign > self.timeout:
                self._fail_and_cancel_episode(
                    episode,
                    f"the harness gave no sign of the episode for {self.timeout:g} s "
                    "(--env-timeout)",
                )

    # ---- requests

    def _accept_request(self, episode: ServedEpisode, pending: PendingRequest) -> None:
        """Takes the ids that a request adds to the conversation, or refuses the request."""
        episode.last_sign = time.monotonic()
        try:
            is_repeated = self._check_request_and_detect_repeat(episode, pending.request)
        except RefusedRequest as refusal:
            pending.refuse(str(refusal), refusal.status)
            return
        if is_repeated:
            turn = episode.turns[-1]
            is_finished = turn.ids[-1] in self.params.eos_ids
            pending.answer(turn.ids, turn.logprobs.tolist(), "stop" if is_finished else "length")
            return
        episode.pending = pending
        if not episode.prompt:
            episode.prompt = pending.request.token_ids
            return
        addition = pending.request.token_ids[len(episode.conversation_ids) :]
        episode.additions.append(addition)
        # after memory ran out, the row may not have begun again, or may not have reached this turn
        row = self.wave.index(episode)
        if row in self._rows and episode.num_sampled_turns == len(episode.turns):
            self._ready[row] = addition

    def _check_request_and_detect_repeat(
        self, episode: ServedEpisode, request: GenerateRequest
    ) -> bool:
        """
        Raises RefusedRequest unless the request continues the conversation of its episode, or
        repeats the previous request.

        Returns whether the request repeats the previous one. A client sends a request again if it
        has lost the reply.
        """
        if episode.is_over:
            raise RefusedRequest(f"the episode has ended: {episode.error or 'its result is known'}")
        if episode.pending:
            raise RefusedRequest(
                "the episode's previous request has no reply yet; only one conversation at a time "
                "is supported"
            )
        self._check_settings(request)
        ids = request.token_ids
        is_known = all(0 <= token_id < self.vocabulary_size for token_id in ids)
        if not is_known:
            raise RefusedRequest(f"token_ids has an id that is not below {self.vocabulary_size}")
        if not episode.prompt:
            if len(ids) >= self.context:
                raise RefusedRequest(self._explain_that_context_is_full(request))
            return False

        conversation = episode.conversation_ids
        num_known = len(conversation)
        if episode.turns and ids == conversation[: num_known - len(episode.turns[-1].ids)]:
            return True
        if episode.end_reason or len(ids) >= self.context:
            raise RefusedRequest(self._explain_that_context_is_full(request))
        if ids[:num_known] != conversation:
            pairs = zip(ids, conversation, strict=False)
            shorter = min(len(ids), num_known)
            place = next((i for i, (a, b) in enumerate(pairs) if a != b), shorter)
            raise RefusedRequest(
                f"the request differs at token {place + 1} from the conversation so far, which has "
                f"{num_known} tokens; only conversations that grow at their ends are supported"
            )
        if len(ids) == num_known:
            raise RefusedRequest("the request adds no token to the conversation so far")
        return False

    def _check_settings(self, request: GenerateRequest) -> None:
        """Raises RefusedRequest if a sampling setting of the request differs from the run's."""
        for name in FIXED_SETTINGS:
            given = request.settings.get(name)
            value = float(getattr(self.params, name))
            are_off = value in OFF.get(name, ()) and given in OFF.get(name, ())
            if given is not None and not are_off and not math.isclose(given, value):
                raise RefusedRequest(
                    f"{name} is {given:g} in the request, but {value:g} in the run; leave it out"
                )
        others = sorted(set(request.stop_token_ids) - set(self.params.eos_ids))
        if others:
            raise RefusedRequest(
                f"stop_token_ids has {others[:8]}, which do not end a turn in this run; name them "
                "with --end-tokens"
            )

    def _explain_that_context_is_full(self, request: GenerateRequest) -> str:
        # vLLM's words, by which clients recognize that a conversation has become too long
        return (
            f"This model's maximum context length is {self.context} tokens. However, the prompt "
            f"has {len(request.token_ids)} tokens, or the conversation has used its --max-tokens."
        )


# ---- results


def read_outcome(message: dict[str, Any]) -> EpisodeOutcome:
    """
    Reads the outcome of an episode from the message with its result.

    Raises ValueError if the harness reports an error, or if a field is missing or has a wrong type.
    """
    error = message.get("error")
    if error:
        raise ValueError(" ".join(f"{error}".split())[:500])
    reward = message.get("reward")
    if not _is_finite_number(reward):
        raise ValueError(f"its reward is {reward!r:.40}, which is not a number")
    metrics = message.get("metrics") or {}
    if not isinstance(metrics, dict) or not all(map(_is_finite_number, metrics.values())):
        raise ValueError(f"its metrics are {metrics!r:.80}; each must be a number")
    messages = message.get("messages") or []
    if not isinstance(messages, list) or not all(map(_is_chat_message, messages)):
        raise ValueError(f"its messages are {messages!r:.80}; each must have a role and a content")
    values = {str(name): float(value) for name, value in metrics.items()}
    return EpisodeOutcome(float(reward), values, list(map(clean_message, messages)))


def clean_message(message: dict[str, Any]) -> dict[str, Any]:
    """The message with its role, text, name and tool calls, in the format of chat templates."""
    cleaned: dict[str, Any] = {"role": message["role"], "content": message.get("content") or ""}
    if isinstance(message.get("name"), str):
        cleaned["name"] = message["name"]
    calls = message.get("tool_calls")
    if isinstance(calls, list) and calls:
        cleaned["tool_calls"] = [
            {"type": "function", "function": read_tool_call(call)} for call in calls
        ]
    return cleaned


def read_tool_call(call: Any) -> dict[str, Any]:
    """The name and the arguments of a tool call. Arguments that are not JSON become a text."""
    function = call.get("function", call) if isinstance(call, dict) else {}
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        with contextlib.suppress(ValueError, RecursionError):
            arguments = json.loads(arguments)
    if not isinstance(arguments, dict):
        arguments = {"arguments": arguments}
    return {"name": str(function.get("name")), "arguments": arguments}


def _is_finite_number(value: Any) -> TypeGuard[float]:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    # a comparison, because `math.isfinite` fails on an integer that is too large for a float
    return is_number and abs(value) <= LARGEST_REWARD


def _is_chat_message(message: Any) -> bool:
    if not isinstance(message, dict):
        return False
    content = message.get("content")
    return isinstance(message.get("role"), str) and (content is None or isinstance(content, str))


def refuse_other_conversation(episode: ServedEpisode, message: dict[str, Any]) -> None:
    """
    Raises ValueError if the result does not describe the conversation that was sampled.

    The result must contain the sampled conversation's ids, up to the last token that the model
    wrote, and the positions of the model's tokens. If the result contains log-probabilities, they
    must be those that were sent.
    """
    if not episode.turns:
        raise ValueError("it ended before the model's first turn")
    own = episode.own_positions
    ids = episode.conversation_ids[: own[-1] + 1]
    reported_ids = message.get("token_ids")
    if not isinstance(reported_ids, list) or reported_ids[: len(ids)] != ids:
        raise ValueError(
            "the token ids that it reports differ from those of its requests and Gwen's replies"
        )
    if message.get("own") != own:
        raise ValueError(
            "the positions that it reports for the model's tokens are not those of the tokens that "
            "Gwen sent"
        )
    reported_logprobs = message.get("logprobs")
    if reported_logprobs is None:
        return
    logprobs = np.concatenate([turn.logprobs for turn in episode.turns])
    if not _are_close(reported_logprobs, logprobs):
        raise ValueError("the log-probabilities that it reports differ from those that Gwen sent")


def _are_close(reported: Any, logprobs: np.ndarray) -> bool:
    if not isinstance(reported, Sequence) or len(reported) != len(logprobs):
        return False
    if not all(map(_is_finite_number, reported)):
        return False
    return bool(np.abs(np.array(reported) - logprobs).max() <= MOST_LOGPROB_DIFFERENCE)
