"""The issue model: one sub-partition of an SM that issues in order, at the kernel's occupancy.

Stalls and scoreboards are those the assembler wrote; widths come with each step; the latencies below are
assumed, of the order that published microbenchmarks give. Against published figures of Triton's own
attention tutorial (four points) it was within 10 %: enough to rank variants of a loop, not to state speed.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

# Cycles from issue until a scoreboard is released.
LATENCY = {
    "MUFU": 20,
    "LDS": 29,
    "LDSM": 33,
    "LDG": 450,
    "SHFL": 24,
    "LDL": 33,
    "HMMA": 18,
    "GMMA": 60,
    "memory": 20,  # other instructions of the load and store unit
    "other": 14,
}
COPY_LATENCY = 500  # of an asynchronous copy to shared memory
QUEUE = 24  # cycles that the load and store unit may lag before a warp waits for it
BARRIER = 10
TRIPS = 6
_IN_ORDER = frozenset(("fma", "alu", "xu", "uni"))


class Step(NamedTuple):
    """One instruction as the model sees it."""

    base: str
    pipe: str
    busy: float  # cycles for which it occupies its pipe
    latency: int
    stall: int
    wr: int
    rd: int
    waits: tuple[int, ...]  # scoreboards
    is_async: bool  # wgmma: started, and waited for by group
    ends_group: bool
    groups_left: int | None  # wgmma groups that may be open for it to pass
    copies_left: int | None  # groups of asynchronous copies, likewise
    is_barrier: bool

    @classmethod
    def of(
        cls, base: str, op: str, args: str, pipe: str, busy: float, stall: int, wr: int, rd: int, wait: int
    ) -> Step:
        """Read from an instruction's text what it waits for."""
        is_async = pipe == "tensor" and "GMMA" in base
        if pipe == "tensor":
            latency = LATENCY["GMMA" if is_async else "HMMA"]
        else:
            latency = LATENCY.get(base, LATENCY["memory" if pipe == "lsu" else "other"])
        return cls(
            base,
            pipe,
            busy,
            latency,
            max(1, stall),
            wr,
            rd,
            tuple(k for k in range(6) if wait >> k & 1),
            is_async,
            "gsb0" in args,
            _hex(r"gsb0, 0x(\w+)", args) if base == "WARPGROUP" and "DEPBAR" in op else None,
            _hex(r"SB0, 0x(\w+)", args) if base == "DEPBAR" else None,
            base == "BAR" and "SYNC" in op,
        )


def _hex(pattern: str, text: str) -> int | None:
    found = re.search(pattern, text)
    return int(found[1], 16) if found else None


@dataclass(eq=False)
class _Warp:
    cta: int
    at: int = 0  # place in the loop
    trip: int = 0
    ready: float = 0  # when its stall ends
    boards: list[float] = field(default_factory=lambda: [0.0] * 6)  # when each is released
    copies: list[float] = field(default_factory=list)  # when each group has landed
    copying: float = 0
    products: list[float] = field(default_factory=list)  # when each wgmma group is done
    barriers: int = 0  # passed
    is_blocked: bool = False

    def earliest(self, step: Step, free: dict[str, float]) -> float:
        """Return the first cycle at which the step can issue."""
        at = self.ready
        for k in step.waits:
            at = max(at, self.boards[k])
        if step.groups_left is not None and len(self.products) > step.groups_left:
            at = max(at, self.products[-1 - step.groups_left])
        if step.copies_left is not None and len(self.copies) > step.copies_left:
            at = max(at, self.copies[-1 - step.copies_left])
        if step.pipe in _IN_ORDER or (step.pipe == "tensor" and not step.is_async):
            at = max(at, free[step.pipe])
        elif step.pipe == "lsu":
            at = max(at, free["lsu"] - QUEUE)
        return at

    def issue(self, step: Step, now: float, free: dict[str, float]) -> None:
        """Occupy the pipe, and set when the things that later steps wait for are ready."""
        queues = step.is_async or step.pipe == "lsu"
        begin = max(now, free[step.pipe]) if queues else now
        free[step.pipe] = begin + step.busy
        keeps_pipe = step.pipe in ("lsu", "tensor")
        end = begin + step.latency + (step.busy if keeps_pipe else 0)
        if step.is_async and step.ends_group:
            self.products = [*self.products[-7:], end]
        if step.base == "LDGSTS":
            self.copying = max(self.copying, now + COPY_LATENCY)
        if step.base == "LDGDEPBAR":
            self.copies = [*self.copies[-7:], self.copying or now]
            self.copying = 0
        if step.wr < 6:
            self.boards[step.wr] = max(self.boards[step.wr], end)
        if step.rd < 6:
            self.boards[step.rd] = max(self.boards[step.rd], (free[step.pipe] if keeps_pipe else now) + 6)
        self.ready = now + step.stall


def simulate(body: Sequence[Step], warps: int, ctas: int, trips: int = TRIPS) -> float:
    """Return an SM's cycles for one block's trip round a loop.

    Args:
        body: the loop's instructions.
        warps: warps per block.
        ctas: blocks on the SM.
        trips: trips to simulate; the first and the last are dropped.

    Raises:
        RuntimeError: if warps wait for each other forever.
    """
    per_cta = max(1, warps // 4)  # a block's warps on one of four sub-partitions
    crew = [_Warp(w % ctas) for w in range(per_cta * ctas)]
    free: dict[str, float] = defaultdict(float)
    waiting: dict[tuple[int, int], list[_Warp]] = defaultdict(list)
    ends: list[float] = []
    now = 0.0
    running = list(crew)
    while running:
        times = [(w.earliest(body[w.at], free), w) for w in running if not w.is_blocked]
        if not times:
            raise RuntimeError("every warp waits at a barrier")
        able = [w for at, w in times if at <= now]
        if not able:
            now = max(now + 1, math.ceil(min(at for at, _ in times)))
            continue
        warp = min(able, key=lambda w: (w.trip, w.at))  # the one furthest behind
        step = body[warp.at]
        warp.issue(step, now, free)
        if step.is_barrier:
            key = warp.cta, warp.barriers
            warp.barriers += 1
            waiting[key].append(warp)
            warp.is_blocked = True
            if len(waiting[key]) == per_cta:
                for other in waiting.pop(key):
                    other.is_blocked = False
                    other.ready = max(other.ready, now + BARRIER)
        warp.at += 1
        if warp.at == len(body):
            warp.at, warp.trip = 0, warp.trip + 1
            ends.append(now)
            if warp.trip == trips:
                running.remove(warp)
        now += 1
    first, last = ends[len(crew) - 1], ends[len(crew) * (trips - 1) - 1]
    return (last - first) / (trips - 2) / ctas
