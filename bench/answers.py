"""
Audits the recorded answers of demo runs: `uv run python -m bench.answers runs/A runs/B ...`.

The audit reads the answers in each run's first and newest evaluations, and counts the right ones
with code that is independent of the verifier that rewarded the runs. The verifier compares
patterns, while the audit works out the value of each statement. An answer that the audit cannot
understand does not count as right.

`--show 50` prints 50 answers from each evaluation. Before a quality figure is published, somebody
should read fifty of the answers that the figure counts. In this demo, reading fifty answers showed
that the first figures were wrong.
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
    right: bool  # whether every statement is also true, and no other numbers occur


def audit_answer(problem: str, answer: str) -> AnswerAudit:
    problem_numbers = read_numbers(problem)
    answer_numbers = read_numbers(answer)
    total = sum(problem_numbers)
    ends_right = answer_numbers[-1:] == [total]
    foreign_numbers = Counter(answer_numbers[:-1]) - Counter(problem_numbers)

    problem_words = set(split_words(problem)) - SIGNS.keys() - NUMBERS.keys()
    vocabulary = SILENT | problem_words
    statements = [part for part in re.split(r"[.;:\n]", answer) if part.strip()]
    right = (
        ends_right
        and not foreign_numbers
        and all(statement_is_true(statement, total, vocabulary) for statement in statements)
    )
    return AnswerAudit(ends_right, right)


def split_words(text: str) -> list[str]:
    return re.findall(r"[a-z]+(?:-[a-z]+)*|\d+|[^\sa-z\d]", text.lower())


def read_numbers(text: str) -> list[int]:
    """Returns the numbers in a text, written in words or digits, in the order of the text."""
    numbers = []
    for word in split_words(text):
        if word in NUMBERS:
            numbers.append(NUMBERS[word])
        elif re.fullmatch("[0-9]{1,9}", word):
            numbers.append(int(word))
    return numbers


def statement_is_true(statement: str, total: int, vocabulary: set[str]) -> bool:
    """
    Whether all sides of a statement such as "x is y" have the same value.

    A side is a number or a sum of numbers. A side without a number, such as "the answer", stands
    for the total that the problem asks for. A statement with only one side must equal the total.

    vocabulary: words that do not change the meaning of a statement. A statement with any other word
    counts as untrue, because its meaning is unknown.
    """
    equation = ""
    for word in split_words(statement):
        symbol = SIGNS.get(word) or "".join(map(str, read_numbers(word)))
        if symbol:
            equation += f"{symbol} "
        elif word not in vocabulary:
            return False
    sides = equation.split("= ")
    if not all(re.fullmatch(r"(\d+ (\+ \d+ )*)?", side) for side in sides):
        return False
    values = [sum_of_side(side) if side else total for side in sides]
    if len(sides) == 1:
        return values == [total]
    return len(set(values)) == 1


def sum_of_side(side: str) -> int:
    """Returns the value of one side of an equation, such as "27 + 15 "."""
    return sum(map(int, re.findall(r"\d+", side)))


def audit_answers(records: Records) -> dict[str, float]:
    """
    Returns the fraction of right answers, and the fraction in which only the number is right.

    The result has both fractions for sampled and for greedy answers, under the names of the
    printed table's columns.
    """
    sampled = [record["completions"][0] for record in records]
    greedy = [record["greedy"] for record in records]
    fractions = {}
    for prefix, answers in (("", sampled), ("greedy, ", greedy)):
        readings = [
            audit_answer(record["prompt"], answer)
            for record, answer in zip(records, answers, strict=True)
        ]
        right = [reading.right for reading in readings]
        number_only = [reading.ends_right and not reading.right for reading in readings]
        fractions[f"{prefix}right"] = float(np.mean(right))
        fractions[f"{prefix}right number only"] = float(np.mean(number_only))
    return fractions


def load_first_and_newest_answers(folders: list[Path]) -> dict[str, Records]:
    """
    Returns the answers in the first run's first evaluation and in each run's newest evaluation.

    Each key is the name of a row in the printed table.

    Raises ValueError if a run did not train on the demo task, or if it lacks an evaluation before
    or after training.
    """
    evaluations: dict[str, Records] = {}
    paths = [path for folder in folders for path in seeds.run_dirs_of_seeds(folder)]
    for path in paths:
        run = history.load_history(path)
        if (
            run.settings["task"] != "demo"
            or 0 not in run.answers_by_step
            or len(run.answers_by_step) < 2
        ):
            raise ValueError(
                f"{run.dir} has no evaluations of --task demo both before and after training; name "
                "a demo run that was trained for at least one step with --eval-every above 0"
            )
        by_step = [list(answers.values()) for answers in run.answers_by_step.values()]
        evaluations.setdefault("before training", by_step[0])
        evaluations[str(run.dir)] = by_step[-1]
    return evaluations


def print_answers(records: Records, max_answers: int) -> None:
    """Prints up to `max_answers` answers of an evaluation, evenly spread, each with its grade."""
    for record in pick_evenly_spaced(records, max_answers):
        answer = record["completions"][0]
        reading = audit_answer(record["prompt"], answer)
        verdict = "wrong"
        if reading.right:
            verdict = "right"
        elif reading.ends_right:
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
        evaluations = load_first_and_newest_answers(args.runs)
    if args.show:
        for records in evaluations.values():
            print_answers(records, args.show)

    fractions = {name: audit_answers(records) for name, records in evaluations.items()}
    table = pd.DataFrame(fractions).T
    of_runs = table[1:].agg(["mean", "min", "max"])
    table = pd.concat([table, of_runs])
    print(f"{len(evaluations['before training'])} answers")
    print(table.map("{:.1%}".format).to_string())


if __name__ == "__main__":
    main()
