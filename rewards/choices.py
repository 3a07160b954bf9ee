# ruff: noqa: RUF001  (words of several languages)
"""
Finds the choice that a text states as its answer.

A choice is one of a few known answers, such as the letter "B" or the label "spam".

- A sentence states a choice if it consists only of the choice, or if it introduces the choice with
  a label, as in "The answer is B". An explanation such as "because A is a sugar" or "not A" may
  follow the choice.
- `read_choice` takes the first sentence in a text that states a choice. The rest of the text counts
  as an explanation, unless it takes the choice back.
- If no sentence states a choice, the first line may state one, as "B) Chlorophyll" does
  (`_read_opening_option`). If the first line states no choice either, a sentence such as "It must
  be B" may state a choice (`_can_introduce_choice` with may_be_weak).
- `read_choice_in_json` reads a choice from a JSON object.

This file does not cover how marked and labelled answers are found (rewards/statements.py). Each
function takes time linear in the length of the text.
"""

import json
import re
from collections.abc import Collection
from typing import Any

from rewards import statements

_NOT = re.compile(
    r"\b(?:not|never|neither|nor|cannot|except|unlike|isn|hardly)\b|n't\b|\\neq?\b|[\u2260\u00ac]",
    re.I,
)
_SCRIPTS_WITHOUT_SPACES = "\u0e00-\u0e7f\u3040-\u30ff\u3400-\u9fff\uac00-\ud7a3"
_CLOSERS = r"[\s)\]}\"'*_`\u300d\u300f\u201d\u00bb]*"
_CLAUSE_END = re.compile(  # the text that may follow a choice in a sentence that states the choice
    rf"{_CLOSERS}(?:です|だ|입니다|이다|है|olarak)?{_CLOSERS}"
    r"(?:$|[^\w\s/|&+'\"-]|-+ |(?=because\b|since\b|although\b|though\b|while\b|whereas\b|rather\b|"
    r"instead\b|not\b|"
    r"but not\b|as (?!well)\w|for \w|here\b|indeed\b|"
    r"and (?:here|this|it|that|because|so|the reason)\b|weil\b|denn\b|da\b|car\b|parce\b|porque\b|"
    r"perché\b|因为|因為))",
    re.IGNORECASE,
)
_NOUN = (
    r"(?:answer|option|choice|letter|label|class|category|type|sentiment|tone|classification|"
    r"verdict|prediction|"
    r"statement|review|text|message|e-?mail|solution|response|intent|topic|opción|opzione|opção|"
    r"kategorie|variante|вариант|选项|選項)"
)
_PREFIX = (
    rf"(?:(?:the |an? )?(?:(?:correct|right|best|final) )?(?:{_NOUN} )?{_NOUN}"
    rf"(?: (?:is|of))?:?[\s(\[*_`\"'$]*)?"
)
_NOUN_LABEL = re.compile(
    r"\W*(?:因此|所以|故|应该|应|應|我|本题)*(?:选择?|選擇?)[\s:：]*|"
    r"\W*(?:la |el |le |l'|die |il |a |o )?(?:opción|opzione|opção|alternativa|alternative|option|"
    r"variante|вариант|"
    r"lettre|letra|lettera)(?: (?:correcta?|correcte|corretta|correta|certa|giusta|esatta|richtige|"
    r"juste))?"
    r" ?(?::|es|est|è|é|ist|-)(?![A-Za-z])[\s*_`]*|"
    rf"{statements.DRESS}{statements.LEAD}{statements.DRESS}"
    rf"(?:(?:the|my|our|its|this) )?(?:(?:final|correct|right|best|predicted|true|overall|"
    rf"most likely) )*"
    rf"(?:{_NOUN}|result|conclusion)(?: (?:letter|label|option|choice|answer|here))?[\s*_`]*"
    rf"(?:(?:is|must be|would be|should be)(?: (?:therefore|thus|clearly))?\b\s*:?|[:=]|"
    rf"-+ )[\s*_`]*",
    re.IGNORECASE,
)
_IS_RIGHT = re.compile(
    rf"{_CLOSERS}(?:is|ist|est|es|è|é|是)\s?(?:the |clearly |definitely |therefore |thus |die |la |"
    rf"le |el |il |a |o )*"
    r"(?:(?:only |most )?(?:correct|right|best|richtige?|korrekte?|correcte?|bonne|juste|correcta?|"
    r"corretta?|esatta|"
    r"giusta|correta|certa|正确的?|正確的?|对的|對的|answer))"
    r"(?: (?:answer|option|choice|one|letter|antwort|réponse|respuesta|risposta|resposta|答案))?"
    rf"{_CLOSERS}(?=$|[.,;:!(\u2013-]|because\b|since\b|as\b|weil\b|car\b|parce\b|porque\b)",
    re.IGNORECASE,
)
_WEAK_LEAD = re.compile(
    r"(?:^|\b(?:is|are|was|were|be|as|on|at|in|equals|option|choice|answer)\b|\b(?:it|that|this|"
    r"answer)'s|[:=>\u2192])"
    r"[\s*_`\"'(\[$]*(?:the |an? )?$",
    re.I,
)
_COLON_LABEL = re.compile(
    rf"{statements.DRESS}[^\W\d_][\w /-]{{0,30}}[\s*_`]*[:=\uff1a][\s*_`\"']*$"
)
_NO_LABEL = re.compile(  # labels of text that is not the answer
    r"wrong|mistake|incorrect|false|\bnot\b|never|distract|altern|runner|second|guess|other|trap|"
    r"except|unlike|example|"
    r"note|hint|eliminat|rul|reject|exclu|discard|why|instead|versus|compar|former|previous|"
    r"student|user|unlikely|least|"
    r"tempting|closest|plausible|options|choices|common|question",
    re.I,
)
_NO_ANSWER = re.compile(
    r"wrong|mistake|incorrect|\bfalse\b|\berror|distract|\btrap|tempting|student|people|whether|"
    r"hard to|unclear|\bsure\b|doubt|\bsome\b|\bmany\b|\bothers?\b",
    re.I,
)
_I_SAY = re.compile(
    r"\bI(?:'d| would|'ll| will)? (?:say|go (?:with|for)|choose|pick|select|answer|"
    r"vote for)[\s:*_`\"'(]*"
    r"(?:option |choice )?$|"
    r"\bI(?:'d| would| will)? (?:label|call|rate|consider|deem|mark) (?:this|it|the \w+)(?: as)? $",
    re.I,
)
_RULES_OUT_REST = re.compile(
    r"[\s,;(*_`-]*(?:(?:and |but )?(?:definitely |certainly )?not|neither|rather than|instead of|"
    r"unlike|nicht|"
    r"et non|pas|"
    r"e non|ma non|non|e não|não|а не|не|而不是|不是)(?![A-Za-z])",
    re.I,
)
_CORRECTION = re.compile(rf"\A{statements.OPENS_CORRECTION}|\bactually\b", re.I)
_RULES_OUT = re.compile(
    r"\b(?:first|initially|thought|while|although|though|whereas|unlike|despite|not|neither|nor|"
    r"cannot|"
    r"rule[sd]? out|ruled|eliminat\w*|exclud\w*|between|unsure|wrong|incorrect|out of|among)\b|"
    r"n't\b",
    re.I,
)
_OPENS_QUESTION = re.compile(
    r"\W*(?:is|are|was|were|do|does|did|can|could|should|would|will|which|what|why|"
    r"who)\b(?! (?:clear|certain))",
    re.I,
)


def _whole_choice_pattern(choice: str, letter_pattern: str) -> str:
    """
    A regular expression that finds a choice where it is not part of a longer word or phrase.

    For example, the expression for "no" does not match in "not" or in "no doubt".
    """
    word = re.escape(choice)
    goes_on = r"because|since|as|for|but|and|or|if|it|they|he|she|this|that|there|not"
    end = rf"(?!\s+(?!(?:{goes_on})\b)[a-z])" if choice.lower() == "no" else ""
    # Matching is faster if the expression begins with letters than if it begins with a look-behind.
    return rf"{word}(?<!{letter_pattern}{word})(?<!\w['-]{word})(?<!-{word}){end}"


_OPENING = re.compile(rf"\W*{statements.LEAD}\W*{_PREFIX}", re.I)


class Choices:
    """The choices of a data set, and the patterns that find the choices in a text."""

    def __init__(self, names: Collection[str]):
        self.names = sorted({name for name in names if name}, key=lambda name: (-len(name), name))
        self.are_letters = all(len(name) == 1 for name in self.names)
        # A single letter must be a capital, since "a" is an article.
        self.case = re.IGNORECASE if any(len(name) > 1 for name in self.names) else 0
        is_ascii = all(name.isascii() for name in self.names)
        letter = rf"[^\W{_SCRIPTS_WITHOUT_SPACES}]" if is_ascii else r"\w"
        words = "|".join(_whole_choice_pattern(name, letter) for name in self.names)
        self.pattern = re.compile(rf"(?:{words})(?!{letter}|['-]\w)", self.case)
        marks = r"[\s*_`>#\"'\u2022-]*(?:(?:option|choice|statement) )?[(\[]?"
        self.option_line = re.compile(
            rf"{marks}({self.pattern.pattern})[)\]]?[.):\uff1a-]+[)\s*_`]+(?=\S)", self.case
        )
        self.known = {self.lowercase_and_collapse_spaces(name): name for name in self.names}

    def lowercase_and_collapse_spaces(self, text: str) -> str:
        return " ".join(text.casefold().split())

    def choices_in(self, text: str) -> set[str]:
        return {
            self.lowercase_and_collapse_spaces(match[0]) for match in self.pattern.finditer(text)
        }

    def choice_if_alone(self, text: str) -> str | None:
        """
        The choice that is the whole text, apart from Markdown, brackets, emoji and a full stop.

        None if the text contains anything else.
        """
        if len(text) > statements.LONGEST_LINE or statements.is_question(text):
            return None
        text = remove_bold_code_and_latex(text)
        bare = re.sub(r"^[^\w]+|[^\w]+$", "", text)
        if self.lowercase_and_collapse_spaces(bare) not in self.known:
            bare = re.sub(rf"^{_PREFIX}", "", bare, flags=re.I)
        key = self.lowercase_and_collapse_spaces(bare)
        return key if key in self.known else None


def remove_bold_code_and_latex(text: str) -> str:
    """The text without Markdown for bold and code, and without LaTeX commands around words."""
    if "\\" in text:
        text = re.sub(r"\\(?:text|math)[a-z]*\{([^{}]*)\}", r"\1", text)
    for dress in ("*", "`", "$", "__"):
        text = text.replace(dress, "")
    return text


# ---- a sentence


def read_choice_in_sentence(
    sentence: str, choices: Choices, *, may_be_weak: bool = False
) -> str | None:
    """
    The choice that a sentence states, either alone or after a label.

    None if the sentence states no choice, or does not commit to one choice.
    may_be_weak: whether sentences such as "it must be B" and "This is spam" state a choice too.
    """
    if len(sentence) > statements.LONGEST_LINE or statements.is_question(sentence):
        return None
    for match in choices.pattern.finditer(sentence):
        before = sentence[: match.start()]
        after = sentence[match.end() :]
        opens = _OPENING.fullmatch(before)
        right = _IS_RIGHT.match(after) if opens else None
        if right:
            is_open = _leaves_choice_open(after[right.end() :], match[0], choices)
            return None if is_open else choices.lowercase_and_collapse_spaces(match[0])
        if may_be_weak and _states_choice_as_adjective(before, after):
            return choices.lowercase_and_collapse_spaces(match[0])
        if not _can_introduce_choice(before, choices, may_be_weak=may_be_weak):
            continue
        if not _CLAUSE_END.match(after) and not _is_only_choice_then_noun(before, after):
            continue
        if _leaves_choice_open(after, match[0], choices):
            return None
        return choices.lowercase_and_collapse_spaces(match[0])
    return None


def _can_introduce_choice(before: str, choices: Choices, *, may_be_weak: bool) -> bool:
    """
    Whether the words before a choice can introduce it as the answer.

    An empty text or a label can introduce a choice. With may_be_weak, a verb such as "is" can also
    introduce a choice.
    """
    rest = re.sub(r"^[\s*_`>#~\"'(\[{\u300c\u300e\u201c\u201e\u00ab\u2022.=-]+", "", before)
    if not rest:
        return True
    lead = re.match(statements.LEAD, rest, re.I)
    if lead and lead.end() and not _has_word_character(rest[lead.end() :]):
        return True
    for label in (statements.LABEL.match(before), _NOUN_LABEL.match(before)):
        if label and re.fullmatch(
            rf"[\s(\[{{\"'\u300c]*(?:la |le |l'|die |il |a |o )?{_PREFIX}(?:clearly |definitely |"
            rf"still )?",
            before[label.end() :],
            re.I,
        ):
            return True
    if re.fullmatch(rf"[\s*_(\[]*{_PREFIX}", before, re.I):
        return True
    clause_start = r"[,;] (?:(?:so|but|and|thus|hence|therefore) )?|: (?=the |it |so )"
    clause = re.split(clause_start, before)[-1]
    earlier = before[: len(before) - len(clause)]
    is_conclusion = not clause and re.search(r"\b(?:so|thus|hence|therefore) $", earlier)
    if is_conclusion and not choices.choices_in(earlier):
        return may_be_weak
    if not may_be_weak:
        is_clause = earlier and _has_word_character(clause) and _RULES_OUT.search(earlier)
        label = statements.LABEL.match(clause) or _NOUN_LABEL.match(clause) if is_clause else None
        return bool(label and not _has_word_character(clause[label.end() :]))
    if choices.choices_in(earlier) and not _RULES_OUT.search(earlier):
        return False
    if _NOT.search(clause) or _OPENS_QUESTION.match(clause) or choices.choices_in(clause):
        return False
    if _NO_ANSWER.search(clause):
        return False
    if _I_SAY.search(clause):
        return True
    if re.search(r"[:=\uff1a][\s*_`\"']*$", clause) and not earlier:
        return bool(_COLON_LABEL.fullmatch(before)) and not _NO_LABEL.search(before)
    if earlier and re.match(r"\W*(?:final )?answer\W*$", clause, re.I):
        return True
    return bool(_WEAK_LEAD.search(clause)) and (not earlier or bool(_has_word_character(clause)))


def _has_word_character(text: str) -> bool:
    return bool(re.search(r"\w", text))


def _is_only_choice_then_noun(before: str, after: str) -> bool:
    """Whether a sentence consists only of a choice and a noun, as in "Positive sentiment"."""
    if _has_word_character(before):
        return False
    return bool(re.fullmatch(rf"{_CLOSERS} ?{_NOUN}\W*", after, re.I))


def _states_choice_as_adjective(before: str, after: str) -> bool:
    """Whether a choice describes the noun after it, as in "This is a positive review."."""
    verb = r"\b(?:is|has|expresses|conveys|shows)(?: (?:an?|the))? [\"'(]*$"
    if not re.search(verb, before, re.I):
        return False
    if _NOT.search(before) or _NO_ANSWER.search(before) or _OPENS_QUESTION.match(before):
        return False
    return bool(re.fullmatch(rf"{_CLOSERS} ?{_NOUN}[\s.!*]*", after, re.I))


def _leaves_choice_open(rest: str, stated: str, choices: Choices) -> bool:
    """
    Whether the words after a choice leave the answer open.

    The answer is open if the words add a condition, or name another choice without ruling it out.
    """
    if re.match(rf"\W*(?:{statements.OR}|{statements.MAYBE}|only if\b|if\b)", rest, re.I):
        return True
    other_names = choices.choices_in(rest) - {choices.lowercase_and_collapse_spaces(stated)}
    if _RULES_OUT_REST.match(rest) and not re.search(statements.MAYBE, rest, re.I):
        return False
    if re.search(rf"{statements.OR}|{statements.MAYBE}", rest, re.I) and other_names:
        return True
    condition = r"\b(?:unless|only if|otherwise|is (?:wrong|incorrect|false))\b"
    if re.search(condition, rest, re.I) and not other_names:
        return not re.match(r"\W*\w*(?:because|since|as)\b", rest, re.I)
    if not other_names:
        return False
    explains = statements.EXPLAINS.match(rest) or re.match(
        r"[\s,;:.*_`(\u2013-]*(?:because|since|as(?! well)|for|neither|not|nor|although|though|"
        r"while|whereas|unlike|"
        r"in contrast|over|因|而不)",
        rest,
        re.I,
    )
    return not explains or bool(re.search(r"\b(?:could|might|may)\b", rest, re.I))


# ---- a text


def split_option_line(line: str, choices: Choices) -> tuple[str, str] | None:
    """
    The letter that opens an option line such as "B) Chlorophyll", and the rest of the line.

    None if the line is not an option line.
    """
    if not choices.are_letters or len(line) > statements.LONGEST_LINE:
        return None
    match = choices.option_line.match(line)
    if not match or not re.search(r"\w", line[match.end() :]):
        return None
    return choices.lowercase_and_collapse_spaces(match[1]), line[match.end() :]


def read_choice_answers(text: str, choices: Choices) -> list[str]:
    """
    The choices that a completion states; the completion is right only if each of them is right.

    An empty string means that a statement does not name exactly one choice. If the text is a JSON
    object, only the object is read. Otherwise, marked answers that name a choice are read. If no
    marked answer names a choice, the text without its marked answers is read.
    """
    stated = read_choice_in_json(text, choices)
    if stated is not None:
        return [stated]

    def names_choice(mark: str) -> bool:
        return bool(
            choices.choices_in(remove_bold_code_and_latex(mark)) or choices.choice_if_alone(mark)
        )

    marks = statements.read_last_mark_and_rival_marks(text, names_choice)
    if marks:
        return [_read_choice_in_mark(mark, choices) for mark in marks]
    return [read_choice(statements.remove_marked_answers(text), choices) or ""]


def _read_choice_in_mark(mark: str, choices: Choices) -> str:
    stated = read_choice_in_json(mark, choices)
    if stated is None:
        stated = read_choice(mark, choices)
    return stated or ""


def read_choice(text: str, choices: Choices) -> str | None:
    """
    The choice that a text without marked answers states; None if there is none.

    The docstring of this file lists the rules. The first rule that finds a choice decides.
    """
    alone = choices.choice_if_alone(text)
    if alone is not None:
        return alone
    lines = statements.nonempty_lines_without_fences(
        remove_bold_code_and_latex(statements.join_labels_with_next_lines(text))
    )
    sentences = _sentences_without_options(lines, choices)
    stated = _stated_choice_after_corrections(sentences, choices, may_be_weak=False)
    if stated is None:
        stated = _read_opening_option(lines, choices)
    if stated is None:
        stated = _stated_choice_after_corrections(sentences, choices, may_be_weak=True)
    return stated or None


def _stated_choice_after_corrections(
    sentences: list[str], choices: Choices, *, may_be_weak: bool, stated: str | None = None
) -> str | None:
    """
    The choice in the first sentence that states one, unless a later sentence replaces it.

    A later sentence replaces the choice if it states a choice and is a conclusion or a correction.
    The result is "" if other sentences contradict the choice, leave it open, or take it back. The
    result is None if no sentence states a choice.
    stated: the choice that was stated before these sentences, if any.
    """
    is_contradicted = False
    may_take_back = stated is not None and statements.may_take_answer_back("\n".join(sentences))
    for place, sentence in enumerate(sentences):
        names = choices.choices_in(sentence)
        if not names and not stated:
            continue
        concludes = bool(statements.CONCLUDES.match(sentence))
        is_taken_back = may_take_back and statements.takes_answer_back(sentence)
        names_another = bool(stated and names - {stated})
        if is_taken_back or (names_another and _replaces_choice(sentence, stated or "", choices)):
            stated = ""
            is_contradicted = False
        elif (
            names_another
            and statements.suggests_second_answer(sentence)
            and not _NOT.search(sentence)
        ):
            is_contradicted = True
        if not names:
            continue
        is_weak = may_be_weak or (stated is not None and concludes)
        choice = read_choice_in_sentence(
            _strip_correction_words(sentence), choices, may_be_weak=is_weak
        )
        if choice is None:
            continue
        if stated is None:
            may_take_back = statements.may_take_answer_back("\n".join(sentences[place + 1 :]))
        if concludes or may_be_weak or not stated:
            stated = choice
            is_contradicted = False
        elif choice != stated:
            is_contradicted = True
    return "" if is_contradicted else stated


def _sentences_without_options(lines: list[str], choices: Choices) -> list[str]:
    """The sentences in the lines, without options such as "A) a sugar"."""
    sentences = []
    for line in lines:
        if split_option_line(line, choices) is None:
            parts = statements.split_sentences(line)
            sentences += [part for part in parts if split_option_line(part, choices) is None]
    return sentences


def _replaces_choice(sentence: str, stated: str, choices: Choices) -> bool:
    """Whether a sentence replaces the stated choice with another one, as "Actually, C." may do."""
    correction = _CORRECTION.search(sentence)
    if not correction or _NOT.search(sentence):
        return False
    return bool(choices.choices_in(sentence[correction.end() :]) - {stated})


def _strip_correction_words(sentence: str) -> str:
    """The sentence without opening words of correction, such as "Wait, actually"."""
    words = r"(?:wait|hmm+|oh|no|but|sorry|actually|oops|correction|i mean(?:t)?|rather|well)"
    match = re.match(rf"\W*(?:{words}[\s,.:!\u2026-]+)+", sentence, re.I)
    if not match or match.end() == len(sentence):
        return sentence
    is_choice = re.fullmatch(r"\W*no\W*", match[0], re.I)
    return sentence if is_choice else sentence[match.end() :]


def _read_opening_option(lines: list[str], choices: Choices) -> str | None:
    """
    The choice of a text whose first line is an option such as "B) Chlorophyll"; else None.

    The choice is the letter of the option, unless the rest of the text corrects it. The result is
    "" if the text leaves the choice open, if the option is a question, or if the next line is the
    next option in a list.
    """
    option = split_option_line(lines[0], choices) if lines else None
    if option is None:
        return None
    letter, rest = option
    next_option = split_option_line(lines[1], choices) if lines[1:] else None
    if next_option and next_option[0] >= letter:  # the text only lists the options in order
        return ""
    if statements.is_question(rest):
        return ""
    sentences = statements.split_sentences(rest) + _sentences_without_options(lines[1:], choices)
    return _stated_choice_after_corrections(sentences, choices, may_be_weak=False, stated=letter)


# ---- JSON

_ANSWER_KEY = re.compile(
    rf"(?:(?:final|correct|predicted|best|selected|chosen|the|your|my)[ _-]?)?"
    rf"(?:{_NOUN}|result|output|value|prediction)"
    r"(?:[ _-]?(?:label|letter|class|choice|option|answer|name))?",
    re.I,
)
_EXPLAINING_KEY = re.compile(
    r"(?:brief|short|detailed)?[ _-]?(?:explanation|reason(?:ing|s)?|rationale|why|because|"
    r"justification|evidence|"
    r"thoughts?|analysis|comment|notes?|confidence|score|probability|certainty|steps?|summary|"
    r"quote)",
    re.I,
)


def read_choice_in_json(text: str, choices: Choices) -> str | None:
    """
    The choice that a JSON object states.

    The choice must be the only value, or the value under a key such as "answer" or "label". The
    values under all other keys must be numbers or explanations. The result is "" if the object
    states no choice or several choices, and None if the text is not a JSON object.
    """
    pairs = _read_json_pairs(text)
    if pairs is None:
        return None
    stated = []
    for key, value in pairs:
        if choices.choice_if_alone(key) or _NOT.search(key):
            return ""
        if (
            isinstance(value, str)
            and choices.choice_if_alone(value)
            and not _EXPLAINING_KEY.fullmatch(key)
        ):
            is_answer = len(pairs) == 1 or _ANSWER_KEY.fullmatch(key)
            stated.append(choices.choice_if_alone(value) if is_answer else "")
            continue
        is_explanation = (
            _EXPLAINING_KEY.fullmatch(key) or isinstance(value, (int, float)) or value is None
        )
        is_only_flag = isinstance(value, bool) and len(pairs) == 1
        if not is_explanation or is_only_flag:
            return ""
    return stated[0] or "" if len(stated) == 1 else ""


def _read_json_pairs(text: str) -> list[tuple[str, Any]] | None:
    """
    The pairs of keys and values in a JSON object, which may be inside a Markdown code block.

    A key that occurs twice in the object is in two of the pairs. The result is None if the text is
    not a JSON object.
    """
    body = text.strip()
    fence = body.find("```")
    if fence >= 0:
        body = re.sub(r"^`+\w*\s*", "", body[fence:])
    if not body.startswith("{"):
        return None
    outermost: list[list[tuple[str, Any]]] = []

    def record_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        outermost.append(pairs)
        return dict(pairs)

    try:
        value, end = json.JSONDecoder(object_pairs_hook=record_pairs).raw_decode(body)
    except (ValueError, RecursionError):
        return None
    after = body[end:].strip(" \n`")
    if not isinstance(value, dict) or "{" in after:
        return None
    return outermost[-1]
