"""A model that is loaded finds each kernel right at its own sizes, and a wrong one before the first step."""

import re

import mlx.core as mx
import pytest

import gwen
import lora
from layers import ops
from machine import gpu, memory
from machine import kernels as machinery

pytestmark = pytest.mark.slow


@pytest.fixture
def kernels(metal: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "can_run_metal_kernels", lambda: True)
    monkeypatch.setattr(memory, "set_mlx_memory_limits", lambda: None)
    monkeypatch.delenv("GWEN_KERNELS", raising=False)
    for op in machinery.OPS.values():
        monkeypatch.setattr(op, "disabled_dtypes", set())


@pytest.mark.parametrize("metal", ["fast"], indirect=True)
@pytest.mark.parametrize(("name", "dtype"), [("qwen3-gqa8", mx.bfloat16), ("qwen3.5", mx.float16)])
def test_every_kernel_agrees_at_the_sizes_of_a_model_that_is_loaded(
    kernels, checkpoints, name, dtype, capsys
):
    model = gwen.load_model(checkpoints[name], dtype)
    lora.apply(model, 3, 2.0)
    assert capsys.readouterr().err == ""
    off = [name for name, op in machinery.OPS.items() if not op.can_run(dtype)]
    assert not off, off


@pytest.mark.parametrize("metal", ["fast"], indirect=True)
@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=str)
@pytest.mark.parametrize("right", [True, False])
def test_a_kernel_is_judged_by_float32_at_weights_as_large_as_real_ones(
    kernels, checkpoints, capsys, monkeypatch, dtype, right
):
    """Norm weights of 1 + 12 |N| and gates of 30, where the expression rounds more than the kernel does."""
    model = gwen.load_model(checkpoints["qwen3-gqa8"], dtype)
    for seed, layer in enumerate(model.layers):
        for norm in (layer.self_attn.q_norm, layer.self_attn.k_norm, layer.input_layernorm):
            away = mx.abs(
                machinery.random_normal_array(*norm.weight.shape, dtype=mx.float32, seed=seed)
            )
            norm.weight = (1 + 12 * away).astype(dtype)
        layer.mlp.gate_up_proj.weight = 30 * layer.mlp.gate_up_proj.weight
    if not right:
        header, body = ops.NORM_ROPE.header_and_body
        wrong_body = body.replace("y * c + x * s", "1.05f * y * c + x * s")
        assert wrong_body != body
        monkeypatch.setattr(ops.NORM_ROPE, "header_and_body", (header, wrong_body))
        monkeypatch.setattr(ops.NORM_ROPE, "_compiled", {})
    gwen.check_mlx_and_disable_faulty_kernels(model)
    printed = capsys.readouterr().err
    if right:
        assert not printed
    else:
        assert re.search(r"\bnorm_rope\b", printed) and printed.count("\n") == 1, printed
