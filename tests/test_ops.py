"""The expressions between matmuls equal float64 formulas and the functions of MLX and transformers."""

import math

import mlx.core as mx
import numpy as np
import pytest
from conftest import QWEN3, YARN, draw_normal

from disk import hub
from layers import attention, ops
from machine import cpu, gpu, kernels

RNG = np.random.default_rng(0)


def to_float64(array: mx.array) -> np.ndarray:
    return np.array(array).astype(np.float64)


# ---- rope


def yarn_by_hand(
    head_dim: int, theta: float, factor: float, trained_length: int
) -> tuple[np.ndarray, float]:
    """Frequencies and magnitude of YaRN in float64, from the paper's sections 3.2 and 3.4: alpha 1, beta 32."""
    num_pairs = head_dim // 2
    frequencies = theta ** (-np.arange(0, head_dim, 2) / head_dim)

    def fractional_pair(rotations):
        """The index of the pair whose wavelength fits so many times into the trained context."""
        wavelength = trained_length / (2 * math.pi * rotations)
        return head_dim * math.log(wavelength) / (2 * math.log(theta))

    low = max(math.floor(fractional_pair(32)), 0)
    high = min(math.ceil(fractional_pair(1)), head_dim - 1)
    unscaled_part = 1 - np.clip((np.arange(num_pairs) - low) / max(high - low, 1e-3), 0, 1)
    scaled_part = 1 - unscaled_part
    magnitude = 0.1 * math.log(factor) + 1
    return frequencies * unscaled_part + frequencies / factor * scaled_part, magnitude


@pytest.mark.parametrize(
    ("head_dim", "theta", "factor", "trained_length"),
    [
        (32, 1e6, 4.0, 64),
        (128, 1e6, 4.0, 32768),
        (64, 1e6, 2.5, 32768),
        (128, 1e4, 8.0, 4096),
        (16, 1e4, 1.0, 64),
    ],
)
def test_yarn_equals_the_formula_of_the_paper(head_dim, theta, factor, trained_length):
    scaling = {"type": "yarn", "factor": factor, "original_max_position_embeddings": trained_length}
    config = hub.make_config(
        QWEN3 | {"head_dim": head_dim, "rope_theta": theta, "rope_scaling": scaling}
    )
    frequencies, magnitude = yarn_by_hand(head_dim, theta, factor, trained_length)
    rope = ops.Rope(config.head_dim, config.rope_theta, config.rope_scaling)
    np.testing.assert_allclose(1 / np.array(rope.periods), frequencies, rtol=1e-5)
    np.testing.assert_allclose(rope.frequencies, frequencies, rtol=1e-12)
    assert rope.magnitude == pytest.approx(magnitude)


def test_yarn_takes_a_missing_trained_length_from_the_model_as_transformers_does():
    config = hub.make_config(QWEN3 | {"rope_scaling": {"type": "yarn", "factor": 4}})
    assert config.rope_scaling == YARN | {
        "original_max_position_embeddings": 256,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
    }


def test_both_layouts_of_rope_settings_give_the_same_configuration():
    old = hub.make_config(QWEN3 | {"rope_scaling": YARN})
    without_theta = {key: value for key, value in QWEN3.items() if key != "rope_theta"}
    new = hub.make_config(without_theta | {"rope_parameters": YARN | {"rope_theta": 1e6}})
    assert old.rope_theta == new.rope_theta
    assert old.rope_scaling == new.rope_scaling

    parameters = {"rope_theta": 5e5, "rope_type": "default"}
    config = hub.make_config(without_theta | {"rope_parameters": parameters})
    assert config.rope_theta == 5e5


# ---- exp, swiglu, attention


@pytest.fixture(params=["power", "compiled"])
def exp(request, monkeypatch):
    """Both forms of exp on a CPU. The compiled form is used for arrays of any size."""
    if request.param == "power":
        return cpu.exp
    if not cpu.try_to_compile_loops():
        pytest.skip("there is no g++: apt-get install g++")
    monkeypatch.setattr(cpu, "MIN_COMPILED_SIZE", 0)
    return gpu.without_gradients()(cpu.exp)


def test_exp_equals_exp_of_numpy_over_the_whole_range(exp):
    x = np.linspace(-8, 8, 10_001).astype(np.float32)
    np.testing.assert_allclose(np.array(exp(mx.array(x))), np.exp(x.astype(np.float64)), rtol=1e-6)
    x = np.linspace(-86.9, 88.7, 10_001).astype(np.float32)
    np.testing.assert_allclose(np.array(exp(mx.array(x))), np.exp(x.astype(np.float64)), rtol=1e-5)
    assert exp(mx.array([-mx.inf, -1e30, -200.0, -0.0, 0.0])).tolist() == [0, 0, 0, 1, 1]
    assert exp(mx.array([mx.inf, 1e30, 90.0])).tolist() == [mx.inf] * 3
    assert np.isnan(exp(mx.array([mx.nan, 1.0])).tolist()).tolist() == [True, False]


def test_the_relative_error_of_the_exp_expression_is_at_most_three_roundings():
    x = np.linspace(-86.9, 88.72, 200_001).astype(np.float32)
    exact = np.exp(x.astype(np.float64))
    relative_errors = np.abs(np.array(cpu.exp_expression(mx.array(x))) / exact - 1)
    assert relative_errors.max() < 2e-7


def test_exp_is_right_for_any_shape_and_layout_and_under_vmap(exp):
    x = draw_normal(6, 5)
    for view in (x, x.T, x[::2, 1::2], mx.broadcast_to(x[:1], (4, 5)), x[0, 0], mx.zeros((3, 0))):
        np.testing.assert_allclose(np.array(exp(view)), np.exp(np.array(view)), rtol=2e-6)
    np.testing.assert_allclose(np.array(mx.vmap(exp)(x)), np.exp(np.array(x)), rtol=2e-6)


def test_the_gradient_of_exp_equals_the_gradient_of_mlx_with_a_constant_shift():
    x = draw_normal(400, 33, scale=5)
    factor = draw_normal(400, 33)

    def sum_with_gwen_exp(x):
        return (cpu.exp(2 * x, x.max(-1, keepdims=True)) * factor).sum()

    def sum_with_mlx_exp(x):
        shift = mx.stop_gradient(x.max(-1, keepdims=True))
        return (mx.exp(2 * x - shift) * factor).sum()

    gwen_gradient = mx.grad(sum_with_gwen_exp)(x)
    mlx_gradient = mx.grad(sum_with_mlx_exp)(x)
    np.testing.assert_allclose(np.array(gwen_gradient), np.array(mlx_gradient), rtol=1e-5)

    very_negative = mx.array([-1e30, -mx.inf])
    assert mx.grad(lambda x: cpu.exp(x).sum())(very_negative).tolist() == [0, 0]


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
def test_swiglu_and_its_gradient_equal_the_plain_expression_to_the_bit(dtype):
    gate_up = draw_normal(300, 500, scale=8).astype(dtype)
    d_out = draw_normal(300, 250).astype(dtype)
    (out,), (gradient,) = mx.vjp(ops.swiglu, [gate_up], [d_out])
    (plain_out,), (plain_gradient,) = mx.vjp(plain_swiglu, [gate_up], [d_out])
    assert mx.array_equal(out, plain_out)
    assert mx.array_equal(gradient, plain_gradient)


def test_swiglu_keeps_less_memory_for_the_gradient_than_the_plain_expression():
    x = mx.ones((1000, 2000))

    def peak_memory(swiglu) -> float:
        """The peak memory of the gradient of ten layers, as a multiple of the size of x."""

        def apply_ten_times(x):
            for _ in range(10):
                x = mx.concatenate([swiglu(x)] * 2, axis=-1)
            return x.sum()

        mx.eval(x)
        mx.synchronize()
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        mx.eval(mx.grad(apply_ten_times)(x))
        return (mx.get_peak_memory() - before) / x.nbytes

    assert peak_memory(ops.swiglu) < peak_memory(plain_swiglu) - 2


def attention_by_hand(q, k, v, visible) -> np.ndarray:
    """(H, L, D) x (K, S, D) in float64, one query at a time; `visible[query]` lists the keys that it sees."""
    out = np.zeros(q.shape)
    for head in range(q.shape[0]):
        kv_head = head * k.shape[0] // q.shape[0]
        for query, visible_keys in enumerate(visible):
            scores = k[kv_head, visible_keys] @ q[head, query] / math.sqrt(q.shape[-1])
            weights = np.exp(scores - scores.max())
            out[head, query] = weights @ v[kv_head, visible_keys] / weights.sum()
    return out


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (8, 1)])
@pytest.mark.parametrize(("length", "num_keys"), [(1, 1), (1, 9), (6, 6), (3, 9)])
@pytest.mark.parametrize("mask", [None, "causal", "array"])
def test_attention_equals_the_formula_and_has_the_value_and_gradient_of_mlx(
    heads, kv_heads, length, num_keys, mask
):
    q = draw_normal(2, heads, length, 8)
    k = draw_normal(2, kv_heads, num_keys, 8)
    v = draw_normal(2, kv_heads, num_keys, 8)
    visible = np.ones((2, length, num_keys), bool)
    if mask == "causal":
        visible &= np.tri(length, num_keys, num_keys - length, dtype=bool)
    if mask == "array":
        visible = RNG.random((2, length, num_keys)) < 0.6
        visible[:, :, -1] = True
        mask = mx.array(visible[:, None])

    def gwen_attention(q, k, v):
        return attention.attention_ref(q, k, v, mask)

    def mlx_attention(q, k, v):
        return mx.fast.scaled_dot_product_attention(q, k, v, scale=8**-0.5, mask=mask)

    out = gwen_attention(q, k, v)
    for row in range(2):
        visible_keys = [np.flatnonzero(is_visible) for is_visible in visible[row]]
        expected = attention_by_hand(
            to_float64(q[row]), to_float64(k[row]), to_float64(v[row]), visible_keys
        )
        np.testing.assert_allclose(np.array(out[row]), expected, atol=2e-6)
    np.testing.assert_allclose(np.array(out), np.array(mlx_attention(q, k, v)), atol=2e-6)

    weight = draw_normal(*out.shape)

    def compute_gradients(attend):
        def weighted_sum(q, k, v):
            return (attend(q, k, v) * weight).sum()

        return mx.grad(weighted_sum, argnums=(0, 1, 2))(q, k, v)

    gwen_gradients = compute_gradients(gwen_attention)
    mlx_gradients = compute_gradients(mlx_attention)
    for gwen_gradient, mlx_gradient in zip(gwen_gradients, mlx_gradients, strict=True):
        np.testing.assert_allclose(np.array(gwen_gradient), np.array(mlx_gradient), atol=5e-6)


def test_a_query_without_visible_keys_gives_a_finite_value_and_finite_gradients():
    q = draw_normal(1, 2, 2, 8)
    k = draw_normal(1, 2, 3, 8)
    v = draw_normal(1, 2, 3, 8)
    mask = mx.array([[[[False, False, False], [True, True, False]]]])
    assert mx.isfinite(attention.attention_ref(q, k, v, mask)).all().item()

    def sum_of_attention(q, k, v):
        return attention.attention_ref(q, k, v, mask).sum()

    for gradient in mx.grad(sum_of_attention, argnums=(0, 1, 2))(q, k, v):
        assert mx.isfinite(gradient).all().item()


def test_scores_beyond_the_range_of_float16_are_finite():
    q = mx.full((1, 1, 2, 16), 200.0, dtype=mx.float16)
    # A score is 240,000. The largest float16 is 65,504.
    k = mx.full((1, 1, 3, 16), 300.0, dtype=mx.float16)
    out = attention.attention(q, k, mx.ones((1, 1, 3, 16), mx.float16), "causal")
    assert out.dtype == mx.float16
    assert mx.array_equal(out, mx.ones_like(out))


@pytest.mark.parametrize("length", [1, 8, 9])
def test_attention_on_a_gpu_uses_the_mlx_kernel_but_the_gradient_of_the_reference(
    length, monkeypatch
):
    """MLX's kernel for at most 8 queries has no gradient. The other kernel rounds scores to 16 bits."""
    masks = []

    def fused_attention(queries, keys, values, scale, mask):
        masks.append(mask)
        return mx.stop_gradient(attention.attention_ref(queries, keys, values, mask))

    monkeypatch.setattr(gpu, "on_gpu", lambda: True)
    monkeypatch.setattr(kernels.Op, "can_run", lambda *_: False)
    monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", fused_attention)
    queries = draw_normal(2, 4, length, 64)
    keys = draw_normal(2, 2, length, 64)

    def compute_gradient(attend):
        def sum_of_squares(queries):
            return attend(queries, keys, keys, "causal").square().sum()

        return mx.grad(sum_of_squares)(queries)

    gradient = compute_gradient(attention.attention)
    expected = compute_gradient(attention.attention_ref)
    assert masks == ["causal"]
    assert mx.allclose(gradient, expected, rtol=1e-4, atol=1e-4)
