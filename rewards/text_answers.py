"""
Reads the plain text that a completion states as its answer, and compares it with the right text.

`read_text_answers` tries the rules in the section "What a completion states" of docs/data.md in
order. Each rule that applies only to plain text has a function in this file. The rules that are the
same for every kind of answer are in rewards/statements.py.

This file does not cover differences in spelling (rewards/texts.py), choices (rewards/choices.py),
or numbers and formulas (rewards/math_answers.py).
"""

import re

from rewards import statements
from rewards.statements import LONGEST_LINE, split_off_explanation, strip_explanation
from rewards.texts import DENIAL, fold_for_comparison, leads_to_answer_in_other_languages

_LEADS = re.compile(  # the words before the answer in a sentence
    r"(?:^|\b(?:it|that|this)'s|\b(?:is|are|was|were|be|as|on|at|in|equals|option|choice|answer)\b|"
    r"[:=>])"
    r"[\s*_`\"'(\[$]*(?:the |an? )?$"
)
_HEADING = re.compile(
    r"(?:sure|okay|ok|yes|no|hi|hello|solution|explanation|answer|reasoning|analysis|question|step|"
    r"thinking|response|certainly|of course|hmm|well|let me \w+|let's \w+)\W*"
    r"(?:[0-9]*|there|thing)\W*",
    re.I,
)
_REPORT = re.compile(
    r"\b(?:say|says|said|think|thinks|many|some|people|mistake|wrong|often)\b", re.I
)


# ---- the comparison of texts


def is_or_ends_in_right_text(gold: str, statement: str) -> bool:
    """Whether a statement, its last line, or the end of its last sentence is the right answer."""
    folded_gold = fold_for_comparison(gold)
    if _is_short_enough_to_compare(statement, gold) and folded_gold == fold_for_comparison(
        statement
    ):
        return True
    line = _last_line(statement)
    return folded_gold == fold_for_comparison(line) or _sentence_ends_in_answer(line, folded_gold)


def _is_short_enough_to_compare(text: str, gold: str) -> bool:
    """Whether a whole text is short enough to be compared with the right answer."""
    return len(text) <= LONGEST_LINE + 2 * len(gold)


def _last_line(text: str) -> str:
    return text.rstrip().rpartition("\n")[2]


def _last_sentence(text: str) -> str:
    return re.split(r"[.!?] ", text)[-1]


def _sentence_ends_in_answer(line: str, folded_gold: str) -> bool:
    """
    Whether the last sentence in a line ends in the right answer after a word such as "is".

    A sentence that contains a denial does not count. If the right answer contains digits, a
    sentence with a number before the answer does not count either.
    """
    folded_line = fold_for_comparison(line)
    if not folded_line.endswith(folded_gold):
        folded_line = folded_line.rstrip(")]")
    if not folded_line.endswith(folded_gold):
        return False
    head = _last_sentence(folded_line.removesuffix(folded_gold))
    if len(head) > LONGEST_LINE or DENIAL.search(head):
        return False
    if re.search("[0-9]", folded_gold) and re.search("[0-9]", head):
        return False
    return bool(_LEADS.search(head)) or leads_to_answer_in_other_languages(head)


# ---- what a completion states


def read_text_answers(gold: str, text: str) -> list[str]:
    """
    The pieces of a completion that state its answer, if the right answer is plain text.

    The completion is right only if each piece is right.

    gold: the right answer. An answer in the first line must have the same form as `gold`. Only a
    completion that is not much longer than `gold` is compared as a whole.
    """
    can_cut = not split_off_explanation(gold)[1]  # in "Paris (Texas)", the bracket must stay
    marks = statements.read_last_mark_and_rival_marks(text, statements.accept_any_text)
    if marks and can_cut:
        return [strip_explanation(mark) for mark in marks]
    if marks:
        return marks

    if not can_cut or (
        _is_short_enough_to_compare(text, gold) and _are_equal_when_folded(text, gold)
    ):
        return [text]

    first = statements.read_first_labelled_answer(
        text, statements.accept_any_text, _are_equal_when_folded
    )
    if first.text is not None:
        return [first.text]
    if first.rest is not None:
        return [first.rest]

    first_line = statements.split_answer_line_from_explanation(
        text, lambda line: _has_form_of_right_answer(line, gold)
    )
    if first_line:
        return [first_line[0]]
    if is_or_ends_in_right_text(gold, text):
        return [text]

    sentence = _first_sentence_if_right_and_explained(text, gold) or _read_single_bold_answer(text)
    return [sentence or _last_line_without_its_explanation(text) or text]


def _are_equal_when_folded(first: str, second: str) -> bool:
    return fold_for_comparison(first) == fold_for_comparison(second)


def _has_form_of_right_answer(line: str, gold: str) -> bool:
    """
    Whether a line has the form of the right answer, and therefore counts as an answer.

    Such a line is not a heading, and has no more words than the right answer. Either both contain
    digits or neither does, and either both begin with a capital or neither does.
    """
    if _are_equal_when_folded(line, gold):
        return True
    bare_line = line.strip(" *_`.!\"'")
    if not bare_line or bare_line.count(" ") > gold.count(" "):
        return False
    has_digits = bool(re.search("[0-9]", bare_line))
    if has_digits != bool(re.search("[0-9]", gold)):
        return False
    if bare_line[:1].isupper() != gold[:1].isupper():
        return False
    is_marked_heading = line.rstrip(" *_").endswith(":") or line.startswith("#")
    return not is_marked_heading and not _HEADING.fullmatch(bare_line)


def _first_sentence_if_right_and_explained(text: str, gold: str) -> str:
    """
    The first sentence of a text, if it states the right answer and the rest explains it; else "".

    For example, the first sentence could be "Canberra.", and the rest "It was built in 1913.".
    """

    def is_or_states_right_answer(sentence: str) -> bool:
        return _are_equal_when_folded(sentence, gold) or _states_gold(sentence, gold)

    return statements.read_opening_answer_sentence(text, is_or_states_right_answer)


def _states_gold(sentence: str, gold: str) -> bool:
    """Whether a sentence such as "The capital is Paris." states the right answer as a fact."""
    if not re.match(r"\W*(?:The|It|It's)\b", sentence) or _REPORT.search(sentence):
        return False
    return _sentence_ends_in_answer(sentence, fold_for_comparison(gold))


def _read_single_bold_answer(text: str) -> str:
    """
    The only bold piece in a text, if a sentence such as "The capital is **Paris**." states it.

    Returns "" if the text near the bold piece contains a denial, a question or a second
    answer, or takes the answer back. Also returns "" if there are lines both before and after
    the line with the bold piece.
    """
    pieces = list(re.finditer(r"\*\*([^*\n]{1,200})\*\*", text)) if "**" in text else []
    if len(pieces) != 1:
        return ""
    piece = pieces[0]
    line_begin = text.rfind("\n", 0, piece.start()) + 1
    begin = max(line_begin, piece.start() - LONGEST_LINE)
    head = _last_sentence(text[begin : piece.start()])
    rest = text[piece.end() :]
    if not _LEADS.search(head.casefold()) or not re.search(r"\w", head) or DENIAL.search(head):
        return ""
    if len(rest) > LONGEST_LINE or ("\n" in rest.strip() and "\n" in text[:begin]):
        return ""
    if (
        statements.is_question(rest or ".")
        or statements.allows_second_answer(rest)
        or DENIAL.search(rest)
    ):
        return ""
    if any(map(statements.takes_answer_back, statements.split_sentences(rest))):
        return ""
    return piece[1]


def _last_line_without_its_explanation(text: str) -> str:
    """
    The last line of a text, without the explanation of the answer in that line.

    Returns "" unless the line is a single sentence that contains such an explanation.
    """
    line = _last_line(text)
    if len(line) > LONGEST_LINE or len(statements.split_sentences(line)) != 1:
        return ""
    if statements.is_question(line) or not split_off_explanation(line)[1]:
        return ""
    return strip_explanation(line)
