"""
A run's terminal output: scrolling lines, and below them one live line with the current phase, the speed and the time
left, for a terminal only.
"""

import sys
from typing import Any, TextIO

from tqdm.auto import tqdm

from config import Config
from disk.run_files import what_of, with_interval
from flags import safe
from machine import alive

PHASES = {"rollout": "sampling", "reward": "rewards", "judge": "judging", "ref": "reference", "update": "updating"}
PHASES |= {"teacher": "asking the teacher"}


def say(line: str, file: TextIO | None = None) -> None:
    """Prints a line above the live one, safe to show, and flushes."""
    file = sys.stdout if file is None else file
    tqdm.write(safe(line), file=file)
    file.flush()
    alive.note()


def warn(line: str) -> None:
    say(line, sys.stderr)


# ---- the lines

WIDTH = 100  # columns of a step's line


def console_columns(config: Config) -> str:
    """Names the figures of a step's line, which has no room for names."""
    compared = ", groups without signal" if config.compares_rewards else ""
    return f"columns: step, loss, mean reward, seconds, tokens/s sampled, tokens/s trained{compared}"


def console_line(metrics: dict[str, Any], num_steps: int) -> str:
    """
    One step's line; `console_columns` names its content. Within `WIDTH` columns it is exact to its decimals, beyond
    them it loses its end first, then digits.

    Other people's scripts parse its beginning, so append at the end only.
    """
    share = metrics["reward/zero_std_frac"]
    end, room = "" if share is None else f" | {share:.0%}", WIDTH
    if not metrics["update/rows"]:  # nothing teaches; digits go before these words do
        end, room = " | no step", WIDTH - len(" | no step")
    for form in (_fixed, _short):
        line = (
            f"step {metrics['step']}/{num_steps} | loss {form(metrics['loss'], 4)} | "
            f"reward {form(metrics['reward/mean'], 6)} | {form(metrics['step/s'], 1)}s | "
            f"rollout {form(metrics['rollout/tok_s'], 1)} tok/s | train {form(metrics['train/tok_s'], 1)} tok/s"
        )
        if len(line) <= room:
            break
    return line + (end if len(line + end) <= WIDTH else "")


SFT_COLUMNS = "columns: step, loss, seconds, tokens/s trained"


def sft_line(metrics: dict[str, Any], num_steps: int) -> str:
    """One step's line with --loss-type sft; begins like `console_line`, and `SFT_COLUMNS` names its content."""
    return (
        f"step {metrics['step']}/{num_steps} | loss {_fixed(metrics['loss'], 4)} | "
        f"{_fixed(metrics['step/s'], 1)}s | train {_fixed(metrics['train/tok_s'], 1)} tok/s"
    )


def _fixed(value: float | None, decimals: int) -> str:
    """nan stands for an overflowed or missing loss and for unreadable rewards."""
    return "nan" if value is None else f"{value:.{decimals}f}"


def _short(value: float | None, _: int) -> str:
    """Three digits, of large numbers those before the point."""
    return _fixed(value, 0) if value is None or abs(value) >= 100 else f"{value:.3g}"


def comparison(first: dict[str, Any], last: dict[str, Any]) -> str:
    """Lines that compare two evaluations, each figure with its 95% interval."""
    figure = next(name for name in ("accuracy", "loss", "score") if f"eval/{name}" in last)
    nested = [key.removeprefix("eval/") for key in last if key.count("/") == 2 and not key.endswith("_ci95")]
    if sum(name.startswith("reward/") for name in nested) == 1:  # duplicates the figure or its comparison
        nested = [name for name in nested if not name.startswith("reward/")]
    others = ["perplexity"] if figure == "loss" else ["witness", "greedy", *nested, "tokens", "refusals", "repeated"]
    lines = [
        f"{name}: before {with_interval(first, name)}, after {with_interval(last, name)}"
        for name in (figure, *others)
        if last.get(f"eval/{name}") is not None
    ]
    return "\n".join([f"held-out {lines[0]} ({what_of(last)})", *lines[1:]])


# ---- the live line


class LiveLine:
    """Steps done, phase, speed of the last step and time left; as a context manager it shows and removes the line."""

    def __init__(self, num_steps: int):
        self.num_steps, self.step, self.phase, self.speed = num_steps, 0, "", ""
        self.bar: Any = None

    def __enter__(self) -> "LiveLine":
        form = "{bar:10} {n_fmt}/{total_fmt} steps | {desc}{remaining} left"
        how: Any = {"bar_format": form, "dynamic_ncols": True, "unit": "step"}
        self.bar = alive.Bar(total=self.num_steps, initial=self.step, **how)
        return self

    def __exit__(self, *_: Any) -> None:
        self.bar.close()
        self.bar = None

    def draw(self) -> None:
        if self.bar is not None:
            self.bar.update(self.step - self.bar.n)
            self.bar.what = self.phase
            self.bar.set_description_str("".join(f"{part} | " for part in (self.phase, self.speed) if part))

    def begin(self, phase: str) -> None:
        self.phase = PHASES.get(phase, phase)
        self.draw()

    def note(self, step: dict[str, Any]) -> None:
        """Updates the line when a step ends."""
        self.step, self.speed = step["step"], f"{step['rollout/tok_s'] or step['train/tok_s']:,.0f} tok/s"
        self.draw()
