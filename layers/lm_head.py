"""
Log-probabilities of given tokens from hidden states, without storing the logits of all tokens.

The loss, which is computed from log-probabilities, is in grpo.py.

Axes: N rows, T positions, M all N * T positions or some of them, C hidden, V vocabulary.
"""

from typing import Any, NamedTuple

import mlx.core as mx

from layers import softmax
from machine import cpu, gpu, kernels

LOGPROB_CHUNK = 256  # the number of positions whose logits exist at once
# The number of logits that exist at once. Their 2 MB stay in a core's cache until the last sum.
LOGPROB_TILE = 2**19
# The number of rows whose logits exist at once if a kernel reads them. In 16 bits, they take 78 MB
# for Qwen's vocabulary.
ROWS_AT_ONCE = 256
HEADS = ("frozen", "trained")


def compute_logits(
    x: mx.array, weight: mx.array, ids: mx.array, support: softmax.Support | None
) -> mx.array:
    """
    Logits for some or all of the vocabulary, (M, C) x (V, C) -> (M, V) float32.

    A token outside the support has the logit -1e9. The given ids, which were sampled, always count
    as inside: rounding may put a borderline token outside when its logit is computed again.
    """
    logits = x @ weight.astype(mx.float32).T
    if support:  # only ever with the whole vocabulary
        in_support = mx.isfinite(softmax.truncate_logits(logits, support))
        is_sampled = mx.arange(logits.shape[-1]) == ids[:, None]
        logits = mx.where(mx.stop_gradient(in_support | is_sampled), logits, -1e9)
    return logits


def chunk_slices(length: int, step: int) -> list[slice]:
    """Slices of at most `step` that cover `length`."""
    return [slice(begin, min(begin + step, length)) for begin in range(0, length, step)]


def concatenate_results(parts: list[tuple[mx.array, ...]]) -> tuple[mx.array, ...]:
    """Each result, joined over all chunks of rows."""
    return tuple(mx.concatenate(list(column)) for column in zip(*parts, strict=True))


def wait_for(x: mx.array, done: list[mx.array]) -> mx.array:
    """
    `x`, which becomes available only when `done` is computed.

    Without this, MLX would compute all chunks at once, and hold them all in memory.
    """
    return mx.depends([x], done)[0] if done else x


def locate_in_tile(ids: mx.array, tile: slice) -> tuple[mx.array, mx.array]:
    """
    Each id's place in a tile, and whether the id is in the tile; (M, 1) each.

    An id outside the tile gets the nearest place inside.
    """
    place = ids[:, None] - tile.start
    last = tile.stop - tile.start - 1
    return mx.clip(place, 0, last), (place >= 0) & (place <= last)


def token_logprobs(
    hidden: mx.array,
    head_weight: mx.array,
    ids: mx.array,
    *,
    temperature: float = 1.0,
    head: str = "frozen",
    support: softmax.Support | None = None,
    gradient: bool = True,
) -> tuple[mx.array, mx.array]:
    """
    The log-probability of each id, and the entropy of its distribution, at `temperature`.

    hidden (N, T, C), head_weight (V, C), ids (N, T) int32 -> two (N, T) float32, nats. Neither
    (N, T, V) nor (T, V) ever exists. The logits are float32, or of the head's type where a kernel
    reads them. `support` restricts the distribution as in sampling.
    head: "frozen" gives only `hidden` a gradient, "trained" also `head_weight`.
    gradient: whether the log-probabilities have a gradient; entropies never have one.

    The vocabulary is read in tiles with a running maximum, as attention reads keys. The forward
    pass computes sum(p W) over the head's rows W together with sum(p). The gradient of `hidden`
    needs only d logprob = W[id] - sum(p W), so the backward pass of a frozen head has no matmul.
    Each tile waits for the tile before it, so about ten tiles are in memory, whatever T is.

    Source: online softmax, arXiv:1805.02867; FlashAttention, arXiv:2205.14135; a head in tiles,
    arXiv:2411.09009.
    """
    assert head in HEADS, head
    assert temperature > 0, temperature
    shape = ids.shape
    vocab_size, width = head_weight.shape
    hidden = hidden.reshape(-1, width)
    ids = ids.reshape(-1)

    kernel = softmax.row_slopes if gradient else softmax.row_logprobs
    if not support and kernel.can_run(head_weight.dtype):
        logprobs, entropies = _logprobs_by_rows(
            hidden, head_weight, ids, temperature, head, gradient
        )
        return logprobs.reshape(shape), entropies.reshape(shape)

    chunk_size = LOGPROB_CHUNK
    if support:  # whole rows, so few that sorting them needs less than a gigabyte
        chunk_size = min(chunk_size, max(1, 32 * LOGPROB_TILE // vocab_size))
        tiles = [slice(0, vocab_size)]
    else:
        tile_size = max(1, LOGPROB_TILE // min(chunk_size, ids.size))
        tiles = chunk_slices(vocab_size, tile_size)
    chunks = chunk_slices(ids.size, chunk_size)

    def forward(hidden: mx.array, head_weight: mx.array) -> tuple[mx.array, ...]:
        scaled = hidden.astype(mx.float32) / temperature
        parts = []
        done: list[mx.array] = []
        for rows in chunks:
            state = _Softmax.start(scaled[rows], gradient)
            for tile in tiles:
                x = wait_for(scaled[rows], done)
                state = state.with_tile(x, head_weight, ids[rows], tile, support)
                done = [array for array in state if array is not None]
            parts.append(state.results(head_weight[ids[rows]], temperature))
        return concatenate_results(parts)

    def backward(primals: Any, cotangents: Any, outputs: Any) -> tuple[mx.array, mx.array]:
        hidden, head_weight = primals
        assert gradient, "the forward pass stored nothing for a gradient"
        d_logprobs = cotangents[0][:, None]
        _, _, logsumexps, hidden_slopes = outputs
        d_hidden = (d_logprobs * hidden_slopes).astype(hidden.dtype)
        if head == "frozen":
            return d_hidden, mx.zeros_like(head_weight)

        scaled = hidden.astype(mx.float32) / temperature
        d_tiles = []
        done: list[mx.array] = []
        for tile in tiles:
            d_tile = mx.zeros((tile.stop - tile.start, width), mx.float32)
            for rows in chunks:
                x = wait_for(scaled[rows], done)
                d_logprob = d_logprobs[rows]
                logits = compute_logits(x, head_weight[tile], ids[rows], support)
                logprobs = logits - logsumexps[rows, None]  # (M, tile)
                place, is_inside = locate_in_tile(ids[rows], tile)
                row = mx.arange(x.shape[0])[:, None]
                # d logprob[id] = onehot - p
                slopes = cpu.exp(logprobs) * d_logprob
                slopes = slopes.at[row, place].add(mx.where(is_inside, -d_logprob, 0.0))
                d_tile = d_tile - slopes.T @ x
                done = [d_tile]
            d_tiles.append(d_tile.astype(head_weight.dtype))
        return d_hidden, mx.concatenate(d_tiles)

    outputs = gpu.call_with_vjp(forward, backward, hidden, head_weight)
    return outputs[0].reshape(shape), outputs[1].reshape(shape)


class _Softmax(NamedTuple):
    """
    The state of M softmaxes after a part of the vocabulary has been read.
    """

    peak: mx.array  # (M, 1) the largest logit
    total: mx.array  # (M, 1) sum of the weights exp(logit - peak)
    moment: mx.array  # (M, 1) sum of weight * (logit - peak)
    chosen: mx.array  # (M, 1) the logit of the id
    mean: mx.array | None  # (M, C) sum of weight * row of the head; None without a gradient

    @classmethod
    def start(cls, x: mx.array, gradient: bool) -> "_Softmax":
        """The state before the first tile, for hidden states (M, C)."""
        zeros = mx.zeros((x.shape[0], 1))
        mean = mx.zeros(x.shape) if gradient else None
        # the first peak is finite: -inf minus -inf would be nan
        return cls(zeros - 1e30, zeros, zeros, zeros, mean)

    def with_tile(
        self,
        x: mx.array,
        head_weight: mx.array,
        ids: mx.array,
        tile: slice,
        support: softmax.Support | None,
    ) -> "_Softmax":
        """The state after one more tile of the vocabulary."""
        weight = head_weight[tile].astype(mx.float32)
        logits = compute_logits(x, weight, ids, support)  # (M, tile)
        place, is_inside = locate_in_tile(ids, tile)
        id_logits = mx.take_along_axis(logits, place, axis=-1)

        peak = mx.maximum(self.peak, cpu.tiled_max(logits))
        logits = logits - peak
        shift = self.peak - peak
        shrink = cpu.exp(shift)
        weights = cpu.exp(logits)
        weighted_logits = weights * logits
        return _Softmax(
            peak,
            shrink * self.total + cpu.tiled_sum(weights)[:, None],
            shrink * (self.moment + shift * self.total) + cpu.tiled_sum(weighted_logits)[:, None],
            mx.where(is_inside, id_logits, self.chosen),
            None if self.mean is None else shrink * self.mean + weights @ weight,
        )

    def results(self, chosen_rows: mx.array, temperature: float) -> tuple[mx.array, ...]:
        """
        Log-probabilities, entropies and logsumexps, (M,) each.

        If there is a gradient, the last result is the slopes of the log-probabilities by `hidden`,
        (M, C). chosen_rows (M, C): the head's rows for the ids.
        """
        log_total = mx.log(self.total)
        logprobs = self.chosen - self.peak - log_total
        entropies = log_total - self.moment / self.total
        logsumexps = self.peak + log_total
        results = [array.squeeze(-1) for array in (logprobs, entropies, logsumexps)]
        if self.mean is not None:
            mean_row = self.mean / self.total
            results.append((chosen_rows.astype(mx.float32) - mean_row) / temperature)
        return tuple(results)


def _logprobs_by_rows(
    hidden: mx.array,
    head_weight: mx.array,
    ids: mx.array,
    temperature: float,
    head: str,
    gradient: bool,
) -> tuple[mx.array, ...]:
    """
    `token_logprobs` for a GPU, from (M, C), (V, C) and (M,): some whole rows of logits at a time.

    The logits have the head's type. One kernel computes from a chunk of logits the results and the
    gradient of the log-probabilities, which is multiplied by the head at once. So only C numbers
    per row are stored for the backward pass, which has no matmul unless the head is trained.
    """
    chunks = chunk_slices(ids.size, ROWS_AT_ONCE)

    def forward(hidden: mx.array, head_weight: mx.array) -> tuple[mx.array, ...]:
        parts: list[tuple[mx.array, ...]] = []
        for chunk in chunks:
            done = list(parts[-1]) if parts else []
            logits = wait_for(hidden[chunk], done) @ head_weight.T
            if gradient:
                *results, slopes = softmax.row_slopes(logits, ids[chunk], temperature)
                parts.append((*results, slopes @ head_weight))
            else:
                parts.append(softmax.row_logprobs(logits, ids[chunk], temperature))
        return concatenate_results(parts)

    def backward(primals: Any, cotangents: Any, outputs: Any) -> tuple[mx.array, mx.array]:
        hidden, head_weight = primals
        factor = cotangents[0][:, None] / (softmax.SLOPE_SCALE * temperature)
        d_hidden = (factor * outputs[2]).astype(hidden.dtype)
        d_head = mx.zeros(head_weight.shape, mx.float32)
        if head == "trained":
            for chunk in chunks:
                x = wait_for(hidden[chunk], [d_head])
                *_, slopes = softmax.row_slopes(x @ head_weight.T, ids[chunk], temperature)
                d_head = d_head + slopes.T @ (factor[chunk] * x).astype(x.dtype)
        return d_hidden, d_head.astype(head_weight.dtype)

    logprobs, entropies, *_ = gpu.call_with_vjp(forward, backward, hidden, head_weight)
    return logprobs, entropies


def rehearse_head(head: mx.array) -> list[kernels.Call]:
    """Calls the kernels that an update with this head (V, C) uses, and returns these calls."""
    hidden = kernels.normal_array(2, 3, head.shape[1], dtype=head.dtype)
    ids = mx.array([[1, 2, 3], [3, 2, 1]]) % len(head)

    def trained_logprobs(x: mx.array) -> mx.array:
        return token_logprobs(x, head, ids, head="trained")[0]

    with kernels.record_calls() as calls:
        token_logprobs(hidden, head, ids, gradient=False)
        mx.vjp(trained_logprobs, [hidden], [mx.ones(ids.shape)])
    return calls
