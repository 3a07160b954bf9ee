"""
Hatchling's hook: it writes the commit of a wheel into commit.txt of the room machine/.

The file says "outside git" if git tells no commit.
"""

import subprocess
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class CustomBuildHook(BuildHookInterface):  # type: ignore[type-arg]
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        commit = commit_of(Path(self.root)) or "outside git"
        written = Path(tempfile.mkdtemp(), "commit.txt")
        written.write_text(commit)
        build_data["force_include"][str(written)] = str(Path("machine", "commit.txt"))


def commit_of(checkout: Path) -> str:
    """
    The commit of a checkout; "" if git tells none.

    git refuses a checkout of another user ("dubious ownership"), which is no reason not to install
    it. Without .git this does not ask git, which would tell the commit of a repository around this
    folder.
    """
    if not (checkout / ".git").exists():
        return ""
    command = ["git", "rev-parse", "HEAD"]
    try:
        answer = subprocess.run(command, cwd=checkout, capture_output=True, text=True, check=False)
    except OSError:  # git is not installed
        return ""
    return answer.stdout.strip() if answer.returncode == 0 else ""
