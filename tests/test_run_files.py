"""A run's directory: what its model card says."""

import json

import pytest
from conftest import write_log

from config import Config
from disk import run_files
from settings.sources import as_yaml


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({}, "demo, trained with GRPO by Gwen on the task demo."),
        ({"loss_type": "sft", "data": "chats.jsonl"}, "demo, trained with SFT by Gwen on chats.jsonl."),
        (
            {"loss_type": "distill", "teacher": "large"},
            "demo, trained with distillation by Gwen on the task demo, by the teacher large.",
        ),
    ],
    ids=["grpo", "sft", "distill"],
)
def test_a_model_card_says_how_it_was_trained_and_from_where_to_where(tmp_path, settings, said):
    (tmp_path / "config.yaml").write_text(as_yaml(Config.of(model="demo", task="demo", **settings)))
    (tmp_path / "env.json").write_text(json.dumps({"versions": {"mlx": "1"}, "machine": "a laptop", "commit": None}))
    figures = [
        {"step": step, "eval/accuracy": step / 40, "eval/accuracy_ci95": 0.05, "eval/num": 9} for step in (0, 20)
    ]
    write_log(tmp_path / "eval.jsonl", figures)
    card = run_files.model_card(str(tmp_path), None).splitlines()
    assert said in card
    rows = [line for line in card if line.startswith("| accuracy")]
    assert rows == ["| accuracy | 0 | 0.000 ± 0.050 | 9 |", "| accuracy | 20 | 0.500 ± 0.050 | 9 |"]
    assert not any(line.startswith("base_model") for line in card)  # demo is on no hub
    assert "Made with MLX 1 on a laptop, at commit unknown." in card and "model: demo" in card


def test_a_model_card_names_a_hub_s_model_as_its_base_and_no_local_path(tmp_path):
    files = {"data": "/home/ann/sums.jsonl", "reward": ["/home/ann/mine.py:score"], "rubric": "sub/mine.yaml"}
    files |= {"tools": ["/home/ann/tools.py:add"], "env": "a=/home/ann/games.py:A,b=/home/ann/games.py:B"}
    files |= {"init_adapter": "../runs/first", "judge_url": "http://host/v1", "judge_model": "served"}
    (tmp_path / "config.yaml").write_text(as_yaml(Config.of(model="Qwen/Qwen3-0.6B@main", task="values", **files)))
    (tmp_path / "env.json").write_text(json.dumps({"versions": {"mlx": "1"}, "machine": "m", "commit": None}))
    (tmp_path / "eval.jsonl").touch()
    card = run_files.model_card(str(tmp_path), None)
    assert "base_model: Qwen/Qwen3-0.6B\n" in card
    assert "by Gwen on sums.jsonl." in card and "- mine.py:score\n" in card and "rubric: mine.yaml\n" in card
    assert "init_adapter: first\n" in card and "judge_url: http://host/v1\n" in card
    assert "ann" not in card and "../" not in card
    assert not run_files.is_hub_id("demo") and not run_files.is_hub_id("/models/mine")
