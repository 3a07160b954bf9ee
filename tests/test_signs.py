"""A silent command prints its activity, its progress and the time left from time to time."""

import io
import os
import sys
import threading

import pytest
from conftest import run_command

from machine import alive
from rewards import rewards


@pytest.fixture
def clock(monkeypatch):
    """A list with the time, which the test changes. No thread prints anything."""
    clock = [100.0]
    monkeypatch.setattr(alive.time, "monotonic", lambda: clock[0])
    monkeypatch.setitem(alive._state, "thread", threading.current_thread())
    monkeypatch.setattr(alive, "_active_bars", {})
    return clock


def print_and_read_activities(capsys):
    alive.redraw_bars_or_print_activities()
    return capsys.readouterr().err.strip()


def test_without_a_terminal_a_line_says_the_activity_the_progress_and_the_time_left(clock, capsys):
    with alive.Bar(total=64, desc="sampling", unit="row") as bar:
        clock[0] += 30
        line = print_and_read_activities(capsys)
        assert line == "... sampling: 0 of 64 rows, 30 s so far"

        bar.update(16)
        line = print_and_read_activities(capsys)
        assert line == "... sampling: 16 of 64 rows, about 90 s left"

    times = ["10 s so far", "about 60 s left", "about 30 s left", "about 13 s left"]
    for number in alive.Bar([0, 1, 2, 3], desc="update", unit="part"):
        clock[0] += 10
        line = print_and_read_activities(capsys)
        assert line == f"... update: {number} of 4 parts, {times[number]}"
    assert print_and_read_activities(capsys) == ""


def test_a_line_lists_activities_from_the_outermost_to_the_innermost(clock, capsys):
    with (
        alive.Bar(total=9, initial=4, desc="", unit="step") as steps,
        alive.show_activity("judging"),
    ):
        steps.activity = "judging"
        steps.update(1)
        clock[0] += 200
        line = print_and_read_activities(capsys)
        assert line == "... judging: 5 of 9 steps, about 13 min left; judging, 3 min so far"

        steps.update(4)
        line = print_and_read_activities(capsys)
        assert line == "... judging: 9 of 9 steps, 3 min so far; judging, 3 min so far"

    with pytest.raises(ValueError), alive.show_activity("loading"):
        raise ValueError
    assert print_and_read_activities(capsys) == ""


class Screen(io.StringIO):
    def isatty(self):
        return True


def test_in_a_terminal_the_bar_is_drawn_again_and_no_line_is_printed(clock, monkeypatch):
    screen = Screen()
    bar = alive.Bar(total=4, desc="update", file=screen)
    output_before = screen.getvalue()
    alive.redraw_bars_or_print_activities()
    assert len(screen.getvalue()) > len(output_before)
    assert "..." not in screen.getvalue()

    bar.start_t = bar.last_print_t = clock[0]
    bar._time = lambda: clock[0]
    # A slow part, such as a first compilation, counts in the mean like each other part.
    for seconds in (19, 1):
        clock[0] += seconds
        bar.update()
    assert "2/4 [00:20<00:20, 10.00s/it]" in screen.getvalue()
    bar.close()


def test_a_line_names_a_reward_that_hangs_and_estimates_no_time_left(clock, tmp_path, capsys):
    """Gwen cannot know whether a user's function will ever return."""
    (tmp_path / "mine.py").write_text(
        "def score(completions, wait, **_):\n"
        "    for wait_once in wait:\n"
        "        wait_once()\n"
        "    return [1.0 for _ in completions]\n"
    )
    name, reward = rewards.load_reward(f"{tmp_path}/mine.py:score")
    lines = []

    def wait():
        clock[0] += 81
        lines.append(print_and_read_activities(capsys))

    with alive.Bar(total=9, initial=4, desc="training", unit="step") as steps:
        clock[0] += 20
        steps.update(1)
        example = {"prompt": "1?", "wait": wait}
        rewards.call_rewards({name: reward}, [example], ["2"], {})
        assert lines == [
            "... training: 5 of 9 steps, 2 min so far; reward: 0 of 1 rewards, 81 s so far; "
            f"waiting for the reward score ({tmp_path}/mine.py:1), which has no time limit, "
            "81 s so far"
        ]
        assert (
            print_and_read_activities(capsys) == "... training: 5 of 9 steps, about 7 min left"
        ), "after the call"


def test_in_a_terminal_the_call_of_a_reward_is_drawn_and_then_removed(clock, monkeypatch):
    screen = Screen()
    monkeypatch.setattr(sys, "stderr", screen)
    with alive.show_call_without_time_limit("reward score (mine.py:1)") as bar:
        bar.start_t -= 81
        alive.redraw_bars_or_print_activities()
        text = "waiting for the reward score (mine.py:1), which has no time limit, 01:21 so far"
        assert text in screen.getvalue()
        assert "..." not in screen.getvalue()
    assert screen.getvalue().endswith("\r")


def test_a_bar_without_items_is_not_drawn():
    screen = Screen()
    assert list(alive.Bar({}.items(), desc="reward", file=screen)) == []
    assert screen.getvalue() == ""


def test_lines_about_progress_are_40_s_apart_if_the_output_is_not_a_terminal(monkeypatch):
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
def test_a_command_in_a_pipe_prints_its_activity_while_mlx_computes():
    """The thread that prints runs while MLX computes. The process ends without waiting for it."""
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
    process = run_command("-c", program)
    assert process.returncode == 0
    assert "... multiplying, " in process.stderr
    assert "so far" in process.stderr
