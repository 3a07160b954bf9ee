"""Rollouts in turns against the whole conversation, which is computed again for each of its tokens."""

import itertools
import random
import threading
import time

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_unflatten

import gwen
import lora
import sampler
import update
from config import Config, MemoryDependentSizes
from kv_cache import SlotCache
from step import advantages, generation
from step import sample as step_sample
from step.batch import make_batches
from step.loss import StepLoss

EOS = tuple(range(0, 320, 16))
CONTEXT = 60


@pytest.fixture(scope="module", params=["qwen3", "qwen3.5"])
def model(checkpoints, request):
    return gwen.load_model(checkpoints[request.param])


class World:
    """Tells each row random ids after each turn, for 0 to 5 turns, some of it late."""

    context = CONTEXT

    def __init__(self, seed, delay=0.0):
        self.seed, self.delay, self.lock = seed, delay, threading.Lock()
        self.turns, self.answers, self.begun, self.wait_s = {}, {}, [], 0.0

    def plan(self, row):
        """What the row is told after each of its turns."""
        rng = random.Random(self.seed * 1000 + row)
        told = [
            [rng.randrange(20, 300) for _ in range(rng.randrange(1, 30))]
            for _ in range(rng.randrange(6))
        ]
        return told, [rng.random() * self.delay for _ in told]

    def begin(self, rows):
        self.begun += rows
        self.turns |= dict.fromkeys(rows, 0)

    def turn_limit(self, row):
        return None

    def end_row(self, row, ids, logprobs, reason):
        pass

    def end_turn(self, row, ids, logprobs):
        assert ids[-1] in EOS and not set(ids[:-1]) & set(EOS)
        told, delays = self.plan(row)
        turn = self.turns[row]
        self.turns[row] += 1
        if turn == len(told):
            self.answer(row, "stop")
        elif delays[turn]:
            threading.Timer(delays[turn], self.answer, (row, told[turn])).start()
        else:
            self.answer(row, told[turn])

    def answer(self, row, reply):
        with self.lock:
            assert row not in self.answers
            self.answers[row] = reply

    def take_replies(self, wait):
        while wait and not self.answers:
            time.sleep(0.001)
        with self.lock:
            found, self.answers = self.answers, {}
        return found


PROMPTS = [
    [5, 9, 2, 40, 41],
    [7, 1, 1, 8, 30, 4, 4, 2],
    [5, 9, 2, 40, 41],
    [11],
    [40, 41, 42, 43, 44, 45],
]


def roll(model, world, batch_size=64, share=None, group_size=4, max_tokens=40, key=5):
    params = sampler.SamplingParams(max_tokens=max_tokens, eos_ids=EOS)
    how = {"group_size": group_size, "key": key, "batch_size": batch_size, "share_prefix": share}
    return params, sampler.rollout(model, PROMPTS, params, episodes=world, **how)


def replayed(row, prompt, own, world, params):
    """A row by the definition, of its own ids: all ids after the prompt, the places of its own, why it ended."""
    ids, places, told = [], [], world.plan(row)[0]
    for token in own:
        places.append(len(ids))
        ids.append(token)
        ends, room = len(places) == params.max_tokens, CONTEXT - len(prompt) - len(ids)
        if token in EOS and not told:
            return ids, places, "stop"
        if ends or room == 0:
            return ids, places, "length" if ends else "context"
        if token in EOS:
            if len(told[0]) >= room:
                return ids, places, "context"
            ids, told = ids + told[0], told[1:]
    raise AssertionError(f"row {row} goes on")


# A product sums at most 96 terms here. Summed in another order, it errs as if each weight had moved by
# sqrt(96) roundings of float32, in a random direction.
ROUNDINGS = 96**0.5 * 2.0**-24


def whole_logits(model, prompts, sequences):
    """The logits of one fresh forward pass of whole conversations, (N, L, V)."""
    rows = [prompt + ids for prompt, ids in zip(prompts, sequences, strict=True)]
    width = max(len(row) for row in rows)
    return model(mx.array([row + [0] * (width - len(row)) for row in rows]))


def logprobs_at(logits, prompt, places, tokens):
    """The log-probabilities of a conversation's sampled tokens, (T,), from its logits, (L, V)."""
    logits = logits[mx.array(places) + len(prompt) - 1].astype(mx.float32)
    return mx.take_along_axis(nn.log_softmax(logits), mx.array(tokens)[:, None], 1).squeeze(1)


def largest_rounding(model, prompts, rollout, num_draws=3):
    """
    How far another order of summation may move a sampled log-probability.

    It depends on the model: a norm divides by what may be small. So it is measured, with weights moved by ROUNDINGS.
    Over four kinds of processors and 7,000 tokens, two orders differed by at most 0.3 times this.
    """
    weights = dict(tree_flatten(model.parameters()))
    rng = np.random.default_rng(0)

    def all_logprobs():
        logits = whole_logits(model, prompts, rollout.sequences)
        rows = zip(logits, prompts, rollout.places, rollout.ids, strict=True)
        return np.concatenate([np.array(logprobs_at(*row)) for row in rows])

    exact = all_logprobs()
    largest = 0.0
    for _ in range(num_draws):
        signs = {
            name: mx.array(rng.choice([-1.0, 1.0], array.shape), mx.float32)
            for name, array in weights.items()
        }
        moved = [(name, array * (1 + ROUNDINGS * signs[name])) for name, array in weights.items()]
        model.update(tree_unflatten(moved))
        largest = max(largest, float(np.abs(all_logprobs() - exact).max()))
    model.update(tree_unflatten(list(weights.items())))
    return largest


def may_draw(token, logits, uniforms, params, tolerance):
    """Whether a token is drawn from logits (V,) with four uniforms, or would be if a border moved by the tolerance."""
    shifts = mx.array(list(itertools.product((0.0, -tolerance, tolerance), repeat=4)))
    draws = mx.clip(uniforms + shifts, 0.0, 1.0)
    tokens, _, _ = sampler.choose_token(
        mx.broadcast_to(logits, (len(draws), len(logits))), draws, params
    )
    return token in tokens.tolist()


def check(model, world, rollout, params, key=5, group_size=4):
    """Ids and log-probabilities are those of one fresh forward pass of the whole conversations."""
    prompts = [PROMPTS[row // group_size] for row in range(len(rollout.ids))]
    logits = whole_logits(model, prompts, rollout.sequences)
    tolerance = largest_rounding(model, prompts, rollout)
    assert 1e-6 < tolerance < 2e-3
    for row, own in enumerate(rollout.ids):
        prompt = prompts[row]
        ids, places, reason = replayed(row, prompt, own, world, params)
        assert (rollout.sequences[row], rollout.places[row], rollout.finish_reasons[row]) == (
            ids,
            places,
            reason,
        )

        expected = np.array(logprobs_at(logits[row], prompt, places, own))
        np.testing.assert_allclose(
            np.array(rollout.logprobs)[row, : len(own)], expected, rtol=0, atol=tolerance
        )

        uniforms = mx.array(
            sampler.four_uniforms_per_position(key, [row], params.max_tokens)[0, : len(own)]
        )
        drawn_from = logits[row][mx.array(places) + len(prompt) - 1]
        tokens, _, _ = sampler.choose_token(drawn_from, uniforms, params)
        for place in np.flatnonzero(np.array(tokens) != own).tolist():
            # a probability moves by at most the factor exp(tolerance), and so does the sum it is divided by
            assert may_draw(own[place], drawn_from[place], uniforms[place], params, 2 * tolerance)


SLOTS = [(True, 32, 20), (True, 7, 4), (False, 7, 4)]  # share, batch size, group size
LATE = [pytest.param(0.05, *one, marks=pytest.mark.slow) for one in (*SLOTS[1:], (True, 1, 1))]


@pytest.mark.parametrize(
    ("delay", "share", "batch_size", "group_size"), [*((0.0, *one) for one in SLOTS), *LATE]
)
def test_conversations_draw_what_the_whole_of_each_says_for_each_token(
    model, monkeypatch, delay, share, batch_size, group_size
):
    """With tools that answer at once, and ones that take up to 50 ms."""
    monkeypatch.setattr("kv_cache.CHUNK", 16 if delay else 128)
    world = World(seed=1, delay=delay)
    params, rollout = roll(model, world, batch_size, share, group_size)
    check(model, world, rollout, params, group_size=group_size)
    if group_size > 1:
        assert set(rollout.finish_reasons) == {"stop", "length", "context"} and {0, 1, 2} <= set(
            world.turns.values()
        )


class Silent(World):
    def plan(self, row):
        return [], []


@pytest.mark.parametrize("batch_size", [5, 64])
def test_rows_that_are_told_nothing_draw_what_rows_without_turns_draw(model, batch_size):
    _, rollout = roll(model, Silent(0), batch_size)
    params = sampler.SamplingParams(max_tokens=40, eos_ids=EOS)
    plain = sampler.rollout(model, PROMPTS, params, group_size=4, key=5)
    assert (
        rollout.ids == plain.ids == rollout.sequences
        and rollout.finish_reasons == plain.finish_reasons
    )


def test_no_position_is_computed_twice_and_few_slots_draw_what_nobody_reads(model, monkeypatch):
    """Every id of a told text is above 0, and 0 is their padding."""
    prefilled, drawn = [], []
    hidden = model.hidden
    monkeypatch.setattr(
        sampler.gwen,
        "make_decode_to_hidden_step",
        lambda _: lambda tokens, cache: drawn.append(len(tokens)) or hidden(tokens, cache),
    )

    def noted(_, tokens, *rest):
        return prefilled.append(int((tokens > 0).sum())) or hidden(tokens, *rest)

    monkeypatch.setattr(gwen.Model, "hidden", noted)
    _, rollout = roll(model, World(seed=4), group_size=13, batch_size=64, share=True)
    told = sum(len(ids) for ids in rollout.sequences) - rollout.lengths.sum()
    assert sum(prefilled) == told + sum(map(len, set(map(tuple, PROMPTS))))
    assert sum(drawn) < 1.5 * rollout.lengths.sum()


def test_rows_that_are_drawn_again_after_memory_ran_out_begin_anew(model, monkeypatch):
    world, attempts = World(seed=1), []
    aim = SlotCache.plan_writes

    def fail_once(cache, num_new=None):
        attempts.extend([1] * bool(num_new))
        if num_new and len(attempts) == 9:
            raise RuntimeError("[malloc] Unable to allocate 1 bytes.")
        aim(cache, num_new)

    monkeypatch.setattr(SlotCache, "plan_writes", fail_once)
    params, rollout = roll(model, world, batch_size=8)
    assert len(world.begun) > len(set(world.begun)) == 20
    check(model, world, rollout, params)


def test_the_gradient_of_turns_is_a_fresh_forward_pass_s_and_a_step_does_what_it_says(checkpoints):
    model = gwen.load_model(checkpoints["qwen3.5"])
    lora.apply(model, 4, 8.0)
    rng = np.random.default_rng(0)
    start = dict(tree_flatten(model.trainable_parameters()))
    moved = [
        (name, a + mx.array(rng.normal(0, 0.02, a.shape), mx.float32)) for name, a in start.items()
    ]
    model.update(tree_unflatten(moved))  # adapters are no longer the identity
    config = Config.from_flags(batch=5, groups=6, max_tokens=40, learning_rate=0.2, target_kl=0.0)
    learner = update.Learner(model, config, StepLoss(config, MemoryDependentSizes(64, 400, 0)))

    _, rollout = roll(model, World(seed=1), group_size=6, key=1)
    fields = generation.rollout_fields(rollout)
    asked = step_sample.new_samples([{}] * 5, PROMPTS, 6)
    samples = [sample._replace(**row) for sample, row in zip(asked, fields, strict=True)]
    low_ids = [
        sample._replace(reward=np.mean(np.array(sample.completion_ids) < 160)) for sample in samples
    ]
    samples = advantages.assign_advantages(config, low_ids, {})
    batches = make_batches(advantages.mark_for_update(config, samples, 1), 400)
    assert len(batches) > 3
    with_advantage = [sample for sample in samples if sample.advantage]
    num_items = batches[0].num_loss_tokens

    def loss(model):
        """Minus the log-probability of each sampled token times its advantage; its minimum is the reward's maximum."""
        total = mx.array(0.0)
        for sample in with_advantage:
            (logits,) = model(mx.array([sample.prompt + sample.response_ids]))
            total -= (
                sample.advantage
                * logprobs_at(
                    logits, sample.prompt, sample.loss_positions, sample.completion_ids
                ).sum()
            )
        return total / num_items

    before, gradient = nn.value_and_grad(model, loss)(model)
    expected = dict(tree_flatten(gradient))
    for batches_of_one_kind in (
        batches,
        make_batches(with_advantage, 100, "on"),
        make_batches(with_advantage, 100, "off"),
    ):
        whole = [batch._replace(num_loss_tokens=num_items) for batch in batches_of_one_kind]
        ours = dict(tree_flatten(update.compute_gradient(learner, whole)[0]))
        assert ours.keys() == expected.keys()
        for name, array in expected.items():
            np.testing.assert_allclose(
                ours[name], array, rtol=0, atol=1e-3 * np.abs(array).max() + 1e-9
            )

    # what earned more becomes likelier, by as much as a short step along its gradient promises
    weights = learner.trainable
    update.run_optimizer_steps(learner, batches, 1e-4)
    promised = sum(
        float((expected[name] * (learner.trainable[name] - weights[name])).sum())
        for name in weights
    )
    gained = loss(model).item() - before.item()
    assert promised < 0
    assert gained == pytest.approx(promised, rel=0.05)
