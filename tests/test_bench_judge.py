"""The judging benchmark: the same work for all, counted rightly, and engines that agree."""

import argparse

import numpy as np
import pytest
from conftest import make_whole_prompts

import bench_rollout
import gwen
from bench import harness, judging
from disk import hub
from judging import judge_prompts
from judging.evaluations import CriterionEvaluation

DEMO = hub.load_tokenizer(hub.DEMO)
SETTINGS = {"batch": 2, "groups": 3, "prompt_tokens": 40, "max_tokens": 30, "warmup": 0, "seed": 0}
ARGS = argparse.Namespace(**SETTINGS, judge_runs=1, judge_chunk_size=24)


def test_the_work_is_distinct_texts_of_the_length_asked_for_as_the_judge_puts_them():
    rubric, pairs, work = judging.make_judging_work(ARGS, DEMO)
    assert {(len(prompt.split()), len(text.split())) for prompt, text in pairs} == {(40, 30)}
    assert [len(set(texts)) for texts in zip(*pairs, strict=True)] == [2, 6]
    builder = judge_prompts.JudgePromptEncoder(DEMO, rubric)
    assert (
        work.prompt_ids_by_row
        == [ids for pair in pairs for ids in make_whole_prompts(builder, *pair)]
        and len(work.prompt_ids_by_row) == 18
    )


@pytest.mark.slow
def test_engines_agree_to_the_letter_and_report_what_they_did(capsys):
    with harness.model_directory("demo") as directory:
        model, tokenizer = gwen.load_model(directory), hub.load_tokenizer(directory)
        rival = bench_rollout.make_mlx_lm_rival(
            harness.load_mlx_lm_model(directory, model.head_weight.dtype), directory
        )
    record = judging.benchmark_and_print_judging(ARGS, model, tokenizer, rival)
    for name, agreement in record["agreement"].items():  # one token is ours' likeliest first
        assert agreement["replies"] == 1 and (
            agreement["scores"] == 1 or name.endswith("_one_token")
        )
    assert (
        list(record["engines"]) == ["ours", "ours_decode", *record["agreement"]]
        and len(record["agreement"]) == 6
    )
    assert (
        0
        < record["computed"]
        < sum(map(len, judging.make_judging_work(ARGS, tokenizer)[2].prompt_ids_by_row))
    )
    assert not record["best"]["ours_decode"].endswith("_one_token")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "Judge benchmark: pairs/run=6 criteria=3 warmup=0 runs=1"
    rows = [line for line in lines if line.startswith("judge_")]
    assert (
        rows[2].split()[0] == "judge_mlx_lm"
        and all("| crit_eval/s" in row for row in rows)
        and len(rows) == 8
    )
    assert "Judge result vs mlx_lm: ours is " in "\n".join(lines)


def test_an_engine_that_replies_something_else_is_seen_to_disagree():
    unread = CriterionEvaluation(np.nan, 0.0, "x")
    one, other = (
        [CriterionEvaluation(1.0, 1.0, "1"), unread],
        [CriterionEvaluation(2.0, 1.0, "2"), unread],
    )
    assert judging.score_and_reply_agreement(one, other) == {"scores": 0.5, "replies": 0.5}
    assert judging.score_and_reply_agreement(one, one) == {"scores": 1.0, "replies": 1.0}


def test_ids_that_the_tokenizer_has_no_text_for_are_shown_apart():
    shown = judging.copy_with_visible_decoding(DEMO)
    assert shown.decode([5000, 6000]) == "<5000><6000>" != shown.decode([6000, 5000])
    assert shown.decode(DEMO.encode("one two")) == DEMO.decode(DEMO.encode("one two")) == "one two"
