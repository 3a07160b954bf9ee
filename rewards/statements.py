# ruff: noqa: RUF001  (words of several languages)
"""
Finds the piece of a completion that states its answer.

The rules apply in the order below, and docs/data.md has a row with an example for each rule.

- `strip_thoughts` removes thoughts, since a thought states no answer.
- `read_last_mark_and_rival_marks` reads the last marked answer: in a box, after `####`, in an
  `<answer>` tag, or after "Answer:" in the last line. The marked answer must be of the requested
  kind. `find_labelled_answer_in_last_line` and `find_answer_sentence_in_last_line` read the last
  line. `_are_rival_guesses` finds out whether two marked answers are only guesses.
- `read_first_labelled_answer` reads the answer after a label such as "The answer is", in the
  first sentence that has such a label. The rest of the text may explain this answer
  (`split_off_explanation`), take the answer back (`takes_answer_back`), or leave it open
  (`allows_second_answer`, `suggests_second_answer`).
- `split_answer_line_from_explanation` reads a first line that is an answer by itself; the rest of
  the text explains the answer.

The rules for one kind of answer are in rewards/choices.py, text_answers.py, math_answers.py and
json_answers.py. The comparison of a statement with the right answer is in rewards/verifiers.py.

Each function takes time linear in the length of the text.
"""

import functools
import re
from collections.abc import Callable
from typing import NamedTuple

from rewards.texts import normalize_unicode

IsAnswer = Callable[[str], object]  # whether a text is an answer of the requested kind

LONGEST_LINE = 400  # a line or sentence with more characters states no answer


def accept_any_text(_: str) -> bool:
    """An `IsAnswer` that accepts every piece of text as an answer."""
    return True


# ---- thoughts

_THOUGHT_NAMES = "(?:seed:)?(?:think(?:ing)?|thoughts?|reasoning|analysis|scratchpad|reflection)"
_TAG = re.compile(
    rf"<(?P<end1>/?){_THOUGHT_NAMES}>"
    r"|\[(?P<end2>/?)(?:THINK(?:ING)?|THOUGHT|REASONING)\]"
    rf"|\u25c1(?P<end3>/?){_THOUGHT_NAMES}\u25b7"
    r"|<\|(?P<end4>/|end[_ ]of[_ ]|end[_ ])?(?:begin[_ ]of[_ ]|start[_ ]of[_ ]|start[_ ])?"
    rf"{_THOUGHT_NAMES}\|>"
    r"|<\|channel\|>(?:(?P<end5>final)|analysis|commentary)[^<]{0,80}<\|message\|>",
    re.IGNORECASE,
)
_OPENED_TURN = re.compile(r"[^\w<\[\u25c1]*(?:assistant|model|bot)?\s*", re.IGNORECASE)
_CONTROL = re.compile(
    r"<[|\uff5c][^<>]{1,40}[|\uff5c]>|\[/INST\]|<(?:start|end)_of_turn>", re.IGNORECASE
)


def _is_closing_tag(tag: re.Match[str]) -> bool:
    return any(tag.groupdict().values())


def strip_thoughts(text: str) -> str:
    """
    The text without its thoughts.

    The returned text begins after the last closing tag of a thought, and ends before a tag that
    opens another thought. It is empty if the text begins with a thought that never closes.
    """
    if not any(bracket in text for bracket in "<[\u25c1"):
        return text
    begin = 0
    end = len(text)
    for tag in _TAG.finditer(text):
        if _is_closing_tag(tag):
            begin = tag.end()
            end = len(text)
        else:
            end = min(end, tag.start())
    has_thoughts = begin > 0 or end < len(text)
    return text[begin:end].strip() if has_thoughts else text


def unclosed_thought_in_prompt(prompt: str) -> str:
    """
    The thought that a rendered prompt leaves open, with its opening tag; "" if there is none.

    Some chat templates end with "<think>", so that the completion begins inside a thought. Only a
    tag at the end of the prompt, or at the beginning of the assistant's turn, opens a thought; a
    tag inside the user's message does not.
    """
    tags = list(_TAG.finditer(prompt))
    if not tags or _is_closing_tag(tags[-1]):
        return ""
    last = tags[-1]
    controls = [control.end() for control in _CONTROL.finditer(prompt, 0, last.start())]
    begins_turn = controls and _OPENED_TURN.fullmatch(prompt, controls[-1], last.start())
    ends_prompt = not prompt[last.end() :].strip()
    return prompt[last.start() :] if ends_prompt or begins_turn else ""


# ---- labels, hedges and words that take an answer back

LEAD = (
    r"(?:(?:surely|so|thus|hence|therefore|then|and|but|now|yes|okay|ok|sure|well|great|finally|"
    r"overall|clearly|"
    r"definitely|probably|mostly|obviously|certainly|most likely|"
    r"actually|in fact|in reality|in (?:conclusion|short|summary|total|the end)|as a result|"
    r"consequently|"
    r"putting it (?:all )?together|"
    r"it follows|this means|that means|i (?:think|believe|say|conclude)|we (?:conclude|see|find|"
    r"get)|"
    r"also|daher|somit|donc|ainsi|luego|entonces|quindi|dunque|portanto|logo|"
    r"因此|所以|故|よって|したがって|"
    r"таким образом|значит|"
    r"итак)"
    r"(?: that)?[,:.!]?\s*){0,3}"
)
_RIGHT = r"(?:final|correct|right|best|true|overall|complete)"
_ANSWER = (
    rf"(?:(?:my|our|the|this|your) )?(?:{_RIGHT} ){{0,2}}answer"
    r"(?: (?:letter|option|choice|here|to (?:the|this) (?:question|problem)))?"
    # German, Dutch, Swedish, Danish, Norwegian
    r"|(?:die )?(?:richtige |korrekte |endgültige )?antwort|(?:het )?(?:juiste |correcte )?antwoord"
    r"|(?:det )?(?:rätta |rigtige |riktige |korrekta |korrekte )?svar(?:et)?"
    # French, Spanish, Italian, Portuguese
    r"|(?:la )?(?:bonne )?réponse(?: (?:finale|correcte|exacte|juste))?"
    r"|(?:la )?respuesta(?: (?:final|correcta))?|(?:la )?risposta(?: (?:finale|corretta|esatta|"
    r"giusta))?"
    r"|(?:a )?resposta(?: (?:final|correta|certa))?"
    # Polish, Czech, Russian, Ukrainian, Turkish, Vietnamese, Indonesian
    r"|(?:poprawna |prawidłowa )?odpowiedź|(?:správná )?odpověď"
    r"|(?:правильный )?ответ"
    r"|(?:правильна )?відповідь"
    r"|(?:doğru )?(?:cevap|yanıt)|đáp án(?: đúng)?"
    r"|jawaban(?:nya)?(?: (?:yang )?(?:benar|tepat))?"
    # Chinese, Japanese, Korean, Arabic, Hebrew, Hindi, Thai
    r"|(?:正确|正確|最终|最終|正しい)?(?:的)?(?:答案(?:选项)?|选项|選項|答え)|回答"
    r"|正解|答え|(?:최종 )?(?:정답|답)"
    r"|ال(?:إجابة|جواب)(?: الصحيحة)?"
    r"|ה?תשובה(?: הנכונה)?"
    r"|(?:सही )?उत्तर|คําตอบ(?:ที่ถูก)?"
)
_IS = (  # no letter may follow a verb directly in scripts that put spaces between words
    r"(?:(?:(?:is|are|was|were|would be|should be|must be|has to be|will be)"
    r"(?: (?:therefore|thus|then|clearly|simply|just))?"
    r"(?: indeed)?|equals|ist|lautet|wäre|est|es|è|e'|é|to|je|är|er|là|adalah|это|هي|هو|היא|"
    r"है)(?![A-Za-z'])"
    r"|应该是|应为|为|為|是|は|은|는|คือ)"
)
DRESS = r"[\s*_`>#~\"'\u2022\u00ab\u201c\u201e-]*+"
LABEL = re.compile(
    rf"{DRESS}{LEAD}{DRESS}(?:{_ANSWER})[\s*_`]*"
    rf"(?:{_IS}\s*:?|[:=\u2192]|-+>?(?= )|=>|\u2192)[\s*_`]*",
    re.IGNORECASE,
)
_ANSWER_LINE = re.compile(
    rf"{DRESS}{LEAD}{DRESS}(?:{_ANSWER})[\s*_`]*(?:[:=\u2192]|=>|->)[\s*_`]*(?P<value>.*\S)",
    re.IGNORECASE,
)
_BARE_LABEL = re.compile(rf"{DRESS}(?:{_ANSWER})[\s*_`]*[:=]?[\s*_`]*", re.IGNORECASE)
CONCLUDES = re.compile(
    r"\W*(?:so|thus|hence|therefore|finally|in conclusion|in short|overall|final|as a result|"
    r"consequently|altogether|"
    r"in total|daher|somit|also|donc|entonces|por tanto|quindi|portanto|因此|所以|"
    r"итак)(?![A-Za-z])",
    re.IGNORECASE,
)
_TAKES_BACK = re.compile(
    r"^\W*(?:(?:oh|ah|but|and|no|hm+|um|uh)[,.! ]+)*"
    r"(?:wait|hold on|hang on|hm+|correction|oops|scratch that|strike that|sorry|apologies|"
    r"on second thoughts?|let me (?:re-?\w+|correct|double|check|try|fix|start)|"
    r"moment mal|moment|halt|stopp|attends|attendez|un instant|espera|espere|aspetta|un momento|"
    r"подожди\w*|стоп|等等|等一下|不对|不對|"
    r"待って|いや|잠깐)(?![A-Za-z])"
    r"|\bi (?:was wrong|made (?:a|an) (?:mistake|error)|take (?:that|it|this) back|stand corrected|"
    r"retract|"
    r"changed? my mind|misread|miscounted|miscalculated|meant)\b"
    r"|\b(?:that|this|it|which)(?:'s| is| was) (?:wrong|incorrect|not (?:right|correct|true)|"
    r"a mistake|false)\b"
    r"|\b(?:that|this|it) isn't (?:right|correct)\b"
    r"|\bmy mistake\b|\bthe (?:above|previous|first) answer (?:is|was) (?:wrong|incorrect|not)\b"
    r"|\b(?:ignore|disregard|forget) (?:that|this|the above|it|my)\b",
    re.IGNORECASE,
)
CORRECTS = (
    r"(?<![A-Za-z])(?:actually|rather|instead|no|nope|in fact|in reality|eigentlich|doch|vielmehr|"
    r"nein|en fait|"
    r"plutôt|non|en realidad|mejor dicho|in realtà|anzi|na verdade|aliás|"
    r"на самом деле|实际上|其实|実は)(?![A-Za-z])"
)
OPENS_CORRECTION = rf"\W*(?:but |and |oh |well )?{CORRECTS}"
OR = r"(?<![A-Za-z])(?:or|oder|ou|(?-i:o)|lub|eller|ya da|veya|или)(?![A-Za-z])|或|または|또는"
MAYBE = (
    r"\b(?:maybe|perhaps|possibly|alternatively|otherwise|else|unless|depending|either|vielleicht|"
    r"eventuell|"
    r"peut-\u00eatre|quizás|tal vez|forse|talvez)\b|也许|可能|かも|может"
)
_OPENS_HEDGE = re.compile(rf"\W*(?:{OR}|{MAYBE}|if (?:not|that|it|wrong)\b)", re.IGNORECASE)
_HEDGES = re.compile(
    r"\b(?:could|may|might|can) (?:also|as well|equally|well|just as well) |"
    r"\b(?:also|equally|just as|too) (?:be\b|right|correct|possible|acceptable|valid|plausible|"
    r"likely|good|true|fine)|"
    r"\b(?:is|are|be) (?:also|equally) |\bor (?:maybe|perhaps|possibly|even|else)\b|"
    r"\b(?:second|other|another|next|alternative|back-?up) (?:guess|answer|choice|option|"
    r"possibility|candidate)|"
    r"\b(?:would|will) (?:also )?(?:work|do|fit) (?:too|as well)|\bi(?:'m| am) (?:un|not )(?:sure|"
    r"certain)|"
    r"\b(?:could|may|might) be(?! (?:seen|tempting|thought|confus|mistak|taken))",
    re.IGNORECASE,
)
GUESS = re.compile(
    r"\b(?:guess(?:es|ed)?|tr(?:y|ies|ied)|attempts?|options?|candidates?|possib\w+|either|maybe|"
    r"perhaps|"
    r"first answer|second answer)\b",
    re.IGNORECASE,
)
EXPLAINS = re.compile(  # words that may follow an answer in its sentence to explain it
    r"[\s,;:*_`-]*(?:\s|^)(?:(?:and |but )?not|rather than|instead of|because|since|although|"
    r"though|even though|while|"
    r"whereas|unlike|weil|denn|da|obwohl|nicht|sondern nicht|car|parce que|puisque|et non|pas|"
    r"porque|ya que|"
    r"aunque|y no|perché|poiché|e non|pois|e não|não|а не|"
    r"потому что|так как)(?![A-Za-z])"
    r"|:\s|, (?:as|which|where|for|who|whose|when)(?![A-Za-z])|\s-+\s(?=[^\W\d_]{3,}\s)"
    r"|[\uff0c,]?(?:因为|因為|而不是|不是|なぜなら)",
    re.IGNORECASE,
)
_SENTENCE_END = re.compile(r"[.!?;。！？؟][*_)\]\"'”»`]*\s+")

# Every label contains one of `_LABEL_WORDS`, and every sentence that takes an answer back contains
# one of `_TAKING_BACK_WORDS`. Searching for the words is faster than matching the patterns.
_LABEL_WORDS = (
    "answer antwor svar jawaban respuesta risposta resposta cevap réponse odpowiedź odpověď ответ "
    "відповідь yanıt đáp "
    "答 选项 選項 正解 답 إجابة جواب תשובה उत्तर คําตอบ"
).split()
_TAKING_BACK_WORDS = (
    "wait|hold on|hang on|hm|orrect|oops|scratch|strike that|sorry|apolog|second thought|let me |"
    "moment|halt|stopp|"
    "attend|instant|esper|aspetta|wrong|mistake|error|take |stand corr|retract|mind|misread|"
    "miscount|miscalc|meant|"
    "not right|not true|isn't right|false|the above|previous answer|first answer|ignore|disregard|"
    "forget|"
    "подожд|стоп|等|不对|不對|待って|いや|잠깐"
).split("|")
_ASCII_LABEL_WORDS = [word for word in _LABEL_WORDS if word.isascii()]
_ASCII_TAKING_BACK_WORDS = [word for word in _TAKING_BACK_WORDS if word.isascii()]


def has_word_for_answer(text: str) -> bool:
    """Whether a text contains a word for "answer" in one of the languages of `LABEL`."""
    return _contains_any(text, _ASCII_LABEL_WORDS if text.isascii() else _LABEL_WORDS)


def may_take_answer_back(text: str) -> bool:
    """Whether a text contains a word that could take an answer back, such as "mistake"."""
    return _contains_any(text, _ASCII_TAKING_BACK_WORDS if text.isascii() else _TAKING_BACK_WORDS)


def _contains_any(text: str, words: list[str]) -> bool:
    lowered = text.lower()
    for word in words:  # noqa: SIM110  (any() of a generator takes twice the time)
        if word in lowered:
            return True
    return False


def takes_answer_back(sentence: str) -> bool:
    """Whether a sentence takes an earlier answer back, as "Wait" and "I made a mistake" do."""
    return may_take_answer_back(sentence) and bool(_TAKES_BACK.search(sentence))


def opens_with_correction_word(sentence: str) -> bool:
    """
    Whether a sentence opens with a word of correction, such as "Actually" or "No".

    Such a sentence corrects an earlier answer only if it also names another answer.
    """
    return bool(re.match(OPENS_CORRECTION, sentence, re.IGNORECASE))


def suggests_second_answer(sentence: str) -> bool:
    """Whether a sentence suggests a second answer beside the first, as in "It might be C."."""
    return bool(_OPENS_HEDGE.match(sentence) or _HEDGES.search(sentence))


def is_question(sentence: str) -> bool:
    return sentence.rstrip(" *_)\"'`").endswith(("?", "\u061f"))


def split_off_explanation(text: str) -> tuple[str, str]:
    """The part of a text before an explanation such as "because 6 * 7 = 42", and the rest."""
    match = EXPLAINS.search(text)
    if match and match.start():
        return text[: match.start()], text[match.start() :]
    # a bracket with words, as opposed to a bracket in a formula
    bracket = re.search(r"\s\((?=[^()\\]*[^\W\d_]{3})[^()\\]*\)[\s.!*_]*$", text)
    if bracket and bracket.start():
        return text[: bracket.start()], text[bracket.start() :]
    return text, ""


def strip_explanation(piece: str) -> str:
    """
    A piece of text without the explanation that `split_off_explanation` finds in it.

    The whole piece is returned if the explanation leaves the answer open.
    """
    if len(piece) > LONGEST_LINE:
        return piece
    answer, explanation = split_off_explanation(piece)
    return piece if allows_second_answer(explanation) else answer


def text_after_label(sentence: str) -> str:
    """
    The text after a label such as "The answer is" at the beginning of a sentence.

    The label may be in one of several languages. Returns "" if there is no label.
    """
    label = LABEL.match(sentence) if has_word_for_answer(sentence) else None
    return sentence[label.end() :] if label else ""


def join_labels_with_next_lines(text: str) -> str:
    """Joins each label that is alone on its line, such as "### Answer", to the next line."""
    if not has_word_for_answer(text):
        return text
    lines: list[str] = []
    label = ""
    for line in text.split("\n"):
        is_label = len(line) <= LONGEST_LINE and line.strip() and _BARE_LABEL.fullmatch(line)
        if label and line.strip():
            lines.append(f"{label}: {line}")
            label = ""
        elif is_label:
            label = line.rstrip(" *_`:=")
        else:
            lines.append(line)
    return "\n".join([*lines, label] if label else lines)


def split_sentences(text: str) -> list[str]:
    """The sentences of a text; the end of a line also ends a sentence."""
    sentences = []
    for line in text.split("\n"):
        begin = 0
        for end in _SENTENCE_END.finditer(line):
            sentences.append(line[begin : end.end()].rstrip())
            begin = end.end()
        sentences.append(line[begin:])
    return [sentence for sentence in sentences if sentence.strip()]


def nonempty_lines_without_fences(text: str) -> list[str]:
    """The lines of a text, without empty lines and the backtick lines around code blocks."""
    return [line for line in text.split("\n") if line.strip(" `")]


# ---- marks


class MarkedAnswer(NamedTuple):
    """A marked answer in a text, and the indices at which it begins and ends."""

    text: str
    begin: int
    end: int


def find_boxes(text: str) -> list[MarkedAnswer]:
    """
    The content of each outermost \\boxed{...} that is closed and not empty.

    The boxes are found in one pass over the braces of the text.
    """
    boxes: list[MarkedAnswer] = []
    if "\\boxed" not in text and "\\fbox" not in text:
        return boxes
    depth = 0
    # the depth and start of the open box, and the start of its content
    box: tuple[int, int, int] | None = None
    for match in re.finditer(r"\\(?:boxed|fbox)\s?\{|\\[{}]|[{}]", text):
        if match[0] == "}":
            depth -= 1
            if box and depth == box[0]:
                content = text[box[2] : match.start()].strip()
                boxes.append(MarkedAnswer(content, box[1], match.end()))
                box = None
        elif match[0].endswith("{") and match[0] != "\\{":
            if match[0] != "{" and not box:
                box = depth, match.start(), match.end()
            depth += 1
    return [mark for mark in boxes if mark.text]


def find_hash_marked_answers(text: str) -> list[MarkedAnswer]:
    """
    The answers in lines such as "#### 42".

    A line such as "#### Plan" is a heading, not an answer, unless it is the last line of the text.
    """
    lines: list[MarkedAnswer] = []
    if "####" not in text:
        return lines
    for match in re.finditer(r"(?<!#)####(?!#) ?([^\n#]*[^\s#])( *\Z)?", text):
        is_heading = re.match(r"\W*(?:[0-9]+[.):] ?)?[A-Za-z]|.*\\boxed", match[1])
        if match[2] is not None or not is_heading:
            lines.append(MarkedAnswer(match[1], match.start(), match.end()))
    return lines


def find_answer_tags(text: str) -> list[MarkedAnswer]:
    """The content of each <answer>...</answer> that is not empty."""
    if "</answer>" not in text:
        return []
    tags = re.finditer(r"<answer>([^<]*)</answer>", text)
    return [
        MarkedAnswer(match[1], match.start(), match.end()) for match in tags if match[1].strip()
    ]


def find_labelled_answer_in_last_line(text: str) -> list[MarkedAnswer]:
    """
    The answer in the last line, if that line is a label such as "Answer:" followed by an answer.

    The label may be in one of several languages, and may have Markdown around it.
    """
    text = text.rstrip()
    begin = text.rfind("\n") + 1
    line = text[begin:]
    match = _ANSWER_LINE.match(line) if len(line) <= LONGEST_LINE else None
    if not match:
        return []
    value = match["value"]
    if not re.search(r"\w", value) or re.match(r"[\\<]|\$?\\boxed", value):
        return []
    return [MarkedAnswer(value, begin, len(text))]


def find_answer_sentence_in_last_line(text: str) -> list[MarkedAnswer]:
    """
    The answer in the last line, if that line is a sentence such as "The answer is 42.".

    Such a sentence is not a marked answer, but `read_last_mark_and_rival_marks` prefers the
    sentence to an earlier box.
    """
    text = text.rstrip()
    begin = text.rfind("\n") + 1
    if len(text) - begin > LONGEST_LINE:
        return []
    labelled = text_after_label(text[begin:])
    answer, _ = split_off_explanation(labelled)
    value = answer.strip(" .!*_`:,;")
    is_pointer = re.match(
        r"(?:in|above|below|shown|given|boxed|as|therefore|thus|here|correct|clear)\b", value, re.I
    )
    if not value or is_pointer or len(split_sentences(labelled)) > 1 or is_question(labelled):
        return []
    return [MarkedAnswer(value, begin, len(text))]


@functools.lru_cache(maxsize=2**8)
def find_marked_answers(text: str) -> tuple[MarkedAnswer, ...]:
    """
    All marked answers in a text, in their order.

    A last line that begins with "Answer:" is not a marked answer itself if it contains another
    marked answer, such as a box.
    """
    marks = find_boxes(text) + find_hash_marked_answers(text) + find_answer_tags(text)
    line = find_labelled_answer_in_last_line(text)
    if line and not any(mark.end > line[0].begin for mark in marks):
        marks += line
    return tuple(sorted(marks, key=lambda mark: mark.begin))


def boxed_texts(text: str) -> list[str]:
    """The content of each outermost \\boxed{...} that is closed and not empty."""
    return [mark.text for mark in find_boxes(text)]


def marked_texts_outside_thoughts(text: str) -> list[str]:
    """
    The content of all marked answers in a text outside its thoughts.

    Answers are marked by boxes, by `####`, by <answer> tags, or by "Answer:" in the last line.
    """
    return [mark.text for mark in find_marked_answers(strip_thoughts(text))]


@functools.lru_cache(maxsize=2**16)
def last_mark_or_whole_answer(answer: str) -> str:
    """The last marked answer in a right answer, or the whole right answer if it has no mark."""
    text = normalize_unicode(strip_thoughts(answer)).strip() or normalize_unicode(answer).strip()
    marks = marked_texts_outside_thoughts(text)
    return marks[-1] if marks else text


def remove_marked_answers(text: str) -> str:
    """A text without its marked answers, for callers that found no mark of the requested kind."""
    pieces = []
    end = 0
    for mark in find_marked_answers(text):
        if mark.begin >= end:
            pieces.append(text[end : mark.begin])
            end = mark.end
    pieces.append(text[end:])
    return "".join(pieces)


def read_last_mark_and_rival_marks(
    text: str, is_answer: IsAnswer, *, counts_last_sentence: bool = True
) -> list[str]:
    """
    The last marked answer of the requested kind, and its rivals; [] if no answer is of that kind.

    Earlier marked answers are usually part of the working. Rival guesses are returned too (see
    `_are_rival_guesses`), and then each returned answer must be right.
    counts_last_sentence: whether a last line such as "The answer is 42." also counts as a marked
    answer, unless it only repeats the last marked answer in more words.
    """
    marks = [mark for mark in find_marked_answers(text) if is_answer(mark.text)]
    if not marks:
        return []
    last = marks.pop()
    sentence = (
        find_answer_sentence_in_last_line(text)
        if counts_last_sentence and "\n" in text[last.end :]
        else []
    )
    if sentence and is_answer(sentence[0].text) and last.text not in sentence[0].text:
        marks.append(last)
        last = sentence[0]
    statements = [last.text]
    while marks and _are_rival_guesses(text, marks[-1], last):
        last = marks.pop()
        statements.append(last.text)
    return statements


def _are_rival_guesses(text: str, mark: MarkedAnswer, next_mark: MarkedAnswer) -> bool:
    """
    Whether two successive marked answers are only guesses.

    Two marked answers are guesses if they are in the same line, if they are joined by "or", if the
    text calls both of them guesses, or if each is alone on its line and both are in the same
    paragraph.
    """
    between = text[mark.end : next_mark.begin]
    if "\n" not in between:
        return True
    if len(between) <= LONGEST_LINE and re.fullmatch(
        rf"\W*(?:{OR}|{MAYBE})\W*", between, re.IGNORECASE
    ):
        return True
    before = _line_part_before(text, mark)
    before_next = _line_part_before(text, next_mark)
    if GUESS.search(before[-LONGEST_LINE:]) and GUESS.search(before_next[-LONGEST_LINE:]):
        return True
    after = between[: between.find("\n")]
    stand_alone = not re.search(r"\w", before + before_next + after)
    return stand_alone and not re.search(r"\n\s*\n", between)


def _line_part_before(text: str, mark: MarkedAnswer) -> str:
    """The text before a marked answer in the same line."""
    return text[text.rfind("\n", 0, mark.begin) + 1 : mark.begin]


# ---- statements after labels


class LabelledAnswerOrRetraction(NamedTuple):
    """The answer after a label, and the rest of the text if that answer was taken back."""

    text: str | None  # None if no sentence has a label, or if its answer was taken back
    rest: str | None = None  # None if no answer was taken back


def read_first_labelled_answer(
    text: str, is_answer: IsAnswer, is_same: Callable[[str, str], bool]
) -> LabelledAnswerOrRetraction:
    """
    The answer in the first sentence with a label such as "The answer is".

    The rest of the text explains the answer. If a later sentence takes the answer back, the text
    from that sentence on counts instead. The answer is "" if the rest leaves it open, or labels a
    different answer in a sentence that is not a conclusion.
    """
    if not has_word_for_answer(text):
        return LabelledAnswerOrRetraction(None)
    stated: str | None = None
    rest: str | None = None
    sentences = split_sentences(join_labels_with_next_lines(text))
    may_be_taken_back = False
    for place, sentence in enumerate(sentences):
        if len(sentence) > LONGEST_LINE:
            continue
        if stated is not None:
            has_another = names_other_answer(sentence, stated)
            if (may_be_taken_back and takes_answer_back(sentence)) or (
                has_another and opens_with_correction_word(sentence)
            ):
                stated = None
                rest = "\n".join(sentences[place:])
            elif has_another and suggests_second_answer(sentence):
                return LabelledAnswerOrRetraction("")
        value = _read_labelled_answer(sentence, is_answer)
        if value is None:
            continue
        if stated is None:
            stated = value
            rest = None
            may_be_taken_back = may_take_answer_back("\n".join(sentences[place + 1 :]))
        elif CONCLUDES.match(sentence):
            stated = value
            rest = None
        elif not is_same(stated, value):
            return LabelledAnswerOrRetraction("")
    return LabelledAnswerOrRetraction(stated, rest)


def _read_labelled_answer(sentence: str, is_answer: IsAnswer) -> str | None:
    """
    The answer after a label in a sentence.

    Returns None if the sentence has no label or no answer, or if it leaves the answer open.
    """
    labelled = text_after_label(sentence)
    if not labelled or is_question(sentence):
        return None
    piece, explanation = split_off_explanation(labelled)
    value = piece.strip(" .!*_`:,;")
    return value if value and is_answer(value) and not allows_second_answer(explanation) else None


def allows_second_answer(explanation: str) -> bool:
    """Whether the words after an answer allow a second answer, as in "42 (or 43)"."""
    return bool(re.search(rf"{OR}|{MAYBE}|\b(?:if|might|may|could)\b", explanation, re.IGNORECASE))


def names_other_answer(sentence: str, stated: str) -> bool:
    """
    Whether a sentence seems to contain a number or a name other than the stated answer.
    """
    if re.search("[0-9]", stated):
        return any(
            number.strip(".,") not in stated for number in re.findall(r"[0-9][0-9.,]*", sentence)
        )
    words = [word.strip(".,'") for word in re.findall(r"\w[\w.,/'-]*", sentence)]
    return any(word not in stated and word[:1].isupper() for word in words[1:])


def split_answer_line_from_explanation(text: str, is_answer: IsAnswer) -> tuple[str, str] | None:
    """
    The first line, if it is an answer, and the explanation in the lines after it; else None.

    Each line of the explanation must have at least four words, or must end like a sentence or a
    heading. The explanation must not take the answer back or suggest a second answer.
    """
    first, _, rest = text.strip().partition("\n")
    if not rest.strip() or len(first) > LONGEST_LINE or is_question(first) or not is_answer(first):
        return None
    for line in nonempty_lines_without_fences(rest):
        is_prose = re.match(r"\s*\S+(?:\s+\S+){3}", line) or re.search(
            r"[.!:][\s*_`]*$", line[-20:]
        )
        if not is_prose:
            return None
    may_be_taken_back = may_take_answer_back(rest)
    for sentence in split_sentences(rest):
        if (
            (may_be_taken_back and takes_answer_back(sentence))
            or opens_with_correction_word(sentence)
            or suggests_second_answer(sentence)
        ):
            return None
    return first, rest


def read_opening_answer_sentence(text: str, is_answer: IsAnswer) -> str:
    """
    The first sentence of a text, if it is an answer and the rest of the text explains it; else "".

    For example, the answer could be "Canberra", and the explanation "It was built in 1913".
    """
    sentences = split_sentences(text[: 2 * LONGEST_LINE])
    explanation = sentences[1:]
    if not explanation or is_question(sentences[0]) or not is_answer(sentences[0]):
        return ""
    for part in explanation:
        names_another = re.search(r"\b(?:is|was|be|are) [\"'*]*[^\W\d_a-z]\w+[.!\"'*]*$", part)
        if (
            names_another
            or takes_answer_back(part)
            or opens_with_correction_word(part)
            or suggests_second_answer(part)
        ):
            return ""
    is_prose = len(explanation[0].split(None, 4)) >= 4
    return sentences[0] if is_prose else ""
