"""
A run belongs to one process: another one that would train in its directory ends in a line and writes nothing.

`python -m tests.test_one_process 50` lets that many times two or three processes begin at once in one directory, new or
begun, and kills some that have won.
"""

import contextlib
import errno
import fcntl
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import cpu_blas  # noqa: F401  (before mlx)
import pytest

import train
from disk import run_files

ROOT = Path(__file__).parent.parent
RUN = [
    *("--model", "demo", "--batch", "2", "--groups", "2", "--max-tokens", "4", "--eval-every", "0"),
    *("--save-every", "1", "--reward-weights", "rubric=0"),
]
BUSY = r"error: {} is being trained by (process \d+|another process); wait for it, or stop it"
TAKEN = r"error: --run-dir {} exists; give another, or --resume it"


def contents(directory):
    return {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def test_a_second_process_is_told_of_the_first_until_that_lets_go(tmp_path):
    with run_files.owner():
        run_files.own(tmp_path)
        with pytest.raises(ValueError, match=f"^{tmp_path} is being trained by process {os.getpid()}; wait for it, or"):
            run_files.own(tmp_path)
    with run_files.owner():
        run_files.own(tmp_path)
    assert contents(tmp_path) == {tmp_path / "lock": b""}


HOLDER = "import os, pathlib, sys, time; from disk import run_files; run_files.own(pathlib.Path(sys.argv[1])); {}"


@pytest.mark.parametrize(
    "what",
    ["print('held', flush=True); input()", "os.fork() and input(); print('held', flush=True); time.sleep(60)"],
    ids=["alone", "with a child"],
)
def test_a_process_that_is_killed_leaves_no_lock_though_its_child_lives_on(tmp_path, what):
    command = [sys.executable, "-c", HOLDER.format(what), str(tmp_path)]
    process = subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        assert process.stdout.readline() == "held\n"
        with run_files.owner():
            with pytest.raises(ValueError, match=f"is being trained by process {process.pid};"):
                run_files.own(tmp_path)
            process.kill()
            process.wait()
            run_files.own(tmp_path)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def test_a_disk_without_locks_is_told_in_a_line(tmp_path, monkeypatch):
    def no_locks(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with pytest.raises(ValueError, match=f"^{tmp_path} cannot be locked .No locks available.; choose one on a disk"):
        run_files.own(tmp_path)


def test_a_lock_that_is_a_link_is_not_written_through(tmp_path):
    (tmp_path / "precious").write_text("kept")
    (tmp_path / "lock").symlink_to(tmp_path / "precious")
    with pytest.raises(ValueError, match="cannot be written"):
        run_files.own(tmp_path)
    assert (tmp_path / "precious").read_text() == "kept"


@pytest.mark.slow
def test_a_run_that_is_being_trained_is_not_touched_by_a_resume(tmp_path, refused):
    run = tmp_path / "run"
    train.main([*RUN, "--steps", "1", "--run-dir", str(run)])
    with run_files.owner():
        run_files.own(run)
        before = contents(run)
        refused(train.main, ["--resume", run, "--steps", "2"], BUSY.format(run))
        assert contents(run) == before


@pytest.mark.slow
def test_of_processes_that_begin_at_once_in_one_directory_one_trains():
    done = subprocess.run(
        [sys.executable, "-m", "tests.test_one_process", "3"], cwd=ROOT, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr


# ---- many races


def race(num, directory, flags, kill_after=None):
    """Status and output of `num` processes that begin at once; kill_after: a line of the winner, which is killed."""
    gate, pids = os.pipe(), []
    for number in range(num):
        (directory / str(number)).write_text("")
        if (pid := os.fork()) == 0:
            said = os.open(directory / str(number), os.O_WRONLY)
            os.dup2(said, 1)
            os.dup2(said, 2)
            try:
                os.close(gate[1])
                os.read(gate[0], 1)  # until all of them are there
                train.main(list(map(str, flags)))
                os._exit(0)
            except SystemExit as error:
                os._exit(int(error.code or 0))
            finally:
                os._exit(99)  # a bug: its traceback would be the harness's
        pids.append(pid)
    os.close(gate[0])
    os.close(gate[1])
    statuses = {}
    while len(statuses) < num:
        for number, pid in enumerate(pids):
            if number in statuses:
                continue
            if kill_after and kill_after in (directory / str(number)).read_text():
                os.kill(pid, signal.SIGKILL)
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                statuses[number] = os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    return [(statuses[number], (directory / str(number)).read_text()) for number in range(num)]


def check(outcomes, run, winner):
    """One process has the status `winner`; each of the others has said why it ended, in one line."""
    assert sorted(status for status, _ in outcomes) == [winner] + [2] * (len(outcomes) - 1), outcomes
    for status, said in outcomes:
        errors = [line for line in said.splitlines() if not line.startswith("model: ")]
        if status == 2:
            line = f"{BUSY}|{TAKEN}".format(re.escape(str(run)), re.escape(str(run)))
            assert len(errors) == 1 and re.fullmatch(line, errors[0]), said


def steps_of(run, log):
    return [json.loads(line)["step"] for line in (run / log).read_text().splitlines()]


def main(count):
    rng, races = random.Random(count), {"new": 0, "resumed": 0, "killed": 0}
    with tempfile.TemporaryDirectory() as directory:
        directory, step, run = Path(directory), 0, None
        for number in range(count):
            num, kind = rng.choice([2, 3]), ["new", "killed", "resumed", "resumed"][number % 4]
            if kind == "new":
                run, step = directory / f"run{number}", 2
                check(race(num, directory, [*RUN, "--steps", step, "--run-dir", run]), run, 0)
            else:
                step += 2
                killed = f"\nstep {step - 1}/" if kind == "killed" else None
                flags = ["--resume", run, "--steps", step]
                check(race(num, directory, flags, killed), run, -signal.SIGKILL if killed else 0)
            races[kind] += 1
            if kind != "killed":
                assert steps_of(run, "metrics.jsonl") == list(range(1, step + 1)), run
                assert steps_of(run, "rollouts.jsonl") == [n for n in range(1, step + 1) for _ in range(4)]
            print(f"{number + 1}: {kind}, {num} processes, step {step}", flush=True)
        alone = directory / "alone"
        check(race(1, directory, [*RUN, "--steps", step, "--run-dir", alone]), alone, 0)
        names = ("adapter/adapters.safetensors", "adapter/adapter_config.json")
        assert all((run / name).read_bytes() == (alone / name).read_bytes() for name in names)
    print(f"{count} races {races}: one process trained each time, the others ended in a line; each step is logged once")


if __name__ == "__main__":
    main(int(sys.argv[1]))
