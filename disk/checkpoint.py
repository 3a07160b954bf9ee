"""
Checkpoints: the adapter, and all that a run needs to resume as if it had not been interrupted.

    checkpoints/step-000050/adapter/           mlx_lm's layout; also the float32 masters
    checkpoints/step-000050/state.safetensors  the optimizer; for full fine-tuning also the masters
    checkpoints/step-000050/state.json         the step, small values, digests of model and data,
                                               a checksum of everything

A checkpoint directory appears atomically: it is written under a temporary name and renamed. If its
checksum does not match, the checkpoint before it is loaded instead. A checkpoint holds neither
random state nor data order, since both are functions of the seed and the step. It holds no logs
either: a resume cuts them back to its step (reporting/journal.py).
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
FILES = ("adapter/adapter_config.json", *TENSORS)  # a checkpoint's files besides state.json
BEST = "adapter-best"
KEPT = 3  # how many of the newest checkpoints are kept
DIGITS = 16  # the length of a digest


class State(NamedTuple):
    """A run's state between two steps."""

    step: int
    trainable: dict[str, mx.array]  # float32 masters by parameter name
    optimizer: dict[str, mx.array]  # the optimizer's state, flattened
    # Small JSON values: loss scale, sizes reduced to fit memory, settings, digests of sources.
    extra: dict[str, Any]


# ---- saving


def save(run_dir: str | Path, state: State, write_adapter: Callable[[Path], bool]) -> None:
    """
    Write `checkpoints/step-000050` and remove all but the newest KEPT.

    write_adapter: writes the trained weights to a directory; returns whether they are adapters.

    Raises OSError if the files cannot be written; earlier checkpoints stay intact then.
    """
    check_still_owned(Path(run_dir))
    target = checkpoint_path(run_dir, state.step)
    scratch = target.with_name(f".{target.name}.partial")
    replaced = target.with_name(f"{target.name}.replaced")
    _remove(scratch)
    scratch.mkdir(parents=True)
    try:
        _write(scratch, Path(run_dir), state, write_adapter)
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


def _write(
    directory: Path, run_dir: Path, state: State, write_adapter: Callable[[Path], bool]
) -> None:
    """Write a checkpoint's files to a directory. The run's logs are on disk before state.json."""
    is_adapter = write_adapter(directory / "adapter")
    arrays = {f"optimizer/{name}": array for name, array in state.optimizer.items()}
    if not is_adapter:  # a "full" adapter is stored in the model's dtype, perhaps of 16 bits
        arrays |= {f"trainable/{name}": array for name, array in state.trainable.items()}
    save_tensors(directory / "state.safetensors", arrays)
    for log in run_dir.glob("*.jsonl"):
        _sync(log)

    # Converted to JSON and back, so that the checksum covers the values as they will be read.
    text = json.dumps({"step": state.step, "extra": state.extra}, allow_nan=False)
    record = json.loads(text)
    write_synced_json(directory / "state.json", {"sha256": _checksum(record, directory)} | record)


def save_tensors(path: Path, arrays: dict[str, mx.array]) -> None:
    """Write a safetensors file and force it to disk. Raises OSError if it cannot be written."""
    by_name = dict(sorted(arrays.items()))
    try:
        memory.write_on_cpu(mx.save_safetensors, str(path), by_name, metadata={"format": "mlx"})
    except RuntimeError as error:
        if memory.should_try_smaller(error):
            raise
        raise OSError(f"{path} cannot be written: {error}") from error
    _sync(path)


def write_synced_json(path: Path, record: dict[str, Any]) -> None:
    """Write a JSON file and force it to disk."""
    with names_path(path):
        path.write_text(json.dumps(record, indent=2) + "\n")
    _sync(path)


def _sync(path: Path) -> None:
    """Force a file to disk, so that a rename never becomes durable before the file's bytes."""
    with names_path(path), path.open("rb+") as file:
        os.fsync(file.fileno())


def _remove(path: Path) -> None:
    """Remove a checkpoint, or whatever else is at its path."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def publish(run_dir: str | Path, state: State) -> None:
    """
    Copy the checkpoint's adapter to `adapter`, and to `adapter-best` if its step is the best one.

    Files that are already identical are skipped, so that a resume works on a full disk. Raises
    OSError if a file cannot be written; the old file stays then.
    """
    check_still_owned(Path(run_dir))
    source = checkpoint_path(run_dir, state.step) / "adapter"
    names = ["adapter"]
    if state.extra["best_step"] == state.step:
        names.append(BEST)
    for name in names:
        target = Path(run_dir) / name
        target.mkdir(exist_ok=True)
        for file in sorted(source.iterdir()):
            _copy_if_different(file, target / file.name)


def _copy_if_different(file: Path, target: Path) -> None:
    if target.exists() and filecmp.cmp(file, target, shallow=False):
        return
    scratch = target.with_name(f"{target.name}.partial")
    try:
        with names_path(target):
            shutil.copyfile(file, scratch)
        _sync(scratch)
        os.replace(scratch, target)
    finally:
        scratch.unlink(missing_ok=True)


# ---- loading


def load(run_dir: str | Path) -> State:
    """
    Load the newest intact checkpoint, and report newer, damaged ones on stderr.

    Raises ValueError if no checkpoint is intact.
    """
    _restore_replaced(Path(run_dir))
    for path in reversed(saved_checkpoints(run_dir)):
        try:
            return _read(path)
        except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
            reason = hub.first_line(error)
            print(
                f"checkpoint {path.name} is damaged ({reason}); trying the one before",
                file=sys.stderr,
            )
    config = shlex.quote(str(Path(run_dir) / "config.yaml"))
    raise ValueError(
        f"--resume {run_dir}: it has no intact checkpoint; "
        f"start over with: uv run train.py --config {config}"
    )


def _restore_replaced(run_dir: Path) -> None:
    """Clean up after a process that was killed while it replaced a step's checkpoint."""
    for replaced in (run_dir / "checkpoints").glob("*.replaced"):
        target = replaced.with_suffix("")
        if target.exists():
            _remove(replaced)
        else:
            os.replace(replaced, target)


def _read(path: Path) -> State:
    """Read a checkpoint. Raises ValueError or another error if the checkpoint is damaged."""
    record = json.loads((path / "state.json").read_text())
    if record.pop("sha256") != _checksum(record, path):
        raise ValueError("its checksum does not match")
    step = record["step"]
    if path != checkpoint_path(path.parent.parent, step):
        raise ValueError(f"it is of step {step}")

    adapter, arrays = (hub.load_tensors(path / name) for name in TENSORS)
    groups: dict[str, dict[str, mx.array]] = {"trainable": {}, "optimizer": {}}
    for name, array in arrays.items():
        group, _, key = name.partition("/")
        groups[group][key] = array
    trainable = groups["trainable"] or adapters.fuse_adapter_weights(adapter)
    return State(step, trainable, groups["optimizer"], record["extra"])


def _checksum(record: dict[str, Any], path: Path) -> str:
    """The SHA-256 of a checkpoint's record and files."""
    parts = [json.dumps(record, sort_keys=True, allow_nan=False)]
    for name in FILES:
        with (path / name).open("rb") as file:
            parts.append(hashlib.file_digest(file, "sha256").hexdigest())
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def check_tensors(state: State, trainable: dict[str, mx.array], dtype: str, run_dir: Path) -> None:
    """
    Check that a checkpoint's tensors and dtype match those of the run that resumes from it.

    Raises ValueError if they do not.
    """
    saved_shapes = {name: array.shape for name, array in state.trainable.items()}
    shapes = {name: array.shape for name, array in trainable.items()}
    if saved_shapes != shapes:
        raise ValueError(
            f"--resume {run_dir}: the checkpoint's tensors do not match this configuration"
        )
    saved_dtype = state.extra["dtype"]
    if dtype != saved_dtype:
        raise ValueError(
            f"--resume {run_dir}: it ran in {saved_dtype}, not {dtype}; set GWEN_DTYPE to that"
        )


# ---- finding


def checkpoint_path(run_dir: str | Path, step: int) -> Path:
    """The path of a step's checkpoint, whether it exists or not."""
    return Path(run_dir) / "checkpoints" / f"step-{step:06d}"


def saved_checkpoints(run_dir: str | Path) -> list[Path]:
    """The checkpoints of a run, oldest first, intact or not."""
    paths = (Path(run_dir) / "checkpoints").glob("step-*")
    # A killed process may leave other names.
    return sorted(path for path in paths if path.name.removeprefix("step-").isdecimal())


def newest_unfinished(steps: int | None = None, runs: Path = Path("runs")) -> str:
    """
    Find the newest run that has a checkpoint and steps left, or else the newest finished run.

    steps: the value of --steps, if given.

    Raises ValueError if no run can go on.
    """
    configs = [*runs.glob("*/config.yaml"), *runs.glob("*/seed-*/config.yaml")]
    configs.sort(key=lambda path: path.stat().st_mtime, reverse=True)
    run_dirs = [path.parent for path in configs]
    resumable = [run for run in run_dirs if saved_checkpoints(run) and not is_owned(run)]
    if not resumable:
        raise ValueError(f"--resume: no run in {runs}/ can go on; name the directory of a run")

    def is_unfinished(run: Path) -> bool:
        last_step = int(saved_checkpoints(run)[-1].name.removeprefix("step-"))
        num_steps = steps or load_settings(str(run)).get("steps", 0)
        # A value that is not a number is reported when the run's settings are checked.
        return type(num_steps) is not int or last_step < num_steps

    chosen = next(filter(is_unfinished, resumable), resumable[0])
    print(f"--resume goes on with {chosen}", file=sys.stderr)
    return str(chosen)


# ---- the settings, data and model of a run


def digest_of(*values: Any) -> str:
    """
    The digest of values: the first 16 digits of the SHA-256 of their `repr`s.

    Memory addresses in a `repr` are ignored.
    """
    digest = hashlib.sha256()
    for value in values:
        text = re.sub(" at 0x[0-9a-f]+", "", repr(value))
        digest.update(text.encode("utf-8", "surrogatepass") + b"\n")
    return digest.hexdigest()[:DIGITS]


def digest_of_model(model: Any) -> str:
    """
    The digest of a model's configuration and weights.

    Each tensor contributes its name, shape, dtype and the sum of its values' bits as integers.
    """
    weights = dict(tree_flatten(model.parameters()))
    word_types = {4: mx.uint32, 2: mx.uint16}  # by the number of bytes of a value
    sums = {}
    for name, array in weights.items():
        words = mx.view(array.reshape(-1), word_types[array.itemsize])
        sums[name] = mx.sum(words)
    mx.eval(sums)
    rows = [
        (name, array.shape, str(array.dtype), sums[name].item()) for name, array in weights.items()
    ]
    return digest_of(model.config, sorted(rows))


def relocate_state(state: State, moves: places.Moves) -> State:
    """The state with the new paths of moved files, in its settings and in its digests' names."""
    settings = places.map_settings(state.extra["settings"], moves.get)
    sources = {}
    for name, digest in state.extra["sources"].items():
        sources[places.map_paths(name, moves.get)] = digest
    return state._replace(extra=state.extra | {"settings": settings, "sources": sources})


def check_changes(run_dir: Path, state: State, current: dict[str, Any], are_allowed: bool) -> None:
    """
    Refuse changes since the checkpoint was saved, or print them if they are allowed.

    current: the settings, and the digests of the model and data, by name.

    Raises ValueError, which names the changes, if they are not allowed. A change from or to SFT is
    never allowed.
    """
    settings = state.extra["settings"]
    saved = settings | state.extra["sources"]
    changes = []
    for name, value in current.items():
        saved_value = saved.get(name, value)
        if value == saved_value:
            continue
        if name == "loss_type" and "sft" in (value, saved_value):
            raise ValueError(
                f"--resume {run_dir}: its loss_type was {saved_value}, not {value}; start a new run"
            )
        if name in settings:
            changes.append(f"{name} ({saved_value!r:.60}, now {value!r:.60})")
        else:
            changes.append(name)

    if changes and not are_allowed:
        all_changes = ", ".join(changes)
        raise ValueError(
            f"--resume {run_dir}: {all_changes} changed since step {state.step}; "
            "--allow-changes, in Python allow_changes=True, goes on all the same"
        )
    for change in changes:
        print(f"{run_dir}: {change} changed since step {state.step}", file=sys.stderr)
