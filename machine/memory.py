"""
How much memory this machine has, which errors say that it ran out, and how many rows then go through a model at once;
with or without a GPU.
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
MOST_CACHE = 2 * 10**9  # bytes of freed buffers that MLX may keep, whatever is free
WIRED_LIMIT = "GWEN_WIRED_LIMIT"
MOST_ERRORS = 20  # MLX throws one error of the GPU at a time, and has up to ten command buffers in flight


def memory_size() -> int:
    """Bytes that this process may hold: what a GPU recommends for its working set, else the machine's memory."""
    recommended: Any = mx.device_info().get("max_recommended_working_set_size") if gpu.on_gpu() else None
    return int(recommended or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def limit_mlx_cache() -> None:
    """
    Lets MLX keep freed buffers up to an eighth of the memory, and wires the GB that GWEN_WIRED_LIMIT asks for.

    By default nothing is wired: macOS was reported to panic where it is (docs/memory.md).
    Raises ValueError for a limit that is no size or above the memory.
    """
    text, most = os.environ.get(WIRED_LIMIT) or "0", memory_size()
    try:
        wired = float(text) * 1e9
    except ValueError:
        wired = math.nan
    if not 0 <= wired <= most:
        raise ValueError(f"--wired-limit or {WIRED_LIMIT} is {text!r:.60}; it must be GB from 0 to {most / 1e9:.2f}")
    if gpu.on_gpu():
        mx.set_cache_limit(min(most // 8, MOST_CACHE))
        if wired:
            mx.set_wired_limit(int(wired))


def is_out_of_memory(error: BaseException) -> bool:
    """
    Whether an error of MLX or numpy says that memory ran out; MLX's backends do so in words.

    On a CPU MLX 0.32 often does not come so far: it uses what it was not given, and the process dies.
    """
    words = "insufficient memory", "out of memory", "unable to allocate", "bad_alloc", "malloc"
    return isinstance(error, MemoryError) or any(one in str(error).lower() for one in words)


def try_within_memory(compute: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> list[R]:
    """What `compute` returns, in a list; an empty one if memory ran out: by then all that it allocated is free."""
    try:
        return [compute(*args, **kwargs)]
    except (RuntimeError, MemoryError) as error:
        if not is_too_large(error):
            raise
        first = error.with_traceback(None)  # which would hold every array of the attempt
    # macOS may end the buffers behind one that lacks memory with errors of their own, and tell these first
    if not any(map(is_out_of_memory, [first, *drain_gpu()])):
        raise first
    return []


def drain_gpu() -> list[RuntimeError]:
    """Waits until nothing is queued, which may hold caches, and frees what it held; returns the errors that come."""
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
    """Calls `write` on the CPU's stream, which an error of the GPU leaves intact, until no such error is left."""
    for errors_left in reversed(range(MOST_ERRORS)):
        try:
            with mx.stream(mx.cpu):
                return write(*args, **kwargs)
        except RuntimeError as error:
            if not errors_left or not is_too_large(error):
                raise


class BatchSize:
    """
    How many rows go through a model at once: halved when memory runs out.

    Callers that share the object share the reduced size. It grows back slowly for callers that report each batch that
    `fitted`; without reports it stays reduced.
    """

    def __init__(self, rows: int):
        assert rows >= 1, rows
        self.rows = self.most = rows
        self.num_good = 0  # batches that fitted since the last change

    def halve(self, num_rows: int) -> None:
        """Halves `rows`, or `num_rows` if fewer were tried."""
        self.rows, self.num_good = max(min(self.rows, num_rows) // 2, 1), 0

    def note_success(self) -> None:
        """Notes that a batch fitted; after GROW_AFTER of them a halved size grows by a quarter."""
        self.num_good += 1
        if self.rows < self.most and self.num_good >= GROW_AFTER:
            self.rows, self.num_good = min(self.most, -(-self.rows * 5 // 4)), 0


def is_watchdog(error: BaseException) -> bool:
    """
    Whether macOS stopped the GPU's work, because it or another's held up the display, took too long or hung.

    Source: github.com/ml-explore/mlx/issues/3267; MTLCommandBufferError in Apple's Metal.
    """
    text = str(error).lower().replace(" ", "")
    kinds = "impactinginteractivity", "timeout", "hang", "submissionsignored", "innocentvictim"
    return any(f"iogpucommandbuffercallbackerror{kind}" in text for kind in kinds) or "gputimeouterror" in text


def is_too_large(error: BaseException) -> bool:
    """Whether less at once might do: memory ran out, or macOS stopped the work."""
    return is_out_of_memory(error) or is_watchdog(error)
