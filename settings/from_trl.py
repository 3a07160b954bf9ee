"""
A recipe out of TRL's: the YAML of `trl grpo` or `trl sft`, or a script that calls GRPOTrainer or SFTTrainer.

data/trl.yaml says what each name is here. Nothing of the script is run.
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
from flags import load_foreign_names, load_yaml, read_text
from settings.checks import check_settings
from settings.sources import command_line, warn_of_low_rate

CALLS = {
    "LoraConfig": (),
    "get_peft_model": ("model", "peft_config"),
}  # names of the arguments without one
CALLS |= {
    "GRPOConfig": ("output_dir",),
    "GRPOTrainer": ("model", "reward_funcs", "args", "train_dataset"),
}
OF_SFT = {"SFTTrainer": ("model", "args")} | dict.fromkeys(
    ("SFTConfig", "TrainingArguments"), ("output_dir",)
)
LOADS = {"load_dataset": ("path", "name")} | dict.fromkeys(
    ("from_json", "from_csv", "from_parquet"), ("data_files",)
)
SFT_LOSSES = "nll", "dft", "chunked_nll"
WHOLE = {
    "model_name_or_path",
    "reward_funcs",
    "train_dataset",
}  # one of them is where adapters would be asked for


class Computed(str):
    """The words of a value that only running the script would give."""


def convert_recipe(path: str) -> str:
    """Our YAML of a file of TRL's; comments for the rest. ValueError for what cannot be read."""
    where = f"--from-trl {path}"
    theirs = (
        dict(read_script(path, where)) if Path(path).suffix == ".py" else load_yaml(path, where)
    )
    if not isinstance(theirs, dict) or not theirs.keys() - {
        "datasets",
        ".map",
        ".filter",
        ".train_test_split",
    }:
        raise ValueError(
            f"{where} holds no settings of TRL's; give a YAML of `trl grpo` or `trl sft`, or a script"
        )
    rows, made = ChainMap(*load_foreign_names().values()), derive_settings(theirs, path)
    ours, left, spared, run = dict(made), [], [], {}
    for name, value in theirs.items():
        unknown = "missing", "neither TRL nor Gwen knows it"
        kind, said = rows.get(f"{name} {value}".lower()) or rows.get(str(name), unknown)
        key, word, is_alone = rename_setting(str(name), kind, said)
        if name == "reward_funcs":
            value = [one for one in convert_rewards(theirs) if not find_reward_file(path, one)]
        if key in made and not (name == "reward_funcs" and value):
            continue
        if kind == "not needed":
            spared.append(str(name))
            continue
        if key == "run_dir" and type(value) is str:
            run[name] = Path(value).name
            continue
        if key in SETTINGS and is_alone and isinstance(value, Computed):
            kind, said = "computed", f"write its value as `{key}: VALUE`"
        elif key in SETTINGS and is_alone:
            try:
                ours.setdefault(key, check_settings({key: word or value}).to_flags()[key])
                continue
            except ValueError as error:
                kind, said = "refused", str(error)
        left.append(f"# {name}: {value!r:.80} -> {kind}{': ' if said else ''}{said}")
    if any(Path(one.rpartition(":")[0]) == Path(path) for one in ours.get("reward", ())):
        left.append(
            "# reward: a run would run this script and its imports; move the functions into a file of theirs"
        )
    if ours.get("lora_rank") == 0 and "use_peft" not in theirs:
        left.append(
            "# lora_rank: 0 trains all weights, as TRL without LoraConfig; without this line adapters are"
        )
    if "target_kl" not in ours and ours.get("loss_type") != "sft":
        left.append(
            "# target_kl: TRL's steps have no bound; with `target_kl: 0` ours have none either"
        )
    if Path(path).suffix != ".py" and not (
        theirs.keys() & {"reward_funcs", "num_generations"} or "loss_type" in ours
    ):
        left.append(
            "# reward_funcs: none is named; if this is of `trl sft`, add `loss_type: sft` and the whole batch"
        )
    none = "none is given: TRL's is 1e-6, of SFT 2e-5; ours is the recipe's" * (
        "learning_rate" not in theirs
    )
    if told := none or ("learning_rate" in ours and warn_of_low_rate(check_settings(ours))):
        left.append(f"# learning_rate: {told}")
    if spared:
        left.append(f"# not needed here: {', '.join(spared)}")
    if name := run.get("run_name") or run.get("output_dir"):
        left.insert(
            0, f"# {command_line(ours)} --config THIS --run-dir {shlex.quote(f'runs/{name}')}"
        )
    return "\n".join([*left, yaml.safe_dump(ours, sort_keys=False)])


def rename_setting(name: str, kind: str, said: str) -> tuple[str, str, bool]:
    """The setting that a name is here, "" for none; the word that is its value; whether it stands for it alone."""
    named = re.match("`--([a-z-]+)(?: ([a-z0-9]+)`)?", said)
    if kind == "renamed" and named:
        return named[1].replace("-", "_"), named[2] or "", not re.search("[:*/@]", said)
    return name if kind == "same" else "", "", kind == "same"


def derive_settings(theirs: dict[str, Any], path: str) -> dict[str, Any]:
    """What is here made of several of theirs; nothing of what a script computes."""
    ours: dict[str, Any] = {}
    steps = theirs.get("steps_per_generation") or theirs.get("gradient_accumulation_steps") or 1
    whole, part = (theirs.get(f"{of}_batch_size") for of in ("generation", "per_device_train"))
    batch: list[Any] = [whole] if whole else [part, steps]
    groups, known = theirs.get("num_generations", 8), load_foreign_names()
    if "reward_funcs" not in theirs and (
        theirs.get("loss_type") in SFT_LOSSES or theirs.keys() & known["SFTConfig"]
    ):
        groups, ours["loss_type"] = 1, "sft"
    if all(type(value) is int and value > 0 for value in (*batch, groups)):
        ours["batch"] = max(math.prod(batch) // groups, 1)
    alpha, rank = (8, 8) if Path(path).suffix == ".py" else (32, 16)  # of PEFT, and of `trl grpo`
    scale = [theirs.get("lora_alpha", alpha), theirs.get("r", theirs.get("lora_r", rank))]
    asks = theirs.keys() & known["LoraConfig"] if theirs.get("use_peft") is not False else ()
    if theirs.keys() & WHOLE and not (asks or theirs.get("peft_config") or theirs.get("use_peft")):
        ours["lora_rank"] = 0
    if asks and all(type(value) in (int, float) and value > 0 for value in scale):
        ours |= {
            "lora_rank": scale[1],
            "lora_scale": scale[0] / scale[1] ** (0.5 if theirs.get("use_rslora") else 1),
        }
    if isinstance(told := theirs.get("chat_template_kwargs"), dict) and told.keys() == {
        "enable_thinking"
    }:
        ours["thinking"] = told["enable_thinking"]
    named = [theirs.get(f"dataset_{part}") for part in ("name", "config", "train_split")]
    if data := dataset_location(theirs.get("datasets"), named, path):
        held = dataset_location(theirs.get("eval_dataset"), [], path) or dataset_location(
            theirs.get("datasets"), [], path, "test"
        )
        ours |= {"data": data} | ({"eval_data": held} if held not in ("", data) else {})
    share, steps = theirs.get("warmup_steps") or theirs.get("warmup_ratio"), theirs.get("max_steps")
    if type(share) is float and share < 1 and type(steps) is int and steps > 0:
        ours["warmup_steps"] = math.ceil(share * steps)
    names, weights = convert_rewards(theirs), theirs.get("reward_weights")
    if found := [name for name in names if find_reward_file(path, name)]:
        ours["reward"] = [find_reward_file(path, name) for name in found]
    if names and isinstance(weights, list) and len(weights) == len(names):
        weighed = zip(names, weights, strict=True)
        ours["reward_weights"] = {
            name.rpartition(".")[2]: one for name, one in weighed if name in (found or names)
        }
    return ours


def dataset_location(sets: Any, data: list[Any], path: str, side: str = "train") -> str:
    """The file or hub set of TRL's `datasets`, else of a name, configuration and split; "" where there is not one."""
    if isinstance(sets, list) and len(sets) == 1 and isinstance(sets[0], dict):
        data = [sets[0].get(part) for part in ("path", "name", "split")]
        if files := sets[0].get("data_files"):  # its reader and split go without saying
            several = files if isinstance(files, dict) else {side: files}
            data = [
                one
                for key, one in several.items()
                if len(several) == 1 or (key == "train") is (side == "train")
            ]
    if {type(part) for part in data if part} != {str} or not data[0]:
        return ""
    found = [str(file) for file in (Path(path).parent / data[0], Path(data[0])) if file.is_file()]
    return ":".join(found[:1] or filter(None, data))


def convert_rewards(theirs: dict[str, Any]) -> list[str]:
    asked = theirs.get("reward_funcs") or []
    return [str(one) for one in (asked if isinstance(asked, list) else [asked])]


def find_reward_file(path: str, name: str) -> str:
    """FILE.py:function of a reward by its dotted name, "" where its module does not stand beside `path`."""
    module, _, function = name.rpartition(".")
    file = Path(path).parent / f"{module.replace('.', '/')}.py"
    return f"{file}:{function}" if file.is_file() and function.isidentifier() else ""


def read_constants(tree: ast.Module) -> dict[str, Any]:
    """What a script gives a name once, at its top level."""
    found: dict[str, Any] = {}
    nodes = list(ast.walk(tree))
    num = Counter(
        node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    )
    num += Counter(node.arg for node in nodes if isinstance(node, ast.arg))
    for node in tree.body:
        match node:
            case ast.Assign([ast.Name(name)], value) | ast.AnnAssign(
                ast.Name(name), _, ast.expr() as value
            ):
                found |= {name: evaluate_literal(value, found)} if num[name] == 1 else {}
    return found


def read_script(path: str, where: str) -> Iterator[tuple[str, Any]]:
    """
    The names and values in a script's calls, then those that it sets afterwards, as `args.max_steps = 7`.

    Of a value that is computed there are its words, of rewards their modules; of what makes an eval_dataset its loads.
    """
    try:
        tree = ast.parse(read_text(path, where, 1))
    except (SyntaxError, RecursionError) as error:
        raise ValueError(f"{where} is not Python: {error}") from error
    values, nodes, loads = (
        read_constants(tree),
        list(ast.walk(tree)),
        dict[str, list[dict[str | None, Any]]](),
    )
    own = [
        node.name for node in tree.body if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    ]
    own += [
        ast.unparse(target)
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
    ]
    known = {name: f"{Path(path).stem}.{name}" for name in own}
    for imports in [node for node in tree.body if isinstance(node, ast.ImportFrom)]:
        known |= {one.asname or one.name: f"{imports.module}.{one.name}" for one in imports.names}
    keywords = [(node.arg, node.value) for node in nodes if isinstance(node, ast.keyword)]
    aside = [value for name, value in keywords if name == "eval_dataset"]
    held = set(map(ast.unparse, aside)) - {
        ast.unparse(value) for name, value in keywords if name == "train_dataset"
    }
    aside += [
        node.value
        for node in nodes
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) in held
    ]
    inside = {inner for outer in aside for inner in ast.walk(outer)}
    calls = [node for node in nodes if isinstance(node, ast.Call)]
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.bases]
    kinds = {node.name: ast.unparse(node.bases[0]).rpartition(".")[2] for node in classes}
    names = [getattr(node.func, "id", getattr(node.func, "attr", "")) for node in calls]
    names = [kinds.get(name, name) for name in names]
    taken, is_sft = CALLS, {"SFTConfig", "SFTTrainer"} & {*names} and "GRPOTrainer" not in names
    if is_sft:
        taken = CALLS | OF_SFT
        yield "loss_type", "nll"
    for node, called in zip(calls, names, strict=True):
        if node in inside and called not in LOADS:
            continue
        order = (taken | LOADS).get(called, ())
        named = [
            *zip(order, node.args, strict=False),
            *((word.arg, word.value) for word in node.keywords),
        ]
        if called in LOADS:
            its = loads.setdefault("eval_dataset" if node in inside else "datasets", [])
            its += (
                [load]
                if (load := {key: evaluate_literal(value, values) for key, value in named})
                not in its
                else []
            )
        elif called in ("map", "filter", "train_test_split") and isinstance(
            node.func, ast.Attribute
        ):
            yield f".{called}", Computed(ast.unparse(node))
        elif called in OF_SFT and "GRPOTrainer" in names:
            yield called, Computed(ast.unparse(node))
        for key, value in named if called in taken else ():
            its = evaluate_literal(value, values)
            if key == "reward_funcs":
                each = value.elts if isinstance(value, ast.List) else [value]
                yield key, [known.get(words, words) for words in map(ast.unparse, each)]
            elif key is None and isinstance(its, dict):
                yield from its.items()
            else:
                yield key or "**", its
    yield from loads.items()
    settings = load_foreign_names()["GRPOConfig"] | load_foreign_names()["TrainingArguments"]
    for line in nodes:
        match line:
            case ast.Assign([ast.Attribute(ast.Name(one), setting)], value) if (
                one != "self" and setting in settings
            ):
                yield setting, evaluate_literal(value, values)


def evaluate_literal(node: ast.expr, known: dict[str, Any]) -> Any:
    words = ast.unparse(node)
    try:
        return known[words] if words in known else ast.literal_eval(node)
    except (ValueError, TypeError):  # a dictionary with a list for a key
        return Computed(words)
