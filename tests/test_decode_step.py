"""A decode step that is compiled between the attentions gives the same hidden states as the model."""

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
def test_a_compiled_step_gives_the_hidden_states_of_the_model_after_slots_change(
    model, share, on_gpu, monkeypatch
):
    # On a CPU, mx.compile would call g++ for every kernel, which takes 30 s.
    monkeypatch.setattr(mx, "compile", lambda function: function)
    monkeypatch.setattr(gpu, "on_gpu", lambda: on_gpu)
    monkeypatch.setattr(gpu, "can_run_metal_kernels", lambda: False)
    monkeypatch.setattr(gwen, "LEAST_COMPILED", 0)
    monkeypatch.setattr(cpu, "try_to_compile_loops", lambda: True)
    prompts = KVCache(model.config.layer_kinds, 3, mx.array([0, 1]))
    mx.eval(model.hidden(mx.array([[5, 6, 7], [0, 8, 9]]), prompts))
    caches = [SlotCache(prompts, 3, 8, share) for _ in range(2)]
    for cache in caches:
        cache.assign_prompts([0, 0, 1])
    cache_of_step, cache_of_model = caches

    step = gwen.make_decode_to_hidden_step(model)
    assert step != model.hidden
    tokens = np.array([[3], [4], [11]])
    for number in range(4):
        if number == 2:
            tokens = tokens[[0, 2]]
        for cache in caches:
            if number == 2:
                cache.keep_only_slots([0, 2])
            if number == 3:  # a new row begins in slot 1, so that the lengths differ
                cache.assign_prompts(cache.prompt_of, [1])
            cache.plan_writes()
        ids = mx.array(tokens + number)
        states = step(ids, cache_of_step)
        expected_states = model.hidden(ids, cache_of_model)
        np.testing.assert_allclose(np.array(states), np.array(expected_states), atol=2e-5)


def test_on_a_cpu_a_small_model_and_a_model_without_a_compiler_use_the_plain_step(
    model, monkeypatch
):
    assert gwen.make_decode_to_hidden_step(model) == model.hidden
    monkeypatch.setattr(gwen, "LEAST_COMPILED", 0)
    monkeypatch.setattr(cpu, "try_to_compile_loops", lambda: False)
    assert gwen.make_decode_to_hidden_step(model) == model.hidden


def test_sampling_and_the_frozen_base_define_no_custom_gradient(model, monkeypatch):
    model.set_dtype(mx.float16)  # adapters in 16 bits have a custom gradient
    functions_with_gradient = []
    original = mx.custom_function

    def record_and_call(function):
        functions_with_gradient.append(function)
        return original(function)

    monkeypatch.setattr(mx, "custom_function", record_and_call)
    sampler.rollout(model, [[1, 2, 3]], sampler.SamplingParams(2), group_size=2, key=0)
    with lora.without_adapters_and_gradients(model):
        model(mx.array([[1, 2]]))
    assert not functions_with_gradient

    model(mx.array([[1, 2]]))
    assert functions_with_gradient
