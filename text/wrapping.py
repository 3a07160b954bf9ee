"""
Wraps lines to the width of the terminal, so that figures and commands can still be read and copied.

reporting/terminal_table.py lays out tables.
"""

import re
import shutil
import sys
import textwrap
from typing import Any

# Patterns for the parts of a line that must not be broken.
FIGURE = r"[^| ][^|]*"  # one figure in a line whose figures are separated by " | "

# a command to copy, or a flag and the first character of its value
COMMAND = r"(?<![\w/.-])(?:uv run|gwen [a-z]+|ollama create|mkdir -p|hf upload) .*?(?=[;,] |$)"
COMMAND_OR_FLAG = rf"{COMMAND}|--[a-z-]+ \S"
# a word of a command; white space in quotes belongs to the word
SHELL_WORD = r"""(?:[^\s'"]|'[^']*'|"[^"]*")+"""


def terminal_width(file: Any = None) -> int | None:
    """The number of columns of a terminal; None if `file`, by default stdout, is no terminal."""
    is_terminal = (file or sys.stdout).isatty()
    return shutil.get_terminal_size().columns if is_terminal else None


def wrap_for_terminal(text: str, file: Any = None) -> str:
    """
    The text, with long lines wrapped if `file` (by default stdout) is a terminal.

    Lines are broken at spaces, but not inside a figure or between a flag and its value. A command
    that the user may copy stays in one line if it fits. Otherwise, each of its lines but the last
    ends with a backslash, so that the copied command still works.
    """
    width = terminal_width(file)
    if width is None:
        return text
    lines = []
    for line in text.split("\n"):
        lines.append(line if len(line) <= width else _wrap_line(line, width))
    return "\n".join(lines)


def print_wrapped(text: str, file: Any = None) -> None:
    """Prints text with `wrap_for_terminal`, and flushes the file."""
    print(wrap_for_terminal(text, file), file=file, flush=True)


def _wrap_line(line: str, width: int) -> str:
    unbreakable = FIGURE if " | " in line else COMMAND_OR_FLAG
    margin = " " * (len(line) - len(line.lstrip()))
    protected = re.sub(unbreakable, _make_spaces_non_breaking, line.lstrip())
    wrapped = textwrap.wrap(
        protected,
        width,
        initial_indent=margin,
        subsequent_indent=margin + "  ",
        break_on_hyphens=False,
        break_long_words=False,
    )
    lines = []
    for part in wrapped:
        part = part.replace("\xa0", " ")
        lines.append(part if len(part) <= width else _break_command(part, width))
    return "\n".join(lines)


def _break_command(line: str, width: int) -> str:
    """A line with a command, broken between its words; any other line is returned unchanged."""
    command = line.strip()
    words = re.findall(SHELL_WORD, command)
    if not re.match(COMMAND, command) or " ".join(words) != command:
        return line
    margin = line[: len(line) - len(line.lstrip())]
    lines = [margin + words[0]]
    for place, word in enumerate(words[1:], 1):
        is_flag = word.startswith("-") and place + 1 < len(words)
        has_value = is_flag and not words[place + 1].startswith("-")
        text = f"{word} {words[place + 1]}" if has_value else word
        fits = len(f"{lines[-1]} {text} \\") <= width
        is_value = words[place - 1].startswith("-") and not word.startswith("-")
        if fits or is_value:  # a value stays on the line of its flag
            lines[-1] += f" {word}"
        else:
            lines.append(f"{margin}    {word}")
    return " \\\n".join(lines)


def _make_spaces_non_breaking(match: re.Match[str]) -> str:
    """The matched text, with its spaces replaced by non-breaking spaces."""
    return match[0].replace(" ", "\xa0")
