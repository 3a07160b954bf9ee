"""
The gated delta rule, which a linear-attention layer of Qwen3.5 computes between its matmuls.

The memory of a head is a matrix S that maps keys to values. Each token first lets the memory decay,
then corrects the value that the memory returns for the token's key, and then reads the memory with
the token's query:

    S <- exp(log_decay) S;    S <- S + beta (value - S key) key^T;    out = S query

`stepwise_recurrence` implements this definition token by token. `chunked_recurrence` computes the
same result with matmuls over chunks of up to 64 tokens. Padding tokens have beta 0 and log decay 0,
so they do not change the memory. The layer's projections and its gate are in gwen.py.
Source: Gated Delta Networks, arXiv:2412.06464, sections 3.1 and 3.3.

Axes: N rows, L positions, H value heads, K key heads, E key dimensions, D value dimensions, C
channels of the convolution, W positions in the convolution's window, T tokens in a chunk.
"""

import cpu_blas  # noqa: F401  (before mlx)
import mlx.core as mx

from layers import ops
from machine import cpu, kernels

CHUNK = 64  # the number of tokens in a full chunk; it must be BLOCK times a power of two
CHUNK_SIZES = (8, 16, 32, CHUNK)
BLOCK = 8  # the size of the blocks that `invert_identity_plus` inverts without recursion

OutputsAndMemory = tuple[mx.array, mx.array]


def convolve_with_silu(window: mx.array, weight: mx.array) -> mx.array:
    """
    A causal convolution of each channel, followed by the silu activation.

    Shapes: window (N, W - 1 + L, C), weight (C, 1, W) -> (N, L, C).
    """
    size = weight.shape[-1]
    length = window.shape[1] - size + 1
    # a compiler can join these W products into one launch
    products = (
        window[:, i : i + length] * weight[:, 0, i].astype(window.dtype) for i in range(size)
    )
    mixed = sum(products)
    assert isinstance(mixed, mx.array)
    return ops.silu(mixed)


def next_convolution_inputs(window: mx.array, num_kept: int, ends: mx.array | None) -> mx.array:
    """
    The inputs that the convolution of the next token needs, (N, W - 1 + L, C) -> (N, W - 1, C).

    `num_kept` is W - 1. `ends` (N,) is the number of tokens of each row, at most L; None means that
    every row has L tokens.
    """
    if ends is None:
        return window[:, window.shape[1] - num_kept :]
    columns = ends[:, None] + mx.arange(num_kept)
    return mx.take_along_axis(window, columns[..., None], 1)


def normalize_to_length_1(x: mx.array) -> mx.array:
    """The vectors along the last axis, scaled to length 1."""
    return x * mx.rsqrt((x * x).sum(-1, keepdims=True) + 1e-6)


def stepwise_recurrence(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    log_decay: mx.array,
    beta: mx.array,
    memory: mx.array,
) -> OutputsAndMemory:
    """
    The outputs (N, L, H, D) and the final memory (N, H, D, E), computed token by token.

    The queries and keys (N, L, K, E) must already be scaled, so that the norm of each key is 1.
    Each key head serves H / K consecutive value heads. The values are (N, L, H, D), and the initial
    memory is (N, H, D, E). `log_decay` (N, L, H) is at most 0. `beta` (N, L, H) is the fraction,
    from 0 to 1, by which the memory is corrected. All arrays have the same floating-point dtype.
    """
    queries, keys = _repeat_queries_and_keys_per_value_head(queries, keys, values)
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


def _repeat_queries_and_keys_per_value_head(
    queries: mx.array, keys: mx.array, values: mx.array
) -> tuple[mx.array, mx.array]:
    """The queries and keys, repeated for each value head, (N, L, K, E) -> (N, L, H, E)."""
    num_repeats = values.shape[2] // keys.shape[2]
    if num_repeats == 1:
        return queries, keys
    return mx.repeat(queries, num_repeats, 2), mx.repeat(keys, num_repeats, 2)


def invert_identity_plus(strictly_lower: mx.array) -> mx.array:
    """
    The inverses of I + A, for strictly lower triangular matrices A (..., T, T).

    T must be BLOCK times a power of two. The two diagonal blocks of half the size are inverted
    together by recursion, and the corner is computed from their inverses. The inverse of a block of
    size BLOCK is the product (I - A)(I + A^2)(I + A^4). Such a product is not used for larger
    blocks: in a chunk in which a token repeats, powers of A would contain binomial coefficients up
    to 1e18, and sums of these powers would have no correct digit.
    """
    size = strictly_lower.shape[-1]
    if size == BLOCK:
        eye = mx.eye(BLOCK, dtype=strictly_lower.dtype)
        square = strictly_lower @ strictly_lower
        return (eye - strictly_lower) @ (eye + square) @ (eye + square @ square)

    half = size // 2
    diagonal_blocks = mx.stack(
        [strictly_lower[..., :half, :half], strictly_lower[..., half:, half:]]
    )
    top_left, bottom_right = invert_identity_plus(diagonal_blocks)
    corner = -(bottom_right @ strictly_lower[..., half:, :half] @ top_left)
    top = mx.concatenate([top_left, mx.zeros_like(top_left)], axis=-1)
    bottom = mx.concatenate([corner, bottom_right], axis=-1)
    return mx.concatenate([top, bottom], axis=-2)


def split_into_chunks(array: mx.array, chunk_size: int, num_chunks: int) -> mx.array:
    """
    Splits the tokens into chunks of equal size, (N, L, H, ...) -> (N, H, chunks, T, ...).

    The last chunk is padded with zeros.
    """
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
) -> OutputsAndMemory:
    """
    The results of `stepwise_recurrence`, computed with matmuls.

    Within a chunk, each correction depends on the earlier corrections through a triangular system,
    whose inverse gives all corrections at once. Each chunk passes the memory to the next chunk.
    """
    num_rows, length, num_heads, value_dim = values.shape
    chunk_size = next(size for size in CHUNK_SIZES if size >= min(length, CHUNK))
    num_chunks = -(-length // chunk_size)

    queries, keys = _repeat_queries_and_keys_per_value_head(queries, keys, values)
    queries = split_into_chunks(queries, chunk_size, num_chunks)
    keys = split_into_chunks(keys, chunk_size, num_chunks)
    values = split_into_chunks(values, chunk_size, num_chunks)
    log_decay = split_into_chunks(log_decay, chunk_size, num_chunks)
    beta = split_into_chunks(beta, chunk_size, num_chunks)

    # (N, H, chunks, T), summed from the beginning of the chunk
    total_decay = mx.cumsum(log_decay, axis=-1)
    is_past = mx.tri(chunk_size, dtype=mx.bool_)
    pair_decay = total_decay[..., :, None] - total_decay[..., None, :]
    # (N, H, chunks, T, T): entry i, j is the decay from token j to token i
    fades = cpu.exp(mx.where(is_past, pair_decay, -1e30))
    corrected_keys = keys * beta[..., None]
    overlaps = (corrected_keys @ keys.swapaxes(-1, -2)) * fades
    is_strictly_past = mx.tri(chunk_size, k=-1, dtype=mx.bool_)
    inverse = invert_identity_plus(mx.where(is_strictly_past, overlaps, 0.0))

    begin_fades = cpu.exp(total_decay)[..., None]
    end_fades = cpu.exp(total_decay[..., -1:] - total_decay)[..., None]
    # the corrections if the memory were empty at the chunk's beginning
    empty_corrections = inverse @ (values * beta[..., None])
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


def gated_delta(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    log_decay: mx.array,
    beta: mx.array,
    memory: mx.array,
) -> OutputsAndMemory:
    """
    The results of `stepwise_recurrence`, computed by one of two operations.

    `gated_delta_step` computes one token per row, and `gated_delta_sequence` computes several
    tokens per row. The kernels of these two operations can be turned off separately.
    """
    op = gated_delta_step if values.shape[1] == 1 else gated_delta_sequence
    return op(queries, keys, values, log_decay, beta, memory)


@kernels.make_op(stepwise_recurrence)
def gated_delta_step(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    log_decay: mx.array,
    beta: mx.array,
    memory: mx.array,
) -> OutputsAndMemory:
    """
    Runs MLX's own operation, in one launch if MLX has a kernel for these heads.

    MLX has kernels for heads with 128 dimensions and certain numbers of key and value heads (16 and
    16, 16 and 32, ...). For other heads, MLX processes one token at a time. All arrays are float32,
    because 16 bits would round a decay close to 1 to exactly 1.
    """
    decay = mx.exp(log_decay)
    out, memory = mx.fast.gated_delta_update(queries, keys, values, decay, beta, memory)
    return out, memory


@kernels.make_op(chunked_recurrence)
def gated_delta_sequence(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    log_decay: mx.array,
    beta: mx.array,
    memory: mx.array,
) -> OutputsAndMemory:
    """
    Runs MLX's own operation if heads have 128 dimensions, and `chunked_recurrence` otherwise.

    For other head sizes, MLX has no kernel, and matmuls are faster than one token at a time.
    """
    has_kernel = keys.shape[-1] == values.shape[-1] == 128
    compute = gated_delta_step.launch if has_kernel else chunked_recurrence
    return compute(queries, keys, values, log_decay, beta, memory)
