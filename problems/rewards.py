"""
Reward functions: called, and their results checked.

A reward is called by keyword with lists of N, prompts, completions and the columns of the data, and gives N numbers.
Left out: how a user's is found (problems/functions.py), ours by name (problems/built_in.py), weights, advantages, the
rubric's reward, which is a judge's. Whatever is wrong with a reward is a ValueError of one line that names it.
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
from problems import built_in
from problems.built_in import BUILT_IN, Reward
from problems.examples import (
    RESERVED,
    TRAINER,
    Example,
    prompt_text,
    shorten_value,
    suggest_nearest,
)
from problems.functions import describe_raised, load_function, place_of
from problems.statements import strip_thoughts
from problems.verifiers import math_correct  # noqa: F401  (users' files import it from here)


class Logged(NamedTuple):
    """What rewards gave to TRL's `log_metric`, values by name, and to `log_extra`, columns of N values by name."""

    metrics: dict[str, list[float]]
    extra: dict[str, list[Any]]

    def note_metric(self, name: Any, value: Any) -> None:
        if not math.isfinite(value):
            raise ValueError(
                f"log_metric {shorten_value(name)} is {shorten_value(value)}; give a finite number"
            )
        self.metrics.setdefault(str(name), []).append(float(value))

    def note_column(self, num_rows: int, name: Any, values: Sequence[Any]) -> None:
        if len(values) != num_rows:
            raise ValueError(
                f"log_extra {shorten_value(name)} has {len(values)} values for {num_rows} completions"
            )
        self.extra[str(name)] = list(map(_as_json, values))


class UserReward:
    """
    A user's function, called with what TRL calls it with: see `call_reward`.

    It gets prompts and completions as text; as chat messages, as from TRL, where it fails on text or where prompts are
    messages and its values differ with these alone, as it may hide its errors: `call` tries.
    `state` is what it finds as `trainer_state`: `global_step`, the steps that are done, of `max_steps`; `logged`, what
    its newest call gave to `log_metric` and `log_extra`.
    """

    def __init__(self, name: str, fn: Reward):
        functools.update_wrapper(self, fn)
        self.name, self.fn, self.logged = name, fn, Logged({}, {})
        self.state = SimpleNamespace(global_step=0, max_steps=1)
        self.messages: bool | None = None  # None: nobody has tried

    def __call__(self, **arguments: Any) -> Any:
        if "prompts" in arguments:
            form = functools.partial(as_messages, "user") if self.messages else prompt_text
            arguments["prompts"] = list(map(form, arguments["prompts"]))
        if "completions" in arguments and self.messages:
            arguments["completions"] = [
                as_messages("assistant", text) for text in arguments["completions"]
            ]
        self.logged = Logged({}, {})
        num = max(map(len, arguments.values()), default=0)
        log_extra = functools.partial(self.logged.note_column, num)
        own = {
            "trainer_state": self.state,
            "log_metric": self.logged.note_metric,
            "log_extra": log_extra,
        }
        wanted = reward_columns(self.name, self.fn, [*arguments, *TRAINER])
        return self.fn(**arguments | {name: own[name] for name in wanted if name in own})


def as_messages(role: str, text: Any) -> list[dict[str, str]]:
    """A prompt or completion as chat messages, which a prompt may be already, and a conversation with tools brings."""
    if (messages := getattr(text, "messages", None)) is not None:
        return list(messages)
    return [{"role": role, "content": text}] if isinstance(text, str) else text


def set_step(rewards: dict[str, Reward], step: int, steps: int) -> None:
    """Tells users' functions how many of a run's steps are done."""
    for reward in rewards.values():
        if isinstance(reward, UserReward):
            reward.state = SimpleNamespace(global_step=step, max_steps=steps)


def load_reward(spec: str) -> tuple[str, Reward]:
    """(name, function) of --reward: FILE.py:function, or one of ours by name with its numbers, as length:200."""
    if (known := spec.partition(":")[0]) in BUILT_IN:
        return known, built_in.make_built_in(spec)
    name, fn = load_function(
        "--reward", spec, f"{suggest_nearest(spec, BUILT_IN)}; or one of {', '.join(BUILT_IN)}"
    )
    if name == "rubric":
        raise ValueError(
            f"--reward {spec}: the name rubric belongs to the judge's reward; rename the function"
        )
    return name, UserReward(name, fn)


def call_rewards(
    rewards: dict[str, Reward],
    examples: Sequence[Example],
    completions: Sequence[str],
    columns: dict[str, list[Any]],
    weights: Mapping[str, float] | None = None,
) -> tuple[dict[str, list[float]], Logged]:
    """
    The values of N completions by each reward, and what these logged; see `call_reward`.

    examples: one per completion, whose columns they bring. columns: the others'. weights: 0 makes one a metric.
    Raises ValueError naming a reward that gave None for all of them, unless it is a metric, or other functions or
    environments of the user gave each a number, as of several tasks each with a reward of its own.
    """
    every, prompts = columns_of(examples) | columns, [example["prompt"] for example in examples]
    named = alive.Bar(rewards.items(), desc="reward", unit="reward")
    called = {
        name: call_reward(name, reward, prompts, completions, every) for name, reward in named
    }
    counted = [name for name in called if weights is None or weights[name]]
    brought = [
        name
        for name in counted
        if isinstance(rewards[name], UserReward) or needs_episodes(rewards[name])
    ]
    for name in counted:
        values = called[name]
        others = [called[other] for other in brought if other != name]
        is_covered = others and not any(
            all(map(math.isnan, row)) for row in zip(*others, strict=True)
        )
        if all(map(math.isnan, values)) and not is_covered:
            fix = "return a number for each completion that it applies to"
            raise ValueError(
                f"reward {name} gave no number for any of {len(values)} completions, only None; {fix}"
            )
    logged = Logged({}, {})
    for own in (reward.logged for reward in rewards.values() if isinstance(reward, UserReward)):
        for name, values in own.metrics.items():
            logged.metrics.setdefault(name, []).extend(values)
        logged.extra.update(own.extra)
    return called, logged


def columns_of(examples: Sequence[Example]) -> dict[str, Sequence[Any]]:
    """The columns of examples with equal keys, without the prompts."""
    return {
        name: [example.get(name) for example in examples]
        for name in examples[0]
        if name != "prompt"
    }


def call_reward(
    name: str,
    fn: Reward,
    prompts: Sequence[Any],
    completions: Sequence[str],
    columns: dict[str, Sequence[Any]],
) -> list[float]:
    """
    The rewards of N completions by a function, sync or async, each a finite float; nan where it gave None.

    Called by keyword with copies of the lists: prompts, completions and the columns, all of them where `fn` takes
    **kwargs, else those that it names. The trainer adds the columns `completion_ids`, tokens without padding, and
    `num_tokens`; a user's function also gets `trainer_state`, `log_extra` and `log_metric`, as from TRL.

    Of several machines the first calls it. Raises ValueError naming the reward, and the column that is missing, what
    `fn` raised and where, or the row and its value.
    """
    arguments = {"prompts": prompts, "completions": completions} | columns
    assert all(len(column) == len(completions) for column in arguments.values()), (
        "columns of unequal length"
    )
    from machine import world  # here: it brings MLX, which data and tasks do without

    ours: Any = None
    if world.is_first():
        ours = [
            call_checked(name, fn, arguments, len(completions)),
            *(fn.logged if isinstance(fn, UserReward) else ()),
        ]
    values, *logged = world.all_gather(ours)[0]
    if isinstance(fn, UserReward):
        fn.logged = Logged(*logged)
    return list(values)


def call_checked(name: str, fn: Reward, arguments: dict[str, Any], num_rows: int) -> list[float]:
    wanted = reward_columns(name, fn, [*arguments, *TRAINER])
    chosen = {key: arguments[key] for key in wanted if key in arguments}
    if "completions" in chosen and not isinstance(
        fn, UserReward
    ):  # a user's function gets the thoughts too
        chosen["completions"] = list(map(strip_thoughts, chosen["completions"]))
    try:
        rewards = _call_function(fn, chosen)
    except (Exception, SystemExit) as error:
        rewards = _retry_with_messages(fn, chosen, error) if isinstance(fn, UserReward) else None
        if rewards is None:
            raise ValueError(f"reward {name} {describe_raised(error, fn)}") from error
    values = _checked_rewards(name, fn, rewards, num_rows)
    if isinstance(fn, UserReward) and fn.messages is None:
        is_alike = len(set(map(str, values))) == 1 and any(
            isinstance(one, list) for one in arguments["prompts"]
        )
        others, logged, fn.messages = values, fn.logged, is_alike
        with contextlib.suppress(Exception, SystemExit):
            others = (
                _checked_rewards(name, fn, _call_function(fn, chosen), num_rows)
                if is_alike
                else values
            )
        if len(set(map(str, others))) > 1:
            return others
        fn.messages, fn.logged = None if is_alike else False, logged
    return values


def _call_function(fn: Reward, chosen: dict[str, Any]) -> Any:
    with contextlib.chdir(
        os.curdir
    ):  # where the run is recorded, by a relative path, though fn goes elsewhere
        rewards: Any = fn(**{key: list(values) for key, values in chosen.items()})
        return asyncio.run(await_any(rewards)) if inspect.isawaitable(rewards) else rewards


async def await_any(given: Any) -> Any:
    """What an awaitable of any kind gives, as the coroutine that loops ask for."""
    return await given


def _retry_with_messages(fn: UserReward, chosen: dict[str, Any], error: BaseException) -> Any:
    """What an untried function that failed on text gives for messages, its form from now on; None if it fails too."""
    if fn.messages is not None:
        return None
    if (
        isinstance(error, IndexError) and "completions" in chosen
    ):  # of an empty text, which hides what comes next
        try:
            _call_function(
                fn, chosen | {"completions": [text or "-" for text in chosen["completions"]]}
            )
        except (Exception, SystemExit) as next_error:
            error = next_error
    if isinstance(error, (TypeError, AttributeError)) and re.match(
        "string ind|'str' object has", str(error)
    ):
        fn.messages = True
        try:
            return _call_function(fn, chosen)
        except (Exception, SystemExit):  # the error on text is told
            fn.messages = None
    return None


def reward_columns(name: str, fn: Reward, known: Iterable[str]) -> list[str]:
    """The known argument names that `fn` takes. ValueError names an argument that it needs and nobody gives."""
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"reward {name} has no signature that Python can read; wrap it in a function"
        ) from error
    by_keyword = [
        p.name
        for p in parameters
        if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) and p.name in known
    ]
    for p in parameters:
        if (
            p.default is p.empty
            and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
            and p.name not in by_keyword
        ):
            hint = f"{suggest_nearest(p.name, known)}; it has {', '.join(known)}"
            raise ValueError(
                f"reward {name} needs {p.name!r}, which is no column of the data{hint}"
            )
    return list(known) if any(p.kind == p.VAR_KEYWORD for p in parameters) else by_keyword


def columns_read(fn: Any, columns: Sequence[str]) -> list[str]:
    """
    The columns that a function reads: those that it names, or all where it looks into its **kwargs.

    Its code tells the latter: `**_` stands in many rewards only to take what they do not want.
    """
    fn = inspect.unwrap(fn.fn if isinstance(fn, UserReward) else fn)
    parameters = inspect.signature(fn).parameters
    rest = [p.name for p in parameters.values() if p.kind == p.VAR_KEYWORD]
    if rest and _looks_at(fn, rest[0]):
        return list(columns)
    return [name for name in columns if name in parameters]


def _looks_at(fn: Any, variable: str) -> bool:
    """Whether a function's code reads a variable; true where there is no code to look at."""
    code = getattr(fn, "__code__", None) or getattr(type(fn).__call__, "__code__", None)
    if code is None:
        return True
    loaded = [step.argval for step in dis.get_instructions(code) if "LOAD" in step.opname]
    return any(
        variable == name or (isinstance(name, tuple) and variable in name) for name in loaded
    )


OF_EPISODES = (
    "environments",
    "earned",
)  # what rewards may ask for besides, where there are environments


def needs_episodes(reward: Reward) -> bool:
    """Whether it asks for what only an episode with an environment has."""
    return not set(OF_EPISODES).isdisjoint(inspect.signature(reward).parameters)


def reward_arguments(examples: Sequence[Example], environments: bool = False) -> list[str]:
    """The names of everything that a reward may ask for, with these examples."""
    return [
        *RESERVED,
        *(OF_EPISODES if environments else ()),
        *(name for name in examples[0] if name != "prompt"),
    ]


def _checked_rewards(name: str, fn: Reward, rewards: Any, num_rows: int) -> list[float]:
    if hasattr(rewards, "tolist"):  # arrays of any library
        rewards = rewards.tolist()
    if not isinstance(rewards, (list, tuple)) or len(rewards) != num_rows:
        given = (
            f"{len(rewards)} values"
            if isinstance(rewards, (list, tuple))
            else shorten_value(rewards)
        )
        fault = f"reward {name}{place_of(fn)} gave {given}"
        raise ValueError(f"{fault}, not a list of {num_rows} numbers, one for each completion")
    checked = []
    for row, value in enumerate(rewards):
        number = to_number(value)
        if value is not None and math.isnan(number):
            fault = f"reward {name}{place_of(fn)} gave {shorten_value(value)} for row {row}"
            raise ValueError(f"{fault}; return a finite number below 1e15")
        checked.append(number)
    return checked


def to_number(value: Any) -> float:
    """A number that a reward may be, also in an array of no axes; nan for anything else."""
    value = value.item() if getattr(value, "ndim", None) == 0 else value
    number: Any = value if isinstance(value, Real) else math.nan
    return float(number) if abs(number) < 1e15 else math.nan  # the square of more overflows float32


def _as_json(value: Any) -> Any:
    """A value as JSON has it, or as text."""
    value = value.tolist() if hasattr(value, "tolist") else value  # of an array library
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
        return str(value)
    return value
