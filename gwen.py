"""
Qwen2, Qwen2.5 and Qwen3 dense models on MLX: blocks, log-probabilities, load from and save to Hugging Face's layout.

The three query, key and value projections are one matmul (`qkv_proj`), gate and up are one (`gate_up_proj`). Every
expression that a custom kernel may replace is a function of its own (`norm_rope`, `attention`, `swiglu`,
`token_logprobs`), whose plain form is the definition of what it computes. What is left out: quantization, mixture of
experts, sliding windows; a checkpoint that needs them is refused by name.

Axes: N rows, L positions, C hidden, H query heads, K kv heads, D head dim, F mlp width, V vocabulary.
"""

import functools
import json
import math
import os
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

import hub
from kv_cache import Group, KVCache, LayerCache, Layout, Parts, SlotCache, SlotLayer, TreeCache, TreeLayer

DTYPES = {"float16": mx.float16, "bfloat16": mx.bfloat16, "float32": mx.float32}


def on_gpu() -> bool:
    """Whether MLX computes on a GPU (Metal or CUDA)."""
    return mx.default_device().type == mx.gpu


def default_dtype() -> mx.Dtype:
    """
    `GWEN_DTYPE`, else float16 on a GPU and float32 on a CPU (where 16-bit matmuls do not use BLAS).

    Raises ValueError when the variable names another type.
    """
    name = os.environ.get("GWEN_DTYPE", "float16" if on_gpu() else "float32")
    if name not in DTYPES:
        raise ValueError(f"GWEN_DTYPE={name!r} is not one of {', '.join(DTYPES)}")
    return DTYPES[name]


# ---- the expressions that kernels may replace


def exp(x: mx.array) -> mx.array:
    """e**x of float32. On a CPU as a power of two, which MLX computes 2.8 times faster, within 1e-6 for |x| < 8."""
    return mx.exp(x) if on_gpu() else mx.power(2.0, x * (1 / math.log(2)))


def swiglu(gate_up: mx.array) -> mx.array:
    """silu(gate) * up of the fused projection, (..., 2F) -> (..., F). Source: arXiv:2002.05202."""
    gate, up = mx.split(gate_up, 2, axis=-1)
    if on_gpu():
        return gate * mx.sigmoid(gate) * up
    # Three times as fast as mx.sigmoid. Below -40 silu is 0 to 1e-13, but exp would overflow at 89 and the gradient
    # would be inf * 0; in 16 bits the power of two would be off by 2%.
    wide = gate.astype(mx.float32)
    return (wide / (1 + exp(-mx.maximum(wide, -40)))).astype(up.dtype) * up


def rms_norm(x: mx.array, weight: mx.array | None, eps: float) -> mx.array:
    """x / sqrt(mean(x**2) + eps) * weight over the last axis, in float32 inside. Source: arXiv:1910.07467."""
    if on_gpu():
        return mx.fast.rms_norm(x, weight, eps)
    wide = x.astype(mx.float32)  # MLX's own expression for a CPU has twice the operations
    out = (wide * mx.rsqrt((wide * wide).sum(-1, keepdims=True) * (1 / x.shape[-1]) + eps)).astype(x.dtype)
    return out if weight is None else out * weight


class Rotation(NamedTuple):
    """Where the tokens of a forward pass stand; made once and used by every layer."""

    offsets: mx.array  # (N,) int32 position of each row's first token; negative ones are padding
    cos: mx.array | None  # (N, L, 1, D) float32, and None on a GPU, where a kernel makes them
    sin: mx.array | None  # with the sign that its half of D takes


class Rope:
    """
    Rotary positions of one model: plain, or YaRN when the configuration says so.

    Source: RoFormer, arXiv:2104.09864; YaRN, arXiv:2309.00071, section 3.2 and 3.4.
    """

    def __init__(self, config: hub.Config):
        self.head_dim, self.magnitude = config.head_dim, 1.0
        self.frequencies = config.rope_theta ** (-np.arange(0, self.head_dim, 2) / self.head_dim)  # (D / 2,) float64
        if config.rope_scaling is not None:
            self._make_yarn(config.rope_theta, config.rope_scaling)
        self.periods = mx.array((1 / self.frequencies).astype(np.float32))

    def _make_yarn(self, theta: float, scaling: dict[str, float]) -> None:
        factor, trained, dims = scaling["factor"], scaling["original_max_position_embeddings"], self.head_dim

        def dim_of(num_rotations: float) -> float:  # the pair that turns that often over the trained context
            return dims * math.log(trained / (num_rotations * 2 * math.pi)) / (2 * math.log(theta))

        low = max(math.floor(dim_of(scaling["beta_fast"])), 0)
        high = min(math.ceil(dim_of(scaling["beta_slow"])), dims - 1)
        stretched = np.clip((np.arange(dims // 2) - low) / ((high - low) or 1e-3), 0, 1)  # 0: keep, 1: interpolate
        self.frequencies = self.frequencies * (1 - stretched) + self.frequencies / factor * stretched
        self.magnitude = 0.1 * math.log(factor) + 1 if factor > 1 else 1.0

    def at(self, offsets: mx.array, length: int) -> Rotation:
        """The rotation of `length` tokens a row that begin at `offsets`, (N,) int32."""
        if on_gpu():
            return Rotation(offsets, None, None)
        positions = (offsets[:, None] + mx.arange(length)).astype(mx.float32)
        angles = (positions[:, :, None] / self.periods)[:, :, None]  # (N, L, 1, D / 2)
        cos, sin = mx.cos(angles) * self.magnitude, mx.sin(angles) * self.magnitude
        return Rotation(offsets, mx.concatenate([cos, cos], axis=-1), mx.concatenate([-sin, sin], axis=-1))

    def __call__(self, x: mx.array, rotation: Rotation) -> mx.array:
        """Rotates (N, L, heads, D): pairs are i and i + D / 2."""
        if rotation.cos is None or rotation.sin is None:
            x = x if self.magnitude == 1.0 else x * self.magnitude
            rotated = mx.fast.rope(
                x.transpose(0, 2, 1, 3),
                self.head_dim,
                traditional=False,
                base=None,
                scale=1.0,
                offset=rotation.offsets,
                freqs=self.periods,
            )
            return rotated.transpose(0, 2, 1, 3)
        low, high = mx.split(x, 2, axis=-1)
        return (x * rotation.cos + mx.concatenate([high, low], axis=-1) * rotation.sin).astype(x.dtype)


def norm_rope(
    qkv: mx.array,
    num_heads: int,
    weights: tuple[mx.array, mx.array] | None,
    eps: float,
    rope: Rope,
    rotation: Rotation,
) -> tuple[mx.array, mx.array, mx.array]:
    """
    Queries, keys and values of the fused projection (N, L, H + 2K, D), as (N, H, L, D), (N, K, L, D), (N, K, L, D).

    Queries and keys are rotated and, where the family has `weights` (D,) for them, RMS-normalized over D before.
    """
    num_kv_heads = (qkv.shape[2] - num_heads) // 2
    turned, values = mx.split(qkv, [num_heads + num_kv_heads], axis=2)
    if weights is not None:
        counts, size = (num_heads, num_kv_heads), qkv.shape[-1]
        weight = mx.concatenate([mx.broadcast_to(w, (n, size)) for w, n in zip(weights, counts, strict=True)])
        turned = rms_norm(turned, None, eps) * weight
    queries, keys = mx.split(rope(turned, rotation), [num_heads], axis=2)
    return queries.transpose(0, 2, 1, 3), keys.transpose(0, 2, 1, 3), values.transpose(0, 2, 1, 3)


def attention_ref(queries: mx.array, keys: mx.array, values: mx.array, mask: mx.array | str | None) -> mx.array:
    """
    The definition of `attention`: softmax(q k / sqrt(D)) v with scores and softmax in float32.

    On a CPU it is also the fast form (2.4 times `mx.fast` at L=110): `exp` as above, one matmul for all queries of a
    kv head, and the division by the sum after the product with the values, where it touches D columns and not S.
    """
    num_rows, num_heads, length, head_dim = queries.shape
    num_kv_heads, num_keys = keys.shape[1], keys.shape[2]
    dtype = queries.dtype
    queries = (queries.astype(mx.float32) * head_dim**-0.5).reshape(num_rows, num_kv_heads, -1, head_dim)
    scores = queries @ keys.astype(mx.float32).swapaxes(-1, -2)  # (N, K, H / K * L, S)
    if mask is not None:
        scores = scores.reshape(num_rows, num_kv_heads, -1, length, num_keys)
        if isinstance(mask, str):
            mask = mx.tri(length, num_keys, num_keys - length, dtype=mx.bool_)
        else:
            mask = mask[:, :, None]
        scores = scores + mx.where(mask, 0.0, -1e30)  # finite: a query that sees nothing must not become nan
        scores = scores.reshape(num_rows, num_kv_heads, -1, num_keys)
    weights = exp(scores - mx.stop_gradient(scores.max(-1, keepdims=True)))
    out = (weights @ values.astype(mx.float32)) / weights.sum(-1, keepdims=True)
    return out.reshape(num_rows, num_heads, length, head_dim).astype(dtype)


def attention(queries: mx.array, keys: mx.array, values: mx.array, mask: mx.array | str | None) -> mx.array:
    """
    Grouped-query attention, (N, H, L, D) x (N, K, S, D) -> (N, H, L, D); the L queries are the last of the S positions.

    mask: None, "causal", or (N, 1, L, S) boolean, true where a query sees a key; a query that sees none is not allowed.
    """
    # On a GPU MLX has kernels with float32 scores for Qwen's head sizes; other sizes fall back to scores in 16 bits.
    if not on_gpu() or queries.shape[-1] not in (64, 128):
        return attention_ref(queries, keys, values, mask)
    return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=queries.shape[-1] ** -0.5, mask=mask)


def tree_attention(queries: mx.array, parts: Parts, layout: Layout) -> mx.array:
    """
    Attention of rows that share parts of their past, (N, H, L, D) -> (N, H, L, D), with float32 scores.

    Equal to attention over each row's parts joined together: the weights of all parts are taken from a common maximum
    and their sums added. All queries that read a row of a part do so in one matmul, (H / K * G * L, D) x (D, S).
    """
    num_rows, num_heads, length, head_dim = queries.shape
    num_kv_heads = parts[0][0].shape[1]
    num_queries = num_heads // num_kv_heads * length  # of one row and kv head

    def gather(x: mx.array, group: Group, num_blocks: int) -> mx.array:  # (N, K, Q, X) -> (R, K, G * Q, X)
        if num_blocks == num_rows and group.members is None:
            return x
        if group.members is not None:
            x = x[group.members.reshape(-1)]
        size = x.shape[-1]
        x = x.reshape(num_blocks, -1, num_kv_heads, num_queries, size).swapaxes(1, 2)
        return x.reshape(num_blocks, num_kv_heads, -1, size)

    def scatter(x: mx.array, group: Group) -> mx.array:  # (R, K, G * Q, X) -> (N, K, Q, X)
        num_blocks, _, _, size = x.shape
        if num_blocks == num_rows and group.places is None:
            return x
        x = x.reshape(num_blocks, num_kv_heads, -1, num_queries, size).swapaxes(1, 2)
        x = x.reshape(-1, num_kv_heads, num_queries, size)
        return x if group.places is None else x[group.places]

    dtype = queries.dtype
    queries = (queries.astype(mx.float32) * head_dim**-0.5).reshape(num_rows, num_kv_heads, num_queries, head_dim)
    scores = []
    for (keys, _), group in zip(parts, layout, strict=True):
        score = gather(queries, group, keys.shape[0]) @ keys.astype(mx.float32).swapaxes(-1, -2)  # (R, K, G * Q, S)
        if isinstance(group.mask, str):
            shape, num_keys = score.shape, keys.shape[2]
            mask = mx.tri(length, num_keys, num_keys - length, dtype=mx.bool_)
            score = (score.reshape(*shape[:2], -1, length, num_keys) + mx.where(mask, 0.0, -1e30)).reshape(shape)
        elif group.mask is not None:
            score = score + mx.where(group.mask, 0.0, -1e30)
        scores.append(score)
    peaks = [scatter(score.max(-1, keepdims=True), group) for score, group in zip(scores, layout, strict=True)]
    peak = mx.stop_gradient(functools.reduce(mx.maximum, peaks))  # (N, K, Q, 1)
    sums, outs = [], []
    for score, (_, values), group in zip(scores, parts, layout, strict=True):
        weights = exp(score - gather(peak, group, values.shape[0]))
        sums.append(scatter(weights.sum(-1, keepdims=True), group))
        outs.append(scatter(weights @ values.astype(mx.float32), group))
    total, out = functools.reduce(mx.add, sums), functools.reduce(mx.add, outs)
    return (out / total).reshape(num_rows, num_heads, length, head_dim).astype(dtype)


# ---- the model


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight, self.eps = mx.ones((size,)), eps

    def __call__(self, x: mx.array) -> mx.array:
        return rms_norm(x, self.weight, self.eps)


class Attention(nn.Module):
    def __init__(self, config: hub.Config):
        super().__init__()
        self.num_heads, self.num_kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim, self.eps = config.head_dim, config.rms_norm_eps
        width = (self.num_heads + 2 * self.num_kv_heads) * self.head_dim
        self.qkv_proj = nn.Linear(config.hidden_size, width, bias=config.attention_bias)
        self.o_proj = nn.Linear(self.num_heads * self.head_dim, config.hidden_size, bias=False)
        if config.qk_norm:
            self.q_norm = RMSNorm(self.head_dim, self.eps)
            self.k_norm = RMSNorm(self.head_dim, self.eps)

    def __call__(
        self,
        x: mx.array,
        rope: Rope,
        rotation: Rotation,
        mask: mx.array | str | Layout | None,
        cache: LayerCache | SlotLayer | TreeLayer | None,
    ) -> mx.array:
        num_rows, length, _ = x.shape
        qkv = self.qkv_proj(x).reshape(num_rows, length, -1, self.head_dim)  # (N, L, H + 2K, D)
        weights = (self.q_norm.weight, self.k_norm.weight) if "q_norm" in self else None
        queries, keys, values = norm_rope(qkv, self.num_heads, weights, self.eps, rope, rotation)
        held = (keys, values) if cache is None else cache.update(keys, values)
        if isinstance(held, list):  # in parts, some of them shared by several rows
            assert isinstance(mask, list), "the cache and the mask are not of one kind"
            out = tree_attention(queries, held, mask)
        else:
            assert not isinstance(mask, list), "the cache and the mask are not of one kind"
            out = attention(queries, held[0], held[1], mask)  # (N, H, L, D)
        return self.o_proj(out.transpose(0, 2, 1, 3).reshape(num_rows, length, -1))


class MLP(nn.Module):
    def __init__(self, config: hub.Config):
        super().__init__()
        self.gate_up_proj = nn.Linear(config.hidden_size, 2 * config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def __call__(self, x: mx.array) -> mx.array:
        return self.down_proj(swiglu(self.gate_up_proj(x)))


class Block(nn.Module):
    def __init__(self, config: hub.Config):
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def __call__(
        self,
        x: mx.array,
        rope: Rope,
        rotation: Rotation,
        mask: mx.array | str | Layout | None,
        cache: LayerCache | SlotLayer | TreeLayer | None,
    ) -> mx.array:
        x = x + self.self_attn(self.input_layernorm(x), rope, rotation, mask, cache)
        return x + self.mlp(self.post_attention_layernorm(x))


def checkpointed(
    layer: Block,
    x: mx.array,
    rope: Rope,
    rotation: Rotation,
    mask: mx.array | str | Layout | None,
    cache: LayerCache | SlotLayer | TreeLayer | None,
) -> mx.array:
    """
    `layer(x, ...)`, of which only the input is kept; the gradient computes the layer again.

    `mx.checkpoint` differentiates its arguments and nothing else: the layer's weights are one of them (called on the
    module it would drop their gradients), and so are keys and values of an earlier level, whose gradients belong to
    the shared prompt. Integers and masks are not differentiable and come by closure.
    """
    assert cache is None or isinstance(cache, TreeLayer), "a cache that is written in place cannot be computed again"

    def run(weights: Any, x: mx.array, ancestors: Parts) -> tuple[mx.array, Parts]:
        held = layer.trainable_parameters()
        layer.update(weights)
        level = None if cache is None else TreeLayer(list(ancestors))
        out = layer(x, rope, rotation, mask, level)
        layer.update(held)
        return out, [] if level is None else level.parts[-1:]

    out, newest = mx.checkpoint(run)(layer.trainable_parameters(), x, [] if cache is None else list(cache.parts))
    if cache is not None:
        cache.parts.extend(newest)
    return out


class Model(nn.Module):
    """
    A dense Qwen. `model(tokens, cache)` gives logits; `hidden` and `head_weight` are its two halves, for those who
    must not hold (N, L, V).
    """

    def __init__(self, config: hub.Config):
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = [Block(config) for _ in range(config.num_hidden_layers)]
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        if not config.tie_word_embeddings:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self._rope = Rope(config)

    @property
    def head_weight(self) -> mx.array:
        """(V, C): the embedding where the head is tied to it."""
        return self.embed_tokens.weight if self.config.tie_word_embeddings else self.lm_head.weight

    def hidden(
        self, tokens: mx.array, cache: KVCache | SlotCache | TreeCache | None = None, checkpoint_layers: int = 0
    ) -> mx.array:
        """
        Normalized final hidden states, (N, L) int32 -> (N, L, C). Without a cache, padding belongs on the right.

        checkpoint_layers: of how many layers, from the first, the activations are computed again for the gradient
        instead of being kept.
        """
        num_rows, length = tokens.shape
        x = self.embed_tokens(tokens)
        offsets = mx.zeros((num_rows,), dtype=mx.int32) if cache is None else cache.offsets(num_rows)
        mask = "causal" if cache is None else cache.mask(length)
        rotation = self._rope.at(offsets, length)
        for index, layer in enumerate(self.layers):
            run = checkpointed if index < checkpoint_layers else Block.__call__
            x = run(layer, x, self._rope, rotation, mask, None if cache is None else cache.layers[index])
        return self.norm(x)

    def __call__(self, tokens: mx.array, cache: KVCache | SlotCache | TreeCache | None = None) -> mx.array:
        """Logits of the next token at every position, (N, L) int32 -> (N, L, V)."""
        return self.hidden(tokens, cache) @ self.head_weight.T


# ---- log-probabilities of chosen tokens


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
    return mx.log(tiled_sum(exp(x - peak))) + peak.squeeze(-1)


def truncate_logits(logits: mx.array, top_p: float = 1.0, top_k: int = 0, min_p: float = 0.0) -> mx.array:
    """
    Logits (..., V) float32 with -inf outside the support; 1.0, 0 and 0.0 keep everything.

    top_k keeps the k likeliest (and what ties with the last of them), min_p what has at least min_p times the
    likeliest's probability, top_p the fewest likeliest tokens that together reach top_p, of what the others kept.
    Source: min_p arXiv:2407.01082, top_p arXiv:1904.09751.
    """
    if top_k:
        kth = mx.min(mx.topk(logits, min(top_k, logits.shape[-1]), axis=-1), axis=-1, keepdims=True)
        logits = mx.where(logits < kth, -mx.inf, logits)
    if min_p:
        logits = mx.where(logits < logits.max(-1, keepdims=True) + math.log(min_p), -mx.inf, logits)
    if top_p < 1:
        descending = -mx.sort(-logits, axis=-1)
        probs = exp(descending - logsumexp(descending)[..., None])
        before = mx.cumsum(probs, axis=-1) - probs  # mass of the strictly likelier tokens
        num_kept = mx.maximum((before < top_p).sum(-1, keepdims=True), 1)
        least = mx.take_along_axis(descending, num_kept - 1, axis=-1)
        logits = mx.where(logits < least, -mx.inf, logits)
    return logits


def logits_of(x: mx.array, weight: mx.array, ids: mx.array, support: dict[str, Any]) -> mx.array:
    """
    Scores of some or all of the vocabulary, (M, C) x (V, C) -> (M, V) float32; -1e9 outside the support.

    A sampled id stays in its own support: rounding may put a borderline token outside when it is scored again.
    """
    logits = x @ weight.astype(mx.float32).T
    if support:  # only ever with the whole vocabulary
        kept = mx.isfinite(truncate_logits(logits, **support)) | (mx.arange(logits.shape[-1]) == ids[:, None])
        logits = mx.where(mx.stop_gradient(kept), logits, -1e9)
    return logits


def token_logprobs_ref(
    hidden: mx.array,
    head_weight: mx.array,
    ids: mx.array,
    *,
    temperature: float = 1.0,
    support: dict[str, Any] | None = None,
) -> tuple[mx.array, mx.array]:
    """The definition of `token_logprobs`, as one writes it: all (N, T, V) log-probabilities at once, and autodiff."""
    x = hidden.reshape(-1, hidden.shape[-1]).astype(mx.float32) / temperature
    logits = logits_of(x, head_weight, ids.reshape(-1), support or {})
    logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    chosen = mx.take_along_axis(logprobs, ids.reshape(-1, 1), axis=-1)
    entropy = -(mx.exp(logprobs) * logprobs).sum(-1)
    return chosen.reshape(ids.shape), entropy.reshape(ids.shape)


LOGPROB_CHUNK = 256  # positions whose logits exist at once
LOGPROB_TILE = 2**20  # logits that exist at once, 4 MB: they stay in a core's cache from the matmul to the last sum
HEADS = ("frozen", "trained")
GRADIENTS = ("none", "logprobs", "both")


def _slices(length: int, step: int) -> list[slice]:
    return [slice(begin, min(begin + step, length)) for begin in range(0, length, step)]


def token_logprobs(
    hidden: mx.array,
    head_weight: mx.array,
    ids: mx.array,
    *,
    temperature: float = 1.0,
    head: str = "frozen",
    support: dict[str, Any] | None = None,
    gradient: str = "both",
    chunk: int = LOGPROB_CHUNK,
) -> tuple[mx.array, mx.array]:
    """
    Log-probability of each id and entropy of its distribution at `temperature`; neither (N, T, V) nor (T, V) exists.

    hidden (N, T, C), head_weight (V, C), ids (N, T) int32 -> two (N, T) float32, nats; the logits are float32 whatever
    the weights are. `support` (top_p, top_k, min_p) restricts the distribution as the sampler did.
    head: "frozen" gives `hidden` its gradient, "trained" `head_weight` too.
    gradient: of "both" results; of the "logprobs", where the entropy is only looked at, a third cheaper; or "none".
    chunk: positions at once; `LOGPROB_TILE // chunk` ids at once, or all of them where there is a support.

    The vocabulary goes by in tiles under a running maximum, as keys do in attention. For a softmax over the head's rows
    W is both keys and values: sum(p W) comes out beside sum(p), and d logprob = W[id] - sum(p W) is all that the
    gradient of `hidden` needs, so the backward pass of a frozen head has no matmul. Each tile waits for the one before;
    as many as MLX runs ahead with (some ten) are in memory, whatever T is.
    Source: online softmax, arXiv:1805.02867; FlashAttention, arXiv:2205.14135; a head cut up, arXiv:2411.09009.
    """
    assert head in HEADS, head
    assert gradient in GRADIENTS, gradient
    assert temperature > 0, temperature
    shape, (vocab, width) = ids.shape, head_weight.shape
    ids, support = ids.reshape(-1), support or {}
    if support:  # whole rows, as many as keep what sorting them needs below a gigabyte
        chunk = min(chunk, max(1, 16 * LOGPROB_TILE // vocab))
    rows_of_chunks = _slices(ids.size, chunk)
    columns = [slice(0, vocab)] if support else _slices(vocab, max(1, LOGPROB_TILE // min(chunk, ids.size)))

    @mx.custom_function
    def forward(hidden: mx.array, head_weight: mx.array) -> tuple[mx.array, ...]:
        scaled, parts = hidden.astype(mx.float32) / temperature, []
        done: list[mx.array] = []
        for rows in rows_of_chunks:
            state = _Softmax.start(scaled[rows], gradient)
            for tile in columns:
                state = state.after(_wait(scaled[rows], done), head_weight, ids[rows], tile, support)
                done = [array for array in state if array is not None]
            parts.append(state.results(head_weight[ids[rows]], temperature))
        return tuple(mx.concatenate(list(column)) for column in zip(*parts, strict=True))

    @forward.vjp
    def backward(
        primals: tuple[mx.array, ...], cotangents: tuple[mx.array, ...], outputs: tuple[mx.array, ...]
    ) -> tuple[mx.array, mx.array]:
        hidden, head_weight = primals
        d_logprobs, d_entropy = (cotangent[:, None] for cotangent in cotangents[:2])
        _, entropy, total, *kept = outputs
        d_hidden = sum((d * array for d, array in zip((d_logprobs, d_entropy), kept, strict=False)), mx.array(0.0))
        d_hidden = mx.broadcast_to(d_hidden, hidden.shape).astype(hidden.dtype)
        if head == "frozen" or gradient == "none":
            return d_hidden, mx.zeros_like(head_weight)
        scaled, d_tiles = hidden.astype(mx.float32) / temperature, []
        done: list[mx.array] = []
        for tile in columns:
            d_tile = mx.zeros((tile.stop - tile.start, width), mx.float32)
            for rows in rows_of_chunks:
                x, d_logprob = _wait(scaled[rows], done), d_logprobs[rows]
                logprobs = logits_of(x, head_weight[tile], ids[rows], support) - total[rows, None]  # (M, tile)
                # d logprob[id] = onehot - p, d entropy = -p (log p + entropy)
                factor = d_logprob
                if gradient == "both":
                    factor = d_logprob + d_entropy[rows] * (logprobs + entropy[rows, None])
                place, inside = _place(ids[rows], tile)
                row = mx.arange(x.shape[0])[:, None]
                slopes = (exp(logprobs) * factor).at[row, place].add(mx.where(inside, -d_logprob, 0.0))
                d_tile = d_tile - slopes.T @ x
                done = [d_tile]
            d_tiles.append(d_tile.astype(head_weight.dtype))
        return d_hidden, mx.concatenate(d_tiles)

    outputs: Any = forward(hidden.reshape(-1, width), head_weight)
    return outputs[0].reshape(shape), outputs[1].reshape(shape)


def _wait(x: mx.array, done: list[mx.array]) -> mx.array:
    """`x`, but not before `done`: what waits for nothing is computed, and held, at once."""
    return mx.depends([x], done)[0] if done else x


def _place(ids: mx.array, tile: slice) -> tuple[mx.array, mx.array]:
    """Where in a tile each id stands, the nearest place if outside, and whether it is inside; (M, 1) each."""
    place = ids[:, None] - tile.start
    last = tile.stop - tile.start - 1
    return mx.clip(place, 0, last), (place >= 0) & (place <= last)


class _Softmax(NamedTuple):
    """
    What is known of M distributions after some of the vocabulary; every sum is over exp(logit - peak).

    Peaks begin finite: -inf less -inf would be nan.
    """

    peak: mx.array  # (M, 1) the largest logit
    total: mx.array  # (M, 1) sum of the weights
    moment: mx.array  # (M, 1) sum of weight * (logit - peak)
    chosen: mx.array  # (M, 1) the logit of the id
    mean: mx.array | None  # (M, C) sum of weight * row of the head
    slope: mx.array | None  # (M, C) sum of weight * (logit - peak) * row of the head

    @staticmethod
    def start(x: mx.array, gradient: str) -> "_Softmax":
        nothing = mx.zeros((x.shape[0], 1))
        return _Softmax(
            nothing - 1e30,
            nothing,
            nothing,
            nothing,
            None if gradient == "none" else mx.zeros(x.shape),
            mx.zeros(x.shape) if gradient == "both" else None,
        )

    def after(
        self, x: mx.array, head_weight: mx.array, ids: mx.array, tile: slice, support: dict[str, Any]
    ) -> "_Softmax":
        """The state with one more tile of the vocabulary taken in."""
        weight = head_weight[tile].astype(mx.float32)
        logits = logits_of(x, weight, ids, support)  # (M, tile)
        place, inside = _place(ids, tile)
        found = mx.take_along_axis(logits, place, axis=-1)
        peak = mx.maximum(self.peak, logits.max(-1, keepdims=True))
        logits, moved = logits - peak, self.peak - peak
        shrunk = exp(moved)
        weights = exp(logits)
        weighted = weights * logits

        def moments(total: Any, moment: Any) -> Any:  # a sum of weight * (logit - peak) under the new peak
            return shrunk * (moment + moved * total)

        return _Softmax(
            peak,
            shrunk * self.total + tiled_sum(weights)[:, None],
            moments(self.total, self.moment) + tiled_sum(weighted)[:, None],
            mx.where(inside, found, self.chosen),
            None if self.mean is None else shrunk * self.mean + weights @ weight,
            None if self.slope is None else moments(self.mean, self.slope) + weighted @ weight,
        )

    def results(self, chosen_rows: mx.array, temperature: float) -> tuple[mx.array, ...]:
        """Log-probabilities, entropies and logsumexps (M,), and the first two's gradients by `hidden`, (M, C)."""
        log_total, moment = mx.log(self.total), self.moment / self.total
        logprobs, entropy = self.chosen - self.peak - log_total, log_total - moment
        kept = []
        if self.mean is not None:
            kept.append((chosen_rows.astype(mx.float32) - self.mean / self.total) / temperature)
        if (
            self.slope is not None and self.mean is not None
        ):  # -sum(p (log p + entropy) W), log p = logit - peak - log_total
            kept.append((moment * self.mean - self.slope) / self.total / temperature)
        return *(array.squeeze(-1) for array in (logprobs, entropy, self.peak + log_total)), *kept


# ---- load and save


def laid_out(name: str, weight: mx.array) -> mx.array:
    """
    The same weight, in memory as its product reads it: on a CPU a projection's (out, in) lies column by column.

    OpenBLAS packs what it multiplies by, and packs x @ W.T of a few rows a fifth slower from rows than from columns.
    """
    return weight if on_gpu() or not name.endswith("proj.weight") else mx.contiguous(weight.T).T


def load_model(directory: str | Path, dtype: mx.Dtype | None = None, adapter: str | Path | None = None) -> Model:
    """The model of a Hugging Face directory, in `dtype` (`default_dtype()`). ValueError names what is wrong with it."""
    directory, dtype = Path(directory), dtype or default_dtype()
    config = hub.load_config(directory)
    weights = hub.load_weights(directory)
    if config.tie_word_embeddings:
        weights.pop("lm_head.weight", None)
    model = Model(config)  # lazy: its random weights are replaced before they are computed
    expected = hub.unfuse_weights(dict(tree_flatten(model.parameters())), config)
    if missing := sorted(expected.keys() - weights.keys()):
        raise ValueError(f"{directory} lacks {len(missing)} tensors, the first is {missing[0]}")
    if unknown := sorted(weights.keys() - expected.keys()):
        raise ValueError(
            f"{directory} has {len(unknown)} tensors that a {config.model_type} has not, the first is {unknown[0]}"
        )
    for name, array in sorted(weights.items()):
        if array.shape != expected[name].shape:
            raise ValueError(
                f"{directory}: {name} has shape {array.shape}, config.json asks for {expected[name].shape}"
            )
        if not mx.issubdtype(array.dtype, mx.floating):
            raise ValueError(f"{directory}: {name} is {array.dtype}; only floating-point weights are supported")
        weights[name] = array.astype(dtype)
    if adapter is not None:
        weights = hub.merge_adapter(weights, adapter)
    weights = hub.fuse_weights(weights)  # one name, so that no part outlives its whole
    model.load_weights([(name, laid_out(name, weights.pop(name))) for name in list(weights)])
    for part in (*model.layers, model):  # layer by layer: all at once would hold 1.5 times the model's bytes
        mx.eval(part.parameters())
    return model


def choose_model(asked: str | None) -> tuple[str, str]:
    """The model to take and why: what was asked for, else Qwen3-0.6B on a GPU where it can be had, else the demo."""
    if asked:
        return asked, "as asked"
    if not on_gpu():
        return "demo", "the default without a GPU"
    try:
        hub.hub_directory(hub.DEFAULT_MODEL)
    except ValueError as error:
        return "demo", f"because {str(error).removeprefix('--model ')}"
    return hub.DEFAULT_MODEL, "the default on a GPU"


RANDOM = {  # name -> hidden, layers, mlp, heads, kv heads, head dim, vocabulary; the last is Qwen3-0.6B's shape
    "random:2m": (128, 5, 384, 4, 2, 32, 8192),
    "random:30m": (512, 8, 1536, 8, 4, 64, 8192),
    "random:0.6b": (1024, 28, 3072, 16, 8, 128, 151_936),
}


def random_config(name: str) -> hub.Config:
    """The configuration of a size in `RANDOM`. ValueError when there is none of that name."""
    if name not in RANDOM:
        raise ValueError(f"--model {name}: the random models are {', '.join(RANDOM)}")
    hidden, layers, width, heads, kv_heads, head_dim, vocab = RANDOM[name]
    raw = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "intermediate_size": width,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "vocab_size": vocab,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": True,
        "rope_theta": 1e6,
        "hidden_act": "silu",
        "attention_bias": False,
    }
    return hub.make_config(raw)


def load_config(path_or_id: str | Path) -> hub.Config:
    """The configuration of what `load` takes. ValueError names what is wrong with it."""
    name = str(path_or_id)
    return random_config(name) if name.startswith("random:") else hub.load_config(hub.find(path_or_id))


def random_model(name: str, dtype: mx.Dtype | None = None) -> Model:
    """A Qwen3 of a size in `RANDOM` with seeded random weights and no end token, for benchmarks and tests."""
    model, dtype = Model(random_config(name)), dtype or default_dtype()
    weights = tree_flatten(model.parameters())
    keys = mx.random.split(mx.random.key(0), len(weights))
    for (path, array), key in zip(sorted(weights), keys, strict=True):
        if array.ndim == 2:  # norm weights stay at 1
            array = mx.random.normal(array.shape, dtype, scale=0.02, key=key)
        model.load_weights([(path, laid_out(path, array.astype(dtype)))], strict=False)
        mx.eval(model.parameters())  # wait: one tensor at a time, so that no second copy is held
    return model


def load(path_or_id: str | Path, dtype: mx.Dtype | None = None, adapter: str | Path | None = None) -> tuple[Model, Any]:
    """
    Model and tokenizer of `demo`, a Hugging Face directory or a hub id, in `dtype` (`default_dtype()`). A name of
    `RANDOM` gives random weights with the demo's tokenizer.

    adapter: a directory of mlx_lm's layout whose weights are merged in. ValueError names what is wrong.
    """
    if str(path_or_id).startswith("random:"):
        return random_model(str(path_or_id), dtype), hub.load_tokenizer(hub.DEMO)
    directory = hub.find(path_or_id)
    model, tokenizer = load_model(directory, dtype, adapter), hub.load_tokenizer(directory)
    if len(tokenizer) > model.config.vocab_size:
        raise ValueError(
            f"{directory}: the tokenizer has {len(tokenizer)} ids, the model only {model.config.vocab_size}"
        )
    return model, tokenizer


def save(model: Model, directory: str | Path, tokenizer: Any) -> None:
    """
    Writes the model un-fused, with configuration and tokenizer, so that mlx_lm and transformers load it.

    Raises ValueError where shards of another model lie, which readers would load with or instead of this one.
    """
    directory, config = Path(directory), model.config
    directory.mkdir(parents=True, exist_ok=True)
    if foreign := sorted(p.name for p in directory.glob("model*.safetensors*") if p.name != "model.safetensors"):
        raise ValueError(f"{directory} holds {foreign[0]} of another model; save to a new directory")
    weights = hub.unfuse_weights(dict(tree_flatten(model.parameters())), config)
    mx.save_safetensors(str(directory / "model.safetensors"), weights, metadata={"format": "pt"})
    # Rope goes out in the older of its two layouts, since mlx_lm's Qwen2 knows no other, and what has a default is
    # spelled out, since the defaults of mlx_lm and transformers differ.
    raw = {key: value for key, value in config.raw.items() if key not in ("torch_dtype", "rope_parameters")}
    raw |= {
        "dtype": str(model.head_weight.dtype).removeprefix("mlx.core."),
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_position_embeddings,
        "tie_word_embeddings": config.tie_word_embeddings,
        "rope_theta": config.rope_theta,
        "rope_scaling": config.rope_scaling and {"rope_type": "yarn", **config.rope_scaling},
        "eos_token_id": list(config.eos_ids) or None,
    }
    (directory / "config.json").write_text(json.dumps(raw, indent=2) + "\n")
    generation = {"eos_token_id": raw["eos_token_id"], "do_sample": True, "temperature": 1.0}
    (directory / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    tokenizer.save_pretrained(str(directory))
