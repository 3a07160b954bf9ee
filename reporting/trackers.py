"""
Trackers: a run's figures and settings in W&B or SwanLab, by mlx_lm's callbacks.

What a tracker raises is told once, and it gets no more; the run goes on. A resumed run begins a new one there.
"""

import contextlib
import importlib
import importlib.util
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import flags


def check_trackers(names: Iterable[str]) -> None:
    """ValueError for a tracker that is not installed, with the command that installs it."""
    for name in names:
        if importlib.util.find_spec(name) is None:
            again = f"uv run --extra {name} train.py --report-to {name} ..."
            raise ValueError(f"--report-to {name}: {name} is not installed; begin with `{again}`")


class Tracker:
    callback: Any = None

    def __init__(self, name: str, run_dir: Path, tell: Callable[[str], None]):
        self.name, self.tell = name, tell
        os.environ.setdefault("WANDB_CONSOLE", "off")  # it would copy the live line
        with self._report_errors():
            from mlx_lm.tuner import callbacks  # here: it takes seconds

            settings = flags.load_yaml(run_dir / "config.yaml", "config.yaml")
            project = os.environ.get("WANDB_PROJECT", "gwen")
            self.callback = callbacks.get_reporting_callbacks(name, project, str(run_dir), settings)

    def log(self, record: dict[str, Any]) -> None:
        """Sends the figures of a record that were measured; a list is none."""
        figures = {
            key: value
            for key, value in record.items()
            if isinstance(value, (int, float)) and key != "step"
        }
        if self.callback:
            with self._report_errors():
                self.callback.on_train_loss_report(figures | {"iteration": record["step"]})

    def finish(self) -> None:
        """Waits for what is still to be sent."""
        if self.callback:
            with self._report_errors():
                importlib.import_module(self.name).finish()

    @contextlib.contextmanager
    def _report_errors(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self.callback = None
            self.tell(
                f"WARNING: {self.name} gets no more of this run: {type(error).__name__}: {error}"
            )
