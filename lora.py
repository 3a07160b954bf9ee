"""
Low-rank adapters on the fused projections of a frozen model.

Adapters are float32. Disabling them gives the base model. A 16-bit model computes with 16-bit
copies of its adapters; the trained and saved matrices stay float32.

A fused projection has one adapter, so query, key and value share its A. Each part of the projection
uses that A and its own columns of B. This is exactly the form of the
adapters that mlx_lm puts on the separate projections.

The formats of adapters on disk are in disk/adapters.py. The command that merges an adapter into its
model, or writes it for other programs, is export.py.

Axes: M rows, C input width, O output width, R rank of an adapter, r rank of one part's adapter.
"""

import contextlib
import math
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

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
    """y = x W^T + b + scale * x A B: a frozen linear layer with an adapter A (C, R), B (R, O)."""

    def __init__(self, linear: nn.Linear, rank: int, scale: float, key: mx.array):
        super().__init__()
        out_width, in_width = linear.weight.shape
        self.linear = linear
        self.scale = scale
        self.enabled = True
        bound = 1 / math.sqrt(in_width)
        self.lora_a = mx.random.uniform(-bound, bound, (in_width, rank), key=key)
        self.lora_b = mx.zeros((rank, out_width))  # so that training begins at the base model
        # A and B, and the 16-bit copies that were made from them
        self._rounded: tuple[mx.array, ...] = ()
        # A and B before training, if it began with an adapter
        self._start: tuple[mx.array, ...] = ()

    def __call__(self, x: mx.array) -> mx.array:
        if not self.enabled:
            return self.linear(x)
        if x.dtype == mx.float32:
            return mx.addmm(self.linear(x), self.scale * (x @ self.lora_a), self.lora_b)
        rows = x.reshape(-1, x.shape[-1])
        return self._half_precision_adapter(rows).reshape(*x.shape[:-1], -1)

    def rounded_matrices(self, dtype: mx.Dtype) -> tuple[mx.array, mx.array]:
        """A and scale * B in a 16-bit type, computed once for each pair of A and B."""
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

    def _half_precision_adapter(self, x: mx.array) -> mx.array:
        """
        (M, C) -> (M, O) in the type of x, with a gradient for x, A and B.

        The frozen layer gets no gradient. Products are rounded to 16 bits. Sums and the gradients
        of A and B are float32. Only x and x A are held for the backward pass. Autodiff would hold
        float32 copies of x, x A and the gradient of y.
        """
        low_a, low_b = self.rounded_matrices(x.dtype)

        def forward(x: mx.array, lora_a: mx.array, lora_b: mx.array) -> tuple[mx.array, mx.array]:
            product = x @ low_a  # (M, R)
            return mx.addmm(self.linear(x), product, low_b), product

        def backward(
            primals: Any, cotangents: Any, outputs: Any
        ) -> tuple[mx.array, mx.array, mx.array]:
            x = primals[0]
            d_y = cotangents[0]
            product = outputs[1]
            d_product = d_y @ low_b.T
            d_x = mx.addmm(d_y @ self.linear.weight, d_product, low_a.T)
            d_a = ops.tall_product(d_product, x).T
            d_b = self.scale * ops.tall_product(product, d_y)
            return d_x, d_a, d_b

        y: mx.array = gpu.call_with_vjp(forward, backward, x, self.lora_a, self.lora_b)[0]
        return y


def adapted_layers(model: gwen.Model) -> Iterator[tuple[str, LoRALinear]]:
    """Every projection with an adapter, and its name, such as "layers.0.self_attn.qkv_proj"."""
    for name, module in model.named_modules():
        if isinstance(module, LoRALinear):
            yield name, module


# ---- adapters inside a model


def apply(
    model: gwen.Model, rank: int, scale: float, targets: Sequence[str] = TARGETS, seed: int = 0
) -> None:
    """
    Freezes the model and adds an adapter to the target projections of its layers, in place.

    Raises ValueError if the model has no such projection.
    """
    model.freeze()
    linears = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name.split(".")[-1] in targets:
            linears[name] = module
    if not linears:
        raise ValueError(
            f"--lora-targets {' '.join(targets)}: {model.config.family.members} have no such "
            "projection"
        )

    keys = mx.random.split(mx.random.key(seed), len(linears))
    adapted = []
    for (name, linear), key in zip(sorted(linears.items()), keys, strict=True):
        adapted.append((name, LoRALinear(linear, rank, scale, key)))
    model.update_modules(tree_unflatten(adapted))
    for _, layer in adapted:
        layer.unfreeze(keys=["lora_a", "lora_b"], recurse=False)
    if gpu.has_metal() and kernels.kernels_are_wanted():
        check_kernels(model, rank)


def check_kernels(model: gwen.Model, rank: int) -> None:
    """Checks the kernels that depend on the rank, which `gwen.check_kernels` does not know."""
    widths: set[int] = set()
    for _, layer in adapted_layers(model):
        widths.update(layer.linear.weight.shape)
    dtype = model.head_weight.dtype
    with kernels.record_calls() as calls:
        for width in sorted(widths):
            low = kernels.normal_array(3, rank, dtype=dtype)
            wide = kernels.normal_array(3, width, dtype=dtype)
            ops.tall_product(low, wide)
    kernels.check_calls(calls)


@contextlib.contextmanager
def disable_adapters(model: gwen.Model) -> Iterator[None]:
    """
    In this context the model is its base model, without gradients. A frozen judge is used so.

    A model without adapters stays as it is.
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
def with_initial_weights(model: gwen.Model) -> Iterator[None]:
    """
    In this context the model has the weights with which its training began, without gradients.

    That is the reference policy: the base model, unless `start_from` or `attach_adapter` set other
    initial weights.
    """
    trained = []
    for _, layer in adapted_layers(model):
        if layer._start:
            trained.append((layer, layer.lora_a, layer.lora_b))
    for layer, _, _ in trained:
        layer.lora_a, layer.lora_b = layer._start
    try:
        with gpu.without_gradients() if trained else disable_adapters(model):
            yield
    finally:
        for layer, lora_a, lora_b in trained:
            layer.lora_a = lora_a
            layer.lora_b = lora_b


# ---- adapters from disk


# A (C, R) and B (R, O) float32 of each fused projection, such as "layers.0.self_attn.qkv_proj"
Fused = dict[str, tuple[mx.array, mx.array]]


def read_adapter_for_model(model: gwen.Model, path: str | Path) -> tuple[float, Fused]:
    """
    Reads an adapter of mlx_lm or PEFT for a model without adapters; returns its scale and matrices.

    path: see `adapters.find_adapter`. An adapter that Gwen wrote gets, to the bit, the values
    that it had in training.

    Raises ValueError unless it is a "lora" adapter for this model's projections.
    """
    weights = hub.unfuse_weights(dict(tree_flatten(model.parameters())), model.config)
    _, scale, pairs = adapters.load_fitting(weights, path)
    fused = {}
    for name, linear in model.named_modules():
        if not isinstance(linear, nn.Linear) or name.split(".")[-1] not in TARGETS:
            continue
        rows_of = hub.unfuse_weights({name: linear.weight}, model.config)
        part_pairs = {part: pairs.pop(part) for part in rows_of if part in pairs}
        if part_pairs:
            num_rows = {part: len(rows) for part, rows in rows_of.items()}
            fused[name] = fuse_pairs(part_pairs, num_rows)
    if pairs:
        raise ValueError(
            f"--adapter {path}: {next(iter(pairs))} is no projection that can have an adapter here"
        )
    return scale, fused


def fuse_pairs(
    part_pairs: dict[str, tuple[mx.array, mx.array]], num_rows: dict[str, int]
) -> tuple[mx.array, mx.array]:
    """
    A (C, R) and B (R, O) of a fused projection, from the matrices of its parts.

    part_pairs: A (C, r) and B (r, rows) of the parts that have an adapter.
    num_rows: the output rows of every part, in their order.

    If all parts have an equal A, they share it. Otherwise the matrices A of all parts are
    concatenated, and each part's columns of B are 0 except in the rows of its own A.
    """
    lows = [low.astype(mx.float32) for low, _ in part_pairs.values()]
    if all(mx.array_equal(low, lows[0]).item() for low in lows):
        lows = lows[:1]
    adapted_parts = list(part_pairs)
    columns = []
    for part, size in num_rows.items():
        blocks = [mx.zeros((low.shape[1], size)) for low in lows]
        if part in part_pairs:
            place = adapted_parts.index(part) % len(lows)
            blocks[place] = part_pairs[part][1].astype(mx.float32)
        columns.append(mx.concatenate(blocks))
    return mx.concatenate(lows, axis=1), mx.concatenate(columns, axis=1)


def attach_adapter(model: gwen.Model, path: str | Path, start: str | Path | None = None) -> None:
    """
    Adds an adapter beside the model's weights, so that `disable_adapters` can switch it off.

    start: the adapter with which its training began, for `with_initial_weights`.
    Raises ValueError like `read_adapter_for_model`.
    """
    scale, pairs = read_adapter_for_model(model, path)
    start_pairs: Fused = {}
    if start is not None:
        start_pairs = read_adapter_for_model(model, start)[1]

    linears = dict(model.named_modules())
    adapted = []
    for name, (low, high) in pairs.items():
        layer = LoRALinear(linears[name], 1, scale, mx.random.key(0))
        layer.lora_a = low
        layer.lora_b = high
        if start is not None:
            layer._start = start_pairs[name]
        adapted.append((name, layer))
    model.update_modules(tree_unflatten(adapted))


def start_from(model: gwen.Model, scale: float, pairs: Fused) -> None:
    """
    Copies the values of another adapter into the adapters that `apply` made.

    The result is the model before training, see `with_initial_weights`. Ranks and projections that
    the other adapter lacks begin as in `apply`, with A random and B zero, so they add nothing.

    Raises ValueError naming the flag to set if the model's adapters have fewer ranks or
    projections.
    """
    adapted = dict(adapted_layers(model))
    missing = sorted({name.rpartition(".")[2] for name in pairs.keys() - adapted.keys()})
    if missing:
        raise ValueError(
            f"--init-adapter adapts {', '.join(missing)} too; add that to --lora-targets"
        )

    needed_rank = max(low.shape[1] for low, _ in pairs.values())
    for name, layer in adapted.items():
        rank = layer.lora_a.shape[1]
        if rank < needed_rank:
            raise ValueError(
                f"--init-adapter needs --lora-rank {needed_rank}, or more; it is {rank}"
            )
        if name in pairs:
            low, high = pairs[name]
            if scale != layer.scale:
                high = high * (scale / layer.scale)
            start_rank = low.shape[1]
            layer.lora_a = mx.concatenate([low, layer.lora_a[:, start_rank:]], axis=1)
            layer.lora_b = mx.concatenate([high, layer.lora_b[start_rank:]])
        layer._start = (layer.lora_a, layer.lora_b)


# ---- adapters to disk


def adapter_weights(model: gwen.Model) -> dict[str, mx.array]:
    """A and B of each part by mlx_lm's name, such as "model.layers.0.self_attn.q_proj.lora_a"."""
    prefix = hub.MLX_LM_PREFIX if model.config.family.is_hybrid else ""
    weights = {}
    for name, layer in adapted_layers(model):
        # B^T has the output rows of the weight, so the rule that unfuses weights unfuses it too
        parts = hub.unfuse_weights({name: layer.lora_b.T}, model.config)
        for part, rows in parts.items():
            weights[f"{prefix}{part}.lora_a"] = layer.lora_a
            weights[f"{prefix}{part}.lora_b"] = mx.contiguous(rows.T)
    return weights


def adapter_config(model: gwen.Model, weights: dict[str, mx.array], base: str) -> dict[str, Any]:
    """The content of mlx_lm's adapter_config.json for the trained weights of a model."""
    config: dict[str, Any] = {
        "model": base,
        "fine_tune_type": "full",
        "num_layers": len(model.layers),
    }
    layers = [layer for _, layer in adapted_layers(model)]
    if not layers:
        return config
    projections = {hub.plain_name(name).rpartition(".")[0] for name in weights}
    keys = sorted({projection.split(".", 3)[3] for projection in projections})
    config["fine_tune_type"] = "lora"
    config["lora_parameters"] = {
        "rank": layers[0].lora_a.shape[1],
        "scale": layers[0].scale,
        "dropout": 0.0,
        "keys": keys,
    }
    return config


def save_adapter(model: gwen.Model, directory: Path, base: str) -> bool:
    """
    Writes the trained weights in mlx_lm's adapter layout; returns whether they are adapters.

    base: the model's name or path. For a model without adapters it writes a "full" adapter: all
    weights, with un-fused projections.
    """
    directory.mkdir(parents=True, exist_ok=True)
    has_adapters = any(True for _ in adapted_layers(model))
    if has_adapters:
        weights = adapter_weights(model)
    else:
        parts = hub.unfuse_weights(dict(tree_flatten(model.parameters())), model.config)
        weights = hub.to_mlx_lm_names(parts, model.config.family)
    config = adapter_config(model, weights, base)
    checkpoint.save_tensors(directory / "adapters.safetensors", weights)
    checkpoint.write_synced_json(directory / "adapter_config.json", config)
    return has_adapters


if __name__ == "__main__":
    command = shlex.join(["uv", "run", "export.py", *sys.argv[1:]])
    print(f"lora.py is a library; the command is now: {command}", file=sys.stderr)
    sys.exit(2)
