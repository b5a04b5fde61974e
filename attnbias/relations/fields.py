"""Values of a relation's fields: how they compare, and how they print."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import numpy as np
import torch
from torch import Tensor

MANY_NUMBERS = 64  # a relation holding more is abbreviated when printed, and keeps its layouts to itself


def hashable(value: Any) -> Hashable:
    """What stands for a field's value when relations are compared: its content, or the object itself."""
    if isinstance(value, Tensor):
        array = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        return tuple(value.shape), value.dtype, array.tobytes()
    if isinstance(value, np.ndarray):
        return value.shape, value.dtype.str, value.tobytes()
    if isinstance(value, list | tuple):
        return type(value), *map(hashable, value)
    if isinstance(value, dict):
        return frozenset((key, hashable(each)) for key, each in value.items())
    return (type(value), value) if isinstance(value, Hashable) else (type(value), id(value))


def count_numbers(value: Any) -> int:
    """How many numbers the repr of a field would show."""
    if isinstance(value, Tensor):
        # Nothing in several dimensions cannot be told from its list: as if it were too much.
        return value.numel() if value.numel() or value.dim() == 1 else MANY_NUMBERS + 1
    return len(value) if isinstance(value, tuple) else 0


def show(value: Any, short: bool | None = None) -> str:
    """A field's value as the repr prints it."""
    short = count_numbers(value) > MANY_NUMBERS if short is None else short
    if isinstance(value, Tensor):
        return f"<{list(value.shape)}>" if short else repr(value.tolist())
    if isinstance(value, tuple):
        return f"<{len(value)}>" if short and len(value) > MANY_NUMBERS // 2 else repr(list(value))
    return repr(value)
