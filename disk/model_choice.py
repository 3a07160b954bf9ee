"""
Chooses the model for a command, loads the configuration of the model, and prints notes about it.

gwen.py defines the model and loads its weights. disk/hub.py finds a model on disk or on the hub.
"""

import contextlib
import functools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from disk import adapters, ends, hub
from machine import gpu
from text.documents import load_yaml
from text.printable import print_once


def choose_model_and_reason(
    requested: str | None, adapter: str | Path | None = None, task_model: str | None = None
) -> tuple[str, str]:
    """
    Return the name of the model to use, and the reason for this choice.

    The model is the first of these that is available: the requested model; the base model of the
    adapter; the model of the task; on a GPU, Qwen3-0.6B, which is downloaded if needed; the demo
    model.

    Raises ValueError if the adapter does not name its base model.
    """
    if requested:
        return requested, "as requested"
    if adapter:
        return adapters.require_base_model_of_adapter(adapter), "which the adapter was trained on"
    if task_model:
        return task_model, "the model of the task"
    if not gpu.on_gpu():
        return "demo", "the default without a GPU"
    try:
        hub.find_or_download_hub_model(hub.DEFAULT_MODEL)
    except ValueError as error:
        return "demo", f"because {str(error).removeprefix('--model ')}"
    return hub.DEFAULT_MODEL, "the default on a GPU"


# ---- configurations


@functools.cache
def load_known_models() -> dict[str, dict[str, Any]]:
    """Load data/models.yaml: the content of config.json for each known model, by name."""
    path = Path(__file__).parents[1] / "data" / "models.yaml"
    table = load_yaml(path, "data/models.yaml")
    columns = table.pop("columns")
    common: dict[str, Any] = {
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 40960,
        "rope_theta": 1e6,
        "architectures": ["Qwen3ForCausalLM"],  # TRL needs this to load a saved random model
    }
    return {name: common | dict(zip(columns, row, strict=False)) for name, row in table.items()}


def load_known_config(name: str) -> hub.ModelConfig:
    """
    Return the configuration of a model in data/models.yaml.

    Raises ValueError if the model is not in that file.
    """
    models = load_known_models()
    if name not in models:
        random_models = [model for model in models if model.startswith("random:")]
        raise ValueError(
            f"--model {name} does not exist; the random models are {', '.join(random_models)}"
        )
    return hub.make_config(models[name])


def load_config(path_or_id: str | Path) -> hub.ModelConfig:
    """
    Load the configuration of a model. From the hub, only the configuration is downloaded.

    Raises ValueError if the model does not exist or is not supported.
    """
    name = str(path_or_id)
    size = name.removesuffix("-Instruct").removesuffix("-Base")
    is_known = size in load_known_models() and not Path(name).is_dir()
    if name.startswith("random:") or is_known:
        return load_known_config(size)
    directory = hub.find_model_directory(
        path_or_id, files_to_download=["config.json", "generation_config.json"]
    )
    return hub.load_config(directory)


def refuse_quantized_model(name: str) -> None:
    """Raise ValueError if a model is quantized, because quantized weights cannot be trained."""
    if load_config(name).packing:
        raise ValueError(
            f"--model {name} is quantized and cannot be trained; train the 16-bit model from which "
            "it was made (quantized models are allowed for --judge-model and --teacher)"
        )


def add_and_print_missing_end_tokens(
    config: hub.ModelConfig, tokenizer: Any, name: str | Path, end_tokens: Sequence[str] = ()
) -> hub.ModelConfig:
    """
    Return a copy of the configuration with all end tokens, and print which of them were added.

    name: the name of the model, for messages.
    end_tokens: the value of `--end-tokens`.

    Raises ValueError if there is no end token at all.
    """
    try:
        complete, sources = ends.copy_with_end_tokens(config, tokenizer, end_tokens)
    except ValueError as error:
        raise ValueError(f"--model {name}: {error}") from error
    if sources:
        print_once(f"gwen: {name}: {ends.describe_added_end_tokens(complete, tokenizer, sources)}")
    return complete


# ---- messages for the user


@contextlib.contextmanager
def replace_flag_in_errors(new_flag: str, old_flag: str = "--model") -> Iterator[None]:
    """Replace the name of a flag in the message of a ValueError raised inside the block."""
    try:
        yield
    except ValueError as error:
        raise ValueError(str(error).replace(f"{old_flag} ", f"{new_flag} ")) from error


def warn_of_different_base(adapter: str | Path, name: str | Path, flag: str = "--adapter") -> None:
    """Print a line if an adapter was trained on a model other than the model `name`."""
    base = adapters.base_of_adapter_if_different(adapter, name)
    if base:
        print_once(
            f"gwen: {flag} {adapter} was trained on {base}, but the model is {name}; "
            f"if this is a mistake, use --model {base}"
        )
