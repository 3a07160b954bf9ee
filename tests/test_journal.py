"""The clock counts work in its phase; logs survive a crash."""

import mlx.core as mx
import pytest

from config import Config
from disk import run_files
from machine import versions
from reporting import journal


def test_lazy_work_counts_in_its_phase_and_time_outside_of_phases_counts_as_other(monkeypatch):
    """MLX allocates memory when it computes, which is between `done` and the end of the phase."""
    now = [100.0]
    evaluate = mx.eval

    def wait(seconds):
        now[0] += seconds

    monkeypatch.setattr(journal.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(mx, "eval", lambda *arrays: evaluate(*arrays) or wait(5))
    clock = journal.PhaseClock()
    memory_before = mx.get_active_memory()
    wait(3)
    assert clock.take_seconds_by_phase() == {"step": 3, "other": 3}
    with clock.phase("work") as done:
        array = mx.ones((1 << 20,)) * 2
        wait(1)
        assert mx.get_active_memory() - memory_before < array.nbytes
        done(array)
        wait(2)
    assert mx.get_active_memory() - memory_before >= array.nbytes
    wait(4)
    with clock.phase("work") as done:
        done()
    assert clock.take_seconds_by_phase() == {"work": 13, "step": 17, "other": 4}
    assert clock.take_seconds_by_phase() == {"step": 0, "other": 0}


def test_a_phase_must_call_done_and_must_not_contain_another_phase():
    clock = journal.PhaseClock()
    with (
        pytest.raises(AssertionError, match="phase forgotten ended without"),
        clock.phase("forgotten"),
    ):
        pass
    with pytest.raises(AssertionError, match="inside"), clock.phase("outer"), clock.phase("inner"):
        pass
    with clock.phase("after an error") as done:
        done()


def test_a_log_drops_a_torn_line_and_later_steps_whose_evaluations_are_due_again(tmp_path):
    log = run_files.JsonLinesLog(tmp_path / "eval.jsonl")
    for step in range(0, 6, 2):
        log.write({"step": step})
    with log.path.open("a") as file:
        file.write('{"step": 6, "eval/accu')
    assert [record["step"] for record in log.read()] == [0, 2, 4]
    log.truncate_after(3)
    assert [record["step"] for record in log.read()] == [0, 2]

    config = Config.from_flags(steps=5, eval_every=2)
    is_due = [journal.evaluation_is_due(config, step, log.read()) for step in (0, 3, 4, 5)]
    assert is_due == [False, False, True, True]

    with pytest.raises(ValueError):  # JSON has no nan
        log.write({"loss": float("nan")})


def test_the_facts_of_the_environment_include_versions_device_and_blas():
    record = versions.collect_environment_facts("some BLAS")
    assert record["versions"]["mlx"]
    assert record["blas"] == "some BLAS"
    assert "Device" in record["device"]
