"""
A seal for a process that reads hostile text.

A sealed process can do nothing except compute and use channels that were already open.

The seal consists of three walls. An audit hook in Python refuses and records every action that is
not needed to read a text. Resource limits restrict memory, files and processes. The kernel refuses
system calls, with seccomp on Linux and with the sandbox profile `pure-computation` on macOS.
docs/data.md lists which attacks each wall stops on each operating system.

Python code that runs inside a sealed process could still claim any score for its own text, because
a process cannot be sealed against itself. Therefore no scorer runs an answer as Python code; see
rewards/formulas.py. This file does not cover the processes and the questions that they answer
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

# The memory limit in bytes, which applies to the address space on Linux. On macOS the owner of the
# process watches its memory footprint instead.
MEMORY = 2**30
# The environment variables that are passed to a sealed process. None of them contains an API key.
PASSED_VARIABLES = (
    "PATH LANG LC_ALL LC_CTYPE LD_LIBRARY_PATH DYLD_LIBRARY_PATH PYTHONDONTWRITEBYTECODE "
    "PYTHONPYCACHEPREFIX"
).split()
# The audit events that sympy causes when it parses text, copies objects, makes arrays or reads the
# signatures of functions.
HARMLESS = frozenset(
    {"compile", "builtins.id", "array.__new__", "__code__", "__defaults__", "__kwdefaults__"}
)

# The system calls that a sealed process may need, each with its numbers on x86-64 and on arm64.
_CALLS = """
read 0 63, write 1 64, close 3 57, fstat 5 80, lseek 8 62, mmap 9 222, mprotect 10 226,
munmap 11 215, brk 12 214, rt_sigaction 13 134, rt_sigprocmask 14 135, rt_sigreturn 15 139,
sched_yield 24 124, mremap 25 216, madvise 28 233, nanosleep 35 101, setitimer 38 103,
getpid 39 172, exit 60 93, futex 202 98, restart_syscall 219 128, clock_gettime 228 113,
clock_nanosleep 230 115, exit_group 231 94, getrandom 318 278
"""
# machine -> (column in `_CALLS`, value of AUDIT_ARCH, number of the system call seccomp)
_MACHINES = {"x86_64": (1, 0xC000003E, 317), "aarch64": (2, 0xC00000B7, 277)}


def sealed_environment(home: str) -> dict[str, str]:
    """
    The environment variables of a sealed process.

    home: the path of an empty directory, which holds all files of the process.
    """
    passed = {name: os.environ[name] for name in PASSED_VARIABLES if name in os.environ}
    return passed | {"HOME": home, "TMPDIR": home}


def seal_process(refusal_log: list[str]) -> str:
    """
    Seals this process permanently.

    refusal_log: a list to which the audit hook adds the first event that it refuses.
    Returns a description of the part of the seal that this kernel cannot enforce; "" if the kernel
    enforces the whole seal.
    """
    os.dup2(1, 2)  # sends stderr to stdout, which nobody reads

    # with None, printing neither fails nor prints anything
    sys.stdout = None
    sys.stderr = None
    missing = ""
    if sys.platform == "darwin":
        missing = _apply_macos_sandbox()

    # a limit of 0 on NOFILE keeps open files open, and prevents opening any other file
    limits = {"CORE": 0, "FSIZE": 0, "NOFILE": 0, "NPROC": 0}
    if sys.platform == "linux":
        limits["AS"] = MEMORY
    for name, limit in limits.items():
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (limit, limit))
    if sys.platform == "linux":
        missing = _apply_seccomp()
    sys.addaudithook(_make_audit_hook(refusal_log))
    return missing


def _make_audit_hook(refusal_log: list[str]) -> Callable[[str, tuple[Any, ...]], None]:
    """
    Makes the audit hook, which raises an error for every event that is not harmless.

    The hook uses no global names, because hostile code could assign other objects to them.
    """
    harmless = HARMLESS
    refusal = RuntimeError

    def refuse_unless_harmless(event: str, arguments: tuple[Any, ...]) -> None:
        action = arguments[1] if event == "object.__getattr__" else event
        if action not in harmless:
            if not refusal_log:
                refusal_log.append(event)
            raise refusal(f"{event} is refused here")

    return refuse_unless_harmless


def _apply_seccomp() -> str:
    """
    Makes Linux refuse all system calls except those in `_CALLS`, permanently and in all threads.

    A refused call fails with EPERM. Returns the reason if the filter cannot be set, else "".
    """
    if platform.machine() not in _MACHINES:
        return f"there is no table of system calls for {platform.machine()}"
    column, architecture, seccomp = _MACHINES[platform.machine()]
    numbers = [int(call.split()[column]) for call in _CALLS.split(",")]

    # BPF instructions: (code, jump if true, jump if false, operand)
    load = 0x20  # loads a word of the record that describes the system call
    equal = 0x15  # compares with the operand, and jumps accordingly
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
    # option 38 is PR_SET_NO_NEW_PRIVS, without which only root may set a filter
    libc.prctl(38, word(1), word(0), word(0), word(0))
    filter_record = struct.pack("HP", len(code), ctypes.addressof(program))
    # operation 1 is SECCOMP_SET_MODE_FILTER, and flag 1 applies the filter to all threads
    failed = libc.syscall(word(seccomp), word(1), word(1), filter_record)
    return f"seccomp: {os.strerror(ctypes.get_errno())}" if failed else ""


def _apply_macos_sandbox() -> str:
    """
    Turns on the sandbox of macOS, which forbids files, connections, processes and services.

    Apple has called the function `sandbox_init` deprecated since 2011. Returns the reason if the
    function fails, else "".
    """
    system = ctypes.CDLL("/usr/lib/libSystem.B.dylib")
    if not hasattr(system, "sandbox_init"):
        return "this version of macOS has no function sandbox_init"
    profile = ctypes.c_char.in_dll(system, "kSBXProfilePureComputation")
    message = ctypes.c_char_p()
    is_named = ctypes.c_uint64(1)
    failed = system.sandbox_init(ctypes.byref(profile), is_named, ctypes.byref(message))
    return f"sandbox: {(message.value or b'?').decode(errors='replace')}" if failed else ""
