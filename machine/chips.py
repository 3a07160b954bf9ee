"""
An estimate of a step's time on Apple's chips, from the bytes that the step moves and its FLOPs.

A phase of a step takes the longer of two times: its bytes at the chip's bandwidth, or its FLOPs at
the chip's arithmetic speed. Both speeds are reduced to the fraction that other programs have
reached. Nobody has measured a step on a Mac. The estimate leaves out kernel launches, which slow a
small model down, and rewards, tokenizing, evaluation and Python. preflight.py counts the bytes and
FLOPs.
"""

import timeit
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import mlx.core as mx
import yaml

# On an M4 Max with Qwen3-4B in bfloat16, mlx_lm reaches 13.9 TFLOP/s in prefill and 438 GB/s in
# decoding (BENCHMARKS.md in github.com/ml-explore/mlx-lm). Others reach 70 to 80% and 78%.
ARITHMETIC_FRACTION = 0.75
BANDWIDTH_FRACTION = 0.78
# An update reaches only this fraction of ARITHMETIC_FRACTION, since operations between its matmuls
# take a fifth of the time (c148fd6:bench/ledger.py).
UPDATE_FRACTION = 0.8


class Chip(NamedTuple):
    name: str
    bandwidth: float  # GB a second
    tflops: float  # speed of 16-bit matmuls
    memory: list[int]  # the sizes, in GB, of machines with this chip


def load_chips() -> list[Chip]:
    """Reads the table of Apple's chips."""
    path = Path(__file__).parents[1] / "data" / "chips.yaml"
    rows = yaml.safe_load(path.read_text("utf-8"))
    return [Chip(name, **row) for name, row in rows.items()]


def this_chip() -> Chip:
    """
    This machine's chip.

    If the table does not have it, its speeds are measured with a product of float32 matrices and
    with a sum.
    """
    name = str(mx.device_info().get("device_name", "CPU")).removeprefix("Apple ")
    for chip in load_chips():
        if chip.name == name:
            return chip

    matrix = mx.random.normal((1024, 1024))
    row = mx.random.normal((2**24,))
    sum_s = least_seconds(row.sum)
    product_s = least_seconds(lambda: matrix @ matrix)
    bandwidth = row.nbytes / 1e9 / sum_s / BANDWIDTH_FRACTION
    tflops = 2 * 1024**3 / 1e12 / product_s / ARITHMETIC_FRACTION
    return Chip(name, bandwidth, tflops, memory=[])


def least_seconds(compute: Callable[[], mx.array]) -> float:
    """The shortest of five measured times of `compute`, in seconds."""
    return min(timeit.repeat(lambda: mx.eval(compute()), number=1))


class Cost(NamedTuple):
    """The bytes that a phase of a step moves, and the FLOPs that it computes."""

    bytes: float
    flops: float


def estimate_seconds(costs: dict[str, Cost], chip: Chip) -> float:
    """The estimated seconds of a step whose phases have these costs."""
    bytes_per_s = BANDWIDTH_FRACTION * 1e9 * chip.bandwidth
    flops_per_s = ARITHMETIC_FRACTION * 1e12 * chip.tflops
    seconds = 0.0
    for cost in costs.values():
        seconds += max(cost.bytes / bytes_per_s, cost.flops / flops_per_s)
    return seconds
