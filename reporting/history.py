"""
Reads a run's records and main figures from its files, and makes the run's texts safe to show.

Everything comes from the run's own files, so a run that is still training or was killed can be read
too. This file does not cover the verdict on a run (verdict.py) or runs with several seeds
(seeds.py).
"""

import functools
import itertools
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from config import SETTINGS, Config
from disk import run_changes, run_files
from disk.eval_record import format_figure_with_interval
from disk.files import load_json_object
from disk.run_files import read_log
from machine.alive import format_duration
from reporting import health
from reporting.health import Records
from text.printable import escape_invisible

MOST_TEXT = 20_000  # the most characters shown of a text; the middle of a longer text is cut
WORD = re.compile(r"\w+|\s+|[^\w\s]")  # a word, white space, or a punctuation mark

# The records of one evaluation in `eval_answers.jsonl`; each key is the number of a problem.
Answers = dict[int, dict[str, Any]]


@dataclass
class History:
    """The settings and all records that a run has written so far."""

    dir: Path
    settings: dict[str, Any]
    env: dict[str, Any]
    steps: Records
    evals: Records
    warnings: Records = field(default_factory=list)
    changes: Records = field(default_factory=list)
    num_answers_left_out: int = 0  # how many of the first held-out answers are left out

    @property
    def name(self) -> str:
        path = self.dir.resolve()
        return f"{path.parent.name}/{path.name}" if path.name.startswith("seed-") else path.name

    @functools.cached_property
    def figure_name(self) -> str:
        """The name of the held-out figure, which is "accuracy", "score" or "loss"."""
        for name in ("accuracy", "score", "loss"):
            if any(f"eval/{name}" in record for record in self.evals):
                return name
        return "accuracy"

    @property
    def evals_with_figure(self) -> Records:
        key = f"eval/{self.figure_name}"
        return [record for record in self.evals if record.get(key) is not None]

    @functools.cached_property
    def answers_by_step(self) -> dict[int, Answers]:
        """The records of the held-out answers, by step and then by problem."""
        answers_by_step: dict[int, Answers] = {}
        log = read_log(self.dir / "eval_answers.jsonl")
        for record in itertools.islice(log, self.num_answers_left_out, None):
            answers_by_step.setdefault(record["step"], {})[record["problem"]] = record
        return answers_by_step

    @functools.cached_property
    def digest_by_file_name(self) -> dict[str, str]:
        """
        Digests of the files and functions that the settings name, by file name or function name.

        env.json has the digests of files, and the checkpoints have those of a program's functions.
        If several files in different directories have the same name, their digests are joined.
        """
        digests: dict[str, str] = {}
        for path, digest in run_files.read_file_and_function_digests(self.dir).items():
            name = Path(path).name
            digests[name] = f"{digests.get(name, '')}{digest[:8]}"
        return digests

    @functools.cached_property
    def parts_set_in_python(self) -> dict[str, str]:
        """The names of objects that a Python program set in the trainer, by trainer attribute."""
        return run_files.read_parts_set_in_python(self.dir)

    @functools.cached_property
    def with_comparable_evals(self) -> "History":
        """
        The run without the evaluations that cannot be compared with the newest one.

        If a resume changed what evaluations measure, earlier evaluations are left out.
        """
        num_evals, num_answers = run_changes.num_incomparable_evaluations_and_answers(self.changes)
        if not num_evals:
            return self
        return replace(self, evals=self.evals[num_evals:], num_answers_left_out=num_answers)


# ---- reading a run


def load_history(run_dir: str | Path) -> History:
    """
    Loads the settings and records of a run from its directory.

    Raises ValueError if the directory does not contain a run.
    """
    folder = Path(run_dir)
    if not (folder / "config.yaml").is_file():
        raise ValueError(
            f"{run_dir} contains no config.yaml; give the directory of a run, such as runs/NAME"
        )
    saved = run_files.load_settings(str(folder))
    # leave out settings that only older versions of this program had
    current = {name: value for name, value in saved.items() if name in SETTINGS}
    env_path = folder / "env.json"
    return History(
        dir=folder,
        settings=Config.from_flags().to_flags() | current,
        env=load_json_object(env_path) if env_path.is_file() else {},
        steps=list(read_log(folder / "metrics.jsonl")),
        evals=list(read_log(folder / "eval.jsonl")),
        warnings=list(read_log(folder / "warnings.jsonl")),
        changes=run_changes.read_changes(folder),
    )


# ---- untrusted text


def escape_invisible_and_cut_middle(value: Any) -> str:
    """
    Returns a value as text, with its invisible characters escaped; None becomes "".

    The middle of a text of more than MOST_TEXT characters is replaced by a note, which says how
    many characters are missing.
    """
    text = "" if value is None else str(value)
    if len(text) > MOST_TEXT:
        half = MOST_TEXT // 2
        num_left_out = len(text) - 2 * half
        note = f"\u2026 {num_left_out:,} characters are not shown \u2026"
        text = f"{text[:half]}\n{note}\n{text[-half:]}"
    return escape_invisible(text)


def format_prompt_safely(prompt: Any) -> str:
    """Returns a prompt as text, in which each message of a conversation begins with its role."""
    if isinstance(prompt, list) and len(prompt) == 1:
        prompt = prompt[0]["content"]
    if isinstance(prompt, list):
        prompt = "\n\n".join(f"{message['role']}: {message['content']}" for message in prompt)
    return escape_invisible_and_cut_middle(prompt)


def split_and_mark_new_words(before: str, after: str) -> list[tuple[str, bool]]:
    """
    Splits `after` into words, spaces and punctuation, and marks the new pieces.

    The mark is True if a piece does not occur in `before`. White space is never marked as new.
    """
    old = set(WORD.findall(before))
    return [(piece, not piece.isspace() and piece not in old) for piece in WORD.findall(after)]


# ---- figures


def format_figure_before_after(
    run: History, with_name: bool = True, figure_name: str = ""
) -> tuple[str, str]:
    """
    Returns a held-out figure at the first and at the last evaluation, each with its interval.

    A missing evaluation is shown as "-". with_name: whether to put the name of the figure before
    each value; the name "accuracy" is always left out. figure_name: "" means the main figure.
    """
    run = run.with_comparable_evals
    name = figure_name or run.figure_name
    prefix = f"{name} " if with_name and name != "accuracy" else ""
    figures = [
        prefix + format_figure_with_interval(record, name)
        for record in run.evals
        if record.get(f"eval/{name}") is not None
    ]
    before = figures[0] if figures else "-"
    after = figures[-1] if len(figures) > 1 else "-"
    return before, after


def run_status(run: History, ended: bool = False) -> str:
    """
    Returns "done" if a run is finished, "running" if a process trains it, otherwise "stopped".

    ended: whether the process that owns the run has stopped training.
    """
    logs = [run.steps]
    if run.settings["eval_every"]:
        logs.append(run.evals)
    if all(log and log[-1]["step"] == run.settings["steps"] for log in logs):
        return "done"
    return "stopped" if ended or not run_files.is_locked_by_a_process(run.dir) else "running"


def format_steps_done(run: History, status: str) -> str:
    """
    Returns the number of finished steps, in the form "4 of 6".

    If a stopped run has done all steps but not its last evaluation, the text says so.
    """
    num_done = run.steps[-1]["step"] if run.steps else 0
    num_steps = run.settings["steps"]
    progress = f"{num_done} of {num_steps}"
    if status == "stopped" and num_done == num_steps:
        progress += " without the last evaluation"
    return progress


def headline_facts(run: History, ended: bool = False) -> dict[str, str]:
    """Returns a run's held-out figures, steps, durations and peak memory, each under its name."""
    before, after = format_figure_before_after(run, with_name=False)
    is_sft = run.settings.get("loss_type") == "sft"
    phase = "update" if is_sft else "rollout"
    tokens_name = "tokens trained" if is_sft else "tokens sampled"
    num_tokens = 0.0
    for step in run.steps:
        num_tokens += (step[f"{phase}/tok_s"] or 0.0) * step[f"{phase}/s"]
    training_s = sum(step.get("step/s") or 0.0 for step in run.steps)
    evaluation_s = sum(record.get("eval/s") or 0.0 for record in run.evals)
    peak = max(health.measured_values(run.steps, "mem/peak_gb"), default=None)
    status = run_status(run, ended)
    figure_name = run.with_comparable_evals.figure_name
    facts = {f"held-out {figure_name} before": before, f"held-out {figure_name} after": after}
    if any(record.get("eval/greedy") is not None for record in run.evals):
        before, after = format_figure_before_after(run, with_name=False, figure_name="greedy")
        facts |= {"held-out greedy before": before, "held-out greedy after": after}
    if is_sft and figure_name != "loss":
        before, after = format_figure_before_after(run, with_name=False, figure_name="loss")
        facts |= {"held-out loss before": before, "held-out loss after": after}
    facts |= {
        "steps": f"{format_steps_done(run, status)}, {status}",
        "training": format_duration(training_s),
        "evaluations": format_duration(evaluation_s),
        tokens_name: f"{round(num_tokens):,}",
        "peak memory": "-" if peak is None else f"{peak:.2f} GB",
    }
    if run.changes:
        facts["changed on resume"] = escape_invisible(run_changes.describe_changes(run.changes))
    return facts
