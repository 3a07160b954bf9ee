"""The benchmark of a step: phases add up, both engines do the work that was asked for, mistakes are named."""

import json
from importlib.util import find_spec

import pytest

import bench_step
from bench import harness

TINY = ["--model", "random:2m", "--batch", "2", "--groups", "2", "--prompt-tokens", "6", "--max-tokens", "3"]


@pytest.mark.slow
def test_ours_reports_seconds_by_phase_tokens_and_peak(capsys):
    bench_step.main([*TINY, "--runs", "2", "--warmup", "0", "--engines", "ours"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("Config: B=2 G=2 prompt=6 max_tokens=3 rank=16 model=random:2m")
    record = json.loads(lines[-1])
    entry = record["engines"]["ours"]
    assert entry["min_s"] <= entry["step_s"] <= entry["max_s"]
    assert entry["rollout_s"] + entry["reward_s"] + entry["update_s"] == pytest.approx(entry["step_s"], rel=0.5)
    assert entry["tok_s"] == pytest.approx(12 / entry["step_s"], rel=0.02)
    assert entry["peak_mb"] > 8


def test_every_step_of_ours_is_measured_and_trains(tmp_path):
    with harness.model_directory("random:2m") as directory:
        args = bench_step.parse([*TINY, "--token-budget", "7"])
        steps = bench_step.run_ours(args, directory, 3)
    assert [set(step) for step in steps] == [set(bench_step.PHASES)] * 3
    assert all(seconds >= 0 for step in steps for seconds in step.values())


@pytest.mark.skipif(
    not find_spec("mlx_lm_lora"),
    reason="a competitor, no dependency: uv run --with mlx-lm-lora pytest tests/test_bench_step.py",
)
@pytest.mark.parametrize("engine", bench_step.ENGINES[1:3])
def test_the_other_trainer_does_the_same_work(engine):
    with harness.model_directory("random:2m") as directory:
        args = bench_step.parse([*TINY, "--engine", engine])
        steps = bench_step.run_mlx_lm_lora(args, directory, 2)
    assert [set(step) for step in steps] == [set(bench_step.PHASES)] * 2


def needs(engine, flags):
    return pytest.mark.skipif(
        not all(map(find_spec, bench_step.PACKAGES[engine])),
        reason=f"a competitor, no dependency: uv run {flags} pytest tests/test_bench_step.py",
    )


RIVALS = [
    pytest.param("trl", bench_step.run_trl, marks=needs("trl", "--group trl --with peft")),
    pytest.param("unsloth_zoo", bench_step.run_unsloth_zoo, marks=needs("unsloth_zoo", "--with unsloth-zoo")),
]


@pytest.mark.parametrize(("engine", "run"), RIVALS)
def test_another_trainer_of_groups_does_the_same_work(engine, run):
    with harness.model_directory("random:2m") as directory:
        steps = run(bench_step.parse([*TINY, "--engine", engine]), directory, 2)
    assert [set(step) for step in steps] == [set(bench_step.PHASES)] * 2
    assert all(seconds > 0 for step in steps for seconds in step.values())


def test_where_an_engine_is_absent_one_line_says_so_and_the_others_run(monkeypatch, capsys):
    ran = []

    def child(args, directory, engine):
        ran.append(engine)
        return {"steps": [{"rollout": 1.0, "reward": 0.0, "update": 1.0}], "peak_bytes": 1e6}

    monkeypatch.setattr(bench_step, "child", child)
    monkeypatch.setattr(bench_step, "find_spec", lambda name: None if name in ("trl", "torch", "unsloth_zoo") else name)
    bench_step.main([*TINY, "--engines", "ours", "trl", "unsloth_zoo"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("trl is left out, without trl, torch: uv run --group trl") and ran == ["ours"]
    assert lines[1].startswith("unsloth_zoo is left out, without unsloth_zoo: uv run --with unsloth-zoo")
    assert set(json.loads(lines[-1])["engines"]) == {"ours"}


def test_the_reward_differs_within_every_group():
    for size in range(2, 20):
        assert len({bench_step.reward_of(place) for place in range(size)}) > 1


def test_medians_are_taken_over_all_processes():
    args = bench_step.parse(["--engines", "ours", "--batch", "1", "--groups", "2", "--max-tokens", "5"])
    steps = [{"rollout": 1.0, "reward": 0.0, "update": seconds} for seconds in (1.0, 3.0, 8.0)]
    records = [{"steps": steps[:2], "peak_bytes": 5e6}, {"steps": steps[2:], "peak_bytes": 9e6}]
    entry = bench_step.summary(args, records)
    assert (entry["step_s"], entry["update_s"], entry["min_s"], entry["max_s"]) == (4.0, 3.0, 2.0, 9.0)
    assert (entry["tok_s"], entry["peak_mb"]) == (2.5, 9.0)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--groups", "1"], "--groups is 1; it must be at least 2"),
        (["--engines", "verl"], "--engines: invalid choice"),
        (["--engines", "ours", "--model", "random:7b"], "--model random:7b: the random models are"),
    ],
)
def test_a_mistake_is_answered_in_one_line(flags, said, capsys):
    with pytest.raises(SystemExit) as ended:
        bench_step.main(flags)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.slow
def test_a_missing_competitor_is_named_with_the_command_that_brings_it(capsys, monkeypatch):
    monkeypatch.setattr(bench_step, "find_spec", lambda name: None)
    with pytest.raises(SystemExit) as ended:
        bench_step.main([])
    assert ended.value.code == 2
    assert "uv run --with mlx-lm-lora bench_step.py" in capsys.readouterr().err
