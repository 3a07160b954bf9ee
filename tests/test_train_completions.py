"""--train-completions: the update computes only the completions whose rewards vary most."""

import itertools
from fractions import Fraction

import mlx.core as mx
import numpy as np
import pytest
from conftest import catch_message
from small_run import make_run, record_gradient, sample_first_prompts, update_once

import grpo
from disk import model_choice
from forecast import time_estimate
from forecast.memory_estimate import RunDemand
from reporting import journal, page
from step import advantages
from step import sample as samples_file
from step.advantages import assign_advantages, mark_for_update
from step.batch import make_batches
from step.scoring import assign_rewards
from train import Trainer

WEIGHTS = {"correct": 1.0}
REWARDS = np.array([0.0, 1.0, 0.25, 1.0, 0.0, 0.5, 2.0, 0.5, 0.5, 1.0, 1.0, 1.0])


# ---- the choice


def exact_variance(values):
    exact = [Fraction(value) for value in values]
    mean = sum(exact) / len(exact)
    return sum((value - mean) ** 2 for value in exact) / len(exact)


@pytest.mark.parametrize("seed", range(60))
def test_no_subset_of_the_same_size_has_a_larger_variance(seed):
    rng = np.random.default_rng(seed)
    size = int(rng.integers(2, 9))
    num_chosen = int(rng.integers(2, size + 1))
    rewards = rng.normal(size=size) if seed % 2 else rng.integers(0, 3, size=size) / 2
    chosen = grpo.choose_rewards_of_largest_variance(rewards, num_chosen)

    assert chosen == sorted(set(chosen)) and len(chosen) == num_chosen
    variances = [
        exact_variance(rewards[list(subset)])
        for subset in itertools.combinations(range(size), num_chosen)
    ]
    largest = max(variances)
    assert largest - exact_variance(rewards[chosen]) <= largest * Fraction(1, 10**9)


def test_among_equal_rewards_the_first_ones_are_chosen():
    assert grpo.choose_rewards_of_largest_variance(np.array([1.0, 0, 1, 0, 1, 0]), 2) == [0, 1]
    assert grpo.choose_rewards_of_largest_variance(np.array([0.0, 0, 0, 1, 1, 0]), 4) == [
        0,
        1,
        3,
        4,
    ]
    assert grpo.choose_rewards_of_largest_variance(np.full(5, 7.0), 3) == [0, 1, 2]


def test_among_subsets_of_equal_variance_the_one_with_more_high_rewards_is_chosen():
    assert grpo.choose_rewards_of_largest_variance(np.array([0.0, 0, 1, 2, 2]), 3) == [0, 3, 4]


def test_a_large_common_offset_does_not_change_the_choice():
    rewards = np.array([0.5, 0.1, 0.9, 0.3, 0.7])
    offset = 2.0**40
    assert grpo.choose_rewards_of_largest_variance(
        rewards + offset, 3
    ) == grpo.choose_rewards_of_largest_variance(np.array(rewards + offset) - offset, 3)


def test_a_small_group_is_chosen_whole():
    assert grpo.choose_rewards_of_largest_variance(np.array([1.0, 2.0]), 4) == [0, 1]
    assert grpo.choose_rewards_of_largest_variance(np.array([]), 4) == []


# ---- the samples of a step


def score_samples(run, rewards=REWARDS, **fields):
    """Samples of the run with these rewards, (N,), and with their advantages."""
    samples = [drawn._replace(**fields) for drawn in sample_first_prompts(run)]
    samples = assign_rewards(samples, {"correct": np.array(rewards)}, WEIGHTS)
    return assign_advantages(run.config, samples, WEIGHTS)


def chosen_rows(samples):
    return [row for row, sample_ in enumerate(samples) if sample_.is_chosen]


def test_the_advantages_are_those_of_a_group_that_has_only_the_chosen_completions(tmp_path):
    run = make_run(tmp_path, "--train-completions", "2")
    samples = score_samples(run)
    assert chosen_rows(samples) == [0, 1, 4, 6, 8, 9]
    chosen = np.array([samples[row].advantage for row in chosen_rows(samples)])
    expected = grpo.group_advantages(np.array([[0.0, 1], [0, 2], [0.5, 1]]), signal_floor=0.01)
    assert chosen == pytest.approx(expected.ravel())
    left_out = [sample_ for sample_ in samples if not sample_.is_chosen]
    assert all(sample_.advantage == 0 for sample_ in left_out)


@pytest.mark.parametrize("loss", ["grpo", "dr_grpo", "dapo", "cispo", "sapo"])
@pytest.mark.parametrize("beta", ["0", "0.1"])
def test_a_step_equals_a_step_on_a_rollout_that_never_had_the_other_completions(
    tmp_path, loss, beta
):
    flags = ("--loss-type", loss, "--beta", beta)
    flags += ("--epsilon-high", "5") if loss == "cispo" else ()
    run = make_run(tmp_path, *flags, "--train-completions", "2")
    update_once(run)  # B of the adapters is 0 before
    samples = score_samples(run)
    step_of_all = record_gradient(run, make_marked_batches(run, samples))
    chosen = [samples[row] for row in chosen_rows(samples)]
    step_of_chosen = record_gradient(run, make_marked_batches(run, chosen))

    assert step_of_all[0].loss == pytest.approx(step_of_chosen[0].loss, rel=1e-6, abs=1e-7)
    largest = max(mx.abs(array).max().item() for array in step_of_chosen[1].values())
    for name, array in step_of_chosen[1].items():
        distance = mx.abs(array - step_of_all[1][name]).max().item()
        assert distance <= 1e-6 * largest, name


def make_marked_batches(run, samples):
    """The batches of an update of these samples, with reference log-probabilities if needed."""
    import update

    marked = mark_for_update(run.config, samples, 0, run.learner.loss.all_have_gradient)
    batches = make_batches(marked, 1024)
    if run.config.objective.beta:
        batches = update.add_reference_logprobs(run.learner, batches)
    return batches


def test_left_out_completions_are_in_no_divisor_and_one_in_eight_of_them_is_measured(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(advantages, "MEASURED_OF", 3)
    run = make_run(tmp_path, "--train-completions", "2")
    samples = score_samples(run)
    measured = set()
    for step in range(3):
        batches = make_batches(mark_for_update(run.config, samples, step), 1024)
        num_chosen_tokens = sum(len(samples[row].loss_positions) for row in chosen_rows(samples))
        num_tokens = sum(len(sample_.loss_positions) for sample_ in samples)
        for batch in batches:
            assert (batch.num_rows, batch.num_loss_tokens) == (6, num_chosen_tokens)
            assert batch.num_counted_tokens == num_tokens
        trained = [row for batch in batches if batch.is_trained for row in batch.rows]
        assert sorted(trained) == chosen_rows(samples)
        rows = [row for batch in batches if not batch.is_trained for row in batch.rows]
        assert len(rows) == 2
        represented = sum((batch.mask * batch.weights).sum().item() for batch in batches)
        assert represented == pytest.approx(num_tokens, rel=1e-6)
        measured |= set(rows)
    assert measured == set(range(12)) - set(chosen_rows(samples))


def test_a_completion_that_max_tokens_cut_off_is_never_chosen_if_it_is_masked(tmp_path):
    run = make_run(tmp_path, "--train-completions", "2", "--truncated", "mask")
    drawn = sample_first_prompts(run)
    # the first group keeps three, the second one, the third none
    is_cut_off = [False, True, False, False] + [True] * 3 + [False] + [True] * 4
    drawn = [
        sample_._replace(finish_reason="length" if cut_off else "stop")
        for sample_, cut_off in zip(drawn, is_cut_off, strict=True)
    ]
    scored = assign_rewards(drawn, {"correct": REWARDS}, WEIGHTS)
    samples = assign_advantages(run.config, scored, WEIGHTS)
    assert chosen_rows(samples) == [0, 3, 7]
    assert np.isfinite([sample_.advantage for sample_ in samples]).all()
    assert [row for row, sample_ in enumerate(samples) if sample_.advantage] == [0, 3]
    result = record_gradient(run, make_batches(mark_for_update(run.config, samples, 0), 1024))[0]
    assert result.num_with_gradient == 2


@pytest.mark.parametrize("scale", ["group", "batch", "mean", "none"])
def test_a_group_without_chosen_completions_changes_no_other_group(scale):
    tables = np.array([[0.0, 1.0], [0.25, 0.5]])
    empty = np.full((1, 2), np.nan)
    expected = grpo.group_advantages(tables, scale)
    for place in range(3):
        with_empty = np.insert(tables, place, empty, axis=0)
        advantages_ = grpo.group_advantages(with_empty, scale)
        assert (advantages_[place] == 0).all()
        assert np.array_equal(np.delete(advantages_, place, axis=0), expected)


def test_an_unreadable_judge_score_counts_as_the_mean_of_its_group(tmp_path):
    run = make_run(tmp_path, "--train-completions", "2")
    scores = np.array([0.0, np.nan, 0.2, 1.0] * 3)
    samples = assign_rewards(sample_first_prompts(run), {"rubric": scores}, {"rubric": 1.0})
    samples = assign_advantages(run.config, samples, {"rubric": 1.0})
    assert chosen_rows(samples) == [0, 3, 4, 7, 8, 11]


def test_several_rewards_are_normalized_among_the_chosen_completions(tmp_path):
    run = make_run(tmp_path, "--train-completions", "2", "--combine-rewards", "normalize")
    weights = {"correct": 1.0, "short": 0.5}
    short = np.tile([0.0, 1.0, 0.5, 0.25], 3)
    components = {"correct": REWARDS, "short": short}
    samples = assign_rewards(sample_first_prompts(run), components, weights)
    samples = assign_advantages(run.config, samples, weights)
    rows = chosen_rows(samples)
    tables = np.array([REWARDS[rows], short[rows]]).reshape(2, 3, 2)
    expected = grpo.gdpo_decoupled_advantages(tables, [1.0, 0.5], grpo.SIGNAL_FLOOR)
    assert [samples[row].advantage for row in rows] == pytest.approx(expected.ravel())


def test_an_own_advantage_sees_only_the_chosen_rewards(tmp_path):
    run = make_run(tmp_path, "--train-completions", "2")
    tables = []

    def custom(rewards):
        tables.append(rewards)
        return rewards - 0.5

    samples = assign_rewards(sample_first_prompts(run), {"correct": REWARDS}, WEIGHTS)
    samples = assign_advantages(run.config, samples, WEIGHTS, custom)
    assert tables[0].tolist() == [[0.0, 1.0], [0.0, 2.0], [0.5, 1.0]]
    assert [samples[row].advantage for row in chosen_rows(samples)] == [
        -0.5,
        0.5,
        -0.5,
        1.5,
        0,
        0.5,
    ]


def test_the_turns_of_chosen_conversations_are_compared_with_each_other(tmp_path):
    run = make_run(tmp_path, "--train-completions", "2")
    drawn = []
    for row, sample_ in enumerate(sample_first_prompts(run)):
        ids = sample_.response_ids[:3] * 2
        drawn.append(
            sample_._replace(
                response_ids=ids, loss_positions=[0, 2, 3], turn_rewards=[REWARDS[row] / 2, 0.0]
            )
        )
    samples = assign_rewards(drawn, {"correct": REWARDS}, WEIGHTS)
    samples = assign_advantages(run.config, samples, WEIGHTS)
    rows = chosen_rows(samples)
    assert rows == [0, 1, 4, 6, 8, 9]
    halves = (REWARDS[rows] / 2).reshape(3, 2)
    expected = grpo.turn_advantages(np.stack([halves, halves], -1).tolist(), "group", 0.01)
    for row, turns in zip(rows, expected.reshape(6, 2), strict=True):
        assert samples[row].advantage == pytest.approx([turns[0], turns[1], turns[1]])


def test_a_group_with_equal_rewards_trains_nothing(tmp_path):
    run = make_run(tmp_path, "--train-completions", "2")
    samples = score_samples(run, np.repeat([1.0, 1.0, 0.0], 4))
    assert not any(sample_.has_signal or sample_.rewards_differ for sample_ in samples)
    marked = mark_for_update(run.config, samples, 0)
    assert not any(sample_.has_gradient for sample_ in marked)


def test_without_the_flag_every_completion_is_chosen(tmp_path):
    run = make_run(tmp_path)
    assert all(sample_.is_chosen for sample_ in score_samples(run))
    assert samples_file.Sample([], [], (), 0).is_chosen


# ---- a whole run


def test_the_log_marks_the_completions_that_were_left_out(tmp_path):
    run = make_run(tmp_path, "--train-completions", "2")
    samples = score_samples(run)
    records = list(journal.completion_records(1, samples))
    assert [not record.get("left_out", False) for record in records] == [
        sample_.is_chosen for sample_ in samples
    ]
    page_rows = [page.completion_for_page(record) for record in records]
    assert [row["left_out"] for row in page_rows] == [not sample_.is_chosen for sample_ in samples]


FLAGS = {
    "model": "demo",
    "task": "demo",
    "batch": 2,
    "groups": 4,
    "max_tokens": 8,
    "eval_every": 0,
    "train_completions": 2,
    "lora_layers": 2,
}


def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path):
    whole = Trainer.start(run_dir=str(tmp_path / "whole"), steps=3, **FLAGS).fit()
    stopped = Trainer.start(run_dir=str(tmp_path / "stopped"), steps=3, **FLAGS)
    for _ in stopped.steps():
        break
    resumed = Trainer.resume(tmp_path / "stopped").fit()
    for name, array in whole.run.learner.trainable.items():
        assert mx.array_equal(array, resumed.run.learner.trainable[name]), name


def test_a_run_says_what_the_settings_would_save(tmp_path, capsys):
    config = make_run(tmp_path).config
    model = model_choice.load_config("random:0.6b")
    demand = RunDemand(model, mx.float16, config.copy_with_settings(batch=8, groups=8), [256] * 8)
    line = time_estimate.format_phase_times_and_advice(demand)
    assert "rollout" in line and "update" in line
    assert "--train-completions 4" in line and "--lora-layers 14" in line
    chosen = demand._replace(config=demand.config.copy_with_settings(train_completions=4))
    assert "--train-completions 4" not in time_estimate.format_phase_times_and_advice(chosen)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--train-completions", "5"), ("--train-completions", "5", "4")),
        (("--train-completions", "1"), ("--train-completions", "1")),
        (("--lora-layers", "2", "--lora-rank", "0"), ("--lora-layers 2", "--lora-rank 0")),
        (("--train-completions", "2", "--teacher", "demo", "--loss", "distill"), ("2", "distill")),
    ],
)
def test_settings_that_do_not_fit_are_refused_by_name(tmp_path, flags, words):
    message = catch_message(lambda: make_run(tmp_path, *flags))
    assert all(word in message for word in words)
