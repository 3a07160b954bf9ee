"""
Reads a GGUF file, the model format of llama.cpp, as if the file were a model directory.

The package gguf parses the file, and `open_gguf_file` also checks that all values are inside the
file. The configuration and the tokenizer are written once to Gwen's cache, with a link to the file.
Weights of all types that the package supports are read from the file and dequantized. Rotary
scaling is not supported. The tokenizer must be byte-level BPE with a split rule in `SPLITS`.

Axes: H heads, D head dim, C input width.
"""

import contextlib
import importlib.util
import json
import os
import tempfile
from hashlib import sha256
from pathlib import Path
from typing import Any

import cpu_blas  # before mlx
import mlx.core as mx
import numpy as np

from disk.files import first_line_of_error, refuse_lfs_pointer
from flags import add_path_to_os_errors
from text.commands import advice_to_install_extra

# The version of the files that `extract_to_cached_model_directory` writes. If the version changes,
# every GGUF file is converted again.
FORMAT_VERSION = 1
LINK = "model.gguf"
KEYS = {  # key in config.json -> key in the GGUF file, without the name of the architecture
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "max_position_embeddings": "context_length",
    "rope_theta": "rope.freq_base",
}
OPTIONAL = {"num_key_value_heads", "head_dim"}
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
PARTS = [  # names of modules, which the package gguf translates to the names in a GGUF file
    "model.embed_tokens",
    "model.norm",
    "lm_head",
    "model.layers.0.self_attn.q_proj",
    "model.layers.0.self_attn.k_proj",
    "model.layers.0.self_attn.v_proj",
    "model.layers.0.self_attn.o_proj",
    "model.layers.0.self_attn.q_norm",
    "model.layers.0.self_attn.k_norm",
    "model.layers.0.mlp.gate_proj",
    "model.layers.0.mlp.up_proj",
    "model.layers.0.mlp.down_proj",
    "model.layers.0.input_layernorm",
    "model.layers.0.post_attention_layernorm",
]
QWEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPLITS = ("smollm", "qwen2", "llama-bpe")  # supported values of tokenizer.ggml.pre

# The maximum number of values in a header. Each value takes 200 bytes of memory. A vocabulary of
# 150,000 tokens with its merges needs half of this number.
MAX_PARTS = 2**21
PIECE = 2**24  # the number of bytes of a tensor that are dequantized at once
WIDE = {"F32": mx.float32, "F16": mx.float16, "BF16": mx.bfloat16}  # types of 16 bits or more


# ---- the model directory


def extract_to_cached_model_directory(gguf_path: Path) -> Path:
    """
    Return a model directory for a GGUF file: config.json, a tokenizer and a link to the file.

    The directory is in Gwen's cache, and is written if it does not exist. Raises ValueError if the
    file does not contain a supported model.
    """
    status = gguf_path.stat()
    identity = f"{FORMAT_VERSION} {gguf_path.resolve()} {status.st_size} {status.st_mtime_ns}"
    key = sha256(identity.encode()).hexdigest()[:16]
    cache = cpu_blas.make_private_or_temporary_cache() / "gguf"
    directory = cache / f"{gguf_path.stem}-{key}"
    if directory.is_dir():
        return directory

    config, tokenizer = _read_config_and_tokenizer(gguf_path)
    cache.mkdir(parents=True, exist_ok=True)
    scratch = tempfile.TemporaryDirectory(prefix=".begun-", dir=cache, ignore_cleanup_errors=True)
    with add_path_to_os_errors(directory), scratch as partial:
        (Path(partial) / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        tokenizer.save_pretrained(partial)
        (Path(partial) / LINK).symlink_to(gguf_path.resolve())
        with contextlib.suppress(OSError):  # Another process may have written the directory.
            os.rename(partial, directory)
    return directory


def _read_config_and_tokenizer(path: Path) -> tuple[dict[str, Any], Any]:
    """
    Return the content of config.json and the tokenizer for a GGUF file.

    Raises ValueError if the model or the tokenizer is not supported.
    """
    reader = open_gguf_file(path)
    try:
        metadata = {name: field.contents() for name, field in reader.fields.items()}
        config = make_config_from_metadata(metadata, reader.tensors)
        tokenizer = make_tokenizer(metadata)
        # only to refuse unknown tensors
        map_tensors_by_hub_name(reader.tensors, config["model_type"])
    except ValueError as error:
        raise ValueError(f"--model {path} has {error}") from error
    except Exception as error:
        # Metadata is missing or has the wrong type, or the tokenizers library has failed.
        reason = f"{type(error).__name__}: {first_line_of_error(error):.200}"
        raise ValueError(f"--model {path} has no valid metadata of a model: {reason}") from error
    return config, tokenizer


def make_config_from_metadata(metadata: dict[str, Any], tensors: list[Any]) -> dict[str, Any]:
    """
    Return the content of a config.json for the metadata of a GGUF file.

    Raises ValueError if a value is not supported, and KeyError if a value is missing.
    """
    kind = metadata.get("general.architecture")
    if kind not in ARCHITECTURES:
        supported = ", ".join(ARCHITECTURES)
        raise ValueError(
            f"the architecture {kind!r:.60}; the supported architectures are {supported}"
        )
    scaling = metadata.get(f"{kind}.rope.scaling.type", "none")
    if scaling != "none":
        raise ValueError(
            f"the rotary scaling {scaling!r:.60}, which is not supported in a GGUF file"
        )

    config: dict[str, Any] = {"architectures": [ARCHITECTURES[kind]], "model_type": kind}
    for key, stored_key in KEYS.items():
        full_key = f"{kind}.{stored_key}"
        if full_key in metadata or key not in OPTIONAL:
            config[key] = metadata[full_key]
    config["vocab_size"] = len(metadata["tokenizer.ggml.tokens"])
    config["tie_word_embeddings"] = all(tensor.name != "output.weight" for tensor in tensors)
    config["hidden_act"] = "silu"
    config["bos_token_id"] = metadata.get("tokenizer.ggml.bos_token_id")
    config["eos_token_id"] = metadata["tokenizer.ggml.eos_token_id"]
    config["dtype"] = "float32"
    return config


# ---- the GGUF file


def open_gguf_file(path: Path) -> Any:
    """
    Open a GGUF file with the package gguf.

    Returns the package's reader of this file, which has the attributes `fields` and `tensors`.

    Raises ValueError if the package is not installed, or if the file is damaged.
    """
    if importlib.util.find_spec("gguf") is None:
        raise ValueError(
            f"--model {path} needs the package gguf, which is not installed; "
            + advice_to_install_extra("gguf")
        )
    refuse_lfs_pointer(path)
    import gguf

    class BoundsCheckingReader(gguf.GGUFReader):
        num_parts = 0

        def _get(
            self, offset: int, dtype: Any, count: int = 1, override_order: Any = None
        ) -> np.ndarray:
            """
            Read `count` values after checking that they are inside the file.

            The method that this one replaces may read past the end of the file. This method is five
            times as fast, but cannot read files whose bytes are swapped.
            """
            self.num_parts += 1
            end = offset + int(count) * np.dtype(dtype).itemsize
            if end > len(self.data) or self.num_parts > MAX_PARTS:
                raise ValueError(
                    f"{count} values at byte {offset} run past the end of the file, or the header "
                    f"has more than {MAX_PARTS:,} values"
                )
            return np.frombuffer(self.data, dtype, int(count), offset)

    try:
        with np.errstate(over="raise"):
            reader = BoundsCheckingReader(path)
        sizes = [tensor.n_bytes if tensor.data.ndim else 0 for tensor in reader.tensors]
        if reader.byte_order != "I" or 0 in sizes or sum(sizes) > len(reader.data):
            raise ValueError("its bytes are swapped, or its tensors are empty or overlap")
    except Exception as error:  # The package may raise any error of numpy.
        raise ValueError(
            f"--model {path} cannot be read as a complete GGUF file: {error!s:.200}"
        ) from error
    return reader


def map_tensors_by_hub_name(tensors: list[Any], model_type: str) -> dict[str, Any]:
    """
    Return the tensors of a GGUF file in a dictionary, whose keys are their Hugging Face names.

    Raises ValueError if a tensor is not supported.
    """
    import gguf

    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[model_type.upper()], 1)
    modules = {names.get_name(part): part for part in PARTS}
    by_name = {}
    for tensor in tensors:
        stem, _, ending = tensor.name.rpartition(".")
        layer = ""
        stored_module = stem
        if stem.count(".") == 2:  # For "blk.7.attn_q", look up the module of layer 0.
            _, layer, part = stem.split(".")
            stored_module = f"blk.0.{part}" if layer else part
        module = modules.get(stored_module)
        if module is None or ending not in ("weight", "bias"):
            raise ValueError(f"the tensor {tensor.name:.60}, which is not supported")
        name = f"{module}.{ending}".replace("layers.0.", f"layers.{layer}.")
        by_name[name] = tensor
    return by_name


def load_gguf_weights(
    path: Path, config: dict[str, Any], dequantized_dtype: mx.Dtype
) -> dict[str, mx.array]:
    """
    Load all weights in a GGUF file, and return them by Hugging Face name.

    Weights of fewer than 16 bits are dequantized to `dequantized_dtype`.

    config: the content of the config.json that `extract_to_cached_model_directory` wrote.

    Raises ValueError if the file is damaged or a tensor has an unsupported type.
    """
    import gguf

    num_heads = config["num_attention_heads"]
    heads = {"q_proj": num_heads, "k_proj": config.get("num_key_value_heads") or num_heads}
    weights = {}
    tensors = map_tensors_by_hub_name(open_gguf_file(path).tensors, config["model_type"])
    for name, tensor in tensors.items():
        kind = tensor.tensor_type
        part = name.split(".")[-2]
        num_pieces = min(len(tensor.data), -(-tensor.n_bytes // PIECE))
        pieces = np.array_split(tensor.data, num_pieces)
        wide_dtype = WIDE.get(kind.name, dequantized_dtype)
        try:
            with np.errstate(all="ignore"):  # The scales of quantized weights may be infinite.
                arrays = [mx.array(gguf.dequantize(piece, kind), wide_dtype) for piece in pieces]
            weights[name] = mx.concatenate(arrays)
            if config["model_type"] == "llama" and part in heads:
                weights[name] = transpose_rows_within_heads(weights[name], heads[part], 2)
        except (NotImplementedError, ValueError) as error:  # unknown type, or wrong number of heads
            raise ValueError(f"--model {path}: {tensor.name}: {error}") from error
    return weights


def transpose_rows_within_heads(rows: mx.array, num_heads: int, inner_width: int) -> mx.array:
    """
    Return the rows (H * D, …) of a query or key projection in another order.

    The row numbers of each head are arranged in a matrix (D / inner_width, inner_width), and the
    matrix is transposed. An inner width of 2 converts the row order of llama.cpp to that of
    Hugging Face; D / 2 converts it back. The orders differ because llama.cpp rotates neighboring
    rows together, while Hugging Face rotates each row in the first half of a head together with a
    row in the second half.
    """
    paired = rows.reshape(
        num_heads, rows.shape[0] // num_heads // inner_width, inner_width, *rows.shape[1:]
    )
    return paired.swapaxes(1, 2).reshape(rows.shape)


# ---- the tokenizer


def make_pre_tokenizer(split_rule: str) -> Any:
    """
    Return the object that splits a text into words before the tokenizer applies its merges.

    split_rule: a value in `SPLITS`.
    """
    from tokenizers import Regex, pre_tokenizers

    if split_rule == "smollm":
        first: Any = pre_tokenizers.Digits(individual_digits=True)
    else:
        digits = r"\p{N}{1,3}" if split_rule == "llama-bpe" else r"\p{N}"
        pattern = QWEN_SPLIT.replace(r"|\p{N}|", f"|{digits}|")
        first = pre_tokenizers.Split(Regex(pattern), "isolated")
    second = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split_rule == "smollm")
    return pre_tokenizers.Sequence([first, second])


def make_tokenizer(metadata: dict[str, Any]) -> Any:
    """
    Return a transformers tokenizer for the metadata of a GGUF file.

    Raises ValueError if the tokenizer is not supported.
    """
    kind = metadata.get("tokenizer.ggml.model")
    split = metadata.get("tokenizer.ggml.pre")
    if kind != "gpt2" or split not in SPLITS:
        supported = ", ".join(SPLITS)
        raise ValueError(
            f"the tokenizer {kind!r:.60} with the split rule {split!r:.60}; "
            f"it must be gpt2 with {supported}"
        )
    if not metadata.get("tokenizer.chat_template"):
        raise ValueError("no chat template; use the file of an instruct model")
    from transformers import PreTrainedTokenizerFast  # not at the top: the import takes seconds

    return PreTrainedTokenizerFast(
        tokenizer_object=_make_fast_tokenizer(metadata, str(split)),
        chat_template=metadata["tokenizer.chat_template"],
        **_read_control_tokens(metadata),
    )


def _make_fast_tokenizer(metadata: dict[str, Any], split: str) -> Any:
    """Return a tokenizer with the vocabulary, merges, split rule and added tokens of the file."""
    import gguf
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

    tokens = metadata["tokenizer.ggml.tokens"]
    kinds = metadata["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    ids = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(ids, merges, ignore_merges=split == "llama-bpe"))
    if split == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = make_pre_tokenizer(split)
    tokenizer.decoder = decoders.ByteLevel()

    is_special = {gguf.TokenType.CONTROL: True, gguf.TokenType.USER_DEFINED: False}
    added = []
    for token, kind in zip(tokens, kinds, strict=True):
        if kind in is_special:
            added.append(AddedToken(token, special=is_special[kind], normalized=False))
    tokenizer.add_tokens(added)
    return tokenizer


def _read_control_tokens(metadata: dict[str, Any]) -> dict[str, str]:
    """Return the control tokens in the metadata, by the names that transformers gives them."""
    tokens = metadata["tokenizer.ggml.tokens"]
    stored_names = {
        "bos_token": "bos",
        "eos_token": "eos",
        "unk_token": "unknown",
        "pad_token": "padding",
    }
    control = {}
    for name, stored_name in stored_names.items():
        number = metadata.get(f"tokenizer.ggml.{stored_name}_token_id")
        if number is not None:
            control[name] = tokens[number]
    return control
