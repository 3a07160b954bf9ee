"""
What a function would queue on a GPU: traced in its exported graph, so without one.

Every node of the graph is one launch, except those that only look at memory in another way (a transpose, a slice, a
reshape where the layout allows it) and those that take several (a concatenation copies each of its parts). The layout
of each array is followed to tell a reshape that copies from one that does not, and to find inputs that a kernel copies
into row-major order first. `mx.fast` has on a CPU none of the fused operations that it has on a GPU, so stand-ins take
their places, with the launches that MLX's gradients of them take.

MLX exports no custom gradient. Here each is pulled through by hand: the function runs once for its results, then once
for each custom gradient with everything behind that cut off, and the export joins what is computed twice.

A launch reads each element that it touches once and writes each of its results once, as if caches held them meanwhile.
What is left out: `mx.compile`, which would fuse chains of elementwise operations, launches that MLX splits by size (a
long reduction, attention over many keys), and copies that its own operations make of inputs in unusual layouts.
"""

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple
from unittest import mock

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten, tree_map, tree_unflatten

from layers.attention import group_block
from machine import gpu

KINDS = {
    "matmul": "Matmul AddMM BlockMaskedMM GatherMM SegmentedMM QuantizedMatmul GatherQMM",
    "reduction": "Reduce ArgReduce Softmax LogSumExp Scan Sort ArgSort Partition ArgPartition",
    "copy": "Concatenate Contiguous SliceUpdate DynamicSlice DynamicSliceUpdate Pad",
    "gather": "Gather GatherAxis Scatter ScatterAxis",
    "fill": "Arange Full RandomBits",
}
KIND_OF = {name: kind for kind, names in KINDS.items() for name in names.split()}
VIEWS = (
    "Broadcast BroadcastAxes Depends ExpandDims Flatten Reshape Slice Split Squeeze StopGradient Transpose Unflatten"
).split()
WRITES_IN_PLACE = ("SliceUpdate", "DynamicSliceUpdate")
FAST = "fast_"  # begins the names of the stand-ins
MOST_LAUNCHES = {"rms_norm_vjp": 2, "layer_norm_vjp": 3}  # of MLX 0.32.4's gradients, with a sum for the weight


class Launch(NamedTuple):
    """What one kernel does."""

    kind: str  # a key of KINDS, "elementwise", "fast" (`mx.fast`) or "kernel" (a custom one)
    name: str  # of MLX's primitive, or of the kernel
    read: int  # bytes
    written: int
    flops: int  # of a matmul or an attention; of the others, which memory bounds, 0
    buffers: tuple[tuple[str, int], ...]  # that it binds, with the elements of each
    made: tuple[tuple[str, int], ...] = ()  # buffers that it writes to, with their bytes
    threadgroups: int = 0  # of a custom kernel
    effort: float = 1.0  # of a custom kernel that computes: instructions of a lane for each multiply-add


class View(NamedTuple):
    """An array of the graph: the buffer that it lies in, and how."""

    buffer: str
    layout: np.ndarray  # one byte an element, of which only the strides are used
    itemsize: int

    @property
    def touched(self) -> int:
        """Bytes of the elements that it shows, each once however often it is broadcast."""
        shown = [n for n, stride in zip(self.layout.shape, self.layout.strides, strict=True) if stride]
        return math.prod(shown) * self.itemsize if self.layout.size else 0

    @property
    def num_bytes(self) -> int:
        return self.layout.size * self.itemsize


# ---- the stand-ins for mx.fast


def _launch(
    name: str, operands: Sequence[mx.array], shapes: Sequence[Sequence[int]], dtype: mx.Dtype
) -> list[mx.array]:
    """One launch that makes arrays of these shapes."""
    inputs, outputs = [f"x{place}" for place in range(len(operands))], [f"y{place}" for place in range(len(shapes))]
    kernel: Any = mx.fast.metal_kernel(FAST + name, inputs, outputs, "// never run", ensure_row_contiguous=False)
    how = {"grid": (1, 1, 1), "threadgroup": (1, 1, 1), "output_dtypes": [dtype] * len(shapes)}
    made: list[mx.array] = kernel(inputs=list(operands), output_shapes=[tuple(shape) for shape in shapes], **how)
    return made


def stand_in(name: str) -> Callable[..., mx.array]:
    """One launch with the output of an `mx.fast` function, whose shape is that of its first argument; its gradient."""
    of_values = name == "scaled_dot_product_attention"

    def launch(x: mx.array, *arguments: Any, **options: Any) -> mx.array:
        causal = "_causal" * (options.get("mask") == "causal")
        others = [y for y in (*arguments, *options.values()) if isinstance(y, mx.array)]
        floats = [y for y in others if mx.issubdtype(y.dtype, mx.floating)]
        fixed = [y for y in others if not any(y is moved for moved in floats)]

        def forward(*moved: mx.array) -> mx.array:
            shape = (*x.shape[:-1], moved[2].shape[-1]) if of_values else x.shape
            return _launch(name + causal, [*moved, *fixed], [shape], x.dtype)[0]

        def backward(primals: Any, cotangents: Any, _: Any) -> list[mx.array]:
            primals, d_out = _listed(primals), _listed(cotangents)
            (d_first,) = _launch(f"{name}_vjp", [*primals, *d_out, *fixed], [primals[0].shape], x.dtype)
            # the others come of the same launches: views of its result
            return [d_first, *(_view_of(d_first, primal) for primal in primals[1:])]

        differentiable: Any = mx.custom_function(forward)
        differentiable.vjp(backward)
        result: mx.array = differentiable(x, *floats)
        return result

    return launch


def gated_delta_update(*arrays: mx.array) -> list[mx.array]:
    """Stands in for MLX's: one launch, of what it finds and of the memory. Its gradient is that of its expression."""
    return _launch("gated_delta", arrays, [arrays[2].shape, arrays[5].shape], mx.float32)


def _view_of(x: mx.array, like: mx.array) -> mx.array:
    """An array with the shape and type of another that takes no launch to get from `x`."""
    return mx.broadcast_to(x.reshape(-1)[:1].reshape([1] * like.ndim), like.shape)


# ---- gradients that can be exported


class _Call(NamedTuple):
    """A call of a function with a gradient of its own."""

    primals: list[mx.array]
    made: Any  # an array, or several
    backward: Callable[..., Any] | None


class _Tape:
    """The calls of custom functions while one function runs; given their outputs, they are not computed again."""

    def __init__(self, given: list[Any] | None = None):
        self.calls: list[_Call] = []
        self.given = given

    def call(self, custom: "CustomFunction", primals: tuple[mx.array, ...]) -> Any:
        if self.given is None:
            with _running(None):  # what a custom function computes inside is not differentiated
                made = custom.forward(*primals)
        else:
            made = self.given[len(self.calls)]
        self.calls.append(_Call(list(primals), made, custom.backward))
        return made


_tapes: list[_Tape | None] = []
_cut: list[bool] = []  # not empty where a gradient was pulled through by hand, and left zeros behind


@contextlib.contextmanager
def _running(tape: _Tape | None) -> Iterator[None]:
    _tapes.append(tape)
    try:
        yield
    finally:
        _tapes.pop()


class CustomFunction:
    """Stands in for `mx.custom_function`."""

    def __init__(self, forward: Callable[..., Any]):
        self.forward = forward
        self.backward: Callable[..., Any] | None = None

    def vjp(self, backward: Callable[..., Any]) -> Callable[..., Any]:
        self.backward = backward
        return backward

    def __call__(self, *primals: mx.array) -> Any:
        tape = _tapes[-1] if _tapes else None
        return self.forward(*primals) if tape is None else tape.call(self, primals)


def _listed(arrays: Any) -> list[mx.array]:
    return [array for _, array in tree_flatten(arrays) if isinstance(array, mx.array)]


def vjp(
    function: Callable[..., Any], primals: Sequence[mx.array], cotangents: Sequence[mx.array]
) -> tuple[list[mx.array], list[mx.array]]:
    """`mx.vjp` of a function that calls custom ones, as a graph that can be exported."""
    tape = _Tape()
    _cut.append(True)
    with _running(tape):
        outputs = _listed(function(*primals))
    calls = tape.calls
    leaves = [*primals, *(array for call in calls for array in _listed(call.made))]
    begins = np.cumsum([len(primals), *(len(_listed(call.made)) for call in calls)]).tolist()
    d_leaves: list[mx.array | None] = [None] * len(leaves)

    def pull(select: Callable[[list[mx.array], _Tape], list[mx.array]], given: list[mx.array], before: int) -> None:
        """Adds to what is known of the first `before` leaves what flows to them from some arrays of the function."""

        def replay(*moved: mx.array) -> list[mx.array]:
            held = [*moved, *leaves[before:]]
            cut = [_put(call.made, held[at:]) for call, at in zip(calls, begins, strict=False)]
            again = _Tape(cut)
            with _running(again):
                return select(_listed(function(*held[: len(primals)])), again)

        for place, part in enumerate(_MLX_VJP(replay, leaves[:before], given)[1]):
            so_far = d_leaves[place]
            d_leaves[place] = part if so_far is None else so_far + part

    pull(lambda found, _: found, list(cotangents), len(leaves))
    for place in reversed(range(len(calls))):
        x, made, backward = calls[place]
        assert backward is not None, "a custom function without a gradient"
        d_made = [d for d in d_leaves[begins[place] : begins[place + 1]] if d is not None]
        later = mx.depends(x, d_made)  # else the export would join what the gradient computes again with the first time
        with _running(None):
            gradients = backward(later[0] if len(x) == 1 else later, _put(made, d_made), made)

        def inputs(_: list[mx.array], again: _Tape, at: int = place) -> list[mx.array]:
            return again.calls[at].primals

        pull(inputs, _listed(gradients), begins[place])
    found = [mx.zeros_like(x) if d is None else d for x, d in zip(primals, d_leaves, strict=False)]
    return outputs, found


def _put(tree: Any, arrays: Sequence[mx.array]) -> Any:
    """The tree with other arrays in the places of its own."""
    following = iter(arrays)
    return tree_map(lambda leaf: next(following) if isinstance(leaf, mx.array) else leaf, tree)


_MLX_VJP = mx.vjp


def value_and_grad(function: Callable[..., Any], argnums: Any = 0, argnames: Any = ()) -> Callable[..., Any]:
    """`mx.value_and_grad` by the first argument, as a graph that can be exported."""
    assert argnums in (0, [0], (0,)) and not argnames, (argnums, argnames)

    def differentiated(moved: Any, *others: Any, **named: Any) -> tuple[Any, Any]:
        flat, results = tree_flatten(moved), []

        def of_arrays(*arrays: mx.array) -> list[mx.array]:
            tree = tree_unflatten([(name, array) for (name, _), array in zip(flat, arrays, strict=True)])
            results.append(function(tree, *others, **named))
            return [_listed(results[-1])[0]]

        _, gradients = vjp(of_arrays, [array for _, array in flat], [mx.array(1.0)])
        return results[0], tree_unflatten([(name, d) for (name, _), d in zip(flat, gradients, strict=True)])

    return differentiated


def checkpoint(function: Callable[..., Any]) -> Callable[..., Any]:
    """`mx.checkpoint`: what is in it is computed again for its gradient."""

    def call(*arguments: Any) -> Any:
        def forward(*arrays: mx.array) -> Any:
            return function(*_put(arguments, arrays))

        def backward(primals: Any, cotangents: Any, _: Any) -> list[mx.array]:
            return vjp(forward, _listed(primals), _listed(cotangents))[1]

        custom = CustomFunction(forward)
        custom.vjp(backward)
        return custom(*_listed(arguments))

    return call


# ---- tracing


@contextlib.contextmanager
def exportable() -> Iterator[None]:
    """Inside, gradients are such that MLX can export them."""
    ours = {"custom_function": CustomFunction, "vjp": vjp, "value_and_grad": value_and_grad, "checkpoint": checkpoint}
    with contextlib.ExitStack() as stack:
        for name, function in ours.items():
            stack.enter_context(mock.patch.object(mx, name, function))
        yield


@contextlib.contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """Inside, the project takes the paths that it takes on a Mac, its kernels unchecked. Nothing can be evaluated."""
    with contextlib.ExitStack() as stack:
        for name in ("layer_norm", "rms_norm", "rope", "scaled_dot_product_attention"):
            stack.enter_context(mock.patch.object(mx.fast, name, stand_in(name)))
        stack.enter_context(mock.patch.object(mx.fast, "gated_delta_update", gated_delta_update))
        stack.enter_context(mock.patch.object(mx, "default_device", lambda: mx.Device(mx.gpu)))
        stack.enter_context(mock.patch.object(mx.metal, "is_available", lambda: True))
        stack.enter_context(mock.patch.object(gpu, "check_calls", lambda _: None))
        for op in gpu.OPS.values():
            stack.enter_context(mock.patch.object(op, "check", lambda _: ""))
            stack.enter_context(mock.patch.object(op, "_runs", {}))
        yield


def view(x: mx.array, shape: Sequence[int], dtype: mx.Dtype) -> mx.array:
    """An array of any shape without memory of its own."""
    return mx.as_strided(x, shape, [0] * len(shape), 0).astype(dtype)


def hollow_kernel(*_: Any, **__: Any) -> Callable[..., list[mx.array]]:
    """Stands in for `mx.fast.metal_kernel` where graphs are built and never computed."""
    return lambda *, inputs, output_shapes, output_dtypes, **_: [
        view(inputs[0], shape, dtype) for shape, dtype in zip(output_shapes, output_dtypes, strict=True)
    ]


def build_seconds(function: Callable[..., Any], *inputs: mx.array, on_gpu: bool = True) -> float:
    """Seconds of this processor that building the graph of a later call takes, the least of three."""
    seconds, held = [], [view(mx.zeros((1,), x.dtype), x.shape, x.dtype) for x in inputs]
    mx.eval(held)  # what is compiled computes again what it was given lazily
    patch = mock.patch.object(mx.fast, "metal_kernel", hollow_kernel)
    with as_on_a_gpu() if on_gpu else contextlib.nullcontext(), patch:
        function(*held)  # which compiles what is compiled
        for _ in range(3):
            begin = time.process_time()
            function(*held)
            seconds.append(time.process_time() - begin)
    return min(seconds)


def trace(function: Callable[..., Any], *inputs: mx.array, on_gpu: bool = True) -> list[Launch]:
    """
    The launches of one call, in the order in which results need each other.

    function: of arrays to arrays; what it closes over counts as given, or as computed where it is not evaluated.
    inputs: examples, of which only the shapes and types matter. on_gpu: else the paths of a CPU are taken.
    """
    nodes: list[dict[str, Any]] = []
    _cut.clear()
    with exportable(), as_on_a_gpu() if on_gpu else contextlib.nullcontext():
        mx.export_function(nodes.append, function, *inputs)
    held: dict[str, View] = {}
    zeros: set[str] = set()
    given: set[str] = set()
    launches: list[Launch] = []
    for node in nodes:
        if node["type"] in ("inputs", "constants"):
            for name, array, *rest in node[node["type"]]:
                shape, dtype = (array, rest[0]) if isinstance(array, tuple) else (array.shape, array.dtype)
                held[name] = View(name, row_major(shape), dtype.size)
                given.add(name)
                if not isinstance(array, tuple) and array.size == 1 and not array.item():
                    zeros.add(name)
        if node["type"] != "primitive" or (_cut and _is_nothing(node, held, zeros)):
            continue
        for name in ({name for name, *_ in node["inputs"]} & zeros) - given:  # that something reads after all
            launches.append(_fill(name, held))
            given.add(name)
        found = [held[name] for name, *_ in node["inputs"]]
        views = views_of(node, [one.layout for one in found])
        for place, ((name, shape, dtype), view) in enumerate(zip(node["outputs"], views, strict=True)):
            layout, source = row_major(shape) if view is None else view, place if node["name"] == "Depends" else 0
            is_own = view is None and node["name"] not in WRITES_IN_PLACE
            held[name] = View(name if is_own else found[source].buffer, layout, dtype.size)
            assert layout.shape == tuple(shape), node
        outputs = [held[name] for name, *_ in node["outputs"]]
        made = tuple((one.buffer, one.num_bytes) for one in outputs)
        launches += [one._replace(made=made) for one in launches_of(node, found, outputs)]
    return launches


# Of zeros, which MLX gives as the gradient of what was cut off: these are zeros too.
LINEAR = [*VIEWS, "AsType", "Contiguous", "Full", "Matmul", "Multiply", "Negative"]


def _is_nothing(node: dict[str, Any], held: dict[str, View], zeros: set[str]) -> bool:
    """Whether a node only hands zeros on, or adds them to something; then its output is noted as what it is."""
    name, inputs = node["name"], [name for name, *_ in node["inputs"]]
    empty = [one in zeros for one in inputs]
    (out, shape, dtype), *more = node["outputs"]
    if more or not any(empty):
        return False
    if name in LINEAR and (all(empty) or (name in ("Matmul", "Multiply"))) and name != "Depends":
        zeros.add(out)
        held[out] = View(out, np.broadcast_to(row_major(()), shape), dtype.size)
        return True
    if name == "Add" and len(inputs) == 2:
        other = inputs[0] if empty[1] else inputs[1]
        if held[other].layout.shape == tuple(shape):
            held[out] = held[other]
            if all(empty):
                zeros.add(out)
            return True
    return False


def _fill(name: str, held: dict[str, View]) -> Launch:
    """The launch that makes zeros."""
    held[name] = View(name, row_major(held[name].layout.shape), held[name].itemsize)
    return Launch("fill", "Full", 0, held[name].num_bytes, 0, ((name, held[name].layout.size),))


def row_major(shape: Sequence[int]) -> np.ndarray:
    strides = np.cumprod((1, *shape[:0:-1]))[::-1] if shape else ()
    return np.lib.stride_tricks.as_strided(np.zeros(1, np.int8), tuple(shape), tuple(map(int, strides)))


def launches_of(node: dict[str, Any], inputs: list[View], outputs: list[View]) -> list[Launch]:
    """The launches of one node of a graph."""
    name, arguments = node["name"], node["arguments"]
    written = sum(out.num_bytes for out in outputs)
    buffers = tuple((one.buffer, one.layout.size) for one in (*inputs, *outputs))
    if name in VIEWS:
        is_copy = outputs[0].buffer not in (one.buffer for one in inputs)
        return [Launch("copy", name, inputs[0].touched, written, 0, buffers)] * is_copy
    if name == "Concatenate":
        return [
            Launch("copy", name, part.touched, part.num_bytes, 0, (buffers[place], buffers[-1]))
            for place, part in enumerate(inputs)
        ]
    if name == "CustomKernel":
        return _launches_of_kernel(arguments, inputs, outputs, buffers)
    read = sum(one.touched for one in inputs)
    kind, flops = KIND_OF.get(name, "elementwise"), 0
    if kind == "matmul":
        flops = 2 * outputs[0].layout.size * inputs[0].layout.shape[-1]
    elif name in ("Gather", "GatherAxis"):  # of the source what comes out
        read = written + sum(one.touched for one in inputs[1:])
    elif name in WRITES_IN_PLACE or name.startswith("Scatter"):
        read, written = sum(one.touched for one in inputs[1:]), inputs[1].num_bytes
    return [Launch(kind, name, read, written, flops, buffers)]


def _launches_of_kernel(
    arguments: Any, inputs: list[View], outputs: list[View], buffers: tuple[tuple[str, int], ...]
) -> list[Launch]:
    name, wants_row_major = arguments[0].removeprefix("custom_kernel_"), arguments[9]
    written = sum(out.num_bytes for out in outputs)
    read, flops, shapes = sum(one.touched for one in inputs), 0, [one.layout.shape for one in inputs]
    if name.startswith(FAST):
        name = name.removeprefix(FAST)
        short = next((one for one in MOST_LAUNCHES if name.startswith(one)), "")
        if name.startswith("scaled"):
            flops = attention_flops(shapes[0], shapes[1], shapes[2][-1], "causal" in name)
        if name == "gated_delta":  # found, read and corrected: a token's three products of a memory's size
            flops = 6 * math.prod(shapes[2]) * shapes[1][-1]
        one = Launch("fast", name, read, written, flops, buffers)
        return [one] + [one._replace(read=0, written=0, flops=0)] * (MOST_LAUNCHES.get(short, 1) - 1)
    name = name.removeprefix("gwen_")
    copies = [one for one in inputs if wants_row_major and not one.layout.flags.c_contiguous]
    grid, threadgroup = arguments[2:5], arguments[5:8]
    num_groups = math.prod(-(-x // y) for x, y in zip(grid, threadgroup, strict=True))
    own = Launch("kernel", name, read, written, flops, buffers, threadgroups=num_groups)
    kind = name.partition("__")[0]
    if kind in ("slot_attention", "group_attention"):  # queries, then keys and values of each part
        heads, size = shapes[0][1], shapes[0][3]
        held = [shape for shape in shapes[1:5:2] if len(shape) == 4 and shape[-1] == size]
        num_queries = outputs[0].layout.shape[1] * heads // math.prod(held[0][:2])  # of a row of the part
        own = own._replace(
            flops=sum(attention_flops(shapes[0], shape, size, causal=False) for shape in held),
            effort=effort_of(kind, num_queries, size),
        )
    return [
        *(Launch("copy", "Contiguous", one.touched, one.num_bytes, 0, buffers) for one in copies),
        own,
    ]


def effort_of(name: str, num_queries: int, size: int) -> float:
    """
    Instructions of a lane for each multiply-add that attention needs, with so many queries for a kv head of a row.

    Counted in what LLVM writes, to 15%.
    """
    if name == "slot_attention":
        return 2.8 if size > 64 else 3.4
    block = group_block(num_queries)
    wasted = -(-num_queries // block) * block / num_queries
    return (1.1 + 19 / size + (2 + 180 / size) / block) * wasted


def attention_flops(queries: Sequence[int], keys: Sequence[int], value_dim: int, causal: bool) -> int:
    """Of the two products of an attention, (N, H, L, D) with (R, K, S, D)."""
    rows, heads, length, size = queries
    pairs = length * keys[2] - (length * (length - 1) // 2 if causal else 0)
    return 2 * rows * heads * pairs * (size + value_dim)


def command_buffers(
    launches: Sequence[Launch], most_operations: int = 40, most_elements: int = 40
) -> list[list[Launch]]:
    """
    The command buffers that MLX puts launches into, by two limits of the machine.

    One ends after the launch with which it has more operations than the first, or with which the buffers that it binds
    have more than so many times 2**20 elements, whatever their type; each counts once. The defaults are those of base
    chips; those of Pro and Max have 50 of both.
    Source: `CommandEncoder::needs_commit` and `set_input_array` in MLX's backend/metal/device.cpp, and the same limits
    in the binary of mlx-metal 0.32.4.
    """
    made: list[list[Launch]] = []
    current: list[Launch] = []
    elements, bound = 0, set[str]()
    for launch in launches:
        current.append(launch)
        for buffer, size in launch.buffers:
            elements += size if buffer not in bound else 0
            bound.add(buffer)
        if len(current) > most_operations or elements >> 20 > most_elements:
            made.append(current)
            current, elements, bound = [], 0, set()
    return made + [current] * bool(current)


MOST_BUFFERS = 499_000  # that Metal lets a process hold; MLX gives an error beyond


def peaks(launches: Sequence[Launch]) -> tuple[int, int]:
    """
    The most bytes of results, and the most buffers, that exist at once, when each goes after the last launch that binds
    it.

    Of what the function was given only the number is in it; MLX, which runs some launches ahead, holds a little more.
    """
    last = {buffer: place for place, launch in enumerate(launches) for buffer, _ in launch.buffers}
    live: dict[str, int] = {}
    given = len(last.keys() - {buffer for launch in launches for buffer, _ in launch.made})
    most = total = most_live = 0
    for place, launch in enumerate(launches):
        for buffer, size in launch.made:
            total += 0 if buffer in live else size
            live[buffer] = max(size, live.get(buffer, 0))
        most, most_live = max(most, total), max(most_live, len(live))
        for buffer, _ in launch.buffers:
            if last[buffer] == place:
                total -= live.pop(buffer, 0)
    return most, given + most_live


def views_of(node: dict[str, Any], inputs: list[np.ndarray]) -> list[np.ndarray | None]:
    """The layout of each output that is a view of an input; None for memory of its own."""
    name, arguments = node["name"], node["arguments"]
    shapes = [tuple(shape) for _, shape, _ in node["outputs"]]
    if name in ("Reshape", "Flatten", "Unflatten", "ExpandDims", "Squeeze"):
        try:
            return [inputs[0].reshape(shapes[0], copy=False)]
        except ValueError:  # not without a copy
            return [None]
    if name in ("Broadcast", "BroadcastAxes"):
        return [np.broadcast_to(inputs[0], shapes[0])]
    if name == "Transpose":
        return [inputs[0].transpose(arguments[0])]
    if name == "Slice":
        return [inputs[0][tuple(slice(*ends) for ends in zip(*arguments, strict=True))]]
    if name == "Split":
        return list(np.split(inputs[0], arguments[0], axis=arguments[1]))
    if name in ("Depends", "StopGradient"):
        return list(inputs[: len(shapes)])
    return [None] * len(shapes)
