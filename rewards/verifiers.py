"""
Verifiers by name: each gives a completion 1 if it states the answer in the column `answer`, else 0.

A verifier has two parts. The reader finds the statements in a completion. The first rule that finds
an answer counts, and each statement that this rule finds must be right. The comparison tells
whether a statement is the right answer. `VERIFIERS` is the table of verifiers.

Every rule in docs/data.md, "What a completion states", is a function:

| rule | function |
|---|---|
| thoughts | statements.strip_thoughts |
| a last line "Answer: X" | statements.find_answer_line |
| the last box, `####` or <answer> | statements.read_marks |
| different marks that are guesses | statements._are_guesses |
| a last line "The answer is X" after a box | statements.find_answer_sentence |
| the first sentence with a label | statements.read_first_statement, read_label |
| reasons and denials in its sentence | statements.cut_explanation |
| a first line that stands alone | statements.take_first_line |
| a letter that opens the first line, options in a row | choices._opening_option |
| an answer that is taken back | statements.is_taken_back, opens_correction |
| a second answer or a hedge | statements.is_hedge, is_open |
| "is B", "must be B", "Label: B" | choices.read_sentence |
| a text in the last line or behind "is" | text_answers.is_same_text |
| a text in the only bold piece | text_answers._read_bold_piece |
| a number or formula in the last sentence | mathematics.find_formula |
| JSON alone, in a fence or in prose | json_answers.read_json_statement |
| a question or a denial | statements.is_question, texts.DENIAL |

`read_text_answers`, `read_math_answers`, `read_choice_answers` and `find_json_statements` apply the
rules in order.

Nothing in a completion is evaluated as code, and each step takes time linear in the length of the
text, since a policy is paid for every loophole that it finds.

This file does not cover number words, or most denials and comparisons: see the end of that section
in docs/data.md.
"""

import functools
import re
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

from prompts.examples import shorten_value
from rewards import choices, json_answers, math_answers, statements, text_answers
from rewards.math_answers import is_mathematics, is_number
from rewards.mathematics import Verdict, math_pool
from rewards.statements import gold_text
from rewards.texts import clean_text, fold_text

Answer = str | list[str]  # each text in a list is right
Verifier = Callable[..., list[float]]
Reader = Callable[[str, str], list[str]]  # takes a right answer and a text; gives the statements
Comparison = Callable[[str, str], Verdict]  # compares a right answer with a statement

# The most words in an answer that is compared as a text. A model can hardly repeat a longer answer
# to the letter.
MOST_WORDS = 8
MOST_CHOICES = 10  # the most distinct answers in a data set of choices
LEAST_ROWS = 3  # the fewest rows for each of these choices


# ---- one verifier


def right_answers(answer: Any) -> list[str]:
    """
    The right answers in a row's column `answer`.

    Each text in a list is right. The result is empty if there is no answer.
    """
    members = answer if isinstance(answer, (list, tuple)) else [answer]
    return [str(member) for member in members if member is not None and str(member).strip()]


def make_verifier(read: Reader, is_right: Comparison) -> Verifier:
    """
    A verifier that gives a completion 1 if all of its statements are right, else 0.

    A completion without a statement is wrong. If a row has several right answers, the completion
    may state any of them.
    """

    def compare_text(text: str, gold: str) -> list[Verdict]:
        if not gold:
            return [False]
        verdicts = [is_right(gold, statement) for statement in read(gold, text)]
        return verdicts or [False]

    def verify(completions: Sequence[str], answer: Sequence[Any], **_: Any) -> list[float]:
        rows = []
        for text, right in zip(completions, answer, strict=True):
            reply = clean_text(statements.strip_thoughts(text)).strip()
            golds = dict.fromkeys(map(gold_text, right_answers(right)))
            rows.append([compare_text(reply, gold) for gold in golds])

        right_verdicts = _find_right(rows)
        return [float(any(map(right_verdicts.issuperset, row))) for row in rows]

    return verify


def _find_right(rows: list[list[list[Verdict]]]) -> set[Verdict]:
    """
    The verdicts that mean "right": True, and each pair of formulas that the workers find equal.

    All pairs are sent to the workers at once.
    """
    distinct: set[Verdict] = set()
    for row in rows:
        distinct.update(*row)

    pairs = [verdict for verdict in distinct if isinstance(verdict, tuple)]
    replies = math_pool().answer_all(pairs) if pairs else []
    right: set[Verdict] = {True}
    for pair, reply in zip(pairs, replies, strict=True):
        if reply.value is True:
            right.add(pair)
    return right


# ---- the table of verifiers

exact = make_verifier(text_answers.read_text_answers, text_answers.is_same_text)
math_correct = make_verifier(math_answers.read_math_answers, math_answers.is_same_value)
number = math_correct
marked = make_verifier(math_answers.read_marked_answers, math_answers.is_same_mark)
same_json = make_verifier(json_answers.find_json_statements, json_answers.is_same_json)


def choice_of(names: Collection[str]) -> Verifier:
    """The verifier for answers that are each one of a few names."""
    known_choices = choices.Choices({gold_text(name) for name in names})

    @functools.lru_cache(maxsize=2**10)  # a text is read again for each right answer of its row
    def read_text(text: str) -> list[str]:
        return choices.read_choice_answers(text, known_choices)

    def read(_: str, text: str) -> list[str]:
        return read_text(text)

    def is_right(gold: str, statement: str) -> bool:
        return statement == known_choices.key(gold)

    return make_verifier(read, is_right)


_NAME = re.compile(r"[^\W\d_]+(?:[ '/-][^\W\d_]+){0,2}")


def is_name(answer: str) -> bool:
    """Whether an answer is a letter, or at most three words, as a choice is."""
    return _NAME.fullmatch(gold_text(answer)) is not None


class Kind(NamedTuple):
    """A kind of answer and its verifier."""

    fits: Callable[[str], object]  # whether an answer is of this kind
    make: Callable[[Sequence[str]], Verifier]  # makes the verifier from all answers
    description: str


VERIFIERS = {  # strictest first, the order in which `auto` tries them
    "json": Kind(
        fits=json_answers.read_json,
        make=lambda _: same_json,
        description="JSON: keys and values equal, order and spaces free",
    ),
    "number": Kind(
        fits=is_number,
        make=lambda _: number,
        description="numbers: values equal, units where both have one",
    ),
    "choice": Kind(
        fits=is_name,
        make=choice_of,
        description="choices: a sentence is the choice alone, or states it after a label such as "
        '"The answer is"; the rest explains it',
    ),
    "math": Kind(
        fits=is_mathematics,
        make=lambda _: math_correct,
        description="mathematics: values equal, read by math-verify's grammar",
    ),
    "exact": Kind(
        fits=bool,
        make=lambda _: exact,
        description="texts: equal but for case, spaces, article and full stop",
    ),
    "marked": Kind(
        fits=bool,
        make=lambda _: marked,
        description="the marks \\boxed{}, ####, <answer> or a last line Answer:, "
        "compared as mathematics",
    ),
}


# ---- the verifier for a data set


def is_compared(answer: Answer) -> bool:
    """Whether a verifier can compare this answer: it is short enough to repeat, or has a value."""
    return any(map(_is_comparable, right_answers(answer)))


def _is_comparable(answer: str) -> bool:
    gold = gold_text(answer)
    if not gold:
        return False
    is_short = len(gold.split()) <= MOST_WORDS
    return is_short or bool(json_answers.read_json(answer)) or is_mathematics(answer)


def choose(name: str, answers: Sequence[Answer]) -> tuple[str, Verifier]:
    """
    The name and the function of a verifier.

    The function gives None for rows whose answer cannot be compared, according to `is_compared`.

    name: a key of `VERIFIERS`, or `auto` for the strictest verifier that fits all answers.
    answers: one per row. Each member of a list is a right answer.

    Raises ValueError, which names the answer, if the verifier cannot compare with one of them.
    """
    golds: list[str] = []
    for answer in answers:
        golds += filter(_is_comparable, right_answers(answer))

    if name == "auto":
        name = _strictest_fitting(golds)
    misfits = [gold for gold in golds if not VERIFIERS[name].fits(gold)]
    if misfits:
        raise ValueError(
            f"--verifier {name} cannot compare with the answer {shorten_value(misfits[0])}; "
            "take --verifier auto"
        )
    compare = VERIFIERS[name].make(golds)

    def verify(completions: Sequence[str], answer: Sequence[Any], **_: Any) -> list[Any]:
        values = compare(completions=completions, answer=answer)
        rows = zip(values, answer, strict=True)
        return [value if is_compared(right) else None for value, right in rows]

    return name, verify


def _strictest_fitting(golds: Sequence[str]) -> str:
    """The name of the first verifier in the table that fits all answers."""
    num_distinct = len(set(map(fold_text, golds)))
    are_choices = num_distinct <= MOST_CHOICES and len(golds) >= LEAST_ROWS * num_distinct
    for name, kind in VERIFIERS.items():
        if name == "choice" and not are_choices:
            continue
        if all(map(kind.fits, golds)):
            return name
    raise AssertionError("exact fits every answer")
