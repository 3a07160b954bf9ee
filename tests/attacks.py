"""
The functions that workers run in tests, and helpers of hostile code in a sealed worker.

attacks.yaml has the hostile code. This module imports little, since each worker imports it.
"""

import contextlib
import ctypes
import os
import platform
import signal
import sys
import time
from pathlib import Path

# The library and its functions are looked up before the seal, which refuses to look them up.
LIBC = ctypes.CDLL(None)
SYSCALL = LIBC.syscall
ERRNO = LIBC["__errno_location" if sys.platform == "linux" else "__error"]
ERRNO.restype = ctypes.POINTER(ctypes.c_int)


def fork_exec(path):
    """Starts a program with the internal function of `subprocess`, which raises no audit event."""
    command = [b"/bin/sh", b"-c", b"touch " + path.encode()]
    arguments = [command, command[:1], True, (), None, None]
    arguments += [-1] * 6
    arguments += [0, channel(), False, False, -1]
    arguments += [None] * 3
    arguments += [-1, None]
    return sys.modules["_posixsubprocess"].fork_exec(*arguments, True)


def switch_off(path):
    """Replaces names that the seal uses, as one answer once did, and then starts a program."""
    for name in ("__main__", "sandbox.seal", "builtins"):
        module = sys.modules[name]
        module.HARMLESS = {"open", "os.system"}
        module.FAMILIES = ()
        module.len = lambda _: 0
    return os.system(f"touch {path}")


def channel():
    """The number of the worker's socket, which is found by trying all."""
    for number in range(3, 64):
        with contextlib.suppress(OSError):
            os.write(number, b"")
            return number


def own_frame():
    """Sends the frame that the owner waits for, with the number of the question."""
    try:
        raise KeyError
    except KeyError as error:
        stack_frame = error.__traceback__.tb_frame
    while "number" not in stack_frame.f_locals:
        stack_frame = stack_frame.f_back
    os.write(channel(), frame(stack_frame.f_locals["number"], 1.0, "", False))
    return 0.0


NUMBERS = []  # the numbers of the questions so far
KEEP = []  # attacks.yaml keeps objects here


def frame(*content):
    return sys.modules["__main__"]._make_json_frame(*content)


def record_number(_, stack_frame):
    """
    A handler of a signal, which records the number of the question.

    Python gives it the interrupted stack frame, without an audit event.
    """
    while stack_frame and "number" not in stack_frame.f_locals:
        stack_frame = stack_frame.f_back
    NUMBERS.append(stack_frame.f_locals["number"] if stack_frame else 0)


def replay(num_back):
    """Sends a frame with the number of this question, or of the question `num_back` before it."""
    signal.signal(signal.SIGALRM, record_number)
    signal.setitimer(signal.ITIMER_REAL, 1e-3)
    time.sleep(0.01)
    index = max(-1 - num_back, -len(NUMBERS))
    os.write(channel(), frame(NUMBERS[index], 1.0, "", False))
    return 0.0


class Runs:
    """Its pickle runs a program when it is loaded."""

    def __reduce__(self):
        return os.system, ("touch /tmp/gwen-planted-by-an-answer",)


def later(seconds):
    """Sends a frame with a wrong number later, while the worker answers the next question."""
    number = channel()
    signal.signal(signal.SIGALRM, lambda *_: os.write(number, frame(7, 1.0, "", False)))
    signal.setitimer(signal.ITIMER_REAL, seconds)


class Never:
    """An object that ends the process when it is printed."""

    def __str__(self):
        raise SystemExit("no line of an error")


def syscall(number):
    """Makes a system call by its number; returns its error, or 0."""
    return ERRNO()[0] if SYSCALL(number, *[0] * 6) == -1 else 0


def sleep_despite_alarms(seconds):
    """Sleeps, and catches the alarm as a library with a bare `except` does."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        with contextlib.suppress(BaseException):
            time.sleep(seconds)


def wait_for_workers(folder, num):
    """Waits until `num` workers have written a file into a directory."""
    (Path(folder) / f"{os.getpid()}").touch()
    while len(os.listdir(folder)) < num:
        time.sleep(0.01)


def compute_power(x):
    """Computes a power with one multiplication of minutes, which no signal interrupts."""
    return len(str(9**9**x))


ACTIONS = {
    "double": lambda x: 2 * x,
    "sleep": time.sleep,
    "syscall": syscall,
    "stubborn": sleep_despite_alarms,
    "meet": wait_for_workers,
    "power": compute_power,
    "count": lambda x: sum(1 for _ in range(x)),
    "leave": os._exit,
    "fail": lambda x: [][x],
    "lambda": lambda x: lambda: x,
    "name": lambda x: os.getpid(),
    "hash": lambda x: hash("words"),
}


def answerer(machine="", sources=None, path=""):
    """
    The function that answers questions in a worker: (name of an action, its arguments).

    machine: the name of a processor to pretend, or "refuse" or "crash". sources: more actions, as
    expressions in which P is `path`. They are compiled before the seal, which refuses `exec`.
    """
    if machine == "refuse":
        raise ValueError("--flag is wrong")
    if machine == "crash":
        os._exit(3)
    if machine:
        platform.machine = lambda: machine
    for name in "sqlite3 socket gc _posixsubprocess subprocess pickle functools".split():
        __import__(name)
    for name, source in (sources or {}).items():
        ACTIONS[name] = eval(f"lambda *_: {source}", globals() | sys.modules | {"P": path})
    channel()

    def answer(question):
        name, *arguments = question
        return ACTIONS[name](*arguments)

    return answer
