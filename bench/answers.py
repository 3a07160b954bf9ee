"""
Audits the recorded answers of demo runs: `uv run python -m bench.answers runs/A runs/B ...`.

The audit reads the first run's first evaluation and each run's newest evaluation, and counts the
right answers. Its code is independent of the verifier that gave the rewards in the runs: the
verifier compares patterns, while the audit computes the value of each statement. An answer that the
audit cannot interpret does not count as right.

`--show 50` prints 50 answers from each evaluation. Before a quality figure is published, somebody
should read fifty of the answers that the figure counts. For the demo task, reading fifty answers
showed that the first quality figures were wrong.
"""

import argparse
import re
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import cpu_blas  # noqa: F401  (before mlx)
import numpy as np
import pandas as pd

from flags import exit_on_mistakes
from machine.output import guard_output
from prompts.examples import pick_evenly_spaced
from reporting import history, seeds

UNITS = "one two three four five six seven eight nine".split()
TEENS = "ten eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen nineteen".split()
TENS = "twenty thirty forty fifty sixty seventy eighty ninety".split()
NUMBERS = {word: number for number, word in enumerate(["zero", *UNITS, *TEENS])}
for ten_number, ten_word in enumerate(TENS, 2):
    NUMBERS[ten_word] = 10 * ten_number
    for unit_number, unit_word in enumerate(UNITS, 1):
        NUMBERS[f"{ten_word}-{unit_word}"] = 10 * ten_number + unit_number
SIGNS = dict.fromkeys(("plus", "and", "+"), "+")
SIGNS |= dict.fromkeys("is are equals equal makes gives has have =".split(), "=")
# words that do not change the meaning of a statement
SILENT = set(
    "the answer sum total of that this it so in all together more add adding , ! ' ( ) $".split()
)

Records = list[dict[str, Any]]


class AnswerAudit(NamedTuple):
    """The result of auditing one answer."""

    ends_right: bool  # whether the answer's last number is the sum of the problem's two numbers
    # whether `ends_right` holds, every statement is true, and all other numbers are the problem's
    right: bool


def audit_answer(problem: str, answer: str) -> AnswerAudit:
    problem_numbers = read_digits_and_number_words(problem)
    answer_numbers = read_digits_and_number_words(answer)
    total = sum(problem_numbers)
    ends_right = answer_numbers[-1:] == [total]
    foreign_numbers = Counter(answer_numbers[:-1]) - Counter(problem_numbers)

    problem_words = set(lowercase_words_and_symbols(problem)) - SIGNS.keys() - NUMBERS.keys()
    meaningless_words = SILENT | problem_words
    statements = [part for part in re.split(r"[.;:\n]", answer) if part.strip()]
    right = (
        ends_right
        and not foreign_numbers
        and all(statement_is_true(statement, total, meaningless_words) for statement in statements)
    )
    return AnswerAudit(ends_right, right)


def lowercase_words_and_symbols(text: str) -> list[str]:
    return re.findall(r"[a-z]+(?:-[a-z]+)*|\d+|[^\sa-z\d]", text.lower())


def read_digits_and_number_words(text: str) -> list[int]:
    """Returns the numbers in a text, written in words or digits, in the order of the text."""
    numbers = []
    for word in lowercase_words_and_symbols(text):
        if word in NUMBERS:
            numbers.append(NUMBERS[word])
        elif re.fullmatch("[0-9]{1,9}", word):
            numbers.append(int(word))
    return numbers


def statement_is_true(statement: str, expected_sum: int, meaningless_words: set[str]) -> bool:
    """
    Whether all sides of a statement such as "x is y" have the same value.

    A side is a number or a sum of numbers. A side without a number, such as "the answer", has the
    value `expected_sum`. If a statement has only one side, this side must equal `expected_sum`.

    meaningless_words: words that do not change the meaning of a statement. A statement counts as
        untrue if it contains a word that is neither one of these words, nor a number, nor in SIGNS.
    """
    equation = ""
    for word in lowercase_words_and_symbols(statement):
        symbol = SIGNS.get(word) or "".join(map(str, read_digits_and_number_words(word)))
        if symbol:
            equation += f"{symbol} "
        elif word not in meaningless_words:
            return False
    sides = equation.split("= ")
    if not all(re.fullmatch(r"(\d+ (\+ \d+ )*)?", side) for side in sides):
        return False
    values = [sum_of_equation_side(side) if side else expected_sum for side in sides]
    if len(sides) == 1:
        return values == [expected_sum]
    return len(set(values)) == 1


def sum_of_equation_side(side: str) -> int:
    """Returns the value of one side of an equation, such as "27 + 15 "."""
    return sum(map(int, re.findall(r"\d+", side)))


def right_and_right_number_only_fractions(records: Records) -> dict[str, float]:
    """
    Returns the fraction of right answers, and of answers in which only the last number is right.

    Both fractions are computed for sampled and for greedy answers. The keys of the result are the
    columns of the printed table.
    """
    sampled = [record["completions"][0] for record in records]
    greedy = [record["greedy"] for record in records]
    fractions = {}
    for prefix, answers in (("", sampled), ("greedy, ", greedy)):
        audits = [
            audit_answer(record["prompt"], answer)
            for record, answer in zip(records, answers, strict=True)
        ]
        right = [audit.right for audit in audits]
        number_only = [audit.ends_right and not audit.right for audit in audits]
        fractions[f"{prefix}right"] = float(np.mean(right))
        fractions[f"{prefix}right number only"] = float(np.mean(number_only))
    return fractions


def load_untrained_and_newest_answers(run_folders: list[Path]) -> dict[str, Records]:
    """
    Returns the answers in the first run's first evaluation and in each run's newest evaluation.

    The keys of the result are the rows of the printed table.

    Raises ValueError if a run did not train on the demo task, or if it lacks an evaluation before
    or after training.
    """
    evaluations: dict[str, Records] = {}
    paths = [path for folder in run_folders for path in seeds.run_dirs_of_seeds(folder)]
    for path in paths:
        run = history.load_history(path)
        if (
            run.settings["task"] != "demo"
            or 0 not in run.answers_by_step
            or len(run.answers_by_step) < 2
        ):
            raise ValueError(
                f"{run.dir} lacks an evaluation of --task demo before or after training; name "
                "a demo run that was trained for at least one step with --eval-every above 0"
            )
        by_step = [list(answers.values()) for answers in run.answers_by_step.values()]
        evaluations.setdefault("before training", by_step[0])
        evaluations[str(run.dir)] = by_step[-1]
    return evaluations


def print_graded_answers(records: Records, max_answers: int) -> None:
    """Prints up to `max_answers` answers of an evaluation, evenly spread, each with its verdict."""
    for record in pick_evenly_spaced(records, max_answers):
        answer = record["completions"][0]
        audit = audit_answer(record["prompt"], answer)
        verdict = "wrong"
        if audit.right:
            verdict = "right"
        elif audit.ends_right:
            verdict = "RIGHT NUMBER ONLY"
        print(f"{verdict}: {record['prompt']} {answer!r}")


@guard_output()
def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "runs",
        nargs="+",
        type=Path,
        metavar="RUN",
        help="a directory of a demo run, or of demo runs with different seeds (made by --seeds)",
    )
    parser.add_argument(
        "--show",
        type=int,
        default=0,
        metavar="N",
        help="print N answers from each evaluation, evenly spread over the problems",
    )
    args = parser.parse_args(argv)
    with exit_on_mistakes():
        evaluations = load_untrained_and_newest_answers(args.runs)
    if args.show:
        for records in evaluations.values():
            print_graded_answers(records, args.show)

    fractions = {
        name: right_and_right_number_only_fractions(records)
        for name, records in evaluations.items()
    }
    table = pd.DataFrame(fractions).T
    summary_of_runs = table[1:].agg(["mean", "min", "max"])
    table = pd.concat([table, summary_of_runs])
    print(f"{len(evaluations['before training'])} answers")
    print(table.map("{:.1%}".format).to_string())


if __name__ == "__main__":
    main()
