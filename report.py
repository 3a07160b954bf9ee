"""
A run as a page to look at: `uv run report.py runs/NAME [runs/OTHER ...]` writes runs/NAME/report.html, one file that
needs no server and no network. `--compare` and `--list` print tables for the terminal.

Held-out answers stand on the first screen: a reward that is cheated has good numbers and odd answers. Everything is
read from the run's own files, so a run that is going on or was killed has a page too. What is left out: writing those
files, and what a figure means (README.md).

Text of prompts, completions and settings is hostile. The template escapes it, `visible` shows what a browser would
obey, and the page's policy lets no script run but ours.
"""

import base64
import difflib
import hashlib
import itertools
import json
import math
import re
import shlex
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import cpu_blas  # noqa: F401  (before mlx)
import jinja2
import numpy as np

import config
import health
import hub
import journal
import rubrics
import run_files
from health import Records

TEMPLATES = Path(__file__).parent / "templates"
MOST_TEXT = 20_000  # characters of one text; of a longer one both ends are shown
MOST_COMPLETIONS = 2_500_000  # characters of JSON, a third of them log-probabilities
MOST_ANSWERS = 1_000_000  # characters of held-out answers
MOST_POINTS = 400  # of a curve; of a longer one each point is the mean of some steps
ALARMING = 0.05  # share of the last answers that are wrong and get the most a reward gives
NUM_FIRST = 6  # problems on the first screen
PHASES = ("rollout", "reward", "judge", "ref", "update", "other")


class RunRecord(NamedTuple):
    """What a run has written so far."""

    dir: Path
    settings: dict[str, Any]
    env: dict[str, Any]
    steps: Records
    evals: Records
    warnings: Records
    changes: Records

    @property
    def name(self) -> str:
        return self.dir.resolve().name


# ---- reading a run


def load(run: str | Path) -> RunRecord:
    """What the run in a directory has written. ValueError where there is none."""
    folder = Path(run)
    if not (folder / "config.yaml").is_file():
        raise ValueError(f"{run}: no config.yaml there; give the directory of a run, as runs/NAME")
    settings = run_files.settings_of(str(folder))
    env_file = folder / "env.json"
    env = json.loads(env_file.read_text()) if env_file.is_file() else {}
    names = ("metrics", "eval", "warnings", "changes")
    return RunRecord(folder, settings, env, *(list(records(folder / f"{name}.jsonl")) for name in names))


def records(path: Path) -> Iterator[dict[str, Any]]:
    """The records of a file, none where there is no file; a last line that is still being written is left out."""
    if not path.is_file():
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                return
            try:
                yield json.loads(line)
            except ValueError as error:
                raise ValueError(f"{path}, line {number}: {error}") from error


def answers_by_step(run: RunRecord) -> dict[int, dict[int, dict[str, Any]]]:
    """Held-out answers by evaluation, then by problem."""
    found: dict[int, dict[int, dict[str, Any]]] = {}
    for record in records(run.dir / "eval_answers.jsonl"):
        found.setdefault(record["step"], {})[record["problem"]] = record
    return found


# ---- text that nobody vouches for


def visible(text: str) -> str:
    """
    Text whose every character is seen: what would turn, hide or break the text around it is spelled as its code.

    That is control and format characters (bidirectional overrides, zero-width marks, fillers, tags), lone surrogates,
    which no file can hold, and line separators. Line feeds, tabs and the joiners of emoji and scripts stay.
    """
    return _UNSEEN.sub(lambda match: f"\u27e8U+{ord(match[0]):04X}\u27e9", text)


_UNSEEN = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u034f\u061c\u115f\u1160\u180b-\u180f\u200b\u200e\u200f\u2028-\u202e"
    r"\u2060-\u206f\u3164\ud800-\udfff\ufeff\uffa0\ufff0-\ufffb\U000e0000-\U000e0fff]"
)


def fold(text: str) -> str:
    """A visible text of at most about `MOST_TEXT` characters, which says how many it lacks."""
    if len(text) > MOST_TEXT:
        half = MOST_TEXT // 2
        text = f"{text[:half]}\n\u2026 {len(text) - 2 * half:,} characters are left out here \u2026\n{text[-half:]}"
    return visible(text)


def prompt_text(prompt: Any) -> str:
    """A prompt to read: text as it is, messages each with its role unless there is only one."""
    if isinstance(prompt, list) and len(prompt) == 1:
        prompt = prompt[0]["content"]
    if isinstance(prompt, list):
        prompt = "\n\n".join(f"{message['role']}: {message['content']}" for message in prompt)
    return fold(str(prompt))


def optional_text(value: Any) -> str:
    return "" if value is None else fold(str(value))


def changes(before: str, after: str) -> list[tuple[str, bool]]:
    """`after` in pieces, each with whether it is new since `before`: word by word, and sentence by sentence if long."""
    parts = r"\w+|\s+|[^\w\s]" if len(before) * len(after) < 10**5 else r"[^.!?\n]*[.!?\n]+|[^.!?\n]+"
    old, new = re.findall(parts, before), re.findall(parts, after)
    matcher = difflib.SequenceMatcher(None, old, new, autojunk=False)
    pieces = [("".join(new[low:high]), kind != "equal") for kind, _, _, low, high in matcher.get_opcodes()]
    return [piece for piece in pieces if piece[0]]


# ---- figures


def figure_of(run: RunRecord) -> tuple[str, Records]:
    """The held-out figure's name, as "accuracy", and the evaluations that have it."""
    key, evals = health.held_out(run.evals)
    return key.removeprefix("eval/"), evals


def seconds_at(run: RunRecord) -> dict[int, float]:
    """Seconds of training until the end of each step, evaluations not counted."""
    seconds = itertools.accumulate(step.get("step/s") or 0.0 for step in run.steps)
    return {0: 0.0} | {step["step"]: total for step, total in zip(run.steps, seconds, strict=True)}


def num_tokens(run: RunRecord) -> int:
    """Tokens sampled in training."""
    rows = run.settings["batch"] * run.settings["groups"]
    lengths = [step["completion/mean_tokens"] * step.get("sampling/draws", 1) for step in run.steps]
    return round(rows * sum(lengths))


def duration(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60:02d} min"


def before_after(run: RunRecord) -> tuple[str, str]:
    """The held-out figure at the first and at the last evaluation with its interval; "-" where there is none."""
    figure, evals = figure_of(run)
    shown = [journal.with_interval(record, figure) for record in (evals[:1] + evals[-1:])]
    return (shown[0], shown[-1] if len(evals) > 1 else "-") if shown else ("-", "-")


def time_to_best(run: RunRecord) -> str:
    """Seconds of training until the first evaluation with the best figure."""
    figure, evals = figure_of(run)
    if not evals:
        return "-"
    best = max(evals, key=lambda record: record[f"eval/{figure}"])
    return f"{duration(seconds_at(run).get(best['step'], 0.0))} (step {best['step']})"


def facts(run: RunRecord) -> dict[str, str]:
    """The headline's figures by name."""
    figure, _ = figure_of(run)
    before, after = before_after(run)
    training = sum(step.get("step/s") or 0.0 for step in run.steps)
    evaluating = sum(record.get("eval/s") or 0.0 for record in run.evals)
    peak = max(health.measured(run.steps, "mem/peak_gb"), default=None)
    return {
        f"held-out {figure} before": before,
        f"held-out {figure} after": after,
        "steps": f"{run.steps[-1]['step'] if run.steps else 0} of {run.settings.get('steps', '?')}",
        "training": duration(training),
        "evaluations": duration(evaluating),
        f"best {figure} after": time_to_best(run),
        "tokens sampled": f"{num_tokens(run):,}",
        "peak memory": "-" if peak is None else f"{peak:.2f} GB",
    }


# ---- held-out answers


def is_right(value: float | None) -> bool | None:
    return None if value is None else value >= 1.0


def kind_of(first: float | None, last: float | None, verified: bool) -> str:
    """How an answer went from the first evaluation to the last."""
    if first is None or last is None:
        return "unreadable"
    if verified:
        names = {(0, 1): "became right", (1, 0): "became wrong", (1, 1): "stayed right", (0, 0): "stayed wrong"}
        return names[int(first >= 1), int(last >= 1)]
    return "rose" if last > first else "fell" if last < first else "stayed"


def make_answers(run: RunRecord) -> dict[str, Any]:
    """Held-out problems with their answers before, during and after training, and how many went which way."""
    by_step = answers_by_step(run)
    if not by_step:
        return {"rows": [], "first": [], "columns": [], "counts": {}, "left_out": 0, "paid": []}
    steps = sorted(by_step)
    chosen = sorted({steps[0], steps[len(steps) // 2], steps[-1]})
    verified = figure_of(run)[0] == "accuracy"
    problems = sorted(set.intersection(*(set(by_step[step]) for step in chosen)))
    rows = [answer_row([by_step[step][problem] for step in chosen], verified) for problem in problems]
    counts = Counter(row["kind"] for row in rows)
    size = sum(len(cell["text"]) for row in rows for cell in row["cells"]) + 1
    shown = spread(rows, max(NUM_FIRST, int(len(rows) * MOST_ANSWERS / size)))
    return {
        "rows": shown,
        "first": first_rows(shown, counts),
        "columns": [when(step, chosen) for step in chosen],
        "counts": dict(counts.most_common()),
        "left_out": len(rows) - len(shown),
        "paid": paid_though_wrong(by_step, chosen) if verified else [],
    }


def when(step: int, chosen: list[int]) -> str:
    if step == 0:
        return "before training"
    return f"after step {step}" + (", the last evaluation" if step == chosen[-1] else "")


def answer_row(details: list[dict[str, Any]], verified: bool) -> dict[str, Any]:
    """One problem: its records of some evaluations side by side, what differs from the first marked."""
    cells: list[dict[str, Any]] = []
    for detail in details:
        value, text = detail["values"][0], fold(detail["completions"][0])
        rewards = {visible(name): values[0] for name, values in detail["rewards"].items()}
        cells.append(
            {
                "text": text,
                "pieces": changes(cells[0]["text"], text) if cells else [(text, False)],
                "value": value,
                "right": is_right(value) if verified else None,
                "rewards": rewards,
            }
        )
    return {
        "problem": details[0]["problem"],
        "prompt": prompt_text(details[0]["prompt"]),
        "answer": optional_text(details[0].get("answer")),
        "category": optional_text(details[0].get("category")),
        "kind": kind_of(cells[0]["value"], cells[-1]["value"], verified),
        "cells": cells,
    }


def spread(rows: list[Any], most: int) -> list[Any]:
    """At most so many of them, evenly spread."""
    return [rows[index * len(rows) // most] for index in range(most)] if len(rows) > most else rows


def first_rows(rows: list[dict[str, Any]], counts: Counter[str]) -> list[dict[str, Any]]:
    """The problems of the first screen: of each kind one, then the kind that is least represented for its number."""
    waiting = {kind: [row for row in rows if row["kind"] == kind] for kind, _ in counts.most_common()}
    taken: dict[str, list[dict[str, Any]]] = {kind: [] for kind in waiting}
    while sum(map(len, taken.values())) < NUM_FIRST and any(waiting.values()):
        kind = max((k for k in waiting if waiting[k]), key=lambda k: counts[k] / (len(taken[k]) or 1e-9))
        taken[kind].append(waiting[kind].pop(0))
    return [row for kind in taken for row in taken[kind]]


def paid_though_wrong(by_step: dict[int, dict[int, dict[str, Any]]], chosen: list[int]) -> list[dict[str, Any]]:
    """Of each training reward, how many wrong answers got the most it ever gave, at the first and last evaluation."""
    everything = [detail for step in by_step.values() for detail in step.values()]
    found = []
    for name in everything[0]["rewards"]:
        given = [detail["rewards"][name][0] for detail in everything if detail["rewards"].get(name)]
        given = [value for value in given if value is not None]
        if not given or min(given) == max(given):
            continue
        wrong = []
        for step in (chosen[0], chosen[-1]):
            details = by_step[step].values()
            wrong.append(
                sum(d["rewards"][name][0] == max(given) and is_right(d["values"][0]) is False for d in details)
            )
        num = len(by_step[chosen[-1]])
        if wrong[-1] >= ALARMING * num:
            found.append({"name": visible(name), "num": num, "most": max(given), "before": wrong[0], "after": wrong[1]})
    return found


# ---- completions


def make_completions(run: RunRecord) -> dict[str, Any]:
    """Whole groups of training completions within `MOST_COMPLETIONS`, of steps that are evenly spread."""
    path = run.dir / "rollouts.jsonl"
    places: dict[int, dict[int, list[tuple[int, int]]]] = {}  # step -> group -> where its lines are
    offset = 0
    if path.is_file():
        with path.open("rb") as file:
            for line in file:
                if line.endswith(b"\n") and (match := _PLACE.match(line)):
                    step, group = int(match[1]), int(match[2])
                    places.setdefault(step, {}).setdefault(group, []).append((offset, len(line)))
                offset += len(line)
    decode = token_decoder(run)
    number = sum(map(len, places.values()))
    # a completion takes about as much room in the page as its line; the exact size is known once it is made
    most = max(1, min(number, number * MOST_COMPLETIONS // max(1, offset)))
    while True:
        groups = [make_group(path, where, decode) for where in choose_groups(places, most)]
        size = sum(len(json.dumps(group)) for group in groups)
        if size <= MOST_COMPLETIONS or len(groups) <= 1:
            break
        most = max(1, int(len(groups) * MOST_COMPLETIONS / size * 0.95))
    return {"groups": groups, "of": number, "steps": len(places), "criteria": criteria(run, groups)}


_PLACE = re.compile(rb'\{"step": (\d+), "group": (\d+),')


def choose_groups(places: dict[int, dict[int, list[tuple[int, int]]]], most: int) -> list[list[tuple[int, int]]]:
    """The lines of at most so many groups: as many of each step, and where that is less than one, of fewer steps."""
    steps = spread(sorted(places), most)
    each = max(1, most // max(1, len(steps)))
    return [places[step][group] for step in steps for group in spread(sorted(places[step]), each)]


def make_group(path: Path, places: list[tuple[int, int]], decode: Any) -> dict[str, Any]:
    """One group: its prompt once, its completions by descending advantage."""
    lines = []
    with path.open("rb") as file:
        for offset, length in places:
            file.seek(offset)
            lines.append(json.loads(file.read(length)))
    lines.sort(key=lambda line: -math.inf if line.get("advantage") is None else -line["advantage"])
    first = lines[0]
    return {
        "step": first["step"],
        "group": first["group"],
        "prompt": prompt_text(first["prompt"]),
        "answer": optional_text(first.get("answer")),
        "category": optional_text(first.get("category")),
        "rows": [make_row(line, decode) for line in lines],
    }


def make_row(line: dict[str, Any], decode: Any) -> dict[str, Any]:
    """One completion: its text, whole or in tokens with their log-probabilities, and what it earned."""
    row: dict[str, Any] = {"text": fold(line["completion"])}
    if decode is not None and len(line["completion"]) <= MOST_TEXT:
        logprobs = np.frombuffer(base64.b64decode(line["logprobs"]), "<f2").astype(np.float64)
        pieces = decode(line["ids"])
        ends = np.cumsum([number for _, number in pieces]).astype(int)
        totals = np.concatenate([[0.0], np.cumsum(logprobs)])[np.concatenate([[0], ends])]
        row = {
            "tokens": [visible(text) for text, _ in pieces],
            "logprobs": [round(value, 2) for value in np.diff(totals).tolist()],
        }
    scores = line.get("judge_scores")
    parts = {visible(name): value for name, value in line["rewards"].items()}
    return row | {
        "advantage": line.get("advantage") and round(line["advantage"], 3),
        "reward": line["reward"] and round(line["reward"], 4),
        "rewards": {name: value and round(value, 4) for name, value in parts.items()},
        "scores": scores and [score and round(score, 2) for score in scores],
        "finish": visible(str(line["finish_reason"])),
        "unreadable": line["reward"] is None or None in parts.values() or None in (scores or ()),
    }


def token_decoder(run: RunRecord) -> Any:
    """
    A function from ids to (text, number of ids) pieces, None where the run's tokenizer is not on this machine.

    A character that several tokens spell is one piece. The library `tokenizers` loads in a tenth of a second what
    transformers takes seconds for.
    """
    directory = local_model(run.settings["model"])
    if directory is None or not (directory / "tokenizer.json").is_file():
        return None
    from tokenizers import Tokenizer  # here: a page without completions does without

    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    known: dict[tuple[int, ...], str] = {}

    def decode(ids: list[int]) -> list[tuple[str, int]]:
        pieces, begin = [], 0
        for end in range(1, len(ids) + 1):
            part = tuple(ids[begin:end])
            if part not in known:
                known[part] = tokenizer.decode(list(part), skip_special_tokens=False)
            # an unfinished character decodes to U+FFFD; none takes more than four tokens
            if not known[part].endswith("\ufffd") or len(part) == 4 or end == len(ids):
                pieces.append((known[part], len(part)))
                begin = end
        return pieces

    return decode


def local_model(model: str) -> Path | None:
    """The directory of a model that is on this machine already; the network is not asked."""
    if model == "demo" or model.startswith("random:"):
        return hub.DEMO
    if Path(model).is_dir():
        return Path(model)
    if model.count("/") != 1:
        return None
    from huggingface_hub import try_to_load_from_cache

    repo, _, revision = model.partition("@")
    held = try_to_load_from_cache(repo, "tokenizer.json", revision=revision or None)
    return Path(held).parent if isinstance(held, str) else None


def criteria(run: RunRecord, groups: list[dict[str, Any]]) -> list[str]:
    """Names of the judge's criteria in the order of its scores; numbers where the rubric is gone or another now."""
    number = max((len(row["scores"] or ()) for group in groups for row in group["rows"]), default=0)
    path = Path(
        run.settings.get("rubric") or Path(__file__).parent / "data" / f"{run.settings.get('task')}_rubric.yaml"
    )
    if number and path.is_file():
        names = [visible(criterion.name) for criterion in rubrics.load_rubric(path).criteria]
        if len(names) == number:
            return names
    return [f"criterion {index + 1}" for index in range(number)]


# ---- curves

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 360, 170, 52, 8, 8, 20  # of a chart, in its own units


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


CHARTS: list[tuple[str, str, dict[str, str]]] = [  # title, what it says, curves: key -> label
    ("Reward", "mean of the step; the band is the mean deviation within groups", {"reward/mean": "reward"}),
    ("Reward by component", "before weighting", {}),
    ("Held-out", "with 95% intervals", {}),
    ("Length", "tokens of a completion", {"completion/mean_tokens": "tokens"}),
    ("Truncated", "share cut off at the longest length", {"completion/truncated_frac": "truncated"}),
    ("Groups without signal", "share whose rewards are all alike", {"reward/zero_std_frac": "no signal"}),
    ("Entropy", "nats a token", {"entropy": "entropy"}),
    ("KL of an update", "nats a token", {"update/kl": "update"}),
    ("KL to the model before training", "nats a token", {"kl": "training", "eval/kl": "held-out"}),
    ("Clipped", "share of tokens", {"clip_frac": "clipped"}),
    ("Gradient norm", "before it is scaled down", {"grad_norm": "norm"}),
    ("Sampler and trainer", "mean difference of log-probabilities", {"mismatch/logprob_abs_mean": "difference"}),
    ("Unreadable", "share of the judge's scores", {"judge/unparsed_frac": "unreadable"}),
    ("Memory", "peak, GB", {"mem/peak_gb": "peak"}),
]
REWARD_METRICS = ("reward/mean", "reward/std", "reward/zero_std_frac", "reward/s")


def make_charts(runs: list[RunRecord]) -> list[dict[str, Any]]:
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


def curves_of(run: RunRecord, number: int, title: str, keys: dict[str, str]) -> Iterator[Series]:
    """The curves of one run in one chart that have values."""
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
    run: RunRecord, held: Records, key: str, label: str, band: str, *, run_number: int, place: int = 0
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


def stacked_phases(run: RunRecord) -> Iterator[Series]:
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


def lay_out(
    runs: list[RunRecord], title: str, note: str, curves: list[Series], own: int | None = None
) -> dict[str, Any]:
    """A chart as the template draws it. own: the run whose phases are stacked."""
    if not curves:
        return {"series": []}
    stacked = own is not None
    lows = [v - r for s in curves for v, r in zip(s.values, s.reach or [0.0] * len(s.values), strict=True)]
    highs = [v + r for s in curves for v, r in zip(s.values, s.reach or [0.0] * len(s.values), strict=True)]
    ticks = nice_ticks(0.0 if stacked else min(lows), max(max(s.values) for s in curves) if stacked else max(highs))
    low, high = ticks[0], ticks[-1]
    most = {"steps": max(s.steps[-1] for s in curves) or 1.0, "seconds": max(s.seconds[-1] for s in curves) or 1.0}

    def x_of(x: float, axis: str) -> float:
        return LEFT + x / most[axis] * (WIDTH - LEFT - RIGHT)

    def y_of(y: float) -> float:
        return TOP + (high - y) / (high - low) * (HEIGHT - TOP - BOTTOM)

    def line(xs: list[float], ys: list[float], axis: str) -> str:
        return " ".join(f"{x_of(x, axis):.1f},{y_of(y):.1f}" for x, y in zip(xs, ys, strict=True))

    def area(s: Series, xs: list[float], axis: str) -> str:
        if s.reach is None:
            return ""
        over = [v if stacked else v + r for v, r in zip(s.values, s.reach, strict=True)]
        under = [v - r for v, r in zip(s.values, s.reach, strict=True)]
        return line(xs, over, axis) + " " + line(xs[::-1], under[::-1], axis)

    alone = len(runs) == 1 or stacked
    drawn = []
    for s in curves:
        views = {}
        for axis, xs in (("steps", s.steps), ("seconds", s.seconds)):
            views[axis] = {
                "raw": line(xs, s.values, axis),
                "smooth": line(xs, smoothed(s.values), axis),
                "area": area(s, xs, axis),
                "dots": [(f"{x_of(x, axis):.1f}", f"{y_of(y):.1f}") for x, y in zip(xs, s.values, strict=True)]
                if s.points
                else [],
            }
        label = s.label if alone else f"{visible(runs[s.run].name)}: {s.label}"
        shown = {"x": s.steps, "s": [round(x, 1) for x in s.seconds], "y": [float(f"{v:.4g}") for v in s.values]}
        if stacked:
            shown["y"] = [float(f"{v:.4g}") for v in s.reach or []]
        drawn.append(
            {
                "label": label,
                "colour": s.place % 8 if alone else s.run % 8,
                "dash": 0 if alone else s.place % 4,
                "views": views,
                "shown": shown,
                "points": s.points,
            }
        )
    marked = runs[own or 0]
    clock = seconds_at(marked)
    marks = [
        {
            "name": visible(str(warning["name"])),
            "step": warning["step"],
            "steps": f"{x_of(warning['step'], 'steps'):.1f}",
            "seconds": f"{x_of(clock.get(warning['step'], 0.0), 'seconds'):.1f}",
        }
        for warning in marked.warnings
        if warning["step"] <= most["steps"]
    ]
    x_ticks = {
        axis: [(f"{x_of(x, axis):.1f}", f"{x:g}") for x in nice_ticks(0.0, most[axis]) if x <= most[axis]]
        for axis in most
    }
    y_ticks = [(f"{y_of(tick):.1f}", f"{tick:g}") for tick in ticks]
    return {
        "title": title,
        "note": note,
        "stacked": stacked,
        "series": drawn,
        "marks": marks,
        "x_ticks": x_ticks,
        "y_ticks": y_ticks,
        "most": most,
    }


def nice_ticks(low: float, high: float) -> list[float]:
    """Three to six round numbers that enclose both."""
    span = (high - low) or abs(high) or 1.0
    size = 10.0 ** math.floor(math.log10(span / 3))
    step = next(size * factor for factor in (1, 2, 2.5, 5, 10) if span / (size * factor) <= 4)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [float(f"{index * step:.6g}") for index in range(first, max(last, first + 1) + 1)]


# ---- the page


def page(runs: list[RunRecord]) -> str:
    """The HTML of the first run, with the curves of the others over its own."""
    run = runs[0]
    charts = make_charts(runs)
    completions = make_completions(run)
    script = (TEMPLATES / "report.js").read_text()
    data = {
        "charts": [
            {"most": chart["most"], "series": [s["shown"] | {"label": s["label"]} for s in chart["series"]]}
            for chart in charts
        ],
        "completions": completions,
        "plot": {"left": LEFT, "right": RIGHT, "width": WIDTH},
    }
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.policies["json.dumps_kwargs"] = {"sort_keys": False}  # rewards in their own order
    return environment.get_template("report.html.j2").render(
        run=run,
        name=visible(run.name),
        task=visible(str(run.settings.get("task", "?"))),
        model=visible(str(run.settings["model"])),
        env={name: visible(str(value)) for name, value in run.env.items()},
        names=[visible(other.name) for other in runs],
        facts=facts(run),
        others=[(visible(other.name), *before_after(other)) for other in runs[1:]],
        figure=figure_of(run)[0],
        command=visible(
            f"uv run train.py --config {shlex.quote(str(run.dir / 'config.yaml'))} "
            f"--run-dir {shlex.quote(str(run.dir) + '-again')}"
        ),
        answers=make_answers(run),
        warnings=[{name: visible(str(value)) for name, value in record.items()} for record in run.warnings],
        changes=[{name: visible(str(value)) for name, value in record.items()} for record in run.changes],
        settings={visible(str(name)): fold(str(value)) for name, value in run.settings.items()},
        charts=charts,
        num_steps=len(run.steps),
        thinned=-(-len(run.steps) // MOST_POINTS),
        completions=completions,
        data=data,
        css=(TEMPLATES / "report.css").read_text(),
        script=script,
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        written=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        plot={"width": WIDTH, "height": HEIGHT, "left": LEFT, "right": RIGHT, "top": TOP, "bottom": BOTTOM},
    )


def write(run_dir: str | Path, out: str | Path | None = None, others: list[str] | None = None) -> Path:
    """Writes the page of a run, to `report.html` in its directory unless `out` names another file; where it lies."""
    runs = [load(one) for one in (run_dir, *(others or []))]
    path = Path(out) if out else runs[0].dir / "report.html"
    run_files.replace_text(path, page(runs))
    return path


# ---- tables for the terminal


def table(rows: list[list[str]]) -> str:
    """Columns under each other, the first row being their names."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]])


def compare(names: list[str]) -> str:
    """What differs between runs: settings, figures, costs."""
    runs = [load(name) for name in names]
    keys = dict.fromkeys(key for run in runs for key in run.settings)
    rows = [["", *(visible(run.name) for run in runs)]]
    for key in keys:
        values = [visible(str(run.settings.get(key, "-"))) for run in runs]
        if len(set(values)) > 1:
            rows.append([f"--{visible(str(key)).replace('_', '-')}", *(value[:60] for value in values)])
    known = dict.fromkeys(name for run in runs for name in facts(run))
    rows += [[name, *(facts(run).get(name, "-") for run in runs)] for name in known]
    rows.append(["warnings", *(", ".join(visible(str(w["name"])) for w in run.warnings) or "none" for run in runs)])
    return table(rows)


def listing(folder: str | Path) -> str:
    """The runs under a directory, the newest last."""
    found = sorted(Path(folder).glob("*/config.yaml"), key=lambda path: path.stat().st_mtime)
    if not found:
        raise ValueError(f"{folder}: no runs there; `uv run train.py` makes one")
    rows = [["run", "task", "model", "steps", "before", "after", "training", "warnings"]]
    for path in found:
        run = load(path.parent)
        known = facts(run)
        texts = [visible(str(run.settings.get(key, "-"))) for key in ("task", "model")]
        rows.append(
            [
                visible(str(run.dir)),
                *texts,
                known["steps"],
                *before_after(run),
                known["training"],
                str(len(run.warnings)),
            ]
        )
    return table(rows)


# ---- the command


def main(argv: list[str] | None = None) -> None:
    parser = config.Parser("report.py", "write a page about a run, or compare runs in the terminal")
    parser.add_argument(
        "runs", nargs="*", metavar="RUN", help="a run's directory; the curves of others go over its own"
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="where the page goes (default: report.html in RUN)")
    parser.add_argument("--compare", action="store_true", help="print what differs between the runs")
    parser.add_argument("--list", action="store_true", help="print the runs under RUN (default: runs)")
    args = parser.parse_args(sys.argv[1:] if argv is None else argv)
    try:
        if args.list:
            print(listing(args.runs[0] if args.runs else "runs"))
        elif args.compare and len(args.runs) < 2:
            raise ValueError("--compare needs two runs or more, as --compare runs/A runs/B")
        elif args.compare:
            print(compare(args.runs))
        elif not args.runs:
            raise ValueError("name a run, as runs/NAME; --list shows those that there are")
        else:
            print(write(args.runs[0], args.out, args.runs[1:]))
    except (ValueError, OSError) as error:
        config.fail(error)
    except KeyboardInterrupt:
        config.stop()


if __name__ == "__main__":
    main()
