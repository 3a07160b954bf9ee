"""The bundled Python tool: what code may do in its process, and that hostile code ends no episode."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from conftest import message_of
from test_tools import EXAMPLES, answer, box_of, call, say, talker  # noqa: F401  (a fixture)

from problems import interpreter, seal, workers
from problems.episodes import Episodes

HOSTILE = {
    "while True: pass": "took longer than its limit",
    "while True:\n try:\n  while True: pass\n except BaseException: pass": "took longer than its limit",
    "held = []\nwhile True: held.append(bytes(10**7))": "MemoryError",
    "print('x' * 10**6)": "printed more than",
    "import socket\nsocket.socket().connect(('127.0.0.1', 80))": "not permitted",
    "import os\nprint(os.fork())": "not permitted",
    "import subprocess\nsubprocess.run(['ls'])": "not permitted",
    "print(open('/etc/passwd').read())": "not permitted",
    "open('left behind', 'w')": "not permitted",
    "import os\nos.kill(os.getppid(), 9)": "not permitted",
    "import os\nos._exit(0)": "ended its process",
    "1 / 0": "ZeroDivisionError",
    "x = (": "SyntaxError",
}


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(interpreter, "SECONDS", 0.5)
    monkeypatch.setattr(workers, "BUSY", 1000.0)  # no wall clock ends it


def test_code_computes_and_gives_what_it_prints():
    assert interpreter.python("import math, fractions\nprint(math.comb(40, 20))\nprint(1)") == "137846528820\n1\n"
    assert interpreter.python("def f(n): return 1 if n < 2 else n * f(n - 1)\nprint(f(5))\nraise SystemExit") == "120\n"
    assert interpreter.python("import json, statistics, datetime, re, heapq, random, collections, decimal") == ""
    assert len(interpreter.python(f"print('\\U0001f600' * {interpreter.LONGEST - 1})")) == interpreter.LONGEST


def test_no_call_finds_what_another_left():
    assert interpreter.python("import builtins, math\nbuiltins.x = math.pi = 3") == ""
    assert "NameError" in message_of(interpreter.python, "print(x)")


def test_calls_side_by_side_have_their_own_answers():
    with ThreadPoolExecutor(6) as threads:
        assert list(threads.map(interpreter.python, [f"print({n})" for n in range(6)])) == [f"{n}\n" for n in range(6)]


@pytest.mark.slow
@pytest.mark.skipif(seal.platform.machine() not in seal._MACHINES, reason="no seccomp: hostile code might get out")
def test_hostile_code_is_told_as_an_error_and_the_episode_goes_on(talker):  # noqa: F811
    talk = Episodes(box_of(talker, [interpreter.python], tool_timeout=60.0, max_turns=99), EXAMPLES, [0], "0")
    for turn, (code, error) in enumerate(HOSTILE.items()):
        ids, messages = answer(talk, talker, call("python", {"code": code}))
        assert isinstance(ids, list) and len(messages) == 2 * turn + 2
        assert messages[-1]["content"].startswith('{"error": ') and error in messages[-1]["content"], code
    ids, messages = answer(talk, talker, call("python", {"code": "print(6 * 7)"}))
    assert messages[-1]["content"] == "42\n"


@pytest.mark.slow
def test_code_that_ignores_every_signal_is_ended_by_its_processor_time():
    ignores = (
        "import signal\nfor one in range(1, 32):\n try: signal.signal(one, signal.SIG_IGN)\n except Exception: pass\n"
    )
    assert message_of(interpreter.python, f"{ignores}while True: pass") == "ended its process with status -9"


def test_a_call_s_time_begins_when_it_passes_its_gate(talker):  # noqa: F811
    def waits() -> str:
        """Waits."""
        time.sleep(0.15)
        return "done"

    waits.gate = threading.Semaphore(1)
    talk, num = Episodes(box_of(talker, [waits], tool_timeout=0.6), EXAMPLES * 10, [0] * 10, "0"), 10
    for row in range(num):
        say(talk, talker, row, call("waits", {}))
    found = {}
    while len(found) < num:  # the last one waits for 1.4 s
        found |= talk.replies(wait=True)
    made = [one for row in range(num) for one in talk.rows[row].made]
    assert len(made) == num and all(one["error"] is None and one["seconds"] < 0.6 for one in made)
