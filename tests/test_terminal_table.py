"""Tables of runs in a terminal are divided and wrapped to the width, and lose nothing."""

import csv
import io
import random

import pytest
from _pytest.capture import CaptureIO
from conftest import write_log

import report
from reporting.terminal_table import fit_or_transpose_comparison, fit_table, format_table

RUN_NAMES = [f"a-sweep-over-rates-{number}" for number in range(12)]


def make_run(directory, number):
    """Makes the directory of a finished run with two evaluations."""
    directory.mkdir()
    settings = ["model: demo", "task: demo", f"learning_rate: {10.0**-number}", "steps: 2"]
    (directory / "config.yaml").write_text("\n".join(settings) + "\n")
    metrics = {"step/s": 1.0, "rollout/s": 1.0, "rollout/tok_s": 100.0, "mem/peak_gb": 1.0}
    write_log(directory / "metrics.jsonl", [{"step": 1} | metrics, {"step": 2} | metrics])
    evaluation = {
        "eval/greedy": 0.25,
        "eval/accuracy": 0.5,
        "eval/accuracy_ci95": 0.1,
        "eval/num": 64,
        "eval/s": 1.0,
    }
    write_log(directory / "eval.jsonl", [{"step": 0} | evaluation, {"step": 2} | evaluation])


@pytest.fixture
def runs(tmp_path):
    paths = []
    for number, name in enumerate(RUN_NAMES):
        make_run(tmp_path / name, number)
        paths.append(str(tmp_path / name))
    return paths


@pytest.fixture
def terminal(monkeypatch):
    """Makes the output a terminal of 80 columns."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(CaptureIO, "isatty", lambda _: True, raising=False)


def test_a_comparison_of_twelve_runs_has_rows_that_fit_the_terminal(runs, terminal, capsys):
    report.main(["--compare", *runs])
    lines = capsys.readouterr().out.splitlines()

    def contains_long_path(line):
        return max(map(len, line.split()), default=0) > 70

    assert not [line for line in lines if len(line) > 80 and not contains_long_path(line)]
    for number, name in enumerate(RUN_NAMES):
        cells = [line.split() for line in lines if line.split()[:1] == [name]]
        assert cells[0][1] == str(10.0**-number)
    assert lines[0].split("  ")[0] == "run"
    assert "--learning-rate" in lines[0]
    assert any("--csv" in line for line in lines)


def test_a_comparison_of_two_runs_has_a_column_for_each_run(runs, terminal, capsys):
    report.main(["--compare", *runs[:2]])
    header = capsys.readouterr().out.splitlines()[0]
    assert header.split() == RUN_NAMES[:2]


def test_a_list_of_runs_fits_the_terminal(runs, terminal, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path.parent)
    report.main(["--list", tmp_path.name])
    lines = capsys.readouterr().out.splitlines()
    assert not [line for line in lines if len(line) > 80]
    assert sum("too few problems" in line for line in lines) <= 12
    assert {"run", "verdict"} <= {word for line in lines for word in line.split()}


def test_a_file_or_pipe_receives_the_undivided_table(runs, capsys):
    report.main(["--compare", *runs])
    header = capsys.readouterr().out.splitlines()[0]
    assert header.split() == RUN_NAMES
    assert len(header) > 200


def test_the_csv_table_is_complete_in_a_terminal(runs, terminal, capsys):
    report.main(["--csv", *runs])
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [row["run"] for row in rows] == runs
    assert all({"learning_rate", "accuracy after", "time/s"} <= row.keys() for row in rows)


def draw_table(rng):
    """A header and a few rows of cells with random words."""
    num_columns = rng.randint(1, 14)
    rows = []
    for _ in range(rng.randint(2, 6)):
        cells = []
        for _ in range(num_columns):
            words = ["x" * rng.randint(1, 9) for _ in range(rng.randint(0, 9))]
            cells.append(" ".join(words))
        rows.append(cells)
    rows[0] = [f"c{place}" for place in range(num_columns)]
    return rows


def test_a_fitted_table_is_not_wider_than_the_width_and_loses_no_word():
    rng = random.Random(0)
    for _ in range(200):
        rows = draw_table(rng)
        for fit in (fit_table, fit_or_transpose_comparison):
            width = rng.randint(30, 120)
            text = fit(rows, width)
            assert max(map(len, text.split("\n"))) <= width
            assert text.count("x") >= format_table(rows).count("x")
