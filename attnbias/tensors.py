"""What is asked of every tensor that a caller gives."""

from __future__ import annotations

import torch
from torch import Tensor


def check_dense(name: str, x: object) -> None:
    """Raise unless it is a tensor, neither sparse nor nested."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name}: wanted a tensor, got {type(x).__name__} {x!r}")
    if x.is_nested or x.layout != torch.strided:
        raise TypeError(f"{name}: wanted a dense tensor, got {'a nested one' if x.is_nested else x.layout}")
