"""
Numbers in text: the answer that a completion of a school problem gives, and whether two numbers are the same.

Written here and not taken from a library of computer algebra: answers are plain numbers, completions are hostile
(they are sampled by the thousand from a model that is paid to find a hole), and every step below takes time linear
in the text. Nothing is evaluated; fractions are exact. What is left out: numbers in words, units and algebra.
"""

import re
from collections import deque
from fractions import Fraction

_PLAIN = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]{1,3}(?: [0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+"
_NUMBER_IN_TEXT = re.compile(
    r"(?P<sign>(?<![\w)%\]])[-+])?(?<!\w)(?<![0-9]\.)"  # not the 5 of "x5", nor the minus of "7-5"
    r"(?:(?P<whole>[0-9]{1,15}) (?:and )?(?=[0-9]{1,15} ?/ ?[0-9]))?"  # the 1 of "1 1/2"
    rf"(?P<top>{_PLAIN})(?: ?/ ?(?P<bottom>{_PLAIN}))?"
    r"(?:[eE](?P<e>[-+]?[0-9]+)(?!\w)| ?[*xX] ?10 ?\^ ?(?P<power>[-+]?[0-9]+))?"
    r"(?: (?P<scale>thousand|million|billion|trillion)\b)?"
)
_SCALES = {None: 1, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_LONGEST_NUMBER = 100  # characters, and the greatest power of ten: what is longer is no answer to a school problem

_CHARACTERS = str.maketrans(
    dict.fromkeys("\u2212\u2010\u2011\u2012\u2013\u2014\ufe63\uff0d", "-")  # minus, hyphens and dashes
    | dict.fromkeys("\u00a0\u2007\u2009\u202f\t\r", " ")
    | {"\u00d7": "*", "\u00b7": "*", "\u22c5": "*", "\u2248": "=", "\u2044": "/", "\uff0c": ","}
)
_COMMANDS = (  # LaTeX that dresses a number without changing it; any other command makes it unreadable
    "boxed|fbox|text|textbf|textit|textrm|mathrm|mathbf|mathit|mbox|left|right|displaystyle|large|Large|bf|rm|"
    "quad|qquad|circ|degree|pounds|euro|dollar|big|Big|underline|dots|ldots"
)
_FRACTION = re.compile(r"([0-9])?\s?\\[cdt]?frac\s?(?:\{([^{}]{1,60})\}\s?\{([^{}]{1,60})\}|([0-9])\s?([0-9]))")
_REWRITES = [
    (re.compile(pattern), new)
    for pattern, new in (
        (r"\\([$%#&])", r"\1"),
        (r"\{,\}", ","),  # 1{,}234
        (r"\\!", ""),
        (r"\\[,;: ]|~", " "),
        (r"\\[()\[\]]|\$\$|\*\*|__|`", " "),  # delimiters of formulas, Markdown's bold and code
        (r"\\(?:times|cdot)(?![A-Za-z])", "*"),
        (r"\\approx(?![A-Za-z])", "="),
        (r"\^ ?\{?\\circ(?![A-Za-z])\}?", " "),
        (rf"\\(?:{_COMMANDS})(?![A-Za-z])", " "),
        (r"[{}]", " "),
        (r"-[$€£¥₹]", "-"),
        (r"[$€£¥₹]", " "),
        (r" {2,}", " "),
        (r"(?<=[A-Za-z]) ?(?:\^ ?-?[0-9]{1,3}|[²³])", ""),  # cm^2
    )
]
_ANSWER_IS = re.compile(r"\banswer\b[^.\n:=]{0,60}?(?:\bis\b|:|=)[\s:*(\[]*", re.IGNORECASE)


def plain_text(text: str) -> str:
    """Text whose numbers stand free: LaTeX, currency signs, Markdown and typographic characters are taken off."""

    def slash(match: re.Match[str]) -> str:
        whole, top, bottom, digit, other = match.groups()
        return f"{whole + ' ' if whole else ''}{(top or digit).strip()}/{(bottom or other).strip()}"

    text = _FRACTION.sub(slash, text.translate(_CHARACTERS))
    for pattern, new in _REWRITES:
        text = pattern.sub(new, text)
    return text


def parse_number(text: str) -> Fraction | None:
    """
    The one number that a short text states, units aside: "$1,234.50", "-3/4 cup", "x = 1.2e3", "5\\%".

    None where it states none or several, where something other than a number is meant (a root, pi), and where the
    number is longer than `_LONGEST_NUMBER`. Percent is a unit: "50%" is 50.
    """
    if len(text) > 3 * _LONGEST_NUMBER:
        return None
    text = plain_text(text).rpartition("=")[2].strip()
    text = re.sub(r"^([-+]) ", r"\1", text)
    found = list(_NUMBER_IN_TEXT.finditer(text))
    if len(found) != 1 or re.search(r"[\\√π^<>≤≥²³]", text.replace(found[0][0], "")):
        return None
    return _value(found[0])


def _value(match: re.Match[str]) -> Fraction | None:
    """The value of a match of `_NUMBER_IN_TEXT`, None where it is too long or divides by zero."""
    power = int((match["e"] or match["power"] or "0")[:6])
    if len(match[0]) > _LONGEST_NUMBER or abs(power) > _LONGEST_NUMBER:
        return None
    top, bottom = (Fraction(re.sub("[ ,]", "", part or "1")) for part in (match["top"], match["bottom"]))
    if bottom == 0:
        return None
    value = (int(match["whole"] or 0) + top / bottom) * Fraction(10) ** power * _SCALES[match["scale"]]
    return -value if match["sign"] == "-" else value


def same_number(first: str, second: str) -> bool:
    """Whether both texts state a number, and the same: exactly, so 1/3 is not 0.33."""
    a, b = parse_number(str(first)), parse_number(str(second))
    return a is not None and a == b


def boxed(text: str) -> list[str]:
    """What stands in each outermost \\boxed{...} that is closed and not empty, in one pass over the braces."""
    spans: list[tuple[int, int]] = []
    opened: list[tuple[int, bool]] = []  # where the content begins, and whether it is a box's
    for match in re.finditer(r"\\(?:boxed|fbox)\s?\{|\\[{}]|[{}]", text):
        if match[0] == "}" and opened:
            begin, is_box = opened.pop()
            if is_box:
                while spans and spans[-1][0] > begin:  # boxes within this one
                    spans.pop()
                spans.append((begin, match.start()))
        elif match[0].endswith("{") and match[0] != "\\{":
            opened.append((match.end(), len(match[0]) > 1))
    contents = [text[begin:end].strip() for begin, end in spans]
    return [content for content in contents if content]


def hash_answers(text: str) -> list[str]:
    """The numbers of lines "#### 42"; a Markdown heading "#### 1. Add" is none."""
    answers = []
    for rest in re.findall(r"(?<!#)####(?!#)([^\n#]{1,200})", text):
        plain = plain_text(rest).strip()
        match = _NUMBER_IN_TEXT.match(re.sub(r"^([-+]) ", r"\1", plain))
        if match and "\\boxed" not in rest and not re.match(r"[.):] ?\w", plain[match.end() :]):
            # of "6 * 7 = 42" the 42, and so of "42 = 6 * 7", whose left side is a number already
            left, equals, right = plain.partition("=")
            if equals and re.fullmatch(r"[-+*/() 0-9.,]*", left) and not _NUMBER_IN_TEXT.fullmatch(left.strip()):
                match = _NUMBER_IN_TEXT.match(right.strip()) or match
            answers.append(match[0])
    return answers


def extract_answer(text: str) -> str | None:
    """
    The part of a completion that states its answer, None where it names no number.

    In this order, the last of each: \\boxed{...}, a line "#### 42", "the answer is 42", any number.
    """
    if boxes := boxed(text):
        return boxes[-1]
    if hashes := hash_answers(text):
        return hashes[-1]
    plain = plain_text(text)
    for match in reversed(list(_ANSWER_IS.finditer(plain))):
        clause = re.split(r"\n|[.!?](?=\s|$)", plain[match.end() : match.end() + 200], maxsplit=1)[0]
        clause = clause.rpartition("=")[2].strip()
        if plain[match.start() : match.end()].count("\n") == 0:  # else "- 18" is an entry of a list
            clause = re.sub(r"^([-+]) (?=[0-9.])", r"\1", clause)
        if found := _NUMBER_IN_TEXT.search(clause):
            return found[0]
    numbers = deque(_NUMBER_IN_TEXT.finditer(plain), maxlen=1)
    return numbers[0][0] if numbers else None
