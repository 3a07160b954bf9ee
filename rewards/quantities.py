"""
Reads numbers with units, as people and models write them, and tells whether two are equal.

The values of numbers are exact fractions. Fractions, mixed numbers and powers of ten are
calculated; other arithmetic is not.

This file does not cover numbers written as words, rounding, unit conversions, or which part of a
completion is its answer (rewards/math_answers.py).
"""

import functools
import re
import unicodedata
from fractions import Fraction
from typing import NamedTuple

from rewards.texts import normalize_unicode, superscripts_to_carets
from rewards.units import (
    UnitsAndWords,
    possible_units_of_spelling,
    read_units_and_words,
    units_and_words_agree,
)

LONGEST = 400  # the largest number of characters in a statement

# ---- texts without LaTeX and Markdown

# Patterns of LaTeX and Markdown around numbers, each with its replacement.
_REWRITES: tuple[tuple[str, str], ...] = (
    (r"\\[cdt]?frac ?(?:\{([^{}]{1,60})\} ?\{([^{}]{1,60})\}|([0-9])([0-9]))", r" \1\3/\2\4"),
    (r"\\([$%#&])", r"\1"),
    (r"\{,\}", ","),  # 1{,}234
    (r"\^? ?\{?\\(?:circ|degree)(?![A-Za-z])\}?", "\u00b0"),
    (r"\\mu(?![A-Za-z]) ?", "\u03bc"),
    (r"\\Omega(?![A-Za-z])", "\u03a9"),
    (r"\^ ?\{ ?([-+]?[0-9]{1,9}) ?\}", r"^\1"),
    (r"([A-Za-z])_(?:\{([A-Za-z0-9]{1,9})\}|([A-Za-z0-9]))(?= ?=)", r"\1\2\3"),  # x_1 = 5
    (r"\\[!,;: ()\[\]]|\*\*|[_`~]", " "),
    (
        r"\\(?:[fm]?box(?:ed)?|text[a-z]*|math[a-z]+|underline|left|right|q?quad|"
        r"displaystyle)(?![A-Za-z])",
        " ",
    ),
    (r"[{}]", " "),
    (r"\u00b0 +([CF])(?![A-Za-z])", "\u00b0\\1"),
    (r"\$\$?([^\s$]|[^\s$][^$]{0,300}[^\s$])\$\$?(?![0-9])", r" \1 "),
    (r"(?i:\b(?:minus|negative) ?(?=[0-9]))", "-"),
    (r"\\(?:times|cdot|div)(?![A-Za-z])", "*"),
    (r" {2,}", " "),
    (
        r"(?<![A-Za-z0-9])(?:[-+*/() 0-9.$]|,(?=[0-9]{3}))*[0-9)] *=(?= *[-$]? ?[0-9])",
        "",
    ),  # the left side of 6 * 7 = 42
)
_COMPILED = [(re.compile(pattern), new) for pattern, new in _REWRITES]


def vulgar_fractions_to_latex(text: str) -> str:
    """A text with vulgar fractions rewritten in LaTeX, such as \\frac{1}{2} for \u00bd."""
    if text.isascii():
        return text
    return re.sub(r"[\u00bc-\u00be\u2150-\u215e\u2189]", _vulgar_fraction_to_latex, text)


def _vulgar_fraction_to_latex(match: re.Match[str]) -> str:
    top, _, bottom = unicodedata.normalize("NFKC", match[0]).partition("\u2044")
    return f"\\frac{{{top}}}{{{bottom}}}"


@functools.lru_cache(maxsize=2**12)
def strip_markup_and_left_sides(text: str) -> str:
    """
    A short text without LaTeX and Markdown, and without the left sides of equations.

    For example, "6 * 7 = 42" becomes "42".
    """
    text = vulgar_fractions_to_latex(superscripts_to_carets(normalize_unicode(text)))
    for pattern, new in _COMPILED:
        text = pattern.sub(new, text)
    return text


WORD = re.compile(  # a word of prose, as opposed to part of a formula
    r"(?<![\\A-Za-z])(?!(?:sqrt|sin|cos|tan|log|exp|[bpv]?matrix)\b)(?:[^\W\d_]{3,}|or|and|to|is|"
    r"if|it|in|of|no)\b"
    r"|[\u0400-\u1fff\u3040-\u9fff\uac00-\ud7a3]"
)


def has_prose_word(text: str) -> bool:
    """Whether a text contains a word of prose, as opposed to letters in a formula."""
    return bool(WORD.search(strip_markup_and_left_sides(text)))


# ---- digits

_THREES = (  # 1,234,567.8 and 12,34,567.8; 1.234,5 and 1.234.567; 1 234.5 and 1'234,5
    r"[1-9][0-9]{0,2}(?:,[0-9]{3}(?![0-9]))+(?:\.[0-9]+)?|"
    r"[1-9][0-9]?(?:,[0-9]{2}(?![0-9]))+,[0-9]{3}(?![0-9])(?:\.[0-9]+)?|"
    r"[1-9][0-9]{0,2}(?:\.[0-9]{3}(?![0-9]))+,[0-9]+|"
    r"[1-9][0-9]{0,2}(?:\.[0-9]{3}(?![0-9])){2,}|"
    r"[0-9]{1,3}(?:(?: [0-9]{3})+|(?:'[0-9]{3})+)(?![0-9])(?:[.,][0-9]+)?"
)
_DIGITS = rf"(?:{_THREES}|[0-9]+(?:[.,][0-9]+)?|\.[0-9]+)"
_COMMAS_IN_THREES = re.compile(r"[1-9][0-9]{0,2}(?:,[0-9]{3})+|[1-9][0-9]?(?:,[0-9]{2})+,[0-9]{3}")


def parse_digits_with_separators(digits: str) -> Fraction:
    """
    The value of digits with separators for thousands and decimals.

    For example, "1,234" is 1234, and "1,5" is 1.5.
    """
    digits = re.sub("[ ']", "", digits)
    last_point = digits.rfind(".")
    last_comma = digits.rfind(",")
    if last_point >= 0 and last_comma >= 0:
        thousands = "," if last_point > last_comma else "."
    elif last_comma >= 0:
        thousands = "," if _COMMAS_IN_THREES.fullmatch(digits) else ""
    else:
        thousands = "." if digits.count(".") > 1 else ""
    if thousands:
        digits = digits.replace(thousands, "")
    return Fraction(digits.replace(",", "."))


# ---- one number in a text

_MONEY = (
    r"US\$|[$\u20ac\u00a3\u20b9\u00a5\u20bd\u20a9]|(?:USD|EUR|GBP|INR|JPY|CNY|CHF)(?= )|Rs\.?(?= )"
)
_NUMBER = re.compile(  # excludes the 5 in "x5", the minus in "7-5", and "10:30" and "1.2.3"
    rf"(?P<sign>(?<![\w)%\]}}^])[-+] ?)?(?P<money>{_MONEY})? ?(?P<minus>(?<![\w)%\]}}^])-)?"
    r"(?<![A-Za-z0-9_^])(?<!\^[-+ ])(?<![0-9][.,:/])"
    r"(?:(?P<ten>10) ?\^ ?(?P<tens>[-+]?[0-9]{1,2})|"
    rf"(?:(?P<whole>[0-9]{{1,9}}) (?=[0-9]{{1,9}} ?/ ?[0-9]))?(?P<top>(?>{_DIGITS}))"
    r"(?:[eE](?P<power>[-+]?[0-9]{1,2})(?![0-9])| ?[*x] ?10 ?\^ ?(?P<scientific>[-+]?[0-9]{1,2}))?"
    rf"(?: ?/ ?(?P<bottom>(?>{_DIGITS})))?)"
    r"(?![.,:/']?[0-9]|[eE][-+]?[0-9])"
    r"(?: (?P<scale>hundred|thousand|million|billion|trillion|lakh|crore)s?\b)?"
)
_SCALES = {
    "hundred": 10**2,
    "thousand": 10**3,
    "lakh": 10**5,
    "million": 10**6,
    "crore": 10**7,
    "billion": 10**9,
    "trillion": 10**12,
}
_SIGNS = (
    "\u2260\u2264\u2265\u00b1\u00ac\u221e\u221a\u221b"
    "\u2211\u220f\u222b\u2202\u222a\u2229\u2208\u03c0"
)
_FUNCTIONS = r"(?:pi|mod|sqrt|(?:arc|a)?(?:sin|cos|tan|sec|csc|cot)h?|log|ln|exp|lim)"
_BESIDE = rf"[^\W\d_]{{2,}}+|(?![{_SIGNS}])[^\x00-\x7f]|[\s.,:;%'\"*$]"
_BEFORE = re.compile(  # prose, or a name before an equals sign
    rf"(?:\b[A-Za-z][A-Za-z0-9]{{0,2}}+ ?(?==)|{_BESIDE}|[()/=-]|\b[aAI]\b|\b[ghlms]\b(?=[ /:]))*+"
)
_ENDS_IN_FORMULA = re.compile(
    rf"(?:\w\(|[A-Za-z]-|(?<![^\W\d_])[B-HJ-Zb-z] ?|[*/)] ?|\b{_FUNCTIONS} ?\(? ?)$"
)
_AFTER = re.compile(  # units and prose
    rf"(?:(?<=[^\W\d_]) ?\^ ?[-+]?[0-9](?![0-9])|{_BESIDE}|[()]|"
    r"[-/=](?= ?\(? ?(?:[^\W\d_]{2}|[a-zA-Z]\b)|\W*$)|\b[aAI]\b|"
    r"(?<![^\W\d_])[A-Za-z](?![A-Za-z0-9=(]))*+"
)
_GLUED = "ghlmsAJKLNVW"  # letters that are units directly after a digit, as in 5m but not in 5x
_FORMULA_BEHIND = re.compile(
    rf" ?[-*]? ?\(? ?(?:pi\b|{_FUNCTIONS}(?![a-z])(?= ?(?:\(|[0-9]|[A-Za-z]\b)))"
)
_NAME = re.compile(r"(?<![A-Za-z0-9])([A-Za-z][0-9]{0,2}) ?= ?$")
# a pair, an interval or a set
_IN_BRACKETS = re.compile(r"(?<![A-Za-z])[(\[{]\s*-?[0-9]+,[0-9]+\s*[)\]}]")


class Quantity(NamedTuple):
    """A number as a text states it, with its units and the words around it."""

    value: Fraction
    units_and_words: UnitsAndWords
    name: str  # the x in "x = 5"
    lead: str  # the text before the number
    is_glued: bool  # whether a capital directly follows the last digit, as in the code "5B"


@functools.lru_cache(maxsize=2**12)
def find_only_number(text: str) -> Quantity | None:
    """
    The only number that a short text states; None if the text states no number or several.

    For example, "$1,234.50", "-3/4 cup", "x = 2.5 million", "5\\%" and "There are 7." state one
    number each. Also returns None if the number is only part of a root, a bound or a power.
    """
    if len(text) > LONGEST:
        return None
    plain = strip_markup_and_left_sides(text)
    if WORD.search(plain):
        plain = plain.rstrip("! ")  # in a text without words, "!" means a factorial
    matches = list(_NUMBER.finditer(plain))
    if len(matches) != 1:
        return None
    match = matches[0]
    lead = plain[: match.start()]
    rest = plain[match.end() :]
    value = _value_of_number_match(match)
    if (
        value is None
        or not _text_before_keeps_value(lead, match)
        or not _text_after_keeps_value(rest)
    ):
        return None
    if "," in match[0] and _IN_BRACKETS.search(re.sub(r"\\(?:left|right)", "", text)):
        return None
    name = _NAME.search(lead)
    return Quantity(
        value=value,
        units_and_words=read_units_and_words(_first_clause(rest), match["money"]),
        name=name[1].casefold() if name else "",
        lead=lead,
        is_glued=bool(re.match("[A-Z]", rest)),
    )


def _value_of_number_match(match: re.Match[str]) -> Fraction | None:
    if match["ten"]:
        value = Fraction(10) ** int(match["tens"])
    else:
        value = parse_digits_with_separators(match["top"])
        if match["bottom"]:
            bottom = parse_digits_with_separators(match["bottom"])
            if not bottom:
                return None
            value /= bottom
        if match["whole"]:
            if not 0 < value < 1:
                return None
            value += int(match["whole"])
        value *= Fraction(10) ** int(match["power"] or match["scientific"] or 0)
    if match["scale"]:
        value *= _SCALES[match["scale"]]
    is_negative = "-" in f"{match['sign']}{match['minus']}"
    return -value if is_negative else value


def _text_before_keeps_value(lead: str, match: re.Match[str]) -> bool:
    """
    Whether the text before a number leaves the value of the number unchanged.

    Prose leaves the value unchanged, and so does a name with an equals sign.
    """
    if not _BEFORE.fullmatch(lead):
        return False
    if match["sign"] and re.search(r"(?<![^\W\d_])[A-Za-z] ?$", lead):  # g - 5
        return False
    return not _ENDS_IN_FORMULA.search(lead)


def _text_after_keeps_value(rest: str) -> bool:
    """Whether the text after a number leaves its value unchanged, as units and prose do."""
    if not _AFTER.fullmatch(rest) or _FORMULA_BEHIND.match(rest):
        return False
    letter = re.match(r"( ?)([A-Za-z])(?![A-Za-z])", rest)
    if letter and not letter[1] and letter[2] not in _GLUED:
        return False
    is_after_space = letter and letter[1] and letter[2] not in "aAI"
    if letter and is_after_space and possible_units_of_spelling(letter[2]) is None:  # 5 x
        return False
    if re.match(r" ?[A-Za-ln-z] ?\^ ?\+?[2-9]", rest):  # 5t^2
        return False
    # for example, 5 - g, 5/s or 5(x)
    return not re.match(r" ?(?:[-*/] ?\(?|\() ?[A-Za-z](?![A-Za-z])", rest)


def _first_clause(text: str) -> str:
    return re.split(r"[,;:!?=\n]", text, maxsplit=1)[0]


def is_same_quantity(right: Quantity, stated: Quantity) -> bool:
    """
    Whether two quantities are equal.

    Their values must be equal. If both have units, words or a name, as the x in "x = 5", these must
    agree too.

    If the right answer is a percentage, the fraction with the same value is right too, such as 0.28
    for 28%.
    """
    if right.name and stated.name and right.name != stated.name:
        return False
    if right.value == stated.value:
        return units_and_words_agree(right.units_and_words, stated.units_and_words)
    is_percentage = [unit for unit, _ in right.units_and_words.powers] == [
        possible_units_of_spelling("%")
    ]
    return is_percentage and not stated.units_and_words and right.value == 100 * stated.value


# ---- numbers among right answers

_NO_NUMBER = re.compile(  # answers that only look like numbers: 007, 3rd, 3 pm
    r"^\W*0[0-9]|/ ?0|[0-9](?:st|nd|rd|th)\b|[0-9] ?[AaPp]\.?[Mm]\b"
)


@functools.lru_cache(maxsize=2**16)
def is_quantity(answer: str) -> bool:
    """
    Whether an answer is a number, perhaps with units or a few words after it.

    The number may be followed by at most two words, or by units and at most one word. Dates, times
    and codes do not count as numbers. A single capital letter is a unit only after a space, so
    "5 V" is a number and "5B" is a code. A longer word with a capital after the digits, as in
    "4 July", must be a unit.
    """
    number = find_only_number(answer)
    if number is None or number.lead.strip(" $"):
        return False
    most_words = 1 if number.units_and_words.powers else 2
    if len(number.units_and_words.words) > most_words:
        return False
    plain = strip_markup_and_left_sides(answer).strip(" .")
    capitals = re.search(r"[0-9] ?([A-Z][A-Za-z]*)", plain)
    if capitals:
        is_unit = (
            possible_units_of_spelling(capitals[1]) is not None
            or read_units_and_words(capitals[1]).powers
        )
        is_code = number.is_glued and len(capitals[1]) == 1
        is_name = bool(re.match("[A-Z][a-z]", capitals[1])) and not is_unit  # 4 July
        if is_code or is_name or (number.is_glued and not is_unit):
            return False
    return not _NO_NUMBER.search(plain)
