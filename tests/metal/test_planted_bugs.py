"""
Every check of the emulator can fail: kernels with one mistake each, beside their twins without it.

On a Mac there is nothing to test: a GPU says nothing of such mistakes.
"""

import platform

import mlx.core as mx
import numpy as np
import pytest

from metal import emulator

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("emulated")]

INDEX = "uint i = thread_position_in_grid.x;\n"
BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"
SUM = "out[i] = simd_sum(x[i]);"


def run(
    body: str,
    *,
    x: mx.array | None = None,
    size: int = 64,
    dtype: mx.Dtype = mx.float32,
    threads: int = 64,
    header: str = "",
    init_value: float | None = None,
    mode: str = "check",
    **options: object,
) -> mx.array:
    """`body` with an index i on 64 threads, which are one threadgroup, reading `x` and writing `out`, both of 64."""
    kernel = emulator.metal_kernel("planted", ["x"], ["out"], INDEX + body, header, mode=mode, **options)
    (out,) = kernel(
        inputs=[mx.arange(64, dtype=mx.float32) if x is None else x],
        output_shapes=[(size,)],
        output_dtypes=[dtype],
        grid=(threads, 1, 1),
        threadgroup=(64, 1, 1),
        init_value=init_value,
    )
    return out


def problems(body: str, **arguments: object) -> set[str]:
    """The checks that fail."""
    try:
        run(body, **arguments)
    except emulator.MetalRuntimeError as error:
        return error.kinds
    return set()


def assert_refused(reason: str, body: str, **arguments: object) -> None:
    with pytest.raises(emulator.MetalCompileError, match=reason):
        run(body, **arguments)


# ---- races

REVERSE = "threadgroup float shared[64]; shared[i] = x[i]; BARRIER out[i] = shared[63 - i];"


def test_a_missing_barrier() -> None:
    assert problems(REVERSE.replace("BARRIER", BARRIER)) == set()
    assert problems(REVERSE.replace("BARRIER", "")) == {"race", "uninitialised"}


def test_a_barrier_that_orders_other_memory() -> None:
    for flags in ("mem_none", "mem_device"):
        assert problems(REVERSE.replace("BARRIER", BARRIER.replace("mem_threadgroup", flags))) == {"race"}


def test_a_simdgroup_barrier_between_two_simdgroups() -> None:
    barrier = BARRIER.replace("threadgroup_barrier", "simdgroup_barrier")
    assert "race" in problems(REVERSE.replace("BARRIER", barrier))
    assert problems(REVERSE.replace("BARRIER", barrier).replace("63 - i", "i ^ 31")) == set()


def test_a_missing_barrier_within_a_simdgroup() -> None:
    assert "race" in problems(REVERSE.replace("BARRIER", "").replace("63 - i", "i ^ 31"))


def test_a_missing_barrier_before_memory_is_written_again() -> None:
    loop = (
        "threadgroup float shared[1]; float sum = 0; for (int j = 0; j < 2; j++) {"
        f"if (i == 0) shared[0] = x[j]; {BARRIER} sum += shared[0]; AGAIN }} out[i] = sum;"
    )
    assert problems(loop.replace("AGAIN", BARRIER)) == set()
    assert problems(loop.replace("AGAIN", "")) == {"race"}


def test_a_race_on_threadgroup_memory_by_writes_alone() -> None:
    body = f"threadgroup float shared[64]; shared[PLACE] = 1; {BARRIER} out[i] = shared[i / 64];"
    assert problems(body.replace("PLACE", "i")) == set()
    assert problems(body.replace("PLACE", "i / 64")) == {"race"}


def test_a_race_on_device_memory() -> None:
    body = "out[i] = x[i]; threadgroup_barrier(mem_flags::FLAGS); if (i == 0) out[0] = out[63];"
    assert problems(body.replace("FLAGS", "mem_device")) == set()
    assert problems(body.replace("FLAGS", "mem_threadgroup")) == {"race"}


def test_a_race_between_threadgroups() -> None:
    body = "out[i] = x[i % 64]; threadgroup_barrier(mem_flags::mem_device); if (i == 64) out[64] = out[OTHER];"
    assert problems(body.replace("OTHER", "127"), size=128, threads=128) == set()
    assert problems(body.replace("OTHER", "0"), size=128, threads=128) == {"race"}


def test_a_sum_without_atomics() -> None:
    assert problems("out[0] += x[i];", size=1, init_value=0) == {"race"}
    body = "atomic_fetch_add_explicit(&out[0], x[i], memory_order_relaxed);"
    assert run(body, size=1, init_value=0, atomic_outputs=True).item() == 63 * 32
    body += "if (i == 0) ((device float*)out)[0] = 1;"
    assert problems(body, size=1, init_value=0, atomic_outputs=True) == {"race"}


# A barrier that orders no memory only sets the order in which the emulator runs the steps: whatever two of them do to
# one element is a race still, and each of these is found from what is remembered of the first.
STEP = "threadgroup_barrier(mem_flags::mem_none);"
ORDER = "simdgroup_barrier(mem_flags::mem_threadgroup);"
READ, WRITE = "if (i == {}) y += shared[0];", "if (i == {}) shared[0] = y;"
ATOMIC = "threadgroup atomic<float>* p = (threadgroup atomic<float>*)shared;"
ATOMIC_READ = "if (i == {}) y += atomic_load_explicit(p, memory_order_relaxed);"
ATOMIC_WRITE = "if (i == {}) atomic_store_explicit(p, y, memory_order_relaxed);"


@pytest.mark.parametrize(
    "steps, is_race",
    [
        ([READ.format(1), WRITE.format(1)], False),
        ([READ.format(1), WRITE.format(2)], True),
        ([READ.format(1), READ.format(2), READ.format(40)], False),
        ([READ.format(1), READ.format(2), WRITE.format(1)], True),
        ([READ.format(1), READ.format(2), WRITE.format(2)], True),
        ([READ.format(1), READ.format(40), WRITE.format(1)], True),
        ([READ.format(1), READ.format(40), WRITE.format(40)], True),
        ([READ.format(1), ORDER, WRITE.format(2)], False),
        ([READ.format(1), ORDER, WRITE.format(40)], True),
        ([READ.format(1), ORDER, READ.format(2), WRITE.format(2)], False),
        ([READ.format(1), ORDER, READ.format(2), WRITE.format(3)], True),
        ([READ.format(1), BARRIER, WRITE.format(40)], False),
        ([WRITE.format(1), READ.format(1)], False),
        ([WRITE.format(1), READ.format(2)], True),
        ([WRITE.format(1), WRITE.format(2)], True),
        ([WRITE.format(1), ORDER, READ.format(2)], False),
        ([WRITE.format(1), ORDER, READ.format(40)], True),
        ([WRITE.format(1), BARRIER, READ.format(40)], False),
        ([ATOMIC_WRITE.format(1), ATOMIC_WRITE.format(2), ATOMIC_READ.format(40)], False),
        ([ATOMIC_READ.format(1), ATOMIC_READ.format(40), ATOMIC_WRITE.format(2)], False),
        ([ATOMIC_WRITE.format(1), WRITE.format(2)], True),
        ([WRITE.format(1), ATOMIC_WRITE.format(2)], True),
        ([ATOMIC_WRITE.format(1), READ.format(2)], True),
        ([WRITE.format(1), ATOMIC_READ.format(2)], True),
        ([ATOMIC_READ.format(1), WRITE.format(2)], True),
        ([READ.format(1), ATOMIC_WRITE.format(2)], True),
        ([READ.format(1), ATOMIC_READ.format(2), ATOMIC_WRITE.format(3)], True),
        ([ATOMIC_READ.format(1), READ.format(2), ATOMIC_WRITE.format(3)], True),
    ],
)
def test_two_accesses_race_without_a_barrier_for_their_memory(steps: list[str], is_race: bool) -> None:
    begin = f"threadgroup float shared[1]; {ATOMIC} float y = x[i]; if (i == 0) shared[0] = 0; {BARRIER}"
    body = f"{begin}\n{STEP.join(step + chr(10) for step in steps)} out[i] = y;"
    assert problems(body) == ({"race"} if is_race else set())


@pytest.mark.parametrize(
    "first, second", [("out[i] = out[5];", "out[5] = 1;"), ("out[5] = 1;", "out[i] = out[5];")], ids=["read", "write"]
)
def test_a_race_with_a_threadgroup_that_ran_before(first: str, second: str) -> None:
    body = f"if (i == 3) {{ {first} }} if (i == 67) {{ {second} }}"
    assert problems(body, size=128, threads=128, init_value=0) == {"race"}


def test_threads_run_in_an_order_that_no_kernel_can_rely_on() -> None:
    body = "out[i] = atomic_fetch_add_explicit((device atomic<int>*)out + 64, 1, memory_order_relaxed);"
    order = np.asarray(run(body, size=65, dtype=mx.int32, init_value=0))[:64]
    assert sorted(order) == list(range(64)) and (np.diff(order) != 1).mean() > 0.5


# ---- bounds


@pytest.mark.parametrize("kind", ["uchar", "half", "float", "float2", "float4"])
def test_a_read_out_of_bounds(kind: str) -> None:
    size = {"uchar": 1, "half": 2, "float": 4, "float2": 8, "float4": 16}[kind]
    last = 64 * 4 // size - 1
    body = f"const device {kind}* p = (const device {kind}*)x; out[i] = float((({kind})p[PLACE])LANE);"
    body = body.replace("LANE", ".x" if kind[-1].isdigit() else "")
    assert problems(body.replace("PLACE", str(last))) == set()
    assert problems(body.replace("PLACE", str(last + 1))) == {"out-of-bounds"}
    assert problems(body.replace("PLACE", "-1 + int(i) * 0")) == {"out-of-bounds"}


@pytest.mark.parametrize("kind", ["uchar", "half", "float", "float2", "float4"])
def test_a_write_out_of_bounds(kind: str) -> None:
    size = {"uchar": 1, "half": 2, "float": 4, "float2": 8, "float4": 16}[kind]
    body = f"if (i < 256 / {size} + MORE) ((device {kind}*)out)[i] = {kind}(1);"
    assert problems(body.replace("MORE", "0"), threads=320, init_value=0) - {"race"} == set()
    assert "out-of-bounds" in problems(body.replace("MORE", "1"), threads=320, init_value=0)


def test_a_write_out_of_bounds_in_fast_mode() -> None:
    assert problems("out[i] = x[i];", mode="fast") == set()
    assert problems("out[i + 1] = x[i];", mode="fast") == {"out-of-bounds"}


def test_an_index_out_of_threadgroup_memory() -> None:
    body = f"threadgroup float a[64]; threadgroup float b[64]; a[i] = b[i] = 1; {BARRIER} out[i] = a[i + MORE];"
    assert problems(body.replace("MORE", "0")) == set()
    assert problems(body.replace("MORE", "1")) & {"out-of-bounds", "undefined"}
    body = body.replace("out[i] = a[", "threadgroup float* p = a; out[i] = p[")  # whose size the compiler does not see
    assert problems(body.replace("MORE", "0")) == set()
    assert problems(body.replace("MORE", "1")) == {"out-of-bounds"}


def test_an_index_out_of_private_memory() -> None:
    body = "float a[4] = {0, 1, 2, 3}; out[i] = a[i % SIZE];"
    assert problems(body.replace("SIZE", "4")) == set()
    assert problems(body.replace("SIZE", "5")) == {"undefined"}


def test_an_address_that_is_not_aligned_for_its_type() -> None:
    body = "out[i] = (*(const device float4*)(x + PLACE)).x;"
    assert problems(body.replace("PLACE", "4")) == set()
    assert problems(body.replace("PLACE", "3")) == {"undefined"}


def test_a_write_to_an_input() -> None:
    assert problems("((device float*)x)[i] = 1; out[i] = 1;") == {"input"}
    assert_refused("read-only", "x[i] = 1; out[i] = 1;")


# ---- initial values


def test_an_uninitialised_read_of_threadgroup_memory() -> None:
    body = f"threadgroup float a[64]; if (i < SIZE) a[i] = 1; {BARRIER} out[i] = a[i];"
    assert problems(body.replace("SIZE", "64")) == set()
    assert problems(body.replace("SIZE", "63")) == {"uninitialised"}


def test_an_uninitialised_read_of_threadgroup_memory_that_the_threadgroup_before_has_written() -> None:
    body = f"threadgroup float a[64]; if (i < 64) a[i] = 1; {BARRIER} out[i] = a[i % 64];"
    assert problems(body) == set()
    assert problems(body, size=128, threads=128) == {"uninitialised"}


def test_threadgroup_memory_holds_no_numbers_at_first_even_in_fast_mode() -> None:
    body = f"threadgroup float a[64]; if (i % 2) a[i] = 1; {BARRIER} out[i] = a[i];"
    np.testing.assert_array_equal(np.isnan(np.asarray(run(body, mode="fast"))), [True, False] * 32)


def test_an_uninitialised_read_of_an_output() -> None:
    assert problems("out[i] += x[i];") == {"uninitialised"}
    assert problems("out[i] += x[i];", init_value=0) == set()


def test_an_uninitialised_variable_is_no_number() -> None:
    assert_refused("uninitialized", "float sum; out[i] = sum;")
    body = "float sums[2]; for (int j = 0; j < 1; j++) sums[j] = 1; out[i] = sums[int(x[i]) % 2];"
    np.testing.assert_array_equal(np.isnan(np.asarray(run(body))), [False, True] * 32)


def test_an_unwritten_output() -> None:
    assert problems("out[i] = 1;") == set()
    assert problems("if (i < 63) out[i] = 1;") == {"unwritten"}
    assert problems("if (i < 63) out[i] = 1;", init_value=0) == set()


# ---- divergence


def test_a_barrier_that_only_some_threads_reach() -> None:
    assert problems(f"if (i < 64) {{ {BARRIER} }} out[i] = 1;") == set()
    assert problems(f"if (i < 32) {{ {BARRIER} }} out[i] = 1;") == {"barrier"}
    assert problems(f"out[i] = 1; if (i == 5) return; {BARRIER}") == {"barrier"}


def test_two_barriers_that_meet() -> None:
    assert problems(f"if (i < 32) {{ {BARRIER} }} else {{\n {BARRIER} }} out[i] = 1;") == {"barrier"}


def test_a_simdgroup_operation_without_some_lanes() -> None:
    body = f"float s = 0; if (i < LANES) s = simd_sum(x[i]); {BARRIER} out[i] = s;"
    assert problems(body.replace("LANES", "32")) == set()
    assert problems(body.replace("LANES", "31")) == {"divergence"}
    both = body.replace("LANES", "31").replace(BARRIER, f"else\n s = simd_max(x[i]); {BARRIER}")
    assert problems(both) == {"divergence"}


def test_a_shuffle_from_a_lane_that_is_not_there() -> None:
    body = "out[i] = simd_shuffle(x[i], LANE);"
    assert problems(body.replace("LANE", "31")) == set()
    assert problems(body.replace("LANE", "32")) == {"shuffle"}
    assert problems(body.replace("LANE", "31"), size=40, threads=40) == {"shuffle"}  # the second simdgroup has 8 lanes


# ---- arithmetic


@pytest.mark.skipif(platform.machine() != "x86_64", reason="overflows of 16-bit floats are seen on x86-64 only")
def test_a_half_that_overflows() -> None:
    body = "half y = x[i]; out[i] = y * half(2);"
    x = mx.full((64,), 32752.0)
    assert run(body, x=x, dtype=mx.float16).max().item() == 65504
    assert run(body, x=x * mx.inf, dtype=mx.float16).max().item() == np.inf  # infinite before
    assert problems(body, x=x + 16, dtype=mx.float16) == {"overflow"}
    assert problems(body, x=x * 2 + 16, dtype=mx.float16) == {"overflow"}  # by conversion
    assert run(body, x=x + 16, dtype=mx.float16, allowed={"overflow"}).max().item() == np.inf


@pytest.mark.skipif(platform.machine() != "x86_64", reason="overflows of 16-bit floats are seen on x86-64 only")
def test_a_bfloat_that_overflows() -> None:
    largest = 255.0 * 2.0**120
    assert problems("out[i] = bfloat(x[i]);", x=mx.full((64,), largest), dtype=mx.bfloat16) == set()
    assert problems("out[i] = bfloat(x[i]);", x=mx.full((64,), largest * 1.002), dtype=mx.bfloat16) == {"overflow"}
    assert problems("out[i] = bfloat(x[i]);", x=mx.full((64,), np.inf), dtype=mx.bfloat16) == set()


@pytest.mark.parametrize(
    "right, wrong",
    [
        ("1 << int(x[i] / 3)", "1 << int(x[i])"),
        ("2147483647 - int(x[i])", "2147483647 + int(x[i])"),
        ("32768 * int(x[i])", "2147483647 * int(x[i])"),
        ("7 / (int(x[i]) + 1)", "7 / int(x[i])"),
        ("uint(x[i])", "uint(x[i] - 2)"),
    ],
    ids=["shift", "sum", "product", "division", "conversion"],
)
def test_arithmetic_without_a_defined_result(right: str, wrong: str) -> None:
    assert problems(f"out[i] = float({right});") == set()
    assert problems(f"out[i] = float({wrong});") == {"undefined"}


# ---- limits


def test_more_threadgroup_memory_than_there_is() -> None:
    body = f"threadgroup float a[SIZE]; a[i] = 1; {BARRIER} out[i] = a[63 - i];"
    assert problems(body.replace("SIZE", "8192")) == set()
    assert problems(body.replace("SIZE", "8193")) == {"limit"}
    assert problems(body.replace("SIZE", "1000000")) == {"limit"}


def test_more_private_memory_than_a_thread_has() -> None:
    body = "float a[SIZE]; for (int j = 0; j < SIZE; j++) a[j] = x[j % 64]; out[i] = a[int(x[i])];"
    assert problems(body.replace("SIZE", "1000")) == set()
    assert_refused("stack frame size", body.replace("SIZE", "20000"))


def test_a_thread_that_waits_for_another_in_a_loop() -> None:
    body = "if (i == 0) while (atomic_load_explicit(&out[1], memory_order_relaxed) == 0) {}"
    body += "atomic_store_explicit(&out[i], 1, memory_order_relaxed);"
    with pytest.raises(emulator.MetalRuntimeError, match="a loop without end"):
        run(body, init_value=0, atomic_outputs=True, dtype=mx.int32)


def test_more_threads_than_a_threadgroup_has() -> None:
    kernel = emulator.metal_kernel("planted", ["x"], ["out"], "out[thread_position_in_grid.x] = x[0];")
    call = {"inputs": [mx.zeros(9)], "output_shapes": [(2048,)], "output_dtypes": [mx.float32], "grid": (2048, 1, 1)}
    assert kernel(threadgroup=(1024, 1, 1), **call)[0].shape == (2048,)
    with pytest.raises(emulator.MetalRuntimeError, match="1025 threads"):
        kernel(threadgroup=(1025, 1, 1), **call)


# ---- what compiles here and not on a Mac


def test_a_small_input_is_constant_memory() -> None:
    body = "const device float* p = x; out[i] = p[i % 7];"
    assert problems(body, x=mx.zeros(8)) == set()
    assert_refused(r"body line 2 `const device.*constant float", body, x=mx.zeros(7))
    assert problems(body.replace("const device float*", "auto"), x=mx.zeros(7)) == set()


def test_an_input_without_dimensions_is_a_reference() -> None:
    assert problems("out[i] = x;", x=mx.array(1.0)) == set()
    assert_refused("subscript", "out[i] = x[0];", x=mx.array(1.0))


def test_a_float_is_no_bfloat() -> None:
    for body in ("out[i] = VALUE;", "bfloat y = VALUE; out[i] = y;"):
        for value in ("x[i]", "1.0", "0.0f"):
            assert_refused("bf16", body.replace("VALUE", value), dtype=mx.bfloat16)
            assert problems(body.replace("VALUE", f"bfloat({value})"), dtype=mx.bfloat16) == set()
    assert problems("out[i] = 1.0; half y = x[i];", dtype=mx.float16) == set()  # to half it may


def test_a_pointer_without_an_address_space() -> None:
    header = "inline float first(const SPACE float* p) { return p[0]; }"
    assert problems("out[i] = first(x);", header=header.replace("SPACE", "device")) == set()
    assert_refused("address space", "out[i] = 1;", header=header.replace("SPACE", ""))
    assert_refused("address space", "float y = 1; float& z = y; out[i] = z;")
    assert problems("float y = 1; thread float& z = y; out[i] = z * y;") == set()


def test_a_variable_of_the_program_that_is_not_constant() -> None:
    assert run("out[i] = table[i % 2];", header="constant float table[2] = {1, 2};").sum().item() == 96
    for declaration in ("const float table[2] = {1, 2};", "  static constexpr float table[] = {\n1, 2};"):
        assert_refused("not constant: `(const|static)", "out[i] = table[i % 2];", header=declaration)
    header = "inline float f() {\n    const float y = 1;\n    return y;\n}"
    assert problems("out[i] = f();", header=header) == set()


def test_threadgroup_memory_outside_of_the_kernel() -> None:
    header = "inline float f(float y) { threadgroup float a[2]; a[0] = y; return a[0]; }"
    assert_refused("outside of the kernel", "out[i] = f(1);", header=header)


def test_threadgroup_memory_in_a_form_that_is_not_understood() -> None:
    assert_refused("only `threadgroup TYPE", "threadgroup float a[2], b[2]; out[i] = 1;")
    assert_refused("only `threadgroup TYPE", "threadgroup float a[2] = {1, 2}; out[i] = 1;")


def test_words_that_metal_has_not() -> None:
    assert_refused("`double` is not in Metal", "double y = 1; out[i] = y;")
    assert_refused("`std` is not in Metal", "out[i] = std::exp(x[i]);")
    assert_refused("half line 1|body line 2 .*undeclared", "out[i] = absent;")


def test_too_many_arguments() -> None:
    names = [f"x{i}" for i in range(31)]
    kernel = emulator.metal_kernel("planted", names, ["out"], "out[0] = 1;")
    call = {"output_shapes": [(1,)], "output_dtypes": [mx.float32], "grid": (1, 1, 1), "threadgroup": (1, 1, 1)}
    with pytest.raises(emulator.MetalCompileError, match="32 arguments"):
        kernel(inputs=[mx.zeros(9)] * 31, **call)


# ---- the report


def test_a_report_names_the_thread_and_where_its_author_finds_the_line() -> None:
    header = "inline float pick(const device float* p, int j) {\n    return p[j];\n}\n"
    with pytest.raises(emulator.MetalRuntimeError) as error:
        run("out[i] =\n pick(x, i == 37 ? 64 : i);", header=header)
    assert "[out-of-bounds] read of x[64], which has 64 elements, by thread 37" in str(error.value)
    assert "header line 2 `return p[j];`" in str(error.value)
    with pytest.raises(emulator.MetalRuntimeError, match=r"body line 3 `out.*simd_max.*body line 2 `float s"):
        run("float s = 0; if (i % 2) s = simd_sum(x[i]); else\nout[i] = s + simd_max(x[i]);")
