"""
A run's directory: creates it with its settings, and finds it for commands with `--run runs/NAME [--step N]`.

Only one process at a time trains in it, which holds the lock on its file `lock`; whoever only reads needs none.
Left out: what its logs hold (reporting/journal.py) and the state to resume from (checkpoint.py).
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
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import cpu_blas  # before mlx
import numpy as np

from disk import places
from disk.hub import load_object
from flags import Parser, explain_missing_run, load_yaml, names_path, read_json
from machine import versions

LOCK = "lock"
KEYS = {  # that the records of a log have beside their step
    "changes": ("setting", "was", "is"),
    "warnings": ("name", "text"),
    "eval_answers": ("problem", "prompt", "completions", "values", "rewards"),
}
START = "adapter-start"  # the adapter of --init-adapter, as the run had it before its first step


def add_adapter_flags(parser: Parser) -> None:
    """Adds the flags that `settle` reads."""
    parser.add_argument(
        "--run", metavar="DIR", help="a run, whose model, adapter and settings are taken"
    )
    parser.add_argument(
        "--step",
        type=int,
        metavar="N",
        help="its step N, 0 is before training (default: the newest)",
    )
    parser.add_argument(
        "--adapter", metavar="DIR", help="a run, its checkpoint, or an adapter of mlx_lm or PEFT"
    )


def adapter_from_flags(args: Namespace, **defaults: Any) -> str | None:
    """
    The path of the adapter that the flags name, or None.

    Flags in `defaults` that were left out become the run's settings; without a run, or where it has none, the defaults.
    Raises ValueError for contradictory flags, and what `settings_of` and `adapter_of` raise.
    """
    if args.step is not None and args.run is None:
        raise ValueError(f"--step {args.step} is a step of a run; name it with --run")
    if args.run is not None and args.adapter is not None:
        raise ValueError(
            f"--adapter {args.adapter} and --run {args.run}, which has its own; leave one of them out"
        )
    settings = places.relocate_settings(load_settings(args.run), Path(args.run)) if args.run else {}
    for name, default in defaults.items():
        if getattr(args, name) is None:
            setattr(args, name, settings.get(name, default))
    return adapter_path(args.run, args.step) if args.run else args.adapter


def config_file(run: str) -> Path:
    """The path of a run's settings. Raises ValueError if there is no run."""
    path = Path(run) / "config.yaml"
    if not path.is_file():
        raise ValueError(f"--run {run}: {explain_missing_run(run)}")
    return path


def load_settings(run: str) -> dict[str, Any]:
    """A run's settings by name, as in its file, for commands that need a few. Raises ValueError without a model."""
    settings = load_yaml(config_file(run), f"--run {run}: config.yaml")
    if not isinstance(settings, dict) or not settings.get("model"):
        raise ValueError(
            f"--run {run}: its config.yaml names no model; give the directory of a run"
        )
    return settings


def adapter_path(run: str, step: int | None) -> str | None:
    """
    The path of a run's newest adapter, or of that after `step`; for 0 that of --init-adapter, or None.

    ValueError if nothing was saved yet, or naming the saved steps.
    """
    if step == 0:
        start = Path(run) / START
        return str(start) if (start / "adapter_config.json").is_file() else None
    path = (
        Path(run) / "adapter"
        if step is None
        else Path(run) / "checkpoints" / f"step-{step:06d}" / "adapter"
    )
    if (path / "adapter_config.json").is_file():
        return str(path)
    if step is None:
        raise ValueError(
            f"--run {run} has saved no adapter yet; --step 0 is the model before training"
        )
    raise ValueError(
        f"--step {step}: {run} has the steps {', '.join(map(str, sorted({0, *saved_steps(run)})))}"
    )


def saved_steps(run: str) -> list[int]:
    """The steps whose adapter a run has kept, in any order."""
    numbers = [
        path.parent.name.removeprefix("step-")
        for path in Path(run, "checkpoints").glob("step-*/adapter")
    ]
    return [int(number) for number in numbers if number.isdecimal()]  # else of a killed process


def format_with_interval(record: dict[str, Any], name: str) -> str:
    """An evaluation's figure with its 95% confidence interval, "0.475 \u00b1 0.043", if available."""
    value, half = record.get(f"eval/{name}"), record.get(f"eval/{name}_ci95")
    return (
        "unreadable"
        if value is None
        else f"{value:.3f}" + ("" if half is None else f" \u00b1 {half:.3f}")
    )


def evaluation_line(record: dict[str, Any]) -> str:
    """The headline of an evaluation; "500 of 512 problems" where the others have no figure."""
    names = [
        name
        for name in ("accuracy", "score", "loss", "perplexity", "greedy")
        if f"eval/{name}" in record
    ]
    if record.get("eval/witness") is not None:
        names.insert(1, "witness")
    num, lost = record["eval/num"], record.get("eval/unparsed_frac")
    part = f"{known} of " if (known := record.get("eval/known", num)) != num else ""
    asked = f"{part}{num} {'conversation' if 'eval/loss' in record else 'problem'}{'s' if num != 1 else ''}"
    if (samples := record.get("eval/samples", 1)) > 1:
        asked += f", {samples} answers to each"
    ending = f" | {lost:.0%} of the judge's scores unreadable" if lost else ""
    return f"eval/{' | '.join(f'{name} {format_with_interval(record, name)}' for name in names)} | {asked}{ending}"


MOST_CUT_OFF = 0.5  # of the answers; above it no other figure means much


def token_limit(settings: Mapping[str, Any]) -> str:
    """The flags that limit an answer's length, as "--max-tokens 8"."""
    limit = (
        f"--max-tokens {settings['max_tokens']}" if settings.get("max_tokens") else "--max-tokens"
    )
    has_turns = settings.get("tools") or settings.get("env")
    return f"{limit} or --max-context" if has_turns else limit


def cut_off_message(fraction: float | None, settings: Mapping[str, Any]) -> str:
    """That so many answers are cut off, and what to change; "" where they are few."""
    if fraction is None or fraction <= MOST_CUT_OFF:
        return ""
    limit = token_limit(settings)
    return f"{fraction:.0%} of the answers are cut off at {limit}: raise it, or ask for shorter answers in the prompt"


def public_name(name: Any) -> str:
    """What a setting names, as others may see it: of a path here the last part."""
    is_hub_id = (
        re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*([@:].*)?", str(name)) and not Path(name).exists()
    )
    return str(name) if is_hub_id else Path(name).name


def describe_start(settings: dict[str, Any]) -> str:
    """What a run began with besides its model: ", with the adapter warm", or "" for nothing."""
    given = settings.get("init_adapter")
    return f", with the adapter {public_name(given)}" if given else ""


def make_model_card(
    run: str, step: int | None, library: str = "mlx", opening: Sequence[dict[str, Any]] = ()
) -> str:
    """A README for a run's adapter or model: from what, its held-out figures, and an opening for who talks to it."""
    settings = load_settings(run)
    model, task = public_name(settings["model"]), settings.get("task")
    evaluations = [
        one
        for one in JsonLines(Path(run) / "eval.jsonl").read()
        if step is None or one["step"] <= step
    ]
    rows = [
        f"| {name} | {one['step']} | {format_with_interval(one, name)} | {one['eval/num']} |"
        for one in evaluations[:1] + evaluations[1:][-1:]
        for name in ("accuracy", "score", "witness", "greedy", "loss", "perplexity")
        if one.get(f"eval/{name}") is not None
    ]
    method = {"sft": "SFT", "distill": "distillation"}.get(str(settings.get("loss_type")), "GRPO")
    teacher = (
        f", by the teacher {public_name(settings['teacher'])}" if settings.get("teacher") else ""
    )
    data, _, held_out = str(settings.get("data") or "").partition(",")
    data = (
        public_name(data) + f", held out {public_name(held_out)}" * bool(held_out)
        if data
        else f"the task {task}"
    )
    at = max(saved_steps(run), default=None) if step is None else step
    part = "" if at is None else f", {at} of {settings['steps']} steps"
    head = ["| held-out figure | after steps | value (95%) | problems |", "|---|---|---|---|"]
    lines = [
        *(
            "---",
            *([f"base_model: {model.partition('@')[0]}"] if "/" in model else []),
            f"library_name: {library}",
        ),
        *(f"tags: [{method.lower()}, gwen]", "---", "", f"# {Path(run).name}", ""),
        f"{model}{describe_start(settings)}, trained with {method} by Gwen on {data}{teacher}{part}.",
        *("", *(head if rows else []), *rows),
    ]
    if opening:
        shown = json.dumps(opening, indent=2, ensure_ascii=False)
        lines += [
            f"\nTraining's prompts begin with these messages; send them before yours.\n\n```json\n{shown}\n```"
        ]
    return "\n".join(lines) + "\n"


# ---- one process a run

_locks: dict[
    Path, int
] = {}  # directories that this process owns, and the open files whose locks say so


def _forget_locks() -> None:
    """In the child of a fork: a reward's process that lives on must not keep the lock of a run that is dead."""
    while _locks:
        os.close(_locks.popitem()[1])


os.register_at_fork(after_in_child=_forget_locks)


@contextlib.contextmanager
def release_at_exit() -> Iterator[None]:
    """Lets go at its end of the directories that this process owns by then."""
    before = set(_locks)
    try:
        yield
    finally:
        for run_dir in _locks.keys() - before:
            release(run_dir)


class DirectoryReplaced(ValueError):
    """A run's directory is no longer the one in which it began."""


def check_still_owned(run_dir: Path) -> None:
    """Raises Replaced where this process's lock is not the one in its directory: another run may train there now."""
    file = _locks.get(run_dir.resolve())
    try:
        is_same = file is None or os.path.samestat(os.fstat(file), os.stat(run_dir / LOCK))
    except FileNotFoundError:
        is_same = False
    if not is_same:
        fix = "it ends and leaves nothing there; give each run a --run-dir of its own"
        raise DirectoryReplaced(
            f"{run_dir} was removed or begun again while this run trained in it; {fix}"
        )


def release(run_dir: Path) -> None:
    if (file := _locks.pop(run_dir.resolve(), None)) is not None:
        os.ftruncate(file, 0)
        os.close(file)


def acquire(run_dir: Path) -> None:
    """
    Makes this process the only one that trains in a directory, until `let_go` or the end of `owner`; nothing may be
    written there before.

    The system lets go of a dead process's lock. Raises ValueError naming the process that has it, or why none can.
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
        holder = f"process {pid}" if pid.isdecimal() else "another process"
        os.close(file)
        raise ValueError(
            f"{run_dir} is being trained by {holder}; wait for it, or stop it"
        ) from error
    except OSError as error:
        os.close(file)
        raise ValueError(
            f"{run_dir} cannot be locked ({error.strerror}); choose one on a disk that can"
        ) from error
    _locks[run_dir.resolve()] = file


def is_owned(run_dir: Path) -> bool:
    """Whether a process trains in a directory, as far as locks tell."""
    try:
        with (run_dir / LOCK).open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except (
        OSError
    ) as error:  # no run of this program has been here, or one that may not be looked at
        return isinstance(error, BlockingIOError)
    return False


# ---- creating a run


def choose_run_dir(task: str, asked: str | None) -> Path:
    """The directory for a new run. Raises ValueError if `asked` is taken."""
    path = Path(
        asked
        or Path("runs") / f"{re.sub('[^a-z0-9]+', '-', task)[:40]}-{time.strftime('%Y%m%d-%H%M%S')}"
    )
    if (
        asked
        and path.exists()
        and (not path.is_dir() or {file.name for file in path.iterdir()} - {LOCK})
    ):
        raise ValueError(_exists(path))
    return path


def _exists(path: Path) -> str:
    return f"--run-dir {path} exists; give another" + (
        ", or --resume it" if (path / "config.yaml").is_file() else ""
    )


def make_run_dir(settings: str, chosen: Path, asked: str | None, files: Iterable[str] = ()) -> Path:
    """
    Makes and owns a new run's directory, with its settings as YAML. ValueError if `asked` is taken or unwritable.

    files: see `write`.
    """
    for number in itertools.count(
        1
    ):  # a default name that a run of the same second took gets -2, -3 and so on
        path = chosen if number == 1 else chosen.with_name(f"{chosen.name}-{number}")
        try:
            path.mkdir(parents=True, exist_ok=bool(asked))
            acquire(path)
            (path / "config.yaml").touch(exist_ok=False)
            break
        except FileExistsError as error:
            if asked:
                raise ValueError(_exists(path)) from error
        except OSError as error:
            raise ValueError(_unwritable_error(path, error)) from error
    try:
        write_settings(settings, path, files)
    except (ValueError, KeyboardInterrupt):
        (path / "config.yaml").unlink(missing_ok=True)  # so that the name can be used again
        raise
    return path


def start_date(run_dir: Path) -> str:
    """The day on which a run began, "2026-11-23", today for a new one."""
    file, today = run_dir / "env.json", datetime.date.today().isoformat()
    return str(load_object(file).get("begun", today)) if file.is_file() else today


def write_settings(settings: str, run_dir: Path, files: Iterable[str] = ()) -> None:
    """
    Writes `config.yaml`, which holds the settings, and `env.json` of a run. Raises ValueError if that fails.

    files: the paths that the settings name, for `places`.
    """
    environment = versions.describe_environment(cpu_blas.description) | {
        "begun": start_date(run_dir)
    }
    environment["places"] = places.make_record(files, run_dir)
    try:
        replace_text(run_dir / "config.yaml", settings)
        replace_text(run_dir / "env.json", json.dumps(environment, indent=2) + "\n")
    except OSError as error:
        raise ValueError(_unwritable_error(run_dir, error)) from error


def _unwritable_error(run_dir: Path, error: OSError) -> str:
    return f"the run directory {run_dir} cannot be written ({error.strerror}); make room there or choose another"


# ---- files of a run


def read_log(path: Path, needed: Collection[str] = ()) -> Iterator[dict[str, Any]]:
    """
    The records of a log, one a line, none where it does not exist; a last one that is still being written is left out.

    Raises ValueError naming a line that holds no record with a step, `KEYS` and what is `needed`.
    """
    if not path.exists():
        return
    keys = {"step", *KEYS.get(path.stem, ()), *needed}
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
    """An append-only file with one JSON object per line, flushed after each; one that is not `kept` holds nothing."""

    def __init__(self, path: Path, kept: bool = True):
        self.path, self.kept = path, kept
        if kept:
            path.touch()

    def write(self, record: dict[str, Any]) -> None:
        if self.kept:
            check_still_owned(self.path.parent)
            with names_path(self.path), self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(record, allow_nan=False) + "\n")

    def read(self) -> list[dict[str, Any]]:
        """Every record; see `read_log`."""
        return list(read_log(self.path)) if self.kept else []

    def truncate_after(self, step: int) -> None:
        """Drops everything from a later step's first record on, and a last line that a crash left unfinished."""
        if self.kept:
            num_kept = sum(
                1 for _ in itertools.takewhile(lambda one: one["step"] <= step, read_log(self.path))
            )
            with self.path.open("rb") as file:
                os.truncate(self.path, sum(map(len, itertools.islice(file, num_kept))))


def student_t(degrees: int) -> float:
    """The 97.5% point of Student's t, within 0.15%. Source: Abramowitz and Stegun, 26.7.5, from three degrees on."""
    if degrees < 3:
        return (12.706, 4.303)[degrees - 1]
    return (
        1.95996
        + 2.37227 / degrees
        + 2.8225 / degrees**2
        + 2.55585 / degrees**3
        + 1.58953 / degrees**4
    )


def mean(values: np.ndarray) -> float | None:
    """The mean of the readable values; None if there are none."""
    readable = values[~np.isnan(values)]
    return float(readable.mean()) if readable.size else None


def half_width(by_problem: np.ndarray) -> float | None:
    """
    Half the width of the 95% confidence interval of a mean over problems; None below two values.

    For zeros and ones, the distance to the farther end of Wilson's interval, which keeps a width when all are equal.
    Otherwise Student's t; None where all are equal, which tells no width.
    """
    readable = by_problem[~np.isnan(by_problem)]
    if readable.size < 2:
        return None
    if np.isin(readable, (0, 1)).all():
        share, size = readable.mean(), 1.96**2 / readable.size
        center = (share + size / 2) / (1 + size)
        return float(
            abs(share - center) + math.sqrt(size * (share * (1 - share) + size / 4)) / (1 + size)
        )
    return (
        float(student_t(readable.size - 1) * readable.std(ddof=1) / math.sqrt(readable.size))
        or None
    )


def without_infinities(record: dict[str, Any]) -> dict[str, Any]:
    """A record in which numbers that JSON does not have, inf and nan, are null."""
    return {
        name: None if isinstance(x, float) and not math.isfinite(x) else x
        for name, x in record.items()
    }


def replace_text(path: Path, text: str) -> None:
    """Writes a file under another name and renames it: a full disk leaves the old. ValueError for what is no file."""
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
