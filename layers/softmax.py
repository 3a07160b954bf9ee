"""
The softmax over rows of logits: log-probabilities, entropy, a sampled token, a restricted support.

The reference expression, the kernel and its launch follow each other, as in layers/ops.py. Logits
are computed from hidden states, in chunks, in layers/lm_head.py.

Axes: N or M rows, V vocabulary, X blocks or weights of a row.
"""

import math
from pathlib import Path
from typing import NamedTuple

import mlx.core as mx

from machine import cpu, kernels

HERE = Path(__file__).parent
# the largest fraction at which fraction * sum stays below the sum after float32 rounding
BELOW_ONE = 1 - 2**-22
MAX_VOCABULARY = 2**20  # 32 groups of 32 blocks of 1,024 logits
# The factor on the gradient in `row_slopes`. Without it, values below 6e-8 would be 0 in float16.
SLOPE_SCALE = 256

ThreeArrays = tuple[mx.array, mx.array, mx.array]


def logsumexp(x: mx.array) -> mx.array:
    """
    log(sum(exp(x))) over the last axis, (..., V) float32 -> (...).

    The error is at most 2e-5 for Qwen's vocabulary.
    """
    peak = mx.stop_gradient(cpu.tiled_max(x))
    total = cpu.tiled_sum(cpu.exp(x, peak))
    return mx.log(total) + peak.squeeze(-1)


def _launch_per_row(
    kernel: kernels.Kernel,
    logits: mx.array,
    row_inputs: list[mx.array],
    number: float,
    dtypes: list[mx.Dtype],
    **template: int | bool | mx.Dtype,
) -> list[mx.array]:
    """
    Runs a kernel that has one threadgroup for each row of (N, V) logits.

    The output "out" has shape (N, V), every other output (N,).
    row_inputs: the inputs between the logits and `number`.
    """
    num_rows, vocab_size = logits.shape
    outputs = []
    for name, dtype in zip(kernel.outputs, dtypes, strict=True):
        shape = (num_rows, vocab_size) if name == "out" else (num_rows,)
        outputs.append((shape, dtype))
    return kernel(
        [logits, *row_inputs, kernels.constant_array(float(number))],
        outputs,
        grid=(num_rows * 512, 1, 1),
        threadgroup=(512, 1, 1),
        V=vocab_size,
        **template,
    )


def scale_by_temperature(logits: mx.array, temperature: float) -> mx.array:
    """
    Divides logits by the temperature, in float32.

    Temperature 1 skips the division, which would cost a pass over all logits.
    """
    logits = logits.astype(mx.float32)
    return logits if temperature == 1 else logits / temperature


def log_softmax(logits: mx.array, temperature: float = 1.0) -> mx.array:
    """Log-probabilities of all tokens at `temperature`, (..., V) -> (..., V) float32."""
    logits = scale_by_temperature(logits, temperature)
    return logits - logsumexp(logits)[..., None]


# ---- sampling a token


def draw_index(weights: mx.array, fraction: mx.array) -> mx.array:
    """
    In each row, the index at which the running sum first exceeds `fraction` of the row's sum.

    (N, X), (N, 1) -> (N, 1).
    """
    running_sum = mx.cumsum(weights, axis=-1)
    return (running_sum <= fraction * running_sum[:, -1:]).sum(-1, keepdims=True)


def split_into_blocks(weights: mx.array, width: int) -> mx.array:
    """Blocks of `width` weights, padded with zeros, (N, X) -> (N, X / width, width)."""
    missing = -weights.shape[1] % width
    if missing:
        weights = mx.pad(weights, [(0, 0), (0, missing)])
    return weights.reshape(weights.shape[0], -1, width)


def take_block(blocks: mx.array, index: mx.array) -> mx.array:
    """One block of each row, (N, X, width), (N, 1) -> (N, width)."""
    return mx.take_along_axis(blocks, index[:, :, None], axis=1).squeeze(1)


def sample_token_ref(logits: mx.array, uniforms: mx.array, temperature: float = 1.0) -> ThreeArrays:
    """
    Samples one token per row at `temperature`.

    Returns tokens, log-probabilities and entropies, (N, V), (N, 4) -> (N,) each. A logit of -inf is
    never sampled. V is at most 2**20.

    uniforms: four numbers in [0, 1) per row. Each number chooses one of at most 32 candidates in
    proportion to their weights: first 32,768 logits, then 1,024 of them, then 32, then one. The
    product of the four choices is the token's probability. One Philox block supplies the four
    numbers. A rounding error can move only one of 32 borders. With one number and V borders,
    another order of summation changed the token about once in several hundred draws.
    """
    assert logits.shape[-1] <= MAX_VOCABULARY, logits.shape
    num_rows, vocab_size = logits.shape
    logits = scale_by_temperature(logits, temperature)
    peak = cpu.tiled_max(logits)
    weights = cpu.exp(logits, peak)
    fractions = mx.split(mx.minimum(uniforms, BELOW_ONE), 4, axis=-1)

    width = 1024 if vocab_size > 1024 else 32  # a single tile need not be full
    blocks = split_into_blocks(weights, width)
    sums = blocks.sum(-1)
    total = sums.sum(-1, keepdims=True)
    token = mx.zeros((num_rows, 1), mx.int32)
    if vocab_size > 1024:
        if sums.shape[1] > 32:
            groups = split_into_blocks(sums, 32)
            token = draw_index(groups.sum(-1), fractions[0])
            sums = take_block(groups, token)
        token = token * 32 + draw_index(sums, fractions[1])
        blocks = take_block(blocks, token).reshape(num_rows, 32, 32)
        sums = blocks.sum(-1)
    block = draw_index(sums, fractions[2])
    place_in_block = draw_index(take_block(blocks, block), fractions[3])
    token = (token * 32 + block) * 32 + place_in_block

    log_total = mx.log(total).squeeze(-1)
    token_logits = mx.take_along_axis(logits, token, axis=-1)
    logprobs = (token_logits - peak).squeeze(-1) - log_total
    moment = cpu.tiled_sum(weights * mx.maximum(logits - peak, -1e30))  # -inf: 0
    entropies = log_total - moment / total.squeeze(-1)
    return token.squeeze(-1).astype(mx.int32), logprobs, entropies


SAMPLE_TOKEN = kernels.Kernel(
    HERE / "sample_token.metal", "logits uniforms temperature", "tokens logprobs entropies"
)


@kernels.make_op(sample_token_ref)
def sample_token(logits: mx.array, uniforms: mx.array, temperature: float = 1.0) -> ThreeArrays:
    """
    Reads each logit once and one tile again, and writes 12 bytes per row, in one launch.

    Gumbel-max would read as much, and would also compute V pairs of logarithms and V / 4 Philox
    blocks.
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
) -> tuple[mx.array, mx.array]:
    """
    The log-probability of one id per row and the entropy of the row, at `temperature`.

    (M, V), (M,) -> (M,) each.
    """
    logits = scale_by_temperature(logits, temperature)
    shifted = logits - mx.stop_gradient(cpu.tiled_max(logits))
    weights = cpu.exp(shifted)
    total = cpu.tiled_sum(weights)
    id_logits = mx.take_along_axis(shifted, ids[:, None], axis=-1).squeeze(-1)
    moment = cpu.tiled_sum(weights * mx.maximum(shifted, -1e30))  # -inf: 0
    return id_logits - mx.log(total), mx.log(total) - moment / total


ROW_LOGPROBS = kernels.Kernel(
    HERE / "row_logprobs.metal", "logits ids temperature", "logprobs entropies"
)


@kernels.make_op(row_logprobs_ref)
def row_logprobs(
    logits: mx.array, ids: mx.array, temperature: float = 1.0
) -> tuple[mx.array, mx.array]:
    """Reads each logit once and writes 8 bytes per row, in one launch."""
    dtypes = [mx.float32, mx.float32]
    logprobs, entropies = _launch_per_row(ROW_LOGPROBS, logits, [ids], temperature, dtypes)
    return logprobs, entropies


def row_slopes_ref(logits: mx.array, ids: mx.array, temperature: float = 1.0) -> ThreeArrays:
    """
    The results of `row_logprobs`, and the gradient of the log-probability, onehot - p, (M, V).

    The gradient is multiplied by SLOPE_SCALE and has the type of the logits. Times the cotangent of
    the log-probability / SLOPE_SCALE / temperature, it is the gradient of the logits.
    """
    onehot = mx.arange(logits.shape[-1]) == ids[:, None]
    slopes = onehot - cpu.exp(log_softmax(logits, temperature))
    logprobs, entropies = row_logprobs_ref(logits, ids, temperature)
    return logprobs, entropies, (slopes * SLOPE_SCALE).astype(logits.dtype)


ROW_SLOPES = kernels.Kernel(
    HERE / "row_slopes.metal", "logits ids temperature", "logprobs entropies out"
)


@kernels.make_op(row_slopes_ref)
def row_slopes(logits: mx.array, ids: mx.array, temperature: float = 1.0) -> ThreeArrays:
    """
    In one launch, reads each row's V logits twice, the second time mostly from the cache, and
    writes V numbers.

    Separate kernels for the results and for the gradient would also read the logits twice, and a
    matmul would have to compute the logits again for the gradient.
    """
    logprobs, entropies, slopes = _launch_per_row(
        ROW_SLOPES,
        logits,
        [ids],
        temperature,
        [mx.float32, mx.float32, logits.dtype],
        T=logits.dtype,
        SCALE=SLOPE_SCALE,
    )
    return logprobs, entropies, slopes


# ---- a restricted support


class Support(NamedTuple):
    """Which tokens may be sampled. The defaults allow all of them."""

    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0

    @classmethod
    def from_settings(cls, top_p: float, top_k: int, min_p: float) -> "Support | None":
        """Returns None if every token may be sampled."""
        support = cls(top_p, top_k, min_p)
        return None if support == cls() else support


def nucleus_ref(logits: mx.array, top_p: float) -> mx.array:
    """
    The smallest logit in each row's nucleus, (N, V) float32 -> (N,).

    The nucleus is the smallest set of largest logits that together have `top_p` of the probability.
    """
    descending = -mx.sort(-logits, axis=-1)
    probs = cpu.exp(descending - logsumexp(descending)[..., None])
    likelier_mass = mx.cumsum(probs, axis=-1) - probs  # the mass of the strictly likelier tokens
    nucleus_size = mx.maximum((likelier_mass < top_p).sum(-1, keepdims=True), 1)
    return mx.take_along_axis(descending, nucleus_size - 1, axis=-1).squeeze(-1)


NUCLEUS = kernels.Kernel(HERE / "nucleus.metal", "logits top_p", "least")


@kernels.make_op(nucleus_ref)
def nucleus(logits: mx.array, top_p: float) -> mx.array:
    """
    Reads each row 9 times, mostly from the cache, and writes 4 bytes per row.

    A sort would write all rows several times.
    """
    return _launch_per_row(NUCLEUS, logits, [], top_p, [mx.float32])[0]


def truncate_logits(logits: mx.array, support: Support) -> mx.array:
    """
    The logits, with those outside the support replaced by -inf, (..., V) float32 -> (..., V).

    top_k keeps the k likeliest tokens, and tokens that tie with the last of them. min_p keeps
    tokens with at least min_p times the probability of the likeliest. top_p keeps the smallest set
    of likeliest tokens whose total probability reaches top_p, after renormalization over the tokens
    that top_k and min_p kept.

    Source: min_p arXiv:2407.01082, top_p arXiv:1904.09751.
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
        threshold = nucleus(logits.reshape(-1, vocab_size), support.top_p)
        threshold = threshold.reshape(*logits.shape[:-1], 1)
        logits = mx.where(logits < threshold, -mx.inf, logits)
    return logits
