"""
Compares how soon runs reached an accuracy of, say, 0.85:
`uv run python -m bench.sooner --line 0.85 runs/A runs/B`.

The command reads the records of runs, or of directories with one run per seed. A run reaches the
accuracy at the first of two successive evaluations that are at or above this accuracy. The costs of
a run are its steps until it reaches the accuracy, and the seconds, completions and tokens of these
steps; the time for starting and evaluating does not count. The table shows medians over seeds. For
each seed, the table also shows the seconds and completions divided by those of the same seed in the
first directory.
"""

import argparse
import math
from pathlib import Path

import cpu_blas  # noqa: F401  (before mlx)
import pandas as pd

from flags import exit_on_mistakes
from machine.output import guard_output
from reporting import seeds
from reporting.history import History

COSTS = ["steps", "seconds", "completions", "tokens"]
COMPARED_COSTS = ["seconds", "completions"]


def step_that_reaches_accuracy(run: History, accuracy: float) -> int | None:
    """Returns the step of the first evaluation that, like the next, reaches `accuracy`, or None."""
    is_above = [
        evaluation[f"eval/{run.figure_name}"] >= accuracy for evaluation in run.evals_with_figure
    ]
    for number in range(len(is_above) - 1):
        if is_above[number] and is_above[number + 1]:
            return run.evals_with_figure[number]["step"]
    return None


def costs_to_reach_accuracy(run: History, accuracy: float) -> list[float]:
    """Returns a run's costs (see `COSTS`) of reaching `accuracy`, or inf if it never reached it."""
    last_step = step_that_reaches_accuracy(run, accuracy)
    if last_step is None:
        return [math.inf] * len(COSTS)
    steps = [record for record in run.steps if record["step"] <= last_step]
    seconds = sum(record["step/s"] for record in steps)
    completions = len(steps) * run.settings["batch"] * run.settings["groups"]
    tokens = sum(record["rollout/tok_s"] * record["rollout/s"] for record in steps)
    return [len(steps), seconds, completions, tokens]


@guard_output()
def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "runs",
        nargs="+",
        type=Path,
        metavar="RUN",
        help="a directory of a run, or of runs with different seeds (made by --seeds)",
    )
    parser.add_argument("--line", type=float, required=True, help="the held-out accuracy to reach")
    args = parser.parse_args(argv)
    with exit_on_mistakes():
        groups = seeds.load_seed_groups(args.runs)

    ratio_headers = [f"{cost}, relative to the first" for cost in COMPARED_COSTS]
    headers = [f"until {args.line:g}", *COSTS, *ratio_headers]
    print(f"| {' | '.join(headers)} |")
    print("|" + "---|" * len(headers))
    tables = []
    for group in groups:
        costs_by_seed = {
            run.settings["seed"]: costs_to_reach_accuracy(run, args.line) for run in group.runs
        }
        tables.append(pd.DataFrame(costs_by_seed, COSTS))
    for group, costs in zip(groups, tables, strict=True):
        ratios = (costs / tables[0]).dropna(axis=1)  # only seeds that both groups have
        cells = [f"{value:,.0f}" for value in costs.median(axis=1)]
        for cost in COMPARED_COSTS:
            cells.append(", ".join(f"{ratio:.2f}" for ratio in ratios.loc[cost]))
        print(f"| {group.name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
