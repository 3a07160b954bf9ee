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


def by_place(completions, **columns):
    """A reward that differs within each group."""
    return [float(number % 4) for number in range(len(completions))]


def start(tmp_path, name="run", **changes):
    settings = SMALL | {"steps": 1, "reward": by_place} | changes
    return Trainer.start(run_dir=str(tmp_path / name), **settings)


def keep_all(run, samples):
    return samples


def keep_extremes(run, samples):
    """The samples with the highest and the lowest advantage of each group."""
    kept = []
    for group in sorted({sample.group for sample in samples}):
        rows = [sample for sample in samples if sample.group == group]
        rows.sort(key=lambda sample: sample.advantage)
        kept += [rows[0], rows[-1]]
    return kept


def train(trainer, hook=None):
    trainer.on_samples = hook
    [figures] = list(trainer.steps())
    return figures


def test_a_hook_that_changes_nothing_changes_nothing(tmp_path):
    plain = train(start(tmp_path, "a"))
    hooked = train(start(tmp_path, "b"), keep_all)
    for name in ("loss", "grad_norm", "update/rows", "reward/mean"):
        assert plain[name] == hooked[name], name


def test_samples_that_a_hook_leaves_out_are_neither_trained_nor_counted(tmp_path):
    seen = []

    def keep_first_group(run, samples):
        seen.append((run.step, len(samples), [sample.reward for sample in samples]))
        return [sample for sample in samples if sample.group == 0]

    figures = train(start(tmp_path, "a"), keep_first_group)
    [(step, num, rewards)] = seen
    assert (step, num) == (0, 8) and len(set(rewards)) > 1
    assert 0 < figures["update/rows"] <= 4
    lines = read_log(tmp_path / "a" / "rollouts.jsonl")
    assert len(lines) == 8  # the logs describe what was generated

    # the mean is over the samples that are left: the same samples twice give the same gradient
    twice = train(start(tmp_path, "c"), lambda run, samples: 2 * keep_extremes(run, samples))
    once = train(start(tmp_path, "d"), keep_extremes)
    np.testing.assert_allclose(twice["grad_norm"], once["grad_norm"], rtol=1e-3)
    assert twice["update/rows"] == 2 * once["update/rows"]


@pytest.mark.parametrize(
    "changes",
    [
        {"temp": 0.7, "top_k": 0},
        {"model": "demo:tools", "task": "calculator", "max_tokens": 48, "reward_weights": {}},
    ],
    ids=["answers", "tools"],
)
def test_a_hook_receives_the_entropy_of_each_token_that_the_policy_wrote(tmp_path, changes):
    seen = []

    def note_entropies(run, samples):
        seen.extend(samples)
        return samples

    plain = train(start(tmp_path, "a", **changes))
    hooked = train(start(tmp_path, "b", **changes), note_entropies)
    for name in ("loss", "grad_norm", "update/rows", "mismatch/ratio_max"):
        assert plain[name] == hooked[name], name
    for sample in seen:
        assert sample.entropies.shape == (len(sample.loss_positions),)
        assert (sample.entropies >= 0).all()
    every_token = np.concatenate([sample.entropies for sample in seen])
    assert len(set(every_token.tolist())) > 8
    # the update computes the same entropies, because the policy has not changed yet
    if hooked["update/rows"] == len(seen):
        np.testing.assert_allclose(every_token.mean(), hooked["entropy"], rtol=1e-2)


def test_a_method_of_a_subclass_receives_entropies_too(tmp_path):
    class Watch(Trainer):
        seen = ()

        def on_samples(self, run, samples):
            self.seen = samples
            return samples

    trainer = Watch.start(run_dir=str(tmp_path / "run"), steps=1, reward=by_place, **SMALL)
    trainer.fit()
    assert len(trainer.seen) == 8
    for sample in trainer.seen:
        assert len(sample.entropies) == len(sample.logprobs)


def test_samples_of_earlier_steps_can_be_added_and_a_subclass_may_have_the_hook(tmp_path):
    class Replay(Trainer):
        old = ()

        def on_samples(self, run, samples):
            replayed = [sample._replace(group=sample.group + 100) for sample in self.old]
            self.old = samples
            return samples + replayed

    trainer = Replay.start(
        run_dir=str(tmp_path / "run"), **SMALL | {"steps": 2, "reward": by_place}
    )
    first, second = list(trainer.steps())
    assert second["update/rows"] > first["update/rows"]


@pytest.mark.parametrize(
    ("hook", "words"),
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
def test_a_hook_that_fails_or_returns_no_samples_is_told_in_one_line(tmp_path, hook, words):
    message = catch_message(train, start(tmp_path), hook)
    assert message.startswith("Trainer.on_samples") and words in message and "\n" not in message


def fail_in_step_2(run, samples):
    if run.step == 1:
        raise KeyError("reward")
    return samples


def test_after_an_error_the_hint_names_what_resumes_a_run_with_a_hook(tmp_path):
    stopped = start(tmp_path, steps=3)
    stopped.on_samples = fail_in_step_2
    message = catch_message(lambda: list(stopped.steps()))
    run = str(tmp_path / "run")
    call = f"Trainer.resume({run!r}, allow_changes=True)"
    hint = f"saved after step 1, correct the function and continue in Python: call {call}"
    assert message.endswith(f"{hint}, and set trainer.on_samples before the first step")
    assert "--resume" not in message

    resumed = Trainer.resume(run, steps=3)  # what the hint says
    resumed.on_samples = fail_in_step_2
    assert "raised KeyError" in catch_message(lambda: list(resumed.steps()))


class LikeUsual(EpochPrompts):
    """Draws as usual."""


def test_the_hint_names_every_part_and_the_setting_that_needs_less_memory(tmp_path):
    out = start(tmp_path)
    run = out.run
    run.on_samples = keep_all
    run.prompts = LikeUsual(run.config, run.prompts.train, run.prompts.prompt_ids)
    nothing = trainer.save_and_describe_stop(run, KeyboardInterrupt())
    parts = "and set trainer.on_samples and trainer.run.prompts before the first step"
    assert nothing.endswith(f"Trainer.resume({str(run.dir)!r}), {parts}")
    run.journal.phase = "rollout"
    less = trainer.save_and_describe_stop(run, MemoryError("out of memory"))
    assert less.endswith(f"Trainer.resume({str(run.dir)!r}, rollout_batch_size=4), {parts}")


def test_a_resume_without_the_hook_is_refused(tmp_path):
    train(start(tmp_path), keep_all)
    resumed = Trainer.resume(tmp_path / "run", steps=2)
    message = catch_message(lambda: list(resumed.steps()))
    assert "was trained with keep_all as on_samples" in message
    assert "set trainer.on_samples before" in message
    resumed.on_samples = keep_all
    assert [figures["step"] for figures in resumed.steps()] == [2]


def test_the_hook_of_the_page_trains(tmp_path):
    text = (ROOT / "docs" / "runs.md").read_text("utf-8")
    pages = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    [shown] = [code for code in pages if "on_samples" in code]
    names = {}
    exec(shown.partition("\ntrainer = ")[0], names)
    assert train(start(tmp_path), names["keep_extremes"])["update/rows"] <= 4
