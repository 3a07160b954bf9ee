"""
A run's curves as charts: every point, band and label placed, for templates/report.html.j2 to draw as SVG.

Coordinates are those of a chart, WIDTH by HEIGHT, and the page scales them.
"""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from flags import visible
from reporting.health import Records
from reporting.history import History, figure_of, is_sft, seconds_at
from reporting.seeds import Setting

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 360, 170, 52, 8, 8, 20
MOST_POINTS = 400  # of a curve; of a longer one each point is the mean of some steps
AXES = ("steps", "seconds")
PHASES = ("rollout", "reward", "judge", "ref", "teacher", "update", "other")


class Curve(NamedTuple):
    """Values over steps and over seconds, in a band; of a stacked area the values are its upper edge."""

    label: str
    at: dict[str, list[float]]  # by axis
    values: list[float]
    under: list[float]
    over: list[float]
    has_area: bool
    setting: int
    place: int  # among the curves of its setting
    points: bool = False  # few values, each of them marked


CHARTS: list[tuple[str, str, dict[str, str]]] = [  # title, what it says, curves: key -> label
    ("Held-out", "how good answers to problems are that it never trains on; the band is the 95% interval", {}),
    ("Loss", "of --loss-type sft, nats a token: the lower, the likelier the replies", {"loss": "training"}),
    ("Reward", "what training answers earn; the band is the mean deviation within groups", {"reward/mean": "reward"}),
    ("Length", "tokens of an answer; a jump tells that length pays", {"completion/mean_tokens": "tokens"}),
    (
        "Groups without signal",
        "share of prompts whose answers all earn the same, which teaches nothing",
        {"reward/zero_std_frac": "no signal"},
    ),
    ("Reward by component", "each before weighting", {}),
    ("Logged by rewards", "mean of what they give to log_metric", {}),
    ("Truncated", "share of answers cut off at the longest length", {"completion/truncated_frac": "truncated"}),
    ("Entropy", "nats a token: how much it still tries", {"entropy": "entropy"}),
    (
        "KL to the model before training",
        "nats a token: how far it has moved",
        {"kl": "training", "eval/kl": "held-out", "update/kl": "one update"},
    ),
    ("Divergence from the teacher", "nats a token", {"distill/kl": "training"}),
    ("Clipped", "share of tokens whose ratio was cut", {"clip_frac": "clipped"}),
    ("Gradient norm", "before it is scaled down", {"grad_norm": "norm"}),
    ("Sampler and trainer", "mean difference of log-probabilities", {"mismatch/logprob_abs_mean": "difference"}),
    ("Unreadable", "share of the judge's scores", {"judge/unparsed_frac": "unreadable"}),
    ("Memory", "peak, GB", {"mem/peak_gb": "peak"}),
]
MAIN = [title for title, *_ in CHARTS[:5]]  # those that a beginner can read
REWARD_METRICS = ("reward/mean", "reward/std", "reward/zero_std_frac", "reward/none", "reward/s")


def make_charts(settings: list[Setting]) -> list[dict[str, Any]]:
    """Every chart that has a value to show, laid out."""
    charts, has_seeds = [], any(len(runs) > 1 for _, runs in settings)
    for title, note, keys in CHARTS:
        curves = [curve for number in range(len(settings)) for curve in over_seeds(settings, number, title, keys)]
        if title not in MAIN and not any(any(curve.over) for curve in curves):
            continue
        note += "; mean over seeds, from the lowest to the highest" if has_seeds else ""
        charts.append((settings, title, note, curves, False))
    for name, runs in settings:
        title = "Seconds by phase" + (f", {visible(name)}" if len(settings) > 1 else "")
        title += f", seed {runs[0].settings['seed']}" if len(runs) > 1 else ""
        stack = list(stacked_phases(runs[0]))
        charts.append(([Setting(name, runs)], title, "stacked; a step without its evaluation", stack, True))
    return [lay_out(*chart) for chart in charts if chart[3]]


def over_seeds(settings: list[Setting], number: int, title: str, keys: dict[str, str]) -> Iterator[Curve]:
    """A setting's curves in one chart: of several seeds the means, in a band from lowest to highest."""
    by_label: dict[str, list[Curve]] = {}
    for run in settings[number].runs:
        for curve in curves_of(run, number, title, keys):
            by_label.setdefault(curve.label, []).append(curve)
    for curves in by_label.values():
        if len(curves) == 1:
            yield curves[0]
            continue
        places = zip(*(curve.at["steps"] for curve in curves), strict=False)
        end = next((i for i, steps in enumerate(places) if len(set(steps)) > 1), min(len(c.values) for c in curves))
        values = np.array([curve.values[:end] for curve in curves])
        at = {axis: np.mean([curve.at[axis][:end] for curve in curves], axis=0).tolist() for axis in AXES}
        bounds = {"under": values.min(0).tolist(), "over": values.max(0).tolist(), "has_area": True}
        if end:
            yield curves[0]._replace(at=at, values=values.mean(0).tolist(), **bounds)


def curves_of(run: History, number: int, title: str, keys: dict[str, str]) -> Iterator[Curve]:
    """The curves of one run in one chart that have values."""
    bands, most = {"reward/mean": "reward/std"}, math.inf
    if title == "Loss" and not is_sft(run):  # GRPO's says nothing about progress
        return
    if title == "Held-out":
        figure, _ = figure_of(run)
        keys = {f"eval/{name}": name for name in (figure, "greedy", "witness")}
        bands, most = {key: f"{key}_ci95" for key in keys}, 1.0 if figure == "accuracy" else math.inf
    if beginning := {"Reward by component": "reward/", "Logged by rewards": "metric/"}.get(title):
        names = dict.fromkeys(key for step in run.steps for key in step if key.startswith(beginning))
        weights = run.settings.get("reward_weights") or {}
        keys = {key: key.removeprefix(beginning) for key in names if key not in REWARD_METRICS}
        keys = {key: visible(f"{name}, weight 0" if weights.get(name) == 0 else name) for key, name in keys.items()}
    for place, (key, label) in enumerate(keys.items()):
        is_evaluation = key.startswith("eval/")
        records = [one for one in (run.evals if is_evaluation else run.steps) if one.get(key) is not None]
        if records:
            values = [float(record[key]) for record in records]
            reach = [float(record.get(bands.get(key, "")) or 0.0) for record in records]
            least = 0.0 if most == 1.0 else -math.inf  # the interval of a share is within 0 and 1
            under = [max(v - r, least) for v, r in zip(values, reach, strict=True)]
            over = [min(v + r, most) for v, r in zip(values, reach, strict=True)]
            at, (values, under, over) = thinned(run, records, values, under, over)
            yield Curve(label, at, values, under, over, key in bands, number, place, is_evaluation)


def stacked_phases(run: History) -> Iterator[Curve]:
    """The phases' areas, the lowest first."""
    below = np.zeros(len(run.steps))
    for place, phase in enumerate(PHASES):
        seconds = np.array([step.get(f"{phase}/s") or 0.0 for step in run.steps])
        if seconds.any():
            above = below + seconds
            at, (over, under) = thinned(run, run.steps, above.tolist(), below.tolist())
            yield Curve(phase, at, over, under, over, True, 0, place)
            below = above


def thinned(run: History, records: Records, *columns: list[float]) -> tuple[dict[str, list[float]], list[list[float]]]:
    """Where records stand on either axis, and columns of them; of more than MOST_POINTS the means of some in a row."""
    clock, size = seconds_at(run), -(-len(records) // MOST_POINTS)
    steps, seconds = [record["step"] for record in records], [clock.get(record["step"], 0.0) for record in records]
    binned = [
        [float(np.mean(column[begin : begin + size])) for begin in range(0, len(column), size)]
        for column in (steps, seconds, *columns)
    ]
    return dict(zip(AXES, binned, strict=False)), binned[2:]


def smoothed(values: list[float]) -> list[float]:
    """The centred mean over a tenth of the curve."""
    reach = len(values) // 20
    return [float(np.mean(values[max(0, i - reach) : i + reach + 1])) for i in range(len(values))]


def lay_out(settings: list[Setting], title: str, note: str, curves: list[Curve], stacked: bool) -> dict[str, Any]:
    """A chart as the template draws it."""
    most = {axis: max(curve.at[axis][-1] for curve in curves) or 1.0 for axis in AXES}
    lowest = 0.0 if stacked else min(min(curve.under) for curve in curves)
    ticks = nice_ticks(lowest, max(max(curve.over) for curve in curves))

    def x_of(x: float, axis: str) -> str:
        return f"{LEFT + x / most[axis] * (WIDTH - LEFT - RIGHT):.1f}"

    def y_of(y: float) -> str:
        return f"{TOP + (ticks[-1] - y) / (ticks[-1] - ticks[0]) * (HEIGHT - TOP - BOTTOM):.1f}"

    def view(curve: Curve, axis: str) -> dict[str, Any]:
        """One curve over one axis: its line, raw and smoothed, its band or its area, its dots."""

        def points(ys: list[float]) -> list[str]:
            return [f"{x_of(x, axis)},{y_of(y)}" for x, y in zip(curve.at[axis], ys, strict=True)]

        raw, area = points(curve.values), [*points(curve.over), *points(curve.under)[::-1]]
        return {
            "raw": " ".join(raw),
            "smooth": " ".join(points(smoothed(curve.values))),
            "area": " ".join(area) if curve.has_area else "",
            "dots": [tuple(point.split(",")) for point in raw] if curve.points else [],
        }

    alone, runs = len(settings) == 1, settings[0].runs
    series = []
    for curve in curves:
        heights = [over - under for over, under in zip(curve.over, curve.under, strict=True)]
        series.append(
            {
                "label": curve.label if alone else f"{visible(settings[curve.setting].name)}: {curve.label}",
                "colour": (curve.place if alone else curve.setting) % 8,
                "dash": 0 if alone else curve.place % 4,
                "views": {axis: view(curve, axis) for axis in AXES},
                # what the pointer reads: of an area how high it is
                "x": curve.at["steps"],
                "s": [round(x, 1) for x in curve.at["seconds"]],
                "y": [float(f"{value:.4g}") for value in (heights if stacked else curve.values)],
                "points": curve.points,
            }
        )
    clock = seconds_at(runs[0])
    return {
        "title": title,
        "note": note,
        "stacked": stacked,
        "series": series,
        "marks": [
            {
                "name": visible(str(mark["name"])),
                "step": mark["step"],
                "steps": x_of(mark["step"], "steps"),
                "seconds": x_of(clock.get(mark["step"], 0.0), "seconds"),
            }
            for mark in runs[0].warnings
            if mark["step"] <= most["steps"]
        ],
        "x_ticks": {
            axis: [(x_of(x, axis), f"{x:g}") for x in nice_ticks(0.0, most[axis]) if x <= most[axis]] for axis in AXES
        },
        "y_ticks": [(y_of(tick), f"{tick:g}") for tick in ticks],
        "most": most,
    }


def nice_ticks(low: float, high: float) -> list[float]:
    """Three to six round numbers that enclose both."""
    span = (high - low) or abs(high) or 1.0
    size = 10.0 ** math.floor(math.log10(span / 3))
    step = next(size * factor for factor in (1, 2, 2.5, 5, 10) if span / (size * factor) <= 4)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [float(f"{index * step:.6g}") for index in range(first, max(last, first + 1) + 1)]
