"""Whole passes kept for later calls: all launches of a forward or backward pass under one key.

A plan (``plans.py``) spares what Triton finds out about the arguments of one launch, but it still has to be
given them, and they are most of the work. A pass keeps its plans and where each of their tensors comes from:
from the caller, from a layout's lists, or it is memory that the pass needs for itself (``scratch``). A pass
with a tensor of another kind is not kept.

It belongs to a layout, whose lists it holds, and goes with it. So its key has nothing of the lists.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.runtime.driver import driver

from .launch import notice_changes
from .plans import PLANS, Bounded, Given, Key, Plan, Tape, surroundings

MOST = 64  # passes of a layout; the oldest goes


class Scratch(NamedTuple):
    """Memory that a pass needs for itself."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


class Pass:
    """The launches of a pass, in order.

    Tensors are numbered: those that the caller gives, scratch memory, and those of the lists.
    """

    def __init__(self, tape: Tape, given: Sequence[Tensor | None], owned: Iterable[Tensor]) -> None:
        """Find out where each tensor comes from.

        Raises:
            LookupError: if one is of neither kind.
        """
        there = [x for x in given if x is not None]
        # One tensor in two places says nothing about which of them a launch takes.
        if len(set(map(id, there))) < len(there):
            raise LookupError
        lists = list(owned)
        every = [*there, *tape.scratch, *lists]
        number = {id(x): i for i, x in reversed(list(enumerate(every)))}
        self._given = len(there)
        self._scratch = [Scratch(tuple(x.shape), x.dtype, x.device) for x in tape.scratch]
        used = sorted({number[id(x)] for _, tensors in tape.launches for x in tensors})
        first = self._given + len(self._scratch)
        self._lists = [every[i] for i in used if i >= first]
        place = {id(x): first + i for i, x in enumerate(self._lists)}
        self._addresses = [x.data_ptr() for x in self._lists]
        self._steps: list[tuple[Plan, Callable[[Sequence[Any]], Sequence[Any]]]] = []
        for plan, tensors in tape.launches:
            places = [place.get(id(x), number[id(x)]) for x in tensors]
            self._steps.append((plan, itemgetter(*places)))

    def launch(self, given: Given, stream: int) -> bool:
        """Launch the kernels on these tensors; return whether it did."""
        tensors, addresses = given.tensors, given.addresses
        for shape, dtype, device in self._scratch:
            x = torch.empty(shape, dtype=dtype, device=device)
            tensors.append(x)
            addresses.append(x.data_ptr())
        # Fresh memory is aligned. Plans are for what was; an allocator of somebody else's may do as it likes.
        if any(x % 16 for x in addresses[self._given :]):
            return False
        tensors += self._lists
        addresses += self._addresses
        for plan, choose in self._steps:
            plan.launch(choose(addresses), choose(tensors), stream)
        return True


class Passes(Bounded[Pass]):
    """Passes of a layout, by key."""

    def __init__(self) -> None:
        super().__init__(lambda: MOST)


def run_pass(
    passes: Passes,
    kernels: Sequence[Any],
    numbers: Key,
    given: Sequence[Tensor | None],
    run: Callable[[], None],
    owned: Callable[[], Iterable[Tensor]],
) -> None:
    """Launch what a pass launches, again if it is kept.

    The key has all that launches depend on besides the lists: what Triton looks at, the driver and the stream
    (lists are made for a stream), configurations, the numbers of the call, and sizes, strides, dtype, device
    and alignment of each tensor.

    Args:
        passes: those of a layout.
        kernels: all that the pass may launch.
        numbers: all that it depends on besides tensors and the layout.
        given: the tensors of the caller; None where there is none.
        run: launches the kernels, and computes nothing in another way.
        owned: gives the tensors of the layout's lists.
    """
    configurations = notice_changes()
    around = surroundings(*kernels)
    if around is None:
        run()
        return
    active = driver.active
    stream = active.get_current_stream(around.device)
    found = Given([around, PLANS.state, configurations, weakref.ref(active), stream, *numbers])
    found.add_shapes(given)
    key = tuple(found.key)
    kept = passes.get(key)
    if kept is not None and kept.launch(found, stream):
        return
    tape = PLANS.record(run)
    if tape.is_whole:
        try:
            passes.put(key, Pass(tape, given, owned()))
        except LookupError:
            return
