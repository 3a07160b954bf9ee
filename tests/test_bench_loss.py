"""The benchmark of the loss: what it reports is measured, and both implementations do the same work."""

import json

import pytest

from bench import loss

TINY = ["--batch", "2", "--time", "70", "--hidden", "16", "--vocab", "900", "--iters", "1", "--warmup", "0"]


def run(capsys, *flags):
    loss.main([*TINY, *flags])
    return json.loads(capsys.readouterr().out.splitlines()[-1])


@pytest.mark.parametrize("head", ["frozen", "trained"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_both_implementations_do_the_same_work_and_report_what_it_took(capsys, dtype, head):
    ours, reference = (run(capsys, "--impl", impl, "--dtype", dtype, "--head", head) for impl in ("ours", "reference"))
    assert ours["loss"] == pytest.approx(reference["loss"], abs=1e-5)
    assert ours["entropy"] == pytest.approx(reference["entropy"], abs=1e-2) and 3 < ours["entropy"] < 6.8
    assert ours["shape"] == {"batch": 2, "time": 70, "hidden": 16, "vocab": 900}
    assert ours["peak_bytes"] > ours["mem_after_alloc"] > 0 and ours["avg_step_ms"] >= ours["min_step_ms"] > 0


def test_a_mistake_is_answered_in_one_line(capsys):
    with pytest.raises(SystemExit) as ended:
        loss.main(["--time", "0"])
    assert ended.value.code == 2
    assert "--time is 0; it must be at least 1" in capsys.readouterr().err
