"""docs/first-hour.md from top to bottom, on a smaller model and with fewer steps; `-m hour` runs it as it stands."""

import importlib
import io
import re
import shlex
import sys

import pytest
from conftest import ROOT

PAGE = (ROOT / "docs" / "first-hour.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^uv run ((?:--extra \w+ )+)(.*)$", PAGE, re.M)


@pytest.fixture
def run_all(tmp_path, monkeypatch, capsys):
    """Runs the page's commands in this order in a directory that has its examples; gives what each prints."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)

    def run_all(change):
        for _, line in COMMANDS:
            program, *flags = shlex.split(change(line))
            monkeypatch.setattr(sys, "stdin", io.StringIO("I was charged twice.\n"))
            importlib.import_module(program.removesuffix(".py")).main(flags)
            yield "".join(capsys.readouterr())

    return run_all


@pytest.mark.slow
def test_each_command_of_the_page_works_after_the_one_before(run_all):
    before, tried, copied, gated, chat, packed = run_all(
        lambda line: re.sub(
            r"--steps \d+", "--steps 2", line.replace("--model smollm2", "--model demo")
        )
    )
    assert (
        before.strip()
        and "the rewards differ in" in tried
        and "verdict:" in copied
        and "verdict:" in gated
    )
    assert "before" in chat and "after" in chat and "first-model-Q8_0.gguf" in packed


@pytest.mark.hour
@pytest.mark.slow
def test_the_page_as_it_is_written_learns_to_be_short(run_all):
    """About ten minutes on two cores."""
    _, tried, copied, gated, *_ = run_all(str)
    assert (
        tried.splitlines()[-1].startswith("go: ")
        and "verdict: better" in copied
        and "verdict: better" in gated
    )


def test_the_reward_on_the_page_is_the_one_that_the_commands_name():
    code = (ROOT / "examples" / "first_hour" / "short.py").read_text(encoding="utf-8")
    assert code.split("\n\n\n")[1].strip() in PAGE
