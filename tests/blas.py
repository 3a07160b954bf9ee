"""
The family of the OpenBLAS kernels of this process, which decide how sums are rounded.

`python -m tests.blas` prints the family. `--other` prints the value of OPENBLAS_CORETYPE for
another family that runs on this machine. `.ci/run` runs the tests with both.
"""

import argparse
import ctypes
import platform
import sys
from pathlib import Path

# The families of scipy-openblas32, newest first, and the processor's flag that each needs.
FLAG_OF_FAMILY = {"SkylakeX": "avx512f", "Haswell": "avx2", "Prescott": "sse3"}
# OpenBLAS reports these names for two families.
FAMILY_OF_NAME = {"Katmai": "Prescott", "Zen": "Haswell"}


def kernel_family() -> str:
    """The family of this process's kernels, or the platform's name if OpenBLAS is not used."""
    try:
        import scipy_openblas32
    except ImportError:
        return sys.platform
    library = ctypes.CDLL(f"{scipy_openblas32.get_lib_dir()}/libscipy_openblas.so")
    library.scipy_openblas_get_corename.restype = ctypes.c_char_p
    name = library.scipy_openblas_get_corename().decode()
    return FAMILY_OF_NAME.get(name, name)


def processor_flags() -> set[str]:
    """The processor's flags, as Linux names them; only `pni` is renamed to `sse3`."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    flags = next((line for line in lines if line.startswith("flags")), "")
    return {"sse3" if flag == "pni" else flag for flag in flags.split()}


def another_family(family: str, flags: set[str]) -> str:
    """The newest other family that the processor can run. Raises ValueError if there is none."""
    if platform.machine() == "aarch64" and family.upper() != "ARMV8":
        return "ARMV8"  # the kernels that any 64-bit ARM runs
    for candidate, flag in FLAG_OF_FAMILY.items():
        if candidate != family and flag in flags:
            return candidate
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
