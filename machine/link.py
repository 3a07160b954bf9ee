"""
The connection between several machines: how it begins, how they exchange data, and how it ends.

`mlx.launch` starts the same command on each machine and gives each a rank. MLX transports the
bytes. In every exchange, each machine first sends a short message: the purpose of the exchange, or
the reason why this machine ends. So all machines end together and know the reason. This file does
not cover what the machines exchange (machine/world.py).

MLX's collectives have two traps. On a GPU's stream, Metal's watchdog kills a collective that waits.
So collectives run on the CPU's stream, on copies in plain memory that no stream is still writing.
And if a machine hangs, a collective blocks its thread forever. So collectives have a thread of
their own, while the main thread listens for signals and watches the clock.
"""

import atexit
import base64
import contextlib
import faulthandler
import json
import os
import queue
import signal
import socket
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import mlx.core as mx
import numpy as np

from machine import alive

# Seconds in which the other machines must connect; on ranks other than 0, MLX gives up after 31.
JOIN_TIMEOUT = 35.0
EXCHANGE_TIMEOUT = 1800.0  # seconds without progress, after which an exchange fails
FAREWELL_TIMEOUT = 20.0  # the same, for an exchange that says why this machine ends
# The most numbers that are summed at once. This bounds the copies and keeps arrays below 2**31
# numbers.
BLOCK = 2**24
HEADER_SIZE = 2**14  # bytes of an exchange's first message, padded with spaces
MOST_REASON = 1000  # characters of a reason; each takes at most 12 bytes in the header


class LinkError(ValueError):
    """Another machine failed, is gone, or does something else. The message is one line."""


current: "Link | None" = None  # None: this process is the only one


@contextlib.contextmanager
def connect() -> Iterator[None]:
    """
    Connects this process with the others, if a launcher started several.

    If this machine ends early, it tells the others why. Ranks other than 0 print nothing, except
    one line if they end early. SIGTERM and SIGHUP, which come from a launcher or after a lost
    connection, act like Ctrl-C.

    Raises ValueError if the machines do not find each other.
    """
    global current
    group = None
    if not {"MLX_RANK", "OMPI_COMM_WORLD_RANK"}.isdisjoint(os.environ):
        with alive.show_activity("waiting for the other machines"):
            group = _init()
    if group is None or group.size() == 1:
        yield
        return

    current = Link(group)
    streams = (sys.stdout, sys.stderr)
    for number in ending_signals()[1:]:
        signal.signal(number, raise_interrupt)
    try:
        host_names = current.all_gather(socket.gethostname())
        current.names = [f"rank {rank} ({name})" for rank, name in enumerate(host_names)]
        if current.rank == 0:
            print(f"machines: {', '.join(current.names)}", flush=True)
        else:
            sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115  (until the process ends)
        yield
        current.all_gather("done")  # no machine disconnects while another is still at work
    except BaseException as error:
        sys.stdout, sys.stderr = streams
        current.announce_end(error)
        if isinstance(error, KeyboardInterrupt):
            print(f"\n{describe_end(error)}", file=sys.stderr)
            sys.exit(130)
        raise
    finally:
        sys.stdout, sys.stderr = streams


def _init() -> Any:
    """
    Opens MLX's group of machines.

    Raises ValueError if that fails. On rank 0, the process ends if the others do not connect in
    time.
    """
    if os.environ.get("MLX_METAL_FAST_SYNCH", "0") not in ("", "0"):
        raise ValueError(
            "MLX_METAL_FAST_SYNCH is set; with several machines MLX hangs with it, so unset it"
        )
    if os.environ.get("MLX_RANK", "0") == "0":
        print(
            f"waiting up to {JOIN_TIMEOUT:.0f} s for the other machines; see docs/runs.md",
            file=sys.stderr,
            flush=True,
        )
    # MLX holds the interpreter's lock, so no Python signal handler would run.
    handler = signal.signal(signal.SIGINT, signal.SIG_DFL)
    with open(os.devnull, "w") as nowhere:
        faulthandler.dump_traceback_later(JOIN_TIMEOUT, exit=True, file=nowhere)
        try:
            return mx.distributed.init(strict=True)
        except RuntimeError as error:
            raise ValueError(
                f"the machines did not find each other: {error}; see docs/runs.md"
            ) from error
        finally:
            faulthandler.cancel_dump_traceback_later()
            signal.signal(signal.SIGINT, handler)


def refuse_differences(facts: dict[str, Any]) -> None:
    """Raises LinkError on every machine if one machine's facts differ from those of rank 0."""
    assert current
    all_facts = current.all_gather(facts)
    expected = all_facts[0]
    for name, machine_facts in zip(current.names, all_facts, strict=True):
        for fact, value in machine_facts.items():
            if value != expected[fact]:
                raise LinkError(
                    f"{name} has another {fact} than {current.names[0]}: {value}, not "
                    f"{expected[fact]}; make them the same"
                )


def code_checksum() -> int:
    """A checksum of the files of Gwen's imported modules, which differs between versions."""
    root = Path(__file__).parent.parent
    modules = list(sys.modules.values())
    files = {Path(getattr(module, "__file__", None) or "/") for module in modules}
    gwen_files = sorted(file for file in files if root in (file.parent, file.parent.parent))
    return zlib.crc32(b"".join(file.read_bytes() for file in gwen_files))


# ---- early ends


def ending_signals() -> list[signal.Signals]:
    """
    The signals that end a run but let it save first; SIGINT is the first of them.

    They come from Ctrl-C, a launcher, a scheduler or a closed terminal. Ignored ones are left out.
    """
    signals = [signal.SIGINT]
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:
            signals.append(number)
    return signals


def raise_interrupt(number: int, *_: Any) -> NoReturn:
    """
    A signal handler that raises KeyboardInterrupt.

    The exception's argument is the signal's name; it has none for SIGINT.
    """
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    raise KeyboardInterrupt(signal.Signals(number).name)


def describe_end(error: BaseException) -> str:
    """Why this machine ends, after the machine's name if there are several."""
    reason = _end_reason(error)
    if current is None:
        return reason
    return f"{current.names[current.rank]}: {reason}"


def _end_reason(error: BaseException) -> str:
    if isinstance(error, SystemExit) and error.__context__ is not None:
        error = error.__context__  # the error that made the process call exit
    if isinstance(error, KeyboardInterrupt):
        return f"stopped by {error}" if error.args else "stopped by Ctrl-C"
    return str(error).strip() or type(error).__name__


# ---- the connection


class Job(NamedTuple):
    """One exchange, for the thread; see `Link.exchange`."""

    result: "Future[list[bytes]]"
    purpose: str
    data: bytes
    flat: np.ndarray | None
    reason: str


class Link:
    """The connection. A thread runs the collectives, in order; the main thread waits for it."""

    def __init__(self, group: Any):
        self.group = group
        self.rank = group.rank()
        self.size = group.size()
        self.names = [f"rank {rank}" for rank in range(self.size)]
        self.wait_s = 0.0
        self.num_collectives = 0
        self.is_over = False
        self.is_stuck = False
        self.jobs: queue.SimpleQueue[Job] = queue.SimpleQueue()
        threading.Thread(target=self._work, daemon=True).start()
        atexit.register(self._leave)  # registered first, so that it runs last

    # ---- in the main thread

    def exchange(
        self, purpose: str, data: bytes = b"", flat: np.ndarray | None = None, reason: str = ""
    ) -> list[bytes]:
        """
        Exchanges data; returns the data of all machines, by rank.

        flat: an array that is overwritten with its sum over all machines. reason: why this machine
        ends; "" if it does not. The exchange is one job of the thread, so that a Ctrl-C here does
        not interrupt the exchange for the other machines.

        Raises LinkError if a machine ends or is gone, or if no collective completes for
        EXCHANGE_TIMEOUT seconds (FAREWELL_TIMEOUT if this machine ends).
        """
        if self.is_over:
            raise LinkError("the machines have parted")
        begin = time.monotonic()
        timeout = FAREWELL_TIMEOUT if reason else EXCHANGE_TIMEOUT
        job = Job(Future(), purpose, data, flat, reason)
        self.jobs.put(job)
        num_before = -1
        while not job.result.done() and num_before < self.num_collectives:
            num_before = self.num_collectives
            wait([job.result], timeout)
        self.wait_s += time.monotonic() - begin

        self.is_stuck = not job.result.done()
        if self.is_stuck:
            self.is_over = True
            raise LinkError(
                f"a machine hangs or is very late: nothing came from it for {timeout:.0f} s"
            )
        error = job.result.exception()
        if error is None:
            return job.result.result()
        self.is_over = True
        if isinstance(error, LinkError):
            raise LinkError(str(error))
        raise LinkError(f"another machine is gone, or the network to it ({error})")

    def all_gather(self, value: Any, purpose: str = "all_gather") -> list[Any]:
        """See `world.all_gather`."""
        return [_decode(data) for data in self.exchange(purpose, _encode(value))]

    def announce_end(self, error: BaseException) -> None:
        """
        Tells the other machines, in their next exchange, why this machine ends.

        Waits at most FAREWELL_TIMEOUT seconds for them.
        """
        is_success = isinstance(error, SystemExit) and not error.code
        if not self.is_over and not is_success:
            reason = " ".join(_end_reason(error).split())[:MOST_REASON]
            with contextlib.suppress(LinkError, KeyboardInterrupt):
                self.exchange("", reason=reason)
        self.is_over = True

    def _leave(self) -> None:
        """Ends the process if it is stuck: MLX would wait for a collective that never completes."""
        if self.is_stuck:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)

    # ---- in the thread

    def _work(self) -> None:
        while True:
            job = self.jobs.get()
            try:
                job.result.set_result(self._run_job(job))
            except BaseException as error:  # the main thread reports it
                job.result.set_exception(error)

    def _run_job(self, job: Job) -> list[bytes]:
        """
        Exchanges the headers, then computes the sum and exchanges the data that they announce.

        Raises LinkError if a machine ends, or if two machines have different purposes.
        """
        purpose_checksum = zlib.crc32(job.purpose.encode())
        header = json.dumps([job.reason, purpose_checksum, len(job.data)])
        headers = self._gather_bytes(header.encode().ljust(HEADER_SIZE))
        reasons, purposes, sizes = zip(*map(json.loads, headers), strict=True)
        for name, reason in zip(self.names, reasons, strict=True):
            if reason:
                raise LinkError(f"{name}: {reason}")
        if len(set(purposes)) > 1:
            raise LinkError(
                f"the machines have lost step with each other, at a {job.purpose}; start them again"
            )

        if job.flat is not None:
            for block in np.split(job.flat, range(BLOCK, len(job.flat), BLOCK)):
                block[:] = self._run_collective(mx.distributed.all_sum, block)
        largest = max(sizes)
        if not largest:
            return [b""] * self.size
        padded = self._gather_bytes(job.data.ljust(largest, b"\0"))
        return [data[:size] for data, size in zip(padded, sizes, strict=True)]

    def _gather_bytes(self, data: bytes) -> list[bytes]:
        """The bytes of all machines, by rank. All machines must send equally many bytes."""
        array = np.frombuffer(data, np.uint8)
        gathered = self._run_collective(mx.distributed.all_gather, array)
        return [part.tobytes() for part in np.split(gathered, self.size)]

    def _run_collective(self, collective: Callable[..., mx.array], array: np.ndarray) -> np.ndarray:
        """The result of one MLX collective on this machine's array."""
        result = collective(mx.array(array), group=self.group, stream=mx.cpu)
        mx.eval(result)  # waits for the slowest machine; the main thread goes on meanwhile
        self.num_collectives += 1
        return np.array(result)


# ---- values as bytes


def _encode(value: Any) -> bytes:
    """A value as JSON with arrays in base64. Unlike a pickle, it runs no code when read."""
    return json.dumps(value, default=_encode_object).encode()


def _encode_object(value: Any) -> Any:
    if isinstance(value, range):
        return list(value)
    if not isinstance(value, (np.ndarray, mx.array)):
        raise TypeError(f"{type(value).__name__} cannot be sent to other machines")
    array = np.array(value)
    text = base64.b64encode(array.tobytes()).decode()
    return {"array": [text, array.dtype.str, array.shape, isinstance(value, mx.array)]}


def _decode(data: bytes) -> Any:
    """The value that was encoded. No dictionary in it may have "array" as its only key."""
    return json.loads(data, object_hook=_decode_object)


def _decode_object(entry: dict[str, Any]) -> Any:
    if entry.keys() != {"array"}:
        return entry
    text, dtype, shape, is_mlx = entry["array"]
    array = np.frombuffer(base64.b64decode(text), dtype).reshape(shape)
    return mx.array(array) if is_mlx else array
