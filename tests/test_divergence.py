"""The divergence of two models against float64, and what of the vocabulary exists at once."""

import mlx.core as mx
import numpy as np
import pytest
from conftest import measure_peak

from layers import divergence, lm_head

RNG = np.random.default_rng(0)
BETAS = (0, 0.3, 0.5, 1)


def log_softmax(x):
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def kl(first, second):
    return (np.exp(first) * (first - second)).sum(-1)


def written_out(logits, teacher_logits, beta):
    """The divergence of every row, from its definition."""
    log_q, log_p = log_softmax(logits), log_softmax(teacher_logits)
    if beta in (0, 1):
        return kl(log_q, log_p) if beta else kl(log_p, log_q)
    log_m = np.log(beta * np.exp(log_p) + (1 - beta) * np.exp(log_q))
    return beta * kl(log_p, log_m) + (1 - beta) * kl(log_q, log_m)


def gradient_by_logits(logits, teacher_logits, beta):
    """The gradient of every row's divergence: its slope by each probability, then the softmax's Jacobian."""
    q, p = np.exp(log_softmax(logits)), np.exp(log_softmax(teacher_logits))
    m = beta * p + (1 - beta) * q
    slope = -p / q if beta == 0 else np.log(q / p) if beta == 1 else (1 - beta) * np.log(q / m)
    return q * (slope - (q * slope).sum(-1, keepdims=True))


def make_case(vocab=700, width=24, teacher_width=16, spread=1.0):
    """Hidden states of both, (2, 5, .), heads, ids and what reaches each divergence from above, float64."""

    def random(*shape):
        return np.float64(np.float32(RNG.normal(size=shape)))

    head, teacher_head = (
        spread * random(vocab, width) / width**0.5,
        spread * random(vocab, teacher_width) / 4,
    )
    ids = RNG.integers(0, vocab, (2, 5))
    rounded = (np.float64(np.float32(one)) for one in (head, teacher_head))
    return random(2, 5, width), random(2, 5, teacher_width), *rounded, ids, random(2, 5)


def ours(case, **how):
    """Results, and gradients by the student's hidden states and head."""
    hidden, taught, head, teacher_head, ids, d_out = case
    lesson = divergence.TeacherStatesAndHead(
        mx.array(taught, mx.float32), mx.array(teacher_head, mx.float32)
    )
    d_out = mx.array(d_out, mx.float32)

    def total(hidden, weight):
        found = divergence.token_divergences(hidden, weight, mx.array(ids), lesson, **how)
        return (found[0] * d_out).sum(), found

    inputs = mx.array(hidden, mx.float32), mx.array(head, mx.float32)
    (_, found), gradients = mx.value_and_grad(total, argnums=(0, 1))(*inputs)
    return found, gradients


def error(ours, exact):
    """Of the whole array, relative."""
    return np.linalg.norm(np.array(ours, np.float64) - exact) / np.linalg.norm(exact)


@pytest.fixture
def in_small_parts(monkeypatch):
    monkeypatch.setattr(lm_head, "LOGPROB_CHUNK", 4)
    monkeypatch.setattr(divergence, "TILE", 4 * 96)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("beta", BETAS)
def test_value_and_gradient_are_those_of_the_definition_in_float64(
    in_small_parts, beta, temperature
):
    hidden, taught, head, teacher_head, ids, d_out = case = make_case()
    found, (d_hidden, d_head) = ours(case, beta=beta, temperature=temperature, head="trained")
    logits, teacher_logits = hidden @ head.T / temperature, taught @ teacher_head.T / temperature
    assert error(found[0], written_out(logits, teacher_logits, beta)) < 1e-5
    d_logits = d_out[..., None] * gradient_by_logits(logits, teacher_logits, beta) / temperature
    assert error(d_hidden, d_logits @ head) < 1e-5
    assert error(d_head, np.einsum("ntv,ntc->vc", d_logits, hidden)) < 1e-5
    log_q = log_softmax(logits)
    assert error(found[1], np.take_along_axis(log_q, ids[..., None], -1)[..., 0]) < 1e-5
    assert error(found[2], -(np.exp(log_q) * log_q).sum(-1)) < 1e-5


@pytest.mark.parametrize("beta", BETAS)
def test_near_agreement_is_not_lost_to_rounding(beta):
    """The plain expression is wrong by its own size here."""
    hidden, _, head, _, ids, d_out = make_case(spread=3.0)
    taught = np.float64(np.float32(hidden + 1e-3 * RNG.normal(size=hidden.shape)))
    found, _ = ours((hidden, taught, head, head, ids, d_out), beta=beta)
    exact = written_out(hidden @ head.T, taught @ head.T, beta)
    assert exact.min() > 0 and exact.max() < 1e-4
    assert error(found[0], exact) < 1e-2


@pytest.mark.parametrize("beta", BETAS)
def test_what_one_model_finds_impossible_stays_finite(beta):
    head, ids = 200.0 * np.eye(4), np.zeros((1, 2), int)
    hidden, taught = np.eye(4)[None, :2], np.eye(4)[None, 2:]
    found, (d_hidden, _) = ours((hidden, taught, head, head, ids, np.ones((1, 2))), beta=beta)
    exact = {0: 200.0, 0.3: 0.3 * -np.log(0.3) + 0.7 * -np.log(0.7), 0.5: np.log(2), 1: 200.0}[beta]
    np.testing.assert_allclose(np.array(found[0]), exact, rtol=1e-5)
    assert mx.isfinite(d_hidden).all().item()


@pytest.mark.slow
def test_it_takes_hardly_more_memory_than_log_probabilities():
    """Peaks with their inputs, though a teacher brings a second head and second hidden states."""
    num, vocab, width = 512, 20_000, 16
    keys, ids = mx.random.split(mx.random.key(0), 4), mx.zeros((1, num), mx.int32)
    peaks = []
    for taught in (False, True):
        hidden, second = (mx.random.normal((1, num, width), key=key) for key in keys[:2])
        head, second_head = (mx.random.normal((vocab, width), key=key) for key in keys[2:])
        lesson = divergence.TeacherStatesAndHead(second, second_head)

        def loss(x, head=head, lesson=lesson, taught=taught):
            if taught:
                return divergence.token_divergences(x, head, ids, lesson, beta=0.5)[0].sum()
            return lm_head.token_logprobs(x, head, ids)[0].sum()

        mx.eval(hidden, head, *(lesson if taught else ()))
        inputs = sum(array.nbytes for array in (hidden, head, *(lesson if taught else ())))
        peaks.append(
            inputs + measure_peak(lambda loss=loss, hidden=hidden: mx.value_and_grad(loss)(hidden))
        )
    assert peaks[1] < 1.2 * peaks[0], peaks
    assert peaks[1] < 4 * num * vocab, "one model's logits"
