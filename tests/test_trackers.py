"""
Trackers get what a run's files hold, and whatever they do, the run ends as without them.

Those that are not installed are skipped: `uv run --extra trackio --extra tensorboard --extra wandb pytest
tests/test_trackers.py` runs all. Fakes take their place in the other tests: modules of their name on the path.
"""

import contextlib
import json
import sqlite3
import struct
import sys
import time
from pathlib import Path

import pytest
from test_report import make_run

import train
from reporting import trackers

FAKE = """
import json, os, sys, time
from pathlib import Path

class Settings:
    def __init__(self, **_): pass

class Table:
    def __init__(self, columns, data): self.held = [dict(zip(columns, row)) for row in data]

class Run:
    def tell(self, **what):
        with open(os.environ["FAKE_LOG"], "a") as file:
            file.write(json.dumps(what, default=lambda table: table.held) + "\\n")
    def define_metric(self, *_, **__): pass
    def log(self, figures):
        AT_LOG
        self.tell(log=figures)
    def finish(self):
        AT_FINISH
        self.tell(finished=True)

def init(**arguments):
    AT_INIT
    run = Run()
    run.tell(init={key: arguments[key] for key in ("project", "id", "name", "config", "resume")})
    return run
"""


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    """A busy machine may take a minute to import a tracker."""
    monkeypatch.setattr(trackers, "MOST_WAIT", 300.0)


@pytest.fixture
def run(tmp_path):
    return make_run(tmp_path / "runs" / "small")


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """A function that puts a W&B of our own on the path; it gives a function that reads what that was told."""

    def put(**at):
        text = FAKE
        for place in ("init", "log", "finish"):
            text = text.replace(f"AT_{place.upper()}", at.get(place, "pass"))
        folder, told = tmp_path / "fakes", tmp_path / "told.jsonl"
        folder.mkdir(exist_ok=True)
        (folder / "wandb.py").write_text(text)
        monkeypatch.setenv("PYTHONPATH", str(folder))
        monkeypatch.setenv("FAKE_LOG", str(told))
        monkeypatch.syspath_prepend(str(folder))
        return lambda: [json.loads(line) for line in told.read_text().splitlines()] if told.exists() else []

    yield put
    sys.modules.pop("wandb", None)


@contextlib.contextmanager
def reporting(run, said, names=("wandb",)):
    started = trackers.Trackers(list(names), run, said.append)
    yield started
    started.finish()


def records(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def append(path, record):
    with path.open("a") as file:
        file.write(json.dumps(record) + "\n")


def without_step_and_nulls(record):
    return {key: value for key, value in record.items() if value is not None and key != "step"}


def test_a_tracker_gets_the_settings_every_figure_and_samples_of_completions(run, fake):
    told, said = fake(), []
    with reporting(run, said):
        pass
    assert said == []
    first, *logged, last = told()
    assert first["init"]["config"] == {
        "model": "demo",
        "task": "demo",
        "batch": 2,
        "groups": 4,
        "steps": 6,
        "learning_rate": 0.004,
    }
    assert (first["init"]["project"], first["init"]["name"], last) == ("gwen", "small", {"finished": True})
    logged = [one["log"] for one in logged]
    figures = [one for one in logged if "completions" not in one and "eval/answers" not in one]
    written = records(run / "metrics.jsonl") + records(run / "eval.jsonl")
    assert figures == [without_step_and_nulls(record) | {"step": record["step"]} for record in written]
    (table,) = (one for one in logged if "completions" in one)
    group = [line for line in records(run / "rollouts.jsonl") if (line["step"], line["group"]) == (1, 0)]
    assert [row["completion"] for row in table["completions"]] == [line["completion"] for line in group]
    assert [row["reward/correct"] for row in table["completions"]] == [line["rewards"]["correct"] for line in group]
    answers = [one["eval/answers"] for one in logged if "eval/answers" in one]
    assert [row["completion"] for row in answers[1]][-1] == "Nine is five."


def test_what_is_written_meanwhile_is_sent_meanwhile(run, fake):
    told, said = fake(), []
    with reporting(run, said):
        append(run / "metrics.jsonl", {"step": 5, "loss": 0.5})
        end = time.monotonic() + 300
        while {"log": {"loss": 0.5, "step": 5}} not in told() and time.monotonic() < end:
            time.sleep(0.05)
        assert {"log": {"loss": 0.5, "step": 5}} in told()


def test_a_run_that_goes_on_goes_on_in_the_same_tracked_run_from_its_step(run, fake):
    told, said = fake(), []
    with reporting(run, said):
        pass
    num_told = len(told())
    trackers.cut_after(run, 2, 0)  # what the journal does when the run goes on after step 2
    with reporting(run, said):
        pass
    again = told()[num_told:]
    assert again[0]["init"]["id"] == told()[0]["init"]["id"]
    assert [one["log"]["step"] for one in again[1:-1]] == [3, 4, 4, 4]  # two steps, an evaluation and its answers
    with reporting(run, said):
        pass
    assert len(told()) == num_told + len(again) + 2  # begun and ended, with nothing between


@pytest.mark.parametrize("place", ["init", "log", "finish"])
def test_a_tracker_that_raises_is_told_of_once_with_the_command_that_sends_the_rest(run, fake, place):
    fake(**{place: "raise OSError('the wire is cut')"})
    said = []
    with reporting(run, said) as started:
        started.running["wandb"].stdin.close()
        started.running["wandb"].wait(300)
        for _ in range(3):
            started.look()
    (told,) = said
    assert told.startswith("WARNING: wandb gets no more of this run: OSError: the wire is cut; `uv run --extra wandb ")
    assert f"-m reporting.trackers {run} --report-to wandb" in told


def test_what_a_tracker_missed_is_sent_later(run, fake):
    told = fake(log="sys.exit('gone') if figures['step'] == 3 else None")
    with reporting(run, []):
        pass
    assert [one["log"]["step"] for one in told()[1:]] == [1, 2]
    told = fake()
    trackers.main([str(run), "--report-to", "wandb"])
    steps = [one["log"]["step"] for one in told() if "eval/num" not in one.get("log", {"eval/num": 0})]
    assert steps[:4] == [1, 2, 3, 4]


def test_a_tracker_that_hangs_is_waited_for_no_longer_than_agreed(run, fake, monkeypatch):
    fake(init="time.sleep(60)")
    monkeypatch.setattr(trackers, "MOST_WAIT", 0.5)
    said, begin = [], time.monotonic()
    with reporting(run, said) as started:
        process = started.running["wandb"]
        started.look()
    assert time.monotonic() - begin < 30
    assert process.returncode == -9
    assert len(said) == 1 and "not done" in said[0]


def test_one_tracker_that_hangs_keeps_nothing_from_another(run, fake, monkeypatch):
    told = fake()
    (Path(sys.path[0]) / "trackio.py").write_text("import time; time.sleep(60)")
    said = []
    with reporting(run, said, ("trackio", "wandb")) as started:
        started.running["wandb"].stdin.close()
        started.running["wandb"].wait(300)
        monkeypatch.setattr(trackers, "MOST_WAIT", 0.5)
    assert told()[-1] == {"finished": True}
    assert len(said) == 1 and "trackio" in said[0]


def test_a_tracker_that_is_not_installed_is_a_users_mistake_with_the_command_that_installs_it(monkeypatch, capsys):
    monkeypatch.setattr(trackers.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit) as ended:
        train.main(["--model", "demo", "--report-to", "tensorboard"])
    told = capsys.readouterr().err
    assert ended.value.code == 2 and told.count("\n") == 1
    assert "`uv run --extra tensorboard train.py --report-to tensorboard ...`" in told


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["nowhere", "--report-to", "wandb"], "error: nowhere: no config.yaml there"),
        (["runs/x", "--report-to", "mlflow"], "error: --report-to: invalid choice: 'mlflow'"),
        (["runs/x", "--report-to", "wandb", "--follows"], "error: --follows is no flag of reporting.trackers; "),
    ],
)
def test_a_mistake_is_told_in_one_line(argv, said, capsys):
    with pytest.raises(SystemExit) as ended:
        trackers.main(argv)
    told = capsys.readouterr().err
    assert ended.value.code == 2
    assert told.startswith(said) and told.count("\n") == 1


SMALL = ["--model", "demo", "--steps", "2", "--batch", "2", "--groups", "2", "--max-tokens", "8", "--eval-limit", "4"]


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["init: raise OSError('no')", "log: time.sleep(60)", "init: os._exit(3)"])
def test_a_run_ends_as_without_the_tracker_that_fails(tmp_path, fake, monkeypatch, capsys, fault):
    place, _, what = fault.partition(": ")
    fake(**{place: what})
    train.main([*SMALL, "--run-dir", str(tmp_path / "plain")])
    monkeypatch.setattr(trackers, "MOST_WAIT", 300.0 if "raise" in what or "exit" in what else 0.5)
    capsys.readouterr()
    train.main([*SMALL, "--run-dir", str(tmp_path / "tracked"), "--report-to", "wandb"])
    said = capsys.readouterr().err
    assert said.count("WARNING: wandb gets no more of this run") == 1
    for name in ("rollouts.jsonl", "eval_answers.jsonl", "adapter/adapters.safetensors"):
        assert (tmp_path / "plain" / name).read_bytes() == (tmp_path / "tracked" / name).read_bytes()


# ---- the trackers themselves, offline


def twice(run, name):
    """Reports a run, and the rest of it after it went on from step 2."""
    said = []
    with reporting(run, said, (name,)):
        pass
    trackers.cut_after(run, 2, 0)
    lines = records(run / "metrics.jsonl")
    lines[2]["loss"] = 0.75  # another one than before
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with reporting(run, said, (name,)):
        pass
    assert said == []


def test_trackio_holds_every_figure_and_table_in_one_run(run, tmp_path, monkeypatch):
    pytest.importorskip("trackio", reason="trackio is in an extra: uv run --extra trackio pytest")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    twice(run, "trackio")
    with contextlib.closing(sqlite3.connect(tmp_path / "trackio" / "gwen.db")) as database:
        rows = database.execute("select run_name, run_id, step, metrics from metrics order by id").fetchall()
        ((settings,),) = database.execute("select config from configs").fetchall()
    assert {name for name, *_ in rows} == {"small"} and len({run_id for _, run_id, *_ in rows}) == 1
    held = [(step, json.loads(figures)) for _, _, step, figures in rows]
    for record in records(run / "metrics.jsonl") + records(run / "eval.jsonl"):
        assert (record["step"], without_step_and_nulls(record)) in held
    tables = [figures["completions"]["_value"] for _, figures in held if "completions" in figures]
    assert [row["completion"] for row in tables[0]][:2] == ["Two plus three is five.", "Twenty-two"]
    assert json.loads(settings)["learning_rate"] == 0.004


def test_tensorboard_holds_every_figure_once(run):
    pytest.importorskip("tensorboardX", reason="tensorboardX is in an extra: uv run --extra tensorboard pytest")
    from tensorboard.backend.event_processing import event_accumulator as accumulators

    twice(run, "tensorboard")
    events = accumulators.EventAccumulator(str(run / "trackers" / "tensorboard"))
    events.Reload()
    for file in ("metrics.jsonl", "eval.jsonl"):
        expected = {}
        for record in records(run / file):
            for key, value in without_step_and_nulls(record).items():
                expected.setdefault(key, {})[record["step"]] = value
        for key, values in expected.items():
            assert {event.step: event.value for event in events.Scalars(key)} == pytest.approx(values), key
            assert len(events.Scalars(key)) == len(values), key
    (summary,) = events.Tensors("settings/text_summary")
    assert b"learning_rate: 0.004" in summary.tensor_proto.string_val[0]


def wandb_records(data):
    """The records of a W&B file: LevelDB's log format after seven bytes, blocks of 32 kB, 7 bytes before each piece."""
    place, whole = 7, b""
    while place + 7 <= len(data):
        if (room := 32768 - place % 32768) < 7:
            place += room
            continue
        _, size, kind = struct.unpack("<IHB", data[place : place + 7])
        whole, place = whole + data[place + 7 : place + 7 + size], place + 7 + size
        if kind in (1, 4):  # the only piece, or the last one
            yield whole
            whole = b""


def test_wandb_writes_its_offline_run_under_one_id(run, monkeypatch):
    pytest.importorskip("wandb", reason="wandb is in an extra: uv run --extra wandb pytest")
    from wandb.proto import wandb_internal_pb2 as proto

    monkeypatch.setenv("WANDB_MODE", "offline")
    twice(run, "wandb")
    run_id = json.loads((run / "trackers" / "wandb.json").read_text())["id"]
    files = sorted((run / "trackers" / "wandb").glob(f"offline-run-*/run-{run_id}.wandb"))
    assert len(files) == 2  # `wandb sync` makes one run of them
    held, settings = [], {}
    for file in files:
        for data in wandb_records(file.read_bytes()):
            record = proto.Record()
            record.ParseFromString(data)
            settings |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
            items = record.history.item
            held.append({item.key or item.nested_key[0]: json.loads(item.value_json) for item in items})
    for record in records(run / "metrics.jsonl") + records(run / "eval.jsonl"):
        expected = without_step_and_nulls(record) | {"step": record["step"]}
        assert any(expected.items() <= one.items() for one in held), record["step"]
    assert settings["learning_rate"] == 0.004
    assert len(list((run / "trackers" / "wandb").rglob("*.table.json"))) == 4
