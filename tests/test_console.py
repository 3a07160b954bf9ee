"""What a run says in a terminal: a step's line fits whatever its numbers, and the live line tells the time left."""

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
}
STEP |= {"train/tok_s": 91.62, "reward/zero_std_frac": 0.25, "update/rows": 24}

LINE = "step 1/100 | loss 0.0114 | reward -0.171875 | 105.5s | rollout 607.4 tok/s | train 91.6 tok/s | 25%"
COMMAND = f"uv run train.py --model demo --run-dir {'runs/' + 'long' * 20}"
NOTE = f"next: too few problems are held out to tell any change; take more with --eval-limit 64: {COMMAND}; and look"


def test_the_line_begins_as_other_peoples_scripts_expect_and_its_columns_are_named():
    line = console.format_step_line(STEP, 100)
    assert line == LINE
    assert len(line.split(" | ")) == len(
        console.describe_console_columns(Config.from_flags()).split(", ")
    )
    unknown = console.format_step_line(STEP | {"loss": None, "reward/mean": None}, 100)
    assert unknown.startswith("step 1/100 | loss nan | reward nan | 105.5s")


@pytest.mark.parametrize(
    "settings", [{"loss_type": "distill"}, {"groups": 1}, {"loss_type": "sft", "data": "a.jsonl"}]
)
def test_a_line_has_what_a_run_measures(settings):
    missing = {"rollout/tok_s": None} if settings.get("loss_type") == "sft" else {}
    line = console.format_step_line(STEP | {"reward/zero_std_frac": None} | missing, 100)
    columns = console.describe_console_columns(Config.from_flags(**settings))
    assert len(line.split(" | ")) == len(columns.split(", ")) and "groups" not in columns


def test_a_line_says_at_what_part_of_the_schedule_target_kl_holds_the_rate():
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


def test_a_terminal_shows_what_is_done_now_how_fast_and_how_long_it_will_take():
    leader, follower = pty.openpty()
    termios.tcsetwinsize(leader, (24, 80))
    subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=ROOT, stdout=follower, stderr=follower, check=True
    )
    os.close(follower)
    shown = b""
    try:
        while piece := os.read(leader, 4096):
            shown += piece
    except OSError:  # how Linux says that nobody writes any more
        pass
    os.close(leader)
    text = shown.decode()
    assert "0/4 steps | sampling | ? left" in text
    assert re.search(r"1/4 steps \| judging \| 1,234 tok/s \| 03:0\d left", text)
    # a carriage return goes back to the line's begin: what is read last in each line is what stays
    lines = [re.split(r"\r+(?=.)", line.rstrip("\r"))[-1].strip() for line in text.split("\n")]
    note = [
        "next: too few problems are held out to tell any change; take more with",
        "--eval-limit 64:",
        "uv run train.py --model demo \\",
        f"{COMMAND.partition('demo ')[2]};",
    ]
    assert [line for line in lines if line] == [
        LINE[:76],
        LINE[77:],
        *note,
        "and look",
        "the end",
    ]  # of 80 columns


def test_what_a_bar_says_last_is_true(monkeypatch):
    """tqdm draws ten times a second, and rows that reach --max-tokens end together."""
    screen = io.StringIO()
    ends = []
    with alive.Bar(total=64, disable=False, file=screen) as bar:
        bar.update(62)
        bar.refresh()
        bar.update(2)
    assert screen.getvalue().rindex("64/64") > screen.getvalue().rindex("62/64")

    class Kept(alive.Bar):
        def close(self):
            ends.append((self.n, self.total))
            super().close()

    model, _ = gwen.load("demo")
    monkeypatch.setattr(alive, "Bar", Kept)
    sampler.rollout(model, [[5, 6, 7]], sampler.SamplingParams(3), group_size=4, key=0)
    assert set(ends) == {(4, 4)}
