"""
Signs of life: what a command is at, how far, and how long still, where it has said nothing for a while.

In a terminal and a notebook tqdm draws bars; in a file a line takes their place. One thread looks after both. Left out:
what the lines of a run say (reporting/console.py).
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

# Most seconds without a sign, where somebody looks (a terminal, a pipe) and in a file; a shorter phase says nothing
WATCHED, IN_FILE = 8.0, 40.0
_works: dict[int, "Bar"] = {}  # what is going on, by id, the innermost last; bars compare by where they stand
_state: dict[str, Any] = {"last": time.monotonic(), "thread": None}


class Bar(tqdm):
    """A bar that also counts where it is not drawn, in a file."""

    monitor_interval = 0  # tqdm's own thread is not needed beside ours

    def __init__(self, works: Collection[Any] | None = None, **how: Any):
        """A bar of no works is not drawn. The time left is told by the mean speed: tqdm's follows the last draws."""
        is_empty = works is not None and not works
        super().__init__(works, **{"leave": False, "disable": is_empty or None, "smoothing": 0, "miniters": 0} | how)
        self.what, self.kind = how.get("desc") or "", how.get("unit", "")
        self.from_n, self.begun = self.n, time.monotonic()
        _watch(self)

    def __iter__(self) -> Iterator[Any]:
        if not self.disable:
            yield from super().__iter__()
            return
        try:
            for one in self.iterable:
                yield one
                self.n += 1
        finally:
            self.close()

    def update(self, n: float | None = 1) -> Any:
        if not self.disable:
            return super().update(n)
        self.n += n or 0
        return None

    def show(self, done: int, amount: float, unit: str) -> None:
        """`done` of them are done, and so much of a unit, whose speed it shows."""
        if not self.disable:
            self.set_postfix_str(f"{amount / self.format_dict['elapsed']:,.0f} {unit}/s", refresh=False)
        self.update(done - self.n)

    def state(self) -> str:
        """ "sampling: 23 of 64 rows, about 40 s left"; before the first is done, how long it has taken so far."""
        done, seconds = self.n - self.from_n, time.monotonic() - self.begun
        far = f"{self.n:g}" + (f" of {self.total}" if self.total else "") + (f" {self.kind}s" if self.kind else "")
        more = self.total - self.n if self.total else 0
        left = f"about {format_duration(seconds / done * more)} left" if done > 0 and more > 0 else ""
        what = f"{self.what}: {far}" if self.total or self.n else self.what
        return f"{what}, {left or f'{format_duration(seconds)} so far'}"

    def close(self) -> None:
        _works.pop(id(self), None)
        if not self.disable:
            self.refresh()  # what was drawn last may be old, and a transcript keeps it
        super().close()


def show_activity(what: str) -> Bar:
    """Inside, says `what` goes on, if that is long: nobody knows how long."""
    return Bar(desc=what, disable=True)


def wrap_for_terminal(text: str, file: Any = None) -> str:
    """
    Text for a terminal: what is too long breaks at spaces, but neither within a figure or a command to copy nor between
    a flag and its value. Files get it as it is.
    """
    if not (file or sys.stdout).isatty():
        return text
    width = shutil.get_terminal_size().columns
    return "\n".join(line if len(line) <= width else _break_line(line, width) for line in text.split("\n"))


def _break_line(line: str, width: int) -> str:
    whole = r"[^| ][^|]*" if " | " in line else r"uv run .*?(?=[;,] |$)|--[a-z-]+ \S"  # breaks nowhere
    kept = re.sub(whole, lambda found: found[0].replace(" ", "\xa0"), line)
    how: Any = {"break_on_hyphens": False, "break_long_words": False}  # a command is one word, which a terminal breaks
    indent = " " * (len(line) - len(line.lstrip()) + 2)
    return textwrap.fill(kept, width, subsequent_indent=indent, **how).replace("\xa0", " ")


def format_duration(seconds: float) -> str:
    """Formats seconds as seconds, minutes, or hours and minutes."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60:02d} min"


def note_printed() -> None:
    """Something else was printed just now."""
    _state["last"] = time.monotonic()


def show_progress() -> None:
    """Draws the bars again, with their time, or says in a line what goes on."""
    note_printed()
    works = list(_works.values())
    for bar in [work for work in works if not work.disable]:
        bar.refresh()
    if works and works[-1].disable:
        tqdm.write("... " + "; ".join(work.state() for work in works if work.disable), file=sys.stderr)
        sys.stderr.flush()


def _watch(work: Bar) -> None:
    """Notes a work, and starts the thread that looks after all, once a process; a fork begins without it."""
    _works[id(work)] = work
    thread = _state["thread"]
    if thread is None or not thread.is_alive():
        note_printed()
        _state["thread"] = threading.Thread(target=_keep_watching, name="signs of life", daemon=True)
        _state["thread"].start()


def is_watched() -> bool:
    """Whether errors go to a terminal or a pipe; a notebook's stream has no file."""
    try:
        return sys.stderr.isatty() or stat.S_ISFIFO(os.fstat(sys.stderr.fileno()).st_mode)
    except (OSError, ValueError):
        return False


def _keep_watching() -> None:
    while True:
        time.sleep(1.0)
        most = WATCHED if is_watched() else IN_FILE
        if _works and time.monotonic() - _state["last"] >= most:
            with contextlib.suppress(OSError, ValueError):  # of a terminal that is gone, of a file that is closed
                show_progress()
