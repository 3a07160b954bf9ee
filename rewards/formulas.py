"""
Reads answers that are lists or formulas, without running text as Python code.

`parse_json_with_single_quotes` and `formula_to_sympy` replace `eval` and sympy's `parse_expr` where
a library's scorer would run the answer as code. A formula consists of numbers, names, the
operators + - * / ** << >>, and the functions in `FUNCTIONS`. Every number in a formula must be
smaller than `LARGEST`.

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

LONGEST = 2000  # the largest number of characters in a formula
LARGEST = 10**300  # every intermediate result, and its denominator, must be smaller than this
STEEPEST = 1000  # the largest exponent, and the largest number of bits in a shift
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


# The sympy modules that formulas do not need, or that need a library that is not installed.
_LEFT_OUT = re.compile(r"\.(codegen|control|external|interactive|plotting|printing|testing)\b")
_INNER_IMPORT = re.compile(r"^[ \t]+from +(\.*)([\w.]*) +import", re.MULTILINE)


def parse_json_with_single_quotes(text: str) -> Any:
    """
    The value of a JSON text whose quotes may be single, such as "[['A', 1], [0, 1]]".

    Raises ValueError if the text is not JSON apart from its quotes.
    """
    return json.loads(text.replace("'", '"'))


def formula_to_sympy(text: str, local_dict: dict[str, Any] | None = None, **_: Any) -> Any:
    """
    The sympy expression that a formula denotes; `local_dict` maps names to symbols.

    Raises ValueError or SyntaxError if the text is not a formula.
    """
    if len(text) > LONGEST or not text.isascii():
        raise ValueError(f"a formula must be ASCII text of at most {LONGEST} characters")
    return _node_to_sympy(ast.parse(text.strip(), mode="eval").body, local_dict or {})


def _node_to_sympy(node: ast.expr, symbols: dict[str, Any]) -> Any:
    import sympy  # imported here, since the import takes a second and only workers need it

    constants = {"pi": sympy.pi, "E": sympy.E, "I": sympy.I}
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            value = sympy.sympify(number)
        case ast.Name(id=name):
            value = symbols.get(name, constants.get(name, sympy.Symbol(name)))
        case ast.UnaryOp(op=op, operand=operand) if type(op) in OPERATORS:
            value = OPERATORS[type(op)](_node_to_sympy(operand, symbols))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
            first = _node_to_sympy(left, symbols)
            second = _node_to_sympy(right, symbols)
            grows = isinstance(op, (ast.Pow, ast.LShift))
            if grows and second.is_Number and not abs(second) <= STEEPEST:
                raise ValueError(f"the exponent or shift {second} is larger than {STEEPEST}")
            value = OPERATORS[type(op)](first, second)
        case ast.Call(func=ast.Name(id=name), args=[argument], keywords=[]) if name in FUNCTIONS:
            value = getattr(sympy, name)(_node_to_sympy(argument, symbols))
        case _:
            raise ValueError(
                f"a formula cannot contain Python syntax of the kind {type(node).__name__}"
            )
    if value.is_Number and not (abs(value) < LARGEST and getattr(value, "q", 1) < LARGEST):
        raise ValueError("a number in the formula, or its denominator, is too large")
    return value


def patch_and_preload_sympy() -> None:
    """
    Prepares sympy for a sealed process, in which sympy can neither run text as code nor open files.

    From now on, sympy parses all text with `formula_to_sympy`. It calculates with monomials by
    calling ordinary functions, and no longer generates and runs Python code for them. Modules that
    sympy would import only when one of its functions is first called are imported now.
    """
    import sympy.parsing.sympy_parser
    from sympy.polys import monomials

    for module in (sympy, sympy.parsing, sympy.parsing.sympy_parser):
        module.parse_expr = formula_to_sympy

    def return_operation(_: Any, operation: Any) -> Any:
        return operation

    operations = {"mulpow": _multiply_monomial_by_power}
    for name in ("mul", "pow", "ldiv", "div", "lcm", "gcd"):
        operations[name] = getattr(monomials, f"monomial_{name}")
    for name, operation in operations.items():
        method = functools.partialmethod(return_operation, operation)
        setattr(monomials.MonomialOps, name, method)

    imported: set[str] = set()
    while True:  # an imported module may import further modules
        new_names = {name for name in sys.modules if name.startswith("sympy.")} - imported
        if not new_names:
            break
        imported |= new_names
        for name in new_names:
            _import_lazy_sympy_modules(sys.modules[name])


def _import_lazy_sympy_modules(module: Any) -> None:
    """Imports the sympy modules that the functions of a module import only when they are called."""
    source = Path(f"{module.__file__}").read_text(encoding="utf-8")
    for dots, name in _INNER_IMPORT.findall(source):
        full_name = resolve_name(dots + name, module.__package__)
        if full_name.startswith("sympy.") and not _LEFT_OUT.search(full_name):
            importlib.import_module(full_name)


def _multiply_monomial_by_power(a: tuple[int, ...], b: tuple[int, ...], k: int) -> tuple[int, ...]:
    return tuple(x + y * k for x, y in zip(a, b, strict=True))
