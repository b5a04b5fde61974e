"""One relation for each head, or for each batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils.data._utils.collate import default_collate_fn_map

from ..layouts.outline import Outline, choose
from ..sets.bound import Bound, Place, stack
from .algebra import Compound
from .relation import Relation


class _Choice(Compound):
    parts: Sequence[Relation]
    axis = ""  # the size that chooses: "head_count" or "batch_size"
    stationary = False

    def __post_init__(self) -> None:
        name, parts = type(self).__name__, cast(Any, self.parts)
        if not isinstance(parts, Sequence) or not all(isinstance(part, Relation) for part in parts):
            raise TypeError(f"{name}: wanted a sequence of relations, got {parts!r}")
        if not parts:
            raise ValueError(f"{name}: wanted at least one relation, got none")
        for part in parts:
            if getattr(part, self.axis) not in (1, None):
                raise ValueError(f"{name}: wanted relations without a {self.axis} of their own, got {part!r}")
        object.__setattr__(self, "parts", tuple(parts))
        super().__post_init__()

    @property
    def inner(self) -> Sequence[Relation]:
        return self.parts

    def _check(self, at: Place) -> None:
        Relation._check(self, at)
        super()._check(at)

    def _pick(self, b: Tensor | None, h: Tensor | None, values: Sequence[Tensor]) -> Tensor:
        """Return the values of each head's, or batch's, own part."""
        index = h if self.axis == "head_count" else b
        result = values[0]
        if index is not None:
            for number, each in enumerate(values[1:], 1):
                result = torch.where(index == number, each, result)
        return result

    def related(self, q: Tensor, k: Tensor, b: Tensor | None = None, h: Tensor | None = None) -> Tensor:
        return self._pick(b, h, [part.related(q, k, b, h) for part in self.parts])

    def multiplicity(
        self, q: Tensor, k: Tensor, b: Tensor | None = None, h: Tensor | None = None
    ) -> Tensor | None:
        counts = [part.multiplicity(q, k, b, h) for part in self.parts]
        if all(count is None for count in counts):
            return None
        pairs = zip(self.parts, counts, strict=True)
        return self._pick(b, h, [part.related(q, k, b, h).long() if x is None else x for part, x in pairs])

    def _bind(self, at: Place) -> Bound:
        distinct = {part: number for number, part in enumerate(dict.fromkeys(self.parts))}
        pick = np.array([distinct[part] for part in self.parts])
        pick = pick[None, :] if self.axis == "head_count" else pick[:, None]
        return stack([part._bind(at) for part in distinct], pick, at, at.rule(self.related))

    def _outline(self, at: Place, tile: int) -> Outline | None:
        parts = [part._outline(at, tile) for part in self.parts]
        known = [part for part in parts if part is not None]
        if len(known) < len(parts):
            return None
        return choose(known, 1 if self.axis == "head_count" else 0)

    # Turned, moved and relabelled part by part, so that a graph among them stays a list of edges.

    @property
    def T(self) -> Relation:
        return type(self)([part.T for part in self.parts])

    def shift(self, distance: int) -> Relation:
        return type(self)([part.shift(distance) for part in self.parts])

    def permute(self, order: Tensor | Sequence[int]) -> Relation:
        return type(self)([part.permute(order) for part in self.parts])

    def __repr__(self) -> str:
        return f"{type(self).__name__}([{', '.join(repr(part) for part in self.parts)}])"


class PerHead(_Choice):
    """Another relation for each head.

    Args:
        parts: one relation per head.

    Example:
        >>> import attnbias as ab
        >>> heads = ab.PerHead([ab.Causal(), ab.Window(before=63), ab.Full(), ab.Full()])
        >>> heads.head_count
        4
    """

    axis = "head_count"

    @property
    def head_count(self) -> int:
        return len(self.parts)


class PerBatch(_Choice):
    """Another relation for each batch.

    Args:
        parts: one relation per batch.

    Example:
        >>> import attnbias as ab
        >>> both = PerBatch([ab.Causal(), ab.Full()])
        >>> [part.count(4, 4) for part in both.parts]
        [10, 16]
    """

    axis = "batch_size"

    @property
    def batch_size(self) -> int:
        return len(self.parts)


def _collate(batch: Sequence[Relation], **_: Any) -> Relation:
    """Make one relation of those of a batch's samples, as a DataLoader does with each field of a sample."""
    return batch[0] if all(each == batch[0] for each in batch) else PerBatch(batch)


default_collate_fn_map[Relation] = _collate
