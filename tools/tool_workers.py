"""
Threads that run calls of tools and environments. Each call has a time limit.

Each worker is one thread, which makes its environment and runs all of the environment's methods.
The coroutines of all workers share one event loop. Tools are the user's code and run in this
process without a sandbox, so a call that hangs occupies its thread until the process ends. This
file does not cover which calls are run (tools/episodes.py), or the processes that read hostile text
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

from rewards.functions import UserFunctionError, describe_error_in_function
from rewards.rewards import wrap_in_coroutine

PATIENCE = 1.0  # how many seconds a process waits for its tools before it ends
WORKERS: "weakref.WeakSet[ToolWorker]" = weakref.WeakSet()


class CallResult(NamedTuple):
    """The value that a call of a tool returned, or the error that the call raised."""

    value: Any = None
    error: BaseException | str | None = None
    seconds: float = 0.0


@functools.cache
def _shared_event_loop() -> asyncio.AbstractEventLoop:
    """The event loop for the coroutines of all workers, which runs in its own thread."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    return loop


class ToolWorker:
    """A thread that runs one job after another, and the environment that its jobs use."""

    instance: Any = None  # the environment
    call_start = math.inf  # when the current call began, by `time.monotonic()`

    def __init__(self, limit: float):
        """limit: the maximum number of seconds that a call may take."""
        self.limit = limit
        # the coroutine that was started last
        self.task: concurrent.futures.Future[Any] | None = None
        self.jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._run_jobs, daemon=True)
        self.thread.start()
        WORKERS.add(self)

    def _run_jobs(self) -> None:
        while (job := self.jobs.get()) is not None:
            job()

    def call_and_await(self, fn: Callable[[], Any]) -> CallResult:
        """
        Calls a function, and awaits the returned value if that is a coroutine.

        Only the worker's own thread may call this method.
        """
        start = time.monotonic()
        self.call_start = start
        value = None
        error = None
        try:
            value = fn()
            if inspect.isawaitable(value):
                task = asyncio.run_coroutine_threadsafe(
                    wrap_in_coroutine(value), _shared_event_loop()
                )
                self.task = task
                value = task.result()
        # BaseException includes SystemExit, which must end only this call
        except BaseException as raised:
            value = None
            error = raised
        self.call_start = math.inf
        return CallResult(value, error, time.monotonic() - start)

    def run_or_raise(self, error_prefix: str, fn: Callable[[], Any]) -> Any:
        """
        Calls a function in the worker's thread and returns its value.

        Raises ValueError, whose message starts with `error_prefix`, if the call fails or takes too
        long.
        """
        results: queue.SimpleQueue[CallResult] = queue.SimpleQueue()
        self.jobs.put(lambda: results.put(self.call_and_await(fn)))
        try:
            result = results.get(timeout=self.limit)
        except queue.Empty:
            self.end_after_current_job()
            raise UserFunctionError(
                f"{error_prefix} took longer than --tool-timeout {self.limit:g}; "
                "raise the limit or make the call faster"
            ) from None

        error = result.error
        if isinstance(error, BaseException):
            raised = describe_error_in_function(error, getattr(fn, "func", fn))
            raise UserFunctionError(f"{error_prefix} {raised}") from None
        return result.value

    def end_after_current_job(self) -> None:
        """Makes the thread end after its current job, if this job ever ends."""
        self.jobs.put(None)
        if self.task is not None:
            self.task.cancel()


@contextlib.contextmanager
def end_tool_threads_on_exit() -> Iterator[None]:
    """
    A context manager for a command, which ends all tool threads before the process exits.

    If Python exited normally while a thread was inside MLX, the process would crash. So if the
    thread of a tool hangs, the process is ended without Python's usual cleanup, with the same exit
    status as otherwise.
    """
    try:
        yield
    finally:
        error = sys.exc_info()[1]
        for worker in WORKERS:
            worker.end_after_current_job()
        deadline = time.monotonic() + PATIENCE
        for worker in WORKERS:
            worker.thread.join(max(deadline - time.monotonic(), 0))
        if any(worker.thread.is_alive() for worker in WORKERS):
            _exit_at_once(error)


def _exit_at_once(error: BaseException | None) -> None:
    """
    Ends the process with the exit status for an error.

    error: None if there was no error.
    """
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
        status = 0 if status is None else 1  # a SystemExit whose code is a string means an error
    os._exit(status)


@contextlib.contextmanager
def seed_random_temporarily(seed_text: str) -> Iterator[None]:
    """
    Inside the `with` block, `random` and `numpy.random` are seeded with a text.

    Their earlier states are restored at the end.
    """
    random_state = random.getstate()
    numpy_state = np.random.get_state()
    seed = zlib.crc32(seed_text.encode())
    random.seed(seed)
    np.random.seed(seed)
    try:
        yield
    finally:
        random.setstate(random_state)
        np.random.set_state(numpy_state)
