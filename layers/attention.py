"""
Attention: over keys in one buffer, and over parts of the past that rows share.

As in ops.py an expression, the kernel's source, its launch and the `gpu.Op` that chooses stand in this order.
What is left out: the caches, which are in kv_cache.py, and MLX's own kernel.

Axes: N rows, L positions, H query heads, K kv heads, D head dim, S keys; R rows of a part that G rows each share.
"""

import functools
import itertools
import math
from typing import Any

import mlx.core as mx

import gpu
from kv_cache import Group, Layout, Parts, make_group


def attention_ref(queries: mx.array, keys: mx.array, values: mx.array, mask: mx.array | str | None) -> mx.array:
    """
    The definition of `attention`: softmax(q k / sqrt(D)) v with scores and softmax in float32.

    On a CPU it is also the fast form (2.4 times `mx.fast` at L=110): `exp` as above, one matmul for all queries of a
    kv head, and the division by the sum after the product with the values, where it touches D columns and not S.
    """
    num_rows, num_heads, length, head_dim = queries.shape
    num_kv_heads, num_keys = keys.shape[1], keys.shape[2]
    dtype = queries.dtype
    queries = (queries.astype(mx.float32) * head_dim**-0.5).reshape(num_rows, num_kv_heads, -1, head_dim)
    scores = queries @ keys.astype(mx.float32).swapaxes(-1, -2)  # (N, K, H / K * L, S)
    if mask is not None:
        scores = scores.reshape(num_rows, num_kv_heads, -1, length, num_keys)
        if isinstance(mask, str):
            mask = mx.tri(length, num_keys, num_keys - length, dtype=mx.bool_)
        else:
            mask = mask[:, :, None]
        scores = scores + mx.where(mask, 0.0, -1e30)  # finite: a query that sees nothing must not become nan
        scores = scores.reshape(num_rows, num_kv_heads, -1, num_keys)
    weights = gpu.exp(scores - mx.stop_gradient(scores.max(-1, keepdims=True)))
    out = (weights @ values.astype(mx.float32)) / weights.sum(-1, keepdims=True)
    return out.reshape(num_rows, num_heads, length, head_dim).astype(dtype)


FEW_QUERIES = 8  # that MLX's decode kernel takes


def is_fused(head_dim: int) -> bool:
    """Whether MLX has an attention kernel here, with float32 scores; other sizes fall back to scores in 16 bits."""
    return gpu.on_gpu() and head_dim in (64, 128)


def attention(queries: mx.array, keys: mx.array, values: mx.array, mask: mx.array | str | None) -> mx.array:
    """
    Grouped-query attention, (N, H, L, D) x (N, K, S, D) -> (N, H, L, D); the L queries are the last of the S positions.

    mask: None, "causal", or (N, 1, L, S) boolean, true where a query sees a key; a query that sees none is not allowed.
    """
    # MLX's kernel for few queries keeps nothing for a gradient, and whoever asks for "causal" may want one.
    few = isinstance(mask, str) and queries.shape[2] <= FEW_QUERIES
    if not is_fused(queries.shape[-1]) or few:
        return attention_ref(queries, keys, values, mask)
    return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=queries.shape[-1] ** -0.5, mask=mask)


def tree_attention_ref(queries: mx.array, parts: Parts, layout: Layout) -> mx.array:
    """
    Attention of rows that share parts of their past, (N, H, L, D) -> (N, H, L, D), with float32 scores.

    Equal to attention over each row's parts joined together: the weights of all parts are taken from a common maximum
    and their sums added. All queries that read a row of a part do so in one matmul, (H / K * G * L, D) x (D, S).
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
        if isinstance(group.mask, str):
            shape, num_keys = score.shape, keys.shape[2]
            mask = mx.tri(length, num_keys, num_keys - length, dtype=mx.bool_)
            score = (score.reshape(*shape[:2], -1, length, num_keys) + mx.where(mask, 0.0, -1e30)).reshape(shape)
        elif group.mask is not None:
            score = score + mx.where(group.mask, 0.0, -1e30)
        scores.append(score)
    peaks = [scatter(score.max(-1, keepdims=True), group) for score, group in zip(scores, layout.groups, strict=True)]
    peak = mx.stop_gradient(functools.reduce(mx.maximum, peaks))  # (N, K, Q, 1)
    sums, outs = [], []
    for score, (_, values), group in zip(scores, parts, layout.groups, strict=True):
        weights = gpu.exp(score - gather(peak, group, values.shape[0]))
        sums.append(scatter(weights.sum(-1, keepdims=True), group))
        outs.append(scatter(weights @ values.astype(mx.float32), group))
    total, out = functools.reduce(mx.add, sums), functools.reduce(mx.add, outs)
    return (out / total).reshape(num_rows, num_heads, length, head_dim).astype(dtype)


SLOT_ATTENTION = gpu.Kernel(
    "slot_attention",
    ["queries", "keys", "values", "own_keys", "own_values", "members", "places", "mask", "own_mask"],
    ["out"],
    """
    // One threadgroup of 8 simdgroups a slot and kv head, first for the prompt's columns, then for the slot's own.
    // LANES lanes take a column, so a simdgroup takes COLUMNS of them at once; a lane holds EACH dims, by fours, of the
    // Q queries that share the kv head and of their results. Weights are under a maximum of the lanes' own, raised at
    // most once in TURNS columns; all is put together at the end. Lanes past the last column take it without weight.
    constexpr int EACH = (D + 4 * LANES - 1) / (4 * LANES) * 4, COLUMNS = 32 / LANES, STEP = 8 * COLUMNS;
    constexpr int TURNS = COLUMNS == 4 ? 2 : 4;
    constexpr bool EXACT = EACH * LANES == D;
    constexpr float LOW = -1e30f;  // finite: nothing less nothing must be nothing
    threadgroup float parts[8 * EACH * LANES];
    threadgroup float peaks[8];
    threadgroup float sums[8];
    int slot = threadgroup_position_in_grid.x, head = threadgroup_position_in_grid.y;
    int simd = simdgroup_index_in_threadgroup, lane = thread_index_in_simdgroup;
    int column = lane / LANES, begin = lane % LANES * 4;
    int group = FULL ? queries_shape[0] / keys_shape[0] : members_shape[1];
    int prompt = (FULL ? slot : int(places[slot])) / group;
    int num_shared = keys_shape[2], num_own = own_keys_shape[2];
    auto mask_begin = prompt * mask_strides[0], own_begin = slot * own_mask_strides[0];

    int dims[EACH];  // of a row; lanes past the last dim read that one, which their queries of 0 make count for nothing
    #pragma unroll
    for (int i = 0; i < EACH; i++) {
        int dim = begin + i / 4 * (4 * LANES) + i % 4;
        dims[i] = EXACT ? dim - begin : dim < D ? dim : D - 1;
    }
    float query[Q * EACH], result[Q * EACH], peak[Q], sum[Q];
    #pragma unroll
    for (int q = 0; q < Q; q++) {
        peak[q] = LOW;
        sum[q] = 0.0f;
        #pragma unroll
        for (int i = 0; i < EACH; i++) {
            int dim = begin + i / 4 * (4 * LANES) + i % 4;
            auto at = slot * queries_strides[0] + (head * Q + q) * queries_strides[1] + dim;
            query[q * EACH + i] = dim < D ? float(queries[at]) * (metal::rsqrt(float(D)) * 1.44269504f) : 0.0f;
            result[q * EACH + i] = 0.0f;
        }
    }
    for (int part = 0; part < 2; part++) {
        int last = (part ? num_own : num_shared) - 1;
        int64_t key_step = part ? own_keys_strides[2] : keys_strides[2];
        int64_t value_step = part ? own_values_strides[2] : values_strides[2];
        auto key = part ? own_keys + slot * own_keys_strides[0] + head * own_keys_strides[1]
                        : keys + prompt * keys_strides[0] + head * keys_strides[1];
        auto value = part ? own_values + slot * own_values_strides[0] + head * own_values_strides[1]
                          : values + prompt * values_strides[0] + head * values_strides[1];
        key += EXACT ? begin : 0;
        value += EXACT ? begin : 0;
        auto last_key = key + last * key_step, last_value = value + last * value_step;
        int place = simd * COLUMNS + column;
        key += place * key_step;
        value += place * value_step;
        key_step *= STEP;
        value_step *= STEP;
        for (int from = simd * COLUMNS; from <= last; from += TURNS * STEP) {
            float score[Q * TURNS], held[EACH];
            #pragma unroll
            for (int turn = 0; turn < TURNS; turn++) {
                int at = place + turn * STEP;
                bool seen = at <= last;
                auto row = seen ? key : last_key;
                key += key_step;
                if (MASKED) seen &= part | mask[mask_begin + metal::min(at, num_shared - 1) * mask_strides[3]];
                if (OWN_MASKED) seen &= !part | own_mask[own_begin + metal::min(at, num_own - 1) * own_mask_strides[3]];
                #pragma unroll
                for (int i = 0; i < EACH; i++) held[i] = float(row[dims[i]]);
                #pragma unroll
                for (int q = 0; q < Q; q++) {
                    float found = query[q * EACH] * held[0];
                    #pragma unroll
                    for (int i = 1; i < EACH; i++) found += query[q * EACH + i] * held[i];
                    #pragma unroll
                    for (int other = LANES / 2; other > 0; other /= 2) found += simd_shuffle_xor(found, other);
                    score[q * TURNS + turn] = seen ? found : LOW;
                }
            }
            #pragma unroll
            for (int q = 0; q < Q; q++) {
                float higher = peak[q];
                #pragma unroll
                for (int turn = 0; turn < TURNS; turn++) higher = metal::max(higher, score[q * TURNS + turn]);
                float shrink = metal::fast::exp2(peak[q] - higher);
                peak[q] = higher;
                sum[q] *= shrink;
                #pragma unroll
                for (int turn = 0; turn < TURNS; turn++) {
                    score[q * TURNS + turn] = metal::fast::exp2(score[q * TURNS + turn] - higher);
                    sum[q] += score[q * TURNS + turn];
                }
                #pragma unroll
                for (int i = 0; i < EACH; i++) result[q * EACH + i] *= shrink;
            }
            #pragma unroll
            for (int turn = 0; turn < TURNS; turn++) {
                auto row = place + turn * STEP <= last ? value : last_value;
                value += value_step;
                #pragma unroll
                for (int i = 0; i < EACH; i++) held[i] = float(row[dims[i]]);
                #pragma unroll
                for (int q = 0; q < Q; q++) {
                    #pragma unroll
                    for (int i = 0; i < EACH; i++) result[q * EACH + i] += score[q * TURNS + turn] * held[i];
                }
            }
            place += TURNS * STEP;
        }
    }
    #pragma unroll
    for (int q = 0; q < Q; q++) {  // what a simdgroup's columns found under a common maximum, then what simdgroups did
        float highest = peak[q];
        #pragma unroll
        for (int other = LANES; other < 32; other *= 2) highest = metal::max(highest, simd_shuffle_xor(highest, other));
        float shrink = metal::fast::exp2(peak[q] - highest), total = sum[q] * shrink;
        #pragma unroll
        for (int other = LANES; other < 32; other *= 2) total += simd_shuffle_xor(total, other);
        if (lane == 0) {
            peaks[simd] = highest;
            sums[simd] = total;
        }
        #pragma unroll
        for (int i = 0; i < EACH; i++) {
            float found = result[q * EACH + i] * shrink;
            #pragma unroll
            for (int other = LANES; other < 32; other *= 2) found += simd_shuffle_xor(found, other);
            if (column == 0) parts[simd * EACH * LANES + begin + i / 4 * (4 * LANES) + i % 4] = found;
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        highest = LOW, total = 0.0f;
        float mean = 0.0f;
        int dim = thread_index_in_threadgroup;
        for (int i = 0; i < 8; i++) highest = metal::max(highest, peaks[i]);
        for (int i = 0; i < 8; i++) {
            float weight = metal::fast::exp2(peaks[i] - highest);
            total += sums[i] * weight;
            if (dim < D) mean += parts[i * EACH * LANES + dim] * weight;
        }
        if (dim < D) out[((size_t(slot) * own_keys_shape[1] + head) * Q + q) * D + dim] = static_cast<T>(mean / total);
        threadgroup_barrier(mem_flags::mem_threadgroup);
    }
""",
    contiguous=False,  # what is handed in are views of buffers with room to grow
)


def lanes_of_a_column(size: int, num_queries: int) -> int:
    """
    How many of a simdgroup's 32 lanes share a column of SLOT_ATTENTION: the fewest, 8 or more, of which each holds at
    most 48 numbers of its queries and as many of their results. Fewer lanes need fewer shuffles to add up a score.
    """
    return next((n for n in (8, 16) if num_queries * -(-size // (4 * n)) * 4 <= 48), 32)


def _launch_slot_attention(queries: mx.array, parts: Parts, layout: Layout) -> mx.array:
    """
    For a decode step of slots that share prompts. In one launch it reads the queries, each slot's own columns, and each
    prompt: once from memory, and for the rest of its group, whose threadgroups run side by side, from the cache. That
    is P columns for a group where copies of its prompt, which MLX's own kernel needs, are G * P. Two calls of that
    kernel could not be joined: it keeps its sums to itself.
    """
    (keys, values), (own_keys, own_values) = parts
    members, places, mask, _ = layout.groups[0]
    own_mask = layout.groups[1].mask
    assert not isinstance(mask, str) and not isinstance(own_mask, str), "a slot takes one token a step"
    num_rows, num_heads, _, size = queries.shape
    num_kv_heads, nothing = keys.shape[1], gpu.constant(False).reshape(1, 1, 1, 1)
    choices = [nothing if choice is None else choice for choice in (members, places, mask, own_mask)]
    return SLOT_ATTENTION(
        [queries, keys, values, own_keys, own_values, *choices],
        [(queries.shape, queries.dtype)],
        grid=(num_rows * 256, num_kv_heads, 1),
        threadgroup=(256, 1, 1),
        T=queries.dtype,
        D=size,
        Q=num_heads // num_kv_heads,
        LANES=lanes_of_a_column(size, num_heads // num_kv_heads),
        FULL=members is None,
        MASKED=mask is not None,
        OWN_MASKED=own_mask is not None,
    )[0]


def _example_of_slot_attention(dtype: mx.Dtype, large: bool) -> list[tuple[Any, ...]]:
    prompts, rows, heads, kv_heads, size, length, width = (
        (8, 64, 16, 8, 128, 512, 64) if large else (2, 3, 4, 2, 64, 9, 5)
    )
    queries = gpu.normal(rows, heads, 1, size, dtype=dtype)
    buffers = gpu.normal(2, prompts, kv_heads, 2 * length, size, dtype=dtype, seed=1)
    keys, values = buffers[:, :, :, :length]  # views, as in a cache
    own_keys, own_values = gpu.normal(2, rows, kv_heads, width, size, dtype=dtype, seed=2)
    parts, own = [(keys, values), (own_keys, own_values)], Group(None, None, None)
    group = make_group([row * prompts // rows for row in range(rows)], prompts, None)
    calls: list[tuple[Any, ...]] = [(queries, parts, Layout([group, own]))]
    if not large:  # and with masks, and a slot a prompt: other kernels
        mask, own_mask = (
            mx.broadcast_to(mx.arange(num_columns) > 1, (num_rows, 1, 1, num_columns))
            for num_rows, num_columns in ((prompts, length), (rows, width))
        )
        calls.append((queries, parts, Layout([group._replace(mask=mask), own._replace(mask=own_mask)])))
        alone = make_group(list(range(prompts)), prompts, None)
        calls.append((queries[:prompts], [parts[0], (own_keys[:prompts], own_values[:prompts])], Layout([alone, own])))
    return calls


slot_attention = gpu.Op(tree_attention_ref, _launch_slot_attention, _example_of_slot_attention)


def joined(parts: Parts, layout: Layout) -> tuple[mx.array, mx.array]:
    """Keys and values of each row's parts in one buffer, (N, K, S, D) each, written once."""
    num_rows = parts[-1][0].shape[0]
    # A part whose rows have equally many readers is a view with an axis for each such part, so nothing of it is copied
    # before its place in the buffer is written.
    counts = [keys.shape[0] for (keys, _), group in zip(parts, layout.groups, strict=True) if group.rows is None]
    counts = sorted({1, *counts, num_rows})
    dims = [count // fewer for fewer, count in itertools.pairwise(counts)]
    assert math.prod(dims) == num_rows, f"{counts} rows of parts do not divide each other"

    def spread(part: mx.array, rows: mx.array | None) -> mx.array:
        part = part if rows is None else part[rows]
        held = [dim if count <= part.shape[0] else 1 for dim, count in zip(dims, counts[1:], strict=True)]
        return mx.broadcast_to(part.reshape(*held, *part.shape[1:]), (*dims, *part.shape[1:]))

    def join(arrays: list[mx.array]) -> mx.array:
        views = [spread(array, group.rows) for array, group in zip(arrays, layout.groups, strict=True)]
        whole = mx.concatenate(views, axis=-2)
        return whole.reshape(num_rows, *whole.shape[-3:])

    return join([keys for keys, _ in parts]), join([values for _, values in parts])


def tree_attention(queries: mx.array, parts: Parts, layout: Layout) -> mx.array:
    """
    `tree_attention_ref`, which has a kernel for the case that a rollout decodes in.

    On a GPU more queries than a few take MLX's own kernel, on parts joined into one buffer. It reads 16 bits and keeps
    its scores to itself; the expression writes float32 scores to memory, and float32 copies of all keys and values.
    Under a gradient no ancestor may be padded: MLX has no kernel for the gradient with an array as the mask.
    """
    own, length, size = layout.groups[-1], queries.shape[2], queries.shape[3]
    is_slots = len(parts) == 2 and length == 1 and own.members is None and not isinstance(own.mask, str)
    if is_slots and size <= 256:
        return slot_attention(queries, parts, layout)
    if not is_fused(size) or length <= FEW_QUERIES or own.mask != "causal":
        return tree_attention_ref(queries, parts, layout)
    return attention(queries, *joined(parts, layout), "causal" if layout.whole is None else layout.whole)
