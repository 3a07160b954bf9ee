"""Arithmetic with a calculator, which the model may call: a few minutes with the third bundled model."""

import ast
import random
import re
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from problems.examples import Example
from problems.formulas import OPERATORS
from tasks.task import Sides, Task

LONGEST = 200  # characters of an expression


def calculator(expression: str) -> str:
    """
    Computes an expression of numbers, + - * / and parentheses.

    Args:
        expression: For example 12 * (3 + 4.5)
    """
    if len(expression) > LONGEST:
        raise ValueError(
            f"the expression has {len(expression)} characters, at most {LONGEST} are computed"
        )
    text = " ".join(expression.split())
    if odd := re.search(r"[^-+*/(). 0-9]|\* ?\*|/ ?/", text):
        raise ValueError(f"{odd[0]!r} is no number and none of + - * / ( )")
    try:
        value = _value(
            ast.parse(re.sub(r"(?<![\d.])0+(?=\d)", "", text), mode="eval").body
        )  # Python refuses 05
    except ZeroDivisionError as error:
        raise ValueError("division by zero") from error
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError(
            "the expression lacks a number, a sign or one of a pair of parentheses"
        ) from error
    return str(value) if value.denominator == 1 else f"{float(value):.10g}"


def _value(node: ast.expr) -> Fraction:
    match node:
        case ast.Constant(value=number):
            return Fraction(str(number))
        case ast.UnaryOp(op=sign, operand=operand):
            return OPERATORS[type(sign)](_value(operand))
        case ast.BinOp(left=left, op=sign, right=right):
            return OPERATORS[type(sign)](_value(left), _value(right))
    raise SyntaxError


def problem(rng: random.Random) -> Example:
    a, b, c = rng.randrange(11, 100), rng.randrange(11, 100), rng.randrange(100, 1000)
    sign = rng.choice("+-")
    return {
        "prompt": f"What is {a} * {b} {sign} {c}?",
        "answer": str(a * b + (c if sign == "+" else -c)),
    }


def correct(completions: Sequence[str], answer: Sequence[str], **_: Any) -> list[float]:
    """1 where the last line names one number, the right one, else 0."""
    said = [re.findall(r"-?\d+(?:\.\d+)?", text.rpartition("\n")[2]) for text in completions]
    return [float(numbers == [str(right)]) for numbers, right in zip(said, answer, strict=True)]


def bundled() -> Sides:
    rng = random.Random(0)
    problems = list({one["prompt"]: one for one in (problem(rng) for _ in range(2400))}.values())
    return problems[256:2256], problems[:256]


TASK = Task(
    "calculator",
    {"correct": correct},
    {"correct": 1.0},
    verifier=correct,
    tools={"calculator": calculator},
)
