"""
A seal for a process that reads hostile text. A sealed process can only compute and use channels
that are already open.

There are three walls. Python's audit hook refuses and records every action that reading a text does
not need. System limits bound memory, files and processes. The kernel refuses system calls: through
seccomp on Linux, and through the sandbox `pure-computation` on macOS. docs/data.md lists what each
wall stops on each system.

Python code that runs inside the process could still claim any score for its own text, because a
process cannot be sealed against itself. Therefore no scorer evaluates an answer as Python; see
rewards/formulas.py. This file does not cover the processes and their questions
(sandbox/workers.py).
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

# bytes of address space on Linux; on macOS bytes of the footprint, which the owner watches
MEMORY = 2**30
# environment variables that a sealed process gets; no API key is among them
PASSED_VARIABLES = (
    "PATH LANG LC_ALL LC_CTYPE LD_LIBRARY_PATH DYLD_LIBRARY_PATH PYTHONDONTWRITEBYTECODE "
    "PYTHONPYCACHEPREFIX"
).split()
# The audit events of computer algebra, which parses, copies, makes arrays and reads the signatures
# of functions.
HARMLESS = frozenset(
    {"compile", "builtins.id", "array.__new__", "__code__", "__defaults__", "__kwdefaults__"}
)

# System calls that computing and answering may need: name, number on x86-64, number on arm64
_CALLS = """
read 0 63, write 1 64, close 3 57, fstat 5 80, lseek 8 62, mmap 9 222, mprotect 10 226,
munmap 11 215, brk 12 214, rt_sigaction 13 134, rt_sigprocmask 14 135, rt_sigreturn 15 139,
sched_yield 24 124, mremap 25 216, madvise 28 233, nanosleep 35 101, setitimer 38 103,
getpid 39 172, exit 60 93, futex 202 98, restart_syscall 219 128, clock_gettime 228 113,
clock_nanosleep 230 115, exit_group 231 94, getrandom 318 278
"""
# machine -> its column in `_CALLS`, AUDIT_ARCH, SYS_seccomp
_MACHINES = {"x86_64": (1, 0xC000003E, 317), "aarch64": (2, 0xC00000B7, 277)}


def environment(home: str) -> dict[str, str]:
    """The environment variables of a sealed process. home: its only directory, which is empty."""
    passed = {name: os.environ[name] for name in PASSED_VARIABLES if name in os.environ}
    return passed | {"HOME": home, "TMPDIR": home}


def seal_process(refused: list[str]) -> str:
    """
    Seals this process for good.

    refused: the audit hook adds the first event that it refuses to this list.
    Returns a text that names what the kernel does not enforce on this system; "" if nothing.
    """
    os.dup2(1, 2)  # stderr becomes stdout, which nobody reads
    # code that prints does not fail, and nothing appears
    sys.stdout = None
    sys.stderr = None
    missing = ""
    if sys.platform == "darwin":
        missing = _apply_sandbox()

    # NOFILE: open files stay open, and no further file can be opened
    limits = {"CORE": 0, "FSIZE": 0, "NOFILE": 0, "NPROC": 0}
    if sys.platform == "linux":
        limits["AS"] = MEMORY
    for name, limit in limits.items():
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (limit, limit))
    if sys.platform == "linux":
        missing = _apply_seccomp()
    sys.addaudithook(_make_hook(refused))
    return missing


def _make_hook(refused: list[str]) -> Callable[[str, tuple[Any, ...]], None]:
    """
    Makes the audit hook.

    The hook uses no global name, because hostile code could assign another object to that name.
    """
    harmless = HARMLESS
    refusal = RuntimeError

    def refuse(event: str, arguments: tuple[Any, ...]) -> None:
        action = arguments[1] if event == "object.__getattr__" else event
        if action not in harmless:
            if not refused:
                refused.append(event)
            raise refusal(f"{event} is refused here")

    return refuse


def _apply_seccomp() -> str:
    """
    Makes Linux refuse all system calls except `_CALLS` with EPERM, in all threads, for good.

    Returns the reason if that fails, else "".
    """
    if platform.machine() not in _MACHINES:
        return f"no table of system calls for {platform.machine()}"
    column, architecture, seccomp = _MACHINES[platform.machine()]
    numbers = [int(call.split()[column]) for call in _CALLS.split(",")]

    # BPF instructions: (code, jump if true, jump if false, operand)
    load = 0x20  # loads a word of the system call's record
    equal = 0x15  # compares, and jumps in either case
    give = 0x06  # returns the verdict
    kill = 0x80000000
    refuse = 0x00050000 | errno.EPERM
    allow = 0x7FFF0000
    code = [(load, 0, 0, 4), (equal, 1, 0, architecture), (give, 0, 0, kill), (load, 0, 0, 0)]
    for place, number in enumerate(numbers):
        code.append((equal, len(numbers) - place, 0, number))
    code += [(give, 0, 0, refuse), (give, 0, 0, allow)]
    packed = b"".join(struct.pack("HBBI", *instruction) for instruction in code)
    program = ctypes.create_string_buffer(packed)

    libc = ctypes.CDLL(None, use_errno=True)
    word = ctypes.c_ulong
    # PR_SET_NO_NEW_PRIVS, without which only root may set a filter
    libc.prctl(38, word(1), word(0), word(0), word(0))
    filter_record = struct.pack("HP", len(code), ctypes.addressof(program))
    # SECCOMP_SET_MODE_FILTER, in all threads
    failed = libc.syscall(word(seccomp), word(1), word(1), filter_record)
    return f"seccomp: {os.strerror(ctypes.get_errno())}" if failed else ""


def _apply_sandbox() -> str:
    """
    Turns on macOS's own sandbox, which forbids files, connections, processes and services.

    Apple has called this function deprecated since 2011. Returns the reason if it fails, else "".
    """
    system = ctypes.CDLL("/usr/lib/libSystem.B.dylib")
    if not hasattr(system, "sandbox_init"):
        return "this macOS has no sandbox_init"
    profile = ctypes.c_char.in_dll(system, "kSBXProfilePureComputation")
    message = ctypes.c_char_p()
    is_named = ctypes.c_uint64(1)
    failed = system.sandbox_init(ctypes.byref(profile), is_named, ctypes.byref(message))
    return f"sandbox: {(message.value or b'?').decode(errors='replace')}" if failed else ""
