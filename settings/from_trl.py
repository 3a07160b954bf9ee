"""
A recipe out of TRL's: the YAML of `trl grpo`, or a script that calls GRPOConfig, LoraConfig and GRPOTrainer.

data/trl.yaml says what each name is here. Nothing of the script is run.
"""

import ast
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from config import SETTINGS
from flags import foreign_names, load_yaml, read_text
from settings.checks import checked

CALLS = ("GRPOConfig", "SFTConfig", "LoraConfig", "GRPOTrainer", "SFTTrainer")
PARTS = ("args", "peft_config", "train_dataset", "processing_class")  # of the trainer, which other calls make


def recipe(path: str) -> str:
    """Our YAML of a file of TRL's; a comment for each name without an equal. ValueError for what cannot be read."""
    where = f"--from-trl {path}"
    theirs = dict(in_script(path, where)) if Path(path).suffix == ".py" else load_yaml(path, where)
    if not isinstance(theirs, dict) or not theirs:
        raise ValueError(f"{where} holds no settings of TRL's; give the YAML of `trl grpo` or a script with GRPOConfig")
    rows = {
        name: row for section, names in foreign_names().items() if section != "values" for name, row in names.items()
    }
    ours, left, spared = derived(theirs, path), [], []
    for name, value in theirs.items():
        kind, said = rows.get(str(name), ("missing", "neither TRL nor Gwen knows it"))
        key, meant = renamed(str(name), value, kind, said)
        if DERIVED.get(name) in ours:
            continue
        if kind == "not needed":
            spared.append(str(name))
            continue
        try:
            if key in SETTINGS:
                ours.setdefault(key, checked({key: meant}).flat()[key])
                continue
        except ValueError as error:
            kind, said = "refused", str(error)
        left.append(f"# {name}: {value!r:.80} -> {kind}{': ' if said else ''}{said}")
    if any(one.startswith(f"{Path(path)}:") for one in ours.get("reward", ())):
        left.append(f"# reward: it runs {path}, so keep the training in there under `if __name__ == '__main__':`")
    if spared:
        left.append(f"# not needed here: {', '.join(spared)}")
    return "\n".join([*left, yaml.safe_dump(ours, sort_keys=False)])


def renamed(name: str, value: Any, kind: str, said: str) -> tuple[str, Any]:
    """The name that a setting has here, "" where it has none that stands for it alone, and its value."""
    named = re.match("`--([a-z-]+)(?: ([a-z]+))?`", said)
    if kind == "renamed" and named and not re.search("[:*/]", said.replace("https:", "")):
        return named[1].replace("-", "_"), named[2] if named[2] and value is True else value
    return (name, value) if kind == "same" else ("", value)


DERIVED = {"lora_alpha": "lora_scale", "per_device_train_batch_size": "batch", "reward_funcs": "reward"}
DERIVED |= dict.fromkeys(("dataset_name", "dataset_config", "dataset_train_split"), "data")
DERIVED |= {"warmup_ratio": "warmup_steps", "warmup_steps": "warmup_steps", "reward_weights": "reward_weights"}


def derived(theirs: dict[str, Any], path: str) -> dict[str, Any]:
    """What is here made of several of theirs; nothing of what a script computes."""
    ours: dict[str, Any] = {}
    steps = theirs.get("steps_per_generation") or theirs.get("gradient_accumulation_steps") or 1
    scale = [theirs.get("lora_alpha"), theirs.get("r", theirs.get("lora_r", 16))]
    batch = [theirs.get("per_device_train_batch_size"), steps, theirs.get("num_generations", 8)]
    if all(type(value) in (int, float) and value > 0 for value in scale):
        ours["lora_scale"] = scale[0] / scale[1]
    if all(type(value) is int and value > 0 for value in batch):
        ours["batch"] = max(batch[0] * batch[1] // batch[2], 1)
    if name := theirs.get("dataset_name"):
        parts = name, theirs.get("dataset_config"), theirs.get("dataset_train_split")
        ours["data"] = ":".join(str(part) for part in parts if part)
    share, steps = theirs.get("warmup_steps") or theirs.get("warmup_ratio"), theirs.get("max_steps")
    if type(share) is float and share < 1 and type(steps) is int and steps > 0:
        ours["warmup_steps"] = math.ceil(share * steps)
    asked, weights = theirs.get("reward_funcs", []), theirs.get("reward_weights")
    specs = [at_hand(path, one) for one in (asked if isinstance(asked, list) else [asked])]
    if specs and all(specs):
        ours["reward"] = specs
        if isinstance(weights, list) and len(weights) == len(specs):
            ours["reward_weights"] = dict(zip((one.rpartition(":")[2] for one in specs), weights, strict=True))
    return ours


def at_hand(path: str, name: Any) -> str:
    """FILE.py:function of a reward by its dotted name, "" where its module does not stand beside `path`."""
    module, _, function = str(name).rpartition(".")
    file = Path(path).parent / f"{module.replace('.', '/')}.py"
    return f"{file}:{function}" if file.is_file() else ""


def in_script(path: str, where: str) -> Iterator[tuple[str, Any]]:
    """The names and values in a script's calls; of a value that is computed its words, of rewards their modules."""
    try:
        tree = ast.parse(read_text(path, where, 1))
    except (SyntaxError, RecursionError) as error:
        raise ValueError(f"{where} is not Python: {error}") from error
    known = {node.name: f"{Path(path).stem}.{node.name}" for node in tree.body if isinstance(node, ast.FunctionDef)}
    for imports in [node for node in tree.body if isinstance(node, ast.ImportFrom)]:
        known |= {one.asname or one.name: f"{imports.module}.{one.name}" for one in imports.names}
    for node in ast.walk(tree):
        called = getattr(node.func, "id", getattr(node.func, "attr", "")) if isinstance(node, ast.Call) else ""
        if called == "load_dataset" and isinstance(node, ast.Call):
            words = {word.arg: word.value for word in node.keywords}
            names = [*node.args, *(words[name] for name in ("path", "name", "split") if name in words)]
            names = [words["data_files"]] if "data_files" in words else names  # its reader and split go without saying
            yield "dataset_name", ":".join(map(str, map(literal, names)))
        elif called in CALLS and isinstance(node, ast.Call):
            for word in node.keywords:
                if word.arg == "reward_funcs":
                    each = word.value.elts if isinstance(word.value, ast.List) else [word.value]
                    yield word.arg, [known.get(words, words) for words in map(ast.unparse, each)]
                elif word.arg and word.arg not in PARTS:
                    yield word.arg, literal(word.value)


def literal(node: ast.expr) -> Any:
    try:
        return ast.literal_eval(node)
    except ValueError:
        return ast.unparse(node)
