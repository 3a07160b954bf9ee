"""
Loads labels, which are scores that people gave, and measures how well a judge agrees with them.

judge.py is the command that uses this file. judging/grader.py scores the answers.
"""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from judging.grader import Grader
from judging.rubrics import Rubric
from prompts.examples import shorten_value
from prompts.files import parse_jsonl_records
from text.documents import read_text

TEXTS = ("prompt", "completion", "criterion")
UNREADABLE = 6  # the confusion table's column for unreadable scores


def load_labels(path: str | Path, rubric: Rubric) -> pd.DataFrame:
    """
    Loads the labels in a JSONL file as a table with prompt, completion, criterion and score.

    Raises ValueError if the file has no labels, or if a line is invalid. The message names the
    line.
    """
    file_flag = f"--labels {path}"
    labels = []
    content = read_text(path, file_flag, 1000).encode()
    for line_name, record in parse_jsonl_records(file_flag, content):
        check_label(f"{file_flag}, {line_name}", record, rubric)
        labels.append(record)
    if not labels:
        raise ValueError(
            f"{file_flag} has no labels; add lines with prompt, completion, criterion and score"
        )
    return pd.DataFrame(labels)[[*TEXTS, "score"]]


def check_label(line_name: str, record: Any, rubric: Rubric) -> None:
    """
    Raises ValueError if a record is not a valid label for this rubric.

    line_name: the name of the record's line in the error message.
    """
    texts = [record.get(key) for key in TEXTS] if isinstance(record, dict) else [None]
    if not all(isinstance(text, str) for text in texts):
        raise ValueError(
            f"{line_name}: a label needs the strings prompt, completion and criterion, and a score"
        )
    if re.search("[\ud800-\udfff]", record["prompt"] + record["completion"]):
        raise ValueError(
            f"{line_name}: the text contains half of a surrogate pair, which is not a character; "
            "remove it"
        )
    names = [criterion.name for criterion in rubric.criteria]
    if record["criterion"] not in names:
        raise ValueError(
            f"{line_name}: the rubric has no criterion {record['criterion']!r:.60}; "
            f"its criteria are {', '.join(names)}"
        )
    score = record.get("score")
    if type(score) is not int or not 1 <= score <= 5:
        raise ValueError(
            f"{line_name}: the score is {shorten_value(score)}; write a whole number from 1 to 5"
        )


def agreement_report(labels: pd.DataFrame, judge_scores: np.ndarray) -> str:
    """
    A report that compares a judge's scores with human labels.

    The report lists agreement and Spearman's rank correlation for each criterion, followed by a
    confusion table. An unreadable score counts as disagreement, but is left out of the correlation.

    judge_scores: the judge's score for each row of `labels`; nan if the score is unreadable.
    """
    scores = labels.assign(judged=judge_scores, rounded=np.floor(judge_scores + 0.5))
    lines = [
        f"{'criterion':<24} {'labels':>6} {'the same':>9} {'within one':>10} "
        f"{'rank correlation':>16}"
    ]
    by_criterion = list(scores.groupby("criterion", sort=False))
    if len(by_criterion) > 1:
        lines += [format_agreement_line(name, rows) for name, rows in by_criterion]
    lines += [format_agreement_line("all", scores), "", confusion_table(scores).to_string()]
    return "\n".join(lines)


def format_agreement_line(row_name: str, scores: pd.DataFrame) -> str:
    """
    One line of the report, with the columns of the report's header.

    The columns are the name, the number of labels, the fraction of the judge's scores that equal
    the label, the fraction that differ by at most one, and the rank correlation.
    """
    difference = (scores.rounded - scores.score).abs()
    same = (difference == 0).mean()
    within_one = (difference <= 1).mean()
    correlations = scores[["judged", "score"]].corr("spearman")
    # nan if all labels are equal, or if all of the judge's scores are equal
    rank = correlations.iloc[0, 1]
    return f"{row_name:<24} {len(scores):>6} {same:>9.1%} {within_one:>10.1%} {rank:>16.3f}"


def confusion_table(scores: pd.DataFrame) -> pd.DataFrame:
    """
    A table of counts with a row for each label from 1 to 5 and a column for each judged score.

    The last column counts unreadable scores.
    """
    rounded = scores.rounded.fillna(UNREADABLE)
    counts = pd.crosstab(scores.score.rename("labelled"), rounded.rename("judged"))
    counts = counts.reindex(index=range(1, 6), columns=range(1, UNREADABLE + 1), fill_value=0)
    return counts.rename(columns={UNREADABLE: "unreadable"})


def judge_and_report_agreement(grader: Grader, labels: pd.DataFrame) -> str:
    """Lets a judge score the labelled answers. Returns a report that compares scores and labels."""
    names = [criterion.name for criterion in grader.rubric.criteria]
    columns = [names.index(name) for name in labels.criterion]
    scores = grader.score(list(labels.prompt), list(labels.completion)).scores
    return agreement_report(labels, scores[range(len(labels)), columns])
