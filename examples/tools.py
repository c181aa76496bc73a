"""Tools of a language model: a calculator, and a look-up in a database.

    --config.tools.path=examples/tools.py

Each function that is defined here is a tool, but for those whose names begin with _. The model
reads the docstring; the annotations say which arguments a call may have. See docs/rlvr.md.
"""

from __future__ import annotations

import ast
import contextlib
import operator
import os
import sqlite3
from collections.abc import Callable
from pathlib import Path

_ROWS = 20  # that the model is shown
_LARGEST_POWER = 64  # larger ones make numbers of millions of digits
_OPERATORS: dict[type, Callable[..., float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}


def calculate(expression: str) -> str:
    """Calculates the value of an expression.

    Args:
        expression: Numbers with + - * / // % ** and brackets, such as (1931 - 1874) / 2.
    """
    value = _value(ast.parse(expression.strip(), mode="eval").body)
    return f"{value:.12g}" if isinstance(value, float) else str(value)


def _value(node: ast.expr) -> float:
    """Only what is listed here is calculated; nothing of the text is run."""
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            return value
        case ast.UnaryOp(op, operand) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](_value(operand))
        case ast.BinOp(left, op, right) if type(op) in _OPERATORS:
            one, other = _value(left), _value(right)
            if isinstance(op, ast.Pow) and abs(other) > _LARGEST_POWER:
                raise ValueError(f"the power {other} is too large")
            return _OPERATORS[type(op)](one, other)
    raise ValueError(f"{ast.unparse(node)} is no number or operator")


def look_up(sql: str) -> list[dict[str, str | int | float | None]]:
    """Reads rows from a database of facts. Tables: SELECT name, sql FROM sqlite_schema.

    Args:
        sql: One SELECT statement of SQLite.
    """
    # A file of yours: export TOOLS_DATABASE=facts.sqlite
    file = Path(os.environ["TOOLS_DATABASE"]).absolute()
    with contextlib.closing(sqlite3.connect(f"{file.as_uri()}?mode=ro", uri=True)) as database:
        database.set_authorizer(_only_reads)  # so that no other file is attached
        cursor = database.execute(sql)
        names = [name for name, *_ in cursor.description]
        return [dict(zip(names, row, strict=True)) for row in cursor.fetchmany(_ROWS)]


def _only_reads(action: int, *_: str | None) -> int:
    reads = (sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION)
    return sqlite3.SQLITE_OK if action in reads else sqlite3.SQLITE_DENY
