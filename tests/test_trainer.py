"""A run from Python: started, looped over, left, gone on with, sampled; functions and rows in place of files."""

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

SMALL = dict(model="demo", batch=3, groups=4, max_tokens=12, eval_limit=16)
QUICK = SMALL | dict(judge_chunk_size=64, eval_every=0)


def short_answers(completions, **_):
    """A reward of this module."""
    return [-float(len(text)) for text in completions]


def ids_of(run):
    return [line["ids"] for line in read_log(run / "rollouts.jsonl")]


def plain(tokens, objective):
    """A loss of this module."""
    return grpo.Loss(
        -(tokens.advantages * tokens.logprobs * tokens.mask).sum() / tokens.num_items, {}
    )


@pytest.mark.slow
def test_a_run_from_python_is_the_commands_run_and_can_be_left_and_gone_on_with(tmp_path, capsys):
    flags = "--model demo --task demo --batch 3 --groups 4 --max-tokens 12 --eval-limit 16 --judge-chunk-size 64"
    train.main(
        [
            *flags.split(),
            "--eval-every",
            "0",
            "--steps",
            "3",
            "--run-dir",
            str(tmp_path / "command"),
        ]
    )
    trainer = Trainer.start(task="demo", steps=3, run_dir=str(tmp_path / "python"), **QUICK)
    for figures in trainer.steps():
        assert figures["step"] == 1 and figures["reward/mean"] is not None
        break
    assert (trainer.dir / "checkpoints" / "step-000001").is_dir()  # a break saves
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        for _ in trainer.steps():
            signal.raise_signal(signal.SIGINT)
    assert (
        signal.getsignal(signal.SIGINT) == before
        and "saved after step 2" in capsys.readouterr().out
    )
    begun = base.make_run_spec({}, resume=str(trainer.dir))
    trainer = Trainer(begun)
    assert (
        begun.state.trainable == begun.state.optimizer == {}
    )  # a second copy of the masters, for the whole run
    assert [figures["step"] for figures in trainer.steps()] == [3]
    assert f"page: {trainer.dir / 'report.html'}" in capsys.readouterr().out
    assert ids_of(tmp_path / "command") == ids_of(tmp_path / "python")
    capsys.readouterr()
    assert trainer.evaluate() is trainer.evaluate() and trainer.evaluate()["eval/num"] == 16
    assert capsys.readouterr().out == ""
    [[greedy, again]] = trainer.sample(["What is two plus three?"], n=2, temp=0)
    assert greedy == again == trainer.sample("What is two plus three?", temp=0)[0][0] and greedy
    trainer.run.shared_messages = [{"role": "system", "content": "Say nothing."}]
    asked = [{"role": "user", "content": "What is two plus three?"}]
    led = trainer.sample([[*trainer.run.shared_messages, *asked]], temp=0)
    assert trainer.sample(["What is two plus three?"], temp=0) == led != [[greedy]]
    assert trainer.sample([asked], temp=0) == trainer.sample(asked, temp=0) == [[greedy]]
    for prompt, how, words in (
        ("a", {"n": 0}, "n is 0"),
        ("a", {"temp": -1}, "temp is -1"),
        ("a " * 999, {}, "context"),
    ):
        assert words in catch_message(trainer.sample, prompt, **how)
    trainer.run.toolbox = object()
    assert "run with tools" in catch_message(trainer.sample, "a")
    with run_files.unlock_run_dirs_after_block():
        run_files.lock_run_dir(trainer.dir)  # the lock is free once the loop has ended


@pytest.mark.slow
def test_functions_and_rows_of_a_program_are_found_again_by_a_resumed_run(tmp_path):
    rows = [{"prompt": f"What is {word} plus one?"} for word in ("one", "two", "six")]
    settings = dict(
        task="values",
        data=rows,
        reward=[short_answers],
        reward_weights=[2],
        loss_type=plain,
        steps=1,
    )
    trainer = Trainer.start(run_dir=str(tmp_path / "run"), **settings, **QUICK)
    assert trainer.config.data.reward == [f"{__file__}:short_answers"]  # which any program finds
    assert trainer.config.objective.loss_type == f"{__file__}:plain"
    [figures] = trainer.steps()
    assert 2 * figures["reward/short_answers"] == figures["reward/mean"] < 0
    trainer = Trainer.resume(tmp_path / "run", steps=2)
    assert trainer.run.custom.loss is plain
    assert [figures["step"] for figures in trainer.steps()] == [2]


@pytest.mark.slow
def test_the_notebook_trains_plots_changes_the_loss_and_goes_on(tmp_path):
    shown = json.loads((ROOT / "examples" / "notebook.ipynb").read_text())
    cells = ["".join(cell["source"]) for cell in shown["cells"] if cell["cell_type"] == "code"]
    code = "\n".join(cells).replace("groups=8", "groups=4").replace("eval_limit=64", "eval_limit=8")
    code = (
        code.replace("steps=10", "steps=2")
        .replace("eval_every=10", "eval_every=2")
        .replace("steps=5", "steps=1")
    )
    program = "import sys; sys.path.insert(0, sys.argv[1])\nexec(compile(sys.stdin.read(), 'notebook', 'exec'))"
    code += (
        "\nassert len(rewards) == 3 and second.config.objective.loss_type == '__main__:reinforce'"
    )
    done = run_command(
        "-c", program, ROOT, environment={"MPLBACKEND": "Agg"}, input=code, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert len(list((tmp_path / "runs").iterdir())) == 2


def test_functions_without_a_name_are_kept_and_missed_where_they_are_not(tmp_path, monkeypatch):
    nameless = [lambda **_: [1.0], lambda **_: [2.0], np.random.default_rng().normal]
    specs = [functions.spec_of_function(fn) for fn in nameless]
    assert len(set(specs)) == 3 and specs == [functions.spec_of_function(fn) for fn in nameless]
    assert [functions.load_function("--reward", spec)[1] for spec in specs] == nameless
    monkeypatch.delitem(sys.modules, functions.NAMELESS)  # as in another process
    for spec in (specs[0], "__main__:gone"):
        assert "exists only in the program that started the run" in catch_message(
            functions.load_function, "--reward", spec
        )
        run = SimpleNamespace(
            config=SimpleNamespace(to_flags=lambda spec=spec: {"reward": [spec]}),
            dir=tmp_path,
            names_of_parts_set_in_python=dict,
        )
        (tmp_path / "checkpoints" / "step-000001").mkdir(parents=True, exist_ok=True)
        assert (
            base._explain_how_to_continue(run, KeyError())
            == f"continue in this program with: Trainer.resume({str(tmp_path)!r})"
        )
    assert functions.load_function("--reward", functions.spec_of_function(short_answers)) == (
        "short_answers",
        short_answers,
    )


def test_a_program_s_own_functions_are_known_by_their_text_and_by_no_command(tmp_path, monkeypatch):
    config, task, seen = (
        Config.from_flags(reward=["__main__:short"]),
        SimpleNamespace(problems=None, train=[], held_out=[]),
        [],
    )
    task.rubric = task.witness = None
    for fn in (short_answers, ids_of, len):
        monkeypatch.setattr(sys.modules["__main__"], "short", fn, raising=False)
        seen.append(runs.digest_data_and_source_files(config, task))
    assert seen[0]["__main__:short"] != seen[1]["__main__:short"]
    assert "__main__:short" not in seen[2]  # the source of the built-in function is not known
    assert "uv run" not in verdict.verdict_lines(None, config.to_flags(), tmp_path)[1]
    assert "--out" not in verdict.verdict_lines(None, {"loss_type": "sft"}, tmp_path)[1]


def test_rows_are_kept_by_what_they_hold_and_refused_where_json_has_no_word(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    rows = [{"prompt": "Grüße", "answer": "1"}]
    kept, notes = data.write_rows_to_cache_file(rows)
    assert (
        notes == []
        and data.write_rows_to_cache_file(iter(rows)) == (kept, [])
        and data.load_data(kept) == rows
    )
    assert "row 2, {'prompt': <object" in catch_message(
        data.write_rows_to_cache_file, [*rows, {"prompt": object()}]
    )


def test_a_mistake_from_python_is_an_error_of_one_line_and_leaves_no_directory(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    wrong = {"model": None}, {"data": None}, {"task": "demoo"}, {"steps": 0}, {"stepps": 3}
    for settings, words in zip(
        wrong, "--model is None,--data is None,demoo,--steps,stepps".split(","), strict=True
    ):
        assert words in catch_message(Trainer.start, **{"model": "demo", "task": "demo"} | settings)
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_a_long_run_without_signal_ends_and_goes_on_when_told_to(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(trial, "TRY_STEPS", 1)
    monkeypatch.setattr(trial, "LONG", 0.0)
    (tmp_path / "mine.py").write_text(
        "def zero(completions, **columns):\n    return [0.0 for _ in completions]\n"
    )
    flags = f"--model demo --batch 2 --groups 4 --max-tokens 4 --task demo --reward {tmp_path}/mine.py:zero".split()
    flags += [
        *"--reward-weights zero=1 --steps 2 --eval-every 0 --run-dir".split(),
        str(tmp_path / "run"),
    ]
    with pytest.raises(SystemExit) as ended:
        train.main(flags)
    said = capsys.readouterr().err
    assert (
        ended.value.code == 2
        and "every answer gets the reward 0" in said
        and f"--resume {tmp_path}/run" in said
    )
    train.main(["--resume", str(tmp_path / "run")])
    assert "step 2/2" in capsys.readouterr().out
    train.main([*flags[:-1], str(tmp_path / "told"), "--no-look"])
    assert "step 2/2" in capsys.readouterr().out


@pytest.mark.slow
def test_seeds_train_one_after_another_into_one_directory_and_go_on(tmp_path, capsys):
    flags = "--model demo --task demo --batch 3 --groups 4 --max-tokens 8 --judge-chunk-size 64 --steps 2"
    flags = [*flags.split(), "--eval-limit", "8", "--eval-every", "2"]
    home = tmp_path / "both"
    train.main([*flags, "--seed", "4", "--seeds", "1", "--run-dir", str(home)])
    before = (home / "seed-4" / "metrics.jsonl").stat().st_mtime_ns
    train.main([*flags, "--seeds", "4,5", "--run-dir", str(home)])
    assert (home / "seed-4" / "metrics.jsonl").stat().st_mtime_ns == before
    said = capsys.readouterr().out
    assert "seed-4 is finished: 2 of 2 steps" in said and "seed 5, 2 of 2" in said
    assert "over 2 seeds" in said and said.endswith(f"page: {home / 'report.html'}\n")
    train.main([*flags, "--seed", "5", "--run-dir", str(tmp_path / "alone")])
    assert ids_of(home / "seed-5") == ids_of(tmp_path / "alone")
    capsys.readouterr()
    with pytest.raises(SystemExit):
        train.main([*flags, "--beta", "0.1", "--seeds", "6", "--seed", "6", "--run-dir", str(home)])
    assert (
        capsys.readouterr().err
        == f"error: the run {home}/seed-4 has --beta 0.0, not 0.1; use another --run-dir\n"
    )
    with pytest.raises(SystemExit):
        train.main(["--resume", str(home)])
    assert (
        f"--resume {home}: this directory contains a run for each seed" in capsys.readouterr().err
    )
    with pytest.raises(SystemExit):
        train.main([*flags, "--seeds", "2", "--run-dir", str(tmp_path / "alone")])
    assert "alone is the directory of a single run" in capsys.readouterr().err
