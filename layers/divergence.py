"""
The divergence between the next-token distributions of a student and a teacher.

The logits of all positions are never in memory at once. Let p be the teacher's distribution, q the
student's distribution, and m = beta p + (1 - beta) q. The generalized Jensen-Shannon divergence is
then beta KL(p, m) + (1 - beta) KL(q, m). If beta is 0 or 1, this formula always gives 0. So, as in
TRL, beta 0 selects the forward divergence KL(p, q), and beta 1 the reverse divergence KL(q, p).

Source: GKD, arXiv:2306.13649, sections 2 and 3; TRL's `generalized_jsd_loss`.

Axes: N rows, T positions, M all N * T positions or a chunk of them, V vocabulary entries, C hidden
dimensions of the student, D hidden dimensions of the teacher.
"""

from typing import Any, NamedTuple

import cpu_blas  # noqa: F401  (before mlx)
import mlx.core as mx

from layers import lm_head
from machine import cpu, gpu

TILE = lm_head.LOGPROB_TILE // 2  # the number of logits per model that are in memory at once
LARGEST_DIFFERENCE = 80.0  # log-ratios are clipped to this size, because e^80 is finite in float32


DivergencesLogprobsEntropies = tuple[mx.array, mx.array, mx.array]


class TeacherStatesAndHead(NamedTuple):
    """A teacher's final hidden states and its output head, neither of which gets a gradient."""

    hidden: mx.array  # (N, T, D)
    head_weight: mx.array  # (V, D)


def divergence_terms_and_slopes(
    teacher_logprobs: mx.array, student_logprobs: mx.array, beta: float
) -> tuple[mx.array, mx.array]:
    """
    Each token id's term of the divergence, and the slope s of the term; both (M, V).

    Both arguments are (M, V). The slope s is q times the derivative of the divergence with respect
    to q. The gradient with respect to the student's logits is s - q sum(s), which does not change
    if a constant is added to the derivative. For the forward KL divergence, the constant 1 is
    added, which makes s equal to q - p and sum(s) equal to 0.

    Each term is written so that it cannot be negative. If the distributions nearly agree, the terms
    of the textbook formula would cancel to rounding errors, and their sum would be dominated by the
    error of a logsumexp.
    """
    p = cpu.exp(teacher_logprobs)
    q = cpu.exp(student_logprobs)
    log_ratio = teacher_logprobs - student_logprobs
    if beta in (0, 1):
        # KL(first, other) is the forward divergence if beta is 0, and the reverse divergence if
        # beta is 1.
        if beta == 0:
            first, other, log_quotient = p, q, log_ratio
        else:
            first, other, log_quotient = q, p, -log_ratio
        exact = first * mx.expm1(-mx.clip(log_quotient, -1, 1))
        difference = mx.where(mx.abs(log_quotient) < 1, exact, other - first)  # other - first
        weighted = first * log_quotient
        return weighted + difference, difference if beta == 0 else weighted

    log_ratio = mx.clip(log_ratio, -LARGEST_DIFFERENCE, LARGEST_DIFFERENCE)
    log_m_over_q = mx.log1p(beta * mx.expm1(log_ratio))
    slopes = (beta - 1) * q * log_m_over_q
    return beta * p * (log_ratio - log_m_over_q) + slopes, slopes


def sum_divergence_over_tile(
    teacher_logprobs: mx.array,
    student_logprobs: mx.array,
    head_weight: mx.array,
    located_ids: lm_head.IndexAndIsInside,
    beta: float,
) -> list[mx.array]:
    """
    The contributions of one tile to the sums over the vocabulary, for each of M rows.

    The log-probabilities are (M, tile), and `head_weight` is the student's head for the tile.
    `located_ids` is the result of `lm_head.locate_in_tile`. The first four results, (M, 1) each,
    are added to the divergence, the id's log-probability, the entropy, and sum(s), where s are the
    slopes of `divergence_terms_and_slopes`. The last results, (M, C) each, are added to sum(s W)
    and, unless beta is 0, to sum(q W), where W is the student's head.
    """
    index, is_inside = located_ids
    weight = head_weight.astype(mx.float32)
    q = cpu.exp(student_logprobs)
    terms, slopes = divergence_terms_and_slopes(teacher_logprobs, student_logprobs, beta)
    divergence = cpu.tiled_sum(terms)[:, None]
    entropy = cpu.tiled_sum(-q * student_logprobs)[:, None]
    slope_sum = cpu.tiled_sum(slopes)[:, None]
    logprobs_at_ids = mx.take_along_axis(student_logprobs, index, axis=-1)
    id_logprobs = mx.where(is_inside, logprobs_at_ids, 0.0)
    sums = [divergence, id_logprobs, entropy, slope_sum, slopes @ weight]
    if beta:
        sums.append(q @ weight)
    return sums


def token_divergences(
    hidden: mx.array,
    head_weight: mx.array,
    ids: mx.array,
    teacher: TeacherStatesAndHead,
    *,
    beta: float,
    temperature: float = 1.0,
    head: str = "frozen",
) -> DivergencesLogprobsEntropies:
    """
    The divergence of the student from the teacher at each position, both at `temperature`.

    The student's log-probability of each id and the student's entropy are returned too, without
    gradients. The arguments `hidden` (N, T, C), `head_weight` (V, C) and `ids` (N, T) int32 give
    three results (N, T) float32, in nats.
    head: if "frozen", only `hidden` gets a gradient; if "trained", `head_weight` also gets one.

    The vocabulary is read twice, in tiles, first for the logsumexps of both models and then for the
    divergence and the gradient. The gradient with respect to a row's logits is s - q sum(s), where
    s are the slopes of `divergence_terms_and_slopes`. So the gradient of `hidden` needs only
    sum(s W) and sum(q W) over the rows W of the student's head, and the backward pass of a frozen
    head has no matmul.
    """
    assert head in lm_head.HEADS, head
    assert 0 <= beta <= 1, beta
    assert temperature > 0, temperature
    shapes = head_weight.shape, teacher.head_weight.shape
    assert len(head_weight) == len(teacher.head_weight), shapes
    flat_ids = ids.reshape(-1)
    vocab_size = len(head_weight)
    teacher_hidden = teacher.hidden.reshape(-1, teacher.hidden.shape[-1])
    chunks = lm_head.chunk_slices(flat_ids.size, lm_head.LOGPROB_CHUNK)
    tile_size = max(1, TILE // min(lm_head.LOGPROB_CHUNK, flat_ids.size))
    tiles = lm_head.chunk_slices(vocab_size, tile_size)

    def tile_logits(
        hidden: mx.array, head_weight: mx.array, tile: slice, prerequisites: list[mx.array]
    ) -> mx.array:
        """Logits of some rows for a vocabulary tile, computed after `prerequisites`."""
        x = lm_head.delay_until_computed(hidden.astype(mx.float32) / temperature, prerequisites)
        return x @ head_weight[tile].astype(mx.float32).T

    def divergence_forward(hidden: mx.array, head_weight: mx.array) -> tuple[mx.array, ...]:
        parts = []
        done: list[mx.array] = []
        for rows in chunks:
            zeros = mx.zeros((rows.stop - rows.start, 1))
            teacher_sum = student_sum = _RunningSumOfExp(zeros - 1e30, zeros)
            for tile in tiles:
                teacher_logits = tile_logits(teacher_hidden[rows], teacher.head_weight, tile, done)
                student_logits = tile_logits(hidden[rows], head_weight, tile, done)
                teacher_sum = teacher_sum.with_tile(teacher_logits)
                student_sum = student_sum.with_tile(student_logits)
                done = [*teacher_sum, *student_sum]

            totals: list[mx.array] = []
            for tile in tiles:
                teacher_logits = tile_logits(teacher_hidden[rows], teacher.head_weight, tile, done)
                student_logits = tile_logits(hidden[rows], head_weight, tile, done)
                log_p = teacher_sum.tile_logprobs(teacher_logits)
                log_q = student_sum.tile_logprobs(student_logits)
                located_ids = lm_head.locate_in_tile(flat_ids[rows], tile)
                sums = sum_divergence_over_tile(log_p, log_q, head_weight[tile], located_ids, beta)
                if totals:
                    sums = [total + part for total, part in zip(totals, sums, strict=True)]
                done = totals = sums

            divergence, id_logprobs, entropy, slope_sum, hidden_slope = totals[:5]
            if beta:  # for beta 0, sum(s) is 0
                hidden_slope = hidden_slope - slope_sum * totals[5]
            results = [array.squeeze(-1) for array in (divergence, id_logprobs, entropy)]
            hidden_slope = hidden_slope / temperature
            parts.append((*results, hidden_slope, slope_sum, *teacher_sum, *student_sum))
        return lm_head.concatenate_results(parts)

    def divergence_backward(
        primals: Any, cotangents: Any, outputs: Any
    ) -> lm_head.GradientsOfHiddenAndHead:
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
                teacher_sum = _RunningSumOfExp(*(array[rows] for array in sums[:2]))
                student_sum = _RunningSumOfExp(*(array[rows] for array in sums[2:]))
                teacher_logits = tile_logits(teacher_hidden[rows], teacher.head_weight, tile, done)
                student_logits = tile_logits(hidden[rows], head_weight, tile, done)
                log_p = teacher_sum.tile_logprobs(teacher_logits)
                log_q = student_sum.tile_logprobs(student_logits)
                _, slopes = divergence_terms_and_slopes(log_p, log_q, beta)
                d_logits = d_out[rows] * (slopes - cpu.exp(log_q) * slope_sum[rows])
                d_tile = d_tile + d_logits.T @ (hidden[rows].astype(mx.float32) / temperature)
                done = [d_tile]
            d_tiles.append(d_tile.astype(head_weight.dtype))
        return d_hidden, mx.concatenate(d_tiles)

    flat_hidden = hidden.reshape(-1, hidden.shape[-1])
    outputs = gpu.call_with_vjp(divergence_forward, divergence_backward, flat_hidden, head_weight)
    divergences, logprobs, entropies = (array.reshape(ids.shape) for array in outputs[:3])
    return divergences, mx.stop_gradient(logprobs), mx.stop_gradient(entropies)


class _RunningSumOfExp(NamedTuple):
    """The sum of exp(logit) over the vocabulary tiles read so far, for each of M rows."""

    # (M, 1) the largest logit so far; it starts at -1e30, because -inf minus -inf would be nan
    peak: mx.array
    total: mx.array  # (M, 1) the sum of exp(logit - peak)

    def with_tile(self, logits: mx.array) -> "_RunningSumOfExp":
        """The sum, extended by one more tile of logits. `logits` has the shape (M, tile)."""
        peak = mx.maximum(self.peak, cpu.tiled_max(logits))
        shrunk = self.total * cpu.exp(self.peak - peak)
        return _RunningSumOfExp(peak, shrunk + cpu.tiled_sum(cpu.exp(logits - peak))[:, None])

    def tile_logprobs(self, logits: mx.array) -> mx.array:
        """
        The log-probabilities for a tile, valid once the sum includes all tiles.

        The peak is subtracted first, so that the log-probabilities of likely tokens lose no digits.
        """
        return (logits - self.peak) - mx.log(self.total)
