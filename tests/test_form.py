"""The form of an answer: degenerate answers are recognized, and a gate takes away their reward."""

from pathlib import Path

import numpy as np
import pytest
from conftest import read_log
from small_run import make_run

import train
from rewards import form, rewards
from rewards.form import rewards_capped_at_0_if_form_gate_fails

PROMPT = "Describe water. Use at most 10 words."
# Models that were rewarded for following instructions wrote the degenerate answers.
FORMS = read_log(Path(__file__).with_name("forms.jsonl"))


@pytest.mark.parametrize(("is_honest", "prompt", "answer"), FORMS)
def test_answers_of_people_have_a_form_but_repetitions_and_copies_do_not(is_honest, prompt, answer):
    assert form.is_long_enough_and_not_degenerate(answer, prompt) == is_honest
    assert form.repeats_itself_or_copies_prompt(answer, prompt) != is_honest


def test_short_answers_are_too_short_but_neither_repetitions_nor_copies():
    assert not form.is_long_enough_and_not_degenerate("yes", "Answer yes or no.")
    assert not form.repeats_itself_or_copies_prompt("yes", "Answer yes or no.")
    assert not form.is_long_enough_and_not_degenerate("", PROMPT)
    assert form.fraction_copied_from_prompt("", PROMPT) == 0
    assert form.distinct_word_fraction_in_chunks("") == 1


def test_punctuation_and_numbers_do_not_count_as_repeated_words():
    working = "6 + 0 = 6, 6 - 1 = 5\n<answer>5</answer>"
    assert form.distinct_word_fraction_in_chunks(working) == 1
    assert not form.repeats_itself_or_copies_prompt(working, "What is 6 + 0 - 1?")
    assert form.lowercase_words("<answer>Six, I think</answer>") == ["six", "i", "think"]


def test_distinct_words_are_counted_in_chunks_so_that_long_answers_lose_nothing():
    words = " ".join(f"word{chr(97 + number)}" for number in range(20))
    assert form.distinct_word_fraction_in_chunks(words) == 1
    assert form.distinct_word_fraction_in_chunks(f"{words} {words} {words}") == 1
    assert form.distinct_word_fraction_in_chunks("a b " * 10) == pytest.approx(2 / 20)


def test_the_copied_fraction_counts_the_words_in_long_runs_copied_from_the_prompt():
    def copied_fraction(answer):
        return form.fraction_copied_from_prompt(answer, "one two three four five six seven")

    assert copied_fraction("and one two three four five too") == pytest.approx(5 / 7)
    assert copied_fraction("and one two three four too") == 0
    assert copied_fraction("Two, three, four, FIVE!") == 1
    assert copied_fraction("one two three four five six and so on") == pytest.approx(6 / 9)


def test_the_reward_format_pays_for_complete_answers_with_a_form_that_refuse_nothing():
    name, reward = rewards.load_reward("format:20")
    answers_and_lengths = [
        ("Water is clear and wet.", 19),
        ("Water is clear and wet.", 20),
        (PROMPT, 9),
        ("I cannot say anything of it.", 9),
        ("Wet.", 3),
    ]
    answers = [answer for answer, _ in answers_and_lengths]
    columns = {"num_tokens": [length for _, length in answers_and_lengths]}
    values = rewards.call_reward_on_rank0(name, reward, [PROMPT] * 5, answers, columns)
    assert values == [1, 0, 0, 0, 0]


def test_the_reward_random_is_0_or_1_and_the_same_in_a_resumed_run():
    name, reward = rewards.load_reward("random")

    def random_values(answer):
        return rewards.call_reward_on_rank0(name, reward, ["p"] * 400, [answer] * 400, {})

    values = random_values("the same")
    assert set(values) == {0, 1}
    assert 150 < sum(values) < 250
    assert random_values("the same") == values
    assert random_values("another") != values


def test_the_gate_removes_positive_rewards_and_keeps_negative_ones():
    examples = [{"prompt": PROMPT}] * 4
    answers = ["Water is clear and wet.", "Water is clear and wet.", PROMPT, "Wet."]
    finish_reasons = ["stop", "length", "stop", "stop"]
    components = {"a": np.array([1.0, 1.0, 0.5, 1.0]), "b": np.array([-1.0, -1.0, -0.5, np.nan])}
    gated = rewards_capped_at_0_if_form_gate_fails(components, examples, answers, finish_reasons)
    assert gated["a"].tolist() == [1, 0, 0, 0]
    np.testing.assert_array_equal(gated["b"], components["b"])
    passed = map(form.passes_form_gate, answers, [PROMPT] * 4, finish_reasons)
    assert list(passed) == [True, False, False, False]


@pytest.mark.slow
def test_a_run_with_the_gate_pays_only_for_answers_with_a_form(tmp_path):
    flags = "--reward-gate form --steps 1 --eval-every 0 --max-tokens 9".split()
    run = make_run(tmp_path, *flags)
    list(train.train(run))
    records = run.journal.rollouts.read()
    assert {record["finish_reason"] for record in records} == {"stop", "length"}

    is_degenerate = []
    repeated_fractions = []
    for record in records:
        text = record["completion"]
        has_form = form.is_long_enough_and_not_degenerate(text, record["prompt"])
        passes_gate = record["finish_reason"] == "stop" and has_form
        assert passes_gate or all(value <= 0 for value in record["rewards"].values())
        is_degenerate.append(form.repeats_itself_or_copies_prompt(text, record["prompt"]))
        repeated_fractions.append(form.repeated_4gram_fraction(text))

    metrics = run.journal.steps[-1]
    assert metrics["completion/degenerate_frac"] == pytest.approx(np.mean(is_degenerate))
    assert metrics["completion/repeated"] == pytest.approx(np.mean(repeated_fractions))
