"""
This machine's memory, errors that mean that it ran out, and how many rows fit at once.

All of this works with and without a GPU. This file does not cover the memory that a run needs
(preflight.py).
"""

import math
import os
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import mlx.core as mx

from machine import gpu

P = ParamSpec("P")
R = TypeVar("R")
GROW_AFTER = 32  # batches that fitted, before a halved size grows by a quarter
MOST_CACHE = 2 * 10**9  # bytes of freed buffers that MLX may keep, however much is free
WIRED_LIMIT = "GWEN_WIRED_LIMIT"
# The most GPU errors to expect in a row: MLX raises one at a time, and has up to ten command
# buffers in flight.
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


def memory_size() -> int:
    """
    How many bytes this process may use.

    On a GPU, this is the recommended size of the working set; otherwise, the machine's memory.
    """
    recommended: Any = None
    if gpu.on_gpu():
        recommended = mx.device_info().get("max_recommended_working_set_size")
    return int(recommended or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def limit_mlx_cache() -> None:
    """
    On a GPU, limits MLX's cache of freed buffers, and wires GWEN_WIRED_LIMIT GB of memory.

    The cache gets an eighth of the memory, but at most MOST_CACHE. By default, no memory is wired:
    macOS was reported to panic with wired memory (docs/memory.md).

    Raises ValueError if GWEN_WIRED_LIMIT is not a size or is above the memory.
    """
    text = os.environ.get(WIRED_LIMIT) or "0"
    memory = memory_size()
    try:
        wired = float(text) * 1e9
    except ValueError:
        wired = math.nan
    if not 0 <= wired <= memory:
        raise ValueError(
            f"--wired-limit or {WIRED_LIMIT} is {text!r:.60}; it must be GB from 0 to "
            f"{memory / 1e9:.2f}"
        )
    if gpu.on_gpu():
        mx.set_cache_limit(min(memory // 8, MOST_CACHE))
        if wired:
            mx.set_wired_limit(int(wired))


# ---- errors


def is_out_of_memory(error: BaseException) -> bool:
    """
    Whether an error from MLX or numpy says that memory ran out.

    MLX's backends say so only in the message. On a CPU, MLX 0.32 often raises no error: it uses
    memory that it was not given, and the process dies.
    """
    if isinstance(error, MemoryError):
        return True
    text = str(error).lower()
    return any(words in text for words in OUT_OF_MEMORY_WORDS)


def is_watchdog_error(error: BaseException) -> bool:
    """
    Whether macOS stopped the GPU's work.

    macOS does so if this or other work delayed the display, took too long or hung.

    Source: github.com/ml-explore/mlx/issues/3267; MTLCommandBufferError in Apple's Metal.
    """
    text = str(error).lower().replace(" ", "")
    if "gputimeouterror" in text:
        return True
    return any(f"iogpucommandbuffercallbackerror{kind}" in text for kind in WATCHDOG_ERRORS)


def should_try_smaller(error: BaseException) -> bool:
    """Whether less work at once might succeed: memory ran out, or macOS stopped the work."""
    return is_out_of_memory(error) or is_watchdog_error(error)


def try_within_memory(compute: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> list[R]:
    """
    The result of `compute` in a list, or an empty list if memory ran out.

    If memory ran out, everything that `compute` allocated has been freed.
    """
    try:
        return [compute(*args, **kwargs)]
    except (RuntimeError, MemoryError) as error:
        if not should_try_smaller(error):
            raise
        # Without its traceback, which would keep every array of the attempt alive.
        first_error = error.with_traceback(None)
    # After a command buffer that ran out of memory, macOS may end later ones with other errors, and
    # report those first.
    errors = [first_error, *drain_gpu()]
    if not any(map(is_out_of_memory, errors)):
        raise first_error
    return []


def drain_gpu() -> list[RuntimeError]:
    """
    Waits for queued work, which may hold caches, and frees MLX's unused buffers.

    Returns the errors of that work.
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


def write_on_cpu(write: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> None:
    """
    Calls `write` on the CPU's stream, which works even after an error on the GPU.

    Calls it again as long as errors from the GPU arrive, at most MOST_ERRORS times in all.
    """
    for errors_left in reversed(range(MOST_ERRORS)):
        try:
            with mx.stream(mx.cpu):
                return write(*args, **kwargs)
        except RuntimeError as error:
            if not errors_left or not should_try_smaller(error):
                raise


# ---- rows at once


class BatchSize:
    """
    How many rows go through a model at once. The size is halved when memory runs out.

    Callers that share the object share the reduced size. It grows back slowly if callers report
    each batch that fitted with `note_success`. Without these reports it stays reduced.
    """

    def __init__(self, rows: int):
        assert rows >= 1, rows
        self.rows = rows
        self.most = rows
        self.num_good = 0  # batches that fitted since the last change

    def halve(self, num_rows: int) -> None:
        """Sets `rows` to half of `rows` or of `num_rows`, whichever is less, but at least to 1."""
        self.rows = max(min(self.rows, num_rows) // 2, 1)
        self.num_good = 0

    def note_success(self) -> None:
        """Counts a batch that fitted. After GROW_AFTER of them, the size grows by a quarter."""
        self.num_good += 1
        if self.rows < self.most and self.num_good >= GROW_AFTER:
            self.rows = min(self.most, -(-self.rows * 5 // 4))
            self.num_good = 0
