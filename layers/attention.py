"""
Attention to keys and values in one buffer, or in several cache parts that rows may share.

Each operation has a reference expression, a kernel and a launch function, in this order, as in
layers/ops.py. The caches are in kv_cache.py.

Axes: N rows, L positions, H query heads, K key/value heads, D dimensions per head, S keys, R rows
in a shared part, G rows that read each of these R rows, Q = H / K * L queries per row and
key/value head, X an arbitrary size.
"""

import functools
import math
from pathlib import Path
from typing import Any

import cpu_blas  # noqa: F401  (before mlx)
import mlx.core as mx

from kv_cache import AttentionMasks, KeysAndValues, Mask, Parts, QueryRowsReadingCachePart
from machine import cpu, gpu, kernels

HERE = Path(__file__).parent
FEW_QUERIES = 8  # the largest number of queries that MLX's decode kernel accepts

# The attention gradient computes at most this many scores at once, in several arrays of this size.
MOST_SCORES = 2**23
# On a CPU, prompts are shared if their copies would fill at least this many cache positions; see
# LOG.md.
MIN_SHARED_COLUMNS = 2048

GradientsOfQueriesKeysValues = list[mx.array]
WeightsAndScoreGradient = tuple[mx.array, mx.array]


def attention_ref(queries: mx.array, keys: mx.array, values: mx.array, mask: Mask) -> mx.array:
    """
    The reference expression that defines `attention`.

    On a CPU, `attention` uses this expression, because it is 2.4 times as fast as
    `mx.fast.scaled_dot_product_attention` (measured at L=110).
    """
    return tree_attention_ref(
        queries, [(keys, values)], AttentionMasks([QueryRowsReadingCachePart(mask=mask)])
    )


def has_float32_attention_kernel(head_dim: int) -> bool:
    """
    Whether MLX has an attention kernel with float32 scores for this head size on this device.

    For other head sizes, MLX would compute the scores in 16 bits.
    """
    return gpu.on_gpu() and head_dim in (64, 128)


def attention(queries: mx.array, keys: mx.array, values: mx.array, mask: Mask) -> mx.array:
    """
    Grouped-query attention, (N, H, L, D) x (N, K, S, D) -> (N, H, L, D).

    The L queries occupy the last L of the S positions.
    mask: None, "causal", or a boolean array (N, 1, L, S) that is true where a query sees a key.
    Each query must see at least one key.
    """
    head_dim = queries.shape[-1]
    if not has_float32_attention_kernel(head_dim):
        return attention_ref(queries, keys, values, mask)

    def attention_backward(primals: Any, d_out: mx.array, _: Any) -> GradientsOfQueriesKeysValues:
        queries, keys, values = primals
        return attention_vjp(queries, keys, values, d_out, mask)

    attention_forward = functools.partial(
        mx.fast.scaled_dot_product_attention, scale=head_dim**-0.5, mask=mask
    )
    result: mx.array = gpu.call_with_vjp(
        attention_forward, attention_backward, queries, keys, values
    )
    return result


# ---- the gradient


def choose_query_chunk_size(num_rows: int, num_heads: int, length: int, num_keys: int) -> int:
    """How many of the L queries the attention gradient processes at once."""
    scores_per_query = num_rows * num_heads * num_keys
    return min(max(MOST_SCORES // scores_per_query, 32), length)


def attention_vjp(
    queries: mx.array, keys: mx.array, values: mx.array, d_out: mx.array, mask: Mask
) -> GradientsOfQueriesKeysValues:
    """
    The gradients of `attention` with respect to queries, keys and values.

    The gradients are computed for one chunk of queries at a time, with float32 scores. MLX's own
    gradient is not used, because MLX 0.32.4 rounds the product of queries and keys to 16 bits
    before it scales the product. With the large key biases of Qwen2 and Qwen2.5, the error of MLX's
    gradient can be as large as the gradient (tests/test_attention_gradient.py).
    """
    dtype = queries.dtype
    if dtype == mx.bfloat16:  # bfloat16 has too few digits for the weights and the gradients
        queries = queries.astype(mx.float32)
        keys = keys.astype(mx.float32)
        values = values.astype(mx.float32)
        d_out = d_out.astype(mx.float32)

    num_rows, num_heads, length, head_dim = queries.shape
    _, num_kv_heads, num_keys, _ = keys.shape
    chunk_size = choose_query_chunk_size(num_rows, num_heads, length, num_keys)
    wide_keys = keys.astype(mx.float32)
    d_queries: list[mx.array] = []
    # The gradients of keys and values, summed over the chunks so far. Each chunk waits for the
    # previous chunk.
    totals: list[mx.array] = []
    # The last chunk is first, because its queries see all keys.
    for begin in reversed(range(0, length, chunk_size)):
        chunk = slice(begin, min(begin + chunk_size, length))
        num_visible = num_keys
        if mask == "causal":
            num_visible = num_keys - length + chunk.stop
        visible_keys = keys[:, :, :num_visible]
        visible_values = values[:, :, :num_visible]
        shape = num_rows, num_heads, chunk.stop - begin, num_visible
        by_kv_head = num_rows, num_kv_heads, -1, head_dim

        ready_queries, ready_d_out = mx.depends([queries, d_out], totals)
        query = ready_queries[:, :, chunk].reshape(by_kv_head)  # (N, K, H / K * l, D)
        d_chunk = ready_d_out[:, :, chunk].reshape(by_kv_head)
        scores = query.astype(mx.float32) @ wide_keys[:, :, :num_visible].swapaxes(-1, -2)
        d_weights = d_chunk @ visible_values.swapaxes(-1, -2)
        chunk_mask = mask[:, :, chunk] if isinstance(mask, mx.array) else mask
        weights, d_scores = score_gradient(
            d_weights.reshape(shape), scores.reshape(shape), chunk_mask, head_dim**-0.5
        )
        weights = weights.reshape(scores.shape)
        d_scores = d_scores.reshape(scores.shape)

        d_query = d_scores @ visible_keys
        d_queries.append(d_query.reshape(*shape[:3], head_dim))
        d_keys = d_scores.swapaxes(-1, -2) @ query
        d_values = weights.swapaxes(-1, -2) @ d_chunk
        if totals:
            total_d_keys, total_d_values = totals
            d_keys = total_d_keys.at[:, :, :num_visible].add(d_keys)
            d_values = total_d_values.at[:, :, :num_visible].add(d_values)
        totals = [d_keys, d_values]

    gradients = [mx.concatenate(d_queries[::-1], axis=2), *totals]
    return [gradient.astype(dtype) for gradient in gradients]


def score_gradient_ref(
    d_weights: mx.array, scores: mx.array, mask: Mask, scale: float
) -> WeightsAndScoreGradient:
    """
    The weights softmax(scale * scores), and the gradient with respect to the scores.

    d_weights: the gradient with respect to the weights. All arrays have shape (N, H, L, S). The
    scores are float32, and both results have the dtype of d_weights.
    mask: the same as for `attention`.
    """
    scores = scores * scale
    if isinstance(mask, str):
        length, num_keys = scores.shape[2:]
        mask = mx.tri(length, num_keys, num_keys - length, dtype=mx.bool_)
    if mask is not None:
        scores = scores + mx.where(mask, 0.0, -1e30)
    weights = mx.softmax(scores, axis=-1)
    d_wide = d_weights.astype(mx.float32)
    d_scores = weights * (d_wide - (weights * d_wide).sum(-1, keepdims=True)) * scale
    return weights.astype(d_weights.dtype), d_scores.astype(d_weights.dtype)


SCORE_GRADIENT = kernels.Kernel(
    HERE / "score_gradient.metal", "scores d_weights mask scale", "weights d_scores"
)


@kernels.make_op(score_gradient_ref)
def score_gradient(
    d_weights: mx.array, scores: mx.array, mask: Mask, scale: float
) -> WeightsAndScoreGradient:
    """
    Reads both input arrays twice and writes both results, in one launch.

    The second read is mostly served by the GPU's own cache.
    """
    is_masked = isinstance(mask, mx.array)
    mask_array = mask if isinstance(mask, mx.array) else kernels.constant_array(False)
    weights, d_scores = SCORE_GRADIENT(
        [scores, d_weights, mask_array, kernels.constant_array(scale)],
        [(scores.shape, d_weights.dtype)] * 2,
        grid=(32, math.prod(scores.shape[:3]), 1),
        threadgroup=(32, 8, 1),
        T=d_weights.dtype,
        CAUSAL=isinstance(mask, str),
        MASKED=is_masked,
    )
    return weights, d_scores


# ---- attention of rows that share parts of their past


def gather_queries_by_part_row(
    x: mx.array, readers: QueryRowsReadingCachePart, num_part_rows: int
) -> mx.array:
    """
    Groups the queries by the row of the cache part that each query reads.

    The shape (N, K, Q, X) becomes (R, K, G * Q, X), where R is `num_part_rows`.
    """
    num_rows, num_kv_heads, num_queries, size = x.shape
    if num_part_rows == num_rows and readers.members is None:
        return x
    if readers.members is not None:
        x = x[readers.members.reshape(-1)]
    x = x.reshape(num_part_rows, -1, num_kv_heads, num_queries, size).swapaxes(1, 2)
    return x.reshape(num_part_rows, num_kv_heads, -1, size)


def scatter_to_query_rows(
    x: mx.array, readers: QueryRowsReadingCachePart, num_rows: int, num_queries: int
) -> mx.array:
    """
    The inverse of `gather_queries_by_part_row`, (R, K, G * Q, X) -> (N, K, Q, X).

    `num_rows` is N, and `num_queries` is Q.
    """
    num_blocks, num_kv_heads, _, size = x.shape
    if num_blocks == num_rows and readers.places is None:
        return x
    x = x.reshape(num_blocks, num_kv_heads, -1, num_queries, size).swapaxes(1, 2)
    x = x.reshape(-1, num_kv_heads, num_queries, size)
    return x if readers.places is None else x[readers.places]


def add_mask_to_scores(scores: mx.array, mask: Mask, num_positions: int) -> mx.array:
    """
    The scores (R, K, G * Q, S), with -1e30 added where a query does not see a key.

    `kv_cache.QueryRowsReadingCachePart` describes the form of the mask, and `num_positions` is L.
    """
    if mask is None:
        return scores
    num_blocks, num_kv_heads, _, num_keys = scores.shape
    if isinstance(mask, str):
        mask = mx.tri(num_positions, num_keys, num_keys - num_positions, dtype=mx.bool_)
        mask = mask[None, None]
    # with -inf instead of -1e30, the result of a query that sees no key would be nan
    bias = mx.where(mask, 0.0, -1e30)
    if mask.shape[2] == 1:
        return scores + bias
    by_position = scores.reshape(num_blocks, num_kv_heads, -1, num_positions, num_keys)
    return (by_position + bias[:, :, None]).reshape(scores.shape)


def tree_attention_ref(queries: mx.array, parts: Parts, masks: AttentionMasks) -> mx.array:
    """
    Attention of rows that share parts of their past, (N, H, L, D) -> (N, H, L, D).

    The result equals softmax(q k / sqrt(D)) v over the concatenation of each row's parts, with
    float32 scores. The weights of all parts are computed relative to a common maximum, and the sums
    of the weights are added. All queries that read the same row of a part share one matmul,
    (H / K * G * L, D) x (D, S). The division by the sum of the weights comes last, because it then
    applies to D columns instead of S columns.
    """
    dtype = queries.dtype
    num_rows, num_heads, length, head_dim = queries.shape
    num_kv_heads = parts[0][0].shape[1]
    num_queries = num_heads // num_kv_heads * length  # per row and key/value head
    scaled = queries.astype(mx.float32) * head_dim**-0.5
    scaled = scaled.reshape(num_rows, num_kv_heads, num_queries, head_dim)

    part_scores = []
    for (keys, _), readers in zip(parts, masks.part_readers, strict=True):
        part_queries = gather_queries_by_part_row(scaled, readers, keys.shape[0])
        scores = part_queries @ keys.astype(mx.float32).swapaxes(-1, -2)  # (R, K, G * Q, S)
        part_scores.append(add_mask_to_scores(scores, readers.mask, length))

    peaks = []
    for scores, readers in zip(part_scores, masks.part_readers, strict=True):
        part_peak = scores.max(-1, keepdims=True)
        peaks.append(scatter_to_query_rows(part_peak, readers, num_rows, num_queries))
    peak = functools.reduce(mx.maximum, peaks)  # (N, K, Q, 1)

    sums = []
    outs = []
    for scores, (_, values), readers in zip(part_scores, parts, masks.part_readers, strict=True):
        weights = cpu.exp(scores, gather_queries_by_part_row(peak, readers, values.shape[0]))
        part_sum = weights.sum(-1, keepdims=True)
        part_out = weights @ values.astype(mx.float32)
        sums.append(scatter_to_query_rows(part_sum, readers, num_rows, num_queries))
        outs.append(scatter_to_query_rows(part_out, readers, num_rows, num_queries))
    total = functools.reduce(mx.add, sums)
    out = functools.reduce(mx.add, outs)
    return (out / total).reshape(num_rows, num_heads, length, head_dim).astype(dtype)


# The inputs need not be contiguous, because they are views of buffers with room to grow.
SLOT_ATTENTION = kernels.Kernel(
    HERE / "slot_attention.metal",
    "queries keys values own_keys own_values members places mask own_mask",
    "out",
    contiguous=False,
)


def choose_lanes_per_column(queries_per_kv_head: int, head_dim: int) -> int:
    """
    How many lanes of a simdgroup (8, 16 or 32) share each column in `slot_attention`.

    A column is the key and the value of one position. The result is the smallest number of lanes
    for which no lane stores more than 48 query elements and 48 result elements. With fewer lanes
    per column, summing a score takes fewer shuffles.
    """
    for lanes in (8, 16):
        numbers_per_lane = queries_per_kv_head * -(-head_dim // (4 * lanes)) * 4
        if numbers_per_lane <= 48:
            return lanes
    return 32


@kernels.make_op(tree_attention_ref)
def slot_attention(queries: mx.array, parts: Parts, masks: AttentionMasks) -> mx.array:
    """
    Computes the attention of one decode step, for slots that share prompts, in one launch.

    The kernel reads the queries, each slot's own columns, and the columns of each prompt. The first
    slot of a group reads the prompt from memory. The other slots, whose threadgroups run at the
    same time, read the prompt from the GPU's own cache. MLX's kernel would need one copy of the
    prompt per slot. Two calls of that kernel, one for the prompt and one for the slot's own
    columns, would give results that cannot be combined, because the kernel does not return the sums
    of its weights.
    """
    (keys, values), (own_keys, own_values) = parts
    members, places, mask = masks.part_readers[0]
    own_mask = masks.part_readers[1].mask
    assert not isinstance(mask, str), "a causal mask, but each slot takes one token per step"
    assert not isinstance(own_mask, str), "a causal mask, but each slot takes one token per step"

    num_rows, num_heads, _, head_dim = queries.shape
    num_kv_heads = keys.shape[1]
    ratio = num_heads // num_kv_heads
    unused = kernels.constant_array(False).reshape(1, 1, 1, 1)
    optional_inputs = (members, places, mask, own_mask)
    choices = [unused if array is None else array for array in optional_inputs]
    (out,) = SLOT_ATTENTION(
        [queries, keys, values, own_keys, own_values, *choices],
        [(queries.shape, queries.dtype)],
        grid=(num_rows * 256, num_kv_heads, 1),
        threadgroup=(256, 1, 1),
        T=queries.dtype,
        D=head_dim,
        Q=ratio,
        LANES=choose_lanes_per_column(ratio, head_dim),
        FULL=members is None,
        MASKED=mask is not None,
        OWN_MASKED=own_mask is not None,
    )
    return out


def copy_part_for_each_row(
    part: mx.array, readers: QueryRowsReadingCachePart, num_rows: int
) -> mx.array:
    """One copy of a part's keys or values for each row, (R, K, S, D) -> (N, K, S, D)."""
    if readers.places is None or readers.members is None:
        return mx.repeat(part, num_rows // part.shape[0], 0)
    return part[readers.places // readers.members.shape[1]]


def join_parts_of_each_row(parts: Parts, masks: AttentionMasks) -> KeysAndValues:
    """
    The parts of each row, joined into one buffer of keys and one buffer of values.

    Each buffer has shape (N, K, S, D).
    """
    num_rows = parts[-1][0].shape[0]
    row_keys = []
    row_values = []
    for (keys, values), readers in zip(parts, masks.part_readers, strict=True):
        row_keys.append(copy_part_for_each_row(keys, readers, num_rows))
        row_values.append(copy_part_for_each_row(values, readers, num_rows))
    return mx.concatenate(row_keys, axis=2), mx.concatenate(row_values, axis=2)


def attend_to_parts(queries: mx.array, parts: Parts, masks: AttentionMasks) -> mx.array:
    """
    Grouped-query attention of rows to all parts of their past, (N, H, L, D) -> (N, H, L, D).

    `tree_attention_ref` defines the result. A decode step of slots that share prompts has its own
    kernel, `slot_attention`. For more than a few queries on a GPU, all parts are joined into one
    buffer for MLX's own kernel. That kernel reads 16-bit inputs and does not store its scores,
    whereas `tree_attention_ref` writes float32 scores and float32 copies of all keys and values to
    memory.
    """
    newest = masks.part_readers[-1]
    length, head_dim = queries.shape[2:]
    if len(parts) == 1:
        ((keys, values),) = parts
        return attention(queries, keys, values, newest.mask)

    is_decode_step = length == 1 and not isinstance(newest.mask, str)
    is_slots = len(parts) == 2 and is_decode_step and newest.members is None
    if is_slots and head_dim <= 256:
        return slot_attention(queries, parts, masks)
    if (
        not has_float32_attention_kernel(head_dim)
        or length <= FEW_QUERIES
        or newest.mask != "causal"
    ):
        return tree_attention_ref(queries, parts, masks)
    keys, values = join_parts_of_each_row(parts, masks)
    mask = "causal" if masks.whole is None else masks.whole
    return attention(queries, keys, values, mask)


# ---- whether rows share prompts


def can_read_prompts_in_place(dtype: mx.Dtype) -> bool:
    """
    Whether attention can read a shared prompt without a copy of the prompt for each row.

    On a GPU, only the kernel of `slot_attention` can read shared prompts in place.
    """
    return not gpu.on_gpu() or slot_attention.can_run(dtype)


def should_share_prefix(
    num_rows: int, prompt_lengths: list[int], batch_size: int, dtype: mx.Dtype
) -> bool:
    """
    Whether storing each prompt once should be faster than giving each of its rows a copy.

    On a CPU, sharing is faster if the copies would fill at least MIN_SHARED_COLUMNS cache
    positions. For fewer positions, attention in two parts costs more than it saves. On a GPU,
    sharing is faster if a kernel can read prompts in place.
    """
    if num_rows == len(prompt_lengths):
        return False  # no two rows continue the same prompt
    if not can_read_prompts_in_place(dtype):
        return False
    num_copied = min(num_rows, batch_size) * max(prompt_lengths)
    return gpu.on_gpu() or num_copied >= MIN_SHARED_COLUMNS
