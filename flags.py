"""
Flags and YAML: how a command reads its settings, and tells a user's mistake in one line.

A setting is a field of a dataclass, made by `flag` with its help and its range. Left out: the settings (config.py).
"""

import argparse
import contextlib
import dataclasses
import difflib
import functools
import json
import os
import re
import reprlib
import stat
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple, NoReturn, get_args, get_origin

import yaml

OPTIONAL: dict[Any, type] = {float | None: float, int | None: int}  # None: what the help of the flag says


# ---- texts that nobody vouches for


def safe(text: str) -> str:
    """A text for a terminal: see `visible` and `redacted`."""
    return visible(redacted(text))


def visible(text: str) -> str:
    """
    Text whose every character is seen: what would turn, hide or break the text around it is spelled as its code.

    That is control and format characters (bidirectional overrides, zero-width marks, fillers, tags), lone surrogates,
    which no file can hold, and line separators. Line feeds, tabs and the joiners of emoji and scripts stay.
    """
    return _UNSEEN.sub(lambda match: f"\u27e8U+{ord(match[0]):04X}\u27e9", text)


_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # a line feed and a tab are text
_UNSEEN = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u034f\u061c\u115f\u1160\u180b-\u180f\u200b\u200e\u200f\u2028-\u202e"
    r"\u2060-\u206f\u3164\ud800-\udfff\ufeff\uffa0\ufff0-\ufffb\U000e0000-\U000e0fff]"
)


def redacted(text: str, *secrets: str) -> str:
    """Text without secrets, keys and passwords of the environment or of a URL. Below 6 characters nothing is secret."""
    known = [value for name, value in os.environ.items() if re.search("(KEY|TOKEN|SECRET|PASSWORD)$", name)]
    for secret in [*secrets, *known]:
        if len(secret) >= 6:
            text = text.replace(secret, "***")
    return re.sub(r"(?<=://)[^/\s@]+@", "***@", text)


def read_json(text: str | bytes) -> Any:
    """What JSON holds. Raises ValueError also where it is nested too deep or a key stands twice in one object."""
    try:
        return json.loads(text, object_pairs_hook=_each_once)
    except RecursionError as error:
        raise ValueError("nested too deep") from error


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    once = dict(pairs)
    if len(once) < len(pairs):
        twice, _ = Counter(key for key, _ in pairs).most_common(1)[0]
        raise ValueError(f"the key {reprlib.repr(twice)} stands twice in one object")
    return once


# ---- a command


def fail(message: object, most: int = 900) -> NoReturn:
    """Ends the process after a user's mistake: one line on stderr, of `most` characters, exit status 2."""
    line = safe(" ".join(str(message).split("\n")))
    print("error:", line if len(line) < most else f"{line[: most - 300]} \u2026 {line[-250:]}", file=sys.stderr)
    sys.exit(2)


class Parser(argparse.ArgumentParser):
    """Parses a command's flags. Reports mistakes in one line, and an unknown flag with the nearest known one."""

    def __init__(self, prog: str, description: str):
        super().__init__(prog=prog, description=description, allow_abbrev=False)
        self.register("type", None, _text)
        self.register("type", Path, lambda value: Path(_text(value)))

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        words = list(sys.argv[1:] if args is None else args)
        for place, word in enumerate(words):
            if word.endswith("=--"):  # of which Python 3.11 makes an empty list
                self.error(f"{word}: -- is no value")
            name, equals, value = word.partition("=")
            if (
                name.startswith("--") and (ours := flag_of(name[2:])) in self._option_string_actions
            ):  # TRL's underscores
                words[place] = ours + equals + value
        return super().parse_known_args(words, namespace)

    def error(self, message: str) -> NoReturn:
        words = message.partition("unrecognized arguments: ")[2].split()
        if words:
            known = [flag for action in self._actions for flag in action.option_strings]
            unknown = [word.partition("=")[0][:80] for word in words if word.startswith("--")] or [words[0][:80]]
            said = (f"{one} is no flag of {self.prog}; {hint(one, known) or '--help lists them'}" for one in unknown)
            fail(". ".join(dict.fromkeys(said)), most=6000)  # each of a whole script of TRL is answered
        message = message.replace("invalid int value:", "not a whole number:")
        fail(message.replace("invalid float value:", "not a number:").removeprefix("argument "))


@functools.cache
def foreign_names() -> dict[str, dict[str, tuple[str, str]]]:
    """By section of data/trl.yaml: names of TRL and PEFT, each with its kind and what to do here."""
    sections = load_yaml(Path(__file__).parent / "data" / "trl.yaml", "data/trl.yaml")
    return {
        section: {name: tuple(row) for names, row in rows.items() for name in names.split(", ")}
        for section, rows in sections.items()
    }


def hint(asked: str, known: Collection[str], quote: Callable[[str], str] = str) -> str:
    """
    What an unknown flag or setting is here: by the table of foreign names, else one of `known` that is spelled much
    like it; empty if neither knows it. A row about flags that the command does not have says nothing, unless it names
    theirs.
    """
    key, by_key = key_of(asked), {key_of(name): name for name in known}
    rows = ((section, *names[key]) for section, names in foreign_names().items() if key in names)
    for section, kind, said in rows:
        flags = re.findall("--[a-z][a-z-]*", said)
        if kind != "same" and (not flags or ".py" in said or any(key_of(flag) in by_key for flag in flags)):
            return _answer({"LoraConfig": "PEFT's ", "older names": ""}.get(section, "TRL's ") + key, kind, said)
    near = difflib.get_close_matches(key, by_key, 1, 0.8)
    return f"did you mean {quote(by_key[near[0]])}?" if near else ""


def value_hint(name: str, value: Any) -> str:
    """What a value is here that TRL has for a setting; empty if the table of foreign names has none."""
    asked = f"{key_of(name)} {str(value).lower()}"
    row = foreign_names()["values"].get(asked)
    return _answer(f"TRL's {asked}", *row) if row else ""


def _answer(what: str, kind: str, said: str) -> str:
    verb = {"renamed": "is here ", "missing": "is missing here", "not needed": "is not needed here"}[kind]
    return f"{what} {verb}{': ' if said and kind != 'renamed' else ''}{said.replace('`', '')}"


def key_of(flag: str) -> str:
    """`--judge-mode` as `judge_mode`."""
    return flag.lstrip("-").replace("-", "_")


def _text(value: str) -> str:
    """
    A flag's text. Rejects an empty one: it comes from an unset shell variable and does not mean the default. Rejects
    control characters, which a terminal would obey wherever the text is shown.
    """
    if not value.strip():
        raise argparse.ArgumentTypeError(f"{value!r} is empty; give a value or leave the flag out")
    if _CONTROL.search(value):
        raise argparse.ArgumentTypeError(f"{value!r:.60} holds a control character; remove it")
    return value


def size(text: str) -> int | str:
    """A whole number or "auto"."""
    if text == "auto":
        return text
    try:
        return int(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a whole number nor auto") from error


def weights(text: str) -> dict[str, float]:
    """ "correct=1,rubric=0.5" as a dictionary."""
    by_name = {}
    for part in text.split(","):
        name, _, value = part.partition("=")
        try:
            by_name[name.strip()] = float(value)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"{part!r} is not NAME=NUMBER; write correct=1,rubric=0.5") from error
    return by_name


def seeds(text: str) -> int | list[int]:
    """ "3" as a number of seeds, "1,2,5" as these."""
    numbers = [int(part) if part.isascii() and part.isdecimal() else -1 for part in text.removesuffix(",").split(",")]
    if "," not in text and 1 <= numbers[0] <= 1000:
        return numbers[0]
    if "," in text and -1 not in numbers and len(set(numbers)) == len(numbers):
        return numbers
    raise argparse.ArgumentTypeError(f"{text!r:.60} is no number of seeds up to 1000, nor a list of them as 1,2,5")


def flag_of(name: str) -> str:
    """`judge_mode` as `--judge-mode`."""
    return "--" + name.replace("_", "-")


def no_run(folder: str | Path) -> str:
    """Why a directory is no run, and what to do."""
    if any(Path(folder).glob("seed-*/config.yaml")):
        return "it holds a run for each seed; name one, as seed-0, or repeat the command of --seeds to go on with them"
    return "no config.yaml there; give the directory of a run"


def check_least(args: argparse.Namespace, **least: float) -> None:
    """Raises ValueError naming a flag below its least value, or from 2^64 on; None and "auto" pass."""
    for name, low in least.items():
        value = getattr(args, name)
        if value not in (None, "auto") and not low <= value < 2**64:
            limit = f"at least {low}" if value < low else "finite and below 2^64"
            raise ValueError(f"{flag_of(name)} is {value}; it must be {limit}")


# ---- fields that are flags


def flag(default: Any, text: str, **metadata: Any) -> Any:
    """
    A field with its help; optionally `low`, `high`, `nargs`, `parse` (reads its text), `metavar`, and what `Setting`
    reads.
    """
    metadata = {"help": text, **metadata}
    if callable(default):
        return dataclasses.field(default_factory=default, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


class Setting(NamedTuple):
    """A field of a group of settings; its flag is `--judge-mode` for the key `judge_mode`."""

    key: str
    group: str  # the name of the group's field in `Config`
    title: str  # of the group in --help
    field: dataclasses.Field[Any]
    of: str | None = None  # the kind of runs that use it; None: all
    later: bool = False  # whether a resumed run may change it

    @property
    def is_automatic(self) -> bool:
        """Whether `auto` stands for None: it is decided later."""
        return self.field.metadata.get("parse") is size

    def is_for(self, kind: str) -> bool:
        """Whether runs of this kind use it."""
        return self.of in (None, kind)

    @property
    def default(self) -> Any:
        make = self.field.default_factory
        return self.field.default if make is dataclasses.MISSING else make()

    @property
    def help(self) -> str:
        """Its help, with the default."""
        default = self.default
        said = "auto" if self.is_automatic else " ".join(default) if isinstance(default, list) else str(default)
        return self.field.metadata["help"] + (f" (default: {said})" if said not in ("", "None", "False", "{}") else "")


def choices_of(kind: Any) -> tuple[str, ...]:
    """The words that a field of this type takes, a Literal or a list of one; none for any other."""
    kind = get_args(kind)[0] if get_origin(kind) is list else kind
    return get_args(kind) if get_origin(kind) is Literal else ()


def add_flags(parser: argparse.ArgumentParser, settings: Iterable[Setting], everything: bool = True) -> None:
    """Adds a flag for each setting, by group; an omitted flag is None. everything: whether --help shows all of them."""
    groups: dict[str, Any] = {}
    for setting in settings:
        field, metadata = setting.field, setting.field.metadata
        kind = OPTIONAL.get(field.type, field.type)
        shown = everything or metadata.get("first")
        options: dict[str, Any] = {"help": setting.help.replace("%", "%%") if shown else argparse.SUPPRESS}
        if field.type is bool:
            options["action"] = argparse.BooleanOptionalAction
        else:
            options["type"] = metadata.get("parse", kind if kind in (int, float) else None)
            words = [*choices_of(field.type), *["FILE.py:fn"] * metadata.get("own", False)]  # `check_values` reads them
            options["metavar"] = metadata.get(
                "metavar", "{" + ",".join(words) + "}" if choices_of(field.type) else None
            )
        if "nargs" in metadata:
            options["nargs"] = metadata["nargs"]
        if setting.group not in groups:
            groups[setting.group] = parser.add_argument_group(setting.title)
        words = [flag_of(name) for name in (setting.key, *metadata.get("also", ()))]
        groups[setting.group].add_argument(*words, dest=setting.key, default=None, **options)


def taken(key: str, kind: Any, value: Any) -> Any:
    """
    A value as a setting of this type has it: TRL's word as ours, a text alone as a list, `1e-4`, which YAML reads as
    a text, as a number. What it is not is for `check_values`.
    """
    if get_origin(kind) is list:
        several = [value] if isinstance(value, str) else value
        return [one for one in several if _ours(key, one) is not None] if isinstance(several, list) else value
    if OPTIONAL.get(kind, kind) is float and isinstance(value, str):
        with contextlib.suppress(ValueError):
            return float(value)
    return _ours(key, value)


def _ours(key: str, value: Any) -> Any:
    """TRL's value as ours, where the table has it; None: it is the default."""
    what, said = foreign_names()["values"].get(f"{key} {str(value).lower()}", ("", ""))
    ours = re.match("`--[a-z-]+ ([a-z]+)`", said)
    return None if what == "not needed" else ours[1] if what == "renamed" and ours else value


def check_values(settings: Mapping[str, Setting], values: dict[str, Any]) -> None:
    """Raises ValueError naming the flag whose value has the wrong type, is out of range or is no choice."""
    words: dict[Any, str] = {
        int: "a whole number",
        float: "a finite number",
        str: "a text",
        bool: "true or false",
        list[str]: "a list of texts",
        dict[str, float]: "finite numbers by name",
    }
    for key, value in values.items():
        field, name = settings[key].field, flag_of(key)
        if value is None and field.type in OPTIONAL:
            continue
        kind, choices = OPTIONAL.get(field.type, field.type), choices_of(field.type)
        if choices:
            kind = list[str] if get_origin(kind) is list else str
        if not _is_a(value, kind):
            said = value_hint(name, value) or f"it must be {words[kind]}"
            raise ValueError(f"{name} is {reprlib.repr(value)}; {said}")
        low, high = field.metadata.get("low"), field.metadata.get("high", 2**31 if kind is int else None)
        if low is not None and value < low:
            raise ValueError(f"{name} is {value}; it must be at least {low}")
        if high is not None and value > high:
            raise ValueError(f"{name} is {reprlib.repr(value)}; it must be at most {high}")
        for one in value if isinstance(value, list) else [value]:
            if isinstance(one, str) and _CONTROL.search(one):
                raise ValueError(f"{name} is {one!r:.60}; it must hold no control characters")
            is_own = field.metadata.get("own") and ":" in one
            if choices and one not in choices and not is_own:
                known = ", ".join(choices) + (" or FILE.py:function" if field.metadata.get("own") else "")
                said = value_hint(name, one)
                raise ValueError(f"{name} is {one!r:.60}; it must be one of {known}{said and '; '}{said}")


def _is_a(value: Any, kind: Any) -> bool:
    """Whether a setting has the type of its field. A bool is not a number, and numbers are finite."""
    if kind is float:
        return type(value) in (int, float) and abs(value) < 1e300  # so written, it refuses nan and huge integers
    if kind == list[str]:
        return isinstance(value, list) and all(isinstance(one, str) for one in value)
    if kind == dict[str, float]:
        return isinstance(value, dict) and all(isinstance(k, str) and _is_a(v, float) for k, v in value.items())
    return type(value) is kind


# ---- YAML


class _Loader(yaml.SafeLoader):
    """YAML without duplicate keys: after a forgotten list dash, the later entry would replace the earlier one."""

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        if isinstance(node, yaml.MappingNode):
            seen = set()
            for key, _ in node.value:
                if isinstance(key, yaml.ScalarNode) and (key.tag, key.value) in seen:
                    problem = f"the key {key.value!r:.60} stands twice in one entry"
                    raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
                seen.add((key.tag, str(key.value)))
        return super().construct_mapping(node, deep)


def read_text(path: str | Path, where: str, megabytes: int) -> str:
    """A file's text. Raises ValueError, starting with `where`, if it is none: a device or a pipe may have no end."""
    try:
        found = os.stat(path)
        if not stat.S_ISREG(found.st_mode) or found.st_size > megabytes * 10**6:
            raise ValueError(f"it is no file of at most {megabytes} MB")
        return Path(path).read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        raise ValueError(f"{where} cannot be read: {error}") from error


def load_yaml(path: str | Path, where: str) -> Any:
    """
    The content of a user's YAML file of at most a megabyte.

    Raises ValueError, starting with `where`, if it is no such file, unreadable or not YAML.
    """
    text = read_text(path, where, 1)
    try:
        return yaml.load(text, _Loader)
    except Exception as error:  # PyYAML lets through what an impossible date, a bad tag or deep nesting raises
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
        line = f", line {mark.line + 1}" if mark else ""
        problem = problem or str(error).partition("\n")[0] or type(error).__name__
        raise ValueError(f"{where} is not YAML{line}: {problem}; correct it") from error
