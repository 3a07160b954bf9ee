"""What the loss function gets, and what an update changes, on the bundled model."""

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import oracle
import pytest
from conftest import measure_peak
from mlx.utils import tree_flatten
from small_run import (
    add_column,
    compute_logprobs,
    make_config,
    make_run,
    record_gradient,
    sample_first_prompts,
    shift_logprobs,
    stack_logprobs,
    update_once,
    use_sgd,
)

import grpo
import gwen
import update
from config import MemoryDependentSizes
from run import GrpoRun
from step import trust_region
from step.advantages import mark_for_update
from step.batch import make_batches
from step.loss import StepLoss
from step.sample import Sample

pytestmark = pytest.mark.slow


def array(x):
    return mx.array(x, mx.float32)


# ---- what the loss function gets


@pytest.mark.parametrize(
    "flags",
    [
        "",
        "--temp 0.7 --checkpoint-layers on",
        "--top-p 0.8",
        "--top-k 4 --temp 1.3",
        "--min-p 0.05",
    ],
)
def test_the_trainer_computes_the_log_probabilities_that_the_sampler_recorded(tmp_path, flags):
    """Temperature, support, positions, padding and prompt all change these numbers."""
    run = make_run(tmp_path, *flags.split())
    samples = sample_first_prompts(run)
    for budget in (1, 150, 100_000):
        rows = []
        for batch in make_batches(samples, budget):
            logprobs, _ = run.learner.loss.logprobs_and_entropies(run.model, batch, gradient=True)
            gap = mx.abs(logprobs - batch.sampled_logprobs) * batch.mask
            assert gap.max().item() < 1e-4, budget
            rows += batch.rows
        assert sorted(rows) == list(range(12))


def test_a_loss_function_gets_entropies_and_sampled_log_probabilities(tmp_path):
    run = make_run(tmp_path)
    (batch,) = make_batches(sample_first_prompts(run), 100_000)
    loss = run.learner.loss
    all_tokens = []

    def record_tokens(tokens, objective):
        all_tokens.append(tokens)
        return grpo.LOSSES["dapo"](tokens, objective)

    loss.loss_function = record_tokens
    loss.compute_batch_loss(run.model, batch)

    tokens = all_tokens[0]
    _, entropies = loss.logprobs_and_entropies(run.model, batch)
    np.testing.assert_allclose(np.array(tokens.entropies), np.array(entropies), atol=1e-5)
    assert mx.array_equal(tokens.sampled_logprobs, batch.sampled_logprobs)


# ---- what an update changes


def gradient_by_adapters(run, batches, slopes):
    """d sum(slopes * logprobs) / d adapters by name, slopes (N, T)."""
    slopes = mx.array(slopes, mx.float32)

    def weighted_sum(model):
        total = 0.0
        for batch in batches:
            logprobs, _ = run.learner.loss.logprobs_and_entropies(model, batch, gradient=True)
            batch_slopes = slopes[mx.array(batch.rows), : logprobs.shape[1]]
            total += (logprobs * batch.mask * batch_slopes).sum()
        return total

    _, gradient = nn.value_and_grad(run.model, weighted_sum)(run.model)
    return dict(tree_flatten(gradient))


def assert_gradients_close(gradients, expected_gradients):
    for name, expected in expected_gradients.items():
        np.testing.assert_allclose(
            np.array(gradients[name]), np.array(expected), atol=1e-5, err_msg=name
        )


def make_updated_run(tmp_path, *flags):
    """A run after one update, so that A of the adapters has a gradient too."""
    run = make_run(tmp_path, *flags)
    update_once(run, advantages=np.random.default_rng(5).normal(size=12))
    return run


def has_weights(learner, weights):
    """Whether the trainable weights are exactly these, by name."""
    return all(mx.array_equal(array, weights[name]) for name, array in learner.trainable.items())


@pytest.fixture
def no_clipping(monkeypatch):
    """Gradients of any norm reach the optimizer unchanged."""
    monkeypatch.setattr(
        update, "clip_gradient", lambda gradient, _: optim.clip_grad_norm(gradient, 1e9)
    )


@pytest.mark.parametrize(
    "flags",
    [
        "",
        "--importance-sampling-level sequence --epsilon 0.02 --epsilon-high 0.02",
        "--epsilon 0.05 --epsilon-high 0.4",
        "--loss-type dr_grpo",
        "--loss-type cispo --epsilon-high 1.2",
        "--loss-type sapo --temp 1.2 --beta 0.5",
        "--loss-type grpo --importance-sampling-level sequence --beta 0.5",
        "--beta 0.5 --top-k 5",
    ],
)
def test_loss_and_gradient_of_an_update_equal_those_of_the_oracle(tmp_path, no_clipping, flags):
    """
    The oracle differentiates by log-probabilities with finite differences. The chain rule turns
    these slopes into the expected gradient of the adapters.
    """
    run = make_updated_run(tmp_path, *flags.split())
    objective = run.config.objective
    samples = shift_logprobs(sample_first_prompts(run), 0.5)
    old, mask = stack_logprobs(samples)
    ref = (old - 0.5) * mask if objective.beta else None
    batches = make_batches(samples, 150)
    assert len(batches) > 1

    case = oracle.Case(
        new=compute_logprobs(run, batches),
        old=old,
        ref=np.zeros_like(old) if ref is None else ref,
        advantages=np.array([sample.advantage for sample in samples]),
        mask=mask,
        max_tokens=run.config.sampling.max_tokens,
    )
    names = "loss_type importance_sampling_level epsilon epsilon_high beta".split()
    settings = {name: getattr(objective, name) for name in names}
    expected_loss = oracle.loss(case, **settings)

    batches = add_column(batches, "old_logprobs", old)
    if ref is not None:
        batches = add_column(batches, "ref_logprobs", ref)
    expected_gradients = gradient_by_adapters(run, batches, oracle.gradient(case, **settings))
    result, gradients = record_gradient(run, batches)

    assert result.loss == pytest.approx(expected_loss, abs=1e-5)
    assert_gradients_close(gradients, expected_gradients)
    if objective.loss_type != "sapo":
        assert result.means["clip_frac"] > 0


def test_a_step_holds_the_gradient_and_neither_old_masters_nor_old_moments():
    """All weights train, no activations are kept, and one batch has rows of equal lengths."""
    num_tokens = 12
    config = make_config("--lora-rank", "0", "--max-tokens", "12")
    model = gwen.make_random_model("random:30m")
    sizes = MemoryDependentSizes(1, 1, len(model.layers))
    learner = update.Learner(model, config, StepLoss(config, sizes))
    ids = np.random.default_rng(0).integers(0, 8000, (2, num_tokens)).tolist()
    logprobs = np.full(num_tokens, -9.0)
    samples = [
        Sample([5] * 8, response_ids, range(num_tokens), 0, logprobs, advantage=row - 1.0)
        for row, response_ids in enumerate(ids)
    ]
    batches = make_batches(samples, 1_000_000, "off")
    mx.eval(learner.trainable, learner.optimizer.state, learner.model.parameters(), batches)

    peak = measure_peak(lambda: update.take_optimizer_step(learner, batches, 1e-4)[1]["loss"])

    assert peak < 1.9 * sum(array.nbytes for array in learner.trainable.values())


@pytest.mark.parametrize("loss", ["grpo", "dr_grpo", "dapo"])
def test_the_gradient_of_a_mini_batch_is_that_of_three_times_the_loss_of_its_groups(
    tmp_path, no_clipping, loss
):
    """
    A token weighs the same in each mini-batch, as in TRL: dapo divides by the mean number of tokens
    of a mini-batch. Therefore the mean of the mini-batches is the loss of the whole rollout.
    """
    run = make_updated_run(tmp_path, "--loss-type", loss, "--mini-batches", "3")
    samples = shift_logprobs(sample_first_prompts(run), 0.5)
    old, mask = stack_logprobs(samples)
    assert len({mask[first_row : first_row + 4].sum() for first_row in (0, 4, 8)}) > 1
    batches = add_column(make_batches(samples, 100_000, num_mini_batches=3), "old_logprobs", old)
    new = compute_logprobs(run, batches)
    advantages = np.array([sample.advantage for sample in samples])
    max_tokens = run.config.sampling.max_tokens
    case = oracle.Case(new, old, np.zeros_like(new), advantages, mask, max_tokens)

    result, _ = record_gradient(run, batches)

    assert result.loss == pytest.approx(oracle.loss(case, loss_type=loss), abs=1e-5)
    assert result.means["clip_frac"] > 0
    for group, gradients in enumerate(run.learner.optimizer.grads):
        group_advantages = np.where(np.arange(12) // 4 == group, advantages, 0.0)
        group_case = case._replace(advantages=group_advantages)
        slopes = 3 * oracle.gradient(group_case, loss_type=loss)
        assert_gradients_close(gradients, gradient_by_adapters(run, batches, slopes))
    assert group == 2


def test_later_mini_batches_and_passes_compare_with_the_policy_before_the_first(tmp_path):
    """
    Six steps of one update equal six single steps that all get the log-probabilities before the
    first. The weights end elsewhere if each step takes its own policy for the old one, or the
    sampler's log-probabilities for the trainer's.
    """

    def make_run_and_batches(*flags):
        common_flags = "--warmup-steps 0 --epsilon 0.1 --target-kl 0".split()
        run = make_run(tmp_path, *common_flags, *flags)
        use_sgd(run)
        samples = shift_logprobs(sample_first_prompts(run), 0.3)
        return run, make_batches(samples, 100_000, num_mini_batches=3)

    run, batches = make_run_and_batches("--mini-batches", "3", "--num-iterations", "2")
    groups_per_batch = [{row // 4 for row in batch.rows} for batch in batches]
    assert groups_per_batch == [{0}, {1}, {2}]
    first_logprobs = compute_logprobs(run, batches)
    assert update.run_optimizer_steps(run.learner, batches, 1.0).means["clip_frac"] > 0

    def distance_after_single_steps(old_logprobs):
        other, batches = make_run_and_batches()
        if old_logprobs is not None:
            batches = add_column(batches, "old_logprobs", old_logprobs)
        for batch in [*batches, *batches]:
            update.take_optimizer_step(other.learner, [batch], 1.0)
        other_weights = other.learner.trainable
        return max(
            mx.abs(array - other_weights[name]).max().item()
            for name, array in run.learner.trainable.items()
        )

    assert distance_after_single_steps(first_logprobs) < 1e-5
    assert distance_after_single_steps(None) > 1e-3

    other, _ = make_run_and_batches()
    sampled_logprobs, _ = stack_logprobs(shift_logprobs(sample_first_prompts(other), 0.3))
    assert distance_after_single_steps(sampled_logprobs) > 1e-3


def test_a_mini_batch_without_advantages_causes_no_optimizer_step(tmp_path):
    run = make_run(tmp_path, "--mini-batches", "3")
    samples = sample_first_prompts(run, [[1, -1, 0, 0], [0, 0, 0, 0], [0, 0, 1, -1]])
    samples = mark_for_update(run.config, samples, 0)
    batches = make_batches(samples, 100_000, num_mini_batches=3)

    result = update.run_optimizer_steps(run.learner, batches, 1e-4)

    assert run.learner.optimizer.step.item() == 2
    assert result.num_with_gradient == 4
    assert result.num_skipped_now == 0
    assert result.moved is not None
    assert result.grad_norm > 0


@pytest.mark.parametrize("num_iterations", ["1", "4"])
def test_the_mismatch_compares_the_policy_before_the_update_with_the_sampler(
    tmp_path, monkeypatch, num_iterations
):
    monkeypatch.setattr("step.loss.MISMATCH_CAP", 1.2)
    flags = f"--learning-rate 0.02 --warmup-steps 0 --num-iterations {num_iterations}"
    run = make_run(tmp_path, *flags.split())
    samples = shift_logprobs(sample_first_prompts(run), 0.3)
    batches = make_batches(samples, 150)
    sampled_logprobs, mask = stack_logprobs(samples)
    gap = (compute_logprobs(run, batches) - sampled_logprobs)[mask]

    means = update.run_optimizer_steps(run.learner, batches, 0.02).means
    assert means["mismatch/logprob_abs_mean"] == pytest.approx(np.abs(gap).mean(), abs=1e-4)
    assert means["mismatch/logprob_abs_max"] == pytest.approx(np.abs(gap).max(), abs=1e-4)
    assert means["mismatch/ratio_mean"] == pytest.approx(np.exp(gap).mean(), abs=1e-4)
    assert means["mismatch/ratio_max"] == pytest.approx(np.exp(gap).max(), abs=1e-4)
    assert means["mismatch/over_cap_frac"] == pytest.approx((np.exp(gap) > 1.2).mean())


def test_the_old_policy_is_the_policy_before_the_update_and_not_the_reference(tmp_path):
    """After the policy has left the reference, a KL weight near 0 changes almost nothing."""
    run = make_run(tmp_path, "--learning-rate", "0.02", "--warmup-steps", "0")
    update_once(run)
    batches = make_batches(sample_first_prompts(run), 150)
    result, gradients = record_gradient(run, batches)
    assert result.grad_norm > 0.05

    run.learner.loss = StepLoss(run.config.copy_with_settings(beta=1e-9), run.sizes)
    batches = update.add_reference_logprobs(run.learner, batches)
    kl_result, kl_gradients = record_gradient(run, batches)

    assert kl_result.means["kl"] > 0.005
    assert kl_result.means["clip_frac"] == 0
    assert_gradients_close(kl_gradients, gradients)


def test_the_gradient_that_the_optimizer_gets_is_clipped_to_the_maximal_norm(tmp_path):
    run = make_run(tmp_path, "--max-grad-norm", "0.01")
    assert update_once(run).grad_norm > 0.05
    state = tree_flatten(run.learner.optimizer.state)
    first_moments = [array for name, array in state if name.endswith(".m")]
    norm = sum((moment**2).sum().item() for moment in first_moments) ** 0.5
    assert norm == pytest.approx(0.1 * 0.01, rel=1e-3)  # 1 - beta_1 = 0.1


def test_the_reference_is_the_model_without_its_adapters_and_not_the_old_policy(tmp_path):
    run = make_run(tmp_path, "--beta", "0.1", "--learning-rate", "0.01")
    update_once(run)
    batches = make_batches(sample_first_prompts(run), 100_000)
    new_run = GrpoRun(run.config, tmp_path)
    expected_batches = update.add_reference_logprobs(new_run.learner, batches)
    batches = update.add_reference_logprobs(run.learner, batches)
    for batch, expected in zip(batches, expected_batches, strict=True):
        ref_logprobs = np.array(batch.columns["ref_logprobs"])
        expected_logprobs = np.array(expected.columns["ref_logprobs"])
        np.testing.assert_allclose(ref_logprobs, expected_logprobs, atol=1e-5)
        gap = np.abs(ref_logprobs - np.array(batch.sampled_logprobs)) * np.array(batch.mask)
        assert gap.max() > 1e-3


def test_with_rank_0_all_weights_train_from_float32_masters_of_a_16_bit_model(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("GWEN_DTYPE", "float16")
    flags = "--lora-rank 0 --learning-rate 1e-6 --warmup-steps 0 --beta 0.1"
    run = make_run(tmp_path, *flags.split())
    assert run.base is not None
    assert run.judge.model is run.base
    assert run.learner.loss_scale.dynamic
    assert {array.dtype for array in run.learner.trainable.values()} == {mx.float32}
    old_masters = dict(run.learner.trainable)

    result = update_once(run)

    assert result.grad_norm > 0
    assert not result.num_skipped_now
    for name, array in run.learner.trainable.items():
        assert not mx.array_equal(array, old_masters[name]), name
    assert run.learner.trainable.keys() == old_masters.keys()

    # The masters keep steps of 1e-6, and the weights are their rounded copies.
    weights = dict(tree_flatten(run.model.parameters()))
    assert {array.dtype for array in weights.values()} == {mx.float16}
    for name, array in run.learner.trainable.items():
        np.testing.assert_array_equal(np.array(weights[name]), np.array(array.astype(mx.float16)))


@pytest.mark.parametrize(("warmup_steps", "lr"), [(0, 0.001), (4, 0.00025)])
def test_the_first_adam_step_has_the_size_of_the_learning_rate(
    tmp_path, no_clipping, warmup_steps, lr
):
    """Without bias correction it would be 3.2 times too large."""
    flags = f"--learning-rate 0.001 --warmup-steps {warmup_steps} --target-kl 0"
    run = make_run(tmp_path, *flags.split())
    old_masters = dict(run.learner.trainable)
    assert update_once(run).lr == lr
    step_sizes = [
        mx.abs(run.learner.trainable[name] - array).max().item()
        for name, array in old_masters.items()
        if name.endswith("lora_b")
    ]
    assert max(step_sizes) == pytest.approx(lr, rel=0.02)


def test_a_step_of_sgd_is_the_rate_times_the_gradient_and_leaves_no_moments(tmp_path):
    # With this target, no step is cut short.
    flags = "--lora-rank 0 --optimizer sgd --target-kl 0.9"
    run = make_run(tmp_path, *flags.split())
    learner = run.learner
    samples = sample_first_prompts(run, grpo.group_advantages(np.eye(3, 4)))
    batches = make_batches(samples, 100_000)
    old_masters = {name: np.array(array) for name, array in learner.trainable.items()}
    gradient, *_ = update.compute_gradient(learner, batches)
    clipped_gradient, norm = optim.clip_grad_norm(gradient, 1.0)
    assert norm.item() > 0.1
    assert not learner.state()["moments"].keys() - {"step", "learning_rate"}

    update.run_optimizer_steps(learner, batches, 1e-3)

    for name, array in tree_flatten(clipped_gradient):
        expected = old_masters[name] - 1e-3 * np.array(array)
        np.testing.assert_allclose(np.array(learner.trainable[name]), expected, atol=1e-7)

    # The state can be loaded, as a resumed run does.
    learner.load_state(learner.state())
    assert learner.optimizer.step.item() == 1
    update.run_optimizer_steps(learner, batches, 1e-3)


def test_the_learning_rate_warms_up_and_decays():
    config = make_config("--learning-rate", "1.0", "--warmup-steps", "4", "--steps", "14")
    rates = [update.scheduled_learning_rate(config, step) for step in range(14)]
    assert rates[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert rates[4:] == sorted(rates[4:], reverse=True)
    assert 0.1 < rates[-1] < 0.2


def test_the_loss_scale_keeps_gradients_that_would_vanish_in_float16(tmp_path, monkeypatch):
    """For advantages of 1e-7, the float16 backward pass gives 0 unless the loss is scaled."""
    tiny_advantages = [1e-7, -1e-7] * 6
    monkeypatch.setenv("GWEN_DTYPE", "float32")
    float32_run = make_run(tmp_path)
    # Both runs use these batches, because a float16 model may draw other tokens.
    batches = make_batches(sample_first_prompts(float32_run, tiny_advantages), 100_000)
    expected_norm = update.run_optimizer_steps(float32_run.learner, batches, 1e-3).grad_norm

    monkeypatch.setenv("GWEN_DTYPE", "float16")
    run = make_run(tmp_path)
    assert run.learner.loss_scale == update.LossScale(2.0**15, dynamic=True)
    old_masters = dict(run.learner.trainable)
    norm = update.run_optimizer_steps(run.learner, batches, 1e-3).grad_norm
    assert norm == pytest.approx(expected_norm, rel=0.05)
    assert not has_weights(run.learner, old_masters)

    run = make_run(tmp_path)
    run.learner.loss_scale = update.LossScale()
    assert update_once(run, advantages=tiny_advantages).grad_norm == 0


def test_the_loss_scale_backs_off_at_an_overflow_and_grows_again(tmp_path, monkeypatch):
    """
    With the scale 2^24, gradients exceed float16's maximum of 65504. The scale falls until the step
    fits, and no weight changes before that.
    """
    monkeypatch.setenv("GWEN_DTYPE", "float16")
    run = make_run(tmp_path)
    run.learner.loss_scale = update.LossScale(2.0**24, dynamic=True)
    old_masters = dict(run.learner.trainable)

    num_skipped = 0
    while update_once(run).num_skipped_now:
        num_skipped += 1
        assert run.learner.loss_scale == update.LossScale(2.0 ** (24 - num_skipped), 0, True)
        assert has_weights(run.learner, old_masters)
    assert 1 <= num_skipped < 15
    assert run.learner.num_skipped == num_skipped
    assert run.learner.failures == 0
    assert not has_weights(run.learner, old_masters)

    scale = run.learner.loss_scale.value
    run.learner.loss_scale = run.learner.loss_scale._replace(good_steps=199)
    update_once(run)
    assert run.learner.loss_scale == update.LossScale(2 * scale, 0, True)


# ---- errors that stop a run


def test_a_third_update_in_a_row_without_a_finite_gradient_stops_and_changes_nothing(tmp_path):
    run = make_run(tmp_path)
    infinite_advantages = [np.inf] * 12
    for _ in range(2):
        assert update_once(run, advantages=infinite_advantages).num_skipped_now == 1
        update_once(run)
    masters = dict(run.learner.trainable)
    for _ in range(2):
        assert update_once(run, advantages=infinite_advantages).num_skipped_now == 1
    num_changes = run.learner.num_changes

    expected_text = r"loss was not finite in 3 updates.*--learning-rate below 0.004"
    with pytest.raises(ValueError, match=expected_text):
        update_once(run, advantages=infinite_advantages)

    assert run.learner.num_changes == num_changes
    assert run.learner.num_skipped == 4
    assert has_weights(run.learner, masters)


# ---- how far an update may move the policy


def make_run_with_large_steps(tmp_path, *flags):
    """A run whose first step is far too large: it moves the policy by some 5 nats per token."""
    return make_run(tmp_path, "--learning-rate", "0.1", "--warmup-steps", "0", *flags)


def estimate_kl(old_logprobs, new_logprobs, mask):
    """The k3 estimate of KL(old, new), in numpy."""
    ratio = np.exp(new_logprobs - old_logprobs)
    return ((ratio - 1 - np.log(ratio)) * mask).sum() / mask.sum()


FULL = ("--lora-rank", "0")
SGD = (*FULL, "--optimizer", "sgd", "--learning-rate", "30")


@pytest.mark.parametrize(
    "flags", [(), ("--num-iterations", "3"), FULL, SGD, ("--target-kl", "0.002")]
)
def test_no_update_moves_the_policy_further_than_one_and_a_half_times_the_target(tmp_path, flags):
    run = make_run_with_large_steps(tmp_path, *flags)
    num_backtracks = 0
    for _ in range(3):
        samples = sample_first_prompts(run)
        batches = make_batches(samples, 100_000)
        _, mask = stack_logprobs(samples)
        old_logprobs = compute_logprobs(run, batches)
        result = update_once(run)
        kl = estimate_kl(old_logprobs, compute_logprobs(run, batches), mask)
        assert result.moved == pytest.approx(kl, rel=1e-2, abs=1e-6)
        assert result.moved <= trust_region.SLACK * run.config.optimizer.target_kl
        num_backtracks += result.num_backtracks
    assert num_backtracks
    assert run.learner.lr_scale < 1


def test_backtracking_ends_at_the_step_that_the_smaller_rate_would_give(tmp_path):
    """The masters agree up to rounding, the moments bit for bit: they do not depend on the rate."""
    run = make_run_with_large_steps(tmp_path)
    old_masters = dict(run.learner.trainable)
    result = update_once(run)
    assert result.num_backtracks

    expected_run = make_run_with_large_steps(tmp_path, "--target-kl", "0")
    expected_run.learner.lr_scale = result.lr_scale
    update_once(expected_run)

    masters = run.learner.trainable
    largest_change = max(
        mx.abs(array - old_masters[name]).max().item() for name, array in masters.items()
    )
    for name, expected in expected_run.learner.trainable.items():
        np.testing.assert_allclose(
            np.array(masters[name]), np.array(expected), atol=1e-4 * largest_change
        )
    expected_state = dict(tree_flatten(expected_run.learner.optimizer.state))
    for name, array in tree_flatten(run.learner.optimizer.state):
        if name != "learning_rate":
            assert mx.array_equal(array, expected_state[name]), name


def test_the_measured_kl_ignores_padding():
    old_logprobs = mx.array([[-1.0, -2.0, -120.0]])
    new_logprobs = mx.array([[-1.5, -1.8, -20.0]])
    (batch,) = make_batches([Sample([1], [2, 3], range(2), 0)], 9)
    probe = [batch._replace(mask=mx.array([[1.0, 1.0, 0.0]]), old_logprobs=old_logprobs)]
    change = np.array([-0.5, 0.2])
    expected_kl = (np.exp(change) - change - 1).mean()
    assert trust_region.measure_kl(probe, [new_logprobs]) == pytest.approx(expected_kl, rel=1e-5)


@pytest.mark.parametrize("kl", [1e9, mx.inf, mx.nan])
def test_a_step_whose_kl_stays_too_large_is_undone(tmp_path, monkeypatch, kl):
    run = make_run_with_large_steps(tmp_path)
    update_once(run)
    masters = dict(run.learner.trainable)
    weights = dict(tree_flatten(run.model.parameters()))
    # The last value is that of the earlier step.
    measured_kls = iter([kl] * trust_region.MOST_TRIES + [1e-4])
    monkeypatch.setattr(trust_region, "measure_kl", lambda *_: next(measured_kls))

    result = update_once(run)

    assert (result.moved, result.num_backtracks) == (1e-4, trust_region.MOST_TRIES)
    assert run.learner.lr_scale == result.lr_scale, "an undone step must not raise the rate"
    assert has_weights(run.learner, masters)
    for name, array in tree_flatten(run.model.parameters()):
        assert mx.array_equal(array, weights[name]), name


def test_small_steps_raise_the_learning_rate_to_the_scheduled_one(tmp_path, monkeypatch):
    run = make_run(tmp_path, "--learning-rate", "1e-5", "--warmup-steps", "0")
    run.learner.lr_scale = 0.05
    lr_scales = [update_once(run).lr_scale for _ in range(3)]
    assert lr_scales == pytest.approx([0.05, 0.0625, 0.078125])

    run.learner.lr_scale = 0.9
    lr_scales = [update_once(run).lr_scale for _ in range(3)]
    assert lr_scales == pytest.approx([0.9, 1.0, 1.0])

    # The first step may shrink the rate to any scale, later steps of the update to half at most.
    run = make_run(tmp_path, "--num-iterations", "2")
    bounded_step = trust_region.BoundedStep(0.3, kl=1.0, num_backtracks=1)
    monkeypatch.setattr(update, "backtrack_to_target_kl", lambda *_: bounded_step)
    assert update_once(run).lr_scale == pytest.approx(0.3 * 0.5)


@pytest.mark.parametrize(
    ("budget", "sharing"), [(100_000, "off"), (100_000, "on"), (1, "off"), (90, "on")]
)
def test_successive_kl_probes_cover_all_rows_of_a_large_rollout_once(
    tmp_path, monkeypatch, budget, sharing
):
    run = make_run(tmp_path)
    samples = sample_first_prompts(run)
    batches = []
    for batch in make_batches(samples, budget, sharing):
        logprobs, _ = run.learner.loss.logprobs_and_entropies(run.model, batch, gradient=True)
        batches.append(batch._replace(old_logprobs=logprobs))
    num_tokens = sum(len(sample.loss_positions) for sample in samples)
    monkeypatch.setattr(trust_region, "PROBE_TOKENS", num_tokens // 3)

    all_rows = []
    for step in range(7, 10):
        probe = trust_region.select_kl_probe(batches, step)
        logprobs = update.install_weights_and_compute_logprobs(
            run.learner, probe, run.learner.trainable
        )
        # The policy has not changed.
        assert trust_region.measure_kl(probe, logprobs) < 1e-6
        probe_rows = [row for batch in probe for row in batch.rows]
        assert len(probe_rows) <= 6
        all_rows += probe_rows
    assert sorted(all_rows) == list(range(12))


# ---- work that an update avoids


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (("--target-kl", "0"), 1),
        ((), 2),  # the KL of the update is measured on a few tokens, which here are all tokens
        (("--target-kl", "0", "--beta", "0.1"), 2),
        (("--num-iterations", "3"), 6),
        (("--beta", "0.1", "--num-iterations", "2"), 5),
    ],
)
def test_an_update_counts_the_rows_that_pass_through_the_model(tmp_path, flags, expected):
    run = make_run(tmp_path, "--target-kl", "1000", *flags)
    assert update_once(run, budget=150).num_forwards == expected * 12


def test_rows_without_loss_positions_are_not_computed_and_other_rows_weigh_the_same(tmp_path):
    run = make_run(tmp_path, "--loss-type", "grpo")
    samples = sample_first_prompts(run)
    full_result, _ = record_gradient(run, make_batches(samples, 150))

    # Every second row loses its tokens.
    even_samples = list(samples)
    for row in range(1, 12, 2):
        even_samples[row] = samples[row]._replace(loss_positions=(), weight=0.0)
    result, gradients = record_gradient(run, make_batches(even_samples, 150))
    # The update computes six rows, and six more measure its KL.
    assert result.num_forwards == 6 + 6

    # Such a row counts like a row with the advantage 0: the mean is still over all 12 rows.
    advantages = [sample.advantage for sample in samples] * np.array([1.0, 0.0] * 6)
    expected_samples = sample_first_prompts(run, advantages)
    expected, expected_gradients = record_gradient(run, make_batches(expected_samples, 150))
    assert result.loss == pytest.approx(expected.loss, abs=1e-6)
    assert result.loss != pytest.approx(full_result.loss, abs=1e-3)
    assert_gradients_close(gradients, expected_gradients)

    # An update without rows has no figures.
    result = update.run_optimizer_steps(run.learner, [], 1e-3)
    assert result.loss is None
    assert result.grad_norm is None
    assert result.pad_frac is None
    assert result.num_skipped_now == 0
    assert set(result.means.values()) == {None}
    assert result.means.keys() == expected.means.keys()
