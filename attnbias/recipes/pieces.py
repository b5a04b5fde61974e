"""Share what several recipes are made of: checked arguments and key ranges."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..arguments import as_indices
from ..relations import Ranges


def as_sizes(name: str, values: Any, least: int = 0) -> list[int]:
    """Return a list of whole numbers, each at least ``least``."""
    sizes: list[int] = as_indices(name, values, (1,)).tolist()
    if sizes and min(sizes) < least:
        raise ValueError(f"{name}: wanted {least} or more, got {min(sizes)}")
    return sizes


def as_places(name: str, values: Any, length: int) -> list[int]:
    """Return a list of positions in a sequence of ``length`` tokens."""
    places: list[int] = as_indices(name, values, (1,)).tolist()
    for place in places:
        if not 0 <= place < length:
            raise ValueError(f"{name}: wanted positions from 0 to {length - 1}, got {place}")
    return places


def number(sizes: Sequence[int]) -> Tensor:
    """Number groups of the given sizes from 0; return the number of each member, [sum of sizes]."""
    return torch.arange(len(sizes), device="cpu").repeat_interleave(
        torch.tensor(sizes, dtype=torch.int64, device="cpu")
    )


def before(stop: Tensor) -> Ranges:
    """Relate each query to the keys before a position of its own, [Q]."""
    return Ranges(torch.zeros_like(stop), stop)
