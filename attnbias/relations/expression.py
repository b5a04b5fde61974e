"""Relations from the text that their repr prints. Parsed, never evaluated as Python."""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Any

from ..arguments import closest
from .recipe import registered_classes
from .relation import Relation

_METHODS = {"shift", "permute", "each", "from_lengths", "from_cu_seqlens", "from_mask"}

Functions = Mapping[str, Callable[..., Any]]


def parse(text: str, functions: Functions | None = None) -> Relation:
    """Build the relation that an expression such as ``"Causal() & Window(before=3)"`` describes.

    Args:
        text: the expression.
        functions: what it may call by name, such as recipes, which return relations or lists of them.

    Raises:
        ValueError: if it is not made of relations, numbers, lists, these functions and ``& | ~ - .T``.

    Example:
        >>> parse("Causal() & Window(before=3)")
        Window(before=3)
    """
    try:
        tree = ast.parse(text.strip(), mode="eval")
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"expression: {text!r} is not an expression: {error}") from None
    result = _Reader(text, functions or {}).build(tree.body)
    if isinstance(result, list) and result and all(isinstance(each, Relation) for each in result):
        raise ValueError(
            f"expression: wanted one relation, got {len(result)} of them; the first is {text.strip()}[0]"
        )
    if not isinstance(result, Relation):
        raise ValueError(f"expression: {text!r} is not a relation")
    return result


class _Reader:
    """The text that is read, and the functions that it may call."""

    def __init__(self, text: str, functions: Functions) -> None:
        self.text, self.functions = text, functions

    def build(self, node: ast.expr) -> Any:
        """Return the relation, number or list that a part of the text describes."""
        match node:
            case ast.Constant(value=bool() | int() | float() | str() | None):
                return node.value
            case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float())):
                return -self.build(node.operand)
            case ast.List(elts=parts) | ast.Tuple(elts=parts):
                return [self.build(part) for part in parts]
            case ast.UnaryOp(op=ast.Invert()):
                return ~self.relation(node.operand)
            case ast.BinOp(op=ast.BitAnd()):
                return self.relation(node.left) & self.relation(node.right)
            case ast.BinOp(op=ast.BitOr()):
                return self.relation(node.left) | self.relation(node.right)
            case ast.BinOp(op=ast.Sub()):
                return self.relation(node.left) - self.relation(node.right)
            case ast.Attribute(attr="T"):
                return self.relation(node.value).T
            case ast.Subscript(value=ast.Call(), slice=ast.Constant(value=int(place))):
                return self._pick(node.value, place)
            case ast.Call(func=function):
                arguments = [self.build(part) for part in node.args]
                keywords = {word.arg or "**": self.build(word.value) for word in node.keywords}
                return self._call(function, arguments, keywords)
            case ast.Name(id=name):
                made = classes().get(name) or self.functions.get(name)
                if made is not None:
                    raise ValueError(f"expression: {name!r} is no relation by itself; write {call_of(made)}")
                raise self._unknown(name)
        raise ValueError(f"expression: {ast.unparse(node)!r} is not allowed in {self.text!r}")

    def relation(self, node: ast.expr) -> Relation:
        """Return the relation that a part of the text describes."""
        found = self.build(node)
        if not isinstance(found, Relation):
            raise ValueError(f"expression: {ast.unparse(node)!r} in {self.text!r} is not a relation")
        return found

    def _pick(self, node: ast.expr, place: int) -> Any:
        found = self.build(node)
        if not isinstance(found, list) or not 0 <= place < len(found):
            size = len(found) if isinstance(found, list) else "no list"
            raise ValueError(f"expression: wanted a list of more than {place} relations, got {size}")
        return found[place]

    def _call(self, function: ast.expr, arguments: list[Any], keywords: dict[str, Any]) -> Any:
        known = classes()
        match function:
            case ast.Name(id="range"):
                return list(range(*arguments))
            case ast.Name(id=name) if name in known or name in self.functions:
                made: Any = known.get(name) or self.functions[name]
            case ast.Attribute(value=ast.Name(id=name), attr=method) if name in known and method in _METHODS:
                made = getattr(known[name], method)
            case ast.Attribute(value=inner, attr=method) if method in _METHODS:
                made = getattr(self.relation(inner), method)
            case _:
                raise self._unknown(ast.unparse(function))
        try:
            return made(*arguments, **keywords)
        except TypeError as error:
            raise ValueError(f"expression: {ast.unparse(function)}: {error}") from None

    def _unknown(self, name: str) -> ValueError:
        known: dict[str, Callable[..., Any]] = {**classes(), **self.functions}
        near = closest(name, known)
        if near is not None:
            return ValueError(f"expression: {name!r} is not known; did you mean {call_of(known[near])}?")
        return ValueError(f"expression: {name!r} is none of {', '.join(sorted(known))}")


def call_of(made: Callable[..., Any]) -> str:
    """Return how to call a class or function: with the arguments that it needs.

    Example:
        >>> import attnbias as ab
        >>> call_of(ab.Causal), call_of(ab.Global)
        ('Causal()', 'Global(positions=...)')
    """
    needed = [
        f"{name}=..."
        for name, each in inspect.signature(made).parameters.items()
        if each.default is each.empty and each.kind is each.POSITIONAL_OR_KEYWORD
    ]
    return f"{made.__name__}({', '.join(needed)})"


def classes() -> dict[str, type]:
    """Return the classes that can be named: those that the package exports, and those of its users."""
    exported = vars(sys.modules[__package__])
    return {
        cls.__name__: cls
        for cls in registered_classes()
        if exported.get(cls.__name__) is cls or not cls.__module__.startswith(__package__)
    }
