"""
Adapters on disk: mlx_lm's layout, used by runs, and PEFT's, read by transformers and vLLM.

    mlx_lm   adapters.safetensors: NAME.lora_a (C, R) and NAME.lora_b (R, O); adapter_config.json: rank and scale
    PEFT     adapter_model.safetensors: base_model.model.NAME.lora_A.weight (R, C) and .lora_B.weight (O, R);
             adapter_config.json: r and lora_alpha = scale * rank

Reads both and writes PEFT's from either, without loss: tensors are transposed, never rounded. NAME is a projection's
Hugging Face name, "model.layers.0.self_attn.q_proj"; mlx_lm's Qwen3.5 has "language_model." before it. Left out:
adapters inside a model, and how a run saves its own (lora.py).

Axes: C input width, O output width, R rank.
"""

import json
import math
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx

from disk import hub
from flags import names_path

CONFIG, OURS, PEFTS = "adapter_config.json", "adapters.safetensors", "adapter_model.safetensors"
PEFT_PREFIX = "base_model.model."
Pairs = dict[
    str, tuple[mx.array, mx.array]
]  # A (C, R) and B (R, O) of each projection, by Hugging Face name
NONE_OF = "modules_to_save trainable_token_indices layer_replication target_parameters alora_invocation_tokens".split()
NONE_OF += "use_bdlora arrow_config kasa_config monteclora_config".split()
# PEFT options beyond x A B, and the only values supported here beside null
PEFT_ONLY: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    **dict.fromkeys(("use_dora", "fan_in_fan_out", "lora_bias", "use_qalora"), (False,)),
    **dict.fromkeys(("rank_pattern", "alpha_pattern"), ({},)),
    **dict.fromkeys(NONE_OF, ()),
    "bias": ("none",),
    "init_lora_weights": (
        True,
        False,
        "gaussian",
        "eva",
        "orthogonal",
    ),  # others take what A B is from the base
}


class Adapter(NamedTuple):
    """A "lora" adapter: y = x W^T + scale * x A B."""

    base: str | None  # the model it was trained on, as named in its configuration
    scale: float
    pairs: Pairs


def find_adapter(path: str | Path) -> Path:
    """The adapter directory at `path`, or of the run or checkpoint there. Raises ValueError if none."""
    for directory in (Path(path), Path(path) / "adapter"):
        if (directory / CONFIG).is_file():
            return directory
    raise ValueError(
        f"--adapter {path}: no {CONFIG} there; give a run or the directory of an adapter"
    )


def base_model_of(path: str | Path) -> str:
    """The base model named in an adapter's configuration. Raises ValueError if it names none."""
    if (name := _base_model_name(_open_adapter(path)[1])) is None:
        raise ValueError(
            f"--adapter {path} does not name the model it was trained on; give it with --model"
        )
    return name


def other_base(path: str | Path, model: str | Path) -> str:
    """The base that an adapter names, where that is another model than this; empty where it is, or none is named."""
    base, name = _base_model_name(_open_adapter(path)[1]), str(model)
    if base is None or _plain_name(base) == _plain_name(name):
        return ""
    places = [Path(hub.BUNDLED.get(one, one)) for one in (base, name)]
    is_same_place = all(place.exists() for place in places) and places[0].samefile(places[1])
    return "" if is_same_place else base


def _plain_name(model: str) -> str:
    """A model's name without owner, folder and revision: a local copy is named as on the hub."""
    return Path(model.partition("@")[0]).name.lower()


def is_full_weights(path: str | Path) -> bool:
    """Whether an adapter is "full", all weights of its model. Raises ValueError if it is neither that nor "lora"."""
    return _open_adapter(path)[1].get("fine_tune_type") == "full"


# ---- reading


def _open_adapter(path: str | Path) -> tuple[Path, dict[str, Any]]:
    """The directory of an adapter and its configuration, which has a `peft_type` in PEFT's layout alone."""
    directory = find_adapter(path)
    config = hub.load_object(directory / CONFIG)
    if (kind := config.get("fine_tune_type", "lora")) not in ("lora", "full"):
        raise ValueError(
            f"--adapter {directory}: fine_tune_type {kind!r:.60} is not supported, only lora and full"
        )
    return directory, config


def _base_model_name(config: dict[str, Any]) -> str | None:
    name = config.get("base_model_name_or_path" if "peft_type" in config else "model")
    return name if name and isinstance(name, str) else None


def _load_tensors(directory: Path, config: dict[str, Any]) -> dict[str, mx.array]:
    """The tensors of an adapter. Raises ValueError where there are none."""
    path = directory / (PEFTS if "peft_type" in config else OURS)
    if not (tensors := hub.load_tensors(path)):
        raise ValueError(f"--adapter {directory}: {path.name} holds no tensors")
    return tensors


def read_adapter(path: str | Path) -> Adapter:
    """A "lora" adapter of either layout. Raises ValueError naming the problem. path: see `find`."""
    directory, config = _open_adapter(path)
    is_peft = "peft_type" in config
    if is_full_weights(directory):
        raise ValueError(
            f"--adapter {directory} holds a whole model; write it with lora.py --fuse, for --model"
        )
    rank, scale = _rank_and_scale(config, f"--adapter {directory}: {CONFIG}")
    endings = {"A.weight": "a", "B.weight": "b"} if is_peft else {"a": "a", "b": "b"}
    halves, pairs = {}, {}  # by name and "a" or "b"; A and B by name
    for key, array in _load_tensors(directory, config).items():
        name, _, half = key.removeprefix(PEFT_PREFIX).rpartition(".lora_")
        if half not in endings:
            raise ValueError(
                f"--adapter {directory}: {key} is neither lora_a nor lora_b of a projection"
            )
        halves[hub.plain_name(name), endings[half]] = mx.contiguous(array.T) if is_peft else array
    for name in sorted({name for name, _ in halves}):
        low, high = (halves.get((name, half), mx.array(0)) for half in "ab")
        if low.ndim != 2 or high.ndim != 2 or not low.shape[1] == high.shape[0] == rank:
            raise ValueError(
                f"--adapter {directory}: {name} has no two matrices of {CONFIG}'s rank {rank}"
            )
        if not (mx.isfinite(low).all() & mx.isfinite(high).all()).item():
            raise ValueError(f"--adapter {directory}: {name} has values that are not finite")
        pairs[name] = low, high
    return Adapter(_base_model_name(config), scale, pairs)


def _rank_and_scale(config: dict[str, Any], where: str) -> tuple[int, float]:
    is_peft = "peft_type" in config
    for key, allowed in PEFT_ONLY.items() if is_peft else ():
        if config.get(key) not in (*allowed, None):
            raise ValueError(
                f"{where} has {key} {config[key]!r:.60}, which is not supported; merge it with PEFT first"
            )
    try:
        if is_peft:
            rank = config["r"]
            scale = config["lora_alpha"] / (math.sqrt(rank) if config.get("use_rslora") else rank)
        else:
            rank, scale = (config["lora_parameters"][key] for key in ("rank", "scale"))
        if type(rank) is int and 1e-6 <= scale <= 1e4:
            return rank, float(scale)
    except (LookupError, TypeError, ValueError, ArithmeticError):
        pass
    given = {
        key: config.get(key) for key in (("r", "lora_alpha") if is_peft else ("lora_parameters",))
    }
    raise ValueError(
        f"{where} has {given!r:.120}; they must make a whole rank, and a scale from 1e-6 to 1e4"
    )


def load_fitting(weights: dict[str, mx.array], path: str | Path) -> Adapter:
    """The adapter at `path`. Raises ValueError if a projection's name or shape does not match these weights."""
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
    """Hugging Face weights W + scale * (A B)^T in float32, by the adapter at `path`. ValueError if none there fits."""
    directory, config = _open_adapter(path)
    if is_full_weights(directory):
        trained, _ = hub.from_stored_names(_load_tensors(directory, config), family)
        for name, array in trained.items():
            if name not in weights or array.shape != weights[name].shape:
                raise ValueError(
                    f"--adapter {directory}: {name} {array.shape} is not a tensor of this model"
                )
        return weights | {
            name: array.astype(weights[name].dtype) for name, array in trained.items()
        }
    adapter, weights = load_fitting(weights, directory), dict(weights)
    for name, (low, high) in adapter.pairs.items():
        base = weights[f"{name}.weight"]
        delta = adapter.scale * (low.astype(mx.float32) @ high.astype(mx.float32)).T
        weights[f"{name}.weight"] = (base.astype(mx.float32) + delta).astype(base.dtype)
    return weights


# ---- writing


def write_peft(adapter: Adapter, directory: Path) -> None:
    """Writes a "lora" adapter, of one rank, to a new directory in PEFT's layout."""
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
    mx.save_safetensors(str(directory / PEFTS), tensors, metadata={"format": "pt"})
    with names_path(directory / CONFIG):
        (directory / CONFIG).write_text(json.dumps(config, indent=2) + "\n")


def split_adapter_weights(adapter: dict[str, mx.array]) -> dict[str, mx.array]:
    """What `lora.adapter_weights` took apart, by this model's names: "layers.0.self_attn.qkv_proj.lora_a"."""
    adapter = {hub.plain_name(name): array for name, array in adapter.items()}
    rows = hub.fuse_weights(
        {name: array.T for name, array in adapter.items() if name.endswith("lora_b")}
    )
    out = {name: mx.contiguous(array.T) for name, array in rows.items()}
    for name in rows:
        part = next(
            (name.replace(fused, parts[0]) for fused, parts in hub.FUSED.items() if fused in name),
            name,
        )
        out[name.removesuffix("b") + "a"] = adapter[f"model.{part.removesuffix('b')}a"]
    return dict(sorted(out.items()))
