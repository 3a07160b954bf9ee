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
from conftest import read_log
from extras import needs
from mlx_lm.tuner import callbacks

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
        monkeypatch.setattr(callbacks, "wandb", wandb)
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


@pytest.mark.slow
@needs("wandb")
def test_wandb_keeps_a_run_on_disk(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    train.main([*SMALL, "--run-dir", str(tmp_path / "run"), "--report-to", "wandb"])
    (folder,) = (tmp_path / "run" / "wandb").glob("offline-run-*")
    (file,) = folder.glob("run-*.wandb")
    content = file.read_bytes()
    record = read_log(tmp_path / "run" / "metrics.jsonl")[-1]
    assert b"reward/mean" in content and json.dumps(record["reward/mean"]).encode() in content
