"""Weights of few bits as mlx_lm packs them: read exactly, taken by judge and teacher, refused as what is trained."""

import gc
import json
import shutil

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from conftest import CONFIGS, ROOT, catch_message, mark_readable, read_log, write_checkpoint
from mlx_lm.utils import load_model, quantize_model, save_config, save_model
from small_run import SMALL_FLAGS
from test_preflight import RUBRIC, demand_of, make_config

import chat
import gwen
import preflight
import train
from config import MemoryDependentSizes
from disk import hub, model_choice
from forecast import memory_estimate
from judge import Judge
from judging.rubrics import load_rubric
from machine import gpu
from prompts import chat_template

JUDGED = load_rubric(RUBRIC)
TOKENS = mx.array([[1, 5, 9, 2, 30], [7, 7, 4, 3, 2]])
WIDE = {"hidden_size": 64, "intermediate_size": 128}  # what groups of 32 divide


def mixed(name, module):
    """More bits for some, as mlx_lm's recipes have it: the parts of a fused projection then differ."""
    return {
        "group_size": 32,
        "bits": 8 if "v_proj" in name or "down" in name else 4,
        "mode": "affine",
    }


def pack(source, target, bits=4, **how):
    """Writes a directory's model anew as `mlx_lm.convert -q` does, in float16."""
    shutil.copytree(source, target)
    model, config = load_model(source)
    model.set_dtype(mx.float16)
    model, config = quantize_model(model, config, 32, bits, **how)
    save_model(target, model)
    save_config(config, target / "config.json")
    return target


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    """Models of all kinds whose widths can be packed."""
    root = tmp_path_factory.mktemp("bases")
    configs = {name: CONFIGS[name] | WIDE for name in ("qwen2", "qwen2.5", "qwen3", "llama")}
    hybrid = CONFIGS["qwen3.5"]
    configs["qwen3.5"] = hybrid | {"text_config": hybrid["text_config"] | WIDE}
    return {name: write_checkpoint(root / name, config) for name, config in configs.items()}


@pytest.fixture(scope="module")
def few(tmp_path_factory):
    """The bundled model in 4 bits."""
    return pack(hub.DEMO, tmp_path_factory.mktemp("few") / "model")


@pytest.mark.parametrize(
    ("family", "how"),
    [
        *(
            (name, {"bits": bits})
            for name, bits in (("qwen2", 8), ("qwen2.5", 4), ("llama", 3), ("qwen3.5", 4))
        ),
        ("qwen3", {"quant_predicate": mixed}),
        ("qwen3", {"quant_predicate": lambda name, _: "mlp" in name}),
        ("qwen3", {"mode": "mxfp4"}),
    ],
)
def test_a_packed_model_computes_what_it_does_in_mlx_lm_spread_out_or_not(
    bases, tmp_path, family, how
):
    directory = pack(bases[family], tmp_path / "packed", **how)
    theirs, _ = load_model(directory)
    theirs.set_dtype(mx.float32)
    expected, dense = np.array(theirs(TOKENS)), np.array(gwen.load_model(bases[family])(TOKENS))
    for packed in (False, True):
        model = gwen.load_model(directory, mx.float32, packed=packed)
        assert np.abs(np.array(model(TOKENS)) - expected).max() < 1e-3 * np.abs(expected).max()
    assert np.abs(expected - dense).max() > 1e-2 * np.abs(dense).max()


def test_on_a_gpu_a_judge_s_layers_stay_packed_where_parts_of_a_projection_are_alike(
    few, bases, tmp_path, monkeypatch, tokenizer
):
    monkeypatch.setattr(gpu, "on_gpu", lambda: True)
    monkeypatch.setattr(
        gwen, "check_mlx_and_disable_faulty_kernels", lambda _: None
    )  # which would be off from here on, in every test
    monkeypatch.setattr(hub, "load_tokenizer", lambda _: tokenizer)
    for directory, num in (
        (few, 4),
        (pack(bases["qwen3"], tmp_path / "mixed", quant_predicate=mixed), 3),
    ):
        model = gwen.load(directory, mx.float16, frozen=True)[0]
        kept = [
            module for _, module in model.named_modules() if isinstance(module, nn.QuantizedLinear)
        ]
        assert len(kept) == num * len(model.layers) and model.head_weight.dtype == mx.float16


def test_a_judge_and_a_teacher_of_4_bits_say_what_they_do_at_16(few):
    tokenizer, answers = (
        hub.load_tokenizer(hub.DEMO),
        read_log(ROOT / "tests" / "judged_answers.jsonl")[:40],
    )
    questions, replies = [pair[0] for pair in answers], [pair[1] for pair in answers]
    wide, packed = gwen.load_model(hub.DEMO), gwen.load_model(few)
    expected, scores = (
        Judge(model, tokenizer, JUDGED).score(questions, replies).scores.ravel()
        for model in (wide, packed)
    )
    assert np.corrcoef(expected, scores)[0, 1] > 0.99 and np.abs(expected - scores).mean() < 0.1
    divergences = []
    for prompt, answer, _ in answers[:24]:
        ids, own = chat_template.encode_chat(tokenizer, prompt), tokenizer.encode(answer)
        first, second = (
            nn.log_softmax(model(mx.array([ids + own]))[0, len(ids) - 1 :])
            for model in (wide, packed)
        )
        divergences += (mx.exp(first) * (first - second)).sum(-1).tolist()
    assert 0 < np.mean(divergences) < 0.02  # nats a token


def test_a_packed_judge_takes_the_memory_that_was_said(few, monkeypatch):
    tokenizer, sizes = hub.load_tokenizer(hub.DEMO), MemoryDependentSizes(8, 1024, 0)
    gc.collect()
    before = mx.get_active_memory()
    model = gwen.load_model(few, mx.float32, packed=True)
    config = make_config(model="demo", judge_model=str(few), batch=8, groups=2, max_tokens=8)
    demand = demand_of(config, 100, model.config, mx.float32)._replace(rubric=RUBRIC)
    judging = memory_estimate.estimate_memory(demand, sizes).phases["judging"]
    with monkeypatch.context() as patch:
        patch.setattr(gpu, "on_gpu", lambda: True)
        weights = memory_estimate.frozen_weight_bytes(str(few), model.config, mx.float32)
    stored_bytes = sum(array.nbytes for array in mx.load(str(few / "model.safetensors")).values())
    assert (
        stored_bytes
        < weights
        < 0.5
        * memory_estimate.frozen_weight_bytes("demo", model_choice.load_config("demo"), mx.float32)
    )
    mx.clear_cache()
    mx.reset_peak_memory()
    questions = [f"{number} " + "one " * 99 for number in range(8)]
    answers = [f"{number} " + "two " * 7 for number in range(16)]
    mark_readable(Judge(model, tokenizer, JUDGED)).score(
        [text for text in questions for _ in range(2)], answers
    )
    peak = mx.get_peak_memory() - before
    print(f"{(weights + judging) / peak:.2f}")
    assert 0.95 * peak < weights + judging < 1.3 * peak


def test_commands_take_packed_models_but_to_train_them(few, tmp_path, check_refusal, capsys):
    pattern = f"^error: --model {few} is quantized .*16-bit.*--judge-model and --teacher"
    for main in (train.main, preflight.main):
        check_refusal(main, ["--model", few, "--task", "demo"], pattern)
    chat.main(
        [
            "--model",
            str(few),
            "--prompt",
            "What is one plus two?",
            "--temp",
            "0",
            "--max-tokens",
            "8",
        ]
    )
    assert "three" in capsys.readouterr().out.lower()
    flags = [*SMALL_FLAGS, "--steps", "1", "--eval-every", "0", "--run-dir"]
    train.main([*flags, str(tmp_path / "run"), "--judge-model", str(few)])
    train.main([*flags, str(tmp_path / "taught"), "--loss-type", "distill", "--teacher", str(few)])
    scores = read_log(tmp_path / "run" / "rollouts.jsonl")[0]["judge_scores"]
    assert len(scores) == 3 and None not in scores


@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        (None, "model.embed_tokens.biases has the shape"),
        (
            {"group_size": 64, "bits": 4},
            "does not fit the weights of model.embed_tokens: [dequantize] Shape of scales",
        ),
        (
            {"group_size": "32", "bits": 4},
            "does not fit the weights of model.embed_tokens: dequantize(): incompatible",
        ),
        (
            {"group_size": 32, "bits": 4, "mode": "new"},
            "the weights of model.embed_tokens: [dequantize] Invalid quantization mode 'new'",
        ),
        (
            {"group_size": 16, "bits": 8},
            "model.embed_tokens.weight has the shape (320, 32), but config.json asks for (320, 64)",
        ),
        ({"group_size": 32, "bits": 4, "lm_head": 7}, ""),
    ],
)
def test_a_packing_that_is_not_the_weights_is_one_line(bases, tmp_path, quantization, message):
    directory = pack(bases["qwen3"], tmp_path / "packed")
    path = directory / "config.json"
    config = json.loads(path.read_text())
    path.write_text(
        json.dumps(config | {"quantization": quantization, "quantization_config": quantization})
    )
    if message:
        assert message in catch_message(gwen.load_model, directory)
    else:
        assert gwen.load_model(directory)
