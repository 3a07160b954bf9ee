"""
Prints a run's output: lines that scroll and, in a terminal only, one live line below them with the
current phase, the speed and the time left.

This file does not cover which lines a run prints (journal.py) or how lines wrap
(machine/alive.py).
"""

import sys
import time
from typing import Any, TextIO

from tqdm.auto import tqdm

from config import Config
from machine import alive
from text.printable import make_printable

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
    Prints a line above the live line, and flushes.

    The line is made safe to show and is wrapped to the width of the terminal.
    """
    file = sys.stdout if file is None else file
    tqdm.write(alive.wrap_for_terminal(make_printable(line), file), file=file)
    file.flush()
    alive.note_printed()


def print_warning(line: str) -> None:
    print_line(line, sys.stderr)


# ---- the lines


def console_columns(config: Config) -> str:
    """Returns a line that names the figures of a step's line, which has no room for names."""
    if config.objective.loss_type == "sft":
        return "columns: step, loss, seconds, tokens/s trained"
    columns = "columns: step, loss, mean reward, seconds, tokens/s sampled, tokens/s trained"
    if config.compares_within_groups:
        columns += ", groups without signal"
    return columns


def console_line(metrics: dict[str, Any], num_steps: int) -> str:
    """
    Returns one step's line; `console_columns` names its figures.

    nan stands for a loss that overflowed, or for rewards that nobody could read. Other people's
    scripts parse the beginning of the line, so append at the end only.
    """
    parts = [f"step {metrics['step']}/{num_steps}"]
    parts.append(f"loss {format_or_nan(metrics['loss'], 4)}")
    is_sampled = metrics["rollout/tok_s"] is not None  # given replies are not sampled
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
    return " | ".join(parts)


def format_or_nan(value: float | None, decimals: int) -> str:
    return "nan" if value is None else f"{value:.{decimals}f}"


# ---- the live line


class LiveLine(alive.Bar):
    """Shows the steps done, the phase, the speed of the last step and the time left."""

    speed = ""

    def __init__(self, num_steps: int, step: int = 0):
        form = "{bar:10} {n_fmt}/{total_fmt} steps | {desc}{remaining} left"
        super().__init__(
            total=num_steps, initial=step, unit="step", bar_format=form, dynamic_ncols=True
        )

    def begin(self, phase: str) -> None:
        self.activity = PHASES.get(phase, phase)
        description = ""
        for part in (self.activity, self.speed):
            if part:
                description += f"{part} | "
        self.set_description_str(description)

    def note(self, step: dict[str, Any]) -> None:
        """
        Notes that a step has ended.

        The clock starts with the run's first step, so that an evaluation before that step is not
        counted.
        """
        if self.n == self.start_n:
            self.start_t = time.time() - step["step/s"]
            self.begin_s = time.monotonic() - step["step/s"]
        tokens_per_s = step["rollout/tok_s"] or step["train/tok_s"]
        self.speed = f"{tokens_per_s:,.0f} tok/s"
        self.update(step["step"] - self.n)
        self.begin(self.activity)
