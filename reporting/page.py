"""
The page of a run, `report.html`: one file that needs no server and no network, made from `templates/`.

The verdict and held-out answers stand on the first screen: a reward that is cheated has good numbers and odd answers.
While the run goes, the page loads itself again. Text of prompts, completions and settings is hostile: the template
escapes it and shows what a browser would obey as its code, and the page's policy lets no script run but ours. Left out:
reading a run (history.py), its curves (charts.py).
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

from disk import run_files
from flags import escape_invisible
from judging import rubrics
from machine import alive
from problems.calls import show_with_tools
from problems.examples import spread_evenly
from reporting import charts, history, seeds, verdict
from reporting.history import History, mark_changes, prompt_text, shorten_text
from reporting.seeds import SeedGroup
from settings.sources import command_line

TEMPLATES = Path(__file__).parent / "templates"
MOST_COMPLETIONS = (
    2_500_000  # bytes of rollouts.jsonl, whose ids and log-probabilities the page leaves out
)
MOST_ANSWERS = 1_000_000  # characters of held-out answers
CHEATED = "wrong, yet paid most"  # where that is alarmingly often
MOST_COST = 0.01  # of a run's time, for all of its pages but the last

# ---- held-out answers


def make_answers(run: History) -> dict[str, Any]:
    """Held-out problems with their answers before, during and after training, and how many went which way."""
    by_step, verified = run.answers, run.figure == "accuracy"
    if not by_step:
        return {"rows": [], "first": [], "columns": [], "counts": {}, "left_out": 0}
    steps = sorted(by_step)
    chosen = sorted({steps[0], steps[len(steps) // 2], steps[-1]})
    problems = sorted(set.intersection(*(set(by_step[step]) for step in chosen)))
    last = run.evals[-1] if run.evals else {}
    of = {
        problem: answer_row([by_step[step][problem] for step in chosen], last, verified)
        for problem in problems
    }
    for problem in verdict.rewarded_wrong_answers(by_step)[1] & of.keys() if verified else ():
        of[problem]["kind"] = CHEATED
    rows = list(of.values())
    size = sum(len(cell["text"]) for row in rows for cell in row["cells"]) + 1
    shown = spread_evenly(rows, max(verdict.NUM_READ, int(len(rows) * MOST_ANSWERS / size)))
    names = {steps[-1]: f"after step {steps[-1]}, the last evaluation"}
    names[0] = f"before training{run_files.describe_start(run.settings)}"
    return {
        "rows": shown,
        "first": [of[problem] for problem in verdict.draw_problems(problems, run.settings)],
        "columns": [names.get(step, f"after step {step}") for step in chosen],
        "counts": dict(Counter(row["kind"] for row in rows).most_common()),
        "left_out": len(rows) - len(shown),
    }


def answer_row(
    details: list[dict[str, Any]], evaluation: dict[str, Any], verified: bool
) -> dict[str, Any]:
    """One problem: its records of some evaluations side by side, what differs from the first marked."""
    cells: list[dict[str, Any]] = []
    for detail in details:
        value = detail["values"][0]
        text = shorten_text(
            show_with_tools(detail["completions"][0], detail.get("messages", [None])[0])
        )
        cells.append(
            {
                "text": text,
                "pieces": mark_changes(cells[0]["text"], text) if cells else [(text, False)],
                "paid": verdict.reward_of(detail, evaluation),
                "right": value >= 1.0 if verified and value is not None else None,
                "rewards": {name: values[0] for name, values in detail["rewards"].items()},
            }
        )
    return {
        "prompt": prompt_text(details[0]["prompt"]),
        "answer": shorten_text(details[0].get("answer")),
        "category": shorten_text(details[0].get("category")),
        "kind": classify_change([detail["values"][0] for detail in details], verified),
        "cells": cells,
    }


def classify_change(values: list[float | None], verified: bool) -> str:
    """How an answer went from the first evaluation to the last; of one how it is."""
    first, last = values[0], values[-1]
    if first is None or last is None:
        return "unreadable"
    if verified:
        went = ("stayed " if (first >= 1) == (last >= 1) else "became ") * (len(values) > 1)
        return went + ("right" if last >= 1 else "wrong")
    return (
        "answered"
        if not values[1:]
        else "rose"
        if last > first
        else "fell"
        if last < first
        else "stayed"
    )


# ---- completions

Place = tuple[int, int]  # step and group
_PLACE = re.compile(rb'\{"step": (\d+), "group": (\d+),')


def read_completion_lines(path: Path) -> Iterator[tuple[Place, bytes]]:
    """The whole lines of `rollouts.jsonl` with their places, as they are read."""
    if path.is_file():
        with path.open("rb") as file:
            for line in file:
                if line.endswith(b"\n") and (match := _PLACE.match(line)):
                    yield (int(match[1]), int(match[2])), line


def make_completions(run: History) -> dict[str, Any]:
    """Whole groups of training completions within `MOST_COMPLETIONS`, evenly spread over the steps."""
    path, sizes = run.dir / "rollouts.jsonl", Counter[Place]()
    for place, line in read_completion_lines(path):
        sizes[place] += len(line)
    most = max(1, min(len(sizes), len(sizes) * MOST_COMPLETIONS // max(1, sizes.total())))
    chosen: dict[Place, list[dict[str, Any]]] = {
        place: [] for place in spread_evenly(sorted(sizes), most)
    }
    for place, line in read_completion_lines(path):
        if place in chosen:
            chosen[place].append(json.loads(line))
    groups = [make_group(*place, lines) for place, lines in chosen.items()]
    return {"groups": groups, "of": len(sizes), "criteria": criterion_names(run, groups)}


def make_group(step: int, group: int, lines: list[dict[str, Any]]) -> dict[str, Any]:
    """One group: its prompt once, its completions with what they earned by descending advantage."""
    lines.sort(key=lambda line: -math.inf if line.get("advantage") is None else -line["advantage"])
    asked = {key: shorten_text(lines[0].get(key)) for key in ("answer", "category")}
    rows = [
        {
            "text": shorten_text(show_with_tools(line["completion"], line.get("messages"))),
            "advantage": line.get("advantage"),
            "reward": line["reward"],
            "rewards": {escape_invisible(name): value for name, value in line["rewards"].items()},
            "scores": line.get("judge_scores") or [],
            "finish": escape_invisible(str(line["finish_reason"])),
            "unreadable": None
            in (line["reward"], *line["rewards"].values(), *(line.get("judge_scores") or [])),
        }
        for line in lines
    ]
    return (
        {"step": step, "group": group, "prompt": prompt_text(lines[0]["prompt"])}
        | asked
        | {"rows": rows}
    )


def criterion_names(run: History, groups: list[dict[str, Any]]) -> list[str]:
    """Names of the judge's criteria in the order of its scores; numbers where the rubric is gone or another now."""
    number = max((len(row["scores"]) for group in groups for row in group["rows"]), default=0)
    bundled = Path(__file__).parent.parent / "data" / f"{run.settings.get('task')}_rubric.yaml"
    path = Path(run.settings.get("rubric") or bundled)
    names = (
        [escape_invisible(one.name) for one in rubrics.load_rubric(path).criteria]
        if number and path.is_file()
        else []
    )
    return names if len(names) == number else [f"criterion {index + 1}" for index in range(number)]


# ---- the page


def describe_progress(run: History, status: str) -> str:
    """How far a run is, with the time left."""
    pace, said = (
        [step.get("step/s") or 0.0 for step in run.steps[-10:]],
        f"step {history.format_progress(run, status)}",
    )
    if status != "running" or not pace:
        return said
    steps, every = run.settings["steps"] - run.steps[-1]["step"], run.settings["eval_every"]
    evals_left = max(steps / every, 1) if every else 0  # the last one at least
    left = steps * sum(pace) / len(pace) + evals_left * (
        run.evals[-1].get("eval/s") or 0 if run.evals else 0
    )
    return f"{said}, about {alive.format_duration(left)} left"


def render_page(settings: list[SeedGroup], ended: bool = False) -> str:
    """The HTML of the first run, with the curves of all seeds and settings. ended: see `history.run_status`."""
    run = settings[0].runs[0]
    curves = charts.make_charts(settings)
    script = (TEMPLATES / "report.js").read_text(encoding="utf-8")
    completions, status = make_completions(run), history.run_status(run, ended)
    plot = {
        name: getattr(charts, name.upper())
        for name in ("width", "height", "left", "right", "top", "bottom")
    }
    series = [
        [{key: one[key] for key in ("label", "x", "y")} for one in chart["series"]]
        for chart in curves
    ]
    pointed = [
        {"most": chart["most"], "series": its} for chart, its in zip(curves, series, strict=True)
    ]
    recipe, again = shlex.quote(str(run.dir / "config.yaml")), shlex.quote(f"{run.dir}-again")
    return load_template().render(
        name=" against ".join(setting.name for setting in settings),
        run=run,
        written=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        command=f"{command_line(run.settings)} --config {recipe} --run-dir {again}",
        status=(status, describe_progress(run, status)),
        verdict=(found := verdict.judge_change(run)),
        tone={verdict.BETTER: "" if found and found.is_doubtful else "good", verdict.WORSE: "bad"},
        facts=history.headline_facts(run, ended),
        others=[
            (name, *history.format_before_after(runs[0]))
            for name, runs in settings[1:]
            if len(runs) == 1
        ],
        seeds=seeds.describe_seed_groups(settings),
        shown=run.name if len(settings[0].runs) > 1 else "",
        answers=make_answers(run),
        charts=curves,
        main=charts.MAIN,
        thinned=-(-len(run.steps) // charts.MOST_POINTS),
        completions=completions,
        settings={name: shorten_text(str(value)) for name, value in run.settings.items()},
        plot=plot,
        data={"charts": pointed, "completions": completions, "plot": plot},
        css=(TEMPLATES / "report.css").read_text(encoding="utf-8"),
        script=script,
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    )


def show_value(value: Any) -> Any:
    """What the page shows of a value, see `visible`; what the template has made stays."""
    return value if hasattr(value, "__html__") else escape_invisible(str(value))


@functools.cache  # a run writes its page again and again
def load_template() -> jinja2.Template:
    how: Any = {
        "autoescape": True,
        "undefined": jinja2.StrictUndefined,
        "trim_blocks": True,
        "lstrip_blocks": True,
    }
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES), finalize=show_value, **how
    )
    environment.policies["json.dumps_kwargs"] = {"sort_keys": False}  # rewards in their own order
    return environment.get_template("report.html.j2")


def write_page(
    run_dir: str | Path,
    out: str | Path | None = None,
    others: Sequence[str] = (),
    ended: bool = False,
) -> Path:
    """
    Writes the page of a run or of a directory of seeds to `report.html` there, unless `out` names another file; where
    it lies. With others, it lies beside the first and is named after all of them.
    """
    settings, folder = seeds.load_seed_groups([run_dir, *others]), Path(run_dir).resolve()
    names = dict.fromkeys([folder.name, *(Path(other).resolve().name for other in others)])
    beside = folder.parent / f"{'-against-'.join(names)[:100]}.html"
    path = Path(out) if out else beside if others else Path(run_dir) / "report.html"
    with alive.show_activity("writing the page"):
        run_files.replace_text(path, render_page(settings, ended))
    return path


def open_page(path: Path) -> None:
    """Opens a page in the user's browser."""
    webbrowser.open(path.resolve().as_uri())


# ---- while the run goes


class LivePage:
    """
    The page of a run that is going on, written as often as its pages take less than `MOST_COST` of the run's time.

    What goes wrong is told once and stops nothing: the run is worth more than its page.
    """

    def __init__(self, run_dir: Path, tell: Callable[[str], None]):
        self.dir, self.tell = run_dir, tell
        self.failed, self.due = False, 0.0  # when the next page is cheap enough, on the clock

    def update(self, at_the_end: bool = False) -> None:
        """Writes the page if it is cheap enough; at the end in any case."""
        begin = time.perf_counter()
        if self.failed or (begin < self.due and not at_the_end):
            return
        run_files.check_still_owned(self.dir)
        try:
            write_page(self.dir, ended=at_the_end)
        except Exception as error:
            self.failed = True
            self.tell(
                f"WARNING: the page of the run is not written any more: {type(error).__name__}: {error}"
            )
        end = time.perf_counter()
        self.due = end + (end - begin) / MOST_COST
