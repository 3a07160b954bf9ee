"""What workers do in tests, and code that got into a sealed one; it imports little, as every worker pays for it."""

import contextlib
import ctypes
import os
import platform
import signal
import sys
import time
from pathlib import Path

LIBC = ctypes.CDLL(
    None
)  # opened before the seal, as its functions: looking them up is refused thereafter
SYSCALL, ERRNO = LIBC.syscall, LIBC["__errno_location" if sys.platform == "linux" else "__error"]
ERRNO.restype = ctypes.POINTER(ctypes.c_int)


def fork_exec(path):
    """What `subprocess` ends in, which raises no audit event."""
    shell = [b"/bin/sh", b"-c", b"touch " + path.encode()]
    given = (
        shell,
        shell[:1],
        True,
        (),
        None,
        None,
        *[-1] * 6,
        0,
        channel(),
        False,
        False,
        -1,
        *[None] * 3,
        -1,
        None,
    )
    return sys.modules["_posixsubprocess"].fork_exec(*given, True)


def switch_off(path):
    """Gives the seal's own names another meaning, as one answer once did, and then starts a program."""
    for name in ("__main__", "sandbox.seal", "builtins"):
        module = sys.modules[name]
        for switch, value in {
            "HARMLESS": {"open", "os.system"},
            "FAMILIES": (),
            "len": lambda _: 0,
        }.items():
            setattr(module, switch, value)
    return os.system(f"touch {path}")


def channel():
    """The socket, found by trying."""
    for number in range(3, 64):
        with contextlib.suppress(OSError):
            os.write(number, b"")
            return number


def own_frame():
    """The very frame that the owner waits for, with the number that it sent."""
    try:
        raise KeyError
    except KeyError as error:
        running = error.__traceback__.tb_frame
    while "number" not in running.f_locals:
        running = running.f_back
    os.write(channel(), frame(running.f_locals["number"], 1.0, "", False))
    return 0.0


NUMBERS, KEEP = [], []


def frame(*content):
    return sys.modules["__main__"]._make_json_frame(*content)


def look(_, running):
    """A signal's handler is given the frame that it interrupts, without an audit event: there is the number."""
    while running and "number" not in running.f_locals:
        running = running.f_back
    NUMBERS.append(running.f_locals["number"] if running else 0)


def replay(back):
    """Sends a frame with the number of this question, or of one that many before it."""
    signal.signal(signal.SIGALRM, look)
    signal.setitimer(signal.ITIMER_REAL, 1e-3)
    time.sleep(0.01)
    os.write(channel(), frame(NUMBERS[max(-1 - back, -len(NUMBERS))], 1.0, "", False))
    return 0.0


class Runs:
    def __reduce__(self):
        return os.system, ("touch /tmp/gwen-planted-by-an-answer",)


def later(seconds):
    """Sends, when the next question is being answered, a frame with a number that is not its own."""
    number = channel()
    signal.signal(signal.SIGALRM, lambda *_: os.write(number, frame(7, 1.0, "", False)))
    signal.setitimer(signal.ITIMER_REAL, seconds)


class Never:
    def __str__(self):
        raise SystemExit("no line of an error")


def syscall(number):
    """The error of a system call by its number; 0 where there is none."""
    return ERRNO()[0] if SYSCALL(number, *[0] * 6) == -1 else 0


def stubborn(seconds):
    """Catches the alarm, as a library with a bare `except` does."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        with contextlib.suppress(BaseException):
            time.sleep(seconds)


def meet(folder, num):
    """Waits until this many have come."""
    (Path(folder) / f"{os.getpid()}").touch()
    while len(os.listdir(folder)) < num:
        time.sleep(0.01)


DEEDS = {
    "double": lambda x: 2 * x,
    "sleep": time.sleep,
    "syscall": syscall,
    "stubborn": stubborn,
    "meet": meet,
    "power": lambda x: len(
        str(9**9**x)
    ),  # one multiplication of minutes, which no signal interrupts
    "count": lambda x: sum(1 for _ in range(x)),
    "leave": os._exit,
    "fail": lambda x: [][x],
    "lambda": lambda x: lambda: x,
    "name": lambda x: os.getpid(),
    "hash": lambda x: hash("words"),
}


def answerer(machine="", sources=None, path=""):
    """sources: expressions by name, where P is the path, compiled before the seal, which refuses `exec`."""
    if machine == "refuse":
        raise ValueError("--flag is wrong")
    if machine == "crash":
        os._exit(3)
    if machine:
        platform.machine = lambda: machine
    for name in (
        "sqlite3",
        "socket",
        "gc",
        "_posixsubprocess",
        "subprocess",
        "pickle",
        "functools",
    ):
        __import__(name)
    for name, source in (sources or {}).items():
        DEEDS[name] = eval(f"lambda *_: {source}", globals() | sys.modules | {"P": path})
    channel()
    return lambda deed: DEEDS[deed[0]](*deed[1:])
