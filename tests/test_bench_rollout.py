"""The rollout benchmarks: what they print, that all engines get the same work, and when they refuse to compare."""

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
def peer(checkpoints, model):
    return harness.load_mlx_lm_model(checkpoints["qwen3"], model.head_weight.dtype)


@pytest.fixture
def engines(model, peer, checkpoints):
    ours = functools.partial(rollout.time_gwen_rollout, model=model)
    return {"ours": ours, **bench_rollout.make_mlx_lm_rival(peer, checkpoints["qwen3"]).engines}


PROMPTS = [([5, 9], [2]), ([7, 1], [8]), ([40, 41], [42])]
WORK = RolloutWork(PROMPTS, 2, [9, 1, 4, 12, 2, 7], (), 0.8, 4, 3)


def made(completions, decode_s=1.0):
    return TimedRollout(completions, [], 1.0, decode_s)


def settings(*flags):
    return rollout.parse_flags(list(flags), "bench_rollout.py", "")


# ---- the report


def compared(main, *flags):
    """The JSON that the smallest comparison ends in, after its lines, which other people's scripts read, are seen."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        main([*TINY, "--temp", "0.5", *flags])
    lines = printed.getvalue().splitlines()
    assert lines[0] == "Config: B=2 G=2 pairs=4 max_tokens=3 temp=0.5 warmup=0 runs=2"
    record, number = json.loads(lines[-1]), r"\d+\.\d"
    form = rf"mean {number} ms \| std {number} ms \| total_out_toks 24 \| throughput {number} tok/s"
    for name in record["engines"]:
        assert any(re.fullmatch(rf"{name} *\| {form}", line) for line in lines), name
    return lines[-2], record


def test_the_report_ends_in_a_result_against_the_fastest_way_and_json_with_every_number():
    result, record = compared(bench_rollout.main)
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
        assert 0 < entry["min_ms"] <= entry["median_ms"] <= entry["max_ms"] and entry["peak_mb"] > 0
    took = {name: entry["mean_ms"] for name, entry in record["engines"].items()}
    ours = took.pop("ours")
    assert record["ratio"] == pytest.approx(min(took.values()) / ours, abs=1e-3)
    assert record["best"] == min(took, key=took.get) and record["roofline_frac"] > 0
    assert (
        record["config"]["model"] == "random:2m" and {"mlx", "mlx-lm"} <= record["versions"].keys()
    )


def test_engines_take_turns_and_a_peak_is_an_engine_s_own_with_the_weights_once(model):
    held, order = mx.zeros((3_000_000,)), []
    mx.eval(held)

    def fake(name):
        def engine(work):
            order.append(name)
            mx.eval(mx.zeros((5_000_000,)))
            return made([[1] * limit for limit in work.limits], float(len(order)))

        return engine

    samples = rollout.measure_rollouts({"a": fake("a"), "b": fake("b")}, WORK, warmup=1, runs=2)
    assert order == ["a", "b", "b", "a", "a", "b"]
    assert [sample.run.seconds for sample in samples["a"]] == [5.0, 6.0]
    entry = rollout.summarize_rollouts(samples["a"], model)
    assert (entry["mean_ms"], entry["prefill_ms"], entry["tokens"]) == (
        5500.0,
        1000.0,
        2 * sum(WORK.limits),
    )
    weights = sum(array.nbytes for _, array in tree_flatten(model.parameters()))
    assert entry["peak_mb"] == pytest.approx(20 + weights / 1e6, rel=0.01)
    with pytest.raises(AssertionError, match="lazy made"):
        rollout.measure_rollouts({"lazy": lambda work: made([[1]] * 6)}, WORK, warmup=0, runs=1)
    assert list(map(harness.describe_speed_ratio, (1.141, 0.999, 0.904))) == [
        "1.14x faster",
        "1.00x faster",
        "0.90x slower",
    ]


# ---- the work


class Counted:
    """A model that notes the shapes of the ids that it is given."""

    def __init__(self, model):
        self.model, self.shapes = model, []

    def __getattr__(self, name):
        return getattr(self.model, name)

    def __call__(self, ids, *args, **how):
        self.shapes.append(ids.shape)
        return self.model(ids, *args, **how)


def test_mlx_lm_s_best_use_prefills_every_prompt_once_and_decodes_all_rows_at_once(
    peer, checkpoints
):
    counted = Counted(peer)
    run = bench_rollout.make_mlx_lm_rival(counted, checkpoints["qwen3"]).engines["mlx_lm_shared"]
    run(WORK._replace(batch_size=6, limits=[5] * 6))
    prefilled, decoded = counted.shapes[:3], counted.shapes[3:]
    assert prefilled == [(1, 2)] * 3 and set(decoded) == {(6, 1)}
    assert len(decoded) <= 5 + 1  # the generator starts a step more than it returns
    counted.shapes.clear()
    run(
        WORK._replace(
            prompts=[([5, 9], [2], [3]), ([5, 9], [2], [4]), ([5, 9], [8], [4])], limits=[1] * 6
        )
    )
    assert counted.shapes[:3] == [(1, 2), (1, 1), (1, 1)], (
        "what rows begin with is prefilled once, run by run"
    )


def test_every_engine_makes_as_many_tokens_as_each_row_is_to_have(engines):
    for work in (
        WORK,
        WORK._replace(prompts=[([], [2]), ([], [8]), ([], [42])]),
    ):  # of one token too
        for name, engine in engines.items():
            run = engine(work)
            assert (
                [len(ids) for ids in run.completions]
                == [len(row) for row in run.logprobs]
                == work.limits
            ), name
            assert run.prefill_s > 0 and run.decode_s > 0


def test_greedy_rows_end_at_the_same_tokens_with_the_same_logprobs_in_every_engine(engines):
    greedy = WORK._replace(temperature=0.0, limits=[12] * 6)
    first_end = engines["ours"](greedy).completions[0][5]
    runs = {name: engine(greedy._replace(eos_ids=(first_end,))) for name, engine in engines.items()}
    assert len(runs["ours"].completions[0]) <= 6 and runs["ours"].completions[0][-1] == first_end
    for run in runs.values():
        assert run.completions == runs["ours"].completions
        for row, expected in zip(run.logprobs, runs["ours"].logprobs, strict=True):
            np.testing.assert_allclose(row, expected, atol=1e-4)


def test_prompts_are_seeded_distinct_and_free_of_end_tokens(model):
    args = settings("--batch", "40", "--prompt-tokens", "50")
    work = rollout.make_rollout_work(args, model.config)
    assert work == rollout.make_rollout_work(args, model.config)
    assert len(set(map(tuple, work.prompt_ids_by_row))) == 40 and len(work.prompt_ids_by_row) == 80
    assert (
        not set(np.ravel(work.prompt_ids_by_row)) & set(model.config.eos_ids)
        and work.eos_ids == model.config.eos_ids
    )
    assert rollout.make_rollout_work(settings("--ignore-eos"), model.config).eos_ids == ()


def test_engines_agree_whose_greedy_tokens_are_the_likeliest_and_none_that_stops_early_or_late(
    checkpoints, engines
):
    rollout.refuse_engines_that_disagree(engines["ours"].keywords["model"], engines, WORK)
    model = gwen.load_model(checkpoints["qwen3"])
    (ids,) = rollout.time_gwen_rollout(
        WORK._replace(prompts=PROMPTS[:1], group_size=1, limits=[16], temperature=0.0), model=model
    ).completions
    twin = model.config.vocab_size - 1  # of two equal logits the first is taken, so ours stays
    assert twin not in ids
    model.embed_tokens.weight[twin] = model.embed_tokens.weight[ids[0]]
    work = WORK._replace(prompts=PROMPTS[:1], group_size=1)
    rollout.refuse_engines_that_disagree(
        model, {"other": lambda work: made([[twin, *ids[1:]]])}, work
    )
    for wrong, place in ((ids[:7], 7), ([*ids[:4], ids[4] - 1, *ids[5:]], 4)):
        with pytest.raises(
            ValueError,
            match=f"other and Gwen's model differ at token {place} of a greedy completion",
        ):
            rollout.refuse_engines_that_disagree(
                model, {"other": lambda work, wrong=wrong: made([wrong])}, work
            )
    with pytest.raises(
        ValueError, match="other and Gwen's model differ at token 16"
    ):  # it went on behind an end
        rollout.refuse_engines_that_disagree(
            model, {"other": lambda work: made([ids])}, work._replace(eos_ids=(ids[4],))
        )


# ---- vllm-mlx


def test_without_vllm_mlx_one_line_names_the_command_that_installs_it(monkeypatch, check_refusal):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    check_refusal(
        bench_rollout_vllm_mlx.main,
        [],
        "vllm-mlx is not installed; install it with: uv sync --extra vllm\n",
    )


@needs("vllm_mlx")
def test_vllm_mlx_is_compared_on_the_same_work_with_its_prefix_cache_on_and_off():
    result, record = compared(bench_rollout_vllm_mlx.main, "--prompt-tokens", "140")
    assert re.fullmatch(
        r"Result vs vllm_mlx: ours is \d+\.\d\dx (faster|slower) on this rollout workload\.", result
    )
    assert list(record["engines"]) == ["ours", "vllm_mlx", "vllm_mlx_uncached"]
    assert record["engines"]["vllm_mlx"].keys() == NUMBERS and record["versions"]["vllm-mlx"]
