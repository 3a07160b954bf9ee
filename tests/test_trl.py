"""
Gwen's loss and gradient against TRL's, on given log-probabilities and on a whole model.

Also compares the table of foreign names with TRL's settings. Run this file with
`uv run --group trl pytest tests/test_trl.py`. TRL's trainer itself would need a data set and a
processor. Therefore its methods are called on an object that has the attributes that they read.
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
from extras import missing_message
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
    gwen_loss,
)

import gwen
from config import Config, MemoryDependentSizes
from disk import hub
from step.batch import make_batches
from step.loss import StepLoss
from step.sample import Sample
from text import foreign_names

trl = pytest.importorskip("trl", reason=missing_message("trl"))
torch = pytest.importorskip("torch", reason=missing_message("torch"))


def make_fake_trainer(case, **settings):
    """The attributes that `GRPOTrainer._compute_loss` reads, for a step of one micro-batch."""
    from accelerate import Accelerator

    trainer = SimpleNamespace(
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
        loss_type=settings.get("loss_type", "dapo"),
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
    trainer.get_high_entropy_mask = lambda *args: trl.GRPOTrainer.get_high_entropy_mask(
        trainer, *args
    )
    return trainer


def make_trl_batch(case):
    """A batch as TRL's `_generate_and_score_completions` returns it, with empty prompts."""
    no_ids = torch.zeros((len(case.mask), 0), dtype=torch.long)
    return {
        "advantages": torch.tensor(case.advantages),
        "old_per_token_logps": torch.tensor(case.old),
        "ref_per_token_logps": torch.tensor(case.ref),
        "completion_mask": torch.tensor(case.mask),
        "num_items_in_batch": torch.tensor(case.mask.sum()),
        "prompt_ids": no_ids,
        "prompt_mask": no_ids,
        "completion_ids": torch.zeros(case.mask.shape, dtype=torch.long),
    }


def trl_loss_and_gradient(case, **settings):
    """TRL's loss of the case, and the gradient by the log-probabilities, in float64."""
    trainer = make_fake_trainer(case, **settings)
    logprobs = torch.tensor(case.new, requires_grad=True)
    entropies = torch.zeros(case.new.shape)
    trainer._get_per_token_logps_and_entropies = lambda *_, **__: (logprobs, entropies, None)
    loss = trl.GRPOTrainer._compute_loss(trainer, None, make_trl_batch(case))
    loss.backward()
    return loss.item(), logprobs.grad.numpy()


def gwen_loss_and_gradient(case, **settings):
    """Gwen's loss of the case, and the gradient by the log-probabilities, in float32."""
    loss_of = mx.value_and_grad(lambda new: gwen_loss(case, new, **settings))
    loss, gradient = loss_of(array(case.new))
    return loss.item(), np.array(gradient)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("level", LEVELS)
def test_loss_and_gradient_equal_those_of_trl(loss, level):
    cases = (CASE, WIDE, FROZEN_CASE)
    for case, bounds, kl in itertools.product(cases, BOUNDS.get(loss, CLIPS), KLS):
        settings = {"loss_type": loss, "importance_sampling_level": level} | bounds | kl
        trl_loss, trl_gradient = trl_loss_and_gradient(case, **settings)
        value, gradient = gwen_loss_and_gradient(case, **settings)
        assert value == pytest.approx(trl_loss, abs=1e-6), settings
        np.testing.assert_allclose(gradient, trl_gradient, atol=1e-6, err_msg=str(settings))


@pytest.mark.parametrize(
    "bounds",
    [{"epsilon": 0.0}, {"epsilon_high": 0.0}, {"epsilon": 0.0, "epsilon_high": 0.0}],
    ids=str,
)
@pytest.mark.parametrize("level", LEVELS)
def test_on_policy_the_gradient_at_a_clip_bound_is_twice_that_of_trl(level, bounds):
    """
    For equal arguments, PyTorch halves the gradient of a minimum. The gradient of its clamp is 0 at
    a bound.
    """
    case = CASE._replace(old=CASE.new)
    settings = {"loss_type": "dapo", "importance_sampling_level": level} | bounds
    trl_loss, trl_gradient = trl_loss_and_gradient(case, **settings)
    loss, gradient = gwen_loss_and_gradient(case, **settings)
    assert loss == pytest.approx(trl_loss, abs=1e-6)
    assert np.abs(trl_gradient).max() > 0.01
    np.testing.assert_allclose(gradient, 2 * trl_gradient, atol=1e-6)


@pytest.mark.parametrize(("settings", "expected_loss", "expected_gradient"), FROZEN)
def test_the_frozen_cases_have_the_losses_and_gradients_of_trl(
    settings, expected_loss, expected_gradient
):
    loss, gradient = trl_loss_and_gradient(FROZEN_CASE, **settings)
    assert loss == pytest.approx(expected_loss, abs=1e-7)
    np.testing.assert_allclose(gradient[1], expected_gradient, atol=1e-7)


@pytest.mark.parametrize(
    "settings",
    [
        {"loss_type": "dapo"},
        {"loss_type": "grpo", "importance_sampling_level": "sequence"},
        {"loss_type": "sapo"},
    ],
    ids=str,
)
def test_loss_and_gradient_of_a_whole_model_equal_those_of_trl(checkpoints, settings):
    """
    A random Qwen3 in transformers and in Gwen gets the same prompts and completions, and all
    weights train. TRL computes log-probabilities at temperature 0.8 with padding on both sides,
    Gwen with padding on the right only.
    """
    import transformers

    prompts = [[5, 17, 8, 120, 9], [44, 7, 31], [5, 17, 8, 120, 9], [44, 7, 31]]
    case = oracle.make_case([6, 2, 4, 5], 6, seed=3)
    completions = np.random.default_rng(1).integers(3, 320, case.mask.shape)

    # Gwen
    model = gwen.load_model(checkpoints["qwen3"], mx.float32)
    model.freeze()
    model.unfreeze()
    samples = []
    for row, prompt in enumerate(prompts):
        response_ids = completions[row][case.mask[row] > 0].tolist()
        num_tokens = len(response_ids)
        samples.append(
            Sample(
                prompt,
                response_ids,
                range(num_tokens),
                0,
                case.old[row][:num_tokens],
                advantage=float(case.advantages[row]),
            )
        )
    batches = [
        batch._replace(old_logprobs=batch.sampled_logprobs)
        for batch in make_batches(samples, 20, "off")
    ]
    config = Config.from_flags(temp=0.8, lora_rank=0, **settings)
    step_loss = StepLoss(config, MemoryDependentSizes(4, 20, 0))

    def total_loss(model):
        return sum(step_loss.compute_batch_loss(model, batch).loss for batch in batches)

    loss, gradient_tree = nn.value_and_grad(model, total_loss)(model)
    gradients = hub.unfuse_weights(dict(tree_flatten(gradient_tree)), model.config)

    # TRL
    torch_model = transformers.AutoModelForCausalLM.from_pretrained(
        checkpoints["qwen3"], dtype=torch.float32
    ).train()
    trainer = make_fake_trainer(case, **settings)
    trl.trainer.utils.add_fused_lm_head(
        torch_model, temperature=0.8, outputs=("log_probs", "entropy")
    )
    trainer._get_per_token_logps_and_entropies = lambda *args, **options: (
        trl.GRPOTrainer._get_per_token_logps_and_entropies(trainer, *args, **options)
    )
    width = max(map(len, prompts))
    paddings = [[0] * (width - len(prompt)) for prompt in prompts]
    prompt_ids = [pad + prompt for pad, prompt in zip(paddings, prompts, strict=True)]
    prompt_mask = [pad + [1] * (width - len(pad)) for pad in paddings]
    trl_batch = make_trl_batch(case) | {
        "prompt_ids": torch.tensor(prompt_ids),
        "prompt_mask": torch.tensor(prompt_mask),
        "completion_ids": torch.tensor(completions),
        "completion_mask": torch.tensor(case.mask).long(),
    }
    trl_loss = trl.GRPOTrainer._compute_loss(trainer, torch_model, trl_batch)
    trl_loss.backward()
    trl_gradients = {
        name: parameter.grad.numpy() for name, parameter in torch_model.named_parameters()
    }

    assert loss.item() == pytest.approx(trl_loss.item(), abs=1e-6)
    assert gradients.keys() <= trl_gradients.keys() | {"lm_head.weight"}
    for name, gradient in trl_gradients.items():
        np.testing.assert_allclose(np.array(gradients[name]), gradient, atol=1e-6, err_msg=name)


def test_the_table_of_foreign_names_has_exactly_the_settings_of_trl():
    table = foreign_names.load_foreign_names()
    grpo_settings = set(trl.GRPOConfig.__annotations__)
    all_settings = {field.name for field in dataclasses.fields(trl.GRPOConfig)}
    assert table["GRPOConfig"].keys() == grpo_settings
    assert table["TrainingArguments"].keys() == all_settings - grpo_settings
    arguments = set(inspect.signature(trl.GRPOTrainer).parameters)
    arguments_of_sft = set(inspect.signature(trl.SFTTrainer).parameters)
    assert arguments <= table["GRPOTrainer"].keys() <= arguments | arguments_of_sft
    assert table["SFTConfig"].keys() == set(trl.SFTConfig.__annotations__) - grpo_settings
