"""
How far a student's next-token distributions lie from a teacher's, over a vocabulary whose logits never exist at once.

With p the teacher's distribution, q the student's and m = beta p + (1 - beta) q, the generalized Jensen-Shannon
divergence is beta KL(p, m) + (1 - beta) KL(q, m). Its ends are 0 by that formula, so there, as in TRL, beta 0 means the
forward KL(p, q) and beta 1 the reverse KL(q, p). Left out: where hidden states come from, and what a loss makes of it.
Source: GKD, arXiv:2306.13649, 2 and 3; TRL's `generalized_jsd_loss`.

Axes: N rows, T positions, M = N * T of them or a part, V vocabulary, C hidden of the student, D hidden of the teacher.
"""

from typing import Any, NamedTuple

import mlx.core as mx

from layers import lm_head
from machine import cpu, gpu

TILE = lm_head.LOGPROB_TILE // 2  # logits of each of the two models that exist at once
LARGEST_DIFFERENCE = 80.0  # e^80 is finite in float32


class Lesson(NamedTuple):
    """The distributions to learn, as a teacher gives them; without gradient."""

    hidden: mx.array  # (N, T, D)
    head_weight: mx.array  # (V, D)


def terms_of(log_p: mx.array, log_q: mx.array, beta: float) -> tuple[mx.array, mx.array]:
    """
    What each id adds to the divergence, and q times the divergence's slope by q up to a constant; (M, V) each.

    log_p, log_q: the teacher's and the student's log-probabilities. With s the second result, the gradient by the
    student's logits is s - q sum(s); s of the forward KL, q - p, already sums to 0.
    Terms are written so that none is negative: near agreement the plain sums would cancel to rounding, and so would
    what is wrong with a logsumexp.
    """
    p, q = cpu.exp(log_p), cpu.exp(log_q)
    apart = log_p - log_q
    if beta in (0, 1):
        first, other, ahead = (p, q, apart) if beta == 0 else (q, p, -apart)
        change = mx.where(mx.abs(ahead) < 1, first * mx.expm1(-mx.clip(ahead, -1, 1)), other - first)  # other - first
        return first * ahead + change, change if beta == 0 else first * ahead
    apart = mx.clip(apart, -LARGEST_DIFFERENCE, LARGEST_DIFFERENCE)
    above = mx.log1p(beta * mx.expm1(apart))  # log m - log q
    slopes = (beta - 1) * q * above
    return beta * p * (apart - above) + slopes, slopes


def sums_of(
    log_p: mx.array, log_q: mx.array, head_weight: mx.array, places: tuple[mx.array, mx.array], beta: float
) -> list[mx.array]:
    """
    What a tile of the vocabulary adds for M rows, from log-probabilities (M, tile) and the student's head for it.

    places: of the ids in the tile, see `lm_head.place_of`. Divergence, the id's log-probability, entropy and sum(s),
    (M, 1) each, sum(s W), and unless beta is 0 sum(q W), (M, C) each; s: see `terms_of`.
    """
    (place, inside), weight, q = places, head_weight.astype(mx.float32), cpu.exp(log_q)
    terms, slopes = terms_of(log_p, log_q, beta)
    sums = [cpu.tiled_sum(each)[:, None] for each in (terms, -q * log_q, slopes)]
    chosen = mx.where(inside, mx.take_along_axis(log_q, place, axis=-1), 0.0)
    return [sums[0], chosen, *sums[1:], slopes @ weight, *([q @ weight] if beta else [])]


def token_divergences(
    hidden: mx.array,
    head_weight: mx.array,
    ids: mx.array,
    lesson: Lesson,
    *,
    beta: float,
    temperature: float = 1.0,
    head: str = "frozen",
) -> tuple[mx.array, mx.array, mx.array]:
    """
    The divergence of student and teacher at each position, both at `temperature`; of the student, without gradient, the
    log-probability of each id and the entropy.

    hidden (N, T, C), head_weight (V, C), ids (N, T) int32 -> (N, T) float32 each, nats.
    head: "frozen" gives `hidden` its gradient, "trained" `head_weight` too.

    The vocabulary goes by twice, in tiles: for the logsumexps of both models, then for the divergence and its gradient,
    s - q sum(s) by a row's logits, see `terms_of`. So sum(s W) and sum(q W) over the student's head W are all that
    `hidden` needs, and the backward pass of a frozen head has no matmul.
    """
    assert head in lm_head.HEADS, head
    assert 0 <= beta <= 1, beta
    assert temperature > 0, temperature
    assert len(head_weight) == len(lesson.head_weight), (head_weight.shape, lesson.head_weight.shape)
    flat_ids, vocab = ids.reshape(-1), len(head_weight)
    taught = lesson.hidden.reshape(-1, lesson.hidden.shape[-1])
    chunks = lm_head.slices(flat_ids.size, lm_head.LOGPROB_CHUNK)
    tiles = lm_head.slices(vocab, max(1, TILE // min(lm_head.LOGPROB_CHUNK, flat_ids.size)))

    def logits_of(hidden: mx.array, head_weight: mx.array, tile: slice, done: list[mx.array]) -> mx.array:
        """Logits of some rows for a tile of the vocabulary, but not before `done`."""
        x = lm_head.wait(hidden.astype(mx.float32) / temperature, done)
        return x @ head_weight[tile].astype(mx.float32).T

    def forward(hidden: mx.array, head_weight: mx.array) -> tuple[mx.array, ...]:
        parts = []
        done: list[mx.array] = []
        for rows in chunks:
            nothing = mx.zeros((rows.stop - rows.start, 1))
            sums = [_Sum(nothing - 1e30, nothing)] * 2
            for tile in tiles:
                sums[0] = sums[0].after(logits_of(taught[rows], lesson.head_weight, tile, done))
                sums[1] = sums[1].after(logits_of(hidden[rows], head_weight, tile, done))
                done = [*sums[0], *sums[1]]
            taught_sum, own_sum = sums
            totals: list[mx.array] = []
            for tile in tiles:
                log_p = taught_sum.logprobs(logits_of(taught[rows], lesson.head_weight, tile, done))
                log_q = own_sum.logprobs(logits_of(hidden[rows], head_weight, tile, done))
                found = sums_of(log_p, log_q, head_weight[tile], lm_head.place_of(flat_ids[rows], tile), beta)
                done = totals = [a + b for a, b in zip(totals, found, strict=True)] if totals else found
            *results, slope, kept = totals[:5]
            kept = kept - slope * totals[5] if beta else kept  # of the forward KL sum(s) is 0
            results = [array.squeeze(-1) for array in results]
            parts.append((*results, kept / temperature, slope, *taught_sum, *own_sum))
        return lm_head.joined(parts)

    def backward(primals: Any, cotangents: Any, outputs: Any) -> tuple[mx.array, mx.array]:
        hidden, head_weight = primals
        _, _, _, kept, slope, *sums = outputs
        d_out = cotangents[0][:, None]
        d_hidden = (d_out * kept).astype(hidden.dtype)
        if head == "frozen":
            return d_hidden, mx.zeros_like(head_weight)
        d_tiles: list[mx.array] = []
        done: list[mx.array] = []
        for tile in tiles:
            d_tile = mx.zeros((tile.stop - tile.start, hidden.shape[1]))
            for rows in chunks:
                taught_sum, own_sum = _Sum(*(a[rows] for a in sums[:2])), _Sum(*(a[rows] for a in sums[2:]))
                log_p = taught_sum.logprobs(logits_of(taught[rows], lesson.head_weight, tile, done))
                log_q = own_sum.logprobs(logits_of(hidden[rows], head_weight, tile, done))
                d_logits = d_out[rows] * (terms_of(log_p, log_q, beta)[1] - cpu.exp(log_q) * slope[rows])
                d_tile = d_tile + d_logits.T @ (hidden[rows].astype(mx.float32) / temperature)
                done = [d_tile]
            d_tiles.append(d_tile.astype(head_weight.dtype))
        return d_hidden, mx.concatenate(d_tiles)

    outputs = gpu.differentiable(forward, backward, hidden.reshape(-1, hidden.shape[-1]), head_weight)
    found, logprobs, entropies = (array.reshape(ids.shape) for array in outputs[:3])
    return found, mx.stop_gradient(logprobs), mx.stop_gradient(entropies)


class _Sum(NamedTuple):
    """The sum of exp(logit) of M rows after some of the vocabulary; (M, 1) each. Peaks begin finite, as in lm_head."""

    peak: mx.array  # the largest logit
    total: mx.array  # sum of exp(logit - peak)

    def after(self, logits: mx.array) -> "_Sum":
        """The sum with one more tile taken in, (M, tile)."""
        peak = mx.maximum(self.peak, cpu.largest(logits))
        shrunk = self.total * cpu.exp(self.peak - peak)
        return _Sum(peak, shrunk + cpu.tiled_sum(cpu.exp(logits - peak))[:, None])

    def logprobs(self, logits: mx.array) -> mx.array:
        """Log-probabilities of a tile once all were taken in; the peak goes first, so likely tokens lose no digit."""
        return (logits - self.peak) - mx.log(self.total)
