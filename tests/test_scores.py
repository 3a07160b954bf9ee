"""What all judges share, on one that is made up: remembered scores, unreadable ones, and the warning of them."""

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


class Made(Grader):
    """Scores that are the lengths of the texts; what holds a "?" is unreadable by the first criterion."""

    def __init__(self, name="made"):
        super().__init__(RUBRIC)
        self.mode, self.name, self.asked = "logits", name, []

    def scoring_digest(self):
        return self.name

    def score_questions(self, questions):
        self.asked.append([tuple(question) for question in questions])
        for place, question in enumerate(questions):
            mass = 1.0 if question.criterion else 0.75
            yield (
                place,
                CriterionEvaluation(
                    score_of(*question), 0.25 if is_unread(question) else mass, "hm"
                ),
            )


def is_unread(question):
    return question[2] == 0 and "?" in question[1]


def score_of(prompt, completion, column):
    unread = is_unread((prompt, completion, column))
    return [np.nan if unread else 1.0, 1.0 + len(prompt) % 5, 1.0 + len(completion) % 5][column]


def whole(*pairs):
    """All questions about these pairs."""
    return [(*pair, column) for pair in pairs for column in range(3)]


PAIRS = strategies.tuples(
    strategies.sampled_from(["a", "ab"]), strategies.sampled_from(["c", "bc", "x?", "bc?", ""])
)


@hypothesis.given(strategies.lists(strategies.lists(PAIRS, max_size=6), max_size=5))
def test_every_question_is_put_once_until_it_is_read_and_its_score_is_that_of_every_equal_row(
    calls,
):
    made, known = Made(), set()
    for pairs in calls:
        made.asked.clear()
        judged = made.score([prompt for prompt, _ in pairs], [text for _, text in pairs])
        questions = whole(*dict.fromkeys(pairs))
        put = [question for question in questions if question not in known]
        assert made.asked == ([put] if put else [])
        known |= {question for question in put if not is_unread(question)}
        expected = np.array([score_of(*question) for question in whole(*pairs)]).reshape(-1, 3)
        np.testing.assert_array_equal(judged.scores, expected)
        np.testing.assert_allclose(
            judged.rewards, rubrics.weighted_sum_of_centered_scores(expected, RUBRIC)
        )
        assert judged.num_unreadable == np.isnan(expected).sum() and judged.num_cached == len(
            questions
        ) - len(put)
        masses = [0.25 if is_unread(one) else 1.0 if one[2] else 0.75 for one in put]
        assert judged.num_evaluations == len(put)
        assert judged.mass == pytest.approx(np.mean(masses) if put else np.nan, nan_ok=True)


def test_another_judge_does_not_take_the_scores_of_this_one():
    made, other = Made("one"), Made("two")
    made.score(["a"], ["x"])
    other.cache = made.cache
    other.score(["a"], ["x"])
    assert other.asked == [whole(("a", "x"))]


def test_a_score_is_known_as_soon_as_it_arrives():
    made, known = Made(), []
    made.on_score = lambda: known.append(len(made.cache.scores))
    made.score(["a"], ["x?"])
    made.score(["a"], ["y"])
    assert known == [1, 2, 3, 4, 5]


def test_what_arrived_before_a_judge_failed_is_not_asked_again():
    made = Made()
    evaluations = made.score_questions

    def fail(questions):
        yield from evaluations(questions[:4])
        raise ValueError("gone")

    made.score_questions = fail
    with pytest.raises(ValueError, match="gone"):
        made.score(["a", "b"], ["x", "y"])
    made.score_questions = evaluations
    assert made.score(["a", "b"], ["x", "y"]).scores.tolist() == [[1, 2, 2], [1, 2, 2]]
    assert made.asked[1] == [("b", "y", 1), ("b", "y", 2)]


class Mute(Made):
    """Nothing that it says is readable until it is told otherwise."""

    num_said = 0
    is_mute = True

    def score_questions(self, questions):
        for place, found in super().score_questions(questions):
            self.num_said += 1
            yield place, found._replace(score=math.nan) if self.is_mute else found


def test_a_judge_without_one_readable_score_is_given_up_in_a_line_that_says_what_to_do():
    mute = Mute()
    text = catch_message(mute.score, ["a"] * 100, [str(number) for number in range(100)])
    assert text.startswith(
        "the judge gave no readable score in its first 24 evaluations. For example"
    )
    assert "Try another --judge-model" in text
    assert mute.num_said == 24
    assert "first 3 evaluations" in catch_message(mute.score, ["a"], ["x"])
    mute.is_mute = False
    mute.score(["a"], ["x"])
    mute.is_mute = True  # by now it is known to be readable
    assert np.isnan(mute.score(["a"] * 30, [f"y{number}" for number in range(30)]).rewards).all()


def test_a_cache_filled_from_its_record_goes_on_as_if_it_had_never_stopped():
    made, resumed, lines = Made(), Made(), []
    for text in "stuvwxs":
        made.score(["a"], [text])
        lines += [json.dumps({"step": 1} | record) for record in made.take_unsaved_scores()]
    resumed.replace_cached_scores([json.loads(line) for line in lines])
    assert list(resumed.cache.scores.items()) == list(made.cache.scores.items())
    assert resumed.take_unsaved_scores() == [] and made.take_unsaved_scores() == []


@pytest.mark.parametrize(
    "record", [[], {"key": 3, "score": 1.0}, {"key": "a", "score": "1"}, {"key": "a", "score": 6.0}]
)
def test_a_record_that_is_no_score_is_refused(record):
    with pytest.raises(ValueError, match="remove that line"):
        Made().replace_cached_scores([record])


def test_over_a_fifth_of_unreadable_evaluations_is_warned_of_once_with_an_example(capsys):
    made = Made()

    def warned(*completions):
        made.score(["Add one and two."] * len(completions), list(completions))
        return capsys.readouterr().err

    for index in range(20):
        assert warned(f"{index}?", f"{index}") == ""  # 1 of 6
    made.unreadable.num_evaluations = 9
    made.unreadable.num_unreadable = 1
    said = warned("d?", "e?", "f?", "g?")  # 5 of 21: 24%
    assert "5 of 21 of the judge" in said and "criterion 'correct'" in said and "'d?'" in said
    assert "Add one and two." in said and "0.250" in said and "\n" not in said.strip()
    assert warned("h?", "i?") == warned("j?", "k?", "l?") == ""  # 10 of 36


# ---- reading


def test_the_score_tokens_of_a_vocabulary_are_its_digits_with_and_without_the_mark_of_a_space():
    assert [[DEMO.decode([i]) for i in ids] for ids in token_ids_by_score(DEMO)] == [
        [s] for s in "12345"
    ]
    words = [
        mark + digit for digit in "12345" for mark in ("", "\u2581", "\u0120", "1", "\u2581 0")
    ]
    theirs = types.SimpleNamespace(
        get_vocab=lambda: {word: place for place, word in enumerate(words)}
    )
    assert token_ids_by_score(theirs) == [
        [first, first + 1, first + 2] for first in range(0, 25, 5)
    ]
    theirs.get_vocab = lambda: {"1": 0, "2": 1, "4": 2}
    with pytest.raises(ValueError, match=r"token for 3, 5.*--judge-mode decode"):
        token_ids_by_score(theirs)


REPLIES = [
    json.loads(line) for line in Path("tests/judge_replies.jsonl").read_text("utf8").splitlines()
]


@pytest.mark.parametrize("end", ["whole", "cut"])
def test_a_reply_has_the_score_that_the_rules_give_it_or_none(end):
    replies = [(reply, score) for reply, ending, score in REPLIES if ending == end]
    read = [(reply, read_score(reply, end == "cut")) for reply, _ in replies]
    assert len(replies) > 20 and read == replies


def test_the_examples_in_the_documentation_are_read_as_it_says():
    table = (
        Path("docs/judge.md")
        .read_text("utf8")
        .partition("| rule | reply | score |")[2]
        .partition("\n\n")[0]
    )
    rows = [line.split(" | ") for line in table.splitlines()[2:]]
    assert len(rows) > 10
    for _, reply, score in rows:
        expected = None if "unreadable" in score else int(score.strip(" |"))
        assert read_score(reply.strip("`")) == expected, reply


def test_a_score_that_neither_opens_a_reply_nor_has_a_label_counts_only_if_it_was_not_cut():
    for reply in (
        "The answer is clear. I give 4",
        "It is clear.\n\n4",
        "Scrutiny: 4",
        "It gets 4 of 5",
    ):
        assert read_score(reply) == 4 and read_score(reply, was_cut=True) is None
    for reply in ("4\n\nIt names", "Score: 4\n\nIt names", '{"score": 4, "reason": "It'):
        assert read_score(reply) == read_score(reply, was_cut=True) == 4


def test_a_readable_reply_has_mass_1_and_an_unreadable_one_is_never_neutral():
    assert evaluation_from_reply("Score: 4") == (4.0, 1.0, "Score: 4")
    np.testing.assert_equal(
        evaluation_from_reply("Score: 4 or 5"), (math.nan, 0.0, "Score: 4 or 5")
    )


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
def test_a_long_reply_that_repeats_a_part_is_read_at_once(part):
    begin = time.process_time()
    read_score(part * (200_000 // len(part)))
    assert time.process_time() - begin < 1  # at most 0.03 s


@hypothesis.given(strategies.text())
def test_any_text_is_read_as_a_score_or_as_none(text):
    assert read_score(text) in (None, 1, 2, 3, 4, 5)


def test_a_token_is_a_digit_with_or_without_the_mark_of_a_space():
    tokens = ["5", " 5", "\u01205", "\u25815", "6", "0", "55", "", "five", "5.", "\u0665"]
    scores = [evaluation_from_first_logprobs({token: 0.0})[0] for token in tokens]
    np.testing.assert_array_equal(scores, [5] * 4 + [math.nan] * 7)
