"""
An emulator for `mx.fast.metal_kernel`: type-checks a kernel, runs it on the CPU and watches what it does.

`program.py` has MLX write the kernel's text and clang check it; `runtime.cpp` runs it, with true barriers and
simdgroups of 32 threads. In mode "check" each access to memory is watched: bounds, races, reads of what nobody wrote,
outputs that nobody wrote, barriers and simdgroup operations that only some threads reach, and (on x86-64) overflows of
16-bit floats. In mode "fast" almost nothing is, for inputs of real size: check a kernel before it runs fast.

What it cannot know: Apple's compiler, the last digits of a GPU's functions, speed, the watchdog, how many registers a
kernel needs. Not emulated, and so a compile error: atomics, textures, quadgroups, simdgroup matrices, complex numbers,
and structs of one's own in any memory but a thread's. A race is looked for by element, so bytes of one element written
by two threads are one too many.
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
from metal.program import MODES, MetalCompileError, Program, build, export, place, type_check

__all__ = ["MetalCompileError", "MetalRuntimeError", "metal_kernel", "patched"]

MAX_THREADS = 1024  # in a threadgroup
MAX_THREADGROUP_BYTES = 32 << 10
MARGIN = 4096  # bytes around each array that nothing may write; filled with 0xFF, which read as floats are no numbers
make_metal_kernel = mx.fast.metal_kernel  # MLX's own, whatever stands in its place later


class MetalRuntimeError(Exception):
    """The kernel did what it must not. `kinds` names the checks that failed: keys of DESCRIPTIONS, or "limit"."""

    def __init__(self, message: str, kinds: set[str]):
        super().__init__(message)
        self.kinds = kinds


# ---- running; the structures are those of runtime.cpp


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
def runtime() -> ctypes.CDLL:
    ctypes.CDLL("libm.so.6", mode=ctypes.RTLD_GLOBAL)  # where kernels find exp and the like
    library = toolchain.build("", (toolchain.HERE / "runtime.cpp").read_text(), ["-O2"])
    return ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


@functools.cache
def load(library: Path) -> ctypes.CDLL:
    runtime()
    loaded = ctypes.CDLL(str(library))
    for name in ("emulator_image_begin", "emulator_image_end"):
        getattr(loaded, name).restype = ctypes.c_void_p
    return loaded


class Memory:
    """An array as a kernel sees it: a copy of its bytes, aligned as Metal aligns, between margins."""

    def __init__(
        self, name: str, size: int, element_size: int, *, is_output: bool, is_initialised: bool
    ):
        self.name, self.element_size = name, element_size
        self.is_output, self.is_initialised = is_output, is_initialised
        self.whole = np.full(size + 2 * MARGIN + 64, 0xFF, np.uint8)
        self.begin = MARGIN + -(self.whole.ctypes.data + MARGIN) % 64
        self.bytes = self.whole[self.begin : self.begin + size]

    def as_buffer(self) -> Buffer:
        size, data = self.bytes.size, self.whole.ctypes.data + self.begin
        return Buffer(
            self.name.encode(), data, size, self.element_size, self.is_output, self.is_initialised
        )

    def margins_are_whole(self) -> bool:
        margins = self.whole[: self.begin], self.whole[self.begin + self.bytes.size :]
        return all(bool((margin == 0xFF).all()) for margin in margins)


def to_numpy(array: mx.array) -> np.ndarray:
    """The elements of an array in place, with its strides; bfloat16, which numpy has not, as uint16."""
    mx.eval(array)
    return np.asarray(array.view(mx.uint16) if array.dtype == mx.bfloat16 else array)


def to_mlx(memory: Memory, shape: Sequence[int], dtype: mx.Dtype) -> mx.array:
    carrier = mx.uint16 if dtype == mx.bfloat16 else dtype
    elements = memory.bytes.view(numpy_dtype(carrier)).reshape(shape)
    return mx.array(elements).view(dtype) if dtype == mx.bfloat16 else mx.array(elements)


@functools.cache
def numpy_dtype(dtype: mx.Dtype) -> np.dtype:
    return to_numpy(mx.zeros((1,), dtype)).dtype


def input_memory(name: str, array: mx.array, contiguous: bool) -> dict[str, Memory]:
    """An input and what MLX passes along with it: shape, strides, ndim."""
    elements = to_numpy(array)
    if contiguous:
        elements = np.ascontiguousarray(elements).reshape(array.shape)
    assert min(elements.strides, default=0) >= 0, "an array that is read backwards is not emulated"
    reach = sum(
        (size - 1) * stride for size, stride in zip(elements.shape, elements.strides, strict=True)
    )
    size = reach + elements.itemsize if elements.size else 0
    memory = Memory(name, size, elements.itemsize, is_output=False, is_initialised=True)
    if elements.size:
        ctypes.memmove(memory.bytes.ctypes.data, elements.ctypes.data, size)
    described = {name: memory}
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
        described[part.name] = part
    return described


def output_memory(name: str, shape: Sequence[int], dtype: mx.Dtype) -> Memory:
    return Memory(
        name, int(np.prod(shape)) * dtype.size, dtype.size, is_output=True, is_initialised=False
    )


RUNNING = threading.Lock()  # the runtime runs one launch at a time


def run(
    program: Program,
    mode: str,
    memory: dict[str, Memory],
    grid: Sequence[int],
    threadgroup: Sequence[int],
) -> list[tuple[str, str]]:
    """Runs a kernel on memory in place; the problems that were found, as kind and description."""
    library = build(program, mode)
    loaded = load(library)
    buffers = [memory[name].as_buffer() for name in program.arrays]
    pointers, problems = [buffer.data for buffer in buffers], (Problem * 16)()
    launch = Launch(
        kernel=ctypes.cast(loaded.emulator_kernel, ctypes.c_void_p),
        arguments=(ctypes.c_void_p * len(pointers))(*pointers),
        buffers=(Buffer * len(buffers))(*buffers),
        num_buffers=len(buffers),
        grid=tuple(grid),
        threadgroup=tuple(threadgroup),
        seed=1,
        is_checked=mode == "check",
        image_begin=loaded.emulator_image_begin(),
        image_end=loaded.emulator_image_end(),
        problems=problems,
        max_problems=len(problems),
    )
    with RUNNING:
        runtime().emulator_launch(ctypes.byref(launch))
    seen = problems[: launch.num_problems]
    found = [(problem.kind.decode(), describe(program, library, problem)) for problem in seen]
    if launch.threadgroup_bytes > MAX_THREADGROUP_BYTES:
        text = f"{launch.threadgroup_bytes} bytes of threadgroup memory, Metal has {MAX_THREADGROUP_BYTES}"
        found.append(("limit", text))
    for name in program.arrays:
        if not memory[name].margins_are_whole():
            found.append(("out-of-bounds", f"write outside of {name}, close to it"))
    return found


DESCRIPTIONS = {
    "out-of-bounds": "{what} of {name}[{element}], which has {num_elements} elements",
    "race": "{what} of {name}[{element}], which {other} accessed{other_place} with no barrier between that orders it",
    "uninitialised": "read of {name}[{element}] before anything was written there",
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


def describe(program: Program, library: Path, problem: Problem) -> str:
    """What happened, by which thread, and in which line."""
    fields = {name: getattr(problem, name) for name, *_ in problem._fields_}
    fields = {
        name: value.decode() if isinstance(value, bytes) else value
        for name, value in fields.items()
    }
    others = {SEVERAL: "several other threads", ANOTHER_THREADGROUP: "another threadgroup"}
    fields["other"] = others.get(problem.other_thread, f"thread {problem.other_thread}")
    other_line = line_of(library, problem.other_pc) or problem.other_line
    fields["other_place"] = f" ({place(program, other_line)})" if other_line else ""
    text = DESCRIPTIONS[fields["kind"]].format(**fields)
    if problem.thread >= 0:
        text += f", by thread {problem.thread} of threadgroup {tuple(problem.threadgroup)}"
    line = line_of(library, problem.pc) or problem.line
    return f"{text}: {place(program, line)}" if line else text


def line_of(library: Path, offset: int) -> int:
    """The kernel's line at an offset of its library, the innermost of inlined ones; 0 where binutils are missing."""
    addr2line = shutil.which("addr2line")
    if not offset or not addr2line:
        return 0
    command = [addr2line, "-i", "-e", str(library), hex(offset)]
    output = subprocess.run(command, capture_output=True, text=True).stdout
    line = re.search(r"\bkernel:(\d+)", output)
    return int(line[1]) if line else 0


# ---- the stand-in for mx.fast.metal_kernel


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
    What `mx.fast.metal_kernel` gives, with its arguments: a function that runs the kernel, at once and on the CPU.

    mode: "check" or "fast". The function raises MetalCompileError, MetalRuntimeError, or MLX's ValueError on arguments
    that do not fit.
    """
    kernel = make_metal_kernel(
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
        }
        arguments |= {"grid": grid, "threadgroup": threadgroup}
        program = export(kernel, header, source, arrays, arguments)
        type_check(program)
        num_threads = math.prod(map(min, grid, threadgroup))
        if num_threads > MAX_THREADS:
            raise MetalRuntimeError(
                f"{program.name}: {num_threads} threads in a threadgroup", {"limit"}
            )

        memory: dict[str, Memory] = {}
        for input_name, array in zip(input_names, arrays, strict=True):
            memory |= input_memory(input_name, array, ensure_row_contiguous)
        results = list(zip(output_names, output_shapes, output_dtypes, strict=True))
        memory |= {output: output_memory(output, shape, dtype) for output, shape, dtype in results}
        if problems := run(program, mode, memory, grid, threadgroup):
            lines = [f"[{kind}] {text}" for kind, text in problems]
            raise MetalRuntimeError(
                "\n  ".join([f"{program.name}:", *lines]), {kind for kind, _ in problems}
            )
        return without_gradient(
            arrays, [to_mlx(memory[output], shape, dtype) for output, shape, dtype in results]
        )

    return call


def without_gradient(inputs: list[mx.array], outputs: list[mx.array]) -> list[mx.array]:
    """The outputs as functions of the inputs without a gradient, as MLX's kernels; that of constants would be 0."""

    @mx.custom_function
    def kernel(*inputs: mx.array) -> tuple[mx.array, ...]:
        return tuple(outputs)

    @kernel.vjp
    def backward(*_: Any) -> None:
        raise ValueError("[Primitive::vjp] Not implemented for CustomKernel.")

    return list(kernel(*inputs))


@contextlib.contextmanager
def patched(mode: str = "check") -> Iterator[None]:
    """
    Inside, `mx.fast.metal_kernel` makes kernels of the emulator and `mx.metal.is_available()` holds. On a Mac, nothing.

    It is for code that asks `mx.fast` for its kernels when it calls them, and keeps them by what made them. Kernels run
    when they are called, so compiled functions are off.
    """
    if mx.metal.is_available():
        yield
        return
    maker = functools.partial(metal_kernel, mode=mode)
    with (
        mock.patch.object(mx.fast, "metal_kernel", maker),
        mock.patch.object(mx.metal, "is_available", lambda: True),
    ):
        mx.disable_compile()
        try:
            yield
        finally:
            mx.enable_compile()
