"""Convergence: instructions at which the lanes of a warp, or the warps of a warpgroup, all come together.

A GPU waits at ``shfl.sync``, ``mma.sync``, ``wgmma`` and the like until every lane that takes part has come.
While nothing has diverged they are together anyway, and nothing is checked. Lanes that have diverged wait in
``schedule`` until ``Meeting.gathered`` says that the others are there.

The check is stricter than a GPU: a member that has exited is an error, and so are lanes of one warp that wait
for each other at two places in the text.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from .decode import Decoder, Source, Step
from .parse import Instruction
from .state import Group
from .values import Array, Mask

_EVERY_LANE = 0xFFFFFFFF
_WARPGROUP = ("wgmma.mma_async",)
_BY_MASK = ("shfl.sync", "vote.sync", "match.any.sync", "redux.sync", "elect.sync", "bar.warp.sync")


class AbsentLanes(RuntimeError):
    """A lane that an instruction needs has exited, is switched off there, or is not in the member mask."""


@dataclass(frozen=True)
class Meeting:
    """An instruction at which lanes meet.

    Attributes:
        text: the instruction.
        size: lanes that meet: 32 are a warp, 128 a warpgroup.
        members: the member mask of each lane; None for all lanes.
    """

    text: str
    size: int
    members: Source | None

    @staticmethod
    def of(ins: Instruction, code: Decoder) -> Meeting | None:
        """Return the meeting of an instruction, if it has one."""
        if ins.opcode.startswith(_BY_MASK):
            text = ins.operands[-1]
            fixed = not text.startswith("%") and int(text, 0) & _EVERY_LANE == _EVERY_LANE
            return Meeting(str(ins), 32, None if fixed else code.source(text, "b32"))
        if "aligned" not in ins.modifiers:
            return None
        return Meeting(str(ins), 128 if ins.opcode.startswith(_WARPGROUP) else 32, None)

    def gathered(self, group: Group, lanes: Array, gone: Array) -> Array:
        """Return those of the lanes at the instruction whose fellow members are all there.

        Args:
            group: the group that executes it.
            lanes: the lanes that have come.
            gone: lanes that will not come.

        Raises:
            AbsentLanes: if a member will not come, or a lane is not in its own member mask.
        """
        result = np.zeros(group.lanes, bool)
        for part, named in self._parts(group, lanes):
            self._refuse(group, part & ~named, "not in the member mask")
            missing = named & ~part & (group.thread < math.prod(group.launch.block))
            here = self._some(group, part)
            self._refuse(group, missing & gone & here, "exited or switched off")
            result |= part & ~self._some(group, missing)
        return result

    def guarded(self, step: Step) -> Step:
        """Return a step that runs for each member mask apart, and raises if a member is switched off."""

        def run(group: Group, mask: Mask) -> None:
            if mask is None and self._names_all(group):
                step(group, None)
                return
            lanes = np.ones(group.lanes, bool) if mask is None else mask
            self.gathered(group, lanes, ~lanes)
            for part, _ in self._parts(group, lanes):
                step(group, part)

        return run

    def _names_all(self, group: Group) -> bool:
        return self.members is None or bool(np.all(self.members(group) == np.uint32(_EVERY_LANE)))

    def _parts(self, group: Group, lanes: Array) -> Iterator[tuple[Array, Array]]:
        """Yield the lanes that have the same member mask, and the members that it names."""
        if self.members is None or self._names_all(group):
            yield lanes, np.ones(group.lanes, bool)
            return
        masks = group.wide(self.members(group))
        for bits in np.unique(masks[lanes]):
            yield lanes & (masks == bits), (bits >> group.lane) & np.uint32(1) != 0

    def _some(self, group: Group, lanes: Array) -> Array:
        """Return whether any lane of each lane's warp or warpgroup is among these."""
        per_cta = -(-group.threads // self.size)
        number = np.arange(group.lanes) // group.threads * per_cta + group.thread // self.size
        return np.bincount(number, lanes)[number] > 0

    def _refuse(self, group: Group, lanes: Array, why: str) -> None:
        if lanes.any():
            raise AbsentLanes(f"{self.text}: wanted all member lanes, got {name_lanes(group, lanes)} {why}")


def name_lanes(group: Group, lanes: Array) -> str:
    """Return in words which lanes of the first of their warps these are."""
    numbers = np.nonzero(lanes)[0]
    first = numbers[numbers // 32 == numbers[0] // 32]
    return f"lanes {[int(i) % 32 for i in first]} of warp {int(group.thread[first[0]]) // 32}"
