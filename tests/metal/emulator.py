"""
An emulator for `mx.fast.metal_kernel`: it type-checks a kernel, runs it on the CPU and checks it.

In `program.py`, MLX writes the kernel's text and clang checks it. `runtime.cpp` runs the kernel,
with real barriers and simdgroups of 32 threads.

Mode "check" checks each access to memory. It finds accesses out of bounds, races, reads of
uninitialised memory, outputs that no thread wrote, barriers and simdgroup operations that only some
threads reach, and (on x86-64) overflows of 16-bit floats. Mode "fast" checks almost nothing and is
for inputs of real size. Check a kernel before you run it in mode "fast".

The emulator does not know Apple's compiler, the last digits of a GPU's functions, speed, the
watchdog, or the number of registers that a kernel needs. It refuses as a compile error: atomics,
textures, quadgroups, simdgroup matrices, complex numbers, and a kernel's own structs in any memory
but a thread's. It searches for races by element. So if two threads write different bytes of the
same element, it reports a race although there is none.
"""

import contextlib
import ctypes
import functools
import math
import re
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import mlx.core as mx
import numpy as np

from metal import toolchain
from metal.program import (
    MODES,
    MetalCompileError,
    Program,
    build_library,
    describe_line,
    export_program,
    type_check,
)

__all__ = ["MetalCompileError", "MetalRuntimeError", "emulate_metal", "metal_kernel"]

MAX_THREADS = 1024  # in a threadgroup
MAX_THREADGROUP_BYTES = 32 << 10
# Bytes around each array, which no thread may write. They are filled with 0xFF: as floats, nans.
MARGIN = 4096
mlx_metal_kernel = mx.fast.metal_kernel  # MLX's function, before `emulate_metal` replaces it


class MetalRuntimeError(Exception):
    """
    An error of a kernel while it ran.

    kinds: the names of the failed checks, which are keys of DESCRIPTIONS.
    """

    def __init__(self, message: str, kinds: set[str]):
        super().__init__(message)
        self.kinds = kinds


# ---- running a kernel; runtime.cpp defines the same structures


class Buffer(ctypes.Structure):
    _fields_ = [
        ("name", ctypes.c_char_p),
        ("data", ctypes.c_void_p),
        ("size", ctypes.c_ulong),
        ("element_size", ctypes.c_ulong),
        ("is_output", ctypes.c_bool),
        ("is_initialised", ctypes.c_bool),
    ]


class Problem(ctypes.Structure):
    _fields_ = [
        ("kind", ctypes.c_char_p),
        ("what", ctypes.c_char_p),
        ("name", ctypes.c_char_p),
        ("element", ctypes.c_long),
        ("num_elements", ctypes.c_long),
        ("thread", ctypes.c_int),
        ("other_thread", ctypes.c_int),
        ("threadgroup", ctypes.c_uint * 3),
        ("line", ctypes.c_int),
        ("other_line", ctypes.c_int),
        ("pc", ctypes.c_ulong),
        ("other_pc", ctypes.c_ulong),
    ]


class Launch(ctypes.Structure):
    _fields_ = [
        ("kernel", ctypes.c_void_p),
        ("arguments", ctypes.POINTER(ctypes.c_void_p)),
        ("buffers", ctypes.POINTER(Buffer)),
        ("num_buffers", ctypes.c_uint),
        ("grid", ctypes.c_uint * 3),
        ("threadgroup", ctypes.c_uint * 3),
        ("seed", ctypes.c_uint),
        ("is_checked", ctypes.c_bool),
        ("image_begin", ctypes.c_void_p),
        ("image_end", ctypes.c_void_p),
        ("problems", ctypes.POINTER(Problem)),
        ("max_problems", ctypes.c_uint),
        ("num_problems", ctypes.c_uint),
        ("threadgroup_bytes", ctypes.c_ulong),
    ]


@functools.cache
def load_runtime() -> ctypes.CDLL:
    ctypes.CDLL("libm.so.6", mode=ctypes.RTLD_GLOBAL)  # kernels call exp and others
    source = (toolchain.HERE / "runtime.cpp").read_text()
    library = toolchain.build_library("", source, ["-O2"])
    return ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


@functools.cache
def load_kernel(path: Path) -> ctypes.CDLL:
    load_runtime()
    library = ctypes.CDLL(str(path))
    library.emulator_image_begin.restype = ctypes.c_void_p
    library.emulator_image_end.restype = ctypes.c_void_p
    return library


class Memory:
    """A copy of an array's bytes for a kernel, aligned as on Metal, with a margin on both sides."""

    def __init__(
        self, name: str, size: int, element_size: int, *, is_output: bool, is_initialised: bool
    ):
        self.name = name
        self.element_size = element_size
        self.is_output = is_output
        self.is_initialised = is_initialised
        self.bytes_with_margins = np.full(size + 2 * MARGIN + 64, 0xFF, np.uint8)
        self.begin = MARGIN + -(self.bytes_with_margins.ctypes.data + MARGIN) % 64
        self.bytes = self.bytes_with_margins[self.begin : self.begin + size]

    def as_buffer(self) -> Buffer:
        return Buffer(
            name=self.name.encode(),
            data=self.bytes_with_margins.ctypes.data + self.begin,
            size=self.bytes.size,
            element_size=self.element_size,
            is_output=self.is_output,
            is_initialised=self.is_initialised,
        )

    def has_intact_margins(self) -> bool:
        end = self.begin + self.bytes.size
        before = self.bytes_with_margins[: self.begin]
        after = self.bytes_with_margins[end:]
        return bool((before == 0xFF).all() and (after == 0xFF).all())


def to_numpy(array: mx.array) -> np.ndarray:
    """
    A view of an array's elements, with its strides.

    bfloat16 becomes uint16, since numpy has no bfloat16.
    """
    mx.eval(array)
    return np.asarray(array.view(mx.uint16) if array.dtype == mx.bfloat16 else array)


def to_mlx(memory: Memory, shape: Sequence[int], dtype: mx.Dtype) -> mx.array:
    stored_dtype = mx.uint16 if dtype == mx.bfloat16 else dtype
    elements = memory.bytes.view(numpy_dtype(stored_dtype)).reshape(shape)
    return mx.array(elements).view(dtype)


@functools.cache
def numpy_dtype(dtype: mx.Dtype) -> np.dtype:
    return to_numpy(mx.zeros((1,), dtype)).dtype


def make_input_memory(name: str, array: mx.array, contiguous: bool) -> dict[str, Memory]:
    """The memory of an input and of its shape, strides and ndim, which MLX passes with it."""
    elements = to_numpy(array)
    if contiguous:
        elements = np.ascontiguousarray(elements).reshape(array.shape)
    assert min(elements.strides, default=0) >= 0, "negative strides are not emulated"

    num_bytes = 0
    if elements.size:
        axes = zip(elements.shape, elements.strides, strict=True)
        num_bytes = sum((size - 1) * stride for size, stride in axes) + elements.itemsize
    memory = Memory(name, num_bytes, elements.itemsize, is_output=False, is_initialised=True)
    if elements.size:
        ctypes.memmove(memory.bytes.ctypes.data, elements.ctypes.data, num_bytes)

    memory_by_name = {name: memory}
    description = {
        "shape": np.array(elements.shape, np.int32),
        "strides": np.array(elements.strides, np.int64) // elements.itemsize,
        "ndim": np.array([elements.ndim], np.int32),
    }
    for suffix, values in description.items():
        part = Memory(
            f"{name}_{suffix}", values.nbytes, values.itemsize, is_output=False, is_initialised=True
        )
        part.bytes[:] = values.view(np.uint8)
        memory_by_name[part.name] = part
    return memory_by_name


def make_output_memory(name: str, shape: Sequence[int], dtype: mx.Dtype) -> Memory:
    num_bytes = int(np.prod(shape)) * dtype.size
    return Memory(name, num_bytes, dtype.size, is_output=True, is_initialised=False)


LAUNCH_LOCK = threading.Lock()  # the runtime runs one launch at a time


def run_kernel(
    program: Program,
    mode: str,
    memory: dict[str, Memory],
    grid: Sequence[int],
    threadgroup: Sequence[int],
) -> list[tuple[str, str]]:
    """Runs a kernel in place on memory; returns its problems, each as a kind and a description."""
    path = build_library(program, mode)
    library = load_kernel(path)
    buffers = [memory[name].as_buffer() for name in program.arrays]
    pointers = [buffer.data for buffer in buffers]
    problems = (Problem * 16)()
    launch = Launch(
        kernel=ctypes.cast(library.emulator_kernel, ctypes.c_void_p),
        arguments=(ctypes.c_void_p * len(pointers))(*pointers),
        buffers=(Buffer * len(buffers))(*buffers),
        num_buffers=len(buffers),
        grid=tuple(grid),
        threadgroup=tuple(threadgroup),
        seed=1,
        is_checked=mode == "check",
        image_begin=library.emulator_image_begin(),
        image_end=library.emulator_image_end(),
        problems=problems,
        max_problems=len(problems),
    )
    with LAUNCH_LOCK:
        load_runtime().emulator_launch(ctypes.byref(launch))

    descriptions = [
        (problem.kind.decode(), describe_problem(program, path, problem))
        for problem in problems[: launch.num_problems]
    ]
    if launch.threadgroup_bytes > MAX_THREADGROUP_BYTES:
        text = (
            f"{launch.threadgroup_bytes} bytes of threadgroup memory, "
            f"Metal has {MAX_THREADGROUP_BYTES}"
        )
        descriptions.append(("limit", text))
    for name in program.arrays:
        if not memory[name].has_intact_margins():
            descriptions.append(("out-of-bounds", f"write outside of {name}, close to it"))
    return descriptions


DESCRIPTIONS = {
    "out-of-bounds": "{what} of {name}[{element}], which has {num_elements} elements",
    "race": "{what} of {name}[{element}], which {other} accessed{other_place} without a barrier between",
    "uninitialised": "read of {name}[{element}] before it was written",
    "unwritten": "{name}[{element}] of {num_elements} elements was never written; on a Mac it holds garbage",
    "input": "write to the input {name}[{element}]",
    "barrier": "at a {name} while {other} waits at another{other_place} or has returned",
    "divergence": "at {name} without {other} of its simdgroup, which waits at {what}{other_place}",
    "shuffle": "{name} reads from a lane that does not take part",
    "overflow": "a finite float became an infinite {name}",
    "undefined": "{name}",
    "limit": "{what}",
}
SEVERAL, ANOTHER_THREADGROUP = -2, -3


def describe_problem(program: Program, library: Path, problem: Problem) -> str:
    """A sentence with the problem, the thread and the line of the kernel."""
    fields = {}
    for name, *_ in problem._fields_:
        value = getattr(problem, name)
        fields[name] = value.decode() if isinstance(value, bytes) else value
    other_threads = {SEVERAL: "several other threads", ANOTHER_THREADGROUP: "another threadgroup"}
    fields["other"] = other_threads.get(problem.other_thread, f"thread {problem.other_thread}")
    other_line = find_line(library, problem.other_pc) or problem.other_line
    fields["other_place"] = f" ({describe_line(program, other_line)})" if other_line else ""

    text = DESCRIPTIONS[fields["kind"]].format(**fields)
    if problem.thread >= 0:
        text += f", by thread {problem.thread} of threadgroup {tuple(problem.threadgroup)}"
    line = find_line(library, problem.pc) or problem.line
    return f"{text}: {describe_line(program, line)}" if line else text


def find_line(library: Path, offset: int) -> int:
    """
    The kernel's line at an offset of its library; of inlined functions, the innermost line.

    It is 0 if binutils is not installed.
    """
    addr2line = shutil.which("addr2line")
    if not offset or not addr2line:
        return 0
    command = [addr2line, "-i", "-e", str(library), hex(offset)]
    output = subprocess.run(command, capture_output=True, text=True).stdout
    line = re.search(r"\bkernel:(\d+)", output)
    return int(line[1]) if line else 0


# ---- the replacement of mx.fast.metal_kernel


def metal_kernel(
    name: str,
    input_names: Sequence[str],
    output_names: Sequence[str],
    source: str,
    header: str = "",
    ensure_row_contiguous: bool = True,
    *,
    mode: str = "check",
) -> Callable[..., list[mx.array]]:
    """
    A function that runs a kernel on the CPU, immediately; the arguments of `mx.fast.metal_kernel`.

    mode: "check" or "fast". The function raises MetalCompileError, MetalRuntimeError, or MLX's
    ValueError if arguments do not fit the kernel.
    """
    kernel = mlx_metal_kernel(
        name, input_names, output_names, source, header, ensure_row_contiguous
    )
    assert mode in MODES, mode

    def call(
        *,
        inputs: Sequence[Any],
        output_shapes: Sequence[Sequence[int]],
        output_dtypes: Sequence[mx.Dtype],
        grid: tuple[int, int, int],
        threadgroup: tuple[int, int, int],
        template: Sequence[tuple[str, Any]] | None = None,
    ) -> list[mx.array]:
        arrays = [x if isinstance(x, mx.array) else mx.array(x) for x in inputs]
        arguments = {
            "output_shapes": output_shapes,
            "output_dtypes": output_dtypes,
            "template": template,
            "grid": grid,
            "threadgroup": threadgroup,
        }
        program = export_program(kernel, header, source, arrays, arguments)
        type_check(program)
        num_threads = math.prod(map(min, grid, threadgroup))
        if num_threads > MAX_THREADS:
            raise MetalRuntimeError(
                f"{program.name}: {num_threads} threads in a threadgroup", {"limit"}
            )

        memory: dict[str, Memory] = {}
        for input_name, array in zip(input_names, arrays, strict=True):
            memory |= make_input_memory(input_name, array, ensure_row_contiguous)
        outputs = list(zip(output_names, output_shapes, output_dtypes, strict=True))
        for output_name, shape, dtype in outputs:
            memory[output_name] = make_output_memory(output_name, shape, dtype)

        problems = run_kernel(program, mode, memory, grid, threadgroup)
        if problems:
            lines = [f"{program.name}:", *(f"[{kind}] {text}" for kind, text in problems)]
            raise MetalRuntimeError("\n  ".join(lines), {kind for kind, _ in problems})

        results = [
            to_mlx(memory[output_name], shape, dtype) for output_name, shape, dtype in outputs
        ]
        return refuse_gradients(arrays, results)

    return call


def refuse_gradients(inputs: list[mx.array], outputs: list[mx.array]) -> list[mx.array]:
    """
    The outputs as functions of the inputs. Differentiation raises an error, as for MLX's kernels.

    If the outputs were constants, their gradient would be 0.
    """

    @mx.custom_function
    def kernel(*inputs: mx.array) -> tuple[mx.array, ...]:
        return tuple(outputs)

    @kernel.vjp
    def backward(*_: Any) -> None:
        raise ValueError("[Primitive::vjp] Not implemented for CustomKernel.")

    return list(kernel(*inputs))


@contextlib.contextmanager
def emulate_metal(mode: str = "check") -> Iterator[None]:
    """
    Makes `mx.fast.metal_kernel` emulate kernels, and `mx.metal.is_available()` return True.

    On a Mac it does nothing. It suits code that makes its kernels when it calls them, and caches
    them by `mx.fast.metal_kernel`. A kernel runs when it is called, so `mx.compile` is off.
    """
    if mx.metal.is_available():
        yield
        return
    emulated_metal_kernel = functools.partial(metal_kernel, mode=mode)
    with (
        mock.patch.object(mx.fast, "metal_kernel", emulated_metal_kernel),
        mock.patch.object(mx.metal, "is_available", lambda: True),
    ):
        mx.disable_compile()
        try:
            yield
        finally:
            mx.enable_compile()
