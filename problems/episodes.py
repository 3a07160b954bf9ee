"""
Episodes: conversations of a model with tools and environments, which answer the turns of a rollout.

Each row has a thread of its own, in which its environment is made and everything of it runs; a turn's calls run in the
order written, rows side by side, coroutines on one loop. What fails is told to the model in a line of JSON. Tools are
the user's code: they run in this process, without a wall. Left out: sampling (layers/turns.py), what a call is
(calls.py).
"""

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import functools
import inspect
import json
import math
import os
import queue
import random
import sys
import threading
import time
import traceback
import weakref
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from config import Config, ToolSettings
from machine import world
from problems import chat_template
from problems.calls import (
    Call,
    Frames,
    Tool,
    choose_call_reader,
    outside_calls,
    read_calls,
    rewards_turns,
    schemas_in,
    schemas_of,
    show_with_tools,
)
from problems.examples import Example, format_error, prompt_text, shorten_value
from problems.functions import describe_raised
from problems.rewards import await_any, to_number

CONTEXT = 4096  # tokens of a conversation, where nobody says
LOOK = 0.05  # seconds between two looks for calls that take too long, while nothing else is to do
MOST_TOLD = 4  # the rest of a result longer than this part of the conversation is cut


class Conversation(str):
    """What the model wrote in a conversation; `messages`: all of it after the prompt, as chat messages."""

    messages: list[dict[str, Any]]


# ---- threads

PATIENCE = 1.0  # seconds that the end of a process waits for its tools
WORKERS: "weakref.WeakSet[Worker]" = weakref.WeakSet()


@contextlib.contextmanager
def end_tools() -> Iterator[None]:
    """Around a command: its tools' threads end before it; where one hangs the process ends at once, with its status."""
    try:
        yield
    finally:
        error = sys.exc_info()[1]
        for worker in WORKERS:
            worker.release()
        deadline = time.monotonic() + PATIENCE
        for worker in WORKERS:
            worker.thread.join(max(deadline - time.monotonic(), 0))
        if any(
            worker.thread.is_alive() for worker in WORKERS
        ):  # Python's own end aborts where one is inside MLX
            if error is not None and not isinstance(error, SystemExit):
                traceback.print_exc()
            sys.stdout.flush()
            sys.stderr.flush()
            status = error.code if isinstance(error, SystemExit) else error and 1
            os._exit(status if isinstance(status, int) else int(status is not None))


class CallResult(NamedTuple):
    """What a call gave, or why it gave nothing."""

    value: Any = None
    error: BaseException | str | None = None
    seconds: float = 0.0


@functools.cache
def _event_loop() -> asyncio.AbstractEventLoop:
    """One for all coroutines, in a thread of its own."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    return loop


class Worker:
    """A thread that does one job after another, each in `limit` seconds, and the environment that lives in it."""

    instance: Any = None
    begun = math.inf  # when the call began that is under way

    def __init__(self, limit: float):
        self.limit = limit
        self.task: concurrent.futures.Future[Any] | None = None  # of its newest coroutine
        self.jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._work, daemon=True)
        self.thread.start()
        WORKERS.add(self)

    def _work(self) -> None:
        while (job := self.jobs.get()) is not None:
            job()

    def run(self, fn: Callable[[], Any]) -> CallResult:
        """What comes of a call, in the thread."""
        self.begun = begin = time.monotonic()
        value = error = None
        try:
            value = fn()
            if inspect.isawaitable(value):
                task = self.task = asyncio.run_coroutine_threadsafe(await_any(value), _event_loop())
                value = task.result()
        except BaseException as raised:  # SystemExit among them: it ends no more than a call
            value, error = None, raised
        self.begun = math.inf
        return CallResult(value, error, time.monotonic() - begin)

    def run_or_raise(self, what: str, fn: Callable[[], Any]) -> Any:
        """A function's value. Raises ValueError, which begins with `what`, where it fails or takes too long."""
        outcomes: queue.SimpleQueue[CallResult] = queue.SimpleQueue()
        self.jobs.put(lambda: outcomes.put(self.run(fn)))
        try:
            value, error, _ = outcomes.get(timeout=self.limit)
        except queue.Empty:
            self.release()
            raise ValueError(
                f"{what} took longer than --tool-timeout {self.limit:g}; raise that or mend it"
            ) from None
        if isinstance(error, BaseException):
            raise ValueError(f"{what} {describe_raised(error, getattr(fn, 'func', fn))}") from error
        return value

    def release(self) -> None:
        """Lets the thread go once its job ends, if ever."""
        self.jobs.put(None)
        if self.task is not None:
            self.task.cancel()


@contextlib.contextmanager
def seed_random(text: str) -> Iterator[None]:
    """Inside, `random` and `numpy.random` draw what belongs to a text."""
    before, numbers, seed = random.getstate(), np.random.get_state(), zlib.crc32(text.encode())
    random.seed(seed)
    np.random.seed(seed)
    try:
        yield
    finally:
        random.setstate(before)
        np.random.set_state(numbers)


# ---- what a run may call


class Toolbox:
    """The tools and environments of a run, ready to be called; its workers outlive a rollout."""

    def __init__(
        self,
        config: Config,
        tools: dict[str, Tool],
        environments: dict[str, type],
        tokenizer: Any,
        model: Any,
    ):
        """
        environments: by the name in the column `environment`, "" where there is one. model: a `gwen.ModelConfig`.

        Raises ValueError where a tool has no schema, or the model's chat template no tools.
        """
        self.settings, self.environments, self.tokenizer = config.tools, environments, tokenizer
        self.thinking = config.sampling.thinking
        self.context = conversation_limit(config.tools, model.max_position_embeddings)
        self.read = choose_call_reader(tokenizer.chat_template)
        self.frames = Frames(tokenizer, model.end_ids, thinking=self.thinking)
        self.functions = tools
        own = schemas_of("--tools", tools)
        self.schemas = {"": own} | {
            name: own | schemas_in(kind) for name, kind in environments.items()
        }
        self.workers: dict[tuple[str, int], Worker] = {}

    def worker(self, name: str, row: int, anew: bool = False) -> Worker:
        """The thread of a row, with its environment; `anew`: in place of one that hangs."""
        if anew:
            self.workers.pop((name, row)).release()
        if (name, row) not in self.workers:
            worker = self.workers[name, row] = Worker(self.settings.tool_timeout)
            if kind := self.environments.get(name):
                worker.instance = worker.run_or_raise(f"environment {kind.__name__}", kind)
        return self.workers[name, row]

    def environment_of(self, example: Example) -> str:
        """The name of its environment, "" where there is one or none. ValueError for one that --env does not name."""
        name = (
            str(example.get("environment"))
            if self.environments and "" not in self.environments
            else ""
        )
        if name not in self.schemas:
            known = ", ".join(self.environments)
            raise ValueError(
                f"column environment holds {shorten_value(name)}; the environments of --env are {known}"
            )
        return name

    def prompt(self, example: Example) -> list[int]:
        tools = list(self.schemas[self.environment_of(example)].values())
        how: dict[str, Any] = {"thinking": self.thinking, "system": example.get("system")}
        ids = chat_template.encode_chat(self.tokenizer, example["prompt"], tools=tools, **how)
        if len(ids) >= self.context:
            said = (
                f"the prompt {shorten_value(prompt_text(example['prompt']))} has {len(ids)} tokens"
            )
            raise ValueError(
                f"{said}, a conversation {self.context}; shorten it or raise --max-context"
            )
        return ids


def make_toolbox(
    config: Config,
    tools: dict[str, Tool],
    environments: dict[str, type],
    tokenizer: Any,
    model: Any,
) -> Toolbox | None:
    """The toolbox of a run, None without tools. ValueError for a model, or machines, that cannot use it."""
    if not tools and not environments:
        return None
    if world.size() > 1:
        raise ValueError("--tools and --env are for one machine; start it on one")
    return Toolbox(config, tools, environments, tokenizer, model)


def conversation_limit(settings: ToolSettings, most: int) -> int:
    """Positions of a conversation with tools, where the model has `most`."""
    return min(settings.max_context or CONTEXT, most)


def append_to_prompt(prompt: Any, text: str) -> Any:
    """A prompt whose last message goes on with a text."""
    if isinstance(prompt, str):
        return prompt + text
    return [*prompt[:-1], prompt[-1] | {"content": prompt[-1]["content"] + text}]


# ---- a rollout's episodes


@dataclasses.dataclass
class Episode:
    """A row's conversation after its prompt, and the thread in which its tools run."""

    name: str  # of its environment
    worker: Worker
    messages: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    made: list[dict[str, Any]] = dataclasses.field(
        default_factory=list
    )  # its calls, as `rollouts.jsonl` has them
    num_turns: int = 0
    calls: Sequence[Call] = ()  # of the newest turn
    outcomes: list[CallResult] = dataclasses.field(
        default_factory=list
    )  # of those that have ended, and of its pay
    told: list[dict[str, Any]] = dataclasses.field(
        default_factory=list
    )  # the newest turn's tool messages
    reward: float | None = None
    turn_rewards: list[float] = dataclasses.field(
        default_factory=list
    )  # where the environment has `reward_per_turn`

    @property
    def pays(self) -> bool:
        return rewards_turns(type(self.worker.instance))

    @property
    def what(self) -> str:
        """Its environment, for messages."""
        return f"environment {type(self.worker.instance).__name__}:"


def _number(what: str, value: Any, span: str) -> float:
    """What `get_reward` gave. Raises ValueError, which begins with `what`, where it is no number."""
    number = to_number(value)
    if math.isnan(number):
        raise ValueError(
            f"{what} get_reward gave {shorten_value(value)} for {span}; return a number"
        )
    return number


class Episodes:
    """What answers the turns of a rollout of N rows: an episode for each, reset; the rows of a group face one task."""

    def __init__(self, box: Toolbox, examples: list[Example], groups: Sequence[int], seed: str):
        """Raises ValueError for an unknown environment, and where a reset fails or differs within a group."""
        self.box, self.examples, self.groups, self.seed, self.wait_s = (
            box,
            examples,
            groups,
            seed,
            0.0,
        )
        self.context = box.context  # positions that a row may have
        self.under_way = set[int]()  # rows whose turn is being answered
        self.done: queue.SimpleQueue[tuple[int, Worker]] = queue.SimpleQueue()
        self.ready: dict[int, list[int] | str] = {}
        self.rows, texts, first = (
            list[Episode](),
            list[str | None](),
            dict[int, int](),
        )  # the first row of each group
        for row, (example, group) in enumerate(zip(examples, groups, strict=True)):
            name = box.environment_of(example)
            self.rows.append(Episode(name, box.worker(name, row)))
            texts.append(self._reset(row))
            if texts[row] != (other := texts[first.setdefault(group, row)]):
                told = f"reset told two rows of one prompt different things, {shorten_value(other)} and {shorten_value(texts[row])}"
                raise ValueError(f"{self.rows[row].what} {told}; draw tasks with `random`")
        every = zip(examples, texts, strict=True)
        self.examples = [
            example | {"prompt": append_to_prompt(example["prompt"], text or "")}
            for example, text in every
        ]
        for example in self.examples:
            if not prompt_text(example["prompt"]).strip():
                raise ValueError(
                    "the environment's reset gives no text, and there is no prompt; let it return one"
                )
        self.prompts = [box.prompt(example) for example in self.examples]

    def _reset(self, row: int) -> str | None:
        """Begins the row's episode; what its environment says first."""
        episode = self.rows[row]
        if episode.name not in self.box.environments:
            return None
        what = f"{episode.what} reset"
        with seed_random(f"{self.seed} {self.groups[row]}"):
            told = {
                key: value
                for key, value in self.examples[row].items()
                if key != "environment" or not episode.name
            }
            text = episode.worker.run_or_raise(
                what, functools.partial(episode.worker.instance.reset, **told)
            )
        if text is not None and not isinstance(text, str):
            raise ValueError(f"{what} gave {shorten_value(text)}; return a text or None")
        return text

    # ---- what the sampler asks

    def begin(self, rows: list[int]) -> None:
        """These rows are drawn from their prompts on, some of them again."""
        for row in rows:
            if (before := self.rows[row]).num_turns:  # it was heard, and is drawn again
                self.rows[row] = Episode(
                    before.name, self.box.worker(before.name, row, anew=row in self.under_way)
                )
                self.under_way.discard(row)
                self._reset(row)
        self.ready = {row: answer for row, answer in self.ready.items() if row not in rows}

    def end_turn(self, row: int, ids: list[int]) -> None:
        """A turn of the row has ended with an end token, the last of its ids."""
        episode, text = self.rows[row], self.box.frames.decode_turn(ids)
        calls = read_calls(text, self.box.read, self.box.schemas[episode.name])
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if calls and all(isinstance(call.arguments, dict) for call in calls):
            thought, end, rest = text.rpartition("</think>")
            first, *others = outside_calls(rest)
            between = [part.strip() for part in others if part.strip()]
            message["content"] = "\n".join([(thought + end + first).rstrip(), *between])
            message["tool_calls"] = [
                {"type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in calls
            ]
        episode.messages.append(message)
        episode.num_turns, episode.told, episode.calls, episode.outcomes = (
            episode.num_turns + 1,
            [],
            calls,
            [],
        )
        self.under_way.add(row)
        if calls or episode.pays:
            self._continue_turn(row)
        else:
            self._finish_answer(row)

    def _continue_turn(self, row: int) -> None:
        """Has the row's thread make the calls that are left of its turn, then ask what the turn earned."""
        episode, worker, outcomes = self.rows[row], self.rows[row].worker, self.rows[row].outcomes

        def play() -> None:
            for call in episode.calls[len(outcomes) :]:
                if self.rows[row].worker is not worker:  # it was late, or its row began anew
                    return
                if call.error:
                    outcomes.append(CallResult(error=call.error))
                else:
                    tool = self.box.functions.get(str(call.name)) or getattr(
                        worker.instance, str(call.name)
                    )
                    outcomes.append(worker.run(functools.partial(tool, **call.arguments)))
            if episode.pays:
                outcomes.append(worker.run(worker.instance.get_reward))
            self.done.put((row, worker))

        worker.jobs.put(play)

    def _finish_answer(self, row: int) -> None:
        """Writes down what a turn's calls gave and what it earned; the row's answer is ready."""
        self.under_way.remove(row)
        episode, told = self.rows[row], list[dict[str, Any]]()
        for call, (value, error, seconds) in zip(episode.calls, episode.outcomes, strict=False):
            try:
                text = str(value)
            except Exception as odd:  # of a number of more than 4,300 digits, among others
                error = error or odd
            error = format_error(error) if isinstance(error, BaseException) else error
            text = json.dumps({"error": error}, ensure_ascii=False) if error else text
            text = self.box.frames.shorten(text, self.box.context // MOST_TOLD)
            told.append({"role": "tool", "name": call.name or "tool", "content": text})
            made = {"turn": episode.num_turns - 1, "name": call.name, "arguments": call.arguments}
            episode.made.append(made | {"seconds": seconds, "error": error})
        if episode.pays:
            value, error, _ = episode.outcomes[-1]
            if isinstance(error, BaseException):
                said = describe_raised(error, episode.worker.instance.get_reward)
                raise ValueError(f"{episode.what} get_reward {said}") from error
            episode.turn_rewards.append(_number(episode.what, value, "a turn"))
        episode.messages, episode.told = [*episode.messages, *told], told
        if not told:
            self.ready[row] = "stop"
        elif episode.num_turns >= self.box.settings.max_turns:
            self.ready[row] = "turns"
        else:
            self.ready[row] = self.box.frames.encode_between_turns(
                told, list(self.box.schemas[episode.name].values())
            )

    def _replace_late_workers(self) -> None:
        """Replaces the threads and environments of calls that took too long; their episodes go on."""
        limit = self.box.settings.tool_timeout
        for row in list(self.under_way):
            episode = self.rows[row]
            num = len(episode.outcomes)  # read first: its thread may go on meanwhile
            if time.monotonic() >= episode.worker.begun + limit:
                if num == len(episode.calls):
                    took = f"get_reward took longer than --tool-timeout {limit:g}"
                    raise ValueError(f"{episode.what} {took}; raise that or mend it")
                episode.worker = self.box.worker(episode.name, row, anew=True)
                late = CallResult(None, f"the call took longer than {limit:g} s", limit)
                episode.outcomes = [
                    *episode.outcomes[:num],
                    late,
                ]  # the old thread may still add to the other
                self._reset(row)
                self._continue_turn(row)

    def take_replies(self, wait: bool) -> dict[int, list[int] | str]:
        """New answers to rows: ids up to the next turn, or "stop" or "turns" for none. wait: for at least one."""
        begin = time.perf_counter()
        while True:
            with contextlib.suppress(queue.Empty):
                while True:
                    row, worker = self.done.get(timeout=0 if self.ready or not wait else LOOK)
                    if row in self.under_way and self.rows[row].worker is worker:
                        self._finish_answer(row)
            self._replace_late_workers()
            if self.ready or not wait:
                break
            assert self.under_way, "nobody is waited for"
        if wait:
            self.wait_s += time.perf_counter() - begin
        found, self.ready = self.ready, {}
        return found

    # ---- what comes of it

    def request_rewards(self) -> None:
        for episode in self.rows:
            get_reward = getattr(episode.worker.instance, "get_reward", None)
            if episode.pays:
                episode.reward = sum(episode.turn_rewards)
            elif episode.reward is None and get_reward:
                value = episode.worker.run_or_raise(f"{episode.what} get_reward", get_reward)
                episode.reward = (
                    None if value is None else _number(episode.what, value, "an episode")
                )

    def describe(self, row: int, reason: str) -> str:
        """A row's conversation to read, with why it ended and its reward."""
        asked, reward = prompt_text(self.examples[row]["prompt"]), self.rows[row].reward
        end = f"[{reason}]" + ("" if reward is None else f" reward {reward:g}")
        return "\n".join([f"[user] {asked}", show_with_tools("", self.rows[row].messages), end])

    def attach_to_samples(self, samples: list[Any], weights: Mapping[str, float]) -> list[Any]:
        """The rollout's samples with their conversations, what rewards may ask for, and what turns are paid."""
        self.request_rewards()
        per_turn, found = any(map(rewards_turns, self.box.environments.values())), []
        for sample, episode in zip(samples, self.rows, strict=True):
            instance, text = episode.worker.instance, Conversation(sample.text)
            name, text.messages = type(instance).__name__, episode.messages
            record = {
                "messages": episode.messages,
                "turns": episode.num_turns,
                "tool_calls": episode.made,
            }
            record |= {"turn_rewards": episode.turn_rewards} if episode.pays else {}
            columns = (
                {"environments": instance, "earned": (name, episode.reward)}
                if self.box.environments
                else {}
            )
            paid = (
                [weights.get(name, 0.0) * one for one in episode.turn_rewards] if per_turn else None
            )
            found.append(
                sample._replace(text=text, columns=columns, conversation=record, turn_rewards=paid)
            )
        return found
