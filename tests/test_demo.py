"""The demo's verifier and its audit: two programs without common code decide whether an answer is right."""

import shutil
from pathlib import Path

import pytest
from conftest import catch_message, read_log, write_log

from bench import answers as audit
from tasks import demo as sums
from tasks.demo import number_in_words, numbers_in_words_or_digits

QUESTION = "What is twenty-seven plus fifteen?"
# An answer, whether its last number is the sum, and whether it is right.
ANSWERS = read_log(Path(__file__).parent / "sums.jsonl")


@pytest.mark.parametrize(
    ("answer", "ends_right", "right"), ANSWERS, ids=lambda value: repr(value)[:60]
)
def test_the_audit_and_the_verifier_agree_on_an_answer(answer, ends_right, right):
    reading = audit.audit_answer(QUESTION, answer)
    assert reading.ends_right == ends_right
    assert reading.right == right
    assert sums.correct([QUESTION], [answer], ["forty-two"]) == [right]


def test_a_number_spelled_with_a_long_s_is_read():
    assert numbers_in_words_or_digits("\u017feven, Twenty-\u017fix") == [7, 26]


def test_the_audit_accepts_a_repeated_word_and_the_verifier_other_words_for_plus_and_is():
    repeated_word = "Twenty-seven plus fifteen is is forty-two."
    assert audit.audit_answer(QUESTION, repeated_word).right
    assert sums.correct([QUESTION], [repeated_word], ["forty-two"]) == [0]

    other_words = "So 27 and fifteen more makes **42**!"
    assert not audit.audit_answer(QUESTION, other_words).right
    assert sums.correct([QUESTION], [other_words], ["forty-two"]) == [1]


def test_the_audit_agrees_with_the_verifier_and_the_judge_on_recorded_answers():
    for prompt, answer, scores in read_log(Path(__file__).parent / "judged_answers.jsonl"):
        right_answer = number_in_words(sum(numbers_in_words_or_digits(prompt)))
        (is_correct,) = sums.correct([prompt], [answer], [right_answer])
        is_right = audit.audit_answer(prompt, answer).right
        assert is_right == bool(is_correct)
        assert is_right == (scores[0] == 5)


def test_the_audit_of_a_run_counts_the_first_and_the_newest_evaluation(golden, capsys, tmp_path):
    run = golden("grpo")
    audit.main(["--show", "2", str(run)])
    output_lines = capsys.readouterr().out.splitlines()
    *answer_lines, num_line, _, first, newest, mean, lowest, highest = output_lines
    assert num_line == "8 answers"

    # A line ends with the accuracy and the greedy accuracy.
    evaluations = read_log(run / "eval.jsonl")
    for line, record in ((first, evaluations[0]), (newest, evaluations[-1])):
        expected_figures = [f"{record[name]:.1%}" for name in ("eval/accuracy", "eval/greedy")]
        assert line.split()[-4::2] == expected_figures
    assert first.startswith("before training")
    assert newest.startswith(str(run))
    for line in (mean, lowest, highest):
        assert line.split()[1:] == newest.split()[1:]

    records = read_log(run / "eval_answers.jsonl")
    expected_answers = []
    for index in (0, 4, -8, -4):
        record = records[index]
        expected_answers.append(f"{record['prompt']} {record['completions'][0]!r}")
    assert [line.partition(": ")[2] for line in answer_lines] == expected_answers

    # One run has another task, and the other has no evaluation after its first step.
    shutil.copy(run / "config.yaml", tmp_path)
    untrained_records = [record for record in records if not record["step"]]
    write_log(tmp_path / "eval_answers.jsonl", untrained_records)
    for other_run in (golden("sft"), tmp_path):
        message = catch_message(audit.load_untrained_and_newest_answers, [other_run])
        assert "lacks an evaluation of --task demo before or after" in message
