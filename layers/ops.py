"""
What a layer computes between its matmuls, each expression beside the kernel that equals it.

Each comes in this order: the expression, which defines what is computed; the kernel, in the `.metal` file of its name;
the call that gives it a grid, which `kernels.kernel_of` makes the `Op` that chooses between the two. Attention is in
attention.py, the layer that joins all of it in gwen.py; matmuls are MLX's.

Axes: N rows, L positions, M = N * L, C hidden, H query heads, K kv heads, D head dim, F mlp width, R rank.
"""

import math
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from machine import cpu, gpu, kernels

HERE = Path(__file__).parent


def silu(x: mx.array) -> mx.array:
    """x * sigmoid(x)."""
    return x * mx.sigmoid(x) if gpu.on_gpu() else _silu_and_power(x)[0]


def _silu_and_power(x: mx.array) -> tuple[mx.array, mx.array]:
    """
    silu for a CPU, three times as fast as by mx.sigmoid, and the float32 e**-x in it.

    Below -40 silu is 0 to 1e-13, but exp would overflow at 89 and the gradient would be inf * 0; in 16 bits the power
    of two would be off by 2%.
    """
    wide = x.astype(mx.float32)
    power = cpu.exp(-mx.maximum(wide, -40))
    return (wide / (1 + power)).astype(x.dtype), power


def swiglu_ref(gate_up: mx.array) -> mx.array:
    """silu(gate) * up of the fused projection, (..., 2F) -> (..., F). Source: arXiv:2002.05202."""
    gate, up = mx.split(gate_up, 2, axis=-1)
    if gpu.on_gpu():
        return silu(gate) * up

    def forward(gate: mx.array, up: mx.array) -> tuple[mx.array, mx.array]:
        out, power = _silu_and_power(gate)
        return out * up, power

    def backward(primals: Any, cotangents: Any, results: Any) -> tuple[mx.array, mx.array]:
        """To the bit that of autodiff, for which silu and 1 + e**-gate wait too: an update's peak is 0.89 of it."""
        (gate, up), d_out, power = primals, cotangents[0], results[1]
        wide, below, d_silu = gate.astype(mx.float32), 1 + power, (d_out * up).astype(mx.float32)
        d_gate = d_silu / below + d_silu * wide / (below * below) * power
        return d_gate.astype(gate.dtype), d_out * (wide / below).astype(gate.dtype)

    out: mx.array = gpu.differentiable(forward, backward, gate, up)[0]
    return out


def swiglu_vjp_ref(gate_up: mx.array, cotangent: mx.array) -> mx.array:
    """The gradient of `swiglu`, (..., 2F)."""
    return mx.vjp(swiglu_ref, [gate_up], [cotangent])[1][0]


SWIGLU = kernels.Kernel(HERE / "swiglu.metal", "gate_up", "out")
SWIGLU_VJP = kernels.Kernel(HERE / "swiglu_vjp.metal", "gate_up cotangent", "d_gate_up")


def _launch_swiglu(gate_up: mx.array, *cotangent: mx.array) -> mx.array:
    """Reads each element once and writes each once: 2F a row and F, for the gradient 3F and 2F."""
    width, dtype = gate_up.shape[-1] // 2, gate_up.dtype
    shape = gate_up.shape if cotangent else (*gate_up.shape[:-1], width)
    return (SWIGLU_VJP if cotangent else SWIGLU)(
        [gate_up.reshape(-1, 2 * width), *cotangent],
        [(shape, dtype)],
        grid=(gate_up.size // 2, 1, 1),
        threadgroup=(256, 1, 1),
        T=dtype,
        F=width,
    )[0]


@kernels.kernel_of(swiglu_vjp_ref)
def swiglu_vjp(gate_up: mx.array, cotangent: mx.array) -> mx.array:
    return _launch_swiglu(gate_up, cotangent)


@kernels.kernel_of(swiglu_ref, lambda d, _, gate_up: [swiglu_vjp(gate_up, d[0])])
def swiglu(gate_up: mx.array) -> mx.array:
    return _launch_swiglu(gate_up)


def tall_product_ref(thin: mx.array, wide: mx.array) -> mx.array:
    """thin.T @ wide in float32, (M, R) x (M, W) -> (R, W): the gradient of an adapter's matrix, of 16-bit factors."""
    return thin.astype(mx.float32).T @ wide.astype(mx.float32)


ROWS_OF_A_PART = 512  # of `tall_product`: by fewer rows there are more partial sums to write and read

TALL_PRODUCT = kernels.Kernel(HERE / "tall_product.metal", "thin wide", "sums")


@kernels.kernel_of(tall_product_ref)
def tall_product(thin: mx.array, wide: mx.array) -> mx.array:
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


def rms_norm(x: mx.array, weight: mx.array | None, eps: float) -> mx.array:
    """x / sqrt(mean(x**2) + eps) * weight over the last axis, in float32 inside. Source: arXiv:1910.07467."""
    if gpu.on_gpu():
        return mx.fast.rms_norm(x, weight, eps)
    wide = x.astype(mx.float32)  # MLX's own expression for a CPU has twice the operations
    out = (wide * mx.rsqrt(mx.square(wide).sum(-1, keepdims=True) * (1 / x.shape[-1]) + eps)).astype(x.dtype)
    return out if weight is None else out * weight


def add_norm_ref(x: mx.array, delta: mx.array, weight: mx.array, eps: float) -> tuple[mx.array, mx.array]:
    """The residual stream after a sublayer and what the next one reads: x + delta, and its RMS-norm; all (..., C)."""
    total = x + delta
    return total, rms_norm(total, weight, eps)


def _gradient_of_add_norm(
    cotangents: list[mx.array], results: list[mx.array], x: mx.array, delta: mx.array, weight: mx.array, eps: float
) -> list[mx.array]:
    """From the sum that is held, which the expression's own gradient would make again."""
    _, (d_x, d_weight) = mx.vjp(lambda x, w: rms_norm(x, w, eps), [results[0], weight], [cotangents[1]])
    d_x = d_x + cotangents[0]
    return [d_x, d_x, d_weight]


ADD_NORM = kernels.Kernel(HERE / "add_norm.metal", "x delta weight eps", "total normed")


@kernels.kernel_of(add_norm_ref, _gradient_of_add_norm)
def add_norm(x: mx.array, delta: mx.array, weight: mx.array, eps: float) -> tuple[mx.array, mx.array]:
    """Reads 2C elements a row and writes 2C in one launch; the expression, in two, reads 3C and writes 2C."""
    size, dtype = x.shape[-1], x.dtype
    total, normed = ADD_NORM(
        [x, delta, weight, kernels.constant_array(eps)],
        [(x.shape, dtype)] * 2,
        grid=(x.size // size * 256, 1, 1),
        threadgroup=(256, 1, 1),
        T=dtype,
        C=size,
    )
    return total, normed


class Rope:
    """
    Rotary positions of one model: plain, or with the `scaling` of its configuration, YaRN's or Llama 3's.

    Source: RoFormer, arXiv:2104.09864; YaRN, arXiv:2309.00071, section 3.2 and 3.4; for Llama 3 `apply_scaling` in
    https://github.com/meta-llama/llama-models, models/llama3.
    """

    def __init__(self, size: int, theta: float, scaling: dict[str, Any] | None = None):
        self.size, self.magnitude = size, 1.0  # the first dims of a head that are rotated
        self.frequencies = theta ** (-np.arange(0, size, 2) / size)  # (size / 2,) float64
        if scaling is not None:
            {"yarn": self._make_yarn, "llama3": self._make_llama3}[scaling["rope_type"]](theta, scaling)
        self.periods = mx.array((1 / self.frequencies).astype(np.float32))

    def _make_yarn(self, theta: float, scaling: dict[str, Any]) -> None:
        factor, trained, dims = scaling["factor"], scaling["original_max_position_embeddings"], self.size

        def dim_of(num_rotations: float) -> float:  # the pair that turns that often over the trained context
            return dims * math.log(trained / (num_rotations * 2 * math.pi)) / (2 * math.log(theta))

        low = max(math.floor(dim_of(scaling["beta_fast"])), 0)
        high = min(math.ceil(dim_of(scaling["beta_slow"])), dims - 1)
        stretched = np.clip((np.arange(dims // 2) - low) / ((high - low) or 1e-3), 0, 1)  # 0: keep, 1: interpolate
        self.frequencies = self.frequencies * (1 - stretched) + self.frequencies / factor * stretched
        self.magnitude = 0.1 * math.log(factor) + 1 if factor > 1 else 1.0

    def _make_llama3(self, _: float, scaling: dict[str, Any]) -> None:
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        rotations = scaling["original_max_position_embeddings"] * self.frequencies / (2 * math.pi)
        kept = np.clip((rotations - low) / (high - low), 0, 1)  # 1: keep, 0: interpolate
        self.frequencies = self.frequencies * kept + self.frequencies / scaling["factor"] * (1 - kept)

    def make_rotation(self, offsets: mx.array, length: int) -> "Rotation":
        """The rotation of `length` tokens a row that begin at `offsets`, (N,) int32."""
        if gpu.on_gpu():
            return Rotation(self, offsets)
        positions = (offsets[:, None] + mx.arange(length)).astype(mx.float32)
        angles = (positions[:, :, None] / self.periods)[:, :, None]  # (N, L, 1, size / 2)
        cos, sin = mx.cos(angles) * self.magnitude, mx.sin(angles) * self.magnitude
        return Rotation(self, offsets, mx.concatenate([cos, cos], axis=-1), mx.concatenate([-sin, sin], axis=-1))


class Rotation(NamedTuple):
    """Where the tokens of a forward pass stand; made once, by `Rope.at`, and used by every layer."""

    rope: Rope
    offsets: mx.array  # (N,) int32 position of each row's first token; negative ones are padding
    cos: mx.array | None = None  # (N, L, 1, size) float32, and None on a GPU, where a kernel makes them
    sin: mx.array | None = None  # with the sign that its half of `size` takes

    def rotate(self, x: mx.array) -> mx.array:
        """Rotates the first dims of (N, L, heads, D): pairs are i and i + size / 2."""
        if self.cos is None or self.sin is None:
            x = x if self.rope.magnitude == 1.0 else x * self.rope.magnitude
            how: Any = {"traditional": False, "base": None, "scale": 1.0, "freqs": self.rope.periods}
            rotated = mx.fast.rope(x.transpose(0, 2, 1, 3), self.rope.size, offset=self.offsets, **how)
            return rotated.transpose(0, 2, 1, 3)
        if self.rope.size < x.shape[-1]:
            turned, rest = mx.split(x, [self.rope.size], axis=-1)
            return mx.concatenate([self.rotate(turned), rest], axis=-1)
        low, high = mx.split(x, 2, axis=-1)
        return (x * self.cos + mx.concatenate([high, low], axis=-1) * self.sin).astype(x.dtype)


Weights = tuple[mx.array, mx.array] | None  # (D,) of the norms of queries and keys, where the family has them
Heads = tuple[mx.array, mx.array, mx.array]  # queries (N, H, L, D), keys and values (N, K, L, D)


def norm_rope_ref(qkv: mx.array, num_heads: int, weights: Weights, eps: float, rotation: Rotation | None) -> Heads:
    """
    Queries, keys and values of the fused projection (N, L, H + 2K, D).

    Queries and keys are rotated, in a layer with positions, and RMS-normalized over D before, where there are weights.
    """
    num_kv_heads, size = (qkv.shape[2] - num_heads) // 2, qkv.shape[-1]
    turned, values = mx.split(qkv, [num_heads + num_kv_heads], axis=2)
    if weights is not None:
        counts = num_heads, num_kv_heads
        weight = mx.concatenate([mx.broadcast_to(w, (n, size)) for w, n in zip(weights, counts, strict=True)])
        turned = rms_norm(turned, None, eps) * weight
    if rotation is not None:
        turned = rotation.rotate(turned)
    queries, keys = mx.split(turned, [num_heads], axis=2)
    return queries.transpose(0, 2, 1, 3), keys.transpose(0, 2, 1, 3), values.transpose(0, 2, 1, 3)


NORM_ROPE = kernels.Kernel(
    HERE / "norm_rope.metal", "qkv query_weight key_weight eps periods magnitude offsets", "queries keys"
)


@kernels.kernel_of(norm_rope_ref)
def norm_rope(qkv: mx.array, num_heads: int, weights: Weights, eps: float, rotation: Rotation | None) -> Heads:
    """
    Reads (H + K) D elements a token and writes as many, the least there is, in one launch for four and two copies:
    MLX's norm copies a part of the fused projection first. Values are a view. A kernel of MLX writes to arrays of its
    own only, so the cache takes the keys in by a launch of its own.
    """
    num_rows, length, all_heads, size = qkv.shape
    assert rotation is not None, "without positions there is nothing to compute"
    num_kv_heads, dtype = (all_heads - num_heads) // 2, qkv.dtype
    num_turned = num_heads + num_kv_heads
    scalars = kernels.constant_array(eps), kernels.constant_array(rotation.rope.magnitude)
    queries, keys = NORM_ROPE(
        [qkv, *(weights or scalars), scalars[0], rotation.rope.periods, scalars[1], rotation.offsets],
        [((num_rows, count, length, size), dtype) for count in (num_heads, num_kv_heads)],
        grid=(num_rows * length * 32, -(-num_turned // 8) * 8, 1),
        threadgroup=(32, 8, 1),
        T=dtype,
        H=num_heads,
        K=num_kv_heads,
        D=size,
        TURNED=rotation.rope.size,
        NORMED=weights is not None,
    )
    return queries, keys, qkv[:, :, num_turned:].transpose(0, 2, 1, 3)
