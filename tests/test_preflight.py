"""Estimated memory and measured peaks, sizes that `auto` chooses, and the advice of trials."""

import gc
import os
import signal
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from conftest import mark_readable, read_log, write_log
from mlx.utils import tree_flatten
from small_run import make_config as small_config
from small_run import make_run, resolve_settings, samples_from_rollout, set_advantages

import grpo
import gwen
import judge
import lora
import preflight
import sampler
import tasks
import train
import update
from config import MemoryDependentSizes
from disk import hub, model_choice
from forecast import memory_estimate, time_estimate, trial
from judging import rubrics
from machine import gpu, link, memory
from step.batch import make_batches
from step.loss import StepLoss

GB = 10**9
BIG = model_choice.load_known_config("random:0.6b")


def make_config(**flags):
    defaults = {"model": "random:2m", "task": "demo", "batch": 2, "groups": 4, "max_tokens": 48}
    config, _ = resolve_settings(defaults | flags, None, None)
    return config


def make_demand(config, prompt_tokens=128, model=BIG, dtype=mx.float16):
    return memory_estimate.RunDemand(model, dtype, config, [prompt_tokens] * config.sampling.batch)


def take_step(model, config, sizes, prompts):
    """A rollout and an update as `train.py` takes them; completions have `max_tokens` tokens."""
    learner = update.Learner(model, config, StepLoss(config, sizes))
    mx.eval(learner.trainable, learner.optimizer.state)  # as after the first step
    sampling = config.sampling
    rollout = sampler.rollout(
        model,
        prompts,
        sampler.SamplingParams(sampling.max_tokens),
        group_size=sampling.groups,
        key=0,
        batch_size=sizes.rollout_batch_size,
    )
    rewards = np.arange(sampling.batch * sampling.groups).reshape(sampling.batch, -1) % 3.0
    samples = set_advantages(samples_from_rollout(prompts, rollout), grpo.group_advantages(rewards))
    update.run_optimizer_steps(learner, make_batches(samples, sizes.train_token_budget), 1e-4)


def judge_step(model, config, prompt_tokens):
    """Lets the model judge as many answers as a step has."""
    tokenizer = hub.load_tokenizer(hub.DEMO)
    model_judge = mark_readable(judge.Judge(model, tokenizer, rubrics.load_rubric(RUBRIC)))
    sampling = config.sampling
    questions = []
    for number in range(sampling.batch):
        questions += [f"{number} " + "one " * (prompt_tokens - 1)] * sampling.groups
    answers = [f"{number} " + "two " * 7 for number in range(sampling.batch * sampling.groups)]
    model_judge.score(questions, answers)


RUBRIC = Path(gwen.__file__).parent / "data" / "demo_rubric.yaml"
LARGE_ROLLOUT = {"batch": 4, "groups": 16, "max_tokens": 16, "train_token_budget": 160}
LARGE_JUDGE = {"batch": 8, "groups": 2, "max_tokens": 8, "train_token_budget": 64}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "prompt_tokens", "rubric"),
    [
        ({}, 80, None),
        ({"train_token_budget": 300}, 8, None),  # prompts too short to be shared
        ({"checkpoint_layers": "on"}, 80, None),
        ({"lora_rank": 0, "train_token_budget": 300}, 80, None),
        ({"lora_rank": 0, "train_token_budget": 300, "optimizer": "sgd"}, 80, None),
        ({"max_tokens": 128, "batch": 1}, 40, None),
        (LARGE_ROLLOUT, 64, None),  # the rollout has the peak
        (LARGE_JUDGE, 140, RUBRIC),  # the judge has the peak
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["demo", "random:2m-hybrid"])
def test_the_estimated_memory_is_95_to_130_percent_of_the_peak_of_a_step(
    name, flags, prompt_tokens, rubric
):
    config = make_config(model=name, **{"max_tokens": 32} | flags)
    gc.collect()
    bytes_before = mx.get_active_memory()
    model = gwen.load(name)[0]
    rng = np.random.default_rng(0)
    prompts = rng.integers(3, 1000, (config.sampling.batch, prompt_tokens)).tolist()
    demand = make_demand(config, prompt_tokens, model.config, mx.float32)._replace(rubric=rubric)
    sizes = memory_estimate.choose_sizes(demand)
    need = memory_estimate.estimate_memory(demand, sizes)
    if config.model.lora_rank:
        lora.apply(
            model, config.model.lora_rank, config.model.lora_scale, config.model.lora_targets
        )
    mx.eval(model.parameters())
    mx.clear_cache()
    mx.reset_peak_memory()
    take_step(model, config, sizes, prompts)
    if rubric:
        judge_step(model, config, prompt_tokens)
    peak = mx.get_peak_memory() - bytes_before

    estimate = need.peak_bytes - need.resident["Python"]
    if need.phases["judging"] > need.phases["update"]:
        # This test judges after the update, when the optimizer's state is gone.
        estimate -= need.resident["optimizer"]
    print(f"{estimate / peak:.2f}")
    assert 0.95 * peak < estimate < 1.3 * peak


def test_the_estimate_counts_weights_adapters_and_optimizer_to_the_byte():
    config = make_config(lora_rank=8)
    model = gwen.make_random_model("random:2m", mx.float16)
    weight_bytes = sum(array.nbytes for _, array in tree_flatten(model.parameters()))
    lora.apply(model, 8, 2.0)
    sizes = MemoryDependentSizes(8, 1024, 0)
    learner = update.Learner(model, config, StepLoss(config, sizes))

    need = memory_estimate.estimate_memory(make_demand(config, 80, model.config), sizes)

    assert need.resident["weights"] == weight_bytes

    adapter_bytes = sum(array.nbytes for array in learner.trainable.values())
    for _, layer in lora.adapted_layers(model):
        adapter_bytes += sum(copy.nbytes for copy in layer.cached_a_and_scaled_b(mx.float16))
    assert need.resident["adapters"] == adapter_bytes

    moments = [
        array
        for name, array in tree_flatten(learner.optimizer.state)
        if name.endswith((".m", ".v"))
    ]
    assert need.resident["optimizer"] == sum(array.nbytes for array in moments)


def test_the_estimated_cost_of_judging_depends_on_the_judge_and_not_on_the_policy():
    costs = []
    for policy in ("random:2m", "random:0.6b"):
        config = make_config(model=policy, judge_model="random:0.6b")
        demand = make_demand(config, model=model_choice.load_known_config(policy))
        demand = demand._replace(rubric=RUBRIC)
        sizes = memory_estimate.choose_sizes(demand)
        costs.append(time_estimate.estimate_phase_costs(demand, sizes)["judge"])
    assert costs[0] == costs[1]


def test_trained_16_bit_weights_have_float32_masters():
    for dtype, bytes_per_weight in ((mx.float16, 4), (mx.float32, 0)):
        demand = make_demand(make_config(lora_rank=0), dtype=dtype)
        need = memory_estimate.estimate_memory(demand, MemoryDependentSizes(8, 1024, 0))
        num_weights = need.resident["weights"] / dtype.size
        assert need.resident["masters"] == bytes_per_weight * num_weights


def test_the_estimate_counts_a_judge_that_only_evaluations_use(tmp_path, capsys):
    judge_flags = f"--reward-weights rubric=0 --eval-rubric {RUBRIC} --judge-model random:2m"
    for eval_flags, uses_judge in (("", True), (" --eval-every 0", False)):
        flags = (judge_flags + eval_flags).split()
        preflight.main(["--model", "demo", *flags])
        for line in (make_run(tmp_path, *flags).memory_line, capsys.readouterr().out):
            assert (" judge + " in line) == uses_judge
            assert (" judging, " in line) == uses_judge


def test_the_estimate_counts_a_frozen_base_if_a_fully_trained_model_judges_or_has_a_reference():
    def resident_bytes(**flags):
        demand = make_demand(make_config(lora_rank=0, **flags))
        return memory_estimate.resident_bytes(demand._replace(rubric=RUBRIC))

    same_judge = resident_bytes()
    assert same_judge["base"] == same_judge["weights"]
    assert "judge" not in same_judge

    other_judge = resident_bytes(judge_model="demo")
    assert other_judge["base"] == 0

    with_reference = resident_bytes(judge_model="demo", beta=0.1)
    assert with_reference == other_judge | {"base": with_reference["weights"]}
    assert other_judge["judge"] < 0.01 * with_reference["base"]


@pytest.mark.slow
@pytest.mark.parametrize("on_gpu", [False, True])
def test_auto_shrinks_micro_batches_before_it_checkpoints_layers(monkeypatch, on_gpu):
    monkeypatch.setattr(gpu, "on_gpu", lambda: on_gpu)
    monkeypatch.setattr(gpu, "can_run_metal_kernels", lambda: on_gpu)
    demand = make_demand(make_config(batch=8, groups=8, max_tokens=256))
    sizes_in_gb = (40, 4.7, 3, 2.5, 1) if on_gpu else (40, 8, 5, 4.5, 1)

    budgets = []
    layer_counts = []
    for size in sizes_in_gb:
        room = size * GB
        monkeypatch.setattr(memory_estimate, "LAPTOP", 1 if on_gpu else room)
        monkeypatch.setattr(memory, "usable_memory_bytes", lambda room=room: room if on_gpu else 1)
        sizes = memory_estimate.choose_sizes(demand)
        budgets.append(sizes.train_token_budget)
        layer_counts.append(sizes.checkpoint_layers)
        need = memory_estimate.estimate_memory(demand, sizes)
        fits = sum(need.resident.values()) + need.phases["update"] <= 0.9 * room
        assert fits or (budgets[-1], layer_counts[-1]) == (1024, 28)

    assert budgets[0] == (2048 if on_gpu else 1024)
    assert budgets[-1] == 1024
    assert budgets == sorted(budgets, reverse=True)
    assert layer_counts == sorted(layer_counts)
    for budget, layer_count in zip(budgets, layer_counts, strict=True):
        assert budget == 1024 or layer_count == 0
    assert layer_counts[0] == 0
    assert 0 < layer_counts[-2] < 28
    assert layer_counts[-1] == 28


# ---- trials

STEP = {
    "sampling/signal_groups": 2,
    "completion/truncated_frac": 0.1,
    "completion/degenerate_frac": 0.0,
    "reward/mean": 0.5,
    "reward/std": 0.3,
    "step/s": 2.0,
    "mem/peak_gb": 1.5,
}
HALF = [0.0, 1.0, 0.0, 1.0]
LOOP = "that that that that that that"
LOOPS_ARE_PAID = (
    "answers repeat themselves or copy the prompt and are rewarded: set --reward-gate form"
)


def make_answers(rewards, completion="A.", prompt="?"):
    """Records of complete answers with these rewards."""
    return [
        {"prompt": prompt, "completion": completion, "finish_reason": "stop", "reward": reward}
        for reward in rewards
    ]


@pytest.mark.parametrize(
    ("figures", "rewards", "flags", "expected_text"),
    [
        (
            {},
            HALF,
            {},
            "go: the rewards differ in 50% of the groups, and 25% are enough, "
            "even if the mean reward is low",
        ),
        ({"sampling/signal_groups": 1}, HALF, {}, "go"),
        (
            {"completion/truncated_frac": 0.6},
            HALF,
            {},
            "change: 60% of the answers are cut off, which may cause other problems too: ask for "
            "shorter answers, use a warm start (docs/",
        ),
        (
            {"sampling/signal_groups": 0},
            [0.0] * 4,
            {},
            "change: every answer gets the reward 0: use a warm start "
            "(docs/warm-start.md), use a reward that",
        ),
        (
            {"sampling/signal_groups": 0},
            [1.0] * 4,
            {},
            "change: every answer gets the reward 1: use a reward that",
        ),
        (
            {"sampling/signal_groups": 0, "completion/truncated_frac": 0.6},
            [0.0] * 9 + [1.0],
            {"max_tokens": 8},
            "change: 60% of the answers are cut off, which may cause other problems too: ask for "
            "shorter answers, or raise --max-tokens above 8; "
            "nearly all answers fail: use a warm start (docs/warm-start.md), use easier prompts, "
            "or more --groups",
        ),
        (
            {"sampling/signal_groups": 0},
            [1.0] * 9 + [0.0],
            {},
            "change: nearly all answers succeed: use harder prompts",
        ),
        (
            {"sampling/signal_groups": 0},
            HALF,
            {},
            "change: most answers to the same prompt get the same reward: try a higher --temp",
        ),
        (
            {"judge/unparsed_frac": 1.0},
            HALF,
            {},
            "change: 100% of the judge's scores cannot be read: use another --judge-model",
        ),
        ({"judge/unparsed_frac": 0.1}, HALF, {}, "go"),
        ({"completion": LOOP}, HALF, {}, f"change: 50% of the {LOOPS_ARE_PAID}"),
        ({"completion": LOOP}, [1.0] * 4, {}, f"change: 100% of the {LOOPS_ARE_PAID}"),
        ({"completion": LOOP}, [0.0] * 4, {}, "go"),  # these answers earn nothing already
        ({"completion": LOOP}, [1.0] * 4, {"reward_gate": "form"}, "go"),
        (
            {"sampling/signal_groups": 0},
            [0.0] * 4,
            {"reward_gate": "form"},
            "change: 0% of the answers pass --reward-gate form: an answer gets a reward only if it "
            "ends before --max-tokens, has at",
        ),
        # The gate would reward no right answer.
        ({"completion": LOOP, "answer": "a, b"}, HALF, {}, "go"),
        (
            {"sampling/signal_groups": 0, "answer": "a, b"},
            HALF,
            {"reward_gate": "form"},
            "; even some right answers would get no reward",
        ),
    ],
)
def test_a_trial_says_go_or_what_to_change(figures, rewards, flags, expected_text):
    completion = figures.get("completion", "That.")
    answers = make_answers(rewards, completion, "What?")
    for answer in answers:
        answer["answer"] = figures.get("answer")
    # The first step warms up.
    steps = [STEP | figures | {"step/s": seconds} for seconds in (9.0, 2.0, 3.1)]

    config = make_config(batch=4, steps=90, **flags)
    *lines, pace, advice = trial.trial_report_lines(config, steps, answers)

    if expected_text.startswith(";"):
        assert expected_text in advice
    else:
        assert advice.startswith(expected_text)
    assert pace == (
        "2.0 to 3.1 s per step, 3 min to 5 min for 90 steps without evaluations, 1.50 GB of memory"
    )
    assert lines[-2].endswith("the mean reward, which training tries to raise, is 0.5")
    assert "within a group is 0.3; " in lines[-1]
    if not figures:
        assert "in 12 groups before training, with an error of up to 28%; " in lines[-4]
    assert lines[0] == f"  {rewards[0]:.3g}  'What?' -> {trial.shorten_value(completion)}"


def test_a_trial_from_the_adapter_of_a_warm_start_advises_to_continue_the_warm_start(tmp_path):
    (tmp_path / "config.yaml").write_text("model: smollm2\nloss_type: sft\nsteps: 6\n")
    config = make_config(init_adapter=str(tmp_path))
    command = f"uv run --extra smollm train.py --resume {tmp_path} --steps 12"
    assert trial.advise_warm_start(config) == f"continue the warm start ({command})"
    (tmp_path / "config.yaml").write_text("model: smollm2\nloss_type: dapo\nsteps: 6\n")
    assert "docs/warm-start.md" in trial.advise_warm_start(config)
    assert "docs/warm-start.md" in trial.advise_warm_start(make_config())


def test_a_trial_advises_the_gate_only_if_answers_that_repeat_or_copy_are_rewarded():
    """A judge from 1 to 5 gives such answers 1, which is already the lowest reward."""

    def advice_for(rewards):
        answers = make_answers(rewards, prompt="What?")
        completions = [LOOP, LOOP, "That is it.", "It is."]
        for answer, completion in zip(answers, completions, strict=True):
            answer["completion"] = completion
        step = STEP | {"completion/degenerate_frac": 0.5}
        *_, advice = trial.trial_report_lines(make_config(batch=4, steps=90), [step], answers)
        return advice

    assert advice_for([0.0, 0.0, 1.0, 0.0]).startswith("go")
    assert advice_for([1.0, 1.0, 5.0, 3.0]).startswith("go")
    assert advice_for([-1.0, 0.0, 1.0, None]).startswith("go"), "the gate leaves rewards up to 0"
    assert advice_for([0.0, 1.0, 1.0, 0.0]) == f"change: 25% of the {LOOPS_ARE_PAID}"


@pytest.mark.parametrize(
    ("figures", "correctness", "expected_text"),
    [
        (
            {},
            [0.0, 0.0],
            "even if the mean reward is low; no answer is right yet, so the model may learn only",
        ),
        (
            {},
            [0.0, 0.4],
            "go: the rewards differ in 50% of the groups, and 25% are enough, "
            "even if the mean reward is low",
        ),
        ({}, [0.4, 1.0], "even if the mean reward is low"),
        (
            {"completion": LOOP},
            [0.0],
            "set --reward-gate form; no answer is right yet",
        ),
        (  # the advice on rewards already covers the missing right answers
            {"sampling/signal_groups": 0},
            [0.0],
            "a reward that distinguishes answers, or other prompts",
        ),
    ],
)
def test_a_trial_counts_right_answers_and_says_if_there_are_none(
    figures, correctness, expected_text
):
    rewards = HALF[:1] if "sampling/signal_groups" in figures else HALF
    answers = make_answers(rewards, figures.get("completion", "A."))

    config = make_config(batch=4, steps=90)
    *lines, pace, advice = trial.trial_report_lines(config, [STEP | figures], answers, correctness)

    if "; no answer" in expected_text:
        assert expected_text in advice
    else:
        assert advice.endswith(expected_text)
    assert lines[-4].startswith("1 step, ")
    assert lines[-3] == f"right answers: {sum(correctness):.0f} of {len(correctness)}"
    assert lines[-2].startswith("rewards 0")
    assert ("; 50% of the answers got the highest" in lines[-2]) == (rewards == HALF)
    # The two ends of a range print as one number if they look the same.
    assert pace == "2.0 s per step, 3 min for 90 steps without evaluations, 1.50 GB of memory"


@pytest.mark.parametrize(
    ("rewards", "expected_text"),
    [
        (HALF, "judging by these answers, 20 held-out problems can show only changes of at least"),
        # nearly all answers fail, so their deviation says nothing about the trained model
        ([0.0] * 19 + [1.0], "if every third answer changes, 20 held-out problems"),
        ([0.0] * 4, "if every third answer changes, 20 held-out problems"),
    ],
    ids=["half succeed", "nearly all fail", "all fail"],
)
def test_a_trial_judges_the_number_of_held_out_problems_by_answers_that_differ(
    rewards, expected_text
):
    example = {"prompt": [{"role": "user", "content": "?"}]}
    task = tasks.Task("own", {}, {}, held_out=[example] * 20)
    steps = [STEP | {"reward/std": 0.2}]
    warnings = trial.find_held_out_warnings(make_config(), task, steps, make_answers(rewards))
    assert next(warnings).startswith(expected_text)


def test_a_trial_verifies_the_answers_to_train_problems_that_have_a_right_answer():
    def verifier(completions, answer, of, **_):
        pairs = zip(completions, answer, strict=True)
        return [text == str(right_answer) for text, right_answer in pairs]

    examples = [
        {"prompt": [{"role": "user", "content": "?"}], "answer": answer, "of": 2}
        for answer in (4, "6", None)
    ]
    answers = []
    for example in examples:
        right_answer = example["answer"] and str(example["answer"])
        answers.append(example | {"completion": "6", "answer": right_answer})
    task = tasks.Task("own", {}, {}, verifier=verifier)
    task_without_verifier = tasks.Task("own", {}, {})

    verify = trial.verify_answers_to_train_problems
    assert verify(task._replace(train=examples), answers) == [0, 1]
    assert verify(task, answers) == []
    assert verify(task_without_verifier, answers) == []


@pytest.mark.parametrize(
    ("figures", "num_steps", "flags", "expected_text"),
    [
        # 2 s per step: 292 s, and 5 evaluations of 20 s
        ({}, 4, {}, "every answer gets the reward 0: use a warm start"),
        ({}, 3, {}, ""),
        ({}, 5, {}, ""),  # the advice was already given
        ({"step/s": 121.0}, 1, {}, "every answer"),  # no longer than a trial
        ({}, 4, {"steps": 60}, ""),  # a short run
        ({"sampling/signal_groups": 1}, 4, {}, ""),
        ({"sampling/signal_groups": None}, 4, {}, ""),
    ],
)
def test_a_long_run_gets_advice_if_the_first_steps_have_no_signal(
    tmp_path, figures, num_steps, flags, expected_text
):
    steps = [STEP | {"sampling/signal_groups": 0} | figures] * num_steps
    flags = {"model": "demo", "batch": 4, "steps": 150, "eval_every": 30} | flags
    (answer,) = make_answers([0.0], "That.", "What?")
    write_log(tmp_path / "rollouts.jsonl", [answer | {"step": 1}])
    config = make_config(**flags)
    advice = trial.advise_if_long_run_has_no_signal(config, steps, 20.0, tmp_path)
    assert advice.startswith(expected_text)
    assert bool(advice) == bool(expected_text)


def test_an_interrupted_trial_kills_the_process_and_removes_the_recipe(monkeypatch):
    class FakeProcess:
        def __init__(self, command, **_):
            self.recipe = Path(command[3])
            self.is_killed = False
            processes.append(self)

        def poll(self):
            os.kill(os.getpid(), signal.SIGTERM)

        def kill(self):
            self.is_killed = True

        def wait(self):
            return -9

    processes = []
    monkeypatch.setattr(trial.subprocess, "Popen", FakeProcess)
    with pytest.raises(KeyboardInterrupt):
        list(trial.try_first_steps(make_config()))
    assert signal.getsignal(signal.SIGTERM) != link.raise_keyboard_interrupt
    assert processes[0].is_killed
    assert not processes[0].recipe.exists()


@pytest.mark.slow
def test_a_trial_takes_steps_of_the_trainer_and_leaves_no_files(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(trial, "TRY_STEPS", 2)
    flags = (
        "--try --model demo --batch 2 --groups 4 --max-tokens 3 --steps 9 --eval-limit 8 --seeds 2"
    )
    preflight.main(flags.split())
    output = capsys.readouterr().out
    for text in (
        "2 steps, 16 answers: ",
        "reward correct: ",
        "right answers: ",
        "\nif every third answer changes, 8 held-out problems can show only changes "
        "of at least 57%",
        "or raise --max-tokens above 3",
    ):
        assert text in output
    assert output.splitlines()[-1].startswith("change: ")
    assert "of the answers are cut off" in output.splitlines()[-1]
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_trial_that_saw_rewards_does_not_say_that_the_reward_is_always_0(tmp_path, capsys):
    """The reward scores some short texts of the model above 0, but none that the audit makes up."""
    values = "[float(len(text) % 3 == 1 and len(text) < 30) for text in completions]"
    (tmp_path / "odd.py").write_text(f"def odd(completions, **_): return {values}\n")
    label = '{{"label": "of the message", "number": {}}}'
    rows = [
        {"prompt": f"Say what kind of message the number {n} is.", "answer": label.format(n)}
        for n in range(20)
    ]
    data = write_log(tmp_path / "mine.jsonl", rows)
    flags = "--try --model demo --batch 4 --groups 8 --max-tokens 16".split()
    preflight.main([*flags, "--data", str(data), "--reward", f"{tmp_path}/odd.py:odd"])
    output = capsys.readouterr().out
    assert "right answers: 0 of 128" in output
    assert "rewards 0 to 1" in output
    assert "teaches nothing" not in output
    advice = output.splitlines()[-1]
    assert advice.endswith("first train it on right answers (docs/warm-start.md)")


@pytest.mark.slow
def test_a_trial_ends_with_the_error_of_the_run(tmp_path, capfd):
    with pytest.raises(SystemExit) as exit_info:
        preflight.main(["--try", "--model", "demo", "--data", str(tmp_path / "absent.jsonl")])
    assert exit_info.value.code == 2
    assert "absent.jsonl" in capfd.readouterr().err


def test_auto_keeps_sizes_that_the_user_sets():
    config = make_config(train_token_budget=5000, checkpoint_layers="3", rollout_batch_size=7)
    sizes = memory_estimate.choose_sizes(make_demand(config, 4000))
    assert sizes == MemoryDependentSizes(7, 5000, 3)


# ---- a run that does not fit

SMALL_RUN = "--model demo --batch 2 --groups 4 --max-tokens 8 --steps 2 --eval-every 0".split()
TOO_SMALL = 190_000_000  # bytes: the run's estimate is 200 MB


@pytest.fixture
def too_small(monkeypatch):
    monkeypatch.setattr(memory, "usable_memory_bytes", lambda: TOO_SMALL)


def exit_status(main, flags):
    """The exit status of a command; 0 if it returns."""
    try:
        main(flags)
    except SystemExit as error:
        return error.code
    return 0


def test_a_run_that_does_not_fit_is_refused_before_it_has_a_directory(tmp_path, too_small, capsys):
    assert exit_status(train.main, [*SMALL_RUN, "--run-dir", str(tmp_path / "run")]) == 2
    message = capsys.readouterr().err
    assert "it does not fit: it needs about 0.20 GB" in message
    assert "--over-memory" in message
    assert not (tmp_path / "run").exists()
    with pytest.raises(ValueError, match="--over-memory"):
        train.Trainer.start(task="demo", model="demo", steps=2, run_dir=str(tmp_path / "run"))


@pytest.mark.slow
def test_a_run_with_over_memory_trains_and_resumes(tmp_path, too_small, capsys):
    run = str(tmp_path / "run")
    train.main([*SMALL_RUN, "--run-dir", run, "--over-memory"])
    train.main(["--resume", run, "--steps", "3"])
    assert len(list(read_log(tmp_path / "run" / "metrics.jsonl"))) == 3
    assert "it does not fit" in capsys.readouterr().out


@pytest.mark.slow
def test_a_run_that_no_longer_fits_resumes_only_with_over_memory(tmp_path, monkeypatch, capsys):
    run = str(tmp_path / "run")
    train.main([*SMALL_RUN, "--run-dir", run])
    monkeypatch.setattr(memory, "usable_memory_bytes", lambda: TOO_SMALL)
    assert exit_status(train.main, ["--resume", run, "--steps", "3"]) == 2
    assert "--over-memory" in capsys.readouterr().err
    train.main(["--resume", run, "--steps", "3", "--over-memory"])
    assert len(list(read_log(tmp_path / "run" / "metrics.jsonl"))) == 3


@pytest.mark.parametrize("flags", [["--prompt-tokens", "20"], ["--try"], ["--fits"]])
def test_preflight_of_a_run_that_does_not_fit_ends_with_advice_and_status_1(
    monkeypatch, capsys, flags
):
    monkeypatch.setattr(memory, "usable_memory_bytes", lambda: TOO_SMALL - 50_000_000)
    run_flags = [] if flags == ["--fits"] else SMALL_RUN
    assert exit_status(preflight.main, [*flags, *run_flags]) == 1
    assert capsys.readouterr().out.splitlines()[-1].startswith("change: it does not fit")


@pytest.mark.slow
def test_a_trial_over_memory_says_so_first(too_small, capsys):
    assert exit_status(preflight.main, ["--try", *SMALL_RUN, "--over-memory"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith("memory: 0.20 of 0.19 GB")
    assert lines[-1].startswith("change: it does not fit")


def test_a_trial_whose_steps_took_more_than_the_memory_says_so_first(monkeypatch):
    monkeypatch.setattr(memory, "usable_memory_bytes", lambda: 10**9)
    config = make_config(batch=4, steps=90)
    *_, advice = trial.trial_report_lines(config, [STEP], make_answers(HALF))
    assert advice.startswith(
        "change: it does not fit: a step took 1.50 GB, but this machine has 1.00"
    )


@pytest.mark.parametrize(
    "flags",
    [
        [],
        ["--beta", "0.1"],
        ["--eval-every", "0"],
        ["--model", "demo:tools", "--task", "calculator"],
    ],
)
def test_a_trial_estimates_the_memory_as_the_run_does(tmp_path, flags):
    config = small_config(*flags)
    run = make_run(tmp_path, *flags)
    demand, sizes = trial.make_run_demand(config, run.task)
    assert sizes == run.sizes
    expected_need = memory_estimate.estimate_memory(run.demand, run.sizes)
    assert memory_estimate.estimate_memory(demand, sizes) == expected_need


@pytest.mark.parametrize(
    ("flag", "value", "expected_text"),
    [
        ("--data", "missing.jsonl", "--data missing.jsonl: there is no such file"),
        ("--reward", "missing.py:score", "--reward missing.py:score: importing missing.py failed"),
        ("--verifier", "missing.py:right", "--verifier missing.py:right: importing missing.py"),
        ("--tools", "missing.py:search", "--tools missing.py:search: importing missing.py failed"),
        ("--env", "missing.py:Game", "--env missing.py:Game: importing missing.py failed"),
    ],
)
def test_preflight_refuses_files_that_do_not_exist(capsys, flag, value, expected_text):
    flags = ["--model", "demo", "--task", "own", flag, value]
    if flag == "--env":
        flags[3] = "env"
    assert exit_status(preflight.main, flags) == 2
    assert expected_text in capsys.readouterr().err


def test_preflight_estimates_a_run_whose_reward_exists_only_in_its_program(tmp_path, capsys):
    data = tmp_path / "mine, new.jsonl"
    data.write_text('{"prompt": "What is one plus two?", "answer": "3"}\n')
    recipe = tmp_path / "run.yaml"
    recipe.write_text(f"model: demo\ntask: own\ndata: {data}\nreward: ['__main__:short']\n")
    preflight.main(["--config", str(recipe)])
    assert "memory:" in capsys.readouterr().out
