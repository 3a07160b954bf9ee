"""
Finds the reward functions that --reward names, calls them, and checks their results.

The keyword arguments of a reward are lists of N values, namely the prompts, the completions and the
columns of the data. For each of the N completions, the reward returns a number, or None if the
reward does not apply to the completion. Every mistake in a reward function becomes a ValueError
with one line that names the reward.

This file does not cover how a user's file is imported (rewards/functions.py), the built-in rewards
(rewards/built_in.py), weights and advantages, or the judge's reward, which is named `rubric`.
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
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from numbers import Real
from types import SimpleNamespace
from typing import Any, NamedTuple

from machine import alive, output
from prompts.examples import (
    RESERVED,
    TRAINER,
    Example,
    did_you_mean,
    last_user_text,
    shorten_value,
)
from rewards import built_in
from rewards.built_in import BUILT_IN, Reward
from rewards.functions import (
    UserFunctionError,
    describe_error_in_function,
    file_and_line_suffix,
    load_function,
)
from rewards.statements import strip_thoughts

# The arguments of rewards that are available only if the task has environments.
OF_EPISODES = ("environments", "earned")
LARGEST_REWARD = 1e15  # the square of a larger reward may overflow float32


class LoggedValues(NamedTuple):
    """The values that rewards logged with `log_metric` and `log_extra`, as in TRL."""

    metrics: dict[str, list[float]]
    extra: dict[str, list[Any]]  # each a column with one value per completion

    def log_metric(self, name: Any, value: Any) -> None:
        if not math.isfinite(value):
            raise ValueError(
                f"log_metric got {shorten_value(value)} for {shorten_value(name)}; "
                "pass a finite number"
            )
        self.metrics.setdefault(str(name), []).append(float(value))

    def log_extra_column(self, num_rows: int, name: Any, values: Sequence[Any]) -> None:
        if len(values) != num_rows:
            raise ValueError(
                f"log_extra got {len(values)} values for {shorten_value(name)}; "
                f"pass {num_rows}, one for each completion"
            )
        self.extra[str(name)] = list(map(_to_json_value, values))


class UserReward:
    """
    A user's reward function, which is called with the same arguments as in TRL.

    `call_reward_on_rank0` explains the arguments.

    messages: whether the function takes chat messages, as in TRL, rather than text. The value is
    None until `call_reward_on_this_rank` has found out.
    state: the argument `trainer_state` of the function, in which `global_step` is the number of
    finished steps, and `max_steps` is the number of steps of the run.
    logged: the values that the latest call of the function passed to `log_metric` and `log_extra`.
    """

    def __init__(self, name: str, fn: Reward):
        functools.update_wrapper(self, fn)
        self.name = name
        self.fn = fn
        self.logged = LoggedValues({}, {})
        self.state = SimpleNamespace(global_step=0, max_steps=1)
        self.messages: bool | None = None

    def __call__(self, **arguments: Any) -> Any:
        if "prompts" in arguments and self.messages:
            arguments["prompts"] = [to_chat_messages("user", text) for text in arguments["prompts"]]
        elif "prompts" in arguments:
            arguments["prompts"] = list(map(last_user_text, arguments["prompts"]))
        if "completions" in arguments and self.messages:
            completions = arguments["completions"]
            arguments["completions"] = [to_chat_messages("assistant", text) for text in completions]

        self.logged = LoggedValues({}, {})
        num_rows = max(map(len, arguments.values()), default=0)
        trainer_arguments = {
            "trainer_state": self.state,
            "log_metric": self.logged.log_metric,
            "log_extra": functools.partial(self.logged.log_extra_column, num_rows),
        }
        for name in select_argument_names(self.name, self.fn, [*arguments, *TRAINER]):
            if name in trainer_arguments:
                arguments[name] = trainer_arguments[name]
        return self.fn(**arguments)


def to_chat_messages(role: str, prompt_or_completion: Any) -> list[dict[str, str]]:
    """
    Converts a prompt or completion to a list of chat messages.

    A prompt that is already a list of messages stays as it is. A completion with tools
    has an attribute `messages`, and the result is a copy of that list.
    """
    messages = getattr(prompt_or_completion, "messages", None)
    if messages is not None:
        return list(messages)
    if isinstance(prompt_or_completion, str):
        return [{"role": role, "content": prompt_or_completion}]
    return prompt_or_completion


def set_step_of_user_rewards(rewards: dict[str, Reward], step: int, num_steps: int) -> None:
    """Sets `trainer_state` of users' functions to `step` finished steps out of `num_steps`."""
    for reward in rewards.values():
        if isinstance(reward, UserReward):
            reward.state = SimpleNamespace(global_step=step, max_steps=num_steps)


def load_reward(spec: str) -> tuple[str, Reward]:
    """
    The name and the function of the reward that one value of --reward specifies.

    spec: FILE.py:function, or a built-in reward such as length:200.
    """
    built_in_name = spec.partition(":")[0]
    if built_in_name in BUILT_IN:
        return built_in_name, built_in.make_built_in_reward(spec)
    hint = f" or one of {', '.join(BUILT_IN)}{did_you_mean(spec, BUILT_IN)}"
    name, fn = load_function("--reward", spec, hint)
    if name == "rubric":
        raise ValueError(
            f"--reward {spec}: `rubric` is the name of the judge's reward; rename the function"
        )
    return name, UserReward(name, fn)


# ---- all rewards of a step


def call_rewards(
    rewards: dict[str, Reward],
    examples: Sequence[Example],
    completions: Sequence[str],
    columns: dict[str, list[Any]],
    weights: Mapping[str, float] | None = None,
) -> tuple[dict[str, list[float]], LoggedValues]:
    """
    The values that each reward returns for N completions, and the values that the rewards log.

    examples: one example per completion. The columns of the examples become arguments of the
    rewards.
    columns: further arguments of the rewards.
    weights: the weights of the rewards; a reward with weight 0 is only a metric.

    Raises ValueError if a reward that is not only a metric returns None for all completions. This
    is no error if the user's other functions and environments give each completion a number, as
    they do in a run with several tasks. See `call_reward_on_rank0` for other errors.
    """
    all_columns = columns_without_prompts(examples) | columns
    prompts = [example["prompt"] for example in examples]
    values_by_name = {}
    for name, reward in alive.Bar(rewards.items(), desc="reward", unit="reward"):
        values_by_name[name] = call_reward_on_rank0(name, reward, prompts, completions, all_columns)

    counted = [name for name in values_by_name if weights is None or weights[name]]
    _refuse_rewards_without_numbers(rewards, {name: values_by_name[name] for name in counted})
    return values_by_name, _merge_logged_values(rewards)


def _refuse_rewards_without_numbers(
    rewards: dict[str, Reward], values_by_name: dict[str, list[float]]
) -> None:
    """Raises ValueError if a reward's values are all nan (see `call_rewards`)."""
    users_names = [
        name
        for name in values_by_name
        if isinstance(rewards[name], UserReward) or needs_environment(rewards[name])
    ]
    for name, values in values_by_name.items():
        if not all(map(math.isnan, values)):
            continue
        others = [values_by_name[other] for other in users_names if other != name]
        if not others or any(map(_are_all_nan, zip(*others, strict=True))):
            raise UserFunctionError(
                f"reward {name} returned None for all {len(values)} completions; "
                "return a number for each completion to which the reward applies"
            )


def _are_all_nan(values: Sequence[float]) -> bool:
    """Whether all of the values are nan, which stands for None."""
    return all(map(math.isnan, values))


def _merge_logged_values(rewards: dict[str, Reward]) -> LoggedValues:
    logged = LoggedValues({}, {})
    for reward in rewards.values():
        if not isinstance(reward, UserReward):
            continue
        for name, values in reward.logged.metrics.items():
            logged.metrics.setdefault(name, []).extend(values)
        logged.extra.update(reward.logged.extra)
    return logged


def columns_without_prompts(examples: Sequence[Example]) -> dict[str, Sequence[Any]]:
    """The columns of the examples, without the prompts. All examples must have the same keys."""
    columns: dict[str, Sequence[Any]] = {}
    for name in examples[0]:
        if name != "prompt":
            columns[name] = [example.get(name) for example in examples]
    return columns


# ---- one reward


def call_reward_on_rank0(
    name: str,
    fn: Reward,
    prompts: Sequence[Any],
    completions: Sequence[str],
    columns: dict[str, Sequence[Any]],
) -> list[float]:
    """
    The values that a reward function returns for N completions, with nan in place of None.

    The function `fn` may be synchronous or asynchronous. The keyword arguments of `fn` are copies
    of the lists of prompts, completions and columns. The function is passed the arguments that its
    signature names, or all of them if the signature has **kwargs. The trainer adds the columns
    `completion_ids` (the tokens without padding) and `num_tokens`. The signature of a user's
    function may also name `trainer_state`, `log_extra` and `log_metric`, as in TRL.

    In a run on several ranks, only rank 0 calls the function.

    Raises ValueError if the function needs a missing column, raises an error, or returns a wrong
    value. The message names the reward and, depending on the mistake, the missing column, the line
    that raised the error, or the row with the wrong value.
    """
    arguments = {"prompts": prompts, "completions": completions} | columns
    num_rows = len(completions)
    are_equally_long = all(len(column) == num_rows for column in arguments.values())
    assert are_equally_long, "columns of unequal length"
    # imported here, since it imports MLX, which data and tasks do not need
    from machine import world

    result: Any = None
    if world.is_first():
        result = [call_reward_on_this_rank(name, fn, arguments, num_rows)]
        if isinstance(fn, UserReward):
            result += fn.logged
    values, *logged = world.all_gather(result)[0]  # the result of rank 0
    if isinstance(fn, UserReward):
        fn.logged = LoggedValues(*logged)
    return list(values)


def call_reward_on_this_rank(
    name: str, fn: Reward, arguments: dict[str, Any], num_rows: int
) -> list[float]:
    """
    Calls a reward on this rank, and returns its values after checking them.

    A user's function is passed text until its first calls show that it needs chat messages, and is
    passed messages from then on. A function needs messages if it fails on text but not on messages
    (`_try_switch_to_messages_after_error`). If the prompts are messages, a function also needs
    messages if its values are all equal for text but differ for messages: it may have caught its
    own errors and returned a fixed value (`_try_switch_to_messages_after_equal_values`).
    """
    names = select_argument_names(name, fn, [*arguments, *TRAINER])
    chosen = {key: arguments[key] for key in names if key in arguments}
    is_users = isinstance(fn, UserReward)
    if "completions" in chosen and not is_users:  # a user's function is passed the thoughts too
        chosen["completions"] = list(map(strip_thoughts, chosen["completions"]))

    try:
        rewards = _call_and_await(fn, chosen)
    except (Exception, SystemExit) as error:
        rewards = None
        if isinstance(fn, UserReward):
            rewards = _try_switch_to_messages_after_error(fn, chosen, error)
        if rewards is None:
            raise UserFunctionError(
                f"reward {name} {describe_error_in_function(error, fn)}"
            ) from None
    values = _check_reward_values(name, fn, rewards, num_rows)

    if isinstance(fn, UserReward) and fn.messages is None:
        has_messages = any(isinstance(prompt, list) for prompt in arguments["prompts"])
        if has_messages and _num_distinct(values) == 1:
            return _try_switch_to_messages_after_equal_values(fn, chosen, values)
        fn.messages = False
    return values


def _num_distinct(values: Sequence[float]) -> int:
    return len(set(map(str, values)))  # compared as strings, since nan does not equal nan


def _try_switch_to_messages_after_equal_values(
    fn: UserReward, arguments: dict[str, Any], text_values: list[float]
) -> list[float]:
    """
    Calls a function with messages, and uses messages from then on if the values are not all equal.

    text_values: the equal values that the function returned for text. They are the result if the
    function fails on messages or returns equal values again. A later call tries messages again.
    """
    logged = fn.logged
    fn.messages = True
    message_values = text_values
    with contextlib.suppress(Exception, SystemExit):
        rewards = _call_and_await(fn, arguments)
        message_values = _check_reward_values(fn.name, fn, rewards, len(text_values))
    if _num_distinct(message_values) > 1:
        return message_values
    fn.messages = None
    fn.logged = logged
    return text_values


def _try_switch_to_messages_after_error(
    fn: UserReward, arguments: dict[str, Any], error: BaseException
) -> Any | None:
    """
    Calls a function with messages after it failed on text, and uses messages from then on.

    Returns None if the function worked in an earlier call, if passing text instead of messages
    cannot be the cause of the error, or if the function fails on messages too.
    """
    if fn.messages is not None:
        return None
    if isinstance(error, IndexError) and "completions" in arguments:
        # An IndexError may come from an empty text, and hide the error that other texts cause.
        not_empty = [text or "-" for text in arguments["completions"]]
        try:
            _call_and_await(fn, arguments | {"completions": not_empty})
        except (Exception, SystemExit) as next_error:
            error = next_error

    is_type_error = isinstance(error, (TypeError, AttributeError))
    if not is_type_error or not re.match("string ind|'str' object has", str(error)):
        return None
    fn.messages = True
    try:
        return _call_and_await(fn, arguments)
    except (Exception, SystemExit):  # the caller reports the error that the function raised on text
        fn.messages = None
        return None


def _call_and_await(fn: Reward, arguments: dict[str, Any]) -> Any:
    # If the function changes the working directory, this undoes the change, since the run directory
    # may be a relative path.
    with contextlib.chdir(os.curdir), contextlib.ExitStack() as stack:
        if isinstance(fn, UserReward):
            label = f"reward {fn.name}{file_and_line_suffix(fn)}"
            stack.enter_context(alive.show_call_without_time_limit(label))
            stack.enter_context(output.restore_streams_after_call(f"the {label}"))
        rewards: Any = fn(**{key: list(values) for key, values in arguments.items()})
        if inspect.isawaitable(rewards):
            rewards = asyncio.run(wrap_in_coroutine(rewards))
        return rewards


async def wrap_in_coroutine(awaitable: Awaitable[Any]) -> Any:
    """A coroutine that awaits `awaitable`. Event loops run only coroutines, not every awaitable."""
    return await awaitable


def _check_reward_values(name: str, fn: Reward, returned: Any, num_rows: int) -> list[float]:
    """The values that a reward returned, as floats. Raises ValueError if any value is wrong."""
    if hasattr(returned, "tolist"):  # an array of any library
        returned = returned.tolist()
    is_list = isinstance(returned, (list, tuple))
    if not is_list or len(returned) != num_rows:
        result = f"{len(returned)} values" if is_list else shorten_value(returned)
        raise UserFunctionError(
            f"reward {name}{file_and_line_suffix(fn)} returned {result}; "
            f"return a list of {num_rows} numbers, one for each completion"
        )
    values = []
    for row, value in enumerate(returned):
        number = finite_float_or_nan(value)
        if value is not None and math.isnan(number):
            raise UserFunctionError(
                f"reward {name}{file_and_line_suffix(fn)} returned {shorten_value(value)} "
                f"for row {row}; return a finite number below 1e15"
            )
        values.append(number)
    return values


def finite_float_or_nan(value: Any) -> float:
    """A reward value as a float; nan unless its absolute value is below `LARGEST_REWARD`."""
    if getattr(value, "ndim", None) == 0:
        value = value.item()
    if not isinstance(value, Real):
        return math.nan
    number: Any = value
    return float(number) if abs(number) < LARGEST_REWARD else math.nan


def _to_json_value(value: Any) -> Any:
    """A value in a form that JSON can represent; the value as a string if there is no such form."""
    if hasattr(value, "tolist"):  # an array or number of an array library
        value = value.tolist()
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
        return str(value)
    return value


# ---- the arguments of a reward


def select_argument_names(name: str, fn: Reward, available: Iterable[str]) -> list[str]:
    """
    The names of those available arguments that a reward function takes.

    Raises ValueError if the function needs an argument that is not available; the message names the
    argument.
    """
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"reward {name} has no signature that Python can inspect; wrap the reward in a function"
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
            hint = (
                f"{did_you_mean(parameter.name, available)}; "
                f"the available arguments are {', '.join(available)}"
            )
            raise ValueError(
                f"reward {name} needs the argument {parameter.name!r}, "
                f"but the data has no such column{hint}"
            )
    return available if takes_all else by_keyword


def columns_that_function_reads(fn: Any, columns: Sequence[str]) -> list[str]:
    """
    The columns of the data that a function reads.

    A function reads the columns that its signature names, or all columns if its code reads its
    **kwargs. Having **kwargs is not enough, because many rewards have them only to ignore the
    arguments that they do not need.
    """
    fn = inspect.unwrap(fn.fn if isinstance(fn, UserReward) else fn)
    parameters = inspect.signature(fn).parameters
    for parameter in parameters.values():
        if parameter.kind == parameter.VAR_KEYWORD and _reads_variable(fn, parameter.name):
            return list(columns)
    return [name for name in columns if name in parameters]


def _reads_variable(fn: Any, variable: str) -> bool:
    """Whether a function's code reads a variable; True if the code is not available."""
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


def needs_environment(reward: Reward) -> bool:
    """Whether a reward takes an argument that is available only if the task has environments."""
    return not set(OF_EPISODES).isdisjoint(inspect.signature(reward).parameters)


def reward_argument_names(examples: Sequence[Example], has_environments: bool = False) -> list[str]:
    """The names of all arguments that a reward may take, given the columns of the examples."""
    names = list(RESERVED)
    if has_environments:
        names += OF_EPISODES
    names += [name for name in examples[0] if name != "prompt"]
    return names
