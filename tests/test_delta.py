"""The gated delta rule in float64: the definition against numpy, the chunked form against both."""

import mlx.core as mx
import numpy as np
import pytest

from layers import delta
from machine import gpu, kernels

RNG = np.random.default_rng(0)
ARGUMENT_NAMES = "queries keys values log_decay beta memory".split()


@pytest.fixture(autouse=True)
def run_on_cpu():
    """MLX has float64 only on the CPU."""
    with mx.stream(mx.cpu):
        yield


def draw_arguments(
    length: int,
    repeats: bool,
    heads: int = 4,
    key_heads: int = 2,
    key_dim: int = 16,
    value_dim: int = 24,
) -> list[mx.array]:
    """
    The arguments of `gated_delta` in float64.

    repeats: the second half repeats the first token.
    """
    keys, queries = RNG.normal(size=(2, 3, length, key_heads, key_dim))
    values = RNG.normal(size=(3, length, heads, value_dim))
    decay_gate, beta_gate = RNG.normal(size=(2, 3, length, heads))
    log_decay = -np.exp(decay_gate - 3)
    beta = 1 / (1 + np.exp(-beta_gate))
    if repeats:
        for array in (keys, queries, values, log_decay, beta):
            array[:, length // 2 :] = array[:, :1]
        # The memory hardly decays, so that each token depends on all earlier tokens.
        log_decay[:, length // 2 :] *= 1e-3
    keys = keys / np.linalg.norm(keys, axis=-1, keepdims=True)
    queries = queries / np.linalg.norm(queries, axis=-1, keepdims=True) / 4
    memory = RNG.normal(size=(3, heads, value_dim, key_dim))
    arguments = (queries, keys, values, log_decay, beta, memory)
    return [mx.array(array, dtype=mx.float64) for array in arguments]


def delta_by_hand(queries, keys, values, log_decay, beta, memory):
    """The outputs and the last memory, in numpy: one row, head and token after the other."""
    out = np.zeros(values.shape)
    memory = memory.copy()
    num_rows, length, num_heads, _ = values.shape
    num_key_heads = keys.shape[2]
    for row in range(num_rows):
        for head in range(num_heads):
            key_head = head * num_key_heads // num_heads
            state = memory[row, head]
            for t in range(length):
                key = keys[row, t, key_head]
                state = np.exp(log_decay[row, t, head]) * state
                error = values[row, t, head] - state @ key
                state = state + beta[row, t, head] * np.outer(error, key)
                out[row, t, head] = state @ queries[row, t, key_head]
            memory[row, head] = state
    return out, memory


def largest_error(array, expected):
    """The largest difference, as a fraction of the largest expected value; in float64."""
    array = np.array(array.astype(mx.float64))
    expected = np.array(expected)
    return np.abs(array - expected).max() / np.abs(expected).max()


@pytest.mark.parametrize("repeats", [False, True])
@pytest.mark.parametrize("length", [1, 7, 64, 150])
def test_both_forms_equal_the_definition_also_for_repeated_tokens(length, repeats):
    arguments = draw_arguments(length, repeats)
    expected_results = delta_by_hand(*(np.array(array) for array in arguments))
    for form in (delta.stepwise_recurrence, delta.chunked_recurrence):
        for result, expected in zip(form(*arguments), expected_results, strict=True):
            assert largest_error(result, expected) < 1e-9


@pytest.mark.parametrize("repeats", [False, True])
def test_the_error_of_the_chunked_form_in_float32_is_below_a_hundred_thousandth(repeats):
    arguments = draw_arguments(200, repeats)
    expected_results = delta.stepwise_recurrence(*arguments)
    float32_arguments = [array.astype(mx.float32) for array in arguments]
    results = delta.chunked_recurrence(*float32_arguments)
    for result, expected in zip(results, expected_results, strict=True):
        assert largest_error(result, expected) < 1e-5


@pytest.mark.parametrize("repeats", [False, True])
def test_the_gradients_by_all_arguments_equal_those_of_the_definition(repeats):
    arguments = draw_arguments(100, repeats)
    out_weights = mx.array(RNG.normal(size=(3, 100, 4, 24)), dtype=mx.float64)
    memory_weights = mx.array(RNG.normal(size=(3, 4, 24, 16)), dtype=mx.float64)

    def gradients(form):
        def weighted_sum(*arrays):
            out, memory = form(*arrays)
            return (out * out_weights).sum() + (memory * memory_weights).sum()

        return mx.grad(weighted_sum, argnums=list(range(6)))(*arguments)

    chunked_gradients = gradients(delta.chunked_recurrence)
    expected_gradients = gradients(delta.stepwise_recurrence)
    for name, gradient, expected in zip(
        ARGUMENT_NAMES, chunked_gradients, expected_gradients, strict=True
    ):
        assert largest_error(gradient, expected) < 1e-9, name


def test_padding_does_not_change_outputs_or_memory():
    *arrays, first_memory = draw_arguments(70, False)
    padded_arrays = [
        mx.pad(array, [(0, 0), (5, 20), *[(0, 0)] * (array.ndim - 2)]) for array in arrays
    ]
    expected_out, expected_memory = delta.chunked_recurrence(*arrays, first_memory)
    out, memory = delta.chunked_recurrence(*padded_arrays, first_memory)
    assert mx.allclose(out[:, 5:75], expected_out, atol=1e-12)
    assert mx.allclose(memory, expected_memory, atol=1e-12)


@pytest.mark.parametrize("size", [8, 16, 32, 64])
def test_the_inverse_is_exact_in_float32_if_all_tokens_are_equal(size):
    lower = mx.tri(size, k=-1)[None] * 0.999
    inverse = np.array(delta.invert_identity_plus(lower))[0]
    expected = np.linalg.inv(np.eye(size) + np.array(lower, np.float64)[0])
    assert np.abs(inverse - expected).max() < 1e-5


@pytest.mark.parametrize("length", [1, 50])
def test_the_function_of_mlx_gives_the_same_results(length):
    arguments = [array.astype(mx.float32) for array in draw_arguments(length, True)]
    op = delta.gated_delta_sequence if length > 1 else delta.gated_delta_step
    mlx_results = delta.gated_delta_step.launch(*arguments)
    for result, expected in zip(op.reference(*arguments), mlx_results, strict=True):
        assert largest_error(result, expected) < 1e-5


def test_a_faulty_kernel_for_sequences_does_not_turn_off_the_kernel_for_single_tokens(
    monkeypatch, capsys
):
    """The heads have 128 dimensions, for which MLX has kernels."""
    original = mx.fast.gated_delta_update

    def faulty_update(queries, keys, values, *args):
        out, memory = original(queries, keys, values, *args)
        if values.shape[1] > 8:
            out = out * 1.01
        return out, memory

    monkeypatch.setattr(mx.fast, "gated_delta_update", faulty_update)
    monkeypatch.setattr(gpu, "can_run_metal_kernels", lambda: True)
    ops = {1: delta.gated_delta_step, 9: delta.gated_delta_sequence}
    for length, op in ops.items():
        monkeypatch.setattr(op, "disabled_dtypes", set())
        arguments = draw_arguments(length, True, key_dim=128, value_dim=128)
        float32_arguments = tuple(array.astype(mx.float32) for array in arguments)
        kernels.turn_off_faulty_kernels([(op, float32_arguments, {})])
    assert delta.gated_delta_step.can_run(mx.float32)
    assert not delta.gated_delta_sequence.can_run(mx.float32)
    assert "the kernel gated_delta_sequence is off for" in capsys.readouterr().err
