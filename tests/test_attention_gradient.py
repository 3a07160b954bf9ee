"""The gradient of attention: against float64 in a model whose keys have large biases, by blocks, and what it holds."""

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
LOSS_SCALE = 64  # as a trainer in float16 has one


def biased_model(key_bias: float) -> gwen.Model:
    """A Qwen2 in float32 with adapters, and keys whose bias has this size in every dimension."""
    model, rng = gwen.Model(hub.make_config(QWEN2)), np.random.default_rng(0)
    weights = {}
    for name, array in sorted(tree_flatten(model.parameters())):
        scale = 0.0 if array.ndim == 1 else 1.0 if "embed" in name else array.shape[-1] ** -0.5
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


def by_kv_head(x: np.ndarray, keys: np.ndarray) -> np.ndarray:
    return x.reshape(*keys.shape[:2], -1, keys.shape[-1])


def causal_scores(queries: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """Of float64 queries by kv head, (N, K, H / K * L, S), scaled."""
    scores = queries @ keys.swapaxes(-1, -2) / math.sqrt(keys.shape[-1])
    seen = np.tile(np.tri(keys.shape[2], dtype=bool), (queries.shape[2] // keys.shape[2], 1))
    return np.where(seen, scores, -np.inf)


def gradient_in_float64(queries, keys, values, d_out, _):
    queries, d_out = by_kv_head(queries, keys), by_kv_head(d_out, keys)
    scores = causal_scores(queries, keys)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    d_weights = d_out @ values.swapaxes(-1, -2)
    d_scores = (
        weights
        * (d_weights - (weights * d_weights).sum(-1, keepdims=True))
        / math.sqrt(keys.shape[-1])
    )
    return d_scores @ keys, d_scores.swapaxes(-1, -2) @ queries, weights.swapaxes(-1, -2) @ d_out


def gradient_of_ours(queries, keys, values, d_out, dtype):
    given = [mx.array(x.astype(np.float32)).astype(dtype) for x in (queries, keys, values, d_out)]
    return [np.array(x.astype(mx.float32)) for x in attention.attention_vjp(*given, "causal")]


def gradient_of_adapters(model, dtype, gradient, monkeypatch) -> np.ndarray:
    """With queries, keys and values in 16 bits, the rest in float32, and one or another gradient of attention."""

    def attend_to_parts(queries, parts, layout):
        def forward(*arrays):
            return attention.attention_ref(
                *(x.astype(dtype).astype(mx.float32) for x in arrays), "causal"
            )

        def backward(primals, d_out, _):
            given = [
                np.array(x.astype(dtype).astype(mx.float32)).astype(np.float64) for x in primals
            ]
            found = gradient(*given, np.array(d_out).astype(np.float64), dtype)
            return tuple(
                mx.array(x.reshape(p.shape).astype(np.float32))
                for x, p in zip(found, primals, strict=True)
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

    found = mx.grad(loss)(model.trainable_parameters())
    return np.concatenate([np.array(array).reshape(-1) for _, array in sorted(tree_flatten(found))])


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=str)
@pytest.mark.parametrize("key_bias", [0, 15, 70, 150])
def test_an_update_has_the_gradient_of_float64_whatever_bias_keys_have(
    key_bias, dtype, monkeypatch
):
    """Norms of 120, 560 and 1,200: Qwen2.5-3B has 172, Qwen2.5-1.5B 779."""
    model = biased_model(key_bias)
    exact, ours = (
        gradient_of_adapters(model, dtype, gradient, monkeypatch)
        for gradient in (gradient_in_float64, gradient_of_ours)
    )
    assert np.linalg.norm(ours - exact) < 0.01 * np.linalg.norm(exact)


@pytest.mark.parametrize("mask", ["causal", None, "array"])
@pytest.mark.parametrize(
    ("length", "num_keys", "at_once"), [(9, 9, 4), (5, 9, 5), (7, 12, 2), (1, 4, 1)]
)
def test_the_gradient_by_blocks_is_that_of_the_expression(
    mask, length, num_keys, at_once, monkeypatch
):
    queries, keys, values = (
        draw_normal(2, 6, length, 8),
        draw_normal(2, 2, num_keys, 8),
        draw_normal(2, 2, num_keys, 8),
    )
    if mask == "array":
        mask = mx.array(np.random.default_rng(3).random((2, 1, length, num_keys)) < 0.5) | (
            mx.arange(num_keys) == 1
        )

    def loss(attend):
        return lambda *arrays: (attend(*arrays, mask) * mx.arange(8)).square().sum()

    expected = mx.grad(loss(attention.attention_ref), argnums=(0, 1, 2))(queries, keys, values)
    monkeypatch.setattr(attention, "has_float32_attention_kernel", lambda _: True)
    monkeypatch.setattr(attention, "choose_query_chunk_size", lambda *_: at_once)
    found = mx.grad(loss(attention.attention), argnums=(0, 1, 2))(queries, keys, values)
    for ours, theirs in zip(found, expected, strict=True):
        assert relative_error(ours, theirs) < 1e-5
