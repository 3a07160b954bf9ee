"""
Commands survive output that is lost or cannot be encoded.

The tests use broken pipes, full disks, closed terminals, and encodings with few characters.
"""

import ast
import contextlib
import json
import os
import pty
import signal
import subprocess
import sys

import pytest
from conftest import ROOT, read_log, run_command
from golden import SMALL
from test_layout import MODULES, PARTS, PROGRAMS, parse

from disk import checkpoint
from machine import output

RUN = [*SMALL.split(), "--steps", "4", "--save-every", "99", "--eval-every", "0"]


def run_bash(line, **options):
    """Runs a line of bash in the checkout, where `gwen` is Python."""
    options = {"cwd": ROOT, "capture_output": True, "text": True, "timeout": 600} | options
    script = f"set -o pipefail; gwen() {{ '{sys.executable}' \"$@\"; }}; {line}"
    return subprocess.run(["bash", "-c", script], **options)


# ---- a stream


@contextlib.contextmanager
def redirect_stdout(descriptor, encoding="utf-8"):
    """Replaces sys.stdout by a stream on a descriptor, as Python makes it."""
    before = sys.stdout
    with open(descriptor, "w", encoding=encoding, closefd=False) as sys.stdout:
        try:
            yield
        finally:
            sys.stdout = before


def test_output_to_a_broken_pipe_is_dropped_and_the_program_continues(capsys):
    reader, writer = os.pipe()
    os.close(reader)
    with redirect_stdout(writer), output.guard_output(is_log=True):
        for _ in range(3):
            print("a line", flush=True)
        sys.stderr.flush()
        is_done = True
    os.close(writer)
    assert is_done
    assert capsys.readouterr().err.count("standard output") == 1


@pytest.mark.parametrize(("is_log", "status"), [(True, None), (False, 1)])
def test_a_full_disk_ends_a_program_that_prints_a_result_but_not_one_that_prints_a_log(
    is_log, status
):
    full = os.open("/dev/full", os.O_WRONLY)
    exits = contextlib.nullcontext() if status is None else pytest.raises(SystemExit)
    with exits as exit_info, redirect_stdout(full), output.guard_output(is_log=is_log):
        print("a line")
    os.close(full)
    assert status is None or exit_info.value.code == status


def test_a_non_blocking_pipe_receives_all_of_a_long_text():
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    drain = subprocess.Popen(["wc", "-c"], stdin=reader, stdout=subprocess.PIPE, text=True)
    os.close(reader)
    with redirect_stdout(writer), output.guard_output():
        print("x" * 999_999)
    os.close(writer)
    assert drain.communicate()[0].strip() == "1000000"


@pytest.mark.parametrize(
    ("encoding", "expected"), [("ascii", rb"\xfc\U0001f600"), ("cp1252", b"\xfc\\U0001f600")]
)
def test_a_character_that_an_encoding_lacks_is_escaped(tmp_path, encoding, expected):
    with (
        (tmp_path / "out").open("wb") as file,
        redirect_stdout(file.fileno(), encoding),
        output.guard_output(),
    ):
        print("ü😀", end="")
    assert (tmp_path / "out").read_bytes() == expected


def test_the_guard_restores_the_streams_and_ignores_the_streams_of_a_notebook():
    notebook = sys.stdout
    with output.guard_output():
        assert sys.stdout is notebook
    full = os.open("/dev/full", os.O_WRONLY)
    with redirect_stdout(full):
        before = sys.stdout
        with output.guard_output(is_log=True):
            inner = sys.stdout
            assert inner is not before
            with output.guard_output():
                assert sys.stdout is inner
        assert sys.stdout is before
    os.close(full)


def test_a_missing_standard_stream_is_replaced_by_an_empty_one(monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr(sys, "stdin", None)
    with output.guard_output():
        print("a line", flush=True)
        assert not sys.stdout.isatty()
        assert sys.stdin.read() == ""
    sys.stdout.flush()


def test_every_command_guards_the_output():
    """The function `main` has the decorator, or calls the `main` of another module."""
    for path in [*PROGRAMS, *MODULES, *PARTS]:
        for node in parse(path).body:
            if isinstance(node, ast.FunctionDef) and node.name == "main":
                decorators = [ast.unparse(decorator) for decorator in node.decorator_list]
                is_guarded = any(text.startswith("guard_output(") for text in decorators)
                source = ast.unparse(node)
                assert is_guarded or ".main(" in source or "run_path(" in source, path


# ---- commands


@pytest.mark.slow
@pytest.mark.parametrize(
    "redirection",
    [
        "| head -1",
        "2>&1 | grep -m1 'step 2/'",
        ">&-",
        "2>&-",
        "<&- >&- 2>&-",
        ">/dev/full",
        "2>/dev/full",
        ">/dev/full 2>&1",
    ],
)
def test_a_run_that_loses_its_output_completes_with_status_0(tmp_path, redirection):
    run = tmp_path / "run"
    process = run_bash(f"gwen train.py {' '.join(RUN)} --run-dir {run} {redirection}")
    assert process.returncode == 0, process.stderr
    assert "Traceback" not in process.stderr
    assert checkpoint.load(run).step == 4
    assert len(read_log(run / "metrics.jsonl")) == 4


@pytest.mark.slow
@pytest.mark.parametrize("line", ["step 1/4", "columns: "])
def test_a_run_continues_after_the_terminal_closed_if_sighup_is_ignored(tmp_path, line):
    """The shell's `disown` does the same. The terminal closes as soon as it shows the line."""
    leader, follower = pty.openpty()
    flags = [*RUN, "--run-dir", str(tmp_path / "run")]
    train = subprocess.Popen(
        [sys.executable, "train.py", *flags],
        cwd=ROOT,
        stdin=follower,
        stdout=follower,
        stderr=follower,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN),
    )
    os.close(follower)
    screen = b""
    while line.encode() not in screen:
        screen += os.read(leader, 4096)
    os.close(leader)
    assert train.wait(600) == 0
    assert checkpoint.load(tmp_path / "run").step == 4


@pytest.mark.slow
@pytest.mark.parametrize("encoding", ["ascii", "cp1252"])
def test_a_run_with_umlauts_and_emoji_works_on_a_terminal_without_them(tmp_path, encoding):
    rows = [{"prompt": f"Wie heißt das? {n} 😀", "answer": f"Größe {n} 😀"} for n in range(40)]
    (tmp_path / "mine.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run_dir = tmp_path / "größe"
    flags = f"--data {tmp_path}/mine.jsonl --steps 2 --eval-every 2 --eval-limit 4"
    flags += f" --run-dir {run_dir}"
    environment = {"PYTHONIOENCODING": encoding, "COLUMNS": "80"}
    options = {"environment": environment, "encoding": encoding}

    process = run_command("train.py", *SMALL.split(), *flags.split(), **options)
    assert process.returncode == 0, process.stderr
    assert r"\U0001f600" in process.stdout

    process = run_command("report.py", "--compare", run_dir, run_dir, **options)
    assert process.returncode == 0, process.stderr
    assert "gr" in process.stdout, process.stderr


@pytest.mark.slow
def test_evaluate_writes_the_file_of_out_although_the_printed_output_is_lost(golden, tmp_path):
    run = golden("grpo")
    out = tmp_path / "answers.jsonl"
    process = run_bash(f"gwen evaluate.py --run {run} --limit 3 --out {out} 2>&1 | head -0")
    assert process.returncode == 0
    assert len(read_log(out)) == 3

    process = run_bash(f"gwen evaluate.py --run {run} --limit 3 --out {out} >/dev/full")
    assert process.returncode == 1
    assert "standard output cannot be written" in process.stderr
    assert len(read_log(out)) == 3


@pytest.mark.parametrize("flags", ["report.py --help", "train.py --print-config --model demo"])
def test_a_command_ends_without_a_traceback_if_the_reader_closes_the_pipe(flags):
    process = run_bash(f"gwen {flags} | head -0")
    assert process.returncode == 0, process.stderr
    assert "Traceback" not in process.stderr, process.stderr
