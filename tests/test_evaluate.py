"""Held-out evaluation: unbiased pass@k, the same problems every time, and no training prompt among them."""

import itertools
import json
import math

import numpy as np
import pytest

import evaluate
import gwen
import judge
import sampler
import tasks


@pytest.fixture(scope="module")
def demo():
    return gwen.load("demo")


def run(demo, **settings):
    defaults = dict(max_tokens=12, rollout_batch_size=64, limit=24)
    return evaluate.evaluate(*demo, tasks.load("demo"), **(defaults | settings))


@pytest.mark.parametrize(("n", "right"), [(1, 0), (1, 1), (5, 2), (8, 8), (8, 0), (6, 1)])
def test_pass_at_k_is_the_share_of_subsets_with_a_right_answer(n, right):
    answers = [True] * right + [False] * (n - right)
    for k in range(1, n + 1):
        subsets = list(itertools.combinations(answers, k))
        assert evaluate.pass_at_k(n, right, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


def test_one_sample_a_problem_makes_accuracy_pass_at_1_and_mean_at_k_the_same(demo):
    record, details = run(demo)
    assert record["eval/accuracy"] == record["eval/pass_at_1"] == record["eval/mean_at_k"]
    assert record["eval/num"] == len(details) == 24
    assert record["eval/accuracy"] == np.mean([detail["values"][0] for detail in details])
    for detail in details:
        asked = {"prompts": [detail["prompt"]], "answer": [detail["answer"]]}
        assert detail["values"] == tasks.demo_correct(completions=detail["completions"], **asked)
        assert [detail["greedy_value"]] == tasks.demo_correct(completions=[detail["greedy"]], **asked)


def test_several_samples_give_pass_at_k_with_intervals_over_problems(demo):
    record, details = run(demo, samples=4)
    by_problem = np.array([detail["values"] for detail in details])
    assert by_problem.shape == (24, 4)
    assert record["eval/pass_at_1"] == pytest.approx(by_problem.mean())
    assert record["eval/pass_at_4"] == pytest.approx((by_problem.max(1) == 1).mean())
    expected = 1.96 * by_problem.mean(1).std(ddof=1) / math.sqrt(24)
    assert record["eval/pass_at_1_ci95"] == pytest.approx(expected)
    assert record["eval/accuracy"] == pytest.approx(by_problem[:, 0].mean())


def test_samples_are_drawn_at_temperature_1_and_greedy_is_greedy_whatever_was_trained(demo):
    model, tokenizer = demo
    _, details = run(demo, samples=2)
    held_out = tasks.load("demo").held_out
    problems = [held_out[place * len(held_out) // 24] for place in range(24)]  # spread over all of them
    assert [(d["prompt"], d["answer"]) for d in details] == [(p["prompt"], p["answer"]) for p in problems]
    params = sampler.SamplingParams(12, eos_ids=model.config.eos_ids)
    prompts = [tasks.chat_ids(tokenizer, problem["prompt"]) for problem in problems]
    for group_size, temperature, key in ((2, 1.0, "completions"), (1, 0.0, "greedy")):
        rollout = sampler.rollout(
            model, prompts, params._replace(temperature=temperature), group_size=group_size, key=evaluate.KEY
        )
        told = [text for d in details for text in (d[key] if isinstance(d[key], list) else [d[key]])]
        assert told == sampler.texts(tokenizer, rollout, model.config.eos_ids)
    assert any(detail["greedy"] != detail["completions"][0] for detail in details)


def test_an_evaluation_repeats_itself_whatever_the_batch_size(demo):
    first, _ = run(demo)
    second, _ = run(demo, rollout_batch_size=7)
    for record in (first, second):
        record.pop("eval/s")
    assert first == second


def test_a_task_without_right_answers_is_scored_by_criterion_and_category(demo):
    task = tasks.load("demo")._replace(verifier=None, metric="score")
    problems = [problem | {"category": "carry" if problem["carry"] else "plain"} for problem in task.held_out]
    task = task._replace(held_out=problems)
    grader = judge.Judge(*demo, task.rubric)
    record, details = evaluate.evaluate(
        *demo, task, max_tokens=12, rollout_batch_size=64, grader=grader, limit=24, samples=2
    )
    criteria = [criterion.name for criterion in grader.rubric.criteria]
    for name in criteria:
        assert {f"eval/score/{name}", f"eval/score/{name}/carry", f"eval/score/{name}/plain"} <= set(record)
    means = np.array([record[f"eval/score/{name}"] for name in criteria])
    weights = np.array([criterion.weight for criterion in grader.rubric.criteria])
    assert record["eval/mean_at_k"] == pytest.approx((weights * (means - 3) / 2).sum(), abs=1e-6)
    assert len(details) == 24


def test_the_command_prints_one_record_and_writes_a_line_a_problem(capsys, tmp_path):
    evaluate.main(["--model", "demo", "--limit", "8", "--samples", "2", "--max-tokens", "12", "--out", f"{tmp_path}/q"])
    record = json.loads(capsys.readouterr().out)
    assert record["eval/num"] == 8 and record["eval/samples"] == 2
    assert len([json.loads(line) for line in (tmp_path / "q").read_text().splitlines()]) == 8
