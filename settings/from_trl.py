"""
Converts a TRL YAML file, or a script with a TRL trainer, to a recipe for Gwen.

The YAML file must be for `trl grpo` or `trl sft`. The script must use GRPOTrainer or SFTTrainer; it
is parsed but never run. data/trl.yaml maps TRL names to Gwen's settings. For a single TRL flag,
text/foreign_names.py tells the user what to use instead.
"""

import ast
import math
import re
import shlex
from collections import ChainMap, Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from config import SETTINGS
from settings.checks import check_settings
from settings.sources import command_prefix_with_extras, low_learning_rate_warning
from text.documents import load_yaml, read_text
from text.foreign_names import load_foreign_names

# Calls in a TRL script whose arguments are settings, with the names of the positional arguments.
CALLS = {
    "LoraConfig": (),
    "get_peft_model": ("model", "peft_config"),
    "GRPOConfig": ("output_dir",),
    "GRPOTrainer": ("model", "reward_funcs", "args", "train_dataset"),
}
SFT_CALLS = {
    "SFTTrainer": ("model", "args"),
    "SFTConfig": ("output_dir",),
    "TrainingArguments": ("output_dir",),
}
DATA_CALLS = {
    "load_dataset": ("path", "name"),
    "from_json": ("data_files",),
    "from_csv": ("data_files",),
    "from_parquet": ("data_files",),
}
DATA_CHANGES = ("map", "filter", "train_test_split")  # methods that change a data set
SFT_LOSSES = "nll", "dft", "chunked_nll"
# A TRL recipe with one of these names is complete, so it trains adapters only if it mentions them.
COMPLETE = {"model_name_or_path", "reward_funcs", "train_dataset"}
UNKNOWN = ("missing", "neither TRL nor Gwen has a setting of this name")


class UnevaluatedExpression(str):
    """The source code of an expression whose value would be known only if the script were run."""


class GwenEquivalent(NamedTuple):
    """The setting of Gwen that corresponds to a TRL name."""

    key: str  # the name of the setting; "" if there is no such setting
    fixed_value: str  # the value of the setting; "" if it equals the value of the TRL name
    is_sufficient: bool  # whether the user needs no advice besides the key and the value


def convert_trl_file(path: str) -> str:
    """
    Convert a TRL file to a recipe, and return the recipe as YAML.

    Comments in the YAML list the settings that have no equivalent.

    Raises ValueError if the file cannot be read or contains no TRL settings.
    """
    recipe = _read_trl_settings(path)
    derived = derive_combined_settings(recipe, path)
    table = ChainMap(*load_foreign_names().values())
    settings = dict(derived)
    comments: list[str] = []
    not_needed: list[str] = []
    run_names: dict[str, str] = {}

    for name, value in recipe.items():
        kind, advice = table.get(f"{name} {value}".lower()) or table.get(str(name), UNKNOWN)
        key, fixed_value, is_sufficient = find_gwen_equivalent(str(name), kind, advice)
        is_derived = key in derived
        if name == "reward_funcs":
            # only reward functions without a file still need a comment
            all_names = list_reward_names(recipe)
            value = [reward for reward in all_names if not find_reward_function(path, reward)]
            is_derived = is_derived and not value
        if is_derived:
            continue
        if kind == "not needed":
            not_needed.append(str(name))
            continue
        if key == "run_dir" and type(value) is str:
            run_names[name] = Path(value).name
            continue
        if key in SETTINGS and is_sufficient:
            if isinstance(value, UnevaluatedExpression):
                kind = "computed"
                advice = f"add a line `{key}: VALUE` with the value of this expression"
            else:
                try:
                    checked = check_settings({key: fixed_value or value}).to_flags()
                    settings.setdefault(key, checked[key])
                    continue
                except ValueError as error:
                    kind = "refused"
                    advice = str(error)
        comment = f"# {name}: {value!r:.80} -> {kind}"
        comments.append(f"{comment}: {advice}" if advice else comment)

    comments += _explain_differences(recipe, settings, path)
    if not_needed:
        names = ", ".join(not_needed)
        comments.append(f"# Gwen does not need these TRL settings: {names}")
    run_name = run_names.get("run_name") or run_names.get("output_dir")
    if run_name:
        run_dir = shlex.quote(f"runs/{run_name}")
        comments.insert(
            0, f"# {command_prefix_with_extras(settings)} --config THIS --run-dir {run_dir}"
        )
    return "\n".join([*comments, yaml.safe_dump(settings, sort_keys=False)])


def _read_trl_settings(path: str) -> dict[str, Any]:
    """Return the TRL names and values in a file. Raises ValueError if the file has none."""
    prefix = f"--from-trl {path}"
    is_script = Path(path).suffix == ".py"
    settings = dict(read_script_settings(path, prefix)) if is_script else load_yaml(path, prefix)
    data_only = {"datasets", *(f".{method}" for method in DATA_CHANGES)}
    if not isinstance(settings, dict) or not settings.keys() - data_only:
        raise ValueError(
            f"{prefix} contains no TRL settings; "
            "give a YAML file for `trl grpo` or `trl sft`, or a script with a TRL trainer"
        )
    return settings


def _explain_differences(
    recipe: dict[str, Any], settings: dict[str, Any], path: str
) -> Iterator[str]:
    """Yield YAML comments on differences between the converted recipe and the TRL file."""
    is_script = Path(path).suffix == ".py"
    reward_files = [reward.rpartition(":")[0] for reward in settings.get("reward", ())]
    if any(Path(file) == Path(path) for file in reward_files):
        yield (
            "# reward: the reward functions are in the training script itself, and importing them "
            "would run the script; move the functions into a separate file"
        )
    if settings.get("lora_rank") == 0 and "use_peft" not in recipe:
        yield (
            "# lora_rank: 0 trains all weights, as TRL does without LoraConfig; "
            "remove this line to train adapters"
        )
    if "target_kl" not in settings and settings.get("loss_type") != "sft":
        yield (
            "# target_kl: TRL does not limit the KL divergence of a step; "
            "add `target_kl: 0` to remove Gwen's limit"
        )

    is_surely_grpo = recipe.keys() & {"reward_funcs", "num_generations"}
    if not is_script and not is_surely_grpo and "loss_type" not in settings:
        yield (
            "# reward_funcs: the file names no reward function; if the file is for `trl sft`, "
            "add `loss_type: sft`, and `batch: N` with the number of prompts per step"
        )
    if "learning_rate" not in recipe:
        yield (
            "# learning_rate: the file gives no learning rate; TRL's default is 1e-6 for GRPO and "
            "2e-5 for SFT, and Gwen's default is in the recipe of the task"
        )
    elif "learning_rate" in settings:
        warning = low_learning_rate_warning(check_settings(settings))
        if warning:
            yield f"# learning_rate: {warning}"


def find_gwen_equivalent(trl_name: str, kind: str, advice: str) -> GwenEquivalent:
    """
    Return the setting of Gwen for a TRL name.

    kind, advice: the row of the TRL name in data/trl.yaml.
    """
    if kind == "same":
        return GwenEquivalent(trl_name, "", True)
    flag = re.match("`--([a-z-]+)(?: ([a-z0-9]+)`)?", advice)
    if kind == "renamed" and flag:
        key = flag[1].replace("-", "_")
        converts_value = re.search("[:*/@]", advice) is not None
        return GwenEquivalent(key, flag[2] or "", not converts_value)
    return GwenEquivalent("", "", False)


# ---- settings that are computed from several TRL settings


def derive_combined_settings(recipe: dict[str, Any], path: str) -> dict[str, Any]:
    """
    Return the settings of Gwen that are computed from several TRL settings.

    A setting is left out if it depends on a TRL setting whose value a script computes.

    recipe: the TRL names and values in the file at `path`.
    """
    settings = _derive_loss_and_batch(recipe)
    settings |= _derive_lora_rank_and_scale(recipe, path)

    template = recipe.get("chat_template_kwargs")
    if isinstance(template, dict) and template.keys() == {"enable_thinking"}:
        settings["thinking"] = template["enable_thinking"]

    settings |= _derive_data(recipe, path)

    warmup = recipe.get("warmup_steps") or recipe.get("warmup_ratio")
    steps = recipe.get("max_steps")
    if type(warmup) is float and warmup < 1 and type(steps) is int and steps > 0:
        settings["warmup_steps"] = math.ceil(warmup * steps)
    return settings | _derive_rewards(recipe, path)


def _derive_loss_and_batch(recipe: dict[str, Any]) -> dict[str, Any]:
    """Return `batch` (prompts per step) and, for an SFT recipe, `loss_type`."""
    settings: dict[str, Any] = {}
    group_size = recipe.get("num_generations", 8)
    is_sft_recipe = (
        recipe.get("loss_type") in SFT_LOSSES or recipe.keys() & load_foreign_names()["SFTConfig"]
    )
    if "reward_funcs" not in recipe and is_sft_recipe:
        group_size = 1
        settings["loss_type"] = "sft"

    factors = [recipe.get("generation_batch_size")]
    if not factors[0]:
        accumulated = recipe.get("gradient_accumulation_steps")
        steps = recipe.get("steps_per_generation") or accumulated or 1
        factors = [recipe.get("per_device_train_batch_size"), steps]
    if all(type(value) is int and value > 0 for value in (*factors, group_size)):
        num_rows = math.prod(factors)  # type: ignore[arg-type]
        settings["batch"] = max(num_rows // group_size, 1)
    return settings


def _derive_lora_rank_and_scale(recipe: dict[str, Any], path: str) -> dict[str, Any]:
    """
    Return `lora_rank` and `lora_scale`, if the TRL file determines them.

    If the file is a complete recipe without adapters, the rank is 0. A recipe counts as complete if
    it names a model, rewards or training data.
    """
    asks_for_adapters = recipe.keys() & load_foreign_names()["LoraConfig"]
    if recipe.get("use_peft") is False:
        asks_for_adapters = set()
    has_adapters = asks_for_adapters or recipe.get("peft_config") or recipe.get("use_peft")
    settings: dict[str, Any] = {}
    if recipe.keys() & COMPLETE and not has_adapters:
        settings["lora_rank"] = 0

    is_script = Path(path).suffix == ".py"
    # a script uses the defaults of PEFT, and a YAML file those of `trl grpo`
    default_alpha, default_rank = (8, 8) if is_script else (32, 16)
    alpha = recipe.get("lora_alpha", default_alpha)
    rank = recipe.get("r", recipe.get("lora_r", default_rank))
    are_numbers = all(type(value) in (int, float) and value > 0 for value in (alpha, rank))
    if asks_for_adapters and are_numbers:
        settings["lora_rank"] = rank
        settings["lora_scale"] = alpha / rank ** (0.5 if recipe.get("use_rslora") else 1)
    return settings


def _derive_data(recipe: dict[str, Any], path: str) -> dict[str, Any]:
    sets = recipe.get("datasets")
    names = [recipe.get(f"dataset_{part}") for part in ("name", "config", "train_split")]
    data = find_dataset_location(sets, names, path)
    if not data:
        return {}
    held_out = find_dataset_location(recipe.get("eval_dataset"), [], path)
    held_out = held_out or find_dataset_location(sets, [], path, "test")
    if held_out in ("", data):
        return {"data": data}
    return {"data": data, "eval_data": held_out}


def _derive_rewards(recipe: dict[str, Any], path: str) -> dict[str, Any]:
    """
    Return `reward` and `reward_weights`, if the TRL file determines them.

    `reward` lists the functions whose files exist, and `reward_weights` has weights by name.
    """
    settings: dict[str, Any] = {}
    names = list_reward_names(recipe)
    with_file = [name for name in names if find_reward_function(path, name)]
    if with_file:
        settings["reward"] = [find_reward_function(path, name) for name in with_file]

    weights = recipe.get("reward_weights")
    if names and isinstance(weights, list) and len(weights) == len(names):
        settings["reward_weights"] = {}
        for name, weight in zip(names, weights, strict=True):
            if name in (with_file or names):
                function = name.rpartition(".")[2]
                settings["reward_weights"][function] = weight
    return settings


def find_dataset_location(
    trl_datasets: Any, name_config_split: list[Any], recipe_path: str, side: str = "train"
) -> str:
    """
    Return the path of a data file, or a hub data set as NAME:CONFIGURATION:SPLIT.

    Returns "" unless exactly one location is named.

    trl_datasets: the value of `datasets` in a TRL recipe.
    name_config_split: the name, configuration and split of a data set, which are used if
        `trl_datasets` names none.
    recipe_path: the TRL recipe; data files are looked up in its directory first.
    side: "train" or "test"; chooses a file if there are several data files.
    """
    names = name_config_split
    is_single = isinstance(trl_datasets, list) and len(trl_datasets) == 1
    if is_single and isinstance(trl_datasets[0], dict):
        dataset = trl_datasets[0]
        names = [dataset.get(part) for part in ("path", "name", "split")]
        files = dataset.get("data_files")
        if files:  # In this case `path` is only a file format, and `split` is not needed.
            names = _choose_data_files(files, side)
    texts = [name for name in names if name]
    if not names or not names[0] or any(type(text) is not str for text in texts):
        return ""
    for file in (Path(recipe_path).parent / names[0], Path(names[0])):
        if file.is_file():
            return str(file)
    return ":".join(texts)


def _choose_data_files(files: Any, side: str) -> list[Any]:
    """Return the data files for "train" or "test". A single file serves for both."""
    if not isinstance(files, dict):
        return [files]
    chosen = []
    for key, file in files.items():
        if len(files) == 1 or (key == "train") is (side == "train"):
            chosen.append(file)
    return chosen


def list_reward_names(recipe: dict[str, Any]) -> list[str]:
    """List the names of the reward functions in a TRL recipe."""
    rewards = recipe.get("reward_funcs") or []
    if not isinstance(rewards, list):
        rewards = [rewards]
    return [str(reward) for reward in rewards]


def find_reward_function(recipe_path: str, dotted_name: str) -> str:
    """
    Return FILE.py:function for a reward function such as `rewards.correct`.

    Returns "" if the directory of the recipe does not contain the file.
    """
    module, _, function = dotted_name.rpartition(".")
    relative = module.replace(".", "/")
    file = Path(recipe_path).parent / f"{relative}.py"
    return f"{file}:{function}" if file.is_file() and function.isidentifier() else ""


# ---- scripts


def read_script_settings(path: str, error_prefix: str) -> Iterator[tuple[str, Any]]:
    """
    Yield the TRL names and values in a script, from calls and from assignments to attributes.

    A value that the script computes is an UnevaluatedExpression. Reward functions are lists of
    dotted names. The values of `datasets` and `eval_dataset` are the arguments of the calls that
    load them.

    Raises ValueError if the file is not Python. The error message begins with `error_prefix`.
    """
    try:
        tree = ast.parse(read_text(path, error_prefix, 1))
    except (SyntaxError, RecursionError) as error:
        raise ValueError(f"{error_prefix} is not valid Python: {error}") from error
    nodes = list(ast.walk(tree))
    constants = read_constants(tree)
    dotted_names = _find_dotted_names(tree, Path(path).stem)
    held_out_nodes = _find_held_out_nodes(nodes)
    calls = _list_named_calls(tree, nodes)
    called_names = {name for name, _ in calls}
    is_grpo = "GRPOTrainer" in called_names

    setting_calls = dict(CALLS)
    if {"SFTConfig", "SFTTrainer"} & called_names and not is_grpo:
        setting_calls |= SFT_CALLS
        yield "loss_type", "nll"
    positional = setting_calls | DATA_CALLS
    loads: dict[str, list[dict[str | None, Any]]] = {}

    for name, call in calls:
        is_held_out = call in held_out_nodes
        if is_held_out and name not in DATA_CALLS:
            continue
        arguments: list[tuple[str | None, ast.expr]] = [
            *zip(positional.get(name, ()), call.args, strict=False),
            *((keyword.arg, keyword.value) for keyword in call.keywords),
        ]
        if name in DATA_CALLS:
            load = {key: evaluate_or_quote(value, constants) for key, value in arguments}
            side_loads = loads.setdefault("eval_dataset" if is_held_out else "datasets", [])
            if load not in side_loads:
                side_loads.append(load)
        elif name in DATA_CHANGES and isinstance(call.func, ast.Attribute):
            yield f".{name}", UnevaluatedExpression(ast.unparse(call))
        elif name in SFT_CALLS and is_grpo:
            yield name, UnevaluatedExpression(ast.unparse(call))
        if name in setting_calls:
            for key, value in arguments:
                yield from _read_call_argument(key, value, constants, dotted_names)
    yield from loads.items()
    yield from _read_setting_assignments(nodes, constants)


def _find_dotted_names(tree: ast.Module, module: str) -> dict[str, str]:
    """Map each name that a script defines or imports to a dotted name such as `rewards.correct`."""
    names = []
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            names.append(node.name)
        elif isinstance(node, ast.Assign):
            names += [ast.unparse(target) for target in node.targets]
    dotted_names = {name: f"{module}.{name}" for name in names}
    for node in tree.body:
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                dotted_names[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    return dotted_names


def _find_held_out_nodes(nodes: list[ast.AST]) -> set[ast.AST]:
    """Find the syntax nodes of a script that are used only for the value of `eval_dataset`."""
    keywords = [node for node in nodes if isinstance(node, ast.keyword)]
    outer = [node.value for node in keywords if node.arg == "eval_dataset"]
    train = {ast.unparse(node.value) for node in keywords if node.arg == "train_dataset"}
    variables = {ast.unparse(value) for value in outer} - train
    for node in nodes:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) in variables:
            outer.append(node.value)
    return {inner for value in outer for inner in ast.walk(value)}


def _list_named_calls(tree: ast.Module, nodes: list[ast.AST]) -> list[tuple[str, ast.Call]]:
    """
    List the calls in a script, each with the name of the called function or class.

    A class that the script defines is replaced by its first base class.
    """
    bases = {}
    for statement in tree.body:
        if isinstance(statement, ast.ClassDef) and statement.bases:
            bases[statement.name] = ast.unparse(statement.bases[0]).rpartition(".")[2]
    calls: list[tuple[str, ast.Call]] = []
    for node in nodes:
        if isinstance(node, ast.Call):
            name = getattr(node.func, "id", getattr(node.func, "attr", ""))
            calls.append((bases.get(name, name), node))
    return calls


def _read_call_argument(
    key: str | None, value: ast.expr, constants: dict[str, Any], dotted_names: dict[str, str]
) -> Iterator[tuple[str, Any]]:
    """Yield the name and value of an argument. `**values` yields the items of the dictionary."""
    literal = evaluate_or_quote(value, constants)
    if key == "reward_funcs":
        rewards = value.elts if isinstance(value, ast.List) else [value]
        names = [ast.unparse(reward) for reward in rewards]
        yield key, [dotted_names.get(name, name) for name in names]
    elif key is None and isinstance(literal, dict):
        yield from literal.items()
    else:
        yield key or "**", literal


def _read_setting_assignments(
    nodes: list[ast.AST], constants: dict[str, Any]
) -> Iterator[tuple[str, Any]]:
    """Yield the settings that a script assigns to attributes, as in `args.max_steps = 7`."""
    table = load_foreign_names()
    settings = table["GRPOConfig"] | table["TrainingArguments"]
    for node in nodes:
        match node:
            case ast.Assign([ast.Attribute(ast.Name(owner), setting)], value) if (
                owner != "self" and setting in settings
            ):
                yield setting, evaluate_or_quote(value, constants)


def read_constants(tree: ast.Module) -> dict[str, Any]:
    """Return the value of each name that a script assigns only once, at the top level."""
    num_assigned: Counter[str] = Counter()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            num_assigned[node.id] += 1
        elif isinstance(node, ast.arg):
            num_assigned[node.arg] += 1

    constants: dict[str, Any] = {}
    for node in tree.body:
        match node:
            case ast.Assign([ast.Name(name)], value) | ast.AnnAssign(
                ast.Name(name), _, ast.expr() as value
            ):
                if num_assigned[name] == 1:
                    constants[name] = evaluate_or_quote(value, constants)
    return constants


def evaluate_or_quote(node: ast.expr, constants: dict[str, Any]) -> Any:
    """
    Return the value of an expression that is a literal or the name of a constant.

    Returns an UnevaluatedExpression for any other expression.
    """
    text = ast.unparse(node)
    try:
        return constants[text] if text in constants else ast.literal_eval(node)
    except (ValueError, TypeError):  # TypeError: a dictionary in the script has a list as a key
        return UnevaluatedExpression(text)
