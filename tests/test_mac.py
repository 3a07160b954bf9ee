"""
A Mac that is not there: its environment and memory, errors of its GPU that come in pairs, kernels that fail at a
model's own sizes, log-probabilities that are no numbers, a night's training, the first commands.
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
NO_MEMORY = "[METAL] Command buffer execution failed: Insufficient Memory (00000008:kIOGPUCommandBufferCallbackError...)"
WATCHDOG = (
    "[METAL] Command buffer execution failed: Impacting Interactivity "
    "(0000000e:kIOGPUCommandBufferCallbackErrorImpactingInteractivity)."
)
VICTIM = (
    "[METAL] Command buffer execution failed: Discarded (victim of GPU error/recovery) "
    "(00000005:kIOGPUCommandBufferCallbackErrorInnocentVictim)"
)
BIG = model_choice.load_known_config("random:0.6b")


def recommended(gigabytes):
    """What macOS recommends for a GPU's working set."""
    return 2 * gigabytes * GIB // 3


@pytest.fixture
def mac(monkeypatch):
    """A Mac of 16 GB: the limits that MLX was given."""
    told = {}
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    monkeypatch.setattr(
        mx, "device_info", lambda: {"max_recommended_working_set_size": recommended(16)}
    )
    for name in ("set_wired_limit", "set_cache_limit"):
        monkeypatch.setattr(mx, name, lambda size, name=name: told.update({name: size}))
    return told


# ---- the environment


AT_MLX = """
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


def test_the_environment_is_set_before_mlx_reads_it_and_a_users_value_stays():
    names = ["AGX_RELAX_CDM_CTXSTORE_TIMEOUT", "MLX_ENABLE_TF32", "MLX_SDPA_VJP_FALLBACK"]
    given = {name: value for name, value in os.environ.items() if name not in names} | {
        "MLX_SDPA_VJP_FALLBACK": "no"
    }
    done = run_command("-c", AT_MLX % names, env=given)
    assert done.stdout == "1 0 no\n", done.stderr


# ---- memory


def test_the_memory_of_a_gpu_is_what_macos_recommends(mac):
    assert memory.usable_memory_bytes() == recommended(16)


@pytest.mark.parametrize(
    ("gigabytes", "cache"), [(8, recommended(8) // 8), (16, recommended(16) // 8), (64, 2 * 10**9)]
)
def test_nothing_is_wired_and_at_most_two_gb_of_freed_buffers_stay(
    mac, monkeypatch, gigabytes, cache
):
    monkeypatch.setattr(memory, "usable_memory_bytes", lambda: recommended(gigabytes))
    memory.set_mlx_memory_limits()
    assert mac == {"set_cache_limit": cache}


def test_what_the_environment_asks_for_is_wired(mac, monkeypatch):
    monkeypatch.setenv("GWEN_WIRED_LIMIT", "4.5")
    memory.set_mlx_memory_limits()
    assert mac["set_wired_limit"] == 4_500_000_000


def make_config(**flags):
    asked = {"model": "random:0.6b", "task": "gsm8k", "batch": 8, "groups": 8} | flags
    return sources.resolve_settings(asked, None, None, model_choice.choose_model_and_reason)[0]


def demand_of(prompt_tokens=128, rubric=None, model=BIG, **flags):
    settings = make_config(**flags)
    return memory_estimate.RunDemand(
        model, mx.float16, settings, [prompt_tokens] * settings.sampling.batch, rubric
    )


def test_prompts_that_are_shared_are_counted_once(mac, monkeypatch):
    demand, column = demand_of(1024, batch=16, max_tokens=512), 2 * 28 * 8 * 128 * 2
    shared = rollout_bytes(BIG, mx.float16, demand.longest_prompt_lengths, 8, 512, 64)[0]
    assert shared == column * (16 * 1024 + 64 * 512)  # 5.6 GB
    monkeypatch.setenv("GWEN_KERNELS", "off")
    assert (
        rollout_bytes(BIG, mx.float16, demand.longest_prompt_lengths, 8, 512, 64)[0]
        == shared + column * 64 * 1024
    )


def test_a_gpus_memory_says_how_many_rows_are_decoded_at_once(mac, monkeypatch):
    """A step's, or those of the held-out problems, halved until they fit; what was asked for stays."""
    for gigabytes, expected in ((128, 300), (16, 38), (8, 19)):
        monkeypatch.setattr(memory, "usable_memory_bytes", lambda size=gigabytes: recommended(size))
        demand = demand_of(max_tokens=1024, batch=16, rollout_batch_size="auto")
        sizes = memory_estimate.choose_sizes(demand, 300)
        need = memory_estimate.estimate_memory(demand, sizes)
        assert sizes.rollout_batch_size == expected and sum(need.resident.values()) + need.phases[
            "rollout"
        ] <= 0.9 * recommended(gigabytes)
    assert (
        memory_estimate.choose_sizes(
            demand_of(max_tokens=8192, rollout_batch_size=64), 300
        ).rollout_batch_size
        == 64
    )


@pytest.mark.parametrize(
    ("flags", "said"),
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
def test_on_8_gb_the_line_says_what_to_lower(mac, monkeypatch, flags, said):
    monkeypatch.setattr(memory, "usable_memory_bytes", lambda: recommended(8))
    demand = demand_of(rubric=ROOT / "data" / "values_rubric.yaml", **flags)
    line = memory_estimate.format_memory_line(demand, memory_estimate.choose_sizes(demand))
    assert (
        "of 5.73 GB" in line
        and ("it does not fit: " in line) == bool(said)
        and (said or "") in line
    ), line
    assert ("GB of disk space" in line) == ("lora_rank" in flags)


# ---- errors of the GPU, which come in pairs


FAILED = "[METAL] Command buffer execution failed: "
WORDS = {
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


@pytest.mark.parametrize(("kind", "said"), [(kind, said) for kind in WORDS for said in WORDS[kind]])
def test_an_errors_words_tell_whether_memory_ran_out_or_the_watchdog_stopped_it(kind, said):
    error = RuntimeError(said)
    assert (memory.is_out_of_memory(error), memory.is_watchdog_error(error)) == (
        kind == "memory",
        kind == "watchdog",
    )


def test_an_attempt_without_enough_memory_gives_none_and_holds_nothing_any_more(monkeypatch):
    def holding(words):
        array = mx.zeros((1 << 20,))
        mx.eval(array)
        raise RuntimeError(words)

    held = mx.get_active_memory()
    assert memory.try_within_memory(holding, "out of memory") == []
    assert mx.get_active_memory() - held < 1 << 20
    with pytest.raises(RuntimeError, match="shapes do not fit"):
        memory.try_within_memory(holding, "shapes do not fit")
    assert memory.try_within_memory(max, 2, 3) == [3]
    broken = Broken(
        monkeypatch, 3
    )  # the first is a victim's, and those in flight tell what ended it
    assert memory.try_within_memory(broken.throw) == [] and not broken.left


class Broken:
    """A GPU with errors in flight, of which each wait throws one, as MLX does."""

    def __init__(self, monkeypatch, num_errors):
        self.left = num_errors
        synchronize, self.save = mx.synchronize, mx.save_safetensors
        monkeypatch.setattr(mx, "synchronize", lambda: (self.throw(), synchronize()))
        monkeypatch.setattr(
            mx,
            "save_safetensors",
            lambda *args, **kwargs: (self.throw(), self.save(*args, **kwargs)),
        )

    def throw(self):
        if self.left:
            self.left -= 1
            raise RuntimeError(NO_MEMORY if self.left % 2 else VICTIM)


ERRORS = [2, float("inf")]


@pytest.mark.parametrize("num_errors", ERRORS)
def test_a_rollout_survives_errors_in_flight_and_samples_the_same(monkeypatch, capsys, num_errors):
    model, params = gwen.make_random_model("random:2m"), sampler.SamplingParams(6)
    expected = sampler.rollout(model, [[1, 2], [3]], params, group_size=4, key=0)
    broken, decode = Broken(monkeypatch, num_errors), sampler.decode

    def failing(*args):
        broken.throw()
        return decode(*args)

    monkeypatch.setattr(sampler, "decode", failing)
    if num_errors == float("inf"):
        with pytest.raises(ValueError, match="not enough memory for one row"):
            sampler.rollout(model, [[1, 2], [3]], params, group_size=4, key=0)
        return
    found = sampler.rollout(model, [[1, 2], [3]], params, group_size=4, key=0)
    assert mx.array_equal(found.completion_ids, expected.completion_ids)
    assert capsys.readouterr().err.count("out of memory; continuing with 4 rows") == 1


@pytest.fixture
def stopped(tmp_path):
    """What `stoppable` needs of a run that has saved its second step and done its third."""
    (tmp_path / "checkpoints" / "step-000002").mkdir(parents=True)
    saved = SimpleNamespace(
        can_be_saved=True, stopping=False, step=3, boundary=(3, 3), dir=tmp_path, longest=10
    )
    saved.model = SimpleNamespace(config=SimpleNamespace(num_hidden_layers=4))
    saved.sizes, saved.undo_unfinished_step, saved.config = (
        MemoryDependentSizes(8, 1024, 0),
        lambda: None,
        Config.from_flags(),
    )
    saved.journal = SimpleNamespace(phase="update")
    saved.names_of_parts_set_in_python = dict
    saved.save = lambda: checkpoint.save_tensors(
        tmp_path / "state.safetensors", {"x": mx.ones(3) * 2}
    )
    return saved


def test_an_update_that_ends_in_errors_is_saved_and_is_one_line(stopped, monkeypatch):
    broken, save = Broken(monkeypatch, 2), mx.save_safetensors

    def on_cpu_only(*args, **kwargs):  # where a GPU's errors do not reach
        assert not broken.left, "not all in flight were waited for"
        save(*args, **kwargs)

    monkeypatch.setattr(mx, "save_safetensors", on_cpu_only)
    with pytest.raises(ValueError) as caught, trainer.save_on_interrupt_or_error(stopped):
        broken.throw()
    said = str(caught.value)
    assert (
        "\n" not in said and "saved after step 3, continue with: uv run train.py --resume" in said
    )
    assert mx.load(str(stopped.dir / "state.safetensors"))["x"].tolist() == [2, 2, 2]


@pytest.mark.parametrize("num_errors", ERRORS)
def test_a_save_repeats_itself_through_errors_in_flight(stopped, monkeypatch, num_errors):
    Broken(monkeypatch, num_errors)
    if num_errors == float("inf"):
        with pytest.raises(OSError) as caught, trainer.save_on_interrupt_or_error(stopped):
            stopped.save()
        said = str(caught.value)
        assert "\n" not in said and "step 3 could not be saved" in said
        assert "step-000002 is intact, continue with: uv run train.py --resume" in said
        return
    with trainer.save_on_interrupt_or_error(stopped):
        stopped.save()
    assert mx.load(str(stopped.dir / "state.safetensors"))["x"].tolist() == [2, 2, 2]


# ---- kernels at a model's own sizes


def test_before_the_first_step_every_kernel_is_checked_at_the_sizes_of_the_model(
    checkpoints, monkeypatch
):
    """On a device that is said to be a GPU, with kernels that compute their expressions."""
    monkeypatch.delenv("GWEN_KERNELS", raising=False)
    monkeypatch.setattr(gpu, "can_run_metal_kernels", lambda: True)
    monkeypatch.setattr(memory, "set_mlx_memory_limits", lambda: None)
    for op in kernels.OPS.values():
        monkeypatch.setattr(op, "launch", op.reference)
        monkeypatch.setattr(op, "disabled_dtypes", set())
    checked, original = {}, kernels.Op.find_kernel_fault

    def noting(op, *arguments, **settings):
        checked.setdefault(op.name, []).append(arguments)
        return original(op, *arguments, **settings)

    monkeypatch.setattr(kernels.Op, "find_kernel_fault", noting)
    model = gwen.make_random_model("random:2m", mx.float32)
    lora.apply(model, 5, 2.0)
    settings = Config.from_flags(lora_rank=5)
    update.Learner(model, settings, StepLoss(settings, MemoryDependentSizes(1, 1024, 0)))
    gwen.load_model(checkpoints["qwen3.5"], mx.float32)  # which has layers of another kind
    assert set(checked) == set(kernels.OPS), (
        "a kernel that no rehearsal calls is first run in a rollout"
    )
    shape = model.config
    assert checked["swiglu"][0][0].shape[-1] == 2 * shape.intermediate_size
    assert checked["add_norm"][0][0].shape[-1] == shape.hidden_size
    assert checked["slot_attention"][0][0].shape[1::2] == (
        shape.num_attention_heads,
        shape.head_dim,
    )
    assert {arguments[0].shape[1] for arguments in checked["transposed_product"]} == {5}
    assert checked["sample_token"][0][0].shape[-1] == shape.vocab_size
    assert all(op.can_run(mx.float32) for op in kernels.OPS.values())


# ---- log-probabilities that are no numbers


def test_a_log_probability_that_is_no_number_names_its_prompt(monkeypatch):
    write = sampler.DecodeState.append_unless_ended

    def spoiled(record, *args):
        write(record, *args)
        record.columns[1][-1, 2] = np.nan

    monkeypatch.setattr(sampler.DecodeState, "append_unless_ended", spoiled)
    model, prompts = gwen.make_random_model("random:2m"), [[1, 2], [3, 4, 5]]
    with pytest.raises(
        sampler.NonFiniteLogprob, match=r"token 3 of completion 4 .* GWEN_DTYPE=bfloat16"
    ) as error:
        sampler.rollout(model, prompts, sampler.SamplingParams(4), group_size=2, key=0)
    assert error.value.row == 3


# ---- the night


@pytest.mark.parametrize("flags", [[], ["--let-sleep"]])
def test_a_mac_that_trains_stays_awake_unless_told_otherwise(monkeypatch, check_refusal, flags):
    begun = []
    monkeypatch.setattr(trainer.subprocess, "Popen", lambda program, **_: begun.append(program))
    monkeypatch.setattr(
        trainer, "platform", SimpleNamespace(system=lambda: "Darwin")
    )  # of nobody who asks later
    check_refusal(train.main, ["--model", "no such model", *flags], "no such model")
    assert begun == [["/usr/bin/caffeinate", "-i", "-w", str(os.getpid())]] * (not flags)


# ---- the first command


def test_the_readme_shows_the_memory_that_a_mac_of_16_gb_prints(mac):
    (first_command, line), *more = re.findall(
        r"^\$ uv run train\.py (--model Qwen.*)\n(?:.*\n)*?(memory: .*the largest of )",
        (ROOT / "README.md").read_text("utf-8"),
        re.M,
    )
    settings, _ = sources.resolve_settings(
        settings_from_flags(parse_flags(shlex.split(first_command))),
        None,
        None,
        model_choice.choose_model_and_reason,
    )
    demand = memory_estimate.RunDemand(
        BIG,
        mx.float16,
        settings,
        [48] * settings.sampling.batch,
        memory_estimate.find_rubric_path(settings),
    )
    assert (
        memory_estimate.format_memory_line(demand, memory_estimate.choose_sizes(demand)).startswith(
            line
        )
        and not more
    )
