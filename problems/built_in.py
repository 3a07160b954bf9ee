"""
Rewards that suit any task, by name: --reward length:200.

Left out: a user's functions (problems/rewards.py), and what compares with a right answer (problems/verifiers.py).
"""

import functools
import inspect
import re
from collections.abc import Callable, Sequence
from hashlib import sha256
from typing import Any

from problems import form
from problems.examples import prompt_text
from problems.verifiers import marks, math_correct

Reward = Callable[
    ..., list[float]
]  # called by keyword: prompts, completions and the columns of the data


def length(target: float, num_tokens: Sequence[int], **_: Any) -> list[float]:
    """0 at `target` tokens, falling linearly with the distance to -1 at none and at twice as many, or more."""
    return [-min(abs(count - target) / target, 1.0) for count in num_tokens]


def soft_overlong(max_len: float, cache: float, num_tokens: Sequence[int], **_: Any) -> list[float]:
    """0 up to max_len - cache tokens, falling linearly to -1 at max_len: DAPO, arXiv:2503.14476, equation 13."""
    return [min(max((max_len - cache - count) / cache, -1.0), 0.0) for count in num_tokens]


def boxed_once(completions: Sequence[str], **_: Any) -> list[float]:
    """1 where the completion marks an answer exactly once, in one of the ways that `verifiers.marks` reads, else 0."""
    return [float(len(marks(text)) == 1) for text in completions]


def coin(completions: Sequence[str], prompts: Sequence[Any], **_: Any) -> list[float]:
    """0 or 1 by chance, as a control: what a run with it changes, no reward has taught. A resumed run repeats it."""
    rows = enumerate(zip(prompts, completions, strict=True))
    return [float(sha256(repr(row).encode()).digest()[0] % 2) for row in rows]


def well_formed(
    max_tokens: float,
    completions: Sequence[str],
    prompts: Sequence[Any],
    num_tokens: Sequence[int],
    **_: Any,
) -> list[float]:
    """1 for an answer that ends before `max_tokens`, has the form of one and is no refusal, else 0."""
    rows = zip(completions, map(prompt_text, prompts), num_tokens, strict=True)
    kept = [
        num < max_tokens and not form.is_refusal(text) and form.has_form(text, asked)
        for text, asked, num in rows
    ]
    return list(map(float, kept))


BUILT_IN: dict[str, Reward] = {  # floats are the numbers of their specs
    "length": length,
    "soft_overlong": soft_overlong,
    "boxed_once": boxed_once,
    "math_verify": math_correct,
    "random": coin,
    "format": well_formed,
}


def make_built_in(spec: str) -> Reward:
    """One of `BUILT_IN` with the numbers of its spec, which must be positive and as many as it takes."""
    name, *numbers = spec.split(":")
    fn = BUILT_IN[name]
    needed = [
        key for key, one in inspect.signature(fn).parameters.items() if one.annotation is float
    ]
    if len(numbers) != len(needed) or not all(
        re.fullmatch("[1-9][0-9]{0,8}", number) for number in numbers
    ):
        wanted = ":".join([name, *(f"<{key}>" for key in needed)])
        raise ValueError(f"--reward {spec!r} is not {wanted}, with positive whole numbers")
    return (
        functools.partial(fn, **dict(zip(needed, map(int, numbers), strict=True))) if needed else fn
    )
