"""
Prints lines of a run in the terminal, above one live line with the phase, speed and time left.

The live line appears only if the output is a terminal. This file does not cover which lines a run
prints (journal.py) or how long lines are wrapped (text/wrapping.py).
"""

import sys
import time
from typing import Any, TextIO

from tqdm.auto import tqdm

from config import Config
from machine import alive
from text import wrapping
from text.printable import escape_and_redact_for_printing

PHASES = {
    "rollout": "sampling",
    "reward": "rewards",
    "judge": "judging",
    "ref": "reference",
    "update": "updating",
    "teacher": "asking the teacher",
}


def print_line(line: str, file: TextIO | None = None) -> None:
    """
    Prints a line above the live line and flushes the file.

    Secrets in the line are redacted, invisible characters are escaped, and the line is wrapped to
    the width of the terminal.
    """
    file = sys.stdout if file is None else file
    tqdm.write(wrapping.wrap_for_terminal(escape_and_redact_for_printing(line), file), file=file)
    file.flush()
    alive.record_print_time()


def print_line_to_stderr(line: str) -> None:
    print_line(line, sys.stderr)


# ---- the lines


def describe_console_columns(config: Config) -> str:
    """Returns a line with the names of the columns that each step's line shows."""
    if config.objective.loss_type == "sft":
        return "columns: step, loss, seconds, tokens/s trained"
    columns = "columns: step, loss, mean reward, seconds, tokens/s sampled, tokens/s trained"
    if config.compares_rewards_within_groups:
        columns += ", groups without signal"
    return columns


def format_step_line(metrics: dict[str, Any], num_steps: int) -> str:
    """
    Returns a line with a step's figures. `describe_console_columns` returns their names.

    A loss that overflowed is shown as nan, and so is the mean reward if no reward was readable.
    If --target-kl reduced the learning rate, the line says by how much.
    Users' scripts parse the beginning of the line, so add new figures only at its end.
    """
    parts = [f"step {metrics['step']}/{num_steps}"]
    parts.append(f"loss {format_or_nan(metrics['loss'], 4)}")
    is_sampled = metrics["rollout/tok_s"] is not None  # supervised fine-tuning samples nothing
    if is_sampled:
        parts.append(f"reward {format_or_nan(metrics['reward/mean'], 6)}")
    parts.append(f"{format_or_nan(metrics['step/s'], 1)}s")
    if is_sampled:
        parts.append(f"rollout {format_or_nan(metrics['rollout/tok_s'], 1)} tok/s")
    parts.append(f"train {format_or_nan(metrics['train/tok_s'], 1)} tok/s")

    fraction_without_signal = metrics["reward/zero_std_frac"]
    if not metrics["update/rows"]:
        parts.append("no step")
    elif fraction_without_signal is not None:
        parts.append(f"{fraction_without_signal:.0%}")

    rate = metrics.get("update/rate")
    if rate is not None and rate < 0.995:
        parts.append(f"learning rate held at {100 * rate:.2g}% by --target-kl")
    return " | ".join(parts)


def format_or_nan(value: float | None, decimals: int) -> str:
    return "nan" if value is None else f"{value:.{decimals}f}"


# ---- the live line


class LiveLine(alive.Bar):
    """A progress bar with the steps done, the phase, the last step's speed and the time left."""

    speed = ""

    def __init__(self, num_steps: int, step: int = 0):
        form = "{bar:10} {n_fmt}/{total_fmt} steps | {desc}{remaining} left"
        super().__init__(
            total=num_steps, initial=step, unit="step", bar_format=form, dynamic_ncols=True
        )

    def show_phase(self, phase: str) -> None:
        self.activity = PHASES.get(phase, phase)
        description = ""
        for part in (self.activity, self.speed):
            if part:
                description += f"{part} | "
        self.set_description_str(description)

    def show_finished_step(self, step_metrics: dict[str, Any]) -> None:
        """
        Shows that a step has finished, and the speed of that step.

        The time left is estimated from the start of this process's first step, so that an
        evaluation before that step does not count.
        """
        if self.n == self.start_n:
            self.start_t = time.time() - step_metrics["step/s"]
            self.begin_s = time.monotonic() - step_metrics["step/s"]
        tokens_per_s = step_metrics["rollout/tok_s"] or step_metrics["train/tok_s"]
        self.speed = f"{tokens_per_s:,.0f} tok/s"
        self.update(step_metrics["step"] - self.n)
        self.show_phase(self.activity)
