"""The objective against the oracle (papers, in float64), finite differences, pencil and frozen cases, invariants."""

import itertools
import math

import mlx.core as mx
import numpy as np
import oracle
import pytest

import grpo

CASE = oracle.make_case([5, 3, 1, 4, 2, 5], 5)
WIDE = oracle.make_case(
    [4, 2, 3], 4, seed=1, spread=1.0
)  # ratios from 0.1 to 6: every clip and cap is at work
NEW, OLD, REF, ADVANTAGES, MASK = CASE.new, CASE.old, CASE.ref, CASE.advantages, CASE.mask
NUM_ROWS = len(MASK)
RNG = np.random.default_rng(0)


def array(x):
    return mx.array(x, mx.float32)


def loss_of(new, old, advantages, mask, *, ref=None, **settings):
    """The loss of one micro-batch that is the whole step."""
    objective = grpo.Objective(**{"max_tokens": 8} | settings)
    return grpo.LOSSES[objective.loss_type](grpo.Tokens(new, old, advantages, mask, ref), objective)


def tokens_of(case, new, rows=None, with_ref=True):
    """The case as the tokens of a loss, or some of its rows as a micro-batch."""
    rows = np.arange(len(case.mask)) if rows is None else np.array(rows)
    old, mask = array(case.old[rows]), array(case.mask[rows])
    ref = array(case.ref[rows]) if with_ref else None
    counts = {"num_items": int(case.mask.sum()), "num_rows": len(case.mask)}
    return grpo.Tokens(new, old, array(case.advantages[rows]), mask, ref_logprobs=ref, **counts)


def ours(case, new, *, rows=None, **settings):
    """Our loss of the case, or the share of some of its rows."""
    objective = grpo.Objective(max_tokens=case.max_tokens, **settings)
    tokens = tokens_of(case, new, rows, with_ref=bool(objective.beta))
    return grpo.LOSSES[objective.loss_type](tokens, objective).value


LOSSES = [
    name for name in grpo.LOSSES if name not in ("distill", "sft")
]  # those of a policy with advantages
GROUP_BASELINES = [name for name, row in grpo.BASELINES.items() if not row.compares_step]
STEP_BASELINES = [name for name, row in grpo.BASELINES.items() if row.compares_step]
LEVELS, SCALES = ("token", "sequence"), ("group", "batch", "mean", "none")
KLS = [{}, {"beta": 0.3}]
CLIPS = [{}, {"epsilon": 0.1, "epsilon_high": 0.28}, {"epsilon": 0.05, "epsilon_high": 0.05}]
BOUNDS = {
    "cispo": [{"epsilon_high": 5.0}, {"epsilon_high": 1.1}],
    "sapo": [{}],
}  # on the ratio; the others: CLIPS


@pytest.mark.slow
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("case", [CASE, WIDE], ids=["near", "wide"])
def test_loss_and_gradient_equal_the_oracle(loss, level, case):
    """Every bound on the ratio, with and without the KL term, in one micro-batch and in three."""
    for bounds, kl in itertools.product(BOUNDS.get(loss, CLIPS), KLS):
        settings = {"loss_type": loss, "importance_sampling_level": level} | bounds | kl
        expected, slopes = oracle.loss(case, **settings), oracle.gradient(case, **settings)
        for num_parts in (1, 3):
            value, found = 0.0, np.zeros_like(slopes)
            for rows in np.array_split(RNG.permutation(len(case.mask)), num_parts):
                share = mx.value_and_grad(
                    lambda new, s=settings, rows=rows: ours(case, new, rows=rows, **s)
                )
                its, grad = share(array(case.new[rows]))
                value, found[rows] = value + its.item(), np.array(grad)
            assert value == pytest.approx(expected, abs=1e-6), settings
            np.testing.assert_allclose(found, slopes, atol=1e-6, err_msg=str(settings))


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize(
    "bounds",
    [{"epsilon": 0.0}, {"epsilon_high": 0.0}, {"epsilon": 0.0, "epsilon_high": 0.0}],
    ids=str,
)
def test_on_policy_a_token_has_its_gradient_even_at_a_border_of_the_range(bounds, advantage):
    """With `mx.minimum` and `mx.clip` it would have none, in PyTorch half; where the loss is smooth it is all of it."""

    def loss(new):
        return loss_of(new, mx.zeros((1, 1)), array([advantage]), mx.ones((1, 1)), **bounds).value

    assert mx.grad(loss)(mx.zeros((1, 1))).item() == -advantage


# What TRL 1.16 gives for one step of three rows, in float64 (`test_trl.py` compares with TRL itself): the loss, and its
# gradient with respect to the log-probabilities of the second row.
FROZEN_CASE = oracle.Case(
    new=np.array([[-1.2, -0.4, -2.5], [-0.7, -1.9, -0.1], [-3.0, -0.8, -1.1]]),
    old=np.array([[-1.0, -0.9, -2.4], [-1.3, -1.6, -0.2], [-2.2, -0.8, -1.4]]),
    ref=np.array([[-1.1, -0.6, -2.9], [-0.9, -1.5, -0.3], [-2.6, -1.0, -1.0]]),
    advantages=np.array([1.1, -0.6, -0.5]),
    mask=np.array([[1.0, 1, 1], [1, 1, 0], [1, 1, 1]]),
    max_tokens=6,
)
FROZEN = [
    ({"loss_type": "grpo"}, 0.0798790373, [0.18221188, 0.0, 0.0]),
    ({"loss_type": "dapo"}, -0.0084655380, [0.13665891, 0.0, 0.0]),
    (
        {"loss_type": "dapo", "epsilon": 0.1, "epsilon_high": 0.28},
        -0.0057155380,
        [0.13665891, 0.0, 0.0],
    ),
    ({"loss_type": "dapo", "beta": 0.3}, 0.0035533446, [0.1434565068, -0.0184434261, 0.0]),
    (
        {"loss_type": "dr_grpo", "importance_sampling_level": "sequence"},
        -0.0479764095,
        [0.0387278081, 0.0387278081, 0.0],
    ),
    (
        {
            "loss_type": "grpo",
            "importance_sampling_level": "sequence",
            "epsilon": 0.0003,
            "epsilon_high": 0.0004,
        },
        0.0321701819,
        [0.1161834243, 0.1161834243, 0.0],
    ),
    (
        {"loss_type": "sapo", "importance_sampling_level": "sequence", "beta": 0.1},
        -0.0492548516,
        [0.118369904, 0.1071516716, 0.0],
    ),
]


@pytest.mark.parametrize(("settings", "expected", "gradient"), FROZEN)
def test_frozen_cases(settings, expected, gradient):
    value, grad = mx.value_and_grad(lambda new: ours(FROZEN_CASE, new, **settings))(
        array(FROZEN_CASE.new)
    )
    assert value.item() == pytest.approx(expected, abs=1e-5)
    np.testing.assert_allclose(np.array(grad)[1], gradient, atol=1e-5)
    assert oracle.loss(FROZEN_CASE, **settings) == pytest.approx(expected, abs=1e-7)
    np.testing.assert_allclose(oracle.gradient(FROZEN_CASE, **settings)[1], gradient, atol=1e-7)


@pytest.mark.parametrize("sizes", [[8] * 4, [2, 5, 3]])
@pytest.mark.parametrize(
    ("baseline", "scale"),
    [
        *itertools.product(GROUP_BASELINES, SCALES),
        *itertools.product(STEP_BASELINES, ("batch", "none")),
    ],
)
def test_advantages_equal_the_oracle_and_what_is_missing_of_a_group_has_none(
    baseline, scale, sizes
):
    groups = [RNG.normal(2, 3, size) for size in sizes]
    padded = np.array([[*its, *[np.nan] * (max(sizes) - len(its))] for its in groups])
    ours = grpo.group_advantages(padded, scale, baseline)
    assert ours.dtype == np.float32
    for row, expected in zip(ours, oracle.advantages(groups, scale, baseline), strict=True):
        np.testing.assert_allclose(row[: len(expected)], expected, atol=1e-5)
        assert (row[len(expected) :] == 0).all()


def test_rewards_normalized_one_by_one_equal_the_oracle():
    rewards = np.stack([RNG.integers(0, 2, (4, 8)).astype(float), RNG.normal(0, 30, (4, 8))])
    ours = grpo.gdpo_decoupled_advantages(rewards, [1.0, 0.5])
    np.testing.assert_allclose(ours, oracle.decoupled(rewards, [1.0, 0.5]), atol=1e-5)


@pytest.mark.parametrize("reward", [0.1, 1 / 3, -0.7, 123.456])
def test_a_group_that_is_equal_in_every_reward_has_exactly_zero_advantage(reward):
    rewards = np.concatenate([np.full((2, 1, 7), reward), RNG.normal(0, 1, (2, 3, 7))], axis=1)
    assert (grpo.gdpo_decoupled_advantages(rewards, [1.0, 0.3])[0] == 0).all()


@pytest.mark.parametrize("baseline", GROUP_BASELINES)
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("reward", [0.1, 1 / 3, -0.7, 1e6, 123.456, 0.0])
def test_a_group_of_equal_rewards_has_exactly_zero_advantage(baseline, scale, reward):
    for size in (2, 3, 7, 8, 11):
        rewards = np.stack([np.full(size, reward), RNG.normal(0, 1, size)])
        assert (grpo.group_advantages(rewards, scale, baseline)[0] == 0).all()


FLOORED = np.array(
    [[0.0, 1.0, 0.0, 1.0], [3.0, 3.0002, 3.0, 3.0], [2.0, 2.0, 4.0, 2.0], [1.0, 1.02, 1.0, 1.0]]
)
# The 16 rewards have the deviation 1.1824: at a floor of 1% a group within 0.0118 is noise, here the second.


@pytest.mark.parametrize("baseline", GROUP_BASELINES)
@pytest.mark.parametrize("scale", SCALES)
def test_a_group_whose_rewards_lie_within_the_floor_has_zero_advantage_and_no_other_changes(
    baseline, scale
):
    plain, floored = (
        grpo.group_advantages(FLOORED, scale, baseline, floor) for floor in (0.0, 0.01)
    )
    assert (np.abs(plain[1]) > 0).all() and (floored[1] == 0).all()
    np.testing.assert_array_equal(floored[[0, 2, 3]], plain[[0, 2, 3]])
    wider = grpo.group_advantages(FLOORED, scale, baseline, 0.02)  # within 0.0236: the fourth too
    assert (wider[[1, 3]] == 0).all() and (wider[[0, 2]] == plain[[0, 2]]).all()


@pytest.mark.parametrize(
    ("scale", "baseline"),
    [
        *itertools.product(SCALES, GROUP_BASELINES),
        *itertools.product(("batch", "none"), STEP_BASELINES),
    ],
)
def test_a_step_that_is_noise_everywhere_has_no_signal_although_its_deviation_is_noise_too(
    scale, baseline
):
    """The floor is a share of the deviation and 1e-4: 1% of that is 1e-6."""
    noise = 0.7 + 1e-7 * RNG.integers(0, 3, (4, 8))
    assert (grpo.group_advantages(noise, scale, baseline) != 0).any()
    assert (grpo.group_advantages(noise, scale, baseline, 0.01) == 0).all()
    assert (grpo.group_advantages(0.7 + 1000 * (noise - 0.7), scale, baseline, 0.01) != 0).any()


def test_a_group_of_equal_rewards_is_a_signal_where_the_step_is_the_baseline():
    advantages = grpo.group_advantages(FLOORED, "none", "reinforce", 0.01)
    np.testing.assert_allclose(advantages, FLOORED - FLOORED.mean(), atol=1e-6)


def test_each_of_several_rewards_has_a_floor_of_its_own():
    """A reward of thousands makes no noise of one that lies between 0 and 1."""
    large = np.array([[0.0, 2000.0, 0.0, 2000.0]] * 4)
    both = grpo.gdpo_decoupled_advantages(np.stack([FLOORED, large]), [1.0, 1.0], 0.01)
    alone = grpo.gdpo_decoupled_advantages(np.stack([large, large]), [0.0, 1.0], 0.01)
    # of the second group only the large reward is left, so it stays in the ratio of that one's advantages
    np.testing.assert_allclose(both[1] / both[1, 1], alone[1] / alone[1, 1], rtol=1e-6)
    assert np.abs(both[3] / both[3, 1] - alone[3] / alone[3, 1]).max() > 0.1


@pytest.mark.parametrize("cuts", [[], [3], [1, 2, 3, 4, 5]])
def test_cross_entropy_and_divergences_are_means_over_the_step_s_counted_tokens(cuts):
    apart, order = RNG.gamma(2, 1, NEW.shape), RNG.permutation(NUM_ROWS)
    found = dict.fromkeys(("sft", "distill"), 0.0)
    for rows in np.split(order, cuts):
        tokens = tokens_of(CASE, array(NEW[rows]), rows)._replace(divergences=array(apart[rows]))
        for name in found:
            found[name] += grpo.LOSSES[name](tokens, grpo.Objective()).value.item()
    means = [(values * MASK).sum() / MASK.sum() for values in (-NEW, apart)]
    assert list(found.values()) == pytest.approx(means, abs=1e-6)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("garbage", [np.nan, np.inf, -np.inf, 1e30])
def test_what_lies_outside_the_mask_has_no_influence_and_no_gradient(loss, garbage):
    settings = dict(loss_type=loss, beta=0.1, epsilon_high=2.0)
    wild = CASE._replace(
        **{n: np.where(MASK > 0, getattr(CASE, n), garbage) for n in ("old", "ref")}
    )
    new = array(np.where(MASK > 0, NEW, garbage))
    value, grad = mx.value_and_grad(lambda new: ours(wild, new, **settings))(new)
    expected, clean = mx.value_and_grad(lambda new: ours(CASE, new, **settings))(array(NEW))
    assert value.item() == expected.item()
    assert (np.array(grad)[MASK == 0] == 0).all()
    np.testing.assert_array_equal(np.array(grad), np.array(clean))


def test_old_logprobs_and_advantages_carry_no_gradient():
    def loss(old, advantages):
        return loss_of(array(NEW), old, advantages, array(MASK)).value

    grads = mx.grad(loss, argnums=(0, 1))(array(OLD), array(ADVANTAGES))
    assert all((grad == 0).all().item() for grad in grads)


@pytest.mark.parametrize("bounds", [{}, {"epsilon": 0.05, "epsilon_high": 0.3}])
def test_the_sums_are_of_the_counted_tokens_and_clip_frac_of_those_without_gradient(bounds):
    def loss(new):
        return grpo.LOSSES["dapo"](tokens_of(WIDE, new), grpo.Objective(**bounds))

    grad, sums = mx.grad(lambda new: loss(new).value)(array(WIDE.new)), loss(array(WIDE.new)).sums
    d = WIDE.ref - WIDE.new
    assert sums["kl"].item() == pytest.approx(((np.exp(d) - d - 1) * WIDE.mask).sum(), abs=1e-4)
    assert sums["clip_frac"].item() == ((np.array(grad) == 0) & (WIDE.mask > 0)).sum() > 0


def test_a_term_sees_every_column_with_0_where_the_mask_is_0():
    def weighted(ratio, tokens, objective):
        return -ratio * tokens.advantages * tokens.entropies * (
            tokens.sampled_logprobs - tokens.old_logprobs
        ), None

    entropies, sampled = (
        np.where(MASK > 0, RNG.gamma(1, 1, NEW.shape), np.nan),
        np.where(MASK > 0, NEW, np.inf),
    )
    tokens = tokens_of(CASE, array(NEW))._replace(
        entropies=array(entropies), sampled_logprobs=array(sampled)
    )
    found = grpo.make_loss_with_kl_and_entropy(weighted, grpo.mean_of_tokens)(
        tokens, grpo.Objective()
    ).value.item()
    each = -np.exp(NEW - OLD) * ADVANTAGES[:, None] * entropies * (sampled - OLD)
    assert found == pytest.approx(each[MASK > 0].sum() / MASK.sum(), rel=1e-5)


def test_an_empty_mask_gives_zero():
    empty = mx.zeros((NUM_ROWS, 5))
    tokens = grpo.Tokens(array(NEW), array(OLD), array(ADVANTAGES), empty, divergences=array(NEW))
    for name, loss in grpo.LOSSES.items():
        assert loss(tokens, grpo.Objective(max_tokens=7)).value.item() == 0, name


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("log_ratio", [-200.0, 100.0, 500.0])
def test_a_ratio_beyond_float32_has_a_finite_gradient(loss, log_ratio):
    for sign in (1.0, -1.0):

        def value(new, sign=sign):
            old, mask = array([[-1.0, -1.0]]), mx.ones((1, 2))
            return loss_of(new, old, array([sign]), mask, loss_type=loss, epsilon_high=2.0).value

        loss_value, grad = mx.value_and_grad(value)(array([[log_ratio, -1.0]]))
        assert math.isfinite(loss_value.item()) and mx.isfinite(grad).all().item()


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("distance", [8.9, 9.1, 60.0, 100.0, 1e4, -100.0, -600.0])
def test_a_token_far_from_the_reference_has_a_bounded_kl_and_a_slope_towards_it(
    loss, level, distance
):
    """Value and gradient are the oracle's: of k3 as far as e^9, and from there on those that it has at e^9."""
    beta, new = 0.03, np.array([[-1.0, -2.0]])
    far = oracle.Case(
        new,
        old=new,
        ref=new + np.array([[distance, 0.0]]),
        advantages=np.zeros(1),
        mask=np.ones((1, 2)),
        max_tokens=2,
    )
    settings = {
        "loss_type": loss,
        "importance_sampling_level": level,
        "epsilon_high": 2.0,
        "beta": beta,
    }
    value, grad = mx.value_and_grad(lambda new: ours(far, new, **settings))(array(new))
    assert value.item() == pytest.approx(oracle.loss(far, **settings), rel=1e-5)
    np.testing.assert_allclose(
        np.array(grad), oracle.gradient(far, **settings), rtol=1e-4, atol=1e-7
    )
    assert grad[0, 0].item() * distance < 0, (
        "descent moves the token's log-probability towards the reference"
    )
    if distance > 0:
        assert max(value.item(), abs(grad[0, 0].item())) < beta * 1e4


@pytest.mark.parametrize("distance", [0.0, 1e-3, 0.5, -3.0, 5.0, 8.99, 9.0])
def test_the_kl_of_a_token_within_the_bound_is_the_formula_to_the_bit(distance):
    logprobs, ref_logprobs = array([-3.0]), array([-3.0 + distance])
    difference = ref_logprobs - logprobs
    formula = mx.exp(difference) - difference - 1
    assert grpo.kl_term(logprobs, ref_logprobs).item() == formula.item()


# ---- turns


@pytest.mark.parametrize("scale", ["group", "none"])
def test_advantages_of_turns_are_those_of_the_oracle(scale):
    groups = [[RNG.normal(size=RNG.integers(1, 6)).tolist() for _ in range(7)] for _ in range(20)]
    found = grpo.turn_advantages(groups, scale)
    for group, its in zip(groups, found, strict=True):
        for row, ours, theirs in zip(group, its, oracle.turn_advantages(group, scale), strict=True):
            np.testing.assert_allclose(ours[: len(row)], theirs, rtol=1e-5, atol=1e-6)
            assert (ours[len(row) :] == 0).all()


def test_turns_with_equal_returns_get_exactly_zero():
    equal = [[1e9, 0.1, 0.2], [1e9, 0.1, 0.2], [1e9 + 0.1 + 0.2]]
    assert (grpo.turn_advantages([equal], signal_floor=grpo.SIGNAL_FLOOR) == 0).all()
    equal[2][0] += 1.0
    assert (grpo.turn_advantages([equal], signal_floor=grpo.SIGNAL_FLOOR)[..., 0] != 0).all()
