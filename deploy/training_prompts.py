"""
Finds the messages with which a run's training prompts begin, for an exported model or a chat.

prompts/chat_template.py renders these messages as text.
"""

from typing import Any, NamedTuple

import tasks
from config import Config
from prompts import chat_template


class ConfigWithOpeningMessages(NamedTuple):
    """The settings of a run, and the messages with which all prompts of the run begin."""

    config: Config
    system: str | None
    shots: list[dict[str, Any]]  # the messages after the system prompt
    note: str  # a note for the user from `load_shared_opening_and_warning`, or ""

    @property
    def opening_messages(self) -> list[dict[str, Any]]:
        """The system prompt, if there is one, and the messages after it."""
        if self.system is None:
            return self.shots
        return [{"role": "system", "content": self.system}, *self.shots]


def load_config_and_opening_messages(config: Config) -> ConfigWithOpeningMessages:
    """Load the prompts of a run, and find the messages with which all these prompts begin."""
    opening, note = load_shared_opening_and_warning(config)
    if opening and opening[0]["role"] == "system":
        return ConfigWithOpeningMessages(config, opening[0]["content"], opening[1:], note)
    return ConfigWithOpeningMessages(config, None, opening, note)


def load_shared_opening_and_warning(config: Config) -> tuple[list[dict[str, Any]], str]:
    """
    The messages with which all prompts of a run begin, and a note for the user.

    The note is empty unless the messages are unknown or there were several system prompts.
    """
    try:
        train, held_out = tasks.load_train_and_held_out(config)
    except ValueError as error:  # for example, because the data has been moved
        return [], f"; the system prompt of training is unknown: {error}"
    opening, num_systems = chat_template.shared_opening_and_num_systems(train or held_out)
    note = ""
    if num_systems > 1:
        note = f"; training had {num_systems} system prompts, so none of them is used"
    return opening, note
