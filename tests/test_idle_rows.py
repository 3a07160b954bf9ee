"""Rows whose advantage is 0 are not computed: same gradient, same denominators, and no curve goes blind."""

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
ADVANTAGES = np.array(
    [[1, -1, 0.5, -0.5], [0, 0, 0, 0], [1.5, 0, -1.5, 0]]
)  # six rows of twelve teach

OWN = "import grpo\ndef plain(tokens, objective):\n    return grpo.Loss(-(tokens.logprobs * tokens.mask).sum(), {})\n"


def trained(run, drawn, turn=0):
    return make_batches(
        advantages.mark_for_update(run.config, drawn, turn, run.learner.loss.all_have_gradient),
        1024,
    )


def rows_of(batches):
    return sorted(row for batch in batches for row in batch.rows)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("flags", [(), ("--checkpoint-layers", "on", "--lora-rank", "0")])
def test_the_gradient_without_idle_rows_is_the_gradient_of_all_rows(tmp_path, loss, flags):
    run = make_run(
        tmp_path, "--loss-type", loss, *flags, *(("--epsilon-high", "5") if loss == "cispo" else ())
    )
    update_once(run)  # B of the adapters is 0 before
    drawn = sample_first_prompts(run, ADVANTAGES)
    whole = record_gradient(run, make_batches(drawn, 1024))
    taught = record_gradient(run, trained(run, drawn))
    assert taught[0].num_with_gradient == 6 and len(rows_of(trained(run, drawn))) < 12
    assert taught[0].loss == pytest.approx(whole[0].loss, abs=1e-6)
    largest = max(mx.abs(array).max().item() for array in whole[1].values())
    for name, array in whole[1].items():
        assert mx.abs(array - taught[1][name]).max().item() <= 1e-5 * largest, (
            name
        )  # roundings: 1e-6


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


ROWS_OF_LOSSES = dict(grpo.LOSSES) | {"square": add_square, "bonus": add_entropy_bonus}


@pytest.mark.parametrize("name", ROWS_OF_LOSSES)
def test_the_selection_of_rows_keeps_the_gradient_of_every_row_of_losses(
    tmp_path, monkeypatch, name
):
    """Which rows a loss needs follows from the loss, so that a new row of LOSSES needs no list."""
    needs_divergences = name == "distill"

    def loss(tokens, objective):
        if needs_divergences:
            tokens = tokens._replace(divergences=tokens.logprobs**2)
        return ROWS_OF_LOSSES[name](tokens, objective)

    monkeypatch.setitem(grpo.LOSSES, "new", loss)
    run = make_run(tmp_path)
    update_once(run)  # B of the adapters is 0 before
    config = run.config
    objective = dataclasses.replace(config.objective, loss_type="new")
    run.learner.loss = StepLoss(dataclasses.replace(config, objective=objective), run.sizes)
    drawn = sample_first_prompts(run, ADVANTAGES)
    whole = record_gradient(run, make_batches(drawn, 1024))
    selected = trained(run, drawn)
    taught = record_gradient(run, selected)
    largest = max(mx.abs(array).max().item() for array in whole[1].values())
    for weight, array in whole[1].items():
        assert mx.abs(array - taught[1][weight]).max().item() <= 1e-5 * largest, weight
    if name in LOSSES:  # rows without an advantage are left out
        assert taught[0].num_with_gradient == 6 and len(rows_of(selected)) < 12
    else:
        assert taught[0].num_with_gradient == 12


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
def test_every_row_is_computed_where_another_term_needs_it(tmp_path, monkeypatch, flags):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_loss.py").write_text(OWN)
    run = make_run(tmp_path, *flags)
    batches = trained(run, sample_first_prompts(run, np.zeros(12)))
    assert (
        rows_of(batches) == list(range(12))
        and sum(batch.num_with_gradient for batch in batches) == 12
    )
    assert all((batch.weights == 1).all().item() for batch in batches)


def test_every_idle_row_is_measured_in_its_turn_for_all_tokens_that_are_left_out(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(advantages, "MEASURED_OF", 3)
    run = make_run(tmp_path, "--target-kl", "0")
    drawn, idle = sample_first_prompts(run, ADVANTAGES), np.flatnonzero(ADVANTAGES.reshape(-1) == 0)
    lengths, seen, weights, found = np.array([len(one.loss_positions) for one in drawn]), [], [], []
    for turn in range(6, 9):  # two of the six idle rows in each
        batches = trained(run, drawn, turn)
        counted = sum((batch.mask * batch.weights).sum().item() for batch in batches)
        assert counted == pytest.approx(lengths.sum()) and all(
            (batch.mask <= 1).all().item() for batch in batches
        )
        measured = sorted(set(rows_of(batches)) & set(idle.tolist()))
        seen += measured
        weights.append(lengths[measured].sum())
        found.append(record_gradient(run, batches)[0].means)
    assert sorted(seen) == idle.tolist()
    whole = record_gradient(run, make_batches(drawn, 1024))[0].means
    for name in ("entropy", "mismatch/ratio_mean"):
        assert np.average([means[name] for means in found], weights=weights) == pytest.approx(
            whole[name], rel=1e-5
        )


def test_the_distance_counts_a_measured_row_for_those_it_stands_for(tmp_path):
    run = make_run(tmp_path)
    drawn, pushed = sample_first_prompts(run, ADVANTAGES), ADVANTAGES.reshape(-1) != 0
    logprobs, mask = stack_logprobs(drawn)
    known = add_column(trained(run, drawn), "old_logprobs", logprobs + 0.1 * pushed[:, None])
    probe = trust_region.select_kl_probe(known, 0)
    assert rows_of(probe) == rows_of(known)  # so few tokens that all are taken
    lengths, gap = mask.sum(axis=1), np.exp(-0.1) - 1 + 0.1
    present = [batch.sampled_logprobs for batch in probe]
    assert trust_region.measure_kl(probe, present) == pytest.approx(
        gap * lengths[pushed].sum() / lengths.sum(), rel=1e-4
    )


def test_the_probe_holds_its_tokens_although_rows_are_left_out(tmp_path, monkeypatch):
    run = make_run(tmp_path)
    drawn = sample_first_prompts(run, ADVANTAGES)
    known = trained(run, drawn)
    num_held = sum(int(batch.mask.sum()) for batch in known)
    monkeypatch.setattr(
        trust_region, "PROBE_TOKENS", num_held // 2 + 1
    )  # half of them would be too few
    assert num_held < sum(len(one.loss_positions) for one in drawn)
    assert rows_of(trust_region.select_kl_probe(known, 0)) == rows_of(known)


def test_where_nothing_teaches_there_is_no_step_and_the_line_says_so(tmp_path, monkeypatch):
    run = make_run(tmp_path)
    update_once(run)  # its momentum would go on
    before, count = dict(run.learner.trainable), run.learner.optimizer.step.item()
    batches = trained(run, sample_first_prompts(run, np.zeros(12)))
    by_both = update.compute_gradient(run.learner, batches)[2]
    assert update.compute_logprobs_and_stats(run.learner, batches)[1] == pytest.approx(
        by_both, rel=1e-5, abs=1e-6
    )
    monkeypatch.setattr(update, "scaled_loss_and_gradient", None)  # forward passes alone
    result = update.run_optimizer_steps(run.learner, batches, 1e-3)
    assert all(
        mx.array_equal(array, before[name]).item()
        for name, array in tree_flatten(run.learner.trainable)
    )
    assert (
        run.learner.optimizer.step.item(),
        result.num_with_gradient,
        result.loss,
        result.moved,
    ) == (count, 0, 0, None)
    assert result.means["entropy"] > 0 and result.means["mismatch/logprob_abs_mean"] < 1e-4
    figures = journal.metrics_of_update(result, {"update": 1, "other": 0, "step": 2}, 12, [2])
    figures |= {"step": 3, "reward/mean": 1, "rollout/tok_s": 98765.4, "reward/zero_std_frac": 1}
    assert "| no step" in format_step_line(figures, 60)
