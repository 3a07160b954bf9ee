"""Which device MLX computes on, and gradients of our own. Left out: kernels (kernels.py) and memory (memory.py)."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx


def on_gpu() -> bool:
    return bool(mx.default_device().type == mx.gpu)


def prefill_tokens() -> int:
    """Positions per forward pass of a prefill, padding included; measured in LOG.md."""
    return 2048 if on_gpu() else 256


def has_metal() -> bool:
    """Whether Metal kernels can run here. Tests with an emulator say so on a CPU too."""
    return on_gpu()


_forward_only = [False]


def is_forward_only() -> bool:
    """Whether `without_gradients` holds."""
    return _forward_only[0]


@contextlib.contextmanager
def without_gradients() -> Iterator[None]:
    """
    Inside, what has a gradient of its own is called directly, as whoever samples or judges may: a decode step is built
    in half the time. MLX refuses the gradient of a Metal kernel so called, and that of cpu.py's expression.
    """
    before, _forward_only[0] = _forward_only[0], True
    try:
        yield
    finally:
        _forward_only[0] = before


def differentiable(forward: Callable[..., Any], backward: Callable[..., Any], *arrays: mx.array) -> Any:
    """`forward(*arrays)`, whose gradient is `backward(arrays, cotangents, results)`."""
    if is_forward_only():
        return forward(*arrays)
    custom: Any = mx.custom_function(forward)
    custom.vjp(backward)
    return custom(*arrays)
