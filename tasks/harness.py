"""
The examples and the reward of a task whose episodes an outside harness plays.

The harness lists its examples in its first message. An example has a `prompt`, which is a text or
chat messages, and may have a `system` message, a `name`, an `answer` and a `category`. The message
may also limit the number of episodes that the harness plays at the same time.
"""

import json
from collections.abc import Callable
from typing import Any

from prompts.data import check_system_and_category
from prompts.examples import Example, shorten_value
from prompts.messages import check_message_order, read_messages, refuse_blank_or_broken_text
from rewards.rewards import UserReward
from serving.harness import POLL_SECONDS, REWARD_NAME, Harness, HarnessEnded, get_or_start_harness
from tasks.task import Task

COLUMNS = ("system", "name", "answer", "category")  # optional columns


def load_harness_task(task: Task, command: str, timeout: float) -> Task:
    """
    Starts the harness with `command`, and returns a task that holds the harness and its examples.

    timeout: the number of seconds within which the harness must list its examples.

    Raises ValueError if the harness does not start, or lists no examples to train on.
    """
    harness = get_or_start_harness(command)
    if harness.examples is None:
        try:
            harness.examples = receive_examples(harness, timeout)
        except HarnessEnded:
            harness.close()
            raise
    train, held_out = harness.examples["train"], harness.examples["held_out"]
    return task._replace(
        train=train,
        held_out=held_out,
        harness=harness,
        notes=[
            f"harness: {len(train)} examples to train on, {len(held_out)} held out; its output is "
            f"in {harness.log}"
        ],
    )


def receive_examples(harness: Harness, timeout: float) -> dict[str, list[Example]]:
    """
    Waits for the first message of a harness, and returns the examples in this message by split.

    Also sets `harness.most_at_once` to the limit in the message, if there is one.
    """
    waited_s = 0.0
    message = None
    while message is None:
        message = harness.take_event(POLL_SECONDS)
        waited_s += POLL_SECONDS
        if message is None and waited_s > timeout:
            raise HarnessEnded(
                f"--env-server {harness.command}: the harness listed no examples within "
                f"{timeout:g} s (--env-timeout); its output is in {harness.log}"
            )
    if not isinstance(message, dict) or message["type"] != "ready":
        harness.refuse_message(
            message if isinstance(message, dict) else {}, "its first message must be `ready`"
        )
    at_once = message.get("at_once")
    if at_once is not None and (type(at_once) is not int or at_once < 1):
        harness.refuse_message({"at_once": at_once}, "at_once must be a positive integer")
    harness.most_at_once = at_once
    examples = {}
    for split in ("train", "held_out"):
        rows = message.get(split)
        if not isinstance(rows, list):
            harness.refuse_message({split: rows}, f"{split} must be a list of examples")
        examples[split] = [
            read_example(harness, split, number, row) for number, row in enumerate(rows)
        ]
    if not examples["train"] and not examples["held_out"]:
        harness.refuse_message(message, "it has no examples")
    return examples


def read_example(harness: Harness, split: str, number: int, row: Any) -> Example:
    """Checks and converts an example of the harness. Raises HarnessEnded if it is wrong."""
    try:
        return read_columns(row) | {"split": split, "number": number}
    except ValueError as error:
        harness.refuse_message({split: row}, f"example {number} of {split}: {error}")


def read_columns(row: Any) -> Example:
    """The columns of an example. Raises ValueError if one is missing or wrong."""
    if not isinstance(row, dict):
        raise ValueError(f"{shorten_value(row)} is not a JSON object")
    prompt = row.get("prompt")
    if isinstance(prompt, list):
        prompt = read_messages("prompt", prompt)
        check_message_order("prompt", prompt)
    else:
        refuse_blank_or_broken_text("prompt", prompt)
    example: Example = {"prompt": prompt}
    for name in COLUMNS:
        example[name] = row.get(name)
    if example["name"] is not None:
        refuse_blank_or_broken_text("name", example["name"])
    check_system_and_category(example, prompt)
    try:
        json.dumps(example["answer"], allow_nan=False)
    except ValueError as error:
        raise ValueError("answer contains NaN or Infinity; send null instead") from error
    return example


def make_harness_reward() -> UserReward:
    """Makes the reward function that returns the harness's rewards and logs its metrics."""

    def environment(
        environments: list[Any], earned: list[tuple[str, Any]], log_metric: Callable[..., None]
    ) -> list[Any]:
        for outcome in environments:
            for name, value in outcome.metrics.items() if outcome else ():
                log_metric(name, value)
        return [value for _, value in earned]

    return UserReward(REWARD_NAME, environment)
