"""
Finds the JSON object or list that a text states, and compares it with the right answer.

This file does not cover choices that are stated in a JSON object (rewards/choices.py). Each
function takes time linear in the length of the text.
"""

import json
import re
from decimal import Decimal
from typing import Any

from rewards import statements

JsonContainer = type[dict[str, Any]] | type[list[Any]]

MOST_BROKEN = 20  # if more brackets than this do not begin valid JSON, the text states nothing
_BRACKET = re.compile(r"[{\[]")
_BEGINS_JSON = re.compile(r"\{\s{0,99}[\"}]|\[\s{0,99}[\"{\[]")
_NOT = re.compile(r"\b(?:not|never|neither|cannot)\b|n't\b|[\u2260\u00ac]", re.I)


def _wrap_number(digits: str) -> tuple[Decimal]:
    return (Decimal(digits),)


# Each number becomes a tuple with one element, because otherwise 1 would equal true. `int`
# raises an error for NaN, which is not valid JSON.
_DECODER = json.JSONDecoder(parse_int=_wrap_number, parse_float=_wrap_number, parse_constant=int)


def read_object_or_list(text: str) -> Any:
    """
    The JSON object or list that is the whole text; None if the text is anything else.

    Each number in the object or list becomes a tuple with one element, because otherwise 1 would
    equal true.
    """
    try:
        value = _DECODER.decode(text)
    except (ValueError, ArithmeticError, RecursionError):
        return None
    return value if isinstance(value, (dict, list)) else None


def states_same_json(gold: str, statement: str) -> bool:
    """
    Whether the only JSON value in a statement equals the right one.

    The keys of an object may be in any order.
    """
    right = read_object_or_list(gold)
    return right is not None and right == find_single_json_value(statement, type(right))


def read_marked_json_or_whole_text(gold: str, text: str) -> list[str]:
    """
    The pieces of a text that may state the answer, if the right answer is JSON.

    If a marked answer contains the opening bracket of the right answer, the pieces are the last
    such answer and any other marked answers that are guesses beside it. Otherwise, the only piece
    is the whole text.
    """
    bracket = "{" if gold.lstrip().startswith("{") else "["

    def has_bracket(mark: str) -> bool:
        return bracket in mark

    marks = statements.read_last_mark_and_rival_marks(text, has_bracket, counts_last_sentence=False)
    return marks or [text]


def find_single_json_value(text: str, kind: JsonContainer) -> Any:
    """
    The only JSON object or list that a text states; None if the text states none or several.

    An object on lines without other words, or in a Markdown code block, is the answer, and the
    prose around the object is an explanation. An object inside a sentence counts only if the text
    has no object on lines of its own. An object after "not" is not an answer.
    kind: dict or list.
    """
    values = _find_json_values_and_if_alone(text, kind)
    if values is None:
        return None
    alone = [value for value, stands_alone in values if stands_alone]
    stated = alone or [value for value, _ in values]
    return stated[0] if len(stated) == 1 and isinstance(stated[0], kind) else None


def _find_json_values_and_if_alone(text: str, kind: JsonContainer) -> list[tuple[Any, bool]] | None:
    """
    The outermost JSON objects and lists in a text, and whether each is on lines of its own.

    Values after "not" are left out. The result is None if a value in the text is incomplete, if two
    values are joined by "or", or if the text takes a value back.
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
        if not isinstance(value, kind) and _is_empty_or_footnote(value):
            continue
        if _NOT.search(before):
            continue
        if values and _takes_answer_back(between):
            values = []
        after = text[place : place + 200].partition("\n")[0]
        is_prose = re.search(r"\w", re.sub(r"```\w*", "", before) + after)
        values.append((value, not shares_line and not is_prose))
    return None if values and _takes_answer_back(text[end:]) else values


def _takes_answer_back(text: str) -> bool:
    sentences = statements.split_sentences(text) if statements.may_take_answer_back(text) else []
    return any(map(statements.takes_answer_back, sentences))


def _is_empty_or_footnote(value: Any) -> bool:
    """Whether a value is not an answer, because it is empty or a footnote mark such as [1]."""
    return not value or (
        isinstance(value, list) and len(value) == 1 and isinstance(value[0], tuple)
    )
