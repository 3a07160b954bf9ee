"""The expressions between matmuls against float64 formulas, MLX's own functions and transformers'."""

import math

import mlx.core as mx
import numpy as np
import pytest
from conftest import QWEN3, YARN, draw_normal

from disk import hub
from layers import attention, ops
from machine import cpu, gpu, kernels

RNG = np.random.default_rng(0)


# ---- rope


def yarn_by_hand(
    head_dim: int, theta: float, factor: float, trained: int
) -> tuple[np.ndarray, float]:
    """Frequencies and magnitude of YaRN in float64, from the paper's sections 3.2 and 3.4: alpha 1, beta 32."""
    frequencies = theta ** (-np.arange(0, head_dim, 2) / head_dim)

    def pair_of(
        rotations,
    ):  # the (fractional) pair whose wavelength fits `rotations` times into the trained context
        return head_dim * math.log(trained / (2 * math.pi * rotations)) / (2 * math.log(theta))

    low, high = max(math.floor(pair_of(32)), 0), min(math.ceil(pair_of(1)), head_dim - 1)
    kept = 1 - np.clip((np.arange(head_dim // 2) - low) / max(high - low, 1e-3), 0, 1)
    return frequencies * kept + frequencies / factor * (1 - kept), 0.1 * math.log(factor) + 1


@pytest.mark.parametrize(
    ("head_dim", "theta", "factor", "trained"),
    [
        (32, 1e6, 4.0, 64),
        (128, 1e6, 4.0, 32768),
        (64, 1e6, 2.5, 32768),
        (128, 1e4, 8.0, 4096),
        (16, 1e4, 1.0, 64),
    ],
)
def test_yarn_equals_the_papers_formula(head_dim, theta, factor, trained):
    scaling = {"type": "yarn", "factor": factor, "original_max_position_embeddings": trained}
    config = hub.make_config(
        QWEN3 | {"head_dim": head_dim, "rope_theta": theta, "rope_scaling": scaling}
    )
    frequencies, magnitude = yarn_by_hand(head_dim, theta, factor, trained)
    rope = ops.Rope(config.head_dim, config.rope_theta, config.rope_scaling)
    np.testing.assert_allclose(1 / np.array(rope.periods), frequencies, rtol=1e-5)
    np.testing.assert_allclose(rope.frequencies, frequencies, rtol=1e-12)
    assert rope.magnitude == pytest.approx(magnitude)


def test_yarn_without_the_trained_length_takes_that_of_the_model_as_transformers_does():
    config = hub.make_config(QWEN3 | {"rope_scaling": {"type": "yarn", "factor": 4}})
    assert config.rope_scaling == YARN | {
        "original_max_position_embeddings": 256,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
    }


def test_both_layouts_of_rope_settings_give_the_same_configuration():
    old = hub.make_config(QWEN3 | {"rope_scaling": YARN})
    plain = {key: value for key, value in QWEN3.items() if key != "rope_theta"}
    new = hub.make_config(plain | {"rope_parameters": YARN | {"rope_theta": 1e6}})
    assert (old.rope_theta, old.rope_scaling) == (new.rope_theta, new.rope_scaling)
    assert (
        hub.make_config(
            plain | {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}
        ).rope_theta
        == 5e5
    )


# ---- exp, swiglu, attention


@pytest.fixture(params=["power", "compiled"])
def exp(request, monkeypatch):
    """Both forms on a CPU, whatever the size."""
    if request.param == "power":
        return cpu.exp
    if not cpu.try_to_compile_loops():
        pytest.skip("there is no g++: apt-get install g++")
    monkeypatch.setattr(cpu, "MIN_COMPILED_SIZE", 0)
    return gpu.without_gradients()(cpu.exp)


def test_exp_equals_that_of_numpy_over_the_whole_range(exp):
    x = np.linspace(-8, 8, 10_001).astype(np.float32)
    np.testing.assert_allclose(np.array(exp(mx.array(x))), np.exp(x.astype(np.float64)), rtol=1e-6)
    x = np.linspace(-86.9, 88.7, 10_001).astype(np.float32)
    np.testing.assert_allclose(np.array(exp(mx.array(x))), np.exp(x.astype(np.float64)), rtol=1e-5)
    assert exp(mx.array([-mx.inf, -1e30, -200.0, -0.0, 0.0])).tolist() == [0, 0, 0, 1, 1]
    assert exp(mx.array([mx.inf, 1e30, 90.0])).tolist() == [mx.inf] * 3
    assert np.isnan(exp(mx.array([mx.nan, 1.0])).tolist()).tolist() == [True, False]


def test_the_expression_of_exp_is_right_to_three_roundings():
    x = np.linspace(-86.9, 88.72, 200_001).astype(np.float32)
    assert (
        np.abs(np.array(cpu.exp_expression(mx.array(x))) / np.exp(x.astype(np.float64)) - 1).max()
        < 2e-7
    )


def test_exp_of_any_shape_and_layout_and_of_each_row_by_itself_is_the_same(exp):
    x = draw_normal(6, 5)
    for view in (x, x.T, x[::2, 1::2], mx.broadcast_to(x[:1], (4, 5)), x[0, 0], mx.zeros((3, 0))):
        np.testing.assert_allclose(np.array(exp(view)), np.exp(np.array(view)), rtol=2e-6)
    np.testing.assert_allclose(np.array(mx.vmap(exp)(x)), np.exp(np.array(x)), rtol=2e-6)


def test_the_gradient_of_exp_is_that_of_mlx_and_takes_the_shift_as_fixed():
    x, factor = draw_normal(400, 33, scale=5), draw_normal(400, 33)
    ours = mx.grad(lambda x: (cpu.exp(2 * x, x.max(-1, keepdims=True)) * factor).sum())(x)
    theirs = mx.grad(
        lambda x: (mx.exp(2 * x - mx.stop_gradient(x.max(-1, keepdims=True))) * factor).sum()
    )(x)
    np.testing.assert_allclose(np.array(ours), np.array(theirs), rtol=1e-5)
    assert mx.grad(lambda x: cpu.exp(x).sum())(mx.array([-1e30, -mx.inf])).tolist() == [0, 0]


def test_without_a_compiler_exp_is_a_power_of_two(monkeypatch):
    monkeypatch.setattr(cpu, "try_to_compile_loops", cpu.try_to_compile_loops.__wrapped__)
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(cpu, "compile_exp", lambda _: pytest.fail("compiled"))
    x = draw_normal(cpu.MIN_COMPILED_SIZE)
    assert mx.array_equal(gpu.without_gradients()(cpu.exp)(x), mx.power(2.0, x * cpu.LOG2_E))


def plain_swiglu(gate_up: mx.array) -> mx.array:
    gate, up = mx.split(gate_up, 2, axis=-1)
    return ops.silu(gate) * up


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
def test_swiglu_and_its_gradient_are_to_the_bit_those_of_the_plain_expression(dtype):
    gate_up, d_out = (
        draw_normal(300, 500, scale=8).astype(dtype),
        draw_normal(300, 250).astype(dtype),
    )
    ours, plain = (mx.vjp(form, [gate_up], [d_out]) for form in (ops.swiglu, plain_swiglu))
    assert all(
        mx.array_equal(*both)
        for both in zip([*ours[0], *ours[1]], [*plain[0], *plain[1]], strict=True)
    )


def test_of_swiglu_only_its_input_and_a_half_wait_for_the_gradient():
    x = mx.ones((1000, 2000))

    def peak(form) -> float:
        """In sizes of x, of ten in a row."""

        def deep(x):
            for _ in range(10):
                x = mx.concatenate([form(x)] * 2, axis=-1)
            return x.sum()

        mx.eval(x)
        mx.synchronize()
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        mx.eval(mx.grad(deep)(x))
        return (mx.get_peak_memory() - before) / x.nbytes

    assert peak(ops.swiglu) < peak(plain_swiglu) - 2


def attention_by_hand(q, k, v, visible) -> np.ndarray:
    """(H, L, D) x (K, S, D) in float64, one query at a time; `visible[query]` lists the keys that it sees."""
    out = np.zeros(q.shape)
    for head in range(q.shape[0]):
        kv_head = head * k.shape[0] // q.shape[0]
        for query, seen in enumerate(visible):
            scores = k[kv_head, seen] @ q[head, query] / math.sqrt(q.shape[-1])
            weights = np.exp(scores - scores.max())
            out[head, query] = weights @ v[kv_head, seen] / weights.sum()
    return out


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (8, 1)])
@pytest.mark.parametrize(("length", "num_keys"), [(1, 1), (1, 9), (6, 6), (3, 9)])
@pytest.mark.parametrize("mask", [None, "causal", "array"])
def test_attention_equals_the_formula_and_that_of_mlx_in_value_and_gradient(
    heads, kv_heads, length, num_keys, mask
):
    q, k, v = (
        draw_normal(2, heads, length, 8),
        draw_normal(2, kv_heads, num_keys, 8),
        draw_normal(2, kv_heads, num_keys, 8),
    )
    visible = np.ones((2, length, num_keys), bool)
    if mask == "causal":
        visible &= np.tri(length, num_keys, num_keys - length, dtype=bool)
    if mask == "array":
        visible = RNG.random((2, length, num_keys)) < 0.6
        visible[:, :, -1] = True
    given_mask = mx.array(visible[:, None]) if mask == "array" else mask
    ours = attention.attention_ref(q, k, v, given_mask)
    for row in range(2):
        seen = [np.flatnonzero(line) for line in visible[row]]
        expected = attention_by_hand(
            *(np.array(a[row]).astype(np.float64) for a in (q, k, v)), seen
        )
        np.testing.assert_allclose(np.array(ours[row]), expected, atol=2e-6)

    weight = draw_normal(*ours.shape)

    def mlx_own(q, k, v):
        return mx.fast.scaled_dot_product_attention(q, k, v, scale=8**-0.5, mask=given_mask)

    np.testing.assert_allclose(np.array(ours), np.array(mlx_own(q, k, v)), atol=2e-6)
    our_gradients, their_gradients = (
        mx.grad(lambda *qkv, attend=attend: (attend(*qkv) * weight).sum(), argnums=(0, 1, 2))(
            q, k, v
        )
        for attend in (lambda *qkv: attention.attention_ref(*qkv, given_mask), mlx_own)
    )
    for our_gradient, their_gradient in zip(our_gradients, their_gradients, strict=True):
        np.testing.assert_allclose(np.array(our_gradient), np.array(their_gradient), atol=5e-6)


def test_a_query_that_sees_nothing_gives_neither_nan_nor_a_gradient_of_nan():
    q, k, v = draw_normal(1, 2, 2, 8), draw_normal(1, 2, 3, 8), draw_normal(1, 2, 3, 8)
    mask = mx.array([[[[False, False, False], [True, True, False]]]])
    assert mx.isfinite(attention.attention_ref(q, k, v, mask)).all().item()
    for gradient in mx.grad(
        lambda *qkv: attention.attention_ref(*qkv, mask).sum(), argnums=(0, 1, 2)
    )(q, k, v):
        assert mx.isfinite(gradient).all().item()


def test_scores_beyond_the_range_of_float16_are_finite():
    q = mx.full((1, 1, 2, 16), 200.0, dtype=mx.float16)
    k = mx.full(
        (1, 1, 3, 16), 300.0, dtype=mx.float16
    )  # a score of 240,000; float16 ends at 65,504
    out = attention.attention(q, k, mx.ones((1, 1, 3, 16), mx.float16), "causal")
    assert out.dtype == mx.float16 and mx.array_equal(out, mx.ones_like(out))


@pytest.mark.parametrize("length", [1, 8, 9])
def test_attention_on_a_gpu_takes_mlxs_kernel_and_never_its_gradient(length, monkeypatch):
    """MLX's kernel for at most 8 queries has none, and the other's rounds scores to 16 bits."""
    called = []

    def fused(queries, keys, values, scale, mask):
        called.append(mask)
        return mx.stop_gradient(attention.attention_ref(queries, keys, values, mask))

    monkeypatch.setattr(gpu, "on_gpu", lambda: True)
    monkeypatch.setattr(kernels.Op, "can_run", lambda *_: False)
    monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", fused)
    queries, keys = draw_normal(2, 4, length, 64), draw_normal(2, 2, length, 64)
    gradient = mx.grad(lambda x: attention.attention(x, keys, keys, "causal").square().sum())(
        queries
    )
    expected = mx.grad(lambda x: attention.attention_ref(x, keys, keys, "causal").square().sum())(
        queries
    )
    assert called == ["causal"] and mx.allclose(gradient, expected, rtol=1e-4, atol=1e-4)
