"""
What a run tells about itself: the phase clock, tokens per second, `metrics.jsonl`, the console line.

MLX computes when it must, not when it is told, so a clock around lazy code times nothing. A phase therefore hands its
arrays to `done`, which waits for them: the work is billed to the phase that caused it, and what no phase claims shows
up as `other/s`.
"""

import contextlib
import functools
import json
import os
import platform
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import mlx.core as mx


class PhaseClock:
    """Seconds by phase within one step; phases do not nest."""

    def __init__(self, on_phase: Callable[[str], None] = lambda name: None) -> None:
        self.on_phase = on_phase  # hears of each phase that begins
        self.seconds: dict[str, float] = {}
        self._begin = time.perf_counter()
        self._running: str | None = None

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[Callable[..., None]]:
        """Bills what happens inside to `name`; the body must end with `done(*arrays)`, which waits for them."""
        assert self._running is None, f"phase {name} inside phase {self._running}"
        self.on_phase(name)
        self._running, finished, begin = name, False, time.perf_counter()

        def done(*arrays: Any) -> None:
            nonlocal finished
            mx.eval(arrays)  # wait: the phase pays for its own lazy work
            finished = True

        try:
            yield done
        finally:
            self._running = None
        assert finished, f"phase {name} ended without done()"
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - begin

    def end_step(self) -> dict[str, float]:
        """Seconds of every phase since the last call, with `step` (all of it) and `other` (what no phase claimed)."""
        now = time.perf_counter()
        seconds = self.seconds | {"step": now - self._begin, "other": now - self._begin - sum(self.seconds.values())}
        self.seconds, self._begin = {}, now
        return seconds


class JsonLines:
    """An append-only file of one JSON object a line, flushed at every line."""

    def __init__(self, path: Path):
        self.path = path
        path.touch()

    def write(self, record: dict[str, Any]) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(record, allow_nan=False) + "\n")

    def read(self) -> list[dict[str, Any]]:
        """Every record."""
        return [json.loads(line) for line in self.path.read_text().splitlines()]

    def cut_after(self, step: int) -> None:
        """Drops the records of later steps, and a last line that a crash left unfinished."""
        kept = []
        for line in self.path.read_text().splitlines():
            try:
                if json.loads(line)["step"] > step:
                    continue
            except (ValueError, KeyError, TypeError):
                break
            kept.append(line + "\n")
        replace_text(self.path, "".join(kept))


def replace_text(path: Path, text: str) -> None:
    """Writes a file beside its place and renames it: a disk that is full leaves what was there before."""
    scratch = path.with_name(path.name + ".partial")
    try:
        scratch.write_text(text)
        os.replace(scratch, path)
    except OSError as error:  # a failed write does not know its file
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        scratch.unlink(missing_ok=True)


# the prefix of a step's line leaves room for a number, and none for its name
CONSOLE_COLUMNS = "columns: step, loss, mean reward, seconds, tokens/s sampled, tokens/s trained, groups without signal"


WIDTH = 100  # columns of a step's line


def console_line(metrics: dict[str, Any], num_steps: int) -> str:
    """
    The one line of a step, within `WIDTH` columns; `CONSOLE_COLUMNS` says what stands in it.

    Other people's scripts read its beginning: add at the end only. Where the numbers are too long for the line, the end
    is dropped, and then digits: 1234567.891 becomes 1.2e6.
    """
    begin = f"step {metrics['step']}/{num_steps}"
    for digits in (None, 6, 5, 4, 3, 2, 1):
        number = functools.partial(_number, digits=digits)
        line = (
            f"{begin} | loss {number(metrics['loss'], 4)} | reward {number(metrics['reward/mean'], 6)} | "
            f"{number(metrics['step/s'], 1)}s | rollout {number(metrics['rollout/tok_s'], 1)} tok/s | "
            f"train {number(metrics['train/tok_s'], 1)} tok/s"
        )
        end = f" | {metrics['reward/zero_std_frac']:.0%}"
        if len(line + end) <= WIDTH:
            return line + end
        if len(line) <= WIDTH:
            break
    return line


def _number(value: float | None, decimals: int, digits: int | None) -> str:
    """
    So many decimals, or so many digits where that is shorter.

    A loss that overflowed or was never computed and rewards that nobody could read are nan.
    """
    if value is None:
        return "nan"
    text = f"{value:.{decimals}f}"
    if digits is None:
        return text
    short = re.sub(r"e\+?(-?)0*(\d)", r"e\1\2", f"{round(value, decimals):.{digits}g}")
    return min(text, short, key=len)


def with_interval(record: dict[str, Any], name: str) -> str:
    """A figure of an evaluation with its 95% confidence interval, "0.475 \u00b1 0.043", as far as it has them."""
    value, half = record.get(f"eval/{name}"), record.get(f"eval/{name}_ci95")
    if value is None:
        return "unreadable"
    return f"{value:.3f}" + ("" if half is None else f" \u00b1 {half:.3f}")


def evaluation_line(record: dict[str, Any]) -> str:
    """The one line of an evaluation."""
    shown = ["accuracy" if "eval/accuracy" in record else "score", "greedy"]
    if record.get("eval/witness") is not None:
        shown.insert(1, "witness")
    parts = [f"{name} {with_interval(record, name)}" for name in shown]
    return f"eval/{' | '.join(parts)} | {record['eval/num']} problems"


def comparison(first: dict[str, Any], last: dict[str, Any]) -> str:
    """The lines that compare two evaluations, each figure with its 95% interval."""
    figure = "accuracy" if "eval/accuracy" in last else "score"
    nested = [key.removeprefix("eval/") for key in last if key.count("/") == 2 and not key.endswith("_ci95")]
    if sum(name.startswith("reward/") for name in nested) == 1:  # the figure itself, or what it is compared with
        nested = [name for name in nested if not name.startswith("reward/")]
    lines = []
    for name in (figure, "witness", "greedy", *nested, "tokens", "refusals", "repeated"):
        if last.get(f"eval/{name}") is not None:
            before, after = with_interval(first, name), with_interval(last, name)
            lines.append(f"{name}: before {before}, after {after}")
    lines[0] = f"held-out {lines[0]} ({last['eval/num']} problems)"
    return "\n".join(lines)


def environment(blas: str) -> dict[str, Any]:
    """Versions, device and commit: what a reader of a run needs to repeat it."""

    def installed(package: str) -> str | None:
        try:
            return version(package)
        except PackageNotFoundError:
            return None

    commit = None
    if shutil.which("git"):
        asked = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True, check=False
        )
        commit = asked.stdout.strip() or None
    packages = ["mlx", "mlx-lm", "transformers", "datasets", "numpy"]
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "device": str(mx.default_device()),
        "machine": mx.device_info().get("device_name", platform.processor() or platform.machine()),
        "num_cpus": os.cpu_count(),
        "blas": blas,
        "versions": {package: installed(package) for package in packages},
        "commit": commit,
    }
