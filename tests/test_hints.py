"""What an unknown flag or setting is answered with: TRL's and PEFT's names by a table, others by their spelling."""

import re

import pytest

import flags
from config import SETTINGS, TARGETS
from disk import hub
from settings import checks, sources
from settings.checks import PARTS, fused_targets
from settings.sources import parse

KINDS = {"same", "renamed", "not needed", "missing"}


def said_of(capsys, *words):
    with pytest.raises(SystemExit):
        parse([str(word) for word in words])
    return capsys.readouterr().err


def test_every_foreign_name_is_answered_by_its_row_and_never_by_its_spelling():
    of_training = {"--loss", "--resume", "--run-dir", "--eval-data", *map(flags.flag_of, SETTINGS)}
    commands = {"--samples", "--export", "--fuse", *of_training}
    for name, kind, said in ((name, *row) for rows in flags.foreign_names().values() for name, row in rows.items()):
        own = set(re.findall("`(--[a-z-]+)", said))
        assert own <= commands, f"{name}: a flag that nobody has"
        assert (kind == "same") == (name in SETTINGS), name
        if kind != "same":
            answer = flags.hint(flags.flag_of(name), sorted(of_training))
            assert name in answer and "did you mean" not in answer and said.replace("`", "") in answer
            assert kind != "renamed" or own or said[0].isupper() or name == "callbacks", (
                f"{name}: what is to be written"
            )
    assert {kind for rows in flags.foreign_names().values() for kind, _ in rows.values()} == KINDS


@pytest.mark.parametrize(
    ("asked", "answer"),
    [
        (
            "--lora-alpha",
            "PEFT's lora_alpha is here --lora-scale, which is alpha / rank: 32 at rank 16 is --lora-scale 2",
        ),
        ("--per-device-train-batch-size", "TRL's per_device_train_batch_size is here --batch, in prompts: this *"),
        ("--num_generations", "TRL's num_generations is here --groups, completions per prompt"),
        ("--use-vllm", "TRL's use_vllm is not needed here: Gwen samples with the weights in training"),
        ("--delta", "TRL's delta is missing here: bring the loss as --loss FILE.py:fn"),
        ("--lr", "; lr is here --learning-rate"),
        ("--learning_rate", "did you mean --learning-rate?"),
        ("--grups", "did you mean --groups?"),
        ("--lora-ranks", "did you mean --lora-rank?"),
        ("--gradient", "--help lists them"),
        ("--verbose", "--help lists them"),
    ],
)
def test_a_flag_is_guessed_from_its_spelling_only_where_that_is_close(capsys, asked, answer):
    assert answer in said_of(capsys, asked, 3)


@pytest.mark.parametrize(
    ("name", "value", "answer"),
    [
        ("scale_rewards", "False", "; TRL's scale_rewards false is here --scale-rewards none"),
        ("report_to", "none", "no tracker is the default; leave --report-to out"),
        ("loss_type", "bnpo", "; TRL's loss_type bnpo is missing here: bring one as --loss FILE.py:fn"),
        ("scale_rewards", "max", "(choose from 'group', 'batch', 'mean', 'none')\n"),
    ],
)
def test_a_value_of_trl_is_answered_by_the_table_in_a_flag_and_in_a_recipe(capsys, name, value, answer):
    given = sources.given(parse([flags.flag_of(name), value])) if name == "loss_type" else {}
    said = "" if given else said_of(capsys, flags.flag_of(name), value)
    with pytest.raises(ValueError, match=f"^{flags.flag_of(name)} is ") as error:
        checks.checked(given or {name: {"False": False}.get(value, value)})
    assert answer in said or answer in str(error.value)
    assert value == "max" or flags.value_hint(name, value) in str(error.value)


def test_all_unknown_flags_are_told_in_one_line(capsys):
    said = said_of(capsys, "--num-generations", "8", "--beta", "0.1", "--grups", "4", "--use-vllm")
    assert said.count("\n") == 1 and said.count(" is no flag of train.py; ") == 3
    assert said.index("--groups, completions") < said.index("did you mean --groups?") < said.index("not needed here")


def test_a_recipe_and_a_program_are_answered_like_a_flag():
    with pytest.raises(ValueError, match="unknown setting 'num_generations'; TRL's num_generations is here --groups"):
        sources.refuse_unknown({"num_generations": 8})
    with pytest.raises(ValueError, match=r"unknown setting 'zebra'; train\.py --help-all lists them"):
        sources.refuse_unknown({"zebra": 8})


def test_a_command_without_the_flag_of_a_row_says_nothing_of_it():
    assert flags.hint("--lora-alpha", ["--temp", "--seed"]) == ""
    assert flags.hint("--temperature", ["--temp", "--seed"]) == "TRL's temperature is here --temp"


# ---- projections by the names of a checkpoint


def test_the_parts_of_projections_are_those_of_checkpoints():
    assert {
        fused.rpartition(".")[2]: tuple(part.rpartition(".")[2] for part in parts) for fused, parts in hub.FUSED.items()
    } == PARTS


def test_projections_may_be_named_as_in_a_checkpoint():
    assert fused_targets(["all-linear"]) == list(TARGETS)
    found = fused_targets("q_proj k_proj v_proj o_proj gate_proj up_proj down_proj".split())
    assert found == ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]
    assert fused_targets(["down_proj", "up_proj", "gate_proj"]) == ["gate_up_proj", "down_proj"]
    assert checks.checked({"lora_targets": ["v_proj", "q_proj", "k_proj"]}).model.lora_targets == ["qkv_proj"]


def test_a_part_alone_is_refused_with_its_neighbours():
    with pytest.raises(
        ValueError, match="q_proj: one adapter serves q_proj, k_proj, v_proj together, in qkv_proj; name k_"
    ):
        fused_targets(["q_proj", "v_proj"])
    with pytest.raises(ValueError, match="--lora-targets is 'qkv'; it must be one of qkv_proj"):
        checks.checked({"lora_targets": ["qkv"]})
