"""Rollouts against mlx_lm's single-sequence generation, against the model scored again, and against themselves."""

import itertools
import math

import mlx.core as mx
import numpy as np
import pytest
from conftest import catch_message
from mlx_lm.generate import generate_step
from mlx_lm.utils import load_model as mlx_lm_load_model

import gwen
import sampler
from forecast.row_memory import cache_bytes_per_token, delta_state_bytes_per_row
from layers import softmax
from machine import gpu, memory

PROMPTS = [[5, 9, 2], [7, 1, 1, 8, 30, 4, 4, 2], [5, 9, 2], [11], [40, 41, 42, 43, 44]]
EOS = (3, 17)
SUPPORTS = [{}, {"top_p": 0.8}, {"min_p": 0.1}, {"top_p": 0.9, "top_k": 20}]
FIELDS = sampler.SamplingParams._fields


@pytest.fixture(scope="module")
def model(tiny_model):
    return gwen.load_model(tiny_model)


def near(model):
    """How far log-probabilities may be apart; the hybrid's random weights magnify roundings tenfold."""
    return 3e-5 if model.config.delta is None else 2e-4


def roll(model, prompts=PROMPTS, **settings):
    how = {"group_size": 4, "key": 11} | {
        name: value for name, value in settings.items() if name not in FIELDS
    }
    drawn = {"max_tokens": 12, "eos_ids": EOS} | {
        name: value for name, value in settings.items() if name in FIELDS
    }
    return sampler.rollout(model, prompts, sampler.SamplingParams(**drawn), **how)


def rows_of(rollout):
    """Completion ids and log-probabilities of each row, without padding."""
    return [
        (ids, logprobs[: len(ids)])
        for ids, logprobs in zip(rollout.ids, np.array(rollout.logprobs), strict=True)
    ]


def hidden_of(model, rollout):
    """Of each row the hidden states that its tokens were drawn from, by one forward pass without a cache."""
    rows = [(PROMPTS[row // 4], ids) for row, (ids, _) in enumerate(rows_of(rollout))]
    width = max(len(prompt) + len(ids) for prompt, ids in rows)
    hidden = model.hidden(
        mx.array([[*prompt, *ids, *[0] * (width - len(prompt + ids))] for prompt, ids in rows])
    )
    return [hidden[row, len(prompt) - 1 :][: len(ids)] for row, (prompt, ids) in enumerate(rows)]


def test_greedy_rollouts_equal_mlx_lm_token_for_token(model, tiny_model):
    peer, _ = mlx_lm_load_model(tiny_model)
    rows = rows_of(roll(model, group_size=1, temperature=0.0, max_tokens=20))
    for prompt, (ids, _) in zip(PROMPTS, rows, strict=True):
        expected = []
        for token, _ in generate_step(mx.array(prompt), peer, max_tokens=20):
            expected.append(int(token))
            if expected[-1] in EOS:
                break
        assert ids == expected


CASES = [(0.0, {}), *((temperature, support) for temperature in (0.7, 1.5) for support in SUPPORTS)]


@pytest.mark.parametrize(("temperature", "support"), CASES)
def test_logprobs_and_entropies_are_recorded_of_the_distributions_that_were_sampled(
    model, temperature, support
):
    """Where two tokens tie within rounding at the edge of the support, scoring may keep one that sampling did not."""
    how = {"entropy": True, "batch_size": 6, "eos_ids": tuple(range(0, 320, 10))}
    rollout, gaps = roll(model, temperature=temperature, **how, **support), []
    entropies, mask = np.array(rollout.entropy), np.array(rollout.mask)
    assert (entropies[mask == 0] == 0).all() and (mask == 0).any()
    for row, (hidden, (ids, logprobs)) in enumerate(
        zip(hidden_of(model, rollout), rows_of(rollout), strict=True)
    ):
        logits = hidden @ model.head_weight.T
        if temperature:
            logits = softmax.truncate_logits(
                logits / temperature, softmax.TruncationSettings(**support)
            )
        wide = np.array(logits, np.float64)
        wide -= np.log(
            np.exp(wide - wide.max(-1, keepdims=True)).sum(-1, keepdims=True)
        ) + wide.max(-1, keepdims=True)
        expected = -(np.exp(wide) * np.where(np.isfinite(wide), wide, 0)).sum(-1)
        np.testing.assert_allclose(
            entropies[row, : len(ids)], expected, atol=2e-4
        )  # roundings of logits: 1.01e-4
        gaps.extend(np.abs(logprobs - wide[range(len(ids)), ids]))
    assert (np.array(gaps) > 1e-4).mean() <= (0.01 if support else 0)


@pytest.fixture(scope="module")
def reference(model):
    """25 rows whose lengths vary, decoded together from copied prompts: what every other way must give."""
    settings = dict(group_size=5, max_tokens=40, eos_ids=tuple(range(0, 320, 10)))
    whole = roll(model, **settings, batch_size=25, share_prefix=False)
    assert len({len(ids) for ids, _ in rows_of(whole)}) > 5
    return settings, whole


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rows", "share", "chunk"), [(1, True, 4096), (5, True, 7), (2, False, 3), (17, False, 64)]
)
def test_completions_do_not_depend_on_how_they_were_decoded(
    model, reference, monkeypatch, rows, share, chunk
):
    """Slots are handed on and dropped, prompts are read in place or copied and prefilled in parts: no row shows it."""
    how, whole = reference
    monkeypatch.setattr(gpu, "prefill_tokens_per_pass", lambda: chunk)
    parts = roll(model, **how, batch_size=rows, share_prefix=share)
    assert whole.finish_reasons == parts.finish_reasons
    np.testing.assert_array_equal(np.array(whole.completion_ids), np.array(parts.completion_ids))
    np.testing.assert_allclose(np.array(whole.logprobs), np.array(parts.logprobs), atol=near(model))


def test_rows_that_ended_and_run_on_take_no_more_columns_than_the_longest(model, monkeypatch):
    monkeypatch.setattr("kv_cache.CHUNK", 8)
    monkeypatch.setattr("kv_cache.SlotLayer.add_columns", None)
    settings = dict(max_tokens=[3 + row % 6 for row in range(20)], eos_ids=())
    whole, parts = roll(model, **settings), roll(model, **settings, batch_size=3)
    assert [len(ids) for ids in whole.ids] == settings["max_tokens"]
    np.testing.assert_array_equal(np.array(whole.completion_ids), np.array(parts.completion_ids))


def test_a_shared_prompt_is_held_once(model):
    prompts = [[5 + i % 7 for i in range(1024)]]
    shared, copied = (
        roll(model, prompts=prompts, group_size=8, max_tokens=4, eos_ids=(), share_prefix=share)
        for share in (True, False)
    )
    prompt_bytes = cache_bytes_per_token(model.config, mx.float32) * 1024
    states = 9 * delta_state_bytes_per_row(model.config, mx.float32)
    # one prompt and 8 rows of 128 columns
    assert shared.stats.cache_bytes == pytest.approx(2 * prompt_bytes + states, rel=0.01)
    own = shared.stats.cache_bytes - states
    assert (
        own <= (copied.stats.cache_bytes - states - prompt_bytes) / 4
    )  # of the eight copies alone
    np.testing.assert_array_equal(np.array(shared.completion_ids), np.array(copied.completion_ids))


def test_the_mask_ends_with_the_end_token_and_truncated_rows_get_none(model):
    rollout = roll(model, group_size=16, max_tokens=60)
    reasons = rollout.finish_reasons
    assert {"stop", "length"} == set(reasons)
    width = rollout.completion_ids.shape[1]
    for (ids, _), reason in zip(rows_of(rollout), reasons, strict=True):
        assert (ids[-1] in EOS) == (reason == "stop")
        assert not set(ids[:-1]) & set(EOS)
        assert reason == "stop" or len(ids) == 60
    assert set(EOS) <= {ids[-1] for ids, _ in rows_of(rollout)}  # each of them is trained
    outside = np.array(rollout.mask) == 0
    assert width <= 60
    assert (np.array(rollout.completion_ids)[outside] == 0).all()
    assert (np.array(rollout.logprobs)[outside] == 0).all()


# ---- prefill in parts


def test_what_a_long_prompt_needs_beside_its_cache_does_not_grow_with_it(model, monkeypatch):
    prompt = [5 + i % 7 for i in range(2048)]

    def beside(chunk):
        monkeypatch.setattr(sampler.gpu, "prefill_tokens_per_pass", lambda: chunk)
        held = mx.get_active_memory()
        mx.reset_peak_memory()
        cache, _ = sampler.prefill(model, [prompt], 0)
        return mx.get_peak_memory() - held - sum(array.nbytes for array in cache.arrays())

    # 4 heads of 2048 x 2048 scores in float32 are 67 MB, of 128 x 2048 they are 4
    assert beside(4096) > 60e6
    assert beside(128) < 20e6


# ---- memory


def test_a_rollout_releases_all_that_it_took_and_says_how_much_that_was(model):
    mx.eval(model.parameters())
    held = mx.get_active_memory()
    rollout = roll(model, group_size=16, max_tokens=40, eos_ids=())
    kept = sum(array.nbytes for array in (rollout.completion_ids, rollout.logprobs, rollout.mask))
    column = cache_bytes_per_token(model.config, mx.float32)
    assert (
        rollout.stats.cache_bytes >= 64 * 40 * column
    )  # at first, of which 16 slots are left in the end
    assert (
        mx.get_active_memory() - held <= kept + 1e5
    )  # MLX may give an array a larger buffer that it had at hand


NO_MEMORY = "[malloc_or_wait] Unable to allocate 99999999999 bytes."


def fail_once(monkeypatch, owner, name, call, error=RuntimeError):
    """Lets the call of this number, counted from 1, fail as MLX, or numpy, does when memory runs out."""
    original, calls = getattr(owner, name), itertools.count(1)

    def failing(*args, **settings):
        if next(calls) == call:
            raise error(NO_MEMORY)
        return original(*args, **settings)

    monkeypatch.setattr(owner, name, failing)


# in the prefill, while a step is put together, and where the host waits for results, early and late
FAILURES = [("prefill", 1), ("choose_token", 20), ("write", 6)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "call"), FAILURES, ids=[f"{place}-{call}" for place, call in FAILURES]
)
def test_rows_lost_when_memory_ran_out_are_drawn_again_as_they_were(
    model, reference, monkeypatch, capsys, place, call
):
    settings, whole = reference
    decode, runs = sampler.decode, []

    def note_run(decoder):
        rows = set(decoder.prompt_of)
        runs.append((decoder.cache.num_slots, rows, set(np.flatnonzero(decoder.state.ended))))
        decode(decoder)

    monkeypatch.setattr(sampler, "decode", note_run)
    if place == "write":
        fail_once(monkeypatch, sampler.DecodeState, "append_unless_ended", call, MemoryError)
    else:
        fail_once(monkeypatch, sampler, place, call)
    rollout = roll(model, **settings, batch_size=20)
    assert "out of memory; continuing with 10 rows at once" in capsys.readouterr().err
    assert runs[-1][0] == min(10, len(runs[-1][1]))
    for _, rows, finished_before in runs:
        assert not rows & finished_before  # what was finished is not drawn again
    assert (place, call) == ("prefill", 1) or runs[0][0] == 20
    np.testing.assert_array_equal(np.array(whole.completion_ids), np.array(rollout.completion_ids))
    np.testing.assert_allclose(
        np.array(whole.logprobs), np.array(rollout.logprobs), atol=near(model)
    )


def test_the_batch_size_is_halved_for_good_and_never_below_one(model, monkeypatch):
    size = memory.BatchSize(64)
    fail_once(monkeypatch, sampler, "prefill", 1)
    for _ in range(2):
        roll(model, group_size=2, batch_size=size)
        assert size.rows == 5  # of the ten rows there were
    for expected in (2, 1, 1):
        size.halve(100)
        assert size.rows == expected


# ---- what a step costs


def test_decoding_stops_soon_after_all_rows_have_ended(model, monkeypatch):
    forwards, original = [], gwen.Model.hidden
    monkeypatch.setattr(
        gwen.Model, "hidden", lambda self, *args: forwards.append(1) or original(self, *args)
    )
    assert roll(model, max_tokens=500, eos_ids=tuple(range(320))).completion_ids.shape[1] == 1
    assert len(forwards) <= 1 + 2 * sampler.LOOK_EVERY


def test_non_finite_logits_suggest_bfloat16(model, tiny_model):
    broken = gwen.load_model(tiny_model)
    broken.norm.weight = broken.norm.weight * math.inf
    with pytest.raises(ValueError, match="GWEN_DTYPE=bfloat16"):
        roll(broken)


def test_a_prompt_without_tokens_is_refused(model):
    assert "token per prompt" in catch_message(roll, model, prompts=[[1], []])


@pytest.mark.parametrize("size", [1, 2, 7, 31, 32, 33, 1023, 1024, 1025, 40_000])
def test_the_draw_is_right_at_the_ends_of_the_unit_interval(size):
    logits = mx.random.normal((3, size), key=mx.random.key(size))
    first, _, _ = softmax.sample_token(logits, mx.zeros((3, 4)))
    last, _, _ = softmax.sample_token(logits, mx.full((3, 4), 1.0 - 2**-24))
    assert (first == 0).all().item()
    assert (last == size - 1).all().item()
    peaked = mx.where(mx.arange(size) == size // 2, 0.0, -mx.inf)[None]
    for uniform in (0.0, 0.3, 1.0 - 2**-24):
        token, logprob, entropy = softmax.sample_token(peaked, mx.full((1, 4), uniform))
        assert (token.item(), logprob.item(), entropy.item()) == (size // 2, 0.0, 0.0)


def test_randomness_belongs_to_the_key_the_row_and_the_position():
    whole = np.array(sampler.four_uniforms_per_position(5, [0, 1, 2], 20))
    np.testing.assert_array_equal(
        np.array(sampler.four_uniforms_per_position(5, [2], 8))[0], whole[2, :8]
    )
    assert len(np.unique(whole)) == whole.size
    assert not np.intersect1d(
        whole, np.array(sampler.four_uniforms_per_position(6, [0, 1, 2], 20))
    ).size
    assert (whole < 1).all() and (whole >= 0).all()


@pytest.mark.parametrize("batch_size", [6, 64])
def test_a_stop_text_ends_a_row_at_the_token_that_completes_it(model, tokenizer, batch_size):
    """The oracle decodes each prefix of the row as it is drawn without stop texts."""
    settings = dict(
        max_tokens=40, temperature=1.5, eos_ids=tuple(range(0, 320, 40)), batch_size=batch_size
    )
    free = roll(model, **settings)
    spoken = [tokenizer.decode(ids) for ids in free.ids]
    stop = sampler.StopTexts([spoken[0][5:8], spoken[7][2:4], "nobody says this"], tokenizer)
    rollout, numbers = roll(model, **settings, stop=stop), []
    for row, (ids, logprobs) in enumerate(rows_of(free)):
        prefixes = [tokenizer.decode(ids[:number]) for number in range(1, len(ids) + 1)]
        number = next(
            (n for n, said in enumerate(prefixes, 1) if any(one in said for one in stop.texts)),
            None,
        )
        numbers.append(number)
        assert rollout.ids[row] == ids[:number]
        np.testing.assert_allclose(rows_of(rollout)[row][1], logprobs[:number], atol=near(model))
        assert rollout.finish_reasons[row] == ("stop" if number else free.finish_reasons[row])
        text = sampler.decode_texts(tokenizer, rollout, settings["eos_ids"])[row]
        assert not any(one in text for one in stop.texts)
        if number is None:
            assert text == sampler.decode_texts(tokenizer, free, settings["eos_ids"])[row]
    assert None in numbers and sum(number is not None for number in numbers) >= 2


def test_the_earliest_of_the_stop_texts_cuts_and_none_leaves_the_text():
    stop = sampler.StopTexts(["</a>", "a>!"], None)
    assert [stop.trim("one</a>! two"), stop.trim("one")] == ["one", "one"]
