"""
Processes (workers) for questions that may hang or crash them. Each question has a time limit.

A process cannot reliably limit its own time: signals reach only its main thread, and no signal
interrupts one long multiplication. Therefore a worker sets an alarm for itself, and if the alarm
does not stop the worker, its owner kills it and starts another one.

A sealed worker reads hostile text. For each question its owner accepts one short frame: JSON that
contains the question's random number. The owner ends a worker that sends anything else. Nothing is
unpickled.

A worker builds its answering function once, by calling `module:function` with given arguments. This
file does not cover the questions and the seal itself (sandbox/seal.py).
"""

import atexit
import contextlib
import ctypes
import functools
import importlib
import json
import os
import queue
import secrets
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType
from typing import Any, BinaryIO, NamedTuple

from prompts.examples import format_error, shorten_value
from sandbox import seal

ROOT = str(Path(__file__).parent.parent)  # the directory from which a worker imports
LATE = "took longer than its limit"
LARGE = "took more memory than its limit"
FORGED = "sent what is no answer to its question"
GRACE = 1.0  # seconds past the limit after which a worker that has not stopped is killed
BUSY = 3.0  # wall-clock limit / processor-time limit; others may use the machine too
START = 300.0  # seconds that a worker may take to build its answering function
MAX_BYTES = {False: 2**26, True: 2**16}  # the longest answer; keys: whether the worker is sealed
# whether the owner must watch a sealed worker's memory; Linux limits the memory itself
WATCHED = sys.platform == "darwin"
HEAD = struct.Struct(">I")  # the number of bytes that follow


class Answer(NamedTuple):
    """A worker's answer, or the reason why there is none."""

    value: Any = None
    error: str = ""  # one line; `LATE` if it took too long
    broken: bool = False  # whether the worker had to end because of the question


# ---- in the owner


class Pool:
    """
    Up to `num` workers. Each is started when it gets its first question.

    A worker has an empty directory and no API key among its environment variables.
    """

    def __init__(
        self,
        target: str,
        arguments: tuple[Any, ...],
        *,
        num: int,
        limit: float,
        sealed: bool = False,
    ):
        """
        target: `module:function`. Each worker calls it once, with `arguments`. It returns the
        function that the worker calls with each question.
        Arguments, questions and answers are JSON.
        limit: seconds of processor time for one question.
        sealed: whether the last part of a question is hostile text. If so, each worker calls
        `seal.seal_process`, and a printed line counts the answers that broke their worker.
        """
        self.target = target
        self.arguments = arguments
        self.num = num
        self.limit = limit
        self.sealed = sealed
        self.workers = list[_Worker]()  # the running workers
        self.lock = threading.Lock()  # guards `workers`
        self.free = queue.LifoQueue[_Worker | None]()  # None: a worker that is not started yet
        self.is_closing = False
        for _ in range(num):
            self.free.put(None)
        atexit.register(self.close)

    def answer_all(self, questions: Sequence[Any]) -> list[Answer]:
        """Answers the questions in parallel. Raises ValueError if no worker starts."""
        self.is_closing = False
        with ThreadPoolExecutor(self.num) as threads:
            try:
                answers = list(threads.map(self._answer, questions))
            except BaseException:  # Ctrl-C, or a worker that cannot start: drop the other questions
                self.is_closing = True
                self.close()
                raise
        broken = [place for place, answer in enumerate(answers) if answer.broken]
        if broken and self.sealed:
            text = questions[broken[0]][-1]
            error = answers[broken[0]].error
            print(
                f"{len(broken)} of {len(answers)} answers ended the process that read them: "
                f"{shorten_value(text)} {error}",
                file=sys.stderr,
            )
        return answers

    def _answer(self, question: Any) -> Answer:
        """Asks a free worker. This method runs in a thread of its own."""
        worker = self.free.get()
        try:
            if worker is None or worker.process.poll() is not None:
                worker = self._start()
            answer = worker.answer(question, self.limit)
            if self._should_retry(worker, answer):
                worker = self._start()
                answer = worker.answer(question, self.limit)
        finally:
            self.free.put(worker)
        return answer

    def _should_retry(self, worker: "_Worker", answer: Answer) -> bool:
        """Whether to ask a fresh worker, because an earlier question may have broken this one."""
        is_suspect = answer.broken and answer.error != LATE and self.sealed
        return is_suspect and worker.num_answered > 1 and not self.is_closing

    def _start(self) -> "_Worker":
        worker = _Worker(self.target, self.arguments, self.sealed)
        with self.lock:
            running = [other for other in self.workers if other.process.returncode is None]
            self.workers = [*running, worker]
        return worker

    def close(self) -> None:
        """Ends all workers."""
        for worker in self.workers:
            worker.close()
        self.workers = []


class _Worker:
    """One process. It prints nothing, because a user cannot act on the warnings of libraries."""

    def __init__(self, target: str, arguments: tuple[Any, ...], sealed: bool):
        self.sealed = sealed
        self.num_answered = -1  # so that the answer to `arguments`, the first one, does not count
        self.home = tempfile.TemporaryDirectory(prefix="gwen-worker-")
        self.socket, worker_socket = socket.socketpair()
        descriptor = worker_socket.fileno()
        command = [sys.executable, "-W", "ignore", "-m", __name__, str(descriptor), target]
        command.append("sealed" if sealed else "")
        self.process = subprocess.Popen(
            command,
            pass_fds=[descriptor],
            env=_make_environment(self.home.name),
            cwd=self.home.name,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )
        worker_socket.close()

        answer = self.answer(arguments, START)
        if answer.error:
            self.close()
            error = answer.error
            if error == LATE:
                error = f"{target} was not ready after {START:.0f} s"
            raise ValueError(error)
        if answer.value:
            _warn_of_weak_seal(answer.value)

    def answer(self, question: Any, limit: float) -> Answer:
        """Asks the worker, and ends it if no valid answer arrives in time."""
        number = secrets.randbits(128)
        try:
            frame = _make_frame(number, question, limit)
        except TypeError as error:
            raise ValueError(
                f"a worker can be asked about texts, numbers and lists of them only: {error}"
            ) from error
        wall_limit = limit * BUSY + GRACE
        self.num_answered += 1
        try:
            self.socket.settimeout(wall_limit)
            self.socket.sendall(frame)
            deadline = time.monotonic() + wall_limit
            value, error_line, is_broken = self._receive_answer(number, deadline)
            if not is_broken:
                return Answer(value, error_line)
            reason = "".join(c if c.isprintable() else "?" for c in error_line[:300])
        except TimeoutError:
            reason = LATE
        except MemoryError:
            reason = LARGE
        except (ValueError, TypeError, RecursionError):
            reason = FORGED
        except OSError:
            reason = self._describe_end()
        self.close()
        return Answer(error=reason, broken=True)

    def _receive_answer(self, number: int, deadline: float) -> tuple[Any, str, bool]:
        """
        The value, the error, and whether the worker is broken.

        Raises ValueError or TypeError if the frame does not answer the question with this number.
        """
        (size,) = HEAD.unpack(self._receive(HEAD.size, deadline))
        if size > MAX_BYTES[self.sealed]:
            raise ValueError
        answered, value, error, is_broken = json.loads(self._receive(size, deadline))
        if (type(answered), type(error), type(is_broken)) != (int, str, bool):
            raise ValueError
        if answered != number:
            raise ValueError
        return value, error, is_broken

    def _receive(self, size: int, deadline: float) -> bytearray:
        """
        The next `size` bytes from the worker.

        Raises TimeoutError after the deadline, MemoryError if a watched worker is too large, and
        ConnectionError if the worker has ended.
        """
        received = bytearray()
        while len(received) < size:
            seconds = deadline - time.monotonic()
            if seconds <= 0:
                raise TimeoutError
            if self.sealed and WATCHED and _footprint(self.process.pid) > seal.MEMORY:
                raise MemoryError
            self.socket.settimeout(min(seconds, 0.5) if WATCHED else seconds)
            with contextlib.suppress(TimeoutError):
                chunk = self.socket.recv(size - len(received))
                received += chunk
                if not chunk:
                    raise ConnectionError
        return received

    def _describe_end(self) -> str:
        """How the worker ended, for a worker that no longer answers."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(GRACE)
        status = self.process.poll()
        return "closed its channel" if status is None else f"ended its process with status {status}"

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self.socket.close()
        self.home.cleanup()


def _make_environment(home: str) -> dict[str, str]:
    """The environment variables of a worker."""
    path_text = os.environ.get("PYTHONPATH", "")
    paths = [os.path.abspath(path) for path in path_text.split(os.pathsep) if path]
    return seal.environment(home) | {
        # hashes of strings decide the order of sets, and so what some problem generators draw
        "PYTHONHASHSEED": "0",
        "PYTHONPATH": os.pathsep.join((ROOT, *paths)),
        "OPENBLAS_NUM_THREADS": "1",
    }


def _footprint(pid: int) -> int:
    """The bytes that macOS counts for a process, compressed pages included; 0 once it has ended."""
    # rusage_info_v2 of sys/resource.h: an id of two words, then 18 numbers
    usage = (ctypes.c_uint64 * 20)()
    failed = ctypes.CDLL("/usr/lib/libproc.dylib").proc_pid_rusage(pid, 2, usage)
    return 0 if failed else usage[9]  # ri_phys_footprint


@functools.cache
def _warn_of_weak_seal(missing: str) -> None:
    """Prints once what the kernel does not enforce on this system."""
    print(
        f"the seal of workers holds only in part here ({missing}); docs/data.md says what is left",
        file=sys.stderr,
    )


def _make_frame(*content: Any) -> bytes:
    body = json.dumps(content).encode()
    return HEAD.pack(len(body)) + body


# ---- in a worker


class _TooLate(BaseException):
    """Raised by the alarm. It is not an Exception, because libraries catch every Exception."""


def _on_alarm(_: int, __: FrameType | None) -> None:
    raise _TooLate


def _describe_error(error: BaseException) -> str:
    """An error in one line. The text of a ValueError is already a line for the user."""
    return str(error)[:2000] if type(error) is ValueError else format_error(error)


def _read_question(source: BinaryIO) -> Any:
    """The next question's number, content and time limit; None once the owner is gone."""
    head = source.read(HEAD.size)
    return json.loads(source.read(*HEAD.unpack(head))) if head else None


def serve(source: BinaryIO, sink: BinaryIO, target: str, sealed: bool) -> None:
    """Builds the answering function, then answers questions until the owner is gone."""
    # Once sealed, no code below may look up a module or open a file.
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the owner handles it
    signal.signal(signal.SIGPROF, _on_alarm)
    module, _, function = target.partition(":")
    number, arguments, _ = _read_question(source)
    refused: list[str] = []
    try:
        make_answer = getattr(importlib.import_module(module), function)
        answer: Callable[[Any], Any] = make_answer(*arguments)
        missing = seal.seal_process(refused) if sealed else ""
        frame = _make_frame(number, missing, "", False)
        is_ready = True
    except BaseException as error:
        frame = _make_frame(number, None, _describe_error(error), False)
        is_ready = False
    sink.write(frame)
    sink.flush()
    if not is_ready:
        return

    while question := _read_question(source):
        number, content, limit = question
        frame = _answer_in_time(answer, number, content, limit, sealed)
        if refused:
            error_line = f"tried what is refused here: {refused[0]}"
            frame = _make_frame(number, None, error_line, True)
        sink.write(frame)
        sink.flush()


def _answer_in_time(
    answer: Callable[[Any], Any], number: int, question: Any, limit: float, sealed: bool
) -> bytes:
    """The frame with the answer, or with the error that took its place. limit: in seconds."""
    try:
        signal.setitimer(signal.ITIMER_PROF, limit)
        frame = _make_frame(number, answer(question), "", False)
        signal.setitimer(signal.ITIMER_PROF, 0)
    except _TooLate:
        return _make_frame(number, None, LATE, False)
    except BaseException as error:
        signal.setitimer(signal.ITIMER_PROF, 0)
        is_broken = sealed and isinstance(error, MemoryError)
        return _make_frame(number, None, _describe_error(error), is_broken)
    return frame


if __name__ == "__main__":
    descriptor = int(sys.argv[1])
    with open(descriptor, "rb") as source, open(descriptor, "wb", closefd=False) as sink:
        serve(source, sink, sys.argv[2], bool(sys.argv[3]))
