"""Adapters on disk: the layouts of mlx_lm and PEFT hold the same numbers, and PEFT loads an exported adapter."""

import json

import mlx.core as mx
import numpy as np
import pytest
from conftest import catch_message
from extras import needs
from test_lora import TOKENS, load_adapted_model

import export
import gwen
import lora
from disk import adapters, hub, model_choice
from evaluation import policy
from text import printable

WEIGHTS = {"mlx_lm": "adapters.safetensors", "peft": "adapter_model.safetensors"}


def change_adapter(directory, layout, parameters=(), tensors=None):
    """Replaces some parameters of an adapter, or its tensors."""
    path = directory / "adapter_config.json"
    config = json.loads(path.read_text())
    (config if layout == "peft" else config["lora_parameters"]).update(parameters)
    path.write_text(json.dumps(config))
    if tensors is not None:
        mx.save_safetensors(str(directory / WEIGHTS[layout]), tensors)


def export_as_peft(adapter, out):
    export.main(["--export", "peft", "--adapter", str(adapter), "--out", str(out)])


@pytest.fixture
def both_layouts(tiny_model, tmp_path):
    """A model with a random adapter, and a directory with the adapter in each layout."""
    model = load_adapted_model(tiny_model)
    lora.save_adapter_or_full_weights(model, tmp_path / "mlx_lm", str(tiny_model))
    export_as_peft(tmp_path / "mlx_lm", tmp_path / "peft")
    return model, tmp_path


def test_both_layouts_of_an_adapter_are_equal_to_the_bit(both_layouts):
    _, root = both_layouts
    mlx_lm_adapter = adapters.read_lora_adapter(root / "mlx_lm")
    peft_adapter = adapters.read_lora_adapter(root / "peft")
    assert mlx_lm_adapter.pairs.keys() == peft_adapter.pairs.keys()
    assert mlx_lm_adapter[:2] == peft_adapter[:2]
    for name, mlx_lm_pair in mlx_lm_adapter.pairs.items():
        peft_pair = peft_adapter.pairs[name]
        for mlx_lm_array, peft_array in zip(mlx_lm_pair, peft_pair, strict=True):
            assert mx.array_equal(mlx_lm_array, peft_array)
            assert mlx_lm_array.dtype == peft_array.dtype


def test_the_exported_matrices_fulfil_the_formula_of_peft(both_layouts):
    """y = x W^T + alpha / r * x A^T B^T, with PEFT's A (R, C) and B (O, R)."""
    model, root = both_layouts
    config = json.loads((root / "peft" / "adapter_config.json").read_text())
    tensors = dict(mx.load(str(root / "peft" / WEIGHTS["peft"])))
    layer = model.layers[1].mlp.down_proj
    name = "base_model.model.model.layers.1.mlp.down_proj"
    a = np.array(tensors[f"{name}.lora_A.weight"], np.float64)
    b = np.array(tensors[f"{name}.lora_B.weight"], np.float64)
    x = np.random.default_rng(0).normal(size=(3, a.shape[1]))

    base_output = x @ np.array(layer.linear.weight, np.float64).T
    scale = config["lora_alpha"] / config["r"]
    expected_output = base_output + scale * x @ a.T @ b.T
    output = np.array(layer(mx.array(x.astype(np.float32))))
    np.testing.assert_allclose(output, expected_output, atol=1e-5)

    targets = sorted(adapters.read_lora_adapter(root / "mlx_lm").pairs)
    assert config["target_modules"] == targets


@pytest.mark.parametrize(
    ("changes", "pattern"),
    [
        ({"peft_type": "IA3"}, "has peft_type 'IA3', which is not supported; merge the adapter"),
        ({"use_dora": True}, "has use_dora True, which is not supported"),
        ({"rank_pattern": {"o_proj": 4}}, "has rank_pattern {'o_proj': 4}"),
        ({"bias": "all"}, "has bias 'all'"),
        # PiSSA changes the base model.
        ({"init_lora_weights": "pissa"}, "has init_lora_weights 'pissa'"),
        ({"alora_invocation_tokens": [1, 2]}, r"has alora_invocation_tokens \[1, 2\]"),
        ({"r": 0}, "has {'r': 0, 'lora_alpha'"),
        ({"lora_alpha": None}, "'lora_alpha': None}; the rank must be"),
    ],
)
def test_unsupported_features_of_peft_are_refused_by_name(both_layouts, changes, pattern):
    _, root = both_layouts
    path = root / "peft" / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(ValueError, match=pattern):
        adapters.read_lora_adapter(root / "peft")


def test_the_scale_of_a_rank_stabilized_adapter_is_alpha_over_the_root_of_the_rank(both_layouts):
    _, root = both_layouts
    config = json.loads((root / "peft" / "adapter_config.json").read_text())
    change_adapter(root / "peft", "peft", {"use_rslora": True})
    expected_scale = config["lora_alpha"] / config["r"] ** 0.5
    assert adapters.read_lora_adapter(root / "peft").scale == pytest.approx(expected_scale)


INVALID_VALUES = [0, -1, 10**9, 10**400, float("nan"), float("inf"), "2", None, [2]]


@pytest.mark.parametrize("layout", WEIGHTS)
def test_an_impossible_rank_or_scale_is_refused_in_one_line(both_layouts, layout):
    _, root = both_layouts
    directory = root / layout
    config_text = (directory / "adapter_config.json").read_text()

    # The tensors do not have the rank 3.
    invalid_ranks = [*INVALID_VALUES, 3]
    invalid_scales = [*INVALID_VALUES, 1e-9]
    rank_name, scale_name = ("r", "lora_alpha") if layout == "peft" else ("rank", "scale")
    for name, values in ((rank_name, invalid_ranks), (scale_name, invalid_scales)):
        for value in values:
            (directory / "adapter_config.json").write_text(config_text)
            change_adapter(directory, layout, {name: value})
            message = catch_message(adapters.read_lora_adapter, directory)
            assert "; the rank must be" in message or "two matrices of rank" in message, value


@pytest.mark.parametrize("layout", WEIGHTS)
def test_an_adapter_without_tensors_or_with_infinite_values_is_refused(both_layouts, layout):
    _, root = both_layouts
    directory = root / layout
    tensors = mx.load(str(directory / WEIGHTS[layout]))
    infinite_tensors = {name: array / 0 for name, array in tensors.items()}
    mx.eval(infinite_tensors)

    change_adapter(directory, layout, tensors={})
    assert "contains no tensors" in catch_message(adapters.read_lora_adapter, directory)

    change_adapter(directory, layout, tensors=infinite_tensors)
    message = catch_message(adapters.read_lora_adapter, directory)
    assert "has values that are not finite" in message


def test_a_fully_trained_model_has_no_adapter_to_export(tiny_model, tmp_path, check_refusal):
    lora.save_adapter_or_full_weights(gwen.load_model(tiny_model), tmp_path / "full", "tiny")
    flags = ["--export", "peft", "--adapter", tmp_path / "full", "--out", tmp_path / "out"]
    check_refusal(export.main, flags, rf"--adapter {tmp_path}/full .*export.py --fuse")
    assert not (tmp_path / "out").exists()


@needs("peft")
@pytest.mark.parametrize("family", ["qwen2", "qwen2.5", "qwen3", "llama", "qwen3.5"])
@pytest.mark.parametrize("targets", [lora.TARGETS, ("qkv_proj", "down_proj")])
def test_peft_gives_the_same_logits(checkpoints, family, targets, tmp_path):
    import peft
    import torch
    from transformers import AutoModelForCausalLM

    directory = checkpoints[family]
    model = load_adapted_model(directory, targets=targets)
    lora.save_adapter_or_full_weights(model, tmp_path / "mlx_lm", str(directory))
    export_as_peft(tmp_path / "mlx_lm", tmp_path / "peft")
    base = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    peft_model = peft.PeftModel.from_pretrained(base, str(tmp_path / "peft"))
    with torch.no_grad():
        peft_logits = peft_model(torch.tensor(np.array(TOKENS))).logits.numpy()

    # The random weights of the hybrid magnify rounding errors.
    tolerance = 1e-4 if model.config.delta is None else 1e-3
    np.testing.assert_allclose(np.array(model(TOKENS)), peft_logits, atol=tolerance, rtol=tolerance)
    base_logits = np.array(gwen.load_model(directory)(TOKENS))
    assert np.abs(peft_logits - base_logits).max() > 1e-2


@pytest.mark.parametrize(
    ("base", "model", "is_other"),
    [
        ("Qwen/Qwen3-0.6B", "demo", True),
        ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B-Base", True),
        ("demo", "demo:rg", True),
        ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B", False),
        ("Qwen/Qwen3-0.6B@" + "1" * 40, "/models/Qwen3-0.6B", False),  # a local copy
        ("demo", str(hub.DEMO), False),
        (None, "demo", False),
    ],
)
def test_a_warning_names_both_models_if_an_adapter_belongs_to_another_base(
    tmp_path, capsys, base, model, is_other
):
    configs = {
        "mlx_lm": {"model": base},
        "peft": {"base_model_name_or_path": base, "peft_type": "LORA"},
    }
    for layout, config in configs.items():
        (tmp_path / layout).mkdir()
        (tmp_path / layout / "adapter_config.json").write_text(json.dumps(config))
        model_choice.warn_of_different_base(tmp_path / layout, model, "--init-adapter")
        warning = capsys.readouterr().err
        if is_other:
            assert warning.count("\n") == 1
            assert base in warning
            assert model in warning
            assert "--init-adapter" in warning
        else:
            assert warning == ""


def test_every_way_to_put_an_adapter_on_another_base_prints_a_warning(tmp_path, capsys):
    model, _ = gwen.load("demo")
    lora.apply(model, 2, 2.0)
    lora.save_adapter_or_full_weights(model, tmp_path / "other", "Qwen/Qwen3-0.6B")
    adapter = str(tmp_path / "other")

    for number, flags in enumerate((["--fuse"], ["--export", "peft"])):
        printable.print_once.cache_clear()
        out = str(tmp_path / str(number))
        export.main([*flags, "--adapter", adapter, "--model", "demo", "--out", out])
        warning = capsys.readouterr().err
        assert "Qwen/Qwen3-0.6B" in warning, flags
        assert "demo" in warning, flags

    for load in (
        lambda: gwen.load("demo", adapter=adapter),
        lambda: policy.load_policy("demo", adapter),
    ):
        printable.print_once.cache_clear()
        load()
        assert "Qwen/Qwen3-0.6B" in capsys.readouterr().err
