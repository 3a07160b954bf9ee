"""
Readers of what an answer states: a list, a formula. Neither evaluates text as Python.

They take the place of `eval` and of sympy's `parse_expr` where a scorer of a library would run the answer. A formula is
made of numbers, names, + - * / ** << >> and the functions below; every number in it stays below `LARGEST`.
"""

import ast
import functools
import importlib
import json
import operator
import re
import sys
from importlib.util import resolve_name
from pathlib import Path
from typing import Any

LONGEST = 2000  # characters of a formula
LARGEST = 10**300  # of any number on the way, and of a denominator
STEEPEST = 1000  # of an exponent, or of the places of a shift
FUNCTIONS = {"sqrt", "exp", "log", "ln", "Abs"} | {
    f"{arc}{name}{hyperbolic}"
    for arc in ("", "a")
    for name in ("sin", "cos", "tan", "sec", "csc", "cot")
    for hyperbolic in ("", "h")
}
OPERATORS: dict[type[ast.AST], Any] = {
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: operator.pow,
    ast.LShift: operator.lshift,
    ast.RShift: operator.rshift,
}


# what no formula needs, or what needs a library that is not there
_LEFT_OUT = re.compile(r"\.(codegen|control|external|interactive|plotting|printing|testing)\b")
_INNER_IMPORT = re.compile(r"^[ \t]+from +(\.*)([\w.]*) +import", re.MULTILINE)


def read_list(text: str) -> Any:
    """What a text like "[['A', 1], [0, 1]]" states, in Python's quotes or JSON's. ValueError where it is no such."""
    return json.loads(text.replace("'", '"'))


def read_formula(text: str, local_dict: dict[str, Any] | None = None, **_: Any) -> Any:
    """A formula's sympy expression, with symbols of `local_dict`. ValueError or SyntaxError for any other text."""
    if len(text) > LONGEST or not text.isascii():
        raise ValueError("no formula of plain characters")
    return _value(ast.parse(text.strip(), mode="eval").body, local_dict or {})


def _value(node: ast.expr, names: dict[str, Any]) -> Any:
    import sympy  # in a worker: it takes a second

    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            value = sympy.sympify(number)
        case ast.Name(id=name):
            value = names.get(
                name, {"pi": sympy.pi, "E": sympy.E, "I": sympy.I}.get(name, sympy.Symbol(name))
            )
        case ast.UnaryOp(op=op, operand=operand) if type(op) in OPERATORS:
            value = OPERATORS[type(op)](_value(operand, names))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
            first, second = _value(left, names), _value(right, names)
            if (
                isinstance(op, (ast.Pow, ast.LShift))
                and second.is_Number
                and not abs(second) <= STEEPEST
            ):
                raise ValueError("an exponent or a shift beyond all bounds")
            value = OPERATORS[type(op)](first, second)
        case ast.Call(func=ast.Name(id=name), args=[argument], keywords=[]) if name in FUNCTIONS:
            value = getattr(sympy, name)(_value(argument, names))
        case _:
            raise ValueError(f"no part of a formula: {type(node).__name__}")
    if value.is_Number and not (abs(value) < LARGEST and getattr(value, "q", 1) < LARGEST):
        raise ValueError("a number beyond all bounds")
    return value


def prepare_sympy() -> None:
    """
    Lets sympy work in this process without evaluating text, and without a file once it is sealed.

    Whatever it parses goes through `read_formula`. Monomials are multiplied by plain functions, where it would write
    Python code and run it. What its functions import when they are first called is imported now.
    """
    import sympy.parsing.sympy_parser
    from sympy.polys import monomials

    for module in (sympy, sympy.parsing, sympy.parsing.sympy_parser):
        module.parse_expr = read_formula
    plain = {
        name: getattr(monomials, f"monomial_{name}")
        for name in ("mul", "pow", "ldiv", "div", "lcm", "gcd")
    }
    for name, function in (plain | {"mulpow": _multiply_power}).items():
        setattr(monomials.MonomialOps, name, functools.partialmethod(lambda _, its: its, function))
    read: set[str] = set()
    while unread := {name for name in sys.modules if name.startswith("sympy.")} - read:
        read |= unread
        for module in (sys.modules[name] for name in unread):
            source = Path(f"{module.__file__}").read_text(encoding="utf-8")
            for dots, name in _INNER_IMPORT.findall(source):
                whole = resolve_name(dots + name, module.__package__)
                if whole.startswith("sympy.") and not _LEFT_OUT.search(whole):
                    importlib.import_module(whole)


def _multiply_power(a: tuple[int, ...], b: tuple[int, ...], k: int) -> tuple[int, ...]:
    return tuple(x + y * k for x, y in zip(a, b, strict=True))
