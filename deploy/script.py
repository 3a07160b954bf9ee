"""
Runs the commands of an installed Gwen, such as `gwen train` and `gwen chat`.

In a checkout, the same commands are `uv run train.py`, `uv run chat.py`, and so on. This file maps
the first argument of `gwen` to the file of a command, and runs that file.
"""

import runpy
import sys
from pathlib import Path

from flags import exit_with_error
from machine.output import guard_output
from text.commands import SUBCOMMANDS
from text.foreign_names import hint_on_unknown_name


@guard_output()
def print_gwen_subcommands() -> None:
    width = max(len(word) for word in SUBCOMMANDS)
    for word, command in SUBCOMMANDS.items():
        print(f"gwen {word:{width}}  {command}")
    print("for the flags of a command: gwen COMMAND --help")
    print("runs are written to runs/ in the current directory")


def main() -> None:
    word, *flags = sys.argv[1:] or ["--help"]
    if word in ("-h", "--help"):
        print_gwen_subcommands()
        return
    if word not in SUBCOMMANDS:
        fix = hint_on_unknown_name(word, SUBCOMMANDS) or "gwen --help lists the commands"
        exit_with_error(f"{word!r:.60} is not a command; {fix}")
    file, *first_flags = SUBCOMMANDS[word].split()
    path = Path(__file__).parents[1] / file
    sys.argv = [str(path), *first_flags, *flags]
    runpy.run_path(str(path), run_name="__main__")
