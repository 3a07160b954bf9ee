"""Human labels: scores that people gave, and how well a judge's scores agree with them."""

import re
from pathlib import Path

import numpy as np
import pandas as pd

from flags import read_text
from judging.rubrics import Grader, Rubric
from problems.examples import shorten_value
from problems.files import jsonl_records

TEXTS = "prompt", "completion", "criterion"


def load_labels(path: str | Path, rubric: Rubric) -> pd.DataFrame:
    """The labels of a JSONL file: the scores of answers, each on one criterion. ValueError names an invalid line."""
    names, spec = [criterion.name for criterion in rubric.criteria], f"--labels {path}"
    labels = []
    for place, record in jsonl_records(spec, read_text(path, spec, 1000).encode()):
        where = f"{spec}, {place}"
        if not isinstance(record, dict) or not all(
            isinstance(record.get(key), str) for key in TEXTS
        ):
            raise ValueError(
                f"{where}: it needs the texts prompt, completion and criterion, and a score"
            )
        if re.search("[\ud800-\udfff]", record["prompt"] + record["completion"]):
            raise ValueError(
                f"{where}: it holds half of a surrogate pair, which is no character; remove it"
            )
        if record["criterion"] not in names:
            raise ValueError(
                f"{where}: criterion {record['criterion']!r:.60}; the rubric's are {', '.join(names)}"
            )
        if type(record.get("score")) is not int or not 1 <= record["score"] <= 5:
            raise ValueError(
                f"{where}: score {shorten_value(record.get('score'))}; it must be a whole number from 1 to 5"
            )
        labels.append(record)
    if not labels:
        raise ValueError(f"{spec} holds no label")
    return pd.DataFrame(labels)[[*TEXTS, "score"]]


def compare_scores(labels: pd.DataFrame, given: np.ndarray) -> str:
    """
    Compares the scores `given` (nan: unreadable) with the labels: agreement, rank correlation, confusion table.

    An unreadable score counts as disagreement; Spearman's rank correlation leaves it out.
    """
    scores = labels.assign(given=given, rounded=np.floor(given + 0.5))

    def line(name: str, part: pd.DataFrame) -> str:
        off = (part.rounded - part.score).abs()
        rank = (
            part[["given", "score"]].corr("spearman").iloc[0, 1]
        )  # nan if all of either are equal
        return f"{name:<24} {len(part):>6} {(off == 0).mean():>9.1%} {(off <= 1).mean():>10.1%} {rank:>16.3f}"

    out = [
        f"{'criterion':<24} {'labels':>6} {'the same':>9} {'within one':>10} {'rank correlation':>16}"
    ]
    parts = list(scores.groupby("criterion", sort=False))
    out += [line(name, part) for name, part in parts] if len(parts) > 1 else []
    cells = pd.crosstab(scores.score.rename("labelled"), scores.rounded.fillna(6).rename("judged"))
    cells = cells.reindex(index=range(1, 6), columns=range(1, 7), fill_value=0).rename(
        columns={6: "unreadable"}
    )
    return "\n".join([*out, line("all", scores), "", cells.to_string()])


def judge_labels(grader: Grader, labels: pd.DataFrame) -> str:
    """The table of the scores that a judge gives to the labelled answers."""
    columns = [criterion.name for criterion in grader.rubric.criteria]
    scores = grader.score(list(labels.prompt), list(labels.completion)).scores
    return compare_scores(
        labels, scores[range(len(labels)), list(map(columns.index, labels.criterion))]
    )
