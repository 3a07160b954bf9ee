"""Estimated step times on Apple's chips, against published figures and a count of launches."""

import re

import mlx.core as mx
import pytest
from small_run import resolve_settings

import preflight
from disk import model_choice
from forecast import memory_estimate, time_estimate
from machine import chips, gpu, memory

CHIPS = {chip.name: chip for chip in chips.load_chips()}
STEP_SECONDS_AT_PEAKS = {
    "M1": 42.5,
    "M2": 30.6,
    "M4": 28.2,
    "M4 Pro": 13.0,
    "M4 Max": 6.2,
    "M5": 10.8,
    "M5 Max": 2.7,
}


def test_an_m4_max_prefills_and_decodes_as_fast_as_mlx_lm_reports():
    """mlx-lm reports 1,780 and 52.5 tokens per second for Qwen3-4B in bfloat16."""
    chip = CHIPS["M4 Max"]
    num_weights = 36 * (2560 * (32 + 16) * 128 + 32 * 128 * 2560 + 3 * 2560 * 9728)
    num_head_weights = 151_936 * 2560
    prefill_cost = chips.PhaseCost(2 * num_weights, 2 * num_weights * 4096)
    decode_cost = chips.PhaseCost(2 * (num_weights + num_head_weights), 2 * num_weights)
    prefill_speed = 4096 / chips.estimate_step_seconds({"": prefill_cost}, chip)
    decode_speed = 1 / chips.estimate_step_seconds({"": decode_cost}, chip)
    assert prefill_speed == pytest.approx(1780, rel=0.05)
    assert decode_speed == pytest.approx(52.5, rel=0.05)


@pytest.mark.parametrize("name", STEP_SECONDS_AT_PEAKS)
def test_the_estimated_step_time_assumes_four_fifths_of_the_peaks_of_a_chip(name):
    """c148fd6:bench/ledger.py counted the seconds: 64 rows of Qwen3-0.6B, three criteria."""
    flags = {"model": "random:0.6b", "task": "values", "batch": 8, "groups": 8, "max_tokens": 256}
    config, _ = resolve_settings(flags, None, None)
    model_config = model_choice.load_known_config("random:0.6b")
    demand = memory_estimate.RunDemand(model_config, mx.float16, config, [128] * 8)
    phase_costs = time_estimate.estimate_phase_costs(demand, memory_estimate.choose_sizes(demand))

    num_weights = memory_estimate.count_parameters(model_config).matmuls
    num_judge_tokens = 8 * 128 + 64 * (256 + 3 * 24)
    judge_cost = chips.PhaseCost(2 * num_weights, 2 * num_weights * num_judge_tokens)

    seconds = chips.estimate_step_seconds(phase_costs | {"judge": judge_cost}, CHIPS[name])
    assert seconds == pytest.approx(STEP_SECONDS_AT_PEAKS[name] / 0.8, rel=0.2)


def test_the_recommended_model_is_the_largest_whose_hundred_steps_take_an_hour(monkeypatch):
    monkeypatch.setattr(memory, "usable_memory_bytes", lambda: 64 << 30)
    monkeypatch.setattr(chips, "look_up_or_measure_chip", lambda: CHIPS["M4"])
    _, head, *table, advice = time_estimate.list_fitting_model_lines()
    assert head.endswith("  min for 100")

    memory_by_model = {}
    seconds_by_model = {}
    for line in table:
        model, memory_column, seconds_column, *_ = line.split()
        memory_by_model[model] = float(memory_column.strip("<"))
        seconds_by_model[model] = float(seconds_column.strip("<"))

    advice_end = " --data mine.jsonl --reward mine.py:score"
    recommended = advice.split("--model ")[1].removesuffix(advice_end)
    assert seconds_by_model[recommended] < 36
    assert max(seconds_by_model.values()) > 36
    for model, seconds in seconds_by_model.items():
        if memory_by_model[model] > memory_by_model[recommended]:
            assert seconds > 36, model


@pytest.mark.parametrize("has_gpu", [False, True])
def test_the_estimate_of_a_step_names_the_machine(monkeypatch, capsys, has_gpu):
    monkeypatch.setattr(gpu, "on_gpu", lambda: has_gpu)
    monkeypatch.setattr(chips, "look_up_or_measure_chip", lambda: CHIPS["M2 Max"])
    preflight.main(["--model", "random:2m"])
    (line,) = re.findall("^estimated step on .*", capsys.readouterr().out, re.M)
    machine = "M2 Max" if has_gpu else "a Mac with M4, not on this machine"
    assert line.startswith(f"estimated step on {machine}: rollout ")


def test_preflight_names_only_chips_of_machines_with_enough_memory(monkeypatch, capsys):
    monkeypatch.setenv("GWEN_DTYPE", "float16")
    flags = ["--model", "random:0.6b", "--lora-rank", "0", "--batch", "8"]
    preflight.main(flags)
    *_, memory_line, time_line, phases_line = capsys.readouterr().out.splitlines()
    assert memory_line.startswith("memory: ")
    assert "1.19 weights" in memory_line
    assert phases_line.startswith("estimated step on ")
    assert time_line.startswith("a step in 16 bits: ")
    assert time_line.endswith(
        "(an estimate that nobody has checked on a Mac; all chips: --all-chips)"
    )
    # 16 GB are too little for the masters and moments of all weights.
    assert "M2 " in time_line
    assert "M1 " not in time_line

    preflight.main([*flags, "--all-chips"])
    lines = capsys.readouterr().out.splitlines()
    assert "M1        not sold with enough memory" in lines
    (line,) = [line for line in lines if line.startswith("M1 Pro")]
    assert float(line.split()[-1]) > 0
