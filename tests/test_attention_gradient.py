"""The gradient of attention: against float64 if the keys have large biases, and by blocks."""

import math

import mlx.core as mx
import numpy as np
import pytest
from conftest import QWEN3, draw_normal, relative_error
from mlx.utils import tree_flatten

import gwen
import lora
from disk import hub
from layers import attention, lm_head

QWEN2 = {
    **QWEN3,
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "attention_bias": True,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
TOKENS = mx.array(np.random.default_rng(1).integers(0, 320, (2, 64)))
LOSS_SCALE = 64  # a trainer in float16 scales the loss


def make_biased_model(key_bias: float) -> gwen.Model:
    """Returns a Qwen2 in float32 with adapters, and keys whose bias has this deviation."""
    model = gwen.Model(hub.make_config(QWEN2))
    rng = np.random.default_rng(0)
    weights = {}
    for name, array in sorted(tree_flatten(model.parameters())):
        if array.ndim == 1:
            scale = 0.0
        elif "embed" in name:
            scale = 1.0
        else:
            scale = array.shape[-1] ** -0.5
        weights[name] = rng.normal(0, scale, array.shape) + ("norm" in name)
        if name.endswith("qkv_proj.bias"):
            weights[name][4 * 64 : 6 * 64] = rng.normal(0, key_bias, 2 * 64)
    model.load_weights(
        [(name, mx.array(array.astype(np.float32))) for name, array in weights.items()]
    )
    lora.apply(model, 8, 2.0)
    for _, layer in lora.adapted_layers(model):
        layer.lora_b = mx.array(rng.normal(0, 0.01, layer.lora_b.shape).astype(np.float32))
    return model


def group_by_kv_head(x: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """(N, H, L, D) -> (N, K, H / K * L, D)."""
    return x.reshape(*keys.shape[:2], -1, keys.shape[-1])


def causal_scores(queries: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """Scaled scores of float64 queries that are grouped by kv head, (N, K, H / K * L, S)."""
    scores = queries @ keys.swapaxes(-1, -2) / math.sqrt(keys.shape[-1])
    is_visible = np.tile(np.tri(keys.shape[2], dtype=bool), (queries.shape[2] // keys.shape[2], 1))
    return np.where(is_visible, scores, -np.inf)


def compute_float64_gradient(queries, keys, values, d_out, _):
    queries = group_by_kv_head(queries, keys)
    d_out = group_by_kv_head(d_out, keys)
    scores = causal_scores(queries, keys)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    d_weights = d_out @ values.swapaxes(-1, -2)
    centered = d_weights - (weights * d_weights).sum(-1, keepdims=True)
    d_scores = weights * centered / math.sqrt(keys.shape[-1])
    return d_scores @ keys, d_scores.swapaxes(-1, -2) @ queries, weights.swapaxes(-1, -2) @ d_out


def compute_gwen_gradient(queries, keys, values, d_out, dtype):
    arrays = [mx.array(x.astype(np.float32)).astype(dtype) for x in (queries, keys, values, d_out)]
    return [np.array(x.astype(mx.float32)) for x in attention.attention_vjp(*arrays, "causal")]


def compute_adapter_gradient(model, dtype, attention_gradient, monkeypatch) -> np.ndarray:
    """
    Returns the gradient of a loss by the adapters.

    Queries, keys and values have 16 bits, and all other arrays have float32.

    attention_gradient: the function that computes the gradient of attention.
    """

    def attend_to_parts(queries, parts, layout):
        def forward(*arrays):
            rounded = [x.astype(dtype).astype(mx.float32) for x in arrays]
            return attention.attention_ref(*rounded, "causal")

        def backward(primals, d_out, _):
            rounded = [x.astype(dtype).astype(mx.float32) for x in primals]
            float64_arrays = [np.array(x).astype(np.float64) for x in rounded]
            gradients = attention_gradient(
                *float64_arrays, np.array(d_out).astype(np.float64), dtype
            )
            return tuple(
                mx.array(gradient.reshape(primal.shape).astype(np.float32))
                for gradient, primal in zip(gradients, primals, strict=True)
            )

        custom = mx.custom_function(forward)
        custom.vjp(backward)
        return custom(queries, *parts[0])

    monkeypatch.setattr(attention, "attend_to_parts", attend_to_parts)

    def loss(parameters):
        model.update(parameters)
        logprobs, _ = lm_head.token_logprobs(
            model.hidden(TOKENS[:, :-1]), model.head_weight, TOKENS[:, 1:]
        )
        return (logprobs * mx.array([[1.0], [-1.0]])).mean() * LOSS_SCALE

    gradients = tree_flatten(mx.grad(loss)(model.trainable_parameters()))
    return np.concatenate([np.array(array).reshape(-1) for _, array in sorted(gradients)])


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=str)
@pytest.mark.parametrize("key_bias", [0, 15, 70, 150])
def test_the_gradient_of_the_adapters_equals_float64_for_any_bias_of_the_keys(
    key_bias, dtype, monkeypatch
):
    """
    The norms of the biases are 0, 120, 560 and 1,200.

    For comparison, the norm is 172 in Qwen2.5-3B and 779 in Qwen2.5-1.5B.
    """
    model = make_biased_model(key_bias)
    exact = compute_adapter_gradient(model, dtype, compute_float64_gradient, monkeypatch)
    gradient = compute_adapter_gradient(model, dtype, compute_gwen_gradient, monkeypatch)
    assert np.linalg.norm(gradient - exact) < 0.01 * np.linalg.norm(exact)


@pytest.mark.parametrize("mask", ["causal", None, "array"])
@pytest.mark.parametrize(
    ("length", "num_keys", "chunk_size"), [(9, 9, 4), (5, 9, 5), (7, 12, 2), (1, 4, 1)]
)
def test_the_gradient_by_blocks_equals_the_gradient_of_the_reference(
    mask, length, num_keys, chunk_size, monkeypatch
):
    queries = draw_normal(2, 6, length, 8)
    keys = draw_normal(2, 2, num_keys, 8)
    values = draw_normal(2, 2, num_keys, 8)
    if mask == "array":
        is_visible = np.random.default_rng(3).random((2, 1, length, num_keys)) < 0.5
        mask = mx.array(is_visible) | (mx.arange(num_keys) == 1)

    def loss(attend):
        return lambda *arrays: (attend(*arrays, mask) * mx.arange(8)).square().sum()

    expected = mx.grad(loss(attention.attention_ref), argnums=(0, 1, 2))(queries, keys, values)
    monkeypatch.setattr(attention, "has_float32_attention_kernel", lambda _: True)
    monkeypatch.setattr(attention, "choose_query_chunk_size", lambda *_: chunk_size)
    gradients = mx.grad(loss(attention.attention), argnums=(0, 1, 2))(queries, keys, values)
    for gradient, reference in zip(gradients, expected, strict=True):
        assert relative_error(gradient, reference) < 1e-5
