"""
Computes log-probabilities of given tokens, without storing the logits of all positions at once.

The loss, which is computed from log-probabilities, is in grpo.py.

Axes: N rows, T positions, M all N * T positions or a chunk of them, C hidden dimensions, V
vocabulary entries.
"""

from typing import Any, NamedTuple

import cpu_blas  # noqa: F401  (before mlx)
import mlx.core as mx

from layers import softmax
from machine import cpu, gpu, kernels

LOGPROB_CHUNK = 256  # the number of positions whose logits are in memory at once

# The number of logits in memory at once. They take 2 MB, so they stay in a CPU core's cache until
# all sums over them are computed.
LOGPROB_TILE = 2**19
# The number of rows whose logits are in memory at once if a kernel reads the logits. For Qwen's
# vocabulary, the 16-bit logits of 256 rows take 78 MB.
ROWS_AT_ONCE = 256
HEADS = ("frozen", "trained")

GradientsOfHiddenAndHead = tuple[mx.array, mx.array]
IndexAndIsInside = tuple[mx.array, mx.array]


def compute_logits(
    hidden: mx.array,
    head_weight: mx.array,
    sampled_ids: mx.array,
    support: softmax.TruncationSettings | None,
) -> mx.array:
    """
    Logits for some or all of the vocabulary, (M, C) x (V, C) -> (M, V) float32.

    A token outside the support gets the logit -1e9. The sampled ids always count as inside the
    support, because rounding may move a borderline token out of the support when its logit is
    computed again.
    """
    logits = hidden @ head_weight.astype(mx.float32).T
    if support:  # in this case, `head_weight` must cover the whole vocabulary
        in_support = mx.isfinite(softmax.truncate_logits(logits, support))
        is_sampled = mx.arange(logits.shape[-1]) == sampled_ids[:, None]
        logits = mx.where(mx.stop_gradient(in_support | is_sampled), logits, -1e9)
    return logits


def chunk_slices(length: int, chunk_size: int) -> list[slice]:
    """Consecutive slices of at most `chunk_size` indices that together cover range(length)."""
    begins = range(0, length, chunk_size)
    return [slice(begin, min(begin + chunk_size, length)) for begin in begins]


def concatenate_results(chunk_results: list[tuple[mx.array, ...]]) -> tuple[mx.array, ...]:
    """Each result as one array, joined from the arrays of all chunks of rows."""
    return tuple(mx.concatenate(list(arrays)) for arrays in zip(*chunk_results, strict=True))


def delay_until_computed(x: mx.array, prerequisites: list[mx.array]) -> mx.array:
    """
    `x`, which MLX may use only after it has computed the prerequisites.

    Without such prerequisites, MLX would compute all chunks of the logits at once and keep all of
    them in memory.
    """
    return mx.depends([x], prerequisites)[0] if prerequisites else x


def chunks_and_tiles(
    num_positions: int, vocab_size: int, support: softmax.TruncationSettings | None
) -> tuple[list[slice], list[slice]]:
    """
    Slices of the positions, called chunks, and slices of the vocabulary, called tiles.

    The logits of one chunk and one tile are computed at once.
    """
    chunk_size = LOGPROB_CHUNK
    if support:  # whole rows, few enough for the sort to need less than one gigabyte
        chunk_size = min(chunk_size, max(1, 32 * LOGPROB_TILE // vocab_size))
        tiles = [slice(0, vocab_size)]
    else:
        tile_size = max(1, LOGPROB_TILE // min(chunk_size, num_positions))
        tiles = chunk_slices(vocab_size, tile_size)
    return chunk_slices(num_positions, chunk_size), tiles


def locate_in_tile(ids: mx.array, tile: slice) -> IndexAndIsInside:
    """
    Each id's index within a tile, and whether the id is in the tile; both (M, 1).

    The index of an id outside the tile is the nearest valid index.
    """
    index = ids[:, None] - tile.start
    last = tile.stop - tile.start - 1
    return mx.clip(index, 0, last), (index >= 0) & (index <= last)


def token_logprobs(
    hidden: mx.array,
    head_weight: mx.array,
    ids: mx.array,
    *,
    temperature: float = 1.0,
    head: str = "frozen",
    support: softmax.TruncationSettings | None = None,
    gradient: bool = True,
) -> softmax.LogprobsAndEntropies:
    """
    The log-probability of each id, and the entropy at each position, at `temperature`.

    The arguments `hidden` (N, T, C), `head_weight` (V, C) and `ids` (N, T) int32 give two results
    (N, T) float32, in nats. No array of shape (N, T, V) or (T, V) is ever created. The logits are
    float32, or have the head's dtype if a kernel reads them. `support` restricts the distribution
    to the same tokens as in sampling.
    head: if "frozen", only `hidden` gets a gradient; if "trained", `head_weight` also gets one.
    gradient: whether the log-probabilities have a gradient; the entropies have none until
    `entropy.attach_entropy_gradient` attaches one.

    The vocabulary is read in tiles with a running maximum, as FlashAttention reads keys. The
    forward pass computes sum(p W) over the head's rows W together with sum(p). The gradient of
    `hidden` needs only W[id] - sum(p W), so the backward pass of a frozen head has no matmul. The
    computation of each tile waits for the previous tile, so about ten tiles are in memory at once,
    regardless of T.

    Sources: online softmax, arXiv:1805.02867; FlashAttention, arXiv:2205.14135; tiled output head,
    arXiv:2411.09009.
    """
    assert head in HEADS, head
    assert temperature > 0, temperature
    shape = ids.shape
    vocab_size, width = head_weight.shape
    hidden = hidden.reshape(-1, width)
    ids = ids.reshape(-1)

    kernel = softmax.row_logprobs_and_gradients if gradient else softmax.row_logprobs
    if not support and kernel.can_run(head_weight.dtype):
        logprobs, entropies = _logprobs_from_whole_rows(
            hidden, head_weight, ids, temperature, head, gradient
        )
        return logprobs.reshape(shape), entropies.reshape(shape)

    chunks, tiles = chunks_and_tiles(ids.size, vocab_size, support)

    def logprobs_forward(hidden: mx.array, head_weight: mx.array) -> tuple[mx.array, ...]:
        scaled = hidden.astype(mx.float32) / temperature
        parts = []
        done: list[mx.array] = []
        for rows in chunks:
            state = _RunningSoftmax.before_first_tile(scaled[rows], gradient)
            for tile in tiles:
                x = delay_until_computed(scaled[rows], done)
                state = state.with_tile(x, head_weight, ids[rows], tile, support)
                done = [array for array in state if array is not None]
            parts.append(
                state.logprobs_entropies_logsumexps_slopes(head_weight[ids[rows]], temperature)
            )
        return concatenate_results(parts)

    def logprobs_backward(primals: Any, cotangents: Any, outputs: Any) -> GradientsOfHiddenAndHead:
        hidden, head_weight = primals
        assert gradient, "gradient=False, so the forward pass stored nothing for a gradient"
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
                x = delay_until_computed(scaled[rows], done)
                d_logprob = d_logprobs[rows]
                logits = compute_logits(x, head_weight[tile], ids[rows], support)
                logprobs = logits - logsumexps[rows, None]  # (M, tile)
                index, is_inside = locate_in_tile(ids[rows], tile)
                row = mx.arange(x.shape[0])[:, None]
                # d logprob[id] = onehot - p
                slopes = cpu.exp(logprobs) * d_logprob
                slopes = slopes.at[row, index].add(mx.where(is_inside, -d_logprob, 0.0))
                d_tile = d_tile - slopes.T @ x
                done = [d_tile]
            d_tiles.append(d_tile.astype(head_weight.dtype))
        return d_hidden, mx.concatenate(d_tiles)

    outputs = gpu.call_with_vjp(logprobs_forward, logprobs_backward, hidden, head_weight)
    return outputs[0].reshape(shape), outputs[1].reshape(shape)


class _RunningSoftmax(NamedTuple):
    """The sums of M softmaxes over the part of the vocabulary that has been read."""

    peak: mx.array  # (M, 1) the largest logit
    total: mx.array  # (M, 1) the sum of the weights exp(logit - peak)
    moment: mx.array  # (M, 1) the sum of weight * (logit - peak)
    chosen: mx.array  # (M, 1) the logit of the given id
    mean: mx.array | None  # (M, C) the sum of weight * head row; None if no gradient is needed

    @classmethod
    def before_first_tile(cls, hidden: mx.array, gradient: bool) -> "_RunningSoftmax":
        """The state before the first tile, for hidden states (M, C)."""
        zeros = mx.zeros((hidden.shape[0], 1))
        mean = mx.zeros(hidden.shape) if gradient else None
        # the initial peak is finite, because -inf minus -inf would be nan
        return cls(zeros - 1e30, zeros, zeros, zeros, mean)

    def with_tile(
        self,
        hidden: mx.array,
        head_weight: mx.array,
        ids: mx.array,
        tile: slice,
        support: softmax.TruncationSettings | None,
    ) -> "_RunningSoftmax":
        """The state after one more tile of the vocabulary."""
        weight = head_weight[tile].astype(mx.float32)
        logits = compute_logits(hidden, weight, ids, support)  # (M, tile)
        index, is_inside = locate_in_tile(ids, tile)
        id_logits = mx.take_along_axis(logits, index, axis=-1)

        peak = mx.maximum(self.peak, cpu.tiled_max(logits))
        logits = logits - peak
        shift = self.peak - peak
        shrink = cpu.exp(shift)
        weights = cpu.exp(logits)
        weighted_logits = weights * logits
        return _RunningSoftmax(
            peak,
            shrink * self.total + cpu.tiled_sum(weights)[:, None],
            shrink * (self.moment + shift * self.total) + cpu.tiled_sum(weighted_logits)[:, None],
            mx.where(is_inside, id_logits, self.chosen),
            None if self.mean is None else shrink * self.mean + weights @ weight,
        )

    def logprobs_entropies_logsumexps_slopes(
        self, id_head_rows: mx.array, temperature: float
    ) -> tuple[mx.array, ...]:
        """
        The log-probabilities, the entropies and the logsumexps, (M,) each.

        If a gradient is needed, the last result (M, C) contains the derivatives of the
        log-probabilities with respect to `hidden`. `id_head_rows` (M, C) contains the head's row
        for each id.
        """
        log_total = mx.log(self.total)
        logprobs = self.chosen - self.peak - log_total
        entropies = log_total - self.moment / self.total
        logsumexps = self.peak + log_total
        results = [array.squeeze(-1) for array in (logprobs, entropies, logsumexps)]
        if self.mean is not None:
            mean_row = self.mean / self.total
            results.append((id_head_rows.astype(mx.float32) - mean_row) / temperature)
        return tuple(results)


def _logprobs_from_whole_rows(
    hidden: mx.array,
    head_weight: mx.array,
    ids: mx.array,
    temperature: float,
    head: str,
    gradient: bool,
) -> softmax.LogprobsAndEntropies:
    """
    The results of `token_logprobs`, computed on a GPU for a few whole rows of logits at a time.

    The hidden states are (M, C), the head is (V, C), and the ids are (M,). The logits have the
    head's dtype. From a chunk of logits, one kernel computes the results and the gradient of the
    log-probabilities with respect to the logits. This gradient is immediately multiplied by the
    head, so only C numbers per row are stored for the backward pass. The backward pass has no
    matmul unless the head is trained.
    """
    chunks = chunk_slices(ids.size, ROWS_AT_ONCE)

    def logprobs_forward(hidden: mx.array, head_weight: mx.array) -> tuple[mx.array, ...]:
        parts: list[tuple[mx.array, ...]] = []
        for chunk in chunks:
            done = list(parts[-1]) if parts else []
            logits = delay_until_computed(hidden[chunk], done) @ head_weight.T
            if gradient:
                *results, slopes = softmax.row_logprobs_and_gradients(
                    logits, ids[chunk], temperature
                )
                parts.append((*results, slopes @ head_weight))
            else:
                parts.append(softmax.row_logprobs(logits, ids[chunk], temperature))
        return concatenate_results(parts)

    def logprobs_backward(primals: Any, cotangents: Any, outputs: Any) -> GradientsOfHiddenAndHead:
        hidden, head_weight = primals
        factor = cotangents[0][:, None] / (softmax.SLOPE_SCALE * temperature)
        d_hidden = (factor * outputs[2]).astype(hidden.dtype)
        d_head = mx.zeros(head_weight.shape, mx.float32)
        if head == "trained":
            for chunk in chunks:
                x = delay_until_computed(hidden[chunk], [d_head])
                *_, slopes = softmax.row_logprobs_and_gradients(
                    x @ head_weight.T, ids[chunk], temperature
                )
                d_head = d_head + slopes.T @ (factor[chunk] * x).astype(x.dtype)
        return d_hidden, d_head.astype(head_weight.dtype)

    logprobs, entropies, *_ = gpu.call_with_vjp(
        logprobs_forward, logprobs_backward, hidden, head_weight
    )
    return logprobs, entropies


def record_head_calls(head_weight: mx.array) -> list[kernels.Call]:
    """The kernel calls that an update with this head (V, C) makes, recorded on random inputs."""
    hidden = kernels.random_normal_array(2, 3, head_weight.shape[1], dtype=head_weight.dtype)
    ids = mx.array([[1, 2, 3], [3, 2, 1]]) % len(head_weight)

    def logprobs_of_trained_head(hidden: mx.array) -> mx.array:
        return token_logprobs(hidden, head_weight, ids, head="trained")[0]

    with kernels.record_calls_without_kernels() as calls:
        token_logprobs(hidden, head_weight, ids, gradient=False)
        mx.vjp(logprobs_of_trained_head, [hidden], [mx.ones(ids.shape)])
    return calls
