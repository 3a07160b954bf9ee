"""The commands of docs/first-hour.md with few steps; `-m hour` runs the page unchanged."""

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
def run_commands(tmp_path, monkeypatch, capsys):
    """Runs the page's commands in order and yields the output of each command."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)

    def run_commands(change):
        for _, line in COMMANDS:
            program, *flags = shlex.split(change(line))
            monkeypatch.setattr(sys, "stdin", io.StringIO("I was charged twice.\n"))
            importlib.import_module(program.removesuffix(".py")).main(flags)
            yield "".join(capsys.readouterr())

    return run_commands


@pytest.mark.slow
def test_the_commands_of_the_page_work_one_after_another(run_commands):
    def shorten(line):
        line = line.replace("--model smollm2", "--model demo")
        return re.sub(r"--steps \d+", "--steps 2", line)

    untrained, preflight, first_run, gated_run, chat, export = run_commands(shorten)
    assert untrained.strip()
    assert "the rewards differ in" in preflight
    assert "verdict:" in first_run
    assert "verdict:" in gated_run
    assert "before" in chat
    assert "after" in chat
    assert "first-model-Q8_0.gguf" in export


@pytest.mark.hour
@pytest.mark.slow
def test_the_model_of_the_unchanged_page_learns_to_be_short(run_commands):
    """This test takes about ten minutes on two cores."""
    _, preflight, first_run, gated_run, *_ = run_commands(str)
    assert preflight.splitlines()[-1].startswith("go: ")
    assert "verdict: better" in first_run
    assert "verdict: better" in gated_run


def test_the_reward_on_the_page_is_the_reward_that_the_commands_use():
    code = (ROOT / "examples" / "first_hour" / "short.py").read_text(encoding="utf-8")
    assert code.split("\n\n\n")[1].strip() in PAGE
