"""The benchmark of the loss: what it reports is measured, and both implementations do the same work."""

import json

import mlx.core as mx
import numpy as np
import pytest

from bench import loss

TINY = ["--batch", "2", "--time", "70", "--hidden", "16", "--vocab", "900", "--iters", "1", "--warmup", "0"]


def run(capsys, *flags):
    loss.main([*TINY, *flags])
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def by_hand(work):
    """The loss, a mean over tokens of a policy that has just sampled, and the mean entropy, in float64."""
    hidden, head, _, advantages = (np.array(array.astype(mx.float32)).astype(np.float64) for array in work)
    logits = hidden @ head.T
    logits -= logits.max(-1, keepdims=True)
    logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    return -advantages.mean(), -(np.exp(logprobs) * logprobs).sum(-1).mean()


@pytest.mark.parametrize("impl", ["ours", "reference"])
def test_loss_and_entropy_are_those_of_the_formulas(capsys, monkeypatch, impl):
    works, make_work = [], loss.make_work
    monkeypatch.setattr(loss, "make_work", lambda args: works.append(make_work(args)) or works[0])
    record = run(capsys, "--impl", impl)
    assert (record["loss"], record["entropy"]) == pytest.approx(by_hand(works[0]), abs=1e-5)


@pytest.mark.parametrize("head", ["frozen", "trained"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_both_implementations_do_the_same_work_and_report_what_it_took(capsys, dtype, head):
    ours, reference = (run(capsys, "--impl", impl, "--dtype", dtype, "--head", head) for impl in ("ours", "reference"))
    assert ours["loss"] == pytest.approx(reference["loss"], abs=1e-5)
    assert ours["entropy"] == pytest.approx(reference["entropy"], abs=1e-2) and 3 < ours["entropy"] < 6.8
    assert ours["shape"] == {"batch": 2, "time": 70, "hidden": 16, "vocab": 900}
    assert ours["peak_bytes"] > ours["mem_after_alloc"] > 0 and ours["avg_step_ms"] >= ours["min_step_ms"] > 0
