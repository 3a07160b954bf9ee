"""
The kernels in the BLAS of a CPU, machine/blas.c, against float64; and the expressions where they are missing.
"""

import ctypes
import platform
import shutil
import subprocess
import sys

import cpu_blas
import mlx.core as mx
import numpy as np
import pytest

from machine import cpu, gpu

COMPILER = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
needs_compiler = pytest.mark.skipif(COMPILER is None or sys.platform != "linux", reason="no shim is compiled here")

needs_kernels = pytest.mark.skipif(not cpu.has_kernels(), reason="another BLAS serves MLX here")
ODD = [np.inf, -np.inf, np.nan, 0.0, -0.0, 1e-40, -1e-40, -1e30, 1e30, 88.7228, 88.7229, -87.4, -103.9, -104.1]


@needs_compiler
def test_with_a_compiler_on_linux_the_kernels_are_there_and_no_test_of_them_is_skipped():
    assert cpu.has_kernels(), f"MLX's BLAS is {cpu_blas.description}"


def test_the_description_tells_whether_the_kernels_are_there():
    with_them = ("system OpenBLAS", "OpenBLAS of scipy-openblas32")
    assert cpu.has_kernels() == (cpu_blas.description in with_them)


@needs_compiler
@pytest.mark.parametrize("processor", ["native", "x86-64", "sandybridge", "haswell", "skylake-avx512"])
def test_the_kernels_are_right_in_every_width_of_vectors(tmp_path, processor):
    features = cpu_blas._processor().split()
    needs = {"sandybridge": {"avx"}, "haswell": {"avx2", "fma", "bmi2"}, "skylake-avx512": {"avx512f", "avx512vl"}}
    if processor != "native" and (platform.machine() != "x86_64" or not needs.get(processor, set()) <= {*features}):
        pytest.skip(f"this processor cannot run code for {processor}")
    flags = [f"-march={processor}" if flag == "-march=native" else flag for flag in cpu_blas.FLAGS]
    built = str(tmp_path / "shim.so")
    subprocess.run([str(COMPILER), *flags, str(cpu_blas.SHIM), "-o", built], check=True)
    sgemm, rng = ctypes.CDLL(built).cblas_sgemm, np.random.default_rng(0)

    def called(shape, alpha, a, b, c, transposed=111):
        sizes, rows = [ctypes.c_int(size) for size in shape], a.shape[1]
        pointers = [ctypes.c_void_p(array.ctypes.data) for array in (a, b, c)]
        scale, add = ctypes.c_float(alpha), ctypes.c_float(0)
        sgemm(
            101,
            111,
            transposed,
            *sizes,
            scale,
            pointers[0],
            rows,
            pointers[1],
            b.shape[1],
            add,
            pointers[2],
            c.shape[1],
        )
        return c

    for rows, columns, depth in ((1, 1, 128), (3, 7, 131), (8, 13, 200), (5, 24, 257)):
        a, b = (rng.standard_normal((size, depth)).astype(np.float32) for size in (rows, columns))
        product = called((rows, columns, depth), 1, a, b, np.zeros((rows, columns), np.float32), 112)
        np.testing.assert_allclose(product, a.astype(np.float64) @ b.T, rtol=0, atol=3e-5)
        shift, one = a[:, :1].copy(), np.zeros((1, depth), np.float32)
        np.testing.assert_allclose(
            called((rows, depth, 1), cpu.EXPONENTIALS, shift, one, a.copy()), np.exp(a - shift), rtol=1e-6
        )
        for alpha, exact in ((cpu.MAXIMA, a.max(1)), (cpu.SUMS, a.astype(np.float64).sum(1))):
            found = called((rows, 1, depth), alpha, a, one.T.copy(), np.zeros((rows, 1), np.float32))
            np.testing.assert_allclose(found[:, 0], exact, rtol=0, atol=3e-5)


@needs_kernels
def test_exp_is_that_of_float64_over_the_whole_range():
    x = np.concatenate([np.linspace(-110, 90, 200_001), ODD]).astype(np.float32)
    with np.errstate(over="ignore"):
        exact = np.exp(x.astype(np.float64))
        rounded = exact.astype(np.float32)
    found = np.array(gpu.exp(mx.array(x)))
    normal = (exact > 1.2e-38) & np.isfinite(rounded)
    assert np.abs(found[normal] / exact[normal] - 1).max() < 1.5e-7
    np.testing.assert_allclose(found[~normal], rounded[~normal], rtol=0, atol=2e-45)  # inf, nan, 0 and denormals


@needs_kernels
@pytest.mark.parametrize("shape", [(), (1,), (37,), (3, 5), (2, 3, 16), (2, 3, 4, 101)])
def test_exp_of_what_is_left_of_a_shift_is_equal_wherever_a_number_stands(shape):
    x, shift = gpu.normal(*shape, dtype=mx.float32, scale=3), gpu.normal(*shape[:-1], 1, dtype=mx.float32, seed=1)
    found = np.array(gpu.exp(x, shift if shape else None))
    exact = np.exp(np.array(x, np.float64) - (np.array(shift, np.float64) if shape else 0))
    np.testing.assert_allclose(found, exact, rtol=2e-6)
    for size in (1, 3, 20):
        same = gpu.exp(mx.broadcast_to(x.reshape(-1, 1), (x.size, size)))
        assert (np.array(same) == np.array(gpu.exp(x)).reshape(-1, 1)).all()


@needs_kernels
def test_what_is_no_row_of_memory_has_its_exp_too():
    x = gpu.normal(6, 5, dtype=mx.float32)
    for view in (x.T, x[::2, 1::2], mx.broadcast_to(x[:1], (4, 5))):
        np.testing.assert_allclose(np.array(gpu.exp(view)), np.exp(np.array(view)), rtol=1e-6)


@pytest.mark.parametrize("kernels", [pytest.param(True, marks=needs_kernels), False])
def test_the_gradient_of_exp_takes_the_shift_as_fixed(monkeypatch, kernels):
    monkeypatch.setattr(cpu, "has_kernels", lambda: kernels)
    x = gpu.normal(3, 7, dtype=mx.float32)
    value, slope = mx.value_and_grad(lambda x: (gpu.exp(2 * x, gpu.row_max(x)) * mx.arange(7)).sum())(x)
    shifted = np.exp(2 * np.array(x) - np.array(x).max(-1, keepdims=True)) * np.arange(7)
    np.testing.assert_allclose(value.item(), shifted.sum(), rtol=1e-5)
    np.testing.assert_allclose(np.array(slope), 2 * shifted, rtol=1e-5)


@needs_kernels
def test_the_rows_of_an_array_that_lies_otherwise_in_memory_have_their_sum_and_largest(monkeypatch):
    monkeypatch.setattr(gpu, "WORTH_A_KERNEL", 0)
    x, y = gpu.normal(6, 5, dtype=mx.float32), gpu.normal(3, 4, 5, dtype=mx.float32)
    for view in (x.T, x[::2, 1:4], mx.broadcast_to(x[:1], (4, 5)).T, y.transpose(0, 2, 1), y.transpose(2, 1, 0)):
        exact = np.array(view)
        np.testing.assert_allclose(np.array(gpu.row_sum(view)), exact.sum(-1, keepdims=True), rtol=0, atol=1e-5)
        assert (np.array(gpu.row_max(view)) == exact.max(-1, keepdims=True)).all()


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 3), (2, 0, 3)])
def test_of_nothing_there_is_an_exp_and_a_sum_as_of_mlx(monkeypatch, shape):
    monkeypatch.setattr(gpu, "WORTH_A_KERNEL", 0)
    x = mx.zeros(shape)
    assert gpu.exp(x).shape == shape
    assert gpu.row_sum(x).tolist() == x.sum(-1, keepdims=True).tolist()


SHAPES = [(1, 1), (4, 3), (5, 16), (2, 3, 37), (2, 2, 3, 160), (2, 3000)]


@needs_kernels
@pytest.mark.parametrize("shape", SHAPES)
def test_the_sum_of_a_row_and_its_gradient_are_those_of_float64(monkeypatch, shape):
    monkeypatch.setattr(gpu, "WORTH_A_KERNEL", 0)
    x, factor = gpu.normal(*shape, dtype=mx.float32), gpu.normal(*shape[:-1], 1, dtype=mx.float32, seed=1)
    value, slope = mx.value_and_grad(lambda x: (gpu.row_sum(x) * factor).sum())(x)
    exact = np.array(x, np.float64).sum(-1, keepdims=True)
    np.testing.assert_allclose(np.array(gpu.row_sum(x)), exact, rtol=0, atol=1e-6 * np.abs(np.array(x)).sum(-1).max())
    np.testing.assert_allclose(value.item(), (exact * np.array(factor)).sum(), rtol=1e-4)
    assert (np.array(slope) == np.broadcast_to(np.array(factor), shape)).all()


@needs_kernels
def test_the_sum_of_a_vocabulary_loses_no_digits():
    x = mx.full((1, 151_936), 0.1)
    assert abs(gpu.row_sum(x).item() / (151_936 * float(np.float32(0.1))) - 1) < 1e-5


@needs_kernels
@pytest.mark.parametrize("shape", SHAPES)
def test_the_largest_of_a_row_is_found_wherever_it_stands(monkeypatch, shape):
    monkeypatch.setattr(gpu, "WORTH_A_KERNEL", 0)
    x = gpu.normal(*shape, dtype=mx.float32)
    assert (np.array(gpu.row_max(x)) == np.array(x).max(-1, keepdims=True)).all()
    for place in (0, shape[-1] // 2, shape[-1] - 1):
        for value in (9.0, np.nan):
            row = np.full((1, shape[-1]), -np.inf, np.float32)
            row[0, place] = value
            np.testing.assert_equal(np.array(gpu.row_max(mx.array(row))).item(), value)


@needs_kernels
@pytest.mark.parametrize(("columns", "depth"), [(1, 128), (5, 131), (6, 144), (13, 259), (64, 512), (25, 1000)])
def test_a_product_of_few_rows_is_exact_and_each_row_is_its_own(columns, depth):
    rng = np.random.default_rng(0)
    weight, x = rng.standard_normal((columns, depth)), rng.standard_normal((8, depth))
    whole = mx.array(x, mx.float32) @ mx.array(weight, mx.float32).T
    size = np.abs(x) @ np.abs(weight).T
    assert (np.abs(np.array(whole) - x @ weight.T) / size).max() < 2e-7
    for rows in range(1, 8):
        part = mx.array(x[8 - rows :], mx.float32) @ mx.array(weight, mx.float32).T
        assert (np.array(part) == np.array(whole)[8 - rows :]).all(), rows
