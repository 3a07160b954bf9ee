"""
Every family against its formulas in float64, one token after the other, with tensors under their stored names.

Written from the papers and model cards, not from gwen.py. transformers' own models are asked where PyTorch is
installed: `uv run --group trl pytest tests/test_families.py`.
"""

import math
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from conftest import CONFIGS, random_weights, relative_error

import gwen

RNG = np.random.default_rng(0)
LENGTH = 200


def tokens() -> np.ndarray:
    """Two rows, the second one token again and again."""
    return np.stack([RNG.integers(0, 320, LENGTH), np.full(LENGTH, 7)])


def frequencies(config: dict[str, Any], size: int) -> tuple[np.ndarray, float]:
    """Radians a position of each pair of a head, and the factor on what is turned."""
    plain, scaling = config["rope_theta"] ** (-np.arange(0, size, 2) / size), config.get("rope_scaling") or {}
    if scaling.get("rope_type") == "llama3":  # long waves are stretched, short ones kept, those between interpolated
        long, short = (
            scaling["original_max_position_embeddings"] / scaling[f"{end}_freq_factor"] for end in ("low", "high")
        )
        made = []
        for one in plain:
            wave = 2 * math.pi / one
            share = (scaling["original_max_position_embeddings"] / wave - scaling["low_freq_factor"]) / (
                scaling["high_freq_factor"] - scaling["low_freq_factor"]
            )
            between = (1 - share) * one / scaling["factor"] + share * one
            made.append(one if wave < short else one / scaling["factor"] if wave > long else between)
        return np.array(made), 1.0
    if scaling.get("rope_type") == "yarn":
        trained, factor = scaling["original_max_position_embeddings"], scaling["factor"]
        ends = [
            size * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(config["rope_theta"])) for turns in (32, 1)
        ]
        low, high = max(math.floor(ends[0]), 0), min(math.ceil(ends[1]), size - 1)
        ramp = np.clip((np.arange(size // 2) - low) / max(high - low, 1e-3), 0, 1)
        return plain * (1 - ramp) + plain / factor * ramp, 0.1 * math.log(factor) + 1
    return plain, 1.0


def turned(x: np.ndarray, config: dict[str, Any]) -> np.ndarray:
    """(L, heads, D) with the pairs i and i + D / 2 turned by their positions."""
    radians, magnitude = frequencies(config, x.shape[-1])
    angles = np.arange(len(x))[:, None, None] * radians
    low, high = np.split(x, 2, axis=-1)
    parts = low * np.cos(angles) - high * np.sin(angles), high * np.cos(angles) + low * np.sin(angles)
    return np.concatenate(parts, axis=-1) * magnitude


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def logits_by_hand(config: dict[str, Any], row: np.ndarray) -> np.ndarray:
    """(L,) tokens -> (L, V), float64."""
    weights = {name: np.array(array).astype(np.float64) for name, array in random_weights(config).items()}
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    size = config.get("head_dim", config["hidden_size"] // heads)

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + config["rms_norm_eps"]) * weights[f"{name}.weight"]

    def linear(x: np.ndarray, name: str) -> np.ndarray:
        return x @ weights[f"{name}.weight"].T + weights.get(f"{name}.bias", 0.0)

    def attention(x: np.ndarray, layer: int, name: str) -> np.ndarray:
        queries, keys, values = (linear(x, f"{name}.{one}_proj").reshape(len(x), -1, size) for one in "qkv")
        if config["model_type"] == "qwen3":
            queries, keys = norm(queries, f"{name}.q_norm"), norm(keys, f"{name}.k_norm")
        if config.get("no_rope_layers", [1] * (layer + 1))[layer]:
            queries, keys = turned(queries, config), turned(keys, config)
        found = np.zeros((len(x), heads, size))
        for head in range(heads):
            kv_head = head * kv_heads // heads
            for at in range(len(x)):
                scores = keys[: at + 1, kv_head] @ queries[at, head] / math.sqrt(size)
                shares = np.exp(scores - scores.max())
                found[at, head] = shares @ values[: at + 1, kv_head] / shares.sum()
        return linear(found.reshape(len(x), -1), f"{name}.o_proj")

    x = weights["model.embed_tokens.weight"][row]
    for layer in range(config["num_hidden_layers"]):
        name = f"model.layers.{layer}"
        x = x + attention(norm(x, f"{name}.input_layernorm"), layer, f"{name}.self_attn")
        inner = norm(x, f"{name}.post_attention_layernorm")
        gated = silu(linear(inner, f"{name}.mlp.gate_proj")) * linear(inner, f"{name}.mlp.up_proj")
        x = x + linear(gated, f"{name}.mlp.down_proj")
    tied = config["tie_word_embeddings"]
    return norm(x, "model.norm") @ weights["model.embed_tokens.weight" if tied else "lm_head.weight"].T


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_of_two_hundred_tokens_equal_the_formulas_in_float64(checkpoints, name):
    rows = tokens()
    ours = np.array(gwen.load_model(checkpoints[name], mx.float32)(mx.array(rows)))
    for row, found in zip(rows, ours, strict=True):
        expected = logits_by_hand(CONFIGS[name], row)
        assert np.abs(found - expected).max() < 1e-4 * np.abs(expected).max()


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_equal_those_of_transformers(checkpoints, name):
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM

    rows = tokens()
    theirs = AutoModelForCausalLM.from_pretrained(str(checkpoints[name]), dtype=torch.float32)
    with torch.no_grad():
        expected = mx.array(theirs(torch.tensor(rows)).logits.numpy())
    assert relative_error(gwen.load_model(checkpoints[name], mx.float32)(mx.array(rows)), expected) < 1e-4
