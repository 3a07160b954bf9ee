"""Workers: answers in order and side by side, limits that always hold, and a seal against hostile text."""

import os
import signal
import subprocess
import sys
import time

import pytest
from conftest import ROOT, catch_message

from sandbox import workers


@pytest.fixture
def pool(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "tests"))
    made = []

    def make(num=1, limit=5.0, sealed=False, arguments=()):
        made.append(
            workers.WorkerPool("attacks:answerer", arguments, num=num, limit=limit, sealed=sealed)
        )
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_questions_are_answered_in_order_by_workers_that_stay(pool):
    several = pool(num=2)
    assert [answer.value for answer in several.answer_all([("double", n) for n in range(20)])] == [
        2 * n for n in range(20)
    ]
    first = {answer.value for answer in several.answer_all([("name", 0)] * 8)}
    assert (
        first == {worker.process.pid for worker in several.workers} & first
        and os.getpid() not in first
    )
    assert several.answer_all([]) == []


def test_slow_questions_are_answered_side_by_side(pool, tmp_path):
    assert [
        answer.error
        for answer in pool(num=8, limit=60.0).answer_all([("meet", str(tmp_path), 8)] * 16)
    ] == [""] * 16


@pytest.mark.parametrize("sealed", [False, True])
def test_a_limit_of_processor_time_holds_whatever_a_question_does_and_the_next_is_answered(
    pool, sealed
):
    deeds = [
        ("sleep", 0.8),
        ("count", 10**9),
        ("sleep", 60),
        ("stubborn", 60),
        ("power", 9),
        ("double", 3),
    ]
    begin = time.monotonic()
    answers = pool(limit=0.5, sealed=sealed).answer_all(deeds)
    assert [answer.error for answer in answers] == ["", *[workers.LATE] * 4, ""] and answers[
        -1
    ].value == 6
    assert time.monotonic() - begin < 50, "limits, kills and starts, of three times 60 s"


def test_what_ends_a_worker_or_fails_in_it_is_told_and_the_rest_is_answered(pool):
    answers = pool(num=2).answer_all(
        [("leave", 3), ("double", 1), ("fail", 1), ("lambda", 1), ("double", 2)]
    )
    assert [answer.value for answer in answers] == [None, 2, None, None, 4]
    assert (
        "status 3" in answers[0].error and "IndexError: list index out of range" in answers[2].error
    )
    assert "not JSON" in answers[3].error and not answers[1].error


def test_a_worker_that_cannot_start_is_one_line(pool):
    assert (
        catch_message(pool(arguments=("refuse",)).answer_all, [("double", 1)]) == "--flag is wrong"
    )
    assert "status 3" in catch_message(pool(arguments=("crash",)).answer_all, [("double", 1)])


def test_hashes_are_the_same_in_every_worker(pool):
    assert len({pool().answer_all([("hash", 0)])[0].value for _ in range(2)}) == 1


def test_a_question_that_is_no_json_is_one_line(pool):
    assert "lists of these" in catch_message(pool().answer_all, [("double", {1, 2})])


@pytest.mark.parametrize("sealed", [False, True])
def test_workers_end_with_their_owner_and_ctrl_c_is_the_owners(sealed):
    code = (
        "from sandbox import workers; p = workers.WorkerPool('attacks:answerer', (), num=1, limit=60, sealed=SEALED)\n"
        "print(p.answer_all([('name', 0)])[0].value, flush=True)\n"
        "try:\n    p.answer_all([('sleep', 50)])\n"
        "except KeyboardInterrupt:\n    print(len(p.workers), p.answer_all([('double', 4)])[0].value)\n"
    ).replace("SEALED", str(sealed))
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": path},
        start_new_session=True,
    )
    worker = int(process.stdout.readline())
    time.sleep(0.3)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: the worker gets it too
    assert process.communicate(timeout=30)[0].split() == ["0", "8"] and process.returncode == 0
    with pytest.raises(ProcessLookupError):
        os.kill(worker, 0)
