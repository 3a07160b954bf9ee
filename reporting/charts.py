"""
A run's curves as charts: every point, band and label placed, for templates/report.html.j2 to draw as SVG.

Coordinates are those of a chart, WIDTH by HEIGHT, and the page scales them.
"""

import functools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from flags import escape_invisible
from reporting.history import History
from reporting.seeds import SeedGroup

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 360, 170, 52, 8, 8, 20
MOST_POINTS = 400  # of a curve; of a longer one each point is the mean of some steps
PHASES = ("rollout", "reward", "judge", "ref", "teacher", "update", "other")


class Curve(NamedTuple):
    """Values over steps, in a band."""

    label: str
    rows: np.ndarray  # (4, n): steps, values, lower and upper ends of the band
    setting: int
    place: int  # among the curves of its setting
    points: bool = False  # few values, each of them marked


CHARTS: list[tuple[str, str, dict[str, str]]] = [  # title, what it says, curves: key -> label
    (
        "Held-out",
        "how good answers to problems are that it never trains on; the band is the 95% interval",
        {},
    ),
    (
        "Loss",
        "of --loss-type sft, nats a token: the lower, the likelier the replies",
        {"loss": "training"},
    ),
    (
        "Reward",
        "what training answers earn; the band is the mean deviation within groups",
        {"reward/mean": "reward"},
    ),
    (
        "Length",
        "tokens of an answer; a jump tells that length pays",
        {"completion/mean_tokens": "tokens"},
    ),
    (
        "Groups without signal",
        "share of prompts whose answers all earn alike",
        {"reward/zero_std_frac": "no signal"},
    ),
    ("Reward by component", "each before weighting", {}),
    ("Logged by rewards", "mean of what they give to log_metric", {}),
    (
        "Truncated",
        "share of answers cut off at the longest length",
        {"completion/truncated_frac": "truncated"},
    ),
    ("Entropy", "nats a token: how much it still tries", {"entropy": "entropy"}),
    (
        "KL to the model before training",
        "nats a token: how far it has moved",
        {"kl": "training", "eval/kl": "held-out", "update/kl": "one update"},
    ),
    ("Divergence from the teacher", "nats a token", {"distill/kl": "training"}),
    ("Clipped", "share of tokens whose ratio was cut", {"clip_frac": "clipped"}),
    ("Gradient norm", "before it is scaled down", {"grad_norm": "norm"}),
    (
        "Sampler and trainer",
        "mean difference of log-probabilities",
        {"mismatch/logprob_abs_mean": "difference"},
    ),
    ("Unreadable", "share of the judge's scores", {"judge/unparsed_frac": "unreadable"}),
    (
        "Seconds",
        "of a step by phase, without its evaluation",
        {f"{phase}/s": phase for phase in PHASES},
    ),
    ("Memory", "peak, GB", {"mem/peak_gb": "peak"}),
]
MAIN = [title for title, *_ in CHARTS[:5]]  # those that a beginner can read
REWARD_METRICS = ("reward/mean", "reward/std", "reward/zero_std_frac", "reward/none", "reward/s")


def make_charts(settings: list[SeedGroup]) -> list[dict[str, Any]]:
    """Every chart that has a value to show, laid out."""
    charts, has_seeds = [], any(len(runs) > 1 for _, runs in settings)
    for title, note, keys in CHARTS:
        found = [
            curve
            for number, one in enumerate(settings)
            for curve in make_seed_curves(one, number, title, keys)
        ]
        curves = [curve for curve in found if title in MAIN or curve.rows[3].any()]
        note += "; mean over seeds, from the lowest to the highest" if has_seeds else ""
        charts += [lay_out(settings, title, note, curves)] if curves else []
    return charts


def make_seed_curves(
    setting: SeedGroup, number: int, title: str, keys: dict[str, str]
) -> Iterator[Curve]:
    """A setting's curves in one chart: of several seeds the means where all have a step, from lowest to highest."""
    by_label: dict[str, list[Curve]] = {}
    for run in setting.runs:
        for curve in make_run_curves(run, number, title, keys):
            by_label.setdefault(curve.label, []).append(curve)
    for curves in by_label.values():
        steps = functools.reduce(np.intersect1d, (curve.rows[0] for curve in curves))
        values = np.array([curve.rows[1, np.isin(curve.rows[0], steps)] for curve in curves])
        if len(curves) == 1:
            yield curves[0]
        elif len(steps):
            yield curves[0]._replace(
                rows=np.stack([steps, values.mean(0), values.min(0), values.max(0)])
            )


def make_run_curves(run: History, number: int, title: str, keys: dict[str, str]) -> Iterator[Curve]:
    """The curves of one run in one chart that have values."""
    bands, ends = {"reward/mean": "reward/std"}, (-math.inf, math.inf)
    if (
        title == "Loss" and run.settings.get("loss_type") != "sft"
    ):  # GRPO's says nothing about progress
        return
    if title == "Held-out":
        keys = {f"eval/{name}": name for name in (run.figure, "greedy", "witness")}
        bands = {key: f"{key}_ci95" for key in keys}
        ends = (
            (0.0, 1.0) if run.figure == "accuracy" else ends
        )  # the interval of a share is within 0 and 1
    if beginning := {"Reward by component": "reward/", "Logged by rewards": "metric/"}.get(title):
        names = dict.fromkeys(
            key for step in run.steps for key in step if key.startswith(beginning)
        )
        weights = run.settings.get("reward_weights") or {}
        keys = {key: key.removeprefix(beginning) for key in names if key not in REWARD_METRICS}
        keys = {
            key: escape_invisible(f"{name}, weight 0" if weights.get(name) == 0 else name)
            for key, name in keys.items()
        }
    for place, (key, label) in enumerate(keys.items()):
        is_evaluation = key.startswith("eval/")
        records = [
            one for one in (run.evals if is_evaluation else run.steps) if one.get(key) is not None
        ]
        if records:
            columns = [
                (one["step"], one[key], one.get(bands.get(key, "")) or 0.0) for one in records
            ]
            steps, values, reach = np.array(columns, float).T
            rows = np.stack(
                [steps, values, np.clip(values - reach, *ends), np.clip(values + reach, *ends)]
            )
            size = -(-len(steps) // MOST_POINTS)
            rows = np.stack(
                [rows[:, begin : begin + size].mean(1) for begin in range(0, len(steps), size)], 1
            )
            yield Curve(label, rows, number, place, is_evaluation)


def lay_out(
    settings: list[SeedGroup], title: str, note: str, curves: list[Curve]
) -> dict[str, Any]:
    """A chart as the template draws it."""
    most = max(curve.rows[0, -1] for curve in curves) or 1.0
    ticks = nice_ticks(
        min(curve.rows[2].min() for curve in curves), max(curve.rows[3].max() for curve in curves)
    )
    alone, series = len(settings) == 1, []

    def x_of(x: float) -> str:
        return f"{LEFT + x / most * (WIDTH - LEFT - RIGHT):.1f}"

    def y_of(y: float) -> str:
        return f"{TOP + (ticks[-1] - y) / (ticks[-1] - ticks[0]) * (HEIGHT - TOP - BOTTOM):.1f}"

    for curve in curves:
        steps, values, under, over = curve.rows
        reach = len(steps) // 20
        smoothed = [
            values[max(0, i - reach) : i + reach + 1].mean() for i in range(len(steps))
        ]  # over a tenth of it
        raw, smooth, low, high = (
            [f"{x_of(x)},{y_of(y)}" for x, y in zip(steps, ys, strict=True)]
            for ys in (values, smoothed, under, over)
        )
        series.append(
            {
                "label": curve.label
                if alone
                else f"{escape_invisible(settings[curve.setting].name)}: {curve.label}",
                "colour": (curve.place if alone else curve.setting) % 8,
                "dash": 0 if alone else curve.place % 4,
                "raw": " ".join(raw),
                "smooth": " ".join(smooth),
                "area": " ".join(high + low[::-1]) if (over > under).any() else "",
                "dots": [tuple(point.split(",")) for point in raw] if curve.points else [],
                "x": steps.tolist(),
                "y": [float(f"{value:.4g}") for value in values],
            }
        )
    marks = [mark for mark in settings[0].runs[0].warnings if mark["step"] <= most]
    return {
        "title": title,
        "note": note,
        "series": series,
        "marks": [mark | {"x": x_of(mark["step"])} for mark in marks],
        "x_ticks": [(x_of(x), f"{x:g}") for x in nice_ticks(0.0, most) if x <= most],
        "y_ticks": [(y_of(tick), f"{tick:g}") for tick in ticks],
        "most": most,
    }


def nice_ticks(low: float, high: float) -> list[float]:
    """Three to six round numbers that enclose both."""
    span = (
        max(high - low, max(abs(low), abs(high)) / 1000) or 1.0
    )  # less is rounding, and would be one tick
    size = 10.0 ** math.floor(math.log10(span / 3))
    step = next(size * factor for factor in (1, 2, 2.5, 5, 10) if span / (size * factor) <= 4)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [float(f"{index * step:.6g}") for index in range(first, max(last, first + 1) + 1)]
