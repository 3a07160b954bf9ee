"""
Prevents errors on standard output and standard error from ending a command.

The reader of a pipe may exit, a disk may fill up, a terminal may be closed, or an encoding may lack
a character. None of these events should end a run. Inside `guard_output()`, text that cannot be
written is dropped, and a character that the encoding lacks is escaped. If a user's function
replaces the streams, `restore_streams_after_call` undoes this. The printed text itself comes from
reporting/console.py.
"""

import contextlib
import errno
import io
import os
import select
import sys
from collections.abc import Callable, Iterator
from typing import Any, TextIO

# The functions about which `restore_streams_after_call` has printed a warning.
_functions_that_replaced_streams: set[str] = set()


class LossyFile(io.FileIO):
    """A writable file that drops data it cannot write, and keeps the first error."""

    error: OSError | None = None

    def __init__(self, descriptor: int, on_loss: Callable[[OSError], None] | None = None):
        super().__init__(descriptor, "w", closefd=False)
        self.on_loss = on_loss

    def write(self, data: Any) -> int:
        try:
            num_bytes = super().write(data)
            while num_bytes is None:  # the pipe is full and in non-blocking mode
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
    Inside the context, or in a decorated function, writing to stdout and stderr raises no errors.

    is_log: whether stdout is only the log of a run. If a log cannot be written, a line on stderr
        says that the run continues. If stdout is not a log, it is the command's result. If the
        result cannot be written, the command exits with status 1, unless the error is only that
        the reader of the pipe has exited, as `head` does.
    """

    def report_lost_log(error: OSError) -> None:
        if is_log:
            _print_to_stderr(
                f"standard output cannot be written ({error.strerror}); "
                "the run continues without it"
            )

    _open_closed_standard_descriptors()
    streams_before = {"stdin": sys.stdin, "stdout": sys.stdout, "stderr": sys.stderr}
    stdin = _stdin_or_empty_stream(sys.stdin)
    stderr = _lossy_stream_to_same_file(sys.stderr, None)
    stdout = _lossy_stream_to_same_file(sys.stdout, report_lost_log)
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
            with contextlib.suppress(ValueError):  # the stream may have been closed
                stream.flush()
        for name, stream in guarded.items():
            before = streams_before[name]
            is_unchanged = getattr(sys, name) is stream  # False if other code redirected the stream
            if is_unchanged and before is not None:
                setattr(sys, name, before)  # Python flushes this stream when the process exits

    error = getattr(_unbuffered_file(stdout), "error", None)
    # if False, an outer call of `guard_output` reports the error
    is_new = stdout is not streams_before["stdout"]
    if not has_ended_well or not is_new or is_log or error is None:
        return
    if error.errno != errno.EPIPE:
        _print_to_stderr(f"error: standard output cannot be written: {error.strerror}")
        sys.exit(1)


@contextlib.contextmanager
def restore_streams_after_call(function: str) -> Iterator[None]:
    """
    After the block, `sys.stdout` and `sys.stderr` are the same streams as before the block.

    If a user's function in the block has replaced a stream, a warning on stderr says so, once
    for each function. If the streams stayed replaced, Gwen's later output could be lost.

    function: a description of the function, such as "the reward score (mine.py:3)".
    """
    streams_before = {"stdout": sys.stdout, "stderr": sys.stderr}
    try:
        yield
    finally:
        replaced = []
        for name, before in streams_before.items():
            if getattr(sys, name) is not before:
                replaced.append(f"sys.{name}")
                setattr(sys, name, before)
        if replaced and function not in _functions_that_replaced_streams:
            _functions_that_replaced_streams.add(function)
            streams = " and ".join(replaced)
            _print_to_stderr(
                f"warning: {function} replaced {streams}, and Gwen restored {streams} after "
                "the call; in the function, use `with contextlib.redirect_stdout(...)`, which "
                "also ends after an error"
            )


def _print_to_stderr(line: str) -> None:
    # stderr may be unwritable, closed or None
    with contextlib.suppress(OSError, ValueError, AttributeError):
        print(line, file=sys.stderr, flush=True)


def _open_closed_standard_descriptors() -> None:
    """
    Opens /dev/null in place of each closed descriptor of stdin, stdout and stderr.

    Otherwise, the next file that the process opens would get the free descriptor, and text that a
    library or child process prints would be written into that file.
    """
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free descriptor, which is `descriptor`


def _stdin_or_empty_stream(stream: TextIO | None) -> TextIO:
    """The given stdin, or an empty stream if stdin is None because it was closed with `<&-`."""
    return open(os.devnull) if stream is None else stream


def _lossy_stream_to_same_file(
    stream: TextIO | None, on_loss: Callable[[OSError], None] | None
) -> TextIO:
    """
    A stream to the same file that drops text that cannot be written.

    If the given stream is None because it was closed with `>&-`, the returned stream drops all
    text. A stream without a file descriptor, as in a notebook or a test, is returned unchanged.
    """
    if stream is None:
        return open(os.devnull, "w", encoding="utf-8", errors="backslashreplace")
    if type(stream) is not io.TextIOWrapper or isinstance(_unbuffered_file(stream), LossyFile):
        return stream
    try:
        file = LossyFile(stream.fileno(), on_loss)
    except (OSError, ValueError):  # the stream is in memory or closed
        return stream

    with contextlib.suppress(OSError):  # text in the old buffer may be unwritable too
        stream.flush()
    # with python -u, the stream has no buffer
    buffer: Any = file if stream.write_through else io.BufferedWriter(file)
    return io.TextIOWrapper(
        buffer,
        encoding=stream.encoding,
        errors="backslashreplace",
        newline="\n",
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


def _unbuffered_file(stream: Any) -> Any:
    """The unbuffered file below a stream's buffer, or None if the stream has no buffer."""
    buffer = getattr(stream, "buffer", None)
    return getattr(buffer, "raw", buffer)
