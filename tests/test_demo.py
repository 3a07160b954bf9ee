"""The demo's recipe and its audit: what is true of an answer, told by two readers that share no code."""

import random
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest

import gwen
from demo import audit, make
from judging import rubrics
from problems.rewards import numbers_in
from tasks import demo as sums

ASKED = "What is twenty-seven plus fifteen?"
READ = [  # answer, whether its last number is the sum, whether it is right
    ("Twenty-seven plus fifteen is forty-two.", True, True),
    ("15 + 27 = 42", True, True),
    ("The answer is forty-two", True, True),
    ("Forty-two.", True, True),
    ("Twenty-seven plus twenty is forty-two.", True, False),
    ("Twenty-two plus twenty is forty-two.", True, False),  # true, of another problem
    ("Twenty-seven is forty-two.", True, False),
    ("Twenty-seven minus fifteen is forty-two.", True, False),
    ("Twenty-seven is fifteen plus forty-two.", True, False),
    ("Fifteen plus fifteen plus twenty-seven is forty-two.", True, False),
    ("Twenty-seven fifteen is forty-two.", True, False),
    ("Twenty-seven plus is forty-two.", True, False),
    ("The answer is not forty-two.", True, False),
    ("Twenty-seven plus fifteen is thirty-two. The answer is forty-two.", True, False),
    ("Twenty-seven plus fifteen is thirty-two.", False, False),
    ("Twenty-seven plus fifteen is-two.", False, False),
    ("Forty-two-five.", False, False),
    ("", False, False),
]


@pytest.mark.parametrize(("answer", "ends_right", "right"), READ, ids=lambda value: repr(value)[:60])
def test_the_audits_reader_and_the_verifier_agree_though_they_share_no_code(answer, ends_right, right):
    reading = audit.read(ASKED, answer)
    assert (reading.ends_right, reading.right) == (ends_right, right)
    assert sums.correct([ASKED], [answer], ["forty-two"]) == [right]


def test_the_audits_reader_forgives_a_stammer_and_the_verifier_does_not():
    answer = "Twenty-seven plus fifteen is is forty-two."
    assert audit.read(ASKED, answer).right
    assert sums.correct([ASKED], [answer], ["forty-two"]) == [0]


def test_what_the_verifier_calls_right_the_audit_does_too_and_they_differ_on_one_in_fifty():
    rng, scores, read = random.Random(0), [], []
    for _ in range(3000):
        problem = sums.problem(*make.draw_pair(rng), rng.randrange(3))
        answer, _ = make.honest_answer(rng, problem)
        scores.append(make.true_scores(problem, answer))
        read.append(audit.read(problem["prompt"], answer).scores)
    too_lenient = sum(true[0] == 5 and other[0] == 1 for true, other in zip(scores, read, strict=True))
    differ = sum(true != other for true, other in zip(scores, read, strict=True))
    assert too_lenient <= 1 and 0 < differ < 60


def test_the_judge_learns_from_every_score_and_from_right_totals_of_wrong_sums():
    rng = random.Random(1)
    scores, hacks = [Counter(), Counter(), Counter()], 0
    for _ in range(2000):
        problem = sums.problem(*make.draw_pair(rng), rng.randrange(3))
        answer, true = make.honest_answer(rng, problem)
        for counter, score in zip(scores, true, strict=True):
            counter[score] += 1
        hacks += true[0] == 1 and numbers_in(answer)[-1:] == numbers_in(problem["answer"])
    assert min(scores[0][1], scores[0][5], scores[2][1], scores[2][5]) > 600
    assert min(scores[1][score] for score in (1, 3, 5)) > 300 and hacks > 400


def test_a_line_of_the_log_takes_numpys_figures(tmp_path):
    with (tmp_path / "make.log").open("w") as file:
        make.log(file, {"stage": "first", "step": 100, "minutes": 1.23456, "plain": np.float32(0.98765)})
    line = '{"stage": "first", "step": 100, "minutes": 1.235, "plain": 0.988}\n'
    assert (tmp_path / "make.log").read_text() == line


def lessons_of(stage):
    _, tokenizer = gwen.load("demo")
    return tokenizer, make.Lessons(tokenizer, rubrics.load_rubric(audit.RUBRIC), 0, stage)


def test_the_judge_marks_each_number_where_it_ends():
    tokenizer, lessons = lessons_of(make.STAGES[1])
    problem = sums.problem(27, 15, 0)
    marks = lessons.marks(problem, "Twenty-seven plus twenty is 42.")
    prompt = lessons.judge_prompts(problem["prompt"], "Twenty-seven plus twenty is 42.")[0]
    assert [tokenizer.decode(prompt[place]) for place in marks] == ["-seven", " twenty", "2"]
    assert [tokenizer.decode(token) for token in marks.values()] == ["5", "1", "5"]
    assert not lessons.marks(problem, "Forty-two.</answer>") and not lessons.marks(problem, "")


def test_the_first_stage_marks_nothing_and_gives_each_problem_one_answer():
    _, lessons = lessons_of(make.STAGES[0])
    problems = [lessons.judged()[0] for _ in range(20)]
    assert not any(lessons.judge(0).marks for _ in range(20))
    assert all(one is not other for one, other in pairwise(problems))
