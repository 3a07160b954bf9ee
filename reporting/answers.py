"""
Evaluations of the same problems side by side: files of `evaluate.py --out`, and runs, by their newest evaluation.

Differences from the first are paired, problem by problem: a model fused, in few bits or on a server then differs by
what changed, and not by which problems were drawn.
"""

from pathlib import Path
from typing import Any

import numpy as np

from disk.run_files import half_width, read_log
from flags import escape_invisible, read_json
from reporting import verdict

HEAD = ["", "problems", "sampled", "difference", "greedy", "difference", "same greedy text"]
Answers = dict[str, dict[str, Any]]  # the records of an evaluation by problem


def load_answers(path: str) -> Answers:
    """The records of a file of `evaluate.py --out`, or of a run's newest evaluation. ValueError for anything else."""
    try:
        if Path(path).is_dir():
            found = list(read_log(Path(path) / "eval_answers.jsonl"))
            newest = found[-1]["step"]
            records = [one for one in found if one["step"] == newest]
        else:
            records = [read_json(line) for line in Path(path).read_bytes().splitlines()]
        return {f"{one['problem']} {one['prompt']}": one for one in records}
    except (OSError, ValueError, LookupError, TypeError) as error:
        said = "holds no answers" if Path(path).exists() else "is not there"
        raise ValueError(f"{path} {said}; give what evaluate.py --out wrote, or a run") from error


def figure_name(answers: Answers) -> str:
    """What the values are: right or wrong, as by a verifier, or what these rewards pay together."""
    one = next(iter(answers.values()), {})
    return (
        "right answers"
        if "reward" in one
        else f"the score by {', '.join(sorted(one.get('rewards', ())))}"
    )


def mean_values(answers: Answers) -> list[verdict.Values]:
    """The mean value of each problem's samples, and the value of its greedy answer; what is unreadable is left out."""
    greedy = {
        key: one["greedy_value"] for key, one in answers.items() if one["greedy_value"] is not None
    }
    return [verdict.mean_by_problem(answers), greedy]


def compare_answers(paths: list[str]) -> list[list[str]]:
    """A row for each evaluation after `HEAD`; differences are from the first. ValueError where no problem is shared."""
    evaluations, rows = [load_answers(path) for path in paths], [HEAD]
    first = evaluations[0]
    for path, answers in zip(paths, evaluations, strict=True):
        shared = first.keys() & answers.keys()
        if not shared:
            raise ValueError(
                f"{path} and {paths[0]} have no problem in common; evaluate both on the same"
            )
        if (its := figure_name(answers)) != (figure := figure_name(first)):
            fix = "evaluate both with the same --verifier and --reward"
            raise ValueError(f"{path} has {its}, {paths[0]} {figure}, which do not compare; {fix}")
        row = [escape_invisible(Path(path).name), str(len(answers))]
        samples = min(map(verdict.num_readable_samples, (first, answers)))
        for before, after, num in zip(
            mean_values(first), mean_values(answers), (samples, 1), strict=True
        ):
            values = np.array(list(after.values()))
            half = half_width(values)
            row.append(
                f"{values.mean():.3f}" + (f" \u00b1 {half:.3f}" if half else "") if after else "-"
            )
            if answers is first or not (
                found := verdict.paired_difference(before, after, samples=num)
            ):
                row.append("")
                continue
            half = max(
                found.mean - found.low, found.high - found.mean
            )  # to the farther end of its interval
            partly = f" ({found.num} shared)" * (found.num < len(after))
            row.append(
                f"{found.mean:+.3f} \u00b1 {half:.3f}, {found.word.partition(' problems')[0]}{partly}"
            )
        same = sum(first[key]["greedy"].strip() == answers[key]["greedy"].strip() for key in shared)
        rows.append([*row, "" if answers is first else f"{same} of {len(shared)}"])
    return rows
