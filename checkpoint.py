"""
Checkpoints: everything that a run needs to go on as if nothing had happened, and the adapter for others to use.

A checkpoint is a directory that appears at once or not at all: it is written beside its place and renamed. Its
tensors carry a checksum, so that a damaged one is noticed and the one before it is taken. What is left out: randomness
and data order, which are functions of the seed and the step.
"""

import hashlib
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
from mlx.utils import tree_flatten

import gwen
import hub
import lora
import telemetry

KEEP = 3  # newest checkpoints that stay on disk: one to go on from, and two in case it is damaged


class State(NamedTuple):
    """A run between two steps."""

    step: int
    trainable: dict[str, mx.array]  # float32 masters by parameter name
    optimizer: dict[str, mx.array]  # flattened
    extra: dict[str, Any]  # small JSON values: loss scale, sizes that memory forced


def save(run_dir: str | Path, state: State) -> Path:
    """Writes `checkpoints/step-000050`, removes all but the newest few. OSError leaves the earlier ones alone."""
    folder = Path(run_dir) / "checkpoints"
    target, scratch = folder / f"step-{state.step:06d}", folder / f".step-{state.step:06d}.partial"
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    try:
        arrays = {f"trainable/{k}": v for k, v in state.trainable.items()}
        arrays |= {f"optimizer/{k}": v for k, v in state.optimizer.items()}
        save_tensors(scratch / "state.safetensors", arrays)
        digest = _sha256(scratch / "state.safetensors")
        record = {"step": state.step, "sha256": digest, "extra": state.extra}
        (scratch / "state.json").write_text(json.dumps(record, indent=2) + "\n")
        _sync(scratch / "state.json")
        shutil.rmtree(target, ignore_errors=True)
        os.replace(scratch, target)
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise
    for old in saved(run_dir)[:-KEEP]:
        shutil.rmtree(old)
    return target


def load(run_dir: str | Path) -> State:
    """
    The newest checkpoint that is whole; says on stderr when a newer one is damaged.

    Raises ValueError when there is none.
    """
    for path in reversed(saved(run_dir)):
        try:
            return _read(path)
        except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
            print(f"checkpoint {path.name} is damaged ({error}); trying the one before", file=sys.stderr)
    raise ValueError(f"--resume {run_dir}: no whole checkpoint under {Path(run_dir) / 'checkpoints'}")


def _read(path: Path) -> State:
    record = json.loads((path / "state.json").read_text())
    if type(record["step"]) is not int or not isinstance(record["extra"], dict):
        raise ValueError("its state.json holds no step")
    if _sha256(path / "state.safetensors") != record["sha256"]:
        raise ValueError("its checksum does not match")
    groups: dict[str, dict[str, mx.array]] = {"trainable": {}, "optimizer": {}}
    for name, array in hub.load_tensors(path / "state.safetensors").items():
        group, _, key = name.partition("/")
        groups[group][key] = array
    return State(record["step"], groups["trainable"], groups["optimizer"], record["extra"])


def saved(run_dir: str | Path) -> list[Path]:
    """The checkpoints of a run, oldest first, whole or not."""
    return sorted((Path(run_dir) / "checkpoints").glob("step-*"))


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    """Forces a written file to the disk, so that a rename never becomes durable before the bytes it names."""
    with path.open("rb+") as file:
        os.fsync(file.fileno())


def save_tensors(path: Path, arrays: dict[str, mx.array], metadata: dict[str, str] | None = None) -> None:
    """Writes safetensors and forces them to the disk. OSError when they do not fit."""
    try:
        mx.save_safetensors(str(path), dict(sorted(arrays.items())), metadata=metadata or {"format": "mlx"})
    except RuntimeError as error:
        raise OSError(f"{path} cannot be written: {error}") from error
    _sync(path)


def save_adapter(model: gwen.Model, directory: str | Path, base: str) -> None:
    """
    Writes the trained weights in mlx_lm's adapter layout, each file replaced at once. base: the model's name or path.

    A model without adapters, trained whole, is written as a "full" adapter: all its weights, un-fused.
    """
    directory = Path(directory)
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
    scratch = directory / "adapters.partial.safetensors"
    try:
        save_tensors(scratch, weights, {"format": "mlx"})
        telemetry.replace_text(directory / "adapter_config.json", json.dumps(config, indent=2) + "\n")
        os.replace(scratch, directory / "adapters.safetensors")
    finally:
        scratch.unlink(missing_ok=True)
