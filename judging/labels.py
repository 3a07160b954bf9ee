"""Human labels: scores that people gave, and how well a judge's scores agree with them."""

import math
import re
from pathlib import Path
from typing import NamedTuple

import numpy as np

from flags import read_text
from judging.rubrics import Grader, Rubric
from problems.examples import jsonl_records, short


class Label(NamedTuple):
    """A person's score of an answer on one criterion."""

    prompt: str
    completion: str
    criterion: str
    score: int


def load(path: str | Path, rubric: Rubric) -> list[Label]:
    """The labels of a JSONL file. Raises ValueError naming an invalid line."""
    names, spec = [criterion.name for criterion in rubric.criteria], f"--labels {path}"
    labels = []
    for place, record in jsonl_records(spec, read_text(path, spec, 1000).encode()):
        where = f"{spec}, {place}"
        if not isinstance(record, dict) or not all(isinstance(record.get(key), str) for key in Label._fields[:3]):
            raise ValueError(f"{where}: it needs the texts prompt, completion and criterion, and a score")
        if re.search("[\ud800-\udfff]", record["prompt"] + record["completion"]):
            raise ValueError(f"{where}: it holds half of a surrogate pair, which is no character; remove it")
        if record["criterion"] not in names:
            raise ValueError(f"{where}: criterion {record['criterion']!r:.60}; the rubric's are {', '.join(names)}")
        if type(record.get("score")) is not int or not 1 <= record["score"] <= 5:
            raise ValueError(f"{where}: score {short(record.get('score'))}; it must be a whole number from 1 to 5")
        labels.append(Label(*(record[key] for key in Label._fields)))
    if not labels:
        raise ValueError(f"{spec} holds no label")
    return labels


def rank_correlation(x: np.ndarray, y: np.ndarray) -> float:
    """Spearman's rank correlation; ties get their mean rank; nan if all values of x or of y are equal."""

    def ranks(values: np.ndarray) -> np.ndarray:
        _, place, count = np.unique(values, return_inverse=True, return_counts=True)
        return (np.cumsum(count) - (count - 1) / 2)[place]

    x, y = ranks(x) - (len(x) + 1) / 2, ranks(y) - (len(y) + 1) / 2
    norm = math.sqrt((x @ x) * (y @ y))
    return float(x @ y) / norm if norm else math.nan


def table(labels: list[Label], given: np.ndarray) -> str:
    """
    Compares the scores `given` (nan: unreadable) with the labels: agreement, rank correlation, confusion table.

    An unreadable score counts as disagreement; the rank correlation leaves it out.
    """
    wanted = np.array([label.score for label in labels])
    rounded = np.floor(given + 0.5)
    readable = ~np.isnan(given)

    def line(name: str, part: np.ndarray) -> str:
        same, near = (rounded == wanted)[part].mean(), (np.abs(rounded - wanted) <= 1)[part].mean()
        rank = rank_correlation(given[part & readable], wanted[part & readable])
        return f"{name:<24} {part.sum():>6} {same:>9.1%} {near:>10.1%} {rank:>16.3f}"

    names = list(dict.fromkeys(label.criterion for label in labels))
    by_name = np.array([names.index(label.criterion) for label in labels])
    out = [f"{'criterion':<24} {'labels':>6} {'the same':>9} {'within one':>10} {'rank correlation':>16}"]
    out += [line(name, by_name == index) for index, name in enumerate(names)] if len(names) > 1 else []
    out += [line("all", np.ones(len(labels), bool)), ""]
    out += ["labelled  judged 1     2     3     4     5  unreadable"]
    for score in range(1, 6):
        cells = [int(((rounded == judged) & (wanted == score)).sum()) for judged in range(1, 6)]
        unread = int((~readable & (wanted == score)).sum())
        out.append(f"{score:>8}  {cells[0]:>8}" + "".join(f"{count:>6}" for count in cells[1:]) + f"{unread:>12}")
    return "\n".join(out)


def compare(grader: Grader, labels: list[Label]) -> str:
    """The table of the scores that a judge gives to the labelled answers."""
    columns = [criterion.name for criterion in grader.rubric.criteria]
    scores = grader.score([label.prompt for label in labels], [label.completion for label in labels]).scores
    given = [scores[row, columns.index(label.criterion)] for row, label in enumerate(labels)]
    return table(labels, np.array(given))
