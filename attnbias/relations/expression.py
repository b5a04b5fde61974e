"""Relations from text: what a repr prints, and what a key names. Parsed, never evaluated as Python."""

from __future__ import annotations

import ast
from functools import lru_cache
from typing import Any

from . import choice, documents, graph, grids, neighbors, patterns, predicate
from .relation import Relation, named

_CLASSES = {
    cls.__name__: cls
    for cls in (
        patterns.Full,
        patterns.Empty,
        patterns.Causal,
        patterns.Window,
        patterns.Dilated,
        patterns.Columns,
        patterns.Chunks,
        patterns.Prefix,
        patterns.Bipartite,
        patterns.Global,
        patterns.RandomBlocks,
        documents.Documents,
        documents.Padding,
        grids.Neighborhood,
        graph.Graph,
        neighbors.Neighbors,
        predicate.Dense,
        choice.PerHead,
        choice.PerBatch,
    )
}
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


@lru_cache(maxsize=1024)
def _parsed_key(key: str) -> Relation:
    return parse(key)


def from_key(key: str) -> Relation:
    """The relation with this key: rebuilt from its content, or found among the living ones.

    Raises:
        ValueError: if the key names a relation with data that is gone.
    """
    if (living := named(key)) is not None:
        return living
    return parse(key) if "@" in key else _parsed_key(key)


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
        case ast.BinOp(left=ast.Name(id=name), op=ast.MatMult(), right=ast.Constant(value=int(number))):
            found = named(f"({name}@{number})")
            if found is None:
                raise ValueError(
                    f"relation: {name}@{number} holds data that is gone in this process; "
                    "pass a layout instead"
                )
            return found
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


def _call(function: ast.expr, arguments: list[Any], keywords: dict[str, Any], text: str) -> Any:
    match function:
        case ast.Name(id="range"):
            return list(range(*arguments))
        case ast.Name(id=name) if name in _CLASSES:
            made: Any = _CLASSES[name]
        case ast.Attribute(value=ast.Name(id=name), attr=method) if name in _CLASSES and method in _METHODS:
            made = getattr(_CLASSES[name], method)
        case ast.Attribute(value=inner, attr=method) if method in _METHODS:
            made = getattr(_relation(inner, text), method)
        case _:
            known = ", ".join(_CLASSES)
            raise ValueError(f"expression: {ast.unparse(function)!r} is none of {known}")
    try:
        return made(*arguments, **keywords)
    except TypeError as error:
        raise ValueError(f"expression: {ast.unparse(function)}: {error}") from None


def _relation(node: ast.expr, text: str) -> Relation:
    found = _build(node, text)
    if not isinstance(found, Relation):
        raise ValueError(f"expression: {ast.unparse(node)!r} in {text!r} is not a relation")
    return found
