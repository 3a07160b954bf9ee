"""The seal of workers and what reads formulas in them; what code inside can do is in test_attacks.py."""

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
CODES = [
    "dict(os.environ)",
    "print('shown') or print('shown', file=sys.stderr) or 1",
    "open('/etc/passwd')",
]
LARGE, HOARD = "bytearray(2**31)", "[bytearray(300 * 2**20), time.sleep(60)]"


@pytest.fixture
def sealed(monkeypatch):
    """Makes a sealed worker of a machine, which does what it is told; see test_attacks.py for what it is told there."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "tests"))
    monkeypatch.setenv("JUDGE_API_KEY", "of-the-judge")
    pools = []

    def make(machine="", limit=0.5):
        codes = {code: code for code in (*CODES, LARGE, HOARD)}
        pools.append(
            workers.WorkerPool(
                "attacks:answerer", (machine, codes), num=1, limit=limit, sealed=True
            )
        )
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()


def test_an_answer_that_tries_what_is_refused_is_named_counted_and_shown_in_plain_characters(
    sealed, capsys
):
    before, answer, after = sealed().answer_all(
        [("double", 2), (CODES[2], "\x1b[2J"), ("double", 3)]
    )
    assert (before.value, after.value) == (4, 6) and answer == (
        None,
        "tried an action that is refused in a sealed process: open",
        True,
    )
    said = "1 of 3 answers ended the process that scored them; for example, for '\\x1b[2J', "
    said += "the process tried an action that is refused in a sealed process: open\n"
    assert capsys.readouterr().err == said


def test_a_worker_has_an_empty_directory_and_no_key_and_prints_nothing(sealed, capfd):
    pool = sealed()
    environment, printed = (
        answer.value for answer in pool.answer_all([(code,) for code in CODES[:2]])
    )
    assert "of-the-judge" not in environment.values() and set(environment) <= {
        *seal.PASSED_VARIABLES,
        *("HOME", "TMPDIR", "PYTHONPATH", "PYTHONHASHSEED", "OPENBLAS_NUM_THREADS"),
    }
    home = pool.workers[0].home.name
    assert environment["HOME"] == home and not os.listdir(home) and os.getcwd() != home
    assert printed == 1 and not any(capfd.readouterr())
    pool.close()
    assert not os.path.exists(home)


@on_linux
def test_a_kernel_without_the_filter_is_told_once_and_the_rest_holds(sealed, monkeypatch, capsys):
    monkeypatch.setattr(
        workers, "_warn_of_weak_seal", functools.cache(workers._warn_of_weak_seal.__wrapped__)
    )
    epoll_create1 = {"x86_64": 291, "aarch64": 20}[os.uname().machine]
    for _ in range(2):
        double, opened, called = sealed("riscv64").answer_all(
            [("double", 2), (CODES[2],), ("syscall", epoll_create1)]
        )
        assert double.value == 4 and opened.broken
        assert called.value == errno.EMFILE, "no file may be opened: RLIMIT_NOFILE"
    assert capsys.readouterr().err.count("table of system calls for riscv64") == 1


@on_linux
def test_a_worker_that_asks_for_more_memory_than_its_limit_is_told_so_and_replaced(sealed):
    large, double = sealed().answer_all([(LARGE,), ("double", 2)])
    assert "MemoryError" in large.error and large.broken and double.value == 4


@on_linux
def test_where_memory_is_watched_a_worker_that_takes_too_much_is_ended(sealed, monkeypatch):
    pages = lambda pid: int(Path(f"/proc/{pid}/statm").read_text().split()[1])  # noqa: E731
    monkeypatch.setattr(workers, "WATCHED", True)
    monkeypatch.setattr(
        workers, "_memory_footprint_on_macos", lambda pid: pages(pid) * os.sysconf("SC_PAGE_SIZE")
    )
    monkeypatch.setattr(seal, "MEMORY", 200 * 2**20)
    begin = time.monotonic()
    # so much time that a busy machine looks at the memory before the time has passed
    assert sealed(limit=15).answer_all([(HOARD,)]) == [(None, workers.LARGE, True)]
    assert time.monotonic() - begin < 60


# ---- what reads an answer


NO_FORMULAS = "x.real|f(1)|sin(1, 2)|sin(x=1)|[1]|'a'|True|1 if x else 2|lambda: 1|x[0]||10**10000|9**9**9|1<<10**9|1e999"


def test_a_formula_is_read_and_a_program_is_not():
    for text, value in {
        "(1 + 2)*3/4": 2.25,
        "-2**3": -8,
        "sqrt(16)": 4,
        "0.5": 0.5,
        "+7": 7,
        "1<<4": 16,
    }.items():
        assert float(formulas.formula_to_sympy(text)) == value
    assert (
        str(formulas.formula_to_sympy("x**3/3 - 2*sin(x)*exp(3*x) + C").diff("x").subs("x", 0))
        == "-2"
    )
    for text in [
        *NO_FORMULAS.split("|"),
        "((9**99)**99)**99",
        "x" * 3000,
        "\uff53in(1)",
        "(" * 900 + ")" * 900,
    ]:
        with pytest.raises((ValueError, SyntaxError, RecursionError, MemoryError)):
            formulas.formula_to_sympy(text)


def test_a_list_is_read_in_either_s_quotes_and_nothing_else_is():
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


def test_the_footprint_of_a_process_is_the_eighth_number_after_the_id_that_macos_gives(monkeypatch):
    """As sys/resource.h has it: user and system time, two kinds of wakeups, pageins, wired, resident, footprint."""

    def proc_pid_rusage(pid, flavor, usage):
        if pid == 0:
            return -1  # which has ended
        given = struct.pack("=16s18Q", b"an id", *range(100, 118))
        assert flavor == 2 and len(given) == ctypes.sizeof(usage)
        ctypes.memmove(usage, given, len(given))
        return 0

    monkeypatch.setattr(
        ctypes, "CDLL", lambda path: SimpleNamespace(proc_pid_rusage=proc_pid_rusage)
    )
    assert (
        workers._memory_footprint_on_macos(5) == 107 and workers._memory_footprint_on_macos(0) == 0
    )
