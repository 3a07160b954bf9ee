"""
Memory: what the machine has, and how an allocation that failed is recognised.

What is left out: what to do about it, which those who allocate know.
"""

import os

import mlx.core as mx


def of_device() -> int:
    """Bytes that this process may hold: what a GPU recommends for its working set, else the machine's memory."""
    info = mx.device_info() if mx.default_device().type == mx.gpu else {}
    size = info.get("max_recommended_working_set_size") or info.get("memory_size")
    return int(size or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def is_out_of_memory(error: RuntimeError) -> bool:
    """Whether an error of MLX says that memory ran out, in the words of its Metal, CUDA and CPU backends."""
    text = str(error).lower()
    return any(
        words in text for words in ("insufficient memory", "out of memory", "unable to allocate", "bad_alloc", "malloc")
    )
