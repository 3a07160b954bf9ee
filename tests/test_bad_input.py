"""
Whatever a user gets wrong is one line on stderr that names the value, exit status 2, and nothing is lost.

The mistakes are data, in mistakes.yaml. The commands are the real ones, most of them called in this process.
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


# ---- the files that are wrong

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
    (flag_and_end, content, word)
    for flag_and_end, rows in MISTAKES.pop("files").items()
    for content, word in rows.items()
] + [
    ("--config .yaml", "#" * 10**6 + "\n", "file of at most 1 MB"),
    ("--config .yaml", "[" * 5000, "recursion"),
    ("--config .yaml", f"learning_rate: 1{'0' * 400}", "a finite number"),
]


@pytest.fixture(scope="session")
def mistakes(
    tmp_path_factory: pytest.TempPathFactory, model_directory: Path, tokenizer: Any
) -> Path:
    """A directory of files, models and adapters each of which has one thing wrong with it."""
    at = tmp_path_factory.mktemp("mistakes")
    for name, text in TEXTS.items():
        (at / name).write_text(text)
    os.mkfifo(at / "pipe.yaml")
    (at / "empty_directory").mkdir()
    (at / "of_peft").mkdir()
    (at / "of_peft" / "adapter_config.json").write_text("{}")

    def model(name: str, **changes: Any) -> Path:
        shutil.copytree(model_directory, at / name)
        config = json.loads((at / name / "config.json").read_text())
        (at / name / "config.json").write_text(json.dumps(config | changes))
        return at / name

    model("model")
    model("mistral", model_type="mistral")
    model("quantized", quantization={"bits": 4, "group_size": 64})
    model("wide", intermediate_size=128)
    model("deep", num_hidden_layers=3)
    (model("not_json") / "config.json").write_text("{")
    weights = model("truncated") / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    (model("no_weights") / "model.safetensors").unlink()
    (model("no_tokenizer") / "tokenizer.json").unlink()
    (model("broken_tokenizer") / "tokenizer.json").write_text("{}")
    (model("no_template") / "chat_template.jinja").unlink()
    (model("strict_template") / "chat_template.jinja").write_text(
        "{{ raise_exception('only haiku') }}"
    )
    for file in write_checkpoint(at / "shards", CONFIGS["qwen2.5"], num_shards=3).glob(
        "*-00002-of-00003.*"
    ):
        file.unlink()
    write_checkpoint(at / "small_vocabulary", QWEN3 | {"vocab_size": 64})
    tokenizer.save_pretrained(str(at / "small_vocabulary"))
    (at / "nameless").mkdir()
    (at / "nameless" / "adapter_config.json").write_text("{}")
    (at / "adapter").mkdir()
    (at / "adapter" / "adapter_config.json").write_text(
        '{"model": "demo", "lora_parameters": {"rank": 2, "scale": 1}}'
    )
    other = {"model.layers.0.self_attn.q_proj.lora_a": mx.zeros((7, 2))}
    other["model.layers.0.self_attn.q_proj.lora_b"] = mx.zeros((2, 9))
    mx.save_safetensors(str(at / "adapter" / "adapters.safetensors"), other)
    return at


# ---- mistakes before anything begins


def read_refusal(capsys: pytest.CaptureFixture[str], program: str, flags: list[str]) -> str:
    """The line with which a command, called in this process, refuses its flags; above it others may stand."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(program).main(flags)
    err = capsys.readouterr().err
    assert ended.value.code == 2 and "Traceback" not in err, err
    return check_error_line(err.splitlines(keepends=True)[-1], "")


ROWS = [
    (program, flags, word) for program, rows in MISTAKES.items() for flags, word in rows.items()
]


@pytest.mark.parametrize(
    ("program", "flags", "word"), ROWS, ids=[f"{row[0]} {row[1]}" for row in ROWS]
)
def test_a_mistake_is_told_in_one_line_and_nothing_is_written(
    mistakes, tmp_path, capsys, program, flags, word
):
    before, arguments = read_tree(mistakes), shlex.split(flags.format(at=mistakes))
    chosen = (
        ["--model", "demo"] if program in ("chat", "evaluate") and "--model" not in flags else []
    )
    if program == "train" and not {"--config", "--resume"} & set(arguments):
        chosen = [*SMALL, "--run-dir", str(tmp_path / "run")]
    line = read_refusal(capsys, program, [*chosen, *arguments])
    assert word.format(at=mistakes) in line, line
    assert read_tree(mistakes) == before and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("flag_and_end", "content", "word"), FILES, ids=[repr(row[1][:40]) for row in FILES]
)
def test_a_mistake_in_a_file_is_told_in_one_line(tmp_path, capsys, flag_and_end, content, word):
    flag, end = flag_and_end.split()
    (tmp_path / f"file{end}").write_text(content, encoding="latin-1")
    small = [] if flag == "--config" else SMALL
    line = read_refusal(
        capsys,
        "train",
        [*small, flag, str(tmp_path / f"file{end}"), "--run-dir", str(tmp_path / "run")],
    )
    assert word in line and not (tmp_path / "run").exists(), line


FIELDS = {flag_of(key): setting.field for key, setting in SETTINGS.items()}
BOUNDS = [
    (flag, value)
    for flag, field in FIELDS.items()
    for value in {
        int: [field.metadata.get("low", 0) - 1],
        float: ["nan", "inf"] + ([-0.5] if "low" in field.metadata else []),
        str: [""],
    }.get(field.type, [])
]


def test_every_setting_refuses_what_is_out_of_its_range(tmp_path, capsys):
    assert len(BOUNDS) > 60
    for flag, value in BOUNDS:
        line = read_refusal(
            capsys, "train", [*SMALL, "--run-dir", str(tmp_path / "run"), f"{flag}={value}"]
        )
        shown = f"{flag} is {value!r}; it must be" if value != "" else f"{flag}: '' is empty"
        assert shown in line, line
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("variable", "values"),
    [
        ("RUBRIC_JUDGE_BATCH_SIZE", [" ", "0", "-3", "x", "1.5", "٣", "999999999999"]),
        ("GWEN_DTYPE", ["", "int4", "float", "16"]),
    ],
)
def test_a_bad_value_of_an_environment_variable_is_named(
    monkeypatch, tmp_path, check_refusal, variable, values
):
    for value in values:
        monkeypatch.setenv(variable, value)
        flags = [*SMALL, "--run-dir", tmp_path / "run"]
        line = check_refusal(train.main, flags, rf"\b{variable}(=| is ){value!r}")
        assert line == check_refusal(evaluate.main, ["--model", "demo", "--limit", "1"], variable)
        assert (
            "from 1 to 999999999" if variable.startswith("RUBRIC") else "float16, bfloat16, float32"
        ) in line
    assert not list(tmp_path.iterdir())


def test_an_empty_chunk_size_in_the_environment_counts_as_none(monkeypatch):
    monkeypatch.setenv("RUBRIC_JUDGE_BATCH_SIZE", "")
    assert sources.read_judge_chunk_size_from_environment() == {}
    monkeypatch.setenv("RUBRIC_JUDGE_BATCH_SIZE", "7")
    assert sources.read_judge_chunk_size_from_environment() == {"judge_chunk_size": 7}
    assert rollout.parse_flags([], "bench_rollout.py", "").judge_chunk_size == 7


# ---- in a process of its own


def test_a_process_ends_with_status_2_and_one_line_or_with_0_and_none(tmp_path):
    done = run_command(
        "train.py", *SMALL, "--run-dir", tmp_path / "run", environment={"GWEN_DTYPE": "int4"}
    )
    assert done.returncode == 2 and not list(tmp_path.iterdir())
    check_error_line(done.stderr, "GWEN_DTYPE='int4' is not one of")
    done = run_command("train.py", *SMALL, "--run-dir", tmp_path / "run")
    assert done.returncode == 0 and done.stdout.startswith(
        "model: demo, as requested; task: demo\n"
    )
    # of a machine that is slow, and of answers that are cut off
    assert all(line.startswith(("... ", "WARNING after step")) for line in done.stderr.splitlines())
    assert not (tmp_path / "run" / "adapter-best").exists()  # as nothing was evaluated


# ---- rewards that go wrong later: the run is saved as it was after its last whole step


def test_rewards_as_large_as_are_taken_have_their_advantages_and_none_is_larger_by_its_weight(
    tmp_path, check_refusal
):
    (tmp_path / "mine.py").write_text(REWARDS)
    flags = [*SMALL, "--reward", f"{tmp_path / 'mine.py'}:largest", "--reward-weights"]
    train.main([*flags, "rubric=0", "--run-dir", str(tmp_path / "run")])
    lines = read_log(tmp_path / "run" / "rollouts.jsonl")
    assert [line["advantage"] for line in lines] == pytest.approx([0.5**0.5, -(0.5**0.5)] * 2)
    pattern = r"largest times its weight 2 is 1e15 or more; .*--reward-weights; saved after step 0"
    check_refusal(
        train.main, [*flags, "rubric=0,largest=2", "--run-dir", tmp_path / "heavy"], pattern
    )


def test_a_reward_that_goes_wrong_later_loses_no_step_and_its_successor_evaluates_anew(
    tmp_path, check_refusal
):
    file, run = tmp_path / "mine.py", tmp_path / "run"
    file.write_text(
        "import os\n"
        "calls = []\n"
        "def mine(completions, **_):\n"
        f"    calls.append(os.path.isdir({str(run)!r}))\n"  # not those of the audit
        "    assert sum(calls) < 4\n"  # one of the first evaluation, two of steps
        "    return [float(len(text)) for text in completions]\n"
    )
    flags = "--steps 4 --save-every 4 --eval-every 4 --eval-limit 4 --reward-weights rubric=0 --reward".split()
    check_refusal(
        train.main,
        [*SMALL, *flags, f"{file}:mine", "--run-dir", run],
        "AssertionError.*saved after step 2",
    )
    assert checkpoint.load(run).step == 2
    file.write_text("def mine(completions, **_): return [float(len(text)) for text in completions]")
    train.main(["--resume", str(run), "--allow-changes"])
    steps, evaluations = (
        [line["step"] for line in read_log(run / f"{log}.jsonl")] for log in ("metrics", "eval")
    )
    # the reward has changed, so the resumed run evaluates before it goes on
    assert steps == [1, 2, 3, 4] and evaluations == [0, 2, 4]


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
def test_a_users_own_rewards_replace_all_of_the_tasks_and_the_verifier_evaluates(
    mistakes, flags, weights, metric
):
    """The rubric goes too, unless it is named."""
    config, _ = resolve_settings(
        sources.settings_from_flags(
            parse_flags(["--model", "demo", *flags.format(at=mistakes).split()])
        ),
        None,
        None,
    )
    task = tasks.make_task(config)
    assert (task.reward_weights, task.metric) == (weights, metric)
    assert (task.rubric is not None) == ("rubric" in weights)


# ---- run directories, checkpoints and disks


@pytest.fixture
def run(golden, tmp_path: Path) -> Path:
    """A run of three saved steps, to damage."""
    return shutil.copytree(golden("grpo"), tmp_path / "run")


def test_a_run_directory_that_exists_is_not_touched(run, check_refusal):
    before = read_tree(run)
    check_refusal(
        train.main,
        [*SMALL, "--run-dir", run],
        f"--run-dir {run} already exists; .* --resume {run}",
    )
    check_refusal(
        train.main,
        [*SMALL, "--run-dir", run / "config.yaml"],
        f"--run-dir {run}/config.yaml already exists; .*another",
    )
    check_refusal(
        train.main,
        [*SMALL, "--run-dir", run / "adapter"],
        f"--run-dir {run}/adapter already exists; .*another",
    )
    assert read_tree(run) == before


@contextlib.contextmanager
def limited(size: int) -> Iterator[None]:
    """Makes every file of this process stop growing at `size` bytes, as a full disk would."""
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, most))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))


def test_a_run_directory_belongs_to_one_run(tmp_path):
    with run_files.unlock_run_dirs_after_block():
        made = [
            run_files.create_run_dir("model: demo\n", tmp_path / "demo-now", None) for _ in range(3)
        ]
        assert [path.name for path in made] == ["demo-now", "demo-now-2", "demo-now-3"]
        with pytest.raises(ValueError, match="is being used for training by process"):
            run_files.create_run_dir("model: other\n", made[0], str(made[0]))
    with (
        run_files.unlock_run_dirs_after_block(),
        pytest.raises(ValueError, match="demo-now already exists; "),
    ):
        run_files.create_run_dir("model: other\n", made[0], str(made[0]))
    assert (made[0] / "config.yaml").read_text() == "model: demo\n"


def test_a_run_whose_settings_do_not_fit_on_the_disk_leaves_its_directory_free(
    tmp_path, check_refusal
):
    with limited(100):
        flags = [*SMALL, "--run-dir", tmp_path / "run"]
        check_refusal(
            train.main,
            flags,
            f"the run directory {tmp_path / 'run'} cannot be written .*; make room there",
        )
    assert read_tree(tmp_path / "run") == {str(tmp_path / "run" / "lock"): b""}


def test_a_run_directory_that_cannot_be_made_is_named(run, check_refusal):
    below = run / "config.yaml" / "new"
    check_refusal(
        train.main, [*SMALL, "--run-dir", below], f"{below} cannot be written .*; .*choose another"
    )


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
    before = read_tree(run)
    check_refusal(train.main, ["--resume", run, *flags.split()], pattern)
    assert read_tree(run) == before


def test_the_newest_run_goes_on_with_more_steps(run, tmp_path, monkeypatch, capsys):
    shutil.copytree(run, tmp_path / "runs" / "newest")
    monkeypatch.chdir(tmp_path)
    settings = Path("runs/newest/config.yaml")
    text = settings.read_text()
    settings.write_text(text.replace("steps: 3", "steps: many", 1))
    with pytest.raises(SystemExit):
        train.main(["--resume"])
    assert capsys.readouterr().err.endswith(
        "\nerror: --steps is 'many'; it must be a whole number\n"
    )
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
def test_a_run_whose_settings_were_changed_by_hand_is_refused_and_kept(
    run, check_refusal, old, new, pattern
):
    text = (run / "config.yaml").read_text()
    assert old in text
    (run / "config.yaml").write_text(text.replace(old, new))
    before = read_tree(run)
    check_refusal(train.main, ["--resume", run, "--steps", "4"], pattern)
    assert read_tree(run) == before


def test_a_disk_that_fills_while_saving_leaves_the_last_checkpoint_and_says_where(
    run, check_refusal, capsys
):
    before = read_tree(run / "checkpoints")
    with limited(200_000):
        pattern = "step-000004.partial/adapter/adapters.safetensors cannot be written: "
        line = check_refusal(train.main, ["--resume", run, "--steps", "4"], pattern)
    assert (
        f"step-000003 is intact, free some space and continue with: uv run train.py --resume {run}\n"
        in line
    )
    assert read_tree(run / "checkpoints") == before
    assert gwen.load("demo", adapter=run / "adapter")
    train.main(["--resume", str(run)])
    out = capsys.readouterr().out
    assert "step 4/4" in out and "step 3/4" not in out
    last = run / "checkpoints" / "step-000004" / "adapter" / "adapters.safetensors"
    assert (run / "adapter" / "adapters.safetensors").read_bytes() == last.read_bytes()


@pytest.mark.parametrize("size", [100, 4000])
def test_a_disk_that_fills_at_any_other_moment_leaves_the_run_as_it_was(run, capsys, size):
    """At 100 bytes not even the settings can be written again, at 4,000 neither a log nor the page."""
    before = read_tree(run)
    with limited(size), pytest.raises(SystemExit) as ended:
        train.main(["--resume", str(run), "--steps", "5"])
    *notes, line = capsys.readouterr().err.splitlines(keepends=True)
    assert ended.value.code == 2
    check_error_line(line, str(run))
    assert all(note.startswith("WARNING: the run's page") for note in notes)
    after = read_tree(run)
    changes = str(run / "changes.jsonl")  # a resume records that --steps has changed
    # other tests of this process may have imported code that the run had not recorded
    names = {name for name in after if "/code/" not in name}
    assert names - {changes} == {name for name in before if "/code/" not in name} - {changes}
    assert all(
        after[name] == before[name] for name in before if "checkpoints" in name or "adapter" in name
    )
    assert yaml.safe_load((run / "config.yaml").read_text())["steps"] in (3, 5)
    train.main(["--resume", str(run), "--steps", "4"])


def test_a_disk_that_fills_while_a_model_is_merged_leaves_no_half_of_it(
    golden, tmp_path, check_refusal
):
    flags = [
        "--fuse",
        "--model",
        "demo",
        "--adapter",
        golden("grpo") / "adapter",
        "--out",
        tmp_path / "merged",
    ]
    with limited(100_000):
        check_refusal(export.main, flags, f"--out {tmp_path / 'merged'} cannot be written: ")
    assert not list(tmp_path.iterdir())
    export.main([str(flag) for flag in flags])
    assert gwen.load(tmp_path / "merged")


# ---- what a terminal would obey, and what takes for ever


@pytest.mark.parametrize(
    "character",
    ["\x00", "\x07", "\r", "\x1b", "\x7f", "\x9b", "\u202e", "\u2028", "\ufeff", "\udcff"],
)
def test_control_characters_are_shown_as_such_wherever_a_line_is_printed(capsys, character):
    text = f"a{character}[2Jb"
    shown = f"a\u27e8U+{ord(character):04X}\u27e9[2Jb\n"
    with pytest.raises(SystemExit):
        exit_with_error(text)
    console.print_line(text)
    console.print_line_to_stderr(text)
    assert capsys.readouterr() == (shown, f"error: {shown}{shown}")


def test_a_line_is_cut_where_a_value_has_no_end(check_refusal):
    line = check_refusal(
        train.main,
        ["--model", "demo", "--task", "x" * 10**6],
        "--task is 'x{500,}.* \u2026 .*rg:NAME$",
    )
    assert len(line) < 900


def test_a_million_completions_are_refused_and_as_many_as_are_taken_planned_at_once(
    capsys, check_refusal
):
    check_refusal(
        preflight.main,
        ["--model", "demo", "--groups", 65536],
        "--batch 4 times --groups 65536 is 262144 completions",
    )
    begin = time.process_time()
    preflight.main(["--model", "demo", "--groups", "65536", "--batch", "1"])
    assert time.process_time() - begin < 5 and "memory: " in capsys.readouterr().out


def test_a_list_of_runs_names_the_damaged_ones_and_shows_the_others(golden, tmp_path, capsys):
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
    head, _, good, *damaged = capsys.readouterr().out.splitlines()
    assert head.startswith("run ") and good.startswith(f"{tmp_path / 'a'} ") and "3 of 3" in good
    assert sorted(re.findall(rf"{tmp_path}/(.)", "\n".join(damaged))) == list("bcdefg"), damaged


def test_a_page_is_written_in_place_of_nothing_but_a_file(run, mistakes, check_refusal):
    for path in (mistakes, mistakes / "pipe.yaml"):
        check_refusal(report.main, [run, "--out", path], "is not a regular file")
    assert stat.S_ISFIFO(os.stat(mistakes / "pipe.yaml").st_mode)
