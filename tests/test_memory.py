"""What the machine has, and which errors say that memory ran out."""

import mlx.core as mx
import numpy as np
import pytest

from machine import gpu


def test_the_machines_memory_is_what_the_kernel_reports():
    if mx.default_device().type == mx.gpu:
        pytest.skip("a GPU has its own figure")
    with open("/proc/meminfo") as file:
        kilobytes = int(next(line for line in file if line.startswith("MemTotal")).split()[1])
    assert gpu.memory_size() == pytest.approx(kilobytes * 1024, rel=0.01)


def test_the_memory_of_a_gpu_is_what_macos_recommends(monkeypatch):
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))
    monkeypatch.setattr(
        mx, "device_info", lambda: {"max_recommended_working_set_size": 12 << 30, "device_name": "some"}
    )
    assert gpu.memory_size() == 12 << 30
    held = mx.zeros((1 << 20,))
    mx.eval(held)
    assert gpu.memory_at_hand() == (12 << 30) - mx.get_active_memory() < gpu.memory_size()


def test_what_is_at_hand_on_a_cpu_is_no_more_than_is_free():
    if mx.default_device().type == mx.gpu:
        pytest.skip("a GPU has its own figure")
    with open("/proc/meminfo") as file:
        free = next(int(line.split()[1]) * 1024 for line in file if line.startswith("MemAvailable"))
    assert gpu.memory_at_hand() == pytest.approx(min(free, gpu.memory_size() - mx.get_active_memory()), rel=0.1)
    assert gpu.memory_at_hand() < gpu.memory_size()


@pytest.mark.parametrize(
    "message",
    [
        "[METAL] Command buffer execution failed: Insufficient Memory (00000008:kIOGPUCommandBuffer...)",
        "[metal::malloc] Attempting to allocate 34359738368 bytes which is greater than the maximum",
        "[malloc_or_wait] Unable to allocate 99999999999 bytes.",
        "std::bad_alloc",
    ],
)
def test_the_backends_words_for_no_memory_are_recognised(message):
    assert gpu.is_out_of_memory(RuntimeError(message))


def test_pythons_own_error_is_recognised():
    with pytest.raises(MemoryError) as caught:
        np.empty(2**50)
    assert gpu.is_out_of_memory(caught.value)


def test_another_error_is_not_taken_for_it():
    with pytest.raises(ValueError) as caught:
        mx.eval(mx.zeros((2, 3)) @ mx.zeros((2, 3)))
    assert not gpu.is_out_of_memory(RuntimeError(str(caught.value)))


def test_an_attempt_without_enough_memory_gives_none_and_holds_nothing_any_more():
    def holding(words):
        array = mx.zeros((1 << 20,))
        mx.eval(array)
        raise RuntimeError(words)

    held = mx.get_active_memory()
    assert gpu.attempt(holding, "out of memory") == []
    assert mx.get_active_memory() - held < 1 << 20
    with pytest.raises(RuntimeError, match="shapes do not fit"):
        gpu.attempt(holding, "shapes do not fit")
    assert gpu.attempt(max, 2, 3) == [3]
