"""
Verifiers: each returns 1 for a completion that states the right answer of its row, otherwise 0.

A verifier consists of two functions, a reader and a comparison. The reader finds the statements of
a completion, which are the pieces that state its answer. It tries rules in order, and the first
rule that finds a statement applies. The comparison decides whether a statement is the right answer.
A completion is right only if all of its statements are right. The dictionary `VERIFIERS` lists the
verifiers by name.

Every rule in the section "What a completion states" of docs/data.md has a function:

| rule | function |
|---|---|
| thoughts | statements.strip_thoughts |
| a last line "Answer: X" | statements.find_labelled_answer_in_last_line |
| the last box, `####` or <answer> | statements.read_last_mark_and_rival_marks |
| different marks that are guesses | statements._are_rival_guesses |
| a last line "The answer is X" after a box | statements.find_answer_sentence_in_last_line |
| the first sentence with a label | statements.read_first_labelled_answer, text_after_label |
| reasons and denials after an answer in its sentence | statements.split_off_explanation |
| a first line that stands alone | statements.split_answer_line_from_explanation |
| a letter that opens the first line, a list of options | choices._read_opening_option |
| an answer that is taken back | statements.takes_answer_back, opens_with_correction_word |
| a second answer or a hedge | statements.suggests_second_answer, allows_second_answer |
| "is B", "must be B", "Label: B" | choices.read_choice_in_sentence |
| a text in the last line or after "is" | text_answers.is_or_ends_in_right_text |
| a text in the only bold piece | text_answers._read_single_bold_answer |
| a number or formula in the last sentence | mathematics.find_math_in_last_math_sentence |
| JSON alone, in a fence or in prose | json_answers.find_single_json_value |
| a question or a denial | statements.is_question, texts.DENIAL |

`read_text_answers`, `read_math_answers`, `read_choice_answers` and `read_marked_json_or_whole_text`
apply the rules in order.

Training rewards a model for every loophole that it finds. Therefore nothing in a completion is run
as code, and each rule takes time linear in the length of the completion.

The verifiers do not understand numbers written as words, most denials, or statements such as "more
than 42"; docs/data.md lists these limits.
"""

import functools
import re
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

from prompts.examples import shorten_value
from rewards import choices, json_answers, math_answers, statements, text_answers
from rewards.math_answers import right_answer_is_number, right_answer_is_number_or_formula
from rewards.mathematics import VerdictOrFormulaPair, formula_worker_pool
from rewards.statements import last_mark_or_whole_answer
from rewards.texts import fold_for_comparison, normalize_unicode

Answer = str | list[str]  # each member of a list is a right answer
# (completions, answer) -> 1 or 0 for each row, or None if the answer of the row cannot be compared
Verifier = Callable[..., list[Any]]
Reader = Callable[[str, str], list[str]]  # (right answer, completion) -> statements
Comparison = Callable[[str, str], VerdictOrFormulaPair]  # (right answer, statement) -> verdict

# The largest number of words in an answer that is compared as plain text. A model is unlikely to
# repeat a longer answer word for word.
MOST_WORDS = 8
MOST_CHOICES = 10  # the largest number of distinct answers in a data set of choices
LEAST_ROWS = 3  # a data set of choices has at least this many rows per choice


# ---- one verifier


def right_answers(answer: Any) -> list[str]:
    """
    The right answers in the column `answer` of a row, as a list of strings.

    If the column contains a list, each of its members is a right answer. The returned list is empty
    if the row has no answer.
    """
    members = answer if isinstance(answer, (list, tuple)) else [answer]
    return [str(member) for member in members if member is not None and str(member).strip()]


def make_verifier(read: Reader, is_right: Comparison) -> Verifier:
    """
    Makes a verifier, which returns 1 for a completion if all of its statements are right, else 0.

    A completion without a statement is wrong. If a row has several right answers, its completion
    may state any one of these answers.
    """

    def verdicts_on_statements(text: str, gold: str) -> list[VerdictOrFormulaPair]:
        if not gold:
            return [False]
        verdicts = [is_right(gold, statement) for statement in read(gold, text)]
        return verdicts or [False]

    def verify(completions: Sequence[str], answer: Sequence[Any], **_: Any) -> list[float]:
        rows = []
        for text, right in zip(completions, answer, strict=True):
            reply = normalize_unicode(statements.strip_thoughts(text)).strip()
            golds = dict.fromkeys(map(last_mark_or_whole_answer, right_answers(right)))
            rows.append([verdicts_on_statements(reply, gold) for gold in golds])

        right_verdicts = _verdicts_that_mean_right(rows)
        return [float(any(map(right_verdicts.issuperset, row))) for row in rows]

    return verify


def _verdicts_that_mean_right(
    rows: list[list[list[VerdictOrFormulaPair]]],
) -> set[VerdictOrFormulaPair]:
    """
    The verdicts that count as right: True, and each pair of formulas that a worker found equal.

    All pairs of formulas are sent to the workers at once.
    """
    distinct: set[VerdictOrFormulaPair] = set()
    for row in rows:
        distinct.update(*row)

    pairs = [verdict for verdict in distinct if isinstance(verdict, tuple)]
    replies = formula_worker_pool().answer_all(pairs) if pairs else []
    right: set[VerdictOrFormulaPair] = {True}
    for pair, reply in zip(pairs, replies, strict=True):
        if reply.value is True:
            right.add(pair)
    return right


# ---- the table of verifiers

exact = make_verifier(text_answers.read_text_answers, text_answers.is_or_ends_in_right_text)
math_correct = make_verifier(math_answers.read_math_answers, math_answers.compare_math_or_text)
number = math_correct
marked = make_verifier(
    math_answers.read_last_math_mark_and_rival_marks, math_answers.compare_mark_unless_words_precede
)
same_json = make_verifier(
    json_answers.read_marked_json_or_whole_text, json_answers.states_same_json
)


def make_choice_verifier(names: Collection[str]) -> Verifier:
    """Makes the verifier for a data set in which each answer is one of the given choices."""
    known_choices = choices.Choices({last_mark_or_whole_answer(name) for name in names})

    # cached, since a completion is read once for each right answer of its row
    @functools.lru_cache(maxsize=2**10)
    def read_stated_choices(text: str) -> list[str]:
        return choices.read_choice_answers(text, known_choices)

    def read_ignoring_gold(_: str, text: str) -> list[str]:
        return read_stated_choices(text)

    def is_right(gold: str, statement: str) -> bool:
        return statement == known_choices.lowercase_and_collapse_spaces(gold)

    return make_verifier(read_ignoring_gold, is_right)


_NAME = re.compile(r"[^\W\d_]+(?:[ '/-][^\W\d_]+){0,2}")


def has_one_to_three_words(answer: str) -> bool:
    """Whether an answer has one to three words, as choices have; a single letter is a word."""
    return _NAME.fullmatch(last_mark_or_whole_answer(answer)) is not None


class AnswerKind(NamedTuple):
    """A kind of answer and its verifier."""

    fits: Callable[[str], object]  # true for an answer of this kind
    # makes the verifier from all right answers of a data set
    make: Callable[[Sequence[str]], Verifier]
    description: str


VERIFIERS = {  # strictest first; `auto` tries them in this order
    "json": AnswerKind(
        fits=json_answers.read_object_or_list,
        make=lambda _: same_json,
        description="JSON (equal keys and values, in any order)",
    ),
    "number": AnswerKind(
        fits=right_answer_is_number,
        make=lambda _: number,
        description="numbers (equal values, and equal units if both have units)",
    ),
    "choice": AnswerKind(
        fits=has_one_to_three_words,
        make=make_choice_verifier,
        description='choices (stated alone, or after a label such as "The answer is")',
    ),
    "math": AnswerKind(
        fits=right_answer_is_number_or_formula,
        make=lambda _: math_correct,
        description="mathematics (equal values, read by math-verify's grammar)",
    ),
    "exact": AnswerKind(
        fits=bool,
        make=lambda _: exact,
        description="texts (ignoring case, spaces, articles and full stops)",
    ),
    "marked": AnswerKind(
        fits=bool,
        make=lambda _: marked,
        description="mathematics that is marked by \\boxed{}, ####, <answer> "
        "or a last line with `Answer:`",
    ),
}


# ---- the verifier for a data set


def is_comparable_answer(answer: Answer) -> bool:
    """
    Whether a completion can be compared with the answer of a row.

    This is so if one of the row's right answers is short, JSON or mathematics.
    """
    return any(map(_is_comparable_right_answer, right_answers(answer)))


def _is_comparable_right_answer(answer: str) -> bool:
    """Whether a right answer is short, JSON or mathematics, and so can be compared."""
    gold = last_mark_or_whole_answer(answer)
    if not gold:
        return False
    is_short = len(gold.split()) <= MOST_WORDS
    return (
        is_short
        or bool(json_answers.read_object_or_list(answer))
        or right_answer_is_number_or_formula(answer)
    )


def choose_verifier(name: str, answers: Sequence[Answer]) -> tuple[str, Verifier]:
    """
    The name and the function of the verifier for a data set.

    The function returns None for rows whose answer cannot be compared (see `is_comparable_answer`).

    name: a key of `VERIFIERS`, or `auto` for the strictest verifier that fits all answers.
    answers: for each row, its right answer or the list of its right answers.

    Raises ValueError if the verifier does not fit one of the answers; the message quotes that
    answer.
    """
    golds: list[str] = []
    for answer in answers:
        golds += filter(_is_comparable_right_answer, right_answers(answer))

    if name == "auto":
        name = _strictest_fitting_verifier(golds)
    misfits = [gold for gold in golds if not VERIFIERS[name].fits(gold)]
    if misfits:
        raise ValueError(
            f"--verifier {name} does not fit the answer {shorten_value(misfits[0])} in the data; "
            "use --verifier auto, or your own function: --verifier FILE.py:function. docs/data.md "
            f"lists the answers that {name} fits"
        )
    compare = VERIFIERS[name].make(golds)

    def verify_comparable_rows(
        completions: Sequence[str], answer: Sequence[Any], **_: Any
    ) -> list[float | None]:
        values = compare(completions=completions, answer=answer)
        rows = zip(values, answer, strict=True)
        return [value if is_comparable_answer(right) else None for value, right in rows]

    return name, verify_comparable_rows


def _strictest_fitting_verifier(golds: Sequence[str]) -> str:
    """The name of the first verifier in `VERIFIERS` that fits all answers."""
    num_distinct = len(set(map(fold_for_comparison, golds)))
    are_choices = num_distinct <= MOST_CHOICES and len(golds) >= LEAST_ROWS * num_distinct
    for name, kind in VERIFIERS.items():
        if name == "choice" and not are_choices:
            continue
        if all(map(kind.fits, golds)):
            return name
    raise AssertionError("exact fits every answer")
