"""
Permanent fuzzers: seeded command lines, recipes, files and models.

A command accepts its input or refuses it in one line. Other tests check the texts of these lines
(test_bad_input.py). A failure names its case, and the case has the same number in the next run.
"""

import json
import os
import random
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pyarrow
import pyarrow.parquet
import pytest
import yaml
from conftest import ROOT

import bench_rollout
import chat
import evaluate
import export
import gwen
import judge
import preflight
import report
import train
from bench import harness, step
from config import SETTINGS
from disk.files import load_safetensors
from flags import flag_of
from judging import remote_judge
from machine import gpu
from prompts import files
from reporting import page
from sandbox import workers

pytestmark = pytest.mark.slow
NUM_LINES = 500
NUM_RECIPES = 150
NUM_FILES = 200
NUM_MODELS = 100
WORDS = [  # for command lines; no path outside the working directory, because some flags write
    "",
    " ",
    *"0 1 -1 2 1.5 1e-4 nan inf 1e999 2147483648 65536".split(),
    "9" * 5000,
    "\u0663",
    *"0x10 1_000 true None auto on off demo random:2m random:9m self own rg: rg:=1 gsm8k values qkv_proj".split(),
    *"correct=1 correct=nan = , a=b,a=b \\ -- - ~ . .. http://me:pass@host/v1 http://[ https://127.0.0.1:9/v1".split(),
    *"owner/name owner/name@main a/b/c file://x length:5 soft_overlong:9:3 reward.py:wants %s {0}".split(),
    "x" * 3000,
    "\x1b[31mred",
    "a\rb",
    "a\nb",
    "\u202etxt",
    "\udcff",
    "\x00",
    "length:" + "9" * 5000,
]
VALUES = [  # for YAML and JSON
    None,
    True,
    False,
    0,
    1,
    -1,
    2.5,
    1e-4,
    float("nan"),
    float("inf"),
    2**31,
    10**400,
    "",
    "auto",
    "demo",
    "1e-4",
    "\x1b[2J",
    "\ud800",
    [],
    [None],
    ["length:5"],
    ["qkv_proj", 3],
    [["a"]],
    {},
    {"correct": 1},
    {"a": float("nan")},
    {1: 2},
    {"a": {"b": []}},
    "x" * 3000,
    [0] * 300,
]
PIECES = [  # for any text
    *"criteria:|- |name|weight: |text: |batch: |reward: |!!timestamp |!!int |!!python/name:os|&a |*a|<<: |? |[|]".split(
        "|"
    ),
    *"{ } = 1e5 ~ \ufeff ' \" # @ ` 0o8 ... 2001-99-99 .nan 0x 1:60 \x85 \u2028".split(" "),
    *("\n", "  ", "\t", "---\n", "|\n", ">\n", "%YAML 9\n", "9" * 5000),
]
SUMS = [
    {"prompt": "a", "answer": "1", "system": None},
    {"prompt": "b", "answer": "2", "system": "c"},
]
FILES = {
    "sums.jsonl": '{"prompt": "a", "answer": "1"}\n{"prompt": "b", "answer": "2"}\n',
    "sums.json": json.dumps(SUMS),
    "sums.csv": 'prompt,answer\n"a\nb",1\nc,2\n',
    "chats.jsonl": '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n'
    * 20,
    "labels.jsonl": '{"prompt": "a", "completion": "b", "criterion": "kind", "score": 3}\n',
    "scores.jsonl": '{"step": 0, "key": "a", "score": 3.0}\n',
    "rubric.yaml": "criteria: [{name: kind, weight: 1, text: Is it}]",
    "recipe.yaml": "model: demo\nbatch: 2",
    "task.yaml": "chain_sum: {level: 0}\nheld_out: 9",
    "reward.py": "def fn(completions, **_): return [1.0] * len(completions)\ndef wants(colour): pass",
    "empty": "",
    "run/config.yaml": "model: demo\ntask: demo",
    "run/metrics.jsonl": '{"step": 1, "step/s": 1.0, "completion/mean_tokens": 3.0}\n',
    "run/eval.jsonl": '{"step": 0, "eval/accuracy": 0.5, "eval/num": 9}\n',
    "adapter/adapter_config.json": "{}",
}


class WorkBegins(BaseException):
    """Raised when a command begins its work, so it has accepted its input."""


def raise_work_begins(*_: Any, **__: Any) -> None:
    raise WorkBegins


@pytest.fixture
def work_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """
    A directory in which commands run.

    The commands end where a model, a worker, a server or a browser would begin to work.
    """
    monkeypatch.setattr(gpu, "on_gpu", lambda: False)
    for owner, name in (
        (gwen, "load"),
        (gwen, "load_model"),
        (workers.WorkerPool, "__init__"),
        (page, "open_page_in_browser"),
        (remote_judge.Endpoint, "send_chat_requests"),
        (harness, "model_directory"),
        (step, "measure_engine_steps"),
        (files, "load_hub_records"),
    ):
        monkeypatch.setattr(owner, name, raise_work_begins)
    monkeypatch.chdir(tmp_path)
    with mock.patch.dict(os.environ):  # a command's flags may set variables
        yield tmp_path


def replace_files(directory: Path) -> None:
    """Empties a directory and writes FILES into it."""
    for path in directory.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    for name, text in FILES.items():
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_text(text)


def is_accepted(capsys: Any, main: Callable[[list[str]], None], argv: list[str], case: Any) -> bool:
    """
    Whether a command accepts its flags.

    If it does not, it must end with status 2 and one readable line.
    """
    capsys.readouterr()
    status: Any = 0
    try:
        main(argv)
    except WorkBegins:
        pass
    except SystemExit as exit_error:
        status = exit_error.code or 0
    except BaseException as error:
        raise AssertionError(f"{case!r:.3000}: {type(error).__name__}") from error

    out, err = capsys.readouterr()
    unprintable_or_traceback = r"[\x00-\x08\x0b-\x1f\x7f-\x9f]|Traceback"
    assert not re.search(unprintable_or_traceback, out + err), f"{case!r:.3000}: {out} {err}"
    if status:
        last_line = err.splitlines()[-1]
        is_one_line_error = status == 2 and re.fullmatch("error: .{10,1000}", last_line)
        assert is_one_line_error, f"{case!r:.3000}: {status} {err}"
    return status == 0


# ---- flags

COMMANDS: dict[str, tuple[Callable[[list[str]], None], list[str], list[str]]] = {
    "train": (train.main, ["--model", "demo"], ["--run-dir", "new"]),
    "sft": (
        train.main,
        ["--model", "demo", "--loss-type", "sft", "--data", "chats.jsonl"],
        ["--run-dir", "new"],
    ),
    "preflight": (preflight.main, ["--model", "demo"], []),
    "evaluate": (evaluate.main, ["--model", "demo"], []),
    "chat": (chat.main, ["--prompt", "hi"], []),
    "judge": (judge.main, ["--rubric", "rubric.yaml", "--labels", "labels.jsonl"], []),
    "export": (export.main, ["--fuse", "--adapter", "adapter", "--out", "new"], []),
    "report": (report.main, ["run"], []),
    "rollout": (bench_rollout.main, ["--model", "demo"], []),
    "step": (step.main, ["--model", "demo"], []),
}


def allowed_values() -> dict[str, list[str]]:
    """Returns values that each setting may have, by its name; a switch has no values."""
    usual = {int: ["1", "3"], float: ["0.5", "1"], bool: []}
    values_by_name = {
        name: [*setting.choices] or usual.get(setting.value_type, ["demo"])
        for name, setting in SETTINGS.items()
    }
    values_by_name |= {
        "data": ["sums.jsonl", "chats.jsonl"],
        "rubric": ["rubric.yaml"],
        "reward": ["reward.py:fn", "length:9"],
        "columns": ["prompt=answer"],
        "teacher": ["demo", "self"],
        "task_config": ["task.yaml"],
    }
    return values_by_name


def draw_flag_with_values(
    rng: random.Random, flags: list[str], words: list[str], allowed: dict[str, list[str]]
) -> list[str]:
    """Returns the arguments for a random flag with random values, many of which are allowed."""
    flag = rng.choice(flags) if rng.random() < 0.97 else rng.choice(words)
    values = rng.choices(words, k=rng.choice([0, 1, 1, 1, 1, 2]))
    if rng.random() < 0.6 and flag in allowed:
        values = allowed[flag] and [rng.choice(allowed[flag])]
    if rng.random() < 0.1:
        return ["=".join([flag, *values])]
    return [flag, *values]


def test_every_command_line_is_accepted_or_refused_in_one_line(work_directory, capsys):
    flags = {}
    for name, (main, *_) in COMMANDS.items():
        with pytest.raises(SystemExit):
            main(["--help-all" if main is train.main else "--help"])
        flags[name] = sorted(set(re.findall(r"--[a-z][a-z-]+", capsys.readouterr().out)))
    flags["preflight"] += flags["train"]
    words = [*WORDS, *FILES, "run", "adapter"]
    allowed = {flag_of(name): values for name, values in allowed_values().items()}

    num_accepted = 0
    for number in range(NUM_LINES):
        replace_files(work_directory)
        rng = random.Random(number)
        name = rng.choice(sorted(COMMANDS))
        main, argv, last = COMMANDS[name]
        argv = argv if rng.random() < 0.9 else []
        for _ in range(rng.choice([1, 2, 2, 3])):
            argv = [*argv, *draw_flag_with_values(rng, flags[name], words, allowed)]
        num_accepted += is_accepted(capsys, main, [*argv, *last], (number, name, argv))
    assert 0.1 < num_accepted / NUM_LINES < 0.9


# ---- files


def damage_bytes(content: bytes, rng: random.Random) -> bytes:
    """Returns the content of a file with bytes changed, removed, doubled or inserted."""
    for _ in range(rng.choice([1, 1, 1, 2, 5])):
        begin = rng.randrange(len(content) + 1)
        end = min(begin + rng.choice([1, 1, 2, 8, 100, len(content)]), len(content))
        deep = rng.choice([b"[", b'{"a":', b"(", b"- "]) * rng.choice([9, 20_000])
        text = rng.choice(PIECES).encode("utf-8", "surrogatepass")
        noise = rng.randbytes(end - begin)
        piece = rng.choice([text, noise, b"", deep])
        content = content[:begin] + piece + rng.choice([content[end:], content[begin:], b""])
    return content


def damage_structure(value: Any, rng: random.Random) -> Any:
    """Returns a copy of a JSON value in which one value is changed, removed or renamed."""
    if not value or not isinstance(value, (dict, list)) or rng.random() < 0.1:
        return rng.choice(VALUES)
    value = value.copy()
    key = rng.choice(list(value) if isinstance(value, dict) else range(len(value)))
    if rng.random() < 0.2:
        del value[key]
    elif isinstance(value, dict) and rng.random() < 0.1:
        value[rng.choice(["", "a", "\x1b[31m", "\ud800", "x" * 3000])] = value.pop(key)
    else:
        value[key] = damage_structure(value[key], rng)
    return value


def damage_file(path: Path, rng: random.Random) -> bytes:
    """
    Damages a file and returns its new content.

    If the file is JSON or begins with JSON, the damage usually leaves the JSON valid.
    """
    content = path.read_bytes()
    header = b""
    if path.suffix == ".safetensors":
        end = 8 + int.from_bytes(content[:8], "little")
        header = content[8:end]
        content = content[end:]
    structure = content if path.suffix == ".json" else header
    if structure and rng.random() < 0.7:
        structure = json.dumps(damage_structure(json.loads(structure), rng)).encode()
        if header:
            content = len(structure).to_bytes(8, "little") + structure + content
        else:
            content = structure
    else:
        content = damage_bytes(path.read_bytes(), rng)
    path.write_bytes(content)
    return content


def test_every_recipe_is_accepted_or_refused_in_one_line(work_directory, capsys):
    recipes = [path.read_bytes() for path in sorted((ROOT / "recipes").glob("*.yaml"))]
    allowed = allowed_values()
    for number in range(NUM_RECIPES):
        replace_files(work_directory)
        rng = random.Random(number)
        content = damage_bytes(rng.choice(recipes), rng)
        if rng.random() < 0.6:
            names = rng.sample(sorted(allowed), rng.choice([1, 2, 3, 4]))
            settings = {}
            for name in names:
                allowed_value = yaml.safe_load(rng.choice(allowed[name] or ["true"]))
                settings[name] = rng.choice([allowed_value, rng.choice(VALUES)])
            text = yaml.dump(settings, allow_unicode=rng.random() < 0.5)
            content = text.encode("utf-8", "surrogatepass")
        elif rng.random() < 0.3:
            content = "".join(rng.choices(PIECES, k=rng.randrange(14))).encode()
        Path("recipe.yaml").write_bytes(content)
        end = rng.choice([["--run-dir", "new"], ["--print-config"]])
        is_accepted(capsys, train.main, ["--config", "recipe.yaml", *end], (number, content))


READERS: dict[str, tuple[Callable[[list[str]], None], list[str]]] = {
    "sums.jsonl": (train.main, ["--model", "demo", "--data", "sums.jsonl", "--run-dir", "new"]),
    "sums.json": (train.main, ["--model", "demo", "--data", "sums.json", "--run-dir", "new"]),
    "sums.csv": (evaluate.main, ["--model", "demo", "--data", "sums.csv"]),
    "sums.parquet": (evaluate.main, ["--model", "demo", "--data", "sums.parquet"]),
    "chats.jsonl": (train.main, [*COMMANDS["sft"][1], "--run-dir", "new"]),
    "labels.jsonl": (judge.main, COMMANDS["judge"][1]),
    "rubric.yaml": (judge.main, COMMANDS["judge"][1]),
    "task.yaml": (
        preflight.main,
        ["--model", "demo", "--task", "rg:chain_sum", "--task-config", "task.yaml"],
    ),
    "run/config.yaml": (chat.main, ["--prompt", "hi", "--run", "run"]),
    "run/metrics.jsonl": (report.main, ["run"]),
    "run/eval.jsonl": (report.main, ["--list", "."]),
}


def test_every_file_is_read_or_refused_in_one_line(work_directory, capsys):
    for number in range(NUM_FILES):
        replace_files(work_directory)
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(SUMS), "sums.parquet")
        rng = random.Random(number)
        name = rng.choice(sorted(READERS))
        content = damage_file(Path(name), rng)
        is_accepted(capsys, *READERS[name], (number, name, content))


def test_every_model_directory_is_loaded_or_refused_in_one_line(model_directory, tmp_path, capsys):
    intact = shutil.copytree(model_directory, tmp_path / "intact")
    weights = load_safetensors(intact / "model.safetensors")
    index = {"weight_map": dict.fromkeys(weights, "model.safetensors")}
    (intact / "model.safetensors.index.json").write_text(json.dumps(index))

    num_accepted = 0
    for number in range(NUM_MODELS):
        rng = random.Random(number)
        directory = tmp_path / f"model{number}"
        shutil.copytree(intact, directory)
        path = rng.choice(sorted(directory.iterdir()))
        content = damage_file(path, rng)
        if rng.random() < 0.05:
            path.unlink()
        argv = ["--model", str(directory), "--prompt", "hi", "--max-tokens", "3"]
        num_accepted += is_accepted(capsys, chat.main, argv, (number, path.name, content))
        shutil.rmtree(directory)
    assert 0.1 < num_accepted / NUM_MODELS < 0.9
