"""The demo's verifier and its audit: what is true of an answer, told by two readers that share no code."""

from pathlib import Path

import pytest
from conftest import read_log

from bench import answers as audit
from tasks import demo as sums
from tasks.demo import number_words, numbers_in

ASKED = "What is twenty-seven plus fifteen?"
READ = [  # answer, whether its last number is the sum, whether it is right
    ("Twenty-seven plus fifteen is forty-two.", True, True),
    ("15 + 27 = 42", True, True),
    ("The answer is forty-two", True, True),
    ("Forty-two.", True, True),
    ("Twenty-seven plus twenty is forty-two.", True, False),
    ("Twenty-two plus twenty is forty-two.", True, False),  # true, of another problem
    ("Twenty-seven is forty-two.", True, False),
    ("Twenty-seven minus fifteen is forty-two.", True, False),
    ("Twenty-seven is fifteen plus forty-two.", True, False),
    ("Fifteen plus fifteen plus twenty-seven is forty-two.", True, False),
    ("Twenty-seven fifteen is forty-two.", True, False),
    ("Twenty-seven plus is forty-two.", True, False),
    ("The answer is not forty-two.", True, False),
    ("Twenty-seven plus fifteen is thirty-two. The answer is forty-two.", True, False),
    ("Twenty-seven plus fifteen is thirty-two.", False, False),
    ("Twenty-seven plus fifteen is-two.", False, False),
    ("Forty-two-five.", False, False),
    ("", False, False),
]


@pytest.mark.parametrize(("answer", "ends_right", "right"), READ, ids=lambda value: repr(value)[:60])
def test_the_audits_reader_and_the_verifier_agree_though_they_share_no_code(answer, ends_right, right):
    reading = audit.read(ASKED, answer)
    assert (reading.ends_right, reading.right) == (ends_right, right)
    assert sums.correct([ASKED], [answer], ["forty-two"]) == [right]


def test_the_audits_reader_forgives_a_stammer_and_the_verifier_does_not():
    answer = "Twenty-seven plus fifteen is is forty-two."
    assert audit.read(ASKED, answer).right
    assert sums.correct([ASKED], [answer], ["forty-two"]) == [0]


def test_of_recorded_answers_the_audit_calls_those_right_that_the_verifier_does():
    for prompt, answer, scores in read_log(Path(__file__).parent / "judged_answers.jsonl"):
        right = number_words(sum(numbers_in(prompt)))
        assert audit.read(prompt, answer).right == bool(sums.correct([prompt], [answer], [right])[0])
        assert audit.read(prompt, answer).right == (scores[0] == 5)
