"""The training loop on the bundled model: the loss, the update, and runs that stop and resume."""

import itertools
import os
import re
import signal
import subprocess
import sys
import threading
import time

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
import yaml
from conftest import ROOT, read_log, read_untimed_log
from small_run import (
    SMALL_FLAGS,
    make_config,
    make_run,
    resolve_settings,
    sample_first_prompts,
    update_once,
)
from test_remote_judge import chat_completion, serve_fixture  # noqa: F401  (a fixture)

import chat
import evaluate
import evaluation.score_task
import grpo
import gwen
import sampler
import train
import trainer
import update
from config import Config
from disk import adapters, checkpoint, hub
from evaluation.score_task import KEY
from forecast import memory_estimate
from machine import versions
from prompts import chat_template
from reporting.journal import completion_records
from step import advantages, scoring
from step import sample as samples
from step.batch import make_batches
from step.sample import Sample

pytestmark = pytest.mark.slow


def test_the_update_uses_the_sampled_ids_even_if_the_text_encodes_to_other_ids(tmp_path):
    run = make_run(tmp_path, "--temp", "4", "--steps", "1", "--eval-every", "0")
    list(train.train(run))

    sampled_rows = [line["ids"] for line in read_log(tmp_path / "rollouts.jsonl")]
    encoded_rows = [
        run.tokenizer.encode(run.tokenizer.decode(ids), add_special_tokens=False)
        for ids in sampled_rows
    ]
    row_pairs = zip(sampled_rows, encoded_rows, strict=True)
    assert sum(sampled != encoded for sampled, encoded in row_pairs) > 6

    (metrics,) = read_log(tmp_path / "metrics.jsonl")
    # The trainer finds the sampled ids as likely as the sampler did.
    assert metrics["mismatch/logprob_abs_max"] < 1e-3


def test_prompts_of_policy_and_judge_disable_thinking_unless_the_flag_enables_it(tmp_path):
    for flags, thinking in ((), False), (("--thinking",), True):
        run = make_run(tmp_path, *flags)
        for example, ids in zip(run.task.train[:5], run.prompt_ids, strict=False):
            expected_ids = chat_template.encode_chat(
                run.tokenizer, example["prompt"], thinking=thinking
            )
            assert ids == expected_ids
        if not thinking:
            end_of_judge_prompt = run.tokenizer.decode(run.judge.prompts.tails[0])
            assert end_of_judge_prompt.endswith("<think>\n\n</think>\n\n")


def test_training_all_weights_uses_a_tenth_of_the_adapter_rate_unless_a_rate_is_set(tmp_path):
    all_weights = {"model": "demo", "lora_rank": 0}

    def learning_rate(settings, recipe=None):
        return resolve_settings(settings, recipe, None)[0].optimizer.learning_rate

    assert learning_rate(all_weights) == pytest.approx(0.0004)
    assert learning_rate(all_weights | {"task": "values"}) == pytest.approx(5e-6)
    assert learning_rate(all_weights | {"optimizer": "sgd"}) == 1
    assert learning_rate(all_weights | {"learning_rate": 0.002}) == 0.002

    # The rate of a recipe is meant for the recipe's own rank.
    recipe = tmp_path / "full.yaml"
    recipe.write_text("lora_rank: 0\nlearning_rate: 0.0003\n")
    for settings in (all_weights, {"model": "demo"}):
        assert learning_rate(settings, str(recipe)) == 0.0003

    recipe.write_text("lora_rank: 0\n")
    for settings in (all_weights, {"model": "demo"}):
        assert learning_rate(settings, str(recipe)) == pytest.approx(1e-5)


def test_only_kl_with_all_weights_trained_keeps_a_second_model_in_memory(tmp_path):
    all_weights = "--lora-rank 0 --reward-weights rubric=0"
    needs_second_model = {
        "": False,
        "--beta 0.1": False,
        all_weights: False,
        f"{all_weights} --beta 0.1": True,
    }
    for flags, is_needed in needs_second_model.items():
        run = train.GrpoRun(make_config(*flags.split()), tmp_path)
        assert (run.base is not None) == is_needed, flags
        assert all_weights in flags or run.judge.model is run.model, flags


def test_a_step_computes_the_rewards_once(tmp_path):
    run = tmp_path / "run"
    # The function is also tried before the run's directory exists; these calls do not count.
    (tmp_path / "counter.py").write_text(
        "import os\n"
        "calls = []\n"
        "def count_calls(completions, **_):\n"
        f"    calls.extend([1] * os.path.isdir({str(run)!r}))\n"
        "    return [len(calls) - 1 + 0.1 * row for row in range(len(completions))]\n"
    )
    flags = "--reward-weights rubric=0 --eval-every 0 --steps 3".split()
    flags += ["--reward", f"{tmp_path / 'counter.py'}:count_calls", "--run-dir", str(run)]
    train.main([*SMALL_FLAGS, *flags])
    rewards = [line["reward"] for line in read_log(run / "rollouts.jsonl")]
    assert [reward // 1 for reward in rewards[::12]] == [0, 1, 2]


def make_samples(rewards, finish_reasons=None):
    """Samples with these rewards, (B, G), and finish reasons, (N,)."""
    finish_reasons = finish_reasons or ["stop"] * np.size(rewards)
    groups_and_rewards = [
        (group, float(reward))
        for group, group_rewards in enumerate(rewards)
        for reward in group_rewards
    ]
    return [
        Sample(
            [],
            [1],
            range(1),
            group,
            reward=reward,
            imputed_components={"one": reward},
            finish_reason=finish_reason,
        )
        for (group, reward), finish_reason in zip(groups_and_rewards, finish_reasons, strict=True)
    ]


@pytest.mark.parametrize(
    ("flags", "expected_advantages"),
    [
        ("", lambda rewards: grpo.group_advantages(rewards)),
        (
            "--advantage rloo --scale-rewards none",
            lambda rewards: grpo.group_advantages(rewards, "none", "rloo"),
        ),
        (
            "--advantage reinforce --scale-rewards batch",
            lambda rewards: grpo.group_advantages(rewards, "batch", "reinforce"),
        ),
        (
            "--combine-rewards normalize",
            lambda rewards: grpo.gdpo_decoupled_advantages(rewards[None], [1.0]),
        ),
    ],
)
def test_a_constant_added_to_all_rewards_changes_no_advantage(flags, expected_advantages):
    """Between float32 numbers near 1.7e9 (seconds since 1970), the gap is 128."""
    config = make_config(*flags.split())
    rewards = np.random.default_rng(0).integers(0, 40, (4, 4)).astype(float)
    rewards[1] = 7
    for offset in (0.0, 1.7e9, -1.7e9, 1e14):
        groups = samples.group_samples(make_samples(rewards + offset))
        computed_advantages = advantages.compute_advantages(config, groups, {"one": 1.0})
        np.testing.assert_allclose(computed_advantages, expected_advantages(rewards), atol=1e-5)


def test_each_step_of_each_seed_samples_with_a_different_key(tmp_path, monkeypatch):
    keys = []
    original_rollout = sampler.rollout

    def record_key(*args, **options):
        keys.append(options["key"])
        return original_rollout(*args, **options)

    monkeypatch.setattr(sampler, "rollout", record_key)
    for seed in ("0", "1"):
        flags = ("--steps", "3", "--eval-every", "0", "--seed", seed)
        run = make_run(tmp_path, *flags)
        list(train.train(run))

    assert len(keys) == 6
    assert len(set(keys)) == 6
    assert KEY not in keys


def test_a_group_has_no_signal_if_all_its_completions_are_left_out():
    finish_reasons = ["length", "length", "stop", "length"]
    for truncated, expected_signals in (("mask", [False, True]), ("keep", [True, True])):
        config = Config.from_flags(batch=2, groups=2, truncated=truncated)
        assigned = advantages.assign_advantages(
            config, make_samples([[0, 1], [0, 1]], finish_reasons), {}
        )
        groups = samples.group_samples(assigned)
        assert [group[0].has_signal for group in groups] == expected_signals
        assert all(sample.rewards_differ for sample in assigned)

        marked = advantages.mark_for_update(config, assigned, 0)
        are_trained = [bool(sample.loss_positions) for sample in marked]
        assert are_trained == [
            truncated == "keep" or finish_reason == "stop" for finish_reason in finish_reasons
        ]


def test_groups_of_unequal_sizes_have_their_own_means_and_are_not_split_over_mini_batches():
    config = Config.from_flags(batch=4, groups=8)
    group_sizes = [2, 5, 3, 4]
    drawn_samples = [
        Sample([group], [1, 2], range(2), group)
        for group, size in enumerate(group_sizes)
        for _ in range(size)
    ]
    # One sample of the first group comes last, as if it was drawn later.
    drawn_samples.append(drawn_samples.pop(1))

    scores = np.random.default_rng(0).normal(size=len(drawn_samples))
    components = {"correct": scores, "rubric": np.array([np.nan, *scores[1:-1], 1.0])}
    rewarded = scoring.assign_rewards(drawn_samples, components, {"correct": 1.0, "rubric": 1.0})
    # The substitute is the mean of the readable values in the group.
    assert rewarded[0].imputed_components["rubric"] == 1.0

    assigned = advantages.assign_advantages(config, rewarded, {})
    for group in samples.group_samples(assigned):
        group_rewards = np.array([sample.reward for sample in group])
        deviations = group_rewards - group_rewards.mean()
        expected_advantages = deviations / (group_rewards.std(ddof=1) + 1e-4)
        np.testing.assert_allclose(
            [sample.advantage for sample in group], expected_advantages, atol=1e-5
        )

    marked = advantages.mark_for_update(config, assigned, 0)
    groups_by_mini_batch = {0: set(), 1: set()}
    for batch in make_batches(marked, 1000, num_mini_batches=2):
        groups_by_mini_batch[batch.mini_batch] |= {assigned[row].group for row in batch.rows}
        assert (batch.num_rows, batch.num_loss_tokens) == (7, 14)
    assert groups_by_mini_batch == {0: {0, 1}, 1: {2, 3}}


def test_groups_with_equal_rewards_are_counted_even_if_they_have_a_signal():
    for config, advantage_function in (
        (Config.from_flags(), lambda rewards: rewards + 1),
        (Config.from_flags(advantage="reinforce"), None),
    ):
        config = config.copy_with_settings(batch=2, groups=2, scale_rewards="batch")
        assigned = advantages.assign_advantages(
            config, make_samples([[1, 1], [0, 1]], ["stop"] * 4), {}, advantage_function
        )
        properties = [(sample.has_signal, sample.rewards_differ) for sample in assigned]
        assert properties == [(True, False), (True, False), (True, True), (True, True)]


def test_truncated_completions_are_trained_left_out_or_punished(tmp_path):
    flags = "--steps 1 --eval-every 0 --target-kl 0 --max-tokens 7".split()
    flags += ["--beta", "1e-9"]  # so that all rows have a gradient
    for choice in ("keep", "mask", "punish"):
        run_dir = tmp_path / choice
        run_dir.mkdir()
        run = make_run(run_dir, *flags, "--truncated", choice)
        list(train.train(run))
        (metrics,) = read_untimed_log(run_dir / "metrics.jsonl")
        lines = read_untimed_log(run_dir / "rollouts.jsonl")

        truncated = [line for line in lines if line["finish_reason"] == "length"]
        assert 0 < len(truncated) < 12
        assert metrics["completion/truncated_frac"] == len(truncated) / 12

        num_trained = 12 - len(truncated) if choice == "mask" else 12
        assert metrics["forwards_per_completion"] == 2 * (num_trained / 12)

        if choice == "punish":
            assert all(line["rewards"]["soft_overlong"] == -1 for line in truncated)
            short = [line for line in lines if len(line["ids"]) <= 6]
            assert short
            assert all(line["rewards"]["soft_overlong"] == 0 for line in short)


def test_a_stop_text_ends_completions_in_training_evaluation_and_chat(tmp_path, capsys):
    path = str(tmp_path / "run")
    stop_texts = ("ty", "e")
    flags = ["--steps", "1", "--eval-every", "1", "--stop", *stop_texts]
    train.main([*SMALL_FLAGS, *flags, "--run-dir", path])

    # Training.
    lines = read_untimed_log(tmp_path / "run" / "rollouts.jsonl")
    tokenizer = gwen.load("demo")[1]
    stopped = []
    for line in lines:
        text = tokenizer.decode(line["ids"])
        if any(stop_text in text for stop_text in stop_texts):
            stopped.append(line)
    assert stopped
    assert all(line["finish_reason"] == "stop" for line in stopped)
    assert not any(stop_text in line["completion"] for line in lines for stop_text in stop_texts)

    # Evaluation.
    answers = read_untimed_log(tmp_path / "run" / "eval_answers.jsonl")
    answers_of_step_1 = [line for line in answers if line.pop("step") == 1]
    evaluate.main(["--run", path, "--out", str(tmp_path / "out.jsonl")])
    assert read_untimed_log(tmp_path / "out.jsonl") == answers_of_step_1

    # Chat.
    capsys.readouterr()
    chat_flags = ["--run", path, "--prompt", "What is one plus two?"]
    chat.main([*chat_flags, "--temp", "0", "--stop", "hre"])
    assert capsys.readouterr().out == "One plus two is t\n"
    chat.main([*chat_flags, "--temp", "0", "--stop", r"\n", r"\x20"])
    assert capsys.readouterr().out == "One\n"


def test_mlx_lm_loads_every_adapter_of_a_run_and_computes_the_same_logits(golden):
    run = golden("kl")
    tokens = mx.array([[1, 5, 9, 2, 30]])
    adapter_paths = [*checkpoint.list_checkpoints(run), run, run / "adapter-best"]
    assert len(adapter_paths) == 5

    for path in adapter_paths:
        gwen_logits = gwen.load("demo", adapter=path)[0](tokens)
        directory = adapters.find_adapter_directory(path)
        mlx_lm_model, _ = mlx_lm.load(str(hub.DEMO), adapter_path=str(directory))
        mlx_lm_model.set_dtype(mx.float32)  # the demo's file has 16 bits a weight
        mlx_lm_logits = np.array(mlx_lm_model(tokens))
        np.testing.assert_allclose(mlx_lm_logits, np.array(gwen_logits), atol=1e-4, rtol=1e-4)
        assert adapters.require_base_model_of_adapter(path) == "demo"

    first_logits, *later_logits = (
        gwen.load("demo", adapter=path)[0](tokens) for path in adapter_paths[:3]
    )
    for logits in later_logits:
        assert mx.abs(first_logits - logits).max().item() > 1e-3


def test_an_unreadable_score_is_replaced_by_the_mean_of_the_readable_scores():
    judged_samples = [Sample([], [1], range(1), row // 4) for row in range(12)]
    unreadable_rows = [1, 8, 9, 10, 11]
    rubric_scores = np.arange(12.0)
    rubric_scores[unreadable_rows] = np.nan

    # Each group has its own mean.
    components = {"rubric": rubric_scores}
    rewarded = scoring.assign_rewards(judged_samples, components, {"rubric": 1.0})
    are_nan = [np.isnan(sample.reward_or_nan_if_unreadable) for sample in rewarded]
    assert np.flatnonzero(are_nan).tolist() == unreadable_rows
    expected_rewards = [0, (0 + 2 + 3) / 3, 2, 3]
    np.testing.assert_allclose([sample.reward for sample in rewarded[:4]], expected_rewards)

    # All groups share one mean.
    rewarded = scoring.assign_rewards(
        judged_samples, components, {"rubric": 1.0}, compares_whole_step=True
    )
    mean_of_step = (0 + 2 + 3 + 4 + 5 + 6 + 7) / 7
    np.testing.assert_allclose([rewarded[row].reward for row in (1, 8, 11)], mean_of_step)

    # Only one of two components is unreadable. The mean of its readable values, 1 and 0, is 0.5.
    components = {
        "correct": np.array([1.0, 0, 0, 0] * 3),
        "rubric": np.array([1.0, 0, np.nan, np.nan] * 3),
    }
    rewarded = scoring.assign_rewards(judged_samples, components, {"correct": 1.0, "rubric": 0.5})
    rewards = [sample.reward_or_nan_if_unreadable for sample in rewarded]
    assert rewards == [1.5, 0.0, 0.25, 0.25] * 3
    assert np.isnan([sample.reward_components["rubric"] for sample in rewarded[2:4]]).all()


# ---- a run


def test_judge_scores_survive_when_a_run_is_killed_during_a_step(tmp_path, serve):
    """In step 2, the server answers neither request 5 nor any from 9 on before the kill."""
    run = tmp_path / "run"
    requests_of_step_2 = []
    answered = []
    unanswered = []
    is_killed = threading.Event()
    lock = threading.Lock()

    def answer(_, body):
        text = body["messages"][1]["content"]
        with lock:
            if (run / "checkpoints" / "step-000001").is_dir():
                requests_of_step_2.append(text)
            number = len(requests_of_step_2)
            is_late = not is_killed.is_set() and (number == 5 or number >= 9)
            (unanswered if is_late else answered).append(text)
        if is_late:
            is_killed.wait()
        return 200, chat_completion("4", [("4", -0.1)]), {}

    server = serve(answer)
    flags = "--judge-model demo --eval-every 0 --steps 2 --save-every 1".split()
    flags += ["--judge-url", server.url, "--run-dir", str(run)]
    process = subprocess.Popen(
        [sys.executable, "train.py", *SMALL_FLAGS, *flags], cwd=ROOT, stdout=subprocess.DEVNULL
    )

    def is_waiting():
        # The last answered score may not be written yet.
        if len(requests_of_step_2) < 9:
            return False
        return len(read_log(run / "judge_scores.jsonl")) >= len(answered)

    while not is_waiting():
        assert process.poll() is None
        time.sleep(0.01)
    process.kill()
    process.wait()
    answered_before_kill = set(answered)
    is_killed.set()

    train.main(["--resume", str(run)])
    texts = [body["messages"][1]["content"] for _, _, body in server.requests]
    # One more request may have been on its way at the kill.
    repeated = {text for text in texts if texts.count(text) > 1}
    assert repeated >= set(unanswered)
    assert not repeated & answered_before_kill
    assert len(read_untimed_log(run / "judge_scores.jsonl")) == len(set(texts))
    assert read_untimed_log(run / "metrics.jsonl")[1]["judge/cached"] >= 7


def test_a_resumed_run_can_change_its_judge_and_reports_the_step_of_each_change(tmp_path, capsys):
    run = tmp_path / "run"
    train.main([*SMALL_FLAGS, "--steps", "1", "--eval-every", "0", "--run-dir", str(run)])
    scores_of_first_judge = read_untimed_log(run / "judge_scores.jsonl")
    capsys.readouterr()

    judge_flags = "--judge-mode decode --judge-think 9 --judge-chunk-size 3".split()
    train.main(["--resume", str(run), "--steps", "2", *judge_flags])
    output = capsys.readouterr().out
    changes = dict(re.findall(r"^after step 1: --(\S+) .*\(was (.*)\)$", output, re.MULTILINE))
    assert changes == {
        "steps": "1",
        "judge-chunk-size": "24",
        "judge-mode": "'logits'",
        "judge-think": "0",
    }
    all_scores = read_untimed_log(run / "judge_scores.jsonl")
    assert all_scores[: len(scores_of_first_judge)] == scores_of_first_judge
    assert "step 2/2 | " in output
    assert yaml.safe_load((run / "config.yaml").read_text())["judge_think"] == 9


def test_a_resumed_run_saves_a_best_step_that_was_recorded_but_not_saved(tmp_path):
    run = make_run(tmp_path)
    run.save()  # as Ctrl-C does before the first evaluation ends
    run.evaluate()  # then the run continues, and is killed

    resumed = make_run(tmp_path)
    resumed.restore_checkpoint_state(checkpoint.load(tmp_path))
    assert resumed.evaluate_if_due_and_tell_if_best()
    resumed.save()
    assert (tmp_path / "adapter-best").is_dir()
    assert not resumed.evaluate_if_due_and_tell_if_best()

    resumed_again = make_run(tmp_path)
    resumed_again.restore_checkpoint_state(checkpoint.load(tmp_path))
    assert not resumed_again.evaluate_if_due_and_tell_if_best()


def test_a_restored_run_has_the_whole_saved_state(tmp_path):
    run = make_run(tmp_path)
    update_once(run)
    run.step = 7
    run.num_draws = 19
    run.batch_size.rows = 8
    run.learner.failures = 2
    run.learner.num_skipped = 5
    run.learner.lr_scale = 0.3
    run.learner.loss_scale = update.LossScale(64.0, good_steps=3, dynamic=True)
    run.mark_step_complete_and_keep_state()
    run.save()

    restored = make_run(tmp_path)
    restored.restore_checkpoint_state(checkpoint.load(tmp_path))
    saved_state = run.checkpoint_state()
    restored_state = restored.checkpoint_state()
    assert saved_state.step == restored_state.step
    assert saved_state.extra == restored_state.extra
    assert restored.learner.lr_scale == 0.3
    assert saved_state.extra["rate"] == 0.3  # the key in earlier versions too
    assert restored.batch_size.rows == 8  # a lack of memory had set it

    for saved, reloaded in (
        (saved_state.trainable, restored_state.trainable),
        (saved_state.optimizer, restored_state.optimizer),
    ):
        assert saved.keys() == reloaded.keys()
        assert all(mx.array_equal(saved[name], reloaded[name]).item() for name in saved)
    tokens = mx.array([[1, 2, 3, 4]])
    assert mx.array_equal(run.model(tokens), restored.model(tokens)).item()


FLAGS_FOR_INTERRUPTION = "--batch 2 --groups 3 --max-tokens 6 --eval-limit 4 --steps 5".split()
FLAGS_FOR_INTERRUPTION += "--eval-every 2 --save-every 2 --num-iterations 2".split()


@pytest.fixture(scope="module")
def uninterrupted_run(tmp_path_factory):
    run = tmp_path_factory.mktemp("uninterrupted") / "run"
    train.main([*SMALL_FLAGS, *FLAGS_FOR_INTERRUPTION, "--run-dir", str(run)])
    return run


def run_until_stopped(
    tmp_path, monkeypatch, capsys, owner_and_name, on_call, *flags, after=False, status=2
):
    """
    The directory of a run that ends early, and its output on stderr.

    on_call: gets the number of each call of the function, before or after the call.
    status: the exit status that the command must have.
    """
    numbers = itertools.count(1)
    original = getattr(*owner_and_name)

    def call_with_interruption(*args, **options):
        number = next(numbers)
        if not after:
            on_call(number)
        result = original(*args, **options)
        if after:
            on_call(number)
        return result

    with monkeypatch.context() as patch, pytest.raises(SystemExit) as exit_info:
        patch.setattr(*owner_and_name, call_with_interruption)
        train.main([*SMALL_FLAGS, *flags, "--run-dir", str(tmp_path / "run")])
    assert exit_info.value.code == status
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    return tmp_path / "run", capsys.readouterr().err


def press_ctrl_c_at(call_number, times=1):
    """A function that presses Ctrl-C at one call."""

    def on_call(number):
        if number == call_number:
            for _ in range(times):
                signal.raise_signal(signal.SIGINT)

    return on_call


def fail_from(first_call, error):
    """A function that raises the error at this call and at every later call."""

    def on_call(number):
        if number >= first_call:
            raise error

    return on_call


@pytest.mark.parametrize(
    ("owner_and_name", "moment", "call_number", "step"),
    [
        # The first epoch of the third step: nothing has changed yet.
        ((update, "compute_gradient"), "before", 5, 2),
        # The second epoch: the step is finished first.
        ((update, "compute_gradient"), "before", 6, 3),
        # The resumed run repeats an unfinished evaluation.
        ((evaluation.score_task, "evaluate_task"), "before", 3, 4),
        ((checkpoint, "save_and_remove_old"), "after", 2, 2),
        # The state to which a step can return is kept. Here it is the third step's.
        ((update.Learner, "state"), "before", 4, 3),
    ],
)
def test_a_run_continues_bit_for_bit_after_ctrl_c_at_any_moment(
    tmp_path,
    monkeypatch,
    capsys,
    uninterrupted_run,
    owner_and_name,
    moment,
    call_number,
    step,
):
    run, message = run_until_stopped(
        tmp_path,
        monkeypatch,
        capsys,
        owner_and_name,
        press_ctrl_c_at(call_number),
        *FLAGS_FOR_INTERRUPTION,
        after=moment == "after",
        status=130,
    )
    assert checkpoint.load(run).step == step
    assert f"stopped after step {step}; continue with: uv run train.py --resume {run}" in message

    train.main(["--resume", str(run)])
    for directory in ("adapter", "adapter-best"):
        for file in ("adapters.safetensors", "adapter_config.json"):
            expected_bytes = (uninterrupted_run / directory / file).read_bytes()
            assert (run / directory / file).read_bytes() == expected_bytes
    for log in ("metrics", "rollouts", "eval", "eval_answers"):
        expected_log = read_untimed_log(uninterrupted_run / f"{log}.jsonl")
        assert read_untimed_log(run / f"{log}.jsonl") == expected_log

    weights = checkpoint.load(run).trainable
    expected_weights = checkpoint.load(uninterrupted_run).trainable
    for name in weights:
        assert mx.array_equal(weights[name], expected_weights[name]).item(), name


def test_a_second_ctrl_c_abandons_the_current_step_but_no_earlier_step(
    tmp_path, monkeypatch, capsys
):
    run, message = run_until_stopped(
        tmp_path,
        monkeypatch,
        capsys,
        (update, "backtrack_to_target_kl"),
        press_ctrl_c_at(7, times=2),
        *FLAGS_FOR_INTERRUPTION,
        after=True,
        status=130,
    )
    assert "the run stops after this step; press Ctrl-C again" in message
    assert f"stopped after step 3; continue with: uv run train.py --resume {run}" in message
    assert checkpoint.load(run).step == 3


FLAGS_FOR_FAILURE = "--steps 4 --eval-every 0 --num-iterations 2 --max-tokens 6".split()
NO_MEMORY = RuntimeError("[METAL] Command buffer execution failed: Insufficient Memory")


@pytest.mark.parametrize(
    ("owner_and_name", "first_call", "step", "error"),
    [
        ((sampler, "rollout"), 3, 2, NO_MEMORY),
        ((update, "compute_gradient"), 5, 2, MemoryError("Unable to allocate 9 GiB")),
    ],
    ids=["MLX", "numpy"],
)
def test_a_lack_of_memory_before_a_step_changes_weights_ends_in_one_line_and_loses_no_step(
    tmp_path, monkeypatch, capsys, owner_and_name, first_call, step, error
):
    flags = [*FLAGS_FOR_FAILURE, "--save-every", "4"]
    on_call = fail_from(first_call, error)
    run, message = run_until_stopped(tmp_path, monkeypatch, capsys, owner_and_name, on_call, *flags)
    is_update = owner_and_name[1] == "compute_gradient"
    advice = "--checkpoint-layers on" if is_update else "--rollout-batch-size 6"
    command = f"uv run train.py --resume {run} {advice}"
    assert message.endswith(f"error: {error}; saved after step {step}, continue with: {command}\n")
    assert checkpoint.load(run).step == step

    train.main(command.split()[3:])
    records = read_untimed_log(run / "metrics.jsonl")
    assert [record["step"] for record in records] == [1, 2, 3, 4]


WATCHDOG = (
    "[METAL] Command buffer execution failed: Impacting Interactivity "
    "(0000000e:kIOGPUCommandBufferCallbackErrorImpactingInteractivity)."
)


@pytest.mark.parametrize(
    ("owner_and_name", "first_call", "advice"),
    [
        ((sampler, "rollout"), 3, "--rollout-batch-size 6"),
        # The update has tried half of its budget by then.
        ((update, "compute_gradient"), 5, "--train-token-budget 256"),
    ],
)
def test_a_watchdog_error_ends_with_advice_to_halve_the_flag_of_the_phase(
    tmp_path, monkeypatch, capsys, owner_and_name, first_call, advice
):
    flags = [*FLAGS_FOR_FAILURE, "--train-token-budget", "1024", "--save-every", "4"]
    on_call = fail_from(first_call, RuntimeError(WATCHDOG))
    run, message = run_until_stopped(tmp_path, monkeypatch, capsys, owner_and_name, on_call, *flags)
    assert message.endswith(
        f"saved after step 2, continue with: uv run train.py --resume {run} {advice}\n"
    )


def test_a_watchdog_error_in_an_evaluation_advises_a_smaller_rollout_batch(
    tmp_path, monkeypatch, capsys
):
    _, message = run_until_stopped(
        tmp_path,
        monkeypatch,
        capsys,
        (evaluation.score_task, "generate_completions"),
        fail_from(1, RuntimeError(WATCHDOG)),
        *"--steps 2 --eval-every 2 --eval-limit 10".split(),
    )
    assert "--rollout-batch-size 5" in message


def fail_once(monkeypatch, call_number, error):
    """Makes one call of `compute_gradient` fail; returns the number of batches of each call."""
    num_batches_of_calls = []
    original = update.compute_gradient

    def compute_gradient(*args):
        num_batches_of_calls.append(len(args[1]))
        if len(num_batches_of_calls) == call_number:
            raise error
        return original(*args)

    monkeypatch.setattr(update, "compute_gradient", compute_gradient)
    return num_batches_of_calls


@pytest.mark.slow
def test_an_update_repeats_with_half_of_the_token_budget_after_a_watchdog_error(
    tmp_path, monkeypatch, capsys
):
    flags = [*SMALL_FLAGS, "--steps", "2", "--eval-every", "0"]
    train.main([*flags, "--train-token-budget", "128", "--run-dir", str(tmp_path / "half")])
    fail_once(monkeypatch, 1, RuntimeError(WATCHDOG))
    train.main([*flags, "--train-token-budget", "256", "--run-dir", str(tmp_path / "run")])
    assert "continues with --train-token-budget 128" in capsys.readouterr().err

    weights = checkpoint.load(tmp_path / "run").trainable
    expected_weights = checkpoint.load(tmp_path / "half").trainable
    for name, expected_array in expected_weights.items():
        assert mx.array_equal(weights[name], expected_array), name


def test_an_update_without_memory_learns_as_if_the_token_budget_was_always_half(
    tmp_path, monkeypatch, capsys
):
    """
    Memory runs out in the second iteration of the first step.

    By then, masters, moments and counters have changed.
    """
    flags = "--steps 3 --eval-every 0 --num-iterations 2 --beta 0.1".split()
    flags = [*SMALL_FLAGS, *flags]
    train.main([*flags, "--train-token-budget", "128", "--run-dir", str(tmp_path / "half")])
    num_batches_of_calls = fail_once(monkeypatch, 2, NO_MEMORY)
    train.main([*flags, "--train-token-budget", "256", "--run-dir", str(tmp_path / "run")])
    warning = "update: out of memory; the run continues with --train-token-budget 128"
    assert warning in capsys.readouterr().err
    assert num_batches_of_calls[2] > num_batches_of_calls[0]

    # The checkpoints of both runs are equal.
    state = checkpoint.load(tmp_path / "run")
    expected_state = checkpoint.load(tmp_path / "half")
    for arrays, expected_arrays in (
        (state.trainable, expected_state.trainable),
        (state.optimizer, expected_state.optimizer),
    ):
        assert arrays.keys() == expected_arrays.keys()
        assert all(mx.array_equal(arrays[name], expected_arrays[name]) for name in arrays)
    ignored = {"least_budget": 0, "settings": 0}
    assert state.extra | ignored == expected_state.extra | ignored
    assert state.extra["least_budget"] == 128
    assert state.extra["settings"]["train_token_budget"] == 128

    records = read_untimed_log(tmp_path / "run" / "metrics.jsonl")
    expected_records = read_untimed_log(tmp_path / "half" / "metrics.jsonl")
    for record, expected_record in zip(records, expected_records, strict=True):
        expected_forwards = expected_record["forwards_per_completion"]
        assert record["forwards_per_completion"] == expected_forwards

    # A resumed run keeps the smaller budget.
    train.main(["--resume", str(tmp_path / "run"), "--steps", "4"])
    assert checkpoint.load(tmp_path / "run").extra["settings"]["train_token_budget"] == 128


def test_a_lack_of_memory_after_all_weights_changed_ends_at_the_newest_checkpoint(
    tmp_path, monkeypatch, capsys
):
    flags = [*FLAGS_FOR_FAILURE, "--save-every", "1", "--lora-rank", "0"]
    owner_and_name = (update, "compute_gradient")
    on_call = fail_from(6, NO_MEMORY)
    run, message = run_until_stopped(tmp_path, monkeypatch, capsys, owner_and_name, on_call, *flags)
    assert "error: memory ran out while the weights were being changed; step 3 was not" in message
    assert "step-000002 is intact, " in message
    assert checkpoint.load(run).step == 2


@pytest.mark.parametrize(
    ("error", "expected_text"),
    [
        (NO_MEMORY, "nothing was saved in {}, "),
        (OSError(28, "full"), "nothing was saved in {}, free some space and "),
    ],
    ids=["memory", "disk"],
)
def test_a_run_that_fails_before_the_first_save_prints_how_to_start_over(
    tmp_path, monkeypatch, capsys, error, expected_text
):
    flags = [*FLAGS_FOR_FAILURE, "--save-every", "1"]
    owner_and_name = (checkpoint, "save_and_remove_old")
    on_call = fail_from(1, error)
    run, message = run_until_stopped(tmp_path, monkeypatch, capsys, owner_and_name, on_call, *flags)
    advice = " --train-token-budget 512" if error is NO_MEMORY else ""
    command = f"uv run train.py --config {run}/config.yaml"
    assert message.endswith(f"{expected_text.format(run)}start over with: {command}{advice}\n")

    with pytest.raises(SystemExit) as exit_info:
        train.main(["--resume", str(run)])
    assert exit_info.value.code == 2
    assert capsys.readouterr().err == (
        f"error: --resume {run}: this run has no intact checkpoint; start over with: {command}\n"
    )

    new_run = tmp_path / "again"
    proposed_flags = f"{command}{advice}".split()[3:]
    train.main([*proposed_flags, "--steps", "1", "--run-dir", str(new_run)])
    assert checkpoint.load(new_run).step == 1


@pytest.mark.parametrize(
    ("end_run", "error"),
    [
        (lambda: os.kill(os.getpid(), signal.SIGINT), KeyboardInterrupt),
        (lambda: os.kill(os.getpid(), signal.SIGTERM), KeyboardInterrupt),
        (lambda: {}["a bug"], KeyError),
    ],
    ids=["Ctrl-C", "SIGTERM", "a bug"],
)
def test_a_run_that_ends_between_steps_is_saved_even_if_ctrl_c_comes_again(
    tmp_path, monkeypatch, capsys, end_run, error
):
    run = make_run(tmp_path)
    original_save = train.GrpoRun.save

    def press_ctrl_c_and_save(self):
        os.kill(os.getpid(), signal.SIGINT)
        original_save(self)

    monkeypatch.setattr(train.GrpoRun, "save", press_ctrl_c_and_save)
    with pytest.raises(error), trainer.save_on_interrupt_or_error(run):
        end_run()
    assert checkpoint.load(tmp_path).step == 0
    advice = "saved after step 0, continue with: uv run train.py --resume"
    assert (advice in capsys.readouterr().err) == (error is KeyError)
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_ctrl_c_while_the_model_loads_leaves_no_run_directory(tmp_path, monkeypatch):
    flags = [*SMALL_FLAGS, "--run-dir", str(tmp_path / "run")]
    interrupted_functions = [
        (gwen, "load"),
        (memory_estimate, "choose_sizes"),
        (versions, "collect_environment_facts"),
    ]
    for owner, name in interrupted_functions:
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(owner, name, lambda *_, **__: signal.raise_signal(signal.SIGINT))
            train.main(flags)
        assert not list(tmp_path.rglob("*.*"))

    # The name of the run is still free.
    train.main([*flags, "--steps", "1", "--eval-every", "0"])


def test_a_recorded_completion_has_the_group_category_and_answer_of_the_problem(tmp_path):
    run = make_run(tmp_path)
    scored = train.score(run, sample_first_prompts(run))[0]
    categorized = [
        sample._replace(example=sample.example | {"category": "sums"}) for sample in scored
    ]
    for sample, record in zip(categorized, completion_records(1, categorized), strict=True):
        assert (record["group"], record["category"]) == (sample.group, "sums")

    # The user's data may contain such answers.
    categorized[0].example["answer"] = {"sum": float("nan")}
    categorized[4].example["answer"] = None
    answers = [record["answer"] for record in completion_records(1, categorized)]
    assert (answers[0], answers[4]) == ("{'sum': nan}", None)


def test_the_demo_run_learns(tmp_path):
    """
    These are a third of the run's 60 steps.

    Held-out accuracy rises from 48% to 73% at temperature 1. With greedy answers it rises from
    34% to 82%.
    """
    flags = "--batch 8 --groups 8 --rollout-batch-size 64 --steps 20".split()
    flags += ["--eval-limit", "128", "--eval-every", "20"]
    train.main([*flags, "--run-dir", str(tmp_path / "run")])
    first, last = read_untimed_log(tmp_path / "run" / "eval.jsonl")
    assert 0.3 <= first["eval/accuracy"] <= 0.6
    assert first["eval/greedy"] <= 0.5
    assert last["eval/accuracy"] >= 0.65
    assert last["eval/greedy"] >= 0.7


UNMEASURED = {
    "without a reference": ((), {"kl"}),
    "without a judge": (
        ("--reward-weights", "rubric=0"),
        {
            "kl",
            "judge/crit_eval_s",
            "judge/unparsed",
            "judge/unparsed_frac",
            "judge/mass",
            "judge/cached",
            # No group has a signal in this run, so these two are missing too.
            "grad_norm",
            "update/kl",
        },
    ),
    "without a clip": (("--loss-type", "sapo", "--beta", "0.1"), {"clip_frac"}),
    "with nothing trained": (
        ("--max-tokens", "1", "--truncated", "mask", "--beta", "0.1"),
        {
            "loss",
            "grad_norm",
            "pad_frac",
            "kl",
            "entropy",
            "clip_frac",
            "update/tok_s",
            "update/kl",
            "mismatch/logprob_abs_mean",
            "mismatch/logprob_abs_max",
            "mismatch/ratio_mean",
            "mismatch/ratio_max",
            "mismatch/over_cap_frac",
        },
    ),
}


@pytest.mark.parametrize("case", UNMEASURED)
def test_a_metric_is_null_if_it_was_not_measured_and_else_a_number(tmp_path, case, capsys):
    flags, unmeasured = UNMEASURED[case]
    run = make_run(tmp_path, "--steps", "1", "--eval-every", "0", *flags)
    list(train.train(run))
    (metrics,) = run.journal.metrics.read()
    null_metrics = {name for name, value in metrics.items() if value is None}
    assert null_metrics == unmeasured | {"distill/kl", "teacher/s"}
    assert ("loss nan" in capsys.readouterr().out) == ("loss" in unmeasured)


def test_a_run_first_saves_after_five_minutes_and_then_follows_save_every(tmp_path):
    run = make_run(tmp_path, "--steps", "6", "--save-every", "5", "--eval-every", "6")
    seconds = 0
    run.started_at = 0
    run.clock_now = lambda: seconds

    steps_and_checkpoints = []
    for metrics in train.train(run):
        saved_steps = [int(path.name[-6:]) for path in checkpoint.list_checkpoints(tmp_path)]
        steps_and_checkpoints.append((metrics["step"], saved_steps))
        seconds += 140

    # Step 0 is the best so far.
    assert steps_and_checkpoints[:5] == [
        (1, [0]),
        (2, [0]),
        (3, [0]),
        (4, [0, 4]),
        (5, [0, 4, 5]),
    ]
