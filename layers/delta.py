"""
The gated delta rule, which a linear-attention layer of Qwen3.5 computes between its matmuls.

The memory of a head is a matrix S that maps keys to values. Each token first decays it, then
corrects the value that it returns for the token's key, and then reads it with the token's query:

    S <- exp(log_decay) S;    S <- S + beta (value - S key) key^T;    out = S query

`recurrence` is this definition. `chunked_recurrence` computes the same with matmuls over 64 tokens.
Padding has beta 0 and log decay 0, which leave the memory as it is. The layer's projections and its
gate are in gwen.py.
Source: Gated Delta Networks, arXiv:2412.06464, sections 3.1 and 3.3.

Axes: N rows, L positions, H value heads, K key heads, E key dim, D value dim, C channels of the
convolution, W its window; T tokens of a chunk.
"""

import mlx.core as mx

from layers import ops
from machine import cpu, kernels

CHUNK = 64  # tokens; BLOCK times a power of two
CHUNK_SIZES = (8, 16, 32, CHUNK)
BLOCK = 8  # the size of the triangular blocks that are inverted by their powers


def convolve(window: mx.array, weight: mx.array) -> mx.array:
    """
    The silu of a causal convolution of each channel.

    window (N, W - 1 + L, C), weight (C, 1, W) -> (N, L, C).
    """
    size = weight.shape[-1]
    length = window.shape[1] - size + 1
    # W products, which a compiler joins into one launch
    products = (
        window[:, i : i + length] * weight[:, 0, i].astype(window.dtype) for i in range(size)
    )
    mixed = sum(products)
    assert isinstance(mixed, mx.array)
    return ops.silu(mixed)


def convolution_state(window: mx.array, num_kept: int, ends: mx.array | None) -> mx.array:
    """
    The inputs that the convolution of the next token needs, (N, W - 1 + L, C) -> (N, W - 1, C).

    num_kept: W - 1. ends (N,): the column, among the L, at which each row's tokens end. None: at L.
    """
    if ends is None:
        return window[:, window.shape[1] - num_kept :]
    columns = ends[:, None] + mx.arange(num_kept)
    return mx.take_along_axis(window, columns[..., None], 1)


def normalize(x: mx.array) -> mx.array:
    """The vectors along the last axis, scaled to length 1."""
    return x * mx.rsqrt((x * x).sum(-1, keepdims=True) + 1e-6)


def recurrence(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    log_decay: mx.array,
    beta: mx.array,
    memory: mx.array,
) -> tuple[mx.array, mx.array]:
    """
    The definition, token by token: the outputs (N, L, H, D), and the final memory (N, H, D, E).

    queries, keys (N, L, K, E): queries are scaled, keys have length 1. Each key head serves H / K
    consecutive value heads.
    values (N, L, H, D). log_decay (N, L, H): at most 0. beta (N, L, H): 0 to 1, how far the memory
    is corrected. memory (N, H, D, E). All have one floating-point type.
    """
    queries, keys = _repeat_for_value_heads(queries, keys, values)
    outs = []
    for position in range(values.shape[1]):
        query = queries[:, position]
        key = keys[:, position]
        value = values[:, position]

        key_and_query = mx.stack([key, query], axis=-1)
        stored_value, query_value = mx.split(memory @ key_and_query, 2, axis=-1)  # (N, H, D, 1)
        decay = cpu.exp(log_decay[:, position])[..., None, None]
        difference = value[..., None] - decay * stored_value
        correction = beta[:, position, :, None, None] * difference
        memory = decay * memory + correction * key[..., None, :]
        similarity = (key * query).sum(-1)[..., None, None]
        outs.append(decay * query_value + correction * similarity)
    return mx.stack(outs, axis=1)[..., 0], memory


def _repeat_for_value_heads(
    queries: mx.array, keys: mx.array, values: mx.array
) -> tuple[mx.array, mx.array]:
    """Queries and keys of each value head, (N, L, K, E) -> (N, L, H, E)."""
    num_repeats = values.shape[2] // keys.shape[2]
    if num_repeats == 1:
        return queries, keys
    return mx.repeat(queries, num_repeats, 2), mx.repeat(keys, num_repeats, 2)


def invert_unit_triangular(lower: mx.array) -> mx.array:
    """
    (I + A)^-1 of strictly lower triangular matrices A, (..., T, T).

    T is BLOCK times a power of two. It inverts both halves of the diagonal at once, and computes
    the corner from the inverses. A block is inverted by its powers, (I - A)(I + A^2)(I + A^4). For
    a whole chunk in which a token repeats, the powers would contain binomial coefficients up to
    1e18, and their sums would have no correct digit.
    """
    size = lower.shape[-1]
    if size == BLOCK:
        eye = mx.eye(BLOCK, dtype=lower.dtype)
        square = lower @ lower
        return (eye - lower) @ (eye + square) @ (eye + square @ square)

    half = size // 2
    diagonal_blocks = mx.stack([lower[..., :half, :half], lower[..., half:, half:]])
    top_left, bottom_right = invert_unit_triangular(diagonal_blocks)
    corner = -(bottom_right @ lower[..., half:, :half] @ top_left)
    top = mx.concatenate([top_left, mx.zeros_like(top_left)], axis=-1)
    bottom = mx.concatenate([corner, bottom_right], axis=-1)
    return mx.concatenate([top, bottom], axis=-2)


def split_into_chunks(array: mx.array, chunk_size: int, num_chunks: int) -> mx.array:
    """Chunks of tokens, padded with zeros, (N, L, H, ...) -> (N, H, chunks, T, ...)."""
    num_rows, length = array.shape[:2]
    padding = [(0, 0)] * array.ndim
    padding[1] = (0, num_chunks * chunk_size - length)
    chunks = mx.pad(array, padding).reshape(num_rows, num_chunks, chunk_size, *array.shape[2:])
    return mx.moveaxis(chunks, 3, 1)


def chunked_recurrence(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    log_decay: mx.array,
    beta: mx.array,
    memory: mx.array,
) -> tuple[mx.array, mx.array]:
    """
    `recurrence`, computed with matmuls.

    Within a chunk, each correction depends on those before it through a triangular system, whose
    inverse gives all corrections at once. The memory passes from chunk to chunk.
    """
    num_rows, length, num_heads, value_dim = values.shape
    chunk_size = next(size for size in CHUNK_SIZES if size >= min(length, CHUNK))
    num_chunks = -(-length // chunk_size)

    queries, keys = _repeat_for_value_heads(queries, keys, values)
    queries = split_into_chunks(queries, chunk_size, num_chunks)
    keys = split_into_chunks(keys, chunk_size, num_chunks)
    values = split_into_chunks(values, chunk_size, num_chunks)
    log_decay = split_into_chunks(log_decay, chunk_size, num_chunks)
    beta = split_into_chunks(beta, chunk_size, num_chunks)

    total_decay = mx.cumsum(log_decay, axis=-1)  # (N, H, chunks, T) from the chunk's beginning
    is_past = mx.tri(chunk_size, dtype=mx.bool_)
    pair_decay = total_decay[..., :, None] - total_decay[..., None, :]
    fades = cpu.exp(mx.where(is_past, pair_decay, -1e30))  # (..., T, T) from token j to token i
    corrected_keys = keys * beta[..., None]
    overlaps = (corrected_keys @ keys.swapaxes(-1, -2)) * fades
    is_strictly_past = mx.tri(chunk_size, k=-1, dtype=mx.bool_)
    inverse = invert_unit_triangular(mx.where(is_strictly_past, overlaps, 0.0))

    begin_fades = cpu.exp(total_decay)[..., None]
    end_fades = cpu.exp(total_decay[..., -1:] - total_decay)[..., None]
    empty_corrections = inverse @ (values * beta[..., None])  # corrections if the memory were empty
    memory_factors = inverse @ (corrected_keys * begin_fades)
    within_chunk = (queries @ keys.swapaxes(-1, -2)) * fades
    read_queries = queries * begin_fades
    write_keys = keys * end_fades

    outs = []
    for chunk in range(num_chunks):
        stored_values = memory_factors[:, :, chunk] @ memory.swapaxes(-1, -2)
        corrections = empty_corrections[:, :, chunk] - stored_values  # (N, H, T, D)
        from_memory = read_queries[:, :, chunk] @ memory.swapaxes(-1, -2)
        outs.append(from_memory + within_chunk[:, :, chunk] @ corrections)
        additions = corrections.swapaxes(-1, -2) @ write_keys[:, :, chunk]
        memory = begin_fades[:, :, chunk, -1:] * memory + additions
    out = mx.stack(outs, axis=2).reshape(num_rows, num_heads, -1, value_dim)
    return out[:, :, :length].swapaxes(1, 2), memory


def gated_delta(*arrays: mx.array) -> tuple[mx.array, mx.array]:
    """
    `recurrence`: one operation computes it for one token per row, another for several tokens.

    The kernel of each operation can be turned off separately.
    """
    values = arrays[2]
    op = gated_delta_step if values.shape[1] == 1 else gated_delta_pass
    return op(*arrays)


@kernels.make_op(recurrence)
def gated_delta_step(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    log_decay: mx.array,
    beta: mx.array,
    memory: mx.array,
) -> tuple[mx.array, mx.array]:
    """
    MLX's own operation, in one launch if MLX has a kernel for these heads.

    It has kernels for heads of 128 dims, in some numbers (16 and 16, 16 and 32, ...). For others it
    takes one step per token. All arrays are float32, because a decay near 1 would be 1 in 16 bits.
    """
    decay = mx.exp(log_decay)
    out, memory = mx.fast.gated_delta_update(queries, keys, values, decay, beta, memory)
    return out, memory


@kernels.make_op(chunked_recurrence)
def gated_delta_pass(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    log_decay: mx.array,
    beta: mx.array,
    memory: mx.array,
) -> tuple[mx.array, mx.array]:
    """
    The same operation as for one token, if heads have 128 dims.

    For other heads, MLX has no kernel, and matmuls are faster than a step for each token.
    """
    has_kernel = keys.shape[-1] == values.shape[-1] == 128
    compute = gated_delta_step.launch if has_kernel else chunked_recurrence
    return compute(queries, keys, values, log_decay, beta, memory)
