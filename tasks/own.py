"""A user's own data: the column `answer`, where there is one, verifies."""

import re
from collections.abc import Sequence
from typing import Any

from problems.data import renames_of, tell_unread, text_columns
from problems.examples import (
    Example,
    answers_of,
    first_answer,
    prompt_text,
    shorten_value,
    suggest_nearest,
)
from problems.functions import load_function
from problems.rewards import UserReward, columns_read
from problems.verifiers import VERIFIERS, choose, is_compared, stated_by
from tasks.task import Sides, Task

NAMES = ["auto", *VERIFIERS]
TASK = Task(name="own", rewards={}, reward_weights={"correct": 1.0})


def bundled() -> Sides:
    raise ValueError("--task own is your own data; give it with --data FILE")


def has_compared(example: Example) -> bool:
    """Whether an answer of the example can be compared with."""
    return any(map(is_compared, answers_of(example)))


def add_verifier(task: Task, spec: str, has_reward: bool) -> Task:
    """
    The task with the verifier of --verifier, or `auto`, as its reward `correct`, and a line on how it compares.

    It has neither where there is no answer to compare with. Beside a reward, texts that nobody asked to compare are its
    metric `exact`: the user's function may well pay what is right in other words, and so its score is the figure.
    Raises ValueError as `choose` and `load_function` do.
    """
    asked, spec = spec, spec or "auto"
    rows = [example for example in task.train + task.held_out if answers_of(example)]
    compared = list(filter(has_compared, rows))
    answers = [answer for example in rows for answer in answers_of(example)]
    known = list(filter(is_compared, answers))
    verifier: Any = None
    if spec not in NAMES:
        _, fn = load_function(
            "--verifier", spec, f"{suggest_nearest(spec, NAMES)}; or one of {', '.join(NAMES)}"
        )
        verifier, said = UserReward("correct", fn), [f"{len(rows)} compared by {spec}"]
    elif known:
        name, verifier = choose(spec, answers)
        said = [
            f"{len(compared)} compared as {VERIFIERS[name].description}, as {shorten_value(stated_by(known[0]))}"
        ]
    else:
        said = ["none to compare with"]
    if prose := [example for example in rows if not has_compared(example)] if spec in NAMES else []:
        said.append(
            f"{len(prose)} not compared, being prose, as {shorten_value(first_answer(prose[0]))}"
        )
    if several := [example for example in rows if len(answers_of(example)) > 1]:
        said.append(
            f"{len(several)} rows have several, of which any is right, as {shorten_value(answers_of(several[0]))}"
        )
    is_beside = bool(known) and has_reward and not asked and name == "exact"
    if is_beside:
        said.append(
            "a metric beside your reward; --verifier exact, or FILE.py:fn of your own, makes it the accuracy"
        )
        task = task._replace(rewards={"exact": verifier}, reward_weights={"exact": 0.0})
    else:
        task = task._replace(
            verifier=verifier, rewards=task.rewards | {"correct": verifier} if verifier else {}
        )
    return task._replace(notes=[*task.notes, f"answers: {'; '.join(said)}"])


# columns that are read whatever the rewards are; `solution`, by --task math
READ = (
    "prompt",
    "answer",
    "system",
    "category",
    "split",
    "chat_template_kwargs",
    "environment",
    "solution",
)


def unread(task: Task, columns: str, hint: str = "") -> list[str]:
    """
    A line that names the columns of text which no prompt, reward, environment or template reads.

    hint: the text of --teacher-prompt, which may show columns.
    """
    rows = task.train + task.held_out
    names = text_columns(rows)
    read = {*READ, *renames_of(columns).values(), *re.findall(r"\{(\w+)\}", hint)}
    for reward in task.rewards.values():
        read.update(columns_read(reward, names))
    for kind in task.environments.values():
        reset: Any = getattr(kind, "reset", None)
        read.update(columns_read(reset, names))

    rest = [name for name in names if name not in read and not _stands_in_prompt(rows, name)]
    return [tell_unread(rest, "no prompt, reward, environment or template reads")] if rest else []


def _stands_in_prompt(rows: Sequence[Example], name: str) -> bool:
    """Whether the texts of a column are part of the prompts, as Alpaca's `input` is."""
    texts = [
        (example[name], prompt_text(example["prompt"])) for example in rows if example.get(name)
    ]
    return all(isinstance(text, str) and text in prompt for text, prompt in texts)


def refuse_unrewardable(task: Task, source: str | None) -> None:
    """ValueError for data that holds nothing to reward."""
    examples = task.train or task.held_out
    prose = next(filter(None, map(first_answer, examples)), "")
    has = f"prose, as {shorten_value(prose)}" if prose else f"the columns {', '.join(examples[0])}"
    fix = "name one, as --columns answer=COLUMN, or give --reward FILE.py:fn or --rubric FILE"
    raise ValueError(f"--data {source} has no answer to compare with, only {has}; {fix}")


def describe_own_task(task: Task) -> Task:
    """The task, without prompts that nothing in it can reward, and with what its user should know of it."""
    train, held_out = task.train, task.held_out
    if task.verifier in task.rewards.values() and not isinstance(task.verifier, UserReward):
        train, held_out = (list(filter(has_compared, side)) for side in (train, held_out))
    said = f"data: {len(train)} prompts to train on" if task.train else "data: none to train on"
    said += f", {len(held_out)} held out"
    if left_out := len(task.train + task.held_out) - len(train + held_out):
        said += f", {left_out} left out for want of an answer to compare with"
    if weights := [
        f"{weight:g} x {name}" for name, weight in task.reward_weights.items() if weight
    ]:
        said += f"; the reward is {' + '.join(weights)}"
    return task._replace(train=train, held_out=held_out, notes=[said, *task.notes])
