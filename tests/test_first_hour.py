"""docs/first-hour.md from top to bottom, on a smaller model and with fewer steps; `-m hour` runs it as it stands."""

import re
import shlex
import subprocess
import sys

import pytest
from conftest import ROOT

PAGE = (ROOT / "docs" / "first-hour.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^uv run ((?:--extra \w+ )+)(.*)$", PAGE, re.M)


def run_all(folder, change):
    """What the page's commands print, run in this order in a directory that has its examples."""
    (folder / "examples").symlink_to(ROOT / "examples")
    printed = []
    for _, line in COMMANDS:
        program, *flags = shlex.split(change(line))
        done = subprocess.run(
            [sys.executable, ROOT / program, *flags],
            cwd=folder,
            input="I was charged twice.\n",
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, line + done.stderr
        printed.append(done.stdout + done.stderr)
    return printed


@pytest.mark.slow
def test_each_command_of_the_page_works_after_the_one_before(tmp_path):
    before, tried, copied, gated, said, packed = run_all(
        tmp_path, lambda line: re.sub(r"--steps \d+", "--steps 2", line.replace("--model smollm2", "--model demo"))
    )
    assert before.strip() and "groups have a signal" in tried and "verdict:" in copied and "verdict:" in gated
    assert "before" in said and "after" in said and "first-model-Q8_0.gguf" in packed


@pytest.mark.hour
@pytest.mark.slow
def test_the_page_as_it_is_written_learns_to_be_short(tmp_path):
    """About ten minutes on two cores."""
    _, tried, copied, gated, *_ = run_all(tmp_path, str)
    assert tried.splitlines()[-1].startswith("go: ") and "verdict: better" in copied and "verdict: better" in gated


def test_the_reward_on_the_page_is_the_one_that_the_commands_name():
    code = (ROOT / "examples" / "first_hour" / "short.py").read_text(encoding="utf-8")
    assert code.split("\n\n\n")[1].strip() in PAGE
