"""
A run's curves as charts: every point, band and label placed, for the template to draw as SVG.

Coordinates are those of a chart, WIDTH by HEIGHT, and the page scales them. What is left out: reading a run, which is
in history.py, and the SVG itself, in templates/report.html.j2.
"""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from flags import visible
from reporting.health import Records
from reporting.history import History, figure_of, is_sft, seconds_at

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 360, 170, 52, 8, 8, 20
MOST_POINTS = 400  # of a curve; of a longer one each point is the mean of some steps
AXES = ("steps", "seconds")
PHASES = ("rollout", "reward", "judge", "ref", "teacher", "update", "other")


class Series(NamedTuple):
    """One curve: where it has values, and how far its band reaches on either side of them."""

    label: str
    steps: list[float]
    seconds: list[float]
    values: list[float]
    reach: list[float] | None = None
    run: int = 0
    place: int = 0  # among the curves of its run
    points: bool = False  # few values, each of them marked

    @property
    def over(self) -> list[float]:
        return [v + r for v, r in zip(self.values, self.reach or [0.0] * len(self.values), strict=True)]

    @property
    def under(self) -> list[float]:
        return [v - r for v, r in zip(self.values, self.reach or [0.0] * len(self.values), strict=True)]


CHARTS: list[tuple[str, str, dict[str, str]]] = [  # title, what it says, curves: key -> label
    ("Reward", "mean of the step; the band is the mean deviation within groups", {"reward/mean": "reward"}),
    ("Reward by component", "before weighting", {}),
    ("Loss", "of --loss-type sft, nats a token", {"loss": "training"}),
    ("Held-out", "with 95% intervals", {}),
    ("Length", "tokens of a completion", {"completion/mean_tokens": "tokens"}),
    ("Truncated", "share cut off at the longest length", {"completion/truncated_frac": "truncated"}),
    ("Groups without signal", "share whose rewards are all alike", {"reward/zero_std_frac": "no signal"}),
    ("Entropy", "nats a token", {"entropy": "entropy"}),
    ("KL of an update", "nats a token", {"update/kl": "update"}),
    ("KL to the model before training", "nats a token", {"kl": "training", "eval/kl": "held-out"}),
    ("Divergence from the teacher", "nats a token", {"distill/kl": "training"}),
    ("Clipped", "share of tokens", {"clip_frac": "clipped"}),
    ("Gradient norm", "before it is scaled down", {"grad_norm": "norm"}),
    ("Sampler and trainer", "mean difference of log-probabilities", {"mismatch/logprob_abs_mean": "difference"}),
    ("Unreadable", "share of the judge's scores", {"judge/unparsed_frac": "unreadable"}),
    ("Memory", "peak, GB", {"mem/peak_gb": "peak"}),
]
REWARD_METRICS = ("reward/mean", "reward/std", "reward/zero_std_frac", "reward/none", "reward/s")


def make_charts(runs: list[History]) -> list[dict[str, Any]]:
    """Every chart that has a value to show, laid out."""
    charts = []
    for title, note, keys in CHARTS:
        curves = [curve for number, run in enumerate(runs) for curve in curves_of(run, number, title, keys)]
        charts.append(lay_out(runs, title, note, curves))
    for number, run in enumerate(runs):
        stacked = list(stacked_phases(run))
        title = "Seconds by phase" + (f", {visible(run.name)}" if len(runs) > 1 else "")
        charts.append(lay_out(runs, title, "stacked; a step without its evaluation", stacked, own=number))
    return [chart for chart in charts if chart["series"]]


def curves_of(run: History, number: int, title: str, keys: dict[str, str]) -> Iterator[Series]:
    """The curves of one run in one chart that have values."""
    if title == "Loss" and not is_sft(run):  # GRPO's says nothing about progress
        return
    if title == "Held-out":
        figure, _ = figure_of(run)
        for place, name in enumerate((figure, "greedy", "witness")):
            key = f"eval/{name}"
            yield from curve(run, run.evals, key, name, f"{key}_ci95", run_number=number, place=place)
        return
    if title == "Reward by component":
        names = [key for key in (run.steps[0] if run.steps else {}) if key.startswith("reward/")]
        keys = {key: visible(key.removeprefix("reward/")) for key in names if key not in REWARD_METRICS}
    for place, (key, label) in enumerate(keys.items()):
        band = "reward/std" if key == "reward/mean" else ""
        held = run.evals if key.startswith("eval/") else run.steps
        yield from curve(run, held, key, label, band, run_number=number, place=place)


def curve(
    run: History, held: Records, key: str, label: str, band: str, *, run_number: int, place: int = 0
) -> Iterator[Series]:
    """The curve of one key, none where it has no value."""
    measured = [record for record in held if record.get(key) is not None]
    if not measured:
        return
    clock = seconds_at(run)
    steps = [float(record["step"]) for record in measured]
    seconds = [clock.get(record["step"], 0.0) for record in measured]
    values = [float(record[key]) for record in measured]
    reach = [float(record.get(band) or 0.0) for record in measured] if band else None
    thin = -(-len(values) // MOST_POINTS)
    steps, seconds, values = (binned(column, thin) for column in (steps, seconds, values))
    reach = None if reach is None else binned(reach, thin)
    yield Series(label, steps, seconds, values, reach, run_number, place, held is run.evals)


def stacked_phases(run: History) -> Iterator[Series]:
    """The tops of the phases' areas, the lowest first; `reach` is how high each area is."""
    total = np.zeros(len(run.steps))
    clock = seconds_at(run)
    for place, phase in enumerate(PHASES):
        seconds = np.array([step.get(f"{phase}/s") or 0.0 for step in run.steps])
        if not seconds.any():
            continue
        total = total + seconds
        steps, ends = [float(step["step"]) for step in run.steps], [clock[step["step"]] for step in run.steps]
        thin = -(-len(total) // MOST_POINTS)
        steps, ends, tops, heights = (binned(c, thin) for c in (steps, ends, total.tolist(), seconds.tolist()))
        yield Series(phase, steps, ends, tops, heights, 0, place)


def binned(values: list[float], size: int) -> list[float]:
    """Means of so many values in a row."""
    return [float(np.mean(values[begin : begin + size])) for begin in range(0, len(values), size)]


def smoothed(values: list[float]) -> list[float]:
    """The centred mean over a tenth of the curve."""
    reach = len(values) // 20
    return [float(np.mean(values[max(0, i - reach) : i + reach + 1])) for i in range(len(values))]


class Frame(NamedTuple):
    """What a chart spans: values between its outer ticks, and steps or seconds from 0 to the most."""

    ticks: list[float]
    most: dict[str, float]  # by axis

    def x_of(self, x: float, axis: str) -> float:
        return LEFT + x / self.most[axis] * (WIDTH - LEFT - RIGHT)

    def y_of(self, y: float) -> float:
        low, high = self.ticks[0], self.ticks[-1]
        return TOP + (high - y) / (high - low) * (HEIGHT - TOP - BOTTOM)

    def line(self, xs: list[float], ys: list[float], axis: str) -> str:
        """The points of a polyline or polygon."""
        return " ".join(f"{self.x_of(x, axis):.1f},{self.y_of(y):.1f}" for x, y in zip(xs, ys, strict=True))

    def x_ticks(self, axis: str) -> list[tuple[str, str]]:
        """Where numbers stand on an axis, and which."""
        most = self.most[axis]
        return [(f"{self.x_of(x, axis):.1f}", f"{x:g}") for x in nice_ticks(0.0, most) if x <= most]


def frame_of(curves: list[Series], stacked: bool) -> Frame:
    """The frame that encloses all curves with their bands; areas that are stacked stand on 0."""
    most = {"steps": max(s.steps[-1] for s in curves) or 1.0, "seconds": max(s.seconds[-1] for s in curves) or 1.0}
    if stacked:
        return Frame(nice_ticks(0.0, max(max(s.values) for s in curves)), most)
    edges = [edge for s in curves for edge in (*s.under, *s.over)]
    return Frame(nice_ticks(min(edges), max(edges)), most)


def lay_out(runs: list[History], title: str, note: str, curves: list[Series], own: int | None = None) -> dict[str, Any]:
    """A chart as the template draws it. own: the run whose phases are stacked."""
    if not curves:
        return {"series": []}
    stacked = own is not None
    frame = frame_of(curves, stacked)
    alone = len(runs) == 1 or stacked
    drawn = []
    for s in curves:
        drawn.append(
            {
                "label": s.label if alone else f"{visible(runs[s.run].name)}: {s.label}",
                "colour": s.place % 8 if alone else s.run % 8,
                "dash": 0 if alone else s.place % 4,
                "views": {axis: view_of(s, frame, axis, stacked) for axis in AXES},
                "shown": shown_of(s, stacked),
                "points": s.points,
            }
        )
    return {
        "title": title,
        "note": note,
        "stacked": stacked,
        "series": drawn,
        "marks": marks_of(runs[own or 0], frame),
        "x_ticks": {axis: frame.x_ticks(axis) for axis in AXES},
        "y_ticks": [(f"{frame.y_of(tick):.1f}", f"{tick:g}") for tick in frame.ticks],
        "most": frame.most,
    }


def view_of(s: Series, frame: Frame, axis: str, stacked: bool) -> dict[str, Any]:
    """One curve over one axis: its line, raw and smoothed, its band or its area, its dots."""
    xs = s.steps if axis == "steps" else s.seconds
    area = ""
    if s.reach is not None:
        over = s.values if stacked else s.over
        area = frame.line(xs, over, axis) + " " + frame.line(xs[::-1], s.under[::-1], axis)
    return {
        "raw": frame.line(xs, s.values, axis),
        "smooth": frame.line(xs, smoothed(s.values), axis),
        "area": area,
        "dots": [tuple(point.split(",")) for point in frame.line(xs, s.values, axis).split(" ")] if s.points else [],
    }


def shown_of(s: Series, stacked: bool) -> dict[str, list[float]]:
    """What the pointer reads: steps, seconds, and values, of an area how high it is."""
    values = s.reach or [] if stacked else s.values
    return {"x": s.steps, "s": [round(x, 1) for x in s.seconds], "y": [float(f"{v:.4g}") for v in values]}


def marks_of(run: History, frame: Frame) -> list[dict[str, Any]]:
    """Where the run's warnings stand."""
    clock = seconds_at(run)
    return [
        {
            "name": visible(str(warning["name"])),
            "step": warning["step"],
            "steps": f"{frame.x_of(warning['step'], 'steps'):.1f}",
            "seconds": f"{frame.x_of(clock.get(warning['step'], 0.0), 'seconds'):.1f}",
        }
        for warning in run.warnings
        if warning["step"] <= frame.most["steps"]
    ]


def nice_ticks(low: float, high: float) -> list[float]:
    """Three to six round numbers that enclose both."""
    span = (high - low) or abs(high) or 1.0
    size = 10.0 ** math.floor(math.log10(span / 3))
    step = next(size * factor for factor in (1, 2, 2.5, 5, 10) if span / (size * factor) <= 4)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [float(f"{index * step:.6g}") for index in range(first, max(last, first + 1) + 1)]
