"""A tree of prompts on random weights: every prompt as if alone, whatever memory does."""

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


def some_prompts(num_runs, seed=0):
    """Prompts of a few runs, most of which several begin with."""
    rng = np.random.default_rng(seed)

    def run():
        return tuple(rng.integers(3, 400, rng.integers(1, 30)).tolist())

    prompts = [()]
    for _ in range(num_runs):
        prompts = [(*prompt, run()) for prompt in prompts for _ in range(3)]
    return prompts


@pytest.mark.parametrize("num_runs", [1, 2, 3])
def test_every_prompt_is_read_once_and_as_if_it_stood_alone(model, num_runs):
    prompts = some_prompts(num_runs)
    prompts.append(prompts[0])  # twice the same
    whole = [HEAD + [i for run in prompt for i in run] for prompt in prompts]
    expected = np.array([np.array(model.hidden(mx.array([ids]))[0, -1]) for ids in whole])
    shared = {prompt[:end] for prompt in prompts for end in range(1, num_runs)}
    distinct = (
        len(HEAD)
        + sum(len(path[-1]) for path in shared)
        + sum(len(prompt[-1]) for prompt in prompts)
    )
    for chunk_size in (1, 5, 100):
        tree, sizes = PromptTree(model, HEAD, chunk_size, "test"), []

        def read(hidden, _, sizes=sizes):
            sizes.append(len(hidden))
            return list(np.array(hidden))

        walked = list(tree.yield_values_at_ends(dict(enumerate(prompts)), read))
        found = dict(walked)
        assert len(walked) == len(prompts) == len(found) and max(sizes) <= chunk_size
        np.testing.assert_allclose(
            [found[place] for place in range(len(prompts))], expected, atol=1e-3
        )
        assert distinct <= tree.num_tokens <= 1.1 * distinct


def test_batches_hold_little_padding_and_no_more_rows_than_allowed():
    rng = np.random.default_rng(0)
    for _ in range(50):
        lengths = sorted(rng.integers(1, 60, rng.integers(1, 40)).tolist())
        most = int(rng.integers(1, 12))
        size = prompt_tree.choose_batch_size(lengths, most)
        assert 1 <= size <= min(most, len(lengths))
        assert size == 1 or size * lengths[size - 1] <= 1.1 * sum(lengths[:size])
        if size < min(most, len(lengths)):  # one more row would be padded too much
            assert (size + 1) * lengths[size] > 1.1 * sum(lengths[: size + 1])


def test_the_sizes_of_growing_are_a_quarter_more_each():
    chunk, sizes = memory.BatchSize(24), []
    chunk.rows = 1
    for _ in range(12 * memory.GROW_AFTER):
        chunk.record_success()
        sizes.append(chunk.rows)
    assert [b for a, b in zip([1, *sizes], sizes, strict=False) if a != b] == [
        2,
        3,
        4,
        5,
        7,
        9,
        12,
        15,
        19,
        24,
    ]
    assert sizes[: memory.GROW_AFTER] == [1] * (memory.GROW_AFTER - 1) + [2]
