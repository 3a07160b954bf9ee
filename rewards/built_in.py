"""
The built-in rewards, which suit any task. Users request them by name, as in --reward length:200.

This file does not cover users' reward functions (rewards/rewards.py) or the comparison of
completions with right answers (rewards/verifiers.py).
"""

import functools
import inspect
import re
from collections.abc import Callable, Sequence
from hashlib import sha256
from typing import Any

from prompts.examples import last_user_text
from rewards import form
from rewards.statements import marked_texts_outside_thoughts
from rewards.verifiers import math_correct

# A reward takes the prompts, the completions and the columns of the data as keyword arguments.
Reward = Callable[..., list[float]]


def length_reward(target: float, num_tokens: Sequence[int], **_: Any) -> list[float]:
    """
    The reward `length`: 0 for a completion of `target` tokens, and less for any other length.

    The reward falls linearly to -1 at 0 tokens and at twice the target. It stays at -1 for longer
    completions.
    """
    return [-min(abs(count - target) / target, 1.0) for count in num_tokens]


def soft_overlong_reward(
    max_len: float, cache: float, num_tokens: Sequence[int], **_: Any
) -> list[float]:
    """
    The reward `soft_overlong`, from equation 13 of the DAPO paper (arXiv:2503.14476).

    The reward is 0 up to max_len - cache tokens. From there, it falls linearly to -1 at max_len
    tokens, and stays at -1 for longer completions.
    """
    rewards = []
    for count in num_tokens:
        slope = (max_len - cache - count) / cache
        rewards.append(min(max(slope, -1.0), 0.0))
    return rewards


def exactly_one_marked_answer(completions: Sequence[str], **_: Any) -> list[float]:
    """
    The reward `boxed_once`: 1 for each completion with exactly one marked answer, else 0.

    `marked_texts_outside_thoughts` finds the marked answers.
    """
    return [float(len(marked_texts_outside_thoughts(text)) == 1) for text in completions]


def random_zero_or_one(completions: Sequence[str], prompts: Sequence[Any], **_: Any) -> list[float]:
    """
    The reward `random`, which is 0 or 1 at random.

    The reward serves as a control, because it does not depend on the quality of an answer. A value
    depends only on the row, the prompt and the completion, so a resumed run repeats the same
    values.
    """
    rows = enumerate(zip(prompts, completions, strict=True))
    return [float(sha256(repr(row).encode()).digest()[0] % 2) for row in rows]


def finished_well_formed_no_refusal(
    max_tokens: float,
    completions: Sequence[str],
    prompts: Sequence[Any],
    num_tokens: Sequence[int],
    **_: Any,
) -> list[float]:
    """
    The reward `format`: 1 for each completion that meets all conditions below, else 0.

    The completion has fewer than `max_tokens` tokens, does not begin with a refusal, is long
    enough, and does not repeat itself or copy the prompt
    (`form.is_long_enough_and_not_degenerate`).
    """
    rewards = []
    for text, prompt, count in zip(completions, prompts, num_tokens, strict=True):
        is_answer = not form.opens_with_refusal(text) and form.is_long_enough_and_not_degenerate(
            text, last_user_text(prompt)
        )
        rewards.append(float(count < max_tokens and is_answer))
    return rewards


# Users write the numbers for the parameters of type float after the name, as in length:200.
BUILT_IN: dict[str, Reward] = {
    "length": length_reward,
    "soft_overlong": soft_overlong_reward,
    "boxed_once": exactly_one_marked_answer,
    "math_verify": math_correct,
    "random": random_zero_or_one,
    "format": finished_well_formed_no_refusal,
}


def make_built_in_reward(spec: str) -> Reward:
    """
    The built-in reward that a specification such as length:200 names.

    Raises ValueError unless the specification has as many numbers as the reward has parameters,
    and all numbers are positive and whole.
    """
    name, *numbers = spec.split(":")
    reward = BUILT_IN[name]
    parameters = inspect.signature(reward).parameters
    number_names = [key for key, value in parameters.items() if value.annotation is float]
    are_positive = all(re.fullmatch("[1-9][0-9]{0,8}", number) for number in numbers)
    if len(numbers) != len(number_names) or not are_positive:
        placeholders = [f"<{key}>" for key in number_names]
        pattern = ":".join([name, *placeholders])
        raise ValueError(
            f"--reward is {spec!r}; write it as {pattern}, with positive whole numbers"
        )

    if not number_names:
        return reward
    return functools.partial(reward, **dict(zip(number_names, map(int, numbers), strict=True)))
