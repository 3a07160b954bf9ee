"""
The update: rows cut into micro-batches, the gradient of the step's loss, one step of AdamW on float32 masters.

What is left out: where completions and rewards come from, and what the loss is, which is in `grpo.py`.

Axes: N rows of the step, M rows of a micro-batch, L positions of prompt and completion, T completion positions,
C hidden.
"""

import math
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
from mlx.utils import tree_flatten, tree_map, tree_unflatten
from tqdm import tqdm

import grpo
import gwen
import lora
import sampler
from settings import Config


class Learner:
    """
    What learns: a model, the float32 masters of its trainable weights by name, their optimizer, the loss scale.

    `base` is the model before training where switching adapters off does not give it.
    """

    def __init__(self, model: gwen.Model, config: Config, base: gwen.Model | None = None):
        self.model, self.config, self.base = model, config, base
        self.trainable = {n: array.astype(mx.float32) for n, array in tree_flatten(model.trainable_parameters())}
        self.optimizer = optim.AdamW(config.lr, weight_decay=config.weight_decay, bias_correction=True)
        self.optimizer.init(tree_unflatten(list(self.trainable.items())))
        half = model.head_weight.dtype == mx.float16
        self.loss_scale = LossScale(2.0**15 if half else 1.0, dynamic=half)


class MicroBatch(NamedTuple):
    """Rows that go through the model together, padded on the right; row i is row `rows[i]` of the step."""

    rows: mx.array  # (M,)
    tokens: mx.array  # (M, L) prompt and completion without the last token, which predicts nothing
    positions: mx.array  # (M, T) where in L each completion token is predicted
    completion_ids: mx.array  # (M, T)
    mask: mx.array  # (M, T)
    sampled_logprobs: mx.array  # (M, T) as the sampler recorded them
    num_tokens: int  # of the M * L positions that are not padding


def micro_batches(prompts: list[list[int]], rollout: sampler.Rollout, token_budget: int) -> list[MicroBatch]:
    """Rows ordered by length and cut where M * L would pass the budget; one row always fits."""
    ids, mask, logprobs = (np.array(x) for x in (rollout.completion_ids, rollout.mask, rollout.logprobs))
    num_tokens = mask.sum(-1).astype(int)
    lengths = num_tokens + [len(prompt) for prompt in prompts]
    groups: list[list[int]] = [[]]
    for row in np.argsort(lengths, kind="stable"):  # ascending: the row that joins is the longest
        if groups[-1] and (len(groups[-1]) + 1) * (lengths[row] - 1) > token_budget:
            groups.append([])
        groups[-1].append(int(row))
    batches = []
    for rows in groups:
        length, most = max(lengths[rows]) - 1, max(num_tokens[rows])
        tokens, positions = np.zeros((len(rows), length), np.int32), np.zeros((len(rows), most), np.int32)
        for index, row in enumerate(rows):
            whole = [*prompts[row], *ids[row, : num_tokens[row]]]
            tokens[index, : len(whole) - 1] = whole[:-1]
            # completion token t stands at len(prompt) + t and is predicted one position earlier
            positions[index] = np.minimum(len(prompts[row]) - 1 + np.arange(most), length - 1)
        batches.append(
            MicroBatch(
                rows=mx.array(rows),
                tokens=mx.array(tokens),
                positions=mx.array(positions),
                completion_ids=mx.array(ids[rows, :most]),
                mask=mx.array(mask[rows, :most]),
                sampled_logprobs=mx.array(logprobs[rows, :most]),
                num_tokens=int((lengths[rows] - 1).sum()),
            )
        )
    return batches


def completion_logprobs(model: gwen.Model, batch: MicroBatch, config: Config) -> tuple[mx.array, mx.array]:
    """Log-probabilities of the completion tokens given everything before them, and entropies, (M, T) each."""
    hidden = mx.take_along_axis(model.hidden(batch.tokens), batch.positions[:, :, None], axis=1)  # (M, T, C)
    return gwen.token_logprobs(
        hidden,
        model.head_weight,
        batch.completion_ids,
        temperature=config.temp,
        head="frozen" if config.lora_rank else "trained",
        support=config.support,
    )


def reference_logprobs(learner: Learner, batches: list[MicroBatch], rollout: sampler.Rollout) -> mx.array:
    """Log-probabilities under the model that training began with, (N, T), without gradient."""
    model = learner.base or learner.model
    out = mx.zeros(rollout.logprobs.shape)
    with lora.disabled(model):
        for batch in batches:
            logprobs, _ = completion_logprobs(model, batch, learner.config)
            out[batch.rows, : logprobs.shape[1]] = mx.stop_gradient(logprobs)
            mx.eval(out)
    return out


class UpdateResult(NamedTuple):
    """What one optimizer step did; Python numbers, means over the step's completion tokens."""

    loss: float
    grad_norm: float
    lr: float
    skipped: bool  # the gradient was not finite, so nothing changed
    pad_frac: float  # of the positions that went through the model
    means: dict[str, float]


def update(
    learner: Learner,
    batches: list[MicroBatch],
    rollout: sampler.Rollout,
    advantages: mx.array,
    ref_logprobs: mx.array | None,
    lr: float,
) -> UpdateResult:
    """One AdamW step on the gradient of the whole step's loss, accumulated over its micro-batches."""
    config, model = learner.config, learner.model
    num_rows, num_items = rollout.mask.shape[0], int(rollout.stats.num_tokens)

    def objective(model: gwen.Model, batch: MicroBatch) -> tuple[mx.array, mx.array, dict[str, mx.array]]:
        logprobs, entropy = completion_logprobs(model, batch, config)
        old_logprobs = mx.stop_gradient(logprobs) if config.old_logprobs == "step" else batch.sampled_logprobs
        loss, stats = grpo.policy_loss(
            logprobs,
            old_logprobs,
            advantages[batch.rows],
            batch.mask,
            ref_logprobs=None if ref_logprobs is None else ref_logprobs[batch.rows, : logprobs.shape[1]],
            loss=config.loss,
            level=config.level,
            clip_low=config.clip_low,
            clip_high=config.clip_high,
            kl_coef=config.kl_coef,
            max_tokens=config.max_tokens,
            num_items=num_items,
        )
        loss = loss * grpo.micro_batch_weight(config.loss, len(batch.rows), num_rows)
        gap = mx.abs(logprobs - batch.sampled_logprobs) * batch.mask
        num_tokens = batch.mask.sum()
        sums = {
            "kl": stats.kl * num_tokens,
            "clip_frac": stats.clip_frac * num_tokens,
            "entropy": (entropy * batch.mask).sum(),
            "gap": gap.sum(),
            "gap_max": gap.max(),
        }
        return loss * learner.loss_scale.value, loss, sums

    grads: Any = None
    total_loss, totals = 0.0, dict.fromkeys(("kl", "clip_frac", "entropy", "gap", "gap_max"), 0.0)
    for batch in tqdm(batches, desc="update", leave=False, disable=None):
        (_, loss, sums), part = nn.value_and_grad(model, objective)(model, batch)
        part = tree_unflatten([(n, g.astype(mx.float32) / learner.loss_scale.value) for n, g in tree_flatten(part)])
        grads = part if grads is None else tree_map(mx.add, grads, part)
        mx.eval(grads, loss, sums)  # wait: the next micro-batch may use this one's memory
        total_loss += loss.item()
        for name, value in sums.items():
            totals[name] = max(totals[name], value.item()) if name == "gap_max" else totals[name] + value.item()
    grads, norm = optim.clip_grad_norm(grads, config.max_grad_norm)
    grad_norm = norm.item()
    skipped = not (math.isfinite(grad_norm) and math.isfinite(total_loss))
    if not skipped:
        learner.optimizer.learning_rate = lr
        learner.trainable = dict(
            tree_flatten(learner.optimizer.apply_gradients(grads, tree_unflatten(list(learner.trainable.items()))))
        )
        install(model, learner.trainable)
    learner.loss_scale = learner.loss_scale.after(skipped)
    most = totals.pop("gap_max")
    means = {name: value / num_items for name, value in totals.items()} | {"gap_max": most}
    num_positions = sum(batch.tokens.size for batch in batches)
    pad_frac = 1 - sum(batch.num_tokens for batch in batches) / num_positions
    return UpdateResult(total_loss, grad_norm, lr, skipped, pad_frac, means)


def install(model: gwen.Model, trainable: dict[str, mx.array]) -> None:
    """Puts the float32 masters into the model, rounded to the dtype in which the model holds each."""
    dtypes = {name: array.dtype for name, array in tree_flatten(model.trainable_parameters())}
    model.load_weights([(name, array.astype(dtypes[name])) for name, array in trainable.items()], strict=False)


def learning_rate(config: Config, step: int) -> float:
    """Linear warm-up, then constant or half a cosine down to a tenth; `step` counts from 0."""
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    if config.lr_schedule == "constant":
        return config.lr
    done = (step - config.warmup_steps) / max(config.steps - config.warmup_steps, 1)
    return config.lr * (0.1 + 0.9 * (1 + math.cos(math.pi * min(done, 1.0))) / 2)


class LossScale(NamedTuple):
    """Keeps small gradients of float16 activations above zero: doubled after 200 good steps, halved by an overflow."""

    value: float = 1.0
    good_steps: int = 0
    dynamic: bool = False

    def after(self, overflow: bool) -> "LossScale":
        if not self.dynamic:
            return self
        if overflow:
            return self._replace(value=max(self.value / 2, 1.0), good_steps=0)
        if self.good_steps + 1 == 200:
            return self._replace(value=min(self.value * 2, 2.0**24), good_steps=0)
        return self._replace(good_steps=self.good_steps + 1)
