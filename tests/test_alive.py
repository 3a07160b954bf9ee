"""
What keeps a run alive and right on a Mac, without one: the environment, wired and cached memory, the watchdog's error,
kernels that fail at a model's own sizes, and log-probabilities that are no numbers.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import cpu_blas
import mlx.core as mx
import numpy as np
import pytest

import gwen
import lora
import sampler
import train
import update
from bench import launches, ledger
from config import Config, Sizes, resolve
from machine import gpu
from reporting import journal
from step import policy

ROOT = Path(gwen.__file__).parent
WATCHDOG = RuntimeError(
    "[METAL] Command buffer execution failed: Impacting Interactivity "
    "(0000000e:kIOGPUCommandBufferCallbackErrorImpactingInteractivity)."
)


# ---- the environment


@pytest.mark.parametrize("given", [{}, {"MLX_ENABLE_TF32": "1", "AGX_RELAX_CDM_CTXSTORE_TIMEOUT": "0"}])
def test_the_environment_is_set_before_mlx_is_there_and_a_users_value_stays(given):
    program = (
        "import os, sys, cpu_blas, json\n"
        "assert 'mlx.core' not in sys.modules\n"
        "print(json.dumps({name: os.environ[name] for name in cpu_blas.ENVIRONMENT}))"
    )
    clean = {name: value for name, value in os.environ.items() if name not in cpu_blas.ENVIRONMENT}
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, env=clean | given, capture_output=True, text=True)
    assert json.loads(done.stdout) == {"AGX_RELAX_CDM_CTXSTORE_TIMEOUT": "1", "MLX_ENABLE_TF32": "0"} | given


# ---- memory


@pytest.fixture
def mac(monkeypatch):
    """What a Mac of 16 GB would be told, by function."""
    told = {}
    monkeypatch.setattr(gpu, "on_gpu", lambda: True)
    monkeypatch.setattr(gpu, "memory_size", lambda: 10_700_000_000)
    for name in ("set_wired_limit", "set_cache_limit"):
        monkeypatch.setattr(mx, name, lambda size, name=name: told.update({name: size}))
    monkeypatch.setattr(mx, "clear_cache", lambda: told.update(clear_cache=told.get("clear_cache", 0) + 1))
    return told


def test_every_model_that_is_loaded_bounds_the_cache(mac, monkeypatch):
    monkeypatch.setattr(gwen, "check_kernels", lambda _: None)
    monkeypatch.setattr(gpu.Op, "runs", lambda *_: False)
    for load in (lambda: gwen.random_model("random:2m", mx.float32), lambda: gwen.load("demo", mx.float32)):
        mac.clear()
        load()
        assert mac == {"set_cache_limit": 1_337_500_000}


def test_freed_buffers_go_back_after_every_phase_on_a_gpu_only(mac, monkeypatch):
    clock = journal.PhaseClock()
    for name in ("rollout", "update"):
        with clock.phase(name) as done:
            done()
    assert mac == {"clear_cache": 2}
    monkeypatch.setattr(gpu, "on_gpu", lambda: False)
    with clock.phase("judge") as done:
        done()
    assert mac == {"clear_cache": 2}


# ---- the watchdog


@pytest.mark.parametrize(
    "message",
    [str(WATCHDOG), "[METAL] Command buffer execution failed: Caused GPU Timeout Error (00000002:kIOGPUCommand...)"],
)
def test_the_watchdogs_words_are_recognised_and_are_not_about_memory(message):
    assert gpu.is_watchdog(RuntimeError(message)) and not gpu.is_out_of_memory(RuntimeError(message))


def test_other_errors_are_not_the_watchdogs():
    assert not gpu.is_watchdog(RuntimeError("[METAL] Command buffer execution failed: Insufficient Memory"))


@pytest.mark.slow
def test_a_run_that_the_watchdog_stopped_is_saved_and_says_in_one_line_what_to_do(tmp_path, monkeypatch, capsys):
    calls, original = [], update.gradient

    def stopped(*args):
        calls.append(1)
        if len(calls) == 2:
            raise WATCHDOG
        return original(*args)

    monkeypatch.setattr(update, "gradient", stopped)
    run = tmp_path / "run"
    flags = ["--model", "demo", "--task", "demo", "--batch", "2", "--groups", "2", "--max-tokens", "8", "--steps", "3"]
    with pytest.raises(SystemExit) as exit_:
        train.main([*flags, "--eval-every", "0", "--run-dir", str(run)])
    assert exit_.value.code == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith("error: macOS stopped the GPU because its work held up the display; let the display sleep")
    assert said.endswith(f"saved after step 1, continue with: uv run train.py --resume {run} --train-token-budget 512")
    monkeypatch.setattr(update, "gradient", original)
    train.main(["--resume", str(run), "--train-token-budget", "512"])
    assert len((run / "metrics.jsonl").read_text().splitlines()) == 3


def test_no_command_buffer_of_a_step_is_long():
    """Longer than a second at an M1's peaks would hold up its display: https://github.com/ml-explore/mlx/issues/3267."""
    flags = {"model": "random:0.6b", "task": "demo", "batch": 8, "groups": 8, "max_tokens": 256, "lora_rank": 16}
    flags |= {"train_token_budget": 2048, "checkpoint_layers": "off"}
    config, _ = resolve(flags, None, None, gwen.choose_model)
    work = ledger.StepWork(gwen.load_config("random:0.6b"), mx.float16, config, 128)
    with launches.as_on_a_gpu():
        function, inputs = ledger.gradient(work, 2)
    machine = ledger.MACHINES["M1"]
    held = launches.command_buffers(launches.trace(function, *inputs), *machine.limits)
    assert max(ledger.roofline(one, machine, mx.float16) for one in held) < 0.1


# ---- kernels at a model's own sizes


@pytest.fixture
def kernels(monkeypatch):
    """Kernels that compute their expressions, on a device that is said to be a GPU."""
    monkeypatch.delenv("GWEN_KERNELS", raising=False)
    monkeypatch.setattr(gpu, "has_metal", lambda: True)
    monkeypatch.setattr(gpu, "hold_memory", lambda: None)
    for op in gpu.OPS.values():
        monkeypatch.setattr(op, "launch", op.reference)
        monkeypatch.setattr(op, "_runs", {})


def test_before_the_first_step_every_kernel_is_checked_at_the_sizes_of_the_model(kernels, monkeypatch):
    checked = {}
    original = gpu.Op.check_on

    def noting(op, dtype, arguments, settings):
        checked.setdefault(op.name, []).append(arguments)
        original(op, dtype, arguments, settings)

    monkeypatch.setattr(gpu.Op, "check_on", noting)
    model = gwen.random_model("random:2m", mx.float32)
    lora.apply(model, 5, 2.0)
    settings = Config.of(lora_rank=5)
    update.Learner(model, settings, policy.Reader(settings, Sizes(1, "off", 1024, 0)))
    assert set(checked) == set(gpu.OPS), "a kernel that no rehearsal calls is first run in a rollout"
    config = model.config
    assert checked["swiglu"][0][0].shape[-1] == 2 * config.intermediate_size
    assert checked["add_norm"][0][0].shape[-1] == config.hidden_size
    assert checked["slot_attention"][0][0].shape[1::2] == (config.num_attention_heads, config.head_dim)
    assert {arguments[0].shape[1] for arguments in checked["tall_product"]} == {5}
    assert checked["sample_token"][0][0].shape[-1] == config.vocab_size
    assert all(op.runs(mx.float32) for op in gpu.OPS.values())


@pytest.mark.parametrize("failure", ["compile", "wrong", "gradient"])
def test_a_kernel_that_fails_at_a_models_own_sizes_is_off_before_the_first_step(kernels, monkeypatch, capsys, failure):
    name = "swiglu_vjp" if failure == "gradient" else "swiglu"
    op = gpu.OPS[name]

    def launch(gate_up, *others):
        if gate_up.shape[-1] == 2 * 384:  # random:2m's; its example has 10
            if failure == "compile":
                raise RuntimeError("[metal] Unable to build: out of registers")
            return op.reference(gate_up, *others) + 1
        return op.reference(gate_up, *others)

    monkeypatch.setattr(op, "launch", launch)
    model = gwen.random_model("random:2m", mx.float32)
    said = capsys.readouterr().err
    assert f"gwen: the kernel {name} is off for mlx.core.float32, at this model's sizes: " in said
    assert ("out of registers" in said) == (failure == "compile")
    assert not op.runs(mx.float32) and gpu.OPS["add_norm"].runs(mx.float32)
    tokens = mx.array([[1, 2, 3]])
    monkeypatch.setenv("GWEN_KERNELS", "off")
    expected = model(tokens)
    monkeypatch.delenv("GWEN_KERNELS")
    assert mx.allclose(model(tokens), expected, atol=1e-5)


def test_a_rehearsal_leaves_the_model_as_it_was_and_a_cpu_has_none(kernels, monkeypatch):
    model = gwen.random_model("random:2m", mx.float32)
    before = list(model.layers)
    gwen.rehearse(model)
    assert all(one is other for one, other in zip(model.layers, before, strict=True)) and len(before) == 5
    monkeypatch.setattr(gpu, "has_metal", lambda: False)
    monkeypatch.setattr(gwen, "rehearse", lambda _: pytest.fail("rehearsed on a CPU"))
    gwen.check_kernels(model)


# ---- log-probabilities that are no numbers


@pytest.fixture
def overflowing(monkeypatch):
    """Rollouts in which the third token of the last row has a log-probability of nan, and padding has too."""
    write = sampler.Record.write

    def spoiled(record, *args):
        write(record, *args)
        record.columns[1][-1, 2] = np.nan

    monkeypatch.setattr(sampler.Record, "write", spoiled)


def test_a_log_probability_that_is_no_number_names_its_prompt(overflowing):
    model, prompts = gwen.random_model("random:2m"), [[1, 2], [3, 4, 5]]
    with pytest.raises(sampler.NotFinite, match=r"token 3 of a completion of prompt 2 .* GWEN_DTYPE=bfloat16") as error:
        sampler.rollout(model, prompts, sampler.SamplingParams(4), group_size=2, key=0)
    assert error.value.prompt == 1


def test_what_stands_after_the_end_of_a_row_is_not_looked_at(overflowing):
    model = gwen.random_model("random:2m")
    params = sampler.SamplingParams([4, 4, 4, 2])  # the last row has ended by then
    held = sampler.rollout(model, [[1, 2], [3, 4, 5]], params, group_size=2, key=0)
    assert mx.isfinite(held.logprobs).all().item()


@pytest.mark.slow
def test_a_run_says_which_prompt_it_was_and_is_saved(overflowing, tmp_path, capsys):
    flags = ["--model", "demo", "--task", "demo", "--batch", "1", "--groups", "2", "--max-tokens", "8", "--steps", "1"]
    with pytest.raises(SystemExit) as exit_:
        train.main([*flags, "--eval-every", "0", "--run-dir", str(tmp_path / "run")])
    assert exit_.value.code == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert "token 3 of a completion of prompt 1 has a log-probability that is not finite" in said
    assert "The prompt: " in said and "saved after step 0" in said
