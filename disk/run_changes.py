"""
Records in `changes.jsonl` what was changed when a run was resumed, and the step of the resume.

Some changes affect what an evaluation measures, for example a change of the reward. Evaluations
from before and after such a change cannot be compared. This file does not decide whether a run may
be resumed after a change (checkpoint.py).
"""

import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from disk.run_files import read_log, write_text_atomically

CHANGES = "changes.jsonl"
HELD_OUT = "held-out problems"  # the name of the digest of the held-out problems
DIGEST_LENGTH = 12  # the number of characters of a digest that a record keeps

# The settings that affect the answers in an evaluation, or the figures that are computed from them.
MEASURE_SETTINGS = {
    *("model", "task", "task_config", "columns", "max_tokens", "stop", "end_tokens", "thinking"),
    *("verifier", "reward", "reward_weights", "reward_gate", "rubric", "eval_rubric"),
    *(
        "tools",
        "env",
        "env_server",
        "max_turns",
        "max_context",
        "judge_model",
        "judge_mode",
        "judge_think",
    ),
}

Changes = Sequence[dict[str, Any]]
SettingsAndDigests = tuple[Mapping[str, Any], Mapping[str, str]]


def read_changes(run_dir: Path) -> list[dict[str, Any]]:
    """Returns the records of what was changed when the run was resumed, oldest first."""
    return list(read_log(run_dir / CHANGES))


def find_earlier_and_new_changes(
    run_dir: Path,
    step: int,
    before: SettingsAndDigests,
    now: SettingsAndDigests,
    training_only: Collection[str],
) -> list[dict[str, Any]]:
    """
    Returns the records up to `step`, and a new record for each change since that step's checkpoint.

    If a change affects what evaluations measure, its record contains the numbers of evaluations and
    of held-out answers from before the change. This function writes no file, because the resumed
    run may still fail to begin. `write_changes` writes the records later.

    before: the settings in the checkpoint, and the digests of the model, data and files, by name.
    now: the settings and digests of the resumed run.
    training_only: the names of the digests that do not affect evaluations.
    """
    # in checkpoints of older versions, the digest of the data covers the held-out problems
    if HELD_OUT not in before[1]:
        training_only = ()
    records = [record for record in read_changes(run_dir) if record["step"] <= step]
    values = _join_settings_and_digests(*before)
    values |= {record["setting"]: record["is"] for record in records}
    evaluations = [record for record in read_log(run_dir / "eval.jsonl") if record["step"] <= step]
    last_evaluated = evaluations[-1]["step"] if evaluations else -1
    answers = read_log(run_dir / "eval_answers.jsonl")
    num_answers = sum(answer["step"] <= last_evaluated for answer in answers)

    for name, value in _join_settings_and_digests(*now).items():
        if value == values.get(name, value):
            continue
        record = {"step": step, "setting": name, "was": values[name], "is": value}
        is_digest = name in now[1]
        if (is_digest and name not in training_only) or name in MEASURE_SETTINGS:
            record |= {"evaluations": len(evaluations), "answers": num_answers}
        records.append(record)
    return records


def write_changes(run_dir: Path, changes: Changes) -> None:
    """
    Replaces the records of a run by `changes`. Does nothing if the records are already equal.

    A run calls this function when it has recorded its first figures after a resume. So a resume
    that fails earlier leaves no record.
    """
    if list(changes) != read_changes(run_dir):
        lines = [json.dumps(change, allow_nan=False) + "\n" for change in changes]
        write_text_atomically(run_dir / CHANGES, "".join(lines))


def _join_settings_and_digests(
    settings: Mapping[str, Any], digests: Mapping[str, str]
) -> dict[str, Any]:
    return dict(settings) | {name: digest[:DIGEST_LENGTH] for name, digest in digests.items()}


def changes_that_affect_evaluations(changes: Changes) -> list[dict[str, Any]]:
    """Returns the changes that affect what evaluations measure."""
    return [change for change in changes if "evaluations" in change]


def num_incomparable_evaluations_and_answers(changes: Changes) -> tuple[int, int]:
    """Returns the numbers of evaluations and answers before the newest change that affects them."""
    newest = changes_that_affect_evaluations(changes)[-1:]
    return (newest[0]["evaluations"], newest[0]["answers"]) if newest else (0, 0)


def describe_changes(changes: Changes) -> str:
    """Returns text that says what changed after which step: "mine.py changed after step 6"."""
    names_by_step: dict[int, dict[str, None]] = {}
    for change in changes:
        names_by_step.setdefault(change["step"], {})[str(change["setting"])] = None
    parts = [
        f"{', '.join(names)} changed after step {step}" for step, names in names_by_step.items()
    ]
    return "; ".join(parts)


def format_yaml_comments(changes: Changes) -> str:
    """Returns a comment line for each change, for `config.yaml`. Each line names the step."""
    lines = []
    for change in changes:
        was = f"{change['was']!r}".replace("\n", " ")
        lines.append(f"# {describe_changes([change])} (it was {was})\n")
    return "".join(lines)
