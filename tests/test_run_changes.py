"""A run that was resumed after a change: which evaluations it compares, and where it reports the change."""

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
def home_of_changed_run(tmp_path_factory):
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


def test_a_change_of_the_reward_does_not_make_an_untrained_model_better(
    home_of_changed_run, tmp_path
):
    run = history.load_history(home_of_changed_run / "run")
    steps = [record["step"] for record in run.evals]
    assert steps == [0, 2, 2, 4]  # step 2 with both rewards
    judgement = verdict.reach_verdict_on_held_out_change(run)
    assert judgement.outcome in (verdict.SAME, verdict.FEW)
    assert "from step 2 to 4" in judgement.text
    assert "earlier evaluations are not compared, because" in judgement.text
    assert f"{home_of_changed_run}/mine.py changed after step 2" in judgement.text

    # A run of an older version has no record of changes.
    old_run = shutil.copytree(home_of_changed_run / "run", tmp_path / "run")
    (old_run / "changes.jsonl").unlink()
    assert (
        "gain +100.000"
        in verdict.reach_verdict_on_held_out_change(history.load_history(old_run)).text
    )


def test_reports_settings_and_warnings_name_the_change_of_a_resume(home_of_changed_run, capsys):
    run = home_of_changed_run / "run"
    change = f"{home_of_changed_run}/mine.py changed after step 2"

    markup = page.write_page(run).read_text()
    assert change in markup
    assert "Settings that a resume changed" in markup

    report.main(["--list", str(home_of_changed_run)])
    assert change in capsys.readouterr().out
    report.main(["--compare", str(run), str(run) + "/../run"])
    assert change in capsys.readouterr().out

    settings = (run / "config.yaml").read_text()
    assert f"# {change}" in settings
    assert yaml.safe_load(settings)["steps"] == 4

    warnings = read_log(run / "warnings.jsonl")
    assert [record["step"] for record in warnings if "mine.py changed" in record["name"]] == [2]


def record_changes(run_dir, *arguments):
    """Finds the changes of a resume, and writes them as a run does that has begun. Returns them."""
    changes = run_changes.find_earlier_and_new_changes(run_dir, *arguments)
    run_changes.write_changes(run_dir, changes)
    return changes


def test_a_resume_that_fails_before_the_first_log_line_records_no_change(
    home_of_changed_run, tmp_path, monkeypatch, capsys
):
    run = shutil.copytree(home_of_changed_run / "run", tmp_path / "run")
    changes_before = (run / "changes.jsonl").read_bytes()
    warnings_before = (run / "warnings.jsonl").read_bytes()
    reward = home_of_changed_run / "mine.py"
    reward_code = reward.read_text()
    reward.write_text(REWARD.format("200 + float"))
    write = run_files.JsonLinesLog.write
    try:
        # With an evaluation, eval.jsonl has the first line; without one, metrics.jsonl.
        for full_log, flags in (("eval.jsonl", []), ("metrics.jsonl", ["--eval-every", "0"])):

            def write_until_full(log, record, full_log=full_log):
                if log.path.name == full_log:
                    raise OSError(errno.ENOSPC, "No space left on device", str(log.path))
                write(log, record)

            with monkeypatch.context() as patch:
                patch.setattr(run_files.JsonLinesLog, "write", write_until_full)
                with pytest.raises(SystemExit):
                    train.main(["--resume", str(run), "--steps", "6", "--allow-changes", *flags])
            assert "free some space" in capsys.readouterr().err
            assert (run / "changes.jsonl").read_bytes() == changes_before
            assert (run / "warnings.jsonl").read_bytes() == warnings_before

        train.main(["--resume", str(run), "--steps", "6", "--allow-changes", "--eval-every", "2"])
        changed_settings = [record["setting"] for record in read_log(run / "changes.jsonl")]
        assert changed_settings.count(str(reward)) == 2
        assert (run / "warnings.jsonl").read_bytes() != warnings_before
    finally:
        reward.write_text(reward_code)


def test_a_change_of_the_steps_alone_is_recorded_but_affects_no_evaluation(tmp_path):
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

    # More rows, with the same held-out problems, affect no evaluation.
    more_rows = {}, {"rows.jsonl": "z"}
    changes = record_changes(tmp_path, 2, saved, more_rows, {"rows.jsonl"})
    assert len(changes) == 3
    assert len(run_changes.changes_that_affect_evaluations(changes)) == 2
