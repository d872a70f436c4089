"""Rows of a table that fulfil a condition, such as "age >= 18 and sex == 'f'".

Conditions are in Python's syntax: comparisons of a column with constants or with another column, in
and not in a list, and, or, not. A column whose name is no word is col("blood pressure"). A missing
value fulfils no comparison. Nothing is evaluated as code.
"""

import ast
import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Any
from unicodedata import normalize

import numpy as np
from numpy.typing import NDArray

from xain_workloads.errors import DataError
from xain_workloads.names import class_name, folded
from xain_workloads.tables.schema import shown
from xain_workloads.tables.table import Table

Rows = NDArray[np.bool_]
Condition = Callable[[Table], Rows]
Values = Callable[[Table], NDArray[Any]]

MAX_LENGTH = 1000
_COMPARISONS: Mapping[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}


def parse(condition: str) -> Condition:
    """Compile a condition to a function of a table that tells of each row whether it fulfils it.

    Both raise ValueError: for a wrong condition, and for a missing column or unlike values.
    """
    if len(condition) > MAX_LENGTH:
        raise ValueError(f"it must have at most {MAX_LENGTH} characters")
    try:
        return _condition(ast.parse(condition.strip(), mode="eval").body)
    except (SyntaxError, RecursionError, MemoryError, OverflowError):
        raise ValueError("it must be a condition such as age >= 18 and sex == 'f'") from None


def filtered(table: Table, condition: str) -> Table:
    """The rows of a table that fulfil the condition; all of them for "". Raises DataError that
    names a column that is not there, or whose values cannot be compared."""
    if not condition.strip():
        return table
    try:
        rows = parse(condition)(table)
    except ValueError as error:
        raise DataError(f"{table.origin}: [data] where: {error}") from None
    return table.subset(np.flatnonzero(rows))


def _condition(node: ast.expr) -> Condition:
    """Compile and, or, not and comparisons of a syntax tree. Raises ValueError for other nodes."""
    match node:
        case ast.BoolOp(op=op, values=parts):
            return _joined(isinstance(op, ast.And), map(_condition, parts))
        case ast.UnaryOp(op=ast.Not(), operand=part):
            fulfilled = _condition(part)
            return lambda table: ~fulfilled(table)
        case ast.Compare(left=left, ops=ops, comparators=others):
            pairs = zip((left, *others), ops, others, strict=False)
            return _joined(True, (_comparison(*pair) for pair in pairs))
    raise ValueError(f"{ast.unparse(node)[:60]!r} is no condition")


def _joined(is_all: bool, conditions: Iterable[Condition]) -> Condition:
    known = tuple(conditions)
    join = np.logical_and if is_all else np.logical_or
    return lambda table: np.asarray(join.reduce([one(table) for one in known]))


def _comparison(left: ast.expr, op: ast.cmpop, right: ast.expr) -> Condition:
    """Compile a comparison; rows with a missing value do not fulfil it. Raises ValueError."""
    if isinstance(op, ast.In | ast.NotIn):
        if not isinstance(right, ast.List | ast.Tuple) or not right.elts:
            raise ValueError("in needs a list, such as ward in ['A', 'B']")
        each: ast.cmpop = ast.Eq() if isinstance(op, ast.In) else ast.NotEq()
        comparisons = (_comparison(left, each, one) for one in right.elts)
        return _joined(isinstance(op, ast.NotIn), comparisons)
    compare = _COMPARISONS.get(type(op))
    if compare is None:
        raise ValueError("is and is not are no comparison of values; take == or !=")
    one, other = _values(left), _values(right)

    def fulfilled(table: Table) -> Rows:
        """Compare the sides row by row. Raises ValueError if one has numbers, and one texts."""
        a, b = one(table), other(table)
        if (a.dtype.kind == "f") != (b.dtype.kind == "f"):
            raise ValueError(
                f"{ast.unparse(left)} and {ast.unparse(right)} cannot be compared: one is a number,"
                " the other a text"
            )
        known = _known(a) & _known(b)
        found = np.zeros(len(known), np.bool_)
        found[known] = compare(a[known], b[known]).astype(np.bool_)
        return found

    return fulfilled


def _known(values: NDArray[Any]) -> Rows:
    if values.dtype.kind == "f":
        return np.asarray(~np.isnan(values))
    return np.array([value is not None for value in values.tolist()], np.bool_)


def _values(node: ast.expr) -> Values:
    """Compile a column's name or a constant to a function of a table that gives (n,) values."""
    constant: float | str
    match node:
        case (
            ast.Name(id=name)
            | ast.Call(
                func=ast.Name(id="col"), args=[ast.Constant(value=str() as name)], keywords=[]
            )
        ):
            return lambda table: _column(table, name)
        case ast.Constant(value=str() as text):
            constant = class_name(text)  # as the columns have it: 'TRUE' is 'yes'
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            constant = float(number)
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)):
            constant = -float(number)
        case _:
            raise ValueError(f"{ast.unparse(node)[:60]!r} is neither a column, a number nor a text")
    dtype = np.float64 if isinstance(constant, float) else object
    return lambda table: np.full(table.num_samples, constant, dtype=dtype)


def _column(table: Table, written: str) -> NDArray[Any]:
    """Values of the column or target that a condition names. Raises ValueError if there is none."""
    # Python reads the name µg, as all names, in compatible form (NFKC), where it begins with a mu.
    names = {normalize("NFKC", name): name for name in (*table.values, table.target_name)}
    name = names.get(normalize("NFKC", folded(written)))
    if name is None:
        raise ValueError(f"there is no column {written!r}; there are: {shown(names.values(), 20)}")
    if name == table.target_name:
        return table.target if table.target.dtype.kind == "f" else table.target.astype(object)
    return table.values[name]
