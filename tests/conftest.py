"""
Fixtures and helpers of many tests: tiny checkpoints of every family, a tokenizer, and checks.

Checkpoints have the layout of a hub model. Their weights are random, with a fixed seed. No weight
has its usual initial value, since a test would not notice that a bias of 0 or a norm weight of 1 is
missing.
"""

import os

# OpenBLAS reads this variable when it is loaded. On a busy machine, times vary less with 1 thread.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ["TRANSFORMERS_VERBOSITY"] = "error"
os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"

import signal

# A shell starts background jobs with SIGINT ignored. The programs under test would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

import gc
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import cpu_blas

# Without bytecode, hundreds of processes would compile the same files again.
if os.environ.pop("PYTHONDONTWRITEBYTECODE", None):
    sys.dont_write_bytecode = False
    sys.pycache_prefix = str(cpu_blas.make_private_or_temporary_cache() / "bytecode")
    os.environ["PYTHONPYCACHEPREFIX"] = sys.pycache_prefix

import hypothesis
import mlx.core as mx
import numpy as np
import pytest
from golden import golden  # noqa: F401  (a fixture)
from hypothesis import strategies as st
from metal import toolchain

from rewards.functions import UserFunctionError

# Every run has the same examples, and none fails because the machine is busy.
hypothesis.settings.register_profile(
    "few",
    max_examples=12,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(hypothesis.HealthCheck),
)
hypothesis.settings.load_profile("few")

QWEN2 = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 320,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 256,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "use_sliding_window": False,
    "eos_token_id": 2,
}
QWEN3 = QWEN2 | {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 48,
    "head_dim": 32,
    "rope_theta": 1000000.0,
    "attention_bias": False,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA = QWEN2 | {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
LLAMA |= {"mlp_bias": False, "attention_bias": False}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
SMOLLM3 = LLAMA | {
    "architectures": ["SmolLM3ForCausalLM"],
    "model_type": "smollm3",
    "num_hidden_layers": 4,
    "no_rope_layers": [1, 1, 1, 0],
    "pad_token_id": 0,
}
HYBRID_TEXT = QWEN3 | {
    "model_type": "qwen3_5_text",
    "num_hidden_layers": 4,
    "full_attention_interval": 3,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "linear_conv_kernel_dim": 4,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.25,
    },
}
del HYBRID_TEXT["architectures"], HYBRID_TEXT["rope_theta"]
HYBRID: dict[str, Any] = {
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "model_type": "qwen3_5",
    "text_config": HYBRID_TEXT,
    "tie_word_embeddings": True,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen2": QWEN2,
    "qwen2.5": QWEN2 | {"tie_word_embeddings": False},
    "qwen3": QWEN3,
    "qwen3-gqa8": QWEN3 | {"num_attention_heads": 16, "head_dim": 8},
    "qwen2-yarn": QWEN2 | {"rope_scaling": YARN},
    "qwen3-yarn": QWEN3 | {"rope_scaling": YARN},
    "llama": LLAMA,
    "llama3": LLAMA
    | {
        "rope_scaling": LLAMA3 | {"original_max_position_embeddings": 64},
        "tie_word_embeddings": False,
    },
    "smollm3": SMOLLM3,
    "qwen3.5": HYBRID,
}
FAMILIES = ["qwen2", "qwen2.5", "qwen3", "qwen3-gqa8", "llama3", "smollm3", "qwen3.5"]

RNG = np.random.default_rng(1)
ROOT = Path(__file__).parent.parent


@pytest.fixture(autouse=True)
def seed_generators(request: pytest.FixtureRequest) -> None:
    """Gives each test the same random numbers, in any process and after any other tests."""
    global RNG
    RNG = np.random.default_rng(1)
    if hasattr(request.module, "RNG"):
        request.module.RNG = np.random.default_rng(0)


def must_skip_kernels() -> bool:
    """Whether tests of kernels are left out. Where CI is set, they fail instead."""
    return not (mx.metal.is_available() or os.environ.get("CI") or toolchain.find_toolchain())


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out tests of kernels without a compiler. A line at the end gives the reason."""
    if not must_skip_kernels():
        return
    left_out = []
    remaining = []
    for item in items:
        needs_compiler = {"compiler", "metal"} & set(getattr(item, "fixturenames", ()))
        if needs_compiler:
            left_out.append(item)
        else:
            remaining.append(item)
    config.hook.pytest_deselected(items=left_out)
    items[:] = remaining


def pytest_collection_finish() -> None:
    """
    Excludes the collected tests from garbage collection, since they live to the end.

    Otherwise each collection takes 0.3 s longer.
    """
    gc.freeze()


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if must_skip_kernels():
        terminalreporter.write_line(f"tests/metal: kernels were not run, {toolchain.MISSING}")


def catch_message(function: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """The message of the ValueError that a function must raise. It must be one line."""
    with pytest.raises(ValueError) as error_info:
        function(*args, **kwargs)
    is_raised_by_gwen = type(error_info.value) in (ValueError, UserFunctionError)
    assert is_raised_by_gwen, "Gwen raises no other subclass of ValueError"
    message = str(error_info.value)
    assert "\n" not in message, message
    assert len(message) < 700, message
    return message


def mark_readable(judge: Any) -> Any:
    """Records a readable score of a remote judge, so that the judge tolerates failures."""
    judge.cache.scores["an earlier question"] = 3.0
    return judge


def run_command(
    program: str, *flags: Any, environment: dict[str, str] | None = None, **options: Any
) -> Any:
    """
    Runs a command in its own process, as a user does.

    environment: additional variables. options: of `subprocess.run`.
    """
    defaults = {"cwd": ROOT, "env": os.environ | (environment or {})}
    return subprocess.run(
        [sys.executable, program, *map(str, flags)],
        **defaults | options,
        capture_output=True,
        text=True,
        timeout=600,
    )


def read_tree(directory: Path) -> dict[str, bytes | None]:
    """The bytes of each file below a directory, by path. Directories have None."""
    paths = sorted(directory.rglob("*"))
    return {str(path): path.read_bytes() if path.is_file() else None for path in paths}


def measure_peak(compute: Callable[[], Any]) -> int:
    """The peak memory in bytes while a function runs and its arrays are evaluated."""
    mx.clear_cache()
    bytes_before = mx.get_active_memory()
    mx.reset_peak_memory()
    mx.eval(compute())
    return mx.get_peak_memory() - bytes_before


def check_error_line(printed: str, pattern: str) -> str:
    """Checks that a command printed one error line, which matches a pattern; returns the line."""
    # A busy machine shows progress, and a run may have warned before.
    other_lines = "... ", "WARNING after step"
    lines = printed.splitlines(keepends=True)
    line = "".join(line for line in lines if not line.startswith(other_lines))
    assert line.startswith("error: "), line
    assert line.endswith("\n"), line
    assert line.count("\n") == 1, line
    assert "Traceback" not in line, line
    assert len(line) < 1000, line
    assert re.search(pattern, line), line
    return line


@pytest.fixture
def check_refusal(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """A function that checks that a command refuses flags in one line, and returns the line."""

    def check_refusal(main: Callable[[list[str]], None], flags: list[Any], pattern: str) -> str:
        capsys.readouterr()
        with pytest.raises(SystemExit) as exit_info:
            main([str(flag) for flag in flags])
        printed = capsys.readouterr().err
        assert exit_info.value.code == 2, printed
        return check_error_line(printed, pattern)

    return check_refusal


def read_log(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def make_whole_prompts(builder: Any, prompt: str, completion: str) -> list[list[int]]:
    """The judge's prompts for a completion, one per criterion, without a shared prefix."""
    prefix = (
        builder.head
        + builder.encode_question_segment(prompt)
        + builder.encode_untrusted(completion)
    )
    return [prefix + tail for tail in builder.tails]


def json_values(*keys: str) -> hypothesis.strategies.SearchStrategy[Any]:
    """Any JSON value; the objects in it have some of these keys."""
    scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)

    def make_containers(values):
        return st.lists(values, max_size=3) | st.dictionaries(st.sampled_from(keys), values)

    return st.recursive(scalars, make_containers, max_leaves=8)


def read_untimed_log(path: Path) -> list[dict[str, Any]]:
    """A log without the values that depend on the clock or the machine."""
    timed_key = re.compile(r"(/s|_s|tok_s)$|tok_s/|^mem/")
    untimed_records = []
    for record in read_log(path):
        untimed_keys = [key for key in record if not timed_key.search(key)]
        untimed_records.append({key: record[key] for key in untimed_keys})
    return untimed_records


def write_log(path: Path, rows: Iterable[Any]) -> str:
    """Writes rows as JSON lines; returns the path."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def draw_normal(*shape: int, scale: float = 1.0) -> mx.array:
    return mx.array(RNG.normal(0, scale, shape).astype(np.float32))


def relative_error(array: mx.array, expected: mx.array) -> float:
    """The largest difference, as a fraction of the largest expected value."""
    array = np.array(array.astype(mx.float32))
    expected = np.array(expected.astype(mx.float32))
    return float(np.abs(array - expected).max() / np.abs(expected).max())


def make_random_weights(config: dict[str, Any], seed: int = 0) -> dict[str, mx.array]:
    """Float32 tensors by Hugging Face name. No tensor has its usual initial value."""
    rng = np.random.default_rng(seed)
    prefix = "model"
    if "text_config" in config:
        prefix = "model.language_model"
        config = config["text_config"]
    is_hybrid = config["model_type"] == "qwen3_5_text"
    hidden = config["hidden_size"]
    width = config["intermediate_size"]
    vocab = config["vocab_size"]
    heads = config["num_attention_heads"]
    kv_heads = config["num_key_value_heads"]
    head_dim = config.get("head_dim", hidden // heads)

    def draw_matrix(rows: int, columns: int) -> np.ndarray:
        scale = 1.0 if is_hybrid else 1.5  # a hybrid magnifies rounding errors
        return rng.normal(0, scale / columns**0.5, (rows, columns))

    def draw_norm(size: int) -> np.ndarray:
        return rng.normal(0 if is_hybrid else 1, 0.3, size)

    weights = {f"{prefix}.embed_tokens.weight": rng.normal(0, 0.4, (vocab, hidden))}
    weights[f"{prefix}.norm.weight"] = draw_norm(hidden)
    for layer in range(config["num_hidden_layers"]):
        attention = f"{prefix}.layers.{layer}.self_attn"
        mlp = f"{prefix}.layers.{layer}.mlp"
        if is_hybrid and (layer + 1) % config["full_attention_interval"]:
            net = f"{prefix}.layers.{layer}.linear_attn"
            key_rows = config["linear_num_key_heads"] * config["linear_key_head_dim"]
            value_heads = config["linear_num_value_heads"]
            value_rows = value_heads * config["linear_value_head_dim"]
            qkv_rows = 2 * key_rows + value_rows
            num_rows = {"qkv": qkv_rows, "z": value_rows, "b": value_heads, "a": value_heads}
            for name, rows in num_rows.items():
                weights[f"{net}.in_proj_{name}.weight"] = draw_matrix(rows, hidden)
            weights[f"{net}.conv1d.weight"] = rng.normal(0, 0.5, (qkv_rows, 1, 4))
            weights[f"{net}.A_log"] = np.log(rng.uniform(0.01, 4, value_heads))
            weights[f"{net}.dt_bias"] = rng.normal(-2, 1, value_heads)
            weights[f"{net}.norm.weight"] = rng.normal(1, 0.3, config["linear_value_head_dim"])
            weights[f"{net}.out_proj.weight"] = draw_matrix(hidden, value_rows)
        else:
            num_heads = {"q": heads * (1 + is_hybrid), "k": kv_heads, "v": kv_heads}
            for name, rows in num_heads.items():
                weights[f"{attention}.{name}_proj.weight"] = draw_matrix(rows * head_dim, hidden)
                if config["model_type"] == "qwen2":
                    weights[f"{attention}.{name}_proj.bias"] = rng.normal(0, 0.5, rows * head_dim)
            weights[f"{attention}.o_proj.weight"] = draw_matrix(hidden, heads * head_dim)
            if config["model_type"] in ("qwen3", "qwen3_5_text"):
                for name in "qk":
                    weights[f"{attention}.{name}_norm.weight"] = draw_norm(head_dim)
        for name in ("gate", "up"):
            weights[f"{mlp}.{name}_proj.weight"] = draw_matrix(width, hidden)
        weights[f"{mlp}.down_proj.weight"] = draw_matrix(hidden, width)
        weights[f"{prefix}.layers.{layer}.input_layernorm.weight"] = draw_norm(hidden)
        weights[f"{prefix}.layers.{layer}.post_attention_layernorm.weight"] = draw_norm(hidden)
    if not config["tie_word_embeddings"]:
        weights["lm_head.weight"] = rng.normal(0, 0.4, (vocab, hidden))
    return {name: mx.array(array.astype(np.float32)) for name, array in weights.items()}


def write_checkpoint(directory: Path, config: dict[str, Any], num_shards: int = 1) -> Path:
    """Writes a model directory without a tokenizer, and an index if there are several shards."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [2, 0], "do_sample": True})
    )
    weights = make_random_weights(config)
    if num_shards == 1:
        mx.save_safetensors(
            str(directory / "model.safetensors"), weights, metadata={"format": "pt"}
        )
        return directory
    weight_map = {}
    for shard in range(num_shards):
        file = f"model-{shard + 1:05}-of-{num_shards:05}.safetensors"
        names = sorted(weights)[shard::num_shards]
        tensors = {name: weights[name] for name in names}
        mx.save_safetensors(str(directory / file), tensors, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(names, file)
    total_size = sum(weight.nbytes for weight in weights.values())
    index = {"metadata": {"total_size": total_size}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return directory


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The directory of each configuration's checkpoint; "qwen2.5" has three shards."""
    root = tmp_path_factory.mktemp("checkpoints")
    directories = {}
    for name, config in CONFIGS.items():
        num_shards = 3 if name == "qwen2.5" else 1
        directories[name] = write_checkpoint(root / name, config, num_shards)
    return directories


@pytest.fixture(scope="module", params=["qwen3", "qwen3.5"])
def tiny_model(checkpoints: dict[str, Path], request: pytest.FixtureRequest) -> Path:
    """The directory of a model with attention only, and of one with gated delta nets."""
    return checkpoints[request.param]


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    """A byte-level tokenizer with fewer than 320 ids. Its ChatML template has `enable_thinking`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(["one and two is three", "what is two and two?"], trainer)
    template = (
        "{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
        "{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}"
        "{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}"
        "{%- endif %}{%- endif %}"
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=template,
    )


@pytest.fixture(scope="session")
def model_directory(
    checkpoints: dict[str, Path], tokenizer: Any, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The directory of a tiny Qwen3 with its tokenizer, as complete as a hub model."""
    directory = tmp_path_factory.mktemp("model")
    for file in checkpoints["qwen3"].iterdir():
        (directory / file.name).write_bytes(file.read_bytes())
    tokenizer.save_pretrained(str(directory))
    return directory
