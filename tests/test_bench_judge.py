"""The judging benchmark: all engines get the same work, the counts are right, and replies agree."""

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


def test_the_work_has_distinct_texts_of_the_requested_lengths_in_prompts_of_the_judge():
    rubric, pairs, work = judging.make_judging_work(ARGS, DEMO)
    lengths = {(len(prompt.split()), len(completion.split())) for prompt, completion in pairs}
    assert lengths == {(40, 30)}
    prompts, completions = zip(*pairs, strict=True)
    assert len(set(prompts)) == 2
    assert len(set(completions)) == 6

    encoder = judge_prompts.JudgePromptEncoder(DEMO, rubric)
    expected_ids = [ids for pair in pairs for ids in make_whole_prompts(encoder, *pair)]
    assert work.prompt_ids_by_row == expected_ids
    assert len(work.prompt_ids_by_row) == 18


@pytest.mark.slow
def test_all_engines_give_the_same_replies_and_report_their_work(capsys):
    with harness.model_directory("demo") as directory:
        model = gwen.load_model(directory)
        tokenizer = hub.load_tokenizer(directory)
        mlx_lm_model = harness.load_mlx_lm_model(directory, model.head_weight.dtype)
        rival = bench_rollout.make_mlx_lm_rival(mlx_lm_model, directory)
    record = judging.benchmark_and_print_judging(ARGS, model, tokenizer, rival)

    for name, agreement in record["agreement"].items():
        assert agreement["replies"] == 1
        # An engine that reads one token takes Gwen's likeliest token first.
        assert agreement["scores"] == 1 or name.endswith("_one_token")
    assert list(record["engines"]) == ["ours", "ours_decode", *record["agreement"]]
    assert len(record["agreement"]) == 6

    _, _, work = judging.make_judging_work(ARGS, tokenizer)
    assert 0 < record["computed"] < sum(map(len, work.prompt_ids_by_row))
    assert not record["best"]["ours_decode"].endswith("_one_token")

    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "Judge benchmark: pairs/run=6 criteria=3 warmup=0 runs=1"
    rows = [line for line in lines if line.startswith("judge_")]
    assert len(rows) == 8
    assert rows[2].split()[0] == "judge_mlx_lm"
    assert all("| crit_eval/s" in row for row in rows)
    assert "Judge result vs mlx_lm: ours is " in "\n".join(lines)


def test_the_agreement_is_lower_for_an_engine_with_another_reply():
    unreadable = CriterionEvaluation(np.nan, 0.0, "x")
    evaluations = [CriterionEvaluation(1.0, 1.0, "1"), unreadable]
    other_evaluations = [CriterionEvaluation(2.0, 1.0, "2"), unreadable]

    agreement = judging.score_and_reply_agreement(evaluations, other_evaluations)
    assert agreement == {"scores": 0.5, "replies": 0.5}
    agreement = judging.score_and_reply_agreement(evaluations, evaluations)
    assert agreement == {"scores": 1.0, "replies": 1.0}


def test_different_ids_without_text_decode_to_different_visible_texts():
    tokenizer = judging.copy_with_visible_decoding(DEMO)
    assert tokenizer.decode([5000, 6000]) == "<5000><6000>"
    assert tokenizer.decode([6000, 5000]) != "<5000><6000>"

    ids = DEMO.encode("one two")
    assert tokenizer.decode(ids) == "one two"
    assert DEMO.decode(ids) == "one two"
