"""
The softmax over rows of logits: log-probabilities, entropy, a drawn token, a restricted support.

Expression, kernel and launch come in the order of layers/ops.py. What is left out: where logits come from;
layers/lm_head.py makes them from hidden states, some at a time.

Axes: N or M rows, V vocabulary.
"""

import math
from pathlib import Path
from typing import NamedTuple

import mlx.core as mx

from machine import cpu, kernels

HERE = Path(__file__).parent
Three = tuple[mx.array, mx.array, mx.array]


def logsumexp(x: mx.array) -> mx.array:
    """log(sum(exp(x))) over the last axis, (..., V) float32 -> (...), exact to 2e-5 at Qwen's vocabulary."""
    peak = mx.stop_gradient(cpu.tiled_max(x))
    return mx.log(cpu.tiled_sum(cpu.exp(x, peak))) + peak.squeeze(-1)


def _launch_per_row(
    kernel: kernels.Kernel,
    logits: mx.array,
    more: list[mx.array],
    number: float,
    dtypes: list[mx.Dtype],
    **template: int | bool | mx.Dtype,
) -> list[mx.array]:
    """Runs a kernel that has a threadgroup for each of (N, V) logits; "out" is (N, V), every other result (N,)."""
    num_rows, size = logits.shape
    shapes = [(num_rows, size) if name == "out" else (num_rows,) for name in kernel.outputs]
    return kernel(
        [logits, *more, kernels.constant_array(float(number))],
        list(zip(shapes, dtypes, strict=True)),
        grid=(num_rows * 512, 1, 1),
        threadgroup=(512, 1, 1),
        V=size,
        **template,
    )


def scale_by_temperature(logits: mx.array, temperature: float) -> mx.array:
    """Logits in float32; dividing all of them by 1 would cost a pass over them."""
    logits = logits.astype(mx.float32)
    return logits if temperature == 1 else logits / temperature


def log_softmax(logits: mx.array, temperature: float = 1.0) -> mx.array:
    """Log-probabilities of all tokens at `temperature`, (..., V) -> (..., V) float32, for those who need the row."""
    logits = scale_by_temperature(logits, temperature)
    return logits - logsumexp(logits)[..., None]


BELOW_ONE = 1 - 2**-22  # the largest share of a sum that float32 rounding still keeps below the sum


def draw_index(weights: mx.array, share: mx.array) -> mx.array:
    """Where in each row the running sum first passes this share of the whole, (N, X), (N, 1) -> (N, 1)."""
    until = mx.cumsum(weights, axis=-1)
    return (until <= share * until[:, -1:]).sum(-1, keepdims=True)


def sample_token_ref(logits: mx.array, uniforms: mx.array, temperature: float = 1.0) -> Three:
    """
    Draws a token a row at `temperature`: it, its log-probability and the entropy; (N, V), (N, 4) -> (N,) each.

    uniforms: four numbers in [0, 1) a row. Each chooses one of at most 32 in proportion to what they weigh: 32,768
    logits, of those 1,024, of those 32, of those one. The choices multiply to the token's probability, one Philox block
    gives the four, and a rounding moves one of 32 borders and not one of V: with a single number for all of V another
    order of summation drew another token once in some hundred draws. A logit of -inf is never drawn. V: at most 2**20.
    """
    assert logits.shape[-1] <= 2**20, logits.shape
    num_rows, size = logits.shape
    logits = scale_by_temperature(logits, temperature)
    peak = cpu.tiled_max(logits)
    weights = cpu.exp(logits, peak)
    shares = mx.split(mx.minimum(uniforms, BELOW_ONE), 4, axis=-1)
    width = 1024 if size > 1024 else 32  # one tile need not be full

    def blocks_of(weights: mx.array, width: int) -> mx.array:  # (N, X) -> (N, X / width, width), filled up with 0
        missing = -weights.shape[1] % width
        return (mx.pad(weights, [(0, 0), (0, missing)]) if missing else weights).reshape(num_rows, -1, width)

    def take(blocks: mx.array, place: mx.array) -> mx.array:  # (N, X, width), (N, 1) -> (N, width)
        return mx.take_along_axis(blocks, place[:, :, None], axis=1).squeeze(1)

    blocks, token = blocks_of(weights, width), mx.zeros((num_rows, 1), mx.int32)
    sums = blocks.sum(-1)
    total = sums.sum(-1, keepdims=True)
    if size > 1024:
        if sums.shape[1] > 32:
            groups = blocks_of(sums, 32)
            token = draw_index(groups.sum(-1), shares[0])
            sums = take(groups, token)
        token = token * 32 + draw_index(sums, shares[1])
        blocks = take(blocks, token).reshape(num_rows, 32, 32)
        sums = blocks.sum(-1)
    block = draw_index(sums, shares[2])
    token = (token * 32 + block) * 32 + draw_index(take(blocks, block), shares[3])
    log_total = mx.log(total).squeeze(-1)
    logprob = (mx.take_along_axis(logits, token, axis=-1) - peak).squeeze(-1) - log_total
    moment = cpu.tiled_sum(weights * mx.maximum(logits - peak, -1e30))  # -inf: 0
    return token.squeeze(-1).astype(mx.int32), logprob, log_total - moment / total.squeeze(-1)


SAMPLE_TOKEN = kernels.Kernel(HERE / "sample_token.metal", "logits uniforms temperature", "tokens logprobs entropies")


@kernels.kernel_of(sample_token_ref)
def sample_token(logits: mx.array, uniforms: mx.array, temperature: float = 1.0) -> Three:
    """
    Reads each logit once, one tile again, and writes 12 bytes a row, in one launch; Gumbel-max would read the same and
    compute V pairs of logarithms and V / 4 Philox blocks more.
    """
    assert logits.shape[-1] <= 2**20, logits.shape
    dtypes = [mx.int32, mx.float32, mx.float32]
    token, logprob, entropy = _launch_per_row(SAMPLE_TOKEN, logits, [uniforms], temperature, dtypes)
    return token, logprob, entropy


def row_logprobs_ref(logits: mx.array, ids: mx.array, temperature: float = 1.0) -> tuple[mx.array, mx.array]:
    """Log-probability of an id a row and entropy of the row at `temperature`, (M, V), (M,) -> (M,) each."""
    logits = scale_by_temperature(logits, temperature)
    shifted = logits - mx.stop_gradient(cpu.tiled_max(logits))
    weights = cpu.exp(shifted)
    total = cpu.tiled_sum(weights)
    chosen = mx.take_along_axis(shifted, ids[:, None], axis=-1).squeeze(-1)
    moment = cpu.tiled_sum(weights * mx.maximum(shifted, -1e30))  # -inf: 0
    return chosen - mx.log(total), mx.log(total) - moment / total


ROW_LOGPROBS = kernels.Kernel(HERE / "row_logprobs.metal", "logits ids temperature", "logprobs entropies")


@kernels.kernel_of(row_logprobs_ref)
def row_logprobs(logits: mx.array, ids: mx.array, temperature: float = 1.0) -> tuple[mx.array, mx.array]:
    """Reads each logit once and writes 8 bytes a row, in one launch."""
    logprobs, entropies = _launch_per_row(ROW_LOGPROBS, logits, [ids], temperature, [mx.float32] * 2)
    return logprobs, entropies


SLOPE_SCALE = 256  # of the gradient in `row_slopes`: without it what is below 6e-8 would be 0 in float16


def row_slopes_ref(logits: mx.array, ids: mx.array, temperature: float = 1.0) -> Three:
    """
    `row_logprobs`, and the gradient of the log-probability, onehot - p, of the logits' type and times SLOPE_SCALE.

    What reaches a logit is (M, V) of it by the log-probability's cotangent / SLOPE_SCALE / temperature.
    """
    slopes = (mx.arange(logits.shape[-1]) == ids[:, None]) - cpu.exp(log_softmax(logits, temperature))
    return *row_logprobs_ref(logits, ids, temperature), (slopes * SLOPE_SCALE).astype(logits.dtype)


ROW_SLOPES = kernels.Kernel(HERE / "row_slopes.metal", "logits ids temperature", "logprobs entropies out")


@kernels.kernel_of(row_slopes_ref)
def row_slopes(logits: mx.array, ids: mx.array, temperature: float = 1.0) -> Three:
    """
    Reads V logits a row twice, the second time mostly from the cache, and writes V, in one launch; a kernel for the
    results and one for the gradient read the logits twice too, the second time made anew by a matmul.
    """
    dtypes = [mx.float32, mx.float32, logits.dtype]
    found = _launch_per_row(ROW_SLOPES, logits, [ids], temperature, dtypes, T=logits.dtype, SCALE=SLOPE_SCALE)
    return found[0], found[1], found[2]


class Support(NamedTuple):
    """Which tokens may be drawn; so written, all of them."""

    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0

    @classmethod
    def from_settings(cls, top_p: float, top_k: int, min_p: float) -> "Support | None":
        """None where every token may be drawn."""
        support = cls(top_p, top_k, min_p)
        return None if support == cls() else support


def nucleus_ref(logits: mx.array, top_p: float) -> mx.array:
    """The least of the fewest largest logits that together have `top_p` of a row's mass, (N, V) float32 -> (N,)."""
    descending = -mx.sort(-logits, axis=-1)
    probs = cpu.exp(descending - logsumexp(descending)[..., None])
    before = mx.cumsum(probs, axis=-1) - probs  # mass of the strictly likelier tokens
    num_kept = mx.maximum((before < top_p).sum(-1, keepdims=True), 1)
    return mx.take_along_axis(descending, num_kept - 1, axis=-1).squeeze(-1)


NUCLEUS = kernels.Kernel(HERE / "nucleus.metal", "logits top_p", "least")


@kernels.kernel_of(nucleus_ref)
def nucleus(logits: mx.array, top_p: float) -> mx.array:
    """Reads a row 9 times, mostly from the cache, and writes 4 bytes; a sort would write all rows several times."""
    return _launch_per_row(NUCLEUS, logits, [], top_p, [mx.float32])[0]


def truncate_logits(logits: mx.array, support: Support) -> mx.array:
    """
    Logits (..., V) float32 with -inf outside the support.

    top_k keeps the k likeliest (and what ties with the last of them), min_p what has at least min_p times the
    likeliest's probability, top_p the fewest likeliest tokens that together reach top_p, of what the others kept.
    Source: min_p arXiv:2407.01082, top_p arXiv:1904.09751.
    """
    top_p, top_k, min_p = support
    if top_k:
        kth = mx.min(mx.topk(logits, min(top_k, logits.shape[-1]), axis=-1), axis=-1, keepdims=True)
        logits = mx.where(logits < kth, -mx.inf, logits)
    if min_p:
        logits = mx.where(logits < logits.max(-1, keepdims=True) + math.log(min_p), -mx.inf, logits)
    if top_p < 1:
        least = nucleus(logits.reshape(-1, logits.shape[-1]), top_p).reshape(*logits.shape[:-1], 1)
        logits = mx.where(logits < least, -mx.inf, logits)
    return logits
