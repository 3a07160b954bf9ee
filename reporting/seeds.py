"""
Describes runs that differ only in their seed: the mean and spread of their held-out figure, and the
effect of another setting, compared seed by seed.

This file does not cover curves over seeds (charts.py).
"""

import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from config import SETTINGS
from disk.statistics import student_t
from reporting import history
from reporting.history import History
from text.printable import escape_invisible

# the seed itself, and settings that change no result
NOT_THE_SETTING = {"seed", "save_every", "report_to", "checkpoint_layers"}
NOT_THE_SETTING |= {name for name, setting in SETTINGS.items() if setting.is_automatic}
MOST_DIFFERENCES = 10  # pairs of seeds whose difference is listed


class SeedGroup(NamedTuple):
    """Runs with the same settings, ordered by seed; a single run is a group too."""

    name: str
    runs: list[History]

    @property
    def figure(self) -> str:
        """The held-out figure's name, from the first run that has an evaluation."""
        return next((run.figure for run in self.runs if run.evals), "accuracy")


def seed_run_dirs(folder: str | Path) -> list[str]:
    """
    Returns the directories of the runs in a directory of seeds, ordered by seed.

    Returns any other directory as it is, in a list.
    """
    seeds = [path.parent for path in Path(folder).glob("seed-*/config.yaml")]
    if (Path(folder) / "config.yaml").is_file() or not seeds:
        return [str(folder)]
    seeds.sort(key=lambda path: (len(path.name), path.name))
    return [str(path) for path in seeds]


def load_seed_groups(names: Iterable[str | Path]) -> list[SeedGroup]:
    """Loads runs and directories of seeds, grouped by their settings, in the order of `names`."""
    by_setting: dict[str, list[History]] = {}
    for name in dict.fromkeys(map(str, names)):
        for path in seed_run_dirs(name):
            run = history.load_history(path)
            setting = {
                key: value for key, value in run.settings.items() if key not in NOT_THE_SETTING
            }
            by_setting.setdefault(str(setting), []).append(run)

    groups = []
    for runs in by_setting.values():
        seeds = {run.settings["seed"] for run in runs}
        if len(seeds) == len(runs):
            runs_by_seed = sorted(runs, key=lambda run: run.settings["seed"])
            groups.append(SeedGroup(seed_group_name(runs), runs_by_seed))
        else:  # a run and its repetition have the same seed
            groups += [SeedGroup(seed_group_name([run]), [run]) for run in runs]
    return groups


def seed_group_name(runs: list[History]) -> str:
    """Returns the name of the runs' common directory of seeds, otherwise the names of the runs."""
    folders = {run.name.rpartition("/")[0] for run in runs}
    if len(folders) == 1 and "" not in folders:
        return folders.pop()
    return ", ".join(run.name for run in runs)


def newest_evaluations(group: SeedGroup, figure: str) -> dict[int, dict[str, Any]]:
    """Returns each run's newest evaluation that has the figure, by seed."""
    key = f"eval/{figure}"
    newest = {}
    for run in group.runs:
        for evaluation in run.evals:
            if evaluation.get(key) is not None:
                newest[run.settings["seed"]] = evaluation
    return newest


def describe_seed_groups(groups: list[SeedGroup]) -> list[str]:
    """
    Returns a line for each group with several seeds, and for each difference between groups.

    The differences come last, and each is from the first group.
    """
    lines = []
    for group in groups:
        evaluations = list(newest_evaluations(group, group.figure).values())
        if len(evaluations) > 1:
            lines.append(describe_spread(group, evaluations))
    first = groups[0]
    for group in groups[1:]:
        if max(len(first.runs), len(group.runs)) > 1:
            lines.append(compare_by_seed(first, group))
    return lines


def describe_spread(group: SeedGroup, evaluations: list[dict[str, Any]]) -> str:
    """Returns a line with the mean, standard deviation and range of a group's figure."""
    values = [evaluation[f"eval/{group.figure}"] for evaluation in evaluations]
    mean = statistics.fmean(values)
    deviation = statistics.stdev(values)
    steps = sorted({evaluation["step"] for evaluation in evaluations})
    when = f"after {' or '.join(map(str, steps))} steps"
    line = f"{escape_invisible(group.name)}: {group.figure} {mean:.3f}, std {deviation:.3f}"
    line += f" over {len(values)} seeds ({min(values):.3f} to {max(values):.3f}) {when}"
    num_missing = len(group.runs) - len(values)
    if num_missing > 0:
        line += f"; {num_missing} without an evaluation yet"
    return line


def compare_by_seed(first: SeedGroup, other: SeedGroup) -> str:
    """
    Returns a line with the effect of the other group's setting, over the seeds of both groups.

    Runs of the same seed draw the same prompts, so their differences are paired.
    """
    figure = first.figure
    key = f"eval/{figure}"
    title = f"{escape_invisible(other.name)} - {escape_invisible(first.name)}"
    before = newest_evaluations(first, figure)
    after = newest_evaluations(other, figure)
    differences = [after[seed][key] - before[seed][key] for seed in before if seed in after]
    num = len(differences)
    if num < 2:
        return (
            f"{title}: the difference is unknown, because fewer than two seeds in common have an "
            f"evaluation of {figure}"
        )
    mean = statistics.fmean(differences)
    half_width = student_t(num - 1) * statistics.stdev(differences) / num**0.5
    listed = " ".join(f"{difference:+.3f}" for difference in differences[:MOST_DIFFERENCES])
    if num > MOST_DIFFERENCES:
        listed += " \u2026"
    interval = f"{mean:+.3f} \u00b1 {half_width:.3f} (95%, Student's t)"
    line = f"{title}: {interval} over {num} pairs: {listed}"
    num_before = format_num_problems(before)
    num_after = format_num_problems(after)
    if num_before != num_after:
        line += f"; on {num_after} and {num_before} held-out problems"
    return line


def format_num_problems(evaluations: dict[int, dict[str, Any]]) -> str:
    """Returns how many problems each of these evaluations has, as "64" or "64 or 128"."""
    return " or ".join(sorted({str(record["eval/num"]) for record in evaluations.values()}))
