"""Launches of a function on a GPU, counted."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import mlx.core as mx

from bench import launches


def count(function: Callable[..., Any], *inputs: mx.array) -> Counter[str]:
    """The launches of one call on a GPU, by kind."""
    return Counter(launch.kind for launch in launches.trace(function, *inputs))


def per_layer(step: Callable[[int], tuple[Callable[..., Any], list[mx.array]]]) -> Counter[str]:
    """What one layer adds: `step(n)` gives a function with n layers, and its inputs."""
    one, two = (count(function, *inputs) for function, inputs in (step(1), step(2)))
    added = two.copy()
    added.subtract(one)
    return added
