"""
The messages with which a run's training prompts begin, for an exported model or a chat.

This file does not cover how a template renders them (prompts/chat_template.py).
"""

from typing import Any, NamedTuple

import tasks
from config import Config
from prompts import chat_template


class TrainedRun(NamedTuple):
    """A run's settings, and the messages that all its prompts begin with."""

    config: Config
    system: str | None
    shots: list[dict[str, Any]]  # the messages after the system prompt
    note: str  # a note for the user, see `shared_opening`; else empty

    @property
    def opening(self) -> list[dict[str, Any]]:
        """The system prompt and the messages after it."""
        if self.system is None:
            return self.shots
        return [{"role": "system", "content": self.system}, *self.shots]


def read_trained_run(config: Config) -> TrainedRun:
    """Reads from a run's data the messages with which its prompts begin."""
    opening, note = shared_opening(config)
    if opening and opening[0]["role"] == "system":
        return TrainedRun(config, opening[0]["content"], opening[1:], note)
    return TrainedRun(config, None, opening, note)


def shared_opening(config: Config) -> tuple[list[dict[str, Any]], str]:
    """
    The messages with which all prompts of a run begin, and a note for the user.

    The note says why the messages are unknown, or that there were several system prompts; else it
    is empty.
    """
    try:
        train, held_out = tasks.load_train_and_held_out(config)
    except ValueError as error:  # such as data that were moved
        return [], f"; the system prompt of training is unknown: {error}"
    opening, num_systems = chat_template.shared_opening(train or held_out)
    note = ""
    if num_systems > 1:
        note = f"; training had {num_systems} system prompts, and the template has none"
    return opening, note
