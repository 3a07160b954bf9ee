"""The demo's verifier and its audit: what is true of an answer, told by two readers that share no code."""

import shutil
from pathlib import Path

import pytest
from conftest import catch_message, read_log, write_log

from bench import answers as audit
from tasks import demo as sums
from tasks.demo import number_in_words, numbers_in_words_or_digits

ASKED = "What is twenty-seven plus fifteen?"
READ = read_log(
    Path(__file__).parent / "sums.jsonl"
)  # answer, whether its last number is the sum, whether it is right


@pytest.mark.parametrize(
    ("answer", "ends_right", "right"), READ, ids=lambda value: repr(value)[:60]
)
def test_the_audits_reader_and_the_verifier_agree_though_they_share_no_code(
    answer, ends_right, right
):
    reading = audit.audit_answer(ASKED, answer)
    assert (reading.ends_right, reading.right) == (ends_right, right)
    assert sums.correct([ASKED], [answer], ["forty-two"]) == [right]


def test_a_number_with_the_long_s_that_upper_and_lower_case_share_is_read():
    assert numbers_in_words_or_digits("\u017feven, Twenty-\u017fix") == [7, 26]


def test_the_audits_reader_forgives_a_stammer_and_the_verifier_other_words_for_plus_and_is():
    for answer, audited, verified in (
        ("Twenty-seven plus fifteen is is forty-two.", True, 0),
        ("So 27 and fifteen more makes **42**!", False, 1),
    ):
        assert audit.audit_answer(ASKED, answer).right == audited
        assert sums.correct([ASKED], [answer], ["forty-two"]) == [verified]


def test_of_recorded_answers_the_audit_calls_those_right_that_the_verifier_does():
    for prompt, answer, scores in read_log(Path(__file__).parent / "judged_answers.jsonl"):
        right = number_in_words(sum(numbers_in_words_or_digits(prompt)))
        assert audit.audit_answer(prompt, answer).right == bool(
            sums.correct([prompt], [answer], [right])[0]
        )
        assert audit.audit_answer(prompt, answer).right == (scores[0] == 5)


def test_the_audit_of_a_run_counts_its_first_and_its_newest_evaluation(golden, capsys, tmp_path):
    run = golden("grpo")
    audit.main(["--show", "2", str(run)])
    *shown, num, _, first, newest, mean, least, most = capsys.readouterr().out.splitlines()
    evals = read_log(run / "eval.jsonl")
    for line, record in ((first, evals[0]), (newest, evals[-1])):
        assert line.split()[-4::2] == [
            f"{record[name]:.1%}" for name in ("eval/accuracy", "eval/greedy")
        ]
    assert (
        first.startswith("before training") and newest.startswith(str(run)) and num == "8 answers"
    )
    assert [line.split()[1:] for line in (mean, least, most)] == [newest.split()[1:]] * 3
    recorded = read_log(run / "eval_answers.jsonl")
    told = [
        f"{recorded[place]['prompt']} {recorded[place]['completions'][0]!r}"
        for place in (0, 4, -8, -4)
    ]
    assert [line.partition(": ")[2] for line in shown] == told
    shutil.copy(run / "config.yaml", tmp_path)
    write_log(tmp_path / "eval_answers.jsonl", [one for one in recorded if not one["step"]])
    for other in (golden("sft"), tmp_path):  # of another task, and before its first steps
        assert "has no evaluations of --task demo both before and after" in catch_message(
            audit.load_untrained_and_newest_answers, [other]
        )
