"""
The task `own`, which trains on a user's own data.

Completions are compared with the column `answer`, if the data has this column. This file
does not cover how data is read (prompts/data.py) or how answers are compared
(rewards/verifiers.py).
"""

import re
from collections.abc import Sequence
from typing import Any, NoReturn

from prompts.data import parse_old_column_by_new
from prompts.data_notes import columns_with_text, note_on_unread_columns
from prompts.examples import (
    Example,
    answers_of,
    did_you_mean,
    first_answer,
    last_user_text,
    shorten_value,
)
from rewards.functions import load_function
from rewards.rewards import Reward, UserReward, columns_that_function_reads
from rewards.statements import last_mark_or_whole_answer
from rewards.verifiers import VERIFIERS, choose_verifier, is_comparable_answer
from tasks.task import Task

NAMES = ["auto", *VERIFIERS]
TASK = Task(name="own", rewards={}, reward_weights={"correct": 1.0})
# the columns that are read whatever the rewards are; only --task math reads `solution`
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


def load_examples() -> NoReturn:
    """Raises ValueError, because this task has no data of its own."""
    raise ValueError("--task own trains on your own data; name the data with --data FILE")


# ---- the verifier


def has_comparable_answer(example: Example) -> bool:
    """Whether a completion can be compared with at least one right answer of the example."""
    return any(map(is_comparable_answer, answers_of(example)))


def with_verifier(task: Task, spec: str, has_reward: bool) -> Task:
    """
    The task with a verifier as its reward `correct`, and with a note on how answers are compared.

    If no answer can be compared, the task has no verifier.

    spec: the value of --verifier; "" means `auto`.
    has_reward: whether the user has a reward function. Such a function may reward right answers
    that are written in other words. So if --verifier is not set, and the answers would be compared
    by the verifier `exact`, this comparison is only a metric, and evaluations report the score of
    the user's function.

    Raises ValueError in the same cases as `choose_verifier` and `load_function`.
    """
    rows = [example for example in task.train + task.held_out if answers_of(example)]
    answers = [answer for example in rows for answer in answers_of(example)]
    comparable = list(filter(is_comparable_answer, answers))
    is_own_function = bool(spec) and spec not in NAMES
    verifier: Reward | None = None
    name = ""
    if is_own_function:
        names = ", ".join(NAMES)
        hint = f" or one of {names}{did_you_mean(spec, NAMES)}"
        _, fn = load_function("--verifier", spec, hint)
        verifier = UserReward("correct", fn)
        notes = [f"{len(rows)} answers are compared by {spec}"]
    elif comparable:
        name, verifier = choose_verifier(spec or "auto", answers)
        num = len(list(filter(has_comparable_answer, rows)))
        example_answer = shorten_value(last_mark_or_whole_answer(comparable[0]))
        notes = [
            f"{num} answers such as {example_answer} are compared as {VERIFIERS[name].description}"
        ]
    else:
        notes = ["there are no answers to compare with"]
    notes += _note_prose_and_alternatives(rows, include_prose=not is_own_function)

    if has_reward and not spec and name == "exact":
        assert verifier is not None
        # `exact` as the verifier would count nearly all answers as wrong if most answers are prose
        fits_most_rows = 2 * len(list(filter(has_comparable_answer, rows))) >= len(rows)
        choices = "--verifier exact or --verifier FILE.py:function"
        notes.append(
            "the comparison is only a metric, because you have a reward of your own; "
            "to have an accuracy, add "
            f"{choices if fits_most_rows else '--verifier FILE.py:function'}"
        )
        task = task._replace(rewards={"exact": verifier}, reward_weights={"exact": 0.0})
    elif verifier is not None:
        task = task._replace(verifier=verifier, rewards=task.rewards | {"correct": verifier})
    else:
        task = task._replace(verifier=None, rewards={})
    return task._replace(notes=[*task.notes, f"comparison: {'; '.join(notes)}"])


def _note_prose_and_alternatives(rows: list[Example], include_prose: bool) -> list[str]:
    """
    Notes on answers that are not compared, and on rows with several right answers.

    include_prose: whether to include the note on answers that are prose, which are not compared.
    """
    notes = []
    prose = [example for example in rows if not has_comparable_answer(example)]
    if include_prose and prose:
        example_answer = shorten_value(first_answer(prose[0]))
        notes.append(
            f"{len(prose)} answers such as {example_answer} are prose and are not compared"
        )
    several = [example for example in rows if len(answers_of(example)) > 1]
    if several:
        example_answers = shorten_value(answers_of(several[0]))
        notes.append(f"{len(several)} rows have several right answers, such as {example_answers}")
    return notes


# ---- columns


def note_unread_columns(task: Task, columns_flag: str, teacher_prompt: str = "") -> list[str]:
    """
    Returns a list with one line, which names the text columns that nothing reads.

    A column can be read by a prompt, a reward, an environment or a template. The list is empty if
    every text column is read.

    columns_flag: the value of --columns.
    teacher_prompt: the template in the file --teacher-prompt, which may name columns.
    """
    rows = task.train + task.held_out
    names = columns_with_text(rows)
    read = {
        *READ_COLUMNS,
        *parse_old_column_by_new(columns_flag).values(),
        *re.findall(r"\{(\w+)\}", teacher_prompt),
    }
    for reward in task.rewards.values():
        read.update(columns_that_function_reads(reward, names))
    for kind in task.environments.values():
        reset: Any = getattr(kind, "reset", None)
        read.update(columns_that_function_reads(reset, names))

    unread = [name for name in names if name not in read and not _is_in_prompts(rows, name)]
    if not unread:
        return []
    return [note_on_unread_columns(unread, "no prompt, reward, environment or template reads")]


def _is_in_prompts(rows: Sequence[Example], column: str) -> bool:
    """Whether each prompt contains the text of a column, such as the column `input` of Alpaca."""
    for example in rows:
        text = example.get(column)
        if not text:
            continue
        if not isinstance(text, str) or text not in last_user_text(example["prompt"]):
            return False
    return True


# ---- messages to the user


def refuse_unrewardable(task: Task, source: str | None) -> NoReturn:
    """Raises ValueError for data whose answers cannot be compared, in a run without a reward."""
    examples = task.train or task.held_out
    prose = next(filter(None, map(first_answer, examples)), "")
    content = f"the columns {', '.join(examples[0])}"
    if prose:
        content = f"prose such as {shorten_value(prose)}"
    raise ValueError(
        f"--data {source} has no answer to compare with, only {content}; "
        "name the answers with --columns answer=COLUMN, or add --reward FILE.py:function "
        "or --rubric FILE"
    )


def drop_unscorable_and_add_note(task: Task) -> Task:
    """The task without prompts that no reward can score, and with a note on its size and reward."""
    train = task.train
    held_out = task.held_out
    is_rewarded_by_verifier = task.verifier in task.rewards.values()
    if is_rewarded_by_verifier and not isinstance(task.verifier, UserReward):
        train = list(filter(has_comparable_answer, train))
        held_out = list(filter(has_comparable_answer, held_out))

    line = f"data: {len(held_out)} held-out prompts"
    if task.train:
        line = f"data: {len(train)} prompts to train on, {len(held_out)} held out"
    num_left_out = len(task.train + task.held_out) - len(train + held_out)
    if num_left_out:
        line += f", {num_left_out} left out because their answers cannot be compared"
    terms = [f"{weight:g} x {name}" for name, weight in task.reward_weights.items() if weight]
    if terms:
        line += f"; the reward is {' + '.join(terms)}"
    return task._replace(train=train, held_out=held_out, notes=[line, *task.notes])
