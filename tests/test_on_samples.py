"""The hook `Trainer.on_samples`, which changes the samples of a step before the update."""

import re

import numpy as np
import pytest
from conftest import ROOT, catch_message, read_log

import trainer
from tasks.draws import EpochPrompts
from train import Trainer

SMALL = dict(
    model="demo",
    task="demo",
    batch=2,
    groups=4,
    max_tokens=6,
    eval_every=0,
    loss_type="grpo",
    reward_weights={"rubric": 0},
)


def reward_place(completions, **columns):
    """A reward that differs within each group."""
    return [float(number % 4) for number in range(len(completions))]


def start_run(tmp_path, name="run", **changes):
    settings = SMALL | {"steps": 1, "reward": reward_place} | changes
    return Trainer.start(run_dir=str(tmp_path / name), **settings)


def keep_all(run, samples):
    return samples


def keep_extremes(run, samples):
    """The samples with the highest and the lowest advantage of each group."""
    extremes = []
    for group in sorted({sample.group for sample in samples}):
        group_samples = [sample for sample in samples if sample.group == group]
        group_samples.sort(key=lambda sample: sample.advantage)
        extremes += [group_samples[0], group_samples[-1]]
    return extremes


def train_one_step(trainer, hook=None):
    """Trains a run of one step with a hook; returns the metrics."""
    trainer.on_samples = hook
    [metrics] = list(trainer.steps())
    return metrics


def test_a_hook_that_returns_the_same_samples_does_not_change_the_update(tmp_path):
    metrics_without_hook = train_one_step(start_run(tmp_path, "a"))
    metrics_with_hook = train_one_step(start_run(tmp_path, "b"), keep_all)
    for name in ("loss", "grad_norm", "update/rows", "reward/mean"):
        assert metrics_without_hook[name] == metrics_with_hook[name], name


def test_samples_that_a_hook_leaves_out_are_neither_trained_nor_counted(tmp_path):
    calls = []

    def keep_first_group(run, samples):
        calls.append((run.step, [sample.reward for sample in samples]))
        return [sample for sample in samples if sample.group == 0]

    metrics = train_one_step(start_run(tmp_path, "a"), keep_first_group)
    [(step, rewards)] = calls
    assert step == 0
    assert len(rewards) == 8
    assert len(set(rewards)) > 1
    assert 0 < metrics["update/rows"] <= 4
    lines = read_log(tmp_path / "a" / "rollouts.jsonl")
    assert len(lines) == 8  # the log contains all completions

    # The loss is a mean over the remaining samples, so a repetition keeps the gradient.
    def keep_extremes_twice(run, samples):
        return 2 * keep_extremes(run, samples)

    metrics_of_two = train_one_step(start_run(tmp_path, "c"), keep_extremes_twice)
    metrics_of_one = train_one_step(start_run(tmp_path, "d"), keep_extremes)
    grad_norm = metrics_of_one["grad_norm"]
    np.testing.assert_allclose(metrics_of_two["grad_norm"], grad_norm, rtol=1e-3)
    assert metrics_of_two["update/rows"] == 2 * metrics_of_one["update/rows"]


@pytest.mark.parametrize(
    "changes",
    [
        {"temp": 0.7, "top_k": 0},
        {"model": "demo:tools", "task": "calculator", "max_tokens": 48, "reward_weights": {}},
    ],
    ids=["answers", "tools"],
)
def test_a_hook_receives_the_entropy_of_each_token_that_the_policy_wrote(tmp_path, changes):
    received_samples = []

    def record_samples(run, samples):
        received_samples.extend(samples)
        return samples

    metrics_without_hook = train_one_step(start_run(tmp_path, "a", **changes))
    metrics = train_one_step(start_run(tmp_path, "b", **changes), record_samples)
    for name in ("loss", "grad_norm", "update/rows", "mismatch/ratio_max"):
        assert metrics_without_hook[name] == metrics[name], name
    for sample in received_samples:
        assert sample.entropies.shape == (len(sample.loss_positions),)
        assert (sample.entropies >= 0).all()
    entropies = np.concatenate([sample.entropies for sample in received_samples])
    assert len(set(entropies.tolist())) > 8

    # The update computes the same entropies, because the policy has not changed yet.
    if metrics["update/rows"] == len(received_samples):
        np.testing.assert_allclose(entropies.mean(), metrics["entropy"], rtol=1e-2)


def test_the_hook_method_of_a_subclass_receives_entropies(tmp_path):
    class RecordingTrainer(Trainer):
        received_samples = ()

        def on_samples(self, run, samples):
            self.received_samples = samples
            return samples

    trainer = RecordingTrainer.start(
        run_dir=str(tmp_path / "run"), steps=1, reward=reward_place, **SMALL
    )
    trainer.fit()
    assert len(trainer.received_samples) == 8
    for sample in trainer.received_samples:
        assert len(sample.entropies) == len(sample.logprobs)


def test_the_hook_method_of_a_subclass_can_add_samples_of_earlier_steps(tmp_path):
    class ReplayTrainer(Trainer):
        old_samples = ()

        def on_samples(self, run, samples):
            replayed = [sample._replace(group=sample.group + 100) for sample in self.old_samples]
            self.old_samples = samples
            return samples + replayed

    settings = SMALL | {"steps": 2, "reward": reward_place}
    trainer = ReplayTrainer.start(run_dir=str(tmp_path / "run"), **settings)
    first_metrics, second_metrics = list(trainer.steps())
    assert second_metrics["update/rows"] > first_metrics["update/rows"]


@pytest.mark.parametrize(
    ("hook", "expected_text"),
    [
        (lambda run, samples: None, "returned None; return a list of at least one sample"),
        (lambda run, samples: [], "returned []; return a list of at least one sample"),
        (lambda run, samples: [1], "returned [1]; return a list of at least one sample"),
        (lambda run, samples: samples[8], "raised IndexError: list index out of range, at"),
        (
            lambda run, samples: [samples[0]._replace(advantage=float("nan"))],
            "returned a sample with the advantage nan; all advantages must be finite",
        ),
    ],
)
def test_a_hook_that_fails_or_returns_no_samples_ends_in_one_error_line(
    tmp_path, hook, expected_text
):
    message = catch_message(train_one_step, start_run(tmp_path), hook)
    assert message.startswith("Trainer.on_samples")
    assert expected_text in message
    assert "\n" not in message


def fail_in_step_2(run, samples):
    if run.step == 1:
        raise KeyError("reward")
    return samples


def test_the_error_of_a_hook_names_the_call_that_resumes_the_run(tmp_path):
    stopped = start_run(tmp_path, steps=3)
    stopped.on_samples = fail_in_step_2
    message = catch_message(lambda: list(stopped.steps()))
    run = str(tmp_path / "run")
    call = f"Trainer.resume({run!r}, allow_changes=True)"
    hint = f"saved after step 1, correct the function and continue in Python: call {call}"
    assert message.endswith(f"{hint}, and set trainer.on_samples before the first step")
    assert "--resume" not in message

    resumed = Trainer.resume(run, steps=3)  # as the hint says
    resumed.on_samples = fail_in_step_2
    assert "raised KeyError" in catch_message(lambda: list(resumed.steps()))


class SamePrompts(EpochPrompts):
    """Draws the same prompts as its base class."""


def test_the_hint_after_a_stop_names_every_part_and_a_setting_that_needs_less_memory(tmp_path):
    run = start_run(tmp_path).run
    run.on_samples = keep_all
    run.prompts = SamePrompts(run.config, run.prompts.train, run.prompts.prompt_ids)
    hint = trainer.save_and_describe_stop(run, KeyboardInterrupt())
    parts = "and set trainer.on_samples and trainer.run.prompts before the first step"
    assert hint.endswith(f"Trainer.resume({str(run.dir)!r}), {parts}")

    run.journal.phase = "rollout"
    hint = trainer.save_and_describe_stop(run, MemoryError("out of memory"))
    assert hint.endswith(f"Trainer.resume({str(run.dir)!r}, rollout_batch_size=4), {parts}")


def test_a_resume_without_the_hook_is_refused(tmp_path):
    train_one_step(start_run(tmp_path), keep_all)
    resumed = Trainer.resume(tmp_path / "run", steps=2)
    message = catch_message(lambda: list(resumed.steps()))
    assert "was trained with keep_all as on_samples" in message
    assert "set trainer.on_samples before" in message

    resumed.on_samples = keep_all
    assert [metrics["step"] for metrics in resumed.steps()] == [2]


def test_the_hook_in_the_documentation_trains(tmp_path):
    text = (ROOT / "docs" / "runs.md").read_text("utf-8")
    programs = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    [program] = [code for code in programs if "on_samples" in code]
    definitions = {}
    exec(program.partition("\ntrainer = ")[0], definitions)
    metrics = train_one_step(start_run(tmp_path), definitions["keep_extremes"])
    assert metrics["update/rows"] <= 4
