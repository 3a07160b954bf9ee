"""
MLX's own products and masked attention at a model's sizes, against float64.

On Macs both were silently wrong in some release or build of 2026: products of more than 8 rows (mlx #3585, #3586), of
2048^2 results and long sums (#3797), float32 rounded to 11 bits (#4411). Left out: kernels of ours and the rotation
beside them, which machine/kernels.py compares.

Axes: M rows, C inputs and F outputs of a weight; N rows, H query heads, K kv heads, L queries, S keys, D head dim.
"""

import functools
from typing import Any

import mlx.core as mx
import numpy as np

from layers import attention
from machine import kernels

ROWS = (1, 64, 2048)  # of a product: one token, a decode step, a pass of an update
LOOKED_AT = 16  # rows and columns of a result, spread over all of it


def to_float32(x: mx.array) -> np.ndarray:
    return np.array(x.astype(mx.float32)).astype(np.float64)


def measure_product_error(weight: mx.array, rows: int) -> float:
    """The largest error of x @ W.T, and of the way back y @ W, of (F, C) weights; as a share of a result's size."""
    worst = 0.0
    for factor in (weight.T, weight):
        x = kernels.normal_array(rows, factor.shape[0], dtype=weight.dtype)
        down, across = (slice(None, None, max(size // LOOKED_AT, 1)) for size in (rows, factor.shape[1]))
        found, exact = to_float32((x @ factor)[down, across]), to_float32(x[down]) @ to_float32(factor[:, across])
        error = np.abs(found - exact) / (np.sqrt(np.square(exact).mean()) + np.abs(exact))
        worst = max(worst, float(np.where(np.isfinite(found), error, np.inf).max()))
    return worst


def measure_attention_error(num_heads: int, num_kv_heads: int, size: int, dtype: mx.Dtype) -> float:
    """
    The error of attention while a gradient is traced, one query and many, as a share of its norm in float32.

    Keys have a norm of 779, as Qwen2.5-1.5B's: scores in 16 bits are off by 2% in float16 and 15% in bfloat16.
    """
    worst = 0.0
    for length, num_keys in ((1, 160), (128, 160)):
        queries = kernels.normal_array(2, num_heads, length, size, dtype=dtype)
        keys = kernels.normal_array(2, num_kv_heads, num_keys, size, dtype=mx.float32, seed=1)
        values, bias = kernels.normal_array(2, num_kv_heads, num_keys, size, dtype=dtype, seed=2), keys[:1, :, :1]
        keys = (keys + 779 * bias / mx.linalg.norm(bias, axis=-1, keepdims=True)).astype(dtype)
        wide_queries, wide_keys, wide_values = (x.astype(mx.float32) for x in (queries, keys, values))
        causal = mx.tri(length, num_keys, num_keys - length, dtype=mx.bool_)
        seen = mx.stack([causal, causal & (mx.arange(num_keys) > 20)])[:, None]  # the second row is padded
        masks: list[mx.array | str] = ["causal", seen]
        for mask in masks:
            (out,), _ = mx.vjp(functools.partial(attention.attention, mask=mask), [queries, keys, values], [queries])
            exact = attention.attention_ref(wide_queries, wide_keys, wide_values, mask)
            error: Any = (mx.linalg.norm(out - exact) / mx.linalg.norm(exact)).item()
            worst = max(worst, error if np.isfinite(error) else np.inf)
    return worst


def check_arithmetic(weights: list[mx.array], heads: tuple[int, int, int]) -> tuple[str, bool]:
    """
    A line on MLX's own arithmetic, and whether it is right: products by each shape of weights, masked attention by
    (H, K, D). A figure is the largest error as a share of what its type allows; at most 1 is right.
    """
    dtype, shares = weights[0].dtype, {"products": 0.0, "float32 products": 0.0}
    narrow = min(weights, key=lambda weight: weight.size).astype(mx.float32)
    for weight in (*{weight.shape: weight for weight in weights}.values(), narrow):
        kind = "float32 products" if weight.dtype == mx.float32 else "products"
        for rows in (rows for rows in ROWS if rows * max(weight.shape) <= 2**27):  # of logits no more memory
            shares[kind] = max(shares[kind], measure_product_error(weight, rows) / kernels.TOLERANCES[weight.dtype])
    shares["masked attention"] = measure_attention_error(*heads, dtype) / kernels.TOLERANCES[dtype]
    well = max(shares.values()) <= 1
    figures = ", ".join(f"{name} {share:.2g}" for name, share in shares.items() if share)
    allowed = f"errors as shares of what {str(dtype).rpartition('.')[2]} allows, up to 1"
    return f"{'right' if well else 'WRONG'}; {allowed}: {figures}", well
