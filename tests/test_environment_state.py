"""What an environment is told about its episode, and the state that it keeps between episodes."""

import re

import pytest
from conftest import ROOT, catch_message

from disk import checkpoint
from prompts.examples import Example
from tools import environment_state
from tools.calls import make_environment_schemas
from train import Trainer

SMALL = {
    "model": "demo:tools",
    "batch": 2,
    "groups": 2,
    "max_turns": 2,
    "max_tokens": 8,
    "eval_every": 2,
    "eval_limit": 2,
}
LEVELS = '''
SEEN = []


class Levels:
    """A game that becomes harder with each episode of training."""

    level = 0

    def reset(self, **row: object) -> str:
        """Begins an episode."""
        SEEN.append((self.is_evaluation, self.level))
        Levels.level += 1
        return "What is 1 + 1?"

    def guess(self, number: int) -> str:
        """
        Guesses.

        Args:
            number: The guess.
        """
        return "no"

    def get_reward(self) -> float:
        """The same for all."""
        return 0.0
'''
KEPT = '''
    @classmethod
    def get_state(cls) -> int:
        """The level."""
        return cls.level

    @classmethod
    def set_state(cls, state: int) -> None:
        """Goes back to a level."""
        cls.level = state
'''


def write_game(folder, text):
    (folder / "game.py").write_text(text)
    return f"{folder}/game.py:Levels"


def seen_by(trainer):
    """(is_evaluation, level) of each reset of a run, which are removed from the list."""
    [environment] = trainer.run.task.environments.values()
    seen = environment.reset.__globals__["SEEN"]
    copied = list(seen)
    seen.clear()
    return copied


def test_an_environment_is_told_whether_it_plays_for_training_or_evaluation(tmp_path):
    env = write_game(tmp_path, LEVELS + KEPT)
    trainer = Trainer.start(env=env, steps=2, run_dir=str(tmp_path / "a"), **SMALL)
    assert {is_evaluation for is_evaluation, _ in seen_by(trainer)} == {False}  # the trial
    trainer.evaluate()
    assert {is_evaluation for is_evaluation, _ in seen_by(trainer)} == {True}


def test_the_state_of_an_environment_is_kept_and_evaluations_do_not_change_it(tmp_path):
    env = write_game(tmp_path, LEVELS + KEPT)
    levels = []
    trainer = Trainer.start(env=env, steps=2, run_dir=str(tmp_path / "a"), **SMALL)
    seen_by(trainer)
    trainer.fit()
    levels = [level for is_evaluation, level in seen_by(trainer) if not is_evaluation]
    assert levels == list(range(8))  # 4 rows in each of 2 steps
    assert checkpoint.load(tmp_path / "a").extra["environments"] == {"": 8}

    other = Trainer.start(env=env, steps=1, run_dir=str(tmp_path / "b"), **SMALL)
    seen_by(other)
    other.fit()  # another run of the same process begins at the first level
    assert [level for is_evaluation, level in seen_by(other) if not is_evaluation] == [0, 1, 2, 3]

    resumed = Trainer.resume(tmp_path / "a", steps=3)
    seen_by(resumed)
    resumed.fit()
    assert [level for is_evaluation, level in seen_by(resumed) if not is_evaluation] == [
        *(8, 9, 10, 11)
    ]


def test_a_state_that_a_checkpoint_would_lose_is_told(tmp_path, capsys):
    env = write_game(tmp_path, LEVELS)
    Trainer.start(env=env, steps=2, run_dir=str(tmp_path / "a"), **SMALL).fit()
    said = capsys.readouterr()
    lines = [line for line in (said.out + said.err).splitlines() if "Levels.level" in line]
    assert len(lines) == 1 and "add the class methods get_state and set_state" in lines[0]


def test_the_methods_for_the_state_are_no_tools_and_come_together():
    class Both:
        def reset(self, **row: Example) -> None:
            """Begins."""

        get_state = classmethod(lambda cls: {"a": (1, 2)})
        set_state = classmethod(lambda cls, state: None)

    class One(Both):
        set_state = None

    class Odd(Both):
        get_state = classmethod(lambda cls: float("nan"))

    assert make_environment_schemas(Both) == {}
    assert environment_state.collect_states({"": Both}) == {"": {"a": [1, 2]}}
    message = catch_message(make_environment_schemas, One)
    assert "One has the class method get_state, but no class method set_state" in message
    message = catch_message(environment_state.collect_states, {"": Odd})
    assert "get_state returned nan, which JSON cannot express" in message


def test_the_curriculum_of_the_page_keeps_its_level(tmp_path):
    shown = re.findall(
        r"```python\n(.*?)```", (ROOT / "docs" / "tools.md").read_text("utf-8"), re.DOTALL
    )
    names = {}
    exec("\n\n".join(shown), names)
    game = names["Sums"]()
    game.is_evaluation = False
    game.reset()
    assert game.answer(game.a + game.b) == "right" and game.get_reward() == 1.0
    assert environment_state.collect_states({"": names["Sums"]}) == {"": {"level": 2}}
    game.is_evaluation = True
    game.reset()
    game.answer(game.a + game.b)
    game.get_reward()
    assert names["Sums"].level == 2
    assert list(make_environment_schemas(names["Sums"])) == ["answer"]


@pytest.mark.parametrize("method", ["get_state", "set_state"])
def test_a_method_for_the_state_that_fails_is_named(method):
    def fail(*_):
        raise RuntimeError("rust")

    methods = {"get_state": classmethod(lambda cls: 1), "set_state": classmethod(fail)}
    methods[method] = classmethod(fail)
    game = type("Game", (), methods)
    with pytest.raises(ValueError, match=f"environment Game: {method} raised RuntimeError: rust"):
        environment_state.collect_states({"": game})
        environment_state.set_states({"": game}, {"": 1})
