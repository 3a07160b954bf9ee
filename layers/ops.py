"""
The computation between a layer's matmuls, as MLX expressions and as equivalent GPU kernels.

Each operation has an expression, a kernel and a launch function, in this order. The expression,
`NAME_ref`, defines what is computed. The kernel is in the `.metal` file named after the operation.
The launch function runs the kernel on a suitable grid of threads. `kernels.make_op` returns the
`Op` that chooses between the kernel and the expression. Attention is in layers/attention.py, and
the layer that uses all of these operations is in gwen.py. MLX provides the matmuls.

Axes: N rows, L positions, M = N * L, C hidden dimensions, H query heads, K key/value heads, D
dimensions per head, F width of the MLP, R rank, W an arbitrary width.
"""

import math
from pathlib import Path
from typing import Any, NamedTuple

import cpu_blas  # noqa: F401  (before mlx)
import mlx.core as mx
import numpy as np

from machine import cpu, gpu, kernels

HERE = Path(__file__).parent
# The number of rows per part in `transposed_product`. With fewer rows per part, more partial sums
# are written and read.
ROWS_PER_PART = 512


# ---- activations


def silu(x: mx.array) -> mx.array:
    """x * sigmoid(x)."""
    if gpu.on_gpu():
        return x * mx.sigmoid(x)
    out, _ = _silu_and_exp_of_minus_x(x)
    return out


def _silu_and_exp_of_minus_x(x: mx.array) -> tuple[mx.array, mx.array]:
    """
    silu(x) on a CPU, and the float32 value of e**-x from which it is computed.

    Computing silu(x) in this way is three times as fast as with `mx.sigmoid`. Values of x below -40
    are raised to -40, where silu(x) is 0 to within 1e-13. Otherwise, e**-x would overflow at
    x = -89, and the gradient would be inf * 0. x is converted to float32 because `cpu.exp` computes
    a power of two, which in 16 bits would be off by 2%.
    """
    wide = x.astype(mx.float32)
    power = cpu.exp(-mx.maximum(wide, -40))
    return (wide / (1 + power)).astype(x.dtype), power


def swiglu_ref(gate_up: mx.array) -> mx.array:
    """
    silu(gate) * up, where one array contains gate and up, (..., 2F) -> (..., F).

    Source: arXiv:2002.05202.
    """
    gate, up = mx.split(gate_up, 2, axis=-1)
    if gpu.on_gpu():
        return silu(gate) * up

    def swiglu_forward(gate: mx.array, up: mx.array) -> tuple[mx.array, mx.array]:
        out, power = _silu_and_exp_of_minus_x(gate)
        return out * up, power

    def swiglu_backward(primals: Any, cotangents: Any, results: Any) -> tuple[mx.array, mx.array]:
        """
        The gradient, bit for bit equal to the gradient that autodiff would compute.

        Autodiff would also store silu(gate) and 1 + e**-gate. Without these two arrays, the peak
        memory of an update is 11% lower.
        """
        gate, up = primals
        d_out = cotangents[0]
        power = results[1]
        wide = gate.astype(mx.float32)
        divisor = 1 + power
        d_silu = (d_out * up).astype(mx.float32)
        d_gate = d_silu / divisor + d_silu * wide / (divisor * divisor) * power
        d_up = d_out * (wide / divisor).astype(gate.dtype)
        return d_gate.astype(gate.dtype), d_up

    out: mx.array = gpu.call_with_vjp(swiglu_forward, swiglu_backward, gate, up)[0]
    return out


def swiglu_vjp_ref(gate_up: mx.array, cotangent: mx.array) -> mx.array:
    """The gradient of `swiglu` with respect to `gate_up`, (..., 2F)."""
    _, gradients = mx.vjp(swiglu_ref, [gate_up], [cotangent])
    return gradients[0]


SWIGLU = kernels.Kernel(HERE / "swiglu.metal", "gate_up", "out")
SWIGLU_VJP = kernels.Kernel(HERE / "swiglu_vjp.metal", "gate_up cotangent", "d_gate_up")


def _launch_swiglu(
    kernel: kernels.Kernel, inputs: list[mx.array], output_shape: tuple[int, ...]
) -> mx.array:
    """
    Runs one of the two swiglu kernels.

    inputs: gate_up (..., 2F), and also the cotangent if the kernel computes the gradient.
    """
    gate_up, *cotangents = inputs
    width = gate_up.shape[-1] // 2
    (out,) = kernel(
        [gate_up.reshape(-1, 2 * width), *cotangents],
        [(output_shape, gate_up.dtype)],
        grid=(gate_up.size // 2, 1, 1),
        threadgroup=(256, 1, 1),
        T=gate_up.dtype,
        F=width,
    )
    return out


@kernels.make_op(swiglu_vjp_ref)
def swiglu_vjp(gate_up: mx.array, cotangent: mx.array) -> mx.array:
    """Reads 3F elements per row, each once, and writes 2F elements per row."""
    return _launch_swiglu(SWIGLU_VJP, [gate_up, cotangent], gate_up.shape)


def _swiglu_gradient(
    cotangents: list[mx.array], _: list[mx.array], gate_up: mx.array
) -> list[mx.array]:
    return [swiglu_vjp(gate_up, cotangents[0])]


@kernels.make_op(swiglu_ref, _swiglu_gradient)
def swiglu(gate_up: mx.array) -> mx.array:
    """Reads 2F elements per row, each once, and writes F elements per row."""
    width = gate_up.shape[-1] // 2
    return _launch_swiglu(SWIGLU, [gate_up], (*gate_up.shape[:-1], width))


# ---- the gradient of an adapter


def transposed_product_ref(thin: mx.array, wide: mx.array) -> mx.array:
    """
    thin.T @ wide in float32, (M, R) x (M, W) -> (R, W).

    This product is the gradient of an adapter's matrix. Both factors are 16-bit arrays.
    """
    return thin.astype(mx.float32).T @ wide.astype(mx.float32)


TRANSPOSED_PRODUCT = kernels.Kernel(HERE / "transposed_product.metal", "thin wide", "sums")


@kernels.make_op(transposed_product_ref)
def transposed_product(thin: mx.array, wide: mx.array) -> mx.array:
    """
    Reads `wide` once per 16 columns of `thin`, and writes R * W float32 numbers per 512 rows.

    The numbers written for 512 rows are partial sums, which are added afterwards. For 2,048 rows
    and rank 16, the partial sums take one sixteenth of the memory of `wide`. MLX's matmul would
    round the result to 16 bits.
    """
    num_rows, rank = thin.shape
    width = wide.shape[1]
    num_parts = -(-num_rows // ROWS_PER_PART)
    num_blocks = -(-rank // 16)
    (sums,) = TRANSPOSED_PRODUCT(
        [thin, wide],
        [((num_parts, rank, width), mx.float32)],
        grid=(-(-width // 32) * num_blocks * 256, num_parts, 1),
        threadgroup=(256, 1, 1),
        R=rank,
        BLOCKS=num_blocks,
        ROWS=ROWS_PER_PART,
    )
    return sums.sum(0) if num_parts > 1 else sums[0]


# ---- norms

SumAndRmsNorm = tuple[mx.array, mx.array]


def rms_norm(x: mx.array, weight: mx.array | None, eps: float) -> mx.array:
    """
    x / sqrt(mean(x**2) + eps) * weight over the last axis, computed in float32.

    Source: arXiv:1910.07467.
    """
    if gpu.on_gpu():
        return mx.fast.rms_norm(x, weight, eps)
    wide = x.astype(mx.float32)  # MLX's own CPU implementation needs twice as many operations
    mean_square = mx.square(wide).sum(-1, keepdims=True) * (1 / x.shape[-1])
    out = (wide * mx.rsqrt(mean_square + eps)).astype(x.dtype)
    return out if weight is None else out * weight


def add_norm_ref(x: mx.array, delta: mx.array, weight: mx.array, eps: float) -> SumAndRmsNorm:
    """
    The sum x + delta, which is the residual stream after a sublayer, and the RMS norm of this sum.

    All arrays except the weight have shape (..., C). The next sublayer reads the normalized sum.
    """
    total = x + delta
    return total, rms_norm(total, weight, eps)


def _add_norm_gradient(
    cotangents: list[mx.array],
    results: list[mx.array],
    x: mx.array,
    delta: mx.array,
    weight: mx.array,
    eps: float,
) -> list[mx.array]:
    """
    The gradient of `add_norm`, computed from the stored sum x + delta.

    The gradient of the expression `add_norm_ref` would compute this sum again.
    """
    d_total, d_normed = cotangents
    total = results[0]

    def rms_norm_with_eps(total: mx.array, weight: mx.array) -> mx.array:
        return rms_norm(total, weight, eps)

    _, (d_x, d_weight) = mx.vjp(rms_norm_with_eps, [total, weight], [d_normed])
    d_x = d_x + d_total
    return [d_x, d_x, d_weight]


ADD_NORM = kernels.Kernel(HERE / "add_norm.metal", "x delta weight eps", "total normed")


@kernels.make_op(add_norm_ref, _add_norm_gradient)
def add_norm(x: mx.array, delta: mx.array, weight: mx.array, eps: float) -> SumAndRmsNorm:
    """
    Reads 2C elements per row and writes 2C elements per row, in one launch.

    The expression needs two launches, which read 3C elements per row and write 2C.
    """
    size = x.shape[-1]
    total, normed = ADD_NORM(
        [x, delta, weight, kernels.constant_array(eps)],
        [(x.shape, x.dtype)] * 2,
        grid=(x.size // size * 256, 1, 1),
        threadgroup=(256, 1, 1),
        T=x.dtype,
        C=size,
    )
    return total, normed


# ---- rotary positions


class Rope:
    """
    The rotary position embedding of one model.

    The rotation frequencies are unscaled, or scaled by the method named in `scaling`, which is
    YaRN's or Llama 3's.

    Sources: RoFormer, arXiv:2104.09864; YaRN, arXiv:2309.00071, sections 3.2 and 3.4; for Llama 3,
    `apply_scaling` in https://github.com/meta-llama/llama-models, models/llama3.
    """

    def __init__(self, size: int, theta: float, scaling: dict[str, Any] | None = None):
        """
        Sets the rotation frequencies for the first `size` dimensions of each head.

        Raises KeyError for an unknown `rope_type`.
        """
        self.size = size
        self.magnitude = 1.0  # the factor by which the rotated dimensions are multiplied
        self.frequencies = theta ** (-np.arange(0, size, 2) / size)  # (size / 2,) float64
        if scaling is not None:
            scale_by = {"yarn": self._scale_by_yarn, "llama3": self._scale_by_llama3}
            scale_by[scaling["rope_type"]](theta, scaling)
        self.periods = mx.array((1 / self.frequencies).astype(np.float32))

    def _scale_by_yarn(self, theta: float, scaling: dict[str, Any]) -> None:
        factor = scaling["factor"]
        trained_length = scaling["original_max_position_embeddings"]
        size = self.size

        def pair_index_with_rotations(num_rotations: float) -> float:
            """
            The index of the dimension pair that makes this many rotations within the trained
            context.
            """
            wavelength = trained_length / (num_rotations * 2 * math.pi)
            return size * math.log(wavelength) / (2 * math.log(theta))

        low = max(math.floor(pair_index_with_rotations(scaling["beta_fast"])), 0)
        high = min(math.ceil(pair_index_with_rotations(scaling["beta_slow"])), size - 1)
        pairs = np.arange(size // 2)
        # 0 where a frequency is kept, 1 where the frequency is divided by the factor
        stretched = np.clip((pairs - low) / ((high - low) or 1e-3), 0, 1)
        slowed = self.frequencies / factor
        self.frequencies = self.frequencies * (1 - stretched) + slowed * stretched
        if factor > 1:
            self.magnitude = 0.1 * math.log(factor) + 1

    def _scale_by_llama3(self, _: float, scaling: dict[str, Any]) -> None:
        low = scaling["low_freq_factor"]
        high = scaling["high_freq_factor"]
        trained_length = scaling["original_max_position_embeddings"]
        num_rotations = trained_length * self.frequencies / (2 * math.pi)
        # 1 where a frequency is kept, 0 where the frequency is divided by the factor
        unchanged = np.clip((num_rotations - low) / (high - low), 0, 1)
        slowed = self.frequencies / scaling["factor"]
        self.frequencies = self.frequencies * unchanged + slowed * (1 - unchanged)

    def make_rotation(self, offsets: mx.array, length: int) -> "Rotation":
        """The rotation for `length` tokens per row, which begin at positions `offsets` (N,)."""
        if gpu.on_gpu():
            return Rotation(self, offsets)
        positions = (offsets[:, None] + mx.arange(length)).astype(mx.float32)
        angles = (positions[:, :, None] / self.periods)[:, :, None]  # (N, L, 1, size / 2)
        cos = mx.cos(angles) * self.magnitude
        sin = mx.sin(angles) * self.magnitude
        both_cos = mx.concatenate([cos, cos], axis=-1)
        both_sin = mx.concatenate([-sin, sin], axis=-1)
        return Rotation(self, offsets, both_cos, both_sin)


class Rotation(NamedTuple):
    """
    The rotation of queries and keys by the positions of the tokens in one forward pass.

    `Rope.make_rotation` creates one instance per forward pass, which all layers share.
    """

    rope: Rope
    # (N,) int32: the position of each row's first token; negative positions are padding
    offsets: mx.array
    # (N, L, 1, size) float32; None on a GPU, where a kernel computes the cosines and sines
    cos: mx.array | None = None
    sin: mx.array | None = None  # shaped like `cos`; the first half of the last axis is negated

    def rotate(self, x: mx.array) -> mx.array:
        """
        The array `x` (N, L, heads, D), with the first `size` dimensions of each head rotated.

        Dimension i is rotated together with dimension i + size / 2.
        """
        rope = self.rope
        if self.cos is None or self.sin is None:
            if rope.magnitude != 1.0:
                x = x * rope.magnitude
            rotated = mx.fast.rope(
                x.transpose(0, 2, 1, 3),
                rope.size,
                traditional=False,
                base=None,
                scale=1.0,
                offset=self.offsets,
                freqs=rope.periods,
            )
            return rotated.transpose(0, 2, 1, 3)

        if rope.size < x.shape[-1]:
            first_dims, rest = mx.split(x, [rope.size], axis=-1)
            return mx.concatenate([self.rotate(first_dims), rest], axis=-1)
        low, high = mx.split(x, 2, axis=-1)
        swapped = mx.concatenate([high, low], axis=-1)
        return (x * self.cos + swapped * self.sin).astype(x.dtype)


# The weights (D,) of the query norm and of the key norm; None if the model has no such norms.
NormWeights = tuple[mx.array, mx.array] | None
# Queries (N, H, L, D), keys (N, K, L, D) and values (N, K, L, D).
QueriesKeysValues = tuple[mx.array, mx.array, mx.array]


def norm_rope_ref(
    qkv: mx.array, num_heads: int, weights: NormWeights, eps: float, rotation: Rotation | None
) -> QueriesKeysValues:
    """
    Queries, keys and values from the fused projection (N, L, H + 2K, D).

    If `weights` is given, queries and keys are first RMS-normalized over D. If `rotation` is given,
    the queries and keys are then rotated.
    """
    num_kv_heads = (qkv.shape[2] - num_heads) // 2
    size = qkv.shape[-1]
    queries_keys, values = mx.split(qkv, [num_heads + num_kv_heads], axis=2)
    if weights is not None:
        query_weight, key_weight = weights
        weight = mx.concatenate(
            [
                mx.broadcast_to(query_weight, (num_heads, size)),
                mx.broadcast_to(key_weight, (num_kv_heads, size)),
            ]
        )
        queries_keys = rms_norm(queries_keys, None, eps) * weight
    if rotation is not None:
        queries_keys = rotation.rotate(queries_keys)
    queries, keys = mx.split(queries_keys, [num_heads], axis=2)
    return queries.transpose(0, 2, 1, 3), keys.transpose(0, 2, 1, 3), values.transpose(0, 2, 1, 3)


NORM_ROPE = kernels.Kernel(
    HERE / "norm_rope.metal",
    "qkv query_weight key_weight eps periods magnitude offsets",
    "queries keys",
)


@kernels.make_op(norm_rope_ref)
def norm_rope(
    qkv: mx.array, num_heads: int, weights: NormWeights, eps: float, rotation: Rotation | None
) -> QueriesKeysValues:
    """
    Reads (H + K) D elements per token and writes the same number, in one launch.

    No kernel could read or write fewer elements. MLX's own operations would need four launches and
    two copies, because MLX's norm first copies a part of the fused projection. The values are
    returned as a view of the projection. An MLX kernel can write only to new arrays, so another
    launch copies the keys to the cache.
    """
    num_rows, length, all_heads, size = qkv.shape
    assert rotation is not None, "rotation is None, but the norm_rope kernel always rotates"
    rope = rotation.rope
    num_kv_heads = (all_heads - num_heads) // 2
    num_rotated = num_heads + num_kv_heads  # the number of heads that are rotated
    eps_array = kernels.constant_array(eps)
    magnitude = kernels.constant_array(rope.magnitude)
    # without norms, the kernel takes two arrays in place of the weights but does not read them
    query_weight, key_weight = weights or (eps_array, magnitude)
    queries, keys = NORM_ROPE(
        [qkv, query_weight, key_weight, eps_array, rope.periods, magnitude, rotation.offsets],
        [
            ((num_rows, num_heads, length, size), qkv.dtype),
            ((num_rows, num_kv_heads, length, size), qkv.dtype),
        ],
        grid=(num_rows * length * 32, -(-num_rotated // 8) * 8, 1),
        threadgroup=(32, 8, 1),
        T=qkv.dtype,
        H=num_heads,
        K=num_kv_heads,
        D=size,
        TURNED=rope.size,
        NORMED=weights is not None,
    )
    return queries, keys, qkv[:, :, num_rotated:].transpose(0, 2, 1, 3)
