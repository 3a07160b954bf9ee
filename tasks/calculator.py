"""Arithmetic with a calculator, which the model may call: a few minutes with the third bundled model."""

import operator
import random
import re
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from problems.examples import Example
from tasks.task import Sides, Task

LONGEST = 200  # characters of an expression
_TOKEN = re.compile(r"\s*(?:(\d+(?:\.\d+)?|\.\d+)|([-+*/()]))")
_RANK = {"+": 1, "-": 1, "*": 2, "/": 2, "~": 3}  # ~ is the minus of one number


def calculator(expression: str) -> str:
    """
    Computes an expression of numbers, + - * / and parentheses.

    Args:
        expression: For example 12 * (3 + 4.5)
    """
    if len(expression) > LONGEST:
        raise ValueError(f"the expression has {len(expression)} characters, at most {LONGEST} are computed")
    values, signs, place, after_value = list[Fraction](), list[str](), 0, False
    while expression[place:].strip():
        found = _TOKEN.match(expression, place)
        if found is None:
            raise ValueError(f"{expression[place:].strip()[:20]!r} is no number and none of + - * / ( )")
        place, (number, sign) = found.end(), found.groups()
        if (number or sign == "(") if after_value else sign in ("+", "*", "/", ")"):
            raise ValueError(f"{found[0].strip()!r} stands where {'a sign' if after_value else 'a number'} is missing")
        if number:
            values.append(Fraction(number))
            after_value = True
        elif sign == "(":
            signs.append(sign)
        elif sign == ")":
            while signs and signs[-1] != "(":
                _apply(signs.pop(), values)
            if not signs:
                raise ValueError("a ) closes nothing")
            signs.pop()
        else:
            sign = sign if after_value else "~"
            while signs and sign != "~" and _RANK.get(signs[-1], 0) >= _RANK[sign]:
                _apply(signs.pop(), values)
            signs.append(sign)
            after_value = False
    if not after_value:
        raise ValueError("the expression ends where a number is missing")
    while signs:
        if signs[-1] == "(":
            raise ValueError("a ( is not closed")
        _apply(signs.pop(), values)
    return str(values[0]) if values[0].denominator == 1 else f"{float(values[0]):.10g}"


def _apply(sign: str, values: list[Fraction]) -> None:
    right = values.pop()
    if sign == "~":
        values.append(-right)
        return
    left = values.pop()
    if sign == "/" and right == 0:
        raise ValueError("division by zero")
    values.append({"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}[sign](left, right))


def problem(rng: random.Random) -> Example:
    a, b, c = rng.randrange(11, 100), rng.randrange(11, 100), rng.randrange(100, 1000)
    sign = rng.choice("+-")
    return {"prompt": f"What is {a} * {b} {sign} {c}?", "answer": str(a * b + (c if sign == "+" else -c))}


def correct(completions: Sequence[str], answer: Sequence[str], **_: Any) -> list[float]:
    """1 where the last line names one number, the right one, else 0."""
    said = [re.findall(r"-?\d+(?:\.\d+)?", text.rpartition("\n")[2]) for text in completions]
    return [float(numbers == [str(right)]) for numbers, right in zip(said, answer, strict=True)]


def bundled() -> Sides:
    rng = random.Random(0)
    problems = list({one["prompt"]: one for one in (problem(rng) for _ in range(2400))}.values())
    return problems[256:2256], problems[:256]


TASK = Task("calculator", {"correct": correct}, {"correct": 1.0}, verifier=correct, tools=(calculator,))
