"""What every judge does, tested with a fake one: cached scores, unreadable scores, the warning about these."""

import json
import math
import time
import types
from pathlib import Path

import hypothesis
import numpy as np
import pytest
from conftest import catch_message
from hypothesis import strategies

from disk import hub
from judging import rubrics
from judging.evaluations import (
    CriterionEvaluation,
    evaluation_from_first_logprobs,
    evaluation_from_reply,
    token_ids_by_score,
)
from judging.grader import Grader
from judging.replies import read_score

RUBRIC = rubrics.load_rubric("data/demo_rubric.yaml")
DEMO = hub.load_tokenizer(hub.DEMO)


class FakeJudge(Grader):
    """
    Scores texts by their lengths.

    The first criterion cannot score a completion that contains "?".
    """

    def __init__(self, name="fake"):
        super().__init__(RUBRIC)
        self.mode = "logits"
        self.name = name
        self.received_questions = []

    def scoring_digest(self):
        return self.name

    def score_questions(self, questions):
        self.received_questions.append([tuple(question) for question in questions])
        for index, question in enumerate(questions):
            score = score_question(*question)
            yield index, CriterionEvaluation(score, question_mass(question), "hm")


def is_unreadable(question):
    return question[2] == 0 and "?" in question[1]


def question_mass(question):
    """The probability mass on score tokens that the fake judge reports for a question."""
    if is_unreadable(question):
        return 0.25
    return 1.0 if question[2] else 0.75


def score_question(prompt, completion, criterion):
    if criterion == 0:
        return np.nan if is_unreadable((prompt, completion, criterion)) else 1.0
    text = prompt if criterion == 1 else completion
    return 1.0 + len(text) % 5


def make_questions(*pairs):
    """All questions about these pairs of a prompt and a completion."""
    return [(*pair, criterion) for pair in pairs for criterion in range(3)]


PAIRS = strategies.tuples(
    strategies.sampled_from(["a", "ab"]), strategies.sampled_from(["c", "bc", "x?", "bc?", ""])
)


@hypothesis.given(strategies.lists(strategies.lists(PAIRS, max_size=6), max_size=5))
def test_the_judge_gets_each_question_until_a_readable_score_and_equal_rows_share_the_score(
    calls,
):
    judge = FakeJudge()
    answered_questions = set()
    for pairs in calls:
        judge.received_questions.clear()
        result = judge.score([prompt for prompt, _ in pairs], [text for _, text in pairs])

        questions = make_questions(*dict.fromkeys(pairs))
        new_questions = [question for question in questions if question not in answered_questions]
        assert judge.received_questions == ([new_questions] if new_questions else [])
        answered_questions |= {
            question for question in new_questions if not is_unreadable(question)
        }

        expected_scores = [score_question(*question) for question in make_questions(*pairs)]
        expected_scores = np.array(expected_scores).reshape(-1, 3)
        np.testing.assert_array_equal(result.scores, expected_scores)
        expected_rewards = rubrics.weighted_sum_of_centered_scores(expected_scores, RUBRIC)
        np.testing.assert_allclose(result.rewards, expected_rewards)

        assert result.num_unreadable == np.isnan(expected_scores).sum()
        assert result.num_cached == len(questions) - len(new_questions)
        assert result.num_evaluations == len(new_questions)
        expected_mass = np.nan
        if new_questions:
            expected_mass = np.mean([question_mass(question) for question in new_questions])
        assert result.mass == pytest.approx(expected_mass, nan_ok=True)


def test_a_judge_does_not_use_the_cached_scores_of_another_judge():
    first_judge = FakeJudge("one")
    second_judge = FakeJudge("two")
    first_judge.score(["a"], ["x"])
    second_judge.cache = first_judge.cache
    second_judge.score(["a"], ["x"])
    assert second_judge.received_questions == [make_questions(("a", "x"))]


def test_the_cache_has_a_score_as_soon_as_it_arrives():
    judge = FakeJudge()
    cache_sizes = []
    judge.on_score = lambda: cache_sizes.append(len(judge.cache.scores))
    judge.score(["a"], ["x?"])
    judge.score(["a"], ["y"])
    assert cache_sizes == [1, 2, 3, 4, 5]


def test_scores_that_arrived_before_a_failure_are_not_requested_again():
    judge = FakeJudge()
    score_questions = judge.score_questions

    def score_four_and_fail(questions):
        yield from score_questions(questions[:4])
        raise ValueError("gone")

    judge.score_questions = score_four_and_fail
    with pytest.raises(ValueError, match="gone"):
        judge.score(["a", "b"], ["x", "y"])

    judge.score_questions = score_questions
    assert judge.score(["a", "b"], ["x", "y"]).scores.tolist() == [[1, 2, 2], [1, 2, 2]]
    assert judge.received_questions[1] == [("b", "y", 1), ("b", "y", 2)]


class UnreadableJudge(FakeJudge):
    """Gives no readable score while `is_unreadable` holds."""

    num_evaluations = 0
    is_unreadable = True

    def score_questions(self, questions):
        for index, evaluation in super().score_questions(questions):
            self.num_evaluations += 1
            if self.is_unreadable:
                evaluation = evaluation._replace(score=math.nan)
            yield index, evaluation


def test_a_judge_without_a_readable_score_stops_with_advice():
    judge = UnreadableJudge()
    message = catch_message(judge.score, ["a"] * 100, [str(number) for number in range(100)])
    assert message.startswith(
        "the judge gave no readable score in its first 24 evaluations. For example"
    )
    assert "Try another --judge-model" in message
    assert judge.num_evaluations == 24
    assert "first 3 evaluations" in catch_message(judge.score, ["a"], ["x"])

    # After a readable score, unreadable scores no longer stop the judge.
    judge.is_unreadable = False
    judge.score(["a"], ["x"])
    judge.is_unreadable = True
    rewards = judge.score(["a"] * 30, [f"y{number}" for number in range(30)]).rewards
    assert np.isnan(rewards).all()


def test_a_cache_restored_from_the_saved_scores_equals_the_original():
    judge = FakeJudge()
    resumed_judge = FakeJudge()
    lines = []
    for text in "stuvwxs":
        judge.score(["a"], [text])
        lines += [json.dumps({"step": 1} | record) for record in judge.take_unsaved_scores()]

    resumed_judge.replace_cached_scores([json.loads(line) for line in lines])
    assert list(resumed_judge.cache.scores.items()) == list(judge.cache.scores.items())
    assert resumed_judge.take_unsaved_scores() == []
    assert judge.take_unsaved_scores() == []


@pytest.mark.parametrize(
    "record", [[], {"key": 3, "score": 1.0}, {"key": "a", "score": "1"}, {"key": "a", "score": 6.0}]
)
def test_a_record_without_a_valid_score_is_refused(record):
    with pytest.raises(ValueError, match="remove that line"):
        FakeJudge().replace_cached_scores([record])


def test_over_a_fifth_of_unreadable_scores_gives_one_warning_with_an_example(capsys):
    judge = FakeJudge()

    def score_and_read_warning(*completions):
        judge.score(["Add one and two."] * len(completions), list(completions))
        return capsys.readouterr().err

    for index in range(20):
        assert score_and_read_warning(f"{index}?", f"{index}") == ""  # 1 of 6

    judge.unreadable.num_evaluations = 9
    judge.unreadable.num_unreadable = 1
    warning = score_and_read_warning("d?", "e?", "f?", "g?")  # 5 of 21: 24%
    assert "5 of 21 of the judge" in warning
    assert "criterion 'correct'" in warning
    assert "'d?'" in warning
    assert "Add one and two." in warning
    assert "0.250" in warning
    assert "\n" not in warning.strip()

    assert score_and_read_warning("h?", "i?") == ""
    assert score_and_read_warning("j?", "k?", "l?") == ""  # 10 of 36


# ---- reading scores from replies


def test_the_score_tokens_of_a_vocabulary_are_digits_with_or_without_a_space_mark():
    for digit, ids in zip("12345", token_ids_by_score(DEMO), strict=True):
        assert [DEMO.decode([id]) for id in ids] == [digit]

    tokens = [
        mark + digit for digit in "12345" for mark in ("", "\u2581", "\u0120", "1", "\u2581 0")
    ]
    vocabulary = {token: id for id, token in enumerate(tokens)}
    fake_tokenizer = types.SimpleNamespace(get_vocab=lambda: vocabulary)
    assert token_ids_by_score(fake_tokenizer) == [
        [first, first + 1, first + 2] for first in range(0, 25, 5)
    ]

    fake_tokenizer.get_vocab = lambda: {"1": 0, "2": 1, "4": 2}
    with pytest.raises(ValueError, match=r"token for 3, 5.*--judge-mode decode"):
        token_ids_by_score(fake_tokenizer)


REPLIES = [
    json.loads(line) for line in Path("tests/judge_replies.jsonl").read_text("utf8").splitlines()
]


@pytest.mark.parametrize("end", ["whole", "cut"])
def test_the_parser_reads_the_recorded_score_of_each_reply(end):
    replies = [(reply, score) for reply, reply_end, score in REPLIES if reply_end == end]
    assert len(replies) > 20
    for reply, score in replies:
        assert read_score(reply, end == "cut") == score, reply


def test_the_examples_in_the_documentation_have_the_documented_scores():
    page = Path("docs/judge.md").read_text("utf8")
    table = page.partition("| rule | reply | score |")[2].partition("\n\n")[0]
    rows = [line.split(" | ") for line in table.splitlines()[2:]]
    assert len(rows) > 10
    for _, reply, score in rows:
        expected_score = None if "unreadable" in score else int(score.strip(" |"))
        assert read_score(reply.strip("`")) == expected_score, reply


def test_a_score_at_the_end_counts_only_in_a_complete_reply():
    scores_at_the_end = (
        "The answer is clear. I give 4",
        "It is clear.\n\n4",
        "Scrutiny: 4",
        "It gets 4 of 5",
    )
    for reply in scores_at_the_end:
        assert read_score(reply) == 4
        assert read_score(reply, was_cut=True) is None

    scores_at_the_beginning = (
        "4\n\nIt names",
        "Score: 4\n\nIt names",
        '{"score": 4, "reason": "It',
    )
    for reply in scores_at_the_beginning:
        assert read_score(reply) == 4
        assert read_score(reply, was_cut=True) == 4


def test_a_readable_reply_has_mass_1_and_an_unreadable_one_has_no_score():
    assert evaluation_from_reply("Score: 4") == (4.0, 1.0, "Score: 4")
    unreadable = evaluation_from_reply("Score: 4 or 5")
    np.testing.assert_equal(unreadable, (math.nan, 0.0, "Score: 4 or 5"))


@pytest.mark.parametrize(
    "part",
    [
        "score ",
        "score (",
        "{",
        '{"a":',
        "[[",
        "1 ",
        "1\n",
        "<think>",
        "</think>",
        "_",
        " ",
        "note a b ",
        "4, ",
    ],
)
def test_a_long_repetitive_reply_is_read_quickly(part):
    begin = time.process_time()
    read_score(part * (200_000 // len(part)))
    assert time.process_time() - begin < 1  # at most 0.03 s


@hypothesis.given(strategies.text())
def test_any_text_gives_a_score_or_none(text):
    assert read_score(text) in (None, 1, 2, 3, 4, 5)


def test_a_digit_token_with_or_without_a_space_mark_gives_a_score():
    tokens = ["5", " 5", "\u01205", "\u25815", "6", "0", "55", "", "five", "5.", "\u0665"]
    scores = [evaluation_from_first_logprobs({token: 0.0})[0] for token in tokens]
    np.testing.assert_array_equal(scores, [5] * 4 + [math.nan] * 7)
