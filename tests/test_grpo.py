"""The objective against the oracle (papers, in float64), frozen cases, and invariants."""

import itertools
import math

import mlx.core as mx
import numpy as np
import oracle
import pytest

import grpo

CASE = oracle.make_case([5, 3, 1, 4, 2, 5], 5)
# The ratios go from 0.1 to 6, so every clip and every cap has an effect.
WIDE = oracle.make_case([4, 2, 3], 4, seed=1, spread=1.0)
NEW = CASE.new
OLD = CASE.old
REF = CASE.ref
ADVANTAGES = CASE.advantages
MASK = CASE.mask
NUM_ROWS = len(MASK)
RNG = np.random.default_rng(0)


def array(x):
    return mx.array(x, mx.float32)


def compute_loss(new, old, advantages, mask, *, ref=None, **settings):
    """The loss of a step that is a single micro-batch."""
    objective = grpo.Objective(**{"max_tokens": 8} | settings)
    return grpo.LOSSES[objective.loss_type](grpo.Tokens(new, old, advantages, mask, ref), objective)


def make_tokens(case, new, rows=None, with_ref=True):
    """The case, or some of its rows as a micro-batch, in the form that a loss takes."""
    rows = np.arange(len(case.mask)) if rows is None else np.array(rows)
    return grpo.Tokens(
        new,
        array(case.old[rows]),
        array(case.advantages[rows]),
        array(case.mask[rows]),
        ref_logprobs=array(case.ref[rows]) if with_ref else None,
        num_items=int(case.mask.sum()),
        num_rows=len(case.mask),
    )


def gwen_loss(case, new, *, rows=None, **settings):
    """Gwen's loss of the case, or the part of the loss that some of its rows contribute."""
    objective = grpo.Objective(max_tokens=case.max_tokens, **settings)
    tokens = make_tokens(case, new, rows, with_ref=bool(objective.beta))
    return grpo.LOSSES[objective.loss_type](tokens, objective).value


LOSSES = [name for name in grpo.LOSSES if name not in ("distill", "sft")]  # policy-gradient losses
GROUP_BASELINES = [name for name, row in grpo.BASELINES.items() if not row.compares_step]
STEP_BASELINES = [name for name, row in grpo.BASELINES.items() if row.compares_step]
LEVELS = ("token", "sequence")
SCALES = ("group", "batch", "mean", "none")
KLS = [{}, {"beta": 0.3}]
CLIPS = [{}, {"epsilon": 0.1, "epsilon_high": 0.28}, {"epsilon": 0.05, "epsilon_high": 0.05}]
# The bounds on the ratio of two losses; the other losses have CLIPS.
BOUNDS = {"cispo": [{"epsilon_high": 5.0}, {"epsilon_high": 1.1}], "sapo": [{}]}


@pytest.mark.slow
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("case", [CASE, WIDE], ids=["near", "wide"])
def test_loss_and_gradient_equal_the_oracle(loss, level, case):
    """Every bound on the ratio, with and without the KL term, in one micro-batch and in three."""
    for bounds, kl in itertools.product(BOUNDS.get(loss, CLIPS), KLS):
        settings = {"loss_type": loss, "importance_sampling_level": level} | bounds | kl
        expected_loss = oracle.loss(case, **settings)
        expected_gradient = oracle.gradient(case, **settings)
        for num_parts in (1, 3):
            total_loss = 0.0
            gradient = np.zeros_like(expected_gradient)
            for rows in np.array_split(RNG.permutation(len(case.mask)), num_parts):
                loss_and_gradient = mx.value_and_grad(
                    lambda new, s=settings, rows=rows: gwen_loss(case, new, rows=rows, **s)
                )
                part_loss, part_gradient = loss_and_gradient(array(case.new[rows]))
                total_loss += part_loss.item()
                gradient[rows] = np.array(part_gradient)
            assert total_loss == pytest.approx(expected_loss, abs=1e-6), settings
            np.testing.assert_allclose(
                gradient, expected_gradient, atol=1e-6, err_msg=str(settings)
            )


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize(
    "bounds",
    [{"epsilon": 0.0}, {"epsilon_high": 0.0}, {"epsilon": 0.0, "epsilon_high": 0.0}],
    ids=str,
)
def test_an_on_policy_token_has_its_full_gradient_even_at_a_bound_of_the_clip(bounds, advantage):
    """With `mx.minimum` and `mx.clip`, the token would have no gradient; in PyTorch, half of it."""

    def loss(new):
        tokens = (new, mx.zeros((1, 1)), array([advantage]), mx.ones((1, 1)))
        return compute_loss(*tokens, **bounds).value

    assert mx.grad(loss)(mx.zeros((1, 1))).item() == -advantage


# The values of TRL 1.16 for one step of three rows, in float64: the loss, and its gradient with
# respect to the log-probabilities of the second row. `test_trl.py` compares with TRL itself.
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
def test_loss_and_gradient_equal_the_frozen_values_of_trl(settings, expected, gradient):
    loss_and_gradient = mx.value_and_grad(lambda new: gwen_loss(FROZEN_CASE, new, **settings))
    value, grad = loss_and_gradient(array(FROZEN_CASE.new))
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
def test_advantages_equal_the_oracle_and_are_zero_for_missing_completions(baseline, scale, sizes):
    groups = [RNG.normal(2, 3, size) for size in sizes]
    rewards = np.full((len(groups), max(sizes)), np.nan)
    for row, group in zip(rewards, groups, strict=True):
        row[: len(group)] = group
    advantages = grpo.group_advantages(rewards, scale, baseline)
    assert advantages.dtype == np.float32
    expected_advantages = oracle.advantages(groups, scale, baseline)
    for row, expected in zip(advantages, expected_advantages, strict=True):
        np.testing.assert_allclose(row[: len(expected)], expected, atol=1e-5)
        assert (row[len(expected) :] == 0).all()


def test_separately_normalized_rewards_equal_the_oracle():
    rewards = np.stack([RNG.integers(0, 2, (4, 8)).astype(float), RNG.normal(0, 30, (4, 8))])
    advantages = grpo.gdpo_decoupled_advantages(rewards, [1.0, 0.5])
    expected_advantages = oracle.decoupled_advantages(rewards, [1.0, 0.5])
    np.testing.assert_allclose(advantages, expected_advantages, atol=1e-5)


@pytest.mark.parametrize("reward", [0.1, 1 / 3, -0.7, 123.456])
def test_a_group_with_equal_values_of_every_reward_has_exactly_zero_advantage(reward):
    rewards = np.concatenate([np.full((2, 1, 7), reward), RNG.normal(0, 1, (2, 3, 7))], axis=1)
    assert (grpo.gdpo_decoupled_advantages(rewards, [1.0, 0.3])[0] == 0).all()


@pytest.mark.parametrize("baseline", GROUP_BASELINES)
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("reward", [0.1, 1 / 3, -0.7, 1e6, 123.456, 0.0])
def test_a_group_of_equal_rewards_has_exactly_zero_advantage(baseline, scale, reward):
    for size in (2, 3, 7, 8, 11):
        rewards = np.stack([np.full(size, reward), RNG.normal(0, 1, size)])
        assert (grpo.group_advantages(rewards, scale, baseline)[0] == 0).all()


# The 16 rewards have the standard deviation 1.1824. With a signal floor of 1%, a group whose
# rewards differ by less than 0.0118 is noise. Here this is the second group.
NOISY_GROUP_REWARDS = np.array(
    [[0.0, 1.0, 0.0, 1.0], [3.0, 3.0002, 3.0, 3.0], [2.0, 2.0, 4.0, 2.0], [1.0, 1.02, 1.0, 1.0]]
)


@pytest.mark.parametrize("baseline", GROUP_BASELINES)
@pytest.mark.parametrize("scale", SCALES)
def test_the_signal_floor_sets_the_advantages_of_a_noisy_group_to_zero_and_no_others(
    baseline, scale
):
    def advantages_with_floor(floor):
        return grpo.group_advantages(NOISY_GROUP_REWARDS, scale, baseline, floor)

    without_floor = advantages_with_floor(0.0)
    with_floor = advantages_with_floor(0.01)
    assert (np.abs(without_floor[1]) > 0).all()
    assert (with_floor[1] == 0).all()
    np.testing.assert_array_equal(with_floor[[0, 2, 3]], without_floor[[0, 2, 3]])

    # A floor of 2% is 0.0236, so the fourth group is noise, too.
    with_higher_floor = advantages_with_floor(0.02)
    assert (with_higher_floor[[1, 3]] == 0).all()
    assert (with_higher_floor[[0, 2]] == without_floor[[0, 2]]).all()


@pytest.mark.parametrize(
    ("scale", "baseline"),
    [
        *itertools.product(SCALES, GROUP_BASELINES),
        *itertools.product(("batch", "none"), STEP_BASELINES),
    ],
)
def test_a_step_of_noise_has_no_signal_although_its_standard_deviation_is_tiny(scale, baseline):
    """The floor is a fraction of the standard deviation plus 1e-4; 1% of 1e-4 is 1e-6."""
    noise = 0.7 + 1e-7 * RNG.integers(0, 3, (4, 8))
    assert (grpo.group_advantages(noise, scale, baseline) != 0).any()
    assert (grpo.group_advantages(noise, scale, baseline, 0.01) == 0).all()
    larger_noise = 0.7 + 1000 * (noise - 0.7)
    assert (grpo.group_advantages(larger_noise, scale, baseline, 0.01) != 0).any()


def test_a_group_of_equal_rewards_is_a_signal_if_the_baseline_is_the_mean_of_the_step():
    advantages = grpo.group_advantages(NOISY_GROUP_REWARDS, "none", "reinforce", 0.01)
    expected = NOISY_GROUP_REWARDS - NOISY_GROUP_REWARDS.mean()
    np.testing.assert_allclose(advantages, expected, atol=1e-6)


def test_each_of_several_rewards_has_a_separate_signal_floor():
    """A reward of thousands does not turn a reward between 0 and 1 into noise."""
    large = np.array([[0.0, 2000.0, 0.0, 2000.0]] * 4)
    both_rewards = np.stack([NOISY_GROUP_REWARDS, large])
    both = grpo.gdpo_decoupled_advantages(both_rewards, [1.0, 1.0], 0.01)
    alone = grpo.gdpo_decoupled_advantages(np.stack([large, large]), [0.0, 1.0], 0.01)
    # In the second group, only the large reward is a signal, so advantages keep its proportions.
    np.testing.assert_allclose(both[1] / both[1, 1], alone[1] / alone[1, 1], rtol=1e-6)
    assert np.abs(both[3] / both[3, 1] - alone[3] / alone[3, 1]).max() > 0.1


@pytest.mark.parametrize("cuts", [[], [3], [1, 2, 3, 4, 5]])
def test_cross_entropy_and_divergences_are_means_over_the_counted_tokens_of_the_step(cuts):
    divergences = RNG.gamma(2, 1, NEW.shape)
    order = RNG.permutation(NUM_ROWS)
    totals = {"sft": 0.0, "distill": 0.0}
    for rows in np.split(order, cuts):
        tokens = make_tokens(CASE, array(NEW[rows]), rows)
        tokens = tokens._replace(divergences=array(divergences[rows]))
        for name in totals:
            totals[name] += grpo.LOSSES[name](tokens, grpo.Objective()).value.item()

    def masked_mean(values):
        return (values * MASK).sum() / MASK.sum()

    assert totals["sft"] == pytest.approx(masked_mean(-NEW), abs=1e-6)
    assert totals["distill"] == pytest.approx(masked_mean(divergences), abs=1e-6)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("garbage", [np.nan, np.inf, -np.inf, 1e30])
def test_values_outside_the_loss_mask_have_no_influence_and_no_gradient(loss, garbage):
    def loss_and_gradient(case, new):
        def value(new):
            return gwen_loss(case, new, loss_type=loss, beta=0.1, epsilon_high=2.0)

        return mx.value_and_grad(value)(array(new))

    def add_garbage(values):
        return np.where(MASK > 0, values, garbage)

    polluted_case = CASE._replace(old=add_garbage(OLD), ref=add_garbage(REF))
    value, gradient = loss_and_gradient(polluted_case, add_garbage(NEW))
    clean_value, clean_gradient = loss_and_gradient(CASE, NEW)
    assert value.item() == clean_value.item()
    assert (np.array(gradient)[MASK == 0] == 0).all()
    np.testing.assert_array_equal(np.array(gradient), np.array(clean_gradient))


def test_old_logprobs_and_advantages_carry_no_gradient():
    def loss(old, advantages):
        return compute_loss(array(NEW), old, advantages, array(MASK)).value

    grads = mx.grad(loss, argnums=(0, 1))(array(OLD), array(ADVANTAGES))
    assert all((grad == 0).all().item() for grad in grads)


@pytest.mark.parametrize("bounds", [{}, {"epsilon": 0.05, "epsilon_high": 0.3}])
def test_kl_sums_over_counted_tokens_and_clip_frac_counts_those_without_gradient(bounds):
    def loss(new):
        return grpo.LOSSES["dapo"](make_tokens(WIDE, new), grpo.Objective(**bounds))

    new = array(WIDE.new)
    sums = loss(new).sums
    gradient = np.array(mx.grad(lambda new: loss(new).value)(new))

    difference = WIDE.ref - WIDE.new
    kl = np.exp(difference) - difference - 1
    assert sums["kl"].item() == pytest.approx((kl * WIDE.mask).sum(), abs=1e-4)
    num_clipped = ((gradient == 0) & (WIDE.mask > 0)).sum()
    assert sums["clip_frac"].item() == num_clipped
    assert num_clipped > 0


def test_a_term_sees_every_column_and_zeros_outside_the_loss_mask():
    def weighted_term(ratio, tokens, objective):
        mismatch = tokens.sampled_logprobs - tokens.old_logprobs
        return -ratio * tokens.advantages * tokens.entropies * mismatch, None

    entropies = np.where(MASK > 0, RNG.gamma(1, 1, NEW.shape), np.nan)
    sampled = np.where(MASK > 0, NEW, np.inf)
    tokens = make_tokens(CASE, array(NEW))._replace(
        entropies=array(entropies), sampled_logprobs=array(sampled)
    )
    loss = grpo.make_loss_with_kl_and_entropy(weighted_term, grpo.mean_of_tokens)
    value = loss(tokens, grpo.Objective()).value.item()

    terms = -np.exp(NEW - OLD) * ADVANTAGES[:, None] * entropies * (sampled - OLD)
    assert value == pytest.approx(terms[MASK > 0].sum() / MASK.sum(), rel=1e-5)


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
            tokens = (new, array([[-1.0, -1.0]]), array([sign]), mx.ones((1, 2)))
            return compute_loss(*tokens, loss_type=loss, epsilon_high=2.0).value

        loss_value, grad = mx.value_and_grad(value)(array([[log_ratio, -1.0]]))
        assert math.isfinite(loss_value.item())
        assert mx.isfinite(grad).all().item()


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("distance", [8.9, 9.1, 60.0, 100.0, 1e4, -100.0, -600.0])
def test_a_token_far_from_the_reference_has_a_bounded_kl_that_pulls_it_back(loss, level, distance):
    """Beyond a ratio of e^9, the KL term and its slope keep their values at e^9."""
    beta = 0.03
    new = np.array([[-1.0, -2.0]])
    case = oracle.Case(
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
    value, grad = mx.value_and_grad(lambda new: gwen_loss(case, new, **settings))(array(new))
    assert value.item() == pytest.approx(oracle.loss(case, **settings), rel=1e-5)
    expected_gradient = oracle.gradient(case, **settings)
    np.testing.assert_allclose(np.array(grad), expected_gradient, rtol=1e-4, atol=1e-7)

    # Gradient descent moves the log-probability of the token towards the reference.
    slope = grad[0, 0].item()
    assert slope * distance < 0
    if distance > 0:
        assert max(value.item(), abs(slope)) < beta * 1e4


@pytest.mark.parametrize("distance", [0.0, 1e-3, 0.5, -3.0, 5.0, 8.99, 9.0])
def test_the_kl_of_a_token_within_the_bound_equals_the_formula_bit_for_bit(distance):
    logprobs = array([-3.0])
    ref_logprobs = array([-3.0 + distance])
    difference = ref_logprobs - logprobs
    formula = mx.exp(difference) - difference - 1
    assert grpo.kl_term(logprobs, ref_logprobs).item() == formula.item()


# ---- turns


@pytest.mark.parametrize("scale", ["group", "none"])
def test_advantages_of_turns_equal_the_oracle(scale):
    def draw_group():
        return [RNG.normal(size=RNG.integers(1, 6)).tolist() for _ in range(7)]

    groups = [draw_group() for _ in range(20)]
    advantages = grpo.turn_advantages(groups, scale)
    for group, group_advantages in zip(groups, advantages, strict=True):
        expected_advantages = oracle.turn_advantages(group, scale)
        for turns, row, expected in zip(group, group_advantages, expected_advantages, strict=True):
            np.testing.assert_allclose(row[: len(turns)], expected, rtol=1e-5, atol=1e-6)
            assert (row[len(turns) :] == 0).all()


def test_turns_with_equal_returns_get_exactly_zero():
    group = [[1e9, 0.1, 0.2], [1e9, 0.1, 0.2], [1e9 + 0.1 + 0.2]]
    assert (grpo.turn_advantages([group], signal_floor=grpo.SIGNAL_FLOOR) == 0).all()
    group[2][0] += 1.0
    assert (grpo.turn_advantages([group], signal_floor=grpo.SIGNAL_FLOOR)[..., 0] != 0).all()
