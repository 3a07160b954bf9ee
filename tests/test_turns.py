"""Rollouts in turns against fresh forward passes of the whole conversations."""

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


class RandomEnvironment:
    """Replies to each row with random ids after each of 0 to 5 turns; some replies come late."""

    context = CONTEXT

    def __init__(self, seed, delay=0.0):
        self.seed = seed
        self.delay = delay
        self.lock = threading.Lock()
        self.turns = {}  # the number of turns that each row has ended
        self.replies = {}
        self.begun_rows = []
        self.wait_s = 0.0

    def plan(self, row):
        """The replies to a row after each of its turns, and their delays in seconds."""
        rng = random.Random(self.seed * 1000 + row)
        replies = []
        for _ in range(rng.randrange(6)):
            length = rng.randrange(1, 30)
            replies.append([rng.randrange(20, 300) for _ in range(length)])
        return replies, [rng.random() * self.delay for _ in replies]

    def begin_or_restart_decoding(self, rows):
        self.begun_rows += rows
        self.turns |= dict.fromkeys(rows, 0)

    def max_tokens_of_next_turn(self, row):
        return None

    def receive_unfinished_turn(self, row, ids, logprobs, reason):
        pass

    def end_turn(self, row, ids, logprobs):
        assert ids[-1] in EOS
        assert not set(ids[:-1]) & set(EOS)
        replies, delays = self.plan(row)
        turn = self.turns[row]
        self.turns[row] += 1
        if turn == len(replies):
            self.reply(row, "stop")
        elif delays[turn]:
            threading.Timer(delays[turn], self.reply, (row, replies[turn])).start()
        else:
            self.reply(row, replies[turn])

    def reply(self, row, reply):
        with self.lock:
            assert row not in self.replies
            self.replies[row] = reply

    def take_replies(self, wait):
        while wait and not self.replies:
            time.sleep(0.001)
        with self.lock:
            replies = self.replies
            self.replies = {}
        return replies


PROMPTS = [
    [5, 9, 2, 40, 41],
    [7, 1, 1, 8, 30, 4, 4, 2],
    [5, 9, 2, 40, 41],
    [11],
    [40, 41, 42, 43, 44, 45],
]


def roll_out(model, environment, batch_size=64, share=None, group_size=4, max_tokens=40, key=5):
    params = sampler.SamplingParams(max_tokens=max_tokens, eos_ids=EOS)
    rollout = sampler.rollout(
        model,
        PROMPTS,
        params,
        episodes=environment,
        group_size=group_size,
        key=key,
        batch_size=batch_size,
        share_prefix=share,
    )
    return params, rollout


def replay_row(row, prompt, completion_ids, environment, params):
    """
    A row by the definition, from the ids that the policy sampled.

    Returns all ids after the prompt, the positions of the sampled ids, and the finish reason.
    """
    ids = []
    positions = []
    replies, _ = environment.plan(row)
    for token in completion_ids:
        positions.append(len(ids))
        ids.append(token)
        room = CONTEXT - len(prompt) - len(ids)
        if token in EOS and not replies:
            return ids, positions, "stop"
        if len(positions) == params.max_tokens:
            return ids, positions, "length"
        if room == 0:
            return ids, positions, "context"
        if token in EOS:
            if len(replies[0]) >= room:
                return ids, positions, "context"
            ids = ids + replies[0]
            replies = replies[1:]
    raise AssertionError(f"row {row} goes on")


# A product sums at most 96 terms here. In another order of summation, the error of the sum is as if
# each weight had moved by sqrt(96) roundings of float32, in a random direction.
ROUNDINGS = 96**0.5 * 2.0**-24


def conversation_logits(model, prompts, sequences):
    """The logits of one fresh forward pass of whole conversations, (N, L, V)."""
    rows = [prompt + ids for prompt, ids in zip(prompts, sequences, strict=True)]
    width = max(len(row) for row in rows)
    return model(mx.array([row + [0] * (width - len(row)) for row in rows]))


def logprobs_at(logits, prompt, positions, tokens):
    """The log-probabilities (T,) of a conversation's sampled tokens, from its logits (L, V)."""
    logits = logits[mx.array(positions) + len(prompt) - 1].astype(mx.float32)
    return mx.take_along_axis(nn.log_softmax(logits), mx.array(tokens)[:, None], 1).squeeze(1)


def largest_rounding(model, prompts, rollout, num_draws=3):
    """
    How far another order of summation may move a sampled log-probability.

    The distance depends on the model, because a norm divides by a number that may be small.
    Therefore it is measured, with weights moved by ROUNDINGS. Over four kinds of processors and
    7,000 tokens, two orders differed by at most 0.3 times this distance.
    """
    weights = dict(tree_flatten(model.parameters()))
    rng = np.random.default_rng(0)

    def compute_all_logprobs():
        logits = conversation_logits(model, prompts, rollout.sequences)
        rows = zip(logits, prompts, rollout.places, rollout.ids, strict=True)
        return np.concatenate([np.array(logprobs_at(*row)) for row in rows])

    exact = compute_all_logprobs()
    largest = 0.0
    for _ in range(num_draws):
        signs = {
            name: mx.array(rng.choice([-1.0, 1.0], array.shape), mx.float32)
            for name, array in weights.items()
        }
        moved = [(name, array * (1 + ROUNDINGS * signs[name])) for name, array in weights.items()]
        model.update(tree_unflatten(moved))
        largest = max(largest, float(np.abs(compute_all_logprobs() - exact).max()))
    model.update(tree_unflatten(list(weights.items())))
    return largest


def may_draw(token, logits, uniforms, params, tolerance):
    """Whether logits (V,) and uniforms (4,) draw a token if the tolerance may move the borders."""
    shifts = mx.array(list(itertools.product((0.0, -tolerance, tolerance), repeat=4)))
    draws = mx.clip(uniforms + shifts, 0.0, 1.0)
    repeated_logits = mx.broadcast_to(logits, (len(draws), len(logits)))
    tokens, _, _ = sampler.choose_token(repeated_logits, draws, params)
    return token in tokens.tolist()


def check_rollout(model, environment, rollout, params, key=5, group_size=4):
    """Compares ids and log-probabilities with a fresh forward pass of whole conversations."""
    prompts = [PROMPTS[row // group_size] for row in range(len(rollout.ids))]
    logits = conversation_logits(model, prompts, rollout.sequences)
    tolerance = largest_rounding(model, prompts, rollout)
    assert 1e-6 < tolerance < 2e-3
    for row, completion_ids in enumerate(rollout.ids):
        prompt = prompts[row]
        ids, positions, reason = replay_row(row, prompt, completion_ids, environment, params)
        assert rollout.sequences[row] == ids
        assert rollout.places[row] == positions
        assert rollout.finish_reasons[row] == reason

        num_tokens = len(completion_ids)
        logprobs = np.array(rollout.logprobs)[row, :num_tokens]
        expected = np.array(logprobs_at(logits[row], prompt, positions, completion_ids))
        np.testing.assert_allclose(logprobs, expected, rtol=0, atol=tolerance)

        all_uniforms = sampler.four_uniforms_per_position(key, [row], params.max_tokens)
        uniforms = mx.array(all_uniforms[0, :num_tokens])
        sampled_logits = logits[row][mx.array(positions) + len(prompt) - 1]
        tokens, _, _ = sampler.choose_token(sampled_logits, uniforms, params)
        for index in np.flatnonzero(np.array(tokens) != completion_ids).tolist():
            # A probability and its divisor each move by at most the factor exp(tolerance).
            assert may_draw(
                completion_ids[index], sampled_logits[index], uniforms[index], params, 2 * tolerance
            )


SLOTS = [(True, 32, 20), (True, 7, 4), (False, 7, 4)]  # share, batch size, group size
WITHOUT_DELAY = [(0.0, *slots) for slots in SLOTS]
WITH_DELAY = [
    pytest.param(0.05, *slots, marks=pytest.mark.slow) for slots in (*SLOTS[1:], (True, 1, 1))
]


@pytest.mark.parametrize(
    ("delay", "share", "batch_size", "group_size"), [*WITHOUT_DELAY, *WITH_DELAY]
)
def test_rollouts_in_turns_equal_a_fresh_forward_pass_of_each_conversation(
    model, monkeypatch, delay, share, batch_size, group_size
):
    """With tools that answer at once, and with tools that take up to 50 ms."""
    monkeypatch.setattr("kv_cache.CHUNK", 16 if delay else 128)
    environment = RandomEnvironment(seed=1, delay=delay)
    params, rollout = roll_out(model, environment, batch_size, share, group_size)
    check_rollout(model, environment, rollout, params, group_size=group_size)
    if group_size > 1:
        assert set(rollout.finish_reasons) == {"stop", "length", "context"}
        assert {0, 1, 2} <= set(environment.turns.values())


class SilentEnvironment(RandomEnvironment):
    def plan(self, row):
        return [], []


@pytest.mark.parametrize("batch_size", [5, 64])
def test_rollouts_in_a_silent_environment_equal_rollouts_without_turns(model, batch_size):
    _, rollout = roll_out(model, SilentEnvironment(0), batch_size)
    params = sampler.SamplingParams(max_tokens=40, eos_ids=EOS)
    plain = sampler.rollout(model, PROMPTS, params, group_size=4, key=5)
    assert rollout.ids == plain.ids
    assert rollout.sequences == plain.ids
    assert rollout.finish_reasons == plain.finish_reasons


def test_no_position_is_computed_twice_and_idle_slots_draw_few_tokens(model, monkeypatch):
    """The ids of all replies are above 0, so an id 0 is padding."""
    prefill_counts = []
    decode_counts = []
    hidden = model.hidden

    def make_counting_step(_):
        def decode_to_hidden(tokens, cache):
            decode_counts.append(len(tokens))
            return hidden(tokens, cache)

        return decode_to_hidden

    def counting_hidden(_, tokens, *rest):
        prefill_counts.append(int((tokens > 0).sum()))
        return hidden(tokens, *rest)

    monkeypatch.setattr(sampler.gwen, "make_decode_to_hidden_step", make_counting_step)
    monkeypatch.setattr(gwen.Model, "hidden", counting_hidden)
    environment = RandomEnvironment(seed=4)
    _, rollout = roll_out(model, environment, group_size=13, batch_size=64, share=True)

    num_reply_ids = sum(len(ids) for ids in rollout.sequences) - rollout.lengths.sum()
    distinct_prompts = set(map(tuple, PROMPTS))
    num_prompt_ids = sum(len(prompt) for prompt in distinct_prompts)
    assert sum(prefill_counts) == num_reply_ids + num_prompt_ids
    assert sum(decode_counts) < 1.5 * rollout.lengths.sum()


def test_rows_that_are_sampled_again_after_memory_ran_out_begin_again(model, monkeypatch):
    environment = RandomEnvironment(seed=1)
    attempts = []
    plan_writes = SlotCache.plan_writes

    def fail_once(cache, num_new=None):
        attempts.extend([1] * bool(num_new))
        if num_new and len(attempts) == 9:
            raise RuntimeError("[malloc] Unable to allocate 1 bytes.")
        plan_writes(cache, num_new)

    monkeypatch.setattr(SlotCache, "plan_writes", fail_once)
    params, rollout = roll_out(model, environment, batch_size=8)
    assert len(set(environment.begun_rows)) == 20
    assert len(environment.begun_rows) > 20
    check_rollout(model, environment, rollout, params)


def test_the_gradient_of_turns_is_that_of_a_fresh_forward_pass_and_a_step_follows_it(checkpoints):
    model = gwen.load_model(checkpoints["qwen3.5"])
    lora.apply(model, 4, 8.0)
    rng = np.random.default_rng(0)
    # Move the adapters away from the identity.
    moved = []
    for name, array in dict(tree_flatten(model.trainable_parameters())).items():
        moved.append((name, array + mx.array(rng.normal(0, 0.02, array.shape), mx.float32)))
    model.update(tree_unflatten(moved))
    config = Config.from_flags(batch=5, groups=6, max_tokens=40, learning_rate=0.2, target_kl=0.0)
    learner = update.Learner(model, config, StepLoss(config, MemoryDependentSizes(64, 400, 0)))

    # Sample conversations. The reward is the fraction of ids below 160.
    _, rollout = roll_out(model, RandomEnvironment(seed=1), group_size=6, key=1)
    new_samples = step_sample.new_samples([{}] * 5, PROMPTS, 6)
    samples = []
    for sample, fields in zip(new_samples, generation.rollout_fields(rollout), strict=True):
        sample = sample._replace(**fields)
        samples.append(sample._replace(reward=np.mean(np.array(sample.completion_ids) < 160)))
    samples = advantages.assign_advantages(config, samples, {})
    batches = make_batches(advantages.mark_for_update(config, samples, 1), 400)
    assert len(batches) > 3
    with_advantage = [sample for sample in samples if sample.advantage]
    num_items = batches[0].num_loss_tokens

    def loss(model):
        """
        Minus the log-probability of each sampled token times its advantage.

        The minimum of this loss is the maximum of the reward.
        """
        total = mx.array(0.0)
        for sample in with_advantage:
            (logits,) = model(mx.array([sample.prompt + sample.response_ids]))
            logprobs = logprobs_at(
                logits, sample.prompt, sample.loss_positions, sample.completion_ids
            )
            total -= sample.advantage * logprobs.sum()
        return total / num_items

    # The gradient is that of a fresh forward pass, however the samples are batched.
    loss_before, gradient = nn.value_and_grad(model, loss)(model)
    expected = dict(tree_flatten(gradient))
    for differently_made_batches in (
        batches,
        make_batches(with_advantage, 100, "on"),
        make_batches(with_advantage, 100, "off"),
    ):
        step_batches = [
            batch._replace(num_loss_tokens=num_items) for batch in differently_made_batches
        ]
        gradient = dict(tree_flatten(update.compute_gradient(learner, step_batches)[0]))
        assert gradient.keys() == expected.keys()
        for name, array in expected.items():
            tolerance = 1e-3 * np.abs(array).max() + 1e-9
            np.testing.assert_allclose(gradient[name], array, rtol=0, atol=tolerance)

    # A short step changes the loss by as much as the gradient predicts.
    weights = learner.trainable
    update.run_optimizer_steps(learner, batches, 1e-4)
    predicted_change = sum(
        float((expected[name] * (learner.trainable[name] - weights[name])).sum())
        for name in weights
    )
    assert predicted_change < 0
    change = loss(model).item() - loss_before.item()
    assert change == pytest.approx(predicted_change, rel=0.05)
