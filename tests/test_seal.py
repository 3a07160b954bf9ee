"""The seal of workers, and the parsers that run in them. test_attacks.py tests what code inside can do."""

import ctypes
import errno
import functools
import json
import os
import struct
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import ROOT

from rewards import formulas
from sandbox import seal, workers

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="system calls of Linux")
READ_ENVIRONMENT = "dict(os.environ)"
PRINT = "print('shown') or print('shown', file=sys.stderr) or 1"
OPEN_FILE = "open('/etc/passwd')"
TAKE_2_GIB = "bytearray(2**31)"
KEEP_300_MIB = "[bytearray(300 * 2**20), time.sleep(60)]"


@pytest.fixture
def make_sealed_pool(monkeypatch):
    """A function that makes a sealed worker, which runs the code in a question. See attacks.py."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "tests"))
    monkeypatch.setenv("JUDGE_API_KEY", "of-the-judge")
    pools = []

    def make_sealed_pool(machine="", limit=0.5):
        codes = (READ_ENVIRONMENT, PRINT, OPEN_FILE, TAKE_2_GIB, KEEP_300_MIB)
        arguments = (machine, {code: code for code in codes})
        pool = workers.WorkerPool("attacks:answerer", arguments, num=1, limit=limit, sealed=True)
        pools.append(pool)
        return pool

    yield make_sealed_pool
    for pool in pools:
        pool.close()


def test_a_warning_counts_answers_that_try_a_refused_action_and_shows_an_example(
    make_sealed_pool, capsys
):
    before, refused, after = make_sealed_pool().answer_all(
        [("double", 2), (OPEN_FILE, "\x1b[2J"), ("double", 3)]
    )
    assert before.value == 4
    assert after.value == 6
    assert refused == (None, "tried an action that is refused in a sealed process: open", True)
    assert capsys.readouterr().err == (
        "1 of 3 answers ended the process that scored them; for example, for '\\x1b[2J', "
        "the process tried an action that is refused in a sealed process: open\n"
    )


def test_a_worker_has_an_empty_directory_and_no_key_and_prints_nothing(make_sealed_pool, capfd):
    pool = make_sealed_pool()
    environment_answer, print_answer = pool.answer_all([(READ_ENVIRONMENT,), (PRINT,)])
    environment = environment_answer.value
    assert "of-the-judge" not in environment.values()
    other_variables = "HOME TMPDIR PYTHONPATH PYTHONHASHSEED OPENBLAS_NUM_THREADS".split()
    assert set(environment) <= {*seal.PASSED_VARIABLES, *other_variables}

    home = pool.workers[0].home.name
    assert environment["HOME"] == home
    assert not os.listdir(home)
    assert os.getcwd() != home
    assert print_answer.value == 1
    assert not any(capfd.readouterr())

    pool.close()
    assert not os.path.exists(home)


@on_linux
def test_a_kernel_without_the_filter_gives_one_warning_and_the_other_limits_hold(
    make_sealed_pool, monkeypatch, capsys
):
    monkeypatch.setattr(
        workers, "_warn_of_weak_seal", functools.cache(workers._warn_of_weak_seal.__wrapped__)
    )
    epoll_create1 = {"x86_64": 291, "aarch64": 20}[os.uname().machine]
    for _ in range(2):
        double, open_file, system_call = make_sealed_pool("riscv64").answer_all(
            [("double", 2), (OPEN_FILE,), ("syscall", epoll_create1)]
        )
        assert double.value == 4
        assert open_file.broken
        assert system_call.value == errno.EMFILE, "no file may be opened: RLIMIT_NOFILE"
    assert capsys.readouterr().err.count("table of system calls for riscv64") == 1


@on_linux
def test_a_worker_that_requests_too_much_memory_gets_a_memory_error_and_is_replaced(
    make_sealed_pool,
):
    large, double = make_sealed_pool().answer_all([(TAKE_2_GIB,), ("double", 2)])
    assert "MemoryError" in large.error
    assert large.broken
    assert double.value == 4


@on_linux
def test_a_worker_that_takes_too_much_watched_memory_is_ended(make_sealed_pool, monkeypatch):
    def resident_bytes(pid):
        num_pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        return num_pages * os.sysconf("SC_PAGE_SIZE")

    monkeypatch.setattr(workers, "WATCHED", True)
    monkeypatch.setattr(workers, "_memory_footprint_on_macos", resident_bytes)
    monkeypatch.setattr(seal, "MEMORY", 200 * 2**20)
    begin = time.monotonic()
    # The limit is long, so that even a busy machine checks the memory before the time is up.
    answers = make_sealed_pool(limit=15).answer_all([(KEEP_300_MIB,)])
    assert answers == [(None, workers.LARGE, True)]
    assert time.monotonic() - begin < 60


# ---- the parsers of answers


NOT_FORMULAS = "x.real|f(1)|sin(1, 2)|sin(x=1)|[1]|'a'|True|1 if x else 2|lambda: 1|x[0]||10**10000|9**9**9|1<<10**9|1e999"


def test_a_formula_is_parsed_and_a_program_is_refused():
    values = {
        "(1 + 2)*3/4": 2.25,
        "-2**3": -8,
        "sqrt(16)": 4,
        "0.5": 0.5,
        "+7": 7,
        "1<<4": 16,
    }
    for text, value in values.items():
        assert float(formulas.formula_to_sympy(text)) == value
    antiderivative = formulas.formula_to_sympy("x**3/3 - 2*sin(x)*exp(3*x) + C")
    assert str(antiderivative.diff("x").subs("x", 0)) == "-2"

    more_texts = ["((9**99)**99)**99", "x" * 3000, "\uff53in(1)", "(" * 900 + ")" * 900]
    for text in [*NOT_FORMULAS.split("|"), *more_texts]:
        with pytest.raises((ValueError, SyntaxError, RecursionError, MemoryError)):
            formulas.formula_to_sympy(text)


def test_a_list_with_single_or_double_quotes_is_parsed_and_anything_else_is_refused():
    assert formulas.parse_json_with_single_quotes("[['A', 1], [0, 1.5]]") == [["A", 1], [0, 1.5]]
    for text in (
        "open('x')",
        "[1][0]",
        "(1, 2)",
        "[" * 20_000,
        json.dumps([1]) * 2,
        "[1 for x in y]",
    ):
        with pytest.raises((ValueError, RecursionError)):
            formulas.parse_json_with_single_quotes(text)


def test_the_memory_footprint_is_the_eighth_number_after_the_id_from_macos(monkeypatch):
    """
    The numbers are those of sys/resource.h.

    User and system time, two kinds of wakeups, pageins, wired size, resident size, footprint.
    """

    def proc_pid_rusage(pid, flavor, usage):
        if pid == 0:
            return -1  # as for a process that has ended
        rusage = struct.pack("=16s18Q", b"an id", *range(100, 118))
        assert flavor == 2
        assert len(rusage) == ctypes.sizeof(usage)
        ctypes.memmove(usage, rusage, len(rusage))
        return 0

    library = SimpleNamespace(proc_pid_rusage=proc_pid_rusage)
    monkeypatch.setattr(ctypes, "CDLL", lambda path: library)
    assert workers._memory_footprint_on_macos(5) == 107
    assert workers._memory_footprint_on_macos(0) == 0
