"""
Finds the reward functions that --reward names, calls them, and checks their results.

A reward is called by keyword with lists of N values: prompts, completions and the data's columns.
It returns N values: a number, or None for a completion to which it does not apply. Every mistake in
a reward becomes a one-line ValueError that names the reward.

This file does not cover how a user's file is imported (rewards/functions.py), the built-in rewards
(rewards/built_in.py), weights and advantages, or the judge's reward, which is named rubric.
"""

import asyncio
import contextlib
import dis
import functools
import inspect
import json
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from numbers import Real
from types import SimpleNamespace
from typing import Any, NamedTuple

from machine import alive
from prompts.examples import (
    RESERVED,
    TRAINER,
    Example,
    prompt_text,
    shorten_value,
    suggest_nearest,
)
from rewards import built_in
from rewards.built_in import BUILT_IN, Reward
from rewards.functions import describe_raised, load_function, place_suffix
from rewards.statements import strip_thoughts

# Reward arguments that exist only if the task has environments.
OF_EPISODES = ("environments", "earned")
LARGEST_REWARD = 1e15  # the square of a larger reward may overflow float32


class Logged(NamedTuple):
    """The values that rewards passed to TRL's `log_metric` and `log_extra`."""

    metrics: dict[str, list[float]]
    extra: dict[str, list[Any]]  # columns of N values

    def note_metric(self, name: Any, value: Any) -> None:
        if not math.isfinite(value):
            raise ValueError(
                f"log_metric {shorten_value(name)} is {shorten_value(value)}; give a finite number"
            )
        self.metrics.setdefault(str(name), []).append(float(value))

    def note_column(self, num_rows: int, name: Any, values: Sequence[Any]) -> None:
        if len(values) != num_rows:
            raise ValueError(
                f"log_extra {shorten_value(name)} has {len(values)} values "
                f"for {num_rows} completions"
            )
        self.extra[str(name)] = list(map(_to_json, values))


class UserReward:
    """
    A user's function, called with the same arguments as in TRL; see `call_reward`.

    messages: whether the function gets chat messages, as in TRL, rather than text. It is None until
    `call_checked` has found out.
    state: the function's `trainer_state`, in which `global_step` of `max_steps` steps are done.
    logged: the values that the latest call passed to `log_metric` and `log_extra`.
    """

    def __init__(self, name: str, fn: Reward):
        functools.update_wrapper(self, fn)
        self.name = name
        self.fn = fn
        self.logged = Logged({}, {})
        self.state = SimpleNamespace(global_step=0, max_steps=1)
        self.messages: bool | None = None

    def __call__(self, **arguments: Any) -> Any:
        if "prompts" in arguments and self.messages:
            arguments["prompts"] = [as_messages("user", text) for text in arguments["prompts"]]
        elif "prompts" in arguments:
            arguments["prompts"] = list(map(prompt_text, arguments["prompts"]))
        if "completions" in arguments and self.messages:
            completions = arguments["completions"]
            arguments["completions"] = [as_messages("assistant", text) for text in completions]

        self.logged = Logged({}, {})
        num_rows = max(map(len, arguments.values()), default=0)
        trainer_arguments = {
            "trainer_state": self.state,
            "log_metric": self.logged.note_metric,
            "log_extra": functools.partial(self.logged.note_column, num_rows),
        }
        for name in reward_columns(self.name, self.fn, [*arguments, *TRAINER]):
            if name in trainer_arguments:
                arguments[name] = trainer_arguments[name]
        return self.fn(**arguments)


def as_messages(role: str, text: Any) -> list[dict[str, str]]:
    """
    A prompt or completion as chat messages.

    A prompt may be a list of messages already. A conversation with tools has its own messages.
    """
    messages = getattr(text, "messages", None)
    if messages is not None:
        return list(messages)
    if isinstance(text, str):
        return [{"role": role, "content": text}]
    return text


def set_step(rewards: dict[str, Reward], step: int, steps: int) -> None:
    """Tells users' functions that `step` of the run's `steps` steps are done."""
    for reward in rewards.values():
        if isinstance(reward, UserReward):
            reward.state = SimpleNamespace(global_step=step, max_steps=steps)


def load_reward(spec: str) -> tuple[str, Reward]:
    """
    The name and the function of a reward.

    spec: FILE.py:function, or a built-in reward such as length:200.
    """
    built_in_name = spec.partition(":")[0]
    if built_in_name in BUILT_IN:
        return built_in_name, built_in.make_built_in(spec)
    hint = f"{suggest_nearest(spec, BUILT_IN)}; or one of {', '.join(BUILT_IN)}"
    name, fn = load_function("--reward", spec, hint)
    if name == "rubric":
        raise ValueError(
            f"--reward {spec}: the name rubric belongs to the judge's reward; rename the function"
        )
    return name, UserReward(name, fn)


# ---- all rewards of a step


def call_rewards(
    rewards: dict[str, Reward],
    examples: Sequence[Example],
    completions: Sequence[str],
    columns: dict[str, list[Any]],
    weights: Mapping[str, float] | None = None,
) -> tuple[dict[str, list[float]], Logged]:
    """
    The values that each reward gives N completions, and what it logs; see `call_reward`.

    examples: one per completion. Their columns become arguments.
    columns: further arguments.
    weights: a reward with weight 0 is only a metric.

    Raises ValueError if a reward gives None for all completions. This is allowed for a metric. It
    is also allowed if the user's other functions or environments gave each completion a number, as
    in a run with several tasks.
    """
    all_columns = columns_of(examples) | columns
    prompts = [example["prompt"] for example in examples]
    values_by_name = {}
    for name, reward in alive.Bar(rewards.items(), desc="reward", unit="reward"):
        values_by_name[name] = call_reward(name, reward, prompts, completions, all_columns)

    counted = [name for name in values_by_name if weights is None or weights[name]]
    _check_some_numbers(rewards, {name: values_by_name[name] for name in counted})
    return values_by_name, _collect_logged(rewards)


def _check_some_numbers(rewards: dict[str, Reward], values_by_name: dict[str, list[float]]) -> None:
    users_names = [
        name
        for name in values_by_name
        if isinstance(rewards[name], UserReward) or needs_episodes(rewards[name])
    ]
    for name, values in values_by_name.items():
        if not all(map(math.isnan, values)):
            continue
        others = [values_by_name[other] for other in users_names if other != name]
        if not others or any(map(_is_silent, zip(*others, strict=True))):
            raise ValueError(
                f"reward {name} gave no number for any of {len(values)} completions, only None; "
                "return a number for each completion that it applies to"
            )


def _is_silent(values: Sequence[float]) -> bool:
    """Whether none of the values is a number."""
    return all(map(math.isnan, values))


def _collect_logged(rewards: dict[str, Reward]) -> Logged:
    logged = Logged({}, {})
    for reward in rewards.values():
        if not isinstance(reward, UserReward):
            continue
        for name, values in reward.logged.metrics.items():
            logged.metrics.setdefault(name, []).extend(values)
        logged.extra.update(reward.logged.extra)
    return logged


def columns_of(examples: Sequence[Example]) -> dict[str, Sequence[Any]]:
    """The columns of examples with equal keys, without the prompts."""
    columns: dict[str, Sequence[Any]] = {}
    for name in examples[0]:
        if name != "prompt":
            columns[name] = [example.get(name) for example in examples]
    return columns


# ---- one reward


def call_reward(
    name: str,
    fn: Reward,
    prompts: Sequence[Any],
    completions: Sequence[str],
    columns: dict[str, Sequence[Any]],
) -> list[float]:
    """
    The rewards that a function gives N completions: finite floats, with nan in place of None.

    The function may be synchronous or asynchronous. It is called by keyword with copies of the
    lists: prompts, completions and the columns. It gets the arguments that its signature names, or
    all of them if it takes **kwargs. The trainer adds the columns `completion_ids` (tokens without
    padding) and `num_tokens`. A user's function may also name `trainer_state`, `log_extra` and
    `log_metric`, as in TRL.

    With several ranks, only rank 0 calls the function.

    Raises ValueError, which names the reward and one of these: the missing column, the error that
    `fn` raised and its line, or the row with a wrong value.
    """
    arguments = {"prompts": prompts, "completions": completions} | columns
    num_rows = len(completions)
    are_equally_long = all(len(column) == num_rows for column in arguments.values())
    assert are_equally_long, "columns of unequal length"
    from machine import world  # here: it imports MLX, which data and tasks do not need

    result: Any = None
    if world.is_first():
        result = [call_checked(name, fn, arguments, num_rows)]
        if isinstance(fn, UserReward):
            result += fn.logged
    values, *logged = world.all_gather(result)[0]
    if isinstance(fn, UserReward):
        fn.logged = Logged(*logged)
    return list(values)


def call_checked(name: str, fn: Reward, arguments: dict[str, Any], num_rows: int) -> list[float]:
    """
    Calls a reward on this rank, and checks its values.

    A user's function gets text until its first calls show that it needs chat messages. From then
    on, it gets messages. It needs them if it fails on text but not on messages
    (`_retry_with_messages`). If the prompts are messages, it also needs them if its values are all
    equal for text and differ for messages, since it may hide its errors (`_prefer_messages`).
    """
    names = reward_columns(name, fn, [*arguments, *TRAINER])
    chosen = {key: arguments[key] for key in names if key in arguments}
    is_users = isinstance(fn, UserReward)
    if "completions" in chosen and not is_users:  # a user's function gets the thoughts too
        chosen["completions"] = list(map(strip_thoughts, chosen["completions"]))

    try:
        rewards = _call_function(fn, chosen)
    except (Exception, SystemExit) as error:
        rewards = None
        if isinstance(fn, UserReward):
            rewards = _retry_with_messages(fn, chosen, error)
        if rewards is None:
            raise ValueError(f"reward {name} {describe_raised(error, fn)}") from error
    values = _checked_rewards(name, fn, rewards, num_rows)

    if isinstance(fn, UserReward) and fn.messages is None:
        has_messages = any(isinstance(prompt, list) for prompt in arguments["prompts"])
        if has_messages and _num_distinct(values) == 1:
            return _prefer_messages(fn, chosen, values)
        fn.messages = False
    return values


def _num_distinct(values: Sequence[float]) -> int:
    return len(set(map(str, values)))  # compared as texts, since nan is not equal to nan


def _prefer_messages(fn: UserReward, chosen: dict[str, Any], values: list[float]) -> list[float]:
    """
    Calls an untried function with messages, and keeps to messages if its values then differ.

    values: the equal values that the function gave for text. They are returned if the function now
    fails or again gives equal values; in that case a later call tries messages again.
    """
    logged = fn.logged
    fn.messages = True
    message_values = values
    with contextlib.suppress(Exception, SystemExit):
        rewards = _call_function(fn, chosen)
        message_values = _checked_rewards(fn.name, fn, rewards, len(values))
    if _num_distinct(message_values) > 1:
        return message_values
    fn.messages = None
    fn.logged = logged
    return values


def _retry_with_messages(fn: UserReward, chosen: dict[str, Any], error: BaseException) -> Any:
    """
    Calls an untried function, which failed on text, with messages, and keeps to messages.

    Returns None if the function is not untried, if messages cannot explain its error on text, or if
    it fails on messages too.
    """
    if fn.messages is not None:
        return None
    if isinstance(error, IndexError) and "completions" in chosen:
        # An empty text raises this error first, which hides the next one.
        not_empty = [text or "-" for text in chosen["completions"]]
        try:
            _call_function(fn, chosen | {"completions": not_empty})
        except (Exception, SystemExit) as next_error:
            error = next_error

    is_type_error = isinstance(error, (TypeError, AttributeError))
    if not is_type_error or not re.match("string ind|'str' object has", str(error)):
        return None
    fn.messages = True
    try:
        return _call_function(fn, chosen)
    except (Exception, SystemExit):  # the caller reports the error on text
        fn.messages = None
        return None


def _call_function(fn: Reward, chosen: dict[str, Any]) -> Any:
    # The run directory may be a relative path, so a directory change by the function is undone.
    with contextlib.chdir(os.curdir):
        rewards: Any = fn(**{key: list(values) for key, values in chosen.items()})
        if inspect.isawaitable(rewards):
            rewards = asyncio.run(await_any(rewards))
        return rewards


async def await_any(awaitable: Any) -> Any:
    """Awaits any awaitable. Event loops require a coroutine, and not every awaitable is one."""
    return await awaitable


def _checked_rewards(name: str, fn: Reward, rewards: Any, num_rows: int) -> list[float]:
    """A reward's result as N floats. Raises ValueError for any other result."""
    if hasattr(rewards, "tolist"):  # arrays of any library
        rewards = rewards.tolist()
    is_list = isinstance(rewards, (list, tuple))
    if not is_list or len(rewards) != num_rows:
        result = f"{len(rewards)} values" if is_list else shorten_value(rewards)
        raise ValueError(
            f"reward {name}{place_suffix(fn)} gave {result}, "
            f"not a list of {num_rows} numbers, one for each completion"
        )
    values = []
    for row, value in enumerate(rewards):
        number = to_number(value)
        if value is not None and math.isnan(number):
            raise ValueError(
                f"reward {name}{place_suffix(fn)} gave {shorten_value(value)} for row {row}; "
                "return a finite number below 1e15"
            )
        values.append(number)
    return values


def to_number(value: Any) -> float:
    """A reward as a float, also from an array without axes; nan if the value is no number."""
    if getattr(value, "ndim", None) == 0:
        value = value.item()
    if not isinstance(value, Real):
        return math.nan
    number: Any = value
    return float(number) if abs(number) < LARGEST_REWARD else math.nan


def _to_json(value: Any) -> Any:
    """A value in a type that JSON can hold, or its text."""
    if hasattr(value, "tolist"):  # a value of an array library
        value = value.tolist()
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
        return str(value)
    return value


# ---- the arguments of a reward


def reward_columns(name: str, fn: Reward, available: Iterable[str]) -> list[str]:
    """
    The available argument names that a reward takes.

    Raises ValueError, which names the argument, if the reward needs one that is not available.
    """
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"reward {name} has no signature that Python can read; wrap it in a function"
        ) from error
    available = list(available)
    by_keyword = []
    for parameter in parameters:
        takes_keyword = parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        if takes_keyword and parameter.name in available:
            by_keyword.append(parameter.name)

    takes_all = False
    for parameter in parameters:
        if parameter.kind == parameter.VAR_KEYWORD:
            takes_all = True
            continue
        is_optional = parameter.default is not parameter.empty
        if is_optional or parameter.kind == parameter.VAR_POSITIONAL:
            continue
        if parameter.name not in by_keyword:
            hint = f"{suggest_nearest(parameter.name, available)}; it has {', '.join(available)}"
            raise ValueError(
                f"reward {name} needs {parameter.name!r}, which is no column of the data{hint}"
            )
    return available if takes_all else by_keyword


def columns_read(fn: Any, columns: Sequence[str]) -> list[str]:
    """
    The columns that a function reads.

    These are the columns that its signature names, or all columns if its code reads its **kwargs.
    Many rewards take **_ only to ignore the other arguments.
    """
    fn = inspect.unwrap(fn.fn if isinstance(fn, UserReward) else fn)
    parameters = inspect.signature(fn).parameters
    for parameter in parameters.values():
        if parameter.kind == parameter.VAR_KEYWORD and _reads_variable(fn, parameter.name):
            return list(columns)
    return [name for name in columns if name in parameters]


def _reads_variable(fn: Any, variable: str) -> bool:
    """Whether a function's code reads a variable. True if the code is not available."""
    code = getattr(fn, "__code__", None) or getattr(type(fn).__call__, "__code__", None)
    if code is None:
        return True
    for instruction in dis.get_instructions(code):
        if "LOAD" not in instruction.opname:
            continue
        names = instruction.argval
        if names == variable or (isinstance(names, tuple) and variable in names):
            return True
    return False


def needs_episodes(reward: Reward) -> bool:
    """Whether a reward takes an argument that only an episode in an environment provides."""
    return not set(OF_EPISODES).isdisjoint(inspect.signature(reward).parameters)


def reward_argument_names(examples: Sequence[Example], environments: bool = False) -> list[str]:
    """The names of all arguments that a reward may take with these examples."""
    names = list(RESERVED)
    if environments:
        names += OF_EPISODES
    names += [name for name in examples[0] if name != "prompt"]
    return names
