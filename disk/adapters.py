"""
Adapters on disk, in the layout of mlx_lm, which runs use, or of PEFT, for transformers and vLLM.

    mlx_lm   adapters.safetensors: NAME.lora_a (C, R) and NAME.lora_b (R, O)
             adapter_config.json: rank and scale
    PEFT     adapter_model.safetensors: base_model.model.NAME.lora_A.weight (R, C)
             and .lora_B.weight (O, R)
             adapter_config.json: r and lora_alpha = scale * rank

This file reads both layouts, and writes an adapter of either in PEFT's layout without loss: tensors
are transposed, never rounded. NAME is a projection's Hugging Face name, such as
"model.layers.0.self_attn.q_proj"; for Qwen3.5, mlx_lm writes "language_model." before it. This file
does not cover adapters inside a model, or how a run saves its adapter (lora.py).

Axes: C input width, O output width, R rank.
"""

import json
import math
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx

from disk import hub
from flags import names_path

CONFIG = "adapter_config.json"
MLX_LM_TENSORS = "adapters.safetensors"
PEFT_TENSORS = "adapter_model.safetensors"
PEFT_PREFIX = "base_model.model."
LEAST_SCALE = 1e-6
MOST_SCALE = 1e4
# A (C, R) and B (R, O) of each projection, by Hugging Face name.
Pairs = dict[str, tuple[mx.array, mx.array]]

# PEFT options that can change more than the product x A B, and their supported values. Null is
# always supported.
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
    # Other initializations subtract A B from the base's weights.
    "init_lora_weights": (True, False, "gaussian", "eva", "orthogonal"),
}


class Adapter(NamedTuple):
    """A "lora" adapter: y = x W^T + scale * x A B."""

    base: str | None  # the model it was trained on, as its configuration names it
    scale: float
    pairs: Pairs


# ---- finding


def find_adapter(path: str | Path) -> Path:
    """
    Find the adapter directory at `path`, or in the run or checkpoint there.

    Raises ValueError if there is none.
    """
    for directory in (Path(path), Path(path) / "adapter"):
        if (directory / CONFIG).is_file():
            return directory
    raise ValueError(
        f"--adapter {path}: no {CONFIG} there; give a run or the directory of an adapter"
    )


def base_model_of(path: str | Path) -> str:
    """The base model that an adapter's configuration names. Raises ValueError if it names none."""
    _, config = _open_adapter(path)
    name = _base_model_name(config)
    if name is None:
        raise ValueError(
            f"--adapter {path} does not name the model it was trained on; give it with --model"
        )
    return name


def other_base(path: str | Path, model: str | Path) -> str:
    """
    The base that an adapter names, if it is not `model`; else "".

    It is also "" if the adapter names no base.
    """
    _, config = _open_adapter(path)
    base = _base_model_name(config)
    name = str(model)
    if base is None or _plain_name(base) == _plain_name(name):
        return ""
    base_place = Path(hub.BUNDLED.get(base, base))
    place = Path(hub.BUNDLED.get(name, name))
    is_same_place = base_place.exists() and place.exists() and base_place.samefile(place)
    return "" if is_same_place else base


def _plain_name(model: str) -> str:
    """A model's name without owner, folder and revision: equal for a local copy and on the hub."""
    return Path(model.partition("@")[0]).name.lower()


def is_full_weights(path: str | Path) -> bool:
    """
    Whether an adapter is "full", that is, consists of all weights of its model.

    Raises ValueError if the adapter is neither "full" nor "lora".
    """
    _, config = _open_adapter(path)
    return config.get("fine_tune_type") == "full"


# ---- reading


def _open_adapter(path: str | Path) -> tuple[Path, dict[str, Any]]:
    """
    An adapter's directory and configuration.

    A configuration has a `peft_type` in PEFT's layout only.
    """
    directory = find_adapter(path)
    config = hub.load_object(directory / CONFIG)
    kind = config.get("fine_tune_type", "lora")
    if kind not in ("lora", "full"):
        raise ValueError(
            f"--adapter {directory}: fine_tune_type {kind!r:.60} is not supported, "
            "only lora and full"
        )
    return directory, config


def _base_model_name(config: dict[str, Any]) -> str | None:
    name = config.get("base_model_name_or_path" if "peft_type" in config else "model")
    return name if name and isinstance(name, str) else None


def _load_tensors(directory: Path, config: dict[str, Any]) -> dict[str, mx.array]:
    """The tensors of an adapter, by stored name. Raises ValueError if there are none."""
    path = directory / (PEFT_TENSORS if "peft_type" in config else MLX_LM_TENSORS)
    tensors = hub.load_tensors(path)
    if not tensors:
        raise ValueError(f"--adapter {directory}: {path.name} holds no tensors")
    return tensors


def read_adapter(path: str | Path) -> Adapter:
    """
    Read a "lora" adapter in either layout.

    path: as for `find_adapter`.

    Raises ValueError, which says what is wrong, if there is none or it is damaged.
    """
    directory, config = _open_adapter(path)
    if is_full_weights(directory):
        raise ValueError(
            f"--adapter {directory} holds a whole model; write it with export.py --fuse for --model"
        )
    rank, scale = _rank_and_scale(config, f"--adapter {directory}: {CONFIG}")
    matrices = _load_matrices(directory, config)
    pairs: Pairs = {}
    for name in sorted({name for name, _ in matrices}):
        low = matrices.get((name, "a"), mx.array(0))
        high = matrices.get((name, "b"), mx.array(0))
        if low.ndim != 2 or high.ndim != 2 or not low.shape[1] == high.shape[0] == rank:
            raise ValueError(
                f"--adapter {directory}: {name} has no two matrices of {CONFIG}'s rank {rank}"
            )
        is_finite = mx.isfinite(low).all() & mx.isfinite(high).all()
        if not is_finite.item():
            raise ValueError(f"--adapter {directory}: {name} has values that are not finite")
        pairs[name] = (low, high)
    return Adapter(_base_model_name(config), scale, pairs)


def _load_matrices(directory: Path, config: dict[str, Any]) -> dict[tuple[str, str], mx.array]:
    """The matrices of an adapter in mlx_lm's orientation, by projection and "a" or "b"."""
    is_peft = "peft_type" in config
    endings = {"A.weight": "a", "B.weight": "b"} if is_peft else {"a": "a", "b": "b"}
    matrices = {}
    for key, array in _load_tensors(directory, config).items():
        name, _, ending = key.removeprefix(PEFT_PREFIX).rpartition(".lora_")
        if ending not in endings:
            raise ValueError(
                f"--adapter {directory}: {key} is neither lora_a nor lora_b of a projection"
            )
        if is_peft:
            array = mx.contiguous(array.T)
        matrices[hub.plain_name(name), endings[ending]] = array
    return matrices


def _rank_and_scale(config: dict[str, Any], prefix: str) -> tuple[int, float]:
    """The rank and scale in a configuration. `prefix` begins the message of a ValueError."""
    is_peft = "peft_type" in config
    if is_peft:
        _refuse_peft_options(config, prefix)
    try:
        if is_peft:
            rank = config["r"]
            divisor = math.sqrt(rank) if config.get("use_rslora") else rank
            scale = config["lora_alpha"] / divisor
        else:
            rank = config["lora_parameters"]["rank"]
            scale = config["lora_parameters"]["scale"]
        if type(rank) is int and LEAST_SCALE <= scale <= MOST_SCALE:
            return rank, float(scale)
    except (LookupError, TypeError, ValueError, ArithmeticError):
        pass  # reported below
    keys = ("r", "lora_alpha") if is_peft else ("lora_parameters",)
    values = {key: config.get(key) for key in keys}
    raise ValueError(
        f"{prefix} has {values!r:.120}; they must make a whole rank, and a scale from 1e-6 to 1e4"
    )


def _refuse_peft_options(config: dict[str, Any], prefix: str) -> None:
    """Raise ValueError for a PEFT option that is not supported."""
    for key, supported in PEFT_OPTIONS.items():
        value = config.get(key)
        if value is not None and value not in supported:
            raise ValueError(
                f"{prefix} has {key} {value!r:.60}, which is not supported; "
                "merge it with PEFT first"
            )


def load_fitting(weights: dict[str, mx.array], path: str | Path) -> Adapter:
    """
    Load the adapter at `path`.

    Raises ValueError if a projection's name or shape does not match these weights.
    """
    adapter = read_adapter(path)
    for name, (low, high) in adapter.pairs.items():
        base = weights.get(f"{name}.weight")
        if base is None:
            raise ValueError(f"--adapter {path}: {name} is not a projection of this model")
        if (high.shape[1], low.shape[0]) != base.shape:
            raise ValueError(
                f"--adapter {path}: {name} does not fit a weight of shape {base.shape}"
            )
    return adapter


def merge_weights(
    weights: dict[str, mx.array], path: str | Path, family: hub.Family
) -> dict[str, mx.array]:
    """
    Merge the adapter at `path` into Hugging Face weights: W + scale * (A B)^T in float32.

    A "full" adapter replaces the weights instead. Raises ValueError if the adapter does not fit.
    """
    directory, config = _open_adapter(path)
    if is_full_weights(directory):
        return _replace_weights(weights, directory, config, family)
    adapter = load_fitting(weights, directory)
    merged = dict(weights)
    for name, (low, high) in adapter.pairs.items():
        base = merged[f"{name}.weight"]
        delta = adapter.scale * (low.astype(mx.float32) @ high.astype(mx.float32)).T
        merged[f"{name}.weight"] = (base.astype(mx.float32) + delta).astype(base.dtype)
    return merged


def _replace_weights(
    weights: dict[str, mx.array], directory: Path, config: dict[str, Any], family: hub.Family
) -> dict[str, mx.array]:
    """The weights, replaced by those of a "full" adapter, which take on the dtypes of the old."""
    trained, _ = hub.from_stored_names(_load_tensors(directory, config), family)
    replaced = dict(weights)
    for name, array in trained.items():
        if name not in weights or array.shape != weights[name].shape:
            raise ValueError(
                f"--adapter {directory}: {name} {array.shape} is not a tensor of this model"
            )
        replaced[name] = array.astype(weights[name].dtype)
    return replaced


# ---- writing


def write_peft(adapter: Adapter, directory: Path) -> None:
    """Write a "lora" adapter to a new directory in PEFT's layout. All its ranks must be equal."""
    (rank,) = {low.shape[1] for low, _ in adapter.pairs.values()}
    tensors = {}
    for name, (low, high) in sorted(adapter.pairs.items()):
        tensors[f"{PEFT_PREFIX}{name}.lora_A.weight"] = mx.contiguous(low.T)
        tensors[f"{PEFT_PREFIX}{name}.lora_B.weight"] = mx.contiguous(high.T)
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
    with names_path(directory / CONFIG):
        (directory / CONFIG).write_text(json.dumps(config, indent=2) + "\n")


def fuse_adapter_weights(adapter: dict[str, mx.array]) -> dict[str, mx.array]:
    """
    An adapter's tensors by the names of this model's fused parameters.

    An example of a name is "layers.0.self_attn.qkv_proj.lora_a". This reverses
    `lora.adapter_weights`: for each fused projection, the B matrices of its parts are joined, and
    the A matrix, which all parts have in common, is taken from the first part.
    """
    adapter = {hub.plain_name(name): array for name, array in adapter.items()}
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
