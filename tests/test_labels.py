"""A judge's scores against labels: numbers worked out by hand, and files that are none."""

import json

import numpy as np
import pytest

from judging import labels, rubrics

RUBRIC = rubrics.load_rubric("data/values_rubric.yaml")


def scored(*scores, criterion="curiosity"):
    return [labels.Label("q", "a", criterion, score) for score in scores]


def test_the_rank_correlation_is_that_of_ranks_with_ties_shared():
    x, y = np.array([1.0, 2.0, 3.0, 4.0]), np.array([10.0, 100.0, 1000.0, 1001.0])
    assert labels.rank_correlation(x, y) == pytest.approx(1)
    assert labels.rank_correlation(x, -y) == pytest.approx(-1)
    # ranks 1.5 1.5 3 4 against 1 2 3.5 3.5: product 4, squares 4.5 and 4.5
    assert labels.rank_correlation(np.array([1, 1, 2, 3.0]), np.array([1, 2, 3, 3.0])) == pytest.approx(4 / 4.5)
    assert np.isnan(labels.rank_correlation(x, np.ones(4)))


def test_the_table_counts_agreement_by_criterion_and_every_cell():
    given = np.array([1.4, 2.6, 3.2, np.nan, 4.5, 1.0])
    table = labels.table([*scored(1, 2, 3, 4, 5), *scored(5, criterion="nonsense")], given)
    rows = [line.split() for line in table.splitlines()]
    assert rows[1][:4] == ["curiosity", "5", "60.0%", "80.0%"]  # 1, 3 and 5 the same; 2 was 3; 4 unreadable
    assert rows[1][4] == "1.000" and rows[2] == ["nonsense", "1", "0.0%", "0.0%", "nan"]
    assert rows[3][:4] == ["all", "6", "50.0%", "66.7%"]
    cells = [[int(count) for count in row] for row in rows[6:]]
    assert cells == [
        [1, 1, 0, 0, 0, 0, 0],
        [2, 0, 0, 1, 0, 0, 0],
        [3, 0, 0, 1, 0, 0, 0],
        [4, 0, 0, 0, 0, 0, 1],
        [5, 1, 0, 0, 0, 1, 0],
    ]


def test_the_forty_labels_of_the_values_rubric_can_be_read_and_use_the_whole_scale():
    known = labels.load("data/values_labels.jsonl", RUBRIC)
    assert len(known) == 40
    for criterion in RUBRIC.criteria:
        assert {label.score for label in known if label.criterion == criterion.name} == {1, 2, 3, 4, 5}


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "line 2: not JSON"),
        ("[]", "line 2: it needs the texts"),
        ('{"prompt": "q", "completion": 3, "criterion": "curiosity", "score": 3}', "line 2: it needs the texts"),
        (
            '{"prompt": "q", "completion": "a", "criterion": "beauty", "score": 3}',
            "criterion 'beauty'; the rubric's are",
        ),
        ('{"prompt": "q", "completion": "\\ud800", "criterion": "scrutiny", "score": 3}', "line 2: it holds half of a"),
        ('{"prompt": "q", "completion": "a", "criterion": "scrutiny", "score": 6}', "score 6; it must be"),
        ('{"prompt": "q", "completion": "a", "criterion": "scrutiny", "score": true}', "score True; it must be"),
    ],
)
def test_a_line_that_is_no_label_is_named(tmp_path, line, said):
    path = tmp_path / "labels.jsonl"
    path.write_text('{"prompt": "q", "completion": "a", "criterion": "curiosity", "score": 3}\n' + line + "\n")
    with pytest.raises(ValueError, match=r"labels\.jsonl") as error:
        labels.load(path, RUBRIC)
    assert said in str(error.value) and "\n" not in str(error.value)


def test_line_separators_in_a_text_blank_lines_and_a_byte_order_mark_are_no_mistakes(tmp_path):
    record = {"prompt": "q\u2028\x85", "completion": "a\x1d\x0c", "criterion": "curiosity", "score": 3}
    line = json.dumps(record, ensure_ascii=False)
    for text in (line, f"{line}\n", f"\n{line}\r\n  \n\n", f"\ufeff{line}\n"):
        (tmp_path / "labels.jsonl").write_bytes(text.encode())
        assert [label._asdict() for label in labels.load(tmp_path / "labels.jsonl", RUBRIC)] == [record]


def test_a_file_without_labels_is_refused(tmp_path):
    (tmp_path / "labels.jsonl").write_text("")
    for name in ("labels.jsonl", "nowhere.jsonl"):
        with pytest.raises(ValueError, match=name):
            labels.load(tmp_path / name, RUBRIC)
