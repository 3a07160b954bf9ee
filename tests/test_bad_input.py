"""
Whatever a user gets wrong is one line on stderr that names the value, exit status 2, and nothing is lost.

Each row of the tables below is one mistake: the flags, in which {at} is a directory that holds the files of `mistakes`,
and a pattern that the line must match. The commands are the real ones, most of them called in this process.
"""

import json
import os
import re
import resource
import shutil
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
import yaml
from conftest import CONFIGS, QWEN3, checked_line, command, contents, read_log, write_checkpoint
from small_run import resolve

import bench_rollout
import evaluate
import gwen
import judge
import lora
import preflight
import report
import sampler
import tasks
import train
from bench import step as bench_step
from config import SETTINGS
from disk import checkpoint, run_files
from flags import fail, flag_of
from reporting import console
from settings import sources
from settings.sources import parse

pytestmark = pytest.mark.slow
SMALL = "--model demo --batch 2 --groups 2 --max-tokens 8 --steps 1 --eval-every 0".split()


# ---- the files that are wrong

SUMS = [{"prompt": f"What is {a} plus one?", "answer": f"{a + 1}"} for a in range(10)]
LONG = " ".join(["seven"] * 1200)  # the demo model's context is 1,024
CRITERION = {"name": "kind", "weight": 1.0, "text": "Is it kind?"}
REWARDS = """
import asyncio

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
import json
def deep(completions, **_): return [json.loads("{") for text in completions]
def wants_more(completions, colour): return [1.0] * len(completions)
def largest(completions, **_): return [9e14 * (-1) ** row for row in range(len(completions))]
number = 3
def no_numbers(completions, **_): return [None] * len(completions)
"""
TEXTS = {  # the others stand beside their patterns
    "long.jsonl": json.dumps({"prompt": LONG, "split": "train"}) + '\n{"prompt": "a", "split": "test"}\n',
    "long_test.jsonl": json.dumps(SUMS[0] | {"split": "train"}) + "\n"
    + json.dumps({"prompt": LONG, "answer": "1", "split": "test"}),
    "line3.jsonl": '{"prompt": "a"}\n\n{"prompt": "b"\n',
    "sums.jsonl": "".join(json.dumps(example) + "\n" for example in SUMS),
    "questions.jsonl": "".join(json.dumps({"prompt": example["prompt"]}) + "\n" for example in SUMS),
    "good_rubric.yaml": yaml.safe_dump({"criteria": [CRITERION]}),
    "rewards.py": REWARDS,
    "tools.py": 'def add(a: int) -> int:\n    """\n    Adds one.\n\n    Args:\n        a: A number.\n    """\n',
    "syntax.py": "def fn(:",
    "imports.py": "import no_such_module\ndef fn(**_): pass\n",
}  # fmt: skip


@pytest.fixture(scope="session")
def mistakes(tmp_path_factory: pytest.TempPathFactory, model_directory: Path, tokenizer: Any) -> Path:
    """A directory of files, models and adapters each of which has one thing wrong with it."""
    at = tmp_path_factory.mktemp("mistakes")
    texts = TEXTS | {f"{number}{file.split()[0]}": text for number, (_, file, text, _) in enumerate(CONTENTS)}
    for name, text in texts.items():
        (at / name).write_text(text, encoding="latin-1")
    os.mkfifo(at / "pipe.yaml")
    (at / "empty_directory").mkdir()

    def model(name: str, **changes: Any) -> Path:
        shutil.copytree(model_directory, at / name)
        held = json.loads((at / name / "config.json").read_text())
        (at / name / "config.json").write_text(json.dumps(held | changes))
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
    (model("strict_template") / "chat_template.jinja").write_text("{{ raise_exception('only haiku') }}")
    for file in write_checkpoint(at / "shards", CONFIGS["qwen2.5"], num_shards=3).glob("*-00002-of-00003.*"):
        file.unlink()
    write_checkpoint(at / "small_vocabulary", QWEN3 | {"vocab_size": 64})
    tokenizer.save_pretrained(str(at / "small_vocabulary"))
    (at / "nameless").mkdir()
    (at / "nameless" / "adapter_config.json").write_text("{}")
    (at / "adapter").mkdir()
    (at / "adapter" / "adapter_config.json").write_text('{"model": "demo", "lora_parameters": {"rank": 2, "scale": 1}}')
    other = {"model.layers.0.self_attn.q_proj.lora_a": mx.zeros((7, 2))}
    other["model.layers.0.self_attn.q_proj.lora_b"] = mx.zeros((2, 9))
    mx.save_safetensors(str(at / "adapter" / "adapters.safetensors"), other)
    return at


# ---- mistakes before the first step: no run directory appears

FLAGS: list[tuple[str, str]] = [
    ("--grups 4", "--grups is no flag of train.py; did you mean --groups?"),
    ("--grou 4", "--grou is no flag"),  # no abbreviations: a later flag could change what they mean
    ("--xyzzy=5", "--xyzzy is no flag of train.py; --help lists them"),
    ("demo", "demo is no flag of train.py"),
    *((f"--seeds {value}", f"--seeds: '{value}' is no number of seeds") for value in ("0", "x", "1,1", "1,-2", "1.5")),
    ("--batch", "--batch: expected one argument"),
    ("--batch x", "--batch: not a whole number: 'x'"),
    ("--batch 1.5", "--batch: not a whole number: '1.5'"),
    ("--learning-rate fast", "--learning-rate: not a number: 'fast'"),
    ("--groups 1", "--groups is 1; it must be at least 2"),
    ("--temp 0", "--temp is 0"),
    ("--stop one --tools {at}/tools.py:add", "--stop 'one' ends completions; with tools they have turns, leave it out"),
    ("--stop one --task calculator", "--stop 'one' ends completions; with tools they have turns, leave it out"),
    ("--stop one --task guess", "--stop 'one' ends completions; with tools they have turns, leave it out"),
    ("--top-p 1.5", "--top-p is 1.5; it must be at most 1"),
    ("--target-kl 1e-4", "--target-kl is 0.0001; below 0.001 it is rounding"),
    ("--batch 100000000", "--batch is 100000000; it must be at most 65536"),
    ("--steps 99999999999", "--steps is 99999999999; it must be at most"),
    ("--loss-type ppo", "--loss-type is 'ppo'; .*dapo"),
    ("--importance-sampling-level word", "--importance-sampling-level: .*'word' .*sequence"),
    ("--scale-rewards max", "--scale-rewards: .*'max' .*batch"),
    ("--kl-estimator k3", "--kl-estimator is no flag of train.py; kl_estimator is missing here: --beta has plain k3"),
    ("--distill-beta 1.2", "--distill-beta is 1.2; it must be at most 1"),
    ("--num-iterations 0", "--num-iterations is 0; it must be at least 1"),
    ("--batch 4 --mini-batches 3", "--mini-batches 3 must divide --batch 4: a part has whole groups"),
    ("--truncated drop", "--truncated: .*'drop' .*punish"),
    (
        "--truncated punish --reward soft_overlong:9:3",
        "--truncated punish is the reward soft_overlong, .*given already",
    ),
    (
        "--loss-type cispo",
        "--epsilon-high is 0.2; with --loss-type cispo it caps the ratio itself: at least 1, usually 5",
    ),
    ("--advantage mean", "--advantage is 'mean'; .*rloo"),
    ("--advantage reinforce", "--advantage reinforce measures from the whole step; set --scale-rewards batch or none"),
    (
        "--advantage reinforce --scale-rewards none --dynamic-sampling",
        "--dynamic-sampling True: to --advantage reinforce equal rewards are",
    ),
    ("--combine-rewards normalize --scale-rewards none", "--combine-rewards normalize normalizes within groups"),
    ("--lora-targets qkv_proj nonsense", "--lora-targets is 'nonsense'; it must be one of .*o_proj"),
    ("--task gms8k", "--task 'gms8k' is unknown, did you mean 'gsm8k'"),
    ("--reward-weights correct", "--reward-weights: 'correct' is not NAME=NUMBER"),
    ("--reward-weights correct=high", "'correct=high' is not NAME=NUMBER"),
    ("--reward-weights correct=1,", "'' is not NAME=NUMBER"),
    ("--reward-weights correct=nan", "--reward-weights is {'correct': nan}; it must be finite"),
    ("--reward-weights corect=1", "--reward-weights corect: the rewards are correct, rubric"),
    ("--reward-weights correct=0,rubric=0", "--reward-weights leave no reward"),
    ("--columns prompt=question", "--columns prompt=question renames columns of --data, which is not given"),
    ("--data {at}/sums.jsonl --columns question", "--columns: 'question' is not OURS=THEIRS"),
    ("--data {at}/sums.jsonl --columns prompt=question", "has no column 'question'; it has .*'prompt'"),
    ("--judge-url http://me:secret@host/v1 --loss-type sft", "^error: .*--judge-url http://[*]+@host/v1, [^@]*$"),
    ("--resume {at}/nothing", "--resume .*nothing: no config.yaml there"),
    ("--resume {at}/empty_directory", "--resume .*empty_directory: no config.yaml there"),
    ("--run-dir a\x1b[2J", r"--run-dir: 'a\\x1b\[2J' holds a control character; remove it"),
]
MODELS: list[tuple[str, str]] = [
    ("no_such_directory", "no_such_directory: no such directory, and no hub id"),
    ("empty_directory", "empty_directory has no config.json; --model takes"),
    ("not_json", "config.json cannot be read as JSON"),
    ("mistral", "model_type 'mistral'; supported are qwen2 .*, qwen3 .*, llama "),
    ("quantized", "quantized weights are not supported; take the 16-bit"),
    ("shards", "lacks the shard 'model-00002-of-00003.safetensors'"),
    ("truncated", r"truncated/model.safetensors is not a whole safetensors file"),
    ("no_weights", r"no_weights has no model\*.safetensors"),
    ("wide", r"down_proj.weight has shape \(48, 96\), config.json asks for \(48, 128\)"),
    ("deep", "lacks 11 tensors, the first is model.layers.2"),
    ("no_tokenizer", "no_tokenizer has no tokenizer.json"),
    ("broken_tokenizer", "broken_tokenizer: the tokenizer cannot be loaded"),
    ("small_vocabulary", "the tokenizer has the id .*, the model only 64 ids"),
    ("no_template", "the model's chat template refuses .*chat_template is not set"),
    ("strict_template", "the model's chat template refuses .*only haiku"),
    ("model --max-tokens 256", "training prompt 1, .*; with --max-tokens 256 it passes the model's context of 256"),
]
REWARD_FILES: list[tuple[str, str]] = [
    ("{at}/missing.py:fn", "missing.py:fn: there is no such file"),
    ("{at}/sums.jsonl:fn", "sums.jsonl is not a Python file"),
    ("{at}/rewards.py", "is not FILE.py:function"),
    ("{at}/rewards.py:god", "rewards.py has no function 'god', did you mean 'good'"),
    ("{at}/rewards.py:number", "number is of type int, not a function"),
    ("{at}/syntax.py:fn", "importing syntax.py failed, SyntaxError"),
    ("{at}/imports.py:fn", "importing imports.py failed, ModuleNotFoundError: No module named 'no_such_module'"),
    ("{at}/rewards.py:wants_more", "reward wants_more needs 'colour', which is no column of the data.*; it has [^;]*$"),
    ("{at}/rewards.py:good {at}/rewards.py:good", "two rewards have the same name"),
    ("lenght:50", "'lenght:50' is not FILE.py:function"),
    ("length:0", "'length:0' is not length:<target>, with positive whole numbers"),
    ("soft_overlong:5", "is not soft_overlong:<max_len>:<cache>"),
]
SELF = "--loss-type distill --teacher self"
PATHS: list[tuple[str, str]] = [
    ("--data {at}/missing.jsonl", r"--data \S*missing.jsonl: no such file"),
    ("--data {at}/line3.jsonl", "line3.jsonl, line 3: not JSON .*correct that line"),
    ("--data {at}/long.jsonl --reward length:5", "training prompt 1, .* has 12.. tokens; .*context of 1024"),
    ("--data {at}/long_test.jsonl --reward length:5 --eval-every 1", "held-out prompt 1, .* has 12.. tokens;"),
    ("--data {at}/questions.jsonl", "has no answer to compare with, only the columns prompt; name one, as --col"),
    ("--task demo --data {at}/questions.jsonl", "reward correct needs 'answer', which is no column .*; correct is a "),
    ("--task demo --data {at}/questions.jsonl --rubric {at}/good_rubric.yaml", "--task demo: give --reward, or --task"),
    *((f"{flags} {{at}}/{name}", f"{flags.split()[-1][2:]}.*{name} cannot be read: {why}")
      for flags in ("--config", "--rubric", "--task rg:lcm --task-config", f"{SELF} --teacher-prompt")
      for name, why in (("missing.yaml", ".*No such file"), ("pipe.yaml", "it is no file of at most 1 MB"))),
    ("--config {at}/empty_directory", "--config .*empty_directory cannot be read: it is no file of at most 1 MB"),
    ("--config /dev/zero", "--config /dev/zero cannot be read: it is no file of at most 1 MB"),
]  # fmt: skip
RECIPES = [
    ("model: demo\nbach: 8", "unknown setting 'bach'; did you mean 'batch'"),
    ("stop: [one, '']", "--stop has an empty text, which every completion holds; remove it"),
    ("stop: one", "--stop is 'one'; it must be a list of texts"),
    ("batch: eight", "--batch is 'eight'; it must be a whole number"),
    ("batch: 2.5", "--batch is 2.5; it must be a whole number"),
    ("batch: true", "--batch is True; it must be a whole number"),
    ("batch: [8]", r"--batch is \[8\]; it must be a whole number"),
    ("groups: 1", "--groups is 1; it must be at least 2"),
    ("learning_rate: .nan", "--learning-rate is nan; it must be a finite number"),
    ("learning_rate: 1e-4", r"--learning-rate is '1e-4'; .*in YAML 1.0e-4"),
    (f"learning_rate: 1{'0' * 400}", "--learning-rate is 1000.*; it must be a finite number"),
    ("steps: 99999999999", "--steps is 99999999999; it must be at most"),
    ("temp: 0", "--temp is 0"),
    ("thinking: maybe", "--thinking is 'maybe'; it must be true or false"),
    ("model: 5", "--model is 5; it must be a text"),
    ('model: "a\\e[2J"', r"--model is 'a\\x1b\[2J'; it must hold no control characters"),
    ("task: [demo]", r"--task is \['demo'\]; it must be a text"),
    ("reward: one.py:fn", "--reward is 'one.py:fn'; it must be a list of texts"),
    ("reward: [1]", r"--reward is \[1\]; it must be a list of texts"),
    ("lora_targets: []", "--lora-targets is empty; name some of qkv_proj"),
    ("lora_targets: [qkv]", "--lora-targets is 'qkv'; it must be one of"),
    ("reward_weights: {correct: .inf}", "--reward-weights is {'correct': inf}; it must be finite"),
    ("reward_weights: {1: 1}", "--reward-weights is {1: 1}; it must be finite"),
    ("reward_weights: [1]", r"--reward-weights is \[1\]; it must be finite"),
    ("loss_type: ppo", "--loss-type is 'ppo'; it must be one of"),
    ("data:", "--data is None"),
    ("1: 2", "unknown setting 1; train.py --help-all lists them"),
    ("", "holds no settings"),
    ("just words", "holds no settings"),
    ("batch: 8\ngroups: 4\nbatch: 9", "is not YAML, line 3: the key 'batch' stands twice"),
    ("#" * 10**6 + "\n", "cannot be read: it is no file of at most 1 MB"),
]
RUBRICS = [
    ("", "has no criteria; it needs a list"),
    ("just words", "has no criteria"),
    ("preamble: Grade it.", "has no criteria"),
    ("criteria: []", "has no criteria"),
    ("criteria: [3]", "criterion 1 is 3; it needs exactly"),
    ("criteria: [{name: '', weight: 1, text: Nice}]", "criterion 1 needs a name and a text that are not empty"),
    ("criteria: [{name: kind, weight: 1}]", "criterion 1 is .*it needs exactly name, weight and text"),
    (yaml.safe_dump({"preamble": 5, "criteria": [CRITERION]}), "the preamble is 5, not a text"),
    (yaml.safe_dump({"criteria": [CRITERION, {**CRITERION}]}), "two criteria have the same name"),
    ("criteria:\n- name: kind\n  weight: 1\n  text: Is it kind?\n  name: short", "line 5: the key 'name' stands twice"),
    (yaml.safe_dump({"preambel": "Grade it.", "criteria": [CRITERION]}), "unknown key 'preambel'; did you mean 'pream"),
    (yaml.safe_dump({"criteria": [CRITERION | {"text": 7}]}), "criterion 1 has the text 7, which YAML reads as no"),
    *((f"criteria: [{{name: {name}, weight: 1, text: Nice}}]", f"criterion 1 has the name {read}, which YAML reads")
      for name, read in (("1", "1"), ("yes", "True"), ("2.5", "2.5"))),
    *((yaml.safe_dump({"criteria": [CRITERION | {"weight": weight}]}), f"criterion 1 has weight {said}.*; it must be")
      for weight, said in ((0, "0"), (float("nan"), "nan"), (float("inf"), "inf"), ("heavy", "'heavy'"), (True, "True"),
                           (10**400, "1000"))),
]  # fmt: skip
YAML = [
    ("criteria: [a\nb: }", "is not YAML, line 2: "),
    ("when: 2001-99-99", "is not YAML: month must be in"),
    ("[" * 5000, "is not YAML: .*recursion"),
    ("!!timestamp soon", "is not YAML: "),
    ("data: caf\xe9", "cannot be read: .*utf-8"),
]
CONTENTS = [  # a flag, the end of a file's name with further flags, the file's content, and the pattern
    *(("--config", ".yaml", *row) for row in RECIPES + YAML),
    *(("--rubric", ".yaml", *row) for row in RUBRICS + YAML),
    ("--data", ".jsonl", '{"prompt": "a", "split": "test"}\n', "leaves no prompt to train on"),
    ("--data", ".jsonl --eval-every 1", '{"prompt": "a", "answer": "one"}\n', "holds out no prompt to evaluate; "),
    ("--data", ".jsonl", '{"prompt": "a", "split": "trian"}\n', "column split holds 'trian'"),
]  # fmt: skip
FIELDS = {key: setting.field for key, setting in SETTINGS.items()}
BOUNDS = [
    (f"{flag_of(key)}={value}", f"{flag_of(key)} is {value}; it must be")
    for key, field in FIELDS.items()
    for value in {
        int: [field.metadata.get("low", 0) - 1, -5],
        float: ["nan", "inf", "-inf"] + ([-0.5] if "low" in field.metadata else []),
    }.get(field.type, [])
]
EMPTY = [(f"{flag_of(key)}=", f"{flag_of(key)}: '' is empty") for key, field in FIELDS.items() if field.type is str]
assert len(BOUNDS) > 60 and len(EMPTY) > 10


MISTAKES = [
    *FLAGS,
    *BOUNDS,
    *EMPTY,
    *PATHS,
    *((f"--model {{at}}/{value}", pattern) for value, pattern in MODELS),
    *((f"--reward {value}", pattern) for value, pattern in REWARD_FILES),
    *((f"{flag} {{at}}/{number}{file}", pattern) for number, (flag, file, _, pattern) in enumerate(CONTENTS)),
]


@pytest.mark.parametrize(("flags", "pattern"), MISTAKES, ids=[flags for flags, _ in MISTAKES])
def test_a_mistake_in_what_a_run_is_given_is_one_line_and_leaves_no_run_directory(
    mistakes, tmp_path, refused, flags, pattern
):
    small = [] if "--config" in flags or "--resume" in flags else SMALL
    run_dir = [] if "--resume" in flags else ["--run-dir", tmp_path / "run"]
    refused(train.main, [*small, *run_dir, *flags.format(at=mistakes).split()], pattern)
    assert not list(tmp_path.iterdir())


def test_a_value_of_spaces_is_no_wish_for_the_default(refused):
    refused(evaluate.main, ["--model", " "], "--model: ' ' is empty")
    refused(sampler.main, ["--model", "demo", "--prompt", "hi", "--stop", ""], "--stop has an empty text")


@pytest.mark.parametrize(
    ("variable", "values"),
    [
        ("RUBRIC_JUDGE_BATCH_SIZE", [" ", "0", "-3", "x", "1.5", "٣", "999999999999"]),
        ("GWEN_DTYPE", ["", "int4", "float", "16"]),
    ],
)
def test_a_bad_value_of_an_environment_variable_is_named(monkeypatch, tmp_path, refused, variable, values):
    for value in values:
        monkeypatch.setenv(variable, value)
        flags = [*SMALL, "--run-dir", tmp_path / "run"]
        line = refused(train.main, flags, f"{variable}={value!r}")
        assert line == refused(evaluate.main, ["--model", "demo", "--limit", "1"], variable)
        assert ("from 1 to 999999999" if variable.startswith("RUBRIC") else "float16, bfloat16, float32") in line
    assert not list(tmp_path.iterdir())


def test_an_empty_chunk_size_in_the_environment_counts_as_none(monkeypatch):
    monkeypatch.setenv("RUBRIC_JUDGE_BATCH_SIZE", "")
    assert sources.of_environment() == {}
    monkeypatch.setenv("RUBRIC_JUDGE_BATCH_SIZE", "7")
    assert sources.of_environment() == {"judge_chunk_size": 7}


# ---- mistakes of the other commands

OTHERS = {
    sampler.main: [
        ("", "--prompt is missing: what the user says"),
        ("--promt hi", "--promt is no flag of sampler.py; did you mean --prompt[?]"),
        ("--prompt=", "--prompt: '' is empty"),
        ("--prompt \udcff", "--prompt .* holds half of a surrogate pair"),
        ("--prompt hi --model random:2m --adapter {at}/adapter", "adapter is of another model than random:2m"),
        ("--prompt hi --num 0", "--num is 0; it must be at least 1"),
        ("--prompt hi --num many", "--num: not a whole number: 'many'"),
        ("--prompt hi --max-tokens -1", "--max-tokens is -1; it must be at least 1"),
        ("--prompt hi --max-tokens 1024", "with --max-tokens 1024 it passes the model's context of 1024"),
        ("--prompt hi --temp nan", "--temp is nan; it must be finite and below"),
        ("--prompt hi --temp inf", "--temp is inf; it must be finite and below"),
        ("--prompt hi --temp -1", "--temp is -1.0; it must be"),
        ("--prompt hi --seed -1", "--seed is -1; it must be at least 0"),
        ("--prompt hi --repetition-penalty 0", "--repetition-penalty is 0; it must be above 0, and 1 is none"),
        ("--prompt hi --logits {at}/rewards.py:gone", "rewards.py has no function 'gone'"),
        ("--prompt hi --task nosuch", "--task nosuch is for what has tools, and nothing here has; leave it out"),
        ("--prompt hi --max-turns 3", "--max-turns 3 is for what has tools, and nothing here has; leave it out"),
        ("--model demo:tools --task guess --system one", "--system stands before what the user says; give --prompt"),
        ("--prompt hi --stop one \a", r"--stop is '\\x07'; it must hold no control characters"),
        ("--prompt hi --tmp 1", "--tmp is no flag of sampler.py; did you mean --temp?"),
        ("--prompt hi --model {at}/mistral", "model_type 'mistral'"),
        ("--prompt hi --adapter {at}/empty_directory", "empty_directory: no adapter_config.json there"),
        ("--prompt hi --adapter {at}/adapter", "q_proj does not fit a weight of shape"),
    ],
    evaluate.main: [
        ("--limit 0", "--limit is 0; it must be at least 1"),
        ("--samples -2", "--samples is -2; it must be at least 1"),
        ("--rollout-batch-size 0", "--rollout-batch-size is 0; it must be at least 1"),
        ("--max-tokens 0", "--max-tokens is 0; it must be at least 1"),
        ("--limt 3", "--limt is no flag of evaluate.py; did you mean --limit?"),
        ("--task valeus", "--task 'valeus' is unknown, did you mean 'values'"),
        ("--data {at}/line3.jsonl", "line3.jsonl, line 3: not JSON"),
        ("--data {at}/missing.jsonl", "missing.jsonl: no such file"),
        ("--columns prompt=question", "renames columns of --data, which is not given"),
        ("--model {at}/truncated", "is not a whole safetensors file"),
        ("--adapter {at}/model", "model: no adapter_config.json there"),
        ("--repetition-penalty nan", "--repetition-penalty is nan; it must be above 0"),
        ("--repetition-penalty 1.2 --suite", "--suite measures models as they are; leave --logits"),
        (
            "--model demo:tools --task calculator --repetition-penalty 1.2",
            "--task calculator has tools; leave --logits",
        ),
        ("--model demo:tools --task calculator --stop x", "--stop 'x' ends completions; with tools they have turns"),
        ("--prompts {at}/model/model.safetensors", "--prompts .*model.safetensors cannot be read: .*decode"),
        ("--prompts {at}/pipe.yaml", "--prompts .*pipe.yaml cannot be read: it is no file of at most 1 MB"),
        ("--model demo:tools --task calculator --prompts {at}/sums.jsonl", "has tools; leave .* and --prompts"),
        ("--out {at}", "--out .* is no file in an existing directory"),
        ("--out {at}/nowhere/out.jsonl", "nowhere/out.jsonl is no file in an existing directory"),
        ("--task values --judge-model {at}/mistral", "model_type 'mistral'"),
        ("--judge-mode decod", "--judge-mode: invalid choice: 'decod'"),
        ("--judge-think 3", "--judge-think 3 needs --judge-mode decode"),
        ("--judge-cache {at}/nowhere/scores.jsonl", "scores.jsonl is no file in an existing directory"),
        ("--task values --judge-cache {at}/sums.jsonl", "sums.jsonl holds no scores"),
        ("--judge-url http://localhost/v1", "name one with --judge-model"),
    ],
    judge.main: [
        ("--labels {at}/sums.jsonl", "are required: --rubric"),
        ("--rubric data/demo_rubric.yaml --labels {at}/sums.jsonl", "sums.jsonl, line 1: it needs the texts"),
        ("--rubric data/demo_rubric.yaml --labels {at}/missing.jsonl", "missing.jsonl cannot be read"),
    ],
    lora.main: [
        ("--model demo --adapter {at}/adapter --out {at}/new", "give --fuse for a whole model"),
        ("--fuse --model demo --out {at}/new", "there is no adapter yet; name one with --adapter, or a run with --run"),
        ("--fuse --export peft --adapter {at}/adapter --out {at}/new", "give --fuse for a whole model, or --export"),
        ("--fuse --model demo --adapter {at}/adapter --out {at}/model", "model exists; give a new directory"),
        ("--fuse --model demo --adapter {at}/adapter --out {at}/sums.jsonl", "sums.jsonl exists"),
        ("--fuse --model demo --adapter {at}/model --out {at}/new", "no adapter_config.json there"),
        ("--fuse --adapter {at}/nameless --out {at}/new", "does not name the model it was trained on; give"),
        ("--fuse --model demo --adapter {at}/adapter --out {at}/new", "q_proj does not fit a weight"),
        ("--fuse --model {at}/wide --adapter {at}/adapter --out {at}/new", "down_proj.weight has shape"),
    ],
    preflight.main: [
        ("--prompt-tokens 0", "--prompt-tokens is 0; it must be at least 1"),
        ("--model random:7b", "--model random:7b: the random models are"),
        ("--checkpoint-layers some", "--checkpoint-layers is 'some'; it must be auto, on, off or a number"),
        ("--colour red", "--colour is no flag of train.py"),
        ("--audit --model demo --task values", "only a judge or an environment, which are not asked"),
    ],
    report.main: [
        ("", "error: name a run, as runs/NAME"),
        ("nowhere", "error: nowhere: no config.yaml there"),
        ("--compare runs/one", "error: --compare needs two runs or more"),
        ("--list nowhere", "error: nowhere: no runs there"),
        ("--outt x", "error: --outt is no flag of report.py; did you mean --out?"),
    ],
    bench_rollout.main: [
        ("--batch 0", "--batch is 0"),
        ("--runs 0", "--runs is 0"),
        ("--prompt-tokens 0", "--prompt-tokens is 0"),
        ("--rollout-batch-size 0", "--rollout-batch-size is 0"),
        ("--batches 2", "--batches is no flag of bench_rollout.py; did you mean --batch?"),
        ("--seed 18446744073709551616", "--seed is 18446744073709551616; it must be finite and below 2.64"),
        ("--temp nan", "--temp is nan"),
        ("--model random:1b", "--model random:1b"),
        ("--model /nowhere", "--model /nowhere"),
    ],
    bench_step.main: [
        ("--groups 1", "--groups is 1; it must be at least 2"),
        ("--engines verl", "--engines: invalid choice"),
        ("--engines ours --model random:7b", "--model random:7b: the random models are"),
    ],
}


@pytest.mark.parametrize(("main", "flags", "pattern"), [(main, *row) for main, rows in OTHERS.items() for row in rows])
def test_a_mistake_in_the_flags_of_another_command_is_one_line_and_writes_nothing(
    mistakes, refused, main, flags, pattern
):
    before = contents(mistakes)
    chosen = ["--model", "demo"] if main in (sampler.main, evaluate.main) and "--model" not in flags else []
    refused(main, [*chosen, *flags.format(at=mistakes).split()], pattern)
    assert contents(mistakes) == before


def test_an_evaluation_that_cannot_be_made_ends_before_it_decodes(mistakes, capsys, monkeypatch):
    monkeypatch.setattr(sampler, "rollout", lambda *_, **__: pytest.fail("it decoded"))
    with pytest.raises(SystemExit) as ended:
        evaluate.main(["--model", "demo", "--task", "demo", "--data", str(mistakes / "long_test.jsonl")])
    assert ended.value.code == 2
    first, rest = capsys.readouterr().err.split("\n", 1)
    assert first == "model: demo, as asked; task: demo"
    checked_line(rest, "held-out prompt 1, .* has 12.. tokens")


def test_an_evaluation_whose_file_cannot_be_written_is_still_printed(tmp_path, capsys, monkeypatch):
    def full(path, text):
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(SystemExit) as ended:
        evaluate.main(["--model", "demo", "--limit", "2", "--max-tokens", "4", "--out", str(tmp_path / "out")])
    told = capsys.readouterr()
    assert ended.value.code == 2 and json.loads(told.out)["eval/num"] == 2
    checked_line(told.err.splitlines(keepends=True)[-1], "No space left on device: .*out'")


# ---- in a process of its own


@pytest.mark.parametrize(
    ("program", "flags", "environment", "pattern"),
    [
        ("train.py", "--grups 4", {}, "--grups is no flag of train.py; did you mean --groups?"),
        ("train.py", "", {"GWEN_DTYPE": "int4"}, "GWEN_DTYPE='int4' is not one of"),
        ("lora.py", "--fuse", {}, "are required: --out"),
    ],
)
def test_a_process_ends_with_status_2_and_one_line(mistakes, tmp_path, program, flags, environment, pattern):
    small = [*SMALL, "--run-dir", tmp_path / "run"] if program == "train.py" else []
    done = command(program, *small, *flags.format(at=mistakes).split(), environment=environment)
    assert done.returncode == 2
    checked_line(done.stderr, pattern)
    assert not list(tmp_path.iterdir())


def test_a_good_call_of_every_command_ends_with_status_0(finished, tmp_path):
    """`finished` is the good call of train.py."""
    model, adapter = ["--model", "demo"], ["--adapter", finished / "adapter"]
    for program, flags in (
        ("sampler.py", [*model, *adapter, "--prompt", "What is one plus two?", "--max-tokens", "4"]),
        ("evaluate.py", [*model, *adapter, "--limit", "2", "--max-tokens", "4", "--out", tmp_path / "out.jsonl"]),
        ("lora.py", ["--fuse", *model, *adapter, "--out", tmp_path / "merged"]),
    ):
        done = command(program, *flags)
        assert done.returncode == 0 and "error" not in done.stderr, done.stderr


# ---- rewards that go wrong: before the run there is none, later it is saved as it was after its last whole step


@pytest.mark.parametrize(
    ("function", "pattern"),
    [
        ("raises", r"reward raises raised RuntimeError: no way, at \S+/mine.py:5"),
        ("exits", "reward exits raised SystemExit"),
        ("late", r"reward late raised TimeoutError: nobody answers, at \S+/mine.py:14"),
        ("deep", r"reward deep raised JSONDecodeError: .*, at \S+/mine.py:16"),  # raised in a library
        ("not_a_number", r"reward not_a_number \(\S+/mine.py:7\) gave nan for row 0; return a finite number"),
        ("infinite", "reward infinite .* gave inf for row 0"),
        ("huge", r"reward huge .* gave -1e\+30 for row 0; return a finite number below 1e15"),
        ("too_few", r"reward too_few .* gave 1 values for \d+ completions"),
        ("words", "reward words .* gave 'good' for row 0"),
        ("nothing", "reward nothing .* gave None, not a list"),
        ("a_dict", "reward a_dict .* gave {'reward': 1.0}, not a list"),
        ("no_numbers", r"reward no_numbers \(\S+/mine.py:20\) gave only None for \d+ made-up completions"),
    ],
)
def test_a_reward_that_goes_wrong_is_told_before_a_model_is_loaded_and_leaves_nothing(
    tmp_path, refused, monkeypatch, function, pattern
):
    monkeypatch.setattr(gwen, "load", None)
    (tmp_path / "mine.py").write_text(REWARDS)
    flags = ["--reward", f"{tmp_path / 'mine.py'}:{function}", "--run-dir", tmp_path / "run"]
    refused(train.main, [*SMALL, *flags], pattern)
    assert not (tmp_path / "run").exists()


def test_a_reward_that_goes_wrong_in_the_first_step_leaves_a_run_that_goes_on_once_mended(tmp_path, capsys, refused):
    file, run = tmp_path / "mine.py", tmp_path / "run"
    file.write_text(
        "import os\n"
        "def mine(completions, **_):\n"
        f"    return [None if os.path.isdir({str(run)!r}) else 1.0 for text in completions]\n"  # the audit is over
    )
    pattern = f"reward mine gave no number for any of 4 completions.*; saved after step 0, .* --resume {run}\n"
    refused(train.main, [*SMALL, "--reward", f"{file}:mine", "--run-dir", run], pattern)
    assert checkpoint.load(run).step == 0
    file.write_text("def mine(completions, **_): return [1.0] * len(completions)")
    train.main(["--resume", str(run), "--allow-changes"])
    assert "step 1/1 | " in capsys.readouterr().out
    assert checkpoint.load(run).step == 1


def test_rewards_as_large_as_are_taken_have_their_advantages_and_none_is_larger_by_its_weight(tmp_path, refused):
    (tmp_path / "mine.py").write_text(REWARDS)
    flags = [*SMALL, "--reward", f"{tmp_path / 'mine.py'}:largest", "--reward-weights"]
    train.main([*flags, "rubric=0", "--run-dir", str(tmp_path / "run")])
    lines = read_log(tmp_path / "run" / "rollouts.jsonl")
    assert [line["advantage"] for line in lines] == pytest.approx([0.5**0.5, -(0.5**0.5)] * 2)
    pattern = r"largest times its weight 2 passes 1e15; start again with lower --reward-weights; saved after step 0"
    refused(train.main, [*flags, "rubric=0,largest=2", "--run-dir", tmp_path / "heavy"], pattern)


def test_a_reward_that_goes_wrong_later_loses_no_step_and_evaluates_no_second_time(tmp_path, refused):
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
    refused(train.main, [*SMALL, *flags, f"{file}:mine", "--run-dir", run], "AssertionError.*saved after step 2")
    assert checkpoint.load(run).step == 2
    file.write_text("def mine(completions, **_): return [float(len(text)) for text in completions]")
    train.main(["--resume", str(run), "--allow-changes"])
    steps, evaluations = ([line["step"] for line in read_log(run / f"{log}.jsonl")] for log in ("metrics", "eval"))
    assert steps == [1, 2, 3, 4] and evaluations == [0, 4]


@pytest.mark.parametrize(
    ("flags", "key"),
    [
        ("--reward {at}/rewards.py:good", "eval/accuracy"),
        ("--reward-weights correct=0", "eval/accuracy"),
        ("--reward {at}/rewards.py:good --data {at}/questions.jsonl", "eval/score"),
        (
            "--task demo --reward {at}/rewards.py:good --data {at}/questions.jsonl --reward-weights rubric=0",
            "eval/score",
        ),
    ],
)
def test_a_run_on_a_users_own_rewards_is_evaluated_by_the_verifier_where_the_data_has_answers(
    mistakes, tmp_path, capsys, flags, key
):
    flags = flags.format(at=mistakes).split()
    train.main([*SMALL, "--eval-every", "1", "--eval-limit", "4", *flags, "--run-dir", str(tmp_path / "run")])
    evaluations = read_log(tmp_path / "run" / "eval.jsonl")
    assert [record["step"] for record in evaluations] == [0, 1]
    assert all(isinstance(record[key], float) for record in evaluations)


@pytest.mark.parametrize(
    ("flags", "weights"),
    [
        ("--task demo", {"correct": 1, "rubric": 0.5}),
        ("--task demo --reward {at}/rewards.py:good", {"good": 1}),
        ("--task values --reward {at}/rewards.py:good length:9", {"good": 1, "length": 1}),
        ("--task values --reward {at}/rewards.py:good --rubric {at}/good_rubric.yaml", {"good": 1, "rubric": 1}),
        ("--task demo --reward {at}/rewards.py:good --reward-weights rubric=2", {"good": 1, "rubric": 2}),
        ("--task demo --reward {at}/rewards.py:good --reward-weights good=2", {"good": 2}),
        ("--task demo --rubric {at}/good_rubric.yaml", {"correct": 1, "rubric": 0.5}),
    ],
)
def test_a_users_own_rewards_replace_all_of_the_tasks_the_rubric_too_unless_it_is_named(mistakes, flags, weights):
    its, _ = resolve(sources.given(parse(["--model", "demo", *flags.format(at=mistakes).split()])), None, None)
    task = tasks.make(its)
    assert task.reward_weights == weights and (task.rubric is not None) == ("rubric" in weights)


# ---- run directories, checkpoints and disks


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A good run of three saved steps, in a process of its own: the control of everything here."""
    run = tmp_path_factory.mktemp("finished") / "run"
    done = command("train.py", *SMALL, "--steps", "3", "--save-every", "1", "--run-dir", run)
    assert done.returncode == 0, done.stderr
    assert done.stderr == "" and done.stdout.startswith("model: demo, as asked; task: demo\n")
    assert [path.name for path in checkpoint.saved(run)] == ["step-000001", "step-000002", "step-000003"]
    return run


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    shutil.copytree(finished, tmp_path / "run")
    return tmp_path / "run"


def test_a_run_directory_that_exists_is_not_touched(run, refused):
    before = contents(run)
    refused(train.main, [*SMALL, "--run-dir", run], f"--run-dir {run} exists; give another, or --resume it")
    refused(train.main, [*SMALL, "--run-dir", run / "config.yaml"], "config.yaml exists; give another\n")
    refused(train.main, [*SMALL, "--run-dir", run / "adapter"], "adapter exists; give another\n")
    assert contents(run) == before


@pytest.fixture
def overtaken(monkeypatch: pytest.MonkeyPatch) -> Callable[[list[Any]], None]:
    """The command, while whose model is loaded another run with the same flags begins and ends."""
    make = train.GrpoRun

    def main(flags: list[Any]) -> None:
        def slowly(*args: Any) -> train.GrpoRun:
            monkeypatch.setattr(train, "GrpoRun", make)
            train.main([str(flag) for flag in flags])
            return make(*args)

        monkeypatch.setattr(train, "GrpoRun", slowly)
        train.main([str(flag) for flag in flags])

    return main


def test_two_runs_of_one_second_have_a_directory_each(tmp_path, monkeypatch, overtaken):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run_files.time, "strftime", lambda _: "now")
    overtaken(SMALL)
    overtaken(SMALL)
    runs = sorted((tmp_path / "runs").iterdir())
    assert [run.name for run in runs] == ["demo-now", "demo-now-2", "demo-now-3", "demo-now-4"]
    assert all(len((run / "metrics.jsonl").read_text().splitlines()) == 1 for run in runs)
    assert all((run / "adapter" / "adapters.safetensors").is_file() for run in runs)


def test_a_run_directory_that_another_run_has_taken_meanwhile_is_not_touched(tmp_path, refused, overtaken):
    run = tmp_path / "run"
    refused(overtaken, [*SMALL, "--run-dir", run], f"--run-dir {run} exists; give another, or --resume it")
    assert len((run / "metrics.jsonl").read_text().splitlines()) == 1
    assert yaml.safe_load((run / "config.yaml").read_text())["batch"] == 2


def test_a_run_whose_settings_do_not_fit_on_the_disk_leaves_its_directory_free(tmp_path):
    flags = [*SMALL, "--run-dir", tmp_path / "run"]
    done = command("train.py", *flags, preexec_fn=limited(100))
    assert done.returncode == 2
    checked_line(done.stderr, f"the run directory {tmp_path / 'run'} cannot be written .*; make room there")
    assert contents(tmp_path / "run") == {str(tmp_path / "run" / "lock"): b""}


def test_a_run_directory_that_cannot_be_made_is_named(run, refused):
    below = run / "config.yaml" / "new"
    refused(train.main, [*SMALL, "--run-dir", below], f"{below} cannot be written .*; .*choose another")


@pytest.mark.parametrize(
    ("flags", "pattern"),
    [
        ("--learning-rate 0.1", "--learning-rate cannot change in a resumed run; start a new one"),
        ("--config recipes/demo.yaml", "--config recipes/demo.yaml cannot change a resumed run"),
        ("--run-dir elsewhere", "--run-dir elsewhere: a resumed run stays in its directory"),
        ("--steps 0", "--steps is 0; it must be at least 1"),
    ],
)
def test_a_resumed_run_keeps_its_settings(run, refused, flags, pattern):
    before = contents(run)
    refused(train.main, ["--resume", run, *flags.split()], pattern)
    assert contents(run) == before


def damage(path: Path) -> None:
    tensors = path / "state.safetensors"
    tensors.write_bytes(tensors.read_bytes()[:-64])


def test_a_run_without_a_whole_checkpoint_is_refused_and_kept(run, capsys):
    for path in checkpoint.saved(run):
        damage(path)
    before = contents(run)
    with pytest.raises(SystemExit) as ended:
        train.main(["--resume", str(run)])
    *notes, line = capsys.readouterr().err.splitlines(keepends=True)
    assert ended.value.code == 2 and len(notes) == 3 and all("is damaged" in note for note in notes)
    checked_line(
        line,
        f"--resume {run}: it has no intact checkpoint; start over with: uv run train.py --config {run}/config.yaml",
    )
    assert contents(run) == before


@pytest.mark.parametrize(
    ("old", "new", "pattern"),
    [
        ("lora_rank: 16", "lora_rank: 8", r"lora_rank \(16, now 8\) changed since step 3; --allow-changes goes on"),
        ("lora_rank: 16", "lora_rnak: 8", "unknown setting 'lora_rnak'; did you mean 'lora_rank'"),
        ("model: demo", "model: /nowhere/at/all", "--model /nowhere/at/all is no longer there; put it back, or"),
        ("batch: 2", "batch: [", "config.yaml is not YAML, line"),
    ],
)
def test_a_run_whose_settings_were_changed_by_hand_is_refused_and_kept(run, refused, old, new, pattern):
    text = (run / "config.yaml").read_text()
    assert old in text
    (run / "config.yaml").write_text(text.replace(old, new))
    before = contents(run)
    refused(train.main, ["--resume", run, "--steps", "4"], pattern)
    assert contents(run) == before


def limited(size: int) -> Callable[[], None]:
    """Makes every file of a child process stop growing at `size` bytes, as a full disk would."""
    return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


def test_a_disk_that_fills_while_saving_leaves_the_last_checkpoint_and_says_where(run):
    before = contents(run / "checkpoints")
    done = command("train.py", "--resume", run, "--steps", "4", preexec_fn=limited(200_000))
    assert done.returncode == 2
    line = checked_line(done.stderr, r"step-000004.partial/adapter/adapters.safetensors cannot be written: ")
    assert f"step-000003 is intact, free some space and continue with: uv run train.py --resume {run}\n" in line
    assert contents(run / "checkpoints") == before
    assert gwen.load("demo", adapter=run / "adapter")
    again = command("train.py", "--resume", run)
    assert again.returncode == 0 and "step 4/4" in again.stdout and "step 3/4" not in again.stdout


@pytest.mark.parametrize(("owner", "name"), [(checkpoint, "save"), (shutil, "copyfile")], ids=["save", "copy"])
def test_a_run_that_ends_while_it_saves_its_last_step_has_the_newest_adapter_once_resumed(
    run, tmp_path, refused, monkeypatch, owner, name
):
    whole = tmp_path / "whole"
    shutil.copytree(run, whole)
    train.main(["--resume", str(whole), "--steps", "4"])

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, full)
        refused(train.main, ["--resume", run, "--steps", "4"], "No space left")
    train.main(["--resume", str(run)])
    for file in ("adapters.safetensors", "adapter_config.json"):
        assert (run / "adapter" / file).read_bytes() == (whole / "adapter" / file).read_bytes()


@pytest.mark.parametrize("size", [100, 4000])
def test_a_disk_that_fills_at_any_other_moment_leaves_the_run_as_it_was(run, size):
    """At 100 bytes not even the settings can be written again, at 4,000 a log cannot grow; a change is noted first."""
    before = contents(run)
    done = command("train.py", "--resume", run, "--steps", "5", preexec_fn=limited(size))
    assert done.returncode == 2
    checked_line(done.stderr, str(run))
    after = contents(run)
    written = str(run / "config.yaml")
    assert after.keys() == before.keys() | {str(run / "changes.jsonl")}
    assert after[written].replace(b"\nsteps: 5\n", b"\nsteps: 3\n") == before[written]
    assert all(after[name] == before[name] for name in before if "checkpoints" in name or "adapter" in name)
    assert command("train.py", "--resume", run, "--steps", "4").returncode == 0


def test_a_disk_that_fills_while_a_model_is_merged_leaves_no_half_of_it(finished, tmp_path):
    flags = ["--fuse", "--model", "demo", "--adapter", finished / "adapter", "--out", tmp_path / "merged"]
    done = command("lora.py", *flags, preexec_fn=limited(100_000))
    assert done.returncode == 2
    checked_line(done.stderr, f"--out {tmp_path / 'merged'} cannot be written: ")
    assert not list(tmp_path.iterdir())
    lora.main([str(flag) for flag in flags])
    assert gwen.load(tmp_path / "merged")


# ---- what a terminal would obey, and what takes for ever


@pytest.mark.parametrize(
    "character", ["\x00", "\x07", "\r", "\x1b", "\x7f", "\x9b", "\u202e", "\u2028", "\ufeff", "\udcff"]
)
def test_control_characters_are_shown_as_such_wherever_a_line_is_printed(capsys, monkeypatch, character):
    text = f"a{character}[2Jb"
    shown = f"a\u27e8U+{ord(character):04X}\u27e9[2Jb\n"
    with pytest.raises(SystemExit):
        fail(text)
    console.say(text)
    console.warn(text)
    assert capsys.readouterr() == (shown, f"error: {shown}{shown}")
    monkeypatch.setattr(sampler, "texts", lambda *_: [text])  # of a model
    sampler.main(["--model", "demo", "--prompt", "hi", "--max-tokens", "1"])
    assert capsys.readouterr().out == shown


def test_a_line_is_cut_where_a_value_has_no_end(refused):
    line = refused(train.main, ["--model", "demo", "--task", "x" * 10**6], "--task 'x{500,}.* \u2026 .*rg:NAME$")
    assert len(line) < 900


def test_a_million_completions_are_refused_and_as_many_as_are_taken_planned_at_once(capsys, refused):
    refused(preflight.main, ["--model", "demo", "--groups", 65536], "--batch 4 times --groups 65536 is 262144; it")
    begin = time.process_time()
    preflight.main(["--model", "demo", "--groups", "65536", "--batch", "1"])
    assert time.process_time() - begin < 5 and "memory: " in capsys.readouterr().out


def test_a_list_of_runs_names_the_damaged_ones_and_shows_the_others(finished, tmp_path, capsys):
    for name in "abcdef":
        shutil.copytree(finished, tmp_path / name, ignore=shutil.ignore_patterns("checkpoints", "report.html"))
    (tmp_path / "b" / "metrics.jsonl").write_text("{}\n")
    (tmp_path / "c" / "config.yaml").write_text("[")
    (tmp_path / "d" / "metrics.jsonl").write_text('{"step": \n')
    (tmp_path / "e" / "env.json").write_bytes(b"\xff")
    (tmp_path / "f" / "warnings.jsonl").write_text('{"step": 1, "step": 2}\n')
    report.main(["--list", str(tmp_path)])
    head, _, good, *damaged = capsys.readouterr().out.splitlines()
    assert head.startswith("run ") and good.startswith(f"{tmp_path / 'a'} ") and "3 of 3" in good
    assert sorted(re.findall(rf"{tmp_path}/(.)", "\n".join(damaged))) == list("bcdef"), damaged


@pytest.mark.parametrize("flags", [["--out", "{at}"], ["--out", "{at}/pipe.yaml"]])
def test_a_page_is_written_in_place_of_nothing_but_a_file(finished, mistakes, refused, flags):
    refused(report.main, [finished, *(flag.format(at=mistakes) for flag in flags)], "is no file; name another")
    assert stat.S_ISFIFO(os.stat(mistakes / "pipe.yaml").st_mode)
