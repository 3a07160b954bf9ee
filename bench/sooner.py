"""
How soon runs reached an accuracy: `uv run python -m bench.sooner --line 0.85 runs/A runs/B`.

Reads what runs, or directories of seeds, have recorded. A run reaches the line at the first of two evaluations in a row
that are at or above it; what it took are its steps until then, their seconds, completions and own tokens, without start
and evaluations. Medians over seeds; the others' seconds and completions are also divided by the first's, seed by seed.
"""

import argparse
import math
from pathlib import Path

import cpu_blas  # noqa: F401  (before mlx)
import pandas as pd

from flags import report_mistakes
from machine.output import guard_output
from reporting import seeds
from reporting.history import History

COSTS = ["steps", "seconds", "completions", "tokens"]


def costs_of(run: History, line: float) -> list[float]:
    """What a run took until it reached the line, COSTS; inf where it did not."""
    above = [one[f"eval/{run.figure}"] >= line for one in run.measured]
    reached = next(
        (
            one["step"]
            for one, *both in zip(run.measured, above, above[1:], strict=False)
            if all(both)
        ),
        -1,
    )
    if reached < 0:
        return [math.inf] * len(COSTS)
    steps = [one for one in run.steps if one["step"] <= reached]
    completions = len(steps) * run.settings["batch"] * run.settings["groups"]
    tokens = sum(one["rollout/tok_s"] * one["rollout/s"] for one in steps)
    return [len(steps), sum(one["step/s"] for one in steps), completions, tokens]


@guard_output()
def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "runs", nargs="+", type=Path, metavar="RUN", help="runs, or directories of seeds"
    )
    parser.add_argument("--line", type=float, required=True, help="held-out accuracy to be reached")
    args = parser.parse_args(argv)
    with report_mistakes():
        settings = seeds.load_seed_groups(args.runs)
    heads = [f"until {args.line:g}", *COSTS, "seconds, of the first", "completions, of the first"]
    print(f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}")
    tables = [
        pd.DataFrame({run.settings["seed"]: costs_of(run, args.line) for run in one.runs}, COSTS)
        for one in settings
    ]
    for one, costs in zip(settings, tables, strict=True):
        ratios = (costs / tables[0]).dropna(axis=1)  # of the seeds that both have
        cells = [f"{value:,.0f}" for value in costs.median(axis=1)]
        cells += [
            ", ".join(f"{ratio:.2f}" for ratio in ratios.loc[cost])
            for cost in ("seconds", "completions")
        ]
        print(f"| {one.name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
