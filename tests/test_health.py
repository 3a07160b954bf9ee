"""Each illness on figures that show it, on figures that almost do, and in a run."""

import pytest
from conftest import read_log
from small_run import SMALL

import train
from reporting import health

STEP = {
    "sampling/signal_groups": 4,
    "reward/mean": 0.5,
    "entropy": 1.0,
    "completion/mean_tokens": 10.0,
    "completion/truncated_frac": 0.1,
    "mismatch/over_cap_frac": 0.0,
}


def steps_of(key, *values, then=(), num_then=5):
    """Steps that differ in one figure: its values, then five times each further one."""
    values = [*values, *(value for value in then for _ in range(num_then))]
    return [STEP | {"step": number + 1, key: value} for number, value in enumerate(values)]


def evals_of(*figures, key="eval/accuracy", every=20, ci95=0.04):
    return [{"step": every * i, key: figure, f"{key}_ci95": ci95} for i, figure in enumerate(figures)]


def names(steps, evals=()):
    return [finding.name for finding in health.examine(list(steps), list(evals))]


def changed_last(steps, key, value):
    """Steps whose last three have another figure too."""
    return steps[:-3] + [step | {key: value} for step in steps[-3:]]


PACE = [10.0, 11, 9, 10, 12, 10]
RISING = [0.3 + 0.01 * step + 0.02 * (step % 2) for step in range(20)]
SCORES = [
    {"step": step, "eval/score": score, "eval/score_ci95": 0.1, "eval/witness": witness, "eval/witness_ci95": 0.1}
    for step, score, witness in ((0, 0.2, 0.3), (20, 0.8, 0.31), (40, 0.8, 0.8))
]

COPIES = {"completion/degenerate_frac": 0.01, "completion/repeated": 0.0}


def cheating(rewards, key, last):
    """Twenty steps with these rewards, the last ten of which have another figure."""
    steps = [STEP | COPIES | {"step": number + 1, "reward/mean": reward} for number, reward in enumerate(rewards)]
    return steps[:10] + [step | {key: last} for step in steps[10:]]


TOOLS = [STEP | {"tools/calls": 10, "tools/failures": number} for number in (9, 9, 9, 9, 9, 1, 1, 1, 1, 1)]
ILL_AND_WELL = {
    "no signal": [
        ((steps_of("sampling/signal_groups", 3, 0, 0, 0, 0, 0),), (steps_of("sampling/signal_groups", 0, 0, 0, 0, 1),)),
        ((steps_of("sampling/signal_groups", 0, 0, 0, 0, 0),), (steps_of("sampling/signal_groups", 0, 0, 0, 0),)),
    ],
    "tools fail": [((TOOLS[:5],), (TOOLS,)), ((TOOLS[:5],), (TOOLS[:4],))],
    "reward without gain": [
        (
            (steps_of("reward/mean", *RISING), evals_of(0.5, 0.4)),
            (steps_of("reward/mean", *RISING), evals_of(0.5, 0.46)),  # within both intervals
        ),
        (
            (steps_of("reward/mean", *RISING), evals_of(0.5, 0.4, key="eval/score")),
            (steps_of("reward/mean", *RISING[::-1]), evals_of(0.5, 0.4)),
        ),
        (
            (steps_of("reward/mean", *RISING), evals_of(0.5, 0.45, 0.4, every=10)),
            (steps_of("reward/mean", *[0.3, 0.6, 0.5, 0.4] * 5), evals_of(0.5, 0.4)),  # noise
        ),
    ],
    "entropy": [
        ((steps_of("entropy", then=(1.0, 0.09)),), (steps_of("entropy", then=(1.0, 0.11)),)),
        ((steps_of("entropy", then=(1.0, 0.5, 0.01)),), (steps_of("entropy", then=(1.0, None)),)),
    ],
    "length": [
        (
            (steps_of("completion/mean_tokens", then=(10.0, 20.5)),),
            (steps_of("completion/mean_tokens", *[10.0] * 9, 40.0),),  # one step is none
        ),
        ((steps_of("completion/mean_tokens", then=(4, 9)),), (steps_of("completion/mean_tokens", then=(10, 19)),)),
    ],
    "form": [
        (
            (cheating(RISING, "completion/degenerate_frac", 0.05),),
            (cheating(RISING, "completion/degenerate_frac", 0.03),),
        ),
        (
            (cheating(RISING, "completion/repeated", 0.04),),
            (cheating(RISING[::-1], "completion/repeated", 0.04),),  # what no reward pays for is another illness
        ),
    ],
    "truncated": [
        (
            (steps_of("completion/truncated_frac", then=(0.6,)),),
            (steps_of("completion/truncated_frac", then=(0.6, 0.5)),),
        ),
    ],
    "slow": [
        ((steps_of("step/s", *PACE, 31, 40, 33),), (steps_of("step/s", *PACE, 31, 12, 33),)),
        ((steps_of("step/s", *PACE, 31, 40, 33),), (steps_of("step/s", *PACE, 29, 29, 29),)),
        (
            (steps_of("step/s", *PACE, 31, 40, 33),),
            (changed_last(steps_of("step/s", *PACE, 31, 40, 33), "completion/mean_tokens", 40.0),),  # longer
        ),
        (
            (steps_of("step/s", *PACE, 31, 40, 33),),
            (changed_last(steps_of("step/s", *PACE, 31, 40, 33), "sampling/draws", 4),),  # more of them
        ),
    ],
    "mismatch": [
        (
            (steps_of("mismatch/over_cap_frac", then=(0.011,)),),
            (steps_of("mismatch/over_cap_frac", then=(0.009,)),),
        ),
    ],
    "collapse": [
        (([], evals_of(0.5, 0.2)), ([], evals_of(0.5, 0.26))),
        (([], evals_of(0.3, 0.9, 0.4)), ([], evals_of(0.3, 0.7, 0.4))),  # against the best
        (([], evals_of(0.6, 0.2, ci95=0.2)), ([], evals_of(0.6, 0.2, ci95=0.4))),  # of few problems
        (([], evals_of(0.2, -0.3, key="eval/score")), ([], evals_of(-0.1, -0.3, key="eval/score"))),
    ],
    "judge without witness": [
        (([], SCORES[:2]), ([], SCORES)),
        (([], SCORES[:2]), ([], [SCORES[0], SCORES[1] | {"eval/score": 0.3}])),
    ],
}


def test_every_illness_is_tested():
    assert [name for name, *_ in health.ILLNESSES] == list(ILL_AND_WELL)


@pytest.mark.parametrize(
    ("name", "ill", "well"),
    [(name, ill, well) for name, pairs in ILL_AND_WELL.items() for ill, well in pairs],
)
def test_an_illness_is_found_where_it_is_and_nowhere_near(name, ill, well):
    assert names(*ill) == [name]
    assert names(*well) == []


def test_what_is_found_says_what_is_seen_and_what_to_try_in_one_line():
    (found,) = health.examine(steps_of("entropy", then=(1.0, 0.09)), [])
    assert found.text.startswith("The entropy fell from 1.000 to 0.090 nats a token")
    assert "Try a lower --learning-rate" in found.text and "\n" not in found.text


def test_a_run_that_measured_nothing_yet_has_no_illness():
    assert names([]) == [] and names([{"step": 1}] * 20, [{"step": 0}, {"step": 20}]) == []


# ---- in a run


@pytest.mark.slow
def test_a_constant_reward_is_warned_of_once_and_not_again_where_the_run_goes_on(tmp_path, capsys):
    (tmp_path / "mine.py").write_text("def same(completions, **_): return [0.7] * len(completions)\n")
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    flags = [*SMALL, "--reward", f"{tmp_path / 'mine.py'}:same", "--eval-every", "0", "--warmup-steps", "99"]
    train.main([*flags, "--steps", "8", "--run-dir", str(whole)])
    shown = capsys.readouterr()
    (warned,) = read_log(whole / "warnings.jsonl")
    assert (warned["step"], warned["name"]) == (5, "no signal")
    assert [line for line in shown.err.splitlines() if line and not line.startswith("... ")] == [
        f"WARNING after step 5: {warned['text']}."
    ]
    assert "warned after step 5: no signal" in shown.out
    assert all(line.endswith(" | no step") for line in shown.out.splitlines() if line.startswith("step "))

    train.main([*flags, "--steps", "4", "--run-dir", str(cut)])
    train.main(["--resume", str(cut), "--steps", "6"])  # the four steps before count
    assert capsys.readouterr().err.count("WARNING after step 5") == 1
    train.main(["--resume", str(cut), "--steps", "8"])
    assert "WARNING" not in capsys.readouterr().err
    assert read_log(cut / "warnings.jsonl") == read_log(whole / "warnings.jsonl")


@pytest.mark.slow
def test_a_warning_of_steps_that_are_taken_back_is_given_again(tmp_path, capsys):
    (tmp_path / "mine.py").write_text("def same(completions, **_): return [0.7] * len(completions)\n")
    flags = [*SMALL, "--reward", f"{tmp_path / 'mine.py'}:same", "--eval-every", "0", "--save-every", "4"]
    train.main([*flags, "--steps", "6", "--run-dir", str(tmp_path / "run")])
    (tmp_path / "run" / "checkpoints" / "step-000006").rename(tmp_path / "gone")
    capsys.readouterr()
    train.main(["--resume", str(tmp_path / "run")])
    assert capsys.readouterr().err.count("WARNING after step 5") == 1
    assert [warned["step"] for warned in read_log(tmp_path / "run" / "warnings.jsonl")] == [5]


@pytest.mark.slow
def test_a_healthy_run_is_not_warned_of_anything(tmp_path, capsys):
    train.main(
        [*SMALL, "--steps", "12", "--learning-rate", "1e-4", "--eval-every", "6", "--run-dir", str(tmp_path / "run")]
    )
    assert "WARNING" not in capsys.readouterr().err and read_log(tmp_path / "run" / "warnings.jsonl") == []
