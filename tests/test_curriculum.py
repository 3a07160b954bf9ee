"""A curriculum that a user writes: it sees the metrics of each step, and a resumed run continues it."""

import re

import numpy as np
import pytest
from conftest import ROOT, catch_message, read_log, run_command
from small_run import SMALL_SETTINGS

from disk import checkpoint
from tasks import curriculum
from tasks.draws import EpochPrompts
from train import Trainer

SMALL = SMALL_SETTINGS | {"eval_every": 0}


class Harder(EpochPrompts):
    """Draws from the first `num` prompts, which become more with each step."""

    def __init__(self, prompts):
        super().__init__(prompts.config, prompts.train, prompts.prompt_ids)
        self.num = 2
        self.seen = []
        self.commit()

    def next_prompts(self, draw_number):
        return self.train[self.num - 2 : self.num], self.prompt_ids[self.num - 2 : self.num]

    def observe_step(self, figures):
        self.seen.append((figures["step"], figures["reward/mean"] is not None))
        self.num += 1

    def commit(self):
        self.state = {"num": self.num}

    def load_state(self, state):
        self.num = state["num"]
        self.commit()


def start_with_curriculum(tmp_path, steps=2):
    trainer = Trainer.start(run_dir=str(tmp_path / "run"), steps=steps, **SMALL)
    trainer.run.prompts = Harder(trainer.run.prompts)
    return trainer


def test_a_curriculum_sees_the_metrics_of_each_step_and_continues_after_a_resume(tmp_path, capsys):
    trainer = start_with_curriculum(tmp_path)
    trainer.fit()
    assert trainer.run.prompts.seen == [(1, True), (2, True)]
    assert "run.prompts is Harder (was not set)" in capsys.readouterr().out
    extra = checkpoint.load(tmp_path / "run").extra
    assert extra["prompts"] == {"num": 4}

    resumed_trainer = Trainer.resume(tmp_path / "run", steps=3)
    resumed_trainer.save()  # the state stays in a checkpoint from before the curriculum is set
    assert checkpoint.load(tmp_path / "run").extra["prompts"] == {"num": 4}
    resumed_trainer.run.prompts = Harder(resumed_trainer.run.prompts)
    assert resumed_trainer.run.prompts.num == 4
    resumed_trainer.fit()
    assert resumed_trainer.run.prompts.num == 5
    assert "was Harder" not in capsys.readouterr().out


class Plain(EpochPrompts):
    """Has a state, but does not define `load_state`."""

    def observe_step(self, figures):
        self.state["num"] = self.state.get("num", 0) + 1


def make_plain_curriculum(run):
    return Plain(run.config, run.prompts.train, run.prompts.prompt_ids)


def test_a_state_is_restored_without_load_state_and_not_shared_between_runs(tmp_path, capsys):
    trainer = Trainer.start(run_dir=str(tmp_path / "run"), steps=2, **SMALL)
    trainer.run.prompts = make_plain_curriculum(trainer.run)
    assert "run.prompts" not in capsys.readouterr().out
    trainer.fit()
    assert EpochPrompts.state == {}  # the curriculum has changed only the state of its instance

    resumed_trainer = Trainer.resume(tmp_path / "run", steps=3)
    resumed_trainer.run.prompts = make_plain_curriculum(resumed_trainer.run)
    assert resumed_trainer.run.prompts.state == {"num": 2}
    output = capsys.readouterr().out
    assert "run.prompts is Plain, with its state after step 2: {'num': 2}" in output
    resumed_trainer.fit()
    assert resumed_trainer.run.prompts.state == {"num": 3}
    assert checkpoint.load(tmp_path / "run").extra["prompts"] == {"num": 3}


def test_a_curriculum_that_defines_a_state_but_cannot_restore_it_is_refused(tmp_path):
    class FromCommit(EpochPrompts):
        def commit(self):
            self.state = {"num": 1}

    class FromProperty(EpochPrompts):
        @property
        def state(self):
            return {"num": 1}

    trainer = Trainer.start(run_dir=str(tmp_path / "run"), steps=1, **SMALL)
    default_prompts = trainer.run.prompts
    for kind, member in ((FromCommit, "commit"), (FromProperty, "state")):
        prompts = kind(default_prompts.config, default_prompts.train, default_prompts.prompt_ids)
        message = catch_message(setattr, trainer.run, "prompts", prompts)
        assert f"{kind.__qualname__}, which defines {member} but no load_state" in message
        assert "def load_state(self, state)" in message
        assert trainer.run.prompts is default_prompts


def train_with_changed_prompts(tmp_path, change, **settings):
    """Trains two steps. `change` changes the two prompts of each step and their ids."""

    class Changed(EpochPrompts):
        def next_prompts(self, draw_number):
            return change(self, *super().next_prompts(draw_number))

    trainer = Trainer.start(run_dir=str(tmp_path / "run"), steps=2, **SMALL | settings)
    default_prompts = trainer.run.prompts
    trainer.run.prompts = Changed(
        default_prompts.config, default_prompts.train, default_prompts.prompt_ids
    )
    trainer.fit()


def swap_ids(self, examples, ids):
    return examples, [ids[1], ids[0]]


def test_a_prompt_with_the_ids_of_another_example_is_refused(tmp_path):
    message = catch_message(train_with_changed_prompts, tmp_path, swap_ids)
    assert "next_prompts returned, for example 1 of step 1" in message
    assert "the ids of another prompt" in message
    assert "run.encode_prompts(examples)" in message
    assert len(read_log(tmp_path / "run" / "metrics.jsonl")) == 0


def test_a_curriculum_may_write_new_prompts(tmp_path):
    class NewPrompts(EpochPrompts):
        def next_prompts(self, draw_number):
            examples, _ = super().next_prompts(draw_number)
            examples = [example | {"prompt": f"What is {draw_number}?"} for example in examples]
            return examples, trainer.run.encode_prompts(examples)

    trainer = Trainer.start(run_dir=str(tmp_path / "run"), steps=2, **SMALL)
    default_prompts = trainer.run.prompts
    trainer.run.prompts = NewPrompts(
        default_prompts.config, default_prompts.train, default_prompts.prompt_ids
    )
    trainer.fit()
    prompts = [row["prompt"] for row in read_log(tmp_path / "run" / "rollouts.jsonl")]
    assert [str(prompt).count("What is 1?") for prompt in prompts] == 4 * [0] + 4 * [1]


@pytest.mark.parametrize("num", [1, 3])
def test_a_number_of_prompts_other_than_batch_is_allowed_with_one_warning(tmp_path, capsys, num):
    def take(self, examples, ids):
        return (examples * 2)[:num], (ids * 2)[:num]

    train_with_changed_prompts(tmp_path, take)
    output = capsys.readouterr().out
    assert output.count("next_prompts returned") == 1
    noun = "prompt" if num == 1 else "prompts"
    assert f"next_prompts returned {num} {noun} for step 1, not the 2 of --batch" in output
    assert len(read_log(tmp_path / "run" / "rollouts.jsonl")) == 2 * num * SMALL["groups"]


@pytest.mark.parametrize(
    ("change", "expected_text"),
    [
        (lambda examples, ids: examples, "return a tuple of a list of examples and"),
        (lambda examples, ids: None, "next_prompts returned None for step 1; return a tuple"),
        (lambda examples, ids: ([], []), "returned no prompts for step 1"),
        (lambda examples, ids: (examples, ids[:1]), "2 examples, but the ids of 1 prompt"),
        (lambda examples, ids: (["a", "b"], ids), "returned 'a' as an example for step 1"),
        (lambda examples, ids: ids[5], "raised IndexError: list index out of range, at"),
    ],
)
def test_a_mistake_in_next_prompts_gives_a_one_line_error(change, expected_text):
    class Wrong(EpochPrompts):
        def next_prompts(self, draw_number):
            return change([{"prompt": "1"}, {"prompt": "2"}], [[1], [2]])

    prompts = Wrong(None, [], [])
    message = catch_message(curriculum.draw_checked_prompts, prompts, 0, None)
    assert message.startswith("run.prompts.next_prompts ")
    assert expected_text in message


def test_mistakes_in_the_other_methods_give_a_one_line_error(tmp_path):
    class Wrong(EpochPrompts):
        def observe_step(self, figures):
            self.state = {"num": figures["reward/men"]}

    class Numpy(EpochPrompts):
        def observe_step(self, figures):
            self.state = {"num": np.int64(1)}

    expected_beginnings = {
        Wrong: "run.prompts.observe_step raised KeyError: 'reward/men', at",
        Numpy: "run.prompts.state is {'num': np.int64(1)}, which JSON cannot express",
    }
    for kind, beginning in expected_beginnings.items():
        run_dir = tmp_path / kind.__name__
        trainer = Trainer.start(run_dir=str(run_dir), steps=2, **SMALL)
        default_prompts = trainer.run.prompts
        trainer.run.prompts = kind(
            default_prompts.config, default_prompts.train, default_prompts.prompt_ids
        )
        message = catch_message(trainer.fit)
        assert message.startswith(beginning), message
        assert "saved after step 0" in message or "step 1 was not completed" in message


@pytest.mark.slow
def test_a_curriculum_with_tools_need_not_encode_prompts(tmp_path):
    changes = {"model": "demo:tools", "task": "calculator", "max_tokens": 48, "reward_weights": {}}
    train_with_changed_prompts(tmp_path, swap_ids, **changes)
    assert len(read_log(tmp_path / "run" / "metrics.jsonl")) == 2


def test_a_resume_without_the_curriculum_is_refused(tmp_path, capsys):
    start_with_curriculum(tmp_path).fit()
    run = tmp_path / "run"
    resumed_trainer = Trainer.resume(run, steps=3)
    message = catch_message(lambda: list(resumed_trainer.steps()))
    assert "was trained with Harder as run.prompts" in message
    assert "\n" not in message
    assert resumed_trainer.run.step == 2

    process = run_command(ROOT / "train.py", "--resume", run, "--steps", "3", cwd=tmp_path)
    assert process.returncode == 2
    assert "was trained with Harder as run.prompts" in process.stderr

    Trainer.resume(run, steps=3, allow_changes=True).fit()
    assert "run.prompts is not set (was Harder)" in capsys.readouterr().out


def test_a_state_outside_json_and_a_missing_method_are_refused(tmp_path):
    trainer = start_with_curriculum(tmp_path)
    message = catch_message(setattr, trainer.run, "prompts", object())
    assert "class object, which has no next_prompts" in message
    trainer.run.prompts.commit = lambda: setattr(trainer.run.prompts, "state", {"a": {1}})
    message = catch_message(trainer.fit)
    assert "run.prompts.state is {'a': {1}}, which JSON cannot express" in message


@pytest.mark.slow
def test_the_curriculum_in_the_documentation_trains(tmp_path):
    page = (ROOT / "docs" / "runs.md").read_text("utf-8")
    code_blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    [code] = [block for block in code_blocks if "Ease" in block]
    names = {"Trainer": lambda: None}
    exec(code.partition("\ntrainer = ")[0], names)

    trainer = Trainer.start(run_dir=str(tmp_path / "run"), steps=2, **SMALL)
    trainer.run.prompts = names["EaseIn"](trainer.run.prompts)
    trainer.fit()
