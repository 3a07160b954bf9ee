"""
Describes this machine and reports problems: `uv run doctor.py`.

The checks themselves are in other files: machine/kernels.py compares the kernels with plain MLX,
layers/probe.py checks MLX, and preflight.py lists the models that fit into memory.
"""

import argparse
import dataclasses
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import cpu_blas

import gwen
from disk import hub, model_choice
from flags import Parser, exit_on_mistakes, exit_with_error
from layers import lm_head
from machine import gpu, kernels, memory, versions
from machine.output import guard_output
from text import wrapping


class ReportLine(NamedTuple):
    """A line of the report."""

    line: str
    is_good: bool | None  # False: a problem; None: a problem that does not affect the demo


def examine_machine() -> Iterator[ReportLine]:
    """Examine this machine, and yield the lines of the report."""
    environment = versions.collect_environment_facts(cpu_blas.description)
    libraries = [f"{name} {number}" for name, number in environment["versions"].items()]
    yield ReportLine(f"versions: Python {environment['python']}, {', '.join(libraries)}", True)
    machine = f"{environment['machine']}, {environment['platform']}"
    yield ReportLine(f"machine: {machine}, {environment['num_cpus']} CPUs", True)
    yield ReportLine(f"memory: {memory.usable_memory_bytes() / 1e9:.1f} GB for this process", True)
    yield ReportLine(describe_wired_memory(), True)

    device = "cpu"
    if gpu.on_gpu():
        device = "metal" if gpu.can_run_metal_kernels() else "cuda"
    dtype = gwen.dtype_from_env_or_device()
    dtype_name = str(dtype).rpartition(".")[2]
    yield ReportLine(f"device: {device}; models use the data type {dtype_name}", True)
    yield ReportLine(
        f"BLAS: {environment['blas']}; this library multiplies matrices on the CPU", True
    )

    usual_size = "random:0.6b" if gpu.on_gpu() else "random:2m"
    config = model_choice.load_known_config(usual_size)
    model = gwen.Model(dataclasses.replace(config, layer_kinds=("full_attention",)))
    model.set_dtype(dtype)
    line, is_right = gwen.check_mlx_arithmetic(model)
    yield ReportLine(f"MLX: {line}; the check used the matrix sizes of {usual_size}", is_right)
    line, has_hub = hub.describe_hub_and_cached_default_model()
    yield ReportLine(line, has_hub or None)
    yield compare_kernels_and_disable_faulty(model)


def describe_wired_memory() -> str:
    """Return a line about the amount of memory that macOS must not page out."""
    limit = os.environ.get(memory.WIRED_LIMIT)
    if limit:
        return f"wired: {limit} GB that macOS must not page out"
    return (
        "wired: none; macOS may page out all memory (this is the default, because wired memory was "
        "reported to cause kernel panics: docs/memory.md, mlx #3186)"
    )


def compare_kernels_and_disable_faulty(model: gwen.Model) -> ReportLine:
    """Compare all kernels with plain MLX, turn off faulty ones, and return a line about them."""
    if not gpu.can_run_metal_kernels():
        return ReportLine("kernels: none, because they need Metal", True)
    if not kernels.is_kernels_variable_on():
        return ReportLine("kernels: none, because GWEN_KERNELS turns them off", True)
    calls = [
        *gwen.record_kernel_calls_in_rehearsal(model),
        *lm_head.record_head_calls(model.head_weight),
    ]
    kernels.turn_off_faulty_kernels(calls)
    names = list(dict.fromkeys(op.name for op, *_ in calls))
    disabled_names = [name for name in names if kernels.OPS[name].disabled_dtypes]
    line = (
        f"kernels: {', '.join(names)} were compared with plain MLX; "
        f"OFF: {', '.join(disabled_names) or 'none'}"
    )
    return ReportLine(line, not disabled_names)


@guard_output()
@exit_on_mistakes()
def main(argv: list[str] | None = None) -> None:
    parser = Parser(
        "doctor.py",
        "Check this machine: versions, memory, device, BLAS, MLX, the hub, kernels, and the "
        "models that it can train.",
    )
    # `uv run gwen.py --doctor` runs this file too.
    parser.add_argument("--doctor", action="store_true", help=argparse.SUPPRESS)
    parser.parse_args(argv)
    has_problems = False
    kernels.is_kernels_variable_on()  # raises an error at once if GWEN_KERNELS has a wrong value
    for line, is_good in examine_machine():
        mark = "ok "
        if is_good is None:
            mark = "   "
        elif not is_good:
            mark = "BAD"
            has_problems = True
        wrapping.print_wrapped(f"{mark} {line}")

    # The table is made in a separate process, so that a crash does not hide the lines above.
    command = [sys.executable, str(Path(__file__).with_name("preflight.py")), "--fits"]
    table = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    print(wrapping.wrap_for_terminal(table.stdout), end="")
    if table.returncode:
        exit_with_error("the list of models that fit could not be made; see the lines above")
    if has_problems:
        exit_with_error("this machine has problems; see the lines marked BAD above")


if __name__ == "__main__":
    main()
