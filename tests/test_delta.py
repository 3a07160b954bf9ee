"""The gated delta rule: its definition against numpy, its chunked form against the definition, both in float64."""

import mlx.core as mx
import numpy as np
import pytest

from layers import delta
from machine import gpu, kernels

RNG = np.random.default_rng(0)
NAMES = "queries keys values log_decay beta memory".split()


@pytest.fixture(autouse=True)
def on_the_cpu():
    """float64 exists there alone."""
    with mx.stream(mx.cpu):
        yield


def drawn(
    length: int,
    repeats: bool,
    heads: int = 4,
    key_heads: int = 2,
    key_dim: int = 16,
    value_dim: int = 24,
) -> list[mx.array]:
    """The arguments of `gated_delta` in float64; repeats: the second half is one token again and again."""
    keys, queries = RNG.normal(size=(2, 3, length, key_heads, key_dim))
    values, gates = (
        RNG.normal(size=(3, length, heads, value_dim)),
        RNG.normal(size=(2, 3, length, heads)),
    )
    decay, beta = -np.exp(gates[0] - 3), 1 / (1 + np.exp(-gates[1]))
    if repeats:
        for array in (keys, queries, values, decay, beta):
            array[:, length // 2 :] = array[:, :1]
        decay[:, length // 2 :] *= (
            1e-3  # the memory hardly fades, so that each token meets all before it
        )
    keys, queries = (one / np.sqrt((one**2).sum(-1, keepdims=True)) for one in (keys, queries))
    memory = RNG.normal(size=(3, heads, value_dim, key_dim))
    return [
        mx.array(one, dtype=mx.float64) for one in (queries / 4, keys, values, decay, beta, memory)
    ]


def by_hand(queries, keys, values, decay, beta, memory):
    """One row, one head, one token after the other; numpy."""
    out, memory = np.zeros(values.shape), memory.copy()
    for row in range(len(values)):
        for head in range(values.shape[2]):
            at = head * keys.shape[2] // values.shape[2]
            for t in range(values.shape[1]):
                state, key = np.exp(decay[row, t, head]) * memory[row, head], keys[row, t, at]
                state = state + beta[row, t, head] * np.outer(
                    values[row, t, head] - state @ key, key
                )
                memory[row, head], out[row, t, head] = state, state @ queries[row, t, at]
    return out, memory


@pytest.mark.parametrize("repeats", [False, True])
@pytest.mark.parametrize("length", [1, 7, 64, 150])
def test_both_forms_are_the_definition_also_where_a_token_repeats(length, repeats):
    given = drawn(length, repeats)
    expected = by_hand(*(np.array(one) for one in given))
    for form in (delta.stepwise_recurrence, delta.chunked_recurrence):
        for ours, theirs in zip(form(*given), expected, strict=True):
            assert np.abs(np.array(ours) - theirs).max() < 1e-9 * np.abs(theirs).max()


@pytest.mark.parametrize("repeats", [False, True])
def test_the_chunked_form_in_float32_is_within_a_millionth_per_token_of_the_definition(repeats):
    given = drawn(200, repeats)
    expected = delta.stepwise_recurrence(*given)
    rounded = [one.astype(mx.float32) for one in given]
    for ours, theirs in zip(delta.chunked_recurrence(*rounded), expected, strict=True):
        assert (
            mx.abs(ours.astype(mx.float64) - theirs).max().item()
            < 1e-5 * mx.abs(theirs).max().item()
        )


@pytest.mark.parametrize("repeats", [False, True])
def test_the_gradient_by_each_input_and_the_first_memory_is_that_of_the_definition(repeats):
    given = drawn(100, repeats)
    weights = [
        mx.array(RNG.normal(size=shape), dtype=mx.float64)
        for shape in ((3, 100, 4, 24), (3, 4, 24, 16))
    ]

    def loss(form):
        def of(*arrays):
            return sum(
                (one * weight).sum() for one, weight in zip(form(*arrays), weights, strict=True)
            )

        return mx.grad(of, argnums=list(range(6)))(*given)

    for name, ours, theirs in zip(
        NAMES, loss(delta.chunked_recurrence), loss(delta.stepwise_recurrence), strict=True
    ):
        assert mx.abs(ours - theirs).max().item() < 1e-9 * mx.abs(theirs).max().item(), name


def test_padding_leaves_the_memory_as_it_is():
    given = drawn(70, False)
    padded = [mx.pad(one, [(0, 0), (5, 20), *[(0, 0)] * (one.ndim - 2)]) for one in given[:5]]
    out, memory = delta.chunked_recurrence(*given)
    wider, same = delta.chunked_recurrence(*padded, given[5])
    assert mx.allclose(wider[:, 5:75], out, atol=1e-12) and mx.allclose(same, memory, atol=1e-12)


@pytest.mark.parametrize("size", [8, 16, 32, 64])
def test_the_inverse_is_exact_in_float32_where_all_tokens_are_alike(size):
    lower = mx.tri(size, k=-1)[None] * 0.999
    ours, exact = (
        np.array(delta.invert_identity_plus(lower))[0],
        np.linalg.inv(np.eye(size) + np.array(lower, np.float64)[0]),
    )
    assert np.abs(ours - exact).max() < 1e-5


@pytest.mark.parametrize("length", [1, 50])
def test_mlx_s_own_form_gives_the_same(length):
    given = [one.astype(mx.float32) for one in drawn(length, True)]
    op = delta.gated_delta_sequence if length > 1 else delta.gated_delta_step
    for ours, theirs in zip(
        op.reference(*given), delta.gated_delta_step.launch(*given), strict=True
    ):
        assert mx.abs(ours - theirs).max().item() < 1e-5 * mx.abs(theirs).max().item()


def test_a_wrong_kernel_for_many_tokens_leaves_the_one_for_a_token_on(monkeypatch, capsys):
    """Of heads of 128, which MLX has kernels for."""
    original = mx.fast.gated_delta_update

    def update(queries, keys, values, *others):
        out, memory = original(queries, keys, values, *others)
        return (out * 1.01 if values.shape[1] > 8 else out), memory

    monkeypatch.setattr(mx.fast, "gated_delta_update", update)
    monkeypatch.setattr(gpu, "can_run_metal_kernels", lambda: True)
    ops = {1: delta.gated_delta_step, 9: delta.gated_delta_sequence}
    for length, op in ops.items():
        monkeypatch.setattr(op, "disabled_dtypes", set())
        given = (one.astype(mx.float32) for one in drawn(length, True, key_dim=128, value_dim=128))
        kernels.turn_off_faulty_kernels([(op, tuple(given), {})])
    assert [op.can_run(mx.float32) for op in ops.values()] == [True, False]
    assert "the kernel gated_delta_sequence is off for" in capsys.readouterr().err
