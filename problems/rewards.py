"""
Reward functions: loaded from a user's file, called, and their results checked; some for any task; readers of answers.

A reward is called by keyword with lists of N, prompts, completions and the columns of the data, and gives N numbers.
What is left out: weights and advantages, and the rubric's reward, which is a judge's. Whatever is wrong with a reward
is a ValueError of one line that names it.
"""

import asyncio
import functools
import importlib
import importlib.util
import inspect
import itertools
import json
import logging
import math
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from fractions import Fraction
from hashlib import sha256
from numbers import Real
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from tqdm.auto import tqdm

from problems import form
from problems.examples import RESERVED, TRAINER, Example, nearest, one_line, prompt_text, short
from problems.formulas import prepare_sympy
from problems.workers import LATE, Pool

Reward = Callable[..., list[float]]  # called by keyword: prompts, completions and the columns of the data


# ---- a user's


class Calling(NamedTuple):
    """How a user's functions are called."""

    messages: bool = False  # prompts and completions as chat messages, as TRL gives them for chat data; else as text
    num_workers: int = 0  # processes that call it row by row; 0: one call for all rows, in this process
    timeout: float = 60.0  # seconds for a row there


class Logged(NamedTuple):
    """What rewards gave to TRL's `log_metric`, values by name, and to `log_extra`, columns of N values by name."""

    metrics: dict[str, list[Any]]
    extra: dict[str, list[Any]]


def merged(parts: Iterable[tuple[Sequence[int], Logged]], num_rows: int) -> Logged:
    """What was logged of some rows each, put together; a row that nothing was logged of has None in a column."""
    whole = Logged({}, {})
    for rows, part in parts:
        for name, values in part.metrics.items():
            whole.metrics.setdefault(name, []).extend(values)
        for name, values in part.extra.items():
            column = whole.extra.setdefault(name, [None] * num_rows)
            for row, value in zip(rows, values, strict=True):
                column[row] = value
    return whole


class UserReward:
    """
    A user's function, called with what TRL calls it with: see `call_reward`.

    `step` is what it finds as `trainer_state.global_step`, the steps that are done; `logged`, what its newest call gave
    to `log_metric` and `log_extra`. In workers it sees one row at a time, and a row that takes too long earns the
    lowest reward of its call: earned it nothing, a policy would learn to stall a verifier that is about to say no.
    """

    def __init__(self, name: str, fn: Reward, spec: str, calling: Calling):
        functools.update_wrapper(self, fn)
        self.name, self.fn, self.calling, self.step, self.logged = name, fn, calling, 0, Logged({}, {})
        self.pool = None
        if calling.num_workers:
            file = spec.rpartition(":")[0]
            if not file.endswith(".py"):
                raise ValueError(f"--reward {spec} is no file, which --reward-workers needs; write FILE.py:function")
            given = (str(Path(file).absolute()), name, calling.messages)
            self.pool = Pool(f"{__name__}:row_scorer", given, num=calling.num_workers, limit=calling.timeout)

    def __call__(self, **arguments: Any) -> Any:
        if self.pool is not None:
            return self._by_row(self.pool, arguments)
        if "prompts" in arguments:
            form = functools.partial(as_messages, "user") if self.calling.messages else prompt_text
            arguments["prompts"] = list(map(form, arguments["prompts"]))
        if "completions" in arguments and self.calling.messages:
            arguments["completions"] = [as_messages("assistant", text) for text in arguments["completions"]]
        metrics, extra = self.logged = Logged({}, {})
        own = {
            "trainer_state": SimpleNamespace(global_step=self.step),
            "log_metric": lambda name, value: metrics.setdefault(str(name), []).append(value),
            "log_extra": lambda column, values: extra.update({str(column): values}),
        }
        wanted = reward_columns(self.name, self.fn, [*arguments, *TRAINER])
        return self.fn(**arguments | {name: own[name] for name in wanted if name in own})

    def _by_row(self, pool: Pool, arguments: dict[str, Any]) -> list[float | None]:
        num = max((len(column) for column in arguments.values()), default=0)
        rows = [{name: [column[row]] for name, column in arguments.items()} for row in range(num)]
        answers = pool.ask([(self.step, row) for row in rows])
        if failed := next((answer.error for answer in answers if answer.error not in ("", LATE)), ""):
            raise RowError(failed)
        said = [(None, {}, {}) if answer.error else answer.value for answer in answers]
        self.logged = merged((([row], Logged(*its)) for row, (_, *its) in enumerate(said)), num)
        lowest = min((value for value, *_ in said if value is not None), default=None)
        if late := sum(answer.error == LATE for answer in answers):
            counted = "unreadable" if lowest is None else f"{lowest:g}, the lowest"
            limit = f"{self.calling.timeout:g} s"
            print(f"reward {self.name}: {late} of {num} rows passed {limit} and count as {counted}", file=sys.stderr)
        return [lowest if answer.error else value for answer, (value, *_) in zip(answers, said, strict=True)]


class RowError(ValueError):
    """What a reward raised in a worker, told by it in full."""


def as_messages(role: str, text: Any) -> list[dict[str, str]]:
    """A prompt or completion as chat messages, which a prompt may be already, and a conversation with tools brings."""
    if (messages := getattr(text, "messages", None)) is not None:
        return list(messages)
    return [{"role": role, "content": text}] if isinstance(text, str) else text


def row_scorer(file: str, function: str, messages: bool) -> Callable[[tuple[int, dict[str, Any]]], Any]:
    """What a worker does: the step and the arguments of one row, lists of one, to its reward or None and `Logged`."""
    name, reward = load_reward(f"{file}:{function}", Calling(messages))

    def score(question: tuple[int, dict[str, Any]]) -> Any:
        reward.step, arguments = question  # type: ignore[attr-defined]
        value = call(name, reward, arguments, 1)[0]
        return None if math.isnan(value) else value, *reward.logged  # type: ignore[attr-defined]

    return score


def tell_step(rewards: dict[str, Reward], step: int) -> None:
    """Tells users' rewards how many steps are done."""
    for reward in rewards.values():
        if isinstance(reward, UserReward):
            reward.step = step


def load_reward(spec: str, calling: Calling | None = None) -> tuple[str, Reward]:
    """
    (name, function) of --reward: FILE.py:function, or one of ours by name with its numbers, as in soft_overlong:256:64.

    Raises ValueError as `load_function` does.
    """
    parts = spec.split(":")
    if parts[0] in GENERIC_REWARDS:
        return parts[0], _generic_reward(spec, parts)
    name, fn = load_function(
        "--reward", spec, f"{nearest(spec, GENERIC_REWARDS)}; or one of {', '.join(GENERIC_REWARDS)}"
    )
    if name == "rubric":
        raise ValueError(f"--reward {spec}: the name rubric belongs to the judge's reward; rename the function")
    return name, UserReward(name, fn, spec, calling or Calling())


def load_function(flag: str, spec: str, hint: str = "") -> tuple[str, Callable[..., Any]]:
    """(name, function) of FILE.py:function or MODULE:function; see `load_functions`."""
    if not spec.rpartition(":")[2].isidentifier():
        raise ValueError(f"{flag} {spec!r} is not FILE.py:function{hint}")
    ((name, fn),) = load_functions(flag, spec, hint).items()
    return name, fn


def load_functions(flag: str, spec: str, hint: str = "", kind: str = "function") -> dict[str, Callable[..., Any]]:
    """
    The functions of FILE.py:function,function or MODULE:function by their names, which a flag gives; or classes.

    A file is executed with its own directory on the path. A module is imported; `__main__` is the caller's program or
    notebook. Raises ValueError when one of them, the function or an import in it is missing, or it is no function.
    hint: what else the flag could name.
    """
    file, colon, names = spec.rpartition(":")
    if not (colon and file and all(name.isidentifier() for name in names.split(","))):
        raise ValueError(f"{flag} {spec!r} is not FILE.py:{kind}{hint}")
    path = Path(file).absolute()
    if path.suffix == ".py" and os.path.isfile(path):
        module = _import_file(f"{flag} {spec}", path)
    elif path.suffix != ".py" and all(part.isidentifier() for part in file.split(".")):
        module = _import_module(f"{flag} {spec}", file)
    else:
        why = "there is no such file" if path.suffix == ".py" else f"{file} is not a Python file"
        raise ValueError(f"{flag} {spec}: {why}; write FILE.py:{kind}")
    is_one = inspect.isclass if kind == "class" else callable
    for name in names.split(","):
        if not hasattr(module, name):
            known = [key for key, value in vars(module).items() if getattr(inspect, f"is{kind}")(value)]
            said = f"{nearest(name, known)}; it has {', '.join(known) or 'none'}"
            raise ValueError(f"{flag} {spec}: {file} has no {kind} {name!r}{said}")
        if not is_one(value := getattr(module, name)):
            raise ValueError(f"{flag} {spec}: {name} is of type {type(value).__name__}, not a {kind}")
    return {name: getattr(module, name) for name in names.split(",")}


def spec_of(fn: Callable[..., Any]) -> str:
    """A function as MODULE:function. Raises ValueError for one that cannot be found by its name."""
    module, name = fn.__module__, getattr(fn, "__qualname__", type(fn).__name__)
    if getattr(sys.modules[module], name, None) is not fn:
        where = "at the top level of a module or notebook"
        raise ValueError(f"{name}: a run finds its functions by their names; define it {where}")
    return f"{module}:{name}"


def file_of(spec: str) -> str:
    """The file that holds the function of FILE.py:function or MODULE:function; the name itself where there is none."""
    name = spec.rpartition(":")[0]
    return getattr(sys.modules.get(name), "__file__", None) or name


def _import_module(what: str, name: str) -> Any:
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        if isinstance(error, ModuleNotFoundError) and error.name in (name, name.partition(".")[0]):
            hint = f", did you mean {name}.py?" if os.path.isfile(f"{name}.py") else ""
            raise ValueError(f"{what}: {name} is neither a Python file nor an installed module{hint}") from error
        raise ValueError(f"{what}: importing {name} failed, {one_line(error)}") from error


def _import_file(what: str, path: Path) -> Any:
    """The module of a file, the same one while the file stays as it is: its functions may ask for its classes."""
    module_spec = importlib.util.spec_from_file_location(f"file of a user {path}", path)
    assert module_spec is not None and module_spec.loader is not None, path
    content, held = path.read_bytes(), sys.modules.get(module_spec.name)
    if held is not None and held.__dict__.get("__content__") == content:
        return held
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[module_spec.name] = module  # dataclasses look their module up there
    sys.path.insert(0, str(path.parent))
    try:
        module_spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        where = _place(error, str(path))
        raise ValueError(f"{what}: importing {path.name} failed, {one_line(error)}{where}") from error
    finally:
        if str(path.parent) in sys.path:
            sys.path.remove(str(path.parent))
    vars(module)["__content__"] = content  # once it ran to its end
    return module


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
    Raises ValueError naming a reward that gave None for all of them, unless it is a metric, or other functions of the
    user gave each a number, as of several tasks each with a reward of its own.
    """
    every = columns_of(examples) | columns
    prompts = [example["prompt"] for example in examples]
    named = tqdm(rewards.items(), desc="reward", leave=False, disable=None)
    called = {name: call_reward(name, reward, prompts, completions, every) for name, reward in named}
    counted = [name for name in called if weights is None or weights[name]]
    for name in counted:
        values = called[name]
        others = [called[other] for other in counted if other != name and isinstance(rewards[other], UserReward)]
        is_covered = others and all(any(not math.isnan(value) for value in row) for row in zip(*others, strict=True))
        if all(map(math.isnan, values)) and not is_covered:
            fix = "return a number for each completion that it applies to"
            raise ValueError(f"reward {name} gave no number for any of {len(values)} completions, only None; {fix}")
    rows = range(len(completions))
    logged = [(rows, reward.logged) for reward in rewards.values() if isinstance(reward, UserReward)]
    return called, merged(logged, len(rows))


def columns_of(examples: Sequence[Example]) -> dict[str, Sequence[Any]]:
    """The columns of examples with equal keys, without the prompts."""
    return {name: [example.get(name) for example in examples] for name in examples[0] if name != "prompt"}


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
    from machine import world  # here: it brings MLX, which data and tasks do without

    if world.size() == 1:
        return call(name, fn, arguments, len(completions))
    mine = world.part_together(map(repr, prompts))
    own = {column: [values[row] for row in mine] for column, values in arguments.items()}
    rewards, logged = [math.nan] * len(completions), Logged({}, {})
    given = call(name, fn, own, len(mine)) if mine else []
    if mine and isinstance(fn, UserReward):
        logged = fn.logged
    parts = world.share((mine, given, *logged), f"reward {name}")
    for rows, values, *_ in parts:
        for row, value in zip(rows, values, strict=True):
            rewards[row] = value
    if isinstance(fn, UserReward):
        fn.logged = merged(((rows, Logged(*its)) for rows, _, *its in parts), len(completions))
    return rewards


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
        is_trls = isinstance(error, TypeError) and "string indices" in str(error)
        fix = "; for chat messages, as from TRL, set --reward-format messages" if is_trls else ""
        raise ValueError(f"reward {name} {raised(error, fn)}{fix}") from error
    if isinstance(fn, UserReward):
        fn.logged = _checked_logs(name + defined_at(fn), fn.logged, num_rows)
    return _checked_rewards(name + defined_at(fn), rewards, num_rows)


def raised(error: BaseException, fn: Callable[..., Any]) -> str:
    """What a user's function raised, and the line of its file."""
    file = getattr(sys.modules.get(getattr(fn, "__module__", "")), "__file__", None)
    return f"raised {one_line(error)}{_place(error, file)}"


def defined_at(fn: Reward) -> str:
    """Where a user's function begins, to stand after its name; "" for ours."""
    return place_of(fn.fn) if isinstance(fn, UserReward) else ""


def place_of(fn: Callable[..., Any]) -> str:
    """The file and line where a function begins, to stand after its name; "" of other objects that can be called."""
    code = getattr(fn, "__code__", None)
    return f" ({code.co_filename}:{code.co_firstlineno})" if code else ""


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
            hint = f"{nearest(p.name, known)}; it has {', '.join(known)}"
            raise ValueError(f"reward {name} needs {p.name!r}, which is no column of the data{hint}")
    if any(p.kind == p.VAR_KEYWORD for p in parameters):
        return list(known)
    return [p.name for p in parameters if p.name in known and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]


OF_EPISODES = ("environments", "earned")  # what rewards may ask for besides, where there are environments


def reward_arguments(examples: Sequence[Example], environments: bool = False) -> list[str]:
    """The names of everything that a reward may ask for, with these examples."""
    own = OF_EPISODES if environments else ()
    return [*RESERVED, *own, *(name for name in examples[0] if name != "prompt")]


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


def _checked_logs(name: str, logged: Logged, num_rows: int) -> Logged:
    """What a reward logged, as JSON has it. ValueError for a metric that is no number, a column of another length."""
    for column, values in logged.extra.items():
        if len(values) != num_rows:
            given = f"{len(values)} values of {short(column)} for {num_rows} completions"
            raise ValueError(f"reward {name} gave log_extra {given}; give one for each")
    for metric, numbers in logged.metrics.items():
        if wrong := [short(value) for value in numbers if not (isinstance(value, Real) and math.isfinite(value))]:
            raise ValueError(f"reward {name} gave log_metric {wrong[0]} as {short(metric)}; give a finite number")
    metrics = {metric: list(map(float, numbers)) for metric, numbers in logged.metrics.items()}
    return Logged(metrics, {column: list(map(_recordable, values)) for column, values in logged.extra.items()})


def _recordable(value: Any) -> Any:
    """A value as JSON has it, or as text."""
    value = value.tolist() if hasattr(value, "tolist") else value  # of an array library
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
        return str(value)
    return value


# ---- the answer that a text states

# Written here and not taken from a library: completions are hostile, sampled by the thousand from a model that is paid
# to find a hole, and every step below takes time linear in the text. Nothing is evaluated; fractions are exact.

_SMALL = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen"
).split()
_TENS = "zero ten twenty thirty forty fifty sixty seventy eighty ninety".split()
NUMBER_WORD = re.compile(
    rf"\b(?:({'|'.join(_TENS[2:])})(?:-({'|'.join(_SMALL[1:10])}))?|({'|'.join(_SMALL)})|(\d+))\b", re.I
)


def number_words(number: int) -> str:
    """0 to 99 in English words, 42 -> "forty-two"."""
    if number < 20:
        return _SMALL[number]
    return _TENS[number // 10] + (f"-{_SMALL[number % 10]}" if number % 10 else "")


def numbers_in(text: str) -> list[int]:
    """Every number that the text names, in words (0 to 99) or digits, in order."""
    return [_named(match) for match in NUMBER_WORD.finditer(text)]


def _named(match: re.Match[str]) -> int:
    tens, unit, small, digits = match.groups()
    if digits:
        return int(digits[:9])
    if small:
        return _SMALL.index(small.lower())
    return 10 * _TENS.index(tens.lower()) + (_SMALL.index(unit.lower()) if unit else 0)


_PLAIN = r"(?:[1-9][0-9]{0,2}(?:,[0-9]{3})+(?![0-9])|[0-9]{1,3}(?: [0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+"
_NUMBER = re.compile(  # not the 5 of "x5", the minus of "7-5", any digit of "1e-500"
    r"(?<![0-9][eE])(?P<sign>(?<![\w)%\]])[-+])?(?<!\w)(?<![0-9]\.)(?<!\b0,)(?<![0-9][eE][-+])"
    rf"(?:(?P<whole>[0-9]{{1,9}}) (?=[0-9]{{1,2}} ?/))?(?P<top>(?>{_PLAIN}))"
    rf"(?: ?/ ?(?P<bottom>(?>{_PLAIN}))|[eE](?P<exponent>[-+]?[0-9]{{1,2}})(?![0-9]))?(?![eE][-+]?[0-9]| ?/ ?[0-9])"
    r"(?: (?P<scale>hundred|thousand|million|billion|trillion)\b)?"
)
_SCALES = {None: 1, "hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_LONGEST_NUMBER = 100  # characters: what is longer is no answer to a school problem

_CHARACTERS = str.maketrans(
    dict.fromkeys("\u2212\u2010\u2011\u2012\u2013\u2014\ufe63\uff0d", "-")  # minus, hyphens and dashes
    | dict.fromkeys("\u00a0\u2007\u2009\u202f\t\r", " ")
    | {"\u00d7": "*", "\u00b7": "*", "\u22c5": "*", "\u2248": "=", "\u2044": "/", "\uff0c": ",", "\u2019": "'"}
    | dict(zip("\uff10\uff11\uff12\uff13\uff14\uff15\uff16\uff17\uff18\uff19", "0123456789", strict=True))
    | {"\u3002": ". ", "\uff0e": ".", "\uff01": "! ", "\uff1f": "? ", "\uff1a": ": ", "\uff08": "(", "\uff09": ")"}
    | {"\u00b2": "^2", "\u00b3": "^3", "\u03c0": "\\pi ", "\u221a": "\\sqrt "}
)
_SCRIPT = r"[\u0400-\u1fff\u3040-\u9fff\uac00-\ud7a3]"  # letters that no formula has: Cyrillic, Arabic, Chinese ...
_REWRITES = [  # LaTeX and Markdown that dress a number without changing it
    (re.compile(pattern), new)
    for pattern, new in (
        (r"\\[cdt]?frac ?\{([^{}]{1,60})\} ?\{([^{}]{1,60})\}", r" \1/\2"),
        (r"\\([$%#&])", r"\1"),
        (r"\{,\}", ","),  # 1{,}234
        (r"\\!", ""),
        (r"\^ ?\{?\\circ(?![A-Za-z])\}?|\\[,;: ()\[\]]|\*\*|[_`~]", " "),
        (r"\\(?:[fm]?box(?:ed)?|text[a-z]*|math[a-z]+|underline|left|right|q?quad|displaystyle)(?![A-Za-z])", " "),
        (r"[{}]", " "),
        (r"-[$€£¥₹]", "-"),
        (r"[$€£¥₹]", " "),
        (rf"(?<={_SCRIPT})(?=[-+]?[0-9])", " "),  # which parts words otherwise than by spaces
        (r"(?i:\b(?:minus|negative) ?(?=[0-9]))", "-"),
        (r" {2,}", " "),
        (r"(?<=[A-Za-z]) ?\^ ?-?[0-9]{1,3}", ""),  # cm^2
    )
]
# of prose, not of a formula
_WORD = re.compile(rf"(?<![\\A-Za-z])(?!(?:sqrt|sin|cos|tan|log|exp|[bpv]?matrix)\b)[A-Za-z]{{3,}}|{_SCRIPT}")
_CALL = re.compile(r"[A-Za-z]\([^()]*[0-9]|(?<![A-Za-z])(?:sqrt|ln|log|exp|sin|cos|tan|pi)(?![A-Za-z])")  # sqrt(2), 2pi
_NEGATED = re.compile(
    r"\b(?:not|never|cannot|neither|nor|nobody|except|anything but|unable|unlikely|impossible|untrue|false|wrong|"
    r"incorrect|doubt|mistake|refuse|rul(?:e|ed|ing) out|nicht|n(?:e |')[^.\n]{1,30}\bpas)\b|n't\b|"
    r"\\neq?(?![A-Za-z])|[\u2260?\u4e0d\u6ca1\u975e\u9519]",  # the last four deny in Chinese
    re.IGNORECASE,
)
_REFUSAL = re.compile(
    r"\W*(?:unfortunately,? )?(?:(?:(?:i'm|i am) (?:so |very )?)?sorry,? (?:but|i)\b|"
    r"i (?:can't|cannot|can not|won't)\b|(?:i'm|i am) (?:unable|not able)\b)",
    re.IGNORECASE,
)
_ANSWER_IS = re.compile(r"\banswer\b[^.\n:=]{0,60}?(?:\bis\b|:|=)[\s:*]*(?:(?<=\n)- )?", re.IGNORECASE)
_SENTENCE_END = re.compile(r"\n|(?<=[.!?])[*)\"']*(?:\s|$)")
# between two numbers: one of several, not a step to the next
_OR = re.compile(r"\s*(?:[A-Za-z]+\s*)?(?:,|;|\bor\b|\band\b|\bto\b|-)\s*(?:(?:or|and|maybe|perhaps|even)\s+)*")


def is_refusal(text: str) -> bool:
    """Whether an answer opens with "I can't", "I cannot", "I won't", "I'm unable" or "I'm sorry, but"."""
    return bool(_REFUSAL.match(text.replace("\u2019", "'")))


def plain_text(text: str) -> str:
    """Text whose numbers stand free: LaTeX, currency signs, Markdown and typographic characters are taken off."""
    text = text.translate(_CHARACTERS)
    for pattern, new in _REWRITES:
        text = pattern.sub(new, text)
    return text


def has_words(text: str) -> bool:
    """Whether a text holds a word of prose, whose letters are no factors of a formula."""
    return bool(_WORD.search(plain_text(text)))


class Quantity(NamedTuple):
    value: Fraction
    unit: str  # the word after the number, if any


def read_number(text: str) -> Quantity | None:
    """
    The one number that a short text states: "$1,234.50", "-3/4 cup", "x = 2.5 million", "5\\%", "1 1/2", "forty-two".

    None where it states none or several or denies it, where something other than a number is meant (a root, pi), and
    where the number is longer than `_LONGEST_NUMBER`. Percent is a unit: "50%" is 50.
    """
    if len(text) > 3 * _LONGEST_NUMBER or _NEGATED.search(text):
        return None
    plain = re.sub(r"\([^()]*[A-Za-z]{2}[^()]*\)", " ", plain_text(text))  # a remark
    if re.search(r"[,;] .*=", plain) or _CALL.search(plain):  # x = 1, y = 2
        return None
    if not re.search("[0-9]", plain):
        plain = NUMBER_WORD.sub(lambda match: str(_named(match)), plain)
    for part in reversed(plain.split("=")):  # of "6 * 7 = 42" the 42, and so of "42 = 6 * 7"
        part = re.sub(r"^ *([-+]) ", r"\1", part)
        found, others = list(_NUMBER.finditer(part)), _NUMBER.sub(" ", part)
        if len(found) == 1 and re.fullmatch(r"(?:[A-Za-z]{2,}+|\b[aAI]\b|[\s.,:;%()'\"*-])*", others):
            value, unit = _value(found[0]), re.match(r" ?([A-Za-z]{2,})", part[found[0].end() :])
            return None if value is None else Quantity(value, unit[1].lower() if unit else "")
    return None


def _value(match: re.Match[str]) -> Fraction | None:
    """The value of a match of `_NUMBER`, None where it is too long or divides by zero."""
    if len(match[0]) > _LONGEST_NUMBER:
        return None
    top, bottom = (Fraction(re.sub("[ ,]", "", part or "1")) for part in (match["top"], match["bottom"]))
    if bottom == 0:
        return None
    scale = _SCALES[match["scale"]] * Fraction(10) ** int(match["exponent"] or 0)
    value = int(match["whole"] or 0) + top / bottom * scale
    return -value if match["sign"] == "-" else value


def boxed(text: str) -> list[str]:
    """What stands in each outermost \\boxed{...} that is closed and not empty, in one pass over the braces."""
    spans: list[tuple[int, int]] = []
    opened: list[tuple[int, bool]] = []  # where the content begins, and whether it is a box's
    for match in re.finditer(r"\\(?:boxed|fbox)\s?\{|\\[{}]|[{}]", text):
        if match[0] == "}" and opened:
            begin, is_box = opened.pop()
            if is_box:
                while spans and spans[-1][0] > begin:  # boxes within this one
                    spans.pop()
                spans.append((begin, match.start()))
        elif match[0].endswith("{") and match[0] != "\\{":
            opened.append((match.end(), len(match[0]) > 1))
    contents = [text[begin:end].strip() for begin, end in spans]
    return [content for content in contents if content]


def hash_answers(text: str) -> list[str]:
    """What stands in lines "#### 42" after the hashes; a Markdown heading "#### 1. Add" is none."""
    lines = re.findall(r"(?<!#)####(?!#)( ?[^\w\n#]{0,8}[0-9][^\n#]{0,200})", text)
    return [line.strip() for line in lines if not re.match(r"\W*[0-9]+[.):] ?[A-Za-z]|.*\\boxed", line)]


def extract_answer(text: str) -> str | None:
    """
    The part of a completion that states its answer; None where none is stated, or several are, or it is denied.

    After the thinking, and in this order, the last of each: \\boxed{...}, a line "#### 42", <answer>...</answer>, "the
    answer is ...", the sentence with a number that is no question; of a refusal only what is marked.
    """
    said = text.rpartition("</think>")[2].partition("<think>")[0].translate(_CHARACTERS)
    if marked := boxed(said) or hash_answers(said) or re.findall(r"<answer>([^<]{1,400})</answer>", said):
        return marked[-1]
    last_digit = max((match.end() for match in re.finditer("[0-9]", said)), default=0)
    for match in reversed(list(_ANSWER_IS.finditer(said))):
        clause = _SENTENCE_END.split(said[match.end() : match.end() + 200], maxsplit=1)[0]
        if re.search("[0-9]", clause) or last_digit < match.end():
            before = re.split(r"[.!?\n]", said[max(match.start() - 200, 0) : match.start()])[-1]
            return None if _NEGATED.search(before + match[0]) else _asserted(clause, 0)
    sentences = [part.strip() for part in _SENTENCE_END.split(said) if part.strip() and not part.rstrip().endswith("?")]
    if not sentences or is_refusal(said):
        return None
    return _asserted(next((part for part in reversed(sentences) if re.search("[0-9]", part)), sentences[-1])[-200:], -1)


def _asserted(sentence: str, which: int) -> str | None:
    """A sentence that is a number or a formula, else its first (0) or last (-1) number, else what stands after "is"."""
    sentence = re.sub(r"[,;(] *(?:and |but )?(?:not|rather than|instead of)\b.*", "", sentence).strip()
    plain = plain_text(sentence)
    if which == 0 or _WORD.search(plain):
        sentence, plain = sentence.rstrip("!"), plain.rstrip("! ")  # else a factorial
    found, is_negated = list(_NUMBER.finditer(plain)), _NEGATED.search(plain)
    if not _WORD.search(plain) or read_number(sentence):
        return sentence
    if not found:
        return sentence if is_negated else re.sub(r".*(?:\b(?:is|are|was|were)\b|:) ", "", sentence)
    one, gaps = found[which], [plain[a.end() : b.start()] for a, b in itertools.pairwise(found)]
    in_formula = re.search(r"[\\^]", plain[max(one.start() - 6, 0) : one.end() + 2])
    return None if in_formula or is_negated or any(map(_OR.fullmatch, gaps)) else one[0]


# ---- answers that are formulas, by the library math-verify

MATH_LIMIT = 5.0  # seconds for one answer; the slowest of the tests' table takes half a second
_LONGEST_ANSWER = 400  # characters
_ENDLESS = re.compile(  # powers of powers of numbers, factorials of factorials, numbers that fill a screen
    r"[0-9)}]\s*(?:\^|\*\*)\s*[({]*\s*-?[0-9.]+\s*[)}]*\s*(?:\^|\*\*)|(?:\^|\*\*)\s*[({]*\s*-?[0-9]{5,}|"
    r"!\s*!|[0-9]{5,}\s*!|[0-9]{200,}"
)


@functools.cache
def _math_pool() -> Pool:
    """Workers, for the library's own time limit is a signal, which raises in every thread but the first."""
    return Pool(f"{__name__}:make_math_checker", (), num=min(4, os.cpu_count() or 1), limit=MATH_LIMIT, sealed=True)


def make_math_checker() -> Callable[[tuple[str, str]], bool]:
    """What a worker does: the right answer and another, as LaTeX, to whether they are the same."""
    prepare_sympy()  # before the library takes its parser over
    from math_verify import parse, verify

    logging.disable(logging.CRITICAL)  # it warns of a time limit that is ours here

    def formulas(text: str) -> list[Any]:
        return list(parse(f"${text}$", parsing_timeout=None))

    def check(pair: tuple[str, str]) -> bool:
        return bool(verify(formulas(pair[0]), formulas(pair[1]), timeout_seconds=None))

    assert check(("\\frac{1}{2}", "0.5"))  # the first one loads the grammar, which takes longer than most answers
    return check


def states_number(text: str) -> bool:
    """Whether a text is a number with its unit, ends with what one "is" or somebody "has", or marks one."""
    if boxed(text) or hash_answers(text) or "<answer>" in text or _ANSWER_IS.search(text):
        return True
    rest = re.sub(
        r".*(?:\b(?:is|are|was|were|equals|makes|ha[sd]|have|gets|got|costs?)\b|[=:])",
        "",
        NUMBER_WORD.sub("1", plain_text(text)),
    )
    return bool(re.fullmatch(r"[^A-Za-z]*[0-9][^A-Za-z]*(?:[A-Za-z]+\W*){0,2}", rest.strip()))


def math_correct(completions: Sequence[str], answer: Sequence[Any], **_: Any) -> list[float]:
    """
    1 where a completion's answer is the right one, else 0: numbers, fractions, formulas, sets, intervals, units.

    `extract_answer` tells what a completion states. Two plain numbers are compared exactly, words as words, the rest by
    math-verify. What takes more than `MATH_LIMIT` seconds is wrong.
    """
    right = ["" if one is None else extract_answer(str(one)) or str(one) for one in answer]
    said = [extract_answer(text) for text in completions]
    judged = [_read_plainly(gold, other) for gold, other in zip(right, said, strict=True)]
    open_rows = [row for row, verdict in enumerate(judged) if verdict is None]
    pairs = dict.fromkeys((_ascii(right[row]), _ascii(str(said[row]))) for row in open_rows)
    told = dict(zip(pairs, _math_pool().ask(list(pairs)), strict=True))
    for row in open_rows:
        judged[row] = told[_ascii(right[row]), _ascii(str(said[row]))].value is True
    return [float(bool(verdict)) for verdict in judged]


def _ascii(formula: str) -> str:
    """A formula as math-verify reads it: sqrt(3) as \\sqrt{3}, superscripts as powers."""
    return re.sub(r"(?<!\\)sqrt *\(([^()]*)\)", r"\\sqrt{\1}", formula.translate(_CHARACTERS).strip(" .$"))


def folded(text: str) -> str:
    """A text in lower case without its dress: Markdown, dollars, full stop, article, brackets around one word."""
    text = re.sub(r"\\(?:text|math)[a-z]*|[\s$*_`{}\"']", " ", text.translate(_CHARACTERS))
    text = " ".join(text.casefold().split()).rstrip(" .,:;")
    return re.sub(r"^\((\w+)\)$", r"\1", re.sub(r"^(?:the|an?) ", "", text))


def _read_plainly(right: str, said: str | None) -> bool | None:
    """Whether an answer is right, where that can be told without computer algebra; else None."""
    if said is None or not right or len(said) > _LONGEST_ANSWER:
        return False
    if folded(said) == folded(right) != "":
        return True
    ours, theirs = read_number(right), read_number(said)
    if ours and theirs:
        shorter, longer = sorted((ours.unit, theirs.unit), key=len)
        nearly = min(abs(ours.value), Fraction(1)) / 10**6
        close = abs(ours.value - theirs.value) <= nearly and theirs.value.denominator >= 10**6
        return longer.startswith(shorter) and (ours.value == theirs.value or close)  # 0.333333 is close to 1/3
    plain = re.sub(r"\\(?:times|cdot|div)(?![A-Za-z])", "*", plain_text(said))
    # of 42 no sum that is left undone (6 * 7, \sum), no bound, no rows; of 42 cm no 42 m
    is_sum = re.fullmatch(r"[-+*/() .0-9]+", plain) and re.search(r"[0-9)] ?[-+*]", plain)
    is_other = re.search(r"\\\\|\\(?:[gl]eq?|sum|prod|int|lim|max|min|gcd)(?![A-Za-z])|[<>\u2264\u2265]", said)
    unit = re.fullmatch(r".*[0-9] ?([a-z])", plain.strip(" ."))
    is_unlike = ours and ours.unit and unit and unit[1] != ours.unit[0]
    if ours and (is_sum or is_other or is_unlike or _NEGATED.search(said)):
        return False
    return False if has_words(right) or _ENDLESS.search(said) else None


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


def coin(completions: Sequence[str], prompts: Sequence[Any], **_: Any) -> list[float]:
    """0 or 1 by chance, as a control: what a run with it changes, no reward has taught. A resumed run repeats it."""
    rows = enumerate(zip(prompts, completions, strict=True))
    return [float(sha256(repr(row).encode()).digest()[0] % 2) for row in rows]


def well_formed(max_tokens: float) -> Reward:
    """1 for an answer that ends before `max_tokens`, has the form of one and is no refusal, else 0."""

    def formed(completions: Sequence[str], prompts: Sequence[Any], num_tokens: Sequence[int], **_: Any) -> list[float]:
        rows = zip(completions, map(prompt_text, prompts), num_tokens, strict=True)
        kept = [num < max_tokens and not is_refusal(text) and form.holds(text, asked) for text, asked, num in rows]
        return list(map(float, kept))

    return formed


GENERIC_REWARDS: dict[str, Callable[..., Reward]] = {
    "length": length_reward,
    "soft_overlong": soft_overlong,
    "boxed_once": lambda: boxed_once,
    "math_verify": lambda: math_correct,
    "random": lambda: coin,
    "format": well_formed,
}


def _generic_reward(spec: str, parts: list[str]) -> Reward:
    """One of `GENERIC_REWARDS` with the numbers of its spec, which must be positive and as many as it takes."""
    needed = list(inspect.signature(GENERIC_REWARDS[parts[0]]).parameters)
    if len(parts) - 1 != len(needed) or not all(re.fullmatch("[1-9][0-9]{0,8}", part) for part in parts[1:]):
        form = ":".join([parts[0], *(f"<{name}>" for name in needed)])
        raise ValueError(f"--reward {spec!r} is not {form}, with positive whole numbers")
    return GENERIC_REWARDS[parts[0]](*map(int, parts[1:]))
