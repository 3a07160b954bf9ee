"""Signs of life: what a command that says nothing for a while says it is at, how far, and how long still."""

import io
import os
import sys
import threading

import pytest
from conftest import run_command

from machine import alive


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
