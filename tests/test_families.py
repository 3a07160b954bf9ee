"""
The logits of every family against formulas in float64, computed token by token.

The formulas come from papers and model cards, not from gwen.py, and use the stored tensor names.
tests/test_adapters.py compares with the models of transformers.
"""

import copy
import datetime
import json
import math
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
from conftest import (
    CONFIGS,
    HYBRID,
    HYBRID_TEXT,
    catch_message,
    make_random_weights,
    relative_error,
)
from mlx.utils import tree_flatten
from test_delta import delta_by_hand
from test_ops import attention_by_hand, yarn_by_hand

import gwen
import lora
import sampler
from disk import ends, hub, run_files
from evaluation import policy
from layers.tree_cache import TreeCache
from prompts import chat_template

RNG = np.random.default_rng(0)
LENGTH = 200


def draw_tokens() -> np.ndarray:
    """Two rows of tokens. The second row repeats one token."""
    return np.stack([RNG.integers(0, 320, LENGTH), np.full(LENGTH, 7)])


def rope_frequencies(config: dict[str, Any], size: int) -> tuple[np.ndarray, float]:
    """Radians per position for each pair of a head, and the factor on the rotated vectors."""
    base_frequencies = config["rope_theta"] ** (-np.arange(0, size, 2) / size)
    scaling = config.get("rope_scaling") or {}
    if scaling.get("rope_type") == "llama3":
        # Long waves are stretched, short waves stay, and waves between them are interpolated.
        trained_length = scaling["original_max_position_embeddings"]
        low = scaling["low_freq_factor"]
        high = scaling["high_freq_factor"]
        waves_in_length = trained_length * base_frequencies / (2 * math.pi)
        unscaled_fraction = np.clip((waves_in_length - low) / (high - low), 0, 1)
        stretched = base_frequencies / scaling["factor"]
        mixed = (1 - unscaled_fraction) * stretched + unscaled_fraction * base_frequencies
        return mixed, 1.0
    if scaling.get("rope_type") == "yarn":
        trained_length = scaling["original_max_position_embeddings"]
        return yarn_by_hand(size, config["rope_theta"], scaling["factor"], trained_length)
    return base_frequencies, 1.0


def rotate_by_hand(x: np.ndarray, config: dict[str, Any]) -> np.ndarray:
    """
    (L, heads, D) -> (L, heads, D): rotates the pairs i and i + D / 2 by their positions.

    With a partial rotary factor, only the first part of a head is rotated.
    """
    rotary_factor = config.get("rope_parameters", {}).get("partial_rotary_factor", 1)
    if rotary_factor < 1:
        size = int(rotary_factor * x.shape[-1])
        full_rotary_config = config | {
            "rope_parameters": {},
            "rope_theta": config["rope_parameters"]["rope_theta"],
        }
        rotated = rotate_by_hand(x[..., :size], full_rotary_config)
        return np.concatenate([rotated, x[..., size:]], axis=-1)

    radians, magnitude = rope_frequencies(config, x.shape[-1])
    angles = np.arange(len(x))[:, None, None] * radians
    sine, cosine = np.sin(angles), np.cos(angles)
    first, second = np.split(x * magnitude, 2, axis=-1)
    return np.concatenate([first * cosine - second * sine, second * cosine + first * sine], axis=-1)


def gated_delta_net(
    config: dict[str, Any], x: np.ndarray, weights: dict[str, np.ndarray]
) -> np.ndarray:
    """
    (L, hidden) -> (L, hidden): the linear attention of Qwen3.5.

    weights: by the names that follow "linear_attn.".
    """
    heads = config["linear_num_value_heads"]
    key_heads = config["linear_num_key_heads"]
    key_dim = config["linear_key_head_dim"]
    value_dim = config["linear_value_head_dim"]
    qkv, z, b, a = (x @ weights[f"in_proj_{name}.weight"].T for name in ("qkv", "z", "b", "a"))

    # A causal convolution over positions.
    kernel = weights["conv1d.weight"][:, 0]  # (channels, 4)
    convolved = np.zeros_like(qkv)
    for position in range(len(x)):
        for back in range(min(kernel.shape[1], position + 1)):
            convolved[position] += kernel[:, -1 - back] * qkv[position - back]
    convolved = silu(convolved)
    splits = [key_heads * key_dim, 2 * key_heads * key_dim]
    queries, keys, values = np.split(convolved, splits, axis=-1)

    def normalize(vectors: np.ndarray) -> np.ndarray:
        vectors = vectors.reshape(len(x), key_heads, -1)
        return vectors / np.sqrt((vectors**2).sum(-1, keepdims=True) + 1e-6)

    # The delta rule.
    queries = normalize(queries) / math.sqrt(key_dim)
    keys = normalize(keys)
    values = values.reshape(len(x), heads, -1)
    log_decay = -np.exp(weights["A_log"]) * np.log1p(np.exp(a + weights["dt_bias"]))
    strengths = 1 / (1 + np.exp(-b))
    inputs = (array[None] for array in (queries, keys, values, log_decay, strengths))
    initial_state = np.zeros((1, heads, value_dim, key_dim))
    out = delta_by_hand(*inputs, initial_state)[0][0]

    # A gated norm.
    root_mean_square = np.sqrt((out**2).mean(-1, keepdims=True) + config["rms_norm_eps"])
    gates = silu(z.reshape(len(x), heads, -1))
    out = out / root_mean_square * weights["norm.weight"] * gates
    return out.reshape(len(x), -1) @ weights["out_proj.weight"].T


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def logits_by_hand(config: dict[str, Any], row: np.ndarray) -> np.ndarray:
    """(L,) tokens -> (L, V), float64."""
    weights = {
        name.replace("language_model.", ""): np.array(array).astype(np.float64)
        for name, array in make_random_weights(config).items()
    }
    config = config.get("text_config", config)
    is_hybrid = config["model_type"] == "qwen3_5_text"
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim", config["hidden_size"] // heads)

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        scale = weights[f"{name}.weight"] + is_hybrid
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + config["rms_norm_eps"]) * scale

    def linear(x: np.ndarray, name: str) -> np.ndarray:
        return x @ weights[f"{name}.weight"].T + weights.get(f"{name}.bias", 0.0)

    def attention(x: np.ndarray, layer: int, name: str) -> np.ndarray:
        queries, keys, values = (
            linear(x, f"{name}.{projection}_proj").reshape(len(x), -1, head_dim)
            for projection in "qkv"
        )
        gates = None
        if is_hybrid:
            queries, gates = np.split(queries.reshape(len(x), heads, 2 * head_dim), 2, axis=-1)
        if f"{name}.q_norm.weight" in weights:
            queries, keys = norm(queries, f"{name}.q_norm"), norm(keys, f"{name}.k_norm")
        if config.get("no_rope_layers", [1] * (layer + 1))[layer]:
            queries, keys = rotate_by_hand(queries, config), rotate_by_hand(keys, config)

        visible_positions = [np.arange(position + 1) for position in range(len(x))]
        head_major = (array.swapaxes(0, 1) for array in (queries, keys, values))
        out = attention_by_hand(*head_major, visible_positions).swapaxes(0, 1)
        if gates is not None:
            out = out / (1 + np.exp(-gates))
        return linear(out.reshape(len(x), -1), f"{name}.o_proj")

    x = weights["model.embed_tokens.weight"][row]
    for layer in range(config["num_hidden_layers"]):
        name = f"model.layers.{layer}"
        normed = norm(x, f"{name}.input_layernorm")
        if is_hybrid and (layer + 1) % config["full_attention_interval"]:
            prefix = f"{name}.linear_attn."
            net_weights = {
                key.removeprefix(prefix): array
                for key, array in weights.items()
                if key.startswith(prefix)
            }
            x = x + gated_delta_net(config, normed, net_weights)
        else:
            x = x + attention(normed, layer, f"{name}.self_attn")
        normed = norm(x, f"{name}.post_attention_layernorm")
        gate = silu(linear(normed, f"{name}.mlp.gate_proj"))
        x = x + linear(gate * linear(normed, f"{name}.mlp.up_proj"), f"{name}.mlp.down_proj")

    is_tied = config["tie_word_embeddings"]
    head = weights["model.embed_tokens.weight" if is_tied else "lm_head.weight"]
    return norm(x, "model.norm") @ head.T


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_of_two_hundred_tokens_equal_the_formulas_in_float64(checkpoints, name):
    rows = draw_tokens()
    logits = np.array(gwen.load_model(checkpoints[name], mx.float32)(mx.array(rows)))
    for row, row_logits in zip(rows, logits, strict=True):
        expected = logits_by_hand(CONFIGS[name], row)
        assert np.abs(row_logits - expected).max() < 1e-4 * np.abs(expected).max()


@pytest.mark.parametrize("name", ["qwen3", "qwen3.5"])
def test_greedy_continuations_of_a_tree_equal_those_of_each_separate_row(checkpoints, name):
    model = gwen.load_model(checkpoints[name], mx.float32)
    leaf_parents = [1, 0, 1]
    levels = []
    for lengths in ((9,), (4, 7), (3, 1, 5)):
        levels.append([RNG.integers(0, 320, length).tolist() for length in lengths])

    tree = TreeCache(model.config.layer_kinds)
    for rows, parents in zip(levels, [None, [0, 0], leaf_parents], strict=True):
        tree = tree.with_new_level([len(row) for row in rows], parents)
        width = max(map(len, rows))
        padded = [row + [0] * (width - len(row)) for row in rows]
        hidden = model.hidden(mx.array(padded), tree)
    leaves = levels[2]
    last_hidden = mx.stack([hidden[place, len(row) - 1] for place, row in enumerate(leaves)])
    logits = last_hidden @ model.head_weight.T
    continuations = sampler.continue_greedily(model, tree.to_flat_cache(), logits, 6, [])

    for row, parent, continuation in zip(leaves, leaf_parents, continuations, strict=True):
        ids = levels[0][0] + levels[1][parent] + row
        for token in continuation:
            assert token == model(mx.array([ids]))[0, -1].argmax().item()
            ids.append(token)


# ---- directories of a hybrid


def write_hybrid(directory: Path, weights: dict[str, mx.array], **config: Any) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(HYBRID | config))
    mx.save_safetensors(str(directory / "model.safetensors"), weights)
    return directory


def test_a_directory_converted_by_mlx_lm_gives_the_weights_of_the_original(checkpoints, tmp_path):
    mlx_lm_model, config = mlx_lm.utils.load_model(checkpoints["qwen3.5"])
    mlx_lm.utils.save_model(tmp_path, mlx_lm_model)
    mlx_lm.utils.save_config(config, tmp_path / "config.json")

    original = gwen.load_model(checkpoints["qwen3.5"], mx.float32)
    converted = gwen.load_model(tmp_path, mx.float32)
    converted_weights = dict(tree_flatten(converted.parameters()))
    for name, array in tree_flatten(original.parameters()):
        # A norm's weight had 1 added and subtracted.
        assert mx.allclose(array, converted_weights[name], rtol=0, atol=1e-6), name


def test_the_text_part_of_a_hybrid_is_a_complete_model(checkpoints, tmp_path):
    text_weights = {
        name.replace("language_model.", ""): array
        for name, array in make_random_weights(HYBRID).items()
    }
    text_model = gwen.load_model(write_hybrid(tmp_path, text_weights, **HYBRID_TEXT), mx.float32)
    hybrid = gwen.load_model(checkpoints["qwen3.5"], mx.float32)
    rows = mx.array(draw_tokens())
    assert mx.array_equal(text_model(rows), hybrid(rows))


def test_image_tensors_are_ignored_in_one_line_and_a_missing_text_tensor_is_refused(
    tmp_path, capsys
):
    weights = make_random_weights(HYBRID)
    for number in range(3):
        weights[f"model.visual.{number}.weight"] = mx.zeros((2, 2))
    directory = write_hybrid(tmp_path, weights | {"mtp.fc.weight": mx.zeros((2, 2))})
    gwen.load_model(directory, mx.float32)
    assert capsys.readouterr().err.count("ignored 4 tensors ") == 1

    del weights["model.language_model.layers.0.linear_attn.A_log"]
    write_hybrid(tmp_path, weights)
    message = catch_message(gwen.load_model, directory)
    assert "model.layers.0.linear_attn.A_log is missing" in message


def test_decays_and_norms_of_linear_attention_stay_float32_in_a_16_bit_model(
    checkpoints, tokenizer, tmp_path
):
    model = gwen.load_model(checkpoints["qwen3.5"], mx.float16)
    gwen.save(model, tmp_path, tokenizer)
    saved = mx.load(str(tmp_path / "model.safetensors"))
    source = make_random_weights(HYBRID)
    float32_names = [name for name, array in saved.items() if array.dtype == mx.float32]
    assert len(float32_names) == 3 * 3
    assert all(mx.array_equal(saved[name], source[name]) for name in float32_names)

    rows = mx.array(draw_tokens()[:, :50])
    float32_model = gwen.load_model(checkpoints["qwen3.5"], mx.float32)
    assert relative_error(model(rows), float32_model(rows)) < 0.05


def test_an_adapter_for_a_projection_that_the_layer_lacks_is_refused_by_name(checkpoints, tmp_path):
    adapter_config = {"lora_parameters": {"rank": 2, "scale": 1.0}}
    (tmp_path / "adapter_config.json").write_text(json.dumps(adapter_config))
    name = "language_model.model.layers.0.self_attn.q_proj"
    matrices = {f"{name}.lora_a": mx.zeros((48, 2)), f"{name}.lora_b": mx.zeros((2, 256))}
    mx.save_safetensors(str(tmp_path / "adapters.safetensors"), matrices)
    message = catch_message(gwen.load_model, checkpoints["qwen3.5"], adapter=tmp_path)
    assert "model.layers.0.self_attn.q_proj is not a projection of this model" in message

    with pytest.raises(ValueError, match=r"--lora-targets in_proj: .*Qwen3 .*projections"):
        lora.apply(gwen.load_model(checkpoints["qwen3"]), 2, 1.0, ["in_proj"])


def test_every_fourth_layer_of_a_hybrid_has_full_attention_by_default():
    config = dict(HYBRID_TEXT)
    del config["full_attention_interval"]
    assert hub.make_config(config).layer_kinds == (*["linear_attention"] * 3, "full_attention")


# ---- templates


DATED_TEMPLATE = (
    "{{ strftime_now('%d %B %Y') }}: "
    "{% for message in messages %}{{ message.content }}<|im_end|>{% endfor %}"
)


@pytest.fixture
def set_template_date_to_today(monkeypatch):
    monkeypatch.setattr(chat_template, "_day", [datetime.date.today()])


def test_a_template_with_a_date_writes_the_start_date_of_the_run(
    tokenizer, set_template_date_to_today, tmp_path
):
    dated_tokenizer = copy.deepcopy(tokenizer)
    dated_tokenizer.chat_template = DATED_TEMPLATE
    prompt = [{"role": "user", "content": "one"}]
    today = datetime.date.today()
    text = chat_template.render_chat(dated_tokenizer, prompt, False)
    assert text == f"{today:%d %B %Y}: one<|im_end|>"
    assert run_files.start_date_or_today(tmp_path) == today.isoformat()

    (tmp_path / "env.json").write_text('{"begun": "2026-01-31"}')
    run_files.write_settings_facts_and_code("model: demo\n", tmp_path)  # as a resumed run does
    policy.load_run_config_and_set_template_date(str(tmp_path), {})
    text = chat_template.render_chat(dated_tokenizer, prompt, False)
    assert text == "31 January 2026: one<|im_end|>"

    (tmp_path / "env.json").write_text('{"begun": 5}')
    message = catch_message(policy.load_run_config_and_set_template_date, str(tmp_path), {})
    assert "Invalid isoformat string: '5'" in message


def test_the_chat_template_decides_which_id_ends_a_reply(tokenizer):
    assert ends.find_end_of_reply_id(tokenizer) == tokenizer.convert_tokens_to_ids("<|im_end|>")
    without_end = copy.deepcopy(tokenizer)
    without_end.chat_template = "{% for message in messages %}{{ message.content }}\n{% endfor %}"
    assert ends.find_end_of_reply_id(without_end) is None
