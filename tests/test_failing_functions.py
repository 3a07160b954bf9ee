"""Users' functions that fail, hang or change the process: the messages, and how a run continues."""

import contextlib
import re
import sys
import time

import numpy as np
import pytest
from conftest import ROOT, catch_message
from small_run import SMALL_FLAGS, make_run

import train
import trainer
from rewards import audit, functions, rewards
from step.objectives import compute_custom_advantages

FAILS_LATER = """
def score(completions, trainer_state, **_):
    return [{value} for _ in completions]
"""


@pytest.mark.parametrize(
    "value", ["1 / (1 - trainer_state.global_step)", "[1.0, 'x'][trainer_state.global_step]"]
)
def test_the_command_in_the_error_message_of_a_reward_continues_the_run_after_a_correction(
    tmp_path, capsys, value
):
    file = tmp_path / "mine.py"
    run = tmp_path / "run"
    file.write_text(FAILS_LATER.format(value=value))
    flags = f"--reward {file}:score --steps 2 --eval-every 0 --no-look --run-dir {run}"
    with pytest.raises(SystemExit) as exit_info:
        train.main([*SMALL_FLAGS, *flags.split()])
    assert exit_info.value.code == 2
    command = f"uv run train.py --resume {run} --allow-changes"
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.endswith(f"saved after step 1, correct the function and continue with: {command}")
    file.write_text(FAILS_LATER.format(value="float(trainer_state.global_step)"))
    train.main(command.split()[3:])
    assert f"{file} changed since step 1" in capsys.readouterr().err


def test_an_error_in_a_loss_of_the_user_gets_the_advice_for_functions_of_the_user(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("def loss(tokens, objective):\n    return tokens.nothing\n")
    _, loss = functions.load_function("--loss-type", f"{file}:loss")
    run = make_run(tmp_path)
    run.save()
    with pytest.raises(AttributeError) as error_info:
        loss(None, None)
    assert trainer.save_and_describe_stop(run, error_info.value).endswith("--allow-changes")
    for error in (KeyError("a bug in Gwen"), ValueError("a full disk"), KeyboardInterrupt()):
        assert "--allow-changes" not in trainer.save_and_describe_stop(run, error)


STARTS_A_RUN = """
from train import Trainer

def ranks(rewards):
    return rewards

trainer = Trainer.start(model="demo", task="demo", advantage=ranks, steps=1)
"""


def test_a_file_that_starts_a_run_when_it_is_imported_is_refused_in_one_line(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(STARTS_A_RUN)
    message = catch_message(functions.load_function, "--advantage", f"{file}:ranks")
    assert message == (
        f"--advantage {file}:ranks: mine.py starts a run whenever it is imported; put the lines "
        'that start the run below `if __name__ == "__main__":`'
    )
    assert functions._files_being_imported == []


# ---- the audit


def error_of_audit(tmp_path, returned_expression):
    """The message of the audit of a reward that returns this expression."""
    text = f"def score(completions, **_):\n    return {returned_expression}\n"
    (tmp_path / "mine.py").write_text(text)
    name, reward = rewards.load_reward(f"{tmp_path}/mine.py:score")
    rows = [{"prompt": f"What is {n}?", "answer": str(n)} for n in range(11, 20)]
    with pytest.raises(ValueError) as error_info:
        audit.audit_reward(name, reward, rows)
    return str(error_info.value)


def test_the_audit_shows_the_completion_on_which_a_reward_fails(tmp_path):
    message = error_of_audit(tmp_path, "[float(text) for text in completions]")
    assert f"at {tmp_path}/mine.py:2" in message
    assert "the answer '11'" in message
    assert message.endswith("; the audit made up the completion 'The answer is 11.'")


def test_the_audit_names_no_completion_if_a_reward_fails_only_on_several_at_once(tmp_path):
    message = error_of_audit(tmp_path, "[1 / (len(completions) == 1)] * 2")
    assert "the completion" in message, "this reward fails on each completion"
    message = error_of_audit(tmp_path, "[1 / (len(completions) == 1) for _ in completions]")
    assert message.endswith("only if all 30 completions are passed in one call")


# ---- functions that replace the output streams

REPLACES_STREAMS = """
import io, sys
def score(completions, fails, **_):
    sys.stdout = sys.stderr = io.StringIO()
    if fails[0]:
        raise ValueError("in the middle")
    return [1.0 for _ in completions]
"""


@pytest.mark.parametrize("fails", [False, True])
def test_the_streams_that_a_reward_replaces_are_restored_and_one_warning_names_the_reward(
    tmp_path, capsys, fails
):
    (tmp_path / "mine.py").write_text(REPLACES_STREAMS)
    name, reward = rewards.load_reward(f"{tmp_path}/mine.py:score")
    streams = sys.stdout, sys.stderr
    expected_error = pytest.raises(ValueError) if fails else contextlib.nullcontext()
    for _ in range(2):
        with expected_error:
            rewards.call_reward_on_rank0(name, reward, ["1?"], ["2"], {"fails": [fails]})
        assert (sys.stdout, sys.stderr) == streams
    (line,) = capsys.readouterr().err.splitlines()
    assert f"warning: the reward score ({tmp_path}/mine.py:3) replaced sys.stdout" in line


def test_the_stream_that_an_advantage_function_replaces_is_restored(tmp_path, capsys):
    (tmp_path / "mine.py").write_text(
        "import io, sys\n"
        "def double(rewards):\n"
        "    sys.stdout = io.StringIO()\n"
        "    return 2 * rewards\n"
    )
    _, function = functions.load_function("--advantage", f"{tmp_path}/mine.py:double")
    stdout = sys.stdout
    compute_custom_advantages("mine.py:double", function, np.ones((2, 3)))
    assert sys.stdout is stdout
    assert "--advantage mine.py:double" in capsys.readouterr().err


def test_a_run_still_prints_lines_after_a_tool_replaces_the_output_streams(tmp_path, capsys):
    (tmp_path / "mine.py").write_text(
        "import io, sys\n"
        "def calculator(expression: str) -> str:\n"
        '    """\n    Computes.\n\n    Args:\n        expression: What to compute.\n    """\n'
        "    sys.stdout = sys.stderr = io.StringIO()\n"
        '    return "7"\n'
    )
    flags = "--model demo:tools --steps 1 --batch 4 --groups 4 --eval-every 0 --max-tokens 40"
    file_flags = f"--tools {tmp_path}/mine.py:calculator --run-dir {tmp_path}/run --no-look"
    train.main([*flags.split(), *file_flags.split()])
    output = capsys.readouterr()
    assert output.err.count("warning: a tool or an environment replaced sys.stdout") == 1
    assert "step 1/1 | " in output.out


def test_a_reward_may_redirect_prints_during_a_call(tmp_path, capsys):
    (tmp_path / "mine.py").write_text(
        "import contextlib, io\n"
        "def score(completions, **_):\n"
        "    with contextlib.redirect_stdout(io.StringIO()) as printed:\n"
        "        print(completions)\n"
        "    return [float(len(printed.getvalue()))]\n"
    )
    name, reward = rewards.load_reward(f"{tmp_path}/mine.py:score")
    assert rewards.call_reward_on_rank0(name, reward, ["1?"], ["2"], {}) == [6.0]
    assert capsys.readouterr() == ("", "")


# ---- a reward that runs answers as SQL

PETS = "CREATE TABLE pets (name TEXT, age INT); INSERT INTO pets VALUES ('Ada', 3), ('Bo', 7);"
NAMES = "SELECT name FROM pets WHERE age > 5"


@pytest.fixture
def sql_reward(tmp_path):
    page = (ROOT / "docs" / "data.md").read_text(encoding="utf-8")
    (body,) = re.findall(r"```python\n(import contextlib\n.*?)```", page, re.DOTALL)
    assert len(body.splitlines()) <= 25
    (tmp_path / "mine.py").write_text(body)
    return rewards.load_reward(f"{tmp_path}/mine.py:right_rows")


def test_the_sql_reward_of_the_page_rewards_right_rows_and_survives_hostile_queries(
    tmp_path, sql_reward
):
    endless = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT max(i) FROM n"
    slow = "SELECT count(*) FROM " + ", ".join(f"pets AS pets_{n}" for n in range(40))
    expected_rewards = {
        NAMES: 1.0,
        "SELECT 'Bo'": 1.0,
        "SELECT name FROM pets": 0.0,
        "the name is Bo": 0.0,
        "": 0.0,
        "DROP TABLE pets": 0.0,
        f"ATTACH '{tmp_path}/stolen' AS stolen": 0.0,
        f"{NAMES}; DELETE FROM pets": 0.0,
        "SELECT zeroblob(1000000000)": 0.0,
        "SELECT '\0'": 0.0,
        "SELECT '\ud800'": 0.0,
        endless: 0.0,
        slow: 0.0,
    }
    queries = list(expected_rewards)
    prompts = ["Who is older than five?"] * len(queries)
    columns = {"tables": [PETS] * len(queries), "answer": [NAMES] * len(queries)}
    name, reward = sql_reward
    start_time = time.monotonic()
    values = rewards.call_reward_on_rank0(name, reward, prompts, queries, columns)
    assert time.monotonic() - start_time < 60
    assert dict(zip(queries, values, strict=True)) == expected_rewards
    assert not (tmp_path / "stolen").exists()

    # if the right query has no rows, a text that is no query is still wrong
    nobody = "SELECT name FROM pets WHERE age > 9"
    queries = {nobody: 1.0, "": 0.0, "-- nothing": 0.0, "SELECT 1 WHERE 0": 1.0}
    columns = {"tables": [PETS] * len(queries), "answer": [nobody] * len(queries)}
    prompts = ["Who is older than nine?"] * len(queries)
    values = rewards.call_reward_on_rank0(name, reward, prompts, list(queries), columns)
    assert values == list(queries.values())


def test_the_pattern_reward_of_the_page_rewards_right_patterns_and_stops_slow_ones(tmp_path):
    page = (ROOT / "docs" / "data.md").read_text(encoding="utf-8")
    (body,) = re.findall(r"```python\n(import re\nimport signal\n.*?)```", page, re.DOTALL)
    (tmp_path / "mine.py").write_text(body)
    name, reward = rewards.load_reward(f"{tmp_path}/mine.py:right_pattern")
    expected_rewards = {
        r"\d+": 1.0,
        r" [0-9]{1,30} ": 1.0,  # spaces around an answer do not count
        r"\d": 0.0,
        r".*": 0.0,
        "(": 0.0,
        "": 0.0,
        r"(\d+)+x": 0.0,  # takes exponential time
        "a{99999999999999999999}": 0.0,
        "(" * 9999: 0.0,
    }
    patterns = list(expected_rewards)
    columns = {
        "accepted": [["7", "42", "1" * 30]] * len(patterns),
        "refused": [["", "a", "4 2"]] * len(patterns),
    }
    prompts = ["Match numbers."] * len(patterns)
    values = rewards.call_reward_on_rank0(name, reward, prompts, patterns, columns)
    assert dict(zip(patterns, values, strict=True)) == expected_rewards


def test_the_audit_finds_that_the_sql_reward_expects_a_query_without_other_text(sql_reward):
    rows = []
    for age in (2, 4, 6):
        query = f"SELECT name FROM pets WHERE age > {age}"
        rows.append({"prompt": f"Older than {age}?", "answer": query, "tables": PETS})
    result = audit.audit_reward(*sql_reward, rows)
    assert result.form == audit.ALONE
    surprises = {line.name for line in result.surprises}
    assert not surprises & {"an empty text", "the prompt"}
