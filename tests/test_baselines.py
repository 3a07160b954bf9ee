"""Every baseline in grpo.BASELINES gives an unbiased gradient and is a value of --advantage."""

import itertools
import typing

import numpy as np
import pytest

import grpo
from config import ObjectiveSettings
from settings.checks import check_settings

SHAPE = (2, 3)  # groups and completions per group in the enumerated steps
LOW, HIGH = 2.0, 5.0  # the rewards of a wrong and of a right answer
PROBABILITIES = (0.1, 0.5, 0.8)


def relative_expected_gradient(baseline: str, probability: float) -> float:
    """
    The expected policy gradient with this baseline, divided by the gradient of the mean reward.

    The policy answers right with the probability p. All steps of 2 * 3 answers are enumerated.
    """
    expected = 0.0
    for is_right in itertools.product((False, True), repeat=SHAPE[0] * SHAPE[1]):
        right = np.array(is_right).reshape(SHAPE)
        likelihood = np.where(right, probability, 1 - probability).prod()
        slopes = np.where(right, 1 / probability, -1 / (1 - probability))  # of log p
        advantages = grpo.group_advantages(np.where(right, HIGH, LOW), "none", baseline)
        expected += likelihood * (advantages * slopes).sum()
    return expected / (right.size * (HIGH - LOW))


def is_unbiased(baseline: str) -> bool:
    """Whether the expected gradient is the same positive multiple of the true one at each p."""
    factors = [relative_expected_gradient(baseline, p) for p in PROBABILITIES]
    return min(factors) > 0 and np.ptp(factors) < 1e-5 * max(factors)


@pytest.mark.parametrize("baseline", grpo.BASELINES)
def test_a_baseline_leaves_the_gradient_unbiased_apart_from_a_factor(baseline):
    assert is_unbiased(baseline)
    assert 0.5 < relative_expected_gradient(baseline, 0.5) < 1 + 1e-5


def test_only_the_mean_of_the_others_leaves_the_gradient_unbiased_without_a_factor():
    factors = {name: relative_expected_gradient(name, 0.3) for name in grpo.BASELINES}
    expected = {"group": 2 / 3, "rloo": 1.0, "reinforce": 5 / 6}
    assert factors.keys() == expected.keys(), "add the factor of the new baseline here"
    assert factors == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    "subtract",
    [
        lambda offsets, _: offsets - offsets.max(axis=1, keepdims=True),
        lambda offsets, _: offsets - np.median(offsets, axis=1, keepdims=True),
        lambda offsets, _: offsets.mean(axis=1, keepdims=True) - offsets,
    ],
    ids=["maximum", "median", "wrong sign"],
)
def test_a_wrong_baseline_is_recognized_as_biased(monkeypatch, subtract):
    monkeypatch.setitem(grpo.BASELINES, "wrong", grpo.Baseline(False, subtract))
    assert not is_unbiased("wrong")


@pytest.mark.parametrize("baseline", grpo.BASELINES)
def test_advantages_ignore_an_offset_of_all_rewards_and_follow_the_order_of_the_group(
    baseline,
):
    rng = np.random.default_rng(0)
    rewards = rng.normal(size=(4, 5))
    advantages = grpo.group_advantages(rewards, "none", baseline)
    shifted = grpo.group_advantages(rewards + 1e9, "none", baseline)
    np.testing.assert_allclose(shifted, advantages, atol=1e-5)
    order = rng.permutation(5)
    reordered = grpo.group_advantages(rewards[:, order], "none", baseline)
    np.testing.assert_allclose(reordered, advantages[:, order], atol=1e-6)


@pytest.mark.parametrize("baseline", grpo.BASELINES)
def test_missing_completions_have_zero_advantage_and_change_no_other_advantage(baseline):
    rewards = np.random.default_rng(1).normal(size=(3, 4))
    padded = np.concatenate([rewards, np.full((3, 2), np.nan)], axis=1)
    advantages = grpo.group_advantages(padded, "none", baseline)
    expected = grpo.group_advantages(rewards, "none", baseline)
    np.testing.assert_allclose(advantages[:, :4], expected, atol=1e-6)
    assert (advantages[:, 4:] == 0).all()


def test_the_values_of_the_flag_advantage_are_the_baselines():
    hints = typing.get_type_hints(ObjectiveSettings)
    assert typing.get_args(hints["advantage"]) == tuple(grpo.BASELINES)


@pytest.mark.parametrize("baseline", grpo.BASELINES)
def test_a_baseline_of_the_step_is_refused_with_a_divisor_per_group(baseline):
    settings = {"advantage": baseline, "scale_rewards": "mean"}
    if not grpo.compares_whole_step(baseline):
        check_settings(settings)
        return
    with pytest.raises(ValueError, match=f"--advantage {baseline} compares .* whole step"):
        check_settings(settings)
