"""
Reads the numbers or formulas that a completion states, and tells whether their values are right.

`read_math_answers` tries the rules in the section "What a completion states" of docs/data.md in
order. The rules that are the same for every kind of answer are in rewards/statements.py.
`mathematics.find_math_in_last_math_sentence` reads the last sentence of a completion.

This file does not cover the values of numbers (rewards/quantities.py), the comparison of formulas
(rewards/mathematics.py), or answers that are plain text (rewards/text_answers.py).
"""

import functools
import re

from rewards import statements
from rewards.mathematics import (
    VerdictOrFormulaPair,
    compare_mathematics,
    find_math_in_last_math_sentence,
    is_number_or_formula,
)
from rewards.quantities import LONGEST, find_only_number, is_quantity, is_same_quantity
from rewards.statements import last_mark_or_whole_answer, strip_explanation
from rewards.text_answers import is_or_ends_in_right_text, read_text_answers
from rewards.texts import DENIAL, fold_for_comparison

# Marked texts without a number, such as "E = h\\nu", "\\text{yes}", "B" or "the pigment"
_NO_MATH_MARK = re.compile(
    r"[^\d=]*=[^\d=]*|[\s(]*\\text[a-z]*\{[^{}0-9]*\}[\s).]*|"
    r"[\s(]*[^\W\d_]+(?:[ ,'-]+[^\W\d_]+)*[\s).]*"
)


# ---- numbers and formulas among right answers


@functools.lru_cache(maxsize=2**16)
def right_answer_is_number(answer: str) -> bool:
    """
    Whether an answer is a number, perhaps with units or a few words after it.

    The number may be followed by at most two words, or by units and at most one word. Dates, times
    and codes do not count as numbers.
    """
    return is_quantity(last_mark_or_whole_answer(answer))


@functools.lru_cache(maxsize=2**16)
def right_answer_is_number_or_formula(answer: str) -> bool:
    """Whether an answer is a number or a formula; words, dates and codes are not."""
    return is_number_or_formula(last_mark_or_whole_answer(answer))


# ---- the comparison of values


def compare_math_or_text(gold: str, statement: str) -> VerdictOrFormulaPair:
    """Compares a statement with a right answer: mathematics by value, anything else as text."""
    if not right_answer_is_number_or_formula(gold):
        return is_or_ends_in_right_text(gold, statement)
    return compare_mathematics(gold, statement)


def compare_mark_unless_words_precede(gold: str, statement: str) -> VerdictOrFormulaPair:
    """
    Whether a marked answer has the right value.

    A number after words in the mark, as in "at least 42", is wrong.
    """
    number = find_only_number(statement)
    if number and re.search(r"[^\W\d_]{2}", number.lead):
        return False
    return compare_math_or_text(gold, statement)


# ---- what a completion states


def read_math_answers(gold: str, text: str) -> list[str]:
    """
    The answers that a completion states; the completion is right only if each of them is right.

    gold: the right answer. If the right answer is neither a number nor a formula, the rules for
    answers that are plain text apply.
    """
    if not right_answer_is_number_or_formula(gold):
        return read_text_answers(gold, text)
    is_numeric = find_only_number(gold) is not None
    marks = statements.read_last_mark_and_rival_marks(text, _mark_filter(is_numeric))
    if marks and is_numeric:
        return [find_math_in_last_math_sentence(strip_explanation(mark)) for mark in marks]
    if marks:
        return [find_math_in_last_math_sentence(mark) for mark in marks]

    text = statements.remove_marked_answers(text)
    first = statements.read_first_labelled_answer(
        text, _is_formula_or_short_number, _are_same_number_or_text
    )
    if first.text is not None:
        return [first.text]
    if first.rest is not None:
        return [find_math_in_last_math_sentence(first.rest)]

    first_line = statements.split_answer_line_from_explanation(text, right_answer_is_number)
    if first_line:
        line, explanation = first_line
        if not _last_number_is_in_conclusion(explanation):
            return [line]
    return [find_math_in_last_math_sentence(text)]


def read_last_math_mark_and_rival_marks(gold: str, text: str) -> list[str]:
    """The last marked answer in a text, and other marked answers if they are rival guesses."""
    is_numeric = right_answer_is_number_or_formula(gold) and find_only_number(gold) is not None
    return statements.read_last_mark_and_rival_marks(
        text, _mark_filter(is_numeric), counts_last_sentence=False
    )


def _mark_filter(is_numeric: bool) -> statements.IsAnswer:
    return _may_marked_text_be_mathematics if is_numeric else statements.accept_any_text


def _may_marked_text_be_mathematics(marked_text: str) -> bool:
    """
    Whether the text of a marked answer may be meant as a number or a formula.

    The result is also True for a text that contains a denial, such as "not", or is longer than
    `LONGEST`.
    """
    if len(marked_text) > LONGEST or DENIAL.search(marked_text):
        return True
    return not _NO_MATH_MARK.fullmatch(marked_text)


def _is_formula_or_short_number(value: str) -> bool:
    """Whether a text is a formula, or is a number with at most two words after it."""
    number = find_only_number(value)
    if number and len(number.units_and_words.words) <= 2 and not number.lead.strip(" $"):
        return True
    return bool(re.search(r"[0-9\\]", value)) and right_answer_is_number_or_formula(value)


def _are_same_number_or_text(first: str, second: str) -> bool:
    """Whether two texts state the same number, or are the same text if they state no number."""
    first_number = find_only_number(first)
    second_number = find_only_number(second)
    if first_number and second_number:
        return is_same_quantity(first_number, second_number)
    return fold_for_comparison(first) == fold_for_comparison(second)


def _last_number_is_in_conclusion(text: str) -> bool:
    """Whether the last sentence with a number is a conclusion such as "So she has 42."."""
    sentences = statements.split_sentences(text)
    with_numbers = [sentence for sentence in sentences if re.search("[0-9]", sentence)]
    if not with_numbers:
        return False
    last = with_numbers[-1]
    return bool(statements.CONCLUDES.match(last)) or "=" in last
