"""The key-value cache: it returns the written entries in order, also after its buffers grow."""

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


def random_entries(num_rows: int, length: int, heads: int = 2, head_dim: int = 4) -> mx.array:
    """Random (N, K, L, D) float32."""
    return mx.array(RNG.normal(size=(num_rows, heads, length, head_dim)).astype(np.float32))


def make_filled_cache(
    num_rows: int = 3, length: int = 5, num_layers: int = 2, pad: mx.array | None = None
) -> KVCache:
    cache = KVCache(ATTENTION * num_layers, pad=pad)
    for layer in cache.layers:
        layer.update(random_entries(num_rows, length), random_entries(num_rows, length))
    cache.advance(length)
    return cache


@pytest.mark.parametrize(
    "steps", [[1] * 5, [7, 1, 1], [CHUNK - 1, 1, 1, CHUNK], [3 * CHUNK], [CHUNK, 2 * CHUNK + 1]]
)
def test_a_layer_returns_all_written_entries_in_order(steps):
    layer = LayerCache()
    keys = []
    values = []
    for length in steps:
        keys.append(random_entries(2, length))
        values.append(random_entries(2, length))
        ((all_keys, all_values),) = layer.update(keys[-1], values[-1])
        assert mx.array_equal(all_keys, mx.concatenate(keys, axis=2))
        assert mx.array_equal(all_values, mx.concatenate(values, axis=2))
    assert layer.length == sum(steps)
    assert layer.keys is not None
    assert layer.keys.shape[2] == layer.capacity
    assert layer.capacity == round_up_to_chunk(sum(steps))


def test_a_layer_with_enough_capacity_does_not_grow():
    layer = LayerCache(capacity=CHUNK + 1)
    for _ in range(4):
        layer.update(random_entries(2, 60), random_entries(2, 60))
        assert layer.keys is not None
        assert layer.keys.shape[2] == 2 * CHUNK


def test_returned_keys_keep_their_values_when_later_updates_write_in_place():
    layer = LayerCache()
    first_keys = random_entries(2, 3)
    ((returned_keys, _),) = layer.update(first_keys, random_entries(2, 3))
    for _ in range(3):
        layer.update(random_entries(2, 1), random_entries(2, 1))
    mx.eval(layer.keys)
    assert mx.array_equal(returned_keys, first_keys)


def test_a_decode_step_writes_in_place():
    # The keys take 16 MiB: one copy per step would add another 16 MiB to the peak.
    layer = LayerCache(capacity=1024)
    layer.update(mx.zeros((16, 4, 1, 64)), mx.zeros((16, 4, 1, 64)))
    mx.eval(layer.keys, layer.values)

    def write_three_tokens():
        for _ in range(3):
            layer.update(mx.ones((16, 4, 1, 64)), mx.ones((16, 4, 1, 64)))
            mx.eval(layer.keys, layer.values)

    assert measure_peak(write_three_tokens) < 4 * 2**20


def test_without_padding_one_token_needs_no_mask_and_several_tokens_a_causal_mask():
    cache = make_filled_cache()
    assert cache.attention_masks(1) == AttentionMasks([QueryRowsReadingCachePart()])
    assert cache.attention_masks(2) == CAUSAL
    assert cache.next_positions(3).tolist() == [5, 5, 5]


def test_padding_attends_to_itself_and_positions_begin_after_the_padding():
    cache = KVCache(ATTENTION, pad=mx.array([0, 2, 3], dtype=mx.int32))
    mask = np.array(cache.attention_masks(4).part_readers[0].mask)
    assert mask.any(-1).all()
    assert cache.next_positions(3).tolist() == [0, -2, -3]


@pytest.mark.parametrize(
    ("num_rows", "heads", "head_dim", "dtype"),
    [(1, 2, 4, mx.float32), (3, 1, 4, mx.float32), (3, 2, 1, mx.float32), (3, 2, 4, mx.float16)],
    ids=["rows", "heads", "head dim", "dtype"],
)
@pytest.mark.parametrize("length", [1, CHUNK])
def test_a_layer_refuses_entries_that_it_would_have_to_broadcast_or_cast(
    num_rows, heads, head_dim, dtype, length
):
    cache = make_filled_cache()
    new = mx.zeros((num_rows, heads, length, head_dim), dtype)
    with pytest.raises(AssertionError):
        cache.layers[0].update(new, new)


def test_the_counted_bytes_of_slots_include_growth():
    cache = SlotCache(make_filled_cache(num_rows=2), num_slots=3)
    cache.assign_prompts([0, 0, 1])
    cache.lengths[0] = CHUNK
    cache.plan_writes()
    arrays = cache.prompts.arrays() + cache.arrays()
    assert cache.most_bytes == sum(array.nbytes for array in arrays)
