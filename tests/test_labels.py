"""The agreement of a judge's scores with labels: numbers computed by hand, and faulty files."""

import json

import numpy as np
import pandas as pd
import pytest

from judging import labels, rubrics

RUBRIC = rubrics.load_rubric("data/values_rubric.yaml")
LABEL = {"prompt": "q", "completion": "a", "criterion": "curiosity", "score": 3}


def make_table(label_scores, judge_scores, criteria=None):
    """Returns the words of each line of the table. The default criterion is "curiosity"."""
    criteria = criteria or ["curiosity"] * len(label_scores)
    frame = pd.DataFrame(
        {"prompt": "q", "completion": "a", "criterion": criteria, "score": label_scores}
    )
    report = labels.agreement_report(frame, np.array(judge_scores))
    return [line.split() for line in report.splitlines()]


@pytest.mark.parametrize(
    ("label_scores", "judge_scores", "expected"),
    [
        ([1, 2, 3, 4], [1.0, 1.1, 4.9, 5.0], "1.000"),
        ([4, 3, 2, 1], [1.0, 1.1, 4.9, 5.0], "-1.000"),
        ([1, 1, 2, 3], [1.0, 2.0, 3.0, 3.0], "0.889"),  # ranks 1.5 1.5 3 4 and 1 2 3.5 3.5: 4 / 4.5
        ([1, 2, 3, 4], [3.0, 3.0, 3.0, 3.0], "nan"),
    ],
)
def test_tied_scores_share_a_rank_in_the_rank_correlation(label_scores, judge_scores, expected):
    assert make_table(label_scores, judge_scores)[1][4] == expected


def test_the_table_shows_the_agreement_on_each_criterion_and_counts_each_pair_of_scores():
    rows = make_table(
        [1, 2, 3, 4, 5, 5], [1.4, 2.6, 3.2, np.nan, 4.5, 1.0], ["curiosity"] * 5 + ["nonsense"]
    )
    # the judge agrees on 1, 3 and 5, gives 3 instead of 2, and is unreadable for 4
    assert rows[1] == ["curiosity", "5", "60.0%", "80.0%", "1.000"]
    assert rows[2] == ["nonsense", "1", "0.0%", "0.0%", "nan"]
    assert rows[3][:4] == ["all", "6", "50.0%", "66.7%"]
    assert rows[5] == ["judged", *"12345", "unreadable"]
    assert rows[6] == ["labelled"]
    counts = ["".join(row) for row in rows[7:]]
    assert counts == ["1100000", "2001000", "3001000", "4000001", "5100010"]


def test_the_forty_labels_of_the_values_rubric_use_every_score():
    frame = labels.load_labels("data/values_labels.jsonl", RUBRIC)
    assert len(frame) == 40
    for criterion in RUBRIC.criteria:
        assert {*frame.score[frame.criterion == criterion.name]} == {1, 2, 3, 4, 5}


@pytest.mark.parametrize(
    ("line", "expected_text"),
    [
        ("{", "line 2"),
        ("[]", "line 2: a label needs"),
        (LABEL | {"completion": 3}, "line 2: a label needs"),
        (LABEL | {"criterion": "beauty"}, "criterion 'beauty'"),
        (LABEL | {"completion": "\ud800"}, "surrogate"),
        (LABEL | {"score": 6}, "score is 6"),
        (LABEL | {"score": True}, "score is True"),
    ],
)
def test_the_error_for_a_faulty_label_names_the_line_or_the_mistake(tmp_path, line, expected_text):
    path = tmp_path / "labels.jsonl"
    text = line if isinstance(line, str) else json.dumps(line)
    path.write_text(f"{json.dumps(LABEL)}\n{text}\n")
    with pytest.raises(ValueError, match=r"labels\.jsonl") as error:
        labels.load_labels(path, RUBRIC)
    assert expected_text in str(error.value)
    assert "\n" not in str(error.value)


def test_line_separators_in_a_text_blank_lines_and_a_byte_order_mark_are_allowed(tmp_path):
    record = LABEL | {"prompt": "q\u2028\x85", "completion": "a\x1d\x0c"}
    line = json.dumps(record, ensure_ascii=False)
    for text in (line, f"{line}\n", f"\n{line}\r\n  \n\n", f"\ufeff{line}\n"):
        (tmp_path / "labels.jsonl").write_bytes(text.encode())
        assert labels.load_labels(tmp_path / "labels.jsonl", RUBRIC).to_dict("records") == [record]


def test_a_file_without_labels_is_refused(tmp_path):
    (tmp_path / "labels.jsonl").write_text("")
    with pytest.raises(ValueError, match="no labels"):
        labels.load_labels(tmp_path / "labels.jsonl", RUBRIC)
