"""
A run read back: what its files say so far, its headline's figures, and its texts made safe to show.

Everything is read from the run's own files, so a run that is going on or was killed can be read too.
"""

import functools
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from config import SETTINGS, Config
from disk import run_files
from disk.hub import load_object
from disk.run_files import format_with_interval, read_log
from flags import escape_invisible
from machine.alive import format_duration
from reporting import health
from reporting.health import Records

MOST_TEXT = 20_000  # characters of one text; of a longer one both ends are shown
Answers = dict[int, dict[str, Any]]  # records of one evaluation in `eval_answers.jsonl`, by problem


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
        """The held-out figure's name."""
        figures = ("accuracy", "score", "loss")
        return next(
            (name for name in figures if any(f"eval/{name}" in one for one in self.evals)),
            "accuracy",
        )

    @property
    def measured(self) -> Records:
        """The evaluations that have the figure."""
        return [one for one in self.evals if one.get(f"eval/{self.figure}") is not None]

    @functools.cached_property
    def answers(self) -> dict[int, Answers]:
        """Held-out answers by step and problem."""
        found: dict[int, Answers] = {}
        for one in read_log(self.dir / "eval_answers.jsonl"):
            found.setdefault(one["step"], {})[one["problem"]] = one
        return found


# ---- reading a run


def load_history(run: str | Path) -> History:
    """What the run in a directory has written. ValueError where there is none."""
    folder = Path(run)
    if not (folder / "config.yaml").is_file():
        raise ValueError(f"{run}: no config.yaml there; give the directory of a run, as runs/NAME")
    held = run_files.load_settings(str(folder))
    settings = Config.from_flags().to_flags() | {
        name: value for name, value in held.items() if name in SETTINGS
    }  # no older ones
    env = load_object(folder / "env.json") if (folder / "env.json").is_file() else {}
    names = ("metrics", "eval", "warnings", "changes")
    return History(
        folder, settings, env, *(list(read_log(folder / f"{name}.jsonl")) for name in names)
    )


# ---- text that nobody vouches for


def shorten_text(value: Any) -> str:
    """A visible text of at most about `MOST_TEXT` characters, which says how many it lacks; of None none."""
    text = "" if value is None else str(value)
    if len(text) > MOST_TEXT:
        half = MOST_TEXT // 2
        text = f"{text[:half]}\n\u2026 {len(text) - 2 * half:,} characters are left out here \u2026\n{text[-half:]}"
    return escape_invisible(text)


def prompt_text(prompt: Any) -> str:
    """A prompt to read: text as it is, messages each with its role unless there is only one."""
    if isinstance(prompt, list) and len(prompt) == 1:
        prompt = prompt[0]["content"]
    if isinstance(prompt, list):
        prompt = "\n\n".join(f"{message['role']}: {message['content']}" for message in prompt)
    return shorten_text(prompt)


def mark_changes(before: str, after: str) -> list[tuple[str, bool]]:
    """`after` in words, spaces and signs, each with whether it is a word or sign that `before` has nowhere."""
    words = re.compile(r"\w+|\s+|[^\w\s]")
    old = set(words.findall(before))
    return [(piece, not piece.isspace() and piece not in old) for piece in words.findall(after)]


# ---- figures


def format_before_after(run: History, named: bool = True) -> tuple[str, str]:
    """The held-out figure at the first and at the last evaluation with its interval; "-" where there is none."""
    name = f"{run.figure} " * (named and run.figure != "accuracy")
    first, *later = [
        name + format_with_interval(record, run.figure) for record in run.measured
    ] or ["-"]
    return first, later[-1] if later else "-"


def run_status(run: History, ended: bool = False) -> str:
    """ "done", "running", or "stopped": no process trains it, as `ended` says of one that still has it."""
    logs = [run.steps, run.evals] if run.settings["eval_every"] else [run.steps]
    if all(log and log[-1]["step"] == run.settings["steps"] for log in logs):
        return "done"
    return "stopped" if ended or not run_files.is_owned(run.dir) else "running"


def format_progress(run: History, status: str) -> str:
    """ "4 of 6", and whether the last evaluation of a run that was stopped is missing."""
    done, steps = run.steps[-1]["step"] if run.steps else 0, run.settings["steps"]
    return f"{done} of {steps}" + " without the last evaluation" * (
        status == "stopped" and done == steps
    )


def headline_facts(run: History, ended: bool = False) -> dict[str, str]:
    """The headline's figures by name; see `status`."""
    before, after = format_before_after(run, named=False)
    is_sft = run.settings.get("loss_type") == "sft"
    phase = "update" if is_sft else "rollout"
    tokens = sum((step[f"{phase}/tok_s"] or 0.0) * step[f"{phase}/s"] for step in run.steps)
    peak = max(health.measured_values(run.steps, "mem/peak_gb"), default=None)
    state = run_status(run, ended)
    return {
        f"held-out {run.figure} before": before,
        f"held-out {run.figure} after": after,
        "steps": f"{format_progress(run, state)}, {state}",
        "training": format_duration(sum(step.get("step/s") or 0.0 for step in run.steps)),
        "evaluations": format_duration(sum(record.get("eval/s") or 0.0 for record in run.evals)),
        f"tokens {'trained' if is_sft else 'sampled'}": f"{round(tokens):,}",
        "peak memory": "-" if peak is None else f"{peak:.2f} GB",
    }
