"""
What a layer computes between its matmuls, each expression beside the kernel that equals it.

Each comes in this order: the expression, which defines what is computed; the kernel's source; the call that gives it a
grid; and the `gpu.Op` that chooses between the two, with an example on which they must agree.
What is left out: the matmuls, which are MLX's, attention, which is in attention.py, and the layer that joins all of it,
which is in gwen.py.

Axes: N rows, L positions, M = N * L, C hidden, H query heads, K kv heads, D head dim, F mlp width, R rank.
"""

import math
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from machine import gpu


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
