"""
Processes that answer what may hang or crash: every question has a time limit, and a process that passes it is ended.

A limit inside one process does not hold: signals reach only its main thread, and none interrupts one long
multiplication. A worker sets itself an alarm; when that does not stop it, its owner kills it and starts another.
What is left out: the questions. A worker builds its answerer once, `module:function` called with given arguments.
"""

import atexit
import contextlib
import importlib
import os
import pickle
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

ROOT = str(Path(__file__).parent.parent)  # where a worker finds what it imports
LATE = "took longer than its limit"
GRACE = 1.0  # seconds beyond the limit after which a worker that did not stop itself is killed
BUSY = 3.0  # times its limit that a sealed worker has, whose limit is of processor time, on a machine that others use
START = 300.0  # seconds that a worker may take to build its answerer
SEALED_BYTES = 4 * 2**30  # address space of a sealed worker, on Linux
READS = ("os.listdir", "os.scandir", "os.walk", "os.fwalk")  # what a sealed worker may do of the families below
FAMILIES = ("os.", "shutil.", "subprocess.", "socket.", "ctypes.", "urllib.", "http.", "ftplib.", "smtplib.", "pty.")


class Answer(NamedTuple):
    """What a worker said, or why it said nothing: `LATE`, or an error in one line."""

    value: Any = None
    error: str = ""


class Pool:
    """
    Up to `num` workers, each started when it is first needed.

    target: `module:function`, which a worker calls with `arguments` and which gives the function that answers.
    limit: seconds for one question, of processor time where a worker is sealed. sealed: the answers come from hostile
    text, so a worker neither writes files nor starts programs nor opens connections, prints nothing and stays below
    `SEALED_BYTES`.
    """

    def __init__(self, target: str, arguments: tuple[Any, ...], *, num: int, limit: float, sealed: bool = False):
        self.target, self.arguments, self.num, self.limit, self.sealed = target, arguments, num, limit, sealed
        self.workers: list[_Worker] = []
        atexit.register(self.close)

    def ask(self, questions: Sequence[Any], limit: float | None = None) -> list[Answer]:
        """The answers, found side by side; `limit` for these questions only. ValueError when no worker starts."""
        limit = limit or self.limit
        answers = [Answer()] * len(questions)
        waiting = list(reversed(range(len(questions))))
        try:
            while waiting or any(worker.question is not None for worker in self.workers):
                self._hand_out(questions, waiting, limit)
                for worker in self._next_ready():
                    number, answer = worker.take()
                    answers[number] = answer
                self.workers = [worker for worker in self.workers if worker.process.poll() is None]
        except BaseException:  # Ctrl-C: what is still being answered would be taken for the next question's
            self.close()
            raise
        return answers

    def _hand_out(self, questions: Sequence[Any], waiting: list[int], limit: float) -> None:
        while waiting:
            worker = next((worker for worker in self.workers if worker.question is None), None)
            if worker is None and len(self.workers) < self.num:
                worker = _Worker(self.target, self.arguments, self.sealed)
                self.workers.append(worker)
            if worker is None:
                return
            worker.ask(waiting[-1], questions[waiting.pop()], limit)

    def _next_ready(self) -> list["_Worker"]:
        """The workers that have answered or ended; kills and gives those that are over their limit."""
        busy = [worker for worker in self.workers if worker.question is not None]
        if not busy:
            return []
        soonest = min(worker.deadline for worker in busy)
        ready = wait([worker.pipe for worker in busy], max(soonest - time.monotonic(), 0))
        for worker in busy:
            if worker.pipe not in ready and worker.deadline <= time.monotonic():
                worker.end()
        return [worker for worker in busy if worker.pipe in ready or worker.pipe.closed]

    def close(self) -> None:
        """Ends all workers; later questions start new ones."""
        for worker in self.workers:
            worker.end()
        self.workers = []


class _Worker:
    """One process and what it was asked."""

    def __init__(self, target: str, arguments: tuple[Any, ...], sealed: bool):
        self.question: int | None = None
        self.patience = BUSY if sealed else 1.0
        self.deadline = 0.0
        self.pipe, theirs = Pipe()
        # hashes of strings order sets, and so decide what some generators of problems draw
        environment = os.environ | {"PYTHONHASHSEED": "0", "OPENBLAS_NUM_THREADS": "1"}
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (ROOT, os.environ.get("PYTHONPATH"))))
        quiet = ["-W", "ignore"] if sealed else []  # of what libraries warn, nobody who trains can mend
        command = [sys.executable, *quiet, "-m", __name__, str(theirs.fileno()), target, "sealed" * sealed]
        self.process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=environment, stdin=subprocess.DEVNULL)
        theirs.close()
        self.pipe.send(arguments)
        if not self.pipe.poll(START):
            self.end()
            raise ValueError(f"{target} was not ready after {START:.0f} s")
        try:
            failed = self.pipe.recv()
        except EOFError:
            failed = f"the process ended with status {self.process.wait()}"
        if failed:
            self.end()
            raise ValueError(failed)

    def ask(self, number: int, question: Any, limit: float) -> None:
        self.question, self.deadline = number, time.monotonic() + limit * self.patience + GRACE
        with contextlib.suppress(BrokenPipeError):  # it has just ended, as `take` will find
            self.pipe.send((question, limit))

    def take(self) -> tuple[int, Answer]:
        """The question's number and what it answered; `LATE` where it was killed."""
        number, self.question = self.question, None
        assert number is not None, "nothing was asked"
        if self.pipe.closed:
            return number, Answer(error=LATE)
        try:
            return number, Answer(*self.pipe.recv())
        except (EOFError, ConnectionError):
            status = self.process.wait()
            self.end()
            return number, Answer(error=f"ended its process with status {status}")

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self.pipe.close()


# ---- inside a worker


class _TooLate(BaseException):
    """The alarm. No subclass of Exception, which libraries catch."""


def _on_alarm(_: int, __: FrameType | None) -> None:
    raise _TooLate


def _seal() -> None:
    """Takes from this process what no answer needs: files to write, programs, connections, memory without end."""
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115  (for as long as the process lasts)
    sys.dont_write_bytecode = True  # of a module that is first imported for an answer
    if sys.platform == "linux":
        resource.setrlimit(resource.RLIMIT_AS, (SEALED_BYTES, SEALED_BYTES))
    writing = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND

    def refuse(event: str, arguments: tuple[Any, ...]) -> None:
        writes = event == "open" and isinstance(arguments[2], int) and arguments[2] & writing
        if writes or (event.startswith(FAMILIES) and event not in READS):
            raise RuntimeError(f"{event} is refused here")

    sys.addaudithook(refuse)


def _said(error: BaseException) -> str:
    """An error in one line; a ValueError is a line of ours."""
    return str(error) if type(error) is ValueError else " ".join(f"{type(error).__name__}: {error}".split())[:300]


def serve(pipe: Connection, target: str, sealed: bool) -> None:
    """Builds the answerer and answers until the pipe is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the owner's to answer
    signal.signal(signal.SIGPROF if sealed else signal.SIGALRM, _on_alarm)
    timer = signal.ITIMER_PROF if sealed else signal.ITIMER_REAL
    module, _, function = target.partition(":")
    try:
        answer = getattr(importlib.import_module(module), function)(*pipe.recv())
    except BaseException as error:
        pipe.send(_said(error))
        return
    if sealed:
        _seal()
    pipe.send("")
    while True:
        try:
            question, limit = pipe.recv()
        except EOFError:
            return
        said: Answer
        try:
            signal.setitimer(timer, limit)
            said = Answer(answer(question))
            signal.setitimer(timer, 0)
        except _TooLate:
            said = Answer(error=LATE)
        except BaseException as error:
            signal.setitimer(timer, 0)
            said = Answer(error=_said(error))
        try:
            pipe.send(tuple(said))
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            pipe.send((None, _said(error)))


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])), sys.argv[2], bool(sys.argv[3]))
