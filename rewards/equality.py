"""
Tells whether two LaTeX formulas are equal, using math-verify's grammar and sympy's numbers.

This code runs in sealed worker processes. A formula that the grammar cannot read to the end does
not equal any formula. Two expressions count as equal if their values agree to 60 digits at a few
fixed points. Computing the values takes milliseconds, while proving that the expressions are equal
can take minutes.

This file does not cover the values of integrals, sums, limits and derivatives.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from rewards.formulas import patch_and_preload_sympy

CLOSE = 60  # equal values agree to this many decimal digits

# The largest relative difference between a decimal and the irrational number that it approximates.
DECIMALS_CLOSE = 5e-8
POINTS = 6  # the number of points at which values are compared
FEWEST_POINTS = 3  # the smallest number of points at which both expressions must have a value
MOST_NODES = 300  # the largest number of nodes in an expression
LARGEST_EXPONENT = 10**5
LARGEST_FACTORIAL = 2000

Checker = Callable[[tuple[str, str]], bool]


def make_math_checker() -> Checker:
    """
    Makes the function that a worker process runs to tell whether two LaTeX formulas are equal.
    """
    patch_and_preload_sympy()  # must come before math-verify imports sympy's parser
    _parse_latex("\\frac{1}{2}")  # loads the grammar, which takes longer than parsing

    def are_same_formulas(pair: tuple[str, str]) -> bool:
        expected, stated = map(_parse_latex, pair)
        return _are_same(expected, stated)

    assert are_same_formulas(("\\frac{1}{2}", "0.5"))
    return are_same_formulas


class _UnbracketedList(tuple[Any, ...]):
    """Several values separated by commas, without brackets around them."""


class _Relation(NamedTuple):
    """One equation or inequality with two sides."""

    left: Any
    sign: str  # = != < <= > >=
    right: Any

    @property
    def mirror(self) -> "_Relation":
        """The same relation with its sides swapped, such as 2 > x for x < 2."""
        return _Relation(self.right, _TURNED[self.sign], self.left)


class _RelationChain(tuple[_Relation, ...]):
    """One or more relations in a row, such as x = 3 or 1 <= x < 2."""


_SIGNS = {"Eq": "=", "Ne": "!=", "Lt": "<", "Le": "<=", "Gt": ">", "Ge": ">="}
_TURNED = {"=": "=", "!=": "!=", "<": ">", "<=": ">=", ">": "<", ">=": "<="}


@functools.lru_cache(maxsize=2**10)
def _parse_latex(latex: str) -> Any:
    """
    The expression, relations, set or list that a formula means.

    The result is None if the grammar cannot read the whole formula, or if the formula is too large.
    """
    from math_verify.parser import NormalizationConfig, latex2sympy

    form = NormalizationConfig(malformed_operators=True, boxed="none")
    try:
        parsed = latex2sympy(latex, is_real=True, normalization_config=form)
    except Exception:  # math-verify raises a plain Exception for a formula that it cannot read
        return None
    if not hasattr(parsed, "atoms") or _is_too_large(parsed):
        return None
    has_braces = "\\{" in latex
    return _to_own_classes(parsed, has_braces)


def _to_own_classes(parsed: Any, has_braces: bool) -> Any:
    """
    A formula parsed by sympy, with relations and lists converted to the classes of this file.

    The classes of this file keep the order of relations and list elements; sympy's classes do not.
    """
    import sympy
    from math_verify.parser import FiniteSet
    from sympy.core.relational import Relational

    if isinstance(parsed, sympy.And):
        parts = getattr(parsed, "_unsorted_args", parsed.args)
        chains = [_to_own_classes(part, has_braces) for part in parts]
        if not all(isinstance(chain, _RelationChain) for chain in chains):
            return None
        return _RelationChain(chain[0] for chain in chains)
    if isinstance(parsed, Relational):
        left_side, right_side = parsed.args
        left = _to_own_classes(left_side, has_braces)
        right = _to_own_classes(right_side, has_braces)
        return _RelationChain([_Relation(left, _sign_of_relation(parsed), right)])
    if isinstance(parsed, FiniteSet) and not has_braces:
        return _UnbracketedList(_to_own_classes(part, has_braces) for part in parsed._unsorted_args)
    return _unify_symbols_and_decimals(parsed)


def _sign_of_relation(relation: Any) -> str:
    import sympy

    return next(sign for name, sign in _SIGNS.items() if isinstance(relation, getattr(sympy, name)))


def _is_too_large(expression: Any) -> bool:
    """
    Whether an expression has so many parts, or such large numbers, that comparing it is slow.
    """
    import sympy

    for num, node in enumerate(sympy.preorder_traversal(expression)):
        if num > MOST_NODES:
            return True
        if isinstance(node, sympy.Pow):
            number = node.exp
            largest = LARGEST_EXPONENT
        elif isinstance(node, (sympy.factorial, sympy.binomial)):
            number = node.args[-1]
            largest = LARGEST_FACTORIAL
        else:
            continue
        if not number.free_symbols and not abs(sympy.N(number, 3)) <= largest:
            return True
    return False


def _unify_symbols_and_decimals(parsed: Any) -> Any:
    """
    The same expression, changed so that sympy treats equal names and equal numbers as equal.

    Every symbol stands for a real number, and symbols with the same name are the same symbol. The
    exception is i, the imaginary unit. Decimals become fractions.
    """
    import sympy
    from sympy.core.function import AppliedUndef

    changes: dict[Any, Any] = {}
    for symbol in parsed.atoms(sympy.Symbol):
        changes[symbol] = sympy.I if symbol.name == "i" else sympy.Symbol(symbol.name, real=True)
    for decimal in parsed.atoms(sympy.Float):
        changes[decimal] = sympy.Rational(str(decimal))
    for function in parsed.atoms(AppliedUndef):
        changes[function] = sympy.Symbol(str(function), real=True)
    if isinstance(parsed, sympy.MatrixBase):
        return parsed.applyfunc(lambda entry: entry.xreplace(changes))
    return parsed.xreplace(changes)


# ---- relations, sets, lists


def _are_same(expected: Any, stated: Any) -> bool:
    import sympy

    if expected is None or stated is None:
        return False
    if isinstance(expected, _RelationChain) or isinstance(stated, _RelationChain):
        return _are_same_if_one_is_relation(expected, stated)
    if isinstance(expected, _UnbracketedList) or isinstance(stated, _UnbracketedList):
        return _are_same_if_one_is_list(expected, stated)
    if expected == stated:
        return not expected.has(sympy.nan, sympy.zoo)
    if isinstance(expected, sympy.Set) or isinstance(stated, sympy.Set):
        return _are_same_if_one_is_set(expected, stated)
    if isinstance(expected, sympy.Tuple) or isinstance(stated, sympy.Tuple):
        are_tuples = isinstance(expected, sympy.Tuple) and isinstance(stated, sympy.Tuple)
        return are_tuples and _are_same_in_order(expected.args, stated.args)
    if isinstance(expected, sympy.MatrixBase) or isinstance(stated, sympy.MatrixBase):
        are_matrices = isinstance(expected, sympy.MatrixBase) and isinstance(
            stated, sympy.MatrixBase
        )
        if not are_matrices or expected.shape != stated.shape:
            return False
        return _are_same_in_order(expected.flat(), stated.flat())
    if isinstance(expected, sympy.Expr) and isinstance(stated, sympy.Expr):
        return _have_same_values(expected, stated)
    return False


def _are_same_in_order(expected_parts: Sequence[Any], stated_parts: Sequence[Any]) -> bool:
    return len(expected_parts) == len(stated_parts) and all(
        map(_are_same, expected_parts, stated_parts)
    )


def _are_same_in_any_order(expected_parts: Sequence[Any], stated_parts: Sequence[Any]) -> bool:
    remaining = list(stated_parts)
    if len(expected_parts) != len(remaining):
        return False
    for expected in expected_parts:
        place = _index_of_same(expected, remaining)
        if place is None:
            return False
        del remaining[place]
    return True


def _index_of_same(expected: Any, candidates: Sequence[Any]) -> int | None:
    """The index of the first candidate that equals the right answer; None if there is none."""
    for place, candidate in enumerate(candidates):
        if _are_same(expected, candidate):
            return place
    return None


def _are_same_if_one_is_list(expected: Any, stated: Any) -> bool:
    """
    Whether two answers are equal. At least one of the answers must be a list.

    The order of the elements matters only if a list is compared with a tuple, or with an open
    interval such as (1, 2).
    """
    if not (isinstance(expected, _UnbracketedList) and isinstance(stated, _UnbracketedList)):
        expected_in_order = _list_tuple_or_open_interval_elements(expected)
        stated_in_order = _list_tuple_or_open_interval_elements(stated)
        if expected_in_order is not None and stated_in_order is not None:
            return _are_same_in_order(expected_in_order, stated_in_order)
    expected_elements = _list_or_set_elements(expected)
    stated_elements = _list_or_set_elements(stated)
    if expected_elements is None or stated_elements is None:
        return False
    return _are_same_in_any_order(expected_elements, stated_elements)


def _list_or_set_elements(part: Any) -> Sequence[Any] | None:
    import sympy

    if isinstance(part, _UnbracketedList):
        return part
    return list(part.args) if isinstance(part, sympy.FiniteSet) else None


def _list_tuple_or_open_interval_elements(part: Any) -> Sequence[Any] | None:
    import sympy

    if isinstance(part, _UnbracketedList):
        return part
    if isinstance(part, sympy.Tuple):
        return list(part.args)
    if isinstance(part, sympy.Interval) and part.left_open and part.right_open:
        return [part.start, part.end]
    return None


def _are_same_if_one_is_set(expected: Any, stated: Any) -> bool:
    import sympy

    if isinstance(expected, sympy.FiniteSet) and isinstance(stated, sympy.FiniteSet):
        return _are_same_in_any_order(expected.args, stated.args)
    if isinstance(expected, sympy.Interval) and isinstance(stated, sympy.Interval):
        if expected.left_open != stated.left_open or expected.right_open != stated.right_open:
            return False
        return _are_same(expected.start, stated.start) and _are_same(expected.end, stated.end)
    if isinstance(expected, sympy.Union) and isinstance(stated, sympy.Union):
        return _are_same_in_any_order(list(_flatten_union(expected)), list(_flatten_union(stated)))
    for members, value in ((expected, stated), (stated, expected)):
        is_single = isinstance(members, sympy.FiniteSet) and len(members) == 1
        if is_single and isinstance(value, sympy.Expr):
            return _are_same(members.args[0], value)
    return type(expected) is type(stated) and _are_same_in_order(expected.args, stated.args)


def _flatten_union(union: Any) -> Iterator[Any]:
    import sympy

    for part in union.args:
        if isinstance(part, sympy.Union):
            yield from _flatten_union(part)
        else:
            yield part


# ---- relations


def _are_same_if_one_is_relation(expected: Any, stated: Any) -> bool:
    """Whether two answers are equal. At least one must be an equation or an inequality."""
    if not isinstance(expected, _RelationChain) and _is_equation(stated):
        value = _value_of_equation(stated)
        return value is not None and _are_same(expected, value)
    if not isinstance(stated, _RelationChain) and _is_equation(expected):
        return _is_symbol(expected[0].left) and _are_same(expected[-1].right, stated)
    if _is_equation(expected) and _is_equation(stated):
        return _are_same_equations(expected, stated)
    return _are_same_inequalities(expected, stated)


def _is_equation(part: Any) -> bool:
    return isinstance(part, _RelationChain) and all(relation.sign == "=" for relation in part)


def _is_symbol(side: Any) -> bool:
    """Whether one side of an equation is only a name, such as x or f(x)."""
    import sympy

    return isinstance(side, sympy.Symbol)


def _value_of_equation(equation: _RelationChain) -> Any:
    """
    The value that an equation states; None if the equation states no value.

    An equation states a value if its first side is only a name, as in x = 3, or if it is an
    identity, such as (x+1)^2 = x^2+2x+1. The value is the last side of the equation.
    """
    value = equation[-1].right
    if _is_symbol(equation[0].left):
        return value
    is_identity = all(_are_same(value, relation.left) for relation in equation)
    return value if is_identity else None


def _are_same_equations(expected: _RelationChain, stated: _RelationChain) -> bool:
    """
    Whether two equations have the same solutions because one is a multiple of the other.

    The variables in the equations must be the same. An unsolved equation such as 2x = 6 does not
    count as equal to the answer x = 3.
    """
    import sympy

    first = _Relation(expected[0].left, "=", expected[-1].right)
    second = _Relation(stated[0].left, "=", stated[-1].right)
    if _is_symbol(first.left) and not _is_symbol(second.left) and _is_symbol(second.right):
        second = second.mirror
    if _is_symbol(first.left) and first.left == second.left:
        return _are_same(first.right, second.right)
    sides = (first.left, first.right, second.left, second.right)
    if not all(isinstance(side, sympy.Expr) for side in sides):
        return False
    is_solved = _is_symbol(first.left) and first.right.is_number
    if is_solved and not _is_symbol(second.left):
        return False
    return _is_constant_multiple(first.left - first.right, second.left - second.right)


def _is_constant_multiple(expected: Any, stated: Any, is_positive: bool = False) -> bool:
    """
    Whether the quotient of two expressions is the same nonzero number at all sample points.

    is_positive: whether the quotient must also be positive.
    """
    quotients = []
    for point in _sample_points([expected, stated]):
        bottom = _value_at(expected, point)
        top = _value_at(stated, point)
        if bottom is None or top is None or bottom == 0 or top == 0:
            continue
        quotients.append(top / bottom)
    if len(quotients) < FEWEST_POINTS:
        return False
    if is_positive and not (quotients[0].is_real and quotients[0] > 0):
        return False
    first = quotients[0]
    return all(bool(abs(quotient - first) <= 1e-15 * abs(first)) for quotient in quotients)


def _are_same_inequalities(expected: Any, stated: Any) -> bool:
    """Whether two inequalities, or an inequality and an interval, hold for the same numbers."""
    first_numbers = _variable_and_solution_set(expected)
    second_numbers = _variable_and_solution_set(stated)
    if first_numbers and second_numbers:
        names = {first_numbers[0], second_numbers[0]} - {None}
        return len(names) <= 1 and _are_same(first_numbers[1], second_numbers[1])
    if not isinstance(expected, _RelationChain) or not isinstance(stated, _RelationChain):
        return False
    if len(expected) != len(stated):
        return False
    mirrored = [relation.mirror for relation in reversed(stated)]
    return all(map(_are_equivalent_up_to_factor, expected, stated)) or all(
        map(_are_equivalent_up_to_factor, expected, mirrored)
    )


def _are_equivalent_up_to_factor(first: _Relation, second: _Relation) -> bool:
    import sympy

    sides = (first.left, first.right, second.left, second.right)
    if not all(isinstance(side, sympy.Expr) for side in sides):
        return False
    if first.sign == second.mirror.sign and first.sign != second.sign:
        second = second.mirror
    if first.sign != second.sign:
        return False
    is_directed = first.sign not in ("=", "!=")
    first_difference = first.left - first.right
    second_difference = second.left - second.right
    return _is_constant_multiple(first_difference, second_difference, is_positive=is_directed)


def _variable_and_solution_set(part: Any) -> tuple[Any, Any] | None:
    """
    The variable in an inequality, and the set of numbers that satisfy the inequality.

    For x \\in (1, 2), the result is x and the interval. For a set without a variable, the result is
    None and the set. For everything else, the result is None.
    """
    import sympy

    if isinstance(part, sympy.Set):
        return None, part
    if not isinstance(part, _RelationChain):
        return None
    if _is_equation(part):
        is_named_set = isinstance(part[-1].right, sympy.Set) and _is_symbol(part[0].left)
        return (part[0].left, part[-1].right) if is_named_set else None
    sides = [side for relation in part for side in (relation.left, relation.right)]
    if not all(isinstance(side, sympy.Expr) for side in sides):
        return None
    variables = set().union(*(side.free_symbols for side in sides))
    if len(variables) != 1:
        return None
    variable = variables.pop()
    numbers: Any = sympy.Interval(-sympy.oo, sympy.oo)
    for relation in part:
        interval = _solve_linear_inequality(relation, variable)
        if interval is None:
            return None
        numbers = numbers.intersect(interval)
    return variable, numbers


def _solve_linear_inequality(relation: _Relation, variable: Any) -> Any:
    """The solutions of a linear inequality, as an interval; None if it is not linear."""
    import sympy

    if relation.sign in ("=", "!="):
        return None
    try:
        line = sympy.Poly(relation.left - relation.right, variable)
        slope = line.coeff_monomial(variable)
        intercept = line.coeff_monomial(1)
    except sympy.PolynomialError:
        return None
    if line.degree() != 1 or not (slope.is_real and intercept.is_real):
        return None
    is_strict = "=" not in relation.sign
    is_upper = relation.sign.startswith("<") == bool(slope > 0)
    bound = -intercept / slope
    if is_upper:
        return sympy.Interval(-sympy.oo, bound, True, is_strict)
    return sympy.Interval(bound, sympy.oo, is_strict, True)


# ---- values


def _have_same_values(expected: Any, stated: Any) -> bool:
    """
    Whether two expressions have equal values at all sample points where both have a value.

    The difference is divided by the larger value, so that small numbers are compared as precisely
    as large ones. A decimal equals the irrational number that it approximates if the first eight
    digits agree.
    """
    import sympy

    undone = (sympy.Integral, sympy.Sum, sympy.Product, sympy.Limit, sympy.Derivative)
    if expected.has(*undone) or stated.has(*undone):
        return False
    if expected.is_infinite or stated.is_infinite:
        return bool(expected == stated)
    has_names = bool(expected.free_symbols | stated.free_symbols)
    is_approximate = not has_names and expected.is_Rational != stated.is_Rational
    num_points = 0
    for point in _sample_points([expected, stated]):
        difference = _value_at(expected - stated, point)
        values = [_value_at(part, point) for part in (expected, stated)]
        if difference is None or None in values:
            continue
        size = max(map(abs, values))
        if abs(difference) > 10.0**-CLOSE * size:
            return is_approximate and bool(abs(difference) <= DECIMALS_CLOSE * size)
        num_points += 1
        if not point:
            return True
    return num_points >= FEWEST_POINTS


def _sample_points(expressions: Sequence[Any]) -> Iterator[dict[Any, Any]]:
    """
    The points at which expressions are compared. A point assigns a value to each variable.

    All values are positive at the first points, and some are negative at later points. Expressions
    without variables have a single, empty point.
    """
    import sympy

    names = sorted(set().union(*(expression.free_symbols for expression in expressions)), key=str)
    if not names:
        yield {}
        return
    for num in range(POINTS):
        point = {}
        for place, name in enumerate(names):
            top = 17 * place + 29 * num + 12
            bottom = 13 * place + 7 * num + 5
            value = sympy.Rational(top, bottom)
            is_negative = num >= POINTS // 2 and (num + place) % 2
            point[name] = -value if is_negative else value
        yield point


def _value_at(expression: Any, point: dict[Any, Any]) -> Any:
    """The value of an expression at a point, to 20 significant digits; None if it is undefined."""
    import sympy

    try:
        value = expression.xreplace(point).doit()
        value = sympy.N(value, 20, maxn=2 * CLOSE)
    except (ArithmeticError, ValueError, TypeError, AttributeError, NotImplementedError):
        return None
    if not value.is_number or value.has(sympy.nan, sympy.zoo, sympy.oo):
        return None
    return value
