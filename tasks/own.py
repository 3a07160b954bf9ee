"""
The task of a user's own data. Completions are compared with the column `answer`, if there is one.

This file does not cover reading data (prompts/data.py) and comparing answers
(rewards/verifiers.py).
"""

import re
from collections.abc import Sequence
from typing import Any

from prompts.data import parse_renames
from prompts.data_notes import describe_unread_columns, text_columns
from prompts.examples import (
    Example,
    answers_of,
    first_answer,
    prompt_text,
    shorten_value,
    suggest_nearest,
)
from rewards.functions import load_function
from rewards.rewards import Reward, UserReward, columns_read
from rewards.statements import gold_text
from rewards.verifiers import VERIFIERS, choose, is_compared
from tasks.task import Sides, Task

NAMES = ["auto", *VERIFIERS]
TASK = Task(name="own", rewards={}, reward_weights={"correct": 1.0})
# columns that are read whatever the rewards are; --task math reads `solution`
READ_COLUMNS = (
    "prompt",
    "answer",
    "system",
    "category",
    "split",
    "chat_template_kwargs",
    "environment",
    "solution",
)


def load_examples() -> Sides:
    """Raises ValueError: this task has no data of its own."""
    raise ValueError("--task own is your own data; give it with --data FILE")


# ---- the verifier


def has_comparable_answer(example: Example) -> bool:
    """Whether completions can be compared with an answer of the example."""
    return any(map(is_compared, answers_of(example)))


def with_verifier(task: Task, spec: str, has_reward: bool) -> Task:
    """
    The task with a verifier as its reward `correct`, and with a note on how the verifier compares.

    spec: --verifier; "" means `auto`. Without a comparable answer the task gets no verifier.
    has_reward: whether the user has a reward. If so, and if the user did not ask for comparing
    texts, the comparison is only the metric `exact`. The user's function may reward right answers
    in other words, so the evaluation reports the score of that function.

    Raises the ValueErrors of `choose` and `load_function`.
    """
    rows = [example for example in task.train + task.held_out if answers_of(example)]
    answers = [answer for example in rows for answer in answers_of(example)]
    comparable = list(filter(is_compared, answers))
    is_own_function = bool(spec) and spec not in NAMES
    verifier: Reward | None = None
    name = ""
    if is_own_function:
        names = ", ".join(NAMES)
        hint = f"{suggest_nearest(spec, NAMES)}; or one of {names}"
        _, fn = load_function("--verifier", spec, hint)
        verifier = UserReward("correct", fn)
        notes = [f"{len(rows)} compared by {spec}"]
    elif comparable:
        name, verifier = choose(spec or "auto", answers)
        num = len(list(filter(has_comparable_answer, rows)))
        example_answer = shorten_value(gold_text(comparable[0]))
        notes = [f"{num} compared as {VERIFIERS[name].description}, as {example_answer}"]
    else:
        notes = ["none to compare with"]
    notes += _describe_answers(rows, has_prose=not is_own_function)

    if has_reward and not spec and name == "exact":
        assert verifier is not None
        notes.append(
            "this is a metric beside your reward; --verifier exact, or FILE.py:fn of your own, "
            "makes it the accuracy"
        )
        task = task._replace(rewards={"exact": verifier}, reward_weights={"exact": 0.0})
    elif verifier is not None:
        task = task._replace(verifier=verifier, rewards=task.rewards | {"correct": verifier})
    else:
        task = task._replace(verifier=None, rewards={})
    return task._replace(notes=[*task.notes, f"answers: {'; '.join(notes)}"])


def _describe_answers(rows: list[Example], has_prose: bool) -> list[str]:
    """
    Notes on answers that are not compared, and on rows with several answers.

    has_prose: whether prose counts as not compared.
    """
    notes = []
    prose = [example for example in rows if not has_comparable_answer(example)]
    if has_prose and prose:
        example_answer = shorten_value(first_answer(prose[0]))
        notes.append(f"{len(prose)} not compared, because they are prose, as {example_answer}")
    several = [example for example in rows if len(answers_of(example)) > 1]
    if several:
        example_answers = shorten_value(answers_of(several[0]))
        notes.append(
            f"{len(several)} rows have several, of which any is right, as {example_answers}"
        )
    return notes


# ---- columns


def note_unread_columns(task: Task, columns: str, hint: str = "") -> list[str]:
    """
    A line that lists the text columns that no prompt, reward, environment or template reads.

    columns: --columns. hint: the text of --teacher-prompt, which may contain names of columns.
    """
    rows = task.train + task.held_out
    names = text_columns(rows)
    read = {*READ_COLUMNS, *parse_renames(columns).values(), *re.findall(r"\{(\w+)\}", hint)}
    for reward in task.rewards.values():
        read.update(columns_read(reward, names))
    for kind in task.environments.values():
        reset: Any = getattr(kind, "reset", None)
        read.update(columns_read(reset, names))

    unread = [name for name in names if name not in read and not _is_in_prompts(rows, name)]
    if not unread:
        return []
    return [describe_unread_columns(unread, "no prompt, reward, environment or template reads")]


def _is_in_prompts(rows: Sequence[Example], name: str) -> bool:
    """Whether the prompts contain the texts of a column, as with the column `input` of Alpaca."""
    for example in rows:
        text = example.get(name)
        if not text:
            continue
        if not isinstance(text, str) or text not in prompt_text(example["prompt"]):
            return False
    return True


# ---- what the user reads


def refuse_unrewardable(task: Task, source: str | None) -> None:
    """Raises ValueError for data that have neither a comparable answer nor a reward."""
    examples = task.train or task.held_out
    prose = next(filter(None, map(first_answer, examples)), "")
    content = f"the columns {', '.join(examples[0])}"
    if prose:
        content = f"prose, as {shorten_value(prose)}"
    raise ValueError(
        f"--data {source} has no answer to compare with, only {content}; "
        "name one, as --columns answer=COLUMN, or give --reward FILE.py:fn or --rubric FILE"
    )


def describe_own_task(task: Task) -> Task:
    """The task with a note on its size and reward, and without prompts that no reward can score."""
    train = task.train
    held_out = task.held_out
    is_rewarded_by_verifier = task.verifier in task.rewards.values()
    if is_rewarded_by_verifier and not isinstance(task.verifier, UserReward):
        train = list(filter(has_comparable_answer, train))
        held_out = list(filter(has_comparable_answer, held_out))

    line = f"data: {len(train)} prompts to train on" if task.train else "data: none to train on"
    line += f", {len(held_out)} held out"
    num_left_out = len(task.train + task.held_out) - len(train + held_out)
    if num_left_out:
        line += f", {num_left_out} left out for want of an answer to compare with"
    terms = [f"{weight:g} x {name}" for name, weight in task.reward_weights.items() if weight]
    if terms:
        line += f"; the reward is {' + '.join(terms)}"
    return task._replace(train=train, held_out=held_out, notes=[line, *task.notes])
