"""
GGUF files: llama.cpp's model, tokenizer and settings in one file, translated at the door into a Hugging Face directory.

Configuration and tokenizer are written once to Gwen's cache, beside a link to the file; its weights are read from there
and spread out in memory. What MLX reads: weights of 32 or 16 bits, Q8_0, Q4_0 and Q4_1 exactly, K-quants of two, four
and six bits rounded to 16. Left out: tokenizers other than byte-level BPE with a split rule in `SPLITS`, and the rotary
scaling that some files hold as factors.

Axes: H heads, D head dim, C input width.
"""

import contextlib
import json
import os
import tempfile
from hashlib import sha256
from pathlib import Path
from typing import Any

import cpu_blas  # before mlx
import mlx.core as mx

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
SPLITS = ("smollm", "qwen2")  # values of tokenizer.ggml.pre
CONTROL, USER_DEFINED = 3, 4  # types of tokens


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
    tensors, held = load(path)
    try:
        config, tokenizer = config_of(held, tied="output.weight" not in tensors), tokenizer_of(held)
        weights_of(tensors, config)  # lazy: only to refuse what is unknown
    except KeyError as error:
        raise ValueError(f"--model {path} lacks {error}; is it a whole model?") from error
    except ValueError as error:
        raise ValueError(f"--model {path} has {error}") from error
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
        loaded: Any = mx.load(str(path), format="gguf", return_metadata=True)
    except RuntimeError as error:
        raise ValueError(f"--model {path} is not a whole GGUF file that MLX reads: {error!s:.200}") from error
    tensors, held = loaded
    return tensors, {key: value.tolist() if isinstance(value, mx.array) else value for key, value in held.items()}


def load_weights(directory: Path, config: dict[str, Any]) -> dict[str, mx.array]:
    """The weights of such a directory by Hugging Face name. Lazy: each is spread out when something needs it."""
    return weights_of(load((directory / LINK).resolve())[0], config)


def config_of(held: dict[str, Any], tied: bool) -> dict[str, Any]:
    """The content of config.json. Raises ValueError for what is not supported, KeyError for what is missing."""
    kind = held.get("general.architecture")
    if kind not in ARCHITECTURES:
        raise ValueError(f"the architecture {kind!r:.60}; those supported are {', '.join(ARCHITECTURES)}")
    if (scaling := held.get(f"{kind}.rope.scaling.type", "none")) != "none":
        raise ValueError(f"the rotary scaling {scaling!r:.60}, which is not supported in a GGUF file")
    named = {ours: f"{kind}.{theirs}" for ours, theirs in KEYS.items()}
    return {
        "architectures": [ARCHITECTURES[kind]],
        "model_type": kind,
        **{ours: held[key] for ours, key in named.items() if key in held or ours not in OPTIONAL},
        "vocab_size": len(held["tokenizer.ggml.tokens"]),
        "tie_word_embeddings": tied,
        "hidden_act": "silu",
        "bos_token_id": held.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": held["tokenizer.ggml.eos_token_id"],
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


def tokenizer_of(held: dict[str, Any]) -> Any:
    """The file's tokenizer, for transformers. Raises ValueError naming a kind that is not supported."""
    kind, split = held.get("tokenizer.ggml.model"), held.get("tokenizer.ggml.pre")
    if kind != "gpt2" or split not in SPLITS:
        known = ", ".join(SPLITS)
        raise ValueError(f"the tokenizer {kind!r:.60} with the split rule {split!r:.60}; it must be gpt2 with {known}")
    if not held.get("tokenizer.chat_template"):
        raise ValueError("no chat template; take the file of an instruct model")
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
    from transformers import PreTrainedTokenizerFast  # here: importing it takes seconds

    tokens, types = held["tokenizer.ggml.tokens"], held["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in held["tokenizer.ggml.merges"]]
    made = Tokenizer(models.BPE({token: number for number, token in enumerate(tokens)}, merges))
    bytewise = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split == "smollm")
    first: Any = pre_tokenizers.Digits(individual_digits=True)
    if split == "qwen2":
        made.normalizer = normalizers.NFC()
        first = pre_tokenizers.Split(Regex(QWEN_SPLIT), "isolated")
    made.pre_tokenizer = pre_tokenizers.Sequence([first, bytewise])
    made.decoder = decoders.ByteLevel()
    made.add_tokens(
        [
            AddedToken(token, special=its_type == CONTROL, normalized=False)
            for token, its_type in zip(tokens, types, strict=True)
            if its_type in (CONTROL, USER_DEFINED)
        ]
    )
    named = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    ids = {ours: held.get(f"tokenizer.ggml.{theirs}_token_id") for ours, theirs in named.items()}
    control = {name: tokens[number] for name, number in ids.items() if number is not None}
    return PreTrainedTokenizerFast(tokenizer_object=made, chat_template=held["tokenizer.chat_template"], **control)
