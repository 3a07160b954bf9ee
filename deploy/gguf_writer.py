"""
Writes GGUF files: a model as llama.cpp, Ollama and LM Studio read it, in 16, 8 or 4 bits.

Norms and biases stay float32. Matrices become F16, Q8_0, or at 4 bits what llama.cpp's Q4_K_M takes for each; only its
own library packs these, and without it they become Q4_0. Left out: Qwen3.5 and SmolLM3, tokenizers with another split
rule than `SPLITS`, errors weighed by sample texts.

Axes: H heads, D head dim, C input width.
"""

import ctypes
import ctypes.util
import importlib.util
import json
from collections import Counter
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from disk import gguf as reader
from disk.hub import ModelConfig
from layers.ops import Rope
from problems import chat_template

LABELS = {16: "F16", 8: "Q8_0", 4: "Q4_K_M"}
ROPE_FACTORS = "rope_freqs.weight"  # (D / 2,) what Llama 3 divides the frequencies by
# each rule splits this in another way
ODD = "He'LL say: don't 12345!?\n\n  x\u0301y _a\u0940\t\u4e2d\u6587 http://A-b.C/\r\n   end"


def write_gguf(
    folder: Path,
    name: str,
    weights: dict[str, mx.array],
    config: ModelConfig,
    tokenizer: Any,
    bits: int,
) -> str:
    """
    Writes NAME-KIND.gguf into a new folder; returns in words what was written.

    weights: by Hugging Face name; emptied on the way, so that one matrix at a time is in memory.
    Raises ValueError for a model that such a file cannot hold, and where the package gguf is missing.
    """
    if importlib.util.find_spec("gguf") is None:
        raise ValueError(
            "--export gguf: gguf is not installed; begin the command with: uv run --extra gguf"
        )
    import gguf

    library = find_llama_cpp()
    label = "Q4_0" if bits == 4 and library is None else LABELS[bits]
    file = f"{name}-{label}.gguf"
    metadata = make_metadata(config, tokenizer) | {
        "general.name": name,
        "general.file_type": int(gguf.LlamaFileType[f"MOSTLY_{label}"]),
        "general.quantization_version": gguf.GGML_QUANT_VERSION,
    }
    if config.rope_scaling and config.rope_scaling["rope_type"] == "llama3":
        plain, slower = (
            Rope(config.rotary_dim, config.rope_theta, one) for one in (None, config.rope_scaling)
        )
        weights[ROPE_FACTORS] = mx.array(
            (plain.frequencies / slower.frequencies).astype(np.float32)
        )
    folder.mkdir(parents=True)
    writer = gguf.GGUFWriter(folder / file, config.model_type, use_temp_file=True)
    adders = {str: "string", bool: "bool", int: "uint32", float: "float32", list: "array"}
    for key, value in metadata.items():
        getattr(writer, f"add_{adders[type(value)]}")(key, value)
    names = gguf.get_tensor_name_map(
        gguf.MODEL_ARCH[config.model_type.upper()], config.num_hidden_layers
    )
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    counts = Counter[str]()
    for ours in list(weights):
        tensor, name = (
            weights.pop(ours).astype(mx.float32),
            names.get_name(ours, (".weight", ".bias")) or ours,
        )
        if config.model_type == "llama" and (part := ours.split(".")[-2]) in heads:
            tensor = reader.reorder_heads(tensor, heads[part], config.head_dim // 2)
        kind = choose_tensor_type(name, tensor.shape, config, label)
        writer.add_tensor(
            name, pack_matrix(np.ascontiguousarray(tensor), kind, library), raw_dtype=kind
        )
        counts[kind.name] += 1
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return f"{file} with tensors {', '.join(f'{num} {kind}' for kind, num in counts.items())}"


def choose_tensor_type(name: str, shape: tuple[int, ...], config: ModelConfig, label: str) -> Any:
    """
    The kind of a tensor: of those that its file would have, best first, the one whose blocks divide the rows (…, C).

    Source: https://github.com/ggml-org/llama.cpp, src/llama-quant.cpp: what Q4_K_M gives more bits, and the fallbacks.
    """
    import gguf

    num, is_head = (
        config.num_hidden_layers,
        name.startswith("token_embd" if config.tie_word_embeddings else "output."),
    )
    layer, part = map(name.split(".").__getitem__, (1, 2)) if name.startswith("blk.") else (0, name)
    is_edge = (
        int(layer) < num // 8 or int(layer) >= 7 * num // 8 or (int(layer) - num // 8) % 3 == 2
    )
    k_quants = (
        "Q6_K Q8_0" if is_head or (part in ("attn_v", "ffn_down") and is_edge) else "Q4_K Q5_0"
    )
    tried = {"F16": "", "Q8_0": "Q8_0", "Q4_0": "Q8_0" if is_head else "Q4_0", "Q4_K_M": k_quants}[
        label
    ].split()
    kinds = [
        gguf.GGMLQuantizationType[one] for one in (["F32"] if len(shape) == 1 else [*tried, "F16"])
    ]
    return next(kind for kind in kinds if shape[-1] % gguf.GGML_QUANT_SIZES[kind][0] == 0)


def find_llama_cpp() -> ctypes.CDLL | None:
    """llama.cpp's library, inside the package xllamacpp or installed on this machine, if there is one."""
    spec = importlib.util.find_spec("xllamacpp")
    places = [Path(place) for place in (spec and spec.submodule_search_locations) or []]
    found = [str(file) for place in places for file in place.glob("*.so")]
    path = found[0] if found else ctypes.util.find_library("ggml-base")
    return ctypes.CDLL(path) if path else None


def pack_matrix(matrix: np.ndarray, kind: Any, library: ctypes.CDLL | None) -> np.ndarray:
    """A float32 matrix (…, C) in the bytes of its kind."""
    import gguf

    if kind.name in ("F32", "F16") or library is None:
        return np.asarray(gguf.quantize(matrix, kind))
    out = np.empty(gguf.quant_shape_to_byte_shape(matrix.shape, kind), np.uint8)
    pointers = (ctypes.c_void_p(array.ctypes.data) for array in (matrix, out))
    rows = map(ctypes.c_int64, (0, len(matrix), matrix.shape[-1]))  # from the first on
    library.ggml_quantize_chunk(ctypes.c_int(kind), *pointers, *rows, None)
    return out


def make_metadata(config: ModelConfig, tokenizer: Any) -> dict[str, Any]:
    """What a file says of model and tokenizer. Raises ValueError for a family or tokenizer that it cannot hold."""
    import gguf

    kind, scaling = config.model_type, config.rope_scaling or {}
    if kind not in reader.ARCHITECTURES:
        known = ", ".join(reader.ARCHITECTURES)
        fix = "use --fuse, and llama.cpp's convert_hf_to_gguf.py on what it writes"
        raise ValueError(
            f"--export gguf: {config.family.members} is not written yet, only {known}; {fix}"
        )
    backend = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    names = {number: token for token, number in tokenizer.get_vocab().items()}
    added = {number: token.special for number, token in tokenizer.added_tokens_decoder.items()}
    kinds = {
        True: gguf.TokenType.CONTROL,
        False: gguf.TokenType.USER_DEFINED,
        None: gguf.TokenType.NORMAL,
    }
    ids, templates = range(config.vocab_size), tokenizer.chat_template
    metadata: dict[str, Any] = {
        f"{kind}.{theirs}": getattr(config, ours) for ours, theirs in reader.KEYS.items()
    } | {
        f"{kind}.attention.value_length": config.head_dim,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": tokenizer_rule(tokenizer),
        "tokenizer.ggml.tokens": [names.get(one, f"[PAD{one}]") for one in ids],
        "tokenizer.ggml.token_type": [
            int(kinds[added.get(one)] if one in names else gguf.TokenType.UNUSED) for one in ids
        ],
        "tokenizer.ggml.merges": [
            one if isinstance(one, str) else " ".join(one) for one in backend["merges"]
        ],
        "tokenizer.ggml.add_bos_token": prompts_begin_with_bos(tokenizer),
        "tokenizer.chat_template": templates["default"]
        if isinstance(templates, dict)
        else templates,
    }
    ends = [one for one in (tokenizer.eos_token_id, *config.eos_ids) if one in config.eos_ids]
    control = {
        "eos": next(iter(ends), None),
        "bos": tokenizer.bos_token_id,
        "padding": tokenizer.pad_token_id,
    }
    for name, number in control.items():
        if number is not None:
            metadata[f"tokenizer.ggml.{name}_token_id"] = number
    if scaling.get("rope_type") == "yarn":
        named = {
            "rope_type": "type",
            "factor": "factor",
            "original_max_position_embeddings": "original_context_length",
        }
        named |= {f"beta_{end}": f"yarn_beta_{end}" for end in ("fast", "slow")}
        metadata |= {
            f"{kind}.rope.scaling.{theirs}": scaling[ours] for ours, theirs in named.items()
        }
    return metadata


def prompts_begin_with_bos(tokenizer: Any) -> bool:
    """
    Whether the prompts of training begin with the tokenizer's first token.

    Training takes the template's text as it is. A program that reads a GGUF file puts the token in front where the file
    says so, whatever the template writes.
    """
    return chat_template.encode_chat(tokenizer, "Hi")[:1] == [tokenizer.bos_token_id]


def tokenizer_rule(tokenizer: Any) -> str:
    """llama.cpp's name of the rule by which a tokenizer splits text. Raises ValueError where it is none of `SPLITS`."""
    its = tokenizer.backend_tokenizer.pre_tokenizer
    pieces = [piece for piece, _ in its.pre_tokenize_str(ODD)] if its else []
    for name in reader.SPLITS:
        if pieces == [piece for piece, _ in reader.make_splitter(name).pre_tokenize_str(ODD)]:
            return name
    raise ValueError(
        f"--export gguf: the tokenizer splits text otherwise than {', '.join(reader.SPLITS)}; use --fuse"
    )
