"""Checks of arguments that all of the package may use."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor


def as_flag(name: str, value: Any) -> bool:
    """Return Python's True or False; raise TypeError for anything else, for even 'no' counts as true."""
    if isinstance(value, (bool, np.bool_)):
        return bool(value)
    raise TypeError(f"{name}: wanted True or False, got {value!r}")


def check_dense(name: str, x: object) -> None:
    """Raise TypeError unless it is a tensor, neither sparse nor nested."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name}: wanted a tensor, got {type(x).__name__} {x!r}")
    if x.is_nested or x.layout != torch.strided:
        raise TypeError(f"{name}: wanted a dense tensor, got {'a nested one' if x.is_nested else x.layout}")
