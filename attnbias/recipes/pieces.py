"""What several recipes are made of: checked arguments, key ranges, chosen blocks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import reduce
from operator import or_
from typing import Any

import torch
from torch import Tensor

from ..arguments import as_indices
from ..relations import Documents, Empty, Relation


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


def any_of(parts: Iterable[Relation]) -> Relation:
    """Return the union; of none, ``Empty()``."""
    return reduce(or_, parts, Empty())


def before(stop: Tensor, keys: int) -> Relation:
    """Relate each query to the keys before a position of its own.

    The first ``stop`` keys are blocks of 1, 2, 4, ... keys, one for each bit of ``stop`` that is set.

    Args:
        stop: that position for each query, [Q].
        keys: number of keys.
    """
    place = torch.arange(keys, device="cpu")
    bits = int(stop.max()).bit_length() if len(stop) else 0
    blocks = (
        (torch.where((stop >> bit) % 2 == 1, (stop >> bit) - 1, -1), place >> bit) for bit in range(bits)
    )
    return any_of(Documents(mine, block) for mine, block in blocks)


def chosen_blocks(index: Tensor, size: int, queries: int, block_of_key: Tensor) -> Relation:
    """Relate each block of ``size`` queries to the blocks of keys that it chose.

    Args:
        index: numbers of the key blocks, [query blocks, n]; -1 = none.
        size: queries in a block.
        queries: number of queries; the last block may be shorter.
        block_of_key: [K]; -1 = none.
    """
    chosen = index.repeat_interleave(size, 0)[:queries]  # [Q, n]
    return any_of(Documents(mine, block_of_key) for mine in chosen.unbind(1))
