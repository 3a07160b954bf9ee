"""Signs of life: what a command that says nothing for a while says it is at, how far, and how long still."""

import io
import os
import sys
import threading

import pytest
from conftest import run_command

from machine import alive
from rewards import rewards


@pytest.fixture
def now(monkeypatch):
    """A clock that the test moves, and no thread."""
    clock = [100.0]
    monkeypatch.setattr(alive.time, "monotonic", lambda: clock[0])
    monkeypatch.setitem(alive._state, "thread", threading.current_thread())
    monkeypatch.setattr(alive, "_active_bars", {})
    return clock


def signed(capsys):
    alive.redraw_bars_or_print_activities()
    return capsys.readouterr().err.strip()


def test_what_is_not_drawn_says_what_how_far_and_how_long_still(now, capsys):
    with alive.Bar(total=64, desc="sampling", unit="row") as bar:
        now[0] += 30
        assert signed(capsys) == "... sampling: 0 of 64 rows, 30 s so far"
        bar.update(16)
        assert signed(capsys) == "... sampling: 16 of 64 rows, about 90 s left"
    for number in alive.Bar([5, 6, 7, 8], desc="update", unit="part"):
        now[0] += 10
        left = ["10 s so far", "about 60 s left", "about 30 s left", "about 13 s left"][number - 5]
        assert signed(capsys) == f"... update: {number - 5} of 4 parts, {left}"
    assert signed(capsys) == ""


def test_works_are_told_from_the_outermost_to_the_innermost(now, capsys):
    with (
        alive.Bar(total=9, initial=4, desc="", unit="step") as steps,
        alive.show_activity("judging"),
    ):
        steps.activity = "judging"
        steps.update(1)
        now[0] += 200
        assert (
            signed(capsys) == "... judging: 5 of 9 steps, about 13 min left; judging, 3 min so far"
        )
        steps.update(4)
        assert signed(capsys) == "... judging: 9 of 9 steps, 3 min so far; judging, 3 min so far"
    with pytest.raises(ValueError), alive.show_activity("loading"):
        raise ValueError
    assert signed(capsys) == ""


class Screen(io.StringIO):
    def isatty(self):
        return True


def test_a_drawn_bar_is_drawn_again_and_no_line_is_written(now, monkeypatch):
    screen = Screen()
    bar = alive.Bar(total=4, desc="update", file=screen)
    before = screen.getvalue()
    alive.redraw_bars_or_print_activities()
    assert len(screen.getvalue()) > len(before) and "..." not in screen.getvalue()
    bar.start_t = bar.last_print_t = now[0]
    bar._time = lambda: now[0]
    for seconds in (
        19,
        1,
    ):  # one that took long, an evaluation or a first compilation, stays one of all
        now[0] += seconds
        bar.update()
    assert "2/4 [00:20<00:20, 10.00s/it]" in screen.getvalue()
    bar.close()


def test_a_reward_that_hangs_is_named_with_its_time_and_no_time_left_is_estimated(
    now, tmp_path, capsys
):
    """Gwen cannot know whether a user's function will ever return."""
    (tmp_path / "mine.py").write_text(
        "def score(completions, wait, **_):\n"
        "    for seconds in wait:\n"
        "        seconds()\n"
        "    return [1.0 for _ in completions]\n"
    )
    name, reward = rewards.load_reward(f"{tmp_path}/mine.py:score")
    lines = []

    def wait():
        now[0] += 81
        lines.append(signed(capsys))

    with alive.Bar(total=9, initial=4, desc="training", unit="step") as steps:
        now[0] += 20
        steps.update(1)
        example = {"prompt": "1?", "wait": wait}
        rewards.call_rewards({name: reward}, [example], ["2"], {})
        assert lines == [
            "... training: 5 of 9 steps, 2 min so far; reward: 0 of 1 rewards, 81 s so far; "
            f"waiting for the reward score ({tmp_path}/mine.py:1), which has no time limit, "
            "81 s so far"
        ]
        assert signed(capsys) == "... training: 5 of 9 steps, about 7 min left", "after the call"


def test_in_a_terminal_the_call_of_a_reward_is_drawn_and_then_removed(now, monkeypatch):
    screen = Screen()
    monkeypatch.setattr(sys, "stderr", screen)
    with alive.show_call_without_time_limit("reward score (mine.py:1)") as bar:
        bar.start_t -= 81
        alive.redraw_bars_or_print_activities()
        text = "waiting for the reward score (mine.py:1), which has no time limit, 01:21 so far"
        assert text in screen.getvalue() and "..." not in screen.getvalue()
    assert screen.getvalue().endswith("\r")


def test_a_bar_of_nothing_is_not_drawn():
    screen = Screen()
    assert list(alive.Bar({}.items(), desc="reward", file=screen)) == [] and screen.getvalue() == ""


def test_lines_about_progress_are_40_s_apart_wherever_the_output_is_not_a_terminal(monkeypatch):
    """A pipe to `tee` ends in a file, where a line every few seconds would hide the other lines."""
    reader, writer = os.pipe()
    with os.fdopen(reader), os.fdopen(writer, "w") as pipe:
        monkeypatch.setattr(sys, "stderr", pipe)
        assert alive.max_silence_on_stderr() == 40
    assert alive.max_silence_on_stderr() == 40, "a closed stream"
    monkeypatch.setattr(sys, "stderr", None)
    assert alive.max_silence_on_stderr() == 40
    monkeypatch.setattr(sys, "stderr", Screen())
    assert 1.25 * alive.max_silence_on_stderr() <= 10, "with a margin for a busy machine"


@pytest.mark.slow
def test_a_command_that_waits_says_so_in_a_pipe_whatever_holds_it():
    """The thread gets its turn while MLX computes. The end of the process does not wait for it."""
    program = """
import cpu_blas
import mlx.core as mx
from machine import alive
alive.MAX_SILENCE_ELSEWHERE = 0.0
with alive.show_activity("multiplying"):
    begin = alive.time.monotonic()
    while alive.time.monotonic() - begin < 1.5:
        mx.eval(mx.ones((1500, 1500)) @ mx.ones((1500, 1500)))
"""
    done = run_command("-c", program)
    assert done.returncode == 0
    assert "... multiplying, " in done.stderr and "so far" in done.stderr
