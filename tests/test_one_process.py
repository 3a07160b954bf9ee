"""A run belongs to one process: another one that would train in its directory ends in a line and writes nothing."""

import contextlib
import errno
import fcntl
import os
import re
import shutil
import signal
import subprocess
import sys
import time

import cpu_blas  # noqa: F401  (before mlx)
import pytest
from conftest import ROOT, catch_message, read_log, read_tree, write_log

import train
from disk import checkpoint, run_files

RUN = [
    *("--model", "demo", "--batch", "2", "--groups", "2", "--max-tokens", "4", "--eval-every", "0"),
    *("--save-every", "1", "--reward-weights", "rubric=0"),
]
BUSY = r"error: {} is being used for training by (process \d+|another process); wait until .*"


def test_a_second_process_is_told_of_the_first_until_that_lets_go(tmp_path):
    with run_files.unlock_run_dirs_after_block():
        run_files.lock_run_dir(tmp_path)
        with pytest.raises(
            ValueError,
            match=f"^{tmp_path} is being used for training by process {os.getpid()}; wait until",
        ):
            run_files.lock_run_dir(tmp_path)
    with run_files.unlock_run_dirs_after_block():
        run_files.lock_run_dir(tmp_path)
    assert read_tree(tmp_path) == {str(tmp_path / "lock"): b""}


HOLDER = "import os, pathlib, sys, time; from disk import run_files; run_files.lock_run_dir(pathlib.Path(sys.argv[1])); {}"


@pytest.mark.parametrize(
    "what",
    [
        "print('held', flush=True); input()",
        "os.fork() and input(); print('held', flush=True); time.sleep(60)",
    ],
    ids=["alone", "with a child"],
)
def test_a_process_that_is_killed_leaves_no_lock_though_its_child_lives_on(tmp_path, what):
    command = [sys.executable, "-c", HOLDER.format(what), str(tmp_path)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, cwd=ROOT, start_new_session=True, **pipes)
    try:
        assert process.stdout.readline() == "held\n"
        with run_files.unlock_run_dirs_after_block():
            with pytest.raises(
                ValueError, match=f"is being used for training by process {process.pid};"
            ):
                run_files.lock_run_dir(tmp_path)
            process.kill()
            process.wait()
            run_files.lock_run_dir(tmp_path)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def test_a_disk_without_locks_is_told_in_a_line(tmp_path, monkeypatch):
    def no_locks(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with pytest.raises(
        ValueError,
        match=f"^{tmp_path} cannot be locked .No locks available.; choose a directory on a disk",
    ):
        run_files.lock_run_dir(tmp_path)


def test_a_lock_that_is_a_link_is_not_written_through(tmp_path):
    (tmp_path / "precious").write_text("kept")
    (tmp_path / "lock").symlink_to(tmp_path / "precious")
    assert "cannot be written" in catch_message(run_files.lock_run_dir, tmp_path)
    assert (tmp_path / "precious").read_text() == "kept"


@pytest.mark.slow
def test_a_run_that_is_being_trained_is_not_touched_by_a_resume(tmp_path, check_refusal):
    run = tmp_path / "run"
    train.main([*RUN, "--steps", "1", "--run-dir", str(run)])
    with run_files.unlock_run_dirs_after_block():
        run_files.lock_run_dir(run)
        before = read_tree(run)
        check_refusal(train.main, ["--resume", run, "--steps", "2"], BUSY.format(run))
        assert read_tree(run) == before


def removed(run):
    shutil.rmtree(run)


def begun_again(run):
    shutil.rmtree(run)
    shutil.copytree(run.with_name("other"), run)


@pytest.mark.parametrize("what", [removed, begun_again])
@pytest.mark.parametrize(
    "place", [(train, "collect_samples"), (checkpoint, "copy_adapter_and_update_best")]
)
def test_a_run_whose_directory_was_removed_or_begun_again_ends_in_a_line_and_writes_nothing(
    tmp_path, monkeypatch, check_refusal, what, place
):
    run, other = tmp_path / "run", tmp_path / "other"
    if what is begun_again:
        train.main([*RUN, "--steps", "1", "--run-dir", str(other)])
    function = getattr(*place)

    def interfere(*args):
        what(run)
        return function(*args)

    monkeypatch.setattr(*place, interfere)
    check_refusal(
        train.main,
        [*RUN, "--steps", "1", "--run-dir", run],
        f"{run} was removed or replaced while this run",
    )
    left, expected = (
        {path.removeprefix(str(at)): content for path, content in read_tree(at).items()}
        for at in (run, other)
    )
    assert left == expected


@pytest.mark.slow
def test_of_processes_that_begin_at_once_in_one_directory_one_trains(tmp_path):
    run, (gate, begin) = tmp_path / "run", os.pipe()
    os.set_inheritable(gate, True)
    waiting = (
        f"import os; import train; os.read({gate}, 1); train.main()"  # until all of them are there
    )
    few = write_log(
        tmp_path / "few.jsonl", [{"prompt": f"{number} plus {number}"} for number in range(40)]
    )
    flags = [
        *RUN[:-2],
        "--data",
        few,
        "--reward",
        "length:5",
        "--steps",
        "2",
        "--run-dir",
        str(run),
    ]
    command = [sys.executable, "-c", waiting, *flags]
    options = dict(
        cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, pass_fds=[gate]
    )
    processes = [subprocess.Popen(command, **options) for _ in range(3)]
    time.sleep(1)
    os.close(begin)
    errors = [process.communicate(timeout=600)[1] for process in processes]
    assert sorted(process.returncode for process in processes) == [0, 2, 2], errors
    for process, text in zip(processes, errors, strict=True):
        line = f"{BUSY}|error: --run-dir {{}} already exists; .* --resume .*\n".format(run, run)
        assert process.returncode == 0 or re.search(line, text), text
    assert [record["step"] for record in read_log(run / "metrics.jsonl")] == [1, 2]
