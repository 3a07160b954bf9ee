"""
Dense language models on MLX, for the families in disk/hub.py: blocks, loading and saving.

The query, key and value projections are one matmul (`qkv_proj`), and so are the gate and up
projections (`gate_up_proj`). The computation between the matmuls is in layers/. `save` writes the
Hugging Face layout. Low-bit weights are unpacked, or stay packed in a frozen model.

Mixtures of experts and sliding windows are not supported: a checkpoint that needs one is refused
with a message that names it. The choice of a command's model is in disk/model_choice.py, and the
doctor is in doctor.py.

Axes: N rows, L positions, C hidden, H query heads, K kv heads, D head dim, F mlp width,
V vocabulary, W window of a convolution.
"""

import dataclasses
import itertools
import json
import os
import runpy
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import cpu_blas  # noqa: F401  (before mlx)
import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from disk import adapters, ends, hub, model_choice
from kv_cache import CAUSAL, Cache, DeltaState, KVCache, Layout, SlotCache
from layers import attention, delta, ops, probe, softmax
from layers.tree_cache import TreeLayer
from machine import alive, cpu, gpu, kernels, memory

DTYPES = {"float16": mx.float16, "bfloat16": mx.bfloat16, "float32": mx.float32}


def default_dtype() -> mx.Dtype:
    """
    The type that `GWEN_DTYPE` names.

    The default is float16 on a GPU, and float32 on a CPU, which has no 16-bit BLAS.
    Raises ValueError if the name is unknown.
    """
    usual = "float16" if gpu.on_gpu() else "float32"
    name = os.environ.get("GWEN_DTYPE", usual)
    if name not in DTYPES:
        raise ValueError(f"GWEN_DTYPE={name!r} is not one of {', '.join(DTYPES)}")
    return DTYPES[name]


# ---- the model


class RMSNorm(nn.Module):
    """x / rms(x) * (offset + weight)"""

    def __init__(self, size: int, eps: float, offset: float = 0.0):
        super().__init__()
        self.weight = mx.full((size,), 1 - offset)
        self.eps = eps
        self.offset = offset
        self._scale: tuple[mx.array, ...] = ()  # the weight, and the scale that was made from it

    @property
    def scale(self) -> mx.array:
        """offset + weight, computed once for each weight array."""
        if not self.offset:
            return self.weight
        if not self._scale or self._scale[0] is not self.weight:
            scale = (self.weight.astype(mx.float32) + self.offset).astype(self.weight.dtype)
            self._scale = (self.weight, scale)
        return self._scale[1]

    def __call__(self, x: mx.array) -> mx.array:
        return ops.rms_norm(x, self.scale, self.eps)

    def add_and_normalize(self, x: mx.array, delta: mx.array | None) -> tuple[mx.array, mx.array]:
        """x + delta, and its normalized form."""
        if delta is None:
            return x, self(x)
        return ops.add_norm(x, delta, self.scale, self.eps)


class Context(NamedTuple):
    """The inputs of a layer in a forward pass, besides the hidden states."""

    rotation: ops.Rotation  # the positions of the tokens
    layout: Layout  # which tokens each token sees
    state: Any  # this layer's cache of earlier tokens; None if there is no cache


# queries, keys, values and gates: see `Attention.project`
Projections = tuple[mx.array, mx.array, mx.array, mx.array | None]


class Attention(nn.Module):
    """The projections of softmax attention; `layers.attention` computes the attention itself."""

    def __init__(self, config: hub.ModelConfig, kind: str):
        super().__init__()
        family = config.family
        self.has_rotation = kind == "full_attention"
        self.has_gates = family.output_gate
        self.num_heads = config.num_attention_heads
        self.num_kv_heads = config.num_key_value_heads
        self.head_dim = config.head_dim
        self.eps = config.rms_norm_eps
        num_parts = self.num_heads * (1 + self.has_gates) + 2 * self.num_kv_heads
        width = num_parts * self.head_dim
        self.qkv_proj = nn.Linear(config.hidden_size, width, bias=family.bias)
        self.o_proj = nn.Linear(self.num_heads * self.head_dim, config.hidden_size, bias=False)
        if family.qk_norm:
            self.q_norm = RMSNorm(self.head_dim, self.eps, family.norm_offset)
            self.k_norm = RMSNorm(self.head_dim, self.eps, family.norm_offset)

    def project(self, x: mx.array, rotation: ops.Rotation) -> Projections:
        """
        The inputs of attention: queries (N, H, L, D), keys and values (N, K, L, D).

        The last value holds the output gates before their sigmoid, (N, L, H, D). It is None if the
        family has no gates.
        """
        # (N, L, H + 2K, D), or with gates (N, L, 2H + 2K, D)
        qkv = self.qkv_proj(x).reshape(*x.shape[:2], -1, self.head_dim)
        gates = None
        if self.has_gates:  # each head's gate follows its query
            queries_and_gates, keys_and_values = mx.split(qkv, [2 * self.num_heads], axis=2)
            gates = queries_and_gates[:, :, 1::2]
            queries = queries_and_gates[:, :, ::2]
            qkv = mx.concatenate([queries, keys_and_values], axis=2)

        weights = (self.q_norm.scale, self.k_norm.scale) if "q_norm" in self else None
        if self.has_rotation:
            parts = ops.norm_rope(qkv, self.num_heads, weights, self.eps, rotation)
        else:
            parts = ops.norm_rope_ref(qkv, self.num_heads, weights, self.eps, None)
        return *parts, gates

    def output(self, attended: mx.array, gates: mx.array | None) -> mx.array:
        """(N, H, L, D) -> (N, L, C)"""
        attended = attended.transpose(0, 2, 1, 3)
        if gates is not None:
            attended = attended * mx.sigmoid(gates)
        return self.o_proj(attended.reshape(*attended.shape[:2], -1))


class GatedDeltaNet(nn.Module):
    """
    Linear attention, which layers/delta.py explains.

    It keeps a memory of fixed size instead of keys and values.
    """

    def __init__(self, config: hub.ModelConfig):
        super().__init__()
        assert config.delta is not None
        self.sizes = config.delta
        num_heads = config.delta.num_value_heads
        # output rows for the convolved channels, the gates, beta and the decay
        widths = hub.part_rows(config, "linear_attn.in_proj")
        self.split_points = [sum(widths[: i + 1]) for i in range(3)]
        self.in_proj = nn.Linear(config.hidden_size, sum(widths), bias=False)
        self.conv1d = nn.Module()  # a causal convolution of each channel
        self.conv1d.weight = mx.zeros((widths[0], 1, self.sizes.window))
        self.A_log = mx.zeros((num_heads,))
        self.dt_bias = mx.ones((num_heads,))
        self.norm = RMSNorm(self.sizes.value_dim, config.rms_norm_eps)
        self.out_proj = nn.Linear(widths[1], config.hidden_size, bias=False)

    def __call__(self, x: mx.array, context: Context) -> mx.array:
        num_rows, length, _ = x.shape
        sizes = self.sizes
        spans = context.layout.spans

        channels, gates, beta, decay = mx.split(self.in_proj(x), self.split_points, axis=-1)
        beta = mx.sigmoid(beta.astype(mx.float32))
        decay_rate = -mx.exp(self.A_log.astype(mx.float32))
        log_decay = decay_rate * nn.softplus(decay.astype(mx.float32) + self.dt_bias)
        if spans is not None:  # padding changes neither the memory nor the convolution's inputs
            column = mx.arange(length)
            is_token = (column >= spans[0][:, None]) & (column < spans[1][:, None])
            is_token = is_token[..., None]
            channels = mx.where(is_token, channels, 0)
            beta = mx.where(is_token, beta, 0)
            log_decay = mx.where(is_token, log_decay, 0)

        past = None if context.state is None else context.state.newest
        earlier_channels, memory = past or sizes.empty_state(num_rows, x.dtype)
        window = mx.concatenate([earlier_channels, channels], axis=1)  # (N, W - 1 + L, channels)
        mixed = delta.convolve(window, self.conv1d.weight).astype(mx.float32)
        key_width = sizes.widths[0]
        queries, keys, values = mx.split(mixed, [key_width, 2 * key_width], axis=-1)
        queries = delta.normalize(queries.reshape(num_rows, length, -1, sizes.key_dim))
        keys = delta.normalize(keys.reshape(num_rows, length, -1, sizes.key_dim))
        values = values.reshape(num_rows, length, -1, sizes.value_dim)
        queries = queries * sizes.key_dim**-0.5
        out, memory = delta.gated_delta(queries, keys, values, log_decay, beta, memory)

        if context.state is not None:
            row_ends = spans and spans[1]
            inputs = delta.convolution_state(window, sizes.window - 1, row_ends)
            context.state.update(inputs, memory)
        normed = self.norm(out).reshape(num_rows, length, -1)
        gated = normed * ops.silu(gates.astype(mx.float32))
        return self.out_proj(gated.astype(x.dtype))


class MLP(nn.Module):
    """down(silu(gate(x)) * up(x))"""

    def __init__(self, config: hub.ModelConfig):
        super().__init__()
        self.gate_up_proj = nn.Linear(config.hidden_size, 2 * config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def __call__(self, x: mx.array) -> mx.array:
        return self.down_proj(ops.swiglu(self.gate_up_proj(x)))


class Block(nn.Module):
    """
    One layer: attention or a gated delta net, then an MLP.

    The residual stream is passed as two arrays: `x`, and `delta`, the last sublayer's output, which
    has not been added to `x` yet. The next norm adds it in the same kernel.
    """

    def __init__(self, config: hub.ModelConfig, kind: str):
        super().__init__()
        self.is_linear = kind == "linear_attention"
        if self.is_linear:
            self.linear_attn = GatedDeltaNet(config)
        else:
            self.self_attn = Attention(config, kind)
        self.mlp = MLP(config)
        norm_offset = config.family.norm_offset
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, norm_offset)
        self.post_attention_layernorm = RMSNorm(
            config.hidden_size, config.rms_norm_eps, norm_offset
        )

    def __call__(
        self, x: mx.array, delta: mx.array | None, context: Context
    ) -> tuple[mx.array, mx.array]:
        """x and delta before this layer -> x and delta after it."""
        if self.is_linear:
            x, normed = self.input_layernorm.add_and_normalize(x, delta)
            return self.run_mlp(x, self.linear_attn(normed, context))

        x, (queries, keys, values, gates) = self.attention_inputs(x, delta, context.rotation)
        parts = [(keys, values)]
        if context.state is not None:
            parts = context.state.update(keys, values)
        attended = attention.attend(queries, parts, context.layout)
        return self.finish(x, attended, gates)

    def attention_inputs(
        self, x: mx.array, delta: mx.array | None, rotation: ops.Rotation
    ) -> tuple[mx.array, Projections]:
        """Runs the layer up to attention, and returns the residual stream and the projections."""
        x, normed = self.input_layernorm.add_and_normalize(x, delta)
        return x, self.self_attn.project(normed, rotation)

    def finish(
        self, x: mx.array, attended: mx.array, gates: mx.array | None = None
    ) -> tuple[mx.array, mx.array]:
        """Computes the part of a call after attention."""
        return self.run_mlp(x, self.self_attn.output(attended, gates))

    def run_mlp(self, x: mx.array, mixed: mx.array) -> tuple[mx.array, mx.array]:
        """Computes the part of a call after the first sublayer, whose output is `mixed`."""
        x, normed = self.post_attention_layernorm.add_and_normalize(x, mixed)
        return x, self.mlp(normed)


def checkpoint_layer(
    layer: Block, x: mx.array, delta: mx.array | None, context: Context
) -> tuple[mx.array, None]:
    """
    The sum of both results of `layer(x, delta, context)`, which the backward pass computes again.

    MLX holds a checkpoint's outputs as long as its inputs. So there is one output, the residual
    stream with the last delta added, and it is the only input of the next layer.

    `mx.checkpoint` differentiates only with respect to its arguments. So the layer's weights are an
    argument: a checkpoint of the module itself would drop their gradients. The states of earlier
    levels are arguments too, because their gradients belong to the shared prompt. The closure
    captures integers and masks.
    """
    state = context.state
    is_replaced = isinstance(state, TreeLayer | DeltaState | None)
    assert is_replaced, "what is written in place cannot be computed again"

    def run(weights: Any, x: mx.array, earlier_parts: Any) -> tuple[mx.array, Any]:
        layer_weights = layer.trainable_parameters()
        layer.update(weights)
        level = None if state is None else type(state)(list(earlier_parts))
        x, out = layer(x, None, context._replace(state=level))
        layer.update(layer_weights)
        if level is None:
            return x + out, []
        # a view would keep the whole product of queries, keys and values
        newest_parts = [tuple(map(mx.contiguous, part)) for part in level.parts[-1:]]
        return x + out, newest_parts

    earlier_parts = [] if state is None else list(state.parts)
    stream = x if delta is None else x + delta
    x, newest_parts = mx.checkpoint(run)(layer.trainable_parameters(), stream, earlier_parts)
    for part in newest_parts:
        context.state.update(*part)
    return x, None


class Model(nn.Module):
    """
    A dense language model.

    `model(tokens, cache)` returns logits, (N, L, V), the product of `hidden` and `head_weight`.
    """

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
        """(V, C): the embedding if the head is tied to it."""
        return self.embed_tokens.weight if self.config.tie_word_embeddings else self.lm_head.weight

    def hidden(
        self, tokens: mx.array, cache: Cache | None = None, checkpoint_layers: int = 0
    ) -> mx.array:
        """
        Normalized final hidden states, (N, L) int32 -> (N, L, C).

        Without a cache, padding belongs on the right.
        checkpoint_layers: the number of layers, from the first, whose activations the backward
        pass computes again instead of keeping them.
        """
        num_rows, length = tokens.shape
        x = self.embed_tokens(tokens)
        if cache is None:
            offsets = mx.zeros((num_rows,), dtype=mx.int32)
            layout = CAUSAL
        else:
            offsets = cache.offsets(num_rows)
            layout = cache.layout(length)
        rotation = self._rope.make_rotation(offsets, length)

        delta = None
        for index, layer in enumerate(self.layers):
            state = None if cache is None else cache.layers[index]
            context = Context(rotation, layout, state)
            if index < checkpoint_layers:
                x, delta = checkpoint_layer(layer, x, delta, context)
            else:
                x, delta = layer(x, delta, context)
        if cache is not None:
            cache.advance(length)
        return self.norm.add_and_normalize(x, delta)[1]

    def __call__(self, tokens: mx.array, cache: Cache | None = None) -> mx.array:
        """Logits of the next token at every position, (N, L) int32 -> (N, L, V)."""
        return self.hidden(tokens, cache) @ self.head_weight.T


# ---- a decode step


Step = Callable[[mx.array, SlotCache], mx.array]
LEAST_COMPILED = 512  # the smallest hidden size at which steps are compiled on a CPU


class Segment(NamedTuple):
    """The computation between two attentions, as one compiled function."""

    linear_layers: list[int]  # the gated delta nets in it
    run: Callable[..., Any]


def make_segment(model: Model, before: int, after: int) -> Segment:
    """
    Compiles the computation between the attentions of two layers.

    before: the first of these layers; -1 if the segment begins at the embedding.
    after: the second one; the number of layers if the segment ends at the final hidden states.
    """
    layers = model.layers
    rope = model._rope
    linear_layers = list(range(before + 1, after))

    def run(x: mx.array, attended: list[mx.array], turns: list[mx.array], states: list[Any]) -> Any:
        """attended: the output of attention, and its gates if there are any."""
        rotation = ops.Rotation(rope, *turns)
        delta = None
        if before >= 0:
            x, delta = layers[before].finish(x, *attended)
        nets = [DeltaState([state]) for state in states]
        for index, net in zip(linear_layers, nets, strict=True):
            x, delta = layers[index](x, delta, Context(rotation, CAUSAL, net))
        if after == len(layers):
            hidden = model.norm.add_and_normalize(x, delta)[1]
            return hidden, [net.newest for net in nets]
        x, projections = layers[after].attention_inputs(x, delta, rotation)
        arrays = [array for array in projections if array is not None]
        return (x, arrays), [net.newest for net in nets]

    return Segment(linear_layers, mx.compile(run))


def make_decode_step(model: Model) -> Step:
    """
    A function that equals `model.hidden` for one token per row, with the current weights.

    The computation between attentions is compiled, so that Python builds the graph of a step in a
    quarter of the time. A compiled function is traced once for each number of rows. Attention and
    its caches change shape every step and are not compiled; updates of a gated delta net's state
    are compiled.

    On a CPU, g++ once takes ten seconds to compile a model's loops. Smaller models, such as those
    in tests, are not worth that time.
    """
    is_small = model.config.hidden_size < LEAST_COMPILED
    if not gpu.on_gpu() and (is_small or not cpu.has_compiler()):
        return model.hidden
    layers = model.layers
    rope = model._rope
    attention_layers = [index for index, layer in enumerate(layers) if not layer.is_linear]
    boundaries = [-1, *attention_layers, len(layers)]
    segments = [
        make_segment(model, before, after) for before, after in itertools.pairwise(boundaries)
    ]

    def step(tokens: mx.array, cache: SlotCache) -> mx.array:
        _, *rotation_arrays = rope.make_rotation(cache.offsets(len(tokens)), 1)
        turns = [array for array in rotation_arrays if array is not None]
        layout = cache.layout(1)
        x = model.embed_tokens(tokens)
        attended: list[mx.array] = []
        for segment, layer in zip(segments, boundaries[1:], strict=True):
            states = [cache.layers[index].newest for index in segment.linear_layers]
            result, new_states = segment.run(x, attended, turns, states)
            for index, state in zip(segment.linear_layers, new_states, strict=True):
                cache.layers[index].update(*state)
            if layer == len(layers):
                break
            x, (queries, keys, values, *gates) = result
            parts = cache.layers[layer].update(keys, values)
            attended = [attention.attend(queries, parts, layout), *gates]
        cache.advance(1)
        return result

    compiled_sizes: set[int] = set()  # numbers of rows

    def step_with_lock(tokens: mx.array, cache: SlotCache) -> mx.array:
        """Runs a step. Only one process at a time compiles loops for a CPU."""
        if gpu.on_gpu() or len(tokens) in compiled_sizes:
            return step(tokens, cache)
        with cpu.build_lock():
            hidden = step(tokens, cache)
            mx.eval(hidden)
        compiled_sizes.add(len(tokens))
        return hidden

    return step_with_lock


# ---- load and save


def load(
    path_or_id: str | Path,
    dtype: mx.Dtype | None = None,
    adapter: str | Path | None = None,
    frozen: bool = False,
    end_tokens: Sequence[str] = (),
) -> tuple[Model, Any]:
    """
    Loads a model and its tokenizer.

    path_or_id: `demo`, a Hugging Face directory or a hub id. A name that begins with `random:`
    gives random weights with the demo's tokenizer.

    dtype: None means `default_dtype()`.
    adapter: a run, a checkpoint or a directory in mlx_lm's layout. Its weights are merged in.
    frozen: whether the model never trains, like a judge or a teacher. Its low-bit weights then stay
    packed on a GPU. A CPU multiplies by packed weights 4 to 40 times slower, so it unpacks them.
    end_tokens: further tokens that end a completion, see `disk.ends`.

    Raises ValueError that names what is wrong.
    """
    if str(path_or_id).startswith("random:"):
        if adapter is not None:
            raise ValueError(
                f"--adapter {adapter} belongs to another model than {path_or_id}; "
                "give the directory of that model"
            )
        model = random_model(str(path_or_id), dtype)
        tokenizer = hub.load_tokenizer(hub.DEMO)
        other_end_ids = tuple(ends.find_token_ids(tokenizer, end_tokens))
        model.config = dataclasses.replace(model.config, other_end_ids=other_end_ids)
        return model, tokenizer

    if adapter is not None:
        model_choice.warn_of_other_base(adapter, path_or_id)
    with alive.show_activity(f"loading {path_or_id}"):
        directory = hub.find_model(path_or_id)
        model = load_model(directory, dtype, adapter, packed=frozen and gpu.on_gpu())
        tokenizer = hub.load_tokenizer(directory)
    largest_id = max(tokenizer.get_vocab().values(), default=0)
    vocab_size = model.config.vocab_size
    if largest_id >= vocab_size:
        raise ValueError(
            f"{directory}: the tokenizer has the id {largest_id}, the model only {vocab_size} ids"
        )
    model.config = model_choice.with_all_end_tokens(model.config, tokenizer, path_or_id, end_tokens)
    return model, tokenizer


def load_model(
    directory: str | Path,
    dtype: mx.Dtype | None = None,
    adapter: str | Path | None = None,
    packed: bool = False,
    lazy: bool = False,
) -> Model:
    """
    Loads the model of a Hugging Face directory.

    dtype: None means `default_dtype()`.
    packed: the layers' low-bit weights stay packed, for a model without adapter and gradient.
    lazy: weights stay on disk; each is read when something is first computed with it.

    Raises ValueError that names what is wrong with the directory.
    """
    directory = Path(directory)
    dtype = dtype or default_dtype()
    config = hub.load_config(directory)
    stored_weights = hub.load_weights(directory, default_dtype())
    weights, num_skipped = hub.from_stored_names(stored_weights, config.family)
    del stored_weights  # so that a matrix is freed when it leaves `weights`
    if num_skipped:
        print(
            f"gwen: {directory}: left out {num_skipped} tensors that do not belong to the "
            "language model",
            file=sys.stderr,
        )
    if config.tie_word_embeddings:
        drop_tied_head(directory, weights)

    model = Model(config)  # lazy: its random weights are replaced before they are computed
    packings = hub.find_packings(weights, config)
    if packed:
        install_packed(model, packings)
    hub.unpack_weights(weights, packings)
    convert_weights(directory, weights, model, dtype)
    if adapter is not None:
        weights = adapters.merge_weights(weights, adapter, config.family)
    weights = hub.fuse_weights(weights)  # the same name, so that the separate parts are freed
    names = list(weights)
    model.load_weights([(name, arrange_for_matmul(name, weights.pop(name))) for name in names])

    if not lazy:
        memory.limit_mlx_cache()
        # layer by layer: evaluating all at once would hold 1.5 times the model's bytes
        for part in (*model.layers, model):
            mx.eval(part.parameters())
        check_kernels(model)
    return model


def convert_weights(
    directory: Path, weights: dict[str, mx.array], model: Model, dtype: mx.Dtype
) -> None:
    """
    Converts weights in place to the types that the model computes with.

    weights: by Hugging Face name. Raises ValueError unless they are exactly the model's.
    """
    config = model.config
    expected = hub.unfuse_weights(dict(tree_flatten(model.parameters())), config)
    for name in sorted(expected.keys() | weights.keys()):
        shape = weights[name].shape if name in weights else "none"
        expected_shape = expected[name].shape if name in expected else "none"
        if shape != expected_shape:
            raise ValueError(
                f"{directory}: {name} has shape {shape}, config.json asks for {expected_shape}"
            )
        array = weights[name]
        is_floating = mx.issubdtype(array.dtype, mx.floating)
        if is_floating != mx.issubdtype(expected[name].dtype, mx.floating):
            raise ValueError(
                f"{directory}: {name} is {array.dtype}; only floating-point weights are supported"
            )
        is_packed = array.dtype == mx.uint32
        if not is_packed and not name.endswith(config.family.kept):
            weights[name] = array.astype(dtype)


def arrange_for_matmul(name: str, weight: mx.array) -> mx.array:
    """
    The same weight, in the memory order that its matmul reads fastest.

    On a CPU a projection (out, in) is stored column by column. OpenBLAS repacks a weight before it
    multiplies; for x @ W.T with a few rows, that is a fifth slower from rows than from columns.
    """
    is_packed = weight.dtype == mx.uint32
    if gpu.on_gpu() or is_packed or not name.endswith("proj.weight"):
        return weight
    return mx.contiguous(weight.T).T


def drop_tied_head(directory: Path, weights: dict[str, mx.array]) -> None:
    """
    Removes the head's tensors from the weights of a model whose head is its embedding.

    Raises ValueError if the head differs from the embedding: other programs could use either of
    them, while training would use only one.
    """
    for name in sorted(name for name in weights if name.startswith("lm_head.")):
        head = weights.pop(name)
        embedding_name = name.replace("lm_head.", "model.embed_tokens.")
        embedding = weights.get(embedding_name)
        is_equal = (
            embedding is not None
            and head.shape == embedding.shape
            and mx.array_equal(head, embedding, equal_nan=True)
        )
        if not is_equal:
            raise ValueError(
                f"{directory}: {name} differs from {embedding_name}, and tie_word_embeddings is "
                "true or the default; set tie_word_embeddings to false in config.json to use it, "
                "or remove the tensor"
            )


def install_packed(model: Model, packings: dict[str, dict[str, Any]]) -> None:
    """
    Replaces projections by packed ones, and removes their parts from `packings`.

    Only projections whose parts are all packed alike are replaced. The embedding and the head stay
    16 bits wide, because scores and a teacher's probabilities are computed from tiles of the head.
    """
    chosen = {}
    for name, module in model.named_modules():
        if not isinstance(module, nn.Linear) or name == "lm_head":
            continue
        parts = list(hub.unfuse_weights({name: module.weight}, model.config))
        part_packings = [packings.get(part) for part in parts]
        first = part_packings[0]
        if not first or first["mode"] != "affine" or part_packings.count(first) < len(parts):
            continue
        chosen[name] = first
        for part in parts:
            del packings[part]
    nn.quantize(model, class_predicate=lambda name, _: chosen.get(name, False))


def random_model(name: str, dtype: mx.Dtype | None = None) -> Model:
    """A `random:` model, with seeded weights and no end token, for benchmarks and tests."""
    model = Model(model_choice.load_known_config(name))
    dtype = dtype or default_dtype()
    weights = tree_flatten(model.parameters())
    keys = mx.random.split(mx.random.key(0), len(weights))
    for (path, array), key in zip(sorted(weights), keys, strict=True):
        if array.ndim > 1:  # norm weights stay at 1
            array = mx.random.normal(array.shape, dtype, scale=0.02, key=key)
        if not path.endswith(model.config.family.kept):
            array = array.astype(dtype)
        model.load_weights([(path, arrange_for_matmul(path, array))], strict=False)
        mx.eval(model.parameters())  # wait: one tensor at a time, so that no second copy is held
    memory.limit_mlx_cache()
    check_kernels(model)
    return model


def save(model: Model, directory: str | Path, tokenizer: Any) -> None:
    """
    Writes the model with un-fused projections, its configuration and its tokenizer.

    mlx_lm and transformers can load the new directory.
    """
    directory = Path(directory)
    config = model.config
    directory.mkdir(parents=True, exist_ok=True)
    parts = hub.unfuse_weights(dict(tree_flatten(model.parameters())), config)
    weights = hub.to_hub_names(parts, config.family)
    mx.save_safetensors(str(directory / "model.safetensors"), weights, metadata={"format": "pt"})
    raw = hub.make_config_json(config, model.head_weight.dtype)
    (directory / "config.json").write_text(json.dumps(raw, indent=2) + "\n")
    generation = {"eos_token_id": raw["eos_token_id"], "do_sample": True, "temperature": 1.0}
    (directory / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    tokenizer.save_pretrained(str(directory))


# ---- checks of MLX and of the kernels at a model's sizes


def check_kernels(model: Model) -> None:
    """
    Checks MLX's arithmetic and the kernels at this model's sizes.

    Prints a line if MLX's arithmetic is wrong. Names wrong kernels and turns them off.
    """
    if not gpu.has_metal():
        return
    line, is_right = check_mlx(model)
    if not is_right:
        print(
            f"gwen: MLX's own arithmetic is {line}; see mlx #3585, #3586, #3797 and #4411, "
            "or use another version of MLX",
            file=sys.stderr,
        )
    if kernels.kernels_are_wanted():
        kernels.check_calls(rehearse_kernels(model))


def first_layers(model: Model) -> dict[str, Block]:
    """The first layer of each kind."""
    kinds = model.config.layer_kinds
    return {kind: model.layers[kinds.index(kind)] for kind in kinds}


def check_mlx(model: Model) -> tuple[str, bool]:
    """
    Checks MLX's own arithmetic at the sizes of a model's weights.

    Returns a line for the user, and whether the arithmetic is right.
    """
    matrices = []
    for layer in first_layers(model).values():
        for _, array in tree_flatten(layer.parameters()):
            is_packed = array.dtype == mx.uint32
            if array.ndim == 2 and not is_packed:
                matrices.append(array)
    config = model.config
    heads = (config.num_attention_heads, config.num_key_value_heads, config.head_dim)
    return probe.check_arithmetic([*matrices, model.head_weight], heads)


def rehearse_kernels(model: Model) -> list[kernels.Call]:
    """
    Calls every kernel that the model uses in a prefill and a decode step, on a few tokens.

    Returns the recorded calls.
    """
    all_layers = model.layers
    layer_of_kind = first_layers(model)
    model.layers = list(layer_of_kind.values())
    try:
        with kernels.record_calls() as calls:
            rehearse_passes(model, list(layer_of_kind))
            rehearse_sampling(model)
    finally:
        model.layers = all_layers
    return calls


def rehearsal_tokens(model: Model) -> mx.array:
    """Two rows of ids, (2, L)."""
    length = 9 if model.config.delta else 3  # a gated delta net has another kernel beyond 8 tokens
    ascending = mx.arange(length)
    return mx.stack([ascending, ascending[::-1]]) % model.config.vocab_size


def rehearse_passes(model: Model, kinds: list[str]) -> None:
    """Runs prefills and decode steps with padded and equal prompts, shared and copied caches."""
    ids = rehearsal_tokens(model)
    layouts = ((True, [0, 0, 1, 1]), (True, [0, 0, 0, 1]), (False, [0, 0, 1, 1]))
    for padding in (mx.array([1, 0]), None):
        prompts = KVCache(kinds, ids.shape[1], padding)
        model.hidden(ids, prompts)
        for share_prefix, prompt_of in layouts:
            slots = SlotCache(prompts, 4, 4, share_prefix)
            for new_slots in (None, [2, 3]):  # [2, 3] gives slots different lengths
                slots.assign(prompt_of, new_slots)
                slots.plan_writes()
                model.hidden(mx.array([[1]] * 4), slots)


def rehearse_sampling(model: Model) -> None:
    """Samples tokens, and computes the gradient of attention."""
    ids = rehearsal_tokens(model)
    logits = model.hidden(ids)[:, -1] @ model.head_weight.T
    uniforms = mx.full((2, 4), 0.5)
    softmax.row_logprobs(logits, ids[:, 0])
    softmax.sample_token(logits, uniforms, 0.7)
    support = softmax.Support(top_p=0.9)
    truncated = softmax.truncate_logits(logits.astype(mx.float32), support)
    softmax.sample_token(truncated, uniforms)

    heads = mx.ones((1, 2, 3, 64), model.head_weight.dtype)
    for mask in ("causal", mx.tri(3, dtype=mx.bool_)[None, None]):
        attention.attention_vjp(heads, heads, heads, heads, mask)


if __name__ == "__main__":
    # The doctor imports this module, so doctor.py is run here and not imported.
    runpy.run_path(str(Path(__file__).with_name("doctor.py")), run_name="__main__")
