"""
What a layer computes between its matmuls, each expression beside the kernel that equals it.

Each comes in this order: the expression, which defines what is computed; the kernel's source; the call that gives it a
grid; and the `gpu.Op` that chooses between the two, with an example on which they must agree.
What is left out: the matmuls, which are MLX's, and the layer that joins all of it, which is in gwen.py.

Axes: N rows, L positions, M = N * L, C hidden, H query heads, K kv heads, D head dim, F mlp width, R rank, S keys.
"""

import functools
import itertools
import math
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

import gpu
from kv_cache import Group, Layout, Parts, make_group


def swiglu_ref(gate_up: mx.array) -> mx.array:
    """silu(gate) * up of the fused projection, (..., 2F) -> (..., F). Source: arXiv:2002.05202."""
    gate, up = mx.split(gate_up, 2, axis=-1)
    if gpu.on_gpu():
        return gate * mx.sigmoid(gate) * up
    # Three times as fast as mx.sigmoid. Below -40 silu is 0 to 1e-13, but exp would overflow at 89 and the gradient
    # would be inf * 0; in 16 bits the power of two would be off by 2%.
    wide = gate.astype(mx.float32)
    return (wide / (1 + gpu.exp(-mx.maximum(wide, -40)))).astype(up.dtype) * up


def swiglu_vjp_ref(gate_up: mx.array, cotangent: mx.array) -> mx.array:
    """The gradient of `swiglu`, (..., 2F)."""
    return mx.vjp(swiglu_ref, [gate_up], [cotangent])[1][0]


SWIGLU = gpu.Kernel(
    "swiglu",
    ["gate_up"],
    ["out"],
    """
    // A thread makes one element.
    uint at = thread_position_in_grid.x;
    if (at >= uint(gate_up_shape[0]) * F) return;
    uint row = at / F, column = at % F;
    float gate = float(gate_up[size_t(row) * 2 * F + column]);
    float up = float(gate_up[size_t(row) * 2 * F + F + column]);
    out[at] = static_cast<T>(gate / (1.0f + metal::exp(-gate)) * up);
""",
)
SWIGLU_VJP = gpu.Kernel(
    "swiglu_vjp",
    ["gate_up", "cotangent"],
    ["d_gate_up"],
    """
    // A thread makes the gradients of the two elements behind one element of the result.
    uint at = thread_position_in_grid.x;
    if (at >= uint(gate_up_shape[0]) * F) return;
    uint row = at / F, column = at % F;
    size_t low = size_t(row) * 2 * F + column, high = low + F;
    float gate = float(gate_up[low]), up = float(gate_up[high]), d = float(cotangent[at]);
    float open = 1.0f / (1.0f + metal::exp(-gate));
    d_gate_up[low] = static_cast<T>(d * up * open * (1.0f + gate * (1.0f - open)));
    d_gate_up[high] = static_cast<T>(d * gate * open);
""",
)


def _launch_swiglu(gate_up: mx.array) -> mx.array:
    """Reads 2F elements a row and writes F, the least there is."""
    width, dtype = gate_up.shape[-1] // 2, gate_up.dtype
    inputs, outputs = [gate_up.reshape(-1, 2 * width)], [((*gate_up.shape[:-1], width), dtype)]
    return SWIGLU(inputs, outputs, grid=(gate_up.size // 2, 1, 1), threadgroup=(256, 1, 1), T=dtype, F=width)[0]


def _launch_swiglu_vjp(gate_up: mx.array, cotangent: mx.array) -> mx.array:
    """Reads 3F elements a row and writes 2F, the least there is."""
    width, dtype = gate_up.shape[-1] // 2, gate_up.dtype
    inputs, outputs = [gate_up.reshape(-1, 2 * width), cotangent], [(gate_up.shape, dtype)]
    return SWIGLU_VJP(inputs, outputs, grid=(cotangent.size, 1, 1), threadgroup=(256, 1, 1), T=dtype, F=width)[0]


def _example_of_swiglu(dtype: mx.Dtype, large: bool) -> list[tuple[mx.array]]:
    return [(gpu.normal(*((64, 6144) if large else (3, 10)), dtype=dtype, scale=3),)]


def _example_of_swiglu_vjp(dtype: mx.Dtype, large: bool) -> list[tuple[mx.array, mx.array]]:
    rows, width = (2048, 3072) if large else (3, 5)
    return [(gpu.normal(rows, 2 * width, dtype=dtype, scale=3), gpu.normal(rows, width, dtype=dtype, seed=1))]


swiglu_vjp = gpu.Op(swiglu_vjp_ref, _launch_swiglu_vjp, _example_of_swiglu_vjp)
swiglu = gpu.Op(swiglu_ref, _launch_swiglu, _example_of_swiglu, lambda d, _, gate_up: [swiglu_vjp(gate_up, d[0])])


def tall_product_ref(thin: mx.array, wide: mx.array) -> mx.array:
    """thin.T @ wide in float32, (M, R) x (M, W) -> (R, W): the gradient of an adapter's matrix, of 16-bit factors."""
    return thin.astype(mx.float32).T @ wide.astype(mx.float32)


ROWS_OF_A_PART = 512  # of `tall_product`: by fewer rows there are more partial sums to write and read

TALL_PRODUCT = gpu.Kernel(
    "tall_product",
    ["thin", "wide"],
    ["sums"],
    """
    // One threadgroup of 8 simdgroups for 32 columns of `wide`, 16 of `thin` and ROWS rows, of which a simdgroup takes
    // every 8th; a lane holds the 16 sums of its column.
    threadgroup float parts[8 * 32];
    uint lane = thread_index_in_simdgroup, simd = simdgroup_index_in_threadgroup;
    uint part = threadgroup_position_in_grid.y;
    uint column = (threadgroup_position_in_grid.x / BLOCKS) * 32 + lane;
    uint first = (threadgroup_position_in_grid.x % BLOCKS) * 16;
    uint num_rows = thin_shape[0], width = wide_shape[1];
    uint end = part * ROWS + ROWS < num_rows ? part * ROWS + ROWS : num_rows;
    bool inside = column < width;
    float held[16];
    #pragma unroll
    for (uint i = 0; i < 16; i++) held[i] = 0.0f;
    for (uint row = part * ROWS + simd; row < end; row += 8) {
        float x = inside ? float(wide[size_t(row) * width + column]) : 0.0f;
        auto factors = thin + size_t(row) * R + first;
        #pragma unroll
        for (uint i = 0; i < 16; i++) {
            if (R % 16 == 0 || first + i < R) held[i] += float(factors[i]) * x;
        }
    }
    #pragma unroll
    for (uint i = 0; i < 16; i++) {
        parts[simd * 32 + lane] = held[i];
        threadgroup_barrier(mem_flags::mem_threadgroup);
        if (simd == i % 8 && inside && first + i < R) {
            float sum = 0.0f;
            for (uint other = 0; other < 8; other++) sum += parts[other * 32 + lane];
            sums[(size_t(part) * R + first + i) * width + column] = sum;
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
    }
""",
)


def _launch_tall_product(thin: mx.array, wide: mx.array) -> mx.array:
    """
    Reads `wide` once for each 16 columns of `thin`, and writes R W float32 for each 512 rows, which a sum joins: for
    2,048 rows of rank 16 an eighth of what `wide` has. MLX's matmul would round the sum to 16 bits.
    """
    (num_rows, rank), width = thin.shape, wide.shape[1]
    num_parts, num_blocks = -(-num_rows // ROWS_OF_A_PART), -(-rank // 16)
    (sums,) = TALL_PRODUCT(
        [thin, wide],
        [((num_parts, rank, width), mx.float32)],
        grid=(-(-width // 32) * num_blocks * 256, num_parts, 1),
        threadgroup=(256, 1, 1),
        R=rank,
        BLOCKS=num_blocks,
        ROWS=ROWS_OF_A_PART,
    )
    return sums.sum(0) if num_parts > 1 else sums[0]


def _example_of_tall_product(dtype: mx.Dtype, large: bool) -> list[tuple[mx.array, mx.array]]:
    rows, rank, width = (2048, 16, 3072) if large else (ROWS_OF_A_PART + 5, 4, 33)
    return [(gpu.normal(rows, rank, dtype=dtype, scale=0.1), gpu.normal(rows, width, dtype=dtype, seed=1))]


tall_product = gpu.Op(tall_product_ref, _launch_tall_product, _example_of_tall_product)


def rms_norm(x: mx.array, weight: mx.array | None, eps: float) -> mx.array:
    """x / sqrt(mean(x**2) + eps) * weight over the last axis, in float32 inside. Source: arXiv:1910.07467."""
    if gpu.on_gpu():
        return mx.fast.rms_norm(x, weight, eps)
    wide = x.astype(mx.float32)  # MLX's own expression for a CPU has twice the operations
    out = (wide * mx.rsqrt((wide * wide).sum(-1, keepdims=True) * (1 / x.shape[-1]) + eps)).astype(x.dtype)
    return out if weight is None else out * weight


def add_norm_ref(x: mx.array, delta: mx.array, weight: mx.array, eps: float) -> tuple[mx.array, mx.array]:
    """The residual stream after a sublayer and what the next one reads: x + delta, and its RMS-norm; all (..., C)."""
    total = x + delta
    return total, rms_norm(total, weight, eps)


ADD_NORM = gpu.Kernel(
    "add_norm",
    ["x", "delta", "weight", "eps"],
    ["total", "normed"],
    """
    // One threadgroup of 256 a row; a thread holds every 256th element.
    constexpr int HELD = (C + 255) / 256;
    threadgroup float squares[8];
    uint thread_index = thread_index_in_threadgroup;
    size_t begin = size_t(threadgroup_position_in_grid.x) * C;
    float held[HELD];
    float square = 0.0f;
    #pragma unroll
    for (int i = 0; i < HELD; i++) {
        uint column = thread_index + i * 256;
        held[i] = 0.0f;
        if (column < C) {
            T sum = static_cast<T>(float(x[begin + column]) + float(delta[begin + column]));
            total[begin + column] = sum;
            held[i] = float(sum);  // what the next layer adds to is what is normalized
        }
        square += held[i] * held[i];
    }
    square = simd_sum(square);
    if (thread_index_in_simdgroup == 0) squares[simdgroup_index_in_threadgroup] = square;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    square = 0.0f;
    for (int i = 0; i < 8; i++) square += squares[i];
    float scale = metal::rsqrt(square / float(C) + eps[0]);
    #pragma unroll
    for (int i = 0; i < HELD; i++) {
        uint column = thread_index + i * 256;
        if (column < C) normed[begin + column] = static_cast<T>(held[i] * scale * float(weight[column]));
    }
""",
)


def _launch_add_norm(x: mx.array, delta: mx.array, weight: mx.array, eps: float) -> tuple[mx.array, mx.array]:
    """Reads 2C elements a row and writes 2C in one launch; the expression, in two, reads 3C and writes 2C."""
    size, dtype = x.shape[-1], x.dtype
    total, normed = ADD_NORM(
        [x, delta, weight, gpu.constant(eps)],
        [(x.shape, dtype)] * 2,
        grid=(x.size // size * 256, 1, 1),
        threadgroup=(256, 1, 1),
        T=dtype,
        C=size,
    )
    return total, normed


def _gradient_of_add_norm(
    cotangents: list[mx.array], results: list[mx.array], x: mx.array, delta: mx.array, weight: mx.array, eps: float
) -> list[mx.array]:
    """From the sum that is held, which the expression's own gradient would make again."""
    _, (d_x, d_weight) = mx.vjp(lambda x, w: rms_norm(x, w, eps), [results[0], weight], [cotangents[1]])
    d_x = d_x + cotangents[0]
    return [d_x, d_x, d_weight]


def _example_of_add_norm(dtype: mx.Dtype, large: bool) -> list[tuple[Any, ...]]:
    shape = (64, 1024) if large else (3, 260)
    x, delta = (gpu.normal(*shape, dtype=dtype, seed=seed) for seed in (0, 1))
    return [(x, delta, gpu.normal(shape[1], dtype=dtype), 1e-6)]


add_norm = gpu.Op(add_norm_ref, _launch_add_norm, _example_of_add_norm, _gradient_of_add_norm)


class Rope:
    """
    Rotary positions of one model: plain, or YaRN when its configuration has a `scaling`.

    Source: RoFormer, arXiv:2104.09864; YaRN, arXiv:2309.00071, section 3.2 and 3.4.
    """

    def __init__(self, head_dim: int, theta: float, scaling: dict[str, float] | None = None):
        self.head_dim, self.magnitude = head_dim, 1.0
        self.frequencies = theta ** (-np.arange(0, head_dim, 2) / head_dim)  # (D / 2,) float64
        if scaling is not None:
            self._make_yarn(theta, scaling)
        self.periods = mx.array((1 / self.frequencies).astype(np.float32))

    def _make_yarn(self, theta: float, scaling: dict[str, float]) -> None:
        factor, trained, dims = scaling["factor"], scaling["original_max_position_embeddings"], self.head_dim

        def dim_of(num_rotations: float) -> float:  # the pair that turns that often over the trained context
            return dims * math.log(trained / (num_rotations * 2 * math.pi)) / (2 * math.log(theta))

        low = max(math.floor(dim_of(scaling["beta_fast"])), 0)
        high = min(math.ceil(dim_of(scaling["beta_slow"])), dims - 1)
        stretched = np.clip((np.arange(dims // 2) - low) / ((high - low) or 1e-3), 0, 1)  # 0: keep, 1: interpolate
        self.frequencies = self.frequencies * (1 - stretched) + self.frequencies / factor * stretched
        self.magnitude = 0.1 * math.log(factor) + 1 if factor > 1 else 1.0

    def at(self, offsets: mx.array, length: int) -> "Rotation":
        """The rotation of `length` tokens a row that begin at `offsets`, (N,) int32."""
        if gpu.on_gpu():
            return Rotation(self, offsets, None, None)
        positions = (offsets[:, None] + mx.arange(length)).astype(mx.float32)
        angles = (positions[:, :, None] / self.periods)[:, :, None]  # (N, L, 1, D / 2)
        cos, sin = mx.cos(angles) * self.magnitude, mx.sin(angles) * self.magnitude
        return Rotation(self, offsets, mx.concatenate([cos, cos], axis=-1), mx.concatenate([-sin, sin], axis=-1))


class Rotation(NamedTuple):
    """Where the tokens of a forward pass stand; made once, by `Rope.at`, and used by every layer."""

    rope: Rope
    offsets: mx.array  # (N,) int32 position of each row's first token; negative ones are padding
    cos: mx.array | None  # (N, L, 1, D) float32, and None on a GPU, where a kernel makes them
    sin: mx.array | None  # with the sign that its half of D takes

    def turn(self, x: mx.array) -> mx.array:
        """Rotates (N, L, heads, D): pairs are i and i + D / 2."""
        if self.cos is None or self.sin is None:
            x = x if self.rope.magnitude == 1.0 else x * self.rope.magnitude
            rotated = mx.fast.rope(
                x.transpose(0, 2, 1, 3),
                self.rope.head_dim,
                traditional=False,
                base=None,
                scale=1.0,
                offset=self.offsets,
                freqs=self.rope.periods,
            )
            return rotated.transpose(0, 2, 1, 3)
        low, high = mx.split(x, 2, axis=-1)
        return (x * self.cos + mx.concatenate([high, low], axis=-1) * self.sin).astype(x.dtype)


class Heads(NamedTuple):
    """How the heads of a layer's fused projection become queries and keys."""

    num_heads: int  # those of queries; as many as remain are of keys and of values
    weights: tuple[mx.array, mx.array] | None  # (D,) of the norms of queries and keys, where the family has them
    eps: float
    rotation: Rotation


def norm_rope_ref(qkv: mx.array, heads: Heads) -> tuple[mx.array, mx.array, mx.array]:
    """
    Queries, keys and values of the fused projection (N, L, H + 2K, D), as (N, H, L, D), (N, K, L, D), (N, K, L, D).

    Queries and keys are rotated and, where the family has `weights` for them, RMS-normalized over D before.
    """
    num_heads, num_kv_heads = heads.num_heads, (qkv.shape[2] - heads.num_heads) // 2
    turned, values = mx.split(qkv, [num_heads + num_kv_heads], axis=2)
    if heads.weights is not None:
        counts, size = (num_heads, num_kv_heads), qkv.shape[-1]
        weight = mx.concatenate([mx.broadcast_to(w, (n, size)) for w, n in zip(heads.weights, counts, strict=True)])
        turned = rms_norm(turned, None, heads.eps) * weight
    queries, keys = mx.split(heads.rotation.turn(turned), [num_heads], axis=2)
    return queries.transpose(0, 2, 1, 3), keys.transpose(0, 2, 1, 3), values.transpose(0, 2, 1, 3)


NORM_ROPE = gpu.Kernel(
    "norm_rope",
    ["qkv", "query_weight", "key_weight", "eps", "periods", "magnitude", "offsets"],
    ["queries", "keys"],
    """
    // One simdgroup a head and token; a lane holds every 32nd pair (i, i + D / 2) of the head.
    constexpr int HALF = D / 2;
    constexpr int HELD = (HALF + 31) / 32;
    uint lane = thread_index_in_simdgroup;
    uint head = thread_position_in_grid.y, token = threadgroup_position_in_grid.x;  // token = row * L + position
    if (head >= H + K) return;
    uint length = qkv_shape[1];
    uint row = token / length, position = token % length;
    size_t begin = (size_t(token) * (H + 2 * K) + head) * D;
    float low[HELD], high[HELD];
    float square = 0.0f;
    #pragma unroll
    for (int i = 0; i < HELD; i++) {
        uint pair = lane + i * 32;
        low[i] = pair < HALF ? float(qkv[begin + pair]) : 0.0f;
        high[i] = pair < HALF ? float(qkv[begin + pair + HALF]) : 0.0f;
        square += low[i] * low[i] + high[i] * high[i];
    }
    square = simd_sum(square);
    float scale = magnitude[0] * (NORMED ? metal::rsqrt(square / float(D) + eps[0]) : 1.0f);
    device T* out = head < H ? queries + ((size_t(row) * H + head) * length + position) * D
                             : keys + ((size_t(row) * K + head - H) * length + position) * D;
    float place = float(int(offsets[row]) + int(position));
    #pragma unroll
    for (int i = 0; i < HELD; i++) {
        uint pair = lane + i * 32;
        if (pair >= HALF) continue;
        float x = low[i] * scale, y = high[i] * scale;
        if (NORMED) {
            x *= head < H ? float(query_weight[pair]) : float(key_weight[pair]);
            y *= head < H ? float(query_weight[pair + HALF]) : float(key_weight[pair + HALF]);
        }
        float angle = place / periods[pair];
        float c = metal::cos(angle), s = metal::sin(angle);
        out[pair] = static_cast<T>(x * c - y * s);
        out[pair + HALF] = static_cast<T>(y * c + x * s);
    }
""",
)


def _launch_norm_rope(qkv: mx.array, heads: Heads) -> tuple[mx.array, mx.array, mx.array]:
    """
    Reads (H + K) D elements a token and writes as many, the least there is, in one launch for four and two copies:
    MLX's norm copies a part of the fused projection first. Values are a view. A kernel of MLX writes to arrays of its
    own only, so the cache takes the keys in by a launch of its own.
    """
    num_rows, length, all_heads, size = qkv.shape
    num_heads, weights, eps, rotation = heads
    num_kv_heads, dtype = (all_heads - num_heads) // 2, qkv.dtype
    num_turned = num_heads + num_kv_heads
    scalars = gpu.constant(eps), gpu.constant(rotation.rope.magnitude)
    queries, keys = NORM_ROPE(
        [qkv, *(weights or scalars), scalars[0], rotation.rope.periods, scalars[1], rotation.offsets],
        [((num_rows, count, length, size), dtype) for count in (num_heads, num_kv_heads)],
        grid=(num_rows * length * 32, -(-num_turned // 8) * 8, 1),
        threadgroup=(32, 8, 1),
        T=dtype,
        H=num_heads,
        K=num_kv_heads,
        D=size,
        NORMED=weights is not None,
    )
    return queries, keys, qkv[:, :, num_turned:].transpose(0, 2, 1, 3)


def _example_of_norm_rope(dtype: mx.Dtype, large: bool) -> list[tuple[Any, ...]]:
    rows, length, num_heads, num_kv_heads, size = (64, 1, 16, 8, 128) if large else (2, 3, 3, 1, 80)
    qkv = gpu.normal(rows, length, num_heads + 2 * num_kv_heads, size, dtype=dtype)
    weights = gpu.normal(size, dtype=dtype), gpu.normal(size, dtype=dtype, seed=1)
    rotation = Rope(size, 1e6).at(40 * mx.arange(rows) - 1, length)
    kinds = [weights] if large else [weights, None]  # None: another kernel, that of Qwen2.5
    return [(qkv, Heads(num_heads, kind, 1e-6, rotation)) for kind in kinds]


norm_rope = gpu.Op(norm_rope_ref, _launch_norm_rope, _example_of_norm_rope)


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
