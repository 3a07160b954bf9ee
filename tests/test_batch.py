"""Batches with and without shared prompts: every row keeps its past, positions and gradient."""

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from conftest import measure_peak
from mlx.utils import tree_flatten

import gwen
import lora
from layers import attention, lm_head
from layers.tree_cache import TreeCache
from step.batch import ROOM, completion_hidden_states, make_batches, plan_batches_and_sharing
from step.sample import Sample

RNG = np.random.default_rng(0)
GROUP_SIZE = 4
PROMPTS = [RNG.integers(3, 320, length).tolist() for length in (5, 9, 2)]
PROMPT_OF_ROW = [prompt for prompt in PROMPTS for _ in range(GROUP_SIZE)]
# One group has completions of a single token.
LENGTHS = np.array([7, 1, 3, 1, 1, 1, 1, 1, 2, 6, 4, 7])


def make_samples(lengths, prompts=PROMPT_OF_ROW, vocab=320):
    """Samples with random completions and log-probabilities; one prompt and length per row."""
    completions = [RNG.integers(3, vocab, length).tolist() for length in lengths]
    samples = []
    for row, (prompt, ids) in enumerate(zip(prompts, completions, strict=True)):
        logprobs = RNG.normal(size=len(ids))
        samples.append(Sample(prompt, ids, range(len(ids)), row // GROUP_SIZE, logprobs))
    return samples


SAMPLES = make_samples(LENGTHS)
SLOPES = mx.array(RNG.normal(size=(12, 7)).astype(np.float32))


def load_model(directory, rank):
    model = gwen.load_model(directory)
    if rank:
        lora.apply(model, rank, 2.0)
        # B begins at 0, which would give A no gradient.
        for _, layer in lora.adapted_layers(model):
            layer.lora_b = 0.05 * mx.random.normal(layer.lora_b.shape, key=mx.random.key(1))
    return model


def loss_and_gradients(model, batches, checkpoint_layers=0):
    """A weighted sum of all completion log-probabilities, and its gradients by name."""
    has_adapters = any(True for _ in lora.adapted_layers(model))
    head = "trained" if "lm_head" in model or not has_adapters else "frozen"
    total_loss = 0.0
    total_gradients = {}
    for batch in batches:

        def loss(model, batch=batch):
            states = completion_hidden_states(model, batch, checkpoint_layers)
            logprobs, _ = lm_head.token_logprobs(
                states, model.head_weight, batch.completion_ids, head=head
            )
            slopes = SLOPES[mx.array(batch.rows), : logprobs.shape[1]]
            return (logprobs * batch.mask * slopes).sum()

        batch_loss, batch_gradients = nn.value_and_grad(model, loss)(model)
        total_loss += batch_loss.item()
        for name, array in tree_flatten(batch_gradients):
            total_gradients[name] = array + total_gradients.get(name, 0)
    return total_loss, total_gradients


def check_close(result, expected, tolerance):
    """Compares two results of `loss_and_gradients`, relative to the largest number of a tensor."""
    loss, gradients = result
    expected_loss, expected_gradients = expected
    assert loss == pytest.approx(expected_loss, abs=1e-3)
    assert gradients.keys() == expected_gradients.keys()
    for name, array in expected_gradients.items():
        largest = mx.abs(array).max().item()
        assert largest > 0, f"{name} has no gradient"
        assert mx.abs(gradients[name] - array).max().item() < tolerance * largest, name


@pytest.mark.parametrize("rank", [0, 4])
@pytest.mark.parametrize("family", ["qwen2", "qwen2.5", "qwen3", "smollm3", "qwen3.5"])
def test_the_gradient_depends_neither_on_the_batches_nor_on_sharing(checkpoints, family, rank):
    """The expected gradient is that of batches of one row, without padding."""
    model = load_model(checkpoints[family], rank)
    single_rows = make_batches(SAMPLES, 1, "off")
    assert len(single_rows) == 12
    for batch in single_rows:
        assert batch.num_positions_with_padding == batch.num_positions_without_padding
    expected = loss_and_gradients(model, single_rows)

    tolerance = 1e-4 if family == "qwen3.5" else 1e-5
    for sharing, budgets in {"on": (1, 3 * 8, 10**6), "off": (3 * 8, 40, 10**6)}.items():
        batches_by_budget = [make_batches(SAMPLES, budget, sharing) for budget in budgets]
        assert len({len(batches) for batches in batches_by_budget}) == 3
        assert len(batches_by_budget[-1]) == 1
        for batches in batches_by_budget:
            check_close(loss_and_gradients(model, batches), expected, tolerance)


@pytest.mark.parametrize("rank", [0, 4])
@pytest.mark.parametrize("family", ["qwen2", "qwen3", "qwen3.5"])
@pytest.mark.parametrize("sharing", ["on", "off"])
@pytest.mark.parametrize("checkpoint_layers", [1, 2, 4])
def test_recomputed_layers_keep_the_gradient_of_every_tensor(
    checkpoints, family, rank, sharing, checkpoint_layers
):
    """
    `mx.checkpoint` of a module loses gradients.

    A cache that recomputation fills a second time would contain each key twice.
    """
    model = load_model(checkpoints[family], rank)
    batches = make_batches(SAMPLES, 60, sharing)
    weights_before = dict(tree_flatten(model.parameters()))
    recomputed = loss_and_gradients(model, batches, checkpoint_layers)
    check_close(recomputed, loss_and_gradients(model, batches), 1e-5)
    weights_after = dict(tree_flatten(model.parameters()))
    for name, array in weights_before.items():
        assert mx.array_equal(array, weights_after[name])


def test_recomputed_layers_get_their_weights_back_and_keep_no_part_of_a_graph(checkpoints):
    model = load_model(checkpoints["qwen3"], 4)
    weights = dict(tree_flatten(model.parameters()))
    (batch,) = make_batches(SAMPLES, 10**6, "on")
    head = mx.random.normal((320, 48), key=mx.random.key(2))

    def sum_of_logits(head):
        return (completion_hidden_states(model, batch, 2) @ head.T).sum()

    mx.eval(mx.grad(sum_of_logits)(head))
    assert all(array is weights[name] for name, array in tree_flatten(model.parameters()))


@pytest.mark.parametrize("is_fused", [False, True])
def test_a_prompt_that_two_groups_share_is_computed_once_with_an_unchanged_gradient(
    checkpoints, monkeypatch, is_fused
):
    monkeypatch.setattr(attention, "has_float32_attention_kernel", lambda _: is_fused)
    monkeypatch.setattr(attention, "FEW_QUERIES", 0)
    model = load_model(checkpoints["qwen3"], 0)
    prompts = [PROMPTS[0]] * 4 + [PROMPTS[1]] * 4 + [PROMPTS[0]] * 4
    samples = [
        sample._replace(prompt=prompt) for sample, prompt in zip(SAMPLES, prompts, strict=True)
    ]
    (batch,) = make_batches(samples, 10**6, "on")
    assert batch.prefix.lengths in ([5, 9], [9, 5])
    expected = loss_and_gradients(model, make_batches(samples, 1, "off"))
    check_close(loss_and_gradients(model, [batch]), expected, 1e-5)


@pytest.mark.parametrize("sharing", ["auto", "on", "off"])
@pytest.mark.parametrize("budget", [1, 30, 55, 10**6])
def test_every_row_is_in_one_micro_batch_within_the_budget_of_positions(sharing, budget):
    samples = [*SAMPLES]
    # Rows without loss positions or without a weight are not computed.
    samples[5] = samples[5]._replace(loss_positions=(), weight=0.0)
    samples[7] = samples[7]._replace(weight=0.0)
    batches = make_batches(samples, budget, sharing)
    rows = sorted(row for batch in batches for row in batch.rows)
    assert rows == [0, 1, 2, 3, 4, 6, 8, 9, 10, 11]

    for batch in batches:
        most_positions = ROOM * budget if batch.prefix else budget
        assert batch.num_positions_with_padding <= most_positions or len(batch.rows) == 1
        assert batch.num_positions_without_padding <= batch.num_positions_with_padding
        assert batch.num_rows == 12
        assert batch.num_loss_tokens == LENGTHS.sum() - 1

        for index, row in enumerate(batch.rows):
            sample = samples[row]
            length = int(LENGTHS[row])
            input_ids = batch.tokens[index].tolist()[: batch.lengths[index]]
            if batch.prefix:
                parent = batch.prefix.parents[index]
                prefix = batch.prefix.tokens[parent].tolist()[: batch.prefix.lengths[parent]]
                input_ids = prefix + input_ids
            assert input_ids == [*sample.prompt, *sample.response_ids][:-1]
            assert batch.completion_ids[index].tolist()[:length] == sample.response_ids
            assert batch.mask[index].sum().item() == length
            np.testing.assert_array_equal(
                batch.sampled_logprobs[index, :length], sample.logprobs.astype(np.float32)
            )


def test_prompts_are_shared_if_sharing_saves_enough_positions():
    def is_sharing_planned(prompt_length, completion_length, group_size):
        prompts = [[1] * prompt_length] * group_size
        lengths = np.full(group_size, completion_length)
        is_shared, _ = plan_batches_and_sharing(prompts, lengths, 10**6, "auto")
        return is_shared

    assert is_sharing_planned(96, 64, 8)
    assert is_sharing_planned(512, 64, 2)
    # Sharing would save 3 of 259 positions per row.
    assert not is_sharing_planned(4, 256, 8)
    # No other row has the prompt.
    assert not is_sharing_planned(96, 64, 1)


def test_a_group_that_nearly_fits_stays_whole_and_a_larger_group_is_split_evenly():
    prompts = [[1] * 128] * 8
    lengths = np.full(8, 256)  # 128 + 8 * 255 = 2,168 positions
    sizes_by_budget = {
        2048: [8],
        1900: [4, 4],
        1100: [4, 4],
        900: [3, 3, 2],
        1: [1] * 8,
    }
    for budget, sizes in sizes_by_budget.items():
        is_shared, parts = plan_batches_and_sharing(prompts, lengths, budget, "on")
        assert is_shared
        assert [len(rows) for rows, _ in parts] == sizes
        for rows, num_positions in parts:
            assert num_positions == 128 + 255 * len(rows)


def test_recomputing_layers_and_sharing_prompts_both_save_memory():
    model = gwen.make_random_model("random:2m")
    lora.apply(model, 8, 2.0)
    mx.eval(model.parameters())
    samples = make_samples([32] * 8, [RNG.integers(3, 320, 64).tolist()] * 8)

    def peak(sharing, checkpoint_layers):
        (batch,) = make_batches(samples, 10**6, sharing)

        def loss(model):
            return (completion_hidden_states(model, batch, checkpoint_layers) ** 2).sum()

        gradient = nn.value_and_grad(model, loss)
        return measure_peak(lambda: gradient(model))

    plain = peak("off", 0)
    assert peak("off", 5) < 0.7 * plain
    assert peak("on", 0) < 0.6 * plain
    assert peak("on", 5) < 0.35 * plain

    # No array of the cache is a view that keeps the queries, keys and values in memory.
    cache = TreeCache(model.config.layer_kinds).with_new_level([64])
    memory_before = mx.get_active_memory()
    model.hidden(mx.zeros((1, 64), mx.int32), cache, checkpoint_layers=5)
    mx.eval(cache.arrays())
    cache_bytes = sum(array.nbytes for array in cache.arrays())
    assert mx.get_active_memory() - memory_before < 1.5 * cache_bytes
