"""
Each mistake of a user gives one line on stderr that names the value, and exit status 2; nothing is lost.

The mistakes are data, in mistakes.yaml. The commands are real, and most run in this process.
"""

import contextlib
import importlib
import json
import os
import re
import resource
import shlex
import shutil
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
import yaml
from conftest import (
    CONFIGS,
    QWEN3,
    ROOT,
    check_error_line,
    read_log,
    read_tree,
    run_command,
    write_checkpoint,
)
from small_run import resolve_settings

import evaluate
import export
import gwen
import preflight
import report
import tasks
import train
from bench import rollout
from config import SETTINGS
from disk import checkpoint, run_files
from flags import exit_with_error, flag_of
from reporting import console
from settings import sources
from settings.sources import parse_flags

pytestmark = pytest.mark.slow
SMALL = "--model demo --batch 2 --groups 2 --max-tokens 8 --steps 1 --eval-every 0".split()


# ---- files with mistakes

SUMS = [{"prompt": f"What is {a} plus one?", "answer": f"{a + 1}"} for a in range(10)]
LONG = " ".join(["seven"] * 1200)  # the demo model's context is 1,024
REWARDS = """import asyncio, json

def good(completions, **_): return [float(len(text)) for text in completions]
def raises(completions, **_): raise RuntimeError("no\\nway")
def exits(completions, **_): raise SystemExit(0)
def not_a_number(completions, **_): return [float("nan")] * len(completions)
def infinite(completions, **_): return [float("inf")] * len(completions)
def huge(completions, **_): return [-1e30] * len(completions)
def too_few(completions, **_): return [1.0]
def words(completions, **_): return ["good"] * len(completions)
def nothing(completions, **_): pass
def a_dict(completions, **_): return {"reward": 1.0}
async def late(completions, **_): raise TimeoutError("nobody answers")
def deep(completions, **_): return [json.loads("{") for text in completions]
def wants_more(completions, colour): return [1.0] * len(completions)
def no_numbers(completions, **_): return [None] * len(completions)
def largest(completions, **_): return [9e14 * (-1) ** row for row in range(len(completions))]
number = 3
"""
TEXTS = {
    "long.jsonl": json.dumps({"prompt": LONG, "split": "train"})
    + '\n{"prompt": "a", "split": "test"}\n',
    "long_test.jsonl": json.dumps(SUMS[0] | {"split": "train"})
    + "\n"
    + json.dumps({"prompt": LONG, "answer": "1", "split": "test"}),
    "line3.jsonl": '{"prompt": "a"}\n\n{"prompt": "b"\n',
    "sums.jsonl": "".join(json.dumps(example) + "\n" for example in SUMS),
    "questions.jsonl": "".join(
        json.dumps({"prompt": example["prompt"]}) + "\n" for example in SUMS
    ),
    "good_rubric.yaml": "criteria: [{name: kind, weight: 1.0, text: Is it kind}]",
    "rewards.py": REWARDS,
    "theirs.yaml": "max_steps: 3",
    "trainer.py": "Trainer(max_steps=3, data=load_dataset('mine').map(f))",
    "tools.py": 'def add(a: int) -> int:\n    """\n    Adds one.\n\n    Args:\n        a: A number.\n    """\n',
    "syntax.py": "def fn(:",
    "imports.py": "import no_such_module\ndef fn(**_): pass\n",
}
MISTAKES = yaml.safe_load((ROOT / "tests" / "mistakes.yaml").read_text())
FILES = [
    (flag_and_suffix, content, expected_text)
    for flag_and_suffix, rows in MISTAKES.pop("files").items()
    for content, expected_text in rows.items()
] + [
    ("--config .yaml", "#" * 10**6 + "\n", "file of at most 1 MB"),
    ("--config .yaml", "[" * 5000, "recursion"),
    ("--config .yaml", f"learning_rate: 1{'0' * 400}", "a finite number"),
]


@pytest.fixture(scope="session")
def mistakes(
    tmp_path_factory: pytest.TempPathFactory, model_directory: Path, tokenizer: Any
) -> Path:
    """A directory of files, models and adapters. Each of them has one mistake."""
    directory = tmp_path_factory.mktemp("mistakes")
    for name, text in TEXTS.items():
        (directory / name).write_text(text)
    os.mkfifo(directory / "pipe.yaml")
    (directory / "empty_directory").mkdir()
    (directory / "of_peft").mkdir()
    (directory / "of_peft" / "adapter_config.json").write_text("{}")

    def copy_model(name: str, **changes: Any) -> Path:
        shutil.copytree(model_directory, directory / name)
        config = json.loads((directory / name / "config.json").read_text())
        (directory / name / "config.json").write_text(json.dumps(config | changes))
        return directory / name

    copy_model("model")
    copy_model("mistral", model_type="mistral")
    copy_model("quantized", quantization={"bits": 4, "group_size": 64})
    copy_model("wide", intermediate_size=128)
    copy_model("deep", num_hidden_layers=3)
    (copy_model("not_json") / "config.json").write_text("{")
    weights = copy_model("truncated") / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    (copy_model("no_weights") / "model.safetensors").unlink()
    (copy_model("no_tokenizer") / "tokenizer.json").unlink()
    (copy_model("broken_tokenizer") / "tokenizer.json").write_text("{}")
    (copy_model("no_template") / "chat_template.jinja").unlink()
    strict_template = copy_model("strict_template") / "chat_template.jinja"
    strict_template.write_text("{{ raise_exception('only haiku') }}")

    shards = write_checkpoint(directory / "shards", CONFIGS["qwen2.5"], num_shards=3)
    for file in shards.glob("*-00002-of-00003.*"):
        file.unlink()

    write_checkpoint(directory / "small_vocabulary", QWEN3 | {"vocab_size": 64})
    tokenizer.save_pretrained(str(directory / "small_vocabulary"))

    (directory / "nameless").mkdir()
    (directory / "nameless" / "adapter_config.json").write_text("{}")

    (directory / "adapter").mkdir()
    (directory / "adapter" / "adapter_config.json").write_text(
        '{"model": "demo", "lora_parameters": {"rank": 2, "scale": 1}}'
    )
    wrong_shapes = {
        "model.layers.0.self_attn.q_proj.lora_a": mx.zeros((7, 2)),
        "model.layers.0.self_attn.q_proj.lora_b": mx.zeros((2, 9)),
    }
    mx.save_safetensors(str(directory / "adapter" / "adapters.safetensors"), wrong_shapes)
    return directory


# ---- mistakes that a command refuses before it begins


def read_refusal(capsys: pytest.CaptureFixture[str], program: str, flags: list[str]) -> str:
    """Runs a command in this process, which must refuse its flags. Returns the last line on stderr."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as exit_info:
        importlib.import_module(program).main(flags)
    printed = capsys.readouterr().err
    assert exit_info.value.code == 2, printed
    assert "Traceback" not in printed, printed
    return check_error_line(printed.splitlines(keepends=True)[-1], "")


ROWS = [
    (program, flags, expected_text)
    for program, rows in MISTAKES.items()
    for flags, expected_text in rows.items()
]


@pytest.mark.parametrize(
    ("program", "flags", "expected_text"), ROWS, ids=[f"{row[0]} {row[1]}" for row in ROWS]
)
def test_a_wrong_flag_prints_one_line_and_writes_nothing(
    mistakes, tmp_path, capsys, program, flags, expected_text
):
    files_before = read_tree(mistakes)
    arguments = shlex.split(flags.format(at=mistakes))
    other_arguments = []
    if program in ("chat", "evaluate") and "--model" not in flags:
        other_arguments = ["--model", "demo"]
    if program == "train" and not {"--config", "--resume"} & set(arguments):
        other_arguments = [*SMALL, "--run-dir", str(tmp_path / "run")]

    line = read_refusal(capsys, program, [*other_arguments, *arguments])
    assert expected_text.format(at=mistakes) in line, line
    assert read_tree(mistakes) == files_before
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("flag_and_suffix", "content", "expected_text"), FILES, ids=[repr(row[1][:40]) for row in FILES]
)
def test_a_mistake_in_a_file_prints_one_line(
    tmp_path, capsys, flag_and_suffix, content, expected_text
):
    flag, suffix = flag_and_suffix.split()
    file = tmp_path / f"file{suffix}"
    file.write_text(content, encoding="latin-1")
    small = [] if flag == "--config" else SMALL
    flags = [*small, flag, str(file), "--run-dir", str(tmp_path / "run")]
    line = read_refusal(capsys, "train", flags)
    assert expected_text in line, line
    assert not (tmp_path / "run").exists(), line


FIELDS = {flag_of(key): setting.field for key, setting in SETTINGS.items()}


def values_out_of_range(field: Any) -> list[Any]:
    if field.type is int:
        return [field.metadata.get("low", 0) - 1]
    if field.type is float:
        return ["nan", "inf"] + ([-0.5] if "low" in field.metadata else [])
    if field.type is str:
        return [""]
    return []


BOUNDS = [(flag, value) for flag, field in FIELDS.items() for value in values_out_of_range(field)]


def test_every_setting_refuses_values_out_of_range(tmp_path, capsys):
    assert len(BOUNDS) > 60
    for flag, value in BOUNDS:
        flags = [*SMALL, "--run-dir", str(tmp_path / "run"), f"{flag}={value}"]
        line = read_refusal(capsys, "train", flags)
        expected_text = f"{flag} is {value!r}; it must be"
        if value == "":
            expected_text = f"{flag}: '' is empty"
        assert expected_text in line, line
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("variable", "values"),
    [
        ("RUBRIC_JUDGE_BATCH_SIZE", [" ", "0", "-3", "x", "1.5", "٣", "999999999999"]),
        ("GWEN_DTYPE", ["", "int4", "float", "16"]),
    ],
)
def test_the_error_names_the_bad_value_of_an_environment_variable(
    monkeypatch, tmp_path, check_refusal, variable, values
):
    allowed_values = "float16, bfloat16, float32"
    if variable.startswith("RUBRIC"):
        allowed_values = "from 1 to 999999999"
    for value in values:
        monkeypatch.setenv(variable, value)
        flags = [*SMALL, "--run-dir", tmp_path / "run"]
        line = check_refusal(train.main, flags, rf"\b{variable}(=| is ){value!r}")
        assert line == check_refusal(evaluate.main, ["--model", "demo", "--limit", "1"], variable)
        assert allowed_values in line
    assert not list(tmp_path.iterdir())


def test_an_empty_chunk_size_in_the_environment_counts_as_unset(monkeypatch):
    monkeypatch.setenv("RUBRIC_JUDGE_BATCH_SIZE", "")
    assert sources.read_judge_chunk_size_from_environment() == {}
    monkeypatch.setenv("RUBRIC_JUDGE_BATCH_SIZE", "7")
    assert sources.read_judge_chunk_size_from_environment() == {"judge_chunk_size": 7}
    assert rollout.parse_flags([], "bench_rollout.py", "").judge_chunk_size == 7


# ---- a separate process


def test_a_process_exits_with_status_2_and_one_line_or_with_0_and_no_line(tmp_path):
    flags = [*SMALL, "--run-dir", tmp_path / "run"]
    process = run_command("train.py", *flags, environment={"GWEN_DTYPE": "int4"})
    assert process.returncode == 2
    assert not list(tmp_path.iterdir())
    check_error_line(process.stderr, "GWEN_DTYPE='int4' is not one of")

    process = run_command("train.py", *flags)
    assert process.returncode == 0
    assert process.stdout.startswith("model: demo, as requested; task: demo\n")
    # A slow machine shows progress. Answers that are cut off give a warning.
    allowed_lines = "... ", "WARNING after step"
    assert all(line.startswith(allowed_lines) for line in process.stderr.splitlines())
    # Without an evaluation there is no best adapter.
    assert not (tmp_path / "run" / "adapter-best").exists()


# ---- rewards that fail later: the run is saved as it was after the last complete step


def test_the_largest_rewards_give_advantages_and_a_weight_cannot_exceed_the_limit(
    tmp_path, check_refusal
):
    (tmp_path / "mine.py").write_text(REWARDS)
    flags = [*SMALL, "--reward", f"{tmp_path / 'mine.py'}:largest", "--reward-weights"]
    train.main([*flags, "rubric=0", "--run-dir", str(tmp_path / "run")])
    rollouts = read_log(tmp_path / "run" / "rollouts.jsonl")
    advantages = [record["advantage"] for record in rollouts]
    assert advantages == pytest.approx([0.5**0.5, -(0.5**0.5)] * 2)

    heavy_flags = [*flags, "rubric=0,largest=2", "--run-dir", tmp_path / "heavy"]
    pattern = r"largest, multiplied by its weight 2, is 1e15 or more.*--reward-weights; saved after step 0"
    check_refusal(train.main, heavy_flags, pattern)


def test_a_reward_that_fails_later_loses_no_step_and_the_resumed_run_evaluates_again(
    tmp_path, check_refusal
):
    file = tmp_path / "mine.py"
    run = tmp_path / "run"
    file.write_text(
        "import os\n"
        "calls = []\n"
        "def mine(completions, **_):\n"
        f"    calls.append(os.path.isdir({str(run)!r}))\n"  # True except in the audit
        "    assert sum(calls) < 4\n"  # the first evaluation and two steps
        "    return [float(len(text)) for text in completions]\n"
    )
    flags = "--model demo --batch 2 --groups 2 --max-tokens 8 --steps 4 --save-every 4".split()
    flags += "--eval-every 4 --eval-limit 4 --reward-weights rubric=0".split()
    flags += ["--reward", f"{file}:mine", "--run-dir", run]
    check_refusal(train.main, flags, "AssertionError.*saved after step 2")
    assert checkpoint.load(run).step == 2

    file.write_text("def mine(completions, **_): return [float(len(text)) for text in completions]")
    train.main(["--resume", str(run), "--allow-changes"])
    steps = [record["step"] for record in read_log(run / "metrics.jsonl")]
    assert steps == [1, 2, 3, 4]
    # The reward has changed, so the resumed run evaluates before it continues.
    evaluated_steps = [record["step"] for record in read_log(run / "eval.jsonl")]
    assert evaluated_steps == [0, 2, 4]


@pytest.mark.parametrize(
    ("flags", "weights", "metric"),
    [
        ("--task demo", {"correct": 1, "rubric": 0.5}, "accuracy"),
        (
            "--task demo --reward {at}/rewards.py:good --reward-weights rubric=2",
            {"good": 1, "rubric": 2},
            "accuracy",
        ),
        (
            "--task demo --reward {at}/rewards.py:good --reward-weights good=2",
            {"good": 2},
            "accuracy",
        ),
        ("--task demo --rubric {at}/good_rubric.yaml", {"correct": 1, "rubric": 0.5}, "accuracy"),
        ("--task demo --reward-weights correct=0", {"correct": 0, "rubric": 0.5}, "accuracy"),
        ("--task values --reward {at}/rewards.py:good length:9", {"good": 1, "length": 1}, "score"),
        ("--reward {at}/rewards.py:good --data {at}/questions.jsonl", {"good": 1}, "score"),
        ("--data {at}/sums.jsonl", {"correct": 1}, "accuracy"),
        (
            "--data {at}/sums.jsonl --rubric {at}/good_rubric.yaml",
            {"correct": 1, "rubric": 1},
            "accuracy",
        ),
        (
            "--data {at}/sums.jsonl --rubric {at}/good_rubric.yaml --reward length:9",
            {"length": 1, "rubric": 1},
            "accuracy",
        ),
    ],
)
def test_the_rewards_of_a_user_replace_those_of_the_task_but_the_verifier_evaluates(
    mistakes, flags, weights, metric
):
    """The rubric of the task is replaced too, unless the user names it."""
    options = parse_flags(["--model", "demo", *flags.format(at=mistakes).split()])
    config, _ = resolve_settings(sources.settings_from_flags(options), None, None)
    task = tasks.make_task(config)
    assert task.reward_weights == weights
    assert task.metric == metric
    assert (task.rubric is not None) == ("rubric" in weights)


# ---- run directories, checkpoints and disks


@pytest.fixture
def run(golden, tmp_path: Path) -> Path:
    """A run of three saved steps, to damage."""
    return shutil.copytree(golden("grpo"), tmp_path / "run")


def test_an_existing_run_directory_is_not_touched(run, check_refusal):
    files_before = read_tree(run)
    existing_paths = {
        run: f"--resume {run}",
        run / "config.yaml": "another",
        run / "adapter": "another",
    }
    for path, advice in existing_paths.items():
        pattern = f"--run-dir {path} already exists; .*{advice}"
        check_refusal(train.main, [*SMALL, "--run-dir", path], pattern)
    assert read_tree(run) == files_before


@contextlib.contextmanager
def limit_file_size(size: int) -> Iterator[None]:
    """Makes every file of this process stop growing at `size` bytes, as a full disk would."""
    _, hard_limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard_limit))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard_limit, hard_limit))


def test_a_run_directory_belongs_to_one_run(tmp_path):
    with run_files.unlock_run_dirs_after_block():
        run_dirs = [
            run_files.create_locked_run_dir("model: demo\n", tmp_path / "demo-now", None)
            for _ in range(3)
        ]
        assert [path.name for path in run_dirs] == ["demo-now", "demo-now-2", "demo-now-3"]
        with pytest.raises(ValueError, match="is being used for training by process"):
            run_files.create_locked_run_dir("model: other\n", run_dirs[0], str(run_dirs[0]))
    with (
        run_files.unlock_run_dirs_after_block(),
        pytest.raises(ValueError, match="demo-now already exists; "),
    ):
        run_files.create_locked_run_dir("model: other\n", run_dirs[0], str(run_dirs[0]))
    assert (run_dirs[0] / "config.yaml").read_text() == "model: demo\n"


def test_a_run_directory_stays_free_if_the_settings_do_not_fit_on_the_disk(tmp_path, check_refusal):
    run = tmp_path / "run"
    with limit_file_size(100):
        pattern = f"the run directory {run} cannot be written .*; make room there"
        check_refusal(train.main, [*SMALL, "--run-dir", run], pattern)
    assert read_tree(run) == {str(run / "lock"): b""}


def test_the_error_names_a_run_directory_that_cannot_be_created(run, check_refusal):
    impossible_dir = run / "config.yaml" / "new"
    pattern = f"{impossible_dir} cannot be written .*; .*choose another"
    check_refusal(train.main, [*SMALL, "--run-dir", impossible_dir], pattern)


@pytest.mark.parametrize(
    ("flags", "pattern"),
    [
        (
            "--learning-rate 0.1",
            r"learning_rate \(\S+, now 0.1\) changed since step \d; .*--allow-changes",
        ),
        ("--config recipes/demo.yaml", "--config recipes/demo.yaml cannot change a resumed run"),
        ("--run-dir elsewhere", "--run-dir elsewhere: a resumed run stays in its own directory"),
        ("--steps 0", "--steps is 0; it must be at least 1"),
    ],
)
def test_a_resumed_run_keeps_its_settings(run, check_refusal, flags, pattern):
    files_before = read_tree(run)
    check_refusal(train.main, ["--resume", run, *flags.split()], pattern)
    assert read_tree(run) == files_before


def test_resume_continues_the_newest_run_with_more_steps(run, tmp_path, monkeypatch, capsys):
    shutil.copytree(run, tmp_path / "runs" / "newest")
    monkeypatch.chdir(tmp_path)
    settings = Path("runs/newest/config.yaml")
    text = settings.read_text()
    settings.write_text(text.replace("steps: 3", "steps: many", 1))
    with pytest.raises(SystemExit):
        train.main(["--resume"])
    expected_end = "\nerror: --steps is 'many'; it must be a whole number\n"
    assert capsys.readouterr().err.endswith(expected_end)

    settings.write_text(text)
    train.main(["--resume", "--steps", "4"])
    assert "step 4/4" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("old", "new", "pattern"),
    [
        (
            "lora_rank: 16",
            "lora_rank: 8",
            r"lora_rank \(16, now 8\) changed since step 3; .*--allow-changes",
        ),
        ("lora_rank: 16", "lora_rnak: 8", "unknown setting 'lora_rnak'; did you mean 'lora_rank'"),
        (
            "model: demo",
            "model: /nowhere/at/all",
            "--model /nowhere/at/all, which is no longer there",
        ),
        (
            "batch: 2",
            "batch: 2\neval_data: /gone",
            "--eval-data /gone, which is no longer there",
        ),
        ("batch: 2", "batch: [", "config.yaml is not valid YAML, line"),
    ],
)
def test_a_run_with_settings_edited_by_hand_is_refused_and_unchanged(
    run, check_refusal, old, new, pattern
):
    text = (run / "config.yaml").read_text()
    assert old in text
    (run / "config.yaml").write_text(text.replace(old, new))
    files_before = read_tree(run)
    check_refusal(train.main, ["--resume", run, "--steps", "4"], pattern)
    assert read_tree(run) == files_before


def test_a_disk_that_fills_while_saving_leaves_the_last_checkpoint_and_names_it(
    run, check_refusal, capsys
):
    checkpoints_before = read_tree(run / "checkpoints")
    with limit_file_size(200_000):
        pattern = "step-000004.partial/adapter/adapters.safetensors cannot be written: "
        line = check_refusal(train.main, ["--resume", run, "--steps", "4"], pattern)
    assert (
        f"step-000003 is intact, free some space and continue with: uv run train.py --resume {run}\n"
        in line
    )
    assert read_tree(run / "checkpoints") == checkpoints_before
    assert gwen.load("demo", adapter=run / "adapter")

    train.main(["--resume", str(run)])
    output = capsys.readouterr().out
    assert "step 4/4" in output
    assert "step 3/4" not in output
    last_adapter = run / "checkpoints" / "step-000004" / "adapter"
    last_weights = (last_adapter / "adapters.safetensors").read_bytes()
    assert (run / "adapter" / "adapters.safetensors").read_bytes() == last_weights


@pytest.mark.parametrize("size", [100, 4000])
def test_a_disk_that_fills_at_another_moment_leaves_the_run_unchanged(run, capsys, size):
    """With 100 bytes the settings cannot be written; with 4,000 the logs and the page cannot."""
    files_before = read_tree(run)
    with limit_file_size(size), pytest.raises(SystemExit) as exit_info:
        train.main(["--resume", str(run), "--steps", "5"])
    *notes, line = capsys.readouterr().err.splitlines(keepends=True)
    assert exit_info.value.code == 2
    check_error_line(line, str(run))
    assert all(note.startswith("WARNING: the run's page") for note in notes)

    files_after = read_tree(run)
    changes = str(run / "changes.jsonl")  # a resume records that --steps has changed

    # Other tests of this process may have imported code that the run had not recorded.
    def names_to_compare(files):
        return {name for name in files if "/code/" not in name and name != changes}

    assert names_to_compare(files_after) == names_to_compare(files_before)
    for name, content in files_before.items():
        if "checkpoints" in name or "adapter" in name:
            assert files_after[name] == content, name
    assert yaml.safe_load((run / "config.yaml").read_text())["steps"] in (3, 5)

    train.main(["--resume", str(run), "--steps", "4"])


def test_a_disk_that_fills_during_a_merge_leaves_no_partial_model(golden, tmp_path, check_refusal):
    flags = "--fuse --model demo --adapter".split()
    flags += [golden("grpo") / "adapter", "--out", tmp_path / "merged"]
    with limit_file_size(100_000):
        check_refusal(export.main, flags, f"--out {tmp_path / 'merged'} cannot be written: ")
    assert not list(tmp_path.iterdir())
    export.main([str(flag) for flag in flags])
    assert gwen.load(tmp_path / "merged")


# ---- control characters, and values that would take too long


@pytest.mark.parametrize(
    "character",
    ["\x00", "\x07", "\r", "\x1b", "\x7f", "\x9b", "\u202e", "\u2028", "\ufeff", "\udcff"],
)
def test_a_printed_line_shows_control_characters_by_their_code(capsys, character):
    text = f"a{character}[2Jb"
    expected_line = f"a\u27e8U+{ord(character):04X}\u27e9[2Jb\n"
    with pytest.raises(SystemExit):
        exit_with_error(text)
    console.print_line(text)
    console.print_line_to_stderr(text)
    assert capsys.readouterr() == (expected_line, f"error: {expected_line}{expected_line}")


def test_an_error_line_cuts_a_very_long_value(check_refusal):
    flags = ["--model", "demo", "--task", "x" * 10**6]
    line = check_refusal(train.main, flags, "--task is 'x{500,}.* \u2026 .*rg:NAME$")
    assert len(line) < 900


def test_too_many_completions_are_refused_and_the_most_allowed_are_planned_quickly(
    capsys, check_refusal
):
    check_refusal(
        preflight.main,
        ["--model", "demo", "--groups", 65536],
        "--batch 4 times --groups 65536 is 262144 completions",
    )
    begin = time.process_time()
    preflight.main(["--model", "demo", "--groups", "65536", "--batch", "1"])
    assert time.process_time() - begin < 5
    assert "memory: " in capsys.readouterr().out


def test_a_list_of_runs_names_damaged_runs_and_shows_the_others(golden, tmp_path, capsys):
    for name in "abcdefg":
        shutil.copytree(
            golden("grpo"),
            tmp_path / name,
            ignore=shutil.ignore_patterns("checkpoints", "report.html"),
        )
    (tmp_path / "b" / "metrics.jsonl").write_text("{}\n")
    (tmp_path / "c" / "config.yaml").write_text("[")
    (tmp_path / "d" / "metrics.jsonl").write_text('{"step": \n')
    (tmp_path / "e" / "env.json").write_bytes(b"\xff")
    (tmp_path / "g" / "env.json").write_text("[1]")
    (tmp_path / "f" / "warnings.jsonl").write_text('{"step": 1, "step": 2}\n')

    report.main(["--list", str(tmp_path)])
    head, _, good_line, *damaged_lines = capsys.readouterr().out.splitlines()
    assert head.startswith("run ")
    assert good_line.startswith(f"{tmp_path / 'a'} ")
    assert "3 of 3" in good_line
    damaged_names = re.findall(rf"{tmp_path}/(.)", "\n".join(damaged_lines))
    assert sorted(damaged_names) == list("bcdefg"), damaged_lines


def test_a_page_replaces_only_a_regular_file(run, mistakes, check_refusal):
    for path in (mistakes, mistakes / "pipe.yaml"):
        check_refusal(report.main, [run, "--out", path], "is not a regular file")
    assert stat.S_ISFIFO(os.stat(mistakes / "pipe.yaml").st_mode)
