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


# ---- pairs: a body with WHAT in it, what makes it right, and what makes it wrong, with the checks that then fail

REVERSE = "threadgroup float shared[64]; shared[i] = x[i]; WHAT out[i] = shared[63 - i];"
LOOP = f"""threadgroup float shared[1]; float sum = 0;
    for (int j = 0; j < 2; j++) {{ if (i == 0) shared[0] = x[j]; {BARRIER} sum += shared[0]; WHAT }} out[i] = sum;"""
EXCHANGE = "out[i] = x[i % 64]; threadgroup_barrier(mem_flags::mem_device); if (i == 64) out[64] = out[WHAT];"
TWO_ARRAYS = f"threadgroup float a[64]; threadgroup float b[64]; a[i] = b[i] = 1; {BARRIER}"
POINTER = "threadgroup float* p = a; out[i] = p[i + WHAT];"  # whose size the compiler does not see
PART = f"threadgroup float a[64]; if (i < 64) a[i] = 1; {BARRIER} out[i] = a[i % 64];"
TWO_GROUPS = {"size": 128, "threads": 128}
PAIRS: dict[str, tuple[str, str, str, str, dict[str, object]]] = {
    "no barrier": (REVERSE, BARRIER, "", "race uninitialised", {}),
    "barrier without memory": (REVERSE, BARRIER, BARRIER.replace("mem_threadgroup", "mem_none"), "race", {}),
    "barrier of other memory": (REVERSE, BARRIER, BARRIER.replace("mem_threadgroup", "mem_device"), "race", {}),
    "no barrier before memory is written again": (LOOP, BARRIER, "", "race", {}),
    "writes alone": (
        f"threadgroup float shared[64]; shared[WHAT] = 1; {BARRIER} out[i] = shared[i / 64];", "i", "i / 64", "race", {}
    ),
    "device memory": (
        "out[i] = x[i]; threadgroup_barrier(mem_flags::WHAT); if (i == 0) out[0] = out[63];",
        "mem_device", "mem_threadgroup", "race", {},
    ),
    "between threadgroups": (EXCHANGE, "127", "0", "race", TWO_GROUPS),
    "write out of bounds in fast mode": ("out[i + WHAT] = x[i];", "0", "1", "out-of-bounds", {"mode": "fast"}),
    "index out of threadgroup memory": (f"{TWO_ARRAYS} {POINTER}", "0", "1", "out-of-bounds", {}),
    "index out of private memory": ("float a[4] = {0, 1, 2, 3}; out[i] = a[i % WHAT];", "4", "5", "undefined", {}),
    "address not aligned": ("out[i] = (*(const device float4*)(x + WHAT)).x;", "4", "3", "undefined", {}),
    "uninitialised threadgroup memory": (
        f"threadgroup float a[64]; if (i < WHAT) a[i] = 1; {BARRIER} out[i] = a[i];", "64", "63", "uninitialised", {}
    ),
    "output not written": ("if (i < WHAT) out[i] = 1;", "64", "63", "unwritten", {}),
    "barrier in a branch": (f"if (i < WHAT) {{ {BARRIER} }} out[i] = 1;", "64", "32", "barrier", {}),
    "return before a barrier": (f"out[i] = 1; if (i == WHAT) return; {BARRIER}", "64", "5", "barrier", {}),
    "simdgroup without some lanes": (
        f"float s = 0; if (i < WHAT) s = simd_sum(x[i]); {BARRIER} out[i] = s;", "32", "31", "divergence", {}
    ),
    "shuffle from an absent lane": ("out[i] = simd_shuffle(x[i], WHAT);", "31", "32", "shuffle", {}),
    "shift": ("out[i] = float(1 << int(x[i] WHAT));", "/ 3", "", "undefined", {}),
    "sum": ("out[i] = float(2147483647 WHAT int(x[i]));", "-", "+", "undefined", {}),
    "product": ("out[i] = float(WHAT * int(x[i]));", "32768", "2147483647", "undefined", {}),
    "division": ("out[i] = float(7 / (int(x[i]) WHAT));", "+ 1", "", "undefined", {}),
    "conversion": ("out[i] = float(uint(x[i] WHAT));", "", "- 2", "undefined", {}),
    "more threadgroup memory than there is": (
        f"threadgroup float a[WHAT]; a[i] = 1; {BARRIER} out[i] = a[63 - i];", "8192", "8193", "limit", {}
    ),
}  # fmt: skip


@pytest.mark.parametrize(("body", "right", "wrong", "kinds", "options"), PAIRS.values(), ids=PAIRS)
def test_a_bug_is_found_and_its_twin_is_right(
    body: str, right: str, wrong: str, kinds: str, options: dict[str, object]
) -> None:
    assert problems(body.replace("WHAT", right), **options) == set()
    assert problems(body.replace("WHAT", wrong), **options) == set(kinds.split())


REFUSED = {
    "read-only": "x[i] = 1; out[i] = 1;",
    "uninitialized": "float sum; out[i] = sum;",
    "stack frame size": "float a[20000]; for (int j = 0; j < 20000; j++) a[j] = x[j % 64]; out[i] = a[int(x[i])];",
    "only `threadgroup TYPE": "threadgroup float a[2], b[2]; out[i] = 1;",
    "only `threadgroup TYPE NAME": "threadgroup float a[2] = {1, 2}; out[i] = 1;",
    "`double` is not in Metal": "double y = 1; out[i] = y;",
    "`std` is not in Metal": "out[i] = std::exp(x[i]);",
    "half line 1|body line 2 .*undeclared": "out[i] = absent;",
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_no_metal_compiler_takes_is_refused(reason: str) -> None:
    assert_refused(reason, REFUSED[reason])


# ---- races


def test_a_simdgroup_barrier_between_two_simdgroups() -> None:
    barrier = BARRIER.replace("threadgroup_barrier", "simdgroup_barrier")
    assert "race" in problems(REVERSE.replace("WHAT", barrier))
    assert problems(REVERSE.replace("WHAT", barrier).replace("63 - i", "i ^ 31")) == set()


def test_a_missing_barrier_within_a_simdgroup() -> None:
    assert "race" in problems(REVERSE.replace("WHAT", "").replace("63 - i", "i ^ 31"))


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


def test_a_write_to_an_input() -> None:
    assert problems("((device float*)x)[i] = 1; out[i] = 1;") == {"input"}


# ---- initial values


def test_an_uninitialised_read_of_memory_that_the_threadgroup_before_has_written() -> None:
    assert problems(PART) == set()
    assert problems(PART, **TWO_GROUPS) == {"uninitialised"}


def test_threadgroup_memory_holds_no_numbers_at_first_even_in_fast_mode() -> None:
    body = f"threadgroup float a[64]; if (i % 2) a[i] = 1; {BARRIER} out[i] = a[i];"
    np.testing.assert_array_equal(np.isnan(np.asarray(run(body, mode="fast"))), [True, False] * 32)


def test_an_uninitialised_read_of_an_output() -> None:
    assert problems("out[i] += x[i];") == {"uninitialised"}
    assert problems("out[i] += x[i];", init_value=0) == set()


def test_an_uninitialised_variable_is_no_number() -> None:
    body = "float sums[2]; for (int j = 0; j < 1; j++) sums[j] = 1; out[i] = sums[int(x[i]) % 2];"
    np.testing.assert_array_equal(np.isnan(np.asarray(run(body))), [False, True] * 32)


# ---- divergence


def test_two_barriers_that_meet() -> None:
    assert problems(f"if (i < 32) {{ {BARRIER} }} else {{\n {BARRIER} }} out[i] = 1;") == {"barrier"}


def test_two_operations_of_a_simdgroup_that_meet() -> None:
    body = f"float s = 0; if (i < 31) s = simd_sum(x[i]); else\n s = simd_max(x[i]); {BARRIER} out[i] = s;"
    assert problems(body) == {"divergence"}


def test_a_shuffle_in_a_simdgroup_of_eight_lanes() -> None:
    assert problems("out[i] = simd_shuffle(x[i], 31);", size=40, threads=40) == {"shuffle"}


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


# ---- limits


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
