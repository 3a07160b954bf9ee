"""
Finds the JSON object or list that a text states, and compares it with the right one.

This file does not cover choices inside an object (rewards/choices.py). Each function takes time
linear in the length of the text.
"""

import json
import re
from decimal import Decimal
from typing import Any

from rewards import statements

MOST_BROKEN = 20  # brackets that do not begin valid JSON; a text with more of them states nothing
_BRACKET = re.compile(r"[{\[]")
_BEGINS_JSON = re.compile(r"\{\s{0,99}[\"}]|\[\s{0,99}[\"{\[]")
_NOT = re.compile(r"\b(?:not|never|neither|cannot)\b|n't\b|[\u2260\u00ac]", re.I)


def _number(digits: str) -> tuple[Decimal]:
    return (Decimal(digits),)


# Numbers become tuples with one element, so that 1 differs from true. int() refuses NaN, which is
# not valid JSON.
_DECODER = json.JSONDecoder(parse_int=_number, parse_float=_number, parse_constant=int)


def read_json(text: str) -> Any:
    """
    The object or list, if the whole text is one; None for any other text.

    Numbers become tuples with one element, so that 1 differs from true.
    """
    try:
        value = _DECODER.decode(text)
    except (ValueError, ArithmeticError, RecursionError):
        return None
    return value if isinstance(value, (dict, list)) else None


def is_same_json(gold: str, statement: str) -> bool:
    """Whether a statement holds the right object or list. Keys may have any order."""
    right = read_json(gold)
    return right is not None and right == read_json_statement(statement, type(right))


def find_json_statements(gold: str, text: str) -> list[str]:
    """
    The statements in a text, if the right answer is JSON.

    They are the text's marks that contain a bracket, or else the whole text.
    """
    bracket = "{" if gold.lstrip().startswith("{") else "["

    def is_json(mark: str) -> bool:
        return bracket in mark

    marks = statements.read_marks(text, is_json, with_sentence=False)
    return marks or [text]


def read_json_statement(text: str, kind: type) -> Any:
    """
    The object or the list that a text states; None if the text states none, or more than one.

    An object that is alone on its lines, or in a fence, is the answer, and the prose around it is
    an explanation. An object inside a sentence counts only if no object is alone on its lines. An
    object after "not" is no answer.
    """
    values = _find_values(text, kind)
    if values is None:
        return None
    alone = [value for value, stands_alone in values if stands_alone]
    stated = alone or [value for value, _ in values]
    return stated[0] if len(stated) == 1 and isinstance(stated[0], kind) else None


def _find_values(text: str, kind: type) -> list[tuple[Any, bool]] | None:
    """
    The outermost objects and lists in a text, and whether each is alone on its lines.

    Values after "not" are skipped. The result is None if the text breaks a value off, joins two
    values with "or", or takes a value back.
    """
    values: list[tuple[Any, bool]] = []
    place = end = num_broken = 0
    while match := _BRACKET.search(text, place):
        begin = match.start()
        try:
            value, place = _DECODER.raw_decode(text, begin)
        except (ValueError, ArithmeticError, RecursionError):
            num_broken += 1
            if _BEGINS_JSON.match(text, begin) or num_broken > MOST_BROKEN:
                return None
            place = begin + 1
            continue

        between = text[end:begin]
        is_first_json = end == 0
        shares_line = not is_first_json and "\n" not in between
        end = place
        before = between.rpartition("\n")[2]
        if not is_first_json and re.search(rf"{statements.OR}|{statements.MAYBE}", before, re.I):
            return None
        if not isinstance(value, kind) and _is_footnote(value):
            continue
        if _NOT.search(before):
            continue
        if values and _is_taken_back(between):
            values = []
        after = text[place : place + 200].partition("\n")[0]
        is_prose = re.search(r"\w", re.sub(r"```\w*", "", before) + after)
        values.append((value, not shares_line and not is_prose))
    return None if values and _is_taken_back(text[end:]) else values


def _is_taken_back(text: str) -> bool:
    sentences = statements.split_sentences(text) if statements.may_take_back(text) else []
    return any(map(statements.is_taken_back, sentences))


def _is_footnote(value: Any) -> bool:
    """Whether a value is no answer, such as [] and {}, or [1] as the sign of a footnote."""
    return not value or (
        isinstance(value, list) and len(value) == 1 and isinstance(value[0], tuple)
    )
