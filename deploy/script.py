"""
`gwen train`, `gwen sample`, …: the commands of an installed Gwen. In a checkout the same are `uv run train.py`, ….

Each word runs the file of a command as if it had been named; left out: what they do.
"""

import runpy
import sys
from pathlib import Path

from flags import exit_with_error, suggest_name
from machine.output import guard_output

COMMANDS = {
    "train": "train.py",
    "evaluate": "evaluate.py",
    "sample": "sampler.py",
    "chat": "sampler.py --chat",
    "report": "report.py",
    "fuse": "lora.py --fuse",
    "export": "lora.py --export",
    "preflight": "preflight.py",
    "judge": "judge.py",
    "doctor": "gwen.py --doctor",
}


@guard_output()
def show_help() -> None:
    width = max(map(len, COMMANDS))
    for name, file in COMMANDS.items():
        print(f"gwen {name:{width}}  {file}")
    print("gwen WORD --help says more; runs go to runs/ in the current directory")


def main() -> None:
    word, *flags = sys.argv[1:] or ["--help"]
    if word in ("-h", "--help"):
        show_help()
        return
    if word not in COMMANDS:
        exit_with_error(
            f"{word!r:.60} is no command; {suggest_name(word, COMMANDS) or 'gwen --help lists them'}"
        )
    file, *own = COMMANDS[word].split()
    sys.argv = [str(Path(__file__).parents[1] / file), *own, *flags]
    runpy.run_path(sys.argv[0], run_name="__main__")
