"""
Checkpoints: everything a run needs to resume as if never interrupted, and the adapter for other programs.

    checkpoints/step-000050/adapter/           mlx_lm's layout; its tensors are also the float32 masters
    checkpoints/step-000050/state.safetensors  the optimizer; with full fine-tuning also the masters
    checkpoints/step-000050/state.json         the step, small values, digests of model and data; a checksum of it all

A checkpoint directory appears atomically: it is written under a temporary name and renamed. Where its checksum does
not match, the one before is loaded instead. Left out: randomness and data order, which are functions of the seed and
the step; the logs, which a resume cuts back to that step (reporting/journal.py).
"""

import filecmp
import hashlib
import json
import os
import re
import shlex
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
from mlx.utils import tree_flatten

from disk import adapters, hub, places
from disk.run_files import check_still_owned, is_owned, load_settings
from flags import names_path
from machine import memory

TENSORS = ("adapter/adapters.safetensors", "state.safetensors")
FILES = ("adapter/adapter_config.json", *TENSORS)  # of a checkpoint, beside its state.json
BEST = "adapter-best"
KEPT = 3  # checkpoints, the newest


class State(NamedTuple):
    """A run's state between two steps."""

    step: int
    trainable: dict[str, mx.array]  # float32 masters by parameter name
    optimizer: dict[str, mx.array]  # flattened
    extra: dict[
        str, Any
    ]  # small JSON values: loss scale, sizes reduced to fit memory, what the run was made of


def save(run_dir: str | Path, state: State, write_adapter: Callable[[Path], bool]) -> None:
    """
    Writes `checkpoints/step-000050` and removes all but the newest KEPT. On OSError the earlier ones stay intact.

    write_adapter: writes the trained weights to a directory; whether they are adapters.
    """
    check_still_owned(Path(run_dir))
    target = checkpoint_path(run_dir, state.step)
    scratch, replaced = (
        target.with_name(f".{target.name}.partial"),
        target.with_name(f"{target.name}.replaced"),
    )
    _remove(scratch)
    scratch.mkdir(parents=True)
    try:
        adapted = write_adapter(scratch / "adapter")
        arrays = {f"optimizer/{k}": v for k, v in state.optimizer.items()}
        if not adapted:  # the "full" adapter has the model's dtype, perhaps 16 bits
            arrays |= {f"trainable/{k}": v for k, v in state.trainable.items()}
        save_tensors(scratch / "state.safetensors", arrays)
        for log in Path(run_dir).glob("*.jsonl"):
            _sync(log)
        record = json.loads(json.dumps({"step": state.step, "extra": state.extra}, allow_nan=False))
        write_json(scratch / "state.json", {"sha256": _checksum(record, scratch)} | record)
        check_still_owned(Path(run_dir))
        if target.exists():  # saving a step again: keep the old one until the new one is in place
            _remove(replaced)
            os.replace(target, replaced)
        os.replace(scratch, target)
    except BaseException:
        _remove(scratch)
        raise
    _remove(replaced)
    for old in saved_checkpoints(run_dir)[:-KEPT]:
        _remove(old)


def load(run_dir: str | Path) -> State:
    """The newest intact checkpoint; reports damaged newer ones on stderr. Raises ValueError if there is none."""
    for replaced in (Path(run_dir) / "checkpoints").glob(
        "*.replaced"
    ):  # from a process killed while saving again
        if (target := replaced.with_suffix("")).exists():
            _remove(replaced)
        else:
            os.replace(replaced, target)
    for path in reversed(saved_checkpoints(run_dir)):
        try:
            return _read(path)
        except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
            reason = hub.first_line(error)
            print(
                f"checkpoint {path.name} is damaged ({reason}); trying the one before",
                file=sys.stderr,
            )
    over = f"start over with: uv run train.py --config {shlex.quote(str(Path(run_dir) / 'config.yaml'))}"
    raise ValueError(f"--resume {run_dir}: it has no intact checkpoint; {over}")


def _read(path: Path) -> State:
    record = json.loads((path / "state.json").read_text())
    if record.pop("sha256") != _checksum(record, path):
        raise ValueError("its checksum does not match")
    if path != checkpoint_path(path.parent.parent, record["step"]):
        raise ValueError(f"it is of step {record['step']}")
    adapter, state = (hub.load_tensors(path / name) for name in TENSORS)
    groups: dict[str, dict[str, mx.array]] = {"trainable": {}, "optimizer": {}}
    for name, array in state.items():
        group, _, key = name.partition("/")
        groups[group][key] = array
    return State(
        record["step"],
        groups["trainable"] or adapters.split_adapter_weights(adapter),
        groups["optimizer"],
        record["extra"],
    )


def check_tensors(state: State, trainable: dict[str, mx.array], dtype: str, run_dir: Path) -> None:
    """ValueError when a checkpoint is of other tensors, or of a model in another type, than the run that resumes it."""
    shapes, ours = (
        {name: array.shape for name, array in arrays.items()}
        for arrays in (state.trainable, trainable)
    )
    if shapes != ours:
        raise ValueError(
            f"--resume {run_dir}: the checkpoint's tensors do not match this configuration"
        )
    if dtype != state.extra["dtype"]:
        raise ValueError(
            f"--resume {run_dir}: it ran in {state.extra['dtype']}, not {dtype}; set GWEN_DTYPE to that"
        )


def checkpoint_path(run_dir: str | Path, step: int) -> Path:
    """The path of a step's checkpoint, which need not exist."""
    return Path(run_dir) / "checkpoints" / f"step-{step:06d}"


def saved_checkpoints(run_dir: str | Path) -> list[Path]:
    """The checkpoints of a run, oldest first, intact or not."""
    named = (Path(run_dir) / "checkpoints").glob("step-*")
    return sorted(
        path for path in named if path.name.removeprefix("step-").isdecimal()
    )  # else of a killed process


def newest_unfinished(steps: int | None = None, runs: Path = Path("runs")) -> str:
    """
    The run that was begun last of those that have a checkpoint and steps left; where none has, of the finished ones.

    steps: the value of --steps, if given. Raises ValueError where no run can go on.
    """
    settings = [*runs.glob("*/config.yaml"), *runs.glob("*/seed-*/config.yaml")]
    newest_first = sorted(settings, key=lambda path: path.stat().st_mtime, reverse=True)
    found = [
        path.parent
        for path in newest_first
        if saved_checkpoints(path.parent) and not is_owned(path.parent)
    ]
    if not found:
        raise ValueError(f"--resume: no run in {runs}/ can go on; name the directory of a run")

    def is_unfinished(run: Path) -> bool:
        last = int(saved_checkpoints(run)[-1].name.removeprefix("step-"))
        asked = steps or load_settings(str(run)).get("steps", 0)
        return (
            type(asked) is not int or last < asked
        )  # what is no number is told where the run is read

    chosen = next(filter(is_unfinished, found), found[0])
    print(f"--resume goes on with {chosen}", file=sys.stderr)
    return str(chosen)


# ---- what a run was made of


def digest_of(*parts: Any) -> str:
    """What tells values from others: 16 digits of a SHA-256 of their representation, where no address counts."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(
            re.sub(" at 0x[0-9a-f]+", "", repr(part)).encode("utf-8", "surrogatepass") + b"\n"
        )
    return digest.hexdigest()[:16]


def digest_of_model(model: Any) -> str:
    """The digest of a model's configuration and weights, of which each counts by the sum of its tensor's bits."""
    weights = dict(tree_flatten(model.parameters()))
    words = {4: mx.uint32, 2: mx.uint16}
    sums = {
        n: mx.sum(mx.view(array.reshape(-1), words[array.itemsize])) for n, array in weights.items()
    }
    mx.eval(sums)
    of_weights = sorted(
        (n, array.shape, str(array.dtype), sums[n].item()) for n, array in weights.items()
    )
    return digest_of(model.config, of_weights)


def _checksum(record: dict[str, Any], path: Path) -> str:
    parts = [json.dumps(record, sort_keys=True, allow_nan=False)]
    for name in FILES:
        with (path / name).open("rb") as file:
            parts.append(hashlib.file_digest(file, "sha256").hexdigest())
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def follow(state: State, moves: places.Moves) -> State:
    """A state whose settings, and the names of whose digests, have the new places of files that moved."""
    settings = places.map_settings(state.extra["settings"], moves.get)
    sources = {
        places.map_paths(name, moves.get): digest for name, digest in state.extra["sources"].items()
    }
    return state._replace(extra=state.extra | {"settings": settings, "sources": sources})


def check_changes(run_dir: Path, state: State, now: dict[str, Any], allowed: bool) -> None:
    """
    Raises ValueError naming what is not as it was when the checkpoint was saved; prints it where that is `allowed`.

    now: settings, and digests of what the run is made of, by name. No run becomes one of replies, or ceases to be one.
    """
    settings, changed = state.extra["settings"], list[str]()
    before = settings | state.extra["sources"]
    for name, value in now.items():
        was = before.get(name, value)
        if value != was and name == "loss_type" and "sft" in (value, was):
            raise ValueError(
                f"--resume {run_dir}: its loss_type was {was}, not {value}; start a new run"
            )
        if value != was:
            changed.append(f"{name} ({was!r:.60}, now {value!r:.60})" if name in settings else name)
    if changed and not allowed:
        rest = f"changed since step {state.step}; --allow-changes, in Python allow_changes=True, goes on all the same"
        raise ValueError(f"--resume {run_dir}: {', '.join(changed)} {rest}")
    for one in changed:
        print(f"{run_dir}: {one} changed since step {state.step}", file=sys.stderr)


def _remove(path: Path) -> None:
    """Removes a checkpoint, or what somebody has put there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _sync(path: Path) -> None:
    """Forces a written file to disk, so that a rename never becomes durable before the file's bytes."""
    with names_path(path), path.open("rb+") as file:
        os.fsync(file.fileno())


def save_tensors(path: Path, arrays: dict[str, mx.array]) -> None:
    """Writes safetensors and forces them to disk. Raises OSError if they do not fit."""
    try:
        memory.write_on_cpu(
            mx.save_safetensors, str(path), dict(sorted(arrays.items())), metadata={"format": "mlx"}
        )
    except RuntimeError as error:
        if memory.should_try_smaller(error):
            raise
        raise OSError(f"{path} cannot be written: {error}") from error
    _sync(path)


def write_json(path: Path, record: dict[str, Any]) -> None:
    with names_path(path):
        path.write_text(json.dumps(record, indent=2) + "\n")
    _sync(path)


def publish(run_dir: str | Path, state: State) -> None:
    """
    Copies the checkpoint's adapter to `adapter`, and to `adapter-best` if its step is the best one, file by file.

    Skips identical files, so a resume works on a full disk. OSError leaves the old file.
    """
    check_still_owned(Path(run_dir))
    for name in ["adapter"] + [BEST] * (state.extra["best_step"] == state.step):
        target = Path(run_dir) / name
        target.mkdir(exist_ok=True)
        for file in sorted((checkpoint_path(run_dir, state.step) / "adapter").iterdir()):
            place, scratch = target / file.name, target / f"{file.name}.partial"
            if place.exists() and filecmp.cmp(file, place, shallow=False):
                continue
            try:
                with names_path(place):
                    shutil.copyfile(file, scratch)
                _sync(scratch)
                os.replace(scratch, place)
            finally:
                scratch.unlink(missing_ok=True)
