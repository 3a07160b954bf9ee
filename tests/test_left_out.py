"""A custom advantage function can choose which completions the update trains."""

import mlx.core as mx
import numpy as np
import pytest
from conftest import read_log

import train
import update
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

FUNCTIONS = """
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
def functions_file(tmp_path):
    path = tmp_path / "own.py"
    path.write_text(FUNCTIONS)
    return str(path)


def load_objective(spec):
    return objectives.load_and_try_custom_objective(Config.from_flags(advantage=spec))


@pytest.mark.parametrize("loss", ["grpo", "dr_grpo", "dapo", "cispo", "sapo"])
def test_a_custom_choice_of_completions_gives_the_gradient_of_train_completions(
    tmp_path, functions_file, loss
):
    flags = ["--loss-type", loss, "--train-completions", "2"]
    if loss == "cispo":
        flags += ["--epsilon-high", "5"]
    run = make_run(tmp_path, *flags)
    update_once(run)  # until then, B of the adapters is 0
    expected_samples = score_samples(run)
    unchosen = [sample._replace(is_chosen=True, advantage=0.0) for sample in expected_samples]
    config = run.config.copy_with_settings(train_completions=None)
    function = load_objective(f"{functions_file}:pods").advantage
    samples = assign_advantages(config, unchosen, WEIGHTS, function)
    assert chosen_rows(samples) == chosen_rows(expected_samples)
    assert all(sample.advantage == 0 for sample in samples if not sample.is_chosen)

    expected_result, expected_gradient = record_gradient(
        run, make_marked_batches(run, expected_samples)
    )
    result, gradient = record_gradient(run, make_marked_batches(run, samples))
    assert result.grad_norm == pytest.approx(expected_result.grad_norm, rel=1e-5)
    for name, expected in expected_gradient.items():
        largest = mx.abs(expected).max().item()
        assert mx.abs(gradient[name] - expected).max().item() <= 1e-5 * largest + 1e-9


def test_a_step_that_leaves_out_every_completion_changes_no_weight(tmp_path, functions_file):
    run = make_run(tmp_path)
    scored = [sample._replace(advantage=0.0) for sample in score_samples(run)]
    function = load_objective(f"{functions_file}:nothing_of_four").advantage
    samples = assign_advantages(run.config, scored, WEIGHTS, function)
    assert chosen_rows(samples) == []

    weights_before = {name: np.array(array) for name, array in run.learner.trainable.items()}
    result = update.run_optimizer_steps(run.learner, make_marked_batches(run, samples), 1e-3)
    assert result.grad_norm is None
    assert result.loss == 0
    for name, array in run.learner.trainable.items():
        assert np.array_equal(np.array(array), weights_before[name])


def test_a_missing_completion_needs_no_finite_advantage(functions_file):
    function = load_objective(f"{functions_file}:pods").advantage
    advantages = function(np.array([[0.0, 1.0, np.nan], [0.0, 1.0, 2.0]]))
    assert advantages[0, 2] == 0
    assert np.isnan(advantages[1, 1])


@pytest.mark.parametrize(
    ("name", "expected_text"),
    [
        ("nothing", "leaves out every completion"),
        ("infinite", "must be finite"),
        ("divided_by_zero", "must be finite"),
    ],
)
def test_an_invalid_advantage_function_is_refused_before_a_model_is_loaded(
    functions_file, name, expected_text, check_refusal
):
    flags = [*SMALL_FLAGS, "--task", "demo", "--advantage", f"{functions_file}:{name}"]
    check_refusal(train.main, flags, expected_text)


def test_advantages_of_0_for_different_rewards_are_reported_because_they_stay_in_the_divisor(
    functions_file,
):
    (note,) = load_objective(f"{functions_file}:pods_with_zeros").notes
    assert "gave the advantage 0 to 6 of 8 completions with different rewards" in note
    assert "return (advantages, is_trained) with a bool array" in note
    assert load_objective(f"{functions_file}:pods").notes == ()
    assert load_objective(f"{functions_file}:centered").notes == ()


def test_a_run_records_which_completions_it_left_out(tmp_path, functions_file, capsys):
    run = tmp_path / "run"
    flags = [*SMALL_FLAGS, *"--task demo --eval-every 0 --steps 2".split()]
    train.main([*flags, "--advantage", f"{functions_file}:pods", "--run-dir", str(run)])
    records = read_log(run / "rollouts.jsonl")
    assert sum(record.get("left_out", False) for record in records) == 2 * 3 * 2

    flags += ["--advantage", f"{functions_file}:pods_with_zeros"]
    train.main([*flags, "--run-dir", str(tmp_path / "zeros")])
    assert "return (advantages, is_trained)" in " ".join(capsys.readouterr().out.split())


def choose_groups_of_low_mean(rewards):
    is_low = rewards.mean(axis=1, keepdims=True) < 0.4
    return rewards, np.broadcast_to(is_low, rewards.shape)


def test_a_selection_may_leave_out_every_group_of_high_rewards():
    objective = load_objective(f"{__file__}:choose_groups_of_low_mean")
    advantages = objective.advantage(np.array([[1.0, 0.9], [0.0, 0.1]]))
    assert np.isnan(advantages).tolist() == [[True, True], [False, False]]
