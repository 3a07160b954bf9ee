"""
Every kernel and the expression that it equals against a formula in float64, forward and backward; of a kernel every
access to memory is watched.

Shapes are small, odd and below 8 elements where they can be (MLX hands such inputs to a kernel in another address
space); Qwen's vocabulary and 2,950 draws run at the emulator's full speed.
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
from machine import kernels as machinery
from step.batch import make_batches

pytestmark = pytest.mark.slow
DTYPES = [mx.float32, mx.float16, mx.bfloat16]
EPSILON = {
    mx.float32: 2e-6,
    mx.float16: 1e-3,
    mx.bfloat16: 8e-3,
}  # relative; 16 bits: one rounding of the result
RNG = np.random.default_rng(0)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
fast = pytest.mark.parametrize("metal", ["fast"], indirect=True)


@pytest.fixture
def kernels(metal: str, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Names of launched kernels, which run, on a GPU or emulated, unchecked, so none gives way to an expression."""
    monkeypatch.setattr(gpu, "can_run_metal_kernels", lambda: True)
    monkeypatch.setattr(machinery, "turn_off_faulty_kernels", lambda _: None)
    launched: set[str] = set()

    def noting(name: str, launch: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *arguments, **settings: (launched.add(name), launch(*arguments, **settings))[
            1
        ]

    for name, op in machinery.OPS.items():
        monkeypatch.setattr(op, "launch", noting(name, op.launch))
    return launched


@pytest.fixture(params=["expression", "kernel"])
def form(request: pytest.FixtureRequest, metal: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Operations compute one or the other."""
    if request.param == "kernel":
        request.getfixturevalue("kernels")
    else:
        monkeypatch.setenv("GWEN_KERNELS", "off")


def array(*shape: int, dtype: mx.Dtype, scale: float = 1.0) -> mx.array:
    return mx.array(RNG.normal(0, scale, shape).astype(np.float32)).astype(dtype)


def wide(x: mx.array) -> np.ndarray:
    return np.array(x.astype(mx.float32)).astype(np.float64)


def assert_close(ours: mx.array, expected: np.ndarray, dtype: mx.Dtype, slack: float = 1.0) -> None:
    assert ours.shape == expected.shape
    tolerance = EPSILON[dtype] * slack
    np.testing.assert_allclose(wide(ours), expected, rtol=tolerance, atol=tolerance)


def assert_gradient(
    function: Callable[..., Any],
    formula: Callable[..., Any],
    arrays: Sequence[mx.array],
    slack: float = 1.0,
) -> None:
    """
    The gradient of `function` in a random direction against that of its float64 `formula`, by central differences.

    The size of what may be off is that of the terms which were added up, not that of their sum.
    """
    outputs = function(*arrays)
    cotangents = [array(*out.shape, dtype=out.dtype) for out in outputs]
    _, gradients = mx.vjp(function, list(arrays), cotangents)
    exact, weights, step = [wide(a) for a in arrays], [wide(c) for c in cotangents], 1e-6

    def loss(*moved: np.ndarray) -> float:
        return sum(float((w * out).sum()) for w, out in zip(weights, formula(*moved), strict=True))

    for index, (gradient, source) in enumerate(zip(gradients, arrays, strict=True)):
        assert gradient.dtype == source.dtype and gradient.shape == source.shape
        direction = RNG.normal(size=source.shape)
        ends = [
            [x + sign * step * direction if i == index else x for i, x in enumerate(exact)]
            for sign in (1, -1)
        ]
        expected = (loss(*ends[0]) - loss(*ends[1])) / (2 * step)
        terms = wide(gradient) * direction
        allowed = EPSILON[source.dtype] * slack * (np.abs(terms).sum() + 1) + 1e-6
        assert abs(terms.sum() - expected) <= allowed, (index, terms.sum(), expected, allowed)


# ---- swiglu


def swiglu_by_hand(gate_up: np.ndarray) -> list[np.ndarray]:
    gate, up = np.split(gate_up, 2, axis=-1)
    return [gate / (1 + np.exp(-gate)) * up]


@each_dtype
@pytest.mark.parametrize("shape", [(1, 2), (2, 6), (3, 1, 74), (5, 64), (300, 6)])
def test_swiglu_equals_its_formula_and_so_does_its_gradient(form, shape, dtype):
    x = array(*shape, dtype=dtype, scale=4)
    assert_close(ops.swiglu(x), swiglu_by_hand(wide(x))[0], dtype, 2)
    assert_gradient(lambda x: [ops.swiglu(x)], swiglu_by_hand, [x], 4)


GATES = [
    -1000.0,
    -200.0,
    -100.0,
    -89.0,
    -88.0,
    -41.0,
    -39.0,
    -12.0,
    -1.0,
    0.0,
    0.5,
    11.0,
    90.0,
    1000.0,
]


def test_swiglu_and_its_gradient_equal_the_formula_at_every_size_of_the_gate(form):
    # an earlier form had a nan gradient for gates below -88.7, where exp(-gate) overflows
    gate, up = np.array(GATES), np.linspace(-2, 2, len(GATES))
    sigmoid = np.where(gate < -700, 0, 1 / (1 + np.exp(-np.maximum(gate, -700))))
    gate_up = mx.array(np.concatenate([gate, up]).astype(np.float32))
    np.testing.assert_allclose(
        np.array(ops.swiglu(gate_up)), gate * sigmoid * up, rtol=2e-6, atol=1e-12
    )
    gradient = mx.grad(lambda x: ops.swiglu(x).sum())(gate_up)
    expected = np.concatenate([up * sigmoid * (1 + gate * (1 - sigmoid)), gate * sigmoid])
    np.testing.assert_allclose(np.array(gradient), expected, rtol=5e-6, atol=1e-12)


# ---- the gradient of an adapter's matrices


@each_dtype
@pytest.mark.parametrize(
    ("rows", "rank", "width"), [(1, 1, 1), (3, 2, 2), (7, 4, 33), (1030, 16, 5), (513, 20, 40)]
)
def test_a_tall_product_is_that_of_its_factors_and_float32(form, rows, rank, width, dtype):
    thin, wide_ = array(rows, rank, dtype=dtype), array(rows, width, dtype=dtype)
    ours = ops.transposed_product(thin, wide_)
    assert ours.dtype == mx.float32
    np.testing.assert_allclose(
        np.array(ours), wide(thin).T @ wide(wide_), rtol=1e-5, atol=1e-6 * rows
    )


# ---- residual and norm


def add_norm_by_hand(x: np.ndarray, delta: np.ndarray, weight: np.ndarray) -> list[np.ndarray]:
    total = x + delta
    return [total, total / np.sqrt((total**2).mean(-1, keepdims=True) + 1e-6) * weight]


@each_dtype
@pytest.mark.parametrize("shape", [(1, 1), (2, 3), (3, 1, 37), (2, 256), (2, 1027)])
def test_add_norm_equals_its_formula_and_so_does_its_gradient(form, shape, dtype):
    scale = 300.0 if shape == (2, 256) else 1.0  # whose squares float16 does not hold
    arrays = (
        *(array(*shape, dtype=dtype, scale=scale) for _ in range(2)),
        array(shape[-1], dtype=dtype),
    )
    total, normed = ops.add_norm(*arrays, 1e-6)
    assert mx.array_equal(
        total, arrays[0] + arrays[1]
    )  # rounded once, as the sum of the expression is
    assert_close(normed, add_norm_by_hand(wide(total), np.zeros(1), wide(arrays[2]))[1], dtype, 2)
    if shape[-1] > 1:  # the norm of one number is its sign
        assert_gradient(lambda *given: ops.add_norm(*given, 1e-6), add_norm_by_hand, arrays, 16)


# ---- norm and rope


def norm_rope_by_hand(
    qkv: np.ndarray,
    weights: Sequence[np.ndarray],
    heads: int,
    rope: ops.Rope,
    offsets: Sequence[int],
) -> list[np.ndarray]:
    length, all_heads = qkv.shape[1:3]
    turned = heads + (all_heads - heads) // 2
    out = qkv[:, :, :turned].copy()
    if weights:
        out /= np.sqrt((out**2).mean(-1, keepdims=True) + 1e-6)
        out[:, :, :heads] *= weights[0]
        out[:, :, heads:] *= weights[1]
    positions = np.array(offsets)[:, None] + np.arange(length)
    angles = (positions[..., None] * rope.frequencies)[:, :, None]
    low, high = np.split(out[..., : rope.size] * rope.magnitude, 2, axis=-1)
    parts = [
        low * np.cos(angles) - high * np.sin(angles),
        high * np.cos(angles) + low * np.sin(angles),
    ]
    out = np.concatenate([*parts, out[..., rope.size :]], axis=-1).transpose(0, 2, 1, 3)
    return [out[:, :heads], out[:, heads:]]


@each_dtype
@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "part", "length", "normed", "yarn"),
    [
        (1, 1, 64, 64, 1, True, False),
        (2, 1, 80, 80, 3, True, False),
        (3, 1, 96, 96, 1, False, True),
        (8, 2, 128, 128, 2, True, True),
        (5, 1, 64, 64, 1, False, False),
        (6, 1, 64, 64, 1, True, False),
        (7, 1, 64, 64, 1, True, False),
        (8, 1, 256, 256, 1, True, False),
        (8, 2, 256, 64, 1, True, False),  # a share of each head, as in Qwen3.5
        (2, 1, 80, 20, 3, True, False),
        (1, 1, 2, 2, 1, True, False),
    ],
)
def test_norm_rope_equals_its_formula(
    form, heads, kv_heads, size, part, length, normed, yarn, dtype
):
    config = hub.make_config(QWEN3 | ({"rope_scaling": YARN} if yarn else {}))
    rope, offsets = ops.Rope(part, config.rope_theta, config.rope_scaling), [0, -2, 700]
    qkv = array(3, length, heads + 2 * kv_heads, size, dtype=dtype)
    weights = (array(size, dtype=dtype), array(size, dtype=dtype)) if normed else None
    expected = norm_rope_by_hand(wide(qkv), [wide(w) for w in weights or ()], heads, rope, offsets)
    for rotation in (
        rope.make_rotation(mx.array(offsets), length),
        ops.Rotation(rope, mx.array(offsets)),
    ):  # a CPU's, a GPU's
        *turned, values = ops.norm_rope(qkv, heads, weights, 1e-6, rotation)
        for ours, theirs in zip(turned, expected, strict=True):
            angle = (
                702 * 1.2e-7 * np.abs(theirs).max()
            )  # what float32 leaves of an angle, at the farthest position
            np.testing.assert_allclose(
                wide(ours), theirs, rtol=2 * EPSILON[dtype], atol=angle + 2 * EPSILON[dtype]
            )
        assert mx.array_equal(values, qkv[:, :, heads + kv_heads :].transpose(0, 2, 1, 3))


# ---- decode attention over shared prompts


def slot_attention_by_hand(
    queries: np.ndarray,
    keys: np.ndarray,
    values: np.ndarray,
    own_keys: np.ndarray,
    own_values: np.ndarray,
    **seen: Any,
) -> np.ndarray:
    heads, size = queries.shape[1], queries.shape[3]
    out = np.zeros_like(queries)
    for row, prompt in enumerate(seen["prompt_of"]):
        columns = np.concatenate([seen["mask"][prompt], seen["own_mask"][row]])
        for head in range(heads):
            kv = head // (heads // keys.shape[1])
            k = np.concatenate([keys[prompt, kv], own_keys[row, kv]])[columns]
            v = np.concatenate([values[prompt, kv], own_values[row, kv]])[columns]
            scores = k @ queries[row, head, 0] / np.sqrt(size)
            weights = np.exp(scores - scores.max())
            out[row, head, 0] = weights @ v / weights.sum()
    return out


@pytest.mark.parametrize(
    ("ratio", "kv_heads", "size", "prompt_of", "masked", "dtype"),
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
def test_slot_attention_equals_its_formula(form, ratio, kv_heads, size, prompt_of, masked, dtype):
    rows, prompts, width, length = len(prompt_of), max(prompt_of) + 1, 5, 11
    queries = array(rows, ratio * kv_heads, 1, size, dtype=dtype, scale=2)
    # views, as projections and caches give
    by_column = array(prompts, length + 5, kv_heads, size, dtype=dtype).transpose(0, 2, 1, 3)
    held = [
        x[:, :, :length]
        for x in (by_column, array(prompts, kv_heads, length + 5, size, dtype=dtype))
    ]
    own = [array(rows, kv_heads, 8, size, dtype=dtype)[:, :, :width] for _ in range(2)]
    mask, own_mask = np.ones((prompts, length), bool), np.ones((rows, width), bool)
    if masked:
        mask[0, : length - 8], own_mask[-1, :4], own_mask[0, 1] = False, False, False
    layout = AttentionMasks(
        [
            make_part_readers(
                prompt_of, prompts, mx.array(mask)[:, None, None] if masked else None
            ),
            QueryRowsReadingCachePart(mask=mx.array(own_mask)[:, None, None] if masked else None),
        ]
    )
    exact = [wide(x) for x in (queries, *held, *own)]
    expected = slot_attention_by_hand(*exact, prompt_of=prompt_of, mask=mask, own_mask=own_mask)
    assert_close(
        attention.slot_attention(queries, [(held[0], held[1]), (own[0], own[1])], layout),
        expected,
        dtype,
        2,
    )


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


def rows_of_logits(size: int, dtype: mx.Dtype) -> mx.array:
    """Four rows: plain, all equal, mostly -inf, of huge magnitude."""
    rows = np.stack([RNG.normal(0, scale, size) for scale in (3, 0, 3, 1)])
    rows[2, RNG.random(size) < 0.7] = -np.inf
    rows[2, size // 2] = 1.0
    rows[3] = np.clip(rows[3] * 1e37, -6e4, 6e4) if dtype == mx.float16 else rows[3] * 1e37
    return mx.array(rows.astype(np.float32)).astype(dtype)


SIZES = [1, 2, 7, 31, 33, 1000, 1024, 1025, 3000]
each_row = pytest.mark.parametrize(
    ("size", "dtype"),
    [(size, mx.float32) for size in SIZES] + [(s, d) for d in DTYPES[1:] for s in (1, 7, 1025)],
)


@each_row
def test_row_logprobs_equal_their_formula(form, size, dtype):
    logits, ids = rows_of_logits(size, dtype), np.full(4, size // 2)
    for rows in (slice(0, 4), slice(0, 1)):  # one row of few elements is in another address space
        ours = softmax.row_logprobs(logits[rows], mx.array(ids[rows]), 0.7)
        scaled = wide(logits[rows]) / 0.7
        largest = np.abs(np.where(np.isfinite(scaled), scaled, 0)).max(
            -1
        )  # subtracting two is off by their rounding
        for mine, theirs in zip(
            ours, row_logprobs_by_hand(wide(logits[rows]), ids[rows], 0.7), strict=True
        ):
            assert (
                np.abs(np.array(mine) - theirs) <= 1e-5 + 2e-7 * largest + 1e-6 * np.abs(theirs)
            ).all()


@each_row
def test_row_slopes_are_log_probabilities_entropies_and_the_gradient_by_the_logits(
    kernels, size, dtype
):
    logits, ids = rows_of_logits(size, dtype), np.full(4, size // 2)
    for rows in (slice(0, 4), slice(0, 1)):
        logprobs, entropies, slopes = softmax.row_logprobs_and_gradients(
            logits[rows], mx.array(ids[rows]), 0.7
        )
        found = softmax.row_logprobs(logits[rows], mx.array(ids[rows]), 0.7)
        assert mx.array_equal(logprobs, found[0]) and mx.array_equal(entropies, found[1])
        expected = -np.exp(wide(logits[rows]) / 0.7 - logsumexp(wide(logits[rows]) / 0.7))
        expected[:, size // 2] += 1
        assert slopes.dtype == dtype
        # what is left of 1 - p where p is nearly 1 has the rounding of float32 logits
        np.testing.assert_allclose(
            wide(slopes) / softmax.SLOPE_SCALE, expected, rtol=2 * EPSILON[dtype], atol=2e-6
        )


@fast
def test_row_slopes_keep_what_float16_would_lose(kernels):
    """A vocabulary of Qwen's size whose tail has half of the mass: each of its tokens less than float16 can hold."""
    logits = np.full((1, 151_936), -np.log(2 * 151_935))
    logits[0, 0] = -np.log(2)
    *_, slopes = softmax.row_logprobs_and_gradients(
        mx.array(logits).astype(mx.float16), mx.array([0])
    )
    assert -wide(slopes)[0, 1:].sum() / softmax.SLOPE_SCALE == pytest.approx(0.5, rel=0.01)
    logits[0, 1:] -= 6  # 8e-9 each
    *_, slopes = softmax.row_logprobs_and_gradients(
        mx.array(logits).astype(mx.float16), mx.array([0])
    )
    probs = np.exp(wide(mx.array(logits).astype(mx.float16)))
    tail = probs[0, 1:].sum() / probs.sum()
    assert -wide(slopes)[0, 1:].sum() / softmax.SLOPE_SCALE == pytest.approx(tail, rel=0.01)


@fast
@each_dtype
def test_qwens_vocabulary_is_exact(kernels, dtype):
    logits, ids = array(3, 151_936, dtype=dtype, scale=3), np.array([0, 77_777, 151_935])
    expected = row_logprobs_by_hand(wide(logits), ids, 0.9)
    held = softmax.row_logprobs(logits, mx.array(ids), 0.9)
    for ours, theirs in zip(held, expected, strict=True):
        np.testing.assert_allclose(np.array(ours), theirs, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("size", [1, 7, 33, 1100])
@pytest.mark.parametrize("top_p", [0.05, 0.5, 0.95])
def test_the_nucleus_ends_with_the_logit_that_makes_its_mass(form, size, top_p):
    logits = rows_of_logits(size, mx.float32)[:3]
    ties = mx.round(logits)
    for rows in (logits, ties):
        found = np.array(softmax.nucleus_threshold(rows, top_p))
        for row, least in zip(wide(rows), found, strict=True):
            weights = np.exp(row - row.max()) / np.exp(row - row.max()).sum()
            assert least in row
            assert weights[row > least].sum() < top_p + 1e-6
            assert weights[row >= least].sum() >= top_p - 1e-6


# ---- sampling


def conditionals(logits: np.ndarray, token: int) -> list[tuple[float, float]]:
    """Of each of the four choices that lead to `token`: the share before it and up to it, in float64."""
    weights = np.zeros(2**20)
    weights[: len(logits)] = np.exp(logits - logits.max())
    shares, begin, width = [], 0, 2**20
    for _ in range(4):
        parts = weights[begin : begin + width].reshape(32, -1).sum(-1)
        width //= 32
        place, until = (token - begin) // width, np.cumsum(parts) / parts.sum()
        shares.append((until[place - 1] if place else 0.0, until[place]))
        begin += place * width
    return shares


@pytest.mark.parametrize(
    ("size", "dtype"),
    [(size, mx.float32) for size in (1, 2, 7, 33, 1025, 40_000)]
    + [(1500, dtype) for dtype in DTYPES[1:]],
)
def test_a_drawn_token_is_the_one_whose_borders_hold_the_four_numbers(form, size, dtype):
    logits = rows_of_logits(size, dtype)[:3]
    uniforms = RNG.random((3, 4)).astype(np.float32)
    tokens, logprobs, entropies = softmax.sample_token(logits, mx.array(uniforms), 0.7)
    by_hand = row_logprobs_by_hand(wide(logits), np.array(tokens), 0.7)
    np.testing.assert_allclose(np.array(logprobs), by_hand[0], rtol=2e-6, atol=2e-5)
    np.testing.assert_allclose(np.array(entropies), by_hand[1], rtol=2e-6, atol=2e-5)
    for row in range(3):
        for (before, until), number in zip(
            conditionals(wide(logits)[row] / 0.7, int(tokens[row].item())),
            uniforms[row],
            strict=True,
        ):
            assert before - 1e-6 <= number <= until + 1e-6


@fast
@pytest.mark.parametrize(
    ("size", "rows", "scale"), [(151_936, 100, 3.0), (151_936, 50, 0.0), (8192, 400, 2.0)]
)
def test_the_kernel_draws_the_tokens_of_its_expression(kernels, size, rows, scale):
    """Of the draws 100 are from rows of Qwen's size, and 50 from rows of equal logits."""
    for begin in range(0, rows, 200):
        logits = array(min(200, rows - begin), size, dtype=mx.float32, scale=scale)
        uniforms = mx.array(RNG.random((len(logits), 4)).astype(np.float32))
        ours, theirs = (
            softmax.sample_token(logits, uniforms),
            softmax.sample_token_ref(logits, uniforms),
        )
        assert mx.array_equal(ours[0], theirs[0])
        for mine, other in zip(ours[1:], theirs[1:], strict=True):
            np.testing.assert_allclose(np.array(mine), np.array(other), atol=2e-5)


def test_a_row_without_support_draws_its_first_token_and_reads_nothing_beyond_it(form):
    logits = mx.full((2, 1030), -mx.inf)
    tokens, logprobs, _ = softmax.sample_token(logits, mx.full((2, 4), 0.5))
    assert tokens.tolist() == [0, 0] and mx.isnan(logprobs).all().item()


# ---- the kernels in place


@each_dtype
@pytest.mark.parametrize("head", ["frozen", "trained", ""])
def test_the_chunked_head_on_kernels_equals_its_formula_and_so_does_its_gradient(
    kernels, head, dtype, monkeypatch
):
    monkeypatch.setattr(lm_head, "ROWS_AT_ONCE", 4)  # three chunks, the last one shorter
    hidden, frozen, ids = (
        array(2, 5, 8, dtype=dtype),
        array(70, 8, dtype=dtype),
        RNG.integers(0, 70, (2, 5)),
    )
    how = {"head": head} if head else {"gradient": False}

    def function(hidden: mx.array, *trained: mx.array) -> tuple[mx.array, ...]:
        (weight,) = trained or (frozen,)
        return lm_head.token_logprobs(hidden, weight, mx.array(ids), temperature=0.8, **how)

    def formula(hidden: np.ndarray, *trained: np.ndarray) -> list[np.ndarray]:
        (weight,) = trained or (wide(frozen),)
        found = row_logprobs_by_hand((hidden @ weight.T).reshape(10, 70), ids.reshape(-1), 0.8)
        return [one.reshape(2, 5) for one in found]

    slack = 10 if dtype == mx.float32 else 30  # a logit of 16 bits is off by its own rounding
    for ours, theirs in zip(function(hidden), formula(wide(hidden)), strict=True):
        assert_close(ours, theirs, dtype, slack)
    if head:
        arrays = [hidden] if head == "frozen" else [hidden, frozen]
        assert_gradient(lambda *x: function(*x)[:1], lambda *x: formula(*x)[:1], arrays, 2 * slack)
    assert kernels == {"row_logprobs_and_gradients" if head else "row_logprobs"}


UPDATES = [
    (),
    ("--beta", "0.1", "--temp", "0.8", "--importance-sampling-level", "sequence"),
    ("--entropy-coef", "0.1", "--temp", "0.8"),
    ("--top-k", "5"),
]


@fast
@pytest.mark.parametrize("flags", UPDATES, ids=" ".join)
def test_an_update_on_kernels_takes_the_gradient_that_it_takes_without(
    kernels, flags, tmp_path, monkeypatch
):
    monkeypatch.setenv("GWEN_KERNELS", "off")
    run = small_run.make_run(tmp_path, *flags)
    samples = small_run.shift_logprobs(small_run.sample_first_prompts(run), 0.2)
    batches = make_batches(samples, 250, "off")
    if run.config.objective.beta:
        batches = small_run.add_column(
            batches, "ref_logprobs", small_run.stack_logprobs(samples)[0] - 0.1
        )
    theirs, other = small_run.record_gradient(run, batches)
    monkeypatch.delenv("GWEN_KERNELS")
    ours, mine = small_run.record_gradient(run, batches)
    assert ("row_logprobs_and_gradients" in kernels) == ("--top-k" not in flags)
    assert ours.loss == pytest.approx(theirs.loss, rel=1e-4, abs=1e-6)
    for name in ("kl", "clip_frac", "entropy"):
        if theirs.means[name] is None:  # not measured, as the KL where there is no reference
            assert ours.means[name] is None
            continue
        assert ours.means[name] == pytest.approx(theirs.means[name], rel=1e-3, abs=1e-6)
    largest = max(float(mx.abs(gradient).max()) for gradient in other.values())
    for name in other:
        assert float(mx.abs(mine[name] - other[name]).max()) <= 1e-4 * largest, name


@pytest.mark.parametrize("name", ["qwen2", "qwen3-gqa8", "qwen3-yarn", "smollm3", "qwen3.5"])
def test_a_model_on_kernels_equals_itself_without(kernels, checkpoints, name):
    model = gwen.load_model(checkpoints[name], mx.float32)
    tokens = mx.array(RNG.integers(0, 320, (2, 5)).astype(np.int32))

    def outputs() -> list[mx.array]:
        cache = KVCache(model.config.layer_kinds)
        prefilled, slots = model(tokens, cache), SlotCache(cache, 3, 8)
        slots.assign_prompts([0, 1, 0])
        steps = []
        for t in range(3):
            slots.plan_writes()
            steps.append(model(mx.array([[3], [t], [7]]), slots))
        return [model(tokens), prefilled, *steps]

    def gradients() -> list[mx.array]:
        loss = lambda parameters: (model.update(parameters), model(tokens).square().mean())[1]  # noqa: E731
        return [g for _, g in sorted(tree_flatten(mx.grad(loss)(model.parameters())))]

    ours = outputs() + gradients()
    assert kernels >= set("swiglu swiglu_vjp add_norm norm_rope slot_attention".split())
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GWEN_KERNELS", "off")
        theirs = outputs() + gradients()
    for mine, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(
            np.array(mine), np.array(other), rtol=1e-4, atol=2e-5 * float(mx.abs(other).max())
        )
