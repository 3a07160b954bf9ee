"""
What a step moves and computes, from numbers of its configuration, and what that takes on Apple's chips: an estimate.

A phase takes the longer of two times: that of its bytes at a chip's bandwidth and that of its FLOPs at its arithmetic,
by the share of both that others have reached. Nobody has measured a step on a Mac. Left out: launches of kernels, from
which a small model waits, rewards, tokenizing, evaluation, what Python does.
"""

import timeit
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import mlx.core as mx
import yaml

# Reached by mlx_lm on an M4 Max with Qwen3-4B in bfloat16: 13.9 TFLOP/s of prefill, 438 GB/s of decoding
# (BENCHMARKS.md of github.com/ml-explore/mlx-lm); others have 70 to 80% and 78%.
ARITHMETIC, BANDWIDTH = 0.75, 0.78
UPDATE = 0.8  # of that: what is done between an update's matmuls takes a fifth (c148fd6:bench/ledger.py)


class Chip(NamedTuple):
    name: str
    bandwidth: float  # GB a second
    tflops: float  # of 16-bit matmuls
    memory: list[int]  # GB that machines have


def load_chips() -> list[Chip]:
    rows = yaml.safe_load((Path(__file__).parents[1] / "data" / "chips.yaml").read_text("utf-8"))
    return [Chip(name, **row) for name, row in rows.items()]


def this_chip() -> Chip:
    """This machine's chip. One that the table does not have is timed: a product of float32 matrices, and a sum."""
    name = str(mx.device_info().get("device_name", "CPU")).removeprefix("Apple ")
    if known := [chip for chip in load_chips() if chip.name == name]:
        return known[0]
    matrix, row = mx.random.normal((1024, 1024)), mx.random.normal((2**24,))
    summing, multiplying = least_seconds(row.sum), least_seconds(lambda: matrix @ matrix)
    return Chip(name, row.nbytes / 1e9 / summing / BANDWIDTH, 2 * 1024**3 / 1e12 / multiplying / ARITHMETIC, [])


def least_seconds(compute: Callable[[], mx.array]) -> float:
    """The least of five times that something takes."""
    return min(timeit.repeat(lambda: mx.eval(compute()), number=1))


class Cost(NamedTuple):
    bytes: float
    flops: float


def estimate_seconds(costs: dict[str, Cost], chip: Chip) -> float:
    """What a step with phases of these costs takes."""
    moving, computing = BANDWIDTH * 1e9 * chip.bandwidth, ARITHMETIC * 1e12 * chip.tflops
    return sum(max(cost.bytes / moving, cost.flops / computing) for cost in costs.values())
