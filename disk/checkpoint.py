"""
Checkpoints: everything a run needs to resume as if never interrupted, and the adapter for other programs.

    checkpoints/step-000050/adapter/           mlx_lm's layout; its tensors are also the float32 masters
    checkpoints/step-000050/state.safetensors  the optimizer; with full fine-tuning also the masters
    checkpoints/step-000050/state.json         the step, small values, how far the logs went; a checksum of it all

A checkpoint directory appears atomically: it is written under a temporary name and renamed. Where its checksum does
not match, the one before is loaded instead. It also tells what the run was made of and how its logs and other adapters
were, so that a resume goes on with these or names what has changed. Left out: randomness and data order, which are
functions of the seed and the step.
"""

import filecmp
import hashlib
import json
import os
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
from mlx.utils import tree_flatten

from disk import adapters, hub
from disk.run_files import START, JsonLines, refuse_replaced, replace_text, settings_of
from flags import flag_of
from machine import gpu

TENSORS = ("adapter/adapters.safetensors", "state.safetensors")
FILES = ("adapter/adapter_config.json", *TENSORS)  # of a checkpoint, beside its state.json
BEST = "adapter-best"
CUT = [f"{name}.jsonl" for name in ("metrics", "rollouts", "eval", "eval_answers", "warnings")]  # at a checkpoint
SCORES = "judge_scores.jsonl"  # of a judge elsewhere they were paid for, and stay
LOGS = [*CUT, SCORES, "changes.jsonl"]
RANGES: dict[str, tuple[type, Any, Any]] = {  # of the small values, by name
    **dict.fromkeys("step best_step num_draws failures num_skipped good_steps good_chunks".split(), (int, 0, 2**40)),
    **dict.fromkeys(("rollout_batch_size", "chunk_size"), (int, 1, 2**31)),
    "rate": (float, 1e-30, 1.0),
    "value": (float, 1.0, 2.0**24),  # of the loss scale
}


class State(NamedTuple):
    """A run's state between two steps."""

    step: int
    trainable: dict[str, mx.array]  # float32 masters by parameter name
    optimizer: dict[str, mx.array]  # flattened
    extra: dict[str, Any]  # small JSON values: loss scale, sizes reduced to fit memory, what the run was made of
    files: dict[str, Any] = {}  # noqa: RUF012  (never changed; of a loaded one: logs and adapters beside it, see `_files`)


def save(run_dir: str | Path, state: State, write_adapter: Callable[[Path], bool], *, keep: int) -> None:
    """
    Writes `checkpoints/step-000050` and removes all but the newest `keep`. On OSError the earlier ones stay intact.

    write_adapter: writes the trained weights to a directory; whether they are adapters.
    """
    refuse_replaced(Path(run_dir))
    target = path_of(run_dir, state.step)
    scratch, replaced = target.with_name(f".{target.name}.partial"), target.with_name(f"{target.name}.replaced")
    _remove(scratch)
    scratch.mkdir(parents=True)
    try:
        adapted = write_adapter(scratch / "adapter")
        arrays = {f"optimizer/{k}": v for k, v in state.optimizer.items()}
        if not adapted:  # the "full" adapter has the model's dtype, perhaps 16 bits
            arrays |= {f"trainable/{k}": v for k, v in state.trainable.items()}
        save_tensors(scratch / "state.safetensors", arrays)
        is_best = state.extra["best_step"] == state.step
        files = _files(Path(run_dir), best=scratch / "adapter" if is_best else Path(run_dir) / BEST)
        record = json.loads(json.dumps({"step": state.step, "extra": state.extra, "files": files}, allow_nan=False))
        write_json(scratch / "state.json", {"sha256": _checksum(record, scratch)} | record)
        refuse_replaced(Path(run_dir))
        if target.exists():  # saving a step again: keep the old one until the new one is in place
            _remove(replaced)
            os.replace(target, replaced)
        os.replace(scratch, target)
    except BaseException:
        _remove(scratch)
        raise
    _remove(replaced)
    for old in saved(run_dir)[:-keep]:
        _remove(old)


def load(run_dir: str | Path) -> State:
    """
    The newest intact checkpoint; reports damaged newer ones on stderr.

    Raises ValueError if there is none, or if it is of another version of Gwen.
    """
    for replaced in (Path(run_dir) / "checkpoints").glob("*.replaced"):  # from a process killed while saving again
        if (target := replaced.with_suffix("")).exists():
            _remove(replaced)
        else:
            os.replace(replaced, target)
    over = f"start over with: uv run train.py --config {shlex.quote(str(Path(run_dir) / 'config.yaml'))}"
    for path in reversed(saved(run_dir)):
        try:
            return _read(path)
        except OtherVersion as error:
            raise ValueError(
                f"--resume {run_dir}: {path.name} was saved by an earlier version of Gwen; {over}"
            ) from error
        except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
            said = f"checkpoint {path.name} is damaged ({hub.first_line(error)}); trying the one before"
            print(said, file=sys.stderr)
    raise ValueError(f"--resume {run_dir}: it has no intact checkpoint; {over}")


class OtherVersion(Exception):
    """A checkpoint in a layout that was given up."""


def _read(path: Path) -> State:
    _sha256(path / "state.json")  # a pipe would be read for ever
    record = json.loads((path / "state.json").read_text())
    if isinstance(record["sha256"], dict):
        raise OtherVersion
    if record.pop("sha256") != _checksum(record, path):
        raise ValueError("its checksum does not match")
    if path != path_of(path.parent.parent, record["step"]):
        raise ValueError(f"it is of step {record['step']}")
    extra: dict[str, Any] = record["extra"]
    values = {"step": record["step"], **extra, **extra["loss_scale"], **(extra.get("judge") or {})}
    values["best_step"] = 0 if extra["best_step"] is None else extra["best_step"]
    for name, (kind, low, high) in RANGES.items():
        value = values.get(name, low)
        if type(value) is not kind or not low <= value <= high:
            raise ValueError(f"its {name} is {value!r:.60}")
    adapter, state = (hub.load_tensors(path / name) for name in TENSORS)
    groups: dict[str, dict[str, mx.array]] = {"trainable": {}, "optimizer": {}}
    for name, array in state.items():
        group, _, key = name.partition("/")
        groups[group][key] = array
    trainable = groups["trainable"] or adapters.masters(adapter)
    return State(record["step"], trainable, groups["optimizer"], extra, record["files"])


def refuse_other_tensors(state: State, trainable: dict[str, mx.array], dtype: str, run_dir: Path) -> None:
    """ValueError when a checkpoint is of other tensors, or of a model in another type, than the run that resumes it."""
    shapes, ours = ({name: array.shape for name, array in arrays.items()} for arrays in (state.trainable, trainable))
    if shapes != ours:
        raise ValueError(f"--resume {run_dir}: the checkpoint's tensors do not match this configuration")
    if dtype != state.extra["dtype"]:
        raise ValueError(f"--resume {run_dir}: it ran in {state.extra['dtype']}, not {dtype}; set GWEN_DTYPE to that")


def path_of(run_dir: str | Path, step: int) -> Path:
    """The path of a step's checkpoint, which need not exist."""
    return Path(run_dir) / "checkpoints" / f"step-{step:06d}"


def saved(run_dir: str | Path) -> list[Path]:
    """The checkpoints of a run, oldest first, intact or not."""
    named = (Path(run_dir) / "checkpoints").glob("step-*")
    return sorted(path for path in named if path.name.removeprefix("step-").isdecimal())  # else of a killed process


def newest_unfinished(runs: Path = Path("runs")) -> str:
    """The run with the newest checkpoint among those with steps left, else among all. ValueError if there is none."""
    found = []
    for path in [*runs.glob("*"), *runs.glob("*/seed-*")]:
        if (path / "config.yaml").is_file() and (checkpoints := saved(path)):
            newest, num_steps = checkpoints[-1], settings_of(str(path)).get("steps", 0)
            has_steps_left = int(newest.name.removeprefix("step-")) < num_steps
            found.append((has_steps_left, newest.stat().st_mtime, str(path)))
    if not found:
        raise ValueError(f"--resume: no run in {runs}/ has a checkpoint; name the directory of a run")
    return max(found)[2]


# ---- what a checkpoint knows of the files beside it


def digest(*parts: Any) -> str:
    """What tells values from others: 16 digits of a SHA-256 of their representation, where no address counts."""
    found = hashlib.sha256()
    for part in parts:
        found.update(re.sub(" at 0x[0-9a-f]+", "", repr(part)).encode("utf-8", "surrogatepass") + b"\n")
    return found.hexdigest()[:16]


def digest_of_model(model: Any) -> str:
    """The digest of a model's configuration and weights, of which each counts by the sum of its tensor's bits."""
    weights = dict(tree_flatten(model.parameters()))
    words = {4: mx.uint32, 2: mx.uint16}
    sums = {n: mx.sum(mx.view(array.reshape(-1), words[array.itemsize])) for n, array in weights.items()}
    mx.eval(sums)
    of_weights = sorted((n, array.shape, str(array.dtype), sums[n].item()) for n, array in weights.items())
    return digest(model.config, of_weights)


def _checksum(record: dict[str, Any], path: Path) -> str:
    """The checksum of all that a checkpoint holds."""
    said = json.dumps(record, sort_keys=True, allow_nan=False)
    return hashlib.sha256("\n".join([said, *(_sha256(path / name) for name in FILES)]).encode()).hexdigest()


def _files(run_dir: Path, best: Path) -> dict[str, Any]:
    """
    The size and checksum of each log, and the checksums of the adapters besides the newest. Forces logs to disk.

    best: the directory of the best adapter.
    """
    logs = {}
    for log in map(run_dir.joinpath, LOGS):
        if log.is_file():
            _sync(log)
            logs[log.name] = [log.stat().st_size, _sha256(log)]
    held = {BEST: best, START: run_dir / START}
    return {"logs": logs, "adapters": {name: _adapter(path) for name, path in held.items() if path.is_dir()}}


def _adapter(directory: Path) -> str | None:
    """The checksums of an adapter's files; None where one is missing."""
    try:
        return " ".join(_sha256(directory / name) for name in ("adapter_config.json", "adapters.safetensors"))
    except (OSError, ValueError):
        return None


def _sha256(path: Path, size: int | None = None) -> str:
    """The checksum of a file, or of its first bytes. Raises ValueError where there is no file."""
    if not path.is_file():
        raise ValueError(f"{path.name} is no file")
    found, left = hashlib.sha256(), path.stat().st_size if size is None else size
    with path.open("rb") as file:
        while left and (block := file.read(min(left, 2**20))):
            found.update(block)
            left -= len(block)
    return found.hexdigest()


def changes(run_dir: Path, state: State, now: dict[str, Any]) -> Iterator[str]:
    """
    Says what is not as the run knew it after `state`, or by the changes recorded since.

    now: settings, and digests of what the run is made of, by name. Raises ValueError for what no run can become.
    """
    known = _known(run_dir, state)
    for name, value in now.items():
        before = known.get(name, [value])
        if name == "loss_type" and value != before[0] and "sft" in (value, before[0]):
            raise ValueError(f"--resume {run_dir}: its loss_type was {before[0]}, not {value}; start a new run")
        if value not in before:
            yield f"{name} ({before[-1]!r:.60}, now {value!r:.60})" if name in state.extra["settings"] else name


def refuse_changes(run_dir: Path, state: State, said: Iterable[str], allowed: bool) -> None:
    """Raises ValueError naming what has changed, if anything; says so where that is `allowed`."""
    said = list(said)
    if said and not allowed:
        rest = f"changed since step {state.step}; --allow-changes goes on with {'them' if said[1:] else 'it'}"
        raise ValueError(f"--resume {run_dir}: {', '.join(said)} {rest}")
    for one in said:
        print(f"{run_dir}: {one} changed since step {state.step}", file=sys.stderr)


def _known(run_dir: Path, state: State) -> dict[str, list[Any]]:
    """What each setting and each source of a run was at its checkpoint, and became in the resumes since then."""
    known = {name: [value] for name, value in (state.extra["settings"] | state.extra["sources"]).items()}
    if (path := run_dir / "changes.jsonl").is_file():
        for change in JsonLines(path).read():
            match change:
                case {"step": int(step), "setting": str(name), "is": value} if step >= state.step:
                    known.setdefault(name, []).append(value)
    return known


def changed_files(run_dir: Path, state: State) -> Iterator[str]:
    """Says what is not as it was when the checkpoint was saved: the logs up to there, the adapters besides its own."""
    for name, (size, checksum) in state.files["logs"].items():
        path = run_dir / name
        if not path.is_file():
            yield f"{name}, which is missing,"
        elif _sha256(path, size) != checksum:
            steps = {int(step) for step in re.findall(rb'^\{"step": (\d{1,9}),', path.read_bytes(), re.MULTILINE)}
            gap = sorted(set(range(1, state.step + 1)) - steps)
            lost = f", which lacks step{'s' if gap[1:] else ''} {', '.join(map(str, gap[:9]))}," if gap else ""
            yield name + (lost if name in ("metrics.jsonl", "rollouts.jsonl") else "")
    for name, checksum in state.files["adapters"].items():
        if _adapter(run_dir / name) != checksum and not (name == BEST and _has_best(run_dir, state)):
            yield name


def _has_best(run_dir: Path, state: State) -> bool:
    """Whether the checkpoint of the best step has the best adapter."""
    best = state.extra["best_step"]
    return best is not None and _adapter(path_of(run_dir, best) / "adapter") == state.files["adapters"].get(BEST)


def go_on(run_dir: Path, state: State, now: dict[str, Any]) -> None:
    """
    Prepares a run's directory for the step after `state`: cuts the logs, notes what changes from there on.

    Scores that were paid for and changes may have come since; what else stands behind a log's part is dropped.
    """
    for path, (size, checksum) in ((run_dir / name, held) for name, held in state.files["logs"].items()):
        if path.is_file() and _sha256(path, size) == checksum:
            with path.open("rb") as file:
                file.seek(size)
                later = file.read().splitlines(keepends=True)
            drop = path.name in CUT or (path.name == SCORES and not now.get("judge_url"))
            steps = [] if drop else [re.match(rb'\{"step": (\d{1,9}),.*\n', line) for line in later]
            since = [step[0] for step in steps if step and int(step[1]) >= state.step]
            if not since:
                os.truncate(path, size)
            elif since != later:
                replace_text(path, b"".join([path.read_bytes()[:size], *since]).decode(errors="replace"))
    for name, values in sorted(_known(run_dir, state).items()):
        if now.get(name, values[-1]) != values[-1]:
            change = {"step": state.step, "setting": name, "was": values[-1], "is": now[name]}
            JsonLines(run_dir / "changes.jsonl").write(change)
            label = flag_of(name) if name in state.extra["settings"] else name
            print(f"from step {state.step + 1} on: {label} {now[name]} (was {values[-1]!r})", flush=True)


def _remove(path: Path) -> None:
    """Removes a checkpoint, or what somebody has put in its place."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _sync(path: Path) -> None:
    """Forces a written file to disk, so that a rename never becomes durable before the file's bytes."""
    with path.open("rb+") as file:
        os.fsync(file.fileno())


def save_tensors(path: Path, arrays: dict[str, mx.array], metadata: dict[str, str] | None = None) -> None:
    """Writes safetensors and forces them to disk. Raises OSError if they do not fit."""
    try:
        held = dict(sorted(arrays.items()))
        gpu.on_cpu(mx.save_safetensors, str(path), held, metadata=metadata or {"format": "mlx"})
    except RuntimeError as error:
        if gpu.is_too_much(error):
            raise
        raise OSError(f"{path} cannot be written: {error}") from error
    _sync(path)


def write_json(path: Path, record: dict[str, Any]) -> None:
    """Writes a file and forces it to disk."""
    path.write_text(json.dumps(record, indent=2) + "\n")
    _sync(path)


def copy_adapter(run_dir: str | Path, step: int, name: str) -> None:
    """
    Copies the checkpoint's adapter to the run's directory `name`, replacing each file atomically.

    Skips identical files, so a resume works on a full disk. OSError leaves the old file.
    """
    refuse_replaced(Path(run_dir))
    target = Path(run_dir) / name
    target.mkdir(exist_ok=True)
    for file in sorted((path_of(run_dir, step) / "adapter").iterdir()):
        place, scratch = target / file.name, target / f"{file.name}.partial"
        if place.exists() and filecmp.cmp(file, place, shallow=False):
            continue
        try:
            shutil.copyfile(file, scratch)
            _sync(scratch)
            os.replace(scratch, place)
        finally:
            scratch.unlink(missing_ok=True)


def publish(run_dir: str | Path, state: State) -> None:
    """Copies the checkpoint's adapter to `adapter`, and the best one to `adapter-best` if a checkpoint has it."""
    copy_adapter(run_dir, state.step, "adapter")
    best = state.extra["best_step"]
    if best == state.step or (state.files and _has_best(Path(run_dir), state)):
        copy_adapter(run_dir, best, BEST)
