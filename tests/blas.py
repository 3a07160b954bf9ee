"""
The OpenBLAS kernels of this process, which decide how sums are rounded: `python -m tests.blas` prints their family.

`--other` prints the value of OPENBLAS_CORETYPE that runs another family on this machine. `.ci/run` tests with both.
"""

import argparse
import ctypes
import platform
import sys
from pathlib import Path

# The families of scipy-openblas32, newest first. It runs Zen's kernels as Haswell's, and calls Prescott's Katmai.
FLAG_OF_FAMILY = {"SkylakeX": "avx512f", "Haswell": "avx2", "Prescott": "sse3"}
OLD_NAMES = {"Katmai": "Prescott", "Zen": "Haswell"}


def kernel_family() -> str:
    """The family of the kernels that run in this process, or the platform's name where OpenBLAS is not used."""
    try:
        import scipy_openblas32
    except ImportError:
        return sys.platform
    library = ctypes.CDLL(f"{scipy_openblas32.get_lib_dir()}/libscipy_openblas.so")
    library.scipy_openblas_get_corename.restype = ctypes.c_char_p
    name = library.scipy_openblas_get_corename().decode()
    return OLD_NAMES.get(name, name)


def processor_flags() -> set[str]:
    """What the processor can do, in Linux's words; `pni` is its word for SSE3."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    flags = next((line for line in lines if line.startswith("flags")), "")
    return {"sse3" if flag == "pni" else flag for flag in flags.split()}


def another_family(family: str, flags: set[str]) -> str:
    """The newest other family that the processor can run. Raises ValueError where there is none."""
    if platform.machine() == "aarch64" and family.upper() != "ARMV8":
        return "ARMV8"  # the kernels that any 64-bit ARM runs
    for other, flag in FLAG_OF_FAMILY.items():
        if other != family and flag in flags:
            return other
    raise ValueError(f"this processor runs no kernels but {family}; test on one with AVX2")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument(
        "--other", action="store_true", help="print another family that this processor can run"
    )
    if not parser.parse_args().other:
        print(kernel_family())
        return
    try:
        print(another_family(kernel_family(), processor_flags()))
    except (OSError, ValueError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
