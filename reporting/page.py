"""
Writes the page of a run, `report.html`, from `templates/`. The page is one file, which needs no
server and no network.

The first screen shows the verdict and held-out answers, because a gamed reward has good figures but
odd answers. While the run goes on, the page reloads itself. The text of prompts, completions and
settings is untrusted: the template escapes it, characters that a browser would obey are shown as
codes, and the page's policy allows only this project's script. This file does not cover reading a
run (history.py) or its curves (charts.py).
"""

import base64
import functools
import hashlib
import json
import math
import re
import shlex
import time
import webbrowser
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jinja2

from disk import model_card, run_files
from judging import rubrics
from machine import alive
from prompts.examples import spread_evenly
from reporting import charts, history, seeds
from reporting.answer_changes import CHEATED, describe_reward, problems_with_rewarded_mistakes
from reporting.difference import BETTER, WORSE
from reporting.history import Answers, History, mark_changes, prompt_text, shorten_text
from reporting.seeds import SeedGroup
from reporting.verdict import NUM_READ, Verdict, draw_problems, judge_change
from settings.sources import command_line
from text.printable import escape_invisible
from tools.calls import show_with_tools

TEMPLATES = Path(__file__).parent / "templates"
# bytes of rollouts.jsonl that the page shows, without their ids and log-probabilities
MOST_COMPLETIONS = 2_500_000
MOST_ANSWERS = 1_000_000  # characters of held-out answers
MOST_COST = 0.01  # fraction of a run's time that it takes to write all pages but the last

# ---- held-out answers


def make_answers(run: History) -> dict[str, Any]:
    """
    Returns held-out problems with their answers before, during and after training.

    The result also has the number of answers for each kind of change.
    """
    by_step = run.answers
    if not by_step:
        return {"rows": [], "first": [], "columns": [], "counts": {}, "left_out": 0}
    steps = sorted(by_step)
    chosen_steps = sorted({steps[0], steps[len(steps) // 2], steps[-1]})
    problems = sorted(set.intersection(*(set(by_step[step]) for step in chosen_steps)))
    row_of = make_answer_rows(run, [by_step[step] for step in chosen_steps], problems)
    rows = list(row_of.values())

    size = 1
    for row in rows:
        size += sum(len(cell["text"]) for cell in row["cells"])
    num_shown = max(NUM_READ, int(len(rows) * MOST_ANSWERS / size))
    rows_shown = spread_evenly(rows, num_shown)

    names = {steps[-1]: f"after step {steps[-1]}, the last evaluation"}
    names[0] = f"before training{model_card.describe_start(run.settings)}"
    drawn = draw_problems(problems, run.settings)
    return {
        "rows": rows_shown,
        "first": [row_of[problem] for problem in drawn],
        "columns": [names.get(step, f"after step {step}") for step in chosen_steps],
        "counts": dict(Counter(row["kind"] for row in rows).most_common()),
        "left_out": len(rows) - len(rows_shown),
    }


def make_answer_rows(
    run: History, evaluations: list[Answers], problems: list[int]
) -> dict[int, dict[str, Any]]:
    """Returns the page's row for each problem, with the problem's answers in these evaluations."""
    is_verified = run.figure == "accuracy"
    last = run.evals[-1] if run.evals else {}
    rows = {}
    for problem in problems:
        records = [answers[problem] for answers in evaluations]
        rows[problem] = answer_row(records, last, is_verified)
    if is_verified:
        _, cheats = problems_with_rewarded_mistakes(run.answers)
        for problem in cheats & rows.keys():
            rows[problem]["kind"] = CHEATED
    return rows


def answer_row(
    records: list[dict[str, Any]], evaluation: dict[str, Any], is_verified: bool
) -> dict[str, Any]:
    """
    Returns the page's row for one problem: its records in several evaluations, side by side.

    Words that are not in the first answer are marked.
    """
    cells: list[dict[str, Any]] = []
    for record in records:
        value = record["values"][0]
        messages = record.get("messages", [None])[0]
        text = shorten_text(show_with_tools(record["completions"][0], messages))
        pieces = mark_changes(cells[0]["text"], text) if cells else [(text, False)]
        is_right = value >= 1.0 if is_verified and value is not None else None
        rewards = {name: values[0] for name, values in record["rewards"].items()}
        cells.append(
            {
                "text": text,
                "pieces": pieces,
                "reward": describe_reward(record, evaluation),
                "right": is_right,
                "rewards": rewards,
            }
        )
    values = [record["values"][0] for record in records]
    return {
        "prompt": prompt_text(records[0]["prompt"]),
        "answer": shorten_text(records[0].get("answer")),
        "category": shorten_text(records[0].get("category")),
        "kind": classify_change(values, is_verified),
        "cells": cells,
    }


def classify_change(values: list[float | None], is_verified: bool) -> str:
    """
    Returns how an answer changed from the first to the last evaluation, as "became right".

    If there is only one evaluation, returns the answer's state, as "right".
    """
    first = values[0]
    last = values[-1]
    if first is None or last is None:
        return "unreadable"
    if is_verified:
        state = "right" if last >= 1 else "wrong"
        if len(values) == 1:
            return state
        return f"stayed {state}" if (first >= 1) == (last >= 1) else f"became {state}"
    if len(values) == 1:
        return "answered"
    if last > first:
        return "rose"
    return "fell" if last < first else "stayed"


# ---- completions

Place = tuple[int, int]  # step and group
PLACE_IN_LINE = re.compile(rb'\{"step": (\d+), "group": (\d+),')


def read_completion_lines(path: Path) -> Iterator[tuple[Place, bytes]]:
    """Yields the complete lines of `rollouts.jsonl` with their places."""
    if not path.is_file():
        return
    with path.open("rb") as file:
        for line in file:
            match = PLACE_IN_LINE.match(line)
            if match and line.endswith(b"\n"):
                yield (int(match[1]), int(match[2])), line


def make_completions(run: History) -> dict[str, Any]:
    """Returns groups of completions within `MOST_COMPLETIONS`, evenly spread over the steps."""
    path = run.dir / "rollouts.jsonl"
    sizes = Counter[Place]()
    for place, line in read_completion_lines(path):
        sizes[place] += len(line)
    num_fitting = len(sizes) * MOST_COMPLETIONS // max(1, sizes.total())
    num_chosen = max(1, min(len(sizes), num_fitting))

    chosen: dict[Place, list[dict[str, Any]]] = {}
    for place in spread_evenly(sorted(sizes), num_chosen):
        chosen[place] = []
    for place, line in read_completion_lines(path):
        if place in chosen:
            chosen[place].append(json.loads(line))
    groups = [make_group(step, group, records) for (step, group), records in chosen.items()]
    return {"groups": groups, "of": len(sizes), "criteria": criterion_names(run, groups)}


def make_group(step: int, group: int, records: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns a group: its prompt, and its completions, the highest advantage first."""
    records.sort(key=descending_advantage)
    return {
        "step": step,
        "group": group,
        "prompt": prompt_text(records[0]["prompt"]),
        "answer": shorten_text(records[0].get("answer")),
        "category": shorten_text(records[0].get("category")),
        "rows": [make_completion(record) for record in records],
    }


def descending_advantage(record: dict[str, Any]) -> float:
    """Returns a sort key that puts the highest advantage first; None counts as the highest."""
    advantage = record.get("advantage")
    return -math.inf if advantage is None else -advantage


def make_completion(record: dict[str, Any]) -> dict[str, Any]:
    """Returns the text and the figures that the page shows for a completion."""
    scores = record.get("judge_scores") or []
    rewards = {escape_invisible(name): value for name, value in record["rewards"].items()}
    figures = [record["reward"], *record["rewards"].values(), *scores]
    return {
        "text": shorten_text(show_with_tools(record["completion"], record.get("messages"))),
        "advantage": record.get("advantage"),
        "reward": record["reward"],
        "rewards": rewards,
        "scores": scores,
        "finish": escape_invisible(str(record["finish_reason"])),
        "unreadable": None in figures,
    }


def criterion_names(run: History, groups: list[dict[str, Any]]) -> list[str]:
    """
    Returns the names of the judge's criteria in the order of its scores.

    If the rubric is gone or has changed, the names are numbers.
    """
    num_criteria = 0
    for group in groups:
        for row in group["rows"]:
            num_criteria = max(num_criteria, len(row["scores"]))
    bundled = Path(__file__).parent.parent / "data" / f"{run.settings.get('task')}_rubric.yaml"
    path = Path(run.settings.get("rubric") or bundled)
    names = []
    if num_criteria and path.is_file():
        criteria = rubrics.load_rubric(path).criteria
        names = [escape_invisible(criterion.name) for criterion in criteria]
    if len(names) == num_criteria:
        return names
    return [f"criterion {index + 1}" for index in range(num_criteria)]


# ---- the page


def describe_progress(run: History, status: str) -> str:
    """Returns how far a run is, and the time left."""
    progress = f"step {history.format_progress(run, status)}"
    paces = [step.get("step/s") or 0.0 for step in run.steps[-10:]]
    if status != "running" or not paces:
        return progress
    steps_left = run.settings["steps"] - run.steps[-1]["step"]
    every = run.settings["eval_every"]
    evals_left = max(steps_left / every, 1) if every else 0  # at least the last evaluation
    eval_seconds = run.evals[-1].get("eval/s") or 0 if run.evals else 0
    seconds_left = steps_left * sum(paces) / len(paces) + evals_left * eval_seconds
    return f"{progress}, about {alive.format_duration(seconds_left)} left"


def render_page(settings: list[SeedGroup], ended: bool = False) -> str:
    """
    Returns the HTML of the first run, with the curves of all seeds and settings.

    ended: see `history.run_status`.
    """
    run = settings[0].runs[0]
    curves = charts.make_charts(settings)
    completions = make_completions(run)
    status = history.run_status(run, ended)
    verdict = judge_change(run)
    recipe = shlex.quote(str(run.dir / "config.yaml"))
    copy = shlex.quote(f"{run.dir}-again")
    script = (TEMPLATES / "report.js").read_text(encoding="utf-8")
    script_hash = hashlib.sha256(script.encode()).digest()
    plot = {
        "width": charts.WIDTH,
        "height": charts.HEIGHT,
        "left": charts.LEFT,
        "right": charts.RIGHT,
        "top": charts.TOP,
        "bottom": charts.BOTTOM,
    }
    # the script reads this
    data = {
        "charts": [readable_values(chart) for chart in curves],
        "completions": completions,
        "plot": plot,
    }
    return load_template().render(
        name=" against ".join(setting.name for setting in settings),
        run=run,
        written=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        command=f"{command_line(run.settings)} --config {recipe} --run-dir {copy}",
        status=(status, describe_progress(run, status)),
        verdict=verdict,
        tone=verdict_tone(verdict),
        facts=history.headline_facts(run, ended),
        other_runs=describe_other_runs(settings[1:]),
        seeds=seeds.describe_seed_groups(settings),
        shown=run.name if len(settings[0].runs) > 1 else "",
        answers=make_answers(run),
        charts=curves,
        main=charts.MAIN,
        thinned=math.ceil(len(run.steps) / charts.MOST_POINTS),
        completions=completions,
        settings={name: shorten_text(str(value)) for name, value in run.settings.items()},
        plot=plot,
        data=data,
        css=(TEMPLATES / "report.css").read_text(encoding="utf-8"),
        script=script,
        script_hash=base64.b64encode(script_hash).decode(),
    )


def readable_values(chart: dict[str, Any]) -> dict[str, Any]:
    """Returns the part of a chart from which the script shows values at the pointer."""
    series = []
    for curve in chart["series"]:
        series.append({"label": curve["label"], "x": curve["x"], "y": curve["y"]})
    return {"most": chart["most"], "series": series}


def verdict_tone(verdict: Verdict | None) -> str:
    """Returns the CSS class of the verdict: "good", "bad" or ""."""
    if verdict is None:
        return ""
    if verdict.outcome == WORSE:
        return "bad"
    return "good" if verdict.outcome == BETTER and not verdict.is_doubtful else ""


def describe_other_runs(settings: list[SeedGroup]) -> list[tuple[str, str, str]]:
    """Returns the name, and the figure before and after, of each setting with a single run."""
    other_runs = []
    for setting in settings:
        if len(setting.runs) == 1:
            before, after = history.format_before_after(setting.runs[0])
            other_runs.append((setting.name, before, after))
    return other_runs


def escape_value(value: Any) -> Any:
    """Escapes a value's invisible characters, unless the template itself made the value."""
    return value if hasattr(value, "__html__") else escape_invisible(str(value))


@functools.cache  # a run writes its page again and again
def load_template() -> jinja2.Template:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        finalize=escape_value,
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.policies["json.dumps_kwargs"] = {"sort_keys": False}  # keep the rewards in order
    return environment.get_template("report.html.j2")


def write_page(
    run_dir: str | Path,
    out: str | Path | None = None,
    other_runs: Sequence[str] = (),
    ended: bool = False,
) -> Path:
    """
    Writes the page of a run, or of a directory of seeds, and returns its path.

    The page is `report.html` in `run_dir`, unless `out` names another file. With `other_runs`, the
    page is written beside the first run and is named after all runs.

    ended: see `history.run_status`.
    """
    settings = seeds.load_seed_groups([run_dir, *other_runs])
    if out:
        path = Path(out)
    elif other_runs:
        folder = Path(run_dir).resolve()
        names = dict.fromkeys([folder.name, *(Path(other).resolve().name for other in other_runs)])
        path = folder.parent / f"{'-against-'.join(names)[:100]}.html"
    else:
        path = Path(run_dir) / "report.html"
    with alive.show_activity("writing the page"):
        run_files.replace_text(path, render_page(settings, ended))
    return path


def open_page(path: Path) -> None:
    """Opens a page in the user's browser."""
    webbrowser.open(path.resolve().as_uri())


# ---- while the run goes on


class LivePage:
    """
    Writes the page of a run again and again while the run goes on.

    Writing takes at most MOST_COST of the run's time. An error is reported once and does not stop
    the run, because the run is worth more than its page.
    """

    def __init__(self, run_dir: Path, report: Callable[[str], None]):
        self.dir = run_dir
        self.report = report
        self.failed = False
        self.due = 0.0  # the time from which the next page is cheap enough

    def update(self, at_the_end: bool = False) -> None:
        """Writes the page if that is cheap enough, and always at the end of the run."""
        start = time.perf_counter()
        if self.failed or (start < self.due and not at_the_end):
            return
        run_files.check_still_owned(self.dir)
        try:
            write_page(self.dir, ended=at_the_end)
        except Exception as error:
            self.failed = True
            self.report(
                "WARNING: the page of the run is no longer written: "
                f"{type(error).__name__}: {error}"
            )
        end = time.perf_counter()
        self.due = end + (end - start) / MOST_COST
