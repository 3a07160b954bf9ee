"""
Saves and loads checkpoints, from which a run resumes as if it had not been interrupted.

    checkpoints/step-000050/adapter/           the adapter in the mlx_lm layout, in float32
    checkpoints/step-000050/state.safetensors  the optimizer; for full fine-tuning also the weights
    checkpoints/step-000050/state.json         the step, the loss scale, the settings, digests of
                                               the model and the data, a checksum of all files

A checkpoint directory is written under a temporary name and then renamed, so that it never appears
incomplete. If the checksum does not match, the previous checkpoint is loaded instead. A checkpoint
contains no random state and no data order, because both follow from the seed and the step. Logs are
not saved either; reporting/journal.py shortens the logs to the step at which a run resumes.
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

import cpu_blas  # noqa: F401  (before mlx)
import mlx.core as mx
from mlx.utils import tree_flatten

from disk import adapters, places
from disk.files import first_line_of_error, load_safetensors
from disk.run_files import is_locked_by_a_process, load_settings, refuse_replaced_run_dir
from flags import add_path_to_os_errors
from machine import memory
from text.commands import command_prefix

TENSORS = ("adapter/adapters.safetensors", "state.safetensors")
FILES = ("adapter/adapter_config.json", *TENSORS)  # the files of a checkpoint besides state.json
BEST = "adapter-best"
MAX_CHECKPOINTS = 3  # the number of checkpoints to keep; older ones are removed
DIGITS = 16  # the number of hexadecimal digits in a digest


IsAdapter = bool  # whether the written weights are an adapter


class TrainingState(NamedTuple):
    """The state of a run between two steps."""

    step: int
    trainable: dict[str, mx.array]  # the trained weights in float32, by parameter name
    optimizer: dict[str, mx.array]  # the state of the optimizer, by flattened name

    # JSON values: the loss scale, sizes that were reduced to fit memory, settings, and digests.
    extra: dict[str, Any]


# ---- saving


def save_and_remove_old(
    run_dir: str | Path, state: TrainingState, write_weights: Callable[[Path], IsAdapter]
) -> None:
    """
    Write the checkpoint of a step, and remove all but the newest MAX_CHECKPOINTS checkpoints.

    write_weights: a function that writes the trained weights to a directory, and returns whether
        the weights are an adapter.

    Raises OSError if the files cannot be written; earlier checkpoints stay intact.
    """
    refuse_replaced_run_dir(Path(run_dir))
    target = checkpoint_path(run_dir, state.step)
    scratch = target.with_name(f".{target.name}.partial")
    replaced = target.with_name(f"{target.name}.replaced")
    _remove_file_or_directory(scratch)
    scratch.mkdir(parents=True)
    try:
        _write_checkpoint_files(scratch, Path(run_dir), state, write_weights)
        refuse_replaced_run_dir(Path(run_dir))
        if target.exists():  # An old checkpoint of the step is kept until the new one is in place.
            _remove_file_or_directory(replaced)
            os.replace(target, replaced)
        os.replace(scratch, target)
    except BaseException:
        _remove_file_or_directory(scratch)
        raise
    _remove_file_or_directory(replaced)
    for old in list_checkpoints(run_dir)[:-MAX_CHECKPOINTS]:
        _remove_file_or_directory(old)


def _write_checkpoint_files(
    directory: Path, run_dir: Path, state: TrainingState, write_weights: Callable[[Path], IsAdapter]
) -> None:
    """
    Write the files of a checkpoint to a directory.

    Before state.json is written, the logs of the run are forced to disk.
    """
    is_adapter = write_weights(directory / "adapter")
    arrays = {f"optimizer/{name}": array for name, array in state.optimizer.items()}
    if not is_adapter:
        # The directory `adapter` may contain 16-bit weights, so save float32 weights too.
        arrays |= {f"trainable/{name}": array for name, array in state.trainable.items()}
    save_tensors(directory / "state.safetensors", arrays)
    for log in run_dir.glob("*.jsonl"):
        _force_to_disk(log)

    # The record is converted to JSON and back, so that its checksum is the same after loading.
    text = json.dumps({"step": state.step, "extra": state.extra}, allow_nan=False)
    record = json.loads(text)
    write_synced_json(directory / "state.json", {"sha256": _checksum(record, directory)} | record)


def save_tensors(path: Path, arrays: dict[str, mx.array]) -> None:
    """Write a safetensors file and force it to disk. Raises OSError if writing fails."""
    by_name = dict(sorted(arrays.items()))
    try:
        memory.write_on_cpu_despite_gpu_errors(
            mx.save_safetensors, str(path), by_name, metadata={"format": "mlx"}
        )
    except RuntimeError as error:
        if memory.should_retry_with_less_work(error):
            raise
        raise OSError(f"{path} cannot be written: {error}") from error
    _force_to_disk(path)


def write_synced_json(path: Path, record: dict[str, Any]) -> None:
    """Write a JSON file and force it to disk."""
    with add_path_to_os_errors(path):
        path.write_text(json.dumps(record, indent=2) + "\n")
    _force_to_disk(path)


def _force_to_disk(path: Path) -> None:
    """Force the content of a file to disk. This must happen before the file is renamed."""
    with add_path_to_os_errors(path), path.open("rb+") as file:
        os.fsync(file.fileno())


def _remove_file_or_directory(path: Path) -> None:
    """Remove the file or directory at a path, if there is one."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def copy_adapter_and_update_best(run_dir: str | Path, state: TrainingState) -> None:
    """
    Copy the adapter of a saved checkpoint to the directory `adapter` of its run.

    If the best evaluation so far is at the step of the checkpoint, the adapter is also copied to
    `adapter-best`.
    Identical files are not copied, so that a run can resume on a full disk.

    Raises OSError if a file cannot be written; the old file is not changed.
    """
    refuse_replaced_run_dir(Path(run_dir))
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
        with add_path_to_os_errors(target):
            shutil.copyfile(file, scratch)
        _force_to_disk(scratch)
        os.replace(scratch, target)
    finally:
        scratch.unlink(missing_ok=True)


# ---- loading


def load(run_dir: str | Path) -> TrainingState:
    """
    Load the newest intact checkpoint. A line on stderr reports each newer, damaged checkpoint.

    Raises ValueError if no checkpoint is intact.
    """
    _finish_or_undo_replacement(Path(run_dir))
    for path in reversed(list_checkpoints(run_dir)):
        try:
            return _read_checkpoint(path)
        except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
            reason = first_line_of_error(error)
            print(
                f"checkpoint {path.name} is damaged ({reason}); trying the checkpoint before it",
                file=sys.stderr,
            )
    config = shlex.quote(str(Path(run_dir) / "config.yaml"))
    raise ValueError(
        f"--resume {run_dir}: this run has no intact checkpoint; "
        f"start over with: {command_prefix()} --config {config}"
    )


def _finish_or_undo_replacement(run_dir: Path) -> None:
    """Clean up after a process that was killed while it replaced a checkpoint."""
    for replaced in (run_dir / "checkpoints").glob("*.replaced"):
        target = replaced.with_suffix("")
        if target.exists():
            _remove_file_or_directory(replaced)
        else:
            os.replace(replaced, target)


def _read_checkpoint(path: Path) -> TrainingState:
    """Read a checkpoint. Raises ValueError or another error if the checkpoint is damaged."""
    record = json.loads((path / "state.json").read_text())
    if record.pop("sha256") != _checksum(record, path):
        raise ValueError("the checksum does not match")
    step = record["step"]
    if path != checkpoint_path(path.parent.parent, step):
        raise ValueError(f"the files are from step {step}")

    adapter, arrays = (load_safetensors(path / name) for name in TENSORS)
    groups: dict[str, dict[str, mx.array]] = {"trainable": {}, "optimizer": {}}
    for name, array in arrays.items():
        group, _, key = name.partition("/")
        groups[group][key] = array
    trainable = groups["trainable"] or adapters.fuse_lora_matrices(adapter)
    return TrainingState(step, trainable, groups["optimizer"], record["extra"])


def _checksum(record: dict[str, Any], checkpoint_dir: Path) -> str:
    """The SHA-256 of the files of a checkpoint and of the record in its state.json."""
    parts = [json.dumps(record, sort_keys=True, allow_nan=False)]
    for name in FILES:
        with (checkpoint_dir / name).open("rb") as file:
            parts.append(hashlib.file_digest(file, "sha256").hexdigest())
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def refuse_different_tensors(
    state: TrainingState, trainable: dict[str, mx.array], dtype: str, run_dir: Path
) -> None:
    """
    Raise ValueError if the tensors or the dtype of a checkpoint differ from those of a resumed run.

    trainable: the trainable tensors of the run.
    dtype: the data type in which the run computes.
    """
    saved_shapes = {name: array.shape for name, array in state.trainable.items()}
    shapes = {name: array.shape for name, array in trainable.items()}
    if saved_shapes != shapes:
        raise ValueError(
            f"--resume {run_dir}: the tensors of the checkpoint do not match the model and the "
            "settings of this run"
        )
    saved_dtype = state.extra["dtype"]
    if dtype != saved_dtype:
        raise ValueError(
            f"--resume {run_dir}: the run used the data type {saved_dtype}, not {dtype}; "
            f"set GWEN_DTYPE={saved_dtype}"
        )


# ---- paths of checkpoints and runs


def checkpoint_path(run_dir: str | Path, step: int) -> Path:
    """The path of the checkpoint of a step, which may not exist."""
    return Path(run_dir) / "checkpoints" / f"step-{step:06d}"


def list_checkpoints(run_dir: str | Path) -> list[Path]:
    """List the checkpoints of a run, oldest first. Damaged checkpoints are included."""
    paths = (Path(run_dir) / "checkpoints").glob("step-*")
    # A process that was killed may have left other files in this directory.
    return sorted(path for path in paths if path.name.removeprefix("step-").isdecimal())


def choose_and_print_run_to_resume(num_steps: int | None = None, runs: Path = Path("runs")) -> str:
    """
    Find the newest run that has a checkpoint and is not finished, or else the newest finished run.

    num_steps: the value of --steps, if the flag is given. A run is then finished if it has taken so
        many steps. Otherwise, it is finished if it has taken the steps in its own settings.

    Raises ValueError if there is no run to resume.
    """
    configs = [*runs.glob("*/config.yaml"), *runs.glob("*/seed-*/config.yaml")]
    configs.sort(key=lambda path: path.stat().st_mtime, reverse=True)
    run_dirs = [path.parent for path in configs]
    resumable = [
        run for run in run_dirs if list_checkpoints(run) and not is_locked_by_a_process(run)
    ]
    if not resumable:
        raise ValueError(f"--resume: no run in {runs}/ can be resumed; give the directory of a run")

    def is_unfinished(run: Path) -> bool:
        """Whether the newest checkpoint of a run is before its last step."""
        last_step = int(list_checkpoints(run)[-1].name.removeprefix("step-"))
        planned_steps = num_steps or load_settings(str(run)).get("steps", 0)
        # If this value is not a number, the check of the settings reports it later.
        return type(planned_steps) is not int or last_step < planned_steps

    chosen = next(filter(is_unfinished, resumable), resumable[0])
    print(f"--resume continues the run {chosen}", file=sys.stderr)
    return str(chosen)


# ---- changes to the settings, data and model of a run


def digest_of_reprs(*values: Any) -> str:
    """
    Return the first 16 digits of one SHA-256 over the `repr` of every value.

    Memory addresses in a `repr` do not change the digest.
    """
    digest = hashlib.sha256()
    for value in values:
        text = re.sub(" at 0x[0-9a-f]+", "", repr(value))
        digest.update(text.encode("utf-8", "surrogatepass") + b"\n")
    return digest.hexdigest()[:DIGITS]


def digest_of_config_and_weights(model: Any) -> str:
    """
    Return a digest of the configuration and the weights of a model.

    For each tensor, the digest covers the name, the shape, the dtype and a sum. To compute the sum,
    the bits of each value are read as an integer.
    """
    weights = dict(tree_flatten(model.parameters()))
    word_types = {4: mx.uint32, 2: mx.uint16}  # by the number of bytes per value
    sums = {}
    for name, array in weights.items():
        words = mx.view(array.reshape(-1), word_types[array.itemsize])
        sums[name] = mx.sum(words)
    mx.eval(sums)
    rows = [
        (name, array.shape, str(array.dtype), sums[name].item()) for name, array in weights.items()
    ]
    return digest_of_reprs(model.config, sorted(rows))


def copy_with_new_paths(state: TrainingState, moves: places.Moves) -> TrainingState:
    """Return a copy of the state in which the paths of moved files are replaced by new paths."""
    settings = places.replace_paths_in_settings(state.extra["settings"], moves.get)
    sources = {}
    for name, digest in state.extra["sources"].items():
        sources[places.replace_paths(name, moves.get)] = digest
    return state._replace(extra=state.extra | {"settings": settings, "sources": sources})


def refuse_or_report_changes(
    run_dir: Path, state: TrainingState, current: dict[str, Any], are_allowed: bool
) -> None:
    """
    Raise ValueError if a setting, the data or the model has changed since the checkpoint was saved.

    Allowed changes are printed. A change from SFT to another loss, or from another loss to SFT, is
    never allowed.

    current: the present settings, and digests of the model and the data, by name.
    are_allowed: whether other changes are allowed (--allow-changes).
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
                f"--resume {run_dir}: the loss type of this run was {saved_value}, not {value}; "
                "start a new run"
            )
        if name in settings:
            changes.append(f"{name} ({saved_value!r:.60}, now {value!r:.60})")
        else:
            changes.append(name)

    if changes and not are_allowed:
        all_changes = ", ".join(changes)
        raise ValueError(
            f"--resume {run_dir}: {all_changes} changed since step {state.step}; "
            "to resume nevertheless, add --allow-changes (in Python, allow_changes=True)"
        )
    for change in changes:
        print(f"{run_dir}: {change} changed since step {state.step}", file=sys.stderr)
