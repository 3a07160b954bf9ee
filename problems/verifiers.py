"""
Verifiers: functions that compare what a completion states with the column `answer`, by name.

Each gives 1 or 0. What a completion states is all that it marks, by \\boxed{...}, "####
42", <answer>...</answer> or a last line "Answer: ..."; every mark must be right. Without marks it is what the last line
or sentence says, if that is one thing. Nothing is evaluated, and each step takes time linear in the text: completions
come by the thousand from a model that is paid to find a hole. Left out: number words, and what denies or compares.
"""

import functools
import re
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

from problems import choices, statements
from problems.examples import shorten_value
from problems.json_answers import read_json, read_json_statement
from problems.mathematics import Verdict, compare_mathematics, find_formula, math_pool
from problems.mathematics import is_mathematics as is_formula
from problems.quantities import LONGEST, is_quantity, is_same_quantity, read_number
from problems.texts import DENIAL as _NOT
from problems.texts import clean_text, ends_in_lead, fold_text

Verifier = Callable[..., list[float]]

MOST_WORDS = 8  # of an answer that `auto` compares as a text: longer ones can hardly be repeated to the letter
MOST_CHOICES, LEAST_ROWS = 10, 3  # distinct answers, and rows for each


# ---- what a completion states

Read = Callable[
    [str, str], list[str]
]  # of a right answer and a text, its statements: each of them must be right


def clean(text: str) -> str:
    """A text in the characters that are compared, without space around it."""
    return clean_text(text).strip()


def boxed(text: str) -> list[str]:
    """What stands in each outermost \\boxed{...} that is closed and not empty."""
    return [mark.text for mark in statements.find_boxes(text)]


def marks(text: str) -> list[str]:
    """All that a text marks after its thoughts: boxes, lines "#### 42", <answer> tags, and a last line "Answer: 42"."""
    return [mark.text for mark in statements.find_marks(statements.strip_thoughts(text))]


@functools.lru_cache(maxsize=2**16)
def stated_by(answer: str) -> str:
    """What to compare with: an answer without its thoughts, or what it marks."""
    text = clean(statements.strip_thoughts(answer)) or clean(answer)
    return (marks(text) or [text])[-1]


def right_answers(answer: Any) -> list[str]:
    """The right answers of a row's column `answer`: any text of a list is right. Empty where there is none."""
    if answer is None:
        return []
    members = answer if isinstance(answer, (list, tuple)) else [answer]
    return [str(member) for member in members if member is not None and str(member).strip()]


def _last_line(text: str) -> str:
    return text.rstrip().rpartition("\n")[2]


def _verifier(is_right: Callable[[str, str], Verdict], read: Read) -> Verifier:
    """
    The verifier that asks `is_right(gold, statement)` of all statements that `read(gold, text)` finds in a text.

    A text that has no statement is wrong. Of several right answers any may be the one that is stated.
    """

    def verdicts_of(text: str, gold: str) -> list[Verdict]:
        verdicts = [is_right(gold, statement) for statement in read(gold, text)] if gold else []
        return verdicts or [False]

    def verify(completions: Sequence[str], answer: Sequence[Any], **_: Any) -> list[float]:
        rows: list[list[list[Verdict]]] = []
        for text, right in zip(completions, answer, strict=True):
            reply = clean(statements.strip_thoughts(text))
            golds = dict.fromkeys(map(stated_by, right_answers(right)))
            rows.append([verdicts_of(reply, gold) for gold in golds])

        asked = {
            verdict
            for row in rows
            for verdicts in row
            for verdict in verdicts
            if isinstance(verdict, tuple)
        }
        pairs = list(asked)
        replies = math_pool().answer_all(pairs) if pairs else []
        equal: set[Verdict] = {
            pair for pair, reply in zip(pairs, replies, strict=True) if reply.value is True
        }
        equal.add(True)
        return [float(any(map(equal.issuperset, row))) for row in rows]

    return verify


def _is_any(_: str) -> bool:
    return True


# ---- texts, choices, JSON

_LEADS = re.compile(  # what a sentence says before its answer
    r"(?:^|\b(?:it|that|this)'s|\b(?:is|are|was|were|be|as|on|at|in|equals|option|choice|answer)\b|[:=>])"
    r"[\s*_`\"'(\[$]*(?:the |an? )?$"
)


def _ends_with(line: str, gold: str) -> bool:
    """Whether the last sentence of a line is "... is GOLD", with no other number before a gold with digits."""
    whole = fold_text(line) if fold_text(line).endswith(gold) else fold_text(line).rstrip(")]")
    head = re.split(r"[.!?] ", whole.removesuffix(gold))[-1]
    is_other = (
        len(head) > LONGEST
        or _NOT.search(head)
        or (re.search("[0-9]", gold) and re.search("[0-9]", head))
    )
    return (
        whole.endswith(gold) and not is_other and (bool(_LEADS.search(head)) or ends_in_lead(head))
    )


def _same_text(gold: str, statement: str) -> bool:
    known, line = fold_text(gold), _last_line(statement)
    if len(statement) <= LONGEST + 2 * len(gold) and known == fold_text(statement):
        return True
    return known == fold_text(line) or _ends_with(line, known)


def _is_same_text(first: str, second: str) -> bool:
    return fold_text(first) == fold_text(second)


def read_text(gold: str, text: str) -> list[str]:
    """What a text states where the right answer is a text: see docs/data.md."""
    may_cut = not statements.cut_explanation(gold)[1]  # "Paris (Texas)" is whole
    if pieces := statements.read_marks(text, _is_any):
        return [_without_explanation(piece) for piece in pieces] if may_cut else pieces
    if len(text) <= LONGEST + 2 * len(gold) and fold_text(text) == fold_text(gold):
        return [text]
    if not may_cut:
        return [text]
    first = statements.read_first_statement(text, _is_any, _is_same_text)
    if first.text is not None:
        return [first.text]
    if first.rest is not None:
        return [first.rest]
    line = statements.take_first_line(text, lambda line: _has_shape_of(line, gold))
    if line:
        return [line[0]]
    if _same_text(gold, text):
        return [text]
    sentence = statements.opens_with(
        text, lambda part: fold_text(part) == fold_text(gold) or _says(part, gold)
    )
    return [sentence or _bold_piece(text) or _without_explanation(_last_sentence(text)) or text]


def _without_explanation(piece: str) -> str:
    """A piece without "because" and the like and what follows it, unless that leaves another answer open."""
    if len(piece) > LONGEST:
        return piece
    answer, explanation = statements.cut_explanation(piece)
    return piece if statements.is_open(explanation) else answer


def _last_sentence(text: str) -> str:
    """The last line, if it is a single sentence, in which something is explained; else ""."""
    line = _last_line(text)
    is_short = len(line) <= LONGEST and len(statements.split_sentences(line)) == 1
    return (
        line
        if is_short and not statements.is_question(line) and statements.cut_explanation(line)[1]
        else ""
    )


def _says(sentence: str, gold: str) -> bool:
    """Whether a first sentence says "The capital is GOLD.", and not what others say."""
    is_report = re.search(
        r"\b(?:say|says|said|think|thinks|many|some|people|mistake|wrong|often)\b", sentence, re.I
    )
    return (
        bool(re.match(r"\W*(?:The|It|It's)\b", sentence))
        and not is_report
        and _ends_with(sentence, fold_text(gold))
    )


def _has_shape_of(line: str, gold: str) -> bool:
    """Whether a line looks like an answer such as the right one: as many words, digits or not, a capital or not."""
    if fold_text(line) == fold_text(gold):
        return True
    bare = line.strip(" *_`.!\"'")
    is_as_long = bare.count(" ") <= gold.count(" ")
    has_same_digits = bool(re.search("[0-9]", bare)) == bool(re.search("[0-9]", gold))
    has_same_case = bare[:1].isupper() == gold[:1].isupper()
    is_heading = (
        line.rstrip(" *_").endswith(":") or line.startswith("#") or _HEADING.fullmatch(bare)
    )
    return bool(bare) and is_as_long and has_same_digits and has_same_case and not is_heading


_HEADING = re.compile(
    r"(?:sure|okay|ok|yes|no|hi|hello|solution|explanation|answer|reasoning|analysis|question|step|thinking|response|"
    r"certainly|of course|hmm|well|let me \w+|let's \w+)\W*(?:[0-9]*|there|thing)\W*",
    re.I,
)


def _bold_piece(text: str) -> str:
    """The only bold piece of a text, where its sentence says that it is the answer: "The capital is **Paris**, on"."""
    pieces = list(re.finditer(r"\*\*([^*\n]{1,200})\*\*", text)) if "**" in text else []
    if len(pieces) != 1:
        return ""
    begin = max(text.rfind("\n", 0, pieces[0].start()) + 1, pieces[0].start() - LONGEST)
    head = re.split(r"[.!?] ", text[begin : pieces[0].start()])[-1]
    rest = text[pieces[0].end() :]
    is_open = statements.is_open(rest[:LONGEST]) or _NOT.search(rest[:LONGEST]) or _NOT.search(head)
    is_doubted = any(map(statements.is_taken_back, statements.split_sentences(rest[:LONGEST])))
    is_only = (
        len(rest) <= LONGEST
        and not is_doubted
        and ("\n" not in rest.strip() or "\n" not in text[:begin])
    )
    leads = _LEADS.search(head.casefold()) and re.search(r"\w", head)
    is_stated = leads and is_only and not is_open and not statements.is_question(rest or ".")
    return pieces[0][1] if is_stated else ""


def choice_of(names: Collection[str]) -> Verifier:
    """The verifier of answers that are a few known ones; see problems/choices.py for what states one."""
    known = choices.Choices({stated_by(name) for name in names})

    def is_choice(mark: str) -> bool:
        return bool(known.named_in(choices.clean(mark)) or known.alone(mark))

    @functools.lru_cache(maxsize=2**10)  # a row's right answers ask for the same text
    def read_choices(text: str) -> list[str]:
        stated = choices.read_object(text, known)
        if stated is not None:
            return [stated]
        if pieces := statements.read_marks(text, is_choice):
            return [_choice_of_mark(piece, known) for piece in pieces]
        unmarked = text if not statements.find_marks(text) else _without_marks(text)
        return [choices.read_choice(unmarked, known) or ""]

    def read(_: str, text: str) -> list[str]:
        return read_choices(text)

    def is_right(gold: str, statement: str) -> bool:
        return statement == known.key(gold)

    return _verifier(is_right, read)


def _choice_of_mark(mark: str, known: choices.Choices) -> str:
    stated = choices.read_object(mark, known)
    return (choices.read_choice(mark, known) if stated is None else stated) or ""


def _without_marks(text: str) -> str:
    """A text whose marks, which are of another kind, are left out."""
    pieces, end = [], 0
    for mark in statements.find_marks(text):
        if mark.begin >= end:
            pieces.append(text[end : mark.begin])
            end = mark.end
    return "".join([*pieces, text[end:]])


def _same_json(gold: str, statement: str) -> bool:
    known = read_json(gold)
    return known is not None and known == read_json_statement(statement, type(known))


def read_object(gold: str, text: str) -> list[str]:
    """What a text states where the right answer is JSON."""
    bracket = "{" if gold.lstrip().startswith("{") else "["
    return statements.read_marks(text, lambda mark: bracket in mark, with_sentence=False) or [text]


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
    return not (read and re.search(r"[^\W\d_]{2}", read.lead)) and _same_formula(
        gold, statement
    )  # not "at least 42"


def _formula(gold: str, text: str) -> str:
    return find_formula(text) if is_mathematics(gold) else text


# ---- by name


_NO_MATH_MARK = re.compile(  # "E = h\\nu", "\\text{yes}", "B", "the pigment"
    r"[^\d=]*=[^\d=]*|[\s(]*\\text[a-z]*\{[^{}0-9]*\}[\s).]*|[\s(]*[^\W\d_]+(?:[ ,'-]+[^\W\d_]+)*[\s).]*"
)


def _is_math_mark(mark: str) -> bool:
    """Whether a mark is an attempt at a number, or denies one."""
    return len(mark) > LONGEST or bool(_NOT.search(mark)) or not _NO_MATH_MARK.fullmatch(mark)


def _is_short_formula(value: str) -> bool:
    number = read_number(value)
    is_short = number is not None and len(number.measure.words) <= 2 and not number.lead.strip(" $")
    return bool(is_short or (re.search(r"[0-9\\]", value) and is_mathematics(value)))


def _is_same_value(first: str, second: str) -> bool:
    first_number, second_number = read_number(first), read_number(second)
    if first_number and second_number:
        return is_same_quantity(first_number, second_number)
    return fold_text(first) == fold_text(second)


def read_math(gold: str, text: str) -> list[str]:
    """What a text states where the right answer is a number or a formula: see docs/data.md."""
    if not is_mathematics(gold):
        return read_text(gold, text)
    if pieces := statements.read_marks(text, _is_math_mark if read_number(gold) else _is_any):
        return [
            _formula(gold, _without_explanation(piece) if read_number(gold) else piece)
            for piece in pieces
        ]
    text = _without_marks(text) if statements.find_marks(text) else text
    first = statements.read_first_statement(text, _is_short_formula, _is_same_value)
    if first.text is not None:
        return [first.text]
    if first.rest is not None:
        return [_formula(gold, first.rest)]
    line = statements.take_first_line(text, is_number)
    if line and not _concludes(line[1]):
        return [line[0]]
    return [_formula(gold, text)]


def _concludes(text: str) -> bool:
    """Whether a text ends in a sentence with a number that concludes: "So she has 42.", "6 * 7 = 42"."""
    sentences = [
        sentence for sentence in statements.split_sentences(text) if re.search("[0-9]", sentence)
    ]
    return bool(sentences and (statements.CONCLUDES.match(sentences[-1]) or "=" in sentences[-1]))


def read_marked(gold: str, text: str) -> list[str]:
    """Only what a text marks."""
    is_numeric = is_mathematics(gold) and read_number(gold)
    return statements.read_marks(
        text, _is_math_mark if is_numeric else _is_any, with_sentence=False
    )


exact = _verifier(_same_text, read_text)
number = math_correct = _verifier(_same_formula, read_math)
marked = _verifier(_same_mark, read_marked)


class Kind(NamedTuple):
    fits: Callable[[str], Any]  # whether an answer can be compared so
    make: Callable[[Sequence[str]], Verifier]  # of all answers
    description: str


_NAME = re.compile(r"[^\W\d_]+(?:[ '/-][^\W\d_]+){0,2}")
VERIFIERS = {  # strictest first, as `auto` tries them
    "json": Kind(
        read_json,
        lambda _: _verifier(_same_json, read_object),
        "JSON: keys and values equal, order and spaces free",
    ),
    "number": Kind(is_number, lambda _: number, "numbers: values equal, units where both have one"),
    "choice": Kind(
        lambda answer: _NAME.fullmatch(stated_by(answer)),
        choice_of,
        'choices: a sentence is it alone, or states it after a label such as "The answer is"; the rest explains it',
    ),
    "math": Kind(
        is_mathematics,
        lambda _: math_correct,
        "mathematics: values equal, read by math-verify's grammar",
    ),
    "exact": Kind(
        bool, lambda _: exact, "texts: equal but for case, spaces, article and full stop"
    ),
    "marked": Kind(
        bool,
        lambda _: marked,
        "what \\boxed{}, ####, <answer> or a last Answer: marks, as mathematics",
    ),
}

Answer = str | list[str]  # of a list any is right


def is_compared(answer: Answer) -> bool:
    """Whether there is an answer, and it can be repeated to the letter or is read by a verifier."""
    return any(map(_is_comparable, right_answers(answer)))


def _is_comparable(answer: str) -> bool:
    stated = stated_by(answer)
    return bool(
        stated
        and (len(stated.split()) <= MOST_WORDS or read_json(answer) or is_mathematics(answer))
    )


def choose(name: str, answers: Sequence[Answer]) -> tuple[str, Verifier]:
    """
    The name of a verifier and its function, which gives None to what `is_compared` leaves out.

    name: `auto` is the strictest that fits all answers. Any member of a list is a right answer. ValueError names an
    answer that does not fit.
    """
    known = [
        member for answer in answers for member in right_answers(answer) if _is_comparable(member)
    ]
    num = len(set(map(fold_text, known)))
    is_few = num <= MOST_CHOICES and len(known) >= LEAST_ROWS * num
    fitting = [
        key
        for key, kind in VERIFIERS.items()
        if all(map(kind.fits, known)) and (key != "choice" or is_few)
    ]
    name = fitting[0] if name == "auto" else name
    if odd := [answer for answer in known if not VERIFIERS[name].fits(answer)]:
        raise ValueError(
            f"--verifier {name} cannot compare with the answer {shorten_value(odd[0])}; take --verifier auto"
        )
    made = VERIFIERS[name].make(known)

    def verify(completions: Sequence[str], answer: Sequence[Any], **_: Any) -> list[Any]:
        values = made(completions=completions, answer=answer)
        return [
            value if is_compared(right) else None
            for value, right in zip(values, answer, strict=True)
        ]

    return name, verify
