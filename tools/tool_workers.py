"""
Threads in which tools and environments run, each call with a time limit.

A worker is one thread. It makes its environment and runs all methods of that environment. The
coroutines of all workers share one event loop. Tools are the user's code. They run in this process,
without a sandbox, so a call that hangs occupies its thread until the process ends. This file does
not cover the choice of calls (tools/episodes.py) and the processes that read hostile text
(sandbox/workers.py).
"""

import asyncio
import concurrent.futures
import contextlib
import functools
import inspect
import math
import os
import queue
import random
import sys
import threading
import time
import traceback
import weakref
import zlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from rewards.functions import describe_raised
from rewards.rewards import await_any

PATIENCE = 1.0  # seconds that an ending process waits for its tools
WORKERS: "weakref.WeakSet[Worker]" = weakref.WeakSet()


class CallResult(NamedTuple):
    """The value of a call, or the error that took its place."""

    value: Any = None
    error: BaseException | str | None = None
    seconds: float = 0.0


@functools.cache
def _event_loop() -> asyncio.AbstractEventLoop:
    """The event loop of all coroutines. It runs in a thread of its own."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    return loop


class Worker:
    """A thread that does one job after another, and the environment that it uses."""

    instance: Any = None  # the environment
    call_start = math.inf  # `time.monotonic()` at which the current call began

    def __init__(self, limit: float):
        """limit: the most seconds of a call."""
        self.limit = limit
        self.task: concurrent.futures.Future[Any] | None = None  # the newest coroutine
        self.jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._work, daemon=True)
        self.thread.start()
        WORKERS.add(self)

    def _work(self) -> None:
        while (job := self.jobs.get()) is not None:
            job()

    def run(self, fn: Callable[[], Any]) -> CallResult:
        """Calls a function and awaits its coroutine. Only the worker's thread may do this."""
        start = time.monotonic()
        self.call_start = start
        value = None
        error = None
        try:
            value = fn()
            if inspect.isawaitable(value):
                task = asyncio.run_coroutine_threadsafe(await_any(value), _event_loop())
                self.task = task
                value = task.result()
        except BaseException as raised:  # SystemExit too: it ends only the call
            value = None
            error = raised
        self.call_start = math.inf
        return CallResult(value, error, time.monotonic() - start)

    def run_or_raise(self, label: str, fn: Callable[[], Any]) -> Any:
        """
        Calls a function in the worker's thread and returns its value.

        Raises ValueError with a message that begins with the label if the call fails or takes too
        long.
        """
        results: queue.SimpleQueue[CallResult] = queue.SimpleQueue()
        self.jobs.put(lambda: results.put(self.run(fn)))
        try:
            result = results.get(timeout=self.limit)
        except queue.Empty:
            self.release()
            raise ValueError(
                f"{label} took longer than --tool-timeout {self.limit:g}; "
                "raise the limit or make the call faster"
            ) from None

        error = result.error
        if isinstance(error, BaseException):
            raised = describe_raised(error, getattr(fn, "func", fn))
            raise ValueError(f"{label} {raised}") from error
        return result.value

    def release(self) -> None:
        """Lets the thread end after its current job, if that job ever ends."""
        self.jobs.put(None)
        if self.task is not None:
            self.task.cancel()


@contextlib.contextmanager
def end_tools() -> Iterator[None]:
    """
    Wraps a command, so that the threads of its tools end before the process does.

    If a tool hangs, the process ends at once with its usual exit status. Python's own exit would
    abort while a thread is inside MLX.
    """
    try:
        yield
    finally:
        error = sys.exc_info()[1]
        for worker in WORKERS:
            worker.release()
        deadline = time.monotonic() + PATIENCE
        for worker in WORKERS:
            worker.thread.join(max(deadline - time.monotonic(), 0))
        if any(worker.thread.is_alive() for worker in WORKERS):
            _exit_at_once(error)


def _exit_at_once(error: BaseException | None) -> None:
    """Ends the process with the exit status for this error; None is a normal end."""
    if error is not None and not isinstance(error, SystemExit):
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()

    status: Any = None
    if isinstance(error, SystemExit):
        status = error.code
    elif error is not None:
        status = 1
    if not isinstance(status, int):
        status = 0 if status is None else 1  # SystemExit with a text means an error
    os._exit(status)


@contextlib.contextmanager
def seed_random(text: str) -> Iterator[None]:
    """Seeds `random` and `numpy.random` with a text, and restores their states afterwards."""
    random_state = random.getstate()
    numpy_state = np.random.get_state()
    seed = zlib.crc32(text.encode())
    random.seed(seed)
    np.random.seed(seed)
    try:
        yield
    finally:
        random.setstate(random_state)
        np.random.set_state(numpy_state)
