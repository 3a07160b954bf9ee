"""
What a run tells about itself: the phase clock, tokens per second, `metrics.jsonl`, the console line.

MLX computes when it must, not when it is told, so a clock around lazy code times nothing. A phase therefore hands its
arrays to `done`, which waits for them: the work is billed to the phase that caused it, and what no phase claims shows
up as `other/s`.
"""

import contextlib
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import mlx.core as mx


class PhaseClock:
    """Seconds by phase within one step; phases do not nest."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._begin = time.perf_counter()
        self._running: str | None = None

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[Callable[..., None]]:
        """Bills what happens inside to `name`; the body must end with `done(*arrays)`, which waits for them."""
        assert self._running is None, f"phase {name} inside phase {self._running}"
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
                record = json.loads(line)
            except ValueError:
                break
            if record["step"] <= step:
                kept.append(line + "\n")
        scratch = self.path.with_suffix(".tmp")
        scratch.write_text("".join(kept))
        os.replace(scratch, self.path)


def console_line(metrics: dict[str, Any], num_steps: int) -> str:
    """The one line of a step. Other people's scripts read its beginning: add at the end only."""
    return (
        f"step {metrics['step']}/{num_steps} | loss {metrics['loss']:.4f} | reward {metrics['reward/mean']:.6f} | "
        f"{metrics['step/s']:.1f}s | rollout {metrics['rollout/tok_s']:.1f} tok/s | "
        f"train {metrics['train/tok_s']:.1f} tok/s | judge {metrics['judge/s']:.1f}s | "
        f"update {metrics['update/s']:.1f}s | tokens {metrics['completion/mean_tokens']:.1f} | "
        f"peak {metrics['mem/peak_gb']:.2f} GB"
    )


def environment(blas: str) -> dict[str, Any]:
    """Versions, device and commit: what a reader of a run needs to repeat it."""

    def installed(package: str) -> str | None:
        try:
            return version(package)
        except PackageNotFoundError:
            return None

    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True, check=False
    )
    packages = ["mlx", "mlx-lm", "transformers", "datasets", "numpy"]
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "device": str(mx.default_device()),
        "machine": mx.device_info().get("device_name", platform.processor() or platform.machine()),
        "num_cpus": os.cpu_count(),
        "blas": blas,
        "versions": {package: installed(package) for package in packages},
        "commit": commit.stdout.strip() or None,
    }


def fail(message: object) -> None:
    """Ends the process the way a user's mistake does: one line on stderr, exit status 2."""
    print(f"error: {message}", file=sys.stderr)
    sys.exit(2)
