"""The model against mlx_lm on random weights, and saved files against their readers."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
from conftest import (
    CONFIGS,
    FAMILIES,
    HYBRID,
    HYBRID_TEXT,
    LLAMA,
    QWEN2,
    QWEN3,
    ROOT,
    SMOLLM3,
    YARN,
    json_values,
    make_random_weights,
    measure_peak,
    relative_error,
    write_checkpoint,
)
from hypothesis import given, settings
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache

import gwen
from disk import hub
from kv_cache import KVCache
from layers import attention, ops
from layers.tree_cache import TreeCache
from machine import gpu

RNG = np.random.default_rng(0)
TOKENS = mx.array(RNG.integers(0, 320, (3, 12)).astype(np.int32))


def load_with_mlx_lm(directory: Path) -> Any:
    return mlx_lm.utils.load_model(directory)[0]


# ---- logits


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_with_a_cache_equal_the_logits_of_mlx_lm_with_a_cache(checkpoints, name):
    model = gwen.load_model(checkpoints[name], mx.float32)
    mlx_lm_model = load_with_mlx_lm(checkpoints[name])
    cache = KVCache(model.config.layer_kinds)
    mlx_lm_cache = make_prompt_cache(mlx_lm_model)
    for begin, end in ((0, 5), (5, 6), (6, 7), (7, 12)):
        part = TOKENS[:, begin:end]
        expected = mlx_lm_model(part, mlx_lm_cache)
        assert relative_error(model(part, cache), expected) < 1e-4


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("pad_id", [0, 319])
def test_a_padded_batch_of_seven_prompts_equals_each_prompt_alone_in_mlx_lm(
    checkpoints, name, pad_id
):
    model = gwen.load_model(checkpoints[name], mx.float32)
    mlx_lm_model = load_with_mlx_lm(checkpoints[name])
    prompts = [RNG.integers(0, 320, length).tolist() for length in (1, 2, 3, 5, 8, 13, 9)]
    completions = RNG.integers(0, 320, (7, 4)).astype(np.int32)  # both models read these tokens
    longest = max(map(len, prompts))
    pad = [longest - len(prompt) for prompt in prompts]
    cache = KVCache(model.config.layer_kinds, pad=mx.array(pad, dtype=mx.int32))
    tokens = mx.array([[pad_id] * p + prompt for p, prompt in zip(pad, prompts, strict=True)])

    steps = [model(tokens, cache)[:, -1:]]
    steps += [model(mx.array(completions[:, t : t + 1]), cache) for t in range(4)]
    batch = mx.concatenate(steps, axis=1)

    for row, prompt in enumerate(prompts):
        sequence = mx.array([prompt + completions[row].tolist()])
        expected = mlx_lm_model(sequence)[:, len(prompt) - 1 :]
        assert relative_error(batch[row : row + 1], expected) < 1e-4


def pad_rows(rows: list[list[int]]) -> mx.array:
    longest = max(map(len, rows))
    return mx.array([row + [0] * (longest - len(row)) for row in rows])


@pytest.fixture(params=["in parts", "joined"])
def form_of_tree_attention(request, monkeypatch):
    """Selects one of two forms of attention in a tree. A GPU joins the parts for many queries."""
    monkeypatch.setattr(
        attention, "has_float32_attention_kernel", lambda _: request.param == "joined"
    )
    monkeypatch.setattr(attention, "FEW_QUERIES", 0)


@pytest.mark.usefixtures("form_of_tree_attention")
@pytest.mark.parametrize("name", FAMILIES)
def test_a_leaf_of_a_prefix_tree_has_the_hidden_states_of_the_full_sequence(checkpoints, name):
    model = gwen.load_model(checkpoints[name], mx.float32)
    # two roots; one row of the second level has no child
    levels = []
    for lengths in ([5, 9], [3, 1, 6, 4], [2, 7, 1, 4, 3]):
        levels.append([RNG.integers(0, 320, length).tolist() for length in lengths])
    roots, inner_rows, all_leaves = levels
    root_of_inner_row = [1, 0, 1, 0]
    inner_row_of_leaf = [2, 0, 2, 3, 0]

    root_cache = TreeCache(model.config.layer_kinds).with_new_level(list(map(len, roots)))
    model.hidden(pad_rows(roots), root_cache)
    inner_cache = root_cache.with_new_level(list(map(len, inner_rows)), root_of_inner_row)
    model.hidden(pad_rows(inner_rows), inner_cache)

    # most selections of leaves use only a part of the levels above
    for selected in ([0, 1, 2, 3, 4], [1, 4], [0, 2], [3], [0, 3]):
        leaves = [all_leaves[leaf] for leaf in selected]
        parents = [inner_row_of_leaf[leaf] for leaf in selected]
        leaf_cache = inner_cache.with_new_level(list(map(len, leaves)), parents)
        hidden = model.hidden(pad_rows(leaves), leaf_cache)
        for row, (leaf, parent) in enumerate(zip(leaves, parents, strict=True)):
            sequence = roots[root_of_inner_row[parent]] + inner_rows[parent] + leaf
            expected = model.hidden(mx.array([sequence]))[:, -len(leaf) :]
            assert relative_error(hidden[row : row + 1, : len(leaf)], expected) < 1e-5

    all_bytes = num_bytes_of_cache(root_cache) + num_bytes_of_cache(inner_cache)
    assert num_bytes_of_cache(leaf_cache) < all_bytes, "unused rows are left out"


def num_bytes_of_cache(cache: TreeCache) -> int:
    return sum(array.nbytes for array in cache.arrays())


@pytest.mark.parametrize(("dtype", "error"), [(mx.float16, 5e-3), (mx.bfloat16, 4e-2)])
def test_a_16_bit_model_is_near_the_float32_model_and_gives_16_bit_logits(
    checkpoints, dtype, error
):
    for name in ("qwen2", "qwen3-yarn"):
        float32_model = gwen.load_model(checkpoints[name], mx.float32)
        model = gwen.load_model(checkpoints[name], dtype)
        logits = model(TOKENS)
        assert logits.dtype == dtype
        assert relative_error(logits, float32_model(TOKENS)) < error


# ---- files


@pytest.mark.parametrize("name", CONFIGS)
def test_a_saved_model_loads_in_gwen_mlx_lm_and_transformers(
    checkpoints, tokenizer, name, tmp_path
):
    from transformers import AutoConfig, AutoTokenizer

    model = gwen.load_model(checkpoints[name], mx.float32)
    gwen.save(model, tmp_path / "saved", tokenizer)
    assert relative_error(model(TOKENS), load_with_mlx_lm(tmp_path / "saved")(TOKENS)) < 1e-4

    # gwen
    loaded_model, loaded_tokenizer = gwen.load(tmp_path / "saved", mx.float32)
    weights = dict(tree_flatten(model.parameters()))
    loaded_weights = dict(tree_flatten(loaded_model.parameters()))
    assert weights.keys() == loaded_weights.keys()
    assert all(mx.array_equal(weights[key], loaded_weights[key]) for key in weights)
    for field, value in vars(model.config).items():
        if field != "raw":
            assert getattr(loaded_model.config, field) == value

    # transformers
    hf_config = AutoConfig.from_pretrained(str(tmp_path / "saved"))
    assert hf_config.model_type == model.config.model_type
    text_config = hf_config.get_text_config()
    assert text_config.vocab_size == 320
    assert text_config.tie_word_embeddings == model.config.tie_word_embeddings
    assert text_config.rope_parameters["rope_theta"] == model.config.rope_theta
    rope_scaling = model.config.rope_scaling or {"rope_type": "default"}
    assert text_config.rope_parameters["rope_type"] == rope_scaling["rope_type"]

    # the tokenizer and the chat template
    messages = [{"role": "user", "content": "what is two and two?"}]
    for reader in (loaded_tokenizer, AutoTokenizer.from_pretrained(str(tmp_path / "saved"))):
        assert reader.eos_token == "<|im_end|>"
        for thinking in (False, True):
            options = {
                "add_generation_prompt": True,
                "tokenize": True,
                "enable_thinking": thinking,
                "return_dict": False,
            }
            expected = tokenizer.apply_chat_template(messages, **options)
            assert reader.apply_chat_template(messages, **options) == expected


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_a_16_bit_model_is_saved_in_16_bits(checkpoints, tokenizer, tmp_path, dtype):
    model = gwen.load_model(checkpoints["qwen3"], dtype)
    gwen.save(model, tmp_path, tokenizer)

    weights = mx.load(str(tmp_path / "model.safetensors"))
    assert {array.dtype for array in weights.values()} == {dtype}
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["dtype"] == str(dtype).removeprefix("mlx.core.")
    assert relative_error(gwen.load_model(tmp_path, dtype)(TOKENS), model(TOKENS)) == 0


def test_mlx_lm_reads_the_rope_settings_of_a_saved_qwen2_that_had_the_newer_layout(
    tokenizer, tmp_path
):
    # mlx_lm's Qwen2 ignores rope_parameters; it would use a theta of 1,000,000 and no YaRN
    config = {key: value for key, value in QWEN2.items() if key != "rope_theta"}
    config |= {"rope_parameters": YARN | {"rope_theta": 10000.0}}
    model = gwen.load_model(write_checkpoint(tmp_path / "source", config), mx.float32)
    gwen.save(model, tmp_path / "saved", tokenizer)
    assert relative_error(model(TOKENS), load_with_mlx_lm(tmp_path / "saved")(TOKENS)) < 1e-4


def test_end_ids_of_the_generation_config_override_those_of_the_config(checkpoints, tmp_path):
    assert hub.load_config(checkpoints["qwen3"]).eos_ids == (2, 0)
    directory = write_checkpoint(tmp_path, QWEN2)
    (directory / "generation_config.json").unlink()
    assert hub.load_config(directory).eos_ids == (2,)
    assert hub.make_config(QWEN2, {"eos_token_id": 5}).eos_ids == (5,)
    without_end_ids = {key: value for key, value in QWEN2.items() if key != "eos_token_id"}
    assert hub.make_config(without_end_ids).eos_ids == ()


def test_the_dtype_argument_overrides_the_environment(checkpoints, monkeypatch):
    monkeypatch.delenv("GWEN_DTYPE", raising=False)
    assert gwen.dtype_from_env_or_device() == (mx.float16 if gpu.on_gpu() else mx.float32)
    monkeypatch.setenv("GWEN_DTYPE", "bfloat16")
    assert gwen.load_model(checkpoints["qwen3"]).head_weight.dtype == mx.bfloat16
    assert gwen.load_model(checkpoints["qwen3"], mx.float16).head_weight.dtype == mx.float16
    monkeypatch.setenv("GWEN_DTYPE", "int4")
    with pytest.raises(
        ValueError, match="GWEN_DTYPE='int4' is not one of float16, bfloat16, float32"
    ):
        gwen.load_model(checkpoints["qwen3"])


def test_loading_uses_little_more_memory_than_the_model(tmp_path):
    larger = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 12}
    directory = write_checkpoint(tmp_path, QWEN3 | larger)
    model = gwen.load_model(directory, mx.float32)
    num_bytes = sum(array.nbytes for _, array in tree_flatten(model.parameters()))
    assert num_bytes > 30e6
    peak = measure_peak(lambda: gwen.load_model(directory, mx.float32).parameters())
    assert peak < 1.2 * num_bytes


# ---- faulty directories


def raises_one_line(match: str) -> Any:
    """Like pytest.raises(ValueError), but the message must be one line of readable length."""
    return pytest.raises(ValueError, match=rf"^(?=[^\n]{{10,500}}\Z).*{match}")


BASES = {
    "qwen3": QWEN3,
    "llama": LLAMA,
    "smollm3": SMOLLM3,
    "qwen3_5": HYBRID,
    "qwen3_5_text": HYBRID_TEXT,
}
BAD_CONFIGS = [
    json.loads(line) for line in (ROOT / "tests" / "bad_configs.jsonl").read_text().splitlines()
]


@pytest.mark.parametrize(
    ("base", "change", "expected_text"),
    BAD_CONFIGS,
    ids=[f"{row[0]}-{row[2]}" for row in BAD_CONFIGS],
)
def test_a_wrong_or_unsupported_configuration_is_refused_and_the_field_is_named(
    directory, base, change, expected_text
):
    with raises_one_line(re.escape(expected_text)):
        if base == "qwen3":  # the directory has the weights of this model to compare with
            (directory / "config.json").write_text(json.dumps(QWEN3 | change))
            gwen.load_model(directory)
        hub.make_config(BASES[base] | change)


def test_smollm3_ties_its_head_and_lists_layers_without_positions_or_gives_their_interval():
    config_with_list = hub.make_config(SMOLLM3)
    removed = ("no_rope_layers", "tie_word_embeddings")
    fields = {key: value for key, value in SMOLLM3.items() if key not in removed}
    config_with_interval = hub.make_config(fields)
    layer_kinds = (*["full_attention"] * 3, "unrotated_attention")
    assert config_with_list.layer_kinds == layer_kinds
    assert config_with_interval.layer_kinds == layer_kinds
    assert config_with_interval.tie_word_embeddings


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """The directory of a tiny Qwen3, which a test may damage. Its config.json has the end ids."""
    write_checkpoint(tmp_path, QWEN3)
    (tmp_path / "generation_config.json").unlink()
    return tmp_path


def test_only_the_files_that_an_index_names_are_read(directory):
    shutil.copy(directory / "model.safetensors", directory / "model-one.safetensors")
    change_weights(directory, {"model.layers.9.extra.weight": mx.zeros((2, 2))})
    with raises_one_line("model.layers.9.extra.weight"):
        gwen.load_model(directory)
    index = directory / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"model.norm.weight": "model-one.safetensors"}}))
    assert gwen.load_model(directory)

    for text, pattern in (
        (index.read_text().replace("one", "9"), "model-9.safetensors does not exist"),
        ("{}", "names no such file"),
    ):
        index.write_text(text)
        with raises_one_line(pattern):
            gwen.load_model(directory)


def change_weights(directory: Path, changes: dict[str, mx.array | None]) -> None:
    weights: dict[str, Any] = make_random_weights(QWEN3) | changes
    mx.save_safetensors(
        str(directory / "model.safetensors"), {k: v for k, v in weights.items() if v is not None}
    )


Q = "model.layers.1.self_attn.q_proj.weight"
K = "model.layers.1.self_attn.k_proj.weight"


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        (
            {Q: mx.zeros((64, 48)), K: mx.zeros((128, 48))},
            r"k_proj.weight has the shape \(128, 48\).*asks for \(64, 48\)",
        ),
        ({K: mx.zeros((64, 47))}, r"k_proj.weight has the shape \(64, 47\)"),
        ({K: None}, "k_proj.weight is missing"),
        ({Q: mx.zeros((128, 6), mx.uint32)}, r"q_proj.weight has the shape \(128, 6\)"),
        (
            {Q: mx.zeros((128, 48), mx.int8)},
            "q_proj.weight.* mlx.core.int8, but only floating-point",
        ),
        (
            {"model.layers.0.mlp.gate_proj.scales": mx.zeros(3)},
            r"gate_proj.scales has the shape \(3,\), .*config.json describes has no",
        ),
        ({"model.layers.0.self_attn.q_proj.bias": mx.zeros(128)}, "self_attn.q_proj.bias"),
    ],
    ids=["rows that cancel", "columns", "missing", "packed", "integer", "scales", "bias"],
)
def test_the_error_names_weights_that_do_not_fit_the_configuration(directory, changes, match):
    change_weights(directory, changes)
    with raises_one_line(match):
        gwen.load_model(directory)


def test_rotary_frequencies_and_a_copy_of_the_tied_embedding_are_ignored(directory):
    expected = gwen.load_model(directory, mx.float32)(TOKENS)
    embedding = mx.load(str(directory / "model.safetensors"))["model.embed_tokens.weight"]
    table = "model.layers.0.self_attn.rotary_emb.inv_freq"
    change_weights(directory, {table: mx.zeros((16,)), "lm_head.weight": embedding})
    assert mx.array_equal(gwen.load_model(directory, mx.float32)(TOKENS), expected)


@pytest.mark.parametrize("change", ["another head", "two rows swapped", "fewer rows"])
def test_a_head_that_differs_from_a_tied_embedding_is_refused_and_an_untied_head_is_used(
    directory, change
):
    head = np.array(mx.load(str(directory / "model.safetensors"))["model.embed_tokens.weight"])
    if change == "another head":
        head = np.zeros_like(head)
    elif change == "two rows swapped":
        head[[7, 9]] = head[[9, 7]]
    else:
        head = head[:-1]
    tied_logits = gwen.load_model(directory, mx.float32)(TOKENS)

    change_weights(directory, {"lm_head.weight": mx.array(head)})
    with raises_one_line("lm_head.weight .*tie_word_embeddings"):
        gwen.load_model(directory)

    raw = json.loads((directory / "config.json").read_text()) | {"tie_word_embeddings": False}
    (directory / "config.json").write_text(json.dumps(raw))
    if change == "two rows swapped":
        logits = np.array(gwen.load_model(directory, mx.float32)(TOKENS))
        expected = np.array(tied_logits)
        expected[..., [7, 9]] = expected[..., [9, 7]]
        np.testing.assert_allclose(logits, expected, atol=1e-5)


JSON = st.sampled_from([0, 1, 2, 4, 32, 64]) | json_values(*YARN, "type", "rope_theta")
KEYS = [
    *QWEN3,
    "rope_scaling",
    "rope_parameters",
    "layer_types",
    "quantization_config",
    "partial_rotary_factor",
]


@pytest.mark.slow
@settings(max_examples=100)
@given(changes=st.dictionaries(st.sampled_from(KEYS), JSON, min_size=1, max_size=3))
def test_a_configuration_raises_nothing_but_a_value_error(checkpoints, changes):
    raw = json.loads(json.dumps(QWEN3 | changes))
    try:
        config = hub.make_config(raw, raw)
        ops.Rope(config.head_dim, config.rope_theta, config.rope_scaling)
    except ValueError as error:
        assert "\n" not in str(error)


# ---- adapters and the choice of a model


def make_lora_pair(name, a_shape, b_shape):
    shapes = {f"{name}.lora_a": a_shape, f"{name}.lora_b": b_shape}
    return {key: mx.zeros(shape) for key, shape in shapes.items() if shape}


@pytest.mark.parametrize(
    ("tensors", "config", "match"),
    [
        ({}, {"fine_tune_type": "dora"}, "fine_tune_type 'dora'"),
        (
            {"model.norm": mx.zeros(48)},
            {"fine_tune_type": "full"},
            r"no tensor model\.norm of",
        ),
        (
            {"model.norm.weight": mx.zeros(47)},
            {"fine_tune_type": "full"},
            r"no tensor model\.norm\.weight of shape \(47,\)",
        ),
        ({}, {"fine_tune_type": "lora"}, "{'lora_parameters': None}; the rank must"),
        ({}, {"lora_parameters": {"scale": 2}}, "{'scale': 2}}; the rank must"),
        *[
            (make_lora_pair(*arguments), {"lora_parameters": {"rank": 3, "scale": 1}}, pattern)
            for arguments, pattern in [
                (("model.layers.7.mlp.x", (48, 3), None), "does not have two matrices of"),
                (("model.layers.7.mlp.x", (48, 3), (3, 128)), "is not a projection of this model"),
                ((Q[:-7], (48, 3), (2, 128)), "does not have two matrices of"),
                ((Q[:-7], (3,), (3, 128)), "does not have two matrices of"),
                ((Q[:-7], (47, 3), (3, 128)), "do not fit the model's weight"),
            ]
        ],
    ],
)
def test_an_adapter_that_does_not_fit_the_model_is_refused(
    directory, tmp_path, tensors, config, match
):
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(adapter / "adapters.safetensors"), tensors or {"x": mx.zeros(1)})
    with raises_one_line(match):
        gwen.load_model(directory, mx.float32, adapter)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5"])
def test_the_tensors_that_a_family_skips_are_ignored_with_a_line(
    checkpoints, tmp_path, monkeypatch, capsys, family
):
    source = checkpoints[family.replace("_", ".")]
    directory = shutil.copytree(source, tmp_path / "model")
    weights_file = str(next(directory.glob("*.safetensors")))
    extra = {"model.extra.weight": mx.ones((2, 3))}
    mx.save_safetensors(weights_file, mx.load(weights_file) | extra)
    (directory / "model.safetensors.index.json").unlink(missing_ok=True)
    tokens = mx.array([[5, 6, 7]])
    with pytest.raises(ValueError, match=r"model\.extra\.weight"):
        gwen.load_model(directory, mx.float32)

    skipped = (*hub.FAMILIES[family].skipped, "model.extra.")
    monkeypatch.setitem(hub.FAMILIES, family, hub.FAMILIES[family]._replace(skipped=skipped))
    model = gwen.load_model(directory, mx.float32)
    assert "ignored 1 tensors" in capsys.readouterr().err
    assert mx.array_equal(model(tokens), gwen.load_model(source, mx.float32)(tokens))
