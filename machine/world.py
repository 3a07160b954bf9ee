"""
Several machines that train one model: which of them this is, what it does, and what all of them bring together.

A meeting is a call here that every machine makes, in the same order: `share`, `first`, `all_sum`. For one process it is
a no-op: nothing is opened, copied or waited for. Left out: how they join, meet and leave (machine/link.py).
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
    """Which of the machines this is, from 0."""
    return link.current.rank if link.current else 0


def size() -> int:
    return link.current.size if link.current else 1


def is_first() -> bool:
    """Whether this machine writes, prints and decides."""
    return rank() == 0


def part(costs: Sequence[float]) -> list[int]:
    """The numbers of the items that this machine does, ascending: they are dealt out, the most costly first."""
    return sorted(sorted(range(len(costs)), key=lambda number: -costs[number])[rank() :: size()])


def part_together(keys: Iterable[Hashable]) -> list[int]:
    """The places that this machine does, ascending; those of equal keys go to one machine, and each costs 1."""
    counts = Counter(keys := list(keys))
    mine = {list(counts)[number] for number in part(list(counts.values()))}
    return [place for place, key in enumerate(keys) if key in mine]


def share(value: Any, about: str = "share") -> list[Any]:
    """
    What each machine has brought, by rank. Raises Lost unless all of them bring it about the same.

    value: JSON's values and arrays of numpy or MLX; tuples come back as lists. One process gets its own, as it is.
    """
    return [value] if link.current is None else link.current.share(value, about)


def collect(values: dict[int, T], about: str = "collect") -> list[T]:
    """The values of all machines, by ascending number; each number is of one machine."""
    pairs = itertools.chain(*share(list(values.items()), about))
    return [value for _, value in sorted(pairs, key=lambda pair: pair[0])]


def first(make: Callable[[], T]) -> T:
    """What `make` gives on rank 0, which alone calls it; see `share` for its values."""
    return make() if link.current is None else share(make() if is_first() else None, "first")[0]


def all_sum(arrays: Sequence[mx.array]) -> list[mx.array]:
    """The sum of each array over all machines, in float32 and equal on all of them. One process gets its own."""
    if link.current is None:
        return list(arrays)
    summed: list[mx.array] = []
    blocks = np.cumsum([array.size for array in arrays]) // link.BLOCK
    for _, pairs in itertools.groupby(zip(blocks, arrays, strict=True), lambda pair: pair[0]):
        some = [array for _, array in pairs]  # of about BLOCK numbers, or one array
        flat = np.concatenate([np.array(array.astype(mx.float32)).reshape(-1) for array in some])  # wait; a copy
        link.current.meet(f"sum of {[array.shape for array in some]}", flat=flat)
        parts = np.split(flat, np.cumsum([array.size for array in some])[:-1])
        summed += [mx.array(part.reshape(array.shape)) for part, array in zip(parts, some, strict=True)]
    return summed


def of_first(arrays: dict[str, mx.array]) -> dict[str, mx.array]:
    """Rank 0's arrays, of names, shapes and types that all machines have; whole numbers below 2^24."""
    summed = all_sum([array if is_first() else mx.zeros_like(array) for array in arrays.values()])
    return {name: its.astype(arrays[name].dtype) for name, its in zip(arrays, summed, strict=True)}


def checksum(arrays: Sequence[mx.array]) -> int:
    """A number that tells arrays from others, of any type."""
    crc = 0
    for array in arrays:
        crc = zlib.crc32(np.array(mx.view(array.reshape(-1), mx.uint8)).data, crc)
    return crc


def lap() -> dict[str, float]:
    """{"wait": seconds in meetings since the last call}; empty for one process."""
    if link.current is None:
        return {}
    waited, link.current.waited = link.current.waited, 0.0
    return {"wait": waited}
