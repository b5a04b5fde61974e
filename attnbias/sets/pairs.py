"""Pairs of a relation where its tensors are, such as a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor

from .intervals import Ints


class Pairs(NamedTuple):
    """Pairs one by one, in the caller's order."""

    group: Ints  # [batch, heads] -> g, on the host
    row: Tensor  # [E], g * q_len + query
    key: Tensor  # [E]
    number: Tensor | None  # [E], the caller's; None = 0, 1, ...
    is_there: Tensor | None = None  # bool [E]; None: all are
    extremes: Tensor | None = None  # int64 [n], by which ``check`` tells, on the host, what is wrong
    check: Callable[[Sequence[int]], None] | None = None  # raises ValueError
