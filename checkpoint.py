"""
Checkpoints: everything a run needs to resume as if never interrupted, and the adapter for other programs.

    checkpoints/step-000050/adapter/           mlx_lm's layout; its tensors are also the float32 masters
    checkpoints/step-000050/state.safetensors  the optimizer; with full fine-tuning also the masters
    checkpoints/step-000050/state.json         the step, checksums of the tensors, small values

A checkpoint directory appears atomically: it is written under a temporary name and renamed. Checksums reveal damaged
tensors, and the previous checkpoint is loaded instead. Left out: randomness and data order, which are functions of the
seed and the step.
"""

import filecmp
import hashlib
import json
import os
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
from mlx.utils import tree_flatten

import gwen
import hub
import lora
from config import load_recipe
from machine import gpu

TENSORS = ("adapter/adapters.safetensors", "state.safetensors")


class State(NamedTuple):
    """A run's state between two steps."""

    step: int
    trainable: dict[str, mx.array]  # float32 masters by parameter name
    optimizer: dict[str, mx.array]  # flattened
    extra: dict[str, Any]  # small JSON values: loss scale, sizes reduced to fit memory


def save(run_dir: str | Path, state: State, model: gwen.Model, *, base: str, keep: int) -> None:
    """
    Writes `checkpoints/step-000050` and removes all but the newest `keep`. On OSError the earlier ones stay intact.

    base: the model's name or path, for the adapter.
    """
    target = path_of(run_dir, state.step)
    scratch, replaced = target.with_name(f".{target.name}.partial"), target.with_name(f"{target.name}.replaced")
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    try:
        adapted = save_adapter(model, scratch / "adapter", base)
        arrays = {f"optimizer/{k}": v for k, v in state.optimizer.items()}
        if not adapted:  # the "full" adapter has the model's dtype, perhaps 16 bits
            arrays |= {f"trainable/{k}": v for k, v in state.trainable.items()}
        save_tensors(scratch / "state.safetensors", arrays)
        digests = {name: _sha256(scratch / name) for name in TENSORS}
        _write_json(scratch / "state.json", {"step": state.step, "sha256": digests, "extra": state.extra})
        if target.exists():  # saving a step again: keep the old one until the new one is in place
            shutil.rmtree(replaced, ignore_errors=True)
            os.replace(target, replaced)
        os.replace(scratch, target)
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise
    shutil.rmtree(replaced, ignore_errors=True)
    for old in saved(run_dir)[:-keep]:
        shutil.rmtree(old)


def load(run_dir: str | Path) -> State:
    """
    The newest intact checkpoint; reports damaged newer ones on stderr.

    Raises ValueError if there is none.
    """
    for replaced in (Path(run_dir) / "checkpoints").glob("*.replaced"):  # from a process killed while saving again
        if (target := replaced.with_suffix("")).exists():
            shutil.rmtree(replaced)
        else:
            os.replace(replaced, target)
    for path in reversed(saved(run_dir)):
        try:
            return _read(path)
        except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
            print(f"checkpoint {path.name} is damaged ({error}); trying the one before", file=sys.stderr)
    config = shlex.quote(str(Path(run_dir) / "config.yaml"))
    raise ValueError(
        f"--resume {run_dir}: it has no intact checkpoint; start over with: uv run train.py --config {config}"
    )


def _read(path: Path) -> State:
    record = json.loads((path / "state.json").read_text())
    if type(record["step"]) is not int or not isinstance(record["extra"], dict):
        raise ValueError("its state.json holds no step")
    for name in TENSORS:
        if _sha256(path / name) != record["sha256"][name]:
            raise ValueError(f"the checksum of {name} does not match")
    adapter, state = (hub.load_tensors(path / name) for name in TENSORS)
    groups: dict[str, dict[str, mx.array]] = {"trainable": {}, "optimizer": {}}
    for name, array in state.items():
        group, _, key = name.partition("/")
        groups[group][key] = array
    return State(record["step"], groups["trainable"] or lora.masters(adapter), groups["optimizer"], record["extra"])


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
    for path in runs.glob("*"):
        if (path / "config.yaml").is_file() and (checkpoints := saved(path)):
            is_unfinished = int(checkpoints[-1].name.removeprefix("step-")) < load_recipe(path / "config.yaml")["steps"]
            found.append((is_unfinished, checkpoints[-1].stat().st_mtime, str(path)))
    if not found:
        raise ValueError(f"--resume: no run in {runs}/ has a checkpoint; name the directory of a run")
    return max(found)[2]


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


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


def _write_json(path: Path, record: dict[str, Any]) -> None:
    path.write_text(json.dumps(record, indent=2) + "\n")
    _sync(path)


def save_adapter(model: gwen.Model, directory: Path, base: str) -> bool:
    """
    Writes the trained weights in mlx_lm's adapter layout; returns whether they are adapters.

    base: the model's name or path. Without adapters, writes a "full" adapter: all weights, un-fused.
    """
    directory.mkdir(parents=True, exist_ok=True)
    adapted = list(lora.layers(model))
    config: dict[str, Any] = {"model": base, "fine_tune_type": "full", "num_layers": len(model.layers)}
    if adapted:
        first = adapted[0][1]
        weights = lora.adapter_weights(model)
        keys = sorted({name.split(".", 3)[3].rpartition(".")[0] for name in weights})
        parameters = {"rank": first.lora_a.shape[1], "scale": first.scale, "dropout": 0.0, "keys": keys}
        config |= {"fine_tune_type": "lora", "lora_parameters": parameters}
    else:
        weights = hub.unfuse_weights(dict(tree_flatten(model.parameters())), model.config)
    save_tensors(directory / "adapters.safetensors", weights, {"format": "mlx"})
    _write_json(directory / "adapter_config.json", config)
    return bool(adapted)


def copy_adapter(run_dir: str | Path, step: int, name: str) -> None:
    """
    Copies the checkpoint's adapter to the run's directory `name`, replacing each file atomically.

    Skips identical files, so a resume works on a full disk. OSError leaves the old file.
    """
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
    """Copies the checkpoint's adapter to `adapter`, and to `adapter-best` if it is the best so far."""
    copy_adapter(run_dir, state.step, "adapter")
    if state.extra["best_step"] == state.step:
        copy_adapter(run_dir, state.step, "adapter-best")
