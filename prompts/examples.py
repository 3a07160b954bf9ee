"""
Examples, their answers and their keys, and the way in which error messages quote values.

This file does not cover where examples come from (prompts/data.py).
"""

import difflib
import json
import reprlib
from collections.abc import Iterable
from hashlib import sha256
from typing import Any

# {"prompt": str or chat messages, "answer": str, further columns}
# All examples from one source have the same keys.
Example = dict[str, Any]
# arguments that only users' rewards get
TRAINER = ("trainer_state", "log_extra", "log_metric")
# reward arguments that are not columns
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
    """An example's right answers as texts. Each of several answers is right by itself."""
    answer = example.get("answer")
    answers = answer if isinstance(answer, list) else [answer]
    return [str(text) for text in answers if text is not None and str(text).strip()]


def first_answer(example: Example) -> str:
    """An example's first right answer; "" if it has none."""
    return next(iter(answers_of(example)), "")


def prompt_key(example: Example) -> str:
    """
    A hash of an example's prompt without system messages.

    A text prompt and a single user message with the same words have the same key.
    """
    prompt = example["prompt"]
    if isinstance(prompt, list):
        prompt = [message for message in prompt if message["role"] != "system"]
        if len(prompt) == 1 and prompt[0]["role"] == "user":
            prompt = prompt[0]["content"]
    return sha256(json.dumps(prompt, sort_keys=True).encode()).hexdigest()


def spread_evenly(examples: list[Any], limit: int | None) -> list[Any]:
    """At most `limit` examples, spread evenly over the list. With 0 or None, all examples."""
    num = min(limit or len(examples), len(examples))
    return [examples[place * len(examples) // num] for place in range(num)]


def shorten_value(value: Any) -> str:
    """A value as one line of a few dozen characters, for error messages."""
    return _reprlib.repr(value)


def format_error(error: BaseException) -> str:
    """The type and the message of an error in one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def suggest_nearest(name: str, choices: Iterable[str]) -> str:
    """The words ", did you mean ...?" with the nearest choice; "" if no choice is near."""
    close = difflib.get_close_matches(name, list(choices), n=1)
    return f", did you mean {close[0]!r}?" if close else ""
