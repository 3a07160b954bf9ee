"""Log-probabilities, their memory and the truncated support, against formulas in float64."""

import functools
import math

import mlx.core as mx
import numpy as np
import pytest
from conftest import draw_normal, measure_peak
from test_divergence import log_softmax

from layers import lm_head, softmax
from layers.softmax import TruncationSettings
from machine import cpu

VOCAB = 151_936
RNG = np.random.default_rng(0)


# ---- log-probabilities


def support_by_hand(
    row: np.ndarray, top_p: float = 1.0, top_k: int = 0, min_p: float = 0.0
) -> np.ndarray:
    """The support (V,) of one row as a mask: top_k, then min_p, then top_p of the rest."""
    tokens = sorted(range(len(row)), key=lambda token: -row[token])
    highest = row[tokens[0]]
    if top_k:
        threshold = row[tokens[min(top_k, len(row)) - 1]]
        tokens = [token for token in tokens if row[token] >= threshold]
    if min_p:
        tokens = [token for token in tokens if math.exp(row[token] - highest) >= min_p]
    if top_p < 1:
        total = sum(math.exp(row[token] - highest) for token in tokens)
        mass = 0.0
        nucleus = []
        for token in tokens:
            if mass >= top_p and row[token] != row[nucleus[-1]]:
                break
            nucleus.append(token)
            mass += math.exp(row[token] - highest) / total
        tokens = nucleus
    is_in_support = np.zeros(len(row), bool)
    is_in_support[tokens] = True
    return is_in_support


def logprobs_by_hand(hidden, head, ids, temperature, support) -> tuple[np.ndarray, np.ndarray]:
    """(M, C) x (V, C) x (M,) in float64 -> log-probabilities and entropies."""
    logits = hidden @ head.T / temperature
    if support:
        for row, sampled_id in zip(logits, ids, strict=True):
            is_in_support = support_by_hand(row, *support)
            is_in_support[sampled_id] = True
            row[~is_in_support] = -np.inf
    logprobs = log_softmax(logits)
    probs = np.exp(logprobs)
    entropies = -(probs * np.where(probs > 0, logprobs, 0)).sum(-1)
    return logprobs[np.arange(len(ids)), ids], entropies


SUPPORTS = [
    None,
    TruncationSettings(top_p=0.7),
    TruncationSettings(top_k=20),
    TruncationSettings(min_p=0.05),
    TruncationSettings(top_k=50, top_p=0.9),
]


@pytest.mark.parametrize("head", ["frozen", "trained"])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("support", SUPPORTS, ids=str)
@pytest.mark.parametrize("chunk", [3, 1000])
def test_token_logprobs_equal_the_formula_in_value_and_gradient(
    monkeypatch, head, temperature, support, chunk
):
    vocab = 600
    monkeypatch.setattr(lm_head, "LOGPROB_CHUNK", chunk)
    # A chunk of 3 has three tiles of 170 ids and one tile of 90.
    monkeypatch.setattr(lm_head, "LOGPROB_TILE", 3 * 170)
    hidden = draw_normal(2, 5, 6)
    weight = draw_normal(vocab, 6)
    ids = mx.array(RNG.integers(0, vocab, (2, 5)).astype(np.int32))
    options = {"temperature": temperature, "head": head, "support": support}

    # The values.
    logprobs, entropy = lm_head.token_logprobs(hidden, weight, ids, **options)
    expected, expected_entropy = logprobs_by_hand(
        np.array(hidden).reshape(10, 6).astype(np.float64),
        np.array(weight).astype(np.float64),
        np.array(ids).reshape(-1),
        temperature,
        support,
    )
    np.testing.assert_allclose(np.array(logprobs).reshape(-1), expected, atol=5e-6, rtol=1e-6)
    np.testing.assert_allclose(
        np.array(entropy).reshape(-1), expected_entropy, atol=5e-6, rtol=1e-6
    )

    # The gradients of a weighted sum.
    coefficients = draw_normal(2, 5)

    def weighted_sum(hidden, weight):
        logprobs, _ = lm_head.token_logprobs(hidden, weight, ids, **options)
        return (coefficients * logprobs).sum()

    def weighted_sum_by_definition(hidden, weight):
        scaled_hidden = hidden.reshape(10, 6) / temperature
        logits = lm_head.compute_logits(scaled_hidden, weight, ids.reshape(-1), support)
        logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        sampled_logprobs = mx.take_along_axis(logprobs, ids.reshape(10, 1), axis=-1)
        return (coefficients * sampled_logprobs.reshape(2, 5)).sum()

    d_hidden, d_weight = mx.grad(weighted_sum, argnums=(0, 1))(hidden, weight)
    expected_d_hidden, expected_d_weight = mx.grad(weighted_sum_by_definition, argnums=(0, 1))(
        hidden, weight
    )
    hidden_error = mx.abs(d_hidden - expected_d_hidden).max()
    assert hidden_error < 2e-5 * mx.abs(expected_d_hidden).max()
    if head == "frozen":
        assert mx.abs(d_weight).max().item() == 0
    else:
        weight_error = mx.abs(d_weight - expected_d_weight).max()
        assert weight_error < 2e-5 * mx.abs(expected_d_weight).max()


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_logprobs_of_16_bit_weights_are_exact_and_gradients_keep_their_dtypes(dtype):
    """Logits rounded to 16 bits would be off by 4e-3 in float16 and 0.06 in bfloat16."""
    hidden = draw_normal(1, 4, 64).astype(dtype)
    weight = draw_normal(700, 64).astype(dtype)
    ids = mx.array([[1, 2, 3, 699]])

    def to_float64(array):
        return np.array(array.astype(mx.float32)).astype(np.float64)

    # The values.
    expected, expected_entropy = logprobs_by_hand(
        to_float64(hidden[0]), to_float64(weight), np.array(ids[0]), 1.0, {}
    )
    logprobs, entropy = lm_head.token_logprobs(hidden, weight, ids)
    np.testing.assert_allclose(np.array(logprobs[0]), expected, atol=2e-5)
    np.testing.assert_allclose(np.array(entropy[0]), expected_entropy, atol=2e-5)

    # The gradients.
    def sum_of_logprobs(hidden, weight):
        logprobs, entropy = lm_head.token_logprobs(hidden, weight, ids, head="trained")
        assert logprobs.dtype == mx.float32
        assert entropy.dtype == mx.float32
        return logprobs.sum()

    gradient = mx.grad(sum_of_logprobs, argnums=(0, 1))
    gradients_16_bit = gradient(hidden, weight)
    gradients_32_bit = gradient(hidden.astype(mx.float32), weight.astype(mx.float32))
    for rounded, exact in zip(gradients_16_bit, gradients_32_bit, strict=True):
        assert rounded.dtype == dtype
        np.testing.assert_allclose(
            np.array(rounded.astype(mx.float32)), np.array(exact), rtol=1e-2, atol=1e-4
        )


@pytest.mark.slow
@pytest.mark.parametrize(("head", "max_mib"), [("frozen", 70), ("trained", 75)])
def test_the_memory_of_logprobs_does_not_grow_with_the_number_of_positions(head, max_mib):
    """One (N, T, V) array is 74 MiB for 128 positions and 297 for 512; no memory limit is set."""
    weight = draw_normal(VOCAB, 4)  # 2.3 MiB
    peaks = []
    for length in (128, 512):
        hidden = draw_normal(1, length, 4)
        ids = mx.array(RNG.integers(0, VOCAB, (1, length)).astype(np.int32))
        mx.eval(hidden, weight, ids)

        def sum_of_logprobs(hidden, weight, ids=ids):
            return lm_head.token_logprobs(hidden, weight, ids, head=head)[0].sum()

        compute_gradient = mx.value_and_grad(sum_of_logprobs, argnums=(0, 1))
        peak_bytes = measure_peak(functools.partial(compute_gradient, hidden, weight))
        peaks.append(peak_bytes / 2**20)
    assert max(peaks) < max_mib, peaks
    assert peaks[1] < 1.3 * peaks[0] + 1, peaks


def draw_difficult_rows() -> np.ndarray:
    """Rows (6, V) of Qwen's vocabulary on which one running float32 sum goes wrong."""
    flat = np.zeros((1, VOCAB))
    noise = RNG.normal(size=(1, VOCAB))
    peak = np.where(np.arange(VOCAB) == 7, 12.0, 0.0)[None]
    rows = [flat, noise, 5 * noise, 30 + noise, peak + 0.1 * noise, 0.01 * noise - 100]
    return np.concatenate(rows).astype(np.float32)


def test_logsumexp_of_qwens_vocabulary_is_exact_to_2e_5():
    rows = draw_difficult_rows()
    highest = rows.max(-1, keepdims=True)
    exact = highest[:, 0] + np.log(np.exp(rows.astype(np.float64) - highest).sum(-1))
    assert np.abs(np.array(softmax.logsumexp(mx.array(rows))) - exact).max() < 2e-5


def test_logprobs_and_entropies_of_qwens_vocabulary_are_exact_to_5e_5():
    for row in draw_difficult_rows():
        exact_logprobs = log_softmax(row.astype(np.float64))
        exact_entropy = -(np.exp(exact_logprobs) * exact_logprobs).sum()
        ids = np.array([7, 0, VOCAB - 1])
        logprobs, entropy = lm_head.token_logprobs(
            mx.ones((1, 3, 1)), mx.array(row[:, None]), mx.array(ids[None])
        )
        assert np.abs(np.array(logprobs) - exact_logprobs[ids]).max() < 5e-5
        assert np.abs(np.array(entropy) - exact_entropy).max() < 5e-5


@pytest.mark.parametrize("size", [1, 255, 256, 257, 512, 600])
def test_a_tiled_sum_and_a_tiled_maximum_use_every_element_once(size):
    assert cpu.tiled_sum(mx.ones((2, size))).tolist() == [size, size]
    x = mx.array(RNG.integers(-9, 9, (2, 3, size)).astype(np.float32))
    assert mx.array_equal(cpu.tiled_sum(x), x.sum(-1))

    # Each row has its maximum at another place.
    is_peak = mx.arange(size) == mx.arange(size)[:, None]
    maxima = cpu.tiled_max(mx.where(is_peak, 9.0, -mx.inf))
    assert mx.array_equal(maxima, mx.full((size, 1), 9.0))


@pytest.mark.parametrize("top_p", [1.0, 0.95, 0.5, 1e-6])
@pytest.mark.parametrize("top_k", [0, 1, 7, 99])
@pytest.mark.parametrize("min_p", [0.0, 0.1, 1.0])
def test_the_truncated_support_equals_that_of_a_slow_implementation(top_p, top_k, min_p):
    logits = RNG.normal(0, 2, (6, 40)).astype(np.float32)
    logits[1] = np.round(logits[1])  # ties
    logits[2] = 0.5
    settings = TruncationSettings(top_p, top_k, min_p)
    truncated = np.array(softmax.truncate_logits(mx.array(logits), settings))
    for row in range(6):
        is_in_support = support_by_hand(logits[row].astype(np.float64), top_p, top_k, min_p)
        assert (truncated[row][is_in_support] == logits[row][is_in_support]).all()
        assert np.isneginf(truncated[row][~is_in_support]).all()


def test_top_p_keeps_the_right_probability_mass_of_qwens_vocabulary():
    rows = draw_difficult_rows()[1:4]
    probs = np.exp(log_softmax(rows.astype(np.float64)))
    cumulative = np.cumsum(-np.sort(-probs, axis=-1), axis=-1)
    for top_p in (0.5, 0.9):
        truncated = softmax.truncate_logits(mx.array(rows), TruncationSettings(top_p))
        is_in_support = np.isfinite(np.array(truncated))
        expected_mass = [row[np.searchsorted(row, top_p)] for row in cumulative]
        np.testing.assert_allclose((probs * is_in_support).sum(-1), expected_mass, atol=2e-4)
