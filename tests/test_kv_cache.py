"""The cache alone: what is written is what is read, whatever grew, was repeated or was dropped in between."""

import mlx.core as mx
import numpy as np
import pytest
from conftest import measure_peak

from kv_cache import (
    CAUSAL,
    CHUNK,
    AttentionMasks,
    KVCache,
    LayerCache,
    QueryRowsReadingCachePart,
    SlotCache,
    round_up_to_chunk,
)

RNG = np.random.default_rng(0)
ATTENTION = ["full_attention"]


def entries(num_rows: int, length: int, heads: int = 2, head_dim: int = 4) -> mx.array:
    """Random (N, K, L, D) float32."""
    return mx.array(RNG.normal(size=(num_rows, heads, length, head_dim)).astype(np.float32))


def filled(
    num_rows: int = 3, length: int = 5, num_layers: int = 2, pad: mx.array | None = None
) -> KVCache:
    cache = KVCache(ATTENTION * num_layers, pad=pad)
    for layer in cache.layers:
        layer.update(entries(num_rows, length), entries(num_rows, length))
    cache.advance(length)
    return cache


@pytest.mark.parametrize(
    "steps", [[1] * 5, [7, 1, 1], [CHUNK - 1, 1, 1, CHUNK], [3 * CHUNK], [CHUNK, 2 * CHUNK + 1]]
)
def test_what_was_written_is_read_back_in_order(steps):
    layer, keys, values = LayerCache(), [], []
    for length in steps:
        keys.append(entries(2, length))
        values.append(entries(2, length))
        ((all_keys, all_values),) = layer.update(keys[-1], values[-1])
        assert mx.array_equal(all_keys, mx.concatenate(keys, axis=2))
        assert mx.array_equal(all_values, mx.concatenate(values, axis=2))
    assert layer.length == sum(steps)
    assert layer.keys is not None and layer.keys.shape[2] == layer.capacity == round_up_to_chunk(
        sum(steps)
    )


def test_a_cache_with_room_never_grows():
    layer = LayerCache(capacity=CHUNK + 1)
    for _ in range(4):
        layer.update(entries(2, 60), entries(2, 60))
        assert layer.keys is not None and layer.keys.shape[2] == 2 * CHUNK


def test_a_view_that_is_held_keeps_its_values_when_the_buffer_is_written_in_place():
    layer, first = LayerCache(), entries(2, 3)
    ((view, _),) = layer.update(first, entries(2, 3))
    for _ in range(3):
        layer.update(entries(2, 1), entries(2, 1))
    mx.eval(layer.keys)
    assert mx.array_equal(view, first)


def test_a_decode_step_writes_in_place():
    # 16 MiB of keys: a copy a step would show as a peak of another 16
    layer = LayerCache(capacity=1024)
    layer.update(mx.zeros((16, 4, 1, 64)), mx.zeros((16, 4, 1, 64)))
    mx.eval(layer.keys, layer.values)

    def steps():
        for _ in range(3):
            layer.update(mx.ones((16, 4, 1, 64)), mx.ones((16, 4, 1, 64)))
            mx.eval(layer.keys, layer.values)

    assert measure_peak(steps) < 4 * 2**20


def test_without_padding_one_token_needs_no_mask_and_more_are_causal():
    cache = filled()
    assert (
        cache.attention_masks(1) == AttentionMasks([QueryRowsReadingCachePart()])
        and cache.attention_masks(2) == CAUSAL
    )
    assert cache.next_positions(3).tolist() == [5, 5, 5]


def test_with_padding_a_pad_sees_itself_and_positions_begin_after_it():
    cache = KVCache(ATTENTION, pad=mx.array([0, 2, 3], dtype=mx.int32))
    assert np.array(cache.attention_masks(4).part_readers[0].mask).any(-1).all()
    assert cache.next_positions(3).tolist() == [0, -2, -3]


@pytest.mark.parametrize(
    ("num_rows", "heads", "head_dim", "dtype"),
    [(1, 2, 4, mx.float32), (3, 1, 4, mx.float32), (3, 2, 1, mx.float32), (3, 2, 4, mx.float16)],
    ids=["rows", "heads", "head dim", "dtype"],
)
@pytest.mark.parametrize("length", [1, CHUNK])
def test_an_entry_that_would_be_broadcast_or_cast_is_refused(
    num_rows, heads, head_dim, dtype, length
):
    cache = filled()
    new = mx.zeros((num_rows, heads, length, head_dim), dtype)
    with pytest.raises(AssertionError):
        cache.layers[0].update(new, new)


def test_slots_that_grow_wider_count_as_bytes():
    cache = SlotCache(filled(num_rows=2), num_slots=3)
    cache.assign_prompts([0, 0, 1])
    cache.lengths[0] = CHUNK
    cache.plan_writes()
    assert cache.most_bytes == sum(
        array.nbytes for array in cache.prompts.arrays() + cache.arrays()
    )
