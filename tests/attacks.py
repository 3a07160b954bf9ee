"""What code that got into a sealed worker would do, by Python and below it. It imports next to nothing, as `deeds`."""

import contextlib
import ctypes
import os
import platform
import signal
import sys
import time
from pathlib import Path

LIBC = ctypes.CDLL(None, use_errno=True)  # opened before the seal: its functions raise no audit event
BELOW = {  # system calls by their C functions; each must fail
    "open": (b"/etc/passwd", 0),
    "open key": (b"/proc/%d/environ" % os.getppid(), 0),
    "creat": (b"planted", 0o600),
    "mkdir": (b"planted", 0o700),
    "symlink": (b"/etc/passwd", b"planted"),
    "unlink": (b"planted",),
    "rename": (b"planted", b"elsewhere"),
    "chmod": (b"/tmp", 0o777),
    "chdir": (b"/",),
    "fork": (),
    "execv": (b"/bin/true", None),
    "socket": (2, 1, 0),
    "pipe": (ctypes.create_string_buffer(8),),
    "dup": (0,),
    "kill": (os.getppid(), 0),
    "killpg": (os.getpgid(os.getppid()), 0),
    "ptrace": (16, os.getppid(), 0, 0),
    "setrlimit": (7, ctypes.create_string_buffer(16)),
    "setuid": (0,),
    "mount": (b"none", b"/tmp", b"tmpfs", 0, None),
    "unshare": (0x10000000,),
    "prctl": (1, 9),
    "shmget": (0, 4096, 0o1600),
    "memfd_create": (b"x", 0),
    "syscall": (425, 8, ctypes.create_string_buffer(120)),  # io_uring_setup
}
CALLS = {name: getattr(LIBC, name.split()[0]) for name in BELOW}


def below(name):
    """Whether the kernel let a call through; `fork` would answer twice."""
    parent, given = os.getpid(), CALLS[name](*BELOW[name])
    if os.getpid() != parent:
        os._exit(0)
    return given != -1


def fork_exec(path):
    """What `subprocess` ends in, which raises no audit event."""
    shell = [b"/bin/sh", b"-c", b"touch " + path.encode()]
    given = (shell, shell[:1], True, (), None, None, *[-1] * 6, 0, channel(), False, False, -1, *[None] * 3, -1, None)
    return sys.modules["_posixsubprocess"].fork_exec(*given, True)


def switch_off(path):
    """Gives the seal's own names another meaning, as one answer once did, and then starts a program."""
    for name in ("__main__", "problems.seal", "builtins"):
        module = sys.modules[name]
        for switch, value in {"HARMLESS": {"open", "os.system"}, "FAMILIES": (), "len": lambda _: 0}.items():
            setattr(module, switch, value)
    return os.system(f"touch {path}")


def channel():
    """The socket, found by trying."""
    for number in range(3, 64):
        with contextlib.suppress(OSError):
            os.write(number, b"")
            return number


def say(data, times=1, then=0.0):
    for _ in range(times):
        os.write(channel(), bytes.fromhex(data))
    time.sleep(then)
    return "honest"


def say_later(data):
    """Leaves a handler behind that speaks while the next answer is read."""
    number = channel()
    signal.signal(signal.SIGALRM, lambda *_: os.write(number, bytes.fromhex(data)))
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    return "honest"


def own_frame():
    """The very frame that the owner waits for, with the number that it sent."""
    try:
        raise KeyError
    except KeyError as error:
        frame = error.__traceback__.tb_frame
    while "number" not in frame.f_locals:
        frame = frame.f_back
    os.write(channel(), sys.modules["__main__"]._frame(frame.f_locals["number"], 1.0, "", False))
    return 0.0


NUMBERS, KEEP = [], []


def frame(*content):
    return sys.modules["__main__"]._frame(*content)


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


def later(seconds):
    """Sends, when the next question is being answered, a frame with a number that is not its own."""
    number = channel()
    signal.signal(signal.SIGALRM, lambda *_: os.write(number, frame(7, 1.0, "", False)))
    signal.setitimer(signal.ITIMER_REAL, seconds)


class Never:
    def __str__(self):
        raise SystemExit("no line of an error")


DEEDS = {
    "double": lambda x: 2 * x,
    "sleep": time.sleep,
    "environment": lambda: dict(os.environ),
    "read": lambda path: Path(path).read_text(),
    "hoard": lambda num: [bytearray(num), time.sleep(60)],
    "print": lambda text: print(text) or print(text, file=sys.stderr) or 1,
    "below": below,
    "syscall": lambda number: LIBC.syscall(number, 0, 0, 0, 0, 0, 0),
    "fork_exec": fork_exec,
    "switch_off": switch_off,
    "say": say,
    "say_later": say_later,
}


def answerer(machine="", sources=None, path=""):
    """sources: expressions by name, where P is the path, compiled before the seal, which refuses `exec`."""
    if machine:
        platform.machine = lambda: machine
    for name in ("sqlite3", "socket", "gc", "_posixsubprocess", "subprocess", "pickle"):
        __import__(name)
    for name, source in (sources or {}).items():
        DEEDS[name] = eval(f"lambda: {source}", globals() | sys.modules | {"P": path})
    channel()
    return lambda deed: DEEDS[deed[0]](*deed[1:])
