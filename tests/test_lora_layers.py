"""--lora-layers: only the upper layers have adapters, and the backward pass ends at the lowest of them."""

import json

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from conftest import catch_message
from mlx.utils import tree_flatten
from mlx_lm.tuner.utils import load_adapters
from mlx_lm.utils import load_model as mlx_lm_load_model
from small_run import make_run, update_once

import gwen
import lora

TOKENS = mx.array([[1, 5, 9, 2, 30], [7, 7, 4, 3, 2]])


def adapt_upper_layers(directory, num_layers=1):
    """A model with adapters on its upper layers that change its output."""
    model = gwen.load_model(directory)
    lora.apply(model, 4, 3.0, num_layers=num_layers)
    for index, (_, layer) in enumerate(lora.adapted_layers(model)):
        layer.lora_b = mx.random.normal(layer.lora_b.shape, key=mx.random.key(index)) * 0.2
    return model


def test_only_the_upper_layers_have_adapters(tiny_model):
    model = adapt_upper_layers(tiny_model)
    last = len(model.layers) - 1
    assert last > 0
    assert {lora.layer_index(name) for name, _ in lora.adapted_layers(model)} == {last}
    assert model.first_trained_layer == last


def test_more_layers_than_the_model_has_are_refused(tiny_model):
    model = gwen.load_model(tiny_model)
    message = catch_message(lambda: lora.apply(model, 4, 2.0, num_layers=99))
    assert "--lora-layers" in message
    assert "99" in message
    assert str(len(model.layers)) in message


@pytest.mark.parametrize("checkpoint_layers", [0, 1])
def test_the_gradient_equals_the_upper_part_of_the_gradient_of_all_adapters(
    tiny_model, checkpoint_layers
):
    def gradient(model):
        def loss(model):
            return (model.hidden(TOKENS, checkpoint_layers=checkpoint_layers) ** 2).sum()

        return dict(tree_flatten(nn.value_and_grad(model, loss)(model)[1]))

    upper_model = adapt_upper_layers(tiny_model)
    full_model = gwen.load_model(tiny_model)
    lora.apply(full_model, 4, 3.0)
    upper_layers = dict(lora.adapted_layers(upper_model))
    for name, layer in lora.adapted_layers(full_model):
        if name in upper_layers:
            layer.lora_a = upper_layers[name].lora_a
            layer.lora_b = upper_layers[name].lora_b

    expected = gradient(full_model)
    for name, array in gradient(upper_model).items():
        np.testing.assert_allclose(np.array(array), np.array(expected[name]), rtol=1e-5, atol=1e-6)


def test_the_layers_below_store_nothing_for_the_backward_pass(checkpoints):
    """The peak of a gradient with one adapted layer of many stays far below that of all layers."""
    config = gwen.make_random_model("random:2m").config
    peaks = {}
    tokens = mx.random.randint(0, config.vocab_size, (16, 128), key=mx.random.key(0))
    for num_layers in (1, config.num_hidden_layers):
        model = gwen.make_random_model("random:2m")
        lora.apply(model, 4, 2.0, num_layers=num_layers)
        mx.eval(model.parameters())
        bytes_before = mx.get_active_memory()
        mx.reset_peak_memory()
        loss_and_grad = nn.value_and_grad(model, lambda model: model.hidden(tokens).sum())
        mx.eval(loss_and_grad(model))
        peaks[num_layers] = mx.get_peak_memory() - bytes_before
    assert peaks[1] < 0.7 * peaks[config.num_hidden_layers]


def test_mlx_lm_loads_the_adapter_and_gives_the_same_logits(tiny_model, tmp_path):
    model = adapt_upper_layers(tiny_model)
    lora.save_adapter_or_full_weights(model, tmp_path, "tiny")
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert config["num_layers"] == 1

    mlx_lm_model, _ = mlx_lm_load_model(tiny_model)
    load_adapters(mlx_lm_model, str(tmp_path))
    np.testing.assert_allclose(
        np.array(mlx_lm_model(TOKENS)), np.array(model(TOKENS)), atol=1e-4, rtol=1e-4
    )


def test_the_adapter_can_be_merged_attached_and_trained_further(tiny_model, tmp_path):
    model = adapt_upper_layers(tiny_model)
    lora.save_adapter_or_full_weights(model, tmp_path, "tiny")
    merged_model = gwen.load_model(tiny_model, adapter=tmp_path)
    np.testing.assert_allclose(
        np.array(merged_model(TOKENS)), np.array(model(TOKENS)), atol=1e-4, rtol=1e-4
    )

    attached_model = gwen.load_model(tiny_model)
    lora.attach_saved_adapter(attached_model, tmp_path)
    assert mx.array_equal(attached_model(TOKENS), model(TOKENS))

    scale, matrices = lora.read_adapter_for_model(gwen.load_model(tiny_model), tmp_path)
    continued_model = gwen.load_model(tiny_model)
    lora.apply(continued_model, 4, 3.0, num_layers=1)
    lora.initialize_adapters(continued_model, scale, matrices)
    assert mx.array_equal(continued_model(TOKENS), model(TOKENS))


def test_an_initial_adapter_with_more_layers_is_refused_with_the_name_of_the_flag(
    tiny_model, tmp_path
):
    model = adapt_upper_layers(tiny_model, num_layers=2)
    lora.save_adapter_or_full_weights(model, tmp_path, "tiny")
    scale, matrices = lora.read_adapter_for_model(gwen.load_model(tiny_model), tmp_path)
    one_layer_model = gwen.load_model(tiny_model)
    lora.apply(one_layer_model, 4, 3.0, num_layers=1)
    message = catch_message(lambda: lora.initialize_adapters(one_layer_model, scale, matrices))
    assert "--lora-layers" in message
    assert "2" in message


@pytest.mark.slow
@pytest.mark.parametrize("checkpoint_layers", ["off", "on"])
def test_a_run_with_adapters_on_one_layer_changes_only_that_layer(tmp_path, checkpoint_layers):
    run = make_run(tmp_path, "--lora-layers", "1", "--checkpoint-layers", checkpoint_layers)
    assert run.sizes.checkpoint_layers == (1 if checkpoint_layers == "on" else 0)
    weights_before = dict(run.learner.trainable)
    last = len(run.model.layers) - 1
    assert {lora.layer_index(name) for name in weights_before} == {last}

    update_once(run)
    weights_after = run.learner.trainable
    assert any(
        not mx.array_equal(weights_before[name], weights_after[name]) for name in weights_before
    )
