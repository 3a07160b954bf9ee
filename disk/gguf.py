"""
GGUF files: llama.cpp's model, tokenizer and settings in one file, translated at the door into a Hugging Face directory.

The header is read and bounded here first: MLX's reader ends the process on lengths, dimensions and kinds that lie.
Configuration and tokenizer are written once to Gwen's cache, beside a link to the file; its weights are read from there
and spread out in memory. MLX reads weights of 32 or 16 bits, Q8_0, Q4_0 and Q4_1 exactly, Q2_K and Q6_K rounded to 16;
files with Q4_K, Q5_0 or Q5_K are read, rounded to 16, by the package gguf. Left out: tokenizers other than byte-level
BPE with a split rule in `SPLITS`, and the rotary scaling that some files hold as factors.

Axes: H heads, D head dim, C input width.
"""

import contextlib
import importlib.util
import json
import math
import mmap
import os
import struct
import tempfile
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import cpu_blas  # before mlx
import mlx.core as mx
import numpy as np

FORM = 1  # of what `directory_of` writes; a change makes every file be translated again
LINK = "model.gguf"
KEYS = {  # of config.json, by what the file calls them after the architecture's name
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
ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
PARTS = {  # of a tensor's name, between `blk.N.` and `.weight` or `.bias`
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
WHOLE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
QWEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPLITS = ("smollm", "qwen2", "llama-bpe")  # values of tokenizer.ggml.pre
NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5  # types of tokens
NUMBERS = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q"}  # struct's letters, by kind of metadata; not float64
TEXT, LIST = 8, 9  # the other kinds
BLOCKS = {  # values and bytes of a block, by kind of tensor
    0: (1, 4),  # float32
    1: (1, 2),  # float16
    2: (32, 18),  # Q4_0
    3: (32, 20),  # Q4_1
    6: (32, 22),  # Q5_0
    8: (32, 34),  # Q8_0
    10: (256, 84),  # Q2_K
    12: (256, 144),  # Q4_K
    13: (256, 176),  # Q5_K
    14: (256, 210),  # Q6_K
    30: (1, 2),  # bfloat16
}
UNREAD = {6, 12, 13}  # MLX 0.32.4 fails at Q5_0 and Q5_K, and reads Q4_K wrongly: off by as much as the weights are


class Place(NamedTuple):
    """Where a tensor's bytes lie behind the header, and what they are."""

    first: int
    after: int
    shape: list[int]  # llama.cpp's order: C first
    kind: int


def directory_of(path: Path) -> Path:
    """
    The directory of a GGUF file, written if this file has none yet: config.json, the tokenizer and a link to the file.

    Raises ValueError naming what is wrong with the file, or what in it is not supported.
    """
    about = path.stat()
    key = sha256(f"{FORM} {path.resolve()} {about.st_size} {about.st_mtime_ns}".encode()).hexdigest()[:16]
    cache = cpu_blas.cache_directory() / "gguf"
    directory = cache / f"{path.stem}-{key}"
    if directory.is_dir():
        return directory
    tensors, metadata = load(path)
    try:
        config, tokenizer = config_of(metadata, tied="output.weight" not in tensors), tokenizer_of(metadata)
        weights_of(tensors, config)  # lazy: only to refuse what is unknown
    except ValueError as error:
        raise ValueError(f"--model {path} has {error}") from error
    except Exception as error:  # metadata that is missing or of another type, or from the tokenizer's library
        said = f"--model {path} holds metadata of no model: {type(error).__name__}: {error!s:.200}"
        raise ValueError(said) from error
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".begun-", dir=cache, ignore_cleanup_errors=True) as begun:
        (Path(begun) / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        tokenizer.save_pretrained(begun)
        (Path(begun) / LINK).symlink_to(path.resolve())
        with contextlib.suppress(OSError):  # another process was faster
            os.rename(begun, directory)
    return directory


def load(path: Path) -> tuple[dict[str, mx.array], dict[str, Any]]:
    """Tensors by llama.cpp's names, and the metadata as numbers, texts and lists. ValueError for no such file."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            metadata, places, start = checked_header(content)
            if any(place.kind in UNREAD for place in places.values()):
                return unpacked(content, places, start), metadata
        tensors: Any = mx.load(str(path), format="gguf")
    except (ValueError, RuntimeError, struct.error) as error:
        raise ValueError(f"--model {path} is not a whole GGUF file that can be read: {error!s:.200}") from error
    return tensors, metadata


def unpacked(content: mmap.mmap, places: dict[str, Place], start: int) -> dict[str, mx.array]:
    """All tensors of a file that MLX cannot read, matrices in 16 bits. ValueError where the package gguf is missing."""
    if importlib.util.find_spec("gguf") is None:
        raise ValueError("its Q4_K, Q5_0 or Q5_K needs the package gguf; begin the command with: uv run --extra gguf")
    import gguf

    tensors = {}
    for name, (first, after, shape, kind) in places.items():
        rows = np.frombuffer(content, np.uint8, after - first, start + first).reshape(*shape[:0:-1], -1)
        values = gguf.dequantize(rows, gguf.GGMLQuantizationType(kind))
        tensors[name] = mx.array(values.astype(np.float16) if len(shape) == 2 else values)  # numpy does not wait for it
    return tensors


def checked_header(content: mmap.mmap | bytes) -> tuple[dict[str, Any], dict[str, Place], int]:
    """
    The metadata of a file, where each of its tensors lies behind the header, and where that ends.

    Raises ValueError or struct.error for a header that is no GGUF, or says something that cannot be.
    Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
    """
    place = 4

    def number(letter: str) -> Any:
        nonlocal place
        (value,) = struct.unpack_from(f"<{letter}", content, place)
        place += struct.calcsize(f"<{letter}")
        return value

    def count(least: int) -> int:
        """A number of parts, each of at least so many bytes."""
        parts: int = number("Q")
        if parts * least > len(content) - place:
            raise ValueError(f"{parts} parts of {least} bytes reach beyond its end")
        return parts

    def text() -> str:
        nonlocal place
        size = count(1)
        place += size
        return bytes(content[place - size : place]).decode()

    def content_of(kind: int, is_inner: bool = False) -> Any:
        if kind == TEXT:
            return text()
        if kind == LIST and not is_inner:
            inner = number("I")
            return [content_of(inner, True) for _ in range(count(1))]
        if kind not in NUMBERS:
            raise ValueError(f"metadata of kind {kind}")
        return number(NUMBERS[kind])

    if content[:4] != b"GGUF" or (version := number("I")) not in (2, 3):
        raise ValueError("it does not begin with GGUF" if content[:4] != b"GGUF" else f"its version is {version}")
    num_tensors, num_pairs = count(24), count(12)
    metadata = {text(): content_of(number("I")) for _ in range(num_pairs)}
    tensors = {text(): place_of(number) for _ in range(num_tensors)}
    if len(metadata) < num_pairs or len(tensors) < num_tensors:
        raise ValueError("a name stands twice in it")
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or not 0 < alignment <= 2**16 or alignment & (alignment - 1):
        raise ValueError(f"its alignment is {alignment!r:.60}")
    end, size = 0, len(content) - (place + -place % alignment)
    for first, after, name in sorted((place.first, place.after, name) for name, place in tensors.items()):
        if first < end or after > size or first % alignment:
            raise ValueError(f"{name!r:.60} lies at {first} to {after} of {size} bytes, where {end} are taken")
        end = after
    return metadata, tensors, len(content) - size


def place_of(number: Callable[[str], Any]) -> Place:
    """Reads where a tensor lies. ValueError for a shape or kind that is not supported."""
    if (num_dims := number("I")) not in (1, 2):
        raise ValueError(f"a tensor of {num_dims} dimensions")
    shape, kind, first = [number("Q") for _ in range(num_dims)], number("I"), number("Q")
    values, size = BLOCKS.get(kind, (0, 0))
    if not values or not all(shape) or shape[0] % values:
        raise ValueError(f"a tensor of shape {shape} and kind {kind}")
    return Place(first, first + math.prod(shape) // values * size, shape, kind)


def config_of(metadata: dict[str, Any], tied: bool) -> dict[str, Any]:
    """The content of config.json. Raises ValueError for what is not supported, KeyError for what is missing."""
    kind = metadata.get("general.architecture")
    if kind not in ARCHITECTURES:
        raise ValueError(f"the architecture {kind!r:.60}; those supported are {', '.join(ARCHITECTURES)}")
    if (scaling := metadata.get(f"{kind}.rope.scaling.type", "none")) != "none":
        raise ValueError(f"the rotary scaling {scaling!r:.60}, which is not supported in a GGUF file")
    named = {ours: f"{kind}.{theirs}" for ours, theirs in KEYS.items()}
    return {
        "architectures": [ARCHITECTURES[kind]],
        "model_type": kind,
        **{ours: metadata[key] for ours, key in named.items() if key in metadata or ours not in OPTIONAL},
        "vocab_size": len(metadata["tokenizer.ggml.tokens"]),
        "tie_word_embeddings": tied,
        "hidden_act": "silu",
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": metadata["tokenizer.ggml.eos_token_id"],
        "dtype": "float32",
    }


def weights_of(tensors: dict[str, mx.array], config: dict[str, Any]) -> dict[str, mx.array]:
    """The weights by Hugging Face name, those of few bits as float32. ValueError names one that is not supported."""
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config.get("num_key_value_heads")}
    weights: dict[str, mx.array] = {}
    for name, tensor in tensors.items():
        stem, _, ending = name.rpartition(".")
        if ending in ("scales", "biases"):
            continue
        layer, part = stem.split(".")[1:] if stem.count(".") == 2 else ("", stem)
        ours = f"model.layers.{layer}.{PARTS[part]}" if layer and part in PARTS else WHOLE.get(stem)
        if ours is None or ending not in ("weight", "bias"):
            raise ValueError(f"the tensor {name}, which is not supported")
        if tensor.dtype == mx.uint32:
            tensor = dequantized(tensor, tensors[f"{stem}.scales"], tensors[f"{stem}.biases"])
        if config["model_type"] == "llama" and part in heads:
            tensor = halves(tensor, heads[part] or config["num_attention_heads"])
        weights[f"{ours}.{ending}"] = tensor
    return weights


def dequantized(packed: mx.array, scales: mx.array, biases: mx.array) -> mx.array:
    """Weights (…, C) float32 of groups of 32, each value scale * whole number + bias."""
    bits = packed.shape[-1] // scales.shape[-1]
    scales, biases = scales.astype(mx.float32), biases.astype(mx.float32)
    return mx.dequantize(packed, scales, biases, group_size=32, bits=bits)


def halves(rows: mx.array, num_heads: int) -> mx.array:
    """
    Rows (H * D, …) of a query or key projection in Hugging Face's order, which rotates the first half of a head with
    the second; llama.cpp rotates neighbours and has interleaved the halves.
    """
    paired = rows.reshape(num_heads, rows.shape[0] // num_heads // 2, 2, *rows.shape[1:])
    return paired.swapaxes(1, 2).reshape(rows.shape)


def splitter(split: str) -> Any:
    """What splits a text by one of `SPLITS`, before merges."""
    from tokenizers import Regex, pre_tokenizers

    first: Any = pre_tokenizers.Digits(individual_digits=True)
    if split != "smollm":
        digits = r"\p{N}{1,3}" if split == "llama-bpe" else r"\p{N}"
        first = pre_tokenizers.Split(Regex(QWEN_SPLIT.replace(r"|\p{N}|", f"|{digits}|")), "isolated")
    return pre_tokenizers.Sequence(
        [first, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split == "smollm")]
    )


def tokenizer_of(metadata: dict[str, Any]) -> Any:
    """The file's tokenizer, for transformers. Raises ValueError naming a kind that is not supported."""
    kind, split = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre")
    if kind != "gpt2" or split not in SPLITS:
        known = ", ".join(SPLITS)
        raise ValueError(f"the tokenizer {kind!r:.60} with the split rule {split!r:.60}; it must be gpt2 with {known}")
    if not metadata.get("tokenizer.chat_template"):
        raise ValueError("no chat template; take the file of an instruct model")
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers
    from transformers import PreTrainedTokenizerFast  # here: importing it takes seconds

    tokens, types = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    numbers = {token: number for number, token in enumerate(tokens)}
    made = Tokenizer(models.BPE(numbers, merges, ignore_merges=split == "llama-bpe"))
    if split == "qwen2":
        made.normalizer = normalizers.NFC()
    made.pre_tokenizer = splitter(split)
    made.decoder = decoders.ByteLevel()
    made.add_tokens(
        [
            AddedToken(token, special=its_type == CONTROL, normalized=False)
            for token, its_type in zip(tokens, types, strict=True)
            if its_type in (CONTROL, USER_DEFINED)
        ]
    )
    named = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    ids = {ours: metadata.get(f"tokenizer.ggml.{theirs}_token_id") for ours, theirs in named.items()}
    control = {name: tokens[number] for name, number in ids.items() if number is not None}
    return PreTrainedTokenizerFast(tokenizer_object=made, chat_template=metadata["tokenizer.chat_template"], **control)
