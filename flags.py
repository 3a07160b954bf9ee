"""
Parses the flags of commands, and reports a user's mistake in a single line.

A setting is a dataclass field that the function `setting` declares. The field's metadata contain
the help text and the allowed range.
The settings are in config.py. text/documents.py reads YAML files, and text/foreign_names.py
translates names from TRL.
"""

import argparse
import contextlib
import dataclasses
import errno
import itertools
import os
import re
import reprlib
import shutil
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple, NoReturn, get_args, get_origin

from text.foreign_names import explain_foreign_name, hint_on_unknown_name, load_foreign_names
from text.printable import CONTROL, escape_and_redact_for_printing, escape_invisible
from text.wrapping import wrap_for_terminal

# ---- files that cannot be read or written

MIN_FREE_BYTES = 2**16  # a disk with fewer free bytes than this counts as full
FULL = (errno.ENOSPC, errno.EDQUOT)
FIXES = {  # what the user can do about an OSError, by error number
    **dict.fromkeys(FULL, "make room there, or choose another disk"),
    **dict.fromkeys((errno.EACCES, errno.EPERM), "change its permissions, or choose another path"),
    errno.EROFS: "choose another path",
    errno.EFBIG: "choose a disk that allows larger files",
}


@contextlib.contextmanager
def add_path_to_os_errors(path: str | Path) -> Iterator[None]:
    """
    Add `path` to each OSError that is raised inside the block and does not name a file.

    For example, an error from writing to a full disk names no file. The tokenizers library raises
    plain Exceptions whose messages end in, for example, "(os error 28)". Each of them is replaced
    by an OSError with this number and `path`.
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


def describe_os_error(error: OSError) -> str:
    """The path and the message of an OSError, such as "runs/x/lock: Permission denied"."""
    if not error.strerror:
        return str(error)
    path = error.filename if error.filename2 is None else error.filename2
    return error.strerror if path is None else f"{path}: {error.strerror}"


def message_with_advice(error: BaseException) -> str:
    """The message of an error. For an OSError, the path and advice on what to do are added."""
    if not isinstance(error, OSError):
        return str(error)
    line = describe_os_error(error)
    fix = FIXES.get(error.errno or 0)
    return f"{line}; {fix}" if fix else line


def refuse_unwritable_file(flag: str, path: Path) -> None:
    """
    Raise ValueError if a command will not be able to write its results to a file.

    To test this, a missing file is created and removed again, and an existing file is opened but
    not changed. Nothing is written to a pipe or a terminal. Other devices, such as /dev/full, get
    an empty line.

    flag: the flag that names the file, for the error message.
    """
    folder = path.absolute().parent
    if path.is_dir() or not folder.is_dir():
        raise ValueError(
            f"{flag} {path} is a directory, or is in a directory that does not exist; "
            "give the path of a file in an existing directory"
        )
    is_new = not os.path.lexists(path)
    try:
        if is_new or path.is_file():
            path.open("ab").close()
            refuse_full_disk(flag, path, folder, MIN_FREE_BYTES)
        elif not os.access(path, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        elif path.is_char_device():
            with add_path_to_os_errors(path), path.open("w") as device:
                if not device.isatty():
                    device.write("\n")
    except OSError as error:
        raise ValueError(
            f"{flag} {path} cannot be written: {message_with_advice(error)}"
        ) from error
    finally:
        if is_new:
            path.unlink(missing_ok=True)


def refuse_full_disk(flag: str, path: Path, folder: Path, needed_bytes: int) -> None:
    """Raise ValueError if the disk of a folder has fewer free bytes than writing `path` needs."""
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < needed_bytes:
        free_mb = free_bytes / 1e6
        needed_mb = needed_bytes / 1e6
        raise ValueError(
            f"{flag} {path} needs at least {needed_mb:.3g} MB, but the disk has only "
            f"{free_mb:.3g} MB free; make room, or choose another disk"
        )


# ---- a command


def exit_with_error(message: object, max_length: int = 900) -> NoReturn:
    """
    Print one line on stderr and end the process with exit status 2.

    In a terminal, the line is wrapped to the terminal's width.
    message: a text or an error. For an OSError, the line names the file and advises what to do.
    max_length: a line with more characters than this is shortened in the middle.
    """
    text = message_with_advice(message) if isinstance(message, BaseException) else str(message)
    line = escape_and_redact_for_printing(" ".join(text.split("\n")))
    if len(line) >= max_length:
        line = f"{line[: max_length - 300]} \u2026 {line[-250:]}"
    line = f"error: {line}"
    if sys.stderr is not None and sys.stderr.isatty():
        line = wrap_for_terminal(line, sys.stderr)
    print(line, file=sys.stderr)
    sys.exit(2)


@contextlib.contextmanager
def exit_on_mistakes() -> Iterator[None]:
    """
    If the block raises ValueError or OSError, print the error in one line and end the process.

    The context manager can also be used as a decorator.
    """
    try:
        yield
    except (ValueError, OSError) as error:
        exit_with_error(error)


class Parser(argparse.ArgumentParser):
    """A parser of flags that reports a mistake in one line and suggests the nearest valid flag."""

    def __init__(self, prog: str, description: str):
        super().__init__(prog=prog, description=description, allow_abbrev=False)
        self.register("type", None, _check_nonempty_printable_text)
        self.register("type", Path, lambda value: Path(_check_nonempty_printable_text(value)))

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse flags in the way of argparse, but also accept underscores in the names of flags."""
        words = list(sys.argv[1:] if args is None else args)
        for index, word in enumerate(words):
            if word.endswith("=--"):  # Python 3.11 would parse this word as an empty list
                self.error(f"{word}: the value must not be --")
            name, equals, value = word.partition("=")
            if name.startswith("--"):
                flag = flag_of(name[2:])  # flags of TRL contain underscores
                if flag in self._option_string_actions:
                    words[index] = flag + equals + value
        parsed = super().parse_known_args(words, namespace)
        self._print_repeated_flags(words)
        return parsed

    def _print_repeated_flags(self, words: list[str]) -> None:
        """Print a line for each flag that occurs with different values, as only the last counts."""
        values_by_flag: dict[str, list[str]] = {}
        for index, word in enumerate(words):
            flag, equals, value = word.partition("=")
            action = self._option_string_actions.get(flag)
            if isinstance(action, argparse._StoreAction):
                given = [value]
                if not equals:
                    given = words[index + 1 : index + 2]
                    if action.nargs is not None:
                        given = list(itertools.takewhile(_is_value, words[index + 1 :]))
                values_by_flag.setdefault(flag, []).append(" ".join(given))
        for flag, values in values_by_flag.items():
            if len(set(values)) > 1:
                line = f"{flag} is given {len(values)} times; only the last counts: {values[-1]}"
                print(escape_and_redact_for_printing(line), file=sys.stderr)

    def error(self, message: str) -> NoReturn:
        """Print one line about a mistake in the flags, and end the process."""
        words = message.partition("unrecognized arguments: ")[2].split()
        if words:
            # 6000 characters are enough to explain every flag of a TRL script
            exit_with_error(self._explain_unknown_flags(words), max_length=6000)
        message = message.replace("invalid int value:", "not a whole number:")
        message = message.replace("invalid float value:", "not a number:")
        exit_with_error(message.removeprefix("argument "))

    def _explain_unknown_flags(self, words: list[str]) -> str:
        """Return advice on each unknown flag in `words`, the words that argparse did not parse."""
        valid_flags = [flag for action in self._actions for flag in action.option_strings]
        unknown = [word.partition("=")[0][:80] for word in words if word.startswith("--")]
        if not unknown:
            unknown = [words[0][:80]]
        sentences = []
        for flag in unknown:
            advice = hint_on_unknown_name(flag, valid_flags) or "--help lists the valid flags"
            sentences.append(f"{flag} is not a flag of {self.prog}; {advice}")
        return ". ".join(dict.fromkeys(sentences))


def _is_value(word: str) -> bool:
    """Whether a word on the command line is the value of a flag, and not a flag."""
    return not word.startswith("--")


def _check_nonempty_printable_text(text: str) -> str:
    """
    Check the value of a flag, and return it unchanged.

    Raises ArgumentTypeError if the value is empty or contains a control character. An empty value
    usually comes from a shell variable that is not set. A control character would affect the
    terminal whenever the value is printed.
    """
    if not text.strip():
        raise argparse.ArgumentTypeError(f"{text!r} is empty; give a value, or leave out the flag")
    if CONTROL.search(text):
        raise argparse.ArgumentTypeError(
            f"{text!r:.60} contains a control character; remove the control character"
        )
    return text


# In Bash, "\n" is a backslash and the letter n. LaTeX has commands such as `\tan` and `\rho`, so \t
# and \r are escapes only if no letter follows. `\n` is always an escape.
_ESCAPE = re.compile(
    r"\\(\\[ntrxu]|n|[tr](?![A-Za-z])|x[0-7][0-9a-fA-F]|u(?![dD][89a-fA-F])[0-9a-fA-F]{4})"
)
_MAYBE_LATEX = re.compile(r"\\[tr](?=[A-Za-z])")
_CHARACTERS = {"n": ("\n", "a line break"), "t": ("\t", "a tab"), "r": ("\r", "a carriage return")}


def parse_stop_text_and_print_notes(word: str) -> str:
    r"""
    Return a stop text from a flag, with escapes such as `\n` replaced by the characters they mean.

    A shell passes "\n" as a backslash and the letter n, but the user means a line break. The other
    escapes are `\x0a`, `\u000a`, `\t` and `\r`. `\t` and `\r` are not replaced before a letter,
    because they may begin a LaTeX command such as `\text`. `\\n` is replaced by a backslash and the
    letter n.

    Prints a line on stderr about each escape that is replaced by a control or other character, and
    about each `\t` or `\r` that is left unchanged.
    """
    # an escape -> the rest of the line that is printed about the escape
    notes = {
        escape: "is left as two characters; to give a control character in Bash, write $'...'"
        for escape in _MAYBE_LATEX.findall(word)
    }

    def replace_and_note_escape(match: re.Match[str]) -> str:
        code = match[1]
        if code[0] == "\\":
            return code
        if code in _CHARACTERS:
            character, name = _CHARACTERS[code]
        else:
            number = int(code[1:], 16)
            character = chr(number)
            name = f"U+{number:04X}"
        notes[match[0]] = (
            f"is replaced by {name}; write \\{match[0]} if you mean a backslash and {code}"
        )
        return character

    text = _ESCAPE.sub(replace_and_note_escape, word)
    for escape, note in notes.items():
        print(escape_invisible(f"--stop {word:.60}: {escape} {note}"), file=sys.stderr)
    return text


def parse_seed_count_or_list(text: str) -> int | list[int]:
    """Return the number of seeds for a text such as "3", or a list of seeds for "1,2,5"."""
    numbers = []
    for part in text.removesuffix(",").split(","):
        is_number = part.isascii() and part.isdecimal()
        numbers.append(int(part) if is_number else -1)

    if "," not in text and 1 <= numbers[0] <= 1000:
        return numbers[0]
    if "," in text and -1 not in numbers and len(set(numbers)) == len(numbers):
        return numbers
    raise argparse.ArgumentTypeError(
        f"{text!r:.60} is neither a number of seeds, from 1 to 1000, nor a list of different seeds "
        "such as 1,2,5"
    )


def flag_of(name: str) -> str:
    """The flag for the name of a setting, such as "--judge-mode" for "judge_mode"."""
    return "--" + name.replace("_", "-")


def explain_missing_run(folder: str | Path) -> str:
    """Explain why a directory is not the directory of a run, and advise what to do."""
    if any(Path(folder).glob("seed-*/config.yaml")):
        return (
            "this directory contains a run for each seed; give the directory of one run, such as "
            "seed-0, or repeat the command with --seeds to continue all runs"
        )
    if not Path(folder).is_dir():
        return "there is no such directory; give the directory of a run"
    return "this directory contains no config.yaml; give the directory of a run"


def check_minimums(args: argparse.Namespace, **minimums: float) -> None:
    """
    Raise ValueError if the value of a flag is below its minimum, or is 2^64 or more.

    None and "auto" are always accepted.
    """
    for name, low in minimums.items():
        value = getattr(args, name)
        if value not in (None, "auto") and not low <= value < 2**64:
            limit = f"at least {low}" if value < low else "finite and below 2^64"
            raise ValueError(f"{flag_of(name)} is {value}; it must be {limit}")


# ---- dataclass fields that define flags


def setting(default: Any, help_text: str, **metadata: Any) -> Any:
    """
    Declare a dataclass field that defines a setting and its flag.

    default: the default value, or a function that returns the default value.
    metadata: optionally, `low` and `high`, the limits of the allowed range; `parse`, a function
        that parses each word after the flag; `metavar`, the name of the value in --help; and the
        metadata that config.py documents.
    """
    metadata = {"help": help_text, **metadata}
    if callable(default):
        return dataclasses.field(default_factory=default, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


USER_FUNCTION = "FILE.py:function"  # how --help shows that a setting accepts a user's function


class Setting(NamedTuple):
    """A setting of a run: its name, its group, and the dataclass field that declares it."""

    key: str  # the name of the setting, such as `judge_mode` for the flag --judge-mode
    group: str  # the name of the group in `Config`
    title: str  # the title of the group in --help
    field: dataclasses.Field[Any]
    used_by: str | None = None  # the kind of runs that use the setting; None: all runs
    later: bool = False  # whether a resumed run may change the setting

    @property
    def value_type(self) -> Any:
        """The type of a value that is not None: `list`, `dict`, or a type such as `str`."""
        origin = get_origin(self.field.type)
        args = get_args(self.field.type)
        if type(None) in args:
            return args[0]
        if origin is Literal:
            return str
        return origin or self.field.type

    @property
    def choices(self) -> tuple[str, ...]:
        """
        The values that are allowed, including USER_FUNCTION if the user may give a function.

        Returns () if the setting has no list of allowed values.
        """
        item_type = get_args(self.field.type)[0] if self.value_type is list else self.field.type
        if get_origin(item_type) is not Literal:
            return ()
        words = get_args(item_type)
        return (*words, USER_FUNCTION) if self.field.metadata.get("function") else words

    @property
    def accepts_auto(self) -> bool:
        """Whether the value may be `auto`. It is stored as None, and Gwen chooses a value later."""
        return self.field.type == (int | None)

    @property
    def default(self) -> Any:
        """The default value of the setting."""
        make = self.field.default_factory
        return self.field.default if make is dataclasses.MISSING else make()

    @property
    def default_as_text(self) -> str:
        """The default value as text for --help; "" if the default is empty."""
        default = self.default
        if self.accepts_auto and default is None:
            return "auto"
        if self.accepts_auto or self.value_type is bool:
            return "on" if default else "off"
        if self.value_type in (list, dict):
            return " ".join(default or ())
        return "" if default is None else str(default)


def add_flags(
    parser: argparse.ArgumentParser, settings: Iterable[Setting], show_all: bool = True
) -> None:
    """
    Add a flag to the parser for each setting. If a flag is not given, its value is None.

    show_all: whether --help shows all flags, or only those whose metadata have `first`.
    """
    groups: dict[str, Any] = {}
    for setting in settings:
        if setting.group not in groups:
            groups[setting.group] = parser.add_argument_group(setting.title)
        _add_flag(groups[setting.group], setting, show_all)


def _add_flag(group: Any, setting: Setting, show_all: bool) -> None:
    metadata = setting.field.metadata
    names = (setting.key, *metadata.get("also", ()))
    flags = [flag_of(name) for name in names]

    text = argparse.SUPPRESS
    if show_all or metadata.get("first"):
        text = metadata["help"]
        default = setting.default_as_text
        if default:
            text += f" (default: {default})"
        text = text.replace("%", "%%")

    if setting.value_type is bool:
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
        nargs="+" if setting.value_type in (list, dict) else None,
    )


TYPE_NAMES = {
    int: "a whole number",
    float: "a finite number",
    str: "a string",
    bool: "true or false",
    list: "a list of strings",
    dict: "a list of names with finite numbers, such as correct=1,rubric=0.5",
}


def parse_setting(setting: Setting, value: Any) -> Any:
    """
    Convert the value of a setting to the type of the setting, and check the value.

    Values from TRL are translated. If the type is `list`, a string becomes a list of one string.

    value: the text of a flag, a value from YAML, or an argument of a Python function.

    Raises ValueError if the value has the wrong type, is out of range or is not among the choices.
    """
    is_optional = type(None) in get_args(setting.field.type)
    if is_optional and (value is None or (setting.accepts_auto and value == "auto")):
        return None

    value_type = setting.value_type
    try:
        if value_type is list:
            parsed = _make_list_and_translate_trl(setting.key, value)
        else:
            parsed = _convert_strictly(value_type, _translate_trl_value(setting.key, value))
    except (ValueError, TypeError, AttributeError, OverflowError) as error:
        raise _make_value_error(setting, value, TYPE_NAMES[value_type]) from error

    if value_type is list:
        for text in parsed:
            _check_text_or_choice(setting, text, value)
    elif value_type is str:
        _check_text_or_choice(setting, parsed, value)
    _check_range(setting, parsed)
    return parsed


def _make_list_and_translate_trl(key: str, value: Any) -> list[Any]:
    """Return the value of a list setting as a list in which TRL values are translated."""
    values = [value] if isinstance(value, str) else value
    translated = [_translate_trl_value(key, item) for item in _convert_strictly(list, values)]
    return [item for item in translated if item is not None]


def _check_text_or_choice(setting: Setting, text: Any, whole_value: Any) -> None:
    """
    Raise ValueError if `text` is not a str, has a control character, or is not an allowed choice.

    whole_value: the value that the user gave, of which `text` may be one item.
    """
    if not isinstance(text, str):
        raise _make_value_error(setting, whole_value, TYPE_NAMES[setting.value_type])
    if CONTROL.search(text):
        raise ValueError(
            f"{flag_of(setting.key)} is {text!r:.60}; it must not contain control characters"
        )
    choices = setting.choices
    is_function = USER_FUNCTION in choices and ":" in text
    if choices and text not in choices and not is_function:
        words = ", ".join(choices)
        raise _make_value_error(setting, text, f"one of {words}")


def _check_range(setting: Setting, value: Any) -> None:
    """
    Raise ValueError if the value of a setting is out of range.

    The metadata contain the range as `low` and `high`. For an int, the default of `high` is 2^31.
    """
    low = setting.field.metadata.get("low")
    high = setting.field.metadata.get("high", 2**31 if setting.value_type is int else None)
    if low is not None and value < low:
        raise _make_value_error(setting, value, f"at least {low}")
    if high is not None and value > high:
        raise _make_value_error(setting, value, f"at most {high}")


def _make_value_error(setting: Setting, value: Any, must_be: str) -> ValueError:
    """
    Return an error that names a setting and its value, and says what the value must be.

    If TRL uses the value, the error also says what to use instead.
    """
    message = f"{flag_of(setting.key)} is {reprlib.repr(value)}; it must be {must_be}"
    trl_value = f"{setting.key} {value}".lower()
    row = load_foreign_names()["values"].get(trl_value)
    if row:
        explanation = explain_foreign_name(f"TRL's {trl_value}", *row)
        message += f"; {explanation}"
    return ValueError(message)


def _convert_strictly(target_type: Any, value: Any) -> Any:
    """
    Return the value if it has the target type. Text for a number or a dict is converted first.

    An int also counts as a float. A bool, nan or an infinite value does not count as a number.

    Raises ValueError if the value does not have the target type.
    """
    if target_type is dict:
        return _parse_numbers_by_name(value)

    is_number_text = isinstance(value, str) and target_type in (int, float)
    converted = target_type(value) if is_number_text else value
    is_whole_float = target_type is float and type(converted) is int
    if type(converted) is not target_type and not is_whole_float:
        raise ValueError
    if target_type is float and not abs(converted) < 1e300:  # also refuses nan and huge integers
        raise ValueError
    return converted


def _parse_numbers_by_name(value: Any) -> dict[str, float]:
    """Return numbers by name, from a dictionary, a text such as `a=1,b=2`, or a list of texts."""
    if isinstance(value, dict):
        pairs = list(value.items())
    else:
        words = value if isinstance(value, str) else ",".join(value)
        pairs = [part.partition("=")[::2] for part in words.split(",")]
    return {name.strip(): _convert_strictly(float, number) for name, number in pairs}


def _translate_trl_value(key: str, value: Any) -> Any:
    """
    Return Gwen's value for a value that TRL uses. Other values are returned unchanged.

    Returns None if the TRL value means what Gwen does by default.
    """
    row = load_foreign_names()["values"].get(f"{key} {str(value).lower()}")
    if row is None:
        return value
    kind, advice = row
    if kind == "not needed":
        return None
    replacement = re.match("`--[a-z-]+ ([a-z]+)`", advice)
    return replacement[1] if kind == "renamed" and replacement else value
