"""
Runs that differ only in their seed: mean and spread of their held-out figure, and what another setting changes, seed by
seed.
"""

import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from config import SETTINGS
from disk.run_files import student
from flags import visible
from reporting import history
from reporting.history import History

# the seed itself, and what changes no result
NOT_THE_SETTING = {"seed", "save_every", "report_to", "checkpoint_layers"}
NOT_THE_SETTING |= {key for key, one in SETTINGS.items() if one.is_automatic}


class Setting(NamedTuple):
    """The runs of one setting, by seed; one run is a setting too."""

    name: str
    runs: list[History]


def runs_in(folder: str | Path) -> list[str]:
    """A run as it is; of a directory of seeds its runs, by seed."""
    seeds = [path.parent for path in Path(folder).glob("seed-*/config.yaml")]
    if (Path(folder) / "config.yaml").is_file() or not seeds:
        return [str(folder)]
    return [str(path) for path in sorted(seeds, key=lambda path: (len(path.name), path.name))]


def load(names: Iterable[str | Path]) -> list[Setting]:
    """The settings of these runs and directories of seeds, in the order in which they are named first."""
    found: dict[str, list[History]] = {}
    for run in (history.load(path) for name in dict.fromkeys(map(str, names)) for path in runs_in(name)):
        key = str({name: value for name, value in run.settings.items() if name not in NOT_THE_SETTING})
        found.setdefault(key, []).append(run)
    settings = []
    for runs in found.values():
        seeds = [run.settings["seed"] for run in runs]
        alike = [runs] if len(set(seeds)) == len(seeds) else [[run] for run in runs]  # a run and its repetition
        settings += [Setting(name_of(one), sorted(one, key=lambda run: run.settings["seed"])) for one in alike]
    return settings


def name_of(runs: list[History]) -> str:
    """The directory of seeds, or the runs themselves."""
    homes = {run.name.rpartition("/")[0] for run in runs}
    return homes.pop() if len(homes) == 1 and "" not in homes else ", ".join(run.name for run in runs)


def last(run: History) -> tuple[int, float] | None:
    """The newest evaluation's step and held-out figure."""
    return next(((one["step"], one[f"eval/{run.figure}"]) for one in run.measured[::-1]), None)


def lines(settings: list[Setting]) -> list[str]:
    """A line on each setting with several seeds, and one on each difference from the first setting, by shared seeds."""
    first, said = settings[0], []
    for name, runs in settings:
        found = {run.settings["seed"]: value for run in runs if (value := last(run))}
        if len(found) < 2:
            continue
        figure, values = runs[0].figure, [value for _, value in found.values()]
        steps = sorted({step for step, _ in found.values()})
        said.append(
            f"{visible(name)}: {figure} {statistics.fmean(values):.3f}, std {statistics.stdev(values):.3f} over "
            f"{len(values)} seeds ({min(values):.3f} to {max(values):.3f}) after {' or '.join(map(str, steps))} steps"
        )
        if len(found) < len(runs):
            said[-1] += f"; {len(runs) - len(found)} seeds have no evaluation yet"
    for setting in settings[1:]:
        said += [difference(first, setting)] if max(len(first.runs), len(setting.runs)) > 1 else []
    return said


def difference(first: Setting, other: Setting) -> str:
    """What the other setting changes, by the seeds that both have: these drew the same prompts."""
    before, after = (
        {run.settings["seed"]: value[1] for run in one.runs if (value := last(run))} for one in (first, other)
    )
    pairs = [after[seed] - value for seed, value in before.items() if seed in after]
    what = f"{visible(other.name)} - {visible(first.name)}"
    if len(pairs) < 2:
        return f"{what}: fewer than two seeds in common, so no difference can be told"
    half = student(len(pairs) - 1) * statistics.stdev(pairs) / len(pairs) ** 0.5
    each = " ".join(f"{pair:+.3f}" for pair in pairs[:10]) + (" …" if len(pairs) > 10 else "")
    said = f"{what}: {statistics.fmean(pairs):+.3f} ± {half:.3f} (95%, Student's t) over {len(pairs)} pairs: {each}"
    nums = [{str(run.measured[-1]["eval/num"]) for run in one.runs if last(run)} for one in (other, first)]
    asked = [" or ".join(sorted(its)) for its in nums]
    return said if asked[0] == asked[1] else f"{said}; of {asked[0]} and {asked[1]} held-out problems"
