"""The judging benchmark: the same work for all, counted rightly, and engines that agree."""

import argparse

import numpy as np
import pytest

import bench_rollout
import gwen
import hub
from bench import harness
from judging import rubrics

DEMO = hub.load_tokenizer(hub.DEMO)


def settings(**changes):
    given = {"batch": 2, "groups": 3, "prompt_tokens": 40, "max_tokens": 30, "warmup": 0, "seed": 0}
    return argparse.Namespace(**given | {"judge_runs": 1, "judge_chunk_size": 24} | changes)


def test_the_segments_of_the_work_have_the_sizes_that_are_asked_for():
    work = harness.make_judge_work(settings(prompt_tokens=100, max_tokens=128), DEMO)
    builder = rubrics.PromptBuilder(DEMO, work.rubric)
    assert len(builder.head) == harness.PREAMBLE_TOKENS
    assert {len(builder.question(prompt)) for prompt in work.prompts} == {100}
    assert all(128 <= len(builder.answer(text)) <= 130 for text in work.completions)
    assert len(set(work.prompts)) == 2 and len(set(work.completions)) == 6
    own = [len(tail) - builder.num_common for tail in builder.tails]
    assert all(harness.CRITERION_TOKENS <= length <= harness.CRITERION_TOKENS + 2 for length in own)
    assert len(work.ids) == 6 * harness.NUM_CRITERIA
    joined = len(builder.head) + 2 * 100 + sum(len(builder.answer(text)) for text in work.completions) + 6 * sum(own)
    assert joined - 6 * 3 <= work.num_distinct <= joined  # random words may begin alike


def test_distinct_tokens_are_the_nodes_of_the_tree_of_prompts():
    work = harness.make_judge_work(settings(), DEMO)
    builder = rubrics.PromptBuilder(DEMO, work.rubric)
    nodes = {tuple(ids[:end]) for ids in work.ids for end in range(1, len(ids) + 1)}
    assert work.num_distinct == len(nodes)
    assert harness.num_distinct(builder, work.prompts * 2, work.completions * 2) == len(nodes)


@pytest.mark.slow
def test_engines_agree_to_the_letter_and_report_what_they_did(capsys):
    with harness.model_directory("demo") as directory:
        model, tokenizer = gwen.load_model(directory), hub.load_tokenizer(directory)
        peer = harness.load_peer(directory, model.head_weight.dtype)
        rival = bench_rollout.rival(peer, directory)
    record = harness.benchmark_judge(settings(), model, tokenizer, rival)
    assert record["agreement"] == {"scores": 1.0, "replies": 1.0}
    assert list(record["engines"]) == ["ours", "ours_decode", "mlx_lm"]
    assert record["distinct_tokens"] <= record["engines"]["ours"]["prefill_tokens"] <= 1.1 * record["distinct_tokens"]
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "Judge benchmark: pairs/run=6 criteria=3 warmup=0 runs=1"
    assert [line.split()[0] for line in lines if line.startswith("judge_")] == [
        "judge_ours",
        "judge_ours_decode",
        "judge_mlx_lm",
    ]
    assert all("| crit_eval/s" in line for line in lines if line.startswith("judge_"))
    assert "Judge result vs mlx_lm: ours is " in "\n".join(lines)


def test_an_engine_that_replies_something_else_is_seen_to_disagree():
    one = harness.JudgeTiming(np.array([[1.0, np.nan]]), np.array([["1", "x"]], object), 1.0, 1)
    other = harness.JudgeTiming(np.array([[2.0, np.nan]]), np.array([["2", "x"]], object), 1.0, 1)
    assert harness.agreement(one, other) == {"scores": 0.5, "replies": 0.5}
    assert harness.agreement(one, one) == {"scores": 1.0, "replies": 1.0}


def test_ids_that_the_tokenizer_has_no_text_for_are_shown_apart():
    shown = harness.Legible(DEMO)
    assert shown.decode([5000, 6000]) == "<5000><6000>" != shown.decode([6000, 5000])
    assert shown.decode(DEMO.encode("one two")) == "one two"


@pytest.mark.parametrize("mode", ("logits", "decode"))
@pytest.mark.slow
def test_a_timed_run_of_ours_knows_no_score_from_before(mode):
    model, tokenizer = gwen.load("demo")
    work = harness.make_judge_work(settings(), tokenizer)
    runs = [harness.judge_ours(work, model=model, tokenizer=tokenizer, mode=mode, chunk_size=24) for _ in range(2)]
    assert runs[0].num_tokens == runs[1].num_tokens >= work.num_distinct
