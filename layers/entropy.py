"""
The gradient of entropies with respect to hidden states and the head.

layers/lm_head.py computes the entropies. A distribution p = softmax(z) has the entropy
H = -sum(p log p), whose derivative with respect to z[j] is -p[j] (log p[j] + H). Only a loss that
differentiates entropies needs this file.

Axes: N rows, T positions, M all N * T positions or a chunk of them, C hidden dimensions, V
vocabulary entries.
"""

from typing import Any, NamedTuple

import cpu_blas  # noqa: F401  (before mlx)
import mlx.core as mx

from layers import lm_head, softmax
from machine import cpu, gpu

GradientsOfHiddenHeadAndEntropies = tuple[mx.array, mx.array, mx.array]


def attach_entropy_gradient(
    entropies: mx.array,
    hidden: mx.array,
    head_weight: mx.array,
    ids: mx.array,
    *,
    temperature: float = 1.0,
    head: str = "frozen",
    support: softmax.TruncationSettings | None = None,
) -> mx.array:
    """
    The same entropies (N, T), now with a gradient with respect to `hidden` and the head.

    The entropies must be those that `lm_head.token_logprobs` returned for the same `hidden`
    (N, T, C), `head_weight` (V, C), `ids` (N, T) and settings.
    head: if "frozen", only `hidden` gets a gradient; if "trained", `head_weight` also gets one.

    The forward pass computes nothing. The backward pass reads the vocabulary in tiles, as
    `lm_head.token_logprobs` does, and takes three matmuls with the head, or five if the head is
    trained. It runs only if a gradient reaches the entropies. All sums in the gradient of `hidden`
    are computed from the same logits, because sums of differently rounded logits would not cancel.
    """
    assert head in lm_head.HEADS, head
    assert temperature > 0, temperature
    vocab_size, width = head_weight.shape
    flat_ids = ids.reshape(-1)
    chunks, tiles = lm_head.chunks_and_tiles(flat_ids.size, vocab_size, support)

    def entropy_forward(
        hidden: mx.array, head_weight: mx.array, entropies: mx.array
    ) -> tuple[mx.array]:
        return (entropies,)

    def entropy_backward(
        primals: Any, cotangents: Any, outputs: Any
    ) -> GradientsOfHiddenHeadAndEntropies:
        hidden, head_weight, entropies = primals
        scaled = hidden.reshape(-1, width).astype(mx.float32) / temperature
        d_entropies = cotangents[0].reshape(-1, 1)
        parts = []
        done: list[mx.array] = []
        for rows in chunks:
            state = _RunningMoments.before_first_tile(scaled[rows])
            for tile in tiles:
                x = lm_head.delay_until_computed(scaled[rows], done)
                weight = head_weight[tile].astype(mx.float32)
                logits = lm_head.compute_logits(x, weight, flat_ids[rows], support)
                state = state.with_tile(logits, weight)
                done = list(state)
            parts.append(state.logsumexps_entropies_slopes())
        logsumexps, exact_entropies, slopes = lm_head.concatenate_results(parts)
        d_hidden = (d_entropies * slopes / temperature).reshape(hidden.shape).astype(hidden.dtype)
        no_gradient = mx.zeros_like(entropies)
        if head == "frozen":
            return d_hidden, mx.zeros_like(head_weight), no_gradient

        d_tiles = []
        done = []
        for tile in tiles:
            d_tile = mx.zeros((tile.stop - tile.start, width), mx.float32)
            for rows in chunks:
                x = lm_head.delay_until_computed(scaled[rows], done)
                logits = lm_head.compute_logits(x, head_weight[tile], flat_ids[rows], support)
                logprobs = logits - logsumexps[rows]  # (M, tile)
                # a token outside the support has probability 0 and log-probability -1e9
                logit_slopes = -cpu.exp(logprobs) * (logprobs + exact_entropies[rows])
                d_tile = d_tile + (d_entropies[rows] * logit_slopes).T @ x
                done = [d_tile]
            d_tiles.append(d_tile.astype(head_weight.dtype))
        return d_hidden, mx.concatenate(d_tiles), no_gradient

    (result,) = gpu.call_with_vjp(
        entropy_forward, entropy_backward, hidden, head_weight, mx.stop_gradient(entropies)
    )
    return result


class _RunningMoments(NamedTuple):
    """
    Sums over the part of the vocabulary that has been read, for each of M rows.

    A weight is exp(logit - peak), and a shifted logit is logit - peak.
    """

    peak: mx.array  # (M, 1) the largest logit
    total: mx.array  # (M, 1) the sum of the weights
    moment: mx.array  # (M, 1) the sum of weight * shifted logit
    mean: mx.array  # (M, C) the sum of weight * head row
    moment_mean: mx.array  # (M, C) the sum of weight * shifted logit * head row

    @classmethod
    def before_first_tile(cls, hidden: mx.array) -> "_RunningMoments":
        """The sums before the first tile, for hidden states (M, C)."""
        zeros = mx.zeros((hidden.shape[0], 1))
        # the initial peak is finite, because -inf minus -inf would be nan
        return cls(zeros - 1e30, zeros, zeros, mx.zeros(hidden.shape), mx.zeros(hidden.shape))

    def with_tile(self, logits: mx.array, head_rows: mx.array) -> "_RunningMoments":
        """The sums that include one more tile: its logits (M, tile) and head rows (tile, C)."""
        peak = mx.maximum(self.peak, cpu.tiled_max(logits))
        shift = self.peak - peak
        shrink = cpu.exp(shift)
        shifted = logits - peak
        weights = cpu.exp(shifted)
        weighted_logits = weights * shifted
        return _RunningMoments(
            peak,
            shrink * self.total + cpu.tiled_sum(weights)[:, None],
            shrink * (self.moment + shift * self.total) + cpu.tiled_sum(weighted_logits)[:, None],
            shrink * self.mean + weights @ head_rows,
            shrink * (self.moment_mean + shift * self.mean) + weighted_logits @ head_rows,
        )

    def logsumexps_entropies_slopes(self) -> tuple[mx.array, ...]:
        """
        The logsumexps and entropies, (M, 1), and the derivatives of the entropies, (M, C).

        The derivatives are with respect to the hidden states after their division by the
        temperature. Each derivative is minus the covariance of the logits and the head's rows.
        """
        log_total = mx.log(self.total)
        mean_logit = self.moment / self.total
        slopes = mean_logit * (self.mean / self.total) - self.moment_mean / self.total
        return self.peak + log_total, log_total - mean_logit, slopes
