"""
Reads and writes the arguments in a specification such as `FILE.py:function(weight=0.5)`.

rewards/functions.py imports the function that a specification names.
"""

import ast
import functools
import re
from typing import Any, NamedTuple

WITH_ARGUMENTS = re.compile(r"(.*?:\w+)(\(.*\))", re.DOTALL)


class CallArguments(NamedTuple):
    """The arguments that a specification gives to its function."""

    positional: tuple[Any, ...] = ()
    by_name: dict[str, Any] = {}  # noqa: RUF012  (never changed in place)


def split_off_arguments(spec: str) -> tuple[str, str]:
    """
    Split `FILE.py:function(weight=0.5)` into `FILE.py:function` and `(weight=0.5)`.

    The second part is "" if the specification has no arguments.
    """
    match = WITH_ARGUMENTS.fullmatch(spec)
    if match is None:
        return spec, ""
    return match[1], match[2]


def parse_arguments(text: str) -> CallArguments:
    """
    Parse the arguments `(0.5, name="a")`. The text "" stands for no arguments.

    Raises ValueError if the text is not a list of arguments, or if a value is not a Python literal.
    """
    if not text:
        return CallArguments()
    try:
        call = ast.parse(f"f{text}", mode="eval").body
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
            raise ValueError
        positional = [ast.literal_eval(value) for value in call.args]
        by_name = {
            str(word.arg): ast.literal_eval(word.value) for word in call.keywords if word.arg
        }
        if len(by_name) < len(call.keywords):  # **names
            raise ValueError
    except (SyntaxError, ValueError, TypeError) as error:
        raise ValueError(
            f"{text} is not a list of arguments; write literal values, as in (weight=0.5)"
        ) from error
    return CallArguments(tuple(positional), by_name)


def format_arguments(partial: functools.partial[Any]) -> str | None:
    """
    Format the arguments of a partial function so that `parse_arguments` returns them unchanged.

    Returns None if a value, such as an array or a function, cannot be written as a literal.
    """
    words = [repr(value) for value in partial.args]
    words += [f"{name}={value!r}" for name, value in partial.keywords.items()]
    text = f"({', '.join(words)})"
    try:
        arguments = parse_arguments(text)
        is_equal = arguments == (partial.args, partial.keywords)
        return text if bool(is_equal) else None
    except ValueError:
        return None
