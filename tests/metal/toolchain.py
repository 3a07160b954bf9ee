"""
The compiler of the emulator: found, called, its results cached by content.

A clang of 17 or later compiles Metal's dialect of C++14 with address spaces, 16-bit floats and vectors. The system's is
taken if there is one, else the one inside the package `ziglang`, which needs no root. Neither the kernels nor the
runtime include a header of the system, and nothing is linked but their own objects.

Results lie in the user's cache directory under the hash of everything that went into them. They are moved there whole,
so that runs beside each other can share it.
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
    # every operation on 16-bit floats rounds to 16 bits, as on a GPU
    *"-Xclang -ffloat16-excess-precision=none -Xclang -fbfloat16-excess-precision=none".split(),
]


MISSING = (
    f"as there is no clang of {MIN_CLANG} or later on the PATH; `uv sync --group metal` brings one"
)


class CompileError(Exception):
    """The compiler's complaints."""


class Toolchain(NamedTuple):
    compile: tuple[str, ...]
    link: tuple[str, ...]
    version: str


@functools.cache
def find() -> Toolchain | None:
    """The compiler to use, None if there is none."""
    for name in ("clang++", *(f"clang++-{version}" for version in range(30, MIN_CLANG - 1, -1))):
        if (path := shutil.which(name)) and (version := clang_version([path])) >= MIN_CLANG:
            return Toolchain((path,), (path, "-shared", "-nostdlib"), f"{path} {version}")
    if (package := importlib.util.find_spec("ziglang")) and package.origin:
        zig = str(Path(package.origin).parent / "zig")
        target = f"{platform.machine()}-linux-gnu"
        version = clang_version([zig, "clang"])
        return Toolchain(
            (zig, "clang", "-target", target), (zig, "ld.lld", "-shared"), f"{zig} {version}"
        )
    return None


def clang_version(command: list[str]) -> int:
    """The major version of a clang, 0 if it is none."""
    output = subprocess.run([*command, "--version"], capture_output=True, text=True).stdout
    match = re.search(r"clang version (\d+)", output)
    return int(match[1]) if match else 0


def ensure_cache_directory() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gwen" / "metal"


def require() -> Toolchain:
    toolchain = find()
    if toolchain is None:
        raise CompileError(f"kernels cannot be run, {MISSING}")
    return toolchain


def cached(inputs: list[str], suffix: str) -> Path:
    """Where the result of these inputs lies, or is to be put."""
    headers = [(HERE / name).read_text() for name in ("runtime.h", "metal_stdlib.h")]
    key = hashlib.sha256(
        repr([inputs, headers, require().version, platform.machine()]).encode()
    ).hexdigest()[:24]
    return ensure_cache_directory() / f"{key}{suffix}"


def run(command: list[str], source: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(command, input=source, capture_output=True, text=True)
    if done.returncode:
        raise CompileError(done.stderr)
    return done


SCRATCH = tempfile.TemporaryDirectory()


@functools.cache
def parsed(beginning: str, flags: tuple[str, ...]) -> str:
    """The file of a beginning that many programs share, which is half of what it takes to check one, parsed once."""
    path = f"{SCRATCH.name}/{hashlib.sha256(repr([beginning, flags]).encode()).hexdigest()}.pch"
    run([*require().compile, "-x", "c++-header", *DIALECT, *flags, "-", "-o", path], beginning)
    return path


def compiled(beginning: str, source: str, flags: list[str], *how: str) -> str:
    """Compiles a source text after a beginning; the compiler's warnings. CompileError on errors."""
    shared = ["-include-pch", parsed(beginning, tuple(flags))] if beginning else []
    return run(
        [*require().compile, "-x", "c++", *DIALECT, *shared, *flags, "-", *how], source
    ).stderr


def check(beginning: str, source: str, flags: list[str]) -> str:
    """Compiles without output; the compiler's warnings. CompileError on errors."""
    warnings = cached([beginning, source, *flags], ".txt")
    if not warnings.exists():
        said = compiled(beginning, source, flags, "-fsyntax-only")
        warnings.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=warnings.parent, delete=False) as file:
            file.write(said)
        os.replace(file.name, warnings)
    return warnings.read_text()


def build(beginning: str, source: str, flags: list[str]) -> Path:
    """The library made of a source text. CompileError says what is wrong with it."""
    library = cached([beginning, source, *flags], ".so")
    if not library.exists():
        library.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=library.parent) as scratch:
            compiled(beginning, source, flags, "-c", "-o", f"{scratch}/kernel.o")
            run([*require().link, f"{scratch}/kernel.o", "-o", f"{scratch}/kernel.so"], "")
            os.replace(f"{scratch}/kernel.so", library)
    return library
