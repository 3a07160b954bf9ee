"""
Builds the commands in messages: `uv run train.py` in a checkout, `gwen train` if installed.

The extras that the settings of a run need are chosen in settings/sources.py.
"""

import shlex
from collections.abc import Iterable
from pathlib import Path

HOME = Path(__file__).parents[1]  # the checkout, or the directory of the installed packages

# The commands of an installed Gwen, each with the program and the flag that it stands for.
SUBCOMMANDS = {
    "train": "train.py",
    "evaluate": "evaluate.py",
    "sample": "chat.py",
    "chat": "chat.py --chat",
    "report": "report.py",
    "fuse": "export.py --fuse",
    "export": "export.py --export",
    "preflight": "preflight.py",
    "judge": "judge.py",
    "doctor": "doctor.py",
}


def is_checkout() -> bool:
    """Whether this code is in a checkout, and not in an installed package."""
    return (HOME / "pyproject.toml").is_file()


def command_prefix(program: str = "train.py", extras: Iterable[str] = ()) -> str:
    """
    The beginning of a command that runs one of Gwen's programs; the user adds flags to it.

    In a checkout, the command is `uv run`, the extras and the program. If the checkout is not the
    working directory, the command names the checkout and the program by absolute paths. An
    installed Gwen has commands such as `gwen train` instead.

    program: a program and its first flag as in SUBCOMMANDS, such as "export.py --fuse".
    """
    if not is_checkout():
        subcommands = {command: word for word, command in SUBCOMMANDS.items()}
        return f"gwen {subcommands[program]}"

    file, *first_flags = program.split()
    words = ["uv run", *(f"--extra {extra}" for extra in extras)]
    if not Path(file).is_file():
        words.append(f"--project {shlex.quote(str(HOME))}")
        file = shlex.quote(str(HOME / file))
    return " ".join([*words, file, *first_flags])


def advice_to_install_extra(extra: str) -> str:
    """Advice for a user who has not installed the packages of an extra."""
    if is_checkout():
        return f"begin the command with: uv run --extra {extra}"
    return f"go to the checkout of Gwen and install it again: uv tool install '.[{extra}]'"
