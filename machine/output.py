"""
Standard output and standard error that cannot end a command.

The reader of a pipe leaves, a disk fills up, a terminal closes, an encoding lacks a character: none of these is a
reason to lose a run. Inside `guarded()` text that cannot be written is dropped, and a character that the encoding lacks
is escaped. Left out: what is printed (reporting/console.py).
"""

import contextlib
import errno
import io
import os
import select
import sys
from collections.abc import Callable, Iterator
from typing import Any, TextIO


class LossyFile(io.FileIO):
    """A file descriptor for writing that drops what it cannot write, and keeps the first error."""

    error: OSError | None = None

    def __init__(self, descriptor: int, on_loss: Callable[[OSError], None] | None = None):
        super().__init__(descriptor, "w", closefd=False)
        self.on_loss = on_loss

    def write(self, data: Any) -> int:
        try:
            while (
                num_bytes := super().write(data)
            ) is None:  # a pipe that does not block, and is full
                select.select([], [self.fileno()], [])
            return num_bytes
        except OSError as error:
            if self.error is None:
                self.error = error
                if self.on_loss is not None:
                    self.on_loss(error)
            return len(memoryview(data).cast("B"))


@contextlib.contextmanager
def guard_output(*, is_log: bool = False) -> Iterator[None]:
    """
    Inside, or in a function that it decorates, no error of stdout or stderr is raised.

    is_log: stdout only tells how a run goes. If it is lost, a line on stderr says that the run
    goes on. Otherwise stdout is the result: if it cannot be written, the command ends with
    status 1, unless its reader left, as `head` does.
    """
    _open_standard_descriptors()
    streams = sys.stdin, sys.stdout, sys.stderr

    def tell_loss(error: OSError) -> None:
        if is_log:
            _report_loss(f"standard output is lost ({error.strerror}); the run goes on without it")

    sys.stdin = _make_readable(sys.stdin)
    sys.stderr = _make_lossy(sys.stderr, None)
    sys.stdout = _make_lossy(sys.stdout, tell_loss)
    ours = sys.stdin, sys.stdout, sys.stderr
    is_whole = False
    try:
        yield
        is_whole = True
    finally:
        for stream in ours[1:]:
            with contextlib.suppress(ValueError):  # somebody closed it
                stream.flush()
        for name, stream, before in zip(("stdin", "stdout", "stderr"), ours, streams, strict=True):
            is_ours = getattr(sys, name) is stream  # else somebody redirected it meanwhile
            if is_ours and before is not None:  # what runs at the end of the process flushes it
                setattr(sys, name, before)
    error = getattr(_file_of(ours[1]), "error", None)
    is_new = ours[1] is not streams[1]
    if is_whole and is_new and not is_log and error is not None and error.errno != errno.EPIPE:
        _report_loss(f"error: standard output cannot be written: {error.strerror}")
        sys.exit(1)


def _report_loss(line: str) -> None:
    with contextlib.suppress(
        OSError, ValueError, AttributeError
    ):  # stderr may be lost, closed or None
        print(line, file=sys.stderr, flush=True)


def _open_standard_descriptors() -> None:
    """
    Opens a closed stdin, stdout or stderr on /dev/null.

    The next file that the process opens would get the free number, and what any library or child process prints would
    be written into that file.
    """
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number, which is this one


def _make_readable(stream: TextIO | None) -> TextIO:
    """stdin; an empty one if Python has none, as after `<&-`."""
    return open(os.devnull) if stream is None else stream


def _make_lossy(stream: TextIO | None, on_loss: Callable[[OSError], None] | None) -> TextIO:
    """
    The same stream, on a descriptor that drops what it cannot write.

    Python has no stream after `>&-`: what is printed then goes nowhere. A stream that is no plain file, as a notebook's
    or a test's, is returned as it is.
    """
    if stream is None:
        return open(os.devnull, "w", encoding="utf-8", errors="backslashreplace")
    if type(stream) is not io.TextIOWrapper or isinstance(_file_of(stream), LossyFile):
        return stream
    try:
        file = LossyFile(stream.fileno(), on_loss)
    except (OSError, ValueError):  # in memory, or closed
        return stream
    with contextlib.suppress(OSError):  # what the old one still holds cannot be written either
        stream.flush()
    buffer: Any = file if stream.write_through else io.BufferedWriter(file)  # -u: no buffer
    return io.TextIOWrapper(
        buffer,
        encoding=stream.encoding,
        errors="backslashreplace",
        newline="\n",
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


def _file_of(stream: Any) -> Any:
    """The file below a stream's buffer, if it has one."""
    buffer = getattr(stream, "buffer", None)
    return getattr(buffer, "raw", buffer)
