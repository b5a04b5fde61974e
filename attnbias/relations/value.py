"""Values with fields: how relations compare, print, pickle and become recipes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable
from typing import Any, ClassVar, TypeVar

import numpy as np
import torch
from torch import Tensor

from ..arguments import as_count
from .recipe import Recipe, write

Result = TypeVar("Result")
MANY_NUMBERS = 64  # a relation holding more is abbreviated when printed, and keeps its layouts to itself

_LONG = 9  # consecutive numbers that are shown as a range


def integer(*, least: int = 0, default: Any = dataclasses.MISSING) -> Any:
    """Declare a field that has to be an integer of at least ``least``."""
    return dataclasses.field(default=default, metadata={"least": least})


def kept(make: Callable[[Any], Result]) -> Result:
    """Make a property that is computed once, as ``cached_property``, which dynamo cannot trace."""
    name = f"{make.__name__}_"

    def get(self: Any) -> Result:
        if name not in self.__dict__:
            object.__setattr__(self, name, make(self))
        value: Result = self.__dict__[name]
        return value

    return property(get, doc=make.__doc__)  # type: ignore[return-value]


class Value:
    """A frozen dataclass that compares by content.

    A field whose name a method has taken ends in an underscore, ``lengths_``, and is shown without it.
    """

    recipe: Recipe  # a plain attribute, because torch.compile guards its text and takes its tensors as inputs
    _registered: ClassVar[str]  # the name of the class in recipes
    _least: ClassVar[dict[str, int]]  # the smallest value of each integer

    def __post_init__(self) -> None:
        for name, least in self._least.items():
            object.__setattr__(self, name, as_count(name.removesuffix("_"), getattr(self, name), least))
        fields = self.__dataclass_fields__  # type: ignore[attr-defined]
        if not torch.compiler.is_compiling() and (others := self.__dict__.keys() - fields - {"recipe"}):
            names = ", ".join(sorted(others))
            raise TypeError(f"{type(self).__name__}: wanted every attribute declared as a field, got {names}")
        values = [getattr(self, name) for name in fields]
        object.__setattr__(self, "recipe", write(self, self._registered, values))

    def _values(self) -> list[tuple[str, Any, Any]]:
        """Return the name, value and default of each field."""
        kind = type(self)  # asked for the defaults, because dynamo cannot trace a field's own
        return [
            (f.name.removesuffix("_"), getattr(self, f.name), getattr(kind, f.name, dataclasses.MISSING))
            for f in dataclasses.fields(self)  # type: ignore[arg-type]
        ]

    @property
    def _device(self) -> torch.device | str:
        """The device of the data."""
        return next((value.device for _, value, _ in self._values() if isinstance(value, Tensor)), "cpu")

    @kept
    def _content(self) -> Hashable:
        """The content by which values are compared; the data is read once."""
        return type(self), *(hashable(value) for _, value, _ in self._values())

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Value):
            return NotImplemented
        return self is other or self._content == other._content

    def __hash__(self) -> int:
        number: int | None = self.__dict__.get("hash_")  # not a property: every call of attention asks
        if number is None:
            number = hash(self._content)
            object.__setattr__(self, "hash_", number)
        return number

    @property
    def is_small(self) -> bool:
        """Whether it holds so little, on the host, that equal ones share layouts."""
        _, data, is_portable = self.recipe
        if not data:
            return True
        return is_portable and all(x.device.type == "cpu" and x.numel() <= MANY_NUMBERS for x in data)

    def _numbers(self) -> int:
        """Return how many numbers the repr would show."""
        return sum(count_numbers(value) for _, value, _ in self._values())

    def __repr__(self) -> str:
        short = self._numbers() > MANY_NUMBERS
        shown = [
            f"{name}={show(value, short)}"
            for name, value, default in self._values()
            if isinstance(value, Tensor) or default is dataclasses.MISSING or value != default
        ]
        return f"{type(self).__name__}({', '.join(shown)})"

    def __getstate__(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}  # type: ignore[arg-type]

    def __setstate__(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            object.__setattr__(self, name, value)
        Value.__post_init__(self)


def hashable(value: Any) -> Hashable:
    """Return what stands for a field when values are compared: its content, or the object itself."""
    if isinstance(value, Tensor):
        # Cloned, because contiguous() leaves a single number the stride of whatever it was cut from.
        whole = value.detach().cpu().clone(memory_format=torch.contiguous_format)
        array = whole.view(-1).view(torch.uint8).numpy()
        return tuple(value.shape), value.dtype, array.tobytes()
    if isinstance(value, np.ndarray):
        return value.shape, value.dtype.str, value.tobytes()
    if isinstance(value, list | tuple):
        return type(value), *map(hashable, value)
    if isinstance(value, dict):
        return frozenset((key, hashable(each)) for key, each in value.items())
    return (type(value), value) if isinstance(value, Hashable) else (type(value), id(value))


def count_numbers(value: Any) -> int:
    """Return how many numbers the repr of a field would show."""
    if isinstance(value, Tensor):
        # An empty tensor of several dimensions loses its shape as a list, so its shape is shown.
        return value.numel() if value.numel() or value.dim() == 1 else MANY_NUMBERS + 1
    return len(value) if isinstance(value, tuple) else 0


def show(value: Any, short: bool | None = None) -> str:
    """Return a field as the repr prints it; ``short`` by its own size if None."""
    short = count_numbers(value) > MANY_NUMBERS if short is None else short
    if isinstance(value, Tensor):
        return f"<{list(value.shape)}>" if short else repr(value.tolist())
    if isinstance(value, tuple) and _is_range(value):
        return f"range({value[0]}, {value[-1] + 1})"
    if isinstance(value, tuple):
        return f"<{len(value)}>" if short and len(value) > MANY_NUMBERS // 2 else repr(list(value))
    return repr(value)


def _is_range(value: tuple[Any, ...]) -> bool:
    """Return whether these are consecutive integers, and more than one would like to read."""
    return len(value) >= _LONG and all(type(x) is int and x == value[0] + i for i, x in enumerate(value))
