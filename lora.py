"""
Low-rank adapters on the fused projections of a frozen model: float32, switched off to get the reference policy.
The command `lora.py`, which merges one into its model or writes it for others, is deploy/command.py.

A model in 16 bits computes with 16-bit copies of its adapters; what is trained and saved stays float32.

One adapter serves a fused projection, so query, key and value share its A; taken apart, each part has that A and its
own rows of B, which is exactly the adapter that mlx_lm puts on the separate projections.

Axes: M rows, C input width, O output width, R rank.
"""

import contextlib
import math
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
    """y = x W^T + b + scale * x A B: a frozen linear layer with an adapter, A (C, R), B (R, O) float32."""

    def __init__(self, linear: nn.Linear, rank: int, scale: float, key: mx.array):
        super().__init__()
        out_width, in_width = linear.weight.shape
        self.linear, self.scale, self.enabled = linear, scale, True
        bound = 1 / math.sqrt(in_width)
        self.lora_a = mx.random.uniform(-bound, bound, (in_width, rank), key=key)
        self.lora_b = mx.zeros((rank, out_width))  # so that training begins at the base model
        self._rounded: tuple[mx.array, ...] = ()  # A and B, and the copies made of them
        self._start: tuple[
            mx.array, ...
        ] = ()  # A and B that training began with, if it began with an adapter

    def __call__(self, x: mx.array) -> mx.array:
        if not self.enabled:
            return self.linear(x)
        if x.dtype == mx.float32:
            return mx.addmm(self.linear(x), self.scale * (x @ self.lora_a), self.lora_b)
        return self._half_precision_adapter(x.reshape(-1, x.shape[-1])).reshape(*x.shape[:-1], -1)

    def rounded_matrices(self, dtype: mx.Dtype) -> tuple[mx.array, mx.array]:
        """A and scale * B in a type of 16 bits, made once for the A and B at hand."""
        last = self._rounded
        if (
            not last
            or last[0] is not self.lora_a
            or last[1] is not self.lora_b
            or last[2].dtype != dtype
        ):
            copies = self.lora_a.astype(dtype), (self.scale * self.lora_b).astype(dtype)
            self._rounded = self.lora_a, self.lora_b, *copies
        return self._rounded[2], self._rounded[3]

    def _half_precision_adapter(self, x: mx.array) -> mx.array:
        """
        (M, C) -> (M, O) in the type of x, with a gradient for x, A and B; the frozen layer gets none.

        A product rounds to 16 bits, sums are float32, and so are the gradients of A and B. What waits for the backward
        pass is x and x A. By autodiff it would be float32 copies of x, x A and the gradient of y.
        """
        low_a, low_b = self.rounded_matrices(x.dtype)

        def forward(x: mx.array, lora_a: mx.array, lora_b: mx.array) -> tuple[mx.array, mx.array]:
            low = x @ low_a
            return mx.addmm(self.linear(x), low, low_b), low

        def backward(
            primals: Any, cotangents: Any, outputs: Any
        ) -> tuple[mx.array, mx.array, mx.array]:
            x, d_y, low = primals[0], cotangents[0], outputs[1]
            d_low = d_y @ low_b.T
            d_x = mx.addmm(d_y @ self.linear.weight, d_low, low_a.T)
            return d_x, ops.tall_product(d_low, x).T, self.scale * ops.tall_product(low, d_y)

        result: mx.array = gpu.call_with_vjp(forward, backward, x, self.lora_a, self.lora_b)[0]
        return result


def adapted_layers(model: gwen.Model) -> Iterator[tuple[str, LoRALinear]]:
    """Every adapted projection with its name, "layers.0.self_attn.qkv_proj"."""
    return (
        (name, module) for name, module in model.named_modules() if isinstance(module, LoRALinear)
    )


def apply(
    model: gwen.Model, rank: int, scale: float, targets: Sequence[str] = TARGETS, seed: int = 0
) -> None:
    """Freezes the model and puts an adapter on its layers' target projections, in place. ValueError if it has none."""
    model.freeze()
    linears = {
        n: m
        for n, m in model.named_modules()
        if isinstance(m, nn.Linear) and n.split(".")[-1] in targets
    }
    if not linears:
        raise ValueError(
            f"--lora-targets {' '.join(targets)}: {model.config.family.members} have no such projection"
        )
    pairs = zip(
        sorted(linears.items()), mx.random.split(mx.random.key(seed), len(linears)), strict=True
    )
    adapted = [(name, LoRALinear(linear, rank, scale, key)) for (name, linear), key in pairs]
    model.update_modules(tree_unflatten(adapted))
    for _, layer in adapted:
        layer.unfreeze(keys=["lora_a", "lora_b"], recurse=False)
    if (
        gpu.has_metal() and kernels.kernels_are_wanted()
    ):  # what `gwen.check_kernels` could not know: the rank
        widths = {size for _, layer in adapted for size in layer.linear.weight.shape}
        with kernels.record_calls() as calls:
            for size in sorted(widths):
                both = (
                    kernels.normal_array(3, columns, dtype=model.head_weight.dtype)
                    for columns in (rank, size)
                )
                ops.tall_product(*both)
        kernels.check_calls(calls)


@contextlib.contextmanager
def disabled(model: gwen.Model) -> Iterator[None]:
    """Inside, the model is its base, the frozen judge, without gradients. Without adapters it stays as it is."""
    adapted = [layer for _, layer in adapted_layers(model) if layer.enabled]
    for layer in adapted:
        layer.enabled = False
    try:
        with gpu.without_gradients():
            yield
    finally:
        for layer in adapted:
            layer.enabled = True


@contextlib.contextmanager
def with_initial_weights(model: gwen.Model) -> Iterator[None]:
    """Inside, the model is what its training began with, the reference policy: see `begin_with`, else its base."""
    now = [
        (layer, layer.lora_a, layer.lora_b) for _, layer in adapted_layers(model) if layer._start
    ]
    for layer, _, _ in now:
        layer.lora_a, layer.lora_b = layer._start
    try:
        with gpu.without_gradients() if now else disabled(model):
            yield
    finally:
        for layer, low, high in now:
            layer.lora_a, layer.lora_b = low, high


Fused = dict[
    str, tuple[mx.array, mx.array]
]  # A (C, R) and B (R, O) float32 by "layers.0.self_attn.qkv_proj"


def read_for_model(model: gwen.Model, path: str | Path) -> tuple[float, Fused]:
    """
    Scale and matrices of an adapter, mlx_lm's or PEFT's, for a model without adapters. path: see `adapters.find_adapter`.

    One of ours becomes, to the bit, what it was in training. Where the parts of a fused projection bring an A each,
    these stand side by side, and each part's rows of B read its own.
    Raises ValueError when the adapter is not a "lora" one of this model's projections.
    """
    _, scale, pairs = adapters.load_fitting(
        hub.unfuse_weights(dict(tree_flatten(model.parameters())), model.config), path
    )
    fused = {}
    for name, linear in model.named_modules():
        if not isinstance(linear, nn.Linear) or name.split(".")[-1] not in TARGETS:
            continue
        rows_of = hub.unfuse_weights({name: linear.weight}, model.config)
        given = {part: pairs.pop(part) for part in rows_of if part in pairs}
        if not given:
            continue
        lows = [low.astype(mx.float32) for low, _ in given.values()]  # (C, r) each
        if all(mx.array_equal(low, lows[0]).item() for low in lows):
            lows = lows[:1]
        columns = []
        for part, rows in rows_of.items():
            blocks = [mx.zeros((low.shape[1], len(rows))) for low in lows]
            if part in given:
                blocks[list(given).index(part) % len(lows)] = given[part][1].astype(mx.float32)
            columns.append(mx.concatenate(blocks))
        fused[name] = mx.concatenate(lows, axis=1), mx.concatenate(columns, axis=1)
    if pairs:
        raise ValueError(
            f"--adapter {path}: {next(iter(pairs))} is no projection that can have an adapter here"
        )
    return scale, fused


def attach_adapter(model: gwen.Model, path: str | Path, start: str | Path | None = None) -> None:
    """
    Puts an adapter beside the model's weights, so that `disabled` can switch it off. ValueError as `read`.

    start: the adapter that its training began with, for `before_training`.
    """
    (scale, pairs), begun = (
        read_for_model(model, path),
        None if start is None else read_for_model(model, start)[1],
    )
    linears, adapted = dict(model.named_modules()), []
    for name, (low, high) in pairs.items():
        layer = LoRALinear(linears[name], 1, scale, mx.random.key(0))
        layer.lora_a, layer.lora_b = low, high
        if begun is not None:
            layer._start = begun[name]
        adapted.append((name, layer))
    model.update_modules(tree_unflatten(adapted))


def start_from(model: gwen.Model, scale: float, pairs: Fused) -> None:
    """
    Gives the adapters made by `apply` the values of another, and makes that the model before training.

    What they have more of rank or projections begins as without it: A random, B zero, so adding nothing.
    Raises ValueError when they have less, naming the flag to set.
    """
    adapted = dict(adapted_layers(model))
    if missing := sorted({name.rpartition(".")[2] for name in pairs.keys() - adapted.keys()}):
        raise ValueError(
            f"--init-adapter adapts {', '.join(missing)} too; add that to --lora-targets"
        )
    needed = max(low.shape[1] for low, _ in pairs.values())
    for name, layer in adapted.items():
        if layer.lora_a.shape[1] < needed:
            raise ValueError(
                f"--init-adapter needs --lora-rank {needed}, or more; it is {layer.lora_a.shape[1]}"
            )
        if name in pairs:
            low, high = pairs[name]
            high = high if scale == layer.scale else high * (scale / layer.scale)
            rank = low.shape[1]
            layer.lora_a = mx.concatenate([low, layer.lora_a[:, rank:]], axis=1)
            layer.lora_b = mx.concatenate([high, layer.lora_b[rank:]])
        layer._start = layer.lora_a, layer.lora_b


def adapter_weights(model: gwen.Model) -> dict[str, mx.array]:
    """A and B of every adapter in mlx_lm's names and parts, "model.layers.0.self_attn.q_proj.lora_a"."""
    out, prefix = {}, hub.MLX_LM_PREFIX if model.config.family.is_hybrid else ""
    for name, layer in adapted_layers(model):
        # B^T has the output rows that a weight has, so the rule that takes weights apart takes it apart too
        for part, rows in hub.unfuse_weights({name: layer.lora_b.T}, model.config).items():
            out[f"{prefix}{part}.lora_a"], out[f"{prefix}{part}.lora_b"] = (
                layer.lora_a,
                mx.contiguous(rows.T),
            )
    return out


def save_adapter(model: gwen.Model, directory: Path, base: str) -> bool:
    """
    Writes the trained weights in mlx_lm's adapter layout; returns whether they are adapters.

    base: the model's name or path. Without adapters, writes a "full" adapter: all weights, un-fused.
    """
    directory.mkdir(parents=True, exist_ok=True)
    adapted = list(adapted_layers(model))
    config: dict[str, Any] = {
        "model": base,
        "fine_tune_type": "full",
        "num_layers": len(model.layers),
    }
    if adapted:
        first, weights = adapted[0][1], adapter_weights(model)
        keys = sorted(
            {hub.plain_name(name).rpartition(".")[0].split(".", 3)[3] for name in weights}
        )
        parameters = {
            "rank": first.lora_a.shape[1],
            "scale": first.scale,
            "dropout": 0.0,
            "keys": keys,
        }
        config |= {"fine_tune_type": "lora", "lora_parameters": parameters}
    else:
        weights = hub.unfuse_weights(dict(tree_flatten(model.parameters())), model.config)
        weights = hub.to_mlx_lm_names(weights, model.config.family)
    checkpoint.save_tensors(directory / "adapters.safetensors", weights)
    checkpoint.write_json(directory / "adapter_config.json", config)
    return bool(adapted)


def main(argv: list[str] | None = None) -> None:
    from deploy import command  # which stands above this module

    command.main(argv)


if __name__ == "__main__":
    main()
