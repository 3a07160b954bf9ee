"""The benchmark of the loss: what it reports is measured, what it checks can fail."""

import json

import numpy as np
import pytest

from bench import loss as bench

TINY = ["--batch", "2", "--time", "70", "--hidden", "16", "--vocab", "900", "--iters", "1", "--warmup", "0"]
KEYS = "impl mode device shape dtype loss first_call_s avg_step_ms mem_after_alloc mem_after_run peak_bytes".split()


def run(capsys, *flags):
    bench.main([*TINY, *flags])
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def loss_by_hand(work, temperature):
    """The clipped loss in float64, a mean over tokens."""
    hidden, head, ids, old = (np.array(x).astype(np.float64) for x in (work.hidden, work.head, work.ids, work[4]))
    logits = hidden @ head.T / temperature
    logits -= logits.max(-1, keepdims=True)
    logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    ratio = np.exp(np.take_along_axis(logprobs, ids.astype(int)[..., None], -1)[..., 0] - old)
    advantages = np.array(work.advantages)[:, None]
    return -np.minimum(ratio * advantages, np.clip(ratio, 0.8, 1.2) * advantages).mean()


@pytest.mark.parametrize("impl", ["ours", "reference"])
def test_the_record_has_every_key_and_the_loss_of_the_formula(capsys, monkeypatch, impl):
    monkeypatch.setattr(bench, "NOISE", 0.5)
    flags = ["--mode", "off_policy", "--temperature", "0.8", "--head", "trained"]
    record, work = run(capsys, *flags, "--impl", impl), bench.make_work(bench.parse([*TINY, *flags]))
    assert set(KEYS) <= record.keys()
    assert record["shape"] == {"batch": 2, "time": 70, "hidden": 16, "vocab": 900}
    assert record["peak_bytes"] > record["mem_after_alloc"] > 0 and record["avg_step_ms"] > 0
    assert record["loss"] == pytest.approx(loss_by_hand(work, 0.8), abs=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_both_implementations_have_the_same_loss_in_every_type(capsys, dtype):
    losses = [run(capsys, "--impl", impl, "--dtype", dtype)["loss"] for impl in ("ours", "reference")]
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)


def test_real_weights_set_shape_and_type(capsys):
    record = run(capsys, "--model", "demo", "--mode", "off_policy")
    assert record["shape"] == {"batch": 2, "time": 70, "hidden": 128, "vocab": 1024} and record["dtype"] == "float32"


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--time", "0"], "--time is 0; it must be at least 1"),
        (["--temperature", "0"], "--temperature is 0.0; it must be a finite number above 0"),
        (["--imple", "ours"], "--imple is no flag of bench.loss; did you mean --impl?"),
        (["--model", "random:7b"], "--model random:7b: the random models are"),
    ],
)
def test_a_mistake_is_answered_in_one_line(flags, said, capsys):
    with pytest.raises(SystemExit) as ended:
        bench.main(flags)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err
