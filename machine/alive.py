"""
Shows what a command is doing, how much of the work is done, and how much time is left.

In a terminal or a notebook, tqdm draws progress bars. If the output goes to a file or a pipe, a
line about the progress is written whenever nothing else has been written for a while. One thread
updates the bars and writes these lines. reporting/console.py prints the lines of a run.
"""

import contextlib
import sys
import threading
import time
from collections.abc import Collection, Iterator
from typing import Any

from tqdm.auto import tqdm

# The longest time without output, in seconds. An activity that takes less time prints nothing.
MAX_SILENCE_IN_TERMINAL = 8.0
MAX_SILENCE_ELSEWHERE = 40.0  # in a file, or in a pipe, for example to `tee`

# The bars of the activities in progress, innermost last. Each key is the `id` of a bar, because
# tqdm bars are compared by their positions on the screen.
_active_bars: dict[int, "Bar"] = {}
_state: dict[str, Any] = {"last": time.monotonic(), "thread": None}


class Bar(tqdm):
    """A progress bar that also counts while it is not drawn, as when output goes to a file."""

    monitor_interval = 0  # this module's thread replaces tqdm's monitor thread

    def __init__(
        self,
        items: Collection[Any] | None = None,
        *,
        desc: str = "",
        unit: str = "",
        leave: bool = False,
        disable: bool | None = None,
        **options: Any,
    ):
        """
        Creates a bar that counts the iterations over `items`, or the calls of `update`.

        For an empty collection of items, no bar is drawn.
        desc: the name of the activity.
        unit: the singular name of an item.
        disable: if True, the bar is never drawn; if None, the bar is drawn only in a terminal.
        options: further options for tqdm.

        The time left is estimated from the mean speed. By default, tqdm would give more weight to
        the latest items.
        """
        if disable is None and items is not None and not items:
            disable = True
        super().__init__(
            items,
            desc=desc,
            unit=unit or "it",
            leave=leave,
            disable=disable,
            smoothing=0,
            miniters=0,
            **options,
        )
        self.activity = desc
        self.unit_name = unit
        self.start_n = self.n
        self.begin_s = time.monotonic()
        self.may_never_end = False
        self.fewest_for_estimate = 1  # the time left is estimated when this many items are done
        _register_bar_and_start_thread(self)

    def __iter__(self) -> Iterator[Any]:
        if not self.disable:
            yield from super().__iter__()
            return
        try:
            for item in self.iterable:
                yield item
                self.n += 1
        finally:
            self.close()

    def update(self, n: float | None = 1) -> Any:
        if not self.disable:
            return super().update(n)
        self.n += n or 0
        return None

    def set_count_and_show_speed(self, num_done: int, amount: float, amount_unit: str) -> None:
        """
        Sets the bar's count to `num_done`, and shows a speed.

        The speed is the `amount` of work done so far, divided by the elapsed time.
        """
        if not self.disable:
            speed = amount / self.format_dict["elapsed"]
            self.set_postfix_str(f"{speed:,.0f} {amount_unit}/s", refresh=False)
        self.update(num_done - self.n)

    def describe_activity(self, *, can_estimate: bool = True) -> str:
        """
        The activity and its progress, as in the text "sampling: 23 of 64 rows, about 40 s left".

        The text gives the elapsed time instead if the time left cannot be estimated.
        """
        num_done = self.n - self.start_n
        num_left = self.total - self.n if self.total else 0
        seconds = time.monotonic() - self.begin_s

        text = self.activity
        if self.total or self.n:
            text += f": {self.n:g}"
            if self.total:
                text += f" of {self.total}"
            if self.unit_name:
                text += f" {self.unit_name}s"
        if can_estimate and num_done >= self.fewest_for_estimate and num_left > 0:
            seconds_left = seconds / num_done * num_left
            return f"{text}, about {format_duration(seconds_left)} left"
        return f"{text}, {format_duration(seconds)} so far"

    def close(self) -> None:
        _active_bars.pop(id(self), None)
        if not self.disable:
            self.refresh()  # otherwise, an outdated drawing could remain in the terminal's output
        super().close()


def show_activity(activity: str) -> Bar:
    """A context manager that prints a line about an activity now and then, and draws no bar."""
    return Bar(desc=activity, disable=True)


def show_call_without_time_limit(function: str) -> Bar:
    """
    A context manager that shows how long a call of a user's function has taken.

    During the call, no line estimates the time left, because the function may never return.
    function: a description of the function, such as "reward score (mine.py:3)".
    """
    activity = f"waiting for the {function}, which has no time limit"
    bar = Bar(desc=activity, bar_format="{desc}, {elapsed} so far")
    bar.may_never_end = True
    return bar


# ---- text


def format_duration(seconds: float) -> str:
    """The duration as text, in seconds, in minutes, or in hours and minutes."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 100:
        return f"{minutes} min"
    return f"{minutes // 60} h {minutes % 60:02d} min"


# ---- the thread


def record_print_time() -> None:
    """Records that something has just been printed, so that no progress line follows at once."""
    _state["last"] = time.monotonic()


def redraw_bars_or_print_activities() -> None:
    """
    Redraws all drawn bars with the current time.

    If the innermost bar is not drawn, also prints a line about the activities of undrawn bars.
    """
    record_print_time()
    bars = list(_active_bars.values())
    for bar in bars:
        if not bar.disable:
            bar.refresh()
    if bars and bars[-1].disable:
        can_estimate = not bars[-1].may_never_end
        activities = [
            bar.describe_activity(can_estimate=can_estimate) for bar in bars if bar.disable
        ]
        tqdm.write(f"... {'; '.join(activities)}", file=sys.stderr)
        sys.stderr.flush()


def _register_bar_and_start_thread(bar: Bar) -> None:
    """
    Adds a bar to the active bars, and starts the thread if it is not running.

    A forked process starts without the thread.
    """
    _active_bars[id(bar)] = bar
    thread = _state["thread"]
    if thread is None or not thread.is_alive():
        record_print_time()
        thread = threading.Thread(
            target=_redraw_after_each_silence, name="signs of life", daemon=True
        )
        _state["thread"] = thread
        thread.start()


def max_silence_on_stderr() -> float:
    """
    The time without output on stderr, in seconds, after which the thread shows a sign of life.

    The time is shorter in a terminal, where a person watches, than in a file or a pipe.
    """
    try:
        is_terminal = sys.stderr.isatty()
    except (AttributeError, OSError, ValueError):  # stderr is None or closed
        is_terminal = False
    return MAX_SILENCE_IN_TERMINAL if is_terminal else MAX_SILENCE_ELSEWHERE


def _redraw_after_each_silence() -> None:
    while True:
        time.sleep(1.0)
        seconds_silent = time.monotonic() - _state["last"]
        if _active_bars and seconds_silent >= max_silence_on_stderr():
            # the terminal or the file may have been closed
            with contextlib.suppress(OSError, ValueError):
                redraw_bars_or_print_activities()
