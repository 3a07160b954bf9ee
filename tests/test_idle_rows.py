"""Rows whose advantage is 0 are not computed: same gradient, same denominators, and no curve goes blind."""

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from small_run import gradient_of_update, make_run, sample, take_step, update_once
from test_grpo import LOSSES

import update
from reporting.console import console_line
from step import policy, trust_region

pytestmark = pytest.mark.slow
ADVANTAGES = np.array([[1, -1, 0.5, -0.5], [0, 0, 0, 0], [1.5, 0, -1.5, 0]])  # six rows of twelve teach

OWN = "import grpo\ndef plain(tokens, objective):\n    return grpo.Loss(-(tokens.logprobs * tokens.mask).sum(), {})\n"


def cut(run, rows, rollout, advantages=ADVANTAGES, turn=0):
    return run.learner.reader.cut(rows, rollout, advantages, turn)


def everything(run, rows, rollout):
    return cut(run, rows, rollout, np.ones((3, 4)))


def rows_of(batches):
    return sorted(row for batch in batches for row in batch.rows.tolist())


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("flags", [(), ("--checkpoint-layers", "on", "--lora-rank", "0")])
def test_the_gradient_without_idle_rows_is_the_gradient_of_all_rows(tmp_path, loss, flags):
    run = make_run(tmp_path, "--loss-type", loss, *flags, *(("--epsilon-high", "5") if loss == "cispo" else ()))
    update_once(run)  # B of the adapters is 0 before
    _, rows, rollout = sample(run)
    advantages = mx.array(ADVANTAGES.reshape(-1), mx.float32)
    whole = gradient_of_update(run, everything(run, rows, rollout), rollout, advantages)
    taught = gradient_of_update(run, cut(run, rows, rollout), rollout, advantages)
    assert whole[0].num_taught == taught[0].num_taught == 6 and len(rows_of(cut(run, rows, rollout))) < 12
    assert taught[0].loss == pytest.approx(whole[0].loss, abs=1e-6)
    largest = max(mx.abs(array).max().item() for array in whole[1].values())
    for name, array in whole[1].items():
        assert mx.abs(array - taught[1][name]).max().item() <= 1e-5 * largest, name  # roundings: 1e-6


@pytest.mark.parametrize(
    "flags",
    [
        ("--beta", "0.1"),
        ("--teacher", "demo", "--loss", "distill"),
        ("--loss", "own_loss.py:plain"),
    ],
    ids=lambda flags: flags[0],
)
def test_every_row_is_computed_where_another_term_needs_it(tmp_path, monkeypatch, flags):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_loss.py").write_text(OWN)
    run = make_run(tmp_path, *flags)
    _, rows, rollout = sample(run)
    batches = cut(run, rows, rollout)
    assert rows_of(batches) == list(range(12)) and all((batch.mask <= 1).all().item() for batch in batches)
    assert update.targets_of(run.learner, batches, rollout, mx.zeros(12)).num_taught == 12


def test_every_idle_row_is_measured_in_its_turn_for_all_tokens_that_are_left_out(tmp_path, monkeypatch):
    monkeypatch.setattr(policy, "MEASURED_OF", 3)
    run = make_run(tmp_path, "--target-kl", "0")
    _, rows, rollout = sample(run)
    advantages, idle = mx.array(ADVANTAGES.reshape(-1), mx.float32), np.flatnonzero(ADVANTAGES.reshape(-1) == 0)
    lengths, seen, weights, found = np.array(list(map(len, rollout.ids))), [], [], []
    for turn in range(6, 9):  # two of the six idle rows in each
        batches = cut(run, rows, rollout, turn=turn)
        assert sum(batch.mask.sum().item() for batch in batches) == pytest.approx(lengths.sum())
        measured = sorted(set(rows_of(batches)) & set(idle.tolist()))
        seen += measured
        weights.append(lengths[measured].sum())
        found.append(gradient_of_update(run, batches, rollout, advantages)[0].means)
    assert sorted(seen) == idle.tolist()
    whole = gradient_of_update(run, everything(run, rows, rollout), rollout, advantages)[0].means
    for name in ("entropy", "ratio_mean"):
        assert np.average([means[name] for means in found], weights=weights) == pytest.approx(whole[name], rel=1e-5)


def test_the_distance_counts_a_measured_row_for_those_it_stands_for(tmp_path):
    run = make_run(tmp_path)
    _, rows, rollout = sample(run)
    pushed = ADVANTAGES.reshape(-1) != 0
    moved = rollout.logprobs + 0.1 * mx.array(pushed)[:, None]
    known = [b._replace(old_logprobs=moved[b.rows, : b.mask.shape[1]]) for b in cut(run, rows, rollout)]
    probe = trust_region.make_probe(known, 0)
    assert rows_of(probe) == rows_of(known)  # so few tokens that all are taken
    lengths, gap = np.array(list(map(len, rollout.ids))), np.exp(-0.1) - 1 + 0.1
    present = [rollout.logprobs[batch.rows, : batch.mask.shape[1]] for batch in probe]
    assert trust_region.distance(probe, present) == pytest.approx(gap * lengths[pushed].sum() / lengths.sum(), rel=1e-4)


def test_the_probe_holds_its_tokens_although_rows_are_left_out(tmp_path, monkeypatch):
    run = make_run(tmp_path)
    _, rows, rollout = sample(run)
    known = cut(run, rows, rollout)
    num_held = sum(int((batch.mask > 0).sum()) for batch in known)
    monkeypatch.setattr(trust_region, "PROBE_TOKENS", num_held // 2 + 1)  # half of them would be too few
    assert num_held < round(float(rollout.mask.sum()))
    assert rows_of(trust_region.make_probe(known, 0)) == rows_of(known)


def test_where_nothing_teaches_there_is_no_step_and_the_line_says_so(tmp_path, monkeypatch):
    run = make_run(tmp_path)
    update_once(run)  # its momentum would go on
    before, count = dict(run.learner.trainable), run.learner.optimizer.step.item()
    _, rows, rollout = sample(run)
    zeros = np.zeros((3, 4))
    batches = cut(run, rows, rollout, zeros)
    targets = update.targets_of(run.learner, batches, rollout, mx.array(zeros.reshape(-1)))
    by_both = update.gradient(run.learner, batches, targets)[2]
    assert update.measure(run.learner, batches, targets)[1] == pytest.approx(by_both, rel=1e-5, abs=1e-6)
    monkeypatch.setattr(update, "share_and_gradient", None)  # forward passes alone
    result = take_step(run, cut(run, rows, rollout, zeros), rollout, mx.array(zeros.reshape(-1)), 1e-3)
    assert all(mx.array_equal(array, before[name]).item() for name, array in tree_flatten(run.learner.trainable))
    assert (run.learner.optimizer.step.item(), result.num_taught, result.loss, result.moved) == (count, 0, 0, None)
    assert result.means["entropy"] > 0 and result.means["logprob_abs_mean"] < 1e-4
    figures = result.metrics({"update": 1, "other": 0, "step": 2}, 12, [2])
    line = console_line(
        figures | {"step": 3, "reward/mean": 1, "rollout/tok_s": 98765.4, "reward/zero_std_frac": 1}, 60
    )
    assert line.endswith("| no step")
