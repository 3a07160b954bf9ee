"""
Starts the outside harness of --env-server, and exchanges messages with it.

A harness is a command that plays episodes in an environment. It has its own packages, runs in its
own process, and asks the endpoint (serving/endpoint.py) for the model's turns. Gwen writes messages
to the harness's standard input, and reads messages from its standard output. Each message is one
line with a JSON object. These are the messages, with the side that sends each of them:

    harness: {"type": "ready", "train": [EXAMPLE, ...], "held_out": [EXAMPLE, ...], ...}
    Gwen:    {"type": "policy", "url": ..., "model": ..., "tokenizer": DIRECTORY, "context": ...}
    Gwen:    {"type": "play", "episode": 7, "split": "train", "example": 3, "seed": ..., ...}
    harness: {"type": "session", "episode": 7, "session": NAME}
    harness: {"type": "result", "episode": 7, "token_ids": [...], "own": [...], "reward": 1.0, ...}
    Gwen:    {"type": "cancel", "episode": 7}

docs/environments.md describes the fields. Messages are data: nothing in them is executed.
"""

import atexit
import contextlib
import json
import os
import queue
import re
import secrets
import shlex
import signal
import subprocess
import tempfile
import threading
import time
from collections import Counter
from typing import Any, NoReturn

from serving.endpoint import Endpoint

REWARD_NAME = "environment"  # the reward that the harness computes
TOKEN_VARIABLE = "GWEN_ENV_TOKEN"  # the environment variable with the secret of the endpoint
MOST_LINE_BYTES = 16 << 20  # the largest size of a message
MOST_UNREAD = 1024  # the most unread messages; at this number, the harness must wait
MOST_REPEATED = {"session": 2, "result": 1}  # the most messages of a type about one episode
POLL_SECONDS = 0.05  # seconds between two checks whether the harness still runs
END_SECONDS = 5.0  # how long a harness may take to end after its input was closed


class HarnessEnded(ValueError):
    """The harness has ended, or has sent something that is not a message."""


def parse_message(line: bytes) -> dict[str, Any] | None:
    """
    The message in a line; None if the line is not a JSON object with a type.

    Halves of surrogate pairs, which JSON may contain but no file in UTF-8 can, become question
    marks.
    """
    try:
        message = json.loads(line)
        if rb"\u" in line:
            text = json.dumps(message, ensure_ascii=False)
            message = json.loads(text.encode(errors="replace"))
    except (ValueError, RecursionError):
        return None
    if not isinstance(message, dict) or not isinstance(message.get("type"), str):
        return None
    return message


def start_guard(group: int) -> subprocess.Popen[bytes]:
    """
    Starts a process that kills a group of processes soon after Gwen's process has ended.

    `Harness.close` ends a harness, but a signal may end Gwen's process before that. A harness that
    does not read its input would then keep running.
    """
    script = f"cat; sleep {END_SECONDS:g}; kill -9 -{group}"
    return subprocess.Popen(
        ["sh", "-c", script],
        stdin=subprocess.PIPE,  # is closed when this process ends
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


class Harness:
    """
    A harness that runs, and the endpoint that it uses.

    events: what the endpoint and the harness send, in the order of arrival: a `PendingRequest`, a
    `RequestCancellation`, or a message of the harness as a dictionary.
    """

    def __init__(self, command: str):
        """
        Starts the command. Raises ValueError if it cannot be started.

        The endpoint's secret is the value of the environment variable GWEN_ENV_TOKEN. If this
        variable is not set, the secret is random.
        """
        self.command = command
        self.events: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.token = os.environ.get(TOKEN_VARIABLE) or secrets.token_hex(16)
        self.endpoint = Endpoint(self.token, self.events)
        self._outgoing: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._num_free = threading.Semaphore(MOST_UNREAD)  # places for messages in `events`
        # the examples that the harness has listed, by split; None before its first message
        self.examples: dict[str, list[dict[str, Any]]] | None = None
        self.most_at_once: int | None = None  # the most episodes to ask for at the same time
        # the policy about which the harness was last told
        self._policy: dict[str, Any] | None = None
        self._num_episodes = 0
        self._num_sent: Counter[tuple[str, int]] = Counter()  # messages by type and episode
        self._end_reason = ""
        self._ended_at: float | None = None  # when the end of the process was noticed first
        self._is_closed = False
        with tempfile.NamedTemporaryFile(
            prefix="gwen-harness-", suffix=".log", delete=False
        ) as log:
            self.log = log.name
            try:
                self.process = subprocess.Popen(
                    shlex.split(command),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    env=os.environ | {TOKEN_VARIABLE: self.token},
                    start_new_session=True,  # so that its own children can be ended too
                )
            except (OSError, ValueError) as error:
                self.endpoint.close()
                os.unlink(self.log)
                raise ValueError(f"--env-server {command}: cannot be started: {error}") from error
        self._guard = start_guard(self.process.pid)
        for work in (self._read_messages, self._write_messages):
            threading.Thread(target=work, name="gwen-harness", daemon=True).start()
        atexit.register(self.close)

    # ---- messages

    def next_episode_number(self) -> int:
        """A number for a new episode, which no other episode of this harness has."""
        self._num_episodes += 1
        return self._num_episodes

    def knows_episode_number(self, number: Any) -> bool:
        """Whether an episode with this number was ever asked for."""
        return type(number) is int and 1 <= number <= self._num_episodes

    def refuse_repeated_message(self, message: dict[str, Any]) -> None:
        """
        Raises HarnessEnded if the harness sends the result of an episode a second time, or names
        the session of an episode a third time. This stops a flood of messages early.
        """
        kind, number = message["type"], message["episode"]
        self._num_sent[kind, number] += 1
        if self._num_sent[kind, number] > MOST_REPEATED[kind]:
            self.refuse_message(message, f"it has sent the {kind} of this episode before")

    def refuse_message(self, message: dict[str, Any], reason: str) -> NoReturn:
        """Raises HarnessEnded because of a message that makes no sense."""
        self._end_reason = f"it sent {json.dumps(message):.80}; {reason}"
        self._raise_ended(self._end_reason)

    def tell_policy(self, policy: dict[str, Any]) -> None:
        """
        Tells the harness about the policy, unless the harness was last told about the same policy.

        The policy may have changed, because several runs of one process may share the harness.
        """
        if policy != self._policy:
            self.endpoint.context = policy["context"]
            self.send(policy)
            self._policy = policy

    def send(self, message: dict[str, Any]) -> None:
        """
        Sends a message without waiting until the harness has read it.

        Raises HarnessEnded if the harness has ended.
        """
        if self._is_closed or self._end_reason:
            self._raise_ended(self._end_reason or "it was closed")
        self._outgoing.put(message)

    def _write_messages(self) -> None:
        """Writes the messages that `send` queued. Runs in a thread of its own."""
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):  # the harness has ended; the reading thread notices it
            while (message := self._outgoing.get()) is not None:
                self.process.stdin.write(json.dumps(message).encode() + b"\n")
                self.process.stdin.flush()
        with contextlib.suppress(OSError):
            self.process.stdin.close()

    def take_event(self, timeout: float) -> Any:
        """
        Removes and returns the next event; None if there is none after `timeout` seconds.

        Raises HarnessEnded if the harness has ended and all of its messages have been taken.
        """
        deadline = time.monotonic() + timeout
        while True:
            # read the reason before the queue, so that messages from before the end are taken first
            end_reason = self._end_reason
            wait_s = min(max(deadline - time.monotonic(), 0.0), POLL_SECONDS)
            event = None
            with contextlib.suppress(queue.Empty):
                event = self.events.get(timeout=wait_s) if wait_s else self.events.get_nowait()
            if event is not None:
                if isinstance(event, dict):
                    self._num_free.release()
                return event
            if end_reason:
                self._raise_ended(end_reason)
            self._notice_end_with_open_output()
            if time.monotonic() >= deadline:
                return None

    def _read_messages(self) -> None:
        """Puts every message of the harness into `events`. Runs in a thread of its own."""
        assert self.process.stdout is not None
        while True:
            line = self.process.stdout.readline(MOST_LINE_BYTES)
            if not line:
                break
            if len(line) == MOST_LINE_BYTES:
                self._end_reason = f"it sent a line of more than {MOST_LINE_BYTES >> 20} MB"
                return
            message = parse_message(line)
            if message is None:
                self._end_reason = f"it sent {line[:80]!r}, which is not a message"
                return
            self._num_free.acquire()
            self.events.put(message)
        try:
            status = self.process.wait(END_SECONDS)
            self._end_reason = f"it ended with the status {status}"
        except subprocess.TimeoutExpired:
            self._end_reason = "it closed its standard output, but has not ended"

    def _notice_end_with_open_output(self) -> None:
        """
        Notices that the harness has ended although a child process keeps its output open.

        The thread that reads the output cannot notice this. The end is recorded `END_SECONDS` after
        it was first noticed, as the reason why the harness can no longer be used.
        """
        status = self.process.poll()
        if status is None or self._end_reason:
            return
        if self._ended_at is None:
            self._ended_at = time.monotonic()
        elif time.monotonic() - self._ended_at > END_SECONDS:
            self._end_reason = f"it ended with the status {status}"

    def _raise_ended(self, reason: str) -> NoReturn:
        """Raises HarnessEnded with the reason and the last line that the harness printed."""
        raise HarnessEnded(
            f"--env-server {self.command}: {reason}{self._last_log_line()}; the whole output is in "
            f"{self.log}"
        )

    def _last_log_line(self) -> str:
        with open(self.log, "rb") as file:
            file.seek(max(os.path.getsize(self.log) - 4096, 0))
            lines = file.read().decode(errors="replace").split("\n")
        # a line without a letter, such as a row of asterisks, explains nothing
        lines = [line.strip() for line in lines if re.search("[A-Za-z]", line)]
        return f": {lines[-1]:.200}" if lines else ""

    # ---- the end

    @property
    def has_ended(self) -> bool:
        """Whether the harness can no longer be used."""
        return self._is_closed or bool(self._end_reason) or self.process.poll() is not None

    def close(self) -> None:
        """Ends the harness with all of its children, and the endpoint."""
        if self._is_closed:
            return
        self._is_closed = True
        atexit.unregister(self.close)
        self._outgoing.put(None)  # closes the input of the harness
        # an impatient user may interrupt the wait
        with contextlib.suppress(subprocess.TimeoutExpired, KeyboardInterrupt):
            self.process.wait(END_SECONDS)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self._guard.kill()
        self._guard.communicate()
        self.endpoint.close()


# ---- the harnesses of this process

_running: dict[str, Harness] = {}


def get_or_start_harness(command: str) -> Harness:
    """
    Returns the harness of this command, and starts the harness unless it already runs.

    Runs and evaluations of one process share the harness. It ends with the process.
    """
    harness = _running.get(command)
    if harness is None or harness.has_ended:
        if harness is not None:
            harness.close()
        harness = Harness(command)
        _running[command] = harness
    return harness


def close_harnesses() -> None:
    """Ends all harnesses of this process."""
    while _running:
        _running.popitem()[1].close()
