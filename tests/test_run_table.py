"""A table of many runs for other programs, and the sums of a run's seconds and tokens."""

import csv
import io

import pytest
import yaml
from conftest import read_log
from test_report import make_run

import report
import train


def test_csv_has_a_row_per_run_with_plain_numbers_and_only_settings_that_differ(tmp_path, capsys):
    folders = []
    for number in range(12):
        folder = make_run(tmp_path / f"run-{number}")
        settings = yaml.safe_load((folder / "config.yaml").read_text())
        (folder / "config.yaml").write_text(
            yaml.safe_dump(settings | {"learning_rate": 0.001 * (number + 1), "seed": number})
        )
        folders.append(str(folder))
    report.main(["--csv", *folders])
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [row["run"] for row in rows] == folders and "batch" not in rows[0]
    assert [float(row["learning_rate"]) for row in rows] == pytest.approx(
        [0.001 * (number + 1) for number in range(12)]
    )
    assert rows[3]["seed"] == "3" and rows[0]["accuracy after"] == "0.75"
    assert float(rows[0]["gain low"]) < float(rows[0]["gain"])
    assert rows[0]["tokens/total"] == "148" and float(rows[0]["time/s"]) == pytest.approx(6.4)
    out = tmp_path / "table.csv"
    report.main(["--csv", *folders, "--out", str(out)])
    assert len(out.read_text().splitlines()) == 13
    capsys.readouterr()
    report.main(["--compare", *folders])
    assert "--csv" in capsys.readouterr().out.splitlines()[-1]


def test_seconds_and_tokens_add_up_over_steps_evaluations_and_a_resume(tmp_path):
    flags = "--model demo --steps 2 --batch 2 --groups 2 --max-tokens 4 --eval-limit 2 --no-look"
    run = tmp_path / "run"
    train.main([*flags.split(), "--eval-every", "2", "--run-dir", str(run)])
    train.main(["--resume", str(run), "--steps", "4"])
    steps = read_log(run / "metrics.jsonl")
    seconds = [record["step/s"] for record in steps]
    assert [record["time/s"] for record in steps] == pytest.approx(
        [sum(seconds[: number + 1]) for number in range(4)]
    )
    tokens = [4 * record["completion/mean_tokens"] for record in steps]
    assert [record["tokens/total"] for record in steps] == [
        round(sum(tokens[: number + 1])) for number in range(4)
    ]
    evals = read_log(run / "eval.jsonl")
    assert [record["tokens/total"] for record in evals] == [
        0,
        steps[1]["tokens/total"],
        steps[3]["tokens/total"],
    ]
    assert evals[-1]["time/s"] == steps[-1]["time/s"]
