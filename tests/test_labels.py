"""A judge's scores against labels: numbers worked out by hand, and files that are none."""

import json

import numpy as np
import pandas as pd
import pytest

from judging import labels, rubrics

RUBRIC = rubrics.load_rubric("data/values_rubric.yaml")
LABEL = {"prompt": "q", "completion": "a", "criterion": "curiosity", "score": 3}


def table(scores, given, criteria=None):
    """The words of the table's lines for labels of these scores, of "curiosity" where no criteria are named."""
    names = criteria or ["curiosity"] * len(scores)
    known = pd.DataFrame({"prompt": "q", "completion": "a", "criterion": names, "score": scores})
    return [line.split() for line in labels.agreement_report(known, np.array(given)).splitlines()]


@pytest.mark.parametrize(
    ("scores", "given", "rank"),
    [
        ([1, 2, 3, 4], [1.0, 1.1, 4.9, 5.0], "1.000"),
        ([4, 3, 2, 1], [1.0, 1.1, 4.9, 5.0], "-1.000"),
        ([1, 1, 2, 3], [1.0, 2.0, 3.0, 3.0], "0.889"),  # ranks 1.5 1.5 3 4 and 1 2 3.5 3.5: 4 / 4.5
        ([1, 2, 3, 4], [3.0, 3.0, 3.0, 3.0], "nan"),
    ],
)
def test_the_rank_correlation_is_that_of_ranks_with_ties_shared(scores, given, rank):
    assert table(scores, given)[1][4] == rank


def test_the_table_counts_agreement_by_criterion_and_every_cell():
    rows = table(
        [1, 2, 3, 4, 5, 5], [1.4, 2.6, 3.2, np.nan, 4.5, 1.0], ["curiosity"] * 5 + ["nonsense"]
    )
    assert rows[1] == [
        "curiosity",
        "5",
        "60.0%",
        "80.0%",
        "1.000",
    ]  # 1, 3 and 5 the same; 2 was 3; 4 unreadable
    assert rows[2] == ["nonsense", "1", "0.0%", "0.0%", "nan"] and rows[3][:4] == [
        "all",
        "6",
        "50.0%",
        "66.7%",
    ]
    assert rows[5] == ["judged", *"12345", "unreadable"] and rows[6] == ["labelled"]
    assert ["".join(row) for row in rows[7:]] == [
        "1100000",
        "2001000",
        "3001000",
        "4000001",
        "5100010",
    ]


def test_the_forty_labels_of_the_values_rubric_can_be_read_and_use_the_whole_scale():
    known = labels.load_labels("data/values_labels.jsonl", RUBRIC)
    assert len(known) == 40
    for criterion in RUBRIC.criteria:
        assert {*known.score[known.criterion == criterion.name]} == {1, 2, 3, 4, 5}


@pytest.mark.parametrize(
    ("line", "said"),
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
def test_a_line_that_is_no_label_is_named(tmp_path, line, said):
    path = tmp_path / "labels.jsonl"
    path.write_text(f"{json.dumps(LABEL)}\n{line if isinstance(line, str) else json.dumps(line)}\n")
    with pytest.raises(ValueError, match=r"labels\.jsonl") as error:
        labels.load_labels(path, RUBRIC)
    assert said in str(error.value) and "\n" not in str(error.value)


def test_line_separators_in_a_text_blank_lines_and_a_byte_order_mark_are_no_mistakes(tmp_path):
    record = LABEL | {"prompt": "q\u2028\x85", "completion": "a\x1d\x0c"}
    line = json.dumps(record, ensure_ascii=False)
    for text in (line, f"{line}\n", f"\n{line}\r\n  \n\n", f"\ufeff{line}\n"):
        (tmp_path / "labels.jsonl").write_bytes(text.encode())
        assert labels.load_labels(tmp_path / "labels.jsonl", RUBRIC).to_dict("records") == [record]


def test_a_file_without_labels_is_refused(tmp_path):
    (tmp_path / "labels.jsonl").write_text("")
    with pytest.raises(ValueError, match="no labels"):
        labels.load_labels(tmp_path / "labels.jsonl", RUBRIC)
