"""Rollouts in turns against the whole conversation, which is computed again for each of its tokens."""

import itertools
import random
import threading
import time

import mlx.core as mx
import numpy as np
import pytest

import gwen
import sampler
from layers.turns import TurnCache

EOS = tuple(range(0, 320, 16))
CONTEXT = 60


@pytest.fixture(scope="module", params=["qwen3", "qwen3.5"])
def model(checkpoints, request):
    return gwen.load_model(checkpoints[request.param])


class World:
    """Tells each row random ids after each turn, for 0 to 5 turns, some of it late."""

    def __init__(self, seed, delay=0.0):
        self.seed, self.delay, self.lock = seed, delay, threading.Lock()
        self.turns, self.answers, self.begun, self.wait_s = {}, {}, [], 0.0

    def plan(self, row):
        """What the row is told after each of its turns."""
        rng = random.Random(self.seed * 1000 + row)
        told = [[rng.randrange(20, 300) for _ in range(rng.randrange(1, 30))] for _ in range(rng.randrange(6))]
        return told, [rng.random() * self.delay for _ in told]

    def begin(self, rows):
        self.begun += rows
        self.turns |= dict.fromkeys(rows, 0)

    def hear(self, row, ids):
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

    def replies(self, wait):
        while wait and not self.answers:
            time.sleep(0.001)
        with self.lock:
            found, self.answers = self.answers, {}
        return found


def whole(model, prompt, row, world, params, key):
    """One row by the definition: ids after the prompt, places of its own, their log-probabilities, why it ended."""
    told, _ = world.plan(row)
    uniforms = sampler.uniforms(key, [row], params.max_tokens)
    ids, places, logprobs = [], [], []
    for turn in itertools.count():
        while True:
            if len(places) == params.max_tokens:
                return ids, places, logprobs, "length"
            if len(prompt) + len(ids) == CONTEXT:
                return ids, places, logprobs, "context"
            logits = model(mx.array([prompt + ids]))[:, -1]
            token, logprob, _ = sampler.choose_token(logits, mx.array(uniforms[:, len(places)]), params)
            places.append(len(ids))
            ids.append(token.item())
            logprobs.append(logprob.item())
            if ids[-1] in EOS:
                break
        if turn == len(told):
            return ids, places, logprobs, "stop"
        if len(places) == params.max_tokens:
            return ids, places, logprobs, "length"
        if len(prompt) + len(ids) + len(told[turn]) >= CONTEXT:
            return ids, places, logprobs, "context"
        ids += told[turn]


PROMPTS = [[5, 9, 2, 40, 41], [7, 1, 1, 8, 30, 4, 4, 2], [5, 9, 2, 40, 41], [11], [40, 41, 42, 43, 44, 45]]


def roll(model, world, batch_size=64, share=None, group_size=4, max_tokens=40, key=5, context=CONTEXT):
    params = sampler.SamplingParams(max_tokens=max_tokens, eos_ids=EOS)
    how = {"group_size": group_size, "key": key, "batch_size": batch_size, "share_prefix": share}
    return params, sampler.rollout(model, PROMPTS, params, talk=world, context=context, **how)


def check(model, world, rollout, params, key=5, group_size=4):
    for row, own in enumerate(rollout.ids):
        ids, places, logprobs, reason = whole(model, PROMPTS[row // group_size], row, world, params, key)
        assert rollout.sequences[row] == ids
        assert rollout.places[row] == places and own == [ids[place] for place in places]
        np.testing.assert_allclose(np.array(rollout.logprobs)[row, : len(own)], logprobs, rtol=1e-4, atol=1e-4)
        assert rollout.finish_reasons[row] == reason


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("batch_size", [7, 64])
def test_rows_in_turns_draw_what_the_whole_conversation_says_for_each_token(model, share, batch_size):
    world = World(seed=1)
    params, rollout = roll(model, world, batch_size, share)
    check(model, world, rollout, params)
    assert set(rollout.finish_reasons) == {"stop", "length", "context"}
    assert {0, 1, 2} <= set(world.turns.values())


@pytest.mark.slow
@pytest.mark.parametrize(("share", "batch_size"), [(True, 7), (False, 7), (True, 1)])
def test_conversations_with_tools_of_up_to_50_ms_draw_the_same(model, monkeypatch, share, batch_size):
    monkeypatch.setattr("kv_cache.CHUNK", 16)
    world = World(2, delay=0.05)
    params, rollout = roll(model, world, batch_size, share, key=2)
    check(model, world, rollout, params, key=2)


class Silent(World):
    def plan(self, row):
        return [], []


@pytest.mark.parametrize("batch_size", [5, 64])
def test_rows_that_are_told_nothing_draw_what_rows_without_turns_draw(model, batch_size):
    _, rollout = roll(model, Silent(0), batch_size)
    params = sampler.SamplingParams(max_tokens=40, eos_ids=EOS)
    plain = sampler.rollout(model, PROMPTS, params, group_size=4, key=5)
    assert rollout.ids == plain.ids == rollout.sequences and rollout.finish_reasons == plain.finish_reasons


@pytest.mark.parametrize("wait", [0.0, 0.3])
def test_no_position_is_computed_twice_and_few_slots_draw_what_nobody_reads(model, monkeypatch, wait):
    """Every id of a told text is above 0, and 0 is their padding."""
    prefilled, drawn = [], []
    hidden = model.hidden
    monkeypatch.setattr(
        sampler.gwen, "decode_step", lambda _: lambda tokens, cache: drawn.append(len(tokens)) or hidden(tokens, cache)
    )
    monkeypatch.setattr(
        gwen.Model,
        "hidden",
        lambda self, tokens, *rest: prefilled.append(int((tokens > 0).sum())) or hidden(tokens, *rest),
    )
    world = World(seed=4)
    world.plan = lambda row, plan=world.plan: (plan(row)[0], [wait] * len(plan(row)[0]))
    _, rollout = roll(model, world, group_size=13, batch_size=64, share=True)
    told = sum(len(ids) for ids in rollout.sequences) - rollout.lengths.sum()
    assert sum(prefilled) == told + sum(map(len, set(map(tuple, PROMPTS))))
    assert sum(drawn) < 1.5 * rollout.lengths.sum()


def test_rows_that_are_drawn_again_after_memory_ran_out_begin_anew(model, monkeypatch):
    world, attempts = World(seed=1), []
    put = TurnCache.put_state

    def fail_once(*args):
        attempts.append(1)
        if len(attempts) == 9:
            raise RuntimeError("[malloc] Unable to allocate 1 bytes.")
        put(*args)

    monkeypatch.setattr(TurnCache, "put_state", fail_once)
    params, rollout = roll(model, world, batch_size=8)
    assert len(world.begun) > len(set(world.begun)) == 20
    check(model, world, rollout, params)
