"""
Provides this process's rank, its share of the work, and collectives, for runs on several machines.

The functions `all_gather`, `gather_sorted_by_number`, `compute_on_rank0`, `all_sum` and
`broadcast_from_rank0` are collectives, which all ranks must call in the same order. If there is
only one process, a collective opens no connection, makes no copies and never waits. machine/link.py
defines how ranks connect, exchange data and disconnect.
"""

import itertools
import zlib
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, TypeVar

import cpu_blas  # noqa: F401  (before mlx)
import mlx.core as mx
import numpy as np

from machine import link

T = TypeVar("T")


def rank() -> int:
    """The index of this machine among all machines, counted from 0."""
    return link.current.rank if link.current else 0


def size() -> int:
    """The number of machines."""
    return link.current.size if link.current else 1


def is_first() -> bool:
    """Whether this machine is rank 0, which writes files, prints and makes decisions for all."""
    return rank() == 0


def own_item_indices(costs: Sequence[float]) -> list[int]:
    """
    The indices of this rank's items, in ascending order.

    The items are dealt to the ranks in turn, the costliest item first.
    """
    by_cost = sorted(range(len(costs)), key=lambda number: -costs[number])
    return sorted(by_cost[rank() :: size()])


def own_item_indices_by_key(keys: Iterable[Hashable]) -> list[int]:
    """
    The indices of this rank's items, in ascending order.

    Items with equal keys are assigned to the same rank, and each item has a cost of 1.
    """
    keys = list(keys)
    counts = Counter(keys)
    distinct_keys = list(counts)
    local_keys = {distinct_keys[number] for number in own_item_indices(list(counts.values()))}
    return [index for index, key in enumerate(keys) if key in local_keys]


def all_gather(value: Any, purpose: str = "all_gather") -> list[Any]:
    """
    The values of all ranks, in the order of the ranks.

    The value may consist of JSON values and of NumPy or MLX arrays. Tuples are returned as lists if
    there are several processes.

    Raises link.LinkError unless all ranks call this function for the same purpose.
    """
    if link.current is None:
        return [value]
    return link.current.all_gather(value, purpose)


def gather_sorted_by_number(
    value_of_number: dict[int, T], purpose: str = "gather_sorted_by_number"
) -> list[T]:
    """
    The values of all ranks in one list, sorted by their numbers.

    value_of_number: this rank's values, each under its number. No two ranks may use the same
    number.
    """
    pairs = itertools.chain(*all_gather(list(value_of_number.items()), purpose))
    return [value for _, value in sorted(pairs, key=lambda pair: pair[0])]


def compute_on_rank0(compute: Callable[[], T]) -> T:
    """
    The result of `compute` on every rank, although only rank 0 calls `compute`.

    The result must be a value that `all_gather` accepts.
    """
    if link.current is None:
        return compute()
    result = compute() if is_first() else None
    return all_gather(result, "compute_on_rank0")[0]


def all_sum(arrays: Sequence[mx.array]) -> list[mx.array]:
    """
    The sum of each array over all ranks, in float32 and identical on all ranks.

    If there is only one process, its own arrays are returned unchanged.
    """
    if link.current is None:
        return list(arrays)

    summed: list[mx.array] = []
    block_of = np.cumsum([array.size for array in arrays]) // link.BLOCK
    pairs = zip(block_of, arrays, strict=True)
    for _, block_pairs in itertools.groupby(pairs, lambda pair: pair[0]):
        # arrays with about BLOCK numbers in total, or a single larger array
        block = [array for _, array in block_pairs]
        # Copying an array waits until the array is computed.
        parts = [np.array(array.astype(mx.float32)).reshape(-1) for array in block]
        flat = np.concatenate(parts)
        link.current.exchange(f"sum of {[array.shape for array in block]}", array_to_sum=flat)
        ends = np.cumsum([array.size for array in block])[:-1]
        for part, array in zip(np.split(flat, ends), block, strict=True):
            summed.append(mx.array(part.reshape(array.shape)))
    return summed


def broadcast_from_rank0(arrays: dict[str, mx.array]) -> dict[str, mx.array]:
    """
    The arrays of rank 0, returned on every rank.

    All ranks must pass arrays with the same names, shapes and dtypes. The arrays are sent in
    float32, so integers must be below 2^24.
    """
    addends = [array if is_first() else mx.zeros_like(array) for array in arrays.values()]
    summed = all_sum(addends)
    return {
        name: array.astype(arrays[name].dtype) for name, array in zip(arrays, summed, strict=True)
    }


def checksum(arrays: Sequence[mx.array]) -> int:
    """A checksum of the bits of the given arrays, which may have any dtypes."""
    crc = 0
    for array in arrays:
        crc = zlib.crc32(np.array(mx.view(array.reshape(-1), mx.uint8)).data, crc)
    return crc


def pop_wait_seconds_metric() -> dict[str, float]:
    """
    The seconds spent in collectives since the last call, under the key "wait".

    If there is only one process, the dictionary is empty.
    """
    if link.current is None:
        return {}
    wait_s = link.current.wait_s
    link.current.wait_s = 0.0
    return {"wait": wait_s}
