"""Loops counted by hand, and those of decode attention."""

from pathlib import Path

import mlx.core as mx
import pytest

from bench import launches
from kv_cache import Group, Layout, Parts, make_group
from layers import attention
from machine import gpu
from metal import instructions

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("compiler")]

LOOPS = """kernel void loops() {
    uint i = thread_position_in_grid.x;
    float sum = 0.0f;
    #pragma clang loop unroll(disable) vectorize(disable)
    for (uint row = 0; row < x_shape[0]; row++) {
        #pragma clang loop unroll(disable) vectorize(disable)
        for (uint column = 0; column < x_shape[1]; column++) {
            float y = x[row * 64 + column * i];
            STEP
        }
    }
    out[i] = sum;
}
"""


@pytest.mark.parametrize(
    ("step", "num_blocks", "found"),
    [
        ("sum += y * y;", 1, {"ld.global.b32": 1, "fma.rn.f32": 1}),
        ("sum += simd_sum(y);", 1, {"ld.global.b32": 1, "shfl.sync.bfly.b32": 5, "add.f32": 6}),
        ("if (y > 3) sum = simd_sum(sum);", 3, {"ld.global.b32": 1, "shfl.sync.bfly.b32": 5, "add.f32": 5}),
    ],
)
def test_the_innermost_loop_has_the_instructions_that_are_in_it(
    step: str, num_blocks: int, found: dict[str, int], tmp_path: Path
) -> None:
    (tmp_path / "loops.metal").write_text(LOOPS.replace("STEP", step))
    kernel = gpu.Kernel(tmp_path / "loops.metal", "x", "out")
    call = {"outputs": [((64,), mx.float32)], "grid": (64, 1, 1), "threadgroup": (64, 1, 1)}
    outer, loop = instructions.of_call(kernel, lambda: kernel([mx.zeros((8, 64))], **call))
    assert loop.is_innermost and not outer.is_innermost
    assert loop.num_blocks == num_blocks
    assert all(loop.instructions[name] == count for name, count in found.items())


def decode_step(model: tuple[int, int, int], num_slots: int, masked: bool) -> tuple[mx.array, Parts, Layout]:
    """Of two prompts with so many slots each; model: heads, kv heads, dims."""
    (heads, kv_heads, size), rows = model, 2 * num_slots
    parts = [mx.zeros((n, kv_heads, width, size), mx.float16) for n, width in ((2, 50), (rows, 30))]
    masks = [mx.ones((n, 1, 1, width), mx.bool_) if masked else None for n, width in ((2, 50), (rows, 30))]
    layout = Layout([make_group([n // num_slots for n in range(rows)], 2, masks[0]), Group(mask=masks[1])])
    return mx.zeros((rows, heads, 1, size), mx.float16), [(part, part) for part in parts], layout


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "before", "now"),
    [(16, 8, 128, 118, 45), (32, 8, 128, 180, 83), (12, 2, 128, 242, 115), (16, 8, 64, 90, 27), (14, 2, 64, 215, 92)],
    ids=["qwen3-0.6b", "qwen3-4b", "qwen2.5-1.5b", "random-30m", "qwen2.5-0.5b"],
)
@pytest.mark.parametrize("masked", [False, True], ids=["plain", "masked"])
def test_a_column_of_slot_attention_takes_no_jump_and_half_of_the_instructions_that_it_took(
    heads: int, kv_heads: int, size: int, before: int, now: int, masked: bool
) -> None:
    """Before: a column at a time in 9 to 17 blocks, with two powers and a rescaling of all results for each."""
    assert now <= before / 2
    call = decode_step((heads, kv_heads, size), 2, masked)
    loops = instructions.of_call(attention.SLOT_ATTENTION, lambda: attention.slot_attention.launch(*call))
    (loop,) = (loop for loop in loops if loop.instructions["shfl.sync.bfly.b32"])
    lanes = attention.lanes_of_a_column(size, heads // kv_heads)
    num_columns = 32 // lanes * (2 if lanes == 8 else 4)
    assert loop.num_blocks == 1
    assert loop.instructions.total() / num_columns <= now * (1.2 if masked else 1)
    if not masked:
        effort = loop.instructions.total() / num_columns / (heads // kv_heads * size / 16)
        assert 0.8 < launches.effort_of("slot_attention", 0, size) / effort < 1.2


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "num_slots", "before", "now"),
    [
        (16, 8, 128, 8, 45, 27),
        (16, 8, 128, 2, 45, 34),
        (16, 8, 128, 1, 45, 48),
        (28, 4, 128, 8, 196, 94),
        (16, 2, 128, 8, 221, 107),
        (14, 2, 64, 8, 92, 57),
    ],
    ids=["qwen3-0.6b", "qwen3-0.6b-2", "qwen3-0.6b-1", "qwen2.5-7b", "qwen2.5-3b", "qwen2.5-0.5b"],
)
@pytest.mark.parametrize("masked", [False, True], ids=["plain", "masked"])
def test_the_columns_that_a_group_reads_at_once_take_few_instructions_a_slot(
    heads: int, kv_heads: int, size: int, num_slots: int, before: int, now: int, masked: bool
) -> None:
    """Before: slot attention, which took 273, 304 and 215 with 7, 8 and 7 queries a kv head until it took these."""
    call = decode_step((heads, kv_heads, size), num_slots, masked)
    kernel = attention.GROUP_ATTENTION
    outer, scores, results = instructions.of_call(kernel, lambda: attention.group_attention.launch(*call))[-3:]
    assert (outer.is_innermost, scores.num_blocks, results.num_blocks) == (False, 1, 1)
    total = outer.instructions.total() + 4 * scores.instructions.total() + 8 * results.instructions.total()
    num_queries = heads // kv_heads
    each = total / 32 / attention.group_block(num_queries * num_slots)  # of a query and column
    assert each * num_queries <= now * (1.05 if masked else 1)
    assert now <= before * (1.1 if num_slots == 1 else 0.8)
    expected = launches.effort_of("group_attention", num_queries * num_slots, size)
    assert 0.85 < expected / (each / (size / 16)) < 1.15
