"""
The same step in TRL: its own loss on given log-probabilities, and its own loss and gradient on a whole model. Its
names, and a whole run of its own beside ours.

`uv run --group trl pytest tests/test_trl.py`. For one step TRL's trainer is not
built, which would take a data set and a processor: its methods are called on an object that has what they read.
"""

import dataclasses
import inspect
import itertools
from collections import defaultdict
from types import SimpleNamespace

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import oracle
import pytest
from extras import why
from mlx.utils import tree_flatten
from test_grpo import (
    BOUNDS,
    CASE,
    CLIPS,
    FROZEN,
    FROZEN_CASE,
    KLS,
    LEVELS,
    LOSSES,
    WIDE,
    array,
    ours,
)

import gwen
from config import Config, MemoryDependentSizes
from disk import hub
from step.batch import make_batches
from step.loss import StepLoss
from step.sample import Sample
from text import foreign_names

trl = pytest.importorskip("trl", reason=why("trl"))
torch = pytest.importorskip("torch", reason=why("torch"))


def trainer(case, **settings):
    """What `GRPOTrainer._compute_loss` reads, for one step that is one micro-batch."""
    from accelerate import Accelerator

    loss = settings.get("loss_type", "dapo")
    self = SimpleNamespace(
        accelerator=Accelerator(cpu=True),
        args=SimpleNamespace(
            delta=None,
            use_bias_correction_kl=False,
            sapo_temperature_pos=1.0,
            sapo_temperature_neg=1.05,
            steps_per_generation=1,
        ),
        model=SimpleNamespace(training=True),
        _metrics={"train": defaultdict(list)},
        loss_type=loss,
        importance_sampling_level=settings.get("importance_sampling_level", "token"),
        epsilon_low=settings.get("epsilon", 0.2),
        epsilon_high=settings.get("epsilon_high", 0.2),
        beta=settings.get("beta", 0.0),
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        use_vllm=False,
        vllm_importance_sampling_correction=False,
        current_gradient_accumulation_steps=1,
        max_completion_length=case.max_tokens,
        aux_loss_enabled=False,
        _entropy_bonus_enabled=False,
    )
    self.get_high_entropy_mask = lambda *args: trl.GRPOTrainer.get_high_entropy_mask(self, *args)
    return self


def inputs(case, **settings):
    """A batch as TRL's `_generate_and_score_completions` hands it on."""
    empty = torch.zeros((len(case.mask), 0), dtype=torch.long)
    named = dict(
        advantages=case.advantages,
        old_per_token_logps=case.old,
        ref_per_token_logps=case.ref,
        completion_mask=case.mask,
        num_items_in_batch=case.mask.sum(),
    )
    return {name: torch.tensor(value) for name, value in named.items()} | {
        "prompt_ids": empty,
        "prompt_mask": empty,
        "completion_ids": torch.zeros(case.mask.shape, dtype=torch.long),
    }


def theirs(case, **settings):
    """TRL's loss of the case and its gradient, in float64."""
    self, new = trainer(case, **settings), torch.tensor(case.new, requires_grad=True)
    self._get_per_token_logps_and_entropies = lambda *_, **__: (
        new,
        torch.zeros(case.new.shape),
        None,
    )
    loss = trl.GRPOTrainer._compute_loss(self, None, inputs(case, **settings))
    loss.backward()
    return loss.item(), new.grad.numpy()


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("level", LEVELS)
def test_loss_and_gradient_equal_trl_s(loss, level):
    for case, bounds, kl in itertools.product(
        (CASE, WIDE, FROZEN_CASE), BOUNDS.get(loss, CLIPS), KLS
    ):
        settings = {"loss_type": loss, "importance_sampling_level": level} | bounds | kl
        expected, gradient = theirs(case, **settings)
        value, grad = mx.value_and_grad(lambda new, c=case, s=settings: ours(c, new, **s))(
            array(case.new)
        )
        assert value.item() == pytest.approx(expected, abs=1e-6), settings
        np.testing.assert_allclose(np.array(grad), gradient, atol=1e-6, err_msg=str(settings))


@pytest.mark.parametrize(
    "bounds",
    [{"epsilon": 0.0}, {"epsilon_high": 0.0}, {"epsilon": 0.0, "epsilon_high": 0.0}],
    ids=str,
)
@pytest.mark.parametrize("level", LEVELS)
def test_on_policy_the_gradient_at_a_border_of_the_range_is_twice_trl_s(level, bounds):
    """PyTorch divides a minimum's gradient between equal sides, and its clamp has none there."""
    case, settings = (
        CASE._replace(old=CASE.new),
        {"loss_type": "dapo", "importance_sampling_level": level} | bounds,
    )
    expected, gradient = theirs(case, **settings)
    value, grad = mx.value_and_grad(lambda new: ours(case, new, **settings))(array(case.new))
    assert value.item() == pytest.approx(expected, abs=1e-6) and np.abs(gradient).max() > 0.01
    np.testing.assert_allclose(np.array(grad), 2 * gradient, atol=1e-6)


@pytest.mark.parametrize(("settings", "expected", "gradient"), FROZEN)
def test_the_frozen_cases_are_trl_s(settings, expected, gradient):
    loss, grad = theirs(FROZEN_CASE, **settings)
    assert loss == pytest.approx(expected, abs=1e-7)
    np.testing.assert_allclose(grad[1], gradient, atol=1e-7)


@pytest.mark.parametrize(
    "settings",
    [
        {"loss_type": "dapo"},
        {"loss_type": "grpo", "importance_sampling_level": "sequence"},
        {"loss_type": "sapo"},
    ],
    ids=str,
)
def test_loss_and_gradient_of_a_whole_model_equal_trl_s(checkpoints, settings):
    """
    The same random Qwen3 in transformers and here, the same prompts and completions, all weights in training: TRL's own
    log-probabilities at temperature 0.8, with padding on both sides as it has it, against ours with none on the left.
    """
    import transformers

    prompts = [[5, 17, 8, 120, 9], [44, 7, 31], [5, 17, 8, 120, 9], [44, 7, 31]]
    case = oracle.make_case([6, 2, 4, 5], 6, seed=3)
    completions = np.random.default_rng(1).integers(3, 320, case.mask.shape)

    model = gwen.load_model(checkpoints["qwen3"], mx.float32)
    model.freeze()
    model.unfreeze()
    ids = [row[mask > 0].tolist() for row, mask in zip(completions, case.mask, strict=True)]
    samples = [
        Sample(prompt, its, range(len(its)), 0, old[: len(its)], advantage=float(advantage))
        for prompt, its, old, advantage in zip(prompts, ids, case.old, case.advantages, strict=True)
    ]
    batches = make_batches(samples, 20, "off")
    step_loss = StepLoss(
        Config.from_flags(temp=0.8, lora_rank=0, **settings), MemoryDependentSizes(4, 20, 0)
    )
    batches = [b._replace(old_logprobs=b.sampled_logprobs) for b in batches]  # of the case

    def loss_of(model):
        return sum(step_loss.compute_batch_loss(model, batch).loss for batch in batches)

    value, grads = nn.value_and_grad(model, loss_of)(model)
    ours = hub.unfuse_weights(dict(tree_flatten(grads)), model.config)

    torch_model = transformers.AutoModelForCausalLM.from_pretrained(
        checkpoints["qwen3"], dtype=torch.float32
    ).train()
    self = trainer(case, **settings)
    trl.trainer.utils.add_fused_lm_head(
        torch_model, temperature=0.8, outputs=("log_probs", "entropy")
    )
    self._get_per_token_logps_and_entropies = lambda *args, **named: (
        trl.GRPOTrainer._get_per_token_logps_and_entropies(self, *args, **named)
    )
    width = max(map(len, prompts))
    given = inputs(case) | {
        "prompt_ids": torch.tensor([[0] * (width - len(p)) + p for p in prompts]),
        "prompt_mask": torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts]),
        "completion_ids": torch.tensor(completions),
        "completion_mask": torch.tensor(case.mask).long(),
    }
    loss = trl.GRPOTrainer._compute_loss(self, torch_model, given)
    loss.backward()
    assert value.item() == pytest.approx(loss.item(), abs=1e-6)
    theirs = {name: p.grad.numpy() for name, p in torch_model.named_parameters()}
    assert ours.keys() <= theirs.keys() | {"lm_head.weight"}
    for name, gradient in theirs.items():
        np.testing.assert_allclose(np.array(ours[name]), gradient, atol=1e-6, err_msg=name)


def test_every_name_of_a_grpo_config_and_of_the_trainer_is_in_the_table_and_no_other():
    table, own = foreign_names.load_foreign_names(), set(trl.GRPOConfig.__annotations__)
    assert table["GRPOConfig"].keys() == own
    assert (
        table["TrainingArguments"].keys()
        == {field.name for field in dataclasses.fields(trl.GRPOConfig)} - own
    )
    assert table["GRPOTrainer"].keys() == set(inspect.signature(trl.GRPOTrainer).parameters)
    assert table["SFTConfig"].keys() == set(trl.SFTConfig.__annotations__) - own
