"""The clock bills work to its phase; logs survive a crash."""

import mlx.core as mx
import pytest

from config import Config
from disk import run_files
from machine import versions
from reporting import journal


def test_lazy_work_is_billed_to_its_phase_and_what_belongs_to_none_to_other(monkeypatch):
    """MLX takes memory when it computes: none before `done`, and all of it once the phase has ended."""
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


def test_a_phase_without_done_is_an_error_and_phases_do_not_nest():
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


def test_a_log_loses_a_torn_line_and_later_steps_and_an_evaluation_that_it_lost_is_due_again(
    tmp_path,
):
    log = run_files.JsonLinesLog(tmp_path / "eval.jsonl")
    for step in range(0, 6, 2):
        log.write({"step": step})
    with log.path.open("a") as file:
        file.write('{"step": 6, "eval/accu')
    assert [record["step"] for record in log.read()] == [0, 2, 4]
    log.truncate_after(3)
    assert [record["step"] for record in log.read()] == [0, 2]
    due = [
        journal.evaluation_is_due(Config.from_flags(steps=5, eval_every=2), step, log.read())
        for step in (0, 3, 4, 5)
    ]
    assert due == [False, False, True, True]
    with pytest.raises(ValueError):  # no JSON
        log.write({"loss": float("nan")})


def test_the_environment_names_versions_device_and_blas():
    record = versions.collect_environment_facts("some BLAS")
    assert (
        record["versions"]["mlx"] and record["blas"] == "some BLAS" and "Device" in record["device"]
    )
