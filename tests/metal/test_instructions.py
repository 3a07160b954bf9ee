"""Loops counted by hand, and the innermost one of decode attention."""

import mlx.core as mx
import pytest

import gpu
from kv_cache import Group, Layout, make_group
from layers import ops
from metal import instructions

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("compiler")]

LOOPS = """
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
    step: str, num_blocks: int, found: dict[str, int]
) -> None:
    kernel = gpu.Kernel("loops", ["x"], ["out"], LOOPS.replace("STEP", step))
    call = {"outputs": [((64,), mx.float32)], "grid": (64, 1, 1), "threadgroup": (64, 1, 1)}
    (loop,) = instructions.of_call(kernel, lambda: kernel([mx.zeros((8, 64))], **call))
    assert loop.num_blocks == num_blocks
    assert all(loop.instructions[name] == count for name, count in found.items())


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
    queries = mx.zeros((4, heads, 1, size), mx.float16)
    (keys, own), (mask, own_mask) = (
        [mx.zeros((rows, kv_heads, width, size), mx.float16) for rows, width in ((2, 50), (4, 30))],
        [mx.ones((rows, 1, 1, width), mx.bool_) if masked else None for rows, width in ((2, 50), (4, 30))],
    )
    layout = Layout([make_group([0, 0, 1, 1], 2, mask), Group(None, None, own_mask)])
    loops = instructions.of_call(
        ops.SLOT_ATTENTION, lambda: ops.slot_attention.launch(queries, [(keys, keys), (own, own)], layout)
    )
    (loop,) = (loop for loop in loops if loop.instructions["shfl.sync.bfly.b32"])
    lanes = ops.lanes_of_a_column(size, heads // kv_heads)
    num_columns = 32 // lanes * (2 if lanes == 8 else 4)
    assert loop.num_blocks == 1
    assert loop.instructions.total() / num_columns <= now * (1.2 if masked else 1)
