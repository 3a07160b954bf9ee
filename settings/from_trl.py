"""
A recipe out of TRL's: the YAML of `trl grpo`, or a script that calls GRPOConfig, LoraConfig and GRPOTrainer.

data/trl.yaml says what each name is here. Nothing of the script is run. Left out: reward functions, which belong into a
file of their own.
"""

import ast
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
    ours, left, spared = derived(theirs), [], []
    for name, value in theirs.items():
        kind, said = rows.get(str(name), ("missing", "neither TRL nor Gwen knows it"))
        if found := translated(str(name), value, kind, said):
            ours.setdefault(*found)
        elif kind == "not needed":
            spared.append(str(name))
        elif DERIVED.get(name) not in ours:
            left.append(f"# {name}: {value!r:.80} -> {kind}{': ' if said else ''}{said}")
    if spared:
        left.append(f"# not needed here: {', '.join(spared)}")
    return "\n".join([*left, yaml.safe_dump(ours, sort_keys=False)])


def translated(name: str, value: Any, kind: str, said: str) -> tuple[str, Any] | None:
    """Our setting and its value; None where there is none, or the value is no value of it."""
    named = re.match("`--([a-z-]+)(?: ([a-z]+))?`", said)
    if kind == "renamed" and named and not re.search("[:*/]", said.replace("https:", "")):
        kind, name, value = "same", named[1].replace("-", "_"), named[2] if named[2] and value is True else value
    try:
        return (name, checked({name: value}).flat()[name]) if kind == "same" and name in SETTINGS else None
    except ValueError:
        return None


DERIVED = {"lora_alpha": "lora_scale", "per_device_train_batch_size": "batch"}
DERIVED |= dict.fromkeys(("dataset_name", "dataset_config", "dataset_train_split"), "data")


def derived(theirs: dict[str, Any]) -> dict[str, Any]:
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
    return ours


def in_script(path: str, where: str) -> Iterator[tuple[str, Any]]:
    """The names and values in a script's calls; of a value that is computed its words."""
    try:
        tree = ast.parse(read_text(path, where, 1))
    except (SyntaxError, RecursionError) as error:
        raise ValueError(f"{where} is not Python: {error}") from error
    for node in ast.walk(tree):
        called = getattr(node.func, "id", getattr(node.func, "attr", "")) if isinstance(node, ast.Call) else ""
        if called == "load_dataset" and isinstance(node, ast.Call):
            words = {word.arg: word.value for word in node.keywords}
            names = [*node.args, *(words[name] for name in ("path", "name", "split") if name in words)]
            names = [words["data_files"]] if "data_files" in words else names  # its reader and split go without saying
            yield "dataset_name", ":".join(map(str, map(literal, names)))
        elif called in CALLS and isinstance(node, ast.Call):
            yield from ((word.arg, literal(word.value)) for word in node.keywords if word.arg and word.arg not in PARTS)


def literal(node: ast.expr) -> Any:
    try:
        return ast.literal_eval(node)
    except ValueError:
        return ast.unparse(node)
