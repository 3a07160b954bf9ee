"""
Signs of life: shows what a command is doing, how far it is, and how much time is left.

In a terminal or a notebook, tqdm draws bars. In a file, a line is written after some silence
instead. One thread serves both. This file does not cover a run's lines (reporting/console.py).
"""

import contextlib
import os
import re
import shutil
import stat
import sys
import textwrap
import threading
import time
from collections.abc import Collection, Iterator
from typing import Any

from tqdm.auto import tqdm

# The longest silence in seconds. An activity that is shorter prints nothing.
MAX_SILENCE_WATCHED = 8.0  # in a terminal or a pipe
MAX_SILENCE_IN_FILE = 40.0

# Patterns of the parts of a line that must not be broken.
FIGURE = r"[^| ][^|]*"  # in a line of figures separated by " | "
COMMAND_OR_FLAG = r"uv run .*?(?=[;,] |$)|--[a-z-]+ \S"  # a flag with the beginning of its value

# Activities in progress, the innermost last. The key is the bar's `id`, because bars compare by
# position.
_active_bars: dict[int, "Bar"] = {}
_state: dict[str, Any] = {"last": time.monotonic(), "thread": None}


class Bar(tqdm):
    """A progress bar that also counts where it is not drawn, as in a file."""

    monitor_interval = 0  # our thread replaces tqdm's own

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
        items: the bar counts an iteration over them. For an empty collection, no bar is drawn.
        desc: the activity. unit: the name of an item.
        disable: a bar with True is never drawn, one with None only in a terminal.
        options: tqdm's further options.

        The time left is estimated from the mean speed; tqdm by default gives the latest items more
        weight.
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
        _watch(self)

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

    def show(self, done: int, amount: float, unit: str) -> None:
        """Sets the count to `done`. Shows as the speed an `amount` done so far, in another unit."""
        if not self.disable:
            speed = amount / self.format_dict["elapsed"]
            self.set_postfix_str(f"{speed:,.0f} {unit}/s", refresh=False)
        self.update(done - self.n)

    def describe(self) -> str:
        """
        The activity as text: "sampling: 23 of 64 rows, about 40 s left".

        Before the first item is done, the text gives the time so far instead.
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
        if num_done > 0 and num_left > 0:
            seconds_left = seconds / num_done * num_left
            return f"{text}, about {format_duration(seconds_left)} left"
        return f"{text}, {format_duration(seconds)} so far"

    def close(self) -> None:
        _active_bars.pop(id(self), None)
        if not self.disable:
            self.refresh()  # the last drawing may be out of date, and would stay in a transcript
        super().close()


def show_activity(activity: str) -> Bar:
    """A context manager that shows an activity of unknown length, if it takes long."""
    return Bar(desc=activity, disable=True)


# ---- text


def wrap_for_terminal(text: str, file: Any = None) -> str:
    """
    The text with long lines wrapped, if `file` or else stdout is a terminal.

    Lines break at spaces, but not within a figure or a command to copy, or between a flag and its
    value.
    """
    if not (file or sys.stdout).isatty():
        return text
    width = shutil.get_terminal_size().columns
    lines = []
    for line in text.split("\n"):
        lines.append(line if len(line) <= width else _wrap_line(line, width))
    return "\n".join(lines)


def _wrap_line(line: str, width: int) -> str:
    unbreakable = FIGURE if " | " in line else COMMAND_OR_FLAG
    protected = re.sub(unbreakable, _replace_spaces, line)
    indent = " " * (len(line) - len(line.lstrip()) + 2)
    # A command that is longer than a line is left to the terminal to break.
    wrapped = textwrap.fill(
        protected,
        width,
        subsequent_indent=indent,
        break_on_hyphens=False,
        break_long_words=False,
    )
    return wrapped.replace("\xa0", " ")


def _replace_spaces(match: re.Match[str]) -> str:
    """The matched text with non-breaking spaces."""
    return match[0].replace(" ", "\xa0")


def format_duration(seconds: float) -> str:
    """Formats seconds as seconds, minutes, or hours and minutes."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 100:
        return f"{minutes} min"
    return f"{minutes // 60} h {minutes % 60:02d} min"


# ---- the thread


def note_printed() -> None:
    """Notes that something was just printed."""
    _state["last"] = time.monotonic()


def redraw_progress() -> None:
    """Draws the bars again with the current time, or prints a line about the activities."""
    note_printed()
    bars = list(_active_bars.values())
    for bar in bars:
        if not bar.disable:
            bar.refresh()
    if bars and bars[-1].disable:
        activities = "; ".join(bar.describe() for bar in bars if bar.disable)
        tqdm.write(f"... {activities}", file=sys.stderr)
        sys.stderr.flush()


def _watch(bar: Bar) -> None:
    """Adds a bar, and starts the thread unless it runs. A forked process begins without it."""
    _active_bars[id(bar)] = bar
    thread = _state["thread"]
    if thread is None or not thread.is_alive():
        note_printed()
        thread = threading.Thread(target=_keep_watching, name="signs of life", daemon=True)
        _state["thread"] = thread
        thread.start()


def is_watched() -> bool:
    """Whether stderr is a terminal or a pipe. False in a notebook, where stderr has no file."""
    try:
        return sys.stderr.isatty() or stat.S_ISFIFO(os.fstat(sys.stderr.fileno()).st_mode)
    except (OSError, ValueError):
        return False


def _keep_watching() -> None:
    while True:
        time.sleep(1.0)
        max_silence = MAX_SILENCE_WATCHED if is_watched() else MAX_SILENCE_IN_FILE
        if _active_bars and time.monotonic() - _state["last"] >= max_silence:
            # The terminal may be gone, or the file may be closed.
            with contextlib.suppress(OSError, ValueError):
                redraw_progress()
