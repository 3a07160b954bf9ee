"""
Several machines that train one model: this process's rank, its part of the work, and collectives.

A collective is a call that every rank makes, and all make their collectives in the same order:
`all_gather`, `on_rank0`, `all_sum`, `broadcast`. If there is only one process, a collective neither
opens, copies nor waits for anything. This file does not cover how ranks connect, exchange data and
leave (machine/link.py).
"""

import itertools
import zlib
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, TypeVar

import mlx.core as mx
import numpy as np

from machine import link

T = TypeVar("T")


def rank() -> int:
    """The number of this machine, counted from 0."""
    return link.current.rank if link.current else 0


def size() -> int:
    """The number of machines."""
    return link.current.size if link.current else 1


def is_first() -> bool:
    """Whether this machine writes, prints and decides."""
    return rank() == 0


def own_item_indices(costs: Sequence[float]) -> list[int]:
    """The indices of this rank's items, ascending. The costliest items are dealt out first."""
    by_cost = sorted(range(len(costs)), key=lambda number: -costs[number])
    return sorted(by_cost[rank() :: size()])


def own_item_indices_by_key(keys: Iterable[Hashable]) -> list[int]:
    """
    The indices of this rank's items, ascending.

    Items with equal keys go to one rank, and each item costs 1.
    """
    keys = list(keys)
    counts = Counter(keys)
    distinct_keys = list(counts)
    local_keys = {distinct_keys[number] for number in own_item_indices(list(counts.values()))}
    return [place for place, key in enumerate(keys) if key in local_keys]


def all_gather(value: Any, purpose: str = "all_gather") -> list[Any]:
    """
    The values of all ranks, by rank. If there is only one process, [value].

    value: JSON values, and arrays of numpy or MLX; tuples come back as lists.

    Raises link.LinkError unless all ranks call it for the same purpose.
    """
    if link.current is None:
        return [value]
    return link.current.all_gather(value, purpose)


def gather_by_number(values: dict[int, T], purpose: str = "gather_by_number") -> list[T]:
    """The values of all ranks, sorted by their numbers. Each number belongs to one rank."""
    pairs = itertools.chain(*all_gather(list(values.items()), purpose))
    return [value for _, value in sorted(pairs, key=lambda pair: pair[0])]


def on_rank0(make: Callable[[], T]) -> T:
    """The result of `make`, which only rank 0 calls; it is a value as for `all_gather`."""
    if link.current is None:
        return make()
    result = make() if is_first() else None
    return all_gather(result, "on_rank0")[0]


def all_sum(arrays: Sequence[mx.array]) -> list[mx.array]:
    """
    The sum of each array over all ranks, in float32 and equal on all of them.

    If there is only one process, it gets its own arrays back.
    """
    if link.current is None:
        return list(arrays)

    summed: list[mx.array] = []
    block_of = np.cumsum([array.size for array in arrays]) // link.BLOCK
    pairs = zip(block_of, arrays, strict=True)
    for _, block_pairs in itertools.groupby(pairs, lambda pair: pair[0]):
        block = [array for _, array in block_pairs]  # about BLOCK numbers, or one array
        # Each part is a copy; making it waits for the array.
        parts = [np.array(array.astype(mx.float32)).reshape(-1) for array in block]
        flat = np.concatenate(parts)
        link.current.exchange(f"sum of {[array.shape for array in block]}", flat=flat)
        ends = np.cumsum([array.size for array in block])[:-1]
        for part, array in zip(np.split(flat, ends), block, strict=True):
            summed.append(mx.array(part.reshape(array.shape)))
    return summed


def broadcast(arrays: dict[str, mx.array]) -> dict[str, mx.array]:
    """
    Rank 0's arrays, on every rank.

    All ranks must pass arrays with the same names, shapes and dtypes. Whole numbers must be below
    2^24.
    """
    addends = [array if is_first() else mx.zeros_like(array) for array in arrays.values()]
    summed = all_sum(addends)
    return {
        name: array.astype(arrays[name].dtype) for name, array in zip(arrays, summed, strict=True)
    }


def checksum(arrays: Sequence[mx.array]) -> int:
    """A checksum of the bits of arrays, which may have any dtype."""
    crc = 0
    for array in arrays:
        crc = zlib.crc32(np.array(mx.view(array.reshape(-1), mx.uint8)).data, crc)
    return crc


def take_wait_seconds() -> dict[str, float]:
    """{"wait": seconds in collectives since the last call}; empty if there is only one process."""
    if link.current is None:
        return {}
    wait_s = link.current.wait_s
    link.current.wait_s = 0.0
    return {"wait": wait_s}
