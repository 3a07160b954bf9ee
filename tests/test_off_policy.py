"""--importance-sampling-correction: old samples train the current policy without bias."""

import mlx.core as mx
import numpy as np
import pytest
import yaml

import grpo
import train
import update
from config import Config
from step.batch import make_batches
from step.effects import describe_loss_settings_without_effect
from step.loss import StepLoss
from step.sample import Sample, mark_replayed_samples
from tests.small_run import (
    SMALL_FLAGS,
    compute_logprobs,
    make_run,
    record_gradient,
    sample_first_prompts,
    shift_logprobs,
    stack_logprobs,
    update_once,
)
from tests.test_grpo import LOSSES, array

LEVELS = ("token", "sequence")
RNG = np.random.default_rng(4)
MASK = np.array([[1.0, 1, 1, 1], [1, 1, 0, 0], [1, 1, 1, 0]])
OLD = -RNG.gamma(1, 1, MASK.shape)
SAMPLED = OLD + RNG.normal(0, 0.8, MASK.shape)
NEW = OLD + RNG.normal(0, 0.1, MASK.shape)
ADVANTAGES = np.array([1.0, -0.5, 0.7])


def loss_value(new, *, loss="dapo", sampled=SAMPLED, ref=None, **settings):
    objective = grpo.Objective(loss_type=loss, max_tokens=4, epsilon_high=5.0, **settings)
    tokens = grpo.Tokens(
        new,
        array(OLD),
        array(ADVANTAGES),
        array(MASK),
        ref_logprobs=None if ref is None else array(ref),
        sampled_logprobs=array(sampled),
    )
    return grpo.LOSSES[loss](tokens, objective).value


def gradient(**settings):
    return np.array(mx.grad(lambda new: loss_value(new, **settings))(array(NEW)))


def expected_weights(level, cap):
    log_ratio = np.where(MASK > 0, OLD - SAMPLED, 0)
    if level == "sequence":
        log_ratio = log_ratio.sum(axis=1, keepdims=True)
    return np.minimum(np.exp(log_ratio), cap)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("cap", [1.2, 3.0, 1e6])
def test_the_gradient_of_each_token_is_multiplied_by_the_truncated_weight(loss, cap):
    plain = gradient(loss=loss)
    for level in LEVELS:
        corrected = gradient(
            loss=loss, importance_sampling_correction=level, importance_sampling_cap=cap
        )
        np.testing.assert_allclose(corrected, plain * expected_weights(level, cap), atol=1e-6)


@pytest.mark.parametrize("level", LEVELS)
def test_the_kl_term_is_not_weighted(level):
    ref = OLD - 0.3
    weighted = gradient(importance_sampling_correction=level)
    with_kl = gradient(importance_sampling_correction=level, beta=0.1, ref=ref)
    unweighted_kl_gradient = gradient(beta=0.1, ref=ref) - gradient()
    np.testing.assert_allclose(with_kl - weighted, unweighted_kl_gradient, atol=1e-6)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("garbage", [np.nan, np.inf, -np.inf, 1e30])
def test_sampled_logprobs_at_padding_have_no_influence(level, garbage):
    polluted = np.where(MASK > 0, SAMPLED, garbage)
    np.testing.assert_array_equal(
        gradient(sampled=polluted, importance_sampling_correction=level),
        gradient(importance_sampling_correction=level),
    )


def test_the_expected_gradient_on_samples_of_another_policy_equals_that_on_policy():
    """Each of six one-token answers has a row, which the sampler's probability weights."""
    logits = RNG.normal(size=(2, 6))
    policy, sampler = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    advantages = RNG.normal(size=6)
    objective = grpo.Objective(importance_sampling_correction="token", importance_sampling_cap=1e6)

    def value(new):
        tokens = grpo.Tokens(
            new,
            array(np.log(policy))[:, None],
            array(advantages * sampler),  # the expectation over the sampler
            mx.ones((6, 1)),
            sampled_logprobs=array(np.log(sampler))[:, None],
        )
        return grpo.LOSSES["dapo"](tokens, objective).value

    gradient = np.array(mx.grad(value)(array(np.log(policy))[:, None]))[:, 0] * 6
    np.testing.assert_allclose(gradient, -policy * advantages, atol=1e-6)


def test_the_correction_changes_only_the_gradient_of_replayed_samples(tmp_path):
    run = make_run(tmp_path)
    update_once(run)  # B of the adapters is 0 before
    plain_loss = run.learner.loss
    config = run.config.copy_with_settings(importance_sampling_correction="token")
    corrected_loss = StepLoss(config, run.sizes)

    def relative_change_of_gradient(samples):
        batches = make_batches(samples, 100_000)
        run.learner.loss = plain_loss
        plain = record_gradient(run, batches)[1]
        run.learner.loss = corrected_loss
        corrected = record_gradient(run, batches)[1]
        largest = max(mx.abs(array).max().item() for array in plain.values())
        return max(mx.abs(corrected[name] - plain[name]).max().item() for name in plain) / largest

    fresh = sample_first_prompts(run)
    assert relative_change_of_gradient(fresh) < 1e-3
    assert relative_change_of_gradient(shift_logprobs(fresh, 0.5)) > 0.05


def replay_half(run):
    """
    Makes fresh and replayed samples in turn, and the slopes of their loss in float64.

    The slope of a token is the advantage times the ratio, or 0 where the ratio is clipped. Returns
    the samples, the slopes (N, T), the ratios (N, T), the advantages (N, 1) and the mask (N, T).
    """
    samples = []
    shifted = shift_logprobs(sample_first_prompts(run), 0.5)
    for row, (fresh, old) in enumerate(zip(sample_first_prompts(run), shifted, strict=True)):
        samples.append(old._replace(is_replayed=True) if row % 2 else fresh)
    sampled, mask = stack_logprobs(samples)
    logprobs = compute_logprobs(run, make_batches(samples, 100_000))
    is_replayed = np.arange(len(samples))[:, None] % 2 > 0
    ratios = np.where(is_replayed & mask, np.exp(logprobs - sampled), 1.0)
    advantages = np.array([[sample.advantage] for sample in samples])
    is_clipped = np.where(advantages > 0, ratios > 1.2, ratios < 0.8)
    slopes = np.where(is_clipped, 0.0, advantages * ratios) * mask
    return samples, slopes, ratios, advantages, mask


def test_the_importance_ratio_of_a_replayed_sample_is_relative_to_the_sampler(tmp_path):
    run = make_run(tmp_path)
    update_once(run)  # B of the adapters is 0 before
    samples, slopes, ratios, advantages, mask = replay_half(run)
    batches = make_batches(samples, 100_000)
    result, gradient = record_gradient(run, batches)

    clipped = np.clip(ratios, 0.8, 1.2)
    terms = -np.minimum(ratios * advantages, clipped * advantages) * mask
    assert result.loss == pytest.approx(terms.sum() / mask.sum(), abs=1e-5)
    clip_frac = ((slopes == 0) & mask).sum() / mask.sum()
    assert result.means["clip_frac"] == pytest.approx(clip_frac)
    assert clip_frac > 0.1

    # On fresh samples, the slope of a token is its advantage.
    expected_samples = [
        sample._replace(is_replayed=False, advantage=slope[: len(sample.loss_positions)])
        for sample, slope in zip(samples, slopes, strict=True)
    ]
    expected = record_gradient(run, make_batches(expected_samples, 100_000))[1]
    largest = max(mx.abs(grads).max().item() for grads in expected.values())
    for name, grads in gradient.items():
        assert mx.abs(grads - expected[name]).max().item() < 1e-4 * largest, name


def test_a_later_update_keeps_the_importance_ratio_of_a_replayed_sample(tmp_path):
    run = make_run(tmp_path)
    samples, *_ = replay_half(run)
    for batch in make_batches(samples, 100_000):
        first = run.learner.loss.compute_batch_loss(run.model, batch)
        later = batch._replace(old_logprobs=first.logprobs)
        again = run.learner.loss.compute_batch_loss(run.model, later)
        assert again.loss.item() == first.loss.item()
        half = later.select_rows(list(range(0, len(batch.rows), 2)))
        assert half.is_replayed.tolist() == batch.is_replayed.tolist()[::2]


@pytest.mark.parametrize("level", LEVELS)
def test_the_correction_replaces_the_importance_ratio_of_a_replayed_sample(tmp_path, level):
    run = make_run(tmp_path, "--importance-sampling-correction", level)
    samples, *_ = replay_half(run)
    unmarked = [sample._replace(is_replayed=False) for sample in samples]
    marked_result = record_gradient(run, make_batches(samples, 100_000))[0]
    unmarked_result = record_gradient(run, make_batches(unmarked, 100_000))[0]
    assert marked_result.loss == unmarked_result.loss
    assert marked_result.means["clip_frac"] == 0


@pytest.mark.parametrize("num_iterations", [1, 3])
def test_the_mismatch_with_the_sampler_excludes_replayed_samples(tmp_path, num_iterations):
    run = make_run(tmp_path, "--num-iterations", str(num_iterations))
    samples = sample_first_prompts(run)
    shifted = shift_logprobs(samples, 2.0)
    mixed = []
    for row, (sample, old) in enumerate(zip(samples, shifted, strict=True)):
        mixed.append(old._replace(is_replayed=True) if row % 3 else sample)
    batches = make_batches(mixed, 150)
    old_logprobs, mask = stack_logprobs(mixed)
    is_replayed = np.array([[sample.is_replayed] for sample in mixed]) & mask
    gap = np.abs(compute_logprobs(run, batches) - old_logprobs)
    means = update.run_optimizer_steps(run.learner, batches, 0.02).means
    assert means["mismatch/logprob_abs_mean"] < 1e-4
    assert means["mismatch/logprob_abs_max"] < 1e-3
    assert means["mismatch/ratio_mean"] == pytest.approx(1, abs=1e-3)
    assert means["mismatch/ratio_max"] == pytest.approx(1, abs=1e-3)
    assert means["mismatch/over_cap_frac"] == 0
    assert means["replay/logprob_abs_mean"] == pytest.approx(gap[is_replayed].mean(), abs=1e-3)
    assert means["replay/logprob_abs_mean"] > 1


def test_a_step_of_only_replayed_samples_has_no_mismatch(tmp_path):
    run = make_run(tmp_path)
    samples = [sample._replace(is_replayed=True) for sample in sample_first_prompts(run)]
    means = update.run_optimizer_steps(run.learner, make_batches(samples, 150), 0.02).means
    assert all(means[name] is None for name in means if name.startswith("mismatch/"))
    assert "replay/logprob_abs_mean" not in update_once(make_run(tmp_path)).means


def test_samples_with_logprobs_of_another_step_are_marked_as_replayed():
    fresh = [Sample([1], [2], [0], 0, logprobs=np.array([-1.0])) for _ in range(2)]
    old = Sample([1], [2], [0], 1, logprobs=np.array([-1.0]))
    reply = Sample([1], [2], [0], 2)
    changed = fresh[1]._replace(advantage=2.0, group=5)
    marked = mark_replayed_samples([fresh[0], changed, old, reply], fresh)
    assert [sample.is_replayed for sample in marked] == [False, False, True, False]
    # In the step that sampled it, a sample counts as fresh, even if another step replays it.
    (marked,) = mark_replayed_samples([old._replace(is_replayed=True)], [old])
    assert not marked.is_replayed


def test_a_run_records_the_correction_and_a_cap_alone_is_refused(tmp_path, check_refusal):
    flags = [*SMALL_FLAGS, "--task", "demo", "--eval-every", "0", "--steps", "1"]
    cap = ["--importance-sampling-cap", "2"]
    correction = ["--importance-sampling-correction", "sequence"]
    train.main([*flags, *correction, *cap, "--run-dir", str(tmp_path / "run")])
    settings = yaml.safe_load((tmp_path / "run/config.yaml").read_text())
    assert settings["importance_sampling_correction"] == "sequence"
    assert settings["importance_sampling_cap"] == 2
    check_refusal(train.main, [*flags, *cap], "--importance-sampling-cap 2 bounds the weights of")


def test_a_warning_names_a_loss_of_the_user_that_ignores_the_correction():
    def ignores(tokens, objective):
        terms = -tokens.advantages * tokens.logprobs * tokens.mask * tokens.entropies
        return grpo.Loss(terms.sum() / tokens.num_items, {})

    config = Config.from_flags(importance_sampling_correction="token", loss_type="own.py:ignores")
    (line,) = describe_loss_settings_without_effect(config, ignores)
    assert line == (
        "--importance-sampling-correction token has no effect, because --loss-type own.py:ignores "
        "does not use it"
    )
    builtin = Config.from_flags(importance_sampling_correction="token")
    assert describe_loss_settings_without_effect(builtin) == []


def test_from_trl_converts_the_settings_of_the_correction(tmp_path, capsys):
    (tmp_path / "trl.yaml").write_text(
        "num_generations: 4\nvllm_importance_sampling_mode: sequence_truncate\n"
        "vllm_importance_sampling_correction: true\nvllm_importance_sampling_cap: 2.0\n"
    )
    train.main(["--from-trl", str(tmp_path / "trl.yaml")])
    recipe = yaml.safe_load(capsys.readouterr().out)
    assert recipe["importance_sampling_correction"] == "sequence"
