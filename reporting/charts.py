"""
Computes where the charts of a run's page show each point, band and label.

templates/report.html.j2 draws the charts as SVG. A chart is WIDTH by HEIGHT units in size, and the
browser scales it to the page. This file does not cover reading a run (history.py) or the rest of
the page (page.py).

Axes: n, the points of a curve.
"""

import functools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from reporting.history import History
from reporting.seeds import SeedGroup
from text.printable import escape_invisible

WIDTH = 360
HEIGHT = 170
# ---- the margins around the plot
LEFT = 52
RIGHT = 8
TOP = 8
BOTTOM = 20

MOST_POINTS = 400  # the most points of a curve; a longer curve shows means over several steps
NUM_COLOURS = 8
NUM_DASHES = 4
PHASES = ("rollout", "reward", "judge", "ref", "teacher", "update", "other")
RATE = "Learning rate"  # the title of a chart that is shown only if the rate was ever reduced
REWARD_METRICS = ("reward/mean", "reward/std", "reward/zero_std_frac", "reward/none", "reward/s")

# the prefix of the metrics that a chart shows, by the chart's title
PREFIXES = {
    "Reward by component": "reward/",
    "Logged by rewards": "metric/",
    "Logged by the loss": "loss/",
}


class Curve(NamedTuple):
    """A line over the steps of a run, with a band around it."""

    label: str
    rows: np.ndarray  # (4, n): steps, values, and the lower and upper ends of the band
    group_index: int  # the index of the seed group whose curve this is
    index_in_group: int  # the curve's index among the curves of its seed group in this chart
    is_dotted: bool = False  # whether each point of the curve is marked with a dot


class ChartDefinition(NamedTuple):
    title: str
    note: str
    keys: dict[str, str]  # the label of each metric; empty if the metrics depend on the run


CHARTS = [
    ChartDefinition(
        "Held-out",
        "how good the answers to held-out problems are; the band is the 95% interval",
        {},
    ),
    ChartDefinition(
        "Loss",
        "in nats per token, with --loss-type sft; lower means that replies are more likely",
        {"loss": "training"},
    ),
    ChartDefinition(
        "Reward",
        "the mean reward of training answers; the band is the standard deviation within groups",
        {"reward/mean": "reward"},
    ),
    ChartDefinition(
        "Length",
        "the mean number of tokens in an answer; a jump may mean that length is rewarded",
        {"completion/mean_tokens": "tokens"},
    ),
    ChartDefinition(
        "Groups without signal",
        "the fraction of prompts whose answers all get the same reward",
        {"reward/zero_std_frac": "no signal"},
    ),
    ChartDefinition("Reward by component", "each component before weighting", {}),
    ChartDefinition("Logged by rewards", "the mean of each value that a reward function logs", {}),
    ChartDefinition("Logged by the loss", "each sum that your own loss returns, per token", {}),
    ChartDefinition(
        "Truncated",
        "the fraction of answers that are cut off at the length limit",
        {"completion/truncated_frac": "truncated"},
    ),
    ChartDefinition(
        "Entropy", "in nats per token; how varied the answers still are", {"entropy": "entropy"}
    ),
    ChartDefinition(
        "KL to the model before training",
        "in nats per token; how far training has moved the model",
        {"kl": "training", "eval/kl": "held-out", "update/kl": "one update"},
    ),
    ChartDefinition(
        RATE,
        "as a fraction of the scheduled rate; below 1, --target-kl shortened the updates",
        {"update/rate": "effective"},
    ),
    ChartDefinition("Divergence from the teacher", "in nats per token", {"distill/kl": "training"}),
    ChartDefinition(
        "Clipped",
        "the fraction of tokens whose probability ratio was clipped",
        {"clip_frac": "clipped"},
    ),
    ChartDefinition("Gradient norm", "before clipping", {"grad_norm": "norm"}),
    ChartDefinition(
        "Sampler and trainer",
        "the mean difference between the log-probabilities that the two give to a sampled token",
        {"mismatch/logprob_abs_mean": "difference"},
    ),
    ChartDefinition(
        "Unreadable",
        "the fraction of the judge's scores that could not be read",
        {"judge/unparsed_frac": "unreadable"},
    ),
    ChartDefinition(
        "Seconds",
        "the duration of each phase of a step, without evaluations",
        {f"{phase}/s": phase for phase in PHASES},
    ),
    ChartDefinition("Memory", "the peak, in GB", {"mem/peak_gb": "peak"}),
]
MAIN = [chart.title for chart in CHARTS[:5]]  # the charts that a beginner can understand


def make_charts(seed_groups: list[SeedGroup]) -> list[dict[str, Any]]:
    """Returns all charts that have at least one value to show, ready for the template."""
    has_seeds = any(len(group.runs) > 1 for group in seed_groups)
    charts = []
    for chart in CHARTS:
        curves = []
        for index, group in enumerate(seed_groups):
            for curve in average_curves_over_seeds(group, index, chart):
                if chart.title in MAIN or curve.rows[3].any():
                    curves.append(curve)
        note = chart.note
        if has_seeds:
            note += "; with several seeds, the line shows the mean, and the band shows the range"
        if curves:
            charts.append(lay_out_chart(seed_groups, chart.title, note, curves))
    return charts


def average_curves_over_seeds(
    seed_group: SeedGroup, group_index: int, chart: ChartDefinition
) -> Iterator[Curve]:
    """
    Yields the curves of a seed group in one chart.

    For several runs, a curve is the mean of the runs' curves at the steps that all runs have, with
    a band from the lowest run to the highest. For one run, the curve is that of the run.
    """
    by_label: dict[str, list[Curve]] = {}
    for run in seed_group.runs:
        for curve in make_run_curves(run, group_index, chart):
            by_label.setdefault(curve.label, []).append(curve)
    for curves in by_label.values():
        if len(curves) == 1:
            yield curves[0]
            continue
        steps = functools.reduce(np.intersect1d, (curve.rows[0] for curve in curves))
        if len(steps):
            values = np.array([curve.rows[1, np.isin(curve.rows[0], steps)] for curve in curves])
            rows = np.stack([steps, values.mean(0), values.min(0), values.max(0)])
            yield curves[0]._replace(rows=rows)


def make_run_curves(run: History, group_index: int, chart: ChartDefinition) -> Iterator[Curve]:
    """Yields a run's curves in one chart, without the curves that have no value."""
    # the value of GRPO's loss says nothing about the progress of training
    if chart.title == "Loss" and run.settings.get("loss_type") != "sft":
        return
    limits = (-math.inf, math.inf)
    # the interval of an accuracy is cut to the range from 0 to 1
    if chart.title == "Held-out" and run.figure_name == "accuracy":
        limits = (0.0, 1.0)
    for index_in_group, (key, label) in enumerate(label_by_metric(run, chart).items()):
        is_evaluation = key.startswith("eval/")
        if is_evaluation:
            band = f"{key}_ci95" if chart.title == "Held-out" else ""
        else:
            band = "reward/std" if key == "reward/mean" else ""
        columns = []
        for record in run.evals if is_evaluation else run.steps:
            if record.get(key) is not None:
                columns.append((record["step"], record[key], record.get(band) or 0.0))
        if chart.title == RATE and all(value == 1 for _, value, _ in columns):
            continue
        if columns:
            rows = add_band_and_thin(np.array(columns, float), limits)
            yield Curve(label, rows, group_index, index_in_group, is_evaluation)


def label_by_metric(run: History, chart: ChartDefinition) -> dict[str, str]:
    """Returns the metrics of a run that a chart shows, each with the label of its curve."""
    if chart.title == "Held-out":
        return {f"eval/{name}": name for name in (run.figure_name, "greedy", "witness")}
    if chart.title == "Loss" and run.figure_name != "loss":
        return chart.keys | {"eval/loss": "held-out"}
    if chart.title not in PREFIXES:
        return chart.keys

    prefix = PREFIXES[chart.title]
    weights = run.settings.get("reward_weights") or {}
    labels = {}
    for key in dict.fromkeys(key for step in run.steps for key in step):
        if key.startswith(prefix) and key not in REWARD_METRICS:
            name = key.removeprefix(prefix)
            label = f"{name}, weight 0" if weights.get(name) == 0 else name
            labels[key] = escape_invisible(label)
    return labels


def add_band_and_thin(
    steps_values_half_widths: np.ndarray, band_limits: tuple[float, float]
) -> np.ndarray:
    """
    Returns the step, the value, and the lower and upper end of the band at each point, (4, n).

    If there are more than MOST_POINTS points, neighbouring points are averaged.

    steps_values_half_widths (n, 3): the step, the value and half the width of the band at each
    point. band_limits: the lowest and highest values that the band may include.
    """
    steps, values, reach = steps_values_half_widths.T
    low = np.clip(values - reach, *band_limits)
    high = np.clip(values + reach, *band_limits)
    rows = np.stack([steps, values, low, high])
    size = math.ceil(len(steps) / MOST_POINTS)
    means = [rows[:, start : start + size].mean(1) for start in range(0, len(steps), size)]
    return np.stack(means, 1)


class ChartScale(NamedTuple):
    """Converts steps and values to coordinates in a chart."""

    last_step: float
    ticks: list[float]

    def x_coordinate(self, step: float) -> str:
        x = LEFT + step / self.last_step * (WIDTH - LEFT - RIGHT)
        return f"{x:.1f}"

    def y_coordinate(self, value: float) -> str:
        lowest = self.ticks[0]
        highest = self.ticks[-1]
        y = TOP + (highest - value) / (highest - lowest) * (HEIGHT - TOP - BOTTOM)
        return f"{y:.1f}"

    def coordinate_pairs(self, steps: np.ndarray, values: np.ndarray) -> list[str]:
        """Returns the coordinates of each point of a curve, in the form "x,y"."""
        return [
            f"{self.x_coordinate(step)},{self.y_coordinate(value)}"
            for step, value in zip(steps, values, strict=True)
        ]


def lay_out_chart(
    seed_groups: list[SeedGroup], title: str, note: str, curves: list[Curve]
) -> dict[str, Any]:
    """Returns the coordinates and texts with which the template draws a chart."""
    last_step = max(curve.rows[0, -1] for curve in curves) or 1.0
    lowest = min(curve.rows[2].min() for curve in curves)
    highest = max(curve.rows[3].max() for curve in curves)
    ticks = choose_round_axis_ticks(lowest, highest)
    scale = ChartScale(last_step, ticks)

    marks = []
    for warning in seed_groups[0].runs[0].warnings:
        if warning["step"] <= last_step:
            marks.append(warning | {"x": scale.x_coordinate(warning["step"])})
    x_ticks = [step for step in choose_round_axis_ticks(0.0, last_step) if step <= last_step]
    return {
        "title": title,
        "note": note,
        "series": [lay_out_curve(curve, seed_groups, scale) for curve in curves],
        "marks": marks,
        "x_ticks": [(scale.x_coordinate(step), f"{step:g}") for step in x_ticks],
        "y_ticks": [(scale.y_coordinate(tick), f"{tick:g}") for tick in ticks],
        "most": last_step,
    }


def lay_out_curve(curve: Curve, seed_groups: list[SeedGroup], scale: ChartScale) -> dict[str, Any]:
    """Returns the coordinates of a curve's lines, band and dots, with its label and colour."""
    steps, values, low, high = curve.rows
    # the smooth line is the moving mean over a tenth of the curve's points
    reach = len(steps) // 20
    means = []
    for index in range(len(steps)):
        window = values[max(0, index - reach) : index + reach + 1]
        means.append(window.mean())
    smoothed = np.array(means)
    raw_points = scale.coordinate_pairs(steps, values)
    area = ""
    if (high > low).any():
        upper_edge = scale.coordinate_pairs(steps, high)
        lower_edge = scale.coordinate_pairs(steps, low)
        area = " ".join(upper_edge + lower_edge[::-1])
    dots = []
    if curve.is_dotted:
        dots = [tuple(point.split(",")) for point in raw_points]

    # each curve has its own colour; with several seed groups, each group has its own colour
    is_alone = len(seed_groups) == 1
    label = curve.label
    if not is_alone:
        label = f"{escape_invisible(seed_groups[curve.group_index].name)}: {label}"
    return {
        "label": label,
        "colour": (curve.index_in_group if is_alone else curve.group_index) % NUM_COLOURS,
        "dash": 0 if is_alone else curve.index_in_group % NUM_DASHES,
        "raw": " ".join(raw_points),
        "smooth": " ".join(scale.coordinate_pairs(steps, smoothed)),
        "area": area,
        "dots": dots,
        "x": steps.tolist(),
        "y": [float(f"{value:.4g}") for value in values],
    }


def choose_round_axis_ticks(low: float, high: float) -> list[float]:
    """Returns three to six evenly spaced round numbers from at most `low` to at least `high`."""
    # a smaller span is due to rounding, and would result in a single tick
    least_span = max(abs(low), abs(high)) / 1000
    span = max(high - low, least_span) or 1.0
    size = 10.0 ** math.floor(math.log10(span / 3))
    distances = [size * factor for factor in (1, 2, 2.5, 5, 10)]
    distance = next(candidate for candidate in distances if span / candidate <= 4)
    first = math.floor(low / distance + 1e-9)
    last = math.ceil(high / distance - 1e-9)
    indices = range(first, max(last, first + 1) + 1)
    return [float(f"{index * distance:.6g}") for index in indices]
