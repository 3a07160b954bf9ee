"""
An emulator for `mx.fast.metal_kernel`: type-checks a kernel's text, runs it on the CPU and watches what it does.

MLX itself writes the kernel's signature: the call is exported, not run, and the exported graph holds the Metal text
with the address spaces that this call's inputs get. clang checks that text with real address spaces, then compiles it
to a library that `runtime.cpp` runs with true barriers and simdgroups of 32. In mode "check" each access to memory is
watched; in mode "fast" none is, for inputs of real size.

What it cannot know: Apple's compiler, the last digits of a GPU's functions, speed, the watchdog, how many registers a
kernel needs. Not emulated, and therefore a compile error: textures, quadgroups, simdgroup matrices, complex numbers,
user-defined structs in any memory but a thread's own.
"""

import contextlib
import ctypes
import functools
import importlib.util
import re
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from metal import toolchain

MODES = ("check", "fast")
MAX_THREADS = 1024  # in a threadgroup
MAX_THREADGROUP_BYTES = 32 << 10
MARGIN = 4096  # bytes around each array that nothing may write; filled with 0xFF, which read as floats are no numbers
make_metal_kernel = mx.fast.metal_kernel  # MLX's own, whatever stands in its place later


class MetalCompileError(Exception):
    """The kernel would not compile on a Mac."""


class MetalRuntimeError(Exception):
    """The kernel did what it must not. `kinds` are the checks that failed."""

    def __init__(self, message: str, kinds: set[str]):
        super().__init__(message)
        self.kinds = kinds


# ---- from MLX's text to two programs for clang


class Program(NamedTuple):
    """A kernel as MLX would hand it to Metal's compiler, in parts."""

    name: str
    header: str
    signature: str
    body: str
    instance: str  # the kernel's name with its template arguments
    parameters: list[tuple[str, str]]  # type and name, in order


def export_program(kernel: Callable[..., Any], header: str, body: str, inputs: list[mx.array], call: dict) -> Program:
    """The text that MLX writes for this call."""
    nodes: list[dict[str, Any]] = []
    placeholders = [mx.zeros(x.shape, x.dtype) for x in inputs]
    mx.export_function(nodes.append, lambda *arrays: kernel(inputs=list(arrays), **call), *placeholders)
    name, text, *_ = next(node["arguments"] for node in nodes if node.get("name") == "CustomKernel")
    begin = len(header)
    body_begin = text.index(") {\n", begin) + len(") {\n")
    assert text.startswith(header) and text[body_begin:].lstrip("\n").startswith(body.lstrip("\n")), text
    body_end = text.index(body, body_begin) + len(body)
    signature, tail = text[begin:body_begin], text[body_end:]
    instance = re.search(r"decltype\((.+)\) ", tail)
    parameters = re.findall(r"^  (.+?) ?(\w+) \[\[\w+(?:\(\d+\))?\]\]", signature, re.M)
    return Program(name, header, signature, body, instance[1] if instance else name, parameters)


FLOAT_LITERAL = re.compile(r"(?<![\w.])((?:\d+\.\d*|\.\d+)(?:[eE][+-]?\d+)?|\d+[eE][+-]?\d+)(f|h|bf|)(?![\w.])")
LITERAL_TYPES = {"": "{}f", "f": "{}f", "h": "half({}f)", "bf": "bfloat({}f)"}
COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.S)
THREADGROUP = re.compile(r"\bthreadgroup\b\s*(?P<rest>[^;(){}]*)(?P<end>.)", re.S)
DECLARATION = re.compile(r"(?P<type>[\w:<>, ]*[\w>])\s+(?P<name>\w+)\s*(?P<sizes>(?:\[[^\]]*\]\s*)*)$")


def without_comments(text: str) -> str:
    return COMMENT.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), text)


def rewrite_literals(text: str, type_check: bool) -> str:
    """
    Metal's floating literals in C++: without a suffix they are float, h makes a half, bf a bfloat.

    For the type check each float is 1.1, which no bfloat holds: clang lets a bfloat be made from what it can hold,
    Metal from no float at all.
    """

    def rewrite(match: re.Match[str]) -> str:
        return "1.1f" if type_check and match[2] in ("", "f") else LITERAL_TYPES[match[2]].format(match[1])

    return FLOAT_LITERAL.sub(rewrite, text)


def rewrite_threadgroup_arrays(text: str, type_check: bool) -> str:
    """`threadgroup T name[n];` becomes something that clang allows in a function; pointers are left alone."""

    def rewrite(match: re.Match[str]) -> str:
        rest = match["rest"]
        if re.search(r"[*&]|_barrier", rest) or match["end"] in "()":
            return match[0]
        declaration = DECLARATION.match(rest) if match["end"] == ";" else None
        if declaration is None or "," in re.sub(r"<[^>]*>", "", rest):
            raise MetalCompileError(f"only `threadgroup TYPE NAME[SIZE];` is understood, not `{match[0]}`")
        if type_check:
            return f"extern {match[0]}"
        kind, name = f"{declaration['type']}{declaration['sizes'].strip()}", declaration["name"]
        return f'auto& {name} = emulator::threadgroup_array<{kind}>("{name}", __LINE__);'

    return THREADGROUP.sub(rewrite, text)


SCALARS = "bool char uchar short ushort int uint long ulong half float bfloat bfloat16_t float16_t size_t".split()
SCALARS += [f"{sign}int{bits}_t" for sign in ("", "u") for bits in (8, 16, 32, 64)]
VECTORS = [f"{scalar}{lanes}" for scalar in SCALARS for lanes in (2, 3, 4)]


def complaints(program: Program) -> list[str]:
    """What Metal's compiler refuses and clang does not."""
    header, body = without_comments(program.header), without_comments(program.body)
    types = "|".join([*SCALARS, *VECTORS, *re.findall(r"typename (\w+)", program.signature + header)])
    pointer = re.compile(
        rf"(?:\b(device|constant|threadgroup|thread)\s+)?(?:const\s+)?\b(?:{types})\s*(?:const\s*)?[*&]\s*\w+"
    )
    found = [
        f"pointer or reference without an address space: `{match[0]}`"
        for match in pointer.finditer(header + "\n" + body)
        if not match[1]
    ]
    variable = re.compile(
        rf"^(?!.*\bconstant\b)(?:(?:static|const|constexpr|inline)\s+)*(?:{types})\s+\w+[^(\n]*[=;]", re.M
    )
    found += [
        f"variable of the program outside of constant memory: `{match[0]}`" for match in variable.finditer(header)
    ]
    if re.search(r"\bthreadgroup\s+[^()*&;]*;", header):
        found.append("threadgroup memory declared outside of the kernel")
    found += [
        f"`{word}` is not in Metal" for word in re.findall(r"\b(?:double|goto|try|throw|new|std)\b", header + body)
    ]
    found += [f"{len(program.parameters)} arguments, Metal allows 31"] if len(program.parameters) > 31 else []
    return found


COMPLEX = """
template <typename T> struct complex_t { T real, imag; complex_t(T real, T imag): real(real), imag(imag) {} };
using complex64_t = complex_t<float>;
"""


@functools.cache
def mlx_headers() -> str:
    """
    The headers that MLX puts before every kernel, from the installed wheel, as one text.

    Left out: complex numbers but for their name, logging, and simdgroup operations of bfloat, which metal_stdlib.h has so that they know their line.
    """
    specification = importlib.util.find_spec("mlx")
    assert specification is not None and specification.submodule_search_locations
    directories = [Path(location, "include") for location in specification.submodule_search_locations]
    included: set[str] = set()

    def read(name: str) -> str:
        if name in included or name.endswith(("/complex.h", "/logging.h")):
            return ""
        included.add(name)
        text = next((directory / name).read_text() for directory in directories if (directory / name).exists())
        text = re.sub(r'#include "(.+?)"', lambda match: read(match[1]), text)
        return re.sub(r"#include <.+?>|#pragma once", "", text)

    text = read("mlx/backend/metal/kernels/utils.h")
    simd = re.search(r"#define instantiate_metal_simd_comm_funcs.*?\n}  ?// namespace metal\n", text, re.S)
    assert simd, "MLX's bf16_math.h has changed"
    text = text.replace(simd[0], "")
    # plain clang has no address space on an array that is a parameter
    text = re.sub(r"(constant const int64_t) (\w+)\[\d\]", r"\1* \2", text)
    return COMPLEX + text


def prelude(type_check: bool) -> str:
    mlx = rewrite_literals(mlx_headers(), type_check=False)
    return f'{"#define EMULATOR_TYPE_CHECK" if type_check else ""}\n#include "metal_stdlib.h"\n{mlx}\n'


FIRST_BODY_LINE = 100_000  # lines of the body are numbered from here, those of the header from 1


def program_text(program: Program, type_check: bool) -> str:
    header, body = (
        rewrite_threadgroup_arrays(rewrite_literals(without_comments(text), type_check), type_check)
        for text in (program.header, program.body)
    )
    text = f'{prelude(type_check)}#line 1 "metal"\n{header}\n#line 50000 "metal"\n{program.signature}'
    text += f'#line {FIRST_BODY_LINE} "metal"\n{body}\n}}\n#line 90000 "metal"\n'
    if type_check:
        is_template = program.instance != program.name
        return text + (f"template decltype({program.instance}) {program.instance};\n" if is_template else "")
    arguments, index = [], 0
    for kind, name in program.parameters:
        if re.match(r"uint3?$", kind):
            arguments.append(f"emulator_thread->{name}")
            continue
        arguments.append(f"*({kind[:-1]}*)arguments[{index}]" if kind.endswith("&") else f"({kind})arguments[{index}]")
        index += 1
    return text + (
        'extern "C" {\n'
        'extern const char __ehdr_start[] __attribute__((visibility("hidden")));\n'
        'extern const char _end[] __attribute__((visibility("hidden")));\n'
        "const char* emulator_image_begin() { return __ehdr_start; }\n"
        "const char* emulator_image_end() { return _end; }\n"
        f"EMULATOR_INTERNAL void emulator_kernel(void** arguments) {{ {program.instance}({', '.join(arguments)}); }}\n"
        "}\n"
    )


# ---- compiling

TYPE_CHECK = "-Wno-everything -Wimplicit-float-conversion -fno-lax-vector-conversions".split()
TYPE_CHECK += [f"-Werror={mistake}" for mistake in ("return-type", "uninitialized", "vla-extension")]
RUN = "-Wno-everything -g1 -gdwarf-4 -ftrivial-auto-var-init=pattern -Wframe-larger-than=65536".split()
FAST = ["-O2"]
CHECK = [
    "-O1",
    "-fno-vectorize",
    "-fno-slp-vectorize",
    "-fsanitize=thread,alignment,bounds,float-cast-overflow,integer-divide-by-zero,shift,signed-integer-overflow",
    "-fsanitize-recover=all",
    *"-mllvm -tsan-instrument-func-entry-exit=0 -mllvm -tsan-instrument-read-before-write=1".split(),
]


def place(program: Program, line: int) -> str:
    """A line of the program as its author knows it, and what stands there."""
    part, number = ("body", line - FIRST_BODY_LINE + 1) if line >= FIRST_BODY_LINE else ("header", line)
    lines = (program.body if part == "body" else program.header).split("\n")
    return f"{part} line {number} `{lines[number - 1].strip()}`" if 0 < number <= len(lines) else "MLX's headers"


def compile_error(program: Program, error: toolchain.CompileError) -> MetalCompileError:
    """clang's first complaints, with the lines of the kernel's author."""
    messages = re.findall(r"^(?:metal|<stdin>):(\d+):\d+: (?:error|warning): (.*)", str(error), re.M)
    lines = [f"{place(program, int(line))}: {message}" for line, message in messages[:8]]
    return MetalCompileError("\n  ".join([f"{program.name} does not compile:", *(lines or [str(error)])]))


def type_check(program: Program) -> None:
    if found := complaints(program):
        raise MetalCompileError("\n  ".join([f"{program.name} does not compile:", *found]))
    try:
        warnings = toolchain.check(program_text(program, type_check=True), TYPE_CHECK)
        if refused := [line for line in warnings.splitlines() if re.search(r"warning: .* to '(bfloat|__bf16)", line)]:
            raise toolchain.CompileError("\n".join(refused))
    except toolchain.CompileError as error:
        raise compile_error(program, error) from None


def build(program: Program, mode: str) -> Path:
    try:
        return toolchain.build(program_text(program, type_check=False), [*RUN, *(CHECK if mode == "check" else FAST)])
    except toolchain.CompileError as error:
        raise compile_error(program, error) from None


# ---- running: the structures of runtime.cpp


class _Buffer(ctypes.Structure):
    _fields_ = [
        ("name", ctypes.c_char_p),
        ("data", ctypes.c_void_p),
        ("size", ctypes.c_ulong),
        ("element_size", ctypes.c_ulong),
        ("is_output", ctypes.c_bool),
        ("is_initialised", ctypes.c_bool),
    ]


class _Problem(ctypes.Structure):
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


class _Launch(ctypes.Structure):
    _fields_ = [
        ("kernel", ctypes.c_void_p),
        ("arguments", ctypes.POINTER(ctypes.c_void_p)),
        ("buffers", ctypes.POINTER(_Buffer)),
        ("num_buffers", ctypes.c_uint),
        ("grid", ctypes.c_uint * 3),
        ("threadgroup", ctypes.c_uint * 3),
        ("seed", ctypes.c_uint),
        ("is_checked", ctypes.c_bool),
        ("image_begin", ctypes.c_void_p),
        ("image_end", ctypes.c_void_p),
        ("problems", ctypes.POINTER(_Problem)),
        ("max_problems", ctypes.c_uint),
        ("num_problems", ctypes.c_uint),
        ("threadgroup_bytes", ctypes.c_ulong),
    ]


@functools.cache
def runtime() -> ctypes.CDLL:
    ctypes.CDLL("libm.so.6", mode=ctypes.RTLD_GLOBAL)  # where kernels find exp and the like
    library = toolchain.build((toolchain.HERE / "runtime.cpp").read_text(), ["-O2"])
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

    def __init__(self, name: str, size: int, element_size: int, *, is_output: bool, is_initialised: bool):
        self.name, self.element_size = name, element_size
        self.is_output, self.is_initialised = is_output, is_initialised
        self.whole = np.full(size + 2 * MARGIN + 64, 0xFF, np.uint8)
        self.begin = MARGIN + -(self.whole.ctypes.data + MARGIN) % 64
        self.bytes = self.whole[self.begin : self.begin + size]

    def as_buffer(self) -> _Buffer:
        size, data = self.bytes.size, self.whole.ctypes.data + self.begin
        return _Buffer(self.name.encode(), data, size, self.element_size, self.is_output, self.is_initialised)

    def margins_are_whole(self) -> bool:
        return bool(
            (self.whole[: self.begin] == 0xFF).all() and (self.whole[self.begin + self.bytes.size :] == 0xFF).all()
        )


def to_numpy(array: mx.array) -> np.ndarray:
    """The elements of an array in place, with its strides; bfloat16, which numpy has not, as uint16."""
    mx.eval(array)
    return np.asarray(array.view(mx.uint16) if array.dtype == mx.bfloat16 else array)


def to_mlx(memory: Memory, shape: Sequence[int], dtype: mx.Dtype) -> mx.array:
    carrier = mx.uint16 if dtype == mx.bfloat16 else dtype
    elements = memory.bytes.view(numpy_dtype(carrier)).reshape(shape)
    return mx.array(elements).view(dtype) if dtype == mx.bfloat16 else mx.array(elements)


def numpy_dtype(dtype: mx.Dtype) -> np.dtype:
    return to_numpy(mx.zeros((1,), dtype)).dtype


def input_memory(name: str, array: mx.array, contiguous: bool) -> tuple[dict[str, Memory], int]:
    """An input and what MLX passes along with it (shape, strides, ndim), and the first element's offset in bytes."""
    elements = to_numpy(array)
    if contiguous:
        elements = np.ascontiguousarray(elements).reshape(array.shape)
    reach = [(size - 1) * stride for size, stride in zip(elements.shape, elements.strides, strict=True)]
    low, high = sum(min(r, 0) for r in reach), sum(max(r, 0) for r in reach)
    size = high - low + elements.itemsize if elements.size else 0
    memory = Memory(name, size, elements.itemsize, is_output=False, is_initialised=True)
    if elements.size:
        ctypes.memmove(memory.bytes.ctypes.data, elements.ctypes.data + low, size)
    described = {name: memory}
    description = {
        "shape": np.array(elements.shape, np.int32),
        "strides": np.array(elements.strides, np.int64) // elements.itemsize,
        "ndim": np.array([elements.ndim], np.int32),
    }
    for suffix, values in description.items():
        part = Memory(f"{name}_{suffix}", values.nbytes, values.itemsize, is_output=False, is_initialised=True)
        part.bytes[:] = values.view(np.uint8)
        described[part.name] = part
    return described, -low


def output_memory(name: str, shape: Sequence[int], dtype: mx.Dtype, init_value: float | None) -> Memory:
    size = int(np.prod(shape)) * dtype.size
    memory = Memory(name, size, dtype.size, is_output=True, is_initialised=init_value is not None)
    if init_value is not None:
        memory.bytes[:] = np.frombuffer(to_numpy(mx.full(shape, init_value).astype(dtype)).tobytes(), np.uint8)
    return memory


RUNNING = threading.Lock()  # the runtime runs one launch at a time


def run(
    program: Program,
    library: Path,
    memory: dict[str, Memory],
    offsets: dict[str, int],
    grid: Sequence[int],
    threadgroup: Sequence[int],
    checked: bool,
) -> list[tuple[str, str]]:
    """Runs a kernel on memory in place; the problems that were found, each with its kind."""
    loaded = load(library)
    order = [name for kind, name in program.parameters if kind not in ("uint", "uint3")]
    buffers = [memory[name].as_buffer() for name in order]
    pointers = [buffer.data + offsets.get(name, 0) for name, buffer in zip(order, buffers, strict=True)]
    problems = (_Problem * 16)()
    launch = _Launch(
        ctypes.cast(loaded.emulator_kernel, ctypes.c_void_p),
        (ctypes.c_void_p * len(pointers))(*pointers),
        (_Buffer * len(buffers))(*buffers),
        len(buffers),
        (ctypes.c_uint * 3)(*grid),
        (ctypes.c_uint * 3)(*threadgroup),
        1,
        checked,
        loaded.emulator_image_begin(),
        loaded.emulator_image_end(),
        problems,
        len(problems),
    )
    with RUNNING:
        runtime().emulator_launch(ctypes.byref(launch))
    found = [
        (problem.kind.decode(), describe(program, library, problem)) for problem in problems[: launch.num_problems]
    ]
    if launch.threadgroup_bytes > MAX_THREADGROUP_BYTES:
        found.append(
            ("limit", f"{launch.threadgroup_bytes} bytes of threadgroup memory, Metal has {MAX_THREADGROUP_BYTES}")
        )
    for name in order:
        if not memory[name].margins_are_whole():
            found.append(("out-of-bounds", f"write outside of {name}, close to it"))
    return found


DESCRIPTIONS = {
    "out-of-bounds": "{what} of {name}[{element}], which has {num_elements} elements",
    "race": "{what} of {name}[{element}], which {other} accessed{other_place} with no barrier between that orders it",
    "uninitialised": "read of {name}[{element}] before anything was written there",
    "unwritten": "{name}[{element}] of {num_elements} elements was never written; on a Mac it holds garbage",
    "input": "write to the input {name}[{element}]",
    "barrier": "at a {name} while {other} is at another{other_place}, or has returned",
    "divergence": "at {name} without {other} of its simdgroup, which waits at {what}{other_place}",
    "shuffle": "{name} reads from a lane that does not take part",
    "overflow": "a finite float became an infinite {name}",
    "undefined": "{name}",
}
SEVERAL, ANOTHER_THREADGROUP = -2, -3


def describe(program: Program, library: Path, problem: _Problem) -> str:
    fields = {name: getattr(problem, name) for name, _ in problem._fields_}
    fields = {name: value.decode() if isinstance(value, bytes) else value for name, value in fields.items()}
    others = {SEVERAL: "several other threads", ANOTHER_THREADGROUP: "another threadgroup"}
    fields["other"] = others.get(problem.other_thread, f"thread {problem.other_thread}")
    other_place = line_of(library, problem.other_pc) or problem.other_line
    fields["other_place"] = f" ({place(program, other_place)})" if other_place else ""
    text = DESCRIPTIONS[fields["kind"]].format(**fields)
    if problem.thread >= 0:
        text += f", by thread {problem.thread} of threadgroup {tuple(problem.threadgroup)}"
    line = line_of(library, problem.pc) or problem.line
    return f"{text}: {place(program, line)}" if line else text


def line_of(library: Path, offset: int) -> int:
    """The innermost line of the kernel's own text at an offset of its library, 0 where binutils are not installed."""
    if not offset or not (addr2line := shutil.which("addr2line")):
        return 0
    command = [addr2line, "-i", "-e", str(library), hex(offset)]
    lines = re.findall(r"metal:(\d+)", subprocess.run(command, capture_output=True, text=True).stdout)
    return int(lines[0]) if lines else 0


# ---- the stand-in for mx.fast.metal_kernel


class Kernel:
    """What `metal_kernel` returns: called as MLX's kernels are."""

    def __init__(
        self, mode: str, header: str, source: str, ensure_row_contiguous: bool, names: tuple, **arguments: Any
    ):
        assert mode in MODES, mode
        self.mode, self.header, self.source, self.contiguous = mode, header, source, ensure_row_contiguous
        self.input_names, self.output_names = names
        self.kernel = make_metal_kernel(
            header=header,
            source=source,
            ensure_row_contiguous=ensure_row_contiguous,
            input_names=self.input_names,
            output_names=self.output_names,
            **arguments,
        )

    def __call__(
        self,
        *,
        inputs: Sequence[Any],
        output_shapes: Sequence[Sequence[int]],
        output_dtypes: Sequence[mx.Dtype],
        grid: tuple[int, int, int],
        threadgroup: tuple[int, int, int],
        template: Sequence[tuple[str, Any]] = (),
        init_value: float | None = None,
        verbose: bool = False,
        stream: Any = None,
    ) -> list[mx.array]:
        """The outputs, computed at once. MetalCompileError or MetalRuntimeError says what is wrong with the kernel."""
        arrays = [x if isinstance(x, mx.array) else mx.array(x) for x in inputs]
        call = {
            "output_shapes": output_shapes,
            "output_dtypes": output_dtypes,
            "grid": grid,
            "threadgroup": threadgroup,
        }
        call |= {"template": list(template), "verbose": verbose}
        program = export_program(self.kernel, self.header, self.source, arrays, call)
        num_threads = int(np.prod(np.minimum(grid, threadgroup)))
        if num_threads > MAX_THREADS:
            raise MetalRuntimeError(f"{program.name}: {num_threads} threads in a threadgroup", {"limit"})
        type_check(program)
        library = build(program, self.mode)

        memory: dict[str, Memory] = {}
        offsets = {}
        for name, array in zip(self.input_names, arrays, strict=True):
            parts, offsets[name] = input_memory(name, array, self.contiguous)
            memory |= parts
        for name, shape, dtype in zip(self.output_names, output_shapes, output_dtypes, strict=True):
            memory[name] = output_memory(name, shape, dtype, init_value)
        problems = run(program, library, memory, offsets, grid, threadgroup, self.mode == "check")
        if problems:
            lines = [f"[{kind}] {text}" for kind, text in problems]
            raise MetalRuntimeError("\n  ".join([f"{program.name}:", *lines]), {kind for kind, _ in problems})
        outputs = [
            to_mlx(memory[name], shape, dtype)
            for name, shape, dtype in zip(self.output_names, output_shapes, output_dtypes, strict=True)
        ]
        return without_gradient(arrays, outputs)


def without_gradient(inputs: list[mx.array], outputs: list[mx.array]) -> list[mx.array]:
    """The outputs as functions of the inputs that cannot be differentiated, as MLX's kernels; constants would give 0."""

    @mx.custom_function
    def kernel(*inputs: mx.array) -> tuple[mx.array, ...]:
        return tuple(outputs)

    @kernel.vjp
    def backward(*_: Any) -> None:
        raise ValueError("[Primitive::vjp] Not implemented for CustomKernel.")

    return list(kernel(*inputs))


def metal_kernel(
    name: str,
    input_names: Sequence[str],
    output_names: Sequence[str],
    source: str,
    header: str = "",
    ensure_row_contiguous: bool = True,
    atomic_outputs: bool = False,
    compile_options: Any = None,
    mode: str = "check",
) -> Kernel:
    """Stands in for `mx.fast.metal_kernel`, with the same arguments and `mode`, "check" or "fast"."""
    arguments = {"name": name, "atomic_outputs": atomic_outputs, "compile_options": compile_options}
    names = (list(input_names), list(output_names))
    return Kernel(mode, header, source, ensure_row_contiguous, names, **arguments)


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
    stand_ins: dict[tuple[Any, str], Any] = {
        (mx.fast, "metal_kernel"): functools.partial(metal_kernel, mode=mode),
        (mx.metal, "is_available"): lambda: True,
    }
    originals = {(module, name): getattr(module, name) for module, name in stand_ins}
    for (module, name), stand_in in stand_ins.items():
        setattr(module, name, stand_in)
    mx.disable_compile()
    try:
        yield
    finally:
        mx.enable_compile()
        for (module, name), original in originals.items():
            setattr(module, name, original)
