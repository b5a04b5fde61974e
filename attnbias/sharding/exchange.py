"""The exchange: one all-to-all of the rows of keys and values that ranks need, and of their gradients back.

In eager it is three steps, so that several exchanges overlap with compute: pack, send, place. Their
derivatives are unplace, send back and add up. Traced programs see one op, ``attnbias::exchange``, whose
lists are tensors: new documents compile nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from ..sets.intervals import Ints
    from .plan import Part

_FEW_RUNS = 64  # runs of rows up to which slices are copied; more are picked by their numbers


class Run(NamedTuple):
    """Consecutive rows of one tensor that become consecutive rows of another."""

    source: int
    target: int
    size: int


@dataclass(frozen=True, eq=False)
class Move:
    """Rows of one tensor that become rows of another; both have their rows in the first dimension."""

    source: Tensor  # [n]
    target: Tensor  # [n]

    @classmethod
    def between(cls, source: Ints, target: Ints, device: torch.device | str) -> Move:
        """Return the move on a device; its runs are found on the host."""
        made = cls(torch.from_numpy(source).to(device), torch.from_numpy(target).to(device))
        made.__dict__["runs"] = _find_runs(source, target)
        return made

    @cached_property
    def runs(self) -> list[Run] | None:
        """The runs if there are few, None if many."""
        return _find_runs(self.source.cpu().numpy(), self.target.cpu().numpy())

    def copy(self, into: Tensor, rows: Tensor) -> None:
        """Copy rows into another tensor."""
        if self.runs is None:
            into[self.target] = rows[self.source]
            return
        for source, target, size in self.runs:
            into[target : target + size] = rows[source : source + size]

    def copy_back(self, into: Tensor, rows: Tensor) -> None:
        """Copy rows the other way."""
        if self.runs is None:
            into[self.source] = rows[self.target]
            return
        for source, target, size in self.runs:
            into[source : source + size] = rows[target : target + size]

    def add_back(self, into: Tensor, rows: Tensor) -> None:
        """Add rows the other way; no row comes twice, so the sums have one order."""
        if self.runs is None:
            into[self.source] = into[self.source] + rows[self.target]
            return
        for source, target, size in self.runs:
            into[source : source + size] += rows[target : target + size]


def _find_runs(source: Ints, target: Ints) -> list[Run] | None:
    breaks = np.flatnonzero((np.diff(source) != 1) | (np.diff(target) != 1)) + 1
    if len(breaks) >= _FEW_RUNS:
        return None
    firsts = [0, *breaks.tolist()] if len(source) else []
    counts = np.diff([*firsts, len(source)]).tolist()
    return [Run(int(source[i]), int(target[i]), n) for i, n in zip(firsts, counts, strict=True)]


@dataclass(frozen=True, eq=False)
class Route:
    """The lists of one rank on a device: which of its rows go where, and where rows come from."""

    give: list[Move]  # by receiver: from its own rows to the buffer that is sent
    give_sizes: list[int]  # [ranks]
    take: Move  # from the buffer that came to the needed rows
    take_sizes: list[int]  # [ranks]
    own: Move  # from its own rows to the needed rows
    rows: int  # its own
    needed: int
    is_alone: bool  # whether no rank sends anything to another

    @classmethod
    def of(cls, part: Part, rows: int, *, is_alone: bool, device: torch.device | str) -> Route:
        """Put the lists of a plan on a device."""
        ends = np.cumsum([0, *part.give_sizes])
        bounds = zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True)
        give = [Move.between(part.give[first:stop], np.arange(first, stop), device) for first, stop in bounds]
        take = Move.between(np.arange(len(part.take)), part.take, device)
        own = Move.between(part.own_from, part.own_to, device)
        sizes = part.give_sizes, part.take_sizes
        return cls(give, sizes[0], take, sizes[1], own, rows, len(part.keys), is_alone)

    @property
    def keeps_all(self) -> bool:
        """Whether the needed rows are the rank's own, all of them in their order."""
        return self.is_alone and self.own.runs == ([Run(0, 0, self.rows)] if self.rows else [])


# -- the steps, on rows [n, B, Hk, D + E] --------------------------------------------------------------


def pack(key: Tensor, value: Tensor, route: Route) -> Tensor:
    """Return the rows to send, keys and values side by side, by receiver."""
    D = key.shape[3]
    sent = key.new_empty(sum(route.give_sizes), *key.shape[:2], D + value.shape[3])
    for move in route.give:
        move.copy(sent[..., :D], key.permute(2, 0, 1, 3))
        move.copy(sent[..., D:], value.permute(2, 0, 1, 3))
    return sent


def place(came: Tensor, key: Tensor, value: Tensor, route: Route) -> Tensor:
    """Return the needed rows: those that came, and the rank's own."""
    D = key.shape[3]
    rows = key.new_empty(route.needed, *key.shape[:2], D + value.shape[3])
    route.take.copy(rows, came)
    route.own.copy(rows[..., :D], key.permute(2, 0, 1, 3))
    route.own.copy(rows[..., D:], value.permute(2, 0, 1, 3))
    return rows


def unplace(grad_key: Tensor, grad_value: Tensor, route: Route) -> Tensor:
    """Return the gradients of the rows that came, to send home; ``grad_key`` is [B, Hk, needed, D]."""
    B, Hk, _, D = grad_key.shape
    home = grad_key.new_empty(sum(route.take_sizes), B, Hk, D + grad_value.shape[3])
    route.take.copy_back(home[..., :D], grad_key.permute(2, 0, 1, 3))
    route.take.copy_back(home[..., D:], grad_value.permute(2, 0, 1, 3))
    return home


def keep_own(grad: Tensor, route: Route) -> Tensor:
    """Return the gradients of the rank's own rows, [B, Hk, rows, D], from those of the needed ones."""
    runs = route.own.runs
    if runs is not None and len(runs) == 1 and runs[0].size == route.rows:
        return grad.narrow(2, runs[0].target, route.rows)
    own = grad.new_zeros(*grad.shape[:2], route.rows, grad.shape[3])
    route.own.copy_back(own.permute(2, 0, 1, 3), grad.permute(2, 0, 1, 3))
    return own


def add_up(own_key: Tensor, own_value: Tensor, came: Tensor, route: Route) -> tuple[Tensor, Tensor]:
    """Add what came to the gradients of the rank's own rows, by rank, in float32: the same bits every run."""
    if route.is_alone:
        return own_key, own_value
    D = own_key.shape[3]
    sums = []
    for grad, part in ((own_key, slice(0, D)), (own_value, slice(D, None))):
        wide = torch.float64 if grad.dtype == torch.float64 else torch.float32
        total = grad.to(wide, copy=True)
        rows = came[..., part].to(wide)
        for move in route.give:
            move.add_back(total.permute(2, 0, 1, 3), rows)
        sums.append(total.to(grad.dtype))
    return sums[0], sums[1]


def send(rows: Tensor, give_sizes: list[int], take_sizes: list[int], group: str) -> Tensor:
    """Start an all-to-all of rows; read the result after :func:`wait`."""
    # Halves travel as bytes: gloo has not always had bfloat16.
    wire = rows.view(torch.uint8) if rows.element_size() == 2 else rows
    came: Tensor = torch.ops._c10d_functional.all_to_all_single(wire, take_sizes, give_sizes, group)
    return came.view(rows.dtype)


def wait(rows: Tensor) -> Tensor:
    """Wait for an all-to-all."""
    done: Tensor = torch.ops._c10d_functional.wait_tensor(rows)
    return done


# -- eager: three nodes of autograd, so that exchanges overlap with compute both ways ------------------------


class _Pack(torch.autograd.Function):
    """Keys and values to the rows to send; the keys and values pass, so that all gradients meet here."""

    @staticmethod
    def forward(ctx: Any, route: Route, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Pack."""
        ctx.route = route
        return pack(key, value, route), key.view_as(key), value.view_as(value)

    @staticmethod
    def backward(ctx: Any, came: Tensor, own_key: Tensor, own_value: Tensor) -> tuple[Any, ...]:
        """Wait for the gradients from other ranks and add them."""
        return None, *add_up(own_key, own_value, came if ctx.route.is_alone else wait(came), ctx.route)


class _Send(torch.autograd.Function):
    """An all-to-all in flight; its derivative is the reverse, in flight as well."""

    @staticmethod
    def forward(ctx: Any, route: Route, group: str, rows: Tensor) -> Tensor:
        """Start sending."""
        ctx.route, ctx.group = route, group
        return send(rows, route.give_sizes, route.take_sizes, group)

    @staticmethod
    def backward(ctx: Any, home: Tensor) -> tuple[Any, ...]:
        """Start sending home."""
        return None, None, send(home, ctx.route.take_sizes, ctx.route.give_sizes, ctx.group)


class _Place(torch.autograd.Function):
    """Rows that came, and the rank's own, to the needed keys and values."""

    @staticmethod
    def forward(ctx: Any, route: Route, came: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Wait for the rows and place them."""
        ctx.route = route
        return views_of(place(came if route.is_alone else wait(came), key, value, route), key.shape[3])

    @staticmethod
    def backward(ctx: Any, grad_key: Tensor, grad_value: Tensor) -> tuple[Any, ...]:
        """Part the gradients of what came from those of the rank's own rows."""
        route = ctx.route
        home = unplace(grad_key, grad_value, route)
        return None, home, keep_own(grad_key, route), keep_own(grad_value, route)


def views_of(rows: Tensor, D: int) -> tuple[Tensor, Tensor]:
    """Return rows [n, B, Hk, D + E] as keys [B, Hk, n, D] and values [B, Hk, n, E]."""
    heads_first = rows.permute(1, 2, 0, 3)
    return heads_first[..., :D], heads_first[..., D:]


class Flight(NamedTuple):
    """An exchange that was started."""

    route: Route
    rows: Tensor  # in flight
    key: Tensor
    value: Tensor

    def land(self) -> tuple[Tensor, Tensor]:
        """Wait, and return the needed keys [B, Hk, needed, D] and values [B, Hk, needed, E]."""
        if self.route.keeps_all:
            return self.key, self.value
        landed = _Place.apply(self.route, self.rows, self.key, self.value)  # type: ignore[no-untyped-call]
        return landed[0], landed[1]


def start(key: Tensor, value: Tensor, route: Route, group: str) -> Flight:
    """Start the exchange of keys [B, Hk, rows, D] and values [B, Hk, rows, E]."""
    if route.keeps_all:
        return Flight(route, key, key, value)
    rows, key, value = _Pack.apply(route, key, value)  # type: ignore[no-untyped-call]
    if not route.is_alone:
        rows = _Send.apply(route, group, rows)  # type: ignore[no-untyped-call]
    return Flight(route, rows, key, value)
