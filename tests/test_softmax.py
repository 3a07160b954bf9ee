"""Log-probabilities, their memory and the truncated support against formulas in float64."""

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


def kept_by_hand(
    row: np.ndarray, top_p: float = 1.0, top_k: int = 0, min_p: float = 0.0
) -> np.ndarray:
    """The support of one row, token by token: top_k, then min_p, then top_p of what is left."""
    order = sorted(range(len(row)), key=lambda token: -row[token])
    if top_k:
        order = [token for token in order if row[token] >= row[order[min(top_k, len(row)) - 1]]]
    if min_p:
        order = [token for token in order if math.exp(row[token] - row[order[0]]) >= min_p]
    if top_p < 1:
        total, mass, kept = sum(math.exp(row[token] - row[order[0]]) for token in order), 0.0, []
        for token in order:
            if mass >= top_p and row[token] != row[kept[-1]]:
                break
            kept.append(token)
            mass += math.exp(row[token] - row[order[0]]) / total
        order = kept
    kept_mask = np.zeros(len(row), bool)
    kept_mask[order] = True
    return kept_mask


def logprobs_by_hand(hidden, head, ids, temperature, support) -> tuple[np.ndarray, np.ndarray]:
    """(M, C) x (V, C) x (M,) in float64 -> log-probabilities and entropies."""
    logits = hidden @ head.T / temperature
    if support:
        for row, chosen in zip(logits, ids, strict=True):
            kept = kept_by_hand(row, *support)
            kept[chosen] = True
            row[~kept] = -np.inf
    logprobs = log_softmax(logits)
    probs = np.exp(logprobs)
    return logprobs[np.arange(len(ids)), ids], -(probs * np.where(probs > 0, logprobs, 0)).sum(-1)


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
    monkeypatch.setattr(
        lm_head, "LOGPROB_TILE", 3 * 170
    )  # chunks of 3: three tiles of 170 ids and one of 90
    hidden, weight = draw_normal(2, 5, 6), draw_normal(vocab, 6)
    ids = mx.array(RNG.integers(0, vocab, (2, 5)).astype(np.int32))
    choice = {"temperature": temperature, "head": head, "support": support}
    logprobs, entropy = lm_head.token_logprobs(hidden, weight, ids, **choice)
    flat, exact_weight = (
        np.array(hidden).reshape(10, 6).astype(np.float64),
        np.array(weight).astype(np.float64),
    )
    flat_ids = np.array(ids).reshape(-1)
    expected, expected_entropy = logprobs_by_hand(
        flat, exact_weight, flat_ids, temperature, support
    )
    np.testing.assert_allclose(np.array(logprobs).reshape(-1), expected, atol=5e-6, rtol=1e-6)
    np.testing.assert_allclose(
        np.array(entropy).reshape(-1), expected_entropy, atol=5e-6, rtol=1e-6
    )

    a = draw_normal(2, 5)

    def ours(hidden, weight):
        logprobs, _ = lm_head.token_logprobs(hidden, weight, ids, **choice)
        return (a * logprobs).sum()

    def definition(hidden, weight):
        logits = lm_head.compute_logits(
            hidden.reshape(10, 6) / temperature, weight, ids.reshape(-1), support
        )
        logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        return (a * mx.take_along_axis(logprobs, ids.reshape(10, 1), axis=-1).reshape(2, 5)).sum()

    d_hidden, d_weight = mx.grad(ours, argnums=(0, 1))(hidden, weight)
    r_hidden, r_weight = mx.grad(definition, argnums=(0, 1))(hidden, weight)
    assert mx.abs(d_hidden - r_hidden).max() < 2e-5 * mx.abs(r_hidden).max()
    if head == "frozen":
        assert mx.abs(d_weight).max().item() == 0
    else:
        assert mx.abs(d_weight - r_weight).max() < 2e-5 * mx.abs(r_weight).max()


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_logprobs_of_16_bit_weights_are_exact_and_gradients_keep_their_dtypes(dtype):
    """Logits rounded to 16 bits would be off by 4e-3 in float16 and 0.06 in bfloat16."""
    hidden, weight = draw_normal(1, 4, 64).astype(dtype), draw_normal(700, 64).astype(dtype)
    ids = mx.array([[1, 2, 3, 699]])

    def total(hidden, weight):
        logprobs, entropy = lm_head.token_logprobs(hidden, weight, ids, head="trained")
        assert logprobs.dtype == entropy.dtype == mx.float32
        return logprobs.sum()

    flat, exact_weight = (
        np.array(x.astype(mx.float32)).astype(np.float64) for x in (hidden[0], weight)
    )
    expected, expected_entropy = logprobs_by_hand(flat, exact_weight, np.array(ids[0]), 1.0, {})
    logprobs, entropy = lm_head.token_logprobs(hidden, weight, ids)
    np.testing.assert_allclose(np.array(logprobs[0]), expected, atol=2e-5)
    np.testing.assert_allclose(np.array(entropy[0]), expected_entropy, atol=2e-5)
    gradients = mx.grad(total, argnums=(0, 1))(hidden, weight)
    exact = mx.grad(total, argnums=(0, 1))(hidden.astype(mx.float32), weight.astype(mx.float32))
    for rounded, reference in zip(gradients, exact, strict=True):
        assert rounded.dtype == dtype
        np.testing.assert_allclose(
            np.array(rounded.astype(mx.float32)), np.array(reference), rtol=1e-2, atol=1e-4
        )


@pytest.mark.slow
@pytest.mark.parametrize(("head", "most"), [("frozen", 70), ("trained", 75)])
def test_the_memory_of_logprobs_does_not_grow_with_their_number(head, most):
    """One (N, T, V) array is 74 MiB for 128 positions and 297 for 512; no memory limit is set."""
    weight = draw_normal(VOCAB, 4)  # 2.3 MiB
    peaks = []
    for length in (128, 512):
        hidden, ids = (
            draw_normal(1, length, 4),
            mx.array(RNG.integers(0, VOCAB, (1, length)).astype(np.int32)),
        )
        mx.eval(hidden, weight, ids)

        def total(hidden, weight, ids=ids):
            return lm_head.token_logprobs(hidden, weight, ids, head=head)[0].sum()

        gradient = mx.value_and_grad(total, argnums=(0, 1))
        peaks.append(
            measure_peak(lambda gradient=gradient, hidden=hidden: gradient(hidden, weight)) / 2**20
        )
    assert max(peaks) < most and peaks[1] < 1.3 * peaks[0] + 1, peaks


def peaked_rows() -> np.ndarray:
    """Rows of Qwen's vocabulary on which one running float32 sum goes wrong."""
    flat, noise = np.zeros((1, VOCAB)), RNG.normal(size=(1, VOCAB))
    peak = np.where(np.arange(VOCAB) == 7, 12.0, 0.0)[None]
    rows = [flat, noise, 5 * noise, 30 + noise, peak + 0.1 * noise, 0.01 * noise - 100]
    return np.concatenate(rows).astype(np.float32)


def test_logsumexp_of_qwens_vocabulary_is_exact_to_2e_5():
    rows = peaked_rows()
    exact = rows.max(-1) + np.log(
        np.exp(rows.astype(np.float64) - rows.max(-1, keepdims=True)).sum(-1)
    )
    assert np.abs(np.array(softmax.logsumexp(mx.array(rows))) - exact).max() < 2e-5


def test_logprobs_and_entropies_of_qwens_vocabulary_are_exact_to_5e_5():
    for row in peaked_rows():
        logprobs = log_softmax(row.astype(np.float64))
        ids = np.array([7, 0, VOCAB - 1])
        ours, entropy = lm_head.token_logprobs(
            mx.ones((1, 3, 1)), mx.array(row[:, None]), mx.array(ids[None])
        )
        assert np.abs(np.array(ours) - logprobs[ids]).max() < 5e-5
        assert np.abs(np.array(entropy) + (np.exp(logprobs) * logprobs).sum()).max() < 5e-5


@pytest.mark.parametrize("size", [1, 255, 256, 257, 512, 600])
def test_a_sum_and_a_maximum_in_tiles_take_every_element_once(size):
    assert cpu.tiled_sum(mx.ones((2, size))).tolist() == [size, size]
    x = mx.array(RNG.integers(-9, 9, (2, 3, size)).astype(np.float32))
    assert mx.array_equal(cpu.tiled_sum(x), x.sum(-1))
    peaks = cpu.tiled_max(mx.where(mx.arange(size) == mx.arange(size)[:, None], 9.0, -mx.inf))
    assert mx.array_equal(peaks, mx.full((size, 1), 9.0))


@pytest.mark.parametrize("top_p", [1.0, 0.95, 0.5, 1e-6])
@pytest.mark.parametrize("top_k", [0, 1, 7, 99])
@pytest.mark.parametrize("min_p", [0.0, 0.1, 1.0])
def test_the_truncated_support_equals_that_of_a_slow_implementation(top_p, top_k, min_p):
    logits = RNG.normal(0, 2, (6, 40)).astype(np.float32)
    logits[1] = np.round(logits[1])  # ties
    logits[2] = 0.5
    ours = np.array(
        softmax.truncate_logits(mx.array(logits), TruncationSettings(top_p, top_k, min_p))
    )
    for row in range(6):
        kept = kept_by_hand(logits[row].astype(np.float64), top_p, top_k, min_p)
        assert (ours[row][kept] == logits[row][kept]).all() and np.isneginf(ours[row][~kept]).all()


def test_top_p_of_qwens_vocabulary_keeps_that_mass():
    rows = peaked_rows()[1:4]
    probs = np.exp(log_softmax(rows.astype(np.float64)))
    descending = -np.sort(-probs, axis=-1)
    for top_p in (0.5, 0.9):
        kept = np.isfinite(
            np.array(softmax.truncate_logits(mx.array(rows), TruncationSettings(top_p)))
        )
        expected = [line[np.searchsorted(line, top_p)] for line in np.cumsum(descending, axis=-1)]
        np.testing.assert_allclose((probs * kept).sum(-1), expected, atol=2e-4)
