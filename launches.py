"""
How many operations a function queues on a GPU: counted in its exported graph, so without one.

Every node of the graph is one launch, except those that only look at memory in another way (a transpose, a slice, a
reshape where the layout allows it) and those that take several (a concatenation copies each of its parts). The layout
of each array is followed to tell a reshape that copies from one that does not, and to find inputs that a kernel copies
into row-major order first. `mx.fast` has on a CPU none of the fused operations that it has on a GPU, so stand-ins take
their places.

What is left out: `mx.compile`, which would fuse chains of elementwise operations, launches that MLX splits by size (a
long reduction, attention over many keys), and copies that its own operations make of inputs in unusual layouts.
"""

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import mlx.core as mx
import numpy as np

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
FAST = "fast_"  # begins the names of the stand-ins


def stand_in(name: str) -> Callable[..., mx.array]:
    """One launch with the output of an `mx.fast` function, whose shape is that of its first argument."""
    kernel: Any = mx.fast.metal_kernel(FAST + name, ["x"], ["out"], "// never run", ensure_row_contiguous=False)

    def launch(x: mx.array, *arguments: Any, **options: Any) -> mx.array:
        shape = list(x.shape)
        if name == "scaled_dot_product_attention":
            shape[-1] = arguments[1].shape[-1]  # of the values
        grid = {"grid": (1, 1, 1), "threadgroup": (1, 1, 1)}
        (out,) = kernel(inputs=[x], output_shapes=[shape], output_dtypes=[x.dtype], **grid)
        operands = [y for y in (*arguments, *options.values()) if isinstance(y, mx.array)]
        return mx.depends([out], operands)[0]  # what computes them is launched too

    return launch


@contextlib.contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """Inside, the project takes the paths that it takes on a Mac. Nothing can be evaluated, only exported."""
    with contextlib.ExitStack() as stack:
        for name in ("layer_norm", "rms_norm", "rope", "scaled_dot_product_attention"):
            stack.enter_context(mock.patch.object(mx.fast, name, stand_in(name)))
        stack.enter_context(mock.patch.object(mx, "default_device", lambda: mx.Device(mx.gpu)))
        stack.enter_context(mock.patch.object(mx.metal, "is_available", lambda: True))
        yield


def count(function: Callable[..., Any], *inputs: mx.array) -> Counter[str]:
    """
    The launches of one call, by kind: the keys of KINDS, "elementwise", "fast" (`mx.fast`) and "kernel" (custom ones).

    function: of arrays to arrays; what it closes over counts as given. inputs: examples, of which only the shapes and
    types matter.
    """
    nodes: list[dict[str, Any]] = []
    with as_on_a_gpu():
        mx.export_function(nodes.append, function, *inputs)
    layouts: dict[str, np.ndarray] = {}  # by array; one byte an element, of which only the strides are used
    launches: Counter[str] = Counter()
    for node in nodes:
        if node["type"] in ("inputs", "constants"):
            for name, array, *_ in node[node["type"]]:
                layouts[name] = row_major(array if isinstance(array, tuple) else array.shape)
        if node["type"] != "primitive":
            continue
        launches += launches_of(node, [layouts[name] for name, *_ in node["inputs"]])
        views = views_of(node, [layouts[name] for name, *_ in node["inputs"]])
        for (name, shape, _), view in zip(node["outputs"], views, strict=True):
            layouts[name] = row_major(shape) if view is None else view
            assert layouts[name].shape == tuple(shape), node
    return launches


def per_layer(step: Callable[[int], tuple[Callable[..., Any], list[mx.array]]]) -> Counter[str]:
    """What one layer adds: `step(n)` gives a function with n layers, and its inputs."""
    one, two = (count(function, *inputs) for function, inputs in (step(1), step(2)))
    added = two.copy()
    added.subtract(one)
    return added


def row_major(shape: tuple[int, ...]) -> np.ndarray:
    strides = np.cumprod((1, *shape[:0:-1]))[::-1] if shape else ()
    return np.lib.stride_tricks.as_strided(np.zeros(1, np.int8), shape, tuple(map(int, strides)))


def is_row_major(layout: np.ndarray) -> bool:
    return layout.flags.c_contiguous


def launches_of(node: dict[str, Any], inputs: list[np.ndarray]) -> Counter[str]:
    name, arguments = node["name"], node["arguments"]
    if name in VIEWS:
        return Counter(copy=1) if any(view is None for view in views_of(node, inputs)) else Counter()
    if name == "Concatenate":
        return Counter(copy=len(inputs))
    if name != "CustomKernel":
        return Counter([KIND_OF.get(name, "elementwise")])
    if arguments[0].startswith(f"custom_kernel_{FAST}"):
        return Counter(fast=1)
    wants_row_major = arguments[9]
    return Counter(kernel=1, copy=sum(not is_row_major(layout) for layout in inputs) if wants_row_major else 0)


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
