"""A decode step without gradients, compiled between its attentions: the same states from a quarter of the calls."""

import mlx.core as mx
import numpy as np
import pytest

import gwen
import lora
import sampler
from kv_cache import KVCache, SlotCache
from machine import cpu, gpu


@pytest.fixture(params=["qwen3", "qwen3.5"])
def model(checkpoints, request):
    model = gwen.load_model(checkpoints[request.param], mx.float32)
    lora.apply(model, 4, 2.0)
    for number, (_, layer) in enumerate(lora.adapted_layers(model)):
        layer.lora_b = mx.random.normal(layer.lora_b.shape, key=mx.random.key(number)) * 0.1
    return model


@pytest.mark.parametrize(("share", "on_gpu"), [(True, True), (False, True), (False, False)])
def test_a_compiled_step_gives_what_the_model_gives_whatever_slots_go(
    model, share, on_gpu, monkeypatch
):
    monkeypatch.setattr(
        mx, "compile", lambda function: function
    )  # on a CPU it calls g++ for every kernel: 30 s
    monkeypatch.setattr(gpu, "on_gpu", lambda: on_gpu)
    monkeypatch.setattr(gpu, "can_run_metal_kernels", lambda: False)
    monkeypatch.setattr(gwen, "LEAST_COMPILED", 0)
    monkeypatch.setattr(cpu, "try_to_compile_loops", lambda: True)
    prompts = KVCache(model.config.layer_kinds, 3, mx.array([0, 1]))
    mx.eval(model.hidden(mx.array([[5, 6, 7], [0, 8, 9]]), prompts))
    ours, theirs = (SlotCache(prompts, 3, 8, share) for _ in range(2))
    for cache in (ours, theirs):
        cache.assign_prompts([0, 0, 1])
    step, tokens = gwen.make_decode_to_hidden_step(model), np.array([[3], [4], [11]])
    assert step != model.hidden
    for number in range(4):
        for cache in (ours, theirs):
            if number == 2:
                cache.keep_only_slots([0, 2])
            if number == 3:  # then slots differ
                cache.assign_prompts(cache.prompt_of, [1])
            cache.plan_writes()
        tokens = tokens[[0, 2]] if number == 2 else tokens
        ids = mx.array(tokens + number)
        states, expected_states = step(ids, ours), model.hidden(ids, theirs)
        np.testing.assert_allclose(np.array(states), np.array(expected_states), atol=2e-5)


def test_on_a_cpu_the_step_of_a_small_model_is_its_own_and_so_is_any_without_a_compiler(
    model, monkeypatch
):
    assert gwen.make_decode_to_hidden_step(model) == model.hidden
    monkeypatch.setattr(gwen, "LEAST_COMPILED", 0)
    monkeypatch.setattr(cpu, "try_to_compile_loops", lambda: False)
    assert gwen.make_decode_to_hidden_step(model) == model.hidden


def test_sampling_and_the_frozen_base_make_no_function_with_a_gradient(model, monkeypatch):
    model.set_dtype(mx.float16)  # adapters in 16 bits have a gradient of their own
    asked, original = [], mx.custom_function
    monkeypatch.setattr(
        mx, "custom_function", lambda forward: asked.append(forward) or original(forward)
    )
    sampler.rollout(model, [[1, 2, 3]], sampler.SamplingParams(2), group_size=2, key=0)
    with lora.disable_adapters(model):
        model(mx.array([[1, 2]]))
    assert not asked
    model(mx.array([[1, 2]]))
    assert asked
