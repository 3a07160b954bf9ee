"""The benchmark of a step: all engines do the requested work, and errors name the engine."""

import itertools
import json
import shlex
import subprocess
import sys
from importlib.util import find_spec

import pytest

from bench import harness, step
from disk import hub

TINY = "--model random:2m --batch 2 --groups 2 --prompt-tokens 6 --max-tokens 3".split()


@pytest.mark.slow
def test_the_benchmark_reports_seconds_tokens_and_peak_memory_of_gwen(capsys):
    step.main([*TINY, "--runs", "2", "--warmup", "0", "--engines", "ours"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("Config: B=2 G=2 prompt=6 max_tokens=3 rank=16 model=random:2m")
    entry = json.loads(lines[-1])["engines"]["ours"]
    assert 0 < entry["min_s"] <= entry["step_s"] <= entry["max_s"]
    assert entry["cpu_s"] > 0
    assert entry["tok_s"] == pytest.approx(12 / entry["step_s"], rel=0.02)
    assert entry["peak_mb"] > 8


def rival_parameter(engine):
    """Returns a parameter that is skipped if the packages of the engine are not installed."""
    command = shlex.join(step.engine_command(engine)).partition(" python")[0]
    reason = f"a rival in benchmarks: {command} pytest"
    return pytest.param(engine, marks=pytest.mark.skipif(not find_spec(engine), reason=reason))


RIVALS = [rival_parameter(engine) for engine in step.ENGINES if engine != "ours"]


@pytest.mark.parametrize("engine", RIVALS)
def test_every_rival_does_the_work_and_times_every_step(engine, tmp_path):
    with harness.model_directory("random:2m") as directory:
        args = step.parse_flags(
            [*TINY, "--engine", engine, "--model", str(directory), "--runs", "1"]
        )
        steps = step.StepTimes(args, directory)
        step.ENGINES[engine].run(args, directory, steps, str(tmp_path))
    assert len(steps) == 2
    for times in steps:
        assert times.keys() == {"step_s", "cpu_s"}
        assert min(times.values()) > 0


def test_neighbours_have_different_rewards_and_a_wrong_completion_length_is_an_error():
    steps = step.StepTimes(step.parse_flags([]), hub.DEMO)
    rewards = steps.arbitrary_varied_rewards([""] * 40, completion_ids=[[1, 2]] * 40)
    assert all(first != second for first, second in itertools.pairwise(rewards))
    with pytest.raises(AssertionError, match=r"completions of .2. tokens"):
        steps.record_step_time()


def test_the_report_compares_the_medians_over_all_processes(capsys):
    args = step.parse_flags(["--batch", "5", "--groups", "2", "--max-tokens", "1"])
    measurements = [
        {"engine": engine, "step_s": seconds, "cpu_s": 3 * seconds, "peak_mb": peak}
        for engine, seconds, peak in [
            ("ours", 2.0, 5.0),
            ("ours", 4.0, 5.0),
            ("ours", 9.0, 9.0),
            ("trl", 8.0, 18.0),
        ]
    ]
    step.print_table_and_json(args, measurements)

    *_, result, last_line = capsys.readouterr().out.splitlines()
    record = json.loads(last_line)
    assert record["engines"]["ours"] == {
        "step_s": 4.0,
        "cpu_s": 12.0,
        "min_s": 2.0,
        "max_s": 9.0,
        "tok_s": 2.5,
        "peak_mb": 9.0,
    }
    assert record["ratios"]["trl"] == 2.0
    assert result == (
        "Result: ours is 2.00x faster than trl, with 0.50 times the processor time "
        "and 0.50 times the peak memory of trl"
    )


def test_engines_alternate_in_processes_and_a_failing_engine_is_named(monkeypatch):
    args = step.parse_flags(["--rounds", "2", "--engines", "ours", "trl"])
    commands = []
    process = subprocess.CompletedProcess([], 0, "[]", "warning\nlast line")

    def record_command(command, **_):
        commands.append(command)
        return process

    monkeypatch.setattr(step.subprocess, "run", record_command)
    step.run_engines_in_processes(args, "DIR")
    engines = [command[command.index("--engine") + 1] for command in commands]
    assert engines == ["ours", "trl", "trl", "ours"]
    gwen_arguments = "-m bench.step --engine ours --model DIR --batch 4".split()
    assert commands[0][:9] == [sys.executable, *gwen_arguments]
    # pinned packages, which replace those of this environment
    packages = "--with trl==1.16.0 --with peft==0.21.2 --with torch==2.15.0"
    trl_command = f"uv run -q --no-sync {packages} python -m bench.step --engine trl"
    assert commands[1][:15] == trl_command.split()

    process.returncode = 3
    with pytest.raises(ValueError, match=r"ours failed with exit status 3: \['last line'\]"):
        step.run_engines_in_processes(args, "DIR")
