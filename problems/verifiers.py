"""
Verifiers: functions that compare what a completion states with the column `answer`, by name.

Each gives 1 or 0. What a completion states is all that it marks, by \\boxed{...}, "####
42", <answer>...</answer> or a last line "Answer: ..."; every mark must be right. Without marks it is what the last line
or sentence says, if that is one thing. Nothing is evaluated, and each step takes time linear in the text: completions
come by the thousand from a model that is paid to find a hole. Left out: number words, and what denies or compares.
"""

import functools
import json
import logging
import os
import re
from collections.abc import Callable, Collection, Sequence
from decimal import Decimal
from fractions import Fraction
from typing import Any, NamedTuple

from problems.examples import short
from problems.formulas import prepare_sympy
from problems.workers import Pool

Verifier = Callable[..., list[float]]
Verdict = bool | tuple[str, str]  # or two formulas that the library is asked about

LONGEST = 400  # characters of what states an answer
MOST_WORDS = 8  # of an answer that `auto` compares as a text: longer ones can hardly be repeated to the letter
MOST_CHOICES, LEAST_ROWS = 10, 3  # distinct answers, and rows for each
_CHARACTERS = str.maketrans(
    {0xFF01 + place: chr(0x21 + place) for place in range(94)}  # fullwidth
    | dict.fromkeys("\u2212\u2010\u2011\u2012\u2013\u2014\ufe63", "-")
    | dict.fromkeys("\u00a0\u2007\u2009\u202f\t\r", " ")
    | {"\u00d7": "*", "\u00b7": "*", "\u22c5": "*", "\u2044": "/", "\u2019": "'", "\u3002": ". ", "\u2248": "="}
    | {"\u00b2": "^2", "\u00b3": "^3", "\u03c0": "\\pi ", "\u221a": "\\sqrt "}
)
_NOT = re.compile(r"\b(?:not|never|neither|cannot)\b|n't\b|\\neq?\b|[\u2260\u00ac]", re.I)


# ---- what a completion states


def boxed(text: str) -> list[str]:
    """What stands in each outermost \\boxed{...} that is closed and not empty, in one pass over the braces."""
    contents, depth, box = [], 0, None
    for match in re.finditer(r"\\(?:boxed|fbox)\s?\{|\\[{}]|[{}]", text):
        if match[0] == "}":
            depth -= 1
            if box and depth == box[0]:
                contents.append(text[box[1] : match.start()].strip())
                box = None
        elif match[0].endswith("{") and match[0] != "\\{":
            if match[0] != "{" and not box:
                box = depth, match.end()
            depth += 1
    return list(filter(None, contents))


def marks(text: str) -> list[str]:
    """All that a text marks; a line "#### Plan" or "#### 1. Add" is a heading, unless it is the last."""
    lines = re.findall(r"(?<!#)####(?!#) ?([^\n#]*[^\s#])( *\Z)?", text)
    hashed = [line for line, last in lines if last or not re.match(r"\W*(?:[0-9]+[.):] ?)?[A-Za-z]|.*\\boxed", line)]
    last = re.match(r"[\s*_#>-]*(?:final |my |the )?answer[\s*_]*: *([^\\<]*\w.*)", _last_line(text), re.I)
    return boxed(text) + hashed + re.findall(r"<answer>([^<]*\S[^<]*)</answer>", text) + ([last[1]] if last else [])


def stated_by(answer: str) -> str:
    """What to compare with: an answer, or what it marks."""
    text = answer.translate(_CHARACTERS).strip()
    return (marks(text) or [text])[-1]


def _last_line(text: str) -> str:
    return text.rstrip().rpartition("\n")[2]


def _verifier(
    is_right: Callable[[str, str], Verdict], stated: Callable[[str, str], str] | None = lambda _, text: text
) -> Verifier:
    """
    The verifier that asks `is_right(gold, statement)` of all statements of a text.

    stated: gives the statement of each mark, or else of the text. None: marks are statements, and there are no others.
    """

    def verify(completions: Sequence[str], answer: Sequence[Any], **_: Any) -> list[float]:
        golds = [stated_by("" if known is None else str(known)) for known in answer]
        verdicts: list[list[Verdict]] = []
        for text, gold in zip(completions, golds, strict=True):
            reply = text.rpartition("</think>")[2].partition("<think>")[0].translate(_CHARACTERS).strip()
            statements = marks(reply) if stated is None else [stated(gold, one) for one in marks(reply) or [reply]]
            verdicts.append([bool(gold) and is_right(gold, one) for one in statements])
        asked = list({one for told in verdicts for one in told if isinstance(one, tuple)})
        answers = _math_pool().ask(asked) if asked else []
        right = {pair for pair, one in zip(asked, answers, strict=True) if one.value is True} | {True}
        return [float(bool(told) and right.issuperset(told)) for told in verdicts]

    return verify


# ---- texts, choices, JSON

_DRESS = " *_`\"'$"
_LEADS = re.compile(  # what a sentence says before its answer
    r"(?:^|\b(?:is|are|was|were|be|as|on|at|in|equals|option|choice|answer)\b|[:=>])[\s*_`\"'(\[$]*(?:the |an? )?$"
)


def folded(text: str) -> str:
    """A text in lower case without its dress: Markdown, quotes, full stop, article, brackets around one word."""
    text = re.sub(r"\\(?:text|math)[a-z]*\{([^{}]*)\}", r"\1", text.translate(_CHARACTERS))
    text = " ".join(text.casefold().split()).lstrip(_DRESS).rstrip(_DRESS + ".,;:!")
    return re.sub(r"^\((\w+)\)$", r"\1", re.sub(r"^(?:the|an?) ", "", text))


def _ends_with(line: str, gold: str) -> bool:
    """Whether the last sentence of a line is "... is GOLD", with no other number before a gold with digits."""
    whole = folded(line) if folded(line).endswith(gold) else folded(line).rstrip(")]")
    head = re.split(r"[.!?] ", whole.removesuffix(gold))[-1]
    is_other = len(head) > LONGEST or _NOT.search(head) or (re.search("[0-9]", gold) and re.search("[0-9]", head))
    return whole.endswith(gold) and not is_other and bool(_LEADS.search(head))


def _same_text(gold: str, statement: str) -> bool:
    known, line = folded(gold), _last_line(statement)
    return known in (folded(statement), folded(line)) or _ends_with(line, known)


def choice_of(choices: Collection[str]) -> Verifier:
    """
    The verifier of answers that are a few known ones.

    Right is a last line that is the right one, begins with it and a punctuation mark, or ends in it as `_ends_with`
    says, and that names no other, denies nothing and has no "or"; or a JSON object that holds nothing but it.
    """
    ordered = sorted(set(map(stated_by, choices)), key=len, reverse=True)
    case = re.I if any(len(choice) > 1 for choice in ordered) else 0  # letters count as capitals: "a" is an article
    one = re.compile(rf"(?<![\w'-])(?:{'|'.join(map(re.escape, ordered))})(?![\w'-])", case)

    def is_right(gold: str, statement: str) -> bool:
        line, known = _last_line(statement), folded(gold)
        if isinstance(its := read_json(statement), dict):
            is_other = any(map(_NOT.search, its)) or {*map(folded, one.findall(statement))} - {known}  # as a key, too
            return not is_other and [known] == [isinstance(value, str) and folded(value) for value in its.values()]
        named = {folded(name) for name in one.findall(line)}
        if named != {known} or _NOT.search(line) or re.search(r"\bor\b", line, re.I):
            return known in (folded(statement), folded(line))
        return _same_text(gold, statement) or bool(re.match(rf"\W*{re.escape(gold)}\W*[-).:,;]", line, case))

    return _verifier(is_right)


def read_json(text: str) -> Any:
    """The object or list that a text is; None for any other. Numbers are tuples of one, so that 1 is not true."""
    number: Any = lambda digits: (Decimal(digits),)  # noqa: E731
    try:
        value = json.loads(text, parse_int=number, parse_float=number, parse_constant=int)  # of NaN no int
    except (ValueError, ArithmeticError, RecursionError):
        return None
    return value if isinstance(value, (dict, list)) else None


def _same_json(gold: str, statement: str) -> bool:
    known = read_json(gold)
    first, last = "{}" if isinstance(known, dict) else "[]"
    begin = max(statement.find(first), 0)
    stated = read_json(statement[begin : statement.rfind(last) + 1])  # what two objects span is no JSON
    head = _last_line(statement[:begin])
    return known is not None and known == stated and not _NOT.search(head) and not re.search(r"[{\[]", head)


# ---- numbers

_DIGITS = r"(?:[1-9][0-9]{0,2}(?:,[0-9]{3})+|[0-9]{1,3}(?: [0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+"
_NUMBER = re.compile(  # not the 5 of "x5" or "5x", the minus of "7-5", a part of "10:30", "1.2.3" or "12,34"
    r"(?P<sign>(?<![\w)%\]}])[-+] ?)?(?P<money>[$\u20ac\u00a3])? ?(?P<minus>-)?"
    rf"(?<![A-Za-z0-9_^])(?<!\^ )(?<![0-9][.,:/])(?P<top>(?>{_DIGITS}))(?:[eE](?P<power>[-+]?[0-9]{{1,2}})(?![0-9]))?"
    rf"(?: ?/ ?(?P<bottom>(?>{_DIGITS})))?(?![.,:/]?[0-9]|[eE][-+]?[0-9]|[a-fijknp-rt-z](?![A-Za-z]))"
    r"(?: (?P<scale>hundred|thousand|million|billion|trillion)\b)?"
)
_SCALES = {None: 1, "hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_REWRITES = (  # LaTeX and Markdown that dress a number without changing it
    (r"\\[cdt]?frac ?(?:\{([^{}]{1,60})\} ?\{([^{}]{1,60})\}|([0-9])([0-9]))", r" \1\3/\2\4"),
    (r"\\([$%#&])", r"\1"),
    (r"\{,\}", ","),  # 1{,}234
    (r"\^? ?\{?\\(?:circ|degree)(?![A-Za-z])\}?", "\u00b0"),
    (r"\\[!,;: ()\[\]]|\*\*|[_`~]", " "),
    (r"\\(?:[fm]?box(?:ed)?|text[a-z]*|math[a-z]+|underline|left|right|q?quad|displaystyle)(?![A-Za-z])", " "),
    (r"[{}]", " "),
    (r"\$\$?([^\s$]|[^\s$][^$]{0,300}[^\s$])\$\$?(?![0-9])", r" \1 "),
    (r"(?i:\b(?:minus|negative) ?(?=[0-9]))", "-"),
    (r"\\(?:times|cdot|div)(?![A-Za-z])", "*"),
    (r" {2,}", " "),
    (r"(?:[-+*/() 0-9.$]|,(?=[0-9]{3}))*[0-9)] *=(?= *[-$]? ?[0-9])", ""),  # 6 * 7 = 42
)
_WORD = re.compile(  # of prose, not of a formula
    r"(?<![\\A-Za-z])(?!(?:sqrt|sin|cos|tan|log|exp|[bpv]?matrix)\b)(?:[^\W\d_]{3,}|or|and|to|is|if|it|in|of|no)\b"
    r"|[\u0400-\u1fff\u3040-\u9fff\uac00-\ud7a3]"
)
_AROUND = re.compile(  # what may stand beside a number that is all of the answer
    r"(?:[^\W\d_]{2,}+|[^\x00-\x7f\u2260\u2264\u2265\u00b1\u00ac\u221e]|\b[A-Za-z] ?=|[A-Za-z] ?\^ ?[23]|"
    r"\b[aAIghlms]\b|[\s.,:;%()'\"*$/=-])*"
)
_UNIT = re.compile(r"[^\W\d_]+(?: ?\^ ?[23])?|[%\u00b0$\u20ac\u00a3/'\"]")
_SPELLED = dict(pair.split("=") for pair in """
    %=percent $=dollar \u20ac=euro \u00a3=pound \u00b0=degree km=kilometer m=meter cm=centimeter mm=millimeter
    kg=kilogram g=gram h=hour min=minute s=second metre=meter kilometre=kilometer""".split())  # fmt: skip


def plain_text(text: str) -> str:
    """A short text whose numbers stand free: LaTeX, Markdown and the left side of "6 * 7 = 42" are taken off."""
    text = text.translate(_CHARACTERS)
    for pattern, new in _REWRITES:
        text = re.sub(pattern, new, text)
    return text


def has_words(text: str) -> bool:
    """Whether a text holds a word of prose, whose letters are no factors of a formula."""
    return bool(_WORD.search(plain_text(text)))


class Quantity(NamedTuple):
    value: Fraction
    units: list[str]  # the sign of money before it, the words and signs after it
    lead: str  # what stands before it


@functools.lru_cache(maxsize=2**12)
def read_number(text: str) -> Quantity | None:
    """
    The one number that a short text states: "$1,234.50", "-3/4 cup", "x = 2.5 million", "5\\%", "There are 7."

    None where it states none, or several, or where a sign makes something else of it: a root, a bound, a power.
    """
    if len(text) > LONGEST:
        return None
    plain = plain_text(text)
    plain = plain.rstrip("! ") if _WORD.search(plain) else plain  # else a factorial
    matches = list(_NUMBER.finditer(plain))
    if len(matches) != 1 or not _AROUND.fullmatch(_NUMBER.sub(" ", plain)):
        return None
    match = matches[0]
    top, bottom = (Fraction(re.sub("[ ,]", "", part or "1")) for part in (match["top"], match["bottom"]))
    if not bottom:
        return None
    value = top / bottom * _SCALES[match["scale"]] * Fraction(10) ** int(match["power"] or 0)
    after = _UNIT.findall(re.split(r"[.,;:!?()=\n]", plain[match.end() :], maxsplit=1)[0])
    spelled = [_SPELLED.get(unit, unit.casefold()) for unit in [match["money"], *after] if unit]
    units = [unit[:-1] if len(unit) > 3 and unit.endswith("s") else unit for unit in spelled]
    return Quantity(-value if "-" in f"{match['sign']}{match['minus']}" else value, units, plain[: match.start()])


def _same_quantity(right: Quantity, stated: Quantity) -> bool:
    """Whether values are equal, and units where both have one: "42 km" is no 42 km/h and no 42 km per hour."""
    num = len(right.units)
    same_unit = stated.units[:num] == right.units and stated.units[num : num + 1] not in (["/"], ["per"])
    return right.value == stated.value and (not right.units or not stated.units or same_unit)


# ---- which answers are numbers, which are formulas

# of an answer that has the shape of a number: 007, 3rd, 5B, 3 pm, 4 July
_NO_NUMBER = re.compile(r"^\W*0[0-9]|/ ?0|[0-9](?:st|nd|rd|th|[A-Z])|[0-9] ?(?:[AaPp]\.?[Mm]\b|[A-Z][a-z]{2})")
_FORMULA = re.compile(
    r"\\[A-Za-z]{2}|\\\{|\^|\b(?:sqrt|log|ln|sin|cos|tan|exp)\(|[0-9]pi\b|[\[(][^\[\]()]+,[^\[\]()]+[\])]|"
    r"-?[0-9]+(?:, -?[0-9]+)+$|[0-9][a-z](?![A-Za-z0-9])|\b[a-z] ?[-+*/=<>] ?[a-z0-9(]|[0-9)] ?[-+*/<>] ?[a-z]\b"
)


@functools.lru_cache(maxsize=2**16)
def is_number(answer: str) -> bool:
    """Whether an answer is a number, with at most two words of unit: not a date, a time or a code."""
    gold = stated_by(answer)
    if not (read := read_number(gold)) or len(read.units) > 2 or read.lead.strip(" $"):
        return False
    return not _NO_NUMBER.search(plain_text(gold).strip(" .$"))


@functools.lru_cache(maxsize=2**16)
def is_mathematics(answer: str) -> bool:
    """Whether an answer is a number or a formula: no word, no date, no code."""
    gold = stated_by(answer)
    is_formula = len(gold) <= LONGEST and not has_words(gold) and not re.search("[:#@]", gold) and _FORMULA.search(gold)
    return bool(is_formula) or is_number(gold)


# ---- mathematics, by the library math-verify

MATH_LIMIT = 5.0  # seconds for one answer; the slowest of the tests' table takes half a second
_ENDLESS = re.compile(  # powers of powers of numbers, factorials of factorials, numbers that fill a screen
    r"[0-9)}]\s*(?:\^|\*\*)\s*[({]*\s*-?[0-9.]+\s*[)}]*\s*(?:\^|\*\*)|(?:\^|\*\*)\s*[({]*\s*-?[0-9]{5,}|"
    r"!\s*!|[0-9]{5,}\s*!|[0-9]{200,}"
)
_CLOSED = re.compile(  # a formula that comes to one number; sums and products alone are a calculation left undone
    r"(?!.*[0-9] +[0-9])(?=.*(?:\\(?:sqrt|binom|log|ln|[cdt]?frac)|[\^!|]|sqrt))"
    r"(?:[0-9.+*/(){}\[\]^!_ -]|\\?(?:sqrt|binom|log|ln|[cdt]?frac|pi|times|cdot|left|right)|^\||\|$)+"
)


@functools.cache
def _math_pool() -> Pool:
    """Workers, for the library's own time limit is a signal, which raises in every thread but the first."""
    return Pool(f"{__name__}:make_math_checker", (), num=min(4, os.cpu_count() or 1), limit=MATH_LIMIT, sealed=True)


def make_math_checker() -> Callable[[tuple[str, str]], bool]:
    """What a worker does: the right answer and another, as LaTeX, to whether they are the same."""
    prepare_sympy()  # before the library takes its parser over
    from math_verify import parse, verify

    logging.disable(logging.CRITICAL)  # it warns of a time limit that is ours here

    def check(pair: tuple[str, str]) -> bool:
        right, stated = (parse(f"${text}$", parsing_timeout=None) for text in pair)
        return bool(verify(right, stated, timeout_seconds=None))

    assert check(("\\frac{1}{2}", "0.5"))  # the first one loads the grammar, which takes longer than most answers
    return check


def _latex(formula: str) -> str:
    """A formula as math-verify reads it, sqrt(3) as \\sqrt{3}."""
    return re.sub(r"(?<!\\)sqrt *\(([^()]*)\)", r"\\sqrt{\1}", formula.strip(" .$*:"))


def _same_formula(gold: str, statement: str) -> Verdict:
    """As texts where the right answer is one, exactly where both are plain numbers, else by the library."""
    if not is_mathematics(gold):
        return _same_text(gold, statement)
    right, stated = read_number(gold), read_number(statement)
    if right and stated:
        return _same_quantity(right, stated)
    if right and (right.units or not _CLOSED.fullmatch(statement.strip(" .$"))):
        return False
    if not statement or len(statement) > LONGEST or has_words(statement) or _ENDLESS.search(statement):
        return False
    return statement == gold or (_latex(gold), _latex(statement))


def _same_mark(gold: str, statement: str) -> Verdict:
    read = read_number(statement)
    return not (read and re.search(r"[^\W\d_]{2}", read.lead)) and _same_formula(gold, statement)  # not "at least 42"


def _formula(gold: str, text: str) -> str:
    """For mathematics the only formula of the last sentence with one; "" where it has several, denies or asks."""
    if not is_mathematics(gold):
        return text
    sentences = [part for part in re.split(r"\n|(?<=[.!?])[*)\"']*(?:\s|$)", text) if part.strip()]
    last = ([part for part in sentences if re.search(r"[0-9]|\\[A-Za-z]{2}", part)] or sentences or [""])[-1].strip()
    if len(last) > LONGEST or last.rstrip("*)\"' ").endswith("?") or _NOT.search(last):
        return ""
    formulas = [part for part in _WORD.split(last) if re.search(r"[0-9=+*/^\\$]|(?<!')\b[b-z]\b", part)]
    if read_number(last):
        return last
    formula = formulas[0] if len(formulas) == 1 and not re.search(r"\bor\b", last) else ""
    if span := re.fullmatch(r"[A-Za-z ,:*]*\$+([^$]+)\$+[ .,:*]*", re.sub(r"\\[()\[\]]", "$", formula)):
        return span[1]
    is_apart = last.startswith(formula) or re.match("[ :*,]", formula)  # not (x+1) of arcsin(x+1)
    return formula.strip(" .,:*") if is_apart else ""


# ---- by name

exact = _verifier(_same_text)
number = math_correct = _verifier(_same_formula, _formula)
marked = _verifier(_same_mark, None)


class Kind(NamedTuple):
    fits: Callable[[str], Any]  # whether an answer can be compared so
    make: Callable[[Sequence[str]], Verifier]  # of all answers
    description: str


_NAME = re.compile(r"[^\W\d_]+(?:[ '/-][^\W\d_]+){0,2}")
VERIFIERS = {  # strictest first, as `auto` tries them
    "json": Kind(read_json, lambda _: _verifier(_same_json), "JSON: keys and values equal, order and spaces free"),
    "number": Kind(is_number, lambda _: number, "numbers: values equal, units where both have one"),
    "choice": Kind(
        lambda one: _NAME.fullmatch(stated_by(one)),
        choice_of,
        'choices: the last line is it, opens with it and a mark, or ends in it after a word such as "is" or "in"',
    ),
    "math": Kind(is_mathematics, lambda _: math_correct, "mathematics, by math-verify"),
    "exact": Kind(bool, lambda _: exact, "texts: equal but for case, spaces, article and full stop"),
    "marked": Kind(bool, lambda _: marked, "what \\boxed{}, ####, <answer> or a last Answer: marks, as mathematics"),
}


def is_compared(answer: str) -> bool:
    """Whether there is an answer, and it can be repeated to the letter or is read by a verifier."""
    stated = stated_by(answer)
    return bool(stated and (len(stated.split()) <= MOST_WORDS or read_json(answer) or is_mathematics(answer)))


def choose(name: str, answers: Sequence[str]) -> tuple[str, Verifier]:
    """
    The name of a verifier and its function, which gives None to what `is_compared` leaves out.

    name: `auto` is the strictest that fits all answers. ValueError names an answer that does not fit.
    """
    known = list(filter(is_compared, answers))
    num = len(set(map(folded, known)))
    is_few = num <= MOST_CHOICES and len(known) >= LEAST_ROWS * num
    fitting = [key for key, kind in VERIFIERS.items() if all(map(kind.fits, known)) and (key != "choice" or is_few)]
    name = fitting[0] if name == "auto" else name
    if odd := [answer for answer in known if not VERIFIERS[name].fits(answer)]:
        raise ValueError(f"--verifier {name} cannot compare with the answer {short(odd[0])}; take --verifier auto")
    made = VERIFIERS[name].make(known)

    def verify(completions: Sequence[str], answer: Sequence[Any], **_: Any) -> list[Any]:
        values = made(completions=completions, answer=answer)
        return [value if is_compared(str(one or "")) else None for value, one in zip(values, answer, strict=True)]

    return name, verify
