"""
Connects several machines, lets them exchange data, and makes them end together.

`mlx.launch` starts the same command on each machine and assigns each machine a rank. MLX transports
the bytes. In every exchange, each machine first sends a short message with the purpose of the
exchange or with the reason why the machine ends. So if one machine ends, all machines end together
and know the reason. machine/world.py defines what the machines exchange.

MLX's collectives have two problems. First, Metal's watchdog kills a collective that waits on the
GPU's stream. So collectives run on the CPU's stream. They work on finished copies of the data in
plain memory, and therefore never wait for the GPU. Second, if a machine hangs, a collective blocks
its thread forever. So collectives have a thread of their own, while the main thread handles signals
and timeouts.
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

import cpu_blas  # noqa: F401  (before mlx)
import mlx.core as mx
import numpy as np

from machine import alive

# The other machines must connect within this number of seconds. On ranks other than 0, MLX gives up
# after 31 seconds.
JOIN_TIMEOUT = 35.0
EXCHANGE_TIMEOUT = 1800.0  # the number of seconds without progress after which an exchange fails
# the number of seconds without progress after which the announcement of an early end fails
FAREWELL_TIMEOUT = 20.0

# At most this many numbers are summed at once, which limits the size of the copies and keeps arrays
# below 2**31 numbers.
BLOCK = 2**24
HEADER_SIZE = 2**14  # the size in bytes of an exchange's first message, padded with spaces

# The largest number of characters in a reason, each of which takes at most 12 bytes in the header.
MOST_REASON = 1000


class LinkError(ValueError):
    """
    Another machine has failed, has disconnected or is out of step.

    The message of the error is one line.
    """


current: "Link | None" = None  # None if this process is the only one


@contextlib.contextmanager
def connect_machines() -> Iterator[None]:
    """
    Inside the context, this process is connected to the other processes that a launcher started.

    If this machine ends early, it tells the other machines why. Ranks other than 0 print nothing,
    except for one line if they end early. SIGTERM, which a launcher may send, and SIGHUP, which
    follows a lost connection to the terminal, act like Ctrl-C.

    Raises ValueError if the machines do not find each other.
    """
    global current
    group = None
    if not {"MLX_RANK", "OMPI_COMM_WORLD_RANK"}.isdisjoint(os.environ):
        with alive.show_activity("waiting for the other machines"):
            group = _join_mlx_group()
    if group is None or group.size() == 1:
        yield
        return

    current = Link(group)
    streams = (sys.stdout, sys.stderr)
    for number in signals_that_end_run()[1:]:
        signal.signal(number, raise_keyboard_interrupt)
    try:
        host_names = current.all_gather(socket.gethostname())
        current.names = [f"rank {rank} ({name})" for rank, name in enumerate(host_names)]
        if current.rank == 0:
            print(f"machines: {', '.join(current.names)}", flush=True)
        else:
            sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115  (until the process ends)
        yield
        current.all_gather("done")  # no machine disconnects while another machine is still working
    except BaseException as error:
        sys.stdout, sys.stderr = streams
        current.announce_end(error)
        if isinstance(error, KeyboardInterrupt):
            print(f"\n{end_reason_with_machine_name(error)}", file=sys.stderr)
            sys.exit(130)
        raise
    finally:
        sys.stdout, sys.stderr = streams


def _join_mlx_group() -> Any:
    """
    Joins MLX's group of machines and returns the group.

    Raises ValueError if joining fails. On rank 0, the process ends if the other machines do not
    connect in time.
    """
    if os.environ.get("MLX_METAL_FAST_SYNCH", "0") not in ("", "0"):
        raise ValueError(
            "MLX_METAL_FAST_SYNCH is set, which makes MLX hang if there are several machines; "
            "unset it"
        )
    if os.environ.get("MLX_RANK", "0") == "0":
        print(
            f"waiting up to {JOIN_TIMEOUT:.0f} s for the other machines; see docs/runs.md",
            file=sys.stderr,
            flush=True,
        )
    # MLX holds the interpreter lock while it connects, so a Python signal handler could not run.
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


def raise_if_machines_differ(facts: dict[str, Any]) -> None:
    """Raises LinkError on every machine if any machine's facts differ from the facts of rank 0."""
    assert current
    all_facts = current.all_gather(facts)
    expected = all_facts[0]
    for name, machine_facts in zip(current.names, all_facts, strict=True):
        for fact, value in machine_facts.items():
            if value != expected[fact]:
                raise LinkError(
                    f"{name} has a different {fact} than {current.names[0]}: {value} instead of "
                    f"{expected[fact]}; use the same {fact} on all machines"
                )


def imported_code_checksum() -> int:
    """A checksum of the source files of all imported Gwen modules."""
    root = Path(__file__).parent.parent
    modules = list(sys.modules.values())
    files = {Path(getattr(module, "__file__", None) or "/") for module in modules}
    gwen_files = sorted(file for file in files if root in (file.parent, file.parent.parent))
    return zlib.crc32(b"".join(file.read_bytes() for file in gwen_files))


# ---- ending early


def signals_that_end_run() -> list[signal.Signals]:
    """
    The signals that make a run save its state and end. The first one in the list is SIGINT.

    These signals come from Ctrl-C, a launcher, a scheduler or a closed terminal. Signals that this
    process ignores are not included.
    """
    signals = [signal.SIGINT]
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:
            signals.append(number)
    return signals


def raise_keyboard_interrupt(signal_number: int, *_: Any) -> NoReturn:
    """
    A signal handler that raises KeyboardInterrupt.

    For SIGINT, the exception has no argument. For other signals, the exception's argument is the
    signal's name.
    """
    if signal_number == signal.SIGINT:
        raise KeyboardInterrupt
    raise KeyboardInterrupt(signal.Signals(signal_number).name)


def end_reason_with_machine_name(error: BaseException) -> str:
    """The reason why this machine ends, with the machine's name if there are several machines."""
    reason = _end_reason_without_machine_name(error)
    if current is None:
        return reason
    return f"{current.names[current.rank]}: {reason}"


def _end_reason_without_machine_name(error: BaseException) -> str:
    if isinstance(error, SystemExit) and error.__context__ is not None:
        error = error.__context__  # the error that made the process call exit
    if isinstance(error, KeyboardInterrupt):
        return f"stopped by {error}" if error.args else "stopped by Ctrl-C"
    return str(error).strip() or type(error).__name__


# ---- the connection


class ExchangeJob(NamedTuple):
    """One exchange for the thread to carry out, with the arguments of `Link.exchange`."""

    result: "Future[list[bytes]]"
    purpose: str
    data: bytes
    array_to_sum: np.ndarray | None
    end_reason: str


class Link:
    """
    The connection of this machine to the other machines.

    A thread runs the collectives in order, while the main thread waits for their results.
    """

    def __init__(self, group: Any):
        self.group = group
        self.rank = group.rank()
        self.size = group.size()
        self.names = [f"rank {rank}" for rank in range(self.size)]
        self.wait_s = 0.0
        self.num_collectives = 0
        self.is_over = False
        self.is_stuck = False
        self.jobs: queue.SimpleQueue[ExchangeJob] = queue.SimpleQueue()
        threading.Thread(target=self._run_jobs_forever, daemon=True).start()
        atexit.register(self._exit_if_stuck)  # registered first, so that it runs last

    # ---- in the main thread

    def exchange(
        self,
        purpose: str,
        data: bytes = b"",
        array_to_sum: np.ndarray | None = None,
        end_reason: str = "",
    ) -> list[bytes]:
        """
        Exchanges data with all machines, and returns the data of all machines, by rank.

        array_to_sum: an array that is overwritten with its sum over all machines.
        end_reason: the reason why this machine ends, or "" if it does not end.

        The thread carries out the whole exchange, so that Ctrl-C on this machine does not interrupt
        the exchange on the other machines.

        Raises LinkError if a machine ends or has disconnected, or if no collective completes for
        EXCHANGE_TIMEOUT seconds (FAREWELL_TIMEOUT if this machine ends).
        """
        if self.is_over:
            raise LinkError("the connection to the other machines has already ended")
        begin = time.monotonic()
        timeout = FAREWELL_TIMEOUT if end_reason else EXCHANGE_TIMEOUT
        job = ExchangeJob(Future(), purpose, data, array_to_sum, end_reason)
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
                f"a machine hangs or is very late: no data has arrived for {timeout:.0f} s; "
                "start all machines again"
            )
        error = job.result.exception()
        if error is None:
            return job.result.result()
        self.is_over = True
        if isinstance(error, LinkError):
            raise LinkError(str(error))
        raise LinkError(f"another machine or the network connection to it has failed ({error})")

    def all_gather(self, value: Any, purpose: str = "all_gather") -> list[Any]:
        """The values of all machines, by rank, as described in `world.all_gather`."""
        return [_decode(data) for data in self.exchange(purpose, _encode(value))]

    def announce_end(self, error: BaseException) -> None:
        """
        Tells the other machines, in their next exchange, why this machine ends.

        This call waits at most FAREWELL_TIMEOUT seconds for the other machines.
        """
        is_success = isinstance(error, SystemExit) and not error.code
        if not self.is_over and not is_success:
            reason = " ".join(_end_reason_without_machine_name(error).split())[:MOST_REASON]
            with contextlib.suppress(LinkError, KeyboardInterrupt):
                self.exchange("", end_reason=reason)
        self.is_over = True

    def _exit_if_stuck(self) -> None:
        """
        Ends the process immediately if a collective is stuck.

        Otherwise, MLX would wait forever for this collective when the process exits.
        """
        if self.is_stuck:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)

    # ---- in the thread

    def _run_jobs_forever(self) -> None:
        while True:
            job = self.jobs.get()
            try:
                job.result.set_result(self._run_job(job))
            except BaseException as error:  # the main thread reports the error
                job.result.set_exception(error)

    def _run_job(self, job: ExchangeJob) -> list[bytes]:
        """
        Exchanges headers, then computes the requested sum, and then exchanges the data.

        Raises LinkError if a machine ends, or if two machines have different purposes.
        """
        purpose_checksum = zlib.crc32(job.purpose.encode())
        header = json.dumps([job.end_reason, purpose_checksum, len(job.data)])
        headers = self._gather_bytes(header.encode().ljust(HEADER_SIZE))
        reasons, purposes, sizes = zip(*map(json.loads, headers), strict=True)
        for name, reason in zip(self.names, reasons, strict=True):
            if reason:
                raise LinkError(f"{name}: {reason}")
        if len(set(purposes)) > 1:
            raise LinkError(
                f"the machines are out of step: during this machine's exchange {job.purpose!r}, "
                f"another machine started a different exchange; start all machines again"
            )

        if job.array_to_sum is not None:
            for block in np.split(job.array_to_sum, range(BLOCK, len(job.array_to_sum), BLOCK)):
                block[:] = self._run_collective(mx.distributed.all_sum, block)
        largest = max(sizes)
        if not largest:
            return [b""] * self.size
        padded = self._gather_bytes(job.data.ljust(largest, b"\0"))
        return [data[:size] for data, size in zip(padded, sizes, strict=True)]

    def _gather_bytes(self, padded_data: bytes) -> list[bytes]:
        """The data of all machines, by rank; all machines must send the same number of bytes."""
        array = np.frombuffer(padded_data, np.uint8)
        gathered = self._run_collective(mx.distributed.all_gather, array)
        return [part.tobytes() for part in np.split(gathered, self.size)]

    def _run_collective(self, collective: Callable[..., mx.array], array: np.ndarray) -> np.ndarray:
        """The result of one MLX collective to which this machine contributes `array`."""
        result = collective(mx.array(array), group=self.group, stream=mx.cpu)
        mx.eval(result)  # this thread waits for the slowest machine, but the main thread does not
        self.num_collectives += 1
        return np.array(result)


# ---- values as bytes


def _encode(value: Any) -> bytes:
    """
    The value as JSON, with arrays encoded in base64.

    Decoding JSON, unlike loading a pickle, cannot run code.
    """
    return json.dumps(value, default=_encode_object).encode()


def _encode_object(value: Any) -> Any:
    if isinstance(value, range):
        return list(value)
    if not isinstance(value, (np.ndarray, mx.array)):
        raise TypeError(f"a value of type {type(value).__name__} cannot be sent to other machines")
    array = np.array(value)
    text = base64.b64encode(array.tobytes()).decode()
    return {"array": [text, array.dtype.str, array.shape, isinstance(value, mx.array)]}


def _decode(data: bytes) -> Any:
    """
    The value that `_encode` encoded in the data.

    No dictionary in the value may have "array" as its only key.
    """
    return json.loads(data, object_hook=_decode_object)


def _decode_object(entry: dict[str, Any]) -> Any:
    if entry.keys() != {"array"}:
        return entry
    text, dtype, shape, is_mlx = entry["array"]
    array = np.frombuffer(base64.b64decode(text), dtype).reshape(shape)
    return mx.array(array) if is_mlx else array
