"""The judging benchmark: the same work for all, counted rightly, and engines that agree."""

import argparse

import numpy as np
import pytest

import bench_rollout
import gwen
from bench import harness, judging
from disk import hub
from judging import rubrics

DEMO = hub.load_tokenizer(hub.DEMO)


def settings(**changes):
    given = {"batch": 2, "groups": 3, "prompt_tokens": 40, "max_tokens": 30, "warmup": 0, "seed": 0}
    return argparse.Namespace(**given | {"judge_runs": 1, "judge_chunk_size": 24} | changes)


def test_every_text_of_the_work_has_the_words_that_are_asked_for_and_is_another():
    work = judging.make_work(settings(prompt_tokens=100, max_tokens=128), DEMO)
    assert {len(prompt.split()) for prompt in work.prompts} == {100}
    assert {len(text.split()) for text in work.completions} == {128}
    assert len(set(work.prompts)) == 2 and len(set(work.completions)) == 6
    assert len(work.segments) == 6 * judging.NUM_CRITERIA


def test_the_segments_join_to_the_prompts_of_the_judge():
    work = judging.make_work(settings(), DEMO)
    builder = rubrics.PromptBuilder(DEMO, work.rubric)
    ids = [one for pair in zip(work.prompts, work.completions, strict=True) for one in builder(*pair)]
    assert [[token for segment in row for token in segment] for row in work.segments] == ids


@pytest.mark.slow
def test_engines_agree_to_the_letter_and_report_what_they_did(capsys):
    with harness.model_directory("demo") as directory:
        model, tokenizer = gwen.load_model(directory), hub.load_tokenizer(directory)
        peer = harness.load_peer(directory, model.head_weight.dtype)
        rival = bench_rollout.rival(peer, directory)
    record = judging.benchmark(settings(), model, tokenizer, rival.name, rival.judges)
    assert record["agreement"]["mlx_lm"] == record["agreement"]["mlx_lm_shared"] == {"scores": 1.0, "replies": 1.0}
    assert record["agreement"]["mlx_lm_one_token"]["replies"] == 1.0  # the likeliest first token
    assert list(record["engines"])[:3] == ["ours", "ours_decode", "mlx_lm"]
    assert 0 < record["computed"] < judging.make_work(settings(), tokenizer).num_tokens
    assert record["best"]["ours_decode"] in ("mlx_lm", "mlx_lm_shared")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "Judge benchmark: pairs/run=6 criteria=3 warmup=0 runs=1"
    assert [line.split()[0] for line in lines if line.startswith("judge_")][:3] == [
        "judge_ours",
        "judge_ours_decode",
        "judge_mlx_lm",
    ]
    assert all("| crit_eval/s" in line for line in lines if line.startswith("judge_"))
    assert "Judge result vs mlx_lm: ours is " in "\n".join(lines)


def test_an_engine_that_replies_something_else_is_seen_to_disagree():
    one = judging.Timing(np.array([[1.0, np.nan]]), np.array([["1", "x"]], object), 1.0)
    other = judging.Timing(np.array([[2.0, np.nan]]), np.array([["2", "x"]], object), 1.0)
    assert judging.agreement(one, other) == {"scores": 0.5, "replies": 0.5}
    assert judging.agreement(one, one) == {"scores": 1.0, "replies": 1.0}


def test_ids_that_the_tokenizer_has_no_text_for_are_shown_apart():
    shown = judging.Legible(DEMO)
    assert shown.decode([5000, 6000]) == "<5000><6000>" != shown.decode([6000, 5000])
    assert shown.decode(DEMO.encode("one two")) == "one two"
