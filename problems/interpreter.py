"""
Python for a model, `--tools problems.interpreter:python`: each call in a process of its own, which only computes.

Left out: the process and its seal (problems/workers.py, problems/seal.py); docs/tools.md says what gets through.
"""

import contextlib
import importlib
import io
import math
import os
import resource
import sys
import threading
import time
from collections.abc import Callable

from problems import workers

SECONDS = 5.0  # of processor time
LONGEST = 5_000  # characters that a call may print: as JSON at most the 64 KB of a frame
# what code may import, as nothing is read from the disk once the seal is on
MODULES = (
    "bisect cmath collections copy datetime decimal fractions functools heapq itertools json math operator random re "
    "statistics string"
).split()


def python(code: str) -> str:
    """
    Runs Python code and gives what it prints.

    Args:
        code: The code. It has the standard library's modules for computing, no files and no network.
    """
    answer = workers.ask_once(f"{__name__}:make_runner", code, SECONDS)
    if answer.error:
        raise ValueError(answer.error)
    return str(answer.value)


python.gate = threading.BoundedSemaphore(os.cpu_count() or 1)  # type: ignore[attr-defined]  # calls at once


def make_runner() -> Callable[[str], str]:
    """What answers inside the process, which the kernel ends a second after `SECONDS`, whatever the code catches."""
    for name in MODULES:
        importlib.import_module(name)
    most = math.ceil(time.process_time() + SECONDS) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (most, most + 1))  # the second for code that ignores the first's signal

    def run(code: str) -> str:
        printed = sys.stdout = io.StringIO()
        with contextlib.suppress(SystemExit):
            exec(compile(code, "<code>", "exec"), {"__name__": "__main__"})
        if len(text := printed.getvalue()) > LONGEST:
            raise ValueError(f"the code printed more than {LONGEST} characters")
        return text

    run.runs_code = True  # type: ignore[attr-defined]
    return run
