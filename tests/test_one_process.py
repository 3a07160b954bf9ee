"""Only one process trains a run: another process ends in one line and writes nothing."""

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

SMALL = "--model demo --batch 2 --groups 2 --max-tokens 4 --eval-every 0 --save-every 1".split()
RUN = [*SMALL, "--reward-weights", "rubric=0"]
BUSY = r"error: {} is being used for training by (process \d+|another process); wait until .*"


def test_a_second_process_is_refused_until_the_first_releases_the_lock(tmp_path):
    holder = f"^{tmp_path} is being used for training by process {os.getpid()}; wait until"
    with run_files.unlock_run_dirs_after_block():
        run_files.lock_run_dir(tmp_path)
        with pytest.raises(ValueError, match=holder):
            run_files.lock_run_dir(tmp_path)
    with run_files.unlock_run_dirs_after_block():
        run_files.lock_run_dir(tmp_path)
    assert read_tree(tmp_path) == {str(tmp_path / "lock"): b""}


HOLDER = """
import os, pathlib, sys, time
from disk import run_files
run_files.lock_run_dir(pathlib.Path(sys.argv[1]))
{}
"""


@pytest.mark.parametrize(
    "code",
    [
        "print('held', flush=True); input()",
        "os.fork() and input(); print('held', flush=True); time.sleep(60)",
    ],
    ids=["alone", "with a child"],
)
def test_a_killed_process_leaves_no_lock_even_if_its_child_lives_on(tmp_path, code):
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER.format(code), str(tmp_path)],
        cwd=ROOT,
        start_new_session=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout.readline() == "held\n"
        holder = f"is being used for training by process {process.pid};"
        with run_files.unlock_run_dirs_after_block():
            with pytest.raises(ValueError, match=holder):
                run_files.lock_run_dir(tmp_path)
            process.kill()
            process.wait()
            run_files.lock_run_dir(tmp_path)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def test_a_disk_without_locks_gives_an_error_of_one_line(tmp_path, monkeypatch):
    def refuse_lock(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse_lock)
    line = f"^{tmp_path} cannot be locked .No locks available.; choose a directory on a disk"
    with pytest.raises(ValueError, match=line):
        run_files.lock_run_dir(tmp_path)


def test_locking_writes_nothing_to_the_target_of_a_link(tmp_path):
    (tmp_path / "precious").write_text("kept")
    (tmp_path / "lock").symlink_to(tmp_path / "precious")
    assert "cannot be written" in catch_message(run_files.lock_run_dir, tmp_path)
    assert (tmp_path / "precious").read_text() == "kept"


@pytest.mark.slow
def test_a_resume_changes_no_file_of_a_run_that_another_process_trains(tmp_path, check_refusal):
    run = tmp_path / "run"
    train.main([*RUN, "--steps", "1", "--run-dir", str(run)])
    with run_files.unlock_run_dirs_after_block():
        run_files.lock_run_dir(run)
        files = read_tree(run)
        check_refusal(train.main, ["--resume", run, "--steps", "2"], BUSY.format(run))
        assert read_tree(run) == files


def remove(run):
    shutil.rmtree(run)


def replace(run):
    """Puts another run in the place of a run."""
    shutil.rmtree(run)
    shutil.copytree(run.with_name("other"), run)


def relative_tree(directory):
    """The content of each file, by path within the directory."""
    tree = read_tree(directory)
    return {path.removeprefix(str(directory)): content for path, content in tree.items()}


@pytest.mark.parametrize("interfere", [remove, replace])
@pytest.mark.parametrize(
    "place", [(train, "collect_samples"), (checkpoint, "copy_adapter_and_update_best")]
)
def test_a_run_whose_directory_is_removed_or_replaced_ends_in_one_line_and_writes_nothing(
    tmp_path, monkeypatch, check_refusal, interfere, place
):
    run = tmp_path / "run"
    other = tmp_path / "other"
    if interfere is replace:
        train.main([*RUN, "--steps", "1", "--run-dir", str(other)])
    function = getattr(*place)

    def interfere_and_call(*args):
        interfere(run)
        return function(*args)

    monkeypatch.setattr(*place, interfere_and_call)
    message = f"{run} was removed or replaced while this run"
    check_refusal(train.main, [*RUN, "--steps", "1", "--run-dir", run], message)
    assert relative_tree(run) == relative_tree(other)


@pytest.mark.slow
def test_only_one_of_several_processes_trains_if_they_start_at_once_in_one_directory(tmp_path):
    run = tmp_path / "run"
    rows = [{"prompt": f"{number} plus {number}"} for number in range(40)]
    data = write_log(tmp_path / "few.jsonl", rows)
    flags = f"--data {data} --reward length:5 --steps 2 --run-dir {run}".split()

    # Each process waits until the pipe closes.
    gate, opener = os.pipe()
    os.set_inheritable(gate, True)
    code = f"import os; import train; os.read({gate}, 1); train.main()"
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code, *SMALL, *flags],
            cwd=ROOT,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            pass_fds=[gate],
        )
        for _ in range(3)
    ]
    time.sleep(1)
    os.close(opener)

    errors = [process.communicate(timeout=600)[1] for process in processes]
    assert sorted(process.returncode for process in processes) == [0, 2, 2], errors
    for process, text in zip(processes, errors, strict=True):
        line = f"{BUSY}|error: --run-dir {{}} already exists; .* --resume .*\n".format(run, run)
        assert process.returncode == 0 or re.search(line, text), text
    assert [record["step"] for record in read_log(run / "metrics.jsonl")] == [1, 2]
