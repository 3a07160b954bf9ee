"""The prompt tree, on random weights: each prompt has the result that it has alone."""

import mlx.core as mx
import numpy as np
import pytest

import gwen
from judging import prompt_tree
from judging.prompt_tree import PromptTree
from machine import memory


@pytest.fixture(scope="module", params=["random:2m", "random:2m-hybrid"])
def model(request):
    return gwen.load(request.param)[0]


HEAD = list(range(5, 12))


def make_prompts(num_runs, seed=0):
    """Prompts that consist of a few runs of ids. Three prompts share each beginning."""
    rng = np.random.default_rng(seed)

    def draw_run():
        return tuple(rng.integers(3, 400, rng.integers(1, 30)).tolist())

    prompts = [()]
    for _ in range(num_runs):
        prompts = [(*prompt, draw_run()) for prompt in prompts for _ in range(3)]
    return prompts


@pytest.mark.parametrize("num_runs", [1, 2, 3])
def test_the_tree_computes_shared_beginnings_once_and_each_prompt_as_if_alone(model, num_runs):
    prompts = make_prompts(num_runs)
    prompts.append(prompts[0])  # two equal prompts
    expected_hidden = []
    for prompt in prompts:
        ids = HEAD + [id for run in prompt for id in run]
        expected_hidden.append(np.array(model.hidden(mx.array([ids]))[0, -1]))

    shared_beginnings = {prompt[:end] for prompt in prompts for end in range(1, num_runs)}
    num_distinct_tokens = (
        len(HEAD)
        + sum(len(beginning[-1]) for beginning in shared_beginnings)
        + sum(len(prompt[-1]) for prompt in prompts)
    )
    for chunk_size in (1, 5, 100):
        tree = PromptTree(model, HEAD, chunk_size, "test")
        chunk_sizes = []

        def read(hidden, _, chunk_sizes=chunk_sizes):
            chunk_sizes.append(len(hidden))
            return list(np.array(hidden))

        pairs = list(tree.yield_values_at_ends(dict(enumerate(prompts)), read))
        hidden_by_index = dict(pairs)
        assert len(pairs) == len(prompts)
        assert len(hidden_by_index) == len(prompts)
        assert max(chunk_sizes) <= chunk_size
        hidden = [hidden_by_index[index] for index in range(len(prompts))]
        np.testing.assert_allclose(hidden, expected_hidden, atol=1e-3)
        assert num_distinct_tokens <= tree.num_tokens <= 1.1 * num_distinct_tokens


def test_batches_have_little_padding_and_no_more_rows_than_allowed():
    rng = np.random.default_rng(0)
    for _ in range(50):
        lengths = sorted(rng.integers(1, 60, rng.integers(1, 40)).tolist())
        max_rows = int(rng.integers(1, 12))
        size = prompt_tree.choose_batch_size(lengths, max_rows)
        assert 1 <= size <= min(max_rows, len(lengths))
        assert size == 1 or size * lengths[size - 1] <= 1.1 * sum(lengths[:size])
        if size < min(max_rows, len(lengths)):  # one more row would have too much padding
            assert (size + 1) * lengths[size] > 1.1 * sum(lengths[: size + 1])


def test_the_batch_size_grows_by_a_quarter_after_enough_successes():
    batch_size = memory.BatchSize(24)
    batch_size.rows = 1
    sizes = []
    for _ in range(12 * memory.GROW_AFTER):
        batch_size.record_success()
        sizes.append(batch_size.rows)

    changed_sizes = [
        size for previous, size in zip([1, *sizes], sizes, strict=False) if size != previous
    ]
    assert changed_sizes == [2, 3, 4, 5, 7, 9, 12, 15, 19, 24]
    assert sizes[: memory.GROW_AFTER] == [1] * (memory.GROW_AFTER - 1) + [2]
