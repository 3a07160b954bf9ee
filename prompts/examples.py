"""
Examples, their answers and their keys, and how errors quote values.

This file does not cover where examples come from (prompts/data.py).
"""

import difflib
import json
import reprlib
from collections.abc import Iterable
from hashlib import sha256
from typing import Any

# {"prompt": str or chat messages, "answer": str, further columns}; all of a source have equal keys
Example = dict[str, Any]
# arguments of users' rewards only
TRAINER = ("trainer_state", "log_extra", "log_metric")
# arguments of rewards besides columns
RESERVED = ("prompts", "completions", "completion_ids", "num_tokens", *TRAINER)
_reprlib = reprlib.Repr()
_reprlib.maxstring = 60
_reprlib.maxother = 60


def prompt_text(prompt: str | list[dict[str, str]]) -> str:
    """The user's question: the prompt itself, or its last user message."""
    if isinstance(prompt, str):
        return prompt
    return [message["content"] for message in prompt if message["role"] == "user"][-1]


def answers_of(example: Example) -> list[str]:
    """The right answers of an example as texts; of several each is right."""
    answer = example.get("answer")
    answers = answer if isinstance(answer, list) else [answer]
    return [str(text) for text in answers if text is not None and str(text).strip()]


def first_answer(example: Example) -> str:
    """A right answer of an example, "" if it has none."""
    return next(iter(answers_of(example)), "")


def prompt_key(example: Example) -> str:
    """
    A hash of the example's prompt without system messages.

    A text and a single user message with the same words have the same key.
    """
    prompt = example["prompt"]
    if isinstance(prompt, list):
        prompt = [message for message in prompt if message["role"] != "system"]
        if len(prompt) == 1 and prompt[0]["role"] == "user":
            prompt = prompt[0]["content"]
    return sha256(json.dumps(prompt, sort_keys=True).encode()).hexdigest()


def spread_evenly(examples: list[Any], limit: int | None) -> list[Any]:
    """At most `limit` examples, evenly spread, so from all categories. 0 and None keep all."""
    num = min(limit or len(examples), len(examples))
    return [examples[place * len(examples) // num] for place in range(num)]


def shorten_value(value: Any) -> str:
    """A value as one line of a few dozen characters, for error messages."""
    return _reprlib.repr(value)


def format_error(error: BaseException) -> str:
    """The type and the message of an error in one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def suggest_nearest(name: str, choices: Iterable[str]) -> str:
    """The words ", did you mean ...?" with the nearest choice; "" if none is near."""
    close = difflib.get_close_matches(name, list(choices), n=1)
    return f", did you mean {close[0]!r}?" if close else ""
