"""
Prepares texts for comparison: gives characters that look or mean the same a single spelling.

This file does not cover which part of a text is its answer (rewards/statements.py), or the values
of numbers (rewards/quantities.py).
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
    "\u066c": ",",  # and the sign between their thousands
    "\u2044": "/",
    "\u00d7": "*",
    "\u00b7": "*",
    "\u22c5": "*",
}
_SUPERSCRIPTS = "\u2070\u00b9\u00b2\u00b3\u2074\u2075\u2076\u2077\u2078\u2079\u207a\u207b\u207f"
_QUOTES = "\"'`\u00b4\u201a\u201e\u300c\u300d\u300e\u300f\u300a\u300b\u3008\u3009\u301d\u301e\u301f"
_FULL_STOPS = "\u0964\u0965\u06d4\u1362"  # of Hindi, Urdu and Amharic
_DRESS = " *_$\u00a1\u00bf" + _QUOTES


# Words that lead to an answer in other languages, as in "La capital es" (_LEAD), and words before
# them that deny the answer or add another one (_OTHERWISE).
_COPULAS = "es son ist sind est sont è é sono são jest är er este это це είναι هو هي"
_ARTICLES = "el la los las le les der die das il lo o os as um uma un una une ein eine"
_LEAD = re.compile(
    rf"(?:\b(?:{'|'.join(_COPULAS.split())})\b[\s*_`\"'(\[]*(?:(?:{'|'.join(_ARTICLES.split())}) |"
    rf"l')?"
    r"|\w(?<!また)(?<!もしく)(?<!あるい)は"  # the topic particle, but not in a word for "or"
    r"|(?<![不还還或])是"  # "is", but not in "is not" or in a word for "or"
    r"|[은는] )[\s\"'(\[「『“«]*$"
)
_OTHERWISE = re.compile(
    r"\b(?:no|non|nicht|kein\w*|não|ne|pas|nie|inte|не|o|ou|oder|eller|или|entweder|ikke|nu|sau|"
    r"\u0430\u0431\u043e|δεν|ή|ليس|ليست|لا|أو)\b|n'est"
    r"|[不或]|または|もしくは|あるいは|ない|아니|또는"
)
_COPULA_BEHIND = re.compile(r"(?:です|でした|입니다)$")


class _Characters(dict[int, str | None]):
    """
    Maps each character to the character with which it is replaced for the comparison.

    An entry is made when a character first occurs.
    """

    def __missing__(self, code: int) -> str | None:
        character = chr(code)
        self[code] = _rewrite_character(character)
        return self[code]


def _rewrite_character(character: str) -> str | None:
    if character in _SAME:
        return _SAME[character]
    category = unicodedata.category(character)
    if category == "Cf":  # zero width, direction, soft hyphen
        return None
    if category == "Nd":
        return str(unicodedata.decimal(character))
    if category == "Zs":
        return " "
    if category == "Pd":
        return "-"
    decomposition = unicodedata.decomposition(character)
    if decomposition.startswith(("<super>", "<fraction>")):  # 10² is not 102, and 1½ is not 11/2
        return character
    if decomposition.startswith("<"):
        return unicodedata.normalize("NFKC", character)
    return character


_CHARACTERS = _Characters()


def clean_text(text: str) -> str:
    """
    A text in Unicode form NFKC, with ASCII digits and hyphens, and without format characters.

    Superscripts and vulgar fractions stay as they are, since their plain digits would mean other
    numbers.
    """
    cleaned = text.translate(_CHARACTERS)
    return cleaned if cleaned.isascii() else unicodedata.normalize("NFC", cleaned)


def replace_superscripts(text: str) -> str:
    """A text with x^2 for x\u00b2, s^{-1} for s\u207b\u00b9."""
    if text.isascii():
        return text
    return re.sub(f"[{_SUPERSCRIPTS}]+", _write_exponent, text)


def _write_exponent(match: re.Match[str]) -> str:
    exponent = unicodedata.normalize("NFKC", match[0]).replace("\u2212", "-")
    return f"^{exponent}" if len(exponent) == 1 else f"^{{{exponent}}}"


@functools.lru_cache(maxsize=2**8)
def fold_text(text: str) -> str:
    """
    A text in the form in which texts are compared.

    The result is in lower case and in the form that `clean_text` returns. It has no Markdown, no
    quotes in any script, no full stop, no English article, no `\\text{}`, and no brackets around a
    single word.
    """
    text = re.sub(
        r"\\(?:text|math)[a-z]*\{([^{}]*)\}", r"\1", replace_superscripts(clean_text(text))
    )
    text = " ".join(text.casefold().split())
    text = _strip_quotes(text)
    text = re.sub(r"^(?:the|an?) ", "", text)
    text = _strip_quotes(text.lstrip(_DRESS), _DRESS + _FULL_STOPS + ".,;:!")
    text = _strip_quotes(_COPULA_BEHIND.sub("", text))
    return re.sub(r"^\((\w+)\)$", r"\1", text)


def _strip_quotes(text: str, ends: str = _DRESS) -> str:
    """A text without quotes and Markdown around it, and without any of `ends` at its end."""
    begin = 0
    while begin < len(text) and _is_quote(text[begin]):
        begin += 1
    end = len(text)
    while begin < end and (_is_quote(text[end - 1]) or text[end - 1] in ends):
        end -= 1
    return text[begin:end]


def _is_quote(character: str) -> bool:
    """
    Whether a character is a quote or Markdown.

    Unicode marks opening and closing quotes by their categories.
    """
    return character in _DRESS or unicodedata.category(character) in ("Pi", "Pf")


def ends_in_lead(head: str) -> bool:
    """
    Whether the beginning of a sentence leads to its answer, as "La capital es" does.

    This function does not cover English.
    """
    lead = _LEAD.search(head)
    return lead is not None and not _OTHERWISE.search(head[: lead.start()])
