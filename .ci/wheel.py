"""Hatchling's hook: a wheel says in commit.txt in machine/ which commit it is of, "outside git" where there is none."""

import subprocess
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class CustomBuildHook(BuildHookInterface):  # type: ignore[type-arg]
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        commit = "outside git"
        if (Path(self.root) / ".git").exists():
            asked = ["git", "rev-parse", "HEAD"]
            commit = subprocess.run(asked, cwd=self.root, capture_output=True, text=True, check=True).stdout.strip()
        written = Path(tempfile.mkdtemp(), "commit.txt")
        written.write_text(commit)
        build_data["force_include"][str(written)] = str(Path("machine", "commit.txt"))
