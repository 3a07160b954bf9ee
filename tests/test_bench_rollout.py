"""The rollout benchmarks: the report, equal work for all engines, and refusals to compare."""

import contextlib
import functools
import importlib
import importlib.util
import io
import json
import re

import mlx.core as mx
import numpy as np
import pytest
from extras import needs
from mlx.utils import tree_flatten

import bench_rollout
import bench_rollout_vllm_mlx
import gwen
from bench import harness, rollout
from bench.rollout import RolloutWork, TimedRollout

TINY = ["--model", "random:2m", "--max-tokens", "3", "--prompt-tokens", "5", "--warmup", "0"]
TIMES = "mean_ms std_ms median_ms min_ms max_ms prefill_ms decode_ms cpu_ms"
NUMBERS = {*TIMES.split(), "tokens", "tok_s", "peak_mb"}


@pytest.fixture(scope="module")
def model(checkpoints):
    return gwen.load_model(checkpoints["qwen3"])


@pytest.fixture(scope="module")
def mlx_lm_model(checkpoints, model):
    return harness.load_mlx_lm_model(checkpoints["qwen3"], model.head_weight.dtype)


@pytest.fixture
def engines(model, mlx_lm_model, checkpoints):
    rival = bench_rollout.make_mlx_lm_rival(mlx_lm_model, checkpoints["qwen3"])
    return {"ours": functools.partial(rollout.time_gwen_rollout, model=model), **rival.engines}


PROMPTS = [([5, 9], [2]), ([7, 1], [8]), ([40, 41], [42])]
WORK = RolloutWork(PROMPTS, 2, [9, 1, 4, 12, 2, 7], (), 0.8, 4, 3)


def make_timed_rollout(completions, decode_s=1.0):
    return TimedRollout(completions, [], 1.0, decode_s)


def parse_flags(*flags):
    return rollout.parse_flags(list(flags), "bench_rollout.py", "")


# ---- the report


def run_small_comparison(main, *flags):
    """
    Runs a small comparison; returns the line with the result, and the final JSON.

    Other people's scripts read the lines before the result, so this function checks their format.
    """
    stdout = io.StringIO()
    with contextlib.redirect_stdout(stdout):
        main([*TINY, "--temp", "0.5", *flags])
    lines = stdout.getvalue().splitlines()
    assert lines[0] == "Config: B=2 G=2 pairs=4 max_tokens=3 temp=0.5 warmup=0 runs=2"
    record = json.loads(lines[-1])
    number = r"\d+\.\d"
    form = rf"mean {number} ms \| std {number} ms \| total_out_toks 24 \| throughput {number} tok/s"
    for name in record["engines"]:
        assert any(re.fullmatch(rf"{name} *\| {form}", line) for line in lines), name
    return lines[-2], record


def test_the_report_ends_with_a_comparison_with_the_fastest_rival_and_json_with_all_numbers():
    result, record = run_small_comparison(bench_rollout.main)
    assert re.fullmatch(
        r"Result: ours is \d+\.\d\dx (faster|slower) than mlx_lm on this rollout workload\.", result
    )
    assert record.keys() == {
        "config",
        "engines",
        "ratio",
        "best",
        "roofline_frac",
        "device",
        "versions",
    }
    assert list(record["engines"]) == ["ours", "mlx_lm", "mlx_lm_default", "mlx_lm_shared"]
    for entry in record["engines"].values():
        assert entry.keys() == NUMBERS
        assert entry["mean_ms"] == pytest.approx(entry["prefill_ms"] + entry["decode_ms"], abs=0.01)
        assert entry["tok_s"] == pytest.approx(24 / (2 * entry["mean_ms"] / 1e3), rel=1e-3)
        assert 0 < entry["min_ms"] <= entry["median_ms"] <= entry["max_ms"]
        assert entry["peak_mb"] > 0

    rival_times = {name: entry["mean_ms"] for name, entry in record["engines"].items()}
    gwen_time = rival_times.pop("ours")
    assert record["ratio"] == pytest.approx(min(rival_times.values()) / gwen_time, abs=1e-3)
    assert record["best"] == min(rival_times, key=rival_times.get)
    assert record["roofline_frac"] > 0
    assert record["config"]["model"] == "random:2m"
    assert {"mlx", "mlx-lm"} <= record["versions"].keys()


def test_engines_alternate_and_the_peak_of_an_engine_includes_the_weights_once(model):
    other_array = mx.zeros((3_000_000,))  # it does not belong to the peak of an engine
    mx.eval(other_array)
    order = []

    def make_engine(name):
        def engine(work):
            order.append(name)
            mx.eval(mx.zeros((5_000_000,)))
            return make_timed_rollout([[1] * limit for limit in work.limits], float(len(order)))

        return engine

    engines = {"a": make_engine("a"), "b": make_engine("b")}
    samples = rollout.measure_rollouts(engines, WORK, warmup=1, runs=2)
    assert order == ["a", "b", "b", "a", "a", "b"]
    assert [sample.run.seconds for sample in samples["a"]] == [5.0, 6.0]
    entry = rollout.summarize_rollouts(samples["a"], model)
    assert entry["mean_ms"] == 5500.0
    assert entry["prefill_ms"] == 1000.0
    assert entry["tokens"] == 2 * sum(WORK.limits)
    weights = sum(array.nbytes for _, array in tree_flatten(model.parameters()))
    assert entry["peak_mb"] == pytest.approx(20 + weights / 1e6, rel=0.01)

    lazy = {"lazy": lambda work: make_timed_rollout([[1]] * 6)}
    with pytest.raises(AssertionError, match="lazy made"):
        rollout.measure_rollouts(lazy, WORK, warmup=0, runs=1)

    assert harness.describe_speed_ratio(1.141) == "1.14x faster"
    assert harness.describe_speed_ratio(0.999) == "1.00x faster"
    assert harness.describe_speed_ratio(0.904) == "0.90x slower"


# ---- the work


class ShapeRecorder:
    """A model that records the shape of the ids in each call."""

    def __init__(self, model):
        self.model = model
        self.shapes = []

    def __getattr__(self, name):
        return getattr(self.model, name)

    def __call__(self, ids, *args, **options):
        self.shapes.append(ids.shape)
        return self.model(ids, *args, **options)


def test_mlx_lm_shared_prefills_every_prompt_once_and_decodes_all_rows_together(
    mlx_lm_model, checkpoints
):
    recorder = ShapeRecorder(mlx_lm_model)
    rival = bench_rollout.make_mlx_lm_rival(recorder, checkpoints["qwen3"])
    run = rival.engines["mlx_lm_shared"]
    run(WORK._replace(batch_size=6, limits=[5] * 6))
    prefill_shapes = recorder.shapes[:3]
    decode_shapes = recorder.shapes[3:]
    assert prefill_shapes == [(1, 2)] * 3
    assert set(decode_shapes) == {(6, 1)}
    assert len(decode_shapes) <= 5 + 1  # the generator starts one more step than it returns

    recorder.shapes.clear()
    prompts = [([5, 9], [2], [3]), ([5, 9], [2], [4]), ([5, 9], [8], [4])]
    run(WORK._replace(prompts=prompts, limits=[1] * 6))
    assert recorder.shapes[:3] == [(1, 2), (1, 1), (1, 1)], "each shared prefix is prefilled once"


def test_every_engine_generates_the_required_number_of_tokens_in_each_row(engines):
    one_token_prompts = WORK._replace(prompts=[([], [2]), ([], [8]), ([], [42])])
    for work in (WORK, one_token_prompts):
        for name, engine in engines.items():
            run = engine(work)
            assert [len(ids) for ids in run.completions] == work.limits, name
            assert [len(row) for row in run.logprobs] == work.limits, name
            assert run.prefill_s > 0
            assert run.decode_s > 0


def test_greedy_rows_end_at_the_same_tokens_with_the_same_logprobs_in_every_engine(engines):
    greedy = WORK._replace(temperature=0.0, limits=[12] * 6)
    end_id = engines["ours"](greedy).completions[0][5]
    runs = {name: engine(greedy._replace(eos_ids=(end_id,))) for name, engine in engines.items()}
    expected = runs["ours"]
    assert len(expected.completions[0]) <= 6
    assert expected.completions[0][-1] == end_id
    for run in runs.values():
        assert run.completions == expected.completions
        for row, expected_row in zip(run.logprobs, expected.logprobs, strict=True):
            np.testing.assert_allclose(row, expected_row, atol=1e-4)


def test_prompts_are_seeded_distinct_and_free_of_end_tokens(model):
    args = parse_flags("--batch", "40", "--prompt-tokens", "50")
    work = rollout.make_rollout_work(args, model.config)
    assert work == rollout.make_rollout_work(args, model.config)
    assert len(set(map(tuple, work.prompt_ids_by_row))) == 40
    assert len(work.prompt_ids_by_row) == 80
    assert not set(np.ravel(work.prompt_ids_by_row)) & set(model.config.eos_ids)
    assert work.eos_ids == model.config.eos_ids
    assert rollout.make_rollout_work(parse_flags("--ignore-eos"), model.config).eos_ids == ()


def test_an_engine_is_refused_if_a_greedy_token_is_not_the_likeliest_or_the_length_is_wrong(
    checkpoints, engines
):
    rollout.refuse_engines_that_disagree(engines["ours"].keywords["model"], engines, WORK)

    model = gwen.load_model(checkpoints["qwen3"])
    work = WORK._replace(prompts=PROMPTS[:1], group_size=1)
    (ids,) = rollout.time_gwen_rollout(
        work._replace(limits=[16], temperature=0.0), model=model
    ).completions

    def refuse_if_different(completion, work=work):
        engine = {"other": lambda work: make_timed_rollout([completion])}
        rollout.refuse_engines_that_disagree(model, engine, work)

    # an engine may choose another token with the same logit; Gwen chooses the first of both
    twin = model.config.vocab_size - 1
    assert twin not in ids
    model.embed_tokens.weight[twin] = model.embed_tokens.weight[ids[0]]
    refuse_if_different([twin, *ids[1:]])

    too_short = ids[:7]
    with_wrong_token = [*ids[:4], ids[4] - 1, *ids[5:]]
    for completion, position in ((too_short, 7), (with_wrong_token, 4)):
        message = f"other and Gwen's model differ at token {position} of a greedy completion"
        with pytest.raises(ValueError, match=message):
            refuse_if_different(completion)

    # this engine continues after an end token
    with pytest.raises(ValueError, match="other and Gwen's model differ at token 16"):
        refuse_if_different(ids, work._replace(eos_ids=(ids[4],)))


# ---- vllm-mlx


def test_without_vllm_mlx_the_error_names_the_command_that_installs_it(monkeypatch, check_refusal):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    check_refusal(
        bench_rollout_vllm_mlx.main,
        [],
        "vllm-mlx is not installed; install it with: uv sync --extra vllm\n",
    )


@needs("vllm_mlx")
def test_vllm_mlx_is_compared_with_and_without_the_prefix_cache():
    result, record = run_small_comparison(bench_rollout_vllm_mlx.main, "--prompt-tokens", "140")
    assert re.fullmatch(
        r"Result vs vllm_mlx: ours is \d+\.\d\dx (faster|slower) on this rollout workload\.", result
    )
    assert list(record["engines"]) == ["ours", "vllm_mlx", "vllm_mlx_uncached"]
    assert record["engines"]["vllm_mlx"].keys() == NUMBERS
    assert record["versions"]["vllm-mlx"]
