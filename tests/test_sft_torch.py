"""
The loss and gradient of supervised fine-tuning in transformers: its cross-entropy, float64, with the same mask.

`uv run --group peft pytest tests/test_sft_torch.py`.
"""

import mlx.core as mx
import numpy as np
import pytest
from extras import why
from mlx.utils import tree_flatten
from test_sft import SIZES, batches_of, count, random_rows

import gwen
import update
from config import Config
from disk import hub
from step.loss import StepLoss

torch = pytest.importorskip("torch", reason=why("torch"))


def step_of(model, rows):
    """Loss and gradient, float64, of one step on these rows in transformers."""
    total = 0.0
    for row in rows:
        labels = torch.full((1, len(row.ids)), -100)
        labels[0, row.places] = torch.tensor(row.ids)[row.places]
        share = len(row.places) / count(rows)
        loss = model(input_ids=torch.tensor([row.ids]), labels=labels).loss * share
        loss.backward()
        total += loss.item()
    return total, {key: weight.grad.double().numpy() for key, weight in model.named_parameters()}


@pytest.mark.parametrize("name", ["qwen2.5", "qwen3"])
def test_loss_and_gradient_equal_those_of_transformers_in_float64_but_for_float32s_rounding(checkpoints, name):
    from transformers import AutoModelForCausalLM

    rows = random_rows(320)
    (loss, exact), (_, single) = (
        step_of(AutoModelForCausalLM.from_pretrained(checkpoints[name], dtype=dtype, attn_implementation="eager"), rows)
        for dtype in (torch.float64, torch.float32)
    )
    model, config = gwen.load_model(checkpoints[name], mx.float32), Config.of(loss_type="sft", lora_rank=0)
    batches = batches_of(rows, 40)
    assert len(batches) > 1
    learner = update.Learner(model, config, StepLoss(config, SIZES))
    grads, _, measured = update.gradient(learner, batches)
    assert measured["loss"] == pytest.approx(loss, rel=1e-6)
    ours = hub.unfuse_weights(dict(tree_flatten(grads)), model.config)
    assert set(ours) == set(exact)
    errors = [
        sum(((np.array(held[key], np.float64) - value) ** 2).sum() for key, value in exact.items()) ** 0.5
        for held in (ours, single)
    ]
    size = sum((value**2).sum() for value in exact.values()) ** 0.5
    assert errors[0] < 2e-6 * size and errors[0] < 1.5 * errors[1]  # their own, in float32
