"""An own advantage function says which completions the update trains."""

import json

import mlx.core as mx
import numpy as np
import pytest

import train
from config import Config
from step import objectives
from step.advantages import assign_advantages
from tests.small_run import SMALL_FLAGS, make_run, record_gradient, update_once
from tests.test_train_completions import (
    WEIGHTS,
    chosen_rows,
    make_marked_batches,
    score_samples,
)

OWN = """
import numpy as np
import grpo

def pods(rewards):
    advantages = np.zeros(rewards.shape)
    is_trained = np.zeros(rewards.shape, bool)
    for row, group in enumerate(rewards):
        chosen = grpo.choose_rewards_of_largest_variance(group, 2)
        is_trained[row, chosen] = True
        advantages[row, chosen] = grpo.group_advantages(rewards[row : row + 1, chosen])
    return advantages, is_trained

def pods_with_zeros(rewards):
    return pods(rewards)[0]

def nothing(rewards):
    return rewards, rewards > np.inf

def divided_by_zero(rewards):
    deviation = rewards.std(axis=1, keepdims=True)
    with np.errstate(invalid="ignore"):
        return (rewards - rewards.mean(axis=1, keepdims=True)) / deviation

def infinite(rewards):
    return rewards + np.inf

def centered(rewards):
    return rewards - rewards.mean(axis=1, keepdims=True)

def nothing_of_four(rewards):
    if rewards.shape == (3, 4):
        return nothing(rewards)
    return centered(rewards)
"""


@pytest.fixture
def own(tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    return str(tmp_path / "own.py")


def load(spec):
    return objectives.load_and_try_custom_objective(Config.from_flags(advantage=spec))


@pytest.mark.parametrize("loss", ["grpo", "dr_grpo", "dapo", "cispo", "sapo"])
def test_completions_that_are_not_trained_leave_the_divisor_as_those_of_train_completions_do(
    tmp_path, own, loss
):
    flags = ("--loss-type", loss, *(("--epsilon-high", "5") if loss == "cispo" else ()))
    run = make_run(tmp_path, *flags, "--train-completions", "2")
    update_once(run)  # B of the adapters is 0 before
    builtin = score_samples(run)
    plain = [sample._replace(is_chosen=True, advantage=0.0) for sample in builtin]
    config = run.config.copy_with_settings(train_completions=None)
    function = load(f"{own}:pods").advantage
    samples = assign_advantages(config, plain, WEIGHTS, function)
    assert chosen_rows(samples) == chosen_rows(builtin)
    assert all(sample.advantage == 0 for sample in samples if not sample.is_chosen)

    expected = record_gradient(run, make_marked_batches(run, builtin))
    found = record_gradient(run, make_marked_batches(run, samples))
    assert found[0].grad_norm == pytest.approx(expected[0].grad_norm, rel=1e-5)
    for name, gradient in expected[1].items():
        largest = mx.abs(gradient).max().item()
        assert mx.abs(found[1][name] - gradient).max().item() <= 1e-5 * largest + 1e-9


def test_a_step_that_leaves_out_every_completion_changes_no_weight(tmp_path, own):
    run = make_run(tmp_path)
    plain = [sample._replace(advantage=0.0) for sample in score_samples(run)]
    samples = assign_advantages(
        run.config, plain, WEIGHTS, load(f"{own}:nothing_of_four").advantage
    )
    assert chosen_rows(samples) == []
    before = {name: np.array(array) for name, array in run.learner.trainable.items()}
    import update

    result = update.run_optimizer_steps(run.learner, make_marked_batches(run, samples), 1e-3)
    assert result.grad_norm is None and result.loss == 0
    for name, array in run.learner.trainable.items():
        assert np.array_equal(np.array(array), before[name])


def test_a_completion_that_is_missing_needs_no_finite_advantage(own):
    function = load(f"{own}:pods").advantage
    advantages = function(np.array([[0.0, 1.0, np.nan], [0.0, 1.0, 2.0]]))
    assert advantages[0, 2] == 0 and np.isnan(advantages[1, 1])


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("nothing", "leaves out every completion"),
        ("infinite", "must be finite"),
        ("divided_by_zero", "must be finite"),
    ],
)
def test_a_function_that_trains_nothing_is_refused_before_a_model_is_loaded(
    own, name, words, check_refusal
):
    flags = [*SMALL_FLAGS, "--task", "demo", "--advantage", f"{own}:{name}"]
    check_refusal(train.main, flags, words)


def test_zeros_for_different_rewards_are_named_at_the_start_because_they_stay_in_the_divisor(own):
    (note,) = load(f"{own}:pods_with_zeros").notes
    assert "gave the advantage 0 to 6 of 8 completions with different rewards" in note
    assert "return (advantages, is_trained) with a bool array" in note
    assert load(f"{own}:pods").notes == () == load(f"{own}:centered").notes


def test_a_run_records_which_completions_it_left_out(tmp_path, own, capsys):
    run = tmp_path / "run"
    flags = [*SMALL_FLAGS, "--task", "demo", "--eval-every", "0", "--steps", "2"]
    train.main([*flags, "--advantage", f"{own}:pods", "--run-dir", str(run)])
    records = [json.loads(line) for line in (run / "rollouts.jsonl").read_text().splitlines()]
    assert sum(record.get("left_out", False) for record in records) == 2 * 3 * 2
    train.main(
        [*flags, "--advantage", f"{own}:pods_with_zeros", "--run-dir", str(tmp_path / "zeros")]
    )
    assert "return (advantages, is_trained)" in " ".join(capsys.readouterr().out.split())
