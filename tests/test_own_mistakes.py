"""A mistake in a user's function causes a single error, whose message is one line."""

import json
import subprocess
import sys
import traceback

import pytest
from conftest import ROOT

from train import Trainer

SMALL = dict(model="demo", task="demo", batch=2, groups=2, max_tokens=4, steps=1, eval_every=0)


def fail_as_advantage(rewards):
    return {}[rewards.shape]


def fail_as_loss(tokens, objective):
    return tokens.nothing


def fail_as_optimizer(learning_rate):
    return 1 / 0


def fail_as_reward(completions, **columns):
    return completions[1000]


def fail_as_hook(run, samples):
    return samples[1000]


class FailingEnvironment:
    def reset(self, **row):
        return [][1]

    def get_reward(self):
        return 0.0


@pytest.mark.parametrize(
    ("settings", "function"),
    [
        ({"advantage": fail_as_advantage}, fail_as_advantage),
        ({"loss_type": fail_as_loss}, fail_as_loss),
        ({"optimizer": fail_as_optimizer}, fail_as_optimizer),
        ({"reward": fail_as_reward}, fail_as_reward),
        ({"env": FailingEnvironment, "model": "demo:tools"}, FailingEnvironment.reset),
    ],
    ids=["advantage", "loss", "optimizer", "reward", "environment"],
)
def test_a_mistake_in_a_function_causes_one_error_that_names_the_line(tmp_path, settings, function):
    if "env" in settings:
        settings = settings | {"task": None}
    settings = {name: value for name, value in (SMALL | settings).items() if value is not None}
    with pytest.raises(ValueError) as error:
        Trainer.start(run_dir=str(tmp_path / "run"), **settings)
    output = "".join(traceback.format_exception(error.value))
    assert output.count("Traceback") == 1, output
    line = function.__code__.co_firstlineno + 1
    assert f"at {__file__}:{line}" in str(error.value)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "run").exists()


def fail_in_a_library(completions, **columns):
    return json.loads("no JSON")


def test_the_error_for_a_mistake_that_a_library_notices_names_both_lines(tmp_path):
    with pytest.raises(ValueError) as error:
        Trainer.start(run_dir=str(tmp_path / "run"), **SMALL | {"reward": fail_in_a_library})
    line = fail_in_a_library.__code__.co_firstlineno + 1
    places = f"at {__file__}:{line} (raised in raw_decode, at {json.decoder.__file__}:"
    assert places in str(error.value)


def test_a_mistake_in_a_training_step_causes_one_error_that_names_the_line(tmp_path):
    trainer = Trainer.start(run_dir=str(tmp_path / "run"), **SMALL)
    trainer.on_samples = fail_as_hook
    with pytest.raises(ValueError) as error:
        trainer.fit()
    output = "".join(traceback.format_exception(error.value))
    assert output.count("Traceback") == 1, output
    assert f"{__file__}:{fail_as_hook.__code__.co_firstlineno + 1}; saved" in str(error.value)


def test_the_traceback_of_an_error_in_gwen_shows_where_it_was_raised(tmp_path, monkeypatch):
    trainer = Trainer.start(run_dir=str(tmp_path / "run"), **SMALL)

    def fail_deep_inside(*_):
        raise ValueError("deep inside")

    monkeypatch.setattr("train.update_policy", fail_deep_inside)
    with pytest.raises(ValueError) as error:
        trainer.fit()
    output = "".join(traceback.format_exception(error.value))
    assert output.count("Traceback") == 1
    assert "in fail_deep_inside" in output


def test_a_program_ends_with_the_line_that_names_the_mistake(tmp_path):
    program = tmp_path / "idea.py"
    program.write_text(
        "from train import Trainer\n"
        "def ranks(rewards):\n"
        "    return rewards.nothing\n"
        "Trainer.start(model='demo', task='demo', advantage=ranks)\n"
    )
    process = subprocess.run(
        [sys.executable, str(program)],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.stderr.count("Traceback") == 1
    last_line = process.stderr.splitlines()[-1]
    assert "UserFunctionError: --advantage __main__:ranks" in last_line
    assert f"{program}:3" in last_line
