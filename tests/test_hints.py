"""The hints for unknown flags and settings: a table has the names of TRL and PEFT."""

import re

import pytest
import yaml
from conftest import ROOT, catch_message

import flags
import train
from config import SETTINGS, TARGETS
from disk import hub
from settings import checks, sources
from settings.checks import PARTS, map_lora_targets_to_projections
from settings.sources import parse_flags
from text import foreign_names

KINDS = {"same", "renamed", "not needed", "missing"}


def test_the_hint_for_a_foreign_name_comes_from_the_table_and_not_from_the_spelling():
    train_flags = {"--loss", "--resume", "--run-dir", "--eval-data", *map(flags.flag_of, SETTINGS)}
    all_flags = {"--samples", "--export", "--fuse", *train_flags}
    table_rows = []
    for rows in foreign_names.load_foreign_names().values():
        table_rows += [(name, kind, hint) for name, (kind, hint) in rows.items()]
    assert {kind for _, kind, _ in table_rows} == KINDS

    for name, kind, hint in table_rows:
        flags_in_hint = set(re.findall("`(--[a-z-]+)", hint))
        assert flags_in_hint <= all_flags, f"{name}: no command has this flag"
        assert (kind == "same") == (name in SETTINGS), name
        if kind == "same":
            continue
        message = foreign_names.hint_on_unknown_name(flags.flag_of(name), sorted(train_flags))
        assert name in message
        assert "did you mean" not in message
        assert hint.replace("`", "") in message
        if kind == "renamed" and name != "callbacks":
            assert flags_in_hint or hint[0].isupper(), f"{name}: no replacement"


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("scale_rewards", "False", "none"),
        ("scale_rewards", "true", "group"),
        ("report_to", "none", []),
        ("loss_type", "nll", "sft"),
        ("learning_rate", "1e-4", 1e-4),  # YAML reads it as a string
        ("learning_rate", 1e-4, 1e-4),
        ("reward", "length:9", ["length:9"]),
    ],
)
def test_flags_with_underscores_and_recipes_accept_values_of_trl(tmp_path, name, value, expected):
    other_settings = {"data": "mine.jsonl"} if expected == "sft" else {}

    recipe_value = {"False": False, "true": True}.get(value, value)
    config = checks.check_settings(other_settings | {name: recipe_value})
    assert config.to_flags()[name] == expected

    settings = sources.settings_from_flags(parse_flags([f"--{name}", str(value)]))
    config = checks.check_settings(other_settings | settings)
    assert config.to_flags()[name] == expected


SCRIPT = """
MODEL = "Qwen/Qwen2-0.5B"
NAME: str = "openai/gsm8k"
ALSO = NAME
RATE = 2e-5
TEMPERATURE = 0.7
TEMPERATURE += 0.1
dataset = load_dataset(ALSO, "main", split="train")
args = GRPOConfig(output_dir="out", run_name="a b", learning_rate=RATE,
                  per_device_train_batch_size=8, gradient_accumulation_steps=4,
                  num_generations=8, max_completion_length=200,
                  gradient_checkpointing=True, report_to="none",
                  scale_rewards=False, loss_type="bnpo", num_train_epochs=1,
                  temperature=TEMPERATURE, max_grad_norm=1.0, weight_decay=0.1,
                  adam_beta2=0.99, top_k=pick(), bf16=True)
GRPOTrainer(model=MODEL, reward_funcs=[right], args=args, train_dataset=dataset,
            peft_config=LoraConfig(r=32, lora_alpha=64,
                                   target_modules=["q_proj", "k_proj", "v_proj"]))
raise SystemExit("Gwen reads the script and never runs it")
"""
RECIPE = """\
model_name_or_path: demo
learning_rate: 1e-5
lora_r: 8
use_peft: true
max_steps: 7
odd: 3
dataset_name: 5
'': 3
"""


@pytest.mark.parametrize(
    ("name", "text", "expected_settings", "commented"),
    [
        (
            "grpo.py",
            SCRIPT,
            {
                "model": "Qwen/Qwen2-0.5B",
                "data": "openai/gsm8k:main:train",
                "batch": 4,
                "groups": 8,
                "max_tokens": 200,
                "learning_rate": 2e-5,
                "lora_rank": 32,
                "lora_scale": 2.0,
                "lora_targets": ["qkv_proj"],
                "checkpoint_layers": "on",
                "adam_beta2": 0.99,
                "max_grad_norm": 1.0,
                "weight_decay": 0.1,
                "scale_rewards": "none",
            },
            "bf16 loss_type num_train_epochs reward_funcs temperature top_k",
        ),
        (
            "grpo.yaml",
            RECIPE,
            {"model": "demo", "learning_rate": 1e-5, "lora_rank": 8, "lora_scale": 4.0, "steps": 7},
            "dataset_name learning_rate odd reward_funcs",
        ),
        (
            "habits.yaml",
            "model_name_or_path: smollm2\n"
            "use_peft: true\n"
            "learning_rate: 2e-5\n"
            "warmup_ratio: 0.1\n"
            "num_train_epochs: 1\n"
            "reward_funcs: [accuracy_reward, mine.short]\n"
            "reward_weights: [1, 0.5]\n"
            "save_strategy: 'no'\n"
            "gradient_checkpointing_kwargs: {use_reentrant: false}\n",
            {
                "model": "smollm2",
                "learning_rate": 2e-5,
                "reward": ["AT/mine.py:short"],
                "reward_weights": {"short": 0.5},
            },
            "gradient_checkpointing_kwargs learning_rate num_train_epochs "
            "reward_funcs save_strategy warmup_ratio",
        ),
        (
            "computed.py",
            "GRPOConfig(per_device_train_batch_size=SIZE, num_generations=8)\n"
            "LoraConfig(r=RANK, lora_alpha=2 * RANK)\n"
            "load_dataset(split='train', name='main', path='openai/gsm8k')\n",
            {"data": "openai/gsm8k:main:train", "groups": 8},
            "lora_alpha per_device_train_batch_size r",
        ),
        (
            "rewards.py",
            "from mine import short as brief\n"
            "def right(): ...\n"
            "GRPOTrainer(reward_funcs=[right, brief])\n"
            "LoraConfig(target_modules=['q_proj', 'v_proj'])\n"
            "GRPOConfig(reward_weights=[1, 0.5], warmup_ratio=.11, max_steps=10)\n"
            "load_dataset('a'), load_dataset('b')",
            {
                "reward": ["AT/rewards.py:right", "AT/mine.py:short"],
                "reward_weights": {"right": 1, "short": 0.5},
                "warmup_steps": 2,
                "steps": 10,
                "lora_rank": 8,
                "lora_scale": 1.0,
            },
            "datasets reward target_modules",
        ),
        (
            "dotted.yaml",
            "reward_funcs: [their.own, mine.short]\n"
            "reward_weights: [1, 2]\n"
            "warmup_steps: 0.1\n"
            "max_steps: 3\n"
            "datasets: [{path: json, data_files: mine.py, split: train}]\n"
            "use_peft: false\n"
            "lora_r: 4",
            {
                "reward": ["AT/mine.py:short"],
                "reward_weights": {"short": 2},
                "warmup_steps": 1,
                "steps": 3,
                "data": "AT/mine.py",
                "lora_rank": 0,
            },
            "reward_funcs",
        ),
        (
            "short.py",
            "common = {'num_generations': 4}\n"
            "args = GRPOConfig('out', **common, **more())\n"
            "if x: args.max_steps = 7\n"
            "def f(a): return list(map(len, a))\n"
            "ds = Dataset.from_json('mine.py').map(f)\n"
            "test = load_dataset('a/b')\n"
            "class T(trl.GRPOTrainer): ...\n"
            "T('demo', f, args, ds, eval_dataset=test)\n"
            "LoraConfig(r=4)",
            {
                "groups": 4,
                "steps": 7,
                "data": "AT/mine.py",
                "model": "demo",
                "reward": ["AT/short.py:f"],
                "lora_rank": 4,
                "lora_scale": 2.0,
                "eval_data": "a/b",
            },
            "** .map reward",
        ),
        (
            "more.yaml",
            "dataset_name: mine.py\n"
            "dataset_train_split: train\n"
            "use_rslora: true\n"
            "eval_strategy: no\n"
            "eval_steps: 9\n"
            "chat_template_kwargs: {enable_thinking: false}\n"
            "per_device_train_batch_size: 1\n"
            "generation_batch_size: 24",
            {
                "data": "AT/mine.py",
                "lora_rank": 16,
                "lora_scale": 8.0,
                "eval_every": 9,
                "thinking": False,
                "batch": 3,
            },
            "eval_strategy reward_funcs",
        ),
        (
            "sft.py",
            "SFTConfig('o', per_device_train_batch_size=4)\n"
            "TrainingArguments(gradient_accumulation_steps=2)\n"
            "SFTTrainer('demo', train_dataset=load_dataset('mine.py'), peft_config=LoraConfig())",
            {"model": "demo", "loss_type": "sft", "batch": 8, "data": "AT/mine.py"},
            "peft_config",
        ),
        (
            "sft.yaml",
            "model_name_or_path: demo\n"
            "per_device_train_batch_size: 4\n"
            "max_length: 64\n"
            "loss_type: dft\n"
            "dataset_name: mine.py\n"
            "peft_config: null",
            {"model": "demo", "loss_type": "sft", "batch": 4, "lora_rank": 0, "data": "AT/mine.py"},
            "lora_rank loss_type max_length",
        ),
        (
            "b.py",
            "async def f(**_): ...\n"
            "g = mine.make(2)\n"
            "SFTTrainer('s', SFTConfig(max_steps=9))\n"
            "get_peft_model(m, r=8)\n"
            "GRPOTrainer('demo', [f, g, mine.make(3)], GRPOConfig(max_steps=3))",
            {
                "model": "demo",
                "reward": ["AT/b.py:f", "AT/b.py:g"],
                "steps": 3,
                "lora_rank": 8,
                "lora_scale": 1.0,
            },
            "SFTConfig SFTTrainer reward reward_funcs",
        ),
        (
            "files.py",
            "ds = load_dataset('json', data_files={'train': 'b', 'dev': 'c'})\n"
            "GRPOTrainer(train_dataset=ds['train'])",
            {"data": "b", "eval_data": "c", "lora_rank": 0},
            "lora_rank",
        ),
    ],
)
def test_a_file_of_trl_becomes_a_recipe_with_comments_on_settings_without_equivalents(
    tmp_path, capsys, name, text, expected_settings, commented
):
    (tmp_path / name).write_text(text)
    (tmp_path / "mine.py").touch()
    train.main(["--from-trl", str(tmp_path / name)])
    recipe = capsys.readouterr().out
    assert yaml.safe_load(recipe.replace(str(tmp_path), "AT")) == expected_settings

    # the settings that the comments name
    expected_names = commented.split()
    if expected_settings.get("loss_type") != "sft":
        expected_names.append("target_kl")
    if "learning_rate" not in text:
        expected_names.append("learning_rate")
    assert sorted(re.findall(r"^# ([\w.*()]+): ", recipe, re.M)) == sorted(expected_names)

    # the text of some comments
    refuses_targets = "['q_proj', 'v_proj'] -> refused: --lora-targets names q_proj" in recipe
    assert refuses_targets == (name == "rewards.py")
    if name == "grpo.py":
        assert recipe.startswith("# uv run train.py --config THIS --run-dir 'runs/a b'\n")
        pattern = r"^# temperature: 'TEMPERATURE' -> computed: .*`temp: VALUE`"
        assert re.search(pattern, recipe, re.M)
        assert "\nweight_decay: 0.1\n" in recipe
        assert "loss_type: 'bnpo' -> missing: " in recipe
    if name == "computed.py":
        comment = "# lora_alpha: '2 * RANK' -> renamed: `--lora-scale`, which is alpha / rank"
        assert comment in recipe
    if name == "habits.yaml":
        comment = (
            "# learning_rate: 2e-05 is low for this model: recipes/own-small.yaml has 0.0004\n"
        )
        assert comment in recipe
        assert "# reward_funcs: ['accuracy_reward'] -> renamed: " in recipe
        assert "refused" not in recipe

    (tmp_path / "recipe.yaml").write_text(recipe)
    checks.check_settings(sources.load_recipe(tmp_path / "recipe.yaml"))


def test_one_line_names_all_unknown_flags(capsys):
    with pytest.raises(SystemExit):
        parse_flags(["--num-generations", "8", "--beta", "0.1", "--grups", "4", "--use-vllm"])
    output = capsys.readouterr().err
    assert output.count("\n") == 1
    assert output.index("--num-generations") < output.index("--grups") < output.index("--use-vllm")


def test_recipes_and_programs_get_the_same_hints_as_flags():
    pattern = r"'num_generations'; .*--groups.*'zebra'; .*--help-all"
    with pytest.raises(ValueError, match=pattern):
        sources.refuse_unknown_settings({"num_generations": 8, "zebra": 8})

    # A recipe with many unknown names gets one hint, a program one per name.
    pattern = r"x: 5 settings are unknown: 'a', 'b', 'c', 'd', 'e'; .*--from-trl FILE"
    with pytest.raises(ValueError, match=pattern):
        sources.refuse_unknown_settings("abcde", "x: ")
    with pytest.raises(ValueError, match=r"'a'; .*'e'; .*--help-all"):
        sources.refuse_unknown_settings("abcde")

    with pytest.raises(ValueError, match=r"'curriculum'; .*epochs"):
        sources.refuse_unknown_settings({"curriculum": True})


def test_a_command_hints_only_at_flags_that_it_has():
    command_flags = ["--temp", "--seed"]
    assert foreign_names.hint_on_unknown_name("--lora-alpha", command_flags) == ""
    hint = foreign_names.hint_on_unknown_name("--temperature", command_flags)
    assert hint == "TRL's temperature corresponds to --temp"


def test_the_command_that_continues_a_run_has_the_extras_and_the_project_directory(
    tmp_path, monkeypatch
):
    config = checks.check_settings({"model": "smollm2", "task": "rg:lcm", "report_to": "wandb"})
    command = sources.command_prefix_with_extras(config.to_flags())
    assert command == "uv run --extra smollm --extra tasks --extra wandb train.py"
    command = sources.command_prefix_with_extras({"model": "demo"}, "report.py")
    assert command == "uv run report.py"

    monkeypatch.chdir(tmp_path)
    command = sources.command_prefix_with_extras({"model": "demo"})
    assert command == f"uv run --project {ROOT} {ROOT / 'train.py'}"


# ---- names of projections


def test_the_parts_of_projections_have_the_names_of_checkpoints():
    def last_part(name):
        return name.rpartition(".")[2]

    parts_by_projection = {
        last_part(projection): tuple(map(last_part, parts))
        for projection, parts in hub.FUSED.items()
    }
    assert parts_by_projection == PARTS


def test_lora_targets_may_have_the_names_of_a_checkpoint():
    assert map_lora_targets_to_projections(["all-linear"]) == list(TARGETS)
    names = "q_proj k_proj v_proj o_proj gate_proj up_proj down_proj".split()
    targets = ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]
    assert map_lora_targets_to_projections(names) == targets
    names = ["down_proj", "up_proj", "gate_proj"]
    assert map_lora_targets_to_projections(names) == ["gate_up_proj", "down_proj"]

    config = checks.check_settings({"lora_targets": ["v_proj", "q_proj", "k_proj"]})
    assert config.model.lora_targets == ["qkv_proj"]
    message = catch_message(checks.check_settings, {"lora_targets": 5})
    assert "--lora-targets is 5; it must be a list of strings" in message


def test_a_flag_with_two_values_causes_a_line_that_names_the_value_in_use(capsys):
    parser = flags.Parser("program", "A program.")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--reward", nargs="+")
    parser.add_argument("--prompt", action="append")
    parser.add_argument("runs", nargs="*")

    words = "a b --steps 3 --steps=5 --reward x y --reward x y --prompt p --prompt q".split()
    args = parser.parse_args(words)
    assert args.steps == 5
    assert args.prompt == ["p", "q"]
    error_output = capsys.readouterr().err
    assert error_output == "--steps is given 2 times; only the last counts: 5\n"

    parser.parse_args("--reward x y --steps 3 --reward x --steps 3".split())
    assert capsys.readouterr().err == "--reward is given 2 times; only the last counts: x\n"
