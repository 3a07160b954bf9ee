"""A run's directory: what its model card says."""

import json

import pytest

from config import Config, as_yaml
from disk import run_files


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
    (tmp_path / "eval.jsonl").write_text("".join(json.dumps(figure) + "\n" for figure in figures))
    card = run_files.model_card(str(tmp_path), None).splitlines()
    assert said in card
    rows = [line for line in card if line.startswith("| accuracy")]
    assert rows == ["| accuracy | 0 | 0.000 ± 0.050 | 9 |", "| accuracy | 20 | 0.500 ± 0.050 | 9 |"]
    assert "Made with MLX 1 on a laptop, at commit unknown." in card and "model: demo" in card
