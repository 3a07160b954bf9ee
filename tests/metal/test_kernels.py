"""
Every kernel and its reference equal a formula in float64, forward and backward.

The emulator checks every access of a kernel to memory. Shapes are small and odd. Where possible,
some have fewer than 8 elements, since MLX passes such inputs to a kernel in another address space.
Tests with Qwen's vocabulary and with many draws run in the emulator's mode "fast".
"""

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import small_run
from conftest import QWEN3, YARN
from mlx.utils import tree_flatten

import gwen
from disk import hub
from kv_cache import (
    AttentionMasks,
    KVCache,
    QueryRowsReadingCachePart,
    SlotCache,
    make_part_readers,
)
from layers import attention, lm_head, ops, softmax
from machine import gpu
from machine import kernels as kernel_machinery
from step.batch import make_batches

pytestmark = pytest.mark.slow
DTYPES = [mx.float32, mx.float16, mx.bfloat16]
# Relative tolerances. In 16 bits: one rounding of the result.
EPSILON = {mx.float32: 2e-6, mx.float16: 1e-3, mx.bfloat16: 8e-3}
RNG = np.random.default_rng(0)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
in_fast_mode = pytest.mark.parametrize("metal", ["fast"], indirect=True)


@pytest.fixture
def launched_kernels(metal: str, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """
    Makes operations run their kernels; records the names of the launched kernels in a set.

    No kernel is turned off, since none is checked at first use.
    """
    monkeypatch.setattr(gpu, "can_run_metal_kernels", lambda: True)
    monkeypatch.setattr(kernel_machinery, "turn_off_faulty_kernels", lambda _: None)
    launched_names: set[str] = set()

    def record_launches(name: str, launch: Callable[..., Any]) -> Callable[..., Any]:
        def launch_and_record(*arguments: Any, **settings: Any) -> Any:
            launched_names.add(name)
            return launch(*arguments, **settings)

        return launch_and_record

    for name, op in kernel_machinery.OPS.items():
        monkeypatch.setattr(op, "launch", record_launches(name, op.launch))
    return launched_names


@pytest.fixture(params=["expression", "kernel"])
def form(request: pytest.FixtureRequest, metal: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes operations compute their reference expression or run their kernel."""
    if request.param == "kernel":
        request.getfixturevalue("launched_kernels")
    else:
        monkeypatch.setenv("GWEN_KERNELS", "off")


def draw_array(*shape: int, dtype: mx.Dtype, scale: float = 1.0) -> mx.array:
    return mx.array(RNG.normal(0, scale, shape).astype(np.float32)).astype(dtype)


def to_float64(x: mx.array) -> np.ndarray:
    return np.array(x.astype(mx.float32)).astype(np.float64)


def check_close(
    result: mx.array, expected: np.ndarray, dtype: mx.Dtype, slack: float = 1.0
) -> None:
    assert result.shape == expected.shape
    tolerance = EPSILON[dtype] * slack
    np.testing.assert_allclose(to_float64(result), expected, rtol=tolerance, atol=tolerance)


def check_gradient(
    function: Callable[..., Any],
    formula: Callable[..., Any],
    arrays: Sequence[mx.array],
    slack: float = 1.0,
) -> None:
    """
    Compares the gradient of `function` with that of its float64 `formula`, in a random direction.

    The gradient of `formula` is a central difference. The tolerance follows the size of the summed
    terms, not the size of their sum.
    """
    outputs = function(*arrays)
    cotangents = [draw_array(*out.shape, dtype=out.dtype) for out in outputs]
    _, gradients = mx.vjp(function, list(arrays), cotangents)
    exact_arrays = [to_float64(x) for x in arrays]
    exact_cotangents = [to_float64(cotangent) for cotangent in cotangents]
    step = 1e-6

    def compute_loss(index: int, change: np.ndarray) -> float:
        changed_arrays = list(exact_arrays)
        changed_arrays[index] = exact_arrays[index] + change
        outputs = formula(*changed_arrays)
        terms = zip(exact_cotangents, outputs, strict=True)
        return sum(float((cotangent * out).sum()) for cotangent, out in terms)

    for index, (gradient, array) in enumerate(zip(gradients, arrays, strict=True)):
        assert gradient.dtype == array.dtype
        assert gradient.shape == array.shape

        direction = RNG.normal(size=array.shape)
        loss_above = compute_loss(index, step * direction)
        loss_below = compute_loss(index, -step * direction)
        expected = (loss_above - loss_below) / (2 * step)
        terms = to_float64(gradient) * direction
        tolerance = EPSILON[array.dtype] * slack * (np.abs(terms).sum() + 1) + 1e-6
        assert abs(terms.sum() - expected) <= tolerance, (index, terms.sum(), expected, tolerance)


# ---- swiglu


def swiglu_by_hand(gate_up: np.ndarray) -> list[np.ndarray]:
    gate, up = np.split(gate_up, 2, axis=-1)
    return [gate / (1 + np.exp(-gate)) * up]


@each_dtype
@pytest.mark.parametrize("shape", [(1, 2), (2, 6), (3, 1, 74), (5, 64), (300, 6)])
def test_swiglu_and_its_gradient_equal_the_formula(form, shape, dtype):
    x = draw_array(*shape, dtype=dtype, scale=4)
    (expected,) = swiglu_by_hand(to_float64(x))
    check_close(ops.swiglu(x), expected, dtype, 2)
    check_gradient(lambda x: [ops.swiglu(x)], swiglu_by_hand, [x], 4)


GATES = [float(gate) for gate in "-1000 -200 -100 -89 -88 -41 -39 -12 -1 0 0.5 11 90 1000".split()]


def test_swiglu_and_its_gradient_equal_the_formula_at_every_size_of_the_gate(form):
    # An earlier form had a nan gradient for gates below -88.7, where exp(-gate) overflows.
    gate = np.array(GATES)
    up = np.linspace(-2, 2, len(GATES))
    sigmoid = np.where(gate < -700, 0, 1 / (1 + np.exp(-np.maximum(gate, -700))))
    gate_up = mx.array(np.concatenate([gate, up]).astype(np.float32))

    result = np.array(ops.swiglu(gate_up))
    np.testing.assert_allclose(result, gate * sigmoid * up, rtol=2e-6, atol=1e-12)

    gradient = mx.grad(lambda x: ops.swiglu(x).sum())(gate_up)
    expected = np.concatenate([up * sigmoid * (1 + gate * (1 - sigmoid)), gate * sigmoid])
    np.testing.assert_allclose(np.array(gradient), expected, rtol=5e-6, atol=1e-12)


# ---- the gradient of an adapter's matrices


@each_dtype
@pytest.mark.parametrize(
    ("rows", "rank", "width"), [(1, 1, 1), (3, 2, 2), (7, 4, 33), (1030, 16, 5), (513, 20, 40)]
)
def test_a_transposed_product_equals_the_formula_in_float32(form, rows, rank, width, dtype):
    left = draw_array(rows, rank, dtype=dtype)
    right = draw_array(rows, width, dtype=dtype)
    product = ops.transposed_product(left, right)
    assert product.dtype == mx.float32
    expected = to_float64(left).T @ to_float64(right)
    np.testing.assert_allclose(np.array(product), expected, rtol=1e-5, atol=1e-6 * rows)


# ---- residual and norm


def add_norm_by_hand(x: np.ndarray, delta: np.ndarray, weight: np.ndarray) -> list[np.ndarray]:
    total = x + delta
    return [total, total / np.sqrt((total**2).mean(-1, keepdims=True) + 1e-6) * weight]


@each_dtype
@pytest.mark.parametrize("shape", [(1, 1), (2, 3), (3, 1, 37), (2, 256), (2, 1027)])
def test_add_norm_and_its_gradient_equal_the_formula(form, shape, dtype):
    scale = 300.0 if shape == (2, 256) else 1.0  # squares of 300 overflow in float16
    x = draw_array(*shape, dtype=dtype, scale=scale)
    delta = draw_array(*shape, dtype=dtype, scale=scale)
    weight = draw_array(shape[-1], dtype=dtype)

    total, normed = ops.add_norm(x, delta, weight, 1e-6)
    assert mx.array_equal(total, x + delta)  # both sums are rounded once
    _, expected = add_norm_by_hand(to_float64(total), np.zeros(1), to_float64(weight))
    check_close(normed, expected, dtype, 2)

    if shape[-1] > 1:  # the norm of one number is its sign, which has no gradient
        arrays = [x, delta, weight]
        check_gradient(lambda *x: ops.add_norm(*x, 1e-6), add_norm_by_hand, arrays, 16)


# ---- norm and rope


def norm_rope_by_hand(
    qkv: np.ndarray,
    weights: Sequence[np.ndarray],
    heads: int,
    rope: ops.Rope,
    offsets: Sequence[int],
) -> list[np.ndarray]:
    length, all_heads = qkv.shape[1:3]
    num_rotated = heads + (all_heads - heads) // 2
    out = qkv[:, :, :num_rotated].copy()
    if weights:
        out /= np.sqrt((out**2).mean(-1, keepdims=True) + 1e-6)
        out[:, :, :heads] *= weights[0]
        out[:, :, heads:] *= weights[1]
    positions = np.array(offsets)[:, None] + np.arange(length)
    angles = (positions[..., None] * rope.frequencies)[:, :, None]
    low, high = np.split(out[..., : rope.size] * rope.magnitude, 2, axis=-1)
    rotated_low = low * np.cos(angles) - high * np.sin(angles)
    rotated_high = high * np.cos(angles) + low * np.sin(angles)
    out = np.concatenate([rotated_low, rotated_high, out[..., rope.size :]], axis=-1)
    out = out.transpose(0, 2, 1, 3)
    return [out[:, :heads], out[:, heads:]]


@each_dtype
@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "rope_size", "length", "has_norm", "has_yarn"),
    [
        (1, 1, 64, 64, 1, True, False),
        (2, 1, 80, 80, 3, True, False),
        (3, 1, 96, 96, 1, False, True),
        (8, 2, 128, 128, 2, True, True),
        (5, 1, 64, 64, 1, False, False),
        (6, 1, 64, 64, 1, True, False),
        (7, 1, 64, 64, 1, True, False),
        (8, 1, 256, 256, 1, True, False),
        (8, 2, 256, 64, 1, True, False),  # rotates a part of each head, as Qwen3.5 does
        (2, 1, 80, 20, 3, True, False),
        (1, 1, 2, 2, 1, True, False),
    ],
)
def test_norm_rope_equals_the_formula(
    form, heads, kv_heads, size, rope_size, length, has_norm, has_yarn, dtype
):
    config = hub.make_config(QWEN3 | ({"rope_scaling": YARN} if has_yarn else {}))
    rope = ops.Rope(rope_size, config.rope_theta, config.rope_scaling)
    offsets = [0, -2, 700]
    qkv = draw_array(3, length, heads + 2 * kv_heads, size, dtype=dtype)
    weights = None
    exact_weights = []
    if has_norm:
        weights = (draw_array(size, dtype=dtype), draw_array(size, dtype=dtype))
        exact_weights = [to_float64(weight) for weight in weights]
    expected = norm_rope_by_hand(to_float64(qkv), exact_weights, heads, rope, offsets)
    expected_values = qkv[:, :, heads + kv_heads :].transpose(0, 2, 1, 3)

    cpu_rotation = rope.make_rotation(mx.array(offsets), length)
    gpu_rotation = ops.Rotation(rope, mx.array(offsets))
    for rotation in (cpu_rotation, gpu_rotation):
        *queries_and_keys, values = ops.norm_rope(qkv, heads, weights, 1e-6, rotation)
        for result, exact in zip(queries_and_keys, expected, strict=True):
            # the rounding of an angle in float32 at the farthest position
            angle_error = 702 * 1.2e-7 * np.abs(exact).max()
            rtol = 2 * EPSILON[dtype]
            atol = angle_error + 2 * EPSILON[dtype]
            np.testing.assert_allclose(to_float64(result), exact, rtol=rtol, atol=atol)
        assert mx.array_equal(values, expected_values)


# ---- decode attention over shared prompts


def slot_attention_by_hand(
    queries: np.ndarray,
    keys: np.ndarray,
    values: np.ndarray,
    slot_keys: np.ndarray,
    slot_values: np.ndarray,
    *,
    prompt_of: list[int],
    mask: np.ndarray,
    slot_mask: np.ndarray,
) -> np.ndarray:
    """keys, values, mask: of the prompts. slot_keys, slot_values, slot_mask: of the rows."""
    heads, size = queries.shape[1], queries.shape[3]
    out = np.zeros_like(queries)
    for row, prompt in enumerate(prompt_of):
        columns = np.concatenate([mask[prompt], slot_mask[row]])
        for head in range(heads):
            kv = head // (heads // keys.shape[1])
            k = np.concatenate([keys[prompt, kv], slot_keys[row, kv]])[columns]
            v = np.concatenate([values[prompt, kv], slot_values[row, kv]])[columns]
            scores = k @ queries[row, head, 0] / np.sqrt(size)
            weights = np.exp(scores - scores.max())
            out[row, head, 0] = weights @ v / weights.sum()
    return out


@pytest.mark.parametrize(
    ("ratio", "kv_heads", "size", "prompt_of", "is_masked", "dtype"),
    [
        (1, 1, 64, [0], False, mx.float16),
        (2, 2, 128, [0, 0, 1, 1], False, mx.bfloat16),
        *((3, 1, 80, [0, 1, 1, 0, 1], True, dtype) for dtype in DTYPES),
        (4, 1, 96, [1, 0, 1], True, mx.float16),
        (5, 1, 64, [0, 0], True, mx.bfloat16),
        (6, 1, 64, [0, 0], False, mx.float32),
        (7, 1, 64, [0, 0], False, mx.float16),
        (8, 1, 256, [0, 1], True, mx.float32),
    ],
)
def test_slot_attention_equals_the_formula(
    form, ratio, kv_heads, size, prompt_of, is_masked, dtype
):
    rows = len(prompt_of)
    prompts = max(prompt_of) + 1
    width = 5
    length = 11
    queries = draw_array(rows, ratio * kv_heads, 1, size, dtype=dtype, scale=2)
    # Keys and values are views with strides, as in projections and caches.
    keys = draw_array(prompts, length + 5, kv_heads, size, dtype=dtype).transpose(0, 2, 1, 3)
    keys = keys[:, :, :length]
    values = draw_array(prompts, kv_heads, length + 5, size, dtype=dtype)[:, :, :length]
    slot_keys = draw_array(rows, kv_heads, 8, size, dtype=dtype)[:, :, :width]
    slot_values = draw_array(rows, kv_heads, 8, size, dtype=dtype)[:, :, :width]

    mask = np.ones((prompts, length), bool)
    slot_mask = np.ones((rows, width), bool)
    mask_array = slot_mask_array = None
    if is_masked:
        mask[0, : length - 8] = False
        slot_mask[-1, :4] = False
        slot_mask[0, 1] = False
        mask_array = mx.array(mask)[:, None, None]
        slot_mask_array = mx.array(slot_mask)[:, None, None]
    prompt_readers = make_part_readers(prompt_of, prompts, mask_array)
    masks = AttentionMasks([prompt_readers, QueryRowsReadingCachePart(mask=slot_mask_array)])

    inputs = [to_float64(x) for x in (queries, keys, values, slot_keys, slot_values)]
    expected = slot_attention_by_hand(*inputs, prompt_of=prompt_of, mask=mask, slot_mask=slot_mask)
    cache_parts = [(keys, values), (slot_keys, slot_values)]
    check_close(attention.slot_attention(queries, cache_parts, masks), expected, dtype, 2)


# ---- rows of logits


def logsumexp(x: np.ndarray) -> np.ndarray:
    peak = x.max(-1, keepdims=True)
    return np.log(np.exp(x - peak).sum(-1, keepdims=True)) + peak


def row_logprobs_by_hand(
    logits: np.ndarray, ids: np.ndarray, temperature: float
) -> list[np.ndarray]:
    logprobs = logits / temperature - logsumexp(logits / temperature)
    with np.errstate(invalid="ignore"):
        terms = np.where(np.isfinite(logprobs), np.exp(logprobs) * logprobs, 0)
    return [logprobs[np.arange(len(ids)), ids], -terms.sum(-1)]


def draw_logits(size: int, dtype: mx.Dtype) -> mx.array:
    """Four rows of logits: normal ones, equal ones, mostly -inf, and huge ones."""
    rows = np.stack([RNG.normal(0, scale, size) for scale in (3, 0, 3, 1)])
    rows[2, RNG.random(size) < 0.7] = -np.inf
    rows[2, size // 2] = 1.0
    rows[3] *= 1e37
    if dtype == mx.float16:
        rows[3] = np.clip(rows[3], -6e4, 6e4)
    return mx.array(rows.astype(np.float32)).astype(dtype)


SIZES = [1, 2, 7, 31, 33, 1000, 1024, 1025, 3000]
each_row = pytest.mark.parametrize(
    ("size", "dtype"),
    [(size, mx.float32) for size in SIZES]
    + [(size, dtype) for dtype in DTYPES[1:] for size in (1, 7, 1025)],
)


@each_row
def test_the_logprobs_and_entropies_of_rows_equal_the_formula(form, size, dtype):
    all_logits = draw_logits(size, dtype)
    for num_rows in (4, 1):  # one row with few elements is in another address space
        logits = all_logits[:num_rows]
        ids = np.full(num_rows, size // 2)
        results = softmax.row_logprobs(logits, mx.array(ids), 0.7)
        expected_results = row_logprobs_by_hand(to_float64(logits), ids, 0.7)

        # A difference of two logits has the rounding of the largest one.
        scaled = to_float64(logits) / 0.7
        largest = np.abs(np.where(np.isfinite(scaled), scaled, 0)).max(-1)
        for result, expected in zip(results, expected_results, strict=True):
            tolerance = 1e-5 + 2e-7 * largest + 1e-6 * np.abs(expected)
            assert (np.abs(np.array(result) - expected) <= tolerance).all()


@each_row
def test_the_gradients_of_the_logprobs_of_rows_equal_the_formula(launched_kernels, size, dtype):
    all_logits = draw_logits(size, dtype)
    for num_rows in (4, 1):
        logits = all_logits[:num_rows]
        ids = mx.array(np.full(num_rows, size // 2))
        logprobs, entropies, slopes = softmax.row_logprobs_and_gradients(logits, ids, 0.7)

        expected_logprobs, expected_entropies = softmax.row_logprobs(logits, ids, 0.7)
        assert mx.array_equal(logprobs, expected_logprobs)
        assert mx.array_equal(entropies, expected_entropies)

        scaled = to_float64(logits) / 0.7
        expected_slopes = -np.exp(scaled - logsumexp(scaled))
        expected_slopes[:, size // 2] += 1
        assert slopes.dtype == dtype
        slopes = to_float64(slopes) / softmax.SLOPE_SCALE
        # If p is nearly 1, then 1 - p has the rounding of float32 logits.
        np.testing.assert_allclose(slopes, expected_slopes, rtol=2 * EPSILON[dtype], atol=2e-6)


def sum_of_tail_slopes(logits: mx.array) -> float:
    """The sum of the negative slopes of all tokens but the first, in one row of logits."""
    *_, slopes = softmax.row_logprobs_and_gradients(logits, mx.array([0]))
    return -to_float64(slopes)[0, 1:].sum() / softmax.SLOPE_SCALE


@in_fast_mode
def test_gradients_include_probabilities_that_are_too_small_for_float16(launched_kernels):
    """Half of the mass is in a tail of Qwen's vocabulary. Each token of the tail has little."""
    logits = np.full((1, 151_936), -np.log(2 * 151_935))
    logits[0, 0] = -np.log(2)
    half_logits = mx.array(logits).astype(mx.float16)
    assert sum_of_tail_slopes(half_logits) == pytest.approx(0.5, rel=0.01)

    logits[0, 1:] -= 6  # 8e-9 each
    half_logits = mx.array(logits).astype(mx.float16)
    probs = np.exp(to_float64(half_logits))
    tail_mass = probs[0, 1:].sum() / probs.sum()
    assert sum_of_tail_slopes(half_logits) == pytest.approx(tail_mass, rel=0.01)


@in_fast_mode
@each_dtype
def test_the_logprobs_of_a_vocabulary_of_the_size_of_qwen_are_exact(launched_kernels, dtype):
    logits = draw_array(3, 151_936, dtype=dtype, scale=3)
    ids = np.array([0, 77_777, 151_935])
    expected_results = row_logprobs_by_hand(to_float64(logits), ids, 0.9)
    results = softmax.row_logprobs(logits, mx.array(ids), 0.9)
    for result, expected in zip(results, expected_results, strict=True):
        np.testing.assert_allclose(np.array(result), expected, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("size", [1, 7, 33, 1100])
@pytest.mark.parametrize("top_p", [0.05, 0.5, 0.95])
def test_the_nucleus_is_the_smallest_set_of_logits_with_the_mass_top_p(form, size, top_p):
    logits = draw_logits(size, mx.float32)[:3]
    logits_with_ties = mx.round(logits)
    for rows in (logits, logits_with_ties):
        thresholds = np.array(softmax.nucleus_threshold(rows, top_p))
        for row, threshold in zip(to_float64(rows), thresholds, strict=True):
            weights = np.exp(row - row.max())
            probs = weights / weights.sum()
            assert threshold in row
            assert probs[row > threshold].sum() < top_p + 1e-6
            assert probs[row >= threshold].sum() >= top_p - 1e-6


# ---- sampling


def choice_intervals(logits: np.ndarray, token: int) -> list[tuple[float, float]]:
    """
    The interval of the uniform number in each of the four choices that lead to `token`.

    The ends of an interval are cumulative probabilities, in float64.
    """
    weights = np.zeros(2**20)
    weights[: len(logits)] = np.exp(logits - logits.max())
    intervals = []
    begin = 0
    width = 2**20
    for _ in range(4):
        masses = weights[begin : begin + width].reshape(32, -1).sum(-1)
        cumulative = np.cumsum(masses) / masses.sum()
        width //= 32
        choice = (token - begin) // width
        lower = cumulative[choice - 1] if choice else 0.0
        intervals.append((lower, cumulative[choice]))
        begin += choice * width
    return intervals


@pytest.mark.parametrize(
    ("size", "dtype"),
    [(size, mx.float32) for size in (1, 2, 7, 33, 1025, 40_000)]
    + [(1500, dtype) for dtype in DTYPES[1:]],
)
def test_the_four_uniform_numbers_are_in_the_intervals_of_the_drawn_token(form, size, dtype):
    logits = draw_logits(size, dtype)[:3]
    exact_logits = to_float64(logits)
    uniforms = RNG.random((3, 4)).astype(np.float32)
    tokens, logprobs, entropies = softmax.sample_token(logits, mx.array(uniforms), 0.7)

    expected_logprobs, expected_entropies = row_logprobs_by_hand(
        exact_logits, np.array(tokens), 0.7
    )
    np.testing.assert_allclose(np.array(logprobs), expected_logprobs, rtol=2e-6, atol=2e-5)
    np.testing.assert_allclose(np.array(entropies), expected_entropies, rtol=2e-6, atol=2e-5)

    for row in range(3):
        intervals = choice_intervals(exact_logits[row] / 0.7, int(tokens[row].item()))
        for (lower, upper), number in zip(intervals, uniforms[row], strict=True):
            assert lower - 1e-6 <= number <= upper + 1e-6


@in_fast_mode
@pytest.mark.parametrize(
    ("size", "rows", "scale"), [(151_936, 100, 3.0), (151_936, 50, 0.0), (8192, 400, 2.0)]
)
def test_the_kernel_draws_the_same_tokens_as_its_reference(launched_kernels, size, rows, scale):
    """100 draws are from rows of Qwen's size, and 50 draws are from rows of equal logits."""
    for begin in range(0, rows, 200):
        logits = draw_array(min(200, rows - begin), size, dtype=mx.float32, scale=scale)
        uniforms = mx.array(RNG.random((len(logits), 4)).astype(np.float32))
        tokens, *values = softmax.sample_token(logits, uniforms)
        ref_tokens, *ref_values = softmax.sample_token_ref(logits, uniforms)
        assert mx.array_equal(tokens, ref_tokens)
        for value, ref_value in zip(values, ref_values, strict=True):
            np.testing.assert_allclose(np.array(value), np.array(ref_value), atol=2e-5)


def test_a_row_without_support_draws_its_first_token_without_a_read_out_of_bounds(form):
    logits = mx.full((2, 1030), -mx.inf)
    tokens, logprobs, _ = softmax.sample_token(logits, mx.full((2, 4), 0.5))
    assert tokens.tolist() == [0, 0]
    assert mx.isnan(logprobs).all().item()


# ---- kernels inside of larger computations


@each_dtype
@pytest.mark.parametrize("head", ["frozen", "trained", ""])
def test_the_chunked_head_and_its_gradient_on_kernels_equal_the_formula(
    launched_kernels, head, dtype, monkeypatch
):
    monkeypatch.setattr(lm_head, "ROWS_AT_ONCE", 4)  # three chunks, of which the last is shorter
    hidden = draw_array(2, 5, 8, dtype=dtype)
    initial_weight = draw_array(70, 8, dtype=dtype)
    ids = RNG.integers(0, 70, (2, 5))
    options = {"head": head} if head else {"gradient": False}

    def function(hidden: mx.array, weight: mx.array = initial_weight) -> tuple[mx.array, ...]:
        return lm_head.token_logprobs(hidden, weight, mx.array(ids), temperature=0.8, **options)

    def formula(hidden: np.ndarray, weight: np.ndarray | None = None) -> list[np.ndarray]:
        if weight is None:
            weight = to_float64(initial_weight)
        logits = (hidden @ weight.T).reshape(10, 70)
        results = row_logprobs_by_hand(logits, ids.reshape(-1), 0.8)
        return [result.reshape(2, 5) for result in results]

    slack = 10 if dtype == mx.float32 else 30  # in 16 bits, each logit is rounded
    for result, expected in zip(function(hidden), formula(to_float64(hidden)), strict=True):
        check_close(result, expected, dtype, slack)
    if head:
        arrays = [hidden] if head == "frozen" else [hidden, initial_weight]
        # only the log-probabilities; the entropies have no gradient
        check_gradient(lambda *x: function(*x)[:1], lambda *x: formula(*x)[:1], arrays, 2 * slack)
    assert launched_kernels == {"row_logprobs_and_gradients" if head else "row_logprobs"}


UPDATE_FLAGS = [
    (),
    ("--beta", "0.1", "--temp", "0.8", "--importance-sampling-level", "sequence"),
    ("--entropy-coef", "0.1", "--temp", "0.8"),
    ("--top-k", "5"),
]


@in_fast_mode
@pytest.mark.parametrize("flags", UPDATE_FLAGS, ids=" ".join)
def test_the_gradient_of_an_update_is_the_same_with_and_without_kernels(
    launched_kernels, flags, tmp_path, monkeypatch
):
    monkeypatch.setenv("GWEN_KERNELS", "off")
    run = small_run.make_run(tmp_path, *flags)
    samples = small_run.shift_logprobs(small_run.sample_first_prompts(run), 0.2)
    batches = make_batches(samples, 250, "off")
    if run.config.objective.beta:
        logprobs, _ = small_run.stack_logprobs(samples)
        batches = small_run.add_column(batches, "ref_logprobs", logprobs - 0.1)
    expected, expected_gradient = small_run.record_gradient(run, batches)

    monkeypatch.delenv("GWEN_KERNELS")
    result, gradient = small_run.record_gradient(run, batches)
    has_gradient_kernel = "row_logprobs_and_gradients" in launched_kernels
    assert has_gradient_kernel == ("--top-k" not in flags)

    assert result.loss == pytest.approx(expected.loss, rel=1e-4, abs=1e-6)
    for name in ("kl", "clip_frac", "entropy"):
        if expected.means[name] is None:  # not measured, for example the KL without a reference
            assert result.means[name] is None
            continue
        assert result.means[name] == pytest.approx(expected.means[name], rel=1e-3, abs=1e-6)

    largest = max(float(mx.abs(slopes).max()) for slopes in expected_gradient.values())
    for name in expected_gradient:
        difference = mx.abs(gradient[name] - expected_gradient[name]).max().item()
        assert difference <= 1e-4 * largest, name


@pytest.mark.parametrize("name", ["qwen2", "qwen3-gqa8", "qwen3-yarn", "smollm3", "qwen3.5"])
def test_a_model_gives_the_same_logits_and_gradients_with_and_without_kernels(
    launched_kernels, checkpoints, name
):
    model = gwen.load_model(checkpoints[name], mx.float32)
    tokens = mx.array(RNG.integers(0, 320, (2, 5)).astype(np.int32))

    def compute_logits() -> list[mx.array]:
        cache = KVCache(model.config.layer_kinds)
        prefill_logits = model(tokens, cache)
        slots = SlotCache(cache, 3, 8)
        slots.assign_prompts([0, 1, 0])
        step_logits = []
        for t in range(3):
            slots.plan_writes()
            step_logits.append(model(mx.array([[3], [t], [7]]), slots))
        return [model(tokens), prefill_logits, *step_logits]

    def compute_loss(parameters: dict[str, Any]) -> mx.array:
        model.update(parameters)
        return model(tokens).square().mean()

    def compute_gradients() -> list[mx.array]:
        gradients = mx.grad(compute_loss)(model.parameters())
        return [gradient for _, gradient in sorted(tree_flatten(gradients))]

    kernel_results = compute_logits() + compute_gradients()
    expected_kernels = set("swiglu swiglu_vjp add_norm norm_rope slot_attention".split())
    assert launched_kernels >= expected_kernels
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GWEN_KERNELS", "off")
        reference_results = compute_logits() + compute_gradients()
    for result, reference in zip(kernel_results, reference_results, strict=True):
        atol = 2e-5 * float(mx.abs(reference).max())
        np.testing.assert_allclose(np.array(result), np.array(reference), rtol=1e-4, atol=atol)
