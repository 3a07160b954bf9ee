"""
Prepares texts for comparison by replacing characters that look alike or have the same meaning.

This file does not cover which part of a completion is its answer (rewards/statements.py), or the
values of numbers (rewards/quantities.py).
"""

import functools
import re
import unicodedata

DENIAL = re.compile(r"\b(?:not|never|neither|cannot)\b|n't\b|\\neq?\b|[\u2260\u00ac]", re.I)

_SAME = {
    "\t": " ",
    "\r": " ",
    "\u2019": "'",
    "\u2212": "-",
    "\ufe63": "-",
    "\u3002": ". ",
    "\u2248": "=",
    "\u066b": ".",  # the decimal sign between Arabic digits
    "\u066c": ",",  # the thousands separator between Arabic digits
    "\u2044": "/",
    "\u00d7": "*",
    "\u00b7": "*",
    "\u22c5": "*",
}
_SUPERSCRIPTS = "\u2070\u00b9\u00b2\u00b3\u2074\u2075\u2076\u2077\u2078\u2079\u207a\u207b\u207f"
_QUOTES = "\"'`\u00b4\u201a\u201e\u300c\u300d\u300e\u300f\u300a\u300b\u3008\u3009\u301d\u301e\u301f"
_FULL_STOPS = "\u0964\u0965\u06d4\u1362"  # the full stops of Hindi, Urdu and Amharic
_DRESS = " *_$\u00a1\u00bf" + _QUOTES


# Words that introduce an answer in languages other than English, as in "La capital es" (_LEAD), and
# words before these that deny the answer or add another answer (_OTHERWISE).
_COPULAS = "es son ist sind est sont è é sono são jest är er este это це είναι هو هي"
_ARTICLES = "el la los las le les der die das il lo o os as um uma un una une ein eine"
_LEAD = re.compile(
    rf"(?:\b(?:{'|'.join(_COPULAS.split())})\b[\s*_`\"'(\[]*(?:(?:{'|'.join(_ARTICLES.split())}) |"
    rf"l')?"
    r"|\w(?<!また)(?<!もしく)(?<!あるい)は"  # the topic particle, but not in a word for "or"
    r"|(?<![不还還或])是"  # the Chinese word for "is", unless it is part of "is not" or "or"
    r"|[은는] )[\s\"'(\[「『“«]*$"
)
_OTHERWISE = re.compile(
    r"\b(?:no|non|nicht|kein\w*|não|ne|pas|nie|inte|не|o|ou|oder|eller|или|entweder|ikke|nu|sau|"
    r"\u0430\u0431\u043e|δεν|ή|ليس|ليست|لا|أو)\b|n'est"
    r"|[不或]|または|もしくは|あるいは|ない|아니|또는"
)
_COPULA_BEHIND = re.compile(r"(?:です|でした|입니다)$")


class _ReplacementTable(dict[int, str | None]):
    """
    A table for str.translate that replaces characters so that texts can be compared.

    The entry for a character is made when the character first occurs.
    """

    def __missing__(self, code: int) -> str | None:
        character = chr(code)
        self[code] = _replace_or_delete_character(character)
        return self[code]


def _replace_or_delete_character(character: str) -> str | None:
    if character in _SAME:
        return _SAME[character]
    category = unicodedata.category(character)
    if category == "Cf":  # zero-width characters, direction marks and soft hyphens
        return None
    if category == "Nd":
        return str(unicodedata.decimal(character))
    if category == "Zs":
        return " "
    if category == "Pd":
        return "-"
    decomposition = unicodedata.decomposition(character)
    if decomposition.startswith(("<super>", "<fraction>")):
        return character  # since 10² is not 102, and 1½ is not 11/2
    if decomposition.startswith("<"):
        return unicodedata.normalize("NFKC", character)
    return character


_CHARACTERS = _ReplacementTable()


def normalize_unicode(text: str) -> str:
    """
    The text in Unicode form NFKC, with ASCII digits and hyphens, and without format characters.

    Superscripts and vulgar fractions are not replaced, since ordinary digits in their place would
    mean other numbers.
    """
    cleaned = text.translate(_CHARACTERS)
    return cleaned if cleaned.isascii() else unicodedata.normalize("NFC", cleaned)


def superscripts_to_carets(text: str) -> str:
    """The text with superscripts rewritten in LaTeX, such as x^2 for x\u00b2."""
    if text.isascii():
        return text
    return re.sub(f"[{_SUPERSCRIPTS}]+", _superscript_to_caret, text)


def _superscript_to_caret(match: re.Match[str]) -> str:
    exponent = unicodedata.normalize("NFKC", match[0]).replace("\u2212", "-")
    return f"^{exponent}" if len(exponent) == 1 else f"^{{{exponent}}}"


@functools.lru_cache(maxsize=2**8)
def fold_for_comparison(text: str) -> str:
    """
    Simplifies a text, so that texts which differ only in irrelevant ways become equal.

    The simplified text is in lower case, with its Unicode characters normalized. It has no Markdown
    and no quotation marks around it, no full stop at its end, no English article at its beginning,
    no LaTeX command `\\text{}`, and no brackets around a single word.
    """
    text = re.sub(
        r"\\(?:text|math)[a-z]*\{([^{}]*)\}", r"\1", superscripts_to_carets(normalize_unicode(text))
    )
    text = " ".join(text.casefold().split())
    text = _strip_quotes_and_end_characters(text)
    text = re.sub(r"^(?:the|an?) ", "", text)
    text = _strip_quotes_and_end_characters(text.lstrip(_DRESS), _DRESS + _FULL_STOPS + ".,;:!")
    text = _strip_quotes_and_end_characters(_COPULA_BEHIND.sub("", text))
    return re.sub(r"^\((\w+)\)$", r"\1", text)


def _strip_quotes_and_end_characters(text: str, end_characters: str = _DRESS) -> str:
    """The text without quotes and Markdown around it, and without `end_characters` at its end."""
    begin = 0
    while begin < len(text) and _is_quote_or_markdown(text[begin]):
        begin += 1
    end = len(text)
    while begin < end and (_is_quote_or_markdown(text[end - 1]) or text[end - 1] in end_characters):
        end -= 1
    return text[begin:end]


def _is_quote_or_markdown(character: str) -> bool:
    """
    Whether a character is a quotation mark or belongs to Markdown.

    Opening and closing quotation marks have Unicode categories of their own.
    """
    return character in _DRESS or unicodedata.category(character) in ("Pi", "Pf")


def leads_to_answer_in_other_languages(head: str) -> bool:
    """
    Whether the beginning of a sentence introduces an answer, as "La capital es" does.

    This function covers several languages, but not English.
    """
    lead = _LEAD.search(head)
    return lead is not None and not _OTHERWISE.search(head[: lead.start()])
