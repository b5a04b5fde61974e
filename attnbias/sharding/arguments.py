"""Arguments of ``shard``, checked."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..arguments import as_count, as_indices
from ..relations.relation import Relation
from ..sets.intervals import Ints
from .split import NAMES, Name


def as_relations(given: object) -> list[Relation]:
    """Return relations given as a list of them."""
    if not isinstance(given, list | tuple) or not given:
        raise TypeError(
            f"relation: wanted a Relation or a list of them, got {type(given).__name__} {given!r}"
        )
    for number, each in enumerate(given):
        if not isinstance(each, Relation):
            raise TypeError(f"relation[{number}]: wanted a Relation, got {type(each).__name__} {each!r}")
    return list(given)


def as_lengths(length: object) -> tuple[int, int]:
    """Return q_len and k_len."""
    if isinstance(length, list | tuple):
        if len(length) != 2:
            raise ValueError(f"length: wanted a number of tokens or (q_len, k_len), got {length!r}")
        return as_count("q_len", length[0]), as_count("k_len", length[1])
    return (as_count("length", length),) * 2


def as_split(split: object) -> Name | Ints:
    """Return the name of a split, or the caller's vector."""
    if isinstance(split, str):
        for name in NAMES:
            if name == split:
                return name
        raise ValueError(f"split: wanted one of {', '.join(map(repr, NAMES))} or a vector, got {split!r}")
    vector: Ints = as_indices("split", split, (1,)).cpu().numpy()
    return vector


def as_weights(weights: object, count: int) -> NDArray[np.float64] | None:
    """Return a weight for each relation, None for equal ones."""
    if weights is None:
        return None
    try:
        numbers = np.asarray(weights, np.float64)
    except (TypeError, ValueError):
        raise TypeError(f"weights: wanted a number for each relation, got {weights!r}") from None
    if numbers.shape != (count,):
        raise ValueError(f"weights: wanted {count} numbers, one for each relation, got {weights!r}")
    if not (np.isfinite(numbers).all() and (numbers >= 0).all() and numbers.any()):
        raise ValueError(f"weights: wanted numbers of at least 0, not all 0, got {weights!r}")
    return numbers
