"""
Reads the score, 1 to 5, from a judge's reply. docs/judge.md has one example of each rule.

`read_score` tries the rules in this order: a labelled score, the number that opens the reply, a
line that names one number, a verdict in a sentence, and a lone number. The first rule that applies
decides, even if it reads no score. Each rule is a function.

Thoughts that a server sends separately are handled in judging/server.py, and the tokens of mode
`logits` in judging/rubrics.py.
"""

import json
import re
import unicodedata
from collections.abc import Iterator
from typing import Any, NamedTuple

from judging import score_words as words

LONGEST = 2000  # how many characters are read at the beginning of a reply, and at the end

# ---- patterns

VALUE_OF_WORD = {word: value for value, text in words.NUMBERS.items() for word in text.split()}
# letters of scripts that put no space between words
CJK = "[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]"


def make_pattern(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern, re.IGNORECASE | re.MULTILINE)


def label_pattern(labels: str) -> str:
    """
    A pattern for any of these labels, as a complete word if its script separates words.

    A German label may also be the end of a compound word.
    """
    names = sorted(map(re.escape, labels.split()), key=len, reverse=True)
    unspaced = [name for name in names if re.search(CJK, name)]
    spaced = [name for name in names if not re.search(CJK, name)]
    compound = r"(?:\w{1,20}(?=bewertung|punktzahl|wertung))?"
    word = rf"(?<![^\W_]){compound}(?:{'|'.join(spaced)})s?(?![^\W_])"
    return "(?:" + "|".join([word, *unspaced]) + ")"


_NUMBER_WORDS = "|".join(sorted(map(re.escape, VALUE_OF_WORD), key=len, reverse=True))
NUMBER = rf"(?:\d+(?:[.,]\d+)?|(?<!\w)(?:{_NUMBER_WORDS})(?![\w-]))"
UNIT = rf"(?:\s*-?\s*(?:(?:{words.UNITS})(?!\w)|{words.UNITS_WITHOUT_SPACE}))?"
MOST = r"(?:the\s+|a\s+)?(?:max\w*\s+(?:of\s+)?|possible\s+)?"
OF_SCALE = rf"(?:\s*[(\[]?\s*(?:{words.OVER})\s*{MOST}(?P<scale>{NUMBER}){UNIT})?"
NOT_BEFORE = r"(?<![\w.,/+~\u00b1\u2248\u2264\u2265-])"  # "-4", "1.4", "~4" hold no 4
VALUE = rf"{NOT_BEFORE}(?P<number>{NUMBER}){UNIT}(?!\w|\s*%|[.,]\d){OF_SCALE}"
OPENERS = rf"""[\s"'\u201c\u201d\u201e\u00ab\u00bb(\[{{<$]*(?:(?:{words.ARTICLES})\s+)?"""
OPENED_VALUE = make_pattern(OPENERS + VALUE)

LABEL = label_pattern(words.LABELS)
WEAK = label_pattern(words.WEAK_LABELS)
QUALIFIER = r"(?:\s*[(\[][^()\[\]\n]{0,80}[)\]])?"  # "(1 = worst, 5 = best)"
ORDINAL = r"(?:criteri(?:on|a)|question|answer|item|aspect)\s+#?\d+"
FREE = rf"(?P<free>(?:{ORDINAL}|[^\n:=.|\d!?;>\]]){{0,60}}?)"  # "for criterion 2"
COLON = r"\s*(?:[:=|>\]\u2192]+)"
DASH = r"\s+[-\u2013\u2014]\s"
LABEL_AND_COLON = make_pattern(rf"(?P<label>{LABEL}){QUALIFIER}{FREE}{QUALIFIER}{COLON}")
LABEL_AND_IS = make_pattern(
    rf"(?P<label>{LABEL}){QUALIFIER}(?:\s+(?:{words.IS})\s|\s*[是为為は은는]\s*:?|\s*\u00e8\s)"
)
LABEL_AT_START = make_pattern(
    r"(?:^|(?<=[.!?]\s))[ \t]*(?:(?:my|the|final|overall|total|your|judge|grader)['\w]*[ \t]+){0,3}"
    rf"(?P<label>{LABEL}){QUALIFIER}(?:{DASH}|\s+)"
)
WEAK_LABEL = make_pattern(
    rf"(?P<label>{WEAK}){QUALIFIER}[ \w\"']{{0,20}}?(?:{COLON}|{DASH}|\s+(?:{words.IS})\s)"
)
IN_BRACKETS = make_pattern(rf"\[\[\s*{VALUE}\s*\]\]")  # as MT-Bench asks judges to write
OF_OTHERS = make_pattern(
    r"(?:max|maximum|min|minimum|possible|highest|lowest|previous|perfect)[\s_-]+$"
)
ENDS_IN_OVERALL = make_pattern(rf"(?:{words.OVERALL})\W*$")

JOINED_NUMBER = make_pattern(
    rf"(?:[-\u2013\u2014~/]|\s*(?:->|\u2192)\s*|\s+(?:{words.RANGE})\s+)\s*({NUMBER})"
)
LISTED_NUMBER = make_pattern(
    r"(?:[ \t]*[,;&+~][ \t]*|[ \t]+[-\u2013\u2014/][ \t]+|[ \t]+)"
    rf"({NUMBER}){UNIT}[ \t]*(?=$|[\n.,;:!?)\]])"
)
NUMBER_ON_NEXT_LINE = make_pattern(rf"\s*\n\s*({NUMBER}){UNIT}\s*(?=$|\n)")
UNFINISHED = make_pattern(r"\s*/|[+\u00bd]|-\s*(?:$|\n)")  # "4/", "4+", "4-"
MAY_FOLLOW = make_pattern(
    r"\s*$|\s*\n|\s*[.,:;!?)\]}\"'\u201d\u00bb>|(\[\u2013\u2014-]"
    rf"|\s+(?:{words.AFTER_A_SCORE})(?!\w)"
)

FROM_1_TO_5 = make_pattern(
    rf"(?<![\w.,/-])1\s*(?:\([^()\n]*\))?\s*(?:{words.SCALE_TO})\s*5(?![\w/%]|[.,]\d)"
    r"(?:\s*\([^()\n]*\))?|\b5[- ]point\b"
)
OPENING_SCALE = re.compile(
    r"^\W*(?:on|using|with|auf|sur|en|su|em)\s+(?:\w+['\s]\s*){0,3}?"
    rf"(?:{words.SCALE})\b\s*(?:of|from|von|de|da)?[\s,:()-]*",
    re.IGNORECASE,
)
FULL_MARKS = make_pattern(
    r"\(?(?:满分|滿分|満点)[为是は:]?\s*5\s*[分点]?\)?[,、]?|5\s*[分点]\s*(?:满分|制|満点(?!中))[,、で]?"
)
WHOLE_FIRST = make_pattern(
    r"5\s*(?:点|點|分|점|つ星)?\s*"
    rf"(?:{words.OVER_AFTER_WHOLE})[^\d\n]{{0,4}}(?P<number>\d+(?:[.,]\d+)?)"
)

VERDICT = make_pattern(
    rf"(?:{label_pattern('score rating grade mark')}\s+(?:of|at|as)\s"
    rf"|(?<!\w)(?:{words.GIVES})(?!\w)(?:\s+(?:{words.GIVEN_TO}))*(?:\s+(?:an?|as|at|with))*\s"
    rf"|\b(?:{words.SO})\b,?(?:\s+(?:it\s+is|it's|a|i\s+say))?\s"
    rf"|(?:{words.VERDICT_WITHOUT_SPACE}),?\s*"
    r"|(?:\bis|it's|that's)\s+an?\s+(?:\w+\s)?)"
)
DENIAL = make_pattern(rf"\b(?:{words.DENIES})\b|n['\u2019]t\b")
NAMED_NUMBER = make_pattern(
    rf"(?:^|[,;|]\s)(?P<name>[^\n:=,;|]{{1,60}}?)\s*[:=](?={OPENERS}{VALUE})"
)
NUMBERED_LIST = make_pattern(r"\s*\(?1[.)]\s+\D")

THOUGHT = "think|thinking|thoughts?|seed:think"
EXPLANATION = "reasoning|reflection|analysis|scratchpad"
OPENING_OF_THOUGHT = make_pattern(
    rf"<(?:{THOUGHT}|(?P<explanation>{EXPLANATION}))>|\[THINK\]"
    r"|<\|(?:begin_of_thought|START_THINKING)\|>"
    r"|<\|channel\|?>\s*(?:analysis|thought)"
)
END_OF_THOUGHT = make_pattern(
    rf"</(?:{THOUGHT}|{EXPLANATION})>|\[/THINK\]|<\|(?:end_of_thought|END_THINKING)\|>|<channel\|>"
    r"|<\|channel\|>\s*final(?:<\|message\|>)?"
)

# ---- text


def remove_thoughts(reply: str) -> str:
    """
    The reply without its thoughts; empty if a thought is still open at the end.

    An explanation in tags is removed too. If it is still open, the reply ends before it.

    `strip_thoughts` in rewards/statements.py keeps only the text after the last closing tag,
    because a completion ends with its answer. A judge's score may come before a closed explanation.
    It does not count if a thought after it is still open.
    """
    parts = []
    place = 0
    while opening := OPENING_OF_THOUGHT.search(reply, place):
        closing = END_OF_THOUGHT.search(reply, opening.end())
        if closing is None and not opening["explanation"]:
            return ""
        parts.append(reply[place : opening.start()])
        place = closing.end() if closing else len(reply)
    parts.append(reply[place:])
    answer = "".join(parts)

    # Some chat templates open the thought themselves, so that the reply only closes it.
    last_end = max((closing.end() for closing in END_OF_THOUGHT.finditer(answer)), default=0)
    return answer[last_end:]


def plain_text(reply: str) -> str:
    """
    The reply without markup, and with digits and signs in their plain forms.

    The middle of a long reply is dropped.
    """
    text = reply.strip()
    if len(text) > 2 * LONGEST:
        text = f"{text[:LONGEST]}\n{text[-LONGEST:]}"
    characters = []
    for character in unicodedata.normalize("NFKC", text):
        if character.isdecimal():
            characters.append(str(unicodedata.decimal(character)))
        elif (
            unicodedata.category(character) not in ("Cf", "Me")
            and not "\ufe00" <= character <= "\ufe0f"
        ):
            characters.append(character)
    text = "".join(characters)
    text = re.sub("[\u2010-\u2012\u2212]", "-", text).replace("\u2044", "/")
    text = re.sub(r"\\boxed\s*\{([^{}\n]*)\}", r"[[\1]]", text)
    text = re.sub(
        r"^[ \t]*```\w*[ \t]*$|`+|\*+|==+|(?<!\w)_+|_+(?!\w)", "", text, flags=re.MULTILINE
    )
    text = re.sub(r"<(?:br|p|/p|/div)\s*/?>", "\n", text, flags=re.IGNORECASE)
    text = re.sub(
        r"</?(?:b|i|u|em|strong|span|div|code|h[1-6])(?:\s[^<>\n]*)?>",
        "",
        text,
        flags=re.IGNORECASE,
    )
    text = re.sub(r"</[\w:-]+>|\[/\w+\]", " \n", text)
    text = re.sub(
        r"^[ \t]*(?:#+|>[ \t]|[-+\u2022\u00b7][ \t]|\|)[ \t]*", "", text, flags=re.MULTILINE
    )
    text = re.sub(r"<\|[^<>|\n]{1,30}\|>", " ", text)
    text = re.sub(words.POLITE_IS, "", text.replace("。", "."))  # "is", after a number
    text = re.sub(rf"(?<={CJK})(?=\d)|(?<=\d)(?={CJK})", " ", text)
    text = WHOLE_FIRST.sub(r"\g<number>/5 ", text)
    return FULL_MARKS.sub("", text).strip()


def remove_scales(text: str) -> str:
    """The text without mentions of the scale, such as "on a scale from 1 (worst) to 5 (best)"."""
    return OPENING_SCALE.sub("", FROM_1_TO_5.sub("", text)).strip()


# ---- numbers


class Value(NamedTuple):
    """A number that a judge wrote."""

    score: int | None  # 1 to 5; None if the number is no score
    end: int  # the place in the text after the number


def read_number(text: str) -> float:
    """The number that a text spells: 4 for "4", "4.0", "4,0" and "four"."""
    word = text.casefold()
    return float(VALUE_OF_WORD[word]) if word in VALUE_OF_WORD else float(text.replace(",", "."))


def is_one_of_several(text: str, value: re.Match[str]) -> bool:
    """Whether another number follows directly, as in "3-4", "3 or 4" and "3, 4"."""
    number = read_number(value["number"])
    for pattern in (JOINED_NUMBER, LISTED_NUMBER, NUMBER_ON_NEXT_LINE):
        next_number = pattern.match(text, value.end())
        if next_number is not None and read_number(next_number[1]) != number:
            return True
    return False


def score_in_match(text: str, value: re.Match[str]) -> int | None:
    """The score in a match of `VALUE`: an integer from 1 to 5, alone or "out of 5"."""
    number = read_number(value["number"])
    scale = read_number(value["scale"]) if value["scale"] else 5
    if scale != 5 or number not in range(1, 6):
        return None
    if is_one_of_several(text, value) or UNFINISHED.match(text, value.end()):
        return None
    return int(number)


def value_at(text: str, place: int) -> Value | None:
    """The number at a place of a text; None if there is no number."""
    value = OPENED_VALUE.match(text, place)
    return Value(score_in_match(text, value), value.end()) if value else None


# ---- rules: each returns a list of the scores that it reads, with None for a number that is no
# score. A rule that does not apply returns an empty list.

Scores = list[int | None]


class Pairs(list[tuple[str, Any]]):
    """The keys and values of a JSON object. A key that the object repeats is repeated here."""


def json_objects(text: str) -> Iterator[Pairs]:
    """The outermost JSON objects in a text."""
    decoder = json.JSONDecoder(object_pairs_hook=Pairs)
    place = text.find("{")
    while place >= 0:
        try:
            content, end = decoder.raw_decode(text, place)
        except (ValueError, RecursionError):
            end = place + 1
        else:
            yield content
        place = text.find("{", end)


def json_numbers(content: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """
    Every number and text in a JSON value, with its key.

    A `value` or `number` in an object gets the object's key.
    """
    if isinstance(content, Pairs):
        for name, inner in content:
            yield from json_numbers(inner, key if key and name in ("value", "number") else name)
    elif isinstance(content, list):
        for inner in content:
            yield from json_numbers(inner, key)
    else:
        yield key, content


def json_score(content: Any) -> int | None:
    """The score in a JSON value such as 4, 4.0, "4" or "4/5"; None if it is no score."""
    if isinstance(content, bool) or not isinstance(content, (int, float, str)):
        return None
    text = plain_text(str(content))
    value = value_at(text, 0)
    return value.score if value else None


def scores_in_json(reply: str) -> Scores:
    """
    Rule: the score is a JSON object's `score` or `rating`.

    Without such a key, the object's only number is the score.
    """
    labelled: Scores = []
    overall: Scores = []
    numbers: Scores = []
    for content in json_objects(reply):
        for key, inner in json_numbers(content):
            name = re.sub(r"[\s_-]+", " ", unicodedata.normalize("NFKC", key)).strip()
            label = re.search(rf"(?P<label>{LABEL})$", name, re.IGNORECASE)
            if label and not OF_OTHERS.search(name[: label.start()]):
                labelled.append(json_score(inner))
                if ENDS_IN_OVERALL.search(name[: label.start()]):
                    overall.append(json_score(inner))
            elif isinstance(inner, (int, float)) and not isinstance(inner, bool):
                numbers.append(json_score(inner))
    if overall or labelled:
        return overall or labelled
    return numbers if len(numbers) == 1 else []


def labelled_scores(text: str) -> Scores:
    """
    Rule: the number after `score`, `rating` or a similar label in any language is the score.

    The number in [[n]] is a score too. An overall score takes precedence over other scores. A label
    with words after it is ignored if another label has a number.
    """
    plain: Scores = []
    overall: Scores = []
    has_words = False
    places = set()  # of the labels already read: several patterns may match one label
    for pattern in (LABEL_AND_COLON, LABEL_AND_IS, LABEL_AT_START):
        for label in pattern.finditer(text):
            place = label.start("label")
            before = text[:place]
            free = label["free"] if pattern is LABEL_AND_COLON else ""
            is_other = re.search(rf"\b(?:{words.NO_LABEL})\b", free, re.IGNORECASE)
            if place in places or is_other or OF_OTHERS.search(before):
                continue
            value = value_at(text, label.end())
            if pattern is not LABEL_AND_COLON and (
                value is None or not MAY_FOLLOW.match(text, value.end)
            ):
                continue
            places.add(place)
            if value is None:
                has_words = True
            elif ENDS_IN_OVERALL.search(before) or ENDS_IN_OVERALL.match(label["label"]):
                overall.append(value.score)
            else:
                plain.append(value.score)
    plain += [score_in_match(text, marked) for marked in IN_BRACKETS.finditer(text)]
    scores = overall or plain
    return scores or ([None] if has_words else [])


def weakly_labelled_scores(text: str) -> Scores:
    """
    Rule: the number after a weak label is the score if the statement ends there.

    A weak label is a word that may mean something else, such as `note`, `grade` or `answer`.
    """
    plain: Scores = []
    overall: Scores = []
    for label in WEAK_LABEL.finditer(text):
        value = value_at(text, label.end())
        if value and value.score and MAY_FOLLOW.match(text, value.end):
            is_overall = re.match(words.OVERALL, label[0], re.IGNORECASE)
            (overall if is_overall else plain).append(value.score)
    return overall or plain


def opening_scores(text: str, was_cut: bool) -> Scores:
    """Rule: the number that opens the reply is the score, unless it counts things or list items."""
    value = value_at(text, 0)
    if value is None or not MAY_FOLLOW.match(text, value.end):
        return []
    if NUMBERED_LIST.match(text) and (was_cut or re.search(r"\d", text[value.end :])):
        return []
    return [value.score]


def scores_under_a_name(text: str) -> Scores:
    """Rule: the number in a line such as "Scrutiny: 4" is the score if there is no other score."""
    scores: Scores = []
    for line in NAMED_NUMBER.finditer(text):
        is_other = re.search(rf"\b(?:{words.NO_NAME})s?\b", line["name"], re.IGNORECASE)
        value = value_at(text, line.end())
        if value and not is_other and MAY_FOLLOW.match(text, value.end):
            scores.append(value.score)
    return scores


def scores_in_verdicts(text: str) -> Scores:
    """
    Rule: the number in "I give 4", "so 4" or "this is a 4" is a score.

    It is no score if the sentence denies it or only supposes it.
    """
    scores: Scores = []
    for verdict in VERDICT.finditer(text):
        value = value_at(text, verdict.end())
        sentence = re.split(r"[.!?;\n]", text[: verdict.start()])[-1]
        if value and MAY_FOLLOW.match(text, value.end) and not DENIAL.search(sentence):
            scores.append(value.score)
    return scores


def lone_scores(text: str) -> Scores:
    """Rule: a reply's only number is the score if it fills the reply or a line, or is out of 5."""
    values = list(re.finditer(VALUE, text, re.IGNORECASE))
    if not re.search(r"\w", re.sub(VALUE, "", text, flags=re.IGNORECASE)):
        return [score_in_match(text, value) for value in values]
    values = [value for value in values if value["number"][0].isdigit()]
    digits = sum(len(re.findall(r"\d+(?:[.,]\d+)?", value[0])) for value in values)
    if len(values) != 1 or digits != len(re.findall(r"\d+(?:[.,]\d+)?", text)):
        return []
    (value,) = values
    line = text[text.rfind("\n", 0, value.start()) + 1 :].partition("\n")[0]
    is_line = not re.sub(r"[\W_]", "", line.replace(value[0], ""))
    if is_line or (value["scale"] and MAY_FOLLOW.match(text, value.end())):
        return [score_in_match(text, value)]
    return []


def read_score(reply: str, was_cut: bool = False) -> int | None:
    """
    The score in a judge's reply, 1 to 5; None if it is unreadable.

    was_cut: whether the reply ended at its token limit. Then a score counts only if it opens the
    reply or has a label.
    """
    answer = remove_thoughts(reply)
    text = plain_text(answer)
    unscaled = remove_scales(text)
    rules = [
        lambda: scores_in_json(answer[-2 * LONGEST :]),
        lambda: labelled_scores(text),
        lambda: opening_scores(unscaled, was_cut),
        lambda: weakly_labelled_scores(text),
    ]
    if not was_cut:
        rules += [
            lambda: scores_under_a_name(unscaled),
            lambda: scores_in_verdicts(unscaled),
            lambda: lone_scores(unscaled),
        ]
    for find_scores in rules:
        scores = find_scores()
        if scores:
            return scores[0] if len(set(scores)) == 1 else None
    return None
