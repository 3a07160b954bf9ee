"""What the loss sees, and what an update changes, on the bundled model."""

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


# ---- what the loss sees


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
def test_the_trainer_scores_the_recorded_ids_as_the_sampler_did(tmp_path, flags):
    """Temperature, support, positions, padding and prompt are all in these numbers: any mistake in one shows."""
    run = make_run(tmp_path, *flags.split())
    samples = sample_first_prompts(run)
    for budget in (1, 150, 100_000):
        seen = []
        for batch in make_batches(samples, budget):
            logprobs, _ = run.learner.loss.logprobs_and_entropies(run.model, batch, gradient=True)
            gap = mx.abs(logprobs - batch.sampled_logprobs) * batch.mask
            assert gap.max().item() < 1e-4, budget
            seen += batch.rows
        assert sorted(seen) == list(range(12))


def test_a_loss_sees_the_policy_s_entropies_and_what_the_sampler_recorded(tmp_path):
    run, seen = make_run(tmp_path), []
    (batch,) = make_batches(sample_first_prompts(run), 100_000)
    loss = run.learner.loss
    loss.loss_function = lambda tokens, objective: (
        seen.append(tokens) or grpo.LOSSES["dapo"](tokens, objective)
    )
    loss.compute_batch_loss(run.model, batch)
    np.testing.assert_allclose(
        np.array(seen[0].entropies),
        np.array(loss.logprobs_and_entropies(run.model, batch)[1]),
        atol=1e-5,
    )
    assert mx.array_equal(seen[0].sampled_logprobs, batch.sampled_logprobs)


# ---- what an update changes


def weighted_gradient(run, batches, slopes):
    """d sum(slopes * logprobs) / d adapters by name, slopes (N, T)."""
    slopes = mx.array(slopes, mx.float32)

    def total(model):
        parts = [
            (b, run.learner.loss.logprobs_and_entropies(model, b, gradient=True)[0])
            for b in batches
        ]
        return sum(
            (part * b.mask * slopes[mx.array(b.rows), : part.shape[1]]).sum() for b, part in parts
        )

    return dict(tree_flatten(nn.value_and_grad(run.model, total)(run.model)[1]))


def assert_close(found, expected):
    for name, gradient in expected.items():
        np.testing.assert_allclose(
            np.array(found[name]), np.array(gradient), atol=1e-5, err_msg=name
        )


def warm(run):
    """After an update, so that A of the adapters has a gradient too."""
    update_once(run, advantages=np.random.default_rng(5).normal(size=12))
    return run


@pytest.fixture
def unclipped(monkeypatch):
    """Gradients of any norm pass as they are."""
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
def test_loss_and_gradient_of_an_update_equal_the_oracle_s(tmp_path, unclipped, flags):
    """The gradient of the adapters is that of the log-probabilities, weighted with the oracle's finite differences."""
    run = warm(make_run(tmp_path, *flags.split()))
    config, samples = run.config, shift_logprobs(sample_first_prompts(run), 0.5)
    old, mask = stack_logprobs(samples)
    ref = (old - 0.5) * mask if config.objective.beta else None
    batches = make_batches(samples, 150)
    assert len(batches) > 1
    case = oracle.Case(
        new=compute_logprobs(run, batches),
        old=old,
        ref=np.zeros_like(old) if ref is None else ref,
        advantages=np.array([one.advantage for one in samples]),
        mask=mask,
        max_tokens=config.sampling.max_tokens,
    )
    batches = add_column(batches, "old_logprobs", old)
    batches = batches if ref is None else add_column(batches, "ref_logprobs", ref)
    names = "loss_type importance_sampling_level epsilon epsilon_high beta".split()
    settings = {name: getattr(config.objective, name) for name in names}
    result, grads = record_gradient(run, batches)
    assert result.loss == pytest.approx(oracle.loss(case, **settings), abs=1e-5)
    assert_close(grads, weighted_gradient(run, batches, oracle.gradient(case, **settings)))
    if config.objective.loss_type != "sapo":
        assert result.means["clip_frac"] > 0


def test_a_step_holds_its_gradient_and_neither_old_masters_nor_old_moments():
    """With a learner of all weights that keeps no activations, and one batch of rows of equal lengths."""
    config, num_tokens = make_config("--lora-rank", "0", "--max-tokens", "12"), 12
    model = gwen.make_random_model("random:30m")
    learner = update.Learner(
        model, config, StepLoss(config, MemoryDependentSizes(1, 1, len(model.layers)))
    )
    ids = np.random.default_rng(0).integers(0, 8000, (2, num_tokens)).tolist()
    own, logprobs = range(num_tokens), np.full(num_tokens, -9.0)
    samples = [
        Sample([5] * 8, its, own, 0, logprobs, advantage=row - 1.0) for row, its in enumerate(ids)
    ]
    batches = make_batches(samples, 1_000_000, "off")
    mx.eval(learner.trainable, learner.optimizer.state, learner.model.parameters(), batches)
    peak = measure_peak(lambda: update.take_optimizer_step(learner, batches, 1e-4)[1]["loss"])
    assert peak < 1.9 * sum(array.nbytes for array in learner.trainable.values())


@pytest.mark.parametrize("loss", ["grpo", "dr_grpo", "dapo"])
def test_a_mini_batch_has_the_gradient_of_its_groups_and_a_token_weighs_the_same_in_each(
    tmp_path, unclipped, loss
):
    """As in TRL: dapo divides by the mean number of tokens of a mini-batch. So their mean is the whole rollout's."""
    run = warm(make_run(tmp_path, "--loss-type", loss, "--mini-batches", "3"))
    samples = shift_logprobs(sample_first_prompts(run), 0.5)
    old, mask = stack_logprobs(samples)
    assert len({mask[part : part + 4].sum() for part in (0, 4, 8)}) > 1
    batches = add_column(make_batches(samples, 100_000, num_mini_batches=3), "old_logprobs", old)
    new, advantages = compute_logprobs(run, batches), np.array([one.advantage for one in samples])
    case = oracle.Case(
        new, old, np.zeros_like(new), advantages, mask, run.config.sampling.max_tokens
    )
    result, _ = record_gradient(run, batches)
    assert (
        result.loss == pytest.approx(oracle.loss(case, loss_type=loss), abs=1e-5)
        and result.means["clip_frac"] > 0
    )
    for part, found in enumerate(run.learner.optimizer.grads):
        its_own = case._replace(advantages=np.where(np.arange(12) // 4 == part, advantages, 0.0))
        assert_close(
            found, weighted_gradient(run, batches, 3 * oracle.gradient(its_own, loss_type=loss))
        )
    assert part == 2


def test_later_mini_batches_and_passes_compare_with_the_policy_before_the_first(tmp_path):
    """
    Six steps at once equal six single ones, each told the log-probabilities before the first. Taking each step's own
    policy for the old one, or the sampler's record as the trainer's, ends elsewhere.
    """
    common = ("--warmup-steps", "0", "--epsilon", "0.1", "--target-kl", "0")

    def begin(*flags):
        run = make_run(tmp_path, *common, *flags)
        use_sgd(run)
        return run, make_batches(
            shift_logprobs(sample_first_prompts(run), 0.3), 100_000, num_mini_batches=3
        )

    run, batches = begin("--mini-batches", "3", "--num-iterations", "2")
    assert [{row // 4 for row in batch.rows} for batch in batches] == [{0}, {1}, {2}]
    first = compute_logprobs(run, batches)
    assert update.run_optimizer_steps(run.learner, batches, 1.0).means["clip_frac"] > 0

    def distance(old_logprobs):
        other, batches = begin()
        batches = (
            batches if old_logprobs is None else add_column(batches, "old_logprobs", old_logprobs)
        )
        for batch in [*batches, *batches]:
            update.take_optimizer_step(other.learner, [batch], 1.0)
        theirs = other.learner.trainable
        return max(
            mx.abs(array - theirs[name]).max().item()
            for name, array in run.learner.trainable.items()
        )

    assert distance(first) < 1e-5 < 1e-3 < distance(None)
    assert distance(stack_logprobs(shift_logprobs(sample_first_prompts(begin()[0]), 0.3))[0]) > 1e-3


def test_a_mini_batch_without_a_row_that_teaches_is_no_step(tmp_path):
    run = make_run(tmp_path, "--mini-batches", "3")
    samples = sample_first_prompts(run, [[1, -1, 0, 0], [0, 0, 0, 0], [0, 0, 1, -1]])
    result = update.run_optimizer_steps(
        run.learner,
        make_batches(mark_for_update(run.config, samples, 0), 100_000, num_mini_batches=3),
        1e-4,
    )
    assert (
        run.learner.optimizer.step.item(),
        result.num_with_gradient,
        result.num_skipped_now,
    ) == (2, 4, 0)
    assert result.moved is not None and result.grad_norm > 0


@pytest.mark.parametrize("num_iterations", ["1", "4"])
def test_the_mismatch_is_that_of_the_policy_before_the_update_with_the_sampler(
    tmp_path, monkeypatch, num_iterations
):
    monkeypatch.setattr("step.loss.MISMATCH_CAP", 1.2)
    run = make_run(
        tmp_path,
        "--learning-rate",
        "0.02",
        "--warmup-steps",
        "0",
        "--num-iterations",
        num_iterations,
    )
    samples = shift_logprobs(sample_first_prompts(run), 0.3)
    batches, (old, mask) = make_batches(samples, 150), stack_logprobs(samples)
    gap = (compute_logprobs(run, batches) - old)[mask]
    means = update.run_optimizer_steps(run.learner, batches, 0.02).means
    assert means["mismatch/logprob_abs_mean"] == pytest.approx(np.abs(gap).mean(), abs=1e-4)
    assert means["mismatch/logprob_abs_max"] == pytest.approx(np.abs(gap).max(), abs=1e-4)
    assert means["mismatch/ratio_mean"] == pytest.approx(np.exp(gap).mean(), abs=1e-4)
    assert means["mismatch/ratio_max"] == pytest.approx(np.exp(gap).max(), abs=1e-4)
    assert means["mismatch/over_cap_frac"] == pytest.approx((np.exp(gap) > 1.2).mean())


def test_the_old_policy_is_the_one_that_updates_and_not_the_reference(tmp_path):
    """Once the policy has left its reference, a KL weight of next to nothing must change next to nothing."""
    run = make_run(tmp_path, "--learning-rate", "0.02", "--warmup-steps", "0")
    update_once(run)
    batches = make_batches(sample_first_prompts(run), 150)
    plain, grads = record_gradient(run, batches)
    run.learner.loss = StepLoss(run.config.copy_with_settings(beta=1e-9), run.sizes)
    result, same = record_gradient(run, update.add_reference_logprobs(run.learner, batches))
    assert plain.grad_norm > 0.05 and result.means["kl"] > 0.005 and result.means["clip_frac"] == 0
    assert_close(same, grads)


def test_the_gradient_that_the_optimizer_sees_has_at_most_the_given_norm(tmp_path):
    run = make_run(tmp_path, "--max-grad-norm", "0.01")
    assert update_once(run).grad_norm > 0.05
    moments = [a for name, a in tree_flatten(run.learner.optimizer.state) if name.endswith(".m")]
    assert sum((m**2).sum().item() for m in moments) ** 0.5 == pytest.approx(
        0.1 * 0.01, rel=1e-3
    )  # 1 - beta_1 = 0.1


def test_the_reference_is_the_model_without_its_adapters_and_not_the_old_policy(tmp_path):
    run = make_run(tmp_path, "--beta", "0.1", "--learning-rate", "0.01")
    update_once(run)
    batches = make_batches(sample_first_prompts(run), 100_000)
    expected = update.add_reference_logprobs(GrpoRun(run.config, tmp_path).learner, batches)
    for ours, theirs in zip(
        update.add_reference_logprobs(run.learner, batches), expected, strict=True
    ):
        ref, its = (np.array(one.columns["ref_logprobs"]) for one in (ours, theirs))
        np.testing.assert_allclose(ref, its, atol=1e-5)
        assert (np.abs(ref - np.array(ours.sampled_logprobs)) * np.array(ours.mask)).max() > 1e-3


def test_with_rank_0_all_weights_train_from_float32_masters_of_a_16_bit_model(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("GWEN_DTYPE", "float16")
    run = make_run(
        tmp_path,
        "--lora-rank",
        "0",
        "--learning-rate",
        "1e-6",
        "--warmup-steps",
        "0",
        "--beta",
        "0.1",
    )
    assert run.base is not None and run.judge.model is run.base
    assert run.learner.loss_scale.dynamic
    assert {array.dtype for array in run.learner.trainable.values()} == {mx.float32}
    masters, result = dict(run.learner.trainable), update_once(run)
    assert result.grad_norm > 0 and not result.num_skipped_now
    moved = [
        name
        for name, array in run.learner.trainable.items()
        if not mx.array_equal(array, masters[name])
    ]
    assert set(moved) == set(masters)
    weights = dict(tree_flatten(run.model.parameters()))
    assert {array.dtype for array in weights.values()} == {mx.float16}
    for name, array in run.learner.trainable.items():  # where a step of 1e-6 is never lost
        np.testing.assert_array_equal(np.array(weights[name]), np.array(array.astype(mx.float16)))


@pytest.mark.parametrize(("warmup_steps", "lr"), [(0, 0.001), (4, 0.00025)])
def test_the_first_adam_step_has_the_size_of_the_learning_rate(
    tmp_path, unclipped, warmup_steps, lr
):
    """Without bias correction it would be 3.2 times too large."""
    flags = ("--learning-rate", "0.001", "--warmup-steps", f"{warmup_steps}", "--target-kl", "0")
    run = make_run(tmp_path, *flags)
    before = dict(run.learner.trainable)
    assert update_once(run).lr == lr
    steps = [
        mx.abs(run.learner.trainable[n] - before[n]).max().item()
        for n in before
        if n.endswith("lora_b")
    ]
    assert max(steps) == pytest.approx(lr, rel=0.02)


def test_a_step_of_sgd_is_its_rate_times_the_gradient_and_nothing_of_it_is_kept(tmp_path):
    run = make_run(
        tmp_path, "--lora-rank", "0", "--optimizer", "sgd", "--target-kl", "0.9"
    )  # no step is cut short
    learner, batches = (
        run.learner,
        make_batches(sample_first_prompts(run, grpo.group_advantages(np.eye(3, 4))), 100_000),
    )
    expected = {name: np.array(array) for name, array in learner.trainable.items()}
    grads, norm = optim.clip_grad_norm(update.compute_gradient(learner, batches)[0], 1.0)
    assert norm.item() > 0.1 and not learner.state()["moments"].keys() - {"step", "learning_rate"}
    update.run_optimizer_steps(learner, batches, 1e-3)
    for name, grad in tree_flatten(grads):
        np.testing.assert_allclose(
            np.array(learner.trainable[name]), expected[name] - 1e-3 * np.array(grad), atol=1e-7
        )
    learner.load_state(learner.state())
    assert learner.optimizer.step.item() == 1
    update.run_optimizer_steps(learner, batches, 1e-3)  # a run that goes on


def test_the_learning_rate_warms_up_and_decays():
    config = make_config("--learning-rate", "1.0", "--warmup-steps", "4", "--steps", "14")
    rates = [update.scheduled_learning_rate(config, step) for step in range(14)]
    assert rates[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert rates[4:] == sorted(rates[4:], reverse=True)
    assert 0.1 < rates[-1] < 0.2


def test_a_gradient_that_vanishes_in_float16_reaches_the_masters_through_the_loss_scale(
    tmp_path, monkeypatch
):
    """Advantages of 1e-7: the float16 backward pass rounds them away, and scaled by 2^15 keeps what float32 has."""
    tiny = [1e-7, -1e-7] * 6
    monkeypatch.setenv("GWEN_DTYPE", "float32")
    exact = make_run(tmp_path)
    batches = make_batches(
        sample_first_prompts(exact, tiny), 100_000
    )  # for both: the same draws may fall on other tokens in float16
    expected = update.run_optimizer_steps(exact.learner, batches, 1e-3).grad_norm
    monkeypatch.setenv("GWEN_DTYPE", "float16")
    run = make_run(tmp_path)
    assert run.learner.loss_scale == update.LossScale(2.0**15, dynamic=True)
    masters = dict(run.learner.trainable)
    found = update.run_optimizer_steps(run.learner, batches, 1e-3).grad_norm
    assert found == pytest.approx(expected, rel=0.05)
    assert any(
        not mx.array_equal(run.learner.trainable[name], array).item()
        for name, array in masters.items()
    )
    run = make_run(tmp_path)
    run.learner.loss_scale = update.LossScale()
    assert update_once(run, advantages=tiny).grad_norm == 0


def test_the_loss_scale_backs_off_at_an_overflow_and_grows_again(tmp_path, monkeypatch):
    """From 2^24, whose scaled gradients pass float16's 65504, down until the step fits; nothing moves before that."""
    monkeypatch.setenv("GWEN_DTYPE", "float16")
    run = make_run(tmp_path)
    run.learner.loss_scale = update.LossScale(2.0**24, dynamic=True)
    before, num_skipped = dict(run.learner.trainable), 0
    while update_once(run).num_skipped_now:
        num_skipped += 1
        assert run.learner.loss_scale == update.LossScale(2.0 ** (24 - num_skipped), 0, True)
        assert all(
            mx.array_equal(a, before[name]).item() for name, a in run.learner.trainable.items()
        )
    assert 1 <= num_skipped == run.learner.num_skipped < 15 and run.learner.failures == 0
    assert not all(
        mx.array_equal(a, before[name]).item() for name, a in run.learner.trainable.items()
    )
    scale = run.learner.loss_scale.value
    run.learner.loss_scale = run.learner.loss_scale._replace(good_steps=199)
    update_once(run)
    assert run.learner.loss_scale == update.LossScale(2 * scale, 0, True)


# ---- what stops a run


def test_a_third_update_in_a_row_without_a_finite_gradient_stops_and_changes_nothing(tmp_path):
    run = make_run(tmp_path)
    bad, before = [np.inf] * 12, dict(run.learner.trainable)
    for _ in range(2):
        assert update_once(run, advantages=bad).num_skipped_now == 1
        update_once(run)
        before = dict(run.learner.trainable)
    assert [update_once(run, advantages=bad).num_skipped_now for _ in range(2)] == [1, 1]
    changes = run.learner.num_changes
    with pytest.raises(
        ValueError,
        match=r"loss was not finite in 3 updates.*--learning-rate below 0.004",
    ):
        update_once(run, advantages=bad)
    assert run.learner.num_changes == changes and run.learner.num_skipped == 4
    assert all(mx.array_equal(a, before[name]).item() for name, a in run.learner.trainable.items())


# ---- how far an update may move the policy


def far(tmp_path, *flags):
    """A run whose first step is far too long: it moves the policy by some 5 nats a token."""
    return make_run(tmp_path, "--learning-rate", "0.1", "--warmup-steps", "0", *flags)


def sampled_policy(run):
    """float64 log-probabilities of the tokens of `sample` before any update, (N, T), and their mask."""
    run.first = getattr(run, "first", None) or sample_first_prompts(run)
    return compute_logprobs(run, make_batches(run.first, 100_000)), stack_logprobs(run.first)[1]


def moved(run, before):
    """The k3 estimate of KL(before, after), in numpy."""
    (old, mask), (new, _) = before, sampled_policy(run)
    ratio = np.exp(new - old)
    return ((ratio - 1 - np.log(ratio)) * mask).sum() / mask.sum()


FULL = ("--lora-rank", "0")
SGD = (*FULL, "--optimizer", "sgd", "--learning-rate", "30")


@pytest.mark.parametrize(
    "flags", [(), ("--num-iterations", "3"), FULL, SGD, ("--target-kl", "0.002")]
)
def test_no_update_moves_the_policy_further_than_one_and_a_half_times_the_target(tmp_path, flags):
    run, repeats = far(tmp_path, *flags), 0
    for _ in range(3):
        run.first = None
        before, result = sampled_policy(run), update_once(run)
        repeats += result.num_backtracks
        assert result.moved == pytest.approx(moved(run, before), rel=1e-2, abs=1e-6)
        assert result.moved <= trust_region.SLACK * run.config.optimizer.target_kl
    assert repeats and run.learner.lr_scale < 1


def test_a_step_that_is_taken_back_and_made_smaller_is_the_step_at_the_smaller_rate(tmp_path):
    """Its masters to rounding, its moments bit for bit: those do not depend on the rate."""
    run = far(tmp_path)
    before, result = dict(run.learner.trainable), update_once(run)
    assert result.num_backtracks
    other = far(tmp_path, "--target-kl", "0")
    other.learner.lr_scale = result.lr_scale
    update_once(other)
    largest = max(mx.abs(a - before[n]).max().item() for n, a in run.learner.trainable.items())
    for name, array in other.learner.trainable.items():
        np.testing.assert_allclose(
            np.array(run.learner.trainable[name]), np.array(array), atol=1e-4 * largest
        )
    ours, theirs = (dict(tree_flatten(one.learner.optimizer.state)) for one in (run, other))
    assert all(
        mx.array_equal(ours[name], theirs[name]).item() for name in ours if name != "learning_rate"
    )


def test_the_distance_of_two_policies_is_that_of_the_counted_tokens_whatever_the_padding_holds():
    old, new = mx.array([[-1.0, -2.0, -120.0]]), mx.array([[-1.5, -1.8, -20.0]])
    (batch,) = make_batches([Sample([1], [2, 3], range(2), 0)], 9)
    probe = [batch._replace(mask=mx.array([[1.0, 1.0, 0.0]]), old_logprobs=old)]
    change = np.array([-0.5, 0.2])
    assert trust_region.measure_kl(probe, [new]) == pytest.approx(
        (np.exp(change) - change - 1).mean(), rel=1e-5
    )


@pytest.mark.parametrize("distance", [1e9, mx.inf, mx.nan])
def test_a_step_that_goes_too_far_at_every_try_is_not_made(tmp_path, monkeypatch, distance):
    run = far(tmp_path)
    update_once(run)
    masters, weights = dict(run.learner.trainable), dict(tree_flatten(run.model.parameters()))
    found = iter(
        [distance] * trust_region.MOST_TRIES + [1e-4]
    )  # the last is that of the step before, if any
    monkeypatch.setattr(trust_region, "measure_kl", lambda *_: next(found))
    result = update_once(run)
    assert (result.moved, result.num_backtracks) == (1e-4, trust_region.MOST_TRIES)
    assert run.learner.lr_scale == result.lr_scale  # no recovery after a step that was dropped
    assert all(
        mx.array_equal(array, masters[name]).item() for name, array in run.learner.trainable.items()
    )
    assert all(
        mx.array_equal(array, weights[name]).item()
        for name, array in tree_flatten(run.model.parameters())
    )


def test_the_rate_recovers_after_small_steps_up_to_the_scheduled_one(tmp_path, monkeypatch):
    run = make_run(tmp_path, "--learning-rate", "1e-5", "--warmup-steps", "0")
    run.learner.lr_scale = 0.05
    assert [update_once(run).lr_scale for _ in range(3)] == pytest.approx([0.05, 0.0625, 0.078125])
    run.learner.lr_scale = 0.9
    assert [update_once(run).lr_scale for _ in range(3)] == pytest.approx([0.9, 1.0, 1.0])
    run = make_run(tmp_path, "--num-iterations", "2")
    monkeypatch.setattr(
        update,
        "backtrack_to_target_kl",
        lambda *_: trust_region.BoundedStep(0.3, kl=1.0, num_backtracks=1),
    )
    assert update_once(run).lr_scale == pytest.approx(
        0.3 * 0.5
    )  # as a first step fitted at this rate


@pytest.mark.parametrize(
    ("budget", "sharing"), [(100_000, "off"), (100_000, "on"), (1, "off"), (90, "on")]
)
def test_a_large_rollout_is_measured_in_parts_and_every_row_in_its_turn(
    tmp_path, monkeypatch, budget, sharing
):
    run = make_run(tmp_path)
    samples = sample_first_prompts(run)
    known = [
        batch._replace(
            old_logprobs=run.learner.loss.logprobs_and_entropies(run.model, batch, gradient=True)[0]
        )
        for batch in make_batches(samples, budget, sharing)
    ]
    num_tokens = sum(len(one.loss_positions) for one in samples)
    monkeypatch.setattr(trust_region, "PROBE_TOKENS", num_tokens // 3)
    seen = []
    for turn in range(7, 10):
        probe = trust_region.select_kl_probe(known, turn)
        present = update.install_weights_and_compute_logprobs(
            run.learner, probe, run.learner.trainable
        )
        assert trust_region.measure_kl(probe, present) < 1e-6  # the same rows, prompts and tokens
        part = [row for batch in probe for row in batch.rows]
        assert len(part) <= 6
        seen += part
    assert sorted(seen) == list(range(12))


# ---- no work for nothing


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (("--target-kl", "0"), 1),
        ((), 2),  # how far it moved is measured on a few tokens, which here are all of them
        (("--target-kl", "0", "--beta", "0.1"), 2),
        (("--num-iterations", "3"), 6),
        (("--beta", "0.1", "--num-iterations", "2"), 5),
    ],
)
def test_forwards_per_completion_are_the_rows_that_went_through_the_model(
    tmp_path, flags, expected
):
    assert (
        update_once(make_run(tmp_path, "--target-kl", "1000", *flags), budget=150).num_forwards
        == expected * 12
    )


def test_rows_without_a_counted_token_go_through_no_model_and_all_other_rows_count_as_before(
    tmp_path,
):
    run = make_run(tmp_path, "--loss-type", "grpo")
    samples, keep = sample_first_prompts(run), np.array([1.0, 0.0] * 6)
    whole, _ = record_gradient(run, make_batches(samples, 150))
    left = [
        one if row % 2 == 0 else one._replace(loss_positions=(), weight=0.0)
        for row, one in enumerate(samples)
    ]
    result, half = record_gradient(run, make_batches(left, 150))
    assert result.num_forwards == 6 + 6  # the second six measure how far the update moved
    # a row that is left out is a row without advantage: the mean is still over all 12
    expected, same = record_gradient(
        run, make_batches(sample_first_prompts(run, [one.advantage for one in samples] * keep), 150)
    )
    assert result.loss == pytest.approx(expected.loss, abs=1e-6) and result.loss != pytest.approx(
        whole.loss, abs=1e-3
    )
    assert_close(half, same)
    result = update.run_optimizer_steps(run.learner, [], 1e-3)
    assert (result.loss, result.grad_norm, result.pad_frac, result.num_skipped_now) == (
        None,
        None,
        None,
        0,
    )
    assert set(result.means.values()) == {None} and result.means.keys() == expected.means.keys()
