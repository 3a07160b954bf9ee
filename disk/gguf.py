"""
GGUF files: llama.cpp's model, tokenizer and settings in one file, translated at the door into a Hugging Face directory.

The package gguf reads the file, within the bounds of `opened`. Configuration and tokenizer are written once to Gwen's
cache, beside a link to the file; its weights are read from there, every kind that the package knows, and spread out.
Left out: tokenizers other than byte-level BPE with a split rule in `SPLITS`, and the rotary scaling that some files
hold as factors.

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

from disk import hub
from flags import names_path

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
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
PARTS = [  # of a model, of which the package knows what a file calls them
    *("model.embed_tokens", "model.norm", "lm_head"),
    *(
        f"model.layers.0.self_attn.{part}"
        for part in "q_proj k_proj v_proj o_proj q_norm k_norm".split()
    ),
    *(f"model.layers.0.mlp.{part}_proj" for part in ("gate", "up", "down")),
    *("model.layers.0.input_layernorm", "model.layers.0.post_attention_layernorm"),
]
QWEN_SPLIT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SPLITS = ("smollm", "qwen2", "llama-bpe")  # values of tokenizer.ggml.pre
MOST_PARTS = (
    2**21
)  # of a header, twice those of a vocabulary of 150,000 with its merges; each takes 200 bytes
PIECE = 2**24  # bytes of a tensor that are spread out at once
WIDE = {"F32": mx.float32, "F16": mx.float16, "BF16": mx.bfloat16}  # kinds of 16 bits or more


def extract_directory(path: Path) -> Path:
    """A GGUF file's directory of config.json, tokenizer and a link to it, written once. ValueError names a fault."""
    about = path.stat()
    key = sha256(
        f"{FORM} {path.resolve()} {about.st_size} {about.st_mtime_ns}".encode()
    ).hexdigest()[:16]
    cache = cpu_blas.cache_directory() / "gguf"
    directory = cache / f"{path.stem}-{key}"
    if directory.is_dir():
        return directory
    reader = open_file(path)
    try:
        metadata = {name: field.contents() for name, field in reader.fields.items()}
        config, tokenizer = make_raw_config(metadata, reader.tensors), make_tokenizer(metadata)
        tensors_by_name(reader.tensors, config["model_type"])  # only to refuse what is unknown
    except ValueError as error:
        raise ValueError(f"--model {path} has {error}") from error
    except (
        Exception
    ) as error:  # metadata that is missing or of another type, or from the tokenizer's library
        said = f"--model {path} holds metadata of no model: {type(error).__name__}: {hub.first_line(error):.200}"
        raise ValueError(said) from error
    cache.mkdir(parents=True, exist_ok=True)
    scratch = tempfile.TemporaryDirectory(prefix=".begun-", dir=cache, ignore_cleanup_errors=True)
    with names_path(directory), scratch as begun:
        (Path(begun) / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        tokenizer.save_pretrained(begun)
        (Path(begun) / LINK).symlink_to(path.resolve())
        with contextlib.suppress(OSError):  # another process was faster
            os.rename(begun, directory)
    return directory


def open_file(path: Path) -> Any:
    """A file as the package reads it, `fields` and `tensors`. ValueError without the package, or for no whole file."""
    if importlib.util.find_spec("gguf") is None:
        raise ValueError(
            f"--model {path} needs the package gguf; begin the command with: uv run --extra gguf"
        )
    hub.refuse_pointer(path)
    import gguf

    class Reader(gguf.GGUFReader):
        num_parts = 0

        def _get(
            self, offset: int, dtype: Any, count: int = 1, override_order: Any = None
        ) -> np.ndarray:
            """As the package's, which goes on behind the end; in a fifth of its time, and without swapped bytes."""
            self.num_parts += 1
            if (
                offset + int(count) * np.dtype(dtype).itemsize > len(self.data)
                or self.num_parts > MOST_PARTS
            ):
                raise ValueError(
                    f"{count} values at byte {offset} lie beyond its end, or over {MOST_PARTS:,} parts"
                )
            return np.frombuffer(self.data, dtype, int(count), offset)

    try:
        with np.errstate(over="raise"):
            reader = Reader(path)
        sizes = [tensor.n_bytes if tensor.data.ndim else 0 for tensor in reader.tensors]
        if reader.byte_order != "I" or 0 in sizes or sum(sizes) > len(reader.data):
            raise ValueError("its bytes are swapped, or its tensors have none or each other's")
    except Exception as error:  # the package raises what its arrays do
        raise ValueError(
            f"--model {path} is not a whole GGUF file that can be read: {error!s:.200}"
        ) from error
    return reader


def tensors_by_name(tensors: list[Any], kind: str) -> dict[str, Any]:
    """The tensors of a file by Hugging Face name. ValueError names one that is not supported."""
    import gguf

    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[kind.upper()], 1)
    known, found = {names.get_name(part): part for part in PARTS}, {}
    for tensor in tensors:
        stem, _, ending = tensor.name.rpartition(".")
        layer, part = stem.split(".")[1:] if stem.count(".") == 2 else ("", stem)
        ours = known.get(f"blk.0.{part}" if layer else part)
        if ours is None or ending not in ("weight", "bias"):
            raise ValueError(f"the tensor {tensor.name:.60}, which is not supported")
        found[f"{ours}.{ending}".replace("layers.0.", f"layers.{layer}.")] = tensor
    return found


def load_gguf_weights(path: Path, config: dict[str, Any], dtype: mx.Dtype) -> dict[str, mx.array]:
    """Weights by Hugging Face name, few bits in `dtype`. config: as `directory_of` wrote it. ValueError as `opened`."""
    import gguf

    heads = {"q_proj": config["num_attention_heads"], "k_proj": config.get("num_key_value_heads")}
    weights = {}
    for name, tensor in tensors_by_name(open_file(path).tensors, config["model_type"]).items():
        kind, part = tensor.tensor_type, name.split(".")[-2]
        pieces = np.array_split(tensor.data, min(len(tensor.data), -(-tensor.n_bytes // PIECE)))
        try:
            with np.errstate(all="ignore"):  # scales may be infinite
                arrays = [
                    mx.array(gguf.dequantize(piece, kind), WIDE.get(kind.name, dtype))
                    for piece in pieces
                ]
            weights[name] = mx.concatenate(arrays)
            if config["model_type"] == "llama" and part in heads:
                weights[name] = reorder_heads(
                    weights[name], heads[part] or config["num_attention_heads"], 2
                )
        except (NotImplementedError, ValueError) as error:  # of an unknown kind, or of other heads
            raise ValueError(f"--model {path}: {tensor.name}: {error}") from error
    return weights


def make_raw_config(metadata: dict[str, Any], tensors: list[Any]) -> dict[str, Any]:
    """The content of config.json. Raises ValueError for what is not supported, KeyError for what is missing."""
    kind = metadata.get("general.architecture")
    if kind not in ARCHITECTURES:
        raise ValueError(
            f"the architecture {kind!r:.60}; those supported are {', '.join(ARCHITECTURES)}"
        )
    if (scaling := metadata.get(f"{kind}.rope.scaling.type", "none")) != "none":
        raise ValueError(
            f"the rotary scaling {scaling!r:.60}, which is not supported in a GGUF file"
        )
    names = {ours: f"{kind}.{theirs}" for ours, theirs in KEYS.items()}
    return {
        "architectures": [ARCHITECTURES[kind]],
        "model_type": kind,
        **{
            ours: metadata[key]
            for ours, key in names.items()
            if key in metadata or ours not in OPTIONAL
        },
        "vocab_size": len(metadata["tokenizer.ggml.tokens"]),
        "tie_word_embeddings": all(tensor.name != "output.weight" for tensor in tensors),
        "hidden_act": "silu",
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": metadata["tokenizer.ggml.eos_token_id"],
        "dtype": "float32",
    }


def reorder_heads(rows: mx.array, num_heads: int, width: int) -> mx.array:
    """
    Rows (H * D, …) of a query or key projection, each head's taken as (D / width, width) and transposed: with 2 from
    llama.cpp's order, which rotates neighbours, to Hugging Face's, which rotates halves; with D / 2 back.
    """
    paired = rows.reshape(num_heads, rows.shape[0] // num_heads // width, width, *rows.shape[1:])
    return paired.swapaxes(1, 2).reshape(rows.shape)


def make_splitter(split: str) -> Any:
    """What splits a text by one of `SPLITS`, before merges."""
    from tokenizers import Regex, pre_tokenizers

    first: Any = pre_tokenizers.Digits(individual_digits=True)
    if split != "smollm":
        digits = r"\p{N}{1,3}" if split == "llama-bpe" else r"\p{N}"
        first = pre_tokenizers.Split(
            Regex(QWEN_SPLIT.replace(r"|\p{N}|", f"|{digits}|")), "isolated"
        )
    second = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split == "smollm")
    return pre_tokenizers.Sequence([first, second])


def make_tokenizer(metadata: dict[str, Any]) -> Any:
    """The file's tokenizer, for transformers. Raises ValueError naming a kind that is not supported."""
    kind, split = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre")
    if kind != "gpt2" or split not in SPLITS:
        known = ", ".join(SPLITS)
        raise ValueError(
            f"the tokenizer {kind!r:.60} with the split rule {split!r:.60}; it must be gpt2 with {known}"
        )
    if not metadata.get("tokenizer.chat_template"):
        raise ValueError("no chat template; take the file of an instruct model")
    import gguf
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers
    from transformers import PreTrainedTokenizerFast  # here: importing it takes seconds

    tokens, types = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    numbers = {token: number for number, token in enumerate(tokens)}
    made = Tokenizer(models.BPE(numbers, merges, ignore_merges=split == "llama-bpe"))
    if split == "qwen2":
        made.normalizer = normalizers.NFC()
    made.pre_tokenizer, made.decoder = make_splitter(split), decoders.ByteLevel()
    special = {gguf.TokenType.CONTROL: True, gguf.TokenType.USER_DEFINED: False}
    pairs = [(token, kind) for token, kind in zip(tokens, types, strict=True) if kind in special]
    made.add_tokens(
        [AddedToken(token, special=special[kind], normalized=False) for token, kind in pairs]
    )
    named = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    ids = {
        ours: metadata.get(f"tokenizer.ggml.{theirs}_token_id") for ours, theirs in named.items()
    }
    control = {name: tokens[number] for name, number in ids.items() if number is not None}
    return PreTrainedTokenizerFast(
        tokenizer_object=made, chat_template=metadata["tokenizer.chat_template"], **control
    )
