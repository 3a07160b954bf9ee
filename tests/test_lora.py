"""Adapters begin as the base model, train, switch off, merge, and give equal logits in mlx_lm."""

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


def load_adapted_model(directory, rank=4, scale=3.0, targets=lora.TARGETS):
    """A model whose adapters have moved away from their initial zero."""
    model = gwen.load_model(directory)
    lora.apply(model, rank, scale, targets)
    for index, (_, layer) in enumerate(lora.adapted_layers(model)):
        layer.lora_b = mx.random.normal(layer.lora_b.shape, key=mx.random.key(index)) * 0.2
    return model


def check_equal_logits(model, other_model, tolerance=1e-4):
    """Checks that two models give the same logits apart from rounding."""
    logits = np.array(model(TOKENS))
    other_logits = np.array(other_model(TOKENS))
    np.testing.assert_allclose(logits, other_logits, atol=tolerance, rtol=tolerance)


def to_float64(array):
    return np.array(array.astype(mx.float32)).astype(np.float64)


@pytest.mark.parametrize(
    ("dtype", "epsilon"), [(mx.float16, 2**-10), (mx.bfloat16, 2**-7)], ids=str
)
def test_in_16_bits_an_adapted_projection_and_its_gradients_equal_the_formula(dtype, epsilon):
    """Within two roundings of the largest number. The gradients of A and B are in float32."""
    linear = nn.Linear(48, 80)
    linear.set_dtype(dtype)
    layer = lora.LoRALinear(linear, 6, 2.5, mx.random.key(0))
    x = mx.random.normal((2, 70, 48), key=mx.random.key(48)).astype(dtype)
    d_y = mx.random.normal((2, 70, 80), key=mx.random.key(80)).astype(dtype)
    lora_a = layer.lora_a
    lora_b = mx.random.normal((6, 80), key=mx.random.key(3))

    def call(x, lora_a, lora_b):
        layer.lora_a = lora_a
        layer.lora_b = lora_b
        return layer(x)

    (y,), gradients = mx.vjp(call, [x, lora_a, lora_b], [d_y])
    assert [gradient.dtype for gradient in gradients] == [dtype, mx.float32, mx.float32]

    rows = to_float64(x).reshape(140, 48)
    d_rows = to_float64(d_y).reshape(140, 80)
    weight = to_float64(linear.weight)
    bias = to_float64(linear.bias)
    a = to_float64(lora_a)
    b = to_float64(lora_b)
    d_low_rank = 2.5 * d_rows @ b.T
    expected_arrays = [
        rows @ weight.T + bias + 2.5 * rows @ a @ b,
        d_rows @ weight + d_low_rank @ a.T,
        rows.T @ d_low_rank,
        2.5 * (rows @ a).T @ d_rows,
    ]
    for array, expected in zip([y, *gradients], expected_arrays, strict=True):
        error = np.abs(to_float64(array).reshape(expected.shape) - expected).max()
        assert error <= 2 * epsilon * np.abs(expected).max()


def test_the_16_bit_copies_of_an_adapter_are_cached_until_the_masters_change(tiny_model):
    model = gwen.load_model(tiny_model, mx.float16)
    lora.apply(model, 4, 2.0)
    _, layer = next(lora.adapted_layers(model))
    assert layer.lora_a.dtype == mx.float32
    assert layer.lora_b.dtype == mx.float32
    first_a, first_b = layer.cached_a_and_scaled_b(mx.float16)
    second_a, second_b = layer.cached_a_and_scaled_b(mx.float16)
    assert second_a is first_a
    assert second_b is first_b

    logits = model(TOKENS)
    layer.lora_b = mx.ones(layer.lora_b.shape)
    assert not mx.allclose(model(TOKENS), logits)
    layer.lora_b = mx.zeros(layer.lora_b.shape)
    assert mx.array_equal(model(TOKENS), logits)


@pytest.mark.parametrize("family", ["qwen3", "qwen2", "qwen3-gqa8", "qwen3.5"])
@pytest.mark.parametrize("targets", [lora.TARGETS, ("qkv_proj",), ("o_proj", "gate_up_proj")])
def test_saved_adapter_weights_give_back_the_masters_bit_for_bit(checkpoints, family, targets):
    model = load_adapted_model(checkpoints[family], targets=targets)
    masters = dict(tree_flatten(model.trainable_parameters()))
    weights = adapters.fuse_lora_matrices(lora.mlx_lm_adapter_weights(model))
    assert list(weights) == sorted(masters)
    assert all(mx.array_equal(masters[name], weights[name]).item() for name in masters)


@pytest.mark.parametrize(
    "targets", [lora.TARGETS, ("qkv_proj",), ("o_proj", "down_proj"), ("gate_up_proj",)]
)
def test_a_saved_adapter_gives_the_same_logits_in_mlx_lm(tiny_model, tiny_qwen2, tmp_path, targets):
    for directory, name in ((tiny_model, "first"), (tiny_qwen2, "second")):
        model = load_adapted_model(directory, targets=targets)
        lora.save_adapter_or_full_weights(model, tmp_path / name, "tiny")
        mlx_lm_model, _ = mlx_lm_load_model(directory)
        load_adapters(mlx_lm_model, str(tmp_path / name))
        check_equal_logits(mlx_lm_model, model)


@pytest.mark.parametrize("targets", [lora.TARGETS, ("qkv_proj",), ("down_proj",)])
def test_an_attached_adapter_equals_the_saved_one_bit_for_bit_and_can_be_switched_off(
    tiny_model, tmp_path, targets
):
    model = load_adapted_model(tiny_model, targets=targets)
    lora.save_adapter_or_full_weights(model, tmp_path, "tiny")
    logits = model(TOKENS)

    attached = gwen.load_model(tiny_model)
    base_logits = attached(TOKENS)
    lora.attach_saved_adapter(attached, tmp_path)
    assert mx.array_equal(attached(TOKENS), logits)
    assert not mx.allclose(attached(TOKENS), base_logits)

    check_equal_logits(gwen.load_model(tiny_model, adapter=tmp_path), model)

    with lora.without_adapters_and_gradients(attached):
        assert mx.array_equal(attached(TOKENS), base_logits)
        with lora.without_adapters_and_gradients(attached):
            pass
        assert mx.array_equal(attached(TOKENS), base_logits)
    assert mx.array_equal(attached(TOKENS), logits)


def test_attaching_equals_merging_for_a_foreign_adapter_with_one_a_per_projection(
    tiny_model, tmp_path
):
    lora.save_adapter_or_full_weights(load_adapted_model(tiny_model), tmp_path, "tiny")
    path = str(tmp_path / "adapters.safetensors")
    weights = {
        name: array
        for name, array in mx.load(path).items()
        if "k_proj" not in name and "up_proj" not in name
    }
    names_of_a = sorted(name for name in weights if name.endswith("lora_a"))
    for index, name in enumerate(names_of_a):
        noise = mx.random.normal(weights[name].shape, key=mx.random.key(index))
        weights[name] = weights[name] + 0.1 * noise
    mx.save_safetensors(path, weights)

    attached = gwen.load_model(tiny_model)
    lora.attach_saved_adapter(attached, tmp_path)
    merged = gwen.load_model(tiny_model, adapter=tmp_path)
    check_equal_logits(attached, merged)


def test_a_model_with_all_weights_trained_is_saved_as_a_full_adapter(tiny_model, tmp_path):
    model = gwen.load_model(tiny_model)
    model.norm.weight = model.norm.weight * 1.5
    lora.save_adapter_or_full_weights(model, tmp_path, "tiny")
    assert json.loads((tmp_path / "adapter_config.json").read_text())["fine_tune_type"] == "full"

    mlx_lm_model, _ = mlx_lm_load_model(tiny_model)
    load_adapters(mlx_lm_model, str(tmp_path))
    check_equal_logits(mlx_lm_model, model)
    loaded = gwen.load_model(tiny_model, adapter=tmp_path)
    assert mx.array_equal(loaded(TOKENS), model(TOKENS))


def test_an_adapter_is_found_in_its_directory_and_in_the_directory_of_the_run(tiny_model, tmp_path):
    run = tmp_path / "run"
    adapter = run / "adapter"
    lora.save_adapter_or_full_weights(load_adapted_model(tiny_model), adapter, str(tiny_model))
    assert adapters.find_adapter_directory(run) == adapter
    assert adapters.find_adapter_directory(str(adapter)) == adapter

    choose_model = model_choice.choose_model_and_reason
    assert choose_model(None, run) == (str(tiny_model), "which the adapter was trained on")
    assert choose_model("demo", run) == ("demo", "as requested")

    from_run = gwen.load_model(tiny_model, adapter=run)
    from_adapter = gwen.load_model(tiny_model, adapter=adapter)
    assert mx.array_equal(from_run(TOKENS), from_adapter(TOKENS))

    message = catch_message(adapters.find_adapter_directory, tmp_path)
    assert message.startswith(f"--adapter {tmp_path} ")
    assert "no adapter_config.json" in message


def test_an_unknown_target_is_refused_by_name(tiny_model):
    assert "q_proj" in catch_message(lora.apply, gwen.load_model(tiny_model), 4, 2.0, ["q_proj"])


def load_with_initial_adapter(directory, path, rank=4, scale=3.0, targets=lora.TARGETS):
    """A model in training that begins with the adapter at `path`."""
    model = gwen.load_model(directory)
    start = lora.read_adapter_for_model(model, path)
    lora.apply(model, rank, scale, targets)
    lora.initialize_adapters(model, *start)
    return model


@pytest.mark.parametrize(("rank", "scale"), [(4, 3.0), (7, 3.0), (4, 1.5)])
def test_training_can_begin_with_an_adapter_which_is_then_the_reference_policy(
    tiny_model, tmp_path, rank, scale
):
    saved_model = load_adapted_model(tiny_model)
    lora.save_adapter_or_full_weights(saved_model, tmp_path, str(tiny_model))
    model = load_with_initial_adapter(tiny_model, tmp_path, rank, scale)
    initial_logits = model(TOKENS)
    np.testing.assert_allclose(np.array(initial_logits), np.array(saved_model(TOKENS)), atol=1e-5)
    if (rank, scale) == (4, 3.0):
        assert mx.array_equal(initial_logits, saved_model(TOKENS))

    for _, layer in lora.adapted_layers(model):
        layer.lora_b = layer.lora_b + 0.1
    trained_logits = model(TOKENS)
    assert not mx.allclose(trained_logits, initial_logits)
    with lora.use_initial_weights(model):
        assert mx.array_equal(model(TOKENS), initial_logits)
    with lora.without_adapters_and_gradients(model):
        assert mx.array_equal(model(TOKENS), gwen.load_model(tiny_model)(TOKENS))
    assert mx.array_equal(model(TOKENS), trained_logits)


def test_an_adapter_with_one_a_each_for_query_key_and_value_needs_three_times_the_rank(
    tiny_model, tmp_path
):
    rng = np.random.default_rng(0)
    base_model = gwen.load_model(tiny_model)
    base_weights = dict(tree_flatten(base_model.parameters()))
    pairs = {}
    for name, weight in hub.unfuse_weights(base_weights, base_model.config).items():
        if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):
            out, width = weight.shape
            a = mx.array(rng.normal(0, 0.2, (width, 2)).astype(np.float32))
            b = mx.array(rng.normal(0, 0.2, (2, out)).astype(np.float32))
            pairs[name.removesuffix(".weight")] = (a, b)
    peft = tmp_path / "peft"
    adapters.write_peft_adapter(adapters.LoraAdapter("x", 2.0, pairs), peft)

    message = catch_message(load_with_initial_adapter, tiny_model, peft)
    assert "--lora-rank is 4, but --init-adapter has rank 6" in message
    with pytest.raises(ValueError, match=r"qkv_proj.* to --lora-targets"):
        load_with_initial_adapter(tiny_model, peft, rank=6, targets=["o_proj"])

    merged = gwen.load_model(tiny_model, adapter=peft)
    attached = load_with_initial_adapter(tiny_model, peft, rank=6)
    np.testing.assert_allclose(np.array(attached(TOKENS)), np.array(merged(TOKENS)), atol=1e-4)
