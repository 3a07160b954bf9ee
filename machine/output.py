"""
Standard output and standard error that cannot end a command.

A pipe's reader may leave, a disk may fill up, a terminal may close, an encoding may lack a
character: none of these is a reason to lose a run. Inside `guard_output()`, text that cannot be
written is dropped, and a character that the encoding lacks is escaped. This file does not cover
what is printed (reporting/console.py).
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
            num_bytes = super().write(data)
            while num_bytes is None:  # a full pipe in non-blocking mode
                select.select([], [self.fileno()], [])
                num_bytes = super().write(data)
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
    Inside the context, or in a function that it decorates, stdout and stderr raise no errors.

    is_log: whether stdout is only a log of a run. If a log is lost, a line on stderr says that the
    run goes on. Otherwise stdout is the command's result: if it cannot be written, the command ends
    with status 1, unless its reader has left, as `head` does.
    """

    def report_lost_log(error: OSError) -> None:
        if is_log:
            _print_error(f"standard output is lost ({error.strerror}); the run goes on without it")

    _open_standard_descriptors()
    streams_before = {"stdin": sys.stdin, "stdout": sys.stdout, "stderr": sys.stderr}
    stdin = _make_readable(sys.stdin)
    stderr = _make_lossy(sys.stderr, None)
    stdout = _make_lossy(sys.stdout, report_lost_log)
    sys.stdin = stdin
    sys.stderr = stderr
    sys.stdout = stdout
    guarded = {"stdin": stdin, "stdout": stdout, "stderr": stderr}
    has_ended_well = False
    try:
        yield
        has_ended_well = True
    finally:
        for stream in (stdout, stderr):
            with contextlib.suppress(ValueError):  # somebody closed it
                stream.flush()
        for name, stream in guarded.items():
            before = streams_before[name]
            is_unchanged = getattr(sys, name) is stream  # else somebody redirected it meanwhile
            if is_unchanged and before is not None:
                setattr(sys, name, before)  # the end of the process flushes it

    error = getattr(_raw_file(stdout), "error", None)
    is_new = stdout is not streams_before["stdout"]  # else an outer guard reports the error
    if not has_ended_well or not is_new or is_log or error is None:
        return
    if error.errno != errno.EPIPE:
        _print_error(f"error: standard output cannot be written: {error.strerror}")
        sys.exit(1)


def _print_error(line: str) -> None:
    # stderr may be lost, closed or None
    with contextlib.suppress(OSError, ValueError, AttributeError):
        print(line, file=sys.stderr, flush=True)


def _open_standard_descriptors() -> None:
    """
    Opens /dev/null in place of a closed stdin, stdout or stderr.

    Otherwise, the next file that the process opens would get the free descriptor, and whatever a
    library or child process prints would be written into that file.
    """
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number, which is this one


def _make_readable(stream: TextIO | None) -> TextIO:
    """The stream stdin, or an empty stream if Python has none, as after `<&-`."""
    return open(os.devnull) if stream is None else stream


def _make_lossy(stream: TextIO | None, on_loss: Callable[[OSError], None] | None) -> TextIO:
    """
    A stream to the same file that drops text it cannot write.

    If Python has no stream, as after `>&-`, the new one drops everything. A stream without a file
    descriptor, such as a notebook's or a test's, is returned unchanged.
    """
    if stream is None:
        return open(os.devnull, "w", encoding="utf-8", errors="backslashreplace")
    if type(stream) is not io.TextIOWrapper or isinstance(_raw_file(stream), LossyFile):
        return stream
    try:
        file = LossyFile(stream.fileno(), on_loss)
    except (OSError, ValueError):  # in memory, or closed
        return stream

    with contextlib.suppress(OSError):  # text in the old buffer may be unwritable too
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


def _raw_file(stream: Any) -> Any:
    """The file below a stream's buffer, if it has one."""
    buffer = getattr(stream, "buffer", None)
    return getattr(buffer, "raw", buffer)
