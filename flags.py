"""
Flags: how a command reads its settings, and how it reports a user's mistake in one line.

A setting is a dataclass field that `setting` declares with a help text and a range. This file does
not cover the settings themselves (config.py), YAML files (text/documents.py) or the names that
other programs use (text/foreign_names.py).
"""

import argparse
import contextlib
import dataclasses
import errno
import os
import re
import reprlib
import shutil
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple, NoReturn, get_args, get_origin

from text.foreign_names import explain_foreign_name, load_foreign_names, suggest_name
from text.printable import CONTROL, escape_invisible, make_printable

# ---- files that cannot be read or written

LEAST_FREE = 2**16  # a disk with fewer free bytes than this counts as full
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
    Add `path` to every OSError raised inside the block that names no file.

    The error of a failed write, for example to a full disk, does not name its file. Nor does a
    tokenizer's error, a bare Exception that ends in "(os error 28)" and becomes an OSError here.
    """
    try:
        yield
    except OSError as error:
        if error.errno is None or error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error
    except Exception as error:
        match = re.search(r"\(os error (\d+)\)$", str(error))
        if match is None:
            raise
        number = int(match[1])
        raise OSError(number, os.strerror(number), str(path)) from error


def os_error_line(error: OSError) -> str:
    """A system error's path and what is wrong there, such as "runs/x/lock: Permission denied"."""
    if not error.strerror:
        return str(error)
    path = error.filename if error.filename2 is None else error.filename2
    return error.strerror if path is None else f"{path}: {error.strerror}"


def line_of(error: BaseException) -> str:
    """An error's message. For a system error it also says what to do."""
    if not isinstance(error, OSError):
        return str(error)
    line = os_error_line(error)
    fix = FIXES.get(error.errno or 0)
    return f"{line}; {fix}" if fix else line


def refuse_unwritable_file(flag: str, path: Path) -> None:
    """
    Check that a command can write its results to a file, before it does the work.

    A new file is created and removed again. Nothing is written to an existing file, because it may
    hold results, and nothing to a pipe or terminal. A device such as /dev/full gets an empty line.

    Raises ValueError if the file cannot be written.
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
    """Raise ValueError if a folder's disk has fewer than `num_bytes` free for writing `path`."""
    free = shutil.disk_usage(folder).free
    if free < num_bytes:
        free_mb = free / 1e6
        needed_mb = num_bytes / 1e6
        raise ValueError(
            f"{flag} {path}: {free_mb:.3g} MB are free there, and at least {needed_mb:.3g} MB are "
            "needed; make room, or choose another disk"
        )


# ---- a command


def exit_with_error(message: object, most: int = 900) -> NoReturn:
    """
    End the process after a user's mistake, with one line on stderr and exit status 2.

    message: a text or an error. For a system error, the line names the file and says what to do.
    most: the maximum number of characters in the line; a longer line is shortened in the middle.
    """
    text = line_of(message) if isinstance(message, BaseException) else str(message)
    line = make_printable(" ".join(text.split("\n")))
    if len(line) >= most:
        line = f"{line[: most - 300]} \u2026 {line[-250:]}"
    print("error:", line, file=sys.stderr)
    sys.exit(2)


@contextlib.contextmanager
def report_mistakes() -> Iterator[None]:
    """
    End the process with one line if ValueError or OSError is raised inside the block.

    It also works as a decorator.
    """
    try:
        yield
    except (ValueError, OSError) as error:
        exit_with_error(error)


class Parser(argparse.ArgumentParser):
    """Parses a command's flags. Reports mistakes in one line, with the nearest valid flag."""

    def __init__(self, prog: str, description: str):
        super().__init__(prog=prog, description=description, allow_abbrev=False)
        self.register("type", None, _parse_text)
        self.register("type", Path, lambda value: Path(_parse_text(value)))

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        words = list(sys.argv[1:] if args is None else args)
        for place, word in enumerate(words):
            if word.endswith("=--"):  # Python 3.11 reads this as an empty list
                self.error(f"{word}: -- is no value")
            name, equals, value = word.partition("=")
            if name.startswith("--"):
                flag = flag_of(name[2:])  # TRL's flags have underscores
                if flag in self._option_string_actions:
                    words[place] = flag + equals + value
        return super().parse_known_args(words, namespace)

    def error(self, message: str) -> NoReturn:
        words = message.partition("unrecognized arguments: ")[2].split()
        if words:
            # long enough for every flag of a TRL script
            exit_with_error(self._explain_unknown_flags(words), most=6000)
        message = message.replace("invalid int value:", "not a whole number:")
        message = message.replace("invalid float value:", "not a number:")
        exit_with_error(message.removeprefix("argument "))

    def _explain_unknown_flags(self, words: list[str]) -> str:
        """Advice on each unknown flag among the words that could not be parsed."""
        valid_flags = [flag for action in self._actions for flag in action.option_strings]
        unknown = [word.partition("=")[0][:80] for word in words if word.startswith("--")]
        if not unknown:
            unknown = [words[0][:80]]
        sentences = []
        for flag in unknown:
            advice = suggest_name(flag, valid_flags) or "--help lists them"
            sentences.append(f"{flag} is no flag of {self.prog}; {advice}")
        return ". ".join(dict.fromkeys(sentences))


def _parse_text(value: str) -> str:
    """
    The text that was given to a flag.

    Refuses an empty text, because it comes from an unset shell variable and does not mean the
    default. Refuses control characters, because a terminal obeys them wherever the text is shown.
    """
    if not value.strip():
        raise argparse.ArgumentTypeError(f"{value!r} is empty; give a value or leave the flag out")
    if CONTROL.search(value):
        raise argparse.ArgumentTypeError(f"{value!r:.60} holds a control character; remove it")
    return value


# Bash passes "\n" as a backslash and an n. `\tan` and `\rho` are LaTeX; no stop text begins with
# \nabla.
_ESCAPE = re.compile(
    r"\\(\\[ntrxu]|n|[tr](?![A-Za-z])|x[0-7][0-9a-fA-F]|u(?![dD][89a-fA-F])[0-9a-fA-F]{4})"
)
_MAYBE_LATEX = re.compile(r"\\[tr](?=[A-Za-z])")
_CHARACTERS = {"n": ("\n", "a line end"), "t": ("\t", "a tab"), "r": ("\r", "a carriage return")}


def stop_text(word: str) -> str:
    r"""
    A stop text from a flag, with its escapes replaced. Prints a line on stderr for each escape.

    A shell passes "\n" as a backslash and an n, and the user means a line end. `\x0a` and
    `\u000a` are replaced too, and so are `\t` and `\r`, except before a letter, where they may
    begin a LaTeX command such as `\text`. `\\n` stands for the two characters themselves.
    """
    notes = {
        escape: "is kept as these two characters; $'...' in bash makes others"
        for escape in _MAYBE_LATEX.findall(word)
    }

    def read_escape(match: re.Match[str]) -> str:
        code = match[1]
        if code[0] == "\\":
            return code
        if code in _CHARACTERS:
            character, name = _CHARACTERS[code]
        else:
            number = int(code[1:], 16)
            character = chr(number)
            name = f"U+{number:04X}"
        notes[match[0]] = f"is read as {name}; write \\{match[0]} for the characters themselves"
        return character

    text = _ESCAPE.sub(read_escape, word)
    for escape, note in notes.items():
        print(escape_invisible(f"--stop {word:.60}: {escape} {note}"), file=sys.stderr)
    return text


def parse_seeds(text: str) -> int | list[int]:
    """The number of seeds that a text such as "3" gives, or the seeds that "1,2,5" lists."""
    numbers = []
    for part in text.removesuffix(",").split(","):
        is_number = part.isascii() and part.isdecimal()
        numbers.append(int(part) if is_number else -1)

    if "," not in text and 1 <= numbers[0] <= 1000:
        return numbers[0]
    if "," in text and -1 not in numbers and len(set(numbers)) == len(numbers):
        return numbers
    raise argparse.ArgumentTypeError(
        f"{text!r:.60} is no number of seeds up to 1000, nor a list of them as 1,2,5"
    )


def flag_of(name: str) -> str:
    """The flag for a setting's name: "--judge-mode" for "judge_mode"."""
    return "--" + name.replace("_", "-")


def explain_missing_run(folder: str | Path) -> str:
    """The reason why a directory is not a run, and what to do."""
    if any(Path(folder).glob("seed-*/config.yaml")):
        return (
            "it holds a run for each seed; name one, as seed-0, or repeat the command of --seeds "
            "to go on with them"
        )
    return "no config.yaml there; give the directory of a run"


def check_least(args: argparse.Namespace, **least: float) -> None:
    """
    Check that each flag has at least the given value and is below 2^64. None and "auto" pass.

    Raises ValueError that names the flag.
    """
    for name, low in least.items():
        value = getattr(args, name)
        if value not in (None, "auto") and not low <= value < 2**64:
            limit = f"at least {low}" if value < low else "finite and below 2^64"
            raise ValueError(f"{flag_of(name)} is {value}; it must be {limit}")


# ---- fields that are flags


def setting(default: Any, text: str, **metadata: Any) -> Any:
    """
    Declare a field with its help text.

    default: a value, or a function that makes it.
    metadata: optionally `low`, `high`, `parse` (a function for each of the flag's words),
        `metavar`, and the metadata that config.py describes.
    """
    metadata = {"help": text, **metadata}
    if callable(default):
        return dataclasses.field(default_factory=default, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


USER_FUNCTION = "FILE.py:function"  # the choice that stands for a user's own function


class Setting(NamedTuple):
    """A field in a group of settings. The key `judge_mode` has the flag `--judge-mode`."""

    key: str
    group: str  # the name of the group's field in `Config`
    title: str  # the group's title in --help
    field: dataclasses.Field[Any]
    used_by: str | None = None  # the kind of runs that use it; None: all
    later: bool = False  # whether a resumed run may change it

    @property
    def kind(self) -> Any:
        """The type without None: `list` or `dict` for several values, `str` for choices."""
        origin = get_origin(self.field.type)
        args = get_args(self.field.type)
        if type(None) in args:
            return args[0]
        if origin is Literal:
            return str
        return origin or self.field.type

    @property
    def choices(self) -> tuple[str, ...]:
        """The allowed words, with USER_FUNCTION if a function is allowed; () if any text is."""
        kind = get_args(self.field.type)[0] if self.kind is list else self.field.type
        if get_origin(kind) is not Literal:
            return ()
        words = get_args(kind)
        return (*words, USER_FUNCTION) if self.field.metadata.get("function") else words

    @property
    def is_automatic(self) -> bool:
        """Whether `auto` stands for None: the value is decided later."""
        return self.field.type == (int | None)

    @property
    def default(self) -> Any:
        make = self.field.default_factory
        return self.field.default if make is dataclasses.MISSING else make()

    @property
    def shown_default(self) -> str:
        """The default as a user would write it; "" if there is nothing to write."""
        default = self.default
        if self.is_automatic and default is None:
            return "auto"
        if self.is_automatic or self.kind is bool:
            return "on" if default else "off"
        if self.kind in (list, dict):
            return " ".join(default or ())
        return "" if default is None else str(default)


def add_flags(
    parser: argparse.ArgumentParser, settings: Iterable[Setting], everything: bool = True
) -> None:
    """
    Add a flag for each setting, in groups. The value of a flag that is not given is None.

    everything: whether --help shows all flags.
    """
    groups: dict[str, Any] = {}
    for setting in settings:
        if setting.group not in groups:
            groups[setting.group] = parser.add_argument_group(setting.title)
        _add_flag(groups[setting.group], setting, everything)


def _add_flag(group: Any, setting: Setting, everything: bool) -> None:
    metadata = setting.field.metadata
    names = (setting.key, *metadata.get("also", ()))
    flags = [flag_of(name) for name in names]

    text = argparse.SUPPRESS
    if everything or metadata.get("first"):
        text = metadata["help"]
        default = setting.shown_default
        if default:
            text += f" (default: {default})"
        text = text.replace("%", "%%")

    if setting.kind is bool:
        switch = argparse.BooleanOptionalAction
        group.add_argument(*flags, dest=setting.key, default=None, help=text, action=switch)
        return

    metavar = metadata.get("metavar")
    if setting.choices and not metavar:
        metavar = "{" + ",".join(setting.choices) + "}"
    group.add_argument(
        *flags,
        dest=setting.key,
        default=None,
        help=text,
        type=metadata.get("parse"),
        metavar=metavar,
        nargs="+" if setting.kind in (list, dict) else None,
    )


KIND_NAMES = {
    int: "a whole number",
    float: "a finite number",
    str: "a text",
    bool: "true or false",
    list: "a list of texts",
    dict: "finite numbers by name, as correct=1,rubric=0.5",
}


def parse_setting(setting: Setting, value: Any) -> Any:
    """
    Convert a flag's text, a YAML value or an argument to the setting's type, and check it.

    Words from TRL are translated, and where a list is needed a single text counts as a list of one.

    Raises ValueError that names the flag if the value has the wrong type, is out of range or is not
    among the choices.
    """
    is_optional = type(None) in get_args(setting.field.type)
    if is_optional and (value is None or (setting.is_automatic and value == "auto")):
        return None

    kind = setting.kind
    try:
        if kind is list:
            parsed = _parse_list(setting.key, value)
        else:
            parsed = _convert(kind, _from_trl_value(setting.key, value))
    except (ValueError, TypeError, AttributeError, OverflowError) as error:
        raise _value_error(setting, value, KIND_NAMES[kind]) from error

    if kind is list:
        for text in parsed:
            _check_text(setting, text, value)
    elif kind is str:
        _check_text(setting, parsed, value)
    _check_range(setting, parsed)
    return parsed


def _parse_list(key: str, value: Any) -> list[Any]:
    values = [value] if isinstance(value, str) else value
    translated = [_from_trl_value(key, item) for item in _convert(list, values)]
    return [item for item in translated if item is not None]


def _check_text(setting: Setting, text: Any, value: Any) -> None:
    """Raise ValueError if `text` is no str, holds control characters or is no valid choice."""
    if not isinstance(text, str):
        raise _value_error(setting, value, KIND_NAMES[setting.kind])
    if CONTROL.search(text):
        raise ValueError(
            f"{flag_of(setting.key)} is {text!r:.60}; it must hold no control characters"
        )
    choices = setting.choices
    is_function = USER_FUNCTION in choices and ":" in text
    if choices and text not in choices and not is_function:
        words = ", ".join(choices)
        raise _value_error(setting, text, f"one of {words}")


def _check_range(setting: Setting, value: Any) -> None:
    """Raise ValueError if a value is below `low` or above `high`, for an int 2^31 by default."""
    low = setting.field.metadata.get("low")
    high = setting.field.metadata.get("high", 2**31 if setting.kind is int else None)
    if low is not None and value < low:
        raise _value_error(setting, value, f"at least {low}")
    if high is not None and value > high:
        raise _value_error(setting, value, f"at most {high}")


def _value_error(setting: Setting, value: Any, must_be: str) -> ValueError:
    """The error about a value, with an explanation if the value is one that TRL uses."""
    message = f"{flag_of(setting.key)} is {reprlib.repr(value)}; it must be {must_be}"
    trl_value = f"{setting.key} {value}".lower()
    row = load_foreign_names()["values"].get(trl_value)
    if row:
        explanation = explain_foreign_name(f"TRL's {trl_value}", *row)
        message += f"; {explanation}"
    return ValueError(message)


def _convert(kind: Any, value: Any) -> Any:
    """
    A value, which may be given as text, converted to a type. Bools and infinities are not numbers.

    Raises ValueError if the value does not have the type.
    """
    if kind is dict:
        return _convert_weights(value)

    is_number_text = isinstance(value, str) and kind in (int, float)
    converted = kind(value) if is_number_text else value
    is_whole_float = kind is float and type(converted) is int
    if type(converted) is not kind and not is_whole_float:
        raise ValueError
    if kind is float and not abs(converted) < 1e300:  # also refuses nan and huge integers
        raise ValueError
    return converted


def _convert_weights(value: Any) -> dict[str, float]:
    """Numbers by name, from a dictionary, a text such as `a=1,b=2`, or a list of such texts."""
    if isinstance(value, dict):
        pairs = list(value.items())
    else:
        words = value if isinstance(value, str) else ",".join(value)
        pairs = [part.partition("=")[::2] for part in words.split(",")]
    return {name.strip(): _convert(float, number) for name, number in pairs}


def _from_trl_value(key: str, value: Any) -> Any:
    """The value, translated if the table lists it as TRL's; None if it is our default anyway."""
    row = load_foreign_names()["values"].get(f"{key} {str(value).lower()}")
    if row is None:
        return value
    kind, advice = row
    if kind == "not needed":
        return None
    replacement = re.match("`--[a-z-]+ ([a-z]+)`", advice)
    return replacement[1] if kind == "renamed" and replacement else value
