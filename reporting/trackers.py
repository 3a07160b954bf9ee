"""
Trackers: a run's figures, settings and some of its completions in trackio, TensorBoard or W&B.

    uv run --extra trackio train.py --report-to trackio            while the run goes
    uv run --extra trackio -m reporting.trackers runs/NAME --report-to trackio      later: what it has not got yet

Training starts a process for each tracker, which follows the run's files and ends when its input does. So a tracker
that raises, hangs, prints or takes its process down costs the training nothing: it is told of once, and what it missed
can be sent later. What is left out: what the figures are (docs/reference.md).
"""

import importlib.util
import json
import os
import re
import select
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import flags
from config import TRACKERS

MODULES = {"trackio": "trackio", "tensorboard": "tensorboardX", "wandb": "wandb"}
PROJECT = "gwen"  # unless TRACKIO_PROJECT or WANDB_PROJECT names another
LOOK_EVERY = 1.0  # seconds between two looks at a run's files
MOST_WAIT = 30.0  # seconds that a run waits for its trackers at the end
TABLE_EVERY, MOST_ROWS = 10, 16  # steps between two tables of completions, and rows of a table


def check(names: Iterable[str]) -> None:
    """ValueError for a tracker that is not installed, with the command that installs it."""
    for name in names:
        if importlib.util.find_spec(MODULES[name]) is None:
            raise ValueError(f"--report-to {name}: {MODULES[name]} is not installed; begin with `{_command(name)} ...`")


def _command(name: str, script: str = "train.py") -> str:
    return f"uv run --extra {name} {script} --report-to {name}"


# ---- in the training process


class Trackers:
    """The processes that report a run while it goes on."""

    def __init__(self, names: Iterable[str], run_dir: Path, tell: Callable[[str], None]):
        self.dir, self.tell = run_dir, tell
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        for name in dict.fromkeys(names):
            try:
                self.running[name] = self._start(name)
            except OSError as error:
                self._give_up(name, str(error))

    def _start(self, name: str) -> subprocess.Popen[bytes]:
        path = log_of(self.dir, name)
        path.parent.mkdir(exist_ok=True)
        command = [sys.executable, "-m", __name__, str(self.dir), "--report-to", name, "--follow"]
        paths = (str(Path(__file__).parent.parent), os.environ.get("PYTHONPATH"))
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
        with path.open("wb") as log:  # a session of its own: Ctrl-C is for the run
            return subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _give_up(self, name: str, why: str) -> None:
        self.running.pop(name, None)
        again = _command(name, f"-m {__name__} {self.dir}")
        self.tell(f"WARNING: {name} gets no more of this run: {why}; `{again}` sends the rest later")

    def look(self) -> None:
        """Tells of those that have failed."""
        for name, process in list(self.running.items()):
            if process.poll() is not None:
                self._give_up(name, _last_line(log_of(self.dir, name)))

    def finish(self) -> None:
        """Tells all of them that the run is over, and waits `MOST_WAIT` seconds at most for what they have to send."""
        for process in self.running.values():
            assert process.stdin is not None
            process.stdin.close()
        end = time.monotonic() + MOST_WAIT
        for name, process in list(self.running.items()):
            try:
                if process.wait(max(end - time.monotonic(), 0)):
                    self._give_up(name, _last_line(log_of(self.dir, name)))
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)  # what it has started too
                process.wait()
                self._give_up(name, f"it was not done {MOST_WAIT:.0f} s after the end")
        self.running = {}


def log_of(run_dir: Path, name: str) -> Path:
    """What a tracker printed."""
    return run_dir / "trackers" / f"{name}.log"


def _last_line(path: Path) -> str:
    lines = path.read_text(errors="replace").split("\n")
    return next((line.strip()[:300] for line in reversed(lines) if line.strip()), "it ended without a word")


def cut_after(run_dir: Path, step: int, evaluation: int) -> None:
    """A run goes on after `step`, its last evaluation on record after `evaluation`: what came later is sent anew."""
    for path in run_dir.glob("trackers/*.json"):
        try:
            state = json.loads(path.read_text())
            most = {"metrics": step, "tables": step, "eval": evaluation}
            state |= {name: min(state[name], least) for name, least in most.items()}
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path} is damaged; remove it, and {path.stem} gets the whole run anew") from error
        path.write_text(json.dumps(state))


# ---- in the process of a tracker


class Tail:
    """The lines that a file got since the last look; one that is still being written waits."""

    def __init__(self, path: Path):
        self.path, self.offset = path, 0

    def lines(self) -> Iterator[bytes]:
        if not self.path.is_file():
            return
        with self.path.open("rb") as file:
            file.seek(self.offset)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self.offset += len(line)
                yield line


class Source:
    """The files of a run, read on and on."""

    def __init__(self, run_dir: Path):
        names = ("metrics", "eval", "rollouts", "eval_answers")
        self.metrics, self.evals, self.rollouts, self.answers = (Tail(run_dir / f"{name}.jsonl") for name in names)
        self.group: list[dict[str, Any]] = []  # of completions that may not be whole yet
        self.answers_at: dict[int, list[dict[str, Any]]] = {}  # by step, of evaluations that are not sent yet

    def send(self, sender: Any, state: dict[str, Any], is_over: bool) -> None:
        """Gives a tracker what is new, and counts it in the state."""
        for line in self.metrics.lines():
            record = json.loads(line)
            if record["step"] > state["metrics"]:
                sender.log(numbers(record), record["step"])
                state["metrics"] = record["step"]
        for group in self.groups(is_over):
            if group[0]["step"] > state["tables"]:
                sender.table("completions", [completion_row(row) for row in group[:MOST_ROWS]], group[0]["step"])
                state["tables"] = group[0]["step"]
        for line in self.evals.lines():
            record = json.loads(line)
            for answer in map(json.loads, self.answers.lines()):  # which are written before their evaluation
                self.answers_at.setdefault(answer["step"], []).append(answer)
            answers = spread(self.answers_at.pop(record["step"], []))
            if record["step"] > state["eval"]:
                sender.log(numbers(record), record["step"])
                sender.table("eval/answers", [answer_row(answer) for answer in answers], record["step"])
                state["eval"] = record["step"]

    def groups(self, is_over: bool) -> Iterator[list[dict[str, Any]]]:
        """The first group of every tenth step, once it is whole."""
        for line in self.rollouts.lines():
            place = re.match(rb'\{"step": (\d+), "group": 0,', line)
            if place and (int(place[1]) == 1 or int(place[1]) % TABLE_EVERY == 0):
                self.group.append(json.loads(line))
            elif self.group:
                yield self.group
                self.group = []
        if is_over and self.group:
            yield self.group


def numbers(record: dict[str, Any]) -> dict[str, float]:
    """The figures of a record that were measured, by the record's own names."""
    return {key: value for key, value in record.items() if value is not None and key != "step"}


def spread(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [rows[index * len(rows) // MOST_ROWS] for index in range(MOST_ROWS)] if len(rows) > MOST_ROWS else rows


def completion_row(record: dict[str, Any]) -> dict[str, Any]:
    texts = {"prompt": text(record["prompt"]), "completion": text(record["completion"])}
    rewards = {f"reward/{name}": value for name, value in record["rewards"].items()}
    return (
        {"step": record["step"]} | texts | {"reward": record["reward"]} | rewards | {"advantage": record["advantage"]}
    )


def answer_row(record: dict[str, Any]) -> dict[str, Any]:
    texts = {"prompt": text(record["prompt"]), "completion": text(record["completions"][0])}
    return {"step": record["step"], "problem": record["problem"]} | texts | {"value": record["values"][0]}


def text(value: Any) -> str:
    """Text, or messages as JSON, without the lone surrogates that no tracker can store."""
    value = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return value.encode("utf-8", "replace").decode()


class Trackio:
    def __init__(self, run_dir: Path, settings: dict[str, Any], state: dict[str, Any]):
        import trackio

        self.trackio = trackio
        self.run = trackio.init(
            os.environ.get("TRACKIO_PROJECT", PROJECT),
            name=run_dir.resolve().name,
            config=settings,
            resume="allow" if state["begun"] else "never",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def log(self, figures: dict[str, float], step: int) -> None:
        self.run.log(figures, step=step)

    def table(self, name: str, rows: list[dict[str, Any]], step: int) -> None:
        self.run.log({name: self.trackio.Table(data=rows)}, step=step)

    def finish(self) -> None:
        self.run.finish()


class TensorBoard:
    def __init__(self, run_dir: Path, settings: dict[str, Any], state: dict[str, Any]):
        from tensorboardX import SummaryWriter

        folder = str(run_dir / "trackers" / "tensorboard")
        self.writer = SummaryWriter(folder, purge_step=state["metrics"] + 1 if state["begun"] else None)
        if not state["begun"]:  # four spaces: Markdown's way to show it as it is
            self.writer.add_text("settings", "\n".join(f"    {name}: {value}" for name, value in settings.items()))

    def log(self, figures: dict[str, float], step: int) -> None:
        for name, value in figures.items():
            self.writer.add_scalar(name, value, step)

    def table(self, name: str, rows: list[dict[str, Any]], step: int) -> None:
        """TensorBoard has none."""

    def finish(self) -> None:
        self.writer.close()


class Wandb:
    def __init__(self, run_dir: Path, settings: dict[str, Any], state: dict[str, Any]):
        import wandb

        self.wandb = wandb
        self.run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            id=state["id"],
            name=run_dir.resolve().name,
            dir=str(run_dir / "trackers"),
            config=settings,
            resume="allow",
            settings=wandb.Settings(console="off"),
        )
        # its own steps may not go back, as those of a run do that goes on from a checkpoint
        self.run.define_metric("step")
        self.run.define_metric("*", step_metric="step")

    def log(self, figures: dict[str, float], step: int) -> None:
        self.run.log(figures | {"step": step})

    def table(self, name: str, rows: list[dict[str, Any]], step: int) -> None:
        columns = list(dict.fromkeys(key for row in rows for key in row))
        data = [[row.get(column) for column in columns] for row in rows]
        self.run.log({name: self.wandb.Table(columns=columns, data=data), "step": step})

    def finish(self) -> None:
        self.run.finish()


SENDERS: dict[str, Any] = {"trackio": Trackio, "tensorboard": TensorBoard, "wandb": Wandb}


def report(run_dir: Path, name: str, follow: bool) -> None:
    """Sends a tracker what it has not got of a run; with `follow` until standard input ends."""
    path = run_dir / "trackers" / f"{name}.json"
    path.parent.mkdir(exist_ok=True)
    state = {"id": uuid.uuid4().hex, "begun": False, "metrics": -1, "eval": -1, "tables": -1}
    if path.is_file():
        state |= json.loads(path.read_text())
    settings = flags.load_yaml(run_dir / "config.yaml", f"{run_dir}/config.yaml")
    sender, source = SENDERS[name](run_dir, settings, state), Source(run_dir)
    state["begun"] = True
    try:
        while True:
            is_over = not follow or bool(select.select([sys.stdin], [], [], LOOK_EVERY)[0])
            source.send(sender, state, is_over)
            if is_over:
                break
        sender.finish()
    finally:
        path.write_text(json.dumps(state))


def main(argv: list[str] | None = None) -> None:
    parser = flags.Parser("reporting.trackers", "Send a run's figures to trackers, each what it has not got yet.")
    parser.add_argument("run", type=Path, metavar="RUN", help="a run's directory")
    parser.add_argument("--report-to", nargs="+", choices=TRACKERS, required=True, help="trackers to send to")
    parser.add_argument("--follow", action="store_true", help="go on until standard input ends, as train.py does")
    args = parser.parse_args(sys.argv[1:] if argv is None else argv)
    try:
        if not (args.run / "config.yaml").is_file():
            raise ValueError(f"{args.run}: no config.yaml there; give the directory of a run, as runs/NAME")
        check(args.report_to)
        for name in args.report_to:
            report(args.run, name, args.follow)
    except ValueError as error:
        flags.fail(error)


if __name__ == "__main__":
    main()
