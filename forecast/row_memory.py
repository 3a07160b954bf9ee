"""
Estimates the memory of a layer and of a rollout, and chooses how many rows to decode at once.

memory_estimate.py estimates the memory of a whole run. machine/memory.py measures the memory of the
machine.
"""

from collections.abc import Callable
from typing import NamedTuple

import cpu_blas  # noqa: F401  (before mlx)
import mlx.core as mx

from disk import hub
from kv_cache import round_up_to_chunk
from layers import attention, delta
from machine import gpu, kernels

# The fraction of the available memory that Gwen plans to use. MLX allocates memory ahead of time,
# and other programs need some memory too.
ROOM = 0.9
USUAL_ROWS = 64  # the largest number of rows decoded at once if there is no GPU

# The measured number of float32 values that a layer on a CPU stores for the backward pass, per
# position and per unit of the layer's total width.
KEPT_ON_CPU = 4.8
# The number of values that a layer with GPU kernels stores for the backward pass, per position and
# per unit of the layer's total width. These values have the dtype of the weights, and were counted
# by `c148fd6:bench/launches.py`.
KEPT_ON_GPU = 3.5
# the memory of a gated delta net without a gradient, as a fraction of its memory with a gradient
LINEAR_FRACTION = 0.47


def uses_kernels() -> bool:
    """
    Whether the layers run with Gwen's own GPU kernels.

    For the backward pass, these kernels store only their inputs, in the dtype of the weights.
    """
    return gpu.can_run_metal_kernels() and kernels.is_kernels_variable_on()


def layer_backward_bytes_per_position(
    model: hub.ModelConfig, dtype: mx.Dtype, num_keys: float, layer_kind: str
) -> float:
    """
    The bytes that one layer stores for the backward pass, per position.

    num_keys: the number of keys that each query attends to. layer_kind: for example
    "linear_attention".
    """
    width = model.intermediate_size + model.hidden_size
    score_bytes = 0.0
    if layer_kind == "linear_attention":
        width += _delta_net_width(model)
    else:
        heads = (1 + model.family.output_gate) * model.num_attention_heads
        heads += model.num_key_value_heads
        width += heads * model.head_dim
        if not attention.has_float32_attention_kernel(model.head_dim):
            score_bytes = 4 * model.num_attention_heads * num_keys
    bytes_per_width = KEPT_ON_GPU * dtype.size if uses_kernels() else KEPT_ON_CPU * 4
    return bytes_per_width * width + score_bytes


def _delta_net_width(model: hub.ModelConfig) -> int:
    """The sum of the widths of a gated delta net's arrays, without MLP and hidden states."""
    assert model.delta is not None
    _, num_heads, key_dim, value_dim, _ = model.delta
    width = (
        3 * sum(model.delta.query_key_value_widths) // 2
        + 2 * model.delta.query_key_value_widths[-1]
    )
    if not uses_kernels():  # for the matrices that are computed for each chunk
        state_width = key_dim * value_dim / delta.CHUNK / 5
        width += int(num_heads * (1.7 * delta.CHUNK + 1.4 * key_dim + state_width))
    return width


def forward_bytes_per_position(model: hub.ModelConfig, dtype: mx.Dtype, num_keys: float) -> float:
    """The bytes per position that the largest layer needs in a forward pass without a gradient."""
    loop_bytes = 0.0
    if not uses_kernels():  # for the intermediate arrays of cpu.exp
        loop_bytes = 8 * model.num_attention_heads * num_keys
    kind_bytes = []
    for kind in set(model.layer_kinds):
        fraction = LINEAR_FRACTION if kind == "linear_attention" else 1
        kind_bytes.append(
            layer_backward_bytes_per_position(model, dtype, num_keys, kind) * fraction
        )
    return loop_bytes + max(kind_bytes)


def cache_bytes_per_token(model: hub.ModelConfig, dtype: mx.Dtype) -> int:
    """The bytes that the keys and values of one token take in all layers together."""
    num_layers = sum(kind != "linear_attention" for kind in model.layer_kinds)
    return 2 * num_layers * model.num_key_value_heads * model.head_dim * dtype.size


def delta_state_bytes_per_row(model: hub.ModelConfig, dtype: mx.Dtype) -> int:
    """The bytes per row of the states of all gated delta nets, whatever the row's length."""
    if model.delta is None:
        return 0
    layer_state = sum(array.nbytes for array in model.delta.empty_state(1, dtype))
    return layer_state * model.layer_kinds.count("linear_attention")


class RolloutBytes(NamedTuple):
    """The memory that a rollout needs, in bytes."""

    caches: int
    intermediate_results: int


def rollout_bytes(
    model: hub.ModelConfig,
    dtype: mx.Dtype,
    prompt_lengths: list[int],
    group_size: int,
    max_tokens: int,
    rows: int,
) -> RolloutBytes:
    """
    The memory that a rollout needs if its longest prompts are prefilled together.

    group_size: the number of samples per prompt. rows: the number of rows decoded at once.
    """
    num_slots = min(rows, len(prompt_lengths) * group_size)
    prefilled = sorted(prompt_lengths)[-max(2 * rows // group_size, 1) :]
    longest = max(prefilled)

    shares_prefix = uses_kernels()
    if not shares_prefix and not gpu.on_gpu():
        shares_prefix = attention.should_share_prefix(num_slots, prefilled, rows, dtype)
    num_copied = 0 if shares_prefix else num_slots * longest
    num_columns = len(prefilled) * round_up_to_chunk(longest)
    num_columns += num_slots * round_up_to_chunk(max_tokens) + num_copied
    states = delta_state_bytes_per_row(model, dtype) * (len(prefilled) + num_slots)
    cache_bytes = cache_bytes_per_token(model, dtype) * num_columns + states

    tokens_at_once = min(max(gpu.prefill_tokens_per_pass() // len(prefilled), 1), longest)
    prefill_bytes = (
        tokens_at_once * len(prefilled) * forward_bytes_per_position(model, dtype, longest)
    )
    # per row, six float32 arrays of vocabulary size: the logits and arrays computed from them
    decode_bytes = 6 * 4 * num_slots * model.vocab_size
    # a temporary copy of one layer's keys and values
    decode_bytes += 2 * model.num_key_value_heads * model.head_dim * dtype.size * num_copied
    return RolloutBytes(cache_bytes, int(max(prefill_bytes, decode_bytes)))


def choose_rollout_rows(fits_gpu_memory: Callable[[int], bool], max_rows: int) -> int:
    """
    The number of rows that a rollout decodes at once.

    On a GPU, this is `max_rows`, halved until the rows fit into memory. Without a GPU, the number
    is at most USUAL_ROWS, whatever the memory, so that every machine decodes the same number.

    fits_gpu_memory: a function that says whether a number of rows fits into the GPU's memory.
    """
    if not gpu.on_gpu():
        return min(max_rows, USUAL_ROWS)
    rows = max_rows
    while rows > 1 and not fits_gpu_memory(rows):
        rows = -(-rows // 2)
    return rows
