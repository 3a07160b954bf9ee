"""
Writes a run's page, `report.html`, from the files in `templates/`.

The page is a single file that needs neither a server nor a network. The page begins with the
verdict and held-out answers, because a model that games its reward has good figures but odd
answers. During the run, the page reloads itself. The texts of prompts, completions and settings are
untrusted. So the template escapes them and shows control characters as codes, and the page's
security policy allows only the page's own script. This file does not cover reading a run
(history.py) or its curves (charts.py).
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
from prompts.examples import pick_evenly_spaced
from reporting import charts, history, paired, seeds
from reporting.answer_changes import (
    CHEATED,
    describe_reward,
    wrong_with_highest_reward_if_alarming,
)
from reporting.difference import BETTER, WORSE
from reporting.history import (
    Answers,
    History,
    escape_invisible_and_cut_middle,
    format_prompt_safely,
    split_and_mark_new_words,
)
from reporting.seeds import SeedGroup
from reporting.verdict import (
    NUM_READ,
    Verdict,
    reach_verdict_on_held_out_change,
    sample_problems_to_show,
)
from settings.sources import command_prefix_with_extras
from text.printable import escape_invisible
from tools.calls import format_text_or_conversation

TEMPLATES = Path(__file__).parent / "templates"
MOST_COMPLETIONS = 2_500_000  # the page shows at most this many bytes of rollouts.jsonl
MOST_ANSWERS = 1_000_000  # the page shows at most this many characters of held-out answers
MOST_COST = 0.01  # until a run ends, writing its page takes at most this fraction of the run's time

# ---- held-out answers


def held_out_answers_for_page(run: History) -> dict[str, Any]:
    """
    Returns the template's data on held-out problems and their answers in up to three evaluations.

    The evaluations are the first, the middle and the last. The data includes how many answers
    changed in each way.
    """
    run = run.with_comparable_evals
    by_step = run.answers_by_step
    if not by_step:
        return {"rows": [], "first": [], "columns": [], "counts": {}, "left_out": 0}
    steps = sorted(by_step)
    chosen_steps = sorted({steps[0], steps[len(steps) // 2], steps[-1]})
    problems = sorted(set.intersection(*(set(by_step[step]) for step in chosen_steps)))
    row_of = answer_row_by_problem(run, [by_step[step] for step in chosen_steps], problems)
    rows = list(row_of.values())

    size = 1
    for row in rows:
        for cell in row["cells"]:
            size += len(cell["text"])
            if cell["greedy"] and cell["greedy"]["text"]:
                size += len(cell["greedy"]["text"])
    num_shown = max(NUM_READ, int(len(rows) * MOST_ANSWERS / size))
    rows_shown = pick_evenly_spaced(rows, num_shown)

    names = {steps[-1]: f"after step {steps[-1]}, the last evaluation"}
    names[0] = f"before training{model_card.describe_initial_adapter(run.settings)}"
    drawn = sample_problems_to_show(problems, run.settings)
    return {
        "rows": rows_shown,
        "first": [row_of[problem] for problem in drawn],
        "columns": [names.get(step, f"after step {step}") for step in chosen_steps],
        "counts": dict(Counter(row["kind"] for row in rows).most_common()),
        "left_out": len(rows) - len(rows_shown),
    }


def answer_row_by_problem(
    run: History, evaluations: list[Answers], problems: list[int]
) -> dict[int, dict[str, Any]]:
    """Returns the page's row for each problem, with the answers in each of the evaluations."""
    is_verified = run.figure_name == "accuracy"
    last = run.evals[-1] if run.evals else {}
    rows = {}
    for problem in problems:
        records = [answers[problem] for answers in evaluations]
        rows[problem] = make_answer_row(records, last, is_verified)
    if is_verified:
        _, cheats = wrong_with_highest_reward_if_alarming(run.answers_by_step)
        for problem in cheats & rows.keys():
            rows[problem]["kind"] = CHEATED
    return rows


def make_answer_row(
    problem_records: list[dict[str, Any]], last_evaluation: dict[str, Any], is_verified: bool
) -> dict[str, Any]:
    """
    Returns the page's row for one problem, with its answers in several evaluations side by side.

    Words that do not occur in the first of the sampled answers are marked. A greedy answer is shown
    below the sampled answer of the same evaluation.

    problem_records: the problem's record in each evaluation. last_evaluation: the record of the
    last evaluation as a whole.
    """
    cells: list[dict[str, Any]] = []
    for record in problem_records:
        value = record["values"][0]
        messages = record.get("messages", [None])[0]
        text = escape_invisible_and_cut_middle(
            format_text_or_conversation(record["completions"][0], messages)
        )
        pieces = split_and_mark_new_words(cells[0]["text"], text) if cells else [(text, False)]
        is_right = value >= 1.0 if is_verified and value is not None else None
        rewards = {name: values[0] for name, values in record["rewards"].items()}
        cells.append(
            {
                "text": text,
                "pieces": pieces,
                "reward": describe_reward(record, last_evaluation),
                "right": is_right,
                "rewards": rewards,
                "greedy": describe_greedy_answer(record, is_verified),
            }
        )
    values = [record["values"][0] for record in problem_records]
    return {
        "prompt": format_prompt_safely(problem_records[0]["prompt"]),
        "answer": escape_invisible_and_cut_middle(problem_records[0].get("answer")),
        "category": escape_invisible_and_cut_middle(problem_records[0].get("category")),
        "kind": classify_answer_change(values, is_verified),
        "cells": cells,
    }


def describe_greedy_answer(record: dict[str, Any], is_verified: bool) -> dict[str, Any] | None:
    """
    Returns the greedy answer in an evaluation's record of a problem.

    Returns its text, or None if it equals the sampled answer; whether it is right, if a verifier
    decides this; and its value as text. Returns None if there is no greedy answer.
    """
    greedy = record.get("greedy")
    if greedy is None:
        return None
    is_same = greedy.strip() == record["completions"][0].strip()
    value = record.get("greedy_value")
    return {
        "text": None if is_same else escape_invisible_and_cut_middle(greedy),
        "right": value >= 1.0 if is_verified and value is not None else None,
        "value": "" if is_verified or value is None else f"{value:.4g}",
    }


def classify_answer_change(values: list[float | None], is_verified: bool) -> str:
    """
    Returns how the answer to a problem changed over the evaluations, for example "became right".

    If there is only one evaluation, returns the grade alone, for example "right".

    values: the value of the answer in each evaluation.
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

StepAndGroup = tuple[int, int]
PLACE_IN_LINE = re.compile(rb'\{"step": (\d+), "group": (\d+),')


def read_completion_lines(path: Path) -> Iterator[tuple[StepAndGroup, bytes]]:
    """Yields each complete line of `rollouts.jsonl` with the numbers of its step and group."""
    if not path.is_file():
        return
    with path.open("rb") as file:
        for line in file:
            match = PLACE_IN_LINE.match(line)
            if match and line.endswith(b"\n"):
                yield (int(match[1]), int(match[2])), line


def completion_groups_for_page(run: History) -> dict[str, Any]:
    """Returns as many groups of completions as the page may show, evenly spread over the steps."""
    path = run.dir / "rollouts.jsonl"
    sizes = Counter[StepAndGroup]()
    for place, line in read_completion_lines(path):
        sizes[place] += len(line)
    num_fitting = len(sizes) * MOST_COMPLETIONS // max(1, sizes.total())
    num_chosen = max(1, min(len(sizes), num_fitting))

    chosen: dict[StepAndGroup, list[dict[str, Any]]] = {}
    for place in pick_evenly_spaced(sorted(sizes), num_chosen):
        chosen[place] = []
    for place, line in read_completion_lines(path):
        if place in chosen:
            chosen[place].append(json.loads(line))
    groups = [
        completion_group_for_page(step, group, records) for (step, group), records in chosen.items()
    ]
    return {"groups": groups, "of": len(sizes), "criteria": criterion_names(run, groups)}


def completion_group_for_page(
    step: int, group: int, records: list[dict[str, Any]]
) -> dict[str, Any]:
    """Returns a group's prompt, and its completions in descending order of their advantages."""
    records.sort(key=descending_advantage_key)
    return {
        "step": step,
        "group": group,
        "prompt": format_prompt_safely(records[0]["prompt"]),
        "answer": escape_invisible_and_cut_middle(records[0].get("answer")),
        "category": escape_invisible_and_cut_middle(records[0].get("category")),
        "rows": [completion_for_page(record) for record in records],
    }


def descending_advantage_key(record: dict[str, Any]) -> float:
    """Returns a sort key that puts missing advantages first, and then the highest advantages."""
    advantage = record.get("advantage")
    return -math.inf if advantage is None else -advantage


def completion_for_page(record: dict[str, Any]) -> dict[str, Any]:
    """Returns the text, rewards and scores that the page shows for a completion."""
    scores = record.get("judge_scores") or []
    rewards = {escape_invisible(name): value for name, value in record["rewards"].items()}
    figures = [record["reward"], *record["rewards"].values(), *scores]
    return {
        "text": escape_invisible_and_cut_middle(
            format_text_or_conversation(record["completion"], record.get("messages"))
        ),
        "advantage": record.get("advantage"),
        "left_out": record.get("left_out", False),  # by --train-completions
        "reward": record["reward"],
        "rewards": rewards,
        "scores": scores,
        "finish": escape_invisible(str(record["finish_reason"])),
        "unreadable": None in figures,
    }


def criterion_names(run: History, groups: list[dict[str, Any]]) -> list[str]:
    """
    Returns the names of the judge's criteria, in the same order as the judge's scores.

    If the rubric is missing or has changed, the criteria are called by their numbers.
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


def format_progress_and_time_left(run: History, status: str) -> str:
    """Returns the number of finished steps and, if the run is going on, the estimated time left."""
    progress = f"step {history.format_steps_done(run, status)}"
    paces = [step.get("step/s") or 0.0 for step in run.steps[-10:]]
    if status != "running" or not paces:
        return progress
    steps_left = run.settings["steps"] - run.steps[-1]["step"]
    every = run.settings["eval_every"]
    evals_left = max(steps_left / every, 1) if every else 0  # at least the last evaluation is left
    eval_seconds = run.evals[-1].get("eval/s") or 0 if run.evals else 0
    seconds_left = steps_left * sum(paces) / len(paces) + evals_left * eval_seconds
    return f"{progress}, about {alive.format_duration(seconds_left)} left"


def render_page(seed_groups: list[SeedGroup], ended: bool = False) -> str:
    """
    Returns an HTML page about the first run of the first group, with charts of all runs.

    ended: whether the process that owns the run has stopped training.
    """
    run = seed_groups[0].runs[0]
    curves = charts.make_charts(seed_groups)
    completions = completion_groups_for_page(run)
    status = history.run_status(run, ended)
    verdict = reach_verdict_on_held_out_change(run)
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
    # the page's script reads this object
    data = {
        "charts": [curve_values_for_hover(chart) for chart in curves],
        "completions": completions,
        "plot": plot,
    }
    return load_page_template().render(
        name=" against ".join(group.name for group in seed_groups),
        run=run,
        written=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        command=f"{command_prefix_with_extras(run.settings)} --config {recipe} --run-dir {copy}",
        status=(status, format_progress_and_time_left(run, status)),
        verdict=verdict,
        tone=verdict_css_class(verdict),
        facts=history.headline_facts(run, ended),
        name_of_first=run.name if len(seed_groups) > 1 else "",
        other_runs=[verdict_and_answers_for_page(group.runs[0]) for group in seed_groups[1:]],
        seeds=[
            *seeds.describe_spreads_and_differences(seed_groups),
            *paired.describe_paired_differences(seed_groups),
        ],
        shown=run.name if len(seed_groups[0].runs) > 1 else "",
        answers=held_out_answers_for_page(run),
        charts=curves,
        main=charts.MAIN,
        thinned=math.ceil(len(run.steps) / charts.MOST_POINTS),
        completions=completions,
        settings={
            name: escape_invisible_and_cut_middle(str(value))
            for name, value in run.settings.items()
        },
        plot=plot,
        data=data,
        css=(TEMPLATES / "report.css").read_text(encoding="utf-8"),
        script=script,
        script_hash=base64.b64encode(script_hash).decode(),
    )


def curve_values_for_hover(chart: dict[str, Any]) -> dict[str, Any]:
    """Returns the labels and values of a chart's curves, which appear under the mouse pointer."""
    series = []
    for curve in chart["series"]:
        series.append({"label": curve["label"], "x": curve["x"], "y": curve["y"]})
    return {"most": chart["most"], "series": series}


def verdict_css_class(verdict: Verdict | None) -> str:
    """Returns the verdict's CSS class, which is "good", "bad" or empty."""
    if verdict is None:
        return ""
    if verdict.outcome == WORSE:
        return "bad"
    return "good" if verdict.outcome == BETTER and not verdict.is_doubtful else ""


def verdict_and_answers_for_page(run: History) -> dict[str, Any]:
    """Returns what the page shows of another run: its verdict, figures and held-out answers."""
    verdict = reach_verdict_on_held_out_change(run)
    before, after = history.format_figure_before_after(run)
    return {
        "name": run.name,
        "verdict": verdict,
        "tone": verdict_css_class(verdict),
        "before": before,
        "after": after,
        "answers": held_out_answers_for_page(run),
    }


def escape_invisible_unless_markup(value: Any) -> Any:
    """Escapes the invisible characters of a value, unless the value is markup of the template."""
    return value if hasattr(value, "__html__") else escape_invisible(str(value))


@functools.cache  # a run writes its page many times
def load_page_template() -> jinja2.Template:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        finalize=escape_invisible_unless_markup,
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
    Writes the page of a run or of a directory with one run per seed, and returns the page's path.

    The page is `report.html` in `run_dir`, unless `out` names another file. A page that compares
    the run with `other_runs` is named after all of them and written beside the first run.

    ended: whether the process that owns the run has stopped training.
    """
    seed_groups = seeds.load_seed_groups([run_dir, *other_runs])
    if out:
        path = Path(out)
    elif other_runs:
        folder = Path(run_dir).resolve()
        names = dict.fromkeys([folder.name, *(Path(other).resolve().name for other in other_runs)])
        path = folder.parent / f"{'-against-'.join(names)[:100]}.html"
    else:
        path = Path(run_dir) / "report.html"
    with alive.show_activity("writing the page"):
        run_files.write_text_atomically(path, render_page(seed_groups, ended))
    return path


def open_page_in_browser(path: Path) -> None:
    """Opens a page in the default browser."""
    webbrowser.open(path.resolve().as_uri())


# ---- while the run goes on


class LivePage:
    """
    Rewrites the page of a run from time to time while the run goes on.

    Rewriting takes at most the fraction MOST_COST of the run's time. An error is reported only once
    and does not stop the run, because the run matters more than its page.
    """

    def __init__(self, run_dir: Path, report: Callable[[str], None]):
        self.dir = run_dir
        self.report = report
        self.failed = False
        self.due = 0.0  # the earliest time at which the page may be written again

    def write_if_due(self, at_the_end: bool = False) -> None:
        """Writes the page if enough time has passed since the last write, or if the run is over."""
        start = time.perf_counter()
        if self.failed or (start < self.due and not at_the_end):
            return
        run_files.refuse_replaced_run_dir(self.dir)
        try:
            write_page(self.dir, ended=at_the_end)
        except Exception as error:
            self.failed = True
            self.report(
                "WARNING: the run's page will not be written any more, because of this error: "
                f"{type(error).__name__}: {error}"
            )
        end = time.perf_counter()
        self.due = end + (end - start) / MOST_COST
