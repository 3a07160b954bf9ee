"""
Loads conversations to learn, and makes a task of the held-out ones whose answers can be scored.

With --loss-type sft, a run learns given replies. If the user also gives --verifier or --reward, the
model answers the held-out prompts in each evaluation. The right answer to a prompt is the column
`answer` of its row, or else the reply itself. This file does not cover how a conversation is read
(prompts/chats.py) or how answers are evaluated (evaluation/score_task.py).
"""

from collections.abc import Collection, Sequence
from typing import NamedTuple

import tasks
from config import Config, evaluations_sample_answers
from prompts import chats
from prompts.examples import Example
from rewards.rewards import UserReward
from tasks import own
from tasks.task import Task


class ConversationsAndTask(NamedTuple):
    """The conversations of a run of supervised fine-tuning, and the task that evaluates the run."""

    train: list[Example]
    held_out: list[Example]
    task: Task | None  # the held-out prompts to answer; None if evaluations sample no answers
    notes: list[str]  # lines for the user


def load_conversations_and_task(
    config: Config, held_out_keys: Collection[str]
) -> ConversationsAndTask:
    """
    Loads the conversations in --data, and the task of answering the held-out prompts.

    held_out_keys: the keys of the prompts that the run already holds out.

    Raises ValueError if a row is wrong, or if no held-out prompt has an answer that can be scored.
    """
    data = config.data
    if not evaluations_sample_answers(config.to_flags()):
        train, held_out, notes = chats.load_conversations(data.path, data.columns, held_out_keys)
        return ConversationsAndTask(train, held_out, None, notes)

    train, held_out, notes = chats.load_conversations(
        data.path, data.columns, held_out_keys, with_problems=True
    )
    train_problems = _pop_problem_of_each_conversation(train)
    held_out_problems = _pop_problem_of_each_conversation(held_out)
    task = None
    if held_out:
        task = _make_task(config, train_problems, held_out_problems)
        notes += task.notes
    return ConversationsAndTask(train, held_out, task, notes)


def _pop_problem_of_each_conversation(conversations: list[Example]) -> list[Example | None]:
    """
    Removes and returns each conversation's problem, which consists of a prompt and a right answer.

    All problems get the same columns. A problem is None if its conversation uses tools.
    """
    problems: list[Example | None] = [
        conversation.pop(chats.PROBLEM) for conversation in conversations
    ]
    columns: dict[str, None] = {}
    for problem in problems:
        columns |= dict.fromkeys(problem or {})
    return [
        None if problem is None else {name: problem.get(name) for name in columns}
        for problem in problems
    ]


def _make_task(
    config: Config,
    train_problems: Sequence[Example | None],
    held_out_problems: Sequence[Example | None],
) -> Task:
    """
    The task with the held-out problems, the verifier and the rewards of a run.

    A problem is None if its conversation uses tools.
    """
    data = config.data
    # The training problems help to choose a verifier, as in a GRPO run on the same file.
    task = own.TASK._replace(
        train=[problem for problem in train_problems if problem is not None],
        held_out=[problem for problem in held_out_problems if problem is not None],
    )
    task = own.with_verifier(task, data.verifier, bool(data.reward))
    if data.reward or task.rewards:
        task = tasks.set_user_rewards_and_weights(task, config)

    held_out = task.held_out
    is_rewarded_by_verifier = task.verifier in task.rewards.values()
    if is_rewarded_by_verifier and not isinstance(task.verifier, UserReward):
        held_out = list(filter(own.has_comparable_answer, held_out))
    if not task.rewards or not held_out:
        raise ValueError(
            f"--data {data.path} has no held-out prompt whose answer can be scored; name the "
            "right answers with --columns answer=COLUMN, or give --reward FILE.py:function, or "
            "leave --verifier and --reward out"
        )
    notes = _describe_answered_prompts_and_reward(task, held_out_problems, len(held_out))
    notes += own.note_unread_columns(task, data.columns)
    return task._replace(train=[], held_out=held_out, notes=[notes[0], *task.notes, *notes[1:]])


def _describe_answered_prompts_and_reward(
    task: Task, held_out_problems: Sequence[Example | None], num_answered: int
) -> list[str]:
    """Returns a line on how many prompts are answered or left out, and on the reward."""
    line = f"evaluations: {num_answered} held-out prompts are answered"
    num_with_tools = len(held_out_problems) - len(task.held_out)
    if num_with_tools:
        line += f", {num_with_tools} left out because their conversations use tools"
    num_incomparable = len(task.held_out) - num_answered
    if num_incomparable:
        line += f", {num_incomparable} left out because their answers cannot be compared"
    terms = [f"{weight:g} x {name}" for name, weight in task.reward_weights.items() if weight]
    return [f"{line}; the reward is {' + '.join(terms)}"]
