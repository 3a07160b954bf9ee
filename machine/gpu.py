"""
Which device MLX computes on, and operations with their own gradients.

This file does not cover kernels (machine/kernels.py) or memory (machine/memory.py).
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx


def on_gpu() -> bool:
    """Whether MLX computes on a GPU."""
    return bool(mx.default_device().type == mx.gpu)


def prefill_tokens() -> int:
    """The number of positions, with padding, in a prefill's forward pass; measured in LOG.md."""
    return 2048 if on_gpu() else 256


def has_metal() -> bool:
    """Whether Metal kernels can run here. Tests with an emulator make it true on a CPU too."""
    return on_gpu()


_forward_only = [False]


def is_forward_only() -> bool:
    """Whether `without_gradients` is active."""
    return _forward_only[0]


@contextlib.contextmanager
def without_gradients() -> Iterator[None]:
    """
    Inside the context, `call_with_vjp` calls its operation directly, without its gradient.

    Sampling and judging may use this: a decode step is then built in half the time. MLX cannot
    compute the gradient of a Metal kernel that was called directly, or of `exp_expression` in
    machine/cpu.py.
    """
    before = _forward_only[0]
    _forward_only[0] = True
    try:
        yield
    finally:
        _forward_only[0] = before


def call_with_vjp(
    forward: Callable[..., Any], backward: Callable[..., Any], *arrays: mx.array
) -> Any:
    """
    Returns `forward(*arrays)`. Its gradient is `backward(arrays, cotangents, results)`.

    Inside `without_gradients`, it calls `forward` only.
    """
    if is_forward_only():
        return forward(*arrays)
    custom: Any = mx.custom_function(forward)
    custom.vjp(backward)
    return custom(*arrays)
