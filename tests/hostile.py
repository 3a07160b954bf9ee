"""Over 200 answers of a model that looks for a hole: nobody should run, believe or wait for any of them."""

from pathlib import Path

PLANTED = "/tmp/gwen-planted-by-an-answer"  # what an answer that runs would make


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

_CONTROLS = [chr(code) * 3 for code in (0, 1, 3, 4, 7, 8, 11, 12, 13, 26, 27, 28, 127, 128, 0x85, 0xA0)]
_MADE = [eval(text) for line in _LONG.split("\n") for text in line.split(" | ") if text]
_TEXTS = Path(__file__).with_name("hostile.txt").read_text("utf-8")  # a line each
ANSWERS = list(dict.fromkeys([*_TEXTS.splitlines(), *_MADE, *_CONTROLS]))
assert len(ANSWERS) > 200
