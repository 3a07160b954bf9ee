"""
Splits the data into two sides: prompts to train on, and held-out prompts for evaluation.

No prompt is on both sides. A run keeps the prompts that it held out at its start, even if its data
grow. This file does not cover how records are read (prompts/data.py), or which sides a task has
(tasks/).
"""

import math
import os
from collections.abc import Callable, Collection
from typing import Any

from prompts.data import load_data
from prompts.examples import Example, prompt_key, shorten_value
from prompts.files import SPLITS

MOST_HELD_OUT = 256  # the most held-out prompts if there is no column `split`
POWER = 7.85  # (1.96 + 0.84)^2, for an interval of 95% and a power of 80%
LEAST_PROBLEMS = 50  # with fewer held-out problems, the user is warned
LEAST_CONVERSATIONS = 10  # with fewer losses, an interval would be too narrow


# ---- the two sides


def load_sides(
    spec: str | None,
    held_out: str | None,
    columns: str | None = None,
    read: Callable[[Example], Example] | None = None,
    *,
    read_columns: Collection[str] = (),
    held_out_keys: Collection[str] = (),
) -> tuple[list[Example], list[Example], list[str]]:
    """
    Loads the training examples, the held-out examples, and lines on how they were read.

    A prompt on both sides is removed from the training examples. Repeated held-out rows count once.

    spec: one source, a part of which `split_examples` holds out, or two sources, "TRAIN,HELD_OUT".
    held_out: a source that replaces the held-out side. Its held-out records are used, or all of its
    records if it has no column `split`.
    columns, read, read_columns: see `load_data`. held_out_keys: see `split_examples`.
    """
    lines: list[str] = []
    if spec and "," in spec and not os.path.exists(spec):
        spec, _, second = spec.rpartition(",")
        held_out = held_out or second

    train = list[Example]()
    test = list[Example]()
    if spec:
        train = load_data(spec, columns, read, lines, read_columns)
    if held_out is None or _has_split(train):
        if not _has_split(train):
            lines.extend(_describe_kept_sides(train, held_out_keys))
        train, test = split_examples(train, held_out_keys)
    if held_out is not None:
        test = load_data(held_out, columns, read, lines, read_columns)
        if _has_split(test):
            test = split_examples(test)[1]

    test_keys = {prompt_key(example) for example in test}
    num_train = len(train)
    num_test = len(test)
    train = [example for example in train if prompt_key(example) not in test_keys]
    test = _remove_repeats(test)
    if spec is not None and not train:
        raise ValueError(
            f"--data {spec} leaves no prompt to train on, because all are held out; add prompts"
        )

    notes = []
    num_shared = num_train - len(train)
    if num_shared:
        notes.append(f"{num_shared} training rows are left out, because their prompts are held out")
    num_repeats = num_test - len(test)
    if num_repeats:
        notes.append(f"{num_repeats} held-out rows repeat another row and count once")
    if notes:
        lines.append(f"data: {'; '.join(notes)}")
    return train, test, lines


def _remove_repeats(examples: list[Example]) -> list[Example]:
    """The examples without repeats; all examples if an environment draws a task for each row."""
    if any("environment" in example for example in examples):
        return examples
    different = {}
    for example in examples:
        values = [value for name, value in example.items() if name != "split"]
        different[repr(values)] = example
    return list(different.values())


def split_examples(
    examples: list[Example], held_out_keys: Collection[str] = ()
) -> tuple[list[Example], list[Example]]:
    """
    Splits a user's examples into (train, held out).

    If there is a column `split`, it decides: its values are "train", "held_out", "test" and
    "validation". Otherwise a tenth of the distinct prompts is held out: at least one, and at most
    `MOST_HELD_OUT`. They are chosen by hash, not by place. So the order of the records does not
    matter, and most prompts stay on their side if a file grows.
    held_out_keys: keys of the prompts that the run already holds out. If the file still has at
    least half of them, exactly these are held out, so that no row changes sides and new rows are
    trained on.

    Raises ValueError if `split` has another value.
    """
    if _has_split(examples):
        wrong = [example["split"] for example in examples if example["split"] not in SPLITS]
        if wrong:
            raise ValueError(
                f"column split holds {shorten_value(wrong[0])}; "
                "write train or held_out in all records, or rename it"
            )
        train = [example for example in examples if example["split"] == "train"]
        held_out = [example for example in examples if example["split"] != "train"]
        return train, held_out

    keys = sorted({prompt_key(example) for example in examples})
    chosen = {*held_out_keys}.intersection(keys)
    if not _keeps_sides(chosen, held_out_keys):
        num_held_out = min(MOST_HELD_OUT, max(1, len(keys) // 10))
        chosen = set(keys[:num_held_out]) if len(keys) > 1 else set()
    train = [example for example in examples if prompt_key(example) not in chosen]
    held_out = [example for example in examples if prompt_key(example) in chosen]
    return train, held_out


def _keeps_sides(present_keys: Collection[str], held_out_keys: Collection[str]) -> bool:
    """Whether at least half of a run's held-out prompts are still present."""
    return bool(held_out_keys) and 2 * len(present_keys) >= len({*held_out_keys})


def _describe_kept_sides(examples: list[Example], held_out_keys: Collection[str]) -> list[str]:
    """A line if a run cannot keep its held-out prompts, or if a new run would hold out others."""
    if not held_out_keys:
        return []
    keys = {prompt_key(example) for example in examples}
    kept = keys.intersection(held_out_keys)
    if not _keeps_sides(kept, held_out_keys):
        return [
            f"data: only {len(kept)} of the {len(held_out_keys)} prompts that the run held out "
            "are left, so others are chosen"
        ]
    new_choice = {prompt_key(example) for example in split_examples(examples)[1]}
    if kept != new_choice:
        return [
            f"data: the run keeps its {len(kept)} held-out prompts, of now {len(keys)} prompts; "
            "new ones are trained on"
        ]
    return []


def _has_split(examples: list[Example]) -> bool:
    return any(example.get("split") is not None for example in examples)


# ---- too few held-out problems


def advise_on_held_out(num: int, settings: dict[str, Any]) -> str:
    """Advice on how to hold out more than the present `num` problems."""
    fix = "--eval-data FILE or --data TRAIN,HELD_OUT"
    if settings.get("eval_limit") == num:
        fix = "a higher --eval-limit"
    advice = f"hold out more with {fix}"
    if settings.get("loss_type") != "sft":
        advice += ", or ask each more often"
    return advice


def warn_of_few_held_out(num: int, settings: dict[str, Any], deviation: float = 0.0) -> list[str]:
    """
    A line if `num` held-out problems are too few to measure a small change.

    deviation: the standard deviation of the scores that answers to one problem get, as a fraction
    of the range of scores; 0 if it is not known.
    """
    if not settings.get("eval_every", True):
        return ["nothing held out is evaluated (--eval-every 0), so there will be no verdict"]
    advice = advise_on_held_out(num, settings)
    if settings.get("loss_type") == "sft":
        if not 0 < num < LEAST_CONVERSATIONS:
            return []
        return [f"with {num} held out the loss says little about other conversations: {advice}"]
    if not 0 < num < LEAST_PROBLEMS:
        return []

    # Without a deviation, the estimate assumes that every third answer changes.
    variance = 2 * deviation**2 or 1 / 3
    smallest = min(1, math.sqrt(POWER * variance / num))
    smallest_with_enough = min(1, math.sqrt(POWER * variance / LEAST_PROBLEMS))
    assumption = "by these answers" if deviation else "if every third answer changes"
    return [
        f"{assumption}, {num} held-out problems show a change from {smallest:.0%} of the range "
        f"of scores on, {LEAST_PROBLEMS} from {smallest_with_enough:.0%} on: {advice} once it is "
        "trained (evaluate.py --samples 8)"
    ]
