"""When a kernel runs and when its expression does; the doctor. No kernel is run here."""

import re
import subprocess
from collections.abc import Callable
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
import pytest

import doctor
import gwen
from disk import model_choice
from forecast.row_memory import uses_kernels
from layers import attention, probe
from machine import gpu, kernels


@pytest.fixture
def double(monkeypatch):
    """An operation whose kernel should double, on a device that is said to be a GPU; `put(f)` makes it compute f(x)."""
    monkeypatch.setattr(kernels, "OPS", {})
    monkeypatch.setattr(gpu, "can_run_metal_kernels", lambda: True)
    monkeypatch.delenv("GWEN_KERNELS", raising=False)

    def put(function: Callable[[mx.array], mx.array]) -> kernels.Op:
        kernels.OPS.clear()
        launched: list[mx.array] = []

        @kernels.make_op(lambda x: 2 * x)
        def double(x: mx.array) -> mx.array:
            launched.append(x)
            return function(x)

        double.launched = launched  # type: ignore[attr-defined]
        return double

    return put


def check(op: kernels.Op, *dtypes: mx.Dtype) -> None:
    kernels.turn_off_faulty_kernels([(op, (mx.arange(4).astype(dtype),), {}) for dtype in dtypes])


def test_a_kernel_that_agrees_runs_and_is_checked_once_for_each_kind_of_call(double, capsys):
    op = double(lambda x: x + x)
    check(op, mx.float32, mx.float32, mx.float16)
    assert len(op.launched) == 2
    assert op(mx.array([3.0])).item() == 6 and len(op.launched) == 3
    assert capsys.readouterr() == ("", "")


def fail(*_: Any) -> mx.array:
    raise RuntimeError(
        "[metal::Device] Unable to build metal library from source\nprogram_source:7: error"
    )


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        *(
            (function, "the kernel's results differ")
            for function in (lambda x: 2.001 * x, lambda x: x * mx.nan, lambda x: (2 * x)[:3])
        ),
        (fail, "[metal::Device] Unable to build metal library from source program_source:7: error"),
    ],
)
def test_a_kernel_that_disagrees_or_does_not_compile_is_off_for_the_run_and_named_once(
    double, capsys, wrong, why
):
    op = double(wrong)
    check(op, mx.float32, mx.float32)
    assert op(mx.array([3.0])).item() == 6 and not op.can_run(mx.float32) and op.can_run(mx.float16)
    assert len(op.launched) == 1
    printed = capsys.readouterr().err
    assert (
        printed.startswith(f"gwen: the kernel double is off for mlx.core.float32: {why}")
        and printed.count("\n") == 1
    )


def test_every_array_of_floats_in_the_arguments_has_the_gradient_of_the_reference(monkeypatch):
    monkeypatch.setattr(kernels, "OPS", {})

    class Pair(NamedTuple):
        scale: mx.array
        offset: mx.array | None

    def weigh_ref(x, pairs, ids, power=1.0):
        return [
            (x**power * pair.scale + (0 if pair.offset is None else pair.offset))[ids]
            for pair in pairs
        ]

    def launch(x, pairs, ids, power=1.0):
        return [mx.stop_gradient(out) for out in weigh_ref(x, pairs, ids, power)]

    op = kernels.make_op(weigh_ref)(launch)
    monkeypatch.setattr(op, "can_run", lambda _: True)
    x, ids = mx.array([1.0, 2.0, 3.0]), mx.array([2, 0, 2])

    def total(call, x, scale, other, offset):
        outputs = call(x, [Pair(scale, None), Pair(other, offset)], ids, power=3.0)
        return sum((out * mx.array([1.0, 10.0, 100.0])).sum() for out in outputs)

    arrays = x, 2 * x, mx.array([5.0]), x + 1
    ours, theirs = (
        mx.grad(lambda *a, f=f: total(f, *a), argnums=(0, 1, 2, 3))(*arrays)
        for f in (op, weigh_ref)
    )
    assert [g.tolist() for g in ours] == [g.tolist() for g in theirs] and ours[2].shape == (1,)


def test_the_variable_chooses_and_refuses_what_it_does_not_know(double, monkeypatch):
    op = double(lambda x: 2 * x)
    for value, runs in (("off", False), ("on", True), ("", True), ("off", False)):
        monkeypatch.setenv("GWEN_KERNELS", value)
        assert op.can_run(mx.float32) is runs, value
    monkeypatch.setenv("GWEN_KERNELS", "swiglu")
    with pytest.raises(ValueError, match="GWEN_KERNELS='swiglu'"):
        op.can_run(mx.float32)
    monkeypatch.setattr(gpu, "can_run_metal_kernels", lambda: False)  # a CPU, which runs none
    assert op(mx.array([3.0])).item() == 6 and not op.launched


def test_whole_numbers_must_be_equal_and_infinities_must_match():
    def compare(ours: list[Any], theirs: list[Any], dtype: mx.Dtype = mx.float32) -> float:
        other = mx.array(theirs, dtype=dtype)
        return kernels.kernel_error_over_allowed_error(
            mx.array(ours, dtype=dtype), [other], other, mx.float32
        )

    assert compare([1, 2], [1, 2], mx.int32) == 0 and compare([1, 2], [1, 3], mx.int32) == float(
        "inf"
    )
    assert compare([1.0, -np.inf, np.nan], [1.0, -np.inf, np.nan]) == 0
    assert (
        compare([1.0, -np.inf], [1.0, -1e30]) == float("inf") == compare([1.0, 0.0], [1.0, np.nan])
    )
    assert compare([2.0], [2.0 + 3e-4]) == pytest.approx(1.0, rel=0.01)


def test_a_kernel_may_be_as_far_off_as_its_expression_is_in_the_same_type_and_no_farther():
    exact = mx.array([100.0, 1.0])
    own = exact * mx.array([1.02, 1.0])  # five times what float16 allows
    assert (
        kernels.kernel_error_over_allowed_error(
            exact * mx.array([1.019, 0.999]), own, exact, mx.float16
        )
        <= 1
    )
    assert (
        kernels.kernel_error_over_allowed_error(
            exact * mx.array([1.0, 1.05]), own, exact, mx.float16
        )
        > 1
    )
    overflown = mx.array([mx.inf, 1.0])
    assert kernels.kernel_error_over_allowed_error(exact, overflown, exact, mx.float16) == 0
    assert kernels.kernel_error_over_allowed_error(overflown, exact, exact, mx.float16) == float(
        "inf"
    )


# ---- the doctor


@pytest.mark.skipif(gpu.on_gpu(), reason="these are the lines of a machine without a GPU")
def test_the_doctor_says_what_runs_here_and_what_fits(capsys):
    doctor.main([])
    checks, _, models = capsys.readouterr().out.partition("what fits, ")
    assert models.splitlines()[2].startswith("demo ")
    assert re.match(
        r"start with: uv run (--extra smollm )?train\.py --model ", models.splitlines()[-1]
    )
    assert {line[3:8].strip(): line[:3] for line in checks.splitlines() if line[:3] != "ok "} == {
        "hub:": "   "
    }
    lines = dict(line[3:].strip().split(" ", 1) for line in checks.splitlines())
    assert (
        list(lines) == "versions: machine: memory: wired: device: BLAS: MLX: hub: kernels:".split()
    )
    assert lines["wired:"].startswith("none;") and "CPU" in lines["BLAS:"]
    assert "mlx 0." in lines["versions:"] and re.match("cpu; .* float32$", lines["device:"])
    assert re.match("right; errors .* float32 .*random:2m$", lines["MLX:"])
    assert "cannot be reached (OfflineModeIsEnabled)" in lines["hub:"] and lines[
        "kernels:"
    ].startswith("none, ")


@pytest.mark.parametrize(("name", "value"), [("GWEN_KERNELS", "fast"), ("GWEN_DTYPE", "int4")])
def test_the_doctor_refuses_a_variable_it_does_not_know(monkeypatch, check_refusal, name, value):
    monkeypatch.setenv(name, value)
    check_refusal(doctor.main, ["--doctor"], f"{name}={value!r}")


@pytest.mark.parametrize("wrong", ["MLX", "kernels"])
def test_the_doctor_fails_where_mlx_or_a_kernel_is_wrong(monkeypatch, capsys, wrong):
    monkeypatch.setattr(gpu, "can_run_metal_kernels", lambda: True)
    monkeypatch.setattr(
        model_choice,
        "load_known_config",
        lambda _, known=model_choice.load_known_config: known("random:2m"),
    )
    for name, op in kernels.OPS.items():
        monkeypatch.setattr(op, "disabled_dtypes", set())
        monkeypatch.setattr(
            op, "launch", fail if wrong == "kernels" and name == "add_norm" else op.reference
        )
    if wrong == "MLX":
        monkeypatch.setattr(probe, "largest_relative_attention_error", lambda *_: 1.0)
    monkeypatch.setattr(
        doctor.subprocess,
        "run",
        lambda command, **_: subprocess.CompletedProcess(command, 0, "fits"),
    )
    with pytest.raises(SystemExit) as status:
        doctor.main(["--doctor"])
    printed = capsys.readouterr()
    lines = [line for line in printed.out.splitlines() if line.startswith("BAD")]
    assert (
        status.value.code == 2
        and [line.split()[1] for line in lines] == [f"{wrong}:"]
        and "error:" in printed.err
    )
    assert (
        "masked attention 1e+04" in lines[0]
        if wrong == "MLX"
        else lines[0].endswith("OFF: add_norm")
    )


# ---- what MLX computes itself


def looked(dtype):
    return probe.check_mlx_arithmetic(
        [
            kernels.random_normal_array(96, 64, dtype=dtype),
            kernels.random_normal_array(40, 64, dtype=dtype),
        ],
        (4, 2, 64),
    )


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16, mx.float32], ids=str)
def test_what_mlx_computes_is_right_here(dtype):
    line, well = looked(dtype)
    assert well and line.startswith("right; errors ") and "products 0.0" in line


@pytest.mark.parametrize("kind", ["many rows", "eleven bits", "16-bit scores"])
def test_silent_errors_of_mlx_are_found(monkeypatch, kind):
    """Those of mlx #3585 and #3797, #4411, and of its attention under a gradient without MLX_SDPA_VJP_FALLBACK."""
    matmul = mx.array.__matmul__

    def wrong(x, y):
        if kind == "many rows":
            return matmul(x, y) * (1.1 if x.shape[0] > 8 else 1)
        rounded = [
            array.view(mx.uint32) & 0xFFFFE000 if array.dtype == mx.float32 else array
            for array in (x, y)
        ]
        return matmul(
            *(array.view(mx.float32) if array.dtype == mx.uint32 else array for array in rounded)
        )

    def attend(queries, keys, values, mask):
        scores = matmul(queries, mx.repeat(keys, 2, 1).swapaxes(-1, -2))  # in 16 bits
        mask = (
            mx.tri(*scores.shape[2:], scores.shape[3] - scores.shape[2], mx.bool_)
            if mask == "causal"
            else mask
        )
        weights = mx.softmax(mx.where(mask, scores.astype(mx.float32) / 8, -1e9), -1)
        return (weights @ mx.repeat(values, 2, 1).astype(mx.float32)).astype(queries.dtype)

    if kind == "16-bit scores":
        monkeypatch.setattr(attention, "attention", attend)
    else:
        monkeypatch.setattr(mx.array, "__matmul__", wrong)
        monkeypatch.setattr(probe, "largest_relative_attention_error", lambda *_: 0.0)
    line, well = looked(mx.float16)
    assert not well and line.startswith("WRONG")


def test_a_model_that_is_loaded_says_in_a_line_what_mlx_computes_wrongly(monkeypatch, capsys):
    monkeypatch.setattr(gpu, "can_run_metal_kernels", lambda: True)
    monkeypatch.setattr(kernels, "is_kernels_variable_on", lambda: False)
    monkeypatch.setattr(
        probe,
        "measure_product_error",
        lambda weight, rows: float(rows > 8 and weight.shape == (768, 128)),
    )
    gwen.warn_and_disable_faulty_kernels(gwen.Model(model_choice.load_known_config("random:2m")))
    printed = capsys.readouterr().err
    assert (
        printed.startswith("gwen: the arithmetic of MLX itself is WRONG")
        and "float32 products 1e+04" in printed
    )
    assert printed.count("\n") == 1


def test_a_gpu_without_metal_runs_no_metal_kernel(monkeypatch):
    monkeypatch.setattr(gpu, "on_gpu", lambda: True)
    monkeypatch.setattr(mx.metal, "is_available", lambda: False)
    assert not gpu.can_run_metal_kernels()
    assert not any(op.can_run(mx.float16) for op in kernels.OPS.values())
    assert not uses_kernels()
