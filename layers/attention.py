"""
Attention: over keys in one buffer, and over parts of the past that rows share.

As in ops.py an expression, the kernel and its launch stand in this order.
What is left out: the caches, which are in kv_cache.py, and MLX's own kernel.

Axes: N rows, L positions, H query heads, K kv heads, D head dim, S keys; R rows of a part that G rows each share.
"""

import functools
import math
from pathlib import Path

import mlx.core as mx

from kv_cache import Group, Layout, Mask, Parts
from machine import cpu, gpu, kernels

HERE = Path(__file__).parent


def attention_ref(queries: mx.array, keys: mx.array, values: mx.array, mask: Mask) -> mx.array:
    """The definition of `attention`, and on a CPU also the fast form: 2.4 times `mx.fast` at L=110."""
    return tree_attention_ref(queries, [(keys, values)], Layout([Group(mask=mask)]))


FEW_QUERIES = 8  # that MLX's decode kernel takes


def is_fused(head_dim: int) -> bool:
    """Whether MLX has an attention kernel here, with float32 scores; other sizes fall back to scores in 16 bits."""
    return gpu.on_gpu() and head_dim in (64, 128)


def attention(queries: mx.array, keys: mx.array, values: mx.array, mask: Mask) -> mx.array:
    """
    Grouped-query attention, (N, H, L, D) x (N, K, S, D) -> (N, H, L, D); the L queries are the last of the S positions.

    mask: None, "causal", or (N, 1, L, S) boolean, true where a query sees a key; a query that sees none is not allowed.
    """
    if not is_fused(queries.shape[-1]):
        return attention_ref(queries, keys, values, mask)

    fused = functools.partial(mx.fast.scaled_dot_product_attention, scale=queries.shape[-1] ** -0.5, mask=mask)
    result: mx.array = gpu.differentiable(
        fused, lambda given, d_out, _: attention_vjp(given[0], given[1], given[2], d_out, mask), queries, keys, values
    )
    return result


MOST_SCORES = 2**23  # that the gradient of attention holds at once, with what becomes of them


def choose_query_chunk(num_rows: int, num_heads: int, length: int, num_keys: int) -> int:
    """Of L queries how many the gradient of attention takes at once."""
    return min(max(MOST_SCORES // (num_rows * num_heads * num_keys), 32), length)


def attention_vjp(queries: mx.array, keys: mx.array, values: mx.array, d_out: mx.array, mask: Mask) -> list[mx.array]:
    """
    The gradient of `attention` by queries, keys and values, with float32 scores, some queries at a time.

    MLX 0.32.4's own rounds q k to 16 bits before the scale, and with the large biases of Qwen2's and Qwen2.5's keys its
    gradient is off by some to all of its size (tests/test_attention_gradient.py).
    """
    dtype = queries.dtype
    if dtype == mx.bfloat16:  # which has too few digits for weights and for what comes of them
        queries, keys, values, d_out = (array.astype(mx.float32) for array in (queries, keys, values, d_out))
    (num_rows, num_heads, length, size), (_, num_kv_heads, num_keys, _) = queries.shape, keys.shape
    step = choose_query_chunk(num_rows, num_heads, length, num_keys)
    wide_keys, d_queries = keys.astype(mx.float32), list[mx.array]()
    totals: list[mx.array] = []  # the gradients of keys and values so far; each block waits for the last one
    for begin in reversed(range(0, length, step)):  # the first block sees all keys
        block = slice(begin, min(begin + step, length))
        seen = num_keys - length + block.stop if mask == "causal" else num_keys
        shape = num_rows, num_heads, block.stop - begin, seen
        query, d_block = (
            x[:, :, block].reshape(num_rows, num_kv_heads, -1, size) for x in mx.depends([queries, d_out], totals)
        )  # (N, K, H / K * l, D)
        scores = query.astype(mx.float32) @ wide_keys[:, :, :seen].swapaxes(-1, -2)
        d_weights = d_block @ values[:, :, :seen].swapaxes(-1, -2)
        part = mask[:, :, block] if isinstance(mask, mx.array) else mask
        pair = score_gradient(d_weights.reshape(shape), scores.reshape(shape), part, size**-0.5)
        weights, d_scores = (array.reshape(scores.shape) for array in pair)
        d_queries.append((d_scores @ keys[:, :, :seen]).reshape(*shape[:3], size))
        parts = [x.swapaxes(-1, -2) @ y for x, y in ((d_scores, query), (weights, d_block))]
        totals = [x.at[:, :, :seen].add(y) for x, y in zip(totals, parts, strict=True)] if totals else parts
    return [total.astype(dtype) for total in (mx.concatenate(d_queries[::-1], axis=2), *totals)]


def score_gradient_ref(d_weights: mx.array, scores: mx.array, mask: Mask, scale: float) -> tuple[mx.array, mx.array]:
    """
    The weights softmax(scale * scores), and from the gradient by them that by the scores; all (N, H, L, S).

    Scores are float32, the rest has the type of d_weights. mask: as for `attention`.
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


SCORE_GRADIENT = kernels.Kernel(HERE / "score_gradient.metal", "scores d_weights mask scale", "weights d_scores")


@kernels.kernel_of(score_gradient_ref)
def score_gradient(d_weights: mx.array, scores: mx.array, mask: Mask, scale: float) -> tuple[mx.array, mx.array]:
    """Reads both arrays twice, the second time mostly from the cache, and writes both results, in one launch."""
    weights, d_scores = SCORE_GRADIENT(
        [scores, d_weights, mask if isinstance(mask, mx.array) else kernels.constant_array(False), kernels.constant_array(scale)],
        [(scores.shape, d_weights.dtype)] * 2,
        grid=(32, math.prod(scores.shape[:3]), 1),
        threadgroup=(32, 8, 1),
        T=d_weights.dtype,
        CAUSAL=isinstance(mask, str),
        MASKED=isinstance(mask, mx.array),
    )
    return weights, d_scores


def tree_attention_ref(queries: mx.array, parts: Parts, layout: Layout) -> mx.array:
    """
    Attention of rows that share parts of their past, (N, H, L, D) -> (N, H, L, D), with float32 scores.

    softmax(q k / sqrt(D)) v over each row's parts joined together: the weights of all parts are taken from a common
    maximum and their sums added. All queries that read a row of a part do so in one matmul, (H / K * G * L, D) x
    (D, S), and the division by the sum comes last, where it touches D columns and not S.
    """
    num_rows, num_heads, length, head_dim = queries.shape
    num_kv_heads = parts[0][0].shape[1]
    num_queries = num_heads // num_kv_heads * length  # of one row and kv head

    def gather(x: mx.array, group: Group, num_blocks: int) -> mx.array:  # (N, K, Q, X) -> (R, K, G * Q, X)
        if num_blocks == num_rows and group.members is None:
            return x
        if group.members is not None:
            x = x[group.members.reshape(-1)]
        size = x.shape[-1]
        x = x.reshape(num_blocks, -1, num_kv_heads, num_queries, size).swapaxes(1, 2)
        return x.reshape(num_blocks, num_kv_heads, -1, size)

    def scatter(x: mx.array, group: Group) -> mx.array:  # (R, K, G * Q, X) -> (N, K, Q, X)
        num_blocks, _, _, size = x.shape
        if num_blocks == num_rows and group.places is None:
            return x
        x = x.reshape(num_blocks, num_kv_heads, -1, num_queries, size).swapaxes(1, 2)
        x = x.reshape(-1, num_kv_heads, num_queries, size)
        return x if group.places is None else x[group.places]

    dtype = queries.dtype
    queries = (queries.astype(mx.float32) * head_dim**-0.5).reshape(num_rows, num_kv_heads, num_queries, head_dim)
    scores = []
    for (keys, _), group in zip(parts, layout.groups, strict=True):
        score = gather(queries, group, keys.shape[0]) @ keys.astype(mx.float32).swapaxes(-1, -2)  # (R, K, G * Q, S)
        if (mask := group.mask) is not None:
            shape, num_keys = score.shape, keys.shape[2]
            if isinstance(mask, str):
                mask = mx.tri(length, num_keys, num_keys - length, dtype=mx.bool_)[None, None]
            bias = mx.where(mask, 0.0, -1e30)  # finite: a query that sees nothing must not become nan
            if mask.shape[2] == 1:
                score = score + bias
            else:
                score = (score.reshape(*shape[:2], -1, length, num_keys) + bias[:, :, None]).reshape(shape)
        scores.append(score)
    peaks = [scatter(score.max(-1, keepdims=True), group) for score, group in zip(scores, layout.groups, strict=True)]
    peak = functools.reduce(mx.maximum, peaks)  # (N, K, Q, 1)
    sums, outs = [], []
    for score, (_, values), group in zip(scores, parts, layout.groups, strict=True):
        weights = cpu.exp(score, gather(peak, group, values.shape[0]))
        sums.append(scatter(weights.sum(-1, keepdims=True), group))
        outs.append(scatter(weights @ values.astype(mx.float32), group))
    total, out = functools.reduce(mx.add, sums), functools.reduce(mx.add, outs)
    return (out / total).reshape(num_rows, num_heads, length, head_dim).astype(dtype)


# contiguous: what is handed in are views of buffers with room to grow
SLOT_INPUTS = "queries keys values own_keys own_values members places mask own_mask"
SLOT_ATTENTION = kernels.Kernel(HERE / "slot_attention.metal", SLOT_INPUTS, "out", contiguous=False)


@kernels.kernel_of(tree_attention_ref)
def slot_attention(queries: mx.array, parts: Parts, layout: Layout) -> mx.array:
    """
    For a decode step of slots that share prompts. In one launch it reads the queries, each slot's own columns, and each
    prompt: once from memory, and for the rest of its group, whose threadgroups run side by side, from the cache. MLX's
    own kernel needs copies of a prompt, and two calls of it could not be joined: it keeps its sums to itself.
    """
    (keys, values), (own_keys, own_values) = parts
    members, places, mask = layout.groups[0]
    own_mask = layout.groups[1].mask
    assert not isinstance(mask, str) and not isinstance(own_mask, str), "a slot takes one token a step"
    num_rows, num_heads, _, size = queries.shape
    num_kv_heads, nothing = keys.shape[1], kernels.constant_array(False).reshape(1, 1, 1, 1)
    ratio = num_heads // num_kv_heads
    # Lanes of a simdgroup that share a column: the fewest of which each holds at most 48 numbers of its queries and as
    # many of their results. Fewer lanes need fewer shuffles to add up a score.
    lanes = next((n for n in (8, 16) if ratio * -(-size // (4 * n)) * 4 <= 48), 32)
    choices = [nothing if choice is None else choice for choice in (members, places, mask, own_mask)]
    return SLOT_ATTENTION(
        [queries, keys, values, own_keys, own_values, *choices],
        [(queries.shape, queries.dtype)],
        grid=(num_rows * 256, num_kv_heads, 1),
        threadgroup=(256, 1, 1),
        T=queries.dtype,
        D=size,
        Q=ratio,
        LANES=lanes,
        FULL=members is None,
        MASKED=mask is not None,
        OWN_MASKED=own_mask is not None,
    )[0]


def join_parts(parts: Parts, layout: Layout) -> tuple[mx.array, mx.array]:
    """Keys and values of each row's parts in one buffer, (N, K, S, D) each."""
    num_rows = parts[-1][0].shape[0]

    def spread(part: mx.array, group: Group) -> mx.array:
        if group.places is None or group.members is None:
            return mx.repeat(part, num_rows // part.shape[0], 0)
        return part[group.places // group.members.shape[1]]

    keys, values = (
        mx.concatenate([spread(part, group) for part, group in zip(arrays, layout.groups, strict=True)], axis=2)
        for arrays in zip(*parts, strict=True)
    )
    return keys, values


def attend(queries: mx.array, parts: Parts, layout: Layout) -> mx.array:
    """
    Grouped-query attention of rows, (N, H, L, D) -> (N, H, L, D), to all parts of their past; see `tree_attention_ref`.

    A decode step of slots that share prompts has kernels. On a GPU more queries than a few take MLX's own kernel, on
    parts joined into one buffer. It reads 16 bits and keeps its scores to itself; the expression writes float32 scores
    to memory, and float32 copies of all keys and values.
    """
    own, length, size = layout.groups[-1], queries.shape[2], queries.shape[3]
    if len(parts) == 1:
        return attention(queries, *parts[0], own.mask)
    is_slots = len(parts) == 2 and length == 1 and own.members is None and not isinstance(own.mask, str)
    if is_slots and size <= 256:
        return slot_attention(queries, parts, layout)
    if not is_fused(size) or length <= FEW_QUERIES or own.mask != "causal":
        return tree_attention_ref(queries, parts, layout)
    return attention(queries, *join_parts(parts, layout), "causal" if layout.whole is None else layout.whole)


# ---- prompts that rows share

SHARE_FROM = 2048  # prompt columns of all slots together; measured in LOG.md


def can_read_in_place(dtype: mx.Dtype) -> bool:
    """Whether prompts are read where they are; MLX's own kernel of a GPU would need a copy of them for each row."""
    return not gpu.on_gpu() or slot_attention.runs(dtype)


def should_share_prefix(num_rows: int, prompt_lengths: list[int], batch_size: int, dtype: mx.Dtype) -> bool:
    """
    Whether holding each prompt once should be faster than copying it to every row that continues it.

    On a CPU: from SHARE_FROM copied columns on; below, attention in two parts costs more than it saves. On a GPU: if a
    kernel reads prompts in place.
    """
    if num_rows == len(prompt_lengths):
        return False  # nothing to share
    return (gpu.on_gpu() or min(num_rows, batch_size) * max(prompt_lengths) >= SHARE_FROM) and can_read_in_place(dtype)
