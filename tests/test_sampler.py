"""Rollouts against mlx_lm's single-sequence generation, against the model scored again, and against themselves."""

import math

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.utils import load_model as mlx_lm_load_model

import gwen
import sampler

PROMPTS = [[5, 9, 2], [7, 1, 1, 8, 30, 4, 4, 2], [5, 9, 2], [11], [40, 41, 42, 43, 44]]
EOS = (3, 17)


@pytest.fixture(scope="module")
def tiny_qwen3(checkpoints):
    return checkpoints["qwen3"]


@pytest.fixture(scope="module")
def model(tiny_qwen3):
    return gwen.load_model(tiny_qwen3)


def roll(model, prompts=PROMPTS, **settings):
    defaults = dict(group_size=4, max_tokens=12, temperature=1.0, eos_ids=EOS, pad_id=0, rollout_batch_size=64, key=11)
    return sampler.rollout(model, prompts, **(defaults | settings))


def rows_of(rollout):
    """Completion ids and log-probabilities of each row, without padding."""
    lengths = np.array(rollout.mask).sum(-1).astype(int)
    ids, logprobs = np.array(rollout.completion_ids), np.array(rollout.logprobs)
    return [(ids[i, :n].tolist(), logprobs[i, :n]) for i, n in enumerate(lengths)]


def test_greedy_rollouts_equal_mlx_lm_token_for_token(model, tiny_qwen3):
    peer, _ = mlx_lm_load_model(tiny_qwen3)
    rows = rows_of(roll(model, group_size=1, temperature=0.0, max_tokens=20))
    for prompt, (ids, _) in zip(PROMPTS, rows, strict=True):
        expected = []
        for token, _ in generate_step(mx.array(prompt), peer, max_tokens=20):
            expected.append(int(token))
            if expected[-1] in EOS:
                break
        assert ids == expected


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.5])
@pytest.mark.parametrize("support", [{}, {"top_p": 0.8}, {"top_k": 5}, {"min_p": 0.1}, {"top_p": 0.9, "top_k": 20}])
def test_the_recorded_logprobs_are_those_of_the_distribution_that_was_sampled(model, temperature, support):
    rollout = roll(model, temperature=temperature, **support)
    for row, (ids, logprobs) in enumerate(rows_of(rollout)):
        prompt = PROMPTS[row // 4]
        hidden = model.hidden(mx.array([prompt + ids]))[:, len(prompt) - 1 : -1]
        expected, _ = gwen.token_logprobs(
            hidden, model.head_weight, mx.array([ids]), temperature=temperature, support=support
        )
        np.testing.assert_allclose(logprobs, np.array(expected)[0], atol=1e-4)


@pytest.mark.parametrize("rollout_batch_size", [1, 3, 5, 20])
@pytest.mark.parametrize("share_prefix", [True, False])
@pytest.mark.parametrize("refill", [True, False])
def test_completions_do_not_depend_on_how_they_were_decoded(model, rollout_batch_size, share_prefix, refill):
    """Lengths vary, so slots are handed on and dropped; nothing of it shows in a row."""
    settings = dict(max_tokens=40, eos_ids=tuple(range(0, 320, 16)))
    whole = roll(model, **settings, share_prefix=False, refill=False)
    assert len({len(ids) for ids, _ in rows_of(whole)}) > 5
    parts = roll(model, **settings, rollout_batch_size=rollout_batch_size, share_prefix=share_prefix, refill=refill)
    assert whole.finish_reasons == parts.finish_reasons
    np.testing.assert_array_equal(np.array(whole.completion_ids), np.array(parts.completion_ids))
    np.testing.assert_allclose(np.array(whole.logprobs), np.array(parts.logprobs), atol=1e-5)


def test_slots_are_handed_on_so_that_fewer_steps_are_taken(model, monkeypatch):
    sizes = []
    original = sampler.choose_token
    monkeypatch.setattr(sampler, "choose_token", lambda *args: sizes.append(len(args[0])) or original(*args))
    limits = [3 if row % 4 else 40 for row in range(20)]
    work = {}
    for refill in (False, True):
        sizes.clear()
        roll(model, max_tokens=limits, eos_ids=(), rollout_batch_size=5, refill=refill)
        work[refill] = sum(sizes)
    assert work[True] < 0.75 * work[False]


def test_the_ring_of_own_columns_may_wrap_around(model, monkeypatch):
    monkeypatch.setattr("kv_cache.CHUNK", 8)
    settings = dict(max_tokens=[3 + row % 6 for row in range(20)], eos_ids=())
    whole, parts = roll(model, **settings), roll(model, **settings, rollout_batch_size=3)
    np.testing.assert_array_equal(np.array(whole.completion_ids), np.array(parts.completion_ids))


def test_a_shared_prompt_is_held_once(model):
    prompts = [[5 + i % 7 for i in range(600)]]
    shared, copied = (
        roll(model, prompts=prompts, group_size=8, max_tokens=4, eos_ids=(), share_prefix=share)
        for share in (True, False)
    )
    assert shared.stats.cache_bytes < copied.stats.cache_bytes / 3
    np.testing.assert_array_equal(np.array(shared.completion_ids), np.array(copied.completion_ids))


def test_completions_do_not_depend_on_other_prompts_of_the_batch(model):
    whole = rows_of(roll(model))
    alone = rows_of(roll(model, prompts=PROMPTS[:1]))
    assert [ids for ids, _ in whole[:4]] == [ids for ids, _ in alone]


def test_the_rows_of_equal_prompts_differ_and_another_key_draws_others(model):
    rows = [tuple(ids) for ids, _ in rows_of(roll(model))]
    assert len(set(rows[:4] + rows[8:12])) > 4  # prompts 0 and 2 are the same
    assert rows != [tuple(ids) for ids, _ in rows_of(roll(model, key=12))]
    assert rows == [tuple(ids) for ids, _ in rows_of(roll(model))]


def test_the_mask_ends_with_the_end_token_and_truncated_rows_get_none(model):
    rollout = roll(model, group_size=32, max_tokens=30)
    reasons = rollout.finish_reasons
    assert {"stop", "length"} == set(reasons)
    width = rollout.completion_ids.shape[1]
    for (ids, _), reason in zip(rows_of(rollout), reasons, strict=True):
        assert (ids[-1] in EOS) == (reason == "stop")
        assert not set(ids[:-1]) & set(EOS)
        assert reason == "stop" or len(ids) == 30
    outside = np.array(rollout.mask) == 0
    assert width <= 30
    assert (np.array(rollout.completion_ids)[outside] == 0).all()
    assert (np.array(rollout.logprobs)[outside] == 0).all()
    assert rollout.stats.num_tokens == np.array(rollout.mask).sum()


def test_every_end_token_ends_a_row(model):
    ended_with = {ids[-1] for ids, _ in rows_of(roll(model, group_size=64, max_tokens=60))}
    assert set(EOS) <= ended_with


def test_each_row_may_have_its_own_limit(model):
    limits = [1 + row % 7 for row in range(20)]
    rollout = roll(model, max_tokens=limits, eos_ids=())
    assert np.array(rollout.mask).sum(-1).astype(int).tolist() == limits
    free = rows_of(roll(model, max_tokens=7, eos_ids=()))
    assert [ids for ids, _ in rows_of(rollout)] == [ids[:limit] for (ids, _), limit in zip(free, limits, strict=True)]


def test_each_distinct_prompt_is_prefilled_once(model, monkeypatch):
    seen = []
    original = sampler.prefill
    monkeypatch.setattr(sampler, "prefill", lambda m, prompts, pad: seen.extend(prompts) or original(m, prompts, pad))
    rollout = roll(model, rollout_batch_size=3)
    assert sorted(seen) == sorted([list(p) for p in {tuple(p) for p in PROMPTS}])
    assert rollout.stats.num_prompt_tokens == sum(map(len, seen))


def test_one_token_decode_of_equal_lengths_uses_no_mask(model, monkeypatch):
    layouts = []
    original = gwen.tree_attention
    monkeypatch.setattr(gwen, "tree_attention", lambda *args: layouts.append(args[2]) or original(*args))
    roll(model, prompts=[[1, 2, 4], [5, 6, 7]], max_tokens=3)
    assert layouts and all(field is None for layout in layouts for group in layout for field in group)


def test_decoding_stops_soon_after_all_rows_have_ended(model, monkeypatch):
    forwards = []
    original = gwen.Model.hidden
    monkeypatch.setattr(gwen.Model, "hidden", lambda self, *args: forwards.append(1) or original(self, *args))
    rollout = roll(model, max_tokens=500, eos_ids=tuple(range(320)))
    assert rollout.completion_ids.shape[1] == 1
    assert len(forwards) <= 1 + 2 * sampler.LOOK_EVERY


def test_non_finite_logits_suggest_bfloat16(model, tiny_qwen3):
    broken = gwen.load_model(tiny_qwen3)
    broken.norm.weight = broken.norm.weight * math.inf
    with pytest.raises(ValueError, match="GWEN_DTYPE=bfloat16"):
        roll(broken)


def test_a_prompt_without_tokens_is_refused(model):
    with pytest.raises(ValueError, match="no tokens"):
        roll(model, prompts=[[1], []])


def test_the_draw_follows_the_distribution():
    """Chi-square over 20,000 draws from one row of 1,500 logits in three tiles; 99.9% quantiles by Wilson-Hilferty."""
    rng = np.random.default_rng(0)
    logits = rng.normal(0, 2, 1500).astype(np.float32)
    logits[rng.integers(0, 1500, 300)] = -np.inf
    num_draws = 20_000
    uniform = mx.array(rng.random(num_draws, dtype=np.float32))
    tokens, logprobs = sampler.sample_token(mx.broadcast_to(mx.array(logits), (num_draws, 1500)), uniform)
    probs = np.exp(logits.astype(np.float64) - logits.max())
    probs /= probs.sum()
    counts = np.bincount(np.array(tokens), minlength=1500)
    assert (counts[probs == 0] == 0).all()
    np.testing.assert_allclose(np.array(logprobs), np.log(probs[np.array(tokens)]), atol=1e-5)
    common = probs * num_draws >= 5
    observed = np.append(counts[common], counts[~common].sum())
    expected = np.append(probs[common], probs[~common].sum()) * num_draws
    freedom = len(observed) - 1
    limit = freedom * (1 - 2 / (9 * freedom) + 3.09 * math.sqrt(2 / (9 * freedom))) ** 3
    assert ((observed - expected) ** 2 / expected).sum() < limit


@pytest.mark.parametrize("size", [1, 2, 7, 511, 512, 513, 2000])
def test_the_draw_is_right_at_the_ends_of_the_unit_interval(size):
    logits = mx.random.normal((3, size), key=mx.random.key(size))
    first, _ = sampler.sample_token(logits, mx.zeros((3,)))
    last, _ = sampler.sample_token(logits, mx.full((3,), 1.0 - 2**-24))
    assert (first == 0).all().item()
    assert (last >= size - max(1, size // 10)).all().item()
    peaked = mx.where(mx.arange(size) == size // 2, 0.0, -mx.inf)[None]
    for uniform in (0.0, 0.3, 1.0 - 2**-24):
        token, logprob = sampler.sample_token(peaked, mx.array([uniform]))
        assert (token.item(), logprob.item()) == (size // 2, 0.0)


def test_a_huge_vocabulary_keeps_float32_logprobs_exact():
    logits = mx.random.normal((2, 151_936), key=mx.random.key(0)) * 3
    token, logprob = sampler.sample_token(logits, mx.array([0.25, 0.9]))
    wide = np.array(logits, dtype=np.float64)
    total = np.log(np.exp(wide - wide.max(1, keepdims=True)).sum(1)) + wide.max(1)
    np.testing.assert_allclose(np.array(logprob), wide[[0, 1], np.array(token)] - total, atol=2e-5)
    cumulative = np.cumsum(np.exp(wide - total[:, None]), axis=1)
    until, share = cumulative[[0, 1], np.array(token)], np.exp(wide - total[:, None])[[0, 1], np.array(token)]
    assert (until - share - 1e-5 <= [0.25, 0.9]).all() and (until + 1e-5 >= [0.25, 0.9]).all()


def test_randomness_belongs_to_the_key_the_row_and_the_position():
    whole = np.array(sampler.uniforms(5, [0, 1, 2], 20))
    np.testing.assert_array_equal(np.array(sampler.uniforms(5, [2], 8))[0], whole[2, :8])
    assert len(np.unique(whole)) == whole.size
    assert not np.intersect1d(whole, np.array(sampler.uniforms(6, [0, 1, 2], 20))).size
    assert (whole < 1).all() and (whole >= 0).all()
