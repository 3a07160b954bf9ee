"""
Trackers receive the records of a run. A tracker that fails does not change the run.

A fake W&B replaces the real one. `uv run --extra wandb pytest tests/test_trackers.py` also runs
the tests with the real one.
"""

import importlib
import json
import sys
from unittest import mock

import pytest
import yaml
from conftest import read_log, run_command
from extras import needs

import train
from reporting import trackers

SMALL_FLAGS = "--model demo --steps 2 --batch 2 --groups 2 --max-tokens 8 --eval-limit 4".split()


def make_fake_module(name):
    return mock.MagicMock(__spec__=importlib.util.spec_from_loader(name, None))


@pytest.mark.slow
def test_a_run_with_a_working_or_failing_tracker_ends_like_a_run_without_one(
    tmp_path, monkeypatch, capsys
):
    plain_run = tmp_path / "plain"
    train.main([*SMALL_FLAGS, "--run-dir", str(plain_run)])
    warning = (
        "WARNING: no more metrics of this run are sent to wandb, because of this error: "
        "OSError: the wire is cut"
    )
    for broken_function in (None, "init", "log", "finish"):
        wandb = make_fake_module("wandb")
        wandb.Error = OSError
        if broken_function:
            getattr(wandb, broken_function).side_effect = OSError("the wire is cut")
        monkeypatch.setitem(sys.modules, "wandb", wandb)
        capsys.readouterr()
        run = tmp_path / str(broken_function)
        train.main([*SMALL_FLAGS, "--run-dir", str(run), "--report-to", "wandb"])

        assert capsys.readouterr().err.count(warning) == (broken_function is not None)
        for name in ("rollouts.jsonl", "eval_answers.jsonl", "adapter/adapters.safetensors"):
            assert (plain_run / name).read_bytes() == (run / name).read_bytes()
        if broken_function is None:
            check_sent_records(wandb, run)


def check_sent_records(wandb, run):
    """Checks that W&B received the name, the settings and all records of a run."""
    init_settings = wandb.init.call_args.kwargs
    assert (init_settings["project"], init_settings["name"]) == ("gwen", "None")
    assert init_settings["config"] == yaml.safe_load((run / "config.yaml").read_text())
    assert wandb.finish.called

    sent_records = [(call.kwargs["step"], call.args[0]) for call in wandb.log.call_args_list]
    written_records = read_log(run / "metrics.jsonl") + read_log(run / "eval.jsonl")
    for record in written_records:
        step = record.pop("step")
        metrics = {name: value for name, value in record.items() if value is not None}
        assert (step, metrics | {"iteration": step}) in sent_records
    assert len(sent_records) == 4
    assert len(written_records) == 4


def test_a_tracker_that_is_not_installed_is_refused_with_the_command_that_installs_it(
    monkeypatch, check_refusal
):
    monkeypatch.setattr(trackers.importlib.util, "find_spec", lambda name: None)
    pattern = "--report-to swanlab needs .*: uv run --extra swanlab$"
    check_refusal(train.main, ["--model", "demo", "--report-to", "swanlab"], pattern)


def test_a_missing_or_malformed_key_is_refused_before_the_start_and_offline_needs_no_key(
    tmp_path, monkeypatch, check_refusal
):
    class UsageError(Exception):
        pass

    wandb = make_fake_module("wandb")
    wandb.Error = UsageError
    wandb.setup().settings.mode = "online"
    wandb.login.return_value = False
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    swanlab = make_fake_module("swanlab")
    swanlab.Settings().mode = "online"
    swanlab.Settings().api_key = None
    monkeypatch.setitem(sys.modules, "swanlab", swanlab)

    def check_key_refusal(name, pattern):
        flags = [*SMALL_FLAGS, "--run-dir", tmp_path / "run", "--report-to", name]
        check_refusal(train.main, flags, pattern)
        assert not (tmp_path / "run").exists()

    check_key_refusal(
        "wandb", "--report-to wandb: W&B has no API key; .* WANDB_API_KEY .* WANDB_MODE=offline"
    )
    check_key_refusal(
        "swanlab", "--report-to swanlab: SwanLab has no API key; .* SWANLAB_MODE=offline"
    )
    wandb.login.side_effect = UsageError("WANDB_API_KEY invalid: it has 3 characters.")
    check_key_refusal(
        "wandb", "WANDB_API_KEY invalid: it has 3 characters; set .* WANDB_MODE=offline"
    )

    wandb.setup().settings.mode = "offline"
    swanlab.Settings().mode = "offline"
    trackers.check_tracker_packages_and_keys(["wandb", "swanlab"])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["wandb", "swanlab"])
def test_a_resumed_run_continues_the_same_run_at_the_tracker(tmp_path, monkeypatch, name):
    tracker = make_fake_module(name)
    monkeypatch.setitem(sys.modules, name, tracker)
    monkeypatch.delenv(f"{name.upper()}_RUN_ID", raising=False)
    for run in ("one", "two"):
        train.main([*SMALL_FLAGS, "--run-dir", str(tmp_path / run), "--report-to", name])
    train.main(["--resume", str(tmp_path / "one"), "--steps", "3"])

    first, second, resumed = [call.kwargs for call in tracker.init.call_args_list]
    assert first["id"] == resumed["id"]
    assert first["id"] != second["id"]
    assert first["resume"] == "allow"
    assert resumed["resume"] == "allow"
    assert first["id"].isalnum()
    assert len(first["id"]) == 21
    assert tracker.log.call_args.kwargs["step"] == 3

    monkeypatch.setenv(f"{name.upper()}_RUN_ID", "mine")
    assert trackers.read_or_make_tracker_run_id(name, tmp_path / "one") == "mine"


@pytest.mark.slow
@needs("wandb")
def test_wandb_refuses_a_run_without_a_key_and_asks_neither_user_nor_server(tmp_path):
    environment = {"HOME": str(tmp_path), "NETRC": str(tmp_path / "netrc"), "WANDB_MODE": "online"}
    flags = [*SMALL_FLAGS, "--run-dir", str(tmp_path / "run"), "--report-to", "wandb"]
    for key, expected_text in (("", "W&B has no API key"), ("abc", "WANDB_API_KEY invalid")):
        environment["WANDB_API_KEY"] = key
        process = run_command("train.py", *flags, environment=environment)
        assert process.returncode == 2, process.stderr
        assert expected_text in process.stderr, process.stderr
        assert "WANDB_MODE=offline" in process.stderr
        assert not (tmp_path / "run").exists()


@pytest.mark.slow
@needs("wandb")
def test_wandb_keeps_an_offline_run_on_disk(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    run = tmp_path / "run"
    train.main([*SMALL_FLAGS, "--run-dir", str(run), "--report-to", "wandb"])
    (folder,) = (run / "wandb").glob("offline-run-*")
    (file,) = folder.glob("run-*.wandb")

    train.main(["--resume", str(run), "--steps", "3"])
    resumed_folder, *_ = (run / "wandb").glob("offline-run-*")
    run_id = folder.name.rpartition("-")[2]
    assert resumed_folder.name.rpartition("-")[2] == run_id, "the same W&B run"

    content = file.read_bytes()
    record = read_log(run / "metrics.jsonl")[1]
    assert b"reward/mean" in content
    assert json.dumps(record["reward/mean"]).encode() in content
