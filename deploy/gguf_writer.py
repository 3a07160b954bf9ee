"""
Writes a model as a GGUF file with 16, 8 or 4 bits per weight, for llama.cpp, Ollama and LM Studio.

Norms and biases remain in float32. Matrices become F16 at 16 bits and Q8_0 at 8 bits. At 4 bits,
each matrix gets the type that llama.cpp's Q4_K_M scheme chooses for it. Only llama.cpp's own
library can convert matrices to these types. Without this library, matrices become Q4_0 at 4 bits.

GGUF files are read in disk/gguf.py. Qwen3.5, SmolLM3 and tokenizers with a split rule that is not
in `SPLITS` are not supported. This file does not use llama.cpp's importance matrix, which measures
on sample texts how much the rounding error of each weight matters.

Axes: H heads, D dimensions per head, C input width.
"""

import ctypes
import ctypes.util
import importlib.util
import json
from collections import Counter
from pathlib import Path
from typing import Any

import cpu_blas  # noqa: F401  (before mlx)
import mlx.core as mx
import numpy as np

from disk import gguf as reader
from disk.hub import ModelConfig
from layers.ops import Rope
from prompts import chat_template
from text.commands import advice_to_install_extra

LABELS = {16: "F16", 8: "Q8_0", 4: "Q4_K_M"}
ROPE_FACTORS = "rope_freqs.weight"  # (D / 2,) the divisors of Llama 3's rotation frequencies

# Each split rule splits this text in a different way.
ODD = "He'LL say: don't 12345!?\n\n  x\u0301y _a\u0940\t\u4e2d\u6587 http://A-b.C/\r\n   end"
# the methods of the gguf package's writer that add metadata, by the type of the value
ADDERS = {
    str: "add_string",
    bool: "add_bool",
    int: "add_uint32",
    float: "add_float32",
    list: "add_array",
}
# YaRN settings: the name in config.json -> the name in a GGUF file
YARN_KEYS = {
    "rope_type": "type",
    "factor": "factor",
    "original_max_position_embeddings": "original_context_length",
    "beta_fast": "yarn_beta_fast",
    "beta_slow": "yarn_beta_slow",
}


def write_gguf_and_return_summary(
    new_folder: Path,
    model_name: str,
    weights_to_empty: dict[str, mx.array],
    config: ModelConfig,
    tokenizer: Any,
    bits: int,
) -> str:
    """
    Writes the file NAME-LABEL.gguf into a new folder, and returns a summary for the user.

    NAME is the name of the model. LABEL names the types of the tensors: F16, Q8_0, Q4_K_M or Q4_0.

    weights_to_empty: the weights by Hugging Face name. Each weight is removed from the dictionary
        when it is written, so that only one matrix is in memory at a time.

    Raises ValueError if the model is not supported, or if the package gguf is missing.
    """
    if importlib.util.find_spec("gguf") is None:
        raise ValueError(
            "--export gguf needs the package gguf, which is not installed; "
            + advice_to_install_extra("gguf")
        )
    import gguf

    library = load_llama_cpp_library()
    label = LABELS[bits]
    if bits == 4 and library is None:
        label = "Q4_0"
    file = f"{model_name}-{label}.gguf"
    metadata = make_gguf_metadata(config, tokenizer)
    metadata["general.name"] = model_name
    metadata["general.file_type"] = int(gguf.LlamaFileType[f"MOSTLY_{label}"])
    metadata["general.quantization_version"] = gguf.GGML_QUANT_VERSION
    if config.rope_scaling and config.rope_scaling["rope_type"] == "llama3":
        weights_to_empty[ROPE_FACTORS] = llama3_frequency_divisors(config)

    new_folder.mkdir(parents=True)
    writer = gguf.GGUFWriter(new_folder / file, config.model_type, use_temp_file=True)
    for key, value in metadata.items():
        add = getattr(writer, ADDERS[type(value)])
        add(key, value)

    architecture = gguf.MODEL_ARCH[config.model_type.upper()]
    gguf_names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    counts = Counter[str]()
    for hub_name in list(weights_to_empty):
        tensor = weights_to_empty.pop(hub_name).astype(mx.float32)
        gguf_name = gguf_names.get_name(hub_name, (".weight", ".bias")) or hub_name
        if config.model_type == "llama":
            tensor = reorder_query_and_key_rows(hub_name, tensor, config)
        kind = choose_tensor_type(gguf_name, tensor.shape, config, label)
        packed = pack_matrix(np.ascontiguousarray(tensor), kind, library)
        writer.add_tensor(gguf_name, packed, raw_dtype=kind)
        counts[kind.name] += 1
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    summary = ", ".join(f"{num} {kind}" for kind, num in counts.items())
    return f"{file} with tensors {summary}"


# ---- tensors


def llama3_frequency_divisors(config: ModelConfig) -> mx.array:
    """The numbers by which Llama 3 divides its rotation frequencies, (D / 2,) float32."""
    plain = Rope(config.rotary_dim, config.rope_theta, None)
    scaled = Rope(config.rotary_dim, config.rope_theta, config.rope_scaling)
    return mx.array((plain.frequencies / scaled.frequencies).astype(np.float32))


def reorder_query_and_key_rows(hub_name: str, tensor: mx.array, config: ModelConfig) -> mx.array:
    """
    The tensor, with its rows in llama.cpp's order if it is a query or key projection.

    All other tensors are returned unchanged.
    """
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    num_heads = heads.get(hub_name.split(".")[-2])
    if num_heads is None:
        return tensor
    return reader.transpose_rows_within_heads(tensor, num_heads, config.head_dim // 2)


def choose_tensor_type(
    gguf_name: str, shape: tuple[int, ...], config: ModelConfig, label: str
) -> Any:
    """
    Returns the best type for a tensor (…, C). The block size of this type divides C.

    Which tensors get more bits in Q4_K_M, and which types are the fallbacks, is copied from
    https://github.com/ggml-org/llama.cpp, src/llama-quant.cpp.
    """
    import gguf

    if len(shape) == 1:
        names = ["F32"]
    else:
        names = [*preferred_type_names(gguf_name, config, label), "F16"]
    kinds = [gguf.GGMLQuantizationType[kind_name] for kind_name in names]
    return next(kind for kind in kinds if shape[-1] % gguf.GGML_QUANT_SIZES[kind][0] == 0)


def preferred_type_names(gguf_name: str, config: ModelConfig, label: str) -> list[str]:
    """The names of the types that a matrix may have in a file with this label, best type first."""
    head_name = "token_embd" if config.tie_word_embeddings else "output."
    is_head = gguf_name.startswith(head_name)
    if label == "F16":
        return []
    if label == "Q8_0":
        return ["Q8_0"]
    if label == "Q4_0":
        return ["Q8_0"] if is_head else ["Q4_0"]
    assert label == "Q4_K_M", label
    if is_head or q4_k_m_uses_more_bits(gguf_name, config.num_hidden_layers):
        return ["Q6_K", "Q8_0"]
    return ["Q4_K", "Q5_0"]


def q4_k_m_uses_more_bits(gguf_name: str, num_layers: int) -> bool:
    """
    Whether the Q4_K_M scheme uses more bits for this matrix.

    Q4_K_M uses more bits for the value and down projections in the first eighth of the layers, in
    the last eighth, and in every third layer in between.
    """
    if not gguf_name.startswith("blk."):
        return False
    _, number, part = gguf_name.split(".")[:3]
    if part not in ("attn_v", "ffn_down"):
        return False
    layer = int(number)
    eighth = num_layers // 8
    return layer < eighth or layer >= 7 * num_layers // 8 or (layer - eighth) % 3 == 2


def load_llama_cpp_library() -> ctypes.CDLL | None:
    """
    Loads llama.cpp's library from the package xllamacpp, or else from the system's libraries.

    Returns None if the library is not found.
    """
    spec = importlib.util.find_spec("xllamacpp")
    folders = spec.submodule_search_locations if spec else None
    files = []
    for folder in folders or []:
        files += [str(file) for file in Path(folder).glob("*.so")]
    path = files[0] if files else ctypes.util.find_library("ggml-base")
    return ctypes.CDLL(path) if path else None


def pack_matrix(matrix: np.ndarray, tensor_type: Any, library: ctypes.CDLL | None) -> np.ndarray:
    """The bytes of a float32 matrix (…, C) after conversion to the given tensor type."""
    import gguf

    if tensor_type.name in ("F32", "F16") or library is None:
        return np.asarray(gguf.quantize(matrix, tensor_type))
    packed = np.empty(gguf.quant_shape_to_byte_shape(matrix.shape, tensor_type), np.uint8)
    library.ggml_quantize_chunk(
        ctypes.c_int(tensor_type),
        ctypes.c_void_p(matrix.ctypes.data),
        ctypes.c_void_p(packed.ctypes.data),
        ctypes.c_int64(0),  # the index of the first row
        ctypes.c_int64(len(matrix)),
        ctypes.c_int64(matrix.shape[-1]),
        None,
    )
    return packed


# ---- metadata


def make_gguf_metadata(config: ModelConfig, tokenizer: Any) -> dict[str, Any]:
    """
    The GGUF metadata about the model and its tokenizer.

    Raises ValueError if the model family or the tokenizer is not supported.
    """
    architecture = config.model_type
    if architecture not in reader.ARCHITECTURES:
        raise ValueError(
            f"--export gguf does not support {config.family.members} yet, "
            f"only {', '.join(reader.ARCHITECTURES)}; "
            "use --fuse instead, and convert the directory that it writes with llama.cpp's "
            "convert_hf_to_gguf.py"
        )
    metadata = {}
    for attribute, key in reader.KEYS.items():
        metadata[f"{architecture}.{key}"] = getattr(config, attribute)
    metadata[f"{architecture}.attention.value_length"] = config.head_dim
    metadata |= make_tokenizer_metadata(config, tokenizer)
    scaling = config.rope_scaling or {}
    if scaling.get("rope_type") == "yarn":
        for setting, key in YARN_KEYS.items():
            metadata[f"{architecture}.rope.scaling.{key}"] = scaling[setting]
    return metadata


def make_tokenizer_metadata(config: ModelConfig, tokenizer: Any) -> dict[str, Any]:
    """
    The GGUF metadata about a tokenizer.

    Raises ValueError if the tokenizer's split rule is not in `SPLITS`.
    """
    merges = []
    for merge in json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]:
        merges.append(merge if isinstance(merge, str) else " ".join(merge))
    token_of_id = {number: token for token, number in tokenizer.get_vocab().items()}
    ids = range(config.vocab_size)
    template = tokenizer.chat_template
    if isinstance(template, dict):
        template = template["default"]
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": llama_cpp_split_rule_name(tokenizer),
        "tokenizer.ggml.tokens": [token_of_id.get(number, f"[PAD{number}]") for number in ids],
        "tokenizer.ggml.token_type": gguf_token_types(tokenizer, config.vocab_size),
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.add_bos_token": prompts_begin_with_bos(tokenizer),
        "tokenizer.chat_template": template,
    }
    candidates = [tokenizer.eos_token_id, *config.eos_ids]
    eos_ids = [number for number in candidates if number in config.eos_ids]
    control_ids = {
        "eos": next(iter(eos_ids), None),
        "bos": tokenizer.bos_token_id,
        "padding": tokenizer.pad_token_id,
    }
    for name, number in control_ids.items():
        if number is not None:
            metadata[f"tokenizer.ggml.{name}_token_id"] = number
    return metadata


def gguf_token_types(tokenizer: Any, vocab_size: int) -> list[int]:
    """The GGUF type of each token id, which is normal, user-defined, control or unused."""
    import gguf

    vocabulary_ids = set(tokenizer.get_vocab().values())
    added_tokens = tokenizer.added_tokens_decoder
    types = []
    for number in range(vocab_size):
        kind = gguf.TokenType.NORMAL
        if number not in vocabulary_ids:
            kind = gguf.TokenType.UNUSED
        elif number in added_tokens:
            is_special = added_tokens[number].special
            kind = gguf.TokenType.CONTROL if is_special else gguf.TokenType.USER_DEFINED
        types.append(int(kind))
    return types


def prompts_begin_with_bos(tokenizer: Any) -> bool:
    """
    Whether training prompts begin with the tokenizer's beginning-of-text token.

    Training uses the text of the chat template unchanged. A program that reads a GGUF file adds
    the token before this text if the file says so, even if the template already writes the token.
    """
    return chat_template.encode_chat(tokenizer, "Hi")[:1] == [tokenizer.bos_token_id]


def llama_cpp_split_rule_name(tokenizer: Any) -> str:
    """
    llama.cpp's name for the rule by which a tokenizer splits text.

    Raises ValueError if the rule is not in `SPLITS`.
    """
    splitter = tokenizer.backend_tokenizer.pre_tokenizer
    pieces = []
    if splitter:
        pieces = [piece for piece, _ in splitter.pre_tokenize_str(ODD)]
    for name in reader.SPLITS:
        rule_pieces = [piece for piece, _ in reader.make_pre_tokenizer(name).pre_tokenize_str(ODD)]
        if pieces == rule_pieces:
            return name
    raise ValueError(
        f"--export gguf: the tokenizer splits text by a rule other than "
        f"{', '.join(reader.SPLITS)}; use --fuse instead"
    )
