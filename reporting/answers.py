"""
Compares evaluations of the same problems: files that `evaluate.py --out` wrote, and the newest
evaluations of runs.

The differences from the first evaluation are paired, problem by problem. So if a model was fused,
quantized or put on a server, the difference shows only the effect of that, and not which problems
were drawn. This file does not compute the difference itself (difference.py).
"""

from pathlib import Path
from typing import Any

import numpy as np

from disk.run_files import read_log
from disk.statistics import half_width
from flags import escape_invisible
from reporting import difference
from text.documents import read_json

HEAD = ["", "problems", "sampled", "difference", "greedy", "difference", "same greedy text"]
Answers = dict[str, dict[str, Any]]  # the records of an evaluation, by problem


def load_answers(path: str) -> Answers:
    """
    Loads the records of a file that `evaluate.py --out` wrote, or of a run's newest evaluation.

    Raises ValueError for anything else.
    """
    try:
        if Path(path).is_dir():
            all_records = list(read_log(Path(path) / "eval_answers.jsonl"))
            newest = all_records[-1]["step"]
            records = [record for record in all_records if record["step"] == newest]
        else:
            records = [read_json(line) for line in Path(path).read_bytes().splitlines()]
        return {f"{record['problem']} {record['prompt']}": record for record in records}
    except (OSError, ValueError, LookupError, TypeError) as error:
        if not Path(path).exists():
            raise ValueError(
                f"{path} does not exist; give a file of evaluate.py --out, or a run"
            ) from error
        raise ValueError(
            f"{path} contains no answers; give a file of evaluate.py --out, or a run"
        ) from error


def figure_name(answers: Answers) -> str:
    """Returns the name of the values: right answers, or the score by the rewards listed."""
    record = next(iter(answers.values()), {})
    if "reward" in record:
        return "right answers"
    return f"the score by {', '.join(sorted(record.get('rewards', ())))}"


def greedy_values(answers: Answers) -> difference.Values:
    """Returns the value of each problem's greedy answer, and leaves out unreadable values."""
    return {
        problem: record["greedy_value"]
        for problem, record in answers.items()
        if record["greedy_value"] is not None
    }


def compare_answers(paths: list[str]) -> list[list[str]]:
    """
    Returns the rows of a table: `HEAD`, and a row for each evaluation.

    A row has the evaluation's differences from the first evaluation.

    Raises ValueError if evaluations share no problem or have different figures.
    """
    evaluations = [load_answers(path) for path in paths]
    first = evaluations[0]
    rows = [HEAD]
    for path, answers in zip(paths, evaluations, strict=True):
        check_comparable(paths[0], first, path, answers)
        first_means = difference.mean_by_problem(first)
        means = difference.mean_by_problem(answers)
        samples = min(map(difference.num_readable_samples, (first, answers)))
        row = [escape_invisible(Path(path).name), str(len(answers))]

        row.append(format_mean(means))
        row.append("" if answers is first else format_difference(first_means, means, samples))

        first_greedy = greedy_values(first)
        greedy = greedy_values(answers)
        row.append(format_mean(greedy))
        row.append("" if answers is first else format_difference(first_greedy, greedy, 1))

        row.append("" if answers is first else count_equal_greedy(first, answers))
        rows.append(row)
    return rows


def check_comparable(first_path: str, first: Answers, path: str, answers: Answers) -> None:
    if not first.keys() & answers.keys():
        raise ValueError(
            f"{path} and {first_path} have no problem in common; evaluate both on the same problems"
        )
    figure = figure_name(answers)
    first_figure = figure_name(first)
    if figure != first_figure:
        raise ValueError(
            f"{path} contains {figure} and {first_path} contains {first_figure}, which cannot be "
            "compared; evaluate both with the same --verifier and --reward"
        )


def format_mean(values: difference.Values) -> str:
    """Returns the mean and half its 95% interval, as "0.475 \u00b1 0.043"; "-" for no values."""
    if not values:
        return "-"
    array = np.array(list(values.values()))
    half = half_width(array)
    text = f"{array.mean():.3f}"
    return f"{text} \u00b1 {half:.3f}" if half else text


def format_difference(before: difference.Values, after: difference.Values, samples: int) -> str:
    """
    Returns the paired difference with its reach and outcome; "" for fewer than two shared problems.

    The reach is the distance to the farther end of the interval.
    """
    change = difference.paired_difference(before, after, samples=samples)
    if not change:
        return ""
    reach = max(change.mean - change.low, change.high - change.mean)
    outcome = change.outcome.partition(" problems")[0]
    text = f"{change.mean:+.3f} \u00b1 {reach:.3f}, {outcome}"
    if change.num < len(after):
        text += f" ({change.num} shared)"
    return text


def count_equal_greedy(first: Answers, answers: Answers) -> str:
    """Returns how many of the shared problems have the same greedy text, as "3 of 8"."""
    shared = first.keys() & answers.keys()
    num_equal = sum(
        first[problem]["greedy"].strip() == answers[problem]["greedy"].strip() for problem in shared
    )
    return f"{num_equal} of {len(shared)}"
