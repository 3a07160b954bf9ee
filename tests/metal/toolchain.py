"""
The compiler of the emulator: this module finds it, calls it, and caches its results.

Clang 17 or later compiles Metal's dialect of C++14 with address spaces, 16-bit floats and vectors.
The system's clang is used if there is one. Otherwise the clang of the package `ziglang` is used,
which needs no root. The kernels and the runtime include no header of the system and link no other
library.

The results are in the user's cache directory. The name of a file is the hash of all inputs. Each
result is written elsewhere and then moved there, so several processes can share the cache.
"""

import functools
import hashlib
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent
MIN_CLANG = 17  # the first with __bf16 arithmetic
DIALECT = [
    *"-std=c++17 -fPIC -nostdinc -fno-exceptions -fno-rtti -fno-math-errno -ffp-contract=off".split(),
    "-fno-stack-protector",
    f"-I{HERE}",
    # Every operation on 16-bit floats rounds to 16 bits, as on a GPU.
    *"-Xclang -ffloat16-excess-precision=none -Xclang -fbfloat16-excess-precision=none".split(),
]


MISSING = (
    f"as there is no clang of {MIN_CLANG} or later on the PATH; `uv sync --group metal` brings one"
)


class CompileError(Exception):
    """An error with the compiler's messages."""


class Toolchain(NamedTuple):
    compile: tuple[str, ...]
    link: tuple[str, ...]
    version: str


@functools.cache
def find_toolchain() -> Toolchain | None:
    """The compiler to use, or None if there is none."""
    versions = range(30, MIN_CLANG - 1, -1)
    for name in ("clang++", *(f"clang++-{version}" for version in versions)):
        path = shutil.which(name)
        if path is None:
            continue
        version = clang_version([path])
        if version >= MIN_CLANG:
            return Toolchain((path,), (path, "-shared", "-nostdlib"), f"{path} {version}")

    package = importlib.util.find_spec("ziglang")
    if package is None or not package.origin:
        return None
    zig = str(Path(package.origin).parent / "zig")
    target = f"{platform.machine()}-linux-gnu"
    return Toolchain(
        compile=(zig, "clang", "-target", target),
        link=(zig, "ld.lld", "-shared"),
        version=f"{zig} {clang_version([zig, 'clang'])}",
    )


def clang_version(command: list[str]) -> int:
    """The major version of a clang, or 0 if the command is no clang."""
    output = subprocess.run([*command, "--version"], capture_output=True, text=True).stdout
    match = re.search(r"clang version (\d+)", output)
    return int(match[1]) if match else 0


def cache_directory() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gwen" / "metal"


def require_toolchain() -> Toolchain:
    toolchain = find_toolchain()
    if toolchain is None:
        raise CompileError(f"kernels cannot be run, {MISSING}")
    return toolchain


def cache_path(inputs: list[str], suffix: str) -> Path:
    """The path of the result of these inputs in the cache; the file may not exist yet."""
    headers = [(HERE / name).read_text() for name in ("runtime.h", "metal_stdlib.h")]
    everything = [inputs, headers, require_toolchain().version, platform.machine()]
    key = hashlib.sha256(repr(everything).encode()).hexdigest()[:24]
    return cache_directory() / f"{key}{suffix}"


def run_compiler(command: list[str], source: str) -> str:
    """Runs a command; returns its warnings, or raises CompileError with its errors."""
    process = subprocess.run(command, input=source, capture_output=True, text=True)
    if process.returncode:
        raise CompileError(process.stderr)
    return process.stderr


SCRATCH = tempfile.TemporaryDirectory()


@functools.cache
def precompile_prologue(prologue: str, flags: tuple[str, ...]) -> str:
    """
    Precompiles a prologue that many programs share; returns the path.

    To parse the prologue takes half of the time of a check.
    """
    key = hashlib.sha256(repr([prologue, flags]).encode()).hexdigest()
    path = f"{SCRATCH.name}/{key}.pch"
    compiler = [*require_toolchain().compile, "-x", "c++-header", *DIALECT]
    run_compiler([*compiler, *flags, "-", "-o", path], prologue)
    return path


def compile_source(prologue: str, source: str, flags: list[str], *output_flags: str) -> str:
    """
    Compiles a prologue and a source; returns the compiler's warnings.

    Raises CompileError with the compiler's errors.
    """
    prologue_flags = []
    if prologue:
        prologue_flags = ["-include-pch", precompile_prologue(prologue, tuple(flags))]
    compiler = [*require_toolchain().compile, "-x", "c++", *DIALECT]
    return run_compiler([*compiler, *prologue_flags, *flags, "-", *output_flags], source)


def check_syntax(prologue: str, source: str, flags: list[str]) -> str:
    """
    Compiles without output; returns the compiler's warnings.

    Raises CompileError with the compiler's errors.
    """
    path = cache_path([prologue, source, *flags], ".txt")
    if not path.exists():
        warnings = compile_source(prologue, source, flags, "-fsyntax-only")
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
            file.write(warnings)
        os.replace(file.name, path)
    return path.read_text()


def build_library(prologue: str, source: str, flags: list[str]) -> Path:
    """
    The path of the library built from a source.

    Raises CompileError with the compiler's errors.
    """
    library = cache_path([prologue, source, *flags], ".so")
    if not library.exists():
        library.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=library.parent) as scratch:
            compile_source(prologue, source, flags, "-c", "-o", f"{scratch}/kernel.o")
            link = [*require_toolchain().link, f"{scratch}/kernel.o"]
            run_compiler([*link, "-o", f"{scratch}/kernel.so"], "")
            os.replace(f"{scratch}/kernel.so", library)
    return library
