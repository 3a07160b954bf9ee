"""
Reads adapters in the layouts of mlx_lm and PEFT, and writes adapters in the layout of PEFT.

Runs save their adapters in the layout of mlx_lm. transformers and vLLM read the layout of PEFT.

    mlx_lm   adapters.safetensors: NAME.lora_a (C, R) and NAME.lora_b (R, O)
             adapter_config.json: rank and scale
    PEFT     adapter_model.safetensors: base_model.model.NAME.lora_A.weight (R, C)
             and .lora_B.weight (O, R)
             adapter_config.json: r and lora_alpha = scale * rank

The conversion to the PEFT layout loses nothing, because tensors are transposed but never rounded.
NAME is the Hugging Face name of a projection, such as "model.layers.0.self_attn.q_proj"; for
Qwen3.5, mlx_lm adds the prefix "language_model.". The code for adapters inside a model, and for
saving the adapter of a run, is in lora.py.

Axes: C input width, O output width, R rank.
"""

import json
import math
from pathlib import Path
from typing import Any, NamedTuple

import cpu_blas  # noqa: F401  (before mlx)
import mlx.core as mx

from disk import hub
from disk.files import load_json_object, load_safetensors
from flags import add_path_to_os_errors

CONFIG = "adapter_config.json"
MLX_LM_TENSORS = "adapters.safetensors"
PEFT_TENSORS = "adapter_model.safetensors"
PEFT_PREFIX = "base_model.model."
MIN_SCALE = 1e-6
MAX_SCALE = 1e4
# The matrices A (C, R) and B (R, O) of each projection, by Hugging Face name.
Pairs = dict[str, tuple[mx.array, mx.array]]

# PEFT options that may change the computation x A B, each with the values that are supported. Null
# is always supported.
PEFT_OPTIONS: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "use_dora": (False,),
    "fan_in_fan_out": (False,),
    "lora_bias": (False,),
    "use_qalora": (False,),
    "rank_pattern": ({},),
    "alpha_pattern": ({},),
    "modules_to_save": (),
    "trainable_token_indices": (),
    "layer_replication": (),
    "target_parameters": (),
    "alora_invocation_tokens": (),
    "use_bdlora": (),
    "arrow_config": (),
    "kasa_config": (),
    "monteclora_config": (),
    "bias": ("none",),
    # Other initializations change the weights of the base model by subtracting A B.
    "init_lora_weights": (True, False, "gaussian", "eva", "orthogonal"),
}


class LoraAdapter(NamedTuple):
    """A "lora" adapter, which changes a projection to y = x W^T + scale * x A B."""

    base: str | None  # the name of the model that the adapter was trained on, if it is known
    scale: float
    pairs: Pairs


# ---- adapter directories and base models


def find_adapter_directory(path: str | Path) -> Path:
    """
    Find the directory of an adapter.

    path: the directory of the adapter itself, of a run or of a checkpoint.

    Raises ValueError if there is no adapter.
    """
    for directory in (Path(path), Path(path) / "adapter"):
        if (directory / CONFIG).is_file():
            return directory
    raise ValueError(
        f"--adapter {path} contains no {CONFIG}; give the directory of a run or of an adapter"
    )


def require_base_model_of_adapter(path: str | Path) -> str:
    """
    Return the name of an adapter's base model.

    Raises ValueError if the configuration of the adapter does not name a base model.
    """
    _, config = _find_and_read_adapter_config(path)
    name = _base_model_name(config)
    if name is None:
        raise ValueError(
            f"--adapter {path} does not name the model that it was trained on; "
            "give the name of that model with --model"
        )
    return name


def base_of_adapter_if_different(adapter_path: str | Path, model: str | Path) -> str:
    """
    Return the base model of an adapter if it is not `model`.

    Returns "" if the base model is `model`, or if the adapter does not name its base model.
    """
    _, config = _find_and_read_adapter_config(adapter_path)
    base = _base_model_name(config)
    if base is None:
        return ""
    name = str(model)
    short_name = _name_without_owner_or_revision(name)
    if _name_without_owner_or_revision(base) == short_name:
        return ""
    base_path = Path(hub.BUNDLED.get(base, base))
    path_of_model = Path(hub.BUNDLED.get(name, name))
    both_exist = base_path.exists() and path_of_model.exists()
    return "" if both_exist and base_path.samefile(path_of_model) else base


def _name_without_owner_or_revision(model: str) -> str:
    """
    Return the last part of a model's name, in lower case.

    The result is the same for a hub model and for a local copy in a directory of the same name.
    """
    return Path(model.partition("@")[0]).name.lower()


def is_full_weight_adapter(path: str | Path) -> bool:
    """
    Whether an adapter is of the type "full", which means that it contains all weights of a model.

    Raises ValueError if the type is neither "full" nor "lora".
    """
    _, config = _find_and_read_adapter_config(path)
    return config.get("fine_tune_type") == "full"


# ---- reading


def _find_and_read_adapter_config(path: str | Path) -> tuple[Path, dict[str, Any]]:
    """
    Return the directory and the configuration of an adapter.

    The configuration has the key `peft_type` only in the PEFT layout.
    """
    directory = find_adapter_directory(path)
    config = load_json_object(directory / CONFIG)
    kind = config.get("fine_tune_type", "lora")
    if kind not in ("lora", "full"):
        raise ValueError(
            f"--adapter {directory} has fine_tune_type {kind!r:.60}; "
            "only lora and full are supported"
        )
    return directory, config


def _base_model_name(config: dict[str, Any]) -> str | None:
    name = config.get("base_model_name_or_path" if "peft_type" in config else "model")
    return name if name and isinstance(name, str) else None


def _load_tensors(directory: Path, config: dict[str, Any]) -> dict[str, mx.array]:
    """
    Load all tensors of an adapter, and return them by name.

    Raises ValueError if the file has no tensors.
    """
    path = directory / (PEFT_TENSORS if "peft_type" in config else MLX_LM_TENSORS)
    tensors = load_safetensors(path)
    if not tensors:
        raise ValueError(f"--adapter {directory}: {path.name} contains no tensors")
    return tensors


def read_lora_adapter(path: str | Path) -> LoraAdapter:
    """
    Read a "lora" adapter in the layout of mlx_lm or PEFT.

    path: the directory of the adapter, of a run or of a checkpoint.

    Raises ValueError if the adapter is missing, damaged or of the type "full".
    """
    directory, config = _find_and_read_adapter_config(path)
    if is_full_weight_adapter(directory):
        raise ValueError(
            f"--adapter {directory} contains all weights of a model; "
            "write the model with export.py --fuse, and use it as --model"
        )
    rank, scale = _read_rank_and_scale(config, f"--adapter {directory}: {CONFIG}")
    matrices = _load_lora_matrices(directory, config)
    pairs: Pairs = {}
    for name in sorted({name for name, _ in matrices}):
        matrix_a = matrices.get((name, "a"), mx.array(0))
        matrix_b = matrices.get((name, "b"), mx.array(0))
        if (
            matrix_a.ndim != 2
            or matrix_b.ndim != 2
            or not matrix_a.shape[1] == matrix_b.shape[0] == rank
        ):
            raise ValueError(
                f"--adapter {directory}: {name} does not have two matrices of rank {rank}, "
                f"the rank in {CONFIG}"
            )
        is_finite = mx.isfinite(matrix_a).all() & mx.isfinite(matrix_b).all()
        if not is_finite.item():
            raise ValueError(f"--adapter {directory}: {name} has values that are not finite")
        pairs[name] = (matrix_a, matrix_b)
    return LoraAdapter(_base_model_name(config), scale, pairs)


def _load_lora_matrices(directory: Path, config: dict[str, Any]) -> dict[tuple[str, str], mx.array]:
    """
    Load all matrices of an adapter, and return them in mlx_lm's layout.

    The keys of the result are pairs of the name of a projection and "a" or "b".
    """
    is_peft = "peft_type" in config
    endings = {"A.weight": "a", "B.weight": "b"} if is_peft else {"a": "a", "b": "b"}
    matrices = {}
    for key, array in _load_tensors(directory, config).items():
        name, _, ending = key.removeprefix(PEFT_PREFIX).rpartition(".lora_")
        if ending not in endings:
            raise ValueError(
                f"--adapter {directory}: the tensor {key} is neither the lora_a nor the lora_b "
                "of a projection"
            )
        if is_peft:
            array = mx.contiguous(array.T)
        matrices[hub.standard_tensor_name(name), endings[ending]] = array
    return matrices


def _read_rank_and_scale(config: dict[str, Any], error_prefix: str) -> tuple[int, float]:
    """
    Return the rank and the scale in the configuration of an adapter.

    Raises ValueError if one is missing or wrong. The error message begins with `error_prefix`.
    """
    is_peft = "peft_type" in config
    if is_peft:
        _refuse_unsupported_peft_options(config, error_prefix)
    try:
        if is_peft:
            rank = config["r"]
            divisor = math.sqrt(rank) if config.get("use_rslora") else rank
            scale = config["lora_alpha"] / divisor
        else:
            rank = config["lora_parameters"]["rank"]
            scale = config["lora_parameters"]["scale"]
        if type(rank) is int and MIN_SCALE <= scale <= MAX_SCALE:
            return rank, float(scale)
    except (LookupError, TypeError, ValueError, ArithmeticError):
        pass  # the error is raised below
    keys = ("r", "lora_alpha") if is_peft else ("lora_parameters",)
    values = {key: config.get(key) for key in keys}
    raise ValueError(
        f"{error_prefix} has {values!r:.120}; the rank must be a whole number, and the scale must "
        "be from 1e-6 to 1e4"
    )


def _refuse_unsupported_peft_options(config: dict[str, Any], error_prefix: str) -> None:
    """Raise ValueError if the configuration has a PEFT option that is not supported."""
    for key, supported in PEFT_OPTIONS.items():
        value = config.get(key)
        if value is not None and value not in supported:
            raise ValueError(
                f"{error_prefix} has {key} {value!r:.60}, which is not supported; "
                "merge the adapter into its model with PEFT first"
            )


def read_matching_adapter(weights: dict[str, mx.array], path: str | Path) -> LoraAdapter:
    """
    Read the "lora" adapter at `path`, and check that it fits the weights of a model.

    Raises ValueError if the weights lack a projection of the adapter, or if the adapter's matrices
    do not fit the shape of the projection.
    """
    adapter = read_lora_adapter(path)
    for name, (matrix_a, matrix_b) in adapter.pairs.items():
        base = weights.get(f"{name}.weight")
        if base is None:
            raise ValueError(f"--adapter {path}: {name} is not a projection of this model")
        if (matrix_b.shape[1], matrix_a.shape[0]) != base.shape:
            raise ValueError(
                f"--adapter {path}: the matrices of {name} do not fit the model's weight, which "
                f"has the shape {base.shape}"
            )
    return adapter


def merge_adapter_into_weights(
    weights: dict[str, mx.array], path: str | Path, family: hub.Family
) -> dict[str, mx.array]:
    """
    Return weights into which an adapter is merged: W + scale * (A B)^T, computed in float32.

    A "full" adapter replaces the weights instead.

    weights: the weights of the model, by Hugging Face name.

    Raises ValueError if the adapter does not fit the weights.
    """
    directory, config = _find_and_read_adapter_config(path)
    if is_full_weight_adapter(directory):
        return _replace_by_full_adapter(weights, directory, config, family)
    adapter = read_matching_adapter(weights, directory)
    merged = dict(weights)
    for name, (matrix_a, matrix_b) in adapter.pairs.items():
        base = merged[f"{name}.weight"]
        delta = adapter.scale * (matrix_a.astype(mx.float32) @ matrix_b.astype(mx.float32)).T
        merged[f"{name}.weight"] = (base.astype(mx.float32) + delta).astype(base.dtype)
    return merged


def _replace_by_full_adapter(
    weights: dict[str, mx.array], directory: Path, config: dict[str, Any], family: hub.Family
) -> dict[str, mx.array]:
    """Return the weights, with the tensors of a "full" adapter in place of the original tensors."""
    trained, _ = hub.standardize_stored_weights(_load_tensors(directory, config), family)
    replaced = dict(weights)
    for name, array in trained.items():
        if name not in weights or array.shape != weights[name].shape:
            raise ValueError(
                f"--adapter {directory}: the model has no tensor {name} of shape {array.shape}"
            )
        replaced[name] = array.astype(weights[name].dtype)
    return replaced


# ---- writing


def write_peft_adapter(adapter: LoraAdapter, directory: Path) -> None:
    """
    Write a "lora" adapter in the PEFT layout to a new directory.

    The adapter must have the same rank on all projections.
    """
    (rank,) = {matrix_a.shape[1] for matrix_a, _ in adapter.pairs.values()}
    tensors = {}
    for name, (matrix_a, matrix_b) in sorted(adapter.pairs.items()):
        tensors[f"{PEFT_PREFIX}{name}.lora_A.weight"] = mx.contiguous(matrix_a.T)
        tensors[f"{PEFT_PREFIX}{name}.lora_B.weight"] = mx.contiguous(matrix_b.T)
    alpha = adapter.scale * rank
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": adapter.base,
        "inference_mode": True,
        "r": rank,
        "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted(adapter.pairs),
    }
    directory.mkdir(parents=True)
    mx.save_safetensors(str(directory / PEFT_TENSORS), tensors, metadata={"format": "pt"})
    with add_path_to_os_errors(directory / CONFIG):
        (directory / CONFIG).write_text(json.dumps(config, indent=2) + "\n")


def fuse_lora_matrices(adapter_tensors: dict[str, mx.array]) -> dict[str, mx.array]:
    """
    Return the matrices of a "lora" adapter, joined into the matrices of Gwen's fused projections.

    A key of the result is, for example, "layers.0.self_attn.qkv_proj.lora_a". This function is the
    inverse of `lora.mlx_lm_adapter_weights`: for each fused projection, it joins the B matrices of
    the parts, and uses the A matrix of the first part, because all parts have the same A matrix.
    """
    adapter = {hub.standard_tensor_name(name): array for name, array in adapter_tensors.items()}
    transposed_b = {name: array.T for name, array in adapter.items() if name.endswith("lora_b")}
    fused_b = hub.fuse_weights(transposed_b)
    out = {name: mx.contiguous(array.T) for name, array in fused_b.items()}
    for name in fused_b:
        name_a = name.removesuffix("b") + "a"
        part_a = name_a
        for fused, parts in hub.FUSED.items():
            part_a = part_a.replace(fused, parts[0])
        out[name_a] = adapter[f"model.{part_a}"]
    return dict(sorted(out.items()))
