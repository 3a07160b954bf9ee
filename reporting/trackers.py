"""
Sends a run's metrics and settings to the experiment trackers W&B and SwanLab.

If a tracker raises an error, the error is reported once, no more metrics are sent to this tracker,
and the run goes on. The file trackers.json in the run directory has the run's id at each tracker,
so that a resumed run continues under the same id.
"""

import contextlib
import importlib
import importlib.util
import json
import os
import secrets
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from text import documents
from text.commands import advice_to_install_extra

IDS_FILE = "trackers.json"
KEY_PAGES = {"wandb": "https://wandb.ai/authorize", "swanlab": "https://swanlab.cn"}


def check_tracker_packages_and_keys(names: Iterable[str]) -> None:
    """
    Raises ValueError if a tracker is not installed, or if it would find no valid API key.

    The message says what to do. A tracker that works offline needs no key.
    """
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise ValueError(
                f"--report-to {name} needs the package {name}, which is not installed; "
                + advice_to_install_extra(name)
            )
        problem = find_wandb_key_problem() if name == "wandb" else find_swanlab_key_problem()
        if problem:
            prefix = name.upper()
            raise ValueError(
                f"--report-to {name}: {problem}; set the environment variable {prefix}_API_KEY to "
                f"your key from {KEY_PAGES[name]}, set {prefix}_MODE=offline to keep the data on "
                "disk, or leave --report-to out"
            )


def find_wandb_key_problem() -> str:
    """The problem with W&B's API key; "" if W&B has a usable key, or is offline."""
    wandb = importlib.import_module("wandb")
    if wandb.setup().settings.mode in ("offline", "dryrun", "disabled"):
        return ""
    try:
        # asks neither the user nor the server
        has_key = wandb.login(prompt=False, verify=False)
    except wandb.Error as error:
        return " ".join(str(error).split()).rstrip(".")
    return "" if has_key else "W&B has no API key"


def find_swanlab_key_problem() -> str:
    """The problem with SwanLab's API key; "" if SwanLab has a key, or is offline."""
    settings = importlib.import_module("swanlab").Settings()
    is_online = getattr(settings, "mode", "") == "online"
    if is_online and getattr(settings, "api_key", None) is None:
        return "SwanLab has no API key"
    return ""


def read_or_make_tracker_run_id(name: str, run_dir: Path) -> str:
    """
    The id of a run at a tracker, as stored in the run directory.

    A new id is made and stored if there is none. The environment variable WANDB_RUN_ID or
    SWANLAB_RUN_ID has precedence over the stored id.
    """
    ids_file = run_dir / IDS_FILE
    ids = {}
    if ids_file.is_file():
        ids = documents.read_json(ids_file.read_text(encoding="utf-8"))
    run_id = os.environ.get(f"{name.upper()}_RUN_ID") or ids.get(name)
    if not run_id:
        run_id = secrets.token_hex(11)[:21]  # SwanLab wants 21 lower-case letters and digits
    if ids.get(name) != run_id:
        ids_file.write_text(json.dumps(ids | {name: run_id}) + "\n", encoding="utf-8")
    return str(run_id)


def start_or_continue_tracker_run(name: str, run_dir: Path) -> Any:
    """Starts a run at a tracker, or continues the run that already has the stored id there."""
    settings = documents.load_yaml(run_dir / "config.yaml", "config.yaml")
    project = os.environ.get("WANDB_PROJECT", "gwen")
    arguments = {
        "project": project,
        "config": settings,
        "id": read_or_make_tracker_run_id(name, run_dir),
        "resume": "allow",
    }
    module = importlib.import_module(name)
    if name == "wandb":
        return module.init(name=run_dir.name, dir=str(run_dir), **arguments)
    log_dir = str(run_dir / "swanlog")
    return module.init(experiment_name=run_dir.name, logdir=log_dir, **arguments)


class Tracker:
    """
    Sends the metrics of a run to one experiment tracker.

    name: "wandb" or "swanlab". report: a function that prints a warning.
    """

    tracker_run: Any = None  # the run at the tracker; None after an error

    def __init__(self, name: str, run_dir: Path, report: Callable[[str], None]):
        self.name = name
        self.report = report
        # otherwise W&B would also record the live line
        os.environ.setdefault("WANDB_CONSOLE", "off")
        with self._disable_tracker_after_error():
            self.tracker_run = start_or_continue_tracker_run(name, run_dir)

    def send_metrics(self, record: dict[str, Any]) -> None:
        """Sends the numbers in a record of metrics, and skips all other values."""
        if self.tracker_run is None:
            return
        figures = {
            key: value
            for key, value in record.items()
            if isinstance(value, (int, float)) and key != "step"
        }
        with self._disable_tracker_after_error():
            module = importlib.import_module(self.name)
            module.log(figures | {"iteration": record["step"]}, step=record["step"])

    def finish(self) -> None:
        """Waits until everything has been sent to the tracker."""
        if self.tracker_run is not None:
            with self._disable_tracker_after_error():
                importlib.import_module(self.name).finish()

    @contextlib.contextmanager
    def _disable_tracker_after_error(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self.tracker_run = None
            self.report(
                f"WARNING: no more metrics of this run are sent to {self.name}, because of this "
                f"error: {type(error).__name__}: {error}"
            )
