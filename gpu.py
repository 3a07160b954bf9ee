"""
Kernels for a GPU: how one is made, whether this machine may use it, and what it may be replaced by.

A kernel is written once, in Metal's language, beside the plain expression that it equals. It is made when it is first
called: by `mx.fast.metal_kernel` from the body as it stands, or by `mx.fast.cuda_kernel` from the body behind a prelude
that explains Metal's words to CUDA. At its first use on a device it must agree with its expression on a small example,
once for each version of either, device and type; a kernel that does not, or does not compile, is left out for the run
and named on stderr. On a CPU the expressions run. GWEN_KERNELS=off|on|name,name chooses.

What is left out: the kernels themselves, which are in ops.py and softmax.py.
"""

import contextlib
import functools
import hashlib
import inspect
import os
import platform
import re
import sys
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx

# Metal's words in CUDA's: 32 threads of a simdgroup are a warp, a threadgroup is a block. Blocks are not cut to the
# grid as threadgroups are, so every body asks whether its thread is inside. Threadgroups are at most two-dimensional.
CUDA_PRELUDE = """
#define thread_position_in_grid \\
    make_uint3(blockIdx.x * blockDim.x + threadIdx.x, blockIdx.y * blockDim.y + threadIdx.y, blockIdx.z)
#define threadgroup_position_in_grid blockIdx
#define thread_index_in_threadgroup (threadIdx.y * blockDim.x + threadIdx.x)
#define thread_index_in_simdgroup (thread_index_in_threadgroup % 32)
#define simdgroup_index_in_threadgroup (thread_index_in_threadgroup / 32)
#define threadgroup_barrier(scope) __syncthreads()
#ifndef INFINITY
#define INFINITY __int_as_float(0x7f800000)
#endif
typedef unsigned int uint;
namespace metal {
__device__ inline float exp(float x) { return expf(x); }
__device__ inline float log(float x) { return logf(x); }
__device__ inline float cos(float x) { return cosf(x); }
__device__ inline float sin(float x) { return sinf(x); }
__device__ inline float rsqrt(float x) { return 1.0f / sqrtf(x); }
__device__ inline float max(float x, float y) { return fmaxf(x, y); }
__device__ inline float min(float x, float y) { return fminf(x, y); }
}
__device__ inline float simd_broadcast(float x, uint lane) { return __shfl_sync(0xffffffffu, x, lane); }
__device__ inline float simd_sum(float x) {
    for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
    return x;
}
__device__ inline float simd_max(float x) {
    for (int step = 16; step > 0; step /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, step));
    return x;
}
"""


def on_gpu() -> bool:
    """Whether MLX computes on a GPU (Metal or CUDA)."""
    return mx.default_device().type == mx.gpu


def backend() -> str:
    """Where kernels would run now: "metal", "cuda", or "" on a CPU."""
    if mx.default_device().type != mx.gpu:
        return ""
    return "metal" if mx.metal.is_available() else "cuda"


def cuda_source(source: str) -> str:
    """A body or header in CUDA's words, to stand behind CUDA_PRELUDE."""
    source = re.sub(r"^( *)threadgroup (?=\w+ \w+\[)", r"\1__shared__ ", source, flags=re.M)
    source = re.sub(r"^inline ", "__device__ inline ", source, flags=re.M)
    return re.sub(r"\b(device|constant|threadgroup|thread) ", "", source)


class Example(NamedTuple):
    """A kernel and its expression on the same arrays; each gives a sequence of arrays."""

    kernel: Callable[[], Sequence[mx.array]]
    reference: Callable[[], Sequence[mx.array]]


def normal(*shape: int, dtype: mx.Dtype, seed: int = 0, scale: float = 1.0) -> mx.array:
    """An array for an example, the same every time."""
    return (mx.random.normal(shape, key=mx.random.key(seed)) * scale).astype(dtype)


@functools.lru_cache(maxsize=None, typed=True)  # typed: 0.0 and False are equal
def constant(*values: float | bool) -> mx.array:
    """Numbers for a kernel, which takes arrays only; of settings, so few are ever made."""
    return mx.array(values)


TOLERANCES = {mx.float32: 1e-4, mx.float16: 4e-3, mx.bfloat16: 3e-2}


def disagreement(example: Example, dtype: mx.Dtype) -> float:
    """
    The largest |kernel - reference| / (1 + |reference|) as a share of the type's tolerance: at most 1 agrees.

    Whole numbers must be equal, and what is infinite in one must be so in the other; else the answer is infinite.
    """
    worst = 0.0
    for ours, theirs in zip(example.kernel(), example.reference(), strict=True):
        if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
            return float("inf")
        if not mx.issubdtype(ours.dtype, mx.floating):
            worst = max(worst, 0.0 if mx.array_equal(ours, theirs).item() else float("inf"))
            continue
        x, y = ours.astype(mx.float32), theirs.astype(mx.float32)
        same = (x == y) | (mx.isnan(x) & mx.isnan(y))  # infinities less each other would be nan
        error = mx.where(same, 0.0, mx.abs(x - y) / (1 + mx.abs(y)))
        largest: Any = mx.where(mx.isnan(error), mx.inf, error).max().item()
        worst = max(worst, largest / TOLERANCES[dtype])
    return worst


KERNELS: dict[str, "Kernel"] = {}  # by name, in the order in which they are written


class Kernel:
    """
    One kernel: its body in Metal's language, made for the backend at hand when it is called.

    inputs, outputs: the names that the body uses. Scalars are passed as arrays of one: CUDA knows no other.
    source, header: as for `mx.fast.metal_kernel`. contiguous: whether inputs are copied into row-major order first; a
    body that does without uses their `_strides`.
    """

    def __init__(
        self,
        name: str,
        inputs: list[str],
        outputs: list[str],
        source: str,
        *,
        header: str = "",
        contiguous: bool = True,
    ):
        assert name not in KERNELS, name
        self.name, self.inputs, self.outputs, self.source, self.header = name, inputs, outputs, source, header
        self.contiguous = contiguous
        self.example: Callable[[mx.Dtype, bool], Example] | None = None
        self._made: dict[Any, Any] = {}  # by what made it
        self._runs: dict[tuple[Any, ...], bool] = {}
        KERNELS[name] = self

    def has_example(self, example: Callable[[mx.Dtype, bool], Example]) -> Callable[[mx.Dtype, bool], Example]:
        """Decorates a function of (dtype, large): small examples are checked, large ones are timed."""
        self.example = example
        return example

    def make(self, place: str) -> Any:
        """MLX's object for the kernel; whatever stands in the place of its maker makes another."""
        maker = mx.fast.metal_kernel if place == "metal" else mx.fast.cuda_kernel
        if maker not in self._made:
            source, header = self.source, self.header
            if place == "cuda":
                source, header = cuda_source(source), CUDA_PRELUDE + cuda_source(header)
            self._made[maker] = maker(
                name=f"gwen_{self.name}",
                input_names=self.inputs,
                output_names=self.outputs,
                source=source,
                header=header,
                ensure_row_contiguous=self.contiguous,
            )
        return self._made[maker]

    def __call__(
        self,
        inputs: list[mx.array],
        outputs: Sequence[tuple[Sequence[int], mx.Dtype]],
        *,
        grid: tuple[int, int, int],
        threadgroup: tuple[int, int, int],
        **template: int | bool | mx.Dtype,
    ) -> list[mx.array]:
        """
        Queues the kernel: outputs are (shape, dtype), `grid` counts threads, `template` gives constants and types.

        Constants are compiled in, one kernel each: only what a model or its type fixes may be one.
        """
        return self.make(backend())(
            inputs=inputs,
            output_shapes=[shape for shape, _ in outputs],
            output_dtypes=[dtype for _, dtype in outputs],
            grid=grid,
            threadgroup=threadgroup,
            template=list(template.items()),
        )

    def runs(self, dtype: mx.Dtype) -> bool:
        """Whether to call it now for arrays of `dtype`; the first time on a GPU it is checked, which takes a moment."""
        place = backend()
        if not place or dtype not in TOLERANCES:
            return False
        key = place, dtype, os.environ.get("GWEN_KERNELS")
        if key not in self._runs:
            self._runs[key] = is_wanted(self.name) and self._is_trusted(place, dtype)
        return self._runs[key]

    def check(self, dtype: mx.Dtype) -> str:
        """Why the kernel must not be used on this device, or "": on its small example it agrees."""
        assert self.example is not None, f"{self.name} has no example"
        try:
            share = disagreement(self.example(dtype, False), dtype)
        except (RuntimeError, ValueError) as error:  # MLX's, of a kernel that does not compile
            return " ".join(str(error).split())[:300]
        return "" if share <= 1 else f"it differs from its expression by {share:.3g} times what {dtype} allows"

    def _is_trusted(self, place: str, dtype: mx.Dtype) -> bool:
        stamp = cache_directory() / f"kernel-{self.name}-{self._fingerprint(place, dtype)}"
        if stamp.exists():
            return True
        reason = self.check(dtype)
        if reason:
            print(f"gwen: the kernel {self.name} is off for {dtype}: {reason}", file=sys.stderr)
            return False
        with contextlib.suppress(OSError):  # a home that cannot be written to: checked again next time
            stamp.parent.mkdir(parents=True, exist_ok=True)
            stamp.touch()
        return True

    def _fingerprint(self, place: str, dtype: mx.Dtype) -> str:
        """Of everything that a verdict depends on."""
        device = mx.device_info().get("device_name", "")
        parts = [place, str(dtype), str(device), version("mlx"), platform.platform(), self.source, self.header]
        assert self.example is not None, f"{self.name} has no example"
        # CUDA's prelude; the call and the expression; and the modules of ours that the expression calls
        modules = filter(inspect.ismodule, self.example.__globals__.values())
        used = [Path(str(getattr(module, "__file__", ""))) for module in modules]
        ours = (file for file in used if file.parent == Path(__file__).parent)
        files = {Path(__file__), Path(inspect.getfile(self.example)), *ours}
        parts += [file.read_text(encoding="utf-8") for file in sorted(files)]
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def cache_directory() -> Path:
    """Where verdicts are kept."""
    usual = Path.home() / ("Library/Caches" if sys.platform == "darwin" else ".cache")
    return Path(os.environ.get("XDG_CACHE_HOME") or usual) / "gwen"


def is_wanted(name: str) -> bool:
    """Whether GWEN_KERNELS asks for the kernel; unset it asks for all. Raises ValueError when it names no kernel."""
    value = os.environ.get("GWEN_KERNELS") or "on"
    if value in ("on", "off"):
        return value == "on"
    names = [part.strip() for part in value.split(",")]
    for part in names:
        if part not in KERNELS:
            raise ValueError(f"GWEN_KERNELS={value!r}: {part!r} is none of on, off, {', '.join(KERNELS)}")
    return name in names


def milliseconds(function: Callable[[], Sequence[mx.array]], runs: int = 3) -> float:
    """Median wall time of one call, after one that is not counted."""
    seconds = []
    for _ in range(runs + 1):
        begin = time.perf_counter()
        mx.eval(function())  # wait
        seconds.append(time.perf_counter() - begin)
    return sorted(seconds[1:])[runs // 2] * 1e3


def report(dtype: mx.Dtype) -> tuple[list[str], bool]:
    """One line a kernel, which says what runs here, why, and how long it takes; and whether all agree."""
    place, lines, agree = backend(), [], True
    for name, kernel in KERNELS.items():
        assert kernel.example is not None, f"{name} has no example"
        wanted, example = is_wanted(name), kernel.example(dtype, True)
        expression_ms = milliseconds(example.reference)
        times = f"{name:17} expression {expression_ms:8.2f} ms"
        if not place:
            lines.append(f"{times} | runs: no GPU. A Mac would {'check and run a kernel' if wanted else 'run it too'}")
            continue
        reason = kernel.check(dtype)
        if reason:
            lines.append(f"{times} | runs: the kernel is OFF, {reason}")
            agree = False
            continue
        kernel_ms = milliseconds(example.kernel)
        choice = f"{place} kernel" if wanted else "expression, as GWEN_KERNELS says"
        lines.append(
            f"{times}, kernel {kernel_ms:8.2f} ms ({expression_ms / kernel_ms:.2f}x) | agrees | runs: {choice}"
        )
    return lines, agree
