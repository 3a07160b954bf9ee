"""Adapters: they begin at the base, train, switch off, merge, and mean the same to mlx_lm."""

import json

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from conftest import catch_message
from mlx.utils import tree_flatten
from mlx_lm.tuner.utils import load_adapters
from mlx_lm.utils import load_model as mlx_lm_load_model

import gwen
import lora
from disk import adapters, hub, model_choice

TOKENS = mx.array([[1, 5, 9, 2, 30], [7, 7, 4, 3, 2]])


@pytest.fixture
def tiny_qwen2(checkpoints):
    return checkpoints["qwen2"]


def adapted(directory, rank=4, scale=3.0, targets=lora.TARGETS):
    """A model whose adapters are not at their initial zero."""
    model = gwen.load_model(directory)
    lora.apply(model, rank, scale, targets)
    for index, (_, layer) in enumerate(lora.adapted_layers(model)):
        layer.lora_b = mx.random.normal(layer.lora_b.shape, key=mx.random.key(index)) * 0.2
    return model


@pytest.mark.parametrize(
    ("dtype", "epsilon"), [(mx.float16, 2**-10), (mx.bfloat16, 2**-7)], ids=str
)
def test_in_16_bits_an_adapted_projection_and_its_gradients_are_those_of_its_formula(
    dtype, epsilon
):
    """Errors in units of one rounding, relative to the largest number; the gradients of A and B come in float32."""
    linear = nn.Linear(48, 80)
    linear.set_dtype(dtype)
    layer = lora.LoRALinear(linear, 6, 2.5, mx.random.key(0))
    x, d_y = (
        mx.random.normal((2, 70, size), key=mx.random.key(size)).astype(dtype) for size in (48, 80)
    )
    masters = layer.lora_a, mx.random.normal((6, 80), key=mx.random.key(3))

    def call(x, lora_a, lora_b):
        layer.lora_a, layer.lora_b = lora_a, lora_b
        return layer(x)

    (y,), gradients = mx.vjp(call, [x, *masters], [d_y])
    assert [g.dtype for g in gradients] == [dtype, mx.float32, mx.float32]
    arrays = (x, d_y, linear.weight, linear.bias, *masters)
    rows, d_rows, weight, bias, a, b = (
        np.array(array.astype(mx.float32)).astype(np.float64) for array in arrays
    )
    rows, d_rows = rows.reshape(140, 48), d_rows.reshape(140, 80)
    d_low = 2.5 * d_rows @ b.T
    expected = [rows @ weight.T + bias + 2.5 * rows @ a @ b, d_rows @ weight + d_low @ a.T]
    expected += [rows.T @ d_low, 2.5 * (rows @ a).T @ d_rows]
    for ours, theirs in zip([y, *gradients], expected, strict=True):
        error = np.abs(np.array(ours.astype(mx.float32)).reshape(theirs.shape) - theirs).max()
        assert error <= 2 * epsilon * np.abs(theirs).max()


def test_the_16_bit_copies_of_an_adapter_are_made_once_for_the_masters_at_hand(tiny_model):
    model = gwen.load_model(tiny_model, mx.float16)
    lora.apply(model, 4, 2.0)
    _, layer = next(lora.adapted_layers(model))
    first = layer.cached_a_and_scaled_b(mx.float16)
    assert layer.lora_a.dtype == layer.lora_b.dtype == mx.float32
    assert all(
        old is new for old, new in zip(first, layer.cached_a_and_scaled_b(mx.float16), strict=True)
    )
    before = model(TOKENS)
    layer.lora_b = mx.ones(layer.lora_b.shape)
    assert not mx.allclose(model(TOKENS), before)
    layer.lora_b = mx.zeros(layer.lora_b.shape)
    assert mx.array_equal(model(TOKENS), before)


@pytest.mark.parametrize("family", ["qwen3", "qwen2", "qwen3-gqa8", "qwen3.5"])
@pytest.mark.parametrize("targets", [lora.TARGETS, ("qkv_proj",), ("o_proj", "gate_up_proj")])
def test_the_masters_that_an_adapter_holds_come_out_of_it_bit_for_bit(checkpoints, family, targets):
    model = adapted(checkpoints[family], targets=targets)
    ours, out = (
        dict(tree_flatten(model.trainable_parameters())),
        adapters.fuse_adapter_weights(lora.mlx_lm_adapter_weights(model)),
    )
    assert sorted(ours) == list(out)
    assert all(mx.array_equal(ours[name], out[name]).item() for name in ours)


@pytest.mark.parametrize(
    "targets", [lora.TARGETS, ("qkv_proj",), ("o_proj", "down_proj"), ("gate_up_proj",)]
)
def test_the_adapter_in_mlx_lm_gives_the_same_logits(tiny_model, tiny_qwen2, tmp_path, targets):
    for index, directory in enumerate((tiny_model, tiny_qwen2)):
        model = adapted(directory, targets=targets)
        lora.save_adapter_or_full_weights(model, tmp_path / str(index), "tiny")
        peer, _ = mlx_lm_load_model(directory)
        load_adapters(peer, str(tmp_path / str(index)))
        np.testing.assert_allclose(
            np.array(peer(TOKENS)), np.array(model(TOKENS)), atol=1e-4, rtol=1e-4
        )


@pytest.mark.parametrize("targets", [lora.TARGETS, ("qkv_proj",), ("down_proj",)])
def test_an_attached_adapter_is_to_the_bit_what_it_was_and_can_be_switched_off(
    tiny_model, tmp_path, targets
):
    model = adapted(tiny_model, targets=targets)
    lora.save_adapter_or_full_weights(model, tmp_path, "tiny")
    again = gwen.load_model(tiny_model)
    base = again(TOKENS)
    lora.attach_saved_adapter(again, tmp_path)
    assert mx.array_equal(again(TOKENS), model(TOKENS)) and not mx.allclose(again(TOKENS), base)
    merged = gwen.load_model(tiny_model, adapter=tmp_path)
    np.testing.assert_allclose(
        np.array(merged(TOKENS)), np.array(model(TOKENS)), atol=1e-4, rtol=1e-4
    )
    with lora.disable_adapters(again):
        assert mx.array_equal(again(TOKENS), base)
        with lora.disable_adapters(again):
            pass
        assert mx.array_equal(again(TOKENS), base)
    assert mx.array_equal(again(TOKENS), model(TOKENS))


def test_an_adapter_of_others_whose_parts_have_an_a_each_is_attached_as_it_is_merged(
    tiny_model, tmp_path
):
    lora.save_adapter_or_full_weights(adapted(tiny_model), tmp_path, "tiny")
    weights = dict(mx.load(str(tmp_path / "adapters.safetensors")))
    weights = {
        name: w for name, w in weights.items() if "k_proj" not in name and "up_proj" not in name
    }
    for index, name in enumerate(sorted(name for name in weights if name.endswith("lora_a"))):
        weights[name] = weights[name] + 0.1 * mx.random.normal(
            weights[name].shape, key=mx.random.key(index)
        )
    mx.save_safetensors(str(tmp_path / "adapters.safetensors"), weights)
    model = gwen.load_model(tiny_model)
    lora.attach_saved_adapter(model, tmp_path)
    merged = gwen.load_model(tiny_model, adapter=tmp_path)
    np.testing.assert_allclose(
        np.array(model(TOKENS)), np.array(merged(TOKENS)), atol=1e-4, rtol=1e-4
    )


def test_a_model_trained_whole_is_saved_as_a_full_adapter(tiny_model, tmp_path):
    model = gwen.load_model(tiny_model)
    model.norm.weight = model.norm.weight * 1.5
    lora.save_adapter_or_full_weights(model, tmp_path, "tiny")
    assert json.loads((tmp_path / "adapter_config.json").read_text())["fine_tune_type"] == "full"
    peer, _ = mlx_lm_load_model(tiny_model)
    load_adapters(peer, str(tmp_path))
    np.testing.assert_allclose(
        np.array(peer(TOKENS)), np.array(model(TOKENS)), atol=1e-4, rtol=1e-4
    )
    assert mx.array_equal(gwen.load_model(tiny_model, adapter=tmp_path)(TOKENS), model(TOKENS))


def test_an_adapter_is_found_in_its_own_directory_and_in_that_of_its_run(tiny_model, tmp_path):
    lora.save_adapter_or_full_weights(
        adapted(tiny_model), tmp_path / "run" / "adapter", str(tiny_model)
    )
    adapter = tmp_path / "run" / "adapter"
    assert (
        adapters.find_adapter_directory(tmp_path / "run")
        == adapters.find_adapter_directory(str(adapter))
        == adapter
    )
    assert model_choice.choose_model_and_reason(None, tmp_path / "run") == (
        str(tiny_model),
        "which the adapter was trained on",
    )
    assert model_choice.choose_model_and_reason("demo", tmp_path / "run") == (
        "demo",
        "as requested",
    )
    merged, same = (
        gwen.load_model(tiny_model, adapter=path) for path in (tmp_path / "run", adapter)
    )
    assert mx.array_equal(merged(TOKENS), same(TOKENS))
    message = catch_message(adapters.find_adapter_directory, tmp_path)
    assert message.startswith(f"--adapter {tmp_path} ") and "no adapter_config.json" in message


def test_an_unknown_target_is_refused_by_name(tiny_model):
    assert "q_proj" in catch_message(lora.apply, gwen.load_model(tiny_model), 4, 2.0, ["q_proj"])


def begun(directory, path, rank=4, scale=3.0, targets=lora.TARGETS):
    """A model in training that begins with the adapter at `path`."""
    model = gwen.load_model(directory)
    start = lora.read_adapter_for_model(model, path)
    lora.apply(model, rank, scale, targets)
    lora.initialize_adapters(model, *start)
    return model


@pytest.mark.parametrize(("rank", "scale"), [(4, 3.0), (7, 3.0), (4, 1.5)])
def test_training_can_begin_with_an_adapter_which_is_then_the_model_before_training(
    tiny_model, tmp_path, rank, scale
):
    theirs = adapted(tiny_model)
    lora.save_adapter_or_full_weights(theirs, tmp_path, str(tiny_model))
    model = begun(tiny_model, tmp_path, rank, scale)
    np.testing.assert_allclose(np.array(model(TOKENS)), np.array(theirs(TOKENS)), atol=1e-5)
    assert (rank, scale) != (4, 3.0) or mx.array_equal(model(TOKENS), theirs(TOKENS))
    start = model(TOKENS)
    for _, layer in lora.adapted_layers(model):
        layer.lora_b = layer.lora_b + 0.1
    trained = model(TOKENS)
    assert not mx.allclose(trained, start)
    with lora.use_initial_weights(model):
        assert mx.array_equal(model(TOKENS), start)
    with lora.disable_adapters(model):
        assert mx.array_equal(model(TOKENS), gwen.load_model(tiny_model)(TOKENS))
    assert mx.array_equal(model(TOKENS), trained)


def test_an_adapter_whose_query_key_and_value_have_an_a_each_needs_three_times_the_rank(
    tiny_model, tmp_path
):
    rng, plain = np.random.default_rng(0), gwen.load_model(tiny_model)
    weights = hub.unfuse_weights(dict(tree_flatten(plain.parameters())), plain.config)
    pairs = {}
    for name in (
        name.removesuffix(".weight")
        for name in weights
        if name[-13:-7] in ("q_proj", "k_proj", "v_proj")
    ):
        out, width = weights[f"{name}.weight"].shape
        pairs[name] = tuple(
            mx.array(rng.normal(0, 0.2, shape).astype(np.float32))
            for shape in ((width, 2), (2, out))
        )
    adapters.write_peft_adapter(adapters.LoraAdapter("x", 2.0, pairs), tmp_path / "peft")
    assert "--lora-rank is 4, but --init-adapter has rank 6" in catch_message(
        begun, tiny_model, tmp_path / "peft"
    )
    with pytest.raises(ValueError, match=r"qkv_proj.* to --lora-targets"):
        begun(tiny_model, tmp_path / "peft", rank=6, targets=["o_proj"])
    merged = gwen.load_model(tiny_model, adapter=tmp_path / "peft")
    ours = begun(tiny_model, tmp_path / "peft", 6)
    np.testing.assert_allclose(np.array(ours(TOKENS)), np.array(merged(TOKENS)), atol=1e-4)
