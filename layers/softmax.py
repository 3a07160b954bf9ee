"""
The softmax over rows of logits: log-probabilities, entropy, a drawn token, a restricted support.

Expression, source, launch and `Op` come in the order of layers/ops.py. What is left out: where logits come from;
layers/lm_head.py makes them from hidden states, some at a time.

Axes: N or M rows, V vocabulary.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx

import grpo
from machine import cpu, kernels

HERE = Path(__file__).parent


def tiled_sum(x: mx.array) -> mx.array:
    """
    Sum over the last axis, (..., V) -> (...), in tiles of 512.

    One running float32 sum over 151,936 terms, as MLX's CPU backend does it, puts a logsumexp off by up to 9e-4 and an
    entropy by 1.6e-3 on peaked rows; two stages leave 2e-5.
    """
    num_tiles = x.shape[-1] // 512
    tiles = x[..., : num_tiles * 512].reshape(*x.shape[:-1], num_tiles, 512).sum(-1).sum(-1)
    return tiles + x[..., num_tiles * 512 :].sum(-1)


def logsumexp(x: mx.array) -> mx.array:
    """log(sum(exp(x))) over the last axis, (..., V) float32 -> (...), exact to 2e-5 at Qwen's vocabulary."""
    peak = mx.stop_gradient(x.max(-1, keepdims=True))
    return mx.log(tiled_sum(cpu.exp(x, peak))) + peak.squeeze(-1)


def _on_rows(
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
        [logits, *more, kernels.constant(float(number))],
        list(zip(shapes, dtypes, strict=True)),
        grid=(num_rows * 512, 1, 1),
        threadgroup=(512, 1, 1),
        V=size,
        **template,
    )


def at_temperature(logits: mx.array, temperature: float) -> mx.array:
    """Logits in float32; dividing all of them by 1 would cost a pass over them."""
    logits = logits.astype(mx.float32)
    return logits if temperature == 1 else logits / temperature


def log_softmax_ref(logits: mx.array, temperature: float = 1.0) -> mx.array:
    """Log-probabilities of all tokens at `temperature`, (..., V) -> (..., V) float32, for those who need the row."""
    logits = at_temperature(logits, temperature)
    return logits - logsumexp(logits)[..., None]


LOG_SOFTMAX = kernels.Kernel(HERE / "log_softmax.metal", "logits temperature", "out")


def _launch_log_softmax(logits: mx.array, temperature: float = 1.0) -> mx.array:
    """
    Reads V logits twice, the second time mostly from the cache, and writes V, in one launch; the least is reading them
    once, which would need V of a threadgroup's memory.
    """
    rows = logits.reshape(-1, logits.shape[-1])
    return _on_rows(LOG_SOFTMAX, rows, [], temperature, [mx.float32])[0].reshape(logits.shape)


def _gradient_of_log_softmax(
    cotangents: list[mx.array], results: list[mx.array], logits: mx.array, temperature: float = 1.0
) -> list[mx.array]:
    (d_out,), (out,) = cotangents, results
    return [((d_out - cpu.exp(out) * tiled_sum(d_out)[..., None]) / temperature).astype(logits.dtype)]


def _logits(dtype: mx.Dtype, large: bool, *small: int) -> mx.array:
    """For examples: of Qwen's vocabulary, or of a small shape."""
    return kernels.normal(*((64, 151_936) if large else small), dtype=dtype, scale=4)


log_softmax = kernels.Op(
    "log_softmax",
    log_softmax_ref,
    _launch_log_softmax,
    lambda dtype, large: [(_logits(dtype, large, 2, 1500), 0.7)],
    _gradient_of_log_softmax,
)

BELOW_ONE = 1 - 2**-22  # the largest share of a sum that float32 rounding still keeps below the sum


def draw(weights: mx.array, share: mx.array) -> mx.array:
    """Where in each row the running sum first passes this share of the whole, (N, X), (N, 1) -> (N, 1)."""
    until = mx.cumsum(weights, axis=-1)
    return (until <= share * until[:, -1:]).sum(-1, keepdims=True)


def sample_token_ref(
    logits: mx.array, uniforms: mx.array, temperature: float = 1.0
) -> tuple[mx.array, mx.array, mx.array]:
    """
    Draws a token a row at `temperature`: it, its log-probability and the entropy; (N, V), (N, 4) -> (N,) each.

    uniforms: four numbers in [0, 1) a row. Each chooses one of at most 32 in proportion to what they weigh: 32,768
    logits, of those 1,024, of those 32, of those one. The choices multiply to the token's probability, one Philox block
    gives the four, and a rounding moves one of 32 borders and not one of V: with a single number for all of V another
    order of summation drew another token once in some hundred draws. A logit of -inf is never drawn. V: at most 2**20.
    """
    assert logits.shape[-1] <= 2**20, logits.shape
    num_rows, size = logits.shape
    logits = at_temperature(logits, temperature)
    peak = logits.max(-1, keepdims=True)
    weights = cpu.exp(logits, peak)
    shares = mx.split(mx.minimum(uniforms, BELOW_ONE), 4, axis=-1)
    width = 1024 if size > 1024 else 32  # one tile need not be full

    def blocks_of(weights: mx.array, width: int) -> mx.array:  # (N, X) -> (N, X / width, width), filled up with 0
        missing = -weights.shape[1] % width
        weights = mx.pad(weights, [(0, 0), (0, missing)]) if missing else weights
        return weights.reshape(num_rows, -1, width)

    def take(blocks: mx.array, place: mx.array) -> mx.array:  # (N, X, width), (N, 1) -> (N, width)
        return mx.take_along_axis(blocks, place[:, :, None], axis=1).squeeze(1)

    blocks, token = blocks_of(weights, width), mx.zeros((num_rows, 1), mx.int32)
    sums = blocks.sum(-1)
    total = sums.sum(-1, keepdims=True)
    if size > 1024:
        if sums.shape[1] > 32:
            groups = blocks_of(sums, 32)
            token = draw(groups.sum(-1), shares[0])
            sums = take(groups, token)
        token = token * 32 + draw(sums, shares[1])
        blocks = take(blocks, token).reshape(num_rows, 32, 32)
        sums = blocks.sum(-1)
    block = draw(sums, shares[2])
    token = (token * 32 + block) * 32 + draw(take(blocks, block), shares[3])
    log_total = mx.log(total).squeeze(-1)
    logprob = (mx.take_along_axis(logits, token, axis=-1) - peak).squeeze(-1) - log_total
    moment = tiled_sum(weights * mx.maximum(logits - peak, -1e30))  # -inf: 0
    return token.squeeze(-1).astype(mx.int32), logprob, log_total - moment / total.squeeze(-1)


SAMPLE_TOKEN = kernels.Kernel(HERE / "sample_token.metal", "logits uniforms temperature", "tokens logprobs entropies")


def _launch_sample_token(
    logits: mx.array, uniforms: mx.array, temperature: float = 1.0
) -> tuple[mx.array, mx.array, mx.array]:
    """
    Reads each logit once, one tile again, and writes 12 bytes a row, in one launch; Gumbel-max would read the same and
    compute V pairs of logarithms and V / 4 Philox blocks more.
    """
    assert logits.shape[-1] <= 2**20, logits.shape
    dtypes = [mx.int32, mx.float32, mx.float32]
    token, logprob, entropy = _on_rows(SAMPLE_TOKEN, logits, [uniforms], temperature, dtypes)
    return token, logprob, entropy


def _example_of_sample_token(dtype: mx.Dtype, large: bool) -> list[tuple[Any, ...]]:
    logits = _logits(dtype, large, 8, 40_000)
    return [(logits, mx.random.uniform(shape=(len(logits), 4), key=mx.random.key(1)), 0.7)]


sample_token = kernels.Op("sample_token", sample_token_ref, _launch_sample_token, _example_of_sample_token)


class RowLogprobs(NamedTuple):
    """What `row_logprobs` gives, (M,) float32 each; with the last two every log-probability of a row can be had."""

    logprobs: mx.array
    entropies: mx.array
    peaks: mx.array  # the largest logit, at the temperature
    log_totals: mx.array  # the log of sum(exp(logit - peak)); beside the peak, which may dwarf it


def row_logprobs_ref(logits: mx.array, ids: mx.array, temperature: float = 1.0) -> RowLogprobs:
    """Log-probability of an id a row and entropy of the row at `temperature`, (M, V), (M,) -> (M,) each."""
    logits = at_temperature(logits, temperature)
    peak = mx.stop_gradient(logits.max(-1, keepdims=True))
    shifted = logits - peak
    weights = cpu.exp(shifted)
    total = tiled_sum(weights)
    chosen = mx.take_along_axis(shifted, ids[:, None], axis=-1).squeeze(-1)
    moment = tiled_sum(weights * mx.maximum(shifted, -1e30))  # -inf: 0
    log_total = mx.log(total)
    return RowLogprobs(chosen - log_total, log_total - moment / total, peak.squeeze(-1), log_total)


def row_logprobs_vjp_ref(
    logits: mx.array, ids: mx.array, outputs: RowLogprobs, cotangents: Sequence[mx.array], temperature: float = 1.0
) -> mx.array:
    """The gradient of `row_logprobs` by its logits, of their type, from its results and the first two's cotangents."""
    _, (d_logits,) = mx.vjp(lambda x: row_logprobs_ref(x, ids, temperature)[:2], [logits], list(cotangents))
    return d_logits


ROW_LOGPROBS = kernels.Kernel(
    HERE / "row_logprobs.metal", "logits ids temperature", "logprobs entropies highest log_totals"
)
ROW_LOGPROBS_VJP = kernels.Kernel(
    HERE / "row_logprobs_vjp.metal",
    "logits ids entropies highest log_totals d_logprobs d_entropies temperature",
    "d_logits",
)


def _launch_row_logprobs_vjp(
    logits: mx.array, ids: mx.array, outputs: RowLogprobs, cotangents: Sequence[mx.array], temperature: float = 1.0
) -> mx.array:
    """
    Reads V logits a row and writes V, the least there is while the logits are kept; MLX gives a kernel arrays of its
    own to write to, so the logits' buffer cannot take them.
    """
    num_rows, size = logits.shape
    return ROW_LOGPROBS_VJP(
        [logits, ids, *outputs[1:], *cotangents, kernels.constant(float(temperature))],
        [(logits.shape, logits.dtype)],
        grid=(-(-size // 256) * 256, num_rows, 1),
        threadgroup=(256, 1, 1),
        T=logits.dtype,
        V=size,
    )[0]


def _example_of_row_logprobs(dtype: mx.Dtype, large: bool) -> list[tuple[Any, ...]]:
    logits = _logits(dtype, large, 3, 1500)
    return [(logits, mx.arange(len(logits)) * 400 % logits.shape[1], 0.7)]


def _example_of_row_logprobs_vjp(dtype: mx.Dtype, large: bool) -> list[tuple[Any, ...]]:
    ((logits, ids, temperature),) = _example_of_row_logprobs(dtype, large)
    cotangents = [kernels.normal(len(ids), dtype=mx.float32, seed=seed) for seed in (1, 2)]
    return [(logits, ids, row_logprobs_ref(logits, ids, temperature), cotangents, temperature)]


row_logprobs_vjp = kernels.Op(
    "row_logprobs_vjp", row_logprobs_vjp_ref, _launch_row_logprobs_vjp, _example_of_row_logprobs_vjp
)
row_logprobs = kernels.Op(  # reads each logit once and writes 16 bytes a row, in one launch
    "row_logprobs",
    row_logprobs_ref,
    lambda logits, ids, temperature=1.0: RowLogprobs(
        *_on_rows(ROW_LOGPROBS, logits, [ids], temperature, [mx.float32] * 4)
    ),
    _example_of_row_logprobs,
    lambda d, results, logits, ids, temperature=1.0: [
        row_logprobs_vjp(logits, ids, RowLogprobs(*results), d[:2], temperature)
    ],
)


SLOPE_SCALE = 256  # of the gradient in `RowLosses`: without it what is below 6e-8 would be 0 in float16


class Surrogate(NamedTuple):
    """The clipped objective as a function of the tokens' log-probabilities only; arrays of one shape."""

    advantages: mx.array  # one per token
    old_logprobs: mx.array | None  # None on policy: every ratio is 1
    objective: grpo.Objective = grpo.Objective()

    def terms(self, logprobs: mx.array) -> mx.array:
        """The `grpo.clipped_term` of each token."""
        old_logprobs = mx.stop_gradient(logprobs) if self.old_logprobs is None else self.old_logprobs
        ratio = grpo.importance_ratio(logprobs, old_logprobs, mx.ones_like(logprobs), "token")
        return grpo.clipped_term(ratio, logprobs, self.advantages, self.objective)[0]


class RowLosses(NamedTuple):
    """What `row_losses` gives: (M,) float32 each, but for the last."""

    losses: mx.array
    slopes: mx.array  # the derivative of each loss by its log-probability
    logprobs: mx.array
    entropies: mx.array
    d_logits: mx.array  # (M, V) of the logits' type: onehot - p, the gradient of the log-probability, times SLOPE_SCALE


def row_losses_ref(logits: mx.array, ids: mx.array, surrogate: Surrogate, temperature: float = 1.0) -> RowLosses:
    """
    The clipped loss of an id a row and all that its gradient needs, (M, V), (M,) and a surrogate of M tokens.

    What reaches a logit is `slopes` * `d_logits` / SLOPE_SCALE / temperature, so no logit is needed again.
    """
    found = row_logprobs_ref(logits, ids, temperature)
    losses, slopes = mx.vjp(surrogate.terms, [found.logprobs], [mx.ones_like(found.logprobs)])
    unit = [mx.full(ids.shape, SLOPE_SCALE * temperature), mx.zeros(ids.shape)]
    d_logits = row_logprobs_vjp_ref(logits, ids, found, unit, temperature)
    return RowLosses(losses[0], slopes[0], found.logprobs, found.entropies, d_logits)


ROW_LOSSES = kernels.Kernel(
    HERE / "row_losses.metal",
    "logits ids advantages old_logprobs clip temperature",
    "losses slopes logprobs entropies out",
)


def _launch_row_losses(logits: mx.array, ids: mx.array, surrogate: Surrogate, temperature: float = 1.0) -> RowLosses:
    """
    Reads V logits a row twice, the second time mostly from the cache, and writes V, in one launch; a kernel for the
    results and one for the gradient read the logits twice too, the second time made anew by a matmul.
    """
    advantages, old_logprobs, rule = surrogate
    bounds = kernels.constant(1.0 - rule.epsilon, 1.0 + rule.upper)
    results = _on_rows(
        ROW_LOSSES,
        logits,
        [ids, advantages, kernels.constant(0.0) if old_logprobs is None else old_logprobs, bounds],
        temperature,
        [*[mx.float32] * 4, logits.dtype],
        T=logits.dtype,
        SCALE=SLOPE_SCALE,
        HIGHEST=int(grpo.LARGEST_LOG_RATIO),
        ON_POLICY=old_logprobs is None,
    )
    return RowLosses(*results)


def _example_of_row_losses(dtype: mx.Dtype, large: bool) -> list[tuple[Any, ...]]:
    ((logits, ids, temperature),) = _example_of_row_logprobs(dtype, large)
    old = row_logprobs_ref(logits, ids, temperature).logprobs + kernels.normal(len(ids), dtype=mx.float32, scale=0.3)
    advantages = kernels.normal(len(ids), dtype=mx.float32, seed=1)
    rule = grpo.Objective(epsilon_high=0.28)
    olds = [old] if large else [old, None]  # None: another kernel, that of an update on policy
    return [(logits, ids, Surrogate(advantages, one, rule), temperature) for one in olds]


row_losses = kernels.Op("row_losses", row_losses_ref, _launch_row_losses, _example_of_row_losses)


class Support(NamedTuple):
    """Which tokens may be drawn; so written, all of them."""

    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0

    @classmethod
    def of(cls, top_p: float, top_k: int, min_p: float) -> "Support | None":
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


# Reads a row 9 times, mostly from the cache, and writes 4 bytes; a sort would write all rows several times.
nucleus = kernels.Op(
    "nucleus",
    nucleus_ref,
    lambda logits, top_p: _on_rows(NUCLEUS, logits, [], top_p, [mx.float32])[0],
    lambda dtype, large: [(_logits(dtype, large, 3, 1100).astype(mx.float32), 0.9)],
)


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
