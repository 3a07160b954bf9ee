"""A run warns that it is slow if the machine gives it little CPU time."""

import time

import pytest

import train
from machine import cpu_share, gpu

FLAGS = "--model demo --steps 3 --batch 2 --groups 2 --max-tokens 8 --eval-every 0".split()
LINE_START = "slow after step 1: this process gets "


@pytest.fixture(autouse=True)
def run_on_cpu(monkeypatch):
    monkeypatch.setattr(gpu, "on_gpu", lambda: False)


def test_less_than_half_a_core_is_a_shortage_after_five_seconds_of_computation():
    share = cpu_share.CpuShare()
    share.add_if_cpu_phase("update", 4.9, 0.1)
    assert share.describe_shortage() == "", "the time is too short"
    share.add_if_cpu_phase("update", 5.1, 2.9)
    assert share.describe_shortage().startswith("this process gets 0.30 of a CPU core")
    assert share.describe_shortage(wait_s=4.5) == "", "waiting for other ranks needs no CPU"
    share.add_if_cpu_phase("ref", 0.0, 2.0)
    assert share.describe_shortage() == "", "this is exactly half a core"


def test_phases_that_may_wait_for_other_programs_are_not_measured(monkeypatch):
    share = cpu_share.CpuShare()
    for phase in ("rollout", "reward", "judge", "batch"):
        share.add_if_cpu_phase(phase, 100.0, 0.0)
    assert share.describe_shortage() == ""
    monkeypatch.setattr(gpu, "on_gpu", lambda: True)
    share.add_if_cpu_phase("update", 100.0, 0.0)
    assert share.describe_shortage() == ""


def test_cpu_seconds_grow_while_the_process_computes_and_not_while_it_sleeps():
    seconds_before_sleep = cpu_share.count_cpu_seconds()
    time.sleep(0.3)
    seconds_after_sleep = cpu_share.count_cpu_seconds()
    end = time.process_time() + 0.2
    while time.process_time() < end:
        pass
    seconds_after_loop = cpu_share.count_cpu_seconds()

    assert seconds_after_sleep - seconds_before_sleep < 0.15
    assert seconds_after_loop - seconds_after_sleep >= 0.15


@pytest.mark.slow
@pytest.mark.parametrize(("cores", "num_lines"), [(0.3, 1), (0.9, 0)])
def test_a_run_on_a_busy_machine_says_once_that_it_is_slow(
    tmp_path, monkeypatch, capsys, cores, num_lines
):
    monkeypatch.setattr(cpu_share, "MIN_SECONDS", 0.0)
    monkeypatch.setattr(cpu_share, "count_cpu_seconds", lambda: cores * time.perf_counter())
    train.main([*FLAGS, "--run-dir", str(tmp_path / "run")])
    output = capsys.readouterr().err
    assert output.count(LINE_START) == num_lines
    if num_lines:
        assert f"{LINE_START}0.30 of a CPU core while it trains" in output
