"""The clock bills work to its phase; logs survive a crash."""

import mlx.core as mx
import pytest

from config import Config
from disk import run_files
from machine import versions
from reporting import journal


@pytest.fixture
def clock(monkeypatch):
    """A phase clock, and a way to let seconds pass."""
    now = [100.0]
    monkeypatch.setattr(journal.time, "perf_counter", lambda: now[0])

    def wait(seconds):
        now[0] += seconds

    return journal.PhaseClock(), wait


def test_lazy_work_is_billed_to_the_phase_that_caused_it(clock, monkeypatch):
    """MLX takes memory when it computes: none before `done`, and all of it once the phase has ended."""
    clock, wait = clock
    evaluate = mx.eval
    monkeypatch.setattr(mx, "eval", lambda *arrays: evaluate(*arrays) or wait(5))
    held = mx.get_active_memory()
    with clock.phase("work") as done:
        array = mx.ones((1 << 20,)) * 2
        wait(1)
        assert mx.get_active_memory() - held < array.nbytes
        done(array)
        wait(2)
    assert mx.get_active_memory() - held >= array.nbytes
    wait(4)
    assert clock.lap() == {"work": 8, "step": 12, "other": 4}


def test_untimed_work_shows_up_as_other_of_its_own_step(clock):
    clock, wait = clock
    wait(3)
    assert clock.lap() == {"step": 3, "other": 3}
    assert clock.lap() == {"step": 0, "other": 0}


def test_a_phase_without_done_is_an_error_and_phases_do_not_nest():
    clock = journal.PhaseClock()
    with pytest.raises(AssertionError, match="without done"), clock.phase("forgotten"):
        pass
    with pytest.raises(AssertionError, match="inside"), clock.phase("outer"), clock.phase("inner"):
        pass
    with clock.phase("after an error") as done:
        done()


def test_the_same_phase_twice_adds_up(clock):
    clock, wait = clock
    for _ in range(2):
        with clock.phase("work") as done:
            wait(2)
            done()
    assert clock.lap()["work"] == 4


def test_an_evaluation_whose_record_a_crash_tore_is_due_again(tmp_path):
    (tmp_path / "eval.jsonl").write_text('{"step": 0}\n{"step": 4, "eval/accu')
    config = Config.of(steps=4, eval_every=4)
    found = run_files.JsonLines(tmp_path / "eval.jsonl").read()
    assert found == [{"step": 0}]
    assert [journal.evaluation_is_due(config, step, found) for step in (0, 3, 4)] == [False, False, True]


def test_a_log_is_cut_back_to_a_step_and_loses_a_torn_last_line(tmp_path):
    log = run_files.JsonLines(tmp_path / "metrics.jsonl")
    for step in range(1, 6):
        log.write({"step": step})
    with log.path.open("a") as file:
        file.write('{"step": 6, "lo')
    log.cut_after(3)
    assert [record["step"] for record in log.read()] == [1, 2, 3]


def test_a_log_refuses_numbers_that_are_not_json(tmp_path):
    with pytest.raises(ValueError):
        run_files.JsonLines(tmp_path / "x.jsonl").write({"loss": float("nan")})


def test_the_environment_names_versions_device_and_blas():
    record = versions.environment("some BLAS")
    assert record["versions"]["mlx"] and record["blas"] == "some BLAS" and "Device" in record["device"]
