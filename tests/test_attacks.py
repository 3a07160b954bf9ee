"""Hundreds of hostile texts against verifiers, and hostile code inside a sealed worker."""

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
    sys.platform != "linux", reason="macOS seals workers with its sandbox, which has other rules"
)
KEY = "canary-of-the-judge"
CODES_BY_FAMILY = {
    family: codes.replace("|\n", "|").strip().split("|") for family, codes in DATA["code"].items()
}

# ---- hostile texts; for the scorers of reasoning-gym, see test_procedural.py


def test_no_attack_is_a_right_answer_for_the_checker_of_formulas():
    pool = WorkerPool("rewards.equality:make_math_checker", (), num=1, limit=0.2, sealed=True)
    right_answers = (r"\{7,8\}", r"2\sqrt{3}")
    comparisons = [
        math_answers.compare_math_or_text(right_answers[place % 2], text)
        for place, text in enumerate(ANSWERS)
    ]
    pairs = [comparison for comparison in comparisons if isinstance(comparison, tuple)]
    answers = pool.answer_all(pairs)
    harmless_answer = pool.answer_all([("f(1)+2", "2+f(1)")])[0]
    pool.close()

    assert harmless_answer.value is True, "a function inside a formula is not an attack"
    assert len(pairs) > 200
    assert True not in comparisons
    assert not os.path.exists(PLANTED)
    accepted = [pair for pair, answer in zip(pairs, answers, strict=True) if answer.value is True]
    assert not accepted


@pytest.mark.parametrize("family", TEXTS)
def test_an_attack_that_is_marked_as_the_answer_is_never_right(family):
    for template in ("\\boxed{%s}", "#### %s", "<answer>%s</answer>", "The answer is %s."):
        completions = [template.replace("%s", text) for text in TEXTS[family]]
        right_answers = ["blue"] * len(completions)
        assert not any(verifiers.math_correct(completions=completions, answer=right_answers))


# ---- code inside a worker


# The worker's answer to the harmless question that follows each attack.
ANSWER_TO_DOUBLE = (6, "", False)


@pytest.fixture(scope="module")
def run_in_worker():
    """
    A function that lets a sealed worker run codes, and then double 3; returns the answers.

    The worker has compiled the codes before it was sealed.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT / "tests"))
        patch.setenv("JUDGE_API_KEY", KEY)
        sources = {code: code for codes in CODES_BY_FAMILY.values() for code in codes}
        pool = WorkerPool("attacks:answerer", ("", sources, PLANTED), num=1, limit=0.2, sealed=True)

        def run_in_worker(*questions):
            return pool.answer_all([*questions, ("double", 3)])

        yield run_in_worker
        pool.close()


@on_linux
@pytest.mark.parametrize("family", CODES_BY_FAMILY)
def test_code_inside_a_worker_reaches_nothing_and_does_not_change_the_next_answer(
    run_in_worker, family
):
    codes = CODES_BY_FAMILY[family]
    environment = dict(os.environ)
    num_threads = threading.active_count()
    start = time.monotonic()

    # Codes of two families leave their worker alive. The others end it, or fail.
    keeps_worker = family in ("speak", "linger")
    if keeps_worker:
        answers = []
        for code in codes:
            answer, next_answer = run_in_worker((code,))
            assert next_answer == ANSWER_TO_DOUBLE, code
            answers.append(answer)
    else:
        *answers, next_answer = run_in_worker(*((code,) for code in codes))
        assert next_answer == ANSWER_TO_DOUBLE

    for code, answer in zip(codes, answers, strict=True):
        assert KEY not in repr(answer), code
        if not keeps_worker and code != "dict(os.environ)":
            assert answer.error or answer.value == -1, f"{code} gave {answer}"
        if "replay" not in code:  # these codes know the number of the question
            assert answer.value != 1.0, f"{code} was believed"
    assert not os.path.exists(PLANTED)
    assert dict(os.environ) == environment
    assert threading.active_count() == num_threads
    assert time.monotonic() - start < 15 * len(codes)


@on_linux
def test_every_system_call_outside_the_table_is_refused(run_in_worker):
    """
    Uretprobe and uprobe are left out: 335 and 336.

    No filter sees them, and they do nothing unless the kernel's own code makes the call.
    """
    column = seal._MACHINES[os.uname().machine][0]
    allowed = {int(call.split()[column]) for call in seal._CALLS.split(",")}
    refused = [number for number in range(470) if number not in allowed | {335, 336}]
    # The same kernel has another table, x32, in which the allowed calls have other numbers.
    refused += [number + 2**30 for number in allowed]
    questions = [("syscall", number) for number in refused]
    answers = run_in_worker(*questions)[:-1]
    assert {answer.value for answer in answers} == {errno.EPERM}
