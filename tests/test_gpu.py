"""When a kernel runs and when its reference does; the doctor. No test runs a kernel."""

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
def make_double(monkeypatch):
    """
    A function that makes the operation x -> 2x, whose fake kernel computes `function`.

    The device counts as a GPU.
    """
    monkeypatch.setattr(kernels, "OPS", {})
    monkeypatch.setattr(gpu, "can_run_metal_kernels", lambda: True)
    monkeypatch.delenv("GWEN_KERNELS", raising=False)

    def make_double(function: Callable[[mx.array], mx.array]) -> kernels.Op:
        kernels.OPS.clear()
        launched: list[mx.array] = []

        @kernels.make_op(lambda x: 2 * x)
        def double(x: mx.array) -> mx.array:
            launched.append(x)
            return function(x)

        double.launched = launched  # type: ignore[attr-defined]
        return double

    return make_double


def check_kernel(op: kernels.Op, *dtypes: mx.Dtype) -> None:
    kernels.turn_off_faulty_kernels([(op, (mx.arange(4).astype(dtype),), {}) for dtype in dtypes])


def test_a_correct_kernel_runs_and_is_checked_once_for_each_dtype(make_double, capsys):
    op = make_double(lambda x: x + x)
    check_kernel(op, mx.float32, mx.float32, mx.float16)
    assert len(op.launched) == 2
    assert op(mx.array([3.0])).item() == 6
    assert len(op.launched) == 3
    assert capsys.readouterr() == ("", "")


def fail(*_: Any) -> mx.array:
    raise RuntimeError(
        "[metal::Device] Unable to build metal library from source\nprogram_source:7: error"
    )


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        (lambda x: 2.001 * x, "the kernel's results differ"),
        (lambda x: x * mx.nan, "the kernel's results differ"),
        (lambda x: (2 * x)[:3], "the kernel's results differ"),
        (fail, "[metal::Device] Unable to build metal library from source program_source:7: error"),
    ],
)
def test_a_faulty_kernel_is_off_for_one_dtype_with_one_warning(make_double, capsys, wrong, reason):
    op = make_double(wrong)
    check_kernel(op, mx.float32, mx.float32)
    assert op(mx.array([3.0])).item() == 6
    assert not op.can_run(mx.float32)
    assert op.can_run(mx.float16)
    assert len(op.launched) == 1

    warning = capsys.readouterr().err
    assert warning.startswith(f"gwen: the kernel double is off for mlx.core.float32: {reason}")
    assert warning.count("\n") == 1


def test_every_float_array_in_the_arguments_has_the_gradient_of_the_reference(monkeypatch):
    monkeypatch.setattr(kernels, "OPS", {})

    class Pair(NamedTuple):
        scale: mx.array
        offset: mx.array | None

    def weigh_ref(x, pairs, ids, power=1.0):
        outputs = []
        for pair in pairs:
            offset = 0 if pair.offset is None else pair.offset
            outputs.append((x**power * pair.scale + offset)[ids])
        return outputs

    def launch(x, pairs, ids, power=1.0):
        return [mx.stop_gradient(out) for out in weigh_ref(x, pairs, ids, power)]

    op = kernels.make_op(weigh_ref)(launch)
    monkeypatch.setattr(op, "can_run", lambda _: True)
    x = mx.array([1.0, 2.0, 3.0])
    ids = mx.array([2, 0, 2])

    def gradients(weigh):
        def weighted_sum(x, scale, other_scale, offset):
            outputs = weigh(x, [Pair(scale, None), Pair(other_scale, offset)], ids, power=3.0)
            return sum((out * mx.array([1.0, 10.0, 100.0])).sum() for out in outputs)

        arrays = x, 2 * x, mx.array([5.0]), x + 1
        return mx.grad(weighted_sum, argnums=(0, 1, 2, 3))(*arrays)

    op_gradients = gradients(op)
    assert [g.tolist() for g in op_gradients] == [g.tolist() for g in gradients(weigh_ref)]
    assert op_gradients[2].shape == (1,)


def test_the_environment_variable_turns_kernels_on_and_off_and_other_values_are_refused(
    make_double, monkeypatch
):
    op = make_double(lambda x: 2 * x)
    for value, can_run in (("off", False), ("on", True), ("", True), ("off", False)):
        monkeypatch.setenv("GWEN_KERNELS", value)
        assert op.can_run(mx.float32) is can_run, value

    monkeypatch.setenv("GWEN_KERNELS", "swiglu")
    with pytest.raises(ValueError, match="GWEN_KERNELS='swiglu'"):
        op.can_run(mx.float32)

    # A CPU runs no kernel, so the variable is not read.
    monkeypatch.setattr(gpu, "can_run_metal_kernels", lambda: False)
    assert op(mx.array([3.0])).item() == 6
    assert not op.launched


def test_integers_must_be_equal_and_infinities_must_match():
    def compare(kernel: list[Any], reference: list[Any], dtype: mx.Dtype = mx.float32) -> float:
        reference_array = mx.array(reference, dtype=dtype)
        return kernels.kernel_error_over_allowed_error(
            mx.array(kernel, dtype=dtype), [reference_array], reference_array, mx.float32
        )

    infinity = float("inf")
    assert compare([1, 2], [1, 2], mx.int32) == 0
    assert compare([1, 2], [1, 3], mx.int32) == infinity
    assert compare([1.0, -np.inf, np.nan], [1.0, -np.inf, np.nan]) == 0
    assert compare([1.0, -np.inf], [1.0, -1e30]) == infinity
    assert compare([1.0, 0.0], [1.0, np.nan]) == infinity
    assert compare([2.0], [2.0 + 3e-4]) == pytest.approx(1.0, rel=0.01)


def test_the_error_of_a_kernel_may_be_as_large_as_that_of_the_reference_in_the_same_dtype():
    exact = mx.array([100.0, 1.0])
    reference = exact * mx.array([1.02, 1.0])  # five times the error that float16 allows

    def error(kernel, reference):
        return kernels.kernel_error_over_allowed_error(kernel, reference, exact, mx.float16)

    assert error(exact * mx.array([1.019, 0.999]), reference) <= 1
    assert error(exact * mx.array([1.0, 1.05]), reference) > 1

    overflow = mx.array([mx.inf, 1.0])
    assert error(exact, overflow) == 0
    assert error(overflow, exact) == float("inf")


# ---- the doctor


@pytest.mark.skipif(gpu.on_gpu(), reason="the expected lines are those of a machine without a GPU")
def test_the_doctor_prints_the_state_of_the_machine_and_the_models_that_fit(capsys):
    doctor.main([])
    checks, _, models = capsys.readouterr().out.partition("what fits, ")
    model_lines = models.splitlines()
    assert model_lines[2].startswith("demo ")
    pattern = r"start with: uv run (--extra smollm )?train\.py --model "
    assert re.match(pattern, model_lines[-1])

    # Each line begins with "ok " or spaces, followed by a name.
    check_lines = checks.splitlines()
    not_ok = {line[3:8].strip(): line[:3] for line in check_lines if line[:3] != "ok "}
    assert not_ok == {"hub:": "   "}
    lines = dict(line[3:].strip().split(" ", 1) for line in check_lines)
    names = "versions: machine: memory: wired: device: BLAS: MLX: hub: kernels:".split()
    assert list(lines) == names
    assert lines["wired:"].startswith("none;")
    assert "CPU" in lines["BLAS:"]
    assert "mlx 0." in lines["versions:"]
    assert re.match("cpu; .* float32$", lines["device:"])
    assert re.match("right; errors .* float32 .*random:2m$", lines["MLX:"])
    assert "cannot be reached (OfflineModeIsEnabled)" in lines["hub:"]
    assert lines["kernels:"].startswith("none, ")


@pytest.mark.parametrize(("name", "value"), [("GWEN_KERNELS", "fast"), ("GWEN_DTYPE", "int4")])
def test_the_doctor_refuses_an_unknown_value_of_a_variable(monkeypatch, check_refusal, name, value):
    monkeypatch.setenv(name, value)
    check_refusal(doctor.main, ["--doctor"], f"{name}={value!r}")


@pytest.mark.parametrize("wrong", ["MLX", "kernels"])
def test_the_doctor_fails_if_mlx_or_a_kernel_is_wrong(monkeypatch, capsys, wrong):
    monkeypatch.setattr(gpu, "can_run_metal_kernels", lambda: True)
    small_config = model_choice.load_known_config("random:2m")
    monkeypatch.setattr(model_choice, "load_known_config", lambda _: small_config)
    for name, op in kernels.OPS.items():
        monkeypatch.setattr(op, "disabled_dtypes", set())
        is_faulty = wrong == "kernels" and name == "add_norm"
        monkeypatch.setattr(op, "launch", fail if is_faulty else op.reference)
    if wrong == "MLX":
        monkeypatch.setattr(probe, "largest_relative_attention_error", lambda *_: 1.0)
    monkeypatch.setattr(
        doctor.subprocess,
        "run",
        lambda command, **_: subprocess.CompletedProcess(command, 0, "fits"),
    )

    with pytest.raises(SystemExit) as exit_info:
        doctor.main(["--doctor"])
    printed = capsys.readouterr()
    assert exit_info.value.code == 2
    assert "error:" in printed.err
    (line,) = [line for line in printed.out.splitlines() if line.startswith("BAD")]
    assert line.split()[1] == f"{wrong}:"
    if wrong == "MLX":
        assert "masked attention 1e+04" in line
    else:
        assert line.endswith("OFF: add_norm")


# ---- the arithmetic of MLX


def check_arithmetic(dtype):
    """The line about the arithmetic of MLX, and whether it is right."""
    return probe.check_mlx_arithmetic(
        [
            kernels.random_normal_array(96, 64, dtype=dtype),
            kernels.random_normal_array(40, 64, dtype=dtype),
        ],
        (4, 2, 64),
    )


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16, mx.float32], ids=str)
def test_the_arithmetic_of_mlx_is_right_on_this_machine(dtype):
    line, is_right = check_arithmetic(dtype)
    assert is_right
    assert line.startswith("right; errors ")
    assert "products 0.0" in line


@pytest.mark.parametrize("kind", ["many rows", "eleven bits", "16-bit scores"])
def test_silent_errors_of_mlx_are_found(monkeypatch, kind):
    """
    The errors are those of issues 3585, 3797 and 4411 of mlx, and one of its attention.

    The last occurs under a gradient without MLX_SDPA_VJP_FALLBACK.
    """
    matmul = mx.array.__matmul__

    def round_to_eleven_bits(array):
        if array.dtype != mx.float32:
            return array
        return (array.view(mx.uint32) & 0xFFFFE000).view(mx.float32)

    def multiply_wrongly(x, y):
        if kind == "many rows":
            return matmul(x, y) * (1.1 if x.shape[0] > 8 else 1)
        return matmul(round_to_eleven_bits(x), round_to_eleven_bits(y))

    def attend_with_16_bit_scores(queries, keys, values, mask):
        scores = matmul(queries, mx.repeat(keys, 2, 1).swapaxes(-1, -2))
        if mask == "causal":
            num_queries, num_keys = scores.shape[2:]
            mask = mx.tri(num_queries, num_keys, num_keys - num_queries, mx.bool_)
        weights = mx.softmax(mx.where(mask, scores.astype(mx.float32) / 8, -1e9), -1)
        return (weights @ mx.repeat(values, 2, 1).astype(mx.float32)).astype(queries.dtype)

    if kind == "16-bit scores":
        monkeypatch.setattr(attention, "attention", attend_with_16_bit_scores)
    else:
        monkeypatch.setattr(mx.array, "__matmul__", multiply_wrongly)
        monkeypatch.setattr(probe, "largest_relative_attention_error", lambda *_: 0.0)
    line, is_right = check_arithmetic(mx.float16)
    assert not is_right
    assert line.startswith("WRONG")


def test_loading_a_model_warns_in_one_line_of_wrong_arithmetic_in_mlx(monkeypatch, capsys):
    monkeypatch.setattr(gpu, "can_run_metal_kernels", lambda: True)
    monkeypatch.setattr(kernels, "is_kernels_variable_on", lambda: False)
    monkeypatch.setattr(
        probe,
        "measure_product_error",
        lambda weight, rows: float(rows > 8 and weight.shape == (768, 128)),
    )
    gwen.check_mlx_and_disable_faulty_kernels(
        gwen.Model(model_choice.load_known_config("random:2m"))
    )
    warning = capsys.readouterr().err
    assert warning.startswith("gwen: the arithmetic of MLX itself is WRONG")
    assert "float32 products 1e+04" in warning
    assert warning.count("\n") == 1


def test_a_gpu_without_metal_runs_no_metal_kernel(monkeypatch):
    monkeypatch.setattr(gpu, "on_gpu", lambda: True)
    monkeypatch.setattr(mx.metal, "is_available", lambda: False)
    assert not gpu.can_run_metal_kernels()
    assert not any(op.can_run(mx.float16) for op in kernels.OPS.values())
    assert not uses_kernels()
