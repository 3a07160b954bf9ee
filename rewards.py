"""
Reward functions: loaded from a user's file, called, and their results checked; and three that suit any task.

A reward is called by keyword with lists of N, prompts, completions and the columns of the data, and gives N numbers.
What is left out: weights and advantages, and the rubric's reward, which is a judge's. Whatever is wrong with a reward
is a ValueError of one line that names it.
"""

import asyncio
import functools
import importlib.util
import inspect
import math
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from numbers import Real
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from answers import boxed, hash_answers
from examples import RESERVED, TRAINER, Example, nearest, one_line, short
from workers import LATE, Pool

Reward = Callable[..., list[float]]  # called by keyword: prompts, completions and the columns of the data


# ---- a user's


class Calling(NamedTuple):
    """How a user's functions are called."""

    messages: bool = False  # prompts and completions as chat messages, as TRL gives them for chat data
    num_workers: int = 0  # processes that call it row by row; 0: one call for all rows, in this process
    timeout: float = 60.0  # seconds for a row there


class UserReward:
    """
    A user's function, called with what TRL calls it with: see `call_reward`.

    `step` is what it finds as `trainer_state.global_step`, the steps that are done. What it gives to `log_extra` and
    `log_metric` is dropped. In workers it sees one row at a time, and a row that takes too long earns the lowest
    reward of its call: earned it nothing, a policy would learn to stall a verifier that is about to say no.
    """

    def __init__(self, name: str, fn: Reward, spec: str, calling: Calling):
        functools.update_wrapper(self, fn)
        self.name, self.fn, self.calling, self.step = name, fn, calling, 0
        self.pool = None
        if calling.num_workers:
            given = (str(Path(spec.rpartition(":")[0]).absolute()), name, calling.messages)
            self.pool = Pool("rewards:row_scorer", given, num=calling.num_workers, limit=calling.timeout)

    def __call__(self, **arguments: Any) -> Any:
        if self.pool is not None:
            return self._by_row(self.pool, arguments)
        if self.calling.messages:
            if "prompts" in arguments:
                arguments["prompts"] = [as_messages("user", prompt) for prompt in arguments["prompts"]]
            if "completions" in arguments:
                arguments["completions"] = [as_messages("assistant", text) for text in arguments["completions"]]
        own = {"trainer_state": SimpleNamespace(global_step=self.step), "log_extra": _drop, "log_metric": _drop}
        wanted = reward_columns(self.name, self.fn, [*arguments, *TRAINER])
        return self.fn(**arguments | {name: own[name] for name in wanted if name in own})

    def _by_row(self, pool: Pool, arguments: dict[str, Any]) -> list[float | None]:
        num = max((len(column) for column in arguments.values()), default=0)
        rows = [{name: [column[row]] for name, column in arguments.items()} for row in range(num)]
        answers = pool.ask([(self.step, row) for row in rows])
        if failed := next((answer.error for answer in answers if answer.error not in ("", LATE)), ""):
            raise RowError(failed)
        readable = [answer.value for answer in answers if answer.value is not None]
        lowest = min(readable, default=None)
        if late := sum(answer.error == LATE for answer in answers):
            counted = "unreadable" if lowest is None else f"{lowest:g}, the lowest"
            limit = f"--reward-timeout {self.calling.timeout:g}"
            print(f"reward {self.name}: {late} of {num} rows passed {limit} and count as {counted}", file=sys.stderr)
        return [lowest if answer.error else answer.value for answer in answers]


class RowError(ValueError):
    """What a reward raised in a worker, told by it in full."""


def _drop(*_: Any) -> None:
    pass


def as_messages(role: str, text: Any) -> list[dict[str, str]]:
    """A prompt or completion as chat messages, which a prompt may be already."""
    return [{"role": role, "content": text}] if isinstance(text, str) else text


def row_scorer(file: str, function: str, messages: bool) -> Callable[[tuple[int, dict[str, Any]]], float | None]:
    """What a worker does: the step and the arguments of one row, lists of one, to its reward or None."""
    name, reward = load_reward(f"{file}:{function}", Calling(messages))

    def score(question: tuple[int, dict[str, Any]]) -> float | None:
        reward.step, arguments = question  # type: ignore[attr-defined]
        value = call(name, reward, arguments, 1)[0]
        return None if math.isnan(value) else value

    return score


def tell_step(rewards: dict[str, Reward], step: int) -> None:
    """Tells users' rewards how many steps are done."""
    for reward in rewards.values():
        if isinstance(reward, UserReward):
            reward.step = step


def load_reward(spec: str, calling: Calling | None = None) -> tuple[str, Reward]:
    """
    (name, function) of --reward: FILE.py:function, or one of ours by name with its numbers, as in soft_overlong:256:64.

    The file is executed with its own directory on the path, which is taken off again.
    Raises ValueError when the file, the function or an import in it is missing, or it is no function.
    """
    parts = spec.split(":")
    if parts[0] in GENERIC_REWARDS:
        return parts[0], _generic_reward(spec, parts)
    file, colon, name = spec.rpartition(":")
    if not (colon and file and name.isidentifier()):
        ours = ", ".join(GENERIC_REWARDS)
        raise ValueError(f"--reward {spec!r} is not FILE.py:function{nearest(spec, GENERIC_REWARDS)}; or one of {ours}")
    if name == "rubric":
        raise ValueError(f"--reward {spec}: the name rubric belongs to the judge's reward; rename the function")
    path = Path(file).absolute()
    if not os.path.isfile(path) or path.suffix != ".py":
        raise ValueError(f"--reward {spec}: {file} is not a Python file; write FILE.py:function")
    module = _import_file(spec, path)
    if not hasattr(module, name):
        functions = [key for key, value in vars(module).items() if inspect.isfunction(value)]
        hint = f"{nearest(name, functions)}; it has {', '.join(functions) or 'none'}"
        raise ValueError(f"--reward {spec}: the file has no function {name!r}{hint}")
    if not callable(fn := getattr(module, name)):
        raise ValueError(f"--reward {spec}: {name} is of type {type(fn).__name__}, not a function")
    return name, UserReward(name, fn, spec, calling or Calling())


def _import_file(spec: str, path: Path) -> Any:
    module_spec = importlib.util.spec_from_file_location(f"reward file {path.stem}", path)
    assert module_spec is not None and module_spec.loader is not None, path
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[module_spec.name] = module  # dataclasses look their module up there
    sys.path.insert(0, str(path.parent))
    try:
        module_spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        where = _place(error, str(path))
        raise ValueError(f"--reward {spec}: importing {path.name} failed, {one_line(error)}{where}") from error
    finally:
        if str(path.parent) in sys.path:
            sys.path.remove(str(path.parent))
    return module


def call_reward(
    name: str, fn: Reward, prompts: Sequence[Any], completions: Sequence[str], columns: dict[str, Sequence[Any]]
) -> list[float]:
    """
    The rewards of N completions by a function, sync or async, each a finite float; nan where it gave None.

    Called by keyword with copies of the lists: prompts, completions and the columns, all of them where `fn` takes
    **kwargs, else those that it names. The trainer adds the columns `completion_ids`, tokens without padding, and
    `num_tokens`; a user's function also gets `trainer_state`, `log_extra` and `log_metric`, as from TRL.

    Raises ValueError naming the reward, and the column that is missing, what `fn` raised and where, or the row and its
    value.
    """
    arguments = {"prompts": prompts, "completions": completions} | columns
    assert all(len(column) == len(completions) for column in arguments.values()), "columns of unequal length"
    return call(name, fn, arguments, len(completions))


def call(name: str, fn: Reward, arguments: dict[str, Any], num_rows: int) -> list[float]:
    """See `call_reward`."""
    known = [*arguments, *TRAINER]
    chosen = {key: list(arguments[key]) for key in reward_columns(name, fn, known) if key in arguments}
    try:
        rewards: Any = fn(**chosen)
        if inspect.isawaitable(rewards):
            rewards = asyncio.run(_awaited(rewards))
    except RowError as error:
        raise ValueError(str(error)) from error
    except (Exception, SystemExit) as error:
        file = getattr(sys.modules.get(fn.__module__), "__file__", None)
        raise ValueError(f"reward {name} raised {one_line(error)}{_place(error, file)}") from error
    return _checked_rewards(name, rewards, num_rows)


def _place(error: BaseException, file: str | None) -> str:
    """The last line of `file`, which is the user's own, that an error came through; "" where there is none."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    return f", at {file}:{lines[-1]}" if lines else ""


async def _awaited(awaitable: Any) -> Any:
    return await awaitable


def reward_columns(name: str, fn: Reward, known: Iterable[str]) -> list[str]:
    """The known argument names that `fn` takes. ValueError names an argument that it needs and nobody gives."""
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (ValueError, TypeError) as error:
        raise ValueError(f"reward {name} has no signature that Python can read; wrap it in a function") from error
    for p in parameters:
        by_keyword = p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) and p.name in known
        if p.default is p.empty and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL) and not by_keyword:
            raise ValueError(
                f"reward {name} needs {p.name!r}, which is no column of the data; it has {', '.join(known)}"
            )
    if any(p.kind == p.VAR_KEYWORD for p in parameters):
        return list(known)
    return [p.name for p in parameters if p.name in known and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]


def reward_arguments(examples: Sequence[Example]) -> list[str]:
    """The names of everything that a reward may ask for, with these examples."""
    return [*RESERVED, *(name for name in examples[0] if name != "prompt")]


def _checked_rewards(name: str, rewards: Any, num_rows: int) -> list[float]:
    if hasattr(rewards, "tolist"):  # arrays of any library
        rewards = rewards.tolist()
    if not isinstance(rewards, (list, tuple)):
        raise ValueError(f"reward {name} gave {short(rewards)}, not a list; return one number for each completion")
    if len(rewards) != num_rows:
        raise ValueError(f"reward {name} gave {len(rewards)} values for {num_rows} completions; return one for each")
    checked = []
    for row, value in enumerate(rewards):
        value = value.item() if getattr(value, "ndim", None) == 0 else value  # an array of no axes
        number: Any = value if isinstance(value, Real) else math.nan
        # so written, it refuses nan; the square of more overflows float32
        if value is not None and not abs(number) < 1e15:
            raise ValueError(f"reward {name} gave {short(value)} for row {row}; return a finite number below 1e15")
        checked.append(float(number))
    return checked


# ---- for any task


def length_reward(target: float) -> Reward:
    """0 at `target` tokens, falling linearly with the distance to -1 at none and at twice as many, or more."""

    def length(num_tokens: Sequence[int], **_: Any) -> list[float]:
        return [-min(abs(count - target) / target, 1.0) for count in num_tokens]

    return length


def soft_overlong(max_len: float, cache: float) -> Reward:
    """
    0 up to max_len - cache tokens, from there linearly down to -1 at max_len, and -1 beyond.

    Source: DAPO, arXiv:2503.14476, equation 13.
    """

    def overlong(num_tokens: Sequence[int], **_: Any) -> list[float]:
        return [min(max((max_len - cache - count) / cache, -1.0), 0.0) for count in num_tokens]

    return overlong


def boxed_once(completions: Sequence[str], **_: Any) -> list[float]:
    """1 where the completion marks an answer exactly once, by \\boxed{...} or by a line "#### 42", else 0."""
    return [float(len(boxed(text)) + len(hash_answers(text)) == 1) for text in completions]


GENERIC_REWARDS: dict[str, Callable[..., Reward]] = {
    "length": length_reward,
    "soft_overlong": soft_overlong,
    "boxed_once": lambda: boxed_once,
}


def _generic_reward(spec: str, parts: list[str]) -> Reward:
    """One of `GENERIC_REWARDS` with the numbers of its spec, which must be positive and as many as it takes."""
    needed = list(inspect.signature(GENERIC_REWARDS[parts[0]]).parameters)
    if len(parts) - 1 != len(needed) or not all(re.fullmatch("[1-9][0-9]{0,8}", part) for part in parts[1:]):
        form = ":".join([parts[0], *(f"<{name}>" for name in needed)])
        raise ValueError(f"--reward {spec!r} is not {form}, with positive whole numbers")
    return GENERIC_REWARDS[parts[0]](*map(int, parts[1:]))
