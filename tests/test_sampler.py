"""Rollouts against generation by mlx_lm, against a forward pass, and against other rollouts."""

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


def logprob_tolerance(model):
    """The random weights of the hybrid model magnify rounding errors tenfold."""
    return 3e-5 if model.config.delta is None else 2e-4


def roll_out(model, prompts=PROMPTS, **settings):
    options = {"group_size": 4, "key": 11}
    params = {"max_tokens": 12, "eos_ids": EOS}
    for name, value in settings.items():
        if name in FIELDS:
            params[name] = value
        else:
            options[name] = value
    return sampler.rollout(model, prompts, sampler.SamplingParams(**params), **options)


def rows_without_padding(rollout):
    """Completion ids and log-probabilities of each row."""
    return [
        (ids, logprobs[: len(ids)])
        for ids, logprobs in zip(rollout.ids, np.array(rollout.logprobs), strict=True)
    ]


def compute_hidden_states(model, rollout):
    """
    Returns, for each row, the hidden states from which the tokens of the row were sampled.

    One forward pass without a cache computes them.
    """
    num_rows = len(rollout.ids)
    prompts = [PROMPTS[row // 4] for row in range(num_rows)]
    sequences = [prompt + list(ids) for prompt, ids in zip(prompts, rollout.ids, strict=True)]
    width = max(map(len, sequences))
    padded = [[*sequence, *[0] * (width - len(sequence))] for sequence in sequences]
    hidden = model.hidden(mx.array(padded))
    return [hidden[row, len(prompts[row]) - 1 : len(sequences[row]) - 1] for row in range(num_rows)]


def test_greedy_rollouts_equal_mlx_lm_token_for_token(model, tiny_model):
    mlx_lm_model, _ = mlx_lm_load_model(tiny_model)
    rows = rows_without_padding(roll_out(model, group_size=1, temperature=0.0, max_tokens=20))
    for prompt, (ids, _) in zip(PROMPTS, rows, strict=True):
        expected = []
        for token, _ in generate_step(mx.array(prompt), mlx_lm_model, max_tokens=20):
            expected.append(int(token))
            if expected[-1] in EOS:
                break
        assert ids == expected


def log_softmax(logits):
    """float64 log-probabilities, (..., V)."""
    logits = np.array(logits, np.float64)
    largest = logits.max(-1, keepdims=True)
    return logits - largest - np.log(np.exp(logits - largest).sum(-1, keepdims=True))


CASES = [(0.0, {}), *itertools.product((0.7, 1.5), SUPPORTS)]


@pytest.mark.parametrize(("temperature", "support"), CASES)
def test_the_rollout_records_logprobs_and_entropies_of_the_sampled_distributions(
    model, temperature, support
):
    """
    The test tolerates a few differences of log-probabilities if the support is restricted.

    Two tokens at the edge of the support may be equal up to rounding. Then scoring may keep another
    token than sampling.
    """
    options = {"entropy": True, "batch_size": 6, "eos_ids": tuple(range(0, 320, 10))}
    rollout = roll_out(model, temperature=temperature, **options, **support)
    entropies = np.array(rollout.entropy)
    mask = np.array(rollout.mask)
    assert (entropies[mask == 0] == 0).all()
    assert (mask == 0).any()

    differences = []
    hidden_states = compute_hidden_states(model, rollout)
    for row, (ids, logprobs) in enumerate(rows_without_padding(rollout)):
        logits = hidden_states[row] @ model.head_weight.T
        if temperature:
            truncation = softmax.TruncationSettings(**support)
            logits = softmax.truncate_logits(logits / temperature, truncation)
        expected = log_softmax(logits)
        finite = np.where(np.isfinite(expected), expected, 0)
        expected_entropies = -(np.exp(expected) * finite).sum(-1)
        # rounding of the logits causes errors of up to 1.01e-4
        np.testing.assert_allclose(entropies[row, : len(ids)], expected_entropies, atol=2e-4)
        differences.extend(np.abs(logprobs - expected[range(len(ids)), ids]))
    assert (np.array(differences) > 1e-4).mean() <= (0.01 if support else 0)


def assert_same_ids(rollout, expected):
    np.testing.assert_array_equal(
        np.array(rollout.completion_ids), np.array(expected.completion_ids)
    )


def assert_same_logprobs(rollout, expected, model):
    np.testing.assert_allclose(
        np.array(expected.logprobs), np.array(rollout.logprobs), atol=logprob_tolerance(model)
    )


@pytest.fixture(scope="module")
def reference(model):
    """Settings, and a rollout of 25 rows of varying lengths, decoded from copied prompts."""
    settings = dict(group_size=5, max_tokens=40, eos_ids=tuple(range(0, 320, 10)))
    rollout = roll_out(model, **settings, batch_size=25, share_prefix=False)
    assert len({len(ids) for ids in rollout.ids}) > 5
    return settings, rollout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_slots", "share_prefix", "chunk"),
    [(1, True, 4096), (5, True, 7), (2, False, 3), (17, False, 64)],
)
def test_completions_do_not_depend_on_slots_shared_prompts_or_prefill_chunks(
    model, reference, monkeypatch, num_slots, share_prefix, chunk
):
    settings, expected = reference
    monkeypatch.setattr(gpu, "prefill_tokens_per_pass", lambda: chunk)
    rollout = roll_out(model, **settings, batch_size=num_slots, share_prefix=share_prefix)
    assert rollout.finish_reasons == expected.finish_reasons
    assert_same_ids(rollout, expected)
    assert_same_logprobs(rollout, expected, model)


def test_slots_that_several_rows_use_need_no_more_columns_than_the_longest_row(model, monkeypatch):
    monkeypatch.setattr("kv_cache.CHUNK", 8)
    monkeypatch.setattr("kv_cache.SlotLayer.add_columns", None)
    settings = dict(max_tokens=[3 + row % 6 for row in range(20)], eos_ids=())
    expected = roll_out(model, **settings)
    rollout = roll_out(model, **settings, batch_size=3)
    assert [len(ids) for ids in expected.ids] == settings["max_tokens"]
    assert_same_ids(rollout, expected)


def test_the_cache_stores_a_shared_prompt_once(model):
    settings = dict(
        prompts=[[5 + i % 7 for i in range(1024)]], group_size=8, max_tokens=4, eos_ids=()
    )
    shared = roll_out(model, **settings, share_prefix=True)
    copied = roll_out(model, **settings, share_prefix=False)
    prompt_bytes = cache_bytes_per_token(model.config, mx.float32) * 1024
    state_bytes = 9 * delta_state_bytes_per_row(model.config, mx.float32)
    # one prompt and 8 rows of 128 columns
    assert shared.stats.cache_bytes == pytest.approx(2 * prompt_bytes + state_bytes, rel=0.01)
    shared_bytes = shared.stats.cache_bytes - state_bytes
    bytes_of_eight_copies = copied.stats.cache_bytes - state_bytes - prompt_bytes
    assert shared_bytes <= bytes_of_eight_copies / 4
    assert_same_ids(shared, copied)


def test_the_mask_ends_with_the_end_token_and_truncated_rows_have_no_end_token(model):
    rollout = roll_out(model, group_size=16, max_tokens=60)
    reasons = rollout.finish_reasons
    assert {"stop", "length"} == set(reasons)
    width = rollout.completion_ids.shape[1]
    for (ids, _), reason in zip(rows_without_padding(rollout), reasons, strict=True):
        assert (ids[-1] in EOS) == (reason == "stop")
        assert not set(ids[:-1]) & set(EOS)
        assert reason == "stop" or len(ids) == 60
    last_ids = {ids[-1] for ids in rollout.ids}
    assert set(EOS) <= last_ids  # training covers every end token

    outside = np.array(rollout.mask) == 0
    assert width <= 60
    assert (np.array(rollout.completion_ids)[outside] == 0).all()
    assert (np.array(rollout.logprobs)[outside] == 0).all()


# ---- prefill in parts


def test_prefill_in_chunks_needs_little_memory_beyond_the_cache(model, monkeypatch):
    prompt = [5 + i % 7 for i in range(2048)]

    def peak_without_cache(chunk):
        monkeypatch.setattr(sampler.gpu, "prefill_tokens_per_pass", lambda: chunk)
        bytes_before = mx.get_active_memory()
        mx.reset_peak_memory()
        cache, _ = sampler.prefill(model, [prompt], 0)
        cache_bytes = sum(array.nbytes for array in cache.arrays())
        return mx.get_peak_memory() - bytes_before - cache_bytes

    # 4 heads of 2048 x 2048 scores in float32 have 67 MB, and 4 heads of 128 x 2048 have 4 MB
    assert peak_without_cache(4096) > 60e6
    assert peak_without_cache(128) < 20e6


# ---- memory


def test_a_rollout_releases_the_memory_of_the_cache_and_reports_it(model):
    mx.eval(model.parameters())
    bytes_before = mx.get_active_memory()
    rollout = roll_out(model, group_size=16, max_tokens=40, eos_ids=())
    results = (rollout.completion_ids, rollout.logprobs, rollout.mask)
    result_bytes = sum(array.nbytes for array in results)
    # the cache is largest in the beginning; in the end, only 16 slots are left
    column_bytes = cache_bytes_per_token(model.config, mx.float32)
    assert rollout.stats.cache_bytes >= 64 * 40 * column_bytes
    # the tolerance is needed because MLX may reuse a larger buffer for an array
    assert mx.get_active_memory() - bytes_before <= result_bytes + 1e5


NO_MEMORY = "[malloc_or_wait] Unable to allocate 99999999999 bytes."


def fail_once(monkeypatch, owner, name, call, error=RuntimeError):
    """
    Replaces a function. One call, counted from 1, fails as if memory had run out.

    error: the error that MLX raises; numpy raises MemoryError.
    """
    original = getattr(owner, name)
    calls = itertools.count(1)

    def fail_or_call_original(*args, **settings):
        if next(calls) == call:
            raise error(NO_MEMORY)
        return original(*args, **settings)

    monkeypatch.setattr(owner, name, fail_or_call_original)


# in the prefill, while a step is built, and where the host waits for results
FAILURES = [("prefill", 1), ("choose_token", 20), ("write", 6)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "call"), FAILURES, ids=[f"{place}-{call}" for place, call in FAILURES]
)
def test_rows_lost_for_lack_of_memory_are_sampled_again_with_the_same_result(
    model, reference, monkeypatch, capsys, place, call
):
    settings, expected = reference
    decode = sampler.decode
    runs = []  # the number of slots, the rows, and the rows that had ended, for each call of decode

    def record_and_decode(decoder):
        rows = set(decoder.prompt_of)
        runs.append((decoder.cache.num_slots, rows, set(np.flatnonzero(decoder.state.ended))))
        decode(decoder)

    monkeypatch.setattr(sampler, "decode", record_and_decode)
    if place == "write":
        fail_once(monkeypatch, sampler.DecodeState, "append_unless_ended", call, MemoryError)
    else:
        fail_once(monkeypatch, sampler, place, call)
    rollout = roll_out(model, **settings, batch_size=20)

    assert "out of memory; continuing with 10 rows at once" in capsys.readouterr().err
    num_slots, rows, _ = runs[-1]
    assert num_slots == min(10, len(rows))
    for _, rows, finished_before in runs:
        assert not rows & finished_before  # finished rows are not sampled again
    assert (place, call) == ("prefill", 1) or runs[0][0] == 20
    assert_same_ids(rollout, expected)
    assert_same_logprobs(rollout, expected, model)


def test_a_failure_halves_the_batch_size_permanently_but_never_below_one(model, monkeypatch):
    size = memory.BatchSize(64)
    fail_once(monkeypatch, sampler, "prefill", 1)
    for _ in range(2):
        roll_out(model, group_size=2, batch_size=size)
        assert size.rows == 5  # half of the ten rows
    for expected in (2, 1, 1):
        size.halve(100)
        assert size.rows == expected


# ---- the cost of a step


def test_decoding_stops_soon_after_all_rows_have_ended(model, monkeypatch):
    num_forward_passes = 0
    hidden = gwen.Model.hidden

    def count_and_call(self, *args):
        nonlocal num_forward_passes
        num_forward_passes += 1
        return hidden(self, *args)

    monkeypatch.setattr(gwen.Model, "hidden", count_and_call)
    rollout = roll_out(model, max_tokens=500, eos_ids=tuple(range(320)))
    assert rollout.completion_ids.shape[1] == 1
    assert num_forward_passes <= 1 + 2 * sampler.LOOK_EVERY


def test_non_finite_logits_suggest_bfloat16(model, tiny_model):
    broken = gwen.load_model(tiny_model)
    broken.norm.weight = broken.norm.weight * math.inf
    with pytest.raises(ValueError, match="GWEN_DTYPE=bfloat16"):
        roll_out(broken)


def test_a_prompt_without_tokens_is_refused(model):
    assert "token per prompt" in catch_message(roll_out, model, prompts=[[1], []])


@pytest.mark.parametrize("size", [1, 2, 7, 31, 32, 33, 1023, 1024, 1025, 40_000])
def test_uniforms_at_the_ends_of_the_unit_interval_sample_the_first_and_last_token(size):
    logits = mx.random.normal((3, size), key=mx.random.key(size))
    first, _, _ = softmax.sample_token(logits, mx.zeros((3, 4)))
    last, _, _ = softmax.sample_token(logits, mx.full((3, 4), 1.0 - 2**-24))
    assert (first == 0).all().item()
    assert (last == size - 1).all().item()

    peaked = mx.where(mx.arange(size) == size // 2, 0.0, -mx.inf)[None]
    for uniform in (0.0, 0.3, 1.0 - 2**-24):
        token, logprob, entropy = softmax.sample_token(peaked, mx.full((1, 4), uniform))
        assert token.item() == size // 2
        assert logprob.item() == 0.0
        assert entropy.item() == 0.0


def test_random_numbers_depend_only_on_the_key_the_row_and_the_position():
    uniforms = np.array(sampler.four_uniforms_per_position(5, [0, 1, 2], 20))
    part = np.array(sampler.four_uniforms_per_position(5, [2], 8))
    np.testing.assert_array_equal(part[0], uniforms[2, :8])

    assert len(np.unique(uniforms)) == uniforms.size
    with_another_key = np.array(sampler.four_uniforms_per_position(6, [0, 1, 2], 20))
    assert not np.intersect1d(uniforms, with_another_key).size
    assert (uniforms < 1).all()
    assert (uniforms >= 0).all()


@pytest.mark.parametrize("batch_size", [6, 64])
def test_a_stop_text_ends_a_row_at_the_token_that_completes_it(model, tokenizer, batch_size):
    """The oracle decodes each prefix of a row that was sampled without stop texts."""
    settings = dict(
        max_tokens=40, temperature=1.5, eos_ids=tuple(range(0, 320, 40)), batch_size=batch_size
    )
    unstopped = roll_out(model, **settings)
    unstopped_texts = sampler.decode_texts(tokenizer, unstopped, settings["eos_ids"])
    first = tokenizer.decode(unstopped.ids[0])[5:8]
    second = tokenizer.decode(unstopped.ids[7])[2:4]
    stop = sampler.StopTexts([first, second, "nobody says this"], tokenizer)

    rollout = roll_out(model, **settings, stop=stop)
    texts = sampler.decode_texts(tokenizer, rollout, settings["eos_ids"])

    lengths = []  # the number of tokens until a stop text is complete; None without a stop text
    for row, (ids, logprobs) in enumerate(rows_without_padding(unstopped)):
        length = num_tokens_until_stop(tokenizer, ids, stop.texts)
        lengths.append(length)
        assert rollout.ids[row] == ids[:length]
        row_logprobs = rows_without_padding(rollout)[row][1]
        np.testing.assert_allclose(row_logprobs, logprobs[:length], atol=logprob_tolerance(model))
        assert rollout.finish_reasons[row] == ("stop" if length else unstopped.finish_reasons[row])
        assert not contains_any(texts[row], stop.texts)
        if length is None:
            assert texts[row] == unstopped_texts[row]
    assert None in lengths
    assert sum(length is not None for length in lengths) >= 2


def contains_any(text, stop_texts):
    return any(stop_text in text for stop_text in stop_texts)


def num_tokens_until_stop(tokenizer, ids, stop_texts):
    for length in range(1, len(ids) + 1):
        if contains_any(tokenizer.decode(ids[:length]), stop_texts):
            return length
    return None


def test_trimming_cuts_at_the_earliest_stop_text_and_keeps_a_text_without_one():
    stop = sampler.StopTexts(["</a>", "a>!"], None)
    assert stop.trim("one</a>! two") == "one"
    assert stop.trim("one") == "one"
