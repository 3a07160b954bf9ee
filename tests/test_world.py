"""Several machines: against one process, and how they end. Processes of this machine stand in for them."""

import json
import signal

import mlx.core as mx
import numpy as np
import pytest
from conftest import read_log, write_log
from machines import LIMIT, Machines
from small_run import SMALL_FLAGS, make_run, record_gradient, sample_first_prompts

import train
import update
from disk import checkpoint
from machine import link, world
from step import trust_region
from step.batch import make_batches

slow = pytest.mark.slow

# ---- one process


def test_one_process_gets_back_what_it_brings_and_opens_nothing():
    value, array = {"a": (1, 2)}, mx.array([1.0])
    assert world.all_gather(value)[0] is value and world.compute_on_rank0(lambda: value) is value
    assert world.all_sum([array])[0] is array
    assert (
        world.rank(),
        world.size(),
        world.own_item_indices([1, 1, 1]),
        world.pop_wait_seconds_metric(),
    ) == (0, 1, [0, 1, 2], {})
    with link.connect_machines():
        assert world.size() == 1
    assert link.end_reason_with_machine_name(ValueError("why")) == "why"


def test_every_item_is_done_by_one_machine_and_none_has_much_more_to_do(monkeypatch):
    costs, parts = np.random.default_rng(0).integers(1, 1000, 40).tolist(), []
    for rank in range(3):
        monkeypatch.setattr(world, "size", lambda: 3)
        monkeypatch.setattr(world, "rank", lambda rank=rank: rank)
        parts.append(world.own_item_indices(costs))
    assert sorted(number for part in parts for number in part) == list(range(40))
    loads = [sum(costs[number] for number in part) for part in parts]
    assert max(loads) - min(loads) <= max(costs)
    assert parts[2] == sorted(parts[2])


def test_what_is_shared_arrives_as_it_was():
    value = {
        "text": "\ud83d\ude42 \u2028",
        "nan": float("nan"),
        "none": None,
        "list": [1, [2.5, True]],
    }
    arrays = [
        np.arange(6.0).reshape(2, 3),
        np.array([], np.int32),
        mx.array([[1, 2]], dtype=mx.uint32),
    ]
    there = link._decode(link._encode([value, arrays, "after"]))
    assert json.dumps(there[0]) == json.dumps(value) and there[2] == "after"
    for ours, theirs in zip(arrays, there[1], strict=True):
        assert type(ours) is type(theirs) and np.array(ours).dtype == np.array(theirs).dtype
        assert np.array_equal(np.array(ours), np.array(theirs)) and ours.shape == theirs.shape
    with pytest.raises(TypeError, match="set cannot be sent to other machines"):
        link._encode({1})


@pytest.fixture
def few(tmp_path):
    """Flags of a run on few prompts without a judge, which begins sooner."""
    prompts = write_log(
        tmp_path / "few.jsonl", [{"prompt": f"What is {n} plus {n}?"} for n in range(40)]
    )
    return [*SMALL_FLAGS, "--eval-every", "0", "--data", prompts]


# ---- the same as one process

VARIANTS = {
    "kl, grpo": ["--beta", "0.1", "--loss-type", "grpo"],
    "all weights": ["--lora-rank", "0"],
}


def gradients(run):
    """The gradient of a step in small batches, what was measured, and the log-probabilities of a probe."""
    samples = sample_first_prompts(run)
    batches = make_batches(samples, 80, "off")
    assert len(batches) > 3
    batches = (
        update.add_reference_logprobs(run.learner, batches)
        if run.config.objective.beta
        else batches
    )
    result, grads = record_gradient(run, batches)
    mine = [batch for batch in batches if batch.is_local]
    known = update.fill_in_missing_old_logprobs(
        mine, update.install_weights_and_compute_logprobs(run.learner, mine, run.learner.trainable)
    )
    distance = trust_region.measure_kl(known, [batch.sampled_logprobs for batch in known])
    ids = [one.response_ids for one in samples]
    return ids, grads, {"loss": result.loss, "distance": distance, **result.means}


def steps_of(run):
    """Two updates, each of two iterations of AdamW with a bound on the step."""
    run.learner.trainable = dict(sorted(run.learner.trainable.items()))  # as a checkpoint has them
    for budget in (80, 100_000):  # of the second one machine has no part
        update.run_optimizer_steps(
            run.learner, make_batches(sample_first_prompts(run), budget, "off"), 0.004
        )
    return run.learner


COMPARE = """
import sys
from pathlib import Path
import cpu_blas, mlx.core as mx, test_world, update
from machine import link, world
from small_run import make_run
from mlx.utils import tree_flatten
out, link.BLOCK = Path(sys.argv[1]), 2000  # so that what is long goes in parts
with link.connect_machines():
    assert world.compute_on_rank0(lambda: list(range(9000))) == list(range(9000))
    few = ["--data", str(out / "few.jsonl"), "--rubric", "data/demo_rubric.yaml"]
    for name, flags in test_world.VARIANTS.items():
        run = make_run(out / "gone", *few, *flags)
        assert run.judge.cache.scores == {"a": 1.0}  # none gives up a judge that the first has heard
        ids, grads, measured = test_world.gradients(run)
        arrays = {"ids": mx.array(sum(ids, []))} | {f"grad {key}": value for key, value in grads.items()}
        arrays |= {f"of {key}": mx.array(value) for key, value in measured.items() if value is not None}
        mx.save_safetensors(str(out / f"{name} {world.rank()}.safetensors"), arrays)
    learner = test_world.steps_of(make_run(out / "gone", *few, "--num-iterations", "2", "--target-kl", "0.001"))
    learner.trainable = {name: array + world.rank() for name, array in learner.trainable.items()}
    update.broadcast_state_if_ranks_differ(learner)  # as after the roundings of another kind of processor
    state = learner.trainable | dict(tree_flatten(learner.optimizer.state))
    mx.save_safetensors(str(out / f"state {world.rank()}.safetensors"), state)
"""


@slow
def test_two_machines_have_the_gradients_and_measurements_of_one_and_equal_weights(tmp_path, few):
    (tmp_path / "gone").mkdir()
    write_log(tmp_path / "gone" / "judge_scores.jsonl", [{"step": 0, "key": "a", "score": 1.0}])
    with Machines(2, tmp_path, "-c", COMPARE, tmp_path) as machines:
        for (_, errors), status in machines.wait():
            assert status == 0, errors
    for name, flags in VARIANTS.items():
        ids, grads, measured = gradients(
            make_run(tmp_path / "gone", *few, "--rubric", "data/demo_rubric.yaml", *flags)
        )
        for rank in range(2):
            theirs = mx.load(str(tmp_path / f"{name} {rank}.safetensors"))
            assert theirs["ids"].tolist() == [token for its in ids for token in its]
            for key, ours in grads.items():
                assert (
                    mx.abs(theirs[f"grad {key}"] - ours).max() <= 1e-5 * mx.abs(ours).max() + 1e-8
                ), (name, key)
            for key, value in measured.items():
                assert value is None or theirs[f"of {key}"].item() == pytest.approx(
                    value, rel=1e-4, abs=1e-5
                ), key
    states = [(tmp_path / f"state {rank}.safetensors").read_bytes() for rank in range(2)]
    assert states[0] == states[1]


EVERYTHING = [
    *(
        "--reward",
        "length:5",
        "--rubric",
        "data/demo_rubric.yaml",
        "--beta",
        "0.02",
        "--loss-type",
        "grpo",
        "--train-completions",
        "2",
        "--lora-layers",
        "3",
    ),
    *("--num-iterations", "2", "--train-token-budget", "100", "--eval-every", "2", "--steps", "2"),
]


@slow
def test_three_machines_sample_what_one_does_and_only_the_first_writes_and_prints(tmp_path, few):
    flags = [*few, *EVERYTHING]
    train.main([*flags, "--run-dir", str(tmp_path / "one")])
    with Machines(3, tmp_path, "train.py", *flags, "--run-dir", tmp_path / "three") as machines:
        (first, *others) = machines.wait()
    assert first[1] == 0, first[0][1]
    assert "step 2/2" in first[0][0] and "machines: rank 0" in first[0][0]
    assert [(told, status) for told, status in others] == [(("", ""), 0)] * 2
    names = [
        # this process has loaded the modules of other tests, which the run in it keeps too
        {path.relative_to(run) for path in run.rglob("*") if "code" not in path.parts}
        for run in (tmp_path / "one", tmp_path / "three")
    ]
    assert names[0] == names[1]
    one, three = (read_log(tmp_path / name / "rollouts.jsonl") for name in ("one", "three"))
    assert len(one) == len(three) and any(record["judge_scores"] for record in one)
    for ours, theirs in zip(one, three, strict=True):
        assert ours["ids"] == theirs["ids"]
        assert ours["reward"] == pytest.approx(theirs["reward"], abs=1e-5)
    weights = [
        mx.load(str(tmp_path / name / "adapter" / "adapters.safetensors"))
        for name in ("one", "three")
    ]
    for name, array in weights[
        0
    ].items():  # a step of AdamW is as long for a gradient that is nothing but rounding
        assert mx.linalg.norm(weights[1][name] - array) < 0.01 * mx.linalg.norm(array), name
    ours, theirs = (read_log(tmp_path / name / "eval_answers.jsonl") for name in ("one", "three"))
    assert [answer["completions"] for answer in ours] == [
        answer["completions"] for answer in theirs
    ]
    figures = read_log(tmp_path / "three" / "metrics.jsonl")[-1]
    assert figures["wait/s"] >= 0 and all(f"rollout/tok_s/{rank}" in figures for rank in range(3))
    assert "wait/s" not in read_log(tmp_path / "one" / "metrics.jsonl")[-1]


# ---- how they end


LONG = ["--steps", "500", "--reward", "length:5"]


def resumed(directory, steps):
    """The weights of a run that one process resumes, and has brought to a step."""
    train.main(["--resume", str(directory), "--steps", str(steps)])
    state = checkpoint.load(directory)
    assert state.step == steps
    return state.trainable


@slow
@pytest.mark.parametrize(("number", "whose"), [(signal.SIGKILL, 1), (signal.SIGTERM, 0)])
def test_a_machine_that_is_stopped_ends_all_with_one_line_and_one_process_goes_on(
    tmp_path, few, number, whose
):
    directory = tmp_path / "run"
    with Machines(2, tmp_path, "train.py", *few, *LONG, "--run-dir", directory) as machines:
        machines.read_until("step 2/")
        machines.processes[whose].send_signal(number)
        ended = machines.wait()
    for rank, ((_, errors), status) in enumerate(ended):
        others = ("[ring]", "waiting up to", "... ")  # the last on a busy machine
        said = [line for line in errors.splitlines() if line and not line.startswith(others)]
        if (rank, number) == (whose, signal.SIGKILL):
            assert status == -signal.SIGKILL and not said
            continue
        assert status in (2, 130) and len(said) == 1, errors
        if rank == 0:
            assert f"--resume {directory}" in said[0]
    step = checkpoint.load(directory).step
    assert step >= 2
    ours = resumed(directory, step + 1)
    if number == signal.SIGKILL:
        train.main(
            [*few, *LONG[2:], "--steps", str(step + 1), "--run-dir", str(tmp_path / "whole")]
        )
        whole = checkpoint.load(tmp_path / "whole").trainable
        most = max(mx.abs(array).max().item() for array in whole.values())
        assert all(mx.abs(ours[name] - array).max() < 1e-3 * most for name, array in whole.items())


FAILING = """
def spoiled(completions, trainer_state, **_):
    if trainer_state.global_step:
        raise RuntimeError("no such file")
    return [float(len(text)) for text in completions]
"""


@slow
def test_a_reward_that_fails_on_one_machine_ends_all_with_its_words(tmp_path, few):
    (tmp_path / "reward.py").write_text(FAILING)
    flags = [
        *few,
        *LONG[:2],
        "--reward",
        tmp_path / "reward.py:spoiled",
        "--run-dir",
        tmp_path / "run",
    ]
    with Machines(2, tmp_path, "train.py", *flags) as machines:
        ended = machines.wait()
    for (_, errors), status in ended:
        assert status == 2 and "reward spoiled raised RuntimeError: no such file" in errors
        assert "rank 0 (" in errors and "Traceback" not in errors
    assert "saved after step 1" in ended[0][0][1]


HANGING = """
import time
import cpu_blas, mlx.core as mx
from machine import link, world
from flags import exit_with_error
link.BLOCK, link.EXCHANGE_TIMEOUT, piece = 1000, 1.0, link.Link._run_collective
def late(*args):
    time.sleep(0.4)
    return piece(*args)
try:
    with link.connect_machines():
        link.Link._run_collective = late
        assert world.all_sum([mx.ones(9000)])[0].sum() == 18000
        print("a slow link is no machine that hangs", flush=True)
        if world.rank() == 1:
            time.sleep(1000)
        world.all_gather("here")
except ValueError as error:
    exit_with_error(error)
"""


@slow
def test_a_machine_that_hangs_ends_the_others_with_a_line_and_not_a_hang(tmp_path):
    with Machines(2, tmp_path, "-c", HANGING) as machines:
        (said, errors), status = (
            machines.processes[0].communicate(timeout=LIMIT),
            machines.processes[0].returncode,
        )
    assert said.endswith("a slow link is no machine that hangs\n")
    assert status == 1 and "error: a machine hangs" in errors and "for 1 s" in errors


@slow
def test_machines_that_are_not_alike_are_refused(tmp_path, few):
    # only the first machine looks for a tracker, which is no difference to tell
    (tmp_path / "wandb.py").write_text(
        "from types import SimpleNamespace\n"
        "def setup(): return SimpleNamespace(settings=SimpleNamespace(mode='offline'))\n"
    )
    other = {"rank1": {"GWEN_DTYPE": "bfloat16"}, "rank0": {"PYTHONPATH": str(tmp_path)}}
    flags = [*few, *LONG, "--report-to", "wandb", "--run-dir", tmp_path / "run"]
    with Machines(2, tmp_path, "train.py", *flags, **other) as machines:
        ended = machines.wait()
    for (_, errors), status in ended:
        assert (
            status == 2 and "GWEN_DTYPE" in errors and "rank 0" in errors and "bfloat16" in errors
        )
    assert not (tmp_path / "run").exists()
