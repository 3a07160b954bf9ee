"""A table of many runs for other programs, and the total seconds and tokens of a run."""

import csv
import io
import itertools

import pytest
import yaml
from conftest import read_log
from test_report import make_run

import report
import train


def test_csv_has_a_row_per_run_with_plain_numbers_and_only_settings_that_differ(tmp_path, capsys):
    learning_rates = [0.001 * (number + 1) for number in range(12)]
    runs = []
    for number, learning_rate in enumerate(learning_rates):
        run = make_run(tmp_path / f"run-{number}")
        settings = yaml.safe_load((run / "config.yaml").read_text())
        settings |= {"learning_rate": learning_rate, "seed": number}
        (run / "config.yaml").write_text(yaml.safe_dump(settings))
        runs.append(str(run))

    report.main(["--csv", *runs])
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [row["run"] for row in rows] == runs
    assert "batch" not in rows[0]
    assert [float(row["learning_rate"]) for row in rows] == pytest.approx(learning_rates)
    assert rows[3]["seed"] == "3"
    assert rows[0]["accuracy after"] == "0.75"
    assert float(rows[0]["gain low"]) < float(rows[0]["gain"])
    assert rows[0]["tokens/total"] == "148"
    assert float(rows[0]["time/s"]) == pytest.approx(6.4)

    out = tmp_path / "table.csv"
    report.main(["--csv", *runs, "--out", str(out)])
    assert len(out.read_text().splitlines()) == 13

    # The output for a terminal, which has room for fewer runs, names the flag.
    capsys.readouterr()
    report.main(["--compare", *runs])
    assert "--csv" in capsys.readouterr().out.splitlines()[-1]


def test_seconds_and_tokens_add_up_over_steps_evaluations_and_a_resume(tmp_path):
    flags = "--model demo --steps 2 --batch 2 --groups 2 --max-tokens 4 --eval-limit 2 --no-look"
    run = tmp_path / "run"
    train.main([*flags.split(), "--eval-every", "2", "--run-dir", str(run)])
    train.main(["--resume", str(run), "--steps", "4"])

    steps = read_log(run / "metrics.jsonl")
    total_seconds = itertools.accumulate(record["step/s"] for record in steps)
    assert [record["time/s"] for record in steps] == pytest.approx(list(total_seconds))
    tokens = [4 * record["completion/mean_tokens"] for record in steps]
    total_tokens = [round(total) for total in itertools.accumulate(tokens)]
    assert [record["tokens/total"] for record in steps] == total_tokens

    evaluations = read_log(run / "eval.jsonl")
    tokens_at_evaluations = [0, total_tokens[1], total_tokens[3]]
    assert [record["tokens/total"] for record in evaluations] == tokens_at_evaluations
    assert evaluations[-1]["time/s"] == steps[-1]["time/s"]
