"""Rows of a table that fulfil a condition, such as "age >= 18 and sex == 'f'".

Conditions are in Python's syntax: comparisons of a column with constants or with another column, in
and not in a list, and, or, not. A column whose name is no word is col("blood pressure"). A missing
value fulfils no comparison. Nothing is evaluated as code.
"""

import ast
import operator
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xain_workloads.errors import DataError
from xain_workloads.names import class_name
from xain_workloads.schema import shown
from xain_workloads.table import Table

Rows = NDArray[np.bool_]

MAX_LENGTH = 1000
_COMPARISONS: Mapping[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}


def parse(condition: str) -> ast.expr:
    """The condition as a tree. Raises ValueError that says what is wrong."""
    if len(condition) > MAX_LENGTH:
        raise ValueError(f"it must have at most {MAX_LENGTH} characters")
    try:
        tree = ast.parse(condition.strip(), mode="eval").body
        _check(tree)
    except (SyntaxError, RecursionError, MemoryError, OverflowError):
        raise ValueError("it must be a condition such as age >= 18 and sex == 'f'") from None
    return tree


def filtered(table: Table, condition: str) -> Table:
    """The rows of a table that fulfil the condition; all of them for "".

    Raises DataError that names a column that is not there, or whose values cannot be compared.
    """
    if not condition.strip():
        return table
    try:
        rows = _Evaluation(table).rows(parse(condition))
    except ValueError as error:
        raise DataError(f"{table.origin}: [data] where: {error}") from None
    return table.subset(np.flatnonzero(rows))


def _check(node: ast.expr) -> None:
    """Raise ValueError unless all of the tree is in the language."""
    match node:
        case ast.BoolOp(values=parts):
            for part in parts:
                _check(part)
        case ast.UnaryOp(op=ast.Not(), operand=part):
            _check(part)
        case ast.Compare(left=left, ops=ops, comparators=others):
            for one in (left, *others):
                if not isinstance(one, ast.List | ast.Tuple):
                    _check_value(one)
            for op, other in zip(ops, others, strict=True):
                if isinstance(op, ast.In | ast.NotIn):
                    if not isinstance(other, ast.List | ast.Tuple):
                        raise ValueError("in needs a list, such as ward in ['A', 'B']")
                    for one in other.elts:
                        _constant(one)
                elif type(op) not in _COMPARISONS or isinstance(other, ast.List | ast.Tuple):
                    raise ValueError(f"{ast.unparse(node)!r} is no comparison")
        case _:
            raise ValueError(f"{ast.unparse(node)[:60]!r} is no condition")


def _check_value(node: ast.expr) -> None:
    if _name(node) is None:
        _constant(node)


def _name(node: ast.expr) -> str | None:
    match node:
        case ast.Name(id=name):
            return name
        case ast.Call(
            func=ast.Name(id="col"), args=[ast.Constant(value=str() as name)], keywords=[]
        ):
            return name
    return None


def _constant(node: ast.expr) -> float | str:
    match node:
        case ast.Constant(value=bool()):
            pass
        case ast.Constant(value=int() | float() as number):
            return float(number)
        case ast.Constant(value=str() as text):
            return class_name(text)  # as the columns have it: 'TRUE' is 'yes'
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)):
            return -float(number)
    raise ValueError(f"{ast.unparse(node)[:60]!r} is neither a column, a number nor a text")


class _Evaluation:
    """The conditions of one table."""

    def __init__(self, table: Table) -> None:
        self._table = table

    def rows(self, node: ast.expr) -> Rows:
        match node:
            case ast.BoolOp(op=joined, values=parts):
                combine = np.logical_and if isinstance(joined, ast.And) else np.logical_or
                found: Rows = combine.reduce([self.rows(part) for part in parts])
                return found
            case ast.UnaryOp(operand=part):
                return ~self.rows(part)
            case ast.Compare(left=left, ops=ops, comparators=others):
                found = np.ones(self._table.num_samples, np.bool_)
                for op, other in zip(ops, others, strict=True):
                    found &= self._compared(left, op, other)
                    left = other
                return found
        raise AssertionError("parse() has checked the tree")

    def _compared(self, left: ast.expr, op: ast.cmpop, right: ast.expr) -> Rows:
        one = self._values(left)
        if isinstance(right, ast.List | ast.Tuple):
            known = self._known(one)
            options = [_constant(item) for item in right.elts]
            kind = float if one.dtype.kind == "f" else str
            if not all(isinstance(option, kind) for option in options):
                raise ValueError(
                    f"{ast.unparse(left)} and {ast.unparse(right)[:60]} cannot be compared: the"
                    f" column has {'numbers' if kind is float else 'texts'}, and the list others"
                )
            inside = self._is_in(one, options)
            chosen: Rows = known & (inside if isinstance(op, ast.In) else ~inside)
            return chosen
        other = self._values(right)
        if (one.dtype.kind == "f") != (other.dtype.kind == "f"):
            raise ValueError(
                f"{ast.unparse(left)} and {ast.unparse(right)} cannot be compared: one is a number,"
                " the other a text"
            )
        known = self._known(one) & self._known(other)
        found = np.zeros(len(known), np.bool_)
        compare = _COMPARISONS[type(op)]
        found[known] = compare(one[known], other[known]).astype(np.bool_)
        return found

    @staticmethod
    def _is_in(values: NDArray[Any], options: list[float | str]) -> Rows:
        return np.array([value in options for value in values.tolist()], np.bool_)

    @staticmethod
    def _known(values: NDArray[Any]) -> Rows:
        if values.dtype.kind == "f":
            known: Rows = ~np.isnan(values)
            return known
        return np.array([value is not None for value in values.tolist()], np.bool_)

    def _values(self, node: ast.expr) -> NDArray[Any]:
        """(n,) values of a column, or a constant n times."""
        name = _name(node)
        if name is None:
            constant = _constant(node)
            dtype = np.float64 if isinstance(constant, float) else object
            return np.full(self._table.num_samples, constant, dtype=dtype)
        if name == self._table.target_name:
            target = self._table.target
            return target if target.dtype.kind == "f" else target.astype(object)
        if name not in self._table.values:
            names = (*self._table.values, self._table.target_name)
            raise ValueError(f"there is no column {name!r}; there are: {shown(names, 20)}")
        values: NDArray[Any] = self._table.values[name]
        return values
