"""
Compares MLX's own matmuls and masked attention with references, at a model's sizes.

On Macs, both were silently wrong in some release or build of 2026: products of more than 8 rows
(mlx #3585, #3586), products with 2048^2 results and long sums (#3797), and float32 products rounded
to 11 bits (#4411). Our own kernels and the rotation are checked in machine/kernels.py.

Axes: M rows, C inputs and F outputs of a weight; N rows, H query heads, K kv heads, L queries, S
keys, D head dim.
"""

import functools
from typing import Any

import mlx.core as mx
import numpy as np

from layers import attention
from machine import kernels

# rows of a product: those of one token, of a decode step, and of a pass of an update
PRODUCT_ROWS = (1, 64, 2048)
MOST_LOGITS = 2**27  # the most numbers in a product's result, to bound the memory
SAMPLES_PER_AXIS = 16  # how many rows and columns of a result are compared
# The norm of the largest keys of Qwen2.5-1.5B. With it, scores in 16 bits are off by 2% in float16
# and by 15% in bfloat16.
KEY_NORM = 779


def to_float64(x: mx.array) -> np.ndarray:
    return np.array(x.astype(mx.float32)).astype(np.float64)


def spread_slice(size: int) -> slice:
    """About SAMPLES_PER_AXIS indices, spread over an axis of this size."""
    return slice(None, None, max(size // SAMPLES_PER_AXIS, 1))


def measure_product_error(weight: mx.array, num_rows: int) -> float:
    """
    The largest error of the products x @ W.T and y @ W with a weight (F, C).

    The error is relative to the size of the result.
    """
    worst = 0.0
    for factor in (weight.T, weight):
        x = kernels.normal_array(num_rows, factor.shape[0], dtype=weight.dtype)
        sampled_rows = spread_slice(num_rows)
        sampled_columns = spread_slice(factor.shape[1])
        result = to_float64((x @ factor)[sampled_rows, sampled_columns])
        exact = to_float64(x[sampled_rows]) @ to_float64(factor[:, sampled_columns])
        size = np.sqrt(np.square(exact).mean()) + np.abs(exact)
        error = np.abs(result - exact) / size
        error = np.where(np.isfinite(result), error, np.inf)
        worst = max(worst, float(error.max()))
    return worst


def make_attention_inputs(
    num_heads: int, num_kv_heads: int, size: int, dtype: mx.Dtype, length: int, num_keys: int
) -> tuple[mx.array, mx.array, mx.array]:
    """Queries (2, H, L, D), keys and values (2, K, S, D). The norm of keys is about KEY_NORM."""
    queries = kernels.normal_array(2, num_heads, length, size, dtype=dtype)
    keys = kernels.normal_array(2, num_kv_heads, num_keys, size, dtype=mx.float32, seed=1)
    values = kernels.normal_array(2, num_kv_heads, num_keys, size, dtype=dtype, seed=2)
    bias = keys[:1, :, :1]
    bias_norm = mx.linalg.norm(bias, axis=-1, keepdims=True)
    keys = (keys + KEY_NORM * bias / bias_norm).astype(dtype)
    return queries, keys, values


def measure_attention_error(num_heads: int, num_kv_heads: int, size: int, dtype: mx.Dtype) -> float:
    """
    The largest error of attention while a gradient is traced, for one query and for many.

    The error is a norm, divided by the norm of the float32 result.
    """
    worst = 0.0
    num_keys = 160
    for length in (1, 128):
        queries, keys, values = make_attention_inputs(
            num_heads, num_kv_heads, size, dtype, length, num_keys
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


def check_arithmetic(weights: list[mx.array], heads: tuple[int, int, int]) -> tuple[str, bool]:
    """
    Checks MLX's own arithmetic: products with weights of each shape, and masked attention.

    heads: (H, K, D). Returns a line of text, and whether the arithmetic is right. Each figure in
    the line is the largest error divided by the type's tolerance. Figures up to 1 are right.
    """
    dtype = weights[0].dtype
    num_heads, num_kv_heads, head_dim = heads
    weight_of_shape = {weight.shape: weight for weight in weights}
    smallest = min(weights, key=lambda weight: weight.size).astype(mx.float32)

    errors = {"products": 0.0, "float32 products": 0.0}
    for weight in (*weight_of_shape.values(), smallest):
        kind = "float32 products" if weight.dtype == mx.float32 else "products"
        for rows in PRODUCT_ROWS:
            if rows * max(weight.shape) <= MOST_LOGITS:
                error = measure_product_error(weight, rows) / kernels.TOLERANCES[weight.dtype]
                errors[kind] = max(errors[kind], error)
    attention_error = measure_attention_error(num_heads, num_kv_heads, head_dim, dtype)
    errors["masked attention"] = attention_error / kernels.TOLERANCES[dtype]

    is_right = max(errors.values()) <= 1
    verdict = "right" if is_right else "WRONG"
    type_name = str(dtype).rpartition(".")[2]
    figures = ", ".join(f"{name} {error:.2g}" for name, error in errors.items() if error)
    text = f"{verdict}; errors as fractions of the tolerance of {type_name}, at most 1: {figures}"
    return text, is_right
