"""
Worker processes, which answer questions that may hang or crash a process.

Each question has a time limit. A worker sets an alarm for itself, but the alarm cannot always stop
the worker: signals reach only the main thread of a process, and no signal interrupts a single long
multiplication. If the alarm fails, the process that owns the worker kills the worker, and starts
another one.

A sealed worker reads hostile text. For each question, the owner accepts one short message in JSON,
which must contain the random number of the question. The owner ends a worker that sends anything
else, and never unpickles what a worker sends.

When a worker starts, it calls a given function `module:function` with given arguments. This
function returns the function that answers questions. This file does not cover what the questions
ask, or the seal itself (sandbox/seal.py).
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

ROOT = str(Path(__file__).parent.parent)  # the directory from which a worker imports modules
LATE = "took longer than its limit"
LARGE = "took more memory than its limit"
FORGED = "sent something other than an answer to its question"
GRACE = 1.0  # a worker is killed this many seconds after its limit if it still runs
BUSY = 3.0  # the wall-clock limit as a multiple of the processor-time limit
START = 300.0  # the processor seconds that a worker may take to make its answering function

# the size of the longest answer, for a worker that is not sealed (False) or sealed (True)
MAX_BYTES = {False: 2**26, True: 2**16}
# whether the owner must watch the memory of sealed workers, since macOS does not limit it
WATCHED = sys.platform == "darwin"
HEAD = struct.Struct(">I")  # the number of bytes that follow the head of a message


class WorkerAnswer(NamedTuple):
    """The answer of a worker, or an error in place of the answer."""

    value: Any = None
    error: str = ""  # one line; `LATE` if the answer took too long
    broken: bool = False  # whether the question ended the worker


# ---- functions of the owner


class WorkerPool:
    """
    A pool of up to `num` workers, each of which is started when it gets its first question.

    A worker runs in an empty directory, and has no API key among its environment variables.
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
        target: a function `module:function`. Each worker calls the function once, with
        `arguments`, and the function returns another function that answers questions.
        limit: the limit on processor time for one question, in seconds.
        sealed: whether each question is a list that ends with hostile text. If so, each worker
        calls `seal.seal_process`, and `answer_all` prints how many questions ended their worker.
        Arguments, questions and answers must be JSON.
        """
        self.target = target
        self.arguments = arguments
        self.num = num
        self.limit = limit
        self.sealed = sealed
        self.workers = list[_Worker]()  # the running workers
        self.lock = threading.Lock()  # guards `workers`
        # None stands for a worker that has not been started
        self.free = queue.LifoQueue[_Worker | None]()
        self.is_closing = False
        for _ in range(num):
            self.free.put(None)
        atexit.register(self.close)

    def answer_all(self, questions: Sequence[Any]) -> list[WorkerAnswer]:
        """Answers the questions in parallel. Raises ValueError if a worker cannot start."""
        self.is_closing = False
        with ThreadPoolExecutor(self.num) as threads:
            try:
                answers = list(threads.map(self._ask_free_worker, questions))
            except BaseException:
                # after Ctrl-C, or if no worker can start, the other questions are dropped
                self.is_closing = True
                self.close()
                raise
        broken = [place for place, answer in enumerate(answers) if answer.broken]
        if broken and self.sealed:
            text = questions[broken[0]][-1]
            error = answers[broken[0]].error
            print(
                f"{len(broken)} of {len(answers)} answers ended the process that scored them; "
                f"for example, for {shorten_value(text)}, the process {error}",
                file=sys.stderr,
            )
        return answers

    def _ask_free_worker(self, question: Any) -> WorkerAnswer:
        """Asks a free worker, and waits for its answer. This method runs in a thread of its own."""
        worker = self.free.get()
        try:
            if worker is None or worker.process.poll() is not None:
                worker = self._start_worker()
            answer = worker.ask(question, self.limit)
            if self._should_retry(worker, answer):
                worker = self._start_worker()
                answer = worker.ask(question, self.limit)
        finally:
            self.free.put(worker)
        return answer

    def _should_retry(self, worker: "_Worker", answer: WorkerAnswer) -> bool:
        """
        Whether to ask a new worker the same question.

        This is so if an earlier question may have been the reason why this worker broke.
        """
        is_suspect = answer.broken and answer.error != LATE and self.sealed
        return is_suspect and worker.num_answered > 1 and not self.is_closing

    def _start_worker(self) -> "_Worker":
        worker = _Worker(self.target, self.arguments, self.sealed)
        with self.lock:
            running = [other for other in self.workers if other.process.returncode is None]
            self.workers = [*running, worker]
        return worker

    def close(self) -> None:
        """Ends all workers of the pool."""
        for worker in self.workers:
            worker.close()
        self.workers = []


class _Worker:
    """A worker process. It prints nothing, since users cannot act on the warnings of libraries."""

    def __init__(self, target: str, arguments: tuple[Any, ...], sealed: bool):
        self.sealed = sealed
        self.num_answered = -1  # -1, because the first answer (to `arguments`) does not count
        self.home = tempfile.TemporaryDirectory(prefix="gwen-worker-")
        self.socket, worker_socket = socket.socketpair()
        descriptor = worker_socket.fileno()
        command = [sys.executable, "-W", "ignore", "-m", __name__, str(descriptor), target]
        command.append("sealed" if sealed else "")
        self.process = subprocess.Popen(
            command,
            pass_fds=[descriptor],
            env=_worker_environment(self.home.name),
            cwd=self.home.name,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )
        worker_socket.close()

        answer = self.ask(arguments, START)
        if answer.error:
            self.close()
            error = answer.error
            if error == LATE:
                error = (
                    f"the worker for {target} was not ready in time: it may take {START:.0f} "
                    f"seconds of processor time, and {START * BUSY + GRACE:.0f} seconds in total"
                )
            raise ValueError(error)
        if answer.value:
            _warn_of_weak_seal(answer.value)

    def ask(self, question: Any, cpu_seconds: float) -> WorkerAnswer:
        """Asks the worker a question, and ends the worker if no valid answer arrives in time."""
        number = secrets.randbits(128)
        try:
            frame = _make_json_frame(number, question, cpu_seconds)
        except TypeError as error:
            raise ValueError(
                f"a question to a worker may contain only text, numbers and lists of these: {error}"
            ) from error
        wall_limit = cpu_seconds * BUSY + GRACE
        self.num_answered += 1
        try:
            self.socket.settimeout(wall_limit)
            self.socket.sendall(frame)
            deadline = time.monotonic() + wall_limit
            value, error_line, is_broken = self._receive_answer(number, deadline)
            if not is_broken:
                return WorkerAnswer(value, error_line)
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
        return WorkerAnswer(error=reason, broken=True)

    def _receive_answer(self, question_number: int, deadline: float) -> tuple[Any, str, bool]:
        """
        The value of an answer, the error, and whether the worker is broken.

        Raises ValueError or TypeError if the received message does not answer this question.
        """
        (size,) = HEAD.unpack(self._receive_bytes(HEAD.size, deadline))
        if size > MAX_BYTES[self.sealed]:
            raise ValueError
        answered, value, error, is_broken = json.loads(self._receive_bytes(size, deadline))
        if (type(answered), type(error), type(is_broken)) != (int, str, bool):
            raise ValueError
        if answered != question_number:
            raise ValueError
        return value, error, is_broken

    def _receive_bytes(self, size: int, deadline: float) -> bytearray:
        """
        The next `size` bytes from the worker.

        Raises TimeoutError after the deadline, and ConnectionError if the worker has ended. On
        macOS, also raises MemoryError if a sealed worker uses too much memory.
        """
        received = bytearray()
        while len(received) < size:
            seconds = deadline - time.monotonic()
            if seconds <= 0:
                raise TimeoutError
            if (
                self.sealed
                and WATCHED
                and _memory_footprint_on_macos(self.process.pid) > seal.MEMORY
            ):
                raise MemoryError
            self.socket.settimeout(min(seconds, 0.5) if WATCHED else seconds)
            with contextlib.suppress(TimeoutError):
                chunk = self.socket.recv(size - len(received))
                received += chunk
                if not chunk:
                    raise ConnectionError
        return received

    def _describe_end(self) -> str:
        """A description of how a worker that no longer answers has ended."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(GRACE)
        status = self.process.poll()
        return "closed its channel" if status is None else f"ended with status {status}"

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self.socket.close()
        self.home.cleanup()


def _worker_environment(home: str) -> dict[str, str]:
    """The environment variables of a worker."""
    path_text = os.environ.get("PYTHONPATH", "")
    paths = [os.path.abspath(path) for path in path_text.split(os.pathsep) if path]
    return seal.sealed_environment(home) | {
        # the hashes of strings decide the order of sets, and thus the problems of some generators
        "PYTHONHASHSEED": "0",
        "PYTHONPATH": os.pathsep.join((ROOT, *paths)),
        "OPENBLAS_NUM_THREADS": "1",
    }


def _memory_footprint_on_macos(pid: int) -> int:
    """The memory footprint of a process on macOS, in bytes; 0 if the process has ended."""
    # rusage_info_v2 in sys/resource.h has an id of two words and then 18 numbers
    usage = (ctypes.c_uint64 * 20)()
    failed = ctypes.CDLL("/usr/lib/libproc.dylib").proc_pid_rusage(pid, 2, usage)
    return 0 if failed else usage[9]  # ri_phys_footprint


@functools.cache
def _warn_of_weak_seal(missing: str) -> None:
    """Prints once which part of the seal the kernel of this system cannot enforce."""
    print(
        f"WARNING: answers are scored in processes that are only partly sealed ({missing}); "
        "docs/data.md says which protection remains",
        file=sys.stderr,
    )


def _make_json_frame(*content: Any) -> bytes:
    body = json.dumps(content).encode()
    return HEAD.pack(len(body)) + body


# ---- functions of a worker


class _TooLate(BaseException):
    """
    The alarm raises this error when a question takes too long.

    The class does not derive from Exception, because libraries catch every Exception.
    """


def _raise_too_late(_: int, __: FrameType | None) -> None:
    raise _TooLate


def _describe_error(error: BaseException) -> str:
    """A one-line description of an error. A ValueError already has a message for the user."""
    return str(error)[:2000] if type(error) is ValueError else format_error(error)


def _read_number_question_and_limit(source: BinaryIO) -> Any:
    """The number, content and time limit of the next question; None if the owner has ended."""
    head = source.read(HEAD.size)
    return json.loads(source.read(*HEAD.unpack(head))) if head else None


def serve_questions(source: BinaryIO, sink: BinaryIO, target: str, sealed: bool) -> None:
    """Makes the answering function, and then answers questions until the owner ends."""
    # After sealing, the code below must not import a module or open a file.
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the owner handles Ctrl-C
    signal.signal(signal.SIGPROF, _raise_too_late)
    module, _, function = target.partition(":")
    number, arguments, _ = _read_number_question_and_limit(source)
    refused: list[str] = []
    try:
        make_answer = getattr(importlib.import_module(module), function)
        answer: Callable[[Any], Any] = make_answer(*arguments)
        missing = seal.seal_process(refused) if sealed else ""
        frame = _make_json_frame(number, missing, "", False)
        is_ready = True
    except BaseException as error:
        frame = _make_json_frame(number, None, _describe_error(error), False)
        is_ready = False
    sink.write(frame)
    sink.flush()
    if not is_ready:
        return

    while question := _read_number_question_and_limit(source):
        number, content, limit = question
        frame = _answer_within_cpu_limit(answer, number, content, limit, sealed)
        if refused:
            error_line = f"tried an action that is refused in a sealed process: {refused[0]}"
            frame = _make_json_frame(number, None, error_line, True)
        sink.write(frame)
        sink.flush()


def _answer_within_cpu_limit(
    answer: Callable[[Any], Any],
    question_number: int,
    question: Any,
    cpu_seconds: float,
    is_worker_sealed: bool,
) -> bytes:
    """
    The message with the answer to a question, or with an error in place of the answer.

    cpu_seconds: the limit on processor time.
    """
    try:
        signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
        frame = _make_json_frame(question_number, answer(question), "", False)
        signal.setitimer(signal.ITIMER_PROF, 0)
    except _TooLate:
        return _make_json_frame(question_number, None, LATE, False)
    except BaseException as error:
        signal.setitimer(signal.ITIMER_PROF, 0)
        is_broken = is_worker_sealed and isinstance(error, MemoryError)
        return _make_json_frame(question_number, None, _describe_error(error), is_broken)
    return frame


if __name__ == "__main__":
    descriptor = int(sys.argv[1])
    with open(descriptor, "rb") as source, open(descriptor, "wb", closefd=False) as sink:
        serve_questions(source, sink, sys.argv[2], bool(sys.argv[3]))
