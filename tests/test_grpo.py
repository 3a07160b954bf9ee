"""The objective against formulas written out in float64, its gradients against finite differences, and invariants."""

import mlx.core as mx
import numpy as np
import pytest

import grpo

RNG = np.random.default_rng(0)
NUM_ROWS, LENGTH = 6, 5
OLD = RNG.normal(-1.5, 0.5, (NUM_ROWS, LENGTH))
NEW = OLD + RNG.normal(0, 0.3, (NUM_ROWS, LENGTH))
REF = OLD + RNG.normal(0, 0.3, (NUM_ROWS, LENGTH))
ADVANTAGES = RNG.normal(0, 1, NUM_ROWS)
MASK = (np.arange(LENGTH) < np.array([5, 3, 1, 4, 2, 5])[:, None]).astype(float)


def loss_by_hand(new, *, loss, level, kl_coef, clip_low, clip_high, delta=None, old=OLD, ref=REF):
    """The formulas of the papers, row by row and token by token, in float64."""
    row_losses, lengths = [], []
    for i in range(NUM_ROWS):
        tokens = [t for t in range(LENGTH) if MASK[i, t]]
        log_ratios = [new[i, t] - old[i, t] for t in tokens]
        if level == "sequence":
            log_ratios = [np.mean(log_ratios)] * len(tokens)
        losses = []
        for t, log_ratio in zip(tokens, log_ratios, strict=True):
            r, a = np.exp(log_ratio), ADVANTAGES[i]
            first = (r if delta is None else min(r, delta)) * a
            second = min(max(r, 1 - clip_low), 1 + clip_high) * a
            d = ref[i, t] - new[i, t]
            losses.append(-min(first, second) + kl_coef * (np.exp(d) - d - 1))
        row_losses.append(sum(losses))
        lengths.append(len(tokens))
    if loss == "grpo":
        return np.mean([total / length for total, length in zip(row_losses, lengths, strict=True)])
    if loss == "dr_grpo":
        return sum(row_losses) / (NUM_ROWS * 7)
    return sum(row_losses) / sum(lengths)


def ours(new, *, loss, level, kl_coef, clip_low, clip_high, delta=None):
    value, _ = grpo.policy_loss(
        new,
        mx.array(OLD, mx.float32),
        mx.array(ADVANTAGES, mx.float32),
        mx.array(MASK, mx.float32),
        ref_logprobs=mx.array(REF, mx.float32) if kl_coef else None,
        loss=loss,
        level=level,
        clip_low=clip_low,
        clip_high=clip_high,
        delta=delta,
        kl_coef=kl_coef,
        max_tokens=7,
        num_items=int(MASK.sum()),
    )
    return value


@pytest.mark.parametrize("loss", grpo.LOSSES)
@pytest.mark.parametrize("level", grpo.LEVELS)
@pytest.mark.parametrize("kl_coef", [0.0, 0.3])
@pytest.mark.parametrize(("clip_low", "clip_high", "delta"), [(0.2, 0.2, None), (0.1, 0.28, None), (0.2, 0.2, 1.4)])
def test_loss_and_gradient_equal_the_formula(loss, level, kl_coef, clip_low, clip_high, delta):
    settings = dict(loss=loss, level=level, kl_coef=kl_coef, clip_low=clip_low, clip_high=clip_high, delta=delta)
    value, grad = mx.value_and_grad(lambda new: ours(new, **settings))(mx.array(NEW, mx.float32))
    assert value.item() == pytest.approx(loss_by_hand(NEW, **settings), abs=1e-5)
    step, expected = 1e-6, np.zeros_like(NEW)
    for index in np.ndindex(*NEW.shape):
        up, down = NEW.copy(), NEW.copy()
        up[index] += step
        down[index] -= step
        expected[index] = (loss_by_hand(up, **settings) - loss_by_hand(down, **settings)) / (2 * step)
    np.testing.assert_allclose(np.array(grad), expected, atol=1e-5)


def test_advantages_are_the_reward_less_the_mean_over_the_sample_deviation():
    rewards = RNG.normal(2, 3, (4, 8))
    expected = (rewards - rewards.mean(1, keepdims=True)) / (rewards.std(1, ddof=1, keepdims=True) + 1e-4)
    np.testing.assert_allclose(np.array(grpo.group_advantages(mx.array(rewards))), expected, atol=1e-5)
    batch = (rewards - rewards.mean(1, keepdims=True)) / (rewards.std(ddof=1) + 1e-4)
    np.testing.assert_allclose(np.array(grpo.group_advantages(mx.array(rewards), "batch")), batch, atol=1e-5)
    none = rewards - rewards.mean(1, keepdims=True)
    np.testing.assert_allclose(np.array(grpo.group_advantages(mx.array(rewards), "none")), none, atol=1e-5)


@pytest.mark.parametrize("scale", grpo.SCALES)
@pytest.mark.parametrize("reward", [0.1, 1 / 3, -0.7, 1e6, 123.456, 0.0])
def test_a_group_of_equal_rewards_has_exactly_zero_advantage(scale, reward):
    for size in (2, 3, 7, 8, 11):
        rewards = mx.concatenate([mx.full((1, size), reward), mx.random.normal((1, size), key=mx.random.key(1))])
        assert (grpo.group_advantages(rewards, scale)[0] == 0).all().item()


@pytest.mark.parametrize("loss", grpo.LOSSES)
@pytest.mark.parametrize("cuts", [[1, 2, 3, 4, 5], [3], [2, 5]])
def test_the_gradient_of_a_step_does_not_depend_on_its_micro_batches(loss, cuts):
    def gradient(parts):
        total = np.zeros_like(NEW)
        for rows in parts:

            def part(new, rows=rows):
                value, _ = grpo.policy_loss(
                    new,
                    mx.array(OLD[rows], mx.float32),
                    mx.array(ADVANTAGES[rows], mx.float32),
                    mx.array(MASK[rows], mx.float32),
                    loss=loss,
                    max_tokens=7,
                    num_items=int(MASK.sum()),
                )
                return value * grpo.micro_batch_weight(loss, len(rows), NUM_ROWS)

            total[rows] += np.array(mx.grad(part)(mx.array(NEW[rows], mx.float32)))
        return total

    order = RNG.permutation(NUM_ROWS)
    np.testing.assert_allclose(gradient(np.split(order, cuts)), gradient([np.arange(NUM_ROWS)]), atol=1e-6)


def test_a_masked_token_has_no_influence_and_no_gradient():
    settings = dict(loss="dapo", level="token", kl_coef=0.1, clip_low=0.2, clip_high=0.2)
    wild = np.where(MASK > 0, NEW, RNG.choice([-np.inf, 1e30, -1e30], NEW.shape))
    value, grad = mx.value_and_grad(lambda new: ours(new, **settings))(mx.array(wild, mx.float32))
    clean = mx.grad(lambda new: ours(new, **settings))(mx.array(NEW, mx.float32))
    assert value.item() == pytest.approx(loss_by_hand(NEW, **settings), abs=1e-5)
    assert (np.array(grad)[MASK == 0] == 0).all()
    np.testing.assert_array_equal(np.array(grad), np.array(clean))


def test_the_kl_term_has_no_gradient_where_policy_and_reference_agree():
    def kl_only(new):
        return grpo.kl_k3(new, mx.array(NEW, mx.float32)).sum()

    value, grad = mx.value_and_grad(kl_only)(mx.array(NEW, mx.float32))
    assert value.item() == 0
    assert (grad == 0).all().item()


def test_on_policy_the_gradient_is_the_plain_policy_gradient():
    """With ratio 1 the gradient is -A per token: a default that clips everything away would make it 0."""
    settings = dict(loss="dapo", level="token", kl_coef=0.0, clip_low=0.2, clip_high=0.2)
    grad = mx.grad(lambda new: ours(new, **settings))(mx.array(OLD, mx.float32))
    np.testing.assert_allclose(np.array(grad), -ADVANTAGES[:, None] * MASK / MASK.sum(), atol=1e-6)


def test_the_default_clip_range_is_a_fifth_either_way():
    """A ratio of 1.19 moves freely and one of 1.21 does not; 1e-4 from a misread name would stop both."""

    def gradient(ratio):
        old = mx.zeros((1, 1))
        loss = lambda new: grpo.policy_loss(new, old, mx.ones((1,)), mx.ones((1, 1)))[0]  # noqa: E731
        return mx.grad(loss)(mx.log(mx.array([[ratio]]))).item()

    assert gradient(1.19) == pytest.approx(-1.19, abs=1e-5)
    assert gradient(1.21) == 0
    assert gradient(0.5) == pytest.approx(-0.5, abs=1e-5)  # a positive advantage is never clipped from below


def test_old_logprobs_and_advantages_carry_no_gradient():
    def loss(old, advantages):
        return grpo.policy_loss(mx.array(NEW, mx.float32), old, advantages, mx.array(MASK, mx.float32))[0]

    grads = mx.grad(loss, argnums=(0, 1))(mx.array(OLD, mx.float32), mx.array(ADVANTAGES, mx.float32))
    assert all((grad == 0).all().item() for grad in grads)


def test_stats_are_token_means():
    new, old, mask = (mx.array(x, mx.float32) for x in (NEW, OLD, MASK))
    _, stats = grpo.policy_loss(
        new, old, mx.array(ADVANTAGES, mx.float32), mask, ref_logprobs=mx.array(REF, mx.float32), kl_coef=0.1
    )
    ratio = np.exp(NEW - OLD)
    positive = ADVANTAGES[:, None] > 0
    removed = np.where(positive, ratio > 1.2, ratio < 0.8)
    d = REF - NEW
    for got, expected in ((stats.ratio, ratio), (stats.clip_frac, removed), (stats.kl, np.exp(d) - d - 1)):
        assert got.item() == pytest.approx((expected * MASK).sum() / MASK.sum(), abs=1e-5)


def test_an_empty_mask_gives_zero():
    for loss in grpo.LOSSES:
        value, _ = grpo.policy_loss(
            mx.array(NEW, mx.float32),
            mx.array(OLD, mx.float32),
            mx.array(ADVANTAGES, mx.float32),
            mx.zeros((NUM_ROWS, LENGTH)),
            loss=loss,
            max_tokens=7,
        )
        assert value.item() == 0
