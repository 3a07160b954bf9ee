"""
Answers that are numbers or formulas: reads the statements in a completion, and tells whether they
have the right value.

`read_math_answers` tries the rules in docs/data.md, "What a completion states", in order. The rules
for every kind of answer are in rewards/statements.py. `mathematics.find_formula` reads the last
sentence.

This file does not cover the values of numbers (rewards/quantities.py), the comparison of formulas
(rewards/mathematics.py), or answers that are texts (rewards/text_answers.py).
"""

import functools
import re

from rewards import statements
from rewards.mathematics import Verdict, compare_mathematics, find_formula
from rewards.mathematics import is_mathematics as is_formula
from rewards.quantities import LONGEST, is_quantity, is_same_quantity, read_number
from rewards.statements import gold_text, strip_explanation
from rewards.text_answers import is_same_text, read_text_answers
from rewards.texts import DENIAL, fold_text

_NO_MATH_MARK = re.compile(  # "E = h\\nu", "\\text{yes}", "B", "the pigment"
    r"[^\d=]*=[^\d=]*|[\s(]*\\text[a-z]*\{[^{}0-9]*\}[\s).]*|"
    r"[\s(]*[^\W\d_]+(?:[ ,'-]+[^\W\d_]+)*[\s).]*"
)


# ---- whether an answer is a number or a formula


@functools.lru_cache(maxsize=2**16)
def is_number(answer: str) -> bool:
    """
    Whether an answer is a number, alone or with units or at most two words.

    Dates, times and codes do not count as numbers.
    """
    return is_quantity(gold_text(answer))


@functools.lru_cache(maxsize=2**16)
def is_mathematics(answer: str) -> bool:
    """Whether an answer is a number or a formula. Words, dates and codes are neither."""
    return is_formula(gold_text(answer))


# ---- whether a statement has the right value


def is_same_value(gold: str, statement: str) -> Verdict:
    """Compares numbers and formulas by value. If the right answer is a text, compares texts."""
    if not is_mathematics(gold):
        return is_same_text(gold, statement)
    return compare_mathematics(gold, statement)


def is_same_mark(gold: str, statement: str) -> Verdict:
    """Compares a mark with the answer. A number after words, as in "at least 42", is wrong."""
    number = read_number(statement)
    if number and re.search(r"[^\W\d_]{2}", number.lead):
        return False
    return is_same_value(gold, statement)


# ---- what a completion states


def read_math_answers(gold: str, text: str) -> list[str]:
    """
    The statements in a text, if the right answer is a number or a formula. Each must be right.

    If the right answer is neither, the text is read by the rules for texts.
    """
    if not is_mathematics(gold):
        return read_text_answers(gold, text)
    is_numeric = read_number(gold) is not None
    marks = statements.read_marks(text, _mark_filter(is_numeric))
    if marks and is_numeric:
        return [find_formula(strip_explanation(mark)) for mark in marks]
    if marks:
        return [find_formula(mark) for mark in marks]

    text = statements.remove_marks(text)
    first = statements.read_first_statement(text, _is_short_formula, _is_equal)
    if first.text is not None:
        return [first.text]
    if first.rest is not None:
        return [find_formula(first.rest)]

    first_line = statements.take_first_line(text, is_number)
    if first_line:
        line, explanation = first_line
        if not _concludes(explanation):
            return [line]
    return [find_formula(text)]


def read_marked_answers(gold: str, text: str) -> list[str]:
    """The statements that a text marks, without any other statements."""
    is_numeric = is_mathematics(gold) and read_number(gold) is not None
    return statements.read_marks(text, _mark_filter(is_numeric), with_sentence=False)


def _mark_filter(is_numeric: bool) -> statements.IsAnswer:
    return _is_math_mark if is_numeric else statements.accept_any


def _is_math_mark(mark: str) -> bool:
    """Whether a mark tries to give a number or a formula, or denies one."""
    return len(mark) > LONGEST or bool(DENIAL.search(mark)) or not _NO_MATH_MARK.fullmatch(mark)


def _is_short_formula(value: str) -> bool:
    """Whether the text after a label is a formula, or a number with at most two words after it."""
    number = read_number(value)
    if number and len(number.measure.words) <= 2 and not number.lead.strip(" $"):
        return True
    return bool(re.search(r"[0-9\\]", value)) and is_mathematics(value)


def _is_equal(first: str, second: str) -> bool:
    """Whether two labelled values are the same number, or else the same text."""
    first_number = read_number(first)
    second_number = read_number(second)
    if first_number and second_number:
        return is_same_quantity(first_number, second_number)
    return fold_text(first) == fold_text(second)


def _concludes(text: str) -> bool:
    """Whether the last sentence with a number is a conclusion: "So she has 42.", "6 * 7 = 42"."""
    sentences = statements.split_sentences(text)
    with_numbers = [sentence for sentence in sentences if re.search("[0-9]", sentence)]
    if not with_numbers:
        return False
    last = with_numbers[-1]
    return bool(statements.CONCLUDES.match(last)) or "=" in last
