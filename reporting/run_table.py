"""
Writes a table of runs as CSV, which a spreadsheet or pandas can read.

Each run has one row, and numbers have no units. The columns are the settings that differ, the
held-out figures and the costs. This file does not cover the table that a terminal shows
(report.py).
"""

import csv
import io
import json
from collections.abc import Iterable
from typing import Any

from reporting import health, paired
from reporting.difference import held_out_gain
from reporting.history import History
from text.printable import escape_invisible


def format_csv(runs: list[History]) -> str:
    """Returns a CSV table with a row for each run; a figure that was not measured is empty."""
    rows = [csv_row_of_run(run) for run in runs]
    for name in differing_settings_except_seed(runs):
        for row, run in zip(rows, runs, strict=True):
            row[name] = to_csv_value(run.settings.get(name))
    for name, digests in paired.digests_of_differing_files(runs).items():
        for row, digest in zip(rows, digests, strict=True):
            row[f"content of {name}"] = digest

    columns: dict[str, None] = {}  # used as a set that keeps its order
    for row in rows:
        columns |= dict.fromkeys(row)
    text = io.StringIO()
    writer = csv.DictWriter(text, list(columns), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def csv_row_of_run(run: History) -> dict[str, Any]:
    """Returns a run's figures, costs and warnings, each under the name of its column."""
    row: dict[str, Any] = {
        "run": escape_invisible(str(run.dir)),
        "seed": run.settings.get("seed"),
        "steps": run.steps[-1]["step"] if run.steps else 0,
    }
    run_part = run.with_comparable_evals
    evaluations = run_part.evals_with_figure
    names = [run_part.figure_name, "greedy"]
    if run_part.figure_name != "loss" and any("eval/loss" in record for record in evaluations):
        names.append("loss")  # of a supervised run whose answers are scored
    for name in names:
        for place, index in (("before", 0), ("after", -1)):
            record = evaluations[index] if evaluations else {}
            row[f"{name} {place}"] = record.get(f"eval/{name}")
            row[f"{name} {place} ci95"] = record.get(f"eval/{name}_ci95")
    change = None
    if len(evaluations) > 1:
        change = held_out_gain(run_part, evaluations[0], evaluations[-1])
    row["gain"] = change and change.mean
    row["gain low"] = change and change.low
    row["gain high"] = change and change.high
    row["problems"] = evaluations[-1].get("eval/num") if evaluations else None
    row |= cumulative_costs(run.steps)
    row["warnings"] = " ".join(escape_invisible(str(record["name"])) for record in run.warnings)
    return row


def cumulative_costs(steps: health.Records) -> dict[str, float | int]:
    """
    Returns the seconds of all steps as `time/s`, and the tokens of all completions as
    `tokens/total`.

    The record of the last step already contains both sums. If an older version wrote the record,
    the sums are computed from all records.
    """
    if steps and "tokens/total" in steps[-1]:
        return {name: steps[-1][name] for name in ("time/s", "tokens/total")}
    num_tokens = 0.0
    for step in steps:
        phase = "rollout" if step.get("rollout/s") is not None else "update"
        num_tokens += (step.get(f"{phase}/tok_s") or 0.0) * (step.get(f"{phase}/s") or 0.0)
    seconds = sum(step.get("step/s") or 0.0 for step in steps)
    return {"time/s": seconds, "tokens/total": round(num_tokens)}


def differing_settings_except_seed(runs: Iterable[History]) -> list[str]:
    """Returns the names of the settings that differ between the runs, except the seed."""
    runs = list(runs)
    names: dict[str, None] = {}  # used as a set that keeps its order
    for run in runs:
        names |= dict.fromkeys(run.settings)
    names.pop("seed", None)
    return [name for name in names if len({str(run.settings.get(name, "-")) for run in runs}) > 1]


def to_csv_value(value: Any) -> Any:
    """
    Returns a number or None as it is, and any other value as text.

    In a string, invisible characters are replaced by their code points. A list or a dictionary
    becomes JSON.
    """
    if isinstance(value, str):
        return escape_invisible(value)
    if value is None or isinstance(value, (int, float)):
        return value
    return json.dumps(value)
