"""
Dense language models on MLX: the layers of a model, and functions that load and save a model.

disk/hub.py lists the supported families of models. The query, key and value projections are a
single matmul (`qkv_proj`), and so are the gate and up projections (`gate_up_proj`). The computation
between the matmuls is in layers/. `save` writes a model in the Hugging Face layout. Low-bit weights
are unpacked when a model is loaded, but the weights of a frozen model may stay packed.

Mixtures of experts and sliding windows are not supported. If a checkpoint needs an unsupported
feature, loading it raises an error that names the feature. disk/model_choice.py chooses the model
of a command, and doctor.py checks the installation.

Axes: N rows, L positions, C hidden width, H query heads, K key and value heads, D head width,
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
from kv_cache import CAUSAL, AttentionMasks, Cache, GatedDeltaState, KVCache, SlotCache
from layers import attention, delta, ops, probe, softmax
from layers.tree_cache import TreeLayer
from machine import alive, cpu, gpu, kernels, memory

DTYPES = {"float16": mx.float16, "bfloat16": mx.bfloat16, "float32": mx.float32}


def dtype_from_env_or_device() -> mx.Dtype:
    """
    The dtype that the environment variable `GWEN_DTYPE` names.

    If the variable is not set, the dtype is float16 on a GPU and float32 on a CPU, because a CPU
    has no 16-bit BLAS.

    Raises ValueError if the variable names no dtype in `DTYPES`.
    """
    usual = "float16" if gpu.on_gpu() else "float32"
    name = os.environ.get("GWEN_DTYPE", usual)
    if name not in DTYPES:
        raise ValueError(f"GWEN_DTYPE={name!r} is not one of {', '.join(DTYPES)}")
    return DTYPES[name]


# ---- the model


class RMSNorm(nn.Module):
    """Computes x / rms(x) * (offset + weight)."""

    def __init__(self, size: int, eps: float, offset: float = 0.0):
        super().__init__()
        self.weight = mx.full((size,), 1 - offset)
        self.eps = eps
        self.offset = offset
        # the weight and the scale computed from it, or () before the first computation
        self._scale: tuple[mx.array, ...] = ()

    @property
    def scale(self) -> mx.array:
        """The sum offset + weight, which is recomputed only if the weight has changed."""
        if not self.offset:
            return self.weight
        if not self._scale or self._scale[0] is not self.weight:
            scale = (self.weight.astype(mx.float32) + self.offset).astype(self.weight.dtype)
            self._scale = (self.weight, scale)
        return self._scale[1]

    def __call__(self, x: mx.array) -> mx.array:
        return ops.rms_norm(x, self.scale, self.eps)

    def add_and_normalize(self, x: mx.array, delta: mx.array | None) -> tuple[mx.array, mx.array]:
        """Returns the sum x + delta, and the normalized sum. A delta of None stands for 0."""
        if delta is None:
            return x, self(x)
        return ops.add_norm(x, delta, self.scale, self.eps)


class LayerContext(NamedTuple):
    """The inputs of a layer in a forward pass, other than the hidden states."""

    rotation: ops.Rotation  # encodes the positions of the tokens
    masks: AttentionMasks  # which earlier tokens each token attends to
    state: Any  # the layer's cache of earlier tokens; None if there is no cache


# queries, keys, values and gates; see `AttentionProjections.project_and_rotate`
Projections = tuple[mx.array, mx.array, mx.array, mx.array | None]


class AttentionProjections(nn.Module):
    """The projections of softmax attention. The attention itself is in layers/attention.py."""

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

    def project_and_rotate(self, x: mx.array, rotation: ops.Rotation) -> Projections:
        """
        The queries (N, H, L, D), the keys and values (N, K, L, D), and the output gates.

        The gates are (N, L, H, D), before the sigmoid, or None if the model has no output gates.
        """
        # (N, L, H + 2K, D), or with gates (N, L, 2H + 2K, D)
        qkv = self.qkv_proj(x).reshape(*x.shape[:2], -1, self.head_dim)
        gates = None
        if self.has_gates:  # in each head, the gate follows the query
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

    def gate_and_project_output(self, attended: mx.array, gates: mx.array | None) -> mx.array:
        """Applies the gates and the output projection, (N, H, L, D) -> (N, L, C)."""
        attended = attended.transpose(0, 2, 1, 3)
        if gates is not None:
            attended = attended * mx.sigmoid(gates)
        return self.o_proj(attended.reshape(*attended.shape[:2], -1))


class GatedDeltaNet(nn.Module):
    """
    Linear attention, which layers/delta.py explains.

    The layer keeps a memory of fixed size instead of keys and values.
    """

    def __init__(self, config: hub.ModelConfig):
        super().__init__()
        assert config.delta is not None
        self.sizes = config.delta
        num_heads = config.delta.num_value_heads
        # the widths of the four outputs of in_proj: convolved channels, gates, beta and decay
        widths = hub.count_part_rows(config, "linear_attn.in_proj")
        self.split_points = [sum(widths[: i + 1]) for i in range(3)]
        self.in_proj = nn.Linear(config.hidden_size, sum(widths), bias=False)
        self.conv1d = nn.Module()  # a causal convolution of each channel
        self.conv1d.weight = mx.zeros((widths[0], 1, self.sizes.window))
        self.A_log = mx.zeros((num_heads,))
        self.dt_bias = mx.ones((num_heads,))
        self.norm = RMSNorm(self.sizes.value_dim, config.rms_norm_eps)
        self.out_proj = nn.Linear(widths[1], config.hidden_size, bias=False)

    def __call__(self, x: mx.array, context: LayerContext) -> mx.array:
        num_rows, length, _ = x.shape
        sizes = self.sizes
        spans = context.masks.spans

        channels, gates, beta, decay = mx.split(self.in_proj(x), self.split_points, axis=-1)
        beta = mx.sigmoid(beta.astype(mx.float32))
        decay_rate = -mx.exp(self.A_log.astype(mx.float32))
        log_decay = decay_rate * nn.softplus(decay.astype(mx.float32) + self.dt_bias)
        if spans is not None:  # padding must not change the memory or the inputs of the convolution
            column = mx.arange(length)
            is_token = (column >= spans[0][:, None]) & (column < spans[1][:, None])
            is_token = is_token[..., None]
            channels = mx.where(is_token, channels, 0)
            beta = mx.where(is_token, beta, 0)
            log_decay = mx.where(is_token, log_decay, 0)

        past = None if context.state is None else context.state.state_before_next_tokens
        earlier_channels, memory = past or sizes.empty_state(num_rows, x.dtype)
        window = mx.concatenate([earlier_channels, channels], axis=1)  # (N, W - 1 + L, channels)
        mixed = delta.convolve_with_silu(window, self.conv1d.weight).astype(mx.float32)
        key_width = sizes.query_key_value_widths[0]
        queries, keys, values = mx.split(mixed, [key_width, 2 * key_width], axis=-1)
        queries = delta.normalize_to_length_1(queries.reshape(num_rows, length, -1, sizes.key_dim))
        keys = delta.normalize_to_length_1(keys.reshape(num_rows, length, -1, sizes.key_dim))
        values = values.reshape(num_rows, length, -1, sizes.value_dim)
        queries = queries * sizes.key_dim**-0.5
        out, memory = delta.gated_delta(queries, keys, values, log_decay, beta, memory)

        if context.state is not None:
            row_ends = spans and spans[1]
            inputs = delta.next_convolution_inputs(window, sizes.window - 1, row_ends)
            context.state.update(inputs, memory)
        normed = self.norm(out).reshape(num_rows, length, -1)
        gated = normed * ops.silu(gates.astype(mx.float32))
        return self.out_proj(gated.astype(x.dtype))


class MLP(nn.Module):
    """Computes down(silu(gate(x)) * up(x))."""

    def __init__(self, config: hub.ModelConfig):
        super().__init__()
        self.gate_up_proj = nn.Linear(config.hidden_size, 2 * config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def __call__(self, x: mx.array) -> mx.array:
        return self.down_proj(ops.swiglu(self.gate_up_proj(x)))


class Block(nn.Module):
    """
    One layer of the model: attention or a gated delta net, followed by an MLP.

    The residual stream is passed on as two arrays, `x` and `delta`. `delta` is the output of the
    last sublayer, which has not been added to `x` yet. The next norm adds `delta` to `x`, and
    normalizes the sum in the same kernel.
    """

    def __init__(self, config: hub.ModelConfig, kind: str):
        super().__init__()
        self.is_linear = kind == "linear_attention"
        if self.is_linear:
            self.linear_attn = GatedDeltaNet(config)
        else:
            self.self_attn = AttentionProjections(config, kind)
        self.mlp = MLP(config)
        norm_offset = config.family.norm_offset
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, norm_offset)
        self.post_attention_layernorm = RMSNorm(
            config.hidden_size, config.rms_norm_eps, norm_offset
        )

    def __call__(
        self, x: mx.array, delta: mx.array | None, context: LayerContext
    ) -> tuple[mx.array, mx.array]:
        """Returns `x` and `delta` after this layer, given `x` and `delta` before this layer."""
        if self.is_linear:
            x, normed = self.input_layernorm.add_and_normalize(x, delta)
            return self.add_and_run_mlp(x, self.linear_attn(normed, context))

        x, (queries, keys, values, gates) = self.run_up_to_attention(x, delta, context.rotation)
        parts = [(keys, values)]
        if context.state is not None:
            parts = context.state.update(keys, values)
        attended = attention.attend_to_parts(queries, parts, context.masks)
        return self.run_after_attention(x, attended, gates)

    def run_up_to_attention(
        self, x: mx.array, delta: mx.array | None, rotation: ops.Rotation
    ) -> tuple[mx.array, Projections]:
        """Runs the layer up to attention. Returns the residual stream and the attention inputs."""
        x, normed = self.input_layernorm.add_and_normalize(x, delta)
        return x, self.self_attn.project_and_rotate(normed, rotation)

    def run_after_attention(
        self, x: mx.array, attended: mx.array, gates: mx.array | None = None
    ) -> tuple[mx.array, mx.array]:
        """Runs the rest of the layer, given the output of attention. Returns `x` and `delta`."""
        return self.add_and_run_mlp(x, self.self_attn.gate_and_project_output(attended, gates))

    def add_and_run_mlp(self, x: mx.array, delta: mx.array) -> tuple[mx.array, mx.array]:
        """Adds the output of the first sublayer to `x`. Returns the sum and the MLP's output."""
        x, normed = self.post_attention_layernorm.add_and_normalize(x, delta)
        return x, self.mlp(normed)


def run_layer_with_gradient_checkpoint(
    layer: Block, x: mx.array, delta: mx.array | None, context: LayerContext
) -> tuple[mx.array, None]:
    """
    Runs a layer without keeping its activations in memory. Returns (x + delta, None).

    The backward pass computes the layer again. MLX frees the outputs of a gradient checkpoint
    only when it frees the checkpoint's inputs. So the layer has a single output: the residual
    stream with the last delta added to it. This sum is the only input of the next layer.

    A gradient checkpoint differentiates only with respect to its arguments. So the layer's weights
    are passed as an argument; a checkpoint of the module itself would drop their gradients. The
    states of earlier levels of the prompt tree are arguments too, because gradients flow through
    them to the shared prompt. Integers and masks need no gradient, so the closure captures them.
    """
    state = context.state
    is_replaced = isinstance(state, TreeLayer | GatedDeltaState | None)
    assert is_replaced, "a layer that writes to its cache in place cannot be computed again"

    def run_layer_and_return_new_cache_parts(
        weights: Any, x: mx.array, earlier_parts: Any
    ) -> tuple[mx.array, Any]:
        """Runs the layer with these weights. Returns x + delta and the parts added to the cache."""
        layer_weights = layer.trainable_parameters()
        layer.update(weights)
        level = None if state is None else type(state)(list(earlier_parts))
        x, out = layer(x, None, context._replace(state=level))
        layer.update(layer_weights)
        if level is None:
            return x + out, []
        # copies, because a view would keep the whole array of queries, keys and values in memory
        newest_parts = [tuple(map(mx.contiguous, part)) for part in level.parts[-1:]]
        return x + out, newest_parts

    earlier_parts = [] if state is None else list(state.parts)
    stream = x if delta is None else x + delta
    x, newest_parts = mx.checkpoint(run_layer_and_return_new_cache_parts)(
        layer.trainable_parameters(), stream, earlier_parts
    )
    for part in newest_parts:
        context.state.update(*part)
    return x, None


class Model(nn.Module):
    """
    A dense language model.

    `model(tokens, cache)` returns the logits (N, L, V), which are the product of the final hidden
    states and the output weights.
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
        self.first_trained_layer = 0  # the layers below this index are frozen

    @property
    def head_weight(self) -> mx.array:
        """The output weights (V, C), which are the embedding if the model ties the two."""
        return self.embed_tokens.weight if self.config.tie_word_embeddings else self.lm_head.weight

    def hidden(
        self, tokens: mx.array, cache: Cache | None = None, checkpoint_layers: int = 0
    ) -> mx.array:
        """
        The normalized final hidden states, (N, L) int32 -> (N, L, C).

        If there is no cache, padding must be on the right.
        checkpoint_layers: the number of layers, counted from the first trained layer, whose
        activations are not kept in memory, but computed again in the backward pass.
        """
        num_rows, length = tokens.shape
        x = self.embed_tokens(tokens)
        if cache is None:
            offsets = mx.zeros((num_rows,), dtype=mx.int32)
            masks = CAUSAL
        else:
            offsets = cache.next_positions(num_rows)
            masks = cache.attention_masks(length)
        rotation = self._rope.make_rotation(offsets, length)

        delta = None
        for index, layer in enumerate(self.layers):
            state = None if cache is None else cache.layers[index]
            context = LayerContext(rotation, masks, state)
            if 0 <= index - self.first_trained_layer < checkpoint_layers:
                x, delta = run_layer_with_gradient_checkpoint(layer, x, delta, context)
            else:
                x, delta = layer(x, delta, context)
        if cache is not None:
            cache.advance(length)
        return self.norm.add_and_normalize(x, delta)[1]

    def __call__(self, tokens: mx.array, cache: Cache | None = None) -> mx.array:
        """The logits of the next token at every position, (N, L) int32 -> (N, L, V)."""
        return self.hidden(tokens, cache) @ self.head_weight.T


# ---- decoding one token per row


DecodeToHiddenStep = Callable[[mx.array, Cache], mx.array]
LEAST_COMPILED = 512  # on a CPU, only models with at least this hidden size are compiled


class CompiledSegment(NamedTuple):
    """A compiled function that computes everything between the attentions of two layers."""

    linear_layers: list[int]  # the indices of the gated delta nets between the two layers
    run: Callable[..., Any]


def compile_between_attentions(model: Model, before: int, after: int) -> CompiledSegment:
    """
    Compiles the computation between the attentions of two layers.

    before: the index of the first layer; -1 if the computation begins with the embedding.
    after: the index of the second layer; the number of layers if the computation ends with the
    final hidden states.
    """
    layers = model.layers
    rope = model._rope
    linear_layers = list(range(before + 1, after))

    def run_to_next_attention_or_end(
        x: mx.array, attended: list[mx.array], rotation_arrays: list[mx.array], states: list[Any]
    ) -> Any:
        """
        Returns a result and the new states of the gated delta nets.

        The result consists of the residual stream and the inputs of the next attention. If there is
        no next attention, the result is the final hidden states.

        attended: the output of the last attention, and the gates if there are any.
        """
        rotation = ops.Rotation(rope, *rotation_arrays)
        delta = None
        if before >= 0:
            x, delta = layers[before].run_after_attention(x, *attended)
        nets = [GatedDeltaState([state]) for state in states]
        for index, net in zip(linear_layers, nets, strict=True):
            x, delta = layers[index](x, delta, LayerContext(rotation, CAUSAL, net))
        if after == len(layers):
            hidden = model.norm.add_and_normalize(x, delta)[1]
            return hidden, [net.state_before_next_tokens for net in nets]
        x, projections = layers[after].run_up_to_attention(x, delta, rotation)
        arrays = [array for array in projections if array is not None]
        return (x, arrays), [net.state_before_next_tokens for net in nets]

    return CompiledSegment(linear_layers, mx.compile(run_to_next_attention_or_end))


def make_decode_to_hidden_step(model: Model) -> DecodeToHiddenStep:
    """
    Makes a faster version of `model.hidden` for one token per row.

    The returned function uses the weights that the model has now. The computation between
    attentions is compiled, so that Python needs only a quarter of the time to build the graph of a
    step. A compiled function is traced once for each number of rows. Attention and its caches
    change their shape in every step, so they are not compiled. The states of gated delta nets keep
    their shape, so their updates are compiled.

    On a CPU, g++ needs ten seconds to compile the loops of a model. This is not worthwhile for a
    small model, such as those in tests, so `model.hidden` itself is returned.
    """
    is_small = model.config.hidden_size < LEAST_COMPILED
    if not gpu.on_gpu() and (is_small or not cpu.try_to_compile_loops()):
        return model.hidden
    layers = model.layers
    rope = model._rope
    attention_layers = [index for index, layer in enumerate(layers) if not layer.is_linear]
    boundaries = [-1, *attention_layers, len(layers)]
    segments = [
        compile_between_attentions(model, before, after)
        for before, after in itertools.pairwise(boundaries)
    ]

    def decode_one_token_to_hidden(tokens: mx.array, cache: Cache) -> mx.array:
        """The final hidden states of one token per row, (N, 1) -> (N, 1, C)."""
        _, *optional_arrays = rope.make_rotation(cache.next_positions(len(tokens)), 1)
        rotation_arrays = [array for array in optional_arrays if array is not None]
        masks = cache.attention_masks(1)
        x = model.embed_tokens(tokens)
        attended: list[mx.array] = []
        for segment, layer in zip(segments, boundaries[1:], strict=True):
            states = [
                cache.layers[index].state_before_next_tokens for index in segment.linear_layers
            ]
            result, new_states = segment.run(x, attended, rotation_arrays, states)
            for index, state in zip(segment.linear_layers, new_states, strict=True):
                cache.layers[index].update(*state)
            if layer == len(layers):
                break
            x, (queries, keys, values, *gates) = result
            parts = cache.layers[layer].update(keys, values)
            attended = [attention.attend_to_parts(queries, parts, masks), *gates]
        cache.advance(1)
        return result

    compiled_sizes: set[int] = set()  # the numbers of rows for which the loops are compiled

    def decode_to_hidden_with_build_lock(tokens: mx.array, cache: Cache) -> mx.array:
        """Like `decode_one_token_to_hidden`, but on a CPU, only one process at a time compiles."""
        if gpu.on_gpu() or len(tokens) in compiled_sizes:
            return decode_one_token_to_hidden(tokens, cache)
        with cpu.hold_build_lock():
            hidden = decode_one_token_to_hidden(tokens, cache)
            mx.eval(hidden)
        compiled_sizes.add(len(tokens))
        return hidden

    return decode_to_hidden_with_build_lock


# ---- loading and saving


def load(
    path_or_id: str | Path,
    dtype: mx.Dtype | None = None,
    adapter: str | Path | None = None,
    frozen: bool = False,
    end_tokens: Sequence[str] = (),
) -> tuple[Model, Any]:
    """
    Loads a model and its tokenizer.

    path_or_id: `demo`, a Hugging Face directory or a hub id. For a name that begins with `random:`,
        the model has random weights and the demo model's tokenizer.
    dtype: the dtype of the weights; None means `dtype_from_env_or_device()`.
    adapter: a run, a checkpoint or a directory in mlx_lm's layout, whose adapter is merged into the
        weights.
    frozen: whether the model is never trained, like a judge or a teacher. On a GPU, the low-bit
        weights of a frozen model stay packed. On a CPU they are unpacked, because a CPU multiplies
        by packed weights 4 to 40 times more slowly.
    end_tokens: additional tokens that end a completion (see `disk.ends`).

    Raises ValueError, with the reason, if the model cannot be loaded.
    """
    if str(path_or_id).startswith("random:"):
        if adapter is not None:
            raise ValueError(
                f"--adapter {adapter} was not trained on {path_or_id}; use the model on which the "
                "adapter was trained"
            )
        model = make_random_model(str(path_or_id), dtype)
        tokenizer = hub.load_tokenizer(hub.DEMO)
        other_end_ids = tuple(ends.find_ids_of_given_end_tokens(tokenizer, end_tokens))
        model.config = dataclasses.replace(model.config, other_end_ids=other_end_ids)
        return model, tokenizer

    if adapter is not None:
        model_choice.warn_of_different_base(adapter, path_or_id)
    with alive.show_activity(f"loading {path_or_id}"):
        directory = hub.find_model_directory(path_or_id)
        model = load_model(directory, dtype, adapter, packed=frozen and gpu.on_gpu())
        tokenizer = hub.load_tokenizer(directory)
    largest_id = max(tokenizer.get_vocab().values(), default=0)
    vocab_size = model.config.vocab_size
    if largest_id >= vocab_size:
        raise ValueError(
            f"{directory}: the tokenizer has a token with the id {largest_id}, but the model has "
            f"only {vocab_size} ids"
        )
    model.config = model_choice.add_and_print_missing_end_tokens(
        model.config, tokenizer, path_or_id, end_tokens
    )
    return model, tokenizer


def load_model(
    directory: str | Path,
    dtype: mx.Dtype | None = None,
    adapter: str | Path | None = None,
    packed: bool = False,
    lazy: bool = False,
) -> Model:
    """
    Loads the model in a Hugging Face directory.

    dtype: the dtype of the weights; None means `dtype_from_env_or_device()`.
    packed: whether low-bit weights in the layers stay packed. A model with packed weights cannot
    have an adapter or a gradient.
    lazy: whether weights stay on disk until something is computed with them.

    Raises ValueError, with the reason, if the model cannot be loaded.
    """
    directory = Path(directory)
    dtype = dtype or dtype_from_env_or_device()
    config = hub.load_config(directory)
    stored_weights = hub.load_weights_by_hub_name(directory, dtype_from_env_or_device())
    weights, num_skipped = hub.standardize_stored_weights(stored_weights, config.family)
    del stored_weights  # otherwise matrices would stay in memory after their removal from `weights`
    if num_skipped:
        print(
            f"gwen: {directory}: ignored {num_skipped} tensors that are not part of the language "
            "model",
            file=sys.stderr,
        )
    if config.tie_word_embeddings:
        check_and_drop_tied_head(directory, weights)

    # MLX is lazy, so the random weights of a new model are replaced before they are computed
    model = Model(config)
    packings = hub.find_quantized_modules(weights, config)
    if packed:
        install_packed_projections(model, packings)
    hub.dequantize_in_place(weights, packings)
    check_and_convert_weights(directory, weights, model, dtype)
    if adapter is not None:
        weights = adapters.merge_adapter_into_weights(weights, adapter, config.family)
    weights = hub.fuse_weights(weights)  # reuses the variable, so that the unfused parts are freed
    names = list(weights)
    model.load_weights([(name, arrange_for_matmul(name, weights.pop(name))) for name in names])

    if not lazy:
        memory.set_cache_and_wired_limits()
        # evaluating all weights at once would need 1.5 times the memory of the model
        for part in (*model.layers, model):
            mx.eval(part.parameters())
        check_mlx_and_disable_faulty_kernels(model)
    return model


def check_and_convert_weights(
    directory: Path, weights: dict[str, mx.array], model: Model, dtype: mx.Dtype
) -> None:
    """
    Checks the weights, and converts them in place to the dtypes with which the model computes.

    weights: all weights, by their Hugging Face names.

    Raises ValueError if the names, shapes or types of the weights do not match the model.
    """
    config = model.config
    expected = hub.unfuse_weights(dict(tree_flatten(model.parameters())), config)
    for name in sorted(expected.keys() | weights.keys()):
        if name not in weights:
            raise ValueError(
                f"{directory}: {name} is missing; config.json asks for a weight of this name with "
                f"the shape {expected[name].shape}"
            )
        array = weights[name]
        if name not in expected:
            raise ValueError(
                f"{directory}: {name} has the shape {array.shape}, but the model that config.json "
                "describes has no weight of this name"
            )
        if array.shape != expected[name].shape:
            raise ValueError(
                f"{directory}: {name} has the shape {array.shape}, but config.json asks for "
                f"{expected[name].shape}"
            )
        is_floating = mx.issubdtype(array.dtype, mx.floating)
        if is_floating != mx.issubdtype(expected[name].dtype, mx.floating):
            raise ValueError(
                f"{directory}: {name} has the dtype {array.dtype}, but only floating-point "
                "weights are supported"
            )
        is_packed = array.dtype == mx.uint32
        if not is_packed and not name.endswith(config.family.kept):
            weights[name] = array.astype(dtype)


def arrange_for_matmul(name: str, weight: mx.array) -> mx.array:
    """
    The same weight, in the memory layout with which its matmul is fastest.

    On a CPU, the weight (out, in) of a projection is stored column by column. OpenBLAS repacks a
    weight before multiplying. If the weight W were stored row by row, this would make x @ W.T a
    fifth slower for an x with few rows.
    """
    is_packed = weight.dtype == mx.uint32
    if gpu.on_gpu() or is_packed or not name.endswith("proj.weight"):
        return weight
    return mx.contiguous(weight.T).T


def check_and_drop_tied_head(directory: Path, weights: dict[str, mx.array]) -> None:
    """
    Removes the head from the weights of a model that uses its embedding as the head.

    Raises ValueError if the head differs from the embedding. In that case, another program might
    use the head, but training would use the embedding.
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
                f"{directory}: {name} differs from {embedding_name}, although tie_word_embeddings "
                "is true or not set; to use this tensor, set tie_word_embeddings to false in "
                "config.json; otherwise remove the tensor"
            )


def install_packed_projections(model: Model, packings: dict[str, dict[str, Any]]) -> None:
    """
    Replaces projections of the model with packed ones, and removes their parts from `packings`.

    A projection is replaced only if all its parts are packed in the same way. The embedding and the
    head are not packed, because a judge's scores and a teacher's probabilities are computed from
    tiles of the head.

    packings: how each packed weight of the checkpoint is packed, by the name of its module.
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


def make_random_model(name: str, dtype: mx.Dtype | None = None) -> Model:
    """
    Makes a model with random weights and no end token, for benchmarks and tests.

    The random seed is fixed.

    name: the shape of the model, such as "random:2m".
    """
    model = Model(model_choice.load_known_config(name))
    dtype = dtype or dtype_from_env_or_device()
    weights = tree_flatten(model.parameters())
    keys = mx.random.split(mx.random.key(0), len(weights))
    for (path, array), key in zip(sorted(weights), keys, strict=True):
        if array.ndim > 1:  # the weights of norms stay at 1
            array = mx.random.normal(array.shape, dtype, scale=0.02, key=key)
        if not path.endswith(model.config.family.kept):
            array = array.astype(dtype)
        model.load_weights([(path, arrange_for_matmul(path, array))], strict=False)
        mx.eval(model.parameters())  # one tensor at a time, so that memory never holds two copies
    memory.set_cache_and_wired_limits()
    check_mlx_and_disable_faulty_kernels(model)
    return model


def save(model: Model, directory: str | Path, tokenizer: Any) -> None:
    """
    Writes the weights of a model, its configuration and its tokenizer in the Hugging Face layout.

    Fused projections are split into their parts. mlx_lm and transformers can load the directory.
    """
    directory = Path(directory)
    config = model.config
    directory.mkdir(parents=True, exist_ok=True)
    parts = hub.unfuse_weights(dict(tree_flatten(model.parameters())), config)
    weights = hub.rename_to_hugging_face(parts, config.family)
    mx.save_safetensors(str(directory / "model.safetensors"), weights, metadata={"format": "pt"})
    raw = hub.make_config_json(config, model.head_weight.dtype)
    (directory / "config.json").write_text(json.dumps(raw, indent=2) + "\n")
    generation = {"eos_token_id": raw["eos_token_id"], "do_sample": True, "temperature": 1.0}
    (directory / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    tokenizer.save_pretrained(str(directory))


# ---- checking MLX and the kernels with the sizes of a model


def check_mlx_and_disable_faulty_kernels(model: Model) -> None:
    """
    Checks the arithmetic of MLX and of the GPU kernels with the sizes of this model.

    Prints a warning if the arithmetic of MLX is wrong. Turns off each kernel whose results are
    wrong, and prints the kernel's name. Does nothing without a Metal GPU.
    """
    if not gpu.can_run_metal_kernels():
        return
    line, is_right = check_mlx_arithmetic(model)
    if not is_right:
        print(
            f"gwen: the arithmetic of MLX itself is {line}; see the MLX issues #3585, #3586, #3797 "
            "and #4411, or use another version of MLX",
            file=sys.stderr,
        )
    if kernels.is_kernels_variable_on():
        kernels.turn_off_faulty_kernels(record_kernel_calls_in_rehearsal(model))


def first_layer_of_each_kind(model: Model) -> dict[str, Block]:
    """The model's first layer of each kind, by the name of the kind."""
    kinds = model.config.layer_kinds
    return {kind: model.layers[kinds.index(kind)] for kind in kinds}


def check_mlx_arithmetic(model: Model) -> probe.ArithmeticReport:
    """Checks the arithmetic of MLX itself with the sizes of a model's weights."""
    matrices = []
    for layer in first_layer_of_each_kind(model).values():
        for _, array in tree_flatten(layer.parameters()):
            is_packed = array.dtype == mx.uint32
            if array.ndim == 2 and not is_packed:
                matrices.append(array)
    config = model.config
    heads = (config.num_attention_heads, config.num_key_value_heads, config.head_dim)
    return probe.check_mlx_arithmetic([*matrices, model.head_weight], heads)


def record_kernel_calls_in_rehearsal(model: Model) -> list[kernels.Call]:
    """
    Runs the model on a few tokens, so that every kernel that it uses is called.

    Returns the recorded calls of kernels.
    """
    all_layers = model.layers
    layer_of_kind = first_layer_of_each_kind(model)
    model.layers = list(layer_of_kind.values())
    try:
        with kernels.record_calls_without_kernels() as calls:
            rehearse_prefill_and_decoding(model, list(layer_of_kind))
            rehearse_sampling_and_attention_gradient(model)
    finally:
        model.layers = all_layers
    return calls


def rehearsal_tokens(model: Model) -> mx.array:
    """Two rows of token ids for a rehearsal, (2, L)."""
    # a gated delta net uses another kernel for more than 8 tokens
    length = 9 if model.config.delta else 3
    ascending = mx.arange(length)
    return mx.stack([ascending, ascending[::-1]]) % model.config.vocab_size


def rehearse_prefill_and_decoding(model: Model, kinds: list[str]) -> None:
    """
    Runs the model on prompts and on single tokens, in all variants that use different kernels.

    The variants are prompts of equal or different lengths, whose caches are shared or copied.
    """
    ids = rehearsal_tokens(model)
    layouts = ((True, [0, 0, 1, 1]), (True, [0, 0, 0, 1]), (False, [0, 0, 1, 1]))
    for padding in (mx.array([1, 0]), None):
        prompts = KVCache(kinds, ids.shape[1], padding)
        model.hidden(ids, prompts)
        for share_prefix, prompt_of in layouts:
            slots = SlotCache(prompts, 4, 4, share_prefix)
            for new_slots in (None, [2, 3]):  # with [2, 3], the slots have different lengths
                slots.assign_prompts(prompt_of, new_slots)
                slots.plan_writes()
                model.hidden(mx.array([[1]] * 4), slots)


def rehearse_sampling_and_attention_gradient(model: Model) -> None:
    """Samples tokens with and without top-p truncation, and computes attention's gradient."""
    ids = rehearsal_tokens(model)
    logits = model.hidden(ids)[:, -1] @ model.head_weight.T
    uniforms = mx.full((2, 4), 0.5)
    softmax.row_logprobs(logits, ids[:, 0])
    softmax.sample_token(logits, uniforms, 0.7)
    support = softmax.TruncationSettings(top_p=0.9)
    truncated = softmax.truncate_logits(logits.astype(mx.float32), support)
    softmax.sample_token(truncated, uniforms)

    heads = mx.ones((1, 2, 3, 64), model.head_weight.dtype)
    for mask in ("causal", mx.tri(3, dtype=mx.bool_)[None, None]):
        attention.attention_vjp(heads, heads, heads, heads, mask)


if __name__ == "__main__":
    # doctor.py imports this module, so this module cannot import doctor.py, and runs it as a script
    runpy.run_path(str(Path(__file__).with_name("doctor.py")), run_name="__main__")
