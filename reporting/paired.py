"""
Compares the newest held-out answers of several runs problem by problem and seed by seed.

The runs answer the same problems. A comparison of their answers to each problem therefore has a
much narrower confidence interval than a comparison of the runs' means. This file does not cover the
spread over seeds (seeds.py) or the change within one run (verdict.py).
"""

import statistics
from collections.abc import Callable, Mapping
from typing import Any

from config import SETTINGS
from prompts.examples import key_of_problem
from reporting import difference
from reporting.history import Answers, History
from reporting.seeds import SeedGroup
from text.printable import escape_invisible

ValueOfAnswers = Callable[[Answers], difference.ValueByProblem]

# the name of a held-out figure -> the settings that decide what it measures
MEASURES = {
    "accuracy": ("task", "task_config", "verifier"),
    "score": (
        *("task", "task_config", "verifier", "reward", "reward_weights", "reward_gate"),
        *("rubric", "judge_model", "judge_mode"),
    ),
}


def describe_paired_differences(groups: list[SeedGroup]) -> list[str]:
    """Returns a line for each later group that says how it differs from the first group."""
    lines = []
    for group in groups[1:]:
        line = describe_paired_difference(groups[0], group)
        if line:
            lines.append(line)
    return lines


def describe_paired_difference(first: SeedGroup, other: SeedGroup) -> str:
    """
    Returns a line that says how much better or worse the other group's held-out answers are.

    The line has a mean difference for the sampled answers and another for the greedy answers. Runs
    of the same seed are compared, and the values of a problem are averaged over the seeds. Two
    single runs are compared even if their seeds differ. Returns "" if the runs have no held-out
    answers, as in supervised fine-tuning that measures only the loss.
    """
    figure = first.figure_name
    if figure not in MEASURES or not any(map(newest_held_out_answers, first.runs)):
        return ""
    title = f"{escape_invisible(other.name)} - {escape_invisible(first.name)}, by problem"
    differing = differing_measure_flags_and_files(first.runs[0], other.runs[0], figure)
    if figure != other.figure_name:
        differing = [f"one measures the {figure} and the other the {other.figure_name}"]
    if differing:
        return (
            f"{title}: not compared, because the runs measure different things "
            f"({', '.join(differing)})"
        )

    pairs = pair_runs(first, other)
    parts = []
    values: dict[str, ValueOfAnswers] = {
        figure: difference.mean_value_by_problem,
        "greedy": difference.greedy_value_by_problem,
    }
    for name, value_by_problem in values.items():
        change = mean_paired_difference(pairs, value_by_problem)
        if change:
            outcome = change.outcome.partition(" problems")[0]
            parts.append(
                f"{name} {change.mean_plus_minus_text} on {change.num} problems, {outcome}"
            )
    if not parts:
        return f"{title}: not compared, because the runs share fewer than two problems"
    line = f"{title}: {'; '.join(parts)}"
    if len(pairs) > 1:
        line += f"; means of {len(pairs)} seeds, so the intervals hold only for these seeds"
    return line


def pair_runs(first: SeedGroup, other: SeedGroup) -> list[tuple[History, History]]:
    """Returns the pairs of runs with the same seed; two single runs are always a pair."""
    if len(first.runs) == len(other.runs) == 1:
        return [(first.runs[0], other.runs[0])]
    run_of_seed = {run.settings["seed"]: run for run in other.runs}
    pairs = []
    for run in first.runs:
        if run.settings["seed"] in run_of_seed:
            pairs.append((run, run_of_seed[run.settings["seed"]]))
    return pairs


def newest_held_out_answers(run: History) -> Answers:
    """
    Returns the held-out answers of the newest evaluation; {} if there is none.

    Evaluations before a resume that changed what they measure are left out.
    """
    by_step = run.with_comparable_evals.answers_by_step
    return by_step[max(by_step)] if by_step else {}


def mean_paired_difference(
    pairs: list[tuple[History, History]], value_by_problem: ValueOfAnswers
) -> difference.MeanChange | None:
    """
    Returns by how much the second runs of the pairs exceed the first runs, on average.

    The average is over the problems that all runs share. Returns None if there are fewer than two.
    """
    before_values = [value_by_number_and_prompt(run, value_by_problem) for run, _ in pairs]
    after_values = [value_by_number_and_prompt(run, value_by_problem) for _, run in pairs]
    all_values = before_values + after_values
    if not all_values:
        return None
    shared = set.intersection(*(set(values) for values in all_values))
    before = {key: statistics.fmean(values[key] for values in before_values) for key in shared}
    after = {key: statistics.fmean(values[key] for values in after_values) for key in shared}
    return difference.paired_difference(before, after, samples_per_value=len(pairs))


def value_by_number_and_prompt(
    run: History, value_by_problem: ValueOfAnswers
) -> Mapping[str, float]:
    """
    Returns the value of the answers to each problem, by the problem's number and prompt.

    The prompt is part of the key because two runs may have different data.
    """
    answers = newest_held_out_answers(run)
    values = value_by_problem(answers)
    return {key_of_problem(answers[problem]): value for problem, value in values.items()}


def differing_measure_flags_and_files(first: History, other: History, figure: str) -> list[str]:
    """Returns the flags and the files that make two runs measure different things."""
    names = MEASURES[figure]
    differing = []
    for name in names:
        if name not in SETTINGS or first.settings.get(name) == other.settings.get(name):
            continue
        differing.append(f"--{name.replace('_', '-')}")
    named: list[Any] = [first.settings.get(name) for name in names]
    for file, digests in digests_of_differing_files([first, other]).items():
        if file in str(named) and "-" not in digests:
            differing.append(file)
    return differing


def digests_of_differing_files(runs: list[History]) -> dict[str, list[str]]:
    """
    Returns the files and functions whose content is not the same in all runs.

    Under each name is a list with one entry per run: the beginning of the digest, or "-" for a run
    without such a file.
    """
    names: dict[str, None] = {}  # used as a set that keeps its order
    for run in runs:
        names |= dict.fromkeys(run.digest_by_file_name)
    contents = {}
    for name in names:
        digests = [run.digest_by_file_name.get(name, "-") for run in runs]
        if len(set(digests)) > 1:
            contents[escape_invisible(name)] = digests
    return contents
