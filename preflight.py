"""
The memory that a run will need, from its settings and the model's configuration alone: `uv run preflight.py --model M`.

A step needs what stays (weights, adapters, the optimizer's state) and then, in turn, what a rollout or what an update
holds; the larger of the two decides. The longest prompts and completions of `--max-tokens` are assumed, so a step
may need less. The constants are measured on MLX's CPU backend, where the figure is within 25% of the peak, by a test;
on a GPU, whose attention kernel keeps no scores, they are left out. What is not in it: a judge's own model, Python.

Axes: M rows of a micro-batch, P prompt and T completion positions, S keys, V vocabulary, C hidden, H query heads,
K kv heads, D head dim, F mlp width.
"""

import argparse
import sys
from typing import Any, NamedTuple

import cpu_blas  # noqa: F401  (before mlx)
import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

import gwen
import hub
import lora
import memory
import micro_batch
import settings
import telemetry
from kv_cache import round_up
from settings import Config

LAPTOP = 16 * 10**9  # bytes; without a GPU `auto` asks for what fits there, whatever the machine has
# What a gradient holds beside the layers it keeps, in layers: measured 1.5 to 1.8 and 2.7 to 3.5 over seven shapes.
WORKING_LAYERS, WORKING_LAYERS_CHECKPOINTED = 1.7, 3.2
TILES_IN_FLIGHT = 8  # of log-probabilities, those that MLX runs ahead with


class Need(NamedTuple):
    """Bytes."""

    weights: int
    adapters: int  # or the float32 masters of a model whose own weights are trained
    optimizer: int
    cache: int  # of a rollout: keys and values
    decoding: int  # of a rollout: prefill and logits
    gradients: int  # of an update
    activations: int  # of an update
    logprobs: int  # of an update

    @property
    def resident(self) -> int:
        return self.weights + self.adapters + self.optimizer

    @property
    def rollout(self) -> int:
        return self.cache + self.decoding

    @property
    def update(self) -> int:
        return self.gradients + self.activations + self.logprobs

    @property
    def total(self) -> int:
        return self.resident + max(self.rollout, self.update)


def layer_bytes(model: hub.Config, keys: float) -> float:
    """
    What one position keeps of one layer for the gradient, with `keys` keys to each query.

    Measured by doubling each width in turn; in 16 bits it is 2 to 8% less, since softmax, swiglu and adapters compute
    in float32.
    """
    num_queries, num_kv = (n * model.head_dim for n in (model.num_attention_heads, model.num_key_value_heads))
    kept = 24 * model.intermediate_size + 17 * model.hidden_size + 18 * num_queries + 10 * num_kv
    has_kernel = gwen.on_gpu() and model.head_dim in (64, 128)
    return kept + (0 if has_kernel else 4 * model.num_attention_heads * keys)


def estimate(
    model: hub.Config, dtype: mx.Dtype, config: Config, prompt_lengths: list[int], checkpoint_layers: int
) -> Need:
    """What a run needs at most, when its prompts have these lengths."""
    shapes = gwen.Model(model)  # lazy: nothing of it is ever computed
    all_weights = sum(array.size for _, array in tree_flatten(shapes.parameters()))
    if config.lora_rank:
        lora.apply(shapes, config.lora_rank, config.lora_scale, config.lora_targets)
    trained = sum(array.size for _, array in tree_flatten(shapes.trainable_parameters()))
    # float32 weights are their own masters
    masters = trained if config.lora_rank or dtype != mx.float32 else 0
    longest = sorted(prompt_lengths)[-config.batch :]
    activations, logprobs = _update(model, dtype, config, longest, checkpoint_layers)
    cache, decoding = _rollout(model, dtype, config, longest)
    return Need(
        weights=all_weights * dtype.size,
        adapters=4 * masters,
        optimizer=8 * trained,
        cache=cache,
        decoding=decoding,
        gradients=2 * 4 * trained,  # those of the micro-batches so far, and those of one
        activations=activations,
        logprobs=logprobs,
    )


def _update(
    model: hub.Config, dtype: mx.Dtype, config: Config, prompts: list[int], checkpoint_layers: int
) -> tuple[int, int]:
    """Bytes of activations and of log-probabilities of the largest micro-batch, all completions as long as allowed."""
    layers, length = model.num_hidden_layers, config.max_tokens
    kept = layers - min(checkpoint_layers, layers)
    working = WORKING_LAYERS if kept == layers else WORKING_LAYERS_CHECKPOINTED
    most = (0, 0)
    for batch in micro_batch.shapes(prompts, config.groups, length, config.train_token_budget, config.shared_prefix):
        a_layer = batch.num_positions * layer_bytes(model, batch.mean_keys)
        inputs = 8 * batch.num_positions * model.hidden_size * (layers - kept)
        rows = batch.num_rows * length
        hidden = rows * model.hidden_size * (4 * (3 if config.entropy_coef else 2) + 2 * dtype.size)
        tiles = TILES_IN_FLIGHT * 4 * gwen.LOGPROB_TILE
        head = 0 if config.lora_rank else 2 * 4 * model.vocab_size * model.hidden_size
        if config.logprobs == "reference":
            tiles = 5 * 4 * rows * model.vocab_size
        one = (int(a_layer * (kept + working) + inputs), int(hidden + tiles + head))
        most = max(most, one, key=sum)
    return most


def _rollout(model: hub.Config, dtype: mx.Dtype, config: Config, prompts: list[int]) -> tuple[int, int]:
    """Bytes of keys and values, and of the rest, when the longest prompts are prefilled together."""
    slots = min(config.rollout_batch_size, config.batch * config.groups)
    together = sorted(prompts)[-max(2 * config.rollout_batch_size // config.groups, 1) :]
    column = 2 * model.num_hidden_layers * model.num_key_value_heads * model.head_dim * dtype.size
    width = round_up(max(together))
    own = round_up(config.max_tokens) + (width if gwen.on_gpu() else 0)
    prefill = len(together) * max(together) * layer_bytes(model, max(together))
    logits = 4 * 4 * slots * model.vocab_size  # and weights, sums and the next step's
    return column * (len(together) * width + slots * own), int(max(prefill, logits))
