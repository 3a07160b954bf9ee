"""The form of an answer: what is none is told from what is, and a gate takes its reward away."""

from pathlib import Path

import numpy as np
import pytest
from conftest import read_log
from small_run import make_run

import train
from rewards import form, rewards
from rewards.form import rewards_capped_at_0_if_gate_fails

ASKED = "Describe water. Use at most 10 words."
FORMS = read_log(
    Path(__file__).with_name("forms.jsonl")
)  # cheats were said by models paid for following instructions


@pytest.mark.parametrize(("honest", "asked", "said"), FORMS)
def test_answers_of_people_have_a_form_and_repetitions_and_copies_none(honest, asked, said):
    assert (
        form.is_long_enough_and_not_degenerate(said, asked) == honest
        and form.repeats_itself_or_copies_prompt(said, asked) != honest
    )


def test_short_answers_are_too_short_but_neither_repetitions_nor_copies():
    assert not form.is_long_enough_and_not_degenerate(
        "yes", "Answer yes or no."
    ) and not form.repeats_itself_or_copies_prompt("yes", "Answer yes or no.")
    assert (
        form.fraction_copied_from_prompt("", ASKED) == 0
        and form.distinct_word_fraction_in_chunks("") == 1
        and not form.is_long_enough_and_not_degenerate("", ASKED)
    )


def test_marks_and_numbers_are_no_words_that_repeat():
    working = "6 + 0 = 6, 6 - 1 = 5\n<answer>5</answer>"
    assert form.distinct_word_fraction_in_chunks(
        working
    ) == 1 and not form.repeats_itself_or_copies_prompt(working, "What is 6 + 0 - 1?")
    assert form.lowercase_words("<answer>Six, I think</answer>") == ["six", "i", "think"]


def test_distinct_words_are_counted_in_windows_so_that_length_costs_nothing():
    words = " ".join(f"word{chr(97 + number)}" for number in range(20))
    assert (
        form.distinct_word_fraction_in_chunks(words)
        == form.distinct_word_fraction_in_chunks(f"{words} {words} {words}")
        == 1
    )
    assert form.distinct_word_fraction_in_chunks("a b " * 10) == pytest.approx(2 / 20)


def test_the_copied_share_is_that_of_words_in_runs_of_the_prompt():
    prompt = "one two three four five six seven"
    assert form.fraction_copied_from_prompt(
        "and one two three four five too", prompt
    ) == pytest.approx(5 / 7)
    assert form.fraction_copied_from_prompt("and one two three four too", prompt) == 0
    assert form.fraction_copied_from_prompt("Two, three, four, FIVE!", prompt) == 1
    assert form.fraction_copied_from_prompt(
        "one two three four five six and so on", prompt
    ) == pytest.approx(6 / 9)


def test_the_reward_format_pays_for_finished_answers_with_a_form_that_refuse_nothing():
    name, reward = rewards.load_reward("format:20")
    said = [
        "Water is clear and wet.",
        "Water is clear and wet.",
        ASKED,
        "I cannot say anything of it.",
        "Wet.",
    ]
    columns = {"num_tokens": [19, 20, 9, 9, 3]}
    assert rewards.call_reward_on_rank0(name, reward, [ASKED] * 5, said, columns) == [1, 0, 0, 0, 0]


def test_the_reward_random_is_a_coin_that_a_resumed_run_throws_again():
    name, reward = rewards.load_reward("random")
    thrown = rewards.call_reward_on_rank0(name, reward, ["p"] * 400, ["the same"] * 400, {})
    assert set(thrown) == {0, 1} and 150 < sum(thrown) < 250
    assert thrown == rewards.call_reward_on_rank0(name, reward, ["p"] * 400, ["the same"] * 400, {})
    assert thrown != rewards.call_reward_on_rank0(name, reward, ["p"] * 400, ["another"] * 400, {})


def test_the_gate_takes_what_is_above_zero_and_leaves_what_is_below():
    examples = [{"prompt": ASKED}] * 4
    said = ["Water is clear and wet.", "Water is clear and wet.", ASKED, "Wet."]
    parts = {"a": np.array([1.0, 1.0, 0.5, 1.0]), "b": np.array([-1.0, -1.0, -0.5, np.nan])}
    left = rewards_capped_at_0_if_gate_fails(
        parts, examples, said, ["stop", "length", "stop", "stop"]
    )
    assert left["a"].tolist() == [1, 0, 0, 0]
    np.testing.assert_array_equal(left["b"], parts["b"])
    passed = map(form.passes_form_gate, said, [ASKED] * 4, ["stop", "length", "stop", "stop"])
    assert list(passed) == [True, False, False, False]


@pytest.mark.slow
def test_a_run_with_the_gate_pays_only_for_answers_with_a_form(tmp_path):
    run = make_run(
        tmp_path, "--reward-gate", "form", "--steps", "1", "--eval-every", "0", "--max-tokens", "9"
    )
    list(train.train(run))
    records = run.journal.rollouts.read()
    assert {record["finish_reason"] for record in records} == {"stop", "length"}
    for record in records:
        kept = record["finish_reason"] == "stop" and form.is_long_enough_and_not_degenerate(
            record["completion"], record["prompt"]
        )
        assert kept or all(value <= 0 for value in record["rewards"].values())
    figures = run.journal.steps[-1]
    degenerate = [
        form.repeats_itself_or_copies_prompt(record["completion"], record["prompt"])
        for record in records
    ]
    assert figures["completion/degenerate_frac"] == pytest.approx(np.mean(degenerate))
    repeated = [form.repeated_4gram_fraction(record["completion"]) for record in records]
    assert figures["completion/repeated"] == pytest.approx(np.mean(repeated))
