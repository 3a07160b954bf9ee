"""A run prints a line per step, and a terminal also shows a live line with the time left."""

import io
import os
import pty
import re
import subprocess
import sys
import termios

import pytest
from conftest import ROOT

import gwen
import sampler
from config import Config
from machine import alive
from reporting import console

STEP = {
    "step": 1,
    "loss": 0.01138,
    "reward/mean": -0.171875,
    "step/s": 105.49,
    "rollout/tok_s": 607.41,
    "train/tok_s": 91.62,
    "reward/zero_std_frac": 0.25,
    "update/rows": 24,
}
LINE = "step 1/100 | loss 0.0114 | reward -0.171875 | 105.5s | rollout 607.4 tok/s | train 91.6 tok/s | 25%"
COMMAND = f"uv run train.py --model demo --run-dir {'runs/' + 'long' * 20}"
NOTE = f"next: too few problems are held out to tell any change; take more with --eval-limit 64: {COMMAND}; and look"


def test_the_line_of_a_step_has_the_format_that_scripts_expect_and_one_part_per_column():
    line = console.format_step_line(STEP, 100)
    assert line == LINE
    columns = console.describe_console_columns(Config.from_flags())
    assert len(line.split(" | ")) == len(columns.split(", "))

    line_without_values = console.format_step_line(STEP | {"loss": None, "reward/mean": None}, 100)
    assert line_without_values.startswith("step 1/100 | loss nan | reward nan | 105.5s")


@pytest.mark.parametrize(
    "settings", [{"loss_type": "distill"}, {"groups": 1}, {"loss_type": "sft", "data": "a.jsonl"}]
)
def test_the_line_of_a_step_has_one_part_for_each_metric_of_the_run(settings):
    unmeasured = {"reward/zero_std_frac": None}
    if settings.get("loss_type") == "sft":
        unmeasured["rollout/tok_s"] = None
    line = console.format_step_line(STEP | unmeasured, 100)
    columns = console.describe_console_columns(Config.from_flags(**settings))
    assert len(line.split(" | ")) == len(columns.split(", "))
    assert "groups" not in columns


def test_the_line_of_a_step_shows_the_fraction_of_the_rate_that_target_kl_allows():
    line = console.format_step_line(STEP | {"update/rate": 0.22}, 100)
    assert line == f"{LINE} | learning rate held at 22% by --target-kl"
    assert console.format_step_line(STEP | {"update/rate": 1.0}, 100) == LINE


PROGRAM = f"""
import time
from reporting import console
live = console.LiveLine(4)
with live:
    live.show_phase("rollout")
    console.print_line("{LINE}")
    time.sleep(0.2)
    live.show_finished_step({{"step": 1, "rollout/tok_s": 1234.5, "step/s": 60.0}})
    live.show_phase("judge")
    console.print_line_to_stderr("{NOTE}")
console.print_line("the end")
"""


def test_the_live_line_in_a_terminal_shows_the_phase_the_speed_and_the_time_left():
    leader, follower = pty.openpty()
    termios.tcsetwinsize(leader, (24, 80))
    subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=ROOT, stdout=follower, stderr=follower, check=True
    )
    os.close(follower)
    output = b""
    try:
        while piece := os.read(leader, 4096):
            output += piece
    except OSError:  # Linux raises it after the last writer has closed the terminal
        pass
    os.close(leader)

    text = output.decode()
    assert "0/4 steps | sampling | ? left" in text
    assert re.search(r"1/4 steps \| judging \| 1,234 tok/s \| 03:0\d left", text)

    # A carriage return goes back to the begin of the line. Only the last text of a line stays.
    visible_lines = []
    for line in text.split("\n"):
        last_text = re.split(r"\r+(?=.)", line.rstrip("\r"))[-1].strip()
        if last_text:
            visible_lines.append(last_text)
    wrapped_line = [LINE[:76], LINE[77:]]  # the terminal has 80 columns
    wrapped_note = [
        "next: too few problems are held out to tell any change; take more with",
        "--eval-limit 64:",
        "uv run train.py --model demo \\",
        f"{COMMAND.partition('demo ')[2]};",
        "and look",
    ]
    assert visible_lines == [*wrapped_line, *wrapped_note, "the end"]


def test_the_last_text_of_a_bar_shows_the_final_count(monkeypatch):
    """tqdm draws ten times a second, and rows that reach --max-tokens end together."""
    screen = io.StringIO()
    with alive.Bar(total=64, disable=False, file=screen) as bar:
        bar.update(62)
        bar.refresh()
        bar.update(2)
    assert screen.getvalue().rindex("64/64") > screen.getvalue().rindex("62/64")

    final_counts = []

    class RecordingBar(alive.Bar):
        def close(self):
            final_counts.append((self.n, self.total))
            super().close()

    model, _ = gwen.load("demo")
    monkeypatch.setattr(alive, "Bar", RecordingBar)
    sampler.rollout(model, [[5, 6, 7]], sampler.SamplingParams(3), group_size=4, key=0)
    assert set(final_counts) == {(4, 4)}
