"""
Runs that differ only in their seed: mean and spread of their held-out figure, and what another setting changes, seed by
seed.
"""

import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from config import SETTINGS
from disk.run_files import student_t
from flags import escape_invisible
from reporting import history
from reporting.history import History

# the seed itself, and what changes no result
NOT_THE_SETTING = {"seed", "save_every", "report_to", "checkpoint_layers"}
NOT_THE_SETTING |= {key for key, one in SETTINGS.items() if one.is_automatic}


class SeedGroup(NamedTuple):
    """The runs of one setting, by seed; one run is a setting too."""

    name: str
    runs: list[History]

    @property
    def figure(self) -> str:
        """The held-out figure's name, of which a seed without an evaluation knows nothing."""
        return next((run.figure for run in self.runs if run.evals), "accuracy")


def seed_runs(folder: str | Path) -> list[str]:
    """A run as it is; of a directory of seeds its runs, by seed."""
    seeds = [path.parent for path in Path(folder).glob("seed-*/config.yaml")]
    if (Path(folder) / "config.yaml").is_file() or not seeds:
        return [str(folder)]
    return [str(path) for path in sorted(seeds, key=lambda path: (len(path.name), path.name))]


def load_seed_groups(names: Iterable[str | Path]) -> list[SeedGroup]:
    """The settings of these runs and directories of seeds, in the order in which they are named first."""
    found: dict[str, list[History]] = {}
    for run in (
        history.load_history(path)
        for name in dict.fromkeys(map(str, names))
        for path in seed_runs(name)
    ):
        key = str(
            {name: value for name, value in run.settings.items() if name not in NOT_THE_SETTING}
        )
        found.setdefault(key, []).append(run)
    settings = []
    for runs in found.values():
        seeds = [run.settings["seed"] for run in runs]
        alike = (
            [runs] if len(set(seeds)) == len(seeds) else [[run] for run in runs]
        )  # a run and its repetition
        settings += [
            SeedGroup(seed_group_name(one), sorted(one, key=lambda run: run.settings["seed"]))
            for one in alike
        ]
    return settings


def seed_group_name(runs: list[History]) -> str:
    """The directory of seeds, or the runs themselves."""
    homes = {run.name.rpartition("/")[0] for run in runs}
    return (
        homes.pop() if len(homes) == 1 and "" not in homes else ", ".join(run.name for run in runs)
    )


def newest_evaluations(setting: SeedGroup, figure: str) -> dict[int, dict[str, Any]]:
    """The newest evaluation that has a figure, by seed."""
    key = f"eval/{figure}"
    return {
        run.settings["seed"]: one
        for run in setting.runs
        for one in run.evals
        if one.get(key) is not None
    }


def describe_seed_groups(settings: list[SeedGroup]) -> list[str]:
    """A line on each setting with several seeds, and one on each difference from the first setting, by shared seeds."""
    first, said = settings[0], []
    for one in settings:
        figure, num = one.figure, len(one.runs)
        ends = newest_evaluations(one, figure).values()
        if len(ends) > 1:
            values = [end[f"eval/{figure}"] for end in ends]
            steps = " or ".join(map(str, sorted({end["step"] for end in ends})))
            spread = f"{statistics.fmean(values):.3f}, std {statistics.stdev(values):.3f} over {len(ends)} seeds"
            ends_at = f"({min(values):.3f} to {max(values):.3f}) after {steps} steps"
            lacking = f"; without an evaluation yet: {num - len(ends)}" * (num > len(ends))
            said.append(f"{escape_invisible(one.name)}: {figure} {spread} {ends_at}{lacking}")
    return said + [
        compare_by_seed(first, one)
        for one in settings[1:]
        if max(len(first.runs), len(one.runs)) > 1
    ]


def compare_by_seed(first: SeedGroup, other: SeedGroup) -> str:
    """What the other setting changes, by the seeds that both have: these drew the same prompts."""
    figure, what = first.figure, f"{escape_invisible(other.name)} - {escape_invisible(first.name)}"
    before, after = (newest_evaluations(one, figure) for one in (first, other))
    shared = [(one, after[seed]) for seed, one in before.items() if seed in after]
    pairs = [new[f"eval/{figure}"] - old[f"eval/{figure}"] for old, new in shared]
    if len(pairs) < 2:
        return f"{what}: fewer than two seeds in common have an evaluation of {figure}, so no difference can be told"
    half = student_t(len(pairs) - 1) * statistics.stdev(pairs) / len(pairs) ** 0.5
    each = " ".join(f"{pair:+.3f}" for pair in pairs[:10]) + " \u2026" * (len(pairs) > 10)
    change = f"{statistics.fmean(pairs):+.3f} \u00b1 {half:.3f} (95%, Student's t)"
    said = f"{what}: {change} over {len(pairs)} pairs: {each}"
    asked = [
        " or ".join(sorted({str(one["eval/num"]) for one in its.values()}))
        for its in (after, before)
    ]
    return said + f"; of {asked[0]} and {asked[1]} held-out problems" * (asked[0] != asked[1])
