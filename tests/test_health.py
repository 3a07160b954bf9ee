"""Each symptom on figures that show it, on figures that almost show it, and in runs."""

import pytest
from conftest import read_log
from small_run import SMALL_FLAGS

import train
from reporting import health

LENGTH = "completion/mean_tokens"
TRUNCATED = "completion/truncated_frac"
OVER_CAP = "mismatch/over_cap_frac"
STEP = {
    "sampling/signal_groups": 4,
    "reward/mean": 0.5,
    "entropy": 1.0,
    LENGTH: 10.0,
    TRUNCATED: 0.1,
    OVER_CAP: 0.0,
}


def make_steps(metric, *values):
    """Steps that differ in one metric, which has these values."""
    return [STEP | {"step": number, metric: value} for number, value in enumerate(values, start=1)]


def repeat_steps(metric, *values):
    """Five steps for each of these values."""
    return make_steps(metric, *(value for value in values for _ in range(5)))


def make_paced_steps(*last_seconds, **last_metrics):
    """Six steps of about 10 seconds, and three last steps."""
    steps = make_steps("step/s", 10.0, 11, 9, 10, 12, 10, *last_seconds)
    return [*steps[:-3], *(step | last_metrics for step in steps[-3:])]


def make_steps_with_signal(*num_groups):
    return make_steps("sampling/signal_groups", *num_groups)


def make_steps_with_control_token(fraction):
    steps = repeat_steps(f"{health.CONTROL}</x>", fraction)
    return [step | {TRUNCATED: fraction} for step in steps]


def stop_policy(steps):
    """The same steps without a change of the policy."""
    return [step | {"update/kl": 0.0} for step in steps]


FAILING_TOOLS = [STEP | {"tools/calls": 10, "tools/failures": 9}] * 5
WORKING_TOOLS = [STEP | {"tools/calls": 10, "tools/failures": 1}] * 5
SLOW = make_paced_steps(31, 40, 33)
LOW_ENTROPY = repeat_steps("entropy", 1.0, 0.05)
# a symptom, steps that show the symptom, and steps without a symptom
STEPS_BY_SYMPTOM = [
    ("no signal", make_steps_with_signal(3, 0, 0, 0, 0, 0), make_steps_with_signal(0, 0, 0, 0, 1)),
    ("no signal", make_steps_with_signal(0, 0, 0, 0, 0), make_steps_with_signal(0, 0, 0, 0)),
    (
        "nothing moves",
        repeat_steps("update/kl", 3e-8, -1e-9),
        repeat_steps("update/kl", 3e-8, 2e-6),
    ),
    (
        "nothing moves",
        make_steps("update/kl", *[0.0] * 10),
        make_steps("update/kl", *[0.0] * 9, None),
    ),
    # Without a signal, a higher learning rate would not help.
    (
        "no signal",
        stop_policy(make_steps_with_signal(*[0] * 10)),
        make_steps_with_signal(0, 0, 0, 0),
    ),
    ("entropy", stop_policy(LOW_ENTROPY), repeat_steps("entropy", 1.0, 0.11)),
    ("tools fail", FAILING_TOOLS, FAILING_TOOLS + WORKING_TOOLS),
    ("tools fail", FAILING_TOOLS, FAILING_TOOLS[:4]),
    ("entropy", repeat_steps("entropy", 1.0, 0.09), repeat_steps("entropy", 1.0, 0.11)),
    ("entropy", repeat_steps("entropy", 1.0, 0.5, 0.01), repeat_steps("entropy", 1.0, None)),
    ("control token", make_steps_with_control_token(0.6), make_steps_with_control_token(0.09)),
    ("truncated", repeat_steps(TRUNCATED, 0.6), repeat_steps(TRUNCATED, 0.6, 0.5)),
    # One step is enough.
    ("truncated", make_steps(TRUNCATED, 0.6), make_steps(TRUNCATED, 0.5)),
    ("slow", SLOW, make_paced_steps(31, 12, 33)),
    ("slow", SLOW, make_paced_steps(29, 29, 29)),
    # Longer completions explain the time.
    ("slow", SLOW, make_paced_steps(31, 40, 33, **{LENGTH: 40.0})),
    ("mismatch", repeat_steps(OVER_CAP, 0.011), repeat_steps(OVER_CAP, 0.009)),
]
SYMPTOM_CASES = [
    *((name, ill, healthy, False) for name, ill, healthy in STEPS_BY_SYMPTOM),
    # More right answers explain a low entropy.
    ("entropy", LOW_ENTROPY, LOW_ENTROPY, True),
]


@pytest.mark.parametrize(("name", "ill_steps", "healthy_steps", "has_gained"), SYMPTOM_CASES)
def test_a_symptom_is_found_in_steps_that_show_it_and_not_in_similar_steps(
    name, ill_steps, healthy_steps, has_gained
):
    (symptom,) = health.find_symptoms(ill_steps, False)
    assert symptom.name == name
    assert "\n" not in symptom.text
    assert health.find_symptoms(healthy_steps, has_gained) == []


def test_a_run_without_figures_has_no_symptoms():
    assert health.find_symptoms([], False) == []
    assert health.find_symptoms([{"step": 1}] * 20, False) == []


@pytest.mark.parametrize(
    ("fractions_equal", "warning"),
    [
        ([0.0] * 5 + [0.8] * 9 + [0.7], "little signal"),
        ([0.8] * 9, None),  # too early
        ([0.0] * 3 + [0.8] * 5 + [0.5] * 5, None),
        ([1.0] * 10, "no signal"),
    ],
)
def test_a_warning_says_that_rewards_differ_in_few_groups(fractions_equal, warning):
    steps = make_steps("reward/zero_std_frac", *fractions_equal)
    if warning == "no signal":
        steps = [step | {"sampling/signal_groups": 0} for step in steps]
    symptoms = health.find_symptoms(steps, True)
    assert [symptom.name for symptom in symptoms] == ([warning] if warning else [])


def test_advice_on_cut_off_answers_begins_at_step_0_and_names_the_limit():
    evaluation = {"step": 0, "eval/truncated_frac": 0.75}
    settings = {"max_tokens": 30}
    (symptom,) = health.find_symptoms([], False, [evaluation], settings)
    assert symptom.name == "truncated"
    assert symptom.text.startswith("75% of the answers")
    assert "--max-tokens 30" in symptom.text

    advise = health.advise_on_cut_off_answers
    assert advise([], [evaluation | {"eval/truncated_frac": 0.5}], settings) == ""
    assert "--max-context" in advise([], [evaluation], settings | {"tools": ["mine.py:look"]})

    # steps after the evaluation
    assert advise(repeat_steps(TRUNCATED, 0.4), [evaluation], settings) == ""

    advice = advise(repeat_steps(TRUNCATED, 0.1, 0.9), [], settings)
    assert "10% at the start" in advice
    assert "--temp" in advice
    # A rise from 44% to 52% in the first steps may be chance, so training is not named as its cause.
    advice = advise(make_steps(TRUNCATED, 0.44, 0.6), [], settings)
    assert advice.startswith("52% of the answers are cut off at --max-tokens 30: raise this limit")


# ---- in a run


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_steps", "eval_every", "first_step"), [(1, 1, 0), (4, 20, 0), (6, 20, 0), (2, 0, 1)]
)
def test_the_warning_and_the_last_lines_of_a_run_name_cut_off_answers_first(
    tmp_path, capsys, num_steps, eval_every, first_step
):
    flags = "--model demo --max-tokens 3 --batch 2 --groups 4 --eval-limit 8"
    run_flags = f"--steps {num_steps} --eval-every {eval_every} --run-dir {tmp_path / 'run'}"
    train.main([*flags.split(), *run_flags.split()])
    output = capsys.readouterr()

    assert read_log(tmp_path / "run" / "warnings.jsonl")[0]["step"] == first_step
    assert f"WARNING after step {first_step}: " in output.err

    lines = output.out.splitlines()
    is_warning = [line.startswith("warning after") for line in lines]
    last_lines = lines[is_warning.index(True) - 1 :]
    assert "cut off at --max-tokens 3" in last_lines[0]
    assert "sft" not in output.out
    if eval_every:
        assert last_lines[-1].startswith("next: ")
        assert "--max-tokens 3" in last_lines[-1]


@pytest.fixture
def constant_reward_flags(tmp_path):
    (tmp_path / "mine.py").write_text(
        "def same(completions, **_): return [0.7] * len(completions)\n"
    )
    return [*SMALL_FLAGS, "--reward", f"{tmp_path / 'mine.py'}:same", "--eval-every", "0"]


@pytest.mark.slow
def test_a_constant_reward_causes_one_warning_also_if_the_run_is_resumed(
    tmp_path, constant_reward_flags, capsys
):
    flags = [*constant_reward_flags, "--warmup-steps", "99"]

    uninterrupted = tmp_path / "uninterrupted"
    train.main([*flags, "--steps", "6", "--run-dir", str(uninterrupted)])
    output = capsys.readouterr()
    (warning,) = read_log(uninterrupted / "warnings.jsonl")
    assert (warning["step"], warning["name"]) == (5, "no signal")
    error_lines = [line for line in output.err.splitlines() if line]
    error_lines = [line for line in error_lines if not line.startswith("... ")]
    assert error_lines == [f"WARNING after step 5: {warning['text']}."]
    assert "warning after step 5: no signal" in output.out
    for line in output.out.splitlines():
        if line.startswith("step "):
            assert line.endswith(" | no step")

    # A resumed run counts the earlier steps.
    resumed = tmp_path / "resumed"
    train.main([*flags, "--steps", "4", "--run-dir", str(resumed)])
    train.main(["--resume", str(resumed), "--steps", "5"])
    assert capsys.readouterr().err.count("WARNING after step 5") == 1
    train.main(["--resume", str(resumed), "--steps", "6"])
    assert "WARNING" not in capsys.readouterr().err
    assert read_log(resumed / "warnings.jsonl") == read_log(uninterrupted / "warnings.jsonl")


@pytest.mark.slow
def test_a_healthy_run_has_no_warnings(tmp_path, capsys):
    flags = "--steps 10 --learning-rate 1e-4 --eval-every 5 --run-dir".split()
    train.main([*SMALL_FLAGS, *flags, str(tmp_path / "run")])
    assert "WARNING" not in capsys.readouterr().err
    assert read_log(tmp_path / "run" / "warnings.jsonl") == []


def test_a_low_entropy_in_a_warm_start_causes_no_warning():
    assert health.find_symptoms(LOW_ENTROPY, False, settings={"loss_type": "dapo"}) != []
    assert health.find_symptoms(LOW_ENTROPY, False, settings={"loss_type": "sft"}) == []
