"""
A seal on the process that reads hostile text. Afterwards it only computes and uses open channels.

There are three walls. Python's audit hook refuses everything that reading a text does not need, and
records the attempt. Limits of the system bound memory, files and processes. The kernel refuses
system calls: by seccomp on Linux, by the sandbox `pure-computation` on macOS. docs/data.md says
what each wall stops, and where.

Python code that runs inside could still claim any score for its own text: a process is no boundary
to itself. Therefore no scorer evaluates an answer as Python; see rewards/formulas.py.
This file does not cover the processes and their questions (sandbox/workers.py).
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

# bytes: of address space on Linux; on macOS of the process's footprint, which the owner watches
MEMORY = 2**30
# environment variables that a sealed process gets; no API key is among them
PASSED_VARIABLES = (
    "PATH LANG LC_ALL LC_CTYPE LD_LIBRARY_PATH DYLD_LIBRARY_PATH PYTHONDONTWRITEBYTECODE "
    "PYTHONPYCACHEPREFIX"
).split()
# The audit events of computer algebra: it parses, copies, makes arrays and reads the signature of a
# function.
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
# machine -> column of `_CALLS`, AUDIT_ARCH, SYS_seccomp
_MACHINES = {"x86_64": (1, 0xC000003E, 317), "aarch64": (2, 0xC00000B7, 277)}


def environment(home: str) -> dict[str, str]:
    """The environment variables of a sealed process. home: an empty directory, all of its disk."""
    passed = {name: os.environ[name] for name in PASSED_VARIABLES if name in os.environ}
    return passed | {"HOME": home, "TMPDIR": home}


def seal_process(refused: list[str]) -> str:
    """
    Seals this process for good.

    refused: gets the first event that the audit hook refuses.
    Returns what the kernel does not enforce here, or "".
    """
    os.dup2(1, 2)  # stdout, which nobody reads
    # whoever prints does not fail, and nothing appears
    sys.stdout = None
    sys.stderr = None
    missing = ""
    if sys.platform == "darwin":
        missing = _apply_sandbox()

    # NOFILE: open files stay open, no file is added
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

    The hook uses no global name, because text that runs could give the name another meaning.
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
    Makes Linux answer EPERM to all system calls except `_CALLS`, in all threads, for good.

    Returns why it could not, or "".
    """
    if platform.machine() not in _MACHINES:
        return f"no table of system calls for {platform.machine()}"
    column, architecture, seccomp = _MACHINES[platform.machine()]
    numbers = [int(call.split()[column]) for call in _CALLS.split(",")]

    # BPF instructions: (code, jump if true, jump if false, operand)
    load = 0x20  # a word of the call's record
    equal = 0x15  # a comparison with two jumps
    give = 0x06  # the verdict
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
    # PR_SET_NO_NEW_PRIVS: without it only root may set a filter
    libc.prctl(38, word(1), word(0), word(0), word(0))
    filter_record = struct.pack("HP", len(code), ctypes.addressof(program))
    # SECCOMP_SET_MODE_FILTER, in all threads
    failed = libc.syscall(word(seccomp), word(1), word(1), filter_record)
    return f"seccomp: {os.strerror(ctypes.get_errno())}" if failed else ""


def _apply_sandbox() -> str:
    """
    Puts macOS's own sandbox on: no file, connection, process or service.

    Apple calls it deprecated since 2011. Returns why it could not, or "".
    """
    system = ctypes.CDLL("/usr/lib/libSystem.B.dylib")
    if not hasattr(system, "sandbox_init"):
        return "this macOS has no sandbox_init"
    profile = ctypes.c_char.in_dll(system, "kSBXProfilePureComputation")
    message = ctypes.c_char_p()
    is_named = ctypes.c_uint64(1)
    failed = system.sandbox_init(ctypes.byref(profile), is_named, ctypes.byref(message))
    return f"sandbox: {(message.value or b'?').decode(errors='replace')}" if failed else ""
