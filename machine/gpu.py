"""
Kernels for a GPU: how one is made, whether this machine may use it, and what it may be replaced by.

A kernel is a `.metal` file beside the plain expression that it equals; an `Op` is the two of them. Before its first use
in a process, for each type, it must be as exact as its expression on a small example; one that is not, or does not
compile, is off for the run and named on stderr. On a CPU the expressions run. GWEN_KERNELS is on or off.

The end of the file tells how much memory this machine has, which errors say that it ran out, and how many rows then go
through a model at once; with or without a GPU.

What is left out: the kernels themselves, which are in layers/.
"""

import contextlib
import functools
import math
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Generic, NamedTuple, ParamSpec, TypeVar

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map


def on_gpu() -> bool:
    """Whether MLX computes on a Mac's GPU."""
    return mx.default_device().type == mx.gpu


def prefill_tokens() -> int:
    """Positions per forward pass of a prefill, padding included; measured in LOG.md."""
    return 2048 if on_gpu() else 256


def has_metal() -> bool:
    """Whether Metal kernels can run here. Tests with an emulator say so on a CPU too."""
    return on_gpu()


# ---- a kernel


class Kernel:
    """
    A kernel in a `.metal` file of its own, made when it is first called.

    The file has comments and helper functions, then `kernel void NAME() {` and the body; MLX writes the parameters.
    A line `#include "FILE"` stands for the text of a file beside it. MLX looks for its own names, such as
    `thread_position_in_grid`, in the body's comments too, and passes what it finds.
    inputs, outputs: the names that the body uses. Scalars are passed as arrays of one. contiguous: whether inputs are
    copied into row-major order first; a body that does without uses their `_strides`.
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

    def make(self) -> Any:
        """MLX's object for the kernel."""
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
        return self._made[maker]

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
        return self.make()(
            inputs=inputs,
            output_shapes=[shape for shape, _ in outputs],
            output_dtypes=[dtype for _, dtype in outputs],
            grid=grid,
            threadgroup=threadgroup,
            template=list(template.items()),
        )


@functools.lru_cache(maxsize=None, typed=True)  # typed: 0.0 and False are equal
def constant(*values: float | bool) -> mx.array:
    """Numbers for a kernel, which takes arrays only; of settings, so few are ever made."""
    return mx.array(values)


# ---- gradients of our own


_forward_only = [False]


def forward_only() -> bool:
    """Whether `without_gradients` holds."""
    return _forward_only[0]


@contextlib.contextmanager
def without_gradients() -> Iterator[None]:
    """
    Inside, what has a gradient of its own is called directly, as whoever samples or judges may: a decode step is built
    in half the time. MLX refuses the gradient of a Metal kernel so called, and that of cpu.py's expression.
    """
    before, _forward_only[0] = _forward_only[0], True
    try:
        yield
    finally:
        _forward_only[0] = before


def differentiable(forward: Callable[..., Any], backward: Callable[..., Any], *arrays: mx.array) -> Any:
    """`forward(*arrays)`, whose gradient is `backward(arrays, cotangents, results)`."""
    if forward_only():
        return forward(*arrays)
    custom: Any = mx.custom_function(forward)
    custom.vjp(backward)
    return custom(*arrays)


# ---- an operation: the expression, and the kernel that equals it

TOLERANCES = {mx.float32: 1e-4, mx.float16: 4e-3, mx.bfloat16: 3e-2}
OPS: dict[str, Any] = {}  # every `Op` by name, in the order in which they are written

P = ParamSpec("P")
R = TypeVar("R")
Gradient = Callable[..., Sequence[mx.array]]  # (cotangents, results, *arguments) -> of each array of floats in these


class Op(Generic[P, R]):
    """
    One operation in two forms that give the same: `reference` defines it, `_launch_NAME` runs a kernel.

    A call runs the kernel where that may run for the type of the first argument, else the reference.
    example: of a type, small or large, the arguments of calls: on the small ones the forms are compared, on a large one
    timed. gradient: the reference's by default; each array of floats that is given by position, or in what is, has one.
    """

    def __init__(
        self,
        reference: Callable[P, R],
        launch: Callable[P, R],
        example: Callable[[mx.Dtype, bool], list[tuple[Any, ...]]],
        gradient: Gradient | None = None,
    ):
        self.name = launch.__name__.removeprefix("_launch_")
        assert self.name not in OPS, self.name
        self.reference: Callable[..., R] = reference
        self.launch: Callable[..., R] = launch
        self.example = example
        self.gradient = gradient or self._gradient_of_reference
        self._runs: dict[mx.Dtype, bool] = {}
        OPS[self.name] = self

    def __call__(self, *arguments: P.args, **settings: P.kwargs) -> R:
        first: Any = arguments[0]
        if _recording:
            _recording[-1].append(Call(self, arguments, settings))
            return self.reference(*arguments, **settings)
        if not self.runs(first.dtype):
            return self.reference(*arguments, **settings)
        if forward_only():
            return self.launch(*arguments, **settings)
        floats, put = _floats(arguments)

        def backward(primals: Any, cotangents: Any, results: Any) -> tuple[mx.array, ...]:
            moved = put(_arrays(primals))
            return tuple(self.gradient(_arrays(cotangents), _arrays(results), *moved, **settings))

        result: R = differentiable(lambda *moved: self.launch(*put(moved), **settings), backward, *floats)
        return result

    def _gradient_of_reference(
        self, cotangents: list[mx.array], _: list[mx.array], *arguments: Any, **settings: Any
    ) -> list[mx.array]:
        floats, put = _floats(arguments)
        return mx.vjp(lambda *moved: _arrays(self.reference(*put(moved), **settings)), floats, cotangents)[1]

    def runs(self, dtype: mx.Dtype) -> bool:
        """Whether the kernel runs now for arrays of `dtype`; on a GPU the first answer takes a check, and a moment."""
        if not has_metal() or not is_wanted() or dtype not in TOLERANCES:
            return False
        if dtype not in self._runs:
            if reason := self.check(dtype):
                print(f"gwen: the kernel {self.name} is off for {dtype}: {reason}", file=sys.stderr)
            self._runs[dtype] = not reason
        return self._runs[dtype]

    def check(self, dtype: mx.Dtype) -> str:
        """Why the kernel must not be used on this device, or "": on its small example it agrees."""
        return self._difference(dtype, lambda: [(call, {}) for call in self.example(dtype, False)])

    def check_on(self, dtype: mx.Dtype, arguments: tuple[Any, ...], settings: dict[str, Any]) -> None:
        """Turns the kernel off for this type, and says so, where it fails on a call that a model makes."""
        if not self.runs(dtype):
            return
        if reason := self._difference(dtype, lambda: [(arguments, settings)]):
            print(f"gwen: the kernel {self.name} is off for {dtype}, at this model's sizes: {reason}", file=sys.stderr)
            self._runs[dtype] = False

    def _difference(self, dtype: mx.Dtype, calls: Callable[[], list[tuple[Any, dict[str, Any]]]]) -> str:
        """How much worse than its expression the kernel is on some calls, or why it fails; "" where it may be used."""
        try:
            share = max(self.error(dtype, *call) for call in calls())
        except (RuntimeError, ValueError) as error:  # MLX's, of a kernel that does not compile
            return " ".join(str(error).split())[:300]
        return "" if share <= 1 else f"it differs from its expression by {share:.3g} times what {dtype} allows"

    def error(self, dtype: mx.Dtype, arguments: tuple[Any, ...], settings: dict[str, Any]) -> float:
        """The kernel's error on a call as a share of what is allowed; see `disagreement`."""
        floats, put = _floats(arguments)
        exact = self.reference(*put([array.astype(mx.float32) for array in floats]), **settings)
        own = self.reference(*arguments, **settings)
        return disagreement(self.launch(*arguments, **settings), own, exact, dtype)


class Call(NamedTuple):
    """A call of an operation."""

    op: Op[Any, Any]
    arguments: tuple[Any, ...]
    settings: dict[str, Any]


_recording: list[list[Call]] = []


@contextlib.contextmanager
def recording() -> Iterator[list[Call]]:
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

    Sizes are compiled into kernels, so one that is right on its example may not compile, or be wrong, for this model.
    """
    seen: set[Any] = set()
    waiting = list(calls)
    while waiting:
        op, arguments, settings = waiting.pop(0)
        arrays = _arrays([list(arguments), list(settings.values())])
        kind = op.name, *((array.shape, array.dtype) for array in arrays)
        if kind in seen:
            continue
        seen.add(kind)
        op.check_on(arguments[0].dtype, arguments, settings)
        if op.gradient == op._gradient_of_reference:  # which calls no kernel
            continue
        with recording() as deeper:
            results = _arrays(op.reference(*arguments, **settings))
            op.gradient([mx.ones_like(result) for result in results], results, *arguments, **settings)
        waiting += deeper


def _arrays(tree: Any) -> list[mx.array]:
    return [leaf for _, leaf in tree_flatten(tree) if isinstance(leaf, mx.array)]


def _floats(arguments: Any) -> tuple[list[mx.array], Callable[[Sequence[mx.array]], Any]]:
    """The arrays of floats among the arguments, and a function that gives the arguments with others in their places."""

    def is_float(leaf: Any) -> bool:
        return isinstance(leaf, mx.array) and mx.issubdtype(leaf.dtype, mx.floating)

    def put(floats: Sequence[mx.array]) -> Any:
        following = iter(floats)
        return tree_map(lambda leaf: next(following) if is_float(leaf) else leaf, arguments)

    return [array for array in _arrays(arguments) if is_float(array)], put


def normal(*shape: int, dtype: mx.Dtype, seed: int = 0, scale: float = 1.0) -> mx.array:
    """An array for an example, the same every time."""
    return (mx.random.normal(shape, key=mx.random.key(seed)) * scale).astype(dtype)


def disagreement(kernel: Any, own: Any, exact: Any, dtype: mx.Dtype) -> float:
    """
    The largest error of a kernel as a share of what is allowed: at most 1 agrees.

    own, exact: what its expression gives in `dtype` and, of the same numbers, in float32. An error is |x - exact| /
    (1 + |exact|). Allowed is the largest error of the expression itself, and at least the type's tolerance. Whole
    numbers must be equal, and the kernel infinite or no number nowhere but where the expression is.
    """
    worst = 0.0
    for mine, other, true in zip(_arrays(kernel), _arrays(own), _arrays(exact), strict=True):
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


def is_wanted() -> bool:
    """Whether GWEN_KERNELS asks for kernels; unset it does. Raises ValueError when it is neither on nor off."""
    value = os.environ.get("GWEN_KERNELS") or "on"
    if value not in ("on", "off"):
        raise ValueError(f"GWEN_KERNELS={value!r} is neither on nor off")
    return value == "on"


# ---- the report


def milliseconds(function: Callable[[], Any]) -> float:
    """Wall time of one call: on a GPU the median of three after one that is not counted, else of the only one."""
    seconds = []
    for _ in range(4 if has_metal() else 1):
        begin = time.perf_counter()
        mx.eval(function())  # wait
        seconds.append(time.perf_counter() - begin)
    return sorted(seconds[-3:])[len(seconds[-3:]) // 2] * 1e3


def report(dtype: mx.Dtype) -> Iterator[tuple[str, bool]]:
    """A line a kernel, which says what runs here, why, and how long it takes; and whether it agrees."""
    wanted = is_wanted()
    for name, op in OPS.items():
        (call,) = op.example(dtype, True)
        expression_ms = milliseconds(functools.partial(op.reference, *call))
        times = f"{name:17} expression {expression_ms:8.2f} ms"
        if not has_metal():
            yield f"{times} | runs: no GPU. A Mac would {'check and run a kernel' if wanted else 'run it too'}", True
            continue
        reason = op.check(dtype)
        if reason:
            yield f"{times} | runs: the kernel is OFF, {reason}", False
            continue
        kernel_ms = milliseconds(functools.partial(op.launch, *call))
        choice = "kernel" if wanted else "expression, as GWEN_KERNELS says"
        yield f"{times}, kernel {kernel_ms:8.2f} ms ({expression_ms / kernel_ms:.2f}x) | agrees | runs: {choice}", True


# ---- memory, of a machine without a GPU too


def memory_size() -> int:
    """Bytes that this process may hold: what a GPU recommends for its working set, else the machine's memory."""
    recommended: Any = mx.device_info().get("max_recommended_working_set_size") if on_gpu() else None
    return int(recommended or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


GROW_AFTER = 32  # batches that fitted, before a halved size grows by a quarter
MOST_CACHE = 2 * 10**9  # bytes of freed buffers that MLX may keep, whatever is free
WIRED_LIMIT = "GWEN_WIRED_LIMIT"
MOST_ERRORS = 20  # MLX throws one error of the GPU at a time, and has up to ten command buffers in flight


def hold_memory() -> None:
    """
    Lets MLX keep freed buffers up to an eighth of the memory, and wires the GB that GWEN_WIRED_LIMIT asks for.

    By default nothing is wired: macOS was reported to panic where it is (docs/memory.md).
    Raises ValueError for a limit that is no size or above the memory.
    """
    text, most = os.environ.get(WIRED_LIMIT) or "0", memory_size()
    try:
        wired = float(text) * 1e9
    except ValueError:
        wired = math.nan
    if not 0 <= wired <= most:
        raise ValueError(f"--wired-limit or {WIRED_LIMIT} is {text!r:.60}; it must be GB from 0 to {most / 1e9:.2f}")
    if on_gpu():
        mx.set_cache_limit(min(most // 8, MOST_CACHE))
        if wired:
            mx.set_wired_limit(int(wired))


def end_phase() -> None:
    """Gives freed buffers back on a GPU: the next phase has others, of other sizes."""
    if on_gpu():
        mx.clear_cache()


def memory_at_hand() -> int:
    """Bytes that this process may still allocate: what it may hold less what MLX holds, on a CPU no more than free."""
    rest = memory_size() - mx.get_active_memory()
    if mx.default_device().type == mx.cpu and (free := _available()) is not None:
        rest = min(rest, free)
    return max(rest, 0)


def _available() -> int | None:
    """Bytes that the Linux kernel could give without swapping; None elsewhere."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)


def is_out_of_memory(error: BaseException) -> bool:
    """
    Whether an error of MLX or numpy says that memory ran out; MLX's backends do so in words.

    On a CPU MLX 0.32 often does not come so far: it uses what it was not given, and the process dies.
    """
    text = str(error).lower()
    return isinstance(error, MemoryError) or any(
        words in text for words in ("insufficient memory", "out of memory", "unable to allocate", "bad_alloc", "malloc")
    )


def attempt(compute: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> list[R]:
    """What `compute` returns, in a list; an empty one if memory ran out: by then all that it allocated is free."""
    try:
        return [compute(*args, **kwargs)]
    except (RuntimeError, MemoryError) as error:
        if not is_too_much(error):
            raise
        first = error.with_traceback(None)  # which would hold every array of the attempt
    # macOS may end the buffers behind one that lacks memory with errors of their own, and tell these first
    if not any(map(is_out_of_memory, [first, *drain()])):
        raise first
    return []


def drain() -> list[RuntimeError]:
    """Waits until nothing is queued, which may hold caches, and frees what it held; returns the errors that come."""
    errors = []
    for _ in range(MOST_ERRORS):
        try:
            mx.synchronize()
            break
        except RuntimeError as error:
            errors.append(error.with_traceback(None))
    mx.clear_cache()
    return errors


def on_cpu(write: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> None:
    """Calls `write` on the CPU's stream, which an error of the GPU leaves intact, until no such error is left."""
    for errors_left in reversed(range(MOST_ERRORS)):
        try:
            with mx.stream(mx.cpu):
                return write(*args, **kwargs)
        except RuntimeError as error:
            if not errors_left or not is_too_much(error):
                raise


class BatchSize:
    """
    How many rows go through a model at once: halved when memory runs out.

    Callers that share the object share the reduced size. It grows back slowly for callers that report each batch that
    `fitted`; without reports it stays reduced.
    """

    def __init__(self, rows: int):
        assert rows >= 1, rows
        self.rows = self.most = rows
        self.num_good = 0  # batches that fitted since the last change

    def halve(self, num_rows: int) -> None:
        """Halves `rows`, or `num_rows` if fewer were tried."""
        self.rows, self.num_good = max(min(self.rows, num_rows) // 2, 1), 0

    def fitted(self) -> None:
        """Notes that a batch fitted; after GROW_AFTER of them a halved size grows by a quarter."""
        self.num_good += 1
        if self.rows < self.most and self.num_good >= GROW_AFTER:
            self.rows, self.num_good = min(self.most, -(-self.rows * 5 // 4)), 0


def is_watchdog(error: BaseException) -> bool:
    """
    Whether macOS stopped the GPU's work, because it or another's held up the display, took too long or hung.

    Source: github.com/ml-explore/mlx/issues/3267; MTLCommandBufferError in Apple's Metal.
    """
    text = str(error).lower().replace(" ", "")
    kinds = "impactinginteractivity", "timeout", "hang", "submissionsignored", "innocentvictim"
    return any(f"iogpucommandbuffercallbackerror{kind}" in text for kind in kinds) or "gputimeouterror" in text


def is_too_much(error: BaseException) -> bool:
    """Whether less at once might do: memory ran out, or macOS stopped the work."""
    return is_out_of_memory(error) or is_watchdog(error)


# ---- what a reader needs to repeat a measurement


def environment(blas: str) -> dict[str, Any]:
    """Versions, device and commit: what a reader of a run needs to repeat it."""

    def installed(package: str) -> str | None:
        try:
            return version(package)
        except PackageNotFoundError:
            return None

    commit, root = None, Path(__file__).parents[1]
    if (root / ".git").exists() and shutil.which("git"):  # on a Mac without developer tools git opens a window
        asked = subprocess.run(["git", "rev-parse", "HEAD"], cwd=root, capture_output=True, text=True, check=False)
        commit = asked.stdout.strip() or None
    packages = ["mlx", "mlx-lm", "transformers", "datasets", "numpy"]
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "device": str(mx.default_device()),
        "machine": mx.device_info().get("device_name", platform.processor() or platform.machine()),
        "num_cpus": os.cpu_count(),
        "blas": blas,
        "versions": {package: installed(package) for package in packages},
        "commit": commit,
    }
