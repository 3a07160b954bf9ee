"""
The connection of several machines: how they find each other, the thread that makes MLX's collectives, how they part.

`mlx.launch` starts the same command on each machine and tells it its rank; MLX carries the bytes. A meeting begins with
a short message of every machine, which says what it is about to do, or why it ends: so all of them end together, with a
reason. Left out: what they bring together (machine/world.py).

MLX's collectives have traps. On a GPU's stream, Metal's watchdog kills one that waits, so they run on the CPU's, on
copies in plain memory that no stream is still writing. They hold up their thread for ever when a machine hangs, so they
have a thread of their own, and the main one listens to signals and to the clock.
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
from typing import Any, NoReturn

import mlx.core as mx
import numpy as np

from machine import alive

JOIN = 35.0  # seconds in which the others must come; but for rank 0 MLX gives up after 31
PATIENCE = 1800.0  # seconds without a piece of a meeting, after which a machine is given up
TELL = 20.0  # seconds in which the others should hear why this machine ends
BLOCK = 2**24  # numbers that are summed in one piece; bounds the copies, and an array has less than 2**31
HEAD = 2**14  # bytes of a message, padded with spaces


class Lost(ValueError):
    """Another machine failed, is gone or does something else; why, in one line."""


current: "Link | None" = None  # None: this process is the only one


@contextlib.contextmanager
def connect() -> Iterator[None]:
    """
    Makes this process one of several, if a launcher says so; whatever ends it early is told to the others.

    All but rank 0 print nothing until they end, with one line. SIGTERM and SIGHUP, as a launcher or a lost connection
    sends them, do what Ctrl-C does. Raises ValueError if the machines do not find each other.
    """
    global current
    group = None
    if not {"MLX_RANK", "OMPI_COMM_WORLD_RANK"}.isdisjoint(os.environ):
        with alive.show_activity("waiting for the other machines"):
            group = _init()
    if group is None or group.size() == 1:
        yield
        return
    current, streams = Link(group), (sys.stdout, sys.stderr)
    for number in ending_signals()[1:]:
        signal.signal(number, raise_interrupt)
    try:
        current.names = current.all_gather(socket.gethostname())
        current.names = [f"rank {number} ({name})" for number, name in enumerate(current.names)]
        if current.rank == 0:
            print(f"machines: {', '.join(current.names)}", flush=True)
        else:
            sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115  (until the process ends)
        yield
        current.all_gather("done")  # none closes its connection while another is still at work
    except BaseException as error:
        sys.stdout, sys.stderr = streams
        current.announce_end(error)
        if isinstance(error, KeyboardInterrupt):
            print(f"\n{name_machine(error)}", file=sys.stderr)
            sys.exit(130)
        raise
    finally:
        sys.stdout, sys.stderr = streams


def refuse_differences(facts: dict[str, Any]) -> None:
    """Raises Lost, on every machine, if one has another value of a fact than rank 0 has."""
    assert current
    (first, ours), *others = zip(current.names, current.all_gather(facts), strict=True)
    for name, theirs in others:
        for fact, its in theirs.items():
            if its != ours[fact]:
                raise Lost(f"{name} has another {fact} than {first}: {its}, not {ours[fact]}; make them the same")


def code_checksum() -> int:
    """A number that tells Gwen from another version of it: of the modules that it has imported."""
    root = Path(__file__).parent.parent
    files = {Path(getattr(module, "__file__", None) or "/") for module in list(sys.modules.values())}
    ours = sorted(file for file in files if root in (file.parent, file.parent.parent))
    return zlib.crc32(b"".join(file.read_bytes() for file in ours))


def ending_signals() -> list[signal.Signals]:
    """The signals that end a run and let it save: Ctrl-C, and those of a launcher, a scheduler or a closed terminal."""
    others = (signal.SIGTERM, signal.SIGHUP)
    return [signal.SIGINT] + [one for one in others if signal.getsignal(one) != signal.SIG_IGN]


def raise_interrupt(number: int, *_: Any) -> NoReturn:
    """A signal handler: Ctrl-C, which names any other signal."""
    raise KeyboardInterrupt(*[] if number == signal.SIGINT else [signal.Signals(number).name])


def name_machine(error: BaseException) -> str:
    """What ended this machine, with its name where there are several."""
    return _reason_of(error) if current is None else f"{current.names[current.rank]}: {_reason_of(error)}"


def _reason_of(error: BaseException) -> str:
    if isinstance(error, SystemExit) and error.__context__ is not None:
        error = error.__context__  # what made the process end itself
    if isinstance(error, KeyboardInterrupt):
        return f"stopped by {error if error.args else 'Ctrl-C'}"
    return str(error).strip() or type(error).__name__


def _init() -> Any:
    """MLX's group. Raises ValueError if it cannot be had; ends the process, at rank 0, if the others do not come."""
    if os.environ.get("MLX_METAL_FAST_SYNCH", "0") not in ("", "0"):
        raise ValueError("MLX_METAL_FAST_SYNCH is set; with several machines MLX hangs under it, so unset it")
    if os.environ.get("MLX_RANK", "0") == "0":
        print(f"waiting up to {JOIN:.0f} s for the other machines; see docs/runs.md", file=sys.stderr, flush=True)
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)  # MLX holds the interpreter's lock, so no handler would run
    with open(os.devnull, "w") as nowhere:
        faulthandler.dump_traceback_later(JOIN, exit=True, file=nowhere)
        try:
            return mx.distributed.init(strict=True)
        except RuntimeError as error:
            raise ValueError(f"the machines did not find each other: {error}; see docs/runs.md") from error
        finally:
            faulthandler.cancel_dump_traceback_later()
            signal.signal(signal.SIGINT, before)


class Link:
    """The connection: a thread that makes the collectives, one after the other, and who waits for it."""

    def __init__(self, group: Any):
        self.group, self.rank, self.size = group, group.rank(), group.size()
        self.names = [f"rank {number}" for number in range(self.size)]
        self.wait_s, self.num_pieces = 0.0, 0
        self.is_over, self.is_stuck = False, False
        self.jobs: queue.SimpleQueue[tuple[Future[list[bytes]], tuple[Any, ...]]] = queue.SimpleQueue()
        threading.Thread(target=self._work, daemon=True).start()
        atexit.register(self._leave)  # first, so that it runs last

    # ---- in the main thread

    def meet(self, kind: str, data: bytes = b"", flat: np.ndarray | None = None, reason: str = "") -> list[bytes]:
        """
        The data of all machines; or none, and flat becomes the sum of theirs. reason: why this machine ends.

        It is one job of the thread: a Ctrl-C here leaves no other machine in the middle. Raises Lost if a machine ends
        or is gone, or if no piece comes for PATIENCE seconds; TELL, for one that ends itself.
        """
        if self.is_over:
            raise Lost("the machines have parted")
        begin, patience, before = time.monotonic(), TELL if reason else PATIENCE, -1
        future: Future[list[bytes]] = Future()
        self.jobs.put((future, (kind, data, flat, reason)))
        while not future.done() and before < self.num_pieces:
            before = self.num_pieces
            wait([future], patience)
        self.wait_s += time.monotonic() - begin
        self.is_stuck = not future.done()
        if self.is_stuck:
            why = f"a machine hangs or is very late: nothing came from it for {patience:.0f} s"
        elif error := future.exception():
            why = str(error) if isinstance(error, Lost) else f"another machine is gone, or the network to it ({error})"
        else:
            return future.result()
        self.is_over = True
        raise Lost(why)

    def all_gather(self, value: Any, about: str = "share") -> list[Any]:
        """See `world.all_gather`."""
        return list(map(_decode, self.meet(about, _encode(value))))

    def announce_end(self, error: BaseException) -> None:
        """Says to the others, at their next meeting, why this machine ends; waits for a short time only."""
        if not self.is_over and not (isinstance(error, SystemExit) and not error.code):
            with contextlib.suppress(Lost, KeyboardInterrupt):
                self.meet("", reason=" ".join(_reason_of(error).split())[:1000])
        self.is_over = True

    def _leave(self) -> None:
        """Ends the process where MLX would wait for a collective that never ends."""
        if self.is_stuck:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)

    # ---- in the thread

    def _work(self) -> None:
        while True:
            future, job = self.jobs.get()
            try:
                future.set_result(self._meet(*job))
            except BaseException as error:  # the main thread tells it
                future.set_exception(error)

    def _meet(self, kind: str, data: bytes, flat: np.ndarray | None, reason: str) -> list[bytes]:
        """Exchanges messages, then what they announce. Raises Lost if a machine ends, or if one is about another."""
        head = json.dumps([reason, zlib.crc32(kind.encode()), len(data)])  # a character of the reason is 12 at most
        reasons, kinds, sizes = zip(*map(json.loads, self._gather_bytes(head.encode().ljust(HEAD))), strict=True)
        for name, its in zip(self.names, reasons, strict=True):
            if its:
                raise Lost(f"{name}: {its}")
        if len(set(kinds)) > 1:
            raise Lost(f"the machines have lost step with each other, at a {kind}; start them again")
        if flat is not None:
            for part in np.split(flat, range(BLOCK, len(flat), BLOCK)):
                part[:] = self._run_collective(mx.distributed.all_sum, part)
        pieces = self._gather_bytes(data.ljust(max(sizes), b"\0")) if max(sizes) else [b""] * self.size
        return [piece[:size] for piece, size in zip(pieces, sizes, strict=True)]

    def _gather_bytes(self, data: bytes) -> list[bytes]:
        """The bytes of all machines, which bring equally many."""
        gathered = self._run_collective(mx.distributed.all_gather, np.frombuffer(data, np.uint8))
        return [one.tobytes() for one in np.split(gathered, self.size)]

    def _run_collective(self, collective: Callable[..., mx.array], mine: np.ndarray) -> np.ndarray:
        """A piece of a meeting."""
        theirs = collective(mx.array(mine), group=self.group, stream=mx.cpu)
        mx.eval(theirs)  # wait, for the slowest machine; the main thread goes on meanwhile
        self.num_pieces += 1
        return np.array(theirs)


# ---- values as bytes


def _encode(value: Any) -> bytes:
    """JSON, in it arrays as base64. What is read runs no code, as a pickle may."""

    def spelled(x: Any) -> Any:
        if isinstance(x, range):
            return list(x)
        if not isinstance(x, (np.ndarray, mx.array)):
            raise TypeError(f"{type(x).__name__} cannot be shared")
        array = np.array(x)
        text = base64.b64encode(array.tobytes()).decode()
        return {"array": [text, array.dtype.str, array.shape, isinstance(x, mx.array)]}

    return json.dumps(value, default=spelled).encode()


def _decode(data: bytes) -> Any:
    """What `_encode` was given; no dictionary of it may have the one key "array"."""

    def array_of(entry: dict[str, Any]) -> Any:
        if entry.keys() != {"array"}:
            return entry
        text, dtype, shape, is_mlx = entry["array"]
        array = np.frombuffer(base64.b64decode(text), dtype).reshape(shape)
        return mx.array(array) if is_mlx else array

    return json.loads(data, object_hook=array_of)
