"""
A seal on the process that reads hostile text: from then on it computes, and speaks over what is open already.

Three walls stand one behind the other. Python's audit hook refuses whatever reading a text does not need, and says that
it was tried. Limits of the system bound memory, files and processes. The kernel refuses the system calls themselves:
by seccomp on Linux, by the sandbox `pure-computation` on macOS. What each holds, and where, is in docs/data.md.

Python code that ran inside could still claim any score for its own text: one process is no boundary to itself. So no
scorer evaluates an answer in the first place; see `problems/formulas.py`.
"""

import ctypes
import errno
import os
import platform
import resource
import struct
import sys
from collections.abc import Callable
from typing import Any

MEMORY = (
    2**30
)  # bytes: of address space on Linux; of what macOS counts for it, which the owner watches, there
KEPT = (  # of the environment: no key of an API is among them
    "PATH LANG LC_ALL LC_CTYPE LD_LIBRARY_PATH DYLD_LIBRARY_PATH PYTHONDONTWRITEBYTECODE PYTHONPYCACHEPREFIX"
).split()
# What computer algebra does of what Python audits: it parses, copies, makes arrays, reads the signature of a function
HARMLESS = frozenset(
    {"compile", "builtins.id", "array.__new__", "__code__", "__defaults__", "__kwdefaults__"}
)

# System calls that an answer may need, to compute and to speak: names, numbers on x86-64, on arm64
_CALLS = """
read 0 63, write 1 64, close 3 57, fstat 5 80, lseek 8 62, mmap 9 222, mprotect 10 226, munmap 11 215, brk 12 214,
rt_sigaction 13 134, rt_sigprocmask 14 135, rt_sigreturn 15 139, sched_yield 24 124, mremap 25 216, madvise 28 233,
nanosleep 35 101, setitimer 38 103, getpid 39 172, exit 60 93, futex 202 98, restart_syscall 219 128,
clock_gettime 228 113, clock_nanosleep 230 115, exit_group 231 94, getrandom 318 278
"""
_MACHINES = {
    "x86_64": (1, 0xC000003E, 317),
    "aarch64": (2, 0xC00000B7, 277),
}  # column, architecture, SYS_seccomp


def environment(home: str) -> dict[str, str]:
    """What of this process's environment a sealed one gets; `home`, an empty directory, is all the disk it has."""
    return {name: os.environ[name] for name in KEPT if name in os.environ} | {
        "HOME": home,
        "TMPDIR": home,
    }


def seal_process(refused: list[str]) -> str:
    """Seals this process for good; what its kernel does not hold, or "". refused: gets what the hook refuses."""
    os.dup2(1, 2)  # where nobody reads
    sys.stdout = sys.stderr = None  # who prints does not fail, and is not heard
    missing = _sandbox() if sys.platform == "darwin" else ""
    limits = {
        "CORE": 0,
        "FSIZE": 0,
        "NOFILE": 0,
        "NPROC": 0,
    }  # NOFILE: what is open stays, nothing is added
    for name, most in (limits | ({"AS": MEMORY} if sys.platform == "linux" else {})).items():
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (most, most))
    if sys.platform == "linux":
        missing = _seccomp()
    sys.addaudithook(_refuse(refused))
    return missing


def _refuse(refused: list[str]) -> Callable[[str, tuple[Any, ...]], None]:
    """The audit hook. It uses no global name: text that runs could give that another meaning."""
    harmless, error = HARMLESS, RuntimeError

    def refuse(event: str, arguments: tuple[Any, ...]) -> None:
        if (arguments[1] if event == "object.__getattr__" else event) not in harmless:
            if not refused:
                refused.append(event)
            raise error(f"{event} is refused here")

    return refuse


def _seccomp() -> str:
    """Makes Linux answer EPERM to every system call besides `_CALLS`, in all threads, for good."""
    if platform.machine() not in _MACHINES:
        return f"no table of system calls for {platform.machine()}"
    column, architecture, seccomp = _MACHINES[platform.machine()]
    numbers = [int(call.split()[column]) for call in _CALLS.split(",")]
    load, equal, give = (
        0x20,
        0x15,
        0x06,
    )  # BPF: a word of the call's record, a comparison with two jumps, the verdict
    code = [(load, 0, 0, 4), (equal, 1, 0, architecture), (give, 0, 0, 0x80000000), (load, 0, 0, 0)]
    code += [(equal, len(numbers) - place, 0, number) for place, number in enumerate(numbers)]
    code += [(give, 0, 0, 0x00050000 | errno.EPERM), (give, 0, 0, 0x7FFF0000)]
    program = ctypes.create_string_buffer(
        b"".join(struct.pack("HBBI", *instruction) for instruction in code)
    )
    libc, word = ctypes.CDLL(None, use_errno=True), ctypes.c_ulong
    libc.prctl(
        38, word(1), word(0), word(0), word(0)
    )  # PR_SET_NO_NEW_PRIVS: without it the filter is root's alone
    given = struct.pack("HP", len(code), ctypes.addressof(program))
    failed = libc.syscall(
        word(seccomp), word(1), word(1), given
    )  # SECCOMP_SET_MODE_FILTER, in all threads
    return f"seccomp: {os.strerror(ctypes.get_errno())}" if failed else ""


def _sandbox() -> str:
    """Puts macOS's own sandbox on: no file, connection, process or service. Apple calls it deprecated since 2011."""
    system = ctypes.CDLL("/usr/lib/libSystem.B.dylib")
    if not hasattr(system, "sandbox_init"):
        return "this macOS has no sandbox_init"
    profile = ctypes.c_char.in_dll(system, "kSBXProfilePureComputation")
    message, named = ctypes.c_char_p(), ctypes.c_uint64(1)
    failed = system.sandbox_init(ctypes.byref(profile), named, ctypes.byref(message))
    return f"sandbox: {(message.value or b'?').decode(errors='replace')}" if failed else ""
