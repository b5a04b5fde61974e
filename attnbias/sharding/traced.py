"""The exchange as one op, for programs that torch traces: its lists are tensors, so new ones are free."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..layouts.layout import Layout
from .exchange import Move, Route, add_up, keep_own, pack, place, send, unplace, views_of, wait


class Lists(NamedTuple):
    """A route as tensors; sizes are on the host."""

    give: Tensor  # [n], own rows by receiver
    give_sizes: Tensor  # [ranks]
    take: Tensor  # [m], needed rows by sender
    take_sizes: Tensor  # [ranks]
    own_from: Tensor
    own_to: Tensor

    @classmethod
    def of(cls, route: Route) -> Lists:
        """Return the lists of a route."""
        give = torch.cat([move.source for move in route.give])
        sizes = (torch.tensor(each, device="cpu") for each in (route.give_sizes, route.take_sizes))
        return cls(give, next(sizes), route.take.target, next(sizes), route.own.source, route.own.target)

    def route(self, rows: int) -> Route:
        """Return the route of these lists."""
        sizes = self.give_sizes.tolist(), self.take_sizes.tolist()
        ends = np.cumsum([0, *sizes[0]]).tolist()
        order = torch.arange(len(self.give), device=self.give.device)
        give = [Move(self.give[a:b], order[a:b]) for a, b in pairwise(ends)]
        take = Move(torch.arange(len(self.take), device=self.take.device), self.take)
        own, needed = Move(self.own_from, self.own_to), len(self.take) + len(self.own_to)
        return Route(give, sizes[0], take, sizes[1], own, rows, needed, is_alone=False)


class Ready(NamedTuple):
    """All that a traced call reads of a shard."""

    layout: Layout
    positions: tuple[Tensor, Tensor]  # of queries and needed keys, int32
    lists: Lists
    group: str
    keeps_all: bool  # the needed keys are the rank's own, and no rank sends any


_library = torch.library.Library("attnbias", "FRAGMENT")
_LISTS = "Tensor give, Tensor give_sizes, Tensor take, Tensor take_sizes, Tensor own_from, Tensor own_to"
_library.define(f"exchange(Tensor key, Tensor value, {_LISTS}, str group) -> Tensor")
_library.define(
    f"exchange_back(Tensor grad, {_LISTS}, str group, SymInt rows, SymInt head_size) -> (Tensor, Tensor)"
)
_exchange_op = torch.ops.attnbias.exchange.default
_back_op = torch.ops.attnbias.exchange_back.default


def exchange(key: Tensor, value: Tensor, ready: Ready) -> tuple[Tensor, Tensor]:
    """Return the needed keys [B, Hk, needed, D] and values [B, Hk, needed, E]."""
    if ready.keeps_all:
        return key, value
    return views_of(_exchange_op(key, value, *ready.lists, ready.group), key.shape[3])


def _exchange(key: Tensor, value: Tensor, *rest: Any) -> Tensor:
    *lists, group = rest
    route = Lists(*lists).route(key.shape[2])
    came = send(pack(key, value, route), route.give_sizes, route.take_sizes, group)
    return place(wait(came), key, value, route)


def _exchange_fake(key: Tensor, value: Tensor, *rest: Any) -> Tensor:
    lists = Lists(*rest[:-1])
    needed = lists.take.shape[0] + lists.own_to.shape[0]
    return key.new_empty(needed, *key.shape[:2], key.shape[3] + value.shape[3])


def _back(grad: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    *lists, group, rows, D = rest
    route = Lists(*lists).route(rows)
    grads = views_of(grad, D)
    came = wait(send(unplace(*grads, route), route.take_sizes, route.give_sizes, group))
    own_key, own_value = (keep_own(each, route) for each in grads)
    sums = add_up(own_key, own_value, came, route)
    return sums[0].contiguous(), sums[1].contiguous()


def _back_fake(grad: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    rows, D = rest[-2:]
    _, B, Hk, size = grad.shape
    return grad.new_empty(B, Hk, rows, D), grad.new_empty(B, Hk, rows, size - D)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    key, _, *lists, group = inputs
    ctx.save_for_backward(*lists)
    ctx.rest = group, key.shape[2], key.shape[3]


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    grads = _back_op(grad, *ctx.saved_tensors, *ctx.rest)
    return *grads, *[None] * (len(Lists._fields) + 1)


for _op, _real, _fake in (("exchange", _exchange, _exchange_fake), ("exchange_back", _back, _back_fake)):
    _library.impl(_op, _real, "CompositeExplicitAutograd")
    torch.library.register_fake(f"attnbias::{_op}", _fake, lib=_library)
torch.library.register_autograd("attnbias::exchange", _backward, setup_context=_setup, lib=_library)
