"""The seal: what code inside a worker can do, by Python and below it; which scorers would run an answer at all."""

import ast
import ctypes
import functools
import json
import os
import pickle
import struct
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
from attacks import BELOW
from extras import needs
from test_workers import ROOT

from problems import formulas, seal, workers
from problems.workers import FORGED, LARGE, LATE
from tasks import rg

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="system calls of Linux")


REFUSED = {
    "open": "open('/etc/passwd')",
    "os.listdir": "os.listdir('/')",
    "os.system": "os.system('true')",
    "exec": "eval('1 + 1')",
    "import": "__import__('this')",
    "socket.__new__": "socket.socket()",
    "sqlite3.connect": "sqlite3.connect('planted')",
    "os.kill": "os.kill(os.getppid(), 9)",
    "sys._getframe": "sys._getframe(1)",
    "gc.get_objects": "gc.get_objects()",
    "object.__getattr__": "own_frame()",
}
THREAD, REPLACE = "_thread.start_new_thread(print, ())", "DEEDS.update(double=lambda x: 1.0) or os.listdir('/')"
MUTE = [  # says nothing, or what is no frame
    "[os.close(number) for number in range(3, 64)]",
    "signal.setitimer(signal.ITIMER_PROF, 0) and time.sleep(60)",
    "(_ for _ in ()).throw(SystemExit(Never()))",
    "functools.reduce(lambda x, _: [x], range(100_000), [])",
    "'x' * 10**6",
]


@pytest.fixture(scope="module")
def sealed():
    """A sealed worker that does what it is told, and the questions and answers of an attack between two honest ones."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT / "tests"))
        patch.setenv("JUDGE_API_KEY", "of-the-judge")
        codes = {code: code for code in (*REFUSED.values(), THREAD, REPLACE, *MUTE)}
        pool = workers.Pool("attacks:answerer", ("", codes), num=1, limit=0.5, sealed=True)
        yield pool
        pool.close()


def attack(pool, *deed):
    """What an attack answers; the answers before and after it are untouched."""
    before, answer, after = pool.ask([("double", 2), deed, ("double", 3)])
    assert (before.value, after.value) == (4, 6), deed
    return answer


# ---- what Python refuses


@pytest.mark.parametrize("event", REFUSED)
def test_what_an_answer_tries_by_python_is_refused_named_and_ends_its_worker(sealed, event):
    answer = attack(sealed, REFUSED[event])
    assert answer == (None, f"tried what is refused here: {event}", True)


def test_a_name_with_another_meaning_does_not_switch_the_seal_off(sealed, tmp_path):
    assert attack(sealed, "switch_off", str(tmp_path / "planted")).broken and not list(tmp_path.iterdir())


def test_a_scorer_that_an_answer_replaced_is_gone_with_its_worker(sealed):
    assert attack(sealed, REPLACE).broken  # the double of 3 that follows is 6, not 1


def test_a_broken_answer_is_counted_and_shown_in_one_line_of_plain_characters(sealed, capsys):
    sealed.ask([("read", "\x1b[2Jfile")])
    assert capsys.readouterr().err == (
        "1 of 1 answers broke their reader: '\\x1b[2Jfile' tried what is refused here: open\n"
    )


def test_a_worker_has_an_empty_directory_and_no_key_and_prints_nothing(sealed, capfd):
    environment = attack(sealed, "environment").value
    assert "of-the-judge" not in environment.values() and set(environment) <= {
        *seal.KEPT,
        *("HOME", "TMPDIR", "PYTHONPATH", "PYTHONHASHSEED", "OPENBLAS_NUM_THREADS"),
    }
    home = sealed.workers[0].home.name
    assert environment["HOME"] == home and not os.listdir(home) and os.getcwd() != home
    capfd.readouterr()
    assert attack(sealed, "print", "shown").value == 1 and not any(capfd.readouterr())
    sealed.close()
    assert not os.path.exists(home)


# ---- what the kernel refuses


@on_linux
@pytest.mark.parametrize("name", BELOW)
def test_the_kernel_refuses_what_python_would_not_see(sealed, name):
    assert attack(sealed, "below", name) == (False, "", False)


@on_linux
def test_what_raises_no_audit_event_starts_no_program_and_no_thread(sealed, tmp_path):
    assert "PermissionError" in attack(sealed, "fork_exec", str(tmp_path / "planted")).error
    assert "can't start new thread" in attack(sealed, THREAD).error
    time.sleep(0.2)
    assert not list(tmp_path.iterdir())


@on_linux
def test_memory_is_limited_on_linux(sealed):
    assert attack(sealed, "hoard", seal.MEMORY) == (None, "MemoryError:", True)


@on_linux
def test_a_kernel_without_the_filter_is_told_once_and_the_rest_holds(monkeypatch, capsys):
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "tests"))
    monkeypatch.setattr(workers, "_tell_missing", functools.cache(workers._tell_missing.__wrapped__))
    for _ in range(2):
        pool = workers.Pool("attacks:answerer", ("riscv64",), num=1, limit=1.0, sealed=True)
        assert pool.ask([("double", 2)])[0].value == 4 and pool.ask([("read", "/etc/passwd")])[0].broken
        assert pool.ask([("below", "open")])[0].value is False, "no file may be opened: RLIMIT_NOFILE"
        pool.close()
    assert capsys.readouterr().err.count("no table of system calls for riscv64") == 1


def test_where_memory_is_watched_a_worker_that_takes_too_much_is_ended(sealed, monkeypatch):
    pages = lambda pid: int(Path(f"/proc/{pid}/statm").read_text().split()[1])  # noqa: E731
    monkeypatch.setattr(workers, "WATCHED", True)
    monkeypatch.setattr(workers, "_footprint", lambda pid: pages(pid) * os.sysconf("SC_PAGE_SIZE"))
    monkeypatch.setattr(seal, "MEMORY", 200 * 2**20)
    begin = time.monotonic()
    assert attack(sealed, "hoard", 300 * 2**20) == (None, LARGE, True)
    assert time.monotonic() - begin < 60


# ---- what the owner takes from a worker


def frame(*content):
    return workers._frame(*content).hex()


class Runs:
    def __reduce__(self):
        return os.system, ("touch /tmp/gwen-planted-by-a-pickle",)


FRAMES = {
    "another's number": frame(1, 1.0, "", False),
    "two of them": frame(1, 1.0, "", False) * 2,
    "no list": frame() + frame({"score": 1}),
    "too few parts": frame(1, 1.0),
    "a pickle": len(pickle.dumps(Runs())).to_bytes(4, "big").hex() + pickle.dumps(Runs()).hex(),
    "a bare pickle": pickle.dumps(Runs()).hex(),
    "more than the limit": (2**31).to_bytes(4, "big").hex(),
    "nothing in a frame": "00000000" + frame(1, 1, "", False),
    "deep nesting": (20_000).to_bytes(4, "big").hex() + "5b" * 20_000,
    "400 digits": len(b"[1" + b"0" * 400 + b"]").to_bytes(4, "big").hex() + (b"[1" + b"0" * 400 + b"]").hex(),
    "no text": "00000004ffffffff",
}


@pytest.mark.parametrize("name", FRAMES)
def test_bytes_that_are_no_answer_to_the_question_end_the_worker_and_nothing_else(sealed, name):
    assert attack(sealed, "say", FRAMES[name]) == (None, FORGED, True)
    assert not os.path.exists("/tmp/gwen-planted-by-a-pickle"), "a pickle was read"


def test_half_a_frame_and_silence_end_at_the_deadline(sealed):
    begin = time.monotonic()
    assert attack(sealed, "say", frame(1, 1.0)[:20], 1, 60) == (None, LATE, True)
    assert time.monotonic() - begin < 60


def test_bytes_without_end_are_read_up_to_the_limit(sealed):
    assert attack(sealed, "say", "00ffffff" + "20" * 2**16, 10**6).error == FORGED


@pytest.mark.parametrize("code", MUTE)
def test_a_worker_that_closes_its_channel_or_ears_or_says_too_much_harms_only_its_answer(sealed, code):
    begin = time.monotonic()
    assert attack(sealed, code).error and time.monotonic() - begin < 60


def test_what_an_answer_leaves_behind_to_speak_later_costs_the_next_answer_nothing(sealed):
    told = sealed.ask([("say_later", FRAMES["another's number"]), ("sleep", 0.4), ("double", 4)])
    assert told[1] == (None, "", False) and told[2].value == 8


# ---- which scorers would run an answer


NO_FORMULAS = (
    "x.real|f(1)|sin(1, 2)|sin(x=1)|[1]|'a'|True|1 if x else 2|lambda: 1|x[0]||10**10000|9**9**9|1<<10**9|1e999"
)


def test_a_formula_is_read_and_a_program_is_not():
    for text, value in {"(1 + 2)*3/4": 2.25, "-2**3": -8, "sqrt(16)": 4, "0.5": 0.5, "+7": 7, "1<<4": 16}.items():
        assert float(formulas.read_formula(text)) == value
    assert str(formulas.read_formula("x**3/3 - 2*sin(x)*exp(3*x) + C").diff("x").subs("x", 0)) == "-2"
    for text in [*NO_FORMULAS.split("|"), "((9**99)**99)**99", "x" * 3000, "\uff53in(1)", "(" * 900 + ")" * 900]:
        with pytest.raises((ValueError, SyntaxError, RecursionError, MemoryError)):
            formulas.read_formula(text)


def test_a_list_is_read_in_either_s_quotes_and_nothing_else_is():
    assert formulas.read_list("[['A', 1], [0, 1.5]]") == [["A", 1], [0, 1.5]]
    for text in ("open('x')", "[1][0]", "(1, 2)", "[" * 20_000, json.dumps([1]) * 2, "[1 for x in y]"):
        with pytest.raises((ValueError, RecursionError)):
            formulas.read_list(text)


gym = needs("reasoning_gym")


WORDS = set("eval exec __import__ import_module parse_expr sympify S lambdify pickle marshal dill".split())


@functools.cache
def definitions(path):
    """The functions and classes of a source file by name, and the files of its package that it imports from."""
    by_name, imports = {}, set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            by_name.setdefault(node.name, []).append(node)
        if isinstance(node, ast.ImportFrom) and node.level:
            base = path.parents[node.level - 1].joinpath(*(node.module or "").split("."))
            parts = [base, *(base / alias.name for alias in node.names)]
            imports |= {file for part in parts for file in (part.with_suffix(".py"), part / "__init__.py")}
    return by_name, {file for file in imports if file.is_file()}


@functools.cache
def names(node):
    return {getattr(part, "id", getattr(part, "attr", "")) for part in ast.walk(node)}


def reached(path, node):
    """All names that a function uses, and those of its package that it may call."""
    todo, seen, words = [(path, node)], set(), set()
    while todo:
        path, node = todo.pop()
        if node not in seen:
            seen.add(node)
            used = names(node)
            words |= used
            for file in (path, *definitions(path)[1]):
                todo += [(file, found) for name in used for found in definitions(file)[0].get(name, [])]
    return words


def test_the_footprint_of_a_process_is_the_eighth_number_after_the_id_that_macos_gives(monkeypatch):
    """As sys/resource.h has it: user and system time, two kinds of wakeups, pageins, wired, resident, footprint."""

    def proc_pid_rusage(pid, flavor, usage):
        if pid == 0:
            return -1  # which has ended
        given = struct.pack("=16s18Q", b"an id", *range(100, 118))
        assert flavor == 2 and len(given) == ctypes.sizeof(usage)
        ctypes.memmove(usage, given, len(given))
        return 0

    monkeypatch.setattr(ctypes, "CDLL", lambda path: SimpleNamespace(proc_pid_rusage=proc_pid_rusage))
    assert workers._footprint(5) == 107 and workers._footprint(0) == 0


@gym
def test_every_scorer_that_may_evaluate_its_answer_has_a_reader_in_its_place():
    root = Path(find_spec("reasoning_gym").origin).parent
    paths = [path for path in root.rglob("*.py") if "def score_answer" in path.read_text(encoding="utf-8")]
    scorers = [(path, node) for path in paths for node in definitions(path)[0].get("score_answer", [])]
    assert len(scorers) >= 75
    found = {path.stem for path, node in scorers if reached(path, node) & WORDS}
    own_parser = {"propositional_logic"}  # its parse_expr is a function of its own, which reads logic
    assert found == rg.READERS.keys() | own_parser
