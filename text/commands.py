"""
Builds the commands that messages show.

In a checkout of the code, such a command is `uv run train.py`. In an installed Gwen, it is
`gwen train`. An extra is a named group of optional packages. settings/sources.py chooses the extras
that the settings of a run need.
"""

import importlib.metadata
import json
import shlex
import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

HOME = Path(__file__).parents[1]  # the checkout, or the directory of the installed packages

# the commands of an installed Gwen, each with the program that it runs and the program's first flag
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

# `uv tool install` does not read the overrides in pyproject.toml, so this file repeats them.
OVERRIDES_FILE = "deploy/overrides.txt"


def is_run_from_checkout() -> bool:
    """
    Whether the user starts the programs of a checkout, as in `uv run train.py`.

    The result is False for the installed program `gwen`, even if it was installed with `--editable`
    and therefore runs the code of a checkout.
    """
    return (HOME / "pyproject.toml").is_file() and not _is_editable_installation()


def _is_editable_installation() -> bool:
    """Whether this Python environment has a program `gwen` that runs the code of this checkout."""
    try:
        text = importlib.metadata.distribution("gwen").read_text("direct_url.json")
    except importlib.metadata.PackageNotFoundError:
        return False
    origin = json.loads(text or "{}")
    is_editable = origin.get("dir_info", {}).get("editable", False)
    return bool(is_editable) and origin.get("url") == HOME.as_uri()


def command_prefix(program: str = "train.py", extras: Iterable[str] = ()) -> str:
    """
    The beginning of a command that runs one of Gwen's programs; the user adds flags to it.

    In a checkout, the command consists of `uv run`, a flag for each extra, and the program. If the
    checkout is not the working directory, the command names the checkout and the program by
    absolute paths. An installed Gwen has commands such as `gwen train` instead.

    program: a value of SUBCOMMANDS, which is a program or a program with its first flag, such as
    "export.py --fuse".
    """
    if not is_run_from_checkout():
        subcommands = {command: word for word, command in SUBCOMMANDS.items()}
        return f"gwen {subcommands[program]}"

    file, *first_flags = program.split()
    words = ["uv run", *(f"--extra {extra}" for extra in extras)]
    if not Path(file).is_file():
        words.append(f"--project {shlex.quote(str(HOME))}")
        file = shlex.quote(str(HOME / file))
    return " ".join([*words, file, *first_flags])


def advice_to_install_extra(extra: str) -> str:
    """
    Advice for a user who has not installed the packages of an extra.

    An extra is a named group of optional packages. The advice depends on how the program was
    started. If Gwen is installed, the advised command keeps the extras that are already installed.
    """
    if is_run_from_checkout():
        return f"begin the command with: uv run --extra {extra}"

    requirement = _read_uv_tool_requirement()
    flag = "--editable " if "editable" in requirement else ""
    checkout = requirement.get("editable") or requirement.get("directory")
    extras = list(dict.fromkeys([*requirement.get("extras", ()), extra]))
    if checkout is None:
        return (
            "go to the checkout of Gwen and install it again with: "
            f"uv tool install --overrides {OVERRIDES_FILE} '.[{extra}]'"
        )
    overrides = shlex.quote(str(Path(checkout) / OVERRIDES_FILE))
    target = shlex.quote(f"{checkout}[{','.join(extras)}]")
    return f"install Gwen again with: uv tool install --overrides {overrides} {flag}{target}"


def _read_uv_tool_requirement() -> dict[str, Any]:
    """The requirement that `uv tool install` recorded for `gwen`; empty if there is none."""
    receipt = Path(sys.prefix) / "uv-receipt.toml"
    if not receipt.is_file():
        return {}
    requirements = tomllib.loads(receipt.read_text(encoding="utf-8"))["tool"]["requirements"]
    return next((entry for entry in requirements if entry["name"] == "gwen"), {})
