"""Patterns of layers, as Megatron's flags write them: N, or a list that Python would make of sums
and multiples of lists.
"""

from __future__ import annotations

import ast

_EXPRESSION = 10_000
"""The most characters of an expression, and entries of a list that it says."""


def read_pattern(text: str) -> int | list[int] | None:
    """The number or list that an expression says; None where it is another."""
    try:
        return _value(ast.parse(text[:_EXPRESSION].strip(), mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _value(node: ast.expr) -> int | list[int]:
    """A number or list of numbers. Raises :class:`ValueError` for anything else, or too long."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.List):
        entries = [_value(entry) for entry in node.elts]
        if all(isinstance(entry, int) for entry in entries):
            return entries  # type: ignore[return-value]
    if isinstance(node, ast.BinOp):
        left, right = _value(node.left), _value(node.right)
        if isinstance(node.op, ast.Add) and isinstance(left, list) and isinstance(right, list):
            return (left + right)[:_EXPRESSION]
        if isinstance(node.op, ast.Mult):
            if isinstance(left, int):
                left, right = right, left
            if isinstance(left, list) and isinstance(right, int) and right <= _EXPRESSION:
                return (left * right)[:_EXPRESSION]
    raise ValueError
