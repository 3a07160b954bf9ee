"""
Gets the prompts and answers of examples, and formats values for error messages.

This file does not cover how examples are loaded (prompts/data.py).
"""

import difflib
import json
import reprlib
from collections.abc import Iterable
from hashlib import sha256
from typing import Any

# {"prompt": a string or chat messages, "answer": a string or a list of strings, other columns}. All
# examples from one source have the same keys.
Example = dict[str, Any]
# arguments that are passed only to users' reward functions
TRAINER = ("trainer_state", "log_extra", "log_metric")
# arguments of reward functions that are not columns
RESERVED = ("prompts", "completions", "completion_ids", "num_tokens", *TRAINER)
_reprlib = reprlib.Repr()
_reprlib.maxstring = 60
_reprlib.maxother = 60


def last_user_text(prompt: str | list[dict[str, str]]) -> str:
    """The user's question: the prompt itself if it is a string, or else its last user message."""
    if isinstance(prompt, str):
        return prompt
    return [message["content"] for message in prompt if message["role"] == "user"][-1]


def answers_of(example: Example) -> list[str]:
    """
    An example's right answers as strings. If there are several answers, each of them is right by
    itself.
    """
    answer = example.get("answer")
    answers = answer if isinstance(answer, list) else [answer]
    return [str(text) for text in answers if text is not None and str(text).strip()]


def first_answer(example: Example) -> str:
    """An example's first right answer; "" if the example has no answer."""
    return next(iter(answers_of(example)), "")


def hash_prompt_without_system(example: Example) -> str:
    """
    A hash of an example's prompt, without its system messages.

    A prompt that is a string has the same hash as a single user message with the same text.
    """
    prompt = example["prompt"]
    if isinstance(prompt, list):
        prompt = [message for message in prompt if message["role"] != "system"]
        if len(prompt) == 1 and prompt[0]["role"] == "user":
            prompt = prompt[0]["content"]
    return sha256(json.dumps(prompt, sort_keys=True).encode()).hexdigest()


def key_of_problem(record: dict[str, Any]) -> str:
    """
    A text that names the problem of a record of `eval_answers.jsonl` or `evaluate.py --out`.

    Two runs have equal keys for the same problem even if one of them recorded the prompt as text,
    and the other one recorded the prompt as messages.
    """
    return f"{record['problem']} {hash_prompt_without_system(record)}"


def pick_evenly_spaced(items: list[Any], limit: int | None) -> list[Any]:
    """
    At most `limit` items, evenly spaced over the list. If the limit is 0 or None, returns all
    items.
    """
    num = min(limit or len(items), len(items))
    return [items[place * len(items) // num] for place in range(num)]


def shorten_value(value: Any) -> str:
    """The `repr` of a value, shortened for error messages."""
    return _reprlib.repr(value)


def format_error(error: BaseException) -> str:
    """The type and the message of an error, in one line of at most 300 characters."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def did_you_mean(name: str, choices: Iterable[str]) -> str:
    """
    The text ", did you mean 'X'?" with the choice that is most similar to the name; "" if no choice
    is similar.
    """
    close = difflib.get_close_matches(name, list(choices), n=1)
    return f", did you mean {close[0]!r}?" if close else ""


def copy_as_json(label: str, value: Any) -> Any:
    """
    Converts a value to JSON and back, and returns the resulting copy, which a checkpoint can store.

    label: the beginning of the error message, such as "get_state returned". Raises ValueError if
    JSON cannot express the value.
    """
    try:
        return json.loads(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{label} {shorten_value(value)}, which JSON cannot express ({format_error(error)}); "
            "use numbers, strings, lists and dictionaries"
        ) from error
