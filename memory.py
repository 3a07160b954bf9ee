"""
Memory: what the machine has, and how an allocation that failed is recognised.

What is left out: what to do about it, which those who allocate know.
"""

import os
from pathlib import Path

import mlx.core as mx

_SIZES = ("max_recommended_working_set_size", "memory_size", "total_memory")  # in mx.device_info: Metal, Metal, CUDA


def of_device() -> int:
    """Bytes that this process may hold: what a GPU recommends for its working set, else the machine's memory."""
    info = mx.device_info() if mx.default_device().type == mx.gpu else {}
    size = next((info[key] for key in _SIZES if info.get(key)), None)
    return int(size or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def at_hand() -> int:
    """Bytes that this process may still allocate: what it may hold less what MLX holds, on a CPU no more than free."""
    rest = of_device() - mx.get_active_memory()
    if mx.default_device().type == mx.cpu and (free := _available()) is not None:
        rest = min(rest, free)
    return max(rest, 0)


def _available() -> int | None:
    """Bytes that the Linux kernel could give without swapping; None elsewhere."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)


def is_out_of_memory(error: BaseException) -> bool:
    """
    Whether an error of MLX or numpy says that memory ran out; MLX's Metal, CUDA and CPU backends do so in words.

    On a CPU MLX 0.32 often does not come so far: it uses what it was not given, and the process dies.
    """
    text = str(error).lower()
    return isinstance(error, MemoryError) or any(
        words in text for words in ("insufficient memory", "out of memory", "unable to allocate", "bad_alloc", "malloc")
    )
