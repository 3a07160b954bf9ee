"""
Evaluations of the same problems side by side: files of `evaluate.py --out`, and runs, by their newest evaluation.

Differences from the first are paired, problem by problem: a model fused, in few bits or on a server then differs by
what changed, and not by which problems were drawn.
"""

import math
from pathlib import Path
from typing import Any

import numpy as np

from disk.run_files import half_width
from flags import read_json, visible
from reporting import history
from reporting.history import Records

HEAD = ["", "problems", "sampled", "difference", "greedy", "difference", "same greedy text"]
NEEDED = {"problem", "prompt", "values", "greedy", "greedy_value"}
Answers = dict[str, dict[str, Any]]  # the records of an evaluation by problem


def load(path: str) -> Answers:
    """The records of a file of `evaluate.py --out`, or of a run's newest evaluation. ValueError for anything else."""
    if Path(path).is_dir():
        found: Records = list(history.records(Path(path) / "eval_answers.jsonl"))
        records = [one for one in found if one["step"] == found[-1]["step"]]
    else:
        try:
            records = [read_json(line) for line in Path(path).read_bytes().splitlines()]
        except ValueError as error:
            raise ValueError(f"{path} holds no JSON lines ({error}); give what evaluate.py --out wrote") from error
    if not records or not all(isinstance(one, dict) and one.keys() >= NEEDED for one in records):
        raise ValueError(f"{path} holds no answers; give what evaluate.py --out wrote, or a run that was evaluated")
    return {f"{one['problem']} {one['prompt']}": one for one in records}


def values_of(answers: Answers) -> tuple[dict[str, float], dict[str, float]]:
    """The value of each problem's samples, their mean, and of its greedy answer; problems without one are left out."""
    known = {key: [value for value in one["values"] if value is not None] for key, one in answers.items()}
    sampled = {key: sum(values) / len(values) for key, values in known.items() if values}
    return sampled, {key: one["greedy_value"] for key, one in answers.items() if one["greedy_value"] is not None}


def difference(before: np.ndarray, after: np.ndarray) -> tuple[float, float]:
    """
    The mean of after - before, (P,) each, P >= 2, and the distance to the farther end of its 95% interval.

    Of zeros and ones half a pair is added to each of the four cases, so that the interval keeps a width when no pair
    differs; otherwise it is the normal one. Source: Agresti and Min, Statistics in Medicine 24 (2005), 729.
    """
    change = after - before
    mean = float(change.mean())
    if not np.isin([before, after], (0, 1)).all():
        return mean, float(1.96 * change.std(ddof=1) / math.sqrt(change.size))
    size, total = change.size + 2, change.sum()
    reach = 1.96 * math.sqrt((change**2).sum() + 1 - total**2 / size) / size
    return mean, float(abs(mean - total / size) + reach)


def _figure(values: dict[str, float]) -> str:
    half = half_width(np.array(list(values.values())))
    return "-" if half is None else f"{sum(values.values()) / len(values):.3f} \u00b1 {half:.3f}"


def _change(before: dict[str, float], after: dict[str, float]) -> str:
    shared = [key for key in after if key in before]
    if len(shared) < 2:
        return "-"
    mean, half = difference(*(np.array([values[key] for key in shared]) for values in (before, after)))
    return f"{mean:+.3f} \u00b1 {half:.3f}" + ("" if len(shared) == len(after) else f" ({len(shared)} shared)")


def compare(paths: list[str]) -> list[list[str]]:
    """A row for each evaluation after `HEAD`; differences are from the first. ValueError where no problem is shared."""
    evaluations = [load(path) for path in paths]
    first, rows = evaluations[0], [HEAD]
    for path, answers in zip(paths, evaluations, strict=True):
        shared = first.keys() & answers.keys()
        if not shared:
            raise ValueError(f"{path} and {paths[0]} have no problem in common; evaluate both on the same")
        row = [visible(Path(path).name), str(len(answers))]
        for before, after in zip(values_of(first), values_of(answers), strict=True):
            row += [_figure(after), "" if answers is first else _change(before, after)]
        same = sum(first[key]["greedy"].strip() == answers[key]["greedy"].strip() for key in shared)
        rows.append([*row, "" if answers is first else f"{same} of {len(shared)}"])
    return rows
