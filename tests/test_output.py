"""Output that is lost or cannot be encoded ends no command: pipes, full disks, closed terminals, narrow encodings."""

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


def shell(line, **options):
    """A line of bash in the checkout, where `gwen` is Python."""
    how = {"cwd": ROOT, "capture_output": True, "text": True, "timeout": 600} | options
    return subprocess.run(
        ["bash", "-c", f"set -o pipefail; gwen() {{ '{sys.executable}' \"$@\"; }}; {line}"], **how
    )


# ---- a stream


@contextlib.contextmanager
def standard_output(descriptor, encoding="utf-8"):
    """sys.stdout on a descriptor, as Python makes it."""
    before = sys.stdout
    with open(descriptor, "w", encoding=encoding, closefd=False) as sys.stdout:
        try:
            yield
        finally:
            sys.stdout = before


def test_what_a_broken_pipe_cannot_take_is_dropped_and_the_body_goes_on(capsys):
    reader, writer = os.pipe()
    os.close(reader)
    with standard_output(writer), output.guard_output(is_log=True):
        for _ in range(3):
            print("a line", flush=True)
        sys.stderr.flush()
        is_done = True
    os.close(writer)
    assert is_done
    assert capsys.readouterr().err.count("standard output") == 1


@pytest.mark.parametrize(("is_log", "status"), [(True, None), (False, 1)])
def test_a_result_that_a_full_disk_cannot_take_ends_with_status_1_and_a_log_does_not(
    is_log, status
):
    full = os.open("/dev/full", os.O_WRONLY)
    ended = contextlib.nullcontext() if status is None else pytest.raises(SystemExit)
    with ended as caught, standard_output(full), output.guard_output(is_log=is_log):
        print("a line")
    os.close(full)
    assert status is None or caught.value.code == status


def test_a_pipe_that_does_not_block_gets_all_of_a_long_text():
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    drain = subprocess.Popen(["wc", "-c"], stdin=reader, stdout=subprocess.PIPE, text=True)
    os.close(reader)
    with standard_output(writer), output.guard_output():
        print("x" * 999_999)
    os.close(writer)
    assert drain.communicate()[0].strip() == "1000000"


@pytest.mark.parametrize(
    ("encoding", "shown"), [("ascii", rb"\xfc\U0001f600"), ("cp1252", b"\xfc\\U0001f600")]
)
def test_a_character_that_an_encoding_lacks_is_escaped(tmp_path, encoding, shown):
    with (
        (tmp_path / "out").open("wb") as file,
        standard_output(file.fileno(), encoding),
        output.guard_output(),
    ):
        print("ü😀", end="")
    assert (tmp_path / "out").read_bytes() == shown


def test_streams_are_as_before_afterwards_and_those_of_a_notebook_are_left_alone():
    notebook = sys.stdout
    with output.guard_output():
        assert sys.stdout is notebook
    full = os.open("/dev/full", os.O_WRONLY)
    with standard_output(full):
        before = sys.stdout
        with output.guard_output(is_log=True):
            inner = sys.stdout
            with output.guard_output():
                assert sys.stdout is inner is not before
        assert sys.stdout is before
    os.close(full)


def test_a_stream_that_python_has_not_is_one_that_drops_what_is_printed(monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr(sys, "stdin", None)
    with output.guard_output():
        print("a line", flush=True)
        assert not sys.stdout.isatty() and sys.stdin.read() == ""
    sys.stdout.flush()


def test_every_command_is_guarded():
    """Its `main` is, or calls the `main` of another module, which is."""
    for path in [*PROGRAMS, *MODULES, *PARTS]:
        for node in parse(path).body:
            if isinstance(node, ast.FunctionDef) and node.name == "main":
                decorators = [ast.unparse(decorator) for decorator in node.decorator_list]
                hands_on = ".main(" in ast.unparse(node) or "run_path(" in ast.unparse(node)
                assert hands_on or any(text.startswith("guard_output(") for text in decorators), (
                    path
                )


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
def test_a_run_whose_output_is_gone_trains_to_its_end_with_status_0(tmp_path, redirection):
    run = tmp_path / "run"
    done = shell(f"gwen train.py {' '.join(RUN)} --run-dir {run} {redirection}")
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert checkpoint.load(run).step == 4
    assert len(read_log(run / "metrics.jsonl")) == 4


@pytest.mark.slow
@pytest.mark.parametrize("line", ["step 1/4", "columns: "])
def test_a_run_goes_on_after_its_terminal_closed_where_sighup_is_ignored(tmp_path, line):
    """As after `disown`: the terminal closes as soon as a line is seen."""
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
    shown = b""
    while line.encode() not in shown:
        shown += os.read(leader, 4096)
    os.close(leader)
    assert train.wait(600) == 0
    assert checkpoint.load(tmp_path / "run").step == 4


@pytest.mark.slow
@pytest.mark.parametrize("encoding", ["ascii", "cp1252"])
def test_a_terminal_without_umlauts_and_emoji_shows_a_run_with_them(tmp_path, encoding):
    rows = [{"prompt": f"Wie heißt das? {n} 😀", "answer": f"Größe {n} 😀"} for n in range(40)]
    (tmp_path / "mine.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = f"--data {tmp_path}/mine.jsonl --steps 2 --eval-every 2 --eval-limit 4 --run-dir {tmp_path}/größe"
    environment = {"PYTHONIOENCODING": encoding, "COLUMNS": "80"}
    how = {"environment": environment, "encoding": encoding}
    done = run_command("train.py", *SMALL.split(), *flags.split(), **how)
    assert done.returncode == 0, done.stderr
    assert r"\U0001f600" in done.stdout
    compared = run_command("report.py", "--compare", *[tmp_path / "größe"] * 2, **how)
    assert compared.returncode == 0 and "gr" in compared.stdout, compared.stderr


@pytest.mark.slow
def test_what_evaluate_writes_to_out_is_there_though_nobody_reads_what_it_prints(golden, tmp_path):
    run, out = golden("grpo"), tmp_path / "answers.jsonl"
    done = shell(f"gwen evaluate.py --run {run} --limit 3 --out {out} 2>&1 | head -0")
    assert done.returncode == 0
    assert len(read_log(out)) == 3
    lost = shell(f"gwen evaluate.py --run {run} --limit 3 --out {out} >/dev/full")
    assert lost.returncode == 1 and "standard output cannot be written" in lost.stderr
    assert len(read_log(out)) == 3


@pytest.mark.parametrize("flags", ["report.py --help", "train.py --print-config --model demo"])
def test_a_command_whose_reader_left_ends_without_a_traceback(flags):
    done = shell(f"gwen {flags} | head -0")
    assert (done.returncode, done.stderr.count("Traceback")) == (0, 0), done.stderr
