"""When a kernel runs and when its expression does; the same bodies as CUDA; the doctor. No kernel is run here."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

import gpu
import gwen
import ops

ROOT = Path(gwen.__file__).parent


class StandIn:
    """In the place of `mx.fast.metal_kernel`: kernels that do what they are told, and a list of their calls."""

    def __init__(self, compute: Callable[..., list[mx.array]]):
        self.compute, self.calls = compute, []

    def __call__(self, **made: Any) -> Callable[..., list[mx.array]]:
        def kernel(**call: Any) -> list[mx.array]:
            self.calls.append({**made, **call})
            return self.compute(**call)

        return kernel


@pytest.fixture
def double(monkeypatch, tmp_path):
    """A kernel that should double, on a device that is said to be a GPU; `put(f)` makes it compute f(x)."""
    monkeypatch.setattr(gpu, "KERNELS", {})
    monkeypatch.setattr(gpu, "backend", lambda: "metal")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("GWEN_KERNELS", raising=False)

    def put(function: Callable[[mx.array], mx.array], source: str = "") -> gpu.Kernel:
        stand_in = StandIn(lambda inputs, **_: [function(inputs[0])])
        monkeypatch.setattr(mx.fast, "metal_kernel", stand_in)
        gpu.KERNELS.clear()
        kernel = gpu.Kernel("double", ["x"], ["out"], source)

        @kernel.has_example
        def _(dtype: mx.Dtype, large: bool) -> gpu.Example:
            x = mx.arange(4).astype(dtype)
            size = {"grid": (4, 1, 1), "threadgroup": (4, 1, 1)}
            return gpu.Example(lambda: kernel([x], [(x.shape, dtype)], **size), lambda: [2 * x])

        kernel.stand_in = stand_in  # type: ignore[attr-defined]
        return kernel

    return put


def test_a_kernel_that_agrees_runs_and_is_checked_once(double, capsys):
    kernel = double(lambda x: x + x)
    assert kernel.runs(mx.float32) and kernel.runs(mx.float32)
    assert len(kernel.stand_in.calls) == 1
    again = double(lambda x: x + x)  # as in the next process
    assert again.runs(mx.float32) and not again.stand_in.calls
    assert again.runs(mx.float16) and len(again.stand_in.calls) == 1  # another type
    assert double(lambda x: x + x, source="new").runs(mx.float32)
    assert len(gpu.KERNELS["double"].stand_in.calls) == 1  # another body
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("wrong", [lambda x: 2.001 * x, lambda x: x * mx.nan, lambda x: (2 * x)[:3]])
def test_a_kernel_that_disagrees_is_off_for_the_run_and_named_once(double, capsys, wrong):
    kernel = double(wrong)
    assert not kernel.runs(mx.float32) and not kernel.runs(mx.float32)
    said = capsys.readouterr().err
    assert said.startswith("gwen: the kernel double is off for mlx.core.float32: it differs") and said.count("\n") == 1
    assert double(lambda x: 2 * x).runs(mx.float32)  # no verdict was kept against it


def test_a_kernel_that_does_not_compile_is_off_and_says_why(double, capsys):
    def fail(x: mx.array) -> mx.array:
        raise RuntimeError("[metal::Device] Unable to build metal library from source\nprogram_source:7: error")

    assert not double(fail).runs(mx.float32)
    assert "double is off for mlx.core.float32: [metal::Device] Unable to build metal" in capsys.readouterr().err


def test_a_verdict_is_as_old_as_the_files_of_the_kernel_its_call_and_its_expression(double, monkeypatch, tmp_path):
    copy = tmp_path / "changed.py"
    copy.write_text(Path(__file__).read_text() + "\n")
    double(lambda x: 2 * x).runs(mx.float32)
    for file, checks in ((__file__, 0), (str(copy), 1)):
        kernel = double(lambda x: 2 * x)
        monkeypatch.setattr(gpu.inspect, "getfile", lambda _, file=file: file)
        assert kernel.runs(mx.float32) and len(kernel.stand_in.calls) == checks


def test_a_verdict_depends_on_the_modules_that_the_expression_calls(monkeypatch):
    read, kernel = [], gpu.KERNELS["row_losses"]
    text = Path.read_text
    monkeypatch.setattr(Path, "read_text", lambda path, **how: read.append(path.name) or text(path, **how))
    kernel._fingerprint("metal", mx.float32)
    assert [name for name in read if name.endswith(".py")] == ["gpu.py", "grpo.py", "ops.py", "softmax.py"]


def test_a_home_that_cannot_be_written_to_costs_a_check_and_nothing_else(double, monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert double(lambda x: 2 * x).runs(mx.float32)


def test_the_variable_chooses_and_refuses_what_it_does_not_know(double, monkeypatch):
    kernel = double(lambda x: 2 * x)
    for value, runs in (("off", False), ("on", True), ("double", True), ("", True), ("off", False)):
        monkeypatch.setenv("GWEN_KERNELS", value)
        assert kernel.runs(mx.float32) is runs, value
    monkeypatch.setenv("GWEN_KERNELS", "double,triple")
    with pytest.raises(ValueError, match="GWEN_KERNELS='double,triple': 'triple' is none of on, off, double"):
        kernel.runs(mx.float32)
    gpu.Kernel("other", ["x"], ["out"], "")
    monkeypatch.setenv("GWEN_KERNELS", "other")
    assert not kernel.runs(mx.float32)


def test_on_a_cpu_no_kernel_runs_or_is_made(double, monkeypatch):
    kernel = double(lambda x: 2 * x)
    monkeypatch.setattr(gpu, "backend", lambda: "")
    assert not kernel.runs(mx.float32) and not kernel.stand_in.calls
    monkeypatch.undo()
    assert gpu.backend() == ("" if mx.default_device().type != mx.gpu else gpu.backend())


def test_whole_numbers_must_be_equal_and_infinities_must_match():
    def compare(ours: list[Any], theirs: list[Any], dtype: mx.Dtype = mx.float32) -> float:
        pair = [mx.array(ours, dtype=dtype)], [mx.array(theirs, dtype=dtype)]
        return gpu.disagreement(gpu.Example(lambda: pair[0], lambda: pair[1]), mx.float32)

    assert compare([1, 2], [1, 2], mx.int32) == 0 and compare([1, 2], [1, 3], mx.int32) == float("inf")
    assert compare([1.0, -np.inf, np.nan], [1.0, -np.inf, np.nan]) == 0
    assert compare([1.0, -np.inf], [1.0, -1e30]) == float("inf") == compare([1.0, 0.0], [1.0, np.nan])
    assert compare([2.0], [2.0 + 3e-4]) == pytest.approx(1.0, rel=0.01)


# ---- CUDA

CUDA_TYPES = {
    mx.float32: "float",
    mx.float16: "__half",
    mx.bfloat16: "__nv_bfloat16",
    mx.int32: "int32_t",
    mx.uint32: "uint32_t",
    mx.int64: "int64_t",
    mx.bool_: "bool",
}
CUDA_BEGIN = """
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda/std/array>
#include <cuda/std/limits>
#define inf cuda::std::numeric_limits<float>::infinity()
namespace mlx::core::cu {
using Shape = cuda::std::array<int32_t, 8>;
using Strides = cuda::std::array<int64_t, 8>;
}
"""


def cuda_text(call: dict[str, Any]) -> str:
    """The function that MLX puts around a body: scalars by value, inputs as pointers, template arguments inside."""
    parameters, source = [], call["source"]
    for name, x in zip(call["input_names"], call["inputs"], strict=True):
        parameters.append(f"const {CUDA_TYPES[x.dtype]}* {name}")
        for part, kind in (("shape", "Shape"), ("strides", "Strides")):
            if f"{name}_{part}" in source:
                parameters.append(f"const __grid_constant__ {kind} {name}_{part}")
    for name, dtype in zip(call["output_names"], call["output_dtypes"], strict=True):
        parameters.append(f"{CUDA_TYPES[dtype]}* {name}")
    constants = ""
    for name, value in call["template"]:
        if isinstance(value, mx.Dtype):
            constants += f"using {name} = {CUDA_TYPES[value]};\n"
        else:
            constants += f"constexpr {type(value).__name__} {name} = {str(value).lower()};\n"
    return f"__global__ void {call['name']}({', '.join(parameters)}) {{\n{constants}{source}\n}}\n"


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="there is no nvcc")
@pytest.mark.parametrize("dtype", list(gpu.TOLERANCES), ids=str)
def test_every_body_compiles_as_cuda(monkeypatch, tmp_path, dtype):
    def nothing(output_shapes: Any, output_dtypes: Any, **_: Any) -> list[mx.array]:
        return [mx.zeros(shape, kind) for shape, kind in zip(output_shapes, output_dtypes, strict=True)]

    stand_in = StandIn(nothing)
    monkeypatch.setattr(mx.fast, "cuda_kernel", stand_in)
    monkeypatch.setattr(gpu, "backend", lambda: "cuda")
    for kernel in gpu.KERNELS.values():
        for large in (False, True):
            kernel.example(dtype, large).kernel()
    assert len(stand_in.calls) > 2 * len(gpu.KERNELS)  # some examples run a kernel with several constants
    text, seen = CUDA_BEGIN + gpu.CUDA_PRELUDE, set()
    for number, call in enumerate(stand_in.calls):
        header = call["header"].removeprefix(gpu.CUDA_PRELUDE)
        text += "" if header in seen else header
        seen.add(header)
        function = cuda_text({**call, "name": f"{call['name']}_{number}"})
        text += f"namespace mlx::core::cu {{\n{function}}}\n"
    (tmp_path / "kernels.cu").write_text(text)
    command = ["nvcc", "-ptx", "-arch=sm_80", "-Werror", "all-warnings", "-o", str(tmp_path / "out.ptx")]
    done = subprocess.run([*command, str(tmp_path / "kernels.cu")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out.ptx").read_text().count(".entry") == len(stand_in.calls)


def test_a_launch_of_many_tokens_stays_within_cudas_grid(monkeypatch):
    """Its second and third dimension end at 65,535; an M1 has no such limit."""
    stand_in = StandIn(lambda output_shapes, output_dtypes, **_: [mx.zeros(s) for s in output_shapes])
    monkeypatch.setattr(mx.fast, "cuda_kernel", stand_in)
    monkeypatch.setattr(gpu, "backend", lambda: "cuda")
    rope, weight, tokens = ops.Rope(2, 1e4), mx.ones((2,)), 70_000
    rotation = ops.Rotation(mx.array([0]), None, None)
    ops.norm_rope_kernel(mx.zeros((1, tokens, 3, 2)), 1, (weight, weight), 1e-6, rope, rotation)
    ops.swiglu_kernel(mx.zeros((tokens, 2)))
    ops.add_norm_kernel(mx.zeros((tokens, 2)), mx.zeros((tokens, 2)), weight, 1e-6)
    grids = {
        call["name"]: [-(-threads // size) for threads, size in zip(call["grid"], call["threadgroup"], strict=True)]
        for call in stand_in.calls
    }
    assert set(grids) == {"gwen_norm_rope", "gwen_swiglu", "gwen_add_norm"}
    assert all(max(grid[1:]) <= 65_535 for grid in grids.values()), grids


def test_metals_words_become_cudas():
    text = "inline float f(threadgroup float* x) {}\n    threadgroup float sums[8];\n    device T* out = keys;"
    assert gpu.cuda_source(text) == (
        "__device__ inline float f(float* x) {}\n    __shared__ float sums[8];\n    T* out = keys;"
    )


# ---- the doctor


def run_doctor(**environment: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "gwen.py", "--doctor"]
    env = {**os.environ, "HF_HUB_OFFLINE": "1", **environment}
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)


@pytest.mark.skipif(gpu.backend() != "", reason="a GPU is at hand")
def test_the_doctor_says_what_runs_here_and_what_a_mac_would_do():
    done = run_doctor()
    assert (done.returncode, done.stderr) == (0, "")
    lines = dict(line.strip().split(" ", 1) for line in done.stdout.splitlines())
    assert list(lines) == [*"versions: machine: memory: device: BLAS: rope: hub: kernels:".split(), *gpu.KERNELS]
    assert "mlx 0." in lines["versions:"] and lines["device:"] == "cpu, where models are float32"
    assert lines["rope:"].startswith("right, within ") and "is out of reach (OfflineModeIsEnabled)" in lines["hub:"]
    assert all("ms | runs: no GPU. A Mac would check and run a kernel" in lines[name] for name in gpu.KERNELS)


def test_the_doctor_refuses_a_variable_it_does_not_know():
    for environment, words in (({"GWEN_KERNELS": "fast"}, "GWEN_KERNELS='fast'"), ({"GWEN_DTYPE": "int4"}, "'int4'")):
        done = run_doctor(**environment)
        assert done.returncode == 2 and words in done.stderr and done.stderr.count("\n") == 1


def test_the_doctor_reports_a_kernel_that_is_wrong(double):
    double(lambda x: 2 * x)
    lines, agree = gpu.report(mx.float32)
    assert agree and "| agrees | runs: metal kernel" in lines[0]
    double(lambda x: 3 * x)
    lines, agree = gpu.report(mx.float32)
    assert not agree and "| runs: the kernel is OFF, it differs from its expression" in lines[0]


def test_the_doctor_fails_where_rope_is_wrong(monkeypatch, capsys):
    monkeypatch.setattr(gpu, "KERNELS", {})
    monkeypatch.setattr(gwen, "rope_error", lambda dtype: 1.0)
    with pytest.raises(SystemExit) as status:
        gwen.main(["--doctor"])
    said = capsys.readouterr()
    assert status.value.code == 2 and "rope: WRONG, within 1 of its formula" in said.out and "error:" in said.err


def test_ropes_error_is_that_of_float32_and_would_show_a_wrong_position(monkeypatch):
    assert gwen.rope_error(mx.float32) < 1e-4
    original = ops.Rope.at
    monkeypatch.setattr(ops.Rope, "at", lambda self, offsets, length: original(self, offsets[:1] + 0 * offsets, length))
    assert gwen.rope_error(mx.float32) > 0.5
