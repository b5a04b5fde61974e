"""Relations as text and tensors: the form in which a traced program, exported or not, carries them.

The text is a Python literal. ``{'Window': (127, 0)}`` names a class and its fields in order, ``...`` stands
for the next tensor, ``[...]`` for a tuple of integers held in the next tensor. So one compiled program serves
every relation of the same text, and an exported one holds the tensors as constants.
"""

from __future__ import annotations

import ast
import itertools
import math
import secrets
import threading
import weakref
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

LONGEST_TUPLE = 64  # integers; a longer one goes into a tensor, because each call compares the text
RESTORED = 4  # relations kept by content, for the layers and passes of one step

_classes: dict[str, type] = {}
_numbers = itertools.count()
_process = secrets.randbits(62)  # a handle is good in the process that made it, and in its forks
_held: weakref.WeakValueDictionary[int, _Held] = weakref.WeakValueDictionary()
_living: weakref.WeakValueDictionary[tuple[object, ...], Any] = weakref.WeakValueDictionary()
_restored: list[tuple[str, list[Tensor], Any]] = []
_lock = threading.Lock()


class Recipe(NamedTuple):
    """A relation as text and tensors."""

    text: str
    data: tuple[Tensor, ...]
    is_portable: bool  # False: it names a class or an object, such as a function, of this process only


class _Held:
    """The fields of a relation that cannot be written; lives as long as the tensor that names it."""

    def __init__(self, relation: Any) -> None:
        self.cls: Any = type(relation)
        self.state = relation.__getstate__()


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
    # Another process may give the name of a class that was made in a function, or twice, to another class.
    portable = ["<locals>" not in name and "~" not in name]
    texts = [_write(value, data, portable) for value in fields]
    if None in texts:
        made = Recipe("{'': (...,)}", (_handle(relation),), False)
    else:
        made = Recipe("{" + f"{name!r}: {_tuple(texts)}" + "}", tuple(data), all(portable))
    if made.data and not torch.compiler.is_compiling():
        _living[_key(made.text, made.data)] = relation
    return made


def _key(text: str, data: Sequence[Tensor]) -> tuple[object, ...]:
    """Identify a living relation, whose tensors live as long."""
    return text, *map(id, data)


def _write(value: Any, data: list[Tensor], portable: list[bool]) -> str | None:
    """Return a field as text, what it holds added to the lists; None if it cannot be written."""
    kind = type(value)
    if value is None or kind in (bool, int, str):
        return repr(value)
    if isinstance(value, Tensor):
        data.append(value)
        return "..."
    if kind is tuple:
        if len(value) > LONGEST_TUPLE and all(type(x) is int and abs(x) < 1 << 62 for x in value):
            data.append(torch.tensor(value, dtype=torch.int64, device="cpu"))
            return "[...]"
        texts = [_write(x, data, portable) for x in value]
        return None if None in texts else _tuple(texts)
    if hasattr(value, "recipe"):
        data.extend(value.recipe.data)
        portable.append(value.recipe.is_portable)
        return str(value.recipe.text)
    return repr(value) if kind is float and math.isfinite(value) else None


def _tuple(texts: list[Any]) -> str:
    return f"({', '.join([*texts, ''])})"


def _handle(relation: Any) -> Tensor:
    """Return a tensor that names what a relation holds."""
    number, held = next(_numbers), _Held(relation)
    _held[number] = held
    handle = torch.tensor([_process, number], dtype=torch.int64, device="cpu")
    handle._attnbias_held = held  # type: ignore[attr-defined]  # a saved handle keeps it for the backward pass
    return handle


def restore(text: str, data: Sequence[Tensor]) -> Any:
    """Return the relation of a recipe: the living one if there is one, so that its layouts are shared.

    Tensors that a program made itself are compared by what they hold: a program may write into the memory
    of one tensor more than once without PyTorch counting it.

    Raises:
        ValueError: if it names a class that is not defined here, or an object of another process.
    """
    if not data:
        return _restore_plain(text)
    living = _living.get(_key(text, data))
    if living is not None:
        return living
    with _lock:
        for place, (known, tensors, relation) in enumerate(_restored):
            if known == text and all(map(_equal, tensors, data)):
                _restored.insert(0, _restored.pop(place))
                return relation
    with torch.inference_mode(False):  # what is kept is used in training, too
        tensors = [x.detach().clone() for x in data]
    relation = _build(ast.literal_eval(text), iter(tensors))
    with _lock:
        _restored.insert(0, (text, tensors, relation))
        del _restored[RESTORED:]
    return relation


def _equal(a: Tensor, b: Tensor) -> bool:
    return a.device == b.device and a.dtype == b.dtype and torch.equal(a, b)


@lru_cache(maxsize=1024)
def _restore_plain(text: str) -> Any:
    return _build(ast.literal_eval(text), iter(()))


def _build(node: Any, data: Iterator[Tensor]) -> Any:
    match node:
        case dict():
            [(name, fields)] = node.items()
            values = [_build(field, data) for field in fields]
            return _make_held(*values) if name == "" else _make(name, values)
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


def _make_held(handle: Tensor) -> Any:
    process, number = handle.tolist()
    held = _held.get(number) if process == _process else None
    if held is None:
        raise ValueError(
            "relation: it holds a Python function or object, which is gone or in another process; "
            "pass a layout instead, relation.layout(q_len, k_len)"
        )
    made: Any = held.cls.__new__(held.cls)
    made.__setstate__(held.state)
    return made
