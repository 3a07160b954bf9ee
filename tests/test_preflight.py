"""What a run is said to need against what it takes, what `auto` makes of it, and what the line advises."""

import gc
import json
import os
import signal
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from conftest import mark_readable, read_log
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
from forecast import memory_estimate, trial
from judging import rubrics
from machine import gpu, link, memory
from step.batch import make_batches
from step.loss import StepLoss

GB = 10**9
BIG = model_choice.load_known_config("random:0.6b")


def make_config(**flags):
    chosen = {
        "model": "random:2m",
        "task": "demo",
        "batch": 2,
        "groups": 4,
        "max_tokens": 48,
    } | flags
    config, _ = resolve_settings(chosen, None, None)
    return config


def demand_of(config, prompt_tokens=128, model=BIG, dtype=mx.float16):
    return memory_estimate.RunDemand(model, dtype, config, [prompt_tokens] * config.sampling.batch)


def one_step(model, config, sizes, prompts):
    """A rollout and an update as `train.py` takes them; completions have `max_tokens` tokens."""
    learner = update.Learner(model, config, StepLoss(config, sizes))
    mx.eval(learner.trainable, learner.optimizer.state)  # as after the first step
    sampling = config.sampling
    params = sampler.SamplingParams(sampling.max_tokens)
    how = {"group_size": sampling.groups, "batch_size": sizes.rollout_batch_size}
    rollout = sampler.rollout(model, prompts, params, key=0, **how)
    rewards = np.arange(sampling.batch * sampling.groups).reshape(sampling.batch, -1) % 3.0
    samples = set_advantages(samples_from_rollout(prompts, rollout), grpo.group_advantages(rewards))
    update.run_optimizer_steps(learner, make_batches(samples, sizes.train_token_budget), 1e-4)


RUBRIC = Path(gwen.__file__).parent / "data" / "demo_rubric.yaml"
MANY = {"batch": 4, "groups": 16, "max_tokens": 16, "train_token_budget": 160}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "prompt_tokens", "rubric"),
    [
        ({}, 80, None),
        ({"train_token_budget": 300}, 8, None),  # of so short prompts none is shared
        ({"checkpoint_layers": "on"}, 80, None),
        ({"lora_rank": 0, "train_token_budget": 300}, 80, None),
        ({"lora_rank": 0, "train_token_budget": 300, "optimizer": "sgd"}, 80, None),
        ({"max_tokens": 128, "batch": 1}, 40, None),
        (MANY, 64, None),  # of this the rollout is the largest
        (
            {"batch": 8, "groups": 2, "max_tokens": 8, "train_token_budget": 64},
            140,
            RUBRIC,
        ),  # and of this the judge
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["demo", "random:2m-hybrid"])
def test_a_step_takes_at_most_a_twentieth_more_than_was_said_and_three_tenths_less(
    name, flags, prompt_tokens, rubric
):
    config = make_config(model=name, **{"max_tokens": 32} | flags)
    gc.collect()
    before, model = mx.get_active_memory(), gwen.load(name)[0]
    prompts = (
        np.random.default_rng(0).integers(3, 1000, (config.sampling.batch, prompt_tokens)).tolist()
    )
    demand = demand_of(config, prompt_tokens, model.config, mx.float32)._replace(rubric=rubric)
    sizes = memory_estimate.choose_sizes(demand)
    need = memory_estimate.estimate_memory(demand, sizes)
    if config.model.lora_rank:
        lora.apply(
            model, config.model.lora_rank, config.model.lora_scale, config.model.lora_targets
        )
    mx.eval(model.parameters())
    mx.clear_cache()
    mx.reset_peak_memory()
    one_step(model, config, sizes, prompts)
    if rubric:
        grader = mark_readable(
            judge.Judge(model, hub.load_tokenizer(hub.DEMO), rubrics.load_rubric(rubric))
        )
        questions = [
            f"{number} " + "one " * (prompt_tokens - 1) for number in range(config.sampling.batch)
        ]
        answers = [
            f"{number} " + "two " * 7
            for number in range(config.sampling.batch * config.sampling.groups)
        ]
        grader.score([text for text in questions for _ in range(config.sampling.groups)], answers)
    peak = mx.get_peak_memory() - before
    # the optimizer's state is gone by then
    phases = need.phases
    said = (
        need.peak_bytes
        - need.resident["Python"]
        - (need.resident["optimizer"] if phases["judging"] > phases["update"] else 0)
    )
    print(f"{said / peak:.2f}")
    assert 0.95 * peak < said < 1.3 * peak


def test_weights_adapters_and_optimizer_are_counted_to_the_byte():
    config = make_config(lora_rank=8)
    model = gwen.make_random_model("random:2m", mx.float16)
    held = sum(array.nbytes for _, array in tree_flatten(model.parameters()))
    lora.apply(model, 8, 2.0)
    sizes = MemoryDependentSizes(8, 1024, 0)
    learner = update.Learner(model, config, StepLoss(config, sizes))
    need = memory_estimate.estimate_memory(demand_of(config, 80, model.config), sizes)
    assert need.resident["weights"] == held
    copies = [
        copy.nbytes
        for _, layer in lora.adapted_layers(model)
        for copy in layer.cached_a_and_scaled_b(mx.float16)
    ]
    assert need.resident["adapters"] == sum(
        array.nbytes for array in learner.trainable.values()
    ) + sum(copies)
    moments = [
        array
        for name, array in tree_flatten(learner.optimizer.state)
        if name.endswith((".m", ".v"))
    ]
    assert need.resident["optimizer"] == sum(array.nbytes for array in moments)


def test_16_bit_weights_that_train_have_float32_masters():
    for dtype, expected in ((mx.float16, 4), (mx.float32, 0)):
        need = memory_estimate.estimate_memory(
            demand_of(make_config(lora_rank=0), dtype=dtype), MemoryDependentSizes(8, 1024, 0)
        )
        assert need.resident["masters"] == expected * need.resident["weights"] / dtype.size


def test_a_judge_that_only_evaluations_ask_is_counted(tmp_path, capsys):
    witness = [
        "--reward-weights",
        "rubric=0",
        "--eval-rubric",
        str(RUBRIC),
        "--judge-model",
        "random:2m",
    ]
    for flags, asked in ((witness, True), ([*witness, "--eval-every", "0"], False)):
        preflight.main(["--model", "demo", *flags])
        for line in (make_run(tmp_path, *flags).memory_line, capsys.readouterr().out):
            assert (" judge + " in line, " judging, " in line) == (asked, asked)


def test_a_model_that_trains_whole_is_held_twice_where_it_is_its_own_judge_or_the_reference():
    def stays(**flags):
        return memory_estimate.resident_bytes(
            demand_of(make_config(lora_rank=0, **flags))._replace(rubric=RUBRIC)
        )

    frozen, other = stays(), stays(judge_model="demo")
    both = stays(judge_model="demo", beta=0.1)
    assert other["base"] == 0 and frozen["base"] == frozen["weights"] and "judge" not in frozen
    assert both == other | {"base": both["weights"]} and other["judge"] < 0.01 * both["base"]


@pytest.mark.slow
@pytest.mark.parametrize("on_gpu", [False, True])
def test_auto_cuts_micro_batches_before_it_computes_layers_again(monkeypatch, on_gpu):
    monkeypatch.setattr(gpu, "on_gpu", lambda: on_gpu)
    monkeypatch.setattr(gpu, "can_run_metal_kernels", lambda: on_gpu)
    settled, demand = [], demand_of(make_config(batch=8, groups=8, max_tokens=256))
    for room in [size * GB for size in ((40, 4.7, 3, 2.5, 1) if on_gpu else (40, 8, 5, 4.5, 1))]:
        monkeypatch.setattr(memory_estimate, "LAPTOP", 1 if on_gpu else room)
        monkeypatch.setattr(memory, "usable_memory_bytes", lambda room=room: room if on_gpu else 1)
        sizes = memory_estimate.choose_sizes(demand)
        settled.append((sizes.train_token_budget, sizes.checkpoint_layers))
        need = memory_estimate.estimate_memory(demand, sizes)
        assert sum(need.resident.values()) + need.phases["update"] <= 0.9 * room or settled[-1] == (
            1024,
            28,
        )
    budgets, counts = zip(*settled, strict=True)
    assert budgets[0] == (2048 if on_gpu else 1024) and budgets[-1] == 1024
    assert list(budgets) == sorted(budgets, reverse=True) and list(counts) == sorted(counts)
    assert all(budget == 1024 for budget, count in settled if count)
    assert counts[0] == 0 and 0 < counts[-2] < counts[-1] == 28


TRIED = {
    "sampling/signal_groups": 2,
    "completion/truncated_frac": 0.1,
    "completion/degenerate_frac": 0.0,
}
TRIED |= {"reward/mean": 0.5, "reward/std": 0.3, "step/s": 2.0, "mem/peak_gb": 1.5}
HALF = [0.0, 1.0, 0.0, 1.0]
LOOP = "that that that that that that"
LOOPS_ARE_PAID = (
    "answers repeat themselves or copy the prompt and are rewarded: set --reward-gate form"
)


@pytest.mark.parametrize(
    ("figures", "rewards", "flags", "last"),
    [
        (
            {},
            HALF,
            {},
            "go: the rewards differ in 50% of the groups, and 25% are enough, even if the mean reward is low",
        ),
        ({"sampling/signal_groups": 1}, HALF, {}, "go"),
        (
            {"completion/truncated_frac": 0.6},
            HALF,
            {},
            "change: ask for shorter answers, use a warm start (docs/",
        ),
        (
            {"sampling/signal_groups": 0},
            [0.0] * 4,
            {},
            "change: every answer gets the reward 0: use a warm start (docs/warm-start.md), a reward that",
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
            "change: ask for shorter answers, or raise --max-tokens above 8; "
            "nearly all answers fail: use a warm start (docs/warm-start.md), easier prompts, or more --groups",
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
        ({"completion": LOOP}, [0.0] * 4, {}, "go"),  # such answers earn nothing already
        ({"completion": LOOP}, [1.0] * 4, {"reward_gate": "form"}, "go"),
        (
            {"sampling/signal_groups": 0},
            [0.0] * 4,
            {"reward_gate": "form"},
            "change: 0% of the answers pass --reward-gate form: an answer gets a reward only if it ends before --max-tokens, has at",
        ),
        (
            {"completion": LOOP, "answer": "a, b"},
            HALF,
            {},
            "go",
        ),  # the gate would pay no right answer
        (
            {"sampling/signal_groups": 0, "answer": "a, b"},
            HALF,
            {"reward_gate": "form"},
            "; even some right answers would get no reward",
        ),
    ],
)
def test_a_trial_says_go_or_what_to_change(figures, rewards, flags, last):
    record = {
        "prompt": "What?",
        "completion": figures.get("completion", "That."),
        "finish_reason": "stop",
        "answer": figures.get("answer"),
    }
    answers = [record | {"reward": reward} for reward in rewards]
    steps = [
        TRIED | figures | {"step/s": seconds} for seconds in (9.0, 2.0, 3.1)
    ]  # the first one warms up
    *shown, pace, said = trial.trial_report_lines(
        make_config(batch=4, steps=90, **flags), steps, answers
    )
    assert said.startswith(last) or (last[0] == ";" and last in said)
    assert (
        pace
        == "2.0 to 3.1 s per step, 3 min to 5 min for 90 steps without evaluations, 1.50 GB of memory"
    )
    assert "mean reward is 0.5" in shown[-2] and "within a group is 0.3; " in shown[-1]
    assert "in 12 groups before training, with an error of up to 28%; " in shown[-4] or figures
    completion = trial.shorten_value(record["completion"])
    assert shown[0] == f"  {rewards[0]:.3g}  'What?' -> {completion}"


def test_a_trial_advises_the_gate_only_if_answers_that_repeat_or_copy_are_rewarded():
    """A judge from 1 to 5 gives 1 to such answers: they earn least already."""

    def advice_for(rewards):
        answers = [
            {"prompt": "What?", "completion": text, "finish_reason": "stop", "reward": reward}
            for text, reward in zip([LOOP, LOOP, "That is it.", "It is."], rewards, strict=True)
        ]
        step = TRIED | {"completion/degenerate_frac": 0.5}
        *_, advice = trial.trial_report_lines(make_config(batch=4, steps=90), [step], answers)
        return advice

    assert advice_for([0.0, 0.0, 1.0, 0.0]).startswith("go")
    assert advice_for([1.0, 1.0, 5.0, 3.0]).startswith("go")
    assert advice_for([-1.0, 0.0, 1.0, None]).startswith("go"), "the gate leaves rewards up to 0"
    assert advice_for([0.0, 1.0, 1.0, 0.0]) == f"change: 25% of the {LOOPS_ARE_PAID}"


@pytest.mark.parametrize(
    ("figures", "right", "last"),
    [
        (
            {},
            [0.0, 0.0],
            "even if the mean reward is low; no answer is right yet, so the model may learn only",
        ),
        (
            {},
            [0.0, 0.4],
            "go: the rewards differ in 50% of the groups, and 25% are enough, even if the mean reward is low",
        ),
        ({}, [0.4, 1.0], "even if the mean reward is low"),
        (
            {"completion": LOOP},
            [0.0],
            "set --reward-gate form; no answer is right yet",
        ),
        (
            {"sampling/signal_groups": 0},
            [0.0],
            "a reward that distinguishes answers, or other prompts",
        ),  # the rest is said
    ],
)
def test_a_trial_counts_right_answers_and_says_that_none_is_and_ends_that_read_alike_are_one(
    figures, right, last
):
    answers = [
        {
            "prompt": "?",
            "completion": figures.get("completion", "A."),
            "finish_reason": "stop",
            "reward": reward,
        }
        for reward in HALF
    ]
    answers = answers if "sampling/signal_groups" not in figures else [answers[0]]
    *shown, pace, said = trial.trial_report_lines(
        make_config(batch=4, steps=90), [TRIED | figures], answers, right
    )
    assert (
        last in said
        and ("; no answer" in last or said.endswith(last))
        and shown[-4].startswith("1 step, ")
    )
    assert shown[-3] == f"right answers: {sum(right):.0f} of {len(right)}"
    assert (
        pace == "2.0 s per step, 3 min for 90 steps without evaluations, 1.50 GB of memory"
        and "rewards 0" in shown[-2]
    )


def test_right_is_what_the_verifier_of_the_run_finds_so_where_a_problem_has_an_answer():
    examples = [
        {"prompt": [{"role": "user", "content": "?"}], "answer": answer, "of": 2}
        for answer in (4, "6", None)
    ]
    verifier = lambda completions, answer, of, **_: list(map(right, completions, answer))  # noqa: E731
    task = tasks.Task("own", {}, {}, verifier=verifier)
    right = lambda text, answer: text == str(answer)  # noqa: E731
    answers = [
        one | {"completion": "6", "answer": one["answer"] and str(one["answer"])}
        for one in examples
    ]
    assert trial.verify_answers_to_train_problems(task._replace(train=examples), answers) == [0, 1]
    assert (
        trial.verify_answers_to_train_problems(task, answers)
        == trial.verify_answers_to_train_problems(tasks.Task("own", {}, {}), answers)
        == []
    )


@pytest.mark.parametrize(
    ("figures", "num", "flags", "said"),
    [
        (
            {},
            4,
            {},
            "every answer gets the reward 0: use a warm start",
        ),  # 2 s a step: 292 s, and 5 evaluations of 20 s
        ({}, 3, {}, ""),
        ({}, 5, {}, ""),  # it was said
        ({"step/s": 121.0}, 1, {}, "every answer"),  # no longer than a trial
        ({}, 4, {"steps": 60}, ""),  # it is short
        ({"sampling/signal_groups": 1}, 4, {}, ""),
        ({"sampling/signal_groups": None}, 4, {}, ""),
    ],
)
def test_first_steps_without_signal_end_a_run_that_would_be_long(
    tmp_path, figures, num, flags, said
):
    steps = [TRIED | {"sampling/signal_groups": 0} | figures] * num
    flags = {"model": "demo", "batch": 4, "steps": 150, "eval_every": 30} | flags
    (tmp_path / "rollouts.jsonl").write_text(
        '{"step": 1, "reward": 0.0, "prompt": "What?", "completion": "That.", "finish_reason": "stop"}\n'
    )
    found = trial.advise_if_long_run_has_no_signal(make_config(**flags), steps, 20.0, tmp_path)
    assert found.startswith(said) and bool(found) == bool(said)


def test_a_trial_that_is_ended_ends_what_it_began(monkeypatch):
    class Trial:
        def __init__(self, command, **_):
            self.recipe, self.is_killed = Path(command[3]), False
            trials.append(self)

        def poll(self):
            os.kill(os.getpid(), signal.SIGTERM)

        def kill(self):
            self.is_killed = True

        def wait(self):
            return -9

    trials = []
    monkeypatch.setattr(trial.subprocess, "Popen", Trial)
    with pytest.raises(KeyboardInterrupt):
        list(trial.try_first_steps(make_config()))
    assert signal.getsignal(signal.SIGTERM) != link.raise_keyboard_interrupt
    assert trials[0].is_killed and not trials[0].recipe.exists()


@pytest.mark.slow
def test_a_trial_takes_steps_of_the_trainer_and_leaves_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(trial, "TRY_STEPS", 2)
    flags = (
        "--try --model demo --batch 2 --groups 4 --max-tokens 3 --steps 9 --eval-limit 8 --seeds 2"
    )
    preflight.main(flags.split())
    out = capsys.readouterr().out
    assert "2 steps, 16 answers: " in out and "reward correct: " in out and "right answers: " in out
    assert (
        "\nif every third answer changes, 8 held-out problems can show only changes of at least 57%"
        in out
    )
    assert out.splitlines()[-1].startswith("change: ask") and "or raise --max-tokens above 3" in out
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_trial_leaves_out_that_a_reward_pays_nothing_where_it_saw_it_pay(tmp_path, capsys):
    """It pays some short texts, and none of those that are made up."""
    pays = "[float(len(text) % 3 == 1 and len(text) < 30) for text in completions]"
    (tmp_path / "odd.py").write_text(f"def odd(completions, **_): return {pays}\n")
    label = '{{"label": "of the message", "number": {}}}'
    rows = [
        {"prompt": f"Say what kind of message the number {n} is.", "answer": label.format(n)}
        for n in range(20)
    ]
    (tmp_path / "mine.jsonl").write_text("\n".join(map(json.dumps, rows)))
    flags = "--try --model demo --batch 4 --groups 8 --max-tokens 16 --data {0}/mine.jsonl --reward {0}/odd.py:odd"
    preflight.main(flags.format(tmp_path).split())
    out = capsys.readouterr().out
    assert (
        "right answers: 0 of 128" in out
        and "teaches nothing" not in out
        and "rewards 0 to 1" in out
    )
    assert out.splitlines()[-1].endswith("first train it on right answers (docs/warm-start.md)")


@pytest.mark.slow
def test_a_trial_of_a_mistake_ends_with_its_line(tmp_path, capfd):
    with pytest.raises(SystemExit) as ended:
        preflight.main(["--try", "--model", "demo", "--data", str(tmp_path / "absent.jsonl")])
    assert ended.value.code == 2
    assert "absent.jsonl" in capfd.readouterr().err


def test_what_was_asked_for_stays_as_it_was():
    config = make_config(train_token_budget=5000, checkpoint_layers="3", rollout_batch_size=7)
    assert memory_estimate.choose_sizes(demand_of(config, 4000)) == MemoryDependentSizes(7, 5000, 3)


# ---- a run that does not fit

SMALL_RUN = "--model demo --batch 2 --groups 4 --max-tokens 8 --steps 2 --eval-every 0".split()
TOO_SMALL = 190_000_000  # bytes: the run's estimate is 200 MB


@pytest.fixture
def too_small(monkeypatch):
    monkeypatch.setattr(memory, "usable_memory_bytes", lambda: TOO_SMALL)


def status_of(main, flags):
    """The exit status of a command; 0 if it returns."""
    try:
        main(flags)
    except SystemExit as ended:
        return ended.code
    return 0


def test_a_run_that_does_not_fit_is_refused_before_it_has_a_directory(tmp_path, too_small, capsys):
    assert status_of(train.main, [*SMALL_RUN, "--run-dir", str(tmp_path / "run")]) == 2
    error = capsys.readouterr().err
    assert "it does not fit: it needs about 0.20 GB" in error and "--over-memory" in error
    assert not (tmp_path / "run").exists()
    with pytest.raises(ValueError, match="--over-memory"):
        train.Trainer.start(task="demo", model="demo", steps=2, run_dir=str(tmp_path / "run"))


@pytest.mark.slow
def test_a_run_that_was_told_to_go_on_over_memory_trains_and_is_resumed(
    tmp_path, too_small, capsys
):
    run = str(tmp_path / "run")
    train.main([*SMALL_RUN, "--run-dir", run, "--over-memory"])
    train.main(["--resume", run, "--steps", "3"])
    assert len(list(read_log(tmp_path / "run" / "metrics.jsonl"))) == 3
    assert "it does not fit" in capsys.readouterr().out


@pytest.mark.slow
def test_a_run_that_no_longer_fits_is_resumed_only_where_a_flag_says_so(
    tmp_path, monkeypatch, capsys
):
    run = str(tmp_path / "run")
    train.main([*SMALL_RUN, "--run-dir", run])
    monkeypatch.setattr(memory, "usable_memory_bytes", lambda: TOO_SMALL)
    assert status_of(train.main, ["--resume", run, "--steps", "3"]) == 2
    assert "--over-memory" in capsys.readouterr().err
    train.main(["--resume", run, "--steps", "3", "--over-memory"])
    assert len(list(read_log(tmp_path / "run" / "metrics.jsonl"))) == 3


@pytest.mark.parametrize("flags", [["--prompt-tokens", "20"], ["--try"], ["--fits"]])
def test_no_preflight_of_a_run_that_does_not_fit_says_go_or_ends_with_status_0(
    monkeypatch, capsys, flags
):
    monkeypatch.setattr(memory, "usable_memory_bytes", lambda: TOO_SMALL - 50_000_000)
    run = [] if flags == ["--fits"] else SMALL_RUN
    assert status_of(preflight.main, [*flags, *run]) == 1
    assert capsys.readouterr().out.splitlines()[-1].startswith("change: it does not fit")


@pytest.mark.slow
def test_a_trial_over_memory_says_so_first(too_small, capsys):
    assert status_of(preflight.main, ["--try", *SMALL_RUN, "--over-memory"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith("memory: 0.20 of 0.19 GB")
    assert lines[-1].startswith("change: it does not fit")


def test_a_trial_whose_steps_took_more_than_the_memory_says_so_first(monkeypatch):
    monkeypatch.setattr(memory, "usable_memory_bytes", lambda: 10**9)
    answers = [
        {
            "prompt": "?",
            "completion": "A.",
            "finish_reason": "stop",
            "reward": reward,
        }
        for reward in HALF
    ]
    *_, said = trial.trial_report_lines(make_config(batch=4, steps=90), [TRIED], answers)
    assert said.startswith(
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
    assert memory_estimate.estimate_memory(demand, sizes) == memory_estimate.estimate_memory(
        run.demand, run.sizes
    )
