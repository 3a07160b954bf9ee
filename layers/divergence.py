"""
The divergence of a student's next-token distributions from a teacher's, without all logits at once.

With p the teacher's distribution, q the student's and m = beta p + (1 - beta) q, the generalized
Jensen-Shannon divergence is beta KL(p, m) + (1 - beta) KL(q, m). For beta 0 and 1 this formula is
always 0. So beta 0 means the forward KL(p, q) instead, and beta 1 the reverse KL(q, p), as in TRL.

Source: GKD, arXiv:2306.13649, sections 2 and 3; TRL's `generalized_jsd_loss`.

Axes: N rows, T positions, M all N * T positions or some of them, V vocabulary, C hidden of the
student, D hidden of the teacher.
"""

from typing import Any, NamedTuple

import mlx.core as mx

from layers import lm_head
from machine import cpu, gpu

TILE = lm_head.LOGPROB_TILE // 2  # how many logits of each of the two models exist at once
LARGEST_DIFFERENCE = 80.0  # e^80 is finite in float32


class Lesson(NamedTuple):
    """A teacher's distributions, as its hidden states and its head; they have no gradient."""

    hidden: mx.array  # (N, T, D)
    head_weight: mx.array  # (V, D)


def divergence_terms_and_slopes(
    log_p: mx.array, log_q: mx.array, beta: float
) -> tuple[mx.array, mx.array]:
    """
    Each id's term of the divergence, and its slope s, (M, V) each.

    log_p, log_q (M, V): the teacher's and the student's log-probabilities. s is q times the
    derivative of the divergence by q, up to a constant: the gradient by the student's logits is
    s - q sum(s). For the forward KL, s is q - p, which already sums to 0.
    No term is negative. If the distributions nearly agree, the plain terms would cancel to rounding
    errors, and their sum would show the error of a logsumexp.
    """
    p = cpu.exp(log_p)
    q = cpu.exp(log_q)
    log_ratio = log_p - log_q
    if beta in (0, 1):
        # KL(first, other) for the two ends
        first, other, ahead = (p, q, log_ratio) if beta == 0 else (q, p, -log_ratio)
        exact = first * mx.expm1(-mx.clip(ahead, -1, 1))
        difference = mx.where(mx.abs(ahead) < 1, exact, other - first)  # other - first
        terms = first * ahead + difference
        return terms, difference if beta == 0 else first * ahead

    log_ratio = mx.clip(log_ratio, -LARGEST_DIFFERENCE, LARGEST_DIFFERENCE)
    log_m_over_q = mx.log1p(beta * mx.expm1(log_ratio))
    slopes = (beta - 1) * q * log_m_over_q
    return beta * p * (log_ratio - log_m_over_q) + slopes, slopes


def tile_sums(
    log_p: mx.array,
    log_q: mx.array,
    head_weight: mx.array,
    places: tuple[mx.array, mx.array],
    beta: float,
) -> list[mx.array]:
    """
    The sums of M rows over one tile of the vocabulary.

    log_p, log_q (M, tile); head_weight: the student's head for the tile; places: those of the
    ids in the tile, as `lm_head.locate_in_tile` returns them. With the slopes s of
    `divergence_terms_and_slopes`, the sums are: divergence, the id's log-probability, entropy and
    sum(s), (M, 1) each; then sum(s W) and, unless beta is 0, sum(q W), (M, C) each.
    """
    place, is_inside = places
    weight = head_weight.astype(mx.float32)
    q = cpu.exp(log_q)
    terms, slopes = divergence_terms_and_slopes(log_p, log_q, beta)
    divergence, entropy, slope_sum = (
        cpu.tiled_sum(values)[:, None] for values in (terms, -q * log_q, slopes)
    )
    id_logprobs = mx.where(is_inside, mx.take_along_axis(log_q, place, axis=-1), 0.0)
    sums = [divergence, id_logprobs, entropy, slope_sum, slopes @ weight]
    if beta:
        sums.append(q @ weight)
    return sums


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
    The divergence of student and teacher at each position, both at `temperature`.

    The other two results are the student's log-probability of each id and its entropy, without
    gradient. hidden (N, T, C), head_weight (V, C), ids (N, T) int32 -> (N, T) float32 each, nats.
    head: "frozen" gives only `hidden` a gradient, "trained" also `head_weight`.

    The vocabulary is read twice, in tiles: once for the logsumexps of both models, and once for the
    divergence and its gradient. The gradient by a row's logits is s - q sum(s), as in
    `divergence_terms_and_slopes`. So the gradient of `hidden` needs only sum(s W) and sum(q W) over
    the rows W of the student's head, and the backward pass of a frozen head has no matmul.
    """
    assert head in lm_head.HEADS, head
    assert 0 <= beta <= 1, beta
    assert temperature > 0, temperature
    shapes = head_weight.shape, lesson.head_weight.shape
    assert len(head_weight) == len(lesson.head_weight), shapes
    flat_ids = ids.reshape(-1)
    vocab_size = len(head_weight)
    teacher_hidden = lesson.hidden.reshape(-1, lesson.hidden.shape[-1])
    chunks = lm_head.chunk_slices(flat_ids.size, lm_head.LOGPROB_CHUNK)
    tile_size = max(1, TILE // min(lm_head.LOGPROB_CHUNK, flat_ids.size))
    tiles = lm_head.chunk_slices(vocab_size, tile_size)

    def tile_logits(
        hidden: mx.array, head_weight: mx.array, tile: slice, done: list[mx.array]
    ) -> mx.array:
        """Logits of some rows for a tile of the vocabulary, computed after `done`."""
        x = lm_head.wait_for(hidden.astype(mx.float32) / temperature, done)
        return x @ head_weight[tile].astype(mx.float32).T

    def forward(hidden: mx.array, head_weight: mx.array) -> tuple[mx.array, ...]:
        parts = []
        done: list[mx.array] = []
        for rows in chunks:
            zeros = mx.zeros((rows.stop - rows.start, 1))
            teacher_sum = student_sum = _Sum(zeros - 1e30, zeros)
            for tile in tiles:
                teacher_logits = tile_logits(teacher_hidden[rows], lesson.head_weight, tile, done)
                student_logits = tile_logits(hidden[rows], head_weight, tile, done)
                teacher_sum = teacher_sum.with_tile(teacher_logits)
                student_sum = student_sum.with_tile(student_logits)
                done = [*teacher_sum, *student_sum]

            totals: list[mx.array] = []
            for tile in tiles:
                teacher_logits = tile_logits(teacher_hidden[rows], lesson.head_weight, tile, done)
                student_logits = tile_logits(hidden[rows], head_weight, tile, done)
                log_p = teacher_sum.logprobs(teacher_logits)
                log_q = student_sum.logprobs(student_logits)
                places = lm_head.locate_in_tile(flat_ids[rows], tile)
                sums = tile_sums(log_p, log_q, head_weight[tile], places, beta)
                if totals:
                    sums = [total + part for total, part in zip(totals, sums, strict=True)]
                done = totals = sums

            divergence, id_logprobs, entropy, slope_sum, hidden_slope = totals[:5]
            if beta:  # else sum(s) is 0
                hidden_slope = hidden_slope - slope_sum * totals[5]
            results = [array.squeeze(-1) for array in (divergence, id_logprobs, entropy)]
            hidden_slope = hidden_slope / temperature
            parts.append((*results, hidden_slope, slope_sum, *teacher_sum, *student_sum))
        return lm_head.concatenate_results(parts)

    def backward(primals: Any, cotangents: Any, outputs: Any) -> tuple[mx.array, mx.array]:
        hidden, head_weight = primals
        _, _, _, hidden_slope, slope_sum, *sums = outputs
        d_out = cotangents[0][:, None]
        d_hidden = (d_out * hidden_slope).astype(hidden.dtype)
        if head == "frozen":
            return d_hidden, mx.zeros_like(head_weight)

        d_tiles: list[mx.array] = []
        done: list[mx.array] = []
        for tile in tiles:
            d_tile = mx.zeros((tile.stop - tile.start, hidden.shape[1]))
            for rows in chunks:
                teacher_sum = _Sum(*(array[rows] for array in sums[:2]))
                student_sum = _Sum(*(array[rows] for array in sums[2:]))
                teacher_logits = tile_logits(teacher_hidden[rows], lesson.head_weight, tile, done)
                student_logits = tile_logits(hidden[rows], head_weight, tile, done)
                log_p = teacher_sum.logprobs(teacher_logits)
                log_q = student_sum.logprobs(student_logits)
                _, slopes = divergence_terms_and_slopes(log_p, log_q, beta)
                d_logits = d_out[rows] * (slopes - cpu.exp(log_q) * slope_sum[rows])
                d_tile = d_tile + d_logits.T @ (hidden[rows].astype(mx.float32) / temperature)
                done = [d_tile]
            d_tiles.append(d_tile.astype(head_weight.dtype))
        return d_hidden, mx.concatenate(d_tiles)

    flat_hidden = hidden.reshape(-1, hidden.shape[-1])
    outputs = gpu.call_with_vjp(forward, backward, flat_hidden, head_weight)
    divergences, logprobs, entropies = (array.reshape(ids.shape) for array in outputs[:3])
    return divergences, mx.stop_gradient(logprobs), mx.stop_gradient(entropies)


class _Sum(NamedTuple):
    """The sum of exp(logit) over a part of the vocabulary, for each of M rows; (M, 1) each."""

    peak: mx.array  # the largest logit; the first one is finite, as in lm_head
    total: mx.array  # sum of exp(logit - peak)

    def with_tile(self, logits: mx.array) -> "_Sum":
        """The sum after one more tile, (M, tile)."""
        peak = mx.maximum(self.peak, cpu.tiled_max(logits))
        shrunk = self.total * cpu.exp(self.peak - peak)
        return _Sum(peak, shrunk + cpu.tiled_sum(cpu.exp(logits - peak))[:, None])

    def logprobs(self, logits: mx.array) -> mx.array:
        """
        Log-probabilities for a tile, after all tiles have been added.

        The peak is subtracted first, so that likely tokens lose no digit.
        """
        return (logits - self.peak) - mx.log(self.total)
