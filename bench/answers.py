"""
What the demo's answers say, read by somebody else: `uv run python -m bench.answers runs/A runs/B ...`.

The answers of runs' first and newest evaluations, as they recorded them, counted by a reader that shares no code with
the verifier which the runs were rewarded by: it works out each statement, where the verifier compares patterns. What it
cannot read it does not forgive. `--show 50` prints answers; a figure of quality deserves that somebody reads fifty of
the answers that it counts, which is how the first figures of this demo fell.
"""

import argparse
import re
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import cpu_blas  # noqa: F401  (before mlx)
import numpy as np
import pandas as pd

from flags import report_mistakes
from machine.output import guard_output
from problems.examples import spread_evenly
from reporting import history, seeds

UNITS = "one two three four five six seven eight nine".split()
TEENS = "ten eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen nineteen".split()
NUMBERS = {word: number for number, word in enumerate(["zero", *UNITS, *TEENS])}
for ten, tens in enumerate("twenty thirty forty fifty sixty seventy eighty ninety".split(), 2):
    NUMBERS[tens] = 10 * ten
    NUMBERS |= {f"{tens}-{unit}": 10 * ten + number for number, unit in enumerate(UNITS, 1)}
SIGNS = dict.fromkeys(("plus", "and", "+"), "+")
SIGNS |= dict.fromkeys("is are equals equal makes gives has have =".split(), "=")
SILENT = set(
    "the answer sum total of that this it so in all together more add adding , ! ' ( ) $".split()
)


class Reading(NamedTuple):
    ends_right: bool  # its last number is the sum of the problem's two
    right: bool  # that, all its statements are true, and its other numbers are the problem's


def read_answer(problem: str, answer: str) -> Reading:
    asked, named = numbers_of(problem), numbers_of(answer)
    ends_right, own = named[-1:] == [sum(asked)], not Counter(named[:-1]) - Counter(asked)
    known = SILENT | set(words_of(problem)) - SIGNS.keys() - NUMBERS.keys()
    statements = [part for part in re.split(r"[.;:\n]", answer) if part.strip()]
    return Reading(
        ends_right,
        ends_right and own and all(is_true(part, sum(asked), known) for part in statements),
    )


def words_of(text: str) -> list[str]:
    return re.findall(r"[a-z]+(?:-[a-z]+)*|\d+|[^\sa-z\d]", text.lower())


def numbers_of(text: str) -> list[int]:
    found = [
        NUMBERS.get(word, int(word) if re.fullmatch("[0-9]{1,9}", word) else None)
        for word in words_of(text)
    ]
    return [number for number in found if number is not None]


def is_true(statement: str, total: int, known: set[str]) -> bool:
    """
    Whether all sides of "x is y" come to the same, each a number or a sum of numbers.

    A side without a number ("the answer") is the total that was asked for, and so is what a lone side is compared with.
    """
    said = ""
    for word in words_of(statement):
        if part := SIGNS.get(word) or "".join(map(str, numbers_of(word))):
            said += f"{part} "
        elif word not in known:
            return False  # nobody knows what it says
    sides = said.split("= ")
    if not all(re.fullmatch(r"(\d+ (\+ \d+ )*)?", side) for side in sides):
        return False
    values = [sum(map(int, re.findall(r"\d+", side))) if side else total for side in sides]
    return len(set(values)) == 1 and (len(sides) > 1 or values == [total])


def audit_answers(details: list[dict[str, Any]]) -> dict[str, float]:
    """Shares of the sampled answers, and of the greedy ones."""
    shares = {}
    for name, key in (("", "completions"), ("greedy, ", "greedy")):
        answers = [one[key] if key == "greedy" else one[key][0] for one in details]
        readings = [
            read_answer(one["prompt"], answer) for one, answer in zip(details, answers, strict=True)
        ]
        shares[f"{name}right"] = float(np.mean([reading.right for reading in readings]))
        wrong = [reading.ends_right and not reading.right for reading in readings]
        shares[f"{name}right number only"] = float(np.mean(wrong))
    return shares


def evaluations(folders: list[Path]) -> dict[str, list[dict[str, Any]]]:
    """Records by the row of the table: the first evaluation of the first run, then the newest of each."""
    found: dict[str, list[dict[str, Any]]] = {}
    for run in (
        history.load_history(path) for folder in folders for path in seeds.seed_runs(folder)
    ):
        if run.settings["task"] != "demo" or 0 not in run.answers or len(run.answers) < 2:
            fix = "give a run of it with --eval-every above 0, after its first steps"
            raise ValueError(
                f"{run.dir} has no evaluations of --task demo before and after training; {fix}"
            )
        each = [list(answers.values()) for answers in run.answers.values()]
        found.setdefault("before training", each[0])
        found[str(run.dir)] = each[-1]
    return found


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
        help="runs of the demo, or directories of seeds",
    )
    parser.add_argument(
        "--show",
        type=int,
        default=0,
        metavar="N",
        help="print N answers of each run, evenly spread",
    )
    args = parser.parse_args(argv)
    with report_mistakes():
        found = evaluations(args.runs)
    for details in found.values() if args.show else ():
        for one in spread_evenly(details, args.show):
            reading = read_answer(one["prompt"], one["completions"][0])
            verdict = (
                "right" if reading.right else "RIGHT NUMBER ONLY" if reading.ends_right else "wrong"
            )
            print(f"{verdict}: {one['prompt']} {one['completions'][0]!r}")
    table = pd.DataFrame({name: audit_answers(details) for name, details in found.items()}).T
    table = pd.concat([table, table[1:].agg(["mean", "min", "max"])])  # of the runs
    print(f"{len(found['before training'])} answers\n{table.map('{:.1%}'.format).to_string()}")


if __name__ == "__main__":
    main()
