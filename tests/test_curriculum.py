"""A curriculum of a program's own: it sees the figures of each step, and a resume goes on with it."""

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


def start(tmp_path, steps=2):
    trainer = Trainer.start(run_dir=str(tmp_path / "run"), steps=steps, **SMALL)
    trainer.run.prompts = Harder(trainer.run.prompts)
    return trainer


def test_a_curriculum_sees_the_figures_of_each_step_and_goes_on_after_a_resume(tmp_path, capsys):
    trainer = start(tmp_path)
    trainer.fit()
    assert trainer.run.prompts.seen == [(1, True), (2, True)]
    assert "run.prompts is Harder (was not set)" in capsys.readouterr().out
    extra = checkpoint.load(tmp_path / "run").extra
    assert extra["prompts"] == {"num": 4}

    resumed = Trainer.resume(tmp_path / "run", steps=3)
    resumed.save()  # a save before the curriculum is set loses nothing
    assert checkpoint.load(tmp_path / "run").extra["prompts"] == {"num": 4}
    resumed.run.prompts = Harder(resumed.run.prompts)
    assert resumed.run.prompts.num == 4
    resumed.fit()
    assert resumed.run.prompts.num == 5 and "was Harder" not in capsys.readouterr().out


class Plain(EpochPrompts):
    """Has a state, but no method of its own that restores it."""

    def observe_step(self, figures):
        self.state["num"] = self.state.get("num", 0) + 1


def make_plain(run):
    return Plain(run.config, run.prompts.train, run.prompts.prompt_ids)


def test_a_state_is_restored_without_a_load_state_and_does_not_leak_into_other_runs(
    tmp_path, capsys
):
    trainer = Trainer.start(run_dir=str(tmp_path / "run"), steps=2, **SMALL)
    trainer.run.prompts = make_plain(trainer.run)
    assert "run.prompts" not in capsys.readouterr().out
    trainer.fit()
    assert EpochPrompts.state == {}  # the state that was changed in place is the object's own
    resumed = Trainer.resume(tmp_path / "run", steps=3)
    resumed.run.prompts = make_plain(resumed.run)
    assert resumed.run.prompts.state == {"num": 2}
    assert "run.prompts is Plain, with its state after step 2: {'num': 2}" in (
        capsys.readouterr().out
    )
    resumed.fit()
    assert resumed.run.prompts.state == {"num": 3}
    assert checkpoint.load(tmp_path / "run").extra["prompts"] == {"num": 3}


def test_a_curriculum_that_makes_its_state_but_cannot_restore_it_is_refused(tmp_path):
    class FromCommit(EpochPrompts):
        def commit(self):
            self.state = {"num": 1}

    class FromProperty(EpochPrompts):
        @property
        def state(self):
            return {"num": 1}

    trainer = Trainer.start(run_dir=str(tmp_path / "run"), steps=1, **SMALL)
    drawn = trainer.run.prompts
    for kind, member in ((FromCommit, "commit"), (FromProperty, "state")):
        prompts = kind(drawn.config, drawn.train, drawn.prompt_ids)
        message = catch_message(setattr, trainer.run, "prompts", prompts)
        assert f"{kind.__qualname__}, which defines {member} but no load_state" in message
        assert "def load_state(self, state)" in message
        assert trainer.run.prompts is drawn


def run_with(tmp_path, change, **settings):
    """Trains two steps with prompts that `change` makes from a usual draw of two prompts."""

    class Changed(EpochPrompts):
        def next_prompts(self, draw_number):
            return change(self, *super().next_prompts(draw_number))

    trainer = Trainer.start(run_dir=str(tmp_path / "run"), steps=2, **SMALL | settings)
    drawn = trainer.run.prompts
    trainer.run.prompts = Changed(drawn.config, drawn.train, drawn.prompt_ids)
    trainer.fit()


def shift_ids(self, examples, ids):
    return examples, [ids[1], ids[0]]


def test_a_drawn_prompt_whose_ids_belong_to_another_example_is_refused(tmp_path):
    message = catch_message(run_with, tmp_path, shift_ids)
    assert "next_prompts returned, for example 1 of step 1" in message
    assert "the ids of another prompt" in message and "run.encode_prompts(examples)" in message
    assert len(read_log(tmp_path / "run" / "metrics.jsonl")) == 0


def test_a_curriculum_may_make_prompts_of_its_own(tmp_path):
    class Made(EpochPrompts):
        def next_prompts(self, draw_number):
            examples, _ = super().next_prompts(draw_number)
            examples = [example | {"prompt": f"What is {draw_number}?"} for example in examples]
            return examples, trainer.run.encode_prompts(examples)

    trainer = Trainer.start(run_dir=str(tmp_path / "run"), steps=2, **SMALL)
    drawn = trainer.run.prompts
    trainer.run.prompts = Made(drawn.config, drawn.train, drawn.prompt_ids)
    trainer.fit()
    prompts = [row["prompt"] for row in read_log(tmp_path / "run" / "rollouts.jsonl")]
    assert [str(prompt).count("What is 1?") for prompt in prompts] == 4 * [0] + 4 * [1]


@pytest.mark.parametrize("num", [1, 3])
def test_another_number_of_prompts_than_batch_is_trained_and_told_once(tmp_path, capsys, num):
    def take(self, examples, ids):
        return (examples * 2)[:num], (ids * 2)[:num]

    run_with(tmp_path, take)
    printed = capsys.readouterr().out
    line = f"next_prompts returned {num} prompt{'s' * (num > 1)} for step 1, not the 2 of --batch"
    assert printed.count("next_prompts returned") == 1 and line in printed
    assert len(read_log(tmp_path / "run" / "rollouts.jsonl")) == 2 * num * SMALL["groups"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda examples, ids: examples, "return a tuple of a list of examples and"),
        (lambda examples, ids: None, "next_prompts returned None for step 1; return a tuple"),
        (lambda examples, ids: ([], []), "returned no prompts for step 1"),
        (lambda examples, ids: (examples, ids[:1]), "2 examples, but the ids of 1 prompt"),
        (lambda examples, ids: (["a", "b"], ids), "returned 'a' as an example for step 1"),
        (lambda examples, ids: ids[5], "raised IndexError: list index out of range, at"),
    ],
)
def test_a_mistake_in_next_prompts_is_told_in_one_line(change, words):
    class Wrong(EpochPrompts):
        def next_prompts(self, draw_number):
            return change([{"prompt": "1"}, {"prompt": "2"}], [[1], [2]])

    prompts = Wrong(None, [], [])
    message = catch_message(curriculum.draw_checked_prompts, prompts, 0, None)
    assert message.startswith("run.prompts.next_prompts ") and words in message


def test_mistakes_in_the_other_methods_are_told_in_one_line_too(tmp_path):
    class Wrong(EpochPrompts):
        def observe_step(self, figures):
            self.state = {"num": figures["reward/men"]}

    class Numpy(EpochPrompts):
        def observe_step(self, figures):
            self.state = {"num": np.int64(1)}

    for kind, words in (
        (Wrong, "run.prompts.observe_step raised KeyError: 'reward/men', at"),
        (Numpy, "run.prompts.state is {'num': np.int64(1)}, which JSON cannot express"),
    ):
        run_dir = tmp_path / kind.__name__
        trainer = Trainer.start(run_dir=str(run_dir), steps=2, **SMALL)
        drawn = trainer.run.prompts
        trainer.run.prompts = kind(drawn.config, drawn.train, drawn.prompt_ids)
        message = catch_message(trainer.fit)
        assert message.startswith(words), message
        assert "saved after step 0" in message or "step 1 was not completed" in message


@pytest.mark.slow
def test_a_curriculum_with_tools_need_not_encode_prompts(tmp_path):
    changes = {"model": "demo:tools", "task": "calculator", "max_tokens": 48, "reward_weights": {}}
    run_with(tmp_path, shift_ids, **changes)
    assert len(read_log(tmp_path / "run" / "metrics.jsonl")) == 2


def test_a_resume_without_the_curriculum_is_refused(tmp_path, capsys):
    start(tmp_path).fit()
    resumed = Trainer.resume(tmp_path / "run", steps=3)
    message = catch_message(lambda: list(resumed.steps()))
    assert "was trained with Harder as run.prompts" in message and "\n" not in message
    assert resumed.run.step == 2

    run = tmp_path / "run"
    done = run_command(ROOT / "train.py", "--resume", run, "--steps", "3", cwd=tmp_path)
    assert done.returncode == 2 and "was trained with Harder as run.prompts" in done.stderr

    allowed = Trainer.resume(run, steps=3, allow_changes=True)
    allowed.fit()
    assert "run.prompts is not set (was Harder)" in capsys.readouterr().out


def test_a_state_that_json_cannot_express_and_a_missing_method_are_refused(tmp_path):
    trainer = start(tmp_path)
    message = catch_message(setattr, trainer.run, "prompts", object())
    assert "class object, which has no next_prompts" in message
    trainer.run.prompts.commit = lambda: setattr(trainer.run.prompts, "state", {"a": {1}})
    message = catch_message(trainer.fit)
    assert "run.prompts.state is {'a': {1}}, which JSON cannot express" in message


@pytest.mark.slow
def test_the_curriculum_of_the_page_trains(tmp_path):
    text = (ROOT / "docs" / "runs.md").read_text("utf-8")
    [shown] = [
        code for code in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "Ease" in code
    ]
    names = {"Trainer": lambda: None}
    exec(shown.partition("\ntrainer = ")[0], names)
    trainer = Trainer.start(run_dir=str(tmp_path / "run"), steps=2, **SMALL)
    trainer.run.prompts = names["EaseIn"](trainer.run.prompts)
    trainer.fit()
