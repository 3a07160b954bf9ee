"""
The text of a kernel as MLX gives it to Metal's compiler, and two programs for clang made from it.

MLX writes the text: the call is exported, not run. The exported graph has the kernel's signature,
with the types and address spaces of this call's inputs. The first program has Metal's address
spaces and is only type-checked. The second has none and is run. The type check and the rules in
`find_mistakes` refuse a kernel that would not compile on a Mac.
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
    """The kernel would not compile on a Mac, or uses a feature that the emulator lacks."""


class Program(NamedTuple):
    """The parts of a kernel's text, in order, and the parameters of its signature."""

    name: str
    header: str
    signature: str
    body: str
    instance: str  # the kernel's name with its template arguments
    parameters: tuple[tuple[str, str], ...]  # type and name, in order

    @property
    def arrays(self) -> list[str]:
        """The names of the array parameters; the others hold the thread's position."""
        return [name for kind, name in self.parameters if kind not in ("uint", "uint3")]


def export_program(
    kernel: Callable[..., Any], header: str, body: str, inputs: list[mx.array], call: dict[str, Any]
) -> Program:
    """
    The program that MLX writes for one call of a kernel.

    header, body: the texts from which the kernel was made. call: the arguments without the inputs.
    MLX raises ValueError if the arguments do not fit the kernel.
    """
    nodes: list[dict[str, Any]] = []
    placeholders = [mx.zeros(x.shape, x.dtype) for x in inputs]
    mx.export_function(
        nodes.append, lambda *arrays: kernel(inputs=list(arrays), **call), *placeholders
    )
    name, text, *_ = next(node["arguments"] for node in nodes if node.get("name") == "CustomKernel")
    body_begin = text.index(") {\n", len(header)) + len(") {\n")
    body_end = text.index(body, body_begin) + len(body)
    assert text.startswith(header), text
    assert not text[body_begin:body_end].removesuffix(body).strip(), text

    signature = text[len(header) : body_begin]
    instance = re.search(r"decltype\((.+)\) ", text[body_end:])
    parameters = tuple(re.findall(r"^  (.+?) ?(\w+) \[\[\w+(?:\(\d+\))?\]\]", signature, re.M))
    return Program(name, header, signature, body, instance[1] if instance else name, parameters)


# ---- translation from Metal's dialect to clang's

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


def remove_comments(text: str) -> str:
    """The text with spaces in place of comments; line numbers stay."""
    return COMMENT.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), text)


def translate_literals(text: str, type_check: bool) -> str:
    """
    Translates Metal's literals: without a suffix a float, with h a half, with bf a bfloat.

    For the type check each float becomes 1.1, which a bfloat cannot hold exactly. Clang accepts a
    float as a bfloat if the value stays the same; Metal never does.
    """

    def translate(match: re.Match[str]) -> str:
        is_float = match[2] in ("", "f")
        if type_check and is_float:
            return "1.1f"
        return LITERAL_TYPES[match[2]].format(match[1])

    return FLOAT_LITERAL.sub(translate, text)


def translate_threadgroup_arrays(text: str, type_check: bool) -> str:
    """
    Rewrites `threadgroup T name[n];` in a form that clang allows in a function.

    Pointers to threadgroup memory stay.
    """

    def translate(match: re.Match[str]) -> str:
        array = THREADGROUP_ARRAY.match(match["rest"]) if match["end"] == ";" else None
        if array and "," not in re.sub(r"<[^<>]*>", "", array["type"]):
            if type_check:
                return f"extern {match[0]}"
            kind = f"{array['type']}{array['sizes'].strip()}"
            name = array["name"]
            return f'auto& {name} = emulator::threadgroup_array<{kind}>("{name}", __LINE__);'
        if THREADGROUP_POINTER.match(match["rest"]):
            # The rest may contain another declaration.
            rest = translate_threadgroup_arrays(match["rest"], type_check)
            return "threadgroup" + rest + match["end"]
        raise MetalCompileError(
            f"only `threadgroup TYPE NAME[SIZE];` is understood, not `{match[0].strip()}`"
        )

    return THREADGROUP.sub(translate, text)


COMPLEX = """
template <typename T> struct complex_t { T real, imag; complex_t(T real, T imag) : real(real), imag(imag) {} };
using complex64_t = complex_t<float>;
"""


@functools.cache
def read_mlx_headers() -> str:
    """
    One text with the headers that MLX puts before every kernel, from the installed wheel.

    Left out: logging, and complex numbers except their type. Simdgroup operations of bfloat are
    left out too: metal_stdlib.h defines them together with the calling line.
    """
    specification = importlib.util.find_spec("mlx")
    assert specification is not None and specification.submodule_search_locations
    directories = [
        Path(location, "include") for location in specification.submodule_search_locations
    ]
    included: set[str] = set()

    def read_header(name: str) -> str:
        if name in included or name.endswith(("/complex.h", "/logging.h")):
            return ""
        included.add(name)
        paths = [directory / name for directory in directories]
        text = next(path for path in paths if path.exists()).read_text()
        text = re.sub(r'#include "(.+?)"', lambda match: read_header(match[1]), text)
        return re.sub(r"#include <.+?>|#pragma once", "", text)

    text = read_header("mlx/backend/metal/kernels/utils.h")
    simd = re.search(
        r"#define instantiate_metal_simd_comm_funcs.*?\n} +// namespace metal\n", text, re.S
    )
    assert simd, "MLX's bf16_math.h has changed"
    text = text.replace(simd[0], "")
    # Clang allows no address space on a parameter that is an array.
    text = re.sub(r"(constant const int64_t) (\w+)\[\d\]", r"\1* \2", text)
    return translate_literals(COMPLEX + remove_comments(text), type_check=False)


BODY = 100_000  # the number of the body's first line; the header's lines are numbered from 1


@functools.cache
def make_prologue(type_check: bool) -> str:
    """The text before every kernel."""
    define = "#define EMULATOR_TYPE_CHECK" if type_check else ""
    return f'{define}\n#include "metal_stdlib.h"\n#line 1 "mlx"\n{read_mlx_headers()}\n'


def translate(text: str, type_check: bool) -> str:
    """Translates a kernel's text from Metal's dialect to clang's."""
    text = translate_literals(remove_comments(text), type_check)
    return translate_threadgroup_arrays(text, type_check)


def translate_program(program: Program, type_check: bool) -> str:
    """The text after the prologue."""
    header = translate(program.header, type_check)
    body = translate(program.body, type_check)
    text = f'#line 1 "kernel"\n{header}\n'
    text += f'#line 1 "signature"\n{program.signature}#line {BODY} "kernel"\n{body}\n}}\n'
    text += '#line 1 "end"\n'
    if type_check:
        is_template = program.instance != program.name
        if is_template:
            text += f"template decltype({program.instance}) {program.instance};\n"
        return text

    arguments = []
    for kind, name in program.parameters:
        if name not in program.arrays:
            arguments.append(f"emulator_thread->{name}")
            continue
        pointer = f"arguments[{program.arrays.index(name)}]"
        if kind.endswith("&"):
            arguments.append(f"*({kind[:-1]}*){pointer}")
        else:
            arguments.append(f"({kind}){pointer}")
    call = f"{program.instance}({', '.join(arguments)});"
    return text + f"EMULATOR_ENTRY void emulator_kernel(void** arguments) {{ {call} }}\n"


# ---- mistakes that clang does not find

SCALARS = "bool char uchar short ushort int uint long ulong half float bfloat bfloat16_t float16_t size_t".split()
SCALARS += [f"{sign}int{bits}_t" for sign in ("", "u") for bits in (8, 16, 32, 64)]
VECTORS = [f"{scalar}{lanes}" for scalar in SCALARS for lanes in (2, 3, 4)]
ABSENT = "double goto try throw new delete std virtual printf".split()
MAX_ARGUMENTS = 31


def remove_braces(text: str) -> str:
    """The text without the contents of braces."""
    count = 1
    while count:
        text, count = re.subn(r"\{[^{}]*\}", "", text)
    return text


def find_mistakes(program: Program) -> list[str]:
    """The mistakes that Metal's compiler refuses and clang does not."""
    header = remove_comments(program.header)
    text = header + "\n" + remove_comments(program.body)
    template_types = re.findall(r"typename (\w+)", program.signature + header)
    types = "|".join([*SCALARS, *VECTORS, *template_types])
    space = r"(?:\b(device|constant|threadgroup|thread)\s+)?(?:(?:const|volatile)\s+)*"
    pointer = re.compile(rf"{space}\b(?:{types})\s*(?:const\s*)?[*&]\s*\w+")
    qualifiers = r"(?:(?:static|const|constexpr|inline)\s+)*"
    variable = re.compile(
        rf"^\s*(?!.*\bconstant\b)({qualifiers}(?:{types})\s+\w+[^(\n]*)[=;]", re.M
    )

    mistakes = [
        f"pointer or reference without an address space: `{match[0]}`"
        for match in pointer.finditer(text)
        if not match[1]
    ]
    mistakes += [
        f"variable of the program that is not constant: `{match[1].strip()}`"
        for match in variable.finditer(remove_braces(header))
    ]
    mistakes += [
        f"threadgroup memory declared outside of the kernel: `{match[0]}`"
        for match in THREADGROUP.finditer(header)
        if match["end"] == ";" and THREADGROUP_ARRAY.match(match["rest"])
    ]
    mistakes += [
        f"`{word}` is not in Metal" for word in re.findall(rf"\b(?:{'|'.join(ABSENT)})\b", text)
    ]
    if len(program.arrays) > MAX_ARGUMENTS:
        mistakes.append(f"{len(program.arrays)} arguments, Metal allows {MAX_ARGUMENTS}")
    return mistakes


# ---- type check and compilation


TYPE_CHECK_FLAGS = "-Wno-everything -Wimplicit-float-conversion -fno-lax-vector-conversions".split()
TYPE_CHECK_FLAGS += "-Werror=return-type -Werror=uninitialized -Werror=vla-extension".split()
FLOAT_TO_BFLOAT = re.compile(r"to (?:'\w+' \(aka )?'__bf16'\)? \[-Wimplicit-float-conversion\]")
RUN_FLAGS = "-Wno-everything -g1 -gdwarf-4 -fvisibility=hidden".split()
RUN_FLAGS += ["-ftrivial-auto-var-init=pattern"]
# half of the stack that runtime.cpp gives a thread
RUN_FLAGS += ["-Wframe-larger-than=65536", "-Werror=frame-larger-than"]
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
    """Raises MetalCompileError if the kernel would not compile on a Mac."""
    mistakes = find_mistakes(program)
    if mistakes:
        raise MetalCompileError("\n  ".join([f"{program.name} does not compile:", *mistakes]))

    source = translate_program(program, type_check=True)
    try:
        warnings = toolchain.check_syntax(make_prologue(True), source, TYPE_CHECK_FLAGS)
    except toolchain.CompileError as error:
        raise make_compile_error(program, str(error)) from None
    conversions = [line for line in warnings.splitlines() if FLOAT_TO_BFLOAT.search(line)]
    if conversions:
        raise make_compile_error(program, "\n".join(conversions))


@functools.cache
def build_library(program: Program, mode: str) -> Path:
    """The path of the kernel's library for the runtime."""
    source = translate_program(program, type_check=False)
    flags = [*RUN_FLAGS, *MODES[mode]]
    try:
        return toolchain.build_library(make_prologue(False), source, flags)
    except toolchain.CompileError as error:
        raise make_compile_error(program, str(error)) from None


def make_compile_error(program: Program, output: str) -> MetalCompileError:
    """
    An error with clang's messages, and with the line numbers of the kernel's header and body.

    It has a note only if the note names a line of the kernel.
    """
    lines = []
    diagnostic = re.compile(r"^(.+?):(\d+):\d+: (?:fatal )?(error|warning|note): (.*)", re.M)
    for file, line, kind, message in diagnostic.findall(output):
        if file == "kernel":
            lines.append(f"{describe_line(program, int(line))}: {message}")
        elif kind != "note":
            lines.append(message)
    unique_lines = list(dict.fromkeys(lines)) or [output]
    return MetalCompileError("\n  ".join([f"{program.name} does not compile:", *unique_lines]))


def describe_line(program: Program, line: int) -> str:
    """The number of a line in the header or the body, and the line's text."""
    if line >= BODY:
        part = "body"
        number = line - BODY + 1
        text = program.body
    else:
        part = "header"
        number = line
        text = program.header
    return f"{part} line {number} `{text.splitlines()[number - 1].strip()}`"
