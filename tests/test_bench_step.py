"""The benchmark of a step: all engines do the work that was asked for, mistakes are named."""

import itertools
import json
import shlex
import subprocess
import sys
from importlib.util import find_spec

import pytest

from bench import harness, step
from disk import hub

TINY = [
    "--model",
    "random:2m",
    "--batch",
    "2",
    "--groups",
    "2",
    "--prompt-tokens",
    "6",
    "--max-tokens",
    "3",
]


@pytest.mark.slow
def test_ours_reports_seconds_tokens_and_peak(capsys):
    step.main([*TINY, "--runs", "2", "--warmup", "0", "--engines", "ours"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("Config: B=2 G=2 prompt=6 max_tokens=3 rank=16 model=random:2m")
    entry = json.loads(lines[-1])["engines"]["ours"]
    assert 0 < entry["min_s"] <= entry["step_s"] <= entry["max_s"] and entry["cpu_s"] > 0
    assert entry["tok_s"] == pytest.approx(12 / entry["step_s"], rel=0.02)
    assert entry["peak_mb"] > 8


def entrant(engine):
    """Skipped without its packages, which uv puts in front of ours."""
    command = shlex.join(step.engine_command(engine)).partition(" python")[0]
    reason = f"a rival in benchmarks: {command} pytest"
    return pytest.param(engine, marks=pytest.mark.skipif(not find_spec(engine), reason=reason))


@pytest.mark.parametrize("engine", [entrant(engine) for engine in step.ENGINES if engine != "ours"])
def test_every_rival_does_the_work_and_times_every_step(engine, tmp_path):
    with harness.model_directory("random:2m") as directory:
        args = step.parse_flags(
            [*TINY, "--engine", engine, "--model", str(directory), "--runs", "1"]
        )
        steps = step.StepTimes(args, directory)
        step.ENGINES[engine].run(args, directory, steps, str(tmp_path))
    assert [one.keys() for one in steps] == [{"step_s", "cpu_s"}] * 2 and all(
        min(one.values()) > 0 for one in steps
    )


def test_the_reward_differs_between_neighbours_and_completions_of_another_length_are_noticed():
    steps = step.StepTimes(step.parse_flags([]), hub.DEMO)
    rewards = steps.arbitrary_varied_rewards([""] * 40, completion_ids=[[1, 2]] * 40)
    assert all(one != other for one, other in itertools.pairwise(rewards))
    with pytest.raises(AssertionError, match=r"completions of .2. tokens"):
        steps.record_step_time()


def test_medians_are_taken_over_all_processes_and_ours_compared_with_each(capsys):
    args = step.parse_flags(["--batch", "5", "--groups", "2", "--max-tokens", "1"])
    taken = [("ours", 2.0, 5.0), ("ours", 4.0, 5.0), ("ours", 9.0, 9.0), ("trl", 8.0, 18.0)]
    names = ("engine", "step_s", "cpu_s", "peak_mb")
    step.print_table_and_json(
        args, [dict(zip(names, (name, s, 3 * s, peak), strict=True)) for name, s, peak in taken]
    )
    *_, result, last = capsys.readouterr().out.splitlines()
    ours = {"step_s": 4.0, "cpu_s": 12.0, "min_s": 2.0, "max_s": 9.0, "tok_s": 2.5, "peak_mb": 9.0}
    assert json.loads(last)["engines"]["ours"] == ours and json.loads(last)["ratios"]["trl"] == 2.0
    assert (
        result
        == "Result: ours is 2.00x faster than trl, with 0.50 times the processor time and 0.50 times the peak memory of trl"
    )


def test_processes_take_turns_and_one_that_fails_is_named(monkeypatch):
    args, ran = step.parse_flags(["--rounds", "2", "--engines", "ours", "trl"]), []
    done = subprocess.CompletedProcess([], 0, "[]", "warning\nlast line")
    monkeypatch.setattr(step.subprocess, "run", lambda command, **_: ran.append(command) or done)
    step.run_engines_in_processes(args, "DIR")
    assert [command[command.index("--engine") + 1] for command in ran] == [
        "ours",
        "trl",
        "trl",
        "ours",
    ]
    assert ran[0][:9] == [
        sys.executable,
        *"-m bench.step --engine ours --model DIR --batch 4".split(),
    ]
    packages = (
        "--with trl==1.16.0 --with peft==0.21.2 --with torch==2.15.0"  # pinned, in front of ours
    )
    assert (
        ran[1][:15] == f"uv run -q --no-sync {packages} python -m bench.step --engine trl".split()
    )
    done.returncode = 3
    with pytest.raises(ValueError, match=r"ours failed with exit status 3: \['last line'\]"):
        step.run_engines_in_processes(args, "DIR")
