"""
Where a run's settings come from: flags, the environment, a recipe; which of them wins; and how they are written down.

Left out: the settings (config.py), whether they fit together (settings/checks.py).
"""

import argparse
import os
import re
import reprlib
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from config import SETTINGS, Config, Sizes, is_user_function
from disk.places import existing_paths, map_settings, relocate_settings
from flags import (
    Parser,
    add_flags,
    escape_invisible,
    explain_missing_run,
    flag_of,
    load_yaml,
    parse_seeds,
    suggest_name,
)
from settings.checks import check_settings

COMMAND = {  # flags of train.py that are no settings, so that no recipe has them: what follows, and their help
    "config": ("FILE", "recipe, in place of the task's; a run's `config.yaml` repeats that run"),
    "eval_data": ("FILE", "held-out prompts for --data, in place of a tenth of it"),
    "run_dir": ("DIR", "where the run is recorded (default: runs/TASK-TIME)"),
    "resume": ("DIR", "go on with it or the newest unfinished"),
    "allow_changes": ("", "--resume though data, rewards or files changed"),
    "seeds": ("N", "N seeds from --seed on, or these as 1,2,5, into one directory"),
    "no_look": (
        "",
        "go on though the first four steps of a run of over five minutes have no signal",
    ),
    "let_sleep": ("", "let a Mac go to sleep while it trains"),
    "wired_limit": ("GB", "memory that macOS must not page out (default: none)"),
    "open": ("", "open the run's page in a browser at the end"),
    "from_trl": ("FILE", "print the recipe of TRL's YAML or script, what has no equal as comments"),
    "print_config": ("", "print every setting as YAML and exit"),
}
LATER = {name for name, one in SETTINGS.items() if one.later}  # what may change in a resumed run
OWN = {key for key, setting in SETTINGS.items() if setting.field.metadata.get("own")}
FILES = {key for key, setting in SETTINGS.items() if setting.field.metadata.get("file")}
FILES |= OWN | {"eval_data"}
READ: dict[str, Any] = {
    "resume": {"nargs": "?", "const": True},
    "seeds": {"type": parse_seeds},
}  # how some are read


def parse_flags(argv: list[str]) -> argparse.Namespace:
    """Parses the flags of train.py; omitted settings are None."""
    everything = "--help-all" in argv
    parser = Parser(
        "train.py",
        "GRPO: sample groups of completions, reward them, make the better ones likelier.",
    )
    parser.add_argument("--help-all", action="help", help="show every flag and exit")
    for name, (metavar, text) in COMMAND.items():
        how: dict[str, Any] = (
            {"metavar": metavar} | READ.get(name, {}) if metavar else {"action": "store_true"}
        )
        parser.add_argument(flag_of(name), help=text, **how)
    add_flags(parser, SETTINGS.values(), everything)
    return parser.parse_args(argv)


def given_settings(args: argparse.Namespace, names: Iterable[str] = SETTINGS) -> dict[str, Any]:
    """The settings in `names` among the given flags, and `eval_data`, which `checked` joins to `data`."""
    return {
        name: value
        for name in [*names, "eval_data"]
        if (value := getattr(args, name, None)) is not None
    }


# of the bundled models; recipes by model and task
OWN_TASK = {"demo": "demo", "demo:rg": "rg:chain_sum,leg_counting", "demo:tools": "calculator"}
RECIPES = {("demo", "own"): "demo", ("demo:tools", "own"): "calculator"}
RECIPES |= {("demo:rg", kind): "demo-rg" for kind in ("rg", "own")}
# what older runs' `config.yaml` has, at the value that is left
GONE = {
    "curriculum": False,
    "dynamic_sampling": False,
    "reward_format": "text",
    "reward_workers": 0,
    "keep": 3,
}
GONE |= {"share_prefix": "auto", "allow_unreadable": False}
MANY = 4  # unknown settings of a file, more than which are named alone
SMALL = 4e8  # parameters below which own data has other defaults
LOW = 4  # times below the recipe's learning rate, from which a run hardly moves


def make_paths_absolute(settings: dict[str, Any], *folders: Path) -> dict[str, Any]:
    """
    Settings with absolute paths, so that a run finds its files from any directory.

    A relative path is one from the working directory, else from the first of `folders` that has it. What names no file
    stays as it is: a hub id, a bundled model, a mistake.
    """

    def find(text: str) -> str | None:
        for folder in (Path(), *folders):
            path = os.path.abspath(folder / text)
            if text and os.path.exists(path):
                return path
        return None

    def is_name(key: str, value: Any) -> bool:
        is_on_server = key == "judge_model" and bool(settings.get("judge_url"))
        is_word = key in OWN and isinstance(value, str) and not is_user_function(value)
        return is_on_server or is_word or value in ["self", *OWN_TASK]

    paths = {
        key: value for key, value in settings.items() if key in FILES and not is_name(key, value)
    }
    return settings | map_settings(paths, find)


def files_of(settings: dict[str, Any]) -> list[str]:
    """The absolute paths of the files that settings name and that are there."""
    return existing_paths({key: value for key, value in settings.items() if key in FILES})


def missing(settings: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """The flags, and their absolute paths at which nothing is. A run keeps its own --init-adapter."""
    for key in sorted((FILES & settings.keys()) - {"init_adapter"}):
        value = settings[key]
        for text in value if isinstance(value, list) else [value]:
            parts = [str(text)] if os.path.exists(str(text)) else str(text).split(",")
            for part in parts:
                path = part if os.path.isabs(part) else part.rpartition("=")[2]
                file, _, name = path.rpartition(":")
                if file and "/" not in name and not os.path.exists(path):
                    path = file
                if os.path.isabs(path) and not os.path.exists(path):
                    yield flag_of(key), path


def resolve_settings(
    flags: dict[str, Any],
    config_path: str | None,
    resume: str | None,
    choose_model: Callable[[str | None], tuple[str, str]],
) -> tuple[Config, str]:
    """
    The checked settings, and a line that says which model was chosen and why.

    choose_model: requested model -> chosen model, and the reason; of a resumed run the settings and flags alone count.
    """
    if resume:
        if config_path:
            anew = f"start a new one, from these weights with --init-adapter {resume}"
            raise ValueError(f"--config {config_path} cannot change a resumed run; {anew}")
        if not (Path(resume) / "config.yaml").is_file():
            raise ValueError(f"--resume {resume}: {explain_missing_run(resume)}")
        settings = load_recipe(Path(resume) / "config.yaml") | make_paths_absolute(flags)
        for flag, path in missing(settings):
            fix = f"put it back, or give its new place with {flag} (and --allow-changes if it has changed)"
            raise ValueError(f"--resume {resume}: {flag} {path} is no longer there; {fix}")
        config = check_settings(settings, flags)
        return config, f"model: {config.model.name}, as before; {describe_data(config)}"
    recipe, flags = (
        load_recipe(Path(config_path)) if config_path else None,
        make_paths_absolute(flags),
    )
    asked = merge_settings(flags, recipe)  # a mistake is told before a model is downloaded
    model, why = choose_model(asked.model.name)
    usual = "env" if asked.tools.env else OWN_TASK.get(model, "values")
    task = asked.data.task or ("own" if asked.data.path else usual)
    config = merge_settings(flags | {"model": model, "task": task}, recipe)
    said = f"model: {model}, {why}; {describe_data(config)}"
    if task != "own" or not asked.data.path:
        return config, said
    if recipe is None:
        is_sft = config.objective.loss_type == "sft"
        its = {
            key: config.to_flags()[key]
            for key in load_task_defaults(task, model)
            if not is_sft or SETTINGS[key].of is None
        }
        shown = " ".join(f"{flag_of(key)} {value:g}" for key, value in its.items())
        said += f", by recipes/{recipe_name(task, model)}.yaml: {shown}"
    slow = warn_of_low_rate(config)
    return config, said + (slow and f"; --learning-rate {slow}")


def describe_data(config: Config) -> str:
    """What a run learns from, for its first line."""
    replies = f"replies: {config.data.path}; " if config.objective.loss_type == "sft" else ""
    return f"{replies}task: {config.data.task}"


def merge_settings(flags: dict[str, Any], recipe: dict[str, Any] | None) -> Config:
    """The checked settings: flag, else environment, else recipe, else default. recipe: None for that of the task."""
    asked = recipe or {}
    unasked = (
        load_task_defaults(flags.get("task", ""), flags.get("model") or "")
        if recipe is None
        else {}
    ) | read_environment()
    if (asked | flags).get("loss_type") == "sft":  # it goes without what it has no use for
        unasked = {name: value for name, value in unasked.items() if SETTINGS[name].of is None}
    config = check_settings(asked | unasked | flags, flags)
    its_rate = "learning_rate" in flags or (
        "learning_rate" in asked and asked.get("lora_rank") == 0
    )
    if (
        config.model.lora_rank == 0 and not its_rate
    ):  # the recipe's or the default is one for adapters
        return config.with_settings(
            learning_rate=1.0
            if config.optimizer.kind == "sgd"
            else config.optimizer.learning_rate / 10
        )
    return config


def warn_of_low_rate(config: Config) -> str:
    """What to say of a learning rate that is far below that of own data's recipe for the model, else ""."""
    rate, usual = (
        config.optimizer.learning_rate,
        load_task_defaults("own", config.model.name)["learning_rate"],
    )
    usual /= 1 if config.model.lora_rank else 10
    name = recipe_name("own", config.model.name)
    return (
        f"{rate:g} is low for this model: recipes/{name}.yaml has {usual:g}"
        if 0 < LOW * rate < usual
        else ""
    )


def read_environment() -> dict[str, int]:
    """The judge's chunk size if `RUBRIC_JUDGE_BATCH_SIZE` is set; empty means unset. Raises ValueError if invalid."""
    text = os.environ.get("RUBRIC_JUDGE_BATCH_SIZE", "")
    if text and not re.fullmatch("[1-9][0-9]{0,8}", text):
        raise ValueError(
            f"RUBRIC_JUDGE_BATCH_SIZE={text!r:.60}: it must be a whole number from 1 to 999999999"
        )
    return {"judge_chunk_size": int(text)} if text else {}


def recipe_name(task: str, model: str) -> str:
    """The name of a task's recipe. For own data it is by the size in the model's name: 135M, 0.6B."""
    kind = task.partition(":")[0]
    name = Path(model.replace("smollm2", "135m")).name.lower()
    size = re.search(r"(?<![\w.])(\d+(?:\.\d+)?)([mb])(?![a-z0-9])", name)
    is_small = size is not None and float(size[1]) * {"m": 1e6, "b": 1e9}[size[2]] < SMALL
    return RECIPES.get((model, kind), "own-small" if kind == "own" and is_small else kind)


def load_task_defaults(task: str, model: str) -> dict[str, Any]:
    """
    The task's defaults from `recipes/`: for rg:NAME, calculator and guess those of their bundled model, and none for
    another model; for own data with a bundled model those of the model's own task.
    """
    paths = {path.stem: path for path in (Path(__file__).parents[1] / "recipes").glob("*.yaml")}
    recipe = load_recipe(paths[name]) if (name := recipe_name(task, model)) in paths else {}
    if model and recipe.get("model") in OWN_TASK and recipe["model"] != model:
        return {}
    is_own = task.partition(":")[0] == "own"
    return {
        key: recipe[key]
        for key in recipe
        if not is_own or key not in ("model", "task", "task_config")
    }


def load_recipe(path: Path) -> dict[str, Any]:
    """
    The settings in a YAML file; of a run, with the new places of files that moved.

    Raises ValueError naming an unknown key and the nearest known one.
    """
    settings = load_yaml(path, f"--config {path}")
    if not isinstance(settings, dict):
        raise ValueError(f"--config {path} holds no settings; it needs lines like `batch: 8`")
    settings = {
        key: value for key, value in settings.items() if key not in GONE or value != GONE[key]
    }
    refuse_unknown(settings, f"--config {path}: ")
    tell_kept_escapes(path, settings.get("stop"))
    settings = make_paths_absolute(settings, path.parent)
    return relocate_settings(settings, path.parent) if path.name == "config.yaml" else settings


def tell_kept_escapes(path: Path, stop: Any) -> None:
    """Says of stop texts in YAML what 'quotes' do to an escape there: a backslash and an n stay two characters."""
    for text in stop if isinstance(stop, list) else [stop]:
        if isinstance(text, str) and (escape := re.search(r"\\[nt]", text)):
            fix = f'in "double quotes" {escape[0]} is the character'
            print(
                escape_invisible(
                    f"{path}: stop {text:.60} holds a backslash and {escape[0][1]}; {fix}"
                ),
                file=sys.stderr,
            )


def refuse_unknown(settings: Iterable[Any], where: str = "") -> None:
    """Raises ValueError naming every setting that does not exist, and what it is here."""

    def said_of(key: str) -> str:
        own = (
            f"it is a flag of the command, {flag_of(key)}, and no setting" if key in COMMAND else ""
        )
        return (
            own
            or suggest_name(key, [*SETTINGS, *COMMAND], repr)
            or "train.py --help-all lists them"
        )

    unknown = {
        reprlib.repr(key): said_of(str(key)[:40])
        for key in settings
        if key not in [*SETTINGS, "eval_data"]
    }
    if len(unknown) > MANY and where:
        names = ", ".join(unknown)
        raise ValueError(
            f"{where}{len(unknown)} unknown settings, {names}; of TRL's --from-trl FILE makes ours"
        )
    if unknown:
        raise ValueError(
            where + ". ".join(f"unknown setting {key}; {said}" for key, said in unknown.items())
        )


def to_yaml(config: Config, sizes: Sizes | None = None) -> str:
    """Every setting as YAML, with the sizes once they are decided."""
    flat = config.to_flags(sizes).items()
    written = {
        key: "auto" if SETTINGS[key].is_automatic and value is None else value
        for key, value in flat
    }
    return yaml.safe_dump(written, sort_keys=False)


def command_line(settings: Mapping[str, Any], program: str = "train.py") -> str:
    """`uv run` with the extras that these settings need, and the program; outside the checkout with its place."""
    task, model = settings.get("task") or "", str(settings.get("model", ""))
    needed = {"smollm": model == "smollm2", "gguf": model.endswith(".gguf")}
    needed |= {"tasks": task.startswith("rg:"), "ifeval": task == "ifeval"}
    extras = [
        *(name for name, is_needed in needed.items() if is_needed),
        *settings.get("report_to", ()),
    ]
    home = Path(__file__).parents[1]
    if not Path(program).is_file() and (home / "pyproject.toml").is_file():
        program = f"--project {shlex.quote(str(home))} {shlex.quote(str(home / program))}"
    return " ".join(["uv run", *(f"--extra {name}" for name in extras), program])
