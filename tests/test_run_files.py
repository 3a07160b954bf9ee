"""The directory of a run: the model card."""

import pytest
from conftest import write_log

from config import Config
from disk import model_card
from settings.sources import to_yaml


@pytest.mark.parametrize(
    ("settings", "expected_line"),
    [
        ({"model": "demo"}, "demo, trained with GRPO by Gwen on the task demo, 40 of 100 steps."),
        (
            {"model": "demo", "data": "/ann/b,../ann/d"},
            "demo, trained with GRPO by Gwen on b, held out d, 40 of 100 steps.",
        ),
        (
            {
                "model": "Qwen/Qwen3-0.6B@main",
                "init_adapter": "/home/ann/warm",
                "data": "/home/ann/chats.jsonl",
            },
            "Qwen/Qwen3-0.6B@main, with the adapter warm, trained with GRPO by Gwen "
            "on chats.jsonl, 40 of 100 steps.",
        ),
        (
            {"model": "/home/ann/small", "loss_type": "distill", "teacher": "../ann/large"},
            "small, trained with distillation by Gwen on the task demo, by the teacher large, "
            "40 of 100 steps.",
        ),
    ],
    ids=["grpo", "data", "init adapter", "distill"],
)
def test_a_model_card_describes_training_and_evaluations_without_local_paths(
    tmp_path, settings, expected_line
):
    (tmp_path / "config.yaml").write_text(to_yaml(Config.from_flags(task="demo", **settings)))
    evaluations = [
        {"step": step, "eval/accuracy": accuracy, "eval/accuracy_ci95": 0.05, "eval/num": 9}
        for step, accuracy in ((0, 0.0), (20, 0.5))
    ]
    write_log(tmp_path / "eval.jsonl", evaluations)
    (tmp_path / "checkpoints" / "step-000040" / "adapter").mkdir(parents=True)

    lines = model_card.make_model_card(str(tmp_path), None).splitlines()

    assert expected_line in lines
    assert not any("ann" in line for line in lines)
    table_rows = [line for line in lines if line.startswith("| accuracy")]
    assert table_rows == [
        "| accuracy | 0 | 0.000 ± 0.050 | 9 |",
        "| accuracy | 20 | 0.500 ± 0.050 | 9 |",
    ]
    is_on_hub = "Qwen/" in expected_line
    assert ("base_model: Qwen/Qwen3-0.6B" in lines) == is_on_hub
