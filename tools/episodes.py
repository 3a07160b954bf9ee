"""
Episodes: a model's conversations with tools and environments, one for each row of a rollout.

The sampler reports the end of a turn and asks for the reply. A row's calls run in the order in
which the model wrote them, and the calls of different rows run in parallel. The model is shown a
failure as a line of JSON. This file does not cover sampling (layers/turns.py), the threads that run
calls (tools/tool_workers.py), a run's tools (tools/toolbox.py) and the parsing of calls
(tools/calls.py).
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

from prompts.examples import Example, format_error, prompt_text, shorten_value
from rewards.functions import describe_raised
from rewards.rewards import to_number
from tools.calls import Call, outside_calls, read_calls, rewards_turns, show_with_tools
from tools.tool_workers import CallResult, Worker, seed_random
from tools.toolbox import Toolbox

POLL = 0.05  # seconds between two checks for late calls while the sampler waits
RESULT_FRACTION = 4  # a tool's result is cut to at most a fourth of the conversation's tokens


class Conversation(str):
    """The model's text from a conversation. `messages`: all chat messages after the prompt."""

    messages: list[dict[str, Any]]


# ---- one row


@dataclasses.dataclass
class Episode:
    """A row's conversation after its prompt, and the thread in which its tools run."""

    environment: str  # the environment's name
    worker: Worker
    messages: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    # records of the calls, as `rollouts.jsonl` stores them
    call_records: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    num_turns: int = 0
    calls: Sequence[Call] = ()  # the newest turn's calls
    # the newest turn's results: its finished calls, then `get_reward` if turns are rewarded
    results: list[CallResult] = dataclasses.field(default_factory=list)
    # the newest turn's tool messages
    tool_messages: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    reward: float | None = None
    # filled only if the environment has `reward_per_turn`
    turn_rewards: list[float] = dataclasses.field(default_factory=list)

    @property
    def has_turn_rewards(self) -> bool:
        """Whether `get_reward` is called after each turn."""
        return rewards_turns(type(self.worker.instance))

    @property
    def label(self) -> str:
        """The beginning of messages about the environment."""
        return f"environment {type(self.worker.instance).__name__}:"


def _assistant_message(text: str, calls: Sequence[Call]) -> dict[str, Any]:
    """A turn as a chat message. Calls become `tool_calls` if all of them can be read."""
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if not calls or not all(isinstance(call.arguments, dict) for call in calls):
        return message

    thought, end, answer = text.rpartition("</think>")
    first, *others = outside_calls(answer)
    parts = [(thought + end + first).rstrip()]
    parts += [part.strip() for part in others if part.strip()]
    message["content"] = "\n".join(parts)
    message["tool_calls"] = [
        {"type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in calls
    ]
    return message


def _show_result(result: CallResult) -> tuple[str, str | None]:
    """The text that shows a call's result to the model, and the error in one line, if any."""
    error = result.error
    try:
        text = str(result.value)
    except Exception as raised:  # for example, an integer of more than 4,300 digits
        text = ""
        error = error or raised
    if isinstance(error, BaseException):
        error = format_error(error)
    if error:
        text = json.dumps({"error": error}, ensure_ascii=False)
    return text, error


def _check_reward(label: str, value: Any, span: str) -> float:
    """
    The number that `get_reward` returned. span: "a turn" or "an episode".

    Raises ValueError with a message that begins with the label if the value is not a number.
    """
    number = to_number(value)
    if math.isnan(number):
        raise ValueError(
            f"{label} get_reward gave {shorten_value(value)} for {span}; return a number"
        )
    return number


def append_to_prompt(prompt: Any, text: str) -> Any:
    """The prompt with a text added at the end of its last message."""
    if isinstance(prompt, str):
        return prompt + text
    last = prompt[-1] | {"content": prompt[-1]["content"] + text}
    return [*prompt[:-1], last]


# ---- the rows of a rollout


class Episodes:
    """
    The episodes of a rollout of N rows. The class replies to the turns that the sampler reports.

    The rows of a group get the same task: `random` has the same seed whenever one of them is reset.
    """

    def __init__(self, box: Toolbox, examples: list[Example], groups: Sequence[int], seed: str):
        """
        Resets all environments and encodes the prompts.

        Raises ValueError if an environment is unknown, a reset fails, or resets of one group
        return different texts.
        """
        self.box = box
        self.examples = examples
        self.groups = groups
        self.seed = seed
        self.wait_s = 0.0  # seconds that the sampler waited for tools
        self.context = box.context  # the most positions of a row
        self.under_way = set[int]()  # rows whose turn has no reply yet
        self.done: queue.SimpleQueue[tuple[int, Worker]] = queue.SimpleQueue()
        self.ready: dict[int, list[int] | str] = {}
        self.episodes = list[Episode]()

        first_texts = self._reset_all()
        self.examples = [
            example | {"prompt": append_to_prompt(example["prompt"], text or "")}
            for example, text in zip(examples, first_texts, strict=True)
        ]
        for example in self.examples:
            if not prompt_text(example["prompt"]).strip():
                raise ValueError(
                    "the environment's reset returns no text, and the row has no prompt; "
                    "return a text from reset"
                )
        self.prompts = [box.encode_prompt(example) for example in self.examples]

    def _reset_all(self) -> list[str | None]:
        """Makes and resets each row's episode. Returns the text of each row's reset."""
        texts = list[str | None]()
        first_rows = dict[int, int]()  # group -> its first row
        for row, (example, group) in enumerate(zip(self.examples, self.groups, strict=True)):
            name = self.box.environment_name(example)
            self.episodes.append(Episode(name, self.box.get_worker(name, row)))
            texts.append(self._reset(row))
            first_text = texts[first_rows.setdefault(group, row)]
            if texts[row] != first_text:
                raise ValueError(
                    f"{self.episodes[row].label} reset returned two different texts for two rows "
                    f"of one prompt, {shorten_value(first_text)} and {shorten_value(texts[row])}; "
                    "draw tasks with `random`"
                )
        return texts

    def _reset(self, row: int) -> str | None:
        """Resets the row's environment. Returns the text of the reset, None without one."""
        episode = self.episodes[row]
        if episode.environment not in self.box.environments:
            return None

        # if there are several environments, the column `environment` only names one of them
        columns = {
            key: value
            for key, value in self.examples[row].items()
            if key != "environment" or not episode.environment
        }
        label = f"{episode.label} reset"
        with seed_random(f"{self.seed} {self.groups[row]}"):
            reset = functools.partial(episode.worker.instance.reset, **columns)
            text = episode.worker.run_or_raise(label, reset)
        if text is not None and not isinstance(text, str):
            raise ValueError(f"{label} gave {shorten_value(text)}; return a text or None")
        return text

    # ---- what the sampler calls

    def begin(self, rows: list[int]) -> None:
        """Begins the decoding of rows. Rows that already had turns begin a new episode."""
        for row in rows:
            previous = self.episodes[row]
            if not previous.num_turns:
                continue
            if row in self.under_way:
                worker = self.box.replace_worker(previous.environment, row)
            else:
                worker = self.box.get_worker(previous.environment, row)
            self.episodes[row] = Episode(previous.environment, worker)
            self.under_way.discard(row)
            self._reset(row)
        self.ready = {row: answer for row, answer in self.ready.items() if row not in rows}

    def end_turn(self, row: int, ids: list[int]) -> None:
        """Reads a finished turn and starts its calls. ids: the turn's tokens and its end token."""
        episode = self.episodes[row]
        text = self.box.codec.decode_turn(ids)
        calls = read_calls(text, self.box.read_call, self.box.schemas[episode.environment])

        episode.messages.append(_assistant_message(text, calls))
        episode.num_turns += 1
        episode.tool_messages = []
        episode.calls = calls
        episode.results = []
        self.under_way.add(row)
        if calls or episode.has_turn_rewards:
            self._run_calls(row)
        else:
            self._finish_turn(row)

    def _run_calls(self, row: int) -> None:
        """Lets the row's thread run the remaining calls of the turn, then `get_reward`."""
        episode = self.episodes[row]
        worker = episode.worker
        results = episode.results

        def run_remaining() -> None:
            for call in episode.calls[len(results) :]:
                # a call was late, or the row began a new episode: another thread has taken over
                if self.episodes[row].worker is not worker:
                    return
                if call.error:
                    results.append(CallResult(error=call.error))
                    continue
                tool = self.box.functions.get(str(call.name))
                tool = tool or getattr(worker.instance, str(call.name))
                results.append(worker.run(functools.partial(tool, **call.arguments)))
            if episode.has_turn_rewards:
                results.append(worker.run(worker.instance.get_reward))
            self.done.put((row, worker))

        worker.jobs.put(run_remaining)

    def _finish_turn(self, row: int) -> None:
        """Records a turn's results and its reward, and makes the row's reply ready."""
        self.under_way.remove(row)
        episode = self.episodes[row]
        tool_messages = []
        for call, result in zip(episode.calls, episode.results, strict=False):
            text, error = _show_result(result)
            text = self.box.codec.shorten(text, self.box.context // RESULT_FRACTION)
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

        # a new list, because callers keep the list that they were given
        episode.messages = [*episode.messages, *tool_messages]
        episode.tool_messages = tool_messages
        self.ready[row] = self._make_reply(episode)

    def _record_turn_reward(self, episode: Episode) -> None:
        result = episode.results[-1]
        error = result.error
        if isinstance(error, BaseException):
            raised = describe_raised(error, episode.worker.instance.get_reward)
            raise ValueError(f"{episode.label} get_reward {raised}") from error
        episode.turn_rewards.append(_check_reward(episode.label, result.value, "a turn"))

    def _make_reply(self, episode: Episode) -> list[int] | str:
        """The token ids up to the next turn, or why there is no next turn: "stop" or "turns"."""
        if not episode.tool_messages:
            return "stop"
        if episode.num_turns >= self.box.settings.max_turns:
            return "turns"
        schemas = list(self.box.schemas[episode.environment].values())
        return self.box.codec.encode_between_turns(episode.tool_messages, schemas)

    def _replace_late_workers(self) -> None:
        """Replaces the threads and environments of rows with late calls. The episodes go on."""
        limit = self.box.settings.tool_timeout
        for row in list(self.under_way):
            episode = self.episodes[row]
            num_results = len(episode.results)  # read first: the thread may go on meanwhile
            if time.monotonic() < episode.worker.call_start + limit:
                continue
            if num_results == len(episode.calls):
                raise ValueError(
                    f"{episode.label} get_reward took longer than --tool-timeout {limit:g}; "
                    "raise the limit or make the method faster"
                )
            episode.worker = self.box.replace_worker(episode.environment, row)
            late = CallResult(None, f"the call took longer than {limit:g} s", limit)
            # a new list, because the old thread may still append to the old list
            episode.results = [*episode.results[:num_results], late]
            self._reset(row)
            self._run_calls(row)

    def take_replies(self, wait: bool) -> dict[int, list[int] | str]:
        """
        Returns the replies that are ready, by row.

        A reply is the token ids up to the next turn, or "stop" or "turns" if there is no next turn.
        wait: whether to wait until at least one reply is ready.
        """
        start = time.perf_counter()
        while True:
            self._finish_done_turns(wait)
            self._replace_late_workers()
            if self.ready or not wait:
                break
            assert self.under_way, "waits for a reply, but no row has a turn under way"
        if wait:
            self.wait_s += time.perf_counter() - start
        replies = self.ready
        self.ready = {}
        return replies

    def _finish_done_turns(self, wait: bool) -> None:
        """Finishes the turns whose calls are done. wait: allow `POLL` seconds for the first."""
        with contextlib.suppress(queue.Empty):
            while True:
                timeout = POLL if wait and not self.ready else 0
                row, worker = self.done.get(timeout=timeout)
                if row in self.under_way and self.episodes[row].worker is worker:
                    self._finish_turn(row)

    # ---- results

    def request_rewards(self) -> None:
        """Calls each environment's `get_reward`, or adds up the rewards of the turns."""
        for episode in self.episodes:
            if episode.has_turn_rewards:
                episode.reward = sum(episode.turn_rewards)
                continue
            get_reward = getattr(episode.worker.instance, "get_reward", None)
            if episode.reward is None and get_reward:
                value = episode.worker.run_or_raise(f"{episode.label} get_reward", get_reward)
                if value is not None:
                    episode.reward = _check_reward(episode.label, value, "an episode")

    def describe(self, row: int, reason: str) -> str:
        """A row's conversation as people read it, the reason for its end, and its reward."""
        episode = self.episodes[row]
        end = f"[{reason}]"
        if episode.reward is not None:
            end += f" reward {episode.reward:g}"
        question = f"[user] {prompt_text(self.examples[row]['prompt'])}"
        return "\n".join([question, show_with_tools("", episode.messages), end])

    def attach_to_samples(self, samples: list[Any], weights: Mapping[str, float]) -> list[Any]:
        """
        The rollout's samples with their conversations, their turn rewards and reward arguments.

        samples: N `step.sample.Sample`. weights: the weight of each reward by name; a turn's reward
        is multiplied by the weight that has the name of its environment.
        """
        self.request_rewards()
        has_turn_rewards = any(map(rewards_turns, self.box.environments.values()))
        attached = []
        for sample, episode in zip(samples, self.episodes, strict=True):
            instance = episode.worker.instance
            name = type(instance).__name__
            text = Conversation(sample.text)
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
            attached.append(sample)
        return attached
