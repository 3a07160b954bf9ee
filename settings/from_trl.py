"""
Converts a TRL YAML file (for `trl grpo` or `trl sft`) or a script with GRPOTrainer or SFTTrainer.

data/trl.yaml maps each TRL name to ours. The script is parsed but never run. This file does not
cover single unknown flags (text/foreign_names.py).
"""

import ast
import math
import re
import shlex
from collections import ChainMap, Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from config import SETTINGS
from settings.checks import check_settings
from settings.sources import command_line, warn_of_low_rate
from text.documents import load_yaml, read_text
from text.foreign_names import load_foreign_names

# The calls whose arguments are settings, with the names of their positional arguments.
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
DATA_CHANGES = ("map", "filter", "train_test_split")  # methods of a data set
SFT_LOSSES = "nll", "dft", "chunked_nll"
# A recipe with one of these names is complete: if it used adapters, it would name them.
COMPLETE = {"model_name_or_path", "reward_funcs", "train_dataset"}
UNKNOWN = ("missing", "neither TRL nor Gwen knows it")


class Computed(str):
    """The source text of a value that is known only by running the script."""


def convert_recipe(path: str) -> str:
    """
    Return our YAML for a TRL file, with comments on settings that have no equivalent.

    Raises ValueError if the file cannot be read or holds no TRL settings.
    """
    recipe = _read_settings(path)
    derived = derive_settings(recipe, path)
    table = ChainMap(*load_foreign_names().values())
    settings = dict(derived)
    comments: list[str] = []
    not_needed: list[str] = []
    run_names: dict[str, str] = {}

    for name, value in recipe.items():
        kind, advice = table.get(f"{name} {value}".lower()) or table.get(str(name), UNKNOWN)
        key, word, is_only_setting = find_equivalent(str(name), kind, advice)
        is_derived = key in derived
        if name == "reward_funcs":
            value = [
                reward for reward in list_reward_names(recipe) if not find_reward_spec(path, reward)
            ]
            is_derived = is_derived and not value
        if is_derived:
            continue
        if kind == "not needed":
            not_needed.append(str(name))
            continue
        if key == "run_dir" and type(value) is str:
            run_names[name] = Path(value).name
            continue
        if key in SETTINGS and is_only_setting:
            if isinstance(value, Computed):
                kind = "computed"
                advice = f"write its value as `{key}: VALUE`"
            else:
                try:
                    checked = check_settings({key: word or value}).to_flags()
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
        comments.append(f"# not needed here: {names}")
    run_name = run_names.get("run_name") or run_names.get("output_dir")
    if run_name:
        run_dir = shlex.quote(f"runs/{run_name}")
        comments.insert(0, f"# {command_line(settings)} --config THIS --run-dir {run_dir}")
    return "\n".join([*comments, yaml.safe_dump(settings, sort_keys=False)])


def _read_settings(path: str) -> dict[str, Any]:
    """The TRL names and values in a file. Raises ValueError if there are none."""
    prefix = f"--from-trl {path}"
    is_script = Path(path).suffix == ".py"
    settings = dict(read_script(path, prefix)) if is_script else load_yaml(path, prefix)
    data_only = {"datasets", *(f".{method}" for method in DATA_CHANGES)}
    if not isinstance(settings, dict) or not settings.keys() - data_only:
        raise ValueError(
            f"{prefix} holds no settings of TRL; "
            "give a YAML of `trl grpo` or `trl sft`, or a script"
        )
    return settings


def _explain_differences(
    recipe: dict[str, Any], settings: dict[str, Any], path: str
) -> Iterator[str]:
    """Comments on what the converted recipe does differently from TRL or cannot know."""
    is_script = Path(path).suffix == ".py"
    reward_files = [reward.rpartition(":")[0] for reward in settings.get("reward", ())]
    if any(Path(file) == Path(path) for file in reward_files):
        yield (
            "# reward: a run would run this script and its imports; "
            "move the functions into a file of their own"
        )
    if settings.get("lora_rank") == 0 and "use_peft" not in recipe:
        yield (
            "# lora_rank: 0 trains all weights, as TRL does without LoraConfig; "
            "without this line adapters are trained"
        )
    if "target_kl" not in settings and settings.get("loss_type") != "sft":
        yield "# target_kl: TRL's steps have no bound; with `target_kl: 0` ours have none either"

    is_surely_grpo = recipe.keys() & {"reward_funcs", "num_generations"}
    if not is_script and not is_surely_grpo and "loss_type" not in settings:
        yield (
            "# reward_funcs: none is named; if this is a recipe of `trl sft`, "
            "add `loss_type: sft` and the whole batch"
        )
    if "learning_rate" not in recipe:
        yield ("# learning_rate: none is given: TRL's is 1e-6, for SFT 2e-5; ours is the recipe's")
    elif "learning_rate" in settings:
        warning = warn_of_low_rate(check_settings(settings))
        if warning:
            yield f"# learning_rate: {warning}"


def find_equivalent(name: str, kind: str, advice: str) -> tuple[str, str, bool]:
    """
    Return our setting's key for a TRL name, a fixed value, and whether the key alone suffices.

    The key is "" if there is no such setting, and the value is "" if TRL's value is used. The key
    alone does not suffice if the advice converts the value or names a condition.
    """
    if kind == "same":
        return name, "", True
    flag = re.match("`--([a-z-]+)(?: ([a-z0-9]+)`)?", advice)
    if kind == "renamed" and flag:
        key = flag[1].replace("-", "_")
        return key, flag[2] or "", not re.search("[:*/@]", advice)
    return "", "", False


# ---- settings that follow from several TRL settings


def derive_settings(recipe: dict[str, Any], path: str) -> dict[str, Any]:
    """Our settings that follow from several TRL settings, unless a script computes these."""
    settings = _derive_batch(recipe)
    settings |= _derive_adapter(recipe, path)

    template = recipe.get("chat_template_kwargs")
    if isinstance(template, dict) and template.keys() == {"enable_thinking"}:
        settings["thinking"] = template["enable_thinking"]

    settings |= _derive_data(recipe, path)

    warmup = recipe.get("warmup_steps") or recipe.get("warmup_ratio")
    steps = recipe.get("max_steps")
    if type(warmup) is float and warmup < 1 and type(steps) is int and steps > 0:
        settings["warmup_steps"] = math.ceil(warmup * steps)
    return settings | _derive_rewards(recipe, path)


def _derive_batch(recipe: dict[str, Any]) -> dict[str, Any]:
    """The loss, if the recipe is for SFT, and the number of prompts in a step."""
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


def _derive_adapter(recipe: dict[str, Any], path: str) -> dict[str, Any]:
    """The rank and scale of adapters; rank 0 if a complete recipe has no adapters."""
    asks_for_adapters = recipe.keys() & load_foreign_names()["LoraConfig"]
    if recipe.get("use_peft") is False:
        asks_for_adapters = set()
    has_adapters = asks_for_adapters or recipe.get("peft_config") or recipe.get("use_peft")
    settings: dict[str, Any] = {}
    if recipe.keys() & COMPLETE and not has_adapters:
        settings["lora_rank"] = 0

    is_script = Path(path).suffix == ".py"
    default_alpha, default_rank = (
        (8, 8) if is_script else (32, 16)
    )  # the defaults in PEFT and in `trl grpo`
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
    data = dataset_location(sets, names, path)
    if not data:
        return {}
    held_out = dataset_location(recipe.get("eval_dataset"), [], path)
    held_out = held_out or dataset_location(sets, [], path, "test")
    if held_out in ("", data):
        return {"data": data}
    return {"data": data, "eval_data": held_out}


def _derive_rewards(recipe: dict[str, Any], path: str) -> dict[str, Any]:
    """The rewards whose files are in the recipe's directory, and the reward weights by name."""
    settings: dict[str, Any] = {}
    names = list_reward_names(recipe)
    with_file = [name for name in names if find_reward_spec(path, name)]
    if with_file:
        settings["reward"] = [find_reward_spec(path, name) for name in with_file]

    weights = recipe.get("reward_weights")
    if names and isinstance(weights, list) and len(weights) == len(names):
        settings["reward_weights"] = {}
        for name, weight in zip(names, weights, strict=True):
            if name in (with_file or names):
                function = name.rpartition(".")[2]
                settings["reward_weights"][function] = weight
    return settings


def dataset_location(sets: Any, names: list[Any], path: str, side: str = "train") -> str:
    """
    The file or hub data set that TRL's `datasets` names, or else a name, configuration and split.

    side: "train" or "test", which chooses among several data files. Returns "" unless exactly one
    location is named.
    """
    if isinstance(sets, list) and len(sets) == 1 and isinstance(sets[0], dict):
        names = [sets[0].get(part) for part in ("path", "name", "split")]
        files = sets[0].get("data_files")
        if files:  # then `path` names only a reader, which follows from the file, as does the split
            names = _choose_files(files, side)
    texts = [name for name in names if name]
    if not names or not names[0] or any(type(text) is not str for text in texts):
        return ""
    for file in (Path(path).parent / names[0], Path(names[0])):
        if file.is_file():
            return str(file)
    return ":".join(texts)


def _choose_files(files: Any, side: str) -> list[Any]:
    """The data files of one side. A single file counts for either side."""
    if not isinstance(files, dict):
        return [files]
    chosen = []
    for key, file in files.items():
        if len(files) == 1 or (key == "train") is (side == "train"):
            chosen.append(file)
    return chosen


def list_reward_names(recipe: dict[str, Any]) -> list[str]:
    """The names of the rewards in a TRL recipe."""
    rewards = recipe.get("reward_funcs") or []
    if not isinstance(rewards, list):
        rewards = [rewards]
    return [str(reward) for reward in rewards]


def find_reward_spec(path: str, name: str) -> str:
    """FILE.py:function for a reward's dotted name; "" if `path`'s directory lacks the module."""
    module, _, function = name.rpartition(".")
    relative = module.replace(".", "/")
    file = Path(path).parent / f"{relative}.py"
    return f"{file}:{function}" if file.is_file() and function.isidentifier() else ""


# ---- scripts


def read_script(path: str, prefix: str) -> Iterator[tuple[str, Any]]:
    """
    Read the names and values in a script's calls, then those assigned to `args.max_steps` etc.

    The value is the source text if it is computed, the dotted name if it is a reward, and the calls
    that load it if it is an eval_dataset.

    Raises ValueError if the file is not Python.
    """
    try:
        tree = ast.parse(read_text(path, prefix, 1))
    except (SyntaxError, RecursionError) as error:
        raise ValueError(f"{prefix} is not Python: {error}") from error
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
            load = {key: evaluate_literal(value, constants) for key, value in arguments}
            side_loads = loads.setdefault("eval_dataset" if is_held_out else "datasets", [])
            if load not in side_loads:
                side_loads.append(load)
        elif name in DATA_CHANGES and isinstance(call.func, ast.Attribute):
            yield f".{name}", Computed(ast.unparse(call))
        elif name in SFT_CALLS and is_grpo:
            yield name, Computed(ast.unparse(call))
        if name in setting_calls:
            for key, value in arguments:
                yield from _read_argument(key, value, constants, dotted_names)
    yield from loads.items()
    yield from _read_assignments(nodes, constants)


def _find_dotted_names(tree: ast.Module, module: str) -> dict[str, str]:
    """The dotted name, such as `rewards.correct`, of each name that a script defines or imports."""
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
    """The nodes that are used only to make an eval_dataset."""
    keywords = [node for node in nodes if isinstance(node, ast.keyword)]
    outer = [node.value for node in keywords if node.arg == "eval_dataset"]
    train = {ast.unparse(node.value) for node in keywords if node.arg == "train_dataset"}
    variables = {ast.unparse(value) for value in outer} - train
    for node in nodes:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) in variables:
            outer.append(node.value)
    return {inner for value in outer for inner in ast.walk(value)}


def _list_named_calls(tree: ast.Module, nodes: list[ast.AST]) -> list[tuple[str, ast.Call]]:
    """Each call with its function's name; for a class of the script, the name of its first base."""
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


def _read_argument(
    key: str | None, value: ast.expr, constants: dict[str, Any], dotted_names: dict[str, str]
) -> Iterator[tuple[str, Any]]:
    """The name and value of one argument, or for `**values` those in the dictionary."""
    literal = evaluate_literal(value, constants)
    if key == "reward_funcs":
        rewards = value.elts if isinstance(value, ast.List) else [value]
        names = [ast.unparse(reward) for reward in rewards]
        yield key, [dotted_names.get(name, name) for name in names]
    elif key is None and isinstance(literal, dict):
        yield from literal.items()
    else:
        yield key or "**", literal


def _read_assignments(nodes: list[ast.AST], constants: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """The settings that a script assigns to an object, as in `args.max_steps = 7`."""
    table = load_foreign_names()
    settings = table["GRPOConfig"] | table["TrainingArguments"]
    for node in nodes:
        match node:
            case ast.Assign([ast.Attribute(ast.Name(owner), setting)], value) if (
                owner != "self" and setting in settings
            ):
                yield setting, evaluate_literal(value, constants)


def read_constants(tree: ast.Module) -> dict[str, Any]:
    """The values of those names that a script assigns exactly once, at its top level."""
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
                    constants[name] = evaluate_literal(value, constants)
    return constants


def evaluate_literal(node: ast.expr, constants: dict[str, Any]) -> Any:
    """The value of an expression if it is a constant or a literal, otherwise its source text."""
    text = ast.unparse(node)
    try:
        return constants[text] if text in constants else ast.literal_eval(node)
    except (ValueError, TypeError):  # TypeError: a dictionary with a list for a key
        return Computed(text)
