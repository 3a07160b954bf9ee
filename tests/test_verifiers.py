"""Verifiers score the completions of two tables and hundreds of hostile texts, and have the stated properties."""

import json
import re
import time
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from pathlib import Path

import pytest
import yaml
from conftest import catch_message
from hypothesis import given, settings
from hypothesis import strategies as st
from reward_doctor import corpus

from rewards import math_answers, quantities, statements, verifiers
from rewards.built_in import exactly_one_marked_answer

TESTS = Path(__file__).parent
PAIRS = yaml.safe_load((TESTS / "pairs.yaml").read_text())
HOSTILE = yaml.safe_load((TESTS / "hostile_math.yaml").read_text())
DATA_PAGE = (TESTS.parent / "docs" / "data.md").read_text()
VERIFIER_NAMES = {  # by kind of answer in pairs.yaml; "exact" for all other kinds
    "formulas": "math",
    "json": "json",
    "numbers": "number",
    "quantities": "number",
    "choices": "choice",
    "letters": "choice",
}


def score_pairs(name, answers, pairs):
    """The values that the verifier for these answers gives to pairs of an answer and a completion."""
    _, verify = verifiers.choose_verifier(name, answers)
    return verify(
        completions=[completion for _, completion in pairs],
        answer=[answer for answer, _ in pairs],
    )


def read_pairs(rows, side):
    """The pairs of an answer and a right (or wrong) completion."""
    return [(row["answer"], completion) for row in rows for completion in row[side]]


def test_no_wrong_answer_is_rewarded_and_19_of_20_right_answers_in_usual_forms_are():
    num_right = 0
    missed_pairs = []
    for kind, rows in PAIRS.items():
        name = VERIFIER_NAMES.get(kind, "exact")
        answers = [row["answer"] for row in rows]
        if name == "choice":
            answers = answers * 10
        assert verifiers.choose_verifier("auto", answers)[0] == name, kind

        wrong_pairs = read_pairs(rows, "wrong")
        values = score_pairs("auto", answers, wrong_pairs)
        rewarded = [pair for pair, value in zip(wrong_pairs, values, strict=True) if value]
        assert not rewarded, kind

        right_pairs = read_pairs(rows, "right")
        values = score_pairs("auto", answers, right_pairs)
        missed_pairs += [pair for pair, value in zip(right_pairs, values, strict=True) if not value]
        num_right += len(right_pairs)
    assert num_right > 190
    assert len(missed_pairs) <= num_right / 20, missed_pairs


@pytest.mark.parametrize("name", ["json", "number", "math", "exact", "marked"])
def test_candidates_units_and_marks_are_never_rewarded_and_marked_rewards_no_hostile_text(name):
    rewarded = {}
    for kind, texts_by_answer in HOSTILE.items():
        pairs = [(answer, text) for answer, texts in texts_by_answer.items() for text in texts]
        answers, texts = zip(*pairs, strict=True)
        values = verifiers.VERIFIERS[name].make(answers)(completions=texts, answer=answers)
        rewarded[kind] = [pair for pair, value in zip(pairs, values, strict=True) if value]

    assert not rewarded["candidates"] + rewarded["marks"] + rewarded["units"]
    if name == "marked":
        assert not any(rewarded.values())
    if name == "math":
        num = len(HOSTILE["denials"]["42"]) + len(HOSTILE["comparisons"]["42"])
        num_rewarded = len(rewarded["denials"]) + len(rewarded["comparisons"])
        sentence = (
            rf"\b{num} denials and comparisons[^.]*`math` \w+ {num_rewarded}\b"
            r"[^.]*`marked` \w+ none"
        )
        assert re.search(sentence, " ".join(DATA_PAGE.split()))
        assert not rewarded["others"]


NUMBERS = [
    json.loads(line) for line in (TESTS / "numbers.jsonl").read_text(encoding="utf-8").splitlines()
]
NUMBERS += [["\\boxed{" * 20_000 + "42" + "}" * times, "42", False] for times in (0, 20_000)]


def test_numbers_and_formulas_are_read_in_many_forms():
    completions, answers, is_right = zip(*NUMBERS, strict=True)
    values = verifiers.math_correct(completions=completions, answer=answers)
    misjudged = [row for row, value in zip(NUMBERS, values, strict=True) if bool(value) != row[2]]
    assert not misjudged

    values = verifiers.marked(completions=completions, answer=answers)
    wrongly_rewarded = [
        row for row, value in zip(NUMBERS, values, strict=True) if value and not row[2]
    ]
    assert not wrongly_rewarded
    assert sum(values) > 0.8 * sum(is_right)


@pytest.mark.parametrize("end", ["\\text{}", " \\mbox{ }"])
def test_an_empty_unit_after_a_formula_is_ignored(end):
    """An earlier version raised TypeError, which ended the run."""
    completions = [f"\\boxed{{x^{power}}}" for power in (f"2{end}", f"3{end}", f"2{end}^2")]
    assert verifiers.math_correct(completions=completions, answer=["x^2"] * 3) == [1, 0, 0]


def test_the_math_verifier_misjudges_one_of_the_83_cases_of_reward_doctor():
    """It misses one right answer. It rewards no wrong answer."""
    cases = corpus.load()
    values = verifiers.math_correct(
        [case.completion for case in cases], [case.reference for case in cases]
    )
    misjudged = [case.id for case, value in zip(cases, values, strict=True) if value != case.expect]
    assert len(cases) == 83
    assert misjudged == ["eq.frac.repeating"]


@given(st.integers(-(10**12), 10**12), st.integers(0, 99))
def test_a_number_is_read_from_every_usual_spelling(whole_part, cents):
    value = Fraction(f"{whole_part}.{cents:02}")
    with_commas = f"{whole_part:,}.{cents:02}"
    for text in (f"{whole_part}.{cents:02}", with_commas, with_commas.replace(",", " ")):
        assert quantities.find_only_number(text).value == value
        completions = [
            f"So we get \\boxed{{{text}}}.",
            f"The answer is {text}.",
            f"It was {text} km.",
        ]
        assert verifiers.number(completions=completions, answer=[text] * 3) == [1, 1, 1]


@pytest.mark.parametrize(
    "text", ["1e101", "1e-101", "1e999999999", "9" * 401, "1/0", "x1.5", "2^10", "3 4", "", "e5"]
)
def test_no_number_is_read_from_other_texts_or_from_too_long_numbers(text):
    assert quantities.find_only_number(text) is None


# A tag that opens a thought would hide the rest of a completion, even inside JSON.
TEXTS = st.text().filter(lambda text: statements.strip_thoughts(text) == text)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | TEXTS,
        lambda values: st.lists(values) | st.dictionaries(TEXTS, values),
    )
)
def test_json_is_right_in_any_layout_and_wrong_if_a_value_differs(value):
    answer = json.dumps({"a": value, "b": 1})
    completions = [
        json.dumps({"b": 1.0, "a": value}, indent=2),
        json.dumps({"a": value, "b": True}),
        answer[:-1],
        answer + answer,
    ]
    pairs = [(answer, completion) for completion in completions]
    assert score_pairs("json", [answer], pairs) == [1, 0, 0, 0]


def test_auto_chooses_a_verifier_for_the_answers_and_scores_no_prose():
    message = catch_message(verifiers.choose_verifier, "number", ["1", "lots"])
    assert "--verifier number does not fit the answer 'lots'" in message

    prose = "It depends on the weather, on the season and on you."
    pairs = [("Paris", "paris"), (prose, prose), (None, "None")]
    assert score_pairs("auto", ["Paris", prose], pairs) == [1, None, None]

    pairs = [(")]", f"The answer is {text}") for text in (")]", ")", "", "))")]
    assert score_pairs("exact", [")]"], pairs) == [1, 0, 0, 0]

    for answers, name in (
        (["42", "3/4 cup"], "number"),
        (["42", "lots"], "exact"),
        (["... so #### 42"], "number"),
        (["yes", "no"] * 3, "choice"),
        (["yes", "no"], "exact"),
        (["2.5", "0,5"], "number"),
        (["3rd", "5B", "007"], "exact"),
        (["4 July", "5 Hz"], "exact"),
        (["5 Hz"], "number"),
        (["3 pm", "11 am"], "exact"),
    ):
        assert verifiers.choose_verifier("auto", answers)[0] == name, answers


# ---- texts that are meant to hang or fool a verifier


REPEATED_TEXTS = ["9", "9,", "1,234", "1 ", "1 1/", "1/", "-", ".5", "e9", " ", "\t \n", "\n"]
REPEATED_TEXTS += ["{", "}", "#", "#### ", "$", "\\", "\\boxed{", "\\boxed{}", "\\frac{1}"]
REPEATED_TEXTS += ["answer ", "answer is ", "answer: ", "x^", "10^", "`*_~", "[", "[1,", '{"a":']
REPEATED_TEXTS += ["<answer>", "(", "\ud800\x00\u202e", "A or B ", "yes "]


@pytest.mark.parametrize("text", REPEATED_TEXTS, ids=lambda text: repr(text[:12]))
def test_a_hostile_completion_takes_bounded_time(text):
    """
    A completion has 50,000 characters, 15 times as many as a model writes.

    An algorithm of quadratic cost would take 15 s.
    """
    begin = time.process_time()  # seconds of this process only
    repeated_text = text * (50_000 // len(text))
    for completion in (repeated_text, f"The answer is {repeated_text}."):
        for name, answer in (
            ("number", "42"),
            ("exact", "42"),
            ("choice", "A"),
            ("json", '{"a": 1}'),
            ("marked", "x^2"),
        ):
            verify = verifiers.VERIFIERS[name].make([answer])
            assert verify(completions=[completion], answer=[answer]) == [0], name
        exactly_one_marked_answer(completions=[completion])
        # The same text as the answer in a user's data takes no longer.
        assert not math_answers.right_answer_is_number(completion)
    assert time.process_time() - begin < 4


@pytest.mark.slow
@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    st.text(alphabet="0123456789.,/-+eE^=$%{}\\ #\nboxedfracnswri", max_size=60)
    | st.text(max_size=60)
)
def test_every_verifier_can_score_any_text(text):
    for verifier in verifiers.VERIFIERS.values():
        (value,) = verifier.make([text or "a"])(completions=[text], answer=[text])
        assert value in (0, 1)


def test_the_time_limit_also_works_in_a_thread():
    with ThreadPoolExecutor(1) as threads:
        values = threads.submit(verifiers.math_correct, ["\\boxed{\\sqrt{1764}}"], ["42"]).result()
    assert values == [1]


def test_the_page_about_data_names_each_verifier():
    assert set(re.findall(r"^\| `(\w+)` \|", DATA_PAGE, re.MULTILINE)) >= set(verifiers.VERIFIERS)
