"""
The commands of an installed Gwen: `gwen train`, `gwen chat`, …

In a checkout the same commands are `uv run train.py`, `uv run chat.py`, and so on. This file maps
each word to its command's file and runs that. It does not contain the commands themselves.
"""

import runpy
import sys
from pathlib import Path

from flags import exit_with_error
from machine.output import guard_output
from text.foreign_names import suggest_name

COMMANDS = {
    "train": "train.py",
    "evaluate": "evaluate.py",
    "sample": "chat.py",
    "chat": "chat.py --chat",
    "report": "report.py",
    "fuse": "export.py --fuse",
    "export": "export.py --export",
    "preflight": "preflight.py",
    "judge": "judge.py",
    "doctor": "gwen.py --doctor",
}


@guard_output()
def show_help() -> None:
    width = max(len(word) for word in COMMANDS)
    for word, command in COMMANDS.items():
        print(f"gwen {word:{width}}  {command}")
    print("gwen WORD --help says more; runs go to runs/ in the current directory")


def main() -> None:
    word, *flags = sys.argv[1:] or ["--help"]
    if word in ("-h", "--help"):
        show_help()
        return
    if word not in COMMANDS:
        fix = suggest_name(word, COMMANDS) or "gwen --help lists them"
        exit_with_error(f"{word!r:.60} is no command; {fix}")
    file, *first_flags = COMMANDS[word].split()
    path = Path(__file__).parents[1] / file
    sys.argv = [str(path), *first_flags, *flags]
    runpy.run_path(str(path), run_name="__main__")
