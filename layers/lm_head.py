"""
Log-probabilities of chosen tokens from hidden states, over a vocabulary whose logits never exist at once.

What is left out: the loss that is made of them, which is in grpo.py.

Axes: N rows, T positions, M = N * T of them or a part, C hidden, V vocabulary.
"""

from typing import Any, NamedTuple

import mlx.core as mx

from layers import softmax
from machine import cpu, gpu, kernels


def logits_of(x: mx.array, weight: mx.array, ids: mx.array, support: softmax.Support | None) -> mx.array:
    """
    Scores of some or all of the vocabulary, (M, C) x (V, C) -> (M, V) float32; -1e9 outside the support.

    A sampled id stays in its own support: rounding may put a borderline token outside when it is scored again.
    """
    logits = x @ weight.astype(mx.float32).T
    if support:  # only ever with the whole vocabulary
        kept = mx.isfinite(softmax.truncate_logits(logits, support)) | (mx.arange(logits.shape[-1]) == ids[:, None])
        logits = mx.where(mx.stop_gradient(kept), logits, -1e9)
    return logits


LOGPROB_CHUNK = 256  # positions whose logits exist at once
LOGPROB_TILE = 2**19  # logits that exist at once, 2 MB: they stay in a core's cache from the matmul to the last sum
HEADS = ("frozen", "trained")


def slices(length: int, step: int) -> list[slice]:
    return [slice(begin, min(begin + step, length)) for begin in range(0, length, step)]


ROWS_AT_ONCE = 256  # whose logits exist at once where a kernel takes them: 78 MB at Qwen's vocabulary in 16 bits


def joined(parts: list[tuple[mx.array, ...]]) -> tuple[mx.array, ...]:
    """Each of some results of all chunks of rows."""
    return tuple(mx.concatenate(list(column)) for column in zip(*parts, strict=True))


def _in_rows(
    hidden: mx.array, head_weight: mx.array, ids: mx.array, temperature: float, head: str, gradient: bool
) -> tuple[mx.array, ...]:
    """
    `token_logprobs` for a GPU, from (M, C), (V, C) and (M,): whole rows of logits in the head's type, some at a time.

    One kernel makes of a chunk's logits the results and the gradient of the log-probabilities, which at once goes back
    through the head: a row of C numbers waits for the backward pass, which has no matmul left unless the head trains.
    """
    chunks = slices(ids.size, ROWS_AT_ONCE)

    def forward(hidden: mx.array, head_weight: mx.array) -> tuple[mx.array, ...]:
        parts: list[tuple[mx.array, ...]] = []
        for chunk in chunks:
            logits = wait(hidden[chunk], list(parts[-1]) if parts else []) @ head_weight.T
            if gradient:
                *found, slopes = softmax.row_slopes(logits, ids[chunk], temperature)
                parts.append((*found, slopes @ head_weight))
            else:
                parts.append(softmax.row_logprobs(logits, ids[chunk], temperature))
        return joined(parts)

    def backward(primals: Any, cotangents: Any, outputs: Any) -> tuple[mx.array, mx.array]:
        hidden, head_weight = primals
        factor = cotangents[0][:, None] / (softmax.SLOPE_SCALE * temperature)
        d_hidden, d_head = (factor * outputs[2]).astype(hidden.dtype), mx.zeros(head_weight.shape, mx.float32)
        for chunk in chunks if head == "trained" else []:
            x = wait(hidden[chunk], [d_head])
            *_, slopes = softmax.row_slopes(x @ head_weight.T, ids[chunk], temperature)
            d_head = d_head + slopes.T @ (factor[chunk] * x).astype(x.dtype)
        return d_hidden, d_head.astype(head_weight.dtype)

    logprobs, entropies, *_ = gpu.differentiable(forward, backward, hidden, head_weight)
    return logprobs, entropies


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
    Log-probability of each id and entropy of its distribution at `temperature`; neither (N, T, V) nor (T, V) exists.

    hidden (N, T, C), head_weight (V, C), ids (N, T) int32 -> two (N, T) float32, nats; the logits are float32, but of
    the head's type where a kernel reads them. `support` restricts the distribution as the sampler did.
    head: "frozen" gives `hidden` its gradient, "trained" `head_weight` too. gradient: whether the log-probabilities
    have one; entropies are only looked at.

    The vocabulary goes by in tiles under a running maximum, as keys do in attention. sum(p W) over the head's rows W
    comes out beside sum(p), and d logprob = W[id] - sum(p W) is all that the gradient of `hidden` needs: the backward
    pass of a frozen head has no matmul. Each tile waits for the one before, so some ten are in memory, whatever T is.
    Source: online softmax, arXiv:1805.02867; FlashAttention, arXiv:2205.14135; a head cut up, arXiv:2411.09009.
    """
    assert head in HEADS, head
    assert temperature > 0, temperature
    shape, (vocab, width) = ids.shape, head_weight.shape
    hidden, ids = hidden.reshape(-1, width), ids.reshape(-1)
    if not support and (softmax.row_slopes if gradient else softmax.row_logprobs).runs(head_weight.dtype):
        logprobs, entropies = _in_rows(hidden, head_weight, ids, temperature, head, gradient)
        return logprobs.reshape(shape), entropies.reshape(shape)
    chunk = LOGPROB_CHUNK
    if support:  # whole rows, as many as keep what sorting them needs below a gigabyte
        chunk = min(chunk, max(1, 32 * LOGPROB_TILE // vocab))
    rows_of_chunks = slices(ids.size, chunk)
    columns = [slice(0, vocab)] if support else slices(vocab, max(1, LOGPROB_TILE // min(chunk, ids.size)))

    def forward(hidden: mx.array, head_weight: mx.array) -> tuple[mx.array, ...]:
        scaled, parts = hidden.astype(mx.float32) / temperature, []
        done: list[mx.array] = []
        for rows in rows_of_chunks:
            nothing, mean = mx.zeros((rows.stop - rows.start, 1)), mx.zeros(scaled[rows].shape) if gradient else None
            state = _Softmax(nothing - 1e30, nothing, nothing, nothing, mean)  # finite: -inf less -inf would be nan
            for tile in columns:
                state = state.after(wait(scaled[rows], done), head_weight, ids[rows], tile, support)
                done = [array for array in state if array is not None]
            parts.append(state.results(head_weight[ids[rows]], temperature))
        return joined(parts)

    def backward(primals: Any, cotangents: Any, outputs: Any) -> tuple[mx.array, mx.array]:
        hidden, head_weight = primals
        assert gradient, "nothing was kept for a gradient"
        d_logprobs, (_, _, total, slope) = cotangents[0][:, None], outputs
        d_hidden = (d_logprobs * slope).astype(hidden.dtype)
        if head == "frozen":
            return d_hidden, mx.zeros_like(head_weight)
        scaled, d_tiles = hidden.astype(mx.float32) / temperature, []
        done: list[mx.array] = []
        for tile in columns:
            d_tile = mx.zeros((tile.stop - tile.start, width), mx.float32)
            for rows in rows_of_chunks:
                x, d_logprob = wait(scaled[rows], done), d_logprobs[rows]
                logprobs = logits_of(x, head_weight[tile], ids[rows], support) - total[rows, None]  # (M, tile)
                place, inside = place_of(ids[rows], tile)
                row = mx.arange(x.shape[0])[:, None]
                # d logprob[id] = onehot - p
                slopes = (cpu.exp(logprobs) * d_logprob).at[row, place].add(mx.where(inside, -d_logprob, 0.0))
                d_tile = d_tile - slopes.T @ x
                done = [d_tile]
            d_tiles.append(d_tile.astype(head_weight.dtype))
        return d_hidden, mx.concatenate(d_tiles)

    outputs = gpu.differentiable(forward, backward, hidden, head_weight)
    return outputs[0].reshape(shape), outputs[1].reshape(shape)


def wait(x: mx.array, done: list[mx.array]) -> mx.array:
    """`x`, but not before `done`: what waits for nothing is computed, and held, at once."""
    return mx.depends([x], done)[0] if done else x


def place_of(ids: mx.array, tile: slice) -> tuple[mx.array, mx.array]:
    """Where in a tile each id stands, the nearest place if outside, and whether it is inside; (M, 1) each."""
    place, last = ids[:, None] - tile.start, tile.stop - tile.start - 1
    return mx.clip(place, 0, last), (place >= 0) & (place <= last)


class _Softmax(NamedTuple):
    """What is known of M distributions after some of the vocabulary; every sum is over exp(logit - peak)."""

    peak: mx.array  # (M, 1) the largest logit
    total: mx.array  # (M, 1) sum of the weights
    moment: mx.array  # (M, 1) sum of weight * (logit - peak)
    chosen: mx.array  # (M, 1) the logit of the id
    mean: mx.array | None  # (M, C) sum of weight * row of the head

    def after(
        self, x: mx.array, head_weight: mx.array, ids: mx.array, tile: slice, support: softmax.Support | None
    ) -> "_Softmax":
        """The state with one more tile of the vocabulary taken in."""
        weight = head_weight[tile].astype(mx.float32)
        logits = logits_of(x, weight, ids, support)  # (M, tile)
        place, inside = place_of(ids, tile)
        found = mx.take_along_axis(logits, place, axis=-1)
        peak = mx.maximum(self.peak, cpu.largest(logits))
        logits, moved = logits - peak, self.peak - peak
        shrunk, weights = cpu.exp(moved), cpu.exp(logits)
        weighted = weights * logits
        return _Softmax(
            peak,
            shrunk * self.total + cpu.tiled_sum(weights)[:, None],
            shrunk * (self.moment + moved * self.total) + cpu.tiled_sum(weighted)[:, None],
            mx.where(inside, found, self.chosen),
            None if self.mean is None else shrunk * self.mean + weights @ weight,
        )

    def results(self, chosen_rows: mx.array, temperature: float) -> tuple[mx.array, ...]:
        """Log-probabilities, entropies and logsumexps (M,), and the first's gradient by `hidden`, (M, C)."""
        log_total, moment = mx.log(self.total), self.moment / self.total
        logprobs, entropy = self.chosen - self.peak - log_total, log_total - moment
        kept = []
        if self.mean is not None:
            kept.append((chosen_rows.astype(mx.float32) - self.mean / self.total) / temperature)
        return *(array.squeeze(-1) for array in (logprobs, entropy, self.peak + log_total)), *kept


def rehearse(head: mx.array) -> list[kernels.Call]:
    """What an update calls with a head of this shape and type, on a few tokens. head (V, C)."""
    hidden, ids = kernels.normal(2, 3, head.shape[1], dtype=head.dtype), mx.array([[1, 2, 3], [3, 2, 1]]) % len(head)
    with kernels.recording() as calls:
        token_logprobs(hidden, head, ids, gradient=False)
        mx.vjp(lambda x: token_logprobs(x, head, ids, head="trained")[0], [hidden], [mx.ones(ids.shape)])
    return calls
