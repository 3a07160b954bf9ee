"""
Builds GPU kernels, and checks them against reference expressions.

A kernel is written in a `.metal` file and must give the same results as a plain MLX expression. An
`Op` is a pair of a kernel and its expression. When a model is loaded, the operations that it calls
are computed by both the kernel and the expression, and the results are compared. A kernel that does
not compile, or is less exact than its expression, is turned off for the run, and a line on stderr
names the kernel. On a CPU, only the expressions run. The environment variable GWEN_KERNELS turns
all kernels on or off.

The kernels themselves are in layers/.
"""

import contextlib
import functools
import math
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Generic, ParamSpec, TypeVar

import cpu_blas  # noqa: F401  (before mlx)
import mlx.core as mx
from mlx.utils import tree_flatten, tree_map

from machine import gpu


class Kernel:
    """
    A kernel, which has a `.metal` file of its own and is compiled at its first call.

    The file contains helper functions, then the line `kernel void NAME() {` and the kernel's body.
    MLX generates the parameters. It adds a parameter for each built-in name, such as
    `thread_position_in_grid`, that occurs in the body, even in a comment. A line `#include "FILE"`
    is replaced by the contents of that file in the same directory.

    inputs, outputs: the names of the input arrays and output arrays in the body, separated by
        spaces. A scalar is an array of one number.
    contiguous: whether inputs are first copied into row-major order. A kernel without such copies
        must use the `_strides` of the inputs.
    """

    def __init__(self, path: Path, inputs: str, outputs: str, contiguous: bool = True):
        self.path = path
        self.name = path.stem
        self.contiguous = contiguous
        self.inputs = inputs.split()
        self.outputs = outputs.split()
        # The compiled kernel for each compiler, which is MLX's compiler or, in tests, the emulator.
        self._compiled: dict[Any, Any] = {}

    @functools.cached_property
    def header_and_body(self) -> tuple[str, str]:
        """The text before the kernel function, and the body of the kernel function."""

        def read_included_file(include_line: re.Match[str]) -> str:
            return self.path.with_name(include_line[1]).read_text("utf-8")

        source = self.path.read_text("utf-8")
        text = re.sub(r'^ *#include "(.+)"\n', read_included_file, source, flags=re.M)
        header, begin, body = text.partition(f"kernel void {self.name}() {{\n")
        assert begin, self.path
        assert body.endswith("}\n"), self.path
        return header, body.removesuffix("}\n")

    def __call__(
        self,
        inputs: list[mx.array],
        outputs: Sequence[tuple[Sequence[int], mx.Dtype]],
        *,
        grid: tuple[int, int, int],
        threadgroup: tuple[int, int, int],
        **template: int | bool | mx.Dtype,
    ) -> list[mx.array]:
        """
        Queues the kernel and returns its outputs.

        outputs: the shape and dtype of each output array.
        grid: the number of threads along each of three axes.
        template: constants and types that are compiled into the kernel. Each combination of
            constants and types is compiled separately, so a constant must have one fixed value
            per model and dtype.
        """
        compiler = mx.fast.metal_kernel
        if compiler not in self._compiled:
            header, body = self.header_and_body
            self._compiled[compiler] = compiler(
                name=f"gwen_{self.name}",
                input_names=self.inputs,
                output_names=self.outputs,
                source=body,
                header=header,
                ensure_row_contiguous=self.contiguous,
            )
        return self._compiled[compiler](
            inputs=inputs,
            output_shapes=[shape for shape, _ in outputs],
            output_dtypes=[dtype for _, dtype in outputs],
            grid=grid,
            threadgroup=threadgroup,
            template=list(template.items()),
        )


@functools.lru_cache(maxsize=None, typed=True)  # typed: 0.0 and False are equal
def constant_array(*values: float | bool) -> mx.array:
    """
    A cached array of the given numbers.

    Kernels need such arrays because all their inputs must be arrays. The numbers come from
    settings, so the cache stays small.
    """
    return mx.array(values)


# ---- an operation: an expression and the equivalent kernel

TOLERANCES = {mx.float32: 1e-4, mx.float16: 4e-3, mx.bfloat16: 3e-2}
OPS: "dict[str, Op[Any, Any]]" = {}  # all operations by name, in the order of their definition

P = ParamSpec("P")
R = TypeVar("R")
# A function of (cotangents, results, *arguments) that returns the gradient with respect to each
# floating-point array in the arguments.
Gradient = Callable[..., Sequence[mx.array]]


class Op(Generic[P, R]):
    """
    An operation that both a kernel and a reference expression can compute.

    A call runs the kernel if the kernel is allowed for the dtype of the first argument. Otherwise,
    the call evaluates the reference expression.

    reference: the function that evaluates the expression, which defines the operation.
    launch: the function that runs the kernel.
    gradient: the function that computes the gradient. By default, MLX computes the gradient of the
        reference. All floating-point arrays in the positional arguments get gradients.
    """

    def __init__(
        self, reference: Callable[P, R], launch: Callable[P, R], gradient: Gradient | None
    ):
        self.name = launch.__name__
        assert self.name not in OPS, self.name
        self.reference: Callable[..., R] = reference
        self.launch: Callable[..., R] = launch
        self.gradient = gradient or self._reference_gradient
        # the dtypes for which the kernel failed or gave wrong results on this machine
        self.disabled_dtypes: set[mx.Dtype] = set()
        OPS[self.name] = self

    def __call__(self, *arguments: P.args, **settings: P.kwargs) -> R:
        first: Any = arguments[0]
        if _recorded_calls:
            _recorded_calls[-1].append((self, arguments, settings))
            return self.reference(*arguments, **settings)
        if not self.can_run(first.dtype):
            return self.reference(*arguments, **settings)
        if gpu.is_forward_only():
            return self.launch(*arguments, **settings)

        floats, replace_floats = _float_arrays_and_replacer(arguments)

        def launch_with_floats(*arrays: mx.array) -> R:
            return self.launch(*replace_floats(arrays), **settings)

        def gradients_of_floats(
            primals: Any, cotangents: Any, results: Any
        ) -> tuple[mx.array, ...]:
            new_arguments = replace_floats(_array_leaves(primals))
            gradients = self.gradient(
                _array_leaves(cotangents), _array_leaves(results), *new_arguments, **settings
            )
            return tuple(gradients)

        result: R = gpu.call_with_vjp(launch_with_floats, gradients_of_floats, *floats)
        return result

    def _reference_gradient(
        self, cotangents: list[mx.array], _: list[mx.array], *arguments: Any, **settings: Any
    ) -> list[mx.array]:
        floats, replace_floats = _float_arrays_and_replacer(arguments)

        def reference_with_floats(*arrays: mx.array) -> list[mx.array]:
            return _array_leaves(self.reference(*replace_floats(arrays), **settings))

        _results, gradients = mx.vjp(reference_with_floats, floats, cotangents)
        return gradients

    def can_run(self, dtype: mx.Dtype) -> bool:
        """Whether the kernel is available and allowed for arrays of this dtype."""
        is_enabled = gpu.can_run_metal_kernels() and is_kernels_variable_on()
        return is_enabled and dtype in TOLERANCES and dtype not in self.disabled_dtypes

    def find_kernel_fault(self, *arguments: Any, **settings: Any) -> str:
        """
        Compares the kernel with the expression on one call.

        Returns the reason why the kernel must not be used on this device, or "" if the results of
        the kernel and the expression agree.
        """
        dtype = arguments[0].dtype
        floats, replace_floats = _float_arrays_and_replacer(arguments)
        wide_arguments = replace_floats([array.astype(mx.float32) for array in floats])
        try:
            exact = self.reference(*wide_arguments, **settings)
            reference = self.reference(*arguments, **settings)
            kernel = self.launch(*arguments, **settings)
            error = kernel_error_over_allowed_error(kernel, reference, exact, dtype)
        except (RuntimeError, ValueError) as failure:  # MLX raises these if compilation fails
            return " ".join(str(failure).split())[:300]
        if error <= 1:
            return ""
        return (
            f"the kernel's results differ from those of its expression by {error:.3g} times the "
            f"tolerance for {dtype}"
        )


def make_op(
    reference: Callable[P, R], gradient: Gradient | None = None
) -> Callable[[Callable[P, R]], Op[P, R]]:
    """A decorator that turns a kernel's launch function into an `Op` with the same name."""
    return lambda launch: Op(reference, launch, gradient)


# ---- checking the kernels of a model

# An operation, its positional arguments and its keyword arguments.
Call = tuple[Op[Any, Any], tuple[Any, ...], dict[str, Any]]
_recorded_calls: list[
    list[Call]
] = []  # one list per active `record_calls_without_kernels` context, innermost last


@contextlib.contextmanager
def record_calls_without_kernels() -> Iterator[list[Call]]:
    """
    Inside the context, all operations append their calls to the yielded list.

    Inside the context, operations evaluate their expressions instead of running their kernels.
    """
    calls: list[Call] = []
    _recorded_calls.append(calls)
    try:
        yield calls
    finally:
        _recorded_calls.pop()


def turn_off_faulty_kernels(calls: list[Call]) -> None:
    """
    Turns off each kernel that fails or disagrees with its expression on one of the given calls.

    If the gradient of a call runs kernels, these kernels are checked too. Calls of one operation
    with equal shapes and dtypes are checked only once. Sizes are compiled into kernels, so a kernel
    that is right for one model may be wrong, or may fail to compile, for another model.
    """
    checked_kinds: set[Any] = set()
    waiting = list(calls)
    while waiting:
        op, arguments, settings = waiting.pop(0)
        arrays = _array_leaves([list(arguments), list(settings.values())])
        kind = op.name, *((array.shape, array.dtype) for array in arrays)
        if kind in checked_kinds:
            continue
        checked_kinds.add(kind)
        dtype = arguments[0].dtype
        if op.can_run(dtype):
            fault = op.find_kernel_fault(*arguments, **settings)
            if fault:
                print(f"gwen: the kernel {op.name} is off for {dtype}: {fault}", file=sys.stderr)
                op.disabled_dtypes.add(dtype)
        if op.gradient != op._reference_gradient:  # the gradient of a reference runs no kernel
            waiting += _record_gradient_calls(op, arguments, settings)


def _record_gradient_calls(
    op: Op[Any, Any], arguments: tuple[Any, ...], settings: dict[str, Any]
) -> list[Call]:
    """Computes the gradient of one call, and returns all calls of operations in doing so."""
    with record_calls_without_kernels() as calls:
        results = _array_leaves(op.reference(*arguments, **settings))
        cotangents = [mx.ones_like(result) for result in results]
        op.gradient(cotangents, results, *arguments, **settings)
    return calls


def _array_leaves(tree: Any) -> list[mx.array]:
    return [leaf for _, leaf in tree_flatten(tree) if isinstance(leaf, mx.array)]


def _is_float_array(leaf: Any) -> bool:
    return isinstance(leaf, mx.array) and mx.issubdtype(leaf.dtype, mx.floating)


def _float_arrays_and_replacer(
    arguments: Any,
) -> tuple[list[mx.array], Callable[[Sequence[mx.array]], Any]]:
    """
    The floating-point arrays among the arguments, and a function that replaces these arrays.

    The function takes the same number of new arrays, and returns the arguments with the new arrays
    in place of the old arrays.
    """

    def replace_floats(floats: Sequence[mx.array]) -> Any:
        remaining = iter(floats)
        return tree_map(lambda leaf: next(remaining) if _is_float_array(leaf) else leaf, arguments)

    return [array for array in _array_leaves(arguments) if _is_float_array(array)], replace_floats


def random_normal_array(
    *shape: int, dtype: mx.Dtype, seed: int = 0, scale: float = 1.0
) -> mx.array:
    """Normally distributed numbers for checks; every process gets the same numbers."""
    return (mx.random.normal(shape, key=mx.random.key(seed)) * scale).astype(dtype)


def kernel_error_over_allowed_error(
    kernel: Any, reference: Any, exact: Any, dtype: mx.Dtype
) -> float:
    """
    A kernel's largest error divided by the allowed error.

    A kernel is accepted if this ratio is at most 1. `kernel` and `reference` are the results of the
    kernel and of its expression in `dtype`, and `exact` contains the results of the expression for
    the same numbers in float32. The error of a result x is |x - exact| / (1 + |exact|). The allowed
    error is the largest error of the expression or the tolerance for `dtype`, whichever is larger.
    Integer results must be equal. A result of the kernel may be infinite or nan only if the
    expression has the same result.
    """
    worst = 0.0
    triples = zip(
        _array_leaves(kernel), _array_leaves(reference), _array_leaves(exact), strict=True
    )
    for result, expected, exact_result in triples:
        if result.shape != expected.shape or result.dtype != expected.dtype:
            return math.inf
        if not mx.issubdtype(result.dtype, mx.floating):
            are_equal = mx.array_equal(result, expected).item()
            worst = max(worst, 0.0 if are_equal else math.inf)
            continue

        x = result.astype(mx.float32)
        y = expected.astype(mx.float32)
        z = exact_result.astype(mx.float32)
        # Equal infinities must count as equal, but their difference would be nan.
        is_same = (x == y) | (mx.isnan(x) & mx.isnan(y))
        kernel_error = mx.where(is_same, 0.0, mx.abs(x - z) / (1 + mx.abs(z)))
        reference_error = mx.where(is_same, 0.0, mx.abs(y - z) / (1 + mx.abs(z)))
        largest = mx.where(mx.isfinite(kernel_error), kernel_error, math.inf).max()
        allowed = mx.where(mx.isfinite(reference_error), reference_error, 0.0).max()
        fraction: Any = (largest / mx.maximum(allowed, TOLERANCES[dtype])).item()
        worst = max(worst, fraction)
    return worst


def is_kernels_variable_on() -> bool:
    """
    Whether the environment variable GWEN_KERNELS is "on", unset or empty.

    Raises ValueError if the variable has a value other than "on" or "off".
    """
    value = os.environ.get("GWEN_KERNELS") or "on"
    if value not in ("on", "off"):
        raise ValueError(f"GWEN_KERNELS={value!r} is not valid; set it to on or off")
    return value == "on"
