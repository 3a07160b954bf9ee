"""
Compares MLX's own matmuls and masked attention with references, at the sizes of a model.

On Macs, some MLX releases or builds of 2026 silently gave wrong results for products of more than
8 rows (mlx #3585, #3586), and for products with long sums and 2048^2 numbers in the result (#3797).
Others rounded float32 products to 11 bits (#4411). Our own kernels and the rotary embedding are
checked in machine/kernels.py.

Axes: M rows, C inputs and F outputs of a weight; N rows, H query heads, K key/value heads, L
queries, S keys, D dimensions per head.
"""

import functools
from typing import Any, NamedTuple

import cpu_blas  # noqa: F401  (before mlx)
import mlx.core as mx
import numpy as np

from layers import attention
from layers.ops import QueriesKeysValues
from machine import kernels

# The tested numbers of rows, for one token, one decode step, and one forward pass of an update.
PRODUCT_ROWS = (1, 64, 2048)
MOST_ELEMENTS = 2**27  # the largest size of a product's result, in elements, to limit the memory
SAMPLES_PER_AXIS = 16  # how many rows and columns of a result are compared

# The norm of the largest keys of Qwen2.5-1.5B. For keys this large, float16 scores are off by 2%
# and bfloat16 scores by 15%.
KEY_NORM = 779


def to_float64(x: mx.array) -> np.ndarray:
    return np.array(x.astype(mx.float32)).astype(np.float64)


def evenly_spaced_slice(axis_size: int) -> slice:
    """A slice that selects about SAMPLES_PER_AXIS indices, evenly spaced over an axis."""
    return slice(None, None, max(axis_size // SAMPLES_PER_AXIS, 1))


def measure_product_error(weight: mx.array, num_rows: int) -> float:
    """The largest relative error of the products x @ W.T and y @ W, for a weight W (F, C)."""
    worst = 0.0
    for factor in (weight.T, weight):
        x = kernels.random_normal_array(num_rows, factor.shape[0], dtype=weight.dtype)
        sampled_rows = evenly_spaced_slice(num_rows)
        sampled_columns = evenly_spaced_slice(factor.shape[1])
        result = to_float64((x @ factor)[sampled_rows, sampled_columns])
        exact = to_float64(x[sampled_rows]) @ to_float64(factor[:, sampled_columns])
        size = np.sqrt(np.square(exact).mean()) + np.abs(exact)
        error = np.abs(result - exact) / size
        error = np.where(np.isfinite(result), error, np.inf)
        worst = max(worst, float(error.max()))
    return worst


def make_attention_inputs_with_large_keys(
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: mx.Dtype,
    num_queries: int,
    num_keys: int,
) -> QueriesKeysValues:
    """
    Random queries (2, H, L, D), keys and values (2, K, S, D).

    The norm of each key is about KEY_NORM.
    """
    queries = kernels.random_normal_array(2, num_heads, num_queries, head_dim, dtype=dtype)
    keys = kernels.random_normal_array(
        2, num_kv_heads, num_keys, head_dim, dtype=mx.float32, seed=1
    )
    values = kernels.random_normal_array(2, num_kv_heads, num_keys, head_dim, dtype=dtype, seed=2)
    bias = keys[:1, :, :1]
    bias_norm = mx.linalg.norm(bias, axis=-1, keepdims=True)
    keys = (keys + KEY_NORM * bias / bias_norm).astype(dtype)
    return queries, keys, values


def largest_relative_attention_error(
    num_heads: int, num_kv_heads: int, head_dim: int, dtype: mx.Dtype
) -> float:
    """
    The largest relative error of attention for 1 and for 128 queries.

    Attention is computed while a gradient is traced, as in an update. The relative error is the
    norm of the error divided by the norm of the float32 result.
    """
    worst = 0.0
    num_keys = 160
    for length in (1, 128):
        queries, keys, values = make_attention_inputs_with_large_keys(
            num_heads, num_kv_heads, head_dim, dtype, length, num_keys
        )
        wide_queries = queries.astype(mx.float32)
        wide_keys = keys.astype(mx.float32)
        wide_values = values.astype(mx.float32)
        causal = mx.tri(length, num_keys, num_keys - length, dtype=mx.bool_)
        padded = causal & (mx.arange(num_keys) > 20)
        masks: list[mx.array | str] = ["causal", mx.stack([causal, padded])[:, None]]
        for mask in masks:
            attend = functools.partial(attention.attention, mask=mask)
            (out,), _ = mx.vjp(attend, [queries, keys, values], [queries])
            exact = attention.attention_ref(wide_queries, wide_keys, wide_values, mask)
            error: Any = (mx.linalg.norm(out - exact) / mx.linalg.norm(exact)).item()
            worst = max(worst, error if np.isfinite(error) else np.inf)
    return worst


class ArithmeticReport(NamedTuple):
    """The errors of MLX's arithmetic as a line of text, and whether all are within tolerance."""

    text: str
    is_right: bool


def check_mlx_arithmetic(weights: list[mx.array], heads: tuple[int, int, int]) -> ArithmeticReport:
    """
    Checks MLX's products with one weight of each shape, and MLX's masked attention.

    `heads` contains the number of query heads, the number of key/value heads, and the head size.
    Each figure in the returned text is the largest error divided by the dtype's tolerance, so it
    should be at most 1.
    """
    dtype = weights[0].dtype
    num_heads, num_kv_heads, head_dim = heads
    weight_of_shape = {weight.shape: weight for weight in weights}
    smallest = min(weights, key=lambda weight: weight.size).astype(mx.float32)

    errors = {"products": 0.0, "float32 products": 0.0}
    for weight in (*weight_of_shape.values(), smallest):
        kind = "float32 products" if weight.dtype == mx.float32 else "products"
        for num_rows in PRODUCT_ROWS:
            if num_rows * max(weight.shape) <= MOST_ELEMENTS:
                error = measure_product_error(weight, num_rows) / kernels.TOLERANCES[weight.dtype]
                errors[kind] = max(errors[kind], error)
    attention_error = largest_relative_attention_error(num_heads, num_kv_heads, head_dim, dtype)
    errors["masked attention"] = attention_error / kernels.TOLERANCES[dtype]

    is_right = max(errors.values()) <= 1
    verdict = "right" if is_right else "WRONG"
    type_name = str(dtype).rpartition(".")[2]
    figures = ", ".join(f"{name} {error:.2g}" for name, error in errors.items() if error)
    text = f"{verdict}; errors divided by the tolerance for {type_name} (at most 1): {figures}"
    return ArithmeticReport(text, is_right)
