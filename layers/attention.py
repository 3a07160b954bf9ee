"""
Attention to keys in one buffer, and to parts of the past that rows share.

The reference expression, the kernel and its launch follow each other, as in layers/ops.py. The
caches are in kv_cache.py.

Axes: N rows, L positions, H query heads, K kv heads, D head dim, S keys; R rows of a part that G
rows each share; Q = H / K * L queries of a row and kv head, X any size.
"""

import functools
import math
from pathlib import Path
from typing import Any

import mlx.core as mx

from kv_cache import Group, Layout, Mask, Parts
from machine import cpu, gpu, kernels

HERE = Path(__file__).parent
FEW_QUERIES = 8  # the most queries that MLX's decode kernel takes
# how many scores the gradient of attention computes at once, in several arrays of this size
MOST_SCORES = 2**23
# The number of prompt columns of all slots from which prompts are shared on a CPU, see LOG.md
MIN_SHARED_COLUMNS = 2048


def attention_ref(queries: mx.array, keys: mx.array, values: mx.array, mask: Mask) -> mx.array:
    """
    The definition of `attention`.

    It is also the fast form on a CPU: 2.4 times as fast as `mx.fast` at L=110.
    """
    return tree_attention_ref(queries, [(keys, values)], Layout([Group(mask=mask)]))


def is_fused(head_dim: int) -> bool:
    """
    Whether MLX has an attention kernel with float32 scores here.

    Other head sizes would fall back to scores in 16 bits.
    """
    return gpu.on_gpu() and head_dim in (64, 128)


def attention(queries: mx.array, keys: mx.array, values: mx.array, mask: Mask) -> mx.array:
    """
    Grouped-query attention, (N, H, L, D) x (N, K, S, D) -> (N, H, L, D).

    The L queries are at the last of the S positions.
    mask: None, "causal", or (N, 1, L, S) boolean, true if a query sees a key. Each query must
    see at least one key.
    """
    head_dim = queries.shape[-1]
    if not is_fused(head_dim):
        return attention_ref(queries, keys, values, mask)

    def backward(primals: Any, d_out: mx.array, _: Any) -> list[mx.array]:
        queries, keys, values = primals
        return attention_vjp(queries, keys, values, d_out, mask)

    forward = functools.partial(
        mx.fast.scaled_dot_product_attention, scale=head_dim**-0.5, mask=mask
    )
    result: mx.array = gpu.call_with_vjp(forward, backward, queries, keys, values)
    return result


# ---- the gradient


def choose_query_chunk(num_rows: int, num_heads: int, length: int, num_keys: int) -> int:
    """How many of the L queries the gradient of attention processes at once."""
    scores_per_query = num_rows * num_heads * num_keys
    return min(max(MOST_SCORES // scores_per_query, 32), length)


def attention_vjp(
    queries: mx.array, keys: mx.array, values: mx.array, d_out: mx.array, mask: Mask
) -> list[mx.array]:
    """
    The gradient of `attention` by queries, keys and values, computed for some queries at a time.

    The scores are float32. MLX 0.32.4 rounds q k to 16 bits before the scale. The keys of Qwen2 and
    Qwen2.5 have large biases. With these, the error of MLX's gradient is a large fraction of the
    gradient, or as large as the gradient (tests/test_attention_gradient.py).
    """
    dtype = queries.dtype
    if dtype == mx.bfloat16:  # it has too few digits for the weights and for the gradients
        queries = queries.astype(mx.float32)
        keys = keys.astype(mx.float32)
        values = values.astype(mx.float32)
        d_out = d_out.astype(mx.float32)

    num_rows, num_heads, length, head_dim = queries.shape
    _, num_kv_heads, num_keys, _ = keys.shape
    chunk_size = choose_query_chunk(num_rows, num_heads, length, num_keys)
    wide_keys = keys.astype(mx.float32)
    d_queries: list[mx.array] = []
    # the gradients of keys and values so far; each chunk waits for the chunk before it
    totals: list[mx.array] = []
    for begin in reversed(range(0, length, chunk_size)):  # the first chunk sees all keys
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
) -> tuple[mx.array, mx.array]:
    """
    The weights softmax(scale * scores), and the gradient by the scores; all (N, H, L, S).

    d_weights: the gradient by the weights. Scores are float32; the results have the type of
    d_weights. mask: as for `attention`.
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
) -> tuple[mx.array, mx.array]:
    """
    In one launch, reads both arrays twice, the second time mostly from the cache, and writes both
    results.
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


# ---- rows that share parts of their past


def gather_queries(x: mx.array, group: Group, num_blocks: int) -> mx.array:
    """
    For each row of a part, all queries that read it, (N, K, Q, X) -> (R, K, G * Q, X).

    num_blocks: R.
    """
    num_rows, num_kv_heads, num_queries, size = x.shape
    if num_blocks == num_rows and group.members is None:
        return x
    if group.members is not None:
        x = x[group.members.reshape(-1)]
    x = x.reshape(num_blocks, -1, num_kv_heads, num_queries, size).swapaxes(1, 2)
    return x.reshape(num_blocks, num_kv_heads, -1, size)


def scatter_queries(x: mx.array, group: Group, num_rows: int, num_queries: int) -> mx.array:
    """
    The inverse of `gather_queries`, (R, K, G * Q, X) -> (N, K, Q, X).

    num_rows: N, num_queries: Q.
    """
    num_blocks, num_kv_heads, _, size = x.shape
    if num_blocks == num_rows and group.places is None:
        return x
    x = x.reshape(num_blocks, num_kv_heads, -1, num_queries, size).swapaxes(1, 2)
    x = x.reshape(-1, num_kv_heads, num_queries, size)
    return x if group.places is None else x[group.places]


def mask_scores(scores: mx.array, mask: Mask, length: int) -> mx.array:
    """
    Scores (R, K, G * Q, S) with -1e30 added where a query does not see a key.

    mask: as in `kv_cache.Group`. length: L.
    """
    if mask is None:
        return scores
    num_blocks, num_kv_heads, _, num_keys = scores.shape
    if isinstance(mask, str):
        mask = mx.tri(length, num_keys, num_keys - length, dtype=mx.bool_)[None, None]
    bias = mx.where(mask, 0.0, -1e30)  # finite: a query that sees nothing must not become nan
    if mask.shape[2] == 1:
        return scores + bias
    by_position = scores.reshape(num_blocks, num_kv_heads, -1, length, num_keys)
    return (by_position + bias[:, :, None]).reshape(scores.shape)


def tree_attention_ref(queries: mx.array, parts: Parts, layout: Layout) -> mx.array:
    """
    Attention of rows that share parts of their past, (N, H, L, D) -> (N, H, L, D).

    It equals softmax(q k / sqrt(D)) v over the concatenation of each row's parts, with float32
    scores. The weights of all parts are relative to a common maximum, and their sums are added.
    All queries that read the same row of a part share one matmul, (H / K * G * L, D) x (D, S). The
    division by the sum comes last, because it then applies to D columns and not to S.
    """
    dtype = queries.dtype
    num_rows, num_heads, length, head_dim = queries.shape
    num_kv_heads = parts[0][0].shape[1]
    num_queries = num_heads // num_kv_heads * length  # of one row and kv head
    scaled = queries.astype(mx.float32) * head_dim**-0.5
    scaled = scaled.reshape(num_rows, num_kv_heads, num_queries, head_dim)

    part_scores = []
    for (keys, _), group in zip(parts, layout.groups, strict=True):
        part_queries = gather_queries(scaled, group, keys.shape[0])
        scores = part_queries @ keys.astype(mx.float32).swapaxes(-1, -2)  # (R, K, G * Q, S)
        part_scores.append(mask_scores(scores, group.mask, length))

    peaks = []
    for scores, group in zip(part_scores, layout.groups, strict=True):
        part_peak = scores.max(-1, keepdims=True)
        peaks.append(scatter_queries(part_peak, group, num_rows, num_queries))
    peak = functools.reduce(mx.maximum, peaks)  # (N, K, Q, 1)

    sums = []
    outs = []
    for scores, (_, values), group in zip(part_scores, parts, layout.groups, strict=True):
        weights = cpu.exp(scores, gather_queries(peak, group, values.shape[0]))
        part_sum = weights.sum(-1, keepdims=True)
        part_out = weights @ values.astype(mx.float32)
        sums.append(scatter_queries(part_sum, group, num_rows, num_queries))
        outs.append(scatter_queries(part_out, group, num_rows, num_queries))
    total = functools.reduce(mx.add, sums)
    out = functools.reduce(mx.add, outs)
    return (out / total).reshape(num_rows, num_heads, length, head_dim).astype(dtype)


# contiguous=False, because the inputs are views of buffers with room to grow
SLOT_ATTENTION = kernels.Kernel(
    HERE / "slot_attention.metal",
    "queries keys values own_keys own_values members places mask own_mask",
    "out",
    contiguous=False,
)


def choose_lanes(ratio: int, head_dim: int) -> int:
    """
    How many lanes of a simdgroup share a column in `slot_attention`.

    It is the smallest number with which a lane holds at most 48 numbers of the queries, and as many
    of the results. With fewer lanes, fewer shuffles add up a score.
    ratio: query heads per kv head.
    """
    for lanes in (8, 16):
        numbers_per_lane = ratio * -(-head_dim // (4 * lanes)) * 4
        if numbers_per_lane <= 48:
            return lanes
    return 32


@kernels.make_op(tree_attention_ref)
def slot_attention(queries: mx.array, parts: Parts, layout: Layout) -> mx.array:
    """
    Computes a decode step of slots that share prompts, in one launch.

    It reads the queries, each slot's own columns, and each prompt. The first slot of a group reads
    the prompt from memory. The other slots, whose threadgroups run at the same time, read it from
    the cache. MLX's own kernel would need copies of a prompt. The results of two of its calls could
    not be combined, because it does not return its sums.
    """
    (keys, values), (own_keys, own_values) = parts
    members, places, mask = layout.groups[0]
    own_mask = layout.groups[1].mask
    assert not isinstance(mask, str), "a slot takes one token a step"
    assert not isinstance(own_mask, str), "a slot takes one token a step"

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
        LANES=choose_lanes(ratio, head_dim),
        FULL=members is None,
        MASKED=mask is not None,
        OWN_MASKED=own_mask is not None,
    )
    return out


def copy_to_rows(part: mx.array, group: Group, num_rows: int) -> mx.array:
    """A copy of a part's keys or values for each row that reads them, (R, ...) -> (N, K, S, D)."""
    if group.places is None or group.members is None:
        return mx.repeat(part, num_rows // part.shape[0], 0)
    return part[group.places // group.members.shape[1]]


def join_parts(parts: Parts, layout: Layout) -> tuple[mx.array, mx.array]:
    """All parts of each row joined into one buffer of keys and one of values, (N, K, S, D) each."""
    num_rows = parts[-1][0].shape[0]
    row_keys = []
    row_values = []
    for (keys, values), group in zip(parts, layout.groups, strict=True):
        row_keys.append(copy_to_rows(keys, group, num_rows))
        row_values.append(copy_to_rows(values, group, num_rows))
    return mx.concatenate(row_keys, axis=2), mx.concatenate(row_values, axis=2)


def attend(queries: mx.array, parts: Parts, layout: Layout) -> mx.array:
    """
    Grouped-query attention of rows to all parts of their past, (N, H, L, D) -> (N, H, L, D).

    `tree_attention_ref` defines it. A decode step of slots that share prompts has its own kernel.
    For more than a few queries on a GPU, all parts are joined into one buffer for MLX's own kernel:
    it reads 16-bit inputs and does not store its scores, while the expression writes float32 scores
    and float32 copies of all keys and values to memory.
    """
    newest = layout.groups[-1]
    length, head_dim = queries.shape[2:]
    if len(parts) == 1:
        ((keys, values),) = parts
        return attention(queries, keys, values, newest.mask)

    is_decode_step = length == 1 and not isinstance(newest.mask, str)
    is_slots = len(parts) == 2 and is_decode_step and newest.members is None
    if is_slots and head_dim <= 256:
        return slot_attention(queries, parts, layout)
    if not is_fused(head_dim) or length <= FEW_QUERIES or newest.mask != "causal":
        return tree_attention_ref(queries, parts, layout)
    keys, values = join_parts(parts, layout)
    mask = "causal" if layout.whole is None else layout.whole
    return attention(queries, keys, values, mask)


# ---- prompts that rows share


def can_read_in_place(dtype: mx.Dtype) -> bool:
    """
    Whether prompts are read without a copy for each row.

    On a GPU, MLX's own kernel would need such copies.
    """
    return not gpu.on_gpu() or slot_attention.can_run(dtype)


def should_share_prefix(
    num_rows: int, prompt_lengths: list[int], batch_size: int, dtype: mx.Dtype
) -> bool:
    """
    Whether storing each prompt once should be faster than copying it to its rows.

    On a CPU, it is faster from MIN_SHARED_COLUMNS copied columns on. With fewer columns, attention
    in two parts costs more than it saves. On a GPU, it is faster if a kernel reads prompts in
    place.
    """
    if num_rows == len(prompt_lengths):
        return False  # no two rows continue one prompt
    if not can_read_in_place(dtype):
        return False
    num_copied = min(num_rows, batch_size) * max(prompt_lengths)
    return gpu.on_gpu() or num_copied >= MIN_SHARED_COLUMNS
