"""Models that mlx_lm quantized: their logits, their use as judge and teacher, and refusals."""

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
from test_preflight import RUBRIC, make_config, make_demand

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

LOADED_RUBRIC = load_rubric(RUBRIC)
TOKENS = mx.array([[1, 5, 9, 2, 30], [7, 7, 4, 3, 2]])
WIDE = {"hidden_size": 64, "intermediate_size": 128}  # multiples of the group size 32


def choose_mixed_bits(name, module):
    """
    Chooses more bits for some matrices, as the recipes of mlx_lm do.

    Then the parts of a fused projection have different numbers of bits.
    """
    return {
        "group_size": 32,
        "bits": 8 if "v_proj" in name or "down" in name else 4,
        "mode": "affine",
    }


def quantize(source, target, bits=4, **options):
    """Writes the model of a directory in float16 to a new one, as `mlx_lm.convert -q` does."""
    shutil.copytree(source, target)
    model, config = load_model(source)
    model.set_dtype(mx.float16)
    model, config = quantize_model(model, config, 32, bits, **options)
    save_model(target, model)
    save_config(config, target / "config.json")
    return target


@pytest.fixture(scope="module")
def model_directories(tmp_path_factory):
    """The directories of models of all families, whose widths allow quantization."""
    root = tmp_path_factory.mktemp("models")
    configs = {name: CONFIGS[name] | WIDE for name in ("qwen2", "qwen2.5", "qwen3", "llama")}
    hybrid = CONFIGS["qwen3.5"]
    configs["qwen3.5"] = hybrid | {"text_config": hybrid["text_config"] | WIDE}
    return {name: write_checkpoint(root / name, config) for name, config in configs.items()}


@pytest.fixture(scope="module")
def quantized_demo(tmp_path_factory):
    """The directory of the bundled model in 4 bits."""
    return quantize(hub.DEMO, tmp_path_factory.mktemp("quantized") / "model")


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("qwen2", {"bits": 8}),
        ("qwen2.5", {"bits": 4}),
        ("llama", {"bits": 3}),
        ("qwen3.5", {"bits": 4}),
        ("qwen3", {"quant_predicate": choose_mixed_bits}),
        ("qwen3", {"quant_predicate": lambda name, _: "mlp" in name}),
        ("qwen3", {"mode": "mxfp4"}),
    ],
)
def test_a_quantized_model_equals_mlx_lm_whether_the_weights_stay_packed_or_not(
    model_directories, tmp_path, family, options
):
    directory = quantize(model_directories[family], tmp_path / "quantized", **options)
    mlx_lm_model, _ = load_model(directory)
    mlx_lm_model.set_dtype(mx.float32)
    expected = np.array(mlx_lm_model(TOKENS))
    for packed in (False, True):
        model = gwen.load_model(directory, mx.float32, packed=packed)
        assert np.abs(np.array(model(TOKENS)) - expected).max() < 1e-3 * np.abs(expected).max()

    # quantization changes the logits by much more than this tolerance
    unquantized = np.array(gwen.load_model(model_directories[family])(TOKENS))
    assert np.abs(expected - unquantized).max() > 1e-2 * np.abs(unquantized).max()


@pytest.fixture
def simulated_gpu(monkeypatch, tokenizer):
    """Lets models load as on a GPU, with the tokenizer of the tests."""
    monkeypatch.setattr(gpu, "on_gpu", lambda: True)
    # otherwise, all kernels would be disabled for all following tests
    monkeypatch.setattr(gwen, "check_mlx_and_disable_faulty_kernels", lambda _: None)
    monkeypatch.setattr(hub, "load_tokenizer", lambda _: tokenizer)


@pytest.mark.usefixtures("simulated_gpu")
def test_on_a_gpu_the_layers_of_a_judge_stay_packed_unless_the_parts_of_a_projection_differ(
    quantized_demo, model_directories, tmp_path
):
    mixed = quantize(
        model_directories["qwen3"], tmp_path / "mixed", quant_predicate=choose_mixed_bits
    )
    for directory, num_packed in ((quantized_demo, 4), (mixed, 3)):
        model = gwen.load(directory, mx.float16, frozen=True)[0]
        modules = [module for _, module in model.named_modules()]
        packed = [module for module in modules if isinstance(module, nn.QuantizedLinear)]
        assert len(packed) == num_packed * len(model.layers)
        assert model.head_weight.dtype == mx.float16


def test_a_judge_and_a_teacher_in_4_bits_agree_with_those_in_16_bits(quantized_demo):
    tokenizer = hub.load_tokenizer(hub.DEMO)
    records = read_log(ROOT / "tests" / "judged_answers.jsonl")[:40]
    model = gwen.load_model(hub.DEMO)
    quantized = gwen.load_model(quantized_demo)

    questions = [record[0] for record in records]
    answers = [record[1] for record in records]
    expected = Judge(model, tokenizer, LOADED_RUBRIC).score(questions, answers).scores.ravel()
    scores = Judge(quantized, tokenizer, LOADED_RUBRIC).score(questions, answers).scores.ravel()
    assert np.corrcoef(expected, scores)[0, 1] > 0.99
    assert np.abs(expected - scores).mean() < 0.1

    divergences = []
    for prompt, answer, _ in records[:24]:
        prompt_ids = chat_template.encode_chat(tokenizer, prompt)
        tokens = mx.array([prompt_ids + tokenizer.encode(answer)])
        first = nn.log_softmax(model(tokens)[0, len(prompt_ids) - 1 :])
        second = nn.log_softmax(quantized(tokens)[0, len(prompt_ids) - 1 :])
        divergences += (mx.exp(first) * (first - second)).sum(-1).tolist()
    assert 0 < np.mean(divergences) < 0.02  # nats per token


def test_a_packed_judge_uses_the_estimated_memory(quantized_demo, monkeypatch):
    tokenizer = hub.load_tokenizer(hub.DEMO)
    sizes = MemoryDependentSizes(8, 1024, 0)
    gc.collect()
    before = mx.get_active_memory()
    model = gwen.load_model(quantized_demo, mx.float32, packed=True)
    config = make_config(
        model="demo", judge_model=str(quantized_demo), batch=8, groups=2, max_tokens=8
    )
    demand = make_demand(config, 100, model.config, mx.float32)._replace(rubric=RUBRIC)
    judging = memory_estimate.estimate_memory(demand, sizes).phases["judging"]
    with monkeypatch.context() as patch:
        patch.setattr(gpu, "on_gpu", lambda: True)
        weights = memory_estimate.frozen_model_bytes(str(quantized_demo), model.config, mx.float32)
    arrays = mx.load(str(quantized_demo / "model.safetensors"))
    stored_bytes = sum(array.nbytes for array in arrays.values())
    unquantized_bytes = memory_estimate.frozen_model_bytes(
        "demo", model_choice.load_config("demo"), mx.float32
    )
    assert stored_bytes < weights < 0.5 * unquantized_bytes
    del arrays

    mx.clear_cache()
    mx.reset_peak_memory()
    questions = [f"{number // 2} " + "one " * 99 for number in range(16)]
    answers = [f"{number} " + "two " * 7 for number in range(16)]
    mark_readable(Judge(model, tokenizer, LOADED_RUBRIC)).score(questions, answers)
    peak = mx.get_peak_memory() - before
    print(f"{(weights + judging) / peak:.2f}")
    assert 0.95 * peak < weights + judging < 1.3 * peak


def test_commands_accept_quantized_models_except_for_training(
    quantized_demo, tmp_path, check_refusal, capsys
):
    directory = str(quantized_demo)
    pattern = f"^error: --model {directory} is quantized .*16-bit.*--judge-model and --teacher"
    for main in (train.main, preflight.main):
        check_refusal(main, ["--model", quantized_demo, "--task", "demo"], pattern)

    flags = ["--prompt", "What is one plus two?", "--temp", "0", "--max-tokens", "8"]
    chat.main(["--model", directory, *flags])
    assert "three" in capsys.readouterr().out.lower()

    flags = [*SMALL_FLAGS, "--steps", "1", "--eval-every", "0", "--run-dir"]
    train.main([*flags, str(tmp_path / "run"), "--judge-model", directory])
    distill = ["--loss-type", "distill", "--teacher", directory]
    train.main([*flags, str(tmp_path / "distilled"), *distill])
    scores = read_log(tmp_path / "run" / "rollouts.jsonl")[0]["judge_scores"]
    assert len(scores) == 3
    assert None not in scores


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
def test_settings_of_a_quantization_that_do_not_fit_the_weights_cause_a_one_line_error(
    model_directories, tmp_path, quantization, message
):
    directory = quantize(model_directories["qwen3"], tmp_path / "quantized")
    path = directory / "config.json"
    config = json.loads(path.read_text())
    path.write_text(
        json.dumps(config | {"quantization": quantization, "quantization_config": quantization})
    )
    if message:
        assert message in catch_message(gwen.load_model, directory)
    else:
        assert gwen.load_model(directory)
