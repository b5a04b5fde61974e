"""Relations as text and tensors: the form in which a traced program, exported or not, carries them.

The text is a Python literal. ``{'Window': (127, 0)}`` names a class and its fields in order, ``...`` stands
for the next tensor, ``[...]`` for a tuple of integers held in the next tensor. So one compiled program serves
every relation of the same text, and an exported one holds the tensors as constants.
"""

from __future__ import annotations

import ast
import copy
import itertools
import math
import secrets
import weakref
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

LONGEST_TUPLE = 64  # integers; a longer one goes into a tensor, because each call compares the text

_classes: dict[str, type] = {}
_numbers = itertools.count()
_process = secrets.randbits(62)  # a handle is good in the process that made it, and in its forks
_held: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_restored: Any = WeakTensorKeyDictionary()


class Recipe(NamedTuple):
    """A relation as text and tensors."""

    text: str
    data: tuple[Tensor, ...]
    is_portable: (
        bool  # False: it holds a Python object, such as a function, and means something in this process only
    )


def register(cls: type, name: str) -> str:
    """Let recipes name a class; return the name, which is new if a class of this name was there before."""
    # A notebook cell that is run again defines its class again: the old relations keep the old class.
    names = itertools.chain([name], (f"{name}~{number}" for number in itertools.count(2)))
    free = next(each for each in names if each not in _classes)
    _classes[free] = cls
    return free


def registered_classes() -> list[type]:
    """Return every class that a recipe may name, oldest first."""
    return list(_classes.values())


def write(relation: Any, name: str, fields: Sequence[object]) -> Recipe:
    """Write the recipe of a relation of the class registered as ``name``."""
    data: list[Tensor] = []
    portable: list[bool] = []
    texts = [_write(value, data, portable) for value in fields]
    if None in texts:
        return Recipe("{'': (...,)}", (_handle(relation),), False)
    return Recipe("{" + f"{name!r}: {_tuple(texts)}" + "}", tuple(data), all(portable))


def _write(value: Any, data: list[Tensor], portable: list[bool]) -> str | None:
    """Return a field as text, what it holds added to the lists; None if it cannot be written."""
    if value is None or isinstance(value, (bool, int, str)):
        return repr(value)
    if isinstance(value, Tensor):
        data.append(value)
        return "..."
    if isinstance(value, tuple):
        if len(value) > LONGEST_TUPLE and all(isinstance(x, int) for x in value):
            data.append(torch.tensor(value, dtype=torch.int64, device="cpu"))
            return "[...]"
        texts = [_write(x, data, portable) for x in value]
        return None if None in texts else _tuple(texts)
    if hasattr(value, "recipe"):
        data.extend(value.recipe.data)
        portable.append(value.recipe.is_portable)
        return str(value.recipe.text)
    return repr(value) if isinstance(value, float) and math.isfinite(value) else None


def _tuple(texts: list[Any]) -> str:
    return f"({', '.join([*texts, ''])})"


def _handle(relation: Any) -> Tensor:
    """Return a tensor that names a living relation."""
    number = next(_numbers)
    _held[number] = relation
    return torch.tensor([_process, number], dtype=torch.int64, device="cpu")


def restore(text: str, data: Sequence[Tensor]) -> Any:
    """Return the relation of a recipe; the same one, with its layouts, while the tensors live unchanged.

    Raises:
        ValueError: if it names a class that is not defined here, or an object of another process.
    """
    if not data:
        return _restore_plain(text)
    kept = _restored.setdefault(data[0], {})
    state = [(x.data_ptr(), x.shape, x.stride(), 0 if x.is_inference() else x._version) for x in data]
    found = kept.get(text)
    if found is None or found[0] != state:
        # Aliases: a relation that held data[0] itself would keep its own entry alive for ever.
        found = state, _build(ast.literal_eval(text), iter([x.detach() for x in data]))
        kept[text] = found
    return found[1]


@lru_cache(maxsize=1024)
def _restore_plain(text: str) -> Any:
    return _build(ast.literal_eval(text), iter(()))


def _build(node: Any, data: Iterator[Tensor]) -> Any:
    match node:
        case dict():
            [(name, fields)] = node.items()
            values = [_build(field, data) for field in fields]
            return _copy_held(*values) if name == "" else _make(name, values)
        case tuple():
            return tuple(_build(part, data) for part in node)
        case list():
            return tuple(next(data).tolist())
        case _:
            return next(data) if node is ... else node


def _make(name: str, values: list[Any]) -> Any:
    cls: Any = _classes.get(name)
    if cls is None:
        raise ValueError(
            f"relation: no class {name} is defined in this process; import the module that defines it"
        )
    made = cls.__new__(cls)
    made.__setstate__(dict(zip(cls.__dataclass_fields__, values, strict=True)))
    return made


def _copy_held(handle: Tensor) -> Any:
    process, number = handle.tolist()
    found = _held.get(number) if process == _process else None
    if found is None:
        raise ValueError(
            "relation: it holds a Python function or object, which is gone or in another process; "
            "pass a layout instead, relation.layout(q_len, k_len)"
        )
    # A copy, because the relation itself holds the handle; see restore.
    return copy.copy(found)
