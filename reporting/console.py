"""
A run's terminal output: scrolling lines, and below them one live line with the current phase, the speed and the time
left, for a terminal only.
"""

import sys
import time
from typing import Any, TextIO

from tqdm.auto import tqdm

from config import Config
from flags import make_printable
from machine import alive

PHASES = {
    "rollout": "sampling",
    "reward": "rewards",
    "judge": "judging",
    "ref": "reference",
    "update": "updating",
}
PHASES |= {"teacher": "asking the teacher"}


def print_line(line: str, file: TextIO | None = None) -> None:
    """Prints a line above the live one, safe to show and as wide as a terminal, and flushes."""
    file = sys.stdout if file is None else file
    tqdm.write(alive.wrap_for_terminal(make_printable(line), file), file=file)
    file.flush()
    alive.note_printed()


def print_warning(line: str) -> None:
    print_line(line, sys.stderr)


# ---- the lines


def console_columns(config: Config) -> str:
    """Names the figures of a step's line, which has no room for names."""
    if config.objective.loss_type == "sft":
        return "columns: step, loss, seconds, tokens/s trained"
    compared = ", groups without signal" if config.compares_within_groups else ""
    return (
        f"columns: step, loss, mean reward, seconds, tokens/s sampled, tokens/s trained{compared}"
    )


def console_line(metrics: dict[str, Any], num_steps: int) -> str:
    """
    One step's line; `console_columns` names its content. nan: an overflowed loss, or rewards that nobody could read.

    Other people's scripts parse its beginning, so append at the end only.
    """

    def number(key: str, decimals: int) -> str:
        return "nan" if metrics[key] is None else f"{metrics[key]:.{decimals}f}"

    reward, sampled = (
        f"reward {number('reward/mean', 6)}",
        f"rollout {number('rollout/tok_s', 1)} tok/s",
    )
    if metrics["rollout/tok_s"] is None:  # given replies
        reward = sampled = ""
    share = metrics["reward/zero_std_frac"]
    signal = "no step" if not metrics["update/rows"] else "" if share is None else f"{share:.0%}"
    parts = [
        f"step {metrics['step']}/{num_steps}",
        f"loss {number('loss', 4)}",
        reward,
        f"{number('step/s', 1)}s",
    ]
    return " | ".join(
        filter(None, [*parts, sampled, f"train {number('train/tok_s', 1)} tok/s", signal])
    )


# ---- the live line


class LiveLine(alive.Bar):
    """Steps done, phase, speed of the last step and time left."""

    speed = ""

    def __init__(self, num_steps: int, step: int = 0):
        form = "{bar:10} {n_fmt}/{total_fmt} steps | {desc}{remaining} left"
        super().__init__(
            total=num_steps, initial=step, unit="step", bar_format=form, dynamic_ncols=True
        )

    def begin(self, phase: str) -> None:
        self.activity = PHASES.get(phase, phase)
        self.set_description_str(
            "".join(f"{part} | " for part in (self.activity, self.speed) if part)
        )

    def note(self, step: dict[str, Any]) -> None:
        """A step has ended; what came before a run's first one, an evaluation, is not in its speed."""
        if self.n == self.start_n:
            self.start_t, self.begin_s = (
                time.time() - step["step/s"],
                time.monotonic() - step["step/s"],
            )
        self.speed = f"{step['rollout/tok_s'] or step['train/tok_s']:,.0f} tok/s"
        self.update(step["step"] - self.n)
        self.begin(self.activity)
