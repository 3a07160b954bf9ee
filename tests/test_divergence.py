"""The divergence of two models against float64, and the memory that it takes."""

from typing import NamedTuple

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


def exact_divergence(logits, teacher_logits, beta):
    """The divergence of each position, from the definition."""
    log_q = log_softmax(logits)
    log_p = log_softmax(teacher_logits)
    if beta in (0, 1):
        return kl(log_q, log_p) if beta else kl(log_p, log_q)
    log_m = np.log(beta * np.exp(log_p) + (1 - beta) * np.exp(log_q))
    return beta * kl(log_p, log_m) + (1 - beta) * kl(log_q, log_m)


def gradient_by_logits(logits, teacher_logits, beta):
    """
    The gradient of each position's divergence by the student's logits.

    It is the slope by each probability times the Jacobian of the softmax.
    """
    q = np.exp(log_softmax(logits))
    p = np.exp(log_softmax(teacher_logits))
    if beta == 0:
        slope = -p / q
    elif beta == 1:
        slope = np.log(q / p)
    else:
        slope = (1 - beta) * np.log(q / (beta * p + (1 - beta) * q))
    return q * (slope - (q * slope).sum(-1, keepdims=True))


class Case(NamedTuple):
    """
    A student and a teacher; float64 values that float32 holds exactly.

    hidden (2, 5, C), teacher_hidden (2, 5, C'), head (V, C), teacher_head (V, C'), ids (2, 5),
    d_out (2, 5) the gradient by each divergence.
    """

    hidden: np.ndarray
    teacher_hidden: np.ndarray
    head: np.ndarray
    teacher_head: np.ndarray
    ids: np.ndarray
    d_out: np.ndarray


def round_to_float32(array):
    return np.float64(np.float32(array))


def make_case(vocab=700, width=24, teacher_width=16, spread=1.0):
    def random(*shape, scale=1.0):
        return round_to_float32(scale * round_to_float32(RNG.normal(size=shape)))

    return Case(
        head=random(vocab, width, scale=spread / width**0.5),
        teacher_head=random(vocab, teacher_width, scale=spread / 4),
        ids=RNG.integers(0, vocab, (2, 5)),
        hidden=random(2, 5, width),
        teacher_hidden=random(2, 5, teacher_width),
        d_out=random(2, 5),
    )


def divergences_and_gradients(case, **options):
    """What `token_divergences` returns, and the gradients by the student's states and head."""
    teacher = divergence.TeacherStatesAndHead(
        mx.array(case.teacher_hidden, mx.float32), mx.array(case.teacher_head, mx.float32)
    )
    ids = mx.array(case.ids)
    d_out = mx.array(case.d_out, mx.float32)

    def weighted_sum(hidden, head):
        results = divergence.token_divergences(hidden, head, ids, teacher, **options)
        return (results[0] * d_out).sum(), results

    hidden = mx.array(case.hidden, mx.float32)
    head = mx.array(case.head, mx.float32)
    (_, results), gradients = mx.value_and_grad(weighted_sum, argnums=(0, 1))(hidden, head)
    return results, gradients


def relative_error(array, exact):
    """The relative error of the whole array."""
    return np.linalg.norm(np.array(array, np.float64) - exact) / np.linalg.norm(exact)


@pytest.fixture
def small_chunks(monkeypatch):
    monkeypatch.setattr(lm_head, "LOGPROB_CHUNK", 4)
    monkeypatch.setattr(divergence, "TILE", 4 * 96)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("beta", BETAS)
def test_divergences_and_gradients_equal_those_of_the_definition_in_float64(
    small_chunks, beta, temperature
):
    case = make_case()
    logits = case.hidden @ case.head.T / temperature
    teacher_logits = case.teacher_hidden @ case.teacher_head.T / temperature

    (divergences, logprobs, entropies), (d_hidden, d_head) = divergences_and_gradients(
        case, beta=beta, temperature=temperature, head="trained"
    )

    assert relative_error(divergences, exact_divergence(logits, teacher_logits, beta)) < 1e-5

    slopes = gradient_by_logits(logits, teacher_logits, beta)
    d_logits = case.d_out[..., None] * slopes / temperature
    assert relative_error(d_hidden, d_logits @ case.head) < 1e-5
    assert relative_error(d_head, np.einsum("ntv,ntc->vc", d_logits, case.hidden)) < 1e-5

    log_q = log_softmax(logits)
    expected_logprobs = np.take_along_axis(log_q, case.ids[..., None], -1)[..., 0]
    assert relative_error(logprobs, expected_logprobs) < 1e-5
    assert relative_error(entropies, -(np.exp(log_q) * log_q).sum(-1)) < 1e-5


@pytest.mark.parametrize("beta", BETAS)
def test_rounding_does_not_hide_small_divergences(beta):
    """The rounding errors of the plain expression are as large as the divergence here."""
    case = make_case(spread=3.0)
    noise = 1e-3 * RNG.normal(size=case.hidden.shape)
    teacher_hidden = round_to_float32(case.hidden + noise)
    case = case._replace(teacher_hidden=teacher_hidden, teacher_head=case.head)
    (divergences, *_), _ = divergences_and_gradients(case, beta=beta)
    exact = exact_divergence(case.hidden @ case.head.T, teacher_hidden @ case.head.T, beta)
    assert exact.min() > 0
    assert exact.max() < 1e-4
    assert relative_error(divergences, exact) < 1e-2


@pytest.mark.parametrize(
    ("beta", "exact"),
    [(0, 200.0), (0.3, 0.3 * -np.log(0.3) + 0.7 * -np.log(0.7)), (0.5, np.log(2)), (1, 200.0)],
    ids=BETAS,
)
def test_divergences_stay_finite_if_a_model_gives_a_token_the_probability_0(beta, exact):
    head = 200.0 * np.eye(4)
    case = Case(
        hidden=np.eye(4)[None, :2],
        teacher_hidden=np.eye(4)[None, 2:],
        head=head,
        teacher_head=head,
        ids=np.zeros((1, 2), int),
        d_out=np.ones((1, 2)),
    )
    (divergences, *_), (d_hidden, _) = divergences_and_gradients(case, beta=beta)
    np.testing.assert_allclose(np.array(divergences), exact, rtol=1e-5)
    assert mx.isfinite(d_hidden).all().item()


@pytest.mark.slow
def test_divergences_take_at_most_a_fifth_more_memory_than_log_probabilities():
    """The peaks include the inputs; a teacher adds a second head and second hidden states."""
    num_tokens = 512
    vocab = 20_000
    width = 16
    keys = mx.random.split(mx.random.key(0), 4)
    hidden, teacher_hidden = (mx.random.normal((1, num_tokens, width), key=key) for key in keys[:2])
    head, teacher_head = (mx.random.normal((vocab, width), key=key) for key in keys[2:])
    ids = mx.zeros((1, num_tokens), mx.int32)
    teacher = divergence.TeacherStatesAndHead(teacher_hidden, teacher_head)

    def logprob_sum(hidden):
        return lm_head.token_logprobs(hidden, head, ids)[0].sum()

    def divergence_sum(hidden):
        return divergence.token_divergences(hidden, head, ids, teacher, beta=0.5)[0].sum()

    def peak_with_inputs(function, *inputs):
        mx.eval(inputs)
        peak = measure_peak(lambda: mx.value_and_grad(function)(hidden))
        return peak + sum(array.nbytes for array in inputs)

    logprob_peak = peak_with_inputs(logprob_sum, hidden, head)
    divergence_peak = peak_with_inputs(divergence_sum, hidden, head, *teacher)
    assert divergence_peak < 1.2 * logprob_peak, (logprob_peak, divergence_peak)
    assert divergence_peak < 4 * num_tokens * vocab, "the logits of one model"
