"""The emulator computes like a GPU, finds planted bugs, and refuses what Metal refuses."""

import platform

import mlx.core as mx
import numpy as np
import pytest

from metal import emulator

pytestmark = pytest.mark.slow


def run_elementwise(source: str, x: mx.array, dtype: mx.Dtype) -> mx.array:
    """
    Runs a kernel with one thread `i` for each element of x; returns its output `out`.

    `out` has the shape of x.
    """
    source = f"uint i = thread_position_in_grid.x;\n{source}"
    kernel = mx.fast.metal_kernel(name="k", input_names=["x"], output_names=["out"], source=source)
    (out,) = kernel(
        inputs=[x],
        output_shapes=[x.shape],
        output_dtypes=[dtype],
        grid=(x.size, 1, 1),
        threadgroup=(64, 1, 1),
    )
    return out


# ---- arithmetic


def test_the_emulator_reads_and_rounds_every_float16_as_numpy_does(needs_emulator: None) -> None:
    with emulator.emulate_metal("fast"):
        halves = np.arange(2**16, dtype=np.uint16).view(np.float16)
        floats = run_elementwise("out[i] = float(x[i]);", mx.array(halves), mx.float32)
        np.testing.assert_array_equal(floats, halves.astype(np.float32))

        # floats at each half, near it, and halfway to the next
        half_bits = halves.astype(np.float32).view(np.uint32)
        steps = (0, 1, 0xFFF, 0x1000, 0x1001, 0x1FFF)
        random_bits = np.random.default_rng(0).integers(0, 2**32, 100_000, dtype=np.uint32)
        bits = np.concatenate([random_bits, *(half_bits + step for step in steps)])
        x = bits.astype(np.uint32).view(np.float32)

        with np.errstate(over="ignore", invalid="ignore"):
            expected_halves = x.astype(np.float16)
        rounded_halves = run_elementwise("out[i] = half(x[i]);", mx.array(x), mx.float16)
        np.testing.assert_array_equal(rounded_halves, expected_halves)

        bfloats = run_elementwise("out[i] = bfloat16_t(x[i]);", mx.array(x), mx.bfloat16)
        expected_bfloats = np.asarray(mx.array(x).astype(mx.bfloat16).astype(mx.float32))
        np.testing.assert_array_equal(bfloats.astype(mx.float32), expected_bfloats)


def test_each_operation_on_16_bits_rounds_to_16_bits(metal: str) -> None:
    x = mx.array([1.0, 2.0, 3.0], dtype=mx.float16)
    # In float32, (x + 2048) - 2048 would be x.
    source = "half y = x[i] + half(2048.0f); out[i] = y - half(2048.0f);"
    out = run_elementwise(source, x, mx.float16)
    np.testing.assert_array_equal(out, [0.0, 2.0, 4.0])


def test_the_gradient_of_a_kernel_without_a_gradient_is_an_error_and_not_zero(metal: str) -> None:
    def double_and_sum(x: mx.array) -> mx.array:
        return run_elementwise("out[i] = 2 * x[i];", x, mx.float32).sum()

    assert double_and_sum(mx.ones(9)).item() == 18
    with pytest.raises(ValueError, match="Not implemented for CustomKernel"):
        mx.grad(double_and_sum)(mx.ones(9))


# ---- the checks. Each bug has: a body with WHAT, which runs on 64 threads; a right and a wrong
# replacement of WHAT; the kinds of checks that the wrong one fails.

BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"
REVERSE = f"threadgroup float a[64]; a[i] = x[i]; {BARRIER} out[i] = a[63 - i];".replace(
    BARRIER, "WHAT"
)
PART = f"threadgroup float a[64]; if (i < WHAT) a[i] = 1; {BARRIER} out[i] = a[i];"
POINTER = (
    f"threadgroup float a[64]; threadgroup float* p = a; a[i] = 1; {BARRIER} out[i] = p[i + WHAT];"
)
BUGS = {
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


@pytest.mark.parametrize(("body", "right", "wrong", "kinds"), BUGS.values(), ids=BUGS)
def test_the_checks_find_a_bug_and_accept_the_right_kernel(
    needs_emulator: None, body: str, right: str, wrong: str, kinds: str
) -> None:
    if "overflow" in kinds and platform.machine() != "x86_64":
        pytest.skip("overflows of 16-bit floats are seen on x86-64 only")
    x = mx.arange(64, dtype=mx.float32)
    with emulator.emulate_metal():
        run_elementwise(body.replace("WHAT", right), x, mx.float32)
        with pytest.raises(emulator.MetalRuntimeError) as error:
            run_elementwise(body.replace("WHAT", wrong), x, mx.float32)
    assert error.value.kinds == set(kinds.split())


@pytest.mark.parametrize(
    ("reason", "body", "size"),
    [
        ("read-only", "x[i] = 1; out[i] = 1;", 8),
        ("uninitialized", "float sum; out[i] = sum;", 8),
        ("`double` is not in Metal", "double y = 1; out[i] = y;", 8),
        ("`std` is not in Metal", "out[i] = std::exp(x[i]);", 8),
        # small inputs are constant
        ("const device.*constant float", "const device float* p = x; out[i] = p[i];", 7),
        ("address space", "float y = x[i]; float& z = y; out[i] = z;", 8),
        ("body line 2 .*undeclared", "out[i] = absent;", 8),
    ],
)
def test_the_emulator_refuses_a_kernel_that_would_not_compile_on_a_mac(
    needs_emulator: None, reason: str, body: str, size: int
) -> None:
    with emulator.emulate_metal(), pytest.raises(emulator.MetalCompileError, match=reason):
        run_elementwise(body, mx.zeros(size), mx.float32)


def test_an_error_names_the_thread_and_the_line_of_the_kernel(needs_emulator: None) -> None:
    with emulator.emulate_metal(), pytest.raises(emulator.MetalRuntimeError) as error:
        run_elementwise("out[i] =\n x[i == 37 ? 64 : i];", mx.zeros(64), mx.float32)
    assert "[out-of-bounds] read of x[64], which has 64 elements, by thread 37" in str(error.value)
    assert "body line 3 `x[i == 37 ? 64 : i];`" in str(error.value)
