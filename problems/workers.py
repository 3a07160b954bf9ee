"""
Processes that answer what may hang or crash: every question has a time limit, and a process that passes it is ended.

A limit inside one process does not hold: signals reach only its main thread, and none interrupts one long
multiplication. A worker sets itself an alarm; when that does not stop it, its owner kills it and starts another.
A sealed worker reads hostile text. Its owner takes nothing from it but one short frame for each question, JSON with the
question's random number: anything else ends the worker. Nothing is unpickled.
What is left out: the questions. A worker builds its answerer once, `module:function` called with given arguments.
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

from problems import seal
from problems.examples import format_error, shorten_value

ROOT = str(Path(__file__).parent.parent)  # where a worker finds what it imports
LATE = "took longer than its limit"
LARGE = "took more memory than its limit"
FORGED = "sent what is no answer to its question"
GRACE = 1.0  # seconds beyond the limit after which a worker that did not stop itself is killed
BUSY = 3.0  # times its limit, which is of processor time, that a worker has on a machine that others use
START = 300.0  # seconds that a worker may take to build its answerer
LONGEST = {False: 2**26, True: 2**16}  # bytes of an answer, by whether the worker is sealed
WATCHED = (
    sys.platform == "darwin"
)  # where the owner looks at a sealed worker's memory: Linux limits it
HEAD = struct.Struct(">I")  # bytes that follow


class Answer(NamedTuple):
    """What a worker said, or why it said nothing: `LATE`, or an error in one line; `broken`: the worker ended of it."""

    value: Any = None
    error: str = ""
    broken: bool = False


class Pool:
    """
    Up to `num` workers, each started when it is first needed.

    target: `module:function`, which a worker calls with `arguments` and which gives the function that answers; what it
    is given and what it answers is JSON. limit: seconds of processor time for one question.
    A worker has an empty directory and no key of the environment. sealed: the last part of a question is hostile text,
    so it has `seal.seal_process` too; which answers broke their worker is printed.
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
        self.target, self.arguments, self.num, self.limit, self.sealed = (
            target,
            arguments,
            num,
            limit,
            sealed,
        )
        self.workers, self.lock = list[_Worker](), threading.Lock()  # those that run
        self.free = queue.LifoQueue[_Worker | None]()  # None: not started yet
        for _ in range(num):
            self.free.put(None)
        atexit.register(self.close)

    def answer_all(self, questions: Sequence[Any]) -> list[Answer]:
        """The answers, found side by side. ValueError when no worker starts."""
        self.given_up = False
        with ThreadPoolExecutor(self.num) as threads:
            try:
                answers = list(threads.map(self._answer, questions))
            except (
                BaseException
            ):  # Ctrl-C, or a worker that cannot start: what is still being answered is given up
                self.given_up = True
                self.close()
                raise
        broken = [place for place, answer in enumerate(answers) if answer.broken]
        if broken and self.sealed:
            text, error = questions[broken[0]][-1], answers[broken[0]].error
            print(
                f"{len(broken)} of {len(answers)} answers broke their reader: {shorten_value(text)} {error}",
                file=sys.stderr,
            )
        return answers

    def _answer(self, question: Any) -> Answer:
        """The answer of a free worker, in a thread of its own."""
        worker = self.free.get()
        try:
            if worker is None or worker.process.poll() is not None:
                worker = self._start()
            answer = worker.answer(question, self.limit)
            again = (
                answer.broken and answer.error != LATE and self.sealed and worker.num_answered > 1
            )
            if again and not self.given_up:
                worker = (
                    self._start()
                )  # an answer before this one may have broken the worker: now it has its own
                answer = worker.answer(question, self.limit)
        finally:
            self.free.put(worker)
        return answer

    def _start(self) -> "_Worker":
        worker = _Worker(self.target, self.arguments, self.sealed)
        with self.lock:
            self.workers = [one for one in self.workers if one.process.returncode is None] + [
                worker
            ]
        return worker

    def close(self) -> None:
        for worker in self.workers:
            worker.close()
        self.workers = []


class _Worker:
    """One process. It prints nothing: of what libraries warn, nobody who trains can mend."""

    def __init__(self, target: str, arguments: tuple[Any, ...], sealed: bool):
        self.sealed, self.num_answered = sealed, -1  # without the first, to its arguments
        self.home = tempfile.TemporaryDirectory(prefix="gwen-worker-")
        paths = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
        environment = (
            seal.environment(self.home.name)
            | {
                "PYTHONHASHSEED": "0",  # hashes of strings order sets, and so decide what some generators of problems draw
                "PYTHONPATH": os.pathsep.join((ROOT, *map(os.path.abspath, paths))),
                "OPENBLAS_NUM_THREADS": "1",
            }
        )
        self.socket, theirs = socket.socketpair()
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-W",
                "ignore",
                "-m",
                __name__,
                str(theirs.fileno()),
                target,
                "sealed" * sealed,
            ],
            pass_fds=[theirs.fileno()],
            env=environment,
            cwd=self.home.name,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )
        theirs.close()
        missing, error, _ = self.answer(arguments, START)
        if error:
            self.close()
            raise ValueError(
                f"{target} was not ready after {START:.0f} s" if error == LATE else error
            )
        if missing:
            _explain_missing(missing)

    def answer(self, question: Any, limit: float) -> Answer:
        """Its answer, or why it had to be ended. Waits for it, at most `limit` seconds and what `GRACE` adds."""
        number = secrets.randbits(128)
        try:
            frame = _frame(number, question, limit)
        except TypeError as error:
            raise ValueError(
                f"a worker can be asked about texts, numbers and lists of them only: {error}"
            ) from error
        patience = limit * BUSY + GRACE
        self.num_answered += 1
        try:
            self.socket.settimeout(patience)
            self.socket.sendall(frame)
            deadline = time.monotonic() + patience
            if (size := HEAD.unpack(self._receive(HEAD.size, deadline))[0]) > LONGEST[self.sealed]:
                raise ValueError
            given, value, why, is_broken = json.loads(self._receive(size, deadline))
            if (type(given), type(why), type(is_broken)) != (int, str, bool) or given != number:
                raise ValueError
            if not is_broken:
                return Answer(value, why)
            why = "".join(c if c.isprintable() else "?" for c in why[:300])
        except TimeoutError:
            why = LATE
        except MemoryError:
            why = LARGE
        except (ValueError, TypeError, RecursionError):
            why = FORGED
        except OSError:
            why = self._describe_end()
        self.close()
        return Answer(error=why, broken=True)

    def _receive(self, size: int, deadline: float) -> bytearray:
        """The next bytes. Raises TimeoutError, MemoryError where its memory is watched, ConnectionError at its end."""
        heard = bytearray()
        while len(heard) < size:
            if (left := deadline - time.monotonic()) <= 0:
                raise TimeoutError
            if self.sealed and WATCHED and _footprint(self.process.pid) > seal.MEMORY:
                raise MemoryError
            self.socket.settimeout(min(left, 0.5) if WATCHED else left)
            with contextlib.suppress(TimeoutError):
                heard += (chunk := self.socket.recv(size - len(heard)))
                if not chunk:
                    raise ConnectionError
        return heard

    def _describe_end(self) -> str:
        """How a worker ended that says nothing more."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(GRACE)
        status = self.process.poll()
        return "closed its channel" if status is None else f"ended its process with status {status}"

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self.socket.close()
        self.home.cleanup()


def _footprint(pid: int) -> int:
    """Bytes that macOS counts for a process, compressed pages among them; 0 of one that has ended."""
    usage = (
        ctypes.c_uint64 * 20
    )()  # rusage_info_v2 of sys/resource.h: an id of two words, then 18 numbers
    failed = ctypes.CDLL("/usr/lib/libproc.dylib").proc_pid_rusage(pid, 2, usage)
    return 0 if failed else usage[9]  # ri_phys_footprint


@functools.cache
def _explain_missing(what: str) -> None:
    print(
        f"the seal of workers holds only in part here ({what}); docs/data.md says what is left",
        file=sys.stderr,
    )


def _frame(*content: Any) -> bytes:
    body = json.dumps(content).encode()
    return HEAD.pack(len(body)) + body


# ---- inside a worker


class _TooLate(BaseException):
    """The alarm. No subclass of Exception, which libraries catch."""


def _on_alarm(_: int, __: FrameType | None) -> None:
    raise _TooLate


def _describe_error(error: BaseException) -> str:
    """An error in one line; a ValueError is a line of ours."""
    return str(error)[:2000] if type(error) is ValueError else format_error(error)


def serve(ears: BinaryIO, mouth: BinaryIO, target: str, sealed: bool) -> None:
    """Builds the answerer and answers until nobody asks."""

    def hear() -> Any:
        return json.loads(ears.read(*HEAD.unpack(head))) if (head := ears.read(HEAD.size)) else None

    def say(frame: bytes) -> None:
        mouth.write(frame)
        mouth.flush()

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the owner's to answer
    signal.signal(signal.SIGPROF, _on_alarm)
    module, _, function = target.partition(":")
    number, arguments, _ = hear()
    refused: list[str] = []
    try:
        answer: Callable[[Any], Any] = getattr(importlib.import_module(module), function)(
            *arguments
        )
        say(_frame(number, seal.seal_process(refused) if sealed else "", "", False))
    except BaseException as error:
        return say(_frame(number, None, _describe_error(error), False))
    while asked := hear():
        number, question, limit = asked
        try:
            signal.setitimer(signal.ITIMER_PROF, limit)
            frame = _frame(number, answer(question), "", False)
            signal.setitimer(signal.ITIMER_PROF, 0)
        except _TooLate:
            frame = _frame(number, None, LATE, False)
        except BaseException as error:
            signal.setitimer(signal.ITIMER_PROF, 0)
            frame = _frame(
                number, None, _describe_error(error), sealed and isinstance(error, MemoryError)
            )
        if refused:
            frame = _frame(number, None, f"tried what is refused here: {refused[0]}", True)
        say(frame)


if __name__ == "__main__":
    with open(int(sys.argv[1]), "rb") as ears, open(int(sys.argv[1]), "wb", closefd=False) as mouth:
        serve(ears, mouth, sys.argv[2], bool(sys.argv[3]))
