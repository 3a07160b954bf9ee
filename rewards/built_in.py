"""
Built-in rewards that suit any task, and are requested by name, as in --reward length:200.

This file does not cover users' functions (rewards/rewards.py) or the comparison with right answers
(rewards/verifiers.py).
"""

import functools
import inspect
import re
from collections.abc import Callable, Sequence
from hashlib import sha256
from typing import Any

from prompts.examples import prompt_text
from rewards import form
from rewards.statements import marked_texts
from rewards.verifiers import math_correct

# It is called by keyword: prompts, completions and the columns of the data.
Reward = Callable[..., list[float]]


def length(target: float, num_tokens: Sequence[int], **_: Any) -> list[float]:
    """
    0 for `target` tokens, falling linearly with the distance from the target.

    It is -1 for no tokens, and for twice the target or more.
    """
    return [-min(abs(count - target) / target, 1.0) for count in num_tokens]


def soft_overlong(max_len: float, cache: float, num_tokens: Sequence[int], **_: Any) -> list[float]:
    """
    0 for at most max_len - cache tokens, then falling linearly to -1 for max_len tokens.

    Source: DAPO, arXiv:2503.14476, equation 13.
    """
    rewards = []
    for count in num_tokens:
        slope = (max_len - cache - count) / cache
        rewards.append(min(max(slope, -1.0), 0.0))
    return rewards


def boxed_once(completions: Sequence[str], **_: Any) -> list[float]:
    """1 for a completion in which `marked_texts` finds exactly one mark, else 0."""
    return [float(len(marked_texts(text)) == 1) for text in completions]


def coin(completions: Sequence[str], prompts: Sequence[Any], **_: Any) -> list[float]:
    """
    0 or 1 at random, as a control: if a run with this reward changes, no reward taught the change.

    A resumed run repeats the same values, which depend on the row, the prompt and the completion.
    """
    rows = enumerate(zip(prompts, completions, strict=True))
    return [float(sha256(repr(row).encode()).digest()[0] % 2) for row in rows]


def well_formed(
    max_tokens: float,
    completions: Sequence[str],
    prompts: Sequence[Any],
    num_tokens: Sequence[int],
    **_: Any,
) -> list[float]:
    """1 for an answer that ends before `max_tokens`, has form and is no refusal, else 0."""
    rewards = []
    for text, prompt, count in zip(completions, prompts, num_tokens, strict=True):
        is_answer = not form.is_refusal(text) and form.has_form(text, prompt_text(prompt))
        rewards.append(float(count < max_tokens and is_answer))
    return rewards


# The parameters of type float are the numbers that the user writes after the name.
BUILT_IN: dict[str, Reward] = {
    "length": length,
    "soft_overlong": soft_overlong,
    "boxed_once": boxed_once,
    "math_verify": math_correct,
    "random": coin,
    "format": well_formed,
}


def make_built_in(spec: str) -> Reward:
    """
    The built-in reward that a spec such as length:200 names.

    Raises ValueError unless the spec has as many positive whole numbers as the reward takes.
    """
    name, *numbers = spec.split(":")
    reward = BUILT_IN[name]
    parameters = inspect.signature(reward).parameters
    number_names = [key for key, value in parameters.items() if value.annotation is float]
    are_positive = all(re.fullmatch("[1-9][0-9]{0,8}", number) for number in numbers)
    if len(numbers) != len(number_names) or not are_positive:
        placeholders = [f"<{key}>" for key in number_names]
        pattern = ":".join([name, *placeholders])
        raise ValueError(f"--reward {spec!r} is not {pattern}, with positive whole numbers")

    if not number_names:
        return reward
    return functools.partial(reward, **dict(zip(number_names, map(int, numbers), strict=True)))
