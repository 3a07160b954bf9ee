"""
Tells whether two LaTeX formulas are the same, with math-verify's grammar and sympy's numbers.

This code runs in sealed workers. A formula that the grammar cannot read to the end equals nothing.
Two expressions are the same if they have the same values, to 60 digits, at points chosen here. This
takes milliseconds, while a proof can take minutes.

This file does not cover the values of integrals, sums, limits and derivatives.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from rewards.formulas import prepare_sympy

CLOSE = 60  # the number of decimal digits in which equal values agree
# The largest relative distance between a decimal and the irrational number that it stands for.
DECIMALS_CLOSE = 5e-8
POINTS = 6  # the number of points at which values are compared
FEWEST_POINTS = 3  # the fewest points at which both expressions must have a value
MOST_NODES = 300  # the most nodes in an expression
LARGEST_EXPONENT = 10**5
LARGEST_FACTORIAL = 2000

Checker = Callable[[tuple[str, str]], bool]


def make_math_checker() -> Checker:
    """
    Makes the function that a worker runs: it tells whether two LaTeX answers are the same.
    """
    prepare_sympy()  # before the library imports sympy's parser
    _parse("\\frac{1}{2}")  # the first one loads the grammar, which takes longer than most answers

    def check(pair: tuple[str, str]) -> bool:
        right, stated = map(_parse, pair)
        return _are_same(right, stated)

    assert check(("\\frac{1}{2}", "0.5"))
    return check


class _List(tuple[Any, ...]):
    """Several values in a row without brackets."""


class _Relation(NamedTuple):
    left: Any
    sign: str  # = != < <= > >=
    right: Any

    @property
    def turned(self) -> "_Relation":
        return _Relation(self.right, _TURNED[self.sign], self.left)


class _Chain(tuple[_Relation, ...]):
    """An equation or inequality, or several in a row: 1 <= x < 2."""


_SIGNS = {"Eq": "=", "Ne": "!=", "Lt": "<", "Le": "<=", "Gt": ">", "Ge": ">="}
_TURNED = {"=": "=", "!=": "!=", "<": ">", "<=": ">=", ">": "<", ">=": "<="}


@functools.lru_cache(maxsize=2**10)
def _parse(latex: str) -> Any:
    """
    A formula as an expression, relations, a set or a list; None unless the grammar reads all of it.
    """
    from math_verify.parser import NormalizationConfig, latex2sympy

    form = NormalizationConfig(malformed_operators=True, boxed="none")
    try:
        parsed = latex2sympy(latex, is_real=True, normalization_config=form)
    except Exception:  # the library raises a plain Exception for a formula that it cannot read
        return None
    if not hasattr(parsed, "atoms") or _is_too_large(parsed):
        return None
    has_braces = "\\{" in latex
    return _normalize_parsed(parsed, has_braces)


def _normalize_parsed(parsed: Any, has_braces: bool) -> Any:
    """
    A parsed formula in the classes above. They keep the order of the parts; sympy does not.
    """
    import sympy
    from math_verify.parser import FiniteSet
    from sympy.core.relational import Relational

    if isinstance(parsed, sympy.And):
        parts = getattr(parsed, "_unsorted_args", parsed.args)
        chains = [_normalize_parsed(part, has_braces) for part in parts]
        if not all(isinstance(chain, _Chain) for chain in chains):
            return None
        return _Chain(chain[0] for chain in chains)
    if isinstance(parsed, Relational):
        left_side, right_side = parsed.args
        left = _normalize_parsed(left_side, has_braces)
        right = _normalize_parsed(right_side, has_braces)
        return _Chain([_Relation(left, _sign_of(parsed), right)])
    if isinstance(parsed, FiniteSet) and not has_braces:
        return _List(_normalize_parsed(part, has_braces) for part in parsed._unsorted_args)
    return _simplify_symbols(parsed)


def _sign_of(relation: Any) -> str:
    import sympy

    return next(sign for name, sign in _SIGNS.items() if isinstance(relation, getattr(sympy, name)))


def _is_too_large(expression: Any) -> bool:
    """
    Whether an expression has too many parts, or too large numbers, to be handled in milliseconds.
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


def _simplify_symbols(parsed: Any) -> Any:
    """
    The same expression, with symbols that differ only in their names, with decimals as fractions,
    and with i as the imaginary unit.
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


def _are_same(right: Any, stated: Any) -> bool:
    import sympy

    if right is None or stated is None:
        return False
    if isinstance(right, _Chain) or isinstance(stated, _Chain):
        return _are_same_relations(right, stated)
    if isinstance(right, _List) or isinstance(stated, _List):
        return _are_same_lists(right, stated)
    if right == stated:
        return not right.has(sympy.nan, sympy.zoo)
    if isinstance(right, sympy.Set) or isinstance(stated, sympy.Set):
        return _are_same_sets(right, stated)
    if isinstance(right, sympy.Tuple) or isinstance(stated, sympy.Tuple):
        are_tuples = isinstance(right, sympy.Tuple) and isinstance(stated, sympy.Tuple)
        return are_tuples and _are_same_in_order(right.args, stated.args)
    if isinstance(right, sympy.MatrixBase) or isinstance(stated, sympy.MatrixBase):
        are_matrices = isinstance(right, sympy.MatrixBase) and isinstance(stated, sympy.MatrixBase)
        if not are_matrices or right.shape != stated.shape:
            return False
        return _are_same_in_order(right.flat(), stated.flat())
    if isinstance(right, sympy.Expr) and isinstance(stated, sympy.Expr):
        return _have_same_values(right, stated)
    return False


def _are_same_in_order(rights: Sequence[Any], stateds: Sequence[Any]) -> bool:
    return len(rights) == len(stateds) and all(map(_are_same, rights, stateds))


def _are_same_in_any_order(rights: Sequence[Any], stateds: Sequence[Any]) -> bool:
    remaining = list(stateds)
    if len(rights) != len(remaining):
        return False
    for right in rights:
        place = _find_same(right, remaining)
        if place is None:
            return False
        del remaining[place]
    return True


def _find_same(right: Any, candidates: Sequence[Any]) -> int | None:
    """The place of the first candidate that is the same as the right answer; None if none is."""
    for place, candidate in enumerate(candidates):
        if _are_same(right, candidate):
            return place
    return None


def _are_same_lists(right: Any, stated: Any) -> bool:
    """
    Whether two answers are the same, if at least one of them is a list.

    The order matters if a list is compared with a tuple or with an open interval such as (1, 2).
    Otherwise it does not.
    """
    if not (isinstance(right, _List) and isinstance(stated, _List)):
        right_in_order = _ordered_elements(right)
        stated_in_order = _ordered_elements(stated)
        if right_in_order is not None and stated_in_order is not None:
            return _are_same_in_order(right_in_order, stated_in_order)
    right_elements = _elements(right)
    stated_elements = _elements(stated)
    if right_elements is None or stated_elements is None:
        return False
    return _are_same_in_any_order(right_elements, stated_elements)


def _elements(part: Any) -> Sequence[Any] | None:
    import sympy

    if isinstance(part, _List):
        return part
    return list(part.args) if isinstance(part, sympy.FiniteSet) else None


def _ordered_elements(part: Any) -> Sequence[Any] | None:
    import sympy

    if isinstance(part, _List):
        return part
    if isinstance(part, sympy.Tuple):
        return list(part.args)
    if isinstance(part, sympy.Interval) and part.left_open and part.right_open:
        return [part.start, part.end]
    return None


def _are_same_sets(right: Any, stated: Any) -> bool:
    import sympy

    if isinstance(right, sympy.FiniteSet) and isinstance(stated, sympy.FiniteSet):
        return _are_same_in_any_order(right.args, stated.args)
    if isinstance(right, sympy.Interval) and isinstance(stated, sympy.Interval):
        if right.left_open != stated.left_open or right.right_open != stated.right_open:
            return False
        return _are_same(right.start, stated.start) and _are_same(right.end, stated.end)
    if isinstance(right, sympy.Union) and isinstance(stated, sympy.Union):
        return _are_same_in_any_order(list(_members(right)), list(_members(stated)))
    for members, value in ((right, stated), (stated, right)):
        is_single = isinstance(members, sympy.FiniteSet) and len(members) == 1
        if is_single and isinstance(value, sympy.Expr):
            return _are_same(members.args[0], value)
    return type(right) is type(stated) and _are_same_in_order(right.args, stated.args)


def _members(union: Any) -> Iterator[Any]:
    import sympy

    for part in union.args:
        if isinstance(part, sympy.Union):
            yield from _members(part)
        else:
            yield part


# ---- relations


def _are_same_relations(right: Any, stated: Any) -> bool:
    """Whether two answers are the same, if at least one of them is a relation."""
    if not isinstance(right, _Chain) and _is_equation(stated):
        value = _value_of(stated)
        return value is not None and _are_same(right, value)
    if not isinstance(stated, _Chain) and _is_equation(right):
        return _is_name(right[0].left) and _are_same(right[-1].right, stated)
    if _is_equation(right) and _is_equation(stated):
        return _are_same_equations(right, stated)
    return _are_same_bounds(right, stated)


def _is_equation(part: Any) -> bool:
    return isinstance(part, _Chain) and all(relation.sign == "=" for relation in part)


def _is_name(side: Any) -> bool:
    """Whether one side of an equation is a name such as x or f(x), which the other side defines."""
    import sympy

    return isinstance(side, sympy.Symbol)


def _value_of(equation: _Chain) -> Any:
    """
    The value that an equation states; None if it states none.

    It is the last side of "x = 3", or of an identity such as "(x+1)^2 = x^2+2x+1".
    """
    value = equation[-1].right
    if _is_name(equation[0].left):
        return value
    is_identity = all(_are_same(value, relation.left) for relation in equation)
    return value if is_identity else None


def _are_same_equations(right: _Chain, stated: _Chain) -> bool:
    """
    Whether two equations have the same solutions because one is a multiple of the other.

    Names must agree. An equation that is not yet solved does not state an answer such as x = 3.
    """
    import sympy

    first = _Relation(right[0].left, "=", right[-1].right)
    second = _Relation(stated[0].left, "=", stated[-1].right)
    if _is_name(first.left) and not _is_name(second.left) and _is_name(second.right):
        second = second.turned
    if _is_name(first.left) and first.left == second.left:
        return _are_same(first.right, second.right)
    sides = (first.left, first.right, second.left, second.right)
    if not all(isinstance(side, sympy.Expr) for side in sides):
        return False
    is_solved = _is_name(first.left) and first.right.is_number
    if is_solved and not _is_name(second.left):
        return False
    return _is_multiple(first.left - first.right, second.left - second.right)


def _is_multiple(right: Any, stated: Any, is_positive: bool = False) -> bool:
    """
    Whether the quotient of two expressions is the same nonzero number at all points.

    is_positive: the number must be positive too.
    """
    quotients = []
    for point in _points([right, stated]):
        bottom = _value_at(right, point)
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


def _are_same_bounds(right: Any, stated: Any) -> bool:
    """Whether two inequalities, or an inequality and an interval, hold for the same numbers."""
    first_numbers = _numbers_of(right)
    second_numbers = _numbers_of(stated)
    if first_numbers and second_numbers:
        names = {first_numbers[0], second_numbers[0]} - {None}
        return len(names) <= 1 and _are_same(first_numbers[1], second_numbers[1])
    if not isinstance(right, _Chain) or not isinstance(stated, _Chain):
        return False
    if len(right) != len(stated):
        return False
    turned = [relation.turned for relation in reversed(stated)]
    return all(map(_is_same_relation, right, stated)) or all(map(_is_same_relation, right, turned))


def _is_same_relation(first: _Relation, second: _Relation) -> bool:
    import sympy

    sides = (first.left, first.right, second.left, second.right)
    if not all(isinstance(side, sympy.Expr) for side in sides):
        return False
    if first.sign == second.turned.sign and first.sign != second.sign:
        second = second.turned
    if first.sign != second.sign:
        return False
    is_directed = first.sign not in ("=", "!=")
    first_difference = first.left - first.right
    second_difference = second.left - second.right
    return _is_multiple(first_difference, second_difference, is_positive=is_directed)


def _numbers_of(part: Any) -> tuple[Any, Any] | None:
    """
    The name in a set or an inequality, and the numbers in it; None for anything else.

    An inequality has one name, and so has x \\in (1, 2). A set has no name.
    """
    import sympy

    if isinstance(part, sympy.Set):
        return None, part
    if not isinstance(part, _Chain):
        return None
    if _is_equation(part):
        is_named_set = isinstance(part[-1].right, sympy.Set) and _is_name(part[0].left)
        return (part[0].left, part[-1].right) if is_named_set else None
    sides = [side for relation in part for side in (relation.left, relation.right)]
    if not all(isinstance(side, sympy.Expr) for side in sides):
        return None
    names = set().union(*(side.free_symbols for side in sides))
    if len(names) != 1:
        return None
    name = names.pop()
    numbers: Any = sympy.Interval(-sympy.oo, sympy.oo)
    for relation in part:
        interval = _interval_of(relation, name)
        if interval is None:
            return None
        numbers = numbers.intersect(interval)
    return name, numbers


def _interval_of(relation: _Relation, name: Any) -> Any:
    """The interval that an inequality gives if it is linear in a name; else None."""
    import sympy

    if relation.sign in ("=", "!="):
        return None
    try:
        line = sympy.Poly(relation.left - relation.right, name)
        slope = line.coeff_monomial(name)
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


def _have_same_values(right: Any, stated: Any) -> bool:
    """
    Whether two expressions have the same values at all points where both have one.

    Distances are relative, so that small numbers are told apart as well as large ones. A decimal
    agrees with the irrational number that it stands for if the first eight digits agree.
    """
    import sympy

    undone = (sympy.Integral, sympy.Sum, sympy.Product, sympy.Limit, sympy.Derivative)
    if right.has(*undone) or stated.has(*undone):
        return False
    if right.is_infinite or stated.is_infinite:
        return bool(right == stated)
    has_names = bool(right.free_symbols | stated.free_symbols)
    is_approximate = not has_names and right.is_Rational != stated.is_Rational
    num_points = 0
    for point in _points([right, stated]):
        difference = _value_at(right - stated, point)
        values = [_value_at(part, point) for part in (right, stated)]
        if difference is None or None in values:
            continue
        size = max(map(abs, values))
        if abs(difference) > 10.0**-CLOSE * size:
            return is_approximate and bool(abs(difference) <= DECIMALS_CLOSE * size)
        num_points += 1
        if not point:
            return True
    return num_points >= FEWEST_POINTS


def _points(expressions: Sequence[Any]) -> Iterator[dict[Any, Any]]:
    """
    Values for the names in some expressions: first positive values, then also negative ones.

    Expressions without names get a single point without values.
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
    """An expression's value at a point, to 20 significant digits; None if it has no value there."""
    import sympy

    try:
        value = expression.xreplace(point).doit()
        value = sympy.N(value, 20, maxn=2 * CLOSE)
    except (ArithmeticError, ValueError, TypeError, AttributeError, NotImplementedError):
        return None
    if not value.is_number or value.has(sympy.nan, sympy.zoo, sympy.oo):
        return None
    return value
