"""
Creates the directory of a run, finds its files for `--run DIR [--step N]`, and reads its logs.

Only one process at a time may train in a directory, and this process locks the file `lock` there. A
process that only reads needs no lock. reporting/journal.py defines the contents of the logs, and
checkpoint.py saves the state from which a run resumes.
"""

import contextlib
import datetime
import fcntl
import itertools
import json
import math
import os
import re
import shutil
import time
from argparse import Namespace
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

import cpu_blas  # before mlx

from disk import code_record, places
from disk.files import load_json_object
from flags import Parser, add_path_to_os_errors, explain_missing_run
from machine import versions
from text.documents import load_yaml, read_json

LOCK = "lock"
KEYS = {  # the keys that each record in a log must have besides `step`, by the name of the log
    "changes": ("setting", "was", "is"),
    "warnings": ("name", "text"),
    "eval_answers": ("problem", "prompt", "completions", "values", "rewards"),
}
START = "adapter-start"  # the directory for a copy of the adapter that --init-adapter names


# ---- a run and its adapter


def add_adapter_flags(parser: Parser) -> None:
    """Add the flags --run, --step and --adapter, which `fill_defaults_and_find_adapter` reads."""
    parser.add_argument(
        "--run", metavar="DIR", help="directory of a run; its model, adapter and settings are used"
    )
    parser.add_argument(
        "--step",
        type=int,
        metavar="N",
        help="step of the run; 0: before training (default: the newest saved step)",
    )
    parser.add_argument(
        "--adapter",
        metavar="DIR",
        help="directory of a run, of a checkpoint, or of an mlx_lm or PEFT adapter",
    )


def fill_defaults_and_find_adapter(args: Namespace, **defaults: Any) -> str | None:
    """
    Return the path of the adapter that --run, --step or --adapter names, or None.

    Also changes `args`: each flag in `defaults` that was not given is set to the value in the
    settings of the run. If there is no run or no such setting, the flag is set to its default.

    Raises ValueError if the flags contradict each other, if --run is not the directory of a run, or
    if the run has not saved the step.
    """
    if args.step is not None and args.run is None:
        raise ValueError(f"--step {args.step} needs a run; give the directory of a run with --run")
    if args.run is not None and args.adapter is not None:
        raise ValueError(
            f"--adapter {args.adapter} and --run {args.run} both name an adapter; "
            "leave one of these flags out"
        )
    settings = (
        places.settings_with_new_paths(load_settings(args.run), Path(args.run)) if args.run else {}
    )
    for name, default in defaults.items():
        if getattr(args, name) is None:
            setattr(args, name, settings.get(name, default))
    return adapter_path_at_step(args.run, args.step) if args.run else args.adapter


def find_config_file(run: str) -> Path:
    """
    Return the path of the config.yaml of a run.

    Raises ValueError if `run` is not the directory of a run.
    """
    path = Path(run) / "config.yaml"
    if not path.is_file():
        raise ValueError(f"--run {run}: {explain_missing_run(run)}")
    return path


def load_settings(run: str) -> dict[str, Any]:
    """
    Load all settings of a run without checking them, and return them by name.

    Raises ValueError if the settings contain no model.
    """
    settings = load_yaml(find_config_file(run), f"--run {run}: config.yaml")
    if not isinstance(settings, dict) or not settings.get("model"):
        raise ValueError(f"--run {run}: config.yaml contains no model; give the directory of a run")
    return settings


def describe_adapter_at_step(step: int | None) -> str:
    """Return what `adapter_path_at_step` returns for this step, in words."""
    return "newest adapter" if step is None else f"step {step}"


def adapter_path_at_step(run: str, step: int | None) -> str | None:
    """
    Return the path of the adapter that a run saved after `step`, or of its newest adapter.

    For step 0, this is the adapter with which the run started, or None if it started without one.

    run: the directory of the run.
    step: the number of the step; None means the newest adapter.

    Raises ValueError if the run has not saved this adapter.
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
            f"--run {run} has not saved an adapter yet; use --step 0 for the model before training"
        )
    steps = ", ".join(map(str, sorted({0, *list_saved_steps(run)})))
    raise ValueError(f"--step {step} was not saved; the saved steps in {run} are {steps}")


def list_saved_steps(run: str) -> list[int]:
    """List the steps whose checkpoints a run still has, in any order."""
    adapters = Path(run, "checkpoints").glob("step-*/adapter")
    numbers = [path.parent.name.removeprefix("step-") for path in adapters]
    # A process that was killed may have left directories with other names.
    return [int(number) for number in numbers if number.isdecimal()]


# ---- only one process trains in a directory

# The directories that this process has locked, each with the descriptor of its open lock file.
_locks: dict[Path, int] = {}


def _close_locks_in_child() -> None:
    """
    Close the lock files in a child process after a fork.

    A reward function may run in a child process. If the child process runs longer than the run, it
    must not keep the directory locked.
    """
    while _locks:
        os.close(_locks.popitem()[1])


os.register_at_fork(after_in_child=_close_locks_in_child)


@contextlib.contextmanager
def unlock_run_dirs_after_block() -> Iterator[None]:
    """On exit from the block, unlock all directories that were locked inside the block."""
    before = set(_locks)
    try:
        yield
    finally:
        for run_dir in _locks.keys() - before:
            unlock_run_dir(run_dir)


class RunDirReplacedError(ValueError):
    """Raised if the directory of a run was replaced by another directory during the run."""


def refuse_replaced_run_dir(run_dir: Path) -> None:
    """
    Raise RunDirReplacedError if a directory no longer contains the lock file of this process.

    If the lock file is gone, another run may be training there. If this process has never locked
    the directory, no error is raised.
    """
    file = _locks.get(run_dir.resolve())
    try:
        is_same = file is None or os.path.samestat(os.fstat(file), os.stat(run_dir / LOCK))
    except FileNotFoundError:
        is_same = False
    if not is_same:
        raise RunDirReplacedError(
            f"{run_dir} was removed or replaced while this run was training in it; this run ends "
            "and writes nothing more there; give each run a different --run-dir"
        )


def unlock_run_dir(run_dir: Path) -> None:
    """Unlock the directory of a run, so that other processes may train in it."""
    file = _locks.pop(run_dir.resolve(), None)
    if file is not None:
        os.ftruncate(file, 0)
        os.close(file)


def lock_run_dir(run_dir: Path) -> None:
    """
    Lock the directory of a run, so that only this process can train in it until it is unlocked.

    The caller must lock a directory before writing to it. If a process dies, the operating system
    removes its locks.

    Raises ValueError if another process has locked the directory, or if it cannot be locked.
    """
    try:
        file = os.open(run_dir / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
    except OSError as error:
        raise ValueError(_explain_unwritable_directory(run_dir, error)) from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(file, 0)
        os.write(file, str(os.getpid()).encode())
    except BlockingIOError as error:
        pid = os.pread(file, 20, 0).decode(errors="replace")
        owner = f"process {pid}" if pid.isdecimal() else "another process"
        os.close(file)
        raise ValueError(
            f"{run_dir} is being used for training by {owner}; wait until that process has "
            "finished, or stop it"
        ) from error
    except OSError as error:
        os.close(file)
        raise ValueError(
            f"{run_dir} cannot be locked ({error.strerror}); choose a directory on a disk that "
            "supports locks"
        ) from error
    _locks[run_dir.resolve()] = file


def is_locked_by_a_process(run_dir: Path) -> bool:
    """Whether a process has locked the directory of a run, which it does to train there."""
    try:
        with (run_dir / LOCK).open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        # Any other error means that there is no lock file, or that it is not readable.
        return isinstance(error, BlockingIOError)
    return False


# ---- creating a run


def choose_unused_run_dir(task: str, requested_dir: str | None) -> Path:
    """Return the directory for a new run. Raises ValueError if the requested one is in use."""
    if not requested_dir:
        name = re.sub("[^a-z0-9]+", "-", task)[:40]
        started = time.strftime("%Y%m%d-%H%M%S")
        return Path("runs") / f"{name}-{started}"
    path = Path(requested_dir)
    if path.exists():
        is_taken = not path.is_dir() or {file.name for file in path.iterdir()} - {LOCK}
        if is_taken:
            raise ValueError(_explain_taken_directory(path))
    return path


def _explain_taken_directory(path: Path) -> str:
    """An error message about a --run-dir that already exists, with advice."""
    message = f"--run-dir {path} already exists; choose another directory"
    if (path / "config.yaml").is_file():
        message += f", or continue that run with --resume {path}"
    return message


def create_locked_run_dir(
    settings_yaml: str,
    chosen_dir: Path,
    requested_dir: str | None,
    files: Iterable[str] = (),
    code_files: Iterable[Path] = (),
) -> Path:
    """
    Create and lock the directory of a new run, write the settings there, and return the directory.

    settings_yaml: the settings as YAML.
    chosen_dir: the result of `choose_unused_run_dir`.
    requested_dir: the value of --run-dir, or None.
    files: the paths that the settings name.
    code_files: those of the user's files that contain code, rubrics or prompts.

    Raises ValueError if the requested directory is in use or cannot be written.
    """
    path = _create_and_lock_dir(chosen_dir, requested_dir)
    try:
        write_settings_facts_and_code(settings_yaml, path, files, code_files)
    except (ValueError, KeyboardInterrupt):
        shutil.rmtree(path / "code", ignore_errors=True)
        (path / "config.yaml").unlink(missing_ok=True)  # so that the directory can be used again
        raise
    return path


def _create_and_lock_dir(chosen_dir: Path, requested_dir: str | None) -> Path:
    """Create and lock the directory of a run, with -2, -3, ... added if the name is in use."""
    for number in itertools.count(1):
        path = chosen_dir
        if number > 1:
            path = chosen_dir.with_name(f"{chosen_dir.name}-{number}")
        try:
            path.mkdir(parents=True, exist_ok=bool(requested_dir))
            lock_run_dir(path)
            (path / "config.yaml").touch(exist_ok=False)
            break
        except FileExistsError as error:
            if requested_dir:
                raise ValueError(_explain_taken_directory(path)) from error
        except OSError as error:
            raise ValueError(_explain_unwritable_directory(path, error)) from error
    return path


def start_date_or_today(run_dir: Path) -> str:
    """Return the date on which a run began, such as "2026-11-23". A new run begins today."""
    today = datetime.date.today().isoformat()
    file = run_dir / "env.json"
    return str(load_json_object(file).get("begun", today)) if file.is_file() else today


def read_file_and_function_digests(run_dir: Path) -> dict[str, str]:
    """
    Return the digests of the files and functions in a run's settings, by path or function name.

    The digests of modules, and of functions in a program or notebook, are in the newest checkpoint.
    """
    digests = dict(places.read_path_record(run_dir)["files"])
    sources = _read_state_of_newest_checkpoint(run_dir).get("sources", {})
    for name, digest in sources.items():
        if name not in digests and (name.endswith(".py") or name.startswith("__main__:")):
            digests[name] = digest
    return digests


def read_parts_set_in_python(run_dir: str | Path) -> dict[str, str]:
    """
    Return which objects a Python program gave to a run, such as the function `on_samples`.

    The keys of the result are attributes of the trainer, and the values are the names of the
    objects. No flag can set these objects.
    """
    parts: dict[str, str] = _read_state_of_newest_checkpoint(run_dir).get("program_parts", {})
    return parts


def _read_state_of_newest_checkpoint(run_dir: str | Path) -> dict[str, Any]:
    """The state in the newest checkpoint of a run, without tensors; empty without a checkpoint."""
    states = sorted(Path(run_dir, "checkpoints").glob("step-*/state.json"))
    if not states:
        return {}
    state: dict[str, Any] = load_json_object(states[-1]).get("extra", {})
    return state


def write_settings_facts_and_code(
    settings_yaml: str,
    run_dir: Path,
    files: Iterable[str] = (),
    code_files: Iterable[Path] = (),
    step: int = 0,
) -> None:
    """
    Write `config.yaml`, with the settings of a run, and `env.json`, with facts about the machine.

    Also keeps the run's code in `code/`; see disk/code_record.py.

    settings_yaml: the settings as YAML.
    files: the paths that the settings name, which are recorded in `env.json`.
    code_files: those of the user's files that contain code, rubrics or prompts.
    step: the step at which the run starts or resumes.

    Raises ValueError if a file cannot be written.
    """
    environment = versions.collect_environment_facts(cpu_blas.description)
    environment["uncommitted_changes"] = code_record.digest_of_uncommitted_changes()
    environment["begun"] = start_date_or_today(run_dir)
    environment["places"] = places.make_path_record(files, run_dir)
    try:
        write_text_atomically(run_dir / "config.yaml", settings_yaml)
        write_text_atomically(run_dir / "env.json", json.dumps(environment, indent=2) + "\n")
        code_record.save_code_if_changed(run_dir, code_files, step)
    except OSError as error:
        raise ValueError(_explain_unwritable_directory(run_dir, error)) from error


def _explain_unwritable_directory(run_dir: Path, error: OSError) -> str:
    """An error message about a directory in which a run cannot write, with advice."""
    return (
        f"the run directory {run_dir} cannot be written ({error.strerror}); "
        "make room there, or choose another directory"
    )


# ---- files in the directory of a run


def read_log(path: Path, required_keys: Collection[str] = ()) -> Iterator[dict[str, Any]]:
    """
    Yield the records of a log, which has one record per line.

    Yields nothing if the file does not exist. A last line that is incomplete is left out.

    required_keys: keys that each record must have, in addition to `step` and to the keys that the
        constant KEYS contains for this log.

    Raises ValueError if a line is damaged or a record lacks a key.
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
                    f"{path}, line {number} is damaged; remove that line to continue without it"
                ) from error
            yield record


class JsonLinesLog:
    """
    A log file with one JSON object per line. The file is flushed after each line.

    If `is_enabled` is False, nothing is written and nothing is read.
    """

    def __init__(self, path: Path, is_enabled: bool = True):
        self.path = path
        self.is_enabled = is_enabled
        if is_enabled:
            path.touch()

    def write(self, record: dict[str, Any]) -> None:
        """Append a record to the file."""
        if self.is_enabled:
            refuse_replaced_run_dir(self.path.parent)
            with add_path_to_os_errors(self.path), self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(record, allow_nan=False) + "\n")

    def read(self) -> list[dict[str, Any]]:
        """Return all records in the file."""
        return list(read_log(self.path)) if self.is_enabled else []

    def truncate_after(self, step: int) -> None:
        """Remove the first record of a later step, all lines after it, and any incomplete line."""
        if not self.is_enabled:
            return
        num_kept = 0
        for record in read_log(self.path):
            if record["step"] > step:
                break
            num_kept += 1
        with self.path.open("rb") as file:
            num_bytes = sum(map(len, itertools.islice(file, num_kept)))
            os.truncate(self.path, num_bytes)


def replace_nonfinite_by_none(record: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of a record with None in place of inf and nan, which JSON cannot express."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in record.items()
    }


def write_text_atomically(path: Path, text: str) -> None:
    """
    Write a text under a temporary name, and rename the file so that it replaces the file at `path`.

    If the disk is full, the old file is not changed. Raises ValueError if `path` exists but is not
    a regular file.
    """
    path = path.resolve()
    refuse_replaced_run_dir(path.parent)
    if path.exists() and not path.is_file():  # Renaming would replace a device with a file.
        raise ValueError(f"{path} is not a regular file; choose another path")
    scratch = path.with_name(path.name + ".partial")
    try:
        with add_path_to_os_errors(path):  # The error from a failed write names no file.
            scratch.write_text(text, encoding="utf-8")
        os.replace(scratch, path)
    finally:
        scratch.unlink(missing_ok=True)
