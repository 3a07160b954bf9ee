"""
Answers that are texts: reads the statements in a completion, and compares them with the right text.

`read_text_answers` tries the rules in docs/data.md, "What a completion states", in order. Each rule
that applies only to texts is one function here. The rules for every kind of answer are in
rewards/statements.py.

This file does not cover the spelling of texts (rewards/texts.py), choices (rewards/choices.py), or
numbers and formulas (rewards/math_answers.py).
"""

import re

from rewards import statements
from rewards.statements import LONGEST_LINE, cut_explanation, strip_explanation
from rewards.texts import DENIAL, ends_in_lead, fold_text

_LEADS = re.compile(  # the words of a sentence before its answer
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


# ---- whether a statement is the right text


def is_same_text(gold: str, statement: str) -> bool:
    """Whether a statement, its last line, or the end of its last sentence is the right text."""
    folded_gold = fold_text(gold)
    if _is_short(statement, gold) and folded_gold == fold_text(statement):
        return True
    line = _last_line(statement)
    return folded_gold == fold_text(line) or _ends_with(line, folded_gold)


def _is_short(text: str, gold: str) -> bool:
    """Whether a text is short enough to be compared whole."""
    return len(text) <= LONGEST_LINE + 2 * len(gold)


def _last_line(text: str) -> str:
    return text.rstrip().rpartition("\n")[2]


def _last_sentence(text: str) -> str:
    return re.split(r"[.!?] ", text)[-1]


def _ends_with(line: str, folded_gold: str) -> bool:
    """
    Whether the last sentence in a line is like "... is GOLD".

    A sentence with a denial means something else. If the gold answer has digits, so does a sentence
    with a number before it.
    """
    folded_line = fold_text(line)
    if not folded_line.endswith(folded_gold):
        folded_line = folded_line.rstrip(")]")
    if not folded_line.endswith(folded_gold):
        return False
    head = _last_sentence(folded_line.removesuffix(folded_gold))
    if len(head) > LONGEST_LINE or DENIAL.search(head):
        return False
    if re.search("[0-9]", folded_gold) and re.search("[0-9]", head):
        return False
    return bool(_LEADS.search(head)) or ends_in_lead(head)


# ---- what a completion states


def read_text_answers(gold: str, text: str) -> list[str]:
    """
    The statements in `text`, if the right answer is the text `gold`. Each of them must be right.

    `gold` decides which shape a first line must have, and how long a text that is compared whole
    may be.
    """
    can_cut = not cut_explanation(gold)[1]  # "Paris (Texas)" is not cut
    marks = statements.read_marks(text, statements.accept_any)
    if marks and can_cut:
        return [strip_explanation(mark) for mark in marks]
    if marks:
        return marks

    if not can_cut or (_is_short(text, gold) and _is_equal(text, gold)):
        return [text]

    first = statements.read_first_statement(text, statements.accept_any, _is_equal)
    if first.text is not None:
        return [first.text]
    if first.rest is not None:
        return [first.rest]

    first_line = statements.take_first_line(text, lambda line: _has_shape_of(line, gold))
    if first_line:
        return [first_line[0]]
    if is_same_text(gold, text):
        return [text]

    sentence = _read_first_sentence(text, gold) or _read_bold_piece(text)
    return [sentence or _read_explained_last_line(text) or text]


def _is_equal(first: str, second: str) -> bool:
    return fold_text(first) == fold_text(second)


def _has_shape_of(line: str, gold: str) -> bool:
    """
    Whether a line looks like the right answer, and so counts as an answer.

    Such a line has no more words than `gold`, has digits and a capital if `gold` has them, and is
    no heading.
    """
    if _is_equal(line, gold):
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


def _read_first_sentence(text: str, gold: str) -> str:
    """
    The first sentence of a text, if it is the right answer or states it; else "".

    An example is "Canberra. It was built in 1913.".
    """

    def is_answer(sentence: str) -> bool:
        return _is_equal(sentence, gold) or _says(sentence, gold)

    return statements.take_opening_sentence(text, is_answer)


def _says(sentence: str, gold: str) -> bool:
    """Whether a sentence is like "The capital is GOLD.", and does not report others' words."""
    if not re.match(r"\W*(?:The|It|It's)\b", sentence) or _REPORT.search(sentence):
        return False
    return _ends_with(sentence, fold_text(gold))


def _read_bold_piece(text: str) -> str:
    """
    The only bold piece in a text, if the text states it: "The capital is **Paris**, on the Seine."

    The result is "" for a denial, a question, a hedge, an answer that is taken back, and a bold
    piece with several lines on both sides.
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
    if statements.is_question(rest or ".") or statements.is_open(rest) or DENIAL.search(rest):
        return ""
    if any(map(statements.is_taken_back, statements.split_sentences(rest))):
        return ""
    return piece[1]


def _read_explained_last_line(text: str) -> str:
    """
    The last line without its explanation; "" unless it is one sentence that explains its answer.
    """
    line = _last_line(text)
    if len(line) > LONGEST_LINE or len(statements.split_sentences(line)) != 1:
        return ""
    if statements.is_question(line) or not cut_explanation(line)[1]:
        return ""
    return strip_explanation(line)
