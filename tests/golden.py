"""
Six runs on the bundled model, one of each kind, made once a session: what many tests read, and copy before they change.

Processes of pytest-xdist share them: the first that asks for a run makes it, under a lock, while the others wait.
"""

import contextlib
import fcntl
import io
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

SMALL = "--model demo --batch 2 --groups 4 --max-tokens 8 --steps 3 --save-every 1 --eval-every 2 --eval-limit 8"
ASKED, SAID = {"role": "user", "content": "What is {0} plus {0}?"}, {"role": "assistant", "content": "It is {0}."}
RUNS = {
    "grpo": "",
    "kl": "--beta 0.05 --mini-batches 2 --num-iterations 2",
    "sft": "--loss-type sft --data {at}/chats.jsonl",
    "distill": "--loss-type distill --teacher self --teacher-prompt {at}/teacher.txt",
    "tools": "--model demo:tools --task calculator --max-tokens 48",
    "judge": "--judge-mode decode --judge-think 4",
}


def flags_of(kind: str, at: Path) -> list[str]:
    small = SMALL.replace("--groups 4 --max-tokens 8 ", "") if kind == "sft" else SMALL
    return f"{small} {RUNS[kind].format(at=at)}".split()


def make(kind: str, run: Path) -> None:
    """Trains in this process; what it prints stands beside the run, in NAME.out."""
    import train

    (run.parent / "teacher.txt").write_text("Answer in one short sentence.")
    talks = [{"messages": [one | {"content": one["content"].format(n)} for one in (ASKED, SAID)]} for n in range(40)]
    (run.parent / "chats.jsonl").write_text("".join(json.dumps(talk) + "\n" for talk in talks))
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        train.main([*flags_of(kind, run.parent), "--run-dir", str(run)])
    (run.parent / f"{kind}.out").write_text(printed.getvalue())


@pytest.fixture(scope="session")
def golden(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A function that gives the directory of a run, by its kind. Nobody writes there."""
    base = tmp_path_factory.getbasetemp()
    at = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "golden"
    at.mkdir(exist_ok=True)

    def golden(kind: str) -> Path:
        with (at / f"{kind}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not (at / f"{kind}.out").exists():
                make(kind, at / kind)
        return at / kind

    return golden
