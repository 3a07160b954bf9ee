"""
What MLX's own takes long for on a CPU: e**x, 12 ns a number, and sums and maxima of long rows.

Of e**x `mx.compile` makes C++ loops by g++: 2 ns a number, to 2e-7 of itself. A power of two takes 4.4 ns, within 1e-6
for |x| < 8; it serves where there is no g++, for few numbers, and under a gradient, where MLX computes what is compiled
operation by operation: 8 ns with the gradient, the power 4.7. On a GPU MLX's own is the right one.
"""

import contextlib
import fcntl
import functools
import math
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import mlx.core as mx

from machine import gpu

LOG2_E = 1 / math.log(2)
ROUNDS = 1.5 * 2**23  # added to a float32 of less than 2**22 and taken away, it leaves the nearest whole number
WORTH_COMPILING = 2**13  # numbers: fewer take the power of two as long as six loops and their arrays take
TILE = 256  # numbers of a row; a CPU takes tiles together three to five times as fast as the numbers of a row


def exp_expression(x: mx.array) -> mx.array:
    """
    e**x of float32: x = n log(2) + r, Taylor's polynomial of degree 7 in r, and 2**n from bits.

    Below -87 it is 0, near where float32's normal numbers end. MLX cuts what is deeper than 11 operations into several
    loops with an array between: hence pairs of terms, and the two of 2 * 2**(n - 1), as 2**128 is no float32, in them.
    """
    n = (mx.minimum(mx.maximum(x, -87.33), 89.0) * LOG2_E + ROUNDS) - ROUNDS
    half = ((n.astype(mx.int32) + 126) << 23).view(mx.float32)
    r = (
        mx.maximum(x, -88.0) - n * 0.693145751953125
    ) - n * 1.428606765330187e-06  # log(2) in two: n times one is exact
    square = r * r
    low = (2 + 2 * r) + (1 + r * (1 / 3)) * square
    high = (1 / 12 + r * (1 / 60)) + (1 / 360 + r * (1 / 2520)) * square
    return (low + high * (square * square)) * half


@functools.lru_cache(maxsize=256)
def compile_exp(size: int) -> Callable[[mx.array], mx.array]:
    """The expression for so many numbers: MLX keeps what it compiled for a shape as long as the function lives."""
    return mx.compile(exp_expression)


@contextlib.contextmanager
def build_lock() -> Iterator[None]:
    """
    One process at a time, where `mx.compile` may have loops built; several would load each other's halves.

    MLX keeps them in a directory of temporary files and loads what it finds there. OSError if it is another user's.
    """
    loops = Path(tempfile.gettempdir(), "mlx")
    loops.mkdir(mode=0o700, exist_ok=True)
    if loops.lstat().st_uid != os.getuid():
        raise OSError(f"{loops} is another user's; set TMPDIR")
    with (loops / "gwen.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@functools.cache
def has_compiler() -> bool:
    """Whether `mx.compile` makes loops here. The first question has them built, if this machine has none yet: 5 s."""
    if sys.platform != "linux" or shutil.which("g++") is None:
        return False
    try:
        with build_lock():
            mx.eval(compile_exp(2)(mx.zeros(2)))
    except (OSError, RuntimeError) as error:
        print(f"gwen: e**x takes twice as long here: {' '.join(str(error).split())[:200]}", file=sys.stderr)
        return False
    return True


def exp(x: mx.array, shift: mx.array | None = None) -> mx.array:
    """e**(x - shift) of float32, (..., S) and (..., 1), without a gradient by the shift, such as a row's largest."""
    x = x if shift is None else x - mx.stop_gradient(shift)
    if gpu.on_gpu():
        return mx.exp(x)
    if gpu.is_forward_only() and x.dtype == mx.float32 and x.size >= WORTH_COMPILING and has_compiler():
        return compile_exp(x.size)(x.reshape(-1)).reshape(x.shape)
    power: mx.array = gpu.differentiable(lambda x: mx.power(2.0, x * LOG2_E), lambda _, d_out, out: d_out * out, x)
    return power


def tiled_sum(x: mx.array) -> mx.array:
    """
    Sum over the last axis, (..., V) -> (...), of tiles first.

    One running float32 sum over 151,936 terms, as MLX's CPU backend does it, puts a logsumexp off by up to 9e-4 and an
    entropy by 1.6e-3 on peaked rows; two stages leave 2e-5.
    """
    num_tiles = x.shape[-1] // TILE
    tiles = x[..., : num_tiles * TILE].reshape(*x.shape[:-1], num_tiles, TILE).sum(-2).sum(-1)
    return tiles + x[..., num_tiles * TILE :].sum(-1)


def tiled_max(x: mx.array) -> mx.array:
    """Maximum over the last axis, (..., V) -> (..., 1), of tiles first."""
    whole = x.shape[-1] // TILE * TILE or x.shape[-1]
    tiles = x[..., :whole].reshape(*x.shape[:-1], -1, min(whole, TILE)).max(-2)
    return mx.concatenate([tiles, x[..., whole:]], axis=-1).max(-1, keepdims=True)
