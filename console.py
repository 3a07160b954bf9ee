"""
What a run shows in a terminal while it goes: lines that scroll, and under them one live line that says what is done
now, how fast, and how long it will take. Where the output is no terminal there are the lines alone.

What is left out: what stands in the lines, which is in telemetry.py.
"""

import sys
import threading
import time
from typing import Any, TextIO

import cpu_blas  # noqa: F401  (before mlx)
from tqdm import tqdm

from config import Config
from health import Records
from history import duration

PHASES = {"rollout": "sampling", "reward": "rewards", "judge": "judging", "ref": "reference", "update": "updating"}


def say(line: str, file: TextIO | None = None) -> None:
    """Prints a line above what is live, at once."""
    file = sys.stdout if file is None else file
    tqdm.write(line, file=file)
    file.flush()


def warn(line: str) -> None:
    say(line, sys.stderr)


def seconds_left(config: Config, steps: Records, evals: Records) -> float | None:
    """
    Seconds until a run ends, from the records of its steps and evaluations; None before its first step ended.

    A step takes what the last ten took, an evaluation what the last one took; saving counts for nothing.
    """
    if not steps:
        return None
    done, recent = steps[-1]["step"], [step["step/s"] for step in steps[-10:]]
    left = (config.steps - done) * sum(recent) / len(recent)
    if config.eval_every and evals:
        marks = set(range(0, config.steps, config.eval_every)) | {config.steps}
        left += sum(mark > done for mark in marks) * evals[-1]["eval/s"]
    return left


class Live:
    """The live line of a run: `with` shows it and takes it away again."""

    def __init__(self, config: Config):
        self.config = config
        self.phase, self.step, self.speed = "", 0, ""
        self.left: float | None = None
        self.known_at = 0.0  # when `left` was true
        self.bar: Any = None
        self.over = threading.Event()

    def text(self) -> str:
        """Step, phase, tokens a second of the last step, time left."""
        parts = [f"step {min(self.step + 1, self.config.steps)}/{self.config.steps}", self.phase, self.speed]
        if self.left is not None:
            passed = time.perf_counter() - self.known_at
            parts.append(f"{duration(max(self.left - passed, 0.0))} left")
        return " | ".join(part for part in parts if part)

    def __enter__(self) -> "Live":
        bar = tqdm(total=self.config.steps, bar_format="{bar:10} {desc}", leave=False, disable=None, dynamic_ncols=True)
        if not bar.disable:
            self.bar = bar
            threading.Thread(target=self._count_down, daemon=True).start()
        return self

    def __exit__(self, *_: Any) -> None:
        self.over.set()
        if self.bar is not None:
            self.bar.close()
            self.bar = None

    def _count_down(self) -> None:
        while not self.over.wait(1.0):
            self.draw()

    def draw(self) -> None:
        if (bar := self.bar) is not None:
            bar.n = self.step
            bar.set_description_str(self.text())

    def begin(self, phase: str) -> None:
        """A phase begins."""
        self.phase = PHASES.get(phase, phase)
        self.draw()

    def note(self, steps: Records, evals: Records) -> None:
        """A step or an evaluation has ended, the last of these."""
        if steps:
            self.step, self.speed = steps[-1]["step"], f"{steps[-1]['rollout/tok_s']:,.0f} tok/s"
        self.left, self.known_at = seconds_left(self.config, steps, evals), time.perf_counter()
        self.draw()
