"""
Several machines train like one process and end together.

Processes of this machine stand in for the machines.
"""

import itertools
import json
import signal

import mlx.core as mx
import numpy as np
import pytest
from conftest import read_log, write_log
from machines import TIME_LIMIT, Machines
from small_run import SMALL_FLAGS, make_run, record_gradient, sample_first_prompts

import train
import update
from disk import checkpoint
from machine import link, world
from step import trust_region
from step.batch import make_batches

slow = pytest.mark.slow

# ---- one process


def test_the_operations_between_machines_return_the_input_in_one_process():
    value = {"a": (1, 2)}
    array = mx.array([1.0])
    assert world.all_gather(value)[0] is value
    assert world.compute_on_rank0(lambda: value) is value
    assert world.all_sum([array])[0] is array
    assert world.rank() == 0
    assert world.size() == 1
    assert world.own_item_indices([1, 1, 1]) == [0, 1, 2]
    assert world.pop_wait_seconds_metric() == {}

    with link.connect_machines():
        assert world.size() == 1
    assert link.end_reason_with_machine_name(ValueError("why")) == "why"


def test_each_item_belongs_to_one_machine_and_the_loads_are_nearly_equal(monkeypatch):
    costs = np.random.default_rng(0).integers(1, 1000, 40).tolist()
    indices_by_rank = []
    for rank in range(3):
        monkeypatch.setattr(world, "size", lambda: 3)
        monkeypatch.setattr(world, "rank", lambda rank=rank: rank)
        indices_by_rank.append(world.own_item_indices(costs))
    assert sorted(itertools.chain(*indices_by_rank)) == list(range(40))

    loads = []
    for indices in indices_by_rank:
        loads.append(sum(costs[index] for index in indices))
    assert max(loads) - min(loads) <= max(costs)
    assert indices_by_rank[2] == sorted(indices_by_rank[2])


def test_values_and_arrays_arrive_unchanged_at_another_machine():
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
    received_value, received_arrays, last = link._decode(link._encode([value, arrays, "after"]))
    assert json.dumps(received_value) == json.dumps(value)
    assert last == "after"
    for sent, received in zip(arrays, received_arrays, strict=True):
        assert type(sent) is type(received)
        assert sent.shape == received.shape
        assert np.array(sent).dtype == np.array(received).dtype
        assert np.array_equal(np.array(sent), np.array(received))

    with pytest.raises(TypeError, match="set cannot be sent to other machines"):
        link._encode({1})


@pytest.fixture
def few_prompts_flags(tmp_path):
    """Flags of a run on few prompts without a judge, which begins sooner."""
    rows = [{"prompt": f"What is {n} plus {n}?"} for n in range(40)]
    path = write_log(tmp_path / "few.jsonl", rows)
    return [*SMALL_FLAGS, "--eval-every", "0", "--data", path]


# ---- the same as one process

VARIANTS = {
    "kl, grpo": ["--beta", "0.1", "--loss-type", "grpo"],
    "all weights": ["--lora-rank", "0"],
}


def compute_gradient_and_measurements(run):
    """The response ids of a step, the gradient in small batches, and the measurements by name."""
    samples = sample_first_prompts(run)
    batches = make_batches(samples, 80, "off")
    assert len(batches) > 3
    if run.config.objective.beta:
        batches = update.add_reference_logprobs(run.learner, batches)
    result, gradient = record_gradient(run, batches)

    local_batches = [batch for batch in batches if batch.is_local]
    logprobs = update.install_weights_and_compute_logprobs(
        run.learner, local_batches, run.learner.trainable
    )
    local_batches = update.fill_in_missing_old_logprobs(local_batches, logprobs)
    sampled_logprobs = [batch.sampled_logprobs for batch in local_batches]
    kl = trust_region.measure_kl(local_batches, sampled_logprobs)
    response_ids = [sample.response_ids for sample in samples]
    return response_ids, gradient, {"loss": result.loss, "kl": kl, **result.means}


def run_two_updates(run):
    """Two updates, each of two iterations of AdamW with a bound on the step."""
    run.learner.trainable = dict(sorted(run.learner.trainable.items()))  # the order in a checkpoint
    for budget in (80, 100_000):  # one machine has no part of the second batch
        batches = make_batches(sample_first_prompts(run), budget, "off")
        update.run_optimizer_steps(run.learner, batches, 0.004)
    return run.learner


COMPARE = """
import sys
from pathlib import Path
import cpu_blas, mlx.core as mx, test_world, update
from machine import link, world
from small_run import make_run
from mlx.utils import tree_flatten
out = Path(sys.argv[1])
link.BLOCK = 2000  # so that long messages are sent in parts
with link.connect_machines():
    assert world.compute_on_rank0(lambda: list(range(9000))) == list(range(9000))
    common_flags = ["--data", str(out / "few.jsonl"), "--rubric", "data/demo_rubric.yaml"]
    for name, flags in test_world.VARIANTS.items():
        run = make_run(out / "run", *common_flags, *flags)
        assert run.judge.cache.scores == {"a": 1.0}  # every rank has the scores that rank 0 has read
        ids, gradient, measurements = test_world.compute_gradient_and_measurements(run)
        arrays = {"ids": mx.array(sum(ids, []))}
        for key, array in gradient.items():
            arrays[f"gradient {key}"] = array
        for key, value in measurements.items():
            if value is not None:
                arrays[f"measurement {key}"] = mx.array(value)
        mx.save_safetensors(str(out / f"{name} {world.rank()}.safetensors"), arrays)
    run = make_run(out / "run", *common_flags, "--num-iterations", "2", "--target-kl", "0.001")
    learner = test_world.run_two_updates(run)
    learner.trainable = {name: array + world.rank() for name, array in learner.trainable.items()}
    update.broadcast_state_if_ranks_differ(learner)  # processors of other kinds round differently
    state = learner.trainable | dict(tree_flatten(learner.optimizer.state))
    mx.save_safetensors(str(out / f"state {world.rank()}.safetensors"), state)
"""


@slow
def test_two_machines_have_the_gradient_and_measurements_of_one_process_and_equal_weights(
    tmp_path, few_prompts_flags
):
    (tmp_path / "run").mkdir()
    write_log(tmp_path / "run" / "judge_scores.jsonl", [{"step": 0, "key": "a", "score": 1.0}])
    with Machines(2, tmp_path, "-c", COMPARE, tmp_path) as machines:
        for (_, errors), status in machines.wait():
            assert status == 0, errors

    for name, flags in VARIANTS.items():
        common_flags = [*few_prompts_flags, "--rubric", "data/demo_rubric.yaml"]
        run = make_run(tmp_path / "run", *common_flags, *flags)
        ids, gradient, measurements = compute_gradient_and_measurements(run)
        for rank in range(2):
            arrays_of_rank = mx.load(str(tmp_path / f"{name} {rank}.safetensors"))
            assert arrays_of_rank["ids"].tolist() == list(itertools.chain(*ids))
            for key, array in gradient.items():
                distance = mx.abs(arrays_of_rank[f"gradient {key}"] - array).max()
                assert distance <= 1e-5 * mx.abs(array).max() + 1e-8, (name, key)
            for key, value in measurements.items():
                if value is not None:
                    value_of_rank = arrays_of_rank[f"measurement {key}"].item()
                    assert value_of_rank == pytest.approx(value, rel=1e-4, abs=1e-5), key

    states = [(tmp_path / f"state {rank}.safetensors").read_bytes() for rank in range(2)]
    assert states[0] == states[1]


MANY_FLAGS = "--reward length:5 --rubric data/demo_rubric.yaml --beta 0.02 --loss-type grpo".split()
MANY_FLAGS += "--train-completions 2 --lora-layers 3 --num-iterations 2".split()
MANY_FLAGS += "--train-token-budget 100 --eval-every 2 --steps 2".split()


def list_files(run_dir):
    """
    The relative paths of the files of a run, without the copies of source files.

    This process also copies the modules that other tests have loaded.
    """
    return {path.relative_to(run_dir) for path in run_dir.rglob("*") if "code" not in path.parts}


@slow
def test_three_machines_sample_like_one_process_and_only_rank_0_writes_and_prints(
    tmp_path, few_prompts_flags
):
    flags = [*few_prompts_flags, *MANY_FLAGS]
    run_of_one = tmp_path / "one"
    run_of_three = tmp_path / "three"
    train.main([*flags, "--run-dir", str(run_of_one)])
    with Machines(3, tmp_path, "train.py", *flags, "--run-dir", run_of_three) as machines:
        (rank_0, *other_ranks) = machines.wait()

    (output, errors), status = rank_0
    assert status == 0, errors
    assert "step 2/2" in output
    assert "machines: rank 0" in output
    assert other_ranks == [(("", ""), 0)] * 2
    assert list_files(run_of_one) == list_files(run_of_three)

    # the rollouts
    records_of_one = read_log(run_of_one / "rollouts.jsonl")
    records_of_three = read_log(run_of_three / "rollouts.jsonl")
    assert any(record["judge_scores"] for record in records_of_one)
    for record_of_one, record_of_three in zip(records_of_one, records_of_three, strict=True):
        assert record_of_one["ids"] == record_of_three["ids"]
        assert record_of_one["reward"] == pytest.approx(record_of_three["reward"], abs=1e-5)

    # the weights: AdamW makes a full step even if a gradient is only rounding
    weights_of_one = mx.load(str(run_of_one / "adapter" / "adapters.safetensors"))
    weights_of_three = mx.load(str(run_of_three / "adapter" / "adapters.safetensors"))
    for name, array in weights_of_one.items():
        distance = mx.linalg.norm(weights_of_three[name] - array)
        assert distance < 0.01 * mx.linalg.norm(array), name

    # the evaluations and the metrics
    answers_of_one = read_log(run_of_one / "eval_answers.jsonl")
    answers_of_three = read_log(run_of_three / "eval_answers.jsonl")
    for answer_of_one, answer_of_three in zip(answers_of_one, answers_of_three, strict=True):
        assert answer_of_one["completions"] == answer_of_three["completions"]
    metrics = read_log(run_of_three / "metrics.jsonl")[-1]
    assert metrics["wait/s"] >= 0
    for rank in range(3):
        assert f"rollout/tok_s/{rank}" in metrics
    assert "wait/s" not in read_log(run_of_one / "metrics.jsonl")[-1]


# ---- how several machines end


LONG = ["--steps", "500", "--reward", "length:5"]


def resume_and_load_weights(directory, steps):
    """The weights of a run after one process has continued it to a step."""
    train.main(["--resume", str(directory), "--steps", str(steps)])
    state = checkpoint.load(directory)
    assert state.step == steps
    return state.trainable


@slow
@pytest.mark.parametrize(("signal_number", "rank"), [(signal.SIGKILL, 1), (signal.SIGTERM, 0)])
def test_a_signal_to_one_machine_ends_all_with_one_line_and_one_process_can_resume(
    tmp_path, few_prompts_flags, signal_number, rank
):
    directory = tmp_path / "run"
    flags = [*few_prompts_flags, *LONG]
    with Machines(2, tmp_path, "train.py", *flags, "--run-dir", directory) as machines:
        machines.read_until("step 2/")
        machines.processes[rank].send_signal(signal_number)
        results = machines.wait()

    for any_rank, ((_, errors), status) in enumerate(results):
        unrelated = ("[ring]", "waiting up to", "... ")  # the last one on a busy machine
        lines = [line for line in errors.splitlines() if line and not line.startswith(unrelated)]
        if any_rank == rank and signal_number == signal.SIGKILL:
            assert status == -signal.SIGKILL
            assert not lines
            continue
        assert status in (2, 130), errors
        assert len(lines) == 1, errors
        if any_rank == 0:
            assert f"--resume {directory}" in lines[0]

    step = checkpoint.load(directory).step
    assert step >= 2
    weights = resume_and_load_weights(directory, step + 1)
    if signal_number == signal.SIGKILL:
        flags = [*few_prompts_flags, "--reward", "length:5", "--steps", str(step + 1)]
        train.main([*flags, "--run-dir", str(tmp_path / "uninterrupted")])
        expected_weights = checkpoint.load(tmp_path / "uninterrupted").trainable
        largest = max(mx.abs(array).max().item() for array in expected_weights.values())
        for name, array in expected_weights.items():
            assert mx.abs(weights[name] - array).max() < 1e-3 * largest


FAILING = """
def spoiled(completions, trainer_state, **_):
    if trainer_state.global_step:
        raise RuntimeError("no such file")
    return [float(len(text)) for text in completions]
"""


@slow
def test_a_reward_that_fails_on_one_machine_ends_all_with_the_same_message(
    tmp_path, few_prompts_flags
):
    (tmp_path / "reward.py").write_text(FAILING)
    reward_flags = ["--steps", "500", "--reward", tmp_path / "reward.py:spoiled"]
    flags = [*few_prompts_flags, *reward_flags, "--run-dir", tmp_path / "run"]
    with Machines(2, tmp_path, "train.py", *flags) as machines:
        results = machines.wait()

    for (_, errors), status in results:
        assert status == 2
        assert "reward spoiled raised RuntimeError: no such file" in errors
        assert "rank 0 (" in errors
        assert "Traceback" not in errors
    (_, errors_of_rank_0), _ = results[0]
    assert "saved after step 1" in errors_of_rank_0


HANGING = """
import time
import cpu_blas, mlx.core as mx
from machine import link, world
from flags import exit_with_error
link.BLOCK = 1000
link.EXCHANGE_TIMEOUT = 1.0
run_collective = link.Link._run_collective
def run_collective_slowly(*args):
    time.sleep(0.4)
    return run_collective(*args)
try:
    with link.connect_machines():
        link.Link._run_collective = run_collective_slowly
        assert world.all_sum([mx.ones(9000)])[0].sum() == 18000
        print("a slow link does not count as a machine that hangs", flush=True)
        if world.rank() == 1:
            time.sleep(1000)
        world.all_gather("here")
except ValueError as error:
    exit_with_error(error)
"""


@slow
def test_a_machine_that_hangs_ends_the_others_with_one_line(tmp_path):
    with Machines(2, tmp_path, "-c", HANGING) as machines:
        process = machines.processes[0]
        output, errors = process.communicate(timeout=TIME_LIMIT)
    assert output.endswith("a slow link does not count as a machine that hangs\n")
    assert process.returncode == 1
    assert "error: a machine hangs" in errors
    assert "for 1 s" in errors


@slow
def test_machines_with_different_environments_are_refused(tmp_path, few_prompts_flags):
    # Only rank 0 looks for a tracker. This difference must not be reported.
    (tmp_path / "wandb.py").write_text(
        "from types import SimpleNamespace\n"
        "def setup(): return SimpleNamespace(settings=SimpleNamespace(mode='offline'))\n"
    )
    environments = {"rank1": {"GWEN_DTYPE": "bfloat16"}, "rank0": {"PYTHONPATH": str(tmp_path)}}
    flags = [*few_prompts_flags, *LONG, "--report-to", "wandb", "--run-dir", tmp_path / "run"]
    with Machines(2, tmp_path, "train.py", *flags, **environments) as machines:
        results = machines.wait()

    for (_, errors), status in results:
        assert status == 2
        assert "GWEN_DTYPE" in errors
        assert "rank 0" in errors
        assert "bfloat16" in errors
    assert not (tmp_path / "run").exists()
