"""
Splits the data into training examples and held-out examples, which are used only for evaluation.

No prompt is used for both training and evaluation. A run keeps the same held-out prompts from start
to end, even if its data file grows. This file does not cover how records are read
(prompts/data.py), or which examples a task uses (tasks/).
"""

import math
import os
from collections.abc import Callable, Collection
from typing import Any

from config import evaluations_sample_answers
from prompts.data import load_data
from prompts.examples import Example, hash_prompt_without_system, shorten_value
from prompts.files import SPLITS

MOST_HELD_OUT = 256  # the maximum number of held-out prompts if the data has no column `split`
POWER = 7.85  # (1.96 + 0.84)^2, for a 95% interval and a power of 80%
LEAST_PROBLEMS = 50  # with fewer held-out problems than this, the user is warned

# with fewer held-out losses than this, a computed interval would be too narrow
LEAST_CONVERSATIONS = 10


# ---- training and held-out examples


def load_training_and_held_out(
    spec: str | None,
    held_out: str | None,
    columns: str | None = None,
    read_record: Callable[[Example], Example] | None = None,
    *,
    used_columns: Collection[str] = (),
    held_out_keys: Collection[str] = (),
) -> tuple[list[Example], list[Example], list[str]]:
    """
    Loads the training examples, the held-out examples, and notes on how they were read.

    A prompt that is also held out is removed from the training examples. Held-out rows that repeat
    another row are removed.

    spec: one data source, of which `split_examples` holds out a part, or two sources, as
    "TRAIN,HELD_OUT".
    held_out: a data source that replaces the held-out examples. If this source has a column
    `split`, only its held-out records are used; otherwise, all of its records are used.
    columns, read_record, used_columns: see `load_data`.
    held_out_keys: see `split_examples`.
    """
    lines: list[str] = []
    if spec and "," in spec and not os.path.exists(spec):
        spec, _, second = spec.rpartition(",")
        held_out = held_out or second

    train = list[Example]()
    test = list[Example]()
    if spec:
        train = load_data(spec, columns, read_record, lines, used_columns)
    if held_out is None or _has_split_column(train):
        if not _has_split_column(train):
            lines.extend(_notes_on_kept_or_replaced_held_out(train, held_out_keys))
        train, test = split_examples(train, held_out_keys)
    if held_out is not None:
        test = load_data(held_out, columns, read_record, lines, used_columns)
        if _has_split_column(test):
            test = split_examples(test)[1]

    test_keys = {hash_prompt_without_system(example) for example in test}
    num_train = len(train)
    num_test = len(test)
    train = [example for example in train if hash_prompt_without_system(example) not in test_keys]
    test = _without_repeated_rows(test)
    if spec is not None and not train:
        raise ValueError(
            f"--data {spec} leaves no prompts for training, because every prompt is held out; add "
            "prompts that are not held out"
        )

    notes = []
    num_shared = num_train - len(train)
    if num_shared:
        notes.append(f"{num_shared} training rows were removed, because their prompts are held out")
    num_repeats = num_test - len(test)
    if num_repeats:
        notes.append(f"{num_repeats} held-out rows were removed, because they repeat another row")
    if notes:
        lines.append(f"data: {'; '.join(notes)}")
    return train, test, lines


def _without_repeated_rows(examples: list[Example]) -> list[Example]:
    """
    The examples without repeated rows. If the examples use environments, all rows are kept, because
    an environment may give a different task to each of several equal rows.
    """
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
    Splits a user's examples into training examples and held-out examples.

    If there is a column `split`, the rows with the value "train" are for training, and the rows
    with "held_out", "test" or "validation" are held out. Otherwise, a tenth of the distinct prompts
    is held out: at least one prompt, and at most `MOST_HELD_OUT`. The held-out prompts are chosen
    by their hash, so the choice does not depend on the order of the records, and most of the chosen
    prompts stay the same if a file grows.
    held_out_keys: the hashes of the prompts that the run has held out so far. If at least half of
    these prompts are still in the data, they are held out again, and all other prompts are used for
    training.

    Raises ValueError if the column `split` contains a value other than "train", "held_out", "test"
    and "validation".
    """
    if _has_split_column(examples):
        wrong = [example["split"] for example in examples if example["split"] not in SPLITS]
        if wrong:
            raise ValueError(
                f"the column split contains {shorten_value(wrong[0])}; "
                "write train or held_out in all records, or rename the column"
            )
        train = [example for example in examples if example["split"] == "train"]
        held_out = [example for example in examples if example["split"] != "train"]
        return train, held_out

    keys = sorted({hash_prompt_without_system(example) for example in examples})
    chosen = {*held_out_keys}.intersection(keys)
    if not _are_half_still_present(chosen, held_out_keys):
        num_held_out = min(MOST_HELD_OUT, max(1, len(keys) // 10))
        chosen = set(keys[:num_held_out]) if len(keys) > 1 else set()
    train = [example for example in examples if hash_prompt_without_system(example) not in chosen]
    held_out = [example for example in examples if hash_prompt_without_system(example) in chosen]
    return train, held_out


def _are_half_still_present(present_keys: Collection[str], held_out_keys: Collection[str]) -> bool:
    """Whether at least half of a run's held-out prompts are still in the data."""
    return bool(held_out_keys) and 2 * len(present_keys) >= len({*held_out_keys})


def _notes_on_kept_or_replaced_held_out(
    examples: list[Example], held_out_keys: Collection[str]
) -> list[str]:
    """
    A list with one note if a run cannot keep its held-out prompts, or if it keeps them although a
    new run would hold out different prompts. Otherwise, the list is empty.
    """
    if not held_out_keys:
        return []
    keys = {hash_prompt_without_system(example) for example in examples}
    kept = keys.intersection(held_out_keys)
    if not _are_half_still_present(kept, held_out_keys):
        return [
            f"data: only {len(kept)} of the {len(held_out_keys)} prompts that the run held out "
            "are still in the data, so different prompts are held out from now on"
        ]
    new_choice = {hash_prompt_without_system(example) for example in split_examples(examples)[1]}
    if kept != new_choice:
        return [
            f"data: the run keeps its {len(kept)} held-out prompts; there are now {len(keys)} "
            "prompts, and the new ones are used for training"
        ]
    return []


def _has_split_column(examples: list[Example]) -> bool:
    return any(example.get("split") is not None for example in examples)


# ---- too few held-out problems


def advice_on_holding_out_more(
    num_held_out: int, settings: dict[str, Any], *, more_samples_help: bool = True
) -> str:
    """
    Advice on how to hold out more than `num_held_out` problems.

    more_samples_help: whether the answers to a problem differ, so that sampling more of them makes
    the figures more exact.
    """
    fix = "--eval-data FILE or --data TRAIN,HELD_OUT"
    if settings.get("env_server"):
        fix = "the harness of --env-server"
    if settings.get("eval_limit") == num_held_out:
        fix = "a higher --eval-limit"
    advice = f"hold out more with {fix}"
    if more_samples_help and evaluations_sample_answers(settings):
        advice += ", or sample more answers to each problem"
    return advice


def warnings_of_few_held_out(
    num_held_out: int, settings: dict[str, Any], score_std: float = 0.0
) -> list[str]:
    """
    A list with one warning if `num_held_out` held-out problems are too few to measure a small
    change.

    score_std: the standard deviation of the scores of several answers to the same problem, as a
    fraction of the range of scores; 0 if unknown.
    """
    if not settings.get("eval_every", True):
        return [
            "held-out problems are not evaluated (--eval-every 0), so the run will have no verdict"
        ]
    advice = advice_on_holding_out_more(num_held_out, settings)
    if not evaluations_sample_answers(settings):
        if not 0 < num_held_out < LEAST_CONVERSATIONS:
            return []
        return [
            f"the loss of only {num_held_out} held-out conversations says little about other "
            f"conversations; {advice}"
        ]
    if not 0 < num_held_out < LEAST_PROBLEMS:
        return []

    # If the standard deviation is unknown, the estimate assumes that every third answer changes.
    variance = 2 * score_std**2 or 1 / 3
    num_more = max(LEAST_PROBLEMS, 2 * num_held_out)
    smallest = min(1, math.sqrt(POWER * variance / num_held_out))
    smallest_with_more = min(1, math.sqrt(POWER * variance / num_more))
    assumption = "judging by these answers" if score_std else "if every third answer changes"
    return [
        f"{assumption}, {num_held_out} held-out problems can show only changes of at least "
        f"{smallest:.0%} of the range of scores, and {num_more} problems can show changes of "
        f"at least {smallest_with_more:.0%}; {advice} after training (evaluate.py --samples 8)"
    ]
