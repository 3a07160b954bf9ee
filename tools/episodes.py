"""
Runs episodes, which are a model's conversations with tools and environments.

Each row of a rollout is one episode. When a turn of the model ends, the sampler passes the turn to
`Episodes`, and later asks `Episodes` for the reply to this turn. The calls of one row run in the
order in which the model wrote them, and the calls of different rows run in parallel. If a call
fails, the model is shown the error as a line of JSON. This file does not cover sampling
(layers/turns.py), the threads that run calls (tools/tool_workers.py), a run's tools
(tools/toolbox.py) or how calls are parsed (tools/calls.py).
"""

import contextlib
import dataclasses
import functools
import json
import math
import queue
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from prompts.examples import Example, format_error, last_user_text, shorten_value
from rewards.functions import UserFunctionError, describe_error_in_function
from rewards.rewards import finite_float_or_nan
from tools.calls import (
    ToolCall,
    format_text_or_conversation,
    parse_calls,
    rewards_each_turn,
    texts_around_calls,
)
from tools.tool_workers import CallResult, ToolWorker, seed_random_temporarily
from tools.toolbox import Toolbox

POLL = 0.05  # seconds between two checks for late calls while the sampler waits
RESULT_FRACTION = 4  # a tool's result may take up at most 1/4 of a conversation's tokens


class TextWithMessages(str):
    """All text that the model wrote in a conversation, with the messages of the conversation."""

    messages: list[dict[str, Any]]  # the chat messages after the prompt


# ---- one row


@dataclasses.dataclass
class Episode:
    """The conversation of one row after its prompt, and the thread in which the row's tools run."""

    environment: str  # the environment's name
    worker: ToolWorker
    messages: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    # one record per call, in the format of `rollouts.jsonl`
    call_records: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    num_turns: int = 0
    calls: Sequence[ToolCall] = ()  # the calls in the newest turn

    # the results of the newest turn's finished calls, followed by the result of `get_reward` if
    # turns are rewarded
    results: list[CallResult] = dataclasses.field(default_factory=list)
    # the messages with the results of the newest turn's calls
    tool_messages: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    reward: float | None = None
    # filled only if the environment sets `reward_per_turn`
    turn_rewards: list[float] = dataclasses.field(default_factory=list)

    @property
    def has_turn_rewards(self) -> bool:
        """Whether `get_reward` is called after each turn."""
        return rewards_each_turn(type(self.worker.instance))

    @property
    def error_prefix(self) -> str:
        """The beginning of error messages about this row's environment."""
        return f"environment {type(self.worker.instance).__name__}:"


def _make_assistant_message(text: str, calls: Sequence[ToolCall]) -> dict[str, Any]:
    """A turn as a chat message. The calls become `tool_calls` if all of them can be parsed."""
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if not calls or not all(isinstance(call.arguments, dict) for call in calls):
        return message

    thought, end, answer = text.rpartition("</think>")
    first, *others = texts_around_calls(answer)
    parts = [(thought + end + first).rstrip()]
    parts += [part.strip() for part in others if part.strip()]
    message["content"] = "\n".join(parts)
    message["tool_calls"] = [
        {"type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in calls
    ]
    return message


def _result_text_and_error(result: CallResult) -> tuple[str, str | None]:
    """
    The text that the model is shown as a call's result, and the call's error in one line, if any.
    """
    error = result.error
    try:
        text = str(result.value)
    except Exception as raised:  # for example, because an integer has more than 4,300 digits
        text = ""
        error = error or raised
    if isinstance(error, BaseException):
        error = format_error(error)
    if error:
        text = json.dumps({"error": error}, ensure_ascii=False)
    return text, error


def _reward_as_number(error_prefix: str, value: Any, turn_or_episode: str) -> float:
    """
    Converts a value that `get_reward` returned to a number.

    turn_or_episode: "a turn" or "an episode", whichever the value rewards.

    Raises ValueError, whose message starts with `error_prefix`, if the value is not a number.
    """
    number = finite_float_or_nan(value)
    if math.isnan(number):
        raise UserFunctionError(
            f"{error_prefix} get_reward returned {shorten_value(value)} for {turn_or_episode}; "
            "return a number"
        )
    return number


def prompt_with_appended_text(prompt: Any, text: str) -> Any:
    """A copy of the prompt with a text added at the end of its last message."""
    if isinstance(prompt, str):
        return prompt + text
    last = prompt[-1] | {"content": prompt[-1]["content"] + text}
    return [*prompt[:-1], last]


# ---- the rows of a rollout


class Episodes:
    """
    The episodes of a rollout with N rows, which produce the replies to the model's turns.

    All rows of a group get the same task, because `random` is seeded with the same number whenever
    one of these rows is reset.
    """

    def __init__(
        self,
        box: Toolbox,
        examples: list[Example],
        groups: Sequence[int],
        seed: str,
        *,
        is_evaluation: bool = False,
    ):
        """
        Makes and resets all environments, and encodes the prompts.

        is_evaluation: whether the episodes are played for an evaluation and not for training. Each
        environment finds this value in its attribute `is_evaluation`.

        Raises ValueError if an environment is unknown, if a reset fails, or if the resets of one
        group's rows return different texts.
        """
        self.box = box
        self.examples = examples
        self.groups = groups
        self.seed = seed
        self.is_evaluation = is_evaluation
        self.wait_s = 0.0  # how many seconds the sampler has waited for tools
        self.context = box.context  # the maximum number of tokens in a row
        self.under_way = set[int]()  # rows whose newest turn has no reply yet
        self.done: queue.SimpleQueue[tuple[int, ToolWorker]] = queue.SimpleQueue()
        self.ready: dict[int, list[int] | str] = {}
        self.episodes = list[Episode]()

        first_texts = self._make_and_reset_episodes()
        self.examples = [
            example | {"prompt": prompt_with_appended_text(example["prompt"], text or "")}
            for example, text in zip(examples, first_texts, strict=True)
        ]
        for example in self.examples:
            if not last_user_text(example["prompt"]).strip():
                raise ValueError(
                    "the environment's reset returned no text, and the row has no prompt; "
                    "return a text from reset"
                )
        self.prompts = [box.encode_prompt(example) for example in self.examples]

    def _make_and_reset_episodes(self) -> list[str | None]:
        """Makes each row's episode and resets its environment. Returns the text from each reset."""
        texts = list[str | None]()
        first_rows = dict[int, int]()  # group -> the group's first row
        for row, (example, group) in enumerate(zip(self.examples, self.groups, strict=True)):
            name = self.box.find_environment_name(example)
            self.episodes.append(Episode(name, self.box.get_or_make_worker(name, row)))
            texts.append(self._reset_environment(row))
            first_text = texts[first_rows.setdefault(group, row)]
            if texts[row] != first_text:
                raise ValueError(
                    f"{self.episodes[row].error_prefix} reset returned two different texts for "
                    f"two rows of one prompt, {shorten_value(first_text)} and "
                    f"{shorten_value(texts[row])}; choose tasks only with `random` or "
                    "`numpy.random`, which Gwen seeds equally for these rows"
                )
        return texts

    def _reset_environment(self, row: int) -> str | None:
        """Resets a row's environment. Returns the text from `reset`; None if there is none."""
        episode = self.episodes[row]
        if episode.environment not in self.box.environments:
            return None

        # with several environments, the column `environment` only chooses one of them
        columns = {
            key: value
            for key, value in self.examples[row].items()
            if key != "environment" or not episode.environment
        }
        episode.worker.instance.is_evaluation = self.is_evaluation
        label = f"{episode.error_prefix} reset"
        with seed_random_temporarily(f"{self.seed} {self.groups[row]}"):
            reset = functools.partial(episode.worker.instance.reset, **columns)
            text = episode.worker.run_or_raise(label, reset)
        if text is not None and not isinstance(text, str):
            raise ValueError(f"{label} returned {shorten_value(text)}; return a text or None")
        return text

    # ---- methods that the sampler calls

    def begin_or_restart_decoding(self, rows: list[int]) -> None:
        """Prepares rows for decoding. A row that already had turns begins a new episode."""
        for row in rows:
            previous = self.episodes[row]
            if not previous.num_turns:
                continue
            if row in self.under_way:
                worker = self.box.replace_worker(previous.environment, row)
            else:
                worker = self.box.get_or_make_worker(previous.environment, row)
            self.episodes[row] = Episode(previous.environment, worker)
            self.under_way.discard(row)
            self._reset_environment(row)
        self.ready = {row: answer for row, answer in self.ready.items() if row not in rows}

    def max_tokens_of_next_turn(self, row: int) -> None:
        """Returns None, because turns have no limit of their own."""

    def receive_unfinished_turn(
        self, row: int, ids: list[int], logprobs: np.ndarray, reason: str
    ) -> None:
        """Does nothing, because a row that has reached a limit needs no reply."""

    def end_turn(self, row: int, ids: list[int], logprobs: np.ndarray | None = None) -> None:
        """
        Parses a finished turn and starts its calls.

        ids: the turn's token ids, including the end token. logprobs: their log-probabilities, which
        are not needed.
        """
        episode = self.episodes[row]
        text = self.box.codec.decode_turn(ids)
        calls = parse_calls(text, self.box.parse_call, self.box.schemas[episode.environment])

        episode.messages.append(_make_assistant_message(text, calls))
        episode.num_turns += 1
        episode.tool_messages = []
        episode.calls = calls
        episode.results = []
        self.under_way.add(row)
        if calls or episode.has_turn_rewards:
            self._start_remaining_calls(row)
        else:
            self._record_results_and_make_reply(row)

    def _start_remaining_calls(self, row: int) -> None:
        """
        Starts the turn's remaining calls in the row's thread.

        If turns are rewarded, the thread calls `get_reward` after the last call.
        """
        episode = self.episodes[row]
        worker = episode.worker
        results = episode.results

        def run_remaining_calls() -> None:
            for call in episode.calls[len(results) :]:
                # a call was late or the row began a new episode, so another thread has taken over
                if self.episodes[row].worker is not worker:
                    return
                if call.error:
                    results.append(CallResult(error=call.error))
                    continue
                tool = self.box.functions.get(str(call.name))
                tool = tool or getattr(worker.instance, str(call.name))
                results.append(worker.call_and_await(functools.partial(tool, **call.arguments)))
            if episode.has_turn_rewards:
                results.append(worker.call_and_await(worker.instance.get_reward))
            self.done.put((row, worker))

        worker.jobs.put(run_remaining_calls)

    def _record_results_and_make_reply(self, row: int) -> None:
        """Records the results and reward of a row's newest turn, and makes the reply to it."""
        self.under_way.remove(row)
        episode = self.episodes[row]
        tool_messages = []
        for call, result in zip(episode.calls, episode.results, strict=False):
            text, error = _result_text_and_error(result)
            text = self.box.codec.cut_to_tokens_with_note(text, self.box.context // RESULT_FRACTION)
            message = {"role": "tool", "name": call.name or "tool", "content": text}
            tool_messages.append(message)
            record = {
                "turn": episode.num_turns - 1,
                "name": call.name,
                "arguments": call.arguments,
                "seconds": result.seconds,
                "error": error,
            }
            episode.call_records.append(record)
        if episode.has_turn_rewards:
            self._record_turn_reward(episode)

        # a new list, because callers may have kept the old list
        episode.messages = [*episode.messages, *tool_messages]
        episode.tool_messages = tool_messages
        self.ready[row] = self._make_reply_or_end_reason(episode)

    def _record_turn_reward(self, episode: Episode) -> None:
        result = episode.results[-1]
        error = result.error
        if isinstance(error, BaseException):
            raised = describe_error_in_function(error, episode.worker.instance.get_reward)
            raise UserFunctionError(f"{episode.error_prefix} get_reward {raised}") from None
        episode.turn_rewards.append(_reward_as_number(episode.error_prefix, result.value, "a turn"))

    def _make_reply_or_end_reason(self, episode: Episode) -> list[int] | str:
        """
        The token ids up to the next turn, or "stop" or "turns" if there is no next turn.

        "turns" means that the episode has reached the maximum number of turns.
        """
        if not episode.tool_messages:
            return "stop"
        if episode.num_turns >= self.box.settings.max_turns:
            return "turns"
        schemas = list(self.box.schemas[episode.environment].values())
        return self.box.codec.encode_between_turns(episode.tool_messages, schemas)

    def _replace_late_workers(self) -> None:
        """
        Replaces the thread and environment of each row whose call takes too long.

        The episode continues with an error as the result of the call. Raises ValueError if the call
        is `get_reward`.
        """
        limit = self.box.settings.tool_timeout
        for row in list(self.under_way):
            episode = self.episodes[row]
            # counted before the time is checked, because the thread may finish a call in between
            num_results = len(episode.results)
            if time.monotonic() < episode.worker.call_start + limit:
                continue
            if num_results == len(episode.calls):
                raise ValueError(
                    f"{episode.error_prefix} get_reward took longer than --tool-timeout "
                    f"{limit:g}; raise the limit or make the method faster"
                )
            episode.worker = self.box.replace_worker(episode.environment, row)
            late = CallResult(None, f"the call took longer than {limit:g} s", limit)
            # a new list, because the old thread may still append to the old one
            episode.results = [*episode.results[:num_results], late]
            self._reset_environment(row)
            self._start_remaining_calls(row)

    def take_replies(self, wait: bool) -> dict[int, list[int] | str]:
        """
        Removes and returns the replies that are ready, by row.

        A reply consists of the token ids up to the next turn. If there is no next turn, the reply
        is the reason, "stop" or "turns".

        wait: whether to wait until at least one reply is ready.
        """
        start = time.perf_counter()
        while True:
            self._finish_done_turns(wait)
            self._replace_late_workers()
            if self.ready or not wait:
                break
            assert self.under_way, "waiting for a reply, but no row has a turn under way"
        if wait:
            self.wait_s += time.perf_counter() - start
        replies = self.ready
        self.ready = {}
        return replies

    def _finish_done_turns(self, wait: bool) -> None:
        """
        Finishes the turns whose calls are done.

        wait: whether to wait up to `POLL` seconds for the first of these turns.
        """
        with contextlib.suppress(queue.Empty):
            while True:
                timeout = POLL if wait and not self.ready else 0
                row, worker = self.done.get(timeout=timeout)
                if row in self.under_way and self.episodes[row].worker is worker:
                    self._record_results_and_make_reply(row)

    # ---- results

    def collect_episode_rewards(self) -> None:
        """Sets each episode's reward to the value of `get_reward` or the sum of turn rewards."""
        for episode in self.episodes:
            if episode.has_turn_rewards:
                episode.reward = sum(episode.turn_rewards)
                continue
            get_reward = getattr(episode.worker.instance, "get_reward", None)
            if episode.reward is None and get_reward:
                value = episode.worker.run_or_raise(
                    f"{episode.error_prefix} get_reward", get_reward
                )
                if value is not None:
                    episode.reward = _reward_as_number(episode.error_prefix, value, "an episode")

    def format_episode(self, row: int, end_reason: str) -> str:
        """Formats a row's conversation for people, with its reward and the reason why it ended."""
        episode = self.episodes[row]
        end = f"[{end_reason}]"
        if episode.reward is not None:
            end += f" reward {episode.reward:g}"
        question = f"[user] {last_user_text(self.examples[row]['prompt'])}"
        return "\n".join([question, format_text_or_conversation("", episode.messages), end])

    def add_episode_results_to_samples(
        self, samples: list[Any], weights: Mapping[str, float]
    ) -> list[Any]:
        """
        Copies of the samples with conversations, turn rewards and arguments for reward functions.

        samples: a list of N `step.sample.Sample`. weights: the weight of each reward by name. The
        reward of an environment has the name of its class, and turn rewards are multiplied by the
        weight of this reward.
        """
        self.collect_episode_rewards()
        has_turn_rewards = any(map(rewards_each_turn, self.box.environments.values()))
        completed = []
        for sample, episode in zip(samples, self.episodes, strict=True):
            instance = episode.worker.instance
            name = type(instance).__name__
            text = TextWithMessages(sample.text)
            text.messages = episode.messages

            record: dict[str, Any] = {
                "messages": episode.messages,
                "turns": episode.num_turns,
                "tool_calls": episode.call_records,
            }
            if episode.has_turn_rewards:
                record["turn_rewards"] = episode.turn_rewards

            columns: dict[str, Any] = {}
            if self.box.environments:
                columns = {"environments": instance, "earned": (name, episode.reward)}

            turn_rewards = None
            if has_turn_rewards:
                weight = weights.get(name, 0.0)
                turn_rewards = [weight * reward for reward in episode.turn_rewards]
            sample = sample._replace(
                text=text, columns=columns, conversation=record, turn_rewards=turn_rewards
            )
            completed.append(sample)
        return completed
