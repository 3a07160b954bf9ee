"""Examples: what a run asks, and how errors quote it. Left out: where it comes from (problems/data.py)."""

import difflib
import json
import reprlib
from collections.abc import Iterable
from hashlib import sha256
from typing import Any

Example = dict[
    str, Any
]  # {"prompt": str or chat messages, "answer": str, further columns}, the same in one source
TRAINER = ("trainer_state", "log_extra", "log_metric")  # arguments only for users' rewards
RESERVED = (
    "prompts",
    "completions",
    "completion_ids",
    "num_tokens",
    *TRAINER,
)  # reward arguments besides columns
_reprlib = reprlib.Repr()
_reprlib.maxstring = _reprlib.maxother = 60


def prompt_text(prompt: str | list[dict[str, str]]) -> str:
    """What the user asked: the string itself, or the last user message."""
    if isinstance(prompt, str):
        return prompt
    return [message["content"] for message in prompt if message["role"] == "user"][-1]


def answers_of(example: Example) -> list[str]:
    """The right answers of an example as texts: of several each is right."""
    answer = example.get("answer")
    answers = answer if isinstance(answer, list) else [answer]
    return [str(text) for text in answers if text is not None and str(text).strip()]


def first_answer(example: Example) -> str:
    """A right answer of an example, "" where it has none."""
    return next(iter(answers_of(example)), "")


def prompt_key(example: Example) -> str:
    """A key of the example's prompt alone, which is the same as text and as a message, with any system message."""
    prompt = example["prompt"]
    if isinstance(prompt, list):
        prompt = [message for message in prompt if message["role"] != "system"]
        prompt = (
            prompt[0]["content"] if len(prompt) == 1 and prompt[0]["role"] == "user" else prompt
        )
    return sha256(json.dumps(prompt, sort_keys=True).encode()).hexdigest()


def spread_evenly(examples: list[Any], limit: int | None) -> list[Any]:
    """At most `limit` examples, evenly spread and so over all categories; 0 and None keep all."""
    num = min(limit or len(examples), len(examples))
    return [examples[place * len(examples) // num] for place in range(num)]


def shorten_value(value: Any) -> str:
    """Any value as one line of a few dozen characters, for error messages."""
    return _reprlib.repr(value)


def format_error(error: BaseException) -> str:
    """Type and message of an error in one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def suggest_nearest(name: str, known: Iterable[str]) -> str:
    """The words ", did you mean ...?" with the nearest known name; empty if none is near."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f", did you mean {close[0]!r}?" if close else ""
