"""
Compares two or more evaluations of the same problems, from `evaluate.py --out` or from runs.

Each evaluation is compared with the first one, problem by problem. For example, the comparison
shows how much quantizing a model changes its answers, regardless of which problems were drawn. This
file does not compute the differences themselves (difference.py).
"""

from pathlib import Path
from typing import Any

import numpy as np

from disk.run_files import read_log
from disk.statistics import FEWEST_FOR_INTERVAL, confidence_half_width
from flags import escape_invisible
from prompts.examples import key_of_problem
from reporting import difference
from text.documents import read_json

HEAD = ["", "problems", "sampled", "difference", "greedy", "difference", "same greedy text"]
Answers = dict[str, dict[str, Any]]  # the records of one evaluation; each key names a problem


def load_answers_of_file_or_newest_of_run(path: str) -> Answers:
    """
    Loads the answers in a file that `evaluate.py --out` wrote, or a run's newest held-out answers.

    Raises ValueError if `path` is neither such a file nor the directory of a run.
    """
    try:
        if Path(path).is_dir():
            all_records = list(read_log(Path(path) / "eval_answers.jsonl"))
            newest = all_records[-1]["step"]
            records = [record for record in all_records if record["step"] == newest]
        else:
            records = [read_json(line) for line in Path(path).read_bytes().splitlines()]
        return {key_of_problem(record): record for record in records}
    except (OSError, ValueError, LookupError, TypeError) as error:
        if not Path(path).exists():
            raise ValueError(
                f"{path} does not exist; give a file written by evaluate.py --out, or a run"
            ) from error
        raise ValueError(
            f"{path} contains no answers; give a file written by evaluate.py --out, or a run"
        ) from error


def describe_metric(answers: Answers) -> str:
    """Returns what the values measure, such as "right answers" or "the score by rubric"."""
    record = next(iter(answers.values()), {})
    if "reward" in record:
        return "right answers"
    return f"the score by {', '.join(sorted(record.get('rewards', ())))}"


def make_answer_comparison_table(paths: list[str]) -> list[list[str]]:
    """
    Returns the rows of a table: first the column names, then one row per evaluation.

    Each row shows how much an evaluation differs from the first evaluation.

    Raises ValueError if an evaluation shares no problem with the first one, or if the two
    evaluations measure different things.
    """
    evaluations = [load_answers_of_file_or_newest_of_run(path) for path in paths]
    first = evaluations[0]
    rows = [HEAD]
    for path, answers in zip(paths, evaluations, strict=True):
        check_overlap_and_equal_measure(paths[0], first, path, answers)
        first_means = difference.mean_value_by_problem(first)
        means = difference.mean_value_by_problem(answers)
        samples = min(map(difference.fewest_readable_samples, (first, answers)))
        row = [escape_invisible(Path(path).name), str(len(answers))]

        row.append(format_mean_with_interval(means))
        row.append(
            ""
            if answers is first
            else format_paired_difference_and_outcome(first_means, means, samples)
        )

        first_greedy = difference.greedy_value_by_problem(first)
        greedy = difference.greedy_value_by_problem(answers)
        row.append(format_mean_with_interval(greedy))
        row.append(
            ""
            if answers is first
            else format_paired_difference_and_outcome(first_greedy, greedy, 1)
        )

        row.append("" if answers is first else format_num_equal_greedy_texts(first, answers))
        rows.append(row)
    return rows


def check_overlap_and_equal_measure(
    first_path: str, first: Answers, path: str, answers: Answers
) -> None:
    if not first.keys() & answers.keys():
        raise ValueError(
            f"{path} and {first_path} share no problems; evaluate both on the same data"
        )
    figure = describe_metric(answers)
    first_figure = describe_metric(first)
    if figure != first_figure:
        raise ValueError(
            f"{path} measures {figure} but {first_path} measures {first_figure}, so they cannot be "
            "compared; evaluate both with the same --verifier and --reward"
        )


def format_mean_with_interval(values: difference.ValueByProblem) -> str:
    """Returns the mean and half the width of its 95% interval, or "-" if there are no values."""
    if not values:
        return "-"
    array = np.array(list(values.values()))
    half = confidence_half_width(array)
    text = f"{array.mean():.3f}"
    return f"{text} \u00b1 {half:.3f}" if half and len(array) >= FEWEST_FOR_INTERVAL else text


def format_paired_difference_and_outcome(
    before: difference.ValueByProblem, after: difference.ValueByProblem, num_samples: int
) -> str:
    """
    Returns the paired difference with its error and outcome, or "" for fewer than two problems.

    The error is the distance from the difference to the farther end of its 95% interval.
    """
    change = difference.paired_difference(before, after, samples_per_value=num_samples)
    if not change:
        return ""
    outcome = change.outcome.partition(" problems")[0]
    text = f"{change.mean_plus_minus_text}, {outcome}"
    if change.num < len(after):
        text += f" ({change.num} shared)"
    return text


def format_num_equal_greedy_texts(first: Answers, answers: Answers) -> str:
    """Returns the number of shared problems with equal greedy answers, in the form "3 of 8"."""
    shared = first.keys() & answers.keys()
    num_equal = sum(
        first[problem]["greedy"].strip() == answers[problem]["greedy"].strip() for problem in shared
    )
    return f"{num_equal} of {len(shared)}"
