"""Launches counted by hand, and those of the project's own decode step."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest
from conftest import QWEN3
from launched import count, per_layer

import gwen
import kv_cache
import lora
import sampler
from bench import launches, ledger
from disk import hub
from layers import lm_head, softmax
from machine import gpu
from settings import sources

X, WEIGHT = mx.zeros((4, 6)), mx.ones(6)
mx.eval(WEIGHT)  # else it is made by a launch that counts


@pytest.mark.parametrize(
    "function, expected",
    [
        (lambda x: mx.exp(x) * 2 + x, {"elementwise": 3}),
        (lambda x: x.T[:, 1:3][None].squeeze(0), {}),
        (lambda x: x.reshape(2, 12).reshape(24), {}),
        (lambda x: x.T.reshape(24), {"copy": 1}),
        (lambda x: x[:, :4].reshape(4, 2, 2), {}),
        (lambda x: x[:, :4].reshape(16), {"copy": 1}),
        (lambda x: mx.concatenate([x, x, x]), {"copy": 3}),
        (lambda x: (x @ x.T).sum(), {"matmul": 1, "reduction": 1}),
        (lambda x: x[mx.array([1, 2])], {"gather": 1}),
        (lambda x: mx.fast.rms_norm(x, WEIGHT, 1e-5), {"fast": 1}),
        (lambda x: mx.fast.rms_norm(x, mx.exp(WEIGHT), 1e-5), {"fast": 1, "elementwise": 1}),
        (lambda x: mx.fast.rope(x[None], 6, traditional=False, base=1e4, scale=1.0, offset=3), {"fast": 1}),
        (lambda x: sum(mx.split(x, 3, axis=1)), {"elementwise": 3}),  # sum begins with 0 + x
    ],
)
def test_launches_are_those_counted_by_hand(function: Callable[..., Any], expected: dict[str, int]) -> None:
    assert count(function, X) == Counter(expected)


def test_attention_is_one_launch_with_the_width_of_the_values() -> None:
    def attend(q: mx.array, k: mx.array, v: mx.array) -> mx.array:
        out = mx.fast.scaled_dot_product_attention(q, k, v, scale=1.0)
        assert out.shape == (1, 8, 1, 32)
        return out

    q, k, v = mx.zeros((1, 8, 1, 64)), mx.zeros((1, 2, 9, 64)), mx.zeros((1, 2, 9, 32))
    assert count(attend, q, k, v) == Counter(fast=1)


@pytest.mark.parametrize("contiguous, copies", [(True, 1), (False, 0)])
def test_a_custom_kernel_copies_an_input_that_is_not_row_major_if_it_asks_to(contiguous: bool, copies: int) -> None:
    kernel = mx.fast.metal_kernel("k", ["x", "y"], ["out"], "out[0] = x[0] + y[0];", ensure_row_contiguous=contiguous)
    call = {"output_shapes": [(1,)], "output_dtypes": [mx.float32], "grid": (1, 1, 1), "threadgroup": (1, 1, 1)}
    found = count(lambda x: kernel(inputs=[x, x.T], **call), X)
    assert found == Counter(kernel=1) + Counter(copy=copies)


def test_outside_of_a_count_mlx_is_as_it_was() -> None:
    before = mx.fast.rms_norm, mx.default_device
    count(lambda x: mx.fast.rms_norm(x, None, 1e-5), X)
    assert (mx.fast.rms_norm, mx.default_device) == before


def small_model(num_layers: int) -> gwen.Model:
    """Qwen3's shape in small, in float16."""
    sizes = {"hidden_size": 128, "num_hidden_layers": num_layers, "intermediate_size": 256, "head_dim": 64}
    model = gwen.Model(hub.make_config(QWEN3 | sizes))
    model.set_dtype(mx.float16)
    mx.eval(model.parameters())
    return model


def decode_step(num_layers: int, rank: int = 0) -> tuple[Callable[..., Any], list[mx.array]]:
    """One step of 3 rows with 8 positions in the cache."""
    model = small_model(num_layers)
    if rank:
        lora.apply(model, rank, 2.0)
    cache = kv_cache.KVCache(num_layers, capacity=128)
    mx.eval(model(mx.zeros((3, 8), dtype=mx.int32), cache))
    return lambda tokens: model(tokens, cache), [mx.zeros((3, 1), dtype=mx.int32)]


def test_a_layer_of_a_decode_step_adds_its_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one writes it from the paper, with `mx.fast` where that has a function, it adds 21."""
    # norm and rope, swiglu, two of residual and norm | attention | keys and values into the cache
    assert +per_layer(decode_step) == Counter(matmul=4, kernel=4, fast=1, copy=2)
    monkeypatch.setenv("GWEN_KERNELS", "off")
    # qkv, attention's output, gate and up, down | two norms of the layer, that of queries and keys at once, their
    # rotation, attention | keys and values into the cache, and the weights of queries' and keys' norms put together |
    # the product with them, sigmoid, two products, two residual sums
    assert +per_layer(decode_step) == Counter(matmul=4, fast=5, copy=4, elementwise=6)


def test_adapters_add_two_matmuls_for_each_of_the_four_projections() -> None:
    """35 launches a layer where their product is float32 beside a model in 16 bits."""
    assert +per_layer(lambda n: decode_step(n, rank=16)) == Counter(matmul=12, kernel=4, fast=1, copy=2)


MOST_IN_FLIGHT = 10  # command buffers; with more MLX waits for one (MAX_ACTIVE_TASKS in its transforms.cpp)


def copied_slices(
    step: list[launches.Launch], most_operations: int = 40, most_elements: int = 40
) -> list[launches.Launch]:
    """
    The slices that a step, queued right behind another like it, cannot write in place: MLX copies their buffers whole.

    A slice is written in place if nobody else holds its buffer, and a command buffer holds what its kernels read until
    it has run. Nothing is known to have run but what is more command buffers away than MLX has in flight. The limits
    are those of `command_buffers`. Source: `is_donatable` in MLX's array.h, `eval` in its backend/metal/eval.cpp.
    """
    queued = launches.command_buffers(step, most_operations, most_elements)
    readers: dict[str, int] = {}  # the command buffer that last reads each buffer
    copied = []
    for number, held in enumerate(queued + queued):
        for launch in held:
            target = launch.buffers[0][0] if launch.name in launches.WRITES_IN_PLACE else ""
            if number >= len(queued) and readers.get(target, -MOST_IN_FLIGHT) > number - 1 - MOST_IN_FLIGHT:
                copied.append(launch)
            readers |= {name: number for name, _ in launch.buffers if name != target}
    return copied


def test_a_slice_is_copied_where_its_buffer_was_read_in_the_last_ten_command_buffers() -> None:
    def launch(name: str, *buffers: str) -> launches.Launch:
        return launches.Launch("copy", name, 0, 0, 0, tuple((buffer, 1) for buffer in buffers))

    write, read = launch("SliceUpdate", "ring", "new"), launch("Attention", "ring", "out")
    rest = [launch("Add", f"x{place}") for place in range(98)]
    step = [write, read, *rest]  # two operations a command buffer end it with the second
    assert copied_slices(step, most_operations=1) == []  # 50 command buffers a step
    assert copied_slices(step, most_operations=9) == [write]  # 10
    assert copied_slices(step, most_operations=8) == []  # 12, the first of which has run
    assert copied_slices([write, *rest], most_operations=100) == []  # nobody else reads it


QWEN = {  # hidden size, layers, mlp, heads, kv heads, head dim
    "Qwen2.5-0.5B": (896, 24, 4864, 14, 2, 64),
    "Qwen3-0.6B": (1024, 28, 3072, 16, 8, 128),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "rank", "batch", "share"),
    [
        ("Qwen2.5-0.5B", 0, 1, 1.0),
        ("Qwen2.5-0.5B", 16, 1, 1.0),
        ("Qwen2.5-0.5B", 0, 8, 0.0),
        ("Qwen2.5-0.5B", 16, 8, 0.2),
        ("Qwen3-0.6B", 0, 1, 0.0),
        ("Qwen3-0.6B", 16, 1, 0.0),
        ("Qwen3-0.6B", 16, 8, 0.0),
    ],
)
def test_a_decode_step_of_qwen_writes_its_keys_in_place(name: str, rank: int, batch: int, share: float) -> None:
    """Except Qwen2.5-0.5B's, whose step is too short; with 8 completions of 256 tokens that is 25 MB beside 1 GB."""
    hidden, layers, width, heads, kv_heads, size = QWEN[name]
    raw = gwen.random_config("random:0.6b").raw | {"hidden_size": hidden, "num_hidden_layers": layers}
    raw |= {"intermediate_size": width, "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": size}
    flags = {"model": "random:0.6b", "task": "demo", "batch": batch, "groups": 8, "max_tokens": 256, "lora_rank": rank}
    settings, _ = sources.resolve(flags, None, None, gwen.choose_model)
    work = ledger.StepWork(hub.make_config(raw), mx.float16, settings, prompt_tokens=128)
    with launches.as_on_a_gpu():
        function, inputs = ledger.decode(work, layers)
        step = launches.trace(function, *inputs)
    for most in (40, 50):  # of base chips, and of Pro and Max
        assert len(copied_slices(step, most, most)) <= share * 2 * layers


def test_sampling_is_one_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, uniforms, heat = mx.zeros((4, 151_936)), mx.zeros((4, 4)), mx.array([0.7])
    mx.eval(heat)
    monkeypatch.setattr(gpu, "constant", lambda *_: heat)
    assert count(lambda x, u: softmax.sample_token(x, u, 0.7), logits, uniforms) == Counter(kernel=1)
    monkeypatch.setenv("GWEN_KERNELS", "off")
    assert count(lambda x, u: softmax.sample_token(x, u, 0.7), logits, uniforms).total() > 40


def test_sampling_with_top_p_sorts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, uniforms, scalar = mx.zeros((4, 151_936), mx.float16), mx.zeros((4, 4)), mx.array([0.9])
    mx.eval(scalar)
    monkeypatch.setattr(gpu, "constant", lambda *_: scalar)
    params = sampler.SamplingParams(top_p=0.9)
    found = count(lambda x, u: sampler.choose_token(x, u, params), logits, uniforms)
    # to float32, by the temperature, what is below the least kept one, in its place -inf
    assert found == Counter(kernel=2, elementwise=4)


@pytest.mark.parametrize(("fused", "matmuls", "kernels"), [(True, 2, 1), (False, 3, 2)])
def test_the_head_of_an_update_makes_its_logits_once(
    monkeypatch: pytest.MonkeyPatch, fused: bool, matmuls: int, kernels: int
) -> None:
    """Log-probabilities and their gradient by the hidden states: logits and back, where others make them twice."""
    monkeypatch.setattr(softmax.row_losses, "runs", lambda _: fused)

    def gradient(hidden: mx.array, head: mx.array) -> Any:
        def loss(hidden: mx.array) -> mx.array:
            return lm_head.token_logprobs(hidden[None], head, ids[None])[0]

        return mx.vjp(loss, [hidden], [mx.ones((1, 6))])[1]

    ids, hidden, head = mx.zeros((6,), dtype=mx.int32), mx.zeros((6, 8)), mx.zeros((90, 8))
    mx.eval(ids)
    found = count(gradient, hidden, head)
    assert (found["matmul"], found["kernel"]) == (matmuls, kernels)
