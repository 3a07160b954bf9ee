"""The attribute `is_evaluation` of an environment, and the state that it keeps between episodes."""

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
STATE_METHODS = '''
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


def take_resets(trainer):
    """Returns (is_evaluation, level) of each reset since the last call."""
    [environment] = trainer.run.task.environments.values()
    resets = environment.reset.__globals__["SEEN"]
    copy = list(resets)
    resets.clear()
    return copy


def take_training_levels(trainer):
    return [level for is_evaluation, level in take_resets(trainer) if not is_evaluation]


def test_an_environment_knows_whether_an_episode_is_for_training_or_evaluation(tmp_path):
    env = write_game(tmp_path, LEVELS + STATE_METHODS)
    trainer = Trainer.start(env=env, steps=2, run_dir=str(tmp_path / "a"), **SMALL)
    # the start of a run tries the environment
    assert {is_evaluation for is_evaluation, _ in take_resets(trainer)} == {False}
    trainer.evaluate()
    assert {is_evaluation for is_evaluation, _ in take_resets(trainer)} == {True}


def test_a_checkpoint_keeps_the_state_of_an_environment_and_evaluations_do_not_change_it(tmp_path):
    env = write_game(tmp_path, LEVELS + STATE_METHODS)
    trainer = Trainer.start(env=env, steps=2, run_dir=str(tmp_path / "a"), **SMALL)
    take_resets(trainer)
    trainer.fit()
    assert take_training_levels(trainer) == list(range(8))  # 4 rows in each of 2 steps
    assert checkpoint.load(tmp_path / "a").extra["environments"] == {"": 8}

    other = Trainer.start(env=env, steps=1, run_dir=str(tmp_path / "b"), **SMALL)
    take_resets(other)
    other.fit()  # another run of the same process begins at the first level
    assert take_training_levels(other) == [0, 1, 2, 3]

    resumed = Trainer.resume(tmp_path / "a", steps=3)
    take_resets(resumed)
    resumed.fit()
    assert take_training_levels(resumed) == [8, 9, 10, 11]


def test_a_run_warns_of_a_state_that_a_checkpoint_would_lose(tmp_path, capsys):
    env = write_game(tmp_path, LEVELS)
    Trainer.start(env=env, steps=2, run_dir=str(tmp_path / "a"), **SMALL).fit()
    output = capsys.readouterr()
    lines = (output.out + output.err).splitlines()
    [line] = [line for line in lines if "Levels.level" in line]
    assert "add the class methods get_state and set_state" in line


def test_get_state_and_set_state_are_not_tools_and_require_each_other():
    class WithBothMethods:
        def reset(self, **row: Example) -> None:
            """Begins."""

        get_state = classmethod(lambda cls: {"a": (1, 2)})
        set_state = classmethod(lambda cls, state: None)

    class WithoutSetState(WithBothMethods):
        set_state = None

    class WithNanState(WithBothMethods):
        get_state = classmethod(lambda cls: float("nan"))

    assert make_environment_schemas(WithBothMethods) == {}
    assert environment_state.collect_states({"": WithBothMethods}) == {"": {"a": [1, 2]}}
    message = catch_message(make_environment_schemas, WithoutSetState)
    assert (
        "WithoutSetState has the class method get_state, but no class method set_state" in message
    )
    message = catch_message(environment_state.collect_states, {"": WithNanState})
    assert "get_state returned nan, which JSON cannot express" in message


def test_the_curriculum_in_the_documentation_keeps_the_level(tmp_path):
    text = (ROOT / "docs" / "tools.md").read_text("utf-8")
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    names = {}
    exec("\n\n".join(blocks), names)
    game = names["Sums"]()
    game.is_evaluation = False
    game.reset()
    assert game.answer(game.a + game.b) == "right"
    assert game.get_reward() == 1.0
    assert environment_state.collect_states({"": names["Sums"]}) == {"": {"level": 2}}

    game.is_evaluation = True
    game.reset()
    game.answer(game.a + game.b)
    game.get_reward()
    assert names["Sums"].level == 2
    assert list(make_environment_schemas(names["Sums"])) == ["answer"]


@pytest.mark.parametrize("method", ["get_state", "set_state"])
def test_the_error_for_a_failing_get_state_or_set_state_names_the_method(method):
    def fail(*_):
        raise RuntimeError("rust")

    methods = {"get_state": classmethod(lambda cls: 1), "set_state": classmethod(fail)}
    methods[method] = classmethod(fail)
    game = type("Game", (), methods)
    with pytest.raises(ValueError, match=f"environment Game: {method} raised RuntimeError: rust"):
        environment_state.collect_states({"": game})
        environment_state.set_states({"": game}, {"": 1})
