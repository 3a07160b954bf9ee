"""Attacks on the workers that read hostile text: texts by the hundred in families, and code that got inside one."""

import os
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest
import yaml
from extras import needs
from hostile import ANSWERS
from test_workers import ROOT

from problems import seal, verifiers
from problems.workers import Pool
from tasks import rg

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="macOS holds by its sandbox, another table")
PLANTED = Path(tempfile.gettempdir()) / f"gwen-attack-{os.getpid()}"  # what an attack that runs would make
KEY = "canary-of-the-judge"

_DATA = yaml.safe_load(Path(__file__).with_name("attacks.yaml").read_text("utf-8"))
INSIDE = {family: codes.replace("|\n", "|").strip().split("|") for family, codes in _DATA.pop("code").items()}

# ---- texts, by family

_CALLS = [f"open('{PLANTED}','w')", f"__import__('os').system('touch {PLANTED}')", "eval('1')", "exec('x=1')"]
_ZEROS = "660 6F0 7C0 966 9E6 A66 BE6 E50 F20 1040 17E0 1810 FF10 1D7CE 1FBF0".split()  # digits of other scripts
_BRACKETS = (
    r'( )|[ ]|{ }|⟨ ⟩|（ ）|［ ］|< >|\{ \}|\left( \right)|f( )|[[ ]]|{"a": }|sqrt( )|\frac{1}{ }|x_{ }|\sqrt{ }'
)
_SIGNS = "- ~ ! not√ √ \\sqrt \\frac 2^ 2** x_ 1<< ¬ 1/ 1- x, 1;".split()


def _nested(pair, depth):
    begin, _, end = pair.partition(" ")
    return begin * depth + "1" + end * depth


def _wide(text):
    return "".join(chr(ord(c) + 0xFEE0) if c.isalnum() and c.isascii() else c for c in text)


def _bold(text):
    return "".join(chr(ord(c) + 0x1D41A - 97) if c.islower() and c.isascii() else c for c in text)


_POWERS = "**99999 ^99999 <<99999 !*99999 **9**9 ^9**9 <<9**9 !*9**9 **(-9**9) ^(-9**9) <<(-9**9) !*(-9**9)"
TEXTS = {
    "homoglyphs": [
        *map(_wide, _CALLS),
        *map(_bold, _CALLS),
        *(call.replace("o", "о").replace("e", "е") for call in _CALLS),
        *(call[0] + "\u200d" + call[1:] for call in _CALLS),
    ],
    "digits": [sign + chr(int(zero, 16) + 4) + chr(int(zero, 16) + 2) for zero in _ZEROS for sign in ("", "-")],
    "walks": [f"{root}.{walk}" for walk in _DATA["walks"].split() for root in ("()", "''", "x")],
    "nesting": [_nested(pair, depth) for pair in [*_BRACKETS.split("|"), *_SIGNS] for depth in (90, 2000)],
    "numbers": [
        *_DATA["numbers"].split(),
        *("9" * n for n in (301, 4300, 4301, 30_000)),
        *("1" * n + "e-" + "9" * n for n in (3, 9, 30)),
    ],
    "powers": [f"{a}{op}" for a in ("9", "(9**9)", "x", "(x+y+1)") for op in _POWERS.split()],
    "quotes": [part for part in _DATA["quotes"].strip().replace("\n", "|").split("|") if part],
    "latex": [text.replace("_PLANTED", f" {PLANTED}") for text in _DATA["latex"].split()],
    "sympy": _DATA["sympy"].split(),
    "formats": _DATA["formats"].split(),
    "documents": _DATA["documents"].strip().replace("\n", "|").split("|"),
    "controls": ["42" + chr(code) + "43" for code in (*range(32), 127, 133, 8232, 8238, 65279, 55296, 57343, 1114111)],
}
ALL = list(dict.fromkeys(text for texts in TEXTS.values() for text in texts if text not in ANSWERS))
assert len(ALL) > 300

OTHERS = "coin_flip power_function decimal_arithmetic complex_arithmetic jugs graph_color game_of_life codeio".split()
OTHERS += "palindrome_partitioning tower_of_hanoi time_intervals calendar_arithmetic number_format dice".split()
LOGIC = "propositional_logic"
gym = needs("reasoning_gym")

# ---- what they earn


@gym
def test_no_scorer_runs_believes_or_waits_for_any_of_hundreds_of_attacks():
    settings = {name: {} for name in (*rg.READERS, *OTHERS)}
    makers = Pool("tasks.rg:make_maker", (settings, {}), num=1, limit=60.0)
    scorers = Pool("tasks.rg:make_scorer", (settings, {}), num=1, limit=1.0, sealed=True)
    for name in settings:
        prompt, gold, entry = makers.ask([(name, None, 0)])[0].value
        wrong = ["", "wrong", "-17", "0", "1", "42", "10", "[]", "{}", "[0]", "[{}]", f"{gold}!"]
        honest = max(map(rg.earned, scorers.ask([(name, entry, text) for text in wrong])))
        texts = [text for text in (*ALL, prompt, prompt[::-1]) if text.lower() != str(gold).lower()]
        for text, answer in zip(texts, scorers.ask([(name, entry, text) for text in texts]), strict=True):
            assert rg.earned(answer) <= max(honest, 0.1), f"{name} gives {answer.value} to {text[:60]!r}"
    makers.close()
    scorers.close()
    assert not PLANTED.exists(), "an answer was run"


@gym
def test_of_contradicting_premises_a_conclusion_about_something_else_earns_nothing():
    make, score = (build({LOGIC: {}}, {}) for build in (rg.make_maker, rg.make_scorer))
    entry = make((LOGIC, None, 0))[2]
    assert [score((LOGIC, entry, text)) for text in ("¬1", "nonsense ∨ text", "x → y")] == [0, 0, 0]
    assert score((LOGIC, entry, "(Q ∨ P)")) == 1


def test_no_attack_is_a_right_answer_to_the_reader_of_formulas():
    pool = Pool("problems.verifiers:make_math_checker", (), num=1, limit=0.2, sealed=True)
    asked = [verifiers._same_formula(r"\{7,8\}", text) for text in ALL]
    pairs = [pair for pair in asked if isinstance(pair, tuple)]
    told = pool.ask(pairs)
    assert pool.ask([("f(1)+2", "2+f(1)")])[0].value is True, "a function of the formula's own is no attack"
    pool.close()
    assert len(pairs) > 200 and True not in asked and not PLANTED.exists()
    assert not [pair for pair, answer in zip(pairs, told, strict=True) if answer.value is True]


@pytest.mark.parametrize("family", TEXTS)
def test_a_completion_that_marks_an_attack_states_no_right_answer(family):
    for form in ("\\boxed{%s}", "#### %s", "<answer>%s</answer>", "The answer is %s."):
        said = [form.replace("%s", text) for text in TEXTS[family]]
        assert not any(verifiers.math_correct(completions=said, answer=["blue"] * len(said)))


# ---- code inside a worker


@pytest.fixture(scope="module")
def inside():
    """Asks a worker to run a code that is known to it from before its seal, and the double of 3 thereafter."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT / "tests"))
        patch.setenv("JUDGE_API_KEY", KEY)
        sources = {code: code for codes in INSIDE.values() for code in codes}
        pool = Pool("attacks:answerer", ("", sources, str(PLANTED)), num=1, limit=0.2, sealed=True)
        yield lambda *deeds: pool.ask([*deeds, ("double", 3)])
        pool.close()


@on_linux
@pytest.mark.parametrize("family", INSIDE)
def test_code_inside_a_worker_reaches_nothing_and_costs_the_next_answer_nothing(inside, family):
    codes, before, begin = INSIDE[family], (dict(os.environ), threading.active_count()), time.monotonic()
    stays = family in ("speak", "linger")  # the others end their worker, or fail
    told = [inside((code,)) for code in codes] if stays else [[answer] for answer in inside(*((c,) for c in codes))]
    assert stays or told.pop() == [(6, "", False)]
    for code, (answer, *after) in zip(codes, told, strict=True):
        assert after == [(6, "", False)] * stays and KEY not in repr(answer), code
        assert stays or answer.error or answer.value == -1 or code == "dict(os.environ)", f"{code} gave {answer}"
    assert not PLANTED.exists() and (dict(os.environ), threading.active_count()) == before
    assert time.monotonic() - begin < 15 * len(codes)


@on_linux
def test_every_system_call_by_its_number_is_refused_but_those_of_the_table(inside):
    column = seal._MACHINES[os.uname().machine][0]
    allowed = {int(call.split()[column]) for call in seal._CALLS.split(",")}
    numbers = [number for number in range(470) if number not in allowed]
    numbers += [number + 2**30 for number in allowed]  # the same by x32, another table of the same kernel
    told = inside(*(("syscall", number) for number in numbers))[:-1]  # of uretprobe, beyond filters, a worker dies
    assert all(answer.value == -1 or "status -4" in answer.error for answer in told)
