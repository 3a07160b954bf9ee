"""
The gated delta rule: what a linear-attention layer of Qwen3.5 computes between its matmuls.

A head's memory is a matrix S, by which a key finds a value. A token lets it fade, corrects what it finds under the
token's key, and reads it under its query:

    S <- exp(log_decay) S;    S <- S + beta (value - S key) key^T;    out = S query

`recurrence` is that definition; `chunked` gives the same in matmuls over 64 tokens. Padding has beta 0 and log decay 0,
which leaves the memory as it is. Source: Gated Delta Networks, arXiv:2412.06464, sections 3.1 and 3.3.

Axes: N rows, L positions, H value heads, K key heads, E key dim, D value dim, C channels of the convolution, W its
window; T tokens of a chunk.
"""

import mlx.core as mx

from layers import ops
from machine import cpu, kernels

CHUNK = 64  # tokens; a multiple of BLOCK by a power of two
BLOCK = 8  # rows of a triangular matrix that are inverted by its powers


def convolve(window: mx.array, weight: mx.array) -> mx.array:
    """silu of a causal convolution of each channel, (N, W - 1 + L, C), with `weight` (C, 1, W) -> (N, L, C)."""
    size = weight.shape[-1]
    length = window.shape[1] - size + 1
    # W products, which a compiler joins into one launch
    mixed = sum(window[:, i : i + length] * weight[:, 0, i].astype(window.dtype) for i in range(size))
    assert isinstance(mixed, mx.array)
    return ops.silu(mixed)


def convolution_state(window: mx.array, num_kept: int, ends: mx.array | None) -> mx.array:
    """
    What the convolution will look back at, (N, W - 1 + L, C) -> (N, W - 1, C).

    ends: the column of the L at which each row's tokens end, (N,); None: the last one.
    """
    if ends is None:
        return window[:, window.shape[1] - num_kept :]
    return mx.take_along_axis(window, (ends[:, None] + mx.arange(num_kept))[..., None], 1)


def normalize(x: mx.array) -> mx.array:
    """Vectors of length 1, over the last axis."""
    return x * mx.rsqrt((x * x).sum(-1, keepdims=True) + 1e-6)


def recurrence(
    queries: mx.array, keys: mx.array, values: mx.array, log_decay: mx.array, beta: mx.array, memory: mx.array
) -> tuple[mx.array, mx.array]:
    """
    The definition, one token after the other: out (N, L, H, D), and the memory (N, H, D, E) after them.

    queries, keys (N, L, K, E), scaled, and of length 1: each key head serves H / K consecutive value heads; values
    (N, L, H, D); log_decay (N, L, H), at most 0; beta (N, L, H) in 0 to 1, how far the memory is corrected; memory as
    it comes out. All are of one floating-point type.
    """
    queries, keys = _repeat_for_value_heads(queries, keys, values)
    outs = []
    for at in range(values.shape[1]):
        query, key, value = queries[:, at], keys[:, at], values[:, at]
        found, read = mx.split(memory @ mx.stack([key, query], axis=-1), 2, axis=-1)  # (N, H, D, 1)
        decay = cpu.exp(log_decay[:, at])[..., None, None]
        correction = beta[:, at, :, None, None] * (value[..., None] - decay * found)
        memory = decay * memory + correction * key[..., None, :]
        outs.append(decay * read + correction * (key * query).sum(-1)[..., None, None])
    return mx.stack(outs, axis=1)[..., 0], memory


def _repeat_for_value_heads(queries: mx.array, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
    times = values.shape[2] // keys.shape[2]
    return (queries, keys) if times == 1 else (mx.repeat(queries, times, 2), mx.repeat(keys, times, 2))


def invert_unit_triangular(lower: mx.array) -> mx.array:
    """
    (I + A)^-1 of strictly lower triangular matrices A, (..., T, T); T is BLOCK times a power of two.

    Both halves of the diagonal at once, and from them the corner. Blocks are inverted by powers, (I - A)(I + A^2)
    (I + A^4). Powers of the whole would hold binomial coefficients of T where a token repeats, up to 1e18, and their
    sums no digit.
    """
    if (size := lower.shape[-1]) == BLOCK:
        eye, second = mx.eye(BLOCK, dtype=lower.dtype), lower @ lower
        return (eye - lower) @ (eye + second) @ (eye + second @ second)
    half = size // 2
    upper, below = invert_unit_triangular(mx.stack([lower[..., :half, :half], lower[..., half:, half:]]))
    corner = -(below @ lower[..., half:, :half] @ upper)
    top = mx.concatenate([upper, mx.zeros_like(upper)], axis=-1)
    return mx.concatenate([top, mx.concatenate([corner, below], axis=-1)], axis=-2)


def chunked_recurrence(
    queries: mx.array, keys: mx.array, values: mx.array, log_decay: mx.array, beta: mx.array, memory: mx.array
) -> tuple[mx.array, mx.array]:
    """
    `recurrence` in matmuls. Within a chunk, corrections depend on those before them by a triangular system, whose
    inverse gives all of them at once; between chunks goes the memory.
    """
    num_rows, length, num_heads, value_dim = values.shape
    size = next(size for size in (8, 16, 32, CHUNK) if size >= min(length, CHUNK))
    num_chunks = -(-length // size)

    def in_chunks(array: mx.array) -> mx.array:  # (N, L, H, ...) -> (N, H, chunks, T, ...)
        padding = [(0, 0), (0, num_chunks * size - length)] + [(0, 0)] * (array.ndim - 2)
        return mx.moveaxis(mx.pad(array, padding).reshape(num_rows, num_chunks, size, *array.shape[2:]), 3, 1)

    tokens = *_repeat_for_value_heads(queries, keys, values), values, log_decay, beta
    queries, keys, values, log_decay, beta = map(in_chunks, tokens)
    total = mx.cumsum(log_decay, axis=-1)  # (N, H, chunks, T)
    seen = mx.tri(size, dtype=mx.bool_)
    fades = cpu.exp(mx.where(seen, total[..., :, None] - total[..., None, :], -1e30))  # (..., T, T) from j to i
    scaled = keys * beta[..., None]
    solved = invert_unit_triangular(mx.where(mx.tri(size, k=-1, dtype=mx.bool_), (scaled @ keys.swapaxes(-1, -2)) * fades, 0.0))
    since = cpu.exp(total)[..., None]  # from the chunk's begin
    wanted = solved @ (values * beta[..., None])  # corrections if the memory were empty
    by_memory, within = solved @ (scaled * since), (queries @ keys.swapaxes(-1, -2)) * fades
    reading, writing = queries * since, keys * cpu.exp(total[..., -1:] - total)[..., None]
    outs = []
    for at in range(num_chunks):
        corrections = wanted[:, :, at] - by_memory[:, :, at] @ memory.swapaxes(-1, -2)  # (N, H, T, D)
        outs.append(reading[:, :, at] @ memory.swapaxes(-1, -2) + within[:, :, at] @ corrections)
        memory = since[:, :, at, -1:] * memory + corrections.swapaxes(-1, -2) @ writing[:, :, at]
    return mx.stack(outs, axis=2).reshape(num_rows, num_heads, -1, value_dim)[:, :, :length].swapaxes(1, 2), memory


def gated_delta(*arrays: mx.array) -> tuple[mx.array, mx.array]:
    """`recurrence`, for one token a row by one operation, for more by another: either's kernel may be off alone."""
    return (gated_delta_step if arrays[2].shape[1] == 1 else gated_delta_pass)(*arrays)


@kernels.kernel_of(recurrence)
def gated_delta_step(
    queries: mx.array, keys: mx.array, values: mx.array, log_decay: mx.array, beta: mx.array, memory: mx.array
) -> tuple[mx.array, mx.array]:
    """
    MLX's own, in one launch where it has a kernel: for heads of 128, in some numbers (16 and 16, 16 and 32, ...).
    Elsewhere it takes one step a token. All is float32: a decay near 1 would be 1 in 16 bits.
    """
    out, memory = mx.fast.gated_delta_update(queries, keys, values, mx.exp(log_decay), beta, memory)
    return out, memory


@kernels.kernel_of(chunked_recurrence)
def gated_delta_pass(
    queries: mx.array, keys: mx.array, values: mx.array, log_decay: mx.array, beta: mx.array, memory: mx.array
) -> tuple[mx.array, mx.array]:
    """As one token, for heads of 128; others have no kernel, and matmuls are faster than a step a token."""
    form = gated_delta_step.launch if keys.shape[-1] == values.shape[-1] == 128 else chunked_recurrence
    return form(queries, keys, values, log_decay, beta, memory)
