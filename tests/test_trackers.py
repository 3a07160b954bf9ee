"""
Trackers get what a run records, and whatever they do, the run ends as without them.

Those that are not installed are skipped: `uv run --extra trackio --extra tensorboard --extra wandb pytest
tests/test_trackers.py` runs all. A fake W&B takes their place in the other tests: a module of its name on the path.
"""

import contextlib
import json
import sqlite3
import struct
import sys
import time

import pytest
import yaml
from conftest import read_log, write_log
from test_report import make_run

import train
from reporting import trackers

FAKE = """
import json, os, sys, time

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
        monkeypatch.setenv("FAKE_LOG", str(told))
        monkeypatch.syspath_prepend(str(folder))
        return lambda: read_log(told) if told.exists() else []

    sys.modules.pop("wandb", None)
    yield put
    sys.modules.pop("wandb", None)


def everything(run):
    return read_log(run / "metrics.jsonl") + read_log(run / "eval.jsonl")


def report(run, name="wandb", step=0, earlier=(), news=(), **tables):
    """Tells a tracker of a run that goes on after `step`, tables with the first news; returns what it warned of."""
    said = []
    tracker = trackers.Tracker(name, run, step, list(earlier), said.append)
    for number, record in enumerate(news):
        tracker.log(record, {} if number else tables)
    trackers.finish([tracker])
    return said


def figures(record):
    return {key: value for key, value in record.items() if value is not None and key != "step"}


def test_a_tracker_knows_a_run_by_its_name_settings_and_every_figure(run, fake):
    told = fake()
    assert report(run, news=everything(run)) == []
    first, *logged, last = told()
    assert first["init"]["config"] == yaml.safe_load((run / "config.yaml").read_text())
    assert (first["init"]["project"], first["init"]["name"], last) == ("gwen", "small", {"finished": True})
    assert [one["log"] for one in logged] == [figures(one) | {"step": one["step"]} for one in everything(run)]


def test_a_table_has_what_a_reader_compares_and_no_text_that_a_tracker_cannot_store(run, fake):
    told, line = fake(), read_log(run / "rollouts.jsonl")[0]
    row = trackers.completion_row(line | {"completion": "half \ud83d"})
    answer = trackers.answer_row(read_log(run / "eval_answers.jsonl")[-1])
    assert report(run, news=everything(run)[:1], completions=[row, row], answers=[answer]) == []
    logged = told()[1]["log"]
    assert logged["completions"][1]["reward/correct"] == line["rewards"]["correct"]
    assert logged["completions"][0]["completion"] == "half \u27e8U+D83D\u27e9"
    assert logged["answers"][0]["completion"] == "Nine is five."


def test_a_run_that_goes_on_goes_on_in_the_same_tracked_run(run, fake):
    told, lines = fake(), read_log(run / "metrics.jsonl")
    assert report(run, earlier=lines[:1], news=lines[1:2]) == []
    assert [one["log"]["step"] for one in told()[1:-1]] == [1, 2]  # it knew nothing of the first step
    num_told = len(told())
    assert report(run, step=2, earlier=lines[:2], news=lines[2:3]) == []
    again = told()[num_told:]
    assert again[0]["init"]["id"] == told()[0]["init"]["id"]
    assert [one["log"]["step"] for one in again[1:-1]] == [3]


@pytest.mark.parametrize("place", ["init", "log", "finish"])
@pytest.mark.parametrize("fault", ["raise OSError('the wire is cut')", "sys.exit('the wire is cut')"])
def test_what_a_tracker_raises_is_told_once(run, fake, place, fault):
    fake(**{place: fault})
    (told,) = report(run, news=everything(run))
    kind = "OSError" if "raise" in fault else "SystemExit"
    assert told == f"WARNING: wandb gets no more of this run: {kind}: the wire is cut"


def test_a_tracker_that_hangs_is_waited_for_as_agreed_and_keeps_nothing_from_another(run, fake, monkeypatch):
    fake(init="time.sleep(60)")
    monkeypatch.setattr(trackers, "MOST_WAIT", 0.5)
    got, said, begin = [], [], time.monotonic()
    monkeypatch.setitem(trackers.OPEN, "trackio", lambda *_: (lambda step, *_: got.append(step), lambda: None))
    both = [trackers.Tracker(name, run, 0, everything(run), said.append) for name in ("trackio", "wandb")]
    trackers.finish(both)
    assert time.monotonic() - begin < 30 and len(got) == len(everything(run))
    assert said == ["WARNING: wandb gets no more of this run: it was not done 0 s after the end"]


def test_a_tracker_that_is_not_installed_is_a_users_mistake_with_the_command_that_installs_it(monkeypatch, refused):
    monkeypatch.setattr(trackers.importlib.util, "find_spec", lambda name: None)
    said = "`uv run --extra tensorboard train.py --report-to tensorboard ...`"
    refused(train.main, ["--model", "demo", "--report-to", "tensorboard"], said)


SMALL = ["--model", "demo", "--steps", "2", "--batch", "2", "--groups", "2", "--max-tokens", "8", "--eval-limit", "4"]


@pytest.mark.slow
def test_a_run_ends_as_without_a_tracker_that_works_fails_or_hangs(tmp_path, fake, monkeypatch, capsys):
    train.main([*SMALL, "--run-dir", str(tmp_path / "plain")])
    for place, what in (("log", "pass"), ("log", "raise OSError('no')"), ("init", "time.sleep(60)")):
        told = fake(**{place: what})
        sys.modules.pop("wandb", None)
        monkeypatch.setattr(trackers, "MOST_WAIT", 0.5 if "sleep" in what else 300.0)
        run = tmp_path / what.partition("(")[0]
        capsys.readouterr()
        train.main([*SMALL, "--run-dir", str(run), "--report-to", "wandb"])
        warnings = capsys.readouterr().err.count("WARNING: wandb gets no more of this run")
        assert warnings == (what != "pass")
        for name in ("rollouts.jsonl", "eval_answers.jsonl", "adapter/adapters.safetensors"):
            assert (tmp_path / "plain" / name).read_bytes() == (run / name).read_bytes()
        if what == "pass":
            logged = [one["log"] for one in told()[1:-1]]
            written = [figures(one) | {"step": one["step"]} for one in everything(run)]
            tables = [one.pop(name) for one in logged for name in ("completions", "eval/answers") if name in one]
            assert sorted(map(str, logged)) == sorted(map(str, written))
            assert [len(table) for table in tables] == [4, 2, 4]  # before training, of the first step, at the end
            lines = [one for one in read_log(run / "rollouts.jsonl") if (one["step"], one["group"]) == (1, 0)]
            assert [row["completion"] for row in tables[1]] == [line["completion"] for line in lines]


# ---- the trackers themselves, offline


def twice(run, name):
    """Reports a run, and the rest of it after it went on from step 2, with another figure than before."""
    lines, evaluations = read_log(run / "metrics.jsonl"), read_log(run / "eval.jsonl")
    rows = [trackers.completion_row(line) for line in read_log(run / "rollouts.jsonl")[:4]]
    assert report(run, name, news=[*lines, *evaluations], completions=rows) == []
    lines[2]["loss"] = 0.75
    write_log(run / "metrics.jsonl", lines)
    assert report(run, name, 2, news=[*lines[2:], *evaluations[1:]]) == []


def test_trackio_holds_every_figure_and_table_in_one_run(run, tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))  # read when it is imported
    pytest.importorskip("trackio", reason="trackio is in an extra: uv run --extra trackio pytest")
    twice(run, "trackio")
    with contextlib.closing(sqlite3.connect(tmp_path / "trackio" / "gwen.db")) as database:
        rows = database.execute("select run_name, run_id, step, metrics from metrics order by id").fetchall()
        ((settings,),) = database.execute("select config from configs").fetchall()
    assert {name for name, *_ in rows} == {"small"} and len({run_id for _, run_id, *_ in rows}) == 1
    held = [(step, json.loads(logged)) for _, _, step, logged in rows]
    for record in everything(run)[1:]:  # the first has a table beside its figures
        assert (record["step"], figures(record)) in held
    tables = [logged["completions"]["_value"] for _, logged in held if "completions" in logged]
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
        for record in read_log(run / file):
            for key, value in figures(record).items():
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
    run_id = (run / "trackers" / "wandb.id").read_text()
    files = sorted((run / "trackers" / "wandb").glob(f"offline-run-*/run-{run_id}.wandb"))
    assert len(files) == 2  # `wandb sync` makes one run of them
    wanted = [figures(record) | {"step": record["step"]} for record in everything(run)]
    end = time.monotonic() + 60
    while time.monotonic() < end:  # its service may still be writing
        held, settings = [], {}
        for data in (data for file in files for data in wandb_records(file.read_bytes())):
            record = proto.Record()
            record.ParseFromString(data)
            settings |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
            items = record.history.item
            held.append({item.key or item.nested_key[0]: json.loads(item.value_json) for item in items})
        if all(any(one.items() <= logged.items() for logged in held) for one in wanted):
            break
        time.sleep(0.1)
    else:
        pytest.fail("a record is missing")
    assert settings["learning_rate"] == 0.004
    assert len(list((run / "trackers" / "wandb").rglob("*.table.json"))) == 1
