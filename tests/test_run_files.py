"""A run's directory: what its model card says."""

import pytest
from conftest import write_log

from config import Config
from disk import model_card
from settings.sources import to_yaml


@pytest.mark.parametrize(
    ("settings", "said"),
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
            "Qwen/Qwen3-0.6B@main, with the adapter warm, trained with GRPO by Gwen on chats.jsonl, 40 of 100 steps.",
        ),
        (
            {"model": "/home/ann/small", "loss_type": "distill", "teacher": "../ann/large"},
            "small, trained with distillation by Gwen on the task demo, by the teacher large, 40 of 100 steps.",
        ),
    ],
    ids=["grpo", "own", "begun", "distill"],
)
def test_a_model_card_says_how_it_was_trained_and_from_where_to_where_without_local_paths(
    tmp_path, settings, said
):
    (tmp_path / "config.yaml").write_text(to_yaml(Config.from_flags(task="demo", **settings)))
    its = {"eval/accuracy_ci95": 0.05, "eval/num": 9}
    write_log(
        tmp_path / "eval.jsonl",
        [its | {"step": step, "eval/accuracy": step / 40} for step in (0, 20)],
    )
    (tmp_path / "checkpoints" / "step-000040" / "adapter").mkdir(parents=True)
    card = model_card.make_model_card(str(tmp_path), None).splitlines()
    assert said in card and not any("ann" in line for line in card)
    rows = [line for line in card if line.startswith("| accuracy")]
    assert rows == ["| accuracy | 0 | 0.000 ± 0.050 | 9 |", "| accuracy | 20 | 0.500 ± 0.050 | 9 |"]
    assert ("base_model: Qwen/Qwen3-0.6B" in card) == ("Qwen/" in said)  # others are on no hub
