"""Workers answer questions in order and in parallel, within time limits, and sealed against hostile text."""

import os
import signal
import subprocess
import sys
import time

import pytest
from conftest import ROOT, catch_message

from sandbox import workers


@pytest.fixture
def make_pool(monkeypatch):
    """A function that makes a pool of workers, which is closed after the test."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "tests"))
    pools = []

    def make_pool(num=1, limit=5.0, sealed=False, arguments=()):
        pool = workers.WorkerPool(
            "attacks:answerer", arguments, num=num, limit=limit, sealed=sealed
        )
        pools.append(pool)
        return pool

    yield make_pool
    for pool in pools:
        pool.close()


def test_a_pool_answers_questions_in_order_and_keeps_the_same_workers(make_pool):
    pool = make_pool(num=2)
    answers = pool.answer_all([("double", n) for n in range(20)])
    assert [answer.value for answer in answers] == [2 * n for n in range(20)]

    answering_pids = {answer.value for answer in pool.answer_all([("name", 0)] * 8)}
    worker_pids = {worker.process.pid for worker in pool.workers}
    assert answering_pids <= worker_pids
    assert os.getpid() not in answering_pids
    assert pool.answer_all([]) == []


def test_a_pool_answers_slow_questions_in_parallel(make_pool, tmp_path):
    """A question has an answer only if eight questions run at the same time."""
    questions = [("meet", str(tmp_path), 8)] * 16
    answers = make_pool(num=8, limit=60.0).answer_all(questions)
    assert [answer.error for answer in answers] == [""] * 16


@pytest.mark.parametrize("sealed", [False, True])
def test_the_time_limit_ends_every_kind_of_slow_question_and_the_next_one_is_answered(
    make_pool, sealed
):
    questions = [
        ("sleep", 0.8),
        ("count", 10**9),
        ("sleep", 60),
        ("stubborn", 60),
        ("power", 9),
        ("double", 3),
    ]
    begin = time.monotonic()
    answers = make_pool(limit=0.5, sealed=sealed).answer_all(questions)
    assert [answer.error for answer in answers] == ["", *[workers.LATE] * 4, ""]
    assert answers[-1].value == 6
    # Without the limit, the questions would take over 120 s.
    assert time.monotonic() - begin < 50, "limits, kills and starts of workers took too long"


def test_a_question_that_ends_a_worker_or_fails_has_an_error_and_the_others_have_answers(make_pool):
    answers = make_pool(num=2).answer_all(
        [("leave", 3), ("double", 1), ("fail", 1), ("lambda", 1), ("double", 2)]
    )
    assert [answer.value for answer in answers] == [None, 2, None, None, 4]
    assert "status 3" in answers[0].error
    assert not answers[1].error
    assert "IndexError: list index out of range" in answers[2].error
    assert "not JSON" in answers[3].error


def test_a_worker_that_cannot_start_gives_an_error_of_one_line(make_pool):
    refusing_pool = make_pool(arguments=("refuse",))
    assert catch_message(refusing_pool.answer_all, [("double", 1)]) == "--flag is wrong"
    crashing_pool = make_pool(arguments=("crash",))
    assert "status 3" in catch_message(crashing_pool.answer_all, [("double", 1)])


def test_hashes_are_the_same_in_every_worker(make_pool):
    hashes = {make_pool().answer_all([("hash", 0)])[0].value for _ in range(2)}
    assert len(hashes) == 1


def test_a_question_that_json_cannot_hold_gives_an_error_of_one_line(make_pool):
    assert "lists of these" in catch_message(make_pool().answer_all, [("double", {1, 2})])


@pytest.mark.parametrize("sealed", [False, True])
def test_workers_ignore_ctrl_c_and_end_with_the_process_that_started_them(sealed):
    code = f"""
from sandbox import workers
pool = workers.WorkerPool("attacks:answerer", (), num=1, limit=60, sealed={sealed})
print(pool.answer_all([("name", 0)])[0].value, flush=True)
try:
    pool.answer_all([("sleep", 50)])
except KeyboardInterrupt:
    print(len(pool.workers), pool.answer_all([("double", 4)])[0].value)
"""
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": path},
        start_new_session=True,
    )
    worker_pid = int(process.stdout.readline())
    time.sleep(0.3)
    os.killpg(process.pid, signal.SIGINT)  # the worker gets it too, as in a terminal
    output, _ = process.communicate(timeout=30)
    assert output.split() == ["0", "8"]
    assert process.returncode == 0
    with pytest.raises(ProcessLookupError):
        os.kill(worker_pid, 0)
