"""A Python program starts, stops, resumes and samples a run, with functions and rows in place of files."""

import json
import signal
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import ROOT, catch_message, read_log, run_command

import grpo
import run as runs
import train
import trainer as base
from config import Config
from disk import run_files
from forecast import trial
from prompts import data
from reporting import verdict
from rewards import functions
from train import Trainer

SMALL_SETTINGS = dict(model="demo", batch=3, groups=4, max_tokens=12, eval_limit=16)
QUICK_SETTINGS = SMALL_SETTINGS | dict(judge_chunk_size=64, eval_every=0)


def short_answers(completions, **_):
    """A reward of this module."""
    return [-float(len(text)) for text in completions]


def read_response_ids(run):
    return [line["ids"] for line in read_log(run / "rollouts.jsonl")]


def policy_gradient(tokens, objective):
    """A loss of this module."""
    terms = tokens.advantages * tokens.logprobs * tokens.mask
    return grpo.Loss(-terms.sum() / tokens.num_items, {})


@pytest.mark.slow
def test_a_run_from_python_equals_the_run_of_the_command_and_can_be_stopped_and_resumed(
    tmp_path, capsys
):
    flags = "--model demo --task demo --batch 3 --groups 4 --max-tokens 12 --eval-limit 16"
    flags += " --judge-chunk-size 64 --eval-every 0 --steps 3"
    train.main([*flags.split(), "--run-dir", str(tmp_path / "command")])
    trainer = Trainer.start(
        task="demo", steps=3, run_dir=str(tmp_path / "python"), **QUICK_SETTINGS
    )

    # The program leaves the loop.
    for metrics in trainer.steps():
        assert metrics["step"] == 1
        assert metrics["reward/mean"] is not None
        break
    assert (trainer.dir / "checkpoints" / "step-000001").is_dir()
    advice = f"saved after step 1: {trainer.dir}; continue with: uv run train.py --resume"
    assert advice in capsys.readouterr().out

    # The user presses Ctrl-C.
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        for _ in trainer.steps():
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) == handler
    assert "saved after step 2" in capsys.readouterr().out

    # The run is resumed.
    run_spec = base.make_run_spec({}, resume=str(trainer.dir))
    trainer = Trainer(run_spec)
    # Otherwise a second copy of the masters would stay in memory for the whole run.
    assert run_spec.state.trainable == {}
    assert run_spec.state.optimizer == {}
    assert [metrics["step"] for metrics in trainer.steps()] == [3]
    assert f"page: {trainer.dir / 'report.html'}" in capsys.readouterr().out
    command_ids = read_response_ids(tmp_path / "command")
    assert command_ids == read_response_ids(tmp_path / "python")

    # A repeated evaluation returns the same object and prints nothing.
    capsys.readouterr()
    evaluation = trainer.evaluate()
    assert trainer.evaluate() is evaluation
    assert evaluation["eval/num"] == 16
    assert capsys.readouterr().out == ""

    # samples of the trained model
    question = "What is two plus three?"
    [[greedy, second_greedy]] = trainer.sample([question], n=2, temp=0)
    assert greedy
    assert second_greedy == greedy
    assert trainer.sample(question, temp=0)[0][0] == greedy

    # The shared messages come before a prompt of plain text, but not before a list of messages.
    trainer.run.shared_messages = [{"role": "system", "content": "Say nothing."}]
    messages = [{"role": "user", "content": question}]
    with_shared = trainer.sample([[*trainer.run.shared_messages, *messages]], temp=0)
    assert trainer.sample([question], temp=0) == with_shared
    assert with_shared != [[greedy]]
    assert trainer.sample([messages], temp=0) == [[greedy]]
    assert trainer.sample(messages, temp=0) == [[greedy]]

    # refusals
    for prompt, options, expected_text in (
        ("a", {"n": 0}, "n is 0"),
        ("a", {"temp": -1}, "temp is -1"),
        ("a " * 999, {}, "context"),
    ):
        assert expected_text in catch_message(trainer.sample, prompt, **options)
    trainer.run.toolbox = object()
    assert "run with tools" in catch_message(trainer.sample, "a")

    # The lock is free after the loop.
    with run_files.unlock_run_dirs_after_block():
        run_files.lock_run_dir(trainer.dir)


@pytest.mark.slow
def test_a_resumed_run_finds_the_functions_and_rows_of_a_program(tmp_path):
    rows = [{"prompt": f"What is {word} plus one?"} for word in ("one", "two", "six")]
    settings = dict(
        task="values",
        data=rows,
        reward=[short_answers],
        reward_weights=[2],
        loss_type=policy_gradient,
        steps=1,
    )
    trainer = Trainer.start(run_dir=str(tmp_path / "run"), **settings, **QUICK_SETTINGS)
    # Any program can find these functions.
    assert trainer.config.data.reward == [f"{__file__}:short_answers"]
    assert trainer.config.objective.loss_type == f"{__file__}:policy_gradient"
    [metrics] = trainer.steps()
    assert metrics["reward/mean"] == 2 * metrics["reward/short_answers"]
    assert metrics["reward/mean"] < 0

    trainer = Trainer.resume(tmp_path / "run", steps=2)
    assert trainer.run.custom.loss is policy_gradient
    assert [metrics["step"] for metrics in trainer.steps()] == [2]


@pytest.mark.slow
def test_the_notebook_trains_plots_changes_the_loss_and_continues(tmp_path):
    notebook = json.loads((ROOT / "examples" / "notebook.ipynb").read_text())
    cells = []
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            cells.append("".join(cell["source"]))
    code = "\n".join(cells)
    for setting, smaller_setting in (
        ("groups=8", "groups=4"),
        ("eval_limit=64", "eval_limit=8"),
        ("steps=10", "steps=2"),
        ("eval_every=10", "eval_every=2"),
        ("steps=5", "steps=1"),
    ):
        code = code.replace(setting, smaller_setting)
    code += "\nassert len(rewards) == 3"
    code += "\nassert second.config.objective.loss_type == '__main__:reinforce'"

    program = "import sys; sys.path.insert(0, sys.argv[1])\nexec(compile(sys.stdin.read(), 'notebook', 'exec'))"
    process = run_command(
        "-c", program, ROOT, environment={"MPLBACKEND": "Agg"}, input=code, cwd=tmp_path
    )
    assert process.returncode == 0, process.stderr
    assert len(list((tmp_path / "runs").iterdir())) == 2


def test_functions_without_a_name_are_found_only_in_the_program_that_made_them(
    tmp_path, monkeypatch
):
    nameless = [lambda **_: [1.0], lambda **_: [2.0], np.random.default_rng().normal]
    specs = [functions.spec_of_function(function) for function in nameless]
    assert len(set(specs)) == 3
    assert specs == [functions.spec_of_function(function) for function in nameless]
    assert [functions.load_function("--reward", spec)[1] for spec in specs] == nameless

    monkeypatch.delitem(sys.modules, functions.NAMELESS)  # as in another process
    (tmp_path / "checkpoints" / "step-000001").mkdir(parents=True)
    for spec, place in ((specs[0], "this process"), ("__main__:gone", "this program")):
        message = catch_message(functions.load_function, "--reward", spec)
        assert "exists only in the program that started the run" in message
        run = SimpleNamespace(
            config=SimpleNamespace(to_flags=lambda spec=spec: {"reward": [spec]}),
            dir=tmp_path,
            names_of_parts_set_in_python=dict,
        )
        advice = base._explain_how_to_continue(run, KeyError())
        expected = f"continue in {place} with: Trainer.resume({str(tmp_path)!r})"
        assert advice == expected

    spec = functions.spec_of_function(short_answers)
    name, function = functions.load_function("--reward", spec)
    assert name == "short_answers"
    assert function == short_answers


def test_the_source_of_a_function_of_a_program_is_digested_and_no_command_is_advised(
    tmp_path, monkeypatch
):
    config = Config.from_flags(reward=["__main__:short"])
    task = SimpleNamespace(problems=None, train=[], held_out=[], rubric=None, witness=None)
    digests = []
    for function in (short_answers, read_response_ids, len):
        monkeypatch.setattr(sys.modules["__main__"], "short", function, raising=False)
        digests.append(runs.digest_data_and_source_files(config, task))
    assert digests[0]["__main__:short"] != digests[1]["__main__:short"]
    assert "__main__:short" not in digests[2]  # a built-in function has no source

    assert "uv run" not in verdict.verdict_lines(None, config.to_flags(), tmp_path)[1]
    assert "--out" not in verdict.verdict_lines(None, {"loss_type": "sft"}, tmp_path)[1]


def test_equal_rows_share_a_cache_file_and_a_row_that_json_cannot_hold_is_refused(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    rows = [{"prompt": "Grüße", "answer": "1"}]
    path, notes = data.write_rows_to_cache_file(rows)
    assert notes == []
    assert data.write_rows_to_cache_file(iter(rows)) == (path, [])
    assert data.load_data(path) == rows

    message = catch_message(data.write_rows_to_cache_file, [*rows, {"prompt": object()}])
    assert "row 2, {'prompt': <object" in message


def test_a_wrong_setting_from_python_gives_an_error_of_one_line_and_leaves_no_directory(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    for wrong_setting, expected_text in (
        ({"model": None}, "--model is None"),
        ({"data": None}, "--data is None"),
        ({"task": "demoo"}, "demoo"),
        ({"steps": 0}, "--steps"),
        ({"stepps": 3}, "stepps"),
    ):
        settings = {"model": "demo", "task": "demo"} | wrong_setting
        assert expected_text in catch_message(Trainer.start, **settings)
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_a_long_run_without_signal_ends_early_and_continues_with_resume_or_no_look(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(trial, "TRY_STEPS", 1)
    monkeypatch.setattr(trial, "LONG", 0.0)
    (tmp_path / "mine.py").write_text(
        "def zero(completions, **columns):\n    return [0.0 for _ in completions]\n"
    )
    flags = "--model demo --batch 2 --groups 4 --max-tokens 4 --task demo".split()
    flags += f"--reward {tmp_path}/mine.py:zero --reward-weights zero=1".split()
    flags += "--steps 2 --eval-every 0".split()
    with pytest.raises(SystemExit) as refusal:
        train.main([*flags, "--run-dir", str(tmp_path / "run")])
    message = capsys.readouterr().err
    assert refusal.value.code == 2
    assert "every answer gets the reward 0" in message
    assert f"--resume {tmp_path}/run" in message

    train.main(["--resume", str(tmp_path / "run")])
    assert "step 2/2" in capsys.readouterr().out

    train.main([*flags, "--run-dir", str(tmp_path / "no_look"), "--no-look"])
    assert "step 2/2" in capsys.readouterr().out


@pytest.mark.slow
def test_seeds_train_one_after_another_into_one_directory_and_further_seeds_can_follow(
    tmp_path, capsys
):
    flags = "--model demo --task demo --batch 3 --groups 4 --max-tokens 8 --judge-chunk-size 64"
    flags += " --steps 2 --eval-limit 8 --eval-every 2"
    flags = flags.split()
    directory = tmp_path / "both"
    train.main([*flags, "--seed", "4", "--seeds", "1", "--run-dir", str(directory)])
    metrics_path = directory / "seed-4" / "metrics.jsonl"
    time_before = metrics_path.stat().st_mtime_ns

    # A second command trains only the new seed.
    train.main([*flags, "--seeds", "4,5", "--run-dir", str(directory)])
    assert metrics_path.stat().st_mtime_ns == time_before
    output = capsys.readouterr().out
    assert "seed-4 is finished: 2 of 2 steps" in output
    assert "seed 5, 2 of 2" in output
    assert "over 2 seeds" in output
    assert output.endswith(f"page: {directory / 'report.html'}\n")

    # The run of a seed equals a single run with this seed.
    train.main([*flags, "--seed", "5", "--run-dir", str(tmp_path / "alone")])
    ids = read_response_ids(tmp_path / "alone")
    assert read_response_ids(directory / "seed-5") == ids
    capsys.readouterr()

    # refusals
    with pytest.raises(SystemExit):
        seed_flags = ["--seeds", "6", "--seed", "6"]
        train.main([*flags, "--beta", "0.1", *seed_flags, "--run-dir", str(directory)])
    expected = f"error: the run {directory}/seed-4 has --beta 0.0, not 0.1; use another --run-dir\n"
    assert capsys.readouterr().err == expected

    with pytest.raises(SystemExit):
        train.main(["--resume", str(directory)])
    expected = f"--resume {directory}: this directory contains a run for each seed"
    assert expected in capsys.readouterr().err

    with pytest.raises(SystemExit):
        train.main([*flags, "--seeds", "2", "--run-dir", str(tmp_path / "alone")])
    assert "alone is the directory of a single run" in capsys.readouterr().err
