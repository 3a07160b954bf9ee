"""
Turns a run's curves into charts: places every point, band and label, which
templates/report.html.j2 then draws as SVG.

Coordinates lie within a chart of WIDTH by HEIGHT, and the page scales them. This file does not
cover reading a run (history.py) or the rest of the page (page.py).

Axes: n points of a curve.
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
LEFT = 52  # margins around the plot
RIGHT = 8
TOP = 8
BOTTOM = 20
MOST_POINTS = 400  # points of a curve; in a longer curve, each point is the mean of several steps
NUM_COLOURS = 8
NUM_DASHES = 4
PHASES = ("rollout", "reward", "judge", "ref", "teacher", "update", "other")
REWARD_METRICS = ("reward/mean", "reward/std", "reward/zero_std_frac", "reward/none", "reward/s")
# The charts that show every metric with a prefix.
PREFIXES = {"Reward by component": "reward/", "Logged by rewards": "metric/"}


class Curve(NamedTuple):
    """Values over steps, with a band."""

    label: str
    rows: np.ndarray  # (4, n): steps, values, lower and upper ends of the band
    setting: int  # the setting's index
    place: int  # the curve's index among the curves of its setting
    is_dotted: bool = False  # whether the curve has few values, each marked with a dot


class Chart(NamedTuple):
    title: str
    note: str
    keys: dict[str, str]  # label by metric; empty if the metrics depend on the run


CHARTS = [
    Chart(
        "Held-out",
        "quality of answers to problems that are never trained on; the band is the 95% interval",
        {},
    ),
    Chart(
        "Loss",
        "of --loss-type sft, nats a token; a lower loss means likelier replies",
        {"loss": "training"},
    ),
    Chart(
        "Reward",
        "the mean reward of training answers; the band is the mean deviation within groups",
        {"reward/mean": "reward"},
    ),
    Chart(
        "Length",
        "tokens of an answer; a jump means that length is rewarded",
        {"completion/mean_tokens": "tokens"},
    ),
    Chart(
        "Groups without signal",
        "fraction of prompts whose answers all have the same reward",
        {"reward/zero_std_frac": "no signal"},
    ),
    Chart("Reward by component", "each component before weighting", {}),
    Chart("Logged by rewards", "mean of the values that rewards pass to log_metric", {}),
    Chart(
        "Truncated",
        "fraction of answers cut off at the longest length",
        {"completion/truncated_frac": "truncated"},
    ),
    Chart("Entropy", "nats a token; how much the model still tries", {"entropy": "entropy"}),
    Chart(
        "KL to the model before training",
        "nats a token; how far the model has moved",
        {"kl": "training", "eval/kl": "held-out", "update/kl": "one update"},
    ),
    Chart("Divergence from the teacher", "nats a token", {"distill/kl": "training"}),
    Chart("Clipped", "fraction of tokens whose ratio was clipped", {"clip_frac": "clipped"}),
    Chart("Gradient norm", "before clipping", {"grad_norm": "norm"}),
    Chart(
        "Sampler and trainer",
        "mean difference of log-probabilities",
        {"mismatch/logprob_abs_mean": "difference"},
    ),
    Chart("Unreadable", "fraction of the judge's scores", {"judge/unparsed_frac": "unreadable"}),
    Chart(
        "Seconds",
        "of a step by phase, without its evaluation",
        {f"{phase}/s": phase for phase in PHASES},
    ),
    Chart("Memory", "peak, GB", {"mem/peak_gb": "peak"}),
]
MAIN = [chart.title for chart in CHARTS[:5]]  # charts that a beginner can read


def make_charts(settings: list[SeedGroup]) -> list[dict[str, Any]]:
    """Returns every chart that has a value to show."""
    has_seeds = any(len(setting.runs) > 1 for setting in settings)
    charts = []
    for chart in CHARTS:
        curves = []
        for number, setting in enumerate(settings):
            for curve in make_seed_curves(setting, number, chart):
                if chart.title in MAIN or curve.rows[3].any():
                    curves.append(curve)
        note = chart.note
        if has_seeds:
            note += "; mean over seeds, from the lowest to the highest"
        if curves:
            charts.append(lay_out(settings, chart.title, note, curves))
    return charts


def make_seed_curves(setting: SeedGroup, number: int, chart: Chart) -> Iterator[Curve]:
    """
    Yields a setting's curves in one chart.

    With several seeds, a curve is their mean at the steps that all of them have. Its band reaches
    from the lowest seed to the highest.
    """
    by_label: dict[str, list[Curve]] = {}
    for run in setting.runs:
        for curve in make_run_curves(run, number, chart):
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


def make_run_curves(run: History, number: int, chart: Chart) -> Iterator[Curve]:
    """Yields a run's curves in one chart, if they have values. number: the setting's index."""
    # GRPO's loss says nothing about progress
    if chart.title == "Loss" and run.settings.get("loss_type") != "sft":
        return
    limits = (-math.inf, math.inf)
    # an accuracy's interval lies between 0 and 1
    if chart.title == "Held-out" and run.figure == "accuracy":
        limits = (0.0, 1.0)
    for place, (key, label) in enumerate(chart_labels(run, chart).items()):
        is_evaluation = key.startswith("eval/")
        if is_evaluation:
            band = f"{key}_ci95" if chart.title == "Held-out" else ""
        else:
            band = "reward/std" if key == "reward/mean" else ""
        columns = []
        for record in run.evals if is_evaluation else run.steps:
            if record.get(key) is not None:
                columns.append((record["step"], record[key], record.get(band) or 0.0))
        if columns:
            rows = make_band(np.array(columns, float), limits)
            yield Curve(label, rows, number, place, is_evaluation)


def chart_labels(run: History, chart: Chart) -> dict[str, str]:
    """Returns the labels of a run's metrics in a chart, by metric."""
    if chart.title == "Held-out":
        return {f"eval/{name}": name for name in (run.figure, "greedy", "witness")}
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


def make_band(columns: np.ndarray, limits: tuple[float, float]) -> np.ndarray:
    """
    Returns the rows of a curve, thinned to MOST_POINTS.

    columns (n, 3): steps, values, half widths of the band. limits: the lowest and the
    highest value that the band may have.
    """
    steps, values, reach = columns.T
    low = np.clip(values - reach, *limits)
    high = np.clip(values + reach, *limits)
    rows = np.stack([steps, values, low, high])
    size = math.ceil(len(steps) / MOST_POINTS)
    means = [rows[:, start : start + size].mean(1) for start in range(0, len(steps), size)]
    return np.stack(means, 1)


class Scale(NamedTuple):
    """Turns steps and values into coordinates of the chart."""

    last_step: float
    ticks: list[float]

    def x(self, step: float) -> str:
        x = LEFT + step / self.last_step * (WIDTH - LEFT - RIGHT)
        return f"{x:.1f}"

    def y(self, value: float) -> str:
        lowest = self.ticks[0]
        highest = self.ticks[-1]
        y = TOP + (highest - value) / (highest - lowest) * (HEIGHT - TOP - BOTTOM)
        return f"{y:.1f}"

    def points(self, steps: np.ndarray, values: np.ndarray) -> list[str]:
        return [
            f"{self.x(step)},{self.y(value)}" for step, value in zip(steps, values, strict=True)
        ]


def lay_out(
    settings: list[SeedGroup], title: str, note: str, curves: list[Curve]
) -> dict[str, Any]:
    """Returns a chart in the form that the template draws."""
    last_step = max(curve.rows[0, -1] for curve in curves) or 1.0
    lowest = min(curve.rows[2].min() for curve in curves)
    highest = max(curve.rows[3].max() for curve in curves)
    ticks = nice_ticks(lowest, highest)
    scale = Scale(last_step, ticks)

    marks = []
    for warning in settings[0].runs[0].warnings:
        if warning["step"] <= last_step:
            marks.append(warning | {"x": scale.x(warning["step"])})
    x_ticks = [step for step in nice_ticks(0.0, last_step) if step <= last_step]
    return {
        "title": title,
        "note": note,
        "series": [curve_coordinates(curve, settings, scale) for curve in curves],
        "marks": marks,
        "x_ticks": [(scale.x(step), f"{step:g}") for step in x_ticks],
        "y_ticks": [(scale.y(tick), f"{tick:g}") for tick in ticks],
        "most": last_step,
    }


def curve_coordinates(curve: Curve, settings: list[SeedGroup], scale: Scale) -> dict[str, Any]:
    """Returns the coordinates of a curve's lines, band and dots, and its label and colour."""
    steps, values, low, high = curve.rows
    # the smooth line is a moving mean over a tenth of the curve
    reach = len(steps) // 20
    means = []
    for index in range(len(steps)):
        window = values[max(0, index - reach) : index + reach + 1]
        means.append(window.mean())
    smoothed = np.array(means)
    raw_points = scale.points(steps, values)
    area = ""
    if (high > low).any():
        upper_edge = scale.points(steps, high)
        lower_edge = scale.points(steps, low)
        area = " ".join(upper_edge + lower_edge[::-1])
    dots = []
    if curve.is_dotted:
        dots = [tuple(point.split(",")) for point in raw_points]

    # a colour stands for a curve, or for a setting if there are several settings
    is_alone = len(settings) == 1
    label = curve.label
    if not is_alone:
        label = f"{escape_invisible(settings[curve.setting].name)}: {label}"
    return {
        "label": label,
        "colour": (curve.place if is_alone else curve.setting) % NUM_COLOURS,
        "dash": 0 if is_alone else curve.place % NUM_DASHES,
        "raw": " ".join(raw_points),
        "smooth": " ".join(scale.points(steps, smoothed)),
        "area": area,
        "dots": dots,
        "x": steps.tolist(),
        "y": [float(f"{value:.4g}") for value in values],
    }


def nice_ticks(low: float, high: float) -> list[float]:
    """Returns three to six round numbers that enclose `low` and `high`."""
    # a smaller span is only rounding, and would give a single tick
    least_span = max(abs(low), abs(high)) / 1000
    span = max(high - low, least_span) or 1.0
    size = 10.0 ** math.floor(math.log10(span / 3))
    distances = [size * factor for factor in (1, 2, 2.5, 5, 10)]
    distance = next(candidate for candidate in distances if span / candidate <= 4)
    first = math.floor(low / distance + 1e-9)
    last = math.ceil(high / distance - 1e-9)
    indices = range(first, max(last, first + 1) + 1)
    return [float(f"{index * distance:.6g}") for index in indices]
