"""
Every family against its formulas in float64, one token after the other, with tensors under their stored names.

Written from the papers and model cards, not from gwen.py. transformers' own models are asked in tests/test_adapters.py.
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
from test_delta import by_hand as delta_by_hand
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


def tokens() -> np.ndarray:
    """Two rows, the second one token again and again."""
    return np.stack([RNG.integers(0, 320, LENGTH), np.full(LENGTH, 7)])


def frequencies(config: dict[str, Any], size: int) -> tuple[np.ndarray, float]:
    """Radians a position of each pair of a head, and the factor on what is turned."""
    plain, scaling = (
        config["rope_theta"] ** (-np.arange(0, size, 2) / size),
        config.get("rope_scaling") or {},
    )
    if (
        scaling.get("rope_type") == "llama3"
    ):  # long waves are stretched, short ones kept, those between interpolated
        trained, low, high = (
            scaling["original_max_position_embeddings"],
            *(scaling[f"{end}_freq_factor"] for end in ("low", "high")),
        )
        share = np.clip((trained * plain / (2 * math.pi) - low) / (high - low), 0, 1)
        return (1 - share) * plain / scaling["factor"] + share * plain, 1.0
    if scaling.get("rope_type") == "yarn":
        trained, factor = scaling["original_max_position_embeddings"], scaling["factor"]
        return yarn_by_hand(size, config["rope_theta"], factor, trained)
    return plain, 1.0


def turned(x: np.ndarray, config: dict[str, Any]) -> np.ndarray:
    """(L, heads, D) with the pairs i and i + D / 2 turned by their positions; or those of the first share of a head."""
    share = config.get("rope_parameters", {}).get("partial_rotary_factor", 1)
    if share < 1:
        size = int(share * x.shape[-1])
        whole = config | {
            "rope_parameters": {},
            "rope_theta": config["rope_parameters"]["rope_theta"],
        }
        return np.concatenate([turned(x[..., :size], whole), x[..., size:]], axis=-1)
    radians, magnitude = frequencies(config, x.shape[-1])
    angles, (first, second) = (
        np.arange(len(x))[:, None, None] * radians,
        np.split(x * magnitude, 2, axis=-1),
    )
    sine, cosine = np.sin(angles), np.cos(angles)
    return np.concatenate([first * cosine - second * sine, second * cosine + first * sine], axis=-1)


def gated_delta_net(
    config: dict[str, Any], x: np.ndarray, weights: dict[str, np.ndarray]
) -> np.ndarray:
    """(L, hidden) -> (L, hidden): linear attention of Qwen3.5, from the names behind "linear_attn."."""
    heads, key_heads = config["linear_num_value_heads"], config["linear_num_key_heads"]
    sizes = config["linear_key_head_dim"], config["linear_value_head_dim"]
    qkv, z, b, a = (x @ weights[f"in_proj_{name}.weight"].T for name in ("qkv", "z", "b", "a"))
    kernel = weights["conv1d.weight"][:, 0]  # (channels, 4)
    mixed = np.zeros_like(qkv)
    for at in range(len(x)):
        for back in range(min(kernel.shape[1], at + 1)):
            mixed[at] += kernel[:, -1 - back] * qkv[at - back]
    mixed = silu(mixed)
    queries, keys, values = np.split(
        mixed, [key_heads * sizes[0], 2 * key_heads * sizes[0]], axis=-1
    )
    queries, keys = (one.reshape(len(x), key_heads, -1) for one in (queries, keys))
    queries, keys = (
        one / np.sqrt((one**2).sum(-1, keepdims=True) + 1e-6) for one in (queries, keys)
    )
    values, z = (one.reshape(len(x), heads, -1) for one in (values, z))
    log_decay = -np.exp(weights["A_log"]) * np.log1p(np.exp(a + weights["dt_bias"]))
    steps = (
        one[None]
        for one in (queries / math.sqrt(sizes[0]), keys, values, log_decay, 1 / (1 + np.exp(-b)))
    )
    out = delta_by_hand(*steps, np.zeros((1, heads, *sizes[::-1])))[0][0]
    out = (
        out
        / np.sqrt((out**2).mean(-1, keepdims=True) + config["rms_norm_eps"])
        * weights["norm.weight"]
        * silu(z)
    )
    return out.reshape(len(x), -1) @ weights["out_proj.weight"].T


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def logits_by_hand(config: dict[str, Any], row: np.ndarray) -> np.ndarray:
    """(L,) tokens -> (L, V), float64."""
    weights = {
        name: np.array(array).astype(np.float64)
        for name, array in make_random_weights(config).items()
    }
    weights = {name.replace("language_model.", ""): array for name, array in weights.items()}
    config = config.get("text_config", config)
    is_hybrid = config["model_type"] == "qwen3_5_text"
    heads = config["num_attention_heads"]
    size = config.get("head_dim", config["hidden_size"] // heads)

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        scale = weights[f"{name}.weight"] + is_hybrid
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + config["rms_norm_eps"]) * scale

    def linear(x: np.ndarray, name: str) -> np.ndarray:
        return x @ weights[f"{name}.weight"].T + weights.get(f"{name}.bias", 0.0)

    def attention(x: np.ndarray, layer: int, name: str) -> np.ndarray:
        queries, keys, values = (
            linear(x, f"{name}.{one}_proj").reshape(len(x), -1, size) for one in "qkv"
        )
        gates = None
        if is_hybrid:
            queries, gates = np.split(queries.reshape(len(x), heads, 2 * size), 2, axis=-1)
        if f"{name}.q_norm.weight" in weights:
            queries, keys = norm(queries, f"{name}.q_norm"), norm(keys, f"{name}.k_norm")
        if config.get("no_rope_layers", [1] * (layer + 1))[layer]:
            queries, keys = turned(queries, config), turned(keys, config)
        seen = [np.arange(at + 1) for at in range(len(x))]
        found = attention_by_hand(
            *(one.swapaxes(0, 1) for one in (queries, keys, values)), seen
        ).swapaxes(0, 1)
        if gates is not None:
            found = found / (1 + np.exp(-gates))
        return linear(found.reshape(len(x), -1), f"{name}.o_proj")

    x = weights["model.embed_tokens.weight"][row]
    for layer in range(config["num_hidden_layers"]):
        name = f"model.layers.{layer}"
        inner = norm(x, f"{name}.input_layernorm")
        if is_hybrid and (layer + 1) % config["full_attention_interval"]:
            net = f"{name}.linear_attn."
            of_net = {
                key.removeprefix(net): array
                for key, array in weights.items()
                if key.startswith(net)
            }
            x = x + gated_delta_net(config, inner, of_net)
        else:
            x = x + attention(inner, layer, f"{name}.self_attn")
        inner = norm(x, f"{name}.post_attention_layernorm")
        gated = silu(linear(inner, f"{name}.mlp.gate_proj")) * linear(inner, f"{name}.mlp.up_proj")
        x = x + linear(gated, f"{name}.mlp.down_proj")
    tied = config["tie_word_embeddings"]
    return (
        norm(x, "model.norm") @ weights["model.embed_tokens.weight" if tied else "lm_head.weight"].T
    )


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_of_two_hundred_tokens_equal_the_formulas_in_float64(checkpoints, name):
    rows = tokens()
    ours = np.array(gwen.load_model(checkpoints[name], mx.float32)(mx.array(rows)))
    for row, found in zip(rows, ours, strict=True):
        expected = logits_by_hand(CONFIGS[name], row)
        assert np.abs(found - expected).max() < 1e-4 * np.abs(expected).max()


@pytest.mark.parametrize("name", ["qwen3", "qwen3.5"])
def test_greedy_continuations_of_a_tree_are_those_of_each_row_alone(checkpoints, name):
    model, parents = gwen.load_model(checkpoints[name], mx.float32), [1, 0, 1]
    levels = [
        [RNG.integers(0, 320, length).tolist() for length in row]
        for row in ((9,), (4, 7), (3, 1, 5))
    ]
    tree, rows_of = TreeCache(model.config.layer_kinds), [None, [0, 0], parents]
    for rows, above in zip(levels, rows_of, strict=True):
        tree, width = tree.with_new_level([len(row) for row in rows], above), max(map(len, rows))
        hidden = model.hidden(mx.array([row + [0] * (width - len(row)) for row in rows]), tree)
    ends = mx.stack([hidden[place, len(row) - 1] for place, row in enumerate(levels[2])])
    found = sampler.continue_greedily(
        model, tree.to_flat_cache(), ends @ model.head_weight.T, 6, []
    )
    for row, parent, ours in zip(levels[2], parents, found, strict=True):
        ids = levels[0][0] + levels[1][parent] + row
        for token in ours:
            assert token == model(mx.array([ids]))[0, -1].argmax().item()
            ids.append(token)


# ---- directories of a hybrid


def hybrid_with(directory: Path, weights: dict[str, mx.array], **config: Any) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(HYBRID | config))
    mx.save_safetensors(str(directory / "model.safetensors"), weights)
    return directory


def test_a_directory_that_mlx_lm_converted_is_read_as_its_source(checkpoints, tmp_path):
    theirs, config = mlx_lm.utils.load_model(checkpoints["qwen3.5"])
    mlx_lm.utils.save_model(tmp_path, theirs)
    mlx_lm.utils.save_config(config, tmp_path / "config.json")
    ours, again = (gwen.load_model(path, mx.float32) for path in (checkpoints["qwen3.5"], tmp_path))
    expected = dict(tree_flatten(again.parameters()))
    for name, array in tree_flatten(ours.parameters()):
        assert mx.allclose(array, expected[name], rtol=0, atol=1e-6), (
            name
        )  # a norm's weight had 1 added and taken away


def test_the_text_part_of_a_hybrid_alone_is_a_model_too(checkpoints, tmp_path):
    weights = {
        name.replace("language_model.", ""): array
        for name, array in make_random_weights(HYBRID).items()
    }
    alone = gwen.load_model(hybrid_with(tmp_path, weights, **HYBRID_TEXT), mx.float32)
    whole, rows = gwen.load_model(checkpoints["qwen3.5"], mx.float32), mx.array(tokens())
    assert mx.array_equal(alone(rows), whole(rows))


def test_tensors_of_images_are_skipped_with_one_line_and_no_other_may_be_missing(tmp_path, capsys):
    weights = make_random_weights(HYBRID) | {
        f"model.visual.{n}.weight": mx.zeros((2, 2)) for n in range(3)
    }
    directory = hybrid_with(tmp_path, weights | {"mtp.fc.weight": mx.zeros((2, 2))})
    gwen.load_model(directory, mx.float32)
    assert capsys.readouterr().err.count("ignored 4 tensors ") == 1
    del weights["model.language_model.layers.0.linear_attn.A_log"]
    hybrid_with(tmp_path, weights)
    assert "model.layers.0.linear_attn.A_log is missing" in catch_message(
        gwen.load_model, directory
    )


def test_decays_and_the_nets_norms_keep_their_type_in_a_16_bit_model(
    checkpoints, tokenizer, tmp_path
):
    model = gwen.load_model(checkpoints["qwen3.5"], mx.float16)
    gwen.save(model, tmp_path, tokenizer)
    saved, source = mx.load(str(tmp_path / "model.safetensors")), make_random_weights(HYBRID)
    kept = [name for name, array in saved.items() if array.dtype == mx.float32]
    assert len(kept) == 3 * 3 and all(mx.array_equal(saved[name], source[name]) for name in kept)
    rows = mx.array(tokens()[:, :50])
    assert (
        relative_error(model(rows), gwen.load_model(checkpoints["qwen3.5"], mx.float32)(rows))
        < 0.05
    )


def test_an_adapter_of_the_other_kind_of_layer_is_named(checkpoints, tmp_path):
    (tmp_path / "adapter_config.json").write_text(
        json.dumps({"lora_parameters": {"rank": 2, "scale": 1.0}})
    )
    name = "language_model.model.layers.0.self_attn.q_proj"
    pair = {f"{name}.lora_a": mx.zeros((48, 2)), f"{name}.lora_b": mx.zeros((2, 256))}
    mx.save_safetensors(str(tmp_path / "adapters.safetensors"), pair)
    said = catch_message(gwen.load_model, checkpoints["qwen3.5"], adapter=tmp_path)
    assert "model.layers.0.self_attn.q_proj is not a projection of this model" in said
    with pytest.raises(ValueError, match=r"--lora-targets in_proj: .*Qwen3 .*projections"):
        lora.apply(gwen.load_model(checkpoints["qwen3"]), 2, 1.0, ["in_proj"])


def test_the_default_layers_of_a_hybrid_have_full_attention_every_fourth():
    silent = {key: value for key, value in HYBRID_TEXT.items() if key != "full_attention_interval"}
    assert hub.make_config(silent).layer_kinds == (*["linear_attention"] * 3, "full_attention")


# ---- templates


DATED = "{{ strftime_now('%d %B %Y') }}: {% for message in messages %}{{ message.content }}<|im_end|>{% endfor %}"


@pytest.fixture
def day(monkeypatch):
    monkeypatch.setattr(chat_template, "_day", [datetime.date.today()])


def test_a_template_that_writes_the_date_writes_that_on_which_its_run_began(
    tokenizer, day, tmp_path
):
    dated = copy.deepcopy(tokenizer)
    dated.chat_template = DATED
    prompt, today = [{"role": "user", "content": "one"}], datetime.date.today()
    assert chat_template.render_chat(dated, prompt, False) == f"{today:%d %B %Y}: one<|im_end|>"
    assert run_files.start_date_or_today(tmp_path) == today.isoformat()
    (tmp_path / "env.json").write_text('{"begun": "2026-01-31"}')
    run_files.write_settings_facts_and_code("model: demo\n", tmp_path)  # as a resumed run does
    policy.load_run_config_and_set_template_date(str(tmp_path), {})
    assert chat_template.render_chat(dated, prompt, False) == "31 January 2026: one<|im_end|>"
    (tmp_path / "env.json").write_text('{"begun": 5}')
    assert "Invalid isoformat string: '5'" in catch_message(
        policy.load_run_config_and_set_template_date, str(tmp_path), {}
    )


def test_the_id_that_ends_a_reply_is_the_templates_own(tokenizer):
    assert ends.find_end_of_reply_id(tokenizer) == tokenizer.convert_tokens_to_ids("<|im_end|>")
    endless = copy.deepcopy(tokenizer)
    endless.chat_template = "{% for message in messages %}{{ message.content }}\n{% endfor %}"
    assert ends.find_end_of_reply_id(endless) is None
