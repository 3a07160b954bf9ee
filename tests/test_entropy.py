"""The gradient of the entropy bonus equals finite differences in float64, and the flag raises the entropy."""

import mlx.core as mx
import mlx.optimizers as optim
import numpy as np
import pytest
from conftest import draw_normal
from small_run import make_run, sample_first_prompts, update_once
from test_softmax import SUPPORTS, support_by_hand

import grpo
import update
from layers import lm_head
from layers.entropy import attach_entropy_gradient
from step.advantages import mark_for_update
from step.batch import make_batches

RNG = np.random.default_rng(0)


def entropies_by_hand(hidden, head, is_kept, temperature):
    """(M, C) x (V, C) in float64 -> the entropies of the softmax over the kept tokens, (M,)."""
    logits = np.where(is_kept, hidden @ head.T / temperature, -np.inf)
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    probs = weights / weights.sum(-1, keepdims=True)
    return -(probs * np.log(np.where(is_kept, probs, 1.0))).sum(-1)


def difference_quotients(function, point, step=1e-5):
    """The gradient of a function at a point by central differences, in float64."""
    slopes = np.zeros_like(point)
    for index in np.ndindex(point.shape):
        point_above = point.copy()
        point_above[index] += step
        point_below = point.copy()
        point_below[index] -= step
        slopes[index] = (function(point_above) - function(point_below)) / (2 * step)
    return slopes


@pytest.mark.parametrize("head", ["frozen", "trained"])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("support", SUPPORTS, ids=str)
@pytest.mark.parametrize("chunk", [3, 1000])
def test_the_gradient_of_entropies_equals_finite_differences_in_float64(
    monkeypatch, head, temperature, support, chunk
):
    vocab = 120
    monkeypatch.setattr(lm_head, "LOGPROB_CHUNK", chunk)
    monkeypatch.setattr(lm_head, "LOGPROB_TILE", 3 * 50)  # tiles of 50, 50 and 20 ids
    hidden = draw_normal(2, 3, 4)
    weight = draw_normal(vocab, 4)
    factors = draw_normal(2, 3)
    ids = mx.array(RNG.integers(0, vocab, (2, 3)).astype(np.int32))
    options = {"temperature": temperature, "head": head, "support": support}

    def total(hidden, weight):
        entropies = lm_head.token_logprobs(hidden, weight, ids, **options)[1]
        entropies = attach_entropy_gradient(entropies, hidden, weight, ids, **options)
        return (factors * entropies).sum()

    value, (d_hidden, d_weight) = mx.value_and_grad(total, argnums=(0, 1))(hidden, weight)

    exact_hidden = np.array(hidden).reshape(6, 4).astype(np.float64)
    exact_weight = np.array(weight).astype(np.float64)
    exact_factors = np.array(factors).reshape(6).astype(np.float64)
    is_kept = np.ones((6, vocab), bool)
    if support:
        logits = exact_hidden @ exact_weight.T / temperature
        is_kept = np.stack([support_by_hand(row, *support) for row in logits])
        is_kept[np.arange(6), np.array(ids).reshape(6)] = True

    def total_by_hand(hidden, weight):
        return exact_factors @ entropies_by_hand(hidden, weight, is_kept, temperature)

    assert value.item() == pytest.approx(total_by_hand(exact_hidden, exact_weight), abs=2e-5)
    slopes = difference_quotients(lambda x: total_by_hand(x, exact_weight), exact_hidden)
    np.testing.assert_allclose(np.array(d_hidden).reshape(6, 4), slopes, atol=1e-5)
    if head == "frozen":
        assert mx.abs(d_weight).max().item() == 0
    else:
        slopes = difference_quotients(lambda x: total_by_hand(exact_hidden, x), exact_weight)
        np.testing.assert_allclose(np.array(d_weight), slopes, atol=1e-5)


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_the_gradient_of_entropies_of_16_bit_weights_is_exact_and_keeps_its_dtype(dtype):
    hidden = draw_normal(1, 4, 64).astype(dtype)
    weight = draw_normal(700, 64).astype(dtype)
    ids = mx.array([[1, 2, 3, 699]])

    def total(hidden, weight):
        entropies = lm_head.token_logprobs(hidden, weight, ids, head="trained")[1]
        return attach_entropy_gradient(entropies, hidden, weight, ids, head="trained").sum()

    gradients = mx.grad(total, argnums=(0, 1))(hidden, weight)
    exact = mx.grad(total, argnums=(0, 1))(hidden.astype(mx.float32), weight.astype(mx.float32))
    for rounded, reference in zip(gradients, exact, strict=True):
        assert rounded.dtype == dtype
        np.testing.assert_allclose(
            np.array(rounded.astype(mx.float32)), np.array(reference), rtol=1e-2, atol=1e-4
        )


@pytest.mark.parametrize("loss", ["grpo", "dr_grpo", "dapo", "cispo", "sapo"])
def test_the_entropy_bonus_is_averaged_like_the_loss_and_ignores_padding(loss):
    mask = np.array([[1.0, 1, 1], [1, 0, 0]])
    entropies = np.array([[0.5, 1.0, 2.0], [3.0, np.nan, np.inf]])
    logprobs = mx.array(np.log(np.full((2, 3), 0.3)), mx.float32)
    advantages = mx.array([1.0, -1.0])
    mean_over_rows = (3.5 / 3 + 3) / 2
    mean_over_tokens = 6.5 / 4
    means = {"grpo": mean_over_rows, "sapo": mean_over_rows, "dr_grpo": 6.5 / (2 * 5)}

    def loss_value(coefficient, entropies):
        tokens = grpo.Tokens(
            logprobs, logprobs, advantages, mx.array(mask, mx.float32), entropies=entropies
        )
        objective = grpo.Objective(loss, epsilon_high=2.0, max_tokens=5, entropy_coef=coefficient)
        return grpo.LOSSES[loss](tokens, objective).value

    entropies = mx.array(entropies, mx.float32)
    bonus = loss_value(0.0, entropies) - loss_value(0.1, entropies)
    assert bonus.item() == pytest.approx(0.1 * means.get(loss, mean_over_tokens), rel=1e-5)
    slopes = mx.grad(lambda entropies: loss_value(0.1, entropies))(entropies)
    assert (slopes < 0).tolist() == (mask > 0).tolist()


@pytest.mark.slow
@pytest.mark.parametrize("flags", [(), ("--lora-rank", "0"), ("--top-k", "20")], ids=str)
def test_an_update_by_the_entropy_bonus_alone_raises_the_entropy_as_predicted(tmp_path, flags):
    """Rows without an advantage take part. A step of size lr along a gradient g gains lr |g|^2."""
    run = make_run(tmp_path, "--entropy-coef", "1", "--target-kl", "0", *flags)
    update_once(run)  # B of the adapters is 0 before
    samples = sample_first_prompts(run, np.zeros(12))
    marked = mark_for_update(run.config, samples, 0, run.learner.loss.all_have_gradient)
    batches = make_batches(marked, 1024)

    def measure_mean_entropy():
        stats = update.compute_logprobs_and_stats(run.learner, batches).stats
        num_tokens = sum(batch.mask.sum().item() for batch in batches)
        return stats["entropy"] / num_tokens

    entropy_before = measure_mean_entropy()
    run.learner.optimizer = optim.SGD(0.0)  # the update sets the learning rate
    result = update.run_optimizer_steps(run.learner, batches, 1e-3)
    assert result.num_with_gradient == 12
    assert result.loss == pytest.approx(-entropy_before, rel=1e-4)

    clipped_norm = min(result.grad_norm, run.config.optimizer.max_grad_norm)
    predicted_gain = 1e-3 * clipped_norm * result.grad_norm
    assert measure_mean_entropy() - entropy_before == pytest.approx(predicted_gain, rel=0.1)


def test_the_gradient_of_a_loss_without_entropies_needs_no_pass_over_the_head(monkeypatch):
    """The forward pass returns its input entropies. Only the gradient of the entropies reads the head."""
    hidden = draw_normal(1, 2, 4)
    weight = draw_normal(9, 4)
    ids = mx.array([[1, 2]])
    monkeypatch.setattr(lm_head, "compute_logits", None)  # calling it would raise TypeError
    entropies = mx.array([[1.0, 2.0]])
    attached = attach_entropy_gradient(entropies, hidden, weight, ids)
    assert attached.tolist() == [[1.0, 2.0]]

    def sum_with_entropy_weights(hidden):
        weights = mx.stop_gradient(attach_entropy_gradient(entropies, hidden, weight, ids))
        return (weights * hidden.sum(-1)).sum()

    assert mx.grad(sum_with_entropy_weights)(hidden)[0, :, 0].tolist() == [1.0, 2.0]
    with pytest.raises(TypeError):
        mx.grad(lambda x: attach_entropy_gradient(entropies, x, weight, ids).sum())(hidden)
