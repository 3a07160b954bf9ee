"""
Reads the score from 1 to 5 in a judge's reply. docs/judge.md gives an example of each rule.

`read_score` tries these rules in order: a score in JSON, a labelled score, a number that opens the
reply, a weakly labelled score, a line with a name and a number, a verdict in a sentence, and a lone
number. The first rule that applies decides, even if the number that it finds is not a score. Each
rule is a function.

judging/server.py handles thoughts that a server sends separately from the reply.
judging/evaluations.py computes scores from the first tokens in mode `logits`.
"""

import json
import re
import unicodedata
from collections.abc import Iterator
from typing import Any, NamedTuple

from judging import score_words as words

LONGEST = 2000  # characters; of a longer reply, only this many at each end are read

# ---- patterns

VALUE_OF_WORD = {word: value for value, text in words.NUMBERS.items() for word in text.split()}
# letters of scripts that are written without spaces between words
CJK = "[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]"


def compile_multiline_ignoring_case(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern, re.IGNORECASE | re.MULTILINE)


def make_label_regex(labels: str) -> str:
    """
    A pattern that matches any of the labels.

    A label must be a whole word if its script has spaces between words. Some German labels may also
    be the end of a compound word.

    labels: the labels, separated by spaces.
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
# so that "-4", "1.4" and "~4" do not match as 4
NOT_BEFORE = r"(?<![\w.,/+~\u00b1\u2248\u2264\u2265-])"
VALUE = rf"{NOT_BEFORE}(?P<number>{NUMBER}){UNIT}(?!\w|\s*%|[.,]\d){OF_SCALE}"
OPENERS = rf"""[\s"'\u201c\u201d\u201e\u00ab\u00bb(\[{{<$]*(?:(?:{words.ARTICLES})\s+)?"""
OPENED_VALUE = compile_multiline_ignoring_case(OPENERS + VALUE)

LABEL = make_label_regex(words.LABELS)
WEAK = make_label_regex(words.WEAK_LABELS)
QUALIFIER = r"(?:\s*[(\[][^()\[\]\n]{0,80}[)\]])?"  # such as "(1 = worst, 5 = best)"
ORDINAL = r"(?:criteri(?:on|a)|question|answer|item|aspect)\s+#?\d+"
FREE = rf"(?P<free>(?:{ORDINAL}|[^\n:=.|\d!?;>\]]){{0,60}}?)"  # such as "for criterion 2"
COLON = r"\s*(?:[:=|>\]\u2192]+)"
DASH = r"\s+[-\u2013\u2014]\s"
LABEL_AND_COLON = compile_multiline_ignoring_case(
    rf"(?P<label>{LABEL}){QUALIFIER}{FREE}{QUALIFIER}{COLON}"
)
LABEL_AND_IS = compile_multiline_ignoring_case(
    rf"(?P<label>{LABEL}){QUALIFIER}(?:\s+(?:{words.IS})\s|\s*[是为為は은는]\s*:?|\s*\u00e8\s)"
)
LABEL_AT_START = compile_multiline_ignoring_case(
    r"(?:^|(?<=[.!?]\s))[ \t]*(?:(?:my|the|final|overall|total|your|judge|grader)['\w]*[ \t]+){0,3}"
    rf"(?P<label>{LABEL}){QUALIFIER}(?:{DASH}|\s+)"
)
WEAK_LABEL = compile_multiline_ignoring_case(
    rf"(?P<label>{WEAK}){QUALIFIER}[ \w\"']{{0,20}}?(?:{COLON}|{DASH}|\s+(?:{words.IS})\s)"
)
# the format that MT-Bench asks for
IN_BRACKETS = compile_multiline_ignoring_case(rf"\[\[\s*{VALUE}\s*\]\]")
OF_OTHERS = compile_multiline_ignoring_case(
    r"(?:max|maximum|min|minimum|possible|highest|lowest|previous|perfect)[\s_-]+$"
)
ENDS_IN_OVERALL = compile_multiline_ignoring_case(rf"(?:{words.OVERALL})\W*$")

JOINED_NUMBER = compile_multiline_ignoring_case(
    rf"(?:[-\u2013\u2014~/]|\s*(?:->|\u2192)\s*|\s+(?:{words.RANGE})\s+)\s*({NUMBER})"
)
LISTED_NUMBER = compile_multiline_ignoring_case(
    r"(?:[ \t]*[,;&+~][ \t]*|[ \t]+[-\u2013\u2014/][ \t]+|[ \t]+)"
    rf"({NUMBER}){UNIT}[ \t]*(?=$|[\n.,;:!?)\]])"
)
NUMBER_ON_NEXT_LINE = compile_multiline_ignoring_case(rf"\s*\n\s*({NUMBER}){UNIT}\s*(?=$|\n)")
# the end of "4/", "4+" or "4-"
UNFINISHED = compile_multiline_ignoring_case(r"\s*/|[+\u00bd]|-\s*(?:$|\n)")
MAY_FOLLOW = compile_multiline_ignoring_case(
    r"\s*$|\s*\n|\s*[.,:;!?)\]}\"'\u201d\u00bb>|(\[\u2013\u2014-]"
    rf"|\s+(?:{words.AFTER_A_SCORE})(?!\w)"
)

FROM_1_TO_5 = compile_multiline_ignoring_case(
    rf"(?<![\w.,/-])1\s*(?:\([^()\n]*\))?\s*(?:{words.SCALE_TO})\s*5(?![\w/%]|[.,]\d)"
    r"(?:\s*\([^()\n]*\))?|\b5[- ]point\b"
)
OPENING_SCALE = re.compile(
    r"^\W*(?:on|using|with|auf|sur|en|su|em)\s+(?:\w+['\s]\s*){0,3}?"
    rf"(?:{words.SCALE})\b\s*(?:of|from|von|de|da)?[\s,:()-]*",
    re.IGNORECASE,
)
FULL_MARKS = compile_multiline_ignoring_case(
    r"\(?(?:满分|滿分|満点)[为是は:]?\s*5\s*[分点]?\)?[,、]?|5\s*[分点]\s*(?:满分|制|満点(?!中))[,、で]?"
)
WHOLE_FIRST = compile_multiline_ignoring_case(
    r"5\s*(?:点|點|分|점|つ星)?\s*"
    rf"(?:{words.OVER_AFTER_WHOLE})[^\d\n]{{0,4}}(?P<number>\d+(?:[.,]\d+)?)"
)

VERDICT = compile_multiline_ignoring_case(
    rf"(?:{make_label_regex('score rating grade mark')}\s+(?:of|at|as)\s"
    rf"|(?<!\w)(?:{words.GIVES})(?!\w)(?:\s+(?:{words.GIVEN_TO}))*(?:\s+(?:an?|as|at|with))*\s"
    rf"|\b(?:{words.SO})\b,?(?:\s+(?:it\s+is|it's|a|i\s+say))?\s"
    rf"|(?:{words.VERDICT_WITHOUT_SPACE}),?\s*"
    r"|(?:\bis|it's|that's)\s+an?\s+(?:\w+\s)?)"
)
DENIAL = compile_multiline_ignoring_case(rf"\b(?:{words.DENIES})\b|n['\u2019]t\b")
NAMED_NUMBER = compile_multiline_ignoring_case(
    rf"(?:^|[,;|]\s)(?P<name>[^\n:=,;|]{{1,60}}?)\s*[:=](?={OPENERS}{VALUE})"
)
NUMBERED_LIST = compile_multiline_ignoring_case(r"\s*\(?1[.)]\s+\D")

THOUGHT = "think|thinking|thoughts?|seed:think"
EXPLANATION = "reasoning|reflection|analysis|scratchpad"
OPENING_OF_THOUGHT = compile_multiline_ignoring_case(
    rf"<(?:{THOUGHT}|(?P<explanation>{EXPLANATION}))>|\[THINK\]"
    r"|<\|(?:begin_of_thought|START_THINKING)\|>"
    r"|<\|channel\|?>\s*(?:analysis|thought)"
)
END_OF_THOUGHT = compile_multiline_ignoring_case(
    rf"</(?:{THOUGHT}|{EXPLANATION})>|\[/THINK\]|<\|(?:end_of_thought|END_THINKING)\|>|<channel\|>"
    r"|<\|channel\|>\s*final(?:<\|message\|>)?"
)

# ---- text


def remove_thoughts(reply: str) -> str:
    """
    A judge's reply without its thoughts; empty if the last thought is never closed.

    An explanation in tags is removed too. If the explanation is never closed, everything after its
    opening tag is removed.

    Unlike this function, `strip_thoughts` in rewards/statements.py keeps only the text after the
    last closing tag, because a completion ends with its answer. A judge, however, may write the
    score before an explanation.
    """
    parts = []
    position = 0
    while opening := OPENING_OF_THOUGHT.search(reply, position):
        closing = END_OF_THOUGHT.search(reply, opening.end())
        if closing is None and not opening["explanation"]:
            return ""
        parts.append(reply[position : opening.start()])
        position = closing.end() if closing else len(reply)
    parts.append(reply[position:])
    answer = "".join(parts)

    # some chat templates open the thought themselves, so the reply contains only its closing tag
    last_end = max((closing.end() for closing in END_OF_THOUGHT.finditer(answer)), default=0)
    return answer[last_end:]


def remove_markup_and_normalize(reply: str) -> str:
    """
    The reply without markup, and with unusual digits and signs replaced by ASCII.

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
    # remove the Korean or Japanese word for "is", which may follow a number
    text = re.sub(words.POLITE_IS, "", text.replace("。", "."))
    text = re.sub(rf"(?<={CJK})(?=\d)|(?<=\d)(?={CJK})", " ", text)
    text = WHOLE_FIRST.sub(r"\g<number>/5 ", text)
    return FULL_MARKS.sub("", text).strip()


def remove_scale_descriptions(text: str) -> str:
    """The text without phrases such as "on a scale from 1 (worst) to 5 (best)"."""
    return OPENING_SCALE.sub("", FROM_1_TO_5.sub("", text)).strip()


# ---- numbers


class ScoreAndEndOfNumber(NamedTuple):
    """The score that a number in a judge's reply stands for, and where the number ends."""

    score: int | None  # 1 to 5; None if the number is not a score
    end: int  # the position in the text just after the number


def parse_number_or_number_word(text: str) -> float:
    """The number that a text spells, such as 4 for "4", "4.0", "4,0" and "four"."""
    word = text.casefold()
    return float(VALUE_OF_WORD[word]) if word in VALUE_OF_WORD else float(text.replace(",", "."))


def is_followed_by_other_number(text: str, number_match: re.Match[str]) -> bool:
    """Whether a different number directly follows the matched number, as in "3-4" or "3, 4"."""
    number = parse_number_or_number_word(number_match["number"])
    for pattern in (JOINED_NUMBER, LISTED_NUMBER, NUMBER_ON_NEXT_LINE):
        next_number = pattern.match(text, number_match.end())
        if next_number is not None and parse_number_or_number_word(next_number[1]) != number:
            return True
    return False


def score_from_number_match(text: str, number_match: re.Match[str]) -> int | None:
    """
    The score in a match of `VALUE`, or None if the number is not a score.

    A score is an integer from 1 to 5, which "out of 5" may follow.
    """
    number = parse_number_or_number_word(number_match["number"])
    scale = parse_number_or_number_word(number_match["scale"]) if number_match["scale"] else 5
    if scale != 5 or number not in range(1, 6):
        return None
    if is_followed_by_other_number(text, number_match) or UNFINISHED.match(
        text, number_match.end()
    ):
        return None
    return int(number)


def number_at(text: str, position: int) -> ScoreAndEndOfNumber | None:
    """
    The number at `position`; None if there is no number.

    A quote or an article may precede the number.
    """
    value = OPENED_VALUE.match(text, position)
    return ScoreAndEndOfNumber(score_from_number_match(text, value), value.end()) if value else None


# ---- rules

# What a rule finds: for each number to which the rule applies, a score from 1 to 5, or None if the
# number is not a score. The list is empty if the rule does not apply.
Scores = list[int | None]


class JsonObjectPairs(list[tuple[str, Any]]):
    """
    The keys and values of a JSON object as pairs.

    A key that occurs twice in the object has two pairs.
    """


def iterate_json_objects(text: str) -> Iterator[JsonObjectPairs]:
    """Yields the outermost JSON objects in a text."""
    decoder = json.JSONDecoder(object_pairs_hook=JsonObjectPairs)
    position = text.find("{")
    while position >= 0:
        try:
            content, end = decoder.raw_decode(text, position)
        except (ValueError, RecursionError):
            end = position + 1
        else:
            yield content
        position = text.find("{", end)


def iterate_keyed_leaves(json_value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """
    Yields every number, string, boolean and null in a JSON value, each with its key.

    If the key is `value` or `number`, the key of the surrounding object is used instead.
    """
    if isinstance(json_value, JsonObjectPairs):
        for name, inner in json_value:
            yield from iterate_keyed_leaves(
                inner, key if key and name in ("value", "number") else name
            )
    elif isinstance(json_value, list):
        for inner in json_value:
            yield from iterate_keyed_leaves(inner, key)
    else:
        yield key, json_value


def score_from_json_value(json_value: Any) -> int | None:
    """The score in a JSON value such as 4, 4.0, "4" or "4/5"; None if the value is not a score."""
    if isinstance(json_value, bool) or not isinstance(json_value, (int, float, str)):
        return None
    text = remove_markup_and_normalize(str(json_value))
    value = number_at(text, 0)
    return value.score if value else None


def scores_in_json(reply: str) -> Scores:
    """
    Rule: the score is the value of the key `score`, `rating` or a similar label in a JSON object.

    If no object has such a key, and the JSON objects contain exactly one number, this number is the
    score.
    """
    labelled: Scores = []
    overall: Scores = []
    numbers: Scores = []
    for content in iterate_json_objects(reply):
        for key, inner in iterate_keyed_leaves(content):
            name = re.sub(r"[\s_-]+", " ", unicodedata.normalize("NFKC", key)).strip()
            label = re.search(rf"(?P<label>{LABEL})$", name, re.IGNORECASE)
            if label and not OF_OTHERS.search(name[: label.start()]):
                labelled.append(score_from_json_value(inner))
                if ENDS_IN_OVERALL.search(name[: label.start()]):
                    overall.append(score_from_json_value(inner))
            elif isinstance(inner, (int, float)) and not isinstance(inner, bool):
                numbers.append(score_from_json_value(inner))
    if overall or labelled:
        return overall or labelled
    return numbers if len(numbers) == 1 else []


def labelled_scores(text: str) -> Scores:
    """
    Rule: the score is the number after `score`, `rating` or a similar label in any language.

    A number in double brackets, such as [[4]], is a score too. An overall score takes precedence
    over other scores. If a number follows one label and words follow another, only the number
    counts.
    """
    plain: Scores = []
    overall: Scores = []
    has_words = False
    # positions of the labels already read, since several patterns may match one label
    positions_read = set()
    for pattern in (LABEL_AND_COLON, LABEL_AND_IS, LABEL_AT_START):
        for label in pattern.finditer(text):
            position = label.start("label")
            before = text[:position]
            free = label["free"] if pattern is LABEL_AND_COLON else ""
            is_other = re.search(rf"\b(?:{words.NO_LABEL})\b", free, re.IGNORECASE)
            if position in positions_read or is_other or OF_OTHERS.search(before):
                continue
            value = number_at(text, label.end())
            if pattern is not LABEL_AND_COLON and (
                value is None or not MAY_FOLLOW.match(text, value.end)
            ):
                continue
            positions_read.add(position)
            if value is None:
                has_words = True
            elif ENDS_IN_OVERALL.search(before) or ENDS_IN_OVERALL.match(label["label"]):
                overall.append(value.score)
            else:
                plain.append(value.score)
    plain += [score_from_number_match(text, marked) for marked in IN_BRACKETS.finditer(text)]
    scores = overall or plain
    return scores or ([None] if has_words else [])


def scores_after_ambiguous_labels(text: str) -> Scores:
    """
    Rule: the score is the number after a weak label.

    A weak label is a word with other meanings besides a score, such as `note`, `grade` or `answer`.
    So the number must be a score, and must be followed by the end of the line, a punctuation mark
    or a word in `AFTER_A_SCORE`.
    """
    plain: Scores = []
    overall: Scores = []
    for label in WEAK_LABEL.finditer(text):
        value = number_at(text, label.end())
        if value and value.score and MAY_FOLLOW.match(text, value.end):
            is_overall = re.match(words.OVERALL, label[0], re.IGNORECASE)
            (overall if is_overall else plain).append(value.score)
    return overall or plain


def opening_scores(text: str, was_cut: bool) -> Scores:
    """
    Rule: the score is the number that opens the reply.

    The rule does not apply if the number is a count of things or the number of a list item.
    """
    value = number_at(text, 0)
    if value is None or not MAY_FOLLOW.match(text, value.end):
        return []
    if NUMBERED_LIST.match(text) and (was_cut or re.search(r"\d", text[value.end :])):
        return []
    return [value.score]


def scores_after_any_name(text: str) -> Scores:
    """Rule: the score is the number after a name and a colon or "=", as in "Scrutiny = 4"."""
    scores: Scores = []
    for line in NAMED_NUMBER.finditer(text):
        is_other = re.search(rf"\b(?:{words.NO_NAME})s?\b", line["name"], re.IGNORECASE)
        value = number_at(text, line.end())
        if value and not is_other and MAY_FOLLOW.match(text, value.end):
            scores.append(value.score)
    return scores


def scores_in_verdicts(text: str) -> Scores:
    """
    Rule: the score is the number in a verdict such as "I give 4", "so 4" or "this is a 4".

    The number is ignored if the sentence denies the verdict or only supposes it, with a word such
    as "not" or "if".
    """
    scores: Scores = []
    for verdict in VERDICT.finditer(text):
        value = number_at(text, verdict.end())
        sentence = re.split(r"[.!?;\n]", text[: verdict.start()])[-1]
        if value and MAY_FOLLOW.match(text, value.end) and not DENIAL.search(sentence):
            scores.append(value.score)
    return scores


def scores_of_only_number(text: str) -> Scores:
    """
    Rule: the score is the reply's only number.

    The number must be alone in the reply or on its line, or "out of 5" must follow the number.
    """
    values = list(re.finditer(VALUE, text, re.IGNORECASE))
    if not re.search(r"\w", re.sub(VALUE, "", text, flags=re.IGNORECASE)):
        return [score_from_number_match(text, value) for value in values]
    values = [value for value in values if value["number"][0].isdigit()]
    digits = sum(len(re.findall(r"\d+(?:[.,]\d+)?", value[0])) for value in values)
    if len(values) != 1 or digits != len(re.findall(r"\d+(?:[.,]\d+)?", text)):
        return []
    (value,) = values
    line = text[text.rfind("\n", 0, value.start()) + 1 :].partition("\n")[0]
    is_line = not re.sub(r"[\W_]", "", line.replace(value[0], ""))
    if is_line or (value["scale"] and MAY_FOLLOW.match(text, value.end())):
        return [score_from_number_match(text, value)]
    return []


def read_score(reply: str, was_cut: bool = False) -> int | None:
    """
    The score from 1 to 5 in a judge's reply; None if the reply has no readable score.

    was_cut: whether the reply ended at its token limit. In a reply that was cut off, a score counts
    only if it opens the reply or has a label.
    """
    answer = remove_thoughts(reply)
    text = remove_markup_and_normalize(answer)
    unscaled = remove_scale_descriptions(text)
    rules = [
        lambda: scores_in_json(answer[-2 * LONGEST :]),
        lambda: labelled_scores(text),
        lambda: opening_scores(unscaled, was_cut),
        lambda: scores_after_ambiguous_labels(text),
    ]
    if not was_cut:
        rules += [
            lambda: scores_after_any_name(unscaled),
            lambda: scores_in_verdicts(unscaled),
            lambda: scores_of_only_number(unscaled),
        ]
    for find_scores in rules:
        scores = find_scores()
        if scores:
            return scores[0] if len(set(scores)) == 1 else None
    return None
