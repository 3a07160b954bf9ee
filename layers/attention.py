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

from kv_cache import Group, Layout, Parts, make_group
from machine import gpu


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


def _slots(dtype: mx.Dtype, sizes: tuple[int, int, int, int, int, int, int]) -> tuple[mx.array, Parts, Layout]:
    """A call of so many prompts, slots, heads, kv heads, dims, columns of a prompt, and of a slot."""
    prompts, rows, heads, kv_heads, size, length, width = sizes
    queries = gpu.normal(rows, heads, 1, size, dtype=dtype)
    buffers = gpu.normal(2, prompts, kv_heads, 2 * length, size, dtype=dtype, seed=1)
    keys, values = buffers[:, :, :, :length]  # views, as in a cache
    own_keys, own_values = gpu.normal(2, rows, kv_heads, width, size, dtype=dtype, seed=2)
    group = make_group([row * prompts // rows for row in range(rows)], prompts, None)
    return queries, [(keys, values), (own_keys, own_values)], Layout([group, Group(None, None, None)])


def _example_of_slot_attention(dtype: mx.Dtype, large: bool) -> list[tuple[Any, ...]]:
    if large:
        return [_slots(dtype, (8, 64, 16, 8, 128, 512, 64))]
    queries, parts, layout = _slots(dtype, (2, 3, 4, 2, 64, 9, 5))
    seen = [mx.broadcast_to(mx.arange(k.shape[2]) > 1, (k.shape[0], 1, 1, k.shape[2])) for k, _ in parts]
    masked = [group._replace(mask=mask) for group, mask in zip(layout.groups, seen, strict=True)]
    alone = [make_group([0, 1], 2, None), layout.groups[1]]  # a slot a prompt: another kernel, as with masks
    return [
        (queries, parts, layout),
        (queries, parts, Layout(masked)),
        (queries[:2], [(keys[:2], values[:2]) for keys, values in parts], Layout(alone)),
    ]


slot_attention = gpu.Op(tree_attention_ref, _launch_slot_attention, _example_of_slot_attention)


GROUP_ATTENTION = gpu.Kernel(
    "group_attention",
    ["queries", "keys", "values", "members", "places", "mask", "columns"],
    ["found", "peaks", "sums"],
    """
    // One threadgroup of 8 simdgroups for BLOCK of the queries that read a row's kv head, and a piece of its columns,
    // of which a simdgroup takes 32 at a time. Scores: 8 lanes a column, each with EACH dims of its key, by fours;
    // queries lie in threadgroup memory. Results: column after column, of which a lane takes OWN dims for all queries.
    constexpr int EACH = (D + 31) / 32 * 4, OWN = (D + 31) / 32, WIDE = 8 * EACH, ROW = 36;  // 4 more: no bank twice
    constexpr int FEW = 8 / BLOCK, MANY = 32 / BLOCK;  // lanes that hold the score of a query, and its weights
    constexpr bool EXACT = D % 32 == 0;
    constexpr int SPACE = 8 * ROW;
    constexpr float LOW = -1e30f;  // finite: nothing less nothing must be nothing
    threadgroup float4 scaled[BLOCK * WIDE / 4];
    threadgroup float4 quads[8 * SPACE / 4];  // of each simdgroup: its scores, then weights, at last a query's results
    threadgroup float tops[8 * BLOCK];
    threadgroup float totals[8 * BLOCK];
    threadgroup float* parts = (threadgroup float*)quads + simdgroup_index_in_threadgroup * SPACE;
    int head = threadgroup_position_in_grid.y, num_heads = keys_shape[1], thread_index = thread_index_in_threadgroup;
    int simd = simdgroup_index_in_threadgroup, lane = thread_index_in_simdgroup;
    int group = FULL ? queries_shape[0] / keys_shape[0] : members_shape[1];
    int num_blocks = (group * Q + BLOCK - 1) / BLOCK;
    int row = int(threadgroup_position_in_grid.z) / num_blocks;
    int first = int(threadgroup_position_in_grid.z) % num_blocks * BLOCK;  // query of the row's
    int begin = int(threadgroup_position_in_grid.x) * int(columns[0]);
    int end = metal::min(begin + int(columns[0]), int(keys_shape[2]));

    bool is_read = false;
    for (int at = first / Q; at <= (first + BLOCK - 1) / Q && at < group; at++) {
        is_read |= FULL || int(places[int(members[row * group + at])]) == row * group + at;
    }
    for (int at = thread_index; at < BLOCK * WIDE; at += 256) {
        int query = first + at / WIDE, dim = at % WIDE;
        float x = 0.0f;
        if (query < group * Q && dim < D) {
            int entry = row * group + query / Q;
            int slot = FULL ? entry : int(members[entry]);
            x = float(queries[slot * queries_strides[0] + (head * Q + query % Q) * queries_strides[1] + dim]);
        }
        ((threadgroup float*)scaled)[at] = x * (metal::rsqrt(float(D)) * 1.44269504f);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);

    int column = lane / 8, key_dim = lane % 8 * 4, query = lane / MANY;
    int score_row = lane % FEW * BLOCK + lane % 8 / FEW;  // where several lanes have the same score, each has a row
    float result[BLOCK * OWN], peak = LOW, sum = 0.0f;
    #pragma unroll
    for (int i = 0; i < BLOCK * OWN; i++) result[i] = 0.0f;
    int key_dims[EACH], dims[OWN];  // past the last dim that one is read, which counts for nothing
    #pragma unroll
    for (int i = 0; i < EACH; i++) {
        int dim = key_dim + i / 4 * 32 + i % 4;
        key_dims[i] = EXACT ? dim - key_dim : dim < D ? dim : D - 1;
    }
    #pragma unroll
    for (int i = 0; i < OWN; i++) dims[i] = EXACT ? i : lane * OWN + i < D ? lane * OWN + i : D - 1;
    auto key_row = keys + row * keys_strides[0] + head * keys_strides[1] + (EXACT ? key_dim : 0);
    auto value_row = values + row * values_strides[0] + head * values_strides[1] + (EXACT ? lane * OWN : 0);
    for (int from = is_read ? begin + simd * 32 : end; from < end; from += 256) {
        #pragma unroll 1
        for (int at = 0; at < 32; at += 8) {
            simdgroup_barrier(mem_flags::mem_threadgroup);  // and so all queries are not held in registers at once
            float held[2 * EACH], score[2 * BLOCK];
            #pragma unroll
            for (int turn = 0; turn < 2; turn++) {
                auto key = key_row + metal::min(from + at + turn * 4 + column, end - 1) * keys_strides[2];
                #pragma unroll
                for (int i = 0; i < EACH; i++) held[turn * EACH + i] = float(key[key_dims[i]]);
            }
            #pragma unroll
            for (int q = 0; q < BLOCK; q++) {
                score[q] = score[BLOCK + q] = 0.0f;
                #pragma unroll
                for (int i = 0; i < EACH; i += 4) {
                    float4 x = scaled[q * (WIDE / 4) + lane % 8 + i * 2];
                    #pragma unroll
                    for (int turn = 0; turn < 2; turn++) {
                        score[turn * BLOCK + q] += x.x * held[turn * EACH + i];
                        score[turn * BLOCK + q] += x.y * held[turn * EACH + i + 1];
                        score[turn * BLOCK + q] += x.z * held[turn * EACH + i + 2];
                        score[turn * BLOCK + q] += x.w * held[turn * EACH + i + 3];
                    }
                }
            }
            #pragma unroll
            for (int turn = 0; turn < 2; turn++) {
                #pragma unroll
                for (int step = 4; step > 0; step /= 2) {  // a lane keeps half of the queries, and adds another's
                    int left = step / FEW;
                    if (left == 0) score[turn * BLOCK] += simd_shuffle_xor(score[turn * BLOCK], step);
                    #pragma unroll
                    for (int q = 0; q < left; q++) {
                        float low = score[turn * BLOCK + q], high = score[turn * BLOCK + q + left];
                        float given = lane & step ? low : high;
                        score[turn * BLOCK + q] = (lane & step ? high : low) + simd_shuffle_xor(given, step);
                    }
                }
                int place = at + turn * 4 + column;
                bool seen = from + place < end;
                if (MASKED) seen &= mask[row * mask_strides[0] + metal::min(from + place, end - 1) * mask_strides[3]];
                parts[score_row * ROW + place] = seen ? score[turn * BLOCK] : LOW;
            }
        }
        simdgroup_barrier(mem_flags::mem_threadgroup);
        float weights[BLOCK], higher = peak;  // of a query and every MANYth column
        #pragma unroll
        for (int i = 0; i < BLOCK; i++) {
            weights[i] = parts[query * ROW + i * MANY + lane % MANY];
            higher = metal::max(higher, weights[i]);
        }
        #pragma unroll
        for (int other = MANY / 2; other > 0; other /= 2) higher = metal::max(higher, simd_shuffle_xor(higher, other));
        float shrink = metal::fast::exp2(peak - higher);
        peak = higher;
        sum *= shrink;
        #pragma unroll
        for (int i = 0; i < BLOCK; i++) {
            weights[i] = metal::fast::exp2(weights[i] - higher);
            sum += weights[i];
            parts[query * ROW + i * MANY + lane % MANY] = weights[i];
        }
        #pragma unroll
        for (int q = 0; q < BLOCK; q++) {
            float other = simd_broadcast(shrink, q * MANY);
            #pragma unroll
            for (int i = 0; i < OWN; i++) result[q * OWN + i] *= other;
        }
        simdgroup_barrier(mem_flags::mem_threadgroup);
        #pragma unroll 1
        for (int quad = 0; quad < 8; quad++) {
            float held[4 * OWN];
            #pragma unroll
            for (int turn = 0; turn < 4; turn++) {
                auto value = value_row + metal::min(from + quad * 4 + turn, end - 1) * values_strides[2];
                #pragma unroll
                for (int i = 0; i < OWN; i++) held[turn * OWN + i] = float(value[dims[i]]);
            }
            #pragma unroll
            for (int q = 0; q < BLOCK; q++) {
                float4 weight = quads[simd * (SPACE / 4) + q * (ROW / 4) + quad];
                #pragma unroll
                for (int i = 0; i < OWN; i++) {
                    result[q * OWN + i] += weight.x * held[i];
                    result[q * OWN + i] += weight.y * held[OWN + i];
                    result[q * OWN + i] += weight.z * held[2 * OWN + i];
                    result[q * OWN + i] += weight.w * held[3 * OWN + i];
                }
            }
        }
    }
    #pragma unroll
    for (int other = MANY / 2; other > 0; other /= 2) sum += simd_shuffle_xor(sum, other);
    if (lane % MANY == 0) {
        tops[simd * BLOCK + query] = peak;
        totals[simd * BLOCK + query] = sum;
    }
    size_t out = (size_t(threadgroup_position_in_grid.x) * keys_shape[0] + row) * group;
    simdgroup_barrier(mem_flags::mem_threadgroup);
    #pragma unroll
    for (int q = 0; q < BLOCK; q++) {
        #pragma unroll
        for (int i = 0; i < OWN; i++) parts[lane * OWN + i] = result[q * OWN + i];
        threadgroup_barrier(mem_flags::mem_threadgroup);
        float highest = LOW, total = 0.0f, mean = 0.0f;
        for (int i = 0; i < 8; i++) highest = metal::max(highest, tops[i * BLOCK + q]);
        for (int i = 0; i < 8; i++) {
            float weight = metal::fast::exp2(tops[i * BLOCK + q] - highest);
            total += totals[i * BLOCK + q] * weight;
            if (thread_index < D) mean += ((threadgroup float*)quads)[i * SPACE + thread_index] * weight;
        }
        size_t at = ((out + (first + q) / Q) * num_heads + head) * Q + (first + q) % Q;
        if (first + q < group * Q) {
            if (thread_index < D) found[at * D + thread_index] = mean;
            if (thread_index == 0) {
                peaks[at] = highest;
                sums[at] = total;
            }
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
    }
""",
    contiguous=False,  # what is handed in are views of buffers with room to grow
)

GROUP_ATTENTION_MERGE = gpu.Kernel(
    "group_attention_merge",
    ["found", "peaks", "sums", "own_found", "own_peaks", "own_sums", "places"],
    ["out"],
    """
    // One thread an element of the result.
    uint dim = thread_position_in_grid.x, head = thread_position_in_grid.y, slot = thread_position_in_grid.z;
    if (dim >= D || head >= uint(own_peaks_shape[2])) return;
    uint heads = own_peaks_shape[2];
    size_t at = size_t(FULL ? slot : uint(places[slot])) * heads + head, own_at = size_t(slot) * heads + head;
    size_t step = size_t(peaks_shape[1]) * heads, own_step = size_t(own_peaks_shape[1]) * heads;
    float highest = -1e30f, total = 0.0f, mean = 0.0f;
    for (uint i = 0; i < uint(peaks_shape[0]); i++) highest = metal::max(highest, peaks[i * step + at]);
    for (uint i = 0; i < uint(own_peaks_shape[0]); i++) highest = metal::max(highest, own_peaks[i * own_step + own_at]);
    for (uint i = 0; i < uint(peaks_shape[0]); i++) {
        float weight = metal::fast::exp2(peaks[i * step + at] - highest);
        total += sums[i * step + at] * weight;
        mean += found[(i * step + at) * D + dim] * weight;
    }
    for (uint i = 0; i < uint(own_peaks_shape[0]); i++) {
        float weight = metal::fast::exp2(own_peaks[i * own_step + own_at] - highest);
        total += own_sums[i * own_step + own_at] * weight;
        mean += own_found[(i * own_step + own_at) * D + dim] * weight;
    }
    out[own_at * D + dim] = static_cast<T>(mean / total);
""",
)


def group_block(num_queries: int) -> int:
    """How many of the queries of a row and kv head a threadgroup of GROUP_ATTENTION takes at once: 2, 4 or 8."""
    return min(max(1 << (num_queries - 1).bit_length(), 2), 8)


def columns_of_a_piece(num_keys: int, num_queries: int, num_others: int) -> int:
    """
    Of GROUP_ATTENTION, for a row's queries of a kv head, and threadgroups that take no other columns; by 256.

    Few enough for 256 threadgroups, and so many that what is written is an eighth of what is read at most.
    """
    return 256 * max(-(-num_queries // 32), num_keys * num_others // 256**2)


def _attend(queries: mx.array, part: tuple[mx.array, mx.array], group: Group) -> list[mx.array]:
    """
    What the queries of each row find in pieces of its columns: weighted values, (pieces, R * G, H, D) float32, the
    largest score and the sum of weights under it, (pieces, R * G, H) float32; weights are powers of two.
    """
    (keys, values), (num_rows, num_heads, _, size) = part, queries.shape
    num_blocks, num_kv_heads, num_keys, _ = keys.shape
    assert not isinstance(group.mask, str), "a slot takes one token a step"
    num_members = num_rows // num_blocks if group.members is None else group.members.shape[1]
    num_queries = num_members * num_heads // num_kv_heads
    num_others = num_kv_heads * num_blocks * -(-num_queries // group_block(num_queries))
    columns = columns_of_a_piece(num_keys, num_queries, num_others)
    nothing = gpu.constant(False).reshape(1, 1, 1, 1)
    shape = (-(-num_keys // columns), num_blocks * num_members, num_heads)
    choices = [nothing if choice is None else choice for choice in (group.members, group.places, group.mask)]
    return GROUP_ATTENTION(
        [queries, keys, values, *choices, gpu.constant(columns)],
        [((*shape, size), mx.float32), (shape, mx.float32), (shape, mx.float32)],
        grid=(shape[0] * 256, num_kv_heads, num_others // num_kv_heads),
        threadgroup=(256, 1, 1),
        T=queries.dtype,
        D=size,
        Q=num_heads // num_kv_heads,
        BLOCK=group_block(num_queries),
        FULL=group.members is None,
        MASKED=group.mask is not None,
    )


def _launch_group_attention(queries: mx.array, parts: Parts, layout: Layout) -> mx.array:
    """
    As `slot_attention`, in three launches: one a part, and one that joins what was found. A prompt is read by all
    queries of its group at once, eight to a threadgroup, and its columns are spread over threadgroups. What is found in
    between is written and read once, in float32.
    """
    prompt, own = (_attend(queries, part, group) for part, group in zip(parts, layout.groups, strict=True))
    (num_rows, num_heads, _, size), places = queries.shape, layout.groups[0].places
    width = -(-size // 32) * 32
    return GROUP_ATTENTION_MERGE(
        [*prompt, *own, gpu.constant(False) if places is None else places],
        [(queries.shape, queries.dtype)],
        grid=(width, num_heads, num_rows),
        threadgroup=(width, 1, 1),
        T=queries.dtype,
        D=size,
        FULL=places is None,
    )[0]


def _example_of_group_attention(dtype: mx.Dtype, large: bool) -> list[tuple[Any, ...]]:
    if large:
        return [_slots(dtype, (8, 64, 16, 8, 128, 1024, 64))]
    # More columns than one threadgroup takes at once; fewer queries than it holds, some members of no group, and masks.
    return [_slots(dtype, (1, 5, 7, 1, 64, 300, 5)), _example_of_slot_attention(dtype, False)[1]]


group_attention = gpu.Op(tree_attention_ref, _launch_group_attention, _example_of_group_attention)


def group_pays(queries: mx.array, parts: Parts) -> bool:
    """
    Whether to take `group_attention` and not `slot_attention`: bench/ledger.py says so, and few threadgroups do.

    The latter computes a query's share of a column in a tenth of the time that the column takes from memory (M1 to M5,
    16 bits), so more than ten queries a column keep memory waiting. Fewer threadgroups than 32 leave cores idle: MLX's
    own kernel spreads 1,024 columns over threadgroups where a GPU has 40 cores or more, 4,096 elsewhere
    (`sdpa_vector_2pass` in its scaled_dot_product_attention.cpp). Shorter prompts are not worth two more launches.
    """
    (num_rows, num_heads, *_), (num_prompts, num_kv_heads, length, _) = queries.shape, parts[0][0].shape
    width = parts[1][0].shape[2]
    num_columns = num_prompts * length + num_rows * width
    is_bound = num_rows * (length + width) * (num_heads // num_kv_heads) > 10 * num_columns
    long = length + width >= 1024
    return long and (is_bound or num_rows * num_kv_heads < 32) and group_attention.runs(queries.dtype)


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
        return (group_attention if group_pays(queries, parts) else slot_attention)(queries, parts, layout)
    if not is_fused(size) or length <= FEW_QUERIES or own.mask != "causal":
        return tree_attention_ref(queries, parts, layout)
    return attention(queries, *joined(parts, layout), "causal" if layout.whole is None else layout.whole)
