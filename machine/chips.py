"""
Estimates how long a training step takes on Apple's chips from the step's FLOPs and moved bytes.

Each phase of a step needs a certain time to move its bytes at the chip's bandwidth, and a certain
time to compute its FLOPs at the chip's arithmetic speed. The longer of these two times is the
estimate for the phase. No program reaches the full speeds of a chip, so both speeds are multiplied
by the fractions that other programs have reached. No step has been measured on a Mac. The estimate
ignores kernel launches, which slow down a small model, and it ignores rewards, tokenization,
evaluation and Python. forecast/time_estimate.py counts the bytes and FLOPs.
"""

import timeit
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import cpu_blas  # noqa: F401  (before mlx)
import mlx.core as mx
import yaml

# On an M4 Max with Qwen3-4B in bfloat16, mlx_lm reaches 13.9 TFLOP/s in prefill and 438 GB/s in
# decoding (BENCHMARKS.md in github.com/ml-explore/mlx-lm). Other programs reach 70% to 80% of the
# arithmetic speed and 78% of the bandwidth.
ARITHMETIC_FRACTION = 0.75
BANDWIDTH_FRACTION = 0.78
# An update reaches only this fraction of ARITHMETIC_FRACTION, because the operations between its
# matmuls take one fifth of its time (c148fd6:bench/ledger.py).
UPDATE_FRACTION = 0.8


class Chip(NamedTuple):
    name: str
    bandwidth: float  # in GB per second
    tflops: float  # the speed of 16-bit matmuls, in TFLOP/s
    memory: list[int]  # the memory sizes, in GB, of machines with this chip

    @property
    def is_base(self) -> bool:
        """Whether this is the smallest chip of its generation, like the M4 but not the M4 Pro."""
        return " " not in self.name


def load_chips() -> list[Chip]:
    """Apple's chips, read from the table in data/chips.yaml."""
    path = Path(__file__).parents[1] / "data" / "chips.yaml"
    rows = yaml.safe_load(path.read_text("utf-8"))
    return [Chip(name, **row) for name, row in rows.items()]


def look_up_or_measure_chip() -> Chip:
    """
    This machine's chip, either from the table or with measured speeds.

    If the chip is not in the table, its arithmetic speed is measured with a product of float32
    matrices, and its bandwidth with a sum.
    """
    name = str(mx.device_info().get("device_name", "CPU")).removeprefix("Apple ")
    for chip in load_chips():
        if chip.name == name:
            return chip

    matrix = mx.random.normal((1024, 1024))
    row = mx.random.normal((2**24,))
    sum_s = measure_shortest_seconds(row.sum)
    product_s = measure_shortest_seconds(lambda: matrix @ matrix)
    bandwidth = row.nbytes / 1e9 / sum_s / BANDWIDTH_FRACTION
    tflops = 2 * 1024**3 / 1e12 / product_s / ARITHMETIC_FRACTION
    return Chip(name, bandwidth, tflops, memory=[])


def measure_shortest_seconds(compute: Callable[[], mx.array]) -> float:
    """The shortest of five measured durations of `compute`, in seconds."""
    return min(timeit.repeat(lambda: mx.eval(compute()), number=1))


class PhaseCost(NamedTuple):
    """The bytes that a phase of a step moves, and the FLOPs that it computes."""

    bytes: float
    flops: float


def estimate_step_seconds(costs: dict[str, PhaseCost], chip: Chip) -> float:
    """The estimated duration, in seconds, of a step with the given costs by phase."""
    return sum(estimate_phase_seconds(costs, chip).values())


def estimate_phase_seconds(costs: dict[str, PhaseCost], chip: Chip) -> dict[str, float]:
    """The estimated duration, in seconds, of each phase with the given costs."""
    bytes_per_s = BANDWIDTH_FRACTION * 1e9 * chip.bandwidth
    flops_per_s = ARITHMETIC_FRACTION * 1e12 * chip.tflops
    return {
        phase: max(cost.bytes / bytes_per_s, cost.flops / flops_per_s)
        for phase, cost in costs.items()
    }
