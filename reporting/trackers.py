"""
Sends a run's figures and settings to the trackers W&B and SwanLab, through mlx_lm's callbacks.

If a tracker raises an error, the error is reported once and the tracker gets no more figures; the
run goes on. A resumed run appears in the tracker as a new run.
"""

import contextlib
import importlib
import importlib.util
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from text import documents


def check_trackers(names: Iterable[str]) -> None:
    """Raises ValueError if a tracker is not installed, and names the command that installs it."""
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise ValueError(
                f"--report-to {name}: {name} is not installed; begin with "
                f"`uv run --extra {name} train.py --report-to {name} ...`"
            )


class Tracker:
    """
    Sends a run's figures to one tracker.

    name: "wandb" or "swanlab". report: prints a warning.
    """

    callback: Any = None  # None after an error

    def __init__(self, name: str, run_dir: Path, report: Callable[[str], None]):
        self.name = name
        self.report = report
        os.environ.setdefault("WANDB_CONSOLE", "off")  # the console log would copy the live line
        with self._report_errors():
            from mlx_lm.tuner import callbacks  # imported here, as it takes seconds

            settings = documents.load_yaml(run_dir / "config.yaml", "config.yaml")
            project = os.environ.get("WANDB_PROJECT", "gwen")
            self.callback = callbacks.get_reporting_callbacks(name, project, str(run_dir), settings)

    def log(self, record: dict[str, Any]) -> None:
        """Sends the measured numbers of a record; other values are left out."""
        if not self.callback:
            return
        figures = {
            key: value
            for key, value in record.items()
            if isinstance(value, (int, float)) and key != "step"
        }
        with self._report_errors():
            self.callback.on_train_loss_report(figures | {"iteration": record["step"]})

    def finish(self) -> None:
        """Waits until everything is sent."""
        if self.callback:
            with self._report_errors():
                importlib.import_module(self.name).finish()

    @contextlib.contextmanager
    def _report_errors(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self.callback = None
            self.report(
                f"WARNING: {self.name} gets no more figures of this run: "
                f"{type(error).__name__}: {error}"
            )
