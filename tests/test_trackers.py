"""
Trackers get what a run records, and whatever they do, the run ends as without them.

A fake W&B takes the real one's place. `uv run --extra wandb pytest tests/test_trackers.py` runs
the last test too.
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

SMALL = [
    "--model",
    "demo",
    "--steps",
    "2",
    "--batch",
    "2",
    "--groups",
    "2",
    "--max-tokens",
    "8",
    "--eval-limit",
    "4",
]


@pytest.mark.slow
def test_a_run_ends_as_without_a_tracker_that_works_or_fails(tmp_path, monkeypatch, capsys):
    train.main([*SMALL, "--run-dir", str(tmp_path / "plain")])
    for broken in (None, "init", "log", "finish"):
        wandb = mock.MagicMock(__spec__=importlib.util.spec_from_loader("wandb", None))
        run = tmp_path / str(broken)
        if broken:
            getattr(wandb, broken).side_effect = OSError("the wire is cut")
        monkeypatch.setitem(sys.modules, "wandb", wandb)
        wandb.Error = OSError
        capsys.readouterr()
        train.main([*SMALL, "--run-dir", str(run), "--report-to", "wandb"])
        warned = "WARNING: no more metrics of this run are sent to wandb, because of this error: OSError: the wire is cut"
        assert capsys.readouterr().err.count(warned) == (broken is not None)
        for name in ("rollouts.jsonl", "eval_answers.jsonl", "adapter/adapters.safetensors"):
            assert (tmp_path / "plain" / name).read_bytes() == (run / name).read_bytes()
        if broken is None:
            init_settings = wandb.init.call_args.kwargs
            assert (init_settings["project"], init_settings["name"]) == (
                "gwen",
                "None",
            ) and wandb.finish.called
            assert init_settings["config"] == yaml.safe_load((run / "config.yaml").read_text())
            sent = [(call.kwargs["step"], call.args[0]) for call in wandb.log.call_args_list]
            written = read_log(run / "metrics.jsonl") + read_log(run / "eval.jsonl")
            for record in written:
                step = record.pop("step")
                figures = {name: value for name, value in record.items() if value is not None}
                assert (step, figures | {"iteration": step}) in sent
            assert len(sent) == len(written) == 4


def test_a_tracker_that_is_not_installed_is_a_users_mistake_with_the_command_that_installs_it(
    monkeypatch, check_refusal
):
    monkeypatch.setattr(trackers.importlib.util, "find_spec", lambda name: None)
    pattern = "--report-to swanlab needs .*: uv run --extra swanlab$"
    check_refusal(train.main, ["--model", "demo", "--report-to", "swanlab"], pattern)


def test_a_missing_or_malformed_key_is_refused_before_the_start_with_the_way_without_one(
    tmp_path, monkeypatch, check_refusal
):
    class UsageError(Exception):
        pass

    wandb = mock.MagicMock(__spec__=importlib.util.spec_from_loader("wandb", None))
    swanlab = mock.MagicMock(__spec__=importlib.util.spec_from_loader("swanlab", None))
    wandb.Error = UsageError
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setitem(sys.modules, "swanlab", swanlab)
    wandb.setup().settings.mode = "online"
    wandb.login.return_value = False
    swanlab.Settings().mode = "online"
    swanlab.Settings().api_key = None

    def refuse(name, pattern):
        flags = [*SMALL, "--run-dir", tmp_path / "run", "--report-to", name]
        check_refusal(train.main, flags, pattern)
        assert not (tmp_path / "run").exists()

    refuse("wandb", "--report-to wandb: W&B has no API key; .* WANDB_API_KEY .* WANDB_MODE=offline")
    refuse("swanlab", "--report-to swanlab: SwanLab has no API key; .* SWANLAB_MODE=offline")
    wandb.login.side_effect = UsageError("WANDB_API_KEY invalid: it has 3 characters.")
    refuse("wandb", "WANDB_API_KEY invalid: it has 3 characters; set .* WANDB_MODE=offline")

    wandb.setup().settings.mode = "offline"
    swanlab.Settings().mode = "offline"
    trackers.check_trackers(["wandb", "swanlab"])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["wandb", "swanlab"])
def test_a_resumed_run_continues_its_run_at_the_tracker(tmp_path, monkeypatch, name):
    tracker = mock.MagicMock(__spec__=importlib.util.spec_from_loader(name, None))
    monkeypatch.setitem(sys.modules, name, tracker)
    monkeypatch.delenv(f"{name.upper()}_RUN_ID", raising=False)
    for run in ("one", "two"):
        train.main([*SMALL, "--run-dir", str(tmp_path / run), "--report-to", name])
    train.main(["--resume", str(tmp_path / "one"), "--steps", "3"])
    first, second, resumed = [call.kwargs for call in tracker.init.call_args_list]
    assert first["id"] == resumed["id"] != second["id"]
    assert first["resume"] == resumed["resume"] == "allow"
    assert first["id"].isalnum() and len(first["id"]) == 21
    assert tracker.log.call_args.kwargs["step"] == 3

    monkeypatch.setenv(f"{name.upper()}_RUN_ID", "mine")
    assert trackers.read_or_make_tracker_run_id(name, tmp_path / "one") == "mine"


@pytest.mark.slow
@needs("wandb")
def test_wandb_refuses_a_run_without_a_key_and_asks_neither_user_nor_server(tmp_path):
    home = {"HOME": str(tmp_path), "NETRC": str(tmp_path / "netrc"), "WANDB_MODE": "online"}
    flags = [*SMALL, "--run-dir", str(tmp_path / "run"), "--report-to", "wandb"]
    for key, problem in (("", "W&B has no API key"), ("abc", "WANDB_API_KEY invalid")):
        done = run_command("train.py", *flags, environment=home | {"WANDB_API_KEY": key})
        assert done.returncode == 2 and problem in done.stderr, done.stderr
        assert "WANDB_MODE=offline" in done.stderr and not (tmp_path / "run").exists()


@pytest.mark.slow
@needs("wandb")
def test_wandb_keeps_a_run_on_disk(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    train.main([*SMALL, "--run-dir", str(tmp_path / "run"), "--report-to", "wandb"])
    (folder,) = (tmp_path / "run" / "wandb").glob("offline-run-*")
    (file,) = folder.glob("run-*.wandb")
    train.main(["--resume", str(tmp_path / "run"), "--steps", "3"])
    resumed, *_ = (tmp_path / "run" / "wandb").glob("offline-run-*")
    assert resumed.name.rpartition("-")[2] == folder.name.rpartition("-")[2], "the same W&B run"
    content = file.read_bytes()
    record = read_log(tmp_path / "run" / "metrics.jsonl")[1]
    assert b"reward/mean" in content and json.dumps(record["reward/mean"]).encode() in content
