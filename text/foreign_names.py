"""
Explains what to use in Gwen instead of the name of a setting in TRL or PEFT.

The explanations come from the table data/trl.yaml. This file does not cover the conversion of whole
recipes (settings/from_trl.py).
"""

import difflib
import functools
import re
from collections.abc import Callable, Collection
from pathlib import Path

from text.documents import load_yaml

# The owner of the names in each of these sections. The names in all other sections are TRL's.
OWNERS = {"LoraConfig": "PEFT's ", "older names": ""}
VERBS = {
    "renamed": "corresponds to ",
    "missing": "is missing here",
    "not needed": "is not needed here",
}


@functools.cache
def load_foreign_names() -> dict[str, dict[str, tuple[str, str]]]:
    """
    Load the names of TRL and PEFT in each section of data/trl.yaml.

    Each name has a kind ("same", "renamed", "missing" or "not needed") and a piece of advice.
    """
    sections = load_yaml(Path(__file__).parents[1] / "data" / "trl.yaml", "data/trl.yaml")
    table = {}
    for section, rows in sections.items():
        table[section] = {
            name: tuple(row) for names, row in rows.items() for name in names.split(", ")
        }
    return table


def flag_to_key(flag: str) -> str:
    """The name of the setting that a flag sets, such as `judge_mode` for `--judge-mode`."""
    return flag.lstrip("-").replace("-", "_")


def hint_on_unknown_name(
    unknown: str, valid_names: Collection[str], quote: Callable[[str], str] = str
) -> str:
    """
    Return a hint on what to use instead of an unknown flag or setting; "" if there is no hint.

    The table of TRL and PEFT names is searched first, and then `valid_names` for a similar
    spelling. A row of the table is skipped if it recommends flags that this command does not have,
    unless the row names the command that has them.
    """
    key = flag_to_key(unknown)
    by_key = {flag_to_key(name): name for name in valid_names}
    for section, names in load_foreign_names().items():
        if key not in names:
            continue
        kind, advice = names[key]
        flags = re.findall("--[a-z][a-z-]*", advice)
        has_flag = any(flag_to_key(flag) in by_key for flag in flags)
        if kind != "same" and (not flags or ".py" in advice or has_flag):
            owner = OWNERS.get(section, "TRL's ")
            return explain_foreign_name(owner + key, kind, advice)

    similar = difflib.get_close_matches(key, by_key, 1, 0.8)
    return f"did you mean {quote(by_key[similar[0]])}?" if similar else ""


def explain_foreign_name(name: str, kind: str, advice: str) -> str:
    """Return a sentence on a TRL or PEFT name, such as "TRL's fp16 is not needed here"."""
    separator = ": " if advice and kind != "renamed" else ""
    plain_advice = advice.replace("`", "")
    return f"{name} {VERBS[kind]}{separator}{plain_advice}"
