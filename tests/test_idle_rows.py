"""
The update leaves out idle rows, which are rows whose advantage is 0.

The gradient and the denominators stay the same, and every metric is still measured.
"""

import dataclasses

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from small_run import (
    add_column,
    make_run,
    record_gradient,
    sample_first_prompts,
    stack_logprobs,
    update_once,
)
from test_grpo import LOSSES

import grpo
import update
from reporting import journal
from reporting.console import format_step_line
from step import advantages, trust_region
from step.batch import make_batches
from step.loss import StepLoss

pytestmark = pytest.mark.slow
# Six of the twelve rows have a gradient.
ADVANTAGES = np.array([[1, -1, 0.5, -0.5], [0, 0, 0, 0], [1.5, 0, -1.5, 0]])

OWN_LOSS = "import grpo\ndef plain(tokens, objective):\n    return grpo.Loss(-(tokens.logprobs * tokens.mask).sum(), {})\n"


def make_marked_batches(run, samples, step=0):
    """The batches of the rows that this step computes."""
    marked = advantages.mark_for_update(
        run.config, samples, step, run.learner.loss.all_have_gradient
    )
    return make_batches(marked, 1024)


def rows_of(batches):
    return sorted(row for batch in batches for row in batch.rows)


def check_equal_gradients(gradient, expected_gradient):
    """Check equality within roundings, which are about 1e-6 of the largest value."""
    largest = max(mx.abs(array).max().item() for array in expected_gradient.values())
    for name, array in expected_gradient.items():
        assert mx.abs(array - gradient[name]).max().item() <= 1e-5 * largest, name


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("flags", [(), ("--checkpoint-layers", "on", "--lora-rank", "0")])
def test_the_gradient_without_idle_rows_equals_the_gradient_of_all_rows(tmp_path, loss, flags):
    loss_flags = ["--loss-type", loss]
    if loss == "cispo":
        loss_flags += ["--epsilon-high", "5"]
    run = make_run(tmp_path, *loss_flags, *flags)
    update_once(run)  # B of the adapters is 0 before
    samples = sample_first_prompts(run, ADVANTAGES)
    expected, expected_gradient = record_gradient(run, make_batches(samples, 1024))
    batches = make_marked_batches(run, samples)
    result, gradient = record_gradient(run, batches)
    assert result.num_with_gradient == 6
    assert len(rows_of(batches)) < 12
    assert result.loss == pytest.approx(expected.loss, abs=1e-6)
    check_equal_gradients(gradient, expected_gradient)


def add_square(tokens, objective):
    """A loss that also needs rows whose advantage is 0."""
    loss, sums = grpo.LOSSES["dapo"](tokens, objective)
    square = ((tokens.logprobs + 1) ** 2 * tokens.mask).sum() / tokens.num_items
    return grpo.Loss(loss + 0.5 * square, sums)


def add_entropy_bonus(tokens, objective):
    """The same as `add_square`, through the entropies only."""
    loss, sums = grpo.LOSSES["dapo"](tokens, objective)
    bonus = (tokens.entropies * tokens.mask).sum() / tokens.num_items
    return grpo.Loss(loss - 0.5 * bonus, sums)


LOSSES_AND_OWN_LOSSES = dict(grpo.LOSSES) | {"square": add_square, "bonus": add_entropy_bonus}


@pytest.mark.parametrize("name", LOSSES_AND_OWN_LOSSES)
def test_the_selection_of_rows_keeps_the_gradient_of_every_entry_of_losses(
    tmp_path, monkeypatch, name
):
    """The loss itself decides which rows it needs. A new entry of LOSSES needs no further list."""
    needs_divergences = name == "distill"

    def loss(tokens, objective):
        if needs_divergences:
            tokens = tokens._replace(divergences=tokens.logprobs**2)
        return LOSSES_AND_OWN_LOSSES[name](tokens, objective)

    monkeypatch.setitem(grpo.LOSSES, "new", loss)
    run = make_run(tmp_path)
    update_once(run)  # B of the adapters is 0 before
    config = run.config
    objective = dataclasses.replace(config.objective, loss_type="new")
    run.learner.loss = StepLoss(dataclasses.replace(config, objective=objective), run.sizes)
    samples = sample_first_prompts(run, ADVANTAGES)
    _, expected_gradient = record_gradient(run, make_batches(samples, 1024))
    batches = make_marked_batches(run, samples)
    result, gradient = record_gradient(run, batches)
    check_equal_gradients(gradient, expected_gradient)
    if name in LOSSES:  # idle rows are left out
        assert result.num_with_gradient == 6
        assert len(rows_of(batches)) < 12
    else:
        assert result.num_with_gradient == 12


@pytest.mark.parametrize(
    "flags",
    [
        ("--beta", "0.1"),
        ("--entropy-coef", "0.1"),
        ("--teacher", "demo", "--loss", "distill"),
        ("--loss", "own_loss.py:plain"),
    ],
    ids=lambda flags: flags[0],
)
def test_every_row_is_computed_if_another_term_of_the_loss_needs_it(tmp_path, monkeypatch, flags):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_loss.py").write_text(OWN_LOSS)
    run = make_run(tmp_path, *flags)
    batches = make_marked_batches(run, sample_first_prompts(run, np.zeros(12)))
    assert rows_of(batches) == list(range(12))
    assert sum(batch.num_with_gradient for batch in batches) == 12
    for batch in batches:
        assert (batch.weights == 1).all().item()


def test_each_step_measures_other_idle_rows_and_the_weighted_means_cover_all_tokens(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(advantages, "MEASURED_OF", 3)
    run = make_run(tmp_path, "--target-kl", "0")
    samples = sample_first_prompts(run, ADVANTAGES)
    lengths = np.array([len(sample.loss_positions) for sample in samples])
    idle_rows = np.flatnonzero(ADVANTAGES.reshape(-1) == 0).tolist()

    all_measured_rows = []
    weights = []
    means_by_step = []
    for step in range(6, 9):  # each measures two of the six idle rows
        batches = make_marked_batches(run, samples, step)
        num_counted_tokens = sum((batch.mask * batch.weights).sum().item() for batch in batches)
        assert num_counted_tokens == pytest.approx(lengths.sum())
        for batch in batches:
            assert (batch.mask <= 1).all().item()
        measured_rows = sorted(set(rows_of(batches)) & set(idle_rows))
        all_measured_rows += measured_rows
        weights.append(lengths[measured_rows].sum())
        result, _ = record_gradient(run, batches)
        means_by_step.append(result.means)

    assert sorted(all_measured_rows) == idle_rows
    result_of_all_rows, _ = record_gradient(run, make_batches(samples, 1024))
    for name in ("entropy", "mismatch/ratio_mean"):
        mean = np.average([means[name] for means in means_by_step], weights=weights)
        assert mean == pytest.approx(result_of_all_rows.means[name], rel=1e-5)


def test_the_kl_weights_a_measured_idle_row_by_the_rows_that_it_represents(tmp_path):
    run = make_run(tmp_path)
    samples = sample_first_prompts(run, ADVANTAGES)
    has_advantage = ADVANTAGES.reshape(-1) != 0
    sampled_logprobs, mask = stack_logprobs(samples)
    old_logprobs = sampled_logprobs + 0.1 * has_advantage[:, None]
    batches = add_column(make_marked_batches(run, samples), "old_logprobs", old_logprobs)
    probe = trust_region.select_kl_probe(batches, 0)
    assert rows_of(probe) == rows_of(batches)  # the probe has space for all of these tokens

    kl = trust_region.measure_kl(probe, [batch.sampled_logprobs for batch in probe])
    lengths = mask.sum(axis=1)
    kl_of_shifted_token = np.exp(-0.1) - 1 + 0.1
    fraction_of_shifted = lengths[has_advantage].sum() / lengths.sum()
    assert kl == pytest.approx(kl_of_shifted_token * fraction_of_shifted, rel=1e-4)


def test_the_kl_probe_takes_enough_tokens_although_rows_are_left_out(tmp_path, monkeypatch):
    run = make_run(tmp_path)
    samples = sample_first_prompts(run, ADVANTAGES)
    batches = make_marked_batches(run, samples)
    num_tokens = sum(int(batch.mask.sum()) for batch in batches)
    assert num_tokens < sum(len(sample.loss_positions) for sample in samples)
    # Half of the tokens would not fill the probe.
    monkeypatch.setattr(trust_region, "PROBE_TOKENS", num_tokens // 2 + 1)
    assert rows_of(trust_region.select_kl_probe(batches, 0)) == rows_of(batches)


def test_without_any_signal_the_weights_stay_and_the_console_reports_no_step(tmp_path, monkeypatch):
    run = make_run(tmp_path)
    update_once(run)  # afterwards, the momentum alone would move the weights
    weights_before = dict(run.learner.trainable)
    num_steps_before = run.learner.optimizer.step.item()

    # Forward passes alone give the same statistics as passes with a gradient.
    batches = make_marked_batches(run, sample_first_prompts(run, np.zeros(12)))
    stats_with_gradient = update.compute_gradient(run.learner, batches)[2]
    stats = update.compute_logprobs_and_stats(run.learner, batches)[1]
    assert stats == pytest.approx(stats_with_gradient, rel=1e-5, abs=1e-6)

    monkeypatch.setattr(update, "scaled_loss_and_gradient", None)  # calling it would raise
    result = update.run_optimizer_steps(run.learner, batches, 1e-3)
    for name, array in tree_flatten(run.learner.trainable):
        assert mx.array_equal(array, weights_before[name]).item()
    assert run.learner.optimizer.step.item() == num_steps_before
    assert result.num_with_gradient == 0
    assert result.loss == 0
    assert result.moved is None
    assert result.means["entropy"] > 0
    assert result.means["mismatch/logprob_abs_mean"] < 1e-4

    metrics = journal.metrics_of_update(result, {"update": 1, "other": 0, "step": 2}, 12, [2])
    metrics |= {"step": 3, "reward/mean": 1, "rollout/tok_s": 98765.4, "reward/zero_std_frac": 1}
    assert "| no step" in format_step_line(metrics, 60)
