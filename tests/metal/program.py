"""
A kernel as MLX would hand it to Metal's compiler, and the two programs for clang that are made of it.

MLX itself writes the text: the call is exported, not run, and the exported graph holds the signature with the types and
address spaces that this call's inputs get. One program is only type-checked, with address spaces as Metal has them; the
other is run, without them. Between them and the rules in `complaints` stands what would not compile on a Mac.
"""

import functools
import importlib.util
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx

from metal import toolchain


class MetalCompileError(Exception):
    """The kernel would not compile on a Mac, or uses what the emulator has not."""


class Program(NamedTuple):
    """The parts of the text, in order, and what its signature says."""

    name: str
    header: str
    signature: str
    body: str
    instance: str  # the kernel's name with its template arguments
    parameters: tuple[tuple[str, str], ...]  # type and name, in order

    @property
    def arrays(self) -> list[str]:
        """The parameters that are not positions of the thread."""
        return [name for kind, name in self.parameters if kind not in ("uint", "uint3")]


def export(
    kernel: Callable[..., Any], header: str, body: str, inputs: list[mx.array], call: dict[str, Any]
) -> Program:
    """
    What MLX writes for one call of one of its own kernels.

    header, body: what the kernel was made of. call: the arguments but for the inputs. ValueError is MLX's, on arguments
    that do not fit the kernel.
    """
    nodes: list[dict[str, Any]] = []
    placeholders = [mx.zeros(x.shape, x.dtype) for x in inputs]
    mx.export_function(
        nodes.append, lambda *arrays: kernel(inputs=list(arrays), **call), *placeholders
    )
    name, text, *_ = next(node["arguments"] for node in nodes if node.get("name") == "CustomKernel")
    body_begin = text.index(") {\n", len(header)) + len(") {\n")
    body_end = text.index(body, body_begin) + len(body)
    signature, tail = text[len(header) : body_begin], text[body_end:]
    assert text.startswith(header) and not text[body_begin:body_end].removesuffix(body).strip(), (
        text
    )
    instance = re.search(r"decltype\((.+)\) ", tail)
    parameters = tuple(re.findall(r"^  (.+?) ?(\w+) \[\[\w+(?:\(\d+\))?\]\]", signature, re.M))
    return Program(name, header, signature, body, instance[1] if instance else name, parameters)


# ---- Metal's dialect in clang's

COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.S)
FLOAT_LITERAL = re.compile(
    r"(?<![\w.])((?:\d+\.\d*|\.\d+)(?:[eE][+-]?\d+)?|\d+[eE][+-]?\d+)(f|h|bf|)(?![\w.])"
)
LITERAL_TYPES = {"": "{}f", "f": "{}f", "h": "half({}f)", "bf": "bfloat({}f)"}
THREADGROUP = re.compile(r"\bthreadgroup\b(?P<rest>[^;{}]*)(?P<end>[;{}]?)")
THREADGROUP_ARRAY = re.compile(
    r"\s+(?P<type>[\w:<>, ]*[\w>])\s+(?P<name>\w+)\s*(?P<sizes>(?:\[[^\]]*\]\s*)*)$"
)
THREADGROUP_POINTER = re.compile(r"[\w:<>, ]*[*&]")


def without_comments(text: str) -> str:
    return COMMENT.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), text)


def with_literals(text: str, type_check: bool) -> str:
    """
    Metal's floating literals: without a suffix they are float, h makes a half, bf a bfloat.

    For the type check each float is 1.1, which no bfloat holds: clang takes a float for a bfloat where it loses
    nothing, Metal never does.
    """

    def rewrite(match: re.Match[str]) -> str:
        return (
            "1.1f"
            if type_check and match[2] in ("", "f")
            else LITERAL_TYPES[match[2]].format(match[1])
        )

    return FLOAT_LITERAL.sub(rewrite, text)


def with_threadgroup_arrays(text: str, type_check: bool) -> str:
    """`threadgroup T name[n];` in a form that clang allows in a function. Pointers to threadgroup memory stay."""

    def rewrite(match: re.Match[str]) -> str:
        array = THREADGROUP_ARRAY.match(match["rest"]) if match["end"] == ";" else None
        if array and "," not in re.sub(r"<[^<>]*>", "", array["type"]):
            if type_check:
                return f"extern {match[0]}"
            kind, name = f"{array['type']}{array['sizes'].strip()}", array["name"]
            return f'auto& {name} = emulator::threadgroup_array<{kind}>("{name}", __LINE__);'
        if THREADGROUP_POINTER.match(match["rest"]):
            # what follows may hold the next one
            return "threadgroup" + with_threadgroup_arrays(match["rest"], type_check) + match["end"]
        raise MetalCompileError(
            f"only `threadgroup TYPE NAME[SIZE];` is understood, not `{match[0].strip()}`"
        )

    return THREADGROUP.sub(rewrite, text)


COMPLEX = """
template <typename T> struct complex_t { T real, imag; complex_t(T real, T imag) : real(real), imag(imag) {} };
using complex64_t = complex_t<float>;
"""


@functools.cache
def mlx_headers() -> str:
    """
    The headers that MLX puts before every kernel, from the installed wheel, as one text.

    Left out: logging, complex numbers but for their name, and simdgroup operations of bfloat, which metal_stdlib.h has
    with the line that called them.
    """
    specification = importlib.util.find_spec("mlx")
    assert specification is not None and specification.submodule_search_locations
    directories = [
        Path(location, "include") for location in specification.submodule_search_locations
    ]
    included: set[str] = set()

    def read(name: str) -> str:
        if name in included or name.endswith(("/complex.h", "/logging.h")):
            return ""
        included.add(name)
        text = next(
            (directory / name).read_text()
            for directory in directories
            if (directory / name).exists()
        )
        text = re.sub(r'#include "(.+?)"', lambda match: read(match[1]), text)
        return re.sub(r"#include <.+?>|#pragma once", "", text)

    text = read("mlx/backend/metal/kernels/utils.h")
    simd = re.search(
        r"#define instantiate_metal_simd_comm_funcs.*?\n} +// namespace metal\n", text, re.S
    )
    assert simd, "MLX's bf16_math.h has changed"
    text = text.replace(simd[0], "")
    # clang has no address space on an array that is a parameter
    text = re.sub(r"(constant const int64_t) (\w+)\[\d\]", r"\1* \2", text)
    return with_literals(COMPLEX + without_comments(text), type_check=False)


BODY = 100_000  # lines of the body are numbered from here, those of the header from 1


@functools.cache
def beginning(type_check: bool) -> str:
    """What stands before every kernel."""
    define = "#define EMULATOR_TYPE_CHECK" if type_check else ""
    return f'{define}\n#include "metal_stdlib.h"\n#line 1 "mlx"\n{mlx_headers()}\n'


def text_for_clang(program: Program, type_check: bool) -> str:
    """What follows the beginning."""
    header, body = (
        with_threadgroup_arrays(with_literals(without_comments(text), type_check), type_check)
        for text in (program.header, program.body)
    )
    text = f'#line 1 "kernel"\n{header}\n'
    text += f'#line 1 "signature"\n{program.signature}#line {BODY} "kernel"\n{body}\n}}\n'
    text += '#line 1 "end"\n'
    if type_check:
        is_template = program.instance != program.name
        return text + (
            f"template decltype({program.instance}) {program.instance};\n" if is_template else ""
        )
    arguments = []
    for kind, name in program.parameters:
        if name in program.arrays:
            pointer = f"arguments[{program.arrays.index(name)}]"
            arguments.append(
                f"*({kind[:-1]}*){pointer}" if kind.endswith("&") else f"({kind}){pointer}"
            )
        else:
            arguments.append(f"emulator_thread->{name}")
    return text + (
        f"EMULATOR_ENTRY void emulator_kernel(void** arguments) {{ {program.instance}({', '.join(arguments)}); }}\n"
    )


# ---- what would not compile

SCALARS = "bool char uchar short ushort int uint long ulong half float bfloat bfloat16_t float16_t size_t".split()
SCALARS += [f"{sign}int{bits}_t" for sign in ("", "u") for bits in (8, 16, 32, 64)]
VECTORS = [f"{scalar}{lanes}" for scalar in SCALARS for lanes in (2, 3, 4)]
ABSENT = "double goto try throw new delete std virtual printf".split()
MAX_ARGUMENTS = 31


def outside_of_braces(text: str) -> str:
    while text != (text := re.sub(r"\{[^{}]*\}", "", text)):
        pass
    return text


def complaints(program: Program) -> list[str]:
    """What Metal's compiler refuses and clang does not."""
    header, body = without_comments(program.header), without_comments(program.body)
    types = "|".join(
        [*SCALARS, *VECTORS, *re.findall(r"typename (\w+)", program.signature + header)]
    )
    space = r"(?:\b(device|constant|threadgroup|thread)\s+)?(?:(?:const|volatile)\s+)*"
    pointer = re.compile(rf"{space}\b(?:{types})\s*(?:const\s*)?[*&]\s*\w+")
    qualifiers = r"(?:(?:static|const|constexpr|inline)\s+)*"
    variable = re.compile(
        rf"^\s*(?!.*\bconstant\b)({qualifiers}(?:{types})\s+\w+[^(\n]*)[=;]", re.M
    )
    found = [
        f"pointer or reference without an address space: `{match[0]}`"
        for match in pointer.finditer(header + "\n" + body)
        if not match[1]
    ]
    found += [
        f"variable of the program that is not constant: `{match[1].strip()}`"
        for match in variable.finditer(outside_of_braces(header))
    ]
    found += [
        f"threadgroup memory declared outside of the kernel: `{match[0]}`"
        for match in THREADGROUP.finditer(header)
        if match["end"] == ";" and THREADGROUP_ARRAY.match(match["rest"])
    ]
    found += [
        f"`{word}` is not in Metal"
        for word in re.findall(rf"\b(?:{'|'.join(ABSENT)})\b", header + "\n" + body)
    ]
    if len(program.arrays) > MAX_ARGUMENTS:
        found.append(f"{len(program.arrays)} arguments, Metal allows {MAX_ARGUMENTS}")
    return found


TYPE_CHECK = "-Wno-everything -Wimplicit-float-conversion -fno-lax-vector-conversions".split()
TYPE_CHECK += [
    f"-Werror={mistake}" for mistake in ("return-type", "uninitialized", "vla-extension")
]
FLOAT_TO_BFLOAT = re.compile(r"to (?:'\w+' \(aka )?'__bf16'\)? \[-Wimplicit-float-conversion\]")
RUN = "-Wno-everything -g1 -gdwarf-4 -fvisibility=hidden -ftrivial-auto-var-init=pattern".split()
RUN += [
    "-Wframe-larger-than=65536",
    "-Werror=frame-larger-than",
]  # half of the stack that runtime.cpp gives a thread
MODES = {
    "fast": ["-O0"],
    "check": [
        *"-O0 -fsanitize-recover=all".split(),
        "-fsanitize=thread,bounds,float-cast-overflow,integer-divide-by-zero,shift,signed-integer-overflow",
        *"-mllvm -tsan-instrument-func-entry-exit=0 -mllvm -tsan-instrument-read-before-write=1".split(),
    ],
}


@functools.cache
def type_check(program: Program) -> None:
    """MetalCompileError when the kernel would not compile on a Mac."""
    if found := complaints(program):
        raise MetalCompileError("\n  ".join([f"{program.name} does not compile:", *found]))
    try:
        warnings = toolchain.check(
            beginning(True), text_for_clang(program, type_check=True), TYPE_CHECK
        )
    except toolchain.CompileError as error:
        raise compile_error(program, str(error)) from None
    if refused := [line for line in warnings.splitlines() if FLOAT_TO_BFLOAT.search(line)]:
        raise compile_error(program, "\n".join(refused))


@functools.cache
def build(program: Program, mode: str) -> Path:
    """The kernel as a library for the runtime."""
    try:
        return toolchain.build(
            beginning(False), text_for_clang(program, type_check=False), [*RUN, *MODES[mode]]
        )
    except toolchain.CompileError as error:
        raise compile_error(program, str(error)) from None


def compile_error(program: Program, output: str) -> MetalCompileError:
    """clang's complaints, with the lines of the kernel's author; notes only where they name such a line."""
    lines = []
    complaint = re.compile(r"^(.+?):(\d+):\d+: (?:fatal )?(error|warning|note): (.*)", re.M)
    for file, line, kind, message in complaint.findall(output):
        if file == "kernel":
            lines.append(f"{place(program, int(line))}: {message}")
        elif kind != "note":
            lines.append(message)
    return MetalCompileError(
        "\n  ".join([f"{program.name} does not compile:", *(dict.fromkeys(lines) or [output])])
    )


def place(program: Program, line: int) -> str:
    """A line as the kernel's author knows it, and what stands there."""
    part, number, text = (
        ("body", line - BODY + 1, program.body)
        if line >= BODY
        else ("header", line, program.header)
    )
    return f"{part} line {number} `{text.splitlines()[number - 1].strip()}`"
