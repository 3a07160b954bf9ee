"""Loading a model checks each kernel at the model's sizes, and turns off a wrong kernel."""

import re

import mlx.core as mx
import pytest

import gwen
import lora
from layers import ops
from machine import gpu, memory
from machine import kernels as kernel_machinery

pytestmark = pytest.mark.slow


@pytest.fixture
def enable_kernels(metal: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "can_run_metal_kernels", lambda: True)
    monkeypatch.setattr(memory, "set_cache_and_wired_limits", lambda: None)
    monkeypatch.delenv("GWEN_KERNELS", raising=False)
    for op in kernel_machinery.OPS.values():
        monkeypatch.setattr(op, "disabled_dtypes", set())


@pytest.mark.parametrize("metal", ["fast"], indirect=True)
@pytest.mark.parametrize(("name", "dtype"), [("qwen3-gqa8", mx.bfloat16), ("qwen3.5", mx.float16)])
def test_every_kernel_is_right_at_the_sizes_of_a_loaded_model(
    enable_kernels, checkpoints, name, dtype, capsys
):
    model = gwen.load_model(checkpoints[name], dtype)
    lora.apply(model, 3, 2.0)
    assert capsys.readouterr().err == ""
    disabled_kernels = [name for name, op in kernel_machinery.OPS.items() if not op.can_run(dtype)]
    assert not disabled_kernels, disabled_kernels


@pytest.mark.parametrize("metal", ["fast"], indirect=True)
@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=str)
@pytest.mark.parametrize("is_right", [True, False])
def test_a_kernel_is_compared_with_float32_at_weights_as_large_as_in_real_models(
    enable_kernels, checkpoints, capsys, monkeypatch, dtype, is_right
):
    """At norm weights of 1 + 12 |N| and gates of 30, the reference rounds more than the kernel."""
    model = gwen.load_model(checkpoints["qwen3-gqa8"], dtype)
    for seed, layer in enumerate(model.layers):
        for norm in (layer.self_attn.q_norm, layer.self_attn.k_norm, layer.input_layernorm):
            shape = norm.weight.shape
            noise = kernel_machinery.random_normal_array(*shape, dtype=mx.float32, seed=seed)
            norm.weight = (1 + 12 * mx.abs(noise)).astype(dtype)
        layer.mlp.gate_up_proj.weight = 30 * layer.mlp.gate_up_proj.weight

    if not is_right:
        header, body = ops.NORM_ROPE.header_and_body
        wrong_body = body.replace("y * c + x * s", "1.05f * y * c + x * s")
        assert wrong_body != body
        monkeypatch.setattr(ops.NORM_ROPE, "header_and_body", (header, wrong_body))
        monkeypatch.setattr(ops.NORM_ROPE, "_compiled", {})
    gwen.check_mlx_and_disable_faulty_kernels(model)

    warning = capsys.readouterr().err
    if is_right:
        assert not warning
    else:
        assert re.search(r"\bnorm_rope\b", warning), warning
        assert warning.count("\n") == 1, warning
