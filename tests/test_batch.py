"""Batches in both forms: every row keeps its past, its positions and its gradient."""

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
GROUPS = 4
PROMPTS = [RNG.integers(3, 320, length).tolist() for length in (5, 9, 2)]
ROWS = [prompt for prompt in PROMPTS for _ in range(GROUPS)]
LENGTHS = np.array(
    [7, 1, 3, 1, 1, 1, 1, 1, 2, 6, 4, 7]
)  # one group has completions of a single token


def samples_of(lengths, prompts=ROWS, vocab=320):
    ids = [RNG.integers(3, vocab, length).tolist() for length in lengths]
    rows = enumerate(zip(prompts, ids, strict=True))
    return [
        Sample(of, its, range(len(its)), row // GROUPS, RNG.normal(size=len(its)))
        for row, (of, its) in rows
    ]


SAMPLES = samples_of(LENGTHS)
SLOPES = mx.array(RNG.normal(size=(12, 7)).astype(np.float32))


def load(directory, rank):
    model = gwen.load_model(directory)
    if rank:
        lora.apply(model, rank, 2.0)
        for _, layer in lora.adapted_layers(model):  # at 0, as they begin, A would have no gradient
            layer.lora_b = 0.05 * mx.random.normal(layer.lora_b.shape, key=mx.random.key(1))
    return model


def gradient(model, batches, checkpoint_layers=0):
    """A weighted sum of all completion tokens' log-probabilities and its gradient by name, batch after batch."""
    head = (
        "trained"
        if "lm_head" in model or not any(True for _ in lora.adapted_layers(model))
        else "frozen"
    )
    total, grads = 0.0, {}
    for batch in batches:

        def loss(model, batch=batch):
            states = completion_hidden_states(model, batch, checkpoint_layers)
            logprobs, _ = lm_head.token_logprobs(
                states, model.head_weight, batch.completion_ids, head=head
            )
            return (logprobs * batch.mask * SLOPES[mx.array(batch.rows), : logprobs.shape[1]]).sum()

        value, part = nn.value_and_grad(model, loss)(model)
        total += value.item()
        for name, array in tree_flatten(part):
            grads[name] = array + grads.get(name, 0)
    return total, grads


def assert_same(found, expected, tolerance):
    assert found[0] == pytest.approx(expected[0], abs=1e-3)
    assert found[1].keys() == expected[1].keys()
    for name, array in expected[1].items():
        largest = mx.abs(array).max().item()
        assert largest > 0, f"{name} has no gradient"
        assert mx.abs(found[1][name] - array).max().item() < tolerance * largest, name


@pytest.mark.parametrize("rank", [0, 4])
@pytest.mark.parametrize("family", ["qwen2", "qwen2.5", "qwen3", "smollm3", "qwen3.5"])
def test_the_gradient_is_the_same_for_any_cut_shared_or_not(checkpoints, family, rank):
    """Against one row after the other, alone and without padding."""
    model, alone = load(checkpoints[family], rank), make_batches(SAMPLES, 1, "off")
    assert len(alone) == 12 and all(
        batch.num_positions_with_padding == batch.num_positions_without_padding for batch in alone
    )
    expected = gradient(model, alone)
    for sharing, budgets in {"on": (1, 3 * 8, 10**6), "off": (3 * 8, 40, 10**6)}.items():
        cuts = [make_batches(SAMPLES, budget, sharing) for budget in budgets]
        assert len({len(batches) for batches in cuts}) == 3 and len(cuts[-1]) == 1
        for batches in cuts:
            assert_same(gradient(model, batches), expected, 1e-4 if family == "qwen3.5" else 1e-5)


@pytest.mark.parametrize("rank", [0, 4])
@pytest.mark.parametrize("family", ["qwen2", "qwen3", "qwen3.5"])
@pytest.mark.parametrize("sharing", ["on", "off"])
@pytest.mark.parametrize("checkpoint_layers", [1, 2, 4])
def test_layers_that_are_computed_again_keep_the_gradient_of_every_tensor(
    checkpoints, family, rank, sharing, checkpoint_layers
):
    """`mx.checkpoint` of a module drops them, and of a cache that was filled once more doubles the keys."""
    model, batches = load(checkpoints[family], rank), make_batches(SAMPLES, 60, sharing)
    before = dict(tree_flatten(model.parameters()))
    assert_same(gradient(model, batches, checkpoint_layers), gradient(model, batches), 1e-5)
    after = dict(tree_flatten(model.parameters()))
    assert all(mx.array_equal(array, after[name]) for name, array in before.items())


def test_a_layer_that_was_computed_again_has_its_own_weights_and_no_piece_of_a_graph(checkpoints):
    model = load(checkpoints["qwen3"], 4)
    before = dict(tree_flatten(model.parameters()))
    (batch,) = make_batches(SAMPLES, 10**6, "on")
    head = mx.random.normal((320, 48), key=mx.random.key(2))
    mx.eval(mx.grad(lambda head: (completion_hidden_states(model, batch, 2) @ head.T).sum())(head))
    assert all(array is before[name] for name, array in tree_flatten(model.parameters()))


@pytest.mark.parametrize("is_fused", [False, True])
def test_the_same_prompt_twice_in_a_step_is_computed_once_and_completions_keep_their_own(
    checkpoints, monkeypatch, is_fused
):
    monkeypatch.setattr(attention, "has_float32_attention_kernel", lambda _: is_fused)
    monkeypatch.setattr(attention, "FEW_QUERIES", 0)
    model = load(checkpoints["qwen3"], 0)
    rows = [PROMPTS[0]] * 4 + [PROMPTS[1]] * 4 + [PROMPTS[0]] * 4
    samples = [one._replace(prompt=prompt) for one, prompt in zip(SAMPLES, rows, strict=True)]
    (batch,) = make_batches(samples, 10**6, "on")
    assert batch.prefix.lengths in ([5, 9], [9, 5])
    assert_same(gradient(model, [batch]), gradient(model, make_batches(samples, 1, "off")), 1e-5)


@pytest.mark.parametrize("sharing", ["auto", "on", "off"])
@pytest.mark.parametrize("budget", [1, 30, 55, 10**6])
def test_every_row_is_in_one_micro_batch_of_no_more_positions_than_allowed(sharing, budget):
    samples = [*SAMPLES]
    samples[5] = samples[5]._replace(loss_positions=(), weight=0.0)  # is not computed
    samples[7] = samples[7]._replace(weight=0.0)
    batches = make_batches(samples, budget, sharing)
    assert sorted(row for batch in batches for row in batch.rows) == [
        n for n in range(12) if n not in (5, 7)
    ]
    for batch in batches:
        assert (
            batch.num_positions_with_padding <= (ROOM * budget if batch.prefix else budget)
            or len(batch.rows) == 1
        )
        assert batch.num_positions_without_padding <= batch.num_positions_with_padding
        assert (batch.num_rows, batch.num_loss_tokens) == (12, LENGTHS.sum() - 1)
        for index, row in enumerate(batch.rows):
            one, length = samples[row], int(LENGTHS[row])
            read = batch.tokens[index].tolist()[: batch.lengths[index]]
            if batch.prefix:
                place = batch.prefix.parents[index]
                read = batch.prefix.tokens[place].tolist()[: batch.prefix.lengths[place]] + read
            assert read == [*one.prompt, *one.response_ids][:-1]
            assert batch.completion_ids[index].tolist()[:length] == one.response_ids
            assert batch.mask[index].sum().item() == length
            np.testing.assert_array_equal(
                batch.sampled_logprobs[index, :length], one.logprobs.astype(np.float32)
            )


def test_prompts_are_shared_where_that_saves_enough_positions():
    def shared(prompt, completion, groups):
        rows = [[1] * prompt] * groups
        return plan_batches_and_sharing(rows, np.full(groups, completion), 10**6, "auto")[0]

    assert shared(96, 64, 8) and shared(512, 64, 2)
    assert not shared(4, 256, 8) and not shared(
        96, 64, 1
    )  # 3 of 259 positions a row; nobody to share with


def test_a_group_that_nearly_fits_is_whole_and_a_larger_one_is_split_evenly():
    rows, lengths = [[1] * 128] * 8, np.full(8, 256)  # 128 + 8 * 255 = 2,168 positions
    for budget, sizes in (
        (2048, [8]),
        (1900, [4, 4]),
        (1100, [4, 4]),
        (900, [3, 3, 2]),
        (1, [1] * 8),
    ):
        shared, cut = plan_batches_and_sharing(rows, lengths, budget, "on")
        assert shared and [len(part) for part, _ in cut] == sizes
        assert all(size == 128 + 255 * len(part) for part, size in cut)


def test_computing_layers_again_and_sharing_prompts_both_save_memory():
    model = gwen.make_random_model("random:2m")
    lora.apply(model, 8, 2.0)
    mx.eval(model.parameters())
    samples = samples_of([32] * 8, [RNG.integers(3, 320, 64).tolist()] * 8)

    def peak(sharing, checkpoint_layers):
        (batch,) = make_batches(samples, 10**6, sharing)
        gradient = nn.value_and_grad(
            model,
            lambda model: (completion_hidden_states(model, batch, checkpoint_layers) ** 2).sum(),
        )
        return measure_peak(lambda: gradient(model))

    plain = peak("off", 0)
    assert peak("off", 5) < 0.7 * plain
    assert peak("on", 0) < 0.6 * plain
    assert peak("on", 5) < 0.35 * plain
    cache, before = TreeCache(model.config.layer_kinds).with_new_level([64]), mx.get_active_memory()
    model.hidden(mx.zeros((1, 64), mx.int32), cache, checkpoint_layers=5)
    mx.eval(cache.arrays())  # of which none is a view of queries, keys and values
    assert mx.get_active_memory() - before < 1.5 * sum(array.nbytes for array in cache.arrays())
