"""Users' functions that fail, hang or change the process: what Gwen says, and how the run goes on."""

import pytest
from small_run import SMALL_FLAGS, make_run

import train
import trainer
from rewards import functions

FAILS_LATER = """
def score(completions, trainer_state, **_):
    return [{value} for _ in completions]
"""


@pytest.mark.parametrize(
    "value", ["1 / (1 - trainer_state.global_step)", "[1.0, 'x'][trainer_state.global_step]"]
)
def test_the_command_after_an_error_in_a_reward_works_once_the_reward_is_corrected(
    tmp_path, capsys, value
):
    file, run = tmp_path / "mine.py", tmp_path / "run"
    file.write_text(FAILS_LATER.format(value=value))
    flags = f"--reward {file}:score --steps 2 --eval-every 0 --no-look --run-dir {run}"
    with pytest.raises(SystemExit) as ended:
        train.main([*SMALL_FLAGS, *flags.split()])
    assert ended.value.code == 2
    command = f"uv run train.py --resume {run} --allow-changes"
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.endswith(f"saved after step 1, correct the function and continue with: {command}")
    file.write_text(FAILS_LATER.format(value="float(trainer_state.global_step)"))
    train.main(command.split()[3:])
    assert f"{file} changed since step 1" in capsys.readouterr().err


def test_an_error_in_a_file_with_a_users_loss_counts_as_that_of_a_users_function(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("def loss(tokens, objective):\n    return tokens.nothing\n")
    _, loss = functions.load_function("--loss-type", f"{file}:loss")
    run = make_run(tmp_path)
    run.save()
    with pytest.raises(AttributeError) as raised:
        loss(None, None)
    assert trainer.save_and_describe_stop(run, raised.value).endswith("--allow-changes")
    for error in (KeyError("a bug in Gwen"), ValueError("a full disk"), KeyboardInterrupt()):
        assert "--allow-changes" not in trainer.save_and_describe_stop(run, error)
