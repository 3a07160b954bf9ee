"""
What a step moves and computes, from numbers of its configuration, and what that takes on Apple's chips: an estimate.

A phase takes the longest of three times: that of its bytes at a chip's bandwidth and of its FLOPs at its arithmetic, by
the share of both that others have reached, and that of its launches. Nobody has measured a step on a Mac. Left out:
rewards, tokenizing, evaluation, what Python does.

Axes: B prompts, G completions of each, P prompt and T completion positions.
"""

from pathlib import Path
from typing import NamedTuple

import yaml

# Reached by mlx_lm on an M4 Max with Qwen3-4B in bfloat16: 13.9 TFLOP/s of prefill, 438 GB/s of decoding
# (BENCHMARKS.md of github.com/ml-explore/mlx-lm); others have 70 to 80% and 78%.
ARITHMETIC, BANDWIDTH = 0.75, 0.78
UPDATE = 0.8  # of that: what is done between an update's matmuls takes a fifth (c148fd6:bench/ledger.py)
LAUNCH = 6e-6  # seconds of a kernel
LAUNCHES, UPDATE_LAUNCHES = 19, 233  # of a layer's decode step with adapters, of its update (c148fd6:bench/ledger.py)


class Chip(NamedTuple):
    name: str
    bandwidth: float  # bytes a second
    flops: float  # of 16-bit matmuls, a second
    memory: tuple[int, ...]  # bytes that machines have


def load() -> list[Chip]:
    rows = yaml.safe_load((Path(__file__).parents[1] / "data" / "chips.yaml").read_text("utf-8"))
    return [
        Chip(name, row["bandwidth"] * 1e9, row["tflops"] * 1e12, tuple(size << 30 for size in row["memory"]))
        for name, row in rows.items()
    ]


class Step(NamedTuple):
    """A model's numbers, and those of a step."""

    layers: int
    weights: int  # of all layers' matmuls
    head: int  # vocabulary x width
    pair: int  # FLOPs of a query and a key in all layers
    column: int  # bytes of a token's keys and values
    state: int  # bytes that a row keeps whatever its length
    itemsize: int  # bytes of a weight
    batch: int
    groups: int
    prompt: int
    answer: int  # tokens of every completion
    rows: int  # decoded at once
    judged: int  # positions that go through a judge
    batches: int  # micro-batches of an update
    passes: float  # through the layers in an update, a forward pass being one


class Cost(NamedTuple):
    bytes: float
    flops: float
    launches: float = 0.0
    share: float = 1.0  # of the arithmetic that is reached

    def seconds(self, chip: Chip) -> float:
        moving, computing = self.bytes / BANDWIDTH / chip.bandwidth, self.flops / ARITHMETIC / self.share / chip.flops
        return max(moving, computing, LAUNCH * self.launches)


def phases(step: Step) -> dict[str, Cost]:
    """What each phase of a step costs."""
    num_rows, width = step.batch * step.groups, step.prompt + step.answer / 2  # of an answer that is half done
    prompts, answers = step.batch * step.prompt, num_rows * step.answer
    weights = step.weights * step.itemsize
    rows = min(step.rows, num_rows)
    num_steps = step.answer * num_rows / rows
    cached = rows * (step.prompt / step.groups + step.answer / 2) * step.column + 2 * rows * step.state
    once = 2 * (step.weights + step.head) * rows + step.pair * rows * width  # FLOPs of a token of all rows
    trained = step.passes * 2 * step.weights * (prompts + answers)
    trained += 4 * step.head * answers  # logits and what goes back, once
    trained += 3.5 * step.pair * answers * width  # attention, and two and a half times that for its gradient
    costs = {
        "prefill": Cost(weights, 2 * step.weights * prompts + step.pair * prompts * step.prompt / 2),
        "decode": Cost(
            num_steps * (weights + step.head * step.itemsize + cached),
            num_steps * once,
            num_steps * LAUNCHES * step.layers,
        ),
        "update": Cost(step.batches * weights, trained, step.batches * UPDATE_LAUNCHES * step.layers, UPDATE),
    }
    if step.judged:
        costs["judge"] = Cost(weights, 2 * step.weights * step.judged + step.pair * step.judged * width)
    return costs


def seconds(step: Step, chip: Chip) -> float:
    return sum(cost.seconds(chip) for cost in phases(step).values())


def line(step: Step, need: int, here: str = "") -> str:
    """What a step moves, computes and takes: here, or on each chip that is sold with enough memory for `need` bytes."""
    costs, chips = phases(step).values(), load()
    fit = [chip for chip in chips if chip.name == here] or [c for c in chips if 2 * max(c.memory) / 3 >= need]
    moved, computed = sum(cost.bytes for cost in costs), sum(cost.flops for cost in costs)
    times = ", ".join(f"{chip.name} {seconds(step, chip):.2g} s" for chip in fit) or "no chip has the memory"
    return (
        f"a step: {moved / 1e9:.0f} GB of weights and caches, {computed / 1e12:.1f} TFLOP: {times} "
        "(an estimate: nobody has measured this on a Mac)"
    )
