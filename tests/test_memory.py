"""What the machine has, and which errors say that memory ran out."""

import mlx.core as mx
import pytest

import memory


def test_the_machines_memory_is_what_the_kernel_reports():
    if mx.default_device().type == mx.gpu:
        pytest.skip("a GPU has its own figure")
    with open("/proc/meminfo") as file:
        kilobytes = int(next(line for line in file if line.startswith("MemTotal")).split()[1])
    assert memory.of_device() == pytest.approx(kilobytes * 1024, rel=0.01)


@pytest.mark.parametrize(
    "message",
    [
        "[METAL] Command buffer execution failed: Insufficient Memory (00000008:kIOGPUCommandBuffer...)",
        "[metal::malloc] Attempting to allocate 34359738368 bytes which is greater than the maximum",
        "cudaMallocAsync(&data, size, stream) failed: out of memory",
        "[malloc_or_wait] Unable to allocate 99999999999 bytes.",
        "std::bad_alloc",
    ],
)
def test_the_backends_words_for_no_memory_are_recognised(message):
    assert memory.is_out_of_memory(RuntimeError(message))


def test_another_error_is_not_taken_for_it():
    with pytest.raises(ValueError) as caught:
        mx.eval(mx.zeros((2, 3)) @ mx.zeros((2, 3)))
    assert not memory.is_out_of_memory(RuntimeError(str(caught.value)))
