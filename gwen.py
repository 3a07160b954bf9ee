"""
Qwen2, Qwen2.5 and Qwen3 dense models on MLX: blocks, log-probabilities, load from and save to Hugging Face's layout.

The three query, key and value projections are one matmul (`qkv_proj`), gate and up are one (`gate_up_proj`). Every
expression that a custom kernel may replace is a function of its own (`norm_rope`, `attention`, `swiglu`,
`token_logprobs`), whose plain form is the definition of what it computes. What is left out: quantization, mixture of
experts, sliding windows; a checkpoint that needs them is refused by name.

Axes: N rows, L positions, C hidden, H query heads, K kv heads, D head dim, F mlp width, V vocabulary.
"""

import dataclasses
import functools
import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import cpu_blas
import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

import gpu
import hub
import memory
import telemetry
from kv_cache import Group, KVCache, LayerCache, Layout, Parts, SlotCache, SlotLayer, TreeCache, TreeLayer, make_group

DTYPES = {"float16": mx.float16, "bfloat16": mx.bfloat16, "float32": mx.float32}


def on_gpu() -> bool:
    """Whether MLX computes on a GPU (Metal or CUDA)."""
    return mx.default_device().type == mx.gpu


def default_dtype() -> mx.Dtype:
    """
    `GWEN_DTYPE`, else float16 on a GPU and float32 on a CPU (where 16-bit matmuls do not use BLAS).

    Raises ValueError when the variable names another type.
    """
    name = os.environ.get("GWEN_DTYPE", "float16" if on_gpu() else "float32")
    if name not in DTYPES:
        raise ValueError(f"GWEN_DTYPE={name!r} is not one of {', '.join(DTYPES)}")
    return DTYPES[name]


# ---- expressions, and the kernels that equal them
#
# Each comes in this order: the expression, which defines what is computed; the kernel's body; the call that gives it a
# grid, with its gradient; an example, on which the kernel must agree before it is used; and the choice between the two.


def exp(x: mx.array) -> mx.array:
    """e**x of float32. On a CPU as a power of two, which MLX computes 2.8 times faster, within 1e-6 for |x| < 8."""
    return mx.exp(x) if on_gpu() else mx.power(2.0, x * (1 / math.log(2)))


def normal(*shape: int, dtype: mx.Dtype, seed: int = 0, scale: float = 1.0) -> mx.array:
    """An array for an example, the same every time."""
    return (mx.random.normal(shape, key=mx.random.key(seed)) * scale).astype(dtype)


@functools.lru_cache(maxsize=None, typed=True)  # typed: 0.0 and False are equal
def constant(value: float | bool) -> mx.array:
    """A number for a kernel, which takes arrays only; of the models' settings, so few are ever made."""
    return mx.array([value])


def swiglu_ref(gate_up: mx.array) -> mx.array:
    """The definition of `swiglu`."""
    gate, up = mx.split(gate_up, 2, axis=-1)
    if on_gpu():
        return gate * mx.sigmoid(gate) * up
    # Three times as fast as mx.sigmoid. Below -40 silu is 0 to 1e-13, but exp would overflow at 89 and the gradient
    # would be inf * 0; in 16 bits the power of two would be off by 2%.
    wide = gate.astype(mx.float32)
    return (wide / (1 + exp(-mx.maximum(wide, -40)))).astype(up.dtype) * up


def swiglu_vjp_ref(gate_up: mx.array, cotangent: mx.array) -> mx.array:
    """The gradient of `swiglu_ref`."""
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


def swiglu_vjp_kernel(gate_up: mx.array, cotangent: mx.array) -> mx.array:
    width, dtype = gate_up.shape[-1] // 2, gate_up.dtype
    inputs, grid = [gate_up.reshape(-1, 2 * width), cotangent], (cotangent.size, 1, 1)
    return SWIGLU_VJP(inputs, [(gate_up.shape, dtype)], grid=grid, threadgroup=(256, 1, 1), T=dtype, F=width)[0]


def swiglu_kernel(gate_up: mx.array) -> mx.array:
    width, dtype = gate_up.shape[-1] // 2, gate_up.dtype
    shape, grid = (*gate_up.shape[:-1], width), (gate_up.size // 2, 1, 1)

    @mx.custom_function
    def forward(gate_up: mx.array) -> mx.array:
        rows = gate_up.reshape(-1, 2 * width)
        return SWIGLU([rows], [(shape, dtype)], grid=grid, threadgroup=(256, 1, 1), T=dtype, F=width)[0]

    @forward.vjp
    def backward(gate_up: mx.array, cotangent: mx.array, _: mx.array) -> mx.array:
        return (swiglu_vjp_kernel if SWIGLU_VJP.runs(dtype) else swiglu_vjp_ref)(gate_up, cotangent)

    out: Any = forward(gate_up)
    return out


@SWIGLU.has_example
def _(dtype: mx.Dtype, large: bool) -> gpu.Example:
    x = normal(*((64, 6144) if large else (3, 10)), dtype=dtype, scale=3)
    return gpu.Example(lambda: [swiglu_kernel(x)], lambda: [swiglu_ref(x)])


@SWIGLU_VJP.has_example
def _(dtype: mx.Dtype, large: bool) -> gpu.Example:
    shape = (2048, 6144) if large else (3, 10)
    x, d = normal(*shape, dtype=dtype, scale=3), normal(shape[0], shape[1] // 2, dtype=dtype, seed=1)
    return gpu.Example(lambda: [swiglu_vjp_kernel(x, d)], lambda: [swiglu_vjp_ref(x, d)])


def swiglu(gate_up: mx.array) -> mx.array:
    """
    silu(gate) * up of the fused projection, (..., 2F) -> (..., F). Source: arXiv:2002.05202.

    The kernel reads 2F elements a row and writes F, the gradient's reads 3F and writes 2F: the least there is, each in
    one launch.
    """
    return swiglu_kernel(gate_up) if SWIGLU.runs(gate_up.dtype) else swiglu_ref(gate_up)


def rms_norm(x: mx.array, weight: mx.array | None, eps: float) -> mx.array:
    """x / sqrt(mean(x**2) + eps) * weight over the last axis, in float32 inside. Source: arXiv:1910.07467."""
    if on_gpu():
        return mx.fast.rms_norm(x, weight, eps)
    wide = x.astype(mx.float32)  # MLX's own expression for a CPU has twice the operations
    out = (wide * mx.rsqrt((wide * wide).sum(-1, keepdims=True) * (1 / x.shape[-1]) + eps)).astype(x.dtype)
    return out if weight is None else out * weight


def add_norm_ref(x: mx.array, delta: mx.array, weight: mx.array, eps: float) -> tuple[mx.array, mx.array]:
    """The definition of `add_norm`."""
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
    for (int i = 0; i < HELD; i++) {
        uint column = thread_index + i * 256;
        if (column < C) normed[begin + column] = static_cast<T>(held[i] * scale * float(weight[column]));
    }
""",
)


def add_norm_kernel(x: mx.array, delta: mx.array, weight: mx.array, eps: float) -> tuple[mx.array, mx.array]:
    size, dtype = x.shape[-1], x.dtype

    @mx.custom_function
    def forward(x: mx.array, delta: mx.array, weight: mx.array) -> tuple[mx.array, mx.array]:
        outputs, grid = [(x.shape, dtype)] * 2, (x.size // size * 256, 1, 1)
        total, normed = ADD_NORM(
            [x, delta, weight, constant(eps)], outputs, grid=grid, threadgroup=(256, 1, 1), T=dtype, C=size
        )
        return total, normed

    @forward.vjp
    def backward(primals: Any, cotangents: Any, outputs: Any) -> tuple[mx.array, mx.array, mx.array]:
        _, (d_x, d_weight) = mx.vjp(lambda x, w: rms_norm(x, w, eps), [outputs[0], primals[2]], [cotangents[1]])
        d_x = d_x + cotangents[0]
        return d_x, d_x, d_weight

    out: Any = forward(x, delta, weight)
    return out


@ADD_NORM.has_example
def _(dtype: mx.Dtype, large: bool) -> gpu.Example:
    shape = (64, 1024) if large else (3, 260)
    x, delta, weight = normal(*shape, dtype=dtype), normal(*shape, dtype=dtype, seed=1), normal(shape[1], dtype=dtype)
    return gpu.Example(lambda: add_norm_kernel(x, delta, weight, 1e-6), lambda: add_norm_ref(x, delta, weight, 1e-6))


def add_norm(x: mx.array, delta: mx.array, weight: mx.array, eps: float) -> tuple[mx.array, mx.array]:
    """
    The residual stream after a sublayer and what the next one reads: x + delta, and its RMS-norm; all (..., C).

    The kernel reads 2C elements a row and writes 2C in one launch; the expression, in two, reads 3C and writes 2C.
    """
    return (add_norm_kernel if ADD_NORM.runs(x.dtype) else add_norm_ref)(x, delta, weight, eps)


class Rotation(NamedTuple):
    """Where the tokens of a forward pass stand; made once and used by every layer."""

    offsets: mx.array  # (N,) int32 position of each row's first token; negative ones are padding
    cos: mx.array | None  # (N, L, 1, D) float32, and None on a GPU, where a kernel makes them
    sin: mx.array | None  # with the sign that its half of D takes


class Rope:
    """
    Rotary positions of one model: plain, or YaRN when the configuration says so.

    Source: RoFormer, arXiv:2104.09864; YaRN, arXiv:2309.00071, section 3.2 and 3.4.
    """

    def __init__(self, config: hub.Config):
        self.head_dim, self.magnitude = config.head_dim, 1.0
        self.frequencies = config.rope_theta ** (-np.arange(0, self.head_dim, 2) / self.head_dim)  # (D / 2,) float64
        if config.rope_scaling is not None:
            self._make_yarn(config.rope_theta, config.rope_scaling)
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

    def at(self, offsets: mx.array, length: int) -> Rotation:
        """The rotation of `length` tokens a row that begin at `offsets`, (N,) int32."""
        if on_gpu():
            return Rotation(offsets, None, None)
        positions = (offsets[:, None] + mx.arange(length)).astype(mx.float32)
        angles = (positions[:, :, None] / self.periods)[:, :, None]  # (N, L, 1, D / 2)
        cos, sin = mx.cos(angles) * self.magnitude, mx.sin(angles) * self.magnitude
        return Rotation(offsets, mx.concatenate([cos, cos], axis=-1), mx.concatenate([-sin, sin], axis=-1))

    def __call__(self, x: mx.array, rotation: Rotation) -> mx.array:
        """Rotates (N, L, heads, D): pairs are i and i + D / 2."""
        if rotation.cos is None or rotation.sin is None:
            x = x if self.magnitude == 1.0 else x * self.magnitude
            rotated = mx.fast.rope(
                x.transpose(0, 2, 1, 3),
                self.head_dim,
                traditional=False,
                base=None,
                scale=1.0,
                offset=rotation.offsets,
                freqs=self.periods,
            )
            return rotated.transpose(0, 2, 1, 3)
        low, high = mx.split(x, 2, axis=-1)
        return (x * rotation.cos + mx.concatenate([high, low], axis=-1) * rotation.sin).astype(x.dtype)


def norm_rope_ref(
    qkv: mx.array,
    num_heads: int,
    weights: tuple[mx.array, mx.array] | None,
    eps: float,
    rope: Rope,
    rotation: Rotation,
) -> tuple[mx.array, mx.array, mx.array]:
    """The definition of `norm_rope`."""
    num_kv_heads = (qkv.shape[2] - num_heads) // 2
    turned, values = mx.split(qkv, [num_heads + num_kv_heads], axis=2)
    if weights is not None:
        counts, size = (num_heads, num_kv_heads), qkv.shape[-1]
        weight = mx.concatenate([mx.broadcast_to(w, (n, size)) for w, n in zip(weights, counts, strict=True)])
        turned = rms_norm(turned, None, eps) * weight
    queries, keys = mx.split(rope(turned, rotation), [num_heads], axis=2)
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
    uint head = thread_position_in_grid.y, token = thread_position_in_grid.z;  // token = row * L + position
    if (head >= H + K) return;
    uint length = qkv_shape[1];
    uint row = token / length, position = token % length;
    size_t begin = (size_t(token) * (H + 2 * K) + head) * D;
    float low[HELD], high[HELD];
    float square = 0.0f;
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


def norm_rope_kernel(
    qkv: mx.array,
    num_heads: int,
    weights: tuple[mx.array, mx.array] | None,
    eps: float,
    rope: Rope,
    rotation: Rotation,
) -> tuple[mx.array, mx.array, mx.array]:
    num_rows, length, all_heads, size = qkv.shape
    num_kv_heads, dtype = (all_heads - num_heads) // 2, qkv.dtype
    num_turned = num_heads + num_kv_heads
    scalars = constant(eps), constant(rope.magnitude)

    @mx.custom_function
    def forward(qkv: mx.array, query_weight: mx.array, key_weight: mx.array) -> tuple[mx.array, mx.array]:
        queries, keys = NORM_ROPE(
            [qkv, query_weight, key_weight, scalars[0], rope.periods, scalars[1], rotation.offsets],
            [((num_rows, heads, length, size), dtype) for heads in (num_heads, num_kv_heads)],
            grid=(32, -(-num_turned // 8) * 8, num_rows * length),
            threadgroup=(32, 8, 1),
            T=dtype,
            H=num_heads,
            K=num_kv_heads,
            D=size,
            NORMED=weights is not None,
        )
        return queries, keys

    @forward.vjp
    def backward(primals: Any, cotangents: Any, _: Any) -> Any:
        def reference(qkv: mx.array, *given: mx.array) -> tuple[mx.array, mx.array]:
            pair = None if weights is None else (given[0], given[1])
            return norm_rope_ref(qkv, num_heads, pair, eps, rope, rotation)[:2]

        return tuple(mx.vjp(reference, list(primals), list(cotangents))[1])

    turned: Any = forward(qkv, *(weights or scalars))
    return turned[0], turned[1], qkv[:, :, num_turned:].transpose(0, 2, 1, 3)


@NORM_ROPE.has_example
def _(dtype: mx.Dtype, large: bool) -> gpu.Example:
    rows, length, heads, kv_heads, size = (64, 1, 16, 8, 128) if large else (2, 3, 3, 1, 80)
    config = dataclasses.replace(random_config("random:2m"), head_dim=size)
    qkv, rope = normal(rows, length, heads + 2 * kv_heads, size, dtype=dtype), Rope(config)
    weights, offsets = (normal(size, dtype=dtype), normal(size, dtype=dtype, seed=1)), 40 * mx.arange(rows) - 1
    given = heads, weights, 1e-6, rope, rope.at(offsets, length)
    return gpu.Example(lambda: norm_rope_kernel(qkv, *given), lambda: norm_rope_ref(qkv, *given))


def norm_rope(
    qkv: mx.array,
    num_heads: int,
    weights: tuple[mx.array, mx.array] | None,
    eps: float,
    rope: Rope,
    rotation: Rotation,
) -> tuple[mx.array, mx.array, mx.array]:
    """
    Queries, keys and values of the fused projection (N, L, H + 2K, D), as (N, H, L, D), (N, K, L, D), (N, K, L, D).

    Queries and keys are rotated and, where the family has `weights` (D,) for them, RMS-normalized over D before.
    The kernel reads (H + K) D elements a token and writes as many, the least there is, in one launch for four and two
    copies: MLX's norm copies a part of the fused projection first. Values are a view. A kernel of MLX writes to arrays
    of its own only, so the cache takes the keys in by a launch of its own.
    """
    run = norm_rope_kernel if NORM_ROPE.runs(qkv.dtype) else norm_rope_ref
    return run(qkv, num_heads, weights, eps, rope, rotation)


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
    weights = exp(scores - mx.stop_gradient(scores.max(-1, keepdims=True)))
    out = (weights @ values.astype(mx.float32)) / weights.sum(-1, keepdims=True)
    return out.reshape(num_rows, num_heads, length, head_dim).astype(dtype)


def attention(queries: mx.array, keys: mx.array, values: mx.array, mask: mx.array | str | None) -> mx.array:
    """
    Grouped-query attention, (N, H, L, D) x (N, K, S, D) -> (N, H, L, D); the L queries are the last of the S positions.

    mask: None, "causal", or (N, 1, L, S) boolean, true where a query sees a key; a query that sees none is not allowed.
    """
    # On a GPU MLX has kernels with float32 scores for Qwen's head sizes; other sizes fall back to scores in 16 bits.
    if not on_gpu() or queries.shape[-1] not in (64, 128):
        return attention_ref(queries, keys, values, mask)
    return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=queries.shape[-1] ** -0.5, mask=mask)


def tree_attention_ref(queries: mx.array, parts: Parts, layout: Layout) -> mx.array:
    """
    The definition of `tree_attention`.

    The weights of all parts are taken from a common maximum and their sums added. All queries that read a row of a part
    do so in one matmul, (H / K * G * L, D) x (D, S).
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
    for (keys, _), group in zip(parts, layout, strict=True):
        score = gather(queries, group, keys.shape[0]) @ keys.astype(mx.float32).swapaxes(-1, -2)  # (R, K, G * Q, S)
        if isinstance(group.mask, str):
            shape, num_keys = score.shape, keys.shape[2]
            mask = mx.tri(length, num_keys, num_keys - length, dtype=mx.bool_)
            score = (score.reshape(*shape[:2], -1, length, num_keys) + mx.where(mask, 0.0, -1e30)).reshape(shape)
        elif group.mask is not None:
            score = score + mx.where(group.mask, 0.0, -1e30)
        scores.append(score)
    peaks = [scatter(score.max(-1, keepdims=True), group) for score, group in zip(scores, layout, strict=True)]
    peak = mx.stop_gradient(functools.reduce(mx.maximum, peaks))  # (N, K, Q, 1)
    sums, outs = [], []
    for score, (_, values), group in zip(scores, parts, layout, strict=True):
        weights = exp(score - gather(peak, group, values.shape[0]))
        sums.append(scatter(weights.sum(-1, keepdims=True), group))
        outs.append(scatter(weights @ values.astype(mx.float32), group))
    total, out = functools.reduce(mx.add, sums), functools.reduce(mx.add, outs)
    return (out / total).reshape(num_rows, num_heads, length, head_dim).astype(dtype)


SLOT_ATTENTION = gpu.Kernel(
    "slot_attention",
    ["queries", "keys", "values", "own_keys", "own_values", "members", "places", "mask", "own_mask"],
    ["out"],
    """
    // One threadgroup of 8 simdgroups a slot and kv head. A simdgroup takes every 8th column, first of the prompt, then
    // of the slot's own; a lane holds EACH of the D dims of the Q queries that share the kv head, and of their results.
    constexpr int EACH = (D + 31) / 32;
    constexpr int NUM_PARTS = 8 * 32 * EACH;
    threadgroup float parts[NUM_PARTS];
    threadgroup float peaks[8];
    threadgroup float sums[8];
    int slot = threadgroup_position_in_grid.x, head = threadgroup_position_in_grid.y;
    int lane = thread_index_in_simdgroup, simd = simdgroup_index_in_threadgroup;
    int group = FULL ? queries_shape[0] / keys_shape[0] : members_shape[1];
    int prompt = (FULL ? slot : int(places[slot])) / group;
    int num_shared = keys_shape[2], num_columns = num_shared + own_keys_shape[2];
    auto shared_key = keys + prompt * keys_strides[0] + head * keys_strides[1];
    auto shared_value = values + prompt * values_strides[0] + head * values_strides[1];
    auto own_key = own_keys + slot * own_keys_strides[0] + head * own_keys_strides[1];
    auto own_value = own_values + slot * own_values_strides[0] + head * own_values_strides[1];

    float query[Q * EACH], result[Q * EACH], peak[Q], sum[Q];
    for (int q = 0; q < Q; q++) {
        peak[q] = -INFINITY;
        sum[q] = 0.0f;
        for (int i = 0; i < EACH; i++) {
            int dim = lane * EACH + i;
            auto at = slot * queries_strides[0] + (head * Q + q) * queries_strides[1] + dim;
            query[q * EACH + i] = dim < D ? float(queries[at]) * metal::rsqrt(float(D)) : 0.0f;
            result[q * EACH + i] = 0.0f;
        }
    }
    for (int column = simd; column < num_columns; column += 8) {
        bool own = column >= num_shared;
        int place = own ? column - num_shared : column;
        if (own && OWN_MASKED && !own_mask[slot * own_mask_strides[0] + place * own_mask_strides[3]]) continue;
        if (!own && MASKED && !mask[prompt * mask_strides[0] + place * mask_strides[3]]) continue;
        auto key = own ? own_key + place * own_keys_strides[2] : shared_key + place * keys_strides[2];
        auto value = own ? own_value + place * own_values_strides[2] : shared_value + place * values_strides[2];
        float k[EACH], v[EACH];
        for (int i = 0; i < EACH; i++) {
            int dim = lane * EACH + i;
            k[i] = dim < D ? float(key[dim]) : 0.0f;
            v[i] = dim < D ? float(value[dim]) : 0.0f;
        }
        for (int q = 0; q < Q; q++) {
            float score = 0.0f;
            for (int i = 0; i < EACH; i++) score += query[q * EACH + i] * k[i];
            score = simd_sum(score);
            float higher = metal::max(peak[q], score);
            float shrink = metal::exp(peak[q] - higher), weight = metal::exp(score - higher);
            peak[q] = higher;
            sum[q] = sum[q] * shrink + weight;
            for (int i = 0; i < EACH; i++) result[q * EACH + i] = result[q * EACH + i] * shrink + weight * v[i];
        }
    }
    for (int q = 0; q < Q; q++) {  // what the simdgroups found, under a common maximum
        if (lane == 0) {
            peaks[simd] = peak[q];
            sums[simd] = sum[q];
        }
        for (int i = 0; i < EACH; i++) parts[(simd * 32 + lane) * EACH + i] = result[q * EACH + i];
        threadgroup_barrier(mem_flags::mem_threadgroup);
        float highest = -INFINITY, total = 0.0f, mean = 0.0f;
        int dim = thread_index_in_threadgroup;
        for (int i = 0; i < 8; i++) highest = metal::max(highest, peaks[i]);
        for (int i = 0; i < 8; i++) {
            float weight = metal::exp(peaks[i] - highest);
            total += sums[i] * weight;
            if (dim < D) mean += parts[i * 32 * EACH + dim] * weight;
        }
        if (dim < D) out[((size_t(slot) * own_keys_shape[1] + head) * Q + q) * D + dim] = static_cast<T>(mean / total);
        threadgroup_barrier(mem_flags::mem_threadgroup);
    }
""",
    contiguous=False,  # what is handed in are views of buffers with room to grow
)


def slot_attention_kernel(queries: mx.array, parts: Parts, layout: Layout) -> mx.array:
    (keys, values), (own_keys, own_values) = parts
    members, places, mask = layout[0]
    own_mask, dtype = layout[1].mask, queries.dtype
    assert not isinstance(mask, str) and not isinstance(own_mask, str), "a slot takes one token a step"
    num_rows, num_heads, _, size = queries.shape
    num_kv_heads, nothing = keys.shape[1], constant(False).reshape(1, 1, 1, 1)

    @mx.custom_function
    def forward(*arrays: mx.array) -> mx.array:
        return SLOT_ATTENTION(
            [
                *arrays,
                nothing if members is None else members,
                nothing if places is None else places,
                nothing if mask is None else mask,
                nothing if own_mask is None else own_mask,
            ],
            [(queries.shape, dtype)],
            grid=(num_rows * 256, num_kv_heads, 1),
            threadgroup=(256, 1, 1),
            T=dtype,
            D=size,
            Q=num_heads // num_kv_heads,
            FULL=members is None,
            MASKED=mask is not None,
            OWN_MASKED=own_mask is not None,
        )[0]

    @forward.vjp
    def backward(primals: Any, cotangent: mx.array, _: mx.array) -> Any:
        def reference(queries: mx.array, *held: mx.array) -> mx.array:
            return tree_attention_ref(queries, [(held[0], held[1]), (held[2], held[3])], layout)

        return tuple(mx.vjp(reference, list(primals), [cotangent])[1])

    out: Any = forward(queries, keys, values, own_keys, own_values)
    return out


@SLOT_ATTENTION.has_example
def _(dtype: mx.Dtype, large: bool) -> gpu.Example:
    prompts, rows, heads, kv_heads, size, length, width = (
        (8, 64, 16, 8, 128, 512, 64) if large else (2, 3, 4, 2, 64, 9, 5)
    )
    queries = normal(rows, heads, 1, size, dtype=dtype)
    held = normal(2, prompts, kv_heads, 2 * length, size, dtype=dtype, seed=1)[
        :, :, :, :length
    ]  # a view, as in a cache
    own = normal(2, rows, kv_heads, width, size, dtype=dtype, seed=2)
    group = make_group([row * prompts // rows for row in range(rows)], prompts, None)
    parts, layout = [(held[0], held[1]), (own[0], own[1])], [group, Group(None, None, None)]
    return gpu.Example(
        lambda: [slot_attention_kernel(queries, parts, layout)], lambda: [tree_attention_ref(queries, parts, layout)]
    )


def tree_attention(queries: mx.array, parts: Parts, layout: Layout) -> mx.array:
    """
    Attention of rows that share parts of their past, (N, H, L, D) -> (N, H, L, D), with float32 scores.

    Equal to attention over each row's parts joined together. The kernel is for a decode step of slots that share
    prompts. In one launch it reads the queries, each slot's own columns, and each prompt: once from memory, and for the
    rest of its group, whose threadgroups run side by side, from the cache. That is P columns for a group where copies
    of its prompt, which MLX's own kernel needs, are G * P. Two calls of that kernel could not be joined: it keeps its
    sums to itself.
    """
    own = layout[-1]
    is_slots = len(parts) == 2 and queries.shape[2] == 1 and own.members is None and not isinstance(own.mask, str)
    if is_slots and queries.shape[-1] <= 256 and SLOT_ATTENTION.runs(queries.dtype):
        return slot_attention_kernel(queries, parts, layout)
    return tree_attention_ref(queries, parts, layout)


# ---- the model


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight, self.eps = mx.ones((size,)), eps

    def __call__(self, x: mx.array) -> mx.array:
        return rms_norm(x, self.weight, self.eps)

    def after(self, x: mx.array, delta: mx.array | None) -> tuple[mx.array, mx.array]:
        """x + delta, and that normalized."""
        return (x, self(x)) if delta is None else add_norm(x, delta, self.weight, self.eps)


class Attention(nn.Module):
    def __init__(self, config: hub.Config):
        super().__init__()
        self.num_heads, self.num_kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim, self.eps = config.head_dim, config.rms_norm_eps
        width = (self.num_heads + 2 * self.num_kv_heads) * self.head_dim
        self.qkv_proj = nn.Linear(config.hidden_size, width, bias=config.attention_bias)
        self.o_proj = nn.Linear(self.num_heads * self.head_dim, config.hidden_size, bias=False)
        if config.qk_norm:
            self.q_norm = RMSNorm(self.head_dim, self.eps)
            self.k_norm = RMSNorm(self.head_dim, self.eps)

    def __call__(
        self,
        x: mx.array,
        rope: Rope,
        rotation: Rotation,
        mask: mx.array | str | Layout | None,
        cache: LayerCache | SlotLayer | TreeLayer | None,
    ) -> mx.array:
        num_rows, length, _ = x.shape
        qkv = self.qkv_proj(x).reshape(num_rows, length, -1, self.head_dim)  # (N, L, H + 2K, D)
        weights = (self.q_norm.weight, self.k_norm.weight) if "q_norm" in self else None
        queries, keys, values = norm_rope(qkv, self.num_heads, weights, self.eps, rope, rotation)
        held = (keys, values) if cache is None else cache.update(keys, values)
        if isinstance(held, list):  # in parts, some of them shared by several rows
            assert isinstance(mask, list), "the cache and the mask are not of one kind"
            out = tree_attention(queries, held, mask)
        else:
            assert not isinstance(mask, list), "the cache and the mask are not of one kind"
            out = attention(queries, held[0], held[1], mask)  # (N, H, L, D)
        return self.o_proj(out.transpose(0, 2, 1, 3).reshape(num_rows, length, -1))


class MLP(nn.Module):
    def __init__(self, config: hub.Config):
        super().__init__()
        self.gate_up_proj = nn.Linear(config.hidden_size, 2 * config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def __call__(self, x: mx.array) -> mx.array:
        return self.down_proj(swiglu(self.gate_up_proj(x)))


class Block(nn.Module):
    def __init__(self, config: hub.Config):
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def __call__(
        self,
        x: mx.array,
        delta: mx.array | None,
        rope: Rope,
        rotation: Rotation,
        mask: mx.array | str | Layout | None,
        cache: LayerCache | SlotLayer | TreeLayer | None,
    ) -> tuple[mx.array, mx.array]:
        """The residual stream and what is yet to be added to it, `delta`, of the layer before and after this one."""
        x, normed = self.input_layernorm.after(x, delta)
        x, normed = self.post_attention_layernorm.after(x, self.self_attn(normed, rope, rotation, mask, cache))
        return x, self.mlp(normed)


def checkpointed(
    layer: Block,
    x: mx.array,
    delta: mx.array | None,
    rope: Rope,
    rotation: Rotation,
    mask: mx.array | str | Layout | None,
    cache: LayerCache | SlotLayer | TreeLayer | None,
) -> tuple[mx.array, mx.array]:
    """
    `layer(x, delta, ...)`, of which only the input is kept; the gradient computes the layer again.

    `mx.checkpoint` differentiates its arguments and nothing else: the layer's weights are one of them (called on the
    module it would drop their gradients), and so are keys and values of an earlier level, whose gradients belong to
    the shared prompt. Integers and masks are not differentiable and come by closure.
    """
    assert cache is None or isinstance(cache, TreeLayer), "a cache that is written in place cannot be computed again"

    def run(weights: Any, x: mx.array, delta: list[mx.array], ancestors: Parts) -> tuple[mx.array, mx.array, Parts]:
        held = layer.trainable_parameters()
        layer.update(weights)
        level = None if cache is None else TreeLayer(list(ancestors))
        x, out = layer(x, delta[0] if delta else None, rope, rotation, mask, level)
        layer.update(held)
        return x, out, [] if level is None else level.parts[-1:]

    ancestors = [] if cache is None else list(cache.parts)
    x, delta, newest = mx.checkpoint(run)(layer.trainable_parameters(), x, [] if delta is None else [delta], ancestors)
    if cache is not None:
        cache.parts.extend(newest)
    return x, delta


class Model(nn.Module):
    """
    A dense Qwen. `model(tokens, cache)` gives logits; `hidden` and `head_weight` are its two halves, for those who
    must not hold (N, L, V).
    """

    def __init__(self, config: hub.Config):
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = [Block(config) for _ in range(config.num_hidden_layers)]
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        if not config.tie_word_embeddings:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self._rope = Rope(config)

    @property
    def head_weight(self) -> mx.array:
        """(V, C): the embedding where the head is tied to it."""
        return self.embed_tokens.weight if self.config.tie_word_embeddings else self.lm_head.weight

    def hidden(
        self, tokens: mx.array, cache: KVCache | SlotCache | TreeCache | None = None, checkpoint_layers: int = 0
    ) -> mx.array:
        """
        Normalized final hidden states, (N, L) int32 -> (N, L, C). Without a cache, padding belongs on the right.

        checkpoint_layers: of how many layers, from the first, the activations are computed again for the gradient
        instead of being kept.
        """
        num_rows, length = tokens.shape
        x = self.embed_tokens(tokens)
        offsets = mx.zeros((num_rows,), dtype=mx.int32) if cache is None else cache.offsets(num_rows)
        mask = "causal" if cache is None else cache.mask(length)
        rotation = self._rope.at(offsets, length)
        delta = None
        for index, layer in enumerate(self.layers):
            run = checkpointed if index < checkpoint_layers else Block.__call__
            held = None if cache is None else cache.layers[index]
            x, delta = run(layer, x, delta, self._rope, rotation, mask, held)
        return self.norm.after(x, delta)[1]

    def __call__(self, tokens: mx.array, cache: KVCache | SlotCache | TreeCache | None = None) -> mx.array:
        """Logits of the next token at every position, (N, L) int32 -> (N, L, V)."""
        return self.hidden(tokens, cache) @ self.head_weight.T


# ---- log-probabilities of chosen tokens


def tiled_sum(x: mx.array) -> mx.array:
    """
    Sum over the last axis, (..., V) -> (...), in tiles of 512.

    One running float32 sum over 151,936 terms, as MLX's CPU backend does it, puts a logsumexp off by up to 9e-4 and an
    entropy by 1.6e-3 on peaked rows; two stages leave 2e-5.
    """
    num_tiles = x.shape[-1] // 512
    tiles = x[..., : num_tiles * 512].reshape(*x.shape[:-1], num_tiles, 512).sum(-1).sum(-1)
    return tiles + x[..., num_tiles * 512 :].sum(-1)


def logsumexp(x: mx.array) -> mx.array:
    """log(sum(exp(x))) over the last axis, (..., V) float32 -> (...), exact to 2e-5 at Qwen's vocabulary."""
    peak = mx.stop_gradient(x.max(-1, keepdims=True))
    return mx.log(tiled_sum(exp(x - peak))) + peak.squeeze(-1)


# What the kernels on rows of logits have in common: one threadgroup of 16 simdgroups a row, which takes it in tiles of
# 1,024, a simdgroup a tile; lane l holds every 32nd logit from l on, so a tile is read once, in registers. A tile's
# sums are relative to its own largest logit and are put together at the end.
_ROW = """
    constexpr uint NUM_TILES = (V + 1023) / 1024;
    threadgroup float peaks[NUM_TILES];
    threadgroup float sums[NUM_TILES];
    threadgroup float moments[NUM_TILES];  // of weight * (logit - peak)
    uint row = threadgroup_position_in_grid.x;
    uint lane = thread_index_in_simdgroup, simd = simdgroup_index_in_threadgroup;
    auto x = logits + size_t(row) * V;
    float heat = temperature[0];
    for (uint tile = simd; tile < NUM_TILES; tile += 16) {
        float held[32];
        float highest = -INFINITY;
        for (uint i = 0; i < 32; i++) {
            uint at = tile * 1024 + i * 32 + lane;
            held[i] = at < V ? float(x[at]) / heat : -INFINITY;
            highest = metal::max(highest, held[i]);
        }
        highest = simd_max(highest);
        float level = highest == -INFINITY ? 0.0f : highest;  // -inf less -inf would be nan
        float sum = 0.0f, moment = 0.0f;
        for (uint i = 0; i < 32; i++) {
            float weight = metal::exp(held[i] - level);
            sum += weight;
            moment += weight > 0.0f ? weight * (held[i] - level) : 0.0f;
        }
        sum = simd_sum(sum);
        moment = simd_sum(moment);
        if (lane == 0) {
            peaks[tile] = highest;
            sums[tile] = sum;
            moments[tile] = moment;
        }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    float peak = -INFINITY, total = 0.0f, moment = 0.0f;
    for (uint tile = lane; tile < NUM_TILES; tile += 32) peak = metal::max(peak, peaks[tile]);
    peak = simd_max(peak);
    for (uint tile = lane; tile < NUM_TILES; tile += 32) {
        float weight = metal::exp(peaks[tile] - peak);
        total += sums[tile] * weight;
        moment += weight > 0.0f ? (moments[tile] + (peaks[tile] - peak) * sums[tile]) * weight : 0.0f;
    }
    total = simd_sum(total);
    moment = simd_sum(moment);
"""
_ROW_HEADER = """
// The place among 32 weights, one a lane, at which their running sum first passes the share `uniform` of the whole.
// It is added up in order: a sum that only grows never stops at a weight of 0.
inline uint draw(float weight, float uniform) {
    float total = 0.0f, until = 0.0f;
    for (uint i = 0; i < 32; i++) total += simd_broadcast(weight, i);
    float target = metal::min(uniform, 1.0f - 1.0f / 4194304.0f) * total;
    uint place = 0;
    for (uint i = 0; i < 32; i++) {
        until += simd_broadcast(weight, i);
        place += until <= target ? 1 : 0;
    }
    return place < 32 ? place : 0;
}
"""


def _on_rows(
    kernel: gpu.Kernel, logits: mx.array, more: list[mx.array], temperature: float, dtypes: list[mx.Dtype]
) -> list[mx.array]:
    """Runs a kernel that begins with `_ROW` on (N, V) logits; every result is (N,), or (N, V) if it is the only one."""
    num_rows, size = logits.shape
    shape = (num_rows, size) if len(dtypes) == 1 else (num_rows,)
    return kernel(
        [logits, *more, constant(float(temperature))],
        [(shape, dtype) for dtype in dtypes],
        grid=(num_rows * 512, 1, 1),
        threadgroup=(512, 1, 1),
        V=size,
    )


def at_temperature(logits: mx.array, temperature: float) -> mx.array:
    """Logits in float32; dividing all of them by 1 would cost a pass over them."""
    logits = logits.astype(mx.float32)
    return logits if temperature == 1 else logits / temperature


def log_softmax_ref(logits: mx.array, temperature: float = 1.0) -> mx.array:
    """The definition of `log_softmax`."""
    logits = at_temperature(logits, temperature)
    return logits - logsumexp(logits)[..., None]


LOG_SOFTMAX = gpu.Kernel(
    "log_softmax",
    ["logits", "temperature"],
    ["out"],
    _ROW
    + """
    float log_total = metal::log(total);
    for (uint at = thread_index_in_threadgroup; at < V; at += 512) {
        out[size_t(row) * V + at] = (float(x[at]) / heat - peak) - log_total;
    }
""",
    header=_ROW_HEADER,
)


def log_softmax_kernel(logits: mx.array, temperature: float = 1.0) -> mx.array:
    @mx.custom_function
    def forward(logits: mx.array) -> mx.array:
        rows = logits.reshape(-1, logits.shape[-1])
        return _on_rows(LOG_SOFTMAX, rows, [], temperature, [mx.float32])[0].reshape(logits.shape)

    @forward.vjp
    def backward(logits: mx.array, cotangent: mx.array, out: mx.array) -> mx.array:
        return ((cotangent - exp(out) * tiled_sum(cotangent)[..., None]) / temperature).astype(logits.dtype)

    out: Any = forward(logits)
    return out


@LOG_SOFTMAX.has_example
def _(dtype: mx.Dtype, large: bool) -> gpu.Example:
    logits = normal(*((64, 151_936) if large else (2, 1500)), dtype=dtype, scale=4)
    return gpu.Example(lambda: [log_softmax_kernel(logits, 0.7)], lambda: [log_softmax_ref(logits, 0.7)])


def log_softmax(logits: mx.array, temperature: float = 1.0) -> mx.array:
    """
    Log-probabilities of all tokens at `temperature`, (..., V) -> (..., V) float32, for those who need the row.

    The kernel reads V logits twice, the second time mostly from the cache, and writes V, in one launch; the least is
    reading them once, which would need V of a threadgroup's memory.
    """
    run = log_softmax_kernel if LOG_SOFTMAX.runs(logits.dtype) else log_softmax_ref
    return run(logits, temperature)


BELOW_ONE = 1 - 2**-22  # the largest share of a sum that float32 rounding still keeps below the sum


def draw(weights: mx.array, share: mx.array) -> mx.array:
    """Where in each row the running sum first passes this share of the whole, (N, X), (N, 1) -> (N, 1)."""
    until = mx.cumsum(weights, axis=-1)
    return (until <= share * until[:, -1:]).sum(-1, keepdims=True)


def sample_token_ref(
    logits: mx.array, uniforms: mx.array, temperature: float = 1.0
) -> tuple[mx.array, mx.array, mx.array]:
    """The definition of `sample_token`."""
    num_rows, size = logits.shape
    logits = at_temperature(logits, temperature)
    peak = logits.max(-1, keepdims=True)
    weights = exp(logits - peak)
    shares = mx.split(mx.minimum(uniforms, BELOW_ONE), 4, axis=-1)
    width = 1024 if size > 1024 else 32  # one tile need not be full

    def blocks_of(weights: mx.array, width: int) -> mx.array:  # (N, X) -> (N, X / width, width), filled up with 0
        missing = -weights.shape[1] % width
        weights = mx.pad(weights, [(0, 0), (0, missing)]) if missing else weights
        return weights.reshape(num_rows, -1, width)

    def take(blocks: mx.array, place: mx.array) -> mx.array:  # (N, X, width), (N, 1) -> (N, width)
        return mx.take_along_axis(blocks, place[:, :, None], axis=1).squeeze(1)

    blocks, token = blocks_of(weights, width), mx.zeros((num_rows, 1), mx.int32)
    sums = blocks.sum(-1)
    total = sums.sum(-1, keepdims=True)
    if size > 1024:
        if sums.shape[1] > 32:
            groups = blocks_of(sums, 32)
            token = draw(groups.sum(-1), shares[0])
            sums = take(groups, token)
        token = token * 32 + draw(sums, shares[1])
        blocks = take(blocks, token).reshape(num_rows, 32, 32)
        sums = blocks.sum(-1)
    block = draw(sums, shares[2])
    token = (token * 32 + block) * 32 + draw(take(blocks, block), shares[3])
    log_total = mx.log(total).squeeze(-1)
    logprob = (mx.take_along_axis(logits, token, axis=-1) - peak).squeeze(-1) - log_total
    moment = tiled_sum(mx.where(weights > 0, weights * (logits - peak), 0.0))
    return token.squeeze(-1).astype(mx.int32), logprob, log_total - moment / total.squeeze(-1)


SAMPLE_TOKEN = gpu.Kernel(
    "sample_token",
    ["logits", "uniforms", "temperature"],
    ["tokens", "logprobs", "entropies"],
    _ROW
    + """
    if (simd > 0) return;
    auto uniform = uniforms + row * 4;
    float weight = 0.0f;  // of lane l's group of 32 tiles
    for (uint i = 0; i < 32; i++) {
        uint tile = lane * 32 + i;
        if (tile < NUM_TILES) weight += sums[tile] * metal::exp(peaks[tile] - peak);
    }
    uint tile = draw(weight, uniform[0]) * 32 + lane;
    weight = tile < NUM_TILES ? sums[tile] * metal::exp(peaks[tile] - peak) : 0.0f;
    tile = tile - lane + draw(weight, uniform[1]);
    float level = peaks[tile] == -INFINITY ? 0.0f : peaks[tile];
    float own = 0.0f;  // of lane l's block of 32 logits
    for (uint i = 0; i < 32; i++) {
        uint at = tile * 1024 + i * 32 + lane;
        float sum = simd_sum(at < V ? metal::exp(float(x[at]) / heat - level) : 0.0f);
        own = i == lane ? sum : own;
    }
    uint at = tile * 1024 + draw(own, uniform[2]) * 32 + lane;
    weight = at < V ? metal::exp(float(x[at]) / heat - level) : 0.0f;
    uint token = at - lane + draw(weight, uniform[3]);
    if (lane == 0) {
        float log_total = metal::log(total);
        tokens[row] = token;
        logprobs[row] = (float(x[token]) / heat - peak) - log_total;
        entropies[row] = log_total - moment / total;
    }
""",
    header=_ROW_HEADER,
)


def sample_token_kernel(
    logits: mx.array, uniforms: mx.array, temperature: float = 1.0
) -> tuple[mx.array, mx.array, mx.array]:
    dtypes = [mx.int32, mx.float32, mx.float32]
    token, logprob, entropy = _on_rows(SAMPLE_TOKEN, logits, [uniforms], temperature, dtypes)
    return token, logprob, entropy


@SAMPLE_TOKEN.has_example
def _(dtype: mx.Dtype, large: bool) -> gpu.Example:
    logits = normal(*((64, 151_936) if large else (8, 2500)), dtype=dtype, scale=4)
    given = logits, mx.random.uniform(shape=(logits.shape[0], 4), key=mx.random.key(1)), 0.7
    return gpu.Example(lambda: sample_token_kernel(*given), lambda: sample_token_ref(*given))


def sample_token(logits: mx.array, uniforms: mx.array, temperature: float = 1.0) -> tuple[mx.array, mx.array, mx.array]:
    """
    Draws a token a row at `temperature`: it, its log-probability and the entropy; (N, V), (N, 4) -> (N,) each.

    uniforms: four numbers in [0, 1) a row. Each chooses one of at most 32 in proportion to what they weigh: 32,768
    logits, of those 1,024, of those 32, of those one. The choices multiply to the token's probability, one Philox block
    gives the four, and a rounding moves one of 32 borders and not one of V: with a single number for all of V another
    order of summation drew another token once in some hundred draws. A logit of -inf is never drawn.
    The kernel reads each logit once, one tile again, and writes 12 bytes a row, in one launch; Gumbel-max would read
    the same and compute V pairs of logarithms and V / 4 Philox blocks more. V is at most 2**20.
    """
    assert logits.shape[-1] <= 2**20, logits.shape
    run = sample_token_kernel if SAMPLE_TOKEN.runs(logits.dtype) else sample_token_ref
    return run(logits, uniforms, temperature)


class RowLogprobs(NamedTuple):
    """What `row_logprobs` gives, (M,) float32 each; with the last two every log-probability of a row can be had."""

    logprobs: mx.array
    entropies: mx.array
    peaks: mx.array  # the largest logit, at the temperature
    log_totals: mx.array  # the log of sum(exp(logit - peak)); beside the peak, which may dwarf it


def row_logprobs_ref(logits: mx.array, ids: mx.array, temperature: float = 1.0) -> RowLogprobs:
    """The definition of `row_logprobs`."""
    logits = at_temperature(logits, temperature)
    peak = mx.stop_gradient(logits.max(-1, keepdims=True))
    shifted = logits - peak
    weights = exp(shifted)
    total = tiled_sum(weights)
    chosen = mx.take_along_axis(shifted, ids[:, None], axis=-1).squeeze(-1)
    moment = tiled_sum(weights * mx.where(weights > 0, shifted, 0.0))
    log_total = mx.log(total)
    return RowLogprobs(chosen - log_total, log_total - moment / total, peak.squeeze(-1), log_total)


ROW_LOGPROBS = gpu.Kernel(
    "row_logprobs",
    ["logits", "ids", "temperature"],
    ["logprobs", "entropies", "highest", "log_totals"],
    _ROW
    + """
    if (thread_index_in_threadgroup == 0) {
        float log_total = metal::log(total);
        logprobs[row] = (float(x[ids[row]]) / heat - peak) - log_total;
        entropies[row] = log_total - moment / total;
        highest[row] = peak;
        log_totals[row] = log_total;
    }
""",
    header=_ROW_HEADER,
)
ROW_LOGPROBS_VJP = gpu.Kernel(
    "row_logprobs_vjp",
    ["logits", "ids", "entropies", "highest", "log_totals", "d_logprobs", "d_entropies", "temperature"],
    ["d_logits"],
    """
    // A thread makes one element: d logprob[id] = onehot - p, d entropy = -p (log p + entropy).
    uint column = thread_position_in_grid.x, row = thread_position_in_grid.y;
    if (column >= V) return;
    size_t begin = size_t(row) * V;
    float heat = temperature[0];
    float logprob = (float(logits[begin + column]) / heat - highest[row]) - log_totals[row];
    float p = metal::exp(logprob);
    float d = p > 0.0f ? -p * (d_logprobs[row] + d_entropies[row] * (logprob + entropies[row])) : 0.0f;
    if (column == uint(ids[row])) d += d_logprobs[row];
    d_logits[begin + column] = static_cast<T>(d / heat);
""",
)


def row_logprobs_vjp_kernel(
    logits: mx.array,
    ids: mx.array,
    outputs: RowLogprobs,
    cotangents: Sequence[mx.array],
    temperature: float = 1.0,
) -> mx.array:
    num_rows, size = logits.shape
    return ROW_LOGPROBS_VJP(
        [logits, ids, *outputs[1:], *cotangents, constant(float(temperature))],
        [(logits.shape, logits.dtype)],
        grid=(-(-size // 256) * 256, num_rows, 1),
        threadgroup=(256, 1, 1),
        T=logits.dtype,
        V=size,
    )[0]


def row_logprobs_kernel(logits: mx.array, ids: mx.array, temperature: float = 1.0) -> RowLogprobs:
    @mx.custom_function
    def forward(logits: mx.array) -> tuple[mx.array, ...]:
        return tuple(_on_rows(ROW_LOGPROBS, logits, [ids], temperature, [mx.float32] * 4))

    @forward.vjp
    def backward(logits: mx.array, cotangents: Any, outputs: Any) -> mx.array:
        return row_logprobs_vjp(logits, ids, RowLogprobs(*outputs), cotangents[:2], temperature)

    out: Any = forward(logits)
    return RowLogprobs(*out)


def _row_logprobs_example(dtype: mx.Dtype, large: bool) -> tuple[mx.array, mx.array]:
    logits = normal(*((64, 151_936) if large else (3, 1500)), dtype=dtype, scale=4)
    return logits, mx.arange(logits.shape[0]) * 400 % logits.shape[1]


@ROW_LOGPROBS.has_example
def _(dtype: mx.Dtype, large: bool) -> gpu.Example:
    given = *_row_logprobs_example(dtype, large), 0.7
    return gpu.Example(lambda: row_logprobs_kernel(*given), lambda: row_logprobs_ref(*given))


@ROW_LOGPROBS_VJP.has_example
def _(dtype: mx.Dtype, large: bool) -> gpu.Example:
    logits, ids = _row_logprobs_example(dtype, large)
    outputs, cotangents = row_logprobs_ref(logits, ids), [normal(len(ids), dtype=mx.float32, seed=s) for s in (1, 2)]
    given = logits, ids, outputs, cotangents
    return gpu.Example(lambda: [row_logprobs_vjp_kernel(*given)], lambda: [row_logprobs_vjp_ref(*given)])


def row_logprobs_vjp_ref(
    logits: mx.array,
    ids: mx.array,
    outputs: RowLogprobs,
    cotangents: Sequence[mx.array],
    temperature: float = 1.0,
) -> mx.array:
    """The definition of `row_logprobs_vjp`."""
    _, (d_logits,) = mx.vjp(lambda x: row_logprobs_ref(x, ids, temperature)[:2], [logits], list(cotangents))
    return d_logits


def row_logprobs_vjp(
    logits: mx.array,
    ids: mx.array,
    outputs: RowLogprobs,
    cotangents: Sequence[mx.array],
    temperature: float = 1.0,
) -> mx.array:
    """
    The gradient of `row_logprobs` by its logits, of their type, from its results and the first two's cotangents, (M,).

    The kernel reads V logits a row and writes V, the least there is while the logits are kept; MLX gives a kernel
    arrays of its own to write to, so the logits' buffer cannot take them.
    """
    run = row_logprobs_vjp_kernel if ROW_LOGPROBS_VJP.runs(logits.dtype) else row_logprobs_vjp_ref
    return run(logits, ids, outputs, cotangents, temperature)


def row_logprobs(logits: mx.array, ids: mx.array, temperature: float = 1.0) -> RowLogprobs:
    """
    Log-probability of an id a row and entropy of the row at `temperature`, (M, V), (M,) -> (M,) each; with gradient.

    The kernel reads each logit once and writes 16 bytes a row, in one launch. A loss of tokens needs no kernel of its
    own behind it: on policy or off, it is a handful of operations on (M,) numbers beside the M * V of this.
    """
    run = row_logprobs_kernel if ROW_LOGPROBS.runs(logits.dtype) else row_logprobs_ref
    return run(logits, ids, temperature)


def truncate_logits(logits: mx.array, top_p: float = 1.0, top_k: int = 0, min_p: float = 0.0) -> mx.array:
    """
    Logits (..., V) float32 with -inf outside the support; 1.0, 0 and 0.0 keep everything.

    top_k keeps the k likeliest (and what ties with the last of them), min_p what has at least min_p times the
    likeliest's probability, top_p the fewest likeliest tokens that together reach top_p, of what the others kept.
    Source: min_p arXiv:2407.01082, top_p arXiv:1904.09751.
    """
    if top_k:
        kth = mx.min(mx.topk(logits, min(top_k, logits.shape[-1]), axis=-1), axis=-1, keepdims=True)
        logits = mx.where(logits < kth, -mx.inf, logits)
    if min_p:
        logits = mx.where(logits < logits.max(-1, keepdims=True) + math.log(min_p), -mx.inf, logits)
    if top_p < 1:
        descending = -mx.sort(-logits, axis=-1)
        probs = exp(descending - logsumexp(descending)[..., None])
        before = mx.cumsum(probs, axis=-1) - probs  # mass of the strictly likelier tokens
        num_kept = mx.maximum((before < top_p).sum(-1, keepdims=True), 1)
        least = mx.take_along_axis(descending, num_kept - 1, axis=-1)
        logits = mx.where(logits < least, -mx.inf, logits)
    return logits


def logits_of(x: mx.array, weight: mx.array, ids: mx.array, support: dict[str, Any]) -> mx.array:
    """
    Scores of some or all of the vocabulary, (M, C) x (V, C) -> (M, V) float32; -1e9 outside the support.

    A sampled id stays in its own support: rounding may put a borderline token outside when it is scored again.
    """
    logits = x @ weight.astype(mx.float32).T
    if support:  # only ever with the whole vocabulary
        kept = mx.isfinite(truncate_logits(logits, **support)) | (mx.arange(logits.shape[-1]) == ids[:, None])
        logits = mx.where(mx.stop_gradient(kept), logits, -1e9)
    return logits


def token_logprobs_ref(
    hidden: mx.array,
    head_weight: mx.array,
    ids: mx.array,
    *,
    temperature: float = 1.0,
    support: dict[str, Any] | None = None,
) -> tuple[mx.array, mx.array]:
    """The definition of `token_logprobs`, as one writes it: all (N, T, V) log-probabilities at once, and autodiff."""
    x = hidden.reshape(-1, hidden.shape[-1]).astype(mx.float32) / temperature
    logits = logits_of(x, head_weight, ids.reshape(-1), support or {})
    logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    chosen = mx.take_along_axis(logprobs, ids.reshape(-1, 1), axis=-1)
    entropy = -(mx.exp(logprobs) * logprobs).sum(-1)
    return chosen.reshape(ids.shape), entropy.reshape(ids.shape)


LOGPROB_CHUNK = 256  # positions whose logits exist at once
LOGPROB_TILE = 2**20  # logits that exist at once, 4 MB: they stay in a core's cache from the matmul to the last sum
HEADS = ("frozen", "trained")
GRADIENTS = ("none", "logprobs", "both")


def _slices(length: int, step: int) -> list[slice]:
    return [slice(begin, min(begin + step, length)) for begin in range(0, length, step)]


ROWS_AT_ONCE = 256  # whose logits exist at once where a kernel takes them: 78 MB at Qwen's vocabulary in 16 bits


def token_logprobs_in_rows(
    hidden: mx.array, head_weight: mx.array, ids: mx.array, temperature: float, head: str
) -> tuple[mx.array, mx.array]:
    """
    `token_logprobs` for a GPU, from (M, C), (V, C) and (M,): whole rows of logits in the head's type, some at a time.

    A kernel reads a chunk's logits once for its results; the backward pass makes the logits again, and another kernel
    turns them into their gradient. MLX's matmuls do the rest in 16 bits.
    """
    chunks = [slice(begin, begin + ROWS_AT_ONCE) for begin in range(0, ids.size, ROWS_AT_ONCE)]

    @mx.custom_function
    def forward(hidden: mx.array, head_weight: mx.array) -> tuple[mx.array, ...]:
        parts: list[RowLogprobs] = []
        for chunk in chunks:
            source = hidden[chunk]
            if parts:  # one chunk after the other: what waits for nothing is computed, and held, at once
                (source,) = mx.depends([source], list(parts[-1]))
            parts.append(row_logprobs(source @ head_weight.T, ids[chunk], temperature))
        return tuple(mx.concatenate(list(column)) for column in zip(*parts, strict=True))

    @forward.vjp
    def backward(primals: Any, cotangents: Any, outputs: Any) -> tuple[mx.array, mx.array]:
        hidden, head_weight = primals
        d_hidden: list[mx.array] = []
        done: list[mx.array] = []
        d_head = mx.zeros(head_weight.shape, mx.float32)
        for chunk in chunks:
            source = mx.depends([hidden[chunk]], done)[0] if done else hidden[chunk]
            held, given = RowLogprobs(*(a[chunk] for a in outputs)), [a[chunk] for a in cotangents[:2]]
            d_logits = row_logprobs_vjp(source @ head_weight.T, ids[chunk], held, given, temperature)
            d_hidden.append(d_logits @ head_weight)
            done = [d_hidden[-1]]
            if head == "trained":
                d_head = d_head + d_logits.T @ source
                done.append(d_head)
        return mx.concatenate(d_hidden), d_head.astype(head_weight.dtype)

    out: Any = forward(hidden, head_weight)
    return out[0], out[1]


def token_logprobs(
    hidden: mx.array,
    head_weight: mx.array,
    ids: mx.array,
    *,
    temperature: float = 1.0,
    head: str = "frozen",
    support: dict[str, Any] | None = None,
    gradient: str = "both",
    chunk: int = LOGPROB_CHUNK,
) -> tuple[mx.array, mx.array]:
    """
    Log-probability of each id and entropy of its distribution at `temperature`; neither (N, T, V) nor (T, V) exists.

    hidden (N, T, C), head_weight (V, C), ids (N, T) int32 -> two (N, T) float32, nats; the logits are float32 whatever
    the weights are. `support` (top_p, top_k, min_p) restricts the distribution as the sampler did.
    head: "frozen" gives `hidden` its gradient, "trained" `head_weight` too.
    gradient: of "both" results; of the "logprobs", where the entropy is only looked at, a third cheaper; or "none".
    chunk: positions at once; `LOGPROB_TILE // chunk` ids at once, or all of them where there is a support.

    The vocabulary goes by in tiles under a running maximum, as keys do in attention. For a softmax over the head's rows
    W is both keys and values: sum(p W) comes out beside sum(p), and d logprob = W[id] - sum(p W) is all that the
    gradient of `hidden` needs, so the backward pass of a frozen head has no matmul. Each tile waits for the one before;
    as many as MLX runs ahead with (some ten) are in memory, whatever T is.
    Source: online softmax, arXiv:1805.02867; FlashAttention, arXiv:2205.14135; a head cut up, arXiv:2411.09009.
    """
    assert head in HEADS, head
    assert gradient in GRADIENTS, gradient
    assert temperature > 0, temperature
    if not support and ROW_LOGPROBS.runs(head_weight.dtype):
        rows = token_logprobs_in_rows(
            hidden.reshape(-1, hidden.shape[-1]), head_weight, ids.reshape(-1), temperature, head
        )
        return rows[0].reshape(ids.shape), rows[1].reshape(ids.shape)
    shape, (vocab, width) = ids.shape, head_weight.shape
    ids, support = ids.reshape(-1), support or {}
    if support:  # whole rows, as many as keep what sorting them needs below a gigabyte
        chunk = min(chunk, max(1, 16 * LOGPROB_TILE // vocab))
    rows_of_chunks = _slices(ids.size, chunk)
    columns = [slice(0, vocab)] if support else _slices(vocab, max(1, LOGPROB_TILE // min(chunk, ids.size)))

    @mx.custom_function
    def forward(hidden: mx.array, head_weight: mx.array) -> tuple[mx.array, ...]:
        scaled, parts = hidden.astype(mx.float32) / temperature, []
        done: list[mx.array] = []
        for rows in rows_of_chunks:
            state = _Softmax.start(scaled[rows], gradient)
            for tile in columns:
                state = state.after(_wait(scaled[rows], done), head_weight, ids[rows], tile, support)
                done = [array for array in state if array is not None]
            parts.append(state.results(head_weight[ids[rows]], temperature))
        return tuple(mx.concatenate(list(column)) for column in zip(*parts, strict=True))

    @forward.vjp
    def backward(
        primals: tuple[mx.array, ...], cotangents: tuple[mx.array, ...], outputs: tuple[mx.array, ...]
    ) -> tuple[mx.array, mx.array]:
        hidden, head_weight = primals
        d_logprobs, d_entropy = (cotangent[:, None] for cotangent in cotangents[:2])
        _, entropy, total, *kept = outputs
        d_hidden = sum((d * array for d, array in zip((d_logprobs, d_entropy), kept, strict=False)), mx.array(0.0))
        d_hidden = mx.broadcast_to(d_hidden, hidden.shape).astype(hidden.dtype)
        if head == "frozen" or gradient == "none":
            return d_hidden, mx.zeros_like(head_weight)
        scaled, d_tiles = hidden.astype(mx.float32) / temperature, []
        done: list[mx.array] = []
        for tile in columns:
            d_tile = mx.zeros((tile.stop - tile.start, width), mx.float32)
            for rows in rows_of_chunks:
                x, d_logprob = _wait(scaled[rows], done), d_logprobs[rows]
                logprobs = logits_of(x, head_weight[tile], ids[rows], support) - total[rows, None]  # (M, tile)
                # d logprob[id] = onehot - p, d entropy = -p (log p + entropy)
                factor = d_logprob
                if gradient == "both":
                    factor = d_logprob + d_entropy[rows] * (logprobs + entropy[rows, None])
                place, inside = _place(ids[rows], tile)
                row = mx.arange(x.shape[0])[:, None]
                slopes = (exp(logprobs) * factor).at[row, place].add(mx.where(inside, -d_logprob, 0.0))
                d_tile = d_tile - slopes.T @ x
                done = [d_tile]
            d_tiles.append(d_tile.astype(head_weight.dtype))
        return d_hidden, mx.concatenate(d_tiles)

    outputs: Any = forward(hidden.reshape(-1, width), head_weight)
    return outputs[0].reshape(shape), outputs[1].reshape(shape)


def _wait(x: mx.array, done: list[mx.array]) -> mx.array:
    """`x`, but not before `done`: what waits for nothing is computed, and held, at once."""
    return mx.depends([x], done)[0] if done else x


def _place(ids: mx.array, tile: slice) -> tuple[mx.array, mx.array]:
    """Where in a tile each id stands, the nearest place if outside, and whether it is inside; (M, 1) each."""
    place = ids[:, None] - tile.start
    last = tile.stop - tile.start - 1
    return mx.clip(place, 0, last), (place >= 0) & (place <= last)


class _Softmax(NamedTuple):
    """
    What is known of M distributions after some of the vocabulary; every sum is over exp(logit - peak).

    Peaks begin finite: -inf less -inf would be nan.
    """

    peak: mx.array  # (M, 1) the largest logit
    total: mx.array  # (M, 1) sum of the weights
    moment: mx.array  # (M, 1) sum of weight * (logit - peak)
    chosen: mx.array  # (M, 1) the logit of the id
    mean: mx.array | None  # (M, C) sum of weight * row of the head
    slope: mx.array | None  # (M, C) sum of weight * (logit - peak) * row of the head

    @staticmethod
    def start(x: mx.array, gradient: str) -> "_Softmax":
        nothing = mx.zeros((x.shape[0], 1))
        return _Softmax(
            nothing - 1e30,
            nothing,
            nothing,
            nothing,
            None if gradient == "none" else mx.zeros(x.shape),
            mx.zeros(x.shape) if gradient == "both" else None,
        )

    def after(
        self, x: mx.array, head_weight: mx.array, ids: mx.array, tile: slice, support: dict[str, Any]
    ) -> "_Softmax":
        """The state with one more tile of the vocabulary taken in."""
        weight = head_weight[tile].astype(mx.float32)
        logits = logits_of(x, weight, ids, support)  # (M, tile)
        place, inside = _place(ids, tile)
        found = mx.take_along_axis(logits, place, axis=-1)
        peak = mx.maximum(self.peak, logits.max(-1, keepdims=True))
        logits, moved = logits - peak, self.peak - peak
        shrunk = exp(moved)
        weights = exp(logits)
        weighted = weights * logits

        def moments(total: Any, moment: Any) -> Any:  # a sum of weight * (logit - peak) under the new peak
            return shrunk * (moment + moved * total)

        return _Softmax(
            peak,
            shrunk * self.total + tiled_sum(weights)[:, None],
            moments(self.total, self.moment) + tiled_sum(weighted)[:, None],
            mx.where(inside, found, self.chosen),
            None if self.mean is None else shrunk * self.mean + weights @ weight,
            None if self.slope is None else moments(self.mean, self.slope) + weighted @ weight,
        )

    def results(self, chosen_rows: mx.array, temperature: float) -> tuple[mx.array, ...]:
        """Log-probabilities, entropies and logsumexps (M,), and the first two's gradients by `hidden`, (M, C)."""
        log_total, moment = mx.log(self.total), self.moment / self.total
        logprobs, entropy = self.chosen - self.peak - log_total, log_total - moment
        kept = []
        if self.mean is not None:
            kept.append((chosen_rows.astype(mx.float32) - self.mean / self.total) / temperature)
        if (
            self.slope is not None and self.mean is not None
        ):  # -sum(p (log p + entropy) W), log p = logit - peak - log_total
            kept.append((moment * self.mean - self.slope) / self.total / temperature)
        return *(array.squeeze(-1) for array in (logprobs, entropy, self.peak + log_total)), *kept


# ---- load and save


def laid_out(name: str, weight: mx.array) -> mx.array:
    """
    The same weight, in memory as its product reads it: on a CPU a projection's (out, in) lies column by column.

    OpenBLAS packs what it multiplies by, and packs x @ W.T of a few rows a fifth slower from rows than from columns.
    """
    return weight if on_gpu() or not name.endswith("proj.weight") else mx.contiguous(weight.T).T


def load_model(directory: str | Path, dtype: mx.Dtype | None = None, adapter: str | Path | None = None) -> Model:
    """The model of a Hugging Face directory, in `dtype` (`default_dtype()`). ValueError names what is wrong with it."""
    directory, dtype = Path(directory), dtype or default_dtype()
    config = hub.load_config(directory)
    weights = hub.load_weights(directory)
    if config.tie_word_embeddings:
        weights.pop("lm_head.weight", None)
    model = Model(config)  # lazy: its random weights are replaced before they are computed
    expected = hub.unfuse_weights(dict(tree_flatten(model.parameters())), config)
    if missing := sorted(expected.keys() - weights.keys()):
        raise ValueError(f"{directory} lacks {len(missing)} tensors, the first is {missing[0]}")
    if unknown := sorted(weights.keys() - expected.keys()):
        raise ValueError(
            f"{directory} has {len(unknown)} tensors that a {config.model_type} has not, the first is {unknown[0]}"
        )
    for name, array in sorted(weights.items()):
        if array.shape != expected[name].shape:
            raise ValueError(
                f"{directory}: {name} has shape {array.shape}, config.json asks for {expected[name].shape}"
            )
        if not mx.issubdtype(array.dtype, mx.floating):
            raise ValueError(f"{directory}: {name} is {array.dtype}; only floating-point weights are supported")
        weights[name] = array.astype(dtype)
    if adapter is not None:
        weights = hub.merge_adapter(weights, adapter)
    weights = hub.fuse_weights(weights)  # one name, so that no part outlives its whole
    model.load_weights([(name, laid_out(name, weights.pop(name))) for name in list(weights)])
    for part in (*model.layers, model):  # layer by layer: all at once would hold 1.5 times the model's bytes
        mx.eval(part.parameters())
    return model


def choose_model(asked: str | None) -> tuple[str, str]:
    """The model to take and why: what was asked for, else Qwen3-0.6B on a GPU where it can be had, else the demo."""
    if asked:
        return asked, "as asked"
    if not on_gpu():
        return "demo", "the default without a GPU"
    try:
        hub.hub_directory(hub.DEFAULT_MODEL)
    except ValueError as error:
        return "demo", f"because {str(error).removeprefix('--model ')}"
    return hub.DEFAULT_MODEL, "the default on a GPU"


RANDOM = {  # name -> hidden, layers, mlp, heads, kv heads, head dim, vocabulary; the last is Qwen3-0.6B's shape
    "random:2m": (128, 5, 384, 4, 2, 32, 8192),
    "random:30m": (512, 8, 1536, 8, 4, 64, 8192),
    "random:0.6b": (1024, 28, 3072, 16, 8, 128, 151_936),
}


def random_config(name: str) -> hub.Config:
    """The configuration of a size in `RANDOM`. ValueError when there is none of that name."""
    if name not in RANDOM:
        raise ValueError(f"--model {name}: the random models are {', '.join(RANDOM)}")
    hidden, layers, width, heads, kv_heads, head_dim, vocab = RANDOM[name]
    raw = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "intermediate_size": width,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "vocab_size": vocab,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": True,
        "rope_theta": 1e6,
        "hidden_act": "silu",
        "attention_bias": False,
    }
    return hub.make_config(raw)


def load_config(path_or_id: str | Path) -> hub.Config:
    """The configuration of what `load` takes. ValueError names what is wrong with it."""
    name = str(path_or_id)
    return random_config(name) if name.startswith("random:") else hub.load_config(hub.find(path_or_id))


def random_model(name: str, dtype: mx.Dtype | None = None) -> Model:
    """A Qwen3 of a size in `RANDOM` with seeded random weights and no end token, for benchmarks and tests."""
    model, dtype = Model(random_config(name)), dtype or default_dtype()
    weights = tree_flatten(model.parameters())
    keys = mx.random.split(mx.random.key(0), len(weights))
    for (path, array), key in zip(sorted(weights), keys, strict=True):
        if array.ndim == 2:  # norm weights stay at 1
            array = mx.random.normal(array.shape, dtype, scale=0.02, key=key)
        model.load_weights([(path, laid_out(path, array.astype(dtype)))], strict=False)
        mx.eval(model.parameters())  # wait: one tensor at a time, so that no second copy is held
    return model


def load(path_or_id: str | Path, dtype: mx.Dtype | None = None, adapter: str | Path | None = None) -> tuple[Model, Any]:
    """
    Model and tokenizer of `demo`, a Hugging Face directory or a hub id, in `dtype` (`default_dtype()`). A name of
    `RANDOM` gives random weights with the demo's tokenizer.

    adapter: a directory of mlx_lm's layout whose weights are merged in. ValueError names what is wrong.
    """
    if str(path_or_id).startswith("random:"):
        return random_model(str(path_or_id), dtype), hub.load_tokenizer(hub.DEMO)
    directory = hub.find(path_or_id)
    model, tokenizer = load_model(directory, dtype, adapter), hub.load_tokenizer(directory)
    if len(tokenizer) > model.config.vocab_size:
        raise ValueError(
            f"{directory}: the tokenizer has {len(tokenizer)} ids, the model only {model.config.vocab_size}"
        )
    return model, tokenizer


def save(model: Model, directory: str | Path, tokenizer: Any) -> None:
    """
    Writes the model un-fused, with configuration and tokenizer, so that mlx_lm and transformers load it.

    Raises ValueError where shards of another model lie, which readers would load with or instead of this one.
    """
    directory, config = Path(directory), model.config
    directory.mkdir(parents=True, exist_ok=True)
    if foreign := sorted(p.name for p in directory.glob("model*.safetensors*") if p.name != "model.safetensors"):
        raise ValueError(f"{directory} holds {foreign[0]} of another model; save to a new directory")
    weights = hub.unfuse_weights(dict(tree_flatten(model.parameters())), config)
    mx.save_safetensors(str(directory / "model.safetensors"), weights, metadata={"format": "pt"})
    # Rope goes out in the older of its two layouts, since mlx_lm's Qwen2 knows no other, and what has a default is
    # spelled out, since the defaults of mlx_lm and transformers differ.
    raw = {key: value for key, value in config.raw.items() if key not in ("torch_dtype", "rope_parameters")}
    raw |= {
        "dtype": str(model.head_weight.dtype).removeprefix("mlx.core."),
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_position_embeddings,
        "tie_word_embeddings": config.tie_word_embeddings,
        "rope_theta": config.rope_theta,
        "rope_scaling": config.rope_scaling and {"rope_type": "yarn", **config.rope_scaling},
        "eos_token_id": list(config.eos_ids) or None,
    }
    (directory / "config.json").write_text(json.dumps(raw, indent=2) + "\n")
    generation = {"eos_token_id": raw["eos_token_id"], "do_sample": True, "temperature": 1.0}
    (directory / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    tokenizer.save_pretrained(str(directory))


# ---- the doctor


def rope_error(dtype: mx.Dtype) -> float:
    """
    The largest error of one token a row at three positions, in float64.

    MLX before 0.32 rotated such batches wrongly on Metal.
    """
    rope, offsets = Rope(random_config("random:0.6b")), [0, 40, 700]
    x = normal(3, 1, 3, rope.head_dim, dtype=dtype)
    queries, _, _ = norm_rope_ref(x, 1, None, 0.0, rope, rope.at(mx.array(offsets), 1))
    low, high = np.split(np.array(x.astype(mx.float32)).astype(np.float64)[:, 0, :1], 2, axis=-1)
    angles = np.array(offsets)[:, None, None] * rope.frequencies
    parts = [low * np.cos(angles) - high * np.sin(angles), high * np.cos(angles) + low * np.sin(angles)]
    return float(np.abs(np.array(queries.astype(mx.float32))[:, :, 0] - np.concatenate(parts, axis=-1)).max())


def doctor() -> tuple[list[str], bool]:
    """What a user of this machine should know, a line each, and whether all is well."""
    found, dtype = telemetry.environment(cpu_blas.description), default_dtype()
    versions = ", ".join(f"{name} {number}" for name, number in found["versions"].items())
    error, limit = rope_error(dtype), 10 * gpu.TOLERANCES[dtype]
    lines = [
        f"versions: Python {found['python']}, {versions}",
        f"machine: {found['machine']}, {found['platform']}, {found['num_cpus']} CPUs",
        f"memory: {memory.of_device() / 2**30:.1f} GB for this process",
        f"device: {gpu.backend() or 'cpu'}, where models are {str(dtype).removeprefix('mlx.core.')}",
        f"BLAS: {found['blas']}",
        f"rope: {'right' if error < limit else 'WRONG'}, within {error:.1g} of its formula at positions 0, 40 and 700",
        *hub.describe_cache(),
        f"kernels: GWEN_KERNELS is {os.environ.get('GWEN_KERNELS') or 'on'}, verdicts are in {gpu.cache_directory()}",
    ]
    kernels, agree = gpu.report(dtype)
    return [*lines, *(f"  {line}" for line in kernels)], agree and error < limit


def main(argv: list[str] | None = None) -> None:
    parser = telemetry.Parser("gwen.py", "Look at this machine: versions, device, BLAS, memory, hub, kernels.")
    parser.add_argument("--doctor", action="store_true", required=True, help="what runs here, and how fast")
    parser.parse_args(argv)
    try:
        lines, well = doctor()
    except ValueError as error:
        telemetry.fail(error)
    print("\n".join(lines))
    if not well:
        telemetry.fail("something is wrong here; the lines above say what")


if __name__ == "__main__":
    main()
