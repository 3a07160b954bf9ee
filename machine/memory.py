"""
The size of this machine's memory, out-of-memory errors, and the number of rows that fit in memory.

All functions work with and without a GPU. preflight.py estimates the memory that a run needs.
"""

import math
import os
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import cpu_blas  # noqa: F401  (before mlx)
import mlx.core as mx

from machine import gpu

P = ParamSpec("P")
R = TypeVar("R")
EmptyIfOutOfMemory = list[R]  # a list that contains a result, or an empty list
GROW_AFTER = 32  # the number of batches that must fit before a halved size grows by one quarter
MOST_CACHE = 2 * 10**9  # MLX may keep at most this many bytes of freed buffers
WIRED_LIMIT = "GWEN_WIRED_LIMIT"
# The largest number of consecutive GPU errors to expect. MLX raises one error at a time, and may
# have ten command buffers in flight.
MOST_ERRORS = 20
OUT_OF_MEMORY_WORDS = (
    "insufficient memory",
    "out of memory",
    "unable to allocate",
    "bad_alloc",
    "malloc",
)
WATCHDOG_ERRORS = (
    "impactinginteractivity",
    "timeout",
    "hang",
    "submissionsignored",
    "innocentvictim",
)


def usable_memory_bytes() -> int:
    """
    The number of bytes that this process may use.

    On a GPU, this number is the recommended size of the working set. On a CPU, it is the size of
    the machine's memory.
    """
    recommended: Any = None
    if gpu.on_gpu():
        recommended = mx.device_info().get("max_recommended_working_set_size")
    return int(recommended or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def set_cache_and_wired_limits() -> None:
    """
    On a GPU, limits MLX's cache of freed buffers, and wires GWEN_WIRED_LIMIT GB of memory.

    The limit of the cache is one eighth of the memory, but at most MOST_CACHE bytes. By default, no
    memory is wired, because users have reported kernel panics of macOS with wired memory
    (docs/memory.md).

    Raises ValueError if GWEN_WIRED_LIMIT is not a number of GB between 0 and the size of the
    memory.
    """
    text = os.environ.get(WIRED_LIMIT) or "0"
    memory = usable_memory_bytes()
    try:
        wired = float(text) * 1e9
    except ValueError:
        wired = math.nan
    if not 0 <= wired <= memory:
        raise ValueError(
            f"--wired-limit or {WIRED_LIMIT} is {text!r:.60}, but it must be a number of GB from 0 "
            f"to {memory / 1e9:.2f}"
        )
    if gpu.on_gpu():
        mx.set_cache_limit(min(memory // 8, MOST_CACHE))
        if wired:
            mx.set_wired_limit(int(wired))


# ---- errors


def is_out_of_memory(error: BaseException) -> bool:
    """
    Whether an error from MLX or numpy means that memory ran out.

    MLX's backends indicate this only in the error's message. On a CPU, MLX 0.32 often raises no
    error when an allocation fails. MLX then uses memory that was not allocated, and the process
    crashes.
    """
    if isinstance(error, MemoryError):
        return True
    text = str(error).lower()
    return any(words in text for words in OUT_OF_MEMORY_WORDS)


def is_watchdog_error(error: BaseException) -> bool:
    """
    Whether an error from MLX means that macOS stopped the GPU's work.

    macOS stops GPU work if this process or another process delayed the display, took too long or
    hung.

    Sources: github.com/ml-explore/mlx/issues/3267; MTLCommandBufferError in Apple's Metal.
    """
    text = str(error).lower().replace(" ", "")
    if "gputimeouterror" in text:
        return True
    return any(f"iogpucommandbuffercallbackerror{kind}" in text for kind in WATCHDOG_ERRORS)


def should_retry_with_less_work(error: BaseException) -> bool:
    """Whether an error means that memory ran out or that macOS stopped the GPU's work."""
    return is_out_of_memory(error) or is_watchdog_error(error)


def try_within_memory(
    compute: Callable[P, R], *args: P.args, **kwargs: P.kwargs
) -> EmptyIfOutOfMemory[R]:
    """
    A list that contains the result of `compute`, or an empty list if memory ran out.

    If memory ran out, all memory that `compute` allocated has been freed.
    """
    try:
        return [compute(*args, **kwargs)]
    except (RuntimeError, MemoryError) as error:
        if not should_retry_with_less_work(error):
            raise
        # The traceback is dropped, because it would keep all arrays of the failed attempt alive.
        first_error = error.with_traceback(None)
    # After one command buffer runs out of memory, macOS may end later command buffers with other
    # errors, and may report those other errors first.
    errors = [first_error, *wait_for_gpu_and_free_buffers()]
    if not any(map(is_out_of_memory, errors)):
        raise first_error
    return []


def wait_for_gpu_and_free_buffers() -> list[RuntimeError]:
    """
    Waits for the GPU's queued work, which may keep caches alive, and frees MLX's unused buffers.

    Returns the errors that the queued work raised.
    """
    errors = []
    for _ in range(MOST_ERRORS):
        try:
            mx.synchronize()
            break
        except RuntimeError as error:
            errors.append(error.with_traceback(None))
    mx.clear_cache()
    return errors


def write_on_cpu_despite_gpu_errors(
    write: Callable[P, None], *args: P.args, **kwargs: P.kwargs
) -> None:
    """
    Calls `write` on the CPU's stream, which works even after an error on the GPU.

    If the call raises an error that comes from earlier GPU work, `write` is called again. In total,
    there are at most MOST_ERRORS calls.
    """
    for errors_left in reversed(range(MOST_ERRORS)):
        try:
            with mx.stream(mx.cpu):
                return write(*args, **kwargs)
        except RuntimeError as error:
            if not errors_left or not should_retry_with_less_work(error):
                raise


# ---- the number of rows per batch


class BatchSize:
    """
    The number of rows that a model processes at once, which is halved when memory runs out.

    Callers that share this object share the reduced size. A reduced size grows slowly back to the
    original size if callers report each batch that fitted in memory by calling `record_success`.
    Without these calls, the size stays reduced.
    """

    def __init__(self, rows: int):
        assert rows >= 1, rows
        self.rows = rows
        self.most = rows
        self.num_good = 0  # the number of batches that have fitted since the last change of `rows`

    def halve(self, num_failed_rows: int) -> None:
        """
        Sets the size to half of the current size or of `num_failed_rows`, whichever is smaller.

        The new size is at least 1.
        """
        self.rows = max(min(self.rows, num_failed_rows) // 2, 1)
        self.num_good = 0

    def record_success(self) -> None:
        """
        Counts one batch that fitted in memory.

        After GROW_AFTER such batches, the size grows by one quarter, up to the original size.
        """
        self.num_good += 1
        if self.rows < self.most and self.num_good >= GROW_AFTER:
            self.rows = min(self.most, -(-self.rows * 5 // 4))
            self.num_good = 0
