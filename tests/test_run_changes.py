"""A run that was resumed after a change: what it compares, and where it tells of the change."""

import errno
import shutil

import pytest
import yaml
from conftest import read_log, write_log

import report
import train
from disk import run_changes, run_files
from reporting import history, page, verdict

REWARD = "def size(completions, **_): return [{}(len(text)) for text in completions]\n"
FLAGS = "--model demo --steps 2 --batch 2 --groups 2 --max-tokens 4 --eval-every 2 --no-look"


@pytest.fixture(scope="module")
def changed_home(tmp_path_factory):
    """A run whose reward was changed after step 2, so that the same answers score 100 more."""
    home = tmp_path_factory.mktemp("changed")
    rows = [{"prompt": f"What is {number} plus two?"} for number in range(40)]
    data = write_log(home / "mine.jsonl", rows)
    reward = home / "mine.py"
    reward.write_text(REWARD.format("float"))
    flags = [*FLAGS.split(), "--data", data, "--reward", f"{reward}:size", "--learning-rate", "0"]
    train.main([*flags, "--run-dir", str(home / "run")])
    reward.write_text(REWARD.format("100 + float"))
    train.main(["--resume", str(home / "run"), "--steps", "4", "--allow-changes"])
    return home


def test_a_model_that_stands_still_is_not_called_better_because_its_reward_was_changed(
    changed_home, tmp_path
):
    run = history.load_history(changed_home / "run")
    assert [record["step"] for record in run.evals] == [0, 2, 2, 4]  # step 2 by both rewards
    judgement = verdict.reach_verdict(run)
    assert judgement.outcome in (verdict.SAME, verdict.FEW)
    assert "from step 2 to 4" in judgement.text
    assert "earlier evaluations are not compared, because" in judgement.text
    assert f"{changed_home}/mine.py changed after step 2" in judgement.text

    adapted = shutil.copytree(changed_home / "run", tmp_path / "run")
    (adapted / "changes.jsonl").unlink()  # as a run of an older version
    assert "gain +100.000" in verdict.reach_verdict(history.load_history(adapted)).text


def test_page_list_compare_settings_and_warnings_know_what_a_resume_changed(changed_home, capsys):
    run = changed_home / "run"
    name = f"{changed_home}/mine.py"
    markup = page.write_page(run).read_text()
    assert f"{name} changed after step 2" in markup and "Settings that a resume changed" in markup
    report.main(["--list", str(changed_home)])
    assert f"{name} changed after step 2" in capsys.readouterr().out
    report.main(["--compare", str(run), str(run) + "/../run"])
    assert f"{name} changed after step 2" in capsys.readouterr().out
    text = (run / "config.yaml").read_text()
    assert f"# {name} changed after step 2" in text and yaml.safe_load(text)["steps"] == 4
    warnings = read_log(run / "warnings.jsonl")
    assert [record["step"] for record in warnings if "mine.py changed" in record["name"]] == [2]


def record_changes(run_dir, *arguments):
    """The changes that a resume finds, which are then written as if the run had begun."""
    changes = run_changes.find_changes(run_dir, *arguments)
    run_changes.write_changes(run_dir, changes)
    return changes


def test_a_resume_that_fails_before_its_first_figures_leaves_no_change(
    changed_home, tmp_path, monkeypatch, capsys
):
    run = shutil.copytree(changed_home / "run", tmp_path / "run")
    reward = changed_home / "mine.py"
    before = (run / "changes.jsonl").read_bytes()
    warnings = (run / "warnings.jsonl").read_bytes()
    text = reward.read_text()
    reward.write_text(REWARD.format("200 + float"))
    try:
        for name in ("eval.jsonl", "metrics.jsonl"):  # either is the first to meet a full disk
            with monkeypatch.context() as patch:
                write = run_files.JsonLinesLog.write

                def write_until_full(log, record, name=name, write=write):
                    if log.path.name == name:
                        raise OSError(errno.ENOSPC, "No space left on device", str(log.path))
                    write(log, record)

                patch.setattr(run_files.JsonLinesLog, "write", write_until_full)
                flags = ["--resume", run, "--steps", "6", "--allow-changes"]
                if name == "metrics.jsonl":
                    flags += ["--eval-every", "0"]
                with pytest.raises(SystemExit):
                    train.main([str(flag) for flag in flags])
            assert "free some space" in capsys.readouterr().err
            assert (run / "changes.jsonl").read_bytes() == before
            assert (run / "warnings.jsonl").read_bytes() == warnings
        train.main(["--resume", str(run), "--steps", "6", "--allow-changes", "--eval-every", "2"])
        changed = [record["setting"] for record in read_log(run / "changes.jsonl")]
        assert changed.count(str(reward)) == 2
        assert (run / "warnings.jsonl").read_bytes() != warnings
    finally:
        reward.write_text(text)


def test_a_change_of_the_steps_alone_is_recorded_and_compares_all_evaluations(tmp_path):
    write_log(tmp_path / "eval.jsonl", [{"step": 0}, {"step": 2}])
    for steps in (4, 4, 6):
        record_changes(tmp_path, 2, ({"steps": 2}, {}), ({"steps": steps}, {}), ())
    changes = run_changes.read_changes(tmp_path)
    assert [change["is"] for change in changes] == [4, 6]  # the second resume repeats the first
    assert not run_changes.changes_that_affect_evaluations(changes)


def test_a_reward_that_is_changed_back_begins_a_third_comparison(tmp_path):
    write_log(tmp_path / "eval.jsonl", [{"step": 0}, {"step": 2}])
    saved = {}, {"mine.py": "old", "held-out problems": "x", "rows.jsonl": "y"}
    record_changes(tmp_path, 2, saved, ({}, {"mine.py": "new"}), ())
    write_log(tmp_path / "eval.jsonl", [{"step": 0}, {"step": 2}, {"step": 2}])
    changes = record_changes(tmp_path, 2, saved, saved, ())
    assert run_changes.num_incomparable_evaluations_and_answers(changes) == (3, 0)
    more_rows = {}, {"rows.jsonl": "z"}  # the held-out problems are the same
    changes = record_changes(tmp_path, 2, saved, more_rows, {"rows.jsonl"})
    assert len(run_changes.changes_that_affect_evaluations(changes)) == 2 and len(changes) == 3
