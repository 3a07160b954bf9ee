"""
Groups runs that differ only in their seed, and describes how their held-out figure varies.

Two groups with different settings are compared seed by seed. This file does not cover the curves of
groups (charts.py).
"""

import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from config import MemoryDependentSizes
from disk import places
from disk.statistics import student_t_quantile
from reporting import history
from reporting.history import History
from text.printable import escape_invisible

# settings in which the runs of a group may differ: the seed, and settings that affect no result
NOT_THE_SETTING = {"seed", "save_every", "report_to", *MemoryDependentSizes._fields}
MOST_DIFFERENCES = 10  # a line lists the differences between at most this many pairs of runs


class SeedGroup(NamedTuple):
    """One or more runs that differ only in their seed, in the order of their seeds."""

    name: str
    runs: list[History]

    @property
    def figure_name(self) -> str:
        """The name of the held-out figure of the first run that has an evaluation."""
        return next((run.figure_name for run in self.runs if run.evals), "accuracy")


def run_dirs_of_seeds(folder: str | Path) -> list[str]:
    """
    Returns the directories of the runs in a directory with one run per seed, ordered by seed.

    For any other directory, returns a list that contains only this directory.
    """
    seeds = [path.parent for path in Path(folder).glob("seed-*/config.yaml")]
    if (Path(folder) / "config.yaml").is_file() or not seeds:
        return [str(folder)]
    seeds.sort(key=lambda path: (len(path.name), path.name))
    return [str(path) for path in seeds]


def load_seed_groups(run_dirs: Iterable[str | Path]) -> list[SeedGroup]:
    """
    Loads runs and puts runs that differ only in their seed into one group.

    Runs are in different groups if a file of the user, such as that of a reward, has changed
    between them.

    run_dirs: directories of runs, or directories that contain one run per seed. The groups are in
    the order of `run_dirs`.
    """
    by_setting: dict[str, list[History]] = {}
    for run_dir in dict.fromkeys(map(str, run_dirs)):
        for path in run_dirs_of_seeds(run_dir):
            run = history.load_history(path)
            setting = {
                key: value for key, value in run.settings.items() if key not in NOT_THE_SETTING
            }
            contents = sorted(places.read_path_record(run.dir)["files"].values())
            by_setting.setdefault(f"{setting} {contents}", []).append(run)

    groups = []
    for runs in by_setting.values():
        seeds = {run.settings["seed"] for run in runs}
        if len(seeds) == len(runs):
            runs_by_seed = sorted(runs, key=lambda run: run.settings["seed"])
            groups.append(SeedGroup(seed_group_name(runs), runs_by_seed))
        else:  # two runs have the same seed, so each run is a group of its own
            groups += [SeedGroup(seed_group_name([run]), [run]) for run in runs]
    return groups


def seed_group_name(runs: list[History]) -> str:
    """
    Returns the name of the directory that contains all runs.

    If there is no such directory, returns the names of the runs.
    """
    folders = {run.name.rpartition("/")[0] for run in runs}
    if len(folders) == 1 and "" not in folders:
        return folders.pop()
    return ", ".join(run.name for run in runs)


def newest_evaluation_by_seed(group: SeedGroup, figure: str) -> dict[int, dict[str, Any]]:
    """Returns, for the seed of each run, the newest evaluation that measured the figure."""
    key = f"eval/{figure}"
    newest = {}
    for run in group.runs:
        for evaluation in run.with_comparable_evals.evals:
            if evaluation.get(key) is not None:
                newest[run.settings["seed"]] = evaluation
    return newest


def describe_spreads_and_differences(groups: list[SeedGroup]) -> list[str]:
    """
    Returns lines about the spread of each group, and about its difference from the first group.

    A group with a single seed has no spread. Two groups with a single run each are not compared.
    """
    lines = []
    for group in groups:
        evaluations = list(newest_evaluation_by_seed(group, group.figure_name).values())
        if len(evaluations) > 1:
            lines.append(describe_spread(group, evaluations))
    first = groups[0]
    for group in groups[1:]:
        if max(len(first.runs), len(group.runs)) > 1:
            lines.append(describe_difference_by_seed(first, group))
    return lines


def describe_spread(group: SeedGroup, evaluations: list[dict[str, Any]]) -> str:
    """Returns a line with the mean, standard deviation and range of a group's held-out figure."""
    values = [evaluation[f"eval/{group.figure_name}"] for evaluation in evaluations]
    mean = statistics.fmean(values)
    deviation = statistics.stdev(values)
    steps = sorted({evaluation["step"] for evaluation in evaluations})
    when = f"after {' or '.join(map(str, steps))} steps"
    line = f"{escape_invisible(group.name)}: {group.figure_name} {mean:.3f}, std {deviation:.3f}"
    line += f" over {len(values)} seeds ({min(values):.3f} to {max(values):.3f}) {when}"
    num_missing = len(group.runs) - len(values)
    if num_missing > 0:
        line += f"; not evaluated yet: {num_missing} of {len(group.runs)} runs"
    return line


def describe_difference_by_seed(first: SeedGroup, other: SeedGroup) -> str:
    """
    Returns a line that says how much the other group's figure differs from the first group's.

    Runs with the same seed draw the same prompts, so the groups are compared seed by seed.
    """
    figure = first.figure_name
    key = f"eval/{figure}"
    title = f"{escape_invisible(other.name)} - {escape_invisible(first.name)}"
    before = newest_evaluation_by_seed(first, figure)
    after = newest_evaluation_by_seed(other, figure)
    differences = [after[seed][key] - before[seed][key] for seed in before if seed in after]
    num = len(differences)
    if num < 2:
        return (
            f"{title}: the difference is unknown, because fewer than two seeds have an evaluation "
            f"of the {figure} in both groups"
        )
    mean = statistics.fmean(differences)
    confidence_half_width = student_t_quantile(num - 1) * statistics.stdev(differences) / num**0.5
    listed = " ".join(f"{difference:+.3f}" for difference in differences[:MOST_DIFFERENCES])
    if num > MOST_DIFFERENCES:
        listed += " \u2026"
    interval = f"{mean:+.3f}"
    if num > 2:  # with two seeds, t is 12.7, and the interval says nothing
        interval += f" \u00b1 {confidence_half_width:.3f} (95%, Student's t)"
    line = f"{title}: {interval} over {num} pairs: {listed}"
    num_before = format_num_problems(before)
    num_after = format_num_problems(after)
    if num_before != num_after:
        line += f"; evaluated on {num_after} and {num_before} held-out problems, respectively"
    return line


def format_num_problems(evaluations: dict[int, dict[str, Any]]) -> str:
    """Returns the number of problems per evaluation as text, for example "64" or "64 or 128"."""
    return " or ".join(sorted({str(record["eval/num"]) for record in evaluations.values()}))
