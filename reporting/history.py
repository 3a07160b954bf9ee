"""
Reads a run back: its records so far, the figures of its headline, and texts that are safe to show.

Everything comes from the run's own files, so a run that is going on or was killed can be read too.
This file does not cover conclusions (verdict.py) or several seeds (seeds.py).
"""

import functools
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from config import SETTINGS, Config
from disk import run_files
from disk.eval_record import format_with_interval
from disk.hub import load_object
from disk.run_files import read_log
from machine.alive import format_duration
from reporting import health
from reporting.health import Records
from text.printable import escape_invisible

MOST_TEXT = 20_000  # characters of one text; only both ends of a longer text are shown
WORD = re.compile(r"\w+|\s+|[^\w\s]")  # a word, white space, or a sign
# the records of one evaluation in `eval_answers.jsonl`, by problem
Answers = dict[int, dict[str, Any]]


@dataclass
class History:
    """What a run has written so far."""

    dir: Path
    settings: dict[str, Any]
    env: dict[str, Any]
    steps: Records
    evals: Records
    warnings: Records = field(default_factory=list)
    changes: Records = field(default_factory=list)

    @property
    def name(self) -> str:
        path = self.dir.resolve()
        return f"{path.parent.name}/{path.name}" if path.name.startswith("seed-") else path.name

    @functools.cached_property
    def figure(self) -> str:
        """The name of the held-out figure: "accuracy", "score" or "loss"."""
        for name in ("accuracy", "score", "loss"):
            if any(f"eval/{name}" in record for record in self.evals):
                return name
        return "accuracy"

    @property
    def evals_with_figure(self) -> Records:
        key = f"eval/{self.figure}"
        return [record for record in self.evals if record.get(key) is not None]

    @functools.cached_property
    def answers(self) -> dict[int, Answers]:
        """Held-out answers by step and problem."""
        answers: dict[int, Answers] = {}
        for record in read_log(self.dir / "eval_answers.jsonl"):
            answers.setdefault(record["step"], {})[record["problem"]] = record
        return answers


# ---- reading a run


def load_history(run: str | Path) -> History:
    """
    Loads the records that the run in a directory has written.

    Raises ValueError if the directory holds no run.
    """
    folder = Path(run)
    if not (folder / "config.yaml").is_file():
        raise ValueError(
            f"{run} contains no config.yaml; give the directory of a run, such as runs/NAME"
        )
    saved = run_files.load_settings(str(folder))
    # settings of older versions are left out
    current = {name: value for name, value in saved.items() if name in SETTINGS}
    env_path = folder / "env.json"
    return History(
        dir=folder,
        settings=Config.from_flags().to_flags() | current,
        env=load_object(env_path) if env_path.is_file() else {},
        steps=list(read_log(folder / "metrics.jsonl")),
        evals=list(read_log(folder / "eval.jsonl")),
        warnings=list(read_log(folder / "warnings.jsonl")),
        changes=list(read_log(folder / "changes.jsonl")),
    )


# ---- untrusted text


def shorten_text(value: Any) -> str:
    """
    Returns a text with its invisible characters escaped; "" for None.

    A text of more than MOST_TEXT characters loses its middle; a note says how many are left
    out.
    """
    text = "" if value is None else str(value)
    if len(text) > MOST_TEXT:
        half = MOST_TEXT // 2
        num_left_out = len(text) - 2 * half
        note = f"\u2026 {num_left_out:,} characters are left out here \u2026"
        text = f"{text[:half]}\n{note}\n{text[-half:]}"
    return escape_invisible(text)


def prompt_text(prompt: Any) -> str:
    """Returns a prompt as text. Each message begins with its role, unless there is only one."""
    if isinstance(prompt, list) and len(prompt) == 1:
        prompt = prompt[0]["content"]
    if isinstance(prompt, list):
        prompt = "\n\n".join(f"{message['role']}: {message['content']}" for message in prompt)
    return shorten_text(prompt)


def mark_changes(before: str, after: str) -> list[tuple[str, bool]]:
    """Splits `after` into words, spaces and signs. True marks a piece that `before` lacks."""
    old = set(WORD.findall(before))
    return [(piece, not piece.isspace() and piece not in old) for piece in WORD.findall(after)]


# ---- figures


def format_before_after(run: History, named: bool = True) -> tuple[str, str]:
    """
    Returns the held-out figure at the first and at the last evaluation, each with its interval.

    "-" stands for a missing evaluation. named: whether to put the figure's name before its value,
    unless the figure is the accuracy.
    """
    prefix = f"{run.figure} " if named and run.figure != "accuracy" else ""
    figures = [
        prefix + format_with_interval(record, run.figure) for record in run.evals_with_figure
    ]
    before = figures[0] if figures else "-"
    after = figures[-1] if len(figures) > 1 else "-"
    return before, after


def run_status(run: History, ended: bool = False) -> str:
    """
    Returns "done" or "running", or "stopped" if no process trains an unfinished run.

    ended: whether the process that owns the run has stopped training it.
    """
    logs = [run.steps]
    if run.settings["eval_every"]:
        logs.append(run.evals)
    if all(log and log[-1]["step"] == run.settings["steps"] for log in logs):
        return "done"
    return "stopped" if ended or not run_files.is_owned(run.dir) else "running"


def format_progress(run: History, status: str) -> str:
    """Returns the steps, as "4 of 6", and says if a stopped run lacks its last evaluation."""
    num_done = run.steps[-1]["step"] if run.steps else 0
    num_steps = run.settings["steps"]
    progress = f"{num_done} of {num_steps}"
    if status == "stopped" and num_done == num_steps:
        progress += " without the last evaluation"
    return progress


def headline_facts(run: History, ended: bool = False) -> dict[str, str]:
    """Returns the headline's figures by name. ended: see `run_status`."""
    before, after = format_before_after(run, named=False)
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
    return {
        f"held-out {run.figure} before": before,
        f"held-out {run.figure} after": after,
        "steps": f"{format_progress(run, status)}, {status}",
        "training": format_duration(training_s),
        "evaluations": format_duration(evaluation_s),
        tokens_name: f"{round(num_tokens):,}",
        "peak memory": "-" if peak is None else f"{peak:.2f} GB",
    }
