"""A call as the backends in the op see it: tensors, numbers and a layout, no relation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ..scores.additive import AdditiveScore
from ..scores.multilevel import MultiLevel
from ..scores.terms import PARTS

if TYPE_CHECKING:
    from ..layouts.layout import Layout
    from ..scores.additive import Score
    from .places import Places


class Inputs(NamedTuple):
    """Every tensor of a call that may need a gradient, in the order of the op's arguments.

    ``Needs`` and ``Grads`` have the same fields. The last five are the parts of the score terms
    (``attnbias.scores.terms`` describes them).
    """

    query: Tensor  # [B, H, Q, D]
    key: Tensor  # [B, Hk, K, D]
    value: Tensor  # [B, Hk, K, E]
    sink: Tensor | None = None  # [H]
    weight: Tensor | None = None  # [H, D], of an AdditiveScore
    relative_bias: Tensor | None = None
    key_bias: Tensor | None = None
    pair_bias: Tensor | None = None
    grid_bias: Tensor | None = None
    edge_bias: Tensor | None = None


class Needs(NamedTuple):
    """A flag per input: whether it needs a gradient."""

    query: bool = False
    key: bool = False
    value: bool = False
    sink: bool = False
    weight: bool = False
    relative_bias: bool = False
    key_bias: bool = False
    pair_bias: bool = False
    grid_bias: bool = False
    edge_bias: bool = False


class Grads(NamedTuple):
    """The gradients of the inputs; None where none is needed."""

    query: Tensor | None = None
    key: Tensor | None = None
    value: Tensor | None = None
    sink: Tensor | None = None
    weight: Tensor | None = None
    relative_bias: Tensor | None = None
    key_bias: Tensor | None = None
    pair_bias: Tensor | None = None
    grid_bias: Tensor | None = None
    edge_bias: Tensor | None = None


NO_NEEDS = Needs()
_NOTHING_MORE = (None,) * (len(Inputs._fields) - 3)
FIRST_PART = Inputs._fields.index("relative_bias")


def parts_of(inputs: Inputs) -> dict[str, Tensor]:
    """Return the parts of the score terms that there are, by name."""
    parts = dict(zip(PARTS, inputs[FIRST_PART:], strict=True))
    return {name: part for name, part in parts.items() if part is not None}


def name_parts(grads: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return gradients of parts by the names of their inputs."""
    return {f"{name}_bias": grad for name, grad in grads.items()}


def parts_needed(needs: Needs) -> tuple[str, ...]:
    """Return the names of the parts that need a gradient."""
    if True not in needs[FIRST_PART:]:
        return ()
    return tuple(name for name, need in zip(PARTS, needs[FIRST_PART:], strict=True) if need)


def empty_row_numbers(query: Tensor) -> Tensor:
    """Return room for a number of each row, [B, H, Q], in the precision of scores."""
    precision = torch.float64 if query.dtype == torch.float64 else torch.float32
    B, H, Q, _ = query.shape
    # With a torch.Size, or by new_empty, it takes twice as long.
    return torch.empty((B, H, Q), dtype=precision, device=query.device)


@dataclass(slots=True, eq=False)
class Call:
    """One call of a backend in the op."""

    inputs: Inputs
    layout: Layout
    scale: float
    softcap: float = 0.0  # 0 = off
    dropout_p: float = 0.0
    score: Score | None = None  # None = the dot product; the weight of an AdditiveScore is in the inputs
    seed: Tensor | None = None  # int64 [1], with dropout
    codes: Sequence[Tensor] = ()  # of queries [Q] and keys [K] on a grid, int32
    slopes: Tensor | None = None  # [B or 1, H]: the part ``relative`` is -slope * |distance|
    row_max: Tensor | None = None  # [B, H, Q], dense: forward writes the largest scores; None = not wanted
    places: Places | None = None  # in a larger problem, whose q_start the layout has

    @property
    def query(self) -> Tensor:
        """[B, H, Q, D]."""
        return self.inputs.query

    @property
    def key(self) -> Tensor:
        """[B, Hk, K, D]."""
        return self.inputs.key

    @property
    def value(self) -> Tensor:
        """[B, Hk, K, E]."""
        return self.inputs.value

    @property
    def sink(self) -> Tensor | None:
        """[H]."""
        return self.inputs.sink

    @property
    def given(self) -> tuple[Tensor | None, ...]:
        """Query, key and value, and all other inputs if there are any."""
        return self.inputs[:3] if self.inputs[3:] == _NOTHING_MORE else self.inputs

    @property
    def is_plain(self) -> bool:
        """Whether it has no score of its own, terms, sink, dropout or places."""
        is_usual = self.score is None and not self.dropout_p and self.places is None
        return is_usual and self.inputs[3:] == _NOTHING_MORE

    @property
    def additive(self) -> tuple[Tensor, float] | None:
        """Weight [H, D] and negative slope of an ``AdditiveScore``, or None."""
        if not isinstance(self.score, AdditiveScore):
            return None
        assert self.inputs.weight is not None
        return self.inputs.weight, self.score.negative_slope

    @property
    def multilevel(self) -> MultiLevel | None:
        """A multi-level score, whose levels are those of the layout, or None."""
        return self.score if isinstance(self.score, MultiLevel) else None

    @property
    def kernel_scale(self) -> float:
        """The scale, divided by the number of levels where the score divides every pair by it."""
        levels = self.multilevel
        return self.scale / len(levels.ranks) if levels and levels.normalize == "levels" else self.scale

    def query_positions(self, rows: Tensor) -> Tensor:
        """Return the positions of some rows, int64."""
        places = self.places
        if places is None or places.queries is None:
            return rows + self.layout.q_start
        return places.queries[rows].long()

    def key_positions(self, keys: Tensor) -> Tensor:
        """Return the positions of some keys, int64."""
        return keys if self.places is None or self.places.keys is None else self.places.keys[keys].long()

    def relative_entries(self, rows: Tensor, keys: Tensor) -> Tensor:
        """Return where the part ``relative`` has the numbers of pairs, given by rows and keys."""
        places = self.places
        q_len = self.query.shape[2] if places is None or places.queries is None else places.q_len
        distances = self.key_positions(keys) - self.query_positions(rows)
        return distances + (self.layout.q_start + q_len - 1)

    @property
    def first_numbers(self) -> tuple[int, int]:
        """The numbers of the first batch and head, as dropout counts them."""
        return (0, 0) if self.places is None else (self.places.first_batch, self.places.first_head)

    @property
    def parts(self) -> dict[str, Tensor]:
        """The parts of the score terms that there are, by name."""
        return parts_of(self.inputs)
