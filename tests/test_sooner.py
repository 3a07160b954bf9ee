"""How soon runs reach an accuracy, according to their logs."""

import json
import math

import pytest
import yaml
from conftest import catch_message, write_log

from bench import sooner
from reporting import history, seeds


def write_run(folder, accuracies, cpu_seconds=None, **settings):
    """A run of ten steps with an evaluation after every second step."""
    folder.mkdir(parents=True)
    defaults = {"model": "demo", "batch": 8, "groups": 8, "seed": int(folder.name[-1])}
    (folder / "config.yaml").write_text(yaml.safe_dump(defaults | settings))
    steps = [
        {"step": number, "update/rows": 32, "sampling/signal_groups": 4} for number in range(1, 11)
    ]
    write_log(folder / "metrics.jsonl", steps)
    evaluations = [
        {"step": 2 * number, "eval/accuracy": accuracy}
        for number, accuracy in enumerate(accuracies)
    ]
    write_log(folder / "eval.jsonl", evaluations)
    if cpu_seconds is not None:
        (folder / sooner.CPU_SECONDS).write_text(json.dumps(cpu_seconds))


def test_a_run_reaches_an_accuracy_at_the_first_of_two_evaluations_above_it(tmp_path):
    reaching = tmp_path / "a/seed-0"
    write_run(reaching, [0.2, 0.9, 0.7, 0.8, 0.9, 0.7], [0.5] * 10)
    costs = sooner.costs_to_reach_accuracy(history.load_history(reaching), 0.8)
    assert costs["steps"] == 6
    assert costs["rows"] == 192
    assert costs["cpu_s"] == 3.0

    too_late = tmp_path / "b/seed-0"
    write_run(too_late, [0.2, 0.2, 0.2, 0.2, 0.2, 0.9])
    costs = sooner.costs_to_reach_accuracy(history.load_history(too_late), 0.8)
    assert set(costs.values()) == {math.inf}


def test_fewer_rows_and_fewer_layers_need_less_estimated_time_on_a_chip(tmp_path):
    for name, layers in (("all", "auto"), ("half", 2)):
        write_run(tmp_path / f"{name}/seed-0", [0.9] * 6, lora_layers=layers)
    run_of_all = history.load_history(tmp_path / "all/seed-0")
    run_of_half = history.load_history(tmp_path / "half/seed-0")
    steps = run_of_all.steps
    steps_of_fewer_rows = [step | {"update/rows": 8} for step in steps]

    estimate_seconds = sooner.estimate_scaled_up_seconds_by_chip
    all_layers = estimate_seconds(run_of_all, steps)
    half_layers = estimate_seconds(run_of_half, steps)
    quarter_rows = estimate_seconds(run_of_all, steps_of_fewer_rows)
    assert half_layers["M4"] < all_layers["M4"]
    assert quarter_rows["M4"] < all_layers["M4"]
    assert all_layers["M4 Max"] < all_layers["M4"]


def test_the_table_compares_each_seed_with_the_same_seed_of_the_first_variant(tmp_path, capsys):
    slow = [0.2, 0.3, 0.4, 0.8, 0.8, 0.8]
    fast = [0.2, 0.8, 0.8, 0.8, 0.8, 0.9]
    for seed in range(2):
        write_run(tmp_path / f"slow/seed-{seed}", slow, [1.0 + seed] * 10)
        write_run(tmp_path / f"fast/seed-{seed}", fast, [1.0 + seed] * 10, train_completions=4)
    sooner.main(["--line", "0.8", str(tmp_path / "slow"), str(tmp_path / "fast")])
    lines = capsys.readouterr().out.splitlines()
    cells = [cell.strip() for cell in lines[3].strip("|").split("|")]
    assert cells[:4] == ["fast", "2", "0.900", "+0.100 \u00b1 0.000"]
    assert cells[4] == "2"
    assert cells[9] == "0.33"
    record = json.loads(lines[4])
    assert record["variants"][1]["costs"]["1"]["cpu_s"] == 4.0


def test_runs_with_different_settings_of_the_method_belong_to_different_seed_groups(tmp_path):
    write_run(tmp_path / "a/seed-0", [0.5] * 6)
    write_run(tmp_path / "b/seed-1", [0.5] * 6, train_completions=4)
    write_run(tmp_path / "c/seed-2", [0.5] * 6, epsilon_high=0.3)
    write_run(tmp_path / "d/seed-3", [0.5] * 6, rollout_batch_size=16)
    folders = [tmp_path / name for name in "abcd"]
    groups = seeds.load_seed_groups([next(folder.iterdir()) for folder in folders])
    assert sorted(len(group.runs) for group in groups) == [1, 1, 2]


@pytest.mark.slow
def test_missing_runs_are_trained_and_record_the_processor_seconds_of_each_step(
    tmp_path, monkeypatch
):
    flags = "--task demo --steps 2 --batch 2 --groups 4 --eval-every 2 --eval-limit 8"
    monkeypatch.setitem(sooner.TASKS, "demo", sooner.BenchmarkTask(flags, 0.0, 4))
    arguments = ["--task", "demo", "--num-seeds", "1", "--out", str(tmp_path), "--variants"]
    sooner.main([*arguments, "8 of 8", "8 of 8, half the layers"])
    for name in ("8-of-8", "8-of-8-half-the-layers"):
        cpu_file = tmp_path / "demo" / name / "seed-0" / sooner.CPU_SECONDS
        seconds = json.loads(cpu_file.read_text())
        assert len(seconds) == 2
        assert min(seconds) > 0


def test_an_unknown_variant_is_refused_with_the_names_of_the_known_ones():
    task = sooner.TASKS["demo"]
    assert "'3 of 8'" in catch_message(lambda: sooner.choose_variant_flags(task, ["3 of 8"]))
    assert "trl" in catch_message(lambda: sooner.choose_variant_flags(task, ["trl"]))


def test_the_flags_of_the_command_follow_those_of_the_task(tmp_path, monkeypatch):
    commands = []
    monkeypatch.setattr(
        sooner.subprocess, "run", lambda command, **options: commands.append(command)
    )
    monkeypatch.setattr(sooner.seeds, "load_seed_groups", lambda folders: [])
    monkeypatch.setattr(sooner, "print_accuracies_and_costs", lambda groups, accuracy: None)
    flags = ["--num-seeds", "1", "--variants", "2 of 8", "--out", str(tmp_path)]
    sooner.main(["--task", "demo", *flags, "--train-flags", "--steps 30 --eval-every 1"])

    (command,) = commands
    settings = sooner.sources.parse_flags(command[command.index("--train-one") + 2 :])
    assert settings.steps == "30"
    assert settings.eval_every == "1"
    assert settings.train_completions == "2"
