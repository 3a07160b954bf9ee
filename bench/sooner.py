"""
How soon runs reached an accuracy: `uv run python -m bench.sooner --line 0.85 runs/A runs/B`.

Reads what runs, or directories of seeds, have recorded. A run reaches the line at the first of two evaluations in a row
that are at or above it; what it took are its steps until then, their seconds, completions and own tokens, without start
and evaluations. Medians over seeds; the others' seconds and completions are also divided by the first's, seed by seed.
"""

import argparse
import math
import statistics
from pathlib import Path
from typing import NamedTuple

import cpu_blas  # noqa: F401  (before mlx)

from flags import fail
from reporting import history, seeds
from reporting.history import History


class Cost(NamedTuple):
    """What a run took until it reached the line; inf where it did not."""

    steps: float
    seconds: float
    completions: float
    tokens: float


def cost_of(run: History, line: float) -> Cost:
    figure, evals = history.figure_of(run)
    above = [one[f"eval/{figure}"] >= line for one in evals]
    reached = next((one["step"] for one, *both in zip(evals, above, above[1:], strict=False) if all(both)), -1)
    steps = [one for one in run.steps if one["step"] <= reached]
    if reached < 0:
        return Cost(*[math.inf] * 4)
    each = run.settings["batch"] * run.settings["groups"]
    completions = [one["sampling/draws"] * each for one in steps]
    tokens = sum(num * one["completion/mean_tokens"] for num, one in zip(completions, steps, strict=True))
    return Cost(len(steps), sum(one["step/s"] for one in steps), sum(completions), tokens)


def row(name: str, costs: dict[int, Cost], first: dict[int, Cost]) -> str:
    """A line of the table: medians, and ratios of the seeds that the first setting has too."""
    medians = [statistics.median(values) for values in zip(*costs.values(), strict=True)]
    shared = sorted(costs.keys() & first.keys())
    ratios = [
        ", ".join(f"{getattr(costs[seed], kind) / getattr(first[seed], kind):.2f}" for seed in shared)
        for kind in ("seconds", "completions")
    ]
    return f"| {name} | {' | '.join([*(f'{value:,.0f}' for value in medians), *ratios])} |"


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="runs, or directories of seeds")
    parser.add_argument("--line", type=float, required=True, help="held-out accuracy to be reached")
    args = parser.parse_args(argv)
    try:
        settings = seeds.load(args.runs)
    except (ValueError, OSError) as error:
        fail(error)
    found = [{run.settings["seed"]: cost_of(run, args.line) for run in one.runs} for one in settings]
    heads = [f"until {args.line:g}", *Cost._fields, "seconds, of the first", "completions, of the first"]
    print(f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}")
    for one, costs in zip(settings, found, strict=True):
        print(row(one.name, costs, found[0]))


if __name__ == "__main__":
    main()
