"""
Trackers: a run's figures, settings and samples of its completions in trackio, TensorBoard or W&B.

Each works in a thread of its own, so one that hangs holds nothing up. What it raises is told once, and it gets no more.
At the end a run waits `MOST_WAIT` seconds at most for what is still to be sent.
"""

import importlib
import importlib.util
import os
import queue
import threading
import time
import uuid
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import flags
from reporting.health import Records
from reporting.history import fold, prompt_text

MODULES = {"trackio": "trackio", "tensorboard": "tensorboardX", "wandb": "wandb"}
PROJECT = "gwen"  # unless TRACKIO_PROJECT or WANDB_PROJECT names another
MOST_WAIT = 30.0  # seconds
TABLE_EVERY, MOST_ROWS = 10, 16  # steps between two tables of completions, and rows of a table
Tables = dict[str, Records]  # by name


def check(names: Iterable[str]) -> None:
    """ValueError for a tracker that is not installed, with the command that installs it."""
    for name in names:
        if importlib.util.find_spec(MODULES[name]) is None:
            again = f"uv run --extra {name} train.py --report-to {name} ..."
            raise ValueError(f"--report-to {name}: {MODULES[name]} is not installed; begin with `{again}`")


class Tracker:
    """One tracker of a run. A run that goes on after `step` goes on in the same tracked run."""

    def __init__(self, name: str, run_dir: Path, step: int, earlier: Records, tell: Callable[[str], None]):
        """earlier: the records so far, for a tracker that knows nothing of the run yet."""
        self.name, self.tell = name, tell
        self.jobs: queue.SimpleQueue[tuple[int, dict[str, Any], Tables] | None] = queue.SimpleQueue()
        known = run_dir.resolve() / "trackers" / f"{name}.id"
        for record in () if known.is_file() else earlier:
            self.log(record, {})
        self.thread = threading.Thread(target=self._work, args=(known, step), daemon=True)
        self.thread.start()

    def log(self, record: dict[str, Any], tables: Tables) -> None:
        """Sends the figures of a record that were measured, and tables beside them."""
        figures = {key: value for key, value in record.items() if value is not None and key != "step"}
        self.jobs.put((record["step"], figures, tables))

    def _work(self, known: Path, step: int) -> None:
        try:
            known.parent.mkdir(exist_ok=True)
            run_dir, begun = known.parent.parent, known.is_file()
            run_id = known.read_text() if begun else uuid.uuid4().hex
            settings = flags.load_yaml(run_dir / "config.yaml", "config.yaml")
            log, end = OPEN[self.name](run_dir, settings, run_id, step if begun else None)
            known.write_text(run_id)
            while job := self.jobs.get():
                log(*job)
            end()
        except BaseException as error:  # SystemExit too: whatever a tracker does, the run goes on
            self._give_up(f"{type(error).__name__}: {error}")

    def finish(self, seconds: float) -> None:
        """Waits so long for what is still to be sent."""
        self.jobs.put(None)
        self.thread.join(seconds)
        if self.thread.is_alive():
            self._give_up(f"it was not done {MOST_WAIT:.0f} s after the end")

    def _give_up(self, why: str) -> None:
        self.tell(f"WARNING: {self.name} gets no more of this run: {why}")


def finish(trackers: Iterable[Tracker]) -> None:
    """Ends all of them within `MOST_WAIT` seconds."""
    end = time.monotonic() + MOST_WAIT
    for tracker in trackers:
        tracker.finish(max(end - time.monotonic(), 0.0))


def completion_row(record: dict[str, Any]) -> dict[str, Any]:
    texts = {"prompt": prompt_text(record["prompt"]), "completion": fold(record["completion"])}
    rewards = {"reward": record["reward"]} | {f"reward/{name}": value for name, value in record["rewards"].items()}
    return {"step": record["step"]} | texts | rewards | {"advantage": record["advantage"]}


def answer_row(answer: dict[str, Any]) -> dict[str, Any]:
    texts = {"prompt": prompt_text(answer["prompt"]), "completion": fold(answer["completions"][0])}
    return {"problem": answer["problem"]} | texts | {"value": answer["values"][0]}


# ---- each tracker: a function that logs figures and tables of a step, and one that ends

Opened = tuple[Callable[[int, dict[str, Any], Tables], None], Callable[[], None]]


def open_trackio(run_dir: Path, settings: dict[str, Any], run_id: str, step: int | None) -> Opened:
    trackio: Any = importlib.import_module(MODULES["trackio"])
    project, resume = os.environ.get("TRACKIO_PROJECT", PROJECT), "never" if step is None else "allow"
    quiet = {"embed": False, "auto_log_gpu": False, "auto_log_cpu": False}
    run = trackio.init(project, name=run_dir.name, config=settings, resume=resume, **quiet)

    def log(step: int, figures: dict[str, Any], tables: Tables) -> None:
        run.log(figures | {name: trackio.Table(data=rows) for name, rows in tables.items()}, step=step)

    return log, run.finish


def open_tensorboard(run_dir: Path, settings: dict[str, Any], run_id: str, step: int | None) -> Opened:
    """It has no tables."""
    tensorboard: Any = importlib.import_module(MODULES["tensorboard"])
    folder, purge = str(run_dir / "trackers" / "tensorboard"), None if step is None else step + 1
    suffix = f".{step or 0:06d}"  # files of the same second differ
    writer = tensorboard.SummaryWriter(folder, purge_step=purge, filename_suffix=suffix)
    if step is None:  # four spaces: Markdown's way to show it as it is
        writer.add_text("settings", "\n".join(f"    {name}: {value}" for name, value in settings.items()))

    def log(step: int, figures: dict[str, Any], tables: Tables) -> None:
        for name, value in figures.items():
            writer.add_scalar(name, value, step)

    return log, writer.close


def open_wandb(run_dir: Path, settings: dict[str, Any], run_id: str, step: int | None) -> Opened:
    wandb: Any = importlib.import_module(MODULES["wandb"])
    run = wandb.init(
        project=os.environ.get("WANDB_PROJECT", PROJECT),
        id=run_id,
        name=run_dir.name,
        dir=str(run_dir / "trackers"),
        config=settings,
        resume="allow",
        settings=wandb.Settings(console="off", quiet=True),
    )
    run.define_metric("step")  # W&B's own steps may not go back, as those of a resumed run do
    run.define_metric("*", step_metric="step")

    def log(step: int, figures: dict[str, Any], tables: Tables) -> None:
        drawn = {
            name: wandb.Table(columns=list(rows[0]), data=[list(row.values()) for row in rows])
            for name, rows in tables.items()
        }
        run.log(figures | drawn | {"step": step})

    return log, run.finish


OPEN = {"trackio": open_trackio, "tensorboard": open_tensorboard, "wandb": open_wandb}
