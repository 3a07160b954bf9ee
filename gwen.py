"""
Dense language models on MLX, of the families in disk/hub.py: the blocks, load from and save to Hugging Face's layout.

Query, key and value projections are one matmul (`qkv_proj`), gate and up are one (`gate_up_proj`). What happens between
the matmuls is in layers/. Left out: mixture of experts, sliding windows; a checkpoint that needs them is refused by
name. Weights of few bits are unpacked, or stay so in a model that is frozen.

Axes: N rows, L positions, C hidden, H query heads, K kv heads, D head dim, F mlp width, V vocabulary.
"""

import contextlib
import dataclasses
import functools
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import cpu_blas
import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from disk import adapters, ends, hub
from flags import Parser, exit_with_error, load_yaml, report_mistakes
from kv_cache import CAUSAL, Cache, DeltaState, KVCache, Layout, SlotCache
from layers import attention, delta, lm_head, ops, probe, softmax
from layers.tree_cache import TreeLayer
from machine import alive, cpu, gpu, kernels, memory, versions
from machine.output import guard_output

DTYPES = {"float16": mx.float16, "bfloat16": mx.bfloat16, "float32": mx.float32}


def default_dtype() -> mx.Dtype:
    """`GWEN_DTYPE`, else float16 on a GPU, float32 on a CPU, which has no BLAS for 16 bits. ValueError for others."""
    name = os.environ.get("GWEN_DTYPE", "float16" if gpu.on_gpu() else "float32")
    if name not in DTYPES:
        raise ValueError(f"GWEN_DTYPE={name!r} is not one of {', '.join(DTYPES)}")
    return DTYPES[name]


# ---- the model


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float, offset: float = 0.0):
        super().__init__()
        self.weight, self.eps, self.offset = mx.full((size,), 1 - offset), eps, offset
        self._scale: tuple[mx.array, ...] = ()  # the weight, and what was made of it

    @property
    def scale(self) -> mx.array:
        """What it multiplies by, made once for the weight at hand."""
        if not self.offset:
            return self.weight
        if not self._scale or self._scale[0] is not self.weight:
            self._scale = (
                self.weight,
                (self.weight.astype(mx.float32) + self.offset).astype(self.weight.dtype),
            )
        return self._scale[1]

    def __call__(self, x: mx.array) -> mx.array:
        return ops.rms_norm(x, self.scale, self.eps)

    def add_and_normalize(self, x: mx.array, delta: mx.array | None) -> tuple[mx.array, mx.array]:
        """x + delta, and that normalized."""
        return (x, self(x)) if delta is None else ops.add_norm(x, delta, self.scale, self.eps)


class Context(NamedTuple):
    """What a forward pass hands to a layer beside the hidden states."""

    rotation: ops.Rotation  # where the tokens stand
    layout: Layout  # what they see
    state: Any  # what this layer keeps of the tokens before; None: there are none


Read = tuple[mx.array, mx.array, mx.array, mx.array | None]  # see `Attention.heads`


class Attention(nn.Module):
    def __init__(self, config: hub.ModelConfig, kind: str):
        super().__init__()
        family = config.family
        self.rotated, self.gated = kind == "full_attention", family.output_gate
        self.num_heads, self.num_kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim, self.eps = config.head_dim, config.rms_norm_eps
        width = (self.num_heads * (1 + self.gated) + 2 * self.num_kv_heads) * self.head_dim
        self.qkv_proj = nn.Linear(config.hidden_size, width, bias=family.bias)
        self.o_proj = nn.Linear(self.num_heads * self.head_dim, config.hidden_size, bias=False)
        if family.qk_norm:
            self.q_norm = RMSNorm(self.head_dim, self.eps, family.norm_offset)
            self.k_norm = RMSNorm(self.head_dim, self.eps, family.norm_offset)

    def project(self, x: mx.array, rotation: ops.Rotation) -> Read:
        """
        What attention needs: queries (N, H, L, D), keys and values (N, K, L, D), and where the family has them gates
        (N, L, H, D) on the output, before their sigmoid.
        """
        qkv = self.qkv_proj(x).reshape(
            *x.shape[:2], -1, self.head_dim
        )  # (N, L, H + 2K, D), or with gates 2H + 2K
        gates = None
        if self.gated:  # behind each head's query
            queries, rest = mx.split(qkv, [2 * self.num_heads], axis=2)
            gates = queries[:, :, 1::2]
            qkv = mx.concatenate([queries[:, :, ::2], rest], axis=2)
        weights = (self.q_norm.scale, self.k_norm.scale) if "q_norm" in self else None
        if self.rotated:
            return *ops.norm_rope(qkv, self.num_heads, weights, self.eps, rotation), gates
        return *ops.norm_rope_ref(qkv, self.num_heads, weights, self.eps, None), gates

    def output(self, attended: mx.array, gates: mx.array | None) -> mx.array:
        """(N, H, L, D) -> (N, L, C)"""
        attended = attended.transpose(0, 2, 1, 3)
        if gates is not None:
            attended = attended * mx.sigmoid(gates)
        return self.o_proj(attended.reshape(*attended.shape[:2], -1))


class GatedDeltaNet(nn.Module):
    """Linear attention, see layers/delta.py: instead of keys and values it keeps a memory of fixed size."""

    def __init__(self, config: hub.ModelConfig):
        super().__init__()
        assert config.delta is not None
        self.sizes, num_heads = config.delta, config.delta.num_value_heads
        widths = hub.part_rows(
            config, "linear_attn.in_proj"
        )  # of what is convolved, gates, beta and decay
        self.ends = [sum(widths[: i + 1]) for i in range(3)]
        self.in_proj = nn.Linear(config.hidden_size, sum(widths), bias=False)
        self.conv1d = nn.Module()  # causal, of single channels
        self.conv1d.weight = mx.zeros((widths[0], 1, self.sizes.window))
        self.A_log, self.dt_bias = mx.zeros((num_heads,)), mx.ones((num_heads,))
        self.norm = RMSNorm(self.sizes.value_dim, config.rms_norm_eps)
        self.out_proj = nn.Linear(widths[1], config.hidden_size, bias=False)

    def __call__(self, x: mx.array, context: Context) -> mx.array:
        (num_rows, length, _), sizes, spans = x.shape, self.sizes, context.layout.spans
        channels, gates, beta, decay = mx.split(self.in_proj(x), self.ends, axis=-1)
        beta = mx.sigmoid(beta.astype(mx.float32))
        log_decay = -mx.exp(self.A_log.astype(mx.float32)) * nn.softplus(
            decay.astype(mx.float32) + self.dt_bias
        )
        if spans is not None:  # padding leaves the memory and what the convolution sees as they are
            column = mx.arange(length)
            real = ((column >= spans[0][:, None]) & (column < spans[1][:, None]))[..., None]
            channels, beta, log_decay = (
                mx.where(real, array, 0) for array in (channels, beta, log_decay)
            )
        past = None if context.state is None else context.state.newest
        before, memory = past or sizes.empty_state(num_rows, x.dtype)
        window = mx.concatenate([before, channels], axis=1)  # (N, W - 1 + L, channels)
        mixed = delta.convolve(window, self.conv1d.weight).astype(mx.float32)
        queries, keys, values = mx.split(mixed, [sizes.widths[0], 2 * sizes.widths[0]], axis=-1)
        queries, keys = (
            delta.normalize(one.reshape(num_rows, length, -1, sizes.key_dim))
            for one in (queries, keys)
        )
        values = values.reshape(num_rows, length, -1, sizes.value_dim)
        out, memory = delta.gated_delta(
            queries * sizes.key_dim**-0.5, keys, values, log_decay, beta, memory
        )
        if context.state is not None:
            context.state.update(
                delta.convolution_state(window, sizes.window - 1, spans and spans[1]), memory
            )
        gated = self.norm(out).reshape(num_rows, length, -1) * ops.silu(gates.astype(mx.float32))
        return self.out_proj(gated.astype(x.dtype))


class MLP(nn.Module):
    def __init__(self, config: hub.ModelConfig):
        super().__init__()
        self.gate_up_proj = nn.Linear(config.hidden_size, 2 * config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def __call__(self, x: mx.array) -> mx.array:
        return self.down_proj(ops.swiglu(self.gate_up_proj(x)))


class Block(nn.Module):
    def __init__(self, config: hub.ModelConfig, kind: str):
        super().__init__()
        self.is_linear = kind == "linear_attention"
        if self.is_linear:
            self.linear_attn = GatedDeltaNet(config)
        else:
            self.self_attn = Attention(config, kind)
        self.mlp = MLP(config)
        norms = (
            RMSNorm(config.hidden_size, config.rms_norm_eps, config.family.norm_offset)
            for _ in range(2)
        )
        self.input_layernorm, self.post_attention_layernorm = norms

    def __call__(
        self, x: mx.array, delta: mx.array | None, context: Context
    ) -> tuple[mx.array, mx.array]:
        """The residual stream and what is yet to be added to it, `delta`, of the layer before and after this one."""
        if self.is_linear:
            x, normed = self.input_layernorm.add_and_normalize(x, delta)
            return self.add_mlp(x, self.linear_attn(normed, context))
        x, (queries, keys, values, gates) = self.attention_inputs(x, delta, context.rotation)
        parts = [(keys, values)] if context.state is None else context.state.update(keys, values)
        return self.finish(x, attention.attend(queries, parts, context.layout), gates)

    def attention_inputs(
        self, x: mx.array, delta: mx.array | None, rotation: ops.Rotation
    ) -> tuple[mx.array, Read]:
        """A call as far as attention: the residual stream, and what attention needs."""
        x, normed = self.input_layernorm.add_and_normalize(x, delta)
        return x, self.self_attn.project(normed, rotation)

    def finish(
        self, x: mx.array, attended: mx.array, gates: mx.array | None = None
    ) -> tuple[mx.array, mx.array]:
        """The rest of a call, from what attention gives."""
        return self.add_mlp(x, self.self_attn.output(attended, gates))

    def add_mlp(self, x: mx.array, mixed: mx.array) -> tuple[mx.array, mx.array]:
        """The rest of a call, from what the first sublayer adds."""
        x, normed = self.post_attention_layernorm.add_and_normalize(x, mixed)
        return x, self.mlp(normed)


def checkpoint_layer(
    layer: Block, x: mx.array, delta: mx.array | None, context: Context
) -> tuple[mx.array, None]:
    """
    `layer(x, delta, context)`, of which only x + delta is kept; the gradient computes the layer again.

    MLX holds a checkpoint's outputs as long as its inputs: what comes out is the stream with the last part added, which
    is the next layer's one input. `mx.checkpoint` differentiates its arguments and nothing else: the layer's weights
    are one of them (called on the module it would drop their gradients), and so is the state that an earlier level has
    left, whose gradients belong to the shared prompt. Integers and masks come by closure.
    """
    state = context.state
    assert isinstance(state, TreeLayer | DeltaState | None), (
        "what is written in place cannot be computed again"
    )

    def run(weights: Any, x: mx.array, before: Any) -> tuple[mx.array, Any]:
        own = layer.trainable_parameters()
        layer.update(weights)
        level = None if state is None else type(state)(list(before))
        x, out = layer(x, None, context._replace(state=level))
        layer.update(own)
        # of a view the whole product of queries, keys and values would stay
        return x + out, [] if level is None else [
            tuple(map(mx.contiguous, part)) for part in level.parts[-1:]
        ]

    before = [] if state is None else list(state.parts)
    x, newest = mx.checkpoint(run)(
        layer.trainable_parameters(), x if delta is None else x + delta, before
    )
    for part in newest:
        context.state.update(*part)
    return x, None


class Model(nn.Module):
    """A dense language model: `model(tokens, cache)` gives logits, (N, L, V); `hidden` and `head_weight` its halves."""

    def __init__(self, config: hub.ModelConfig):
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = [Block(config, kind) for kind in config.layer_kinds]
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, config.family.norm_offset)
        if not config.tie_word_embeddings:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self._rope = ops.Rope(config.rotary_dim, config.rope_theta, config.rope_scaling)

    @property
    def head_weight(self) -> mx.array:
        """(V, C): the embedding where the head is tied to it."""
        return self.embed_tokens.weight if self.config.tie_word_embeddings else self.lm_head.weight

    def hidden(
        self, tokens: mx.array, cache: Cache | None = None, checkpoint_layers: int = 0
    ) -> mx.array:
        """
        Normalized final hidden states, (N, L) int32 -> (N, L, C). Without a cache, padding belongs on the right.

        checkpoint_layers: of how many layers, from the first, the activations are computed again for the gradient
        instead of being kept.
        """
        num_rows, length = tokens.shape
        x = self.embed_tokens(tokens)
        offsets = (
            mx.zeros((num_rows,), dtype=mx.int32) if cache is None else cache.offsets(num_rows)
        )
        shared = Context(
            self._rope.make_rotation(offsets, length),
            CAUSAL if cache is None else cache.layout(length),
            None,
        )
        delta = None
        for index, layer in enumerate(self.layers):
            context = shared if cache is None else shared._replace(state=cache.layers[index])
            kept = index >= checkpoint_layers
            x, delta = (
                layer(x, delta, context) if kept else checkpoint_layer(layer, x, delta, context)
            )
        if cache is not None:
            cache.advance(length)
        return self.norm.add_and_normalize(x, delta)[1]

    def __call__(self, tokens: mx.array, cache: Cache | None = None) -> mx.array:
        """Logits of the next token at every position, (N, L) int32 -> (N, L, V)."""
        return self.hidden(tokens, cache) @ self.head_weight.T


Step = Callable[[mx.array, SlotCache], mx.array]
LEAST_COMPILED = 512  # hidden size of a model whose steps are compiled on a CPU


def decode_step(model: Model) -> Step:
    """
    `model.hidden` for one token a row with the weights of now, compiled between one attention and the next.

    Python then builds the graph of a step in a quarter of the time. What is compiled is traced once for each number of
    rows; attention and caches change shape every step and are not, a gated delta net's state is. On a CPU, g++ takes
    ten seconds for a model's loops, once: smaller models, as in tests, are not worth them.
    """
    if not gpu.on_gpu() and (model.config.hidden_size < LEAST_COMPILED or not cpu.has_compiler()):
        return model.hidden
    layers, rope = model.layers, model._rope
    places = [index for index, layer in enumerate(layers) if not layer.is_linear]  # of attention

    def between(before: int, after: int) -> tuple[list[int], Callable[..., Any]]:
        """The layers between two attentions, and what is computed from one to the other."""
        linear = list(range(before + 1, after))

        def run(x: mx.array, read: list[mx.array], turns: list[mx.array], states: list[Any]) -> Any:
            rotation, delta = ops.Rotation(rope, *turns), None
            if before >= 0:
                x, delta = layers[before].finish(x, *read)
            nets = [DeltaState([state]) for state in states]
            for index, net in zip(linear, nets, strict=True):
                x, delta = layers[index](x, delta, Context(rotation, CAUSAL, net))
            if after == len(layers):
                return model.norm.add_and_normalize(x, delta)[1], [net.newest for net in nets]
            x, made = layers[after].attention_inputs(x, delta, rotation)
            return (x, [array for array in made if array is not None]), [net.newest for net in nets]

        return linear, mx.compile(run)

    ends = [-1, *places, len(layers)]
    passes = [between(*pair) for pair in itertools.pairwise(ends)]

    def step(tokens: mx.array, cache: SlotCache) -> mx.array:
        _, *turns = rope.make_rotation(cache.offsets(len(tokens)), 1)
        turns, layout = [array for array in turns if array is not None], cache.layout(1)
        x, found = model.embed_tokens(tokens), list[mx.array]()
        for (linear, run), attended in zip(passes, ends[1:], strict=True):
            made, states = run(x, found, turns, [cache.layers[index].newest for index in linear])
            for index, state in zip(linear, states, strict=True):
                cache.layers[index].update(*state)
            if attended == len(layers):
                break
            x, (queries, keys, values, *gates) = made
            found = [
                attention.attend(queries, cache.layers[attended].update(keys, values), layout),
                *gates,
            ]
        cache.advance(1)
        return made

    built: set[int] = set()  # numbers of rows

    def first_alone(tokens: mx.array, cache: SlotCache) -> mx.array:
        """A step; a CPU's loops are built by one process at a time."""
        if gpu.on_gpu() or len(tokens) in built:
            return step(tokens, cache)
        with cpu.build_lock():
            mx.eval(made := step(tokens, cache))
        built.add(len(tokens))
        return made

    return first_alone


# ---- load and save


def arrange_for_matmul(name: str, weight: mx.array) -> mx.array:
    """
    The same weight, in memory as its product reads it: on a CPU a projection's (out, in) lies column by column.

    OpenBLAS packs what it multiplies by, and packs x @ W.T of a few rows a fifth slower from rows than from columns.
    """
    is_packed = weight.dtype == mx.uint32
    return (
        weight
        if gpu.on_gpu() or is_packed or not name.endswith("proj.weight")
        else mx.contiguous(weight.T).T
    )


def load_model(
    directory: str | Path,
    dtype: mx.Dtype | None = None,
    adapter: str | Path | None = None,
    packed: bool = False,
    lazy: bool = False,
) -> Model:
    """
    The model of a Hugging Face directory, in `dtype` (`default_dtype()`). ValueError names what is wrong with it.

    packed: layers' weights of few bits stay so; of a model without adapter and gradient. lazy: weights stay on disk,
    and each is read when something is first computed with it.
    """
    directory, dtype = Path(directory), dtype or default_dtype()
    config = hub.load_config(directory)
    weights, num_skipped = hub.from_stored_names(
        hub.load_weights(directory, default_dtype()), config.family
    )
    if num_skipped:
        print(
            f"gwen: {directory}: {num_skipped} tensors, not of language, are left out",
            file=sys.stderr,
        )
    if config.tie_word_embeddings:
        drop_tied_head(directory, weights)
    model = Model(config)  # lazy: its random weights are replaced before they are computed
    ways = hub.find_packings(weights, config)
    if packed:
        install_packed(model, ways)
    hub.unpack_weights(weights, ways)
    expected = hub.unfuse_weights(dict(tree_flatten(model.parameters())), config)
    for name in sorted(expected.keys() | weights.keys()):
        found, asked = (
            some[name].shape if name in some else "none" for some in (weights, expected)
        )
        if found != asked:
            raise ValueError(f"{directory}: {name} has shape {found}, config.json asks for {asked}")
        array = weights[name]
        if mx.issubdtype(array.dtype, mx.floating) != mx.issubdtype(
            expected[name].dtype, mx.floating
        ):
            raise ValueError(
                f"{directory}: {name} is {array.dtype}; only floating-point weights are supported"
            )
        weights[name] = (
            array
            if array.dtype == mx.uint32 or name.endswith(config.family.kept)
            else array.astype(dtype)
        )
    if adapter is not None:
        weights = adapters.merge_weights(weights, adapter, config.family)
    weights = hub.fuse_weights(weights)  # one name, so that no part outlives its whole
    model.load_weights(
        [(name, arrange_for_matmul(name, weights.pop(name))) for name in list(weights)]
    )
    if not lazy:
        memory.limit_mlx_cache()
        for part in (
            *model.layers,
            model,
        ):  # layer by layer: all at once would hold 1.5 times the model's bytes
            mx.eval(part.parameters())
        check_kernels(model)
    return model


def drop_tied_head(directory: Path, weights: dict[str, mx.array]) -> None:
    """
    Removes the head's tensors where the model takes its embedding for a head.

    Raises ValueError for a head of its own: other programs would use either of the two, and training only one.
    """
    for name in sorted(name for name in weights if name.startswith("lm_head.")):
        head = weights.pop(name)
        twin = name.replace("lm_head.", "model.embed_tokens.")
        embedding = weights.get(twin)
        if (
            embedding is None
            or head.shape != embedding.shape
            or not mx.array_equal(head, embedding, equal_nan=True)
        ):
            fix = "set tie_word_embeddings to false in config.json to use it, or remove the tensor"
            raise ValueError(
                f"{directory}: {name} differs from {twin}, and tie_word_embeddings is true or the default; {fix}"
            )


def install_packed(model: Model, ways: dict[str, dict[str, Any]]) -> None:
    """
    Replaces layers' projections by packed ones, and takes them out of `ways`, where all parts of one are packed alike.

    Embedding and head stay 16 bits wide: scores, and what a teacher says, are read from the head by tiles of it.
    """
    kept = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name != "lm_head":
            parts = list(hub.unfuse_weights({name: module.weight}, model.config))
            its = [ways.get(part) for part in parts]
            if its[0] and its[0]["mode"] == "affine" and its.count(its[0]) == len(its):
                kept[name] = its[0]
                for part in parts:
                    del ways[part]
    nn.quantize(model, class_predicate=lambda name, _: kept.get(name, False))


def check_kernels(model: Model) -> None:
    """Says where MLX's arithmetic is wrong at this model's sizes; kernels that are wrong are named and turned off."""
    if not gpu.has_metal():
        return
    line, well = check_mlx(model)
    if not well:
        bugs = "mlx #3585, #3586, #3797 and #4411"
        print(
            f"gwen: MLX's own arithmetic is {line}; see {bugs}, or take another MLX",
            file=sys.stderr,
        )
    if kernels.kernels_are_wanted():
        kernels.check_calls(rehearse_kernels(model))


def check_mlx(model: Model) -> tuple[str, bool]:
    """A line on what MLX itself computes at the sizes of a model's weights, and whether it is right."""
    kinds, config = model.config.layer_kinds, model.config
    firsts = [model.layers[kinds.index(kind)] for kind in dict.fromkeys(kinds)]
    arrays = [
        array
        for layer in firsts
        for _, array in tree_flatten(layer.parameters())
        if array.dtype != mx.uint32
    ]
    heads = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    return probe.check_arithmetic(
        [*(array for array in arrays if array.ndim == 2), model.head_weight], heads
    )


def rehearse_kernels(model: Model) -> list[kernels.Call]:
    """What a layer of each kind and the draw of a token call in a prefill and a decode step, on a few tokens."""
    layers, head, kinds = model.layers, model.head_weight, model.config.layer_kinds
    length = 9 if model.config.delta else 3  # a gated delta net has another kernel beyond 8 tokens
    ids = mx.stack([mx.arange(length), mx.arange(length)[::-1]]) % model.config.vocab_size
    firsts = {kind: layers[kinds.index(kind)] for kind in kinds}
    model.layers = list(firsts.values())
    try:
        with kernels.record_calls() as calls:
            for pad in (mx.array([1, 0]), None):
                prompts = KVCache(list(firsts), length, pad)
                model.hidden(ids, prompts)
                for share, prompt_of in (
                    (True, [0, 0, 1, 1]),
                    (True, [0, 0, 0, 1]),
                    (False, [0, 0, 1, 1]),
                ):
                    slots = SlotCache(prompts, 4, 4, share)
                    for begun in (None, [2, 3]):  # then slots differ
                        slots.assign(prompt_of, begun)
                        slots.plan_writes()
                        model.hidden(mx.array([[1]] * 4), slots)
            logits, uniforms = model.hidden(ids)[:, -1] @ head.T, mx.full((2, 4), 0.5)
            softmax.row_logprobs(logits, ids[:, 0])
            softmax.sample_token(logits, uniforms, 0.7)
            kept = softmax.truncate_logits(logits.astype(mx.float32), softmax.Support(top_p=0.9))
            softmax.sample_token(kept, uniforms)
            heads = mx.ones((1, 2, 3, 64), head.dtype)
            for mask in ("causal", mx.tri(3, dtype=mx.bool_)[None, None]):
                attention.attention_vjp(heads, heads, heads, heads, mask)
    finally:
        model.layers = layers
    return calls


def choose_model(
    asked: str | None, adapter: str | Path | None = None, usual: str | None = None
) -> tuple[str, str]:
    """
    The model to take and why: what was asked for, else the adapter's base, else what is usual for the task, else
    Qwen3-0.6B on a GPU where it can be had, else the demo. ValueError for an adapter that does not name its base.
    """
    if asked:
        return asked, "as asked"
    if adapter:
        return adapters.base_model_of(adapter), "which the adapter was trained on"
    if usual:
        return usual, "the task's own"
    if not gpu.on_gpu():
        return "demo", "the default without a GPU"
    try:
        hub.hub_directory(hub.DEFAULT_MODEL)
    except ValueError as error:
        return "demo", f"because {str(error).removeprefix('--model ')}"
    return hub.DEFAULT_MODEL, "the default on a GPU"


@functools.cache
def load_known_models() -> dict[str, dict[str, Any]]:
    """What the config.json of each model in data/models.yaml would have, by the model's name."""
    table = load_yaml(Path(__file__).parent / "data" / "models.yaml", "data/models.yaml")
    columns = table.pop("columns")
    same: dict[str, Any] = {
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 40960,
        "rope_theta": 1e6,
    }
    same["architectures"] = ["Qwen3ForCausalLM"]  # which TRL reads, of a random one that is written
    return {name: same | dict(zip(columns, row, strict=False)) for name, row in table.items()}


def load_known_config(name: str) -> hub.ModelConfig:
    """The configuration of a model in data/models.yaml. ValueError when there is none of that name."""
    if name not in load_known_models():
        known = [one for one in load_known_models() if one.startswith("random:")]
        raise ValueError(f"--model {name}: the random models are {', '.join(known)}")
    return hub.make_config(load_known_models()[name])


def refuse_packed(name: str) -> None:
    """Raises ValueError for a model to train whose weights have few bits, which no update would move."""
    if load_config(name).packing:
        fix = "train the checkpoint of 16 bits that it was made from"
        raise ValueError(
            f"--model {name} is quantized: {fix}; as --judge-model and --teacher it is taken"
        )


@contextlib.contextmanager
def blame_flag(flag: str, usual: str = "--model") -> Iterator[None]:
    """Inside, what is wrong with a model or adapter is said of this flag instead of the usual one."""
    try:
        yield
    except ValueError as error:
        raise ValueError(str(error).replace(f"{usual} ", f"{flag} ")) from error


def load_config(path_or_id: str | Path) -> hub.ModelConfig:
    """The configuration of what `load` takes, of which nothing else is downloaded. ValueError says what is wrong."""
    name, shape = str(path_or_id), str(path_or_id).removesuffix("-Instruct").removesuffix("-Base")
    if name.startswith("random:") or (shape in load_known_models() and not Path(name).is_dir()):
        return load_known_config(shape)
    return hub.load_config(
        hub.find_model(path_or_id, files=["config.json", "generation_config.json"])
    )


def random_model(name: str, dtype: mx.Dtype | None = None) -> Model:
    """A `random:` model, with seeded weights and no end token, for benchmarks and tests."""
    model, dtype = Model(load_known_config(name)), dtype or default_dtype()
    weights = tree_flatten(model.parameters())
    keys = mx.random.split(mx.random.key(0), len(weights))
    for (path, array), key in zip(sorted(weights), keys, strict=True):
        if array.ndim > 1:  # norm weights stay at 1
            array = mx.random.normal(array.shape, dtype, scale=0.02, key=key)
        array = array if path.endswith(model.config.family.kept) else array.astype(dtype)
        model.load_weights([(path, arrange_for_matmul(path, array))], strict=False)
        mx.eval(model.parameters())  # wait: one tensor at a time, so that no second copy is held
    memory.limit_mlx_cache()
    check_kernels(model)
    return model


def load(
    path_or_id: str | Path,
    dtype: mx.Dtype | None = None,
    adapter: str | Path | None = None,
    frozen: bool = False,
    end_tokens: Sequence[str] = (),
) -> tuple[Model, Any]:
    """
    Model and tokenizer of `demo`, a Hugging Face directory or a hub id, in `dtype` (`default_dtype()`). A name
    with `random:` gives random weights with the demo's tokenizer.

    adapter: a run, a checkpoint or a directory of mlx_lm's layout, whose weights are merged in. frozen: a judge or a
    teacher, whose weights of few bits stay packed on a GPU; a CPU multiplies by packed ones 4 to 40 times slower.
    end_tokens: further tokens that end a completion, see `disk.ends`.
    ValueError names what is wrong.
    """
    if str(path_or_id).startswith("random:"):
        if adapter is not None:
            raise ValueError(
                f"--adapter {adapter} is of another model than {path_or_id}; give the directory it is of"
            )
        model, tokenizer = random_model(str(path_or_id), dtype), hub.load_tokenizer(hub.DEMO)
        other_end_ids = tuple(ends.find_token_ids(tokenizer, end_tokens))
        model.config = dataclasses.replace(model.config, other_end_ids=other_end_ids)
        return model, tokenizer
    if adapter is not None:
        warn_of_other_base(adapter, path_or_id)
    with alive.show_activity(f"loading {path_or_id}"):
        directory = hub.find_model(path_or_id)
        model = load_model(directory, dtype, adapter, packed=frozen and gpu.on_gpu())
        tokenizer = hub.load_tokenizer(directory)
    largest, vocab_size = max(tokenizer.get_vocab().values(), default=0), model.config.vocab_size
    if largest >= vocab_size:
        raise ValueError(
            f"{directory}: the tokenizer has the id {largest}, the model only {vocab_size} ids"
        )
    model.config = with_ends(model.config, tokenizer, path_or_id, end_tokens)
    return model, tokenizer


def with_ends(
    config: hub.ModelConfig, tokenizer: Any, name: str | Path, end_tokens: Sequence[str] = ()
) -> hub.ModelConfig:
    """The configuration with all end tokens; prints those that the model's files do not name. ValueError for none."""
    try:
        whole, sources = ends.add_end_tokens(config, tokenizer, end_tokens)
    except ValueError as error:
        raise ValueError(f"--model {name}: {error}") from error
    tell_once(
        f"gwen: {name}: {ends.describe_sources(whole, tokenizer, sources)}" if sources else ""
    )
    return whole


def warn_of_other_base(adapter: str | Path, name: str | Path, flag: str = "--adapter") -> None:
    """Prints a line where an adapter was trained on another model than it is put on."""
    if base := adapters.other_base(adapter, name):
        fix = f"--model {base} is the one that it fits"
        tell_once(f"gwen: {flag} {adapter} was trained on {base}, and the model is {name}; {fix}")


@functools.cache
def tell_once(line: str) -> None:
    """Prints a line on stderr, the first time that it is told."""
    if line:
        print(line, file=sys.stderr)


def save(model: Model, directory: str | Path, tokenizer: Any) -> None:
    """Writes the model un-fused to a new directory, with configuration and tokenizer, for mlx_lm and transformers."""
    directory, config = Path(directory), model.config
    directory.mkdir(parents=True, exist_ok=True)
    weights = hub.to_hub_names(
        hub.unfuse_weights(dict(tree_flatten(model.parameters())), config), config.family
    )
    mx.save_safetensors(str(directory / "model.safetensors"), weights, metadata={"format": "pt"})
    raw = hub.make_config_json(config, model.head_weight.dtype)
    (directory / "config.json").write_text(json.dumps(raw, indent=2) + "\n")
    generation = {"eos_token_id": raw["eos_token_id"], "do_sample": True, "temperature": 1.0}
    (directory / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    tokenizer.save_pretrained(str(directory))


# ---- the doctor


def examine_machine() -> Iterator[tuple[str, bool | None]]:
    """Lines that a user of this machine should know, and whether each is well; None: no, but the demo does without."""
    found, dtype = versions.describe_environment(cpu_blas.description), default_dtype()
    numbers = ", ".join(f"{name} {number}" for name, number in found["versions"].items())
    panics = "none; memory that macOS must not page out was reported to panic it: docs/memory.md, mlx #3186"
    wired = (
        f"{limit} GB that macOS must not page out"
        if (limit := os.environ.get(memory.WIRED_LIMIT))
        else panics
    )
    yield f"versions: Python {found['python']}, {numbers}", True
    yield f"machine: {found['machine']}, {found['platform']}, {found['num_cpus']} CPUs", True
    yield f"memory: {memory.memory_size() / 1e9:.1f} GB for this process", True
    yield f"wired: {wired}", True
    yield (
        f"device: {'metal' if gpu.has_metal() else 'cpu'}, where models are {str(dtype).rpartition('.')[2]}",
        True,
    )
    yield f"BLAS: {found['blas']}; it multiplies matrices on the CPU", True
    usual = "random:0.6b" if gpu.has_metal() else "random:2m"
    shape = Model(dataclasses.replace(load_known_config(usual), layer_kinds=("full_attention",)))
    shape.set_dtype(dtype)
    line, well = check_mlx(shape)
    yield f"MLX: {line}; tried at the sizes of {usual}", well
    line, well = hub.describe_cache()
    yield line, well or None
    if not (gpu.has_metal() and kernels.kernels_are_wanted()):
        yield (
            f"kernels: none, {'as GWEN_KERNELS says' if gpu.has_metal() else 'they are for a GPU'}",
            True,
        )
        return
    calls = [*rehearse_kernels(shape), *lm_head.rehearse_head(shape.head_weight)]
    kernels.check_calls(calls)
    names = dict.fromkeys(op.name for op, *_ in calls)
    off = [name for name in names if kernels.OPS[name].disabled_dtypes]
    yield (
        f"kernels: {', '.join(names)} were compared with plain MLX; OFF: {', '.join(off) or 'none'}",
        not off,
    )


@guard_output()
@report_mistakes()
def main(argv: list[str] | None = None) -> None:
    parser = Parser(
        "gwen.py", "Look at this machine: versions, device, BLAS, memory, hub, kernels."
    )
    parser.add_argument("--doctor", action="store_true", required=True, help="what runs here")
    parser.parse_args(argv)
    all_well = True
    kernels.kernels_are_wanted()  # a mistake in the environment is told before anything else
    for line, well in examine_machine():
        mark = "   " if well is None else "ok " if well else "BAD"
        print(mark, line, flush=True)
        all_well &= mark != "BAD"
    # what fits is counted above this room
    command = [sys.executable, str(Path(__file__).with_name("preflight.py")), "--fits"]
    table = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    print(table.stdout, end="")
    if not all_well or table.returncode:
        exit_with_error("something is wrong here; the lines above say what")


if __name__ == "__main__":
    main()
