"""
The memory that a layer's positions and a rollout's rows need, and how many rows fit at once.

This file does not cover the memory that a whole run needs (preflight.py) or the memory that this
machine has (machine/memory.py).

Axes: N rows, S keys; widths come from a model's configuration.
"""

from collections.abc import Callable

import mlx.core as mx

from disk import hub
from kv_cache import round_up
from layers import attention, delta
from machine import gpu, kernels

ROOM = 0.9  # usable fraction of the memory: MLX runs ahead, and other programs need some of it
USUAL_ROWS = 64  # number of rows decoded at once without a GPU
# How many numbers a layer keeps for the gradient, per position and per unit of the layer's widths.
# This was measured in float32 on a CPU.
KEPT_ON_CPU = 4.8
# The same with a GPU's kernels, which keep numbers in the type of the weights. This was counted by
# c148fd6:bench/launches.py.
KEPT_ON_GPU = 3.5
# A gated delta net without a gradient takes this fraction of what it would keep for a gradient.
LINEAR_FRACTION = 0.47


def uses_kernels() -> bool:
    """
    Whether a layer runs with our GPU kernels.

    These keep only their inputs, in the type of the weights.
    """
    return gpu.on_gpu() and kernels.kernels_are_wanted()


def layer_bytes(model: hub.ModelConfig, dtype: mx.Dtype, keys: float, kind: str) -> float:
    """
    The bytes that one layer keeps for the gradient per position.

    keys: the number of keys of each query. kind: the layer's kind.
    """
    width = model.intermediate_size + model.hidden_size
    score_bytes = 0.0
    if kind == "linear_attention":
        width += _delta_width(model)
    else:
        heads = (1 + model.family.output_gate) * model.num_attention_heads
        heads += model.num_key_value_heads
        width += heads * model.head_dim
        if not attention.is_fused(model.head_dim):
            score_bytes = 4 * model.num_attention_heads * keys
    bytes_per_width = KEPT_ON_GPU * dtype.size if uses_kernels() else KEPT_ON_CPU * 4
    return bytes_per_width * width + score_bytes


def _delta_width(model: hub.ModelConfig) -> int:
    """The sum of a gated delta net's widths, without those of the MLP and the hidden states."""
    assert model.delta is not None
    _, num_heads, key_dim, value_dim, _ = model.delta
    width = 3 * sum(model.delta.widths) // 2 + 2 * model.delta.widths[-1]
    if not uses_kernels():  # the matrices of a chunk
        state_width = key_dim * value_dim / delta.CHUNK / 5
        width += int(num_heads * (1.7 * delta.CHUNK + 1.4 * key_dim + state_width))
    return width


def forward_bytes(model: hub.ModelConfig, dtype: mx.Dtype, keys: float) -> float:
    """The bytes that one position takes, without a gradient, in a layer of the costliest kind."""
    loop_bytes = 0.0
    if not uses_kernels():  # the arrays between the loops of cpu.exp
        loop_bytes = 8 * model.num_attention_heads * keys
    kind_bytes = []
    for kind in set(model.layer_kinds):
        fraction = LINEAR_FRACTION if kind == "linear_attention" else 1
        kind_bytes.append(layer_bytes(model, dtype, keys, kind) * fraction)
    return loop_bytes + max(kind_bytes)


def column_bytes(model: hub.ModelConfig, dtype: mx.Dtype) -> int:
    """The bytes of one token's keys and values in all layers."""
    num_layers = sum(kind != "linear_attention" for kind in model.layer_kinds)
    return 2 * num_layers * model.num_key_value_heads * model.head_dim * dtype.size


def state_bytes(model: hub.ModelConfig, dtype: mx.Dtype) -> int:
    """The bytes that gated delta nets keep for one row, whatever its length."""
    if model.delta is None:
        return 0
    layer_state = sum(array.nbytes for array in model.delta.empty_state(1, dtype))
    return layer_state * model.layer_kinds.count("linear_attention")


def rollout_bytes(
    model: hub.ModelConfig,
    dtype: mx.Dtype,
    prompts: list[int],
    groups: int,
    max_tokens: int,
    rows: int,
) -> tuple[int, int]:
    """
    The bytes of a rollout whose longest prompts are prefilled together: caches, and all the rest.

    prompts: the prompts' lengths. groups: the number of samples per prompt. rows: the number of
    rows decoded at once.
    """
    num_slots = min(rows, len(prompts) * groups)
    prefilled = sorted(prompts)[-max(2 * rows // groups, 1) :]
    longest = max(prefilled)

    shares_prefix = uses_kernels()
    if not shares_prefix and not gpu.on_gpu():
        shares_prefix = attention.should_share_prefix(num_slots, prefilled, rows, dtype)
    num_copied = 0 if shares_prefix else num_slots * longest
    num_columns = len(prefilled) * round_up(longest)
    num_columns += num_slots * round_up(max_tokens) + num_copied
    states = state_bytes(model, dtype) * (len(prefilled) + num_slots)
    cache_bytes = column_bytes(model, dtype) * num_columns + states

    tokens_at_once = min(max(gpu.prefill_tokens() // len(prefilled), 1), longest)
    prefill_bytes = tokens_at_once * len(prefilled) * forward_bytes(model, dtype, longest)
    # logits, weights, sums, their exponentials and the next step's
    decode_bytes = 6 * 4 * num_slots * model.vocab_size
    # a temporary copy of one layer's keys and values
    decode_bytes += 2 * model.num_key_value_heads * model.head_dim * dtype.size * num_copied
    return cache_bytes, int(max(prefill_bytes, decode_bytes))


def choose_rollout_rows(fits: Callable[[int], bool], most_rows: int) -> int:
    """
    The number of rows that a rollout decodes at once: as many as fit in memory.

    Without a GPU, the number does not depend on the machine.
    """
    if not gpu.on_gpu():
        return min(most_rows, USUAL_ROWS)
    rows = most_rows
    while rows > 1 and not fits(rows):
        rows = -(-rows // 2)
    return rows
