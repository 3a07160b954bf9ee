"""
Gwen on a simulated Mac.

The tests cover the environment, the memory, GPU errors that come in pairs, kernel checks at the
sizes of a model, log-probabilities that are NaN, staying awake, and the first command.
"""

import os
import re
import shlex
from types import SimpleNamespace

import cpu_blas  # noqa: F401  (before mlx)
import mlx.core as mx
import numpy as np
import pytest
from conftest import ROOT, run_command

import gwen
import lora
import sampler
import train
import trainer
import update
from config import Config, MemoryDependentSizes
from disk import checkpoint, model_choice
from forecast import memory_estimate
from forecast.row_memory import rollout_bytes
from machine import gpu, kernels, memory
from settings import sources
from settings.sources import parse_flags, settings_from_flags
from step.loss import StepLoss

GIB = 2**30
NO_MEMORY = (
    "[METAL] Command buffer execution failed: Insufficient Memory "
    "(00000008:kIOGPUCommandBufferCallbackError...)"
)
WATCHDOG = (
    "[METAL] Command buffer execution failed: Impacting Interactivity "
    "(0000000e:kIOGPUCommandBufferCallbackErrorImpactingInteractivity)."
)
VICTIM = (
    "[METAL] Command buffer execution failed: Discarded (victim of GPU error/recovery) "
    "(00000005:kIOGPUCommandBufferCallbackErrorInnocentVictim)"
)
BIG_MODEL = model_choice.load_known_config("random:0.6b")


def recommended_bytes(gigabytes):
    """The working set that macOS recommends for the GPU of a Mac with this much memory."""
    return 2 * gigabytes * GIB // 3


def set_usable_memory(monkeypatch, gigabytes):
    monkeypatch.setattr(memory, "usable_memory_bytes", lambda: recommended_bytes(gigabytes))


@pytest.fixture
def mac(monkeypatch):
    """Simulates a Mac of 16 GB. The value contains the limits that MLX receives."""
    limits = {}

    def record_limit(name):
        def set_limit(size):
            limits[name] = size

        return set_limit

    device_info = {"max_recommended_working_set_size": recommended_bytes(16)}
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    monkeypatch.setattr(mx, "device_info", lambda: device_info)
    for name in ("set_wired_limit", "set_cache_limit"):
        monkeypatch.setattr(mx, name, record_limit(name))
    return limits


# ---- the environment


# A program that prints environment variables at the moment when train.py imports MLX.
PRINT_ENVIRONMENT_AT_MLX_IMPORT = """
import os, runpy, sys
class Look:
    def find_spec(self, name, *_):
        if name == "mlx.core":
            print(*map(os.environ.get, %r), flush=True)
            os._exit(0)
sys.meta_path.insert(0, Look())
sys.argv = ["program", "--help"]
runpy.run_module("train", run_name="__main__", alter_sys=True)
"""


def test_environment_variables_are_set_before_mlx_loads_unless_the_user_has_set_them():
    names = ["AGX_RELAX_CDM_CTXSTORE_TIMEOUT", "MLX_ENABLE_TF32", "MLX_SDPA_VJP_FALLBACK"]
    environment = {name: value for name, value in os.environ.items() if name not in names}
    environment["MLX_SDPA_VJP_FALLBACK"] = "no"
    process = run_command("-c", PRINT_ENVIRONMENT_AT_MLX_IMPORT % names, env=environment)
    assert process.stdout == "1 0 no\n", process.stderr


# ---- memory


def test_the_usable_memory_of_a_gpu_is_the_working_set_that_macos_recommends(mac):
    assert memory.usable_memory_bytes() == recommended_bytes(16)


@pytest.mark.parametrize(
    ("gigabytes", "cache_limit"),
    [(8, recommended_bytes(8) // 8), (16, recommended_bytes(16) // 8), (64, 2 * 10**9)],
)
def test_mlx_gets_no_wired_limit_and_a_cache_limit_of_at_most_two_gb(
    mac, monkeypatch, gigabytes, cache_limit
):
    set_usable_memory(monkeypatch, gigabytes)
    memory.set_cache_and_wired_limits()
    assert mac == {"set_cache_limit": cache_limit}


def test_an_environment_variable_sets_the_wired_limit(mac, monkeypatch):
    monkeypatch.setenv("GWEN_WIRED_LIMIT", "4.5")
    memory.set_cache_and_wired_limits()
    assert mac["set_wired_limit"] == 4_500_000_000


def make_config(**settings):
    defaults = {"model": "random:0.6b", "task": "gsm8k", "batch": 8, "groups": 8}
    choose_model = model_choice.choose_model_and_reason
    return sources.resolve_settings(defaults | settings, None, None, choose_model)[0]


def make_demand(prompt_tokens=128, rubric=None, model=BIG_MODEL, **settings):
    config = make_config(**settings)
    prompt_lengths = [prompt_tokens] * config.sampling.batch
    return memory_estimate.RunDemand(model, mx.float16, config, prompt_lengths, rubric)


def test_the_memory_estimate_counts_a_prompt_once_for_its_group_if_kernels_share_it(
    mac, monkeypatch
):
    demand = make_demand(1024, batch=16, max_tokens=512)
    token_bytes = 2 * 28 * 8 * 128 * 2

    def estimate_rollout_bytes():
        prompt_lengths = demand.longest_prompt_lengths
        return rollout_bytes(BIG_MODEL, mx.float16, prompt_lengths, 8, 512, 64)[0]

    shared = estimate_rollout_bytes()
    assert shared == token_bytes * (16 * 1024 + 64 * 512)  # 5.6 GB
    monkeypatch.setenv("GWEN_KERNELS", "off")
    assert estimate_rollout_bytes() == shared + token_bytes * 64 * 1024


def test_the_memory_of_a_gpu_determines_the_rollout_batch_size(mac, monkeypatch):
    """
    The start is the larger number of rows, of a step or of the held-out problems.

    It is halved until it fits. A value that the user sets stays.
    """
    for gigabytes, expected in ((128, 300), (16, 38), (8, 19)):
        set_usable_memory(monkeypatch, gigabytes)
        demand = make_demand(max_tokens=1024, batch=16, rollout_batch_size="auto")
        sizes = memory_estimate.choose_sizes(demand, 300)
        estimate = memory_estimate.estimate_memory(demand, sizes)
        rollout_peak = sum(estimate.resident.values()) + estimate.phases["rollout"]
        assert sizes.rollout_batch_size == expected
        assert rollout_peak <= 0.9 * recommended_bytes(gigabytes)

    demand = make_demand(max_tokens=8192, rollout_batch_size=64)
    assert memory_estimate.choose_sizes(demand, 300).rollout_batch_size == 64


@pytest.mark.parametrize(
    ("settings", "advice"),
    [
        (
            {"max_tokens": 4096, "batch": 16, "rollout_batch_size": 64},
            "lower --rollout-batch-size or --max-tokens",
        ),
        ({"judge_chunk_size": 512, "max_tokens": 1024}, "lower --judge-chunk-size"),
        (
            {"train_token_budget": 2**16, "checkpoint_layers": "off", "batch": 64},
            "lower --train-token-budget, or",
        ),
        ({"lora_rank": 0}, "set --lora-rank 16"),
        ({}, None),
    ],
    ids=str,
)
def test_the_memory_line_on_8_gb_names_the_setting_to_lower(mac, monkeypatch, settings, advice):
    set_usable_memory(monkeypatch, 8)
    demand = make_demand(rubric=ROOT / "data" / "values_rubric.yaml", **settings)
    line = memory_estimate.format_memory_line(demand, memory_estimate.choose_sizes(demand))
    assert "of 5.73 GB" in line, line
    assert ("it does not fit: " in line) == bool(advice), line
    assert (advice or "") in line, line
    assert ("GB of disk space" in line) == ("lora_rank" in settings)


# ---- errors of the GPU, which come in pairs


FAILED = "[METAL] Command buffer execution failed: "
MESSAGES = {
    "memory": [
        NO_MEMORY,
        "[metal::malloc] Attempting to allocate 34359738368 bytes which is greater than the maximum",
        "[malloc_or_wait] Unable to allocate 99999999999 bytes.",
        "std::bad_alloc",
    ],
    "watchdog": [
        WATCHDOG,
        f"{FAILED}Caused GPU Timeout Error (00000002:kIOGPUCommand...)",
        f"{FAILED}Caused GPU Hang Error (00000003:kIOGPUCommandBufferCallbackErrorHang)",
        f"{FAILED}Ignored (for causing prior GPU errors) (00000004:kIOGPUCommandBufferCallbackErrorSubmissionsIgnored)",
        VICTIM,
    ],
    "neither": [
        "The prompt: 'a victim hangs'",
        "[matmul] Last dimension of first input must match second to last",
    ],
}


@pytest.mark.parametrize(
    ("kind", "message"), [(kind, message) for kind in MESSAGES for message in MESSAGES[kind]]
)
def test_an_error_message_shows_whether_memory_ran_out_or_the_watchdog_intervened(kind, message):
    error = RuntimeError(message)
    assert memory.is_out_of_memory(error) == (kind == "memory")
    assert memory.is_watchdog_error(error) == (kind == "watchdog")


def test_an_attempt_that_runs_out_of_memory_returns_nothing_and_frees_its_arrays(monkeypatch):
    def allocate_and_fail(message):
        array = mx.zeros((1 << 20,))
        mx.eval(array)
        raise RuntimeError(message)

    bytes_before = mx.get_active_memory()
    assert memory.try_within_memory(allocate_and_fail, "out of memory") == []
    assert mx.get_active_memory() - bytes_before < 1 << 20

    with pytest.raises(RuntimeError, match="shapes do not fit"):
        memory.try_within_memory(allocate_and_fail, "shapes do not fit")
    assert memory.try_within_memory(max, 2, 3) == [3]

    # The first error is a victim's. The errors in flight show that memory ran out.
    broken_gpu = BrokenGpu(monkeypatch, 3)
    assert memory.try_within_memory(broken_gpu.throw_error) == []
    assert not broken_gpu.num_errors_left


class BrokenGpu:
    """A GPU with errors in flight. Each wait throws one of them, as in MLX."""

    def __init__(self, monkeypatch, num_errors):
        self.num_errors_left = num_errors
        original_synchronize = mx.synchronize
        original_save = mx.save_safetensors

        def synchronize():
            self.throw_error()
            original_synchronize()

        def save_safetensors(*args, **kwargs):
            self.throw_error()
            original_save(*args, **kwargs)

        monkeypatch.setattr(mx, "synchronize", synchronize)
        monkeypatch.setattr(mx, "save_safetensors", save_safetensors)

    def throw_error(self):
        if self.num_errors_left:
            self.num_errors_left -= 1
            raise RuntimeError(NO_MEMORY if self.num_errors_left % 2 else VICTIM)


ERROR_COUNTS = [2, float("inf")]


@pytest.mark.parametrize("num_errors", ERROR_COUNTS)
def test_a_rollout_survives_two_errors_in_flight_and_samples_the_same_tokens(
    monkeypatch, capsys, num_errors
):
    model = gwen.make_random_model("random:2m")
    params = sampler.SamplingParams(6)

    def sample():
        return sampler.rollout(model, [[1, 2], [3]], params, group_size=4, key=0)

    expected = sample()
    broken_gpu = BrokenGpu(monkeypatch, num_errors)
    original_decode = sampler.decode

    def throw_error_or_decode(*args):
        broken_gpu.throw_error()
        return original_decode(*args)

    monkeypatch.setattr(sampler, "decode", throw_error_or_decode)
    if num_errors == float("inf"):
        with pytest.raises(ValueError, match="not enough memory for one row"):
            sample()
        return

    assert mx.array_equal(sample().completion_ids, expected.completion_ids)
    assert capsys.readouterr().err.count("out of memory; continuing with 4 rows") == 1


@pytest.fixture
def stopped_run(tmp_path):
    """The parts of a run that a stop needs. Step 2 is saved, and step 3 is complete."""
    (tmp_path / "checkpoints" / "step-000002").mkdir(parents=True)

    def save():
        checkpoint.save_tensors(tmp_path / "state.safetensors", {"x": mx.ones(3) * 2})

    return SimpleNamespace(
        can_be_saved=True,
        stopping=False,
        step=3,
        boundary=(3, 3),
        dir=tmp_path,
        longest=10,
        model=SimpleNamespace(config=SimpleNamespace(num_hidden_layers=4)),
        sizes=MemoryDependentSizes(8, 1024, 0),
        undo_unfinished_step=lambda: None,
        config=Config.from_flags(),
        journal=SimpleNamespace(phase="update"),
        names_of_parts_set_in_python=dict,
        save=save,
    )


def test_a_run_whose_update_fails_on_the_gpu_is_saved_and_ends_in_one_line(
    stopped_run, monkeypatch
):
    broken_gpu = BrokenGpu(monkeypatch, 2)
    throw_error_or_save = mx.save_safetensors

    def save_after_all_errors(*args, **kwargs):  # on the CPU, which has no GPU errors
        assert not broken_gpu.num_errors_left, "all errors in flight must be waited for"
        throw_error_or_save(*args, **kwargs)

    monkeypatch.setattr(mx, "save_safetensors", save_after_all_errors)
    with pytest.raises(ValueError) as error_info, trainer.save_on_interrupt_or_error(stopped_run):
        broken_gpu.throw_error()
    message = str(error_info.value)
    assert "\n" not in message
    assert "saved after step 3, continue with: uv run train.py --resume" in message
    assert mx.load(str(stopped_run.dir / "state.safetensors"))["x"].tolist() == [2, 2, 2]


@pytest.mark.parametrize("num_errors", ERROR_COUNTS)
def test_a_save_is_repeated_after_errors_in_flight(stopped_run, monkeypatch, num_errors):
    BrokenGpu(monkeypatch, num_errors)
    if num_errors == float("inf"):
        with pytest.raises(OSError) as error_info, trainer.save_on_interrupt_or_error(stopped_run):
            stopped_run.save()
        message = str(error_info.value)
        assert "\n" not in message
        assert "step 3 could not be saved" in message
        assert "step-000002 is intact, continue with: uv run train.py --resume" in message
        return

    with trainer.save_on_interrupt_or_error(stopped_run):
        stopped_run.save()
    assert mx.load(str(stopped_run.dir / "state.safetensors"))["x"].tolist() == [2, 2, 2]


# ---- kernels at the sizes of a model


def test_every_kernel_is_checked_at_the_sizes_of_the_model_before_the_first_step(
    checkpoints, monkeypatch
):
    """The device counts as a GPU here, and each kernel computes its reference."""
    monkeypatch.delenv("GWEN_KERNELS", raising=False)
    monkeypatch.setattr(gpu, "can_run_metal_kernels", lambda: True)
    monkeypatch.setattr(memory, "set_cache_and_wired_limits", lambda: None)
    for op in kernels.OPS.values():
        monkeypatch.setattr(op, "launch", op.reference)
        monkeypatch.setattr(op, "disabled_dtypes", set())

    checked_arguments = {}
    original = kernels.Op.find_kernel_fault

    def record_and_find_kernel_fault(op, *arguments, **options):
        checked_arguments.setdefault(op.name, []).append(arguments)
        return original(op, *arguments, **options)

    monkeypatch.setattr(kernels.Op, "find_kernel_fault", record_and_find_kernel_fault)
    model = gwen.make_random_model("random:2m", mx.float32)
    lora.apply(model, 5, 2.0)
    config = Config.from_flags(lora_rank=5)
    update.Learner(model, config, StepLoss(config, MemoryDependentSizes(1, 1024, 0)))
    gwen.load_model(checkpoints["qwen3.5"], mx.float32)  # for the kernels of linear attention

    assert set(checked_arguments) == set(kernels.OPS), (
        "an unchecked kernel would run in a rollout for the first time"
    )

    def first_shape(name):
        return checked_arguments[name][0][0].shape

    sizes = model.config
    assert first_shape("swiglu")[-1] == 2 * sizes.intermediate_size
    assert first_shape("add_norm")[-1] == sizes.hidden_size
    assert first_shape("slot_attention")[1::2] == (sizes.num_attention_heads, sizes.head_dim)
    ranks = {arguments[0].shape[1] for arguments in checked_arguments["transposed_product"]}
    assert ranks == {5}
    assert first_shape("sample_token")[-1] == sizes.vocab_size
    assert all(op.can_run(mx.float32) for op in kernels.OPS.values())


# ---- log-probabilities that are NaN


def test_a_log_probability_of_nan_is_an_error_that_names_token_and_completion(monkeypatch):
    original = sampler.DecodeState.append_unless_ended

    def append_nan(record, *args):
        original(record, *args)
        record.columns[1][-1, 2] = np.nan

    monkeypatch.setattr(sampler.DecodeState, "append_unless_ended", append_nan)
    model = gwen.make_random_model("random:2m")
    prompts = [[1, 2], [3, 4, 5]]
    pattern = r"token 3 of completion 4 .* GWEN_DTYPE=bfloat16"
    with pytest.raises(sampler.NonFiniteLogprob, match=pattern) as error_info:
        sampler.rollout(model, prompts, sampler.SamplingParams(4), group_size=2, key=0)
    assert error_info.value.row == 3


# ---- staying awake


@pytest.mark.parametrize("flags", [[], ["--let-sleep"]])
def test_a_run_keeps_the_mac_awake_unless_a_flag_lets_it_sleep(monkeypatch, check_refusal, flags):
    started_programs = []

    def start_program(program, **_):
        started_programs.append(program)

    monkeypatch.setattr(trainer.subprocess, "Popen", start_program)
    # Only this module sees macOS.
    monkeypatch.setattr(trainer, "platform", SimpleNamespace(system=lambda: "Darwin"))
    check_refusal(train.main, ["--model", "no such model", *flags], "no such model")
    caffeinate = ["/usr/bin/caffeinate", "-i", "-w", str(os.getpid())]
    assert started_programs == ([] if flags else [caffeinate])


# ---- the first command


def test_the_readme_shows_the_memory_line_of_a_mac_with_16_gb(mac):
    shown_commands = re.findall(
        r"^\$ uv run train\.py (--model Qwen.*)\n(?:.*\n)*?(memory: .*the largest of )",
        (ROOT / "README.md").read_text("utf-8"),
        re.M,
    )
    assert len(shown_commands) == 1
    flags, shown_line = shown_commands[0]

    settings = settings_from_flags(parse_flags(shlex.split(flags)))
    choose_model = model_choice.choose_model_and_reason
    config, _ = sources.resolve_settings(settings, None, None, choose_model)
    prompt_lengths = [48] * config.sampling.batch
    rubric = memory_estimate.find_rubric_path(config)
    demand = memory_estimate.RunDemand(BIG_MODEL, mx.float16, config, prompt_lengths, rubric)
    line = memory_estimate.format_memory_line(demand, memory_estimate.choose_sizes(demand))
    assert line.startswith(shown_line)
