"""Verifiers: two tables of what models say, a few hundred texts that are meant to hang or fool them, and properties."""

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
PAIRS, HOSTILE = (
    yaml.safe_load((TESTS / name).read_text()) for name in ("pairs.yaml", "hostile_math.yaml")
)
DATA_PAGE = (TESTS.parent / "docs" / "data.md").read_text()
NAMED = {
    "json": "json",
    "numbers": "number",
    "quantities": "number",
    "choices": "choice",
    "letters": "choice",
}


def told(name, answers, pairs):
    """What the verifier of these answers says of pairs of an answer and a text."""
    _, verify = verifiers.choose_verifier(name, answers)
    return verify(completions=[text for _, text in pairs], answer=[answer for answer, _ in pairs])


def test_no_wrong_answer_is_right_and_19_of_20_right_ones_in_usual_dress_are():
    num_right, missed = 0, []
    for kind, rows in PAIRS.items():
        answers = [row["answer"] for row in rows] * (10 if NAMED.get(kind) == "choice" else 1)
        assert verifiers.choose_verifier("auto", answers)[0] == NAMED.get(
            kind, "math" if kind == "formulas" else "exact"
        ), kind
        right, wrong = (
            [(row["answer"], text) for row in rows for text in row[side]]
            for side in ("right", "wrong")
        )
        paid = zip(wrong, told("auto", answers, wrong), strict=True)
        assert not [pair for pair, value in paid if value], kind
        num_right += len(right)
        missed += [
            pair
            for pair, value in zip(right, told("auto", answers, right), strict=True)
            if not value
        ]
    assert num_right > 190 and len(missed) <= num_right / 20, missed


@pytest.mark.parametrize("name", ["json", "number", "math", "exact", "marked"])
def test_candidates_units_and_differing_marks_earn_nothing_and_marked_pays_no_hostile_text(name):
    paid = {}
    for kind, golds in HOSTILE.items():
        pairs = [(gold, text) for gold, texts in golds.items() for text in texts]
        answers, texts = zip(*pairs, strict=True)
        values = verifiers.VERIFIERS[name].make(answers)(completions=texts, answer=answers)
        paid[kind] = [pair for pair, value in zip(pairs, values, strict=True) if value]
    assert not paid["candidates"] + paid["marks"] + paid["units"]
    assert name != "marked" or not any(paid.values())
    if name == "math":
        num = sum(len(HOSTILE[kind]["42"]) for kind in ("denials", "comparisons"))
        num_paid = len(paid["denials"]) + len(paid["comparisons"])
        shown = (
            rf"\b{num} denials and comparisons[^.]*`math` \w+ {num_paid}\b[^.]*`marked` \w+ none"
        )
        assert re.search(shown, " ".join(DATA_PAGE.split())) and not paid["others"]


NUMBERS = [
    json.loads(line) for line in (TESTS / "numbers.jsonl").read_text(encoding="utf-8").splitlines()
]
NUMBERS += [["\\boxed{" * 20_000 + "42" + "}" * times, "42", False] for times in (0, 20_000)]


def test_numbers_and_formulas_are_read_in_their_dress():
    completions, answers, right = zip(*NUMBERS, strict=True)
    values = verifiers.math_correct(completions=completions, answer=answers)
    assert not [row for row, value in zip(NUMBERS, values, strict=True) if bool(value) != row[2]]
    marked = verifiers.marked(completions=completions, answer=answers)
    assert not [row for row, value in zip(NUMBERS, marked, strict=True) if value and not row[2]]
    assert sum(marked) > 0.8 * sum(right)


@pytest.mark.parametrize("end", ["\\text{}", " \\mbox{ }"])
def test_an_empty_unit_behind_a_formula_is_none(end):
    """It raised TypeError, which ended the run."""
    completions = [f"\\boxed{{x^{power}}}" for power in (f"2{end}", f"3{end}", f"2{end}^2")]
    assert verifiers.math_correct(completions=completions, answer=["x^2"] * 3) == [1, 0, 0]


def test_of_the_83_cases_of_reward_doctor_no_wrong_one_is_paid_and_one_right_one_is_missed():
    cases = corpus.load()
    values = verifiers.math_correct(
        [case.completion for case in cases], [case.reference for case in cases]
    )
    wrong = [case.id for case, value in zip(cases, values, strict=True) if value != case.expect]
    assert len(cases) == 83 and wrong == ["eq.frac.repeating"]


@given(st.integers(-(10**12), 10**12), st.integers(0, 99))
def test_a_number_is_read_back_from_each_of_its_spellings(whole, cents):
    value = Fraction(f"{whole}.{cents:02}")
    for text in (
        f"{whole}.{cents:02}",
        f"{whole:,}.{cents:02}",
        f"{whole:,}.{cents:02}".replace(",", " "),
    ):
        assert quantities.find_only_number(text).value == value
        said = [f"So we get \\boxed{{{text}}}.", f"The answer is {text}.", f"It was {text} km."]
        assert verifiers.number(completions=said, answer=[text] * 3) == [1, 1, 1]


@pytest.mark.parametrize(
    "text", ["1e101", "1e-101", "1e999999999", "9" * 401, "1/0", "x1.5", "2^10", "3 4", "", "e5"]
)
def test_what_is_no_number_or_too_long_a_one_is_not_read(text):
    assert quantities.find_only_number(text) is None


# A tag that opens a thought states nothing, inside JSON too.
TEXTS = st.text().filter(lambda text: statements.strip_thoughts(text) == text)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | TEXTS,
        lambda values: st.lists(values) | st.dictionaries(TEXTS, values),
    )
)
def test_json_is_right_in_any_layout_and_wrong_once_a_value_is_another(value):
    gold = json.dumps({"a": value, "b": 1})
    said = [
        json.dumps({"b": 1.0, "a": value}, indent=2),
        json.dumps({"a": value, "b": True}),
        gold[:-1],
        gold + gold,
    ]
    assert told("json", [gold], [(gold, text) for text in said]) == [1, 0, 0, 0]


def test_a_verifier_that_does_not_fit_names_the_answer_and_auto_leaves_prose_out():
    prose = "It depends on the weather, on the season and on you."
    said = catch_message(verifiers.choose_verifier, "number", ["1", "lots"])
    assert "--verifier number does not fit the answer 'lots'" in said
    assert told("auto", ["Paris", prose], [("Paris", "paris"), (prose, prose), (None, "None")]) == [
        1,
        None,
        None,
    ]
    brackets = [(")]", f"The answer is {text}") for text in (")]", ")", "", "))")]
    assert told("exact", [")]"], brackets) == [1, 0, 0, 0]
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


# ---- texts that are meant to hang or fool


REPEATED = [
    "9",
    "9,",
    "1,234",
    "1 ",
    "1 1/",
    "1/",
    "-",
    ".5",
    "e9",
    " ",
    "\t \n",
    "\n",
    "{",
    "}",
    "#",
    "#### ",
    "$",
]
REPEATED += '\\|\\boxed{|\\boxed{}|\\frac{1}|answer |answer is |answer: |x^|10^|`*_~|[|[1,|{"a":|<answer>'.split(
    "|"
)
REPEATED += ["(", "\ud800\x00\u202e", "A or B ", "yes "]


@pytest.mark.parametrize("text", REPEATED, ids=lambda text: repr(text[:12]))
def test_a_hostile_completion_takes_bounded_time(text):
    """50,000 characters, fifteen times what a model writes: steps as many as their square would take 15 s."""
    begin = time.process_time()  # seconds of this process, whatever else the machine does
    for said in (text * (50_000 // len(text)), f"The answer is {text * (50_000 // len(text))}."):
        for kind, gold in (
            ("number", "42"),
            ("exact", "42"),
            ("choice", "A"),
            ("json", '{"a": 1}'),
            ("marked", "x^2"),
        ):
            assert verifiers.VERIFIERS[kind].make([gold])(completions=[said], answer=[gold]) == [
                0
            ], kind
        exactly_one_marked_answer(completions=[said])
        assert not math_answers.right_answer_is_number(
            said
        )  # nor does the answer of a user's data take longer
    assert time.process_time() - begin < 4


@pytest.mark.slow
@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    st.text(alphabet="0123456789.,/-+eE^=$%{}\\ #\nboxedfracnswri", max_size=60)
    | st.text(max_size=60)
)
def test_any_text_can_be_scored_by_any_verifier(text):
    for kind in verifiers.VERIFIERS.values():
        (value,) = kind.make([text or "a"])(completions=[text], answer=[text])
        assert value in (0, 1)


def test_the_limit_holds_in_a_thread_too():
    with ThreadPoolExecutor(1) as threads:
        values = threads.submit(verifiers.math_correct, ["\\boxed{\\sqrt{1764}}"], ["42"]).result()
    assert values == [1]


def test_the_page_names_each_verifier():
    assert set(re.findall(r"^\| `(\w+)` \|", DATA_PAGE, re.MULTILINE)) >= set(verifiers.VERIFIERS)
