"""Evaluate the expressions in the tables of `types/`, which compute a dimension from the keys of a config.

The syntax is Python's:

- `a.b` is a key of a nested mapping and `a[0]` an item of a list. - `[a, b]` is a list. - `a | b` is `a` if it is
present (not absent, not null), otherwise `b`. The operator binds as loosely as in Python, so that its operands may be
sums and products without brackets. - `x if c else y` tests whether `c` is present and not 0. - `count(list, word)`
counts an item, `len` and `sum` are Python's, and `up(x, n)` rounds up to a multiple.

Arithmetic with an absent value gives an absent value.
"""

from __future__ import annotations

import ast
import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, TypeAlias

Value: TypeAlias = Any
"""Any value of JSON; None if a key is absent."""


def evaluate(expression: str, config: Mapping[str, Any]) -> Value:
    """Return the value of an expression over a config, or None if a value that it needs is absent.

    Raises:
        TypeError: the expression computes with a value that is not a number.
    """
    return _evaluate_node(_parse(expression), config)


def find_first_key(expression: str) -> str:
    """Return the first config key in an expression as a path, such as `attn_config.kv_n_heads` or `cutoffs.0`."""
    for node in ast.walk(_parse(expression)):
        if isinstance(node, ast.IfExp):
            return find_first_key(ast.unparse(node.test if isinstance(node.body, ast.Constant) else node.body))
        if isinstance(node, ast.Name | ast.Attribute | ast.Subscript):
            return re.sub(r"\[(.+?)\]", r".\1", ast.unparse(node))
    return expression


@cache
def list_plain_keys(expression: str) -> tuple[str, ...]:
    """Return the alternatives of an expression (`a | b`) that are plain config keys, in order."""
    node, alternatives = _parse(expression), list[ast.expr]()
    while isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        alternatives.insert(0, node.right)
        node = node.left
    return tuple(ast.unparse(each) for each in (node, *alternatives) if _is_key(each))


def _is_key(node: ast.expr) -> bool:
    """Return whether a syntax node is a plain key of the config."""
    while isinstance(node, ast.Attribute | ast.Subscript):
        node = node.value
    return isinstance(node, ast.Name) and node.id != "model"


@cache
def _parse(expression: str) -> ast.expr:
    """Return the syntax tree of an expression."""
    return ast.parse(expression, mode="eval").body


def _evaluate_node(node: ast.expr, config: Mapping[str, Any]) -> Value:
    """Return the value of a syntax node over a config, or None if a value that it needs is absent."""
    match node:
        case ast.Constant(value=value):
            return value
        case ast.Name(id=name):
            return config.get(name)
        case ast.List(elts=items):
            return [_evaluate_node(item, config) for item in items]
        case ast.Attribute(value=of, attr=name):
            whole = _evaluate_node(of, config)
            return whole.get(name) if isinstance(whole, Mapping) else None
        case ast.Subscript(value=of, slice=place):
            whole, index = _evaluate_node(of, config), ast.literal_eval(place)
            return whole[index] if isinstance(whole, list) and -len(whole) <= index < len(whole) else None
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            whole = _evaluate_node(left, config)
            return _evaluate_node(right, config) if whole is None else whole
        case ast.IfExp(test=test, body=body, orelse=otherwise):
            return _evaluate_node(body if _evaluate_node(test, config) else otherwise, config)
        case ast.BoolOp(op=op, values=values):
            whole = [bool(_evaluate_node(value, config)) for value in values]
            return any(whole) if isinstance(op, ast.Or) else all(whole)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return not _evaluate_node(operand, config)
        case ast.BinOp(left=left, op=op, right=right):
            return _compute(_ARITHMETIC[type(op)], _evaluate_node(left, config), _evaluate_node(right, config))
        case ast.Compare(left=left, ops=[op], comparators=[right]):
            return bool(_COMPARISONS[type(op)](_evaluate_node(left, config), _evaluate_node(right, config)))
        case ast.Call(func=ast.Name(id=name), args=arguments):
            return _FUNCTIONS[name](*(_evaluate_node(argument, config) for argument in arguments))
    raise SyntaxError(ast.unparse(node))


_ARITHMETIC: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
}


def _compute(function: Callable[[Any, Any], Any], *operands: Value) -> Value:
    """Return the result of an arithmetic operation, or None if an operand is absent or the result is undefined.

    A result is undefined on division by zero and on overflow.

    Raises:
        TypeError: an operand is not a number.
    """
    if any(value is None for value in operands):
        return None
    if any(not isinstance(value, int | float) for value in operands):
        raise TypeError(next(str(value) for value in operands if not isinstance(value, int | float)))
    try:
        return function(*operands)
    except (ZeroDivisionError, OverflowError):
        return None


_COMPARISONS: Mapping[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Gt: lambda left, right: _is_number(left) and _is_number(right) and left > right,
    ast.In: lambda left, right: isinstance(right, str | Sequence | Mapping) and left in right,
}


def _round_up_to_multiple(value: Value, multiple: Value) -> Value:
    """Return `value` rounded up to a multiple of `multiple`, or None if either is absent."""
    return _compute(lambda x, n: math.ceil(x / n) * n if math.isfinite(x) else x, value, multiple)


_FUNCTIONS: Mapping[str, Callable[..., Value]] = {
    "count": lambda items, word: items.count(word) if isinstance(items, list) else None,
    "len": lambda items: len(items) if isinstance(items, list | Mapping | str) else None,
    "sum": lambda items: sum(items) if isinstance(items, list) and all(map(_is_number, items)) else None,
    "up": _round_up_to_multiple,
}


def _is_number(value: object) -> bool:
    return isinstance(value, int | float)
