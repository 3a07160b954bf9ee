"""
The page of a run, `report.html`: one file that needs no server and no network, made from `templates/`.

Held-out answers stand on the first screen: a reward that is cheated has good numbers and odd answers. Text of prompts,
completions and settings is hostile: the template escapes it, `visible` shows what a browser would obey, and the page's
policy lets no script run but ours. Reading a run is in history.py, its curves are in charts.py.
"""

import base64
import contextlib
import functools
import hashlib
import json
import math
import re
import shlex
import time
import webbrowser
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import jinja2
import numpy as np

from disk import hub, run_files
from flags import visible
from judging import rubrics
from machine import alive
from problems.examples import spread
from reporting import charts, history, seeds
from reporting.history import MOST_TEXT, History, changes, fold, optional_text, prompt_text
from reporting.seeds import Setting

TEMPLATES = Path(__file__).parent / "templates"
MOST_COMPLETIONS = 2_500_000  # characters of JSON, a third of them log-probabilities
MOST_ANSWERS = 1_000_000  # characters of held-out answers
ALARMING = 0.05  # share of the last answers that are wrong and get the most a reward gives
NUM_FIRST = 6  # problems on the first screen
CHEATED = "wrong, yet paid most"  # where that is alarmingly often, these stand first
MOST_COST = 0.01  # of a run's time, for all of its pages but the last

# ---- held-out answers


def make_answers(run: History) -> dict[str, Any]:
    """Held-out problems with their answers before, during and after training, and how many went which way."""
    by_step: dict[int, dict[int, dict[str, Any]]] = {}  # step -> problem -> its answer
    for record in history.records(run.dir / "eval_answers.jsonl"):
        by_step.setdefault(record["step"], {})[record["problem"]] = record
    if not by_step:
        return {"rows": [], "first": [], "columns": [], "counts": {}, "left_out": 0, "paid": []}
    steps = sorted(by_step)
    chosen = sorted({steps[0], steps[len(steps) // 2], steps[-1]})
    verified = history.figure_of(run)[0] == "accuracy"
    problems = sorted(set.intersection(*(set(by_step[step]) for step in chosen)))
    rows = [answer_row([by_step[step][problem] for step in chosen], verified) for problem in problems]
    metrics = {name for name, weight in (run.settings.get("reward_weights") or {}).items() if not weight}
    paid = paid_though_wrong(by_step, chosen, metrics) if verified else []
    for row in rows:
        last = row["cells"][-1]
        if last["right"] is False and any(last["rewards"].get(one["name"]) == one["most"] for one in paid):
            row["kind"] = CHEATED
    counts = Counter(row["kind"] for row in rows)
    size = sum(len(cell["text"]) for row in rows for cell in row["cells"]) + 1
    shown = spread(rows, max(NUM_FIRST, int(len(rows) * MOST_ANSWERS / size)))
    names = {steps[-1]: f"after step {steps[-1]}, the last evaluation", 0: "before training"}
    return {
        "rows": shown,
        "first": first_rows(shown, counts),
        "columns": [names.get(step, f"after step {step}") for step in chosen],
        "counts": dict(counts.most_common()),
        "left_out": len(rows) - len(shown),
        "paid": paid,
    }


def answer_row(details: list[dict[str, Any]], verified: bool) -> dict[str, Any]:
    """One problem: its records of some evaluations side by side, what differs from the first marked."""
    cells: list[dict[str, Any]] = []
    for detail in details:
        value, text = detail["values"][0], fold(detail["completions"][0])
        cells.append(
            {
                "text": text,
                "pieces": changes(cells[0]["text"], text) if cells else [(text, False)],
                "value": value,
                "right": value >= 1.0 if verified and value is not None else None,
                "rewards": {visible(name): values[0] for name, values in detail["rewards"].items()},
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


def kind_of(first: float | None, last: float | None, verified: bool) -> str:
    """How an answer went from the first evaluation to the last."""
    if first is None or last is None:
        return "unreadable"
    if verified:
        return f"{'stayed' if (first >= 1) == (last >= 1) else 'became'} {'right' if last >= 1 else 'wrong'}"
    return "rose" if last > first else "fell" if last < first else "stayed"


def first_rows(rows: list[dict[str, Any]], counts: Counter[str]) -> list[dict[str, Any]]:
    """The problems of the first screen: of each kind one, then the kind that is least represented for its number."""
    waiting = {kind: [row for row in rows if row["kind"] == kind] for kind, _ in counts.most_common()}
    taken: dict[str, list[dict[str, Any]]] = {kind: [] for kind in waiting}
    while sum(map(len, taken.values())) < NUM_FIRST and any(waiting.values()):
        kind = max((k for k in waiting if waiting[k]), key=lambda k: counts[k] / (len(taken[k]) or 1e-9))
        taken[kind].append(waiting[kind].pop(0))
    return [row for kind in sorted(taken, key=lambda kind: kind != CHEATED) for row in taken[kind]]


def paid_though_wrong(
    by_step: dict[int, dict[int, dict[str, Any]]], chosen: list[int], metrics: Collection[str] = ()
) -> list[dict[str, Any]]:
    """
    Of each training reward, how many wrong answers got the most it ever gave, at the first and last evaluation.

    metrics: the rewards of weight 0.
    """

    def given(step: int, name: str) -> list[tuple[Any, bool]]:
        """What each answer got, and whether it is wrong."""
        details = by_step[step].values()
        return [(d["rewards"].get(name, [None])[0], d["values"][0] is not None and d["values"][0] < 1) for d in details]

    found = []
    for name in (name for name in next(iter(by_step[chosen[0]].values()))["rewards"] if name not in metrics):
        values = {value for step in by_step for value, _ in given(step, name) if value is not None}
        if len(values) > 1:
            before, after = (given(step, name).count((max(values), True)) for step in (chosen[0], chosen[-1]))
            one = {"name": visible(name), "num": len(by_step[chosen[-1]]), "most": max(values)}
            found.append(one | {"before": before, "after": after})
    return [one for one in found if one["after"] >= ALARMING * one["num"]]


# ---- completions

Place = tuple[int, int]  # step and group
_PLACE = re.compile(rb'\{"step": (\d+), "group": (\d+),')


def lines_of(path: Path) -> Iterator[tuple[Place, bytes]]:
    """The whole lines of `rollouts.jsonl` with their places, as they are read."""
    if path.is_file():
        with path.open("rb") as file:
            for line in file:
                if line.endswith(b"\n") and (match := _PLACE.match(line)):
                    yield (int(match[1]), int(match[2])), line


def make_completions(run: History) -> dict[str, Any]:
    """Whole groups of training completions within `MOST_COMPLETIONS`, of steps that are evenly spread."""
    path, decode = run.dir / "rollouts.jsonl", token_decoder(run)
    sizes: Counter[Place] = Counter()
    for place, line in lines_of(path):
        sizes[place] += len(line)
    # a completion takes about as much room in the page as its line; the exact size is known once it is made
    most = max(1, min(len(sizes), len(sizes) * MOST_COMPLETIONS // max(1, sizes.total())))
    while True:
        chosen: dict[Place, list[dict[str, Any]]] = {place: [] for place in choose_groups(list(sizes), most)}
        for place, line in lines_of(path):
            if place in chosen:
                chosen[place].append(json.loads(line))
        groups = [make_group(*place, lines, decode) for place, lines in sorted(chosen.items())]
        size = sum(len(json.dumps(group)) for group in groups)
        if size <= MOST_COMPLETIONS or len(groups) <= 1:
            break
        most = max(1, int(len(groups) * MOST_COMPLETIONS / size * 0.95))
    num_steps = len({step for step, _ in sizes})
    return {"groups": groups, "of": len(sizes), "steps": num_steps, "criteria": criteria(run, groups)}


def choose_groups(places: list[Place], most: int) -> list[Place]:
    """At most so many groups: as many of each step, and where that is less than one, of fewer steps."""
    steps = spread(sorted({step for step, _ in places}), most)
    each = max(1, most // max(1, len(steps)))
    return [place for step in steps for place in spread(sorted(p for p in places if p[0] == step), each)]


def make_group(step: int, group: int, lines: list[dict[str, Any]], decode: Any) -> dict[str, Any]:
    """One group: its prompt once, its completions by descending advantage."""
    lines.sort(key=lambda line: -math.inf if line.get("advantage") is None else -line["advantage"])
    return {
        "step": step,
        "group": group,
        "prompt": prompt_text(lines[0]["prompt"]),
        "answer": optional_text(lines[0].get("answer")),
        "category": optional_text(lines[0].get("category")),
        "rows": [make_row(line, decode) for line in lines],
    }


def make_row(line: dict[str, Any], decode: Any) -> dict[str, Any]:
    """One completion: its text, whole or in tokens with their log-probabilities, and what it earned."""
    row: dict[str, Any] = {"text": fold(line["completion"])}
    if decode is not None and len(line["completion"]) <= MOST_TEXT:
        ids, pieces, told, last = line["ids"], list[tuple[str, int]](), list[tuple[int, str]](), 0
        for begin, end in line.get("own") or [[0, len(ids)]]:  # of a conversation, what the model wrote
            if last < begin:
                told.append((len(pieces), fold("".join(text for text, _ in decode(ids[last:begin])))))
            pieces, last = pieces + decode(ids[begin:end]), end
        ends = np.cumsum([number for _, number in pieces]).astype(int)
        row = {"tokens": [visible(text) for text, _ in pieces]} | ({"told": told} if told else {})
        row["logprobs"] = summed(line["logprobs"], ends)
    scores, values = line.get("judge_scores") or [], line["rewards"].values()

    def short(value: float | None, digits: int) -> float | None:
        return None if value is None else round(value, digits)

    return row | {
        "advantage": short(line.get("advantage"), 3),
        "reward": short(line["reward"], 4),
        "rewards": {visible(name): short(value, 4) for name, value in line["rewards"].items()},
        "scores": [short(score, 2) for score in scores],
        "finish": visible(str(line["finish_reason"])),
        "unreadable": None in (line["reward"], *values, *scores),
    }


def summed(packed: str, ends: np.ndarray) -> list[float]:
    """What a run recorded of each token, summed over the tokens of each piece, which end at `ends`."""
    values = np.nan_to_num(np.frombuffer(base64.b64decode(packed), "<f2").astype(np.float64))
    totals = np.concatenate([[0.0], np.cumsum(values)])[np.concatenate([[0], ends])]
    return [round(value, 2) for value in np.diff(totals).tolist()]


def token_decoder(run: History) -> Any:
    """
    A function from ids to (text, number of ids) pieces, None where the run's tokenizer is not on this machine.

    A character that several tokens spell is one piece. The library `tokenizers` loads in a tenth of a second what
    transformers takes seconds for.
    """
    path = tokenizer_file(run.settings["model"])
    if path is None or not path.is_file():
        return None
    from tokenizers import Tokenizer  # here: a page without completions does without

    tokenizer = Tokenizer.from_file(str(path))
    text_of = functools.cache(lambda ids: tokenizer.decode(list(ids), skip_special_tokens=False))

    def decode(ids: list[int]) -> list[tuple[str, int]]:
        pieces, begin = [], 0
        for end in range(1, len(ids) + 1):
            text = text_of(tuple(ids[begin:end]))
            # an unfinished character decodes to U+FFFD; none takes more than four tokens
            if not text.endswith("\ufffd") or end - begin == 4 or end == len(ids):
                pieces.append((text, end - begin))
                begin = end
        return pieces

    return decode


def tokenizer_file(model: str) -> Path | None:
    """The tokenizer of a model that is on this machine already; the network is not asked."""
    if model in hub.BUNDLED or model.startswith("random:") or Path(model).is_dir():
        return hub.BUNDLED.get(model, hub.DEMO if model.startswith("random:") else Path(model)) / "tokenizer.json"
    if hub.is_gguf(model):
        with contextlib.suppress(ValueError):  # its package, or its file, is not here
            return hub.find(model) / "tokenizer.json"
        return None
    if model.count("/") != 1:
        return None
    from huggingface_hub import try_to_load_from_cache

    repo, _, revision = model.partition("@")
    path = try_to_load_from_cache(repo, "tokenizer.json", revision=revision or None)
    return Path(path) if isinstance(path, str) else None


def criteria(run: History, groups: list[dict[str, Any]]) -> list[str]:
    """Names of the judge's criteria in the order of its scores; numbers where the rubric is gone or another now."""
    number = max((len(row["scores"]) for group in groups for row in group["rows"]), default=0)
    bundled = Path(__file__).parent.parent / "data" / f"{run.settings.get('task')}_rubric.yaml"
    path = Path(run.settings.get("rubric") or bundled)
    names = [visible(one.name) for one in rubrics.load_rubric(path).criteria] if number and path.is_file() else []
    return names if len(names) == number else [f"criterion {index + 1}" for index in range(number)]


# ---- the page


def page(settings: list[Setting], ended: bool = False) -> str:
    """The HTML of the first run, with the curves of all seeds and settings. ended: see `history.state`."""
    run, curves, script = settings[0].runs[0], charts.make_charts(settings), (TEMPLATES / "report.js").read_text()
    completions = make_completions(run)
    plot = {name: getattr(charts, name.upper()) for name in ("width", "height", "left", "right", "top", "bottom")}
    series = [[{key: one[key] for key in ("label", "x", "s", "y")} for one in chart["series"]] for chart in curves]
    pointed = [{"most": chart["most"], "series": its} for chart, its in zip(curves, series, strict=True)]
    recipe, again = shlex.quote(str(run.dir / "config.yaml")), shlex.quote(f"{run.dir}-again")
    return template().render(
        name=visible(" against ".join(setting.name for setting in settings)),
        task=visible(str(run.settings.get("task", "?"))),
        model=visible(str(run.settings["model"])),
        written=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        command=visible(f"uv run train.py --config {recipe} --run-dir {again}"),
        facts=history.facts(run, ended),
        others=[(visible(name), *history.before_after(runs[0])) for name, runs in settings[1:] if len(runs) == 1],
        seeds=seeds.lines(settings),
        shown=visible(run.name) if len(settings[0].runs) > 1 else "",
        answers=make_answers(run),
        charts=curves,
        unclipped=bool(run.steps) and run.steps[-1].get("clip_frac") is not None and not charts.clips(settings),
        thinned=-(-len(run.steps) // charts.MOST_POINTS),
        completions=completions,
        warnings=[visible_values(record) for record in run.warnings],
        changes=[visible_values(record) for record in run.changes],
        env=visible_values(run.env),
        settings={visible(str(name)): fold(str(value)) for name, value in run.settings.items()},
        plot=plot,
        data={"charts": pointed, "completions": completions, "plot": plot},
        css=(TEMPLATES / "report.css").read_text(),
        script=script,
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    )


@functools.cache  # a run writes its page again and again
def template() -> jinja2.Template:
    how: Any = {"autoescape": True, "undefined": jinja2.StrictUndefined, "trim_blocks": True, "lstrip_blocks": True}
    environment = jinja2.Environment(loader=jinja2.FileSystemLoader(TEMPLATES), **how)
    environment.policies["json.dumps_kwargs"] = {"sort_keys": False}  # rewards in their own order
    return environment.get_template("report.html.j2")


def visible_values(record: dict[str, Any]) -> dict[str, str]:
    return {name: visible(str(value)) for name, value in record.items()}


def write(run_dir: str | Path, out: str | Path | None = None, others: Sequence[str] = (), ended: bool = False) -> Path:
    """
    Writes the page of a run or of a directory of seeds to `report.html` there, unless `out` names another file; where
    it lies. With others, it lies beside the first and is named after all of them.
    """
    settings, folder = seeds.load([run_dir, *others]), Path(run_dir).resolve()
    names = dict.fromkeys([folder.name, *(Path(other).resolve().name for other in others)])
    beside = folder.parent / f"{'-against-'.join(names)[:100]}.html"
    path = Path(out) if out else beside if others else Path(run_dir) / "report.html"
    with alive.doing("writing the page"):
        run_files.replace_text(path, page(settings, ended))
    return path


def show(path: Path) -> None:
    """Opens a page in the user's browser."""
    webbrowser.open(path.resolve().as_uri())


# ---- while the run goes


class LivePage:
    """
    The page of a run that is going on, put off while its pages have taken over `MOST_COST` of the run's time.

    What goes wrong is told once and stops nothing: the run is worth more than its page.
    """

    def __init__(self, run_dir: Path, tell: Callable[[str], None]):
        self.dir, self.tell = run_dir, tell
        self.begin = time.perf_counter()
        self.spent = self.last = 0.0  # seconds of all pages, and of the last one
        self.waiting = self.failed = False

    def update(self, due: bool, at_the_end: bool = False) -> None:
        """Writes the page if it is due, or was and had to wait; at the end in any case."""
        begin = time.perf_counter()
        self.waiting |= due
        is_cheap = self.spent + self.last <= MOST_COST * (begin - self.begin)
        if self.failed or not (at_the_end or (self.waiting and is_cheap)):
            return
        run_files.refuse_replaced(self.dir)
        try:
            write(self.dir, ended=at_the_end)
        except Exception as error:
            self.failed = True
            self.tell(f"WARNING: the page of the run is not written any more: {type(error).__name__}: {error}")
        self.last = time.perf_counter() - begin
        self.spent, self.waiting = self.spent + self.last, False
