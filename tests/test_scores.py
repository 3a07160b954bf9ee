"""What all judges share, on one that is made up: remembered scores, unreadable ones, and the warning of them."""

import json
import math

import numpy as np
import pytest
from conftest import message_of
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from disk import hub
from judging import rubrics

RUBRIC = rubrics.load_rubric("data/demo_rubric.yaml")
DEMO = hub.load_tokenizer(hub.DEMO)


class Made(rubrics.Grader):
    """Scores that are the lengths of the texts; what holds a "?" is unreadable by the first criterion."""

    def __init__(self, name="made", unread="?"):
        super().__init__(RUBRIC)
        self.mode = "logits"
        self.name, self.unread, self.asked = name, unread, []

    def identity(self):
        return self.name

    def evaluations(self, questions):
        self.asked.append([tuple(question) for question in questions])
        for place, (prompt, completion, column) in enumerate(questions):
            unread = column == 0 and self.unread in completion
            score = [1.0, 1.0 + len(prompt) % 5, 1.0 + len(completion) % 5][column]
            mass = [0.25 if unread else 0.75, 1.0, 1.0][column]
            yield place, rubrics.Evaluation(np.nan if unread else score, mass, "hm")


def whole(*pairs):
    """All questions about these pairs."""
    return [(*pair, column) for pair in pairs for column in range(3)]


def test_equal_pairs_are_evaluated_once_and_get_equal_scores_in_their_places():
    made = Made()
    judged = made.score(["a", "bb", "a", "a"], ["x", "x", "yy", "x"])
    assert made.asked == [whole(("a", "x"), ("bb", "x"), ("a", "yy"))]
    assert judged.scores.tolist() == [[1, 2, 2], [1, 3, 2], [1, 2, 3], [1, 2, 2]]
    np.testing.assert_allclose(judged.rewards, rubrics.rubric_reward(judged.scores, RUBRIC))
    assert (judged.stats.num_evaluations, judged.stats.num_cached, judged.unparsed) == (9, 0, 0)
    assert judged.stats.mass == pytest.approx((0.75 + 1 + 1) / 3)


def test_a_score_that_is_known_is_not_paid_for_again_and_is_the_same():
    made = Made()
    first = made.score(["a", "a"], ["x", "yy"])
    again = made.score(["a", "a", "a"], ["yy", "zzz", "x"])
    assert made.asked[1:] == [whole(("a", "zzz"))]
    assert again.scores[[2, 0]].tolist() == first.scores.tolist()
    assert (again.stats.num_evaluations, again.stats.num_cached) == (3, 6)
    all_known = made.score(["a"], ["x"])
    assert len(made.asked) == 2 and np.isnan(all_known.stats.mass) and all_known.stats.num_evaluations == 0


def test_the_boundary_of_prompt_and_completion_is_part_of_what_is_known():
    made = Made()
    made.score(["ab"], ["c"])
    made.score(["a"], ["bc"])
    assert len(made.asked) == 2


def test_another_judge_does_not_take_the_scores_of_this_one():
    made, other = Made("one"), Made("two")
    made.score(["a"], ["x"])
    other.cache = made.cache
    other.score(["a"], ["x"])
    assert other.asked == [whole(("a", "x"))]


def test_what_could_not_be_read_is_asked_again_and_nothing_else():
    made = Made()
    for _ in range(2):
        assert np.isnan(made.score(["a"], ["x?"]).scores).tolist() == [[True, False, False]]
    assert made.asked[1:] == [[("a", "x?", 0)]]


def test_a_score_is_known_as_soon_as_it_arrives():
    made, known = Made(), []
    made.on_score = lambda: known.append(len(made.cache.scores))
    made.score(["a"], ["x?"])
    made.score(["a"], ["y"])
    assert known == [1, 2, 3, 4, 5]


def test_what_arrived_before_a_judge_failed_is_not_asked_again():
    made = Made()
    evaluations = made.evaluations

    def fail(questions):
        yield from evaluations(questions[:4])
        raise ValueError("gone")

    made.evaluations = fail
    with pytest.raises(ValueError, match="gone"):
        made.score(["a", "b"], ["x", "y"])
    made.evaluations = evaluations
    assert made.score(["a", "b"], ["x", "y"]).scores.tolist() == [[1, 2, 2], [1, 2, 2]]
    assert made.asked[1] == [("b", "y", 1), ("b", "y", 2)]


class Mute(Made):
    """Nothing that it says is readable until it is told otherwise."""

    num_said = 0
    is_mute = True

    def evaluations(self, questions):
        for place, found in super().evaluations(questions):
            self.num_said += 1
            yield place, found._replace(score=math.nan) if self.is_mute else found


def test_a_judge_without_one_readable_score_is_given_up_in_a_line_that_says_what_to_do():
    mute = Mute()
    mute.allow_unreadable = False
    text = message_of(mute.score, ["a"] * 100, [str(number) for number in range(100)])
    assert text.startswith("the judge gave no readable score: none of its first 24 evaluations has one. For example")
    assert "Try another --judge-model" in text
    assert mute.num_said == 24
    assert "none of its first 3 evaluations" in message_of(mute.score, ["a"], ["x"])
    mute.is_mute = False
    mute.score(["a"], ["x"])
    mute.is_mute = True  # by now it is known to be readable
    assert np.isnan(mute.score(["a"] * 30, [f"y{number}" for number in range(30)]).rewards).all()
    going_on = Mute()
    assert np.isnan(going_on.score(["a"], ["x"]).scores).all()


def test_the_cache_is_bounded_and_drops_the_oldest_first():
    made = Made()
    made.cache.limit = 9
    for text in "uvwx":
        made.score(["a"], [text])
    made.asked.clear()
    made.score(["a"] * 3, list("vwx"))
    assert made.asked == [] and len(made.cache.scores) == 9
    made.score(["a"], ["u"])
    assert made.asked == [whole(("a", "u"))]


def test_a_cache_filled_from_its_record_goes_on_as_if_it_had_never_stopped():
    made, resumed, lines = Made(), Made(), []
    made.cache.limit = resumed.cache.limit = 12
    for text in "stuvwxs":
        made.score(["a"], [text])
        lines += [json.dumps({"step": 1} | record) for record in made.cache.take_fresh()]
    resumed.cache.fill([json.loads(line) for line in lines])
    assert list(resumed.cache.scores.items()) == list(made.cache.scores.items())
    assert resumed.cache.take_fresh() == [] and made.cache.take_fresh() == []


@pytest.mark.parametrize(
    "record", [[], {"key": 3, "score": 1.0}, {"key": "a", "score": "1"}, {"key": "a", "score": 6.0}]
)
def test_a_record_that_is_no_score_is_refused(record):
    with pytest.raises(ValueError, match="remove that line"):
        Made().cache.fill([record])


def test_no_pairs_are_no_work():
    judged = Made().score([], [])
    assert judged.scores.shape == (0, 3) and judged.rewards.shape == (0,) and judged.unparsed == 0


def test_over_a_fifth_of_unreadable_evaluations_is_warned_of_once_with_an_example(capsys):
    made = Made()

    def warned(*completions):
        made.score(["Add one and two."] * len(completions), list(completions))
        return capsys.readouterr().err

    assert warned("a", "b", "c?") == ""  # 1 of 9
    said = warned("d?", "e?", "f?", "g?")  # 5 of 21: 24%
    assert "5 of 21 evaluations" in said and "(24%)" in said and "'correct' of the answer 'd?'" in said
    assert "Add one and two." in said and "'hm', with 0.250" in said and "\n" not in said.strip()
    assert warned("h?", "i?") == ""
    assert warned("j?", "k?", "l?") == ""  # 10 of 36


def test_a_few_unreadable_evaluations_are_not_warned_of(capsys):
    made = Made()
    for index in range(20):
        made.score(["a"] * 2, [f"{index}?", f"{index}"])  # 1 of 6
    assert capsys.readouterr().err == ""


# ---- reading


def test_the_score_tokens_of_the_demo_s_tokenizer_are_the_digits():
    assert [[DEMO.decode([i]) for i in ids] for ids in rubrics.score_token_ids(DEMO)] == [[s] for s in "12345"]


def small_tokenizer(words, pre_tokenizer, decoder):
    vocabulary = {word: i for i, word in enumerate(["<unk>", *words])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer, backend.decoder = pre_tokenizer, decoder
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")


def test_score_tokens_are_found_with_and_without_the_space_that_a_vocabulary_marks():
    words = [mark + digit for digit in "12345" for mark in ("", "\u2581")]
    theirs = small_tokenizer(words, pre_tokenizers.Metaspace(), decoders.Metaspace())
    assert rubrics.score_token_ids(theirs) == [[1, 2], [3, 4], [5, 6], [7, 8], [9, 10]]


def test_a_tokenizer_without_tokens_for_the_digits_is_refused_by_the_digits_that_are_missing():
    theirs = small_tokenizer(["1", "2", "4"], pre_tokenizers.Whitespace(), decoders.WordPiece())
    with pytest.raises(ValueError, match=r"no token of its own for 3, 5.*--judge-mode decode"):
        rubrics.score_token_ids(theirs)


@pytest.mark.parametrize(
    ("reply", "score"),
    [
        ("5", 5),
        (" 4\n", 4),
        ("Score: 3.", 3),
        ("**2**", 2),
        ("The score is 1, since 2 is wrong", 2),  # the last
        ("4/5", 4),
        ("4 / 5", 4),
        ("3 out of 5", 3),
        ("The answer gets 4 of 5", 4),
        ("**4** of 5 points", 4),
        ("I give 2 (out of 5).", 2),
        ("4/5.", 4),
        ("a score of 5", 5),
        ("3.5 of 5", math.nan),
        ("4 on a scale of 1-5", 4),
        ("On a scale from 1 to 5: 2", 2),
        ('{"score": 5}', 5),
        ("<think>2 or 3?</think>\n\n4", 4),
        ("1</think>none", math.nan),
        ("<think>it is 5", math.nan),
        ("10", math.nan),
        ("3.5", math.nan),
        ("-1", math.nan),
        ("7 of 10", math.nan),
        ("5/10", math.nan),
        ("v2", math.nan),
        ("0 6 7", math.nan),
        ("", math.nan),
        ("five", math.nan),
    ],
)
def test_the_last_standalone_digit_after_the_thoughts_is_the_score(reply, score):
    np.testing.assert_equal(rubrics.read_score(reply), float(score))


def test_a_token_is_a_digit_with_or_without_the_mark_of_a_space():
    tokens = ["5", " 5", "\u01205", "\u25815", "6", "0", "55", "", "five", "5.", "\u0665"]
    scores = [rubrics.from_first_tokens({token: 0.0})[0] for token in tokens]
    np.testing.assert_array_equal(scores, [5] * 4 + [math.nan] * 7)
