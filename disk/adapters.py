"""
Adapters on disk: mlx_lm's layout, used by runs, and PEFT's, read by transformers and vLLM.

    mlx_lm   adapters.safetensors: NAME.lora_a (C, R) and NAME.lora_b (R, O); adapter_config.json: rank and scale
    PEFT     adapter_model.safetensors: base_model.model.NAME.lora_A.weight (R, C) and .lora_B.weight (O, R);
             adapter_config.json: r and lora_alpha = scale * rank

Reads both and converts between them without loss: tensors are transposed, never rounded. NAME is a projection's
Hugging Face name, "model.layers.0.self_attn.q_proj"; mlx_lm's Qwen3.5 has "language_model." before it. What we write
has a checksum among the tensors' metadata, which other programs pass over. Left out: adapters inside a model (lora.py).

Axes: C input width, O output width, R rank.
"""

import hashlib
import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from disk import hub

LAYOUTS = {"peft": "adapter_model.safetensors", "mlx_lm": "adapters.safetensors"}  # and the file of the tensors
PEFT_PREFIX = "base_model.model."
BASE = ("base_model_name_or_path", "model")  # in PEFT's configuration, and in mlx_lm's
KINDS = [["linear_attn"], ["self_attn"]]  # of a hybrid's layers
SCALES = (1e-6, 1e4)
Pairs = dict[str, tuple[mx.array, mx.array]]  # A (C, R) and B (R, O) of each projection, by Hugging Face name
# PEFT options beyond x A B, and the only values supported here
PEFT_ONLY: dict[str, Any] = {
    **dict.fromkeys(("use_dora", "fan_in_fan_out", "lora_bias", "use_qalora"), False),
    **{key: {} for key in ("rank_pattern", "alpha_pattern")},
    **dict.fromkeys(("modules_to_save", "trainable_token_indices", "layer_replication", "target_parameters"), None),
    "bias": "none",
}


class Adapter(NamedTuple):
    """A "lora" adapter: y = x W^T + scale * x A B."""

    base: str | None  # the model it was trained on, as named in its configuration
    scale: float
    pairs: Pairs


def find(path: str | Path) -> Path:
    """The adapter directory at `path`, or of the run or checkpoint there. Raises ValueError if none."""
    for directory in (Path(path), Path(path) / "adapter"):
        if (directory / "adapter_config.json").is_file():
            return directory
    raise ValueError(f"--adapter {path}: no adapter_config.json there; give a run or the directory of an adapter")


def base_of(path: str | Path) -> str:
    """The base model named in an adapter's configuration. Raises ValueError if it names none."""
    name = _base(hub.load_object(find(path) / "adapter_config.json"))
    if not isinstance(name, str) or not name:
        raise ValueError(f"--adapter {path} does not name the model it was trained on; give it with --model")
    return name


def kind_of(directory: Path) -> str:
    """ "lora" or "full", from an adapter's configuration. Raises ValueError for others."""
    config = hub.load_object(directory / "adapter_config.json")
    kind = "lora" if _is_peft(config) else config.get("fine_tune_type", "lora")
    if kind not in ("lora", "full"):
        raise ValueError(f"--adapter {directory}: fine_tune_type {kind!r:.60} is not supported, only lora and full")
    return str(kind)


def _is_peft(config: dict[str, Any]) -> bool:
    return "peft_type" in config


def _base(config: dict[str, Any]) -> Any:
    return config.get(BASE[0] if _is_peft(config) else BASE[1])


# ---- the checksum


def checksum(tensors: dict[str, mx.array], config: dict[str, Any]) -> str:
    """SHA-256 of an adapter's tensors and configuration, without the base's name: that model may be moved."""
    kept = {key: value for key, value in config.items() if key not in BASE}
    digest = hashlib.sha256(json.dumps(kept, sort_keys=True).encode())
    for name, array in sorted(tensors.items()):
        digest.update(f"{name} {array.shape} {array.dtype}".encode())
        digest.update(np.array(mx.view(array.reshape(-1), mx.uint8)).data)
    return digest.hexdigest()


def load_tensors(directory: Path, config: dict[str, Any]) -> dict[str, mx.array]:
    """The tensors of an adapter. Raises ValueError if it has a checksum that they or its configuration do not match."""
    path = directory / LAYOUTS["peft" if _is_peft(config) else "mlx_lm"]
    tensors = hub.load_tensors(path)
    if not tensors:
        raise ValueError(f"--adapter {directory}: {path.name} holds no tensors")
    metadata: Any = mx.load(str(path), format="safetensors", return_metadata=True)
    if metadata[1].get("sha256", written := checksum(tensors, config)) != written:
        raise ValueError(f"--adapter {directory}: by its checksum it is not as it was written; take another copy of it")
    return tensors


# ---- reading


def read(path: str | Path) -> Adapter:
    """A "lora" adapter of either layout. Raises ValueError naming the problem. path: see `find`."""
    directory = find(path)
    config = hub.load_object(directory / "adapter_config.json")
    where, is_peft = f"--adapter {directory}: adapter_config.json", _is_peft(config)
    rank, scale = _peft_numbers(config, where) if is_peft else _mlx_lm_numbers(config, where)
    if type(rank) is not int or type(scale) not in (int, float) or not SCALES[0] <= scale <= SCALES[1]:
        numbers = f"rank {rank!r:.60} and scale {scale!r:.60}"
        raise ValueError(f"{where} has {numbers}; they must be a whole number, and one from 1e-6 to 1e4")
    endings = {"A.weight": "a", "B.weight": "b"} if is_peft else {"a": "a", "b": "b"}
    halves, pairs = {}, {}  # by name and "a" or "b"; A and B by name
    for key, array in load_tensors(directory, config).items():
        name, _, half = key.removeprefix(PEFT_PREFIX).rpartition(".lora_")
        if half not in endings:
            raise ValueError(f"--adapter {directory}: {key} is neither lora_a nor lora_b of a projection")
        halves[hub.plain(name), endings[half]] = mx.contiguous(array.T) if is_peft else array
    for name in sorted({name for name, _ in halves}):
        low, high = halves.get((name, "a")), halves.get((name, "b"))
        if low is None or high is None or low.ndim != 2 or high.ndim != 2 or low.shape[1] != high.shape[0]:
            raise ValueError(f"--adapter {directory}: {name} has no two matrices of one rank")
        if low.shape[1] != rank:
            raise ValueError(f"--adapter {directory}: {name} has rank {low.shape[1]}, adapter_config.json says {rank}")
        if not (mx.isfinite(low).all() & mx.isfinite(high).all()).item():
            raise ValueError(f"--adapter {directory}: {name} has values that are not finite")
        pairs[name] = low, high
    base = _base(config)
    return Adapter(base if isinstance(base, str) else None, float(scale), pairs)


def _mlx_lm_numbers(config: dict[str, Any], where: str) -> tuple[Any, Any]:
    parameters = config.get("lora_parameters")
    if not isinstance(parameters, dict):
        raise ValueError(f"{where} has no lora_parameters with rank and scale")
    return parameters.get("rank"), parameters.get("scale")


def _peft_numbers(config: dict[str, Any], where: str) -> tuple[Any, Any]:
    if config["peft_type"] != "LORA":
        raise ValueError(f"{where} has peft_type {config['peft_type']!r:.60}; only LORA is supported")
    for key, usual in PEFT_ONLY.items():
        if config.get(key, usual) not in (usual, None):
            raise ValueError(f"{where} has {key} {config[key]!r:.60}, which is not supported; merge it with PEFT first")
    rank: Any = config.get("r")
    alpha: Any = config.get("lora_alpha")
    if type(rank) is not int or not 1 <= rank < 2**31 or type(alpha) not in (int, float) or not abs(alpha) < 1e300:
        raise ValueError(f"{where} has r {rank!r:.60} and lora_alpha {alpha!r:.60}; both must be numbers")
    return rank, alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def fitting(weights: dict[str, mx.array], path: str | Path) -> Adapter:
    """The adapter at `path`. Raises ValueError if a projection's name or shape does not match these weights."""
    adapter = read(path)
    for name, (low, high) in adapter.pairs.items():
        base = weights.get(f"{name}.weight")
        if base is None:
            raise ValueError(f"--adapter {path}: {name} is not a projection of this model")
        if (high.shape[1], low.shape[0]) != base.shape:
            raise ValueError(f"--adapter {path}: {name} does not fit a weight of shape {base.shape}")
    return adapter


def merge(weights: dict[str, mx.array], path: str | Path, family: hub.Family) -> dict[str, mx.array]:
    """
    Hugging Face weights with an adapter merged in, W + scale * (A B)^T in float32. path: see `find`.

    Raises ValueError if there is no adapter, or none for this model.
    """
    directory = find(path)
    if kind_of(directory) == "full":
        stored = load_tensors(directory, hub.load_object(directory / "adapter_config.json"))
        trained, _ = hub.from_stored(stored, family)
        for name, array in trained.items():
            if name not in weights or array.shape != weights[name].shape:
                raise ValueError(f"--adapter {directory}: {name} {array.shape} is not a tensor of this model")
        return weights | {name: array.astype(weights[name].dtype) for name, array in trained.items()}
    adapter = fitting(weights, directory)
    weights = dict(weights)
    for name, (low, high) in adapter.pairs.items():
        base = weights[f"{name}.weight"]
        delta = adapter.scale * (low.astype(mx.float32) @ high.astype(mx.float32)).T
        weights[f"{name}.weight"] = (base.astype(mx.float32) + delta).astype(base.dtype)
    return weights


# ---- writing


def write(adapter: Adapter, directory: Path, layout: str, prefix: str = "") -> None:
    """Writes a "lora" adapter, of one rank, to a new directory; prefix: `hub.mlx_lm_prefix` of its model."""
    (rank,) = {low.shape[1] for low, _ in adapter.pairs.values()}
    tensors, config = _as_peft(adapter, rank) if layout == "peft" else _as_mlx_lm(adapter, rank, prefix)
    directory.mkdir(parents=True)
    metadata = {"format": "pt", "sha256": checksum(tensors, config)}
    mx.save_safetensors(str(directory / LAYOUTS[layout]), dict(sorted(tensors.items())), metadata=metadata)
    (directory / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")


def _as_peft(adapter: Adapter, rank: int) -> tuple[dict[str, mx.array], dict[str, Any]]:
    tensors = {}
    for name, (low, high) in adapter.pairs.items():
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
        "target_modules": _targets(adapter.pairs),
    }
    return tensors, config


def _targets(pairs: Pairs) -> list[str]:
    """Suffixes that match exactly the adapted projections; short if all layers of a kind adapt the same ones."""
    layers: dict[str, set[str]] = {}
    for name in pairs:
        layer, _, rest = name.removeprefix("model.layers.").partition(".")
        layers.setdefault(layer, set()).add(rest)
    mixers = {frozenset(rest for rest in rests if not rest.startswith("mlp.")) for rests in layers.values()}
    rooms = [{rest.partition(".")[0] for rest in mixer} for mixer in mixers]
    same = len({frozenset(rest for rest in rests if rest.startswith("mlp.")) for rests in layers.values()}) == 1
    same &= len(layers) == max(map(int, layers)) + 1 and (len(mixers) == 1 or sorted(map(sorted, rooms)) == KINDS)
    return sorted({name.rpartition(".")[2] for name in pairs}) if same else sorted(pairs)


def _as_mlx_lm(adapter: Adapter, rank: int, prefix: str) -> tuple[dict[str, mx.array], dict[str, Any]]:
    tensors = {}
    for name, (low, high) in adapter.pairs.items():
        tensors[f"{prefix}{name}.lora_a"], tensors[f"{prefix}{name}.lora_b"] = low, high
    num_layers = 1 + max(int(name.split(".")[2]) for name in adapter.pairs)
    return tensors, mlx_lm_config(adapter.base, num_layers, adapter.pairs, rank, adapter.scale)


def mlx_lm_config(base: str | None, num_layers: int, names: Iterable[str], rank: int, scale: float) -> dict[str, Any]:
    """The configuration of a "lora" adapter in mlx_lm's layout, on projections of these names."""
    keys = sorted({name.split(".", 3)[3] for name in names})
    parameters = {"rank": rank, "scale": scale, "dropout": 0.0, "keys": keys}
    return {"model": base, "fine_tune_type": "lora", "num_layers": num_layers, "lora_parameters": parameters}


def masters(adapter: dict[str, mx.array]) -> dict[str, mx.array]:
    """What `lora.adapter_weights` took apart, by this model's names: "layers.0.self_attn.qkv_proj.lora_a"."""
    adapter = {hub.plain(name): array for name, array in adapter.items()}
    rows = hub.fuse_weights({name: array.T for name, array in adapter.items() if name.endswith("lora_b")})
    out = {name: mx.contiguous(array.T) for name, array in rows.items()}
    for name in rows:
        part = next((name.replace(fused, parts[0]) for fused, parts in hub.FUSED.items() if fused in name), name)
        out[name.removesuffix("b") + "a"] = adapter[f"model.{part.removesuffix('b')}a"]
    return dict(sorted(out.items()))
