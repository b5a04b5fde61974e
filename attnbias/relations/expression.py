"""Relations from the text that their repr prints. Parsed, never evaluated as Python."""

from __future__ import annotations

import ast
import sys
from typing import Any

from .recipe import registered_classes
from .relation import Relation

_METHODS = {"shift", "permute", "each", "from_lengths", "from_cu_seqlens", "from_mask"}


def parse(text: str) -> Relation:
    """Build the relation that an expression such as ``"Causal() & Window(before=3)"`` describes.

    Raises:
        ValueError: if it is not made of relations, numbers, lists and ``& | ~ - .T``.

    Example:
        >>> parse("Causal() & Window(before=3)")
        Window(before=3)
    """
    try:
        tree = ast.parse(text.strip(), mode="eval")
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"expression: {text!r} is not an expression: {error}") from None
    result = _build(tree.body, text)
    if not isinstance(result, Relation):
        raise ValueError(f"expression: {text!r} is not a relation")
    return result


def _build(node: ast.expr, text: str) -> Any:
    match node:
        case ast.Constant(value=bool() | int() | float() | str() | None):
            return node.value
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float())):
            return -_build(node.operand, text)
        case ast.List(elts=parts) | ast.Tuple(elts=parts):
            return [_build(part, text) for part in parts]
        case ast.UnaryOp(op=ast.Invert()):
            return ~_relation(node.operand, text)
        case ast.BinOp(op=ast.BitAnd()):
            return _relation(node.left, text) & _relation(node.right, text)
        case ast.BinOp(op=ast.BitOr()):
            return _relation(node.left, text) | _relation(node.right, text)
        case ast.BinOp(op=ast.Sub()):
            return _relation(node.left, text) - _relation(node.right, text)
        case ast.Attribute(attr="T"):
            return _relation(node.value, text).T
        case ast.Call(func=function):
            arguments = [_build(part, text) for part in node.args]
            keywords = {word.arg or "**": _build(word.value, text) for word in node.keywords}
            return _call(function, arguments, keywords, text)
    raise ValueError(f"expression: {ast.unparse(node)!r} is not allowed in {text!r}")


def _classes() -> dict[str, type]:
    """Return the classes that can be named: those that the package exports, and those of its users."""
    exported = vars(sys.modules[__package__])
    return {
        cls.__name__: cls
        for cls in registered_classes()
        if exported.get(cls.__name__) is cls or not cls.__module__.startswith(__package__)
    }


def _call(function: ast.expr, arguments: list[Any], keywords: dict[str, Any], text: str) -> Any:
    classes = _classes()
    match function:
        case ast.Name(id="range"):
            return list(range(*arguments))
        case ast.Name(id=name) if name in classes:
            made: Any = classes[name]
        case ast.Attribute(value=ast.Name(id=name), attr=method) if name in classes and method in _METHODS:
            made = getattr(classes[name], method)
        case ast.Attribute(value=inner, attr=method) if method in _METHODS:
            made = getattr(_relation(inner, text), method)
        case _:
            raise ValueError(f"expression: {ast.unparse(function)!r} is none of {', '.join(sorted(classes))}")
    try:
        return made(*arguments, **keywords)
    except TypeError as error:
        raise ValueError(f"expression: {ast.unparse(function)}: {error}") from None


def _relation(node: ast.expr, text: str) -> Relation:
    found = _build(node, text)
    if not isinstance(found, Relation):
        raise ValueError(f"expression: {ast.unparse(node)!r} in {text!r} is not a relation")
    return found
