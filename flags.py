"""
Flags and YAML: how a command reads its settings, and tells a user's mistake in one line.

A setting is a field of a dataclass, made by `flag` with its help and its range. Left out: the settings (config.py).
"""

import argparse
import contextlib
import dataclasses
import difflib
import errno
import functools
import json
import os
import re
import reprlib
import shutil
import stat
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple, NoReturn, get_args, get_origin

import yaml

# ---- texts that nobody vouches for


def make_printable(text: str) -> str:
    """A text for a terminal: see `visible` and `redacted`."""
    return escape_invisible(redact_secrets(text))


def escape_invisible(text: str) -> str:
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


def redact_secrets(text: str, *secrets: str) -> str:
    """Text without secrets, keys and passwords of the environment or of a URL. Below 6 characters nothing is secret."""
    known = [
        value
        for name, value in os.environ.items()
        if re.search("(KEY|TOKEN|SECRET|PASSWORD)$", name)
    ]
    for secret in [*secrets, *known]:
        if len(secret) >= 6:
            text = text.replace(secret, "***")
    return re.sub(r"(?<=://)[^/\s@]+@", "***@", text)


def read_json(text: str | bytes) -> Any:
    """What JSON holds. Raises ValueError also where it is nested too deep or a key stands twice in one object."""
    try:
        return json.loads(text, object_pairs_hook=_refuse_duplicate_keys)
    except RecursionError as error:
        raise ValueError("nested too deep") from error


def _refuse_duplicate_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    once = dict(pairs)
    if len(once) < len(pairs):
        twice, _ = Counter(key for key, _ in pairs).most_common(1)[0]
        raise ValueError(f"the key {reprlib.repr(twice)} stands twice in one object")
    return once


# ---- files that cannot be read or written

LEAST_FREE = 2**16  # bytes of a disk below which it counts as full
FULL = (errno.ENOSPC, errno.EDQUOT)
FIXES = {
    **dict.fromkeys(FULL, "make room there, or choose another disk"),
    **dict.fromkeys((errno.EACCES, errno.EPERM), "change its rights, or choose another place"),
    errno.EROFS: "choose another place",
    errno.EFBIG: "choose a disk that takes larger files",
}


@contextlib.contextmanager
def names_path(path: str | Path) -> Iterator[None]:
    """
    Inside, an OSError that names no file names this one: a failed write, as to a full disk, has no name.

    The same holds for tokenizers, whose bare Exception ends in "(os error 28)".
    """
    try:
        yield
    except OSError as error:
        if error.errno is None or error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error
    except Exception as error:
        number = re.search(r"\(os error (\d+)\)$", str(error))
        if number is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from error


def os_error_line(error: OSError) -> str:
    """The path of an error of the system and what is wrong there: "runs/x/lock: Permission denied"."""
    if not error.strerror:
        return str(error)
    path = error.filename if error.filename2 is None else error.filename2
    return error.strerror if path is None else f"{path}: {error.strerror}"


def line_of(error: BaseException) -> str:
    """What an error says, in an error of the system with what to do."""
    if not isinstance(error, OSError):
        return str(error)
    fix = FIXES.get(error.errno or 0)
    return os_error_line(error) + (f"; {fix}" if fix else "")


def refuse_unwritable_file(flag: str, path: Path) -> None:
    """
    Raises ValueError where a command could not write its results to a file, before it does the work.

    A new file is made and removed again. Nothing is written to a file that is there, as it may hold
    results, nor to a pipe or a terminal. A device, as /dev/full, gets an empty line.
    """
    folder = path.absolute().parent
    if path.is_dir() or not folder.is_dir():
        raise ValueError(
            f"{flag} {path} is no file in an existing directory; make the directory first"
        )
    is_new = not os.path.lexists(path)
    try:
        if is_new or path.is_file():
            path.open("ab").close()
            refuse_full_disk(flag, path, folder, LEAST_FREE)
        elif not os.access(path, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        elif path.is_char_device():
            with names_path(path), path.open("w") as device:
                if not device.isatty():
                    device.write("\n")
    except OSError as error:
        raise ValueError(f"{flag} {path} cannot be written: {line_of(error)}") from error
    finally:
        if is_new:
            path.unlink(missing_ok=True)


def refuse_full_disk(flag: str, path: Path, folder: Path, num_bytes: int) -> None:
    """Raises ValueError where the disk of a folder has less room than what will be written to `path`."""
    free = shutil.disk_usage(folder).free
    if free < num_bytes:
        need = (
            f"{free / 1e6:.3g} MB are free there, and at least {num_bytes / 1e6:.3g} MB are needed"
        )
        raise ValueError(f"{flag} {path}: {need}; make room, or choose another disk")


# ---- a command


def exit_with_error(message: object, most: int = 900) -> NoReturn:
    """
    Ends the process after a user's mistake: one line on stderr, of `most` characters, exit status 2.

    message: a text or an error; an error of the system says which file it is about, and what to do.
    """
    text = line_of(message) if isinstance(message, BaseException) else str(message)
    line = make_printable(" ".join(text.split("\n")))
    print(
        "error:",
        line if len(line) < most else f"{line[: most - 300]} \u2026 {line[-250:]}",
        file=sys.stderr,
    )
    sys.exit(2)


@contextlib.contextmanager
def report_mistakes() -> Iterator[None]:
    """Inside, or in a function that it decorates, a user's mistake ends the process: see `fail`."""
    try:
        yield
    except (ValueError, OSError) as error:
        exit_with_error(error)


class Parser(argparse.ArgumentParser):
    """Parses a command's flags. Reports mistakes in one line, and an unknown flag with the nearest known one."""

    def __init__(self, prog: str, description: str):
        super().__init__(prog=prog, description=description, allow_abbrev=False)
        self.register("type", None, _parse_text)
        self.register("type", Path, lambda value: Path(_parse_text(value)))

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        words = list(sys.argv[1:] if args is None else args)
        for place, word in enumerate(words):
            if word.endswith("=--"):  # of which Python 3.11 makes an empty list
                self.error(f"{word}: -- is no value")
            name, equals, value = word.partition("=")
            # TRL has underscores
            if name.startswith("--") and (ours := flag_of(name[2:])) in self._option_string_actions:
                words[place] = ours + equals + value
        return super().parse_known_args(words, namespace)

    def error(self, message: str) -> NoReturn:
        words = message.partition("unrecognized arguments: ")[2].split()
        if words:
            known = [flag for action in self._actions for flag in action.option_strings]
            unknown = [word.partition("=")[0][:80] for word in words if word.startswith("--")] or [
                words[0][:80]
            ]
            said = (
                f"{one} is no flag of {self.prog}; {suggest_name(one, known) or '--help lists them'}"
                for one in unknown
            )
            exit_with_error(
                ". ".join(dict.fromkeys(said)), most=6000
            )  # each of a whole script of TRL is answered
        message = message.replace("invalid int value:", "not a whole number:")
        exit_with_error(
            message.replace("invalid float value:", "not a number:").removeprefix("argument ")
        )


@functools.cache
def load_foreign_names() -> dict[str, dict[str, tuple[str, str]]]:
    """By section of data/trl.yaml: names of TRL and PEFT, each with its kind and what to do here."""
    sections = load_yaml(Path(__file__).parent / "data" / "trl.yaml", "data/trl.yaml")
    return {
        section: {name: tuple(row) for names, row in rows.items() for name in names.split(", ")}
        for section, rows in sections.items()
    }


def suggest_name(asked: str, known: Collection[str], quote: Callable[[str], str] = str) -> str:
    """
    What an unknown flag or setting is here: by the table of foreign names, else one of `known` that is spelled much
    like it; empty if neither knows it. A row about flags that the command does not have says nothing, unless it names
    theirs.
    """
    key, by_key = key_of(asked), {key_of(name): name for name in known}
    rows = (
        (section, *names[key]) for section, names in load_foreign_names().items() if key in names
    )
    for section, kind, said in rows:
        flags = re.findall("--[a-z][a-z-]*", said)
        if kind != "same" and (
            not flags or ".py" in said or any(key_of(flag) in by_key for flag in flags)
        ):
            return _explain_foreign_name(
                {"LoraConfig": "PEFT's ", "older names": ""}.get(section, "TRL's ") + key,
                kind,
                said,
            )
    near = difflib.get_close_matches(key, by_key, 1, 0.8)
    return f"did you mean {quote(by_key[near[0]])}?" if near else ""


def _explain_foreign_name(what: str, kind: str, said: str) -> str:
    verb = {
        "renamed": "is here ",
        "missing": "is missing here",
        "not needed": "is not needed here",
    }[kind]
    return f"{what} {verb}{': ' if said and kind != 'renamed' else ''}{said.replace('`', '')}"


def key_of(flag: str) -> str:
    """`--judge-mode` as `judge_mode`."""
    return flag.lstrip("-").replace("-", "_")


def _parse_text(value: str) -> str:
    """
    A flag's text. Rejects an empty one: it comes from an unset shell variable and does not mean the default. Rejects
    control characters, which a terminal would obey wherever the text is shown.
    """
    if not value.strip():
        raise argparse.ArgumentTypeError(f"{value!r} is empty; give a value or leave the flag out")
    if _CONTROL.search(value):
        raise argparse.ArgumentTypeError(f"{value!r:.60} holds a control character; remove it")
    return value


# Bash passes "\n" as a backslash and an n. `\tan` and `\rho` are LaTeX; no stop text begins with \nabla.
_ESCAPE = re.compile(
    r"\\(\\[ntrxu]|n|[tr](?![A-Za-z])|x[0-7][0-9a-fA-F]|u(?![dD][89a-fA-F])[0-9a-fA-F]{4})"
)
_UNSURE = re.compile(r"\\[tr](?=[A-Za-z])")
_CHARACTERS = {"n": ("\n", "a line end"), "t": ("\t", "a tab"), "r": ("\r", "a carriage return")}


def stop_text(word: str) -> str:
    r"""
    A flag's stop text, with a line on stderr where it holds an escape.

    A shell passes "\n" as a backslash and an n, and means a line end. `\t`, `\r`, `\x0a` and `\u000a` are read too;
    `\t` and `\r` before a letter stay, as they begin names of LaTeX. `\\n` keeps the two characters.
    """

    def read_escape(match: re.Match[str]) -> str:
        code = match[1]
        if code[0] == "\\":
            return code
        character, name = _CHARACTERS.get(code) or (
            chr(int(code[1:], 16)),
            f"U+{int(code[1:], 16):04X}",
        )
        notes[match[0]] = f"is read as {name}; write \\{match[0]} for the characters themselves"
        return character

    notes = {
        unsure: "is kept as these two characters; $'...' in bash makes others"
        for unsure in _UNSURE.findall(word)
    }
    text = _ESCAPE.sub(read_escape, word)
    for escape, note in notes.items():
        print(escape_invisible(f"--stop {word:.60}: {escape} {note}"), file=sys.stderr)
    return text


def parse_seeds(text: str) -> int | list[int]:
    """ "3" as a number of seeds, "1,2,5" as these."""
    numbers = [
        int(part) if part.isascii() and part.isdecimal() else -1
        for part in text.removesuffix(",").split(",")
    ]
    if "," not in text and 1 <= numbers[0] <= 1000:
        return numbers[0]
    if "," in text and -1 not in numbers and len(set(numbers)) == len(numbers):
        return numbers
    raise argparse.ArgumentTypeError(
        f"{text!r:.60} is no number of seeds up to 1000, nor a list of them as 1,2,5"
    )


def flag_of(name: str) -> str:
    """`judge_mode` as `--judge-mode`."""
    return "--" + name.replace("_", "-")


def explain_missing_run(folder: str | Path) -> str:
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


def setting(default: Any, text: str, **metadata: Any) -> Any:
    """A field with its help; optionally `low`, `high`, `parse` (of its words), `metavar`, and what `Setting` reads."""
    how = {
        "default_factory" if callable(default) else "default": default,
        "metadata": {"help": text, **metadata},
    }
    return dataclasses.field(**how)


OWN = "FILE.py:function"


class Setting(NamedTuple):
    """A field of a group of settings; its flag is `--judge-mode` for the key `judge_mode`."""

    key: str
    group: str  # the name of the group's field in `Config`
    title: str  # of the group in --help
    field: dataclasses.Field[Any]
    of: str | None = None  # the kind of runs that use it; None: all
    later: bool = False  # whether a resumed run may change it

    @property
    def kind(self) -> Any:
        """Its type without None; of several values `list` or `dict`, of words `str`."""
        origin, args = get_origin(self.field.type), get_args(self.field.type)
        return (
            args[0]
            if type(None) in args
            else str
            if origin is Literal
            else origin or self.field.type
        )

    @property
    def choices(self) -> tuple[str, ...]:
        """The words that it takes, itself or in a list, OWN where a function is one; none where it takes any."""
        kind = get_args(self.field.type)[0] if self.kind is list else self.field.type
        return (
            (*get_args(kind), *[OWN] * self.field.metadata.get("own", False))
            if get_origin(kind) is Literal
            else ()
        )

    @property
    def is_automatic(self) -> bool:
        """Whether `auto` stands for None: it is decided later."""
        return self.field.type == (int | None)

    @property
    def default(self) -> Any:
        make = self.field.default_factory
        return self.field.default if make is dataclasses.MISSING else make()

    @property
    def shown_default(self) -> str:
        """The default as a user writes it, "" where it stands for nothing."""
        default = self.default
        if self.is_automatic or self.kind is bool:
            return "auto" if default is None else "on" if default else "off"
        return (
            " ".join(default or ())
            if self.kind in (list, dict)
            else ""
            if default is None
            else str(default)
        )


def add_flags(
    parser: argparse.ArgumentParser, settings: Iterable[Setting], everything: bool = True
) -> None:
    """Adds a flag for each setting, by group; it gives its text, or None. everything: whether --help shows all."""
    groups: dict[str, Any] = {}
    for setting in settings:
        metadata, default = setting.field.metadata, setting.shown_default
        text = (metadata["help"] + f" (default: {default})" * bool(default)).replace("%", "%%")
        how: dict[str, Any] = {
            "help": text if everything or metadata.get("first") else argparse.SUPPRESS
        }
        if setting.kind is bool:
            how["action"] = argparse.BooleanOptionalAction
        else:
            how |= {"type": metadata.get("parse"), "metavar": metadata.get("metavar")}
            how |= {"nargs": "+"} if setting.kind in (list, dict) else {}
            if setting.choices:
                how["metavar"] = how["metavar"] or "{" + ",".join(setting.choices) + "}"
        if setting.group not in groups:
            groups[setting.group] = parser.add_argument_group(setting.title)
        words = [flag_of(name) for name in (setting.key, *metadata.get("also", ()))]
        groups[setting.group].add_argument(*words, dest=setting.key, default=None, **how)


WORDS = {
    int: "a whole number",
    float: "a finite number",
    str: "a text",
    bool: "true or false",
    list: "a list of texts",
    dict: "finite numbers by name, as correct=1,rubric=0.5",
}


def parse_setting(setting: Setting, value: Any) -> Any:
    """
    What a flag's text, a value in YAML or an argument is as a setting: TRL's words are ours, a text alone is a list.

    Raises ValueError naming the flag whose value has the wrong type, is out of range or is no choice.
    """
    kind, metadata, choices = setting.kind, setting.field.metadata, setting.choices
    if type(None) in get_args(setting.field.type) and value in (
        None,
        "auto" if setting.is_automatic else None,
    ):
        return None

    def refused(shown: Any, must: str) -> ValueError:
        asked = f"{setting.key} {shown}".lower()  # a value that TRL has
        row = load_foreign_names()["values"].get(asked)
        said = "; " + _explain_foreign_name(f"TRL's {asked}", *row) if row else ""
        return ValueError(
            f"{flag_of(setting.key)} is {reprlib.repr(shown)}; it must be {must}{said}"
        )

    try:
        if kind is list:
            several = [value] if isinstance(value, str) else value
            found = [
                ours
                for one in _convert(list, several)
                if (ours := _from_trl_value(setting.key, one)) is not None
            ]
        else:
            found = _convert(kind, _from_trl_value(setting.key, value))
    except (ValueError, TypeError, AttributeError, OverflowError) as error:
        raise refused(value, WORDS[kind]) from error
    for text in found if kind is list else [found] * (kind is str):
        if not isinstance(text, str):
            raise refused(value, WORDS[kind])
        if _CONTROL.search(text):
            raise ValueError(
                f"{flag_of(setting.key)} is {text!r:.60}; it must hold no control characters"
            )
        if choices and text not in choices and not (OWN in choices and ":" in text):
            raise refused(text, f"one of {', '.join(choices)}")
    low, high = metadata.get("low"), metadata.get("high", 2**31 if kind is int else None)
    if low is not None and found < low:
        raise refused(found, f"at least {low}")
    if high is not None and found > high:
        raise refused(found, f"at most {high}")
    return found


def _convert(kind: Any, value: Any) -> Any:
    """A value, or its text, as a type. A bool is not a number, and numbers are finite. ValueError where it is none."""
    if kind is dict:
        words = ",".join([value] if isinstance(value, str) else value)
        pairs = (
            value.items()
            if isinstance(value, dict)
            else [part.partition("=")[::2] for part in words.split(",")]
        )
        found: Any = {name.strip(): _convert(float, number) for name, number in pairs}
    else:
        found = kind(value) if isinstance(value, str) and kind in (int, float) else value
        if type(found) is not kind and not (kind is float and type(found) is int):
            raise ValueError
        if kind is float and not abs(found) < 1e300:  # so written, it refuses nan and huge integers
            raise ValueError
    return found


def _from_trl_value(key: str, value: Any) -> Any:
    """TRL's value as ours, where the table has it; None: it is the default."""
    what, said = load_foreign_names()["values"].get(f"{key} {str(value).lower()}", ("", ""))
    ours = re.match("`--[a-z-]+ ([a-z]+)`", said)
    return None if what == "not needed" else ours[1] if what == "renamed" and ours else value


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
        raise ValueError(
            f"{where} cannot be read: {getattr(error, 'strerror', None) or error}"
        ) from error


def load_yaml(path: str | Path, where: str) -> Any:
    """A user's YAML file of at most a megabyte; else, or unreadable or not YAML: ValueError, starting with `where`."""
    text = read_text(path, where, 1)
    try:
        return yaml.load(text, _Loader)
    except (
        Exception
    ) as error:  # PyYAML lets through what an impossible date, a bad tag or deep nesting raises
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
        line = f", line {mark.line + 1}" if mark else ""
        problem = problem or str(error).partition("\n")[0] or type(error).__name__
        raise ValueError(f"{where} is not YAML{line}: {problem}; correct it") from error
