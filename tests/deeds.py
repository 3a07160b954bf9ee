"""What workers do in tests. It imports next to nothing: every worker that starts pays for it."""

import contextlib
import os
import time
from pathlib import Path


def stubborn(seconds):
    """Catches the alarm, as a library with a bare `except` does."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        with contextlib.suppress(BaseException):
            time.sleep(seconds)
    return "awake"


def meet(folder, num):
    """Waits until this many have come."""
    (Path(folder) / f"{os.getpid()}").touch()
    while len(os.listdir(folder)) < num:
        time.sleep(0.01)


DEEDS = {
    "double": lambda x: 2 * x,
    "sleep": time.sleep,
    "stubborn": stubborn,
    "meet": meet,
    "power": lambda x: len(str(9**9**x)),  # one multiplication of minutes, which no signal interrupts
    "count": lambda x: sum(1 for _ in range(x)),
    "leave": os._exit,
    "fail": lambda x: [][x],
    "lambda": lambda x: lambda: x,
    "name": lambda x: os.getpid(),
    "hash": lambda x: hash("words"),
}


def answerer(greeting="hello"):
    if greeting == "refuse":
        raise ValueError("--flag is wrong")
    if greeting == "crash":
        os._exit(3)
    return lambda deed: DEEDS[deed[0]](*deed[1:])
