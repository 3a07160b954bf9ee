"""What a step takes on Apple's chips, against published figures and a count by launches."""

import re

import mlx.core as mx
import pytest
from small_run import resolve_settings

import preflight
from disk import model_choice
from forecast import memory_estimate, time_estimate
from machine import chips, gpu, memory

CHIPS = {chip.name: chip for chip in chips.load_chips()}
COUNTED = {
    "M1": 42.5,
    "M2": 30.6,
    "M4": 28.2,
    "M4 Pro": 13.0,
    "M4 Max": 6.2,
    "M5": 10.8,
    "M5 Max": 2.7,
}


def test_an_m4_max_prefills_and_decodes_as_fast_as_mlx_lm_has_published():
    """Qwen3-4B in bfloat16: 1,780 and 52.5 tokens a second."""
    weights, chip = (
        36 * (2560 * (32 + 16) * 128 + 32 * 128 * 2560 + 3 * 2560 * 9728),
        CHIPS["M4 Max"],
    )
    prefill = 4096 / chips.estimate_step_seconds(
        {"": chips.PhaseCost(2 * weights, 2 * weights * 4096)}, chip
    )
    decode = 1 / chips.estimate_step_seconds(
        {"": chips.PhaseCost(2 * (weights + 151_936 * 2560), 2 * weights)}, chip
    )
    assert prefill == pytest.approx(1780, rel=0.05) and decode == pytest.approx(52.5, rel=0.05)


@pytest.mark.parametrize("name", COUNTED)
def test_a_step_takes_what_was_counted_at_four_fifths_of_a_chips_peaks(name):
    """By c148fd6:bench/ledger.py, seconds at the peaks: 64 rows of Qwen3-0.6B, three criteria."""
    flags = {"model": "random:0.6b", "task": "values", "batch": 8, "groups": 8, "max_tokens": 256}
    config, shape = (
        resolve_settings(flags, None, None)[0],
        model_choice.load_known_config("random:0.6b"),
    )
    demand = memory_estimate.RunDemand(shape, mx.float16, config, [128] * 8)
    weights, judged = memory_estimate.count_parameters(shape).matmuls, 8 * 128 + 64 * (256 + 3 * 24)
    found = time_estimate.estimate_phase_costs(demand, memory_estimate.choose_sizes(demand)) | {
        "judge": chips.PhaseCost(2 * weights, 2 * weights * judged)
    }
    assert chips.estimate_step_seconds(found, CHIPS[name]) == pytest.approx(
        COUNTED[name] / 0.8, rel=0.2
    )


def test_a_start_is_the_largest_model_whose_hundred_steps_take_an_hour(monkeypatch):
    monkeypatch.setattr(memory, "usable_memory_bytes", lambda: 64 << 30)
    monkeypatch.setattr(chips, "look_up_or_measure_chip", lambda: CHIPS["M4"])
    _, head, *rows, last = time_estimate.list_fitting_model_lines()
    assert head.endswith("  min for 100")
    need, seconds = (
        {row.split()[0]: float(row.split()[part].strip("<")) for row in rows} for part in (1, 2)
    )
    start = last.split("--model ")[1].removesuffix(" --data mine.jsonl --reward mine.py:score")
    assert max(seconds.values()) > 36 > seconds[start]
    assert all(seconds[name] > 36 for name in need if need[name] > need[start])


@pytest.mark.parametrize("has_gpu", [False, True])
def test_the_estimate_of_a_step_says_if_it_is_for_another_machine(monkeypatch, capsys, has_gpu):
    monkeypatch.setattr(gpu, "on_gpu", lambda: has_gpu)
    monkeypatch.setattr(chips, "look_up_or_measure_chip", lambda: CHIPS["M2 Max"])
    preflight.main(["--model", "random:2m"])
    (line,) = re.findall("^estimated step on .*", capsys.readouterr().out, re.M)
    machine = "M2 Max" if has_gpu else "a Mac with M4, not on this machine"
    assert line.startswith(f"estimated step on {machine}: rollout ")


def test_a_chip_is_named_where_a_machine_with_it_has_the_memory(monkeypatch, capsys):
    monkeypatch.setenv("GWEN_DTYPE", "float16")
    flags = ["--model", "random:0.6b", "--lora-rank", "0", "--batch", "8"]
    preflight.main(flags)
    *_, memory_line, time_line, phases_line = capsys.readouterr().out.splitlines()
    assert memory_line.startswith("memory: ") and "1.19 weights" in memory_line
    assert phases_line.startswith("estimated step on ")
    assert time_line.startswith("a step in 16 bits: ") and time_line.endswith(
        "(an estimate that nobody has checked on a Mac; all chips: --all-chips)"
    )
    # 16 GB do not hold masters and moments of all weights
    assert "M2 " in time_line and "M1 " not in time_line
    preflight.main([*flags, "--all-chips"])
    lines = capsys.readouterr().out.splitlines()
    assert "M1        not sold with enough memory" in lines
    (line,) = [line for line in lines if line.startswith("M1 Pro")]
    assert float(line.split()[-1]) > 0
