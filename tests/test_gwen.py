"""The model against mlx_lm on random weights, its files against their readers."""

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
def test_logits_with_a_cache_equal_those_of_mlx_lm_with_its_own(checkpoints, name):
    ours, theirs = (
        gwen.load_model(checkpoints[name], mx.float32),
        load_with_mlx_lm(checkpoints[name]),
    )
    cache, their_cache = KVCache(ours.config.layer_kinds), make_prompt_cache(theirs)
    for begin, end in ((0, 5), (5, 6), (6, 7), (7, 12)):
        part = TOKENS[:, begin:end]
        assert relative_error(ours(part, cache), theirs(part, their_cache)) < 1e-4


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("pad_id", [0, 319])
def test_a_ragged_batch_of_seven_prompts_equals_each_prompt_alone(checkpoints, name, pad_id):
    model, theirs = (
        gwen.load_model(checkpoints[name], mx.float32),
        load_with_mlx_lm(checkpoints[name]),
    )
    prompts = [RNG.integers(0, 320, length).tolist() for length in (1, 2, 3, 5, 8, 13, 9)]
    follow = RNG.integers(0, 320, (7, 4)).astype(np.int32)  # the same tokens are decoded in both
    longest = max(map(len, prompts))
    pad = [longest - len(prompt) for prompt in prompts]
    cache = KVCache(model.config.layer_kinds, pad=mx.array(pad, dtype=mx.int32))
    tokens = mx.array([[pad_id] * p + prompt for p, prompt in zip(pad, prompts, strict=True)])
    together = [model(tokens, cache)[:, -1:]]
    together += [model(mx.array(follow[:, t : t + 1]), cache) for t in range(4)]
    batch = mx.concatenate(together, axis=1)
    for row, prompt in enumerate(prompts):
        alone = theirs(mx.array([prompt + follow[row].tolist()]))[:, len(prompt) - 1 :]
        assert relative_error(batch[row : row + 1], alone) < 1e-4


def ragged(rows: list[list[int]]) -> mx.array:
    return mx.array([row + [0] * (max(map(len, rows)) - len(row)) for row in rows])


@pytest.fixture(params=["in parts", "joined"])
def form(request, monkeypatch):
    """Both forms of attention in a tree; a GPU joins the parts of all but a few queries."""
    monkeypatch.setattr(
        attention, "has_float32_attention_kernel", lambda _: request.param == "joined"
    )
    monkeypatch.setattr(attention, "FEW_QUERIES", 0)


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("name", FAMILIES)
def test_a_tree_of_shared_runs_gives_each_leaf_the_hidden_states_of_its_whole_path(
    checkpoints, name
):
    model = gwen.load_model(checkpoints[name], mx.float32)
    # three levels of ragged rows, and each level's parents: two roots, of which one row has no child
    levels = [
        [RNG.integers(0, 320, n).tolist() for n in level]
        for level in ([5, 9], [3, 1, 6, 4], [2, 7, 1, 4, 3])
    ]
    parents = [[1, 0, 1, 0], [2, 0, 2, 3, 0]]
    cache = TreeCache(model.config.layer_kinds).with_new_level([len(row) for row in levels[0]])
    model.hidden(ragged(levels[0]), cache)
    middle = cache.with_new_level([len(row) for row in levels[1]], parents[0])
    model.hidden(ragged(levels[1]), middle)
    for chosen in (
        [0, 1, 2, 3, 4],
        [1, 4],
        [0, 2],
        [3],
        [0, 3],
    ):  # of the leaves, so that parts of a level are used
        leaves = [levels[2][row] for row in chosen]
        below = middle.with_new_level(
            [len(row) for row in leaves], [parents[1][row] for row in chosen]
        )
        hidden = model.hidden(ragged(leaves), below)
        for index, row in enumerate(chosen):
            parent = parents[1][row]
            path = levels[0][parents[0][parent]] + levels[1][parent] + levels[2][row]
            expected = model.hidden(mx.array([path]))[:, -len(levels[2][row]) :]
            assert relative_error(hidden[index : index + 1, : len(levels[2][row])], expected) < 1e-5
    all_bytes, used_bytes = (
        (sum(array.nbytes for array in state.arrays()) for state in states)
        for states in ((cache, middle), (below,))
    )
    assert sum(used_bytes) < sum(all_bytes), "unused rows are left out"


@pytest.mark.parametrize(("dtype", "error"), [(mx.float16, 5e-3), (mx.bfloat16, 4e-2)])
def test_a_16_bit_model_is_near_the_float32_one_and_its_logits_have_its_dtype(
    checkpoints, dtype, error
):
    for name in ("qwen2", "qwen3-yarn"):
        exact, rounded = (
            gwen.load_model(checkpoints[name], mx.float32),
            gwen.load_model(checkpoints[name], dtype),
        )
        logits = rounded(TOKENS)
        assert logits.dtype == dtype
        assert relative_error(logits, exact(TOKENS)) < error


# ---- files


@pytest.mark.parametrize("name", CONFIGS)
def test_what_is_saved_loads_in_mlx_lm_and_transformers_and_again_here(
    checkpoints, tokenizer, name, tmp_path
):
    from transformers import AutoConfig, AutoTokenizer

    model = gwen.load_model(checkpoints[name], mx.float32)
    gwen.save(model, tmp_path / "saved", tokenizer)
    assert relative_error(model(TOKENS), load_with_mlx_lm(tmp_path / "saved")(TOKENS)) < 1e-4

    again, loaded_tokenizer = gwen.load(tmp_path / "saved", mx.float32)
    before, after = (dict(tree_flatten(m.parameters())) for m in (model, again))
    assert before.keys() == after.keys() and all(
        mx.array_equal(before[key], after[key]) for key in before
    )
    fields = [field for field in vars(model.config) if field != "raw"]
    assert [getattr(model.config, f) for f in fields] == [getattr(again.config, f) for f in fields]

    theirs = AutoConfig.from_pretrained(str(tmp_path / "saved"))
    assert theirs.model_type == model.config.model_type
    theirs = theirs.get_text_config()
    assert theirs.vocab_size == 320
    assert theirs.tie_word_embeddings == model.config.tie_word_embeddings
    assert theirs.rope_parameters["rope_theta"] == model.config.rope_theta
    assert (
        theirs.rope_parameters["rope_type"]
        == (model.config.rope_scaling or {"rope_type": "default"})["rope_type"]
    )
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
            assert reader.apply_chat_template(messages, **options) == tokenizer.apply_chat_template(
                messages, **options
            )


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_a_16_bit_model_is_saved_in_16_bits(checkpoints, tokenizer, tmp_path, dtype):
    model = gwen.load_model(checkpoints["qwen3"], dtype)
    gwen.save(model, tmp_path, tokenizer)
    assert {array.dtype for array in mx.load(str(tmp_path / "model.safetensors")).values()} == {
        dtype
    }
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == str(dtype).removeprefix(
        "mlx.core."
    )
    assert relative_error(gwen.load_model(tmp_path, dtype)(TOKENS), model(TOKENS)) == 0


def test_a_qwen2_with_rope_settings_in_the_newer_layout_is_saved_so_that_mlx_lm_reads_them(
    tokenizer, tmp_path
):
    # mlx_lm's Qwen2 knows no rope_parameters and would take a theta of 1,000,000 and no YaRN without a word
    config = {key: value for key, value in QWEN2.items() if key != "rope_theta"}
    config |= {"rope_parameters": YARN | {"rope_theta": 10000.0}}
    model = gwen.load_model(write_checkpoint(tmp_path / "source", config), mx.float32)
    gwen.save(model, tmp_path / "saved", tokenizer)
    assert relative_error(model(TOKENS), load_with_mlx_lm(tmp_path / "saved")(TOKENS)) < 1e-4


def test_the_end_ids_are_those_of_the_generation_config_else_of_the_config(checkpoints, tmp_path):
    assert hub.load_config(checkpoints["qwen3"]).eos_ids == (2, 0)
    directory = write_checkpoint(tmp_path, QWEN2)
    (directory / "generation_config.json").unlink()
    assert hub.load_config(directory).eos_ids == (2,)
    assert hub.make_config(QWEN2, {"eos_token_id": 5}).eos_ids == (5,)
    assert (
        hub.make_config(
            {key: value for key, value in QWEN2.items() if key != "eos_token_id"}
        ).eos_ids
        == ()
    )


def test_the_dtype_is_that_of_the_argument_else_of_the_environment(checkpoints, monkeypatch):
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


def test_loading_holds_little_more_than_the_model(tmp_path):
    larger = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 12}
    directory = write_checkpoint(tmp_path, QWEN3 | larger)
    model = gwen.load_model(directory, mx.float32)
    num_bytes = sum(array.nbytes for _, array in tree_flatten(model.parameters()))
    assert (
        num_bytes > 30e6
        and measure_peak(lambda: gwen.load_model(directory, mx.float32).parameters())
        < 1.2 * num_bytes
    )


# ---- what is wrong with a directory


def raises_one_line(match: str) -> Any:
    """Like pytest.raises(ValueError), but the message must be one line of a length that a person reads."""
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
    ("base", "change", "word"), BAD_CONFIGS, ids=[f"{row[0]}-{row[2]}" for row in BAD_CONFIGS]
)
def test_a_configuration_that_is_wrong_or_not_supported_is_refused_by_name(
    directory, base, change, word
):
    with raises_one_line(re.escape(word)):
        if base == "qwen3":  # its weights are there, and are held against it
            (directory / "config.json").write_text(json.dumps(QWEN3 | change))
            gwen.load_model(directory)
        hub.make_config(BASES[base] | change)


def test_layers_without_positions_are_a_list_or_an_interval_and_the_head_of_smollm3_is_tied():
    named = hub.make_config(SMOLLM3)
    silent = ("no_rope_layers", "tie_word_embeddings")
    counted = hub.make_config({key: value for key, value in SMOLLM3.items() if key not in silent})
    assert (
        named.layer_kinds == counted.layer_kinds == (*["full_attention"] * 3, "unrotated_attention")
    )
    assert counted.tie_word_embeddings


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A tiny Qwen3 to be broken; the end ids are those of its config.json."""
    write_checkpoint(tmp_path, QWEN3)
    (tmp_path / "generation_config.json").unlink()
    return tmp_path


def test_the_files_that_an_index_names_are_read_and_no_other(directory):
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


Q, K = "model.layers.1.self_attn.q_proj.weight", "model.layers.1.self_attn.k_proj.weight"


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
def test_weights_that_do_not_fit_are_named(directory, changes, match):
    change_weights(directory, changes)
    with raises_one_line(match):
        gwen.load_model(directory)


def test_tables_of_rotary_frequencies_and_a_head_equal_to_a_tied_embedding_are_ignored(directory):
    plain = gwen.load_model(directory, mx.float32)(TOKENS)
    embedding = mx.load(str(directory / "model.safetensors"))["model.embed_tokens.weight"]
    table = "model.layers.0.self_attn.rotary_emb.inv_freq"
    change_weights(directory, {table: mx.zeros((16,)), "lm_head.weight": embedding})
    assert mx.array_equal(gwen.load_model(directory, mx.float32)(TOKENS), plain)


@pytest.mark.parametrize("change", ["another head", "two rows swapped", "fewer rows"])
def test_a_head_beside_a_tied_embedding_is_refused_and_used_where_nothing_ties_them(
    directory, change
):
    head = np.array(mx.load(str(directory / "model.safetensors"))["model.embed_tokens.weight"])
    if change == "another head":
        head = np.zeros_like(head)
    elif change == "two rows swapped":
        head[[7, 9]] = head[[9, 7]]
    else:
        head = head[:-1]
    tied = gwen.load_model(directory, mx.float32)(TOKENS)
    change_weights(directory, {"lm_head.weight": mx.array(head)})
    with raises_one_line("lm_head.weight .*tie_word_embeddings"):
        gwen.load_model(directory)
    raw = json.loads((directory / "config.json").read_text()) | {"tie_word_embeddings": False}
    (directory / "config.json").write_text(json.dumps(raw))
    if change == "two rows swapped":
        own = np.array(gwen.load_model(directory, mx.float32)(TOKENS))
        expected = np.array(tied)
        expected[..., [7, 9]] = expected[..., [9, 7]]
        np.testing.assert_allclose(own, expected, atol=1e-5)


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
def test_no_configuration_raises_anything_but_a_value_error(checkpoints, changes):
    raw = json.loads(json.dumps(QWEN3 | changes))
    try:
        config = hub.make_config(raw, raw)
        ops.Rope(config.head_dim, config.rope_theta, config.rope_scaling)
    except ValueError as error:
        assert "\n" not in str(error)


# ---- adapters and the choice of a model


def pair_of(name, low, high):
    halves = {f"{name}.lora_a": low, f"{name}.lora_b": high}
    return {key: mx.zeros(shape) for key, shape in halves.items() if shape}


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
            (pair_of(*pair), {"lora_parameters": {"rank": 3, "scale": 1}}, pattern)
            for pair, pattern in [
                (("model.layers.7.mlp.x", (48, 3), None), "does not have two matrices of"),
                (("model.layers.7.mlp.x", (48, 3), (3, 128)), "is not a projection of this model"),
                ((Q[:-7], (48, 3), (2, 128)), "does not have two matrices of"),
                ((Q[:-7], (3,), (3, 128)), "does not have two matrices of"),
                ((Q[:-7], (47, 3), (3, 128)), "do not fit the model's weight"),
            ]
        ],
    ],
)
def test_an_adapter_that_is_not_of_this_model_is_named(directory, tmp_path, tensors, config, match):
    (adapter := tmp_path / "adapter").mkdir()
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(adapter / "adapters.safetensors"), tensors or {"x": mx.zeros(1)})
    with raises_one_line(match):
        gwen.load_model(directory, mx.float32, adapter)
