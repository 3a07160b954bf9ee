"""
Human labels: loads scores that people gave, and measures how well a judge's scores agree.

The command is in judge.py. How a judge scores is in judging/rubrics.py.
"""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from judging.rubrics import Grader, Rubric
from prompts.examples import shorten_value
from prompts.files import jsonl_records
from text.documents import read_text

TEXTS = ("prompt", "completion", "criterion")
UNREADABLE = 6  # stands for an unreadable score in the confusion table


def load_labels(path: str | Path, rubric: Rubric) -> pd.DataFrame:
    """
    The labels of a JSONL file, one a row: prompt, completion, criterion and score.

    Raises ValueError if the file has no label, or an invalid line, which the message names.
    """
    file_flag = f"--labels {path}"
    labels = []
    for place, record in jsonl_records(file_flag, read_text(path, file_flag, 1000).encode()):
        check_label(f"{file_flag}, {place}", record, rubric)
        labels.append(record)
    if not labels:
        raise ValueError(f"{file_flag} holds no label")
    return pd.DataFrame(labels)[[*TEXTS, "score"]]


def check_label(line_name: str, record: Any, rubric: Rubric) -> None:
    """
    Raises ValueError if a record is no label for this rubric.

    line_name: the name of the record's line in the message.
    """
    texts = [record.get(key) for key in TEXTS] if isinstance(record, dict) else [None]
    if not all(isinstance(text, str) for text in texts):
        raise ValueError(
            f"{line_name}: it needs the texts prompt, completion and criterion, and a score"
        )
    if re.search("[\ud800-\udfff]", record["prompt"] + record["completion"]):
        raise ValueError(
            f"{line_name}: it holds half of a surrogate pair, which is no character; remove it"
        )
    names = [criterion.name for criterion in rubric.criteria]
    if record["criterion"] not in names:
        raise ValueError(
            f"{line_name}: criterion {record['criterion']!r:.60}; "
            f"the rubric's are {', '.join(names)}"
        )
    score = record.get("score")
    if type(score) is not int or not 1 <= score <= 5:
        raise ValueError(
            f"{line_name}: score {shorten_value(score)}; it must be a whole number from 1 to 5"
        )


def agreement_report(labels: pd.DataFrame, judged: np.ndarray) -> str:
    """
    A report that compares a judge's scores (nan: unreadable) with the labels of the same rows.

    The report has agreement and rank correlation for each criterion, and then a confusion table. An
    unreadable score counts as disagreement, but Spearman's rank correlation leaves it out.
    """
    scores = labels.assign(judged=judged, rounded=np.floor(judged + 0.5))
    lines = [
        f"{'criterion':<24} {'labels':>6} {'the same':>9} {'within one':>10} "
        f"{'rank correlation':>16}"
    ]
    by_criterion = list(scores.groupby("criterion", sort=False))
    if len(by_criterion) > 1:
        lines += [agreement_line(name, rows) for name, rows in by_criterion]
    lines += [agreement_line("all", scores), "", confusion_table(scores).to_string()]
    return "\n".join(lines)


def agreement_line(name: str, scores: pd.DataFrame) -> str:
    """One row of the report: name, labels, the same, within one, rank correlation."""
    difference = (scores.rounded - scores.score).abs()
    same = (difference == 0).mean()
    within_one = (difference <= 1).mean()
    correlations = scores[["judged", "score"]].corr("spearman")
    rank = correlations.iloc[0, 1]  # nan if all scores of either are equal
    return f"{name:<24} {len(scores):>6} {same:>9.1%} {within_one:>10.1%} {rank:>16.3f}"


def confusion_table(scores: pd.DataFrame) -> pd.DataFrame:
    """How often each label (rows) coincides with each of the judge's scores (columns)."""
    rounded = scores.rounded.fillna(UNREADABLE)
    counts = pd.crosstab(scores.score.rename("labelled"), rounded.rename("judged"))
    counts = counts.reindex(index=range(1, 6), columns=range(1, UNREADABLE + 1), fill_value=0)
    return counts.rename(columns={UNREADABLE: "unreadable"})


def judge_labels(grader: Grader, labels: pd.DataFrame) -> str:
    """The report on the scores that a judge gives to the labelled answers."""
    names = [criterion.name for criterion in grader.rubric.criteria]
    columns = [names.index(name) for name in labels.criterion]
    scores = grader.score(list(labels.prompt), list(labels.completion)).scores
    return agreement_report(labels, scores[range(len(labels)), columns])
