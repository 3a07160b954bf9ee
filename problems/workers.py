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
import secrets
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, BinaryIO, NamedTuple

from problems import seal
from problems.examples import one_line, short

ROOT = str(Path(__file__).parent.parent)  # where a worker finds what it imports
LATE = "took longer than its limit"
LARGE = "took more memory than its limit"
FORGED = "sent what is no answer to its question"
GRACE = 1.0  # seconds beyond the limit after which a worker that did not stop itself is killed
BUSY = 3.0  # times its limit that a sealed worker has, whose limit is of processor time, on a machine that others use
START = 300.0  # seconds that a worker may take to build its answerer
LONGEST = {False: 2**26, True: 2**16}  # bytes of an answer, by whether the worker is sealed
WATCHED = sys.platform == "darwin"  # where the owner looks at a sealed worker's memory: Linux limits it
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
    is given and what it answers is JSON. limit: seconds for one question, of processor time where a worker is sealed.
    sealed: the last part of a question is hostile text, so a worker has an empty directory, no key of the environment
    and `seal.put_on`; which answers broke their worker is printed. quiet: it prints nothing, as no sealed one does.
    """

    def __init__(
        self,
        target: str,
        arguments: tuple[Any, ...],
        *,
        num: int,
        limit: float,
        sealed: bool = False,
        quiet: bool = False,
    ):
        self.target, self.arguments, self.num, self.limit = target, arguments, num, limit
        self.sealed, self.quiet = sealed, quiet or sealed
        self.workers: list[_Worker] = []
        atexit.register(self.close)

    def ask(self, questions: Sequence[Any], limit: float | None = None) -> list[Answer]:
        """The answers, found side by side; `limit` for these questions only. ValueError when no worker starts."""
        answers = self._ask(questions, limit or self.limit)
        broken = [place for place, answer in enumerate(answers) if answer.broken]
        if broken and self.sealed:
            text, error = questions[broken[0]][-1], answers[broken[0]].error
            print(f"{len(broken)} of {len(answers)} answers broke their reader: {short(text)} {error}", file=sys.stderr)
        return answers

    def _ask(self, questions: Sequence[Any], limit: float) -> list[Answer]:
        answers = [Answer()] * len(questions)
        waiting = list(reversed(range(len(questions))))
        again: list[int] = []
        try:
            while waiting or any(worker.place is not None for worker in self.workers):
                while waiting and (worker := self._free()):
                    worker.ask(waiting[-1], questions[waiting.pop()], limit)
                busy = [worker for worker in self.workers if worker.place is not None]
                _wait(busy)
                for worker in (worker for worker in busy if worker.is_done()):
                    place, answer = worker.take()
                    answers[place] = answer
                    if answer.broken and answer.error != LATE and self.sealed and worker.num_answered > 1:
                        again.append(place)
                self.workers = [worker for worker in self.workers if worker.process.poll() is None]
            for place in again:  # what broke the worker may have been an answer before this one: now it has its own
                self.close()
                answers[place] = self._ask([questions[place]], limit)[0]
        except BaseException:  # Ctrl-C: what is still being answered would be taken for the next question's
            self.close()
            raise
        return answers

    def _free(self) -> "_Worker | None":
        """A worker that has no question, started where there are fewer than `num`."""
        worker = next((worker for worker in self.workers if worker.place is None), None)
        if worker is None and len(self.workers) < self.num:
            worker = _Worker(self.target, self.arguments, self.sealed, self.quiet)
            self.workers.append(worker)
        return worker

    def close(self) -> None:
        for worker in self.workers:
            worker.end()
        self.workers = []


def ask_once(target: str, question: Any, limit: float) -> Answer:
    """The answer of a sealed worker that is asked nothing else. ValueError when it does not start."""
    worker = _Worker(target, (), sealed=True, quiet=True)
    try:
        worker.ask(0, question, limit)
        while not worker.is_done():
            _wait([worker])
        return worker.take()[1]
    finally:
        worker.end()


class _Worker:
    """One process, what it was asked and what it has said so far."""

    def __init__(self, target: str, arguments: tuple[Any, ...], sealed: bool, quiet: bool):
        self.sealed, self.num_answered = sealed, 0
        self.place: int | None = None  # of its question among those of the pool
        self.answer: Answer | None = None
        self.home = tempfile.TemporaryDirectory(prefix="gwen-worker-") if sealed else None
        # hashes of strings order sets, and so decide what some generators of problems draw
        environment = seal.environment(self.home.name) if self.home else dict(os.environ)
        environment |= {"PYTHONHASHSEED": "0", "OPENBLAS_NUM_THREADS": "1"}
        paths = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
        environment["PYTHONPATH"] = os.pathsep.join((ROOT, *map(os.path.abspath, paths)))
        silent = ["-W", "ignore"] if quiet else []  # of what libraries warn, nobody who trains can mend
        self.socket, theirs = socket.socketpair()
        self.process = subprocess.Popen(
            [sys.executable, *silent, "-m", __name__, str(theirs.fileno()), target, "sealed" * sealed],
            pass_fds=[theirs.fileno()],
            env=environment,
            cwd=self.home.name if self.home else None,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL if quiet else None,
        )
        theirs.close()
        self.ask(0, arguments, START)
        while not self.is_done():
            _wait([self])
        answer = self.take()[1]
        if answer.error:
            self.end()
            raise ValueError(f"{target} was not ready after {START:.0f} s" if answer.error == LATE else answer.error)
        if answer.value:
            _tell_missing(str(answer.value))
        self.num_answered = 0

    def ask(self, place: int, question: Any, limit: float) -> None:
        self.place, self.number, self.heard, self.answer = place, secrets.randbits(128), bytearray(), None
        patience = limit * (BUSY if self.sealed else 1.0)
        self.deadline = time.monotonic() + patience + GRACE
        try:
            frame = _frame(self.number, question, limit)
        except TypeError as error:
            raise ValueError(f"a worker can be asked about texts, numbers and lists of them only: {error}") from error
        self.socket.settimeout(patience)
        with contextlib.suppress(OSError):  # it has just ended or does not listen, as `is_done` will find
            self.socket.sendall(frame)
        self.socket.setblocking(False)

    def is_done(self) -> bool:
        """Whether the question has its answer, which is an error where the worker had to be ended."""
        if self.answer is None:
            self._listen()
        if self.answer is None and self.deadline <= time.monotonic():
            self._give_up(LATE)
        if self.answer is None and self.sealed and WATCHED and _footprint(self.process.pid) > seal.MEMORY:
            self._give_up(LARGE)
        return self.answer is not None

    def _listen(self) -> None:
        """Takes in what has come: nothing yet, a part of the frame, all of it, or what ends the worker."""
        longest, closed = LONGEST[self.sealed], False
        try:
            while not closed and len(self.heard) <= HEAD.size + longest:
                chunk = self.socket.recv(2**16)
                self.heard += chunk
                closed = not chunk
        except BlockingIOError:
            pass
        except ConnectionError:
            closed = True
        size = HEAD.size + HEAD.unpack_from(self.heard)[0] if len(self.heard) >= HEAD.size else None
        if size is not None and (size > HEAD.size + longest or size < len(self.heard)):
            self._give_up(FORGED)
        elif size == len(self.heard):
            self._read(bytes(self.heard[HEAD.size :]))
        elif closed:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(GRACE)
            status = self.process.poll()
            ended = "closed its channel" if status is None else f"ended its process with status {status}"
            self._give_up(LATE if status == -signal.SIGXCPU else ended)  # the limit of an answerer that sets one

    def _read(self, body: bytes) -> None:
        try:
            number, value, error, broken = json.loads(body)
        except (ValueError, TypeError, RecursionError):
            return self._give_up(FORGED)
        if (type(number), type(error), type(broken)) != (int, str, bool) or number != self.number:
            return self._give_up(FORGED)
        if broken:
            return self._give_up("".join(c if c.isprintable() else "?" for c in error[:300]))
        self.answer = Answer(value, error)

    def take(self) -> tuple[int, Answer]:
        assert self.place is not None and self.answer is not None, "nothing was asked and answered"
        place, self.place = self.place, None
        self.num_answered += 1
        return place, self.answer

    def _give_up(self, error: str) -> None:
        self.end()
        self.answer = Answer(error=error, broken=True)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self.socket.close()
        if self.home:
            self.home.cleanup()


def _wait(busy: Sequence[_Worker]) -> None:
    """Until one of them has said something, or has reached its deadline."""
    soonest = max(min(worker.deadline for worker in busy) - time.monotonic(), 0)
    poll = select.poll()
    for worker in busy:
        poll.register(worker.socket, select.POLLIN)
    poll.poll(1000 * (min(soonest, 0.5) if WATCHED else soonest))


def _footprint(pid: int) -> int:
    """Bytes that macOS counts for a process, compressed pages among them; 0 of one that has ended."""
    usage = (ctypes.c_uint64 * 20)()  # rusage_info_v2 of sys/resource.h: an id of two words, then 18 numbers
    failed = ctypes.CDLL("/usr/lib/libproc.dylib").proc_pid_rusage(pid, 2, usage)
    return 0 if failed else usage[9]  # ri_phys_footprint


@functools.cache
def _tell_missing(what: str) -> None:
    print(f"the seal of workers holds only in part here ({what}); docs/data.md says what is left", file=sys.stderr)


def _frame(*content: Any) -> bytes:
    body = json.dumps(content).encode()
    return HEAD.pack(len(body)) + body


# ---- inside a worker


class _TooLate(BaseException):
    """The alarm. No subclass of Exception, which libraries catch."""


def _on_alarm(_: int, __: FrameType | None) -> None:
    raise _TooLate


def _said(error: BaseException) -> str:
    """An error in one line; a ValueError is a line of ours."""
    return str(error)[:2000] if type(error) is ValueError else one_line(error)


def serve(ears: BinaryIO, mouth: BinaryIO, target: str, sealed: bool) -> None:
    """Builds the answerer and answers until nobody asks."""

    def hear() -> Any:
        return json.loads(ears.read(*HEAD.unpack(head))) if (head := ears.read(HEAD.size)) else None

    def say(frame: bytes) -> None:
        mouth.write(frame)
        mouth.flush()

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the owner's to answer
    signal.signal(signal.SIGPROF if sealed else signal.SIGALRM, _on_alarm)
    timer = signal.ITIMER_PROF if sealed else signal.ITIMER_REAL
    module, _, function = target.partition(":")
    number, arguments, _ = hear()
    refused: list[str] = []
    try:
        answer: Callable[[Any], Any] = getattr(importlib.import_module(module), function)(*arguments)
        hooked = not getattr(answer, "runs_code", False)  # of code, running is no attack
        say(_frame(number, seal.put_on(refused, hooked) if sealed else "", "", False))
    except BaseException as error:
        return say(_frame(number, None, _said(error), False))
    while asked := hear():
        number, question, limit = asked
        try:
            signal.setitimer(timer, limit)
            frame = _frame(number, answer(question), "", False)
            signal.setitimer(timer, 0)
        except _TooLate:
            frame = _frame(number, None, LATE, False)
        except BaseException as error:
            signal.setitimer(timer, 0)
            frame = _frame(number, None, _said(error), sealed and isinstance(error, MemoryError))
        if refused:
            frame = _frame(number, None, f"tried what is refused here: {refused[0]}", True)
        say(frame)


if __name__ == "__main__":
    with open(int(sys.argv[1]), "rb") as ears, open(int(sys.argv[1]), "wb", closefd=False) as mouth:
        serve(ears, mouth, sys.argv[2], bool(sys.argv[3]))
