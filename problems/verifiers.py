"""
Verifiers: functions that compare what a completion states with the column `answer`, by name.

Each gives 1 or 0. What a completion states is all that it marks, by \\boxed{...}, "####
42", <answer>...</answer> or a last line "Answer: ..."; every mark must be right. Without marks it is what the last line
or sentence says, if that is one thing. Nothing is evaluated, and each step takes time linear in the text: completions
come by the thousand from a model that is paid to find a hole. Left out: number words, and what denies or compares.
"""

import functools
import json
import re
from collections.abc import Callable, Collection, Sequence
from decimal import Decimal
from typing import Any, NamedTuple

from problems.examples import short
from problems.mathematics import Verdict, compare_mathematics, find_formula, math_pool
from problems.mathematics import is_mathematics as is_formula
from problems.quantities import LONGEST, is_quantity, read_number
from problems.texts import DENIAL as _NOT
from problems.texts import clean_text, ends_in_lead, folded

Verifier = Callable[..., list[float]]

MOST_WORDS = 8  # of an answer that `auto` compares as a text: longer ones can hardly be repeated to the letter
MOST_CHOICES, LEAST_ROWS = 10, 3  # distinct answers, and rows for each


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
    text = clean_text(answer).strip()
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
            reply = clean_text(text.rpartition("</think>")[2].partition("<think>")[0]).strip()
            statements = marks(reply) if stated is None else [stated(gold, one) for one in marks(reply) or [reply]]
            verdicts.append([bool(gold) and is_right(gold, one) for one in statements])
        asked = list({one for told in verdicts for one in told if isinstance(one, tuple)})
        answers = math_pool().ask(asked) if asked else []
        right = {pair for pair, one in zip(asked, answers, strict=True) if one.value is True} | {True}
        return [float(bool(told) and right.issuperset(told)) for told in verdicts]

    return verify


# ---- texts, choices, JSON

_LEADS = re.compile(  # what a sentence says before its answer
    r"(?:^|\b(?:is|are|was|were|be|as|on|at|in|equals|option|choice|answer)\b|[:=>])[\s*_`\"'(\[$]*(?:the |an? )?$"
)


def _ends_with(line: str, gold: str) -> bool:
    """Whether the last sentence of a line is "... is GOLD", with no other number before a gold with digits."""
    whole = folded(line) if folded(line).endswith(gold) else folded(line).rstrip(")]")
    head = re.split(r"[.!?] ", whole.removesuffix(gold))[-1]
    is_other = len(head) > LONGEST or _NOT.search(head) or (re.search("[0-9]", gold) and re.search("[0-9]", head))
    return whole.endswith(gold) and not is_other and (bool(_LEADS.search(head)) or ends_in_lead(head))


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


# ---- numbers and formulas


@functools.lru_cache(maxsize=2**16)
def is_number(answer: str) -> bool:
    """Whether an answer is a number, with its units or at most two words: not a date, a time or a code."""
    return is_quantity(stated_by(answer))


@functools.lru_cache(maxsize=2**16)
def is_mathematics(answer: str) -> bool:
    """Whether an answer is a number or a formula: no word, no date, no code."""
    return is_formula(stated_by(answer))


def _same_formula(gold: str, statement: str) -> Verdict:
    """Compares texts where the right answer is one, and else numbers or formulas."""
    if not is_mathematics(gold):
        return _same_text(gold, statement)
    return compare_mathematics(gold, statement)


def _same_mark(gold: str, statement: str) -> Verdict:
    read = read_number(statement)
    return not (read and re.search(r"[^\W\d_]{2}", read.lead)) and _same_formula(gold, statement)  # not "at least 42"


def _formula(gold: str, text: str) -> str:
    return find_formula(text) if is_mathematics(gold) else text


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
    "math": Kind(is_mathematics, lambda _: math_correct, "mathematics: values equal, read by math-verify's grammar"),
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
