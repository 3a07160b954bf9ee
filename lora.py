"""
Low-rank adapters on the fused projections of a frozen model.

Adapters are float32. Disabling the adapters restores the base model. A 16-bit model computes with
16-bit copies of its adapters; the matrices that are trained and saved stay float32.

A fused projection combines several projections, such as query, key and value, and has one adapter.
All parts of a fused projection share the adapter's matrix A, and each part has its own columns of
the matrix B. So the adapter is equivalent to the adapters that mlx_lm puts on the separate
projections.

disk/adapters.py reads and writes the file formats of adapters. The command export.py merges an
adapter into its model, or converts the adapter for other programs.

Axes: M rows, C input width, O output width, R rank of an adapter, r rank of one part's adapter.
"""

import contextlib
import math
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import cpu_blas  # noqa: F401  (before mlx)
import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten

import gwen
from config import TARGETS
from disk import adapters, checkpoint, hub
from layers import ops
from machine import gpu, kernels


class LoRALinear(nn.Module):
    """
    A frozen linear layer with a low-rank adapter.

    The layer computes y = x W^T + b + scale * x A B, where A is (C, R) and B is (R, O).
    """

    def __init__(self, linear: nn.Linear, rank: int, scale: float, key: mx.array):
        super().__init__()
        out_width, in_width = linear.weight.shape
        self.linear = linear
        self.scale = scale
        self.enabled = True
        bound = 1 / math.sqrt(in_width)
        self.lora_a = mx.random.uniform(-bound, bound, (in_width, rank), key=key)
        # zeros, so that training begins with the base model
        self.lora_b = mx.zeros((rank, out_width))

        # A, B and their 16-bit copies, as last computed
        self._rounded: tuple[mx.array, ...] = ()
        # A and B before training, if training began with a given adapter
        self._start: tuple[mx.array, ...] = ()

    def __call__(self, x: mx.array) -> mx.array:
        if not self.enabled:
            return self.linear(x)
        if x.dtype == mx.float32:
            return mx.addmm(self.linear(x), self.scale * (x @ self.lora_a), self.lora_b)
        rows = x.reshape(-1, x.shape[-1])
        return self._forward_in_half_precision(rows).reshape(*x.shape[:-1], -1)

    def cached_a_and_scaled_b(self, dtype: mx.Dtype) -> tuple[mx.array, mx.array]:
        """
        A and scale * B in a 16-bit type.

        The 16-bit copies are computed again only if A, B or the type has changed.
        """
        last = self._rounded
        is_current = (
            bool(last)
            and last[0] is self.lora_a
            and last[1] is self.lora_b
            and last[2].dtype == dtype
        )
        if not is_current:
            low_a = self.lora_a.astype(dtype)
            low_b = (self.scale * self.lora_b).astype(dtype)
            self._rounded = (self.lora_a, self.lora_b, low_a, low_b)
        return self._rounded[2], self._rounded[3]

    def _forward_in_half_precision(self, x: mx.array) -> mx.array:
        """
        The output of the layer and its adapter, (M, C) -> (M, O), in the 16-bit type of x.

        The output has a gradient for x, A and B, but none for the frozen layer. Products are
        rounded to 16 bits. The gradients of A and B are float32, and so are all sums. Only x and
        x A stay in memory for the backward pass. Automatic differentiation would also keep float32
        copies of x, of x A and of the gradient of the output.
        """
        low_a, low_b = self.cached_a_and_scaled_b(x.dtype)

        def output_and_x_times_a(
            x: mx.array, lora_a: mx.array, lora_b: mx.array
        ) -> tuple[mx.array, mx.array]:
            """The layer's output and the product x A, computed with 16-bit copies of A and B."""
            product = x @ low_a  # (M, R)
            return mx.addmm(self.linear(x), product, low_b), product

        def gradients_of_x_a_b(
            primals: Any, cotangents: Any, outputs: Any
        ) -> tuple[mx.array, mx.array, mx.array]:
            """The gradients with respect to x, A and B."""
            x = primals[0]
            d_y = cotangents[0]
            product = outputs[1]
            d_product = d_y @ low_b.T
            d_x = mx.addmm(d_y @ self.linear.weight, d_product, low_a.T)
            d_a = ops.transposed_product(d_product, x).T
            d_b = self.scale * ops.transposed_product(product, d_y)
            return d_x, d_a, d_b

        y: mx.array = gpu.call_with_vjp(
            output_and_x_times_a, gradients_of_x_a_b, x, self.lora_a, self.lora_b
        )[0]
        return y


def adapted_layers(model: gwen.Model) -> Iterator[tuple[str, LoRALinear]]:
    """
    The name and the layer of each projection that has an adapter.

    An example of a name is "layers.0.self_attn.qkv_proj".
    """
    for name, module in model.named_modules():
        if isinstance(module, LoRALinear):
            yield name, module


# ---- adapters inside a model


def apply(
    model: gwen.Model,
    rank: int,
    scale: float,
    targets: Sequence[str] = TARGETS,
    seed: int = 0,
    num_layers: int | None = None,
) -> None:
    """
    Freezes the model, and adds a new adapter to each target projection, in place.

    num_layers: the number of upper layers that get adapters; None means all layers. The backward
    pass ends at the lowest adapter, so the layers below it keep no activations.

    Raises ValueError if these layers have none of the target projections, or if the model has fewer
    than `num_layers` layers.
    """
    if num_layers is not None and num_layers > len(model.layers):
        raise ValueError(
            f"--lora-layers is {num_layers}, but the model has {len(model.layers)} layers; "
            f"set it to {len(model.layers)} or less"
        )
    first_layer = 0 if num_layers is None else len(model.layers) - num_layers
    model.freeze()
    linears = {}
    available = []
    for name, module in model.named_modules():
        projection = name.split(".")[-1]
        if not isinstance(module, nn.Linear) or projection not in TARGETS:
            continue
        if layer_index(name) < first_layer:
            continue
        if projection not in available:
            available.append(projection)
        if projection in targets:
            linears[name] = module
    if not linears:
        layers = "" if num_layers is None else f" in the upper {num_layers} layers"
        raise ValueError(
            f"--lora-targets {' '.join(targets)}: models of the kind {model.config.family.members} "
            f"have none of these projections{layers}; use some of {', '.join(available)}"
        )
    model.first_trained_layer = min(map(layer_index, linears))

    keys = mx.random.split(mx.random.key(seed), len(linears))
    adapted = []
    for (name, linear), key in zip(sorted(linears.items()), keys, strict=True):
        adapted.append((name, LoRALinear(linear, rank, scale, key)))
    model.update_modules(tree_unflatten(adapted))
    for _, layer in adapted:
        layer.unfreeze(keys=["lora_a", "lora_b"], recurse=False)
    if gpu.can_run_metal_kernels() and kernels.is_kernels_variable_on():
        turn_off_faulty_kernels_for_rank(model, rank)


def layer_index(module_name: str) -> int:
    """The index of the layer in the name of a weight or module, such as 3 in "layers.3.mlp"."""
    return int(module_name.split(".")[1])


def turn_off_faulty_kernels_for_rank(model: gwen.Model, rank: int) -> None:
    """Turns off kernels that are wrong for adapters of this rank, and prints their names."""
    widths: set[int] = set()
    for _, layer in adapted_layers(model):
        widths.update(layer.linear.weight.shape)
    dtype = model.head_weight.dtype
    with kernels.record_calls_without_kernels() as calls:
        for width in sorted(widths):
            low = kernels.random_normal_array(3, rank, dtype=dtype)
            wide = kernels.random_normal_array(3, width, dtype=dtype)
            ops.transposed_product(low, wide)
    kernels.turn_off_faulty_kernels(calls)


@contextlib.contextmanager
def without_adapters_and_gradients(model: gwen.Model) -> Iterator[None]:
    """
    Inside the `with` block, the model computes without its adapters and without gradients.

    The frozen judge uses the model in this way. For a model without adapters, only the gradients
    are switched off.
    """
    enabled_layers = [layer for _, layer in adapted_layers(model) if layer.enabled]
    for layer in enabled_layers:
        layer.enabled = False
    try:
        with gpu.without_gradients():
            yield
    finally:
        for layer in enabled_layers:
            layer.enabled = True


@contextlib.contextmanager
def use_initial_weights(model: gwen.Model) -> Iterator[None]:
    """
    Inside the `with` block, the model has the weights that it had before training.

    In the block, the model serves as the reference policy, so it computes no gradients. The initial
    weights are those of the base model unless `initialize_adapters` or `attach_saved_adapter` has
    set others.
    """
    trained = []
    for _, layer in adapted_layers(model):
        if layer._start:
            trained.append((layer, layer.lora_a, layer.lora_b))
    for layer, _, _ in trained:
        layer.lora_a, layer.lora_b = layer._start
    try:
        with gpu.without_gradients() if trained else without_adapters_and_gradients(model):
            yield
    finally:
        for layer, lora_a, lora_b in trained:
            layer.lora_a = lora_a
            layer.lora_b = lora_b


# ---- adapters from disk


# The float32 matrices A (C, R) and B (R, O) of each fused projection. The keys are the names of the
# projections, such as "layers.0.self_attn.qkv_proj".
FusedMatrices = dict[str, tuple[mx.array, mx.array]]


class FusedAdapter(NamedTuple):
    """An adapter that was read from disk, with matrices for the model's fused projections."""

    scale: float
    matrices: FusedMatrices


def read_adapter_for_model(model: gwen.Model, path: str | Path) -> FusedAdapter:
    """
    Reads an adapter in the layout of mlx_lm or PEFT for a model that has no adapters.

    path: see `adapters.find_adapter_directory`. An adapter that Gwen wrote is read with exactly the
    values that it had in training.

    Raises ValueError unless the file is a "lora" adapter for this model's projections.
    """
    weights = hub.unfuse_weights(dict(tree_flatten(model.parameters())), model.config)
    _, scale, pairs = adapters.read_matching_adapter(weights, path)
    fused = {}
    for name, linear in model.named_modules():
        if not isinstance(linear, nn.Linear) or name.split(".")[-1] not in TARGETS:
            continue
        rows_of = hub.unfuse_weights({name: linear.weight}, model.config)
        part_pairs = {part: pairs.pop(part) for part in rows_of if part in pairs}
        if part_pairs:
            output_widths = {part: len(rows) for part, rows in rows_of.items()}
            fused[name] = fuse_part_adapters(part_pairs, output_widths)
    if pairs:
        raise ValueError(
            f"--adapter {path}: the adapter changes {next(iter(pairs))}, but an adapter for this "
            f"model may change only these projections: {', '.join(TARGETS)}"
        )
    return FusedAdapter(scale, fused)


def fuse_part_adapters(
    part_pairs: dict[str, tuple[mx.array, mx.array]], output_widths: dict[str, int]
) -> tuple[mx.array, mx.array]:
    """
    The matrices A (C, R) and B (R, O) of a fused projection, from the matrices of its parts.

    part_pairs: A (C, r) and B (r, width) of each part that has an adapter.
    output_widths: the output width of every part, in the order of the parts.

    If the matrices A of all parts are equal, the parts share one A. Otherwise all matrices A are
    concatenated, and a part's columns of B are 0 except in the rows that belong to the part's A.
    """
    lows = [low.astype(mx.float32) for low, _ in part_pairs.values()]
    if all(mx.array_equal(low, lows[0]).item() for low in lows):
        lows = lows[:1]
    adapted_parts = list(part_pairs)
    columns = []
    for part, width in output_widths.items():
        blocks = [mx.zeros((low.shape[1], width)) for low in lows]
        if part in part_pairs:
            index = adapted_parts.index(part) % len(lows)
            blocks[index] = part_pairs[part][1].astype(mx.float32)
        columns.append(mx.concatenate(blocks))
    return mx.concatenate(lows, axis=1), mx.concatenate(columns, axis=1)


def attach_saved_adapter(
    model: gwen.Model, path: str | Path, initial_adapter: str | Path | None = None
) -> None:
    """
    Reads an adapter, and adds it to the model without changing the model's own weights.

    The adapter can therefore be switched off with `without_adapters_and_gradients`.
    initial_adapter: the path of the adapter from which the training of this adapter began; None if
    the training began without an adapter. `use_initial_weights` needs this path.

    Raises ValueError in the same cases as `read_adapter_for_model`.
    """
    scale, pairs = read_adapter_for_model(model, path)
    initial_pairs: FusedMatrices = {}
    if initial_adapter is not None:
        initial_pairs = read_adapter_for_model(model, initial_adapter).matrices

    linears = dict(model.named_modules())
    adapted = []
    for name, (low, high) in pairs.items():
        layer = LoRALinear(linears[name], 1, scale, mx.random.key(0))
        layer.lora_a = low
        layer.lora_b = high
        if initial_adapter is not None:
            layer._start = initial_pairs[name]
        adapted.append((name, layer))
    model.update_modules(tree_unflatten(adapted))


def initialize_adapters(model: gwen.Model, scale: float, initial: FusedMatrices) -> None:
    """
    Copies the values of a given adapter into the adapters that `apply` made.

    These values become the initial weights (see `use_initial_weights`). Where the given adapter
    has a lower rank or lacks a projection, the rest of A stays random and the rest of B stays 0, so
    the model's output is the same as with the given adapter.

    Raises ValueError if the adapters of the model have a lower rank than the given adapter, or lack
    one of its projections. The error message names the flag to set.
    """
    adapted = dict(adapted_layers(model))
    lowest = min(map(layer_index, initial))
    if lowest < model.first_trained_layer:
        num_needed = len(model.layers) - lowest
        raise ValueError(
            f"--init-adapter has adapters on the upper {num_needed} layers; set --lora-layers to "
            f"{num_needed} or more"
        )
    missing = sorted({name.rpartition(".")[2] for name in initial.keys() - adapted.keys()})
    if missing:
        raise ValueError(
            f"--init-adapter also changes {', '.join(missing)}; add {' '.join(missing)} to "
            "--lora-targets"
        )

    needed_rank = max(low.shape[1] for low, _ in initial.values())
    for name, layer in adapted.items():
        rank = layer.lora_a.shape[1]
        if rank < needed_rank:
            raise ValueError(
                f"--lora-rank is {rank}, but --init-adapter has rank {needed_rank}; use "
                f"--lora-rank {needed_rank} or more"
            )
        if name in initial:
            low, high = initial[name]
            if scale != layer.scale:
                high = high * (scale / layer.scale)
            start_rank = low.shape[1]
            layer.lora_a = mx.concatenate([low, layer.lora_a[:, start_rank:]], axis=1)
            layer.lora_b = mx.concatenate([high, layer.lora_b[start_rank:]])
        layer._start = (layer.lora_a, layer.lora_b)


# ---- adapters to disk


def mlx_lm_adapter_weights(model: gwen.Model) -> dict[str, mx.array]:
    """
    The matrices A and B of each part of the fused projections, under the names that mlx_lm uses.

    An example of a name is "model.layers.0.self_attn.q_proj.lora_a".
    """
    prefix = hub.MLX_LM_PREFIX if model.config.family.is_hybrid else ""
    weights = {}
    for name, layer in adapted_layers(model):
        # B^T has the same output rows as the weight, so the same function splits it into parts
        parts = hub.unfuse_weights({name: layer.lora_b.T}, model.config)
        for part, rows in parts.items():
            weights[f"{prefix}{part}.lora_a"] = layer.lora_a
            weights[f"{prefix}{part}.lora_b"] = mx.contiguous(rows.T)
    return weights


def mlx_lm_adapter_config(
    model: gwen.Model, weights: dict[str, mx.array], base_name: str
) -> dict[str, Any]:
    """
    The content of adapter_config.json in the format of mlx_lm.

    weights: the trained weights of the model. base_name: the model's name or path.
    """
    config: dict[str, Any] = {
        "model": base_name,
        "fine_tune_type": "full",
        # mlx_lm puts adapters on this number of upper layers
        "num_layers": len(model.layers) - model.first_trained_layer,
    }
    layers = [layer for _, layer in adapted_layers(model)]
    if not layers:
        return config
    projections = {hub.standard_tensor_name(name).rpartition(".")[0] for name in weights}
    keys = sorted({projection.split(".", 3)[3] for projection in projections})
    config["fine_tune_type"] = "lora"
    config["lora_parameters"] = {
        "rank": layers[0].lora_a.shape[1],
        "scale": layers[0].scale,
        "dropout": 0.0,
        "keys": keys,
    }
    return config


def save_adapter_or_full_weights(model: gwen.Model, directory: Path, base_name: str) -> bool:
    """
    Saves the trained weights in mlx_lm's adapter layout. Returns whether the model has adapters.

    base_name: the model's name or path. For a model without adapters, all weights are saved as a
    "full" adapter, with fused projections split into their parts.
    """
    directory.mkdir(parents=True, exist_ok=True)
    has_adapters = any(True for _ in adapted_layers(model))
    if has_adapters:
        weights = mlx_lm_adapter_weights(model)
    else:
        parts = hub.unfuse_weights(dict(tree_flatten(model.parameters())), model.config)
        weights = hub.convert_to_mlx_lm_weights(parts, model.config.family)
    config = mlx_lm_adapter_config(model, weights, base_name)
    checkpoint.save_tensors(directory / "adapters.safetensors", weights)
    checkpoint.write_synced_json(directory / "adapter_config.json", config)
    return has_adapters


if __name__ == "__main__":
    command = shlex.join(["uv", "run", "export.py", *sys.argv[1:]])
    print(f"lora.py is no longer a command; use: {command}", file=sys.stderr)
    sys.exit(2)
