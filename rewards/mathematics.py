"""
Tells which answers are formulas, which formula a text states, and whether two formulas are equal.

Numbers are compared in this process (rewards/quantities.py), and formulas are compared by worker
processes (rewards/equality.py). This file does not cover which piece of a completion is its answer
(rewards/math_answers.py).
"""

import functools
import os
import re

from rewards.quantities import (
    LONGEST,
    WORD,
    Quantity,
    find_only_number,
    has_prose_word,
    is_quantity,
    is_same_quantity,
    vulgar_fractions_to_latex,
)
from rewards.texts import DENIAL, normalize_unicode, superscripts_to_carets
from rewards.units import (
    UnitsAndWords,
    possible_units_of_spelling,
    read_units_and_words,
    units_and_words_agree,
)
from sandbox.workers import WorkerPool

# A verdict, or a pair of formulas that a worker must still compare.
VerdictOrFormulaPair = bool | tuple[str, str]

# The limit on processor time for one answer, in seconds. The slowest answer in the tests takes a
# fifth of this time.
MATH_LIMIT = 1.0
DEEPEST = 12  # the deepest nesting of brackets and subscripts in a formula

# Formulas that would take too long to evaluate: powers of powers, factorials of factorials, and
# numbers that would fill a screen.
_ENDLESS = re.compile(
    r"[0-9)}]\s*(?:\^|\*\*)\s*[({]*\s*-?[0-9.]+\s*[)}]*\s*(?:\^|\*\*)|"
    r"(?:\^|\*\*)\s*[({]*\s*-?[0-9]{5,}|"
    r"!\s*!|[0-9]{5,}\s*!|[0-9]{200,}"
)
_MISREAD = re.compile(r"[0-9]\s+[0-9]|[0-9]\s*_")  # math-verify would read 3 4 as 7, and 1_2 as 1

# A formula whose value is a single number. A formula of sums and products alone does not match,
# because it is an unfinished calculation.
_CLOSED = re.compile(
    r"(?!.*[0-9] +[0-9])(?=.*(?:\\(?:sqrt|binom|log|ln|[cdt]?frac)|[\^!|]))"
    r"(?:[0-9.+*/(){}\[\]^!_ -]|\\(?:sqrt|binom|log|ln|[cdt]?frac|pi|times|cdot|left|right)|^\||"
    r"\|$)+"
)
_FORMULA = re.compile(
    r"\\[A-Za-z]{2}|\\\{|\^|\b(?:sqrt|log|ln|sin|cos|tan|exp)\(|[0-9]pi\b|"
    r"[\[(][^\[\]()]+,[^\[\]()]+[\])]|"
    r"-?[0-9]+(?:, -?[0-9]+)+$|[0-9][a-z](?![A-Za-z0-9])|\b[a-z] ?[-+*/=<>] ?[a-z0-9(]|"
    r"[0-9)] ?[-+*/<>] ?[a-z]\b"
)

# ---- formulas in LaTeX

_SIGNS = {
    "\u03c0": "\\pi ",
    "\u221e": "\\infty ",
    "\u2264": "\\le ",
    "\u2265": "\\ge ",
    "\u2260": "\\ne ",
    "\u222a": "\\cup ",
    "\u2229": "\\cap ",
    "\u2208": "\\in ",
    "\u00b1": "\\pm ",
    "\u221a": "\\sqrt ",
    "\u221b": "\\sqrt[3] ",
    "\u00f7": "/",
    "\u03b8": "\\theta ",
    "\u03b1": "\\alpha ",
    "\u03b2": "\\beta ",
}
_SIGN = re.compile("|".join(_SIGNS))
_NAMES = re.compile(
    r"(?<![A-Za-z\\])(sqrt|(?:arc)?(?:sin|cos|tan)h?|sec|csc|cot|log|ln|exp|"
    r"pi)(?![A-Za-z])(?=( ?\())?"
)
_ROOT = re.compile(r"(\\sqrt(?:\[[0-9]\])?) +([0-9]+|[A-Za-z])")
_BEFORE_BRACKETS = re.compile(
    r"\\sqrt ?(?:\[[^\[\]]{1,9}\])? ?(?=\()|\^ ?(?=\()|\\[cdt]?frac ?(?:\{[^{}]*\} ?)?(?=\()"
)
_MEASURE = re.compile(  # a unit after a formula: \text{ cm}^2, or a word of at least two letters
    r"(?:\\[,; ]|[\s~])*(?:\\(?:text|textrm|mathrm|mbox) ?\{\s*([^{}]*?)\s*\}|"
    r"(?<=[\s})0-9])([A-Za-z]{2,}))"
    r"\s*(\^ ?\{?[23]\}?)?[\s.]*$"
)


@functools.lru_cache(maxsize=2**12)
def to_latex(text: str) -> str:
    """
    A formula, rewritten in the LaTeX notation that math-verify's grammar can read.

    For example, sqrt(3), \\sqrt(3) and a 3 after a root sign all become \\sqrt{3}.
    """
    text = _replace_symbols_with_latex(normalize_unicode(text)).strip(" .$*:")
    text = re.sub(r"\\(?:left|right)(?![A-Za-z])", "", text)
    text = _NAMES.sub(_to_latex_function_name, text)
    text = re.sub(r"(?<=[\w)}])\*\*(?=[-\w({])", "^", text)
    text = re.sub(r"\^ ?([-+][0-9]+)", r"^{\1}", text)
    text = re.sub(r"\\log_([0-9])(?= ?[0-9])", r"\\log_{\1}", text)  # \log_2 8
    text = _ROOT.sub(r"\1{\2}", text)
    return _argument_brackets_to_braces(text)


def _replace_symbols_with_latex(text: str) -> str:
    """A text with its Unicode symbols in LaTeX, such as \\pi for \u03c0 and x^2 for x\u00b2."""
    if text.isascii():
        return text
    text = vulgar_fractions_to_latex(superscripts_to_carets(text))
    return _SIGN.sub(lambda sign: _SIGNS[sign[0]], text)


def _to_latex_function_name(match: re.Match[str]) -> str:
    return f"\\{match[1]}" if match[2] or match[1] != "pi" else "\\pi "


def _argument_brackets_to_braces(text: str) -> str:
    """A text with braces in place of the round brackets of roots, fractions and powers."""
    ends = _match_round_brackets(text)
    characters = list(text)
    for match in _BEFORE_BRACKETS.finditer(text):
        begin = match.end()
        num_groups = 2 if "frac" in match[0] and "{" not in match[0] else 1
        for _ in range(num_groups):
            if begin not in ends:
                break
            characters[begin] = "{"
            characters[ends[begin]] = "}"
            begin = ends[begin] + 1
            if text[begin : begin + 1] == " ":
                begin += 1
    return "".join(characters)


def _match_round_brackets(text: str) -> dict[int, int]:
    """A mapping from the index of each opening round bracket to that of its closing bracket."""
    open_places: list[int] = []
    ends = {}
    for place, character in enumerate(text):
        if character == "(":
            open_places.append(place)
        elif character == ")" and open_places:
            ends[open_places.pop()] = place
    return ends


def _split_off_units(formula: str) -> tuple[str, UnitsAndWords]:
    """The formula without the units after it, and the units."""
    match = _MEASURE.search(formula)
    if not match or not match.start():
        return formula, UnitsAndWords((), ())
    in_latex, plain_word, power = match.groups()
    if plain_word and not possible_units_of_spelling(plain_word):
        return formula, UnitsAndWords((), ())
    unit = in_latex or plain_word or ""
    if power and not unit:  # x^2\text{}^2
        return formula, UnitsAndWords((), ())
    spelling = unit + (power or "")
    braces = "[{} ]" if plain_word else "[{}]"
    return formula[: match.start()], read_units_and_words(re.sub(braces, "", spelling))


# ---- which answers are mathematics


def _is_formula(text: str) -> bool:
    if len(text) > LONGEST or has_prose_word(text) or re.search("[:#@]", text):
        return False
    return bool(_FORMULA.search(text))


@functools.lru_cache(maxsize=2**16)
def is_number_or_formula(answer: str) -> bool:
    """Whether an answer is a number or a formula; words, dates and codes are not."""
    if len(answer) > LONGEST:
        return False
    return is_quantity(answer) or _is_formula(answer) or _is_formula(to_latex(answer))


# ---- the comparison of values


@functools.cache
def formula_worker_pool() -> WorkerPool:
    """
    The worker processes that compare formulas.

    The workers are processes rather than threads, since math-verify limits its running time with a
    signal, and only the main thread of a process may handle signals.
    """
    target = "rewards.equality:make_math_checker"
    return WorkerPool(target, (), num=min(4, os.cpu_count() or 1), limit=MATH_LIMIT, sealed=True)


def compare_mathematics(gold: str, statement: str) -> VerdictOrFormulaPair:
    """
    Whether two answers are equal, if that is already clear; otherwise, their two formulas.

    A worker then compares the two formulas.

    The units must agree if both answers have units.
    """
    right = find_only_number(gold)
    stated = find_only_number(statement)
    if right and stated:
        return is_same_quantity(right, stated)
    if not statement or len(statement) > LONGEST:
        return False
    gold_formula, gold_units = _split_off_units(to_latex(gold))
    formula, units = _split_off_units(to_latex(statement))
    if right:
        gold_formula = _quantity_to_latex_without_units(right)
        gold_units = right.units_and_words
    if stated:
        formula = _quantity_to_latex_without_units(stated)
        units = stated.units_and_words
    if not units_and_words_agree(gold_units, units):
        return False
    if formula == gold_formula:
        return True
    if right and not _CLOSED.fullmatch(formula):
        return False
    if (
        has_prose_word(formula)
        or _is_too_deep(formula)
        or _ENDLESS.search(formula)
        or _MISREAD.search(formula)
    ):
        return False
    return gold_formula, formula


def _is_too_deep(formula: str) -> bool:
    """
    Whether brackets or subscripts in a formula are nested deeper than any answer needs.

    The grammar would take seconds to read such a formula.
    """
    depth = 0
    for character in formula:
        if character in "([{":
            depth += 1
        elif character in ")]}":
            depth -= 1
        if depth > DEEPEST:
            return True
    return formula.count("_") > DEEPEST


def _quantity_to_latex_without_units(quantity: Quantity) -> str:
    top = quantity.value.numerator
    bottom = quantity.value.denominator
    value = str(top) if bottom == 1 else f"\\frac{{{top}}}{{{bottom}}}"
    return f"{quantity.name}={value}" if quantity.name else value


_SENTENCE_END = re.compile(r"\n|(?<=[.!?])(?<!\bRs\.)(?<!\b(?:sq|cu)\.)[*)\"']*(?:\s|$)")
_IN_DOLLARS = re.compile(r"[A-Za-z ,:*]*\$+([^$]+)\$+[ .,:*]*")


def find_math_in_last_math_sentence(text: str) -> str:
    """
    The last sentence that has a number or a formula, or only the formula in it.

    The result is the whole sentence if it states a single number, and only the formula if it
    contains a single formula. The result is "" if the sentence contains several formulas, is a
    denial or is a question.
    """
    sentence = _last_sentence_with_math_else_last(_replace_symbols_with_latex(text))
    is_question = sentence.rstrip("*)\"' ").endswith("?")
    if len(sentence) > LONGEST or is_question or DENIAL.search(sentence):
        return ""
    if find_only_number(sentence):
        return sentence
    sign = r"[0-9=+*/^\\$]|(?<!')\b[b-z]\b"
    parts = [part for part in WORD.split(sentence) if re.search(sign, part)]
    if len(parts) != 1 or re.search(r"\bor\b", sentence):
        return ""
    formula = parts[0]
    in_dollars = _IN_DOLLARS.fullmatch(re.sub(r"\\[()\[\]]", "$", formula))
    if in_dollars:
        return in_dollars[1]
    # false for the (x+1) in arcsin(x+1)
    is_apart = sentence.startswith(formula) or re.match("[ :*,]", formula)
    return formula.strip(" .,:*") if is_apart else ""


def _last_sentence_with_math_else_last(text: str) -> str:
    """The last sentence with a number or a LaTeX command; else the last sentence of the text."""
    sentences = [part for part in _SENTENCE_END.split(text) if part.strip()]
    with_formulas = [part for part in sentences if re.search(r"[0-9]|\\[A-Za-z]{2}", part)]
    return (with_formulas or sentences or [""])[-1].strip()
