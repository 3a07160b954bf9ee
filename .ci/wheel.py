"""
A build hook for Hatchling, which adds the file commit.txt to the directory machine/ of a wheel.

The file contains the git commit, or "outside git" if the commit is unknown.
"""

import subprocess
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class AddCommitFileHook(BuildHookInterface):  # type: ignore[type-arg]
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        commit = git_commit_or_empty(Path(self.root)) or "outside git"
        commit_file = Path(tempfile.mkdtemp(), "commit.txt")
        commit_file.write_text(commit)
        build_data["force_include"][str(commit_file)] = str(Path("machine", "commit.txt"))


def git_commit_or_empty(checkout: Path) -> str:
    """
    Returns the git commit of a checkout, or "" if the commit is unknown.

    The commit is unknown, for example, if the checkout belongs to another user, because git refuses
    to read such a checkout ("dubious ownership"). Gwen can be installed from it nevertheless. If
    there is no .git, git is not called, because it would report the commit of an enclosing
    repository.
    """
    if not (checkout / ".git").exists():
        return ""
    command = ["git", "rev-parse", "HEAD"]
    try:
        answer = subprocess.run(command, cwd=checkout, capture_output=True, text=True, check=False)
    except OSError:  # git is not installed
        return ""
    return answer.stdout.strip() if answer.returncode == 0 else ""
