"""Which kernels of OpenBLAS run, and which others the processor could run: `.ci/run` tests with both."""

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
def test_the_other_family_is_the_newest_that_runs_and_is_not_this_one(
    monkeypatch, family, flags, other
):
    monkeypatch.setattr(blas.platform, "machine", lambda: "x86_64")
    assert blas.another_family(family, flags) == other


def test_a_processor_without_other_kernels_is_refused(monkeypatch):
    monkeypatch.setattr(blas.platform, "machine", lambda: "x86_64")
    with pytest.raises(ValueError, match="Prescott"):
        blas.another_family("Prescott", {"sse3"})


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have a BLAS of their own")
def test_the_other_family_is_the_one_that_runs_where_it_is_asked_for():
    other = run_command("-m", "tests.blas", "--other").stdout.strip()
    family = run_command(
        "-m", "tests.blas", environment={"OPENBLAS_CORETYPE": other}
    ).stdout.strip()
    assert other == family != blas.kernel_family()
    assert os.environ.get("OPENBLAS_CORETYPE") != other
