"""
Reads answers that are a list or a formula, without evaluating text as Python.

The readers replace `eval` and sympy's `parse_expr` where a library's scorer would run the answer. A
formula is made of numbers, names, + - * / ** << >> and the functions below. Every number in it
stays below `LARGEST`.

This file does not cover LaTeX formulas (rewards/equality.py).
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

LONGEST = 2000  # the most characters in a formula
LARGEST = 10**300  # the limit for every intermediate number, and for denominators
STEEPEST = 1000  # the largest exponent, or number of places in a shift
_TRIGONOMETRIC = (
    "sin cos tan sec csc cot sinh cosh tanh sech csch coth "
    "asin acos atan asec acsc acot asinh acosh atanh asech acsch acoth"
)
FUNCTIONS = {"sqrt", "exp", "log", "ln", "Abs", *_TRIGONOMETRIC.split()}
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


# sympy modules that no formula needs, or that need a library that is not installed.
_LEFT_OUT = re.compile(r"\.(codegen|control|external|interactive|plotting|printing|testing)\b")
_INNER_IMPORT = re.compile(r"^[ \t]+from +(\.*)([\w.]*) +import", re.MULTILINE)


def read_list(text: str) -> Any:
    """
    The list that a text such as "[['A', 1], [0, 1]]" holds, with quotes as in Python or JSON.

    Raises ValueError for any other text.
    """
    return json.loads(text.replace("'", '"'))


def read_formula(text: str, local_dict: dict[str, Any] | None = None, **_: Any) -> Any:
    """
    A formula as a sympy expression, with the symbols of `local_dict`.

    Raises ValueError or SyntaxError for any other text.
    """
    if len(text) > LONGEST or not text.isascii():
        raise ValueError("no formula of plain characters")
    return _value(ast.parse(text.strip(), mode="eval").body, local_dict or {})


def _value(node: ast.expr, names: dict[str, Any]) -> Any:
    import sympy  # here: it takes a second, in a worker

    constants = {"pi": sympy.pi, "E": sympy.E, "I": sympy.I}
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            value = sympy.sympify(number)
        case ast.Name(id=name):
            value = names.get(name, constants.get(name, sympy.Symbol(name)))
        case ast.UnaryOp(op=op, operand=operand) if type(op) in OPERATORS:
            value = OPERATORS[type(op)](_value(operand, names))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
            first = _value(left, names)
            second = _value(right, names)
            grows = isinstance(op, (ast.Pow, ast.LShift))
            if grows and second.is_Number and not abs(second) <= STEEPEST:
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
    Makes sympy work in this process without evaluating text, and without opening files later.

    The process may not open files once it is sealed. All text that sympy parses goes through
    `read_formula`. Plain functions multiply monomials, for which sympy would write and run Python
    code. The modules that sympy's functions would import at their first call are imported now.
    """
    import sympy.parsing.sympy_parser
    from sympy.polys import monomials

    for module in (sympy, sympy.parsing, sympy.parsing.sympy_parser):
        module.parse_expr = read_formula

    def make_operation(_: Any, operation: Any) -> Any:
        return operation

    operations = {"mulpow": _multiply_power}
    for name in ("mul", "pow", "ldiv", "div", "lcm", "gcd"):
        operations[name] = getattr(monomials, f"monomial_{name}")
    for name, operation in operations.items():
        method = functools.partialmethod(make_operation, operation)
        setattr(monomials.MonomialOps, name, method)

    imported: set[str] = set()
    while True:  # each import may bring further modules
        new_names = {name for name in sys.modules if name.startswith("sympy.")} - imported
        if not new_names:
            break
        imported |= new_names
        for name in new_names:
            _import_inner_modules(sys.modules[name])


def _import_inner_modules(module: Any) -> None:
    """Imports the sympy modules that a module's functions would import when they are called."""
    source = Path(f"{module.__file__}").read_text(encoding="utf-8")
    for dots, name in _INNER_IMPORT.findall(source):
        full_name = resolve_name(dots + name, module.__package__)
        if full_name.startswith("sympy.") and not _LEFT_OUT.search(full_name):
            importlib.import_module(full_name)


def _multiply_power(a: tuple[int, ...], b: tuple[int, ...], k: int) -> tuple[int, ...]:
    return tuple(x + y * k for x, y in zip(a, b, strict=True))
