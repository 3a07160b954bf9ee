"""
A run's directory: creates it with its settings, and finds it for `--run runs/NAME [--step N]`.

Only one process at a time trains in it, and holds the lock on the directory's file `lock`. A
process that only reads needs no lock. This file does not cover the contents of the logs
(reporting/journal.py) or the state from which a run resumes (checkpoint.py).
"""

import contextlib
import datetime
import fcntl
import itertools
import json
import math
import os
import re
import time
from argparse import Namespace
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

import cpu_blas  # before mlx

from disk import places
from disk.hub import load_object
from flags import Parser, explain_missing_run, names_path
from machine import versions
from text.documents import load_yaml, read_json

LOCK = "lock"
KEYS = {  # by the name of a log: the keys of each record, besides its step
    "changes": ("setting", "was", "is"),
    "warnings": ("name", "text"),
    "eval_answers": ("problem", "prompt", "completions", "values", "rewards"),
}
START = "adapter-start"  # a copy of the --init-adapter, from before the run's first step


# ---- finding a run and its adapter


def add_adapter_flags(parser: Parser) -> None:
    """Add the flags that `adapter_from_flags` reads."""
    parser.add_argument(
        "--run", metavar="DIR", help="run whose model, adapter and settings are used"
    )
    parser.add_argument(
        "--step",
        type=int,
        metavar="N",
        help="step of the run; 0 is before training (default: the newest)",
    )
    parser.add_argument(
        "--adapter", metavar="DIR", help="a run, its checkpoint, or an adapter of mlx_lm or PEFT"
    )


def adapter_from_flags(args: Namespace, **defaults: Any) -> str | None:
    """
    Return the path of the adapter that the flags name, or None.

    It also sets in `args` each flag of `defaults` that was left out: to the run's setting, or to
    the default if there is no run or the run lacks the setting.

    Raises ValueError for contradictory flags, for a --run that is not a run, and for a step that
    the run has not saved.
    """
    if args.step is not None and args.run is None:
        raise ValueError(f"--step {args.step} is a step of a run; name it with --run")
    if args.run is not None and args.adapter is not None:
        raise ValueError(
            f"--adapter {args.adapter} and --run {args.run}, which has its own; "
            "leave one of them out"
        )
    settings = places.relocate_settings(load_settings(args.run), Path(args.run)) if args.run else {}
    for name, default in defaults.items():
        if getattr(args, name) is None:
            setattr(args, name, settings.get(name, default))
    return adapter_path(args.run, args.step) if args.run else args.adapter


def config_file(run: str) -> Path:
    """The path of a run's config.yaml. Raises ValueError if `run` is not a run's directory."""
    path = Path(run) / "config.yaml"
    if not path.is_file():
        raise ValueError(f"--run {run}: {explain_missing_run(run)}")
    return path


def load_settings(run: str) -> dict[str, Any]:
    """
    Load a run's settings, by name and unchecked, for commands that need only a few of them.

    Raises ValueError if the settings name no model.
    """
    settings = load_yaml(config_file(run), f"--run {run}: config.yaml")
    if not isinstance(settings, dict) or not settings.get("model"):
        raise ValueError(
            f"--run {run}: its config.yaml names no model; give the directory of a run"
        )
    return settings


def adapter_path(run: str, step: int | None) -> str | None:
    """
    The path of a run's adapter after `step`, or of its newest adapter if `step` is None.

    For step 0 this is the run's copy of its --init-adapter; None if the run had none.

    Raises ValueError if the run has saved no adapter yet, or none at that step; in the second case
    the message names the saved steps.
    """
    if step == 0:
        start = Path(run) / START
        return str(start) if (start / "adapter_config.json").is_file() else None
    path = Path(run)
    if step is not None:
        path = path / "checkpoints" / f"step-{step:06d}"
    path = path / "adapter"
    if (path / "adapter_config.json").is_file():
        return str(path)
    if step is None:
        raise ValueError(
            f"--run {run} has saved no adapter yet; --step 0 is the model before training"
        )
    steps = ", ".join(map(str, sorted({0, *saved_steps(run)})))
    raise ValueError(f"--step {step}: {run} has the steps {steps}")


def saved_steps(run: str) -> list[int]:
    """The steps whose adapters a run has kept, in any order."""
    adapters = Path(run, "checkpoints").glob("step-*/adapter")
    numbers = [path.parent.name.removeprefix("step-") for path in adapters]
    # A killed process may leave other names.
    return [int(number) for number in numbers if number.isdecimal()]


# ---- one process per run

# The directories that this process owns, and the open files that hold their locks.
_locks: dict[Path, int] = {}


def _forget_locks() -> None:
    """
    Close the locks in a forked child process.

    A reward may run in a child process. If that process outlives the run, it must not keep the
    run's lock.
    """
    while _locks:
        os.close(_locks.popitem()[1])


os.register_at_fork(after_in_child=_forget_locks)


@contextlib.contextmanager
def release_at_exit() -> Iterator[None]:
    """On leaving the context, release the directories that this process acquired inside it."""
    before = set(_locks)
    try:
        yield
    finally:
        for run_dir in _locks.keys() - before:
            release(run_dir)


class DirectoryReplaced(ValueError):
    """The directory at a run's path is no longer the one in which the run began."""


def check_still_owned(run_dir: Path) -> None:
    """
    Check that the lock file in a directory is still the one that this process holds.

    Raises DirectoryReplaced if it is not, because another run may train there now. A directory that
    this process never acquired passes.
    """
    file = _locks.get(run_dir.resolve())
    try:
        is_same = file is None or os.path.samestat(os.fstat(file), os.stat(run_dir / LOCK))
    except FileNotFoundError:
        is_same = False
    if not is_same:
        raise DirectoryReplaced(
            f"{run_dir} was removed or begun again while this run trained in it; this run ends "
            "and leaves nothing there; give each run a --run-dir of its own"
        )


def release(run_dir: Path) -> None:
    """Release a directory, so that other processes may train in it."""
    file = _locks.pop(run_dir.resolve(), None)
    if file is not None:
        os.ftruncate(file, 0)
        os.close(file)


def acquire(run_dir: Path) -> None:
    """
    Make this process the only one that trains in a directory, until `release`.

    The caller must write nothing there before. The operating system releases the lock of a dead
    process.

    Raises ValueError, which names the process that holds the lock or says why the directory cannot
    be locked.
    """
    try:
        file = os.open(run_dir / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
    except OSError as error:
        raise ValueError(_unwritable_error(run_dir, error)) from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(file, 0)
        os.write(file, str(os.getpid()).encode())
    except BlockingIOError as error:
        pid = os.pread(file, 20, 0).decode(errors="replace")
        owner = f"process {pid}" if pid.isdecimal() else "another process"
        os.close(file)
        raise ValueError(
            f"{run_dir} is being trained by {owner}; wait for it, or stop it"
        ) from error
    except OSError as error:
        os.close(file)
        raise ValueError(
            f"{run_dir} cannot be locked ({error.strerror}); choose one on a disk that can"
        ) from error
    _locks[run_dir.resolve()] = file


def is_owned(run_dir: Path) -> bool:
    """Whether a process trains in a directory, as far as its lock shows."""
    try:
        with (run_dir / LOCK).open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        # Another error means that no run was here, or that its lock may not be read.
        return isinstance(error, BlockingIOError)
    return False


# ---- creating a run


def choose_run_dir(task: str, requested: str | None) -> Path:
    """The directory for a new run. Raises ValueError if the requested one is taken."""
    if not requested:
        name = re.sub("[^a-z0-9]+", "-", task)[:40]
        started = time.strftime("%Y%m%d-%H%M%S")
        return Path("runs") / f"{name}-{started}"
    path = Path(requested)
    if path.exists():
        is_taken = not path.is_dir() or {file.name for file in path.iterdir()} - {LOCK}
        if is_taken:
            raise ValueError(_taken_error(path))
    return path


def _taken_error(path: Path) -> str:
    message = f"--run-dir {path} exists; give another"
    if (path / "config.yaml").is_file():
        message += ", or --resume it"
    return message


def make_run_dir(
    settings: str, chosen: Path, requested: str | None, files: Iterable[str] = ()
) -> Path:
    """
    Create and own a new run's directory, and write its settings there.

    settings: YAML.
    files: the paths that the settings name.

    Raises ValueError if the requested directory is taken or cannot be written.
    """
    path = _create_dir(chosen, requested)
    try:
        write_settings(settings, path, files)
    except (ValueError, KeyboardInterrupt):
        (path / "config.yaml").unlink(missing_ok=True)  # so that the name can be used again
        raise
    return path


def _create_dir(chosen: Path, requested: str | None) -> Path:
    """Create a run's directory; append -2, -3, ... if another run has taken the default name."""
    for number in itertools.count(1):
        path = chosen if number == 1 else chosen.with_name(f"{chosen.name}-{number}")
        try:
            path.mkdir(parents=True, exist_ok=bool(requested))
            acquire(path)
            (path / "config.yaml").touch(exist_ok=False)
            break
        except FileExistsError as error:
            if requested:
                raise ValueError(_taken_error(path)) from error
        except OSError as error:
            raise ValueError(_unwritable_error(path, error)) from error
    return path


def start_date(run_dir: Path) -> str:
    """The day on which a run began, as "2026-11-23"; today for a new run."""
    today = datetime.date.today().isoformat()
    file = run_dir / "env.json"
    return str(load_object(file).get("begun", today)) if file.is_file() else today


def write_settings(settings: str, run_dir: Path, files: Iterable[str] = ()) -> None:
    """
    Write `config.yaml`, which holds the settings, and `env.json` of a run.

    settings: YAML.
    files: the paths that the settings name, for `places.make_record`.

    Raises ValueError if a file cannot be written.
    """
    environment = versions.describe_environment(cpu_blas.description)
    environment["begun"] = start_date(run_dir)
    environment["places"] = places.make_record(files, run_dir)
    try:
        replace_text(run_dir / "config.yaml", settings)
        replace_text(run_dir / "env.json", json.dumps(environment, indent=2) + "\n")
    except OSError as error:
        raise ValueError(_unwritable_error(run_dir, error)) from error


def _unwritable_error(run_dir: Path, error: OSError) -> str:
    return (
        f"the run directory {run_dir} cannot be written ({error.strerror}); "
        "make room there or choose another"
    )


# ---- files of a run


def read_log(path: Path, required_keys: Collection[str] = ()) -> Iterator[dict[str, Any]]:
    """
    Yield the records of a log, one per line; nothing if the file does not exist.

    A last record that is still being written is left out.

    Raises ValueError, which names the line, if a record lacks its step, one of its log's KEYS or
    one of `required_keys`.
    """
    if not path.exists():
        return
    keys = {"step", *KEYS.get(path.stem, ()), *required_keys}
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                return
            try:
                record = read_json(line)
                if not keys <= record.keys() or type(record["step"]) is not int:
                    raise TypeError
            except (ValueError, AttributeError, TypeError) as error:
                raise ValueError(
                    f"{path}, line {number} is damaged; remove it to go on without it"
                ) from error
            yield record


class JsonLines:
    """
    An append-only file with one JSON object per line, flushed after each.

    If `kept` is False, it writes and reads nothing.
    """

    def __init__(self, path: Path, kept: bool = True):
        self.path = path
        self.kept = kept
        if kept:
            path.touch()

    def write(self, record: dict[str, Any]) -> None:
        if self.kept:
            check_still_owned(self.path.parent)
            with names_path(self.path), self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(record, allow_nan=False) + "\n")

    def read(self) -> list[dict[str, Any]]:
        """Read every record, as `read_log` does."""
        return list(read_log(self.path)) if self.kept else []

    def truncate_after(self, step: int) -> None:
        """Remove everything from the first record of a later step, and an unfinished last line."""
        if not self.kept:
            return
        num_kept = 0
        for record in read_log(self.path):
            if record["step"] > step:
                break
            num_kept += 1
        with self.path.open("rb") as file:
            num_bytes = sum(map(len, itertools.islice(file, num_kept)))
            os.truncate(self.path, num_bytes)


def without_infinities(record: dict[str, Any]) -> dict[str, Any]:
    """The record with None in place of inf and nan, which JSON does not have."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in record.items()
    }


def replace_text(path: Path, text: str) -> None:
    """
    Write a file under a temporary name and rename it, so that a full disk leaves the old file.

    Raises ValueError if the path is not a regular file.
    """
    path = path.resolve()
    check_still_owned(path.parent)
    if path.exists() and not path.is_file():  # renaming would put a file in place of a device
        raise ValueError(f"{path} is no file; name another")
    scratch = path.with_name(path.name + ".partial")
    try:
        with names_path(path):  # a failed write does not name its file
            scratch.write_text(text, encoding="utf-8")
        os.replace(scratch, path)
    finally:
        scratch.unlink(missing_ok=True)
