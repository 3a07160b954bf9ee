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
from step.advantages import assign_advantages, mark_for_update
from step.batch import make_batches
from step.sample import Sample
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

    assert chosen == sorted(set(chosen))
    assert len(chosen) == num_chosen
    subsets = itertools.combinations(range(size), num_chosen)
    largest = max(exact_variance(rewards[list(subset)]) for subset in subsets)
    assert largest - exact_variance(rewards[chosen]) <= largest * Fraction(1, 10**9)


def test_among_equal_rewards_the_first_ones_are_chosen():
    chosen = grpo.choose_rewards_of_largest_variance(np.array([1.0, 0, 1, 0, 1, 0]), 2)
    assert chosen == [0, 1]
    chosen = grpo.choose_rewards_of_largest_variance(np.array([0.0, 0, 0, 1, 1, 0]), 4)
    assert chosen == [0, 1, 3, 4]
    chosen = grpo.choose_rewards_of_largest_variance(np.full(5, 7.0), 3)
    assert chosen == [0, 1, 2]


def test_among_subsets_of_equal_variance_the_one_with_more_high_rewards_is_chosen():
    assert grpo.choose_rewards_of_largest_variance(np.array([0.0, 0, 1, 2, 2]), 3) == [0, 3, 4]


def test_a_large_common_offset_does_not_change_the_choice():
    offset = 2.0**40
    rewards_with_offset = np.array([0.5, 0.1, 0.9, 0.3, 0.7]) + offset
    rounded_rewards = rewards_with_offset - offset
    chosen = grpo.choose_rewards_of_largest_variance(rewards_with_offset, 3)
    assert chosen == grpo.choose_rewards_of_largest_variance(rounded_rewards, 3)


def test_all_completions_of_a_small_group_are_chosen():
    assert grpo.choose_rewards_of_largest_variance(np.array([1.0, 2.0]), 4) == [0, 1]
    assert grpo.choose_rewards_of_largest_variance(np.array([]), 4) == []


# ---- the samples of a step


def score_samples(run, rewards=REWARDS, **fields):
    """Samples of the run with these rewards, (N,), and with their advantages."""
    samples = [sample._replace(**fields) for sample in sample_first_prompts(run)]
    samples = assign_rewards(samples, {"correct": np.array(rewards)}, WEIGHTS)
    return assign_advantages(run.config, samples, WEIGHTS)


def chosen_rows(samples):
    return [row for row, sample in enumerate(samples) if sample.is_chosen]


def test_the_advantages_equal_those_of_groups_of_only_the_chosen_completions(tmp_path):
    run = make_run(tmp_path, "--train-completions", "2")
    samples = score_samples(run)
    assert chosen_rows(samples) == [0, 1, 4, 6, 8, 9]
    chosen = np.array([samples[row].advantage for row in chosen_rows(samples)])
    expected = grpo.group_advantages(np.array([[0.0, 1], [0, 2], [0.5, 1]]), signal_floor=0.01)
    assert chosen == pytest.approx(expected.ravel())
    left_out = [sample for sample in samples if not sample.is_chosen]
    assert all(sample.advantage == 0 for sample in left_out)


@pytest.mark.parametrize("loss", ["grpo", "dr_grpo", "dapo", "cispo", "sapo"])
@pytest.mark.parametrize("beta", ["0", "0.1"])
def test_a_step_equals_a_step_on_a_rollout_of_only_the_chosen_completions(tmp_path, loss, beta):
    flags = ["--loss-type", loss, "--beta", beta]
    if loss == "cispo":
        flags += ["--epsilon-high", "5"]
    run = make_run(tmp_path, *flags, "--train-completions", "2")
    update_once(run)  # B of the adapters is 0 before
    samples = score_samples(run)
    result, gradient = record_gradient(run, make_marked_batches(run, samples))
    chosen = [samples[row] for row in chosen_rows(samples)]
    expected, expected_gradient = record_gradient(run, make_marked_batches(run, chosen))

    assert result.loss == pytest.approx(expected.loss, rel=1e-6, abs=1e-7)
    largest = max(mx.abs(array).max().item() for array in expected_gradient.values())
    for name, array in expected_gradient.items():
        distance = mx.abs(array - gradient[name]).max().item()
        assert distance <= 1e-6 * largest, name


def make_marked_batches(run, samples):
    """The batches of an update of these samples, with reference log-probabilities if needed."""
    import update

    marked = mark_for_update(run.config, samples, 0, run.learner.loss.all_have_gradient)
    batches = make_batches(marked, 1024)
    if run.config.objective.beta:
        batches = update.add_reference_logprobs(run.learner, batches)
    return batches


def test_no_divisor_counts_left_out_completions_and_each_is_measured_in_one_of_several_steps(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(advantages, "MEASURED_OF", 3)
    run = make_run(tmp_path, "--train-completions", "2")
    samples = score_samples(run)
    num_chosen_tokens = sum(len(samples[row].loss_positions) for row in chosen_rows(samples))
    num_tokens = sum(len(sample.loss_positions) for sample in samples)
    all_measured_rows = set()
    for step in range(3):
        batches = make_batches(mark_for_update(run.config, samples, step), 1024)
        for batch in batches:
            assert batch.num_rows == 6
            assert batch.num_loss_tokens == num_chosen_tokens
            assert batch.num_counted_tokens == num_tokens

        trained_rows = []
        measured_rows = []
        for batch in batches:
            rows = trained_rows if batch.is_trained else measured_rows
            rows.extend(batch.rows)
        assert sorted(trained_rows) == chosen_rows(samples)
        assert len(measured_rows) == 2
        all_measured_rows |= set(measured_rows)

        represented_tokens = sum((batch.mask * batch.weights).sum().item() for batch in batches)
        assert represented_tokens == pytest.approx(num_tokens, rel=1e-6)
    assert all_measured_rows == set(range(12)) - set(chosen_rows(samples))


def test_a_completion_that_max_tokens_cut_off_is_never_chosen_if_it_is_masked(tmp_path):
    run = make_run(tmp_path, "--train-completions", "2", "--truncated", "mask")
    # Three completions of the first group are complete, one of the second, none of the third.
    is_cut_off = [False, True, False, False] + [True] * 3 + [False] + [True] * 4
    samples = []
    for sample, cut_off in zip(sample_first_prompts(run), is_cut_off, strict=True):
        samples.append(sample._replace(finish_reason="length" if cut_off else "stop"))
    samples = assign_rewards(samples, {"correct": REWARDS}, WEIGHTS)
    samples = assign_advantages(run.config, samples, WEIGHTS)

    assert chosen_rows(samples) == [0, 3, 7]
    assert np.isfinite([sample.advantage for sample in samples]).all()
    assert [row for row, sample in enumerate(samples) if sample.advantage] == [0, 3]
    result, _ = record_gradient(run, make_batches(mark_for_update(run.config, samples, 0), 1024))
    assert result.num_with_gradient == 2


@pytest.mark.parametrize("scale", ["group", "batch", "mean", "none"])
def test_a_group_without_chosen_completions_changes_no_other_group(scale):
    tables = np.array([[0.0, 1.0], [0.25, 0.5]])
    empty = np.full((1, 2), np.nan)
    expected = grpo.group_advantages(tables, scale)
    for place in range(3):
        with_empty = np.insert(tables, place, empty, axis=0)
        group_advantages = grpo.group_advantages(with_empty, scale)
        assert (group_advantages[place] == 0).all()
        assert np.array_equal(np.delete(group_advantages, place, axis=0), expected)


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


def test_an_own_advantage_gets_only_the_rewards_of_chosen_completions(tmp_path):
    run = make_run(tmp_path, "--train-completions", "2")
    tables = []

    def compute_own_advantages(rewards):
        tables.append(rewards)
        return rewards - 0.5

    samples = assign_rewards(sample_first_prompts(run), {"correct": REWARDS}, WEIGHTS)
    samples = assign_advantages(run.config, samples, WEIGHTS, compute_own_advantages)
    assert tables[0].tolist() == [[0.0, 1.0], [0.0, 2.0], [0.5, 1.0]]
    chosen_advantages = [samples[row].advantage for row in chosen_rows(samples)]
    assert chosen_advantages == [-0.5, 0.5, -0.5, 1.5, 0, 0.5]


def test_the_turns_of_chosen_conversations_are_compared_with_each_other(tmp_path):
    run = make_run(tmp_path, "--train-completions", "2")
    samples = []
    for row, sample in enumerate(sample_first_prompts(run)):
        ids = sample.response_ids[:3] * 2
        turn_rewards = [REWARDS[row] / 2, 0.0]
        samples.append(
            sample._replace(response_ids=ids, loss_positions=[0, 2, 3], turn_rewards=turn_rewards)
        )
    samples = assign_rewards(samples, {"correct": REWARDS}, WEIGHTS)
    samples = assign_advantages(run.config, samples, WEIGHTS)
    rows = chosen_rows(samples)
    assert rows == [0, 1, 4, 6, 8, 9]
    halves = (REWARDS[rows] / 2).reshape(3, 2)
    expected = grpo.turn_advantages(np.stack([halves, halves], -1).tolist(), "group", 0.01)
    for row, (first, second) in zip(rows, expected.reshape(6, 2), strict=True):
        assert samples[row].advantage == pytest.approx([first, second, second])


def test_a_group_with_equal_rewards_trains_nothing(tmp_path):
    run = make_run(tmp_path, "--train-completions", "2")
    samples = score_samples(run, np.repeat([1.0, 1.0, 0.0], 4))
    assert not any(sample.has_signal for sample in samples)
    assert not any(sample.rewards_differ for sample in samples)
    marked = mark_for_update(run.config, samples, 0)
    assert not any(sample.has_gradient for sample in marked)


def test_without_the_flag_every_completion_is_chosen(tmp_path):
    run = make_run(tmp_path)
    assert all(sample.is_chosen for sample in score_samples(run))
    assert Sample([], [], (), 0).is_chosen


# ---- a whole run


def test_the_log_and_the_page_mark_the_completions_that_were_left_out(tmp_path):
    run = make_run(tmp_path, "--train-completions", "2")
    samples = score_samples(run)
    records = list(journal.completion_records(1, samples))
    is_left_out = [not sample.is_chosen for sample in samples]
    assert [record.get("left_out", False) for record in records] == is_left_out
    page_rows = [page.completion_for_page(record) for record in records]
    assert [row["left_out"] for row in page_rows] == is_left_out


SETTINGS = {
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
    uninterrupted = Trainer.start(run_dir=str(tmp_path / "uninterrupted"), steps=3, **SETTINGS)
    uninterrupted.fit()

    stopped = Trainer.start(run_dir=str(tmp_path / "stopped"), steps=3, **SETTINGS)
    for _ in stopped.steps():
        break
    resumed = Trainer.resume(tmp_path / "stopped").fit()

    for name, array in uninterrupted.run.learner.trainable.items():
        assert mx.array_equal(array, resumed.run.learner.trainable[name]), name


def test_the_time_estimate_advises_settings_that_would_save_time(tmp_path, capsys):
    config = make_run(tmp_path).config
    model = model_choice.load_config("random:0.6b")
    demand = RunDemand(model, mx.float16, config.copy_with_settings(batch=8, groups=8), [256] * 8)
    line = time_estimate.format_phase_times_and_advice(demand)
    assert "rollout" in line
    assert "update" in line
    assert "--train-completions 4" in line
    assert "--lora-layers 14" in line

    chosen = demand._replace(config=demand.config.copy_with_settings(train_completions=4))
    assert "--train-completions 4" not in time_estimate.format_phase_times_and_advice(chosen)


@pytest.mark.parametrize(
    ("flags", "expected_texts"),
    [
        (("--train-completions", "5"), ("--train-completions", "5", "4")),
        (("--train-completions", "1"), ("--train-completions", "1")),
        (("--lora-layers", "2", "--lora-rank", "0"), ("--lora-layers 2", "--lora-rank 0")),
        (("--train-completions", "2", "--teacher", "demo", "--loss", "distill"), ("2", "distill")),
    ],
)
def test_the_refusal_of_contradictory_settings_names_them(tmp_path, flags, expected_texts):
    message = catch_message(lambda: make_run(tmp_path, *flags))
    for expected_text in expected_texts:
        assert expected_text in message
