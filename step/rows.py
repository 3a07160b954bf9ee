"""
What one position of a layer and the rows of a rollout take, and how many rows memory holds at once.

Axes: N rows, S keys; widths are those of a model's configuration.
"""

from collections.abc import Callable

import mlx.core as mx

from disk import hub
from kv_cache import round_up
from layers import attention, delta
from machine import gpu, kernels

ROOM = 0.9  # of the memory; MLX runs ahead, and other programs are there
USUAL_ROWS = 64  # decoded at once without a GPU
# Numbers that a position keeps of a layer for the gradient, for each of its widths: measured in float32 on a CPU; with
# a GPU's kernels, in the weights' type, counted by c148fd6:bench/launches.py.
KEPT, GPU_KEPT = 4.8, 3.5
LINEAR_SHARE = (
    0.47  # of what a gated delta net would keep for a gradient, what it takes without one
)


def uses_kernels() -> bool:
    """Whether a layer runs on a GPU's kernels, which keep what they read in the weights' type and nothing else."""
    return gpu.on_gpu() and kernels.kernels_are_wanted()


def layer_bytes(model: hub.ModelConfig, dtype: mx.Dtype, keys: float, kind: str) -> float:
    """What one position keeps of one layer of a kind for the gradient, with `keys` keys to each query."""
    width, scores = model.intermediate_size + model.hidden_size, 0.0
    if kind == "linear_attention":
        assert model.delta is not None
        _, num_heads, key_dim, value_dim, _ = model.delta
        width += 3 * sum(model.delta.widths) // 2 + 2 * model.delta.widths[-1]
        if not uses_kernels():  # the matrices of a chunk
            width += int(
                num_heads
                * (1.7 * delta.CHUNK + 1.4 * key_dim + key_dim * value_dim / delta.CHUNK / 5)
            )
    else:
        heads = (
            1 + model.family.output_gate
        ) * model.num_attention_heads + model.num_key_value_heads
        width += heads * model.head_dim
        if not attention.is_fused(model.head_dim):
            scores = 4 * model.num_attention_heads * keys
    return (GPU_KEPT * dtype.size if uses_kernels() else KEPT * 4) * width + scores


def forward_bytes(model: hub.ModelConfig, dtype: mx.Dtype, keys: float) -> float:
    """What one position takes of a layer without a gradient, of the kind that takes the most."""
    loops = (
        0.0 if uses_kernels() else 8 * model.num_attention_heads * keys
    )  # arrays between the loops of cpu.exp
    shares = {kind: LINEAR_SHARE if kind == "linear_attention" else 1 for kind in model.layer_kinds}
    return loops + max(
        layer_bytes(model, dtype, keys, kind) * share for kind, share in shares.items()
    )


def column_bytes(model: hub.ModelConfig, dtype: mx.Dtype) -> int:
    """Keys and values of one token."""
    num_layers = sum(kind != "linear_attention" for kind in model.layer_kinds)
    return 2 * num_layers * model.num_key_value_heads * model.head_dim * dtype.size


def state_bytes(model: hub.ModelConfig, dtype: mx.Dtype) -> int:
    """What gated delta nets keep of one row, however long it is."""
    if model.delta is None:
        return 0
    one = sum(array.nbytes for array in model.delta.empty_state(1, dtype))
    return one * model.layer_kinds.count("linear_attention")


def rollout_bytes(
    model: hub.ModelConfig,
    dtype: mx.Dtype,
    prompts: list[int],
    groups: int,
    max_tokens: int,
    rows: int,
) -> tuple[int, int]:
    """Bytes of keys and values, and of the rest, when the longest prompts are prefilled together."""
    slots = min(rows, len(prompts) * groups)
    together = sorted(prompts)[-max(2 * rows // groups, 1) :]
    longest = max(together)
    width, own = round_up(longest), round_up(max_tokens)
    share = uses_kernels() or (
        not gpu.on_gpu() and attention.should_share_prefix(slots, together, rows, dtype)
    )
    column, copied = column_bytes(model, dtype), 0 if share else slots * longest
    prefilled = min(max(gpu.prefill_tokens() // len(together), 1), longest) * len(together)
    logits = (
        6 * 4 * slots * model.vocab_size
    )  # and weights, sums, their exponentials and the next step's
    logits += 2 * model.num_key_value_heads * model.head_dim * dtype.size * copied  # on its way
    decoding = int(max(prefilled * forward_bytes(model, dtype, longest), logits))
    states = state_bytes(model, dtype) * (len(together) + slots)
    return column * (len(together) * width + slots * own + copied) + states, decoding


def choose_rollout_rows(fits: Callable[[int], bool], most_rows: int) -> int:
    """How many rows a rollout decodes at once: what memory holds; without a GPU the machine decides nothing."""
    if not gpu.on_gpu():
        return min(most_rows, USUAL_ROWS)
    rows = most_rows
    while rows > 1 and not fits(rows):
        rows = -(-rows // 2)
    return rows
