"""
Over 600 answers that attack a verifier.

A verifier must not run them, accept them as right, or take long for them.
"""

from pathlib import Path

import yaml

PLANTED = "/tmp/gwen-planted-by-an-answer"  # the file that an answer would create if it ran
DATA = yaml.safe_load(Path(__file__).with_name("attacks.yaml").read_text("utf-8"))


_LONG = """
"9" * 4299 | "9" * 4301 | "9" * 50_000 | "-" + "9" * 5000 | "0." + "3" * 20_000 | "1e" + "9" * 400 | "9" * 400
"(" * 10_000 + "1" + ")" * 10_000 | "[" * 10_000 + "]" * 10_000 | "[" * 90_000 | "{" * 20_000 | "(" * 199 + ")" * 199
'{"a":' * 12_000 + "1" + "}" * 12_000 | "[[" * 15_000 + "1" | "-" * 30_000 + "1" | "~" * 30_000 + "1" | "not " * 9000
"1+" * 40_000 + "1" | "1," * 40_000 | "x." * 9000 + "x" | "x(" * 12_000 | "sin(" * 300 + "x" + ")" * 300
"<answer>" * 9000 | "'" * 10_001 | '"' * 10_001 | "lambda:" * 5000 + "1" | "1if 1else " * 5000 + "1" | "x" * 90_000
"1 " * 45_000 | "U'" * 9000 | "Move disk 999999999 from Peg 1 to Peg 2\\n" * 900 | "(1, 2) " * 9000 | "1\\n" * 9000
"U D L R " * 9000 | "¬" * 9000 + "P" | "P → " * 3000 + "P" | "a\\u0301" * 5000 | "\\r\\n" * 30_000 | " " * 90_000
"\\t" * 9000 + "1" | chr(0x1F600) * 9000 | "\\u202e1" | "\\u200b" | "\\u2028" | "\\ufeff1" | "\\ud800" | "\\udfff"
"\\U000e0001" | "\\U0010ffff" | "\\ufffe" | "1\\0" | "\\x1b[2J\\x1b[31m1" | "\\x1b]0;title\\x07" | "\\b1"
"cos\\nsystem\\n(S'true'\\ntR." | "\\x80\\x04\\x95" | "\\0\\0\\0\\x13[1, 1.0, '', false]" | "\\\\" * 30_000
"""

_CONTROLS = [
    chr(code) * 3 for code in (0, 1, 3, 4, 7, 8, 11, 12, 13, 26, 27, 28, 127, 128, 0x85, 0xA0)
]
_EXPRESSIONS = _LONG.replace("\n", " | ").split(" | ")
_LONG_TEXTS = [eval(expression) for expression in _EXPRESSIONS if expression]
_TEXTS = Path(__file__).with_name("hostile.txt").read_text("utf-8")  # one answer per line

# ---- by family

_CALLS = [
    f"open('{PLANTED}','w')",
    f"__import__('os').system('touch {PLANTED}')",
    "eval('1')",
    "exec('x=1')",
]
# the codes of the digit 0 in other scripts
_ZEROS = "660 6F0 7C0 966 9E6 A66 BE6 E50 F20 1040 17E0 1810 FF10 1D7CE 1FBF0".split()
_BRACKETS = r'( )|[ ]|{ }|⟨ ⟩|（ ）|［ ］|< >|\{ \}|\left( \right)|f( )|[[ ]]|{"a": }|sqrt( )|\frac{1}{ }|x_{ }|\sqrt{ }'
_OPENINGS = "10^{ 9**( 2^{2^{ \\int_0^{ \\sum_{n=1}^{ \\left( \\begin{matrix} \\binom{10^9}{ \\prod_{k=1}^{10^8}{ | \\log_{".split()
_OPENINGS += ["\\lim_{x\\to", "\\cdot", "\\int "]
_SIGNS = "- ~ ! not√ √ \\sqrt \\frac 2^ 2** x_ 1<< ¬ 1/ 1- x, 1;".split()


def _nest(pair, depth):
    """Nests 1 in a pair of brackets."""
    begin, _, end = pair.partition(" ")
    return begin * depth + "1" + end * depth


def _to_fullwidth(text):
    """Replaces letters and digits by their fullwidth forms."""
    characters = []
    for character in text:
        if character.isalnum() and character.isascii():
            character = chr(ord(character) + 0xFEE0)
        characters.append(character)
    return "".join(characters)


def _to_bold(text):
    """Replaces small letters by bold ones of mathematics."""
    characters = []
    for character in text:
        if character.islower() and character.isascii():
            character = chr(ord(character) + 0x1D41A - 97)
        characters.append(character)
    return "".join(characters)


_POWERS = "**99999 ^99999 <<99999 !*99999 **9**9 ^9**9 <<9**9 !*9**9 **(-9**9) ^(-9**9) <<(-9**9) !*(-9**9)"
TEXTS = {
    "homoglyphs": [
        *map(_to_fullwidth, _CALLS),
        *map(_to_bold, _CALLS),
        *(call.replace("o", "о").replace("e", "е") for call in _CALLS),
        *(call[0] + "\u200d" + call[1:] for call in _CALLS),
    ],
    "digits": [
        sign + chr(int(zero, 16) + 4) + chr(int(zero, 16) + 2)
        for zero in _ZEROS
        for sign in ("", "-")
    ],
    "walks": [f"{root}.{walk}" for walk in DATA["walks"].split() for root in ("()", "''", "x")],
    "nesting": [
        *(_nest(pair, depth) for pair in [*_BRACKETS.split("|"), *_SIGNS] for depth in (90, 2000)),
        *(begin * depth + end for begin in _OPENINGS for depth in (3, 10_000) for end in ("", "1")),
    ],
    "numbers": [
        *DATA["numbers"].split(),
        *("9" * n for n in (301, 4300, 4301, 30_000)),
        *("1" * n + "e-" + "9" * n for n in (3, 9, 30)),
    ],
    "powers": [f"{a}{op}" for a in ("9", "(9**9)", "x", "(x+y+1)") for op in _POWERS.split()],
    "quotes": [part for part in DATA["quotes"].strip().replace("\n", "|").split("|") if part],
    "latex": [text.replace("_PLANTED", f" {PLANTED}") for text in DATA["latex"].split()],
    "sympy": DATA["sympy"].split(),
    "formats": DATA["formats"].split(),
    "documents": DATA["documents"].strip().replace("\n", "|").split("|"),
    "controls": [
        "42" + chr(code) + "43"
        for code in (*range(32), 127, 133, 8232, 8238, 65279, 55296, 57343, 1114111)
    ],
}
_ALL_ANSWERS = [*_TEXTS.splitlines(), *_LONG_TEXTS, *_CONTROLS]
for _family_texts in TEXTS.values():
    _ALL_ANSWERS += _family_texts
ANSWERS = list(dict.fromkeys(_ALL_ANSWERS))  # without duplicates
assert len(ANSWERS) > 600
