"""
Kernels for a GPU: how one is made, whether this machine may use it, and what it may be replaced by.

A kernel is a `.metal` file beside the plain expression that it equals; an `Op` is the two of them. When a model is
loaded, both compute the calls that the model makes; a kernel that is less exact than its expression, or does not
compile, is off for the run and named on stderr. On a CPU the expressions run. GWEN_KERNELS is on or off.

What is left out: the kernels themselves, which are in layers/.
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
    A kernel in a `.metal` file of its own, made when it is first called.

    The file has helper functions, then `kernel void NAME() {` and the body; MLX writes the parameters, and passes what
    it finds of its own names, such as `thread_position_in_grid`, also in comments. A line `#include "FILE"` stands for
    the text of a file beside it. inputs, outputs: the names that the body uses; scalars are arrays of one. contiguous:
    whether inputs are copied into row-major order first; a body that does without uses their `_strides`.
    """

    def __init__(self, path: Path, inputs: str, outputs: str, contiguous: bool = True):
        self.path, self.name, self.contiguous = path, path.stem, contiguous
        self.inputs, self.outputs = inputs.split(), outputs.split()
        self._made: dict[Any, Any] = {}  # by what made it: the emulator in tests, else MLX

    @functools.cached_property
    def text(self) -> tuple[str, str]:
        """What stands before the kernel, and its body."""
        text = re.sub(
            r'^ *#include "(.+)"\n',
            lambda line: self.path.with_name(line[1]).read_text("utf-8"),
            self.path.read_text("utf-8"),
            flags=re.M,
        )
        header, begin, body = text.partition(f"kernel void {self.name}() {{\n")
        assert begin and body.endswith("}\n"), self.path
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
        Queues the kernel: outputs are (shape, dtype), `grid` counts threads, `template` gives constants and types.

        Constants are compiled in, one kernel each: only what a model or its type fixes may be one.
        """
        maker = mx.fast.metal_kernel
        if maker not in self._made:
            header, body = self.text
            self._made[maker] = maker(
                name=f"gwen_{self.name}",
                input_names=self.inputs,
                output_names=self.outputs,
                source=body,
                header=header,
                ensure_row_contiguous=self.contiguous,
            )
        return self._made[maker](
            inputs=inputs,
            output_shapes=[shape for shape, _ in outputs],
            output_dtypes=[dtype for _, dtype in outputs],
            grid=grid,
            threadgroup=threadgroup,
            template=list(template.items()),
        )


@functools.lru_cache(maxsize=None, typed=True)  # typed: 0.0 and False are equal
def constant_array(*values: float | bool) -> mx.array:
    """Numbers for a kernel, which takes arrays only; of settings, so few are ever made."""
    return mx.array(values)


# ---- an operation: the expression, and the kernel that equals it

TOLERANCES = {mx.float32: 1e-4, mx.float16: 4e-3, mx.bfloat16: 3e-2}
OPS: dict[str, Any] = {}  # every `Op` by name, in the order in which they are written

P = ParamSpec("P")
R = TypeVar("R")
Gradient = Callable[..., Sequence[mx.array]]  # (cotangents, results, *arguments) -> of each array of floats in these


class Op(Generic[P, R]):
    """
    One operation in two forms that give the same: `reference` defines it, `launch` runs a kernel.

    A call runs the kernel where that may run for the type of the first argument, else the reference.
    gradient: the reference's by default; each array of floats that is given by position, or in what is, has one.
    """

    def __init__(self, reference: Callable[P, R], launch: Callable[P, R], gradient: Gradient | None):
        self.name = launch.__name__
        assert self.name not in OPS, self.name
        self.reference: Callable[..., R] = reference
        self.launch: Callable[..., R] = launch
        self.gradient = gradient or self._gradient_of_reference
        self.off: set[mx.Dtype] = set()  # types for which the kernel was wrong here
        OPS[self.name] = self

    def __call__(self, *arguments: P.args, **settings: P.kwargs) -> R:
        first: Any = arguments[0]
        if _recording:
            _recording[-1].append((self, arguments, settings))
            return self.reference(*arguments, **settings)
        if not self.runs(first.dtype):
            return self.reference(*arguments, **settings)
        if gpu.is_forward_only():
            return self.launch(*arguments, **settings)
        floats, put = _split_floats(arguments)

        def backward(primals: Any, cotangents: Any, results: Any) -> tuple[mx.array, ...]:
            moved = put(_array_leaves(primals))
            return tuple(self.gradient(_array_leaves(cotangents), _array_leaves(results), *moved, **settings))

        result: R = gpu.differentiable(lambda *moved: self.launch(*put(moved), **settings), backward, *floats)
        return result

    def _gradient_of_reference(
        self, cotangents: list[mx.array], _: list[mx.array], *arguments: Any, **settings: Any
    ) -> list[mx.array]:
        floats, put = _split_floats(arguments)
        return mx.vjp(lambda *moved: _array_leaves(self.reference(*put(moved), **settings)), floats, cotangents)[1]

    def runs(self, dtype: mx.Dtype) -> bool:
        """Whether the kernel runs now for arrays of `dtype`."""
        return gpu.has_metal() and kernels_are_wanted() and dtype in TOLERANCES and dtype not in self.off

    def check(self, *arguments: Any, **settings: Any) -> str:
        """Why the kernel must not be used on this device, or "" where it agrees with its expression on a call."""
        dtype, (floats, put) = arguments[0].dtype, _split_floats(arguments)
        try:
            exact = self.reference(*put([array.astype(mx.float32) for array in floats]), **settings)
            own = self.reference(*arguments, **settings)
            share = measure_disagreement(self.launch(*arguments, **settings), own, exact, dtype)
        except (RuntimeError, ValueError) as error:  # MLX's, of a kernel that does not compile
            return " ".join(str(error).split())[:300]
        return "" if share <= 1 else f"it differs from its expression by {share:.3g} times what {dtype} allows"


def kernel_of(reference: Callable[P, R], gradient: Gradient | None = None) -> Callable[[Callable[P, R]], Op[P, R]]:
    """Makes a launch the `Op` of its name, which chooses between it and the expression `reference`."""
    return lambda launch: Op(reference, launch, gradient)


Call = tuple[Op[Any, Any], tuple[Any, ...], dict[str, Any]]  # of an operation: it, its arguments, its settings
_recording: list[list[Call]] = []


@contextlib.contextmanager
def record_calls() -> Iterator[list[Call]]:
    """Inside, operations compute their expressions, and their calls are noted."""
    calls: list[Call] = []
    _recording.append(calls)
    try:
        yield calls
    finally:
        _recording.pop()


def check_calls(calls: list[Call]) -> None:
    """
    Compares kernel and expression on calls that a model makes, and on those of their gradients, each kind once.

    Sizes are compiled into kernels, so one that is right for one model may not compile, or be wrong, for another.
    """
    seen: set[Any] = set()
    waiting = list(calls)
    while waiting:
        op, arguments, settings = waiting.pop(0)
        kind = op.name, *((array.shape, array.dtype) for array in _array_leaves([list(arguments), list(settings.values())]))
        if kind in seen:
            continue
        seen.add(kind)
        dtype = arguments[0].dtype
        if op.runs(dtype) and (reason := op.check(*arguments, **settings)):
            print(f"gwen: the kernel {op.name} is off for {dtype}: {reason}", file=sys.stderr)
            op.off.add(dtype)
        if op.gradient == op._gradient_of_reference:  # which calls no kernel
            continue
        with record_calls() as deeper:
            results = _array_leaves(op.reference(*arguments, **settings))
            op.gradient([mx.ones_like(result) for result in results], results, *arguments, **settings)
        waiting += deeper


def _array_leaves(tree: Any) -> list[mx.array]:
    return [leaf for _, leaf in tree_flatten(tree) if isinstance(leaf, mx.array)]


def _split_floats(arguments: Any) -> tuple[list[mx.array], Callable[[Sequence[mx.array]], Any]]:
    """The arrays of floats among the arguments, and a function that gives the arguments with others in their places."""

    def is_float(leaf: Any) -> bool:
        return isinstance(leaf, mx.array) and mx.issubdtype(leaf.dtype, mx.floating)

    def put(floats: Sequence[mx.array]) -> Any:
        following = iter(floats)
        return tree_map(lambda leaf: next(following) if is_float(leaf) else leaf, arguments)

    return [array for array in _array_leaves(arguments) if is_float(array)], put


def normal_array(*shape: int, dtype: mx.Dtype, seed: int = 0, scale: float = 1.0) -> mx.array:
    """An array to try something with, the same every time."""
    return (mx.random.normal(shape, key=mx.random.key(seed)) * scale).astype(dtype)


def measure_disagreement(kernel: Any, own: Any, exact: Any, dtype: mx.Dtype) -> float:
    """
    The largest error of a kernel as a share of what is allowed: at most 1 agrees.

    own, exact: what its expression gives in `dtype` and, of the same numbers, in float32. An error is |x - exact| /
    (1 + |exact|). Allowed is the largest error of the expression itself, and at least the type's tolerance. Whole
    numbers must be equal, and the kernel infinite or no number nowhere but where the expression is.
    """
    worst = 0.0
    for mine, other, true in zip(_array_leaves(kernel), _array_leaves(own), _array_leaves(exact), strict=True):
        if mine.shape != other.shape or mine.dtype != other.dtype:
            return math.inf
        if not mx.issubdtype(mine.dtype, mx.floating):
            worst = max(worst, 0.0 if mx.array_equal(mine, other).item() else math.inf)
            continue
        x, y, z = (array.astype(mx.float32) for array in (mine, other, true))
        same = (x == y) | (mx.isnan(x) & mx.isnan(y))  # infinities less each other would be nan
        errors = [mx.where(same, 0.0, mx.abs(found - z) / (1 + mx.abs(z))) for found in (x, y)]
        largest, allowed = (
            mx.where(mx.isfinite(error), error, limit).max()
            for error, limit in zip(errors, (math.inf, 0.0), strict=True)
        )
        share: Any = (largest / mx.maximum(allowed, TOLERANCES[dtype])).item()
        worst = max(worst, share)
    return worst


def kernels_are_wanted() -> bool:
    """Whether GWEN_KERNELS asks for kernels; unset it does. Raises ValueError when it is neither on nor off."""
    value = os.environ.get("GWEN_KERNELS") or "on"
    if value not in ("on", "off"):
        raise ValueError(f"GWEN_KERNELS={value!r} is neither on nor off")
    return value == "on"
