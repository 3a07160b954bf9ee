"""
Sends a run's metrics and settings to the experiment trackers W&B and SwanLab.

The metrics are sent through mlx_lm's callbacks. If a tracker raises an error, the error is reported
once, no more metrics are sent to this tracker, and the run goes on. Trackers show a resumed run as
a new run.
"""

import contextlib
import importlib
import importlib.util
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from text import documents
from text.commands import advice_to_install_extra


def check_trackers_are_installed(names: Iterable[str]) -> None:
    """Raises ValueError if a tracker is not installed; the message says how to install it."""
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise ValueError(
                f"--report-to {name} needs the package {name}, which is not installed; "
                + advice_to_install_extra(name)
            )


class Tracker:
    """
    Sends the metrics of a run to one experiment tracker.

    name: "wandb" or "swanlab". report: a function that prints a warning.
    """

    callback: Any = None  # None after an error

    def __init__(self, name: str, run_dir: Path, report: Callable[[str], None]):
        self.name = name
        self.report = report
        os.environ.setdefault(
            "WANDB_CONSOLE", "off"
        )  # otherwise W&B would record the live line too
        with self._disable_tracker_after_error():
            from mlx_lm.tuner import callbacks  # imported only here, because it takes seconds

            settings = documents.load_yaml(run_dir / "config.yaml", "config.yaml")
            project = os.environ.get("WANDB_PROJECT", "gwen")
            self.callback = callbacks.get_reporting_callbacks(name, project, str(run_dir), settings)

    def send_metrics(self, record: dict[str, Any]) -> None:
        """Sends the numbers in a record of metrics, without values that are not numbers."""
        if not self.callback:
            return
        figures = {
            key: value
            for key, value in record.items()
            if isinstance(value, (int, float)) and key != "step"
        }
        with self._disable_tracker_after_error():
            self.callback.on_train_loss_report(figures | {"iteration": record["step"]})

    def finish(self) -> None:
        """Waits until everything has been sent to the tracker."""
        if self.callback:
            with self._disable_tracker_after_error():
                importlib.import_module(self.name).finish()

    @contextlib.contextmanager
    def _disable_tracker_after_error(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self.callback = None
            self.report(
                f"WARNING: no more metrics of this run are sent to {self.name}, because of this "
                f"error: {type(error).__name__}: {error}"
            )
