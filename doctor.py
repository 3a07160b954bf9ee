"""
The doctor: `uv run gwen.py --doctor` describes this machine, and says what is wrong with it.

This file only runs the checks. They check kernels (machine/kernels.py), MLX (layers/probe.py), and
which models fit into memory (preflight.py).
"""

import dataclasses
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import cpu_blas

import gwen
from disk import hub, model_choice
from flags import Parser, exit_with_error, report_mistakes
from layers import lm_head
from machine import gpu, kernels, memory, versions
from machine.output import guard_output

# a line for the user, and whether all is well; None: it is not, but the demo runs all the same
Finding = tuple[str, bool | None]


def examine_machine() -> Iterator[Finding]:
    """Examines this machine and yields a finding for each line of the report."""
    environment = versions.describe_environment(cpu_blas.description)
    libraries = [f"{name} {number}" for name, number in environment["versions"].items()]
    yield f"versions: Python {environment['python']}, {', '.join(libraries)}", True
    machine = f"{environment['machine']}, {environment['platform']}"
    yield f"machine: {machine}, {environment['num_cpus']} CPUs", True
    yield f"memory: {memory.memory_size() / 1e9:.1f} GB for this process", True
    yield describe_wired_memory(), True

    device = "metal" if gpu.has_metal() else "cpu"
    dtype = gwen.default_dtype()
    dtype_name = str(dtype).rpartition(".")[2]
    yield f"device: {device}, where models are {dtype_name}", True
    yield f"BLAS: {environment['blas']}; it multiplies matrices on the CPU", True

    usual_size = "random:0.6b" if gpu.has_metal() else "random:2m"
    config = model_choice.load_known_config(usual_size)
    model = gwen.Model(dataclasses.replace(config, layer_kinds=("full_attention",)))
    model.set_dtype(dtype)
    line, is_right = gwen.check_mlx(model)
    yield f"MLX: {line}; tried at the sizes of {usual_size}", is_right
    line, has_hub = hub.describe_cache()
    yield line, has_hub or None
    yield examine_kernels(model)


def describe_wired_memory() -> str:
    limit = os.environ.get(memory.WIRED_LIMIT)
    if limit:
        return f"wired: {limit} GB that macOS must not page out"
    return (
        "wired: none; memory that macOS must not page out was reported to panic it: "
        "docs/memory.md, mlx #3186"
    )


def examine_kernels(model: gwen.Model) -> Finding:
    """The finding of a comparison of all kernels with plain MLX."""
    if not gpu.has_metal():
        return "kernels: none, they are for a GPU", True
    if not kernels.kernels_are_wanted():
        return "kernels: none, as GWEN_KERNELS says", True
    calls = [*gwen.rehearse_kernels(model), *lm_head.rehearse_head(model.head_weight)]
    kernels.check_calls(calls)
    names = list(dict.fromkeys(op.name for op, *_ in calls))
    disabled_names = [name for name in names if kernels.OPS[name].disabled_dtypes]
    line = (
        f"kernels: {', '.join(names)} were compared with plain MLX; "
        f"OFF: {', '.join(disabled_names) or 'none'}"
    )
    return line, not disabled_names


@guard_output()
@report_mistakes()
def main(argv: list[str] | None = None) -> None:
    parser = Parser(
        "gwen.py", "Look at this machine: versions, device, BLAS, memory, hub, kernels."
    )
    parser.add_argument("--doctor", action="store_true", required=True, help="print what runs here")
    parser.parse_args(argv)
    all_is_well = True
    kernels.kernels_are_wanted()  # reports a mistake in the environment before anything else
    for line, is_well in examine_machine():
        mark = "ok "
        if is_well is None:
            mark = "   "
        elif not is_well:
            mark = "BAD"
            all_is_well = False
        print(mark, line, flush=True)

    # This runs in a process of its own, so that a failure there does not hide the lines above.
    command = [sys.executable, str(Path(__file__).with_name("preflight.py")), "--fits"]
    table = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    print(table.stdout, end="")
    if not all_is_well or table.returncode:
        exit_with_error("something is wrong here; the lines above say what")


if __name__ == "__main__":
    main()
