"""Adapters on disk: mlx_lm's layout and PEFT's say the same, to the bit; PEFT itself opens what is exported."""

import json

import mlx.core as mx
import numpy as np
import pytest
from conftest import catch_message
from extras import needs
from test_lora import TOKENS, adapted

import export
import gwen
import lora
from disk import adapters, hub, model_choice
from evaluation import policy

WEIGHTS = {"mlx_lm": "adapters.safetensors", "peft": "adapter_model.safetensors"}


def change(directory, layout, parameters=(), tensors=None):
    """Gives an adapter other parameters, and other tensors."""
    path = directory / "adapter_config.json"
    config = json.loads(path.read_text())
    (config if layout == "peft" else config["lora_parameters"]).update(parameters)
    path.write_text(json.dumps(config))
    if tensors is not None:
        mx.save_safetensors(str(directory / WEIGHTS[layout]), tensors)


@pytest.fixture
def exported(tiny_model, tmp_path):
    """A random adapter as a run saves it, and the same in PEFT's layout."""
    model = adapted(tiny_model)
    lora.save_adapter_or_full_weights(model, tmp_path / "ours", str(tiny_model))
    export.main(
        ["--export", "peft", "--adapter", str(tmp_path / "ours"), "--out", str(tmp_path / "peft")]
    )
    return model, tmp_path


def test_an_adapter_comes_back_from_the_other_layout_to_the_bit(exported):
    _, root = exported
    ours, theirs = (
        adapters.read_lora_adapter(root / "ours"),
        adapters.read_lora_adapter(root / "peft"),
    )
    assert ours.pairs.keys() == theirs.pairs.keys() and ours[:2] == theirs[:2]
    for name, pair in ours.pairs.items():
        for array, other in zip(pair, theirs.pairs[name], strict=True):
            assert mx.array_equal(array, other) and array.dtype == other.dtype


def test_the_exported_numbers_are_those_of_the_formula(exported):
    """y = x W^T + alpha / r * x A^T B^T, with PEFT's A (R, C) and B (O, R)."""
    model, root = exported
    config = json.loads((root / "peft" / "adapter_config.json").read_text())
    tensors = dict(mx.load(str(root / "peft" / WEIGHTS["peft"])))
    layer = model.layers[1].mlp.down_proj
    name = "base_model.model.model.layers.1.mlp.down_proj"
    low, high = (np.array(tensors[f"{name}.lora_{half}.weight"], np.float64) for half in "AB")
    x = np.random.default_rng(0).normal(size=(3, low.shape[1]))
    expected = (
        x @ np.array(layer.linear.weight, np.float64).T
        + config["lora_alpha"] / config["r"] * x @ low.T @ high.T
    )
    np.testing.assert_allclose(np.array(layer(mx.array(x.astype(np.float32)))), expected, atol=1e-5)
    assert config["target_modules"] == sorted(adapters.read_lora_adapter(root / "ours").pairs)


@pytest.mark.parametrize(
    ("changed", "pattern"),
    [
        ({"peft_type": "IA3"}, "has peft_type 'IA3', which is not supported; merge the adapter"),
        ({"use_dora": True}, "has use_dora True, which is not supported"),
        ({"rank_pattern": {"o_proj": 4}}, "has rank_pattern {'o_proj': 4}"),
        ({"bias": "all"}, "has bias 'all'"),
        (
            {"init_lora_weights": "pissa"},
            "has init_lora_weights 'pissa'",
        ),  # its base is not the model's
        ({"alora_invocation_tokens": [1, 2]}, r"has alora_invocation_tokens \[1, 2\]"),
        ({"r": 0}, "has {'r': 0, 'lora_alpha'"),
        ({"lora_alpha": None}, "'lora_alpha': None}; the rank must be"),
    ],
)
def test_what_peft_can_and_this_model_cannot_is_refused_by_name(exported, changed, pattern):
    _, root = exported
    path = root / "peft" / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changed))
    with pytest.raises(ValueError, match=pattern):
        adapters.read_lora_adapter(root / "peft")


def test_the_scale_of_rank_stabilized_adapters_is_alpha_over_the_root_of_the_rank(exported):
    _, root = exported
    config = json.loads((root / "peft" / "adapter_config.json").read_text())
    change(root / "peft", "peft", {"use_rslora": True})
    assert adapters.read_lora_adapter(root / "peft").scale == pytest.approx(
        config["lora_alpha"] / config["r"] ** 0.5
    )


ODD = [0, -1, 10**9, 10**400, float("nan"), float("inf"), "2", None, [2]]


@pytest.mark.parametrize("layout", WEIGHTS)
def test_ranks_and_scales_that_no_adapter_has_are_refused_in_a_line(exported, layout):
    _, root = exported
    directory = root / {"mlx_lm": "ours", "peft": "peft"}[layout]
    before = (directory / "adapter_config.json").read_text()
    for name in ("r", "lora_alpha") if layout == "peft" else ("rank", "scale"):
        for value in [
            *ODD,
            3 if name in ("r", "rank") else 1e-9,
        ]:  # a rank that the tensors do not have
            (directory / "adapter_config.json").write_text(before)
            change(directory, layout, {name: value})
            message = catch_message(adapters.read_lora_adapter, directory)
            assert "; the rank must be" in message or "two matrices of rank" in message, value


@pytest.mark.parametrize("layout", WEIGHTS)
def test_an_adapter_without_tensors_or_with_infinite_ones_is_refused(exported, layout):
    _, root = exported
    directory = root / {"mlx_lm": "ours", "peft": "peft"}[layout]
    infinite = {
        name: array / 0 for name, array in mx.load(str(directory / WEIGHTS[layout])).items()
    }
    mx.eval(infinite)
    for tensors, problem in (
        ({}, "contains no tensors"),
        (infinite, "has values that are not finite"),
    ):
        change(directory, layout, tensors=tensors)
        assert problem in catch_message(adapters.read_lora_adapter, directory)


def test_a_model_trained_whole_has_no_adapter_to_export(tiny_model, tmp_path, check_refusal):
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
    model = adapted(directory, targets=targets)
    lora.save_adapter_or_full_weights(model, tmp_path / "ours", str(directory))
    export.main(
        ["--export", "peft", "--adapter", str(tmp_path / "ours"), "--out", str(tmp_path / "peft")]
    )
    base = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    peer = peft.PeftModel.from_pretrained(base, str(tmp_path / "peft"))
    with torch.no_grad():
        theirs = peer(torch.tensor(np.array(TOKENS))).logits.numpy()
    near = (
        1e-4 if model.config.delta is None else 1e-3
    )  # the hybrid's random weights magnify roundings
    np.testing.assert_allclose(np.array(model(TOKENS)), theirs, atol=near, rtol=near)
    assert np.abs(theirs - np.array(gwen.load_model(directory)(TOKENS))).max() > 1e-2


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
def test_an_adapter_of_another_base_is_told_with_both_names(
    tmp_path, capsys, base, model, is_other
):
    for layout, key in (("mlx_lm", "model"), ("peft", "base_model_name_or_path")):
        (tmp_path / layout).mkdir()
        config = {key: base} | ({"peft_type": "LORA"} if layout == "peft" else {})
        (tmp_path / layout / "adapter_config.json").write_text(json.dumps(config))
        model_choice.warn_of_different_base(tmp_path / layout, model, "--init-adapter")
        printed = capsys.readouterr().err
        if is_other:
            assert (
                printed.count("\n") == 1
                and base in printed
                and model in printed
                and "--init-adapter" in printed
            )
        else:
            assert printed == ""


def test_every_way_to_put_an_adapter_on_another_base_tells_of_it(tmp_path, capsys):
    model, _ = gwen.load("demo")
    lora.apply(model, 2, 2.0)
    lora.save_adapter_or_full_weights(model, tmp_path / "other", "Qwen/Qwen3-0.6B")
    for number, flags in enumerate((["--fuse"], ["--export", "peft"])):
        model_choice.print_once.cache_clear()
        out = tmp_path / str(number)
        export.main(
            [*flags, "--adapter", str(tmp_path / "other"), "--model", "demo", "--out", str(out)]
        )
        printed = capsys.readouterr().err
        assert "Qwen/Qwen3-0.6B" in printed and "demo" in printed, flags
    other = str(tmp_path / "other")
    for load in (
        lambda: gwen.load("demo", adapter=other),
        lambda: policy.load_policy("demo", other),
    ):
        model_choice.print_once.cache_clear()
        load()
        assert "Qwen/Qwen3-0.6B" in capsys.readouterr().err
