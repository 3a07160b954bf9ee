"""Each illness on figures that show it, on figures that almost do, and in a run."""

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


def steps_of(key, *values, then=(), num_then=5):
    """Steps that differ in one figure: its values, then five times each further one."""
    values = [*values, *(value for value in then for _ in range(num_then))]
    return [STEP | {"step": number + 1, key: value} for number, value in enumerate(values)]


def names(steps, has_gained=False):
    return [finding.name for finding in health.find_symptoms(list(steps), has_gained)]


TOOLS = [
    STEP | {"tools/calls": 10, "tools/failures": number}
    for number in (9, 9, 9, 9, 9, 1, 1, 1, 1, 1)
]


def slow(*last, **last_three):
    """Steps of a usual pace and three more."""
    steps = steps_of("step/s", 10.0, 11, 9, 10, 12, 10, *last)
    return [*steps[:-3], *(step | last_three for step in steps[-3:])]


def signal(*groups):
    return steps_of("sampling/signal_groups", *groups)


STILL = {"update/kl": 0.0}
SLOW = slow(31, 40, 33)
CONTROL = f"{health.CONTROL}</x>"
CONTROLS = {
    share: [step | {TRUNCATED: share} for step in steps_of(CONTROL, *[share] * 5)]
    for share in (0.6, 0.09)
}
LOST = steps_of("entropy", then=(1.0, 0.05))
ILL_AND_WELL = [  # an illness, steps and evaluations that show it, and such that do not
    ("no signal", (signal(3, 0, 0, 0, 0, 0),), (signal(0, 0, 0, 0, 1),)),
    ("no signal", (signal(0, 0, 0, 0, 0),), (signal(0, 0, 0, 0),)),
    (
        "nothing moves",
        (steps_of("update/kl", then=(3e-8, -1e-9)),),
        (steps_of("update/kl", then=(3e-8, 2e-6)),),
    ),
    (
        "nothing moves",
        (steps_of("update/kl", *[0.0] * 10),),
        (steps_of("update/kl", *[0.0] * 9, None),),
    ),
    (
        "no signal",
        ([step | STILL for step in signal(*[0] * 10)],),
        (signal(0, 0, 0, 0),),
    ),  # no rate mends that
    ("entropy", ([step | STILL for step in LOST],), (steps_of("entropy", then=(1.0, 0.11)),)),
    ("tools fail", (TOOLS[:5],), (TOOLS,)),
    ("tools fail", (TOOLS[:5],), (TOOLS[:4],)),
    ("entropy", (steps_of("entropy", then=(1.0, 0.09)),), (steps_of("entropy", then=(1.0, 0.11)),)),
    (
        "entropy",
        (steps_of("entropy", then=(1.0, 0.5, 0.01)),),
        (steps_of("entropy", then=(1.0, None)),),
    ),
    ("control token", (CONTROLS[0.6],), (CONTROLS[0.09],)),
    ("truncated", (steps_of(TRUNCATED, then=(0.6,)),), (steps_of(TRUNCATED, then=(0.6, 0.5)),)),
    (
        "truncated",
        (steps_of(TRUNCATED, 0.6),),
        (steps_of(TRUNCATED, 0.5),),
    ),  # from the first step on
    *(("slow", (SLOW,), (well,)) for well in (slow(31, 12, 33), slow(29, 29, 29))),
    ("slow", (SLOW,), (slow(31, 40, 33, **{LENGTH: 40.0}),)),
    ("mismatch", (steps_of(OVER_CAP, then=(0.011,)),), (steps_of(OVER_CAP, then=(0.009,)),)),
    # what comes with more right answers is none
    ("entropy", (LOST, False), (LOST, True)),
]


@pytest.mark.parametrize(("name", "ill", "well"), ILL_AND_WELL)
def test_an_illness_is_found_where_it_is_and_nowhere_near(name, ill, well):
    (symptom,) = health.find_symptoms(*(*ill, False)[:2])
    assert symptom.name == name and "\n" not in symptom.text
    assert names(*well) == []


def test_a_run_that_measured_nothing_yet_has_no_illness():
    assert names([]) == [] and names([{"step": 1}] * 20) == []


def test_answers_that_are_cut_off_are_told_at_step_0_with_their_limit():
    evaluation = {"step": 0, "eval/truncated_frac": 0.75}
    settings = {"max_tokens": 30}
    (symptom,) = health.find_symptoms([], False, [evaluation], settings)
    assert symptom.name == "truncated"
    assert symptom.text.startswith("75% of the answers") and "--max-tokens 30" in symptom.text
    assert (
        health.advise_on_cut_off_answers([], [evaluation | {"eval/truncated_frac": 0.5}], settings)
        == ""
    )
    assert "--max-context" in health.advise_on_cut_off_answers(
        [], [evaluation], settings | {"tools": ["mine.py:look"]}
    )
    later = steps_of(TRUNCATED, then=(0.4,))
    assert (
        health.advise_on_cut_off_answers(later, [evaluation], settings) == ""
    )  # the evaluation is older
    risen = health.advise_on_cut_off_answers(steps_of(TRUNCATED, then=(0.1, 0.9)), [], settings)
    assert "10% at the start" in risen and "--temp" in risen


# ---- in a run


@pytest.mark.slow
@pytest.mark.parametrize(
    ("steps", "every", "first"), [(1, 1, 0), (4, 20, 0), (6, 20, 0), (2, 0, 1)]
)
def test_where_most_answers_are_cut_off_the_warning_and_the_ending_say_so_first(
    tmp_path, capsys, steps, every, first
):
    flags = f"--model demo --max-tokens 3 --batch 2 --groups 4 --eval-limit 8 --steps {steps} --eval-every {every}"
    train.main([*flags.split(), "--run-dir", str(tmp_path / "run")])
    shown = capsys.readouterr()
    assert read_log(tmp_path / "run" / "warnings.jsonl")[0]["step"] == first
    assert f"WARNING after step {first}: " in shown.err
    lines = shown.out.splitlines()
    ending = lines[
        lines.index(next(line for line in lines if line.startswith("warning after"))) - 1 :
    ]
    assert "cut off at --max-tokens 3" in ending[0]
    assert "sft" not in shown.out
    if every:
        assert "--max-tokens 3" in ending[-1] and ending[-1].startswith("next: ")


@pytest.fixture
def flags(tmp_path):
    """Of a run with a constant reward."""
    (tmp_path / "mine.py").write_text(
        "def same(completions, **_): return [0.7] * len(completions)\n"
    )
    return [*SMALL_FLAGS, "--reward", f"{tmp_path / 'mine.py'}:same", "--eval-every", "0"]


@pytest.mark.slow
def test_a_constant_reward_is_warned_of_once_and_not_again_where_the_run_goes_on(
    tmp_path, flags, capsys
):
    uninterrupted = tmp_path / "whole"
    cut = tmp_path / "cut"
    flags = [*flags, "--warmup-steps", "99"]
    train.main([*flags, "--steps", "6", "--run-dir", str(uninterrupted)])
    shown = capsys.readouterr()
    (warning,) = read_log(uninterrupted / "warnings.jsonl")
    assert (warning["step"], warning["name"]) == (5, "no signal")
    assert [line for line in shown.err.splitlines() if line and not line.startswith("... ")] == [
        f"WARNING after step 5: {warning['text']}."
    ]
    assert "warning after step 5: no signal" in shown.out
    assert all(
        line.endswith(" | no step") for line in shown.out.splitlines() if line.startswith("step ")
    )

    train.main([*flags, "--steps", "4", "--run-dir", str(cut)])
    train.main(["--resume", str(cut), "--steps", "5"])  # the four steps before count
    assert capsys.readouterr().err.count("WARNING after step 5") == 1
    train.main(["--resume", str(cut), "--steps", "6"])
    assert "WARNING" not in capsys.readouterr().err
    assert read_log(cut / "warnings.jsonl") == read_log(uninterrupted / "warnings.jsonl")


@pytest.mark.slow
def test_a_healthy_run_is_not_warned_of_anything(tmp_path, capsys):
    flags = "--steps 10 --learning-rate 1e-4 --eval-every 5 --run-dir".split()
    train.main([*SMALL_FLAGS, *flags, str(tmp_path / "run")])
    assert (
        "WARNING" not in capsys.readouterr().err
        and read_log(tmp_path / "run" / "warnings.jsonl") == []
    )
