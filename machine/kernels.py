"""
Kernels for a GPU: how a kernel is built, whether this machine may use it, and its reference.

A kernel is a `.metal` file, beside the plain MLX expression that it must equal. An `Op` is the pair
of kernel and expression. When a model is loaded, both compute the calls that the model makes. A
kernel that does not compile, or is less exact than its expression, is off for the run, and a line
on stderr names it. On a CPU, only the expressions run. The environment variable GWEN_KERNELS turns
kernels on or off.

This file does not cover the kernels themselves, which are in layers/.
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

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map

from machine import gpu


class Kernel:
    """
    A kernel in a `.metal` file of its own, which is compiled when it is first called.

    The file has helper functions, then `kernel void NAME() {` and the body. MLX writes the
    parameters. It adds a parameter for each of its own names, such as `thread_position_in_grid`,
    that occurs in the body, even in a comment. A line `#include "FILE"` is replaced by the text of
    a file in the same directory.

    inputs, outputs: the names that the body uses, separated by spaces. Scalars are arrays of one
        number.
    contiguous: whether inputs are first copied into row-major order. A body that does not need this
        uses the inputs' `_strides`.
    """

    def __init__(self, path: Path, inputs: str, outputs: str, contiguous: bool = True):
        self.path = path
        self.name = path.stem
        self.contiguous = contiguous
        self.inputs = inputs.split()
        self.outputs = outputs.split()
        # The compiled kernels, by compiler: MLX's, or the emulator in tests.
        self._compiled: dict[Any, Any] = {}

    @functools.cached_property
    def text(self) -> tuple[str, str]:
        """The text before the kernel, and the kernel's body."""

        def read_included_file(line: re.Match[str]) -> str:
            return self.path.with_name(line[1]).read_text("utf-8")

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
        Queues the kernel; returns its outputs.

        outputs: the shape and dtype of each output. grid: the numbers of threads.
        template: constants and types, which are compiled in. Each combination is a kernel of its
        own, so a value may be a constant only if it is fixed for a model and its dtype.
        """
        compiler = mx.fast.metal_kernel
        if compiler not in self._compiled:
            header, body = self.text
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
    An array of numbers for a kernel, which takes only arrays.

    The numbers come from settings, so the cache stays small.
    """
    return mx.array(values)


# ---- an operation: the expression, and the kernel that equals it

TOLERANCES = {mx.float32: 1e-4, mx.float16: 4e-3, mx.bfloat16: 3e-2}
OPS: "dict[str, Op[Any, Any]]" = {}  # every `Op` by name, in the order of definition

P = ParamSpec("P")
R = TypeVar("R")
# (cotangents, results, *arguments) -> the gradient by each floating-point array in the arguments
Gradient = Callable[..., Sequence[mx.array]]


class Op(Generic[P, R]):
    """
    One operation in two forms that compute the same.

    A call runs the kernel if it may run for the first argument's dtype, else the reference.

    reference: the expression, which defines the operation. launch: runs the kernel.
    gradient: by default, the reference's gradient. Each floating-point array that is a positional
        argument, or inside one, has a gradient.
    """

    def __init__(
        self, reference: Callable[P, R], launch: Callable[P, R], gradient: Gradient | None
    ):
        self.name = launch.__name__
        assert self.name not in OPS, self.name
        self.reference: Callable[..., R] = reference
        self.launch: Callable[..., R] = launch
        self.gradient = gradient or self._reference_gradient
        self.disabled_dtypes: set[mx.Dtype] = set()  # those for which the kernel was wrong here
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

        floats, replace_floats = _split_floats(arguments)

        def forward(*arrays: mx.array) -> R:
            return self.launch(*replace_floats(arrays), **settings)

        def backward(primals: Any, cotangents: Any, results: Any) -> tuple[mx.array, ...]:
            new_arguments = replace_floats(_array_leaves(primals))
            gradients = self.gradient(
                _array_leaves(cotangents), _array_leaves(results), *new_arguments, **settings
            )
            return tuple(gradients)

        result: R = gpu.call_with_vjp(forward, backward, *floats)
        return result

    def _reference_gradient(
        self, cotangents: list[mx.array], _: list[mx.array], *arguments: Any, **settings: Any
    ) -> list[mx.array]:
        floats, replace_floats = _split_floats(arguments)

        def forward(*arrays: mx.array) -> list[mx.array]:
            return _array_leaves(self.reference(*replace_floats(arrays), **settings))

        _results, gradients = mx.vjp(forward, floats, cotangents)
        return gradients

    def can_run(self, dtype: mx.Dtype) -> bool:
        """Whether the kernel runs now for arrays of `dtype`."""
        is_enabled = gpu.has_metal() and kernels_are_wanted()
        return is_enabled and dtype in TOLERANCES and dtype not in self.disabled_dtypes

    def find_fault(self, *arguments: Any, **settings: Any) -> str:
        """
        Compares the kernel and the expression on one call.

        Returns why the kernel must not be used on this device, or "" if the two agree.
        """
        dtype = arguments[0].dtype
        floats, replace_floats = _split_floats(arguments)
        wide_arguments = replace_floats([array.astype(mx.float32) for array in floats])
        try:
            exact = self.reference(*wide_arguments, **settings)
            reference = self.reference(*arguments, **settings)
            kernel = self.launch(*arguments, **settings)
            error = measure_disagreement(kernel, reference, exact, dtype)
        except (RuntimeError, ValueError) as failure:  # MLX's, if a kernel does not compile
            return " ".join(str(failure).split())[:300]
        if error <= 1:
            return ""
        return f"it differs from its expression by {error:.3g} times the tolerance of {dtype}"


def make_op(
    reference: Callable[P, R], gradient: Gradient | None = None
) -> Callable[[Callable[P, R]], Op[P, R]]:
    """A decorator that turns a launch function into an `Op` of the same name."""
    return lambda launch: Op(reference, launch, gradient)


# ---- checking the kernels of a model

Call = tuple[Op[Any, Any], tuple[Any, ...], dict[str, Any]]  # an operation, arguments, settings
_recorded_calls: list[list[Call]] = []  # one list per active `record_calls`, the innermost last


@contextlib.contextmanager
def record_calls() -> Iterator[list[Call]]:
    """Inside the context, operations run their expressions and append calls to the list."""
    calls: list[Call] = []
    _recorded_calls.append(calls)
    try:
        yield calls
    finally:
        _recorded_calls.pop()


def check_calls(calls: list[Call]) -> None:
    """
    Compares kernels and expressions on a model's calls, and on the calls that their gradients make.

    Turns off each kernel that fails. Each kind of call is compared once. Sizes are compiled into
    kernels, so a kernel that is right for one model may be wrong, or not compile, for another.
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
            fault = op.find_fault(*arguments, **settings)
            if fault:
                print(f"gwen: the kernel {op.name} is off for {dtype}: {fault}", file=sys.stderr)
                op.disabled_dtypes.add(dtype)
        if op.gradient != op._reference_gradient:  # the reference's gradient calls no kernel
            waiting += _record_gradient_calls(op, arguments, settings)


def _record_gradient_calls(
    op: Op[Any, Any], arguments: tuple[Any, ...], settings: dict[str, Any]
) -> list[Call]:
    """The calls that the gradient of a call makes."""
    with record_calls() as calls:
        results = _array_leaves(op.reference(*arguments, **settings))
        cotangents = [mx.ones_like(result) for result in results]
        op.gradient(cotangents, results, *arguments, **settings)
    return calls


def _array_leaves(tree: Any) -> list[mx.array]:
    return [leaf for _, leaf in tree_flatten(tree) if isinstance(leaf, mx.array)]


def _is_float(leaf: Any) -> bool:
    return isinstance(leaf, mx.array) and mx.issubdtype(leaf.dtype, mx.floating)


def _split_floats(arguments: Any) -> tuple[list[mx.array], Callable[[Sequence[mx.array]], Any]]:
    """
    The floating-point arrays among the arguments, and a function that replaces them.

    The function takes as many arrays, and returns the arguments with the new arrays in place of the
    old.
    """

    def replace_floats(floats: Sequence[mx.array]) -> Any:
        remaining = iter(floats)
        return tree_map(lambda leaf: next(remaining) if _is_float(leaf) else leaf, arguments)

    return [array for array in _array_leaves(arguments) if _is_float(array)], replace_floats


def normal_array(*shape: int, dtype: mx.Dtype, seed: int = 0, scale: float = 1.0) -> mx.array:
    """An array of normally distributed numbers for a check, the same in every process."""
    return (mx.random.normal(shape, key=mx.random.key(seed)) * scale).astype(dtype)


def measure_disagreement(kernel: Any, reference: Any, exact: Any, dtype: mx.Dtype) -> float:
    """
    A kernel's largest error as a fraction of the allowed error; up to 1, the kernel is accepted.

    reference: the expression's results in `dtype`. exact: its results for the same numbers in
    float32. An error is |x - exact| / (1 + |exact|). The allowed error is the expression's own
    largest error, but at least the tolerance for `dtype`. Whole numbers must be equal. The kernel
    may be infinite or nan only where the expression is.
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
        # The difference of two infinities would be nan.
        is_same = (x == y) | (mx.isnan(x) & mx.isnan(y))
        kernel_error = mx.where(is_same, 0.0, mx.abs(x - z) / (1 + mx.abs(z)))
        reference_error = mx.where(is_same, 0.0, mx.abs(y - z) / (1 + mx.abs(z)))
        largest = mx.where(mx.isfinite(kernel_error), kernel_error, math.inf).max()
        allowed = mx.where(mx.isfinite(reference_error), reference_error, 0.0).max()
        fraction: Any = (largest / mx.maximum(allowed, TOLERANCES[dtype])).item()
        worst = max(worst, fraction)
    return worst


def kernels_are_wanted() -> bool:
    """
    Whether GWEN_KERNELS asks for kernels, as it does if it is unset.

    Raises ValueError if its value is neither on nor off.
    """
    value = os.environ.get("GWEN_KERNELS") or "on"
    if value not in ("on", "off"):
        raise ValueError(f"GWEN_KERNELS={value!r} is neither on nor off")
    return value == "on"
