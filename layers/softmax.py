"""
Log-probabilities, entropies, sampled tokens and truncated distributions from rows of logits.

Each operation has a reference expression, a kernel and a launch function, in this order, as in
layers/ops.py. layers/lm_head.py computes the logits from hidden states, in chunks.

Axes: N or M rows, V vocabulary entries, X blocks or weights per row.
"""

import math
from pathlib import Path
from typing import NamedTuple

import cpu_blas  # noqa: F401  (before mlx)
import mlx.core as mx

from machine import cpu, kernels

HERE = Path(__file__).parent
# The largest fraction whose product with a sum, after float32 rounding, is still below the sum.
BELOW_ONE = 1 - 2**-22
MAX_VOCABULARY = 2**20  # 32 groups, each of 32 blocks of 1,024 logits

# `row_logprobs_and_gradients` multiplies the gradient by this factor. Without the factor, values
# below 6e-8 would become 0 in float16.
SLOPE_SCALE = 256

LogprobsAndEntropies = tuple[mx.array, mx.array]
TokensLogprobsEntropies = tuple[mx.array, mx.array, mx.array]
LogprobsEntropiesScaledSlopes = tuple[mx.array, mx.array, mx.array]


def logsumexp(x: mx.array) -> mx.array:
    """
    log(sum(exp(x))) over the last axis, (..., V) float32 -> (...).

    With a vocabulary as large as Qwen's, the error is at most 2e-5.
    """
    peak = mx.stop_gradient(cpu.tiled_max(x))
    total = cpu.tiled_sum(cpu.exp(x, peak))
    return mx.log(total) + peak.squeeze(-1)


def _launch_per_row(
    kernel: kernels.Kernel,
    logits: mx.array,
    row_inputs: list[mx.array],
    setting: float,
    output_dtypes: list[mx.Dtype],
    **template: int | bool | mx.Dtype,
) -> list[mx.array]:
    """
    Runs a kernel with one threadgroup for each row of the logits (N, V), and returns its outputs.

    The output named "out" has shape (N, V), and every other output has shape (N,). The inputs of
    the kernel are the logits, then `row_inputs`, and then `setting`, which is a temperature or a
    top-p value.
    """
    num_rows, vocab_size = logits.shape
    outputs = []
    for name, dtype in zip(kernel.outputs, output_dtypes, strict=True):
        shape = (num_rows, vocab_size) if name == "out" else (num_rows,)
        outputs.append((shape, dtype))
    return kernel(
        [logits, *row_inputs, kernels.constant_array(float(setting))],
        outputs,
        grid=(num_rows * 512, 1, 1),
        threadgroup=(512, 1, 1),
        V=vocab_size,
        **template,
    )


def scale_by_temperature(logits: mx.array, temperature: float) -> mx.array:
    """
    The float32 logits divided by the temperature.

    At temperature 1, the division is skipped, because it would cost one pass over all logits.
    """
    logits = logits.astype(mx.float32)
    return logits if temperature == 1 else logits / temperature


def log_softmax(logits: mx.array, temperature: float = 1.0) -> mx.array:
    """The log-probabilities of all tokens at `temperature`, (..., V) -> (..., V) float32."""
    logits = scale_by_temperature(logits, temperature)
    return logits - logsumexp(logits)[..., None]


# ---- sampling a token


def index_at_fraction_of_sum(weights: mx.array, fraction: mx.array) -> mx.array:
    """
    In each row, the index at which the running sum first exceeds `fraction` of the row's sum.

    Shapes: weights (N, X), fraction (N, 1) -> (N, 1).
    """
    running_sum = mx.cumsum(weights, axis=-1)
    return (running_sum <= fraction * running_sum[:, -1:]).sum(-1, keepdims=True)


def pad_and_split_into_blocks(weights: mx.array, block_width: int) -> mx.array:
    """
    Splits each row into blocks of `block_width` weights, (N, X) -> (N, blocks, width).

    The last block is padded with zeros.
    """
    missing = -weights.shape[1] % block_width
    if missing:
        weights = mx.pad(weights, [(0, 0), (0, missing)])
    return weights.reshape(weights.shape[0], -1, block_width)


def take_block_of_each_row(blocks: mx.array, block_index: mx.array) -> mx.array:
    """The block at the given index of each row, (N, X, width), (N, 1) -> (N, width)."""
    return mx.take_along_axis(blocks, block_index[:, :, None], axis=1).squeeze(1)


def sample_token_ref(
    logits: mx.array, uniforms: mx.array, temperature: float = 1.0
) -> TokensLogprobsEntropies:
    """
    Samples one token per row at `temperature`.

    Returns the tokens, their log-probabilities, and the entropies of the rows, (N,) each. The
    logits are (N, V), and the uniforms are (N, 4). A token with a logit of -inf is never sampled. V
    is at most 2**20.

    The uniforms are four random numbers in [0, 1) per row. Each number chooses among at most 32
    candidates in proportion to their weights. The first choice is a group of 32,768 logits, the
    second a block of 1,024 logits in that group, the third 32 logits in that block, and the fourth
    a single logit. The token's probability is the product of the probabilities of the four choices.
    The four numbers are one output block of the random number generator Philox. With at most 32
    candidates per choice, rounding errors rarely change a choice. An earlier version chose among
    all V tokens with a single number, and a different order of summation changed its token about
    once in several hundred draws.
    """
    assert logits.shape[-1] <= MAX_VOCABULARY, logits.shape
    num_rows, vocab_size = logits.shape
    logits = scale_by_temperature(logits, temperature)
    peak = cpu.tiled_max(logits)
    weights = cpu.exp(logits, peak)
    fractions = mx.split(mx.minimum(uniforms, BELOW_ONE), 4, axis=-1)

    # a vocabulary of up to 1,024 entries needs only the third and fourth choices
    width = 1024 if vocab_size > 1024 else 32
    blocks = pad_and_split_into_blocks(weights, width)
    sums = blocks.sum(-1)
    total = sums.sum(-1, keepdims=True)
    block = mx.zeros((num_rows, 1), mx.int32)  # the index of the chosen 1,024 logits
    rows_of_32 = blocks
    if vocab_size > 1024:
        if sums.shape[1] > 32:
            groups = pad_and_split_into_blocks(sums, 32)
            group = index_at_fraction_of_sum(groups.sum(-1), fractions[0])
            sums = take_block_of_each_row(groups, group)
            block = group * 32
        block = block + index_at_fraction_of_sum(sums, fractions[1])
        rows_of_32 = take_block_of_each_row(blocks, block).reshape(num_rows, 32, 32)
        sums = rows_of_32.sum(-1)
    row = index_at_fraction_of_sum(sums, fractions[2])  # the index of the chosen 32 logits
    column = index_at_fraction_of_sum(take_block_of_each_row(rows_of_32, row), fractions[3])
    token = (block * 32 + row) * 32 + column

    log_total = mx.log(total).squeeze(-1)
    token_logits = mx.take_along_axis(logits, token, axis=-1)
    logprobs = (token_logits - peak).squeeze(-1) - log_total
    moment = cpu.tiled_sum(weights * mx.maximum(logits - peak, -1e30))  # a logit of -inf adds 0
    entropies = log_total - moment / total.squeeze(-1)
    return token.squeeze(-1).astype(mx.int32), logprobs, entropies


SAMPLE_TOKEN = kernels.Kernel(
    HERE / "sample_token.metal", "logits uniforms temperature", "tokens logprobs entropies"
)


@kernels.make_op(sample_token_ref)
def sample_token(
    logits: mx.array, uniforms: mx.array, temperature: float = 1.0
) -> TokensLogprobsEntropies:
    """
    Reads each logit once, and one block of each row a second time, in a single launch.

    Writes 12 bytes per row. Gumbel-max sampling would also read each logit once. But for each row
    it would compute V pairs of logarithms, and V / 4 output blocks of the random number generator.
    """
    assert logits.shape[-1] <= MAX_VOCABULARY, logits.shape
    dtypes = [mx.int32, mx.float32, mx.float32]
    tokens, logprobs, entropies = _launch_per_row(
        SAMPLE_TOKEN, logits, [uniforms], temperature, dtypes
    )
    return tokens, logprobs, entropies


# ---- scoring given tokens


def row_logprobs_ref(
    logits: mx.array, ids: mx.array, temperature: float = 1.0
) -> LogprobsAndEntropies:
    """
    The log-probability of one id per row, and the entropy of each row, at `temperature`.

    Shapes: logits (M, V), ids (M,) -> (M,) each.
    """
    logits = scale_by_temperature(logits, temperature)
    shifted = logits - mx.stop_gradient(cpu.tiled_max(logits))
    weights = cpu.exp(shifted)
    total = cpu.tiled_sum(weights)
    id_logits = mx.take_along_axis(shifted, ids[:, None], axis=-1).squeeze(-1)
    moment = cpu.tiled_sum(weights * mx.maximum(shifted, -1e30))  # a logit of -inf adds 0
    return id_logits - mx.log(total), mx.log(total) - moment / total


ROW_LOGPROBS = kernels.Kernel(
    HERE / "row_logprobs.metal", "logits ids temperature", "logprobs entropies"
)


@kernels.make_op(row_logprobs_ref)
def row_logprobs(logits: mx.array, ids: mx.array, temperature: float = 1.0) -> LogprobsAndEntropies:
    """Reads each logit once and writes 8 bytes per row, in one launch."""
    dtypes = [mx.float32, mx.float32]
    logprobs, entropies = _launch_per_row(ROW_LOGPROBS, logits, [ids], temperature, dtypes)
    return logprobs, entropies


def row_logprobs_and_gradients_ref(
    logits: mx.array, ids: mx.array, temperature: float = 1.0
) -> LogprobsEntropiesScaledSlopes:
    """
    The two results of `row_logprobs`, and slopes from which the caller computes the gradient.

    The slopes are SLOPE_SCALE * (onehot - p), of the shape (M, V) and the dtype of the logits. Here
    p contains the probabilities at `temperature`. The gradient with respect to the logits is the
    slopes times the cotangent of the log-probability, divided by SLOPE_SCALE * temperature.
    """
    onehot = mx.arange(logits.shape[-1]) == ids[:, None]
    slopes = onehot - cpu.exp(log_softmax(logits, temperature))
    logprobs, entropies = row_logprobs_ref(logits, ids, temperature)
    return logprobs, entropies, (slopes * SLOPE_SCALE).astype(logits.dtype)


ROW_LOGPROBS_AND_GRADIENTS = kernels.Kernel(
    HERE / "row_logprobs_and_gradients.metal", "logits ids temperature", "logprobs entropies out"
)


@kernels.make_op(row_logprobs_and_gradients_ref)
def row_logprobs_and_gradients(
    logits: mx.array, ids: mx.array, temperature: float = 1.0
) -> LogprobsEntropiesScaledSlopes:
    """
    Reads the V logits of each row twice and writes V numbers per row, in one launch.

    The second read mostly hits the cache. If a separate kernel computed the gradient later, the two
    kernels would also read the logits twice, and a matmul would have to compute the logits again.
    """
    logprobs, entropies, slopes = _launch_per_row(
        ROW_LOGPROBS_AND_GRADIENTS,
        logits,
        [ids],
        temperature,
        [mx.float32, mx.float32, logits.dtype],
        T=logits.dtype,
        SCALE=SLOPE_SCALE,
    )
    return logprobs, entropies, slopes


# ---- truncated distributions


class TruncationSettings(NamedTuple):
    """Settings that restrict which tokens may be sampled. The defaults allow all tokens."""

    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0

    @classmethod
    def from_settings(cls, top_p: float, top_k: int, min_p: float) -> "TruncationSettings | None":
        """The given settings as one object, or None if they allow every token."""
        support = cls(top_p, top_k, min_p)
        return None if support == cls() else support


def nucleus_threshold_ref(logits: mx.array, top_p: float) -> mx.array:
    """
    The smallest logit in each row's nucleus, (N, V) float32 -> (N,).

    The nucleus is the smallest set of the likeliest tokens whose total probability is at least
    `top_p`.
    """
    descending = -mx.sort(-logits, axis=-1)
    probs = cpu.exp(descending - logsumexp(descending)[..., None])
    likelier_mass = mx.cumsum(probs, axis=-1) - probs  # the mass before each token
    nucleus_size = mx.maximum((likelier_mass < top_p).sum(-1, keepdims=True), 1)
    return mx.take_along_axis(descending, nucleus_size - 1, axis=-1).squeeze(-1)


NUCLEUS_THRESHOLD = kernels.Kernel(HERE / "nucleus_threshold.metal", "logits top_p", "least")


@kernels.make_op(nucleus_threshold_ref)
def nucleus_threshold(logits: mx.array, top_p: float) -> mx.array:
    """
    Reads each row 9 times, mostly from the cache, and writes 4 bytes per row.

    Sorting the logits instead would write each row several times.
    """
    return _launch_per_row(NUCLEUS_THRESHOLD, logits, [], top_p, [mx.float32])[0]


def truncate_logits(logits: mx.array, support: TruncationSettings) -> mx.array:
    """
    A copy of the logits in which excluded tokens have -inf, (..., V) float32 -> (..., V).

    top_k keeps the k likeliest tokens and all tokens that tie with the kth token. min_p keeps the
    tokens whose probability is at least min_p times the highest probability. top_p keeps the
    smallest set of the likeliest tokens whose total probability reaches top_p; these probabilities
    are renormalized over the tokens that top_k and min_p kept.

    Sources: arXiv:2407.01082 for min_p, arXiv:1904.09751 for top_p.
    """
    vocab_size = logits.shape[-1]
    if support.top_k:
        largest = mx.topk(logits, min(support.top_k, vocab_size), axis=-1)
        kth_largest = mx.min(largest, axis=-1, keepdims=True)
        logits = mx.where(logits < kth_largest, -mx.inf, logits)
    if support.min_p:
        threshold = logits.max(-1, keepdims=True) + math.log(support.min_p)
        logits = mx.where(logits < threshold, -mx.inf, logits)
    if support.top_p < 1:
        threshold = nucleus_threshold(logits.reshape(-1, vocab_size), support.top_p)
        threshold = threshold.reshape(*logits.shape[:-1], 1)
        logits = mx.where(logits < threshold, -mx.inf, logits)
    return logits
