"""
The choice of a model: which model a command takes, its configuration, and notes about it.

This file does not cover the model itself and its weights (gwen.py), or how a name is found on disk
or on the hub (disk/hub.py).
"""

import contextlib
import functools
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from disk import adapters, ends, hub
from machine import gpu
from text.documents import load_yaml


def choose_model(
    requested: str | None, adapter: str | Path | None = None, task_model: str | None = None
) -> tuple[str, str]:
    """
    The name of the model to take, and the reason.

    The model is the first of these that exists: the requested model; the adapter's base; the task's
    model; on a GPU, Qwen3-0.6B if it can be downloaded; the demo.

    Raises ValueError for an adapter that does not name its base.
    """
    if requested:
        return requested, "as asked"
    if adapter:
        return adapters.base_model_of(adapter), "which the adapter was trained on"
    if task_model:
        return task_model, "the task's own"
    if not gpu.on_gpu():
        return "demo", "the default without a GPU"
    try:
        hub.hub_directory(hub.DEFAULT_MODEL)
    except ValueError as error:
        return "demo", f"because {str(error).removeprefix('--model ')}"
    return hub.DEFAULT_MODEL, "the default on a GPU"


# ---- configurations


@functools.cache
def load_known_models() -> dict[str, dict[str, Any]]:
    """The config.json of each model in data/models.yaml, by the model's name."""
    path = Path(__file__).parents[1] / "data" / "models.yaml"
    table = load_yaml(path, "data/models.yaml")
    columns = table.pop("columns")
    common: dict[str, Any] = {
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 40960,
        "rope_theta": 1e6,
        "architectures": ["Qwen3ForCausalLM"],  # for TRL, if a random model is saved
    }
    return {name: common | dict(zip(columns, row, strict=False)) for name, row in table.items()}


def load_known_config(name: str) -> hub.ModelConfig:
    """The configuration of a model in data/models.yaml. Raises ValueError for another name."""
    models = load_known_models()
    if name not in models:
        random_models = [model for model in models if model.startswith("random:")]
        raise ValueError(f"--model {name}: the random models are {', '.join(random_models)}")
    return hub.make_config(models[name])


def load_config(path_or_id: str | Path) -> hub.ModelConfig:
    """
    The configuration of a model that `gwen.load` can load. Only this part may be downloaded.

    Raises ValueError, which says what is wrong, if there is none that is supported.
    """
    name = str(path_or_id)
    size = name.removesuffix("-Instruct").removesuffix("-Base")
    is_known = size in load_known_models() and not Path(name).is_dir()
    if name.startswith("random:") or is_known:
        return load_known_config(size)
    directory = hub.find_model(path_or_id, files=["config.json", "generation_config.json"])
    return hub.load_config(directory)


def refuse_packed(name: str) -> None:
    """Raises ValueError if a model to train is quantized: an update cannot change its weights."""
    if load_config(name).packing:
        raise ValueError(
            f"--model {name} is quantized: train the checkpoint of 16 bits that it was made from; "
            "as --judge-model and --teacher it is taken"
        )


def with_all_end_tokens(
    config: hub.ModelConfig, tokenizer: Any, name: str | Path, end_tokens: Sequence[str] = ()
) -> hub.ModelConfig:
    """
    A copy of the configuration with all end tokens. Prints those that the configuration lacks.

    Raises ValueError if there is no end token.
    """
    try:
        complete, sources = ends.with_end_tokens(config, tokenizer, end_tokens)
    except ValueError as error:
        raise ValueError(f"--model {name}: {error}") from error
    if sources:
        print_once(f"gwen: {name}: {ends.describe_sources(complete, tokenizer, sources)}")
    return complete


# ---- messages for the user


@contextlib.contextmanager
def blame_flag(flag: str, usual: str = "--model") -> Iterator[None]:
    """Inside the context, errors about a model or adapter name `flag` instead of `usual`."""
    try:
        yield
    except ValueError as error:
        raise ValueError(str(error).replace(f"{usual} ", f"{flag} ")) from error


def warn_of_other_base(adapter: str | Path, name: str | Path, flag: str = "--adapter") -> None:
    """Prints a line if an adapter was trained on another model than `name`."""
    base = adapters.other_base(adapter, name)
    if base:
        print_once(
            f"gwen: {flag} {adapter} was trained on {base}, and the model is {name}; "
            f"--model {base} is the one that it fits"
        )


@functools.cache
def print_once(line: str) -> None:
    """Prints a line on stderr, but only once per process."""
    print(line, file=sys.stderr)
