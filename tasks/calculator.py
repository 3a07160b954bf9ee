"""
The task `calculator`, in which the model may solve arithmetic problems with a calculator tool.

A run of the task with the bundled model `demo:tools` takes a few minutes.
"""

import ast
import random
import re
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from prompts.examples import Example
from rewards.formulas import OPERATORS
from tasks.task import Sides, Task

LONGEST = 200  # the largest number of characters in an expression


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
    odd = re.search(r"[^-+*/(). 0-9]|\* ?\*|/ ?/", text)
    if odd:
        raise ValueError(f"{odd[0]!r} is no number and none of + - * / ( )")
    # leading zeros are removed, because Python refuses numbers such as 05
    text = re.sub(r"(?<![\d.])0+(?=\d)", "", text)
    try:
        value = _evaluate(ast.parse(text, mode="eval").body)
    except ZeroDivisionError as error:
        raise ValueError("division by zero") from error
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError(
            "the expression lacks a number, a sign or one of a pair of parentheses"
        ) from error
    return str(value) if value.denominator == 1 else f"{float(value):.10g}"


def _evaluate(node: ast.expr) -> Fraction:
    """The value of a parsed expression. Raises SyntaxError for anything other than arithmetic."""
    match node:
        case ast.Constant(value=number):
            return Fraction(str(number))
        case ast.UnaryOp(op=sign, operand=operand):
            return OPERATORS[type(sign)](_evaluate(operand))
        case ast.BinOp(left=left, op=sign, right=right):
            return OPERATORS[type(sign)](_evaluate(left), _evaluate(right))
    raise SyntaxError


def make_problem(rng: random.Random) -> Example:
    """A random problem such as "What is 12 * 34 - 567?", with its answer."""
    a = rng.randrange(11, 100)
    b = rng.randrange(11, 100)
    c = rng.randrange(100, 1000)
    sign = rng.choice("+-")
    answer = a * b + (c if sign == "+" else -c)
    return {"prompt": f"What is {a} * {b} {sign} {c}?", "answer": str(answer)}


def correct(completions: Sequence[str], answer: Sequence[str], **_: Any) -> list[float]:
    """1 for a completion whose last line contains the answer and no other number, else 0."""
    rewards = []
    for text, right in zip(completions, answer, strict=True):
        numbers = re.findall(r"-?\d+(?:\.\d+)?", text.rpartition("\n")[2])
        rewards.append(float(numbers == [str(right)]))
    return rewards


def load_examples() -> Sides:
    """2,000 problems to train on and 256 held-out problems, which are the same in every run."""
    rng = random.Random(0)
    problems = {}
    for _ in range(2400):
        problem = make_problem(rng)
        problems[problem["prompt"]] = problem
    different = list(problems.values())
    return different[256:2256], different[:256]


TASK = Task(
    "calculator",
    {"correct": correct},
    {"correct": 1.0},
    verifier=correct,
    tools={"calculator": calculator},
)
