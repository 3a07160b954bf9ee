"""
The kernels of OpenBLAS that run, and another family of kernels that the processor could run.

`.ci/run` runs the tests with both families.
"""

import os
import sys

import blas
import pytest
from conftest import run_command

AVX512 = {"sse3", "avx2", "avx512f"}
AVX2 = {"sse3", "avx2"}


@pytest.mark.parametrize(
    ("family", "flags", "other"),
    [
        ("SkylakeX", AVX512, "Haswell"),
        ("Haswell", AVX512, "SkylakeX"),
        ("Prescott", AVX512, "SkylakeX"),
        ("Haswell", AVX2, "Prescott"),
        ("Sandybridge", AVX2, "Haswell"),
        ("Sandybridge", {"sse3"}, "Prescott"),
    ],
)
def test_the_other_family_is_the_newest_family_that_runs_except_the_current_one(
    monkeypatch, family, flags, other
):
    monkeypatch.setattr(blas.platform, "machine", lambda: "x86_64")
    assert blas.another_family(family, flags) == other


def test_a_processor_without_other_kernels_is_refused(monkeypatch):
    monkeypatch.setattr(blas.platform, "machine", lambda: "x86_64")
    with pytest.raises(ValueError, match="Prescott"):
        blas.another_family("Prescott", {"sse3"})


@pytest.mark.skipif(sys.platform != "linux", reason="other systems provide another BLAS")
def test_the_other_family_runs_if_openblas_coretype_names_it():
    other = run_command("-m", "tests.blas", "--other").stdout.strip()
    environment = {"OPENBLAS_CORETYPE": other}
    family = run_command("-m", "tests.blas", environment=environment).stdout.strip()
    assert family == other
    assert family != blas.kernel_family()
    assert os.environ.get("OPENBLAS_CORETYPE") != other
