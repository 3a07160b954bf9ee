"""Kernels of several kinds against numpy: the emulator runs what the text says. On a Mac they run on the GPU."""

import platform
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from metal import emulator, program

pytestmark = pytest.mark.slow
DTYPES = [mx.float32, mx.float16, mx.bfloat16]
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "float16", "bfloat16"])
each_mode = pytest.mark.parametrize("metal", ["check", "fast"], indirect=True)


def random(shape: tuple[int, ...], dtype: mx.Dtype, seed: int = 0) -> mx.array:
    return mx.array(np.random.default_rng(seed).normal(size=shape).astype(np.float32)).astype(dtype)


def as_float64(x: mx.array) -> np.ndarray:
    return np.asarray(x.astype(mx.float32)).astype(np.float64)


def call(
    source: str,
    inputs: list[mx.array],
    shape: tuple[int, ...],
    dtype: mx.Dtype,
    grid: tuple[int, int, int] = (1, 1, 1),
    threadgroup: tuple[int, int, int] = (64, 1, 1),
    making: dict[str, Any] | None = None,
    **options: Any,
) -> mx.array:
    """The output of a kernel whose inputs are x, y and z; making: what the kernel itself is made with."""
    names = ["x", "y", "z"][: len(inputs)]
    kernel = mx.fast.metal_kernel(name="k", input_names=names, output_names=["out"], source=source, **(making or {}))
    how: Any = {"grid": grid, "threadgroup": threadgroup} | options
    return kernel(inputs=inputs, output_shapes=[shape], output_dtypes=[dtype], **how)[0]


def elementwise(source: str, inputs: list[mx.array], dtype: mx.Dtype, **options: Any) -> mx.array:
    """One output element for each element of the first input; the body's index is `i`."""
    source = f"uint i = thread_position_in_grid.x;\n{source}"
    return call(source, inputs, inputs[0].shape, dtype, (inputs[0].size, 1, 1), **options)


# ---- whole kernels

# A threadgroup is a row. Each thread adds up every GROUP-th element, then lanes, then simdgroups.
ROW_SUM = """
    uint row = threadgroup_position_in_grid.x;
    int size = x_shape[1];
    uint thread_index = thread_index_in_threadgroup;
    const device T* values = x + row * size;
    threadgroup float partial[32];
    float sum = 0;
    for (int i = thread_index; i < size; i += GROUP) sum += float(values[i]);
    sum = simd_sum(sum);
    if (thread_index_in_simdgroup == 0) partial[simdgroup_index_in_threadgroup] = sum;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (simdgroup_index_in_threadgroup == 0) {
        sum = simd_sum(thread_index < GROUP / 32 ? partial[thread_index] : 0.0f);
        if (thread_index == 0) out[row] = sum;
    }
"""


def run_rows(source: str, x: mx.array, output_shape: tuple[int, ...], dtype: mx.Dtype, group: int = 128) -> np.ndarray:
    template = [("T", x.dtype), ("GROUP", group)]
    grid = (x.shape[0] * group, 1, 1)
    return as_float64(call(source, [x], output_shape, dtype, grid, (group, 1, 1), template=template))


@each_mode
@each_dtype
@pytest.mark.parametrize("size", [8, 33, 1000])
def test_sums_of_rows_agree_with_numpy(metal: str, dtype: mx.Dtype, size: int) -> None:
    x = random((3, size), dtype)
    held = as_float64(x)
    np.testing.assert_allclose(run_rows(ROW_SUM, x, (3,), mx.float32), held.sum(1), atol=1e-4)


def test_a_row_of_a_real_vocabulary_is_summed_in_fast_mode(compiler: None) -> None:
    with emulator.patched("fast"):
        x = random((2, 151_936), mx.float16)
        np.testing.assert_allclose(run_rows(ROW_SUM, x, (2,), mx.float32, 256), as_float64(x).sum(1), atol=1e-2)


# ---- simdgroup operations

LANES = np.arange(32)
VALUES = np.random.default_rng(1).permutation(32) - 16  # whole numbers whose sums are exact in every type
SIMD_OPERATIONS = {  # and what each lane gets
    "simd_sum(x[i])": np.full(32, VALUES.sum()),
    "simd_max(x[i])": np.full(32, VALUES.max()),
    "simd_broadcast(x[i], 7)": np.full(32, VALUES[7]),
    "simd_shuffle(x[i], 31 - i)": VALUES[::-1],
    "simd_shuffle_xor(x[i], 5)": VALUES[LANES ^ 5],
}


@pytest.mark.parametrize("dtype", [*DTYPES, mx.int32], ids=["float32", "float16", "bfloat16", "int32"])
def test_simdgroup_operations_do_what_they_say(metal: str, dtype: mx.Dtype) -> None:
    source = "uint i = thread_index_in_simdgroup;\n"
    source += "\n".join(f"out[32 * {row} + i] = {operation};" for row, operation in enumerate(SIMD_OPERATIONS))
    x, shape = mx.array(VALUES).astype(dtype), (len(SIMD_OPERATIONS), 32)
    out = call(source, [x], shape, dtype, (32, 1, 1), (32, 1, 1), template=[("T", dtype)])
    for row, (operation, expected) in zip(as_float64(out), SIMD_OPERATIONS.items(), strict=True):
        np.testing.assert_array_equal(row, expected, err_msg=operation)


# ---- arithmetic


def test_every_float16_is_read_and_rounded_as_numpy_does(emulated: None) -> None:
    with emulator.patched("fast"):
        halves = np.arange(2**16, dtype=np.uint16).view(np.float16)
        floats = elementwise("out[i] = float(x[i]);", [mx.array(halves)], mx.float32)
        np.testing.assert_array_equal(floats, halves.astype(np.float32))
        bits = np.random.default_rng(0).integers(0, 2**32, 100_000, dtype=np.uint32)
        near = halves.astype(np.float32).view(np.uint32)  # floats at, just below, halfway and just above each half
        bits = np.concatenate([bits, *(near + step for step in (0, 1, 0xFFF, 0x1000, 0x1001, 0x1FFF))]).astype(
            np.uint32
        )
        x = bits.view(np.float32)
        with np.errstate(over="ignore", invalid="ignore"):
            expected = x.astype(np.float16)
        rounded = elementwise("out[i] = half(x[i]);", [mx.array(x)], mx.float16)
        np.testing.assert_array_equal(rounded, expected)
        as_bfloat = elementwise("out[i] = bfloat16_t(x[i]);", [mx.array(x)], mx.bfloat16).astype(mx.float32)
        np.testing.assert_array_equal(as_bfloat, np.asarray(mx.array(x).astype(mx.bfloat16).astype(mx.float32)))


def test_each_operation_on_16_bits_rounds_to_16_bits(metal: str) -> None:
    x = mx.array([1.0, 2.0, 3.0], dtype=mx.float16)
    # in float32 (x + 2048) - 2048 would be x
    out = elementwise("half y = x[i] + half(2048.0f); out[i] = y - half(2048.0f);", [x], mx.float16)
    np.testing.assert_array_equal(out, [0.0, 2.0, 4.0])


# ---- the call: signature, templates, grids, layouts


def test_the_text_is_what_mlx_writes_so_small_inputs_are_constant_and_scalars_references(emulated: None) -> None:
    arrays = [mx.zeros(8), mx.zeros(7), mx.array(1.0)]
    body = "out[0] = x[0] + y[0] + z;"
    kernel = emulator.make_metal_kernel(
        name="k", input_names=["x", "y", "z"], output_names=["out"], source=body, header="// nothing\n"
    )
    call = {"output_shapes": [(1,)], "output_dtypes": [mx.float32], "grid": (1, 1, 1), "threadgroup": (1, 1, 1)}
    text = program.export(kernel, "// nothing\n", body, arrays, call)
    kinds = ["const device float*", "const constant float*", "const constant float&", "device float*"]
    assert text.parameters == list(zip(kinds, ["x", "y", "z", "out"], strict=True))
    assert text.body == body and text.header == "// nothing\n"


def test_shape_strides_and_ndim_come_with_an_input(metal: str) -> None:
    x = mx.zeros((3, 5, 7))
    source = "out[i] = i < 3 ? y_shape[i] : i < 6 ? int(y_strides[i - 3]) : y_ndim;"
    found = elementwise(source, [mx.arange(7, dtype=mx.int32), x], mx.int32)
    np.testing.assert_array_equal(found, [3, 5, 7, 35, 7, 1, 3])


@pytest.mark.parametrize("contiguous", [True, False])
@pytest.mark.parametrize("view", ["transposed", "every second", "backwards"])
def test_an_input_in_another_layout_is_copied_or_read_by_its_strides(metal: str, view: str, contiguous: bool) -> None:
    x = mx.arange(60, dtype=mx.float32).reshape(6, 10)
    x = {"transposed": x.T, "every second": x[::2, 1::2], "backwards": x[::-1]}[view]
    index = "i" if contiguous else "int(i / x_shape[1]) * x_strides[0] + int(i % x_shape[1]) * x_strides[1]"
    source = f"uint i = thread_position_in_grid.x; out[i] = x[{index}];"
    out = call(source, [x], x.shape, x.dtype, (x.size, 1, 1), making={"ensure_row_contiguous": contiguous})
    np.testing.assert_array_equal(np.asarray(out), np.asarray(x))


def test_a_grid_that_threadgroups_do_not_divide_ends_in_smaller_ones(metal: str) -> None:
    source = """
        uint3 p = thread_position_in_grid;
        uint i = (p.z * threads_per_grid.y + p.y) * threads_per_grid.x + p.x;
        uint3 q = threadgroup_position_in_grid * dispatch_threads_per_threadgroup + thread_position_in_threadgroup;
        bool same = p.x == q.x && p.y == q.y && p.z == q.z;
        out[i] = same ? threads_per_threadgroup.x * threads_per_threadgroup.y + 1000 * simdgroups_per_threadgroup
                        + 10000 * threadgroups_per_grid.x : 0;
    """
    out = call(source, [mx.zeros(1)], (2, 5, 20), mx.uint32, (20, 5, 2), (16, 4, 1))
    columns, rows = np.array([16] * 16 + [4] * 4), np.array([4] * 4 + [1])
    sizes = rows[:, None] * columns
    np.testing.assert_array_equal(np.asarray(out), [20000 + 1000 * -(-sizes // 32) + sizes] * 2)


def test_templates_take_types_integers_and_truth_values(metal: str) -> None:
    template = [("T", mx.bfloat16), ("N", 5), ("YES", True), ("NO", False)]
    source = "out[i] = float(T(x[i])) + N + (YES ? 100 : 0) + (NO ? 1000 : 0);"
    found = elementwise(source, [mx.full((9,), 1.001)], mx.float32, template=template)
    np.testing.assert_array_equal(found, np.full(9, 106.0))  # 1.001 rounds to 1 in bfloat16


def test_a_kernel_without_a_gradient_says_so_instead_of_giving_zeros(metal: str) -> None:
    def twice(x: mx.array) -> mx.array:
        return call("out[0] = 2 * x[0];", [x], (1,), mx.float32, threadgroup=(1, 1, 1)).sum()

    assert twice(mx.ones(9)).item() == 2
    with pytest.raises(ValueError, match="Not implemented for CustomKernel"):
        mx.grad(twice)(mx.ones(9))


# ---- the checks: a body with WHAT in it on 64 threads, what makes it right and wrong, and the check that then fails

BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"
REVERSE = f"threadgroup float a[64]; a[i] = x[i]; {BARRIER} out[i] = a[63 - i];".replace(BARRIER, "WHAT")
PART = f"threadgroup float a[64]; if (i < WHAT) a[i] = 1; {BARRIER} out[i] = a[i];"
POINTER = f"threadgroup float a[64]; threadgroup float* p = a; a[i] = 1; {BARRIER} out[i] = p[i + WHAT];"
PAIRS = {
    "no barrier": (REVERSE, BARRIER, "", "race uninitialised"),
    "a barrier of other memory": (REVERSE, BARRIER, BARRIER.replace("mem_threadgroup", "mem_device"), "race"),
    "a barrier of a simdgroup": (REVERSE, BARRIER, BARRIER.replace("threadgroup_", "simdgroup_", 1), "race"),
    "a read out of bounds": ("out[i] = x[i + WHAT];", "0", "1", "out-of-bounds"),
    "a write out of bounds": ("out[i + WHAT] = x[i];", "0", "1", "out-of-bounds"),
    "an index out of threadgroup memory": (POINTER, "0", "1", "out-of-bounds"),
    "an index out of private memory": ("float a[4] = {0, 1, 2, 3}; out[i] = a[i % WHAT];", "4", "5", "undefined"),
    "memory that nobody wrote": (PART, "64", "63", "uninitialised"),
    "an output that nobody wrote": ("if (i < WHAT) out[i] = 1;", "64", "63", "unwritten"),
    "a write to an input": ("WHAT out[i] = 1;", "", "((device float*)x)[i] = 1;", "input"),
    "a barrier in a branch": (f"if (i < WHAT) {{ {BARRIER} }} out[i] = 1;", "64", "32", "barrier"),
    "a simdgroup without some lanes": (
        f"float s = 0; if (i < WHAT) s = simd_sum(x[i]); {BARRIER} out[i] = s;", "32", "31", "divergence"
    ),
    "a shuffle from an absent lane": ("out[i] = simd_shuffle(x[i], WHAT);", "31", "32", "shuffle"),
    "too much threadgroup memory": (f"threadgroup float a[WHAT]; a[i] = 1; {BARRIER} out[i] = a[63 - i];", "8192",
                                    "8193", "limit"),
    "a shift": ("out[i] = float(1 << int(x[i] WHAT));", "/ 3", "", "undefined"),
    "a half that overflows": ("out[i] = half(x[i]) * half(WHAT);", "1000", "2000", "overflow"),
}  # fmt: skip


@pytest.mark.parametrize(("body", "right", "wrong", "kinds"), PAIRS.values(), ids=PAIRS)
def test_a_bug_is_found_and_its_twin_is_right(emulated: None, body: str, right: str, wrong: str, kinds: str) -> None:
    if "overflow" in kinds and platform.machine() != "x86_64":
        pytest.skip("overflows of 16-bit floats are seen on x86-64 only")
    x = mx.arange(64, dtype=mx.float32)
    with emulator.patched():
        elementwise(body.replace("WHAT", right), [x], mx.float32)
        with pytest.raises(emulator.MetalRuntimeError) as error:
            elementwise(body.replace("WHAT", wrong), [x], mx.float32)
    assert error.value.kinds == set(kinds.split())


@pytest.mark.parametrize(
    ("reason", "body", "size"),
    [
        ("read-only", "x[i] = 1; out[i] = 1;", 8),
        ("uninitialized", "float sum; out[i] = sum;", 8),
        ("`double` is not in Metal", "double y = 1; out[i] = y;", 8),
        ("`std` is not in Metal", "out[i] = std::exp(x[i]);", 8),
        ("const device.*constant float", "const device float* p = x; out[i] = p[i];", 7),  # small inputs are constant
        ("address space", "float y = x[i]; float& z = y; out[i] = z;", 8),
        ("body line 2 .*undeclared", "out[i] = absent;", 8),
    ],
)
def test_what_no_metal_compiler_takes_is_refused(emulated: None, reason: str, body: str, size: int) -> None:
    with emulator.patched(), pytest.raises(emulator.MetalCompileError, match=reason):
        elementwise(body, [mx.zeros(size)], mx.float32)


def test_a_report_names_the_thread_and_where_its_author_finds_the_line(emulated: None) -> None:
    with emulator.patched(), pytest.raises(emulator.MetalRuntimeError) as error:
        elementwise("out[i] =\n x[i == 37 ? 64 : i];", [mx.zeros(64)], mx.float32)
    assert "[out-of-bounds] read of x[64], which has 64 elements, by thread 37" in str(error.value)
    assert "body line 3 `x[i == 37 ? 64 : i];`" in str(error.value)
