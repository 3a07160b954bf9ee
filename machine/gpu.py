"""
The device on which MLX computes, and operations whose gradients Gwen defines itself.

Kernels are in machine/kernels.py, and memory is in machine/memory.py.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import cpu_blas  # noqa: F401  (before mlx)
import mlx.core as mx


def on_gpu() -> bool:
    """Whether MLX computes on a GPU."""
    return bool(mx.default_device().type == mx.gpu)


def prefill_tokens_per_pass() -> int:
    """
    The number of positions, including padding, in one forward pass of a prefill.

    LOG.md describes the measurements by which this number was chosen.
    """
    return 2048 if on_gpu() else 256


def can_run_metal_kernels() -> bool:
    """
    Whether Metal kernels can run on this device.

    MLX also computes on CUDA devices, where Gwen uses plain expressions. Tests that use an emulator
    replace this function, so that kernels also run on a CPU.
    """
    return on_gpu() and mx.metal.is_available()


_forward_only = [False]


def is_forward_only() -> bool:
    """Whether the program is inside a `without_gradients` context."""
    return _forward_only[0]


@contextlib.contextmanager
def without_gradients() -> Iterator[None]:
    """
    Inside the context, `call_with_vjp` calls its operation directly and defines no gradient.

    Sampling and judging use this context, because without gradients Python needs only half the
    time to build the computation graph of a decode step. MLX cannot compute the gradient of a Metal
    kernel that was called directly, or the gradient of `exp_expression` in machine/cpu.py.
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
    The result of `forward(*arrays)`, with the gradient `backward(arrays, cotangents, results)`.

    Inside `without_gradients`, the result has no gradient.
    """
    if is_forward_only():
        return forward(*arrays)
    custom: Any = mx.custom_function(forward)
    custom.vjp(backward)
    return custom(*arrays)
