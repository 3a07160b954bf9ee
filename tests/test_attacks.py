"""Attacks on what reads hostile text: texts by the hundred in families, and code that got inside a sealed worker."""

import errno
import os
import sys
import threading
import time

import pytest
from conftest import ROOT
from hostile import ANSWERS, DATA, PLANTED, TEXTS

from rewards import math_answers, verifiers
from sandbox import seal
from sandbox.workers import WorkerPool

on_linux = pytest.mark.skipif(
    sys.platform != "linux", reason="macOS holds by its sandbox, another table"
)
KEY = "canary-of-the-judge"
INSIDE = {
    family: codes.replace("|\n", "|").strip().split("|") for family, codes in DATA["code"].items()
}

# ---- what texts earn; of reasoning-gym's scorers, see test_procedural.py


def test_no_attack_is_a_right_answer_to_the_reader_of_formulas():
    pool = WorkerPool("rewards.equality:make_math_checker", (), num=1, limit=0.2, sealed=True)
    asked = [
        math_answers.compare_math_or_text((r"\{7,8\}", r"2\sqrt{3}")[place % 2], text)
        for place, text in enumerate(ANSWERS)
    ]
    pairs = [pair for pair in asked if isinstance(pair, tuple)]
    told = pool.answer_all(pairs)
    assert pool.answer_all([("f(1)+2", "2+f(1)")])[0].value is True, (
        "a function of the formula's own is no attack"
    )
    pool.close()
    assert len(pairs) > 200 and True not in asked and not os.path.exists(PLANTED)
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
        pool = WorkerPool("attacks:answerer", ("", sources, PLANTED), num=1, limit=0.2, sealed=True)
        yield lambda *deeds: pool.answer_all([*deeds, ("double", 3)])
        pool.close()


@on_linux
@pytest.mark.parametrize("family", INSIDE)
def test_code_inside_a_worker_reaches_nothing_and_costs_the_next_answer_nothing(inside, family):
    codes, before, begin = (
        INSIDE[family],
        (dict(os.environ), threading.active_count()),
        time.monotonic(),
    )
    stays = family in ("speak", "linger")  # the others end their worker, or fail
    told = (
        [inside((code,)) for code in codes]
        if stays
        else [[answer] for answer in inside(*((c,) for c in codes))]
    )
    assert stays or told.pop() == [(6, "", False)]
    for code, (answer, *after) in zip(codes, told, strict=True):
        assert after == [(6, "", False)] * stays and KEY not in repr(answer), code
        assert stays or answer.error or answer.value == -1 or code == "dict(os.environ)", (
            f"{code} gave {answer}"
        )
        assert answer.value != 1.0 or "replay" in code, (
            f"{code} was believed"
        )  # these know the number
    assert not os.path.exists(PLANTED) and (dict(os.environ), threading.active_count()) == before
    assert time.monotonic() - begin < 15 * len(codes)


@on_linux
def test_every_system_call_by_its_number_is_refused_but_those_of_the_table(inside):
    """Without uretprobe and uprobe, which no filter sees, and which do nothing but from the kernel's own code."""
    column = seal._MACHINES[os.uname().machine][0]
    allowed = {int(call.split()[column]) for call in seal._CALLS.split(",")}
    numbers = [
        number for number in range(470) if number not in allowed and number not in (335, 336)
    ]
    numbers += [
        number + 2**30 for number in allowed
    ]  # the same by x32, another table of the same kernel
    told = inside(*(("syscall", number) for number in numbers))[:-1]
    assert {answer.value for answer in told} == {errno.EPERM}
