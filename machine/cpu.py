"""
Kernels for a CPU, where MLX takes none: it asks BLAS for every product, and on Linux that BLAS is ours, blas.c.

`mx.addmm(c, a, b, alpha)` is c + alpha * a @ b, written over a copy of c. With one of the alphas below, which no
product has, blas.c runs a kernel instead, and writes its result over the copy. b only makes the shapes agree.

Where another BLAS serves (a Mac, no C compiler) `has_kernels` is false, and whoever asks computes an expression.

Axes: M rows, S numbers of each.
"""

import functools

import mlx.core as mx
import numpy as np

EXPONENTIALS, MAXIMA, SUMS = -(2.0**100), -(2.0**101), -(2.0**102)


@functools.lru_cache(maxsize=256)
def zeros(*shape: int) -> mx.array:
    return mx.array(np.zeros(shape, np.float32))


def exponentials(x: mx.array, shifts: mx.array | None = None) -> mx.array:
    """e**(x - shifts), (..., S) and (..., 1) float32 -> (..., S); MLX takes its gradient for that of addmm."""
    rows = x.reshape(-1, x.shape[-1]) if x.ndim else x.reshape(1, 1)
    shifts = zeros(rows.shape[0], 1) if shifts is None else shifts.reshape(-1, 1)
    return mx.addmm(rows, shifts, zeros(1, rows.shape[1]), alpha=EXPONENTIALS).reshape(x.shape)


def reduced(x: mx.array, alpha: float) -> mx.array:
    """The largest (MAXIMA) or the sum (SUMS) of each row, (..., S) float32 -> (..., 1); without a gradient too."""
    rows = x.reshape(-1, x.shape[-1])
    return mx.addmm(zeros(rows.shape[0], 1), rows, zeros(rows.shape[1], 1), alpha=alpha).reshape(*x.shape[:-1], 1)


@functools.cache
def has_kernels() -> bool:
    """Whether the BLAS that serves MLX on this CPU has the kernels."""
    x = mx.array([[0.0, 1.0]])
    with mx.stream(mx.cpu):
        found = mx.concatenate([exponentials(x), reduced(x, MAXIMA), reduced(x, SUMS)], axis=1)
        return mx.allclose(found, mx.array([[1.0, 2.7182817, 1.0, 1.0]])).item() is True
